//! Activations as integers for the products with packed weights: the row of a `quantize_rows`, in the order of
//! [`Codes`](crate::contraction::Codes).
//!
//! Each group of columns becomes `round(x / scale)`, borders moved by [`CODE_OFFSET`], with `scale = max|x| / largest code`: 8-bit codes, or 16-bit ones in
//! two planes, `code = 256 high + low`. With 16 bits the error is at most `max|x| / 65024` of a group: finer than f16 for
//! the large values of the group, and far below the error of packed weights.
//!
//! Products want the ratios of neighbouring scales. A group of zeros takes the scale of the group before it, and no scale
//! is below 2^-64 of a larger one before it, so that ratios stay finite.

use super::inline::{Index, Inliner};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty, UnOp};
use mlcc_ir::ops::{CODE_OFFSET, max_code};
use mlcc_ir::types::DType;

/// One `quantize_rows` with the buffers of its results.
#[derive(Clone, Copy, Debug)]
pub struct RowCodes {
    pub x: ValueId,
    pub codes: BufId,
    pub scales: BufId,
    pub starts: BufId,
    pub group: usize,
    pub bits: usize,
    pub part: usize,
    pub zero: usize,
    pub k: usize,
}

/// Where the codes of a row lie.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Row number.
    pub row: ExprId,
    /// Quad of four columns of all rows that comes first.
    pub first: ExprId,
    /// Quads from one of this row to its next.
    pub stride: ExprId,
}

/// Magnitudes below this are taken as zero: their scale would not be a normal number.
const TINY: f64 = 1e-30;
/// Least scale, relative to the largest one before it.
const LEAST: f64 = 1.0 / (1_u128 << 64) as f64;

/// What is carried from group to group, one f32 each.
struct Carried {
    scale: BufId,
    largest: BufId,
    poison: BufId,
}

impl RowCodes {
    /// Quads of one row, all planes.
    pub fn row_quads(&self) -> usize {
        self.k.div_ceil(self.part) * self.part / 4 * self.planes()
    }
    fn planes(&self) -> usize {
        self.bits / 8
    }
    fn groups(&self) -> usize {
        self.k.div_ceil(self.group)
    }

    /// Quantizes one row.
    pub fn emit(
        &self,
        kb: &mut KernelBuilder,
        inliner: &Inliner,
        leading: &[Index],
        place: Place,
        lanes: u32,
    ) {
        let one = |kb: &mut KernelBuilder, name, value: f64| {
            let buf = kb.alloc(name, DType::F32, 1, Space::Local);
            let (at, value) = (kb.int(0), kb.float(value));
            kb.store(buf, at, value);
            buf
        };
        let carried = Carried {
            scale: one(kb, "scale", 1.0),
            largest: one(kb, "largest", 0.0),
            poison: one(kb, "poison", 0.0),
        };
        let row = Row { codes: self, inliner, leading, place, lanes, carried };
        let full = kb.int((self.k / self.group) as i64);
        kb.serial("g", full, |kb, g| row.group(kb, g, self.group));
        if !self.k.is_multiple_of(self.group) {
            row.group(kb, full, self.k % self.group);
        }
        // The first place holds the scale of the last group. Integers cannot hold NaN and infinity: it carries them on.
        let zero = kb.int(0);
        let (scale, poison) = (kb.load(row.carried.scale, zero), kb.load(row.carried.poison, zero));
        let unit = kb.add(scale, poison);
        let at = kb.mul_int(place.row, self.groups() as i64);
        kb.store(self.scales, at, unit);
    }
}

struct Row<'a, 'f> {
    codes: &'a RowCodes,
    inliner: &'a Inliner<'f>,
    leading: &'a [Index],
    place: Place,
    lanes: u32,
    carried: Carried,
}

impl Row<'_, '_> {
    /// One group with its first `columns` columns.
    fn group(&self, kb: &mut KernelBuilder, g: ExprId, columns: usize) {
        let first = kb.mul_int(g, self.codes.group as i64);
        let values = self.values(kb, first, columns);
        let inverse = self.scale(kb, g, &values);
        let parts = values.chunks(self.codes.part / self.lanes as usize);
        for (number, values) in parts.enumerate() {
            let part = kb.mul_int(g, (self.codes.group / self.codes.part) as i64);
            let part = kb.add_int(part, number as i64);
            let codes: Vec<ExprId> = values
                .iter()
                .map(|&value| {
                    let code = nearest(kb, value, inverse);
                    kb.let_("q", code)
                })
                .collect();
            let sum = codes.iter().copied().reduce(|a, b| kb.add(a, b)).expect("a part has columns");
            let sum = kb.reduce_lanes(BinOp::Add, sum);
            let factor = kb.int_of(-(self.codes.zero as i64), DType::I32);
            let start = kb.mul(sum, factor);
            let at = kb.mul_int(self.place.row, self.codes.k.div_ceil(self.codes.part) as i64);
            let at = kb.add(at, part);
            kb.store(self.codes.starts, at, start);
            if self.codes.planes() == 1 {
                self.store_plane(kb, part, 0, &codes);
                continue;
            }
            let (half, by) = (kb.int_of(128, DType::I32), kb.int_of(8, DType::I32));
            let (mut high, mut low) = (Vec::new(), Vec::new());
            for &code in &codes {
                let up = kb.add(code, half);
                let up = kb.binary(BinOp::Shr, up, by);
                let up = kb.let_("high", up);
                let back = kb.binary(BinOp::Shl, up, by);
                high.push(up);
                low.push(kb.sub(code, back));
            }
            self.store_plane(kb, part, 0, &high);
            self.store_plane(kb, part, 1, &low);
        }
    }

