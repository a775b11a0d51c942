//! Blocks of a launch, followed through the machine code of their kernel.
//!
//! Every lane has a place of its own in the code; those at the lowest one go first, so that lanes join behind
//! branches. Values of tensors are unknown: a decision that depends on one counts as false, a place that
//! depends on one as memory that nothing else reads.

mod access;
mod alu;
mod lanes;
mod memory;
mod op;
mod warp;

pub use op::ExecutionPipe;

use std::collections::BTreeSet;

use mlcc_target::{GpuModel, InstrLatency};

use crate::launch::{LaunchConfig, PredictedCall, arg_address};
use crate::sass::{SassFunction, SassInstr};
use crate::{PredictError, launch};
use alu::ConstantReader;
use lanes::{LaneWords, active_lanes};
use memory::TrackedSharedMemory;
use op::{SassOp, decode, tensor_operations};
use warp::WalkedWarp;

/// Instructions of a block, of all its warps.
const MOST_INSTRUCTIONS: u64 = 100_000_000;

/// A kernel, decoded.
pub struct DecodedKernel {
    pub name: String,
    code: Vec<DecodedInstr>,
    /// The start of the arguments in the constant bank.
    arguments: i64,
}

struct DecodedInstr {
    instr: SassInstr,
    op: SassOp,
    pipe: ExecutionPipe,
    /// The instruction at a branch's target.
    target: Option<usize>,
}

impl DecodedKernel {
    /// `sm`: of the machine code.
    pub fn new(function: &SassFunction, sm: u32) -> Result<DecodedKernel, PredictError> {
        let fault = |what: String| PredictError::Kernel { kernel: function.name.clone(), what };
        let place = |at: i64| function.code.binary_search_by_key(&at, |i| i64::from(i.at)).ok();
        let mut code = Vec::with_capacity(function.code.len());
        for instr in &function.code {
            let (op, pipe) = decode(instr).ok_or_else(|| {
                let name = [std::slice::from_ref(&instr.name), &instr.modifiers].concat().join(".");
                fault(format!("predictions do not cover the instruction `{name}` (at {:#x})", instr.at))
            })?;
            let target = match op {
                SassOp::Branch | SassOp::Call => {
                    let at = instr.operands.last().map_or(-1, alu::immediate_value);
                    let target = place(at);
                    Some(target.ok_or_else(|| fault(format!("a branch at {:#x} leads nowhere", instr.at)))?)
                }
                _ => None,
            };
            code.push(DecodedInstr { instr: instr.clone(), op, pipe, target });
        }
        let arguments = match sm {
            ..90 => 0x160,
            90..100 => 0x210,
            _ => 0x380,
        };
        Ok(DecodedKernel { name: function.name.clone(), code, arguments })
    }

    /// True if it has an instruction of this name and modifier.
    pub fn uses(&self, name: &str, modifier: &str) -> bool {
        self.code.iter().any(|s| s.instr.name == name && (modifier.is_empty() || s.instr.has(modifier)))
    }
}

/// Counts of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub instructions: u64,
    /// Instructions by [`ExecutionPipe::ALL`].
    pub by_pipe: [u64; ExecutionPipe::ALL.len()],
    pub tensor_operations: u64,
    /// Clocks of the path to the first level and shared memory.
    pub bank_cycles: u64,
    /// Sectors that went to the second level.
    pub l2_sectors: u64,
    /// Sectors of [`launch::DataResidency::Memory`], read and written, each once.
    pub read: BTreeSet<u64>,
    pub written: BTreeSet<u64>,
    /// Sectors of places that are unknown.
    pub unknown_sectors: u64,
    pub spills: u64,
    /// Decisions that depended on the values of tensors.
    pub undecided: u64,
    /// True if something was read that depends on the tokens before.
    pub reads_past: bool,
}

/// A block that was followed to its end.
#[derive(Clone, Debug)]
pub struct WalkedBlock {
    pub counts: BlockCounts,
    /// Clocks that it takes with nothing else on the device.
    pub alone: u64,
}

