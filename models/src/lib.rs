//! mlcc-models: model definitions and everything that reads a checkpoint.
//!
//! From a `--model` argument to tensors in four steps, each one module:
//!
//! * [`resolve`] finds the files (directory, file, Hugging Face cache, preset name);
//! * [`config`] and [`registry`] turn `config.json` into a typed configuration of one of the [`families`];
//!   [`families::rwkv::infer`] does it from tensor shapes where a `.pth` comes alone;
//! * [`checkpoint`] lists and streams the tensors of safetensors, torch and random checkpoints;
//! * [`ModelDefinition::canonical_name`] brings them to one set of names, and [`expect`] compares them with what the model needs.
//!
//! Input from outside is never trusted: every reader returns a typed error that names the file and the tensor or field.

pub mod adapter;
pub mod checkpoint;
pub mod config;
pub mod definition;
pub mod error;
pub mod evidence;
pub mod families;
pub mod family;
pub mod golden;
pub mod layers;
pub mod pooling_head;
pub mod presets;
pub mod registry;
pub mod resolve;
pub mod standard_decoder;
pub mod tensor_check;
pub mod transformer;

pub use adapter::{AdapterRequest, TensorFactors, read_lora_factors as adapter_factors};
pub use checkpoint::{Checkpoint, StoredType, TensorData, TensorInfo};
pub use config::ModelConfig;
pub use definition::{AdapterSlots, Architecture, EntrySpec, LogitScope, ModelDefinition, StreamingWindow};
pub use error::{
    AdapterError, CheckpointError, ConfigError, ModelError, ResolveError, StreamError, TensorMismatch,
};
pub use families::{rwkv4::Rwkv4Config, rwkv5::Rwkv5Config, rwkv6::Rwkv6Config, rwkv7::Rwkv7Config};
pub use pooling_head::{PoolingHead, PoolingMode, PoolingOutput};
pub use resolve::sentence_transformers::PromptPrefixes;
pub use resolve::{DownloadEvent, DownloadListener, ModelRequest, ResolvedModel};
