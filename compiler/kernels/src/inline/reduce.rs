//! Reductions: loops with accumulators, vectors where the body allows it.

use super::{Inliner, LaneIndex, ScalarIndices};
use mlcc_ir::compute::{RedOp, ScalarExpr};
use mlcc_ir::dim::Dim;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{Recorder, RegisterVar, Val};

impl<'k> Inliner<'_, 'k> {
    /// Opens loops at the current statement; the accumulator is pinned afterwards.
    pub(super) fn reduce(
        &self,
        k: &'k Recorder,
        (op, var): (RedOp, u32),
        extent: &Dim,
        body: &ScalarExpr,
        at: &ScalarIndices<'_, 'k>,
    ) -> Val<'k> {
        assert_eq!(self.lanes, 1, "a reduction inside a vector axis");
        let lanes = if self.vectorizes(at, body) { self.reduce_lanes } else { 1 };
        let dtype = self.scalar_dtype(body, at);
        reduce_loop(k, op, dtype, extent, lanes, |i, lanes| {
            let mut this = self.with_lanes(lanes);
            this.mask = this.mask.map(|mask| mask.to_lanes(lanes));
            let mut reds = at.reds.clone();
            reds.push((var, LaneIndex::from(i, lanes)));
            this.scalar(k, body, &ScalarIndices { inputs: at.inputs, axes: at.axes, reds })
        })
    }

    /// True if the body may be evaluated for several values of the reduction variable at once: no nested
    /// reductions, nothing that is read element by element.
    fn vectorizes(&self, at: &ScalarIndices, body: &ScalarExpr) -> bool {
        match body {
            ScalarExpr::Reduce { .. } => false,
            ScalarExpr::Axis(_)
            | ScalarExpr::Red(_)
            | ScalarExpr::Int(_)
            | ScalarExpr::Dim(_)
            | ScalarExpr::Float(_) => true,
            ScalarExpr::Load { arg, index } => {
                index.iter().all(|i| self.vectorizes(at, i)) && self.vectorizable(at.inputs[*arg])
            }
            ScalarExpr::Unary(_, a) | ScalarExpr::Cast(_, a) => self.vectorizes(at, a),
            ScalarExpr::Binary(_, a, b) => self.vectorizes(at, a) && self.vectorizes(at, b),
            ScalarExpr::Select(c, a, b) => [c, a, b].iter().all(|s| self.vectorizes(at, s)),
        }
    }

    /// f32 or i32: what an expression evaluates to.
    fn scalar_dtype(&self, s: &ScalarExpr, at: &ScalarIndices) -> DType {
        match s {
            ScalarExpr::Load { arg, .. } => match self.f.ty(at.inputs[*arg]).dtype {
                d if d.is_int() => DType::I32,
                _ => DType::F32,
            },
            ScalarExpr::Float(_) => DType::F32,
            ScalarExpr::Axis(_) | ScalarExpr::Red(_) | ScalarExpr::Int(_) | ScalarExpr::Dim(_) => DType::I64,
            ScalarExpr::Unary(_, a) => self.scalar_dtype(a, at),
            ScalarExpr::Cast(dtype, _) => *dtype,
            ScalarExpr::Binary(_, a, b) | ScalarExpr::Select(_, a, b) => {
                match (self.scalar_dtype(a, at), self.scalar_dtype(b, at)) {
                    (x, y) if x == y => x,
                    (x, y) if x.is_float() || y.is_float() => DType::F32,
                    _ => DType::I32,
                }
            }
            ScalarExpr::Reduce { body, .. } => self.scalar_dtype(body, at),
        }
    }
}

/// Accumulators of a loop over `vectors` vectors: with one each addition would wait for the one before.
fn chains(vectors: Option<i64>) -> i64 {
    vectors.and_then(|v| [4, 2].into_iter().find(|c| v % c == 0)).unwrap_or(1)
}

/// Folds `body(i)` over `0..extent`: a vector loop with a vector accumulator, a scalar loop for the rest, and
/// the lanes of the accumulator at the end. `body` gets the first index and the number of lanes.
pub fn reduce_loop<'k>(
    k: &'k Recorder,
    op: RedOp,
    dtype: DType,
    extent: &Dim,
    lanes: u32,
    mut body: impl FnMut(Val<'k>, u32) -> Val<'k>,
) -> Val<'k> {
    let identity = if dtype.is_float() { op.identity() } else { 0.0 };
    let total = k.dim(extent);
    let mut part = |start: Val<'k>, count: Val<'k>, lanes: u32| -> Val<'k> {
        let chains = if lanes > 1 { chains(k.as_int(count)) } else { 1 };
        let width = i64::from(lanes);
        let initial = k.literal(identity, ExprType::vector(dtype, lanes));
        let accs: Vec<RegisterVar> = (0..chains).map(|_| k.reg("acc", initial)).collect();
        k.serial("j", count / chains, |j| {
            let first = start + j * (chains * width);
            for (c, acc) in accs.iter().enumerate() {
                let value = body(first + c as i64 * width, lanes).to_lanes(lanes).cast(dtype);
                acc.set(acc.get().binary(op.bin(), value));
            }
        });
        let mut sums: Vec<Val> = accs.iter().map(|acc| acc.get()).collect();
        while let [a, b, ..] = sums[..] {
            sums.drain(..2);
            sums.push(a.binary(op.bin(), b));
        }
        sums[0].named("sum")
    };
    if lanes <= 1 {
        return part(k.int(0), total, 1);
    }
    let vectors = total / i64::from(lanes);
    let end = vectors * i64::from(lanes);
    let rest = total - end;
    let wide = (k.as_int(vectors) != Some(0)).then(|| part(k.int(0), vectors, lanes));
    let tail = (k.as_int(rest) != Some(0)).then(|| part(end, rest, 1));
    let wide = wide.map(|w| w.reduce_lanes(op.bin()));
    let result = match (wide, tail) {
        (Some(w), Some(t)) => w.binary(op.bin(), t),
        (Some(r), None) | (None, Some(r)) => r,
        (None, None) => k.literal(identity, ExprType::scalar(dtype)),
    };
    result.named("reduced")
}
