//! Loads a compiled model (`.so`) and runs it.
//!
//! ```no_run
//! use mlcc_runtime::{LoadOptions, Model};
//! # fn main() -> Result<(), mlcc_runtime::Error> {
//! let model = Model::load("model.so", &LoadOptions::default())?;
//! let mut session = model.session()?;
//! let logits = session.prefill(&[1, 2, 3])?; // of the last position
//! # let _ = logits; Ok(()) }
//! ```
//!
//! Loading checks the file before its code is mapped: ELF headers and bounds, the machine, the hashes of the
//! code and of all sections but large ones (weights, whose hash [`LoadOptions`] asks for), and what a loader
//! follows (dynamic table, symbols, relocations). Then come the ABI version, the tables, each address and
//! number of them, and the CPU's features, before anything is called. A damaged or foreign artifact is an
//! [`Error`], not a crash; only machine code itself cannot be checked.
//!
//! In the steady state (`decode`) nothing is allocated; the only synchronisation is that of the worker pool.

mod adapters;
mod arena;
pub mod artifact;
mod batch;
mod buffer;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
pub mod features;
mod hashes;
mod host_pages;
mod huge_pages;
mod json;
mod library;
mod model;
mod numa;
mod page_pool;
mod page_table;
mod pages;
mod perf_map;
pub mod pool;
mod processes;
mod ranks;
mod rebuild;
mod requirements;
mod session;
mod state_file;
mod table;
mod text_embedder;
mod top_k;
mod topology;
mod trace;
pub mod weight_generator;
mod workers;

pub use adapters::{LoadedAdapter, LoraFactors};
pub use artifact::Artifact;
pub use batch::{OutputRows, SessionBatch, SessionInput};
pub use error::Error;
pub use huge_pages::HugePages;
pub use library::{LoaderKind, read_table};
pub use mlcc_files::replace_file;
pub use model::{CachePages, LoadOptions, Model};
pub use numa::{NumaPolicy, WeightPlacement};
pub use processes::ProcessGroup;
pub use ranks::weights_section;
pub use requirements::ModelRequirements;
pub use session::{OwnedLogits, Session, SessionMemory, SessionSnapshot, source_rows};
pub use table::{
    ArtifactTable, CacheShape, GpuImage, KernelLaunch, LaunchList, LaunchRepeat, ModelPlan, ParamInfo,
    StateInfo,
};
pub use text_embedder::TextEmbedder;
pub use top_k::TokenCandidate;
pub use topology::{CoreKind, CpuCore, CpuTopology, physical_cores};
pub use trace::StepTimes;
pub use workers::WorkerThreads;

/// Tokens of a page of caches.
pub const PAGE_TOKENS: usize = mlcc_abi::PAGE_ROWS as usize;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
