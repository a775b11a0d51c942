//! The parts of texts, as Python sees them.

use mlcc_text::TokenId;
use mlcc_engine::sampler::{Logprobs, TokenLogprob};
use mlcc_engine::serving;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The probability of a token in the model's own distribution, with the most probable ones.
#[pyclass(frozen, get_all, module = "mlcc")]
pub struct Logprob {
    id: TokenId,
    /// Natural logarithm of its probability.
    logprob: f32,
    /// Ids of the most probable tokens with their logarithms, in falling order.
    top: Vec<(TokenId, f32)>,
}

impl From<&Logprobs> for Logprob {
    fn from(of: &Logprobs) -> Logprob {
        let pair = |token: &TokenLogprob| (token.id, token.logprob);
        let (id, logprob) = pair(&of.token);
        Logprob { id, logprob, top: of.top.iter().map(pair).collect() }
    }
}

#[pymethods]
impl Logprob {
    fn __repr__(&self) -> String {
        format!("Logprob(id={}, logprob={})", self.id, self.logprob)
    }
}

/// The part of a text that one token added.
#[pyclass(frozen, module = "mlcc")]
pub struct Piece {
    piece: serving::TextDelta,
}

impl Piece {
    pub fn new(piece: serving::TextDelta) -> Piece {
        Piece { piece }
    }
}

#[pymethods]
impl Piece {
    /// The text in whole characters; empty while it may become a stop string, or a character is not complete.
    #[getter]
    fn text(&self) -> &str {
        &self.piece.text
    }

    /// The token that was chosen, or none: text that was held back, at the end.
    #[getter]
    fn ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.piece.token.iter().map(|token| token.id))
    }

    /// Log probabilities of the token, if `logprobs` were requested.
    #[getter]
    fn logprobs(&self) -> Option<Logprob> {
        self.piece.token.as_ref()?.logprobs.as_ref().map(Logprob::from)
    }

    fn __str__(&self) -> &str {
        &self.piece.text
    }

    fn __repr__(&self) -> String {
        let ids: Vec<TokenId> = self.piece.token.iter().map(|token| token.id).collect();
        format!("Piece(text={:?}, ids={ids:?})", self.piece.text.as_str())
    }
}

/// The outcome of a text. Times are in seconds.
#[pyclass(frozen, get_all, module = "mlcc")]
pub struct Finished {
    /// `eos`, `stop`, `grammar`, `length`, `context`, `cancelled` or `deadline`.
    reason: &'static str,
    prompt_tokens: usize,
    /// Those of them that did not have to be read.
    cached_tokens: usize,
    /// All chosen tokens, with the one that ended the text.
    completion_tokens: usize,
    seed: u64,
    /// Time in the queue.
    waited: f64,
    /// Time from there to the first token.
    reading: f64,
    /// Time from there to the end.
    writing: f64,
}

impl From<&serving::RequestSummary> for Finished {
    fn from(of: &serving::RequestSummary) -> Finished {
        Finished {
            reason: of.reason.as_str(),
            prompt_tokens: of.prompt_tokens,
            cached_tokens: of.cached_tokens,
            completion_tokens: of.completion_tokens,
            seed: of.seed,
            waited: of.queue_time.as_secs_f64(),
            reading: of.prefill_time.as_secs_f64(),
            writing: of.decode_time.as_secs_f64(),
        }
    }
}

#[pymethods]
impl Finished {
    fn __repr__(&self) -> String {
        let (reason, prompt, completion) = (self.reason, self.prompt_tokens, self.completion_tokens);
        format!("Finished(reason={reason:?}, prompt_tokens={prompt}, completion_tokens={completion})")
    }
}
