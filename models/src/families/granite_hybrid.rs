//! Granite 4 (IBM 2025; reference: `GraniteMoeHybridForCausalLM` of transformers): Mamba 2 in most layers, attention without
//! positions in the others; experts and a feed-forward part that every token gets, or only that; the multipliers of Granite 3.

use crate::checkpoint::gguf::TensorConversion::{Experts, Flat, KeyHeads, NegExp, QueryHeads, Same};
use crate::checkpoint::gguf::{
    ConfigFieldWriter, FieldResult, GgufArchitecture, MAMBA_FIELDS, NameMapping, TensorNameMap,
};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::{HEADS, HIDDEN, KV_HEADS};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::mamba2::Mamba2;
use crate::layers::moe::{ExpertNames, ExpertRouter, ExpertStorage, Glu, MoeLayer, RouterScoring};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "granitemoehybrid",
        classes: &["GraniteMoeHybridForCausalLM"],
        about: "Granite 4",
        read: |fields| GraniteHybridConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias attention_multiplier embedding_multiplier hidden_act \
                        hidden_size intermediate_size layer_types logits_scaling mamba_conv_bias \
                        mamba_d_conv mamba_d_head mamba_d_state mamba_n_groups mamba_n_heads \
                        mamba_proj_bias max_position_embeddings=2048 num_attention_heads \
                        num_experts_per_tok num_hidden_layers num_key_value_heads \
                        num_local_experts=8 position_embedding_type residual_multiplier rms_norm_eps \
                        rope_parameters shared_intermediate_size tie_word_embeddings time_step_limit \
                        vocab_size",
            none: "mamba_chunk_size mamba_expand",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "granitehybrid",
        model_type: "granitemoehybrid",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(GGUF_BLOCK),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct GraniteHybridConfig {
    pub sizes: ModelSizes,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// `None`: attention without positions.
    pub rope: Option<Rope>,
    pub bias: bool,
    /// By layer: attention in place of Mamba 2.
    pub attends: Vec<bool>,
    /// `None` where all layers have attention.
    pub mixer: Option<Mamba2>,
    pub experts: Option<MoeLayer>,
    /// Width of the feed-forward part that every token gets.
    pub shared: usize,
    /// Gate and inner projection are one tensor; GGUF files have them apart, and experts one by one.
    pub fused: bool,
    pub tied: bool,
    pub embedding_multiplier: f64,
    /// In place of `1 / sqrt(head_size)`.
    pub attention_multiplier: f64,
    /// Of what each part of a layer adds.
    pub residual_multiplier: f64,
    /// Logits are divided by it.
    pub logits_scaling: f64,
}

impl GraniteHybridConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<GraniteHybridConfig, ConfigError> {
        let mut sizes = ModelSizes::read_equal_heads(fields, Some(131_072))?;
        let rope = match fields.get("position_embedding_type").and_then(|kind| kind.as_str()) {
            Some("rope") => {
                let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
                sizes.context = rope.context;
                Some(rope.rope)
            }
            Some("nope") | None => None,
            Some(other) => {
                let found = other.into();
                return Err(fields.invalid_value("position_embedding_type", "rope or nope", &found));
            }
        };
        let eps = fields.epsilon(&["rms_norm_eps"], 1e-6)?;
        let attends = match fields.get("layer_types") {
            None => vec![false; sizes.layers],
            Some(_) => {
                let kinds = fields.layer_kinds("layer_types", sizes.layers, &["mamba", "attention"])?;
                kinds.into_iter().map(|kind| kind == 1).collect()
            }
        };
        let names = [
            "mamba_n_heads",
            "mamba_d_head",
            "mamba_n_groups",
            "mamba_d_state",
            "mamba_d_conv",
            "mamba_conv_bias",
            "mamba_proj_bias",
        ];
        let mixer = match attends.iter().all(|&attends: &bool| attends) {
            true => None,
            false => Some(Mamba2::read(fields, names, eps)?),
        };
        let activation = ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?;
        Ok(GraniteHybridConfig {
            eps,
            activation,
            rope,
            bias: fields.flag_or("attention_bias", false)?,
            attends,
            mixer,
            experts: read_experts(fields, activation)?,
            shared: fields.size("shared_intermediate_size")?,
            fused: fields.flag_or("fused_mlp", true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            embedding_multiplier: fields.float_or("embedding_multiplier", 1.0)?,
            attention_multiplier: fields.float_or("attention_multiplier", 1.0)?,
            residual_multiplier: fields.float_or("residual_multiplier", 1.0)?,
            logits_scaling: fields.float_or("logits_scaling", 1.0)?,
            sizes,
        })
    }

    fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        rope: Option<&RopeTables>,
    ) -> ValueId {
        SelfAttention {
            name,
            output: "o_proj",
            qkv_bias: self.bias,
            output_bias: self.bias,
            head_norm: None,
            rope,
            query_scale: None,
            attention: AttentionVariant {
                scale: self.attention_multiplier,
                ..AttentionVariant::causal(self.sizes.head_size)
            },
        }
        .apply(net, layer, &self.sizes, x)
    }

    fn feed_forward(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> ValueId {
        let shared = self.shared_mlp(net, &format!("{name}.shared_mlp"), x);
        let Some(experts) = &self.experts else { return shared };
        let mixture = format!("{name}.block_sparse_moe");
        let inside = format!("{mixture}.experts");
        let router = format!("{mixture}.router.layer");
        let (gate_up, down) =
            (format!("{mixture}.input_linear.weight"), format!("{mixture}.output_linear.weight"));
        let stored = match self.fused {
            true => ExpertStorage::Packed { gate_up: &gate_up, down: &down },
            false => ExpertStorage::Single { experts: &inside, parts: ["gate_proj", "up_proj", "down_proj"] },
        };
        let h = experts.apply(
            net,
            x,
            &ExpertNames { router: &router, correction: None, expert_scale: None, storage: stored },
        );
        net.add(h, shared)
    }

    /// What every token gets.
    fn shared_mlp(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> ValueId {
        if !self.fused {
            return mlp::gated_by_name(net, x, name, self.shared, false, self.activation);
        }
        let (gate_up, down) = (format!("{name}.input_linear"), format!("{name}.output_linear"));
        let gate_up = LinearLayer::new(&gate_up, 2 * self.shared);
        let down = LinearLayer::new(&down, self.sizes.hidden);
        mlp::gated_fused(net, x, gate_up, down, self.activation)
    }

    /// `x + multiplier * h`.
    fn residual(&self, net: &mut ModelBuilder, tap: &str, x: ValueId, h: ValueId) -> ValueId {
        net.tap(tap, h);
        let h = net.scale(h, self.residual_multiplier);
        net.add(x, h)
    }
}

/// Experts with a softmax over the chosen ones; the small models have none.
fn read_experts(
    fields: &ConfigFields,
    activation: ActivationFunction,
) -> Result<Option<MoeLayer>, ConfigError> {
    if fields.count_or("num_local_experts", 0)? == 0 {
        return Ok(None);
    }
    let routing = ExpertRouter::read(fields, &["num_local_experts"])?;
    let routing = ExpertRouter { scoring: RouterScoring::SoftmaxOfChosen, ..routing };
    let intermediate = fields.size("intermediate_size")?;
    Ok(Some(MoeLayer { routing, intermediate, glu: Glu::Plain(activation), fused: false }))
}

impl Transformer for GraniteHybridConfig {
    type Shared = Option<RopeTables>;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers {
            embedding_scale: Some(self.embedding_multiplier),
            logit_scale: Some(1.0 / self.logits_scaling),
            ..OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
        }
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> Option<RopeTables> {
        self.rope.as_ref().map(|rope| rope.tables(net, "rope"))
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        rope: &Option<RopeTables>,
    ) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let h = match &self.mixer {
            Some(mixer) if !self.attends[layer] => mixer.apply(net, layer, &format!("{name}.mamba"), h),
            _ => self.attention(net, layer, &format!("{name}.self_attn"), h, rope.as_ref()),
        };
        let x = self.residual(net, &format!("layer.{layer}.attention"), x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let h = self.feed_forward(net, &name, h);
        self.residual(net, &format!("layer.{layer}.mlp"), x, h)
    }

    fn has_cache(&self) -> bool {
        self.attends.contains(&true)
    }

    fn has_experts(&self) -> bool {
        self.experts.is_some()
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "self_attn.q_proj")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    if let (Some(hidden), Some(heads)) = (t.known_size(&HIDDEN), t.known_size(&HEADS)) {
        t.record_axis_size(&KV_HEADS, "self_attn.k_proj.weight", 0, hidden / heads)?;
    }
    t.record_axis_size(&["intermediate_size"], "block_sparse_moe.input_linear.weight", 1, 2)?;
    t.record_axis_size(&["num_local_experts"], "block_sparse_moe.router.layer.weight", 0, 1)?;
    t.record_axis_size(&["shared_intermediate_size"], "shared_mlp.input_linear.weight", 0, 2)?;
    t.record_axis_size(&["mamba_n_heads"], "mamba.A_log", 0, 1)
}

const GGUF_BLOCK: &[NameMapping] = &[
    ("ssm_in", "mamba.in_proj", Same),
    ("ssm_conv1d", "mamba.conv1d", Same),
    ("ssm_dt.bias", "mamba.dt_bias", Same),
    ("ssm_a", "mamba.A_log", NegExp),
    ("ssm_d", "mamba.D", Flat),
    ("ssm_norm", "mamba.norm", Flat),
    ("ssm_out", "mamba.out_proj", Same),
    ("attn_q", "self_attn.q_proj", QueryHeads),
    ("attn_k", "self_attn.k_proj", KeyHeads),
    ("ffn_gate_inp", "block_sparse_moe.router.layer", Same),
    ("ffn_gate_exps", "block_sparse_moe.experts.{e}.gate_proj", Experts),
    ("ffn_up_exps", "block_sparse_moe.experts.{e}.up_proj", Experts),
    ("ffn_down_exps", "block_sparse_moe.experts.{e}.down_proj", Experts),
    ("ffn_gate_shexp", "shared_mlp.gate_proj", Same),
    ("ffn_up_shexp", "shared_mlp.up_proj", Same),
    ("ffn_down_shexp", "shared_mlp.down_proj", Same),
    // Without experts it has the names of a plain feed-forward part.
    ("ffn_gate", "shared_mlp.gate_proj", Same),
    ("ffn_up", "shared_mlp.up_proj", Same),
    ("ffn_down", "shared_mlp.down_proj", Same),
];

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("layer_types", w.layer_kinds("ssm_in.weight", ["mamba", "attention"])?);
    w.set_field("attention_bias", w.has_in_any_layer("attn_q.bias"));
    w.copy_float("attention.scale", "attention_multiplier")?;
    w.copy_float("embedding_scale", "embedding_multiplier")?;
    w.copy_float("residual_scale", "residual_multiplier")?;
    w.copy_float("logit_scale", "logits_scaling")?;
    let turned = w.flag("rope.scaling.finetuned")?.unwrap_or(false);
    w.set_field("position_embedding_type", if turned { "rope" } else { "nope" });
    if w.has_in_any_layer("ssm_in.weight") {
        w.copy_mamba2(MAMBA_FIELDS)?;
    }
    w.set_field("fused_mlp", false);
    let shared = w.rows_in_any_layer("ffn_gate_shexp.weight").or(w.rows_in_any_layer("ffn_gate.weight"));
    if let Some(shared) = shared {
        w.set_field("shared_intermediate_size", shared);
    }
    w.copy_number("expert_count", "num_local_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_tok")
}
