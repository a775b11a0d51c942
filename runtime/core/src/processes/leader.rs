//! Rank 0 of processes: what it tells the others, and how they hear it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mlcc_abi::{Ctx, EntryPoint, PAGE_ROWS, Sequence};

use super::ProcessGroup;
use super::wire::{MessageWriter, RankMessageKind, step_number};
use crate::{Error, Result};

/// First part of a message: its length, and as much of it as fits. Most messages are no longer.
const FIRST: usize = 4096;
/// A rank that has nothing to do hears so often that the others are there.
const PING: Duration = Duration::from_secs(1);

/// Rank 0. Its messages are in order: nothing comes between the all-gathers of a step.
pub(crate) struct RankLeader {
    processes: ProcessGroup,
    channel: Arc<Mutex<MessageWriter>>,
    ended: Arc<AtomicBool>,
    /// Once the others are ready to hear.
    heartbeats: OnceLock<JoinHandle<()>>,
}

/// While it lives the others take a step.
pub(crate) struct StepGuard<'a> {
    _channel: MutexGuard<'a, MessageWriter>,
}

impl RankLeader {
    pub fn new(processes: &ProcessGroup) -> RankLeader {
        let (channel, ended, heartbeats) = Default::default();
        RankLeader { processes: processes.clone(), channel, ended, heartbeats }
    }

    /// The others are ready to hear, and rank 0 has nothing more to do.
    pub fn start_heartbeats(&self) -> Result<()> {
        let (all, line, ended) = (self.processes.clone(), Arc::clone(&self.channel), Arc::clone(&self.ended));
        let pings = std::thread::Builder::new()
            .name("mlcc-ranks".into())
            .spawn(move || send_heartbeats(&all, &line, &ended))
            .map_err(|source| Error::Thread { index: 0, source })?;
        // Once, as it is loaded once.
        let _ = self.heartbeats.set(pings);
        Ok(())
    }

    fn lock_channel(&self) -> MutexGuard<'_, MessageWriter> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the others something that they do by themselves.
    pub fn send_message(&self, write: impl FnOnce(&mut MessageWriter) -> &mut MessageWriter) {
        let mut line = self.lock_channel();
        write(&mut line);
        broadcast_message(&self.processes, line.bytes());
    }

    /// Sends a message like [`RankLeader::send_message`], of something that all do together.
    pub fn send_collective(
        &self,
        write: impl FnOnce(&mut MessageWriter) -> &mut MessageWriter,
    ) -> StepGuard<'_> {
        let mut line = self.lock_channel();
        write(&mut line);
        broadcast_message(&self.processes, line.bytes());
        StepGuard { _channel: line }
    }

    /// Asks for bytes of a rank.
    pub fn request_bytes(
        &self,
        rank: usize,
        to: &mut [u8],
        write: impl FnOnce(&mut MessageWriter) -> &mut MessageWriter,
    ) {
        let mut line = self.lock_channel();
        write(&mut line);
        broadcast_message(&self.processes, line.bytes());
        self.processes.receive(rank, to);
    }

    /// The others take a step too; `None` if each can take it alone.
    ///
    /// # Safety
    /// `ctx` fulfils the contract of the step.
    pub unsafe fn send_step(&self, step: EntryPoint, ctx: &Ctx) -> Option<StepGuard<'_>> {
        let number = step_number(step)?;
        let mut line = self.lock_channel();
        let message =
            line.start_message(RankMessageKind::Step).push_number(number).push_number(ctx.past as u64);
        // SAFETY: by contract `n` tokens, and as many numbers of rows, if there are any.
        let numbers = |from: *const i32| match from.is_null() {
            true => &[][..],
            false => unsafe { std::slice::from_raw_parts(from, ctx.n.max(0) as usize) },
        };
        message
            .push_list(numbers(ctx.tokens))
            .push_list(numbers(ctx.output_rows))
            .push_number(ctx.n_outputs as u64);
        let own =
            Sequence { state: ctx.state, page_table: ctx.page_table, past: ctx.past, first: 0, rows: ctx.n };
        let sequences = match ctx.sequences.is_null() {
            true => std::slice::from_ref(&own),
            // SAFETY: by contract.
            false => unsafe { std::slice::from_raw_parts(ctx.sequences, ctx.b as usize) },
        };
        message.push_number(u64::from(!ctx.sequences.is_null())).push_number(sequences.len() as u64);
        for sequence in sequences {
            let Sequence { state, page_table, past, first, rows } = sequence;
            message.push_number(state.addr() as u64);
            message.push_number(*past as u64).push_number(*first as u64).push_number(*rows as u64);
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
            message.push_list(pages);
        }
        broadcast_message(&self.processes, line.bytes());
        Some(StepGuard { _channel: line })
    }
}

impl Drop for RankLeader {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // A model that was never loaded as a whole is no model for the others either.
        let Some(pings) = self.heartbeats.take() else { return };
        pings.thread().unpark();
        let _ = pings.join();
        self.send_message(|message| message.start_message(RankMessageKind::End));
        self.processes.leave();
    }
}

/// Every rank says that it is there, unless something else is said.
fn send_heartbeats(processes: &ProcessGroup, line: &Mutex<MessageWriter>, ended: &AtomicBool) {
    while !ended.load(Ordering::SeqCst) {
        std::thread::park_timeout(PING);
        // Who has the line is heard of.
        if let Ok(mut line) = line.try_lock()
            && !ended.load(Ordering::SeqCst)
        {
            broadcast_message(processes, line.start_message(RankMessageKind::Heartbeat).bytes());
            processes.all_gather(&[0], processes.0.limit);
        }
    }
}

fn broadcast_message(processes: &ProcessGroup, bytes: &[u8]) {
    let mut first = [0; FIRST];
    let (begin, rest) = bytes.split_at(bytes.len().min(FIRST - 8));
    first[..8].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    first[8..8 + begin.len()].copy_from_slice(begin);
    processes.broadcast(&first);
    if !rest.is_empty() {
        processes.broadcast(rest);
    }
}

impl ProcessGroup {
    /// Waits for the next message of rank 0.
    pub(crate) fn receive_message(&self, bytes: &mut Vec<u8>) {
        bytes.resize(FIRST, 0);
        self.receive(0, bytes);
        let (len, rest) = bytes.split_at(8);
        let len = len.try_into().map_or(0, u64::from_le_bytes) as usize;
        debug_assert_eq!(rest.len(), FIRST - 8);
        bytes.drain(..8);
        let known = len.min(FIRST - 8);
        bytes.resize(len, 0);
        if len > known {
            self.receive(0, &mut bytes[known..]);
        }
    }

    /// Answers [`RankMessageKind::Heartbeat`].
    pub(crate) fn confirm_heartbeat(&self) {
        self.all_gather(&[0], self.0.limit);
    }

    /// Gives bytes to rank 0, which has asked `rank` for them; every rank calls this.
    pub(crate) fn send_requested_bytes(&self, rank: usize, bytes: &mut [u8]) {
        match rank == self.rank() {
            true => self.broadcast(bytes),
            false => self.receive(rank, bytes),
        }
    }
}
