//! Integer products of many activation rows: the weights of a slice are unpacked once per [`DEPTH`] columns into a strip
//! that stays in cache while all blocks of rows pass by, and the sums of the rows wait in a buffer between
//! the pieces of k.

use super::block::{Block, Rows, group_reader};
use super::integers::{Operand, QUADS, dot_operand};
use super::next::{Hints, Next, Piece, Touch};
use super::{Codes, Epilogue, GROUP, Lookup, MatMul, Slice};
use crate::params::{CodeProduct, MatMulParams};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::TILE;
use mlcc_quant::tile::{self, quads, words};

/// Columns of a strip: with three tiles of 16 rows 27 KiB, which leave room in a first-level cache of 48 KiB for the
/// activations and sums that pass by.
const DEPTH: usize = 512;
/// Whether a strip takes all columns, so that no sums have to wait.
pub(super) fn is_whole(spec: &MatMul, codes: Codes) -> bool {
    spec.k <= Strip::depth(codes)
}

/// Dot operands and f32 scales of one piece of a slice, in the order in which a block reads them, on the worker's stack.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub codes: BufId,
    /// The codes without their signs, where the product wants those too.
    magnitudes: Option<BufId>,
    pub scales: BufId,
    pub lanes: u32,
    pub product: CodeProduct,
    /// First group of the piece.
    first: ExprId,
}

impl Strip {
    /// Columns per piece: whole groups of activation scales.
    fn depth(codes: Codes) -> usize {
        (DEPTH / codes.group).max(1) * codes.group
    }

    fn alloc(
        kb: &mut KernelBuilder,
        spec: &MatMul,
        params: &MatMulParams,
        format: Format,
        codes: Codes,
    ) -> Strip {
        let groups = Self::depth(codes).min(spec.k.next_multiple_of(GROUP)) / GROUP;
        let vectors = groups * params.tiles as usize * TILE;
        let product = match params.squares {
            Some(instr) => CodeProduct::Squares { instr },
            None => params.dot.product(format, codes.planes),
        };
        let of_bytes =
            |kb: &mut KernelBuilder, name, element| kb.alloc(name, element, vectors * GROUP, Space::Stack);
        let magnitudes = matches!(product, CodeProduct::Magnitudes { .. });
        Strip {
            codes: of_bytes(kb, "strip", product.codes_type()),
            magnitudes: magnitudes.then(|| of_bytes(kb, "magnitudes", DType::U8)),
            scales: kb.alloc("strip_scales", DType::F32, vectors * sums_of_part(product), Space::Stack),
            lanes: params.lanes,
            product,
            first: kb.int(0),
        }
    }

    /// Offset of the vector of a part, in vectors; `g` counts from the begin of the piece.
    pub fn vector(
        kb: &mut KernelBuilder,
        parts: u32,
        g: ExprId,
        quad: usize,
        part: u32,
        quads: usize,
    ) -> ExprId {
        let start = kb.mul_int(g, quads as i64 * i64::from(parts));
        kb.add_int(start, quad as i64 * i64::from(parts) + i64::from(part))
    }

    /// The operand of one quad and part of group `g`.
    pub fn operand(&self, kb: &mut KernelBuilder, parts: u32, g: ExprId, quad: usize, part: u32) -> Operand {
        let g = kb.sub(g, self.first);
        let at = Self::vector(kb, parts, g, quad, part, QUADS);
        let at = kb.mul_int(at, i64::from(4 * self.lanes));
        let load = |kb: &mut KernelBuilder, buf| {
            let value = kb.load_vec(buf, at, 4 * self.lanes);
            kb.let_("q", value)
        };
        let codes = load(kb, self.codes);
        let magnitudes = self.magnitudes.map_or(codes, |buf| load(kb, buf));
        Operand { codes, magnitudes }
    }

    /// Where the weight scales of a part lie; `g` counts from the begin of the piece.
    fn scales_at(&self, kb: &mut KernelBuilder, parts: u32, g: ExprId, part: u32) -> ExprId {
        let at = Self::vector(kb, parts, g, 0, part, 1);
        kb.mul_int(at, i64::from(self.lanes) * sums_of_part(self.product) as i64)
    }

