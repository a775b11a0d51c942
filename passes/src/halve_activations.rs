//! Rounds the activations that products read to f16 on GPUs, where the name of the scheme says f16. With
//! weights that are exact as f16 as well (f16, codes of 4 and 8 bits) products take one product of tensor
//! cores where f32 activations take two or three, and half of the bytes. Sums, norms, the residual stream and
//! states stay f32: only operands of products are rounded, where they are made.
//!
//! f16 ends at 65504. Norms and values that are bounded like them stay below; other activations are clamped;
//! squares, which exceed it (RWKV), become bf16.

use crate::pattern::{MatchSite, OpKind, any, op};
use crate::rewrite::{NearMisses, RewriteBuilder, RewriteRule, apply};
use crate::{LoweredProgram, PassContext, PassError, cse};
use mlcc_ir::format::{QuantFormat, ZeroPoint};
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::module::StateId;
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::DType;
use mlcc_target::Arch;

const PASS: &str = "halve_activations";

/// The largest f16.
const LARGEST: f64 = 65504.0;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let on_gpu = ctx.options.levels.iter().any(|(_, target)| target.arch == Arch::Nvptx);
    if !on_gpu || !ctx.options.quant.has_half_activations() {
        return Ok(0);
    }
    let rewrites = [
        f16_rewrite("product on activations of bf16, which are squares", "has squares", is_square, to_bf16),
        f16_rewrite(
            "product on activations of f16",
            "has activations of a norm or alike",
            is_bounded,
            to_f16,
        ),
        f16_rewrite(
            "product on activations of f16, held in range",
            "has activations made here",
            is_made,
            to_stored_half,
        ),
    ];
    let count = apply(program, ctx, PASS, &rewrites, NearMisses::Skip)?;
    // An activation that several products read is rounded once.
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        cse::merge_equal(&mut program.module, id);
    }
    Ok(count)
}

fn f16_rewrite(
    name: &'static str,
    asks: &'static str,
    holds: fn(&MatchSite) -> bool,
    build: fn(&mut RewriteBuilder) -> Result<ValueId, OpError>,
) -> RewriteRule {
    let weight = op(OpKind::Dequantize, [any("w").when("is exact as f16", |at| is_half(at.ty().dtype))]);
    let pattern = op(OpKind::MatMul, [any("x"), weight])
        .when("has a transposed weight", |at| {
            at.node().is_some_and(|n| n.op == Op::MatMul { transpose_b: true })
        })
        .when("has f32 activations of rank 2", |at| {
            at.operand_type(0).is_some_and(|x| x.dtype == DType::F32 && x.rank() == 2)
        })
        .when(asks, holds);
    RewriteRule { name, pattern, build }
}

/// True if tensor cores multiply such weights as f16 without rounding them.
fn is_half(weight: DType) -> bool {
    let exact =
        |format: QuantFormat| matches!(format.bits, 4 | 8) && matches!(format.zero, ZeroPoint::Constant(_));
    match weight {
        DType::F16 => true,
        DType::Packed(format) => exact(format),
        _ => false,
    }
}

/// The activations before they are moved as a whole.
fn before_movement(f: &Function, v: ValueId) -> ValueId {
    match f.defining_node(v) {
        Some(node) if is_movement(&node.op) => before_movement(f, node.inputs[0]),
        _ => v,
    }
}

/// True for ops that only move values, all-gathers included: values that are rounded before have the bits of
/// one rank, and half of the bytes.
fn is_movement(op: &Op) -> bool {
    matches!(op, Op::Reshape { .. } | Op::SequenceJoin | Op::OutputRows | Op::AllGather { .. })
}

// ---- which values they may have

/// The magnitude that values can have.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum MagnitudeClass {
    /// Magnitudes like those of norms: parameters times a number around ten.
    Bounded,
    /// Magnitudes like those of results of products.
    Open,
    /// Magnitudes like those of products of such results with themselves.
    Squared,
}

