//! The contraction `y[i][j] = sum over k of x[i][k] * w[j][k]`: one CPU generator for matvec and matmul over weights in
//! `Tile16` order, and one for GPUs over row-major weights.
//!
//! CPU loops: workers take contiguous runs of weight tiles (16 rows of w); for each tile, blocks of activation rows; for
//! each block, k with the accumulators of all its rows in registers. So a tile is read from memory once, in order, and
//! from cache for all further rows. Lanes are rows of w: activations are broadcast and no sum crosses lanes.
//!
//! The result of a block never touches memory: the epilogue closure receives each vector of sums and stores what it makes
//! of them.

mod floats;
mod gpu;
mod int8;
mod split;

pub use gpu::{GpuMatMulParams, choose_gpu, emit_gpu_matmul};

use crate::params::MatMulParams;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprId, Space, Stmt, Ty};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::TILE;
use mlcc_quant::plain::Plain;
use mlcc_quant::tile::{self, GroupReader};
use split::Planes;

/// Type and row length of the activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// f32, rows of k.
    F32,
    /// bf16, rows of k rounded up to 32, zeros behind k.
    BF16,
    /// int8 codes -127..=127 per group of 32, rows of k rounded up to 32 with zeros behind k; `scales` f32 and `sums` i32
    /// (of the codes of a group), `[rows, groups]`.
    I8 { scales: BufId, sums: BufId },
    /// 16-bit codes per group of 32 as two int8 planes, `code = 256 high + low`: rows of all high bytes, then all low ones,
    /// each of k rounded up to 32; `scales` as above, `sums` times minus the zero point of the weights. Made by the
    /// generator itself (see `split`).
    I16 { scales: BufId, sums: BufId },
}

/// Group of int8 activations, and of all packed weight formats.
pub const GROUP: usize = 32;

impl Activation {
    /// Elements from one row of x to the next.
    pub fn row_stride(self, k: usize) -> usize {
        match self {
            Activation::F32 => k,
            Activation::BF16 | Activation::I8 { .. } => k.next_multiple_of(GROUP),
            Activation::I16 { .. } => 2 * k.next_multiple_of(GROUP),
        }
    }
}

/// Which element type the generators read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weight {
    Plain(Plain),
    Packed(Format),
}

impl Weight {
    pub fn of(dtype: DType) -> Option<Weight> {
        match dtype {
            DType::F32 => Some(Weight::Plain(Plain::F32)),
            DType::F16 => Some(Weight::Plain(Plain::F16)),
            DType::BF16 => Some(Weight::Plain(Plain::BF16)),
            DType::Packed(format) => Some(Weight::Packed(format)),
            DType::Bool
            | DType::I8
            | DType::U8
            | DType::I16
            | DType::U16
            | DType::I32
            | DType::U32
            | DType::I64 => None,
        }
    }
}

/// One contraction.
#[derive(Clone, Copy, Debug)]
pub struct MatMul {
    pub x: BufId,
    pub activation: Activation,
    /// Row of x that meets row 0 of the result.
    pub x_first: ExprId,
    /// The weights; u8 for packed formats.
    pub w: BufId,
    /// Elements of `w` before the tensor.
    pub w_offset: usize,
    pub weight: Weight,
    /// Rows of the result, i64.
    pub m: ExprId,
    /// Rows of w.
    pub n: usize,
    pub k: usize,
}

/// Finished sums, handed to the epilogue.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// Row of the result.
    pub row: ExprId,
    /// First column.
    pub col: ExprId,
    pub lanes: u32,
    /// f32, `lanes` consecutive columns.
    pub acc: ExprId,
    /// Which of them exist; `None` means all.
    pub mask: Option<ExprId>,
}

/// Stores (or uses) a vector of sums.
pub type Epilogue<'a> = dyn FnMut(&mut KernelBuilder, Tile) + 'a;

