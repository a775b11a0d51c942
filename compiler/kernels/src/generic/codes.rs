//! Activations as integers for the products with packed weights: the row of a `quantize_rows`, in the order of
//! [`Codes`](crate::contraction::Codes).
//!
//! Each group of columns becomes `round(x / scale)`, borders moved by [`CODE_OFFSET`], with `scale = max|x| / largest code`: 8-bit codes, or 16-bit ones in
//! two planes, `code = 256 high + low`. With 16 bits the error is at most `max|x| / 65024` of a group: finer than f16 for
//! the large values of the group, and far below the error of packed weights.
//!
//! Products want the ratios of neighbouring scales. A group of zeros takes the scale of the group before it, and no scale
//! is below 2^-64 of a larger one before it, so that ratios stay finite.

use super::inline::{Binding, Index, Inliner};
use crate::attention::product::join_each;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
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

/// Rows whose codes lie interleaved: quad by quad (four columns), those of all rows one after the other.
pub struct Block<'a, 'f> {
    pub inliner: &'a Inliner<'f>,
    /// Indices of the only row, where rows have several leading axes; else the number of a row is its only index.
    pub leading: Option<&'a [Index]>,
    /// Row number of the first.
    pub first: ExprId,
    /// Rows that there are, at most `size`. Fewer lie one by one, each with all its quads.
    pub rows: ExprId,
    /// A power of two.
    pub size: u32,
    /// What is known of each row: values and the buffers that hold them, an element per row of the block.
    pub known: &'a [(ValueId, BufId)],
    pub lanes: u32,
}

/// Magnitudes below this are taken as zero: their scale would not be a normal number.
const TINY: f64 = 1e-30;
/// Least scale, relative to the largest one before it.
const LEAST: f64 = 1.0 / (1_u128 << 64) as f64;
/// Bits of a float without its sign; those of magnitudes are ordered as the magnitudes are, NaN behind infinity.
const MAGNITUDE: i64 = 0x7fff_ffff;

/// What is carried from group to group, an element per row: the last scale, the largest one, and the bits of the largest
/// magnitude.
struct Carried {
    scale: BufId,
    largest: BufId,
    size: BufId,
}

impl RowCodes {
    /// Quads of one row, all planes.
    fn row_quads(&self) -> usize {
        self.quads(self.k)
    }
    /// Quads of so many columns of a row, all planes.
    fn quads(&self, columns: usize) -> usize {
        columns.div_ceil(self.part) * self.part / 4 * self.planes()
    }
    fn planes(&self) -> usize {
        self.bits / 8
    }
    /// Elements of the buffer of codes that a quad takes.
    fn quad(&self) -> usize {
        4 / self.planes()
    }
    fn groups(&self) -> usize {
        self.k.div_ceil(self.group)
    }

    /// Quantizes the rows of a block, group by group.
    pub fn emit(&self, kb: &mut KernelBuilder, block: &Block) {
        let space = if block.size == 1 { Space::Local } else { Space::Stack };
        let filled = |kb: &mut KernelBuilder, name, dtype, value: f64| {
            let buf = kb.alloc(name, dtype, block.size as usize, space);
            for r in 0..i64::from(block.size) {
                let (at, value) = (kb.int(r), kb.constant(value, Ty::scalar(dtype)));
                kb.store(buf, at, value);
            }
            buf
        };
        let carried = Carried {
            scale: filled(kb, "scale", DType::F32, 1.0),
            largest: filled(kb, "largest", DType::F32, 0.0),
            size: filled(kb, "size", DType::I32, 0.0),
        };
        // The codes of a group of each row, before they are interleaved.
        let dtype = kb.kernel().bufs[self.codes].dtype;
        let bytes = block.size as usize * self.quads(self.group) * self.quad();
        let strip = (block.size > 1).then(|| kb.alloc("strip", dtype, bytes, Space::Stack));
        let rows = Rows { codes: self, block, carried, strip };
        let full = kb.int((self.k / self.group) as i64);
        kb.serial("g", full, |kb, g| rows.group(kb, g, self.group));
        if !self.k.is_multiple_of(self.group) {
            rows.group(kb, full, self.k % self.group);
        }
        rows.each(kb, |kb, r, row| rows.unit(kb, r, row));
    }
}

struct Rows<'a, 'f> {
    codes: &'a RowCodes,
    block: &'a Block<'a, 'f>,
    carried: Carried,
    strip: Option<BufId>,
}

