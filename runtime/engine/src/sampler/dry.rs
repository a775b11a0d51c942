//! DRY ("don't repeat yourself"): a token that would go on with a repetition of the text's end is penalized
//! the more, the longer that repetition is: `multiplier * base^(length - allowed_length)`.

use mlcc_text::TokenId;

use super::extra::DryParams;

/// Room for this many tokens is made at once; an unbounded window grows.
const ROOM: usize = 4096;

/// The last tokens, and what going on with them costs.
#[derive(Debug, Clone)]
pub(super) struct RepeatedText {
    /// Size of the vocabulary if the penalty is on; else 0.
    vocab: usize,
    /// `None`: unbounded.
    limit: Option<usize>,
    /// The tokens that are looked at are the last ones.
    text: Vec<TokenId>,
    /// The number of tokens before a place that equal those before the end; by the distance from the end.
    matches: Vec<usize>,
    /// The longest repetition that each token would go on with, of those in `next`.
    longest: Vec<u32>,
    next: Vec<TokenId>,
}

impl RepeatedText {
    pub fn new(params: &DryParams, vocab: usize) -> RepeatedText {
        let vocab = if params.is_on() { vocab } else { 0 };
        let limit = usize::try_from(params.last_n).ok();
        let room = if vocab > 0 { limit.unwrap_or(ROOM).min(ROOM) } else { 0 };
        RepeatedText {
            vocab,
            limit,
            // A window is moved to the front when it has reached the end of twice its room.
            text: Vec::with_capacity(2 * room),
            matches: Vec::with_capacity(room),
            longest: vec![0; vocab],
            next: Vec::with_capacity(room),
        }
    }

    /// Tokens outside the vocabulary are ignored.
    pub fn push(&mut self, token: TokenId) {
        if usize::try_from(token).is_ok_and(|index| index < self.vocab) {
            if let Some(limit) = self.limit
                && self.text.len() >= 2 * limit.max(1)
            {
                self.text.drain(..self.text.len() + 1 - limit.max(1));
            }
            self.text.push(token);
        }
    }

    pub fn clear(&mut self) {
        self.text.clear();
    }

    /// True if nothing can be penalized.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Lowers the logits of tokens that would go on with a repetition.
    pub fn penalize(&mut self, params: &DryParams, logits: &mut [f32]) {
        let count = self.text.len().min(self.limit.unwrap_or(usize::MAX));
        let text = &self.text[self.text.len() - count..];
        let before_end = |distance: usize| text[count - 1 - distance];
        // No repetition goes over a breaker.
        let breaks = |distance: &usize| params.breakers.binary_search(&before_end(*distance)).is_ok();
        let most = (0..count).find(breaks).unwrap_or(count);
        let allowed = params.allowed_length as usize;
        if most < allowed {
            return;
        }
        // The Z algorithm on the text from its end: `matches[k]` tokens before the place `k` from the end are
        // those before the end.
        self.matches.clear();
        self.matches.resize(count, 0);
        let (mut left, mut right) = (0, 0);
        for at in 1..count {
            let known = if at < right { self.matches[at - left].min(right - at) } else { 0 };
            let mut length = known;
            while at + length < count && before_end(length) == before_end(at + length) {
                length += 1;
            }
            self.matches[at] = length;
            if at + length > right {
                (left, right) = (at, at + length);
            }
        }
        self.next.clear();
        for at in 1..count {
            let length = self.matches[at].min(most);
            if length >= allowed {
                let token = before_end(at - 1);
                let longest = &mut self.longest[token as usize];
                // One more, so that 0 is none.
                *longest = (*longest).max(u32::try_from(length).unwrap_or(u32::MAX - 1) + 1);
                self.next.push(token);
            }
        }
        for &token in &self.next {
            // A token may be there several times.
            let length = std::mem::take(&mut self.longest[token as usize]);
            if length > 0 {
                let further = (length - 1) as f32 - params.allowed_length as f32;
                logits[token as usize] -= (params.multiplier * params.base.powf(further)).min(f32::MAX);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params() -> DryParams {
        DryParams { multiplier: 0.5, base: 2.0, ..super::super::ExtraSamplers::default().dry }
    }

    fn penalties(params: &DryParams, text: &[TokenId]) -> Vec<f32> {
        let mut seen = RepeatedText::new(params, 10);
        text.iter().for_each(|&token| seen.push(token));
        let mut logits = vec![0.0; 10];
        seen.penalize(params, &mut logits);
        // Nothing is left over from one step to the next.
        let mut again = vec![0.0; 10];
        seen.penalize(params, &mut again);
        assert_eq!(logits, again);
        logits.iter().map(|logit| -logit).collect()
    }

    /// Each place, looked at by itself.
    fn simple(params: &DryParams, text: &[TokenId]) -> Vec<f32> {
        let count = usize::try_from(params.last_n).map_or(text.len(), |n| n.min(text.len()));
        let text = &text[text.len() - count..];
        let most = text.iter().rev().position(|token| params.breakers.contains(token)).unwrap_or(count);
        let mut longest = vec![None; 10];
        for end in 1..count {
            let same = (0..end).take_while(|&k| text[end - 1 - k] == text[count - 1 - k]).count();
            let token = &mut longest[text[end] as usize];
            *token = (*token).max(Some(same.min(most)));
        }
        let allowed = params.allowed_length as usize;
        let penalty = |length: usize| params.multiplier * params.base.powi((length - allowed) as i32);
        longest.into_iter().map(|l| l.filter(|&l| l >= allowed).map_or(0.0, penalty)).collect()
    }

    #[test]
    fn longer_repetitions_cost_more() {
        // "1 2 3 4 1 2 3": 4 would be the fourth token of a repetition, and 0.5 * 2^(3 - 2) is 1.
        let found = penalties(&params(), &[1, 2, 3, 4, 1, 2, 3]);
        assert_eq!(found, [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        // "1 2 5 1 2": 5, at the length that is allowed: 0.5 * 2^0.
        assert_eq!(penalties(&params(), &[1, 2, 5, 1, 2])[5], 0.5);
        // "2 5 3 2": one token is no repetition yet.
        assert_eq!(penalties(&params(), &[2, 5, 3, 2]), [0.0; 10]);
        // A breaker ends it: "3 |" of the repetition counts 0.
        let breakers = DryParams { breakers: [3].into(), ..params() };
        assert_eq!(penalties(&breakers, &[1, 2, 3, 4, 1, 2, 3]), [0.0; 10]);
        let inside = penalties(&breakers, &[3, 1, 2, 4, 3, 1, 2]);
        assert_eq!(inside[4], 0.5);
        // Tokens before the window are forgotten.
        let short = DryParams { last_n: 4, ..params() };
        assert_eq!(penalties(&short, &[1, 2, 5, 1, 2]), [0.0; 10]);
        assert_eq!(penalties(&DryParams { last_n: 5, ..params() }, &[1, 2, 5, 1, 2])[5], 0.5);
        assert_eq!(penalties(&params(), &[-1, 99]), [0.0; 10]);
    }

    proptest! {
        #[test]
        fn all_repetitions_are_found(
            text in proptest::collection::vec(0i32..4, 0..80),
            allowed_length in 1u32..4,
            last_n in -1i32..40,
            breaks in any::<bool>(),
        ) {
            prop_assume!(last_n != 0);
            let breakers = if breaks { [3].into() } else { [].into() };
            let params = DryParams { allowed_length, last_n, breakers, ..params() };
            prop_assert_eq!(penalties(&params, &text), simple(&params, &text));
        }
    }
}
