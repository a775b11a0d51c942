//! Queries of decode attention on the stack: as floats, as bytes ([`super::codes`]) or as words ([`super::words`]).

use super::codes::{Codes, size_bits};
use super::decode::{Item, columns};
use super::schedule::{Params, Products};
use super::words::Words;
use super::{Problem, lanes_of};
use crate::inline::known::borders;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty};
use mlcc_ir::types::DType;

/// What stands in the place of the floats of an [`Item`]: of `q` (then one row) and `rows`.
#[derive(Clone, Copy)]
pub(super) enum Operands {
    Floats,
    Bytes(Codes),
    Words(Words),
}

/// Queries on the stack, which all items of a worker share: see [`Item`].
pub(super) struct Queries {
    pub q: BufId,
    pub slopes: Option<BufId>,
    pub operands: Operands,
    /// By key head: 1 once they are there.
    pub loaded: BufId,
}

impl Queries {
    pub fn new(kb: &mut KernelBuilder, a: &Problem, params: Params) -> Queries {
        let operands = match params.products {
            Products::Floats => None,
            Products::Bytes(dots) => Codes::new(kb, a, params, dots).map(Operands::Bytes),
            Products::Words(dot) => Words::new(kb, a, params, dot).map(Operands::Words),
        };
        let operands = operands.unwrap_or(Operands::Floats);
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let vectors = a.kv * params.sets * i64::from(params.lanes);
        let q = match operands {
            Operands::Floats => a.kv * params.queries(a),
            Operands::Bytes(_) | Operands::Words(_) => a.size,
        };
        let q = floats(kb, "q", q);
        let slopes = a.slopes.map(|_| floats(kb, "slopes", vectors));
        let loaded = kb.alloc("loaded", DType::I32, a.kv as usize, Space::Stack);
        let (heads, none) = (kb.int(a.kv), kb.int_of(0, DType::I32));
        kb.serial("key_head", heads, |kb, head| kb.store(loaded, head, none));
        Queries { q, slopes, operands, loaded }
    }
}

impl Item {
    /// Prepares the queries that no item of this worker before has prepared.
    pub(super) fn load_queries_once(&self, kb: &mut KernelBuilder, a: &Problem, loaded: BufId) {
        self.each_key_head(kb, |kb, item| {
            let (old, none) = (kb.load(loaded, item.head), kb.int_of(0, DType::I32));
            let missing = kb.binary(BinOp::Le, old, none);
            kb.if_(missing, |kb| {
                item.load_queries(kb, a);
                let there = kb.int_of(1, DType::I32);
                kb.store(loaded, item.head, there);
            });
        });
    }

    /// Place of the queries of a set.
    pub(super) fn queries_of(&self, kb: &mut KernelBuilder, a: &Problem, set: ExprId) -> ExprId {
        let first = kb.mul_int(self.head, self.params.queries(a));
        let before = kb.mul_int(set, self.params.slots * self.params.padded(a.size));
        kb.add(first, before)
    }

    /// Place of the first part of the query of head `g`.
    pub(super) fn query_row(&self, kb: &mut KernelBuilder, a: &Problem, g: ExprId) -> ExprId {
        let params = self.params;
        let (heads, across) = (kb.int(params.heads), kb.int(params.across));
        let (set, slot) = (kb.div(g, heads), kb.rem(g, heads));
        let (vector, place) = (kb.div(slot, across), kb.rem(slot, across));
        let row = self.queries_of(kb, a, set);
        let before = kb.mul_int(vector, params.across * params.padded(a.size));
        let place = kb.mul_int(place, params.part());
        let row = kb.add(row, before);
        let row = kb.add(row, place);
        kb.let_("row", row)
    }

