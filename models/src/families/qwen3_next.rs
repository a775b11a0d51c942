//! Qwen3-Next and Qwen 3.5 (Qwen Team 2025, 2026; reference: `Qwen3NextForCausalLM`, `Qwen3_5ForConditionalGeneration`,
//! `Qwen3_5MoeForConditionalGeneration` of transformers): three of four layers have a gated delta rule (Yang et al. 2025)
//! after a short convolution, the others attention with an output gate; experts with a shared one in all layers, or none.

mod delta_net;

use crate::checkpoint::gguf::TensorConversion::{
    Experts, HalvesByKeyHead, NegExp, PlusOne, Same, ValueHeads,
};
use crate::checkpoint::gguf::{
    ConfigFieldWriter, FieldResult, GEMMA_TOP, GgufArchitecture, NameMapping, TensorNameMap, ValueHeadAxis,
};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::{ExpertNames, ExpertStorage, FUSED_EXPERTS, MoeLayer};
use crate::layers::norm::{Norm, rms_norm_plus_one};
use crate::layers::{
    ActivationFunction, AttentionVariant, LinearLayer, Rope, RopeConfig, RopeDefaults, RopeTables,
    SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
pub use delta_net::{DeltaNet, ProjectionLayout};
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::RowBlocks;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "qwen3_next",
            classes: &["Qwen3NextForCausalLM"],
            about: "Qwen3-Next",
            read: |fields| Qwen3NextConfig::next(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias decoder_sparse_step head_dim hidden_act hidden_size \
                        intermediate_size layer_types linear_conv_kernel_dim linear_key_head_dim \
                        linear_num_key_heads linear_num_value_heads linear_value_head_dim \
                        max_position_embeddings mlp_only_layers moe_intermediate_size norm_topk_prob \
                        num_attention_heads num_experts num_experts_per_tok num_hidden_layers \
                        num_key_value_heads=2 rms_norm_eps rope_parameters \
                        shared_expert_intermediate_size tie_word_embeddings vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "qwen3_5",
            classes: &["Qwen3_5ForConditionalGeneration"],
            about: "Qwen 3.5, text only",
            read: |fields| Qwen3NextConfig::dense(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "tie_word_embeddings",
                none: "image_token_id video_token_id vision_end_token_id vision_start_token_id",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "qwen3_5_text",
            classes: &["Qwen3_5ForCausalLM"],
            about: "Qwen 3.5",
            read: |fields| Qwen3NextConfig::dense(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias head_dim hidden_act hidden_size intermediate_size=12288 \
                        layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads \
                        linear_num_value_heads linear_value_head_dim max_position_embeddings \
                        num_attention_heads num_hidden_layers num_key_value_heads=4 rms_norm_eps \
                        rope_parameters tie_word_embeddings vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "qwen3_5_moe",
            classes: &["Qwen3_5MoeForConditionalGeneration"],
            about: "Qwen 3.5 with experts, text only",
            read: |fields| Qwen3NextConfig::moe(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "tie_word_embeddings",
                none: "image_token_id video_token_id vision_end_token_id vision_start_token_id",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "qwen3_5_moe_text",
            classes: &["Qwen3_5MoeForCausalLM"],
            about: "Qwen 3.5 with experts",
            read: |fields| Qwen3NextConfig::moe(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias head_dim hidden_act hidden_size layer_types \
                        linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads \
                        linear_num_value_heads linear_value_head_dim max_position_embeddings \
                        moe_intermediate_size num_attention_heads num_experts num_experts_per_tok \
                        num_hidden_layers num_key_value_heads=2 rms_norm_eps rope_parameters \
                        shared_expert_intermediate_size tie_word_embeddings vocab_size",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "qwen35",
            model_type: "qwen3_5_text",
            write_fields: gguf_fields,
            tensor_names: |_| TensorNameMap { top: GEMMA_TOP, ..TensorNameMap::llama(GGUF_QWEN35_BLOCK) },
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "qwen35moe",
            model_type: "qwen3_5_moe_text",
            write_fields: gguf_fields,
            tensor_names: |_| TensorNameMap { top: GEMMA_TOP, ..TensorNameMap::llama(GGUF_QWEN35_BLOCK) },
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "qwen3next",
            model_type: "qwen3_5_moe_text",
            write_fields: gguf_next_fields,
            tensor_names: |files| TensorNameMap {
                top: GEMMA_TOP,
                ..TensorNameMap::llama(if files.fused_qkvz { GGUF_FUSED_BLOCK } else { GGUF_NEXT_BLOCK })
            },
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3NextConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub bias: bool,
    /// By layer: attention in place of the delta rule.
    pub attends: Vec<bool>,
    pub delta_net: DeltaNet,
    pub sparse_moe: Option<SparseMoeBlock>,
    pub tied: bool,
}

/// Experts, and one beside them that every token gets, with a gate of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct SparseMoeBlock {
    pub experts: MoeLayer,
    /// Width of the shared expert.
    pub shared: usize,
    /// By layer: experts in place of the plain feed-forward part.
    pub sparse: Vec<bool>,
}

/// One layer of this many has attention, where the file does not say otherwise.
const INTERVAL: usize = 4;

impl Qwen3NextConfig {
    /// Projections of the delta rule are fused by key head, experts are stored one by one.
    pub fn next(fields: &ConfigFields) -> Result<Qwen3NextConfig, ConfigError> {
        let config = Qwen3NextConfig::read_common(fields, ProjectionLayout::ByKeyHead)?;
        let normalised = fields.flag_or("norm_topk_prob", true)?;
        let mixture = SparseMoeBlock::read(fields, config.sizes.layers, normalised, false)?;
        Ok(Qwen3NextConfig { sparse_moe: Some(mixture), ..config })
    }

    /// Qwen 3.5 without experts.
    pub fn dense(fields: &ConfigFields) -> Result<Qwen3NextConfig, ConfigError> {
        Qwen3NextConfig::read_common(fields, ProjectionLayout::Joined)
    }

    /// Qwen 3.5 with experts.
    pub fn moe(fields: &ConfigFields) -> Result<Qwen3NextConfig, ConfigError> {
        let config = Qwen3NextConfig::read_common(fields, ProjectionLayout::Joined)?;
        let mixture = SparseMoeBlock::read(fields, config.sizes.layers, true, true)?;
        Ok(Qwen3NextConfig { sparse_moe: Some(mixture), ..config })
    }

    fn read_common(fields: &ConfigFields, form: ProjectionLayout) -> Result<Qwen3NextConfig, ConfigError> {
        fields.require_flag("attn_output_gate", true, "attention without an output gate")?;
        let mut sizes = ModelSizes::read_sized(fields, Some(32768), Some(256))?;
        let defaults = RopeDefaults { share: 0.25, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        let eps = fields.epsilon(&["rms_norm_eps"], 1e-6)?;
        Ok(Qwen3NextConfig {
            // Files of models with experts may leave it out.
            intermediate: fields.size_or("intermediate_size", 5632)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            bias: fields.flag_or("attention_bias", false)?,
            attends: attention_layers(fields, sizes.layers)?,
            delta_net: DeltaNet::read(fields, eps, form)?,
            sparse_moe: None,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            eps,
            sizes,
        })
    }

    /// Attention whose output is multiplied by the sigmoid of a gate, which is stored with the queries, head by head.
    fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        rope: &RopeTables,
    ) -> ValueId {
        let (sizes, size, heads) = (&self.sizes, self.sizes.head_size, self.sizes.heads);
        let fused = format!("{name}.q_proj");
        let half = |which: &'static str, start: usize| {
            let rows = RowBlocks { start, len: size, stride: 2 * size, count: heads, of: 2 * size * heads };
            LinearLayer::new(&fused, 2 * sizes.query_width()).bias(self.bias).with_part(which, rows)
        };
        let (q, gate) = (half("query", 0).apply(net, x), half("gate", size).apply(net, x));
        let project = |net: &mut ModelBuilder, which: &str, x, out| {
            LinearLayer::new(&format!("{name}.{which}"), out).bias(self.bias).apply(net, x)
        };
        let k = project(net, "k_proj", x, sizes.key_width());
        let v = project(net, "v_proj", x, sizes.key_width());
        let attention = SelfAttention {
            head_norm: Some((rms_norm_plus_one, self.eps)),
            ..SelfAttention::new(name, rope, AttentionVariant::causal(size))
        };
        let h = attention.attend(net, layer, sizes, [q, k, v]);
        let open = net.sigmoid(gate);
        let h = net.mul(h, open);
        project(net, "o_proj", h, sizes.hidden)
    }

    fn feed_forward(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        match &self.sparse_moe {
            Some(mixture) if mixture.sparse[layer] => mixture.apply(net, name, x, self.activation),
            _ => mlp::gated_by_name(net, x, name, self.intermediate, false, self.activation),
        }
    }
}

/// Which layers have attention and not the delta rule: `layer_types`, or every so many-th.
pub fn attention_layers(fields: &ConfigFields, layers: usize) -> Result<Vec<bool>, ConfigError> {
    if fields.get("layer_types").is_some() {
        let kinds = fields.layer_kinds("layer_types", layers, &["linear_attention", "full_attention"])?;
        return Ok(kinds.into_iter().map(|kind| kind == 1).collect());
    }
    let interval = fields.size_or("full_attention_interval", INTERVAL)?;
    Ok((1..=layers).map(|number| number.is_multiple_of(interval)).collect())
}

impl SparseMoeBlock {
    fn read(
        fields: &ConfigFields,
        layers: usize,
        normalised: bool,
        fused: bool,
    ) -> Result<SparseMoeBlock, ConfigError> {
        let width = fields.size("moe_intermediate_size")?;
        let experts = MoeLayer::read(fields, &["num_experts"], width, normalised)?;
        let experts = MoeLayer { fused: fields.flag_or(FUSED_EXPERTS, fused)?, ..experts };
        let (step, dense) = (fields.size_or("decoder_sparse_step", 1)?, fields.token_ids("mlp_only_layers")?);
        let is_sparse = |layer: usize| !dense.contains(&(layer as u32)) && (layer + 1).is_multiple_of(step);
        let sparse = (0..layers).map(is_sparse).collect();
        Ok(SparseMoeBlock { experts, shared: fields.size("shared_expert_intermediate_size")?, sparse })
    }

    fn apply(
        &self,
        net: &mut ModelBuilder,
        name: &str,
        x: ValueId,
        activation: ActivationFunction,
    ) -> ValueId {
        let (router, inside) = (format!("{name}.gate"), format!("{name}.experts"));
        let stored = ExpertStorage::Single { experts: &inside, parts: ["gate_proj", "up_proj", "down_proj"] };
        let h = self.experts.apply(
            net,
            x,
            &ExpertNames { router: &router, correction: None, expert_scale: None, storage: stored },
        );
        let shared = format!("{name}.shared_expert");
        let shared = mlp::gated_by_name(net, x, &shared, self.shared, false, activation);
        let gate = LinearLayer::new(&format!("{name}.shared_expert_gate"), 1).unquantized().apply(net, x);
        let open = net.sigmoid(gate);
        let shared = net.mul(shared, open);
        net.add(h, shared)
    }
}

impl Transformer for Qwen3NextConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::RmsPlusOne(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm_plus_one(net, x, &format!("{name}.input_layernorm"), self.eps);
        let h = match self.attends[layer] {
            true => self.attention(net, layer, &format!("{name}.self_attn"), h, rope),
            false => self.delta_net.apply(net, layer, &format!("{name}.linear_attn"), h),
        };
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm_plus_one(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let h = self.feed_forward(net, layer, &format!("{name}.mlp"), h);
        net.add_residual(layer, "mlp", x, h)
    }

    fn has_experts(&self) -> bool {
        self.sparse_moe.is_some()
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "self_attn.q_proj")?;
    t.record_fused_experts("mlp.experts", "gate_proj")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_hybrid_heads("self_attn.q_norm.weight")?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.gate_up_proj", 1, 2)?;
    let shared = "mlp.shared_expert.gate_proj.weight";
    t.record_axis_size(&["shared_expert_intermediate_size"], shared, 0, 1)?;
    t.record_axis_size(&["num_experts"], "mlp.gate.weight", 0, 1)?;
    t.record_axis_size(&["linear_num_value_heads"], "linear_attn.A_log", 0, 1)?;
    t.record_axis_size(&["linear_value_head_dim"], "linear_attn.norm.weight", 0, 1)
}

/// What Qwen3-Next and Qwen 3.5 have alike.
macro_rules! gguf_block {
    ($($entry:expr,)*) => {
        &[
            $($entry,)*
            ("attn_norm", "input_layernorm", PlusOne),
            ("post_attention_norm", "post_attention_layernorm", PlusOne),
            ("attn_q_norm", "self_attn.q_norm", PlusOne),
            ("attn_k_norm", "self_attn.k_norm", PlusOne),
            ("ssm_norm", "linear_attn.norm", Same),
            ("ffn_gate_inp", "mlp.gate", Same),
            ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
            ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
            ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj", Same),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj", Same),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj", Same),
            ("ffn_gate_inp_shexp", "mlp.shared_expert_gate", Same),
        ]
    };
}

/// Value heads stand in another order than that of the key heads.
const GGUF_QWEN35_BLOCK: &[NameMapping] = gguf_block![
    ("attn_qkv", "linear_attn.in_proj_qkv", ValueHeads(ValueHeadAxis::RowsAfterKeys)),
    ("attn_gate", "linear_attn.in_proj_z", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_beta", "linear_attn.in_proj_b", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_alpha", "linear_attn.in_proj_a", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_conv1d", "linear_attn.conv1d", ValueHeads(ValueHeadAxis::RowsAfterKeys)),
    ("ssm_dt.bias", "linear_attn.dt_bias", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_a", "linear_attn.A_log", ValueHeads(ValueHeadAxis::Decays)),
    ("ssm_out", "linear_attn.out_proj", ValueHeads(ValueHeadAxis::Columns)),
];

/// As converted since the fused projection is taken apart; what decides on beta and decay stands by key head.
const GGUF_NEXT_BLOCK: &[NameMapping] = gguf_block![
    ("attn_qkv", "linear_attn.in_proj_qkv", Same),
    ("attn_gate", "linear_attn.in_proj_z", Same),
    ("ssm_ba.weight", "linear_attn.in_proj_{e}.weight", HalvesByKeyHead(["b", "a"])),
    ("ssm_conv1d", "linear_attn.conv1d", Same),
    ("ssm_dt.bias", "linear_attn.dt_bias", Same),
    ("ssm_a", "linear_attn.A_log", NegExp),
    ("ssm_out", "linear_attn.out_proj", Same),
];

/// As the first converter left it.
const GGUF_FUSED_BLOCK: &[NameMapping] = gguf_block![
    ("ssm_in", "linear_attn.in_proj_qkvz", Same),
    ("ssm_ba", "linear_attn.in_proj_ba", Same),
    ("ssm_conv1d", "linear_attn.conv1d", Same),
    ("ssm_dt.bias", "linear_attn.dt_bias", Same),
    ("ssm_a", "linear_attn.A_log", NegExp),
    ("ssm_out", "linear_attn.out_proj", Same),
];

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("fused_experts", false);
    w.set_field("attention_bias", w.has_in_any_layer("attn_q.bias"));
    w.set_field("layer_types", w.layer_kinds("attn_q.weight", ["full_attention", "linear_attention"])?);
    w.copy_number("ssm.conv_kernel", "linear_conv_kernel_dim")?;
    w.copy_number("ssm.state_size", "linear_key_head_dim")?;
    w.copy_number("ssm.group_count", "linear_num_key_heads")?;
    w.copy_number("ssm.time_step_rank", "linear_num_value_heads")?;
    w.set_field("linear_value_head_dim", w.quotient("ssm.inner_size", "ssm.time_step_rank")?);
    w.copy_experts(["num_experts", "moe_intermediate_size"])?;
    w.copy_number("expert_shared_feed_forward_length", "shared_expert_intermediate_size")?;
    w.copy_partial_rotary("partial_rotary_factor")
}

/// Files of Qwen3-Next whose fused projection was taken apart are the same as those of Qwen 3.5.
fn gguf_next_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    if w.has_tensor("blk.0.ssm_in.weight") {
        w.set_field("model_type", "qwen3_next");
    }
    gguf_fields(w)
}
