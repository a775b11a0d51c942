//! Attention over a cache, by decomposition.

use super::{AttrValue, Op, OpError, invalid_input};
use crate::compute::RedOp;
use crate::dim::Dim;
use crate::graph::{Function, ValueId};
use crate::kernel::{BinOp, UnOp};
use crate::module::Module;
use crate::types::{DType, TensorType};

/// Scaled dot-product attention (Vaswani et al. 2017) with grouped query heads (Ainslie et al. 2023).
///
/// Inputs: queries `f32[n, heads, size]`, keys `[t, kv_heads, size]`, values `[t, kv_heads, value_size]` in
/// any one float type, then slopes `f32[heads]` if `alibi`, then a count `i32[1]` if there is a `prefix` or
/// not all keys are of the `span`, then the queries once more if there are `sinks`, then logits `f32[heads]`
/// if there are `null_logits`, then a table `f32[heads, distances]` if there are `terms`. Output:
/// `f32[n, heads, value_size]`. The queries are the last `n` of the `t` positions: query `i` is at
/// `p = t - n + i` and sees key `j` where `j <= p + ahead`. Query head `h` reads key head
/// `h / (heads / kv_heads)`. The score is `scale * dot(q, k)`.
#[derive(Clone, PartialEq, Debug)]
pub struct AttentionOp {
    pub scale: f64,
    /// `cap * tanh(score / cap)` (Gemma 2); 0 = none.
    pub softcap: f64,
    /// Only keys with `p - j < window` (Mistral); 0 = all.
    pub window: usize,
    /// The number of keys behind its own that a query sees, of those that there are: 0 = none (causal),
    /// [`AttentionOp::ALL`] = all, as encoders do. With a window the query sees as many to the other side.
    /// Neither sinks nor a prefix go with it. Text shows it where it is not 0.
    pub ahead: usize,
    /// Keys `j < sinks` are seen from behind the window too (attention sinks, Xiao et al. 2023), as if they
    /// were in front of it without a gap: their products are with the last input, the queries rotated for the
    /// place `min(p, window + sinks - 1)`, which is where ALiBi counts from as well. Needs a window, and no
    /// prefix.
    pub sinks: usize,
    /// `slope[h] * (j - p)` is added to the score (Press et al. 2022).
    pub alibi: bool,
    /// Keys `j < count` are seen by every query (prefix language models, ChatGLM-6B).
    pub prefix: bool,
    /// The keys that are seen at all, whatever the other masks show.
    pub span: KeySpan,
    /// A term is added to the score by the distance of query and key (T5): that of the column
    /// `j - p + behind` of the table, or of its first or last column where there is no such column. Not
    /// beside sinks. Text shows `behind` where there is a table.
    pub terms: Option<usize>,
    /// One logit per head joins the sum of the softmax, for a key without a value (gpt-oss). Text shows the
    /// flag where it is true.
    pub null_logits: bool,
    /// Kernels of several queries may do both products in integers, with rows of codes and a scale each.
    /// Their error is then that of rounding the operands: an element of a query or of a key by at most
    /// `2^-15.9` of its row's length, one of a value by at most `2^-14` of the row's largest, and the product
    /// of a weight and that largest by at most `2^-18` of the sum of these products over a block of 64 keys,
    /// or `2^-16` of their largest if that is more. The definition stays exact. Text shows the flag where it
    /// is true.
    pub codes: bool,
}

/// Keys of an attention by a count, of which each query sees at least one: the caches of an encoder-decoder
/// model hold two texts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KeySpan {
    #[default]
    All,
    /// Keys `j < count`. Text shows `first_keys`.
    First,
    /// Keys `j >= count`. Text shows `rest_keys`.
    Rest,
}

impl AttentionOp {
    /// The value of `ahead` for every later key.
    pub const ALL: usize = i32::MAX as usize;

