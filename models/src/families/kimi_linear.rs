//! Kimi Linear (Moonshot AI 2025; reference: `KimiLinearForCausalLM` of transformers): in three of four layers a delta rule with a
//! decay for each channel of the keys (Kimi Delta Attention), in the others latent attention without positions; experts,
//! some of them for every token, in all but the first layers.

use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::error::ConfigError;
use crate::layers::ActivationFunction;
use crate::layers::latent_attention::{LatentAttention, LatentPositions};
use crate::layers::mlp;
use crate::layers::moe::{
    ExpertGroups, ExpertRouter, FUSED_EXPERTS, Glu, MoeLayer, RouterScoring, SharedExpert,
};
use crate::layers::norm::{Norm, rms_norm};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, hugging_face_name};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

mod delta_attention;

use crate::checkpoint::gguf::TensorConversion::{Experts, Matrix, NegExp, Same, TransposedEach};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::definition::Architecture;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
pub use delta_attention::DeltaAttention;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "kimi_linear",
        classes: &["KimiLinearForCausalLM"],
        about: "Kimi Linear",
        read: |fields| KimiLinearConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias head_dim hidden_act hidden_size intermediate_size \
                        kv_lora_rank layer_types linear_conv_kernel_dim linear_head_dim \
                        linear_num_heads mlp_layer_types model_max_length=1048576 \
                        moe_intermediate_size moe_renormalize num_attention_heads num_expert_group \
                        num_experts num_experts_per_token num_hidden_layers num_key_value_heads \
                        num_shared_experts q_lora_rank qk_nope_head_dim qk_rope_head_dim \
                        rms_norm_eps routed_scaling_factor tie_word_embeddings topk_group=1 \
                        v_head_dim vocab_size",
            none: "qk_head_dim",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "kimi-linear",
        model_type: "kimi_linear",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(GGUF_BLOCK),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct KimiLinearConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// By layer: latent attention in place of the delta rule.
    pub attends: Vec<bool>,
    pub latent: LatentAttention,
    pub delta: DeltaAttention,
    pub experts: MoeLayer,
    /// Width of the experts that every token gets.
    pub shared: usize,
    /// By layer: experts in place of the plain feed-forward part.
    pub sparse: Vec<bool>,
    pub tied: bool,
}

const LINEAR: &str = "linear_attn_config";
const ROUTER: &str = "moe_router_activation_func";

impl KimiLinearConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<KimiLinearConfig, ConfigError> {
        fields.require_flag("mla_use_nope", true, "latent attention with positions")?;
        let sizes = LatentAttention::sizes(fields)?;
        let eps = fields.epsilon(&["rms_norm_eps"], 1e-5)?;
        let activation = ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?;
        let linear = fields.nested_object(LINEAR)?;
        let width = fields.size("moe_intermediate_size")?;
        let shared = fields.first_present(&["num_shared_experts", "n_shared_experts"]);
        Ok(KimiLinearConfig {
            intermediate: fields.size("intermediate_size")?,
            attends: attention_layers(fields, linear.as_ref(), sizes.layers)?,
            latent: LatentAttention::read(fields, sizes.heads)?,
            delta: DeltaAttention::read(fields, linear.as_ref(), eps)?,
            experts: MoeLayer {
                routing: read_routing(fields)?,
                intermediate: width,
                glu: Glu::Plain(activation),
                fused: fields.flag_or(FUSED_EXPERTS, false)?,
            },
            shared: width * fields.size_or(shared, 1)?,
            sparse: fields.sparse_layers(sizes.layers, 1)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            eps,
            activation,
            sizes,
        })
    }

    fn feed_forward(&self, net: &mut ModelBuilder, layer: usize, block: &str, x: ValueId) -> ValueId {
        if !self.sparse[layer] {
            let name = format!("{block}.mlp");
            return mlp::gated_by_name(net, x, &name, self.intermediate, false, self.activation);
        }
        let name = format!("{block}.block_sparse_moe");
        let parts = ["w1", "w3", "w2"];
        let shared = SharedExpert { width: self.shared, activation: self.activation };
        self.experts.apply_with_shared(net, x, &name, parts, true, &shared)
    }
}

/// Corrected sigmoids.
fn read_routing(fields: &ConfigFields) -> Result<ExpertRouter, ConfigError> {
    let scores = fields.get(ROUTER).and_then(Value::as_str).unwrap_or("sigmoid");
    if scores != "sigmoid" {
        return Err(fields.invalid_value(ROUTER, "sigmoid", &Value::from(scores)));
    }
    let count = ["num_experts", "num_local_experts"];
    let groups = fields.first_present(&["num_expert_group", "n_group"]);
    Ok(ExpertRouter {
        scoring: RouterScoring::Sigmoid,
        normalised: fields.flag_or(fields.first_present(&["moe_renormalize", "norm_topk_prob"]), true)?,
        sum_epsilon: 1e-20,
        scale: fields.float_or("routed_scaling_factor", 2.446)?,
        groups: ExpertGroups::read(fields, groups, fields.first_present(&count), 2)?,
        ..ExpertRouter::read(fields, &count)?
    })
}

