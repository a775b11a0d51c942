//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject. Programs that have to be alone in their process are next to it.

mod chat;
mod common;
mod conversation;
mod generate;
mod gguf_names;
mod grammar;
mod growth;
#[allow(dead_code, reason = "the fuzz targets use all of it")]
mod readers;
mod serving;
mod serving_choice;
mod serving_files;
mod serving_prefixes;
mod tokenizer;
mod tokenizer_goldens;
mod toy;
