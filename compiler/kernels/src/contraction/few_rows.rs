//! Integer products of few activation rows, such as those of sequences that decode together.
//!
//! Weights come from memory about as fast as these rows use them, so both have to happen at the same time: all rows pass
//! by a piece of the columns before the next ones are touched, while the sums of all rows wait in the first-level cache.
//! Each block of rows unpacks the weights in registers again; a strip (see [`super::strip`]) costs as much to fill as
//! three blocks save. The next piece is asked for a few lines at a time, in the order in which it will be read: more at
//! once would wait for each other.

use super::block::{Block, Rows, group_reader};
use super::{CACHE_LINE, Codes, Epilogue, GROUP, Lookup, MatMul, Slice};
use crate::params::MatMulParams;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprId, Space, Stmt};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::TILE;
use mlcc_quant::tile;

/// A run of blocks that have equally many rows.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// Rows of a block.
    pub rows: u32,
    /// Row of the result of the first block.
    pub first: ExprId,
    /// Number of blocks.
    pub blocks: ExprId,
}

/// `count` rows from `first`, cut into blocks of `sizes` rows; those of the first size may have up to `extra` rows too many.
pub(super) fn runs(
    kb: &mut KernelBuilder,
    sizes: &[u32],
    (first, count): (ExprId, ExprId),
    mut extra: Option<ExprId>,
) -> Vec<Run> {
    let mut done = kb.int(0);
    let cut = |&rows: &u32| {
        let rounding = extra.take();
        let left = kb.sub(count, done);
        let left = rounding.map_or(left, |extra| kb.add(left, extra));
        let by = kb.int(rows.into());
        let blocks = kb.div(left, by);
        let blocks = kb.let_("blocks", blocks);
        let row = kb.add(first, done);
        let run = Run { rows, first: kb.let_("run", row), blocks };
        let here = kb.mul(blocks, by);
        done = kb.add(done, here);
        if rounding.is_some() {
            done = kb.min(done, count);
        }
        run
    };
    sizes.iter().map(cut).collect()
}

/// Blocks of all runs.
pub(super) fn total(kb: &mut KernelBuilder, runs: &[Run]) -> ExprId {
    let zero = kb.int(0);
    let sum = runs.iter().fold(zero, |sum, run| kb.add(sum, run.blocks));
    kb.let_("passes", sum)
}

/// Columns that all rows pass by before the next ones are touched.
const PIECE: usize = 512;

/// The activation scales of a piece: equal pieces of at most [`PIECE`] columns.
fn scales_per_piece(scales: usize, codes: Codes) -> usize {
    let most = (PIECE / codes.group).clamp(1, scales);
    (1..=most).rev().find(|&n| scales.is_multiple_of(n)).unwrap_or(1)
}

/// One slice of the weights against at most `params.few` activation rows.
pub(super) struct FewRows<'a> {
    pub spec: &'a MatMul,
    pub params: &'a MatMulParams,
    pub lookup: Lookup,
    pub slice: Slice,
    pub format: Format,
    pub codes: Codes,
    pub runs: &'a [Run],
}

impl FewRows<'_> {
    pub fn emit(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        let (spec, params) = (self.spec, self.params);
        let vector = |rows: u32| (rows * self.slice.parts(params.lanes) * params.lanes) as usize;
        // Listed rows fill up a last block; behind whole blocks of one size fewer rows are left than such a block has.
        let first = params.few.next_multiple_of(params.rows[0]);
        let most = std::iter::once(first).chain(self.runs.iter().map(|run| run.rows - 1));
        let sums: Vec<BufId> = (most.zip(self.runs))
            .map(|(most, _)| kb.alloc("sums", DType::F32, vector(most), Space::Stack))
            .collect();
        let scales = spec.k.div_ceil(self.codes.group);
        let per_piece = scales_per_piece(scales, self.codes);
        let blocks = total(kb, self.runs);
        let passes = Passes::new(kb, spec.k, self.format, self.codes, (per_piece, per_piece), blocks);
        self.each(kb, passes, |kb, block, (run, b)| block.save(kb, sums[run], b));
        let pieces = kb.int((scales / per_piece) as i64);
        kb.serial("piece", pieces, |kb, piece| {
            let first = kb.mul_int(piece, per_piece as i64);
            let first = kb.let_("first_scale", first);
            let count = kb.int(per_piece as i64);
            self.each(kb, passes, |kb, block, (run, b)| {
                block.restore(kb, sums[run], b);
                block.integers(kb, self.format, self.codes, (first, count), None);
                block.save(kb, sums[run], b);
            });
        });
        self.each(kb, passes, |kb, block, (run, b)| {
            block.restore(kb, sums[run], b);
            block.scale_sums(kb, self.codes);
            block.finish(kb, epilogue);
        });
    }

    /// Every block, with its run and its number there.
    fn each(
        &self,
        kb: &mut KernelBuilder,
        passes: Passes,
        mut body: impl FnMut(&mut KernelBuilder, &Block, (usize, ExprId)),
    ) {
        let mut before = kb.int(0);
        for (i, run) in self.runs.iter().enumerate() {
            kb.serial("block", run.blocks, |kb, b| {
                let offset = kb.mul_int(b, run.rows.into());
                let row = kb.add(run.first, offset);
                let row = kb.let_("row", row);
                let interleaved = i == 0 && run.rows > 1;
                let passes = Some(Passes { block: kb.add(before, b), ..passes });
                let rows = Rows { interleaved, passes, ..Rows::plain(row, run.rows) };
                let block = Block::new(kb, self.spec, self.params, self.lookup, self.slice, rows);
                body(kb, &block, (i, b));
            });
            before = kb.add(before, run.blocks);
        }
    }
}

