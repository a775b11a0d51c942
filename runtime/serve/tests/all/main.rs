//! The server over the loopback, with the toy model of the engine's tests: its logits are a hash of all
//! tokens before.

mod adapters;
mod agents;
mod anthropic;
mod constraints;
mod fuzz;
#[allow(dead_code, reason = "the tests of `mlcc serve` use all of it")]
mod http;
mod limits;
mod llama_cpp;
mod logprobs;
mod messages;
mod models;
mod ollama;
mod openapi;
mod page;
mod prefixes;
mod responses;
mod robust;
mod scripted;
mod seeds;
mod server;
mod sites;
mod tools;
#[allow(dead_code, reason = "the engine's tests use all of it")]
#[path = "../../../engine/tests/all/toy/mod.rs"]
mod toy;
#[cfg(feature = "otel")]
mod traces;
#[allow(dead_code, reason = "the tests of tokenizers use all of it")]
#[path = "../../../../text/tests/all/vocabularies.rs"]
mod vocabularies;
