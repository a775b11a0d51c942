//! What the engine needs of a model: one step over the rows of several sequences.

use mlcc_runtime::{Batch, Model, Session};

use crate::generate::{LanguageModel, RewindModel};
use crate::tokenizer::TokenId;

/// What a step feeds to one sequence: its next token, or a piece of its prompt.
#[derive(Debug)]
pub struct Feed<'a, S> {
    pub sequence: &'a mut S,
    pub tokens: &'a [TokenId],
}

/// How long sequences may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Number of logits.
    pub vocab: usize,
    /// Tokens of one sequence; `None`: no limit.
    pub context: Option<usize>,
    /// Tokens of one prompt.
    pub prompt: Option<usize>,
    /// Most tokens that are worth reading in one step.
    pub chunk: usize,
}

/// The error of a model's step.
pub type StepError<M> = <<M as Step>::Sequence as LanguageModel>::Error;

/// A model that advances several sequences in one step. Sequences stay on the thread of the engine.
pub trait Step: Send {
    type Sequence: RewindModel;

    fn limits(&self) -> Limits;
    /// A sequence without tokens.
    fn sequence(&self) -> Result<Self::Sequence, StepError<Self>>;
    /// A second sequence with the same past and the same logits.
    fn fork(&self, sequence: &Self::Sequence) -> Result<Self::Sequence, StepError<Self>>;
    /// Feeds every sequence its tokens, at least one each. After an error the sequences are unknown.
    fn step(&mut self, feeds: &mut [Feed<'_, Self::Sequence>]) -> Result<(), StepError<Self>>;
    /// The logits after the last token fed.
    fn logits<'a>(&self, sequence: &'a Self::Sequence) -> &'a [f32];
    /// Feeds a piece of a prompt, and gives the logits after each of its tokens, one row after the other.
    fn score<'a>(
        &mut self,
        sequence: &'a mut Self::Sequence,
        tokens: &[TokenId],
    ) -> Result<&'a [f32], StepError<Self>>;
}

/// A compiled model. Single tokens go through its entry point for batches, as many sequences together as it takes; pieces of
/// prompts go one sequence after the other.
pub struct ModelStep {
    model: Model,
    batch: Batch,
}

impl ModelStep {
    pub fn new(model: &Model) -> Result<Self, mlcc_runtime::Error> {
        let most = usize::try_from(model.max_batch()).unwrap_or(usize::MAX);
        Ok(ModelStep { model: model.clone(), batch: model.batch(most)? })
    }
}

impl Step for ModelStep {
    type Sequence = Session;

    fn limits(&self) -> Limits {
        let (plan, table) = (self.model.plan(), self.model.table());
        // A window drops what is oldest.
        let endless = plan.context == 0 || table.window().is_some();
        Limits {
            vocab: self.model.vocab(),
            context: (!endless).then_some(plan.context as usize),
            prompt: table.whole_prompts.then_some(plan.chunk as usize),
            chunk: plan.chunk as usize,
        }
    }

    fn sequence(&self) -> Result<Session, mlcc_runtime::Error> {
        self.model.session()
    }

    fn fork(&self, sequence: &Session) -> Result<Session, mlcc_runtime::Error> {
        sequence.fork()
    }

    fn step(&mut self, feeds: &mut [Feed<'_, Session>]) -> Result<(), mlcc_runtime::Error> {
        let mut sessions: Vec<&mut Session> = Vec::with_capacity(feeds.len());
        let mut tokens: Vec<TokenId> = Vec::with_capacity(feeds.len());
        for feed in feeds {
            match feed.tokens {
                [token] => {
                    sessions.push(&mut *feed.sequence);
                    tokens.push(*token);
                }
                piece => {
                    feed.sequence.prefill(piece)?;
                }
            }
        }
        let most = self.batch.max_sequences();
        for (sessions, tokens) in sessions.chunks_mut(most).zip(tokens.chunks(most)) {
            self.batch.decode(sessions, tokens)?;
        }
        Ok(())
    }

    fn logits<'a>(&self, sequence: &'a Session) -> &'a [f32] {
        sequence.logits()
    }

    fn score<'a>(
        &mut self,
        sequence: &'a mut Session,
        tokens: &[TokenId],
    ) -> Result<&'a [f32], mlcc_runtime::Error> {
        sequence.prefill_logits(tokens)
    }
}
