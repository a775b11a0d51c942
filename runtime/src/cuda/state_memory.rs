//! The state block of one sequence on a GPU. Where the driver can map memory page by page (CUDA 10.2 and later, on
//! devices that say so), addresses are reserved for the whole plan and the rows of caches get memory in steps as the
//! sequence grows; else the whole block is allocated at once.

use std::sync::Arc;

use super::device::{Context, DeviceBuffer};
use super::driver::{self, DevicePtr, VirtualMemory};
use crate::table::{State, live_bytes};
use crate::{Error, Result};

const WHAT: &str = "the state on the GPU";
/// Rows that get memory together, so that `decode` maps nothing but at every such step.
const STEP_ROWS: u64 = 128;
/// Unused rows that keep their memory when a sequence gets shorter.
const KEPT_ROWS: u64 = 256;

/// Rows that get memory when the first `rows` are needed.
fn step_rows(rows: u64) -> u64 {
    rows.saturating_add(STEP_ROWS - 1) / STEP_ROWS * STEP_ROWS
}

/// Rows that keep memory when only the first `rows` are in use.
fn kept_rows(rows: u64) -> u64 {
    step_rows(rows).saturating_add(KEPT_ROWS)
}

pub(crate) struct StateMemory {
    memory: Memory,
    states: Vec<State>,
    /// Rows of every cache that have memory.
    rows: u64,
}

enum Memory {
    Whole(DeviceBuffer),
    Mapped(Mapped),
}

/// Reserved addresses, some granules of which have memory.
struct Mapped {
    context: Arc<Context>,
    base: DevicePtr,
    granule: u64,
    /// By granule.
    mapped: Vec<bool>,
    /// The context failed with work on this memory: it is left to the driver.
    abandoned: bool,
}

impl StateMemory {
    /// Memory for `bytes` bytes that hold `states`; recurrent states have theirs at once. Contents are undefined.
    pub fn new(context: &Arc<Context>, bytes: u64, states: &[State]) -> Result<Self> {
        let caches = states.iter().any(|s| s.cache.is_some());
        let mapped = if caches { Mapped::reserve(context, bytes)? } else { None };
        let memory = match mapped {
            Some(mapped) => Memory::Mapped(mapped),
            None => Memory::Whole(DeviceBuffer::new(context, WHAT, bytes)?),
        };
        let mut state = Self { memory, states: states.to_vec(), rows: 0 };
        state.map_rows(0)?;
        Ok(state)
    }

    pub fn ptr(&self) -> DevicePtr {
        match &self.memory {
            Memory::Whole(buffer) => buffer.ptr(),
            Memory::Mapped(mapped) => mapped.base,
        }
    }

    /// Bytes that have memory.
    pub fn allocated(&self) -> u64 {
        match &self.memory {
            Memory::Whole(buffer) => buffer.len() as u64,
            Memory::Mapped(mapped) => mapped.mapped.iter().filter(|&&m| m).count() as u64 * mapped.granule,
        }
    }

    /// Sees to it that the first `rows` rows of every cache have memory. Nothing may be running on it.
    pub fn grow(&mut self, rows: u64) -> Result<()> {
        if rows <= self.rows {
            return Ok(());
        }
        let rows = step_rows(rows);
        // What a call could get before it failed is no use to anyone.
        if let Err(error) = self.map_rows(rows) {
            self.keep_only(self.rows);
            return Err(error);
        }
        self.rows = rows;
        Ok(())
    }

    fn map_rows(&mut self, rows: u64) -> Result<()> {
        let Memory::Mapped(mapped) = &mut self.memory else { return Ok(()) };
        let bytes = live_bytes(&self.states, rows);
        self.states.iter().try_for_each(|s| mapped.map(s.live(rows), bytes))
    }

    /// Gives back the memory of rows beyond the first `rows` and a few kept ones. Nothing may be running on it: callers wait
    /// for their stream before.
    pub fn shrink(&mut self, rows: u64) {
        let kept = kept_rows(rows);
        if kept < self.rows {
            self.keep_only(kept);
            self.rows = kept;
        }
    }

    /// Leaves the memory to the driver, which frees it with the context: what was on the stream when the context failed may
    /// still run.
    pub fn abandon(&mut self) {
        if let Memory::Mapped(mapped) = &mut self.memory {
            mapped.abandoned = true;
        }
    }

