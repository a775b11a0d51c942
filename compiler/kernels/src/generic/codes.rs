//! Activations as integers for the products with packed weights: the row of a `quantize_rows`, in the order of
//! [`Codes`](crate::contraction::Codes).
//!
//! Each group of columns becomes `round(x / scale)`, borders moved by [`CODE_OFFSET`](mlcc_ir::ops::CODE_OFFSET), with
//! `scale = max|x| / largest code`: 8-bit codes, or 16-bit ones in two planes, `code = 256 high + low`. With 16 bits the
//! error is at most `max|x| / 65024` of a group: finer than f16 for the large values of the group, and far below the error
//! of packed weights.
//!
//! Products want the ratios of neighbouring scales. A group of zeros takes the scale of the group before it, and no scale
//! is below 2^-64 of a larger one before it, so that ratios stay finite.

mod ahead;
mod round;

use super::inline::{Binding, Index, Inliner};
use super::rows::{RowAt, store_all};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::ops::{Op, max_code};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::is_long;

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

/// Rows whose codes lie interleaved: some columns of all rows one after the other, then the next columns.
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
    /// Columns of a row that lie together, 4 or 8.
    pub columns: u32,
    /// What is known of each row: values and the buffers that hold them, an element per row of the block.
    pub known: &'a [(ValueId, BufId)],
    pub lanes: u32,
    /// Asks for f32 elements ahead of their use, and the number of all rows.
    pub ahead: Option<(InstrId, ExprId)>,
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

/// Most bytes of computed values between the steps, so that they stay in the first-level cache: the rows of a block take
/// turns on pieces of their columns.
const PIECE_BYTES: usize = 16 << 10;
/// Most groups of a piece.
const MOST_GROUPS: usize = 8;
/// Vectors whose values are computed together where that takes many steps.
const VECTORS_AT_ONCE: u32 = 4;

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
    /// Elements of the codes of a group of one row.
    fn group_elements(&self) -> i64 {
        (self.quads(self.group) * self.quad()) as i64
    }
    /// Columns of a group with whole parts.
    fn group_columns(&self) -> usize {
        self.group.next_multiple_of(self.part)
    }
    /// True if the values are only loaded, so that it costs nothing to have them twice.
    fn loaded(&self, block: &Block) -> bool {
        matches!(block.inliner.bindings.get(&self.x), Some(Binding::Buffer { layout: None, .. }))
    }
    /// Bits as `count` elements of the buffer of codes.
    fn as_elements(&self, kb: &mut KernelBuilder, bits: ExprId, count: u32) -> ExprId {
        let to = Ty::vector(kb.kernel().bufs[self.codes].dtype, count);
        if kb.ty(bits) == to { bits } else { kb.bitcast(bits, to) }
    }
}

/// Quantizes the rows of a block. On the way it stores other values of the rows, whole vectors of as many columns as the
/// first of the codes have.
pub fn emit(kb: &mut KernelBuilder, block: &Block, codes: &[RowCodes], stores: &[(ValueId, BufId)]) {
    let shape = |c: &RowCodes| (c.group, c.bits, c.part, c.k);
    for (i, codes) in codes.chunk_by(|a, b| shape(a) == shape(b)).enumerate() {
        let by = groups_of_piece(block, codes);
        let work = codes.iter().map(|codes| Work::new(kb, block, codes, by)).collect();
        Rows { codes, work, by, block, stores: if i == 0 { stores } else { &[] } }.emit(kb);
    }
}

/// How many groups of each row are worked on before the next row, of codes of equal shape: all pieces have as many if
/// possible.
fn groups_of_piece(block: &Block, codes: &[RowCodes]) -> usize {
    let full = (codes[0].k / codes[0].group).max(1);
    let computed = codes.iter().filter(|codes| !codes.loaded(block)).count();
    let bytes = 4 * codes[0].group_columns() * block.size as usize * computed;
    let most = (PIECE_BYTES / bytes.max(1)).clamp(1, MOST_GROUPS).min(full);
    (most / 2 + 1..=most).rev().find(|by| full.is_multiple_of(*by)).unwrap_or(most)
}

/// What one of the codes needs while a block is quantized.
struct Work {
    carried: Carried,
    /// The values of a piece of each row, where they are computed and not only loaded.
    values: Option<BufId>,
    /// Bits of the largest magnitude of each group of a piece of one row.
    sizes: BufId,
    /// Reciprocals of the scales of a piece of each row.
    inverses: BufId,
}

