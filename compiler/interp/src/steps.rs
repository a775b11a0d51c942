//! Runs a planned step by interpreting its kernels: the whole artifact without a code generator.
//!
//! Each launch sees copies of its buffers and writes its outputs back afterwards, so a kernel that breaks the
//! contract of in-place outputs gives another result here than on a real machine, which the executor matrix
//! shows. Values that every worker computes for itself are computed once, by one worker: the verifier of
//! steps checks that all copies are equal. Blocks of memory begin at multiples of 64 bytes, as those of the
//! runtime do, so that kernels see how their buffers are aligned.

mod interleaved;
mod ranks;

pub use interleaved::{ChunkOwnership, WorkerSchedule, run_batch_interleaved, run_interleaved};
pub use ranks::{RankCall, RankMemory, run_ranks, run_ranks_interleaved};

use crate::kernel::{ExecutionOptions, InterpError, KernelBuffer, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{Kernel, ParamAccess};
use mlcc_ir::step::{
    BufferRef, GuidedChunks, LaunchItem, MemoryBase, PAGE_ROWS, RepeatMode, StepItem, StepProgram,
};

/// Memory of one sequence, by base.
#[derive(Clone, Default)]
pub struct StepMemory {
    blocks: [Vec<u8>; MemoryBase::ALL.len()],
}

impl StepMemory {
    /// The bytes of a base; grow it to the planned size before running.
    pub fn base_memory(&mut self, base: MemoryBase) -> &mut Vec<u8> {
        &mut self.blocks[base_index(base)]
    }

    fn read(&self, place: &BufferRef, at: LaunchPosition) -> Result<Vec<u8>, StepRunError> {
        let block = &self.blocks[base_index(place.base)];
        let start = self.buffer_start(place, at)?;
        // All pages, or the rows of one.
        let all = place.per_page > 0 && place.per_past == 0;
        let end = if all { block.len().max(start) } else { start + place.bytes as usize };
        // Inputs and outputs hold only the rows of this call; the rest of the worst case is never touched.
        match block.get(start..end.min(block.len())) {
            Some(bytes) => Ok(bytes.to_vec()),
            None => Err(StepRunError::Range { base: place.base.name(), start, end, size: block.len() }),
        }
    }

    /// Writes the bytes that are others than `before`. Parts of pages lie between each other, so that the
    /// rest may be of another buffer of the launch.
    fn write(&mut self, place: &BufferRef, start: usize, before: &[u8], bytes: &[u8]) {
        let block = &mut self.blocks[base_index(place.base)][start..start + bytes.len()];
        if place.per_page == 0 {
            return block.copy_from_slice(bytes);
        }
        for ((to, &before), &byte) in block.iter_mut().zip(before).zip(bytes) {
            if before != byte {
                *to = byte;
            }
        }
    }

    /// The sizes of a launch on pages, which may be those of more sequences than there are in the step.
    fn with_all_pages(&self, launch: &LaunchItem, sizes: &SymValues) -> SymValues {
        let page = launch.buffers.iter().map(|b| b.per_page).max().unwrap_or(0) as usize;
        let of_sequence = self.blocks[base_index(MemoryBase::PageTable)].len() / 4;
        let pages = self.blocks[base_index(MemoryBase::Pages)].len().checked_div(page).unwrap_or(0);
        let all = pages.checked_div(of_sequence).unwrap_or(0) as i64;
        SymValues { b: sizes.b.max(all), ..*sizes }
    }

    /// The start of a buffer.
    fn buffer_start(&self, place: &BufferRef, at: LaunchPosition) -> Result<usize, StepRunError> {
        if place.per_page == 0 || place.per_past == 0 {
            return Ok(at.buffer_start(place));
        }
        let (index, row) = (at.past / PAGE_ROWS as usize, at.past % PAGE_ROWS as usize);
        let table = self.blocks[base_index(MemoryBase::PageTable)].as_chunks::<4>().0;
        let page =
            table.get(index).map(|entry| i32::from_le_bytes(*entry)).and_then(|p| usize::try_from(p).ok());
        let page = page.ok_or(StepRunError::NoPage { index, pages: table.len() })?;
        Ok(place.offset as usize + page * place.per_page as usize + row * place.per_past as usize)
    }
}

/// The position of a launch among those of its kernel.
#[derive(Clone, Copy)]
struct LaunchPosition {
    past: usize,
    /// The first row of a sequence, and its number.
    row: usize,
    sequence: usize,
    /// The worker whose copy is meant, of values that every worker computes for itself.
    worker: usize,
}

impl LaunchPosition {
    fn buffer_start(self, place: &BufferRef) -> usize {
        let strides = [
            (place.per_past, self.past),
            (place.per_row, self.row),
            (place.per_sequence, self.sequence),
            (place.per_worker, self.worker),
        ];
        strides.iter().fold(place.offset as usize, |start, (stride, times)| start + *stride as usize * times)
    }
}

/// The own data of a sequence of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSequence {
    /// The state block, and the table of its pages as bytes.
    pub state: Vec<u8>,
    pub page_table: Vec<u8>,
    /// Tokens that it has seen.
    pub past: i64,
    /// Its rows in this call, behind those of the sequence before.
    pub rows: i64,
}

