//! A process that follows rank 0 on a GPU of its own: it has the same sessions, and puts the same launches on
//! its stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use mlcc_abi::{EntryPoint, Sequence};

use super::device::CudaDevice;
use super::ranks::GpuRanks;
use super::session::CudaSession;
use crate::device::{BatchCall, DeviceSession};
use crate::page_pool::PageMemory;
use crate::processes::{MessageReader, MessageWriter, RankMessageKind, StepGuard, step_number};
use crate::{Error, Model, Result};

/// A step as rank 0 tells it.
#[derive(Clone, Copy)]
pub(super) struct StepMessage<'a> {
    pub step: EntryPoint,
    /// True with the launches that find top-k candidates: graphs are made of all that a step launches.
    pub top_k: bool,
    /// True for several sequences, whatever their number.
    pub batch: bool,
    pub tokens: &'a [i32],
    pub output_rows: &'a [i32],
    pub n_outputs: usize,
    /// States are numbers, which are their places on rank 0.
    pub sequences: &'a [Sequence],
}

impl StepMessage<'_> {
    fn write<'m>(&self, number: u64, message: &'m mut MessageWriter) -> &'m mut MessageWriter {
        message.start_message(RankMessageKind::Step).push_number(number);
        message
            .push_number(self.top_k.into())
            .push_number(self.batch.into())
            .push_number(self.n_outputs as u64);
        message.push_list(self.tokens).push_list(self.output_rows).push_number(self.sequences.len() as u64);
        for Sequence { state, past, first, rows, .. } in self.sequences {
            message.push_number(state.addr() as u64);
            message.push_number(*past as u64).push_number(*first as u64).push_number(*rows as u64);
        }
        message
    }
}

impl GpuRanks {
    /// Tells the others of a step, if this is rank 0; nothing comes between while what it gives lives.
    pub(super) fn send_step(&self, told: &StepMessage<'_>) -> Option<StepGuard<'_>> {
        let (lead, number) = (self.leader.as_ref()?, step_number(told.step)?);
        Some(lead.send_collective(|message| told.write(number, message)))
    }
}

/// The state of a rank by the messages of rank 0.
struct GpuRankWorker<'a> {
    device: Arc<CudaDevice>,
    model: &'a Model,
    ranks: &'a GpuRanks,
    /// Sessions by the number that rank 0 gives them.
    sessions: BTreeMap<u64, CudaSession>,
    tokens: Vec<i32>,
    output_rows: Vec<i32>,
}

/// See [`Model::follow_leader`].
pub(super) fn receive_steps(device: &Arc<CudaDevice>, model: &Model) -> Result<()> {
    let Some(ranks) = device.ranks().filter(|ranks| ranks.leader.is_none()) else { return Ok(()) };
    let processes = &ranks.processes;
    let (sessions, tokens, wanted) = Default::default();
    let mut follower =
        GpuRankWorker { device: Arc::clone(device), model, ranks, sessions, tokens, output_rows: wanted };
    processes.receive_messages(|message| follower.handle_message(message));
    Ok(())
}

