//! Fields of config.json from the metadata of a GGUF file, in the names of `transformers`' configuration classes.
//!
//! What the converter does not write is what the model family has in common (activation, biases): biases are read off
//! the tensors, the rest stands in [`family`].

use super::super::bytes::FileBytes;
use super::header::Header;
use super::rope;
use super::{Metadata, RawTensor};
use crate::config::ConfigFields;
use crate::error::CheckpointError;
use serde_json::{Map, Value, json};

/// Reads a GGUF file's configuration. `files` are all files of the model, the first one has the metadata.
pub(in crate::checkpoint) fn fields(files: &[FileBytes]) -> Result<ConfigFields, CheckpointError> {
    let mut tensors = Vec::new();
    let mut metadata = None;
    for (number, file) in files.iter().enumerate() {
        let header = Header::read(number, file)?;
        tensors.extend(header.tensors);
        metadata.get_or_insert(header.metadata);
    }
    let metadata = metadata.unwrap_or_default();
    let arch = metadata.architecture()?.to_string();
    let mut writer = Writer { metadata: &metadata, arch: &arch, tensors: &tensors, raw: Map::new() };
    writer.common()?;
    family(&mut writer)?;
    writer.rope(files)?;
    Ok(ConfigFields { origin: metadata.origin.clone(), raw: writer.raw })
}

