//! GPU semantics of the kernel interpreter: divergence by masks, block and thread axes, warp shuffles.
//!
//! A launch has the shape of the loops: axis extents are the largest extents of the `Block` and `Thread`
//! loops of that axis. A loop over a smaller extent runs in the threads below it (as generated code does with
//! an `if`); statements outside of `Thread` loops run in all threads. Threads are numbered x fastest; 32
//! consecutive ones form a warp.

pub(crate) mod matrix;

use crate::kernel::error::{KernelFault, RunResult};
use crate::kernel::machine::{ExecutionTask, KernelMachine};
use crate::kernel::program::{CompiledStmt, RegisterRange};

/// Threads of a warp.
pub const WARP: usize = 32;

impl<'p> KernelMachine<'p> {
    /// A loop whose extent may differ between threads: those that have finished wait, inactive, for the
    /// others.
    pub(crate) fn run_serial(
        &mut self,
        extent: RegisterRange,
        var: Option<RegisterRange>,
        name: &str,
        body: &'p [CompiledStmt],
    ) -> RunResult {
        let mut range: Option<(i64, i64)> = None;
        for (_, &e) in self.mask.iter().zip(self.cells(extent)).filter(|(on, _)| **on) {
            let e = e as i64;
            range = Some(range.map_or((e, e), |(low, high)| (low.min(e), high.max(e))));
        }
        let Some((shortest, longest)) = range else { return Ok(()) };
        if shortest == longest {
            for i in 0..longest {
                self.broadcast(var, i as u64);
                self.run_stmts(body).map_err(|e| e.inside(name, i))?;
            }
            return Ok(());
        }
        let extents: Vec<i64> = self.cells(extent).iter().map(|e| *e as i64).collect();
        let before = self.mask.clone();
        for i in 0..longest {
            for ((on, was), extent) in self.mask.iter_mut().zip(&before).zip(&extents) {
                *on = *was && i < *extent;
            }
            self.broadcast(var, i as u64);
            self.run_stmts(body).map_err(|e| e.inside(name, i))?;
        }
        self.mask = before;
        Ok(())
    }

    pub(crate) fn run_branch(
        &mut self,
        cond: RegisterRange,
        then: &'p [CompiledStmt],
        otherwise: &'p [CompiledStmt],
    ) -> RunResult {
        let before = self.mask.clone();
        let taken: Vec<bool> = self.cells(cond).iter().zip(&before).map(|(c, on)| *on && *c != 0).collect();
        let rest: Vec<bool> = taken.iter().zip(&before).map(|(t, on)| *on && !*t).collect();
        self.run_masked(taken, then)?;
        self.run_masked(rest, otherwise)?;
        self.mask = before;
        Ok(())
    }

    fn run_masked(&mut self, mask: Vec<bool>, body: &'p [CompiledStmt]) -> RunResult {
        if body.is_empty() || !mask.contains(&true) {
            return Ok(());
        }
        self.mask = mask;
        self.run_stmts(body)
    }

    pub(crate) fn block_axis(
        &mut self,
        axis: u8,
        extent: RegisterRange,
        var: Option<RegisterRange>,
        body: &'p [CompiledStmt],
    ) -> RunResult {
        let ExecutionTask::Block { index, .. } = self.task else {
            return Err(KernelFault::Malformed("a block loop in a CPU kernel".into()).into());
        };
        let index = index[axis as usize];
        if index >= self.cells(extent)[0] as i64 {
            return Ok(());
        }
        self.broadcast(var, index as u64);
        self.run_stmts(body).map_err(|e| e.inside(["block.x", "block.y", "block.z"][axis as usize], index))
    }

    pub(crate) fn thread_axis(
        &mut self,
        axis: u8,
        extent: RegisterRange,
        var: Option<RegisterRange>,
        body: &'p [CompiledStmt],
    ) -> RunResult {
        let shape = self.program.threads;
        let extent = self.cells(extent)[0] as usize;
        let place = |thread: usize| match axis {
            0 => thread % shape[0],
            1 => thread / shape[0] % shape[1],
            _ => thread / (shape[0] * shape[1]),
        };
        let before = self.mask.clone();
        let threads = before.len();
        for (thread, on) in self.mask.iter_mut().enumerate() {
            *on = before[thread] && place(thread) < extent;
        }
        if let Some(var) = var {
            for thread in 0..threads {
                self.registers[var.at * threads + thread] = place(thread) as u64;
            }
        }
        let mask = self.mask.clone();
        self.run_masked(mask, body)?;
        self.mask = before;
        Ok(())
    }

    /// Each active thread gets the value of the thread in its warp whose lane is its own xor `lane_mask`.
    pub(crate) fn shuffle_xor(
        &mut self,
        instr: &'static str,
        value: RegisterRange,
        lane_mask: RegisterRange,
        out: RegisterRange,
    ) -> RunResult {
        let threads = self.threads();
        for thread in (0..threads).filter(|t| self.mask[*t]).collect::<Vec<_>>() {
            let mask = self.cells(lane_mask)[thread] as i64;
            if !(0..WARP as i64).contains(&mask) {
                return Err(KernelFault::LaneMask { instr, thread, mask }.into());
            }
            let source_thread = thread ^ mask as usize;
            if !self.mask.get(source_thread).is_some_and(|on| *on) {
                return Err(KernelFault::InactiveLane { instr, thread, source_thread }.into());
            }
            self.registers[out.at * threads + thread] = self.cells(value)[source_thread];
        }
        Ok(())
    }
}
