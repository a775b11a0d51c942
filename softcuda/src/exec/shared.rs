//! Shared memory of a block. Every unit remembers its writers and readers since the last barrier, so a race
//! is found whatever the order of execution was.

use super::fault::{FaultKind, InstructionFault, trouble};
use crate::ptx::kernel::PtxKernel;
use crate::ptx::op::{PtxOp, StateSpace};
use crate::ptx::scope::{SHARED_BASE, SharedArray};

/// A moment of a thread: barriers of the block and of its warp that it has passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AccessMoment {
    pub thread: u16,
    pub epoch: u32,
    pub warp_epoch: u16,
}

impl AccessMoment {
    /// True if the event at `before` is ordered before this moment.
    pub fn after(self, before: AccessMoment) -> bool {
        self.thread == before.thread
            || self.epoch != before.epoch
            || self.thread / 32 == before.thread / 32 && self.warp_epoch != before.warp_epoch
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ByteContent {
    /// No array lies here.
    Outside,
    Unwritten,
    Written,
    /// A copy to here is under way, of the thread that `writer` names.
    Pending,
}

#[derive(Clone, Copy)]
struct SharedCell {
    content: ByteContent,
    writer: Option<AccessMoment>,
    reader: Option<AccessMoment>,
    /// Several threads have read; `reader` is one of them. `Some(true)`: all of one warp.
    many: Option<bool>,
}

const OUTSIDE: SharedCell =
    SharedCell { content: ByteContent::Outside, writer: None, reader: None, many: None };

pub struct BlockSharedMemory {
    bytes: Vec<u8>,
    cells: Vec<SharedCell>,
    /// Bytes of a cell: those of the smallest access of the kernel.
    unit: u32,
    arrays: Vec<SharedArray>,
}

fn smallest_access(kernel: &PtxKernel) -> u32 {
    let bytes = kernel.code.iter().filter_map(|inst| match &inst.op {
        PtxOp::Ld { space: StateSpace::Shared, ty, .. } | PtxOp::St { space: StateSpace::Shared, ty, .. } => {
            Some(ty.bytes())
        }
        _ => None,
    });
    bytes.min().unwrap_or(4).min(4)
}

impl BlockSharedMemory {
    /// `dynamic`: bytes that the launch adds after the kernel's own arrays.
    pub fn new(kernel: &PtxKernel, dynamic: u32) -> Self {
        let mut arrays = kernel.shared.clone();
        if dynamic > 0 {
            arrays.push(SharedArray {
                name: "dynamic shared memory".into(),
                at: kernel.shared_end,
                bytes: dynamic,
            });
        }
        let end = arrays.iter().map(|a| a.at + a.bytes).max().unwrap_or(SHARED_BASE);
        let unit = smallest_access(kernel);
        let length = (end - SHARED_BASE).next_multiple_of(16);
        let mut shared = Self {
            bytes: vec![0; length as usize],
            cells: vec![OUTSIDE; (length / unit) as usize],
            unit,
            arrays,
        };
        shared.clear();
        shared
    }

    /// Clears the memory for another block of the launch.
    pub fn clear(&mut self) {
        for array in &self.arrays {
            let begin = ((array.at - SHARED_BASE) / self.unit) as usize;
            let end = (array.at - SHARED_BASE + array.bytes).div_ceil(self.unit) as usize;
            self.cells[begin..end].fill(SharedCell { content: ByteContent::Unwritten, ..OUTSIDE });
        }
    }

    fn cells(&self, at: u64, bytes: u32) -> Option<std::ops::Range<usize>> {
        let offset = at.checked_sub(u64::from(SHARED_BASE))?;
        offset.checked_add(u64::from(bytes)).filter(|end| *end <= self.bytes.len() as u64)?;
        // Units are powers of two.
        let shift = self.unit.trailing_zeros();
        let (first, last) = (offset as usize >> shift, (offset as usize + bytes as usize - 1) >> shift);
        let range = first..last + 1;
        self.cells[range.clone()].iter().all(|c| c.content != ByteContent::Outside).then_some(range)
    }

    fn outside(&self, at: u64, bytes: u32, lane: usize) -> Box<InstructionFault> {
        let arrays: Vec<_> =
            self.arrays.iter().map(|a| format!("{} {:#x}..{:#x}", a.name, a.at, a.at + a.bytes)).collect();
        let what = format!("{bytes} bytes at {at:#x} of shared memory, which has {}", arrays.join(", "));
        trouble(FaultKind::OutOfBounds, Some(lane), what)
    }

    fn name(&self, at: u64) -> String {
        let array =
            self.arrays.iter().find(|a| at >= u64::from(a.at) && at - u64::from(a.at) < u64::from(a.bytes));
        array.map_or_else(|| format!("{at:#x}"), |a| format!("{} + {}", a.name, at - u64::from(a.at)))
    }

    fn race(&self, at: u64, lane: usize, done: &str, by: AccessMoment) -> Box<InstructionFault> {
        let what = format!("thread {} {done} {} and no barrier stands between", by.thread, self.name(at));
        trouble(FaultKind::Race, Some(lane), what)
    }

    /// The bytes of an access, for counting.
    pub fn load(
        &mut self,
        at: u64,
        bytes: u32,
        now: AccessMoment,
        lane: usize,
    ) -> Result<u64, Box<InstructionFault>> {
        let Some(range) = self.cells(at, bytes) else { return Err(self.outside(at, bytes, lane)) };
        for i in range {
            let cell = self.cells[i];
            match (cell.content, cell.writer) {
                (ByteContent::Pending, _) => {
                    let what = format!("{} is read while a copy to it is under way", self.name(at));
                    return Err(trouble(FaultKind::Race, Some(lane), what));
                }
                (ByteContent::Unwritten, _) => {
                    let what = format!("{} of shared memory is read before it has a value", self.name(at));
                    return Err(trouble(FaultKind::Uninitialised, Some(lane), what));
                }
                (_, Some(writer)) if !now.after(writer) => return Err(self.race(at, lane, "wrote", writer)),
                _ => {}
            }
            self.cells[i] = read_cell(cell, now);
        }
        let begin = (at - u64::from(SHARED_BASE)) as usize;
        let mut value = [0; 8];
        value[..bytes as usize].copy_from_slice(&self.bytes[begin..begin + bytes as usize]);
        Ok(u64::from_le_bytes(value))
    }

    pub fn store(
        &mut self,
        at: u64,
        bytes: u32,
        value: u64,
        now: AccessMoment,
        lane: usize,
    ) -> Result<(), Box<InstructionFault>> {
        self.claim(at, bytes, now, lane, ByteContent::Written)?;
        self.put(at, &value.to_le_bytes()[..bytes as usize]);
        Ok(())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let begin = (at - u64::from(SHARED_BASE)) as usize;
        self.bytes[begin..begin + bytes.len()].copy_from_slice(bytes);
    }

    /// Notes that a thread writes.
    fn claim(
        &mut self,
        at: u64,
        bytes: u32,
        now: AccessMoment,
        lane: usize,
        content: ByteContent,
    ) -> Result<(), Box<InstructionFault>> {
        let Some(range) = self.cells(at, bytes) else { return Err(self.outside(at, bytes, lane)) };
        for i in range {
            let cell = self.cells[i];
            if cell.content == ByteContent::Pending {
                let what = format!("{} is written while a copy to it is under way", self.name(at));
                return Err(trouble(FaultKind::Race, Some(lane), what));
            }
            if let Some(writer) = cell.writer.filter(|w| !now.after(*w)) {
                return Err(self.race(at, lane, "wrote", writer));
            }
            if let Some(reader) = cell.reader.filter(|r| conflicts(cell, *r, now)) {
                return Err(self.race(at, lane, "read", reader));
            }
            self.cells[i] = SharedCell { content, writer: Some(now), reader: None, many: None };
        }
        Ok(())
    }

    /// Begins a copy by a thread; its target must not be touched until that thread has waited for it.
    pub fn begin_copy(
        &mut self,
        at: u64,
        bytes: u32,
        now: AccessMoment,
        lane: usize,
    ) -> Result<(), Box<InstructionFault>> {
        self.claim(at, bytes, now, lane, ByteContent::Pending)
    }

    /// The copy is over for the thread that waited.
    pub fn end_copy(&mut self, at: u64, bytes: &[u8], now: AccessMoment) {
        if let Some(range) = self.cells(at, bytes.len() as u32) {
            self.cells[range].fill(SharedCell {
                content: ByteContent::Written,
                writer: Some(now),
                reader: None,
                many: None,
            });
            self.put(at, bytes);
        }
    }

    /// An atomic access, which races with no other one.
    pub fn update(
        &mut self,
        at: u64,
        bytes: u32,
        lane: usize,
        f: impl Fn(u64) -> u64,
    ) -> Result<u64, Box<InstructionFault>> {
        let Some(range) = self.cells(at, bytes) else { return Err(self.outside(at, bytes, lane)) };
        if self.cells[range].iter().any(|c| c.content != ByteContent::Written) {
            let what = format!("{} of shared memory is changed before it has a value", self.name(at));
            return Err(trouble(FaultKind::Uninitialised, Some(lane), what));
        }
        let begin = (at - u64::from(SHARED_BASE)) as usize;
        let mut value = [0; 8];
        value[..bytes as usize].copy_from_slice(&self.bytes[begin..begin + bytes as usize]);
        let old = u64::from_le_bytes(value);
        self.put(at, &f(old).to_le_bytes()[..bytes as usize]);
        Ok(old)
    }
}

/// True if reads of a cell are not ordered before a write now.
fn conflicts(cell: SharedCell, reader: AccessMoment, now: AccessMoment) -> bool {
    match cell.many {
        None => !now.after(reader),
        // Readers of one warp, the last of them known.
        Some(true) => {
            reader.epoch == now.epoch
                && (reader.thread / 32 != now.thread / 32 || reader.warp_epoch == now.warp_epoch)
        }
        Some(false) => reader.epoch == now.epoch,
    }
}

fn read_cell(cell: SharedCell, now: AccessMoment) -> SharedCell {
    let many = match cell.reader {
        Some(before) if before.epoch == now.epoch && (cell.many.is_some() || before.thread != now.thread) => {
            Some(cell.many != Some(false) && before.thread / 32 == now.thread / 32)
        }
        _ => None,
    };
    SharedCell { reader: Some(now), many, ..cell }
}
