//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject.

mod chat;
mod common;
mod gguf_names;
mod grammar;
mod growth;
#[allow(dead_code, reason = "the fuzz targets use all of it")]
mod readers;
mod tokenizer;
mod tokenizer_goldens;
mod vocabularies;