/// Architectures and the model types that they stand for, for messages.
pub(super) const ARCHITECTURES: &[(&str, &str)] = &[
    ("llama", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("qwen3moe", "qwen3_moe"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
    ("phi3", "phi3"),
    ("gpt2", "gpt2"),
    ("gptneox", "gpt_neox"),
    ("falcon", "falcon"),
    ("bloom", "bloom"),
    ("mpt", "mpt"),
    ("starcoder2", "starcoder2"),
    ("stablelm", "stablelm"),
    ("olmo2", "olmo2"),
    ("chatglm", "chatglm"),
    ("glm4", "glm4"),
];

struct Writer<'a> {
    metadata: &'a Metadata,
    arch: &'a str,
    tensors: &'a [RawTensor],
    raw: Map<String, Value>,
}

impl Writer<'_> {
    fn set(&mut self, field: &str, value: impl Into<Value>) {
        self.raw.insert(field.to_string(), value.into());
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }
    fn number(&self, name: &str) -> Result<Option<u64>, CheckpointError> {
        self.metadata.number(&self.key(name))
    }
    fn float(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        self.metadata.float(&self.key(name))
    }

    /// Copies a number under another name, where it is there.
    fn copy(&mut self, name: &str, field: &str) -> Result<(), CheckpointError> {
        if let Some(number) = self.number(name)? {
            self.set(field, number);
        }
        Ok(())
    }
    fn copy_float(&mut self, name: &str, field: &str) -> Result<(), CheckpointError> {
        if let Some(number) = self.float(name)? {
            self.set(field, number);
        }
        Ok(())
    }

    fn has(&self, tensor: &str) -> bool {
        self.tensors.iter().any(|raw| raw.name == tensor)
    }

    /// A number that the model cannot do without.
    fn need(&self, name: &str) -> Result<u64, CheckpointError> {
        self.number(name)?.ok_or_else(|| CheckpointError::Unsupported {
            file: self.metadata.origin.clone(),
            detail: format!("has no metadata `{}`, which its configuration needs", self.key(name)),
        })
    }

    fn refuse(&self, what: &str) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.metadata.origin.clone(),
            detail: format!("{what}, which is not read from GGUF files; use the model's own checkpoint"),
        }
    }

    /// Sizes and tokens that all families have, under the names that most of them use.
    fn common(&mut self) -> Result<(), CheckpointError> {
        let embedding = self.tensors.iter().find(|raw| raw.name == "token_embd.weight");
        if let Some(rows) = embedding.and_then(|raw| raw.shape.first()) {
            self.set("vocab_size", *rows);
        }
        self.set("hidden_size", self.need("embedding_length")?);
        self.set("num_hidden_layers", self.need("block_count")?);
        self.copy("context_length", "max_position_embeddings")?;
        self.copy("feed_forward_length", "intermediate_size")?;
        self.copy("attention.head_count", "num_attention_heads")?;
        self.copy("attention.head_count_kv", "num_key_value_heads")?;
        self.copy("attention.key_length", "head_dim")?;
        self.copy_float("attention.layer_norm_rms_epsilon", "rms_norm_eps")?;
        self.copy_float("rope.freq_base", "rope_theta")?;
        self.set("tie_word_embeddings", !self.has("output.weight"));
        for (key, field) in [("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")] {
            if let Some(id) = self.metadata.number(&format!("tokenizer.ggml.{key}"))? {
                self.set(field, id);
            }
        }
        // Chat models end a turn with this one.
        if let (Some(eos), Some(turn)) = (
            self.raw.get("eos_token_id").and_then(Value::as_u64),
            self.metadata.number("tokenizer.ggml.eot_token_id")?,
        ) && eos != turn
        {
            self.set("eos_token_id", json!([eos, turn]));
        }
        Ok(())
    }

    /// Elements of a head: `attention.key_length`, else an equal share.
    fn head_size(&self) -> Result<u64, CheckpointError> {
        let share = self.need("embedding_length")?.checked_div(self.need("attention.head_count")?);
        Ok(self.number("attention.key_length")?.or(share).unwrap_or(0))
    }

    /// `rope.dimension_count` as a share of the head.
    fn partial_rotary(&mut self, field: &str) -> Result<(), CheckpointError> {
        let head = self.head_size()?;
        if let Some(dims) = self.number("rope.dimension_count")?.filter(|&dims| head > 0 && dims != head) {
            self.set(field, dims as f64 / head as f64);
        }
        Ok(())
    }

    /// `rope_scaling`.
    fn rope(&mut self, files: &[FileBytes]) -> Result<(), CheckpointError> {
        let original = self.number("rope.scaling.original_context_length")?;
        let attention = self.float("rope.scaling.attn_factor")?;
        if let Some(fields) = rope::scaling(files, self.tensors, original, attention) {
            self.set("rope_scaling", fields);
            return Ok(());
        }
        let kind = self.metadata.string(&self.key("rope.scaling.type"))?;
        let factor = self.float("rope.scaling.factor")?;
        match (kind, factor) {
            (None | Some("none"), _) => {}
            (Some(kind @ ("linear" | "yarn")), Some(factor)) => {
                let mut fields = Map::new();
                fields.insert("rope_type".to_string(), json!(kind));
                fields.insert("factor".to_string(), json!(factor));
                if let Some(original) = original {
                    fields.insert("original_max_position_embeddings".to_string(), json!(original));
                }
                self.set("rope_scaling", fields);
            }
            (Some(kind), _) => return Err(self.refuse(&format!("has rope scaling `{kind}`"))),
        }
        Ok(())
    }
}

