//! The contract between a compiled model (`.so`) and its loader.
//!
//! The `.so` exports one data symbol, [`MODEL_SYMBOL`], a [`ModelTable`]. Everything else is reached from it.
//! `runtime/core/include/mlcc.h` is the same contract for C; `tests/all/header.rs` holds the two equal.
//!
//! Invariants
//! * 64-bit little-endian hosts only; every struct is `#[repr(C)]` with explicit padding fields.
//! * Strings are pointer + length, UTF-8, not NUL-terminated. (Device images are the exception: see
//!   [`DeviceImage`].)
//! * A change of any layout or meaning raises [`ABI_VERSION`]; new trailing table fields do so too. The first
//!   fields of the table, up to and including `compiler`, keep their place in every version, so that a
//!   mismatch can be explained.
//! * Buffers handed to an entry point are aligned to [`BUFFER_ALIGN`] at least.
//!
//! [`elf`] reads the artifact file itself (sections and the bytes that the code hash covers). It is here
//! because the compiler writes what the runtime reads, and the two may share only this crate.
#![no_std]

pub mod elf;
mod entry;
pub mod feature;
mod plan;
pub mod processes;

use core::ffi::c_void;

pub use entry::{ADAPTED, EntryForm, EntryPoint, StepFn, TOP_K, VariantEntry};
pub use plan::ModelPlan;

/// First eight bytes of the table: `mlccABI\0`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"mlccABI\0");
/// Raised with every change of layout or meaning.
pub const ABI_VERSION: u32 = 17;
/// The one exported symbol.
pub const MODEL_SYMBOL: &str = "mlcc_model";
/// Rows of every cache in a page.
pub const PAGE_ROWS: u64 = 64;
/// Alignment in bytes that callers give tokens, arena, state, logits, probs and weights.
pub const BUFFER_ALIGN: usize = 64;
/// Alignment of payload sections in the file.
pub const SECTION_ALIGN: u64 = 4096;

/// Names of the payload sections of the artifact file.
pub mod section {
    /// Packed parameters, addressed by [`super::Param::offset`].
    pub const WEIGHTS: &str = ".mlcc.weights";
    /// The recipe that makes the weights, in place of them (random ones, for benchmarks). Text, described in
    /// `runtime/core/src/weight_generator.rs`.
    pub const RECIPE: &str = ".mlcc.recipe";
    /// The metadata JSON once more, so that a file for another machine can be inspected without loading it.
    pub const METADATA: &str = ".mlcc.metadata";
    pub const TOKENIZER: &str = ".mlcc.tokenizer";
    pub const CHAT: &str = ".mlcc.chat";
    /// The computation of the code: the graph after the passes that change numbers on purpose, as deflated
    /// text (zlib).
    pub const GRAPH: &str = ".mlcc.graph";
    pub const GOLDEN: &str = ".mlcc.golden";
    /// JSON: how well this artifact predicts a text, measured when it was built.
    pub const REPORT: &str = ".mlcc.report";
    /// Hash of the code and of every other payload section; always the last one.
    pub const HASHES: &str = ".mlcc.hashes";
    /// Every payload section's name begins so.
    pub const PREFIX: &str = ".mlcc.";
}

/// Bits of [`ModelTable::flags`].
pub mod table_flag {
    /// Tokens of a prompt see later ones (prefix language models; of encoder-decoder models the source text):
    /// a prompt comes in one call, with `past` 0.
    pub const WHOLE_PROMPTS: u64 = 1;
}

/// Return values of entry points.
pub mod status {
    pub const OK: i32 = 0;
    /// A token id is negative or not below `vocab`.
    pub const BAD_TOKEN: i32 = 1;
    /// `n` is not in `1..=chunk`; for `decode_batch` and `step`, sequences, their rows or those that are
    /// wanted are not as [`super::Ctx`] says.
    pub const BAD_LENGTH: i32 = 2;
    /// `past + n` exceeds `context`; for `decode_batch` and `step`, `past + rows` of a sequence.
    pub const CONTEXT_FULL: i32 = 3;
}

