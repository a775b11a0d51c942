//! GPT-2 (Radford et al. 2019; reference: `GPT2LMHeadModel` of transformers) and GPT-BigCode, the model of StarCoder 1
//! and SantaCoder (Ben Allal et al. 2023; reference: `GPTBigCodeForCausalLM`), which has one key head and stores plain
//! linear layers in place of `Conv1D`.

use crate::checkpoint::gguf::TensorConversion::{Same, Transposed};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::CONTEXT;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{ActivationFunction, AttentionVariant, FusedQkv, LinearLayer, mlp};
use crate::transformer::{
    LEARNED_POSITIONS, ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix,
};
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::ParamRole;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "gpt2",
            classes: &["GPT2LMHeadModel"],
            about: "GPT-2",
            read: |fields| Gpt2Config::gpt2(fields).map(Architecture::new),
            infer: infer_gpt2,
            fields: PublishedFields {
                read: "activation_function add_cross_attention layer_norm_epsilon n_embd n_head \
                        n_inner n_layer n_positions=1024 scale_attn_by_inverse_layer_idx \
                        scale_attn_weights tie_word_embeddings vocab_size",
                none: "reorder_and_upcast_attn summary_activation summary_first_dropout \
                        summary_proj_to_labels summary_type summary_use_proj",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "gpt_bigcode",
            classes: &["GPTBigCodeForCausalLM"],
            about: "StarCoder 1, SantaCoder",
            read: |fields| Gpt2Config::bigcode(fields).map(Architecture::new),
            infer: infer_bigcode,
            fields: PublishedFields {
                read: "activation_function layer_norm_epsilon multi_query n_embd n_head n_inner \
                        n_layer n_positions=1024 num_key_value_heads scale_attn_weights \
                        tie_word_embeddings vocab_size",
                only: "add_cross_attention=false",
                none: "attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
            },
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "gpt2",
            model_type: "gpt2",
            write_fields: gguf_fields,
            tensor_names: |_| TensorNameMap { block: GGUF_GPT2_BLOCK, ..GGUF_NAMES },
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "starcoder",
            model_type: "gpt_bigcode",
            write_fields: gguf_starcoder_fields,
            tensor_names: |_| GGUF_NAMES,
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// Weights are stored as `[in, out]`.
    pub conv1d: bool,
    /// Where queries, keys and values are in `c_attn`.
    pub fused: FusedQkv,
    /// Scores are divided by the square root of the head size.
    pub scaled: bool,
    /// Scores are divided by the number of the layer, from 1.
    pub scaled_by_layer: bool,
    pub tied: bool,
}

impl Gpt2Config {
    pub fn gpt2(fields: &ConfigFields) -> Result<Gpt2Config, ConfigError> {
        fields.require_flag("add_cross_attention", false, "GPT-2 with cross attention")?;
        let sizes = ModelSizes::read(fields, None)?;
        let fused = FusedQkv::in_order(sizes.query_width(), sizes.key_width());
        Gpt2Config::read_common(fields, sizes, fused, ActivationFunction::GeluTanh)
    }

    pub fn bigcode(fields: &ConfigFields) -> Result<Gpt2Config, ConfigError> {
        let mut sizes = ModelSizes::read(fields, None)?;
        let fused = match fields.flag_or("multi_query", true)? {
            true => {
                sizes.kv_heads = 1;
                FusedQkv::in_order(sizes.query_width(), sizes.key_width())
            }
            false => FusedQkv::grouped_by_key_head(sizes.heads, sizes.kv_heads, sizes.head_size),
        };
        let config = Gpt2Config::read_common(fields, sizes, fused, ActivationFunction::GeluTanh)?;
        Ok(Gpt2Config { conv1d: false, ..config })
    }

    fn read_common(
        fields: &ConfigFields,
        sizes: ModelSizes,
        fused: FusedQkv,
        activation: ActivationFunction,
    ) -> Result<Gpt2Config, ConfigError> {
        Ok(Gpt2Config {
            intermediate: fields.size_or("n_inner", 4 * sizes.hidden)?,
            eps: fields.epsilon(&["layer_norm_epsilon"], 1e-5)?,
            activation: ActivationFunction::read(fields, &["activation_function"], activation)?,
            conv1d: true,
            fused,
            scaled: fields.flag_or("scale_attn_weights", true)?,
            scaled_by_layer: fields.flag_or("scale_attn_by_inverse_layer_idx", false)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }

    fn linear<'a>(&self, name: &'a str, out: usize) -> LinearLayer<'a> {
        let layer = LinearLayer::new(name, out).bias(true);
        if self.conv1d { layer.conv1d() } else { layer }
    }

