//! Integer products of few activation rows, such as those of sequences that decode together. Each block of rows unpacks
//! the weights in registers again: a strip (see [`super::strip`]) would let the arithmetic wait while it is filled, and the
//! memory while the blocks pass by. Instead every pass over a slice asks for an equal part of the next slice, so that
//! weights come from memory all the time.

use super::block::Block;
use super::{CACHE_LINE, GROUP, MatMul, Slice};
use crate::params::MatMulParams;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{ExprId, Stmt};
use mlcc_ir::types::Format;
use mlcc_quant::TILE;
use mlcc_quant::tile;

/// Most blocks of rows that do without a strip. A block takes some 80 cycles per group of three tiles without and 60 with
/// one, which takes 45 to fill.
pub(super) const FEW_BLOCKS: i64 = 4;

/// What one pass over a slice asks for of the next one.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Offset in the weights of the first line.
    start: ExprId,
    /// Lines per group of columns.
    lines: ExprId,
    /// Offset of the last byte.
    last: ExprId,
}

/// The parts of all passes over one slice.
#[derive(Clone, Copy)]
pub(super) struct Shares {
    start: ExprId,
    lines: ExprId,
    last: ExprId,
    groups: i64,
}

impl Shares {
    /// For so many passes; `None` where nothing can be asked for.
    pub fn new(
        kb: &mut KernelBuilder,
        spec: &MatMul,
        params: &MatMulParams,
        format: Format,
        slice: Slice,
        passes: ExprId,
    ) -> Option<Shares> {
        params.ahead?;
        let groups = spec.k.div_ceil(GROUP);
        let tile = tile::group_bytes(format) * groups;
        let per_group = (slice.tiles as usize * tile::group_bytes(format)).div_ceil(CACHE_LINE);
        let one = kb.int(1);
        let passes = kb.max(passes, one);
        let all = kb.add_int(passes, per_group as i64 - 1);
        let lines = kb.div(all, passes);
        let next = kb.add_int(slice.first, i64::from(slice.tiles));
        let start = kb.mul_int(next, tile as i64);
        let start = kb.add_int(start, spec.w_offset as i64);
        let last = spec.w_offset + spec.n.div_ceil(TILE) * tile - 1;
        Some(Shares {
            start: kb.let_("next", start),
            lines: kb.let_("lines", lines),
            last: kb.int(last as i64),
            groups: groups as i64,
        })
    }

    /// The part of pass number `pass`.
    pub fn of(&self, kb: &mut KernelBuilder, pass: ExprId) -> Ahead {
        let before = kb.mul_int(pass, self.groups * CACHE_LINE as i64);
        let before = kb.mul(before, self.lines);
        let start = kb.add(self.start, before);
        Ahead { start: kb.let_("from", start), lines: self.lines, last: self.last }
    }
}

impl Block<'_> {
    /// Asks for what belongs to group `g` of this pass.
    pub(super) fn prefetch_ahead(&self, kb: &mut KernelBuilder, g: ExprId) {
        let (Some(ahead), Some(instr)) = (self.ahead, self.params.ahead) else { return };
        let before = kb.mul(g, ahead.lines);
        let before = kb.mul_int(before, CACHE_LINE as i64);
        let from = kb.add(ahead.start, before);
        let from = kb.let_("ahead", from);
        kb.serial("line", ahead.lines, |kb, line| {
            let at = kb.mul_int(line, CACHE_LINE as i64);
            let at = kb.add(from, at);
            let at = kb.min(at, ahead.last);
            let element = kb.load(self.spec.w, at);
            kb.push(Stmt::Instr { instr, args: vec![element] });
        });
    }
}