impl Work {
    fn new(kb: &mut KernelBuilder, block: &Block, codes: &RowCodes, by: usize) -> Work {
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
        let rows = block.size as usize;
        let mut stack = |name, dtype, len| kb.alloc(name, dtype, len, Space::Stack);
        Work {
            carried,
            values: (!codes.loaded(block))
                .then(|| stack("values", DType::F32, rows * by * codes.group_columns())),
            sizes: stack("sizes", DType::I32, by),
            inverses: stack("inverses", DType::F32, rows * by),
        }
    }
}

/// Rows of a block and codes of equal shape.
struct Rows<'a, 'f> {
    codes: &'a [RowCodes],
    work: Vec<Work>,
    /// Groups of a piece.
    by: usize,
    block: &'a Block<'a, 'f>,
    stores: &'a [(ValueId, BufId)],
}

/// A row of a block: its number there, its number, and what is known of it.
struct Row<'f> {
    r: ExprId,
    row: ExprId,
    inliner: Inliner<'f>,
    /// The row whose columns are worked on after those of this one, and how many columns further right.
    next: Option<(ExprId, ExprId)>,
}

/// Where a group is: its number in the piece, its number, and how many of its columns there are.
#[derive(Clone, Copy)]
struct Group {
    i: ExprId,
    g: ExprId,
    columns: usize,
}

