//! Fields of config.json from the metadata of a GGUF file, in the names of `transformers`' configuration classes.
//!
//! What the converter does not write is what the model family has in common (activation, biases): biases are read off
//! the tensors, the rest stands in [`super::families`].

use super::super::bytes::FileBytes;
use super::families::write_family_fields;
use super::{GgufMetadata, RawTensor, read_headers};
use super::{encoders, hybrids, rope};
use crate::config::ConfigFields;
use crate::config::published::GGUF;
use crate::error::CheckpointError;
use serde_json::{Map, Value, json};

/// Reads a GGUF file's configuration. `files` are all files of the model, the first one has the metadata.
pub(in crate::checkpoint) fn read_config_fields(
    files: &[FileBytes],
) -> Result<ConfigFields, CheckpointError> {
    let (tensors, metadata) = read_headers(files)?;
    let arch = metadata.architecture()?.to_string();
    let mut writer =
        ConfigFieldWriter { metadata: &metadata, arch: &arch, tensors: &tensors, raw: Map::new() };
    writer.set_field(GGUF, arch.as_str());
    writer.copy_common_fields()?;
    write_family_fields(&mut writer)?;
    encoders::copy_pooling(&mut writer)?;
    writer.copy_rope_scaling(files)?;
    Ok(ConfigFields { origin: metadata.origin.clone(), raw: writer.raw })
}

