//! One attention: the op, its sizes, its operands as values of the kernel, and the scores that its mask
//! leaves.

use crate::inline::{Binding, CachePage, Inliner, LaneIndex, PagedBuffer};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BinOp, BufId};
use mlcc_ir::ops::{AttentionOp, KeySpan, Op};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

/// The score of a key that is masked, and the first running maximum.
pub(super) const MASKED: f64 = -1e30;

/// The keys that a pass over the cache is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeySubset {
    /// All that the mask shows; with sinks those of the window.
    Visible,
    /// Sinks that the window has left.
    Sinks,
}

/// One attention: the op, its sizes, and where the operands come from.
pub struct AttentionProblem<'a> {
    /// Binds the operands; one lane.
    pub inliner: Inliner<'a, 'static>,
    pub op: AttentionOp,
    q: ValueId,
    pub(super) k: ValueId,
    pub(super) v: ValueId,
    /// Rows of keys and of values without their scale, and the scale (`[t, kv, 1]`), where that is a factor
    /// of whole rows.
    pub(super) key: (ValueId, Option<ValueId>),
    pub(super) value: (ValueId, Option<ValueId>),
    pub(super) slopes: Option<ValueId>,
    prefix: Option<ValueId>,
    /// The number of first keys, where not all are seen.
    span: Option<ValueId>,
    /// Terms by distance.
    pub(super) terms: Option<ValueId>,
    /// Queries for the sinks.
    sink_q: Option<ValueId>,
    /// Logits of the key without a value.
    pub(super) null: Option<ValueId>,
    pub(super) keys: KeySubset,
    /// The unit of scores: 1, or log2(e) where weights are powers of two.
    unit: f64,
    /// The table of pages, if some of keys and values are in pages.
    pub(super) table: Option<BufId>,
    pub n: Dim,
    /// Keys.
    pub t: Dim,
    pub kv: i64,
    /// Query heads per key head.
    pub group: i64,
    pub size: i64,
    pub value_size: i64,
}

/// The place of rows of keys or of values in memory: `[t, kv, size]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheRows {
    pub buf: BufId,
    pub pages: Option<PagedBuffer>,
    pub dtype: DType,
    pub size: i64,
}

impl CacheRows {
    /// The rows of a key head of a cache, of which `view` is `[t, kv, size]`, that are in `page`.
    pub(super) fn in_page<'k>(
        &self,
        view: BufferView<'k, 3>,
        page: Option<CachePage<'k>>,
    ) -> BufferView<'k, 3> {
        self.shift(page).map_or(view, |shift| view.offset_by(shift))
    }

    /// Elements that rows in `page` lie further than if all rows were dense.
    pub(super) fn shift<'k>(&self, page: Option<CachePage<'k>>) -> Option<Val<'k>> {
        Some(self.pages?.page_shift(page?, self.dtype))
    }
}

fn table_of(binding: &Binding<'_>) -> Option<BufId> {
    match binding {
        Binding::Buffer { pages, .. } => pages.map(|pages| pages.table),
        Binding::Value(_) => None,
    }
}

/// The node of an attention, if the function has one.
pub fn find_attention(f: &Function) -> Option<&GraphNode> {
    f.live_nodes().map(|(_, n)| n).find(|n| matches!(n.op, Op::Attention(_)))
}

