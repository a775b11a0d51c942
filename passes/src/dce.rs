//! Removes unused parts: nodes without effect, then functions that are never invoked, then parameters that no
//! node names. States stay (they are part of what a saved session means).

use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::entity::{EntityArena, EntityId};
use mlcc_ir::graph::FunctionKind;
use mlcc_ir::module::{FuncId, Module, ParamId};
use mlcc_ir::ops::Op;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let module = &mut program.module;
    let mut removed = 0;
    for id in module.functions.ids().collect::<Vec<_>>() {
        removed += remove_dead_nodes(module, id);
    }
    removed += drop_functions(module, ctx);
    removed += drop_params(module, ctx);
    Ok(removed)
}

/// True if a node must stay although its outputs are not used.
pub fn has_effect(module: &Module, op: &Op) -> bool {
    match op {
        // A group may write states; a scan's body may not.
        Op::Call(callee) => module.functions[*callee].live_nodes().any(|(_, n)| has_effect(module, &n.op)),
        op => op.has_effect(),
    }
}

/// Removes dead nodes from the body of one function.
pub fn remove_dead_nodes(module: &mut Module, id: FuncId) -> usize {
    let f = &module.functions[id];
    let mut used = vec![false; f.values.len()];
    f.outputs.iter().for_each(|v| used[v.index()] = true);
    let mut keep = vec![false; f.nodes.len()];
    for (node_id, node) in f.live_nodes().rev() {
        if node.outputs.iter().any(|v| used[v.index()]) || has_effect(module, &node.op) {
            keep[node_id.index()] = true;
            node.inputs.iter().for_each(|v| used[v.index()] = true);
        }
    }
    let f = &mut module.functions[id];
    let before = f.body.len();
    f.body.retain(|n| keep[n.index()]);
    before - f.body.len()
}

/// Groups and bodies that nothing reachable from an entry invokes.
fn drop_functions(module: &mut Module, ctx: &mut PassContext) -> usize {
    let mut reached = vec![false; module.functions.len()];
    let entries = module.functions.iter().filter(|(_, f)| f.kind == FunctionKind::Entry);
    let mut open: Vec<FuncId> = entries.map(|(id, _)| id).collect();
    while let Some(id) = open.pop() {
        if !std::mem::replace(&mut reached[id.index()], true) {
            open.extend(module.functions[id].live_nodes().filter_map(|(_, n)| callee(&n.op)));
        }
    }
    let (kept, map) = compact_arena(&module.functions, &reached);
    let removed = module.functions.len() - kept.len();
    module.functions = kept;
    for_each_op(module, |op| match op {
        Op::Call(f) | Op::Scan { body: f, .. } => *f = map[f.index()].unwrap_or(*f),
        _ => {}
    });
    if removed > 0 {
        ctx.note(format!("{removed} functions that are never called"));
    }
    removed
}

fn callee(op: &Op) -> Option<FuncId> {
    match op {
        Op::Call(f) | Op::Scan { body: f, .. } => Some(*f),
        _ => None,
    }
}

fn drop_params(module: &mut Module, ctx: &mut PassContext) -> usize {
    let mut used = vec![false; module.params.len()];
    for f in module.functions.values() {
        for (_, node) in f.live_nodes() {
            if let Op::Param(p) = node.op {
                used[p.index()] = true;
            }
        }
    }
    for (id, param) in module.params.iter().filter(|(id, _)| !used[id.index()]) {
        ctx.note(format!("parameter {} ({id}) is not used", param.name));
    }
    let (kept, map): (_, Vec<Option<ParamId>>) = compact_arena(&module.params, &used);
    let removed = module.params.len() - kept.len();
    module.params = kept;
    for_each_op(module, |op| {
        if let Op::Param(p) = op {
            *p = map[p.index()].unwrap_or(*p);
        }
    });
    removed
}

/// The kept items, and the new id of each old one.
fn compact_arena<I: EntityId, T: Clone>(
    arena: &EntityArena<I, T>,
    keep: &[bool],
) -> (EntityArena<I, T>, Vec<Option<I>>) {
    let mut kept = EntityArena::new();
    let map = arena.iter().map(|(id, item)| keep[id.index()].then(|| kept.push(item.clone()))).collect();
    (kept, map)
}

/// Visits the ops of live nodes. Dead ones may name things that no longer exist; they are not printed,
/// verified or run.
fn for_each_op(module: &mut Module, mut visit: impl FnMut(&mut Op)) {
    for id in module.functions.ids().collect::<Vec<_>>() {
        let f = &mut module.functions[id];
        for node in f.body.clone() {
            visit(&mut f.nodes[node].op);
        }
    }
}
