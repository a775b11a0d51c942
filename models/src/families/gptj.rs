//! GPT-J (Wang and Komatsuzaki 2021; reference: `GPTJForCausalLM` of transformers) and MOSS (Sun et al. 2023; reference
//! code: `MossForCausalLM`), which fuses its projections: both parts of a layer read one normalised input, rotary
//! embedding of neighbouring elements on the first part of each head, a bias at the head.

use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::rope::RopePairing;
use crate::layers::{
    ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::RowBlocks;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "gptj",
            classes: &["GPTJForCausalLM"],
            about: "GPT-J",
            read: |fields| GptJConfig::gptj(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "activation_function layer_norm_epsilon n_embd n_head n_inner n_layer \
                        n_positions rotary_dim=64 tie_word_embeddings vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "moss",
            classes: &["MossForCausalLM"],
            about: "MOSS",
            read: |fields| GptJConfig::moss(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields::UNKNOWN,
        },
    ],
    gguf: &[],
};

#[derive(Clone, Debug, PartialEq)]
pub struct GptJConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    /// Queries, keys and values are parts of `qkv_proj`.
    pub fused: Option<FusedQkv>,
}

/// MOSS was trained on four cores: its fused rows are four times queries, values, keys.
const MOSS_BLOCKS: usize = 4;

impl GptJConfig {
    pub fn gptj(fields: &ConfigFields) -> Result<GptJConfig, ConfigError> {
        fields.require_flag("tie_word_embeddings", false, "GPT-J with a tied head")?;
        let sizes = ModelSizes::read(fields, Some(2048))?;
        let rotary = match fields.get("rotary_dim") {
            None => sizes.head_size,
            Some(_) => fields.size("rotary_dim")?,
        };
        if rotary > sizes.head_size || !rotary.is_multiple_of(2) {
            let expected = format!("an even number up to the head size, which is {}", sizes.head_size);
            return Err(fields.invalid_value("rotary_dim", &expected, &Value::from(rotary)));
        }
        Ok(GptJConfig {
            intermediate: fields.size_or("n_inner", 4 * sizes.hidden)?,
            eps: fields.epsilon(&["layer_norm_epsilon"], 1e-5)?,
            activation: ActivationFunction::read(
                fields,
                &["activation_function"],
                ActivationFunction::GeluTanh,
            )?,
            rope: Rope::plain(rotary, 10000.0, RopePairing::Interleaved),
            fused: None,
            sizes,
        })
    }

    pub fn moss(fields: &ConfigFields) -> Result<GptJConfig, ConfigError> {
        let config = GptJConfig::gptj(fields)?;
        let hidden = config.sizes.hidden;
        if !config.sizes.heads.is_multiple_of(MOSS_BLOCKS) {
            let expected = format!("a multiple of {MOSS_BLOCKS}");
            return Err(fields.invalid_value("n_head", &expected, &Value::from(config.sizes.heads)));
        }
        let len = hidden / MOSS_BLOCKS;
        let block = |number| RowBlocks {
            start: number * len,
            len,
            stride: 3 * len,
            count: MOSS_BLOCKS,
            of: 3 * hidden,
        };
        let fused = FusedQkv { query: block(0), value: block(1), key: block(2) };
        Ok(GptJConfig { fused: Some(fused), ..config })
    }
}

impl Transformer for GptJConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "transformer.wte.weight",
            (Norm::Layer(self.eps), "transformer.ln_f"),
            "lm_head.weight",
            false,
        )
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("transformer.h.{layer}");
        let normalised = layer_norm(net, x, &format!("{name}.ln_1"), self.eps);
        let part = format!("{name}.attn");
        let attention = SelfAttention {
            output: "out_proj",
            ..SelfAttention::new(&part, rope, AttentionVariant::causal(sizes.head_size))
        };
        let h = match &self.fused {
            None => attention.apply(net, layer, sizes, normalised),
            Some(fused) => {
                let layer_name = format!("{part}.qkv_proj");
                let qkv = fused.apply(net, normalised, &LinearLayer::new(&layer_name, fused.rows()));
                let h = attention.attend(net, layer, sizes, qkv);
                LinearLayer::new(&format!("{part}.out_proj"), hidden).apply(net, h)
            }
        };
        let x = net.add_residual(layer, "attention", x, h);
        let (up, down) = (format!("{name}.mlp.fc_in"), format!("{name}.mlp.fc_out"));
        let (up, down) = (LinearLayer::new(&up, self.intermediate), LinearLayer::new(&down, hidden));
        let h = mlp::ungated(net, normalised, up.bias(true), down.bias(true), self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn logits(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        let logits = self.outer_layers().logits(net, x, self.sizes.vocab);
        let bias = net.vector_param("lm_head.bias", self.sizes.vocab);
        net.add(logits, bias)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "transformer.", &["wte.", "h.", "ln_f."])
    }

    /// Masks and tables of sines that older files hold.
    fn is_ignored(&self, name: &str) -> bool {
        name.ends_with(".attn.causal_mask") || name.ends_with(".attn.embed_positions")
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_table("wte.weight")?;
    t.record_axis_size(&["n_inner"], "h.0.mlp.fc_in.weight", 0, 1)
}