impl<'a> AttentionProblem<'a> {
    /// `node` is an attention of the inliner's function.
    pub fn new(node: &GraphNode, inliner: Inliner<'a, 'static>) -> Option<AttentionProblem<'a>> {
        let Op::Attention(op) = &node.op else { return None };
        let dims = |i: usize| inliner.f.ty(node.inputs[i]).dims.clone();
        let size = |d: &Dim| d.as_const();
        let (q, k, v) = (dims(0), dims(1), dims(2));
        let kv = size(&k[1])?;
        let (group, size, value_size) = (q[1].as_const()? / kv, size(&q[2])?, size(&v[2])?);
        let at = |i: usize| node.inputs[i];
        Some(AttentionProblem {
            op: op.clone(),
            q: at(0),
            k: at(1),
            v: at(2),
            key: without_scale(&inliner, at(1)),
            value: without_scale(&inliner, at(2)),
            slopes: op.slopes_input().map(at),
            prefix: op.prefix_input().map(at),
            span: op.span_input().map(at),
            terms: op.terms_input().map(at),
            sink_q: op.sink_input().map(at),
            null: op.null_input().map(at),
            keys: KeySubset::Visible,
            unit: 1.0,
            table: inliner.bindings.values().find_map(table_of),
            n: q[0].clone(),
            t: k[0].clone(),
            kv,
            group,
            size,
            value_size,
            inliner,
        })
    }

    /// The same problem with weights that are powers of two: it costs nothing to scale queries, slopes and
    /// bounds by log2(e), and such powers take fewer operations.
    pub fn in_powers_of_two(self) -> AttentionProblem<'a> {
        AttentionProblem { unit: std::f64::consts::LOG2_E, ..self }
    }

    /// The places of keys and values in memory.
    pub(super) fn cache_rows(&self) -> [Option<CacheRows>; 2] {
        [self.k, self.v].map(|v| self.rows_of(v))
    }
    /// The widest operand that has all heads of every key, through what is computed element by element.
    fn rows_of(&self, v: ValueId) -> Option<CacheRows> {
        let ty = self.inliner.f.ty(v);
        let [t, kv, size] = &ty.dims[..] else { return None };
        if *t != self.t || kv.as_const() != Some(self.kv) {
            return None;
        }
        match self.inliner.bindings.get(&v) {
            Some(Binding::Buffer { buf, layout: None, pages }) => {
                Some(CacheRows { buf: *buf, pages: *pages, dtype: ty.dtype, size: size.as_const()? })
            }
            Some(_) => None,
            None => {
                let inputs = &self.inliner.f.defining_node(v)?.inputs;
                inputs.iter().filter_map(|&i| self.rows_of(i)).max_by_key(|rows| rows.size)
            }
        }
    }

    /// The places of keys and values that are rows of 16-bit floats, of which only a cast makes operands.
    pub(super) fn halves(&self) -> [Option<CacheRows>; 2] {
        [self.k, self.v].map(|v| self.halves_of(v))
    }
    fn halves_of(&self, v: ValueId) -> Option<CacheRows> {
        if self.inliner.bindings.contains_key(&v) {
            return self.rows_of(v).filter(|rows| matches!(rows.dtype, DType::F16 | DType::BF16));
        }
        let node = self.inliner.f.defining_node(v).filter(|node| node.op == Op::Cast(DType::F32))?;
        self.halves_of(node.inputs[0])
    }

    /// The buffer of scales of rows, `[t, kv]` in f32, through a change of shape.
    pub(super) fn scales(&self, v: ValueId) -> Option<CacheRows> {
        let ty = self.inliner.f.ty(v);
        match self.inliner.bindings.get(&v) {
            Some(Binding::Buffer { buf, layout: None, pages }) if ty.dtype == DType::F32 => {
                Some(CacheRows { buf: *buf, pages: *pages, dtype: ty.dtype, size: 1 })
            }
            Some(_) => None,
            None => match self.inliner.f.defining_node(v)? {
                node if matches!(node.op, Op::Reshape { .. }) => self.scales(node.inputs[0]),
                _ => None,
            },
        }
    }

    /// True if keys and values are caches of 8-bit codes whose rows have a scale each.
    pub(super) fn has_codes(&self) -> bool {
        self.codes_of(self.key).is_some() && self.codes_of(self.value).is_some()
    }
    /// The rows of such a cache, `[t, kv, size]`.
    pub(super) fn codes_of(&self, (codes, scale): (ValueId, Option<ValueId>)) -> Option<CacheRows> {
        let (_, node) = (scale?, self.inliner.f.defining_node(codes)?);
        let (Op::Cast(DType::F32), [source]) = (&node.op, &node.inputs[..]) else { return None };
        match self.inliner.bindings.get(source)? {
            Binding::Buffer { buf, layout: None, pages } if self.inliner.f.ty(*source).dtype == DType::I8 => {
                let size = self.inliner.f.ty(*source).dims.last()?.as_const()?;
                Some(CacheRows { buf: *buf, pages: *pages, dtype: DType::I8, size })
            }
            Binding::Buffer { .. } | Binding::Value(_) => None,
        }
    }

    pub fn heads(&self) -> i64 {
        self.kv * self.group
    }

    /// The same problem over the sinks that the window has left, the first `op.sinks` keys; `None` if there
    /// are none. Where a query still has all of them in its window all scores are masked, and what that adds
    /// up to counts nothing once a key of the window was seen.
    pub(super) fn over_sinks(&self) -> Option<AttentionProblem<'a>> {
        let q = self.sink_q?;
        Some(AttentionProblem {
            op: self.op.clone(),
            inliner: self.inliner.clone(),
            n: self.n.clone(),
            t: self.t.clone(),
            q,
            keys: KeySubset::Sinks,
            ..*self
        })
    }

    /// The number of sinks that the window of the query at position `last` has left, and so that of any
    /// before it. The others have no part in a pass over sinks: there may not even be that many keys yet.
    pub(super) fn sinks_left<'k>(&self, last: Val<'k>) -> Val<'k> {
        (last - (self.op.window as i64 - 1)).max(0).min(self.op.sinks as i64)
    }

    /// The page that a row of keys and values is in; `None` where none of them are in pages.
    pub(super) fn page<'k>(&self, row: Val<'k>) -> Option<CachePage<'k>> {
        Some(CachePage::of_row(row.recorder(), self.table?, row))
    }

    /// Elements of a row and head from column `c` on, as f32. The row of caches in pages is in `page`.
    pub(super) fn row<'k>(
        &self,
        v: ValueId,
        page: Option<CachePage<'k>>,
        [row, head, c]: [Val<'k>; 3],
        lanes: u32,
    ) -> Val<'k> {
        let k = row.recorder();
        let inliner: Inliner<'_, 'k> = self.inliner.clone();
        let inliner = Inliner { lanes, page, ..inliner };
        let index = [LaneIndex::scalar(row), LaneIndex::scalar(head), LaneIndex::from(c, lanes)];
        inliner.value(k, v, &index).cast(DType::F32).to_lanes(lanes)
    }
    /// Elements of a query, times the scale of scores.
    pub(super) fn query<'k>(&self, at: [Val<'k>; 3], lanes: u32) -> Val<'k> {
        self.row(self.q, None, at, lanes) * (self.op.scale * self.unit)
    }
    pub(super) fn key<'k>(&self, page: Option<CachePage<'k>>, at: [Val<'k>; 3], lanes: u32) -> Val<'k> {
        self.row(self.k, page, at, lanes)
    }
    pub(super) fn value<'k>(&self, page: Option<CachePage<'k>>, at: [Val<'k>; 3], lanes: u32) -> Val<'k> {
        self.row(self.v, page, at, lanes)
    }
    /// ALiBi slope of a query head; `None` without ALiBi.
    pub(super) fn slope<'k>(&self, head: Val<'k>) -> Option<Val<'k>> {
        Some(self.head_number(self.slopes?, head))
    }
    /// Logit of the key without a value for a query head; `None` if there is no such key. Running maxima
    /// begin with it, and sums of weights with 1.
    pub(super) fn null_logit<'k>(&self, head: Val<'k>) -> Option<Val<'k>> {
        Some(self.head_number(self.null?, head))
    }
    /// A number per query head, in what scores count in.
    fn head_number<'k>(&self, v: ValueId, head: Val<'k>) -> Val<'k> {
        let value = self.inliner.value(head.recorder(), v, &[LaneIndex::scalar(head)]);
        if self.unit == 1.0 { value } else { value * self.unit }
    }
    /// Keys of the prefix, at most all; `None` without a prefix.
    pub(super) fn prefix<'k>(&self, k: &'k Recorder) -> Option<Val<'k>> {
        let count = self.inliner.value(k, self.prefix?, &[LaneIndex::scalar(k.int(0))]);
        Some(count.cast(DType::I64).min(k.dim(&self.t)).named("prefix"))
    }
    /// The end of the first keys, if not all are seen; each query sees at least one.
    pub(super) fn span_end<'k>(&self, k: &'k Recorder) -> Option<Val<'k>> {
        let count = self.inliner.value(k, self.span?, &[LaneIndex::scalar(k.int(0))]).cast(DType::I64);
        let t = k.dim(&self.t);
        Some(match self.op.span {
            KeySpan::First => count.min(t).max(1).named("border"),
            KeySpan::All | KeySpan::Rest => count.min(t + -1).max(0).named("border"),
        })
    }
    /// True if the number of slices depends on memory, so that it is stored with the unfinished sums.
    pub(super) fn stores_slice_count(&self) -> bool {
        self.span.is_some()
    }
    /// The column of the table of terms for the distance from a query to a key.
    pub(super) fn column_of_terms<'k>(&self, distance: Val<'k>) -> Val<'k> {
        let count = self.terms.and_then(|terms| self.inliner.f.ty(terms).dims[1].as_const()).unwrap_or(1);
        (distance + self.op.terms.unwrap_or(0) as i64).max(0).min(count - 1).named("column_of_terms")
    }
    /// The entry of a column of the table of terms for a query head; `None` without terms.
    pub(super) fn term<'k>(&self, column: Val<'k>, head: Val<'k>) -> Option<Val<'k>> {
        let at = [head, column].map(LaneIndex::scalar);
        let term = self.inliner.value(column.recorder(), self.terms?, &at);
        Some(if self.unit == 1.0 { term } else { term * self.unit }.named("term"))
    }

    /// The first key that a query at position `p` and those after it see.
    pub(super) fn first_key<'k>(&self, p: Val<'k>) -> Val<'k> {
        let k = p.recorder();
        let of_span = self.span_end(k).filter(|_| self.op.span == KeySpan::Rest);
        if self.op.window == 0 || self.op.prefix {
            return of_span.unwrap_or(k.int(0));
        }
        let first = (p + (1 - self.op.window as i64)).max(0);
        of_span.map_or(first, |border| first.max(border)).named("first")
    }

    /// The key after the last that is seen, of the first `t` ones.
    pub(super) fn end_of_span<'k>(&self, t: Val<'k>) -> Val<'k> {
        match self.span_end(t.recorder()) {
            Some(border) if self.op.span == KeySpan::First => t.min(border),
            _ => t,
        }
    }

    /// The key after the last that the query at position `p` and those before it see, a prefix aside.
    pub(super) fn end_key<'k>(&self, p: Val<'k>) -> Val<'k> {
        self.end_of_span(match self.op.ahead {
            0 => p + 1,
            AttentionOp::ALL => p.recorder().dim(&self.t),
            ahead => (p + (1 + ahead as i64)).min(p.recorder().dim(&self.t)),
        })
    }

    /// True if the mask shows the keys `j .. to` to all queries at positions `from ..= last`, and `to` is not
    /// beyond `end`.
    pub(super) fn all_seen<'k>(
        &self,
        [from, last]: [Val<'k>; 2],
        j: Val<'k>,
        (to, end): (Val<'k>, Val<'k>),
    ) -> Val<'k> {
        let mut seen = to.le(end) & to.le(self.end_key(from));
        if let Some(border) = self.span_end(j.recorder()).filter(|_| self.op.span == KeySpan::Rest) {
            seen = seen & border.le(j);
        }
        match (self.keys, self.op.window) {
            // Not all queries have left each of them.
            (KeySubset::Sinks, _) => seen & last.lt(0),
            (KeySubset::Visible, 0) => seen,
            (KeySubset::Visible, window) => seen & (last - window as i64).lt(j),
        }
    }

    /// Products to scores: soft cap, bias and mask.
    pub(super) fn score<'k>(&self, product: Val<'k>, at: &ScoreIndex<'k>) -> Val<'k> {
        let (lanes, mut s) = (product.lanes(), product);
        if self.op.softcap != 0.0 {
            let cap = self.op.softcap * self.unit;
            s = (s * (1.0 / cap)).tanh() * cap;
        }
        let (p, j) = (at.p.cast(DType::I32), at.j.cast(DType::I32));
        let in_lanes = lanes == j.lanes().max(p.lanes());
        let j = if in_lanes { j } else { j.ramp(1, lanes) };
        if let Some(slope) = at.slope {
            s = s + (j - self.biased_position(p)).cast(DType::F32) * slope;
        }
        if let Some(term) = at.term {
            s = s + term;
        }
        if self.keys == KeySubset::Sinks {
            return self.left_sink(p, j).select(s, MASKED);
        }
        let visible = (!at.visible).then(|| self.visible((at.prefix, at.border), p, j));
        let before_end = at.end.map(|end| j.lt(end.cast(DType::I32)));
        match (visible, before_end) {
            (None, None) => s,
            (Some(shown), None) | (None, Some(shown)) => shown.select(s, MASKED),
            (Some(visible), Some(before_end)) => (visible & before_end).select(s, MASKED),
        }
    }

    /// A mask of the keys `j` that the queries at `p` see.
    fn visible<'k>(
        &self,
        (prefix, border): (Option<Val<'k>>, Option<Val<'k>>),
        p: Val<'k>,
        j: Val<'k>,
    ) -> Val<'k> {
        let k = p.recorder();
        // Blocks of keys may be longer than what there is.
        let there = || j.lt(k.dim(&self.t).cast(DType::I32));
        let mut visible = match self.op.ahead {
            0 => j.le(p),
            AttentionOp::ALL => there(),
            ahead => there() & (j - ahead as i64).le(p),
        };
        if self.op.window > 0 {
            visible = visible & (p - self.op.window as i64).lt(j);
        }
        if let Some(border) = border.map(|border| border.cast(DType::I32)) {
            visible = visible & if self.op.span == KeySpan::First { j.lt(border) } else { border.le(j) };
        }
        match prefix {
            None => visible,
            Some(prefix) => visible | j.lt(prefix.cast(DType::I32)),
        }
    }

    /// The position that the bias of a query at `p` counts from.
    fn biased_position<'k>(&self, p: Val<'k>) -> Val<'k> {
        match self.keys {
            KeySubset::Visible => p,
            KeySubset::Sinks => p.min(self.op.last_place() as i64),
        }
    }

    /// A mask of the keys `j` that are sinks which the window of the query at `p` has left.
    fn left_sink<'k>(&self, p: Val<'k>, j: Val<'k>) -> Val<'k> {
        j.lt(self.op.sinks as i64) & j.le(p - self.op.window as i64)
    }
}

