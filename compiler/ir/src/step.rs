//! The lowered form of an entry function: kernel launches with their memory, and the barriers between them.
//! On a CPU a step becomes a function of direct calls that all workers run together; on a GPU, a launch list.

use crate::dim::{Dim, SymValues};
use std::ops::Range;

/// Rows of every cache in a page.
pub const PAGE_ROWS: u64 = 64;

/// Memory that exists when a step runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MemoryBase {
    /// The weights payload (read only).
    Weights,
    /// Matrices of the slots for adapters ([`crate::module::ParamSource::Adapter`]).
    Adapters,
    /// State of one sequence: recurrent states, and caches where they are dense.
    State,
    /// Pages with rows of the caches of all sequences. A buffer is the same part of every page.
    Pages,
    /// Input: numbers of the pages of one sequence, `i32`, by [`PAGE_ROWS`] rows.
    PageTable,
    /// Temporaries of this step; contents do not outlive it.
    Arena,
    /// Input: `i32[n]` token ids.
    Tokens,
    /// Input: `i32[n]` row numbers, those of the output rows first.
    LogitIndices,
    /// Output: `f32[rows, vocab]`.
    Logits,
    /// Output of `softmax_with_temperature`, `f32[vocab]`, and outputs of `likeliest`.
    Probs,
    /// Input of `softmax_with_temperature`: `f32[1]`.
    Temperature,
}

impl MemoryBase {
    pub const ALL: [MemoryBase; 11] = [
        MemoryBase::Weights,
        MemoryBase::Adapters,
        MemoryBase::State,
        MemoryBase::Pages,
        MemoryBase::PageTable,
        MemoryBase::Arena,
        MemoryBase::Tokens,
        MemoryBase::LogitIndices,
        MemoryBase::Logits,
        MemoryBase::Probs,
        MemoryBase::Temperature,
    ];
    pub fn name(self) -> &'static str {
        match self {
            MemoryBase::Weights => "weights",
            MemoryBase::Adapters => "adapters",
            MemoryBase::State => "state",
            MemoryBase::Pages => "pages",
            MemoryBase::PageTable => "page_table",
            MemoryBase::Arena => "arena",
            MemoryBase::Tokens => "tokens",
            MemoryBase::LogitIndices => "wanted",
            MemoryBase::Logits => "logits",
            MemoryBase::Probs => "probs",
            MemoryBase::Temperature => "temperature",
        }
    }
}

/// A buffer argument: `base + offset + per_past * past + per_row * row + per_sequence * sequence +
/// per_worker * worker` bytes, `bytes` long (constant: worst case over the planned sizes). In pages, `offset`
/// and `bytes` are those of a part of each page of `per_page` bytes, and the row after `past` others lies
/// where the table of the sequence says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BufferRef {
    pub base: MemoryBase,
    pub offset: u64,
    pub bytes: u64,
    /// Bytes per token already in the cache: new rows of a cache lie after those of earlier tokens. 0
    /// elsewhere.
    pub per_past: u64,
    /// Bytes from page to page, in pages. 0 elsewhere.
    pub per_page: u64,
    /// Bytes from row to row, in launches for each sequence: `row` is the number of its first row. 0
    /// elsewhere, and in states, of which every sequence has its own.
    pub per_row: u64,
    /// Bytes from one sequence to the next, of values in such launches whose bytes are not proportional to
    /// the rows. 0 elsewhere.
    pub per_sequence: u64,
    /// Bytes from the copy of one worker to that of the next, of values that every worker computes for itself
    /// ([`RepeatMode::EachWorker`]); every reader takes its own copy. 0 elsewhere.
    pub per_worker: u64,
}

impl BufferRef {
    /// `bytes` at a constant place.
    pub fn fixed(base: MemoryBase, offset: u64, bytes: u64) -> BufferRef {
        let (per_past, per_page) = (0, 0);
        BufferRef { base, offset, bytes, per_past, per_page, per_row: 0, per_sequence: 0, per_worker: 0 }
    }

