//! A model for tests of the engine: its logits are a hash of all tokens before, so that one wrong, missing or
//! repeated token makes another text.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use mlcc_engine::serving::{ModelLimits, ModelRunner, OutputRows, SequenceInput, TextAdapter};
use mlcc_engine::{LanguageModel, RewindModel};
use mlcc_text::TokenId;

/// All bytes as ids from 1 on, as in an RWKV World vocabulary, and the end of the text.
pub const VOCAB: usize = 258;
pub const CHUNK: usize = 8;
/// The step that gets this token panics.
pub const PANICS: TokenId = 255;
/// The step that gets this token fails.
pub const FAILS: TokenId = 254;

#[derive(Debug, thiserror::Error)]
pub enum ToyError {
    #[error("token {FAILS} is refused")]
    Token,
    #[error("a recurrent state cannot roll back")]
    Truncate,
    #[error("the copy is refused")]
    Copy,
    #[error("the file is refused")]
    File,
}

#[derive(Clone)]
pub struct ToySequence {
    recurrent: bool,
    window: Option<usize>,
    /// Tokens that a window has dropped.
    dropped: usize,
    context: Option<usize>,
    fed: Vec<TokenId>,
    logits: Vec<f32>,
    /// Rows of the last call of `verify_drafts`.
    rows: Vec<f32>,
    read: Arc<AtomicUsize>,
    held: PoolShare,
    /// The change by its adapter.
    salt: u64,
    script: ToyScript,
    /// Tokens before those that it writes, once that is known.
    begun: Option<usize>,
}

/// The text of every answer, unless it is empty: its tokens are by far the most probable ones, and then the
/// end is.
type ToyScript = Arc<Mutex<Vec<TokenId>>>;

/// Memory for tokens of all sequences.
#[derive(Clone)]
struct ToyPool {
    /// Most tokens that there may be.
    most: usize,
    used: Arc<AtomicUsize>,
}

/// The part of the pool that a sequence has.
struct PoolShare {
    pool: ToyPool,
    tokens: usize,
}

impl PoolShare {
    fn set(&mut self, tokens: usize) {
        self.pool.used.fetch_add(tokens, Ordering::Relaxed);
        self.pool.used.fetch_sub(std::mem::replace(&mut self.tokens, tokens), Ordering::Relaxed);
    }
}

impl Clone for PoolShare {
    fn clone(&self) -> Self {
        let mut held = PoolShare { pool: self.pool.clone(), tokens: 0 };
        held.set(self.tokens);
        held
    }
}

impl Drop for PoolShare {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl ToySequence {
    fn feed(&mut self, tokens: &[TokenId]) -> Result<(), ToyError> {
        assert!(!tokens.is_empty() && tokens.len() <= CHUNK, "{} tokens in a call", tokens.len());
        if self.held.tokens < self.fed.len() + tokens.len() {
            self.held.set(self.fed.len() + tokens.len());
        }
        if let Some(window) = self.window
            && self.fed.len() - self.dropped + tokens.len() > 2 * window
        {
            self.dropped = self.fed.len() - window;
        }
        for &token in tokens {
            assert_ne!(token, PANICS, "the toy was told to panic");
            if token == FAILS {
                return Err(ToyError::Token);
            }
            self.fed.push(token);
        }
        assert!(self.context.is_none_or(|context| self.fed.len() <= context), "the context is full");
        self.read.fetch_add(tokens.len(), Ordering::Relaxed);
        logits(self.salt, &self.fed, &mut self.logits);
        if let Some(written) = self.begun.map(|begun| self.fed.len().saturating_sub(begun)) {
            let script = self.script.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let next = script.get(written).copied().unwrap_or(0);
            if !script.is_empty() {
                self.logits[next as usize] = 100.0;
            }
        }
        Ok(())
    }

    /// Notes that the logits behind `tokens` tokens are requested.
    fn writes_behind(&mut self, tokens: usize) {
        self.begun.get_or_insert(tokens);
    }

    /// The sequence with an adapter of the toy's, which is a number.
    pub fn adapted(mut self, adapter: Option<&TextAdapter>) -> Self {
        self.adapt(adapter);
        self
    }

