//! Memory of one sequence on a GPU.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::Arc;

use mlcc_abi::{Control, Sequence};

use super::control::{ControlBlock, Inputs};
use super::device::{Bases, BatchSizes, DeviceBuffer, Gpu, Kernel, Span};
use super::driver::{self, DevicePtr, Handle};
use super::graphs::Graphs;
use super::state_memory::StateMemory;
use crate::buffer::Buffer;
use crate::device::{BatchMember, DeviceSession};
use crate::session::Step;
use crate::table::{Plan, State, Table};
use crate::{Error, Model, Result};

pub(crate) struct CudaSession {
    stream: Handle,
    graphs: Graphs,
    control: ControlBlock,
    arena: DeviceBuffer,
    state: StateMemory,
    logits: DeviceBuffer,
    /// Those of the host are newer: a batch has made them.
    logits_are_old: bool,
    chunk_logits: Option<DeviceBuffer>,
    probs: Option<DeviceBuffer>,
    host_logits: Buffer,
    host_chunk_logits: Option<Buffer>,
    host_probs: Option<Buffer>,
    plan: Plan,
    device: Arc<Gpu>,
}

// SAFETY: stream and graph belong to this session alone; the driver API is thread-safe and every operation makes the
// context current first.
unsafe impl Send for CudaSession {}

