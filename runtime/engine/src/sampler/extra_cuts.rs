//! Cuts that few ask for: typical, XTC, Mirostat 2. They look at all candidates, so that nothing is saved
//! where one of them is on.

use super::extra::{ExtraSamplers, MirostatParams};
use super::{
    Candidate, Pcg64, SamplingParams, bounded_top_k, compare_candidates, keep_nucleus, scan, set_weights,
};

/// The surprise up to which Mirostat lets tokens through, in bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct SurpriseLimit(f64);

impl SurpriseLimit {
    pub fn new(extra: &ExtraSamplers) -> SurpriseLimit {
        // The start value: as if the text so far had had the target surprise.
        SurpriseLimit(extra.mirostat.map_or(0.0, |mirostat| 2.0 * f64::from(mirostat.tau)))
    }

    /// A token of this probability was drawn.
    pub fn update(&mut self, mirostat: MirostatParams, probability: f64) {
        let error = -probability.log2() - f64::from(mirostat.tau);
        self.0 -= f64::from(mirostat.eta) * error;
    }
}

/// Fills `candidates` with the rest of the logits; `best` is the most probable one. Takes a random number for
/// XTC, if that is on.
pub(super) fn cut_with_extras(
    params: &SamplingParams,
    logits: &[f32],
    best: Candidate,
    limit: SurpriseLimit,
    rng: &mut Pcg64,
    candidates: &mut Vec<Candidate>,
) {
    let extra = &params.extra;
    if extra.mirostat.is_some() {
        scan::candidates_above(logits, f32::MIN, candidates);
        set_weights(params, best.logit, candidates);
        let total = normalize(candidates);
        debug_assert!(total > 0.0);
        candidates.sort_unstable_by(compare_candidates);
        let passes = |c: &Candidate| -c.probability.log2() <= limit.0;
        candidates.truncate(candidates.partition_point(passes).max(1));
        normalize(candidates);
        return;
    }
    match bounded_top_k(params, logits.len()) {
        Some(k) => scan::find_top_k(logits, k, candidates),
        None => scan::candidates_above(logits, f32::MIN, candidates),
    }
    set_weights(params, best.logit, candidates);
    normalize(candidates);
    if extra.typical_p < 1.0 {
        keep_typical(candidates, f64::from(extra.typical_p));
    }
    candidates.sort_unstable_by(compare_candidates);
    if params.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|c| c.probability).sum();
        keep_nucleus(candidates, f64::from(params.top_p) * total);
    }
    let most = candidates.first().map_or(0.0, |first| first.probability);
    candidates.retain(|c| c.probability >= f64::from(params.min_p) * most);
    normalize(candidates);
    if extra.takes_likeliest() {
        // One number per token, whether it is needed or not.
        let chance = rng.next_f64();
        if chance < f64::from(extra.xtc_probability) {
            exclude_top_choices(candidates, f64::from(extra.xtc_threshold));
            normalize(candidates);
        }
    }
}

/// Makes the probabilities sum to 1; what they summed to.
fn normalize(candidates: &mut [Candidate]) -> f64 {
    let total: f64 = candidates.iter().map(|c| c.probability).sum();
    candidates.iter_mut().for_each(|c| c.probability /= total);
    total
}

/// Keeps those whose surprise is nearest to the expected one, until they have a share `p`.
fn keep_typical(candidates: &mut Vec<Candidate>, p: f64) {
    let surprise = |c: &Candidate| if c.probability > 0.0 { -c.probability.ln() } else { f64::MAX };
    let parts = candidates.iter().filter(|c| c.probability > 0.0).map(|c| c.probability * surprise(c));
    let expected: f64 = parts.sum();
    let distance = |c: &Candidate| (surprise(c) - expected).abs();
    candidates.sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then(compare_candidates(a, b)));
    let mut sum = 0.0;
    let last = candidates.iter().position(|c| {
        sum += c.probability;
        sum > p
    });
    if let Some(last) = last {
        candidates.truncate(last + 1);
    }
}

