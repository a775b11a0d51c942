//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject. Programs that have to be alone in their process are next to it.

mod aarch64;
mod any_system;
mod attention;
mod attention_case;
mod bad_artifacts;
mod bad_models;
mod batch;
mod cases;
mod chat;
mod commands;
mod conversation;
mod damaged_tables;
mod deep_positions;
mod deploy;
mod doc_commands;
mod docs;
mod embedding;
mod encoder_decoder;
mod every_target;
mod extreme_values;
#[cfg(feature = "hub")]
mod fake_hub;
mod families;
mod forms;
mod gguf;
mod gptq;
mod gpu_adapters;
mod gpu_batches;
mod gpu_bundle;
mod gpu_cubins;
mod gpu_likeliest;
mod gpu_memory;
mod gpu_notices;
mod gpu_pages;
mod gpu_predicted;
#[cfg(unix)]
#[allow(dead_code, reason = "the server's own tests use all of it")]
#[path = "../../../runtime/serve/tests/all/http.rs"]
mod http;
mod hub;
mod hybrid_sessions;
mod interpreters;
mod interrupts;
mod keep;
mod kernel_check;
mod layers;
mod loaders;
mod long_context;
mod lora;
mod lora_slots;
mod matrix;
mod model_table;
mod perplexity;
mod program;
#[cfg(target_os = "linux")]
mod rank_container;
mod rank_disks;
mod rank_gpus;
mod rank_processes;
mod rank_serving;
mod ranks;
mod report;
mod same_bits;
#[cfg(unix)]
mod serve;
mod serve_models;
mod server;
mod serving;
mod software_gpu;
mod step;
mod texts;
mod texts_gguf;
mod together;
mod transformer;
mod transformer_model;
mod tune;
mod weights_on_load;
#[allow(dead_code, reason = "it is a program")]
#[path = "../../../runtime/engine/examples/write.rs"]
mod write_example;
