//! Runs a planned step by interpreting its kernels: the whole artifact without a code generator.
//!
//! Each launch sees copies of its buffers and writes its outputs back afterwards, so a kernel that breaks the contract
//! of in-place outputs gives another result here than on a real machine, which the executor matrix shows. What every
//! worker computes for itself is computed once, by one worker: the verifier of steps holds that all copies are equal.
//! Blocks of memory begin at multiples of 64 bytes, as those of the runtime do, so that kernels see how their buffers are
//! aligned.

mod interleaved;
mod ranks;

pub use interleaved::{Schedule, Takers, run_batch_interleaved, run_interleaved};
pub use ranks::{Call, Rank, run_ranks, run_ranks_interleaved};

use crate::kernel::{Buffer, InterpError, Options, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{Access, Kernel};
use mlcc_ir::step::{Base, BufferRef, Launch, PAGE_ROWS, Pieces, Repeat, Step, StepItem};

/// Memory of one sequence, by base.
#[derive(Clone, Default)]
pub struct Memory {
    blocks: [Vec<u8>; Base::ALL.len()],
}

impl Memory {
    /// The bytes of a base; grow it to the planned size before running.
    pub fn block(&mut self, base: Base) -> &mut Vec<u8> {
        &mut self.blocks[slot(base)]
    }

    fn read(&self, place: &BufferRef, at: At) -> Result<Vec<u8>, StepError> {
        let block = &self.blocks[slot(place.base)];
        let start = self.start(place, at)?;
        // All pages, or the rows of one.
        let all = place.per_page > 0 && place.per_past == 0;
        let end = if all { block.len().max(start) } else { start + place.bytes as usize };
        // Inputs and outputs hold only the rows of this call; the rest of the worst case is never touched.
        match block.get(start..end.min(block.len())) {
            Some(bytes) => Ok(bytes.to_vec()),
            None => Err(StepError::Range { base: place.base.name(), start, end, size: block.len() }),
        }
    }

    /// Writes the bytes that are others than `before`. Parts of pages lie between each other, so that the rest may be of
    /// another buffer of the launch.
    fn write(&mut self, place: &BufferRef, start: usize, before: &[u8], bytes: &[u8]) {
        let block = &mut self.blocks[slot(place.base)][start..start + bytes.len()];
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
    fn with_all_pages(&self, launch: &Launch, sizes: &SymValues) -> SymValues {
        let page = launch.buffers.iter().map(|b| b.per_page).max().unwrap_or(0) as usize;
        let of_sequence = self.blocks[slot(Base::PageTable)].len() / 4;
        let pages = self.blocks[slot(Base::Pages)].len().checked_div(page).unwrap_or(0);
        let all = pages.checked_div(of_sequence).unwrap_or(0) as i64;
        SymValues { b: sizes.b.max(all), ..*sizes }
    }

    /// Where a buffer begins.
    fn start(&self, place: &BufferRef, at: At) -> Result<usize, StepError> {
        if place.per_page == 0 || place.per_past == 0 {
            return Ok(at.start(place));
        }
        let (index, row) = (at.past / PAGE_ROWS as usize, at.past % PAGE_ROWS as usize);
        let table = self.blocks[slot(Base::PageTable)].as_chunks::<4>().0;
        let page =
            table.get(index).map(|entry| i32::from_le_bytes(*entry)).and_then(|p| usize::try_from(p).ok());
        let page = page.ok_or(StepError::NoPage { index, pages: table.len() })?;
        Ok(place.offset as usize + page * place.per_page as usize + row * place.per_past as usize)
    }
}

/// Which launch of a buffer's kernel it is.
#[derive(Clone, Copy)]
struct At {
    past: usize,
    /// The first row of a sequence, and its number.
    row: usize,
    sequence: usize,
    /// Whose copy of values that every worker computes for itself.
    worker: usize,
}

impl At {
    fn start(self, place: &BufferRef) -> usize {
        let strides = [
            (place.per_past, self.past),
            (place.per_row, self.row),
            (place.per_sequence, self.sequence),
            (place.per_worker, self.worker),
        ];
        strides.iter().fold(place.offset as usize, |start, (stride, times)| start + *stride as usize * times)
    }
}

/// What a sequence of a batch has of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The state block, and the table of its pages as bytes.
    pub state: Vec<u8>,
    pub page_table: Vec<u8>,
    /// Tokens that it has seen.
    pub past: i64,
    /// Its rows in this call, behind those of the sequence before.
    pub rows: i64,
}

/// A run of a launch: the sizes of its rows, the sequence that it is for, if it is for one, and the first row of that.
#[derive(Clone, Copy)]
struct Turn {
    sizes: SymValues,
    sequence: Option<usize>,
    row: usize,
    /// Of a sequence: where its work begins on the line of all, how much it is, and that of all.
    line: [i64; 3],
}

impl Turn {
    /// Of a launch that is for no sequence.
    fn once(sizes: SymValues) -> Turn {
        Turn { sizes, sequence: None, row: 0, line: [0, 1, 1] }
    }

    fn at(&self, worker: usize) -> At {
        let past = self.sizes.past.max(0) as usize;
        At { past, row: self.row, sequence: self.sequence.unwrap_or(0), worker }
    }
}

/// Sizes of a step of the sequences as a whole.
fn sizes_of_all(sequences: &[Sequence]) -> SymValues {
    SymValues { n: sequences.iter().map(|s| s.rows).sum(), b: sequences.len() as i64, past: 0 }
}

/// The runs of a launch in a step of the sequences.
fn turns(launch: &Launch, sequences: &[Sequence], wanted: usize) -> Vec<Turn> {
    let sizes = sizes_of_all(sequences);
    let of_sequence = |s: &Sequence| SymValues { n: s.rows, past: s.past, ..sizes };
    let work = match &launch.repeat {
        Repeat::Once | Repeat::EachWorker => return vec![Turn::once(sizes)],
        Repeat::Wanted => return vec![Turn::once(SymValues { n: wanted as i64, ..sizes })],
        Repeat::EachSequence { work, of } => {
            |s: &Sequence| if of.has(s.rows) { work.eval(&of_sequence(s)) } else { 0 }
        }
    };
    let total = sequences.iter().map(work).sum();
    let (mut row, mut at) = (0, 0);
    let mut turn = |(i, s): (usize, &Sequence)| {
        let turn = Turn { sizes: of_sequence(s), sequence: Some(i), row, line: [at, work(s), total] };
        row += s.rows as usize;
        at += work(s);
        turn
    };
    sequences.iter().enumerate().map(&mut turn).filter(|turn| turn.line[1] > 0).collect()
}

/// Runs `run` with the state of the sequence of a turn in `memory`.
fn with_state<R>(
    memory: &mut Memory,
    sequences: &mut [Sequence],
    turn: &Turn,
    run: impl FnOnce(&mut Memory) -> R,
) -> R {
    let Some(sequence) = turn.sequence else { return run(memory) };
    let sequence = &mut sequences[sequence];
    let mut swap = |memory: &mut Memory| {
        std::mem::swap(memory.block(Base::State), &mut sequence.state);
        std::mem::swap(memory.block(Base::PageTable), &mut sequence.page_table);
    };
    swap(memory);
    let result = run(memory);
    swap(memory);
    result
}

fn slot(base: Base) -> usize {
    Base::ALL.iter().position(|b| *b == base).unwrap_or(0)
}

/// Why a step could not be run.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
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
    Rank { rank: usize, error: Box<StepError> },
    #[error(transparent)]
    Kernel(#[from] InterpError),
}

/// Runs all launches in order with the given workers. `sizes` are the symbols of this call. Not for batches: [`run_batch`].
pub fn run_step(
    step: &Step,
    kernels: &[Kernel],
    memory: &mut Memory,
    sizes: &SymValues,
    options: &Options,
) -> Result<(), StepError> {
    for item in &step.items {
        match item {
            StepItem::Barrier => {}
            StepItem::Exchange(exchange) => return Err(StepError::Alone { ranks: exchange.parts.ranks }),
            StepItem::Launch(launch) if !is_for_one(launch) => {
                return Err(StepError::NoBatch(launch.kernel.clone()));
            }
            StepItem::Launch(launch) => run_launch(launch, kernels, memory, &Turn::once(*sizes), options)?,
        }
    }
    Ok(())
}

/// Whether a launch is of a step of one sequence.
fn is_for_one(launch: &Launch) -> bool {
    match launch.repeat {
        Repeat::Once | Repeat::EachWorker => true,
        Repeat::Wanted | Repeat::EachSequence { .. } => false,
    }
}

/// Runs a step that takes rows of `sequences`, and gives logits of `wanted` rows. `memory` holds what the sequences share; its
/// state is not used.
pub fn run_batch(
    step: &Step,
    kernels: &[Kernel],
    memory: &mut Memory,
    sequences: &mut [Sequence],
    wanted: usize,
    options: &Options,
) -> Result<(), StepError> {
    for item in &step.items {
        if let StepItem::Exchange(exchange) = item {
            return Err(StepError::Alone { ranks: exchange.parts.ranks });
        }
        let StepItem::Launch(launch) = item else { continue };
        for turn in turns(launch, sequences, wanted) {
            with_state(memory, sequences, &turn, |memory| {
                run_launch(launch, kernels, memory, &turn, options)
            })?;
        }
    }
    sequences.iter_mut().for_each(|s| s.past += s.rows);
    Ok(())
}

fn run_launch(
    launch: &Launch,
    kernels: &[Kernel],
    memory: &mut Memory,
    turn: &Turn,
    options: &Options,
) -> Result<(), StepError> {
    let (kernel, sizes) = (find(kernels, launch)?, &turn.sizes);
    let workers = match launch.repeat {
        Repeat::EachWorker => 1,
        // A piece is what one of so many workers would compute.
        Repeat::Once | Repeat::Wanted | Repeat::EachSequence { .. } => {
            let parts = |pieces: Pieces| options.workers * pieces.equal * Pieces::SMALLEST;
            launch.shares.pieces(options.workers, sizes).map_or(options.workers, parts)
        }
    };
    on_buffers(launch, kernel, memory, sizes, turn.at(0), |buffers, sizes| {
        run_with(kernel, buffers, sizes, &Options { workers, ..*options })
    })
}

fn find<'k>(kernels: &'k [Kernel], launch: &Launch) -> Result<&'k Kernel, StepError> {
    kernels.iter().find(|k| k.name == launch.kernel).ok_or_else(|| StepError::NoKernel(launch.kernel.clone()))
}

