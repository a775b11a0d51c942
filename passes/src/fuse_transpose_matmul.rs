//! `matmul(x, permute(w))` that swaps the last two axes of `w` becomes `matmul{transpose_b}(x, w)`: the form
//! that the contraction kernels read, with the reduction axis innermost in both operands.

use crate::pattern::{MatchSite, OpKind, any, op};
use crate::rewrite::{NearMisses, RewriteRule, apply};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::ops::Op;

const PASS: &str = "fuse_transpose_matmul";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let transposed = op(OpKind::Permute, [any("w")]).when("swaps the last two axes", swaps_last_two);
    let rewrite = RewriteRule {
        name: "matmul with a transposed second operand",
        pattern: op(OpKind::MatMul, [any("x"), transposed]),
        build: |b| {
            let transpose_b = !matches!(b.root(), Op::MatMul { transpose_b: true });
            let inputs = [b.get("x"), b.get("w")];
            b.op(Op::MatMul { transpose_b }, &inputs)
        },
    };
    apply(program, ctx, PASS, &[rewrite], NearMisses::Report)
}

fn swaps_last_two(at: &MatchSite) -> bool {
    let Some(Op::Permute { perm }) = at.node().map(|n| &n.op) else { return false };
    match perm.as_slice() {
        [lead @ .., a, b] => {
            let k = lead.len();
            lead.iter().enumerate().all(|(i, &p)| i == p) && (*a, *b) == (k + 1, k)
        }
        _ => false,
    }
}
