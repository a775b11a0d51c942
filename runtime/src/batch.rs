//! Sequences of one model computed together: the weights are read once for all of them.

use mlcc_abi::Sequence;

use crate::buffer::AlignedBuffer;
use crate::device::{BatchCall, DeviceBatch, missing};
use crate::likely::{AcceptTopK, TokenCandidate};
use crate::session::EntryPoint;
use crate::trace::{StepTimes, StepTrace};
use crate::{CachePages, Error, Model, Result, Session};

/// Feeds tokens of several sessions in one step: to each its next token, or a piece of its prompt, or a draft. Sessions may
/// join and leave between steps, each with as many tokens as it has; nothing is allocated in the steady state.
///
/// ```no_run
/// # use mlcc_runtime::{LoadOptions, Model, Rows, Want};
/// # fn main() -> Result<(), mlcc_runtime::Error> {
/// let model = Model::load("model.so", &LoadOptions::default())?; // not built with --max-batch 1
/// let (mut a, mut b) = (model.session()?, model.session()?);
/// a.prefill(&[1, 2, 3])?;
/// let mut batch = model.batch(2)?;
/// // The next token of one, the prompt of the other; 2 rows of logits, also a.logits() and b.logits().
/// let logits = batch.step(&mut [Rows::of(&mut a, &[5]), Rows::of(&mut b, &[4, 5])])?;
/// // One token of each; again 2 rows.
/// let logits = batch.decode(&mut [&mut a, &mut b], &[5, 6])?;
/// # let _ = logits; Ok(()) }
/// ```
pub struct SessionBatch {
    model: Model,
    /// Where it is not the CPU that runs it.
    on_device: Option<Box<dyn DeviceBatch>>,
    /// Most sequences in one step.
    most: usize,
    /// As many tokens as a step takes.
    tokens: AlignedBuffer,
    /// As many numbers of them.
    wanted: AlignedBuffer,
    /// Of as many rows as a step has asked for yet.
    logits: AlignedBuffer,
    /// How many floats of them the last step has made.
    made: usize,
    sequences: Vec<Sequence>,
    /// The tokens of a step, and the numbers of those whose logits are wanted, until they are copied to where they are aligned.
    fed: Vec<i32>,
    rows: Vec<i32>,
    /// What a session that went alone says of itself ([`Session::notice`]).
    of_one: Option<String>,
    /// By wanted row of a step, whether its likeliest tokens were enough.
    told: Vec<bool>,
    /// Times of the items of steps, if they are taken.
    trace: Option<Box<StepTrace>>,
}

// SAFETY: the pointers in `sequences` mean something only within a call of `decode` or `step`, which takes them from its
// arguments.
unsafe impl Send for SessionBatch {}

/// What a step feeds to a session, which has one piece in a step: it is borrowed.
///
/// ```compile_fail,E0499
/// # use mlcc_runtime::{Batch, Rows, Session};
/// fn twice(batch: &mut Batch, session: &mut Session) {
///     let _ = batch.step(&mut [Rows::of(session, &[1]), Rows::of(session, &[2])]);
/// }
/// ```
pub struct SessionInput<'a> {
    pub session: &'a mut Session,
    /// At least one.
    pub tokens: &'a [i32],
    pub want: OutputRows,
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
    pub fn of(session: &'a mut Session, tokens: &'a [i32]) -> SessionInput<'a> {
        SessionInput { session, tokens, want: OutputRows::Last }
    }

    fn wanted(&self) -> usize {
        match self.want {
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
            most,
            tokens: AlignedBuffer::integers("the tokens of a step", rows as u64)?,
            wanted: AlignedBuffer::integers("the wanted rows of a step", rows as u64)?,
            logits: AlignedBuffer::floats(
                "the logits of a batch",
                self.plan().vocab.saturating_mul(most as u64),
            )?,
            made: 0,
            sequences: Vec::with_capacity(most),
            fed: Vec::with_capacity(rows),
            rows: Vec::with_capacity(rows),
            of_one: None,
            told: Vec::with_capacity(most),
            trace: None,
        })
    }
}

impl SessionBatch {
    /// Most sequences in one step.
    pub fn max_sequences(&self) -> usize {
        self.most
    }

    /// What the last step or call of [`SessionBatch::decode`] has returned; nothing after an error.
    pub fn logits(&self) -> &[f32] {
        &self.logits.as_floats()[..self.made]
    }

