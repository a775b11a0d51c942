//! Changes that a request makes to the model's logits before anything else looks at them.

use mlcc_text::TokenId;

use super::ParamError;

/// Changes of logits. The default changes nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogitChanges {
    /// Added to the logit of a token; minus infinity bans it.
    pub bias: Vec<(TokenId, f32)>,
    /// Tokens that are not chosen before `min_tokens` others were: those that end the text.
    pub banned_until_min: Vec<TokenId>,
    pub min_tokens: usize,
}

impl LogitChanges {
    pub(super) fn validate(&self, vocab: usize) -> Result<(), ParamError> {
        let inside = |id: TokenId| usize::try_from(id).is_ok_and(|id| id < vocab);
        for &(id, bias) in &self.bias {
            if !inside(id) {
                let expected = "token ids below the model's number of logits";
                return Err(ParamError { name: "logit_bias", found: format!("for token {id}"), expected });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                let expected = "finite numbers (-100 or less excludes a token)";
                return Err(ParamError { name: "logit_bias", found: bias.to_string(), expected });
            }
        }
        Ok(())
    }

    /// True if anything changes when `chosen` tokens have been sampled before.
    pub(super) fn applies_after(&self, chosen: usize) -> bool {
        !self.bias.is_empty() || self.bans_eos(chosen)
    }

    pub(super) fn apply(&self, chosen: usize, logits: &mut [f32]) {
        for &(id, bias) in &self.bias {
            logits[id as usize] += bias;
        }
        if self.bans_eos(chosen) {
            let ids = self.banned_until_min.iter().filter_map(|&id| usize::try_from(id).ok());
            for id in ids {
                if let Some(logit) = logits.get_mut(id) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// True if no logit becomes larger.
    pub(super) fn only_lowers(&self) -> bool {
        self.bias.iter().all(|&(_, bias)| bias <= 0.0)
    }

    /// The logit of one token after [`LogitChanges::apply`].
    pub(super) fn changed_logit(&self, chosen: usize, token: TokenId, logit: f32) -> f32 {
        if self.bans_eos(chosen) && self.banned_until_min.contains(&token) {
            return f32::NEG_INFINITY;
        }
        self.bias.iter().filter(|&&(id, _)| id == token).fold(logit, |logit, &(_, bias)| logit + bias)
    }

    fn bans_eos(&self, chosen: usize) -> bool {
        chosen < self.min_tokens && !self.banned_until_min.is_empty()
    }
}
