//! One slice of the weights against a few activation rows: the register block of the CPU contractions.

use super::few_rows::Passes;
use super::float_strip::FloatStrip;
use super::strip::Strip;
use super::{
    Activation, CACHE_LINE, Chosen, CodeBlock, Codes, Edge, Epilogue, GROUP, Lookup, MatMul, Slice, Tile,
    Weight,
};
use crate::params::{MatMulParams, Prefetch};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BufId, ExprId, Space, Stmt, Ty};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::TILE;
use mlcc_quant::tile::{self, GroupReader};

/// One slice of the weights against `rows` activation rows, fully unrolled over both.
pub(super) struct Block<'a> {
    pub spec: &'a MatMul,
    pub params: &'a MatMulParams,
    pub lookup: Lookup,
    pub slice: Slice,
    /// First row of the result, or the first place in the list of rows.
    pub row: ExprId,
    pub rows: u32,
    /// By row of the block its row of x and of the result, where they are not in order.
    listed: Option<Vec<[ExprId; 2]>>,
    /// Whether these rows are whole blocks of interleaved codes (see [`Codes::block`]).
    pub interleaved: bool,
    /// The unpacked weights, where there are any.
    pub strip: Option<Strip>,
    /// Converted float weights, where there are any.
    pub floats: Option<FloatStrip>,
    /// Where the weights that come next are asked for.
    pub passes: Option<Passes>,
    /// Partial sums per accumulator.
    pub chains: u32,
    /// `[chains][rows][16 tiles]` f32, in registers.
    pub acc: BufId,
}

/// Which activation rows a block takes, and how it finds its operands.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub first: ExprId,
    pub count: u32,
    pub interleaved: bool,
    pub strip: Option<Strip>,
    pub floats: Option<FloatStrip>,
    pub passes: Option<Passes>,
}

impl Rows {
    /// Rows in their order, which read the weights as they are.
    pub fn plain(first: ExprId, count: u32) -> Rows {
        Rows { first, count, interleaved: false, strip: None, floats: None, passes: None }
    }
}

