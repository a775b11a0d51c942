//! The time of a launch, from counts of some of its blocks: each limit alone, and the one that binds.

use std::collections::BTreeMap;
use std::fmt;

use mlcc_target::GpuModel;

use crate::PredictError;
use crate::launch::{LaunchConfig, PredictedCall};
use crate::walk::{BlockCounts, DecodedKernel, ExecutionPipe, WalkedBlock, walk_block};

/// Blocks of a launch that are followed, and of one whose blocks differ.
const SAMPLES: u64 = 8;
const MORE_SAMPLES: u64 = 64;
/// Neighbours along an axis that are compared: at most this many blocks of a product share a tile of weights.
const WINDOW: u32 = 4;
const SECTOR: f64 = 32.0;
/// The number of registers of each thread that warps get together.
const REGISTER_SET: u32 = 8;
const SCHEDULERS: u32 = 4;

/// Resources of a kernel according to the assembler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelResources {
    pub registers: u32,
    /// Declared by the kernel.
    pub shared_bytes: u32,
}

/// The work of a launch, in all its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct LaunchWorkload {
    pub blocks: u64,
    /// Blocks that a multiprocessor has at a time.
    pub resident: u32,
    pub warps_of_block: u32,
    /// Warp instructions of a block in the mean, and by [`ExecutionPipe::ALL`].
    pub instructions: f64,
    pub by_pipe: [f64; ExecutionPipe::ALL.len()],
    /// Likewise operations on tensor cores, clocks of the path to shared memory and first level, and sectors
    /// from the second level.
    pub tensor_operations: f64,
    pub bank_cycles: f64,
    pub l2_sectors: f64,
    /// Bytes that a block reads from memory in the mean.
    pub read_bytes: f64,
    /// Bytes that come from memory and go there, of all blocks.
    pub memory_bytes: f64,
    /// Clocks of a block alone on the device: in the mean, and the most.
    pub alone: f64,
    pub max_block_clocks: f64,
    /// Memory is in the second level from the start.
    pub cached: bool,
}

/// The limit that binds a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LaunchBound {
    Memory,
    SecondLevel,
    /// Instructions that wait for others of their warp, with too few warps beside.
    Latency,
    /// Turns of the schedulers.
    Issue,
    /// Units of one kind.
    Units(&'static str),
    /// Turns of shared memory and of the first level.
    SharedMemory,
    /// The time from one kernel to the next.
    Launch,
}

impl fmt::Display for LaunchBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LaunchBound::Memory => "memory",
            LaunchBound::SecondLevel => "second level",
            LaunchBound::Latency => "latency",
            LaunchBound::Issue => "issue",
            LaunchBound::Units(name) => return write!(f, "{name} units"),
            LaunchBound::SharedMemory => "shared memory",
            LaunchBound::Launch => "launch",
        })
    }
}

/// A launch, as predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchPrediction {
    pub work: LaunchWorkload,
    /// Time of the kernel, without the gap between two.
    pub seconds: f64,
    pub bound: LaunchBound,
    /// Seconds that each limit alone would need.
    pub limits: Vec<(LaunchBound, f64)>,
    /// Bytes that a multiprocessor has asked memory for at a time.
    pub in_flight: f64,
    pub spills: u64,
    /// Decisions of one block that depended on the values of tensors, and counted as false.
    pub undecided: u64,
    /// True if other lengths of the sequence have other times.
    pub reads_past: bool,
}

impl LaunchPrediction {
    /// Seconds that its bytes and products need at the device's best rates.
    pub fn roofline_seconds(&self, gpu: &GpuModel) -> f64 {
        let bytes = self.work.memory_bytes / (f64::from(gpu.copy_gbytes_per_s) * 1e9);
        let products = self.work.tensor_operations * self.work.blocks as f64;
        bytes.max(products / (f64::from(gpu.dense_tflops) * 1e12))
    }
}

/// Blocks that a multiprocessor has at a time; 0 if one alone does not fit.
pub fn resident_blocks(
    resources: KernelResources,
    threads: u32,
    shared_at_launch: u32,
    gpu: &GpuModel,
) -> u32 {
    let warps = threads.div_ceil(32).max(1);
    let of_warp = resources.registers.max(1).next_multiple_of(REGISTER_SET) * 32;
    let by_registers = gpu.registers / SCHEDULERS / of_warp * SCHEDULERS / warps;
    let shared = resources.shared_bytes + shared_at_launch + gpu.reserved_shared_bytes;
    by_registers.min(gpu.shared_bytes / shared.max(1)).min(gpu.warps / warps).min(gpu.blocks)
}

