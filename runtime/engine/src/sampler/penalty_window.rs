//! The last n tokens, and what they cost: repetition, presence and frequency penalties.

use std::collections::VecDeque;

use mlcc_text::TokenId;

use super::SamplingParams;

/// Invariant: `counts[t]` is the number of `t` in `window`.
#[derive(Debug, Clone)]
pub(super) struct PenaltyWindow {
    /// `None`: unbounded.
    limit: Option<usize>,
    window: VecDeque<TokenId>,
    counts: Vec<u32>,
    /// Round in which a token was penalized last, so that each distinct token is penalized once per round.
    rounds: Vec<u32>,
    round: u32,
}

impl PenaltyWindow {
    pub(super) fn new(params: &SamplingParams, vocab: usize) -> Self {
        let active = params.penalizes();
        let limit = if active { usize::try_from(params.repeat_last_n).ok() } else { Some(0) };
        PenaltyWindow {
            limit,
            // `limit` comes from a flag: room for an honest window only, a larger one grows.
            window: VecDeque::with_capacity(limit.unwrap_or(4096).min(4096)),
            counts: vec![0; if active { vocab } else { 0 }],
            rounds: vec![0; if active { vocab } else { 0 }],
            round: 0,
        }
    }

    /// Tokens outside the vocabulary are ignored.
    pub(super) fn push(&mut self, token: TokenId) {
        let Ok(index) = usize::try_from(token) else { return };
        if self.limit == Some(0) || index >= self.counts.len() {
            return;
        }
        if self.limit == Some(self.window.len())
            && let Some(oldest) = self.window.pop_front()
        {
            self.counts[oldest as usize] -= 1;
        }
        self.window.push_back(token);
        self.counts[index] += 1;
    }

    pub(super) fn clear(&mut self) {
        for token in self.window.drain(..) {
            self.counts[token as usize] = 0;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.window.is_empty()
    }

    /// Lowers the logits of the tokens in the window.
    pub(super) fn penalize(&mut self, params: &SamplingParams, logits: &mut [f32]) {
        self.round = self.round.wrapping_add(1);
        for &token in &self.window {
            let token = token as usize;
            if std::mem::replace(&mut self.rounds[token], self.round) == self.round {
                continue;
            }
            logits[token] = apply_penalties(params, self.counts[token], logits[token]);
        }
    }

    /// The logit of one token after [`PenaltyWindow::penalize`].
    pub(super) fn penalized_logit(&self, params: &SamplingParams, token: TokenId, logit: f32) -> f32 {
        let count = usize::try_from(token).ok().and_then(|token| self.counts.get(token)).copied();
        match count.unwrap_or(0) {
            0 => logit,
            count => apply_penalties(params, count, logit),
        }
    }
}

/// The logit of a token that is in the window `count` times.
fn apply_penalties(params: &SamplingParams, count: u32, logit: f32) -> f32 {
    // Dividing a negative logit would make the token likelier.
    let logit = if logit <= 0.0 { logit * params.repeat_penalty } else { logit / params.repeat_penalty };
    logit - (count as f32 * params.frequency_penalty + params.presence_penalty)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalized(params: SamplingParams, history: &[TokenId], logits: &[f32]) -> Vec<f32> {
        let mut state = PenaltyWindow::new(&params, logits.len());
        for &token in history {
            state.push(token);
        }
        let mut out = logits.to_vec();
        state.penalize(&params, &mut out);
        out
    }

    #[test]
    fn positive_is_divided_and_negative_multiplied() {
        let params = SamplingParams { repeat_penalty: 2.0, ..SamplingParams::default() };
        assert_eq!(penalized(params, &[0, 1, 1, 2], &[3.0, -3.0, 0.0, 5.0]), [1.5, -6.0, 0.0, 5.0]);
    }

    #[test]
    fn frequency_counts_and_presence_does_not() {
        let params =
            SamplingParams { frequency_penalty: 0.5, presence_penalty: 0.25, ..SamplingParams::default() };
        assert_eq!(penalized(params, &[1, 1, 1, 0], &[1.0, 1.0, 1.0]), [0.25, -0.75, 1.0]);
    }

    #[test]
    fn only_the_last_n_count() {
        let params = SamplingParams { repeat_penalty: 2.0, repeat_last_n: 2, ..SamplingParams::default() };
        assert_eq!(penalized(params.clone(), &[0, 1, 1, 2], &[4.0, 4.0, 4.0]), [4.0, 2.0, 2.0]);
        let all = SamplingParams { repeat_last_n: -1, ..params.clone() };
        assert_eq!(penalized(all, &[0, 1, 1, 2], &[4.0, 4.0, 4.0]), [2.0, 2.0, 2.0]);
        let none = SamplingParams { repeat_last_n: 0, ..params };
        assert_eq!(penalized(none, &[0, 1, 1, 2], &[4.0, 4.0, 4.0]), [4.0, 4.0, 4.0]);
    }

    #[test]
    fn strange_ids_are_ignored() {
        let params = SamplingParams { repeat_penalty: 2.0, ..SamplingParams::default() };
        assert_eq!(penalized(params, &[-1, 99], &[4.0]), [4.0]);
    }
}