    /// The end of the bytes that it may reach of its memory, or, in pages, of every page.
    pub fn end(&self) -> u64 {
        match (self.per_page, self.per_past) {
            (0, _) | (_, 0) => self.offset + self.bytes,
            (_, row) => self.offset + PAGE_ROWS * row,
        }
    }
}

/// The sequences of a batch that a launch is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum SequenceFilter {
    #[default]
    All,
    /// Sequences of one row, for which there are kernels of their own.
    OneRow,
    SeveralRows,
}

impl SequenceFilter {
    pub fn includes(self, rows: i64) -> bool {
        match self {
            SequenceFilter::All => true,
            SequenceFilter::OneRow => rows == 1,
            SequenceFilter::SeveralRows => rows > 1,
        }
    }

    /// No sequence is of both kinds.
    pub fn is_disjoint(self, other: SequenceFilter) -> bool {
        self != other && self != SequenceFilter::All && other != SequenceFilter::All
    }
}

/// The repetitions of a launch.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum RepeatMode {
    #[default]
    Once,
    /// Once, for the output rows: `n` is their number.
    Outputs,
    /// Once for each sequence of the batch, with its state, its `past` and its rows: `n` is their number.
    ///
    /// Sequences are in order on a line, each as long as its work, and shares are shares of the line: a
    /// worker has whole sequences, and parts of at most two ([`WorkShare::of_sequence`]). So it makes few
    /// calls, whatever the number of sequences, and long sequences are divided among more workers than short
    /// ones.
    EachSequence {
        /// Work of a sequence, at least 1. Work of 1 is not divided: worker `w` of `m` has sequences
        /// `b * w / m` until `b * (w + 1) / m`.
        work: Dim,
        of: SequenceFilter,
    },
    /// Once by every worker alone, as if there were no other, into its own copy of the results. So no barrier
    /// is needed between the launch and its readers.
    EachWorker,
}

impl RepeatMode {
    /// Once for each sequence of a batch.
    pub fn is_for_sequences(&self) -> bool {
        self.work_of_sequence().is_some()
    }

    /// The work of a sequence, of a launch for each.
    pub fn work_of_sequence(&self) -> Option<&Dim> {
        match self {
            RepeatMode::EachSequence { work, .. } => Some(work),
            RepeatMode::Once | RepeatMode::Outputs | RepeatMode::EachWorker => None,
        }
    }

    /// The sequences that a launch is for.
    pub fn sequences(&self) -> Option<SequenceFilter> {
        match self {
            RepeatMode::EachSequence { of, .. } => Some(*of),
            RepeatMode::Once | RepeatMode::Outputs | RepeatMode::EachWorker => None,
        }
    }

    /// Every sequence is computed by one worker alone.
    pub fn has_whole_sequences(&self) -> bool {
        self.work_of_sequence().and_then(Dim::as_const) == Some(1)
    }
}

/// A part of the iterations of a kernel that workers share, for one call: with them cut in `of` equal parts,
/// those from `first` until `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkShare {
    pub first: i64,
    pub end: i64,
    pub of: i64,
}

impl WorkShare {
    pub const WHOLE: WorkShare = WorkShare { first: 0, end: 1, of: 1 };

    /// One of equal parts.
    pub fn equal_part(part: usize, of: usize) -> WorkShare {
        let [part, of] = [part, of].map(|number| number as i64);
        WorkShare { first: part, end: part + 1, of }
    }

    /// The part of `extent` iterations.
    pub fn iterations(self, extent: i64) -> Range<i64> {
        self.first * extent / self.of..self.end * extent / self.of
    }

    /// The part of a sequence, whose work begins at `at`, in this share of the line, which is `total` long.
    /// For launches for each sequence ([`RepeatMode::EachSequence`]).
    pub fn of_sequence(self, at: i64, work: i64, total: i64) -> Option<WorkShare> {
        let line = self.iterations(total);
        let share = WorkShare { first: (line.start - at).max(0), end: (line.end - at).min(work), of: work };
        (share.first < share.end).then_some(share)
    }
}

