//! Prints graph functions. Values are numbered in the order in which they are defined.

use super::lexer::{print_float, print_name};
use crate::entity::EntityId;
use crate::graph::{Function, FunctionKind, GraphNode, NodeId, ValueId};
use crate::module::{FuncId, Module};
use crate::ops::{AttrValue, Op};
use crate::types::TensorType;

impl FunctionKind {
    pub const ALL: [FunctionKind; 3] = [FunctionKind::Entry, FunctionKind::Body, FunctionKind::Group];
    pub fn name(self) -> &'static str {
        match self {
            FunctionKind::Entry => "entry",
            FunctionKind::Body => "body",
            FunctionKind::Group => "group",
        }
    }
}

/// Numbers of a function's values in print.
pub struct ValueNames {
    numbers: Vec<Option<u32>>,
}

impl ValueNames {
    pub fn new(f: &Function) -> ValueNames {
        let mut numbers = vec![None; f.values.len()];
        let outputs = f.body.iter().filter_map(|&id| f.nodes.get(id)).flat_map(|n| &n.outputs);
        let mut next = 0;
        for v in f.inputs.iter().chain(outputs) {
            if let Some(slot @ None) = numbers.get_mut(v.index()) {
                *slot = Some(next);
                next += 1;
            }
        }
        ValueNames { numbers }
    }
    /// `%3`; a value that is not defined in the function shows its id.
    pub fn name(&self, v: ValueId) -> String {
        match self.numbers.get(v.index()).copied().flatten() {
            Some(number) => format!("%{number}"),
            None => format!("%<undefined {v}>"),
        }
    }
    fn list(&self, values: &[ValueId]) -> String {
        join(values.iter().map(|&v| self.name(v)))
    }
}

/// The name of a node in messages: `%3 = matmul`.
pub fn node_label(f: &Function, id: NodeId) -> String {
    match f.nodes.get(id) {
        Some(node) if node.outputs.is_empty() => node.op.name().to_string(),
        Some(node) => format!("{} = {}", ValueNames::new(f).list(&node.outputs), node.op.name()),
        None => id.to_string(),
    }
}

/// A function as text, lines indented by two spaces inside its braces, ending with a newline.
pub fn print_function(module: &Module, f: &Function) -> String {
    let names = ValueNames::new(f);
    let inputs = join(f.inputs.iter().map(|&v| format!("{}: {}", names.name(v), f.ty(v))));
    let outputs = join(f.outputs.iter().map(|&v| f.ty(v)));
    let mut out = format!("fn {}({inputs}) -> ({outputs}) {} {{\n", print_name('@', &f.name), f.kind.name());
    for (_, node) in f.live_nodes() {
        out.push_str(&format!("  {}\n", print_node(module, f, &names, node)));
    }
    let ret = format!("  ret {}", names.list(&f.outputs));
    out.push_str(ret.trim_end());
    out.push_str("\n}\n");
    out
}

/// Nodes of a function, one per line, each with its operands, attributes and type.
pub fn print_nodes(module: &Module, f: &Function, nodes: &[NodeId]) -> String {
    let names = ValueNames::new(f);
    let line = |id: &NodeId| f.nodes.get(*id).map(|n| format!("{}\n", print_node(module, f, &names, n)));
    nodes.iter().filter_map(line).collect()
}

fn print_node(module: &Module, f: &Function, names: &ValueNames, node: &GraphNode) -> String {
    let mut out = String::new();
    if !node.outputs.is_empty() {
        out.push_str(&format!("{} = ", names.list(&node.outputs)));
    }
    out.push_str(node.op.name());
    let operands = node.inputs.iter().map(|&v| names.name(v));
    let operands = join(op_symbol(module, &node.op).into_iter().chain(operands));
    if !operands.is_empty() {
        out.push_str(&format!(" {operands}"));
    }
    let attrs = node.op.attrs();
    if !attrs.is_empty() {
        let attrs = attrs.iter().map(|(name, attr)| format!("{name} = {}", print_attr(module, attr)));
        out.push_str(&format!(" {{{}}}", join(attrs)));
    }
    if !node.outputs.is_empty() {
        let types: Vec<&TensorType> = node.outputs.iter().map(|&v| f.ty(v)).collect();
        out.push_str(&format!(" : {}", join(types)));
    }
    out
}

/// The name before the operands.
fn op_symbol(module: &Module, op: &Op) -> Option<String> {
    let (name, id) = match op {
        Op::Param(id) => (module.params.get(*id).map(|p| &p.name), id.to_string()),
        Op::StateRead(id) | Op::StateWrite(id) | Op::CacheAppend(id) => {
            (module.states.get(*id).map(|s| &s.name), id.to_string())
        }
        _ => return None,
    };
    Some(name.map_or_else(|| undefined(&id), |name| print_name('@', name)))
}

/// The name of something that does not exist; does not parse.
fn undefined(id: &str) -> String {
    format!("@<undefined {id}>")
}

fn print_attr(module: &Module, attr: &AttrValue) -> String {
    let function = |id: FuncId| match module.functions.get(id) {
        Some(f) => print_name('@', &f.name),
        None => undefined(&id.to_string()),
    };
    match attr {
        AttrValue::Int(v) => v.to_string(),
        AttrValue::Float(v) => print_float(*v),
        AttrValue::Bool(v) => v.to_string(),
        AttrValue::DType(v) => v.to_string(),
        AttrValue::Ints(v) => format!("[{}]", join(v)),
        AttrValue::Dim(v) => v.to_string(),
        AttrValue::Dims(v) => format!("[{}]", join(v)),
        AttrValue::Function(id) => function(*id),
    }
}

pub(super) fn join(items: impl IntoIterator<Item = impl ToString>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
}