/// A run of a launch: the sizes of its rows, the sequence that it is for, if it is for one, and the first row
/// of that.
#[derive(Clone, Copy)]
struct LaunchRun {
    sizes: SymValues,
    sequence: Option<usize>,
    row: usize,
    /// For a sequence: the start of its work on the line of all, the length of its work, and that of all
    /// work.
    line: [i64; 3],
}

impl LaunchRun {
    /// A run of a launch that is for no sequence.
    fn for_all(sizes: SymValues) -> LaunchRun {
        LaunchRun { sizes, sequence: None, row: 0, line: [0, 1, 1] }
    }

    fn position(&self, worker: usize) -> LaunchPosition {
        let past = self.sizes.past.max(0) as usize;
        LaunchPosition { past, row: self.row, sequence: self.sequence.unwrap_or(0), worker }
    }
}

/// Sizes of a step of the sequences as a whole.
fn sizes_of_all(sequences: &[BatchSequence]) -> SymValues {
    SymValues { n: sequences.iter().map(|s| s.rows).sum(), b: sequences.len() as i64, past: 0 }
}

/// The runs of a launch in a step of the sequences.
fn launch_runs(launch: &LaunchItem, sequences: &[BatchSequence], wanted: usize) -> Vec<LaunchRun> {
    let sizes = sizes_of_all(sequences);
    let of_sequence = |s: &BatchSequence| SymValues { n: s.rows, past: s.past, ..sizes };
    let work = match &launch.repeat {
        RepeatMode::Once | RepeatMode::EachWorker => return vec![LaunchRun::for_all(sizes)],
        RepeatMode::Outputs => return vec![LaunchRun::for_all(SymValues { n: wanted as i64, ..sizes })],
        RepeatMode::EachSequence { work, of } => {
            |s: &BatchSequence| if of.includes(s.rows) { work.eval(&of_sequence(s)) } else { 0 }
        }
    };
    let total = sequences.iter().map(work).sum();
    let (mut row, mut at) = (0, 0);
    let mut turn = |(i, s): (usize, &BatchSequence)| {
        let turn = LaunchRun { sizes: of_sequence(s), sequence: Some(i), row, line: [at, work(s), total] };
        row += s.rows as usize;
        at += work(s);
        turn
    };
    sequences.iter().enumerate().map(&mut turn).filter(|turn| turn.line[1] > 0).collect()
}

/// Runs `run` with the state of the sequence of a turn in `memory`.
fn with_state<R>(
    memory: &mut StepMemory,
    sequences: &mut [BatchSequence],
    turn: &LaunchRun,
    run: impl FnOnce(&mut StepMemory) -> R,
) -> R {
    let Some(sequence) = turn.sequence else { return run(memory) };
    let sequence = &mut sequences[sequence];
    let mut swap = |memory: &mut StepMemory| {
        std::mem::swap(memory.base_memory(MemoryBase::State), &mut sequence.state);
        std::mem::swap(memory.base_memory(MemoryBase::PageTable), &mut sequence.page_table);
    };
    swap(memory);
    let result = run(memory);
    swap(memory);
    result
}

fn base_index(base: MemoryBase) -> usize {
    MemoryBase::ALL.iter().position(|b| *b == base).unwrap_or(0)
}

/// The reasons why a step could not be run.
#[derive(Debug, thiserror::Error)]
pub enum StepRunError {
    #[error("step launches unknown kernel {0}")]
    NoKernel(String),
    #[error("kernel {0} is launched for each sequence of a batch, but there is no batch")]
    NoBatch(String),
    #[error("{base} has {size} bytes, the step uses {start}..{end}")]
    Range { base: &'static str, start: usize, end: usize, size: usize },
    #[error("rows of page {index} of a sequence that has {pages} pages")]
    NoPage { index: usize, pages: usize },
    #[error("the step joins the parts of {ranks} ranks, but runs alone")]
    Alone { ranks: usize },
    #[error("the step joins the parts of {expected} ranks, {found} run")]
    Ranks { expected: usize, found: usize },
    #[error(
        "rank {rank} waits in exchange {number}, which rank {other} missed: it ended after {count} of them"
    )]
    Missed { rank: usize, number: usize, other: usize, count: usize },
    #[error("exchange {number}: rank {rank} joins {expected}, rank {other} joins {found}")]
    Parts { rank: usize, number: usize, other: usize, expected: String, found: String },
    #[error("rank {rank}: {error}")]
    Rank { rank: usize, error: Box<StepRunError> },
    #[error(transparent)]
    Kernel(#[from] InterpError),
}

