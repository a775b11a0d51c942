//! Text to tokens and back: everything between texts and a model that needs no model.
//!
//! * [`tokenizer`]: text to token ids and back, also as a stream of UTF-8 pieces.
//! * [`chat`]: messages to a prompt, by the checkpoint's own template, and answers taken apart.
//! * [`grammar`]: the texts that are allowed, and so the tokens.
//! * [`stop`]: the strings that end a text.
//! * [`special_tokens`]: a checkpoint's own files about its special tokens.
//!
//! The crate knows no other crate of the project, starts no threads and opens no files, so that it runs
//! wherever Rust does. [`TemplateHost`] and [`CheckpointFiles`] stand for the machine; `mlcc-engine` has them
//! for the local one.

pub mod chat;
pub mod grammar;
pub mod special_tokens;
pub mod stop;
pub mod tokenizer;
mod utf8;

pub use chat::{ChatError, ChatMessage, ChatSource, ChatTemplate, TemplateHost};
pub use grammar::{Grammar, GrammarError, GrammarFactory, GrammarSpec};
pub use special_tokens::SpecialIds;
pub use tokenizer::{
    CheckpointFiles, DecodeStream, SpecialTokens, TokenId, Tokenizer, TokenizerFile, TokenizerKind,
    Utf8Stream,
};
pub use utf8::{InvalidUtf8, utf8};