/// Follows one block of a launch.
pub fn walk_block(
    kernel: &DecodedKernel,
    shape: &LaunchConfig<'_>,
    call: &PredictedCall,
    gpu: &GpuModel,
    block: [u32; 3],
) -> Result<WalkedBlock, PredictError> {
    let mut run = BlockWalker {
        kernel,
        latency: gpu.latency,
        place: BlockPosition { shape, block, arguments: kernel.arguments },
        call,
        shared: TrackedSharedMemory::new((gpu.shared_bytes) as usize),
        counts: BlockCounts::default(),
        first_level: BTreeSet::new(),
    };
    let threads = shape.threads();
    let mut warps: Vec<WalkedWarp> = (0..threads.div_ceil(32))
        .map(|n| {
            let alive = threads - 32 * n;
            WalkedWarp::new(n, if alive >= 32 { u32::MAX } else { (1 << alive) - 1 })
        })
        .collect();
    loop {
        let mut waiting = false;
        for warp in warps.iter_mut().filter(|w| w.alive != 0) {
            waiting |= run.until_barrier(warp)?;
        }
        let latest = warps.iter().map(|w| w.clock).max().unwrap_or(0);
        if !waiting {
            return Ok(WalkedBlock { counts: run.counts, alone: latest });
        }
        warps.iter_mut().filter(|w| w.alive != 0).for_each(|w| w.clock = latest);
    }
}

/// The position of a block, and its arguments.
struct BlockPosition<'a> {
    shape: &'a LaunchConfig<'a>,
    block: [u32; 3],
    arguments: i64,
}

impl ConstantReader for BlockPosition<'_> {
    fn constant(&self, bank: u32, offset: i64) -> Option<u32> {
        if bank != 0 || offset < 0 {
            return None;
        }
        if offset < 24 {
            let sizes = [self.shape.block, self.shape.grid].concat();
            return sizes.get(offset as usize / 4).copied();
        }
        let at = offset.checked_sub(self.arguments).filter(|at| *at >= 0)? as usize;
        let argument = arg_address(self.shape.args.get(at / 8)?, self.shape.repeat);
        Some((argument >> (8 * (at % 8))) as u32)
    }

    fn special(&self, name: &str, warp: u32) -> LaneWords {
        let [x, y, _] = self.shape.block;
        let thread = |l: usize| 32 * warp + l as u32;
        let each =
            |f: &dyn Fn(u32) -> u32| LaneWords { v: std::array::from_fn(|l| f(thread(l))), known: u32::MAX };
        match name {
            "SR_TID.X" => each(&|t| t % x),
            "SR_TID.Y" => each(&|t| t / x % y),
            "SR_TID.Z" => each(&|t| t / x / y),
            "SR_CTAID.X" => LaneWords::splat(self.block[0]),
            "SR_CTAID.Y" => LaneWords::splat(self.block[1]),
            "SR_CTAID.Z" => LaneWords::splat(self.block[2]),
            "SR_LANEID" => each(&|t| t % 32),
            // No clusters of blocks.
            "SR_CgaCtaId" => LaneWords::splat(0),
            _ => LaneWords::UNKNOWN,
        }
    }
}

struct BlockWalker<'a> {
    kernel: &'a DecodedKernel,
    latency: InstrLatency,
    place: BlockPosition<'a>,
    call: &'a PredictedCall,
    shared: TrackedSharedMemory,
    counts: BlockCounts,
    /// Sectors that the block has read through the first level.
    first_level: BTreeSet<u64>,
}

