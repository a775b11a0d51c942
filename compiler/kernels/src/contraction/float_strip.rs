//! Float products of many activation rows: k is cut into pieces whose weights stay in cache while all blocks of rows pass
//! by, and the sums of the rows wait in a buffer between the pieces. The weights of a piece are copied once, as f32, into a
//! strip in the order in which a block reads them; dots of bf16 take them as they are. Each block asks for an equal part of
//! the next piece, a few lines every [`VISIT`] columns: more at once would keep the loads waiting.

use super::block::{Block, Rows};
use super::next::{Hints, Next, Piece, Touch};
use super::{Activation, Epilogue, Lookup, MatMul, Slice, Weight};
use crate::params::MatMulParams;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space};
use mlcc_ir::types::DType;
use mlcc_quant::TILE;
use mlcc_quant::plain::Plain;

/// Columns of a piece: with three tiles of 16 rows a strip has 96 KiB, in the second-level cache.
const DEPTH: usize = 512;
/// Columns that blocks pass by before they ask for more of what comes next.
pub(super) const VISIT: usize = 32;
/// Most blocks of rows that read the weights as they are: for them a copy would not pay. Without a copy, a single block uses
/// the weights as fast as they come, and asking for them would only add to that.
pub(super) fn few_blocks(params: &MatMulParams) -> i64 {
    if params.bf16_dot.is_some() { 1 } else { 3 }
}

/// The weights of one piece of a slice on the worker's stack, f32 `[columns][parts][lanes]`.
#[derive(Clone, Copy)]
pub(super) struct FloatStrip {
    buf: BufId,
    /// First column of the piece.
    first: ExprId,
}

/// The type of the weights, if blocks of many rows take them in pieces.
pub(super) fn in_pieces(spec: &MatMul, params: &MatMulParams) -> Option<Plain> {
    let Weight::Plain(plain) = spec.weight else { return None };
    params.chunk?;
    // Sums that wait are those of one chain, also in a last slice of one tile.
    let one_chain = params.in_flight / (params.rows[0] * TILE as u32 / params.lanes) <= 1;
    let floats = !matches!(spec.activation, Activation::Codes(_));
    (floats && one_chain && params.rows[0] > 1).then_some(plain)
}

/// What the blocks of one slice have in common.
pub(super) struct FloatBlocks<'a> {
    pub spec: &'a MatMul,
    pub params: &'a MatMulParams,
    pub lookup: Lookup,
    pub slice: Slice,
    pub plain: Plain,
    /// First row.
    pub first: ExprId,
    /// Number of blocks of `params.rows[0]` rows, at most `params.chunk` rows in all.
    pub count: ExprId,
}

