//! T5 (Raffel et al. 2020), mT5 (Xue et al. 2021) and UMT5 (Chung et al. 2023); reference: `T5ForConditionalGeneration`,
//! `MT5ForConditionalGeneration` and `UMT5ForConditionalGeneration` of transformers. An encoder reads the source text, a decoder writes the target and
//! looks at the encoder's last rows in every layer. Positions are terms of the scores by distance ([`DistanceBias`]), and
//! scores have no factor.
//!
//! The keys and values that a decoder layer sees of the source are the first rows of the caches of its self-attention, which
//! have the same heads: so a sequence is the rows of the source, and behind them those of the target.

use crate::checkpoint::gguf::TensorConversion::Same;
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::{HIDDEN, LARGEST_HEAD, MOST_HEADS, MOST_LAYERS};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::attention::append_key_values;
use crate::layers::linear::LinearLayer;
use crate::layers::norm::{Norm, rms_norm};
use crate::layers::{ActivationFunction, AttentionVariant, DistanceBias, DistanceBuckets, KeyScope, mlp};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "t5",
            classes: &["T5ForConditionalGeneration", "T5WithLMHeadModel"],
            about: "T5, FLAN-T5",
            read: |fields| T5Config::t5(fields).map(Architecture::new),
            infer: |t| infer_fields(t, true),
            fields: PublishedFields {
                read: "d_ff d_kv d_model feed_forward_proj layer_norm_epsilon num_decoder_layers \
                        num_heads num_layers relative_attention_max_distance \
                        relative_attention_num_buckets scale_decoder_outputs tie_word_embeddings \
                        vocab_size pad_token_id",
                none: "dense_act_fn is_decoder is_gated_act",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "mt5",
            classes: &["MT5ForConditionalGeneration"],
            about: "mT5",
            read: |fields| T5Config::mt5(fields).map(Architecture::new),
            infer: |t| infer_fields(t, false),
            fields: PublishedFields {
                read: "d_ff d_kv d_model feed_forward_proj=\"gated-gelu\" layer_norm_epsilon \
                        num_decoder_layers num_heads num_layers relative_attention_max_distance \
                        relative_attention_num_buckets tie_word_embeddings=true vocab_size \
                        decoder_start_token_id",
                none: "dense_act_fn is_decoder is_gated_act",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "umt5",
            classes: &["UMT5ForConditionalGeneration"],
            about: "UMT5",
            read: |fields| T5Config::umt5(fields).map(Architecture::new),
            infer: |t| infer_fields(t, false),
            fields: PublishedFields {
                read: "d_ff d_kv d_model feed_forward_proj=\"gated-gelu\" layer_norm_epsilon \
                        num_decoder_layers num_heads num_layers relative_attention_max_distance \
                        relative_attention_num_buckets scale_decoder_outputs \
                        tie_word_embeddings=true vocab_size decoder_start_token_id",
                none: "dense_act_fn is_decoder is_gated_act",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[GgufArchitecture {
        name: "t5",
        model_type: "t5",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// The layers are the decoder's.
    pub sizes: ModelSizes,
    pub encoder_layers: usize,
    pub intermediate: usize,
    pub eps: f64,
    pub activation: ActivationFunction,
    /// The feed-forward part has a gate.
    pub gated: bool,
    pub buckets: usize,
    pub max_distance: usize,
    /// Every layer has a table of distances, not only the first one.
    pub per_layer_bias: bool,
    pub tied: bool,
    /// Logits are multiplied by `hidden^-0.5`.
    pub scale_logits: bool,
    pub start_token_id: u32,
}

/// Which stack a block is in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum T5Stack {
    Encoder,
    Decoder,
}

impl T5Stack {
    fn name(self) -> &'static str {
        match self {
            T5Stack::Encoder => "encoder",
            T5Stack::Decoder => "decoder",
        }
    }
}

/// What the texts that T5 was trained with had at most; positions are relative, so longer ones work too.
const SOURCE: usize = 512;

impl T5Config {
    pub fn t5(fields: &ConfigFields) -> Result<T5Config, ConfigError> {
        T5Config::read(fields, true, false)
    }

    pub fn mt5(fields: &ConfigFields) -> Result<T5Config, ConfigError> {
        T5Config::read(fields, false, false)
    }

    pub fn umt5(fields: &ConfigFields) -> Result<T5Config, ConfigError> {
        T5Config::read(fields, false, true)
    }

    /// `tied` where the file does not say whether the head is the embedding.
    fn read(fields: &ConfigFields, tied: bool, own_distances: bool) -> Result<T5Config, ConfigError> {
        refuse_single_stacks(fields)?;
        let encoder_layers = fields.size("num_layers")?;
        let layers = fields.size_or("num_decoder_layers", encoder_layers)?;
        let heads = fields.size("num_heads")?;
        let sizes = ModelSizes {
            vocab: fields.vocab_size()?,
            hidden: fields.size(fields.first_present(&HIDDEN))?,
            layers: fields.check_max("num_decoder_layers", layers, MOST_LAYERS)?,
            heads: fields.check_max("num_heads", heads, MOST_HEADS)?,
            kv_heads: heads,
            head_size: fields.check_max("d_kv", fields.size("d_kv")?, LARGEST_HEAD)?,
            // Source and target are in the same caches.
            context: 2 * fields.size_or("n_positions", SOURCE)?,
        };
        let (activation, gated) = feed_forward(fields)?;
        let tied = fields.flag_or("tie_word_embeddings", tied)?;
        // Newer releases of transformers write `true` for all; only heads that are the embedding are scaled.
        let scaled = fields.flag_or("scale_decoder_outputs", tied)?;
        let config = T5Config {
            encoder_layers: fields.check_max("num_layers", encoder_layers, MOST_LAYERS)?,
            intermediate: fields.size("d_ff")?,
            eps: fields.epsilon(&["layer_norm_epsilon"], 1e-6)?,
            activation,
            gated,
            buckets: fields.size_or("relative_attention_num_buckets", 32)?,
            max_distance: fields.size_or("relative_attention_max_distance", 128)?,
            per_layer_bias: own_distances,
            tied: tied && scaled,
            scale_logits: scaled,
            start_token_id: start_token(fields, sizes.vocab)?,
            sizes,
        };
        config.check_buckets(fields)?;
        Ok(config)
    }

    fn check_buckets(&self, fields: &ConfigFields) -> Result<(), ConfigError> {
        let most = 1 << 16;
        fields.check_max("relative_attention_max_distance", self.max_distance, most)?;
        for stack in [T5Stack::Encoder, T5Stack::Decoder] {
            if let Some(why) = self.distance_buckets(stack).invalid_reason() {
                let found = Value::from(self.buckets);
                let expected = format!("a number of buckets that goes with the largest distance: {why}");
                return Err(fields.invalid_value("relative_attention_num_buckets", &expected, &found));
            }
        }
        Ok(())
    }

    fn distance_buckets(&self, stack: T5Stack) -> DistanceBuckets {
        DistanceBuckets {
            count: self.buckets,
            max_distance: self.max_distance,
            both_sides: stack == T5Stack::Encoder,
        }
    }

    fn distance_bias(&self, stack: T5Stack, layer: usize) -> DistanceBias {
        let layer = if self.per_layer_bias { layer } else { 0 };
        let part = format!("{}.block.{layer}.layer.0.SelfAttention", stack.name());
        DistanceBias {
            name: format!("{part}.relative_attention_bias.weight"),
            buckets: self.distance_buckets(stack),
            heads: self.sizes.heads,
        }
    }

    fn project(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> ValueId {
        LinearLayer::new(name, self.sizes.query_width()).apply(net, x)
    }

    /// Keys and values `[n, heads, size]`.
    fn keys_and_values(&self, net: &mut ModelBuilder, part: &str, x: ValueId) -> [ValueId; 2] {
        ["k", "v"].map(|which| self.project(net, &format!("{part}.{which}"), x))
    }

    /// Also gives the keys and values, of which the decoder's are all that its caches have.
    fn self_attention(
        &self,
        net: &mut ModelBuilder,
        stack: T5Stack,
        layer: usize,
        x: ValueId,
    ) -> (ValueId, [ValueId; 2]) {
        let block = format!("{}.block.{layer}.layer.0", stack.name());
        let part = format!("{block}.SelfAttention");
        let h = rms_norm(net, x, &format!("{block}.layer_norm"), self.eps);
        let q = self.project(net, &format!("{part}.q"), h);
        let [k, v] = self.keys_and_values(net, &part, h);
        let mut attention =
            AttentionVariant { scale: 1.0, ..AttentionVariant::bidirectional(self.sizes.head_size) };
        attention.bias = Some(self.distance_bias(stack, layer));
        if stack == T5Stack::Decoder {
            (attention.lookahead, attention.key_scope) = (0, KeyScope::Decoder);
        }
        let (heads, mut seen) = (self.sizes.heads, [k, v]);
        let h = net.per_sequence(&[q, k, v], |net, rows| {
            let [q, k, v] = [rows[0], rows[1], rows[2]].map(|rows| net.split_heads(rows, heads));
            // The encoder keeps nothing of its own.
            seen = if stack == T5Stack::Decoder { append_key_values(net, layer, [k, v]) } else { [k, v] };
            vec![attention.attend(net, q.into(), seen, None)]
        })[0];
        (LinearLayer::new(&format!("{part}.o"), self.sizes.hidden).apply(net, h), seen)
    }

    /// Looks at the source. Its rows are in the caches, which have those of this call by now.
    fn cross_attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        caches: [ValueId; 2],
    ) -> ValueId {
        let block = format!("decoder.block.{layer}.layer.1");
        let part = format!("{block}.EncDecAttention");
        let h = rms_norm(net, x, &format!("{block}.layer_norm"), self.eps);
        let q = self.project(net, &format!("{part}.q"), h);
        let attention = AttentionVariant {
            scale: 1.0,
            key_scope: KeyScope::EncoderInput,
            ..AttentionVariant::bidirectional(self.sizes.head_size)
        };
        let heads = self.sizes.heads;
        let h = net.per_sequence(&[q], |net, rows| {
            let q = net.split_heads(rows[0], heads);
            vec![attention.attend(net, q.into(), caches, None)]
        })[0];
        LinearLayer::new(&format!("{part}.o"), self.sizes.hidden).apply(net, h)
    }

    fn feed_forward(&self, net: &mut ModelBuilder, block: &str, x: ValueId) -> ValueId {
        let h = rms_norm(net, x, &format!("{block}.layer_norm"), self.eps);
        let name = |part: &str| format!("{block}.DenseReluDense.{part}");
        let (out, width) = (name("wo"), self.intermediate);
        let down = LinearLayer::new(&out, self.sizes.hidden);
        match self.gated {
            false => mlp::ungated(net, h, LinearLayer::new(&name("wi"), width), down, self.activation),
            true => {
                let (gate, up) = (name("wi_0"), name("wi_1"));
                mlp::gated(
                    net,
                    h,
                    [LinearLayer::new(&gate, width), LinearLayer::new(&up, width), down],
                    self.activation,
                )
            }
        }
    }
}

impl Transformer for T5Config {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = (Norm::Rms(self.eps), "decoder.final_layer_norm");
        let frame = OuterLayers::with_names(EMBEDDING, norm, "lm_head.weight", self.tied);
        let scale = self.scale_logits.then(|| 1.0 / (self.sizes.hidden as f64).sqrt());
        OuterLayers { logit_scale: scale, ..frame }
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let (h, caches) = self.self_attention(net, T5Stack::Decoder, layer, x);
        let x = net.add_residual(layer, "attention", x, h);
        let h = self.cross_attention(net, layer, x, caches);
        let x = net.add_residual(layer, "cross_attention", x, h);
        let h = self.feed_forward(net, &format!("decoder.block.{layer}.layer.2"), x);
        net.add_residual(layer, "mlp", x, h)
    }

    fn decoder_start_token_id(&self) -> Option<u32> {
        Some(self.start_token_id)
    }

    fn encode_input(&self, net: &mut ModelBuilder) {
        let x = self.embed(net);
        let x = net.add_layers(self.encoder_layers, x, |net, layer, x| {
            let (h, _) = self.self_attention(net, T5Stack::Encoder, layer, x);
            let x = net.add_residual(layer, "attention", x, h);
            let h = self.feed_forward(net, &format!("encoder.block.{layer}.layer.1"), x);
            net.add_residual(layer, "mlp", x, h)
        });
        let x = rms_norm(net, x, "encoder.final_layer_norm", self.eps);
        net.tap("final_norm", x);
        for layer in 0..self.sizes.layers {
            let part = format!("decoder.block.{layer}.layer.1.EncDecAttention");
            let kv = self.keys_and_values(net, &part, x);
            let kv = kv.map(|rows| net.split_heads(rows, self.sizes.heads));
            append_key_values(net, layer, kv);
        }
        net.store_encoder_length();
    }

    /// The tokens of a source see those behind them.
    fn needs_whole_prompts(&self) -> bool {
        true
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        Some("the first rows of its caches are the source text, which every token sees")
    }

    /// GGUF files call the layer before the activation alike with a gate and without.
    fn canonical_name(&self, stored_name: &str) -> String {
        if self.gated { stored_name.to_string() } else { stored_name.replace(".wi_1.", ".wi.") }
    }

    /// Some files (MADLAD-400) have the table of token embeddings under the names of its users alone.
    fn fallback_names(&self, missing: &str) -> &'static [&'static str] {
        match missing {
            EMBEDDING => &["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
            _ => &[],
        }
    }

    /// Copies of the embedding table, the head where the table is the head, and a table that no layer uses (in the files of T5 1.0).
    fn is_ignored(&self, name: &str) -> bool {
        name.ends_with(".embed_tokens.weight")
            || name.ends_with(".EncDecAttention.relative_attention_bias.weight")
            || (self.tied && name == "lm_head.weight")
    }
}

/// The table of token embeddings, of encoder and decoder.
const EMBEDDING: &str = "shared.weight";

/// Encoders and decoders alone are other models.
fn refuse_single_stacks(fields: &ConfigFields) -> Result<(), ConfigError> {
    let class = fields.get("architectures").and_then(|names| names.as_array()?.first()?.as_str());
    let refused = |what: String| {
        Err(ConfigError::NotSupportedYet {
            file: fields.origin.clone(),
            what,
            supported: "an encoder with a decoder and a head, `T5ForConditionalGeneration`".to_string(),
        })
    };
    match class {
        Some(class)
            if !["ForConditionalGeneration", "WithLMHeadModel"].iter().any(|end| class.ends_with(end)) =>
        {
            refused(format!("the class `{class}`"))
        }
        _ if !fields.flag_or("is_encoder_decoder", true)? => {
            refused("one of the two stacks alone (`is_encoder_decoder` = false)".to_string())
        }
        _ => Ok(()),
    }
}

/// The activation, and whether there is a gate.
fn feed_forward(fields: &ConfigFields) -> Result<(ActivationFunction, bool), ConfigError> {
    const FIELD: &str = "feed_forward_proj";
    let Some(found) = fields.get(FIELD) else { return Ok((ActivationFunction::Relu, false)) };
    let kind = fields.string(FIELD)?;
    let (name, gated) = kind.strip_prefix("gated-").map_or((kind.as_str(), false), |name| (name, true));
    // As the reference reads it.
    let name = if kind == "gated-gelu" { "gelu_new" } else { name };
    let activation = ActivationFunction::from_name(name);
    let activation =
        activation.ok_or_else(|| fields.invalid_value(FIELD, "relu, gated-gelu or the like", found))?;
    Ok((activation, gated))
}

/// The token that decoders start with.
fn start_token(fields: &ConfigFields, vocab: usize) -> Result<u32, ConfigError> {
    let field = fields.first_present(&["decoder_start_token_id", "pad_token_id"]);
    let start = fields.count_or(field, 0)?;
    match u32::try_from(start) {
        Ok(token) if start < vocab => Ok(token),
        _ => Err(fields.invalid_value(field, &format!("a token below {vocab}"), &Value::from(start))),
    }
}

fn infer_fields(t: &mut ConfigEvidence, usually_tied: bool) -> EvidenceResult {
    let names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];
    let table = names.into_iter().find(|name| t.find_tensor(name).is_some()).unwrap_or(names[0]);
    t.record_embedding(table, "lm_head.weight", usually_tied)?;
    t.record_axis_size(&["d_ff"], "encoder.block.0.layer.1.DenseReluDense.wo.weight", 1, 1)
}