impl BlockWalker<'_> {
    fn fault(&self, what: impl Into<String>) -> PredictError {
        PredictError::Kernel { kernel: self.kernel.name.clone(), what: what.into() }
    }

    /// Goes on with a warp; whether it waits at a barrier and is not done.
    fn until_barrier(&mut self, w: &mut WalkedWarp) -> Result<bool, PredictError> {
        let kernel = self.kernel;
        while w.alive != 0 {
            let at = active_lanes(w.alive).map(|l| w.next[l]).min().unwrap_or(0);
            let together: u32 = active_lanes(w.alive).filter(|&l| w.next[l] == at).map(|l| 1 << l).sum();
            let Some(step) = kernel.code.get(at) else {
                return Err(self.fault("the code has an end without an exit"));
            };
            let mask = w.guard_mask(step.instr.guard) & together;
            active_lanes(together).for_each(|l| w.next[l] = at + 1);
            let ready = self.issue(w, step, mask)?;
            if step.op == SassOp::Barrier && mask != 0 {
                return Ok(true);
            }
            self.schedule(w, &step.instr, step.op, ready);
        }
        Ok(false)
    }

    /// Counts and executes an instruction; gives how many clocks its result takes.
    fn issue(&mut self, w: &mut WalkedWarp, step: &DecodedInstr, mask: u32) -> Result<u64, PredictError> {
        let control = step.instr.control;
        let awaited = active_lanes(u32::from(control.wait)).filter_map(|b| w.scoreboards.get(b)).max();
        w.clock = w.clock.max(awaited.copied().unwrap_or(0));
        self.counts.instructions += 1;
        if self.counts.instructions > MOST_INSTRUCTIONS {
            return Err(self.fault(format!("a block has more than {MOST_INSTRUCTIONS} instructions")));
        }
        self.counts.by_pipe[step.pipe as usize] += 1;
        if mask == 0 {
            return Ok(0);
        }
        let i = &step.instr;
        let other = u64::from(self.latency.other);
        match step.op {
            SassOp::Nothing | SassOp::Barrier => {}
            SassOp::Branch | SassOp::Call => {
                let target = step.target.unwrap_or(0);
                active_lanes(mask).for_each(|l| w.next[l] = target);
            }
            SassOp::Return => self.give_back(w, i, mask)?,
            SassOp::Exit => w.alive &= !mask,
            SassOp::CommitCopies => {
                w.groups.push(w.open_copies);
                w.open_copies = 0;
            }
            SassOp::WaitCopies => {
                let under_way =
                    i.operands.iter().rev().map(alu::immediate_value).next().unwrap_or(0) as usize;
                let landed = w.groups.len().saturating_sub(under_way);
                let latest = w.groups.drain(..landed).max().unwrap_or(0);
                w.clock = w.clock.max(latest);
            }
            SassOp::Constant { bytes } => self.constant(w, i, bytes, mask),
            SassOp::Global { bytes, kind } => return Ok(self.global(w, i, bytes, kind, mask)),
            SassOp::Shared { bytes, store } => return Ok(self.shared(w, i, bytes, store, mask)),
            SassOp::Matrices { count } => return Ok(self.matrices(w, i, count, mask)),
            SassOp::Local => {
                self.counts.spills += 1;
                self.unknown(w, i, 4, mask);
                return Ok(u64::from(self.latency.l1));
            }
            SassOp::Shuffle(how) => {
                self.counts.bank_cycles += 1;
                self.shuffle(w, i, how, mask);
            }
            SassOp::Float { registers } => {
                if step.pipe == ExecutionPipe::Tensor {
                    self.counts.tensor_operations += tensor_operations(i);
                }
                self.unknown(w, i, registers, mask);
            }
            SassOp::Decision => {
                self.counts.undecided += 1;
                for operand in i.operands.iter().take(2) {
                    if let crate::sass::SassOperand::Predicate { number, uniform, .. } = operand {
                        w.set_predicate(*number, *uniform, 0, mask);
                    }
                }
            }
            op => {
                if !alu::execute(w, i, op, mask, &self.place) {
                    return Err(
                        self.fault(format!("the operands of `{}` at {:#x} are unknown", i.name, i.at))
                    );
                }
            }
        }
        Ok(other)
    }

    /// Schedules the next instruction, and the time at which this one's result is there.
    fn schedule(&self, w: &mut WalkedWarp, i: &SassInstr, op: SassOp, result_after: u64) {
        // Groups of copies are waited for by their number.
        if let (Some(board), false) = (i.control.result, op == SassOp::CommitCopies) {
            let board = &mut w.scoreboards[usize::from(board)];
            *board = (*board).max(w.clock + result_after);
        }
        if let Some(board) = i.control.operands {
            let board = &mut w.scoreboards[usize::from(board)];
            *board = (*board).max(w.clock + u64::from(self.latency.operands));
        }
        w.clock += u64::from(i.control.stall).max(1);
    }

    /// A return to a place in a register.
    fn give_back(&mut self, w: &mut WalkedWarp, i: &SassInstr, mask: u32) -> Result<(), PredictError> {
        let to = i.operands.first().map_or(LaneWords::UNKNOWN, |o| alu::read_source(w, o, &self.place));
        let code = &self.kernel.code;
        for l in active_lanes(mask) {
            let at =
                code.binary_search_by_key(&to.v[l], |s| s.instr.at).ok().filter(|_| to.known >> l & 1 == 1);
            w.next[l] = at.ok_or_else(|| self.fault(format!("a return at {:#x} leads nowhere", i.at)))?;
        }
        Ok(())
    }

    /// Registers whose values are unknown.
    fn unknown(&self, w: &mut WalkedWarp, i: &SassInstr, registers: u8, mask: u32) {
        if let Some(result) = alu::result_register(i) {
            (0..registers).for_each(|r| w.set(warp::next_register(result, r), &LaneWords::UNKNOWN, mask));
        }
    }
}

/// The place of a sector in the device's memory.
fn kind_of(sector: u64) -> launch::DataResidency {
    launch::data_residency(sector * access::SECTOR_BYTES)
}

#[cfg(test)]
mod tests;
