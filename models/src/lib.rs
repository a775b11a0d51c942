//! mlcc-models: model definitions and everything that reads a checkpoint.
//!
//! From a `--model` argument to tensors in four steps, each one module:
//!
//! * [`resolve`] finds the files (directory, file, Hugging Face cache, preset name);
//! * [`registry`] finds which of the [`families`] reads a `config.json` ([`config`] has its fields); [`model_config`] completes it
//!   by what the tensors tell, and makes one from them alone where an RWKV has none;
//! * [`checkpoint`] lists and streams the tensors of safetensors, torch and random checkpoints;
//! * [`ModelDefinition::canonical_name`] brings them to one set of names, and [`expect`] compares them with what the model needs.
//!
//! A family hands in one row ([`family::ModelFamily`]); its graph is built over [`layers`] with a [`model_builder`], mostly as a
//! [`transformer`] or as the description of a [`standard_decoder`].
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
pub mod layer_kinds;
pub mod layers;
pub mod model_builder;
pub mod model_config;
pub mod pooling_head;
pub mod presets;
pub mod registry;
pub mod resolve;
pub mod standard_decoder;
pub mod tensor_check;
pub mod transformer;

pub use adapter::{AdapterRequest, TensorFactors, read_lora_factors as adapter_factors};
pub use checkpoint::{Checkpoint, StoredType, TensorData, TensorInfo};
pub use definition::{AdapterSlots, Architecture, EntrySpec, LogitScope, ModelDefinition, StreamingWindow};
pub use error::{
    AdapterError, CheckpointError, ConfigError, ModelError, ResolveError, StreamError, TensorMismatch,
};
pub use families::{rwkv4::Rwkv4Config, rwkv5::Rwkv5Config, rwkv6::Rwkv6Config, rwkv7::Rwkv7Config};
pub use model_config::ModelConfig;
pub use pooling_head::{PoolingHead, PoolingMode, PoolingOutput};
pub use resolve::sentence_transformers::PromptPrefixes;
pub use resolve::{DownloadEvent, DownloadListener, ModelRequest, ResolvedModel};
