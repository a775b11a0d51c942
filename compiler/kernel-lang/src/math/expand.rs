//! The pass that replaces transcendental functions of a kernel by their formulas.

use super::{QuotientMethod, exp_between, function};
use crate::Recorder;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, Expr, ExprId, Kernel, Literal, UnOp};
use mlcc_ir::rewrite::rewrite_exprs;
use mlcc_ir::types::DType;
use rustc_hash::FxHashMap;

/// Replaces every operation that is not [`UnOp::is_primitive`].
pub fn expand_math(kernel: &Kernel, quotient: QuotientMethod) -> Kernel {
    let mut ranges = ValueRanges::default();
    rewrite_exprs(kernel, |kb, expr, ty| match *expr {
        Expr::Unary(UnOp::Exp, x) if ty.dtype == DType::F32 && ranges.is_plain_exp(kb, x) => {
            Some(Recorder::within(kb, |k| exp_between(k.val(x)).id()))
        }
        Expr::Unary(op, x) if !op.is_primitive() => {
            let value = Recorder::within(kb, |k| {
                function(op, k.val(x).cast(DType::F32), quotient).cast(ty.dtype).id()
            });
            match op {
                UnOp::Sigmoid => ranges.0.insert(value, (0.0, 1.0)),
                UnOp::Tanh => ranges.0.insert(value, (-1.0, 1.0)),
                _ => None,
            };
            Some(value)
        }
        _ => None,
    })
}

/// True for functions that take many steps, each of which waits for the one before it.
pub fn is_long(op: UnOp) -> bool {
    !op.is_primitive() && !matches!(op, UnOp::Rsqrt | UnOp::Recip)
}

/// The range in which the results of expanded functions lie (or NaN).
#[derive(Default)]
struct ValueRanges(FxHashMap<ExprId, (f64, f64)>);

impl ValueRanges {
    /// True if `exp(x)` and all powers of two on the way to it are normal numbers.
    fn is_plain_exp(&self, kb: &KernelBuilder, x: ExprId) -> bool {
        self.of(kb, x).is_some_and(|(low, high)| low >= -87.0 && high <= 88.0)
    }

    fn of(&self, kb: &KernelBuilder, x: ExprId) -> Option<(f64, f64)> {
        if let Some(&range) = self.0.get(&x) {
            return Some(range);
        }
        match *kb.kernel().exprs.expr(x) {
            Expr::Binary(BinOp::Mul, a, b) => {
                let (value, factor) = match (constant(kb, a), constant(kb, b)) {
                    (Some(factor), _) => (b, factor),
                    (None, Some(factor)) => (a, factor),
                    (None, None) => return None,
                };
                let (low, high) = self.of(kb, value)?;
                let (a, b) = (low * factor, high * factor);
                Some((a.min(b), a.max(b)))
            }
            _ => None,
        }
    }
}

/// The number that all lanes have.
fn constant(kb: &KernelBuilder, x: ExprId) -> Option<f64> {
    match kb.kernel().exprs.expr(x) {
        Expr::Splat(x) => constant(kb, *x),
        Expr::Const(Literal::Float(bits)) => Some(f64::from_bits(*bits)),
        _ => None,
    }
}
