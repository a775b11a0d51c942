//! One sequence: its state, its scratch memory, its position.

mod copies;
mod logits;
mod source;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use mlcc_abi::{EntryPoint, section};

use crate::buffer::AlignedBuffer;
use crate::device::{BatchMember, DeviceSession};
use crate::table::SlidingWindow;
use crate::{Error, LoadedAdapter, Model, Result, StepTimes, TokenCandidate};

pub use copies::SessionSnapshot;
pub use logits::OwnedLogits;
pub use source::source_rows;

/// One sequence of a model. Everything that decoding needs is allocated when it is created.
pub struct Session {
    /// Before the model, whose code it runs.
    memory: Box<dyn DeviceSession>,
    model: Model,
    /// Rows in the caches (for recurrent models: tokens seen).
    rows: u64,
    /// Rows that were dropped from the start of the caches.
    dropped: u64,
    /// Once rows were dropped: the first row that is one of the window's. Those between the sinks and it mean
    /// nothing.
    window_row: u64,
    /// The adapter of its rows, in addition to the weights.
    adapter: Option<LoadedAdapter>,
    /// Logits of all positions, for `prefill_logits`; grows with the longest window asked for.
    all_logits: Option<AlignedBuffer>,
}

/// Bytes of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionMemory {
    /// The state with every row of every cache: the worst case that the build planned.
    pub planned_state: u64,
    /// The state as far as it has memory now.
    pub state: u64,
    /// Scratch memory and results.
    pub scratch: u64,
    /// Bytes that one more token adds to the state.
    pub bytes_per_token: u64,
}