    /// The weight scales of a part, f32, of each of its vectors of sums.
    pub fn scales(&self, kb: &mut KernelBuilder, parts: u32, g: ExprId, part: u32) -> Vec<ExprId> {
        let g = kb.sub(g, self.first);
        let at = self.scales_at(kb, parts, g, part);
        let load = |i: usize| {
            let at = kb.add_int(at, i as i64 * i64::from(self.lanes));
            kb.load_vec(self.scales, at, self.lanes)
        };
        (0..sums_of_part(self.product)).map(load).collect()
    }

    /// Unpacks `count` groups of a slice.
    fn fill(&self, kb: &mut KernelBuilder, spec: &MatMul, slice: Slice, format: Format, count: ExprId) {
        let parts = slice.parts(self.lanes);
        kb.serial("u", count, |kb, u| {
            let g = kb.add(self.first, u);
            for part in 0..parts {
                let reader = group_reader(kb, spec, format, slice, self.lanes, g, part);
                let scales = reader.scales(kb);
                let at = self.scales_at(kb, parts, u, part);
                if let CodeProduct::Squares { .. } = self.product {
                    self.fill_squares(kb, &reader, (parts, u, part), (scales, at));
                    continue;
                }
                kb.store_vec(self.scales, at, scales);
                for word in 0..words(format) {
                    let bits = reader.word(kb, word);
                    let bits = kb.let_("word", bits);
                    for quad in quads(format, word) {
                        let codes = dot_operand(kb, self.product, format, bits, quad);
                        let at = Self::vector(kb, parts, u, quad, part, QUADS);
                        let at = kb.mul_int(at, i64::from(4 * self.lanes));
                        let operand = Operand::new(kb, self.product, codes);
                        kb.store_vec(self.codes, at, operand.codes);
                        if let Some(buf) = self.magnitudes {
                            kb.store_vec(buf, at, operand.magnitudes);
                        }
                    }
                }
            }
        });
    }
}

/// Vectors of sums that the rows of one part of the weights have with a row of activations, or with two.
fn sums_of_part(product: CodeProduct) -> usize {
    if let CodeProduct::Squares { .. } = product { 2 } else { 1 }
}

/// What the blocks of one slice have in common.
pub(super) struct Blocks<'a> {
    pub spec: &'a MatMul,
    pub params: &'a MatMulParams,
    pub lookup: Lookup,
    pub slice: Slice,
    pub format: Format,
    pub codes: Codes,
    /// First row.
    pub first: ExprId,
    /// Number of blocks of `params.rows[0]` rows, at most `params.chunk` rows in all.
    pub count: ExprId,
}