/// Emits the contraction for a CPU. Panics where x or w contradict their declared types (a bug in lowering), as the
/// builder does. int8 activations need packed weights.
///
/// Gives the number of slices of columns that workers share out: equal numbers mean equal columns per worker.
pub fn emit_matmul(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    epilogue: &mut Epilogue,
) -> i64 {
    let table = params.lookup.map(|instr| {
        let table = tile::code_table(kb);
        (instr, kb.let_("codes", table))
    });
    let planes = splits(spec, params);
    let chunk = match planes {
        true => Some(split::chunk_rows(spec.k, params.rows[0])),
        false => params.chunk,
    };
    // Chunks of rows lie outside of the loop over tiles: each chunk of x stays in cache while the weights stream by.
    let constant = kb.kernel().exprs.as_int(spec.m);
    match chunk.map(i64::from).filter(|&size| constant.is_none_or(|m| m > size)) {
        None => {
            let rows = (kb.int(0), spec.m);
            let planes = planes.then(|| Planes::alloc(kb, constant.unwrap_or(1) as u32, spec.k));
            chunk_of_rows(kb, spec, params, table, planes.as_ref(), rows, epilogue);
        }
        Some(size) => {
            let rounded = kb.add_int(spec.m, size - 1);
            let by = kb.int(size);
            let chunks = kb.div(rounded, by);
            let planes = planes.then(|| Planes::alloc(kb, size as u32, spec.k));
            kb.serial("chunk", chunks, |kb, c| {
                let first = kb.mul_int(c, size);
                let left = kb.sub(spec.m, first);
                let count = kb.min(left, by);
                chunk_of_rows(kb, spec, params, table, planes.as_ref(), (first, count), epilogue);
            });
        }
    }
    slices(spec, params)
}

/// Iterations of the loop over columns: `params.tiles` tiles of weights each.
fn slices(spec: &MatMul, params: &MatMulParams) -> i64 {
    spec.n.div_ceil(TILE * params.tiles as usize) as i64
}

/// Whether the generator turns float activations into int8 planes.
fn splits(spec: &MatMul, params: &MatMulParams) -> bool {
    let floats = matches!(spec.activation, Activation::F32 | Activation::BF16);
    params.split && floats && matches!(spec.weight, Weight::Packed(_))
}

/// All tiles of weights against `count` activation rows from `first`.
fn chunk_of_rows(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    lookup: Lookup,
    planes: Option<&Planes>,
    rows: (ExprId, ExprId),
    epilogue: &mut Epilogue,
) {
    let extent = kb.int(slices(spec, params));
    let spec = match planes {
        Some(planes) => {
            planes.fill(kb, spec, params, rows);
            planes.spec(kb, spec, rows.0)
        }
        None => *spec,
    };
    let wide = params.tiles;
    // The last slice has fewer tiles where their number does not divide.
    let (full, rest) = (spec.n.div_ceil(TILE) as u32 / wide, spec.n.div_ceil(TILE) as u32 % wide);
    let short = !spec.n.is_multiple_of(TILE);
    kb.par("slice", extent, |kb, slice| {
        let first = kb.mul_int(slice, wide.into());
        let mut emit = |kb: &mut KernelBuilder, tiles: u32, edge: Edge| {
            kb.open_block();
            let slice = Slice { first, tiles, edge: if short { edge } else { Edge::Never } };
            rows_of_slice(kb, &spec, params, lookup, slice, rows, epilogue);
            kb.close_block()
        };
        let body = match (full, rest) {
            (1, 0) => emit(kb, wide, Edge::Always),
            (_, 0) => emit(kb, wide, Edge::Last),
            (0, rest) => emit(kb, rest, Edge::Always),
            (full, rest) => {
                let full = kb.int(full.into());
                let cond = kb.lt(slice, full);
                let (then, otherwise) = (emit(kb, wide, Edge::Never), emit(kb, rest, Edge::Always));
                vec![Stmt::If { cond, then, otherwise }]
            }
        };
        body.into_iter().for_each(|s| kb.push(s));
    });
}

/// Bytes that come from memory together.
const CACHE_LINE: usize = 64;

/// A lookup instruction with its table.
type Lookup = Option<(InstrId, ExprId)>;

/// Tiles of weights side by side that are worked on together.
#[derive(Clone, Copy)]
struct Slice {
    first: ExprId,
    tiles: u32,
    edge: Edge,
}

/// When the last tile of a slice has fewer than 16 rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Edge {
    Never,
    Always,
    /// In the last slice.
    Last,
}

/// All `count` activation rows from `first`, for one slice of the weights.
fn rows_of_slice(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    lookup: Lookup,
    slice: Slice,
    (first, count): (ExprId, ExprId),
    epilogue: &mut Epilogue,
) {
    let mut done = kb.int(0);
    for &rows in &params.rows {
        let left = kb.sub(count, done);
        let by = kb.int(rows.into());
        let blocks = kb.div(left, by);
        let before = kb.add(first, done);
        kb.serial("block", blocks, |kb, b| {
            let offset = kb.mul(b, by);
            let row = kb.add(before, offset);
            let row = kb.let_("row", row);
            Block::new(kb, spec, params, lookup, slice, (row, rows)).emit(kb, epilogue);
        });
        let here = kb.mul(blocks, by);
        done = kb.add(done, here);
    }
}

