//! Text in, text out: everything between a prompt and the tokens that a compiled model works on.
//!
//! * [`tokenizer`]: text to token ids and back, also as a stream of UTF-8 pieces.
//! * [`sampler`]: logits to one token id; [`stop`]: where a text has to end.
//! * [`generate`]: the loop of prefill, sample and decode over any [`generate::LanguageModel`].
//! * [`conversation`]: a chat over one context that is read only once.
//! * [`grammar`]: the texts that are allowed, and so the tokens.
//! * [`serving`]: many texts at the same time, for a server.
//! * [`embedding`]: vectors of texts, and scores of pairs.
//! * [`eval`]: perplexity, and the distance of two models.
//! * [`chat`]: messages to a prompt, by the checkpoint's own template.
//! * [`artifact_text`]: the sections of an artifact about texts.
//! * [`generation_config`], [`special_tokens`]: a checkpoint's own files about sampling and about its special
//!   tokens.
//!
//! The crate knows nothing of the compiler. Everything that it reads can come from memory, because an
//! artifact carries its tokenizer in a payload section.

pub mod artifact_text;
pub mod chat;
pub mod conversation;
pub mod embedding;
pub mod eval;
mod family_sampling;
pub mod generate;
pub mod generation_config;
pub mod grammar;
mod model;
pub mod sampler;
pub mod serving;
pub mod special_tokens;
pub mod speculate;
pub mod stop;
pub mod text;
pub mod tokenizer;

pub use chat::{ChatError, ChatMessage, ChatSource, ChatTemplate};
pub use conversation::{ChatFormat, Conversation};
pub use family_sampling::family_sampling;
pub use generate::{
    FinishReason, GenerateError, GenerationRequest, GenerationResult, LanguageModel, RewindModel,
    TextGenerator,
};
pub use generation_config::GenerationConfig;
pub use grammar::{Grammar, GrammarCompiler, GrammarError, GrammarSpec};
pub use model::{can_draft, is_batch_invariant, takes_drafts};
pub use sampler::{Sampler, SamplingOverrides, SamplingParams};
pub use special_tokens::SpecialIds;
pub use tokenizer::{
    DecodeStream, SpecialTokens, TokenId, Tokenizer, TokenizerFile, TokenizerKind, Utf8Stream,
};
