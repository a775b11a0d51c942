//! Prompts of models that write the text between two others.

use mlcc_text::{TokenId, Tokenizer};

use crate::error::ApiError;
use crate::served_model::ServedModel;

/// Names of the tokens before the prefix, before the suffix, and before the text between them, by family.
const NAMES: &[[&str; 3]] = &[
    // Qwen Coder, CodeGemma, Granite 4
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // StarCoder, Granite Code
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    // SantaCoder
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // DeepSeek Coder
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
];

/// Names of tokens that are followed by another file or the end.
const ENDS: &[&str] = &[
    "<|fim_pad|>",
    "<fim_pad>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "<|endoftext|>",
];

/// The tokens of a vocabulary around a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FimTokens {
    prefix: TokenId,
    suffix: TokenId,
    middle: TokenId,
    /// Tokens that end the text between the two.
    pub ends: Vec<TokenId>,
}

impl FimTokens {
    /// The tokens of a model, if it was trained with them.
    pub fn find(tokenizer: &Tokenizer) -> Option<FimTokens> {
        let id = |name: &&str| tokenizer.token_to_id(name);
        let of = |[prefix, suffix, middle]: &[&str; 3]| {
            let ends = ENDS.iter().filter_map(id).collect();
            Some(FimTokens { prefix: id(prefix)?, suffix: id(suffix)?, middle: id(middle)?, ends })
        };
        NAMES.iter().find_map(of)
    }

    /// The same for a request, whose field `param` asks for it.
    pub fn require(tokenizer: &Tokenizer, param: &str) -> Result<FimTokens, ApiError> {
        FimTokens::find(tokenizer).ok_or_else(|| {
            let message = format!(
                "`{param}`: the vocabulary of this model has no tokens around a gap (`<|fim_prefix|>` and the like), so \
                 it cannot write what stands between two texts"
            );
            ApiError::field(param, "unsupported", message)
        })
    }

    /// The tokens of a prompt with a prefix and a suffix.
    pub fn prompt(&self, hosted: &ServedModel, prefix: &str, suffix: &str) -> Result<Vec<TokenId>, ApiError> {
        hosted.check_text("prompt", prefix)?;
        hosted.check_text("suffix", suffix)?;
        let wrong = |error: mlcc_text::tokenizer::TokenizerError| {
            ApiError::field("prompt", "invalid_value", error.to_string())
        };
        let tokenizer = &hosted.tokenizer;
        let before = tokenizer.encode(prefix).map_err(wrong)?;
        // What a prompt begins with, where the tokenizer's template asks for it.
        let mut ids = tokenizer.encode_prompt(prefix).map_err(wrong)?;
        ids.truncate(if ids.ends_with(&before) { ids.len() - before.len() } else { 0 });
        ids.push(self.prefix);
        ids.extend(before);
        ids.push(self.suffix);
        ids.extend(tokenizer.encode(suffix).map_err(wrong)?);
        ids.push(self.middle);
        Ok(ids)
    }
}