/// What differs from family to family.
fn family(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    let Some((_, model_type)) = ARCHITECTURES.iter().find(|(arch, _)| *arch == w.arch) else {
        let known: Vec<&str> = ARCHITECTURES.iter().map(|(arch, _)| *arch).collect();
        return Err(CheckpointError::Unsupported {
            file: w.metadata.origin.clone(),
            detail: format!("has the architecture `{}`; GGUF files are read of {}", w.arch, known.join(", ")),
        });
    };
    w.set("model_type", *model_type);
    match w.arch {
        "llama" => llama(w),
        "qwen2" => {
            w.set("hidden_act", "silu");
            Ok(())
        }
        "qwen3" | "qwen3moe" => qwen3(w),
        "gemma2" | "gemma3" => gemma(w),
        "phi3" => {
            w.set("hidden_act", "silu");
            w.copy("attention.sliding_window", "sliding_window")?;
            w.copy("rope.scaling.original_context_length", "original_max_position_embeddings")?;
            w.partial_rotary("partial_rotary_factor")
        }
        "gpt2" => gpt2(w),
        "gptneox" => {
            w.set("hidden_act", "gelu");
            w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
            let parallel = w.metadata.flag(&w.key("use_parallel_residual"))?.unwrap_or(true);
            w.set("use_parallel_residual", parallel);
            let share = w.number("rope.dimension_count")?.unwrap_or(0) as f64 / w.head_size()?.max(1) as f64;
            w.set("rotary_pct", share);
            w.copy_float("rope.freq_base", "rotary_emb_base")
        }
        "falcon" => falcon(w),
        "bloom" => {
            w.copy("attention.head_count", "n_head")?;
            w.copy("block_count", "n_layer")?;
            w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
            w.copy("context_length", "seq_length")
        }
        "mpt" => mpt(w),
        "starcoder2" => {
            w.set("hidden_act", "gelu_pytorch_tanh");
            w.set("use_bias", w.has("blk.0.attn_q.bias"));
            w.copy("attention.sliding_window", "sliding_window")?;
            w.copy_float("attention.layer_norm_epsilon", "norm_epsilon")
        }
        "stablelm" => {
            w.set("hidden_act", "silu");
            w.set("use_qkv_bias", w.has("blk.0.attn_q.bias"));
            w.set("qk_layernorm", w.has("blk.0.attn_q_norm.weight"));
            let parallel = w.metadata.flag(&w.key("use_parallel_residual"))?.unwrap_or(false);
            w.set("use_parallel_residual", parallel && !w.has("blk.0.ffn_norm.weight"));
            w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
            w.partial_rotary("partial_rotary_factor")
        }
        "olmo2" => {
            w.set("hidden_act", "silu");
            w.set("attention_bias", w.has("blk.0.attn_q.bias"));
            Ok(())
        }
        "chatglm" => chatglm(w),
        _ => {
            // glm4
            w.set("hidden_act", "silu");
            w.set("attention_bias", w.has("blk.0.attn_q.bias"));
            w.partial_rotary("partial_rotary_factor")
        }
    }
}

/// Llama and its kin; with experts it is Mixtral.
fn llama(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    w.set("hidden_act", "silu");
    w.set("attention_bias", w.has("blk.0.attn_q.bias"));
    w.set("mlp_bias", w.has("blk.0.ffn_up.bias"));
    if !w.raw.contains_key("head_dim") {
        w.copy("rope.dimension_count", "head_dim")?;
    }
    if w.number("expert_count")?.unwrap_or(0) > 0 {
        w.set("model_type", "mixtral");
        w.copy("expert_count", "num_local_experts")?;
        w.copy("expert_used_count", "num_experts_per_tok")?;
    }
    if let Some(window) = w.number("attention.sliding_window")? {
        w.set("model_type", "mistral");
        w.set("sliding_window", window);
    }
    Ok(())
}

fn qwen3(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    w.set("hidden_act", "silu");
    w.set("attention_bias", w.has("blk.0.attn_q.bias"));
    if w.arch == "qwen3moe" {
        w.copy("expert_count", "num_experts")?;
        w.copy("expert_used_count", "num_experts_per_tok")?;
        w.copy("expert_feed_forward_length", "moe_intermediate_size")?;
        // The converter writes no such flag; all published models have it.
        w.set("norm_topk_prob", true);
        let layers = w.need("block_count")?.min(1000);
        let dense = (0..layers).filter(|layer| !w.has(&format!("blk.{layer}.ffn_gate_exps.weight")));
        w.set("mlp_only_layers", dense.collect::<Vec<u64>>());
    }
    Ok(())
}

/// Layers of the published 27B models, which scale queries differently.
const GEMMA_27B: [(&str, u64); 2] = [("gemma2", 46), ("gemma3", 62)];