/// Removes the sorted candidates that reach the threshold, except the last one.
fn exclude_top_choices(candidates: &mut Vec<Candidate>, threshold: f64) {
    let reach = candidates.partition_point(|c| c.probability >= threshold);
    if reach > 1 {
        candidates.drain(..reach - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;

    /// Half, a quarter, an eighth, an eighth.
    fn logits() -> [f32; 4] {
        [0.5f32, 0.25, 0.125, 0.125].map(f32::ln)
    }

    fn params(extra: ExtraSamplers) -> SamplingParams {
        let off = SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..SamplingParams::default()
        };
        SamplingParams { seed: Some(7), extra, ..off }
    }

    fn left(params: SamplingParams) -> Vec<(TokenId, f64)> {
        let mut sampler = Sampler::new(params, 4).unwrap();
        let found = sampler.distribution(&logits()).unwrap();
        found.iter().map(|c| (c.id, (c.probability * 1e6).round() / 1e6)).collect()
    }

    #[test]
    fn typical_tokens_are_as_surprising_as_is_expected() {
        // The entropy is 1.75 bits: the second token (2 bits) is nearest, then the first (1 bit), then the
        // others (3 bits).
        let typical = |typical_p| left(params(ExtraSamplers { typical_p, ..ExtraSamplers::default() }));
        assert_eq!(typical(0.2), [(1, 1.0)]);
        assert_eq!(typical(0.7), [(0, 0.666667), (1, 0.333333)]);
        assert_eq!(typical(0.8), [(0, 0.571429), (1, 0.285714), (2, 0.142857)]);
        assert_eq!(typical(0.9999), [(0, 0.5), (1, 0.25), (2, 0.125), (3, 0.125)]);
        // The other cuts see what it has left.
        let min_p = params(ExtraSamplers { typical_p: 0.8, ..ExtraSamplers::default() });
        assert_eq!(left(SamplingParams { min_p: 0.4, ..min_p.clone() }), [(0, 0.666667), (1, 0.333333)]);
        assert_eq!(left(SamplingParams { top_k: 2, ..min_p }), [(0, 0.666667), (1, 0.333333)]);
    }

    #[test]
    fn xtc_leaves_out_all_likely_tokens_but_one() {
        let xtc = |xtc_probability, xtc_threshold| {
            left(params(ExtraSamplers { xtc_probability, xtc_threshold, ..ExtraSamplers::default() }))
        };
        let all = [(0, 0.5), (1, 0.25), (2, 0.125), (3, 0.125)];
        assert_eq!(xtc(1.0, 0.2), [(1, 0.5), (2, 0.25), (3, 0.25)]);
        assert_eq!(xtc(1.0, 0.1), [(3, 1.0)]);
        assert_eq!(xtc(1.0, 0.4), all);
        assert_eq!(xtc(1.0, 0.6), all);
        // Now and then.
        let often = ExtraSamplers { xtc_probability: 0.5, xtc_threshold: 0.2, ..ExtraSamplers::default() };
        let mut sampler = Sampler::new(params(often), 4).unwrap();
        let without = (0..1000).filter(|_| sampler.distribution(&logits()).unwrap().len() == 3).count();
        assert!((430..570).contains(&without), "{without}");
    }

    #[test]
    fn mirostat_keeps_the_surprise_where_it_is_wanted() {
        let logits: Vec<f32> = (1..=1000).map(|rank| -(rank as f32).ln()).collect();
        for tau in [2.0f32, 4.0] {
            let mirostat = Some(MirostatParams { tau, eta: 0.1 });
            // Other cuts have no say.
            let params = SamplingParams {
                top_k: 1000,
                min_p: 0.9,
                ..params(ExtraSamplers { mirostat, ..ExtraSamplers::default() })
            };
            let mut sampler = Sampler::new(params, 1000).unwrap();
            let mut sum = 0.0;
            for _ in 0..2000 {
                let token = sampler.sample(&logits).unwrap();
                sum -= sampler.candidates.iter().find(|c| c.id == token).unwrap().probability.log2();
            }
            let mean = sum / 2000.0;
            assert!((mean - f64::from(tau)).abs() < 0.1, "{mean} bits in place of {tau}");
        }
        // The first cut is at twice the target surprise; the tokens have 1, 2, 3 and 3 bits.
        let first = |tau| {
            left(params(ExtraSamplers {
                mirostat: Some(MirostatParams { tau, eta: 0.1 }),
                ..ExtraSamplers::default()
            }))
        };
        assert_eq!(first(0.6), [(0, 1.0)]);
        assert_eq!(first(1.1), [(0, 0.666667), (1, 0.333333)]);
        assert_eq!(first(0.1), [(0, 1.0)]);
    }

    #[test]
    fn repeats_are_penalized_before_the_cuts() {
        let dry = DryParams { multiplier: 1e3, ..ExtraSamplers::default().dry };
        let params = params(ExtraSamplers { dry, ..ExtraSamplers::default() });
        let mut sampler = Sampler::new(SamplingParams { temperature: 0.0, ..params }, 4).unwrap();
        [1, 2, 0, 1, 2].into_iter().for_each(|token| sampler.accept(token));
        assert_eq!(sampler.sample(&logits()), Ok(1));
        sampler.reset();
        assert_eq!(sampler.sample(&logits()), Ok(0));
    }

    #[test]
    fn they_are_checked() {
        let base = ExtraSamplers::default;
        let dry = |dry| ExtraSamplers { dry, ..base() };
        for (extra, name) in [
            (ExtraSamplers { typical_p: 0.0, ..base() }, "typical_p"),
            (ExtraSamplers { xtc_probability: 1.5, ..base() }, "xtc_probability"),
            (ExtraSamplers { xtc_threshold: f32::NAN, ..base() }, "xtc_threshold"),
            (dry(DryParams { multiplier: -1.0, ..base().dry }), "dry_multiplier"),
            (dry(DryParams { base: 0.5, ..base().dry }), "dry_base"),
            (dry(DryParams { last_n: -2, ..base().dry }), "dry_penalty_last_n"),
            (
                ExtraSamplers { mirostat: Some(MirostatParams { tau: 0.0, eta: 0.1 }), ..base() },
                "mirostat_tau",
            ),
        ] {
            assert_eq!(params(extra).check().unwrap_err().name, name);
        }
    }
}
