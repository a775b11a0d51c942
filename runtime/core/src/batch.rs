//! Sequences of one model computed together: the weights are read once for all of them.

use mlcc_abi::{EntryPoint, Sequence};

use crate::buffer::AlignedBuffer;
use crate::device::{BatchCall, DeviceBatch, missing_entry_error};
use crate::top_k::{AcceptTopK, TokenCandidate};
use crate::trace::{StepTimes, StepTrace};
use crate::{CachePages, Error, Model, Result, Session};

/// Feeds tokens of several sessions in one step: to each its next token, or a piece of its prompt, or a
/// draft. Sessions may join and leave between steps, each with as many tokens as it has; nothing is allocated
/// in the steady state.
///
/// ```no_run
/// # use mlcc_runtime::{LoadOptions, Model, SessionInput};
/// # fn main() -> Result<(), mlcc_runtime::Error> {
/// let model = Model::load("model.so", &LoadOptions::default())?; // not built with --max-batch 1
/// let (mut a, mut b) = (model.session()?, model.session()?);
/// a.prefill(&[1, 2, 3])?;
/// let mut batch = model.batch(2)?;
/// // The next token of one, the prompt of the other; 2 rows of logits, also a.logits() and b.logits().
/// let logits = batch.step(&mut [SessionInput::new(&mut a, &[5]), SessionInput::new(&mut b, &[4, 5])])?;
/// // One token of each; again 2 rows.
/// let logits = batch.decode(&mut [&mut a, &mut b], &[5, 6])?;
/// # let _ = logits; Ok(()) }
/// ```
pub struct SessionBatch {
    model: Model,
    /// The device that runs it, if it is not the CPU.
    on_device: Option<Box<dyn DeviceBatch>>,
    /// Most sequences in one step.
    max_sequences: usize,
    /// Room for the tokens of a step.
    tokens: AlignedBuffer,
    /// Room for as many row numbers.
    output_rows: AlignedBuffer,
    /// Logits of as many rows as a step has requested yet.
    logits: AlignedBuffer,
    /// The number of their floats after the last step.
    logits_len: usize,
    sequences: Vec<Sequence>,
    /// The tokens of a step, and the numbers of those whose logits are wanted, until they are copied to where
    /// they are aligned.
    token_ids: Vec<i32>,
    row_indices: Vec<i32>,
    /// The warning of a session that ran alone ([`Session::performance_warning`]).
    session_warning: Option<String>,
    /// True, for each output row of a step, if its top-k candidates were enough.
    accepted: Vec<bool>,
    /// Times of the items of steps, if they are taken.
    trace: Option<Box<StepTrace>>,
}

// SAFETY: the pointers in `sequences` mean something only within a call of `decode` or `step`, which takes
// them from its arguments.
unsafe impl Send for SessionBatch {}

/// The input of a session in a step, which has one piece of each: the session is borrowed.
///
/// ```compile_fail,E0499
/// # use mlcc_runtime::{Session, SessionBatch, SessionInput};
/// fn twice(batch: &mut SessionBatch, session: &mut Session) {
///     let _ = batch.step(&mut [SessionInput::new(session, &[1]), SessionInput::new(session, &[2])]);
/// }
/// ```
pub struct SessionInput<'a> {
    pub session: &'a mut Session,
    /// The tokens, at least one.
    pub tokens: &'a [i32],
    pub outputs: OutputRows,
}

/// The tokens of a piece whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputRows {
    /// None: more of the prompt follows. The session's own logits stay those of an earlier token.
    Nothing,
    Last,
    /// All of them, as to hold a draft or a text against the model.
    All,
}

impl<'a> SessionInput<'a> {
    /// Tokens with logits of the last one.
    pub fn new(session: &'a mut Session, tokens: &'a [i32]) -> SessionInput<'a> {
        SessionInput { session, tokens, outputs: OutputRows::Last }
    }

    fn output_count(&self) -> usize {
        match self.outputs {
            OutputRows::Nothing => 0,
            OutputRows::Last => 1,
            OutputRows::All => self.tokens.len(),
        }
    }
}

