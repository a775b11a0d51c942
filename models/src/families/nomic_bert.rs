//! Nomic BERT (Nussbaum et al. 2024; reference: `modeling_hf_nomic_bert.py` of the published checkpoints, and `NomicBertModel` of
//! transformers): BERT with rotary embedding in place of learned positions, gated feed-forward parts and no biases.

use super::bert::TypedEmbedding;
use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::linear::{FusedQkv, LinearLayer};
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{
    ActivationFunction, AttentionVariant, Rope, RopeConfig, RopeDefaults, RopeTables, SelfAttention, mlp,
};
use crate::pooling_head::{PoolingHead, PoolingMode, PoolingOutput, PoolingStep};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::{Value, json};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "nomic_bert",
        classes: &[
            "NomicBertModel",
            "NomicBertForPreTraining",
            "NomicBertForMaskedLM",
            "NomicBertForSequenceClassification",
        ],
        about: "Nomic BERT (nomic-embed-text)",
        read: |fields| NomicBertConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "head_dim hidden_act hidden_size intermediate_size layer_norm_eps \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        rope_parameters type_vocab_size vocab_size",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "nomic-bert",
        model_type: "nomic_bert",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct NomicBertConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    pub rope: Rope,
    pub attention_bias: bool,
    /// Of the inner layers of the feed-forward part, and of the last one.
    pub mlp_bias: [bool; 2],
    /// Rows of the table of token types; 0: there is none.
    pub token_types: usize,
    /// Labels of the classification head, if the checkpoint has one.
    pub labels: Option<usize>,
}

/// Length of the texts that the published models were trained with, where a file does not say it.
const TRAINED: usize = 2048;

/// Names of gates in `activation_function` of published files.
const GATES: [(&str, ActivationFunction); 2] =
    [("swiglu", ActivationFunction::Silu), ("geglu", ActivationFunction::Gelu)];

impl NomicBertConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<NomicBertConfig, ConfigError> {
        refuse_unbuilt_fields(fields)?;
        let mut sizes = ModelSizes::read(fields, Some(TRAINED))?;
        let types = fields.count_or("type_vocab_size", 2)?;
        // Ids and types are one `i32`.
        if types.checked_mul(sizes.vocab).is_none_or(|ids| ids > i32::MAX as usize) {
            return Err(fields.invalid_value("type_vocab_size", "a few token types", &types.into()));
        }
        let rope = rope(fields, &mut sizes)?;
        Ok(NomicBertConfig {
            intermediate: fields.size(fields.first_present(&["n_inner", "intermediate_size"]))?,
            eps: fields.epsilon(&["layer_norm_epsilon", "layer_norm_eps"], 1e-12)?,
            activation: activation(fields)?,
            rope,
            attention_bias: fields.flag_or("qkv_proj_bias", false)?,
            mlp_bias: [fields.flag_or("mlp_fc1_bias", false)?, fields.flag_or("mlp_fc2_bias", false)?],
            token_types: types,
            labels: fields.label_count()?,
            sizes,
        })
    }

    fn typed_embedding(&self) -> TypedEmbedding {
        TypedEmbedding::new(&self.sizes, self.token_types, Transformer::token_types(self))
    }
}

/// What the published code can do beside the published models.
fn refuse_unbuilt_fields(fields: &ConfigFields) -> Result<(), ConfigError> {
    fields.require_flag("prenorm", false, "norms in front of the parts of a layer")?;
    fields.require_flag("causal", false, "a decoder with the layers of Nomic BERT")?;
    fields.require_flag("parallel_block", false, "parallel parts of a layer")?;
    fields.require_flag("use_rms_norm", false, "norms without a mean")?;
    fields.require_flag("norm_mlp", false, "norms inside of feed-forward parts")?;
    fields.require_flag("rotary_emb_interleaved", false, "rotary embedding of neighbouring elements")?;
    let unsupported = |what: &str, supported: &str| ConfigError::NotSupportedYet {
        file: fields.origin.clone(),
        what: what.to_string(),
        supported: supported.to_string(),
    };
    let is_set = |field: &str| fields.get(field).is_some_and(|value| value.as_f64().unwrap_or(1.0) > 0.0);
    if is_set("moe_every_n_layers") {
        let found = "Nomic BERT with experts (`moe_every_n_layers`, as nomic-embed-text-v2-moe has them)";
        return Err(unsupported(found, "models without experts, such as nomic-embed-text-v1.5"));
    }
    if fields.get("rotary_emb_scale_base").is_some() {
        let found = "rotary embedding that scales queries and keys (`rotary_emb_scale_base`)";
        return Err(unsupported(found, "`rotary_emb_scale_base` = null"));
    }
    match fields.float_or("rotary_emb_fraction", 1.0)? {
        1.0 => Ok(()),
        other => Err(fields.invalid_value(
            "rotary_emb_fraction",
            "1: all of a head is turned",
            &Value::from(other),
        )),
    }
}