    fn attention(&self, layer: usize) -> AttentionVariant {
        let causal = AttentionVariant::causal(self.sizes.head_size);
        let scale = if self.scaled { causal.scale } else { 1.0 };
        let by_layer = if self.scaled_by_layer { (layer + 1) as f64 } else { 1.0 };
        AttentionVariant { scale: scale / by_layer, ..causal }
    }
}

impl Transformer for Gpt2Config {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::with_names(
            "transformer.wte.weight",
            (Norm::Layer(self.eps), "transformer.ln_f"),
            "lm_head.weight",
            self.tied,
        )
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let ModelSizes { vocab, hidden, context, .. } = self.sizes;
        let tokens = net.embed(self.outer_layers().embedding, vocab, hidden);
        let table = net.weight_param("transformer.wpe.weight", ParamRole::Vector, &[context, hidden]);
        let positions = net.positions();
        let positions = net.per_sequence(&[], |net, _| vec![net.gather(table, positions)])[0];
        net.add(tokens, positions)
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let (sizes, hidden) = (&self.sizes, self.sizes.hidden);
        let name = format!("transformer.h.{layer}");
        let h = layer_norm(net, x, &format!("{name}.ln_1"), self.eps);
        let [q, k, v] =
            self.fused.apply(net, h, &self.linear(&format!("{name}.attn.c_attn"), self.fused.rows()));
        let q = net.split_heads(q, sizes.heads);
        let k = net.split_heads(k, sizes.kv_heads);
        let v = net.split_heads(v, sizes.kv_heads);
        let h = self.attention(layer).apply(net, layer, q, k, v);
        let h = self.linear(&format!("{name}.attn.c_proj"), hidden).apply(net, h);
        let x = net.add_residual(layer, "attention", x, h);
        let h = layer_norm(net, x, &format!("{name}.ln_2"), self.eps);
        let (up, down) = (format!("{name}.mlp.c_fc"), format!("{name}.mlp.c_proj"));
        let (up, down) = (self.linear(&up, self.intermediate), self.linear(&down, hidden));
        let h = mlp::ungated(net, h, up, down, self.activation);
        net.add_residual(layer, "mlp", x, h)
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        Some(LEARNED_POSITIONS)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "transformer.", &["wte.", "wpe.", "h.", "ln_f."])
    }
}

fn infer_common(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("wte.weight", "lm_head.weight", true)?;
    t.record_axis_size(&CONTEXT, "wpe.weight", 0, 1)
}

fn infer_gpt2(t: &mut ConfigEvidence) -> EvidenceResult {
    infer_common(t)?;
    t.record_axis_size(&["n_inner"], "h.0.mlp.c_fc.weight", 1, 1)
}

fn infer_bigcode(t: &mut ConfigEvidence) -> EvidenceResult {
    infer_common(t)?;
    t.record_axis_size(&["n_inner"], "h.0.mlp.c_fc.weight", 0, 1)?;
    t.record_multi_query("h.0.attn.c_attn.weight")
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "transformer.wte.weight", Same),
        ("position_embd.weight", "transformer.wpe.weight", Same),
        ("output_norm.weight", "transformer.ln_f.weight", Same),
        ("output_norm.bias", "transformer.ln_f.bias", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    layers: "transformer.h",
    block: &[
        ("attn_norm", "ln_1", Same),
        ("attn_qkv", "attn.c_attn", Same),
        ("attn_output", "attn.c_proj", Same),
        ("ffn_norm", "ln_2", Same),
        ("ffn_up", "mlp.c_fc", Same),
        ("ffn_down", "mlp.c_proj", Same),
    ],
    llama_block: false,
};

const GGUF_GPT2_BLOCK: &[NameMapping] = &[
    ("attn_norm", "ln_1", Same),
    ("attn_qkv", "attn.c_attn", Transposed),
    ("attn_output", "attn.c_proj", Transposed),
    ("ffn_norm", "ln_2", Same),
    ("ffn_up", "mlp.c_fc", Transposed),
    ("ffn_down", "mlp.c_proj", Transposed),
];

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.set_field("activation_function", "gelu_new");
    w.copy_number("embedding_length", "n_embd")?;
    w.copy_number("block_count", "n_layer")?;
    w.copy_number("attention.head_count", "n_head")?;
    w.copy_number("context_length", "n_positions")?;
    w.copy_number("feed_forward_length", "n_inner")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}

/// GPT-2 with matrices as they are, and one head of keys.
fn gguf_starcoder_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    if w.number("attention.head_count_kv")? != Some(1) {
        return Err(w.unsupported_error("has the architecture `starcoder` with more than one key head"));
    }
    gguf_fields(w)?;
    w.set_field("activation_function", "gelu_pytorch_tanh");
    w.set_field("multi_query", true);
    Ok(())
}
