//! The codes themselves, from values and the reciprocals of their scales, to where products read them: those of a block of
//! rows interleaved quad by quad, others row by row.

use super::{Group, Row, RowCodes, Rows, Work};
use crate::attention::product::join_each;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, ExprId, Ty};
use mlcc_ir::ops::CODE_OFFSET;
use mlcc_ir::types::DType;

/// Bytes of an i32.
const BYTES: usize = 4;

impl Rows<'_, '_> {
    /// The codes of a group of one row, which lie as they come.
    pub(super) fn round_row(
        &self,
        kb: &mut KernelBuilder,
        (codes, work): (&RowCodes, &Work),
        row: &Row,
        group: Group,
    ) {
        let of_row = kb.mul_int(row.row, (codes.row_quads() * codes.quad()) as i64);
        let of_group = kb.mul_int(group.g, codes.group_elements());
        let begin = kb.add(of_row, of_group);
        let inverse = self.inverse(kb, work, row, group);
        let elements = self.block.lanes as usize / 4 * codes.quad();
        let mut sums = Sums::default();
        for first in self.vectors(group.columns) {
            let number = self.number(kb, (codes, work), row, (group, first), inverse);
            sums.add(kb, first / codes.part, number);
            for (plane, number) in planes(kb, codes, number).into_iter().enumerate() {
                let bytes = kb.cast(number, DType::I8);
                let bytes = codes.as_elements(kb, bytes, elements as u32);
                let at = kb.add_int(begin, codes.place(first, plane));
                kb.store_vec(codes.codes, at, bytes);
            }
        }
        self.starts(kb, codes, row, group.g, sums.0);
    }

    /// The codes of a group of all rows of a block. A byte of each row makes a number of four, whose bytes are then put in
    /// order: far fewer operations than to narrow the codes of each row and to interleave these.
    pub(super) fn round_block(
        &self,
        kb: &mut KernelBuilder,
        (codes, work): (&RowCodes, &Work),
        group: Group,
    ) {
        let (lanes, size) = (self.block.lanes as usize, self.block.size as usize);
        let rows: Vec<Row> = (0..size as i64)
            .map(|r| {
                let row = kb.add_int(self.block.first, r);
                let row = kb.let_("row", row);
                Row { r: kb.int(r), row, inliner: self.block.inliner.clone(), next: None }
            })
            .collect();
        let inverses: Vec<ExprId> = rows.iter().map(|row| self.inverse(kb, work, row, group)).collect();
        let mut sums: Vec<Sums> = rows.iter().map(|_| Sums::default()).collect();
        let of_block = kb.mul_int(self.block.first, (codes.row_quads() * codes.quad()) as i64);
        let of_group = kb.mul_int(group.g, codes.group_elements() * size as i64);
        let begin = kb.add(of_block, of_group);
        let begin = kb.let_("begin", begin);
        let firsts: Vec<usize> = self.vectors(group.columns).collect();
        // By plane: places and bytes of vectors that have to be put in order together.
        let mut waiting: Vec<Vec<(i64, ExprId)>> = vec![Vec::new(); codes.planes()];
        for together in firsts.chunks(BYTES / size) {
            let mut numbers: Vec<Vec<ExprId>> = vec![Vec::new(); codes.planes()];
            for &first in together {
                for ((row, &inverse), sums) in rows.iter().zip(&inverses).zip(&mut sums) {
                    let number = self.number(kb, (codes, work), row, (group, first), inverse);
                    sums.add(kb, first / codes.part, number);
                    let of_planes = planes(kb, codes, number);
                    numbers.iter_mut().zip(of_planes).for_each(|(all, number)| all.push(number));
                }
            }
            for (plane, numbers) in numbers.iter().enumerate() {
                let bytes = interleaved(kb, numbers, size);
                let waiting = &mut waiting[plane];
                waiting.push((codes.place(together[0], plane) * size as i64, bytes));
                if waiting.len() < self.block.columns as usize / 4 {
                    continue;
                }
                let mut stored = std::mem::take(waiting);
                if let [(_, first), (_, second)] = stored.as_mut_slice() {
                    [*first, *second] = quads_by_row(kb, *first, *second, size);
                }
                for (place, bytes) in stored {
                    let bytes = codes.as_elements(kb, bytes, (lanes * codes.quad()) as u32);
                    let at = kb.add_int(begin, place);
                    kb.store_vec(codes.codes, at, bytes);
                }
            }
        }
        for (row, sums) in rows.iter().zip(sums) {
            self.starts(kb, codes, row, group.g, sums.0);
        }
    }