impl<'f> Rows<'_, 'f> {
    fn emit(&self, kb: &mut KernelBuilder) {
        let (group, k, by) = (self.codes[0].group, self.codes[0].k, self.by);
        let full = k / group;
        let pieces = kb.int((full / by) as i64);
        kb.serial("piece", pieces, |kb, p| {
            let first = kb.mul_int(p, by as i64);
            self.piece(kb, first, by, group);
        });
        if !full.is_multiple_of(by) {
            let first = kb.int((full / by * by) as i64);
            self.piece(kb, first, full % by, group);
        }
        if !k.is_multiple_of(group) {
            let first = kb.int(full as i64);
            self.piece(kb, first, 1, k % group);
        }
        self.each(kb, |kb, r, row| self.each_code(|(codes, work)| unit(kb, codes, work, r, row)));
    }

    fn each_code(&self, body: impl FnMut((&RowCodes, &Work))) {
        self.codes.iter().zip(&self.work).for_each(body);
    }

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

    /// So many groups of every row, with `columns` columns each. Magnitudes of all groups of a row come first, then their
    /// scales, then the codes: steps of different groups need not wait for each other.
    fn piece(&self, kb: &mut KernelBuilder, first: ExprId, groups: usize, columns: usize) {
        let each_group = |kb: &mut KernelBuilder, body: &dyn Fn(&mut KernelBuilder, Group)| {
            let groups = kb.int(groups as i64);
            kb.serial("g", groups, |kb, i| {
                let g = kb.add(first, i);
                body(kb, Group { i, g, columns });
            });
        };
        self.each(kb, |kb, r, row| {
            let mut inliner = self.block.inliner.clone();
            for &(v, buf) in self.block.known {
                let value = kb.load(buf, r);
                inliner.bindings.insert(v, Binding::Value(kb.let_("known", value)));
            }
            let next = self.next(kb, (r, row), first, groups as i64);
            let row = Row { r, row, inliner, next };
            each_group(kb, &|kb, group| self.measure(kb, &row, group));
            self.scales(kb, &row, first, groups as i64);
        });
        let one_by_one = |kb: &mut KernelBuilder| {
            self.each(kb, |kb, r, row| {
                let row = Row { r, row, inliner: self.block.inliner.clone(), next: None };
                each_group(kb, &|kb, group| self.each_code(|code| self.round_row(kb, code, &row, group)));
            });
        };
        if self.block.size == 1 {
            return one_by_one(kb);
        }
        let size = kb.int(self.block.size.into());
        let few = kb.lt(self.block.rows, size);
        kb.if_else(few, one_by_one, |kb| {
            each_group(kb, &|kb, group| self.each_code(|code| self.round_block(kb, code, group)));
        });
    }

    /// First columns, in the group, of the vectors of whole parts.
    fn vectors(&self, columns: usize) -> std::iter::StepBy<std::ops::Range<usize>> {
        (0..columns.next_multiple_of(self.codes[0].part)).step_by(self.block.lanes as usize)
    }

    /// Number of a group among those of a piece of all rows.
    fn of_piece(&self, kb: &mut KernelBuilder, row: &Row, i: ExprId) -> ExprId {
        let before = kb.mul_int(row.r, self.by as i64);
        kb.add(before, i)
    }

    /// Where column `begin` of a group is among the values of a piece of all rows.
    fn in_values(&self, kb: &mut KernelBuilder, row: &Row, (group, begin): (Group, usize)) -> ExprId {
        let number = self.of_piece(kb, row, group.i);
        let first = kb.mul_int(number, self.codes[0].group_columns() as i64);
        kb.add_int(first, begin as i64)
    }

    /// Computes the values of a group, all codes together, and their largest magnitudes. Magnitudes are compared by their
    /// bits: an instruction, where the larger of two floats that may be NaN takes four.
    fn measure(&self, kb: &mut KernelBuilder, row: &Row, group: Group) {
        let magnitude = kb.int_of(MAGNITUDE, DType::I32);
        let mut sizes: Vec<Option<ExprId>> = vec![None; self.codes.len()];
        let lanes = self.lanes_at_once(group.columns);
        for begin in self.vectors(group.columns).step_by((lanes / self.block.lanes) as usize) {
            self.ask(kb, row, (group, begin), lanes);
            let values: Vec<ExprId> =
                self.codes.iter().map(|codes| self.value(kb, codes, row, (group, begin), lanes)).collect();
            if begin < group.columns && !self.stores.is_empty() {
                let at = self.column(kb, (group, begin));
                let ctx = Inliner { lanes, aligned: true, ..row.inliner.clone() };
                let own = [Index::scalar(row.row)];
                let leading = self.block.leading.unwrap_or(&own);
                store_all(kb, &ctx, RowAt::own(leading), (Index::lanes(at), at), self.stores);
            }
            for ((work, &value), size) in self.work.iter().zip(&values).zip(&mut sizes) {
                if let Some(strip) = work.values {
                    let at = self.in_values(kb, row, (group, begin));
                    kb.store_vec(strip, at, value);
                }
                let bits = kb.bitcast(value, Ty::vector(DType::I32, lanes));
                let own = kb.binary(BinOp::And, bits, magnitude);
                let most = size.map_or(own, |so_far| kb.max(so_far, own));
                *size = Some(kb.let_("sizes", most));
            }
        }
        for (work, size) in self.work.iter().zip(sizes) {
            let size = kb.reduce_lanes(BinOp::Max, size.expect("a group has columns"));
            kb.store(work.sizes, group.i, size);
        }
    }

    /// Finds the scales of the groups of a piece from their magnitudes, stores their ratios, and keeps their reciprocals.
    fn scales(&self, kb: &mut KernelBuilder, row: &Row, first: ExprId, groups: i64) {
        let zero = kb.int(0);
        // What is carried stays in registers meanwhile.
        let mut own: Vec<[(BufId, BufId); 3]> = Vec::new();
        for work in &self.work {
            let Carried { scale, largest, size } = work.carried;
            own.push([scale, largest, size].map(|from| {
                let dtype = kb.kernel().bufs[from].dtype;
                let here = kb.alloc("carried", dtype, 1, Space::Local);
                let value = kb.load(from, row.r);
                kb.store(here, zero, value);
                (from, here)
            }));
        }
        let extent = kb.int(groups);
        kb.serial("g", extent, |kb, i| {
            for ((codes, work), own) in self.codes.iter().zip(&self.work).zip(&own) {
                let [scale, largest, size] = own.map(|(_, here)| here);
                let g = kb.add(first, i);
                let inverse =
                    scale_of_group(kb, (codes, work), row, (i, g), &Carried { scale, largest, size });
                let at = self.of_piece(kb, row, i);
                kb.store(work.inverses, at, inverse);
            }
        });
        for (to, here) in own.into_iter().flatten() {
            let value = kb.load(here, zero);
            kb.store(to, row.r, value);
        }
    }

    /// Column `begin` of a group in its row.
    fn column(&self, kb: &mut KernelBuilder, (group, begin): (Group, usize)) -> ExprId {
        let first = kb.mul_int(group.g, self.codes[0].group as i64);
        kb.add_int(first, begin as i64)
    }

    /// Columns whose values are computed together: several vectors where that takes many steps (an activation), so that
    /// their steps alternate. One after the other they fill the scheduler of a core before it has found enough to do.
    fn lanes_at_once(&self, columns: usize) -> u32 {
        let block = self.block;
        let wide = VECTORS_AT_ONCE * block.lanes;
        let fits = |size: usize| size.is_multiple_of(wide as usize);
        let long = block.inliner.f.live().any(|(_, node)| matches!(node.op, Op::Unary(op) if is_long(op)));
        let registers = block.lanes == 16;
        if long && registers && fits(columns) && fits(self.codes[0].group) { wide } else { block.lanes }
    }

    /// The `lanes` values from column `begin` of a group, zero behind the columns of the group.
    fn value(
        &self,
        kb: &mut KernelBuilder,
        codes: &RowCodes,
        row: &Row,
        (group, begin): (Group, usize),
        lanes: u32,
    ) -> ExprId {
        let none = kb.constant(0.0, Ty::vector(DType::F32, lanes));
        if begin >= group.columns {
            return none;
        }
        let at = self.column(kb, (group, begin));
        let mask = (begin + lanes as usize > group.columns).then(|| {
            let base = kb.int(begin as i64);
            let numbers = kb.ramp1(base, lanes);
            let end = kb.int(group.columns as i64);
            kb.lt(numbers, end)
        });
        let ctx = Inliner { lanes, aligned: true, mask, ..row.inliner.clone() };
        let own = [Index::scalar(row.row)];
        let leading = self.block.leading.unwrap_or(&own);
        let value = ctx.value(kb, codes.x, &[leading, &[Index::lanes(at)]].concat());
        let value = if kb.ty(value).lanes < lanes { kb.splat(value, lanes) } else { value };
        let value = kb.cast(value, DType::F32);
        let value = match mask {
            Some(mask) => kb.select(mask, value, none),
            None => value,
        };
        kb.let_("v", value)
    }
}