impl Model {
    /// Most sequences that a [`SessionBatch`] of this model computes together; 1 if it was built without.
    pub fn max_batch(&self) -> u64 {
        match self.device().has_batch(EntryPoint::DecodeBatch) {
            true => self.plan().batch.max(1),
            false => 1,
        }
    }

    /// Most tokens in one [`SessionBatch::step`].
    pub fn max_step_tokens(&self) -> usize {
        self.plan().chunk.max(self.max_batch()) as usize
    }

    /// Memory to compute up to `most` sequences together.
    pub fn batch(&self, most: usize) -> Result<SessionBatch> {
        if self.text_width() > 0 {
            return Err(Error::TextsOnly { path: self.artifact().path().to_path_buf() });
        }
        if most == 0 || most as u64 > self.max_batch() {
            let path = self.artifact().path().to_path_buf();
            return Err(Error::BatchSize { path, n: most, most: self.max_batch() });
        }
        let rows = self.max_step_tokens();
        let on_device = match self.max_batch() {
            1 => None,
            _ => std::sync::Arc::clone(self.device()).batch(self)?,
        };
        Ok(SessionBatch {
            model: self.clone(),
            on_device,
            max_sequences: most,
            tokens: AlignedBuffer::integers("the tokens of a step", rows as u64)?,
            output_rows: AlignedBuffer::integers("the wanted rows of a step", rows as u64)?,
            logits: AlignedBuffer::floats(
                "the logits of a batch",
                self.plan().vocab.saturating_mul(most as u64),
            )?,
            logits_len: 0,
            sequences: Vec::with_capacity(most),
            token_ids: Vec::with_capacity(rows),
            row_indices: Vec::with_capacity(rows),
            session_warning: None,
            accepted: Vec::with_capacity(most),
            trace: None,
        })
    }
}

impl SessionBatch {
    /// Most sequences in one step.
    pub fn max_sequences(&self) -> usize {
        self.max_sequences
    }

    /// The result of the last step or call of [`SessionBatch::decode`]; empty after an error.
    pub fn logits(&self) -> &[f32] {
        &self.logits.as_floats()[..self.logits_len]
    }

    /// Something that makes the steps slower than they could be and that the user may want to know, if there
    /// is any: as [`Session::performance_warning`], also of sessions that ran alone.
    pub fn performance_warning(&self) -> Option<String> {
        self.on_device
            .as_ref()
            .and_then(|device| device.performance_warning())
            .or_else(|| self.session_warning.clone())
    }

    /// Keeps the warning of a session that ran alone; the first one is enough, as all have the same device.
    fn keep_performance_warning(&mut self, session: &Session) {
        if self.session_warning.is_none() {
            self.session_warning = session.performance_warning().map(String::from);
        }
    }

