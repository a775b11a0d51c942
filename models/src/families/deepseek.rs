//! DeepSeek V2 and V3 (DeepSeek-AI 2024; reference: `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM` of transformers) and what
//! shares their layers: Kimi K2, GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`). Queries, and keys and values, come from rows of a
//! low rank (latent attention); experts, some of them for every token, in all but the first layers.

use crate::checkpoint::gguf::TensorConversion::{Experts, Same, TransposedEach};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::latent_attention::{LatentAttention, LatentPositions};
use crate::layers::moe::{
    ExpertGroups, ExpertRouter, FUSED_EXPERTS, Glu, MoeLayer, RouterScoring, SharedExpert,
};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::query_temperature::QueryTemperature;
use crate::layers::rope::RopePairing;
use crate::layers::{ActivationFunction, Rope, RopeConfig, RopeDefaults, RopeTables, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::{Map, Value, json};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "deepseek_v2",
            classes: &["DeepseekV2ForCausalLM"],
            about: "DeepSeek V2 Lite",
            read: |fields| DeepSeekConfig::v2(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias first_k_dense_replace=0 head_dim hidden_act hidden_size \
                        intermediate_size kv_lora_rank max_position_embeddings=2048 \
                        moe_intermediate_size n_group n_routed_experts n_shared_experts=2 \
                        norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers \
                        num_key_value_heads q_lora_rank=1536 qk_nope_head_dim qk_rope_head_dim \
                        rms_norm_eps rope_parameters routed_scaling_factor tie_word_embeddings \
                        topk_group topk_method v_head_dim vocab_size",
                only: "mlp_bias=false",
                none: "qk_head_dim",
            },
        },
        FamilyVariant {
            model_type: "deepseek_v3",
            classes: &["DeepseekV3ForCausalLM"],
            about: "DeepSeek V3, R1",
            read: |fields| DeepSeekConfig::v3(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias first_k_dense_replace=3 head_dim hidden_act hidden_size \
                        intermediate_size kv_lora_rank max_position_embeddings moe_intermediate_size \
                        n_group=8 n_routed_experts n_shared_experts norm_topk_prob \
                        num_attention_heads num_experts_per_tok num_hidden_layers \
                        num_key_value_heads q_lora_rank=1536 qk_nope_head_dim qk_rope_head_dim \
                        rms_norm_eps rope_interleave rope_parameters routed_scaling_factor=2.5 \
                        tie_word_embeddings topk_group=4 v_head_dim vocab_size",
                none: "num_nextn_predict_layers qk_head_dim",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "kimi_k2",
            classes: &[],
            about: "Kimi K2",
            read: |fields| DeepSeekConfig::v3(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields::UNKNOWN,
        },
        FamilyVariant {
            model_type: "glm4_moe_lite",
            classes: &["Glm4MoeLiteForCausalLM"],
            about: "GLM-4.7-Flash",
            read: |fields| DeepSeekConfig::v3(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias hidden_act hidden_size intermediate_size kv_lora_rank \
                        max_position_embeddings=202752 mlp_layer_types moe_intermediate_size n_group \
                        n_routed_experts n_shared_experts norm_topk_prob num_attention_heads \
                        num_experts_per_tok num_hidden_layers num_key_value_heads q_lora_rank=768 \
                        qk_nope_head_dim qk_rope_head_dim rms_norm_eps=1e-05 rope_interleave \
                        rope_parameters routed_scaling_factor=1.8 tie_word_embeddings topk_group=1 \
                        v_head_dim vocab_size",
                none: "qk_head_dim",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "mistral4",
            classes: &["Mistral4ForCausalLM"],
            about: "Mistral Small 4, text only",
            read: |fields| DeepSeekConfig::mistral4(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "attention_bias first_k_dense_replace head_dim hidden_act hidden_size \
                        intermediate_size kv_lora_rank max_position_embeddings=1048576 \
                        moe_intermediate_size n_group n_routed_experts n_shared_experts \
                        norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers \
                        num_key_value_heads q_lora_rank=1024 qk_nope_head_dim qk_rope_head_dim \
                        rms_norm_eps rope_interleave \
                        rope_parameters={\"rope_theta\":10000.0,\"factor\":128.0,\"original_max_position_embeddings\":8192,\"beta_fast\":32.0,\"beta_slow\":1.0,\"mscale_all_dim\":1.0,\"mscale\":1.0,\"llama_4_scaling_beta\":0.1,\"rope_type\":\"yarn\"} \
                        routed_scaling_factor tie_word_embeddings topk_group=1 v_head_dim vocab_size",
                none: "qk_head_dim",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "deepseek2",
            model_type: "deepseek_v3",
            write_fields: gguf_fields,
            tensor_names: |files| {
                TensorNameMap::llama(if files.packed_experts { GGUF_PACKED_BLOCK } else { GGUF_BLOCK })
            },
            write_yarn: gguf_yarn,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "mistral4",
            model_type: "mistral4",
            write_fields: gguf_mistral4_fields,
            tensor_names: |files| {
                TensorNameMap::llama(if files.packed_experts { GGUF_PACKED_BLOCK } else { GGUF_BLOCK })
            },
            write_yarn: gguf_mistral4_yarn,
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct DeepSeekConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub latent: LatentAttention,
    pub experts: MoeLayer,
    /// Width of the experts that every token gets.
    pub shared: usize,
    /// The choice of experts is corrected by a learned bias.
    pub has_score_correction: bool,
    /// By layer: experts in place of the plain feed-forward part.
    pub sparse: Vec<bool>,
    pub query_temperature: Option<QueryTemperature>,
    pub tied: bool,
}

/// What depends on the positions of a call.
pub struct DeepSeekPositions {
    rope: RopeTables,
    query_scale: Option<ValueId>,
}

impl DeepSeekConfig {
    /// Version 2: softmax over all experts, in groups that are as good as their best one.
    pub fn v2(fields: &ConfigFields) -> Result<DeepSeekConfig, ConfigError> {
        let field = "topk_method";
        let groups = match fields.get(field).map(|method| (method, method.as_str())) {
            None | Some((_, Some("greedy"))) => None,
            Some((_, Some("group_limited_greedy"))) => {
                ExpertGroups::read(fields, "n_group", "n_routed_experts", 1)?
            }
            Some((other, _)) => {
                return Err(fields.invalid_value(field, "greedy or group_limited_greedy", other));
            }
        };
        let routing = ExpertRouter {
            groups,
            normalised: fields.flag_or("norm_topk_prob", false)?,
            ..ExpertRouter::read(fields, &["n_routed_experts"])?
        };
        DeepSeekConfig::read_common(fields, routing, false)
    }

    /// Version 3: corrected sigmoids, in groups that are as good as their two best ones.
    pub fn v3(fields: &ConfigFields) -> Result<DeepSeekConfig, ConfigError> {
        if let Some(method) = fields.get("topk_method").filter(|method| method.as_str() != Some("noaux_tc")) {
            return Err(fields.invalid_value("topk_method", "noaux_tc", method));
        }
        let routing = ExpertRouter {
            scoring: RouterScoring::Sigmoid,
            normalised: fields.flag_or("norm_topk_prob", true)?,
            sum_epsilon: 1e-20,
            groups: ExpertGroups::read(fields, "n_group", "n_routed_experts", 2)?,
            ..ExpertRouter::read(fields, &["n_routed_experts"])?
        };
        DeepSeekConfig::read_common(fields, routing, true)
    }

    /// Mistral 4: softmax over all experts, in groups; queries that grow with their position.
    pub fn mistral4(fields: &ConfigFields) -> Result<DeepSeekConfig, ConfigError> {
        let mut fields = fields.clone();
        // The share of a head that is turned, which the sizes of its two parts say too.
        if let Some(Value::Object(parameters)) = fields.raw.get_mut("rope_parameters") {
            parameters.remove("partial_rotary_factor");
        }
        let routing = ExpertRouter {
            normalised: fields.flag_or("norm_topk_prob", true)?,
            sum_epsilon: 1e-20,
            groups: ExpertGroups::read(&fields, "n_group", "n_routed_experts", 2)?,
            ..ExpertRouter::read(&fields, &["n_routed_experts"])?
        };
        let config = DeepSeekConfig::read_common(&fields, routing, false)?;
        let growth = match fields.nested_object("rope_parameters")? {
            Some(parameters) => Some(QueryTemperature::read(&parameters, config.sizes.context)?),
            None => return Err(fields.missing_field("rope_parameters", "an object")),
        };
        Ok(DeepSeekConfig {
            sparse: fields.sparse_layers(config.sizes.layers, 0)?,
            experts: MoeLayer { fused: fields.flag_or(FUSED_EXPERTS, true)?, ..config.experts },
            query_temperature: growth.filter(|growth| growth.beta > 0.0),
            ..config
        })
    }

    fn read_common(
        fields: &ConfigFields,
        routing: ExpertRouter,
        corrected: bool,
    ) -> Result<DeepSeekConfig, ConfigError> {
        let mut sizes = LatentAttention::sizes(fields)?;
        let latent = LatentAttention::read(fields, sizes.heads)?;
        let interleaved = fields.flag_or("rope_interleave", true)?;
        let pairs = if interleaved { RopePairing::Interleaved } else { RopePairing::Half };
        let rope = RopeConfig::read(
            fields,
            latent.rope_dim,
            sizes.context,
            RopeDefaults { pairs, ..RopeDefaults::LLAMA },
        )?;
        sizes.context = rope.context;
        let activation = ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?;
        let width = fields.size("moe_intermediate_size")?;
        let scale = fields.float_or("routed_scaling_factor", 1.0)?;
        let routing = ExpertRouter { scale, ..routing };
        Ok(DeepSeekConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation,
            rope: rope.rope,
            latent,
            experts: MoeLayer {
                routing,
                intermediate: width,
                glu: Glu::Plain(activation),
                fused: fields.flag_or(FUSED_EXPERTS, false)?,
            },
            shared: width * fields.size_or("n_shared_experts", 1)?,
            has_score_correction: corrected,
            sparse: fields.sparse_layers(sizes.layers, 1)?,
            query_temperature: None,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }

    fn feed_forward(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        if !self.sparse[layer] {
            return mlp::gated_by_name(net, x, name, self.intermediate, false, self.activation);
        }
        let parts = ["gate_proj", "up_proj", "down_proj"];
        let shared = SharedExpert { width: self.shared, activation: self.activation };
        self.experts.apply_with_shared(net, x, name, parts, self.has_score_correction, &shared)
    }
}

impl Transformer for DeepSeekConfig {
    type Shared = DeepSeekPositions;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), self.tied)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> DeepSeekPositions {
        let rope = self.rope.tables(net, "rope");
        let growth = self.query_temperature.as_ref();
        let query_scale = growth.map(|growth| net.for_sequences(|net| growth.factors(net)));
        DeepSeekPositions { rope, query_scale }
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        places: &DeepSeekPositions,
    ) -> ValueId {
        let name = format!("model.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let at = LatentPositions { rope: Some(&places.rope), query_scale: places.query_scale };
        let h = self.latent.apply(net, layer, &format!("{name}.self_attn"), h, at);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let h = self.feed_forward(net, layer, &format!("{name}.mlp"), h);
        net.add_residual(layer, "mlp", x, h)
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        self.query_temperature.as_ref().map(|_| "queries of this model grow with their position")
    }

    fn has_experts(&self) -> bool {
        true
    }

    /// A draft head is stored as layers after the last one.
    fn is_ignored(&self, name: &str) -> bool {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        let is_draft = layer.is_some_and(|layer: usize| layer >= self.sizes.layers);
        is_draft || self.tied && name == self.outer_layers().head
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_bias("attention_bias", "self_attn.kv_a_proj_with_mqa")?;
    t.record_fused_experts("mlp.experts", "gate_proj")?;
    t.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.gate_up_proj", 1, 2)
}

/// What layers with latent attention have but for their experts.
macro_rules! gguf_block {
    ($($entry:expr,)*) => {
        &[
            $($entry,)*
            ("attn_q_a", "self_attn.q_a_proj", Same),
            ("attn_q_a_norm", "self_attn.q_a_layernorm", Same),
            ("attn_q_b", "self_attn.q_b_proj", Same),
            ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", Same),
            ("attn_kv_a_norm", "self_attn.kv_a_layernorm", Same),
            ("attn_kv_b", "self_attn.kv_b_proj", Same),
            ("attn_k_b", "self_attn.k_b_proj", TransposedEach),
            ("attn_v_b", "self_attn.v_b_proj", Same),
            ("ffn_gate_inp", "mlp.gate", Same),
            ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", Same),
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj", Same),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj", Same),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj", Same),
        ]
    };
}

const GGUF_BLOCK: &[NameMapping] = gguf_block![
    ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
    ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
    ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
];

/// The same with the experts' gates and inner projections in one tensor.
const GGUF_PACKED_BLOCK: &[NameMapping] = gguf_block![
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj", Same),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", Same),
];

/// `expert_gating_func` of sigmoids.
const SIGMOID: u64 = 2;

/// DeepSeek V2 and V3, told apart by how they weigh experts.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let sigmoids = match w.number("expert_gating_func")? {
        Some(function) => function == SIGMOID,
        None => w.has_in_any_layer("exp_probs_b.bias"),
    };
    w.set_field("model_type", if sigmoids { "deepseek_v3" } else { "deepseek_v2" });
    gguf_latent_fields(w, None)
}

fn gguf_mistral4_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let fused = w.has_in_any_layer("ffn_gate_up_exps.weight");
    gguf_latent_fields(w, Some(fused))
}

