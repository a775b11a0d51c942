//! Memory of a sequence, and the steps that are its own.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use mlcc_abi::{Ctx, EntryForm, EntryPoint, Sequence};

use super::CpuDevice;
use super::states::RankStates;
use crate::buffer::AlignedBuffer;
use crate::device::{BatchMember, DeviceSession, missing_entry_error};
use crate::host_pages::HostPages;
use crate::page_table::PageTable;
use crate::table::StateInfo;
use crate::trace::{StepTimes, StepTrace};
use crate::{Model, Result};

/// Memory of one sequence on the CPU.
pub(super) struct CpuSession {
    device: Arc<CpuDevice>,
    /// All states that are no caches, of all ranks.
    state: RankStates,
    /// Pages of the rows of its caches.
    pages: Option<PageTable<HostPages>>,
    /// The tokens of a call, at most `chunk`: callers' slices are not aligned as entry points want them.
    tokens: AlignedBuffer,
    /// `vocab` floats.
    logits: AlignedBuffer,
    /// `chunk * vocab` floats, allocated by the first `prefill_logits`.
    chunk_logits: Option<AlignedBuffer>,
    /// `vocab` floats, allocated by the first `softmax`.
    probs: Option<AlignedBuffer>,
    /// Times of the items of steps, if they are taken.
    trace: Option<Box<StepTrace>>,
}

/// Fields that differ from call to call.
struct StepCall<'a> {
    step: EntryPoint,
    tokens: &'a [i32],
    n: usize,
    past: u64,
    temperature: f32,
    /// True if logits are made.
    logits: bool,
}

impl CpuSession {
    pub fn new(device: Arc<CpuDevice>, model: &Model) -> Result<Self> {
        let plan = model.plan();
        Ok(Self {
            state: RankStates::new(plan, device.leader().cloned())?,
            pages: device.pages.as_ref().map(PageTable::new),
            tokens: AlignedBuffer::integers("the tokens of a chunk", plan.chunk.max(1))?,
            logits: AlignedBuffer::floats("the logits", plan.vocab)?,
            chunk_logits: None,
            probs: None,
            trace: None,
            device,
        })
    }

    fn page_table(&self) -> *const i32 {
        self.pages.as_ref().map_or(std::ptr::null(), |table| table.pages().as_ptr())
    }

    /// Gives memory to `n` rows after `past`, in pages that are not shared.
    fn make_writable(&mut self, model: &Model, past: u64, n: u64) -> Result<()> {
        match &mut self.pages {
            Some(pages) => pages.make_writable(&model.table().states, past..past + n, past),
            None => Ok(()),
        }
    }

    fn run_call(&mut self, model: &Model, call: &StepCall<'_>) -> Result<()> {
        let adapted =
            model.table().slot_state().is_some_and(|slot| self.state.read(slot).iter().any(|&b| b != 0));
        let step = self
            .device
            .entry_function(call.step, adapted)
            .ok_or_else(|| missing_entry_error(model, call.step))?;
        let logits = match (&mut self.chunk_logits, call.step.kind()) {
            _ if !call.logits => std::ptr::null_mut(),
            (Some(all), EntryForm::AllLogits) => all.as_mut_ptr(),
            _ => self.logits.as_mut_ptr(),
        };
        let mut ctx = Ctx {
            weights: model.weights().as_ptr(),
            state: self.state.as_mut_ptr(),
            tokens: self.tokens.copy_from(call.tokens).as_ptr(),
            n: call.n as i64,
            past: call.past as i64,
            logits: logits.cast(),
            probs: self.probs.as_mut().map_or(std::ptr::null_mut(), AlignedBuffer::as_mut_ptr).cast(),
            temperature: call.temperature,
            b: 1,
            page_table: self.page_table(),
            adapters: model.slots().map_or(std::ptr::null(), |slots| slots.as_ptr()),
            ..Ctx::EMPTY
        };
        // SAFETY: the buffers have the sizes and alignment of the plan, the tokens are in range.
        unsafe { self.device.run(model, call.step, step, &mut ctx, self.trace.as_deref_mut()) }
    }
}

impl DeviceSession for CpuSession {
    fn has_entry(&self, step: EntryPoint) -> bool {
        self.device.entry_function(step, false).is_some()
    }

    fn reserve(&mut self, model: &Model, past: u64, n: u64) -> Result<()> {
        self.make_writable(model, past, n)
    }