impl Session {
    pub(crate) fn new(model: &Model) -> Result<Self> {
        if model.text_width() > 0 {
            return Err(Error::TextsOnly { path: model.artifact().path().to_path_buf() });
        }
        let memory = Arc::clone(model.device()).session(model)?;
        let model = model.clone();
        let mut session =
            Self { model, memory, rows: 0, dropped: 0, window_row: 0, adapter: None, all_logits: None };
        session.initialise(EntryPoint::CreateKvCache)?;
        Ok(session)
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tokens that the state has seen.
    pub fn past(&self) -> u64 {
        self.dropped + self.rows
    }

    /// Feeds `tokens` (any number, at least one) and returns the logits of the last position.
    ///
    /// A sequence of an encoder-decoder model begins with the whole source text and the token that the
    /// decoder starts with ([`crate::ModelPlan::decoder_start`]), in one call.
    pub fn prefill(&mut self, tokens: &[i32]) -> Result<&[f32]> {
        self.check_tokens(tokens)?;
        self.forward_after_source(tokens, Session::forward_chunks)?;
        Ok(self.logits())
    }

    fn forward_chunks(&mut self, tokens: &[i32]) -> Result<()> {
        let chunk = if self.has_entry(EntryPoint::Prefill) { self.tokens_per_call() } else { 1 };
        self.forward_announced(tokens.len(), chunk, |session| {
            let mut pieces = tokens.chunks(chunk).peekable();
            while let Some(piece) = pieces.next() {
                match piece.len() {
                    1 => session.run_entry(EntryPoint::Decode, piece)?,
                    _ if pieces.peek().is_some() => session.step_without_logits(piece)?,
                    _ => session.run_entry(EntryPoint::Prefill, piece)?,
                }
            }
            Ok(())
        })
    }

    /// Feeds one token and returns the logits.
    pub fn decode(&mut self, token: i32) -> Result<&[f32]> {
        self.check_tokens(&[token])?;
        self.run_entry(EntryPoint::Decode, &[token])?;
        Ok(self.logits())
    }

    /// Feeds one token. A device that finds the likeliest tokens itself gives these to `enough`, in falling
    /// order of their logits, equal ones by their number; those that are not numbers come last. If that says
    /// true the logits of all tokens are not copied to the host and this is `None`: [`Session::logits`] are
    /// those of an earlier token then. Else, and on other devices, it is as [`Session::decode`].
    pub fn decode_top_k(
        &mut self,
        token: i32,
        enough: &mut dyn FnMut(&[TokenCandidate]) -> bool,
    ) -> Result<Option<&[f32]>> {
        self.check_tokens(&[token])?;
        self.drop_oldest_rows(1)?;
        let enough = self.memory.decode_top_k(&self.model, token, self.rows, enough)?;
        self.rows += 1;
        Ok((!enough).then(|| self.logits()))
    }

    /// Feeds `tokens` and returns the logits of every position, one row of `vocab` floats after the other.
    /// Those of a source text have none.
    pub fn prefill_logits(&mut self, tokens: &[i32]) -> Result<&[f32]> {
        self.check_tokens(tokens)?;
        let mut wanted = 0;
        self.forward_after_source(tokens, |session, tokens| {
            wanted = tokens.len() * session.model.vocab();
            session.forward_all_logits(tokens)
        })?;
        Ok(self.all_logits.as_ref().map_or(&[], |all| &all.as_floats()[..wanted]))
    }

    fn forward_all_logits(&mut self, tokens: &[i32]) -> Result<()> {
        let wanted = tokens.len() as u64 * self.model.vocab() as u64;
        let mut all = match self.all_logits.take() {
            Some(buffer) if buffer.len() as u64 >= 4 * wanted => buffer,
            _ => AlignedBuffer::floats("logits of all positions", wanted)?,
        };
        let chunk = if self.has_entry(EntryPoint::PrefillLogits) { self.tokens_per_call() } else { 1 };
        let mut at = 0;
        self.forward_announced(tokens.len(), chunk, |session| {
            tokens.chunks(chunk).try_for_each(|piece| {
                let rows = if chunk == 1 {
                    session.run_entry(EntryPoint::Decode, piece)?;
                    session.logits()
                } else {
                    session.run_entry(EntryPoint::PrefillLogits, piece)?;
                    session.chunk_logits(piece.len())
                };
                // SAFETY: any f32 may be read as its four bytes.
                let bytes =
                    unsafe { std::slice::from_raw_parts(rows.as_ptr().cast::<u8>(), size_of_val(rows)) };
                all.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
                Ok(())
            })
        })?;
        self.all_logits = Some(all);
        Ok(())
    }

    /// Probabilities of the last logits: softmax(logits / temperature).
    pub fn softmax(&mut self, temperature: f32) -> Result<&[f32]> {
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(Error::Temperature(temperature));
        }
        self.memory.softmax(&self.model, temperature)
    }

    /// Logits of the last computed position; zeros before the first.
    pub fn logits(&self) -> &[f32] {
        self.memory.logits()
    }

    /// Forgets all computed tokens; memory of cache rows goes back to the system.
    pub fn reset(&mut self) -> Result<()> {
        (self.rows, self.dropped) = (0, 0);
        self.shrink();
        self.initialise(EntryPoint::ResetKvCache)
    }

    /// Goes back to the first `past` tokens. The logits are not those of the last of them: feed a token next.
    ///
    /// A cache forgets rows by counting fewer of them; a model with a recurrent state can only go back to 0,
    /// and one that dropped rows (see [`Session::window`]) only as far as it still has what the next token
    /// will see.
    pub fn truncate(&mut self, past: u64) -> Result<()> {
        let seen = self.past();
        if past > seen {
            return Err(Error::TruncateBeyond { wanted: past, past: seen });
        }
        if past == seen {
            return Ok(());
        }
        if past == 0 {
            return self.reset();
        }
        if let Some(state) = self.model.table().recurrent_state() {
            let state = state.name.clone();
            return Err(Error::TruncateRecurrent { wanted: past, past: seen, state });
        }
        if let Some(window) = self.window().filter(|_| !self.can_truncate_to(past)) {
            return Err(Error::TruncateDropped { wanted: past, past: seen, window });
        }
        if let Some(source_length) = self.source_length()?.filter(|&length| past < length) {
            return Err(Error::TruncateSource { wanted: past, source_length });
        }
        self.rows = past - self.dropped;
        self.shrink();
        self.write_length(0)
    }

