//! The attention part of a layer with separate projections, as most checkpoints of the Hugging Face classes store it.

use super::attention::{AttentionVariant, RotatedQueries};
use super::linear::LinearLayer;
use super::rope::RopeTables;
use crate::config::sizes::ModelSizes;
use crate::model_builder::ModelBuilder;
use mlcc_ir::graph::ValueId;

/// Normalises queries and keys head by head: `(net, x: [n, heads, size], name, eps)`.
pub type HeadNorm = fn(&mut ModelBuilder, ValueId, &str, f64) -> ValueId;

/// `{name}.q_proj`, `k_proj`, `v_proj` and the output projection around [`AttentionVariant`].
#[derive(Clone, Debug)]
pub struct SelfAttention<'a> {
    /// Such as `model.layers.0.self_attn`.
    pub name: &'a str,
    pub output: &'a str,
    pub qkv_bias: bool,
    pub output_bias: bool,
    /// Norms `{name}.q_norm` and `{name}.k_norm` of every head, with their epsilon.
    pub head_norm: Option<(HeadNorm, f64)>,
    pub rope: Option<&'a RopeTables>,
    /// Factors of the queries, `[n, 1, 1]` of one sequence.
    pub query_scale: Option<ValueId>,
    pub attention: AttentionVariant,
}

impl<'a> SelfAttention<'a> {
    /// Without biases and norms.
    pub fn new(name: &'a str, rope: &'a RopeTables, attention: AttentionVariant) -> SelfAttention<'a> {
        SelfAttention { rope: Some(rope), ..SelfAttention::without_positions(name, attention) }
    }

    /// The same without rotary embedding.
    pub fn without_positions(name: &'a str, attention: AttentionVariant) -> SelfAttention<'a> {
        SelfAttention {
            name,
            output: "o_proj",
            qkv_bias: false,
            output_bias: false,
            head_norm: None,
            rope: None,
            query_scale: None,
            attention,
        }
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut ModelBuilder, layer: usize, sizes: &ModelSizes, x: ValueId) -> ValueId {
        let project = |net: &mut ModelBuilder, which: &str, out: usize| {
            LinearLayer::new(&format!("{}.{which}", self.name), out).bias(self.qkv_bias).apply(net, x)
        };
        let q = project(net, "q_proj", sizes.query_width());
        let k = project(net, "k_proj", sizes.key_width());
        let v = project(net, "v_proj", sizes.key_width());
        let h = self.attend(net, layer, sizes, [q, k, v]);
        let output = format!("{}.{}", self.name, self.output);
        LinearLayer::new(&output, sizes.hidden).bias(self.output_bias).apply(net, h)
    }

    /// The part between the projections: `[n, width]` each to `[n, heads * size]`.
    pub fn attend(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        sizes: &ModelSizes,
        [q, k, v]: [ValueId; 3],
    ) -> ValueId {
        let rows = net.per_sequence(&[q, k, v], |net, rows| {
            vec![self.attend_one(net, layer, sizes, [rows[0], rows[1], rows[2]])]
        });
        rows[0]
    }

    /// [`SelfAttention::attend`] of the tokens of one sequence.
    fn attend_one(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        sizes: &ModelSizes,
        [q, k, v]: [ValueId; 3],
    ) -> ValueId {
        let mut q = net.split_heads(q, sizes.heads);
        let mut k = net.split_heads(k, sizes.kv_heads);
        let v = net.split_heads(v, sizes.kv_heads);
        if let Some((norm, eps)) = self.head_norm {
            q = norm(net, q, &format!("{}.q_norm", self.name), eps);
            k = norm(net, k, &format!("{}.k_norm", self.name), eps);
        }
        let Some(rope) = self.rope else { return self.attention.apply(net, layer, q, k, v) };
        let far = rope.apply_for_sinks(net, q);
        (q, k) = (rope.apply(net, q), rope.apply(net, k));
        if let Some(scale) = self.query_scale {
            q = net.mul(q, scale);
        }
        self.attention.apply(net, layer, RotatedQueries { windowed: q, for_sinks: far.unwrap_or(q) }, k, v)
    }
}