/// Runs all launches in order with the given workers. `sizes` are the symbols of this call. Not for batches:
/// [`run_batch`].
pub fn run_step(
    step: &StepProgram,
    kernels: &[Kernel],
    memory: &mut StepMemory,
    sizes: &SymValues,
    options: &ExecutionOptions,
) -> Result<(), StepRunError> {
    for item in &step.items {
        match item {
            StepItem::Barrier => {}
            StepItem::AllGather(exchange) => return Err(StepRunError::Alone { ranks: exchange.shape.ranks }),
            StepItem::Launch(launch) if !is_for_one(launch) => {
                return Err(StepRunError::NoBatch(launch.kernel.clone()));
            }
            StepItem::Launch(launch) => {
                run_launch(launch, kernels, memory, &LaunchRun::for_all(*sizes), options)?
            }
        }
    }
    Ok(())
}

/// True if a launch belongs to a step of one sequence.
fn is_for_one(launch: &LaunchItem) -> bool {
    match launch.repeat {
        RepeatMode::Once | RepeatMode::EachWorker => true,
        RepeatMode::Outputs | RepeatMode::EachSequence { .. } => false,
    }
}

/// Runs a step that takes rows of `sequences`, and returns `wanted` output rows. `memory` holds what the
/// sequences share; its state is not used.
pub fn run_batch(
    step: &StepProgram,
    kernels: &[Kernel],
    memory: &mut StepMemory,
    sequences: &mut [BatchSequence],
    wanted: usize,
    options: &ExecutionOptions,
) -> Result<(), StepRunError> {
    for item in &step.items {
        if let StepItem::AllGather(exchange) = item {
            return Err(StepRunError::Alone { ranks: exchange.shape.ranks });
        }
        let StepItem::Launch(launch) = item else { continue };
        for turn in launch_runs(launch, sequences, wanted) {
            with_state(memory, sequences, &turn, |memory| {
                run_launch(launch, kernels, memory, &turn, options)
            })?;
        }
    }
    sequences.iter_mut().for_each(|s| s.past += s.rows);
    Ok(())
}

fn run_launch(
    launch: &LaunchItem,
    kernels: &[Kernel],
    memory: &mut StepMemory,
    turn: &LaunchRun,
    options: &ExecutionOptions,
) -> Result<(), StepRunError> {
    let (kernel, sizes) = (find_kernel(kernels, launch)?, &turn.sizes);
    let workers = match launch.repeat {
        RepeatMode::EachWorker => 1,
        // A piece is what one worker of some larger number would compute.
        RepeatMode::Once | RepeatMode::Outputs | RepeatMode::EachSequence { .. } => {
            let parts = |pieces: GuidedChunks| options.workers * pieces.equal * GuidedChunks::SMALLEST;
            launch.schedule.chunks(options.workers, sizes).map_or(options.workers, parts)
        }
    };
    on_buffers(launch, kernel, memory, sizes, turn.position(0), |buffers, sizes| {
        run_with(kernel, buffers, sizes, &ExecutionOptions { workers, ..*options })
    })
}

fn find_kernel<'k>(kernels: &'k [Kernel], launch: &LaunchItem) -> Result<&'k Kernel, StepRunError> {
    kernels
        .iter()
        .find(|k| k.name == launch.kernel)
        .ok_or_else(|| StepRunError::NoKernel(launch.kernel.clone()))
}

/// Runs `kernel` on copies of the buffers of a launch, and writes back what it may have changed.
fn on_buffers(
    launch: &LaunchItem,
    kernel: &Kernel,
    memory: &mut StepMemory,
    sizes: &SymValues,
    at: LaunchPosition,
    run: impl FnOnce(&mut [KernelBuffer], &SymValues) -> Result<(), InterpError>,
) -> Result<(), StepRunError> {
    let sizes = &memory.with_all_pages(launch, sizes);
    let (mut buffers, mut before) = (Vec::new(), Vec::new());
    for (place, &buf) in launch.buffers.iter().zip(&kernel.params) {
        let decl = &kernel.bufs[buf];
        // The kernel knows the buffer with this call's length.
        let bytes = decl.len.eval(sizes) as usize * decl.dtype.bytes().unwrap_or(1);
        let mut data = memory.read(place, at)?;
        data.truncate(bytes);
        let start = memory.buffer_start(place, at)?;
        before.push((start, if place.per_page > 0 { data.clone() } else { Vec::new() }));
        buffers.push(KernelBuffer::new(decl.dtype, data).at_address(start as u64));
    }
    run(&mut buffers, sizes)?;
    for (((place, &buf), buffer), (start, before)) in
        launch.buffers.iter().zip(&kernel.params).zip(&buffers).zip(&before)
    {
        if kernel.bufs[buf].access != ParamAccess::In {
            memory.write(place, *start, before, &buffer.bytes);
        }
    }
    Ok(())
}
