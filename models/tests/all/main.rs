//! All integration tests of the crate in one program, since linking it is most of a build: one module per subject.
//! Beside it stand programs that have to be alone in their process.

mod bad_checkpoints;
mod common;
mod config_fields;
mod configurations;
mod disagreements;
mod gguf;
mod lora;
mod mutated_inputs;
mod nomic_bert;
mod packed;
mod read_checkpoints;
mod readers;
mod rwkv_versions;
mod told_by_tensors;
mod transformer_configs;