    /// Takes times of the step's items from now on, or no longer; gives what was taken so far. Single
    /// sequences take their own ([`Session::trace`]).
    pub fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.into_times());
        self.trace = on.then(|| Box::new(StepTrace::new(self.model.threads())));
        taken
    }

    /// Feeds `tokens[i]` to `sessions[i]` and returns the logits, one row of `vocab` floats per session;
    /// every session has its own as well ([`Session::logits`]). If a token or session is refused, no session
    /// has changed.
    pub fn decode(&mut self, sessions: &mut [&mut Session], tokens: &[i32]) -> Result<&[f32]> {
        self.logits_len = 0;
        let n = sessions.len();
        if n == 0 || n != tokens.len() {
            return Err(Error::BatchTokens { sessions: n, tokens: tokens.len() });
        }
        let fed = || sessions.iter().map(|s| &**s).zip(tokens.chunks(1));
        self.check_inputs(fed())?;
        let vocab = self.model.vocab();
        if n == 1 || !self.has_entry(EntryPoint::DecodeBatch) {
            let one = sessions[0].decode(tokens[0]).map_err(|e| single_sequence_error(0, e))?;
            self.logits.floats_mut()[..vocab].copy_from_slice(one);
            self.logits_len = vocab;
            self.keep_performance_warning(sessions[0]);
            return Ok(self.logits());
        }
        let mut members = sessions.iter_mut().map(|s| (&mut **s, 1));
        if let Err(error) = self.run_entry(EntryPoint::DecodeBatch, &mut members, tokens, &[], None) {
            return Err(self.explain_refusal(error, sessions.iter_mut().map(|s| (&mut **s, 1))));
        }
        let logits = &self.logits.as_floats()[..n * vocab];
        for (session, row) in sessions.iter_mut().zip(logits.chunks_exact(vocab)) {
            session.leave_batch(1, Some(row))?;
        }
        self.logits_len = n * vocab;
        Ok(self.logits())
    }

    /// Feeds every session its tokens and returns the logits that are wanted: rows of `vocab` floats, in the
    /// order of `rows` and of the tokens in each. A session has the logits of its last token as well
    /// ([`Session::logits`]), unless nothing was wanted of it. All tokens together may be as many as
    /// [`Model::max_step_tokens`]. If a token or session is refused, no session has changed.
    pub fn step(&mut self, rows: &mut [SessionInput<'_>]) -> Result<&[f32]> {
        self.step_accepting(rows, None)
    }

    /// Runs a step like [`SessionBatch::step`]. Where the device finds the top-k candidates itself (steps of
    /// one token of each session), `enough` gets those of each row by its number, as in
    /// [`Session::decode_top_k`]; rows for which it returns true are not copied to the host and are undefined
    /// in the result, and their sessions have the logits of an earlier token.
    pub fn step_top_k(
        &mut self,
        rows: &mut [SessionInput<'_>],
        enough: &mut dyn FnMut(usize, &[TokenCandidate]) -> bool,
    ) -> Result<&[f32]> {
        self.step_accepting(rows, Some(enough))
    }

    fn step_accepting(
        &mut self,
        rows: &mut [SessionInput<'_>],
        enough: Option<AcceptTopK<'_>>,
    ) -> Result<&[f32]> {
        self.logits_len = 0;
        self.accepted.clear();
        if self.model.plan().decoder_start == 0 {
            self.run_step(rows, enough)?;
            return Ok(self.logits());
        }
        self.check_inputs(rows.iter().map(|r| (&*r.session, r.tokens)))?;
        let new: Vec<bool> = rows.iter().map(|r| r.session.past() == 0).collect();
        let result = read_sources(rows).and_then(|()| self.run_step(rows, enough));
        if result.is_err() {
            // The state before the call.
            let begun = rows.iter_mut().zip(new).filter(|(_, new)| *new);
            begun.for_each(|(r, _)| _ = r.session.reset());
        }
        result?;
        Ok(self.logits())
    }

    /// A step of tokens that are not of source texts.
    fn run_step(&mut self, rows: &mut [SessionInput<'_>], enough: Option<AcceptTopK<'_>>) -> Result<()> {
        let n: usize = rows.iter().map(|r| r.tokens.len()).sum();
        if rows.is_empty() {
            return Err(Error::BatchTokens { sessions: 0, tokens: 0 });
        }
        self.check_inputs(rows.iter().map(|r| (&*r.session, r.tokens)))?;
        let most = self.model.max_step_tokens();
        if n > most {
            return Err(Error::StepTokens { n, most });
        }
        let (vocab, wanted) =
            (self.model.vocab(), rows.iter().map(SessionInput::output_count).sum::<usize>());
        // The code makes those of one row at least.
        self.reserve_logits(wanted.max(1))?;
        if !self.has_entry(EntryPoint::Step) || matches!(rows, [SessionInput { tokens: [_], .. }]) {
            return self.step_single(rows, enough);
        }
        // Kernels for one query are faster than those for several with one.
        let one_each = rows.iter().all(|r| r.tokens.len() == 1 && r.outputs != OutputRows::Nothing);
        let kind = if one_each { EntryPoint::DecodeBatch } else { EntryPoint::Step };
        if !self.has_entry(kind) {
            return self.step_single(rows, enough);
        }
        let (mut fed, mut numbers) =
            (std::mem::take(&mut self.token_ids), std::mem::take(&mut self.row_indices));
        fed.clear();
        numbers.clear();
        for piece in rows.iter() {
            fed.extend_from_slice(piece.tokens);
            numbers.extend(fed.len() as i32 - piece.output_count() as i32..fed.len() as i32);
        }
        let mut members = rows.iter_mut().map(|r| (&mut *r.session, r.tokens.len()));
        let mut told = std::mem::take(&mut self.accepted);
        let mut noted = enough.map(|enough| record_accepted(enough, &mut told));
        let asked = noted.as_mut().map(|noted| noted as AcceptTopK<'_>);
        let result = self.run_entry(kind, &mut members, &fed, &numbers, asked);
        drop(noted);
        (self.token_ids, self.row_indices, self.accepted) = (fed, numbers, told);
        if let Err(error) = result {
            let members = rows.iter_mut().map(|r| (&mut *r.session, r.tokens.len()));
            return Err(self.explain_refusal(error, members));
        }
        let mut logits = self.logits.as_floats()[..wanted * vocab].chunks_exact(vocab);
        for (index, piece) in rows.iter_mut().enumerate() {
            let last = piece.output_count().checked_sub(1).and_then(|at| logits.nth(at));
            // Only steps of a row each ask.
            let copied = !self.accepted.get(index).copied().unwrap_or(false);
            piece.session.leave_batch(piece.tokens.len(), last.filter(|_| copied))?;
        }
        self.logits_len = wanted * vocab;
        Ok(())
    }

    fn has_entry(&self, step: EntryPoint) -> bool {
        self.model.device().has_batch(step)
    }

    /// Checks that the sessions may compute these tokens; nothing has changed yet.
    fn check_inputs<'a>(&self, fed: impl ExactSizeIterator<Item = (&'a Session, &'a [i32])>) -> Result<()> {
        let n = fed.len();
        if n > self.max_sequences {
            let path = self.model.artifact().path().to_path_buf();
            return Err(Error::BatchSize { path, n, most: self.max_sequences as u64 });
        }
        for (index, (session, tokens)) in fed.enumerate() {
            if !session.model().is_same(&self.model) {
                return Err(Error::BatchModel { index });
            }
            session.check_piece(tokens).map_err(|e| sequence_error(index, e))?;
        }
        Ok(())
    }

    /// The error of a step that was not computed. Where pages were missing, or memory for them, those that
    /// some sequences got are free again, and the numbers are those of the whole step.
    fn explain_refusal<'s>(
        &self,
        error: Error,
        members: impl Iterator<Item = (&'s mut Session, usize)>,
    ) -> Error {
        let refused = match &error {
            // Of a device, for what is no sequence's own: logits of the step.
            Error::OutOfMemory { what, bytes } => Some((*what, *bytes)),
            Error::BatchSequence { source, .. } => match **source {
                Error::NoPages { .. } => None,
                Error::OutOfMemory { what, bytes } => Some((what, bytes)),
                _ => return error,
            },
            _ => return error,
        };
        let wanted = members.map(|(session, tokens)| session.rollback_batch(tokens)).sum();
        let CachePages { all, free, .. } = self.model.cache_pages();
        match refused {
            Some((what, bytes)) => Error::OutOfMemory { what, bytes },
            None => Error::NoPages { wanted, free, pages: all },
        }
    }

    /// Room for the logits of this many rows.
    fn reserve_logits(&mut self, rows: usize) -> Result<()> {
        let floats = self.model.plan().vocab.saturating_mul(rows as u64);
        if (self.logits.len() as u64) < floats.saturating_mul(4) {
            self.logits = AlignedBuffer::floats("the logits of a step", floats)?;
        }
        Ok(())
    }

    /// The step of a single token, or of an artifact that has no code for several sequences, and so takes a
    /// single one.
    fn step_single(
        &mut self,
        rows: &mut [SessionInput<'_>],
        mut enough: Option<AcceptTopK<'_>>,
    ) -> Result<()> {
        let (vocab, mut at) = (self.model.vocab(), 0);
        for (index, piece) in rows.iter_mut().enumerate() {
            let session = &mut *piece.session;
            let logits = match (piece.outputs, piece.tokens, &mut enough) {
                (OutputRows::Last, &[token], Some(enough)) => {
                    let one = session.decode_top_k(token, &mut |likeliest| enough(index, likeliest));
                    match one.map_err(|e| single_sequence_error(index, e))? {
                        Some(logits) => Ok(logits),
                        None => {
                            at += vocab;
                            self.keep_performance_warning(session);
                            continue;
                        }
                    }
                }
                (OutputRows::Nothing | OutputRows::Last, tokens, _) => session.prefill(tokens),
                (OutputRows::All, tokens, _) => session.prefill_logits(tokens),
            };
            let logits = logits.map_err(|e| single_sequence_error(index, e))?;
            let floats = match piece.outputs {
                OutputRows::Nothing => 0,
                OutputRows::Last | OutputRows::All => logits.len(),
            };
            self.logits.floats_mut()[at..at + floats].copy_from_slice(&logits[..floats]);
            at += floats;
            self.keep_performance_warning(session);
        }
        debug_assert_eq!(at % vocab, 0);
        self.logits_len = at;
        Ok(())
    }

    /// Runs an entry point for checked tokens of `members`, with the given number of tokens of each. There is
    /// room for the logits.
    fn run_entry(
        &mut self,
        step: EntryPoint,
        members: &mut dyn Iterator<Item = (&mut Session, usize)>,
        tokens: &[i32],
        wanted: &[i32],
        enough: Option<AcceptTopK<'_>>,
    ) -> Result<()> {
        self.sequences.clear();
        let (mut first, mut adapted) = (0, false);
        for (index, (session, rows)) in members.enumerate() {
            adapted |= session.adapter().is_some();
            let member = session.join_batch(rows).map_err(|e| sequence_error(index, e))?;
            self.sequences.push(Sequence { first, ..member.sequence });
            first += rows as i64;
        }
        // Numbers of all rows: behind those that are wanted any.
        let filled = self.output_rows.copy_padded(tokens.len(), wanted);
        let n_outputs = if step == EntryPoint::DecodeBatch { tokens.len() } else { wanted.len().max(1) };
        let call = |tokens| BatchCall {
            sequences: &self.sequences,
            tokens,
            output_rows: filled,
            n_outputs,
            adapted,
        };
        if let Some(device) = &mut self.on_device {
            return device.run(step, &call(tokens), &mut self.logits, enough);
        }
        let cpu = self.model.device().cpu().ok_or_else(|| missing_entry_error(&self.model, step))?;
        let call = call(self.tokens.copy_from(tokens));
        // SAFETY: the sessions are borrowed mutably, so the states and tables that were lent are alive,
        // distinct and without another user, and so are the pages for new rows; each has memory for its rows,
        // tokens and numbers of rows are in range, and there are as many as the plan permits. The logits have
        // room for the rows that are wanted.
        unsafe { cpu.run_batch(&self.model, step, &call, &mut self.logits, self.trace.as_deref_mut()) }
    }
}

/// Reads the source texts of the sequences that begin with this step, in order; the tokens behind them are
/// left.
fn read_sources(rows: &mut [SessionInput<'_>]) -> Result<()> {
    for (index, piece) in rows.iter_mut().enumerate() {
        piece.tokens = piece.session.read_source(piece.tokens).map_err(|e| sequence_error(index, e))?;
    }
    Ok(())
}

/// Asks, and keeps the answers.
fn record_accepted<'a>(
    enough: AcceptTopK<'a>,
    told: &'a mut Vec<bool>,
) -> impl FnMut(usize, &[TokenCandidate]) -> bool + 'a {
    move |row, likeliest| {
        let said = enough(row, likeliest);
        told.push(said);
        said
    }
}

/// The error of a sequence that runs by itself: its missing pages are those of the step.
fn single_sequence_error(index: usize, source: Error) -> Error {
    match source {
        Error::NoPages { .. } | Error::OutOfMemory { .. } => source,
        source => sequence_error(index, source),
    }
}

fn sequence_error(index: usize, source: Error) -> Error {
    Error::BatchSequence { index, source: Box::new(source) }
}