    /// Plain causal attention.
    pub fn causal(scale: f64) -> AttentionOp {
        AttentionOp {
            scale,
            softcap: 0.0,
            window: 0,
            ahead: 0,
            sinks: 0,
            alibi: false,
            prefix: false,
            span: KeySpan::All,
            terms: None,
            null_logits: false,
            codes: false,
        }
    }
    /// The input that holds the slopes.
    pub fn slopes_input(&self) -> Option<usize> {
        self.alibi.then_some(3)
    }
    /// The input that counts the keys of the prefix.
    pub fn prefix_input(&self) -> Option<usize> {
        self.prefix.then_some(3 + usize::from(self.alibi))
    }
    /// The input that counts the first keys, where not all are seen.
    pub fn span_input(&self) -> Option<usize> {
        (self.span != KeySpan::All).then_some(3 + usize::from(self.alibi))
    }
    /// The input with the queries for the sinks.
    pub fn sink_input(&self) -> Option<usize> {
        (self.sinks > 0).then(|| self.inputs(2))
    }
    /// The input that holds the logits of the key without a value.
    pub fn null_input(&self) -> Option<usize> {
        self.null_logits.then(|| self.inputs(3))
    }
    /// The input that holds the terms by distance.
    pub fn terms_input(&self) -> Option<usize> {
        self.terms.is_some().then(|| self.inputs(4))
    }
    /// The number of inputs with the first `of` of those that not all attentions have.
    fn inputs(&self, of: usize) -> usize {
        let counts = self.prefix || self.span != KeySpan::All;
        let more = [self.alibi, counts, self.sinks > 0, self.null_logits, self.terms.is_some()];
        3 + more[..of].iter().filter(|&&more| more).count()
    }
    /// The largest place of a query for the sinks.
    pub fn last_place(&self) -> usize {
        (self.window + self.sinks).saturating_sub(1)
    }
    pub(super) fn attrs(&self) -> Vec<(&'static str, AttrValue)> {
        let mut attrs = vec![
            ("scale", AttrValue::Float(self.scale)),
            ("softcap", AttrValue::Float(self.softcap)),
            ("window", AttrValue::Int(self.window as i64)),
            ("sinks", AttrValue::Int(self.sinks as i64)),
            ("alibi", AttrValue::Bool(self.alibi)),
            ("prefix", AttrValue::Bool(self.prefix)),
        ];
        attrs.extend((self.ahead > 0).then_some(("ahead", AttrValue::Int(self.ahead as i64))));
        attrs.extend((self.span == KeySpan::First).then_some(("first_keys", AttrValue::Bool(true))));
        attrs.extend((self.span == KeySpan::Rest).then_some(("rest_keys", AttrValue::Bool(true))));
        attrs.extend(self.terms.map(|behind| ("terms", AttrValue::Int(behind as i64))));
        attrs.extend(self.null_logits.then_some(("null_logits", AttrValue::Bool(true))));
        attrs.extend(self.codes.then_some(("codes", AttrValue::Bool(true))));
        attrs
    }
}

/// The score of a hidden key; far below every score, and no source of NaN.
const HIDDEN: f64 = -1e30;