/// Runs `kernel` on copies of the buffers of a launch, and writes back what it may have changed.
fn on_buffers(
    launch: &Launch,
    kernel: &Kernel,
    memory: &mut Memory,
    sizes: &SymValues,
    at: At,
    run: impl FnOnce(&mut [Buffer], &SymValues) -> Result<(), InterpError>,
) -> Result<(), StepError> {
    let sizes = &memory.with_all_pages(launch, sizes);
    let (mut buffers, mut before) = (Vec::new(), Vec::new());
    for (place, &buf) in launch.buffers.iter().zip(&kernel.params) {
        let decl = &kernel.bufs[buf];
        // The kernel knows the buffer with this call's length.
        let bytes = decl.len.eval(sizes) as usize * decl.dtype.bytes().unwrap_or(1);
        let mut data = memory.read(place, at)?;
        data.truncate(bytes);
        let start = memory.start(place, at)?;
        before.push((start, if place.per_page > 0 { data.clone() } else { Vec::new() }));
        buffers.push(Buffer::new(decl.dtype, data).at(start as u64));
    }
    run(&mut buffers, sizes)?;
    for (((place, &buf), buffer), (start, before)) in
        launch.buffers.iter().zip(&kernel.params).zip(&buffers).zip(&before)
    {
        if kernel.bufs[buf].access != Access::In {
            memory.write(place, *start, before, &buffer.bytes);
        }
    }
    Ok(())
}
