//! Memory of one sequence on a GPU.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use mlcc_abi::{Control, EntryForm, EntryPoint, Sequence};

use super::control::CallInputs;
use super::device::{CudaDevice, DeviceBuffer};
use super::executor::CudaExecutor;
use super::graphs::{CudaGraphCache, KernelsLoaded};
use super::launches::{BaseAddresses, GridSizes, LengthRange, ResolvedLaunch, entry_kernels};
use super::rank_worker::StepMessage;
use super::ranks::{GpuRanks, WatchdogGuard};
use super::session_pages::SessionPages;
use super::stream::CudaStream;
use super::top_k::TopKTokens;
use crate::buffer::AlignedBuffer;
use crate::device::{BatchMember, DeviceSession};
use crate::page_table::PageTable;
use crate::processes::{RankLeader, RankMessageKind, StepGuard};
use crate::table::{ArtifactTable, ModelPlan, StateInfo};
use crate::top_k::TokenCandidate;
use crate::{Model, Result};

/// Between two calls nothing runs on it, so its pages may go to other sequences.
pub(crate) struct CudaSession {
    graphs: CudaGraphCache,
    /// Graphs of tokens with the search for top-k candidates.
    top_k_graphs: CudaGraphCache,
    /// All states that are no caches.
    state: DeviceBuffer,
    /// Pages of the rows of its caches.
    pages: Option<SessionPages>,
    host_logits: AlignedBuffer,
    host_chunk_logits: Option<AlignedBuffer>,
    host_probs: Option<AlignedBuffer>,
    /// The sequence has an adapter.
    adapted: bool,
    plan: ModelPlan,
    /// The leader, on rank 0 of several: the others have this session by the place of its state.
    leader: Option<Arc<RankLeader>>,
    device: Arc<CudaDevice>,
}

// SAFETY: graphs belong to this session alone; the driver API is thread-safe and every operation makes the
// context current first.
unsafe impl Send for CudaSession {}

impl CudaSession {
    pub fn new(device: &Arc<CudaDevice>, table: &ArtifactTable) -> Result<Self> {
        let plan = table.plan.clone();
        let context = device.context();
        let state = DeviceBuffer::new(context, "the state on the GPU", plan.state_bytes)?;
        let lead = device.ranks().and_then(|ranks| ranks.leader.clone());
        let number = state.ptr();
        if let Some(lead) = &lead {
            lead.send_message(|message| {
                message.start_message(RankMessageKind::CreateState).push_number(number)
            });
        }
        let of_lead = lead.clone().map(|lead| (lead, number));
        let pages = device.pages().map(|pool| SessionPages::new(context, pool, plan.pages(), of_lead));
        let pages = pages.transpose()?;
        // Zeros, as `logits` promises before the first token.
        let host_logits = AlignedBuffer::floats("the logits", plan.vocab)?;
        Ok(Self {
            graphs: CudaGraphCache::new("tokens are decoded"),
            top_k_graphs: CudaGraphCache::new("tokens are decoded"),
            state,
            pages,
            host_logits,
            host_chunk_logits: None,
            host_probs: None,
            adapted: false,
            plan,
            leader: lead,
            device: Arc::clone(device),
        })
    }

    /// Gives memory to `n` rows after `past`, in pages that are not shared, and tells the device.
    fn make_writable(&mut self, stream: &CudaStream, model: &Model, past: u64, n: u64) -> Result<()> {
        let Some(pages) = &mut self.pages else { return Ok(()) };
        pages.table.make_writable(&model.table().states, past..past + n, past)?;
        pages.send(stream)
    }

    /// Runs one token like [`CudaSession::run_entry`]; false if its logits were needed.
    fn run_top_k(
        &mut self,
        executor: &mut CudaExecutor,
        kernels: (&[ResolvedLaunch], &KernelsLoaded),
        (token, past): (i32, u64),
        enough: &mut dyn FnMut(&[TokenCandidate]) -> bool,
    ) -> Result<bool> {
        self.start_top_k(executor, kernels, (token, past))?;
        let logits = executor.base_addresses().logits;
        let stream = &executor.stream;
        if let Some(likeliest) = &mut executor.top_k {
            likeliest.receive(1, stream)?;
            if enough(likeliest.row_candidates(0)) {
                return Ok(true);
            }
        }
        stream.receive(logits, self.host_logits.bytes_mut()).map(|()| false)
    }