/// Predicts one launch in a call. A launch without blocks takes no time.
pub fn predict(
    kernel: &DecodedKernel,
    resources: KernelResources,
    shape: &LaunchConfig<'_>,
    call: &PredictedCall,
    gpu: &GpuModel,
) -> Result<LaunchPrediction, PredictError> {
    let cached = call.plan.weights_bytes + call.plan.state_bytes < gpu.l2_bytes / 2;
    let mut near = gpu.clone();
    if cached {
        near.latency.memory = near.latency.l2;
    }
    let fits = resident_blocks(resources, shape.threads(), shape.shared_bytes, gpu);
    if fits == 0 {
        let what =
            format!("a block of {} threads does not fit a multiprocessor of {}", shape.threads(), gpu.title);
        return Err(PredictError::Kernel { kernel: kernel.name.clone(), what });
    }
    let mut walks = BlockWalks { kernel, shape, call, gpu: &near, done: BTreeMap::new() };
    let work = LaunchWorkload { resident: fits, cached, ..walks.work()? };
    let (seconds, bound, limits) = time(&work, gpu);
    let clocks = work.max_block_clocks.max(1.0);
    let beside = f64::from(fits).min((work.blocks as f64 / f64::from(gpu.sms)).ceil());
    let sum = |of: fn(&BlockCounts) -> u64| walks.done.values().map(|w| of(&w.counts)).sum::<u64>();
    Ok(LaunchPrediction {
        seconds,
        bound,
        limits,
        in_flight: beside * work.read_bytes / clocks * f64::from(near.latency.memory),
        spills: sum(|c| c.spills),
        undecided: sum(|c| c.undecided) / walks.done.len().max(1) as u64,
        reads_past: walks.done.values().any(|w| w.counts.reads_past),
        work,
    })
}

/// Blocks of a launch that have been followed.
struct BlockWalks<'a> {
    kernel: &'a DecodedKernel,
    shape: &'a LaunchConfig<'a>,
    call: &'a PredictedCall,
    gpu: &'a GpuModel,
    done: BTreeMap<[u32; 3], WalkedBlock>,
}

