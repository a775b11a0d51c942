//! GPT-NeoX and Pythia (Black et al. 2022; reference: `GPTNeoXForCausalLM` of transformers): projections fused head by
//! head, rotary embedding on a part of each head, both parts of a layer side by side.

use crate::checkpoint::gguf::TensorConversion::{HeadsInside, Same};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::{ConfigFields, RopeConfig, RopeDefaults};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, Rope, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "gpt_neox",
        classes: &["GPTNeoXForCausalLM"],
        about: "GPT-NeoX, Pythia",
        read: |fields| GptNeoxConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
    }],
    gguf: &[GgufArchitecture {
        name: "gptneox",
        model_type: "gpt_neox",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct GptNeoxConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub attention_bias: bool,
    /// The feed-forward part reads the input of the layer, not the output of its attention.
    pub parallel: bool,
    pub tied: bool,
}

impl GptNeoxConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<GptNeoxConfig, ConfigError> {
        let mut sizes = ModelSizes::read(fields, Some(2048))?;
        let defaults = RopeDefaults { share: 0.25, ..RopeDefaults::LLAMA };
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults)?;
        sizes.context = rope.context;
        Ok(GptNeoxConfig {
            intermediate: fields.size_or("intermediate_size", 4 * sizes.hidden)?,
            eps: fields.epsilon(&["layer_norm_eps"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Gelu)?,
            rope: rope.rope,
            attention_bias: fields.flag_or("attention_bias", true)?,
            parallel: fields.flag_or("use_parallel_residual", true)?,
            tied: fields.flag_or("tie_word_embeddings", false)?,
            sizes,
        })
    }
}

impl Transformer for GptNeoxConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "gpt_neox.embed_in.weight",
            (Norm::Layer(self.eps), "gpt_neox.final_layer_norm"),
            "embed_out.weight",
            self.tied,
        )
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("gpt_neox.layers.{layer}");
        let h = layer_norm(net, x, &format!("{name}.input_layernorm"), self.eps);
        let part = format!("{name}.attention");
        let fused = FusedQkv::grouped_by_key_head(sizes.heads, sizes.heads, sizes.head_size);
        let projection = format!("{part}.query_key_value");
        let projection = LinearLayer::new(&projection, fused.rows()).bias(self.attention_bias);
        let qkv = fused.apply(net, h, &projection);
        let attention = SelfAttention::new(&part, rope, AttentionVariant::causal(sizes.head_size));
        let h = attention.attend(net, layer, sizes, qkv);
        let h = LinearLayer::new(&format!("{part}.dense"), hidden).bias(self.attention_bias).apply(net, h);
        let attended = net.add_residual(layer, "attention", x, h);
        let input = if self.parallel { x } else { attended };
        let h = layer_norm(net, input, &format!("{name}.post_attention_layernorm"), self.eps);
        let (up, down) = (format!("{name}.mlp.dense_h_to_4h"), format!("{name}.mlp.dense_4h_to_h"));
        let (up, down) = (LinearLayer::new(&up, self.intermediate), LinearLayer::new(&down, hidden));
        let h = mlp::ungated(net, h, up.bias(true), down.bias(true), self.activation);
        net.add_residual(layer, "mlp", attended, h)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "gpt_neox.", &["embed_in.", "layers.", "final_layer_norm."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embed_in.weight", "embed_out.weight", false)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.dense_h_to_4h.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.attention.query_key_value")
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "gpt_neox.embed_in.weight", Same),
        ("output_norm.weight", "gpt_neox.final_layer_norm.weight", Same),
        ("output_norm.bias", "gpt_neox.final_layer_norm.bias", Same),
        ("output.weight", "embed_out.weight", Same),
    ],
    layers: "gpt_neox.layers",
    block: &[
        ("attn_norm", "input_layernorm", Same),
        ("attn_qkv", "attention.query_key_value", HeadsInside),
        ("attn_output", "attention.dense", Same),
        ("ffn_norm", "post_attention_layernorm", Same),
        ("ffn_up", "mlp.dense_h_to_4h", Same),
        ("ffn_down", "mlp.dense_4h_to_h", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "gelu");
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    let parallel = w.flag("use_parallel_residual")?.unwrap_or(true);
    w.set_field("use_parallel_residual", parallel);
    let share = w.number("rope.dimension_count")?.unwrap_or(0) as f64 / w.head_size()?.max(1) as f64;
    w.set_field("rotary_pct", share);
    w.copy_float("rope.freq_base", "rotary_emb_base")
}