/// The architectures (`general.architecture`) of which GGUF files are read, and the model types that they stand for.
pub const ARCHITECTURES: &[(&str, &str)] = &[
    ("llama", "llama"),
    ("baichuan", "baichuan"),
    ("internlm2", "llama"),
    ("granite", "granite"),
    ("qwen", "qwen"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("qwen3moe", "qwen3_moe"),
    ("gemma", "gemma"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
    ("gemma-embedding", "gemma3_text"),
    ("bert", "bert"),
    ("modern-bert", "modernbert"),
    ("nomic-bert", "nomic_bert"),
    ("phi3", "phi3"),
    ("gpt2", "gpt2"),
    ("gptneox", "gpt_neox"),
    ("falcon", "falcon"),
    ("bloom", "bloom"),
    ("mpt", "mpt"),
    ("starcoder", "gpt_bigcode"),
    ("starcoder2", "starcoder2"),
    ("stablelm", "stablelm"),
    ("olmo2", "olmo2"),
    ("chatglm", "chatglm"),
    ("glm4", "glm4"),
    ("smollm3", "smollm3"),
    ("mistral3", "ministral3"),
    ("cohere2", "cohere2"),
    ("gpt-oss", "gpt_oss"),
    ("glm4moe", "glm4_moe"),
    ("minimax-m2", "minimax_m2"),
    ("lfm2", "lfm2"),
    ("lfm2moe", "lfm2_moe"),
    ("mamba", "mamba"),
    ("mamba2", "mamba2"),
    ("exaone4", "exaone4"),
    ("qwen35", "qwen3_5_text"),
    ("qwen35moe", "qwen3_5_moe_text"),
    ("qwen3next", "qwen3_5_moe_text"),
    ("gemma4", "gemma4_text"),
    ("granitehybrid", "granitemoehybrid"),
    ("falcon-h1", "falcon_h1"),
    ("nemotron_h", "nemotron_h"),
    ("nemotron_h_moe", "nemotron_h"),
    ("deepseek2", "deepseek_v3"),
    ("mistral4", "mistral4"),
    ("kimi-linear", "kimi_linear"),
    ("t5", "t5"),
    ("rwkv6", "rwkv6"),
    ("rwkv7", "rwkv7"),
];

/// Fields under construction.
pub(super) struct ConfigFieldWriter<'a> {
    pub metadata: &'a GgufMetadata,
    pub arch: &'a str,
    pub tensors: &'a [RawTensor],
    pub raw: Map<String, Value>,
}

impl ConfigFieldWriter<'_> {
    pub(super) fn set_field(&mut self, field: &str, value: impl Into<Value>) {
        self.raw.insert(field.to_string(), value.into());
    }

    pub(super) fn metadata_key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }
    pub(super) fn number(&self, name: &str) -> Result<Option<u64>, CheckpointError> {
        self.metadata.number(&self.metadata_key(name))
    }
    pub(super) fn float(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        self.metadata.float(&self.metadata_key(name))
    }

    /// Copies a number under another name, where it is there.
    pub(super) fn copy_number(&mut self, name: &str, field: &str) -> Result<(), CheckpointError> {
        if let Some(number) = self.number(name)? {
            self.set_field(field, number);
        }
        Ok(())
    }
    pub(super) fn copy_float(&mut self, name: &str, field: &str) -> Result<(), CheckpointError> {
        if let Some(number) = self.float(name)? {
            self.set_field(field, number);
        }
        Ok(())
    }

    pub(super) fn has_tensor(&self, tensor: &str) -> bool {
        self.tensors.iter().any(|raw| raw.name == tensor)
    }

    /// Rows of a tensor that is there.
    pub(super) fn tensor_rows(&self, tensor: &str) -> Option<usize> {
        self.tensors.iter().find(|raw| raw.name == tensor)?.shape.first().copied()
    }

    /// A number that the model cannot do without.
    pub(super) fn required_number(&self, name: &str) -> Result<u64, CheckpointError> {
        self.number(name)?.ok_or_else(|| CheckpointError::Unsupported {
            file: self.metadata.origin.clone(),
            detail: format!("has no metadata `{}`, which its configuration needs", self.metadata_key(name)),
        })
    }

    pub(super) fn unsupported_error(&self, what: &str) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.metadata.origin.clone(),
            detail: format!("{what}, which is not supported in GGUF files; use the model's own checkpoint"),
        }
    }

    /// Sizes and tokens that all families have, under the names that most of them use.
    fn copy_common_fields(&mut self) -> Result<(), CheckpointError> {
        let embedding = self.tensors.iter().find(|raw| raw.name == "token_embd.weight");
        if let Some(rows) = embedding.and_then(|raw| raw.shape.first()) {
            self.set_field("vocab_size", *rows);
        }
        self.set_field("hidden_size", self.required_number("embedding_length")?);
        self.set_field("num_hidden_layers", self.layer_count()?);
        self.copy_number("context_length", "max_position_embeddings")?;
        self.copy_number("attention.head_count", "num_attention_heads")?;
        // Layers of this one may differ in both.
        if self.arch != "gemma4" {
            self.copy_number("feed_forward_length", "intermediate_size")?;
            self.copy_number("attention.head_count_kv", "num_key_value_heads")?;
        }
        self.copy_number("attention.key_length", "head_dim")?;
        self.copy_float("attention.layer_norm_rms_epsilon", "rms_norm_eps")?;
        self.copy_float("rope.freq_base", "rope_theta")?;
        self.set_field("tie_word_embeddings", !self.has_tensor("output.weight"));
        for (key, field) in [("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")] {
            if let Some(id) = self.metadata.number(&format!("tokenizer.ggml.{key}"))? {
                self.set_field(field, id);
            }
        }
        // Chat models end a turn with this one.
        if let (Some(eos), Some(turn)) = (
            self.raw.get("eos_token_id").and_then(Value::as_u64),
            self.metadata.number("tokenizer.ggml.eot_token_id")?,
        ) && eos != turn
        {
            self.set_field("eos_token_id", json!([eos, turn]));
        }
        Ok(())
    }

    /// Layers, without those of a draft head, which are counted among them.
    pub(super) fn layer_count(&self) -> Result<u64, CheckpointError> {
        let draft = self.number("nextn_predict_layers")?.unwrap_or(0);
        Ok(self.required_number("block_count")?.saturating_sub(draft))
    }

    /// Elements of a head: `attention.key_length`, else an equal share.
    pub(super) fn head_size(&self) -> Result<u64, CheckpointError> {
        let share = self
            .required_number("embedding_length")?
            .checked_div(self.required_number("attention.head_count")?);
        Ok(self.number("attention.key_length")?.or(share).unwrap_or(0))
    }

    /// `rope.dimension_count` as a share of the head.
    pub(super) fn copy_partial_rotary(&mut self, field: &str) -> Result<(), CheckpointError> {
        let head = self.head_size()?;
        if let Some(dims) = self.number("rope.dimension_count")?.filter(|&dims| head > 0 && dims != head) {
            self.set_field(field, dims as f64 / head as f64);
        }
        Ok(())
    }

    /// What YaRN has beside its factor, and what stands with it.
    fn copy_yarn(&mut self, fields: &mut Map<String, Value>) -> Result<(), CheckpointError> {
        for (key, field) in [("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")] {
            if let Some(number) = self.float(&format!("rope.scaling.yarn_{key}"))? {
                fields.insert(field.to_string(), json!(number));
            }
        }
        match self.arch {
            // As published: files do not say it.
            "gpt-oss" => drop(fields.insert("truncate".to_string(), json!(false))),
            "mistral3" => {
                // The converter writes one of two numbers that are equal.
                if let Some(scale) = self.float("rope.scaling.yarn_log_multiplier")? {
                    fields.insert("mscale".to_string(), json!(scale));
                    fields.insert("mscale_all_dim".to_string(), json!(scale));
                }
                let mut parameters = fields.clone();
                parameters
                    .insert("rope_theta".to_string(), json!(self.float("rope.freq_base")?.unwrap_or(1e6)));
                let beta = self.float("attention.temperature_scale")?.unwrap_or(0.0);
                parameters.insert("llama_4_scaling_beta".to_string(), json!(beta));
                self.set_field("rope_parameters", parameters);
            }
            "deepseek2" | "mistral4" => {
                // A tenth of what the others have there.
                if let Some(tenth) = self.float("rope.scaling.yarn_log_multiplier")? {
                    fields.insert("mscale".to_string(), json!(10.0 * tenth));
                    fields.insert("mscale_all_dim".to_string(), json!(10.0 * tenth));
                }
                if self.arch == "mistral4" {
                    let mut parameters = fields.clone();
                    let theta = self.float("rope.freq_base")?.unwrap_or(1e4);
                    parameters.insert("rope_theta".to_string(), json!(theta));
                    // As published, where a file does not say it.
                    let beta = self.float("attention.temperature_scale")?.unwrap_or(0.1);
                    parameters.insert("llama_4_scaling_beta".to_string(), json!(beta));
                    self.set_field("rope_parameters", parameters);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// `rope_scaling`.
    fn copy_rope_scaling(&mut self, files: &[FileBytes]) -> Result<(), CheckpointError> {
        if self.arch == "gemma4" {
            return hybrids::gemma4_rope(self, files);
        }
        let original = self.number("rope.scaling.original_context_length")?;
        let attention = self.float("rope.scaling.attn_factor")?;
        if let Some(fields) = rope::read_rope_scaling(files, self.tensors, original, attention) {
            self.set_field("rope_scaling", fields);
            return Ok(());
        }
        let kind = self.metadata.string(&self.metadata_key("rope.scaling.type"))?;
        // As llama.cpp reads files that were written before the type was: their factor is a linear one, under one of two names.
        let factor = self.float("rope.scaling.factor")?.or(self.float("rope.scale_linear")?);
        let kind = kind.or(factor.filter(|&factor| factor != 0.0 && factor != 1.0).map(|_| "linear"));
        match (kind, factor) {
            (None | Some("none"), _) => {}
            (Some(kind @ ("linear" | "yarn")), Some(factor)) => {
                let mut fields = Map::new();
                fields.insert("rope_type".to_string(), json!(kind));
                fields.insert("factor".to_string(), json!(factor));
                if let Some(original) = original {
                    fields.insert("original_max_position_embeddings".to_string(), json!(original));
                }
                self.copy_yarn(&mut fields)?;
                self.set_field("rope_scaling", fields);
            }
            (Some(kind), _) => return Err(self.unsupported_error(&format!("has rope scaling `{kind}`"))),
        }
        Ok(())
    }
}