    /// Scaled queries of head `g`.
    fn load_query(&self, kb: &mut KernelBuilder, a: &Problem, g: ExprId, head: ExprId) {
        let (params, zero) = (self.params, kb.int(0));
        let (lanes, part) = (lanes_of(a.size, params.lanes), params.part());
        let columns_of = kb.int(part);
        let row = self.query_row(kb, a, g);
        query_columns(kb, a, lanes, |kb, c| {
            let value = a.query(kb, zero, head, c, lanes);
            let value = kb.let_("q", value);
            let (number, within) = (kb.div(c, columns_of), kb.rem(c, columns_of));
            let at = kb.mul_int(number, params.lanes.into());
            let at = kb.add(row, at);
            let at = kb.add(at, within);
            let width = lanes.min(part as u32);
            for piece in 0..lanes / width {
                let from = piece * width;
                let value = match width == lanes {
                    true => value,
                    false => kb.shuffle(value, None, (from..from + width).collect()),
                };
                let at = kb.add_int(at, i64::from(piece * params.lanes));
                kb.store_vec(self.q, at, value);
            }
        });
    }

    /// Stores the scaled query of `head` in the one row that integers are made from; gives its largest size, as
    /// [`size_bits`].
    pub(super) fn keep_query(&self, kb: &mut KernelBuilder, a: &Problem, head: ExprId) -> ExprId {
        let (lanes, zero) = (lanes_of(a.size, self.params.lanes), kb.int(0));
        let largest = kb.alloc("largest", DType::I32, lanes as usize, Space::Local);
        let nothing = kb.constant(0.0, Ty::vector(DType::I32, lanes));
        kb.store_vec(largest, zero, nothing);
        query_columns(kb, a, lanes, |kb, c| {
            let value = a.query(kb, zero, head, c, lanes);
            let value = kb.let_("q", value);
            kb.store_vec(self.q, c, value);
            let (size, old) = (size_bits(kb, value), kb.load_vec(largest, zero, lanes));
            let new = kb.max(old, size);
            kb.store_vec(largest, zero, new);
        });
        let largest = kb.load_vec(largest, zero, lanes);
        kb.reduce_lanes(BinOp::Max, largest)
    }

    /// Scaled queries, and slopes.
    pub(super) fn load_queries(&self, kb: &mut KernelBuilder, a: &Problem) {
        match &self.operands {
            Operands::Floats => {
                let (zero, rows) = (kb.int(0), self.params.sets * self.params.slots);
                let first = self.queries_of(kb, a, zero);
                self.clear_rows(kb, self.q, first, rows, self.params.padded(a.size));
                self.each_head(kb, a, |kb, g, head| self.load_query(kb, a, g, head));
            }
            Operands::Bytes(codes) => {
                self.clear_codes(kb, a, codes);
                self.each_head(kb, a, |kb, g, head| self.load_query_codes(kb, a, codes, (g, head)));
            }
            Operands::Words(words) => {
                self.clear_words(kb, a, words);
                self.each_head(kb, a, |kb, g, head| self.load_query_words(kb, a, words, (g, head)));
            }
        }
        let Some(slopes) = self.slopes else { return };
        let zero = kb.int(0);
        let first = self.vector_of(kb, zero);
        self.clear_rows(kb, slopes, first, self.params.sets, i64::from(self.params.lanes));
        self.each_head(kb, a, |kb, g, head| {
            let at = self.slot(kb, g);
            if let Some(slope) = a.slope(kb, head) {
                for key in 0..self.params.keys() {
                    let at = kb.add_int(at, key * self.params.vectors());
                    kb.store(slopes, at, slope);
                }
            }
        });
    }
}

/// A serial loop over vectors of columns of a query: parts of it that are computed in different ways have loops of their own
/// (see [`borders`]).
pub(super) fn query_columns(
    kb: &mut KernelBuilder,
    a: &Problem,
    lanes: u32,
    mut body: impl FnMut(&mut KernelBuilder, ExprId),
) {
    let borders = borders(&a.inliner, lanes.into(), a.size);
    for (&from, &to) in borders.iter().zip(&borders[1..]) {
        columns(kb, to - from, lanes, |kb, c| {
            let c = kb.add_int(c, from);
            body(kb, c);
        });
    }
}