/// A row of a block: its number there, its number, and what is known of it.
struct Row<'f> {
    r: ExprId,
    row: ExprId,
    inliner: Inliner<'f>,
}

impl<'f> Rows<'_, 'f> {
    /// `body(number in the block, row number)` for every row.
    fn each(&self, kb: &mut KernelBuilder, body: impl FnOnce(&mut KernelBuilder, ExprId, ExprId)) {
        if self.block.size == 1 {
            let zero = kb.int(0);
            return body(kb, zero, self.block.first);
        }
        kb.serial("r", self.block.rows, |kb, r| {
            let row = kb.add(self.block.first, r);
            let row = kb.let_("row", row);
            body(kb, r, row);
        });
    }

    /// One group, with its first `columns` columns, of every row.
    fn group(&self, kb: &mut KernelBuilder, g: ExprId, columns: usize) {
        self.each(kb, |kb, r, row| {
            let mut inliner = self.block.inliner.clone();
            for &(v, buf) in self.block.known {
                let value = kb.load(buf, r);
                inliner.bindings.insert(v, Binding::Value(kb.let_("known", value)));
            }
            self.row(kb, &Row { r, row, inliner }, g, columns);
        });
        let Some(strip) = self.strip else { return };
        let size = kb.int(self.block.size.into());
        let alone = kb.lt(self.block.rows, size);
        kb.if_else(
            alone,
            |kb| self.copy(kb, strip, g, self.codes.quads(columns)),
            |kb| self.interleave(kb, strip, g, self.codes.quads(columns)),
        );
    }

    /// One group of a row.
    fn row(&self, kb: &mut KernelBuilder, row: &Row, g: ExprId, columns: usize) {
        let codes = self.codes;
        let first = kb.mul_int(g, codes.group as i64);
        let values = self.values(kb, row, first, columns);
        let inverse = self.scale(kb, row, g, &values);
        let mut numbers: Vec<ExprId> = Vec::new();
        for &value in &values {
            let code = nearest(kb, value, inverse);
            numbers.push(kb.let_("q", code));
        }
        let parts: Vec<&[ExprId]> = numbers.chunks(codes.part / self.block.lanes as usize).collect();
        self.starts(kb, row, g, &parts);
        // Codes of a single row lie as they come.
        let (buf, begin) = match self.strip {
            Some(strip) => (strip, kb.mul_int(row.r, self.strip_row())),
            None => {
                let of_row = kb.mul_int(row.row, (codes.row_quads() * codes.quad()) as i64);
                let of_group = kb.mul_int(g, self.strip_row());
                (codes.codes, kb.add(of_row, of_group))
            }
        };
        for (part, of_part) in parts.into_iter().enumerate() {
            let begin = kb.add_int(begin, (part * codes.quads(codes.part) * codes.quad()) as i64);
            if codes.planes() == 1 {
                self.store_plane(kb, buf, begin, of_part);
                continue;
            }
            let (half, by) = (kb.int_of(128, DType::I32), kb.int_of(8, DType::I32));
            let (mut high, mut low) = (Vec::new(), Vec::new());
            for &code in of_part {
                let up = kb.add(code, half);
                let up = kb.binary(BinOp::Shr, up, by);
                let up = kb.let_("high", up);
                let back = kb.binary(BinOp::Shl, up, by);
                high.push(up);
                low.push(kb.sub(code, back));
            }
            self.store_plane(kb, buf, begin, &high);
            let begin = kb.add_int(begin, (codes.part / 4 * codes.quad()) as i64);
            self.store_plane(kb, buf, begin, &low);
        }
    }

    /// Elements of a group of one row.
    fn strip_row(&self) -> i64 {
        (self.codes.quads(self.codes.group) * self.codes.quad()) as i64
    }

    /// The vectors of whole parts, zero behind the columns of the group.
    fn values(&self, kb: &mut KernelBuilder, row: &Row, first: ExprId, columns: usize) -> Vec<ExprId> {
        let lanes = self.block.lanes as usize;
        let count = columns.next_multiple_of(self.codes.part) / lanes;
        let none = kb.constant(0.0, Ty::vector(DType::F32, self.block.lanes));
        let value = |part: usize| {
            let begin = part * lanes;
            if begin >= columns {
                return none;
            }
            let at = kb.add_int(first, begin as i64);
            let mask = (begin + lanes > columns).then(|| {
                let base = kb.int(begin as i64);
                let numbers = kb.ramp1(base, self.block.lanes);
                let end = kb.int(columns as i64);
                kb.lt(numbers, end)
            });
            let ctx = Inliner { lanes: self.block.lanes, aligned: true, mask, ..row.inliner.clone() };
            let own = [Index::scalar(row.row)];
            let leading = self.block.leading.unwrap_or(&own);
            let value = ctx.value(kb, self.codes.x, &[leading, &[Index::lanes(at)]].concat());
            let value =
                if kb.ty(value).lanes < self.block.lanes { kb.splat(value, self.block.lanes) } else { value };
            let value = kb.cast(value, DType::F32);
            let value = match mask {
                Some(mask) => kb.select(mask, value, none),
                None => value,
            };
            kb.let_("v", value)
        };
        (0..count).map(value).collect()
    }

    /// Finds the scale of a group, stores its ratio, and gives its reciprocal. Magnitudes are compared by their bits: an
    /// instruction, where the larger of two floats that may be NaN takes four.
    fn scale(&self, kb: &mut KernelBuilder, row: &Row, g: ExprId, values: &[ExprId]) -> ExprId {
        let magnitude = kb.int_of(MAGNITUDE, DType::I32);
        let mut sizes: Vec<ExprId> = Vec::new();
        for &value in values {
            let bits = kb.bitcast(value, Ty::vector(DType::I32, self.block.lanes));
            sizes.push(kb.binary(BinOp::And, bits, magnitude));
        }
        let size = sizes.into_iter().reduce(|a, b| kb.max(a, b)).expect("a group has columns");
        let size = kb.let_("sizes", size);
        let size = kb.reduce_lanes(BinOp::Max, size);
        let size = kb.let_("size", size);
        let before = kb.load(self.carried.size, row.r);
        let most = kb.max(before, size);
        kb.store(self.carried.size, row.r, most);
        let size = kb.bitcast(size, Ty::scalar(DType::F32));

        let before = kb.load(self.carried.scale, row.r);
        let before = kb.let_("before", before);
        let largest = kb.load(self.carried.largest, row.r);
        let largest = kb.let_("largest", largest);
        let (step, tiny, least) =
            (kb.float(1.0 / max_code(self.codes.bits)), kb.float(TINY), kb.float(LEAST));
        let own = kb.mul(size, step);
        let floor = kb.mul(largest, least);
        let own = larger(kb, own, floor);
        let own = kb.let_("own", own);
        let normal = kb.lt(tiny, size);
        let scale = kb.select(normal, own, before);
        let scale = kb.let_("scale", scale);
        kb.store(self.carried.scale, row.r, scale);
        let largest = larger(kb, largest, own);
        kb.store(self.carried.largest, row.r, largest);
        let ratio = kb.div(before, scale);
        let at = kb.mul_int(row.row, self.codes.groups() as i64);
        let at = kb.add(at, g);
        kb.store(self.codes.scales, at, ratio);
        let one = kb.float(1.0);
        let inverse = kb.div(one, scale);
        kb.let_("inverse", inverse)
    }

    /// Stores the sums of the codes of each part, times the zero point that they repair.
    fn starts(&self, kb: &mut KernelBuilder, row: &Row, g: ExprId, parts: &[&[ExprId]]) {
        let (codes, lanes) = (self.codes, self.block.lanes);
        let add = |kb: &mut KernelBuilder, a, b| kb.add(a, b);
        let sums: Vec<ExprId> = parts
            .iter()
            .map(|part| {
                let sum = part.iter().copied().reduce(|a, b| kb.add(a, b)).expect("a part has columns");
                kb.let_("sum", sum)
            })
            .collect();
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

    /// Stores the codes of one part in one plane.
    fn store_plane(&self, kb: &mut KernelBuilder, buf: BufId, begin: ExprId, codes: &[ExprId]) {
        let elements = self.block.lanes as usize / 4 * self.codes.quad();
        for (vector, &code) in codes.iter().enumerate() {
            let bytes = kb.cast(code, DType::I8);
            let bytes = self.as_elements(kb, bytes, elements as u32);
            let at = kb.add_int(begin, (vector * elements) as i64);
            kb.store_vec(buf, at, bytes);
        }
    }

    /// Bits as `count` elements of the buffer of codes.
    fn as_elements(&self, kb: &mut KernelBuilder, bits: ExprId, count: u32) -> ExprId {
        let to = Ty::vector(kb.kernel().bufs[self.codes.codes].dtype, count);
        if kb.ty(bits) == to { bits } else { kb.bitcast(bits, to) }
    }

    /// Vectors of quads that cover `quads`.
    fn width(&self, quads: usize) -> u32 {
        let most = self.block.lanes.min(1 << quads.trailing_zeros());
        most.max(self.block.size.min(quads as u32))
    }

    /// Copies the codes of a group to where rows lie one by one.
    fn copy(&self, kb: &mut KernelBuilder, strip: BufId, g: ExprId, quads: usize) {
        let codes = self.codes;
        let lanes = self.width(quads) * codes.quad() as u32;
        self.each(kb, |kb, r, row| {
            let from = kb.mul_int(r, self.strip_row());
            let of_row = kb.mul_int(row, (codes.row_quads() * codes.quad()) as i64);
            let to = kb.mul_int(g, self.strip_row());
            let to = kb.add(to, of_row);
            for at in (0..(quads * codes.quad()) as i64).step_by(lanes as usize) {
                let (from, to) = (kb.add_int(from, at), kb.add_int(to, at));
                let some = kb.load_vec(strip, from, lanes);
                kb.store_vec(codes.codes, to, some);
            }
        });
    }

    /// Interleaves the quads of a group of all rows.
    fn interleave(&self, kb: &mut KernelBuilder, strip: BufId, g: ExprId, quads: usize) {
        let (codes, size) = (self.codes, i64::from(self.block.size));
        let width = self.width(quads);
        let lanes = width * codes.quad() as u32;
        let of_block = kb.mul_int(self.block.first, (codes.row_quads() * codes.quad()) as i64);
        let to = kb.mul_int(g, self.strip_row() * size);
        let to = kb.add(to, of_block);
        for begin in (0..(quads * codes.quad()) as i64).step_by(lanes as usize) {
            let rows: Vec<ExprId> = (0..size)
                .map(|r| {
                    let from = kb.int(r * self.strip_row() + begin);
                    let some = kb.load_vec(strip, from, lanes);
                    let quads = kb.bitcast(some, Ty::vector(DType::I32, width));
                    kb.let_("quads", quads)
                })
                .collect();
            for (i, quads) in interleaved(kb, rows).into_iter().enumerate() {
                let bits = self.as_elements(kb, quads, lanes);
                let at = kb.add_int(to, begin * size + i as i64 * i64::from(lanes));
                kb.store_vec(codes.codes, at, bits);
            }
        }
    }

    /// Stores the scale of the last group of a row in the first place. Integers cannot hold NaN and infinity: it carries
    /// them on.
    fn unit(&self, kb: &mut KernelBuilder, r: ExprId, row: ExprId) {
        let (scale, size) = (kb.load(self.carried.scale, r), kb.load(self.carried.size, r));
        let size = kb.bitcast(size, Ty::scalar(DType::F32));
        let none = kb.float(0.0);
        let poison = kb.mul(size, none);
        let unit = kb.add(scale, poison);
        let at = kb.mul_int(row, self.codes.groups() as i64);
        kb.store(self.codes.scales, at, unit);
    }
}