/// Takes `rows * scale` apart (int8 caches), where the scale has one column and the product is computed here.
fn without_scale(inliner: &Inliner, v: ValueId) -> (ValueId, Option<ValueId>) {
    let plain = (v, None);
    let (f, bound) = (inliner.f, inliner.bindings.contains_key(&v));
    let Some(node) = f.defining_node(v).filter(|node| !bound && node.op == Op::Binary(BinOp::Mul)) else {
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

/// The scores that are meant: those of a query with keys `j ..` in the lanes (or one in each lane of `j`,
/// `i32`), or of a key with a query in each lane of `p` (`i32`).
pub(super) struct ScoreIndex<'k> {
    /// Position of the query, or one for each lane.
    pub p: Val<'k>,
    /// The first key, or a key for each lane; the key where lanes have queries.
    pub j: Val<'k>,
    /// Slope of the query, or one for each lane.
    pub slope: Option<Val<'k>>,
    /// Term that is added by distance, likewise.
    pub term: Option<Val<'k>>,
    pub prefix: Option<Val<'k>>,
    /// See [`AttentionProblem::span_end`].
    pub border: Option<Val<'k>>,
    /// Keys from here on belong to another slice.
    pub end: Option<Val<'k>>,
    /// Known to be visible if before `end`.
    pub visible: bool,
}

/// The larger of two scores. NaN need not pass, unlike in `max`: the weight of such a score is NaN anyway.
pub(super) fn larger_score<'k>(a: Val<'k>, b: Val<'k>) -> Val<'k> {
    a.lt(b).select(b, a)
}
