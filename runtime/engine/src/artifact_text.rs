//! The parts of an artifact for texts, besides its code and weights.

use std::collections::BTreeMap;

use mlcc_runtime::Model;
use mlcc_text::tokenizer::TokenizerError;
use mlcc_text::{ChatError, ChatSource, ChatTemplate, TokenId, Tokenizer};
use serde_json::Value;
use thiserror::Error;

use crate::conversation::ChatFormat;
use crate::family_sampling;
use crate::generation_config::{GenerationConfig, GenerationConfigError};
use crate::local_machine::LocalMachine;
use crate::sampler::{SamplingOverrides, SamplingParams};

#[derive(Debug, Error)]
pub enum ArtifactTokenizerError {
    #[error(
        "{path} contains no tokenizer, because there was none next to the model when it was built: name a tokenizer \
         file with --tokenizer, here or for `mlcc build`"
    )]
    NoTokenizer { path: String },
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The tokenizer of the artifact.
pub fn tokenizer(model: &Model) -> Result<Tokenizer, ArtifactTokenizerError> {
    match model.tokenizer() {
        Some(section) => {
            Ok(Tokenizer::from_section(section)?.with_decoder_start(model.plan().decoder_start()))
        }
        None => {
            Err(ArtifactTokenizerError::NoTokenizer { path: model.artifact().path().display().to_string() })
        }
    }
}

/// The format that makes a prompt of messages, if the artifact has one.
pub fn chat_format(model: &Model) -> Result<Option<ChatFormat>, ChatError> {
    let Some(section) = model.chat() else { return Ok(None) };
    Ok(Some(ChatFormat::Template(Box::new(ChatTemplate::from_section(section, &LocalMachine)?))))
}

/// A template in the place of the artifact's own, with the model's special tokens.
pub fn with_tokens(source: ChatSource, model: &Model) -> Result<ChatSource, ChatError> {
    let own = model.chat().map(ChatSource::from_section).transpose()?;
    let own = own.map(|own| own.tokens().clone()).filter(|tokens| !tokens.is_empty());
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    Ok(source.with_tokens(own.unwrap_or_else(|| special_tokens(&metadata))))
}

/// The names of a model's special tokens with their texts (`bos_token`, ...), from an artifact's metadata.
fn special_tokens(metadata: &Value) -> BTreeMap<String, String> {
    let tokens = metadata.pointer("/tokenizer/special_tokens").and_then(Value::as_object);
    let text = |(name, text): (&String, &Value)| Some((name.clone(), text.as_str()?.to_owned()));
    tokens.into_iter().flatten().filter_map(text).collect()
}

/// The tokens that end a text, from an artifact's metadata.
pub fn eos_ids(metadata: &Value) -> Vec<TokenId> {
    let ids = metadata.pointer("/tokenizer/eos_token_ids").and_then(Value::as_array);
    ids.into_iter().flatten().filter_map(|v| TokenId::try_from(v.as_i64()?).ok()).collect()
}

/// Defaults of this crate, then the model's generation_config.json or what its family is used with, from an
/// artifact's metadata.
pub fn sampling(metadata: &Value) -> Result<SamplingParams, GenerationConfigError> {
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
