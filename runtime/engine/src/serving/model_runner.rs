//! The interface of a model for the engine: one step over the rows of several sequences.

use std::path::Path;

use mlcc_runtime::{
    CachePages, LoadedAdapter, Model, Session, SessionBatch, SessionInput, TokenCandidate, WorkerThreads,
};
use mlcc_text::TokenId;

use crate::generate::{LanguageModel, RewindModel};
use crate::model::{is_batch_invariant, takes_drafts};
use crate::serving::adapter::TextAdapter;
use crate::serving::recycle::recycle_list;

pub use mlcc_runtime::OutputRows;

/// The input of one sequence in a step: its next token, with drafts of those behind it, or a chunk of its
/// prompt.
#[derive(Debug)]
pub struct SequenceInput<'a, S> {
    pub sequence: &'a mut S,
    /// The tokens, at least one.
    pub tokens: &'a [TokenId],
    pub outputs: OutputRows,
}

impl<S> SequenceInput<'_, S> {
    /// The number of output rows.
    pub fn output_rows(&self) -> usize {
        output_rows(self.outputs, self.tokens.len())
    }
}

/// The number of output rows for `tokens` tokens.
pub(super) fn output_rows(want: OutputRows, tokens: usize) -> usize {
    match want {
        OutputRows::Nothing => 0,
        OutputRows::Last => 1,
        OutputRows::All => tokens,
    }
}

/// Limits of sequences and steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelLimits {
    /// Number of logits.
    pub vocab: usize,
    /// Tokens of one sequence; `None`: no limit.
    pub context: Option<usize>,
    /// Tokens of one prompt.
    pub prompt: Option<usize>,
    /// Most tokens of one sequence that are worth reading in one step.
    pub chunk: usize,
    /// Most tokens of all sequences that are worth feeding in one step.
    pub step_tokens: usize,
    /// True if drafts can be checked together with next tokens and rolled back.
    pub rolls_back_drafts: bool,
    /// True if a state can go back to any number of its tokens. Where it cannot, copies of earlier ones are
    /// kept.
    pub truncates: bool,
    /// True if sequences can have adapters.
    pub adapters: bool,
    /// The token behind the source text that a sequence of an encoder-decoder model begins with, and that has
    /// no logits.
    pub decoder_start: Option<TokenId>,
}

/// Memory for the caches of all sequences, in blocks of equally many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheBlocks {
    /// Tokens of one.
    pub tokens_per_block: usize,
    pub total: usize,
    /// Blocks that no sequence has.
    pub free: usize,
    /// Blocks of a full context.
    pub per_sequence: usize,
}

/// The error of a model's step.
pub type RunnerError<M> = <<M as ModelRunner>::Sequence as LanguageModel>::Error;

/// A model that advances several sequences in one step. Sequences stay on the thread of the engine.
pub trait ModelRunner: Send {
    type Sequence: RewindModel + 'static;

