//! A grammar on its way through one text.

use std::time::{Duration, Instant};

use llguidance::toktrie::SimpleVob;
use llguidance::{CancellationHandle, Matcher};

use super::{GrammarError, reason};
use crate::tokenizer::TokenId;

/// Time for one mask. Usual grammars take less than a hundredth of it.
const MOST_FOR_MASK: Duration = Duration::from_secs(2);
/// Time for all masks of a text.
const MOST_FOR_TEXT: Duration = Duration::from_secs(30);
/// A grammar that has taken so long for a mask is a slow one.
const SLOW: Duration = Duration::from_millis(20);

/// A compiled grammar with the text that it has seen. A copy goes its own way.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    /// Number of logits. The bit behind them is the end of the text.
    vocab: usize,
    /// The tokens that may come next, once they are known.
    mask: Option<SimpleVob>,
    /// The time of all masks so far, and whether one of them took long.
    spent: Duration,
    is_slow: bool,
}

/// The time that the next mask of a grammar may take.
#[derive(Debug)]
pub struct MaskLimits {
    end: Instant,
    cancel: Option<CancellationHandle>,
}

impl MaskLimits {
    /// Ends a mask that takes too long.
    pub fn enforce(&self, now: Instant) {
        if now >= self.end {
            self.cancel();
        }
    }

    /// Ends the mask, and the grammar with it.
    pub fn cancel(&self) {
        self.cancel.iter().for_each(CancellationHandle::cancel);
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammar({} tokens, {:?})", self.vocab, self.matcher.stop_reason())
    }
}

impl Grammar {
    pub(super) fn new(matcher: Matcher, vocab: usize) -> Self {
        let matcher = matcher.into_cancellable();
        Grammar { matcher, vocab, mask: None, spent: Duration::ZERO, is_slow: false }
    }

    /// A copy that shares no tables with this one, so that it can be used at the same time without waiting.
    pub fn separate(&self) -> Self {
        Grammar { matcher: self.matcher.deep_clone(), mask: self.mask.clone(), ..*self }
    }

    /// The limits of a mask that begins now.
    pub fn limits(&self) -> MaskLimits {
        let left = MOST_FOR_TEXT.saturating_sub(self.spent).min(MOST_FOR_MASK);
        MaskLimits { end: Instant::now() + left, cancel: self.matcher.cancellation_handle() }
    }

    /// Tells if its masks take long.
    pub fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Tells if it is known which tokens may come next.
    pub fn is_prepared(&self) -> bool {
        self.mask.is_some()
    }

    /// Number of logits of the model that it is for.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Computes which tokens may come next, if that is not known yet; this takes most of the time of a
    /// grammar. The tokens `ends`, always the same, may come where the text may end, and nowhere else.
    pub fn prepare(&mut self, ends: &[TokenId]) -> Result<(), GrammarError> {
        if self.mask.is_some() {
            return Ok(());
        }
        let begin = Instant::now();
        let mask = self.matcher.compute_mask();
        let took = begin.elapsed();
        self.spent += took;
        self.is_slow |= took >= SLOW;
        let mut mask = mask.map_err(|error| match self.matcher.is_cancelled() {
            true => {
                GrammarError::SlowMask { seconds: MOST_FOR_MASK.as_secs(), text: MOST_FOR_TEXT.as_secs() }
            }
            false => GrammarError::Step { reason: reason(error) },
        })?;
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

    /// True if nothing may follow any more.
    pub fn is_finished(&self) -> bool {
        self.matcher.is_stopped() && self.matcher.stop_reason().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::{GrammarFactory, GrammarSpec};
    use crate::tokenizer::{Tokenizer, TokenizerKind};

    fn digits() -> Grammar {
        let bytes = (0..=255u8).map(|byte| format!("{} b'\\x{byte:02x}' 1\n", usize::from(byte) + 1));
        let file: String = bytes.collect();
        let tokenizer = Tokenizer::from_bytes(TokenizerKind::RwkvWorld, file.as_bytes()).unwrap();
        let factory = GrammarFactory::new(&tokenizer, 257).unwrap();
        factory.compile(&GrammarSpec::Regex("[0-9]+".into())).unwrap()
    }

    #[test]
    fn a_mask_that_takes_too_long_ends_its_grammar_alone() {
        let (mut slow, mut other) = (digits(), digits());
        let mut copy = slow.clone();
        let limits = slow.limits();
        limits.enforce(Instant::now());
        slow.prepare(&[]).unwrap();
        slow.accept(i32::from(b'1') + 1).unwrap();
        limits.enforce(Instant::now() + MOST_FOR_MASK);
        let error = slow.prepare(&[]).unwrap_err();
        assert!(matches!(error, GrammarError::SlowMask { .. }), "{error}");
        // It says so again where a token is to be chosen.
        assert_eq!(slow.prepare(&[]).unwrap_err(), error);
        copy.prepare(&[]).unwrap();
        other.prepare(&[]).unwrap();
    }

    #[test]
    fn the_time_of_all_masks_is_bounded() {
        let mut grammar = digits();
        grammar.spent = MOST_FOR_TEXT - Duration::from_millis(1);
        let limits = grammar.limits();
        limits.enforce(Instant::now() + Duration::from_millis(1));
        assert!(grammar.prepare(&[]).is_err());
    }
}
