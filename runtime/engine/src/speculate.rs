//! Drafts of the next tokens of a text, to be checked by the model in one step (speculative decoding,
//! Leviathan et al. 2022).
//!
//! A draft never changes a text: from the logits behind each of its tokens the sampler chooses as always, and
//! the draft counts as long as it equals the sampled token. A step with a few drafts takes little longer than
//! one without, as it reads the weights once.
//!
//! [`NgramDrafter`] guesses that the words that followed the last ones before will follow them again (prompt
//! lookup decoding, Saxena 2023); [`DraftModel`] asks a smaller model.

mod model;

use std::ops::Range;

use mlcc_text::TokenId;

pub use model::DraftModel;

/// Rows of next tokens and drafts in a step, up to which more of them cost little beside the weights that are
/// read anyway.
pub const CHEAP_ROWS: usize = 8;

/// Guesses how texts go on.
pub trait Drafter {
    /// Appends to `tokens`, all tokens of a text, at most `most` that may follow. Texts have numbers: a
    /// drafter may keep something for each, and finds by the tokens whether it is still of use.
    fn append_draft(&mut self, text: usize, tokens: &mut Vec<TokenId>, most: usize);
}

/// Makes a drafter on the thread that will use it.
pub type MakeDrafter = Box<dyn FnOnce() -> Box<dyn Drafter> + Send>;

/// Finds what has followed before. Keeps nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NgramDrafter;

/// Tokens that must be the same for a guess, and beyond which more of them make none better.
const NGRAM: Range<usize> = 3..8;

impl Drafter for NgramDrafter {
    fn append_draft(&mut self, _text: usize, tokens: &mut Vec<TokenId>, most: usize) {
        let Some(from) = last_occurrence(tokens) else { return };
        // A repetition may go on in the draft itself.
        for at in from..from + most {
            tokens.push(tokens[at]);
        }
    }
}

/// The place behind the longest earlier occurrence of the text's last tokens; of equally long ones the last.
fn last_occurrence(tokens: &[TokenId]) -> Option<usize> {
    let (&last, before) = tokens.split_last()?;
    let mut best = (NGRAM.start - 1, None);
    for end in (NGRAM.start..=before.len()).rev() {
        if before[end - 1] != last {
            continue;
        }
        let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
        let same = pairs.take(NGRAM.end).take_while(|(a, b)| a == b).count();
        if same > best.0 {
            best = (same, Some(end));
        }
        if same == NGRAM.end {
            break;
        }
    }
    best.1
}

/// The length of drafts of one text, by the success of earlier ones: where they fail, the next one comes
/// after a pause that doubles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftLengthTuner {
    length: usize,
    /// Tokens before the next draft.
    pause: usize,
    failures: u32,
}

/// Tokens of a first draft, of the longest, and after the first that failed.
const FIRST: usize = 3;
const LONGEST: usize = CHEAP_ROWS - 1;
const PAUSE: usize = 8;

impl Default for DraftLengthTuner {
    fn default() -> Self {
        DraftLengthTuner { length: FIRST, pause: 0, failures: 0 }
    }
}

impl DraftLengthTuner {
    /// Most tokens of a draft now.
    pub fn max_draft(&self) -> usize {
        if self.pause == 0 { self.length } else { 0 }
    }

    /// A step without a draft, or with one of which some tokens were right.
    pub fn record_outcome(&mut self, drafted: usize, accepted: usize) {
        match (drafted, accepted) {
            (0, _) => self.pause = self.pause.saturating_sub(1),
            (_, 0) => {
                self.failures = (self.failures + 1).min(10);
                (self.length, self.pause) = (FIRST, PAUSE << self.failures);
            }
            _ if drafted == accepted => (self.length, self.failures) = (LONGEST.min(2 * self.length), 0),
            _ => (self.length, self.failures) = (LONGEST.min(accepted + 1), 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafted(tokens: &[TokenId], most: usize) -> Vec<TokenId> {
        let mut all = tokens.to_vec();
        NgramDrafter.append_draft(0, &mut all, most);
        all.split_off(tokens.len())
    }

    #[test]
    fn what_followed_follows_again() {
        assert_eq!(drafted(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 2), [4, 5]);
        assert_eq!(drafted(&[1, 2, 3, 4, 5, 9, 1, 2, 3], 7), [4, 5, 9, 1, 2, 3, 4]);
        assert_eq!(drafted(&[1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3], 1), [5], "the last time counts");
        assert_eq!(
            drafted(&[7, 1, 2, 3, 4, 0, 1, 2, 3, 5, 7, 1, 2, 3], 1),
            [4],
            "a longer match counts more"
        );
        assert_eq!(drafted(&[6, 6, 6, 6, 6], 3), [6, 6, 6], "a match may overlap the end");
        for other in [&[][..], &[1], &[1, 2, 3], &[2, 3, 4, 2, 3], &[1, 2, 3, 4, 5, 6]] {
            assert!(drafted(other, 8).is_empty(), "{other:?}");
        }
    }

    #[test]
    fn drafts_that_fail_become_rare() {
        let mut guess = DraftLengthTuner::default();
        let mut tried = 0;
        for _ in 0..1000 {
            let drafted = guess.max_draft();
            tried += usize::from(drafted > 0);
            guess.record_outcome(drafted, 0);
        }
        assert_eq!(tried, 6);
        while guess.max_draft() == 0 {
            guess.record_outcome(0, 0);
        }
        guess.record_outcome(3, 3);
        assert_eq!(guess.max_draft(), 6);
        guess.record_outcome(6, 6);
        assert_eq!(guess.max_draft(), LONGEST);
        guess.record_outcome(7, 2);
        assert_eq!(guess.max_draft(), 3);
    }
}
