//! The begin and end tokens of a model.
//!
//! Three files may name them. The ids of `generation_config.json` win over those of `config.json`, and these
//! over the names in `tokenizer_config.json`, because the makers update the first one when they fix a
//! checkpoint.

use serde::Deserialize;
use thiserror::Error;

use crate::tokenizer::{TokenId, Tokenizer, TokenizerKind};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialIds {
    pub bos: Option<TokenId>,
    /// Any of these ends a text.
    pub eos: Vec<TokenId>,
}

#[derive(Debug, Error)]
#[error("{file} is not as expected: {reason}. Correct the field, or remove the file to use the defaults.")]
pub struct SpecialTokensError {
    pub file: String,
    pub reason: String,
}

/// `null`, one id or a list of ids.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum TokenIdList {
    #[default]
    None,
    One(TokenId),
    Many(Vec<TokenId>),
}

impl TokenIdList {
    pub fn as_slice(&self) -> &[TokenId] {
        match self {
            TokenIdList::None => &[],
            TokenIdList::One(id) => std::slice::from_ref(id),
            TokenIdList::Many(ids) => ids,
        }
    }
}

/// The contents of a checkpoint's files, where they exist.
#[derive(Debug, Clone, Copy, Default)]
pub struct SpecialSources<'a> {
    pub generation_config: Option<&'a [u8]>,
    /// Without what Python writes beside plain JSON.
    pub config: Option<&'a [u8]>,
    pub tokenizer_config: Option<&'a [u8]>,
}

#[derive(Deserialize)]
struct GenerationIds {
    bos_token_id: Option<TokenId>,
    #[serde(default)]
    eos_token_id: TokenIdList,
}

#[derive(Deserialize)]
struct SpecialTokenConfig {
    bos_token_id: Option<TokenId>,
    #[serde(default)]
    eos_token_id: TokenIdList,
    /// The text model inside of one that also takes images or sounds.
    text_config: Option<Box<SpecialTokenConfig>>,
}

#[derive(Deserialize)]
struct TokenizerConfig {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
}

/// Older files give the whole token, newer ones its name.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenName {
    Name(String),
    Token { content: String },
}

impl TokenName {
    fn id(&self, tokenizer: &Tokenizer) -> Option<TokenId> {
        match self {
            TokenName::Name(name) | TokenName::Token { content: name } => tokenizer.token_to_id(name),
        }
    }
}

impl SpecialIds {
    pub fn resolve(tokenizer: &Tokenizer, sources: SpecialSources<'_>) -> Result<Self, SpecialTokensError> {
        let mut ids = SpecialIds::default();
        if let Some(bytes) = sources.generation_config {
            let file: GenerationIds = parse("generation_config.json", bytes)?;
            ids.fill(file.bos_token_id, file.eos_token_id.as_slice());
        }
        if let Some(bytes) = sources.config {
            let file: SpecialTokenConfig = parse("config.json", bytes)?;
            ids.fill(file.bos_token_id, file.eos_token_id.as_slice());
            if let Some(text) = file.text_config {
                ids.fill(text.bos_token_id, text.eos_token_id.as_slice());
            }
        }
        if let Some(bytes) = sources.tokenizer_config {
            let file: TokenizerConfig = parse("tokenizer_config.json", bytes)?;
            let eos = file.eos_token.and_then(|name| name.id(tokenizer));
            ids.fill(file.bos_token.and_then(|name| name.id(tokenizer)), eos.as_slice());
        }
        if tokenizer.kind() == TokenizerKind::RwkvWorld {
            ids.fill(None, tokenizer.special_ids());
        }
        Ok(ids)
    }

    fn fill(&mut self, bos: Option<TokenId>, eos: &[TokenId]) {
        self.bos = self.bos.or(bos);
        if self.eos.is_empty() {
            self.eos = eos.to_vec();
        }
    }
}

fn parse<'a, T: Deserialize<'a>>(file: &str, bytes: &'a [u8]) -> Result<T, SpecialTokensError> {
    serde_json::from_slice(bytes)
        .map_err(|e| SpecialTokensError { file: file.to_owned(), reason: e.to_string() })
}
