//! Logits to one token.
//!
//! Order: changes of a request (biases, no end yet), penalties, DRY, grammar, temperature, top-k, typical,
//! top-p, min-p, XTC, draw (the order of ggml's GPT-2 example and of transformers); Mirostat replaces all
//! cuts. Each usual cut keeps a prefix of the candidates sorted by probability, so they commute with sorting
//! only the front.
//!
//! Invariants: equal logits are ordered by the lower id, so a result never depends on the way of sorting; NaN
//! is never chosen; after the first token nothing is allocated (an unbounded penalty window grows, and
//! nothing else).

mod dry;
mod extra;
mod extra_cuts;
mod logit_changes;
mod logprobs;
mod params;
mod pcg;
mod penalty_window;
mod scan;
mod top_k;

use std::hash::{BuildHasher, Hasher};

use mlcc_text::{Grammar, TokenId};
use thiserror::Error;

pub use extra::{DryParams, ExtraSamplers, MirostatParams};
pub use logit_changes::LogitChanges;
pub use logprobs::{Logprobs, TokenLogprob, compute_logprobs};
pub use params::{ParamError, SamplingOverrides, SamplingParams};
pub use pcg::Pcg64;

use dry::RepeatedText;
use extra_cuts::SurpriseLimit;
use penalty_window::PenaltyWindow;

#[derive(Debug, Clone, PartialEq, Error)]
pub enum SampleError {
    #[error(
        "the model gave {found} logits, expected {expected} (its vocabulary): model and sampler do not match"
    )]
    Length { expected: usize, found: usize },
    #[error(
        "none of the {vocab} logits is a number: the model produced invalid values. Look for NaN or Inf in the weights \
         (`mlcc verify`), or try a format with a larger range (f32 or bf16 for f16)."
    )]
    NoFiniteLogit { vocab: usize },
    #[error(
        "no token is left that the grammar allows: the model's vocabulary has none, or biases and min_tokens forbid them"
    )]
    NothingAllowed,
}

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    pub id: TokenId,
    /// The logit after penalties, before the temperature.
    pub logit: f32,
    pub probability: f64,
}