impl FloatBlocks<'_> {
    /// Emits all blocks, piece by piece of k.
    pub fn emit(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        let (spec, params) = (self.spec, self.params);
        let k = spec.k;
        let vectors = self.slice.parts(params.lanes);
        let columns = DEPTH.min(k).next_multiple_of(self.plain.pair());
        let strip = params.bf16_dot.is_none().then(|| {
            kb.alloc("strip", DType::F32, columns * (vectors * params.lanes) as usize, Space::Stack)
        });
        let number = k.div_ceil(DEPTH) as i64;
        let parked = (number > 1).then(|| {
            let vectors = params.chunk.unwrap_or(params.rows[0]) * vectors;
            kb.alloc("sums", DType::F32, (vectors * params.lanes) as usize, Space::Stack)
        });
        let pieces = kb.int(number);
        kb.serial("piece", pieces, |kb, piece| {
            let first = kb.mul_int(piece, DEPTH as i64);
            let first = kb.let_("first", first);
            let (all, most) = (kb.int(k as i64), kb.int(DEPTH as i64));
            let left = kb.sub(all, first);
            let columns = kb.min(left, most);
            let strip = strip.map(|buf| FloatStrip { buf, first });
            if let Some(strip) = strip {
                self.fill(kb, strip, columns);
            }
            let hints = self.hints(kb, (piece, number), columns);
            let (begin, end) = (kb.int(0), kb.int(number - 1));
            let (later, early) = (kb.lt(begin, piece), kb.lt(piece, end));
            kb.serial("block", self.count, |kb, b| {
                let offset = kb.mul_int(b, params.rows[0].into());
                let row = kb.add(self.first, offset);
                let row = kb.let_("row", row);
                let rows = Rows { floats: strip, ..Rows::plain(row, params.rows[0]) };
                let block = Block::new(kb, spec, params, self.lookup, self.slice, rows);
                if let Some(sums) = parked {
                    kb.if_(later, |kb| block.restore(kb, sums, b));
                }
                let hints = Hints { block: b, ..hints };
                block.plain_piece(kb, self.plain, (first, columns), k % DEPTH, hints);
                match parked {
                    None => block.finish(kb, epilogue),
                    Some(sums) => {
                        kb.if_else(early, |kb| block.save(kb, sums, b), |kb| block.finish(kb, epilogue))
                    }
                }
            });
        });
    }

    /// What blocks ask for while they pass by a piece.
    fn hints(&self, kb: &mut KernelBuilder, (number, pieces): (ExprId, i64), columns: ExprId) -> Hints {
        let (spec, params) = (self.spec, self.params);
        let (one, by) = (kb.int(1), kb.int(VISIT as i64));
        let here = kb.div(columns, by);
        let here = kb.let_("visits", here);
        let visits = kb.mul(self.count, here);
        let visits = kb.max(visits, one);
        let piece = Piece { number, pieces, run: DEPTH * TILE, tile: spec.tile_len() };
        let next = Next::new(kb, spec, params, self.slice, piece, visits);
        let end = kb.int(pieces - 1);
        let last = (pieces > 1).then(|| kb.binary(BinOp::Eq, number, end));
        let at_last = spec.k - (pieces as usize - 1) * DEPTH;
        let touch = Touch::new(last, (at_last / VISIT).max(1), params.rows[0]);
        Hints { next, block: one, visits: here, touch }
    }

    /// Copies `columns` columns of a slice.
    fn fill(&self, kb: &mut KernelBuilder, strip: FloatStrip, columns: ExprId) {
        let params = self.params;
        let parts = self.slice.parts(params.lanes);
        let pair = self.plain.pair();
        let up = kb.add_int(columns, pair as i64 - 1);
        let by = kb.int(pair as i64);
        let steps = kb.div(up, by);
        let none = kb.int(0);
        // Only its readers of weights are used.
        let reader = Block::new(kb, self.spec, params, self.lookup, self.slice, Rows::plain(none, 1));
        kb.serial("u", steps, |kb, u| {
            let here = kb.mul_int(u, pair as i64);
            let col = kb.add(strip.first, here);
            for part in 0..parts {
                let weights = reader.plain_weights(kb, self.plain, col, part);
                for (j, &w) in weights.iter().take(pair).enumerate() {
                    let to = kb.add_int(here, j as i64);
                    let to = strip.at(kb, to, parts, part, params.lanes);
                    kb.store_vec(strip.buf, to, w);
                }
            }
        });
    }
}

impl FloatStrip {
    fn at(&self, kb: &mut KernelBuilder, here: ExprId, parts: u32, part: u32, lanes: u32) -> ExprId {
        let at = kb.mul_int(here, (parts * lanes).into());
        kb.add_int(at, (part * lanes).into())
    }

    /// The weights of column `col` for one part, f32, pinned.
    pub fn weights(&self, kb: &mut KernelBuilder, col: ExprId, parts: u32, part: u32, lanes: u32) -> ExprId {
        let here = kb.sub(col, self.first);
        let at = self.at(kb, here, parts, part, lanes);
        let value = kb.load_vec(self.buf, at, lanes);
        kb.let_("w", value)
    }
}