    fn missing_pages(&self, past: u64, n: u64) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.missing_pages(past..past + n, past))
    }

    fn forward(&mut self, model: &Model, step: EntryPoint, tokens: &[i32], past: u64) -> Result<()> {
        if step.kind() == EntryForm::AllLogits && self.chunk_logits.is_none() {
            let floats = model.plan().chunk.saturating_mul(model.plan().vocab);
            self.chunk_logits = Some(AlignedBuffer::floats("the logits of a chunk", floats)?);
        }
        self.make_writable(model, past, tokens.len() as u64)?;
        self.run_call(
            model,
            &StepCall { step, tokens, n: tokens.len(), past, temperature: 1.0, logits: true },
        )?;
        if step.kind() == EntryForm::AllLogits {
            let vocab = self.logits.len();
            let from = (tokens.len() - 1) * vocab;
            if let Some(all) = &self.chunk_logits {
                self.logits.bytes_mut().copy_from_slice(&all.bytes()[from..from + vocab]);
            }
        }
        Ok(())
    }

    fn feed_without_logits(&mut self, model: &Model, tokens: &[i32], past: u64) -> Result<()> {
        self.make_writable(model, past, tokens.len() as u64)?;
        let (step, n, logits) = (EntryPoint::Prefill, tokens.len(), self.device.has_ranks());
        self.run_call(model, &StepCall { step, tokens, n, past, temperature: 1.0, logits })
    }

    fn join_batch(&mut self, model: &Model, past: u64, tokens: u64) -> Result<BatchMember<'_>> {
        self.make_writable(model, past, tokens)?;
        let page_table = self.page_table();
        // The batch knows what comes before.
        let (state, past, first, rows) = (self.state.as_mut_ptr(), past as i64, 0, tokens as i64);
        let sequence = Sequence { state, page_table, past, first, rows };
        Ok(BatchMember { sequence, session: PhantomData })
    }

    fn leave_batch(&mut self, _: &Model, logits: Option<&[f32]>) -> Result<()> {
        if let Some(logits) = logits {
            self.logits.floats_mut().copy_from_slice(logits);
        }
        Ok(())
    }

    fn softmax(&mut self, model: &Model, temperature: f32) -> Result<&[f32]> {
        if self.probs.is_none() {
            self.probs = Some(AlignedBuffer::floats("the probabilities", model.plan().vocab)?);
        }
        self.run_call(
            model,
            &StepCall { step: EntryPoint::Softmax, tokens: &[], n: 1, past: 0, temperature, logits: true },
        )?;
        Ok(self.probs.as_ref().map_or(&[], AlignedBuffer::as_floats))
    }

    fn initialise(&mut self, model: &Model, step: EntryPoint) -> Result<()> {
        if self.has_entry(step) {
            return self.run_call(
                model,
                &StepCall { step, tokens: &[], n: 0, past: 0, temperature: 1.0, logits: true },
            );
        }
        for piece in model.table().states.iter().filter(|p| p.cache.is_none()) {
            let fill = piece.fill.unwrap_or(0.0).to_le_bytes();
            self.state.write(piece, &fill.repeat(piece.bytes as usize / 4));
        }
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        self.logits.as_floats()
    }

    fn swap_logits(&mut self, fresh: AlignedBuffer) -> AlignedBuffer {
        std::mem::replace(&mut self.logits, fresh)
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        self.chunk_logits.as_ref().map_or(&[], |all| &all.as_floats()[..n * self.logits.len() / 4])
    }

    fn arena(&self) -> Result<Cow<'_, [u8]>> {
        Ok(self.device.scratch()?.into())
    }

    fn state(&self, state: &StateInfo, rows: u64) -> Result<Cow<'_, [u8]>> {
        Ok(match (state.cache, &self.pages) {
            (Some(cache), Some(pages)) => pages.read_cache(state, cache, rows.min(cache.rows))?.into(),
            _ => self.state.read(state),
        })
    }

    fn set_state(&mut self, model: &Model, rows: u64, states: &[(&StateInfo, &[u8])]) -> Result<()> {
        let mut pages = self.device.pages.as_ref().map(PageTable::new);
        if let Some(pages) = &mut pages {
            pages.make_writable(&model.table().states, 0..rows, 0)?;
        }
        for (state, bytes) in states {
            match (state.cache, &pages) {
                (Some(cache), Some(pages)) => pages.write_cache(state, cache, bytes)?,
                _ => self.state.write(state, bytes),
            }
        }
        self.pages = pages;
        Ok(())
    }

    fn page_rows(&self) -> Option<u64> {
        self.pages.as_ref().map(|_| mlcc_abi::PAGE_ROWS)
    }

    fn drop_pages(&mut self, pages: Range<u64>, counter: &StateInfo, dropped: i32) -> Result<()> {
        if let Some(table) = &mut self.pages {
            table.drop_pages(pages);
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
            pages.drop_rows(&model.table().states, count, moved)?;
        }
        self.write_word(counter, dropped)
    }

    fn write_word(&mut self, state: &StateInfo, value: i32) -> Result<()> {
        self.state.write_word(state, value);
        Ok(())
    }

    fn shrink(&mut self, rows: u64) {
        if let Some(pages) = &mut self.pages {
            pages.truncate(rows);
        }
    }

    fn fork(&self, model: &Model, rows: u64) -> Result<Box<dyn DeviceSession>> {
        let mut twin = Self::new(Arc::clone(&self.device), model)?;
        twin.pages = self.pages.as_ref().map(|pages| pages.fork(rows));
        twin.state.copy_from(&self.state);
        twin.logits.bytes_mut().copy_from_slice(self.logits.bytes());
        Ok(Box::new(twin))
    }

    fn allocated(&self) -> (u64, u64) {
        let results = [Some(&self.logits), self.chunk_logits.as_ref(), self.probs.as_ref()];
        let results: usize = results.into_iter().flatten().map(AlignedBuffer::len).sum();
        let pages = self.pages.as_ref().map_or(0, PageTable::bytes);
        (self.state.len() as u64 + pages, results as u64)
    }

    fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.into_times());
        self.trace = on.then(|| Box::new(StepTrace::new(self.device.pool().workers())));
        taken
    }
}
