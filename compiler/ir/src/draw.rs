//! Drawings of a module as text for Graphviz: one box for each kernel of an entry function, with the ops that
//! were fused into it, edges with the type of the value. Parameters are lines in the boxes that read them,
//! views are left out.

use crate::entity::EntityId;
use crate::graph::{Function, FunctionKind, GraphNode, NodeId, ValueDef, ValueId};
use crate::module::{Module, StateId};
use crate::ops::Op;
use std::collections::BTreeSet;

/// Most lines of ops in a box.
const LINES: usize = 12;

/// Entry functions side by side; all functions where there is no entry function.
pub fn dot(module: &Module) -> String {
    let is_entry = |f: &&Function| f.kind == FunctionKind::Entry;
    let mut drawn: Vec<&Function> = module.functions.values().filter(is_entry).collect();
    if drawn.is_empty() {
        drawn = module.functions.values().collect();
    }
    let mut out = format!(
        "digraph {} {{\n  node [shape=box, style=filled, fillcolor=white, fontname=Helvetica, fontsize=10];\n  \
         edge [fontname=Helvetica, fontsize=8];\n",
        quoted(&module.name)
    );
    for (i, f) in drawn.into_iter().enumerate() {
        let drawing = GraphDrawing { module, f, number: i, from: vec![None; f.values.len()], lines: vec![] };
        out.push_str(&drawing.finish());
    }
    out.push_str("}\n");
    out
}

struct GraphDrawing<'a> {
    module: &'a Module,
    f: &'a Function,
    number: usize,
    /// The box that each value comes from.
    from: Vec<Option<String>>,
    lines: Vec<String>,
}

impl GraphDrawing<'_> {
    fn finish(mut self) -> String {
        for (i, &v) in self.f.inputs.iter().enumerate() {
            let id = format!("f{}in{i}", self.number);
            let label = format!("input {i}\n{}", self.f.ty(v));
            self.vertex(&id, &label, ", shape=ellipse");
            self.from[v.index()] = Some(id);
        }
        for state in self.states() {
            let label = format!("{}\n{}", self.module.states[state].name, self.module.states[state].ty);
            self.vertex(&self.state_id(state), &label, ", shape=cylinder");
        }
        for (id, node) in self.f.live_nodes() {
            self.node(id, node);
        }
        for (i, v) in self.f.outputs.iter().enumerate() {
            let id = format!("f{}out{i}", self.number);
            self.vertex(&id, &format!("output {i}"), ", shape=ellipse");
            self.edge(*v, &id);
        }
        let (number, name) = (self.number, quoted(&self.f.name));
        let head = format!("  subgraph cluster{number} {{\n    label={name}; fontname=Helvetica;\n");
        format!("{head}{}  }}\n", self.lines.concat())
    }

    fn vertex(&mut self, id: &str, label: &str, style: &str) {
        self.lines.push(format!("    {id} [label={}{style}];\n", quoted(label)));
    }

    /// Draws an edge from the box of a value, if it has one.
    fn edge(&mut self, v: ValueId, to: &str) {
        if let Some(from) = &self.from[v.index()] {
            let label = quoted(&self.f.ty(v).to_string());
            self.lines.push(format!("    {from} -> {to} [label={label}];\n"));
        }
    }

    fn states(&self) -> BTreeSet<StateId> {
        let state = |node: &GraphNode| match node.op {
            Op::StateRead(s) | Op::StateWrite(s) | Op::CacheAppend(s) => Some(s),
            _ => None,
        };
        self.f.live_nodes().filter_map(|(_, node)| state(node)).collect()
    }

    fn state_id(&self, state: StateId) -> String {
        format!("f{}s{}", self.number, state.index())
    }

    fn node(&mut self, id: NodeId, node: &GraphNode) {
        let from = match node.op {
            Op::Param(_) => None,
            Op::Reshape { .. } | Op::SequenceSplit { .. } | Op::SequenceJoin | Op::OutputRows => {
                node.inputs.first().and_then(|v| self.from[v.index()].clone())
            }
            Op::StateRead(state) => Some(self.state_id(state)),
            Op::StateWrite(state) | Op::CacheAppend(state) => {
                let to = self.state_id(state);
                node.inputs.iter().for_each(|&v| self.edge(v, &to));
                Some(to)
            }
            _ => {
                let to = format!("f{}n{}", self.number, id.index());
                self.vertex(&to, &self.label(node), "");
                let read: BTreeSet<ValueId> = node.inputs.iter().copied().collect();
                read.into_iter().for_each(|v| self.edge(v, &to));
                Some(to)
            }
        };
        for v in &node.outputs {
            self.from[v.index()].clone_from(&from);
        }
    }

    /// Name, ops of a group or body, types of the weights.
    fn label(&self, node: &GraphNode) -> String {
        let callee = match node.op {
            Op::Call(id) | Op::Scan { body: id, .. } => self.module.functions.get(id),
            _ => None,
        };
        let mut lines = vec![callee.map_or(node.op.name(), |f| &f.name).to_string()];
        lines.extend(callee.map(ops).unwrap_or_default());
        lines.extend(node.inputs.iter().filter_map(|&v| self.weight(v)));
        lines.join("\n")
    }

    /// The type of a matrix of weights.
    fn weight(&self, v: ValueId) -> Option<String> {
        let ValueDef::Node(def, _) = self.f.values[v].def else { return None };
        match self.f.nodes[def].op {
            Op::Param(_) if self.f.ty(v).rank() == 2 => Some(format!("weights {}", self.f.ty(v))),
            Op::Reshape { .. } => self.weight(*self.f.nodes[def].inputs.first()?),
            _ => None,
        }
    }
}

/// Names of the ops in execution order, equal neighbours counted.
fn ops(f: &Function) -> Vec<String> {
    let mut runs: Vec<(&str, usize)> = Vec::new();
    for (_, node) in f.live_nodes() {
        match runs.last_mut() {
            Some((name, count)) if *name == node.op.name() => *count += 1,
            _ => runs.push((node.op.name(), 1)),
        }
    }
    let left = runs.len().saturating_sub(LINES);
    let line = |&(name, count): &(&str, usize)| match count {
        1 => name.to_string(),
        _ => format!("{name} × {count}"),
    };
    let mut lines: Vec<String> = runs.iter().take(LINES).map(line).collect();
    lines.extend((left > 0).then(|| format!("and {left} more")));
    lines
}

/// A string of Graphviz.
fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{text}\"")
}
