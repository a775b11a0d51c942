//! gpt-oss (OpenAI 2025; reference: `GptOssForCausalLM` of transformers): experts with biases and a clamped gate in every
//! layer, windows on every other layer, and one learned logit per head in the sum of the softmax.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::{ExpertNames, ExpertRouter, ExpertStorage, Glu, MoeLayer, RouterScoring};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{AttentionVariant, Rope, RopeConfig, RopeDefaults, RopeTables, SelfAttention};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::{Map, Value, json};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "gpt_oss",
        classes: &["GptOssForCausalLM"],
        about: "gpt-oss",
        read: |fields| GptOssConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias head_dim hidden_size intermediate_size layer_types \
                        max_position_embeddings num_attention_heads num_experts_per_tok \
                        num_hidden_layers num_key_value_heads=8 num_local_experts rms_norm_eps \
                        rope_parameters={\"rope_type\":\"yarn\",\"factor\":32.0,\"beta_fast\":32.0,\"beta_slow\":1.0,\"truncate\":false,\"original_max_position_embeddings\":4096} \
                        sliding_window=128 swiglu_alpha swiglu_limit tie_word_embeddings vocab_size",
            none: "hidden_act",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "gpt-oss",
        model_type: "gpt_oss",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(GGUF_BLOCK),
        write_yarn: gguf_yarn,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct GptOssConfig {
    pub sizes: ModelSizes,
    pub eps: f64,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub bias: bool,
    pub experts: MoeLayer,
    /// Gate and up projection are one tensor; GGUF files have them apart.
    pub fused: bool,
    pub tied: bool,
}

/// Slope of the sigmoid in the gate, where the file does not say it.
const GATE_SLOPE: f64 = 1.702;

impl GptOssConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<GptOssConfig, ConfigError> {
        let mut sizes = ModelSizes::read_sized(fields, Some(131_072), Some(64))?;
        let defaults = RopeDefaults { theta: 150_000.0, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        let positive = |field: &str, default: f64| match fields.float_or(field, default)? {
            number if number > 0.0 && number.is_finite() => Ok(number),
            other => Err(fields.invalid_value(field, "a positive number", &Value::from(other))),
        };
        let limit = positive("swiglu_limit", 7.0)?;
        let slope = positive("swiglu_alpha", GATE_SLOPE)?;
        let routing = ExpertRouter::read(fields, &["num_local_experts"])?;
        let experts = MoeLayer {
            routing: ExpertRouter { scoring: RouterScoring::SoftmaxOfChosen, bias: true, ..routing },
            intermediate: fields.size("intermediate_size")?,
            glu: Glu::Clamped { limit, slope },
            fused: false,
        };
        Ok(GptOssConfig {
            eps: fields.epsilon(&["rms_norm_eps"], 1e-5)?,
            rope: rope.rope,
            windows: fields.layer_windows(sizes.layers, |layer| layer.is_multiple_of(2))?,
            bias: fields.flag_or("attention_bias", true)?,
            experts,
            fused: fields.flag_or("fused_experts", true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

impl Transformer for GptOssConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let part = format!("{name}.self_attn");
        let attention = AttentionVariant {
            window: self.windows[layer],
            null_logits: Some(format!("{part}.sinks")),
            ..AttentionVariant::causal(self.sizes.head_size)
        };
        let (qkv_bias, output_bias) = (self.bias, self.bias);
        let part = SelfAttention { qkv_bias, output_bias, ..SelfAttention::new(&part, rope, attention) };
        let h = part.apply(net, layer, &self.sizes, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let mlp = format!("{name}.mlp");
        let (router, gate_up, down) = (
            format!("{mlp}.router"),
            format!("{mlp}.experts.gate_up_proj"),
            format!("{mlp}.experts.down_proj"),
        );
        let apart = ["gate_proj", "up_proj", "down_proj"].map(|part| format!("{mlp}.experts.{part}"));
        let stored = match self.fused {
            true => ExpertStorage::Columns { gate_up: &gate_up, down: &down },
            false => ExpertStorage::Apart { parts: apart.each_ref().map(String::as_str) },
        };
        let h = self.experts.apply(
            net,
            h,
            &ExpertNames { router: &router, correction: None, expert_scale: None, storage: stored },
        );
        net.add_residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        true
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "mlp.experts.down_proj", 1, 1)?;
    t.record_axis_size(&["num_local_experts"], "mlp.router.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

const GGUF_BLOCK: &[NameMapping] = &[
    ("post_attention_norm", "post_attention_layernorm", Same),
    ("attn_sinks.weight", "self_attn.sinks", Same),
    ("ffn_gate_inp", "mlp.router", Same),
    ("ffn_gate_exps.weight", "mlp.experts.gate_proj", Same),
    ("ffn_gate_exps.bias", "mlp.experts.gate_proj_bias", Same),
    ("ffn_up_exps.weight", "mlp.experts.up_proj", Same),
    ("ffn_up_exps.bias", "mlp.experts.up_proj_bias", Same),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", Same),
    ("ffn_down_exps.bias", "mlp.experts.down_proj_bias", Same),
];

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("fused_experts", false);
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_experts(["num_local_experts", "intermediate_size"])
}

/// As published: files do not say it.
fn gguf_yarn(_w: &mut ConfigFieldWriter<'_>, fields: &mut Map<String, Value>) -> FieldResult {
    fields.insert("truncate".to_string(), json!(false));
    Ok(())
}