/// One slice of the weights against `rows` activation rows, fully unrolled over both.
struct Block<'a> {
    spec: &'a MatMul,
    params: &'a MatMulParams,
    lookup: Lookup,
    slice: Slice,
    /// First row of the result.
    row: ExprId,
    rows: u32,
    /// Partial sums per accumulator.
    chains: u32,
    /// `[chains][rows][16 tiles]` f32, in registers.
    acc: BufId,
}

impl<'a> Block<'a> {
    fn new(
        kb: &mut KernelBuilder,
        spec: &'a MatMul,
        params: &'a MatMulParams,
        lookup: Lookup,
        slice: Slice,
        (row, rows): (ExprId, u32),
    ) -> Block<'a> {
        let chains = (params.in_flight / (rows * slice.tiles * (TILE as u32 / params.lanes))).clamp(1, 4);
        // Only plain weights keep their partial sums across iterations; groups fold them into one accumulator.
        let kept = if matches!(spec.weight, Weight::Plain(_)) { chains } else { 1 };
        let acc = kb.alloc("acc", DType::F32, (kept * rows * slice.tiles) as usize * TILE, Space::Local);
        let block = Block { spec, params, lookup, slice, row, rows, chains, acc };
        let zero = kb.constant(0.0, block.vector());
        for chain in 0..kept {
            block.each(|r, part| {
                let at = block.slot(kb, chain, r, part);
                kb.store_vec(acc, at, zero);
            });
        }
        block
    }

    fn emit(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        match (self.spec.weight, self.spec.activation) {
            (Weight::Plain(plain), Activation::F32 | Activation::BF16) => self.plain(kb, plain),
            (Weight::Packed(format), Activation::F32 | Activation::BF16) => self.grouped(kb, format),
            (Weight::Packed(format), Activation::I8 { scales, sums } | Activation::I16 { scales, sums }) => {
                self.int8(kb, format, scales, sums);
            }
            (Weight::Plain(plain), Activation::I8 { .. } | Activation::I16 { .. }) => {
                panic!("integer activations need packed weights, found {}", plain.dtype())
            }
        }
        self.finish(kb, epilogue);
    }

    /// Hands the sums to the epilogue, masked only where the last tile has fewer than 16 rows.
    fn finish(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        let mut sums = Vec::new();
        self.each(|r, part| {
            let at = self.slot(kb, 0, r, part);
            let sum = kb.load_vec(self.acc, at, self.params.lanes);
            sums.push((r, part, kb.let_("sum", sum)));
        });
        let first = kb.mul_int(self.slice.first, TILE as i64);
        let mut hand_over = |kb: &mut KernelBuilder, masked: bool| {
            for &(r, part, acc) in &sums {
                let row = kb.add_int(self.row, r.into());
                let col = kb.add_int(first, (part * self.params.lanes).into());
                let mask = masked.then(|| {
                    let columns = kb.ramp1(col, self.params.lanes);
                    let n = kb.int(self.spec.n as i64);
                    kb.lt(columns, n)
                });
                epilogue(kb, Tile { row, col, lanes: self.params.lanes, acc, mask });
            }
        };
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

    fn vector(&self) -> Ty {
        Ty::vector(DType::F32, self.params.lanes)
    }
    /// Vectors over all rows of the tiles.
    fn parts(&self) -> u32 {
        self.slice.tiles * TILE as u32 / self.params.lanes
    }
    /// The tile that a part belongs to, and its number there.
    fn tile_of(&self, kb: &mut KernelBuilder, part: u32) -> (ExprId, u32) {
        let per_tile = TILE as u32 / self.params.lanes;
        (kb.add_int(self.slice.first, (part / per_tile).into()), part % per_tile)
    }
    /// Every accumulator: activation row and part of the tiles.
    fn each(&self, mut f: impl FnMut(u32, u32)) {
        for r in 0..self.rows {
            for part in 0..self.parts() {
                f(r, part);
            }
        }
    }
    /// Number of an accumulator within one chain.
    fn index(&self, r: u32, part: u32) -> usize {
        (r * self.parts() + part) as usize
    }
    fn slot(&self, kb: &mut KernelBuilder, chain: u32, r: u32, part: u32) -> ExprId {
        let number = chain * self.rows * self.parts() + r * self.parts() + part;
        kb.int((number * self.params.lanes).into())
    }
    /// The accumulators of a chain as values.
    fn load_acc(&self, kb: &mut KernelBuilder, chain: u32) -> Vec<ExprId> {
        let mut values = Vec::new();
        self.each(|r, part| {
            let at = self.slot(kb, chain, r, part);
            let value = kb.load_vec(self.acc, at, self.params.lanes);
            values.push(kb.let_("a", value));
        });
        values
    }
    fn store_acc(&self, kb: &mut KernelBuilder, chain: u32, values: &[ExprId]) {
        self.each(|r, part| {
            let at = self.slot(kb, chain, r, part);
            kb.store_vec(self.acc, at, values[self.index(r, part)]);
        });
    }

    /// Offset in x of column `col` of activation row `r` of this block.
    fn x_at(&self, kb: &mut KernelBuilder, r: u32, col: ExprId) -> ExprId {
        let row = kb.add(self.spec.x_first, self.row);
        let start = kb.mul_int(row, self.spec.activation.row_stride(self.spec.k) as i64);
        let at = kb.add(start, col);
        kb.add_int(at, i64::from(r) * self.spec.activation.row_stride(self.spec.k) as i64)
    }

    /// Offset of group `g` of activation row `r` in the scales and sums of int8 activations.
    fn x_group_at(&self, kb: &mut KernelBuilder, r: u32, g: ExprId) -> ExprId {
        let groups = self.spec.k.div_ceil(GROUP) as i64;
        let row = kb.add(self.spec.x_first, self.row);
        let start = kb.mul_int(row, groups);
        let at = kb.add(start, g);
        kb.add_int(at, i64::from(r) * groups)
    }

    /// The reader of one group of one part.
    fn group(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, part: u32) -> GroupReader {
        let bytes = tile::group_bytes(format) as i64;
        let groups = self.spec.k.div_ceil(GROUP) as i64;
        let (tile, part) = self.tile_of(kb, part);
        let start = kb.mul_int(tile, groups * bytes);
        let here = kb.mul_int(g, bytes);
        let base = kb.add(start, here);
        let base = kb.add_int(base, self.spec.w_offset as i64);
        GroupReader { format, buf: self.spec.w, base, lanes: self.params.lanes, part }
    }

    /// Word `word` of a group, for every part.
    fn words(&self, kb: &mut KernelBuilder, format: Format, g: ExprId, word: usize) -> Vec<ExprId> {
        let read = |part| {
            let bits = self.group(kb, format, g, part).word(kb, word);
            kb.let_("word", bits)
        };
        (0..self.parts()).map(read).collect()
    }

    /// Asks for `count` elements of w that lie the prefetch distance behind `base`, where w goes that far: a tensor ends
    /// `len` elements behind its start.
    fn prefetch(&self, kb: &mut KernelBuilder, base: ExprId, count: usize, len: usize) {
        let Some((instr, distance)) = self.params.prefetch else { return };
        let size = kb.kernel().bufs[self.spec.w].dtype.bytes().unwrap_or(1);
        let last = kb.int((self.spec.w_offset + len - count) as i64);
        let ahead = kb.add_int(base, i64::from(distance) / size as i64);
        let ahead = kb.min(ahead, last);
        let ahead = kb.let_("ahead", ahead);
        for line in (0..count * size).step_by(CACHE_LINE) {
            let at = kb.add_int(ahead, (line / size) as i64);
            let element = kb.load(self.spec.w, at);
            kb.push(Stmt::Instr { instr, args: vec![element] });
        }
    }

    /// `for g in 0..groups`; the last group, if short, is emitted on its own with its number of columns.
    fn for_groups(
        &self,
        kb: &mut KernelBuilder,
        padded: bool,
        mut body: impl FnMut(&mut KernelBuilder, ExprId, usize),
    ) {
        let (full, rest) = match padded {
            true => (self.spec.k.div_ceil(GROUP), 0),
            false => (self.spec.k / GROUP, self.spec.k % GROUP),
        };
        let count = kb.int(full as i64);
        kb.serial("g", count, |kb, g| {
            if let Weight::Packed(format) = self.spec.weight {
                let base = self.group(kb, format, g, 0).base;
                let bytes = tile::group_bytes(format);
                self.prefetch(
                    kb,
                    base,
                    bytes,
                    self.spec.n.div_ceil(TILE) * self.spec.k.div_ceil(GROUP) * bytes,
                );
            }
            body(kb, g, GROUP);
        });
        if rest > 0 {
            body(kb, count, rest);
        }
    }
}