    /// True if [`Session::truncate`] would go back to `past` tokens.
    pub fn can_truncate_to(&self, past: u64) -> bool {
        let all_rows = self.dropped == 0;
        let first_seen = |newest: u64| (past + 1).checked_sub(self.dropped + newest);
        let rows =
            all_rows || self.window().is_none_or(|n| first_seen(n).is_some_and(|f| f >= self.window_row));
        let behind_source = || self.source_length().is_ok_and(|source| source.is_none_or(|n| past >= n));
        past == 0
            || past == self.past()
            || past < self.past() && self.can_truncate() && rows && behind_source()
    }

    /// True if [`Session::truncate`] may stop elsewhere than at 0.
    pub fn can_truncate(&self) -> bool {
        self.model.table().recurrent_state().is_none()
    }

    /// The number of newest tokens that the model sees, if it goes on beyond its context by dropping the rows
    /// of older ones.
    pub fn window(&self) -> Option<u64> {
        self.model.table().sliding_window().map(|(window, _)| window.newest)
    }

    /// The number of first tokens that such a model sees for ever.
    pub fn sinks(&self) -> u64 {
        self.model.table().sliding_window().map_or(0, |(window, _)| window.sinks)
    }

    /// Rows that the next token sees beside its own, if the others may be dropped.
    fn visible_rows(&self) -> Option<u64> {
        self.model.table().sliding_window().map(|(window, _)| window.visible_rows())
    }

    /// A piece of the state by its name, for inspection; of a cache the rows in use.
    pub fn state(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(piece) = self.model.table().states.iter().find(|s| s.name == name) else { return Ok(None) };
        Ok(Some(self.memory.state(piece, self.rows)?.into_owned()))
    }

    /// The planned and the present memory of this session.
    pub fn memory(&self) -> SessionMemory {
        let (state, scratch) = self.memory.allocated();
        let planned_state = self.model.plan().sequence_bytes();
        SessionMemory {
            planned_state,
            state,
            scratch,
            bytes_per_token: self.model.table().cache_bytes_per_token(),
        }
    }

    /// Something that makes this session slower than it could be and that its user may want to know, if there
    /// is any: on a GPU, that the driver does not record tokens as CUDA graphs.
    pub fn performance_warning(&self) -> Option<&str> {
        self.memory.performance_warning()
    }

    fn shrink(&mut self) {
        self.memory.shrink(self.rows);
    }

