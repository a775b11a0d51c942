//! Where states inside of a prompt are worth a copy, of a model that cannot roll back: at the borders that the request
//! names, where another text was seen to part from this one, and now and then in long prompts, of which nobody knows
//! where others will part.

use crate::serving::prefill_pacer::SMALLEST;
use crate::serving::request::EngineRequest;
use crate::serving::slots::{PrefillStart, WORTH_A_COPY};

/// Most copies of what is left to read that are made without another reason.
const INNER: usize = 4;

#[derive(Debug, Default)]
pub(super) struct CheckpointPositions {
    /// In order. Pieces of the prompt end there.
    positions: Vec<usize>,
    /// Tokens between two copies without another reason, which are made where a piece ends anyway; 0: there are none.
    interval: usize,
    /// Where the last copy was made, or reading began.
    last: usize,
}

impl CheckpointPositions {
    /// For a text that is read from `start` on, in pieces of at most `chunk` tokens.
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

    /// The next mark behind `fed` tokens. Before and behind it are pieces of more than one row.
    pub fn next_position(&self, fed: usize, to_read: usize) -> Option<usize> {
        self.positions.iter().copied().find(|&mark| mark >= fed + SMALLEST && mark + SMALLEST < to_read)
    }

    /// Whether the state behind `fed` tokens is to be kept, and then whether nothing but distance speaks for it.
    pub fn take_position(&mut self, fed: usize) -> Option<bool> {
        let marked = self.positions.contains(&fed);
        if !marked && (self.interval == 0 || fed < self.last + self.interval) {
            return None;
        }
        self.last = fed;
        Some(!marked)
    }
}
