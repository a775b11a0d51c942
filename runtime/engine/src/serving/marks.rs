//! Where states inside of a prompt are worth a copy, of a model that cannot go back: at the borders that the request names, where
//! another text was seen to part from this one, and now and then in long prompts, of which nobody knows where others will part.

use crate::serving::pace::SMALLEST;
use crate::serving::prefixes::{PrefillStart, WORTH_A_COPY};
use crate::serving::request::EngineRequest;

/// Most copies of what is left to read that are made without another reason.
const INNER: usize = 4;

#[derive(Debug, Default)]
pub(super) struct CheckpointPositions {
    /// In order. Pieces of the prompt end there.
    at: Vec<usize>,
    /// Tokens between two copies without another reason, which are made where a piece ends anyway; 0: there are none.
    every: usize,
    /// Where the last copy was made, or reading began.
    last: usize,
}

impl CheckpointPositions {
    /// For a text that is read from `start` on, in pieces of at most `chunk` tokens.
    pub fn new(start: &PrefillStart, request: &EngineRequest, chunk: usize) -> CheckpointPositions {
        let left = request.prompt.len().saturating_sub(start.cached);
        let mut at: Vec<usize> = request.borders.iter().copied().chain([start.parting]).collect();
        at.sort_unstable();
        let mut last = start.cached;
        at.retain(|&mark| {
            let is_worth_it = mark >= last + WORTH_A_COPY && mark < request.prompt.len();
            last = if is_worth_it { mark } else { last };
            is_worth_it
        });
        let every = (2 * chunk).max(WORTH_A_COPY).max(left / INNER);
        CheckpointPositions { at, every, last: start.cached }
    }

    /// The next mark behind `fed` tokens. Before and behind it are pieces of more than one row.
    pub fn next(&self, fed: usize, to_read: usize) -> Option<usize> {
        self.at.iter().copied().find(|&mark| mark >= fed + SMALLEST && mark + SMALLEST < to_read)
    }

    /// Whether the state behind `fed` tokens is to be kept, and then whether nothing but distance speaks for it.
    pub fn pass(&mut self, fed: usize) -> Option<bool> {
        let marked = self.at.contains(&fed);
        if !marked && (self.every == 0 || fed < self.last + self.every) {
            return None;
        }
        self.last = fed;
        Some(!marked)
    }
}