/// The way in which workers share the iterations of a launch. Results do not depend on it: a piece is what
/// one worker of some larger number would compute.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum WorkSchedule {
    /// Worker `w` of `m` computes share `w` of `m`, whatever time the others take.
    #[default]
    Static,
    /// Every worker takes its share in pieces, in order, and then pieces that are left of other shares. See
    /// [`GuidedChunks`].
    Dynamic {
        /// The approximate number of smallest pieces in all shares together: a size at which the step runs.
        chunks: Dim,
    },
}

impl WorkSchedule {
    /// The pieces of each share with `workers` workers; `None` where each takes its share as a whole.
    pub fn chunks(&self, workers: usize, sizes: &SymValues) -> Option<GuidedChunks> {
        match self {
            WorkSchedule::Dynamic { chunks: pieces } if workers > 1 => {
                GuidedChunks::new(usize::try_from(pieces.eval(sizes)).unwrap_or(0) / workers)
            }
            WorkSchedule::Dynamic { .. } | WorkSchedule::Static => None,
        }
    }
}

/// The pieces of a share in the order in which they are taken ("guided" schedules, Polychronopoulos and Kuck,
/// 1987): equal ones as long as there is much left, the last of them in a half, a quarter and two eighths. So
/// workers finish almost together, and a share is not cut into more runs of memory than that takes. Every
/// piece is one of a power of two times as many equal parts of the whole, so it is what one worker of some
/// larger number would compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuidedChunks {
    /// Equal pieces, the last one with its parts.
    pub equal: usize,
}

impl GuidedChunks {
    /// The smallest pieces are this part of the others.
    pub const SMALLEST: usize = 8;
    /// Into how many the last one is cut, less one.
    pub const FURTHER: usize = 3;
    /// Shares of fewer of the smallest pieces stay whole.
    pub const LEAST: usize = 4;

    /// The pieces of a share that is worth `smallest` of the smallest pieces.
    pub fn new(smallest: usize) -> Option<GuidedChunks> {
        (smallest >= GuidedChunks::LEAST)
            .then(|| GuidedChunks { equal: (smallest / GuidedChunks::SMALLEST).max(1) })
    }

    /// The number of pieces.
    pub fn chunk_count(self) -> usize {
        self.equal + GuidedChunks::FURTHER
    }

    /// The place of piece `number` when the pieces of all shares are numbered in order: part `.0` of `.1`
    /// equal parts of the whole.
    pub fn chunk_part(self, number: usize, workers: usize) -> (usize, usize) {
        let (owner, piece) = (number / self.chunk_count(), number % self.chunk_count());
        let (each, within) = match (piece + 1).checked_sub(self.equal) {
            None => (self.equal, piece),
            Some(further) => {
                let each = self.equal << (further + 1).min(GuidedChunks::FURTHER);
                (each, each - 2 + usize::from(further == GuidedChunks::FURTHER))
            }
        };
        (owner * each + within, workers * each)
    }
}

/// GPU launch shape; `None` in CPU steps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchGrid {
    pub blocks: [Dim; 3],
    pub threads: [u32; 3],
}

impl LaunchGrid {
    /// Most blocks in x, y and z, on every device.
    pub const MOST_BLOCKS: [i64; 3] = [i32::MAX as i64, 65_535, 65_535];

    /// The fault of an axis that may have `blocks` blocks, if it has one.
    pub fn axis_fault(axis: usize, blocks: i64) -> Option<String> {
        let most = LaunchGrid::MOST_BLOCKS.get(axis)?;
        let name = ["x", "y", "z"].get(axis)?;
        (blocks > *most)
            .then(|| format!("has up to {blocks} blocks in {name}, where a GPU has at most {most}"))
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchItem {
    /// Name of a kernel of the module.
    pub kernel: String,
    /// One per buffer parameter of the kernel.
    pub buffers: Vec<BufferRef>,
    /// One per dimension parameter of the kernel.
    pub dims: Vec<Dim>,
    pub grid: Option<LaunchGrid>,
    pub repeat: RepeatMode,
    pub schedule: WorkSchedule,
}

/// The part of each rank in an all-gather: `rows` rows of `row_bytes` bytes. All get rows of
/// `ranks * row_bytes` bytes, each with the rows of all ranks in their order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GatherShape {
    pub ranks: usize,
    pub rows: Dim,
    pub row_bytes: u64,
}

/// Joins what all ranks have. The first worker of each rank speaks for it; to the planners it is a launch of
/// that worker alone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AllGather {
    /// Read: this rank's rows.
    pub part: BufferRef,
    /// Written: those of all.
    pub all: BufferRef,
    pub shape: GatherShape,
    /// True for the rows whose logits are requested: `n` is their number, as for [`RepeatMode::Outputs`].
    pub output_rows: bool,
}