/// Sorts more probable tokens first; ties by the lower id.
fn compare_candidates(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    vocab: usize,
    seed: u64,
    rng: Pcg64,
    changes: LogitChanges,
    /// Tokens chosen so far.
    sampled_count: usize,
    history: PenaltyWindow,
    dry_penalty: RepeatedText,
    surprise_limit: SurpriseLimit,
    /// The logits after changes and penalties.
    changed_logits: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Sampler {
    pub fn new(params: SamplingParams, vocab: usize) -> Result<Self, ParamError> {
        Sampler::with_changes(params, LogitChanges::default(), vocab)
    }

    /// A sampler that changes the logits first.
    pub fn with_changes(
        params: SamplingParams,
        changes: LogitChanges,
        vocab: usize,
    ) -> Result<Self, ParamError> {
        params.check()?;
        changes.validate(vocab)?;
        let seed = params.seed.unwrap_or_else(random_seed);
        let history = PenaltyWindow::new(&params, vocab);
        let top_k = bounded_top_k(&params, vocab).filter(|_| params.extra.mirostat.is_none());
        let changes_logits = params.penalizes() || params.extra.dry.is_on() || changes.applies_after(0);
        let room =
            if params.is_greedy() { 1 } else { top_k.map_or(vocab, scan::buffer_size).min(vocab.max(1)) };
        Ok(Sampler {
            vocab,
            seed,
            rng: Pcg64::new(seed),
            history,
            dry_penalty: RepeatedText::new(&params.extra.dry, vocab),
            surprise_limit: SurpriseLimit::new(&params.extra),
            changed_logits: Vec::with_capacity(if changes_logits { vocab } else { 0 }),
            changes,
            sampled_count: 0,
            candidates: Vec::with_capacity(room),
            params,
        })
    }

    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The seed in use; show it when none was given, so that a text can be had again.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Tells the sampler that `token` is part of the text (of the prompt, or chosen), for the penalties.
    pub fn accept(&mut self, token: TokenId) {
        self.history.push(token);
        self.dry_penalty.push(token);
    }

    /// Forgets the text and starts the random numbers anew.
    pub fn reset(&mut self) {
        self.history.clear();
        self.dry_penalty.clear();
        self.surprise_limit = SurpriseLimit::new(&self.params.extra);
        self.sampled_count = 0;
        self.rng = Pcg64::new(self.seed);
    }

    /// Chooses a token; [`Sampler::accept`] it afterwards.
    pub fn sample(&mut self, logits: &[f32]) -> Result<TokenId, SampleError> {
        self.sample_within(logits, None)
    }

    /// Chooses a token that a grammar allows, which was prepared.
    pub fn sample_within(
        &mut self,
        logits: &[f32],
        grammar: Option<&Grammar>,
    ) -> Result<TokenId, SampleError> {
        self.fill_candidates(logits, grammar)?;
        self.draw_candidate().ok_or(SampleError::NoFiniteLogit { vocab: self.vocab })
    }

    /// One of the candidates, of which there is at least one.
    fn draw_candidate(&mut self) -> Option<TokenId> {
        self.sampled_count += 1;
        // Exactly one number per token, also when there is no choice: later tokens then do not depend on it.
        let mut left = self.rng.next_f64();
        let drawn = self.candidates.iter().find(|candidate| {
            left -= candidate.probability;
            left < 0.0
        });
        // Rounding may leave a rest of 1e-16 after the last one.
        let drawn = drawn.or(self.candidates.last())?;
        if let Some(mirostat) = self.params.extra.mirostat.filter(|_| !self.params.is_greedy()) {
            self.surprise_limit.update(mirostat, drawn.probability);
        }
        Some(drawn.id)
    }

    /// The tokens that may be drawn, with probabilities that sum to 1; sorted by probability where top-k or
    /// top-p cuts.
    pub fn distribution(&mut self, logits: &[f32]) -> Result<&[Candidate], SampleError> {
        self.fill_candidates(logits, None)?;
        Ok(&self.candidates)
    }

    /// Fills `candidates` with what may be drawn.
    fn fill_candidates(&mut self, logits: &[f32], grammar: Option<&Grammar>) -> Result<(), SampleError> {
        if logits.len() != self.vocab {
            return Err(SampleError::Length { expected: self.vocab, found: logits.len() });
        }
        let changes = self.changes.applies_after(self.sampled_count) || grammar.is_some();
        let logits = if self.history.is_empty() && self.dry_penalty.is_empty() && !changes {
            logits
        } else {
            self.changed_logits.clear();
            self.changed_logits.extend_from_slice(logits);
            self.changes.apply(self.sampled_count, &mut self.changed_logits);
            self.history.penalize(&self.params, &mut self.changed_logits);
            self.dry_penalty.penalize(&self.params.extra.dry, &mut self.changed_logits);
            if let Some(grammar) = grammar {
                grammar.restrict(&mut self.changed_logits);
            }
            self.changed_logits.as_slice()
        };
        self.candidates.clear();
        let nothing = match grammar {
            None => SampleError::NoFiniteLogit { vocab: self.vocab },
            Some(_) => SampleError::NothingAllowed,
        };
        let best = scan::find_best(logits).ok_or(nothing)?;
        if self.params.is_greedy() {
            self.candidates.push(Candidate { probability: 1.0, ..best });
        } else if self.params.extra.cuts() {
            extra_cuts::cut_with_extras(
                &self.params,
                logits,
                best,
                self.surprise_limit,
                &mut self.rng,
                &mut self.candidates,
            );
        } else {
            cut_candidates(&self.params, logits, best, &mut self.candidates);
        }
        Ok(())
    }
}

/// `None` when top-k does not cut.
fn bounded_top_k(params: &SamplingParams, vocab: usize) -> Option<usize> {
    let k = params.top_k as usize;
    if k == 0 || k >= vocab { None } else { Some(k) }
}

/// Weights of tokens (the best one's is 1) that top-p is looked for among, until they have its mass.
const TOP_P_WEIGHTS: [f64; 4] = [1e-2, 1e-4, 1e-8, 0.0];

/// Fills `candidates` with the rest of the logits after temperature, top-k, top-p and min-p; `best` is the
/// most probable one.
fn cut_candidates(params: &SamplingParams, logits: &[f32], best: Candidate, candidates: &mut Vec<Candidate>) {
    let weigh = |candidates: &mut Vec<Candidate>| set_weights(params, best.logit, candidates);
    // A logit below all of at least that weight, if not by much.
    let below = |weight: f64| {
        let logit = f64::from(best.logit) + f64::from(params.temperature) * weight.ln();
        (logit as f32).next_down().max(f32::MIN)
    };
    if let Some(k) = bounded_top_k(params, logits.len()) {
        scan::find_top_k(logits, k, candidates);
        let total = weigh(candidates);
        if params.top_p < 1.0 {
            keep_nucleus(candidates, f64::from(params.top_p) * total);
        }
    } else if params.top_p < 1.0 {
        let mass = f64::from(params.top_p) * scan::sum_weights(logits, best.logit, params.temperature);
        // Few tokens have most of the mass; looking for them once more costs less than sorting them all.
        for weight in TOP_P_WEIGHTS {
            scan::candidates_above(logits, below(weight), candidates);
            if weigh(candidates) >= mass {
                break;
            }
        }
        keep_nucleus(candidates, mass);
    } else {
        scan::candidates_above(logits, below(f64::from(params.min_p)), candidates);
        weigh(candidates);
    }
    drop_unlikely(params, candidates);
}

/// The probability of a token relative to the best one, whose logit is `best`.
fn relative_weight(params: &SamplingParams, best: f32, logit: f32) -> f64 {
    (f64::from(logit - best) / f64::from(params.temperature)).exp()
}

/// Notes the weights of candidates; their sum.
fn set_weights(params: &SamplingParams, best: f32, candidates: &mut [Candidate]) -> f64 {
    candidates.iter_mut().for_each(|c| c.probability = relative_weight(params, best, c.logit));
    candidates.iter().map(|c| c.probability).sum()
}

/// Drops what min-p does not let through, and makes probabilities of the weights.
fn drop_unlikely(params: &SamplingParams, candidates: &mut Vec<Candidate>) {
    candidates.retain(|c| c.probability >= f64::from(params.min_p));
    let kept: f64 = candidates.iter().map(|c| c.probability).sum();
    candidates.iter_mut().for_each(|c| c.probability /= kept);
}

/// Keeps the shortest sorted prefix whose weights reach `mass`. Sorts in growing blocks: usually few are
/// needed.
fn keep_nucleus(candidates: &mut Vec<Candidate>, mass: f64) {
    let mut sum = 0.0;
    let (mut done, mut block) = (0, 128);
    while done < candidates.len() {
        let rest = &mut candidates[done..];
        let len = block.min(rest.len());
        if len < rest.len() {
            rest.select_nth_unstable_by(len - 1, compare_candidates);
        }
        rest[..len].sort_unstable_by(compare_candidates);
        for (index, candidate) in rest[..len].iter().enumerate() {
            sum += candidate.probability;
            if sum >= mass {
                candidates.truncate(done + index + 1);
                return;
            }
        }
        done += len;
        block *= 4;
    }
}

/// A seed from the operating system's random numbers, through the only door to them that std has.
fn random_seed() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
