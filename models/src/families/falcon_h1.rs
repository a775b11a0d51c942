//! Falcon-H1 (TII 2025; reference: `FalconH1ForCausalLM` of transformers): Mamba 2 and attention side by side in every layer, with
//! multipliers at every place (muP).

use crate::checkpoint::gguf::TensorConversion::{Flat, NegExp, Same};
use crate::checkpoint::gguf::{
    ConfigFieldWriter, FieldResult, GgufArchitecture, MAMBA_FIELDS, TensorNameMap,
};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::mamba2::{GatedNorm, Mamba2};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "falcon_h1",
        classes: &["FalconH1ForCausalLM"],
        about: "Falcon-H1",
        read: |fields| FalconH1Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias attention_in_multiplier attention_out_multiplier \
                        embedding_multiplier hidden_act hidden_size intermediate_size key_multiplier \
                        lm_head_multiplier mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state \
                        mamba_n_groups mamba_n_heads mamba_norm_before_gate mamba_proj_bias \
                        mamba_rms_norm max_position_embeddings mlp_bias mlp_multipliers \
                        num_attention_heads num_hidden_layers num_key_value_heads=8 projectors_bias \
                        rms_norm_eps rope_parameters ssm_in_multiplier ssm_multipliers \
                        ssm_out_multiplier tie_word_embeddings time_step_limit vocab_size",
            none: "mamba_chunk_size mamba_d_ssm mamba_expand num_logits_to_keep",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "falcon-h1",
        model_type: "falcon_h1",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct FalconH1Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub mixer: Mamba2,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub tied: bool,
    pub multipliers: MupMultipliers,
}

/// Factors, by what they scale.
#[derive(Clone, Debug, PartialEq)]
pub struct MupMultipliers {
    pub embedding: f64,
    pub logits: f64,
    pub attention_input: f64,
    pub attention_output: f64,
    pub key: f64,
    pub mixer_input: f64,
    pub mixer_output: f64,
    pub gate: f64,
    pub down: f64,
}

impl MupMultipliers {
    fn read(fields: &ConfigFields) -> Result<MupMultipliers, ConfigError> {
        let [gate, down] = fields.numbers_or("mlp_multipliers", [1.0; 2])?;
        Ok(MupMultipliers {
            embedding: fields.float_or("embedding_multiplier", 1.0)?,
            logits: fields.float_or("lm_head_multiplier", 1.0)?,
            attention_input: fields.float_or("attention_in_multiplier", 1.0)?,
            attention_output: fields.float_or("attention_out_multiplier", 1.0)?,
            key: fields.float_or("key_multiplier", 1.0)?,
            mixer_input: fields.float_or("ssm_in_multiplier", 1.0)?,
            mixer_output: fields.float_or("ssm_out_multiplier", 1.0)?,
            gate,
            down,
        })
    }
}

impl FalconH1Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<FalconH1Config, ConfigError> {
        let mut sizes = ModelSizes::read_equal_heads(fields, Some(8192))?;
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        let eps = fields.epsilon(&["rms_norm_eps"], 1e-5)?;
        let names = [
            "mamba_n_heads",
            "mamba_d_head",
            "mamba_n_groups",
            "mamba_d_state",
            "mamba_d_conv",
            "mamba_conv_bias",
            "mamba_proj_bias",
        ];
        let mixer = Mamba2::read(fields, names, eps)?;
        let norm =
            match (fields.flag_or("mamba_rms_norm", false)?, fields.flag_or("mamba_norm_before_gate", true)?)
            {
                (false, _) => GatedNorm::None,
                (true, false) => GatedNorm::After { groups: mixer.groups },
                (true, true) => GatedNorm::Before { groups: mixer.groups },
            };
        let output_bias = fields.flag_or("projectors_bias", false)?;
        let multipliers = Some(fields.numbers_or("ssm_multipliers", [1.0; 5])?);
        Ok(FalconH1Config {
            intermediate: fields.size("intermediate_size")?,
            eps,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            mixer: Mamba2 { norm, output_bias, multipliers, ..mixer },
            attention_bias: fields.flag_or("attention_bias", false)?,
            mlp_bias: fields.flag_or("mlp_bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            multipliers: MupMultipliers::read(fields)?,
            sizes,
        })
    }

    fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        rope: &RopeTables,
    ) -> ValueId {
        let (sizes, bias) = (&self.sizes, self.attention_bias);
        let project = |net: &mut ModelBuilder, which: &str, x, out| {
            LinearLayer::new(&format!("{name}.{which}"), out).bias(bias).apply(net, x)
        };
        let x = net.scale(x, self.multipliers.attention_input);
        let q = project(net, "q_proj", x, sizes.query_width());
        let k = project(net, "k_proj", x, sizes.key_width());
        let k = net.scale(k, self.multipliers.key);
        let v = project(net, "v_proj", x, sizes.key_width());
        let attention = SelfAttention::new(name, rope, AttentionVariant::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, [q, k, v]);
        let h = project(net, "o_proj", h, sizes.hidden);
        net.scale(h, self.multipliers.attention_output)
    }

    fn feed_forward(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> ValueId {
        let layer = |net: &mut ModelBuilder, which: &str, x, out| {
            LinearLayer::new(&format!("{name}.{which}"), out).bias(self.mlp_bias).apply(net, x)
        };
        let gate = layer(net, "gate_proj", x, self.intermediate);
        let gate = net.scale(gate, self.multipliers.gate);
        let gate = self.activation.apply(net, gate);
        let up = layer(net, "up_proj", x, self.intermediate);
        let product = net.mul(up, gate);
        let h = layer(net, "down_proj", product, self.sizes.hidden);
        net.scale(h, self.multipliers.down)
    }
}

impl Transformer for FalconH1Config {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = (Norm::Rms(self.eps), "model.final_layernorm");
        OuterLayers {
            embedding_scale: Some(self.multipliers.embedding),
            logit_scale: Some(self.multipliers.logits),
            ..OuterLayers::with_names("model.embed_tokens.weight", norm, "lm_head.weight", self.tied)
        }
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let normalised = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let mixed = net.scale(normalised, self.multipliers.mixer_input);
        let mixed = self.mixer.apply(net, layer, &format!("{name}.mamba"), mixed);
        let mixed = net.scale(mixed, self.multipliers.mixer_output);
        let attended = self.attention(net, layer, &format!("{name}.self_attn"), normalised, rope);
        let h = net.add(mixed, attended);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.pre_ff_layernorm"), self.eps);
        let h = self.feed_forward(net, &format!("{name}.feed_forward"), h);
        net.add_residual(layer, "mlp", x, h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "model.", &["embed_tokens.", "layers.", "final_layernorm."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "self_attn.q_proj")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_heads("layers.0.self_attn", None)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.feed_forward.gate_proj.weight", 0, 1)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "model.embed_tokens.weight", Same),
        ("output_norm.weight", "model.final_layernorm.weight", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    ..TensorNameMap::llama(&[
        ("ssm_in", "mamba.in_proj", Same),
        ("ssm_conv1d", "mamba.conv1d", Same),
        ("ssm_dt.bias", "mamba.dt_bias", Same),
        ("ssm_a", "mamba.A_log", NegExp),
        ("ssm_d", "mamba.D", Flat),
        ("ssm_norm", "mamba.norm", Flat),
        ("ssm_out", "mamba.out_proj", Same),
        ("attn_q", "self_attn.q_proj", Same),
        ("attn_k", "self_attn.k_proj", Same),
        ("ffn_norm", "pre_ff_layernorm", Same),
        ("ffn_gate", "feed_forward.gate_proj", Same),
        ("ffn_up", "feed_forward.up_proj", Same),
        ("ffn_down", "feed_forward.down_proj", Same),
    ])
};

/// The multipliers are in the weights.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.copy_mamba2(MAMBA_FIELDS)?;
    w.set_field("mamba_rms_norm", w.has_in_any_layer("ssm_norm.weight"));
    // As llama.cpp computes it.
    w.set_field("mamba_norm_before_gate", false);
    w.set_field("projectors_bias", w.has_in_any_layer("ssm_out.bias"));
    w.set_field("attention_bias", w.has_in_any_layer("attn_q.bias"));
    w.set_field("mlp_bias", w.has_in_any_layer("ffn_up.bias"));
    Ok(())
}
