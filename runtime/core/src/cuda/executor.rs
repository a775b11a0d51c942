//! The working memory of the steps of all sequences of a model on a GPU, which run in order: a stream,
//! scratch memory, inputs of a call, and its results. A sequence has only its state and its pages.

use std::sync::Arc;

use mlcc_abi::{Control, EntryPoint};

use super::control::{CallInputs, ControlBlock};
use super::device::{CudaContext, CudaDevice, DeviceBuffer};
use super::graphs::CudaGraphCache;
use super::launches::{BaseAddresses, BatchSizes, GridSizes, LengthRange, ResolvedLaunch, entry_kernels};
use super::rank_worker::StepMessage;
use super::ranks::GpuRanks;
use super::stream::CudaStream;
use super::top_k::TopKTokens;
use crate::Result;
use crate::buffer::AlignedBuffer;
use crate::device::BatchCall;
use crate::table::{ArtifactTable, ModelPlan};
use crate::top_k::AcceptTopK;

const LOGITS: &str = "logits of several rows on the GPU";

pub(crate) struct CudaExecutor {
    pub stream: CudaStream,
    pub control: ControlBlock,
    arena: DeviceBuffer,
    /// Logits of one row, and of as many as a step has requested yet.
    logits: DeviceBuffer,
    row_logits: Option<DeviceBuffer>,
    probs: Option<DeviceBuffer>,
    /// The top-k candidates, where the device finds them.
    pub top_k: Option<TopKTokens>,
    /// Graphs of `decode_batch`, and of `step`.
    batch_graphs: CudaGraphCache,
    top_k_graphs: CudaGraphCache,
    step_graphs: CudaGraphCache,
    plan: ModelPlan,
}

impl CudaExecutor {
    pub fn new(context: &Arc<CudaContext>, table: &ArtifactTable) -> Result<Self> {
        let plan = table.plan.clone();
        let rows = plan.chunk.max(plan.batch);
        Ok(Self {
            stream: CudaStream::new(context)?,
            control: ControlBlock::new(context, plan.batch, rows, rows)?,
            arena: DeviceBuffer::new(context, "the arena on the GPU", plan.arena_bytes)?,
            logits: DeviceBuffer::new(context, "the logits on the GPU", plan.vocab.saturating_mul(4))?,
            row_logits: None,
            probs: None,
            top_k: TopKTokens::new(context, table)?,
            batch_graphs: CudaGraphCache::new("tokens of several sequences are decoded"),
            top_k_graphs: CudaGraphCache::new("tokens of several sequences are decoded"),
            step_graphs: CudaGraphCache::new("steps of several sequences are computed"),
            plan,
        })
    }

    /// The addresses of memory that belongs to no sequence.
    pub fn base_addresses(&self) -> BaseAddresses {
        BaseAddresses {
            arena: self.arena.ptr(),
            tokens: self.control.tokens(),
            logits: self.logits.ptr(),
            probs: self.probs.as_ref().map_or(0, DeviceBuffer::ptr),
            control: self.control.ptr(),
            output_rows: self.control.output_rows(),
            sequences: self.control.sequences(),
            ..BaseAddresses::default()
        }
    }

    /// Room for the logits of this many rows.
    pub fn reserve_logits(&mut self, rows: u64) -> Result<&DeviceBuffer> {
        let bytes = |rows: u64| rows.saturating_mul(self.plan.vocab).saturating_mul(4);
        if self.row_logits.as_ref().is_none_or(|buffer| (buffer.len() as u64) < bytes(rows)) {
            let bytes = bytes(rows.max(self.plan.batch));
            // First the old ones go, with what writes to them, so that there is never memory for both.
            let driver = self.stream.make_current()?;
            self.batch_graphs.destroy(driver);
            self.top_k_graphs.destroy(driver);
            self.step_graphs.destroy(driver);
            self.row_logits = None;
            self.row_logits = Some(DeviceBuffer::new(self.stream.context(), LOGITS, bytes)?);
        }
        Ok(self.row_logits.as_ref().unwrap_or(&self.logits))
    }

    /// Bytes of scratch memory and results.
    pub fn bytes(&self) -> u64 {
        let some = [Some(&self.arena), Some(&self.logits), self.row_logits.as_ref(), self.probs.as_ref()];
        let likeliest = self.top_k.as_ref().map_or(0, TopKTokens::bytes) as u64;
        some.into_iter().flatten().map(|buffer| buffer.len() as u64).sum::<u64>() + likeliest
    }