    /// Sets the adapter of a sequence that keeps its memory.
    fn adapt(&mut self, adapter: Option<&TextAdapter>) {
        assert!(self.fed.is_empty(), "an adapter is chosen before there are tokens");
        let number = |adapter: &TextAdapter| {
            let shared = adapter.handle::<Arc<u64>>().map(|number| **number);
            shared.or(adapter.handle().copied()).expect("a number")
        };
        self.salt = adapter.map_or(0, number);
    }
}

/// Probable letters, some other bytes, now and then the end.
fn logits(salt: u64, fed: &[TokenId], out: &mut [f32]) {
    let mix = |hash: u64, value: u64| (hash ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let state = fed.iter().fold(7 + salt, |hash, &token| mix(hash, token as u64));
    let logit = |id: usize| {
        let noise = (mix(state, id as u64) >> 40) as f32 / (1 << 24) as f32 * 8.0;
        let letter = id.checked_sub(1).is_some_and(|byte| (97..107).contains(&byte));
        // Nothing is chosen that the steps of the tests do not survive.
        if id as TokenId >= FAILS { f32::NEG_INFINITY } else { noise + if letter { 4.0 } else { 0.0 } }
    };
    out.iter_mut().enumerate().for_each(|(id, out)| *out = logit(id));
}

impl LanguageModel for ToySequence {
    type Error = ToyError;

    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], ToyError> {
        self.feed(tokens)?;
        Ok(&self.logits)
    }

    fn decode(&mut self, token: TokenId) -> Result<&[f32], ToyError> {
        self.feed(&[token])?;
        Ok(&self.logits)
    }

    fn reset(&mut self) -> Result<(), ToyError> {
        self.begun = None;
        self.fed.clear();
        self.dropped = 0;
        self.held.set(0);
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

    fn prefill_chunk(&self) -> usize {
        CHUNK
    }

    fn verify_drafts(&mut self, tokens: &[TokenId]) -> Result<&[f32], ToyError> {
        if self.recurrent {
            return self.decode(tokens[0]);
        }
        self.rows.clear();
        for &token in tokens {
            self.feed(&[token])?;
            self.rows.extend_from_slice(&self.logits);
        }
        Ok(&self.rows)
    }

    fn rollback(&mut self, past: usize) -> Result<(), ToyError> {
        if past < self.fed.len() { self.truncate(past) } else { Ok(()) }
    }
}

impl RewindModel for ToySequence {
    type Snapshot = Vec<TokenId>;

    fn can_truncate(&self) -> bool {
        !self.recurrent
    }

    fn can_truncate_to(&self, past: usize) -> bool {
        let has_window =
            self.dropped == 0 || self.window.is_some_and(|window| past + 1 >= self.dropped + window);
        past == 0 || past == self.fed.len() || past < self.fed.len() && !self.recurrent && has_window
    }

    fn truncate(&mut self, past: usize) -> Result<(), ToyError> {
        if !self.can_truncate_to(past) {
            return Err(ToyError::Truncate);
        }
        self.begun = None;
        self.fed.truncate(past);
        self.dropped = self.dropped.min(past);
        self.held.set(past);
        self.logits.fill(0.0);
        Ok(())
    }

    fn snapshot(&self) -> Result<Vec<TokenId>, ToyError> {
        Ok(self.fed.clone())
    }

    fn restore(&mut self, snapshot: &Vec<TokenId>) -> Result<(), ToyError> {
        self.begun = None;
        self.fed.clone_from(snapshot);
        self.dropped = self.window.map_or(0, |window| self.fed.len().saturating_sub(window));
        self.held.set(self.fed.len());
        self.logits.fill(0.0);
        Ok(())
    }
}

/// Makes sequences; counts the tokens that they compute.
#[derive(Clone)]
pub struct ToyModel {
    pub recurrent: bool,
    /// The number of newest tokens that it needs to go back.
    pub window: Option<usize>,
    pub context: Option<usize>,
    pub read: Arc<AtomicUsize>,
    pool: ToyPool,
    /// The output rows of the last step.
    rows: Vec<f32>,
    /// Most sequences that a step has had.
    pub together: Arc<AtomicUsize>,
    /// True if sequences can be copied.
    pub copies: Arc<AtomicBool>,
    /// True if work is dealt out to threads, whose begin allocates.
    pub threads: bool,
    /// The most that was dealt out together.
    pub dealt: Arc<AtomicUsize>,
    /// The text from now on of requests that share no begin with others; empty: the hash decides.
    pub script: ToyScript,
}

impl ToyModel {
    pub fn new(recurrent: bool, context: Option<usize>) -> Self {
        let pool = ToyPool { most: usize::MAX, used: Arc::default() };
        ToyModel {
            recurrent,
            window: None,
            context,
            read: Arc::default(),
            pool,
            rows: Vec::new(),
            together: Arc::default(),
            copies: Arc::new(AtomicBool::new(true)),
            threads: true,
            dealt: Arc::default(),
            script: Arc::default(),
        }
    }

    /// A model that drops all but the newest `window` tokens, now and then.
    pub fn with_window(self, window: usize) -> Self {
        ToyModel { window: Some(window), ..self }
    }

    /// A model with memory for `tokens` tokens of all sequences together.
    pub fn with_memory(self, tokens: usize) -> Self {
        ToyModel { pool: ToyPool { most: tokens, used: Arc::default() }, ..self }
    }

    /// Tokens for which memory is in use.
    pub fn used(&self) -> usize {
        self.pool.used.load(Ordering::Relaxed)
    }

    pub fn one(&self) -> ToySequence {
        let ToyModel { recurrent, window, context, read, pool, script, .. } = self.clone();
        let held = PoolShare { pool, tokens: 0 };
        ToySequence {
            recurrent,
            window,
            dropped: 0,
            context,
            fed: Vec::with_capacity(256),
            logits: vec![0.0; VOCAB],
            rows: Vec::new(),
            read,
            held,
            salt: 0,
            script,
            begun: None,
        }
    }
}

impl ModelRunner for ToyModel {
    type Sequence = ToySequence;

    fn limits(&self) -> ModelLimits {
        ModelLimits {
            vocab: VOCAB,
            context: self.context,
            prompt: None,
            chunk: CHUNK,
            step_tokens: 2 * CHUNK,
            rolls_back_drafts: !self.recurrent && self.window.is_none(),
            truncates: !self.recurrent && self.window.is_none(),
            adapters: true,
            decoder_start: None,
        }
    }

    fn new_sequence(&self) -> Result<ToySequence, ToyError> {
        Ok(self.one())
    }

    fn set_adapter(&self, sequence: &mut ToySequence, adapter: Option<&TextAdapter>) -> Result<(), ToyError> {
        sequence.adapt(adapter);
        Ok(())
    }

    fn fork(&self, sequence: &ToySequence) -> Result<ToySequence, ToyError> {
        let copies = self.copies.load(Ordering::Relaxed);
        copies.then(|| sequence.clone()).ok_or(ToyError::Copy)
    }

    fn reserve(&mut self, sequence: &mut ToySequence, tokens: usize) -> Result<bool, ToyError> {
        let wanted = sequence.fed.len() + tokens;
        let others = self.used() - sequence.held.tokens;
        if others + wanted <= self.pool.most {
            sequence.held.set(wanted.max(sequence.held.tokens));
            return Ok(true);
        }
        Ok(false)
    }

    fn identity(&self) -> Option<u128> {
        Some(self.recurrent.into())
    }

    fn save_state(&self, sequence: &ToySequence) -> Result<Vec<u8>, ToyError> {
        Ok(sequence.fed.iter().map(|&token| token as u8).collect())
    }

    fn load_state(&self, sequence: &mut ToySequence, path: &Path) -> Result<(), ToyError> {
        let bytes = std::fs::read(path).map_err(|_| ToyError::File)?;
        sequence.restore(&bytes.into_iter().map(TokenId::from).collect())
    }

    /// On separate threads, the last first.
    fn parallel_for(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.dealt.fetch_max(count, Ordering::Relaxed);
        if !self.threads {
            return (0..count).for_each(work);
        }
        let (early, late) = (0..count / 2, count / 2..count);
        std::thread::scope(|scope| {
            if !early.is_empty() {
                scope.spawn(|| early.for_each(work));
            }
            late.rev().for_each(work);
        });
    }

    fn step(&mut self, feeds: &mut [SequenceInput<'_, ToySequence>]) -> Result<(), ToyError> {
        assert!(!feeds.is_empty());
        self.together.fetch_max(feeds.len(), Ordering::Relaxed);
        self.rows.clear();
        for feed in feeds {
            let SequenceInput { sequence, tokens, outputs: want } = feed;
            let reserved = sequence.held.tokens >= sequence.fed.len() + tokens.len();
            assert!(
                reserved || self.pool.most == usize::MAX,
                "memory for {} tokens was not reserved",
                tokens.len()
            );
            if *want != OutputRows::Nothing {
                sequence.writes_behind(sequence.fed.len() + tokens.len());
            }
            if *want == OutputRows::All {
                for &token in *tokens {
                    sequence.feed(&[token])?;
                    self.rows.extend_from_slice(&sequence.logits);
                }
                continue;
            }
            sequence.feed(tokens)?;
            if *want == OutputRows::Last {
                self.rows.extend_from_slice(&sequence.logits);
            }
        }
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        &self.rows
    }
}