impl<'a> Block<'a> {
    /// A block with its accumulators set to zero.
    pub fn new(
        kb: &mut KernelBuilder,
        spec: &'a MatMul,
        params: &'a MatMulParams,
        lookup: Lookup,
        slice: Slice,
        rows: Rows,
    ) -> Block<'a> {
        let lanes_of_slice = rows.count * slice.tiles * (TILE as u32 / params.lanes);
        let chains = (params.in_flight / lanes_of_slice).clamp(1, 4);
        // Only plain weights keep their partial sums across iterations; groups fold them into one accumulator.
        let kept = if matches!(spec.weight, Weight::Plain(_)) { chains } else { 1 };
        let length = (kept * rows.count * slice.tiles) as usize * TILE;
        let acc = kb.alloc("acc", DType::F32, length, Space::Local);
        let Rows { first: row, count, interleaved, strip, floats, passes } = rows;
        let listed = spec.chosen.map(|chosen| chosen.rows(kb, row, count));
        let block = Block {
            spec,
            params,
            lookup,
            slice,
            row,
            rows: count,
            interleaved: interleaved && listed.is_none(),
            listed,
            strip,
            floats,
            passes,
            chains,
            acc,
        };
        let zero = kb.constant(0.0, block.vector());
        for chain in 0..kept {
            block.each(|r, part| {
                let at = block.slot(kb, chain, r, part);
                kb.store_vec(acc, at, zero);
            });
        }
        block
    }

    pub fn emit(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        match (self.spec.weight, self.spec.activation) {
            (Weight::Plain(plain), Activation::F32 | Activation::BF16) => self.plain(kb, plain),
            (Weight::Packed(format), Activation::F32 | Activation::BF16) => self.grouped(kb, format),
            (Weight::Packed(format), Activation::Codes(codes)) => {
                if self.params.rows.len() == 1 {
                    self.streamed(kb, format, codes);
                } else {
                    let scales = self.spec.k.div_ceil(codes.group) as i64;
                    let all = (kb.int(0), kb.int(scales));
                    self.integers(kb, format, codes, all, None);
                }
                self.scale_sums(kb, codes);
            }
            (Weight::Plain(plain), Activation::Codes(_)) => {
                panic!("integer activations need packed weights, found {}", plain.dtype())
            }
        }
        self.finish(kb, epilogue);
    }

    /// Hands the sums to the epilogue, masked only where the last tile has fewer than 16 rows.
    pub fn finish(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        let mut sums = Vec::new();
        self.each(|r, part| {
            let at = self.slot(kb, 0, r, part);
            let sum = kb.load_vec(self.acc, at, self.params.lanes);
            sums.push((r, part, kb.let_("sum", sum)));
        });
        self.by_edge(kb, |kb, masked| {
            let store = |&(r, part, acc): &(u32, u32, ExprId)| {
                kb.open_block();
                let row = self.row_at(kb, r, 1);
                let tile = self.tile(kb, (row, part), acc, masked);
                epilogue(kb, tile);
                kb.close_block()
            };
            let stores = sums.iter().map(store).collect();
            mlcc_kernel_lang::alternate(kb, stores).into_iter().for_each(|stmt| kb.push(stmt));
        });
    }

    /// What the epilogue is told of the sums of a row and part.
    fn tile(&self, kb: &mut KernelBuilder, (row, part): (ExprId, u32), acc: ExprId, masked: bool) -> Tile {
        let lanes = self.params.lanes;
        let first = kb.mul_int(self.slice.first, TILE as i64);
        let col = kb.add_int(first, (part * lanes).into());
        let mask = masked.then(|| {
            let columns = kb.ramp1(col, lanes);
            let n = kb.int(self.spec.n as i64);
            kb.lt(columns, n)
        });
        Tile { row, col, lanes, acc, mask }
    }

    /// The row of the result that row `r` of the block is; the last one for those behind.
    fn result_row(&self, kb: &mut KernelBuilder, r: ExprId) -> ExprId {
        let last = kb.int(i64::from(self.rows) - 1);
        let Some(rows) = &self.listed else {
            let r = kb.min(r, last);
            return kb.add(self.row, r);
        };
        let mut row = rows[rows.len() - 1][1];
        for (i, [_, here]) in rows.iter().enumerate().rev().skip(1) {
            let end = kb.int(i as i64 + 1);
            let before = kb.lt(r, end);
            row = kb.select(before, *here, row);
        }
        kb.let_("touched", row)
    }

    /// Asks for what the epilogue touches of `count` rows from row `first` of the block.
    pub(super) fn touch(&self, kb: &mut KernelBuilder, first: ExprId, count: u32) {
        let Some(instr) = self.params.touch else { return };
        let column = kb.int(self.spec.n as i64 - 1);
        for buf in self.spec.streams.into_iter().flatten() {
            for r in 0..count {
                let r = kb.add_int(first, r.into());
                let row = self.result_row(kb, r);
                let start = kb.mul_int(row, self.spec.n as i64);
                for tile in 0..self.slice.tiles {
                    let tile = kb.add_int(self.slice.first, tile.into());
                    let at = kb.mul_int(tile, TILE as i64);
                    let at = if self.slice.edge == Edge::Never { at } else { kb.min(at, column) };
                    let at = kb.add(start, at);
                    let element = kb.load(buf, at);
                    kb.push(Stmt::Instr { instr, args: vec![element] });
                }
            }
        }
    }

    /// `body` once or twice: told whether columns may be missing.
    fn by_edge(&self, kb: &mut KernelBuilder, mut hand_over: impl FnMut(&mut KernelBuilder, bool)) {
        match self.slice.edge {
            Edge::Never => hand_over(kb, false),
            Edge::Always => hand_over(kb, true),
            Edge::Last => {
                let last = kb.add_int(self.slice.first, i64::from(self.slice.tiles) - 1);
                let end = kb.int((self.spec.n / TILE) as i64);
                let cond = kb.lt(last, end);
                // Two closures cannot both hold the epilogue: the blocks are built by hand.
                kb.open_block();
                hand_over(kb, false);
                let then = kb.close_block();
                kb.open_block();
                hand_over(kb, true);
                let otherwise = kb.close_block();
                kb.push(Stmt::If { cond, then, otherwise });
            }
        }
    }

    pub fn vector(&self) -> Ty {
        Ty::vector(DType::F32, self.params.lanes)
    }
    pub fn lanes(&self) -> u32 {
        self.params.lanes
    }
    /// Vectors over all rows of the tiles.
    pub fn parts(&self) -> u32 {
        self.slice.parts(self.params.lanes)
    }
    /// Every accumulator: activation row and part of the tiles.
    pub fn each(&self, mut f: impl FnMut(u32, u32)) {
        for r in 0..self.rows {
            for part in 0..self.parts() {
                f(r, part);
            }
        }
    }
    /// Number of an accumulator within one chain.
    pub fn index(&self, r: u32, part: u32) -> usize {
        (r * self.parts() + part) as usize
    }
    pub fn slot(&self, kb: &mut KernelBuilder, chain: u32, r: u32, part: u32) -> ExprId {
        let number = chain * self.rows * self.parts() + r * self.parts() + part;
        kb.int((number * self.params.lanes).into())
    }
    /// The accumulators of a chain as values.
    pub fn load_acc(&self, kb: &mut KernelBuilder, chain: u32) -> Vec<ExprId> {
        let mut values = Vec::new();
        self.each(|r, part| {
            let at = self.slot(kb, chain, r, part);
            let value = kb.load_vec(self.acc, at, self.params.lanes);
            values.push(kb.let_("a", value));
        });
        values
    }
    pub fn store_acc(&self, kb: &mut KernelBuilder, chain: u32, values: &[ExprId]) {
        self.each(|r, part| {
            let at = self.slot(kb, chain, r, part);
            kb.store_vec(self.acc, at, values[self.index(r, part)]);
        });
    }

    /// The row of x (`of` 0) or of the result (1) that row `r` of this block is.
    fn row_at(&self, kb: &mut KernelBuilder, r: u32, of: usize) -> ExprId {
        match &self.listed {
            Some(rows) => rows[r as usize][of],
            None => kb.add_int(self.row, r.into()),
        }
    }

    /// Offset of entry `entry` of row `r`, where each row of x has so many entries.
    fn row_entry(&self, kb: &mut KernelBuilder, r: u32, entry: ExprId, entries: usize) -> ExprId {
        let entries = entries as i64;
        match &self.listed {
            Some(rows) => {
                let start = kb.mul_int(rows[r as usize][0], entries);
                let start = match self.spec.chosen.and_then(|chosen| chosen.zero) {
                    Some(zero) => kb.add(start, zero),
                    None => start,
                };
                kb.add(start, entry)
            }
            None => {
                let start = kb.mul_int(self.row, entries);
                let at = kb.add(start, entry);
                kb.add_int(at, i64::from(r) * entries)
            }
        }
    }

    /// Offset in x of column `col` of float activation row `r` of this block.
    pub fn x_at(&self, kb: &mut KernelBuilder, r: u32, col: ExprId) -> ExprId {
        self.row_entry(kb, r, col, self.spec.activation.row_stride(self.spec.k))
    }

    /// Where the four codes of a quad lie in x: an offset in elements, a multiple of those of four quads, and so many quads
    /// behind it.
    pub fn x_quad_at(
        &self,
        kb: &mut KernelBuilder,
        codes: Codes,
        (r, plane): (u32, usize),
        g: ExprId,
        quad: usize,
    ) -> (ExprId, i64) {
        let elements = codes.quad_elements() as i64;
        let quads = GROUP / 4;
        if self.listed.is_some() {
            let group = kb.mul_int(g, (codes.planes * quads) as i64 * elements);
            let row = codes.row_quads(self.spec.k) * elements as usize;
            return (self.row_entry(kb, r, group, row), (plane * quads + quad) as i64);
        }
        let row_quads = codes.row_quads(self.spec.k) as i64;
        let row = kb.mul_int(self.row, row_quads * elements);
        let block = if self.interleaved { codes.block } else { CodeBlock::SINGLE };
        let (rows, columns) = (i64::from(block.rows), i64::from(block.columns) / 4);
        let group = kb.mul_int(g, (codes.planes * quads) as i64 * rows * elements);
        let (before, r) = (i64::from(r) / rows * rows, i64::from(r) % rows);
        let quad = (plane * quads + quad) as i64;
        let (run, within) = (quad / columns * columns, quad % columns);
        (kb.add(row, group), before * row_quads + run * rows + r * columns + within)
    }

    /// Offset of group `g` of activation row `r` in the starts of integer activations.
    pub fn x_group_at(&self, kb: &mut KernelBuilder, r: u32, g: ExprId) -> ExprId {
        self.row_entry(kb, r, g, self.spec.k.div_ceil(GROUP))
    }

    /// Offset of scale `s` of activation row `r` of integer activations.
    pub fn x_scale_at(&self, kb: &mut KernelBuilder, codes: Codes, r: u32, s: ExprId) -> ExprId {
        self.row_entry(kb, r, s, self.spec.k.div_ceil(codes.group))
    }

    /// The reader of one group of one part.
    pub fn group(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, part: u32) -> GroupReader {
        group_reader(kb, self.spec, format, self.slice, self.params.lanes, g, part)
    }

    /// Word `word` of a group, for every part.
    pub fn words(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, word: usize) -> Vec<ExprId> {
        let read = |part| {
            let bits = self.group(kb, format, g, part).word(kb, word);
            kb.let_("word", bits)
        };
        (0..self.parts()).map(read).collect()
    }

    /// Asks for `count` elements of w that lie the prefetch distance behind `base`, where w goes that far: a tensor ends
    /// `len` elements behind its start.
    pub fn prefetch(&self, kb: &mut KernelBuilder, base: ExprId, count: usize, len: usize) {
        let Some(Prefetch { instr, distance, sparse }) = self.params.prefetch else { return };
        let size = kb.kernel().bufs[self.spec.w].dtype.bytes().unwrap_or(1);
        let last = kb.int((len - count) as i64);
        let last = self.spec.in_w(kb, last);
        let ahead = kb.add_int(base, i64::from(distance) / size as i64);
        let ahead = kb.min(ahead, last);
        let ahead = kb.let_("ahead", ahead);
        let lines = (0..count * size).step_by(CACHE_LINE);
        for line in lines.take(if sparse { 1 } else { usize::MAX }) {
            let at = kb.add_int(ahead, (line / size) as i64);
            let element = kb.load(self.spec.w, at);
            kb.push(Stmt::Instr { instr, args: vec![element] });
        }
    }

    /// Asks for the weights of a group ahead of its use.
    pub fn prefetch_group(&self, kb: &mut KernelBuilder, format: Format, g: ExprId) {
        let bytes = tile::group_bytes(format);
        let base = self.group(kb, format, g, 0).base;
        let all = self.spec.n.div_ceil(TILE) * self.spec.k.div_ceil(GROUP) * bytes;
        self.prefetch(kb, base, bytes, all);
    }
}

