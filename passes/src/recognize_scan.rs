//! Finds the stabilised pair of RWKV's recurrence in scan bodies, `top = max(a, b)` with `exp(a - top)` and
//! `exp(b - top)`. One of the two is always exp(0) = 1 and the other exp(-|a - b|), so one exponential and
//! two selections do, with the same results to the bit.

use crate::pattern::{MatchFailure, OpKind, PatternMatcher, any, op, same};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::graph::{Function, FunctionKind, NodeId, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::module::{FuncId, Module};
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::DType;
use std::collections::BTreeMap;

const PASS: &str = "recognize_scan";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let mut total = 0;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        if program.module.functions[id].kind == FunctionKind::Body {
            let pairs = stabilised_pairs(&program.module, id, ctx);
            if pairs.is_empty() {
                continue;
            }
            let f = &program.module.functions[id];
            ctx.note(format!("@{}: {} stabilised pairs with one exponential each", f.name, pairs.len()));
            let rebuilt = rebuild(&program.module, f, &pairs).map_err(PassError::op_error(PASS))?;
            total += pairs.len();
            program.module.functions[id] = rebuilt;
        }
    }
    Ok(total)
}

/// The exponentials of each maximum that has both.
fn stabilised_pairs(module: &Module, id: FuncId, ctx: &mut PassContext) -> BTreeMap<ValueId, Vec<NodeId>> {
    let f = &module.functions[id];
    let top = op(OpKind::Binary(BinOp::Max), [same("x"), any("other")]).named("top");
    let below_top = op(OpKind::Binary(BinOp::Sub), [any("x"), top])
        .when("keeps the shape of the maximum", |at| at.operand_type(1) == Some(at.ty()))
        .when("has f32 elements", |at| at.ty().dtype == DType::F32);
    let pattern = op(OpKind::Unary(UnOp::Exp), [below_top]);
    let matcher = PatternMatcher::new(module, f);
    let mut found: BTreeMap<ValueId, Vec<(NodeId, ValueId)>> = BTreeMap::new();
    for (node, _) in f.live_nodes() {
        match matcher.match_node(&pattern, node) {
            Ok(captures) => found.entry(captures["top"]).or_default().push((node, captures["x"])),
            Err(MatchFailure::Near(why)) => {
                ctx.note(format!("@{}: not a stabilised exponential: {why}", f.name))
            }
            Err(MatchFailure::Other) => {}
        }
    }
    let both = |top: ValueId, found: &[(NodeId, ValueId)]| {
        let operands = f.defining_node(top).map(|n| n.inputs.as_slice()).unwrap_or_default();
        operands.len() == 2
            && operands[0] != operands[1]
            && operands.iter().all(|o| found.iter().any(|(_, x)| x == o))
    };
    let mut pairs = BTreeMap::new();
    for (top, exps) in found {
        if both(top, &exps) {
            pairs.insert(top, exps.into_iter().map(|(node, _)| node).collect());
        } else {
            ctx.note(format!("@{}: not a stabilised pair: a maximum with one exponential only", f.name));
        }
    }
    pairs
}

fn rebuild(
    module: &Module,
    f: &Function,
    pairs: &BTreeMap<ValueId, Vec<NodeId>>,
) -> Result<Function, OpError> {
    // For each pair, once emitted: 1 and exp(-|a - b|).
    let mut emitted: BTreeMap<ValueId, (ValueId, ValueId)> = BTreeMap::new();
    f.rebuild(|out, id, _, inputs| {
        let Some((&key, _)) = pairs.iter().find(|(_, exps)| exps.contains(&id)) else { return Ok(None) };
        let difference = out.defining_node(inputs[0]).map(|n| n.inputs.clone()).unwrap_or_default();
        let [x, top] = difference[..] else { return Ok(None) };
        let operands = out.defining_node(top).map(|n| n.inputs.clone()).unwrap_or_default();
        let [a, b] = operands[..] else { return Ok(None) };
        let mut one = |op: Op, inputs: &[ValueId]| Ok::<_, OpError>(out.append(module, op, inputs)?[0]);
        let (unit, small) = match emitted.get(&key) {
            Some(&known) => known,
            None => {
                let unit = one(Op::Constant { value: 1.0, dtype: DType::F32 }, &[])?;
                let distance = one(Op::Binary(BinOp::Sub), &[a, b])?;
                let distance = one(Op::Unary(UnOp::Abs), &[distance])?;
                let negative = one(Op::Unary(UnOp::Neg), &[distance])?;
                let small = one(Op::Unary(UnOp::Exp), &[negative])?;
                *emitted.entry(key).or_insert((unit, small))
            }
        };
        let (above, below) = if x == a { (unit, small) } else { (small, unit) };
        Ok(Some(vec![one(Op::SelectGe, &[a, b, above, below])?]))
    })
}
