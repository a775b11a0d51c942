//! Any bytes as an artifact file: a value or a typed error, never a panic.
#![no_main]

#[path = "../../runtime/abi/tests/all/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|input: &[u8]| common::read_all(input));