    fn inverse(&self, kb: &mut KernelBuilder, work: &Work, row: &Row, group: Group) -> ExprId {
        let at = self.of_piece(kb, row, group.i);
        let inverse = kb.load(work.inverses, at);
        kb.let_("inverse", inverse)
    }

    /// The codes of a vector as i32.
    fn number(
        &self,
        kb: &mut KernelBuilder,
        (codes, work): (&RowCodes, &Work),
        row: &Row,
        (group, first): (Group, usize),
        inverse: ExprId,
    ) -> ExprId {
        let value = match work.values {
            Some(strip) => {
                let at = self.in_values(kb, row, (group, first));
                let value = kb.load_vec(strip, at, self.block.lanes);
                kb.let_("v", value)
            }
            None => self.value(kb, codes, row, (group, first), self.block.lanes),
        };
        let number = nearest(kb, value, inverse);
        kb.let_("q", number)
    }

    /// Stores the sums of the codes of each part, times the zero point that they repair.
    fn starts(&self, kb: &mut KernelBuilder, codes: &RowCodes, row: &Row, g: ExprId, sums: Vec<ExprId>) {
        let lanes = self.block.lanes;
        let begin = kb.mul_int(row.row, codes.k.div_ceil(codes.part) as i64);
        let of_group = kb.mul_int(g, (codes.group / codes.part) as i64);
        let begin = kb.add(begin, of_group);
        let factor = kb.int_of(-(codes.zero as i64), DType::I32);
        let count = sums.len() as u32;
        if count == 1 || !count.is_power_of_two() || count > lanes {
            for (part, &sum) in sums.iter().enumerate() {
                let sum = kb.reduce_lanes(BinOp::Add, sum);
                let start = kb.mul(sum, factor);
                let at = kb.add_int(begin, part as i64);
                kb.store(codes.starts, at, start);
            }
            return;
        }
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        let add = |kb: &mut KernelBuilder, a, b| kb.add(a, b);
        let mut joined = join_each(kb, sums.into_iter().map(Some).collect(), nothing, add);
        let mut width = lanes;
        while width > count {
            width /= 2;
            let low = kb.shuffle(joined, None, (0..width).collect());
            let high = kb.shuffle(joined, None, (width..2 * width).collect());
            let sum = kb.add(low, high);
            joined = kb.let_("sum", sum);
        }
        let starts = kb.mul(joined, factor);
        kb.store_vec(codes.starts, begin, starts);
    }
}

impl RowCodes {
    /// Elements before the codes of the vector from column `first` of a group, in a plane of one row.
    fn place(&self, first: usize, plane: usize) -> i64 {
        let (part, within) = (first / self.part, first % self.part);
        let quads = part * self.quads(self.part) + plane * self.part / 4 + within / 4;
        (quads * self.quad()) as i64
    }
}

/// The sum of the vectors of codes of each part.
#[derive(Default)]
struct Sums(Vec<ExprId>);

impl Sums {
    /// Parts come one after the other.
    fn add(&mut self, kb: &mut KernelBuilder, part: usize, number: ExprId) {
        match self.0.get_mut(part) {
            Some(sum) => {
                let more = kb.add(*sum, number);
                *sum = kb.let_("sum", more);
            }
            None => self.0.push(number),
        }
    }
}

