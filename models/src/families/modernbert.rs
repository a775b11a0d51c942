//! ModernBERT (Warner et al. 2024; reference: `ModernBertModel` and `ModernBertForSequenceClassification` of transformers):
//! every token sees the whole text in some layers, and its neighbours on both sides in the others; rotary embedding with a
//! base for each kind of layer, gated feed-forward parts, norms in front. The first layer takes its input as it is.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::linear::{FusedQkv, LinearLayer};
use crate::layers::norm::{Norm, layer_norm_bias};
use crate::layers::rope::RopePairing;
use crate::layers::{
    ActivationFunction, AttentionVariant, Rope, RopeConfig, RopeDefaults, RopeTables, SelfAttention, mlp,
};
use crate::pooling_head::{PoolingHead, PoolingMode, PoolingOutput, PoolingStep};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::json;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "modernbert",
        classes: &["ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"],
        about: "ModernBERT",
        read: |fields| ModernBertConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_bias classifier_activation classifier_bias classifier_pooling \
                        hidden_activation hidden_size intermediate_size layer_types local_attention \
                        max_position_embeddings mlp_bias norm_bias norm_eps num_attention_heads \
                        num_hidden_layers rope_parameters vocab_size",
            none: "cls_token_id sep_token_id decoder_bias deterministic_flash_attn \
                        initializer_cutoff_factor mlp_dropout sparse_pred_ignore_index \
                        sparse_prediction tie_word_embeddings",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[GgufArchitecture {
        name: "modern-bert",
        model_type: "modernbert",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        has_classifier: true,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct ModernBertConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// Of layers that see everything, and of the others.
    pub ropes: [Rope; 2],
    /// By layer: how many neighbours are seen on each side; `None`: all.
    pub sides: Vec<Option<usize>>,
    pub norm_bias: bool,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub classifier: Option<PoolingHead>,
}

impl ModernBertConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<ModernBertConfig, ConfigError> {
        let sizes = ModelSizes::read(fields, Some(8192))?;
        let every = fields.size_or("global_attn_every_n_layers", 3)?;
        let side = fields.size_or("local_attention", 128)? / 2;
        let kinds = match fields.get("layer_types") {
            None => (0..sizes.layers).map(|layer| usize::from(!layer.is_multiple_of(every))).collect(),
            Some(_) => {
                fields.layer_kinds("layer_types", sizes.layers, &["full_attention", "sliding_attention"])?
            }
        };
        let activation = ActivationFunction::read(fields, &["hidden_activation"], ActivationFunction::Gelu)?;
        let (eps, norm_bias) = (fields.epsilon(&["norm_eps"], 1e-5)?, fields.flag_or("norm_bias", false)?);
        Ok(ModernBertConfig {
            intermediate: fields.size("intermediate_size")?,
            ropes: ropes(fields, &sizes)?,
            sides: kinds.into_iter().map(|kind| (kind == 1).then_some(side)).collect(),
            attention_bias: fields.flag_or("attention_bias", false)?,
            mlp_bias: fields.flag_or("mlp_bias", false)?,
            classifier: read_classifier(fields, &sizes, norm_kind(eps, norm_bias))?,
            eps,
            activation,
            norm_bias,
            sizes,
        })
    }

    fn norm(&self, net: &mut ModelBuilder, x: ValueId, name: &str) -> ValueId {
        layer_norm_bias(net, x, name, self.eps, self.norm_bias)
    }
}

fn norm_kind(eps: f64, bias: bool) -> Norm {
    if bias { Norm::Layer(eps) } else { Norm::LayerNoBias(eps) }
}

/// Rotary embedding of layers that see everything, and of the others.
fn ropes(fields: &ConfigFields, sizes: &ModelSizes) -> Result<[Rope; 2], ConfigError> {
    const THETA: [f64; 2] = [160_000.0, 10_000.0];
    if let Some(parameters) = fields.nested_object("rope_parameters")? {
        let defaults = THETA.map(|theta| RopeDefaults { theta, ..RopeDefaults::LLAMA });
        let kinds = RopeConfig::read_kinds(&parameters, sizes.head_size, sizes.context, defaults)?;
        return Ok(kinds.map(|kind| kind.rope));
    }
    let rope = |field: &str, theta| -> Result<Rope, ConfigError> {
        Ok(Rope::plain(sizes.head_size, fields.float_or(field, theta)?, RopePairing::Half))
    };
    Ok([rope("global_rope_theta", THETA[0])?, rope("local_rope_theta", THETA[1])?])
}