/// UTF-8 text, not NUL-terminated.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Str {
    pub ptr: *const u8,
    pub len: u64,
}

/// A sequence of a call of `decode_batch` or `step`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    /// The state, as in [`Ctx::state`]; no two sequences of a call share one.
    pub state: *mut u8,
    /// The page table, as in [`Ctx::page_table`]; no two sequences of a call share a page that one of them
    /// writes to.
    pub page_table: *const i32,
    /// Tokens that the state has seen before this call.
    pub past: i64,
    /// Number of its first token in this call: that of the tokens of all sequences before it.
    pub first: i64,
    /// Its tokens in this call, at least 1; for `decode_batch`, 1.
    pub rows: i64,
}

/// The arguments of one call of an entry point. The caller owns every buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ctx {
    /// Start of the weights payload.
    pub weights: *const u8,
    /// `arena_bytes` of scratch; contents are undefined before and after a call.
    pub arena: *mut u8,
    /// `state_bytes`, initialised by `create_kv_cache`.
    pub state: *mut u8,
    /// `n` token ids, aligned like all buffers; for `decode_batch` one of each sequence, for `step` those of
    /// one sequence behind those of the other.
    pub tokens: *const i32,
    /// Tokens in this call, `1..=chunk`; for `decode_batch`, sequences, `1..=batch`; for `step` at most the
    /// larger of the two.
    pub n: i64,
    /// Tokens that the state has seen before this call.
    pub past: i64,
    /// Out: `vocab` floats of the last position; `prefill_logits` and `decode_batch`: `n * vocab`; `step`:
    /// `n_outputs * vocab`. In for `softmax_with_temperature`. Null in `prefill`, of a model of one rank: no
    /// logits are made, since further tokens of the prompt follow.
    pub logits: *mut f32,
    /// Out of `softmax_with_temperature`: `n * vocab` floats. May equal `logits`.
    pub probs: *mut f32,
    /// Waits until all workers of this call have arrived. Not called when `workers == 1`, so it may then be
    /// null.
    pub barrier: Option<BarrierFn>,
    /// First argument of `barrier`.
    pub barrier_self: *mut c_void,
    /// The temperature of `softmax_with_temperature`; greater than zero.
    pub temperature: f32,
    /// Must be zero.
    pub reserved0: u32,
    /// Called when an item of the step (a launch or a barrier) is over; may be null.
    pub trace: Option<TraceFn>,
    /// First argument of `trace`.
    pub trace_self: *mut c_void,
    /// The `b` sequences of `decode_batch` and `step`, instead of `state` and `past`.
    pub sequences: *const Sequence,
    /// Deals out the pieces of launches that are shared out dynamically; null: every worker computes its own
    /// share. Not called when `workers == 1`.
    pub next_chunk: Option<NextChunkFn>,
    /// First argument of `next_chunk`.
    pub next_chunk_self: *mut c_void,
    /// The number of sequences in this call of `decode_batch` and `step`, `1..=batch`; for `decode_batch`,
    /// `n`.
    pub b: i64,
    /// Numbers of the `n` tokens of a call of `step`, aligned like all buffers. Logits are made of the first
    /// `n_outputs` of them, in this order.
    pub output_rows: *const i32,
    /// The number of output rows of `step`: `1..=n`.
    pub n_outputs: i64,
    /// The first of all pages of [`ModelPlan::page_bytes`] each, aligned like all buffers; unused where that
    /// is 0.
    pub pages: *mut u8,
    /// Numbers of the pages of the sequence: row `i` of a cache is row `i % PAGE_ROWS` of page `page_table[i
    /// / PAGE_ROWS]`. The call reads those of rows before `past + n`, and writes to those from row `past` on.
    pub page_table: *const i32,
    /// Joins what all ranks have, where [`ModelPlan::ranks`] is more than 1; else never called, so it may
    /// then be null. Called by worker 0 of each rank, all ranks in the same order.
    pub all_gather: Option<AllGatherFn>,
    /// First argument of `all_gather`.
    pub all_gather_self: *mut c_void,
    /// The matrices of the slots, for the functions [`VariantEntry::adapted`]: [`ModelPlan::adapter_bytes`],
    /// aligned like all buffers. Those of slot 0 are zero.
    pub adapters: *const u8,
}