    fn start_top_k(
        &mut self,
        executor: &mut CudaExecutor,
        kernels: (&[ResolvedLaunch], &KernelsLoaded),
        (token, past): (i32, u64),
    ) -> Result<()> {
        let device = Arc::clone(&self.device);
        let control = Control { n: 1, past: past as i64, temperature: 1.0, ..Control::default() };
        let inputs = CallInputs { tokens: &[token], ..CallInputs::default() };
        executor.control.write(&control, inputs, executor.stream.handle())?;
        let (own, stream) = (executor.base_addresses(), &executor.stream);
        let page_table = self.pages.as_ref().map_or(0, SessionPages::ptr);
        let probs = executor.top_k.as_ref().map_or(0, TopKTokens::ptr);
        let bases = BaseAddresses { state: self.state.ptr(), page_table, probs, ..own };
        let past = (past, self.plan.context);
        self.top_k_graphs.run_decode(&device, kernels, &bases, past, false, stream.handle())
    }

    fn run_entry(
        &mut self,
        executor: &mut CudaExecutor,
        step: EntryPoint,
        tokens: &[i32],
        past: u64,
    ) -> Result<()> {
        let logits = self.start_entry(executor, step, tokens, past)?;
        let (n, stream) = (tokens.len(), &executor.stream);
        match (step.kind(), &mut self.host_chunk_logits) {
            (EntryForm::AllLogits, Some(to)) => {
                let row = self.host_logits.len();
                let rows = &mut to.bytes_mut()[..n * row];
                stream.receive(logits, rows)?;
                self.host_logits.bytes_mut().copy_from_slice(&rows[(n - 1) * row..]);
                Ok(())
            }
            _ => stream.receive(logits, self.host_logits.bytes_mut()),
        }
    }

    /// Puts a step on the stream; where its logits will be.
    fn start_entry(
        &mut self,
        executor: &mut CudaExecutor,
        step: EntryPoint,
        tokens: &[i32],
        past: u64,
    ) -> Result<u64> {
        let device = Arc::clone(&self.device);
        let kernels = entry_kernels(&device, step, self.adapted)?;
        let n = tokens.len();
        let control = Control { n: n as i64, past: past as i64, temperature: 1.0, ..Control::default() };
        let rows = match step.kind() {
            EntryForm::AllLogits => Some(executor.reserve_logits(n as u64)?.ptr()),
            _ => None,
        };
        let inputs = CallInputs { tokens, ..CallInputs::default() };
        executor.control.write(&control, inputs, executor.stream.handle())?;
        let own = executor.base_addresses();
        let logits = rows.unwrap_or(own.logits);
        let page_table = self.pages.as_ref().map_or(0, SessionPages::ptr);
        let bases = BaseAddresses { state: self.state.ptr(), page_table, logits, ..own };
        let stream = &executor.stream;
        match step {
            EntryPoint::Decode => {
                let (kernels, past) = ((kernels, device.loaded(self.adapted)), (past, self.plan.context));
                self.graphs.run_decode(&device, kernels, &bases, past, self.adapted, stream.handle())?;
            }
            _ => {
                let sizes =
                    GridSizes { n: n as i64, past: LengthRange::single(past), ..GridSizes::default() };
                device.launch(kernels, &bases, &sizes, stream.handle())?;
            }
        }
        Ok(logits)
    }

    /// Rank 0 does this step, as [`DeviceSession::forward`] or [`DeviceSession::decode_top_k`].
    pub fn run_worker_step(
        &mut self,
        step: EntryPoint,
        likeliest: bool,
        tokens: &[i32],
        past: u64,
    ) -> Result<()> {
        let device = Arc::clone(&self.device);
        let mut executor = device.executor();
        let _waiting = device.ranks().map(GpuRanks::guard_wait);
        let started = match (likeliest, device.decode_top_k(), tokens) {
            (true, Some(kernels), [token]) => self.start_top_k(&mut executor, kernels, (*token, past)),
            _ => self.start_entry(&mut executor, step, tokens, past).map(|_| ()),
        };
        executor.stream.synchronize().and(started)?;
        executor.control.mark_copied();
        Ok(())
    }