pub(super) fn infer(op: &Op, a: &AttentionOp, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    if a.sinks > 0 && (a.window == 0 || a.prefix) {
        return invalid_input(op, "sinks stand in front of a window, and not together with a prefix");
    }
    if a.ahead > 0 && (a.sinks > 0 || a.prefix) {
        return invalid_input(op, "queries that see later keys have neither sinks nor a prefix");
    }
    if a.ahead > AttentionOp::ALL {
        return invalid_input(op, format!("queries see at most {} keys ahead", AttentionOp::ALL));
    }
    if a.span != KeySpan::All && (a.sinks > 0 || a.prefix) {
        return invalid_input(op, "a span of keys has neither sinks nor a prefix");
    }
    if a.terms.is_some() && a.sinks > 0 {
        return invalid_input(op, "terms by distance do not stand beside sinks");
    }
    let wanted = a.inputs(5);
    if inputs.len() != wanted {
        return invalid_input(op, format!("takes {wanted} inputs, not {}", inputs.len()));
    }
    let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
    if [q, k, v].iter().any(|t| t.rank() != 3) || q.dtype != DType::F32 {
        return invalid_input(
            op,
            format!("takes f32[n, heads, size], keys and values of three axes, not {q}, {k} and {v}"),
        );
    }
    let sizes = [&q.dims[1], &q.dims[2], &k.dims[1], &v.dims[2]].map(Dim::as_const);
    let [Some(heads), Some(size), Some(kv_heads), Some(_)] = sizes else {
        return invalid_input(op, format!("{q}, {k} and {v} need constant heads and sizes"));
    };
    let fits = k.dims[..2] == v.dims[..2] && k.dims[2].as_const() == Some(size) && k.dtype == v.dtype;
    if !fits || !k.dtype.is_float() || kv_heads < 1 || heads % kv_heads != 0 {
        return invalid_input(op, format!("queries {q} do not fit keys {k} and values {v}"));
    }
    if a.alibi && *inputs[3] != TensorType::new(DType::F32, [heads]) {
        return invalid_input(op, format!("slopes are {}, there are {heads} heads", inputs[3]));
    }
    if let Some(count) = a.prefix_input().map(|i| inputs[i])
        && *count != TensorType::new(DType::I32, [1])
    {
        return invalid_input(op, format!("the prefix count is {count}, not i32[1]"));
    }
    if let Some(count) = a.span_input().map(|i| inputs[i])
        && *count != TensorType::new(DType::I32, [1])
    {
        return invalid_input(op, format!("the count of the first keys is {count}, not i32[1]"));
    }
    if let Some(again) = a.sink_input().map(|i| inputs[i])
        && again != q
    {
        return invalid_input(op, format!("the queries for sinks are {again}, not {q}"));
    }
    if let Some(logits) = a.null_input().map(|i| inputs[i])
        && *logits != TensorType::new(DType::F32, [heads])
    {
        return invalid_input(
            op,
            format!("the logits of the key without a value are {logits}, there are {heads} heads"),
        );
    }
    if let Some((table, behind)) = a.terms_input().map(|i| inputs[i]).zip(a.terms) {
        let distances = table.dims.last().and_then(Dim::as_const).unwrap_or(0);
        if *table != TensorType::new(DType::F32, [heads, distances]) || behind as i64 >= distances {
            return invalid_input(
                op,
                format!("terms {table} by distances from {behind} behind on, there are {heads} heads"),
            );
        }
    }
    Ok(vec![TensorType::new(DType::F32, [&q.dims[0], &q.dims[1], &v.dims[2]])])
}

struct AttentionExpansion<'a> {
    module: &'a Module,
    f: &'a mut Function,
}