    fn keep_only(&mut self, rows: u64) {
        let Memory::Mapped(mapped) = &mut self.memory else { return };
        let mut needed = vec![false; mapped.mapped.len()];
        for state in &self.states {
            needed[mapped.granules(state.live(rows))].fill(true);
        }
        mapped.unmap_but(&needed);
    }
}

impl Mapped {
    /// `None` where driver or device cannot map memory.
    fn reserve(context: &Arc<Context>, bytes: u64) -> Result<Option<Self>> {
        let driver = context.enter()?;
        let Some(v) = &driver.virtual_memory else { return Ok(None) };
        if !context.has_virtual_memory() {
            return Ok(None);
        }
        let mut granule = 0;
        let location = driver::DeviceMemory::of(context.device());
        // SAFETY: places for the results; the properties are those of plain device memory.
        let status = unsafe { (v.granularity)(&mut granule, &location, driver::GRANULARITY_RECOMMENDED) };
        driver.check("cuMemGetAllocationGranularity", status)?;
        let granule = granule as u64;
        if granule == 0 || bytes <= granule {
            return Ok(None);
        }
        let count = bytes.div_ceil(granule);
        let size = usize::try_from(count.saturating_mul(granule))
            .map_err(|_| Error::OutOfMemory { what: WHAT, bytes })?;
        let mut base = 0;
        // SAFETY: a place for the result; no wish for an address.
        let status = unsafe { (v.reserve)(&mut base, size, 0, 0, 0) };
        driver.check_memory("cuMemAddressReserve", status, WHAT, bytes)?;
        let mapped = vec![false; count as usize];
        Ok(Some(Self { context: Arc::clone(context), base, granule, mapped, abandoned: false }))
    }

    fn granules(&self, bytes: std::ops::Range<u64>) -> std::ops::Range<usize> {
        match bytes.is_empty() {
            true => 0..0,
            false => (bytes.start / self.granule) as usize..bytes.end.div_ceil(self.granule) as usize,
        }
    }

    fn functions(&self) -> Result<&VirtualMemory> {
        // Present: without them nothing would have been reserved.
        let missing = || Error::Driver { call: "cuMemMap", what: "it is gone".into() };
        self.context.enter()?.virtual_memory.as_ref().ok_or_else(missing)
    }

    /// Gives memory to the granules of a range. `whole`: bytes of the block then, for the message.
    fn map(&mut self, range: std::ops::Range<u64>, whole: u64) -> Result<()> {
        for i in self.granules(range) {
            if !self.mapped[i] {
                self.map_one(i, whole)?;
                self.mapped[i] = true;
            }
        }
        Ok(())
    }

    fn map_one(&self, index: usize, whole: u64) -> Result<()> {
        let driver = self.context.enter()?;
        let v = self.functions()?;
        let (at, size) = (self.base + index as u64 * self.granule, self.granule as usize);
        let location = driver::DeviceMemory::of(self.context.device());
        let mut handle = 0;
        // SAFETY: a place for the result; the size is a granule.
        let status = unsafe { (v.create)(&mut handle, size, &location, 0) };
        driver.check_memory("cuMemCreate", status, WHAT, whole)?;
        // SAFETY: the addresses are reserved and not mapped. The mapping keeps the memory alive, so the handle can go.
        let (mapped, _) = unsafe { ((v.map)(at, size, 0, handle, 0), (v.release)(handle)) };
        driver.check("cuMemMap", mapped)?;
        let access = driver::Access::read_write(self.context.device());
        // SAFETY: one description for the range mapped above.
        let status = unsafe { (v.set_access)(at, size, &access, 1) };
        driver.check("cuMemSetAccess", status).inspect_err(|_| {
            // SAFETY: mapped above and used by nobody.
            unsafe { (v.unmap)(at, size) };
        })
    }

    fn unmap_but(&mut self, needed: &[bool]) {
        if self.abandoned {
            return;
        }
        let Ok(v) = self.functions().map(|v| v.unmap) else { return };
        for (i, mapped) in self.mapped.iter_mut().enumerate().filter(|(i, m)| **m && !needed[*i]) {
            // SAFETY: mapped by `map_one`; callers see to it that nothing runs on it.
            *mapped = unsafe { v(self.base + i as u64 * self.granule, self.granule as usize) } != 0;
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        self.unmap_but(&vec![false; self.mapped.len()]);
        if let Ok(v) = self.functions() {
            // SAFETY: reserved once with this size; nothing is mapped any more.
            unsafe { (v.unreserve)(self.base, self.mapped.len() * self.granule as usize) };
        }
    }
}
