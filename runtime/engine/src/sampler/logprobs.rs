//! Probabilities of tokens in the model's own distribution: the softmax of its logits, before penalties,
//! temperature and cuts.

use mlcc_text::TokenId;

use super::{Candidate, scan};

/// A token and the natural logarithm of its probability; minus infinity for one that the model rules out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    pub id: TokenId,
    pub logprob: f32,
}

/// One position of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    pub token: TokenLogprob,
    /// The most probable tokens, sorted.
    pub top: Vec<TokenLogprob>,
}

/// The logarithm of the probability of `token` after these logits, and those of the `top` most probable ones.
/// The error is at most 2e-6. `None` if no logit is a number or the token has none.
pub fn compute_logprobs(logits: &[f32], token: TokenId, top: usize) -> Option<Logprobs> {
    let best = scan::find_best(logits)?;
    let total = scan::sum_weights(logits, best.logit, 1.0).ln();
    let of = |id: TokenId, logit: f32| {
        let logprob = (f64::from(logit) - f64::from(best.logit) - total) as f32;
        TokenLogprob { id, logprob: logprob.min(0.0) }
    };
    let logit = *logits.get(usize::try_from(token).ok()?)?;
    let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) };
    let mut likeliest: Vec<Candidate> = Vec::new();
    if top > 0 {
        scan::find_top_k(logits, top, &mut likeliest);
    }
    let top = likeliest.iter().map(|c| of(c.id, c.logit)).collect();
    Some(Logprobs { token: of(token, logit), top })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(logits: &[f32], id: usize) -> f64 {
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - best).exp()).sum();
        f64::from(logits[id] - best) - sum.ln()
    }

    #[test]
    fn they_are_those_of_the_softmax() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1013) as f32 / 40.0 - 11.0).collect();
        let found = compute_logprobs(&logits, 17, 5).unwrap();
        assert!((f64::from(found.token.logprob) - exact(&logits, 17)).abs() < 2e-5, "{found:?}");
        let mut sorted: Vec<usize> = (0..1000).collect();
        sorted.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let ids: Vec<usize> = found.top.iter().map(|t| t.id as usize).collect();
        assert_eq!(ids, sorted[..5]);
        for t in &found.top {
            assert!((f64::from(t.logprob) - exact(&logits, t.id as usize)).abs() < 2e-5, "{t:?}");
        }
    }

    #[test]
    fn what_is_no_number_has_no_chance() {
        let found = compute_logprobs(&[f32::NAN, 1.0, f32::NEG_INFINITY], 0, 20).unwrap();
        assert_eq!(found.token.logprob, f32::NEG_INFINITY);
        assert_eq!(found.top, [TokenLogprob { id: 1, logprob: 0.0 }]);
        assert_eq!(compute_logprobs(&[f32::NAN], 0, 1), None);
        assert_eq!(compute_logprobs(&[1.0], 1, 1), None);
        assert_eq!(compute_logprobs(&[f32::INFINITY, 0.0], 0, 1).unwrap().token.logprob, 0.0);
    }
}
