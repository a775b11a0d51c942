//! Compiled models in the terms of this crate.

use mlcc_runtime::{Error, Model, Session, SessionSnapshot, TokenCandidate};
use mlcc_text::TokenId;

use crate::eval::WindowModel;
use crate::generate::{LanguageModel, RewindModel};

impl RewindModel for Session {
    type Snapshot = SessionSnapshot;

    fn can_truncate(&self) -> bool {
        Session::can_truncate(self)
    }

    fn can_truncate_to(&self, past: usize) -> bool {
        Session::can_truncate_to(self, past as u64)
    }

    fn truncate(&mut self, past: usize) -> Result<(), Error> {
        Session::truncate(self, past as u64)
    }

    fn snapshot(&self) -> Result<SessionSnapshot, Error> {
        Session::snapshot(self)
    }

    fn restore(&mut self, snapshot: &SessionSnapshot) -> Result<(), Error> {
        Session::restore(self, snapshot)
    }
}

/// True if a row has the same bits in every step, as `mlcc build --batch-invariant` makes it.
pub fn is_batch_invariant(model: &Model) -> bool {
    let metadata = serde_json::from_str(model.metadata()).unwrap_or(serde_json::Value::Null);
    metadata["batch_invariant"] == true
}

/// True if sequences of a model can compute several tokens in one call, of which some are then rolled back as
/// if they had never been there. A recurrent state cannot roll back, a window may have dropped rows for them,
/// angles may depend on how many tokens come together, and prompts may have to be read as a whole.
pub fn takes_drafts(model: &Model) -> bool {
    let table = model.table();
    table.recurrent_state().is_none()
        && table.sliding_window().is_none()
        && table.length_state().is_none()
        && !table.whole_prompts
}

/// True if a model can draft for another. One that cannot roll back drafts with copies of its states; prompts
/// that it reads only as a whole, or otherwise at another length, would be read again for each draft.
pub fn can_draft(model: &Model) -> bool {
    model.table().length_state().is_none() && !model.table().whole_prompts
}

impl LanguageModel for Session {
    type Error = Error;

    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], Error> {
        Session::prefill(self, tokens)
    }

    fn decode(&mut self, token: TokenId) -> Result<&[f32], Error> {
        Session::decode(self, token)
    }

    fn reset(&mut self) -> Result<(), Error> {
        Session::reset(self)
    }

    fn past(&self) -> usize {
        Session::past(self) as usize
    }

    fn vocab(&self) -> usize {
        self.model().vocab()
    }

    fn context(&self) -> Option<usize> {
        // 0 in the plan: the state does not grow. A window drops the oldest tokens and goes on.
        match self.model().plan().context {
            0 => None,
            _ if self.window().is_some() => None,
            context => Some(context as usize),
        }
    }

    fn needs_whole_prompts(&self) -> bool {
        self.model().table().whole_prompts
    }

    fn prefill_chunk(&self) -> usize {
        // The session takes a whole prompt or refuses it.
        // Where angles depend on the length of the sequence, it is that after what comes in one call.
        let whole = self.needs_whole_prompts() || self.model().table().length_state().is_some();
        if whole { usize::MAX } else { self.model().plan().chunk as usize }
    }

    fn verify_drafts(&mut self, tokens: &[TokenId]) -> Result<&[f32], Error> {
        match tokens {
            [_, _, ..] if takes_drafts(self.model()) => Session::prefill_logits(self, tokens),
            _ => Session::decode(self, tokens[0]),
        }
    }

    fn decode_top_k(
        &mut self,
        token: TokenId,
        enough: &mut dyn FnMut(&[TokenCandidate]) -> bool,
    ) -> Result<Option<&[f32]>, Error> {
        Session::decode_top_k(self, token, enough)
    }

    fn rollback(&mut self, past: usize) -> Result<(), Error> {
        Session::truncate(self, past as u64)
    }
}

impl WindowModel for Session {
    type Error = Error;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], Error> {
        self.reset()?;
        self.prefill_logits(tokens)
    }
}
