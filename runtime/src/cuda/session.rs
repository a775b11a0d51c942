//! Memory of one sequence on a GPU.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use mlcc_abi::{Control, Sequence};

use super::control::{ControlBlock, Inputs};
use super::device::{Bases, BatchSizes, DeviceBuffer, Gpu, Kernel, Span};
use super::graphs::Graphs;
use super::session_pages::SessionPages;
use super::stream::Stream;
use crate::buffer::Buffer;
use crate::device::{BatchMember, DeviceSession};
use crate::page_table::PageTable;
use crate::session::Step;
use crate::table::{Plan, State, Table};
use crate::{Error, Model, Result};

/// Between two calls nothing runs on its stream, so its pages may go to other sequences.
pub(crate) struct CudaSession {
    stream: Stream,
    graphs: Graphs,
    control: ControlBlock,
    arena: DeviceBuffer,
    /// All states that are no caches.
    state: DeviceBuffer,
    /// Of the rows of its caches.
    pages: Option<SessionPages>,
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

// SAFETY: graphs and pinned memory belong to this session alone; the driver API is thread-safe and every operation makes the
// context current first.
unsafe impl Send for CudaSession {}

impl CudaSession {
    pub fn new(device: &Arc<Gpu>, table: &Table) -> Result<Self> {
        let plan = table.plan.clone();
        let context = device.context();
        let row = plan.vocab * 4;
        let arena = DeviceBuffer::new(context, "the arena on the GPU", plan.arena_bytes)?;
        let state = DeviceBuffer::new(context, "the state on the GPU", plan.state_bytes)?;
        let pages = device.pages().map(|pool| SessionPages::new(context, pool, plan.pages())).transpose()?;
        let control = ControlBlock::new(context, 0, plan.chunk, 0)?;
        let logits = DeviceBuffer::new(context, "the logits on the GPU", row)?;
        let host_logits = Buffer::floats("the logits", plan.vocab)?;
        let session = Self {
            stream: Stream::new(context)?,
            graphs: Graphs::default(),
            control,
            arena,
            state,
            pages,
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
        session.stream.clear(session.logits.ptr(), row as usize)?;
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
            page_table: self.pages.as_ref().map_or(0, SessionPages::ptr),
            n: n as i64,
            past: Span::of(past),
            batch: BatchSizes::default(),
        }
    }

    /// Gives memory to `n` rows after `past`, which nobody else has, and tells the device.
    fn own(&mut self, model: &Model, past: u64, n: u64) -> Result<()> {
        let Some(pages) = &mut self.pages else { return Ok(()) };
        pages.table.own(&model.table().states, past..past + n, past)?;
        pages.send(&self.stream)
    }

    fn run(&mut self, step: Step, tokens: &[i32], past: u64) -> Result<()> {
        let device = Arc::clone(&self.device);
        let kernels = entry(&device, step)?;
        let n = tokens.len();
        let control = Control { n: n as i64, past: past as i64, temperature: 1.0, ..Control::default() };
        self.control.write(&control, Inputs { tokens, ..Inputs::default() }, self.stream.handle())?;
        let bases = self.bases(step, n, past);
        match step {
            Step::Decode => {
                self.graphs.decode(&device, kernels, &bases, self.plan.context, self.stream.handle())?;
            }
            _ => device.launch(kernels, &bases, self.stream.handle())?,
        }
        self.fetch_logits(step, n)?;
        self.logits_are_old = false;
        Ok(())
    }

    fn fetch_logits(&mut self, step: Step, n: usize) -> Result<()> {
        let row = self.host_logits.len();
        match (step, &self.chunk_logits, &mut self.host_chunk_logits) {
            (Step::PrefillLogits, Some(from), Some(to)) => {
                // The last row is the session's, on the device too: softmax reads it there.
                let last = from.ptr() + ((n - 1) * row) as u64;
                self.stream.copy(self.logits.ptr(), last, row as u64)?;
                let rows = &mut to.bytes_mut()[..n * row];
                self.stream.receive(from.ptr(), rows)?;
                self.host_logits.bytes_mut().copy_from_slice(&rows[(n - 1) * row..]);
                Ok(())
            }
            _ => self.stream.receive(self.logits.ptr(), self.host_logits.bytes_mut()),
        }
    }
}

impl DeviceSession for CudaSession {
    fn has(&self, step: Step) -> bool {
        self.device.entry(step.name()).is_some()
    }

    fn feed(&mut self, model: &Model, step: Step, tokens: &[i32], past: u64) -> Result<()> {
        if step == Step::PrefillLogits && self.chunk_logits.is_none() {
            let floats = self.plan.chunk.saturating_mul(self.plan.vocab);
            let what = "the logits of a chunk on the GPU";
            self.chunk_logits =
                Some(DeviceBuffer::new(self.device.context(), what, floats.saturating_mul(4))?);
            self.host_chunk_logits = Some(Buffer::floats("the logits of a chunk", floats)?);
        }
        self.own(model, past, tokens.len() as u64)?;
        let done = self.run(step, tokens, past);
        // What was launched before a launch that failed works on the pages.
        let done = done.or_else(|error| self.stream.wait().and(Err(error)));
        if done.is_ok() {
            self.control.settled();
        }
        done
    }

    fn reserve(&mut self, model: &Model, past: u64, n: u64) -> Result<()> {
        self.own(model, past, n)
    }

