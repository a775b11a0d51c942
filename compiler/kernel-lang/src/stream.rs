//! Prefetches of a loop, as data of a plan.

use crate::{BufferView, Val};
use mlcc_ir::instr::InstrId;

/// Bytes that come from memory together.
pub const CACHE_LINE: usize = 64;

/// The way in which a loop prefetches the memory that it is going to read, `distance` bytes ahead of its
/// reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PrefetchMethod {
    /// No prefetch: the processor finds the memory by itself.
    #[default]
    None,
    /// Every cache line by a prefetch instruction.
    Lines { prefetch: InstrId, distance: i64 },
    /// The first line of what an iteration reads: the processor finds the others, and learns of the next
    /// pages.
    Sparse { prefetch: InstrId, distance: i64 },
    /// Every cache line by a plain load, for processors that drop prefetches.
    Touch { load: InstrId, distance: i64 },
}

impl PrefetchMethod {
    /// The instruction that prefetches a line.
    pub fn instr(self) -> Option<InstrId> {
        match self {
            PrefetchMethod::None => None,
            PrefetchMethod::Lines { prefetch, .. } | PrefetchMethod::Sparse { prefetch, .. } => {
                Some(prefetch)
            }
            PrefetchMethod::Touch { load, .. } => Some(load),
        }
    }

    /// Prefetches in an iteration that reads `count` elements from `at` on: the elements at the distance
    /// ahead, or the last `count` ones of the memory, which begin at `last`.
    #[track_caller]
    pub fn prefetch_ahead<'k>(self, view: BufferView<'k, 1>, at: Val<'k>, count: i64, last: Val<'k>) {
        let size = view.dtype().bytes().unwrap_or(1) as i64;
        // Elements of a line, and lines of what an iteration reads.
        let line = CACHE_LINE as i64 / size;
        let lines = (count + line - 1) / line;
        let (instr, distance, lines) = match self {
            PrefetchMethod::None => return,
            PrefetchMethod::Lines { prefetch, distance } => (prefetch, distance, lines),
            PrefetchMethod::Touch { load, distance } => (load, distance, lines),
            PrefetchMethod::Sparse { prefetch, distance } => (prefetch, distance, 1),
        };
        let ahead = (at + distance / size).min(last).named("ahead");
        for i in 0..lines {
            view.prefetch(instr, [ahead + i * line]);
        }
    }
}