impl CudaSession {
    pub fn new(device: &Arc<Gpu>, table: &Table) -> Result<Self> {
        let plan = table.plan.clone();
        let context = device.context();
        let driver = context.enter()?;
        let row = plan.vocab * 4;
        let arena = DeviceBuffer::new(context, "the arena on the GPU", plan.arena_bytes)?;
        let state = StateMemory::new(context, plan.state_bytes, &table.states)?;
        let control = ControlBlock::new(context, 0, plan.chunk, 0)?;
        let logits = DeviceBuffer::new(context, "the logits on the GPU", row)?;
        let host_logits = Buffer::floats("the logits", plan.vocab)?;
        let mut stream = null_mut();
        // SAFETY: a place for the result.
        let status = unsafe { (driver.f.stream_create)(&mut stream, driver::STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", status)?;
        let session = Self {
            stream,
            graphs: Graphs::default(),
            control,
            arena,
            state,
            logits,
            logits_are_old: false,
            chunk_logits: None,
            probs: None,
            host_logits,
            host_chunk_logits: None,
            host_probs: None,
            plan,
            device: Arc::clone(device),
        };
        // What `logits` promises before the first token.
        // SAFETY: the buffer has `row` bytes.
        let status = unsafe { (driver.f.fill_bytes)(session.logits.ptr(), 0, row as usize, session.stream) };
        driver.check("cuMemsetD8Async", status)?;
        Ok(session)
    }

    fn bases(&self, step: Step, n: usize, past: u64) -> Bases {
        let logits = match (&self.chunk_logits, step) {
            (Some(all), Step::PrefillLogits) => all.ptr(),
            _ => self.logits.ptr(),
        };
        Bases {
            arena: self.arena.ptr(),
            state: self.state.ptr(),
            tokens: self.control.tokens(),
            logits,
            probs: self.probs.as_ref().map_or(0, DeviceBuffer::ptr),
            control: self.control.ptr(),
            wanted: 0,
            sequences: 0,
            n: n as i64,
            past: Span::of(past),
            batch: BatchSizes::default(),
        }
    }

    fn fetch_logits(&mut self, step: Step, n: usize) -> Result<()> {
        let row = self.host_logits.len();
        match (step, &self.chunk_logits, &mut self.host_chunk_logits) {
            (Step::PrefillLogits, Some(from), Some(to)) => {
                // The last row is the session's, on the device too: softmax reads it there.
                let driver = self.device.context().enter()?;
                let last = from.ptr() + ((n - 1) * row) as u64;
                // SAFETY: both ranges lie inside their buffers.
                let status = unsafe { (driver.f.on_device)(self.logits.ptr(), last, row, self.stream) };
                driver.check("cuMemcpyDtoDAsync", status)?;
                let rows = &mut to.bytes_mut()[..n * row];
                receive(&self.device, self.stream, from.ptr(), rows)?;
                self.host_logits.bytes_mut().copy_from_slice(&rows[(n - 1) * row..]);
                Ok(())
            }
            _ => receive(&self.device, self.stream, self.logits.ptr(), self.host_logits.bytes_mut()),
        }
    }

    /// Copies to the device. Pageable memory is staged before the call returns, so `from` may go away.
    fn send(&self, to: DevicePtr, from: *const std::ffi::c_void, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let driver = self.device.context().enter()?;
        // SAFETY: callers pass `bytes` readable bytes and a device range of that size.
        driver.check("cuMemcpyHtoDAsync", unsafe { (driver.f.to_device)(to, from, bytes, self.stream) })
    }

    fn wait(&self) -> Result<()> {
        let driver = self.device.context().enter()?;
        // SAFETY: the stream is alive.
        driver.check("cuStreamSynchronize", unsafe { (driver.f.stream_wait)(self.stream) })
    }
}

impl DeviceSession for CudaSession {
    fn has(&self, step: Step) -> bool {
        self.device.entry(step.name()).is_some()
    }

    fn feed(&mut self, _: &Model, step: Step, tokens: &[i32], past: u64) -> Result<()> {
        let device = Arc::clone(&self.device);
        let kernels = entry(&device, step)?;
        self.state.grow(past + tokens.len() as u64)?;
        if step == Step::PrefillLogits {
            let floats = self.plan.chunk.saturating_mul(self.plan.vocab);
            if self.chunk_logits.is_none() {
                let what = "the logits of a chunk on the GPU";
                self.chunk_logits =
                    Some(DeviceBuffer::new(device.context(), what, floats.saturating_mul(4))?);
                self.host_chunk_logits = Some(Buffer::floats("the logits of a chunk", floats)?);
            }
        }
        let n = tokens.len();
        let control = Control { n: n as i64, past: past as i64, temperature: 1.0, ..Control::default() };
        self.control.write(&control, Inputs { tokens, ..Inputs::default() }, self.stream)?;
        let bases = self.bases(step, n, past);
        match step {
            Step::Decode => {
                self.graphs.decode(&device, kernels, &bases, self.plan.context, self.stream)?;
            }
            _ => device.launch(kernels, &bases, self.stream)?,
        }
        self.fetch_logits(step, n)?;
        self.logits_are_old = false;
        self.control.settled();
        Ok(())
    }

    fn softmax(&mut self, _: &Model, temperature: f32) -> Result<&[f32]> {
        let device = Arc::clone(&self.device);
        let kernels = entry(&device, Step::Softmax)?;
        if self.probs.is_none() {
            self.probs = Some(DeviceBuffer::new(
                device.context(),
                "the probabilities on the GPU",
                self.plan.vocab * 4,
            )?);
            self.host_probs = Some(Buffer::floats("the probabilities", self.plan.vocab)?);
        }
        let control = Control { n: 1, temperature, ..Control::default() };
        if self.logits_are_old {
            self.send(self.logits.ptr(), self.host_logits.bytes().as_ptr().cast(), self.host_logits.len())?;
            self.logits_are_old = false;
        }
        self.control.write(&control, Inputs::default(), self.stream)?;
        device.launch(kernels, &self.bases(Step::Softmax, 1, 0), self.stream)?;
        if let (Some(from), Some(to)) = (&self.probs, &mut self.host_probs) {
            receive(&device, self.stream, from.ptr(), to.bytes_mut())?;
        }
        self.control.settled();
        Ok(self.host_probs.as_ref().map_or(&[], Buffer::as_floats))
    }

    fn initialise(&mut self, model: &Model, _: Step) -> Result<()> {
        let driver = self.device.context().enter()?;
        let (state, stream) = (self.state.ptr(), self.stream);
        for piece in model.table().states.iter().filter(|p| p.cache.is_none() && p.bytes > 0) {
            let at = state + piece.offset;
            // SAFETY: the table was checked: every piece lies inside the state block.
            unsafe {
                match piece.fill {
                    None => {
                        let status = (driver.f.fill_bytes)(at, 0, piece.bytes as usize, stream);
                        driver.check("cuMemsetD8Async", status)?;
                    }
                    Some(fill) => {
                        let words = piece.bytes as usize / 4;
                        let status = (driver.f.fill_words)(at, fill.to_bits(), words, stream);
                        driver.check("cuMemsetD32Async", status)?;
                    }
                }
            }
        }
        self.wait()
    }

    fn logits(&self) -> &[f32] {
        self.host_logits.as_floats()
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        let floats = n * self.plan.vocab as usize;
        self.host_chunk_logits.as_ref().map_or(&[], |all| &all.as_floats()[..floats])
    }

    fn state(&self, state: &State, rows: u64) -> Result<Cow<'_, [u8]>> {
        let range = state.live(rows);
        let mut out = vec![0; (range.end - range.start) as usize];
        receive(&self.device, self.stream, self.state.ptr() + range.start, &mut out)?;
        Ok(out.into())
    }

    fn arena(&self) -> Result<Cow<'_, [u8]>> {
        let mut out = vec![0; self.arena.len()];
        receive(&self.device, self.stream, self.arena.ptr(), &mut out)?;
        Ok(out.into())
    }

    fn set_state(&mut self, _: &Model, rows: u64, states: &[(&State, &[u8])]) -> Result<()> {
        self.state.grow(rows)?;
        for (state, bytes) in states {
            self.send(self.state.ptr() + state.offset, bytes.as_ptr().cast(), bytes.len())?;
        }
        self.wait()
    }