/// Which layers have attention: `layer_types`, or lists in `linear_attn_config` that count from 1.
fn attention_layers(
    fields: &ConfigFields,
    linear: Option<&ConfigFields>,
    layers: usize,
) -> Result<Vec<bool>, ConfigError> {
    if fields.get("layer_types").is_some() {
        let kinds = fields.layer_kinds("layer_types", layers, &["linear_attention", "full_attention"])?;
        return Ok(kinds.into_iter().map(|kind| kind == 1).collect());
    }
    let Some(linear) = linear else {
        return Ok((0..layers).map(|layer| layer > 0 && layer.is_multiple_of(4)).collect());
    };
    let (full, delta) = (linear.token_ids("full_attn_layers")?, linear.token_ids("kda_layers")?);
    let of = |layer: usize| {
        let number = layer as u32 + 1;
        match (full.contains(&number), delta.contains(&number)) {
            (full, delta) if full != delta => Ok(full),
            _ => {
                let expected = format!("each of the layers 1 to {layers} here or in kda_layers");
                let found = linear.get("full_attn_layers").unwrap_or(&Value::Null);
                Err(linear.invalid_value("full_attn_layers", &expected, found))
            }
        }
    };
    (0..layers).map(of).collect()
}

impl Transformer for KimiLinearConfig {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let part = format!("{name}.self_attn");
        let h = match self.attends[layer] {
            true => self.latent.apply(net, layer, &part, h, LatentPositions::NONE),
            false => self.delta.apply(net, layer, &part, h),
        };
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let h = self.feed_forward(net, layer, &name, h);
        net.add_residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        true
    }

    /// The class of transformers has the gate of the decay as a part of its own, and experts where other layers have a
    /// feed-forward part; what it writes has the name of the experts for both.
    fn canonical_name(&self, stored_name: &str) -> String {
        let name = hugging_face_name(stored_name).replace(".self_attn.forget_gate.", ".self_attn.");
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        match layer.and_then(|layer: usize| self.sparse.get(layer)) {
            Some(true) => name.replace(".mlp.", ".block_sparse_moe."),
            Some(false) => name.replace(".block_sparse_moe.", ".mlp."),
            None => name,
        }
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "self_attn.kv_a_proj_with_mqa")?;
    t.record_fused_experts("block_sparse_moe.experts", "w1")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["num_experts"], "block_sparse_moe.gate.weight", 0, 1)?;
    t.record_axis_size(&["moe_intermediate_size"], "block_sparse_moe.experts.0.w1.weight", 0, 1)
}

/// Layers with a delta rule and layers with latent attention.
const GGUF_BLOCK: &[NameMapping] = &[
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", Same),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm", Same),
    ("attn_kv_b", "self_attn.kv_b_proj", Same),
    ("attn_k_b", "self_attn.k_b_proj", TransposedEach),
    ("attn_v_b", "self_attn.v_b_proj", Same),
    ("attn_q_a", "self_attn.q_a_proj", Same),
    ("attn_q_a_norm", "self_attn.q_a_layernorm", Same),
    ("attn_q_b", "self_attn.q_b_proj", Same),
    ("ssm_conv1d_q", "self_attn.q_conv1d", Matrix),
    ("ssm_conv1d_k", "self_attn.k_conv1d", Matrix),
    ("ssm_conv1d_v", "self_attn.v_conv1d", Matrix),
    ("ssm_f_a", "self_attn.f_a_proj", Same),
    ("ssm_f_b", "self_attn.f_b_proj", Same),
    ("ssm_g_a", "self_attn.g_a_proj", Same),
    ("ssm_g_b", "self_attn.g_b_proj", Same),
    ("ssm_beta", "self_attn.b_proj", Same),
    ("ssm_a", "self_attn.A_log", NegExp),
    ("ssm_dt.bias", "self_attn.dt_bias", Same),
    ("ssm_norm", "self_attn.o_norm", Same),
    ("ffn_gate_inp", "block_sparse_moe.gate", Same),
    ("exp_probs_b.bias", "block_sparse_moe.gate.e_score_correction_bias", Same),
    ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Experts),
    ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Experts),
    ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Experts),
    ("ffn_gate_shexp", "block_sparse_moe.shared_experts.gate_proj", Same),
    ("ffn_up_shexp", "block_sparse_moe.shared_experts.up_proj", Same),
    ("ffn_down_shexp", "block_sparse_moe.shared_experts.down_proj", Same),
];

/// Layers without latent attention have the delta rule, with as many heads.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.remove_fields(&["num_key_value_heads", "head_dim"]);
    let kinds = w.layer_kinds("attn_kv_a_mqa.weight", ["full_attention", "linear_attention"])?;
    w.set_field("layer_types", kinds);
    w.copy_latent_sizes()?;
    w.copy_number("attention.head_count", "linear_num_heads")?;
    w.copy_number("kda.head_dim", "linear_head_dim")?;
    w.copy_number("ssm.conv_kernel", "linear_conv_kernel_dim")?;
    w.copy_number("expert_count", "num_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_token")?;
    w.copy_number("expert_shared_count", "num_shared_experts")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")?;
    w.copy_number("leading_dense_block_count", "first_k_dense_replace")?;
    w.copy_float("expert_weights_scale", "routed_scaling_factor")
}
