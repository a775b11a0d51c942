//! Kernels of the `attention` op: scores, softmax and weighted values of a block of keys at a time, with running maxima
//! and sums ("online softmax", Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022), so that no matrix of
//! scores is ever in memory. Everything is accumulated in f32.
//!
//! [`decode`] (one query on a CPU) with [`merge`], [`prefill`] (several queries on a CPU), [`gpu`] (both).

mod block;
mod code_values;
mod codes;
pub mod decode;
pub mod gpu;
pub mod merge;
mod pairs;
pub mod prefill;
pub(crate) mod product;
mod queries;
mod rows;
pub mod schedule;
mod scores;
mod shares;
mod words;

use crate::inline::{Binding, Index, Inliner};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::{BinOp, BufId, ExprId, UnOp};
use mlcc_ir::ops::{Attention, Op};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Recorder;

/// The score of a key that is not seen, and the first running maximum.
pub(crate) const HIDDEN: f64 = -1e30;
/// A slice of the cache has at least this many keys, where a cache is cut for several workers.
pub(crate) const SLICE_KEYS: i64 = 64;

/// Which keys a pass over the cache is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Keys {
    /// All that the mask shows; with sinks those of the window.
    Seen,
    /// Sinks that the window has left behind.
    Sinks,
}

/// One attention: the op, its sizes, and where the operands come from.
pub struct Problem<'a> {
    /// Binds the operands; one lane.
    pub inliner: Inliner<'a, 'static>,
    pub op: Attention,
    q: ValueId,
    k: ValueId,
    v: ValueId,
    /// Rows of keys and of values without their scale, and the scale (`[t, kv, 1]`), where that is a factor of whole rows.
    key: (ValueId, Option<ValueId>),
    value: (ValueId, Option<ValueId>),
    slopes: Option<ValueId>,
    prefix: Option<ValueId>,
    /// Queries for the sinks.
    sink_q: Option<ValueId>,
    /// Logits of the key without a value.
    null: Option<ValueId>,
    keys: Keys,
    /// What scores count in: 1, or log2(e) where weights are powers of two.
    unit: f64,
    pub n: Dim,
    /// Keys.
    pub t: Dim,
    pub kv: i64,
    /// Query heads per key head.
    pub group: i64,
    pub size: i64,
    pub value_size: i64,
}

/// The node of an attention, if the function has one.
pub fn find(f: &Function) -> Option<&Node> {
    f.live().map(|(_, n)| n).find(|n| matches!(n.op, Op::Attention(_)))
}

