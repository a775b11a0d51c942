//! The contraction `y[i][j] = sum over k of x[i][k] * w[j][k]`: one CPU generator for matvec and matmul over weights in
//! `Tile16` order, and one for GPUs over row-major weights.
//!
//! CPU loops: workers take contiguous runs of weight tiles (16 rows of w); for each tile, blocks of activation rows; for
//! each block, k with the accumulators of all its rows in registers. So a tile is read from memory once, in order, and
//! from cache for all further rows. Lanes are rows of w: activations are broadcast and no sum crosses lanes.
//!
//! The result of a block never touches memory: the epilogue closure receives each vector of sums and stores what it makes
//! of them.

mod activation;
mod block;
mod experts;
mod few_rows;
mod float_strip;
mod floats;
mod gpu;
mod integers;
mod long;
mod next;
mod squares;
mod strip;

pub use activation::{Activation, CodeBlock, Codes, GROUP};
pub use experts::{Choice, emit_experts};
pub use gpu::{GpuMatMulParams, choose_gpu, emit_gpu_matmul};

use crate::params::MatMulParams;
use block::{Block, Rows};
use few_rows::{FewRows, Passes, runs, total};
use float_strip::FloatBlocks;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprId, Stmt};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::TILE;
use mlcc_quant::plain::Plain;
use mlcc_quant::tile;
use strip::Blocks;

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
    /// The weights; u8 for packed formats.
    pub w: BufId,
    /// Elements of `w` before the tensor.
    pub w_offset: usize,
    pub weight: Weight,
    /// Rows of the result, i64.
    pub m: ExprId,
    /// Rows of w, or of one of its matrices.
    pub n: usize,
    pub k: usize,
    /// Which matrix of several in `w` is meant, and which rows meet it; `None` where there is one.
    pub chosen: Option<Chosen>,
    /// f32 `[m, n]` that the epilogue reads or writes, at the places of the sums that it gets.
    pub streams: [Option<BufId>; STREAMS],
}

/// Most operands and results of an epilogue whose lines are asked for.
pub const STREAMS: usize = 4;

/// A matrix among several, with the rows that chose it.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    /// Elements of the tensor before the matrix.
    first: ExprId,
    /// Rows of the result, i32; `None`: rows in their order. Row numbers of a product then are places in the list.
    list: Option<BufId>,
    /// The last place in the list that counts: blocks of rows beyond it take it again.
    last: ExprId,
    /// Rows of the result one after the other that share a row of x.
    share: i64,
    /// Zero, i64, by a load that the compiler cannot see through. Added to the offset of a row of x it keeps the compiler
    /// from making `or` of the addition of a column where rows have 2^i elements: it then computes the places of all rows
    /// in a vector and takes them apart again in the inner loop.
    zero: Option<ExprId>,
}

impl MatMul {
    /// Where element `at` of the tensor (or the chosen matrix) lies in `w`.
    fn in_w(&self, kb: &mut KernelBuilder, at: ExprId) -> ExprId {
        let at = match self.chosen {
            Some(chosen) => kb.add(chosen.first, at),
            None => at,
        };
        kb.add_int(at, self.w_offset as i64)
    }

