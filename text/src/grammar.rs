//! Grammars: the texts that a request allows, and from them, token by token, the tokens that may come next.
//!
//! [`GrammarFactory`] knows a model's vocabulary and makes a [`Grammar`] of a [`GrammarSpec`], by the crate
//! `llguidance` (Earley parser over derivatives of regular expressions,
//! <https://github.com/guidance-ai/llguidance>). A grammar that cannot be enforced as a whole is an error;
//! nothing is left out silently.
//!
//! Grammars come from strangers: their size is bounded here, and the caller gives a stack
//! ([`GrammarFactory::STACK`]) and bounds the time.

mod factory;
mod matcher;
mod patterns;
mod schema;
mod vocabulary;

use serde_json::Value;
use thiserror::Error;

pub use factory::GrammarFactory;
pub use matcher::{Grammar, MaskLimits};
pub use schema::{SchemaStrictness, compilable, compilable_part, referred};
pub(crate) use schema::{constrains, readable};

/// The name of the grammar in a [`GrammarSpec::Framed`].
pub(crate) const FRAMED: &str = "framed";

/// Most bytes of a grammar's text.
const MOST_BYTES: usize = 256 << 10;

/// The constraint on a text.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema admits. Keys of objects come in the order of `properties`.
    JsonSchema(Value),
    /// A text that an expression matches as a whole, in the syntax of Rust's crate `regex`.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's variant of Lark's syntax.
    Lark(String),
    /// A grammar in Lark's syntax in which `@framed` is the place of another one, which has no frame itself.
    Framed { rules: String, part: Box<GrammarSpec> },
}

impl GrammarSpec {
    /// Fails if its text is longer than that of a grammar may be.
    pub fn check_size(&self) -> Result<(), GrammarError> {
        match self.size() {
            bytes if bytes > MOST_BYTES => Err(GrammarError::TooLarge { bytes, most: MOST_BYTES }),
            _ => Ok(()),
        }
    }

    /// Bytes of its text.
    fn size(&self) -> usize {
        match self {
            GrammarSpec::JsonObject => 0,
            GrammarSpec::JsonSchema(schema) => schema.to_string().len(),
            GrammarSpec::Regex(text) | GrammarSpec::Lark(text) => text.len(),
            GrammarSpec::Framed { rules, part } => rules.len() + part.size(),
            GrammarSpec::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
        }
    }
}

#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum GrammarError {
    #[error("the grammar has {bytes} bytes, at most {most} are allowed")]
    TooLarge { bytes: usize, most: usize },
    #[error("the grammar cannot be enforced: {reason}")]
    Invalid { reason: String },
    #[error("the grammar took more than {seconds} seconds to compile: make it smaller")]
    TooSlow { seconds: u64 },
    #[error("{running} slow grammars are already being compiled: try again later")]
    Busy { running: usize },
    #[error("the grammar is for a vocabulary of {found} tokens, the model has {expected}")]
    Vocabulary { expected: usize, found: usize },
    #[error("the tokenizer's vocabulary cannot be used for grammars: {reason}")]
    Tokenizer { reason: String },
    #[error("a thread to compile the grammar cannot be started: {reason}")]
    Thread { reason: String },
    #[error(
        "the grammar is too slow: finding the tokens that may come next took more than {seconds} seconds at one step, \
         or {text} in total. Make it less ambiguous"
    )]
    SlowMask { seconds: u64, text: u64 },
    #[error("the grammar cannot continue: {reason}")]
    Step { reason: String },
}

/// The message of llguidance, without its additions for developers.
fn reason(error: impl std::fmt::Display) -> String {
    const LONGEST: usize = 300;
    let text = format!("{error:#}");
    let end = ["\n<backtrace>", "\n<state>", "\n<non-verbose/>"]
        .into_iter()
        .filter_map(|mark| text.find(mark))
        .min();
    let text = text[..end.unwrap_or(text.len())].trim_end();
    match text.char_indices().nth(LONGEST) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