impl<'a> Problem<'a> {
    /// `node` is an attention of the inliner's function.
    pub fn new(node: &Node, inliner: Inliner<'a, 'static>) -> Option<Problem<'a>> {
        let Op::Attention(op) = &node.op else { return None };
        let dims = |i: usize| inliner.f.ty(node.inputs[i]).dims.clone();
        let size = |d: &Dim| d.as_const();
        let (q, k, v) = (dims(0), dims(1), dims(2));
        let kv = size(&k[1])?;
        let (group, size, value_size) = (q[1].as_const()? / kv, size(&q[2])?, size(&v[2])?);
        let at = |i: usize| node.inputs[i];
        Some(Problem {
            op: op.clone(),
            q: at(0),
            k: at(1),
            v: at(2),
            key: without_scale(&inliner, at(1)),
            value: without_scale(&inliner, at(2)),
            slopes: op.slopes_input().map(at),
            prefix: op.prefix_input().map(at),
            sink_q: op.sink_input().map(at),
            null: op.null_input().map(at),
            keys: Keys::Seen,
            unit: 1.0,
            n: q[0].clone(),
            t: k[0].clone(),
            kv,
            group,
            size,
            value_size,
            inliner,
        })
    }

    /// The same problem with weights that are powers of two: it costs nothing to scale queries, slopes and bounds by log2(e), and
    /// such powers take fewer operations.
    pub fn in_powers_of_two(self) -> Problem<'a> {
        Problem { unit: std::f64::consts::LOG2_E, ..self }
    }

    /// Where rows of keys, and of values, lie in memory: buffer, type and elements of a head.
    fn key_rows(&self) -> Option<(BufId, DType, i64)> {
        self.rows_of(self.k)
    }
    fn value_rows(&self) -> Option<(BufId, DType, i64)> {
        self.rows_of(self.v)
    }
    /// The widest operand that has all heads of every key, through what is computed element by element.
    fn rows_of(&self, v: ValueId) -> Option<(BufId, DType, i64)> {
        let ty = self.inliner.f.ty(v);
        let [t, kv, size] = &ty.dims[..] else { return None };
        if *t != self.t || kv.as_const() != Some(self.kv) {
            return None;
        }
        match self.inliner.bindings.get(&v) {
            Some(Binding::Buffer { buf, layout: None }) => Some((*buf, ty.dtype, size.as_const()?)),
            Some(_) => None,
            None => {
                let inputs = &self.inliner.f.def(v)?.inputs;
                inputs.iter().filter_map(|&i| self.rows_of(i)).max_by_key(|rows| rows.2)
            }
        }
    }

    /// The buffer of scales of rows, `[t, kv]` in f32, through a change of shape.
    fn scales(&self, v: ValueId) -> Option<BufId> {
        let ty = self.inliner.f.ty(v);
        match self.inliner.bindings.get(&v) {
            Some(Binding::Buffer { buf, layout: None }) if ty.dtype == DType::F32 => Some(*buf),
            Some(_) => None,
            None => match self.inliner.f.def(v)? {
                node if matches!(node.op, Op::Reshape { .. }) => self.scales(node.inputs[0]),
                _ => None,
            },
        }
    }

    pub fn heads(&self) -> i64 {
        self.kv * self.group
    }

    /// The same problem over the sinks behind the window, the first `op.sinks` keys; `None` if there are none. Where a
    /// query has none of them behind its window all scores are hidden, and what that adds up to counts nothing once a
    /// key of the window was seen.
    fn sinks(&self) -> Option<Problem<'a>> {
        let q = self.sink_q?;
        Some(Problem {
            op: self.op.clone(),
            inliner: self.inliner.clone(),
            n: self.n.clone(),
            t: self.t.clone(),
            q,
            keys: Keys::Sinks,
            ..*self
        })
    }

    /// How many sinks are behind the window of the query at position `last`, and so of any before it. Those that are not
    /// have no place in a pass over sinks: there may not even be so many keys yet.
    fn sinks_behind(&self, kb: &mut KernelBuilder, last: ExprId) -> ExprId {
        let (newest, sinks) = (kb.int(self.op.window as i64 - 1), kb.int(self.op.sinks as i64));
        let behind = kb.sub(last, newest);
        let behind = at_least_zero(kb, behind);
        kb.min(behind, sinks)
    }

    /// Elements from column `c` of a row as f32.
    fn row(
        &self,
        kb: &mut KernelBuilder,
        v: ValueId,
        row: ExprId,
        head: ExprId,
        c: ExprId,
        lanes: u32,
    ) -> ExprId {
        Recorder::within(kb, |k| {
            let ctx = Inliner { lanes, ..self.inliner.clone() };
            let [row, head, c] = [row, head, c].map(|index| k.val(index));
            let value = ctx.value(k, v, &[Index::scalar(row), Index::scalar(head), Index::from(c, lanes)]);
            value.cast(DType::F32).to_lanes(lanes).id()
        })
    }
    /// Elements of a query, times the scale of scores.
    fn query(&self, kb: &mut KernelBuilder, row: ExprId, head: ExprId, c: ExprId, lanes: u32) -> ExprId {
        let value = self.row(kb, self.q, row, head, c, lanes);
        let scale = kb.float(self.op.scale * self.unit);
        kb.mul(value, scale)
    }
    fn key(&self, kb: &mut KernelBuilder, row: ExprId, head: ExprId, c: ExprId, lanes: u32) -> ExprId {
        self.row(kb, self.k, row, head, c, lanes)
    }
    fn value(&self, kb: &mut KernelBuilder, row: ExprId, head: ExprId, c: ExprId, lanes: u32) -> ExprId {
        self.row(kb, self.v, row, head, c, lanes)
    }
    /// Slope of a query head; `None` without ALiBi.
    fn slope(&self, kb: &mut KernelBuilder, head: ExprId) -> Option<ExprId> {
        self.of_head(kb, self.slopes?, head)
    }
    /// Logit of the key without a value for a query head; `None` if there is no such key. Running maxima begin with it, and
    /// sums of weights with 1.
    fn null_logit(&self, kb: &mut KernelBuilder, head: ExprId) -> Option<ExprId> {
        self.of_head(kb, self.null?, head)
    }
    /// A number per query head, in what scores count in.
    fn of_head(&self, kb: &mut KernelBuilder, v: ValueId, head: ExprId) -> Option<ExprId> {
        let value = Recorder::within(kb, |k| self.inliner.value(k, v, &[Index::scalar(k.val(head))]).id());
        if self.unit == 1.0 {
            return Some(value);
        }
        let unit = kb.float(self.unit);
        Some(kb.mul(value, unit))
    }
    /// Keys of the prefix, at most all; `None` without a prefix.
    fn prefix(&self, kb: &mut KernelBuilder) -> Option<ExprId> {
        let v = self.prefix?;
        let count = Recorder::within(kb, |k| self.inliner.value(k, v, &[Index::scalar(k.int(0))]).id());
        let (count, t) = (kb.cast(count, DType::I64), kb.dim(&self.t));
        let count = kb.min(count, t);
        Some(kb.let_("prefix", count))
    }
    /// The first key that a query at position `p` and those after it see.
    fn first_key(&self, kb: &mut KernelBuilder, p: ExprId) -> ExprId {
        let zero = kb.int(0);
        if self.op.window == 0 || self.op.prefix {
            return zero;
        }
        let first = kb.add_int(p, 1 - self.op.window as i64);
        let first = kb.max(first, zero);
        kb.let_("first", first)
    }

    /// Products to scores: soft cap, bias, and what is hidden. A query at `p` with keys `j ..` in the lanes of `s` (or one
    /// in each lane of `j`, `i32`), or one key `j` with a query in each lane of `p` (`i32`).
    fn score(&self, kb: &mut KernelBuilder, s: ExprId, at: &Place) -> ExprId {
        let lanes = kb.ty(s).lanes;
        let mut s = s;
        if self.op.softcap != 0.0 {
            let (small, cap) =
                (kb.float(1.0 / (self.op.softcap * self.unit)), kb.float(self.op.softcap * self.unit));
            let bounded = kb.mul(s, small);
            let bounded = kb.unary(UnOp::Tanh, bounded);
            s = kb.mul(bounded, cap);
        }
        let (p, j) = (kb.cast(at.p, DType::I32), kb.cast(at.j, DType::I32));
        let one = kb.int_of(1, DType::I32);
        let in_lanes = lanes == kb.ty(j).lanes.max(kb.ty(p).lanes);
        let j = if in_lanes { j } else { kb.ramp(j, one, lanes) };
        if let Some(slope) = at.slope {
            let place = self.place(kb, p);
            let distance = kb.binary(BinOp::Sub, j, place);
            let distance = kb.cast(distance, DType::F32);
            let bias = kb.mul(distance, slope);
            s = kb.add(s, bias);
        }
        if self.keys == Keys::Sinks {
            return self.sink_score(kb, s, p, j);
        }
        let seen = (!at.shown).then(|| self.seen(kb, at, p, j));
        let before = at.end.map(|end| {
            let end = kb.cast(end, DType::I32);
            kb.lt(j, end)
        });
        let hidden = kb.float(HIDDEN);
        match (seen, before) {
            (None, None) => s,
            (Some(all), None) | (None, Some(all)) => kb.select(all, s, hidden),
            (Some(seen), Some(before)) => {
                let all = kb.binary(BinOp::And, seen, before);
                kb.select(all, s, hidden)
            }
        }
    }

    /// Which keys `j` the mask shows to the queries at `p`.
    fn seen(&self, kb: &mut KernelBuilder, at: &Place, p: ExprId, j: ExprId) -> ExprId {
        let mut seen = kb.binary(BinOp::Le, j, p);
        if self.op.window > 0 {
            let reach = kb.int_of(self.op.window as i64, DType::I32);
            let edge = kb.sub(p, reach);
            let near = kb.lt(edge, j);
            seen = kb.binary(BinOp::And, seen, near);
        }
        if let Some(prefix) = at.prefix {
            let prefix = kb.cast(prefix, DType::I32);
            let inside = kb.lt(j, prefix);
            seen = kb.binary(BinOp::Or, seen, inside);
        }
        seen
    }

    /// Where a query at position `p` (`i32`) counts as standing.
    fn place(&self, kb: &mut KernelBuilder, p: ExprId) -> ExprId {
        match self.keys {
            Keys::Seen => p,
            Keys::Sinks => {
                let last = kb.int_of(self.op.last_place() as i64, DType::I32);
                kb.min(p, last)
            }
        }
    }

    /// Scores of keys `j` (`i32` lanes) that are sinks behind the window of the query at `p`.
    fn sink_score(&self, kb: &mut KernelBuilder, s: ExprId, p: ExprId, j: ExprId) -> ExprId {
        let (sinks, reach) = (self.op.sinks as i64, self.op.window as i64);
        let (sinks, reach) = (kb.int_of(sinks, DType::I32), kb.int_of(reach, DType::I32));
        let edge = kb.sub(p, reach);
        let (first, behind) = (kb.lt(j, sinks), kb.binary(BinOp::Le, j, edge));
        let seen = kb.binary(BinOp::And, first, behind);
        let hidden = kb.float(HIDDEN);
        kb.select(seen, s, hidden)
    }
}

