//! Baichuan 1 and 2 (Baichuan Inc. 2023; reference code: `BaichuanForCausalLM` of the published checkpoints): the Llama
//! block with fused projections; rotary embedding in the 7B models, ALiBi in the 13B models; version 2 scales the rows
//! of its head to length 1.

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, INTERLEAVED, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::attention::alibi_slopes;
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::layers::{RopeConfig, RopeDefaults, linear};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "baichuan",
        classes: &["BaiChuanForCausalLM", "BaichuanForCausalLM"],
        about: "Baichuan 1, 2",
        read: |fields| BaichuanConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields::UNKNOWN,
    }],
    gguf: &[GgufArchitecture {
        name: "baichuan",
        model_type: "baichuan",
        write_fields: gguf_fields,
        tensor_names: |_| TensorNameMap::llama(INTERLEAVED),
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct BaichuanConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// `None`: ALiBi.
    pub rope: Option<Rope>,
    /// Queries, keys and values are one matrix `W_pack`; files converted to GGUF have them apart.
    pub fused: bool,
    /// The rows of the head are scaled to length 1.
    pub unit_head: bool,
}

/// Vocabulary of version 2; the configurations of the two versions are told apart by it.
const VERSION_2_VOCAB: usize = 125_696;

impl BaichuanConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<BaichuanConfig, ConfigError> {
        fields.require_flag("tie_word_embeddings", false, "Baichuan with a tied head")?;
        let mut sizes = ModelSizes::read(fields, Some(4096))?;
        // The 13B models have no table of positions, and say `model_max_length` only.
        let rope = match fields.get("max_position_embeddings") {
            None => None,
            Some(_) => {
                let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, RopeDefaults::LLAMA)?;
                sizes.context = rope.context;
                Some(rope.rope)
            }
        };
        Ok(BaichuanConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["rms_norm_eps"], 1e-6)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            rope,
            fused: fields.flag_or("fused_qkv", true)?,
            unit_head: sizes.vocab == VERSION_2_VOCAB || fields.get("z_loss_weight").is_some(),
            sizes,
        })
    }
}

impl Transformer for BaichuanConfig {
    type Shared = Option<RopeTables>;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::Rms(self.eps), false)
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
        let (sizes, name) = (&self.sizes, format!("model.layers.{layer}"));
        let h = rms_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let part = format!("{name}.self_attn");
        let alibi = rope.is_none().then(|| alibi_slopes(sizes.heads, 8.0));
        let attention = SelfAttention {
            name: &part,
            output: "o_proj",
            qkv_bias: false,
            output_bias: false,
            head_norm: None,
            query_scale: None,
            rope: rope.as_ref(),
            attention: AttentionVariant { alibi, ..AttentionVariant::causal(sizes.head_size) },
        };
        let h = match self.fused {
            false => attention.apply(net, layer, sizes, h),
            true => {
                let fused = FusedQkv::in_order(sizes.query_width(), sizes.key_width());
                let qkv = fused.apply(net, h, &LinearLayer::new(&format!("{part}.W_pack"), fused.rows()));
                let h = attention.attend(net, layer, sizes, qkv);
                LinearLayer::new(&format!("{part}.o_proj"), sizes.hidden).apply(net, h)
            }
        };
        let x = net.add_residual(layer, "attention", x, h);
        let h = rms_norm(net, x, &format!("{name}.post_attention_layernorm"), self.eps);
        let mlp = format!("{name}.mlp");
        let h = mlp::gated_by_name(net, h, &mlp, self.intermediate, false, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn logits(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        let (name, shape) = ("lm_head.weight", [self.sizes.vocab, self.sizes.hidden]);
        let mut source = net.declare_tensor(name, &shape);
        if self.unit_head {
            source = ParamSource::UnitRows(Box::new(source));
        }
        let weight = net.param_from(name, ParamRole::Head, TensorType::new(DType::F32, shape), source);
        linear(net, x, weight)
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_table("embed_tokens.weight")?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)
}

/// Layers of Baichuan 13B, which has ALiBi: llama.cpp knows it by them, because files do not say so.
const LAYERS_OF_13B: u64 = 40;

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("fused_qkv", false);
    let alibi = match w.float("attention.max_alibi_bias")? {
        Some(bias) => bias > 0.0,
        None => w.required_number("block_count")? == LAYERS_OF_13B,
    };
    if alibi {
        w.copy_number("context_length", "model_max_length")?;
        w.raw.remove("max_position_embeddings");
    }
    Ok(())
}
