//! The tokens that layers are compared on.

use mlcc_text::Tokenizer;

use crate::error::CliError;
use mlcc_driver::layers::some_tokens;

/// Tokens where the user names none: a few calls of a small chunk, quickly interpreted.
const DEFAULT_TOKENS: usize = 12;

#[derive(Debug, Clone, clap::Args)]
pub struct PromptArgs {
    /// Token ids of the prompt [default: 12 ids spread over the vocabulary]
    #[arg(long, value_name = "ID", value_delimiter = ',', conflicts_with = "prompt")]
    tokens: Vec<i32>,
    /// Text of the prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
}

impl PromptArgs {
    /// True if the user says nothing about the prompt.
    pub fn is_default(&self) -> bool {
        self.tokens.is_empty() && self.prompt.is_none()
    }

    /// The tokens, at least one of the vocabulary.
    pub fn tokens(
        &self,
        vocab: usize,
        tokenizer: impl FnOnce() -> Result<Tokenizer, CliError>,
    ) -> Result<Vec<i32>, CliError> {
        let tokens = match &self.prompt {
            Some(text) => tokenizer()?.encode(text)?,
            None if self.tokens.is_empty() => some_tokens(DEFAULT_TOKENS, vocab),
            None => self.tokens.clone(),
        };
        match tokens.iter().find(|&&t| usize::try_from(t).map_or(true, |t| t >= vocab)) {
            Some(bad) => Err(CliError::usage(format!("token {bad} is not in the vocabulary of {vocab}"))),
            None if tokens.is_empty() => Err(CliError::usage("the prompt has no tokens")),
            None => Ok(tokens),
        }
    }
}