    fn missing_pages(&self, past: u64, n: u64) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.table.missing(past..past + n, past))
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
            self.stream.send(self.logits.ptr(), self.host_logits.bytes())?;
            self.logits_are_old = false;
        }
        self.control.write(&control, Inputs::default(), self.stream.handle())?;
        device.launch(kernels, &self.bases(Step::Softmax, 1, 0), self.stream.handle())?;
        if let (Some(from), Some(to)) = (&self.probs, &mut self.host_probs) {
            self.stream.receive(from.ptr(), to.bytes_mut())?;
        }
        self.control.settled();
        Ok(self.host_probs.as_ref().map_or(&[], Buffer::as_floats))
    }

    fn initialise(&mut self, model: &Model, _: Step) -> Result<()> {
        for piece in model.table().states.iter().filter(|p| p.cache.is_none() && p.bytes > 0) {
            let at = self.state.ptr() + piece.offset;
            match piece.fill {
                None => self.stream.clear(at, piece.bytes as usize)?,
                Some(fill) => self.stream.fill(at, fill.to_bits(), piece.bytes as usize / 4)?,
            }
        }
        self.stream.wait()
    }

    fn logits(&self) -> &[f32] {
        self.host_logits.as_floats()
    }

    fn swap_logits(&mut self, fresh: Buffer) -> Buffer {
        std::mem::replace(&mut self.host_logits, fresh)
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        let floats = n * self.plan.vocab as usize;
        self.host_chunk_logits.as_ref().map_or(&[], |all| &all.as_floats()[..floats])
    }

    fn state(&self, state: &State, rows: u64) -> Result<Cow<'_, [u8]>> {
        if let (Some(cache), Some(pages)) = (state.cache, &self.pages) {
            return Ok(pages.table.read(state, cache, rows.min(cache.rows))?.into());
        }
        let mut out = vec![0; state.bytes as usize];
        self.stream.receive(self.state.ptr() + state.offset, &mut out)?;
        Ok(out.into())
    }

    fn arena(&self) -> Result<Cow<'_, [u8]>> {
        let mut out = vec![0; self.arena.len()];
        self.stream.receive(self.arena.ptr(), &mut out)?;
        Ok(out.into())
    }

    fn set_state(&mut self, model: &Model, rows: u64, states: &[(&State, &[u8])]) -> Result<()> {
        let mut table = self.device.pages().map(PageTable::new);
        if let Some(table) = &mut table {
            table.own(&model.table().states, 0..rows, 0)?;
        }
        for (state, bytes) in states {
            match (state.cache, &table) {
                (Some(cache), Some(table)) => table.write(state, cache, bytes)?,
                _ => self.stream.send(self.state.ptr() + state.offset, bytes)?,
            }
        }
        if let (Some(pages), Some(table)) = (&mut self.pages, table) {
            pages.table = table;
        }
        self.stream.wait()
    }

    fn page_rows(&self) -> Option<u64> {
        self.pages.as_ref().map(|_| mlcc_abi::PAGE_ROWS)
    }

    fn drop_pages(&mut self, pages: Range<u64>, counter: &State, dropped: i32) -> Result<()> {
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
        counter: &State,
        dropped: i32,
    ) -> Result<()> {
        if let Some(pages) = &mut self.pages {
            pages.table.drop_rows(&model.table().states, count, moved)?;
        }
        self.write_word(counter, dropped)
    }

    fn write_word(&mut self, word: &State, value: i32) -> Result<()> {
        self.stream.fill(self.state.ptr() + word.offset, value as u32, 1)?;
        self.stream.wait()
    }

    fn shrink(&mut self, rows: u64) {
        if let Some(pages) = &mut self.pages {
            pages.table.truncate(rows);
        }
    }

    fn allocated(&self) -> (u64, u64) {
        let others = [Some(&self.arena), Some(&self.logits), self.chunk_logits.as_ref(), self.probs.as_ref()];
        let pages = self.pages.as_ref().map_or(0, |pages| pages.table.bytes());
        (self.state.len() as u64 + pages, others.into_iter().flatten().map(|b| b.len() as u64).sum())
    }

    fn twin(&self, model: &Model, rows: u64) -> Result<Box<dyn DeviceSession>> {
        let mut twin = Self::new(&self.device, model.table())?;
        if let (Some(pages), Some(twins)) = (&self.pages, &mut twin.pages) {
            twins.table = pages.table.fork(rows);
        }
        twin.stream.copy(twin.state.ptr(), self.state.ptr(), self.state.len() as u64)?;
        twin.stream.copy(twin.logits.ptr(), self.logits.ptr(), self.logits.len() as u64)?;
        twin.logits_are_old = self.logits_are_old;
        twin.host_logits.bytes_mut().copy_from_slice(self.host_logits.bytes());
        twin.stream.wait()?;
        Ok(Box::new(twin))
    }

    fn join_batch(&mut self, model: &Model, past: u64, tokens: u64) -> Result<BatchMember<'_>> {
        self.own(model, past, tokens)?;
        // The stream of the batch knows nothing of what this one has been sent.
        self.stream.wait()?;
        let page_table = self.pages.as_ref().map_or(0, SessionPages::ptr);
        let sequence = Sequence {
            state: std::ptr::without_provenance_mut(self.state.ptr() as usize),
            page_table: std::ptr::without_provenance(page_table as usize),
            past: past as i64,
            first: 0,
            rows: tokens as i64,
        };
        Ok(BatchMember { sequence, session: PhantomData })
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
        let _ = self.stream.wait();
        if let Ok(driver) = self.device.context().enter() {
            self.graphs.destroy(driver);
        }
    }
}

pub(super) fn entry(device: &Gpu, step: Step) -> Result<&[Kernel]> {
    let missing = || Error::Driver {
        call: "launch list",
        what: format!("the artifact has no launches for `{}`; build it again", step.name()),
    };
    device.entry(step.name()).ok_or_else(missing)
}
