//! Products of f32 activations with packed weights become products of integer codes: the activations are
//! quantized per group at run time, once for every product that reads the same ones. For CPUs: to 8 bits
//! where the scheme asks for it, otherwise to 16 bits, which serve the same dot instructions several times
//! faster than weights unpacked to f32.
//!
//! Where the scheme asks for it, activations of products with bf16 weights are rounded to bf16, also once for
//! all products.

use crate::pattern::{MatchSite, OpKind, any, op};
use crate::rewrite::{NearMisses, RewriteBuilder, RewriteRule, apply};
use crate::scheme::ActivationType;
use crate::{LoweredProgram, PassContext, PassError, cse};
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::experts::is_tiled;
use mlcc_kernels::params::IntDot;
use mlcc_target::Arch;

const PASS: &str = "quantize_activations";

/// Columns per scale of the activations. Smaller groups cost a multiplication per group and result, larger
/// ones accuracy.
const GROUP: usize = 128;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let scheme = ctx.options.quant;
    let bits_8 = scheme.activation == ActivationType::I8;
    let mut targets = ctx.options.levels.iter().map(|(_, target)| target);
    if ctx.options.levels.iter().any(|(_, target)| target.arch == Arch::Nvptx) {
        if scheme.activation != ActivationType::F32 {
            ctx.note(format!("{} keeps f32 activations on a GPU", scheme.name));
        }
        return Ok(0);
    }
    // Without dot instructions integers are no faster than floats.
    let bits_16 = !ctx.options.levels.is_empty() && targets.all(|t| t.int_dot() != IntDot::Widen);
    let mut count = 0;
    if scheme.activation == ActivationType::BF16 {
        count += apply(program, ctx, PASS, &on_bf16(), NearMisses::Report)?;
    }
    if bits_8 || bits_16 {
        let misses = if bits_8 { NearMisses::Report } else { NearMisses::Skip };
        count += apply(program, ctx, PASS, &on_integers(bits_8), misses)?;
    }
    // Codes of the same activations are computed once.
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        cse::merge_equal(&mut program.module, id);
    }
    Ok(count)
}

fn on_integers(bits_8: bool) -> [RewriteRule; 2] {
    let weight = op(OpKind::Dequantize, [any("w").when("is packed for integer products", has_integers)]);
    let build: fn(&mut RewriteBuilder) -> Result<ValueId, OpError> =
        if bits_8 { |b| on_codes(b, 8) } else { |b| on_codes(b, 16) };
    [
        RewriteRule {
            name: "product with a packed weight on integer activations",
            pattern: op(OpKind::MatMul, [any("x"), weight.clone()])
                .when("has a transposed weight", transposed)
                .when("has f32 activations of rank 2", |at| at.operand_type(0).is_some_and(|x| is_f32(x, 2))),
            build,
        },
        RewriteRule {
            name: "product with chosen experts on integer activations",
            pattern: op(OpKind::MatMulExperts, [any("x"), weight, any("ids")])
                .when("has experts of whole tiles", |at| at.node().is_some_and(|n| is_tiled(at.f, n)))
                .when("has f32 activations of rank 3", |at| at.operand_type(0).is_some_and(|x| is_f32(x, 3))),
            build,
        },
    ]
}

fn on_bf16() -> [RewriteRule; 2] {
    let weight =
        op(OpKind::Dequantize, [any("w").when("is stored as bf16", |at| at.ty().dtype == DType::BF16)]);
    let build: fn(&mut RewriteBuilder) -> Result<ValueId, OpError> = |b| {
        let mut operands = b.operands();
        operands[0] = b.op(Op::Cast(DType::BF16), &operands[..1])?;
        b.op(b.root().clone(), &operands)
    };
    [
        RewriteRule {
            name: "product with a bf16 weight on bf16 activations",
            pattern: op(OpKind::MatMul, [any("x"), weight.clone()])
                .when("has a transposed weight", transposed)
                .when("has f32 activations", |at| at.operand_type(0).is_some_and(|x| x.dtype == DType::F32)),
            build,
        },
        RewriteRule {
            name: "product with chosen experts of bf16 on bf16 activations",
            pattern: op(OpKind::MatMulExperts, [any("x"), weight, any("ids")])
                .when("has f32 activations", |at| at.operand_type(0).is_some_and(|x| x.dtype == DType::F32)),
            build,
        },
    ]
}

fn has_integers(at: &MatchSite) -> bool {
    matches!(at.ty().dtype, DType::Packed(format) if format.has_integer_products())
}

fn transposed(at: &MatchSite) -> bool {
    at.node().is_some_and(|n| n.op == Op::MatMul { transpose_b: true })
}

fn is_f32(ty: &TensorType, rank: usize) -> bool {
    ty.dtype == DType::F32 && ty.rank() == rank
}

fn on_codes(b: &mut RewriteBuilder, bits: usize) -> Result<ValueId, OpError> {
    let (x, w) = (b.get("x"), b.get("w"));
    let format = match b.f.ty(w).dtype {
        DType::Packed(format) => format,
        other => unreachable!("{other} is not packed"),
    };
    let (part, zero) = (format.block_columns(), mlcc_quant::tile::sum_factor(format) as usize);
    let quantize = Op::QuantizeRows { group: GROUP, bits, part, zero };
    let codes = b.f.append(b.module, quantize, &[x])?;
    match *b.root() {
        Op::MatMulExperts { experts } => {
            let op = Op::MatMulExpertsI8 { experts, group: GROUP };
            let ids = b.get("ids");
            b.op(op, &[codes[0], codes[1], codes[2], w, ids])
        }
        _ => b.op(Op::MatMulI8 { group: GROUP }, &[codes[0], codes[1], codes[2], w]),
    }
}