/// Takes `rows * scale` apart (int8 caches), where the scale has one column and the product is computed here.
fn without_scale(inliner: &Inliner, v: ValueId) -> (ValueId, Option<ValueId>) {
    let plain = (v, None);
    let (f, bound) = (inliner.f, inliner.bindings.contains_key(&v));
    let Some(node) = f.def(v).filter(|node| !bound && node.op == Op::Binary(BinOp::Mul)) else {
        return plain;
    };
    let &[a, b] = &node.inputs[..] else { return plain };
    let one_column = |v: ValueId| f.ty(v).rank() == 3 && f.ty(v).dims[2].as_const() == Some(1);
    let whole = |v: ValueId| f.ty(v).dims == f.ty(node.outputs[0]).dims;
    match (one_column(a) && whole(b), one_column(b) && whole(a)) {
        (false, true) => (a, Some(b)),
        (true, false) => (b, Some(a)),
        _ => plain,
    }
}

/// Where a score stands.
struct Place {
    /// Position of the query, or one for each lane.
    p: ExprId,
    /// The first key, or a key for each lane; the key where lanes have queries.
    j: ExprId,
    /// Of the query, or for each lane.
    slope: Option<ExprId>,
    prefix: Option<ExprId>,
    /// Keys from here on belong to another slice.
    end: Option<ExprId>,
    /// Known to be seen, if it stands before `end`.
    shown: bool,
}