/// A gate by the names of the published files, or by that of its activation in files of transformers.
fn activation(fields: &ConfigFields) -> Result<ActivationFunction, ConfigError> {
    if fields.get("activation_function").is_none() {
        return ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu);
    }
    let name = fields.string("activation_function")?;
    GATES.iter().find(|(known, _)| *known == name).map(|(_, gate)| *gate).ok_or_else(|| {
        let names: Vec<&str> = GATES.iter().map(|(known, _)| *known).collect();
        fields.invalid_value(
            "activation_function",
            &format!("one of {}", names.join(", ")),
            &Value::from(name),
        )
    })
}

/// Published files have their own name for the base and for dynamic scaling, without which they claim a longer context than the
/// model was trained with.
fn rope(fields: &ConfigFields, sizes: &mut ModelSizes) -> Result<Rope, ConfigError> {
    let mut plain = fields.clone();
    let trained = fields.size_or("max_trained_positions", sizes.context.min(TRAINED))?;
    let factor = fields.float_or("rotary_scaling_factor", 0.0)?;
    if factor > 0.0 {
        let scaling = json!({
            "rope_type": "dynamic",
            "factor": factor,
            "original_max_position_embeddings": trained,
        });
        plain.raw.insert("rope_scaling".into(), scaling);
    } else if fields.get("n_positions").is_some() {
        sizes.context = sizes.context.min(trained);
    }
    let defaults = RopeDefaults { theta: 1000.0, ..RopeDefaults::LLAMA };
    let RopeConfig { rope, context } = RopeConfig::read(&plain, sizes.head_size, sizes.context, defaults)?;
    sizes.context = context;
    Ok(rope)
}

impl Transformer for NomicBertConfig {
    type Shared = RopeTables;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            TypedEmbedding::TABLE,
            (Norm::None, ""),
            "cls.predictions.decoder.weight",
            true,
        )
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> RopeTables {
        self.rope.tables(net, "rope")
    }

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let words = self.typed_embedding().embed(net);
        layer_norm(net, words, "emb_ln", self.eps)
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, rope: &RopeTables) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("encoder.layers.{layer}");
        let fused = FusedQkv::in_order(sizes.query_width(), sizes.key_width());
        let qkv = format!("{name}.attn.Wqkv");
        let qkv = fused.apply(net, x, &LinearLayer::new(&qkv, fused.rows()).bias(self.attention_bias));
        let attention = SelfAttention::new("", rope, AttentionVariant::bidirectional(sizes.head_size));
        let h = attention.attend(net, layer, sizes, qkv);
        let h = LinearLayer::new(&format!("{name}.attn.out_proj"), hidden)
            .bias(self.attention_bias)
            .apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let x = layer_norm(net, x, &format!("{name}.norm1"), self.eps);
        let [up, gate, down] = ["fc11", "fc12", "fc2"].map(|part| format!("{name}.mlp.{part}"));
        let [inner, last] = self.mlp_bias;
        let [gate, up] = [&gate, &up].map(|name| LinearLayer::new(name, self.intermediate).bias(inner));
        let down = LinearLayer::new(&down, hidden).bias(last);
        let h = mlp::gated(net, x, [gate, up, down], self.activation);
        let x = net.add_residual(layer, "mlp", x, h);
        layer_norm(net, x, &format!("{name}.norm2"), self.eps)
    }

    fn token_types(&self) -> usize {
        self.token_types.max(1)
    }

    fn default_pooling_head(&self) -> Option<PoolingHead> {
        let Some(labels) = self.labels else { return Some(PoolingHead::embedding(PoolingMode::Mean)) };
        let linear = |name: &str, out| PoolingStep::Linear { name: name.into(), out, bias: true };
        let parts =
            vec![linear("pooler.dense", self.sizes.hidden), PoolingStep::Tanh, linear("classifier", labels)];
        Some(PoolingHead { pooling: PoolingMode::First, steps: parts, output: PoolingOutput::Scores })
    }

    /// Without the name of the inner model; transformers has its own names in memory, and these in files.
    fn canonical_name(&self, stored_name: &str) -> String {
        let name = stored_name.strip_prefix("bert.").or(stored_name.strip_prefix("nomic_bert."));
        name.unwrap_or(stored_name).to_string()
    }

    /// Heads for the tasks of the training.
    fn is_ignored(&self, name: &str) -> bool {
        name.starts_with("pooler.") || name.starts_with("cls.")
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_table("embeddings.word_embeddings.weight")?;
    t.record_axis_size(&["n_inner", "intermediate_size"], "layers.0.mlp.fc11.weight", 0, 1)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "embeddings.word_embeddings.weight", Same),
        ("token_types.weight", "embeddings.token_type_embeddings.weight", Same),
        ("token_embd_norm.weight", "emb_ln.weight", Same),
        ("token_embd_norm.bias", "emb_ln.bias", Same),
    ],
    layers: "encoder.layers",
    block: &[
        ("attn_qkv", "attn.Wqkv", Same),
        ("attn_output", "attn.out_proj", Same),
        ("attn_output_norm", "norm1", Same),
        ("ffn_up", "mlp.fc11", Same),
        ("ffn_gate", "mlp.fc12", Same),
        ("ffn_down", "mlp.fc2", Same),
        ("layer_output_norm", "norm2", Same),
    ],
    llama_block: false,
};

/// Files have no biases, and a context without scaling.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "silu");
    w.set_field("type_vocab_size", w.tensor_rows("token_types.weight").unwrap_or(0));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")
}
