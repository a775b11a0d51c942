//! Asynchronous copies (`cp.async`) that a thread has started and not waited for. Data moves at the last
//! moment that is allowed, when the thread waits; until then the target has no contents and the source is
//! locked.

use super::cell::RegisterCell;
use super::error::{KernelFault, RunResult};
use super::machine::KernelMachine;
use super::program::RegisterRange;
use std::collections::VecDeque;

/// Elements `from` of a buffer on their way to elements `to` of another.
#[derive(Clone, Copy, Debug)]
struct AsyncCopy {
    to: (usize, i64),
    from: (usize, i64),
    len: i64,
}

/// Copies of one thread.
#[derive(Clone, Default, Debug)]
pub(crate) struct CopyGroups {
    /// Committed, the oldest first.
    groups: VecDeque<Vec<AsyncCopy>>,
    open: Vec<AsyncCopy>,
}

impl CopyGroups {
    /// Takes the copies that have to be done so that at most `pending` groups are left; with 0, uncommitted
    /// ones, too.
    fn take_landed(&mut self, pending: usize) -> Vec<AsyncCopy> {
        let over = self.groups.len().saturating_sub(pending);
        let mut all: Vec<AsyncCopy> = self.groups.drain(..over).flatten().collect();
        if pending == 0 {
            all.append(&mut self.open);
        }
        all
    }
}

/// One side of a copy: a buffer and the register with the number of its first element.
pub(crate) type CopyOperand = (usize, RegisterRange);

impl KernelMachine<'_> {
    fn active_threads(&self) -> Vec<usize> {
        (0..self.threads()).filter(|t| self.mask[*t]).collect()
    }

    pub(crate) fn begin_copies(
        &mut self,
        instr: &'static str,
        to: CopyOperand,
        from: CopyOperand,
        bytes: u32,
    ) -> RunResult {
        for thread in self.active_threads() {
            let who = self.access_origin(thread);
            let at = |(buf, index): CopyOperand| (buf, self.cells(index)[thread] as i64);
            let (to, from) = (at(to), at(from));
            let len = self.memory[to.0].check_alignment(instr, to.1, bytes)?;
            self.memory[from.0].check_alignment(instr, from.1, bytes)?;
            for i in 0..len {
                self.memory[from.0].load(from.1 + i, who)?;
                self.memory[to.0].begin_copy(to.1 + i, who)?;
                self.memory[from.0].lock_source(from.1 + i);
            }
            self.copies[thread].open.push(AsyncCopy { to, from, len });
        }
        Ok(())
    }

    pub(crate) fn commit_copies(&mut self) {
        for thread in self.active_threads() {
            let copies = &mut self.copies[thread];
            let group = std::mem::take(&mut copies.open);
            copies.groups.push_back(group);
        }
    }

    pub(crate) fn wait_for_copies(&mut self, pending: u32) -> RunResult {
        for thread in self.active_threads() {
            let who = self.access_origin(thread);
            for AsyncCopy { to, from, len } in self.copies[thread].take_landed(pending as usize) {
                for i in 0..len {
                    self.memory[from.0].unlock_source(from.1 + i);
                    let value: RegisterCell = self.memory[from.0].load(from.1 + i, who)?;
                    self.memory[to.0].end_copy(to.1 + i, value, who)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that nothing is under way at the end of a block.
    pub(crate) fn no_copies_left(&self) -> RunResult {
        let left = |c: &CopyGroups| c.groups.iter().flatten().chain(&c.open).next().copied();
        for (thread, copies) in self.copies.iter().enumerate() {
            if let Some(copy) = left(copies) {
                let buffer = self.memory[copy.to.0].name.clone();
                return Err(KernelFault::NotWaitedFor { thread, buffer, index: copy.to.1 as usize }.into());
            }
        }
        Ok(())
    }
}