/// What both have; `fused_experts` is said of one of them.
fn gguf_latent_fields(w: &mut ConfigFieldWriter<'_>, fused_experts: Option<bool>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    // Attention is written for the absorbed form, in which all heads have one key.
    w.remove_fields(&["num_key_value_heads", "head_dim"]);
    if let Some(fused) = fused_experts {
        w.set_field("fused_experts", fused);
    }
    w.copy_latent_sizes()?;
    w.copy_number("expert_count", "n_routed_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_tok")?;
    w.copy_number("expert_shared_count", "n_shared_experts")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")?;
    w.copy_number("expert_group_count", "n_group")?;
    w.copy_number("expert_group_used_count", "topk_group")?;
    w.copy_number("leading_dense_block_count", "first_k_dense_replace")?;
    w.copy_expert_scaling()
}

fn gguf_yarn(w: &mut ConfigFieldWriter<'_>, fields: &mut Map<String, Value>) -> FieldResult {
    // A tenth of what the others have there.
    if let Some(tenth) = w.float("rope.scaling.yarn_log_multiplier")? {
        fields.insert("mscale".to_string(), json!(10.0 * tenth));
        fields.insert("mscale_all_dim".to_string(), json!(10.0 * tenth));
    }
    Ok(())
}

fn gguf_mistral4_yarn(w: &mut ConfigFieldWriter<'_>, fields: &mut Map<String, Value>) -> FieldResult {
    gguf_yarn(w, fields)?;
    // As published, where a file does not say it.
    w.set_rope_parameters(fields, 1e4, 0.1)
}
