//! Products of f32 activations with packed weights become products of int8 codes: the activations are quantized per
//! group at run time, once for every product that reads the same ones. For schemes that ask for it, on CPUs.

use crate::pattern::{At, OpKind, any, op};
use crate::rewrite::{Build, Misses, Rewrite, apply};
use crate::scheme::ActivationType;
use crate::{Context, PassError, Program, cse};
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::{DType, TensorType};
use mlcc_target::Arch;

const PASS: &str = "quantize_activations";

pub fn run(program: &mut Program, ctx: &mut Context) -> Result<usize, PassError> {
    if ctx.options.quant.activation != ActivationType::I8 {
        return Ok(0);
    }
    if ctx.options.levels.first().is_some_and(|(_, target)| target.arch == Arch::Nvptx) {
        ctx.note(format!("{} keeps f32 activations on a GPU", ctx.options.quant.name));
        return Ok(0);
    }
    let weight = op(OpKind::Dequantize, [any("w").when("is packed", |at| at.ty().dtype.is_packed())]);
    let rewrite = Rewrite {
        name: "product with a packed weight on int8 activations",
        pattern: op(OpKind::MatMul, [any("x"), weight])
            .when("has a transposed weight", transposed)
            .when("has f32 activations of rank 2", |at| at.operand(0).is_some_and(is_f32_matrix)),
        build,
    };
    let count = apply(program, ctx, PASS, &[rewrite], Misses::Tell)?;
    // Codes, scales and sums of the same activations are computed once.
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        cse::merge_equal(&mut program.module, id);
    }
    Ok(count)
}

fn transposed(at: &At) -> bool {
    at.node().is_some_and(|n| n.op == Op::MatMul { transpose_b: true })
}

fn is_f32_matrix(ty: &TensorType) -> bool {
    ty.dtype == DType::F32 && ty.rank() == 2
}

fn build(b: &mut Build) -> Result<ValueId, OpError> {
    let (x, w) = (b.get("x"), b.get("w"));
    let group = match b.f.ty(w).dtype {
        DType::Packed(format) => format.group(),
        other => unreachable!("{other} is not packed"),
    };
    let scales = b.op(Op::GroupScale { group }, &[x])?;
    let codes = b.op(Op::GroupQuantize { group }, &[x, scales])?;
    let sums = b.op(Op::GroupSum { group }, &[codes])?;
    b.op(Op::MatMulI8 { group }, &[codes, scales, sums, w])
}