/// The head of `ModernBertForSequenceClassification`.
fn read_classifier(
    fields: &ConfigFields,
    sizes: &ModelSizes,
    norm: Norm,
) -> Result<Option<PoolingHead>, ConfigError> {
    let Some(labels) = fields.label_count()? else { return Ok(None) };
    let pooling = match fields.get("classifier_pooling") {
        None => PoolingMode::First,
        Some(found) => found
            .as_str()
            .and_then(PoolingMode::from_name)
            .filter(|&pooling| pooling != PoolingMode::Last)
            .ok_or_else(|| fields.invalid_value("classifier_pooling", "cls or mean", found))?,
    };
    let bias = fields.flag_or("classifier_bias", false)?;
    let parts = vec![
        PoolingStep::Linear { name: "head.dense".into(), out: sizes.hidden, bias },
        PoolingStep::Activation(ActivationFunction::read(
            fields,
            &["classifier_activation"],
            ActivationFunction::Gelu,
        )?),
        PoolingStep::Norm { name: "head.norm".into(), norm },
        PoolingStep::Linear { name: "classifier".into(), out: labels, bias: true },
    ];
    Ok(Some(PoolingHead { pooling, steps: parts, output: PoolingOutput::Scores }))
}

impl Transformer for ModernBertConfig {
    type Shared = [RopeTables; 2];

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = (norm_kind(self.eps, self.norm_bias), "final_norm");
        OuterLayers::with_names("embeddings.tok_embeddings.weight", norm, "decoder.weight", true)
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> [RopeTables; 2] {
        self.ropes[0].tables_with_local(net, &self.ropes[1])
    }

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let x = net.embed(self.outer_layers().embedding, self.sizes.vocab, self.sizes.hidden);
        self.norm(net, x, "embeddings.norm")
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        ropes: &[RopeTables; 2],
    ) -> ValueId {
        let (name, hidden) = (format!("layers.{layer}"), self.sizes.hidden);
        let h = if layer == 0 { x } else { self.norm(net, x, &format!("{name}.attn_norm")) };
        let fused = FusedQkv::in_order(hidden, hidden);
        let qkv = format!("{name}.attn.Wqkv");
        let qkv = fused.apply(net, h, &LinearLayer::new(&qkv, fused.rows()).bias(self.attention_bias));
        let side = self.sides[layer];
        let attention = AttentionVariant::sliding_bidirectional(self.sizes.head_size, side);
        let rope = &ropes[usize::from(side.is_some())];
        let h = SelfAttention::new("", rope, attention).attend(net, layer, &self.sizes, qkv);
        let h = LinearLayer::new(&format!("{name}.attn.Wo"), hidden).bias(self.attention_bias).apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = self.norm(net, x, &format!("{name}.mlp_norm"));
        let [up, down] = ["Wi", "Wo"].map(|part| format!("{name}.mlp.{part}"));
        let up = LinearLayer::new(&up, 2 * self.intermediate).bias(self.mlp_bias);
        let down = LinearLayer::new(&down, hidden).bias(self.mlp_bias);
        let h = mlp::gated_fused(net, h, up, down, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn default_pooling_head(&self) -> Option<PoolingHead> {
        Some(self.classifier.clone().unwrap_or_else(|| PoolingHead::embedding(PoolingMode::Mean)))
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        stored_name.strip_prefix("model.").unwrap_or(stored_name).to_string()
    }

    /// The head for the task of the training.
    fn is_ignored(&self, name: &str) -> bool {
        name.starts_with("head.") || name.starts_with("decoder.")
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_table("embeddings.tok_embeddings.weight")?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.Wi.weight", 0, 2)?;
    t.record_bias("attention_bias", "layers.0.attn.Wqkv")
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "embeddings.tok_embeddings.weight", Same),
        ("token_embd_norm.weight", "embeddings.norm.weight", Same),
        ("token_embd_norm.bias", "embeddings.norm.bias", Same),
        ("output_norm.weight", "final_norm.weight", Same),
        ("output_norm.bias", "final_norm.bias", Same),
        ("cls.weight", "head.dense.weight", Same),
        ("cls.bias", "head.dense.bias", Same),
        ("cls.norm.weight", "head.norm.weight", Same),
        ("cls.norm.bias", "head.norm.bias", Same),
        ("cls.output.weight", "classifier.weight", Same),
        ("cls.output.bias", "classifier.bias", Same),
    ],
    layers: "layers",
    block: &[
        ("attn_norm", "attn_norm", Same),
        ("attn_qkv", "attn.Wqkv", Same),
        ("attn_output", "attn.Wo", Same),
        ("ffn_norm", "mlp_norm", Same),
        ("ffn_up", "mlp.Wi", Same),
        ("ffn_down", "mlp.Wo", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_activation", "gelu");
    w.set_field("norm_bias", w.has_tensor("output_norm.bias"));
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_qkv.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    w.copy_float("attention.layer_norm_epsilon", "norm_eps")?;
    w.copy_number("attention.sliding_window", "local_attention")?;
    w.copy_number("attention.sliding_window_pattern", "global_attn_every_n_layers")?;
    w.copy_float("rope.freq_base", "global_rope_theta")?;
    w.copy_float("rope.freq_base_swa", "local_rope_theta")?;
    if w.is_reranker()? {
        w.set_field("architectures", json!(["ModernBertForSequenceClassification"]));
        w.set_field("num_labels", w.tensor_rows("cls.output.weight").unwrap_or(1));
        // Files do not say how rows are pooled: llama.cpp takes the mean.
        w.set_field("classifier_pooling", "mean");
        w.set_field("classifier_bias", w.has_tensor("cls.bias"));
    }
    Ok(())
}
