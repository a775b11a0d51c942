//! Attention over a cache, written in primitive ops; a pass makes one op of it.

use super::distance_bias::DistanceBias;
use crate::model_builder::ModelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::{self, Op};
use mlcc_ir::types::{DType, TensorType};

/// What distinguishes one model's attention from another's.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionVariant {
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Queries are divided by it and the scores multiplied: keeps half-precision scores in range (ChatGLM-6B).
    pub score_balance: f64,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f64>,
    /// Only this many newest keys are seen; [`ModelBuilder::visible_window`] may narrow that.
    pub window: Option<usize>,
    /// How many later keys are seen: 0 if the attention is causal, [`ops::AttentionOp::ALL`] if it looks at the whole text.
    pub lookahead: usize,
    /// Per query head: `slope * (j - p)` is added to the score of key `j` for the query at `p`.
    pub alibi: Option<Vec<f32>>,
    /// Name of a vector `[heads]`: one learned logit per head joins the sum of the softmax, for a key without a value
    /// (gpt-oss, which calls it a sink; not one of the tokens that [`ModelBuilder::visible_window`] keeps).
    pub null_logits: Option<String>,
    /// Learned terms of the scores, by the distance of query and key.
    pub bias: Option<DistanceBias>,
    /// Which rows of the caches are keys.
    pub key_scope: KeyScope,
}

/// Rows of the caches that an attention looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyScope {
    All,
    /// Those of the source text of an encoder-decoder model ([`ModelBuilder::encoder_length`]): cross attention.
    EncoderInput,
    /// Those behind it.
    Decoder,
}

/// Queries `[n, heads, size]`.
#[derive(Clone, Copy, Debug)]
pub struct RotatedQueries {
    pub windowed: ValueId,
    /// Turned for the place that they have for attention sinks outside the window.
    pub for_sinks: ValueId,
}

impl From<ValueId> for RotatedQueries {
    /// Queries that are not turned.
    fn from(q: ValueId) -> RotatedQueries {
        RotatedQueries { windowed: q, for_sinks: q }
    }
}

/// What hides a key; far below every score, and no source of NaN.
const HIDDEN: f64 = -1e30;

impl AttentionVariant {
    /// Causal, with the usual factor `1 / sqrt(size)`.
    pub fn causal(size: usize) -> AttentionVariant {
        AttentionVariant {
            scale: 1.0 / (size as f64).sqrt(),
            score_balance: 1.0,
            softcap: None,
            window: None,
            lookahead: 0,
            alibi: None,
            null_logits: None,
            bias: None,
            key_scope: KeyScope::All,
        }
    }

    /// Every query sees every key.
    pub fn bidirectional(size: usize) -> AttentionVariant {
        AttentionVariant { lookahead: ops::AttentionOp::ALL, ..AttentionVariant::causal(size) }
    }

    /// Every query sees so many keys on each side of its own; `None`: all.
    pub fn sliding_bidirectional(size: usize, side: Option<usize>) -> AttentionVariant {
        match side {
            None => AttentionVariant::bidirectional(size),
            Some(side) => {
                AttentionVariant { window: Some(side + 1), lookahead: side, ..AttentionVariant::causal(size) }
            }
        }
    }

    /// Queries `[n, heads, size]`, keys and values `[n, kv_heads, size]` of this call to `[n, heads * size]`. Keys and
    /// values join those of the calls before in the layer's cache.
    pub fn apply(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        q: impl Into<RotatedQueries>,
        k: ValueId,
        v: ValueId,
    ) -> ValueId {
        self.apply_with_prefix(net, layer, q.into(), k, v, None)
    }

    /// The same where every query sees the first `prefix: i32[1]` keys, also those after it.
    pub fn apply_with_prefix(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        q: RotatedQueries,
        k: ValueId,
        v: ValueId,
        prefix: Option<ValueId>,
    ) -> ValueId {
        let rows = net.per_sequence(&[q.windowed, q.for_sinks, k, v], |net, rows| {
            let q = RotatedQueries {
                windowed: rows[0],
                for_sinks: if q.for_sinks == q.windowed { rows[0] } else { rows[1] },
            };
            let [k, v] = append_key_values(net, layer, [rows[2], rows[3]]);
            vec![self.attend(net, q, [k, v], prefix)]
        });
        rows[0]
    }