fn gemma(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    w.set("hidden_activation", "gelu_pytorch_tanh");
    w.copy("attention.sliding_window", "sliding_window")?;
    w.copy_float("attn_logit_softcapping", "attn_logit_softcapping")?;
    w.copy_float("final_logit_softcapping", "final_logit_softcapping")?;
    // Files without it: llama.cpp knows it by the number of layers.
    let layers = w.need("block_count")?;
    match w.float("attention.scale")? {
        Some(scale) if scale > 0.0 => w.set("query_pre_attn_scalar", scale.powi(-2)),
        _ if GEMMA_27B.contains(&(w.arch, layers)) => {
            let share = w.need("embedding_length")?.checked_div(w.need("attention.head_count")?);
            w.set("query_pre_attn_scalar", share.unwrap_or(0));
        }
        _ => w.set("query_pre_attn_scalar", w.head_size()?),
    }
    if w.arch == "gemma3" {
        let local = w.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
        w.set("rope_local_base_freq", local);
        w.set("sliding_window_pattern", w.number("attention.sliding_window_pattern")?.unwrap_or(6));
    }
    Ok(())
}

fn gpt2(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    w.set("activation_function", "gelu_new");
    w.copy("embedding_length", "n_embd")?;
    w.copy("block_count", "n_layer")?;
    w.copy("attention.head_count", "n_head")?;
    w.copy("context_length", "n_positions")?;
    w.copy("feed_forward_length", "n_inner")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}

fn falcon(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    let kv = w.number("attention.head_count_kv")?.unwrap_or(1);
    let new = w.has("blk.0.attn_norm_2.weight") || kv > 1;
    w.set("activation", "gelu");
    w.set("alibi", false);
    w.set("bias", w.has("blk.0.attn_qkv.bias"));
    w.set("parallel_attn", true);
    w.set("multi_query", kv == 1);
    w.set("new_decoder_architecture", new);
    if new && !w.has("blk.0.attn_norm_2.weight") {
        w.set("num_ln_in_parallel_attn", 1);
    }
    w.set("num_kv_heads", kv);
    w.raw.remove("num_key_value_heads");
    w.copy("feed_forward_length", "ffn_hidden_size")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}

fn mpt(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    let (hidden, inner) = (w.need("embedding_length")?, w.number("feed_forward_length")?);
    w.set("d_model", hidden);
    w.copy("block_count", "n_layers")?;
    w.copy("attention.head_count", "n_heads")?;
    w.copy("context_length", "max_seq_len")?;
    w.set("expansion_ratio", inner.and_then(|inner| inner.checked_div(hidden)).unwrap_or(4));
    w.set("no_bias", !w.has("blk.0.attn_qkv.bias"));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    let bias = w.float("attention.max_alibi_bias")?.unwrap_or(0.0);
    let clip = w.float("attention.clamp_kqv")?;
    let kv = w.number("attention.head_count_kv")?;
    let attention = json!({
        "alibi": bias > 0.0,
        "alibi_bias_max": if bias > 0.0 { bias } else { 8.0 },
        "clip_qkv": clip,
        "kv_n_heads": kv,
        "qk_ln": w.has("blk.0.attn_q_norm.weight"),
    });
    w.set("attn_config", attention);
    w.raw.remove("num_key_value_heads");
    Ok(())
}

fn chatglm(w: &mut Writer<'_>) -> Result<(), CheckpointError> {
    w.copy("block_count", "num_layers")?;
    w.copy("context_length", "seq_length")?;
    w.copy("feed_forward_length", "ffn_hidden_size")?;
    w.copy("attention.head_count_kv", "multi_query_group_num")?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layernorm_epsilon")?;
    w.set("kv_channels", w.head_size()?);
    w.set("multi_query_attention", true);
    w.set("add_qkv_bias", w.has("blk.0.attn_qkv.bias"));
    w.set("add_bias_linear", w.has("blk.0.ffn_up.bias"));
    w.set("rmsnorm", true);
    w.set("post_layer_norm", true);
    w.set("original_rope", true);
    w.set("apply_residual_connection_post_layernorm", false);
    if let Some(rows) = w.raw.get("vocab_size").cloned() {
        w.set("padded_vocab_size", rows);
    }
    // The reference scales the base: 10000 * rope_ratio.
    if let Some(base) = w.float("rope.freq_base")? {
        w.set("rope_ratio", base / 10_000.0);
    }
    w.raw.remove("rope_theta");
    Ok(())
}
