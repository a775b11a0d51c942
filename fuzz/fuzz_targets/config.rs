//! Any bytes as a config.json, generation_config.json or golden.json: a value or a typed error, never a
//! panic.
#![no_main]

#[path = "../../models/tests/all/readers.rs"]
#[allow(dead_code)]
mod readers;

libfuzzer_sys::fuzz_target!(|input: &[u8]| readers::config(input));
