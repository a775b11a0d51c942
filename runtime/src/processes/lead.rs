//! Rank 0 of processes: what it tells the others, and how they hear it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mlcc_abi::{Ctx, PAGE_ROWS, Sequence};

use super::ProcessGroup;
use super::wire::{MessageWriter, RankMessageKind, number};
use crate::session::EntryPoint;
use crate::{Error, Result};

/// First part of a message: its length, and as much of it as fits. Most messages are no longer.
const FIRST: usize = 4096;
/// A rank that has nothing to do hears so often that the others are there.
const PING: Duration = Duration::from_secs(1);

/// Rank 0. What it says goes one after the other: nothing comes between the exchanges of a step.
pub(crate) struct RankLeader {
    processes: ProcessGroup,
    line: Arc<Mutex<MessageWriter>>,
    ended: Arc<AtomicBool>,
    /// Once the others are ready to hear.
    pings: OnceLock<JoinHandle<()>>,
}

/// While it lives the others take a step.
pub(crate) struct StepGuard<'a> {
    _line: MutexGuard<'a, MessageWriter>,
}

impl RankLeader {
    pub fn new(processes: &ProcessGroup) -> RankLeader {
        let (line, ended, pings) = Default::default();
        RankLeader { processes: processes.clone(), line, ended, pings }
    }

    /// The others are ready to hear, and rank 0 has nothing more to do.
    pub fn start(&self) -> Result<()> {
        let (all, line, ended) = (self.processes.clone(), Arc::clone(&self.line), Arc::clone(&self.ended));
        let pings = std::thread::Builder::new()
            .name("mlcc-ranks".into())
            .spawn(move || ping(&all, &line, &ended))
            .map_err(|source| Error::Thread { index: 0, source })?;
        // Once, as it is loaded once.
        let _ = self.pings.set(pings);
        Ok(())
    }

    fn line(&self) -> MutexGuard<'_, MessageWriter> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the others something that they do by themselves.
    pub fn say(&self, write: impl FnOnce(&mut MessageWriter) -> &mut MessageWriter) {
        let mut line = self.line();
        write(&mut line);
        send(&self.processes, line.bytes());
    }

    /// As [`RankLeader::say`], of something that all do together.
    pub fn begin(&self, write: impl FnOnce(&mut MessageWriter) -> &mut MessageWriter) -> StepGuard<'_> {
        let mut line = self.line();
        write(&mut line);
        send(&self.processes, line.bytes());
        StepGuard { _line: line }
    }

    /// Asks for bytes of a rank.
    pub fn ask(
        &self,
        rank: usize,
        to: &mut [u8],
        write: impl FnOnce(&mut MessageWriter) -> &mut MessageWriter,
    ) {
        let mut line = self.line();
        write(&mut line);
        send(&self.processes, line.bytes());
        self.processes.hear(rank, to);
    }

    /// The others take a step too; `None` if each can take it alone.
    ///
    /// # Safety
    /// `ctx` fulfils the contract of the step.
    pub unsafe fn step(&self, step: EntryPoint, ctx: &Ctx) -> Option<StepGuard<'_>> {
        let number = number(step)?;
        let mut line = self.line();
        let message = line.begin(RankMessageKind::Step).number(number).number(ctx.past as u64);
        // SAFETY: by contract `n` tokens, and as many numbers of rows, if there are any.
        let numbers = |from: *const i32| match from.is_null() {
            true => &[][..],
            false => unsafe { std::slice::from_raw_parts(from, ctx.n.max(0) as usize) },
        };
        message.list(numbers(ctx.tokens)).list(numbers(ctx.wanted)).number(ctx.n_wanted as u64);
        let own =
            Sequence { state: ctx.state, page_table: ctx.page_table, past: ctx.past, first: 0, rows: ctx.n };
        let sequences = match ctx.sequences.is_null() {
            true => std::slice::from_ref(&own),
            // SAFETY: by contract.
            false => unsafe { std::slice::from_raw_parts(ctx.sequences, ctx.b as usize) },
        };
        message.number(u64::from(!ctx.sequences.is_null())).number(sequences.len() as u64);
        for sequence in sequences {
            let Sequence { state, page_table, past, first, rows } = sequence;
            message.number(state.addr() as u64);
            message.number(*past as u64).number(*first as u64).number(*rows as u64);
            let pages = match page_table.is_null() {
                true => &[][..],
                // SAFETY: by contract the sequence has pages up to its last row.
                false => unsafe {
                    std::slice::from_raw_parts(
                        *page_table,
                        (past + rows).cast_unsigned().div_ceil(PAGE_ROWS) as usize,
                    )
                },
            };
            message.list(pages);
        }
        send(&self.processes, line.bytes());
        Some(StepGuard { _line: line })
    }
}

impl Drop for RankLeader {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // A model that was never loaded as a whole is no model for the others either.
        let Some(pings) = self.pings.take() else { return };
        pings.thread().unpark();
        let _ = pings.join();
        self.say(|message| message.begin(RankMessageKind::End));
        self.processes.leave();
    }
}

/// Every rank says that it is there, unless something else is said.
fn ping(processes: &ProcessGroup, line: &Mutex<MessageWriter>, ended: &AtomicBool) {
    while !ended.load(Ordering::SeqCst) {
        std::thread::park_timeout(PING);
        // Who has the line is heard of.
        if let Ok(mut line) = line.try_lock()
            && !ended.load(Ordering::SeqCst)
        {
            send(processes, line.begin(RankMessageKind::Ping).bytes());
            processes.gather(&[0], processes.0.limit);
        }
    }
}

fn send(processes: &ProcessGroup, bytes: &[u8]) {
    let mut first = [0; FIRST];
    let (begin, rest) = bytes.split_at(bytes.len().min(FIRST - 8));
    first[..8].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    first[8..8 + begin.len()].copy_from_slice(begin);
    processes.tell(&first);
    if !rest.is_empty() {
        processes.tell(rest);
    }
}

impl ProcessGroup {
    /// Waits for the next message of rank 0.
    pub(crate) fn next(&self, bytes: &mut Vec<u8>) {
        bytes.resize(FIRST, 0);
        self.hear(0, bytes);
        let (len, rest) = bytes.split_at(8);
        let len = len.try_into().map_or(0, u64::from_le_bytes) as usize;
        debug_assert_eq!(rest.len(), FIRST - 8);
        bytes.drain(..8);
        let known = len.min(FIRST - 8);
        bytes.resize(len, 0);
        if len > known {
            self.hear(0, &mut bytes[known..]);
        }
    }

    /// Answers [`RankMessageKind::Ping`].
    pub(crate) fn sign(&self) {
        self.gather(&[0], self.0.limit);
    }

    /// Gives bytes to rank 0, which has asked `rank` for them; every rank calls this.
    pub(crate) fn answer(&self, rank: usize, bytes: &mut [u8]) {
        match rank == self.rank() {
            true => self.tell(bytes),
            false => self.hear(rank, bytes),
        }
    }
}
