//! A grammar on its way through one text.

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use super::{GrammarError, reason};
use crate::tokenizer::TokenId;

/// A compiled grammar with the text that it has seen. A copy goes its own way.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    /// Number of logits. The bit behind them stands for the end of the text.
    vocab: usize,
    /// The tokens that may come next, once they are known.
    mask: Option<SimpleVob>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammar({} tokens, {:?})", self.vocab, self.matcher.stop_reason())
    }
}

impl Grammar {
    pub(super) fn new(matcher: Matcher, vocab: usize) -> Self {
        Grammar { matcher, vocab, mask: None }
    }

    /// A copy that shares no tables with this one, so that it can be used at the same time without waiting.
    pub(super) fn separate(&self) -> Self {
        Grammar { matcher: self.matcher.deep_clone(), vocab: self.vocab, mask: self.mask.clone() }
    }

    /// Number of logits of the model that it is for.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Computes which tokens may come next, if that is not known yet; this takes most of the time of a grammar. The tokens `ends`,
    /// always the same, may come where the text may end, and nowhere else.
    pub fn prepare(&mut self, ends: &[TokenId]) -> Result<(), GrammarError> {
        if self.mask.is_some() {
            return Ok(());
        }
        let mut mask = self.matcher.compute_mask().map_err(|e| GrammarError::Step { reason: reason(e) })?;
        let may_end = mask.is_allowed(self.vocab as u32);
        let ends = ends.iter().filter_map(|&id| usize::try_from(id).ok());
        ends.filter(|&id| id < self.vocab).for_each(|id| mask.set(id, may_end));
        self.mask = Some(mask);
        Ok(())
    }

    /// Takes every chance from the tokens that may not come next: from all, if that is not prepared.
    pub fn restrict(&self, logits: &mut [f32]) {
        let Some(mask) = self.mask.as_ref().filter(|_| logits.len() == self.vocab) else {
            return logits.fill(f32::NEG_INFINITY);
        };
        for (word, logits) in mask.as_slice().iter().zip(logits.chunks_mut(u32::BITS as usize)) {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// Takes a token that was chosen.
    pub fn accept(&mut self, token: TokenId) -> Result<(), GrammarError> {
        self.mask = None;
        let id = u32::try_from(token).map_err(|_| GrammarError::Step { reason: format!("token {token}") })?;
        self.matcher.consume_token(id).map_err(|e| GrammarError::Step { reason: reason(e) })
    }

    /// Whether nothing may follow any more.
    pub fn is_finished(&self) -> bool {
        self.matcher.is_stopped() && self.matcher.stop_reason().is_ok()
    }
}