impl AttentionExpansion<'_> {
    fn op(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, OpError> {
        Ok(self.f.append(self.module, op, inputs)?[0])
    }
    fn constant(&mut self, value: f64, dtype: DType) -> Result<ValueId, OpError> {
        self.op(Op::Constant { value, dtype }, &[])
    }
    fn bin(&mut self, op: BinOp, a: ValueId, b: ValueId) -> Result<ValueId, OpError> {
        self.op(Op::Binary(op), &[a, b])
    }
    fn times(&mut self, a: ValueId, factor: f64) -> Result<ValueId, OpError> {
        let factor = self.constant(factor, DType::F32)?;
        self.bin(BinOp::Mul, a, factor)
    }
    fn reshape(&mut self, a: ValueId, dims: &[&Dim]) -> Result<ValueId, OpError> {
        self.op(Op::Reshape { dims: dims.iter().map(|&d| d.clone()).collect() }, &[a])
    }
    fn permute(&mut self, a: ValueId, perm: &[usize]) -> Result<ValueId, OpError> {
        self.op(Op::Permute { perm: perm.to_vec() }, &[a])
    }
    fn iota(&mut self, start: &Dim, len: &Dim) -> Result<ValueId, OpError> {
        self.op(Op::Iota { start: start.clone(), len: len.clone() }, &[])
    }
    /// Columns of a table by distance, whose column `behind` is that of distance 0, as `[heads, n, t]`.
    fn terms(
        &mut self,
        (table, behind): (ValueId, i64),
        (row, column): (ValueId, ValueId),
    ) -> Result<ValueId, OpError> {
        let count = self.f.ty(table).dims[1].as_const().unwrap_or(1);
        let rows = self.permute(table, &[1, 0])?;
        let distance = self.bin(BinOp::Sub, column, row)?;
        let [behind, first, last] = [behind, 0, count - 1].map(|x| self.constant(x as f64, DType::I32));
        let place = self.bin(BinOp::Add, distance, behind?)?;
        let place = self.bin(BinOp::Max, place, first?)?;
        let place = self.bin(BinOp::Min, place, last?)?;
        let terms = self.op(Op::Gather, &[rows, place])?;
        self.permute(terms, &[2, 0, 1])
    }
    /// `[t, kv, size]` of any float type as `f32[kv, 1, t, size]`.
    fn heads_first(&mut self, x: ValueId) -> Result<ValueId, OpError> {
        let ty = self.f.ty(x).clone();
        let x = if ty.dtype == DType::F32 { x } else { self.op(Op::Cast(DType::F32), &[x])? };
        let x = self.permute(x, &[1, 0, 2])?;
        self.reshape(x, &[&ty.dims[1], &Dim::from(1), &ty.dims[0], &ty.dims[2]])
    }
}

/// Scores `[kv, group, n, t]`, masked, softmax, times values.
pub(super) fn decompose(
    a: &AttentionOp,
    module: &Module,
    f: &mut Function,
    inputs: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
    let (qd, kd, vd) = (f.ty(q).dims.clone(), f.ty(k).dims.clone(), f.ty(v).dims.clone());
    let (n, heads, t, kv) = (&qd[0], &qd[1], &kd[0], &kd[1]);
    let count = |d: &Dim| d.as_const().unwrap_or(1);
    let group = Dim::from(count(heads) / count(kv).max(1));
    let one = Dim::from(1);
    let mut e = AttentionExpansion { module, f };

    let keys = e.heads_first(k)?;
    let row = e.iota(&t.sub(n), n)?;
    let row = e.reshape(row, &[n, &one])?;
    let column = e.iota(&Dim::from(0), t)?;
    let slopes = match a.slopes_input() {
        Some(i) => Some(e.reshape(inputs[i], &[kv, &group, &one, &one])?),
        None => None,
    };
    let scored = |e: &mut AttentionExpansion, q: ValueId, place: ValueId| {
        let split = e.reshape(q, &[n, kv, &group, &qd[2]])?;
        let queries = e.permute(split, &[1, 2, 0, 3])?;
        scores(a, e, (queries, keys), slopes, (place, column))
    };
    let mut near = scored(&mut e, q, row)?;
    if let Some((i, behind)) = a.terms_input().zip(a.terms) {
        let terms = e.terms((inputs[i], behind as i64), (row, column))?;
        let terms = e.reshape(terms, &[kv, &group, n, t])?;
        near = e.bin(BinOp::Add, near, terms)?;
    }
    let hidden = e.constant(HIDDEN, DType::F32)?;
    let mut seen = near;
    if a.window > 0 {
        let far = match a.sink_input() {
            None => hidden,
            Some(i) => {
                let last = e.constant(a.last_place() as f64, DType::I32)?;
                let place = e.bin(BinOp::Min, row, last)?;
                let far = scored(&mut e, inputs[i], place)?;
                let last = e.constant(a.sinks as f64 - 1.0, DType::I32)?;
                e.op(Op::SelectGe, &[last, column, far, hidden])?
            }
        };
        // j > p - window, as j >= p - window + 1.
        let reach = e.constant(a.window as f64 - 1.0, DType::I32)?;
        let first = e.bin(BinOp::Sub, row, reach)?;
        seen = e.op(Op::SelectGe, &[column, first, seen, far])?;
    }
    if a.ahead < AttentionOp::ALL {
        let last = match a.ahead {
            0 => row,
            ahead => {
                let ahead = e.constant(ahead as f64, DType::I32)?;
                e.bin(BinOp::Add, row, ahead)?
            }
        };
        seen = e.op(Op::SelectGe, &[last, column, seen, hidden])?;
    }
    if let Some(i) = a.prefix_input() {
        let one = e.constant(1.0, DType::I32)?;
        let last = e.bin(BinOp::Sub, inputs[i], one)?;
        seen = e.op(Op::SelectGe, &[last, column, near, seen])?;
    }
    if let Some(i) = a.span_input() {
        let (x, y) = match a.span {
            KeySpan::First => {
                let one = e.constant(1.0, DType::I32)?;
                (e.bin(BinOp::Sub, inputs[i], one)?, column)
            }
            KeySpan::All | KeySpan::Rest => (column, inputs[i]),
        };
        seen = e.op(Op::SelectGe, &[x, y, seen, hidden])?;
    }
    let logits = match a.null_input() {
        Some(i) => Some(e.reshape(inputs[i], &[kv, &group, &one, &one])?),
        None => None,
    };
    let weights = softmax(&mut e, seen, logits)?;
    let values = e.heads_first(v)?;
    let mixed = e.op(Op::MatMul { transpose_b: false }, &[weights, values])?;
    let rows = e.permute(mixed, &[2, 0, 1, 3])?;
    Ok(vec![e.reshape(rows, &[n, heads, &vd[2]])?])
}

