//! Compiled models in the terms of this crate.

use mlcc_runtime::{Error, Session};

use crate::eval::WindowModel;
use crate::generate::LanguageModel;
use crate::tokenizer::TokenId;

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
        // 0 in the plan: the state does not grow.
        match self.model().plan().context {
            0 => None,
            context => Some(context as usize),
        }
    }

    fn chunk(&self) -> usize {
        self.model().plan().chunk as usize
    }
}

impl WindowModel for Session {
    type Error = Error;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], Error> {
        self.reset()?;
        self.prefill_logits(tokens)
    }
}