/// Finds the scale of a group (its number in the piece, its number), stores its ratio, and gives its reciprocal.
fn scale_of_group(
    kb: &mut KernelBuilder,
    (codes, work): (&RowCodes, &Work),
    row: &Row,
    (i, g): (ExprId, ExprId),
    carried: &Carried,
) -> ExprId {
    let zero = kb.int(0);
    let size = kb.load(work.sizes, i);
    let size = kb.let_("size", size);
    let before = kb.load(carried.size, zero);
    let most = kb.max(before, size);
    kb.store(carried.size, zero, most);
    let size = kb.bitcast(size, Ty::scalar(DType::F32));

    let before = kb.load(carried.scale, zero);
    let before = kb.let_("before", before);
    let largest = kb.load(carried.largest, zero);
    let largest = kb.let_("largest", largest);
    let (step, tiny, least) = (kb.float(1.0 / max_code(codes.bits)), kb.float(TINY), kb.float(LEAST));
    let own = kb.mul(size, step);
    let own = kb.let_("own", own);
    // The floor below is no larger than `largest`, so this need not wait for it.
    let most = larger(kb, largest, own);
    kb.store(carried.largest, zero, most);
    let floor = kb.mul(largest, least);
    let own = larger(kb, own, floor);
    let normal = kb.lt(tiny, size);
    let scale = kb.select(normal, own, before);
    let scale = kb.let_("scale", scale);
    kb.store(carried.scale, zero, scale);
    let ratio = kb.div(before, scale);
    let at = kb.mul_int(row.row, codes.groups() as i64);
    let at = kb.add(at, g);
    kb.store(codes.scales, at, ratio);
    let one = kb.float(1.0);
    kb.div(one, scale)
}

/// Stores the scale of the last group of a row in the first place. Integers cannot hold NaN and infinity: it carries
/// them on.
fn unit(kb: &mut KernelBuilder, codes: &RowCodes, work: &Work, r: ExprId, row: ExprId) {
    let (scale, size) = (kb.load(work.carried.scale, r), kb.load(work.carried.size, r));
    let size = kb.bitcast(size, Ty::scalar(DType::F32));
    let none = kb.float(0.0);
    let poison = kb.mul(size, none);
    let unit = kb.add(scale, poison);
    let at = kb.mul_int(row, codes.groups() as i64);
    kb.store(codes.scales, at, unit);
}

/// The larger of two numbers; `a` if `b` is NaN.
fn larger(kb: &mut KernelBuilder, a: ExprId, b: ExprId) -> ExprId {
    let less = kb.lt(a, b);
    kb.select(less, b, a)
}
