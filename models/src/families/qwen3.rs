//! Qwen 3 (Yang et al. 2025; reference: `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` of transformers): the Llama block
//! with norms on the heads of queries and keys, and with experts in place of the feed-forward part in some or all layers.

use crate::checkpoint::gguf::TensorConversion::{Experts, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::qwen2;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::moe::{ExpertNames, ExpertStorage, MoeLayer};
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{ActivationFunction, AttentionVariant, Rope, RopeTables, SelfAttention, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "qwen3",
            classes: &["Qwen3ForCausalLM"],
            about: "Qwen 3",
            read: |fields| Qwen3Config::dense(fields).map(Architecture::new),
            infer: infer_fields,
        },
        FamilyVariant {
            model_type: "qwen3_moe",
            classes: &["Qwen3MoeForCausalLM"],
            about: "Qwen 3 with experts",
            read: |fields| Qwen3Config::moe(fields).map(Architecture::new),
            infer: infer_fields,
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "qwen3",
            model_type: "qwen3",
            write_fields: gguf_fields,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "qwen3moe",
            model_type: "qwen3_moe",
            write_fields: gguf_moe_fields,
            tensor_names: |_| {
                TensorNameMap::llama(&[
                    ("ffn_gate_inp", "mlp.gate", Same),
                    ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
                    ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
                    ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
                ])
            },
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub windows: Vec<Option<usize>>,
    pub bias: bool,
    pub tied: bool,
    pub experts: Option<MoeLayer>,
    /// By layer: experts in place of the plain feed-forward part.
    pub sparse: Vec<bool>,
}

impl Qwen3Config {
    pub fn dense(fields: &ConfigFields) -> Result<Qwen3Config, ConfigError> {
        Qwen3Config::read_common(fields, ModelSizes::read_sized(fields, Some(32768), Some(128))?)
    }

    fn read_common(fields: &ConfigFields, mut sizes: ModelSizes) -> Result<Qwen3Config, ConfigError> {
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
        sizes.context = rope.context;
        Ok(Qwen3Config {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope: rope.rope,
            windows: qwen2::windows(fields, sizes.layers)?,
            bias: fields.flag_or("attention_bias", false)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            experts: None,
            sparse: vec![false; sizes.layers],
            sizes,
        })
    }

    /// With experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name.
    pub fn moe(fields: &ConfigFields) -> Result<Qwen3Config, ConfigError> {
        let config = Qwen3Config::read_common(fields, ModelSizes::read_equal_heads(fields, Some(32768))?)?;
        let experts = MoeLayer::read(
            fields,
            &["num_experts", "num_local_experts"],
            fields.size("moe_intermediate_size")?,
            fields.flag_or("norm_topk_prob", false)?,
        )?;
        // Here no field says where the layers with a window begin.
        let windows = match fields.flag_or("use_sliding_window", false)? {
            true => fields.layer_windows(config.sizes.layers, |_| true)?,
            false => config.windows,
        };
        let (step, dense) = (fields.size_or("decoder_sparse_step", 1)?, fields.token_ids("mlp_only_layers")?);
        let is_sparse = |layer: usize| !dense.contains(&(layer as u32)) && (layer + 1).is_multiple_of(step);
        let sparse = (0..config.sizes.layers).map(is_sparse).collect();
        Ok(Qwen3Config { experts: Some(experts), sparse, windows, ..config })
    }
}

impl Transformer for Qwen3Config {
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
        let attention = AttentionVariant {
            window: self.windows[layer],
            ..AttentionVariant::causal(self.sizes.head_size)
        };
        let h = SelfAttention {
            qkv_bias: self.bias,
            output_bias: self.bias,
            head_norm: Some((rms_norm, self.eps)),
            ..SelfAttention::new(&format!("{name}.self_attn"), rope, attention)
        }
        .apply(net, layer, &self.sizes, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let mlp = format!("{name}.mlp");
        let h = match &self.experts {
            Some(experts) if self.sparse[layer] => {
                let (router, inside) = (format!("{mlp}.gate"), format!("{mlp}.experts"));
                let parts = ["gate_proj", "up_proj", "down_proj"];
                let stored = ExpertStorage::Single { experts: &inside, parts };
                experts.apply(
                    net,
                    h,
                    &ExpertNames { router: &router, correction: None, expert_scale: None, storage: stored },
                )
            }
            _ => mlp::gated_by_name(net, h, &mlp, self.intermediate, false, self.activation),
        };
        net.add_residual(layer, "mlp", x, h)
    }

    fn supports_pooling(&self) -> bool {
        true
    }

    fn has_experts(&self) -> bool {
        self.experts.is_some()
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_fused_experts("mlp.experts", "gate_proj")?;
    t.record_llama_block(Some("layers.0.self_attn.q_norm.weight"))?;
    t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
    t.record_axis_size(&["num_experts", "num_local_experts"], "mlp.gate.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    Ok(())
}

fn gguf_moe_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    gguf_fields(w)?;
    w.copy_experts(["num_experts", "moe_intermediate_size"])?;
    // The converter writes no such flag; all published models have it.
    w.set_field("norm_topk_prob", true);
    let layers = w.required_number("block_count")?.min(1000);
    let dense = (0..layers).filter(|layer| !w.has_tensor(&format!("blk.{layer}.ffn_gate_exps.weight")));
    w.set_field("mlp_only_layers", dense.collect::<Vec<u64>>());
    Ok(())
}