impl GpuRankWorker<'_> {
    fn handle_message(&mut self, message: &[u8]) -> Result<RankMessageKind> {
        let unclear = || Error::RankMessage;
        let (kind, mut reader) = MessageReader::new(message).ok_or_else(unclear)?;
        match kind {
            RankMessageKind::End => {}
            RankMessageKind::Heartbeat => self.ranks.processes.confirm_heartbeat(),
            RankMessageKind::Step => self.handle_step(reader)?,
            RankMessageKind::CreateState => {
                let number = reader.read_number().ok_or_else(unclear)?;
                let session = CudaSession::new(&self.device, self.model.table())?;
                self.sessions.insert(number, session);
            }
            RankMessageKind::FreeState => {
                let number = reader.read_number().ok_or_else(unclear)?;
                self.sessions.remove(&number).ok_or_else(unclear)?;
            }
            RankMessageKind::PageTable => {
                let [number, same] = reader.read_numbers().ok_or_else(unclear)?;
                self.tokens.clear();
                reader.read_list(&mut self.tokens).ok_or_else(unclear)?;
                let pages = self.model.cache_pages().all;
                let known = self.tokens.iter().all(|&page| (page as usize) < pages);
                let session = self.sessions.get_mut(&number).filter(|_| known).ok_or_else(unclear)?;
                session.receive_pages(same as usize, &self.tokens)?.ok_or_else(unclear)?;
            }
            RankMessageKind::CopyState | RankMessageKind::WriteState | RankMessageKind::ReadState => {
                self.handle_state(kind, reader)?.ok_or_else(unclear)?;
            }
            RankMessageKind::WritePages
            | RankMessageKind::ReadPages
            | RankMessageKind::CopyPages
            | RankMessageKind::DecommitPages
            | RankMessageKind::CommitPages => {
                self.handle_pages(kind, reader)?.ok_or_else(unclear)?;
            }
            // Of CPUs.
            RankMessageKind::WriteSlots => return Err(unclear()),
        }
        Ok(kind)
    }

    fn is_own(&self, rank: u64) -> bool {
        rank == self.ranks.rank as u64
    }

    /// `None` where the message makes no sense.
    fn handle_state(&mut self, kind: RankMessageKind, mut reader: MessageReader<'_>) -> Result<Option<()>> {
        let plan = self.model.plan();
        let inside = |at: u64, len: u64| at.checked_add(len).is_some_and(|end| end <= plan.state_bytes);
        if kind == RankMessageKind::CopyState {
            let Some([from, to]) = reader.read_numbers() else { return Ok(None) };
            let (Some(from), Some(to)) = (self.sessions.get(&from), self.sessions.get(&to)) else {
                return Ok(None);
            };
            return to.copy_state(from).map(Some);
        }
        let Some([rank, number, at]) = reader.read_numbers() else { return Ok(None) };
        let Some(session) = self.sessions.get(&number) else { return Ok(None) };
        if kind == RankMessageKind::WriteState {
            let bytes = reader.remaining_bytes();
            if !inside(at, bytes.len() as u64) {
                return Ok(None);
            }
            if self.is_own(rank) {
                session.write_local_state(at, bytes)?;
            }
            return Ok(Some(()));
        }
        let Some(len) = reader.read_number().filter(|&len| inside(at, len)) else { return Ok(None) };
        let mut bytes = vec![0; len as usize];
        if self.is_own(rank) {
            session.read_local_state(at, &mut bytes)?;
        }
        self.ranks.processes.send_requested_bytes(rank as usize, &mut bytes);
        Ok(Some(()))
    }

    fn handle_pages(&self, kind: RankMessageKind, mut reader: MessageReader<'_>) -> Result<Option<()>> {
        let Some(pages) = self.device.pages() else { return Ok(None) };
        let memory = pages.memory();
        let all = (pages.pages().all as u64).saturating_mul(self.model.plan().page_bytes);
        let has = |at: u64, len: u64| at.checked_add(len).is_some_and(|end| end <= all);
        let numbers = match kind {
            RankMessageKind::WritePages => reader.read_numbers().map(|[rank, to]| [rank, to, 0, 0]),
            RankMessageKind::ReadPages => reader.read_numbers().map(|[rank, from, len]| [rank, from, len, 0]),
            RankMessageKind::CopyPages => reader.read_numbers(),
            _ => reader.read_numbers().map(|[from, to]| [0, from, to, 0]),
        };
        let Some([rank, first, second, third]) = numbers else { return Ok(None) };
        match kind {
            RankMessageKind::WritePages => {
                let bytes = reader.remaining_bytes();
                if !has(first, bytes.len() as u64) {
                    return Ok(None);
                }
                if self.is_own(rank) {
                    memory.write(first, bytes)?;
                }
            }
            RankMessageKind::ReadPages if has(first, second) => {
                let mut bytes = vec![0; second as usize];
                if self.is_own(rank) {
                    memory.read(first, &mut bytes)?;
                }
                self.ranks.processes.send_requested_bytes(rank as usize, &mut bytes);
            }
            RankMessageKind::CopyPages if has(first, third) && has(second, third) => {
                if self.is_own(rank) {
                    memory.copy(first, second, third)?;
                }
            }
            RankMessageKind::DecommitPages if first <= second && has(second, 0) => {
                memory.decommit(first..second)
            }
            RankMessageKind::CommitPages if first <= second && has(second, 0) => {
                memory.commit(first..second)?
            }
            _ => return Ok(None),
        }
        memory.synchronize().map(Some)
    }

    fn handle_step(&mut self, mut reader: MessageReader<'_>) -> Result<()> {
        let Some((told, sequences)) = self.read_step(&mut reader) else { return Err(Error::RankMessage) };
        let told = StepMessage {
            sequences: &sequences,
            tokens: &self.tokens,
            output_rows: &self.output_rows,
            ..told
        };
        let session = |number: u64| self.sessions.get(&number);
        if told.batch {
            let place = |s: &Sequence| {
                let (state, page_table) = session(s.state.addr() as u64)?.state_addresses();
                Some(Sequence { state, page_table, ..*s })
            };
            let here: Option<Vec<Sequence>> = sequences.iter().map(place).collect();
            let sequences = &here.ok_or(Error::RankMessage)?[..];
            let StepMessage { tokens, output_rows: wanted, n_outputs, .. } = told;
            let call = BatchCall { sequences, tokens, output_rows: wanted, n_outputs, adapted: false };
            return self.device.executor().run_worker_batch(&self.device, told.step, &call, told.top_k);
        }
        let one = sequences.first().ok_or(Error::RankMessage)?;
        let number = one.state.addr() as u64;
        let session = self.sessions.get_mut(&number).ok_or(Error::RankMessage)?;
        match told.step {
            EntryPoint::CreateKvCache | EntryPoint::ResetKvCache => session.initialise(self.model, told.step),
            step => session.run_worker_step(step, told.top_k, &self.tokens, one.past as u64),
        }
    }

    /// `None` where the message makes no sense for this model.
    fn read_step(&mut self, reader: &mut MessageReader<'_>) -> Option<(StepMessage<'static>, Vec<Sequence>)> {
        let step = reader.read_step()?;
        let [likeliest, batch, n_outputs] = reader.read_numbers()?;
        self.tokens.clear();
        self.output_rows.clear();
        let n = reader.read_list(&mut self.tokens)?;
        reader.read_list(&mut self.output_rows)?;
        let context = i64::try_from(self.model.plan().context).ok().filter(|&context| context > 0);
        let mut sequences = Vec::new();
        for _ in 0..reader.read_number()? {
            let [number, past, first, rows] = reader.read_numbers()?;
            let state = std::ptr::without_provenance_mut(usize::try_from(number).ok()?);
            let [past, first, rows] = [past as i64, first as i64, rows as i64];
            let end = past.checked_add(rows).filter(|_| past >= 0 && first >= 0 && rows >= 0)?;
            if context.is_some_and(|context| end > context) || first.checked_add(rows)? > n as i64 {
                return None;
            }
            sequences.push(Sequence { state, page_table: std::ptr::null(), past, first, rows });
        }
        let n_outputs = n_outputs as usize;
        let vocab = i32::try_from(self.model.plan().vocab).unwrap_or(i32::MAX);
        let known = self.tokens.iter().all(|token| (0..vocab).contains(token))
            && self.output_rows.iter().all(|&row| (0..n.max(1) as i32).contains(&row))
            && n_outputs <= n;
        let (likeliest, batch) = (likeliest != 0, batch != 0);
        known.then_some((
            StepMessage {
                step,
                top_k: likeliest,
                batch,
                tokens: &[],
                output_rows: &[],
                n_outputs,
                sequences: &[],
            },
            sequences,
        ))
    }
}
