//! The choice of a token among the top-k candidates, where all logits would lead to the same one.
//!
//! A device that finds the largest logits itself sends only these. Everything else is computed here, by the
//! same code and in the same order as from all logits, so a seed gives the same text. Changes of a request
//! may only lower logits: then all tokens that rank before the last one of the list are in it.

use mlcc_runtime::TokenCandidate;
use mlcc_text::TokenId;

use super::{
    Candidate, Sampler, SamplingParams, bounded_top_k, compare_candidates, drop_unlikely, keep_nucleus,
    relative_weight, set_weights,
};

/// The largest error of a sum of weights in f32: more than [`super::scan::sum_weights`] says.
const ERROR_OF_SUM: f64 = 4e-6;

impl Sampler {
    /// Samples like [`Sampler::sample`] from all logits, of which `likeliest` are the largest: in falling
    /// order, equal ones by their number, those that are not numbers last. `None`, and nothing has changed,
    /// where these do not decide.
    pub fn sample_from_top_k(&mut self, likeliest: &[TokenCandidate]) -> Option<TokenId> {
        let mut candidates = std::mem::take(&mut self.candidates);
        let decided = self.fill_from_top_k(likeliest, &mut candidates);
        self.candidates = candidates;
        decided.and_then(|()| self.draw_candidate())
    }

    fn fill_from_top_k(&self, likeliest: &[TokenCandidate], candidates: &mut Vec<Candidate>) -> Option<()> {
        let only_lower = self.changes.only_lowers() && self.params.only_lower();
        // Several infinite logits are equal to the largest number.
        if !only_lower
            || self.params.extra.is_on()
            || likeliest.first().is_none_or(|first| first.logit > f32::MAX)
        {
            return None;
        }
        let numbers = likeliest.iter().take_while(|l| l.logit > f32::NEG_INFINITY);
        let raw = |l: &TokenCandidate| Candidate { id: l.token, logit: l.logit + 0.0, probability: 0.0 };
        let all = likeliest.len() >= self.vocab || numbers.clone().count() < likeliest.len();
        // Tokens beyond the list rank behind this one.
        let bound = likeliest.last().filter(|_| !all).map(raw);
        candidates.clear();
        candidates.extend(numbers.map(raw).map(|c| Candidate { logit: self.changed_logit(c), ..c }));
        candidates.retain(|c| c.logit > f32::NEG_INFINITY);
        candidates.sort_unstable_by(compare_candidates);
        let certain = |c: &Candidate| bound.is_none_or(|bound| compare_candidates(c, &bound).is_le());
        candidates.truncate(candidates.partition_point(certain));
        let best = *candidates.first()?;
        if self.params.is_greedy() {
            candidates.clear();
            candidates.push(Candidate { probability: 1.0, ..best });
            return Some(());
        }
        let beyond = UnseenTokens {
            bound: bound.map(|b| b.logit),
            tokens: self.vocab.saturating_sub(candidates.len()),
        };
        cut_top_k(&self.params, (self.vocab, beyond), best, candidates)
    }

    fn changed_logit(&self, c: Candidate) -> f32 {
        let logit = self.changes.changed_logit(self.sampled_count, c.id, c.logit);
        self.history.penalized_logit(&self.params, c.id, logit) + 0.0
    }
}

/// The tokens that are not among the candidates.
struct UnseenTokens {
    /// An upper bound of their logits; `None`: there are no such tokens.
    bound: Option<f32>,
    tokens: usize,
}