    fn limits(&self) -> ModelLimits;
    /// A sequence without tokens.
    fn new_sequence(&self) -> Result<Self::Sequence, RunnerError<Self>>;
    /// Chooses the adapter of a sequence without tokens, or none; it stays when the sequence is reset.
    fn set_adapter(
        &self,
        sequence: &mut Self::Sequence,
        adapter: Option<&TextAdapter>,
    ) -> Result<(), RunnerError<Self>> {
        // Without `ModelLimits::adapters` there are none.
        let _ = (sequence, adapter);
        Ok(())
    }
    /// A second sequence with the same past and the same logits.
    fn fork(&self, sequence: &Self::Sequence) -> Result<Self::Sequence, RunnerError<Self>>;
    /// Makes sure that there is memory for `tokens` more tokens of a sequence; false where the sequences
    /// together have used up their limit.
    fn reserve(&mut self, sequence: &mut Self::Sequence, tokens: usize) -> Result<bool, RunnerError<Self>> {
        let _ = (sequence, tokens);
        Ok(true)
    }
    /// The memory of caches, if the model has any.
    fn cache_blocks(&self) -> Option<CacheBlocks> {
        None
    }
    /// The identity of the numbers in states: files under another one are not for this model. `None`: its
    /// states have no files.
    fn identity(&self) -> Option<u128> {
        None
    }
    /// The state of a sequence as the bytes of a file.
    fn save_state(&self, sequence: &Self::Sequence) -> Result<Vec<u8>, RunnerError<Self>> {
        let _ = sequence;
        Ok(Vec::new())
    }
    /// Replaces a state by one of a file with what [`ModelRunner::save_state`] gave. After an error the
    /// sequence is unknown.
    fn load_state(&self, sequence: &mut Self::Sequence, path: &Path) -> Result<(), RunnerError<Self>> {
        let _ = (sequence, path);
        Ok(())
    }
    /// Calls `work` once with each number below `count`, if that is worth it on several threads.
    fn parallel_for(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(work);
    }
    /// True if an error says that memory was refused: if others give way, the same may succeed.
    fn is_out_of_memory(&self, error: &RunnerError<Self>) -> bool {
        let _ = error;
        false
    }
    /// Something that makes steps slower than they could be and that the operator of the model may want to
    /// know.
    fn performance_warning(&self) -> Option<String> {
        None
    }
    /// Computes the tokens of every sequence. After an error the sequences are unknown.
    fn step(&mut self, feeds: &mut [SequenceInput<'_, Self::Sequence>]) -> Result<(), RunnerError<Self>>;
    /// Runs a step like [`ModelRunner::step`]. A model that finds the top-k candidates of inputs of one token
    /// by itself gives them to `enough` with the number of the input (see
    /// [`mlcc_runtime::SessionBatch::step_top_k`]); where that returns true the row of
    /// [`ModelRunner::logits`] is undefined.
    fn step_top_k(
        &mut self,
        feeds: &mut [SequenceInput<'_, Self::Sequence>],
        enough: &mut dyn FnMut(usize, &[TokenCandidate]) -> bool,
    ) -> Result<(), RunnerError<Self>> {
        let _ = enough;
        self.step(feeds)
    }
    /// The output rows of the last step: rows of `vocab` numbers, in the order of its inputs and of the
    /// tokens in each.
    fn logits(&self) -> &[f32];
}

/// Logits among which tokens are chosen, from which on it takes longer than to wake workers.
const WORTH_DEALING: usize = 1 << 16;

/// A compiled model. Artifacts for several sequences compute the rows of all of them together; in others they
/// take turns.
pub struct CompiledModelRunner {
    model: Model,
    /// Worker threads, if there are several.
    workers: Option<WorkerThreads>,
    batch: SessionBatch,
    /// True if drafts can be checked together with next tokens: rows of several tokens have the bits of
    /// single ones.
    takes_drafts: bool,
    /// The lists of a group, empty between steps.
    group: Vec<SessionInput<'static>>,
    logit_offsets: Vec<usize>,
    /// The logits of a step of several groups.
    gathered_logits: Vec<f32>,
    has_gathered: bool,
}

impl CompiledModelRunner {
    pub fn new(model: &Model) -> Result<Self, mlcc_runtime::Error> {
        let most = usize::try_from(model.max_batch()).unwrap_or(usize::MAX);
        Ok(CompiledModelRunner {
            model: model.clone(),
            workers: model.workers().filter(|workers| workers.threads() > 1),
            batch: model.batch(most)?,
            takes_drafts: takes_drafts(model) && is_batch_invariant(model),
            group: Vec::new(),
            logit_offsets: Vec::new(),
            gathered_logits: Vec::new(),
            has_gathered: false,
        })
    }

    /// True if one call of the batch can take all of it.
    fn is_one_group(&self, feeds: &[SequenceInput<'_, Session>]) -> bool {
        let rows: usize = feeds.iter().map(|feed| feed.tokens.len()).sum();
        feeds.len() <= self.batch.max_sequences()
            && rows <= self.model.max_step_tokens()
            && feeds.iter().all(|feed| feed.tokens.len() <= self.max_grouped_tokens(feed))
    }

    /// Most tokens of a sequence that may be in one call with others.
    fn max_grouped_tokens(&self, feed: &SequenceInput<'_, Session>) -> usize {
        feed.sequence.tokens_per_call().min(self.model.max_step_tokens())
    }

    /// Computes inputs that do not fit in one call, in as many groups as they need.
    fn step_in_groups(
        &mut self,
        feeds: &mut [SequenceInput<'_, Session>],
    ) -> Result<(), mlcc_runtime::Error> {
        let (most, most_rows) = (self.batch.max_sequences(), self.model.max_step_tokens());
        let mut group: Vec<SessionInput<'_>> = recycle_list(std::mem::take(&mut self.group));
        let (mut rows, mut at) = (0, 0);
        for feed in feeds {
            let (place, count) = (at, feed.tokens.len());
            at += feed.output_rows();
            if count > self.max_grouped_tokens(feed) {
                self.prefill_alone(feed, place)?;
                continue;
            }
            if group.len() == most || rows + count > most_rows {
                self.run_group(&mut group)?;
                group = recycle_list(group);
                rows = 0;
            }
            rows += count;
            self.logit_offsets.push(place);
            group.push(SessionInput {
                session: &mut *feed.sequence,
                tokens: feed.tokens,
                outputs: feed.outputs,
            });
        }
        if !group.is_empty() {
            self.run_group(&mut group)?;
        }
        self.group = recycle_list(group);
        Ok(())
    }

    fn run_group(&mut self, group: &mut [SessionInput<'_>]) -> Result<(), mlcc_runtime::Error> {
        let logits = self.batch.step(group)?;
        let (vocab, mut from) = (self.model.vocab(), 0);
        for (rows, place) in group.iter().zip(self.logit_offsets.drain(..)) {
            let count = output_rows(rows.outputs, rows.tokens.len()) * vocab;
            let to = place * vocab;
            self.gathered_logits[to..to + count].copy_from_slice(&logits[from..from + count]);
            from += count;
        }
        Ok(())
    }

    /// Computes an input that is larger than one call takes: the session makes chunks of it.
    fn prefill_alone(
        &mut self,
        feed: &mut SequenceInput<'_, Session>,
        place: usize,
    ) -> Result<(), mlcc_runtime::Error> {
        let logits = match feed.outputs {
            OutputRows::Nothing | OutputRows::Last => feed.sequence.prefill(feed.tokens)?,
            OutputRows::All => feed.sequence.prefill_logits(feed.tokens)?,
        };
        let (to, count) =
            (place * self.model.vocab(), output_rows(feed.outputs, feed.tokens.len()) * self.model.vocab());
        self.gathered_logits[to..to + count].copy_from_slice(&logits[..count]);
        Ok(())
    }
}

impl ModelRunner for CompiledModelRunner {
    type Sequence = Session;

    fn limits(&self) -> ModelLimits {
        let (plan, table) = (self.model.plan(), self.model.table());
        let window = table.sliding_window().map(|(window, _)| window.visible_rows());
        // A window drops what is oldest.
        let endless = plan.context == 0 || window.is_some();
        let chunk = window.map_or(plan.chunk, |kept| plan.chunk.min(plan.context.saturating_sub(kept)));
        ModelLimits {
            vocab: self.model.vocab(),
            context: (!endless).then_some(plan.context as usize),
            prompt: table.whole_prompts.then_some(plan.chunk as usize),
            chunk: chunk as usize,
            step_tokens: self.model.max_step_tokens(),
            rolls_back_drafts: self.takes_drafts,
            truncates: table.recurrent_state().is_none() && window.is_none(),
            adapters: self.model.adapter_slots() > 0,
            decoder_start: plan.decoder_start(),
        }
    }

    fn new_sequence(&self) -> Result<Session, mlcc_runtime::Error> {
        self.model.session()
    }

    fn set_adapter(
        &self,
        sequence: &mut Session,
        adapter: Option<&TextAdapter>,
    ) -> Result<(), mlcc_runtime::Error> {
        let of_model = |adapter: &TextAdapter| {
            let foreign = || mlcc_runtime::Error::ForeignAdapter { adapter: adapter.name().to_owned() };
            adapter.handle::<LoadedAdapter>().cloned().ok_or_else(foreign)
        };
        let adapter = adapter.map(of_model).transpose()?;
        if adapter.is_none() && sequence.adapter().is_none() {
            return Ok(());
        }
        sequence.set_adapter(adapter.as_ref())
    }

    fn fork(&self, sequence: &Session) -> Result<Session, mlcc_runtime::Error> {
        sequence.fork()
    }

    fn reserve(&mut self, sequence: &mut Session, tokens: usize) -> Result<bool, mlcc_runtime::Error> {
        match sequence.reserve(tokens) {
            Ok(()) => Ok(true),
            Err(error) if self.is_out_of_memory(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn identity(&self) -> Option<u128> {
        Some(self.model.prefix_identity())
    }

    fn save_state(&self, sequence: &Session) -> Result<Vec<u8>, mlcc_runtime::Error> {
        sequence.state_file()
    }

    fn load_state(&self, sequence: &mut Session, path: &Path) -> Result<(), mlcc_runtime::Error> {
        sequence.load_state(path)
    }

    fn parallel_for(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let workers =
            self.workers.as_ref().filter(|_| count > 1 && count * self.model.vocab() >= WORTH_DEALING);
        match workers {
            // Panics in them are caught by the callers.
            Some(workers) => drop(workers.parallel_for(count, work)),
            None => (0..count).for_each(work),
        }
    }

    fn cache_blocks(&self) -> Option<CacheBlocks> {
        let sequence = usize::try_from(self.model.plan().pages()).unwrap_or(usize::MAX);
        let CachePages { all, free, .. } = self.model.cache_pages();
        let tokens = mlcc_runtime::PAGE_TOKENS;
        (sequence > 0).then_some(CacheBlocks {
            tokens_per_block: tokens,
            total: all,
            free,
            per_sequence: sequence,
        })
    }

    /// A pool that is used up, or a device that has less memory than the pool may have.
    fn is_out_of_memory(&self, error: &mlcc_runtime::Error) -> bool {
        matches!(error, mlcc_runtime::Error::NoPages { .. } | mlcc_runtime::Error::OutOfMemory { .. })
    }

    fn performance_warning(&self) -> Option<String> {
        self.batch.performance_warning()
    }

    fn step(&mut self, feeds: &mut [SequenceInput<'_, Session>]) -> Result<(), mlcc_runtime::Error> {
        self.step_top_k(feeds, &mut |_, _| false)
    }

    fn step_top_k(
        &mut self,
        feeds: &mut [SequenceInput<'_, Session>],
        enough: &mut dyn FnMut(usize, &[TokenCandidate]) -> bool,
    ) -> Result<(), mlcc_runtime::Error> {
        self.logit_offsets.clear();
        self.has_gathered = !self.is_one_group(feeds);
        if !self.has_gathered {
            let mut group: Vec<SessionInput<'_>> = recycle_list(std::mem::take(&mut self.group));
            let rows = |feed| {
                let SequenceInput { sequence, tokens, outputs: want }: &mut SequenceInput<'_, Session> = feed;
                SessionInput { session: sequence, tokens, outputs: *want }
            };
            group.extend(feeds.iter_mut().map(rows));
            let result = self.batch.step_top_k(&mut group, enough).map(|_| ());
            self.group = recycle_list(group);
            return result;
        }
        let rows: usize = feeds.iter().map(SequenceInput::output_rows).sum();
        self.gathered_logits.resize(rows * self.model.vocab(), 0.0);
        self.step_in_groups(feeds)
    }

    fn logits(&self) -> &[f32] {
        if self.has_gathered { &self.gathered_logits } else { self.batch.logits() }
    }
}