/// With the stack that a layer is in. What is called `ffn_up` is `wi` without a gate, which the definition knows.
const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "shared.weight", Same),
        ("output.weight", "lm_head.weight", Same),
        ("enc.output_norm.weight", "encoder.final_layer_norm.weight", Same),
        ("dec.output_norm.weight", "decoder.final_layer_norm.weight", Same),
    ],
    layers: "block",
    block: &[
        ("enc.attn_norm", "layer.0.layer_norm", Same),
        ("enc.attn_q", "layer.0.SelfAttention.q", Same),
        ("enc.attn_k", "layer.0.SelfAttention.k", Same),
        ("enc.attn_v", "layer.0.SelfAttention.v", Same),
        ("enc.attn_o", "layer.0.SelfAttention.o", Same),
        ("enc.attn_rel_b", "layer.0.SelfAttention.relative_attention_bias", Same),
        ("enc.ffn_norm", "layer.1.layer_norm", Same),
        ("enc.ffn_gate", "layer.1.DenseReluDense.wi_0", Same),
        ("enc.ffn_up", "layer.1.DenseReluDense.wi_1", Same),
        ("enc.ffn_down", "layer.1.DenseReluDense.wo", Same),
        ("dec.attn_norm", "layer.0.layer_norm", Same),
        ("dec.attn_q", "layer.0.SelfAttention.q", Same),
        ("dec.attn_k", "layer.0.SelfAttention.k", Same),
        ("dec.attn_v", "layer.0.SelfAttention.v", Same),
        ("dec.attn_o", "layer.0.SelfAttention.o", Same),
        ("dec.attn_rel_b", "layer.0.SelfAttention.relative_attention_bias", Same),
        ("dec.cross_attn_norm", "layer.1.layer_norm", Same),
        ("dec.cross_attn_q", "layer.1.EncDecAttention.q", Same),
        ("dec.cross_attn_k", "layer.1.EncDecAttention.k", Same),
        ("dec.cross_attn_v", "layer.1.EncDecAttention.v", Same),
        ("dec.cross_attn_o", "layer.1.EncDecAttention.o", Same),
        ("dec.cross_attn_rel_b", "layer.1.EncDecAttention.relative_attention_bias", Same),
        ("dec.ffn_norm", "layer.2.layer_norm", Same),
        ("dec.ffn_gate", "layer.2.DenseReluDense.wi_0", Same),
        ("dec.ffn_up", "layer.2.DenseReluDense.wi_1", Same),
        ("dec.ffn_down", "layer.2.DenseReluDense.wo", Same),
    ],
    llama_block: false,
};

/// The converter writes the largest distance, 128, nowhere, and whether there is a gate by there being one.
fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    let gated = w.has_tensor("enc.blk.0.ffn_gate.weight");
    w.set_field("feed_forward_proj", if gated { "gated-gelu" } else { "relu" });
    for (key, field) in [
        ("embedding_length", "d_model"),
        ("attention.key_length", "d_kv"),
        ("feed_forward_length", "d_ff"),
        ("attention.head_count", "num_heads"),
        ("block_count", "num_layers"),
        ("decoder_block_count", "num_decoder_layers"),
        ("context_length", "n_positions"),
        ("attention.relative_buckets_count", "relative_attention_num_buckets"),
        ("decoder_start_token_id", "decoder_start_token_id"),
    ] {
        w.copy_number(key, field)?;
    }
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}