    /// The contents after the last step.
    pub fn scratch(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; self.arena.len()];
        self.stream.receive(self.arena.ptr(), &mut out)?;
        Ok(out)
    }

    /// `softmax(logits / temperature)`.
    pub fn softmax(
        &mut self,
        device: &CudaDevice,
        temperature: f32,
        logits: &[u8],
        probs: &mut [u8],
    ) -> Result<()> {
        let kernels = entry_kernels(device, EntryPoint::Softmax, false)?;
        if self.probs.is_none() {
            let bytes = self.plan.vocab * 4;
            self.probs =
                Some(DeviceBuffer::new(self.stream.context(), "the probabilities on the GPU", bytes)?);
        }
        self.stream.send(self.logits.ptr(), logits)?;
        let control = Control { n: 1, temperature, ..Control::default() };
        self.control.write(&control, CallInputs::default(), self.stream.handle())?;
        let bases = self.base_addresses();
        let sizes = GridSizes { n: 1, ..GridSizes::default() };
        device.launch(kernels, &bases, &sizes, self.stream.handle())?;
        self.stream.receive(bases.probs, probs)?;
        self.control.mark_copied();
        Ok(())
    }

    /// Runs a step of several sequences, the logits of which go to `logits`, but for rows of which `enough`
    /// says true.
    pub fn run_batch(
        &mut self,
        device: &CudaDevice,
        step: EntryPoint,
        call: &BatchCall<'_>,
        logits: &mut AlignedBuffer,
        enough: Option<AcceptTopK<'_>>,
    ) -> Result<()> {
        let from = self.reserve_logits(call.n_outputs as u64)?.ptr();
        let fits = self.top_k.as_ref().is_some_and(|list| list.has_room_for(call.n_outputs));
        let asked = enough
            .zip(device.batch_top_k())
            .filter(|_| step == EntryPoint::DecodeBatch && !call.adapted && fits);
        let (enough, kernels) = asked.unzip();
        let BatchCall { sequences, tokens, output_rows: wanted, n_outputs, .. } = *call;
        let likeliest = kernels.is_some();
        let told = StepMessage {
            step,
            top_k: likeliest,
            batch: true,
            tokens,
            output_rows: wanted,
            n_outputs,
            sequences,
        };
        let _together = device.ranks().map(|ranks| (ranks.send_step(&told), ranks.guard_wait()));
        let started = self.start_batch(device, step, call, from, kernels);
        // What was launched works on the states of the sequences, also where a later launch was refused.
        let bytes = &mut logits.bytes_mut()[..call.n_outputs * self.plan.vocab as usize * 4];
        let done = match (started, enough) {
            (Ok(()), Some(enough)) => self.receive_rejected_rows(from, bytes, call.n_outputs, enough),
            (Ok(()), None) => self.stream.receive(from, bytes),
            (Err(error), _) => self.stream.synchronize().and(Err(error)),
        };
        if done.is_ok() {
            self.control.mark_copied();
        }
        done
    }

    /// Rank 0 does this step, as [`CudaExecutor::run_batch`].
    pub fn run_worker_batch(
        &mut self,
        device: &CudaDevice,
        step: EntryPoint,
        call: &BatchCall<'_>,
        likeliest: bool,
    ) -> Result<()> {
        let from = self.reserve_logits(call.n_outputs as u64)?.ptr();
        let kernels = device.batch_top_k().filter(|_| likeliest);
        let _waiting = device.ranks().map(GpuRanks::guard_wait);
        let started = self.start_batch(device, step, call, from, kernels);
        self.stream.synchronize().and(started)?;
        self.control.mark_copied();
        Ok(())
    }

    /// Copies the rows whose likeliest tokens are not enough.
    fn receive_rejected_rows(
        &mut self,
        from: u64,
        to: &mut [u8],
        rows: usize,
        enough: AcceptTopK<'_>,
    ) -> Result<()> {
        let Some(likeliest) = &mut self.top_k else { return self.stream.receive(from, to) };
        likeliest.receive(rows, &self.stream)?;
        for (i, row) in to.chunks_exact_mut((self.plan.vocab as usize * 4).max(1)).enumerate() {
            if !enough(i, likeliest.row_candidates(i)) {
                self.stream.receive(from + (i * row.len()) as u64, row)?;
            }
        }
        Ok(())
    }

    /// Starts the launches of a step, or of its variant that finds top-k candidates.
    fn start_batch(
        &mut self,
        device: &CudaDevice,
        step: EntryPoint,
        call: &BatchCall<'_>,
        logits: u64,
        likeliest: Option<&[ResolvedLaunch]>,
    ) -> Result<()> {
        let kernels = likeliest.map_or_else(|| entry_kernels(device, step, call.adapted), Ok)?;
        let (n, b) = (call.tokens.len() as i64, call.sequences.len() as i64);
        let wanted = call.n_outputs as i64;
        let of_step = step == EntryPoint::Step;
        let n_outputs = if of_step { wanted } else { 0 };
        let control = Control { n, b, n_outputs, temperature: 1.0, ..Control::default() };
        let wanted_rows = if of_step { call.output_rows } else { &[] };
        let inputs = CallInputs { sequences: call.sequences, tokens: call.tokens, output_rows: wanted_rows };
        self.control.write(&control, inputs, self.stream.handle())?;
        let past = || call.sequences.iter().map(|s| s.past);
        let most_rows = call.sequences.iter().map(|s| s.rows).max().unwrap_or(0);
        let sizes = GridSizes {
            n,
            past: LengthRange { first: past().min().unwrap_or(0), last: past().max().unwrap_or(0) },
            adapted: call.adapted,
            batch: BatchSizes { sequences: b, max_rows: most_rows, outputs: wanted },
        };
        let (rows, sequences) = (self.plan.chunk.max(self.plan.batch) as i64, self.plan.batch as i64);
        let n = if of_step { rows } else { sequences };
        let most = GridSizes { n, batch: BatchSizes { sequences, max_rows: n, outputs: n }, ..sizes };
        let own = self.base_addresses();
        let probs = self.top_k.as_ref().map_or(own.probs, TopKTokens::ptr);
        let bases = BaseAddresses { logits, probs, ..own };
        let graphs = match likeliest {
            Some(_) => &mut self.top_k_graphs,
            None if of_step => &mut self.step_graphs,
            None => &mut self.batch_graphs,
        };
        graphs.run_batch(device, kernels, &bases, (sizes, most), self.plan.context, self.stream.handle())
    }

    /// The reason why steps of several sequences go without graphs, if the driver refuses them.
    pub fn performance_warning(&self) -> Option<&str> {
        self.batch_graphs
            .performance_warning()
            .or(self.top_k_graphs.performance_warning())
            .or(self.step_graphs.performance_warning())
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        if let Ok(driver) = self.stream.make_current() {
            self.batch_graphs.destroy(driver);
            self.top_k_graphs.destroy(driver);
            self.step_graphs.destroy(driver);
        }
    }
}
