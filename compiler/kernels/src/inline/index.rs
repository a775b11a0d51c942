//! Positions along the axes of a value, and their arithmetic.

use mlcc_ir::kernel::BinOp;
use mlcc_kernel_lang::{Recorder, Val};

/// An integer position: one number, or one per lane.
#[derive(Clone, Copy)]
pub enum LaneIndex<'k> {
    /// `base + stride * lane`; stride 0 is the same number in all lanes.
    Affine { base: Val<'k>, stride: i64 },
    /// i64 with as many lanes as the context.
    Vector(Val<'k>),
}

impl<'k> LaneIndex<'k> {
    pub fn scalar(base: Val<'k>) -> LaneIndex<'k> {
        LaneIndex::Affine { base, stride: 0 }
    }

    /// Consecutive positions, one per lane.
    pub fn lanes(base: Val<'k>) -> LaneIndex<'k> {
        LaneIndex::Affine { base, stride: 1 }
    }

    /// Consecutive positions for `lanes` lanes, or the one.
    pub fn from(base: Val<'k>, lanes: u32) -> LaneIndex<'k> {
        if lanes > 1 { LaneIndex::lanes(base) } else { LaneIndex::scalar(base) }
    }

    /// The position, or those of `lanes` lanes.
    pub fn val(self, lanes: u32) -> Val<'k> {
        match self {
            LaneIndex::Affine { base, stride: 0 } => base,
            LaneIndex::Affine { base, stride } => base.ramp(stride, lanes),
            LaneIndex::Vector(all) => all,
        }
    }
}

/// The lanes of a vector axis: how many, and whether its base is a multiple of that.
#[derive(Clone, Copy)]
pub(super) struct VectorAxis {
    pub lanes: u32,
    pub aligned: bool,
}

impl VectorAxis {
    /// `a op b`, of the form `base + stride * lane` where that is possible.
    pub fn combine<'k>(self, op: BinOp, a: LaneIndex<'k>, b: LaneIndex<'k>) -> LaneIndex<'k> {
        use LaneIndex::Affine;
        let constant = |x: Val<'k>| x.recorder().as_int(x);
        // All lanes of an aligned vector fall into one block of a multiple of `lanes`.
        let one_block =
            |y: Val<'k>| self.aligned && constant(y).is_some_and(|d| d % i64::from(self.lanes) == 0);
        match (op, a, b) {
            (_, Affine { base: x, stride: 0 }, Affine { base: y, stride: 0 }) => {
                LaneIndex::scalar(x.binary(op, y))
            }
            (BinOp::Add, Affine { base: x, stride: s }, Affine { base: y, stride: t }) => {
                Affine { base: x + y, stride: s + t }
            }
            (BinOp::Sub, Affine { base: x, stride: s }, Affine { base: y, stride: t }) => {
                Affine { base: x - y, stride: s - t }
            }
            (BinOp::Mul, Affine { base: x, stride: s }, Affine { base: y, stride: 0 })
            | (BinOp::Mul, Affine { base: y, stride: 0 }, Affine { base: x, stride: s })
                if constant(y).is_some() =>
            {
                Affine { base: x * y, stride: s * constant(y).unwrap_or(1) }
            }
            (BinOp::Div, Affine { base: x, stride: 1 }, Affine { base: y, stride: 0 }) if one_block(y) => {
                LaneIndex::scalar(x / y)
            }
            (BinOp::Rem, Affine { base: x, stride: 1 }, Affine { base: y, stride: 0 }) if one_block(y) => {
                LaneIndex::lanes(x % y)
            }
            (op, a, b) => LaneIndex::Vector(a.val(self.lanes).binary(op, b.val(self.lanes))),
        }
    }

    /// Offset of a place in a row-major buffer of these sizes.
    pub fn flat<'k>(
        self,
        k: &'k Recorder,
        dims: impl IntoIterator<Item = Val<'k>>,
        index: &[LaneIndex<'k>],
    ) -> LaneIndex<'k> {
        dims.into_iter().zip(index).fold(LaneIndex::scalar(k.int(0)), |flat, (size, &i)| {
            self.combine(BinOp::Add, self.combine(BinOp::Mul, flat, LaneIndex::scalar(size)), i)
        })
    }
}
