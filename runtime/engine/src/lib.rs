//! Text in, text out: everything between a prompt and the tokens that a compiled model works on.
//!
//! * [`mlcc_text`]: text to tokens and back; here as [`text`].
//! * [`sampler`]: logits to one token id.
//! * [`generate`]: the loop of prefill, sample and decode over any [`generate::LanguageModel`].
//! * [`conversation`]: a chat over one context that is read only once.
//! * [`GrammarCompiler`]: grammars of strangers, in bounded time.
//! * [`serving`]: many texts at the same time, for a server.
//! * [`embedding`]: vectors of texts, and scores of pairs.
//! * [`eval`]: perplexity, and the distance of two models.
//! * [`artifact_text`]: the sections of an artifact about texts.
//! * [`generation_config`]: a checkpoint's own file about sampling.
//! * [`LocalMachine`]: files, stacks and clocks for [`mlcc_text`].
//!
//! The crate knows nothing of the compiler. Everything that it reads can come from memory, because an
//! artifact carries its tokenizer in a payload section.

pub mod artifact_text;
pub mod conversation;
pub mod embedding;
pub mod eval;
mod family_sampling;
pub mod generate;
pub mod generation_config;
mod grammar_compiler;
mod local_machine;
mod model;
pub mod sampler;
pub mod serving;
pub mod speculate;

pub use mlcc_text as text;

pub use conversation::{ChatFormat, Conversation};
pub use family_sampling::family_sampling;
pub use generate::{
    FinishReason, GenerateError, GenerationRequest, GenerationResult, LanguageModel, RewindModel,
    TextGenerator,
};
pub use generation_config::GenerationConfig;
pub use grammar_compiler::GrammarCompiler;
pub use local_machine::LocalMachine;
pub use model::{can_draft, is_batch_invariant, takes_drafts};
pub use sampler::{Sampler, SamplingOverrides, SamplingParams};
