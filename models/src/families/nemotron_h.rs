//! Nemotron-H and Nemotron 3 (NVIDIA 2025; reference: `NemotronHForCausalLM` of transformers): each layer is one part after a norm:
//! Mamba 2, attention without positions, a feed-forward part with squared ReLU, or experts of that kind with a shared one.

use crate::checkpoint::gguf::TensorConversion::{Experts, Flat, KeyHeads, NegExp, QueryHeads, Same};
use crate::checkpoint::gguf::{
    BACKBONE_TOP, ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap,
};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::{HEAD_SIZE, HEADS, KV_HEADS};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::mamba2::Mamba2;
use crate::layers::moe::{
    ExpertGroups, ExpertNames, ExpertRouter, ExpertStorage, FUSED_EXPERTS, Glu, MoeLayer, RouterScoring,
};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{ActivationFunction, AttentionVariant, LinearLayer, SelfAttention, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "nemotron_h",
        classes: &["NemotronHForCausalLM"],
        about: "Nemotron-H, Nemotron 3",
        read: |fields| NemotronHConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias conv_kernel head_dim=128 hidden_size intermediate_size \
                        layer_norm_epsilon layers_block_type mamba_head_dim mamba_hidden_act \
                        mamba_num_heads max_position_embeddings mlp_bias mlp_hidden_act \
                        moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size \
                        n_group n_groups n_routed_experts n_shared_experts norm_topk_prob \
                        num_attention_heads num_experts_per_tok num_key_value_heads=8 \
                        routed_scaling_factor ssm_state_size tie_word_embeddings time_step_limit \
                        time_step_min topk_group=1 use_bias use_conv_bias vocab_size",
            only: "sliding_window=null",
            none: "chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype \
                        moe_shared_expert_overlap mtp_layers_block_type num_logits_to_keep \
                        num_nextn_predict_layers rescale_prenorm_residual residual_in_fp32 \
                        time_step_floor time_step_max use_mamba_kernels",
        },
    }],
    gguf: &[
        GgufArchitecture {
            name: "nemotron_h",
            model_type: "nemotron_h",
            write_fields: gguf_fields,
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "nemotron_h_moe",
            model_type: "nemotron_h",
            write_fields: gguf_fields,
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct NemotronHConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub parts: Vec<HybridBlock>,
    /// `None` where no layer is of that kind.
    pub mixer: Option<Mamba2>,
    pub experts: Option<MoeLayer>,
    /// Width of what the experts take and give, where it is not that of the rows.
    pub latent: Option<usize>,
    /// Width of the shared expert.
    pub shared: usize,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub tied: bool,
}

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HybridBlock {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

impl HybridBlock {
    /// Letter of `hybrid_override_pattern`, and name in `layers_block_type` of newer files.
    const KINDS: [(HybridBlock, char, &'static str); 4] = [
        (HybridBlock::Mamba, 'M', "mamba"),
        (HybridBlock::Attention, '*', "attention"),
        (HybridBlock::Mlp, '-', "mlp"),
        (HybridBlock::Experts, 'E', "moe"),
    ];

    fn read(fields: &ConfigFields, layers: usize) -> Result<Vec<HybridBlock>, ConfigError> {
        let (list, pattern) = ("layers_block_type", "hybrid_override_pattern");
        if fields.get(list).is_some() {
            let kinds = fields.layer_kinds(list, layers, &HybridBlock::KINDS.map(|(_, _, name)| name))?;
            return Ok(kinds.into_iter().map(|kind| HybridBlock::KINDS[kind].0).collect());
        }
        if fields.get(pattern).is_none() {
            return Err(fields.missing_field(list, "a list of kinds of layers"));
        }
        let letters = fields.string(pattern)?;
        let part =
            |letter| HybridBlock::KINDS.iter().find(|(_, known, _)| *known == letter).map(|(part, ..)| *part);
        let parts: Option<Vec<HybridBlock>> = letters.chars().map(part).collect();
        parts.filter(|parts| parts.len() == layers).ok_or_else(|| {
            let expected = format!("{layers} letters of M, *, - and E");
            fields.invalid_value(pattern, &expected, &Value::from(letters))
        })
    }
}

impl NemotronHConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<NemotronHConfig, ConfigError> {
        let sizes = ModelSizes::read(fields, Some(4096))?;
        let eps = fields.epsilon(&["layer_norm_epsilon", "norm_eps"], 1e-5)?;
        let parts = HybridBlock::read(fields, sizes.layers)?;
        let names = [
            "mamba_num_heads",
            "mamba_head_dim",
            "n_groups",
            "ssm_state_size",
            "conv_kernel",
            "use_conv_bias",
            "use_bias",
        ];
        let mixer = match parts.contains(&HybridBlock::Mamba) {
            true => {
                let conv_activation =
                    ActivationFunction::read(fields, &["mamba_hidden_act"], ActivationFunction::Silu)?;
                let time_steps = (shortest_time_step(fields)?, f64::INFINITY);
                Some(Mamba2 { conv_activation, time_steps, ..Mamba2::read(fields, names, eps)? })
            }
            false => None,
        };
        let activation =
            ActivationFunction::read(fields, &["mlp_hidden_act"], ActivationFunction::ReluSquared)?;
        let experts = match parts.contains(&HybridBlock::Experts) {
            true => Some(read_experts(fields, activation)?),
            false => None,
        };
        Ok(NemotronHConfig {
            intermediate: fields.size("intermediate_size")?,
            eps,
            activation,
            parts,
            mixer,
            shared: match experts {
                Some(_) => fields.size("moe_shared_expert_intermediate_size")?,
                None => 0,
            },
            latent: match fields.get("moe_latent_size").filter(|_| experts.is_some()) {
                Some(_) => Some(fields.size("moe_latent_size")?),
                None => None,
            },
            experts,
            attention_bias: fields.flag_or("attention_bias", false)?,
            mlp_bias: fields.flag_or("mlp_bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn attention(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        SelfAttention {
            name,
            output: "o_proj",
            qkv_bias: self.attention_bias,
            output_bias: self.attention_bias,
            head_norm: None,
            query_scale: None,
            rope: None,
            attention: AttentionVariant::causal(self.sizes.head_size),
        }
        .apply(net, layer, &self.sizes, x)
    }

    fn plain_mlp(&self, net: &mut ModelBuilder, name: &str, x: ValueId, width: usize) -> ValueId {
        let (up, down) = (format!("{name}.up_proj"), format!("{name}.down_proj"));
        let up = LinearLayer::new(&up, width).bias(self.mlp_bias);
        let down = LinearLayer::new(&down, self.sizes.hidden).bias(self.mlp_bias);
        mlp::ungated(net, x, up, down, self.activation)
    }

    fn expert_mlp(&self, net: &mut ModelBuilder, experts: &MoeLayer, name: &str, x: ValueId) -> ValueId {
        let (router, inside) = (format!("{name}.gate"), format!("{name}.experts"));
        let correction = format!("{router}.e_score_correction_bias");
        let stored = ExpertStorage::Single { experts: &inside, parts: ["", "up_proj", "down_proj"] };
        let names = ExpertNames {
            router: &router,
            correction: Some(&correction),
            expert_scale: None,
            storage: stored,
        };
        let layer = |part: &str| format!("{name}.{part}");
        let inner = match self.latent {
            Some(width) => {
                LinearLayer::new(&layer("fc1_latent_proj"), width).bias(self.mlp_bias).apply(net, x)
            }
            None => x,
        };
        let mut h = experts.apply_routed(net, x, inner, &names);
        if self.latent.is_some() {
            let back = layer("fc2_latent_proj");
            h = LinearLayer::new(&back, self.sizes.hidden).bias(self.mlp_bias).apply(net, h);
        }
        let shared = self.plain_mlp(net, &format!("{name}.shared_experts"), x, self.shared);
        net.add(h, shared)
    }
}

/// `time_step_min`, below which the reference has no time step; it has no longest one, whatever `time_step_limit` says.
fn shortest_time_step(fields: &ConfigFields) -> Result<f64, ConfigError> {
    let (field, limit) = ("time_step_min", "time_step_limit");
    if let Some(found) = fields.get(limit)
        && !matches!(fields.numbers(limit)?[..], [0.0, f64::MAX])
    {
        return Err(fields.invalid_value(limit, "[0.0, Infinity]: others are not supported", found));
    }
    match fields.float_or(field, 0.001)? {
        step if step >= 0.0 && step.is_finite() => Ok(step),
        step => Err(fields.invalid_value(field, "a number of at least 0", &Value::from(step))),
    }
}

fn read_experts(fields: &ConfigFields, activation: ActivationFunction) -> Result<MoeLayer, ConfigError> {
    let shared = fields.size_or("n_shared_experts", 1)?;
    if shared != 1 {
        return Err(fields.invalid_value("n_shared_experts", "1: others are not read", &Value::from(shared)));
    }
    let routing = ExpertRouter {
        scoring: RouterScoring::Sigmoid,
        normalised: fields.flag_or("norm_topk_prob", true)?,
        sum_epsilon: 1e-20,
        scale: fields.float_or("routed_scaling_factor", 1.0)?,
        groups: ExpertGroups::read(fields, "n_group", "n_routed_experts", 2)?,
        ..ExpertRouter::read(fields, &["n_routed_experts"])?
    };
    Ok(MoeLayer {
        routing,
        intermediate: fields.size("moe_intermediate_size")?,
        glu: Glu::Ungated(activation),
        fused: fields.flag_or(FUSED_EXPERTS, false)?,
    })
}

impl Transformer for NemotronHConfig {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = (Norm::Rms(self.eps), "backbone.norm_f");
        OuterLayers::with_names("backbone.embeddings.weight", norm, "lm_head.weight", self.tied)
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let name = format!("backbone.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.norm"), self.eps);
        let name = format!("{name}.mixer");
        let h = match (self.parts[layer], &self.mixer, &self.experts) {
            (HybridBlock::Mamba, Some(mixer), _) => mixer.apply(net, layer, &name, h),
            (HybridBlock::Experts, _, Some(experts)) => self.expert_mlp(net, experts, &name, h),
            (HybridBlock::Attention, ..) => self.attention(net, layer, &name, h),
            _ => self.plain_mlp(net, &name, h, self.intermediate),
        };
        net.add_residual(layer, "mixer", x, h)
    }

    fn has_cache(&self) -> bool {
        self.parts.contains(&HybridBlock::Attention)
    }

    fn has_experts(&self) -> bool {
        self.experts.is_some()
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "backbone.", &["embeddings.", "layers.", "norm_f."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "mixer.q_proj")?;
    t.record_fused_experts("mixer.experts", "up_proj")?;
    t.record_embedding("embeddings.weight", "lm_head.weight", false)?;
    let Some(heads) = t.known_size(&HEADS) else { return Ok(()) };
    t.record_axis_size(&HEAD_SIZE, "mixer.q_proj.weight", 0, heads)?;
    if let Some(size) = t.known_size(&HEAD_SIZE) {
        t.record_axis_size(&KV_HEADS, "mixer.k_proj.weight", 0, size)?;
    }
    t.record_axis_size(&["moe_intermediate_size"], "mixer.experts.0.up_proj.weight", 0, 1)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: BACKBONE_TOP,
    layers: "backbone.layers",
    block: &[
        ("attn_norm", "norm", Same),
        ("ssm_in", "mixer.in_proj", Same),
        ("ssm_conv1d", "mixer.conv1d", Same),
        ("ssm_dt.bias", "mixer.dt_bias", Same),
        ("ssm_a", "mixer.A_log", NegExp),
        ("ssm_d", "mixer.D", Flat),
        ("ssm_norm", "mixer.norm", Flat),
        ("ssm_out", "mixer.out_proj", Same),
        ("attn_q", "mixer.q_proj", QueryHeads),
        ("attn_k", "mixer.k_proj", KeyHeads),
        ("attn_v", "mixer.v_proj", Same),
        ("attn_output", "mixer.o_proj", Same),
        ("ffn_up", "mixer.up_proj", Same),
        ("ffn_down", "mixer.down_proj", Same),
        ("ffn_gate_inp", "mixer.gate", Same),
        ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", Same),
        ("ffn_up_exps", "mixer.experts.{e}.up_proj", Experts),
        ("ffn_down_exps", "mixer.experts.{e}.down_proj", Experts),
        ("ffn_up_shexp", "mixer.shared_experts.up_proj", Same),
        ("ffn_down_shexp", "mixer.shared_experts.down_proj", Same),
    ],
    llama_block: false,
};

/// What a layer is shows in its tensors.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let kind = |layer: u64| {
        let has = |part: &str| w.has_tensor(&format!("blk.{layer}.{part}.weight"));
        match (has("ssm_in"), has("attn_q"), has("ffn_gate_inp")) {
            (true, ..) => "mamba",
            (_, true, _) => "attention",
            (.., true) => "moe",
            _ => "mlp",
        }
    };
    let kinds: Vec<&str> = (0..w.bounded_layer_count()?).map(kind).collect();
    w.set_field("layers_block_type", kinds);
    w.copy_mamba2([
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        "use_conv_bias",
        "use_bias",
    ])?;
    // llama.cpp has no shortest time step.
    w.set_field("time_step_min", 0.0);
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")?;
    if let Some(width) = w.rows_in_any_layer("ffn_up.weight") {
        w.set_field("intermediate_size", width);
    }
    w.set_field("attention_bias", w.has_in_any_layer("attn_q.bias"));
    w.set_field("mlp_bias", w.has_in_any_layer("ffn_up.bias"));
    w.copy_experts(["n_routed_experts", "moe_intermediate_size"])?;
    w.copy_number("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size")?;
    w.copy_number("expert_shared_count", "n_shared_experts")?;
    w.copy_number("expert_group_count", "n_group")?;
    w.copy_number("moe_latent_size", "moe_latent_size")?;
    w.copy_expert_scaling()
}
