//! A model for tests of the engine: its logits are a hash of all tokens before, so that one wrong, missing or repeated token
//! makes another text.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlcc_engine::serving::{Feed, Limits, Step};
use mlcc_engine::{LanguageModel, RewindModel, TokenId};

/// All bytes as ids from 1 on, as in an RWKV World vocabulary, and the end of the text.
pub const VOCAB: usize = 258;
pub const CHUNK: usize = 8;
/// The step that is fed this token panics.
pub const PANICS: TokenId = 255;
/// The step that is fed this token fails.
pub const FAILS: TokenId = 254;

#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("token {FAILS} is refused")]
    Token,
    #[error("a recurrent state cannot go back")]
    Truncate,
}

#[derive(Clone)]
pub struct ToySequence {
    recurrent: bool,
    context: Option<usize>,
    fed: Vec<TokenId>,
    logits: Vec<f32>,
    /// Of the last call of `score`.
    rows: Vec<f32>,
    read: Arc<AtomicUsize>,
}

impl ToySequence {
    fn feed(&mut self, tokens: &[TokenId]) -> Result<(), Refused> {
        assert!(!tokens.is_empty() && tokens.len() <= CHUNK, "{} tokens in a call", tokens.len());
        for &token in tokens {
            assert_ne!(token, PANICS, "the toy was told to panic");
            if token == FAILS {
                return Err(Refused::Token);
            }
            self.fed.push(token);
        }
        assert!(self.context.is_none_or(|context| self.fed.len() <= context), "the context is full");
        self.read.fetch_add(tokens.len(), Ordering::Relaxed);
        self.logits = logits(&self.fed);
        Ok(())
    }
}

/// Likely letters, some other bytes, now and then the end.
fn logits(fed: &[TokenId]) -> Vec<f32> {
    let mix = |hash: u64, value: u64| (hash ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let state = fed.iter().fold(7, |hash, &token| mix(hash, token as u64));
    let logit = |id: usize| {
        let noise = (mix(state, id as u64) >> 40) as f32 / (1 << 24) as f32 * 8.0;
        let letter = id.checked_sub(1).is_some_and(|byte| (97..107).contains(&byte));
        // Nothing is chosen that the steps of the tests do not survive.
        if id as TokenId >= FAILS { f32::NEG_INFINITY } else { noise + if letter { 4.0 } else { 0.0 } }
    };
    (0..VOCAB).map(logit).collect()
}

impl LanguageModel for ToySequence {
    type Error = Refused;

    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], Refused> {
        self.feed(tokens)?;
        Ok(&self.logits)
    }

    fn decode(&mut self, token: TokenId) -> Result<&[f32], Refused> {
        self.feed(&[token])?;
        Ok(&self.logits)
    }

    fn reset(&mut self) -> Result<(), Refused> {
        self.fed.clear();
        Ok(())
    }

    fn past(&self) -> usize {
        self.fed.len()
    }

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn context(&self) -> Option<usize> {
        self.context
    }

    fn chunk(&self) -> usize {
        CHUNK
    }
}

impl RewindModel for ToySequence {
    type Snapshot = Vec<TokenId>;

    fn can_truncate(&self) -> bool {
        !self.recurrent
    }

    fn can_truncate_to(&self, past: usize) -> bool {
        past == 0 || past == self.fed.len() || past < self.fed.len() && !self.recurrent
    }

    fn truncate(&mut self, past: usize) -> Result<(), Refused> {
        if !self.can_truncate_to(past) {
            return Err(Refused::Truncate);
        }
        self.fed.truncate(past);
        self.logits.fill(0.0);
        Ok(())
    }

    fn snapshot(&self) -> Result<Vec<TokenId>, Refused> {
        Ok(self.fed.clone())
    }

    fn restore(&mut self, snapshot: &Vec<TokenId>) -> Result<(), Refused> {
        self.fed = snapshot.clone();
        self.logits.fill(0.0);
        Ok(())
    }
}

/// Makes sequences; counts the tokens that they are fed.
#[derive(Clone)]
pub struct Toy {
    pub recurrent: bool,
    pub context: Option<usize>,
    pub read: Arc<AtomicUsize>,
}

impl Toy {
    pub fn new(recurrent: bool, context: Option<usize>) -> Self {
        Toy { recurrent, context, read: Arc::default() }
    }

    pub fn one(&self) -> ToySequence {
        let Toy { recurrent, context, read } = self.clone();
        ToySequence { recurrent, context, fed: Vec::new(), logits: vec![0.0; VOCAB], rows: Vec::new(), read }
    }
}

impl Step for Toy {
    type Sequence = ToySequence;

    fn limits(&self) -> Limits {
        Limits { vocab: VOCAB, context: self.context, prompt: None, chunk: CHUNK }
    }

    fn sequence(&self) -> Result<ToySequence, Refused> {
        Ok(self.one())
    }

    fn fork(&self, sequence: &ToySequence) -> Result<ToySequence, Refused> {
        Ok(sequence.clone())
    }

    fn step(&mut self, feeds: &mut [Feed<'_, ToySequence>]) -> Result<(), Refused> {
        assert!(!feeds.is_empty());
        feeds.iter_mut().try_for_each(|feed| feed.sequence.feed(feed.tokens))
    }

    fn logits<'a>(&self, sequence: &'a ToySequence) -> &'a [f32] {
        &sequence.logits
    }

    fn score<'a>(&mut self, sequence: &'a mut ToySequence, tokens: &[TokenId]) -> Result<&'a [f32], Refused> {
        sequence.rows.clear();
        for &token in tokens {
            sequence.feed(&[token])?;
            sequence.rows.extend_from_slice(&sequence.logits);
        }
        Ok(&sequence.rows)
    }
}
