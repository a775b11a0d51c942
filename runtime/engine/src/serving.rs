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
mod cost;
mod engine;
mod files;
mod keeper;
mod kept;
mod marks;
mod masks;
mod pace;
mod preempt;
mod prefixes;
mod queue;
mod radix;
mod recycle;
mod request;
mod round;
mod saving;
mod scheduler;
mod step;
mod writer;

pub use adapter::TextAdapter;
pub use engine::{CancelGuard, Engine, EngineExtras, EngineOptions, RequestHandle, WarningSink};
pub use files::DiskCacheOptions;
pub use queue::{CacheUsage, EngineStats, SlotInfo};
pub use request::{
    EngineRequest, EventSink, LaunchError, RequestFailure, RequestSummary, SampledToken, SequenceEvent,
    TextDelta,
};
pub use step::{
    CacheBlocks, CompiledModelRunner, ModelLimits, ModelRunner, OutputRows, RunnerError, SequenceInput,
};