impl Ctx {
    /// No buffers, no tokens, no callbacks: fields that a call does not need stay as they are here.
    pub const EMPTY: Ctx = Ctx {
        weights: core::ptr::null(),
        arena: core::ptr::null_mut(),
        state: core::ptr::null_mut(),
        tokens: core::ptr::null(),
        n: 0,
        past: 0,
        logits: core::ptr::null_mut(),
        probs: core::ptr::null_mut(),
        barrier: None,
        barrier_self: core::ptr::null_mut(),
        temperature: 1.0,
        reserved0: 0,
        trace: None,
        trace_self: core::ptr::null_mut(),
        sequences: core::ptr::null(),
        next_chunk: None,
        next_chunk_self: core::ptr::null_mut(),
        b: 0,
        output_rows: core::ptr::null(),
        n_outputs: 0,
        pages: core::ptr::null_mut(),
        page_table: core::ptr::null(),
        all_gather: None,
        all_gather_self: core::ptr::null_mut(),
        adapters: core::ptr::null(),
    };
}

/// `all_gather(self, item, part, all, rows, row_bytes)`: item number `item` of the step. `part` has `rows`
/// rows of `row_bytes` bytes, those of this rank; `all` gets as many rows of `ranks * row_bytes` bytes, each
/// with the rows of all ranks in their order. When it returns no other rank reads `part` any longer. A rank
/// that can no longer reach the others returns nevertheless, and the caller of the entry point throws the
/// results away.
pub type AllGatherFn = unsafe extern "C" fn(
    this: *mut c_void,
    item: u32,
    part: *const u8,
    all: *mut u8,
    rows: u64,
    row_bytes: u64,
);

/// `next_chunk(self, worker, chunks)`: a chunk for worker `worker` of a launch in `chunks` chunks per worker,
/// that no worker has computed; worker `w` has numbers from `w * chunks` on. [`NO_CHUNK`] if none is left,
/// which it says once to every worker for every such launch: the next call of that worker is for the next
/// one. All workers come by the same launches in the same order, but not at the same time.
pub type NextChunkFn = unsafe extern "C" fn(this: *mut c_void, worker: u32, chunks: u32) -> u32;

/// Says that no chunk is left.
pub const NO_CHUNK: u32 = u32::MAX;

/// `barrier(self, worker)`.
pub type BarrierFn = unsafe extern "C" fn(this: *mut c_void, worker: u32);

/// `trace(self, worker, item)`: worker `worker` is through with item number `item` of the step.
pub type TraceFn = unsafe extern "C" fn(this: *mut c_void, worker: u32, item: u32);

/// The model's code for one level of CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The name, for example `x86-64-v3`.
    pub name: Str,
    /// Bits of [`feature`] that the code uses.
    pub features: u64,
    pub entries: *const VariantEntry,
    pub n_entries: u64,
}

/// One packed parameter.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Param {
    /// Name in the checkpoint.
    pub name: Str,
    /// Weight format, for example `q4f16_1`.
    pub format: Str,
    /// Order in memory, for example `rows16`; empty = row-major.
    pub packing: Str,
    pub ndim: u32,
    /// 0: it lies in the weights payload. 1: it is one of the matrices of slots for adapters
    /// ([`Ctx::adapters`]), concatenated for all slots.
    pub of_slots: u32,
    /// Logical dims, slowest first; unused ones are 0.
    pub dims: [u64; 4],
    /// Offset from the start of the weights payload, or of the matrices of slots.
    pub offset: u64,
    pub bytes: u64,
}

/// Initial values of a piece of state.
pub mod init {
    pub const ZERO: u32 = 0;
    /// Every f32 of the piece is [`super::State::fill`].
    pub const FILL_F32: u32 = 1;
}

