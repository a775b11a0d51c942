//! Perplexity, and how far one model is from another.
//!
//! Protocol: the tokens are cut into windows of `context` tokens that begin `stride` tokens apart; a window
//! that the text does not fill is dropped. Each window runs on its own, from the empty state. Its first token
//! is context only; where windows overlap, a token is scored once, in the first window that contains it.
//! Perplexity is exp(sum of -ln p over all scored tokens / their number), with p from a log-softmax in f64.
//!
//! KL divergence is KL(reference || this), its mean over the scored positions; same-top-token is the share of
//! these positions where both models have the same most probable token (ties: the lowest id).

use thiserror::Error;

use mlcc_text::TokenId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalProtocol {
    pub context: usize,
    pub stride: usize,
}

impl Default for EvalProtocol {
    fn default() -> Self {
        EvalProtocol { context: 256, stride: 256 }
    }
}

#[derive(Debug, Error)]
pub enum EvalError {
    #[error(
        "--context is {context} and --stride is {stride}: expected a context of at least 2 and a stride from 1 to the context"
    )]
    Protocol { context: usize, stride: usize },
    #[error(
        "the text has {tokens} tokens, fewer than one window of {context}: give a longer text, or a smaller --context"
    )]
    TooShort { tokens: usize, context: usize },
    #[error(
        "token {position} of the text has id {id}, but the model's vocabulary has {vocab} entries: use the tokenizer of \
         this model"
    )]
    Token { position: usize, id: TokenId, vocab: usize },
    #[error(
        "{model} gave {found} logits for window {window}, expected {expected} (positions times vocabulary)"
    )]
    Shape { model: &'static str, window: usize, expected: usize, found: usize },
    #[error(
        "{model} gave no usable logits at position {position} of window {window} (NaN, or no finite value): look for NaN \
         or Inf in its weights with `mlcc verify`"
    )]
    NotFinite { model: &'static str, window: usize, position: usize },
    #[error("{model} failed in window {window}: {source}")]
    Model { model: &'static str, window: usize, source: Box<dyn std::error::Error + Send + Sync> },
}

/// One piece of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalWindow<'a> {
    pub index: usize,
    pub tokens: &'a [TokenId],
    /// The first position in the window that is scored.
    pub first_scored: usize,
}

/// The windows of a text, checked against the vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct EvalWindows<'a> {
    tokens: &'a [TokenId],
    protocol: EvalProtocol,
    vocab: usize,
}

impl<'a> EvalWindows<'a> {
    pub fn new(tokens: &'a [TokenId], protocol: EvalProtocol, vocab: usize) -> Result<Self, EvalError> {
        let EvalProtocol { context, stride } = protocol;
        if context < 2 || stride < 1 || stride > context {
            return Err(EvalError::Protocol { context, stride });
        }
        if tokens.len() < context {
            return Err(EvalError::TooShort { tokens: tokens.len(), context });
        }
        let strange = |id: &TokenId| usize::try_from(*id).map_or(true, |id| id >= vocab);
        if let Some(position) = tokens.iter().position(strange) {
            return Err(EvalError::Token { position, id: tokens[position], vocab });
        }
        Ok(EvalWindows { tokens, protocol, vocab })
    }

    /// The number of windows.
    pub fn count(&self) -> usize {
        (self.tokens.len() - self.protocol.context) / self.protocol.stride + 1
    }

