//! BLOOM (Scao et al. 2022; reference: `BloomForCausalLM` of transformers): ALiBi, a norm after the embeddings,
//! projections fused head by head.

use crate::checkpoint::gguf::TensorConversion::{HeadsInside, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::attention::alibi_slopes;
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "bloom",
        classes: &["BloomForCausalLM"],
        about: "BLOOM",
        read: |fields| BloomConfig::from_fields(fields).map(Architecture::new),
        infer: |t| t.record_embedding("word_embeddings.weight", "lm_head.weight", true),
        fields: PublishedFields {
            read: "apply_residual_connection_post_layernorm hidden_size layer_norm_epsilon \
                        n_head n_layer tie_word_embeddings vocab_size",
            none: "slow_but_exact",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "bloom",
        model_type: "bloom",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct BloomConfig {
    pub sizes: ModelSizes,
    pub eps: f64,
    /// Residuals are taken after the norms.
    pub residual_behind_norm: bool,
    pub tied: bool,
}

impl BloomConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<BloomConfig, ConfigError> {
        Ok(BloomConfig {
            // ALiBi has no longest sequence; this is what the models were trained with.
            sizes: ModelSizes::read(fields, Some(2048))?,
            eps: fields.epsilon(&["layer_norm_epsilon"], 1e-5)?,
            residual_behind_norm: fields.flag_or("apply_residual_connection_post_layernorm", false)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
        })
    }
}

impl Transformer for BloomConfig {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "transformer.word_embeddings.weight",
            (Norm::Layer(self.eps), "transformer.ln_f"),
            "lm_head.weight",
            self.tied,
        )
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let x = net.embed(self.outer_layers().embedding, self.sizes.vocab, self.sizes.hidden);
        layer_norm(net, x, "transformer.word_embeddings_layernorm", self.eps)
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("transformer.h.{layer}");
        let residual = |x, normalised| if self.residual_behind_norm { normalised } else { x };
        let normalised = layer_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let part = format!("{name}.self_attention");
        let fused = FusedQkv::grouped_by_key_head(sizes.heads, sizes.heads, sizes.head_size);
        let projection = format!("{part}.query_key_value");
        let qkv = fused.apply(net, normalised, &LinearLayer::new(&projection, fused.rows()).bias(true));
        let [q, k, v] = qkv.map(|x| net.split_heads(x, sizes.heads));
        let alibi = Some(alibi_slopes(sizes.heads, 8.0));
        let h = AttentionVariant { alibi, ..AttentionVariant::causal(sizes.head_size) }
            .apply(net, layer, q, k, v);
        let h = LinearLayer::new(&format!("{part}.dense"), hidden).bias(true).apply(net, h);
        let x = net.add_residual(layer, "attention", residual(x, normalised), h);
        let normalised = layer_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let (up, down) = (format!("{name}.mlp.dense_h_to_4h"), format!("{name}.mlp.dense_4h_to_h"));
        let (up, down) = (LinearLayer::new(&up, 4 * hidden), LinearLayer::new(&down, hidden));
        let h = mlp::ungated(net, normalised, up.bias(true), down.bias(true), ActivationFunction::GeluTanh);
        net.add_residual(layer, "mlp", residual(x, normalised), h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        let roots = ["word_embeddings.", "word_embeddings_layernorm.", "h.", "ln_f."];
        with_prefix(stored_name, "transformer.", &roots)
    }
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "transformer.word_embeddings.weight", Same),
        ("token_embd_norm.weight", "transformer.word_embeddings_layernorm.weight", Same),
        ("token_embd_norm.bias", "transformer.word_embeddings_layernorm.bias", Same),
        ("output_norm.weight", "transformer.ln_f.weight", Same),
        ("output_norm.bias", "transformer.ln_f.bias", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    layers: "transformer.h",
    block: &[
        ("attn_norm", "input_layernorm", Same),
        ("attn_qkv", "self_attention.query_key_value", HeadsInside),
        ("attn_output", "self_attention.dense", Same),
        ("ffn_norm", "post_attention_layernorm", Same),
        ("ffn_up", "mlp.dense_h_to_4h", Same),
        ("ffn_down", "mlp.dense_4h_to_h", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.copy_number("attention.head_count", "n_head")?;
    w.copy_number("block_count", "n_layer")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    w.copy_number("context_length", "seq_length")
}
