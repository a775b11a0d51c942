//! Moves what only the logits need after the last use of a state in `prefill`. A chunk of a prompt that is
//! not the last ends before these kernels: its caller needs only the states.

use crate::dce::has_effect;
use crate::outline::entry_functions;
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, NodeId};
use mlcc_ir::module::{FuncId, Module};
use mlcc_ir::ops::Op;

/// The entry point whose logits may be unwanted; that with adapters ends so too.
const ENTRY: &str = "prefill";

pub fn run(program: &mut LoweredProgram, _: &mut PassContext) -> Result<usize, PassError> {
    let module = &mut program.module;
    let mut moved = 0;
    for id in entry_functions(module) {
        if module.functions[id].name.ends_with(ENTRY) {
            moved += defer(module, id);
        }
    }
    Ok(moved)
}

/// Returns how many nodes come later than before.
fn defer(module: &mut Module, id: FuncId) -> usize {
    let for_states = nodes_for_states(module, &module.functions[id]);
    let is_for_states = |node: &NodeId| for_states[node.index()];
    let body = &mut module.functions[id].body;
    let Some(last) = body.iter().rposition(is_for_states) else { return 0 };
    let (first, later): (Vec<_>, Vec<_>) = body.iter().partition(|node| is_for_states(node));
    let moved = body[..last].iter().filter(|node| !is_for_states(node)).count();
    *body = first.into_iter().chain(later).collect();
    moved
}

/// The nodes that write states or read them, and all that these depend on, by number of the node. Readers
/// count, since what a state held before must be read before it is written.
fn nodes_for_states(module: &Module, f: &Function) -> Vec<bool> {
    let mut is_state = vec![false; f.values.len()];
    let mut found = vec![false; f.nodes.len()];
    for (id, node) in f.live_nodes() {
        let reads = node.inputs.iter().any(|v| is_state[v.index()]);
        let names_state = matches!(node.op, Op::StateRead(_) | Op::CacheAppend(_))
            || (reads && matches!(node.op, Op::Reshape { .. } | Op::SequenceSplit { .. }));
        if names_state {
            node.outputs.iter().for_each(|v| is_state[v.index()] = true);
        }
        found[id.index()] = reads || names_state || has_effect(module, &node.op);
    }
    let mut needed = vec![false; f.values.len()];
    for (id, node) in f.live_nodes().rev() {
        if found[id.index()] || node.outputs.iter().any(|v| needed[v.index()]) {
            found[id.index()] = true;
            node.inputs.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    found
}
