//! Serving of many sequences by one model.
//!
//! An [`Engine`] owns a thread, and the thread owns the model. Each of its steps has the next token of every
//! running sequence, with chunks of waiting prompts that are so small that no sequence waits longer than a
//! set gap (`prefill_pacer`). Requests come in through [`Engine::launch`]; their results come out as
//! [`SequenceEvent`]s. Dropping a [`CancelGuard`] ends its sequence at the next step.
//!
//! A text depends on its request and seed, not on other running sequences, as far as the model's logits do
//! not (see docs/serve.md). Its tokens are sampled by the code with which [`crate::TextGenerator`] samples
//! them.

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