/// The widest power of two up to `most` that divides a size.
pub(crate) fn lanes_of(size: i64, most: u32) -> u32 {
    let mut lanes = most;
    while size % i64::from(lanes) != 0 {
        lanes /= 2;
    }
    lanes
}

/// Slices that the cache is cut into where there are few key heads: enough for `wanted` items of work.
pub(crate) fn most_slices(kv: i64, wanted: i64) -> i64 {
    (wanted / kv).clamp(1, 32)
}

/// How many slices are in use, and the keys of each (a multiple of `block`), for keys `first .. t`.
pub(crate) fn slices(
    kb: &mut KernelBuilder,
    first: ExprId,
    t: ExprId,
    most: i64,
    block: i64,
) -> (ExprId, ExprId) {
    let count = kb.sub(t, first);
    let rounded = kb.add_int(count, SLICE_KEYS - 1);
    let least = kb.int(SLICE_KEYS);
    let used = kb.div(rounded, least);
    let most = kb.int(most);
    let used = kb.min(used, most);
    let used = kb.let_("slices", used);
    let part = ceil_div(kb, count, used);
    let block_size = kb.int(block);
    let blocks = ceil_div(kb, part, block_size);
    let part = kb.mul_int(blocks, block);
    (used, kb.let_("slice_keys", part))
}

pub(crate) fn ceil_div(kb: &mut KernelBuilder, a: ExprId, b: ExprId) -> ExprId {
    let less = kb.add_int(b, -1);
    let sum = kb.add(a, less);
    kb.div(sum, b)
}

/// The larger of two scores. NaN need not pass, unlike in `max`: the weight of such a score is NaN anyway.
fn larger(kb: &mut KernelBuilder, a: ExprId, b: ExprId) -> ExprId {
    let less = kb.lt(a, b);
    kb.select(less, b, a)
}

/// `max(a, 0)`.
pub(crate) fn at_least_zero(kb: &mut KernelBuilder, a: ExprId) -> ExprId {
    let zero = kb.int(0);
    kb.max(a, zero)
}
