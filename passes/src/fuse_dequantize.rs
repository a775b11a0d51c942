//! Products and gathers read stored weights themselves: `matmul(x, dequantize(w))` is `matmul(x, w)`, and of
//! a table only the rows that are gathered are dequantized.

use crate::pattern::{OpKind, any, op};
use crate::rewrite::{NearMisses, RewriteRule, apply};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

const PASS: &str = "fuse_dequantize";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let stored = |name| op(OpKind::Dequantize, [any(name)]);
    let rewrites = [
        RewriteRule {
            name: "product that reads the stored weight",
            pattern: op(OpKind::MatMul, [any("x"), stored("w")]),
            build: |b| {
                let inputs = [b.get("x"), b.get("w")];
                b.op(b.root().clone(), &inputs)
            },
        },
        RewriteRule {
            name: "product with chosen experts that reads the stored weight",
            pattern: op(OpKind::MatMulExperts, [any("x"), stored("w"), any("ids")]),
            build: |b| {
                let inputs = [b.get("x"), b.get("w"), b.get("ids")];
                b.op(b.root().clone(), &inputs)
            },
        },
        RewriteRule {
            name: "gather that reads the stored table",
            pattern: op(OpKind::Gather, [stored("table"), any("ids")]),
            build: |b| {
                let inputs = [b.get("table"), b.get("ids")];
                let rows = b.op(Op::Gather, &inputs)?;
                match b.f.ty(rows).dtype {
                    DType::F32 => Ok(rows),
                    _ => b.op(Op::Cast(DType::F32), &[rows]),
                }
            },
        },
    ];
    apply(program, ctx, PASS, &rewrites, NearMisses::Report)
}
