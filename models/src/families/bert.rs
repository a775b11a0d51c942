//! BERT (Devlin et al. 2019) and XLM-RoBERTa (Conneau et al. 2020); reference: `BertModel`, `XLMRobertaModel` and their
//! `ForSequenceClassification` of transformers. Every token sees the whole text; norms behind each part; learned positions,
//! which XLM-RoBERTa counts from behind the padding id. Tokens have types, which are those of the texts of a pair; in a text
//! alone they have the first one.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::linear::LinearLayer;
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{ActivationFunction, AttentionVariant, mlp};
use crate::pooling_head::{PoolingHead, PoolingMode, PoolingOutput, PoolingStep};
use crate::transformer::{LEARNED_POSITIONS, ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource, RowBlocks};
use mlcc_ir::types::{DType, TensorType};
use serde_json::json;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "bert",
            classes: &["BertModel", "BertForMaskedLM", "BertForSequenceClassification"],
            about: "BERT",
            read: |fields| BertConfig::bert(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "hidden_act hidden_size intermediate_size is_decoder layer_norm_eps \
                        max_position_embeddings num_attention_heads num_hidden_layers \
                        type_vocab_size vocab_size",
                only: "add_cross_attention=false",
                none: "tie_word_embeddings",
            },
        },
        FamilyVariant {
            model_type: "xlm-roberta",
            classes: &["XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"],
            about: "XLM-RoBERTa",
            read: |fields| BertConfig::roberta(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "hidden_act hidden_size intermediate_size is_decoder layer_norm_eps \
                        max_position_embeddings num_attention_heads num_hidden_layers pad_token_id \
                        type_vocab_size=2 vocab_size",
                only: "add_cross_attention=false",
                none: "tie_word_embeddings",
            },
        },
        FamilyVariant {
            model_type: "roberta",
            classes: &["RobertaModel", "RobertaForSequenceClassification"],
            about: "RoBERTa",
            read: |fields| BertConfig::roberta(fields).map(Architecture::new),
            infer: infer_fields,
            fields: PublishedFields {
                read: "hidden_act hidden_size intermediate_size is_decoder layer_norm_eps \
                        max_position_embeddings num_attention_heads num_hidden_layers pad_token_id \
                        type_vocab_size=2 vocab_size",
                only: "add_cross_attention=false",
                none: "tie_word_embeddings",
            },
        },
    ],
    gguf: &[GgufArchitecture {
        name: "bert",
        model_type: "bert",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        has_classifier: true,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// Rows of the table of token types.
    pub token_types: usize,
    /// Row of the table of positions that the first token has.
    pub first_position: usize,
    /// Labels of the classification head, if the checkpoint has one.
    pub labels: Option<usize>,
    pub roberta: bool,
}

impl BertConfig {
    pub fn bert(fields: &ConfigFields) -> Result<BertConfig, ConfigError> {
        BertConfig::read(fields, false)
    }

    pub fn roberta(fields: &ConfigFields) -> Result<BertConfig, ConfigError> {
        BertConfig::read(fields, true)
    }

    fn read(fields: &ConfigFields, roberta: bool) -> Result<BertConfig, ConfigError> {
        fields.require_flag("is_decoder", false, "a decoder with the layers of BERT")?;
        if let Some(kind) = fields.get("position_embedding_type")
            && kind.as_str() != Some("absolute")
        {
            return Err(fields.invalid_value("position_embedding_type", "absolute", kind));
        }
        let labels = fields.label_count()?;
        let types = fields.size_or("type_vocab_size", if roberta { 1 } else { 2 })?;
        let mut sizes = ModelSizes::read(fields, Some(512))?;
        // Ids and types are one `i32`.
        if types.checked_mul(sizes.vocab).is_none_or(|ids| ids > i32::MAX as usize) {
            return Err(fields.invalid_value("type_vocab_size", "a few token types", &types.into()));
        }
        let first_position = if roberta { fields.count_or("pad_token_id", 1)? + 1 } else { 0 };
        // GGUF files have none of the rows that no token has.
        let first_position = fields.count_or("position_offset", first_position)?;
        if first_position >= sizes.context {
            let found = serde_json::Value::from(sizes.context);
            let expected = format!("more than the {first_position} rows that no token has");
            return Err(fields.invalid_value("max_position_embeddings", &expected, &found));
        }
        sizes.context -= first_position;
        Ok(BertConfig {
            intermediate: fields.size("intermediate_size")?,
            eps: fields.epsilon(&["layer_norm_eps"], 1e-12)?,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Gelu)?,
            token_types: types,
            first_position,
            labels,
            roberta,
            sizes,
        })
    }

    fn typed_embedding(&self) -> TypedEmbedding {
        TypedEmbedding::new(&self.sizes, self.token_types, Transformer::token_types(self))
    }
}

/// The embeddings of tokens and of their types.
pub(super) struct TypedEmbedding {
    vocab: usize,
    hidden: usize,
    /// Rows of the table of token types; 0: there is none.
    token_types: usize,
    /// How many types a caller may give.
    accepted_types: usize,
}

impl TypedEmbedding {
    pub const TABLE: &'static str = "embeddings.word_embeddings.weight";

    pub fn new(sizes: &ModelSizes, token_types: usize, accepted_types: usize) -> TypedEmbedding {
        TypedEmbedding { vocab: sizes.vocab, hidden: sizes.hidden, token_types, accepted_types }
    }

    /// Rows `from ..` of a table of the embedding.
    fn table_rows(&self, net: &mut ModelBuilder, name: &str, [from, count, of]: [usize; 3]) -> ValueId {
        let hidden = self.hidden;
        let source = net.declare_tensor(&format!("embeddings.{name}.weight"), &[of, hidden]);
        let source = ParamSource::Rows(RowBlocks::range(from, count, of), Box::new(source));
        let ty = TensorType::new(DType::F32, [count, hidden]);
        net.param_from(&format!("embeddings.{name}.rows"), ParamRole::Vector, ty, source)
    }

