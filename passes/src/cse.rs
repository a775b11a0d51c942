//! Common subexpressions: nodes with equal ops (attributes to the bit) and equal inputs are computed once.
//! State reads count as equal because a read gives the value from before the step wherever it is.

use crate::dce::has_effect;
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::graph::{NodeId, ValueId};
use mlcc_ir::module::{FuncId, Module};
use std::collections::BTreeMap;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let mut total = 0;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let merged = merge_equal(&mut program.module, id);
        if merged > 0 {
            ctx.note(format!("@{}: {merged} nodes computed before", program.module.functions[id].name));
        }
        total += merged;
    }
    Ok(total)
}

/// Merges equal nodes of one function; returns how many went.
pub fn merge_equal(module: &mut Module, id: FuncId) -> usize {
    let mut f = module.functions[id].clone();
    // An op's debug form shows every attribute exactly (0.0 and -0.0 differ, which `==` does not see).
    let mut known: BTreeMap<(String, Vec<ValueId>), NodeId> = BTreeMap::new();
    let mut stand_in: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let before = f.body.len();
    let mut kept = Vec::with_capacity(before);
    for node_id in std::mem::take(&mut f.body) {
        for v in &mut f.nodes[node_id].inputs {
            *v = *stand_in.get(v).unwrap_or(v);
        }
        let node = &f.nodes[node_id];
        if !has_effect(module, &node.op) {
            let key = (format!("{:?}", node.op), node.inputs.clone());
            if let Some(&first) = known.get(&key) {
                let outputs = node.outputs.iter().copied().zip(f.nodes[first].outputs.iter().copied());
                stand_in.extend(outputs);
                continue;
            }
            known.insert(key, node_id);
        }
        kept.push(node_id);
    }
    let merged = before - kept.len();
    f.body = kept;
    for v in &mut f.outputs {
        *v = *stand_in.get(v).unwrap_or(v);
    }
    module.functions[id] = f;
    merged
}
