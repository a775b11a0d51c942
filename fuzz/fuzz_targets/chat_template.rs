//! Any bytes as a chat template: a value or a typed error, never a panic.
#![no_main]

#[path = "../../text/tests/all/readers.rs"]
#[allow(dead_code)]
mod readers;

libfuzzer_sys::fuzz_target!(|input: &[u8]| readers::chat(input, &mlcc_engine::LocalMachine));