    /// Something that makes the steps slower than they could be and that the user may want to know, if there is any: as
    /// [`Session::notice`], also of sessions that were fed alone.
    pub fn notice(&self) -> Option<String> {
        self.on_device.as_ref().and_then(|device| device.notice()).or_else(|| self.of_one.clone())
    }

    /// Keeps what a session says that has gone alone; the first one speaks for all, which have the same device.
    fn hear(&mut self, session: &Session) {
        if self.of_one.is_none() {
            self.of_one = session.notice().map(String::from);
        }
    }

    /// Takes times of the step's items from now on, or no longer; gives what was taken so far. Single sequences take their
    /// own ([`Session::trace`]).
    pub fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.times());
        self.trace = on.then(|| Box::new(StepTrace::new(self.model.threads())));
        taken
    }

    /// Feeds `tokens[i]` to `sessions[i]` and returns the logits, one row of `vocab` floats per session; every session has
    /// its own as well ([`Session::logits`]). If a token or session is refused, no session has changed.
    pub fn decode(&mut self, sessions: &mut [&mut Session], tokens: &[i32]) -> Result<&[f32]> {
        self.made = 0;
        let n = sessions.len();
        if n == 0 || n != tokens.len() {
            return Err(Error::BatchTokens { sessions: n, tokens: tokens.len() });
        }
        let fed = || sessions.iter().map(|s| &**s).zip(tokens.chunks(1));
        self.check(fed())?;
        let vocab = self.model.vocab();
        if n == 1 || !self.has(EntryPoint::DecodeBatch) {
            let one = sessions[0].decode(tokens[0]).map_err(|e| of_the_only(0, e))?;
            self.logits.floats_mut()[..vocab].copy_from_slice(one);
            self.made = vocab;
            self.hear(sessions[0]);
            return Ok(self.logits());
        }
        let mut members = sessions.iter_mut().map(|s| (&mut **s, 1));
        if let Err(error) = self.run(EntryPoint::DecodeBatch, &mut members, tokens, &[], None) {
            return Err(self.refused(error, sessions.iter_mut().map(|s| (&mut **s, 1))));
        }
        let logits = &self.logits.as_floats()[..n * vocab];
        for (session, row) in sessions.iter_mut().zip(logits.chunks_exact(vocab)) {
            session.leave_batch(1, Some(row))?;
        }
        self.made = n * vocab;
        Ok(self.logits())
    }

    /// Feeds every session its tokens and returns the logits that are wanted: rows of `vocab` floats, in the order of `rows`
    /// and of the tokens in each. A session has the logits of its last token as well ([`Session::logits`]), unless nothing was
    /// wanted of it. All tokens together may be as many as [`Model::max_step_tokens`]. If a token or session is refused, no
    /// session has changed.
    pub fn step(&mut self, rows: &mut [SessionInput<'_>]) -> Result<&[f32]> {
        self.step_with(rows, None)
    }

    /// As [`SessionBatch::step`]. Where the device finds the likeliest next tokens itself (steps of one token of each session), `enough` gets those of
    /// each row by its number, as in [`Session::decode_likeliest`]; rows of which it says true are not copied to the host and undefined in what
    /// is returned, and their sessions have the logits of an earlier token.
    pub fn step_likeliest(
        &mut self,
        rows: &mut [SessionInput<'_>],
        enough: &mut dyn FnMut(usize, &[TokenCandidate]) -> bool,
    ) -> Result<&[f32]> {
        self.step_with(rows, Some(enough))
    }

    fn step_with(&mut self, rows: &mut [SessionInput<'_>], enough: Option<AcceptTopK<'_>>) -> Result<&[f32]> {
        self.made = 0;
        self.told.clear();
        if self.model.plan().decoder_start == 0 {
            self.step_of(rows, enough)?;
            return Ok(self.logits());
        }
        self.check(rows.iter().map(|r| (&*r.session, r.tokens)))?;
        let new: Vec<bool> = rows.iter().map(|r| r.session.past() == 0).collect();
        let result = read_sources(rows).and_then(|()| self.step_of(rows, enough));
        if result.is_err() {
            // As if nothing had been fed.
            let begun = rows.iter_mut().zip(new).filter(|(_, new)| *new);
            begun.for_each(|(r, _)| _ = r.session.reset());
        }
        result?;
        Ok(self.logits())
    }

    /// A step of tokens that are not of source texts.
    fn step_of(&mut self, rows: &mut [SessionInput<'_>], enough: Option<AcceptTopK<'_>>) -> Result<()> {
        let n: usize = rows.iter().map(|r| r.tokens.len()).sum();
        if rows.is_empty() {
            return Err(Error::BatchTokens { sessions: 0, tokens: 0 });
        }
        self.check(rows.iter().map(|r| (&*r.session, r.tokens)))?;
        let most = self.model.max_step_tokens();
        if n > most {
            return Err(Error::StepTokens { n, most });
        }
        let (vocab, wanted) = (self.model.vocab(), rows.iter().map(SessionInput::wanted).sum::<usize>());
        // The code makes those of one row at least.
        self.make_room(wanted.max(1))?;
        if !self.has(EntryPoint::Rows) || matches!(rows, [SessionInput { tokens: [_], .. }]) {
            return self.one_by_one(rows, enough);
        }
        // Kernels for one query are faster than those for several with one.
        let one_each = rows.iter().all(|r| r.tokens.len() == 1 && r.want != OutputRows::Nothing);
        let kind = if one_each { EntryPoint::DecodeBatch } else { EntryPoint::Rows };
        if !self.has(kind) {
            return self.one_by_one(rows, enough);
        }
        let (mut fed, mut numbers) = (std::mem::take(&mut self.fed), std::mem::take(&mut self.rows));
        fed.clear();
        numbers.clear();
        for piece in rows.iter() {
            fed.extend_from_slice(piece.tokens);
            numbers.extend(fed.len() as i32 - piece.wanted() as i32..fed.len() as i32);
        }
        let mut members = rows.iter_mut().map(|r| (&mut *r.session, r.tokens.len()));
        let mut told = std::mem::take(&mut self.told);
        let mut noted = enough.map(|enough| noting(enough, &mut told));
        let asked = noted.as_mut().map(|noted| noted as AcceptTopK<'_>);
        let result = self.run(kind, &mut members, &fed, &numbers, asked);
        drop(noted);
        (self.fed, self.rows, self.told) = (fed, numbers, told);
        if let Err(error) = result {
            let members = rows.iter_mut().map(|r| (&mut *r.session, r.tokens.len()));
            return Err(self.refused(error, members));
        }
        let mut logits = self.logits.as_floats()[..wanted * vocab].chunks_exact(vocab);
        for (index, piece) in rows.iter_mut().enumerate() {
            let last = piece.wanted().checked_sub(1).and_then(|at| logits.nth(at));
            // Only steps of a row each ask.
            let copied = !self.told.get(index).copied().unwrap_or(false);
            piece.session.leave_batch(piece.tokens.len(), last.filter(|_| copied))?;
        }
        self.made = wanted * vocab;
        Ok(())
    }

    fn has(&self, step: EntryPoint) -> bool {
        self.model.device().has_batch(step)
    }

    /// Whether the sessions may be fed these tokens; nothing has changed yet.
    fn check<'a>(&self, fed: impl ExactSizeIterator<Item = (&'a Session, &'a [i32])>) -> Result<()> {
        let n = fed.len();
        if n > self.most {
            let path = self.model.artifact().path().to_path_buf();
            return Err(Error::BatchSize { path, n, most: self.most as u64 });
        }
        for (index, (session, tokens)) in fed.enumerate() {
            if !session.model().is_same(&self.model) {
                return Err(Error::BatchModel { index });
            }
            session.check_piece(tokens).map_err(|e| of_sequence(index, e))?;
        }
        Ok(())
    }

    /// The error of a step that was not computed. Where pages were missing, or memory for them, those that some sequences got are free again, and the
    /// numbers are those of the whole step.
    fn refused<'s>(&self, error: Error, members: impl Iterator<Item = (&'s mut Session, usize)>) -> Error {
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
        let wanted = members.map(|(session, tokens)| session.abandon_batch(tokens)).sum();
        let CachePages { all, free, .. } = self.model.cache_pages();
        match refused {
            Some((what, bytes)) => Error::OutOfMemory { what, bytes },
            None => Error::NoPages { wanted, free, pages: all },
        }
    }

    /// Logits of so many rows.
    fn make_room(&mut self, rows: usize) -> Result<()> {
        let floats = self.model.plan().vocab.saturating_mul(rows as u64);
        if (self.logits.len() as u64) < floats.saturating_mul(4) {
            self.logits = AlignedBuffer::floats("the logits of a step", floats)?;
        }
        Ok(())
    }

    /// The step of a single token, or of an artifact that has no code for several sequences, and so takes a single one.
    fn one_by_one(
        &mut self,
        rows: &mut [SessionInput<'_>],
        mut enough: Option<AcceptTopK<'_>>,
    ) -> Result<()> {
        let (vocab, mut at) = (self.model.vocab(), 0);
        for (index, piece) in rows.iter_mut().enumerate() {
            let session = &mut *piece.session;
            let logits = match (piece.want, piece.tokens, &mut enough) {
                (OutputRows::Last, &[token], Some(enough)) => {
                    let one = session.decode_likeliest(token, &mut |likeliest| enough(index, likeliest));
                    match one.map_err(|e| of_the_only(index, e))? {
                        Some(logits) => Ok(logits),
                        None => {
                            at += vocab;
                            self.hear(session);
                            continue;
                        }
                    }
                }
                (OutputRows::Nothing | OutputRows::Last, tokens, _) => session.prefill(tokens),
                (OutputRows::All, tokens, _) => session.prefill_logits(tokens),
            };
            let logits = logits.map_err(|e| of_the_only(index, e))?;
            let floats = match piece.want {
                OutputRows::Nothing => 0,
                OutputRows::Last | OutputRows::All => logits.len(),
            };
            self.logits.floats_mut()[at..at + floats].copy_from_slice(&logits[..floats]);
            at += floats;
            self.hear(session);
        }
        debug_assert_eq!(at % vocab, 0);
        self.made = at;
        Ok(())
    }

    /// Runs an entry point for checked tokens of `members`, so many of each. There is room for the logits.
    fn run(
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
            let member = session.join_batch(rows).map_err(|e| of_sequence(index, e))?;
            self.sequences.push(Sequence { first, ..member.sequence });
            first += rows as i64;
        }
        // Numbers of all rows: behind those that are wanted any.
        let filled = self.wanted.hold_with(tokens.len(), wanted);
        let n_wanted = if step == EntryPoint::DecodeBatch { tokens.len() } else { wanted.len().max(1) };
        let call =
            |tokens| BatchCall { sequences: &self.sequences, tokens, wanted: filled, n_wanted, adapted };
        if let Some(device) = &mut self.on_device {
            return device.run(step, &call(tokens), &mut self.logits, enough);
        }
        let cpu = self.model.device().cpu().ok_or_else(|| missing(&self.model, step))?;
        let call = call(self.tokens.hold(tokens));
        // SAFETY: the sessions are borrowed mutably, so the states and tables that were lent are alive, distinct and used by
        // nobody else, and so are the pages for new rows; each has memory for its rows, tokens and numbers of rows are in range, and there are as many as the plan
        // permits. The logits have room for the rows that are wanted.
        unsafe { cpu.run_batch(&self.model, step, &call, &mut self.logits, self.trace.as_deref_mut()) }
    }
}

/// The source texts of the sequences that begin with this step, one after the other; what is behind them is left.
fn read_sources(rows: &mut [SessionInput<'_>]) -> Result<()> {
    for (index, piece) in rows.iter_mut().enumerate() {
        piece.tokens = piece.session.read_source(piece.tokens).map_err(|e| of_sequence(index, e))?;
    }
    Ok(())
}

/// Asks, and keeps the answers.
fn noting<'a>(
    enough: AcceptTopK<'a>,
    told: &'a mut Vec<bool>,
) -> impl FnMut(usize, &[TokenCandidate]) -> bool + 'a {
    move |row, likeliest| {
        let said = enough(row, likeliest);
        told.push(said);
        said
    }
}

/// Of a sequence that is fed by itself: pages that it wants are all that the step wants.
fn of_the_only(index: usize, source: Error) -> Error {
    match source {
        Error::NoPages { .. } | Error::OutOfMemory { .. } => source,
        source => of_sequence(index, source),
    }
}

fn of_sequence(index: usize, source: Error) -> Error {
    Error::BatchSequence { index, source: Box::new(source) }
}
