//! What an artifact carries for texts, beside its code and weights.

use mlcc_runtime::Model;
use serde_json::Value;
use thiserror::Error;

use crate::chat::{ChatError, ChatTemplate};
use crate::conversation::ChatFormat;
use crate::family_sampling;
use crate::generation_config::{ConfigError, GenerationConfig};
use crate::sampler::{SamplingOverrides, SamplingParams};
use crate::tokenizer::{TokenId, Tokenizer, TokenizerError};

#[derive(Debug, Error)]
pub enum CarriedError {
    #[error(
        "{path} holds no tokenizer, because there was none beside the model when it was built: name a tokenizer file with \
         --tokenizer, here or for `mlcc build`"
    )]
    NoTokenizer { path: String },
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The tokenizer of the artifact.
pub fn tokenizer(model: &Model) -> Result<Tokenizer, CarriedError> {
    match model.tokenizer() {
        Some(section) => {
            Ok(Tokenizer::from_section(section)?.with_decoder_start(model.plan().decoder_start()))
        }
        None => Err(CarriedError::NoTokenizer { path: model.artifact().path().display().to_string() }),
    }
}

/// How messages become a prompt, if the artifact says so.
pub fn chat_format(model: &Model) -> Result<Option<ChatFormat>, ChatError> {
    let Some(section) = model.chat() else { return Ok(None) };
    Ok(Some(ChatFormat::Template(Box::new(ChatTemplate::from_section(section)?))))
}

/// The tokens that end a text, from an artifact's metadata.
pub fn eos_ids(metadata: &Value) -> Vec<TokenId> {
    let ids = metadata.pointer("/tokenizer/eos_token_ids").and_then(Value::as_array);
    ids.into_iter().flatten().filter_map(|v| TokenId::try_from(v.as_i64()?).ok()).collect()
}

/// Defaults of this crate, then the model's generation_config.json or what its family is used with, from an artifact's metadata.
pub fn sampling(metadata: &Value) -> Result<SamplingParams, ConfigError> {
    let file = match &metadata["generation_config"] {
        Value::Null => GenerationConfig::default(),
        value => GenerationConfig::from_json("generation_config.json", value.to_string().as_bytes())?,
    };
    let of_model = match file.sampling() {
        nothing if nothing == SamplingOverrides::default() => family_sampling(&metadata["model"]),
        set => set,
    };
    Ok(SamplingParams::default().with(&of_model))
}
