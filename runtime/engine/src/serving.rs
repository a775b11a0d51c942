//! Many texts from one model at the same time.
//!
//! An [`Engine`] owns a thread, and the thread owns the model. Each of its steps has the next token of every text that is
//! being written, with pieces of waiting prompts beside them, so small that no text waits longer than a set gap ([`pace`]).
//! Requests come in through [`Engine::launch`]; what they lead to comes out as [`SequenceEvent`]s. Dropping a [`CancelGuard`] ends its text
//! at the next step.
//!
//! A text depends on its request and seed, not on what runs beside it, as far as the model's logits do not (see
//! docs/serve.md). Its tokens are chosen by the code with which [`crate::TextGenerator`] chooses them.

mod adapter;
mod checkpoint_positions;
mod disk_cache;
mod disk_writer;
mod engine;
mod iteration;
mod mask_workers;
mod model_runner;
mod preempt;
mod prefill_pacer;
mod prefix_cache;
mod queue;
mod radix_tree;
mod recycle;
mod request;
mod running_sequence;
mod save_states;
mod scheduler;
mod slots;
mod step_cost;

pub use adapter::TextAdapter;
pub use disk_cache::DiskCacheOptions;
pub use engine::{CancelGuard, Engine, EngineExtras, EngineOptions, RequestHandle, WarningSink};
pub use model_runner::{
    CacheBlocks, CompiledModelRunner, ModelLimits, ModelRunner, OutputRows, RunnerError, SequenceInput,
};
pub use queue::{CacheUsage, EngineStats, SlotInfo};
pub use request::{
    EngineRequest, EventSink, LaunchError, RequestFailure, RequestSummary, SampledToken, SequenceEvent,
    TextDelta,
};