impl Blocks<'_> {
    /// Emits all blocks, piece by piece of k.
    pub fn emit(&self, kb: &mut KernelBuilder, epilogue: &mut Epilogue) {
        let (spec, params, codes) = (self.spec, self.params, self.codes);
        let strip = Strip::alloc(kb, spec, params, self.format, codes);
        let depth = Strip::depth(codes);
        let groups = kb.int(spec.k.div_ceil(GROUP) as i64);
        let scales = kb.int(spec.k.div_ceil(codes.group) as i64);
        if is_whole(spec, codes) {
            strip.fill(kb, spec, self.slice, self.format, groups);
            let none = kb.int(0);
            let next = self.next(kb, (none, 1), scales);
            let touch = Touch::new(None, spec.k.div_ceil(codes.group), params.rows[0]);
            self.each(kb, strip, |kb, block, b| {
                let hints = Hints { next, block: b, visits: scales, touch };
                block.integers(kb, self.format, codes, (none, scales), Some(hints));
                block.scale_sums(kb, codes);
                block.finish(kb, epilogue);
            });
            return;
        }
        let vectors = params.chunk.unwrap_or(params.rows[0]) * self.slice.parts(params.lanes);
        let sums = kb.alloc("sums", DType::F32, (vectors * params.lanes) as usize, Space::Stack);
        let number = spec.k.div_ceil(depth);
        let pieces = kb.int(number as i64);
        kb.serial("piece", pieces, |kb, piece| {
            let first = kb.mul_int(piece, (depth / GROUP) as i64);
            let first = kb.let_("first", first);
            let (left, most) = (kb.sub(groups, first), kb.int((depth / GROUP) as i64));
            let count = kb.min(left, most);
            let strip = Strip { first, ..strip };
            strip.fill(kb, spec, self.slice, self.format, count);
            let first = kb.mul_int(piece, (depth / codes.group) as i64);
            let first = kb.let_("first_scale", first);
            let (left, most) = (kb.sub(scales, first), kb.int((depth / codes.group) as i64));
            let count = kb.min(left, most);
            let next = self.next(kb, (piece, number), count);
            let (begin, end) = (kb.int(0), kb.int(number as i64 - 1));
            let (later, early) = (kb.lt(begin, piece), kb.lt(piece, end));
            let last = spec.k.div_ceil(codes.group) - (number - 1) * depth / codes.group;
            let at = kb.binary(BinOp::Eq, piece, end);
            let touch = Touch::new(Some(at), last, params.rows[0]);
            self.each(kb, strip, |kb, block, b| {
                kb.if_(later, |kb| block.restore(kb, sums, b));
                let hints = Hints { next, block: b, visits: count, touch };
                block.integers(kb, self.format, codes, (first, count), Some(hints));
                kb.if_else(
                    early,
                    |kb| block.save(kb, sums, b),
                    |kb| {
                        block.scale_sums(kb, codes);
                        block.finish(kb, epilogue);
                    },
                );
            });
        });
    }

    /// What blocks ask for while they pass by a piece.
    fn next(
        &self,
        kb: &mut KernelBuilder,
        (number, pieces): (ExprId, usize),
        scales: ExprId,
    ) -> Option<Next> {
        let group = tile::group_bytes(self.format);
        let tile = group * self.spec.k.div_ceil(GROUP);
        let run = group * Strip::depth(self.codes) / GROUP;
        let piece = Piece { number, pieces: pieces as i64, run, tile };
        let visits = kb.mul(self.count, scales);
        Next::new(kb, self.spec, self.params, self.slice, piece, visits)
    }

    fn each(
        &self,
        kb: &mut KernelBuilder,
        strip: Strip,
        mut body: impl FnMut(&mut KernelBuilder, &Block, ExprId),
    ) {
        let rows = self.params.rows[0];
        kb.serial("block", self.count, |kb, b| {
            let offset = kb.mul_int(b, rows.into());
            let row = kb.add(self.first, offset);
            let row = kb.let_("row", row);
            let rows = Rows { interleaved: rows > 1, strip: Some(strip), ..Rows::plain(row, rows) };
            let block = Block::new(kb, self.spec, self.params, self.lookup, self.slice, rows);
            body(kb, &block, b);
        });
    }
}

impl Block<'_> {
    /// Where the accumulators of block `b` wait.
    fn parked(&self, kb: &mut KernelBuilder, b: ExprId, r: u32, part: u32) -> ExprId {
        let lanes = i64::from(self.params.lanes);
        let start = kb.mul_int(b, i64::from(self.rows * self.parts()) * lanes);
        kb.add_int(start, self.index(r, part) as i64 * lanes)
    }

    pub(super) fn save(&self, kb: &mut KernelBuilder, sums: BufId, b: ExprId) {
        self.each(|r, part| {
            let from = self.slot(kb, 0, r, part);
            let value = kb.load_vec(self.acc, from, self.params.lanes);
            let to = self.parked(kb, b, r, part);
            kb.store_vec(sums, to, value);
        });
    }

    pub(super) fn restore(&self, kb: &mut KernelBuilder, sums: BufId, b: ExprId) {
        self.each(|r, part| {
            let from = self.parked(kb, b, r, part);
            let value = kb.load_vec(sums, from, self.params.lanes);
            let to = self.slot(kb, 0, r, part);
            kb.store_vec(self.acc, to, value);
        });
    }
}
