//! Activations as integers for the products with packed weights: the row of a `quantize_rows`, in the order
//! that these products read.
//!
//! Each group of columns becomes `round(x / scale)`, borders moved by
//! [`CODE_OFFSET`](mlcc_ir::ops::CODE_OFFSET), with `scale = max|x| / largest code`: 8-bit codes, or 16-bit
//! ones in two planes, `code = 256 high + low`. With 16 bits the error is at most `max|x| / 65024` of a
//! group: finer than f16 for the large values of the group, and far below the error of packed weights.
//!
//! Products need the ratios of neighbouring scales. A group of zeros takes the scale of the group before it,
//! and no scale is below 2^-64 of a larger one before it, so that ratios stay finite.

mod measure;
mod prefetch;
mod round;
mod scales;

use crate::inline::{Binding, Inliner, LaneIndex};
use mlcc_ir::graph::ValueId;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprType, MemorySpace};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use mlcc_target::QuantizeTuning;
use scales::ScaleCarry;

/// The way in which the codes of some rows are interleaved: `columns` codes (4 or 8) of each, then the next
/// columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CodeBlock {
    pub rows: u32,
    pub columns: u32,
}

impl CodeBlock {
    /// Every row separately.
    pub const SINGLE: CodeBlock = CodeBlock { rows: 1, columns: 4 };
}

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

/// Rows whose codes are interleaved: some columns of all rows in order, then the next columns.
pub struct RowBlock<'a, 'f, 'k> {
    pub inliner: &'a Inliner<'f, 'k>,
    /// Indices of the only row, where rows have several leading axes; else the number of a row is its only
    /// index.
    pub leading: Option<&'a [LaneIndex<'k>]>,
    /// Row number of the first.
    pub first: Val<'k>,
    /// Rows that there are, at most `size`. Fewer are stored one by one, each with all its quads.
    pub rows: Val<'k>,
    /// A power of two.
    pub size: u32,
    /// Columns of a row that stay together, 4 or 8.
    pub columns: u32,
    /// The known values of each row and their buffers, which have an element per row of the block.
    pub known: &'a [(ValueId, BufferView<'k, 1>)],
    pub lanes: u32,
    /// The instruction that prefetches f32 elements, and the number of all rows.
    pub prefetch: Option<(InstrId, Val<'k>)>,
    pub sizes: QuantizeTuning,
}

impl RowCodes {
    /// Quads of `columns` columns of a row, all planes.
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
    /// Elements of the codes of one row.
    fn row_elements(&self) -> i64 {
        (self.quads(self.k) * self.quad()) as i64
    }
    /// Elements of the codes of a group of one row.
    fn group_elements(&self) -> i64 {
        (self.quads(self.group) * self.quad()) as i64
    }
    /// Columns of a group with whole parts.
    fn group_columns(&self) -> usize {
        self.group.next_multiple_of(self.part)
    }
    /// The scales, `[rows, groups]`.
    fn scales<'k>(&self, k: &'k Recorder) -> BufferView<'k, 2> {
        k.view(self.scales, [1, self.k.div_ceil(self.group) as i64])
    }
    /// True if the values are only loaded, so that it costs nothing to have them twice.
    fn loaded(&self, block: &RowBlock) -> bool {
        matches!(block.inliner.bindings.get(&self.x), Some(Binding::Buffer { layout: None, pages: None, .. }))
    }
}

/// Quantizes the rows of a block. On the way it stores other values of the rows, whole vectors of as many
/// columns as the first of the codes have.
pub fn emit<'k>(
    k: &'k Recorder,
    block: &RowBlock<'_, '_, 'k>,
    codes: &[RowCodes],
    stores: &[(ValueId, BufId)],
) {
    let shape = |c: &RowCodes| (c.group, c.bits, c.part, c.k);
    for (i, codes) in codes.chunk_by(|a, b| shape(a) == shape(b)).enumerate() {
        let by = groups_of_piece(block, codes);
        let work = codes.iter().map(|codes| QuantizeBuffers::new(k, block, codes, by as i64)).collect();
        RowQuantizer { k, codes, work, by, block, stores: if i == 0 { stores } else { &[] } }.emit();
    }
}

/// The number of groups of each row that are worked on before the next row, of codes of equal shape: all
/// pieces have as many if possible.
fn groups_of_piece(block: &RowBlock, codes: &[RowCodes]) -> usize {
    let full = (codes[0].k / codes[0].group).max(1);
    let computed = codes.iter().filter(|codes| !codes.loaded(block)).count();
    let bytes = 4 * codes[0].group_columns() * block.size as usize * computed;
    let QuantizeTuning { piece_bytes, piece_groups, .. } = block.sizes;
    let most = (piece_bytes as usize / bytes.max(1)).clamp(1, piece_groups as usize).min(full);
    (most / 2 + 1..=most).rev().find(|by| full.is_multiple_of(*by)).unwrap_or(most)
}

/// Buffers for one of the codes while a block is quantized.
struct QuantizeBuffers<'k> {
    /// An element per row.
    carry: ScaleCarry<BufferView<'k, 1>>,
    /// The values of a piece, `[rows, groups, columns]`, where they are computed and not only loaded.
    values: Option<BufferView<'k, 3>>,
    /// Bits of the largest magnitude of each group of a piece of one row.
    absmax: BufferView<'k, 1>,
    /// Reciprocals of the scales of a piece, `[rows, groups]`.
    inverse_scales: BufferView<'k, 2>,
}