impl BlockWalks<'_> {
    fn walk(&mut self, block: [u32; 3]) -> Result<&WalkedBlock, PredictError> {
        let found = match self.done.remove(&block) {
            Some(found) => found,
            None => walk_block(self.kernel, self.shape, self.call, self.gpu, block)?,
        };
        Ok(self.done.entry(block).or_insert(found))
    }

    /// The work of all blocks, from some that are spread evenly over the grid.
    fn work(&mut self) -> Result<LaunchWorkload, PredictError> {
        let blocks = self.shape.blocks();
        if blocks == 0 {
            return Ok(LaunchWorkload::default());
        }
        let [x, y, _] = self.shape.grid.map(u64::from);
        let place = |at: u64| [at % x, at / x % y, at / x / y].map(|v| v as u32);
        let mut chosen = Vec::new();
        for count in [SAMPLES, MORE_SAMPLES] {
            chosen = samples(blocks, count).into_iter().map(place).collect::<Vec<[u32; 3]>>();
            let mut executed = Vec::new();
            for block in &chosen {
                executed.push(self.walk(*block)?.counts.instructions);
            }
            // How many have much to do and how many have little is a matter of the sizes then, not of powers
            // of two.
            if executed.iter().min().map(|least| least * 2) > executed.iter().max().copied() {
                break;
            }
        }
        let count = chosen.len() as f64;
        let mean =
            |of: &dyn Fn(&WalkedBlock) -> f64| chosen.iter().map(|b| of(&self.done[b])).sum::<f64>() / count;
        let counted = |of: fn(&BlockCounts) -> u64| mean(&|w| of(&w.counts) as f64);
        let mut work = LaunchWorkload {
            blocks,
            resident: 0,
            warps_of_block: self.shape.threads().div_ceil(32),
            instructions: counted(|c| c.instructions),
            by_pipe: std::array::from_fn(|p| mean(&|w| w.counts.by_pipe[p] as f64)),
            tensor_operations: counted(|c| c.tensor_operations),
            bank_cycles: counted(|c| c.bank_cycles),
            l2_sectors: counted(|c| c.l2_sectors),
            read_bytes: counted(|c| c.read.len() as u64 + c.unknown_sectors) * SECTOR,
            memory_bytes: counted(|c| c.written.len() as u64 + c.unknown_sectors) * SECTOR * blocks as f64,
            alone: mean(&|w| w.alone as f64),
            max_block_clocks: chosen.iter().map(|b| self.done[b].alone as f64).fold(0.0, f64::max),
            cached: false,
        };
        work.memory_bytes += self.read_once(&chosen)? * SECTOR;
        Ok(work)
    }

    /// Sectors that all blocks read, each counted once: what all readers among the neighbours along an axis
    /// and one far away read is read once along that axis, and of the rest each part of the axis reads as
    /// many sectors as these neighbours together.
    fn read_once(&mut self, chosen: &[[u32; 3]]) -> Result<f64, PredictError> {
        let read = |walked: &WalkedBlock| walked.counts.read.len();
        let Some(most) = chosen.iter().copied().max_by_key(|b| read(&self.done[b])) else { return Ok(0.0) };
        let own = self.done[&most].counts.read.clone();
        if own.is_empty() {
            return Ok(0.0);
        }
        let mut mean = chosen.iter().map(|b| read(&self.done[b])).sum::<usize>() as f64 / chosen.len() as f64;
        let mut times = vec![1.0; own.len()];
        for axis in 0..3 {
            let extent = self.shape.grid[axis];
            if extent == 1 {
                continue;
            }
            let begin = most[axis] / WINDOW * WINDOW;
            let window = begin..(begin + WINDOW).min(extent);
            // Blocks that read each sector.
            let (mut readers, mut sectors) = (0, BTreeMap::<u64, u32>::new());
            let mut of_window = 0;
            for at in window.clone() {
                let mut beside = most;
                beside[axis] = at;
                let there = &self.walk(beside)?.counts.read;
                readers += u32::from(!there.is_empty());
                of_window += there.len();
                there.iter().for_each(|s| *sectors.entry(*s).or_default() += 1);
            }
            // At the same place among its neighbours, as some places have nothing to do.
            let mut far = most;
            far[axis] = (most[axis] + extent / 2 / WINDOW * WINDOW) % extent;
            let far = self.walk(far)?.counts.read.clone();
            let in_all = |s: &u64| readers > 1 && sectors.get(s) == Some(&readers);
            let shared = |s: &u64| in_all(s) && (far.is_empty() || far.contains(s));
            let apart = sectors.keys().filter(|s| !shared(s)).count() as f64;
            let own_apart = own.iter().filter(|s| !shared(s)).count().max(1) as f64;
            let parts = f64::from(extent) / window.len() as f64;
            for (_, times) in own.iter().zip(&mut times).filter(|(s, _)| !shared(s)) {
                *times *= parts * apart / own_apart;
            }
            // Neighbours that read less or nothing are counted above.
            mean *= (own.len() * window.len()) as f64 / of_window as f64;
        }
        // Where blocks far away read more or less, those of the mean block count.
        let share = mean / own.len() as f64;
        Ok(times.into_iter().map(|times| if times > 1.0 { times * share } else { times }).sum())
    }
}

/// Blocks that represent all: one of each of equal parts of the launch, whose remainders by small powers of
/// two are equally frequent. Kernels deal their work out by such remainders, and give nothing to some.
fn samples(blocks: u64, most: u64) -> Vec<u64> {
    let count = blocks.min(most);
    let begin = |i: u64| i * blocks / count;
    let of_part = |i: u64| {
        let wide = (begin(i + 1) - begin(i)).min(most);
        let power = 1 << wide.ilog2();
        begin(i) + (i % power + power - begin(i) % power) % power
    };
    (0..count).map(of_part).collect()
}