#[allow(clippy::large_enum_variant, reason = "most items are launches")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepItem {
    Launch(LaunchItem),
    AllGather(AllGather),
    /// All workers have finished the items before (CPU; on a GPU launches are ordered anyway).
    Barrier,
}

impl StepItem {
    pub fn launch(&self) -> Option<&LaunchItem> {
        match self {
            StepItem::Launch(launch) => Some(launch),
            StepItem::AllGather(_) | StepItem::Barrier => None,
        }
    }
}

/// An executable entry point.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepProgram {
    /// `prefill`, `decode`, `decode_batch`, `step`, `prefill_logits`, `softmax_with_temperature`.
    pub name: String,
    pub items: Vec<StepItem>,
    /// Bytes of arena that it needs.
    pub arena_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::SizeSymbol;

    #[test]
    fn shares_of_the_line_are_all_of_every_sequence() {
        let works = [[1, 1, 1, 1, 1], [7, 1, 1, 300, 12], [64, 64, 64, 64, 64], [1, 2, 3, 4, 90_000_000_000]];
        for (works, workers) in works.iter().flat_map(|w| [1, 2, 3, 7, 64].map(|m| (w, m))) {
            let total: i64 = works.iter().sum();
            let (mut at, mut calls) = (0, 0);
            for &work in works {
                // Each begins where the one before has ended, also in iterations.
                let shares = (0..workers)
                    .filter_map(|w| WorkShare::equal_part(w, workers).of_sequence(at, work, total));
                let (mut end, mut next) = (0, 0);
                for share in shares {
                    assert_eq!((share.first, share.of), (end, work));
                    let iterations = share.iterations(5);
                    assert_eq!(iterations.start, next);
                    (end, next) = (share.end, iterations.end);
                    calls += 1;
                }
                assert_eq!((end, next), (work, 5), "{works:?} by {workers}");
                at += work;
            }
            assert!(calls < works.len() + workers, "{calls} calls");
        }
    }

    #[test]
    fn pieces_are_all_of_every_share() {
        let sizes = SymValues { n: 1, b: 1, past: 90 };
        assert_eq!(WorkSchedule::Static.chunks(2, &sizes), None);
        assert_eq!(WorkSchedule::Dynamic { chunks: Dim::from(64) }.chunks(1, &sizes), None);
        let growing = WorkSchedule::Dynamic { chunks: Dim::from(SizeSymbol::Past).floor_div(10) };
        assert_eq!(growing.chunks(2, &sizes), Some(GuidedChunks { equal: 1 }));
        assert_eq!(growing.chunks(2, &SymValues { past: 79, ..sizes }), None);
        for (workers, smallest) in [(2, 4), (2, 8), (3, 16), (2, 39), (5, 1024)] {
            let shares = WorkSchedule::Dynamic { chunks: Dim::from(workers * smallest) };
            let pieces = shares.chunks(workers, &sizes).unwrap();
            // In the smallest pieces of all shares.
            let whole = workers * pieces.equal * GuidedChunks::SMALLEST;
            let mut end = 0;
            for number in 0..workers * pieces.chunk_count() {
                let (part, parts) = pieces.chunk_part(number, workers);
                assert_eq!((part * whole / parts, whole % parts), (end, 0), "piece {number} of {shares:?}");
                end += whole / parts;
            }
            assert_eq!(end, whole);
        }
    }
}
