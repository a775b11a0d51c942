//! The codes themselves, from values and the reciprocals of their scales, to where products read them: those
//! of a block of rows interleaved quad by quad, others row by row.

use super::{BlockRow, CodeGroup, QuantizeBuffers, RowCodes, RowQuantizer};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::ops::CODE_OFFSET;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::nearest_i32;
use mlcc_kernel_lang::{Val, reduce_each};

/// Bytes of an i32.
const BYTES: usize = 4;

impl<'k> RowQuantizer<'_, '_, 'k> {
    /// The codes of a group of one row, in their order.
    pub(super) fn round_row(
        &self,
        (codes, work): (&RowCodes, &QuantizeBuffers<'k>),
        row: &BlockRow<'_, 'k>,
        group: CodeGroup<'k>,
    ) {
        let out = self.k.flat(codes.codes);
        let begin = row.row * codes.row_elements() + group.g * codes.group_elements();
        let inverse = work.inverse_scales.at([row.r, group.i]).named("inverse");
        let elements = self.block.lanes as usize / 4 * codes.quad();
        let mut sums = CodeSums::default();
        for first in self.vectors(group.columns) {
            let number = self.number((codes, work), row, (group, first), inverse);
            sums.add(first / codes.part, number);
            for (plane, number) in planes(codes, number).into_iter().enumerate() {
                let bytes = number.cast(DType::I8);
                let elements = bytes.bits_as(ExprType::vector(out.dtype(), elements as u32));
                out.set([begin + codes.place(first, plane)], elements);
            }
        }
        self.starts(codes, row, group.g, sums.0);
    }

    /// The codes of a group of all rows of a block. A byte of each row makes a number of four, whose bytes
    /// are then put in order: far fewer operations than to narrow the codes of each row and to interleave
    /// these.
    pub(super) fn round_block(&self, (codes, work): (&RowCodes, &QuantizeBuffers<'k>), group: CodeGroup<'k>) {
        let (k, out) = (self.k, self.k.flat(codes.codes));
        let (lanes, size) = (self.block.lanes as usize, self.block.size as usize);
        let row = |r: i64| {
            let row = (self.block.first + r).named("row");
            BlockRow { r: k.int(r), row, inliner: self.block.inliner.clone(), next: None }
        };
        let rows: Vec<BlockRow> = (0..size as i64).map(row).collect();
        let inverse = |row: &BlockRow<'_, 'k>| work.inverse_scales.at([row.r, group.i]).named("inverse");
        let inverses: Vec<Val> = rows.iter().map(inverse).collect();
        let mut sums: Vec<CodeSums> = rows.iter().map(|_| CodeSums::default()).collect();
        let group_begin = group.g * (codes.group_elements() * size as i64);
        let begin = (self.block.first * codes.row_elements() + group_begin).named("begin");
        let firsts: Vec<usize> = self.vectors(group.columns).collect();
        // For each plane: places and bytes of vectors that have to be put in order together.
        let mut waiting: Vec<Vec<(i64, Val)>> = vec![Vec::new(); codes.planes()];
        for together in firsts.chunks(BYTES / size) {
            let mut numbers: Vec<Vec<Val>> = vec![Vec::new(); codes.planes()];
            for &first in together {
                for ((row, &inverse), sums) in rows.iter().zip(&inverses).zip(&mut sums) {
                    let number = self.number((codes, work), row, (group, first), inverse);
                    sums.add(first / codes.part, number);
                    let of_planes = planes(codes, number);
                    numbers.iter_mut().zip(of_planes).for_each(|(all, number)| all.push(number));
                }
            }
            for (plane, numbers) in numbers.iter().enumerate() {
                let waiting = &mut waiting[plane];
                waiting.push((codes.place(together[0], plane) * size as i64, interleaved(numbers, size)));
                if waiting.len() < self.block.columns as usize / 4 {
                    continue;
                }
                let mut stored = std::mem::take(waiting);
                if let [(_, first), (_, second)] = stored.as_mut_slice() {
                    [*first, *second] = quads_by_row(*first, *second, size);
                }
                for (place, bytes) in stored {
                    let elements = ExprType::vector(out.dtype(), (lanes * codes.quad()) as u32);
                    out.set([begin + place], bytes.bits_as(elements));
                }
            }
        }
        for (row, sums) in rows.iter().zip(sums) {
            self.starts(codes, row, group.g, sums.0);
        }
    }

    /// The codes of a vector as i32.
    fn number(
        &self,
        (codes, work): (&RowCodes, &QuantizeBuffers<'k>),
        row: &BlockRow<'_, 'k>,
        (group, first): (CodeGroup<'k>, usize),
        inverse: Val<'k>,
    ) -> Val<'k> {
        let lanes = self.block.lanes;
        let value = match work.values {
            Some(values) => values.load((row.r, group.i, first as i64), lanes).named("v"),
            None => self.value(codes, row, (group, first), lanes),
        };
        nearest_i32(value.fma(inverse, CODE_OFFSET)).named("q")
    }

    /// Stores the sums of the codes of each part, times the zero point that they repair.
    fn starts(&self, codes: &RowCodes, row: &BlockRow<'_, 'k>, g: Val<'k>, sums: Vec<Val<'k>>) {
        let lanes = self.block.lanes;
        let starts = self.k.flat(codes.starts);
        let of_group = g * (codes.group / codes.part) as i64;
        let begin = row.row * codes.k.div_ceil(codes.part) as i64 + of_group;
        let factor = -(codes.zero as i64);
        let count = sums.len() as u32;
        if count == 1 || !count.is_power_of_two() || count > lanes {
            for (part, &sum) in sums.iter().enumerate() {
                starts.set([begin + part as i64], sum.sum_lanes() * factor);
            }
            return;
        }
        let mut joined = reduce_each(sums, |a, b| a + b);
        let mut width = lanes;
        while width > count {
            width /= 2;
            joined = (joined.shuffle(0..width) + joined.shuffle(width..2 * width)).named("sum");
        }
        starts.set([begin], joined * factor);
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
struct CodeSums<'k>(Vec<Val<'k>>);

impl<'k> CodeSums<'k> {
    /// The parts are in sequence.
    fn add(&mut self, part: usize, number: Val<'k>) {
        match self.0.get_mut(part) {
            Some(sum) => *sum = (*sum + number).named("sum"),
            None => self.0.push(number),
        }
    }
}

/// The planes of codes, in the low byte of each lane: the high one first.
fn planes<'k>(codes: &RowCodes, number: Val<'k>) -> Vec<Val<'k>> {
    if codes.planes() == 1 {
        return vec![number];
    }
    let high = ((number + 128) >> 8).named("high");
    vec![high, number - (high << 8)]
}

/// The low bytes of four vectors, quad by quad: those of `rows` rows of the first columns, then of the next.
/// Vectors come with all rows of the first columns before those of the next.
fn interleaved<'k>(vectors: &[Val<'k>], rows: usize) -> Val<'k> {
    let lanes = vectors[0].lanes() as usize;
    let shift = |(i, &v): (usize, &Val<'k>)| if i == 0 { v } else { v << (8 * i as i64) };
    let shifted: Vec<Val> = vectors.iter().enumerate().map(shift).collect();
    let low = select_bits(0xff, shifted[0], shifted[1]);
    let high = select_bits(0xff_0000, shifted[2], shifted[3]);
    let all = select_bits(0xffff, low, high);
    let bytes = all.bits_as(ExprType::vector(DType::I8, (BYTES * lanes) as u32)).named("bytes");
    bytes.shuffle((0..BYTES * lanes).map(|to| {
        let (column, row, quad) = (to % 4, to / 4 % rows, to / 4 / rows);
        let (vector, lane) = (quad * 4 / lanes * rows + row, quad * 4 % lanes + column);
        (lane * BYTES + vector) as u32
    }))
}

/// Two vectors with a quad of each of `rows` rows, in the order in which both quads of a row follow each
/// other.
fn quads_by_row<'k>(first: Val<'k>, second: Val<'k>, rows: usize) -> [Val<'k>; 2] {
    let bytes = first.ty();
    assert_eq!(bytes.lanes as usize, 4 * rows, "a vector has one quad of every row");
    let rows = rows as u32;
    let [a, b] = [first, second].map(|quads| quads.bits_as(ExprType::vector(DType::I32, rows)));
    [0, rows / 2].map(|from| {
        let order = (from..from + rows / 2).flat_map(|row| [row, rows + row]);
        a.shuffle_with(b, order).bits_as(bytes)
    })
}

/// The bits of `a` that are in `mask`, the others of `b`.
fn select_bits<'k>(mask: i64, a: Val<'k>, b: Val<'k>) -> Val<'k> {
    (a & mask) | (b & !mask)
}