impl<'k> QuantizeBuffers<'k> {
    fn new(k: &'k Recorder, block: &RowBlock, codes: &RowCodes, by: i64) -> QuantizeBuffers<'k> {
        let rows = i64::from(block.size);
        let space = if rows == 1 { MemorySpace::Local } else { MemorySpace::Stack };
        let filled = |name, dtype, value: f64| {
            let buf = k.alloc(name, dtype, [rows], space);
            (0..rows).for_each(|r| buf.set([r], k.literal(value, ExprType::scalar(dtype))));
            buf
        };
        let carry = ScaleCarry {
            scale: filled("scale", DType::F32, 1.0),
            largest: filled("largest", DType::F32, 0.0),
            absmax: filled("size", DType::I32, 0.0),
        };
        let values =
            || k.alloc("values", DType::F32, [rows, by, codes.group_columns() as i64], MemorySpace::Stack);
        QuantizeBuffers {
            carry,
            values: (!codes.loaded(block)).then(values),
            absmax: k.alloc("sizes", DType::I32, [by], MemorySpace::Stack),
            inverse_scales: k.alloc("inverses", DType::F32, [rows, by], MemorySpace::Stack),
        }
    }
}

/// Rows of a block and codes of equal shape.
struct RowQuantizer<'a, 'f, 'k> {
    k: &'k Recorder,
    codes: &'a [RowCodes],
    work: Vec<QuantizeBuffers<'k>>,
    /// Groups of a piece.
    by: usize,
    block: &'a RowBlock<'a, 'f, 'k>,
    stores: &'a [(ValueId, BufId)],
}

/// A row of a block: its number there, its number, and what is known of it.
struct BlockRow<'f, 'k> {
    r: Val<'k>,
    row: Val<'k>,
    inliner: Inliner<'f, 'k>,
    /// The row whose columns are worked on after those of this one, and how many columns further right.
    next: Option<(Val<'k>, Val<'k>)>,
}

/// A group of columns: its number in the piece, its number, and how many of its columns there are.
#[derive(Clone, Copy)]
struct CodeGroup<'k> {
    i: Val<'k>,
    g: Val<'k>,
    columns: usize,
}

impl<'f, 'k> RowQuantizer<'_, 'f, 'k> {
    fn emit(&self) {
        let (group, columns, by) = (self.codes[0].group, self.codes[0].k, self.by);
        let full = columns / group;
        let number = |groups: usize| self.k.int(groups as i64);
        self.k.serial("piece", (full / by) as i64, |p| self.piece(p * by as i64, by, group));
        if !full.is_multiple_of(by) {
            self.piece(number(full / by * by), full % by, group);
        }
        if !columns.is_multiple_of(group) {
            self.piece(number(full), 1, columns % group);
        }
        self.each_row(|r, row| self.each_code(|(codes, work)| self.store_unit(codes, work, r, row)));
    }

    /// `groups` groups of every row, with `columns` columns each. Magnitudes of all groups of a row come
    /// first, then their scales, then the codes: steps of different groups need not wait for each other.
    fn piece(&self, first: Val<'k>, groups: usize, columns: usize) {
        let (k, groups) = (self.k, groups as i64);
        let each_group = |body: &dyn Fn(CodeGroup<'k>)| {
            k.serial("g", groups, |i| body(CodeGroup { i, g: first + i, columns }));
        };
        self.each_row(|r, row| {
            let mut inliner = self.block.inliner.clone();
            for (v, kept) in self.block.known {
                inliner.bindings.insert(*v, Binding::Value(kept.at([r]).named("known")));
            }
            let next = self.next_row((r, row), first, groups);
            let row = BlockRow { r, row, inliner, next };
            each_group(&|group| self.measure_absmax(&row, group));
            self.compute_scales(&row, first, groups);
        });
        let one_by_one = || {
            self.each_row(|r, row| {
                let row = BlockRow { r, row, inliner: self.block.inliner.clone(), next: None };
                each_group(&|group| self.each_code(|code| self.round_row(code, &row, group)));
            });
        };
        if self.block.size == 1 {
            return one_by_one();
        }
        let few = self.block.rows.lt(i64::from(self.block.size));
        k.when_else(few, one_by_one, || {
            each_group(&|group| self.each_code(|code| self.round_block(code, group)));
        });
    }

    fn each_code(&self, body: impl FnMut((&RowCodes, &QuantizeBuffers<'k>))) {
        self.codes.iter().zip(&self.work).for_each(body);
    }

    /// `body(number in the block, row number)` for every row.
    fn each_row(&self, body: impl FnOnce(Val<'k>, Val<'k>)) {
        if self.block.size == 1 {
            return body(self.k.int(0), self.block.first);
        }
        self.k.serial("r", self.block.rows, |r| body(r, (self.block.first + r).named("row")));
    }

    /// First columns, in the group, of the vectors of whole parts.
    fn vectors(&self, columns: usize) -> std::iter::StepBy<std::ops::Range<usize>> {
        (0..columns.next_multiple_of(self.codes[0].part)).step_by(self.block.lanes as usize)
    }

    /// Column `begin` of a group in its row.
    fn column(&self, (group, begin): (CodeGroup<'k>, usize)) -> Val<'k> {
        group.g * self.codes[0].group as i64 + begin as i64
    }
}