    /// Takes the pages that rank 0 sends; `None` where they make no sense.
    pub fn receive_pages(&mut self, same: usize, new: &[i32]) -> Result<Option<()>> {
        let device = Arc::clone(&self.device);
        let Some(pages) = &mut self.pages else { return Ok(None) };
        pages.receive(&device.executor().stream, same, new)
    }

    /// The addresses of this sequence's memory for kernels.
    pub fn state_addresses(&self) -> (*mut u8, *const i32) {
        let page_table = self.pages.as_ref().map_or(0, SessionPages::ptr);
        let state = std::ptr::without_provenance_mut(self.state.ptr() as usize);
        (state, std::ptr::without_provenance(page_table as usize))
    }

    /// The state of this rank alone.
    pub fn copy_state(&self, from: &CudaSession) -> Result<()> {
        let stream = &self.device.executor().stream;
        stream.copy(self.state.ptr(), from.state.ptr(), self.state.len() as u64)?;
        stream.synchronize()
    }

    pub fn read_local_state(&self, at: u64, to: &mut [u8]) -> Result<()> {
        self.device.executor().stream.receive(self.state.ptr() + at, to)
    }

    pub fn write_local_state(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let stream = &self.device.executor().stream;
        stream.send(self.state.ptr() + at, bytes)?;
        stream.synchronize()
    }

    /// Tells the other ranks of a step, which they take too while what this gives lives.
    fn send_step<'d>(
        &self,
        device: &'d CudaDevice,
        (step, likeliest): (EntryPoint, bool),
        tokens: &[i32],
        past: u64,
    ) -> Option<(StepGuard<'d>, WatchdogGuard<'d>)> {
        let ranks = device.ranks()?;
        let (state, page_table) = self.state_addresses();
        let rows = tokens.len() as i64;
        let sequence = Sequence { state, page_table, past: past as i64, first: 0, rows };
        let sequences = std::slice::from_ref(&sequence);
        let told = StepMessage {
            step,
            top_k: likeliest,
            batch: false,
            tokens,
            output_rows: &[],
            n_outputs: 0,
            sequences,
        };
        Some((ranks.send_step(&told)?, ranks.guard_wait()))
    }

    /// The other rank to which a state belongs that is no cache, and the place of the state there, on rank 0.
    fn remote_state(&self, state: &StateInfo) -> Option<(&RankLeader, u64, u64)> {
        let (lead, each) = (self.leader.as_deref()?, self.plan.state_bytes.max(1));
        let rank = state.offset / each;
        (rank > 0).then_some((lead, rank, state.offset % each))
    }
}

impl DeviceSession for CudaSession {
    fn has_entry(&self, step: EntryPoint) -> bool {
        self.device.entry_kernels(step, false).is_some()
    }

    fn forward(&mut self, model: &Model, step: EntryPoint, tokens: &[i32], past: u64) -> Result<()> {
        if step.kind() == EntryForm::AllLogits && self.host_chunk_logits.is_none() {
            let floats = self.plan.chunk.saturating_mul(self.plan.vocab);
            self.host_chunk_logits = Some(AlignedBuffer::floats("the logits of a chunk", floats)?);
        }
        let device = Arc::clone(&self.device);
        let mut executor = device.executor();
        self.make_writable(&executor.stream, model, past, tokens.len() as u64)?;
        let _together = self.send_step(&device, (step, false), tokens, past);
        let done = self.run_entry(&mut executor, step, tokens, past);
        // What was launched before a launch that failed works on the pages.
        let done = done.or_else(|error| executor.stream.synchronize().and(Err(error)));
        if done.is_ok() {
            executor.control.mark_copied();
        }
        done
    }