    /// Elements of a tile of 16 rows.
    fn tile_len(&self) -> usize {
        match self.weight {
            Weight::Plain(plain) => self.k.next_multiple_of(plain.pair()) * TILE,
            Weight::Packed(format) => self.k.div_ceil(GROUP) * tile::group_bytes(format),
        }
    }
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
/// Gives the number of slices of columns that workers share out: equal numbers mean equal columns per worker. None where
/// it depends on the number of rows, or workers share rows too.
pub fn emit_matmul(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    epilogue: &mut Epilogue,
) -> Option<i64> {
    let table = table(kb, params);
    let all = (kb.int(0), spec.m);
    if let Some(chunk) = params.chunk.filter(|_| params.share_rows) {
        shared_rows(kb, spec, params, table, chunk.into(), epilogue);
        return None;
    }
    all_rows(kb, spec, params, table, all, epilogue);
    tall(spec, params).is_none().then(|| slices(spec, params.tiles))
}

/// Every slice of the weights against every chunk of `chunk` rows: what workers share out.
fn shared_rows(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    lookup: Lookup,
    chunk: i64,
    epilogue: &mut Epilogue,
) {
    let (by, slices) = (kb.int(chunk), kb.int(slices(spec, params.tiles)));
    let rounded = kb.add_int(spec.m, chunk - 1);
    let chunks = kb.div(rounded, by);
    let items = kb.mul(chunks, slices);
    kb.par("item", items, |kb, item| {
        let (number, slice) = (kb.div(item, slices), kb.rem(item, slices));
        let slice = kb.let_("slice", slice);
        let first = kb.mul_int(number, chunk);
        let first = kb.let_("first", first);
        let left = kb.sub(spec.m, first);
        let count = kb.min(left, by);
        let count = kb.let_("count", count);
        each_slice(kb, spec, params.tiles, slice, |kb, slice| {
            rows_of_slice(kb, spec, params, lookup, slice, (first, count), epilogue);
        });
    });
}

/// All tiles of weights against `count` activation rows from `first`, some rows after the other: each chunk of x stays in
/// cache while the weights stream by.
fn all_rows(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    lookup: Lookup,
    (first, count): (ExprId, ExprId),
    epilogue: &mut Epilogue,
) {
    let constant = kb.kernel().exprs.as_int(count);
    let chunk = params.chunk.filter(|_| match spec.activation {
        Activation::Codes(codes) => !strip::is_whole(spec, codes),
        Activation::F32 | Activation::BF16 => true,
    });
    let Some(size) = chunk.map(i64::from).filter(|&size| constant.is_none_or(|m| m > size)) else {
        return chunk_of_rows(kb, spec, params, lookup, (first, count), epilogue);
    };
    let rounded = kb.add_int(count, size - 1);
    let by = kb.int(size);
    let chunks = kb.div(rounded, by);
    kb.serial("chunk", chunks, |kb, c| {
        let done = kb.mul_int(c, size);
        let left = kb.sub(count, done);
        let here = kb.min(left, by);
        let first = kb.add(first, done);
        chunk_of_rows(kb, spec, params, lookup, (first, here), epilogue);
    });
}

/// The table of the lookup instruction.
fn table(kb: &mut KernelBuilder, params: &MatMulParams) -> Lookup {
    params.lookup.map(|instr| {
        let table = tile::code_table(kb);
        (instr, kb.let_("codes", table))
    })
}

/// Iterations of the loop over columns, of `tiles` tiles of weights each.
fn slices(spec: &MatMul, tiles: u32) -> i64 {
    spec.n.div_ceil(TILE * tiles as usize) as i64
}

/// The blocks that a few rows are cut into where their number allows it, and all of them come in order.
fn tall(spec: &MatMul, params: &MatMulParams) -> Option<Tall> {
    match (spec.activation, spec.weight) {
        (Activation::Codes(codes), Weight::Packed(format)) if spec.chosen.is_none() => {
            params.tall.map(|(rows, tiles)| Tall { rows, tiles, format, codes })
        }
        _ => None,
    }
}

/// Blocks of integer products that have more rows and fewer tiles than those of many rows.
#[derive(Clone, Copy)]
struct Tall {
    rows: u32,
    tiles: u32,
    format: Format,
    codes: Codes,
}

/// All tiles of weights against `count` activation rows from `first`.
fn chunk_of_rows(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    lookup: Lookup,
    rows: (ExprId, ExprId),
    epilogue: &mut Epilogue,
) {
    let extent = kb.int(slices(spec, params.tiles));
    let Some(tall) = tall(spec, params) else {
        kb.par("slice", extent, |kb, slice| {
            each_slice(kb, spec, params.tiles, slice, |kb, slice| {
                rows_of_slice(kb, spec, params, lookup, slice, rows, epilogue);
            });
        });
        return;
    };
    let (by, one, end) = (kb.int(tall.rows.into()), kb.int(1), kb.int(i64::from(params.few) + 1));
    let rest = kb.rem(rows.1, by);
    let whole = kb.lt(rest, one);
    let count = kb.select(whole, rows.1, end);
    let fits = kb.lt(count, end);
    let fits = kb.let_("tall", fits);
    let other = kb.int(slices(spec, tall.tiles));
    let extent = kb.select(fits, other, extent);
    kb.par("slice", extent, |kb, slice| {
        kb.open_block();
        each_slice(kb, spec, tall.tiles, slice, |kb, slice| {
            let runs = runs(kb, &[tall.rows], rows, None);
            let Tall { format, codes, .. } = tall;
            FewRows { spec, params, lookup, slice, format, codes, runs: &runs }.emit(kb, epilogue);
        });
        let then = kb.close_block();
        kb.open_block();
        each_slice(kb, spec, params.tiles, slice, |kb, slice| {
            rows_of_slice(kb, spec, params, lookup, slice, rows, epilogue);
        });
        let otherwise = kb.close_block();
        kb.push(Stmt::If { cond: fits, then, otherwise });
    });
}

/// Slice number `slice` of `wide` tiles.
fn each_slice(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    wide: u32,
    slice: ExprId,
    mut body: impl FnMut(&mut KernelBuilder, Slice),
) {
    // The last slice has fewer tiles where their number does not divide.
    let (full, rest) = (spec.n.div_ceil(TILE) as u32 / wide, spec.n.div_ceil(TILE) as u32 % wide);
    let short = !spec.n.is_multiple_of(TILE);
    let first = kb.mul_int(slice, wide.into());
    let mut emit = |kb: &mut KernelBuilder, tiles: u32, edge: Edge| {
        kb.open_block();
        body(kb, Slice { first, tiles, edge: if short { edge } else { Edge::Never } });
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
}

/// Bytes that come from memory together.
pub(crate) const CACHE_LINE: usize = 64;

/// A lookup instruction with its table.
type Lookup = Option<(InstrId, ExprId)>;

/// Tiles of weights side by side that are worked on together.
#[derive(Clone, Copy)]
struct Slice {
    first: ExprId,
    tiles: u32,
    edge: Edge,
}

impl Slice {
    /// Vectors over all rows of the tiles.
    fn parts(self, lanes: u32) -> u32 {
        self.tiles * TILE as u32 / lanes
    }
    /// The tile that a part belongs to, and its number there.
    fn tile_of(self, kb: &mut KernelBuilder, lanes: u32, part: u32) -> (ExprId, u32) {
        let per_tile = TILE as u32 / lanes;
        (kb.add_int(self.first, (part / per_tile).into()), part % per_tile)
    }
}

/// When the last tile of a slice has fewer than 16 rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Edge {
    Never,
    Always,
    /// In the last slice.
    Last,
}

/// Rows that the blocks of the first size may have too many, where a list tells the rows: a few left over cost as much
/// one by one, and `many` rows never take the weights as they are.
fn extra_rows(
    kb: &mut KernelBuilder,
    spec: &MatMul,
    params: &MatMulParams,
    many: Option<ExprId>,
) -> Option<ExprId> {
    spec.chosen?.list?;
    let [most, next, ..] = params.rows.as_slice() else { return None };
    let few = kb.int(i64::from(most - next) - 1);
    let Some(many) = many else { return Some(few) };
    let all = kb.int(i64::from(*most) - 1);
    Some(kb.select(many, all, few))
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
    let integers = match (spec.activation, spec.weight, params.rows.as_slice()) {
        (Activation::Codes(codes), Weight::Packed(format), [_, _, ..]) => Some((codes, format)),
        _ => None,
    };
    let many = integers.map(|_| {
        let most = kb.int(params.few.into());
        let many = kb.lt(most, count);
        kb.let_("many", many)
    });
    let extra = extra_rows(kb, spec, params, many);
    let runs = runs(kb, &params.rows, (first, count), extra);
    let none = kb.int(0);
    let one = kb.int(1);
    let mut one_by_one: Vec<ExprId> = runs.iter().map(|r| r.blocks).collect();
    if let (Some((codes, format)), Some(many)) = (integers, many) {
        let fits = spec.chosen.is_some() || codes.block == params.code_block();
        assert!(fits, "codes come in blocks of other sizes than the product takes");
        let passes = total(kb, &runs);
        let all = Blocks { spec, params, lookup, slice, format, codes, first, count: runs[0].blocks };
        kb.if_(many, |kb| all.emit(kb, epilogue));
        let together = kb.select(many, none, passes);
        let few = kb.lt(one, together);
        let few = kb.let_("few", few);
        let together = FewRows { spec, params, lookup, slice, format, codes, runs: &runs };
        kb.if_(few, |kb| together.emit(kb, epilogue));
        one_by_one[0] = kb.select(many, none, one_by_one[0]);
        for blocks in &mut one_by_one {
            *blocks = kb.select(few, none, *blocks);
        }
    }
    if let Some(plain) = float_strip::in_pieces(spec, params) {
        let few = kb.int(float_strip::few_blocks(params));
        let blocks = one_by_one[0];
        let many = kb.lt(few, blocks);
        let all = FloatBlocks { spec, params, lookup, slice, plain, first, count: blocks };
        kb.if_(many, |kb| all.emit(kb, epilogue));
        one_by_one[0] = kb.select(many, none, blocks);
    }
    let alone = match (spec.activation, spec.weight, params.ahead) {
        (Activation::Codes(codes), Weight::Packed(format), Some((_, groups))) => {
            let scales = (groups as usize * GROUP).div_ceil(codes.group);
            Some(Passes::new(kb, spec.k, format, codes, (1, scales), one))
        }
        _ => None,
    };
    for (i, (run, blocks)) in runs.iter().zip(one_by_one).enumerate() {
        let codes = matches!(spec.activation, Activation::Codes(_));
        kb.serial("block", blocks, |kb, b| {
            let offset = kb.mul_int(b, run.rows.into());
            let row = kb.add(run.first, offset);
            let row = kb.let_("row", row);
            let interleaved = codes && i == 0 && run.rows > 1;
            let rows = Rows { interleaved, passes: alone, ..Rows::plain(row, run.rows) };
            Block::new(kb, spec, params, lookup, slice, rows).emit(kb, epilogue);
        });
    }
}