impl Chosen {
    /// Rows of x and of the result from place `first` on.
    fn rows(&self, kb: &mut KernelBuilder, first: ExprId, count: u32) -> Vec<[ExprId; 2]> {
        let row = |r: u32| {
            let mut row = kb.add_int(first, r.into());
            if let Some(list) = self.list {
                let place = kb.min(row, self.last);
                row = kb.load(list, place);
                row = kb.cast(row, DType::I64);
            }
            let row = kb.let_("row", row);
            let by = kb.int(self.share);
            let x = kb.div(row, by);
            [kb.let_("x_row", x), row]
        };
        (0..count).map(row).collect()
    }
}

/// The reader of group `g` of one part of a slice.
pub(super) fn group_reader(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    format: Format,
    slice: Slice,
    lanes: u32,
    g: ExprId,
    part: u32,
) -> GroupReader {
    let bytes = tile::group_bytes(format) as i64;
    let groups = spec.k.div_ceil(GROUP) as i64;
    let (tile, part) = slice.tile_of(kb, lanes, part);
    let start = kb.mul_int(tile, groups * bytes);
    let here = kb.mul_int(g, bytes);
    let base = kb.add(start, here);
    let base = spec.in_w(kb, base);
    GroupReader { format, buf: spec.w, base, lanes, part }
}
