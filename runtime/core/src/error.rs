//! Errors while a model is loaded or run. Every message says what to do.

use std::io;
use std::path::PathBuf;

use mlcc_abi::elf::ElfError;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is not a usable model: {source}. Copy or build it again.")]
    Elf { path: PathBuf, source: ElfError },
    #[error("{path} is not an mlcc artifact: {what}. Build one with `mlcc build`.")]
    NotArtifact { path: PathBuf, what: String },
    #[error("{path} is corrupt: {what}. Copy or build it again.")]
    Corrupt { path: PathBuf, what: String },
    #[error(
        "{path} needs {file}, which holds its weights: {what}. Keep the two files of one build together."
    )]
    SplitWeights { path: PathBuf, file: PathBuf, what: String },
    #[error(
        "{path} is built for {found}, this machine is {expected}. Build it with --target for {expected}."
    )]
    WrongMachine { path: PathBuf, found: String, expected: &'static str },
    #[error(
        "{path} has ABI version {found} (written by {compiler}), this runtime reads version {expected}. Build the \
         model again with the mlcc that belongs to this runtime: {rebuild}"
    )]
    AbiVersion { path: PathBuf, found: u32, expected: u32, compiler: String, rebuild: String },
    #[error("the code of {path} cannot be loaded: {what}")]
    Map { path: PathBuf, what: String },
    #[error("MLCC_LOADER is `{found}`, which is not a loader: set it to `own` or `system`, or not at all")]
    Loader { found: String },
    #[error("{path} cannot run on this CPU: {}. This CPU has {has}. Build it for a lower level, for example with --target {suggest}.", needs.join("; "))]
    Features { path: PathBuf, needs: Vec<String>, has: String, suggest: &'static str },
    #[error("unknown CPU level `{level}` ({origin}). {path} has {}; known levels: {known}.", variants.join(", "))]
    UnknownLevel { path: PathBuf, level: String, origin: &'static str, variants: Vec<String>, known: String },
    #[error("{path} has nothing at or below CPU level `{level}` ({origin}): it has {}. Choose one of these, or build with --target {level}.", variants.join(", "))]
    NoVariantForLevel { path: PathBuf, level: String, origin: &'static str, variants: Vec<String> },
    #[error("{path} lacks the entry point `{entry}`. Build it again.")]
    MissingEntry { path: PathBuf, entry: &'static str },
    #[error("out of memory: cannot allocate {bytes} bytes for {what}. Use a smaller context or chunk.")]
    OutOfMemory { what: &'static str, bytes: u64 },
    #[error(
        "the GPU does not have {bytes} bytes of free memory for the weights. Build with a smaller weight format \
         (--quant), or use another GPU (CUDA_VISIBLE_DEVICES)."
    )]
    WeightsTooLarge { bytes: u64 },
    #[error("cannot start worker thread {index}: {source}. Use fewer threads (-t).")]
    Thread { index: usize, source: io::Error },
    #[error(
        "cannot pin worker thread {index} to its CPUs: {source}. Run without pinning and without placing weights (no --pin, \
         no --numa)."
    )]
    Pinning { index: usize, source: io::Error },
    #[error(
        "{count} processes were started together, but libmlcc_mpi.so, through which they exchange data, cannot be \
         used: {what}. Install Open MPI, build the plug-in (docs/tensor-parallel.md), and put it next to mlcc or name \
         it in MLCC_MPI; or start one process of mlcc, whose ranks are threads."
    )]
    NoPlugin { count: u32, what: String },
    #[error(
        "ranks on GPUs exchange data through NCCL 2.9.6 or later, but {what}. Install it (libnccl2 of NVIDIA's CUDA \
         repository, or the Python package nvidia-nccl-cu12) where the loader finds libnccl.so.2, or name the file in \
         MLCC_NCCL."
    )]
    NoNccl { what: String },
    #[error(
        "{first} and {second} use the same GPU. Give each its own GPU: start no more processes on a machine than it \
         has GPUs, or set CUDA_VISIBLE_DEVICES for each."
    )]
    OneGpu { first: String, second: String },
    #[error("{what} without a CUDA graph, which the driver refused to record, but the other ranks have one.")]
    NoRankGraph { what: &'static str },
    #[error(
        "{path} is split among {ranks} GPUs with a process each, but only this process was started. Start {ranks} \
         (mpirun -n {ranks}), or build it without --tensor-parallel."
    )]
    GpuAlone { path: PathBuf, ranks: usize },
    #[error(
        "{path} is split among {ranks} ranks, but {processes} processes were started. Start {ranks} (mpirun -n \
         {ranks}), or one; or build it with --tensor-parallel {processes}."
    )]
    RankCount { path: PathBuf, ranks: usize, processes: usize },
    #[error("{path}: {rank} has {what}, {first} has {wanted}. Give all ranks the same files.")]
    RanksDiffer { path: PathBuf, rank: String, first: String, what: String, wanted: String },
    #[error("rank 0 sent a message that this rank does not understand. Run the same program on all ranks.")]
    RankMessage,
    #[error(
        "{path}: the processes that were started together already have a model, and cannot load a second one."
    )]
    RanksTaken { path: PathBuf },
    #[error(
        "{path} is split among {ranks} ranks, which need a worker each, but the shared pool has {workers} workers. \
         Share at least {ranks}, or give it its own pool."
    )]
    RankWorkers { path: PathBuf, ranks: usize, workers: usize },
    #[error("a worker thread panicked: {message}")]
    WorkerPanic { message: String },
    #[error("no tokens given: a prompt needs at least one token")]
    NoTokens,
    #[error("it has no tokens: there is nothing to embed")]
    EmptyText,
    #[error(
        "token {token} at position {position} is outside of the model's vocabulary of {vocab}. Does the tokenizer \
         belong to this model?"
    )]
    Token { token: i32, position: usize, vocab: u64 },
    #[error(
        "the context is full: {past} tokens seen, {n} more given, the model is built for {context}. Shorten the \
         prompt or build with a larger -c/--ctx-size."
    )]
    ContextFull { past: u64, n: u64, context: u64 },
    #[error(
        "{wanted} more pages of 64 tokens are needed, {free} of {pages} are free: reset or drop sequences, or load the model with \
         more (`LoadOptions::cache_pages`)"
    )]
    NoPages { wanted: usize, free: usize, pages: usize },
    #[error("{path} decodes at most {most} sequences together, not {n}. Build it with `--max-batch {n}`.")]
    BatchSize { path: PathBuf, n: usize, most: u64 },
    #[error(
        "{sessions} sequences and {tokens} tokens: a batch needs one token per sequence, and at least one sequence"
    )]
    BatchTokens { sessions: usize, tokens: usize },
    #[error(
        "sequence {index} of the batch belongs to another model: all sessions of a batch must be of one loaded model"
    )]
    BatchModel { index: usize },
    #[error(
        "a step takes at most {most} tokens of all its sequences in total, not {n}: split them into several steps, or \
         build with a larger --chunk"
    )]
    StepTokens { n: usize, most: usize },
    #[error(
        "{n} tokens of one sequence in a step: this model takes at most {most}, because it continues beyond its context"
    )]
    PieceTokens { n: usize, most: usize },
    #[error("{path} is not an embedding model: it was built for generating text")]
    NoTexts { path: PathBuf },
    #[error("{path} is an embedding model and generates no text: use `mlcc embed`, or `Model::texts`")]
    TextsOnly { path: PathBuf },
    #[error("text {index}: {source}")]
    Text { index: usize, source: Box<Error> },
    #[error(
        "it has {n} tokens, the model was built for {most}: shorten it, or build with a larger -c/--ctx-size"
    )]
    TextTooLong { n: usize, most: usize },
    #[error("sequence {index} of the batch: {source}")]
    BatchSequence { index: usize, source: Box<Error> },
    #[error("cannot roll back to {wanted} tokens: the sequence has {past}")]
    TruncateBeyond { wanted: u64, past: u64 },
    #[error(
        "cannot roll back from {past} to {wanted} tokens: this model has the recurrent state `{state}`, which cannot \
         drop single tokens. Reset the session, or load a state that was saved there."
    )]
    TruncateRecurrent { wanted: u64, past: u64, state: String },
    #[error(
        "the snapshot belongs to another model or to a larger context: restore it in a session of its own model"
    )]
    ForeignSnapshot,
    #[error(
        "cannot roll back from {past} to {wanted} tokens: the window of {window} tokens before that point has already \
         been dropped. Reset the session and read the tokens again."
    )]
    TruncateDropped { wanted: u64, past: u64, window: u64 },
    #[error(
        "this model must read a prompt at once: at most {chunk} tokens at the start of a sequence, not {n} after \
         {past}. Build with a larger --chunk for longer prompts; reset the session before the next one."
    )]
    WholePrompt { n: u64, past: u64, chunk: u64 },
    #[error(
        "a sequence of this encoder-decoder model starts with the encoder input, followed by the decoder start token \
         {start}: feed both in the first call"
    )]
    NoSource { start: i32 },
    #[error(
        "the encoder input has {n} tokens, but at most {chunk} can be read at once: build with a larger --chunk (and \
         -c/--ctx-size) for longer ones"
    )]
    SourceTooLong { n: u64, chunk: u64 },
    #[error(
        "cannot roll back to {wanted} tokens: the first {source_length} are the encoder input. Reset the session for \
         another one."
    )]
    TruncateSource { wanted: u64, source_length: u64 },
    #[error(
        "{found} logits to write into, but the model has {expected}: use a buffer from a session of this model"
    )]
    ForeignLogits { found: usize, expected: usize },
    #[error("{path} has no slots for adapters: build it with --lora-slots, or merge the adapter with --lora")]
    NoSlots { path: PathBuf },
    #[error(
        "all {slots} slots for adapters are in use: drop an adapter that no sequence uses any more, or build with a \
         larger --lora-slots"
    )]
    SlotsTaken { slots: usize },
    #[error("adapter {adapter}, tensor {tensor}: {what}")]
    AdapterTensor { adapter: String, tensor: String, what: String },
    #[error("adapter {adapter} was loaded for another model: load it for this one")]
    ForeignAdapter { adapter: String },
    #[error(
        "the sequence has {past} tokens already, which were computed without this adapter: choose the adapter in a new \
         or reset session"
    )]
    AdapterTooLate { past: u64 },
    #[error("temperature must be a finite number above zero, not {0}")]
    Temperature(f32),
    #[error("entry point `{entry}` failed with status {status}")]
    Step { entry: &'static str, status: i32 },
    #[error("{path} is not a usable state file: {what}")]
    StateFile { path: PathBuf, what: String },
    #[error(
        "{path} exists and is not a state file, so it is not replaced. Choose another name, or remove it."
    )]
    NoStateFile { path: PathBuf },
    #[error("{path} is built for an NVIDIA GPU, but {what}. Build with `--target cpu` to run without one.")]
    NoDevice { path: PathBuf, what: String },
    #[error(
        "kernel {kernel} would need {blocks} blocks in {axis}, but a GPU has at most {most}. Feed fewer tokens per \
         call: build with a smaller --chunk."
    )]
    Grid { kernel: String, axis: char, blocks: i64, most: u32 },
    #[error("the GPU driver failed at {call}: {what}")]
    Driver { call: &'static str, what: String },
}
