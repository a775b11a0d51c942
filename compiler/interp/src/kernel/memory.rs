//! Memory of a running kernel with its checks: bounds, poison (never written), and races.
//!
//! Race rule, the same for CPU workers and GPU blocks: a cell written in one of them may not be touched by
//! another one in the same kernel; inside a GPU block, a cell written by one thread may be touched by another
//! only after a barrier (an *epoch* is the number of barriers passed). Every access is remembered per cell as
//! last writer and last readers.

use super::buffer::KernelBuffer;
use super::cell::{self, RegisterCell};
use super::error::{KernelFault, MemoryAction, RunResult};
use mlcc_ir::kernel::MemorySpace;
use mlcc_ir::types::DType;
use std::fmt;

/// The thread that accesses memory, and the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessOrigin {
    /// GPU block or CPU worker.
    pub block: u32,
    pub thread: u32,
    pub epoch: u32,
}

const MANY: u32 = u32::MAX - 1;
const NOBODY: AccessOrigin = AccessOrigin { block: u32::MAX, thread: 0, epoch: 0 };

impl fmt::Display for AccessOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            MANY => write!(f, "several blocks or workers")?,
            block => write!(f, "block/worker {block}")?,
        }
        match self.thread {
            MANY => write!(f, ", several threads"),
            thread => write!(f, ", thread {thread}"),
        }
    }
}

/// True if `earlier` and `now` may run at the same time.
fn concurrent(earlier: AccessOrigin, now: AccessOrigin) -> bool {
    earlier != NOBODY
        && (earlier.block != now.block || (earlier.thread != now.thread && earlier.epoch == now.epoch))
}

#[derive(Clone, Copy)]
struct LastAccess {
    write: AccessOrigin,
    read: AccessOrigin,
}

enum StorageData {
    /// A caller's buffer.
    Bytes(Vec<u8>),
    /// Memory of the kernel: for `Local` and `Stack`, `len` cells per thread.
    Cells(Vec<RegisterCell>),
}

/// One buffer of the kernel.
pub(crate) struct BufferStorage {
    pub name: String,
    pub dtype: DType,
    pub space: MemorySpace,
    pub len: usize,
    data: StorageData,
    /// Cells that hold a value; `None` when all do.
    written: Option<Vec<bool>>,
    touched: Option<Vec<LastAccess>>,
    /// Copies that are under way, where there was one.
    flights: Vec<CopyState>,
}

/// The role of a cell in copies that have not been waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyState {
    None,
    Target,
    /// Source of this many copies.
    Source(u32),
}

impl BufferStorage {
    /// A parameter; the buffer's bytes are moved in, and out again by [`BufferStorage::into_bytes`].
    pub fn param(
        name: &str,
        buffer: &mut KernelBuffer,
        len: usize,
        undefined: bool,
        races: bool,
    ) -> BufferStorage {
        BufferStorage {
            name: name.into(),
            dtype: buffer.dtype,
            space: MemorySpace::Global,
            len,
            data: StorageData::Bytes(std::mem::take(&mut buffer.bytes)),
            written: undefined.then(|| vec![false; len]),
            touched: races.then(|| vec![LastAccess { write: NOBODY, read: NOBODY }; len]),
            flights: Vec::new(),
        }
    }

    /// Memory of the kernel itself.
    pub fn for_allocation(
        name: &str,
        dtype: DType,
        space: MemorySpace,
        len: usize,
        threads: usize,
    ) -> BufferStorage {
        let cells = if space == MemorySpace::Shared { len } else { len * threads };
        let races = space == MemorySpace::Shared;
        BufferStorage {
            name: name.into(),
            dtype,
            space,
            len,
            data: StorageData::Cells(vec![0; cells]),
            written: Some(vec![false; cells]),
            touched: races.then(|| vec![LastAccess { write: NOBODY, read: NOBODY }; cells]),
            flights: Vec::new(),
        }
    }

    pub fn into_bytes(self) -> Vec<u8> {
        match self.data {
            StorageData::Bytes(bytes) => bytes,
            StorageData::Cells(_) => Vec::new(),
        }
    }

    /// A new block or worker begins: kernel memory has no contents and no history.
    pub fn begin_block(&mut self) {
        if self.space == MemorySpace::Global {
            return;
        }
        self.flights.clear();
        if let Some(written) = &mut self.written {
            written.fill(false);
        }
        if let Some(touched) = &mut self.touched {
            touched.fill(LastAccess { write: NOBODY, read: NOBODY });
        }
    }

    /// `Alloc` runs in the active threads: contents undefined. Accesses stay remembered, because threads that
    /// are not yet past a barrier may still use what lies there.
    pub fn poison(&mut self, mask: &[bool]) {
        let (space, len) = (self.space, self.len);
        let Some(written) = &mut self.written else { return };
        if space == MemorySpace::Shared {
            written.fill(false);
        } else {
            for (thread, _) in mask.iter().enumerate().filter(|(_, on)| **on) {
                written[thread * len..(thread + 1) * len].fill(false);
            }
        }
    }

    fn checked_slot(&self, index: i64, thread: u32, action: MemoryAction) -> RunResult<usize> {
        if index < 0 || index as u64 >= self.len as u64 {
            let (buffer, len) = (self.name.clone(), self.len);
            return Err(KernelFault::OutOfBounds { action, buffer, index, len }.into());
        }
        Ok(match self.space {
            MemorySpace::Global | MemorySpace::Shared => index as usize,
            MemorySpace::Local | MemorySpace::Stack => thread as usize * self.len + index as usize,
        })
    }

