//! Moves groups of nodes into functions of their own: each becomes one kernel. Equal groups share one
//! function, so the code of a model does not grow with its number of layers. The pass of this name outlines
//! what fusion left over, one node at a time.

use crate::dce::remove_dead_nodes;
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, FunctionKind, GraphNode, NodeId, ValueId};
use mlcc_ir::module::{FuncId, Module};
use mlcc_ir::ops::Op;
use std::collections::{BTreeMap, BTreeSet};

/// Nodes that stay at the top: they name memory and compute nothing.
pub fn is_top_level(op: &Op) -> bool {
    matches!(
        op,
        Op::Param(_)
            | Op::StateRead(_)
            | Op::StateWrite(_)
            | Op::CacheAppend(_)
            | Op::SequenceSplit { .. }
            | Op::SequenceJoin
            | Op::OutputRows
            | Op::AllGather { .. }
            | Op::Reshape { .. }
            | Op::Call(_)
    )
}

pub fn run(program: &mut LoweredProgram, _: &mut PassContext) -> Result<usize, PassError> {
    let mut count = 0;
    for id in entry_functions(&program.module) {
        remove_dead_nodes(&mut program.module, id);
        let f = &program.module.functions[id];
        let single = |(id, _)| KernelGroup { nodes: vec![id], copied: vec![] };
        let groups: Vec<KernelGroup> =
            f.live_nodes().filter(|(_, n)| !is_top_level(&n.op)).map(single).collect();
        count += groups.len();
        outline(&mut program.module, id, &groups);
    }
    Ok(count)
}

pub fn entry_functions(module: &Module) -> Vec<FuncId> {
    module.functions.iter().filter(|(_, f)| f.kind == FunctionKind::Entry).map(|(id, _)| id).collect()
}

/// The nodes that one kernel computes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KernelGroup {
    /// Nodes in execution order.
    pub nodes: Vec<NodeId>,
    /// Nodes among them that are computed here for this group alone: others that need the value compute it
    /// too, or get it from the one group that lists it in `nodes` only.
    pub copied: Vec<NodeId>,
}

/// Replaces each group by a call. Every node that is not top-level belongs to exactly one group, or is copied
/// into all that use it. Groups must not depend on each other in a circle.
pub fn outline(module: &mut Module, id: FuncId, groups: &[KernelGroup]) {
    let f = module.functions[id].clone();
    let mut outliner = GroupOutliner::new(&f, groups);
    outliner.find_outputs();
    for &node in &f.body {
        outliner.emit(module, node);
    }
    let mut new = outliner.new;
    new.outputs = f.outputs.iter().map(|v| outliner.map[v]).collect();
    module.functions[id] = new;
}

struct GroupOutliner<'a> {
    f: &'a Function,
    groups: &'a [KernelGroup],
    /// The group that provides a node's outputs to others.
    home: BTreeMap<NodeId, usize>,
    /// Reshapes that are part of groups and are nowhere else.
    inside: BTreeSet<NodeId>,
    outputs: Vec<Vec<ValueId>>,
    done_groups: Vec<bool>,
    new: Function,
    map: BTreeMap<ValueId, ValueId>,
}

impl<'a> GroupOutliner<'a> {
    fn new(f: &'a Function, groups: &'a [KernelGroup]) -> Self {
        let mut home = BTreeMap::new();
        for (g, group) in groups.iter().enumerate() {
            for node in group.nodes.iter().filter(|n| !group.copied.contains(n)) {
                let other = home.insert(*node, g);
                debug_assert!(other.is_none(), "{node} belongs to two groups");
            }
        }
        let mut new = Function::new(f.name.clone(), f.kind);
        let map = f.inputs.iter().map(|&v| (v, new.add_input(f.ty(v).clone()))).collect();
        let outputs = vec![Vec::new(); groups.len()];
        let reshapes = groups.iter().flat_map(|group| &group.copied).copied();
        let inside = reshapes.filter(|n| is_top_level(&f.nodes[*n].op)).collect();
        GroupOutliner { f, groups, home, inside, outputs, done_groups: vec![false; groups.len()], new, map }
    }

    /// Values that are used outside of the groups that compute them.
    fn find_outputs(&mut self) {
        let mut needed: Vec<bool> = vec![false; self.f.values.len()];
        let stays = |(id, node): &(NodeId, &GraphNode)| is_top_level(&node.op) && !self.inside.contains(id);
        for (_, node) in self.f.live_nodes().filter(stays) {
            node.inputs.iter().for_each(|v| needed[v.index()] = true);
        }
        self.f.outputs.iter().for_each(|v| needed[v.index()] = true);
        for group in self.groups {
            for v in self.external(&group.nodes) {
                needed[v.index()] = true;
            }
        }
        for (id, node) in self.f.live_nodes() {
            if let Some(&g) = self.home.get(&id) {
                // The kernel of a scan stores all results, or states and what else of its group is needed.
                let all = match node.op {
                    Op::Scan { .. } if self.groups[g].nodes.len() == 1 => node.outputs.len(),
                    Op::Scan { carries, .. } => carries,
                    _ => 0,
                };
                let stored = node.outputs.iter().enumerate();
                let stored = stored.filter(|(i, v)| *i < all || needed[v.index()]).map(|(_, v)| *v);
                self.outputs[g].extend(stored);
            }
        }
    }

    /// Inputs of a group in order of first use.
    fn external(&self, nodes: &[NodeId]) -> Vec<ValueId> {
        let mut inputs: Vec<ValueId> = Vec::new();
        for &node in nodes {
            for &v in &self.f.nodes[node].inputs {
                let inside = self.f.def_id(v).is_some_and(|d| nodes.contains(&d));
                if !inside && !inputs.contains(&v) {
                    inputs.push(v);
                }
            }
        }
        inputs
    }

