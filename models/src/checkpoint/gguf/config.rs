//! Fields of config.json from the metadata of a GGUF file, in the names of `transformers`' configuration classes.
//!
//! What the converter does not write is what the model family has in common (activation, biases): biases are read off
//! the tensors, the rest stands with the family ([`GgufArchitecture::write_fields`]).

use super::super::bytes::FileBytes;
use super::architecture::GgufArchitecture;
use super::writer::{ConfigFieldWriter, FieldResult, RANK};
use super::{read_headers, rope};
use crate::config::ConfigFields;
use crate::config::published::{GGUF, GGUF_POOLING};
use crate::error::CheckpointError;
use serde_json::{Map, Value, json};

/// Reads a GGUF file's configuration. `files` are all files of the model, the first one has the metadata.
pub(in crate::checkpoint) fn read_config_fields(
    files: &[FileBytes],
    architectures: &[&GgufArchitecture],
) -> Result<ConfigFields, CheckpointError> {
    let (tensors, metadata) = read_headers(files)?;
    let arch = metadata.architecture()?.to_string();
    let mut writer =
        ConfigFieldWriter { files, metadata: &metadata, arch: &arch, tensors: &tensors, raw: Map::new() };
    let found = architectures.iter().find(|known| known.name == arch);
    writer.set_field(GGUF, arch.as_str());
    writer.copy_common_fields(found.is_some_and(|known| known.uneven_layers))?;
    let known = found.ok_or_else(|| unknown_error(&writer, architectures))?;
    writer.set_field("model_type", known.model_type);
    (known.write_fields)(&mut writer)?;
    writer.copy_pooling(known.has_classifier)?;
    match known.write_rope {
        Some(write_rope) => write_rope(&mut writer)?,
        None => writer.copy_rope_scaling(known)?,
    }
    Ok(ConfigFields { origin: metadata.origin.clone(), raw: writer.raw })
}

fn unknown_error(w: &ConfigFieldWriter<'_>, architectures: &[&GgufArchitecture]) -> CheckpointError {
    let near = mlcc_files::did_you_mean(w.arch, architectures.iter().map(|known| known.name));
    CheckpointError::Unsupported {
        file: w.metadata.origin.clone(),
        detail: format!(
            "has the architecture `{}`, whose GGUF files are not supported: {near}`mlcc models` lists all",
            w.arch
        ),
    }
}

impl ConfigFieldWriter<'_> {
    /// Sizes and tokens that all families have, under the names that most of them use.
    fn copy_common_fields(&mut self, uneven_layers: bool) -> FieldResult {
        if let Some(rows) = self.tensor_rows("token_embd.weight") {
            self.set_field("vocab_size", rows);
        }
        self.set_field("hidden_size", self.required_number("embedding_length")?);
        self.set_field("num_hidden_layers", self.layer_count()?);
        self.copy_number("context_length", "max_position_embeddings")?;
        self.copy_number("attention.head_count", "num_attention_heads")?;
        if !uneven_layers {
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

    /// How texts are pooled, where the file says it: by the names of sentence-transformers. Decoders may say it too.
    fn copy_pooling(&mut self, has_classifier: bool) -> FieldResult {
        let how = match self.number("pooling_type")? {
            None | Some(0) => return Ok(()),
            Some(1) => "mean",
            Some(2) => "cls",
            Some(3) => "lasttoken",
            // The head is one of XLM-RoBERTa or ModernBERT; that of BERT lacks the layer in front of it.
            Some(RANK) if has_classifier && self.has_tensor("cls.weight") => return Ok(()),
            Some(RANK) => {
                return Err(self.unsupported_error(
                    "is a reranker with a head other than those of XLM-RoBERTa and ModernBERT",
                ));
            }
            Some(other) => return Err(self.unsupported_error(&format!("has pooling_type {other}"))),
        };
        self.set_field(GGUF_POOLING, how);
        Ok(())
    }

    /// `rope_scaling`.
    fn copy_rope_scaling(&mut self, known: &GgufArchitecture) -> FieldResult {
        let original = self.number("rope.scaling.original_context_length")?;
        let attention = self.float("rope.scaling.attn_factor")?;
        if let Some(fields) = rope::read_rope_scaling(self.files, self.tensors, original, attention) {
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
                for field in ["beta_fast", "beta_slow"] {
                    if let Some(number) = self.float(&format!("rope.scaling.yarn_{field}"))? {
                        fields.insert(field.to_string(), json!(number));
                    }
                }
                (known.write_yarn)(self, &mut fields)?;
                self.set_field("rope_scaling", fields);
            }
            (Some(kind), _) => return Err(self.unsupported_error(&format!("has rope scaling `{kind}`"))),
        }
        Ok(())
    }
}
