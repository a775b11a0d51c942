//! The weights that the next strip will be made of: while the blocks of rows pass by a strip, each asks for an equal part.

use super::block::Block;
use super::{CACHE_LINE, MatMul, Slice};
use crate::params::MatMulParams;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, ExprId, Stmt};
use mlcc_quant::TILE;

/// A run of weights in every tile of a slice: those of the next piece of k, or of the first piece of the next slice.
#[derive(Clone, Copy)]
pub(super) struct Next {
    instr: InstrId,
    /// First element in the first tile.
    start: ExprId,
    /// Elements from tile to tile.
    tile: usize,
    tiles: u32,
    /// Elements per cache line.
    line: usize,
    /// Cache lines of a run.
    lines: usize,
    /// Lines of each run that every visit asks for.
    share: ExprId,
}

/// A piece of k: elements of each tile that a strip is made of.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// Its number, and how many there are.
    pub number: ExprId,
    pub pieces: i64,
    /// Elements of a tile in a piece, and in all.
    pub run: usize,
    pub tile: usize,
}

impl Next {
    /// What blocks ask for in `visits` visits while they pass by `piece`; none where the machine cannot ask.
    pub fn new(
        kb: &mut KernelBuilder,
        spec: &MatMul,
        params: &MatMulParams,
        slice: Slice,
        piece: Piece,
        visits: ExprId,
    ) -> Option<Next> {
        let (instr, _) = params.ahead?;
        let (tile, tiles) = (piece.tile, slice.tiles);
        let run = piece.run.min(tile);
        let after = kb.add_int(slice.first, tiles.into());
        let after = kb.mul_int(after, tile as i64);
        let here = kb.mul_int(slice.first, tile as i64);
        let following = kb.add_int(piece.number, 1);
        let offset = kb.mul_int(following, run as i64);
        let here = kb.add(here, offset);
        let pieces = kb.int(piece.pieces);
        let within = kb.lt(following, pieces);
        let start = kb.select(within, here, after);
        // Behind the last slice nothing is left to ask for.
        let all = spec.n.div_ceil(TILE) * tile;
        let last = all.saturating_sub((tiles as usize - 1) * tile + run);
        let last = kb.int(last as i64);
        let start = kb.min(start, last);
        let start = spec.in_w(kb, start);
        let size = kb.kernel().bufs[spec.w].dtype.bytes().unwrap_or(1);
        let lines = run * size / CACHE_LINE;
        let up = kb.add_int(visits, lines as i64 - 1);
        let share = kb.div(up, visits);
        let start = kb.let_("next", start);
        let share = kb.let_("share", share);
        Some(Next { instr, start, tile, tiles, line: CACHE_LINE / size, lines, share })
    }
}

/// What blocks ask for while they pass by a piece: a few lines per visit (with integers, with each activation scale), because
/// many at once would keep the loads waiting.
#[derive(Clone, Copy)]
pub(super) struct Hints {
    pub next: Option<Next>,
    /// Number of the block.
    pub block: ExprId,
    /// Visits of a block to the piece.
    pub visits: ExprId,
    pub touch: Touch,
}

impl Hints {
    /// With visit `visit` of the block.
    pub fn emit(self, kb: &mut KernelBuilder, block: &Block, visit: ExprId) {
        let before = kb.mul(self.block, self.visits);
        let all = kb.add(before, visit);
        block.prefetch_next(kb, self.next, all);
        self.touch.emit(kb, block, visit);
    }
}

/// When a block asks for what its epilogue touches: while it passes by the last piece, some rows per visit, because many
/// lines at once would keep the loads waiting.
#[derive(Clone, Copy)]
pub(super) struct Touch {
    /// Whether this piece is the last one.
    last: Option<ExprId>,
    /// Rows per visit, and those of the block.
    rows: u32,
    all: u32,
}

impl Touch {
    /// For blocks of `rows` rows with `visits` visits to the last piece.
    pub fn new(last: Option<ExprId>, visits: usize, rows: u32) -> Touch {
        Touch { last, rows: rows.div_ceil(visits as u32), all: rows }
    }

    fn emit(self, kb: &mut KernelBuilder, block: &Block, visit: ExprId) {
        let first = kb.mul_int(visit, self.rows.into());
        let end = kb.int(self.all.into());
        let left = kb.lt(first, end);
        let now = match self.last {
            Some(last) => kb.binary(BinOp::And, last, left),
            None => left,
        };
        kb.if_(now, |kb| block.touch(kb, first, self.rows));
    }
}

impl Block<'_> {
    /// Asks for the part that falls to visit number `visit`.
    fn prefetch_next(&self, kb: &mut KernelBuilder, next: Option<Next>, visit: ExprId) {
        let Some(next) = next else { return };
        let first = kb.mul(visit, next.share);
        let end = kb.add(first, next.share);
        let lines = kb.int(next.lines as i64 + 1);
        let useful = kb.lt(end, lines);
        kb.if_(useful, |kb| {
            let from = kb.mul_int(first, next.line as i64);
            let from = kb.add(next.start, from);
            let from = kb.let_("ahead", from);
            kb.serial("line", next.share, |kb, line| {
                let at = kb.mul_int(line, next.line as i64);
                let at = kb.add(from, at);
                for tile in 0..next.tiles as usize {
                    let at = kb.add_int(at, (tile * next.tile) as i64);
                    let element = kb.load(self.spec.w, at);
                    kb.push(Stmt::Instr { instr: next.instr, args: vec![element] });
                }
            });
        });
    }
}
