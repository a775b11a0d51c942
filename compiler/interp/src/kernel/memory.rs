//! Memory of a running kernel with its checks: bounds, poison (never written), and races.
//!
//! Race rule, the same for CPU workers and GPU blocks: a cell written in one of them may not be touched by another one
//! in the same kernel; inside a GPU block, a cell written by one thread may be touched by another only after a barrier
//! (an *epoch* is the number of barriers passed). Every access is remembered per cell as last writer and last readers.

use super::buffer::Buffer;
use super::cell::{self, Cell};
use super::error::{Action, Fault, Run};
use mlcc_ir::kernel::Space;
use mlcc_ir::types::DType;
use std::fmt;

/// Who accesses memory, and when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Who {
    /// GPU block or CPU worker.
    pub block: u32,
    pub thread: u32,
    pub epoch: u32,
}

const MANY: u32 = u32::MAX - 1;
const NOBODY: Who = Who { block: u32::MAX, thread: 0, epoch: 0 };

impl fmt::Display for Who {
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
fn concurrent(earlier: Who, now: Who) -> bool {
    earlier != NOBODY
        && (earlier.block != now.block || (earlier.thread != now.thread && earlier.epoch == now.epoch))
}

#[derive(Clone, Copy)]
struct Touch {
    write: Who,
    read: Who,
}

enum Data {
    /// A caller's buffer.
    Bytes(Vec<u8>),
    /// Memory of the kernel: for `Local` and `Stack`, `len` cells per thread.
    Cells(Vec<Cell>),
}

/// One buffer of the kernel.
pub(crate) struct Storage {
    pub name: String,
    pub dtype: DType,
    pub space: Space,
    pub len: usize,
    data: Data,
    /// Cells that hold a value; `None` when all do.
    written: Option<Vec<bool>>,
    touched: Option<Vec<Touch>>,
    /// Copies that are under way, where there was one.
    flights: Vec<Flight>,
}

/// What copies that nobody has waited for do with a cell.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flight {
    None,
    Target,
    /// Source of so many.
    Source(u32),
}

impl Storage {
    /// A parameter; the buffer's bytes are moved in, and out again by [`Storage::into_bytes`].
    pub fn param(name: &str, buffer: &mut Buffer, len: usize, undefined: bool, races: bool) -> Storage {
        Storage {
            name: name.into(),
            dtype: buffer.dtype,
            space: Space::Global,
            len,
            data: Data::Bytes(std::mem::take(&mut buffer.bytes)),
            written: undefined.then(|| vec![false; len]),
            touched: races.then(|| vec![Touch { write: NOBODY, read: NOBODY }; len]),
            flights: Vec::new(),
        }
    }

    /// Memory of the kernel itself.
    pub fn allocation(name: &str, dtype: DType, space: Space, len: usize, threads: usize) -> Storage {
        let cells = if space == Space::Shared { len } else { len * threads };
        let races = space == Space::Shared;
        Storage {
            name: name.into(),
            dtype,
            space,
            len,
            data: Data::Cells(vec![0; cells]),
            written: Some(vec![false; cells]),
            touched: races.then(|| vec![Touch { write: NOBODY, read: NOBODY }; cells]),
            flights: Vec::new(),
        }
    }

    pub fn into_bytes(self) -> Vec<u8> {
        match self.data {
            Data::Bytes(bytes) => bytes,
            Data::Cells(_) => Vec::new(),
        }
    }

    /// A new block or worker begins: kernel memory has no contents and no history.
    pub fn begin_block(&mut self) {
        if self.space == Space::Global {
            return;
        }
        self.flights.clear();
        if let Some(written) = &mut self.written {
            written.fill(false);
        }
        if let Some(touched) = &mut self.touched {
            touched.fill(Touch { write: NOBODY, read: NOBODY });
        }
    }

    /// `Alloc` runs in the active threads: contents undefined. Accesses stay remembered, because threads that are not
    /// yet past a barrier may still use what lies there.
    pub fn poison(&mut self, mask: &[bool]) {
        let (space, len) = (self.space, self.len);
        let Some(written) = &mut self.written else { return };
        if space == Space::Shared {
            written.fill(false);
        } else {
            for (thread, _) in mask.iter().enumerate().filter(|(_, on)| **on) {
                written[thread * len..(thread + 1) * len].fill(false);
            }
        }
    }

    fn slot(&self, index: i64, thread: u32, action: Action) -> Run<usize> {
        if index < 0 || index as u64 >= self.len as u64 {
            let (buffer, len) = (self.name.clone(), self.len);
            return Err(Fault::OutOfBounds { action, buffer, index, len }.into());
        }
        Ok(match self.space {
            Space::Global | Space::Shared => index as usize,
            Space::Local | Space::Stack => thread as usize * self.len + index as usize,
        })
    }