    fn drop_rows(
        &mut self,
        model: &Model,
        count: u64,
        moved: Range<u64>,
        counter: &State,
        dropped: i32,
    ) -> Result<()> {
        let driver = self.device.context().enter()?;
        let (state, stream) = (self.state.ptr(), self.stream);
        for (piece, cache) in model.table().states.iter().filter_map(|s| Some((s, s.cache?))) {
            let begin = state + piece.offset + moved.start * cache.row_bytes;
            let end = (moved.end - moved.start) * cache.row_bytes;
            let step = count * cache.row_bytes;
            let mut at = 0;
            // Piece by piece in order, because the two ranges of one copy must not overlap.
            while at < end {
                let bytes = step.min(end - at) as usize;
                // SAFETY: `count + moved.end` rows of the cache have memory.
                let status = unsafe { (driver.f.on_device)(begin + at, begin + at + step, bytes, stream) };
                driver.check("cuMemcpyDtoDAsync", status)?;
                at += step;
            }
        }
        self.write_word(counter, dropped)
    }

    fn write_word(&mut self, word: &State, value: i32) -> Result<()> {
        let driver = self.device.context().enter()?;
        let (at, stream) = (self.state.ptr() + word.offset, self.stream);
        // SAFETY: the table was checked: the word has four bytes inside the state block.
        let status = unsafe { (driver.f.fill_words)(at, value as u32, 1, stream) };
        driver.check("cuMemsetD32Async", status)?;
        self.wait()
    }

    /// Gives back what more than `rows` rows take, once nothing runs on it: a call that failed may have left launches on
    /// the stream.
    fn shrink(&mut self, rows: u64) {
        match self.wait() {
            Ok(()) => self.state.shrink(rows),
            Err(_) => self.state.abandon(),
        }
    }

    fn allocated(&self) -> (u64, u64) {
        let others = [Some(&self.arena), Some(&self.logits), self.chunk_logits.as_ref(), self.probs.as_ref()];
        (self.state.allocated(), others.into_iter().flatten().map(|b| b.len() as u64).sum())
    }

    fn twin(&self, model: &Model, rows: u64) -> Result<Box<dyn DeviceSession>> {
        let table = model.table();
        let mut twin = Self::new(&self.device, table)?;
        twin.state.grow(rows)?;
        // The two streams know nothing of each other, and a call that failed may have left launches on this one.
        self.wait()?;
        let driver = self.device.context().enter()?;
        let live = table.states.iter().map(|s| s.live(rows)).filter(|r| !r.is_empty());
        let state = live.map(|r| (twin.state.ptr() + r.start, self.state.ptr() + r.start, r.end - r.start));
        let logits = (twin.logits.ptr(), self.logits.ptr(), self.logits.len() as u64);
        for (to, from, bytes) in state.chain([logits]).filter(|(_, _, bytes)| *bytes > 0) {
            // SAFETY: both belong to one model and have memory for these rows.
            let status = unsafe { (driver.f.on_device)(to, from, bytes as usize, twin.stream) };
            driver.check("cuMemcpyDtoDAsync", status)?;
        }
        twin.logits_are_old = self.logits_are_old;
        twin.host_logits.bytes_mut().copy_from_slice(self.host_logits.bytes());
        twin.wait()?;
        Ok(Box::new(twin))
    }

    fn join_batch(&mut self, _: &Model, past: u64, tokens: u64) -> Result<BatchMember<'_>> {
        self.state.grow(past + tokens)?;
        // A call that failed may have left launches on the stream, of which that of the batch knows nothing.
        self.wait()?;
        let state = std::ptr::without_provenance_mut(self.state.ptr() as usize);
        let (page_table, past, rows) = (std::ptr::null(), past as i64, tokens as i64);
        Ok(BatchMember {
            sequence: Sequence { state, page_table, past, first: 0, rows },
            session: PhantomData,
        })
    }

    fn leave_batch(&mut self, _: &Model, logits: Option<&[f32]>) -> Result<()> {
        if let Some(logits) = logits {
            self.host_logits.floats_mut().copy_from_slice(logits);
            self.logits_are_old = true;
        }
        Ok(())
    }

    fn notice(&self) -> Option<&str> {
        self.graphs.notice()
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        if self.wait().is_err() {
            self.state.abandon();
        }
        let Ok(driver) = self.device.context().enter() else { return };
        self.graphs.destroy(driver);
        // SAFETY: created by this session; nothing runs on it any more.
        unsafe { (driver.f.stream_destroy)(self.stream) };
    }
}

/// Copies from the device and waits.
pub(super) fn receive(device: &Gpu, stream: Handle, from: DevicePtr, to: &mut [u8]) -> Result<()> {
    let driver = device.context().enter()?;
    // SAFETY: the device range has at least the length of `to`, which lives until the wait below is over.
    unsafe {
        if !to.is_empty() {
            let status = (driver.f.to_host)(to.as_mut_ptr().cast(), from, to.len(), stream);
            driver.check("cuMemcpyDtoHAsync", status)?;
        }
        driver.check("cuStreamSynchronize", (driver.f.stream_wait)(stream))
    }
}

pub(super) fn entry(device: &Gpu, step: Step) -> Result<&[Kernel]> {
    let missing = || Error::Driver {
        call: "launch list",
        what: format!("the artifact has no launches for `{}`; build it again", step.name()),
    };
    device.entry(step.name()).ok_or_else(missing)
}