    /// Emits the node, or the call of its group, after everything it needs.
    fn emit(&mut self, module: &mut Module, node: NodeId) {
        match self.home.get(&node) {
            Some(&g) if self.done_groups[g] => {}
            Some(&g) => {
                self.done_groups[g] = true;
                let inputs = self.external(&self.groups[g].nodes);
                self.emit_all(module, &inputs);
                self.emit_call(module, g, &inputs);
            }
            // Copied into its users.
            None if !is_top_level(&self.f.nodes[node].op) || self.inside.contains(&node) => {}
            None => {
                let outputs = self.f.nodes[node].outputs.clone();
                if outputs.first().is_some_and(|v| self.map.contains_key(v)) {
                    return;
                }
                let inputs = self.f.nodes[node].inputs.clone();
                self.emit_all(module, &inputs);
                let mapped: Vec<ValueId> = inputs.iter().map(|v| self.map[v]).collect();
                let types = outputs.iter().map(|&v| self.f.ty(v).clone()).collect();
                let new = self.new.append_typed(self.f.nodes[node].op.clone(), &mapped, types);
                self.map.extend(outputs.into_iter().zip(new));
            }
        }
    }

    fn emit_all(&mut self, module: &mut Module, values: &[ValueId]) {
        for &v in values {
            if let Some(def) = self.f.def_id(v) {
                self.emit(module, def);
            }
        }
    }

    fn emit_call(&mut self, module: &mut Module, g: usize, inputs: &[ValueId]) {
        let outputs = self.outputs[g].clone();
        let callee = self.group_function(module, &self.groups[g].nodes, inputs, &outputs);
        let args: Vec<ValueId> = inputs.iter().map(|v| self.map[v]).collect();
        let types = outputs.iter().map(|&v| self.f.ty(v).clone()).collect();
        let new = self.new.append_typed(Op::Call(callee), &args, types);
        self.map.extend(outputs.into_iter().zip(new));
    }

    /// The function of a group; an equal one is used again.
    fn group_function(
        &self,
        module: &mut Module,
        nodes: &[NodeId],
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) -> FuncId {
        let mut g = Function::new("", FunctionKind::Group);
        let mut map: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        for &v in inputs {
            map.insert(v, g.add_input(self.f.ty(v).clone()));
        }
        for &node in nodes {
            let node = &self.f.nodes[node];
            let args: Vec<ValueId> = node.inputs.iter().map(|v| map[v]).collect();
            let types = node.outputs.iter().map(|&v| self.f.ty(v).clone()).collect();
            let new = g.append_typed(node.op.clone(), &args, types);
            map.extend(node.outputs.iter().copied().zip(new));
        }
        g.outputs = outputs.iter().map(|v| map[v]).collect();
        let equal = |other: &Function| {
            other.kind == FunctionKind::Group
                && other.inputs == g.inputs
                && other.outputs == g.outputs
                && other.body == g.body
                && other.nodes.values().eq(g.nodes.values())
                && other.values.values().eq(g.values.values())
                // `==` takes 0.0 for -0.0, the debug form of an op does not.
                && other.nodes.values().zip(g.nodes.values()).all(|(a, b)| {
                    format!("{:?}", a.op) == format!("{:?}", b.op)
                })
        };
        if let Some((id, _)) = module.functions.iter().find(|(_, other)| equal(other)) {
            return id;
        }
        let base = group_name(module, &g);
        let mut name = base.clone();
        let mut number = 1;
        while module.function(&name).is_some() {
            number += 1;
            name = format!("{base}_{number}");
        }
        g.name = name;
        module.functions.push(g)
    }
}

/// A name by the work of the group: its main op with its sizes.
fn group_name(module: &Module, g: &Function) -> String {
    let rank = |op: &Op| match op {
        Op::Scan { .. }
        | Op::MatMul { .. }
        | Op::MatMulI8 { .. }
        | Op::MatMulExperts { .. }
        | Op::MatMulExpertsI8 { .. }
        | Op::Attention(_) => 4,
        Op::Gather
        | Op::TopK { .. }
        | Op::GroupScale { .. }
        | Op::GroupQuantize { .. }
        | Op::GroupSum { .. }
        | Op::QuantizeRows { .. }
        | Op::Dequantize => 3,
        Op::Reduce { .. } => 2,
        Op::Unary(_) | Op::Binary(_) | Op::SelectGe => 1,
        _ => 0,
    };
    let main =
        g.live_nodes().map(|(_, n)| n).fold(None, |best: Option<&mlcc_ir::graph::GraphNode>, n| match best {
            Some(b) if rank(&b.op) >= rank(&n.op) => Some(b),
            _ => Some(n),
        });
    let Some(main) = main else { return "empty".into() };
    let what = match &main.op {
        Op::Scan { body, .. } => format!("scan_{}", module.functions[*body].name),
        Op::MatMul { .. } | Op::MatMulI8 { .. } => {
            let w = g.ty(main.inputs[main.inputs.len() - 1]);
            let sizes: Vec<String> = w.dims.iter().map(|d| d.to_string()).collect();
            format!("{}_{}", main.op.name(), sizes.join("x"))
        }
        Op::MatMulExperts { experts } | Op::MatMulExpertsI8 { experts, .. } => {
            let weight = main.inputs[main.inputs.len() - 2];
            let [n, k] = [0, 1].map(|axis| g.ty(weight).dims[axis].clone());
            format!("{}_{experts}x{}x{k}", main.op.name(), n.floor_div(*experts as i64))
        }
        Op::Reduce { .. } => "norm".into(),
        op => op.name().to_string(),
    };
    what.replace(|c: char| !c.is_ascii_alphanumeric() && c != '_', "_")
}