/// Products of queries and keys with all but masks: scale, soft cap and ALiBi from `row` to `column`.
fn scores(
    a: &AttentionOp,
    e: &mut AttentionExpansion,
    (queries, keys): (ValueId, ValueId),
    slopes: Option<ValueId>,
    (row, column): (ValueId, ValueId),
) -> Result<ValueId, OpError> {
    let mut scores = e.op(Op::MatMul { transpose_b: true }, &[queries, keys])?;
    if a.scale != 1.0 {
        scores = e.times(scores, a.scale)?;
    }
    if a.softcap != 0.0 {
        let small = e.times(scores, 1.0 / a.softcap)?;
        let bounded = e.op(Op::Unary(UnOp::Tanh), &[small])?;
        scores = e.times(bounded, a.softcap)?;
    }
    let Some(slopes) = slopes else { return Ok(scores) };
    let distance = e.bin(BinOp::Sub, column, row)?;
    let distance = e.op(Op::Cast(DType::F32), &[distance])?;
    let bias = e.bin(BinOp::Mul, slopes, distance)?;
    e.bin(BinOp::Add, scores, bias)
}

/// Over the last axis, with `exp(logits)` in the sum where there are some.
fn softmax(e: &mut AttentionExpansion, x: ValueId, logits: Option<ValueId>) -> Result<ValueId, OpError> {
    let axis = e.f.ty(x).rank() - 1;
    let mut max = e.op(Op::Reduce { op: RedOp::Max, axis }, &[x])?;
    if let Some(logits) = logits {
        max = e.bin(BinOp::Max, max, logits)?;
    }
    let shifted = e.bin(BinOp::Sub, x, max)?;
    let weights = e.op(Op::Unary(UnOp::Exp), &[shifted])?;
    let mut sum = e.op(Op::Reduce { op: RedOp::Sum, axis }, &[weights])?;
    if let Some(logits) = logits {
        let shifted = e.bin(BinOp::Sub, logits, max)?;
        let null = e.op(Op::Unary(UnOp::Exp), &[shifted])?;
        sum = e.bin(BinOp::Add, sum, null)?;
    }
    e.bin(BinOp::Div, weights, sum)
}
