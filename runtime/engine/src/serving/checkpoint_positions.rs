//! The positions in a prompt whose states are worth a copy, for a model that cannot roll back: the cache
//! breakpoints of the request, the point at which another prompt was seen to diverge, and periodic ones in
//! long prompts, where the point of divergence is not known.

use crate::serving::prefill_pacer::SMALLEST;
use crate::serving::request::EngineRequest;
use crate::serving::slots::{PrefillStart, WORTH_A_COPY};

/// Most copies of what is left to read that are made without another reason.
const INNER: usize = 4;

#[derive(Debug, Default)]
pub(super) struct CheckpointPositions {
    /// The positions in order. Chunks of the prompt end there.
    positions: Vec<usize>,
    /// Tokens between two copies without another reason, which are made where a piece ends anyway; 0: there
    /// are none.
    interval: usize,
    /// The position of the last copy, or of the start of reading.
    last: usize,
}

impl CheckpointPositions {
    /// The positions of a prompt that is read from `start` on, in chunks of at most `chunk` tokens.
    pub fn new(start: &PrefillStart, request: &EngineRequest, chunk: usize) -> CheckpointPositions {
        let left = request.prompt.len().saturating_sub(start.cached);
        let mut positions: Vec<usize> =
            request.cache_breakpoints.iter().copied().chain([start.divergence]).collect();
        positions.sort_unstable();
        let mut last = start.cached;
        positions.retain(|&mark| {
            let is_worth_it = mark >= last + WORTH_A_COPY && mark < request.prompt.len();
            last = if is_worth_it { mark } else { last };
            is_worth_it
        });
        let interval = (2 * chunk).max(WORTH_A_COPY).max(left / INNER);
        CheckpointPositions { positions, interval, last: start.cached }
    }

    /// The next position behind `fed` tokens. Before and behind it are chunks of more than one row.
    pub fn next_position(&self, fed: usize, to_read: usize) -> Option<usize> {
        self.positions.iter().copied().find(|&mark| mark >= fed + SMALLEST && mark + SMALLEST < to_read)
    }

    /// `Some` if the state behind `fed` tokens is to be kept; true if only the distance is the reason.
    pub fn take_position(&mut self, fed: usize) -> Option<bool> {
        let marked = self.positions.contains(&fed);
        if !marked && (self.interval == 0 || fed < self.last + self.interval) {
            return None;
        }
        self.last = fed;
        Some(!marked)
    }
}
