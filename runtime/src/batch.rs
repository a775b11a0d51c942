//! Sequences of one model decoded together: the weights are read once for all of them.

use mlcc_abi::{Ctx, Sequence, StepFn};

use crate::buffer::Buffer;
use crate::session::Step;
use crate::trace::{StepTimes, Trace};
use crate::{Error, Model, Result, Session};

/// Decodes one token of each of several sessions in one step. Sessions may join and leave between steps, each with as many
/// tokens as it has; nothing is allocated in the steady state.
///
/// ```no_run
/// # use mlcc_runtime::{LoadOptions, Model};
/// # fn main() -> Result<(), mlcc_runtime::Error> {
/// let model = Model::load("model.so", &LoadOptions::default())?; // not built with --max-batch 1
/// let (mut a, mut b) = (model.session()?, model.session()?);
/// a.prefill(&[1, 2, 3])?;
/// b.prefill(&[4])?;
/// let mut batch = model.batch(2)?;
/// let logits = batch.decode(&mut [&mut a, &mut b], &[5, 6])?; // 2 rows, also a.logits() and b.logits()
/// # let _ = logits; Ok(()) }
/// ```
pub struct Batch {
    model: Model,
    entry: Option<StepFn>,
    /// Most sequences in one step.
    most: usize,
    /// `most` tokens.
    tokens: Buffer,
    /// `most * vocab` floats.
    logits: Buffer,
    sequences: Vec<Sequence>,
    /// Times of the items of steps, if they are taken.
    trace: Option<Box<Trace>>,
}

// SAFETY: the pointers in `sequences` mean something only within a call of `decode`, which takes them from its arguments.
unsafe impl Send for Batch {}

impl Model {
    fn batch_entry(&self) -> Option<StepFn> {
        self.device().cpu()?.entry(Step::DecodeBatch)
    }

    /// Most sequences that a [`Batch`] of this model decodes together; 1 if it was built without.
    pub fn max_batch(&self) -> u64 {
        match self.batch_entry() {
            Some(_) => self.plan().batch.max(1),
            None => 1,
        }
    }

    /// Memory to decode up to `most` sequences together.
    pub fn batch(&self, most: usize) -> Result<Batch> {
        if most == 0 || most as u64 > self.max_batch() {
            let path = self.artifact().path().to_path_buf();
            return Err(Error::BatchSize { path, n: most, most: self.max_batch() });
        }
        let floats = self.plan().vocab.saturating_mul(most as u64);
        Ok(Batch {
            model: self.clone(),
            entry: self.batch_entry(),
            most,
            tokens: Buffer::integers("the tokens of a batch", most as u64)?,
            logits: Buffer::floats("the logits of a batch", floats)?,
            sequences: Vec::with_capacity(most),
            trace: None,
        })
    }
}

impl Batch {
    /// Most sequences in one step.
    pub fn max_sequences(&self) -> usize {
        self.most
    }

    /// Takes times of the step's items from now on, or no longer; gives what was taken so far. Single sequences take their
    /// own ([`Session::trace`]).
    pub fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.times());
        self.trace = on.then(|| Box::new(Trace::new(self.model.threads())));
        taken
    }

    /// Feeds `tokens[i]` to `sessions[i]` and returns the logits, one row of `vocab` floats per session; every session has
    /// its own as well ([`Session::logits`]). If a token or session is refused, no session has changed its position.
    pub fn decode(&mut self, sessions: &mut [&mut Session], tokens: &[i32]) -> Result<&[f32]> {
        let n = sessions.len();
        if n == 0 || n != tokens.len() {
            return Err(Error::BatchTokens { sessions: n, tokens: tokens.len() });
        }
        if n > self.most {
            let path = self.model.artifact().path().to_path_buf();
            return Err(Error::BatchSize { path, n, most: self.most as u64 });
        }
        if let Some(index) = sessions.iter().position(|s| !s.model().is_same(&self.model)) {
            return Err(Error::BatchModel { index });
        }
        let vocab = self.model.vocab();
        let (Some(cpu), Some(entry), 2..) = (self.model.device().cpu(), self.entry, n) else {
            let one = sessions[0].decode(tokens[0]).map_err(|e| of_sequence(0, e))?;
            self.logits.floats_mut()[..vocab].copy_from_slice(one);
            return Ok(&self.logits.as_floats()[..vocab]);
        };
        self.sequences.clear();
        let mut arena = std::ptr::null_mut();
        for (index, (session, &token)) in sessions.iter_mut().zip(tokens).enumerate() {
            let member = session.join_batch(token).map_err(|e| of_sequence(index, e))?;
            self.sequences.push(member.sequence);
            arena = member.arena;
        }
        let mut ctx = Ctx {
            weights: self.model.weights().as_ptr(),
            arena,
            state: std::ptr::null_mut(),
            tokens: self.tokens.hold(tokens).as_ptr(),
            n: n as i64,
            past: 0,
            logits: self.logits.as_mut_ptr().cast(),
            probs: std::ptr::null_mut(),
            barrier: None,
            barrier_self: std::ptr::null_mut(),
            temperature: 1.0,
            reserved0: 0,
            trace: None,
            trace_self: std::ptr::null_mut(),
            sequences: self.sequences.as_ptr(),
            take: None,
            take_self: std::ptr::null_mut(),
        };
        // SAFETY: `sessions` is borrowed mutably, so the states and the arena that were lent are alive, distinct and used by
        // nobody else; each has memory for one more row, tokens are in range, and there are at most `batch` of them. The
        // logits have room for as many rows.
        unsafe { cpu.run(&self.model, Step::DecodeBatch, entry, &mut ctx, self.trace.as_deref_mut()) }?;
        let logits = &self.logits.as_floats()[..n * vocab];
        for (session, row) in sessions.iter_mut().zip(logits.chunks_exact(vocab)) {
            session.leave_batch(row)?;
        }
        Ok(logits)
    }
}

fn of_sequence(index: usize, source: Error) -> Error {
    Error::BatchSequence { index, source: Box::new(source) }
}