/// The lanes of several vectors (a power of two) by turns: first lane 0 of all of them.
fn interleaved(kb: &mut KernelBuilder, vectors: Vec<ExprId>) -> Vec<ExprId> {
    let lanes = kb.ty(vectors[0]).lanes;
    let mut sets: Vec<Vec<ExprId>> = vectors.into_iter().map(|v| vec![v]).collect();
    // Lanes that stay together: so many vectors are in a set.
    let mut unit = 1;
    while sets.len() > 1 {
        let joined = sets.chunks(2).map(|pair| {
            let mut all = Vec::new();
            for (&a, &b) in pair[0].iter().zip(&pair[1]) {
                for half in [0, lanes / 2] {
                    let lane = |l: u32| {
                        let (turn, within) = (l / unit, l % unit);
                        half + turn / 2 * unit + within + if turn % 2 == 0 { 0 } else { lanes }
                    };
                    let mixed = kb.shuffle(a, Some(b), (0..lanes).map(lane).collect());
                    all.push(kb.let_("mixed", mixed));
                }
            }
            all
        });
        sets = joined.collect();
        unit *= 2;
    }
    sets.swap_remove(0)
}

/// The larger of two numbers; `a` if `b` is NaN.
fn larger(kb: &mut KernelBuilder, a: ExprId, b: ExprId) -> ExprId {
    let less = kb.lt(a, b);
    kb.select(less, b, a)
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
