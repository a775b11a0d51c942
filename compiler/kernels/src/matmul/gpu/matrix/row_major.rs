//! Row-major weights in a ring: rows of a slice are contiguous, with the scale of each.

use super::super::GpuMatmul;
use super::super::codes::half_codes;
use super::super::operand::{IN_ORDER, OF_LANE, SplitOperand, fragment_order};
use super::work::BlockTiling;
use super::{BlockTile, CHUNK, SCALE_BYTES, SLICE, WarpTile};
use crate::matmul::problem::{MatmulActivation, MatmulWeight};
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::matrix::fragment_position;
use mlcc_kernel_lang::{BufferView, Val};
use mlcc_quant::layout::{AddressExpr, LayoutRegion};

impl<'k> GpuMatmul<'k, '_> {
    /// Elements of a row of weights in a slice.
    pub(super) fn row_elements(self) -> i64 {
        match self.problem.weight {
            MatmulWeight::Plain(_) => SLICE,
            MatmulWeight::Packed(format) => SLICE * format.bits as i64 / 8,
        }
    }

    /// Begins to copy the slices of a step; `first` and `slice` are its first ones.
    pub(super) fn copy_rows(self, work: &BlockTiling, at: &BlockTile<'k>, [first, slice]: [Val<'k>; 2]) {
        let k = self.k;
        let w = k.flat(self.problem.w);
        let last = self.problem.n as i64 - 1;
        let source = |column: Val<'k>| (at.origin[1] + column).min(last);
        let place = |place: &AddressExpr, row: Val, col: Val| {
            k.val(k.builder(|kb| place.emit(kb, row.id(), col.id())))
        };
        let (codes, scales) = match &self.layout.region {
            LayoutRegion::Plain { place, .. } => (place, None),
            LayoutRegion::Group { codes, scales, .. } => (codes, Some(scales)),
        };
        let elements = CHUNK / at.ws.dtype().bytes().unwrap_or(1) as i64;
        let (width, parts) = (self.row_elements(), self.row_elements() / elements);
        at.team.each(work.depth * work.columns * parts, |i| {
            let (along, i) = self.in_slice(work, i, work.columns * parts);
            let (row, part) = (i / parts, i % parts);
            let column = (slice + along) * SLICE + part * (SLICE * elements / width);
            let from = place(codes, source(row), column);
            at.ws.start_copy((first + along, row, part * elements), CHUNK as u32, w, [from]);
        });
        if let (Some(scales), Some(to)) = (scales, at.scales) {
            at.team.each(work.depth * work.columns, |i| {
                let (along, row) = self.in_slice(work, i, work.columns);
                let from = place(scales, source(row), (slice + along) * SLICE);
                let from = from / SCALE_BYTES * SCALE_BYTES;
                to.start_copy((first + along, row, 0), SCALE_BYTES as u32, w, [from]);
            });
        }
    }

    /// Multiplies the slice of a stage.
    pub(super) fn multiply_rows(
        self,
        work: &BlockTiling,
        at: &BlockTile<'k>,
        part: &WarpTile<'k>,
        [stage, slice]: [Val<'k>; 2],
    ) {
        let [mt, nt] = work.fragments();
        let x = at.xs.row(stage).named("x_stage");
        let a: Vec<_> = (0..mt).map(|i| self.activations(x, part, i, 0)).collect();
        self.k.unrolled("j", nt, |j| {
            let row = part.column + j * i64::from(M16N8K16.b.columns) + part.group;
            let b = self.row_weights(at.ws.row(stage), row, part.first);
            let scale = at.scales.map(|scales| self.row_scale(scales.row(stage), at, part, (j, slice)));
            self.add(at, &a, j, &b, scale);
        });
    }

    /// Fragments of a row of weights, one for each half of a slice.
    fn row_weights(self, w: BufferView<'k, 2>, row: Val<'k>, first: Val<'k>) -> Vec<SplitOperand<'k>> {
        let halves = self.problem.activation == MatmulActivation::F16;
        let all = match self.problem.weight {
            MatmulWeight::Plain(_) => {
                let weights = w.load((row, first), OF_LANE as u32).named("w");
                if halves { SplitOperand::exact(weights) } else { SplitOperand::from_values(weights) }
            }
            MatmulWeight::Packed(format) => {
                let bytes = OF_LANE * format.bits as i64 / 8;
                let codes = w.load((row, first * format.bits as i64 / 8), bytes as u32).named("q");
                SplitOperand::exact(half_codes(self.k, format, codes, self.factor()).named("codes"))
            }
        };
        let of_half = |half| fragment_order(&M16N8K16.b, half, false, &IN_ORDER);
        (0..2).map(|half| all.map(|v| v.shuffle(of_half(half)))).collect()
    }

    /// The scale of each of a lane's sums.
    fn row_scale(
        self,
        scales: BufferView<'k, 2>,
        at: &BlockTile<'k>,
        part: &WarpTile<'k>,
        (j, slice): (Val<'k>, Val<'k>),
    ) -> Val<'k> {
        let LayoutRegion::Group { spec, scales: stored, .. } = &self.layout.region else {
            panic!("scales of plain weights");
        };
        let k = self.k;
        let number = spec.number_type();
        let first = slice * SLICE;
        let of = |column: Val<'k>| {
            let source = (at.origin[1] + column).min(self.problem.n as i64 - 1);
            let byte = k.val(k.builder(|kb| stored.emit(kb, source.id(), first.id())));
            let bytes = scales.load((column, byte % SCALE_BYTES), number.bytes() as u32);
            bytes.bits_as(ExprType::scalar(number.dtype())).cast(DType::F32).named("scale")
        };
        let sums = &M16N8K16.accumulator;
        let columns = [0, 1].map(|e| {
            of(part.column + j * i64::from(sums.columns) + fragment_position(sums, part.lane, e)[1])
        });
        self.of_columns(columns)
    }
}