    fn decode_top_k(
        &mut self,
        model: &Model,
        token: i32,
        past: u64,
        enough: &mut dyn FnMut(&[TokenCandidate]) -> bool,
    ) -> Result<bool> {
        let device = Arc::clone(&self.device);
        let Some(kernels) = device.decode_top_k().filter(|_| !self.adapted) else {
            return self.forward(model, EntryPoint::Decode, &[token], past).map(|()| false);
        };
        let mut executor = device.executor();
        self.make_writable(&executor.stream, model, past, 1)?;
        let _together = self.send_step(&device, (EntryPoint::Decode, true), &[token], past);
        let done = self.run_top_k(&mut executor, kernels, (token, past), enough);
        let done = done.or_else(|error| executor.stream.synchronize().and(Err(error)));
        if done.is_ok() {
            executor.control.mark_copied();
        }
        done
    }

    fn reserve(&mut self, model: &Model, past: u64, n: u64) -> Result<()> {
        let device = Arc::clone(&self.device);
        self.make_writable(&device.executor().stream, model, past, n)
    }

    fn missing_pages(&self, past: u64, n: u64) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.table.missing_pages(past..past + n, past))
    }

    fn softmax(&mut self, _: &Model, temperature: f32) -> Result<&[f32]> {
        if self.host_probs.is_none() {
            self.host_probs = Some(AlignedBuffer::floats("the probabilities", self.plan.vocab)?);
        }
        if let Some(probs) = &mut self.host_probs {
            let (logits, probs) = (self.host_logits.bytes(), probs.bytes_mut());
            self.device.executor().softmax(&self.device, temperature, logits, probs)?;
        }
        Ok(self.host_probs.as_ref().map_or(&[], AlignedBuffer::as_floats))
    }

    fn initialise(&mut self, model: &Model, step: EntryPoint) -> Result<()> {
        let _together = self.send_step(&self.device, (step, false), &[], 0);
        let stream = &self.device.executor().stream;
        let states = &model.table().states;
        // The bytes of the first rank, and so of every other one.
        let own = &states[..states.len() / self.plan.ranks.max(1) as usize];
        for piece in own.iter().filter(|p| p.cache.is_none() && p.bytes > 0) {
            let at = self.state.ptr() + piece.offset;
            match piece.fill {
                None => stream.clear(at, piece.bytes as usize)?,
                Some(fill) => stream.fill(at, fill.to_bits(), piece.bytes as usize / 4)?,
            }
        }
        stream.synchronize()
    }

    fn logits(&self) -> &[f32] {
        self.host_logits.as_floats()
    }

    fn swap_logits(&mut self, fresh: AlignedBuffer) -> AlignedBuffer {
        std::mem::replace(&mut self.host_logits, fresh)
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        let floats = n * self.plan.vocab as usize;
        self.host_chunk_logits.as_ref().map_or(&[], |all| &all.as_floats()[..floats])
    }

    fn state(&self, state: &StateInfo, rows: u64) -> Result<Cow<'_, [u8]>> {
        if let (Some(cache), Some(pages)) = (state.cache, &self.pages) {
            return Ok(pages.table.read_cache(state, cache, rows.min(cache.rows))?.into());
        }
        let mut out = vec![0; state.bytes as usize];
        if let Some((lead, rank, at)) = self.remote_state(state) {
            lead.request_bytes(rank as usize, &mut out, |message| {
                let message = message.start_message(RankMessageKind::ReadState).push_number(rank);
                message.push_number(self.state.ptr()).push_number(at).push_number(state.bytes)
            });
            return Ok(out.into());
        }
        self.device.executor().stream.receive(self.state.ptr() + state.offset, &mut out)?;
        Ok(out.into())
    }

    fn arena(&self) -> Result<Cow<'_, [u8]>> {
        Ok(self.device.executor().scratch()?.into())
    }

    fn set_state(&mut self, model: &Model, rows: u64, states: &[(&StateInfo, &[u8])]) -> Result<()> {
        let stream = &self.device.executor().stream;
        let mut table = self.device.pages().map(PageTable::new);
        if let Some(table) = &mut table {
            table.make_writable(&model.table().states, 0..rows, 0)?;
        }
        for (state, bytes) in states {
            match (state.cache, &table) {
                (Some(cache), Some(table)) => table.write_cache(state, cache, bytes)?,
                _ => match self.remote_state(state) {
                    Some((lead, rank, at)) => lead.send_message(|message| {
                        let message = message.start_message(RankMessageKind::WriteState).push_number(rank);
                        message.push_number(self.state.ptr()).push_number(at).push_bytes(bytes)
                    }),
                    None => stream.send(self.state.ptr() + state.offset, bytes)?,
                },
            }
        }
        if let (Some(pages), Some(table)) = (&mut self.pages, table) {
            pages.table = table;
        }
        stream.synchronize()
    }

    fn page_rows(&self) -> Option<u64> {
        self.pages.as_ref().map(|_| mlcc_abi::PAGE_ROWS)
    }

    fn drop_pages(&mut self, pages: Range<u64>, counter: &StateInfo, dropped: i32) -> Result<()> {
        if let Some(own) = &mut self.pages {
            own.table.drop_pages(pages);
        }
        self.write_word(counter, dropped)
    }

    fn drop_rows(
        &mut self,
        model: &Model,
        count: u64,
        moved: Range<u64>,
        counter: &StateInfo,
        dropped: i32,
    ) -> Result<()> {
        if let Some(pages) = &mut self.pages {
            pages.table.drop_rows(&model.table().states, count, moved)?;
        }
        self.write_word(counter, dropped)
    }

    fn write_word(&mut self, word: &StateInfo, value: i32) -> Result<()> {
        if word.is_slot {
            self.adapted = value != 0;
        }
        let stream = &self.device.executor().stream;
        stream.fill(self.state.ptr() + word.offset, value as u32, 1)?;
        if let Some(lead) = &self.leader {
            for rank in 1..self.plan.ranks {
                lead.send_message(|message| {
                    let message = message
                        .start_message(RankMessageKind::WriteState)
                        .push_number(rank)
                        .push_number(self.state.ptr());
                    message.push_number(word.offset).push_bytes(&value.to_le_bytes())
                });
            }
        }
        stream.synchronize()
    }

    fn shrink(&mut self, rows: u64) {
        if let Some(pages) = &mut self.pages {
            pages.table.truncate(rows);
        }
    }

    fn allocated(&self) -> (u64, u64) {
        let pages = self.pages.as_ref().map_or(0, |pages| pages.table.bytes());
        (self.state.len() as u64 + pages, self.device.executor().bytes())
    }

    fn fork(&self, model: &Model, rows: u64) -> Result<Box<dyn DeviceSession>> {
        let mut twin = Self::new(&self.device, model.table())?;
        if let (Some(pages), Some(twins)) = (&self.pages, &mut twin.pages) {
            twins.table = pages.table.fork(rows);
        }
        twin.host_logits.bytes_mut().copy_from_slice(self.host_logits.bytes());
        twin.copy_state(self)?;
        twin.adapted = self.adapted;
        if let Some(lead) = &self.leader {
            let (from, to) = (self.state.ptr(), twin.state.ptr());
            lead.send_message(|message| {
                message.start_message(RankMessageKind::CopyState).push_number(from).push_number(to)
            });
        }
        Ok(Box::new(twin))
    }

    fn join_batch(&mut self, model: &Model, past: u64, tokens: u64) -> Result<BatchMember<'_>> {
        let device = Arc::clone(&self.device);
        self.make_writable(&device.executor().stream, model, past, tokens)?;
        let (state, page_table) = self.state_addresses();
        let sequence = Sequence { state, page_table, past: past as i64, first: 0, rows: tokens as i64 };
        Ok(BatchMember { sequence, session: PhantomData })
    }

    fn leave_batch(&mut self, _: &Model, logits: Option<&[f32]>) -> Result<()> {
        if let Some(logits) = logits {
            self.host_logits.floats_mut().copy_from_slice(logits);
        }
        Ok(())
    }

    fn performance_warning(&self) -> Option<&str> {
        self.graphs.performance_warning().or(self.top_k_graphs.performance_warning())
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        if let Some(lead) = &self.leader {
            lead.send_message(|message| {
                message.start_message(RankMessageKind::FreeState).push_number(self.state.ptr())
            });
        }
        // Every call has waited for what it has put on the stream, and states are freed when nothing runs.
        let _ = self.device.executor().stream.synchronize();
        if let Ok(driver) = self.device.context().make_current() {
            self.graphs.destroy(driver);
            self.top_k_graphs.destroy(driver);
        }
    }
}