    /// The vectors of whole parts, zero behind the columns of the group.
    fn values(&self, kb: &mut KernelBuilder, first: ExprId, columns: usize) -> Vec<ExprId> {
        let lanes = self.lanes as usize;
        let count = columns.next_multiple_of(self.codes.part) / lanes;
        let none = kb.constant(0.0, Ty::vector(DType::F32, self.lanes));
        let value = |part: usize| {
            let begin = part * lanes;
            if begin >= columns {
                return none;
            }
            let at = kb.add_int(first, begin as i64);
            let mask = (begin + lanes > columns).then(|| {
                let base = kb.int(begin as i64);
                let numbers = kb.ramp1(base, self.lanes);
                let end = kb.int(columns as i64);
                kb.lt(numbers, end)
            });
            let ctx = Inliner { lanes: self.lanes, aligned: true, mask, ..self.inliner.clone() };
            let value = ctx.value(kb, self.codes.x, &[self.leading, &[Index::lanes(at)]].concat());
            let value = if kb.ty(value).lanes < self.lanes { kb.splat(value, self.lanes) } else { value };
            let value = kb.cast(value, DType::F32);
            let value = match mask {
                Some(mask) => kb.select(mask, value, none),
                None => value,
            };
            kb.let_("v", value)
        };
        (0..count).map(value).collect()
    }

    /// Finds the scale of a group, stores its ratio, and gives its reciprocal.
    fn scale(&self, kb: &mut KernelBuilder, g: ExprId, values: &[ExprId]) -> ExprId {
        let zero = kb.int(0);
        let sizes: Vec<ExprId> = values.iter().map(|&v| kb.unary(UnOp::Abs, v)).collect();
        let size = sizes.into_iter().reduce(|a, b| kb.max(a, b)).expect("a group has columns");
        let size = kb.reduce_lanes(BinOp::Max, size);
        let size = kb.let_("size", size);
        let none = kb.float(0.0);
        let zeros: Vec<ExprId> = values.iter().map(|&v| kb.mul(v, none)).collect();
        let poison = zeros.into_iter().reduce(|a, b| kb.add(a, b)).expect("a group has columns");
        let poison = kb.reduce_lanes(BinOp::Add, poison);
        let before = kb.load(self.carried.poison, zero);
        let poison = kb.add(before, poison);
        kb.store(self.carried.poison, zero, poison);

        let before = kb.load(self.carried.scale, zero);
        let before = kb.let_("before", before);
        let largest = kb.load(self.carried.largest, zero);
        let largest = kb.let_("largest", largest);
        let (step, tiny, least) =
            (kb.float(1.0 / max_code(self.codes.bits)), kb.float(TINY), kb.float(LEAST));
        let own = kb.mul(size, step);
        let floor = kb.mul(largest, least);
        let own = kb.max(own, floor);
        let normal = kb.lt(tiny, size);
        let scale = kb.select(normal, own, before);
        let scale = kb.let_("scale", scale);
        kb.store(self.carried.scale, zero, scale);
        let largest = kb.max(largest, own);
        kb.store(self.carried.largest, zero, largest);
        let ratio = kb.div(before, scale);
        let at = kb.mul_int(self.place.row, self.codes.groups() as i64);
        let at = kb.add(at, g);
        kb.store(self.codes.scales, at, ratio);
        let one = kb.float(1.0);
        let inverse = kb.div(one, scale);
        kb.let_("inverse", inverse)
    }

    /// Stores one part of a plane, quad by quad.
    fn store_plane(&self, kb: &mut KernelBuilder, part: ExprId, plane: usize, codes: &[ExprId]) {
        let quads = self.codes.part / 4;
        let elements = 4 / self.codes.planes();
        let start = kb.mul_int(part, (self.codes.planes() * quads) as i64);
        let start = kb.add_int(start, (plane * quads) as i64);
        for (vector, &code) in codes.iter().enumerate() {
            let bytes = kb.cast(code, DType::I8);
            let bytes = kb.let_("bytes", bytes);
            for quad in 0..self.lanes / 4 {
                let four = kb.shuffle(bytes, None, (4 * quad..4 * quad + 4).collect());
                let four = match elements {
                    4 => four,
                    _ => kb.bitcast(four, Ty::vector(DType::I16, 2)),
                };
                let number = kb.add_int(start, (vector as u32 * self.lanes / 4 + quad).into());
                let at = kb.mul(number, self.place.stride);
                let at = kb.add(at, self.place.first);
                let at = kb.mul_int(at, elements as i64);
                kb.store_vec(self.codes.codes, at, four);
            }
        }
    }
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
