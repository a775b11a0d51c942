//! ChatGLM-6B (Du et al. 2022, Zeng et al. 2023; reference code: `ChatGLMForConditionalGeneration` of the published
//! checkpoint): a prefix language model. Every token sees all tokens before the first bos token, which come with the
//! prompt; from there on attention is causal. Positions have two dimensions: up to bos the place in the prompt, then that
//! of the mask token; and the number of tokens from bos on. Each turns half of every head.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::rope::{RopePairing, slice_head_elements};
use crate::layers::{ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeTables, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, TensorType};
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct ChatGlmConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    /// Of half a head.
    pub rope: Rope,
    pub bos: usize,
    pub gmask: usize,
    pub mask: usize,
}

/// Stands for the position of a token that is not there; above all positions, and exact in f32.
const ABSENT: f64 = (1u32 << 30) as f64;

/// Layers by which residuals are scaled. The reference code uses the published model's 28 whatever the configuration says.
const SCALE_LAYERS: f64 = 28.0;

impl ChatGlmConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<ChatGlmConfig, ConfigError> {
        fields.require_flag("position_encoding_2d", true, "ChatGLM with positions of one dimension")?;
        fields.require_flag("tie_word_embeddings", false, "ChatGLM-6B with a tied head")?;
        let sizes = ModelSizes::read(fields, Some(2048))?;
        if !sizes.head_size.is_multiple_of(4) {
            let expected = format!("{} heads of a multiple of 4 elements", sizes.heads);
            return Err(fields.invalid_value("hidden_size", &expected, &Value::from(sizes.hidden)));
        }
        let id = |field: &'static str| match fields.token_ids(field)?.as_slice() {
            [id] => Ok(*id as usize),
            _ => Err(fields.missing_field(field, "a token id")),
        };
        Ok(ChatGlmConfig {
            intermediate: fields.size_or("inner_hidden_size", 4 * sizes.hidden)?,
            eps: fields.epsilon(&["layernorm_epsilon"], 1e-5)?,
            rope: Rope::plain(sizes.head_size / 2, 10000.0, RopePairing::Half),
            bos: id("bos_token_id")?,
            gmask: id("gmask_token_id")?,
            mask: id("mask_token_id")?,
            sizes,
        })
    }

    /// Finds bos and mask in the prompt, or reads where they were.
    fn rope_tables(&self, net: &mut ModelBuilder) -> DualRopeTables {
        let one = TensorType::new(DType::F32, [1]);
        let states = ["prompt.bos", "prompt.mask"].map(|name| net.state(name, one.clone(), -1.0));
        let [known_bos, known_mask] = states.map(|state| net.read(state));
        let found_bos = first_position(net, self.bos);
        let gmask = first_position(net, self.gmask);
        let mask = first_position(net, self.mask);
        let absent = net.constant(ABSENT);
        let found_mask = net.select_ge(gmask, absent, mask, gmask);
        // What the first call that saw a bos found counts.
        let zero = net.constant(0.0);
        let bos = net.select_ge(known_bos, zero, known_bos, found_bos);
        let mask = net.select_ge(known_bos, zero, known_mask, found_mask);
        let unknown = net.constant(-1.0);
        for (state, value) in states.into_iter().zip([bos, mask]) {
            let kept = net.select_ge(bos, absent, unknown, value);
            net.write(state, kept);
        }
        let prefix = net.select_ge(bos, absent, zero, bos);
        let prefix = net.cast(prefix, DType::I32);
        let (position, block) = self.positions(net, bos, mask);
        let first = self.rope.tables_at(net, "rope", position);
        let second = self.rope.tables_at(net, "rope", block);
        DualRopeTables { prefix, first, second, half: self.sizes.head_size / 2 }
    }

    /// Both dimensions of the positions, `f32[n]` each.
    fn positions(&self, net: &mut ModelBuilder, bos: ValueId, mask: ValueId) -> (ValueId, ValueId) {
        let positions = net.positions();
        let p = net.cast(positions, DType::F32);
        let position = net.select_ge(p, bos, mask, p);
        let behind = net.sub(p, bos);
        let one = net.constant(1.0);
        let count = net.add(behind, one);
        let zero = net.constant(0.0);
        (position, net.max(count, zero))
    }
}

