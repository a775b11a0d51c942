//! Any bytes as a tiktoken rank file: a value or a typed error, never a panic.
#![no_main]

#[path = "../../text/tests/all/readers.rs"]
#[allow(dead_code)]
mod readers;

libfuzzer_sys::fuzz_target!(|input: &[u8]| readers::tiktoken(input));
