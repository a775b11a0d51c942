//! mlcc-models: model definitions and everything that reads a checkpoint.
//!
//! From a `--model` argument to tensors in four steps, each one module:
//!
//! * [`resolve`] finds the files (directory, file, Hugging Face cache, preset name);
//! * [`config`] and [`registry`] turn `config.json` into a typed configuration, [`infer`] does it from tensor shapes where
//!   a `.pth` comes alone;
//! * [`checkpoint`] lists and streams the tensors of safetensors, torch and random checkpoints;
//! * [`naming`] and [`expect`] bring them to one set of names and compare them with what the model needs.
//!
//! Input from outside is never trusted: every reader returns a typed error that names the file and the tensor or field.

pub mod baichuan;
pub mod bloom;
pub mod chatglm;
pub mod chatglm2;
pub mod checkpoint;
pub mod config;
pub mod definition;
pub mod error;
pub mod expect;
pub mod falcon;
pub mod gemma;
pub mod glm;
pub mod golden;
pub mod gpt2;
pub mod gpt_neox;
pub mod gptj;
pub mod granite;
pub mod infer;
pub mod internlm2;
pub mod layers;
pub mod llama;
pub mod mixtral;
pub mod mpt;
pub mod naming;
pub mod olmo2;
pub mod opt;
pub mod phi3;
pub mod presets;
pub mod qwen;
pub mod qwen2;
pub mod qwen3;
pub mod registry;
pub mod resolve;
pub mod rwkv4;
pub mod rwkv5;
pub mod rwkv6;
pub mod rwkv7;
mod rwkv_layers;
pub mod stablelm;
pub mod starcoder2;
pub mod transformer;

pub use checkpoint::{Checkpoint, StoredType, TensorData, TensorInfo};
pub use config::{ModelConfig, Rwkv4Config, Rwkv5Config, Rwkv6Config, Rwkv7Config};
pub use definition::{Architecture, Definition, EntrySpec, Logits, Stream};
pub use error::{CheckpointError, ConfigError, ModelError, ResolveError, StreamError, TensorMismatch};
pub use resolve::{DownloadEvent, DownloadListener, ModelRequest, ResolvedModel};