/// Where the tokens of a call are.
pub struct DualRopeTables {
    /// Tokens that all see: those before bos.
    prefix: ValueId,
    first: RopeTables,
    second: RopeTables,
    half: usize,
}

impl DualRopeTables {
    fn rotate(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        let (a, b) =
            (slice_head_elements(net, x, 0, self.half), slice_head_elements(net, x, self.half, self.half));
        let (a, b) = (self.first.apply(net, a), self.second.apply(net, b));
        net.concat(&[a, b], 2)
    }
}

/// Position of the first token of this call that is `id`, `f32[1]`; [`ABSENT`] if there is none.
fn first_position(net: &mut ModelBuilder, id: usize) -> ValueId {
    let (tokens, positions) = (net.tokens(), net.positions());
    let id = net.op(Op::Constant { value: id as f64, dtype: DType::I32 }, &[]);
    let p = net.cast(positions, DType::F32);
    let low = net.scale(p, -1.0);
    let absent = net.constant(-ABSENT);
    let not_above = net.select_ge(id, tokens, low, absent);
    let equal = net.select_ge(tokens, id, not_above, absent);
    let greatest = net.reduce(RedOp::Max, equal, 0);
    let first = net.scale(greatest, -1.0);
    net.reshape(first, [Dim::from(1)])
}

impl Transformer for ChatGlmConfig {
    type Shared = DualRopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "transformer.word_embeddings.weight",
            (Norm::Layer(self.eps), "transformer.final_layernorm"),
            "lm_head.weight",
            false,
        )
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> DualRopeTables {
        net.for_sequences(|net| self.rope_tables(net))
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        places: &DualRopeTables,
    ) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("transformer.layers.{layer}");
        // Residuals are taken after the norms, and scaled.
        let alpha = (2.0 * SCALE_LAYERS).sqrt();
        let normalised = layer_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let attention = format!("{name}.attention");
        let fused = FusedQkv::grouped_by_key_head(sizes.heads, sizes.heads, sizes.head_size);
        let projection = format!("{attention}.query_key_value");
        let qkv = fused.apply(net, normalised, &LinearLayer::new(&projection, fused.rows()).bias(true));
        let scores = AttentionVariant {
            score_balance: (layer + 1) as f64,
            ..AttentionVariant::causal(sizes.head_size)
        };
        let h = net.per_sequence(&qkv, |net, rows| {
            let [q, k, v] = [rows[0], rows[1], rows[2]].map(|x| net.split_heads(x, sizes.heads));
            let (q, k) = (places.rotate(net, q), places.rotate(net, k));
            vec![scores.apply_with_prefix(net, layer, q.into(), k, v, Some(places.prefix))]
        })[0];
        let h = LinearLayer::new(&format!("{attention}.dense"), hidden).bias(true).apply(net, h);
        let kept = net.scale(normalised, alpha);
        let x = net.add_residual(layer, "attention", kept, h);
        let normalised = layer_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (up, down) = (format!("{name}.mlp.dense_h_to_4h"), format!("{name}.mlp.dense_4h_to_h"));
        let (up, down) = (LinearLayer::new(&up, self.intermediate), LinearLayer::new(&down, hidden));
        let h = mlp::ungated(net, normalised, up.bias(true), down.bias(true), ActivationFunction::GeluTanh);
        let kept = net.scale(normalised, alpha);
        net.add_residual(layer, "mlp", kept, h)
    }

    fn needs_whole_prompts(&self) -> bool {
        true
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        Some("every token of this model sees the whole prompt")
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "transformer.", &["word_embeddings.", "layers.", "final_layernorm."])
    }
}