    /// The scratch memory as the last step has left it; on a CPU all sessions of a model share it. Its
    /// contents are undefined, except in an artifact built with `--debug-taps`, whose metadata tells where
    /// the outputs of layers stay.
    pub fn scratch(&self) -> Result<Cow<'_, [u8]>> {
        self.memory.arena()
    }

    /// Takes the times of the launches and barriers of every step from now on (or no longer), and gives those
    /// taken so far, by entry point. On a CPU only: elsewhere there are none.
    pub fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        self.memory.trace(on)
    }

    fn check_tokens(&self, tokens: &[i32]) -> Result<()> {
        let plan = self.model.plan();
        if tokens.is_empty() {
            return Err(Error::NoTokens);
        }
        let bad = tokens.iter().position(|&t| t < 0 || t as u64 >= plan.vocab);
        if let Some(position) = bad {
            return Err(Error::Token { token: tokens[position], position, vocab: plan.vocab });
        }
        let n = tokens.len() as u64;
        if plan.decoder_start > 0 {
            self.check_source(tokens)?;
        } else if self.model.table().whole_prompts && n > 1 && (self.past() > 0 || n > plan.chunk) {
            return Err(Error::WholePrompt { n, past: self.past(), chunk: plan.chunk });
        }
        // Positions of the dropped rows are counted in 32 bits.
        let limit = if self.window().is_some() { i32::MAX as u64 } else { plan.context };
        if limit != 0 && self.past() + n > limit {
            return Err(Error::ContextFull { past: self.past(), n, context: limit });
        }
        Ok(())
    }

    /// Most tokens in one call of an entry point: beside what a window keeps there must be room for them.
    pub fn tokens_per_call(&self) -> usize {
        let (chunk, context) = (self.model.plan().chunk, self.model.plan().context);
        self.visible_rows().map_or(chunk, |kept| chunk.min(context - kept)) as usize
    }

    /// Computes a prompt; where it comes in pieces, the model gets the length of the sequence first. When a
    /// piece fails that is undone: the sequence has ended before it.
    fn forward_announced(
        &mut self,
        tokens: usize,
        chunk: usize,
        feed: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if tokens <= chunk {
            return feed(self);
        }
        // Rows that get memory together may get huge pages.
        let most = self.model.plan().context.saturating_sub(self.rows);
        self.memory.reserve(&self.model, self.rows, most.min(tokens as u64))?;
        self.write_length((self.past() + tokens as u64) as i32)?;
        let result = feed(self);
        if result.is_err() {
            // The caller gets the first error.
            let _ = self.write_length(self.past() as i32);
        }
        result
    }

    fn write_length(&mut self, length: i32) -> Result<()> {
        let Some(state) = self.model.table().length_state() else { return Ok(()) };
        self.memory.write_word(state, length)
    }

    /// Makes sure that the next `tokens` tokens have memory in the caches, as far as the context goes: steps
    /// that feed them want no pages of the pool any more, until the session is truncated, reset or forked. If
    /// there is none ([`Error::NoPages`]), nothing has changed. A model with a window counts on as many as go
    /// into one call.
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        let context = self.model.plan().context;
        if context == 0 {
            return Ok(());
        }
        let tokens = match self.visible_rows() {
            Some(_) => tokens.min(self.tokens_per_call()) as u64,
            None => (tokens as u64).min(context.saturating_sub(self.rows)),
        };
        self.drop_oldest_rows(tokens)?;
        self.memory.reserve(&self.model, self.rows, tokens)
    }

    /// Drops the oldest rows after the sinks where the caches are full and the model does without.
    fn drop_oldest_rows(&mut self, n: u64) -> Result<()> {
        let table = self.model.table();
        let Some((window, counter)) = table.sliding_window() else { return Ok(()) };
        if self.rows + n <= table.plan.context {
            return Ok(());
        }
        let pages = self.pages_to_drop(window);
        if let Some(count) =
            pages.as_ref().and_then(|pages| Some((pages.end - pages.start) * self.memory.page_rows()?))
            && let Some(pages) = pages
            && self.rows - count + n <= table.plan.context
        {
            let dropped = self.dropped + count;
            self.memory.drop_pages(pages, counter, dropped as i32)?;
            (self.rows, self.dropped) = (self.rows - count, dropped);
            self.window_row = self.sink_rows();
            return Ok(());
        }
        let kept = self.rows.min(window.visible_rows());
        let (count, sinks) = (self.rows - kept, window.sinks.min(kept));
        let dropped = self.dropped + count;
        self.memory.drop_rows(&self.model, count, sinks..kept, counter, dropped as i32)?;
        (self.rows, self.dropped, self.window_row) = (kept, dropped, sinks);
        Ok(())
    }

    /// Rows of the sinks, to the end of their last page.
    fn sink_rows(&self) -> u64 {
        self.memory.page_rows().map_or(self.sinks(), |rows| self.sinks().next_multiple_of(rows))
    }

    /// The pages of rows that no later token sees.
    fn pages_to_drop(&self, window: SlidingWindow) -> Option<Range<u64>> {
        let rows = self.memory.page_rows()?;
        let sinks = self.sink_rows() / rows;
        let end = (self.rows + 1).checked_sub(window.newest)? / rows;
        (sinks < end).then_some(sinks..end)
    }

    fn has_entry(&self, step: EntryPoint) -> bool {
        self.memory.has_entry(step)
    }

    fn run_entry(&mut self, step: EntryPoint, tokens: &[i32]) -> Result<()> {
        self.drop_oldest_rows(tokens.len() as u64)?;
        self.memory.forward(&self.model, step, tokens, self.rows)?;
        self.rows += tokens.len() as u64;
        Ok(())
    }

    /// Feeds tokens of a prompt that others follow.
    fn step_without_logits(&mut self, tokens: &[i32]) -> Result<()> {
        self.drop_oldest_rows(tokens.len() as u64)?;
        self.memory.feed_without_logits(&self.model, tokens, self.rows)?;
        self.rows += tokens.len() as u64;
        Ok(())
    }

    /// Checks that these tokens may be computed in one call, as those of a sequence of a batch.
    pub(crate) fn check_piece(&self, tokens: &[i32]) -> Result<()> {
        self.check_tokens(tokens)?;
        let (n, most) = (tokens.len(), self.tokens_per_call());
        // What does not drop rows is held against the context above.
        if n > most && self.visible_rows().is_some() {
            return Err(Error::PieceTokens { n, most });
        }
        Ok(())
    }

    /// Makes ready for `tokens` more checked tokens, as a sequence of a batch: gives their rows memory.
    pub(crate) fn join_batch(&mut self, tokens: usize) -> Result<BatchMember<'_>> {
        self.drop_oldest_rows(tokens as u64)?;
        self.memory.join_batch(&self.model, self.rows, tokens as u64)
    }

    /// Undoes the reservation of `join_batch`, of a batch that was not computed; returns the number of pages
    /// that `tokens` tokens need.
    pub(crate) fn rollback_batch(&mut self, tokens: usize) -> usize {
        self.shrink();
        self.memory.missing_pages(self.rows, tokens as u64)
    }

    /// Counts the tokens that a batch has computed; the logits of the last one, where they are known.
    pub(crate) fn leave_batch(&mut self, tokens: usize, logits: Option<&[f32]>) -> Result<()> {
        self.rows += tokens as u64;
        self.memory.leave_batch(&self.model, logits)
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        self.memory.chunk_logits(n)
    }

    /// The state's initial values, by the model's own entry point where it has one, else by its table.
    fn initialise(&mut self, step: EntryPoint) -> Result<()> {
        self.memory.initialise(&self.model, step)?;
        self.write_slot()
    }

    /// The adapter of the sequence, if it has one.
    pub fn adapter(&self) -> Option<&LoadedAdapter> {
        self.adapter.as_ref()
    }

    /// Chooses the adapter of a sequence that has no tokens yet; it stays chosen when the session is reset.
    /// Others of the model, and those of sessions in the same batch, do not matter.
    pub fn set_adapter(&mut self, adapter: Option<&LoadedAdapter>) -> Result<()> {
        if self.past() > 0 {
            return Err(Error::AdapterTooLate { past: self.past() });
        }
        if let Some(adapter) = adapter.filter(|adapter| !adapter.belongs_to(&self.model)) {
            return Err(Error::ForeignAdapter { adapter: adapter.name().to_string() });
        }
        self.adapter = adapter.cloned();
        self.write_slot()
    }

    /// Tells the state which slot the adapter has.
    fn write_slot(&mut self) -> Result<()> {
        let Some(state) = self.model.table().slot_state() else { return Ok(()) };
        self.memory.write_word(state, self.adapter.as_ref().map_or(0, LoadedAdapter::number))
    }
}

impl Model {
    /// The model's tokenizer as the compiler packed it.
    pub fn tokenizer(&self) -> Option<&[u8]> {
        self.section(section::TOKENIZER)
    }

    /// The model's chat template as the compiler packed it.
    pub fn chat(&self) -> Option<&[u8]> {
        self.section(section::CHAT)
    }
}
