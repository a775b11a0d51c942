//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject. Programs that have to be alone in their process are next to it.

#[path = "../../../../text/tests/all/vocabularies.rs"]
mod common;
mod conversation;
mod generate;
mod grammar;
mod local_machine;
mod serving;
mod serving_choice;
mod serving_files;
mod serving_prefixes;
mod toy;