/// Kinds of a piece of state.
pub mod state_kind {
    /// A state of fixed size, replaced by every step.
    pub const RECURRENT: u32 = 0;
    /// One row per position (keys or values): a step reads the first `past` rows and writes the `n` rows
    /// after them. The contents of further rows are undefined, so memory may be given to rows as late as they
    /// are written.
    pub const CACHE: u32 = 1;
    /// One `i32`, zero at first, that the caller owns: rows dropped from the start of every cache. A model
    /// that has it looks back only `rows - 1` rows and on the first [`super::State::sinks`] ones, so a caller
    /// may move the last `rows - 1` rows of every cache to right after those, count here how many it dropped,
    /// and go on with `past = sinks + rows - 1`. Positions are `past` plus this number.
    pub const DROPPED_ROWS: u32 = 2;
    /// One `i32`, zero at first, that the caller owns: tokens that the sequence will have at the end of a
    /// prompt that comes in several calls. The model takes this length, or that after a call if it is larger;
    /// so a caller writes it before the first call of a prompt, and zero when it goes back in the sequence.
    pub const SEQUENCE_LENGTH: u32 = 3;
    /// One `i32`, zero at first, that the caller owns: the slot of the adapter of the sequence, 0: it has
    /// none.
    pub const ADAPTER_SLOT: u32 = 4;
    /// One `i32`, zero at first, that [`super::EntryPoint::Encode`] writes: the number of first rows of the
    /// caches that are of the source text. They stay as long as the sequence, so a caller may go back in it
    /// no further.
    pub const SOURCE_LENGTH: u32 = 5;
}

/// One piece of the state block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct State {
    pub name: Str,
    pub offset: u64,
    pub bytes: u64,
    /// A value of [`init`]; a cache has none and says [`init::ZERO`].
    pub init: u32,
    pub fill: f32,
    /// Type of the elements, for example `f16`.
    pub format: Str,
    /// A value of [`state_kind`].
    pub kind: u32,
    /// First rows of every cache that are never dropped, for the number of dropped rows. Else 0.
    pub sinks: u32,
    /// Rows planned for a cache, at least `context`; the window for the number of dropped rows. Else 0.
    pub rows: u64,
    /// Bytes of one row of a cache: `bytes = rows * row_bytes`. Row number `r` of a page lies at
    /// `offset + r * row_bytes` of it. Else 0.
    pub row_bytes: u64,
}

/// The devices whose features code for [`DeviceImage::sm`] may use, and so those that it runs on.
pub mod device_scope {
    /// PTX: this compute capability and every later one. A cubin: those of the same major version that are
    /// not earlier.
    pub const LATER: u32 = 0;
    /// This one and no other (architecture-specific features, `sm_90a`).
    pub const EXACT: u32 = 1;
    /// This one and later ones of its family (family-specific features, `sm_100f`).
    pub const FAMILY: u32 = 2;
}

/// Device code. `ptr[len]` is a NUL byte that `len` does not count (the CUDA driver wants it for PTX).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceImage {
    /// `ptx` or `cubin`.
    pub kind: Str,
    /// Compute capability * 10: 80, 90, ...
    pub sm: u32,
    /// A value of [`device_scope`].
    pub scope: u32,
    pub ptr: *const u8,
    pub len: u64,
}

/// `ceil((coef_n * n + coef_past * past + constant) / div)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimExpr {
    pub coef_n: i64,
    pub coef_past: i64,
    pub constant: i64,
    /// The divisor, at least 1.
    pub div: i64,
}

/// The fields that change from call to call of a device's entry points. They lie in the device's memory,
/// where kernels read them, so that launches are the same in every call and a list of them can be recorded
/// once. The caller writes them before the launches of a call.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Control {
    /// See [`Ctx::n`].
    pub n: i64,
    /// See [`Ctx::past`].
    pub past: i64,
    /// See [`Ctx::b`]; 0 in calls of one sequence.
    pub b: i64,
    /// See [`Ctx::n_outputs`]; 0 in calls of other entry points than `step`.
    pub n_outputs: i64,
    /// See [`Ctx::temperature`].
    pub temperature: f32,
    /// Must be zero.
    pub reserved: u32,
}