/// Cuts like [`super::cut_candidates`], given the top candidates of `vocab` tokens, sorted.
fn cut_top_k(
    params: &SamplingParams,
    (vocab, beyond): (usize, UnseenTokens),
    best: Candidate,
    candidates: &mut Vec<Candidate>,
) -> Option<()> {
    let of_bound = beyond.bound.map(|logit| relative_weight(params, best.logit, logit));
    if let Some(k) = bounded_top_k(params, vocab) {
        if candidates.len() < k && of_bound.is_some() {
            return None;
        }
        candidates.truncate(k);
        let total = set_weights(params, best.logit, candidates);
        if params.top_p < 1.0 {
            keep_nucleus(candidates, f64::from(params.top_p) * total);
        }
    } else if params.top_p < 1.0 {
        let least = set_weights(params, best.logit, candidates);
        let most = least + of_bound.unwrap_or(0.0) * beyond.tokens as f64;
        let of = |sum: f64| f64::from(params.top_p) * sum;
        let first = mass_end(candidates, of(least) * (1.0 - ERROR_OF_SUM));
        let end = match min_p_end(params, of_bound, candidates) {
            // Wherever the sum ends, min-p cuts before.
            Some(end) if first.is_none_or(|first| first >= end) => end,
            _ => first.filter(|_| first == mass_end(candidates, of(most) * (1.0 + ERROR_OF_SUM)))?,
        };
        candidates.truncate(end);
    } else {
        set_weights(params, best.logit, candidates);
        min_p_end(params, of_bound, candidates)?;
        // The order in which they are drawn from all logits.
        candidates.sort_unstable_by_key(|c| c.id);
    }
    drop_unlikely(params, candidates);
    Some(())
}

/// The number of candidates that min-p lets through; `None`: others may be, too.
fn min_p_end(params: &SamplingParams, of_bound: Option<f64>, candidates: &[Candidate]) -> Option<usize> {
    let passes = |weight: f64| weight >= f64::from(params.min_p);
    (!of_bound.is_some_and(passes)).then(|| candidates.partition_point(|c| passes(c.probability)))
}