/// The planes of codes, in the low byte of each lane: the high one first.
fn planes(kb: &mut KernelBuilder, codes: &RowCodes, number: ExprId) -> Vec<ExprId> {
    if codes.planes() == 1 {
        return vec![number];
    }
    let (half, by) = (kb.int_of(128, DType::I32), kb.int_of(8, DType::I32));
    let up = kb.add(number, half);
    let up = kb.binary(BinOp::Shr, up, by);
    let up = kb.let_("high", up);
    let back = kb.binary(BinOp::Shl, up, by);
    vec![up, kb.sub(number, back)]
}

/// The low bytes of four vectors, quad by quad: those of `rows` rows of the first columns, then of the next. Vectors come
/// with all rows of the first columns before those of the next.
fn interleaved(kb: &mut KernelBuilder, vectors: &[ExprId], rows: usize) -> ExprId {
    let lanes = kb.ty(vectors[0]).lanes as usize;
    let mut shifted = Vec::new();
    for (i, &v) in vectors.iter().enumerate() {
        let by = kb.int_of(8 * i as i64, DType::I32);
        shifted.push(if i == 0 { v } else { kb.binary(BinOp::Shl, v, by) });
    }
    let low = chosen(kb, 0xff, shifted[0], shifted[1]);
    let high = chosen(kb, 0xff_0000, shifted[2], shifted[3]);
    let all = chosen(kb, 0xffff, low, high);
    let bytes = kb.bitcast(all, Ty::vector(DType::I8, (BYTES * lanes) as u32));
    let bytes = kb.let_("bytes", bytes);
    let from = |to: usize| {
        let (column, row, quad) = (to % 4, to / 4 % rows, to / 4 / rows);
        let (vector, lane) = (quad * 4 / lanes * rows + row, quad * 4 % lanes + column);
        (lane * BYTES + vector) as u32
    };
    kb.shuffle(bytes, None, (0..BYTES * lanes).map(from).collect())
}

/// Two vectors with a quad of each of `rows` rows, in the order in which both quads of a row follow each other.
fn quads_by_row(kb: &mut KernelBuilder, first: ExprId, second: ExprId, rows: usize) -> [ExprId; 2] {
    let bytes = kb.ty(first);
    assert_eq!(bytes.lanes as usize, 4 * rows, "a vector has one quad of every row");
    let words = Ty::vector(DType::I32, rows as u32);
    let (a, b) = (kb.bitcast(first, words), kb.bitcast(second, words));
    let rows = rows as u32;
    [0, rows / 2].map(|from| {
        let order = (from..from + rows / 2).flat_map(|row| [row, rows + row]).collect();
        let both = kb.shuffle(a, Some(b), order);
        kb.bitcast(both, bytes)
    })
}

/// The bits of `a` that are in `mask`, the others of `b`.
fn chosen(kb: &mut KernelBuilder, mask: i64, a: ExprId, b: ExprId) -> ExprId {
    let (these, others) = (kb.int_of(mask, DType::I32), kb.int_of(!mask, DType::I32));
    let (a, b) = (kb.binary(BinOp::And, a, these), kb.binary(BinOp::And, b, others));
    kb.binary(BinOp::Or, a, b)
}

/// `round(value * factor + CODE_OFFSET)` as i32 for results below 2^22, through the low bits of a float.
fn nearest(kb: &mut KernelBuilder, value: ExprId, factor: ExprId) -> ExprId {
    const MAGIC: f32 = 12_582_912.0;
    let lanes = kb.ty(value).lanes;
    let offset = kb.float(CODE_OFFSET);
    let scaled = kb.fma(value, factor, offset);
    let magic = kb.float(MAGIC.into());
    let shifted = kb.add(scaled, magic);
    let bits = kb.bitcast(shifted, Ty::vector(DType::I32, lanes));
    let base = kb.int_of(MAGIC.to_bits().into(), DType::I32);
    kb.sub(bits, base)
}