/// Kinds of kernel argument: what the address is relative to.
pub mod arg {
    pub const WEIGHTS: u32 = 0;
    pub const ARENA: u32 = 1;
    pub const STATE: u32 = 2;
    pub const TOKENS: u32 = 3;
    pub const LOGITS: u32 = 4;
    pub const PROBS: u32 = 5;
    /// A [`super::Control`].
    pub const CONTROL: u32 = 6;
    /// See [`super::Ctx::output_rows`].
    pub const OUTPUT_ROWS: u32 = 7;
    /// The [`super::Sequence`]s of a call, whose addresses are the device's.
    pub const SEQUENCES: u32 = 8;
    /// See [`super::Ctx::pages`].
    pub const PAGES: u32 = 9;
    /// See [`super::Ctx::page_table`].
    pub const PAGE_TABLE: u32 = 10;
    /// See [`super::Ctx::adapters`].
    pub const ADAPTERS: u32 = 11;
}

/// Repetitions of a launch of a device's entry point.
pub mod repeat {
    /// Once for all rows of the call.
    pub const ONCE: u32 = 0;
    /// Once for the output rows: `n` of its grid is their number.
    pub const OUTPUTS: u32 = 1;
    /// Once for each sequence of the call, by its number in z: `n` and `past` of its grid are the most that
    /// one of them has, the grid is as many blocks deep as there are sequences, and arguments in the state
    /// and in the table of pages are bytes from the beginning of one.
    pub const EACH_SEQUENCE: u32 = 2;
    /// No kernel, but an all-gather of the ranks ([`crate::AllGatherFn`]): the first two arguments are the
    /// part of this rank and where the rows of all go, the grid in x is the number of rows, and the shared
    /// memory the bytes of a row of a part.
    pub const ALL_GATHER: u32 = 3;
    /// An all-gather of the output rows.
    pub const ALL_GATHER_OUTPUTS: u32 = 4;
}

/// One argument of a launch: an address, which is the same in every call. Sizes are addresses of fields of
/// [`Control`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchArg {
    /// A value of [`arg`].
    pub kind: u32,
    pub reserved: u32,
    /// Bytes from the base.
    pub offset: u64,
}

/// Most blocks of a grid in x, y and z, on every device.
pub const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// One kernel launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Name of the kernel in the device image.
    pub kernel: Str,
    /// The least number of blocks; further ones do nothing.
    pub grid: [DimExpr; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    pub args: *const LaunchArg,
    pub n_args: u64,
    /// A value of [`repeat`].
    pub repeat: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// The launch list of one entry point.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceEntry {
    /// The name of an [`EntryPoint`], with [`ADAPTED`] before it in the list for calls with adapters.
    /// `create_kv_cache` and `reset_kv_cache` may be absent: the state table says it all.
    pub name: Str,
    pub launches: *const Launch,
    pub n_launches: u64,
}

/// The exported table.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct ModelTable {
    pub magic: u64,
    pub abi_version: u32,
    /// `size_of::<ModelTable>()` of the writer.
    pub struct_size: u32,
    /// Bits of [`table_flag`]; the others must be zero.
    pub flags: u64,
    /// `x86-64`, `aarch64` or `cuda`.
    pub target: Str,
    /// Name and version of the compiler, for messages.
    pub compiler: Str,
    /// JSON.
    pub metadata: Str,
    /// Best first. Empty for a device target.
    pub variants: *const Variant,
    pub n_variants: u64,
    pub params: *const Param,
    pub n_params: u64,
    pub states: *const State,
    pub n_states: u64,
    pub images: *const DeviceImage,
    pub n_images: u64,
    pub device_entries: *const DeviceEntry,
    pub n_device_entries: u64,
    pub plan: ModelPlan,
    /// Must be zero.
    pub reserved: [u64; 3],
}

const _: () = assert!(size_of::<usize>() == 8 && cfg!(target_endian = "little"));
const _: () = assert!(size_of::<Ctx>() == 192);