    /// Checks that the cell exists; what it holds, and who wrote it, does not matter.
    pub fn within(&self, index: i64, thread: u32) -> Run {
        self.slot(index, thread, Action::Read).map(drop)
    }

    /// Elements in `bytes` bytes, to which the place must be aligned. That the buffer is, the verifier has checked.
    pub fn aligned(&self, instr: &'static str, index: i64, bytes: u32) -> Run<i64> {
        let len = i64::from(bytes) / self.dtype.bytes().unwrap_or(1) as i64;
        if index.rem_euclid(len) != 0 {
            let buffer = self.name.clone();
            return Err(Fault::Misaligned { instr, buffer, index, align: bytes }.into());
        }
        Ok(len)
    }

    // ---- copies

    fn under_way(&self, slot: usize, action: Action, who: Who) -> Run {
        let does = match (self.flights.get(slot), action) {
            (Some(Flight::Target), _) => "writes",
            (Some(Flight::Source(_)), Action::Write) => "reads",
            _ => return Ok(()),
        };
        let buffer = self.name.clone();
        Err(Fault::UnderWay { action, buffer, index: slot, who, does }.into())
    }

    fn flight(&mut self, slot: usize) -> &mut Flight {
        if self.flights.is_empty() {
            self.flights = vec![Flight::None; self.len];
        }
        &mut self.flights[slot]
    }

    /// A copy to a cell of shared memory begins: as a store, whose value nobody sees before [`Self::end_copy`].
    pub fn begin_copy(&mut self, index: i64, who: Who) -> Run {
        self.store(index, 0, who)?;
        *self.flight(index as usize) = Flight::Target;
        Ok(())
    }

    pub fn end_copy(&mut self, index: i64, value: Cell, who: Who) -> Run {
        *self.flight(index as usize) = Flight::None;
        self.store(index, value, who)
    }

    /// A copy from a cell begins, which was read just now. What no kernel writes needs no lock.
    pub fn lock(&mut self, index: i64) {
        if self.touched.is_none() {
            return;
        }
        let flight = self.flight(index as usize);
        *flight = match *flight {
            Flight::Source(copies) => Flight::Source(copies + 1),
            _ => Flight::Source(1),
        };
    }

    pub fn unlock(&mut self, index: i64) {
        if self.touched.is_none() {
            return;
        }
        let flight = self.flight(index as usize);
        *flight = match *flight {
            Flight::Source(copies) if copies > 1 => Flight::Source(copies - 1),
            _ => Flight::None,
        };
    }

    fn race(&self, index: usize, action: Action, second: Who, earlier: Action, first: Who) -> Run {
        Err(Fault::Race { buffer: self.name.clone(), index, action, second, earlier, first }.into())
    }

    pub fn load(&mut self, index: i64, who: Who) -> Run<Cell> {
        let slot = self.slot(index, who.thread, Action::Read)?;
        self.under_way(slot, Action::Read, who)?;
        if self.written.as_ref().is_some_and(|w| !w[slot]) {
            return Err(Fault::Poison { buffer: self.name.clone(), index: index as usize }.into());
        }
        if let Some(touched) = &mut self.touched {
            let Touch { write, read } = &mut touched[slot];
            if concurrent(*write, who) {
                let first = *write;
                self.race(slot, Action::Read, who, Action::Write, first)?;
            } else if *read == NOBODY || (read.block == who.block && read.epoch != who.epoch) {
                *read = who;
            } else if read.block != who.block {
                read.block = MANY;
            } else if read.thread != who.thread {
                read.thread = MANY;
            }
        }
        Ok(match &self.data {
            Data::Bytes(bytes) => cell::read(self.dtype, bytes, slot),
            Data::Cells(cells) => cells[slot],
        })
    }

    pub fn store(&mut self, index: i64, value: Cell, who: Who) -> Run {
        let slot = self.slot(index, who.thread, Action::Write)?;
        self.under_way(slot, Action::Write, who)?;
        if let Some(touched) = &mut self.touched {
            let Touch { write, read } = touched[slot];
            if concurrent(write, who) {
                return self.race(slot, Action::Write, who, Action::Write, write);
            }
            if concurrent(read, who) {
                return self.race(slot, Action::Write, who, Action::Read, read);
            }
            touched[slot].write = who;
        }
        if let Some(written) = &mut self.written {
            written[slot] = true;
        }
        match &mut self.data {
            Data::Bytes(bytes) => cell::write(self.dtype, bytes, slot, value),
            Data::Cells(cells) => cells[slot] = value,
        }
        Ok(())
    }
}