/// Seconds, what binds, and every limit.
fn time(work: &LaunchWorkload, gpu: &GpuModel) -> (f64, LaunchBound, Vec<(LaunchBound, f64)>) {
    if work.blocks == 0 {
        return (0.0, LaunchBound::Launch, vec![]);
    }
    let clock = f64::from(gpu.clock_mhz) * 1e6;
    // Blocks of the multiprocessor that has most.
    let busiest = work.blocks.div_ceil(u64::from(gpu.sms)) as f64;
    let beside = busiest.min(f64::from(work.resident));
    let warps = beside * f64::from(work.warps_of_block);
    // With few warps some schedulers have none.
    let schedulers = warps.min(f64::from(SCHEDULERS)).max(1.0);
    let part = f64::from(SCHEDULERS) / schedulers;
    let of_all = |clocks: f64| busiest * clocks * part / clock;
    let bytes = work.l2_sectors * SECTOR;
    let wide = bytes * work.blocks as f64 / f64::from(gpu.l2_bytes_per_clock);
    let narrow = bytes * busiest / f64::from(gpu.sm_bytes_per_clock);
    let memory = if work.cached { 0.0 } else { work.memory_bytes / (f64::from(gpu.copy_gbytes_per_s) * 1e9) };
    let tensor = work.tensor_operations / (f64::from(gpu.mma.operations) * gpu.mma.share);
    let mut limits = vec![
        (LaunchBound::Memory, memory),
        (LaunchBound::SecondLevel, wide.max(narrow) / clock),
        (LaunchBound::Issue, of_all(work.instructions / f64::from(SCHEDULERS))),
        (LaunchBound::SharedMemory, busiest * work.bank_cycles / clock),
        (LaunchBound::Units(ExecutionPipe::Tensor.name()), of_all(tensor)),
    ];
    let lanes = gpu.lanes;
    let rates = [
        (ExecutionPipe::Float, lanes.float),
        (ExecutionPipe::Integer, lanes.integer),
        (ExecutionPipe::Half, lanes.half),
        (ExecutionPipe::Special, lanes.special),
        (ExecutionPipe::Convert, lanes.convert),
        (ExecutionPipe::Load, lanes.load),
    ];
    for (pipe, rate) in rates {
        let clocks = work.by_pipe[pipe as usize] * 32.0 / f64::from(rate);
        limits.push((LaunchBound::Units(pipe.name()), of_all(clocks)));
    }
    let turns = (busiest / f64::from(work.resident)).ceil();
    let latency = (turns * work.alone).max(work.max_block_clocks) / clock;
    // The start-up of the first results comes before any rate.
    let first = if work.read_bytes > 0.0 && !work.cached { gpu.latency.memory } else { gpu.latency.l2 };
    let first = f64::from(first) / clock;
    let rate = limits.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
    limits.push((LaunchBound::Latency, latency));
    match rate {
        Some((bound, seconds)) if first + seconds > latency => (first + seconds, bound, limits),
        _ => (latency, LaunchBound::Latency, limits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_target::InstrLatency;

    /// A GPU with the figures that the sums below are made of.
    fn gpu() -> GpuModel {
        let latency = InstrLatency { l1: 41, shared: 29, l2: 263, memory: 479, other: 24, operands: 12 };
        GpuModel { latency, l2_bytes_per_clock: 5120, ..mlcc_target::gpus().unwrap().remove(0) }
    }

    #[test]
    fn occupancy_by_hand() {
        let with = |registers, shared_bytes, threads, at_launch| {
            resident_blocks(KernelResources { registers, shared_bytes }, threads, at_launch, &gpu())
        };
        // 65536 / (48 * 256) = 5.3 by registers, per scheduler 16384 / 1536 = 10 warps: 40 of 8.
        assert_eq!(with(48, 0, 256, 0), 5);
        assert_eq!(with(32, 0, 256, 0), 8, "64 warps");
        assert_eq!(with(16, 0, 32, 0), 32, "32 blocks");
        // 233472 / (49152 + 1024) = 4.6.
        assert_eq!(with(32, 49152, 128, 0), 4);
        assert_eq!(with(168, 0, 128, 0), 3, "12 warps of 168 registers");
        assert_eq!(with(64, 0, 256, 240_000), 0);
    }

    /// One full wave of blocks on every multiprocessor.
    fn work() -> LaunchWorkload {
        LaunchWorkload {
            blocks: 132 * 4,
            resident: 4,
            warps_of_block: 4,
            alone: 1000.0,
            max_block_clocks: 1000.0,
            ..LaunchWorkload::default()
        }
    }

    fn clocks(work: &LaunchWorkload) -> (f64, LaunchBound) {
        let (seconds, bound, _) = time(work, &gpu());
        ((seconds * 1830e6).round(), bound)
    }

    #[test]
    fn a_warp_that_waits_takes_its_time_in_every_wave() {
        assert_eq!(clocks(&work()), (1000.0, LaunchBound::Latency));
        let tail = LaunchWorkload { blocks: 132 * 4 + 1, ..work() };
        assert_eq!(clocks(&tail), (2000.0, LaunchBound::Latency), "one block more is a second wave");
        let few = LaunchWorkload { blocks: 3, ..work() };
        assert_eq!(clocks(&few), (1000.0, LaunchBound::Latency));
    }

    #[test]
    fn rates_by_hand() {
        // 16 warps of 500 instructions on four schedulers, after the first data are there (263 clocks).
        let issue = LaunchWorkload { instructions: 2000.0, ..work() };
        assert_eq!(clocks(&issue), (263.0 + 2000.0, LaunchBound::Issue));
        // Half of them integer instructions: 64 lanes do one of a warp in half a clock of the whole
        // multiprocessor.
        let mut by_pipe = [0.0; 8];
        by_pipe[ExecutionPipe::Integer as usize] = 1900.0;
        let integer = LaunchWorkload { by_pipe, ..issue };
        assert_eq!(clocks(&integer), (263.0 + 1900.0 * 4.0 / 2.0, LaunchBound::Units("integer")));
        // 4096 operations a clock, 62 % of them.
        let tensor = LaunchWorkload { tensor_operations: 4096.0 * 620.0, ..work() };
        assert_eq!(clocks(&tensor), (263.0 + 4.0 * 1000.0, LaunchBound::Units("tensor")));
        let shared = LaunchWorkload { bank_cycles: 700.0, ..work() };
        assert_eq!(clocks(&shared), (263.0 + 2800.0, LaunchBound::SharedMemory));
        // 64 bytes a clock to each multiprocessor, 5120 to all: the second is less.
        let second = LaunchWorkload { l2_sectors: 2000.0, ..work() };
        let wide = 132.0 * 4.0 * 2000.0 * 32.0 / 5120.0_f64;
        assert_eq!(clocks(&second), ((263.0 + wide).round(), LaunchBound::SecondLevel));
    }

    #[test]
    fn memory_is_copied_at_most_at_its_bandwidth() {
        let large = LaunchWorkload { memory_bytes: 4.3e9, read_bytes: 1.0, ..work() };
        let (seconds, bound, _) = time(&large, &gpu());
        assert_eq!(bound, LaunchBound::Memory);
        assert!((seconds - (1e-3 + 479.0 / 1830e6)).abs() < 1e-9, "{seconds}");
        let cached = LaunchWorkload { cached: true, ..large };
        assert_eq!(clocks(&cached), (1000.0, LaunchBound::Latency));
    }

    #[test]
    fn few_warps_leave_schedulers_idle() {
        let one = LaunchWorkload { blocks: 1, warps_of_block: 1, instructions: 2000.0, ..work() };
        assert_eq!(clocks(&one), (263.0 + 2000.0, LaunchBound::Issue), "all on one scheduler");
    }

    #[test]
    fn nothing_is_launched() {
        assert_eq!(time(&LaunchWorkload::default(), &gpu()).0, 0.0);
    }

    #[test]
    fn samples_have_every_remainder() {
        assert_eq!(samples(1, SAMPLES), [0]);
        assert_eq!(samples(5, SAMPLES), [0, 1, 2, 3, 4]);
        for blocks in [64, 100, 896, 1002, 8192] {
            let chosen = samples(blocks, SAMPLES);
            for power in [2, 4, 8] {
                let mut of: Vec<u64> = chosen.iter().map(|at| at % power).collect();
                of.sort_unstable();
                let expected: Vec<u64> = (0..SAMPLES).map(|i| i * power / SAMPLES).collect();
                assert_eq!(of, expected, "{chosen:?} of {blocks}");
            }
        }
        // One of 32 neighbours has something to do.
        assert_eq!(samples(16384, MORE_SAMPLES).iter().filter(|at| *at % 32 == 0).count(), 2);
        // Each eighth has one.
        for blocks in [8, 9, 13, 17, 63, 896] {
            let parts: Vec<u64> =
                samples(blocks, SAMPLES).iter().map(|at| ((at + 1) * 8 - 1) / blocks).collect();
            assert_eq!(parts, [0, 1, 2, 3, 4, 5, 6, 7], "{blocks}");
        }
    }
}