/// The place of a block among those that pass by the same columns; each asks for its part of what comes next.
#[derive(Clone, Copy)]
pub(super) struct Passes {
    /// Number of this block.
    block: ExprId,
    /// Activation scales of a piece, and lines of each tile in it.
    scales: i64,
    lines: i64,
    /// Lines of each tile that a block asks for with one group.
    share: ExprId,
    /// How many groups later what is asked for will be used.
    distance: i64,
}

impl Passes {
    /// For `blocks` blocks that pass by a piece of `scales` activation scales, and ask for what they will use `distance`
    /// scales later.
    pub fn new(
        kb: &mut KernelBuilder,
        k: usize,
        format: Format,
        codes: Codes,
        (scales, distance): (usize, usize),
        blocks: ExprId,
    ) -> Passes {
        let groups = (scales * codes.group / GROUP).min(k.div_ceil(GROUP));
        let lines = (groups * tile::group_bytes(format) / CACHE_LINE) as i64;
        let (one, visits) = (kb.int(1), kb.mul_int(blocks, groups as i64));
        let visits = kb.max(visits, one);
        let up = kb.add_int(visits, lines - 1);
        let share = kb.div(up, visits);
        let share = kb.let_("share", share);
        let distance = (distance * codes.group / GROUP) as i64;
        Passes { block: kb.int(0), share, scales: scales as i64, lines, distance }
    }
}

/// The weights that follow a piece of the columns, which are asked for while the blocks pass by: some lines of every tile
/// with each group. Behind the end of a tile, those of the tile that takes its place in the next slice.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    instr: InstrId,
    /// Offset in the weights of what follows in the first tile; what the other tiles need lies `tile` bytes apart.
    first: ExprId,
    tile: usize,
    tiles: usize,
    /// Lines of each tile, those to ask for with one group, and the number of the first group.
    lines: i64,
    share: ExprId,
    visit: ExprId,
}

impl Ahead {
    /// For the `per_scale` groups of scale `s`; `None` where nothing can be asked for.
    pub fn new(
        kb: &mut KernelBuilder,
        block: &Block,
        format: Format,
        per_scale: usize,
        s: ExprId,
    ) -> Option<Ahead> {
        let (Block { spec, slice, .. }, passes) = (block, block.passes?);
        let (instr, _) = block.params.ahead?;
        let (groups, bytes) = (spec.k.div_ceil(GROUP), tile::group_bytes(format));
        let (tile, tiles) = (groups * bytes, slice.tiles as usize);
        // First group of the piece, and the number of this scale in it.
        let by = kb.int(passes.scales);
        let piece = kb.div(s, by);
        let begin = kb.mul_int(piece, passes.scales);
        let within = kb.sub(s, begin);
        let begin = kb.mul_int(begin, per_scale as i64);
        let next = kb.add_int(begin, passes.distance);
        let end = kb.int(groups as i64);
        let inside = kb.lt(next, end);
        let (here, there) = (kb.int(0), kb.int(((tiles - 1) * tile) as i64));
        let skip = kb.select(inside, here, there);
        let base = group_reader(kb, spec, format, *slice, TILE as u32, next, 0).base;
        let base = kb.add(base, skip);
        let run = passes.lines as usize * CACHE_LINE;
        let all = spec.n.div_ceil(TILE) * tile;
        let last = all - (tiles - 1) * tile - run;
        let last = kb.int(last as i64);
        let last = spec.in_w(kb, last);
        let base = kb.min(base, last);
        let visit = kb.mul_int(passes.block, passes.scales);
        let visit = kb.add(visit, within);
        let visit = kb.mul_int(visit, per_scale as i64);
        let (first, visit) = (kb.let_("ahead", base), kb.let_("visit", visit));
        Some(Ahead { instr, first, tile, tiles, lines: passes.lines, share: passes.share, visit })
    }

    /// Asks for the part that belongs to group number `g` of this scale.
    pub fn prefetch(&self, kb: &mut KernelBuilder, spec: &MatMul, g: ExprId) {
        let visit = kb.add(self.visit, g);
        let before = kb.mul(visit, self.share);
        let lines = kb.int(self.lines);
        let left = kb.sub(lines, before);
        let count = kb.min(self.share, left);
        let offset = kb.mul_int(before, CACHE_LINE as i64);
        let first = kb.add(self.first, offset);
        let first = kb.let_("ask", first);
        kb.serial("line", count, |kb, line| {
            let at = kb.mul_int(line, CACHE_LINE as i64);
            let at = kb.add(first, at);
            for t in 0..self.tiles {
                let at = kb.add_int(at, (t * self.tile) as i64);
                let element = kb.load(spec.w, at);
                kb.push(Stmt::Instr { instr: self.instr, args: vec![element] });
            }
        });
    }
}