    /// The attention of one sequence to all its keys and values so far ([`append_key_values`]).
    pub fn attend(
        &self,
        net: &mut ModelBuilder,
        q: RotatedQueries,
        [k, v]: [ValueId; 2],
        prefix: Option<ValueId>,
    ) -> ValueId {
        let axis = |net: &ModelBuilder, x, axis: usize| net.ty(x).dims[axis].clone();
        let (n, heads) = (axis(net, q.windowed, 0), axis(net, q.windowed, 1));
        let (t, kv) = (axis(net, k, 0), axis(net, k, 1));
        let count = |d: &Dim| d.as_const().unwrap_or(1);
        let group = Dim::from(count(&heads) / count(&kv).max(1));

        let k = heads_first(net, k);
        let keys = net.permute(k, &[0, 1, 3, 2]);
        let row = net.cache_rows();
        let column = net.iota(Dim::from(0), t);
        let slopes = self.alibi.as_ref().map(|slopes| {
            let slopes = net.table_param("alibi.slopes", slopes.clone());
            net.reshape(slopes, [kv.clone(), group.clone(), Dim::from(1), Dim::from(1)])
        });
        let null_logits = self.null_logits.as_ref().map(|name| {
            let logits = net.vector_param(name, count(&heads) as usize);
            net.reshape(logits, [kv.clone(), group.clone(), Dim::from(1), Dim::from(1)])
        });
        let source = match self.key_scope {
            KeyScope::All => None,
            KeyScope::EncoderInput | KeyScope::Decoder => Some(net.encoder_length()),
        };
        let products = AttentionOperands { keys, column, slopes, kv, group, encoder_length: source };
        let near = self.attention_scores(net, q.windowed, row, &products);
        let seen = self.mask_scores(net, (q.for_sinks, near), &products, prefix);
        let weights = match null_logits {
            None => net.softmax(seen),
            Some(logits) => softmax_with_null(net, seen, logits),
        };
        let v = heads_first(net, v);
        let mixed = net.matmul(weights, v);
        let rows = net.permute(mixed, &[2, 0, 1, 3]);
        let width = count(&heads) * net.width(rows) as i64;
        net.reshape(rows, [n, Dim::from(width)])
    }

    /// Scores `[kv, group, n, t]` before masks, of queries `[n, heads, size]` that stand at `rows: i32[n]`.
    fn attention_scores(
        &self,
        net: &mut ModelBuilder,
        q: ValueId,
        rows: ValueId,
        products: &AttentionOperands,
    ) -> ValueId {
        let AttentionOperands { keys, column, slopes, kv, group, .. } = products;
        let dims = net.ty(q).dims.clone();
        // Queries that share a key head stand in one group: [kv, group, n, size].
        let q = net.reshape(q, [dims[0].clone(), kv.clone(), group.clone(), dims[2].clone()]);
        let q = net.permute(q, &[1, 2, 0, 3]);
        let mut scores = match self.score_balance {
            1.0 => {
                let products = net.matmul(q, *keys);
                net.scale(products, self.scale)
            }
            balance => {
                let q = net.scale(q, self.scale / balance);
                let products = net.matmul(q, *keys);
                net.scale(products, balance)
            }
        };
        if let Some(cap) = self.softcap {
            scores = net.softcap(scores, cap);
        }
        if let Some(bias) = &self.bias {
            let row = column_of(net, rows);
            let added = bias.apply(net, (row, *column), (kv, group));
            scores = net.add(scores, added);
        }
        let Some(slopes) = *slopes else { return scores };
        let row = column_of(net, rows);
        let distance = net.sub(*column, row);
        let distance = net.cast(distance, DType::F32);
        let bias = net.mul(slopes, distance);
        net.add(scores, bias)
    }

    /// Scores `near` with those of hidden keys replaced, and those of sinks by the scores of the queries `far`.
    fn mask_scores(
        &self,
        net: &mut ModelBuilder,
        (far, near): (ValueId, ValueId),
        products: &AttentionOperands,
        prefix: Option<ValueId>,
    ) -> ValueId {
        let (row, column) = (net.cache_rows(), products.column);
        let row = column_of(net, row);
        let hidden = net.constant(HIDDEN);
        let mut seen = near;
        let (window, sinks) = net.visible_window(self.window);
        if let Some(window) = window {
            let behind = if sinks == 0 { hidden } else { self.sink_scores(net, far, products, sinks) };
            let reach = integer_constant(net, window as i64 - 1);
            let first = net.sub(row, reach);
            seen = net.select_ge(column, first, seen, behind);
        }
        if self.lookahead < ops::AttentionOp::ALL {
            let last = match self.lookahead {
                0 => row,
                ahead => {
                    let ahead = integer_constant(net, ahead as i64);
                    net.add(row, ahead)
                }
            };
            seen = net.select_ge(last, column, seen, hidden);
        }
        if let Some(prefix) = prefix {
            let one = integer_constant(net, 1);
            let last = net.sub(prefix, one);
            seen = net.select_ge(last, column, near, seen);
        }
        match (self.key_scope, products.encoder_length) {
            (KeyScope::EncoderInput, Some(source)) => {
                let one = integer_constant(net, 1);
                let last = net.sub(source, one);
                seen = net.select_ge(last, column, seen, hidden);
            }
            (KeyScope::Decoder, Some(source)) => seen = net.select_ge(column, source, seen, hidden),
            (KeyScope::All, _) | (_, None) => {}
        }
        seen
    }

