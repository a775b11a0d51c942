//! Contractions in f32: plain and packed weights against f32 or bf16 activations.

use super::block::Block;
use super::float_strip::VISIT;
use super::next::Hints;
use super::{Activation, GROUP};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, ExprId, Ty};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::TILE;
use mlcc_quant::plain::Plain;
use mlcc_quant::tile::{quad_floats, quads, words};

impl Block<'_> {
    /// An activation in all lanes, f32.
    fn x_float(&self, kb: &mut KernelBuilder, r: u32, col: ExprId) -> ExprId {
        let at = self.x_at(kb, r, col);
        let value = kb.load(self.spec.x, at);
        let value = kb.cast(value, DType::F32);
        let value = kb.splat(value, self.params.lanes);
        kb.let_("x", value)
    }

    /// The activation of column `pair + j` in all lanes, f32, where a pair of columns begins at `pair`; the row has the second
    /// column too if `whole`.
    fn x_of_pair(&self, kb: &mut KernelBuilder, r: u32, pair: ExprId, j: usize, whole: bool) -> ExprId {
        if self.spec.activation != Activation::BF16 || !whole {
            let col = kb.add_int(pair, j as i64);
            return self.x_float(kb, r, col);
        }
        // The upper half of an f32 is a bf16: both columns at once into all lanes, and the other one away.
        let both = self.x_pair(kb, r, pair);
        let bits = if j == 0 {
            let by = kb.int_of(16, DType::U32);
            kb.binary(BinOp::Shl, both, by)
        } else {
            let mask = kb.int_of(0xffff_0000, DType::U32);
            kb.binary(BinOp::And, both, mask)
        };
        let value = kb.bitcast(bits, self.vector());
        kb.let_("x", value)
    }

    /// Two bf16 activations in all lanes, u32.
    fn x_pair(&self, kb: &mut KernelBuilder, r: u32, col: ExprId) -> ExprId {
        let at = self.x_at(kb, r, col);
        let x = kb.load_vec(self.spec.x, at, 2);
        let x = kb.bitcast(x, Ty::scalar(DType::U32));
        kb.splat(x, self.params.lanes)
    }

    /// The same of columns `first + c` and the next, as bits of f32, as a lane of a vector with those of the eight columns around them.
    fn x_pair_of_four(&self, kb: &mut KernelBuilder, r: u32, (first, c): (ExprId, usize)) -> ExprId {
        let col = kb.add_int(first, (c / 8 * 8) as i64);
        let at = self.x_at(kb, r, col);
        let pairs = kb.load_vec(self.spec.x, at, 8);
        // As floats, because LLVM looks for a lane of those.
        let pairs = kb.bitcast(pairs, Ty::vector(DType::F32, 4));
        kb.shuffle(pairs, None, vec![(c % 8 / 2) as u32; self.params.lanes as usize])
    }

    /// A bf16 activation and a zero behind it in all lanes, u32.
    fn x_last(&self, kb: &mut KernelBuilder, r: u32, col: ExprId) -> ExprId {
        let at = self.x_at(kb, r, col);
        let x = kb.load(self.spec.x, at);
        let x = kb.bitcast(x, Ty::scalar(DType::U16));
        let x = kb.cast(x, DType::U32);
        kb.splat(x, self.params.lanes)
    }

    // ---- plain weights

    pub(super) fn plain(&self, kb: &mut KernelBuilder, plain: Plain) {
        let (k, step) = (self.spec.k, self.params.unroll.next_multiple_of(2) as usize);
        let full = kb.int((k / step) as i64);
        kb.serial("k", full, |kb, i| {
            let first = kb.mul_int(i, step as i64);
            let base = self.plain_at(kb, plain, first, 0);
            self.prefetch(kb, base, step * TILE, self.spec.n.div_ceil(TILE) * self.spec.tile_len());
            self.columns(kb, plain, first, step);
        });
        if !k.is_multiple_of(step) {
            let first = kb.int((k / step * step) as i64);
            self.columns(kb, plain, first, k % step);
        }
        // Partial sums, in pairs.
        let mut chains: Vec<Vec<ExprId>> = (0..self.chains).map(|c| self.load_acc(kb, c)).collect();
        while chains.len() > 1 {
            let high = chains.split_off(chains.len().div_ceil(2));
            for (low, high) in chains.iter_mut().zip(&high) {
                for (a, &b) in low.iter_mut().zip(high) {
                    *a = kb.add(*a, b);
                }
            }
        }
        self.store_acc(kb, 0, &chains[0]);
    }

    /// Adds the columns of a piece (the first and how many) to the accumulators, which have one chain. The last piece of k
    /// ends with `rest` columns behind whole pieces, or is whole where that is zero.
    pub(super) fn plain_piece(
        &self,
        kb: &mut KernelBuilder,
        plain: Plain,
        (first, columns): (ExprId, ExprId),
        rest: usize,
        hints: Hints,
    ) {
        let by = kb.int(VISIT as i64);
        kb.serial("visit", hints.visits, |kb, visit| {
            hints.emit(kb, self, visit);
            let here = kb.mul(visit, by);
            let first = kb.add(first, here);
            self.plain_run(kb, plain, (first, by), 0);
        });
        if !rest.is_multiple_of(VISIT) {
            let done = kb.mul(hints.visits, by);
            let (first, columns) = (kb.add(first, done), kb.sub(columns, done));
            self.plain_run(kb, plain, (first, columns), rest % VISIT);
        }
    }

    /// The same without asking for anything.
    fn plain_run(
        &self,
        kb: &mut KernelBuilder,
        plain: Plain,
        (first, columns): (ExprId, ExprId),
        rest: usize,
    ) {
        let step = self.params.unroll.next_multiple_of(2) as usize;
        let by = kb.int(step as i64);
        let full = kb.div(columns, by);
        kb.serial("k", full, |kb, i| {
            let here = kb.mul_int(i, step as i64);
            let col = kb.add(first, here);
            self.columns(kb, plain, col, step);
        });
        if !rest.is_multiple_of(step) {
            let done = kb.mul_int(full, step as i64);
            let short = kb.lt(done, columns);
            kb.if_(short, |kb| {
                let col = kb.add(first, done);
                self.columns(kb, plain, col, rest % step);
            });
        }
    }

    /// `count` columns from `first`, which is even.
    fn columns(&self, kb: &mut KernelBuilder, plain: Plain, first: ExprId, count: usize) {
        let mut acc: Vec<Vec<ExprId>> = (0..self.chains).map(|c| self.load_acc(kb, c)).collect();
        if let Some(instr) = self.params.bf16_dot {
            self.bf16_columns(kb, instr, first, count, &mut acc);
            acc.iter().enumerate().for_each(|(chain, values)| self.store_acc(kb, chain as u32, values));
            return;
        }
        for c in (0..count).step_by(plain.pair()) {
            let pair = kb.add_int(first, c as i64);
            let whole = c + 1 < count;
            let both: Vec<[ExprId; 2]> = match self.floats {
                Some(_) => vec![],
                None => (0..self.parts()).map(|p| self.plain_weights(kb, plain, pair, p)).collect(),
            };
            for j in 0..plain.pair().min(count - c) {
                let col = kb.add_int(pair, j as i64);
                let weights: Vec<ExprId> = match self.floats {
                    Some(_) => (0..self.parts()).map(|p| self.plain_weights(kb, plain, col, p)[0]).collect(),
                    None => both.iter().map(|w| w[j]).collect(),
                };
                for r in 0..self.rows {
                    let x = self.x_of_pair(kb, r, pair, j, whole);
                    for (part, &w) in (0..).zip(&weights) {
                        let sum = &mut acc[(c + j) % self.chains as usize][self.index(r, part)];
                        let next = kb.fma(w, x, *sum);
                        *sum = kb.let_("a", next);
                    }
                }
            }
        }
        for (chain, values) in acc.iter().enumerate() {
            self.store_acc(kb, chain as u32, values);
        }
    }

    /// The same for bf16 weights and activations through an instruction that takes both columns of a pair. Behind an odd k
    /// is a zero.
    fn bf16_columns(
        &self,
        kb: &mut KernelBuilder,
        instr: InstrId,
        first: ExprId,
        count: usize,
        acc: &mut [Vec<ExprId>],
    ) {
        let lanes = self.params.lanes;
        for (number, c) in (0..count).step_by(2).enumerate() {
            let col = kb.add_int(first, c as i64);
            let weights = |part| {
                let at = self.plain_at(kb, Plain::BF16, col, part);
                let pair = kb.load_vec(self.spec.w, at, 2 * lanes);
                kb.let_("w", pair)
            };
            let weights: Vec<ExprId> = (0..self.parts()).map(weights).collect();
            for r in 0..self.rows {
                let x = if c / 8 * 8 + 8 <= count && self.params.by_lane {
                    self.x_pair_of_four(kb, r, (first, c))
                } else if c + 1 < count {
                    self.x_pair(kb, r, col)
                } else {
                    self.x_last(kb, r, col)
                };
                let x = kb.bitcast(x, Ty::vector(DType::BF16, 2 * lanes));
                let x = kb.let_("x", x);
                for (part, &w) in (0..).zip(&weights) {
                    let sum = &mut acc[number % self.chains as usize][self.index(r, part)];
                    let next = kb.instr(instr, vec![*sum, w, x]);
                    *sum = kb.let_("a", next);
                }
            }
        }
    }

    /// The weights of `plain.pair()` columns from `col` (the second is the first where that is one) for one part of the
    /// tile, f32.
    pub(super) fn plain_weights(
        &self,
        kb: &mut KernelBuilder,
        plain: Plain,
        col: ExprId,
        part: u32,
    ) -> [ExprId; 2] {
        let lanes = self.params.lanes;
        if let Some(strip) = self.floats {
            return [strip.weights(kb, col, self.parts(), part, lanes); 2];
        }
        let at = self.plain_at(kb, plain, col, part);
        match plain {
            Plain::F32 | Plain::F16 => {
                let value = kb.load_vec(self.spec.w, at, lanes);
                let value = kb.cast(value, DType::F32);
                [kb.let_("w", value); 2]
            }
            Plain::BF16 => {
                // Two columns per 32-bit lane; the upper half of an f32 is a bf16.
                let both = kb.load_vec(self.spec.w, at, 2 * lanes);
                let both = kb.bitcast(both, Ty::vector(DType::U32, lanes));
                let both = kb.let_("w2", both);
                let (by, mask) = (kb.int_of(16, DType::U32), kb.int_of(0xffff_0000, DType::U32));
                let even = kb.binary(BinOp::Shl, both, by);
                let odd = kb.binary(BinOp::And, both, mask);
                [even, odd].map(|bits| {
                    let value = kb.bitcast(bits, self.vector());
                    kb.let_("w", value)
                })
            }
        }
    }

    /// Where column `col` of one part begins.
    fn plain_at(&self, kb: &mut KernelBuilder, plain: Plain, col: ExprId, part: u32) -> ExprId {
        let (tile, part) = self.slice.tile_of(kb, self.params.lanes, part);
        let start = kb.mul_int(tile, self.spec.tile_len() as i64);
        let here = kb.mul_int(col, TILE as i64);
        let at = kb.add(start, here);
        let at = kb.add_int(at, ((part * self.params.lanes) as usize * plain.pair()) as i64);
        self.spec.in_w(kb, at)
    }

    // ---- packed weights

    /// Sums integer weights times activations within a group, then scales: one multiplication per group and row.
    pub(super) fn grouped(&self, kb: &mut KernelBuilder, format: Format) {
        self.for_groups(kb, format, |kb, g, columns| {
            let first = kb.mul_int(g, GROUP as i64);
            let mut sums: Vec<Vec<Option<ExprId>>> =
                vec![vec![None; (self.rows * self.parts()) as usize]; self.chains as usize];
            for word in 0..words(format) {
                let bits = self.words(kb, format, g, word);
                for quad in quads(format, word) {
                    self.quad(kb, format, &bits, (first, quad), columns, &mut sums);
                }
            }
            let mut acc = self.load_acc(kb, 0);
            for part in 0..self.parts() {
                let reader = self.group(kb, format, g, part);
                let scales = reader.scales(kb);
                let scales = kb.let_("scales", scales);
                for r in 0..self.rows {
                    let i = self.index(r, part);
                    let partial = sums.iter().filter_map(|chain| chain[i]);
                    let total = partial.reduce(|a, b| kb.add(a, b));
                    if let Some(total) = total {
                        acc[i] = kb.fma(total, scales, acc[i]);
                    }
                }
            }
            self.store_acc(kb, 0, &acc);
        });
    }

    /// The four columns of one quad, as far as they exist.
    fn quad(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        bits: &[ExprId],
        (first, quad): (ExprId, usize),
        columns: usize,
        sums: &mut [Vec<Option<ExprId>>],
    ) {
        let present = columns.saturating_sub(4 * quad).min(4);
        if present == 0 {
            return;
        }
        let floats = |&word| quad_floats(kb, format, word, quad, self.lookup).map(|w| kb.let_("w", w));
        let weights: Vec<[ExprId; 4]> = bits.iter().map(floats).collect();
        for j in 0..present {
            let col = kb.add_int(first, (4 * quad + j) as i64);
            for r in 0..self.rows {
                let x = self.x_float(kb, r, col);
                for part in 0..self.parts() {
                    let sum = &mut sums[j % self.chains as usize][self.index(r, part)];
                    let w = weights[part as usize][j];
                    let next = match *sum {
                        Some(sum) => kb.fma(w, x, sum),
                        None => kb.mul(w, x),
                    };
                    *sum = Some(kb.let_("s", next));
                }
            }
        }
    }

    /// `for g in 0..groups`; the last group, if short, is emitted on its own with its number of columns.
    fn for_groups(
        &self,
        kb: &mut KernelBuilder,
        format: Format,
        mut body: impl FnMut(&mut KernelBuilder, ExprId, usize),
    ) {
        let (full, rest) = (self.spec.k / GROUP, self.spec.k % GROUP);
        let count = kb.int(full as i64);
        kb.serial("g", count, |kb, g| {
            self.prefetch_group(kb, format, g);
            body(kb, g, GROUP);
        });
        if rest > 0 {
            body(kb, count, rest);
        }
    }
}