    /// The sums of both, `[n, hidden]`.
    pub fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let TypedEmbedding { vocab, hidden, .. } = *self;
        let types = "token_type_embeddings";
        if self.accepted_types > 1 {
            let (tokens, kinds) = net.split_token_types(vocab, self.token_types);
            let words = net.embed_ids(Self::TABLE, vocab, hidden, tokens);
            let types = self.table_rows(net, types, [0, self.token_types, self.token_types]);
            let types = net.gather(types, kinds);
            return net.add(words, types);
        }
        let words = net.embed(Self::TABLE, vocab, hidden);
        if self.token_types == 0 {
            return words;
        }
        let first = self.table_rows(net, types, [0, 1, self.token_types]);
        net.add(words, first)
    }
}

impl Transformer for BertConfig {
    type Shared = ();

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

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let context = self.sizes.context;
        let parts = self.typed_embedding();
        let words = parts.embed(net);
        let all = self.first_position + context;
        let table = parts.table_rows(net, "position_embeddings", [self.first_position, context, all]);
        let positions = net.positions();
        let positions = net.per_sequence(&[], |net, _| vec![net.gather(table, positions)])[0];
        let x = net.add(words, positions);
        layer_norm(net, x, "embeddings.LayerNorm", self.eps)
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("encoder.layer.{layer}");
        let [q, k, v] = ["query", "key", "value"].map(|part| {
            let h =
                LinearLayer::new(&format!("{name}.attention.self.{part}"), hidden).bias(true).apply(net, x);
            net.split_heads(h, sizes.heads)
        });
        let h = AttentionVariant::bidirectional(sizes.head_size).apply(net, layer, q, k, v);
        let h = LinearLayer::new(&format!("{name}.attention.output.dense"), hidden).bias(true).apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let x = layer_norm(net, x, &format!("{name}.attention.output.LayerNorm"), self.eps);
        let (up, down) = (format!("{name}.intermediate.dense"), format!("{name}.output.dense"));
        let up = LinearLayer::new(&up, self.intermediate).bias(true);
        let down = LinearLayer::new(&down, hidden).bias(true);
        let h = mlp::ungated(net, x, up, down, self.activation);
        let x = net.add_residual(layer, "mlp", x, h);
        layer_norm(net, x, &format!("{name}.output.LayerNorm"), self.eps)
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        Some(LEARNED_POSITIONS)
    }

    fn token_types(&self) -> usize {
        self.token_types
    }

    fn default_pooling_head(&self) -> Option<PoolingHead> {
        let Some(labels) = self.labels else { return Some(PoolingHead::embedding(PoolingMode::Mean)) };
        let [dense, out] = match self.roberta {
            true => ["classifier.dense", "classifier.out_proj"],
            false => ["pooler.dense", "classifier"],
        };
        let linear = |name: &str, out| PoolingStep::Linear { name: name.into(), out, bias: true };
        let parts = vec![linear(dense, self.sizes.hidden), PoolingStep::Tanh, linear(out, labels)];
        Some(PoolingHead { pooling: PoolingMode::First, steps: parts, output: PoolingOutput::Scores })
    }

    /// Without the name of the inner model, and with the newer names of a norm's weights.
    fn canonical_name(&self, stored_name: &str) -> String {
        let name = stored_name.strip_prefix("bert.").or(stored_name.strip_prefix("roberta."));
        let name = name.unwrap_or(stored_name);
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    }

    /// Heads for the tasks of the training.
    fn is_ignored(&self, name: &str) -> bool {
        ["pooler.", "cls.", "lm_head."].iter().any(|part| name.starts_with(part))
            || name == "embeddings.position_ids"
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_table("embeddings.word_embeddings.weight")?;
    t.record_axis_size(&["intermediate_size"], "layer.0.intermediate.dense.weight", 0, 1)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "embeddings.word_embeddings.weight", Same),
        ("position_embd.weight", "embeddings.position_embeddings.weight", Same),
        ("token_types.weight", "embeddings.token_type_embeddings.weight", Same),
        ("token_embd_norm.weight", "embeddings.LayerNorm.weight", Same),
        ("token_embd_norm.bias", "embeddings.LayerNorm.bias", Same),
        ("cls.weight", "classifier.dense.weight", Same),
        ("cls.bias", "classifier.dense.bias", Same),
        ("cls.output.weight", "classifier.out_proj.weight", Same),
        ("cls.output.bias", "classifier.out_proj.bias", Same),
    ],
    layers: "encoder.layer",
    block: &[
        ("attn_q", "attention.self.query", Same),
        ("attn_k", "attention.self.key", Same),
        ("attn_v", "attention.self.value", Same),
        ("attn_output", "attention.output.dense", Same),
        ("attn_output_norm", "attention.output.LayerNorm", Same),
        ("ffn_up", "intermediate.dense", Same),
        ("ffn_down", "output.dense", Same),
        ("layer_output_norm", "output.LayerNorm", Same),
    ],
    llama_block: false,
};

/// BERT, and XLM-RoBERTa with the rows of its table of positions that no token has cut off.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("hidden_act", "gelu");
    w.set_field("position_offset", 0);
    w.set_field("type_vocab_size", w.tensor_rows("token_types.weight").unwrap_or(1));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
    if w.is_reranker()? {
        w.set_field("model_type", "xlm-roberta");
        w.set_field("architectures", json!(["XLMRobertaForSequenceClassification"]));
        w.set_field("num_labels", w.tensor_rows("cls.output.weight").unwrap_or(1));
    }
    Ok(())
}