    /// Checks that the cell exists; its content and its writer do not matter.
    pub fn check_bounds(&self, index: i64, thread: u32) -> RunResult {
        self.checked_slot(index, thread, MemoryAction::Read).map(drop)
    }

    /// Elements in `bytes` bytes, to which the place must be aligned. The verifier has checked the alignment
    /// of the buffer.
    pub fn check_alignment(&self, instr: &'static str, index: i64, bytes: u32) -> RunResult<i64> {
        let len = i64::from(bytes) / self.dtype.bytes().unwrap_or(1) as i64;
        if index.rem_euclid(len) != 0 {
            let buffer = self.name.clone();
            return Err(KernelFault::Misaligned { instr, buffer, index, align: bytes }.into());
        }
        Ok(len)
    }

    // ---- copies

    fn under_way(&self, slot: usize, action: MemoryAction, who: AccessOrigin) -> RunResult {
        let does = match (self.flights.get(slot), action) {
            (Some(CopyState::Target), _) => "writes",
            (Some(CopyState::Source(_)), MemoryAction::Write) => "reads",
            _ => return Ok(()),
        };
        let buffer = self.name.clone();
        Err(KernelFault::UnderWay { action, buffer, index: slot, who, does }.into())
    }

    fn copy_state(&mut self, slot: usize) -> &mut CopyState {
        if self.flights.is_empty() {
            self.flights = vec![CopyState::None; self.len];
        }
        &mut self.flights[slot]
    }

    /// A copy to a cell of shared memory begins: as a store, whose value is not visible before
    /// [`Self::end_copy`].
    pub fn begin_copy(&mut self, index: i64, who: AccessOrigin) -> RunResult {
        self.store(index, 0, who)?;
        *self.copy_state(index as usize) = CopyState::Target;
        Ok(())
    }

    pub fn end_copy(&mut self, index: i64, value: RegisterCell, who: AccessOrigin) -> RunResult {
        *self.copy_state(index as usize) = CopyState::None;
        self.store(index, value, who)
    }

    /// A copy from a cell begins, which was read just now. Memory that no kernel writes needs no lock.
    pub fn lock_source(&mut self, index: i64) {
        if self.touched.is_none() {
            return;
        }
        let flight = self.copy_state(index as usize);
        *flight = match *flight {
            CopyState::Source(copies) => CopyState::Source(copies + 1),
            _ => CopyState::Source(1),
        };
    }

    pub fn unlock_source(&mut self, index: i64) {
        if self.touched.is_none() {
            return;
        }
        let flight = self.copy_state(index as usize);
        *flight = match *flight {
            CopyState::Source(copies) if copies > 1 => CopyState::Source(copies - 1),
            _ => CopyState::None,
        };
    }

    fn check_race(
        &self,
        index: usize,
        action: MemoryAction,
        second: AccessOrigin,
        earlier: MemoryAction,
        first: AccessOrigin,
    ) -> RunResult {
        Err(KernelFault::Race { buffer: self.name.clone(), index, action, second, earlier, first }.into())
    }

    pub fn load(&mut self, index: i64, who: AccessOrigin) -> RunResult<RegisterCell> {
        let slot = self.checked_slot(index, who.thread, MemoryAction::Read)?;
        self.under_way(slot, MemoryAction::Read, who)?;
        if self.written.as_ref().is_some_and(|w| !w[slot]) {
            return Err(KernelFault::Poison { buffer: self.name.clone(), index: index as usize }.into());
        }
        if let Some(touched) = &mut self.touched {
            let LastAccess { write, read } = &mut touched[slot];
            if concurrent(*write, who) {
                let first = *write;
                self.check_race(slot, MemoryAction::Read, who, MemoryAction::Write, first)?;
            } else if *read == NOBODY || (read.block == who.block && read.epoch != who.epoch) {
                *read = who;
            } else if read.block != who.block {
                read.block = MANY;
            } else if read.thread != who.thread {
                read.thread = MANY;
            }
        }
        Ok(match &self.data {
            StorageData::Bytes(bytes) => cell::read(self.dtype, bytes, slot),
            StorageData::Cells(cells) => cells[slot],
        })
    }

    pub fn store(&mut self, index: i64, value: RegisterCell, who: AccessOrigin) -> RunResult {
        let slot = self.checked_slot(index, who.thread, MemoryAction::Write)?;
        self.under_way(slot, MemoryAction::Write, who)?;
        if let Some(touched) = &mut self.touched {
            let LastAccess { write, read } = touched[slot];
            if concurrent(write, who) {
                return self.check_race(slot, MemoryAction::Write, who, MemoryAction::Write, write);
            }
            if concurrent(read, who) {
                return self.check_race(slot, MemoryAction::Write, who, MemoryAction::Read, read);
            }
            touched[slot].write = who;
        }
        if let Some(written) = &mut self.written {
            written[slot] = true;
        }
        match &mut self.data {
            StorageData::Bytes(bytes) => cell::write(self.dtype, bytes, slot, value),
            StorageData::Cells(cells) => cells[slot] = value,
        }
        Ok(())
    }
}