/// The number of first candidates whose weights reach `mass`; `None`: not even all of them do.
fn mass_end(candidates: &[Candidate], mass: f64) -> Option<usize> {
    let mut sum = 0.0;
    let reached = candidates.iter().position(|c| {
        sum += c.probability;
        sum >= mass
    });
    reached.map(|last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::LogitChanges;
    use proptest::prelude::*;

    /// The largest of some logits, as a device gives them.
    fn largest(logits: &[f32], count: usize) -> Vec<TokenCandidate> {
        let mut all: Vec<TokenCandidate> = logits
            .iter()
            .enumerate()
            .map(|(id, &l)| TokenCandidate { token: id as i32, logit: l + 0.0 })
            .collect();
        let rank = |l: &TokenCandidate| if l.logit.is_nan() { f32::NEG_INFINITY } else { l.logit };
        all.sort_by(|a, b| {
            let numbers = a.logit.is_nan().cmp(&b.logit.is_nan());
            rank(b).total_cmp(&rank(a)).then(numbers).then(a.token.cmp(&b.token))
        });
        all.truncate(count);
        all
    }

    fn sampler(params: &SamplingParams, changes: &LogitChanges, text: &[TokenId], vocab: usize) -> Sampler {
        let mut sampler = Sampler::with_changes(params.clone(), changes.clone(), vocab).unwrap();
        text.iter().for_each(|&token| sampler.accept(token));
        sampler
    }

    /// The token that is sampled from the top candidates, which all logits lead to. `None`: they do not
    /// decide.
    fn chosen(
        params: &SamplingParams,
        changes: &LogitChanges,
        text: &[TokenId],
        logits: &[f32],
    ) -> Option<TokenId> {
        let (mut a, mut b) =
            (sampler(params, changes, text, logits.len()), sampler(params, changes, text, logits.len()));
        let found = a.sample_from_top_k(&largest(logits, 64));
        if let Some(token) = found {
            assert_eq!(b.sample(logits), Ok(token));
            let bits = |s: &Sampler| -> Vec<(TokenId, u64)> {
                s.candidates.iter().map(|c| (c.id, c.probability.to_bits())).collect()
            };
            assert_eq!(bits(&a), bits(&b));
        } else {
            // The failed attempt has changed nothing.
            assert_eq!(a.sample(logits), b.sample(logits));
        }
        found
    }

    /// Falls fast enough that few tokens have most of the mass.
    fn steep(vocab: usize) -> Vec<f32> {
        (0..vocab).map(|i| -((i * 7919 % vocab) as f32).sqrt()).collect()
    }

    #[test]
    fn what_is_usual_is_decided() {
        let plain = SamplingParams { seed: Some(3), ..SamplingParams::default() };
        let penalized = SamplingParams { repeat_penalty: 1.1, presence_penalty: 0.2, ..plain.clone() };
        let unbounded = SamplingParams { top_k: 0, ..plain.clone() };
        let only_min_p = SamplingParams { top_k: 0, top_p: 1.0, min_p: 0.1, ..plain.clone() };
        let greedy = SamplingParams::greedy();
        for params in [&greedy, &plain, &penalized, &unbounded, &only_min_p] {
            let text: Vec<TokenId> = (0..20).map(|i| i * 97 % 5000).collect();
            assert!(chosen(params, &LogitChanges::default(), &text, &steep(5000)).is_some(), "{params:?}");
        }
        let only_top_p = SamplingParams { top_k: 0, min_p: 0.0, temperature: 0.3, ..plain.clone() };
        assert!(chosen(&only_top_p, &LogitChanges::default(), &[], &steep(5000)).is_some());
        let changes = LogitChanges {
            bias: vec![(0, -100.0), (9, f32::NEG_INFINITY)],
            banned_until_min: vec![1],
            min_tokens: 3,
        };
        assert!(chosen(&plain, &changes, &[], &steep(5000)).is_some());
    }

    #[test]
    fn what_needs_more_is_not() {
        let plain = SamplingParams { seed: Some(3), ..SamplingParams::default() };
        let none = LogitChanges::default();
        let cases = [
            SamplingParams { top_k: 65, ..plain.clone() },
            SamplingParams { top_k: 0, top_p: 1.0, min_p: 0.0, ..plain.clone() },
            SamplingParams { top_k: 0, temperature: 50.0, ..plain.clone() },
            SamplingParams { repeat_penalty: 0.9, ..plain.clone() },
            SamplingParams { presence_penalty: -0.1, ..plain.clone() },
        ];
        for params in cases {
            assert_eq!(chosen(&params, &none, &[5], &steep(5000)), None, "{params:?}");
        }
        let raised = LogitChanges { bias: vec![(4, 0.5)], ..none.clone() };
        assert_eq!(chosen(&plain, &raised, &[], &steep(5000)), None);
        assert_eq!(chosen(&plain, &none, &[], &[f32::INFINITY, f32::MAX, 1.0]), None);
        let mut nothing = sampler(&plain, &none, &[], 2);
        assert_eq!(nothing.sample_from_top_k(&largest(&[f32::NAN, f32::NEG_INFINITY], 64)), None);
    }

    proptest! {
        #[test]
        fn it_is_what_all_logits_lead_to(
            steps in proptest::collection::vec(-30i8..30, 1..300),
            odd in proptest::collection::vec((0usize..300, 0usize..4), 0..6),
            text in proptest::collection::vec(0i32..300, 0..30),
            bias in proptest::collection::vec((0i32..300, -3.0f32..0.0), 0..4),
            temperature in prop_oneof![Just(0.0f32), 0.05f32..2.0],
            top_k in prop_oneof![Just(0u32), 1u32..80],
            top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
            repeat_penalty in prop_oneof![Just(1.0f32), 1.0f32..2.0],
            frequency_penalty in prop_oneof![Just(0.0f32), 0.0f32..1.0],
            seed in any::<u64>(),
        ) {
            let mut logits: Vec<f32> = steps.iter().map(|&s| f32::from(s) / 4.0).collect();
            let vocab = logits.len();
            for (at, which) in odd {
                logits[at % vocab] = [f32::NAN, f32::NEG_INFINITY, -0.0, 0.0][which];
            }
            let bias = bias.into_iter().map(|(id, b)| (id % vocab as i32, b)).collect();
            let changes = LogitChanges { bias, ..LogitChanges::default() };
            let seed = Some(seed);
            let params = SamplingParams {
                temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty, seed, ..SamplingParams::default()
            };
            let _ = chosen(&params, &changes, &text, &logits);
        }
    }
}
