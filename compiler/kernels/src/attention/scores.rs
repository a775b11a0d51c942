//! Scores of a block of keys with all query heads of a key head, for decode attention.
//!
//! A vector of products holds a few columns (a part of a row) of several heads: the same part of a row of keys, broadcast
//! from memory, meets the queries of all of them. So only the few columns of a part are left to be added up over lanes, by
//! a short tree of exchanges that gives one vector with the scores of some keys with all heads.

use super::block::Block;
use super::decode::columns;
use super::product::join_each;
use super::queries::Operands;
use super::schedule::Products;
use super::words::Words;
use super::{HIDDEN, Place, ceil_div, lanes_of, larger};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::CACHE_LINE;

/// Lines of scales that a step asks for at most.
const MOST_SCALE_LINES: i64 = 2;

/// When a step asks for keys: memory is to be busy all the time.
#[derive(Clone, Copy)]
pub(super) enum Turn {
    /// Before rows are unpacked.
    Before,
    /// With the products: number, and how many there are.
    Within(ExprId, i64),
    /// Before products become scores.
    Behind,
}

impl Block<'_> {
    /// Stores the scores of all keys; gives the largest of each lane.
    pub(super) fn scores(&self, kb: &mut KernelBuilder, set: ExprId) -> ExprId {
        let (lanes, zero) = (self.lanes(), kb.int(0));
        let best = kb.alloc("best", DType::F32, lanes as usize, Space::Local);
        let hidden = kb.constant(HIDDEN, Ty::vector(DType::F32, lanes));
        kb.store_vec(best, zero, hidden);
        let slope = self.item.slopes.map(|slopes| {
            let at = self.item.vector_of(kb, set);
            let slope = kb.load_vec(slopes, at, lanes);
            kb.let_("slope", slope)
        });
        let params = self.item.params;
        let together = kb.int(params.together());
        let steps = ceil_div(kb, self.count, together);
        kb.serial("step", steps, |kb, i| {
            let offset = kb.mul(i, together);
            let offset = kb.let_("offset", offset);
            self.scales_ahead(kb, offset);
            self.keys_ahead(kb, offset, Turn::Before);
            let products = match &self.item.operands {
                Operands::Floats => {
                    if !self.direct() {
                        self.unpack(kb, (self.item.rows, offset), |kb, row, c, lanes| {
                            self.a.row(kb, self.a.key.0, row, self.item.head, c, lanes)
                        });
                    }
                    self.products(kb, None, set, offset)
                }
                Operands::Bytes(codes) => {
                    self.copy_codes(kb, codes, offset);
                    self.code_products(kb, codes, set, offset)
                }
                Operands::Words(words) => {
                    if !self.direct() {
                        self.unpack(kb, (words.rows, offset), |kb, row, word, lanes| {
                            words.key(kb, (self.a, row, self.item.head), word, lanes)
                        });
                    }
                    self.products(kb, Some(words), set, offset)
                }
            };
            self.keys_ahead(kb, offset, Turn::Behind);
            let vectors = params.together() / params.keys();
            for (w, mut s) in (0..vectors).zip(products) {
                let first = kb.add_int(offset, w * params.keys());
                if let Some(scales) = self.scales(kb, self.a.key.1, first) {
                    s = kb.mul(s, scales);
                }
                let j = self.key_of_lane(kb, first);
                let place = Place {
                    p: self.item.last,
                    j,
                    slope,
                    prefix: self.item.prefix,
                    end: Some(self.item.end),
                    // The keys begin with the first that the last query sees.
                    shown: self.item.prefix.is_none(),
                };
                let s = self.a.score(kb, s, &place);
                let s = kb.let_("s", s);
                let at = kb.mul_int(i, vectors * i64::from(lanes));
                let at = kb.add_int(at, w * i64::from(lanes));
                kb.store_vec(self.item.weights, at, s);
                let old = kb.load_vec(best, zero, lanes);
                let new = larger(kb, old, s);
                kb.store_vec(best, zero, new);
            }
        });
        let best = kb.load_vec(best, zero, lanes);
        kb.let_("best", best)
    }

    /// A number of at least 1 that only looks as if it depended on the block: unrolled, a loop over it would have its loads and
    /// requests moved together, and sums in memory.
    pub(super) fn as_if_unknown(&self, kb: &mut KernelBuilder, number: ExprId) -> ExprId {
        let more = kb.mul(self.count, number);
        kb.min(number, more)
    }

    /// True if vectors of products have whole vectors of columns, so that rows are read where they lie.
    fn direct(&self) -> bool {
        let (lanes, columns) = (i64::from(self.lanes()), self.item.params.products.columns());
        self.item.params.part() == lanes && self.a.size % (lanes * columns) == 0
    }

    /// Asks for the keys of the next block in the place of those of the step from `offset` on.
    pub(super) fn keys_ahead(&self, kb: &mut KernelBuilder, offset: ExprId, turn: Turn) {
        let params = self.item.params;
        let all = params.together() * self.a.size;
        // Integers take little time but for products.
        let (before, behind) = match params.products {
            Products::Floats if !self.direct() => (all / 8, all / 8),
            // Parts of rows of words are less than a line.
            Products::Words(_) if !self.direct() => (all / 2, all - all / 2),
            Products::Floats | Products::Bytes(_) | Products::Words(_) => (0, 0),
        };
        let within = all - before - behind;
        let first = kb.mul_int(offset, self.a.size);
        let (at, width) = match turn {
            Turn::Before => (first, before),
            Turn::Within(number, turns) => {
                let width = (within + turns - 1) / turns;
                let at = kb.mul_int(number, width);
                let at = kb.add_int(at, before);
                (kb.add(first, at), width)
            }
            Turn::Behind => (kb.add_int(first, before + within), behind),
        };
        self.ahead(kb, params.ahead[0], at, width);
    }

    /// Asks for the scales of the next block, for the keys of a step. As many heads share their lines as fit.
    fn scales_ahead(&self, kb: &mut KernelBuilder, offset: ExprId) {
        let params = self.item.params;
        let floats = CACHE_LINE as i64 / 4;
        for ahead in params.scales_ahead {
            let width = (params.together() * self.a.kv).min(MOST_SCALE_LINES * floats);
            self.ahead(kb, ahead, offset, width);
        }
    }

    /// The key that a lane of a vector of scores stands for, the first being `offset` of the block: `i32`.
    fn key_of_lane(&self, kb: &mut KernelBuilder, offset: ExprId) -> ExprId {
        let params = self.item.params;
        let key = kb.add(self.first, offset);
        let key = kb.cast(key, DType::I32);
        let (zero, one) = (kb.int_of(0, DType::I32), kb.int_of(1, DType::I32));
        let lane = kb.ramp(zero, one, self.lanes());
        let within = kb.int_of(params.part() - 1, DType::I32);
        let lane = kb.binary(BinOp::And, lane, within);
        let shift = kb.int_of(params.vectors().trailing_zeros().into(), DType::I32);
        let offset = kb.binary(BinOp::Shr, lane, shift);
        kb.add(offset, key)
    }

    /// Rows of the keys of a step to `to`, from number `offset` of the block on: `value(row, element, lanes)` of each. What older
    /// rows leave behind the last key is hidden.
    fn unpack(
        &self,
        kb: &mut KernelBuilder,
        (to, offset): (BufId, ExprId),
        value: impl Fn(&mut KernelBuilder, ExprId, ExprId, u32) -> ExprId,
    ) {
        let (params, padded) = (self.item.params, self.item.params.padded(self.a.size));
        let size = self.a.size / params.products.columns();
        let lanes = lanes_of(size, params.lanes);
        let (together, rest) = (kb.int(params.together()), kb.sub(self.count, offset));
        let count = kb.min(together, rest);
        kb.serial("i", count, |kb, i| {
            let number = kb.add(offset, i);
            let row = kb.add(self.first, number);
            let start = kb.mul_int(i, padded);
            columns(kb, size, lanes, |kb, c| {
                let value = value(kb, row, c, lanes);
                let at = kb.add(start, c);
                kb.store_vec(to, at, value);
            });
        });
    }

    /// Products of the keys of a step (from number `offset` of the block on) with all heads, in vectors of scores: of floats, or
    /// of words.
    fn products(
        &self,
        kb: &mut KernelBuilder,
        words: Option<&Words>,
        set: ExprId,
        offset: ExprId,
    ) -> Vec<ExprId> {
        let params = self.item.params;
        let dtype = if words.is_some() { DType::I32 } else { DType::F32 };
        let (query_rows, key_rows) =
            words.map_or((self.item.q, self.item.rows), |words| (words.queries, words.rows));
        let (lanes, part, zero) = (params.lanes, params.part(), kb.int(0));
        let padded = params.padded(self.a.size);
        let used = (params.heads + params.across - 1) / params.across;
        let sum = |kb: &mut KernelBuilder| {
            let sum = kb.alloc("sum", dtype, lanes as usize, Space::Local);
            let nothing = kb.constant(0.0, Ty::vector(dtype, lanes));
            kb.store_vec(sum, zero, nothing);
            sum
        };
        let sums: Vec<Vec<BufId>> =
            (0..params.together()).map(|_| (0..used).map(|_| sum(kb)).collect()).collect();
        let queries = self.item.queries_of(kb, self.a, set);
        let mut parts = kb.int(padded / part);
        if words.is_some() {
            parts = self.as_if_unknown(kb, parts);
        }
        kb.serial("part", parts, |kb, c| {
            self.keys_ahead(kb, offset, Turn::Within(c, padded / part));
            let from = kb.mul_int(c, i64::from(lanes));
            let from = kb.add(queries, from);
            let q: Vec<ExprId> = (0..used)
                .map(|v| {
                    let at = kb.add_int(from, v * params.across * padded);
                    let q = kb.load_vec(query_rows, at, lanes);
                    kb.let_("q", q)
                })
                .collect();
            let c = kb.mul_int(c, part);
            for (i, of_key) in (0..).zip(&sums) {
                let k = if self.direct() {
                    let number = kb.add_int(offset, i);
                    // Rows behind the last one are hidden.
                    let row = self.row(kb, number);
                    match words {
                        None => self.a.row(kb, self.a.key.0, row, self.item.head, c, lanes),
                        Some(words) => words.key(kb, (self.a, row, self.item.head), c, lanes),
                    }
                } else {
                    let at = kb.add_int(c, i * padded);
                    params.spread(kb, key_rows, at)
                };
                let k = kb.let_("k", k);
                for (&q, &sum) in q.iter().zip(of_key) {
                    let old = kb.load_vec(sum, zero, lanes);
                    let new = match words {
                        None => kb.fma(q, k, old),
                        Some(words) => words.dot.add(kb, old, q, k),
                    };
                    kb.store_vec(sum, zero, new);
                }
            }
        });
        let product = |kb: &mut KernelBuilder, sum: Option<&BufId>| {
            sum.map(|&sum| {
                let sum = kb.load_vec(sum, zero, lanes);
                kb.let_("product", sum)
            })
        };
        let all = 0..params.vectors() as usize;
        // None where no head is.
        let products: Vec<Vec<Option<ExprId>>> =
            sums.iter().map(|of_key| all.clone().map(|v| product(kb, of_key.get(v))).collect()).collect();
        let nothing = kb.constant(0.0, Ty::vector(dtype, lanes));
        let unit = words.map(|words| {
            let at = self.item.vector_of(kb, set);
            let unit = kb.load_vec(words.units, at, lanes);
            kb.let_("unit", unit)
        });
        let joined = |of_vector: &[Vec<Option<ExprId>>]| {
            let products = of_vector.iter().flatten().copied().collect();
            let all = join_each(kb, products, nothing, |kb, a, b| kb.add(a, b));
            let Some(unit) = unit else { return all };
            let all = kb.cast(all, DType::F32);
            kb.mul(all, unit)
        };
        products.chunks(params.keys() as usize).map(joined).collect()
    }
}
