//! Local memory: each lane has its own.

use super::LANES;
use super::fault::{FaultKind, InstructionFault, trouble};
use crate::ptx::scope::LOCAL_BASE;

pub struct LocalMemory {
    bytes: u32,
    /// Lane by lane; `None` was never written.
    data: Vec<Option<u8>>,
}

impl LocalMemory {
    /// `end`: where the last array ends.
    pub fn new(end: u32) -> Self {
        let bytes = end - LOCAL_BASE;
        Self { bytes, data: vec![None; bytes as usize * LANES] }
    }

    pub fn clear(&mut self) {
        self.data.fill(None);
    }

    fn place(
        &mut self,
        at: u64,
        bytes: u32,
        lane: usize,
    ) -> Result<&mut [Option<u8>], Box<InstructionFault>> {
        let offset = at.checked_sub(u64::from(LOCAL_BASE));
        match offset.filter(|at| at.checked_add(bytes.into()).is_some_and(|end| end <= self.bytes.into())) {
            Some(offset) => {
                let begin = lane * self.bytes as usize + offset as usize;
                Ok(&mut self.data[begin..begin + bytes as usize])
            }
            None => {
                let what = format!(
                    "{bytes} bytes at {at:#x} of local memory, which has {} from {LOCAL_BASE:#x} on",
                    self.bytes
                );
                Err(trouble(FaultKind::OutOfBounds, Some(lane), what))
            }
        }
    }

    pub fn load(&mut self, at: u64, bytes: u32, lane: usize) -> Result<u64, Box<InstructionFault>> {
        let place = self.place(at, bytes, lane)?;
        let value = place.iter().rev().try_fold(0, |sum, byte| byte.map(|byte| sum << 8 | u64::from(byte)));
        value.ok_or_else(|| {
            trouble(
                FaultKind::Uninitialised,
                Some(lane),
                format!("{at:#x} of local memory is read before it has a value"),
            )
        })
    }

    pub fn store(
        &mut self,
        at: u64,
        bytes: u32,
        value: u64,
        lane: usize,
    ) -> Result<(), Box<InstructionFault>> {
        let place = self.place(at, bytes, lane)?;
        for (to, byte) in place.iter_mut().zip(value.to_le_bytes()) {
            *to = Some(byte);
        }
        Ok(())
    }
}