    /// Scores of the first keys, which are seen from everywhere; all others hidden.
    fn sink_scores(
        &self,
        net: &mut ModelBuilder,
        queries: ValueId,
        products: &AttentionOperands,
        sinks: usize,
    ) -> ValueId {
        let rows = net.cache_rows();
        let places = net.sink_positions(rows).unwrap_or(rows);
        let scores = self.attention_scores(net, queries, places, products);
        let hidden = net.constant(HIDDEN);
        let last = integer_constant(net, sinks as i64 - 1);
        net.select_ge(last, products.column, scores, hidden)
    }
}

/// What queries meet in a layer.
struct AttentionOperands {
    /// Transposed, `[kv, 1, size, t]`.
    keys: ValueId,
    /// Rows of the cache, `i32[t]`.
    column: ValueId,
    /// `[kv, group, 1, 1]`.
    slopes: Option<ValueId>,
    kv: Dim,
    group: Dim,
    /// Rows of the source text, `i32[1]`, where not all rows are keys.
    encoder_length: Option<ValueId>,
}

/// Softmax over the last axis of `scores: [kv, group, n, t]`, with `exp(logits)` in the sum.
fn softmax_with_null(net: &mut ModelBuilder, scores: ValueId, logits: ValueId) -> ValueId {
    let top = net.reduce(RedOp::Max, scores, 3);
    let top = net.max(top, logits);
    let shifted = net.sub(scores, top);
    let weights = net.exp(shifted);
    let sum = net.reduce(RedOp::Sum, weights, 3);
    let null = net.sub(logits, top);
    let null = net.exp(null);
    let sum = net.add(sum, null);
    net.div(weights, sum)
}

/// `[n]` as `[n, 1]`.
fn column_of(net: &mut ModelBuilder, rows: ValueId) -> ValueId {
    let n = net.n();
    net.reshape(rows, [n, Dim::from(1)])
}

/// Keys and values of this call join those of the calls before in the layer's caches: all so far, of one sequence. Where whole
/// texts are read they are all that there is.
pub fn append_key_values(net: &mut ModelBuilder, layer: usize, [k, v]: [ValueId; 2]) -> [ValueId; 2] {
    let k = append_to_cache(net, &format!("layers.{layer}.key"), k);
    [k, append_to_cache(net, &format!("layers.{layer}.value"), v)]
}

/// All rows of a cache with those of this call: `[past + n, ..]`.
pub fn append_to_cache(net: &mut ModelBuilder, name: &str, rows: ValueId) -> ValueId {
    if net.supports_pooling() {
        return rows;
    }
    let dims = net.ty(rows).dims.clone();
    let context = Dim::from(net.context());
    let ty = TensorType::new(DType::F32, std::iter::once(context).chain(dims[1..].iter().cloned()));
    let state = net.state(name, ty, 0.0);
    net.append(state, rows)
}

/// `[t, kv, size]` as `[kv, 1, t, size]`.
fn heads_first(net: &mut ModelBuilder, x: ValueId) -> ValueId {
    let dims = net.ty(x).dims.clone();
    let x = net.permute(x, &[1, 0, 2]);
    net.reshape(x, [dims[1].clone(), Dim::from(1), dims[0].clone(), dims[2].clone()])
}

/// An `i32` constant.
pub fn integer_constant(net: &mut ModelBuilder, value: i64) -> ValueId {
    net.op(Op::Constant { value: value as f64, dtype: DType::I32 }, &[])
}

/// Slopes of ALiBi (Press et al. 2022) for any number of heads: those of the next smaller power of two, then every other
/// one of twice that power. `max` is the exponent of the last slope (8 in the paper).
pub fn alibi_slopes(heads: usize, max: f64) -> Vec<f32> {
    let power = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let slopes = |n: usize| (1..=n).map(move |i| (-max * i as f64 / n as f64).exp2() as f32);
    slopes(power).chain(slopes(2 * power).step_by(2)).take(heads).collect()
}
