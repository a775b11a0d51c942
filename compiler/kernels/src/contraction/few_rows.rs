//! Integer products of few activation rows, such as those of sequences that decode together.
//!
//! Weights come from memory about as fast as these rows use them, so both have to happen at the same time: all rows pass
//! by the columns of one activation scale (128) before the next ones are touched, while the sums of all rows wait in the
//! first-level cache. Each block of rows unpacks the weights in registers again; a strip (see [`super::strip`]) costs as
//! much to fill as three blocks save. What comes next is asked for a few lines at a time, in the order in which it will be
//! read: more at once would wait for each other.

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

/// `count` rows from `first`, cut into blocks of the sizes that `params` has; those of the first size may have up to
/// `extra` rows too many.
pub(super) fn runs(
    kb: &mut KernelBuilder,
    params: &MatMulParams,
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
    params.rows.iter().map(cut).collect()
}

/// Blocks of all runs.
pub(super) fn total(kb: &mut KernelBuilder, runs: &[Run]) -> ExprId {
    let zero = kb.int(0);
    let sum = runs.iter().fold(zero, |sum, run| kb.add(sum, run.blocks));
    kb.let_("passes", sum)
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
        // Behind whole blocks of one size fewer rows are left than such a block has.
        let most = std::iter::once(params.few).chain(params.rows.iter().map(|rows| rows - 1));
        let sums: Vec<BufId> = (most.zip(&params.rows))
            .map(|(most, _)| kb.alloc("sums", DType::F32, vector(most), Space::Stack))
            .collect();
        self.each(kb, |kb, block, (run, b)| block.save(kb, sums[run], b));
        let scales = kb.int(spec.k.div_ceil(self.codes.group) as i64);
        let one = kb.int(1);
        kb.serial("scale", scales, |kb, s| {
            self.each(kb, |kb, block, (run, b)| {
                block.restore(kb, sums[run], b);
                block.integers(kb, self.format, self.codes, (s, one));
                block.save(kb, sums[run], b);
            });
        });
        self.each(kb, |kb, block, (run, b)| {
            block.restore(kb, sums[run], b);
            block.scale_sums(kb, self.codes);
            block.finish(kb, epilogue);
        });
    }

    /// Every block, with its run and its number there.
    fn each(
        &self,
        kb: &mut KernelBuilder,
        mut body: impl FnMut(&mut KernelBuilder, &Block, (usize, ExprId)),
    ) {
        let mut before = kb.int(0);
        let blocks = total(kb, self.runs);
        for (i, run) in self.runs.iter().enumerate() {
            kb.serial("block", run.blocks, |kb, b| {
                let offset = kb.mul_int(b, run.rows.into());
                let row = kb.add(run.first, offset);
                let row = kb.let_("row", row);
                let interleaved = i == 0 && run.rows > 1;
                let passes = Some(Passes { block: kb.add(before, b), blocks });
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
    /// Number of this block, and of all.
    pub block: ExprId,
    pub blocks: ExprId,
}

/// The weights that follow the columns of one activation scale by some groups, which are asked for while the blocks pass
/// by: some lines of every tile with each group. Behind the end of a tile, those of the tile that takes its place in the
/// next slice.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    instr: InstrId,
    /// Offset in the weights of what follows in the first tile; what the other tiles need lies `tile` bytes apart.
    first: ExprId,
    tile: usize,
    tiles: usize,
    /// Lines of each tile, with one group, and before the first group of this block.
    lines: i64,
    share: ExprId,
    before: ExprId,
}

impl Ahead {
    /// For the `per_scale` groups from `g`; `None` where nothing can be asked for.
    pub fn new(
        kb: &mut KernelBuilder,
        block: &Block,
        format: Format,
        per_scale: usize,
        g: ExprId,
    ) -> Option<Ahead> {
        let (Block { spec, slice, .. }, passes) = (block, block.passes?);
        let (instr, distance) = block.params.ahead?;
        let (groups, bytes) = (spec.k.div_ceil(GROUP), tile::group_bytes(format));
        let (tile, tiles) = (groups * bytes, slice.tiles as usize);
        let next = kb.add_int(g, i64::from(distance));
        let end = kb.int(groups as i64);
        let inside = kb.lt(next, end);
        let (here, there) = (kb.int(0), kb.int(((tiles - 1) * tile) as i64));
        let skip = kb.select(inside, here, there);
        let base = group_reader(kb, spec, format, *slice, TILE as u32, next, 0).base;
        let base = kb.add(base, skip);
        let per_scale = per_scale.min(groups);
        let last = (spec.n.div_ceil(TILE) - tiles + 1) * tile - per_scale * bytes;
        let last = kb.int(last as i64);
        let last = spec.in_w(kb, last);
        let base = kb.min(base, last);
        let lines = (per_scale * bytes / CACHE_LINE) as i64;
        let visits = kb.mul_int(passes.blocks, per_scale as i64);
        let share = kb.add_int(visits, lines - 1);
        let share = kb.div(share, visits);
        let share = kb.let_("share", share);
        let before = kb.mul_int(passes.block, per_scale as i64);
        let before = kb.mul(before, share);
        let (first, before) = (kb.let_("ahead", base), kb.let_("asked", before));
        Some(Ahead { instr, first, tile, tiles, lines, share, before })
    }

    /// Asks for the part that belongs to group number `g` of these columns.
    pub fn prefetch(&self, kb: &mut KernelBuilder, spec: &MatMul, g: ExprId) {
        let before = kb.mul(g, self.share);
        let before = kb.add(self.before, before);
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