/// `states`: those that are looked at already.
fn magnitude_class(f: &Function, v: ValueId, states: &mut Vec<StateId>) -> MagnitudeClass {
    let Some(node) = f.defining_node(v) else { return MagnitudeClass::Open };
    match node.op {
        Op::Param(_) | Op::Constant { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax => {
            MagnitudeClass::Bounded
        }
        // Averages of values, which are also stored as f16 in caches.
        Op::Attention(_) => MagnitudeClass::Bounded,
        Op::Unary(UnOp::Tanh | UnOp::Sigmoid | UnOp::Erf | UnOp::Sin | UnOp::Cos) => MagnitudeClass::Bounded,
        Op::Binary(BinOp::Mul) if node.inputs[0] == node.inputs[1] => MagnitudeClass::Squared,
        Op::StateRead(state) if !states.contains(&state) => {
            states.push(state);
            let writes = |n: &GraphNode| n.op == Op::StateWrite(state);
            let written = f.live_nodes().find(|(_, n)| writes(n)).map(|(_, n)| n.inputs[0]);
            written.map_or(MagnitudeClass::Open, |v| magnitude_class(f, v, states))
        }
        Op::Slice { .. } | Op::Concat { .. } | Op::Permute { .. } | Op::SequenceSplit { .. } => {
            max_magnitude(f, node, states)
        }
        ref op if op.is_elementwise() || is_movement(op) => max_magnitude(f, node, states),
        _ => MagnitudeClass::Open,
    }
}

fn max_magnitude(f: &Function, node: &GraphNode, states: &mut Vec<StateId>) -> MagnitudeClass {
    let ranges = node.inputs.iter().map(|&v| magnitude_class(f, v, states));
    ranges.max().unwrap_or(MagnitudeClass::Bounded)
}

fn range_at(at: &MatchSite) -> Option<MagnitudeClass> {
    let x = before_movement(at.f, at.node()?.inputs[0]);
    // The kernel that makes them rounds them, too.
    let node = at.f.defining_node(x)?;
    let rounds = match node.op {
        Op::Constant { .. } | Op::Cast(_) => false,
        Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax | Op::Attention(_) => true,
        Op::MatMul { transpose_b } => transpose_b,
        _ => node.op.is_elementwise(),
    };
    rounds.then(|| magnitude_class(at.f, x, &mut Vec::new()))
}

fn is_square(at: &MatchSite) -> bool {
    range_at(at) == Some(MagnitudeClass::Squared)
}

fn is_bounded(at: &MatchSite) -> bool {
    range_at(at) == Some(MagnitudeClass::Bounded)
}

fn is_made(at: &MatchSite) -> bool {
    range_at(at) == Some(MagnitudeClass::Open)
}

// ---- what takes their place

fn to_bf16(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    rebuild_product(b, |b, x| b.op(Op::Cast(DType::BF16), &[x]))
}

fn to_f16(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    rebuild_product(b, |b, x| b.op(Op::Cast(DType::F16), &[x]))
}

/// Clamps to the range of f16; NaN and infinities become NaN, so that no clamp hides them.
fn to_stored_half(b: &mut RewriteBuilder) -> Result<ValueId, OpError> {
    rebuild_product(b, |b, x| {
        let number = |b: &mut RewriteBuilder, value| b.op(Op::Constant { value, dtype: DType::F32 }, &[]);
        let [least, most, zero] = [number(b, -LARGEST)?, number(b, LARGEST)?, number(b, 0.0)?];
        let held = b.op(Op::Binary(BinOp::Min), &[x, most])?;
        let held = b.op(Op::Binary(BinOp::Max), &[held, least])?;
        // Minima and maxima are numbers where one operand is none.
        let none = b.op(Op::Binary(BinOp::Mul), &[x, zero])?;
        let held = b.op(Op::Binary(BinOp::Add), &[held, none])?;
        b.op(Op::Cast(DType::F16), &[held])
    })
}

/// The product on its activations after `round`, which is applied before they are moved.
fn rebuild_product(
    b: &mut RewriteBuilder,
    round: impl Fn(&mut RewriteBuilder, ValueId) -> Result<ValueId, OpError>,
) -> Result<ValueId, OpError> {
    let mut operands = b.operands();
    let (mut x, mut moves) = (operands[0], Vec::new());
    while let Some(node) = b.f.defining_node(x).filter(|node| is_movement(&node.op)) {
        moves.push((node.op.clone(), node.inputs.clone()));
        x = node.inputs[0];
    }
    let mut rounded = round(b, x)?;
    for (op, mut inputs) in moves.into_iter().rev() {
        inputs[0] = rounded;
        rounded = b.op(op, &inputs)?;
    }
    operands[0] = rounded;
    b.op(b.root().clone(), &operands)
}