    pub fn iter(&self) -> impl Iterator<Item = EvalWindow<'a>> + '_ {
        let EvalProtocol { context, stride } = self.protocol;
        (0..self.count()).map(move |index| EvalWindow {
            index,
            tokens: &self.tokens[index * stride..][..context],
            first_scored: if index == 0 { 1 } else { (context - stride).max(1) },
        })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Perplexity {
    /// Sum of -ln p.
    pub nll_sum: f64,
    pub tokens_scored: usize,
    pub windows: usize,
}

impl Perplexity {
    pub fn mean_nll(&self) -> f64 {
        self.nll_sum / self.tokens_scored as f64
    }

    pub fn perplexity(&self) -> f64 {
        self.mean_nll().exp()
    }

    fn add(&mut self, row: &LogitRow<'_>, target: TokenId) {
        self.nll_sum -= row.log_p(target as usize);
        self.tokens_scored += 1;
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelComparison {
    pub this: Perplexity,
    pub reference: Perplexity,
    /// Mean of KL(reference || this), in nats.
    pub kl_divergence: f64,
    /// The largest at any scored position.
    pub kl_max: f64,
    /// 0 to 1.
    pub same_top_token: f64,
}

/// A model that gives the logits at all positions of a window.
pub trait WindowModel {
    type Error: Into<Box<dyn std::error::Error + Send + Sync>>;

    /// Runs `tokens` from the empty state; row by row the logits after each of them.
    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], Self::Error>;
}

/// A closure as a [`WindowModel`].
pub fn from_fn<F, E>(run: F) -> FromFn<F>
where
    F: FnMut(&[TokenId]) -> Result<Vec<f32>, E>,
{
    FromFn { run, logits: Vec::new() }
}

pub struct FromFn<F> {
    run: F,
    logits: Vec<f32>,
}

impl<F, E> WindowModel for FromFn<F>
where
    F: FnMut(&[TokenId]) -> Result<Vec<f32>, E>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Error = E;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], E> {
        self.logits = (self.run)(tokens)?;
        Ok(&self.logits)
    }
}

/// Perplexity of a model. `progress` gets the result so far after each window.
pub fn perplexity(
    windows: &EvalWindows<'_>,
    model: &mut impl WindowModel,
    mut progress: impl FnMut(&Perplexity),
) -> Result<Perplexity, EvalError> {
    let mut total = Perplexity::default();
    for window in windows.iter() {
        let logits = run_window("the model", &window, windows.vocab, model)?;
        for position in window.first_scored..window.tokens.len() {
            let row = LogitRow::of("the model", &window, logits, windows.vocab, position)?;
            total.add(&row, window.tokens[position]);
        }
        total.windows += 1;
        progress(&total);
    }
    Ok(total)
}

/// Perplexity of two models and their distance. They run in turns, window by window; `progress` gets the
/// result of `this` so far.
pub fn compare(
    windows: &EvalWindows<'_>,
    reference: &mut impl WindowModel,
    this: &mut impl WindowModel,
    mut progress: impl FnMut(&Perplexity),
) -> Result<ModelComparison, EvalError> {
    let vocab = windows.vocab;
    let (mut ours, mut theirs) = (Perplexity::default(), Perplexity::default());
    let (mut divergence, mut kl_max, mut same) = (0.0, 0f64, 0usize);
    for window in windows.iter() {
        let expected = run_window("the reference model", &window, vocab, reference)?;
        let found = run_window("the model", &window, vocab, this)?;
        for position in window.first_scored..window.tokens.len() {
            let target = window.tokens[position];
            let expected = LogitRow::of("the reference model", &window, expected, vocab, position)?;
            let found = LogitRow::of("the model", &window, found, vocab, position)?;
            theirs.add(&expected, target);
            ours.add(&found, target);
            let kl = kl_divergence(&expected, &found);
            divergence += kl;
            kl_max = if kl.is_nan() { kl } else { kl_max.max(kl) };
            same += usize::from(expected.top == found.top);
        }
        theirs.windows += 1;
        ours.windows += 1;
        progress(&ours);
    }
    let scored = ours.tokens_scored as f64;
    Ok(ModelComparison {
        this: ours,
        reference: theirs,
        kl_divergence: divergence / scored,
        kl_max,
        same_top_token: same as f64 / scored,
    })
}

fn run_window<'m, M: WindowModel>(
    model: &'static str,
    window: &EvalWindow<'_>,
    vocab: usize,
    run: &'m mut M,
) -> Result<&'m [f32], EvalError> {
    let logits = run.window_logits(window.tokens).map_err(|source| EvalError::Model {
        model,
        window: window.index,
        source: source.into(),
    })?;
    let (expected, found) = (window.tokens.len() * vocab, logits.len());
    if expected != found {
        return Err(EvalError::Shape { model, window: window.index, expected, found });
    }
    Ok(logits)
}

/// The logits that predict one position.
struct LogitRow<'a> {
    logits: &'a [f32],
    /// ln of the sum of exp of all logits.
    log_sum: f64,
    top: usize,
}

impl<'a> LogitRow<'a> {
    /// The row before `position`, as it predicts it.
    fn of(
        model: &'static str,
        window: &EvalWindow<'_>,
        logits: &'a [f32],
        vocab: usize,
        position: usize,
    ) -> Result<Self, EvalError> {
        let logits = &logits[(position - 1) * vocab..][..vocab];
        let mut top = 0;
        for (id, logit) in logits.iter().enumerate() {
            if *logit > logits[top] {
                top = id;
            }
        }
        let max = f64::from(logits[top]);
        let log_sum = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum::<f64>().ln() + max;
        // NaN anywhere makes the sum NaN; infinite logits make it NaN or infinite.
        if log_sum.is_finite() {
            Ok(LogitRow { logits, log_sum, top })
        } else {
            Err(EvalError::NotFinite { model, window: window.index, position: position - 1 })
        }
    }

    fn log_p(&self, id: usize) -> f64 {
        f64::from(self.logits[id]) - self.log_sum
    }
}

fn kl_divergence(reference: &LogitRow<'_>, this: &LogitRow<'_>) -> f64 {
    let mut sum = 0.0;
    for id in 0..reference.logits.len() {
        let log_p = reference.log_p(id);
        let p = log_p.exp();
        if p > 0.0 {
            sum += p * (log_p - this.log_p(id));
        }
    }
    // Rounding can take the distance of equal distributions below zero.
    sum.max(0.0)
}

#[cfg(test)]
mod tests;
