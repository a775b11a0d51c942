//! Counts of the work of launches, by kernel, in a JSON file.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::exec::{WarpLanes, lanes};
use crate::ptx::kernel::PtxKernel;
use crate::ptx::op::{FloatOne, PtxOp, PtxType, StateSpace};

/// Counts of one launch, or of all launches of a kernel.
#[derive(Clone, Default, Debug)]
pub struct LaunchCounts {
    enabled: bool,
    /// Counts of each instruction: how often a warp executed it, and with how many lanes together.
    executed: Vec<(u64, u64)>,
    sums: CounterSums,
}

#[derive(Clone, Default, Debug)]
struct CounterSums {
    launches: u64,
    blocks: u64,
    barriers: u64,
    loads: GlobalTraffic,
    stores: GlobalTraffic,
    shared_requests: u64,
    shared_bytes: u64,
    /// Passes beyond the first that shared memory needs.
    bank_conflicts: u64,
    async_copies: u64,
    async_bytes: u64,
    /// The most bytes that a block had under way at once.
    most_in_flight: u64,
}

/// Accesses of warps to global memory.
#[derive(Clone, Default, Debug)]
struct GlobalTraffic {
    requests: u64,
    /// Pieces of 32 bytes that requests touch.
    sectors: u64,
    bytes: u64,
}

/// Bytes of a sector of the caches.
const SECTOR: u64 = 32;
/// Banks of shared memory, 4 bytes wide each.
const BANKS: u64 = 32;

impl LaunchCounts {
    pub fn new(enabled: bool, kernel: &PtxKernel) -> Self {
        let executed = if enabled { vec![(0, 0); kernel.code.len()] } else { vec![] };
        Self { enabled, executed, sums: CounterSums::default() }
    }

    #[inline]
    pub fn instruction(&mut self, pc: u32, m: u32) {
        if self.enabled {
            let (warps, threads) = &mut self.executed[pc as usize];
            *warps += 1;
            *threads += u64::from(m.count_ones());
        }
    }

    pub fn launch(&mut self) {
        self.sums.launches += 1;
    }

    pub fn block(&mut self) {
        self.sums.blocks += 1;
    }

    pub fn barrier(&mut self) {
        self.sums.barriers += 1;
    }

    /// An access of the lanes in `m`, `bytes` each.
    pub fn access(&mut self, space: StateSpace, store: bool, at: &WarpLanes<u64>, m: u32, bytes: u32) {
        if !self.enabled {
            return;
        }
        let total = u64::from(m.count_ones() * bytes);
        if space == StateSpace::Local {
            return;
        }
        if space == StateSpace::Shared {
            self.sums.shared_requests += 1;
            self.sums.shared_bytes += total;
            self.sums.bank_conflicts += passes(at, m, bytes) - least_passes(m, bytes);
            return;
        }
        let traffic = if store { &mut self.sums.stores } else { &mut self.sums.loads };
        traffic.requests += 1;
        traffic.sectors += sectors(at, m, bytes);
        traffic.bytes += total;
    }

    /// A copy from global to shared memory.
    pub fn copy(&mut self, from: &WarpLanes<u64>, m: u32, bytes: u32) {
        if self.enabled {
            self.sums.async_copies += 1;
            self.sums.async_bytes += u64::from(m.count_ones() * bytes);
            self.access(StateSpace::Global, false, from, m, bytes);
        }
    }

    /// A block has `bytes` bytes under way.
    pub fn in_flight(&mut self, bytes: u64) {
        self.sums.most_in_flight = self.sums.most_in_flight.max(bytes);
    }

    /// `ldmatrix` of `matrices` matrices.
    pub fn rows(&mut self, at: &WarpLanes<u64>, matrices: usize) {
        for i in 0..matrices {
            self.access(StateSpace::Shared, false, at, 0xff << (8 * i), 16);
        }
    }

    pub fn add(&mut self, other: &Self) {
        self.enabled |= other.enabled;
        if self.executed.len() < other.executed.len() {
            self.executed.resize(other.executed.len(), (0, 0));
        }
        for (to, from) in self.executed.iter_mut().zip(&other.executed) {
            to.0 += from.0;
            to.1 += from.1;
        }
        let (to, from) = (&mut self.sums, &other.sums);
        for (to, from) in [(&mut to.loads, &from.loads), (&mut to.stores, &from.stores)] {
            to.requests += from.requests;
            to.sectors += from.sectors;
            to.bytes += from.bytes;
        }
        to.launches += from.launches;
        to.blocks += from.blocks;
        to.barriers += from.barriers;
        to.shared_requests += from.shared_requests;
        to.shared_bytes += from.shared_bytes;
        to.bank_conflicts += from.bank_conflicts;
        to.async_copies += from.async_copies;
        to.async_bytes += from.async_bytes;
        to.most_in_flight = to.most_in_flight.max(from.most_in_flight);
    }

    pub fn to_json(&self, kernel: &PtxKernel) -> Value {
        let mut pipes = BTreeMap::<&str, u64>::new();
        let (mut warps, mut threads) = (0, 0);
        for (inst, (by_warp, by_thread)) in kernel.code.iter().zip(&self.executed) {
            *pipes.entry(pipe(&inst.op)).or_default() += by_warp;
            warps += by_warp;
            threads += by_thread;
        }
        pipes.retain(|_, count| *count > 0);
        let traffic = |t: &GlobalTraffic| {
            let per_request = t.sectors as f64 / t.requests.max(1) as f64;
            json!({"requests": t.requests, "sectors": t.sectors, "bytes": t.bytes, "sectors_per_request": per_request})
        };
        let s = &self.sums;
        json!({
            "kernel": kernel.name,
            "launches": s.launches,
            "blocks": s.blocks,
            "barriers": s.barriers,
            "instructions": {"warp": warps, "thread": threads, "by_pipe": pipes},
            "global_load": traffic(&s.loads),
            "global_store": traffic(&s.stores),
            "shared": {"requests": s.shared_requests, "bytes": s.shared_bytes, "bank_conflicts": s.bank_conflicts},
            "async": {"requests": s.async_copies, "bytes": s.async_bytes, "most_bytes_in_flight": s.most_in_flight},
        })
    }
}

/// Counts by name of the kernel, how often a graph was started, copies to the host and their bytes.
pub fn report(
    counts: &BTreeMap<String, (std::sync::Arc<PtxKernel>, LaunchCounts)>,
    graph_launches: u64,
    [copies, bytes]: [u64; 2],
) -> Value {
    let mut out = Map::new();
    let launches: u64 = counts.values().map(|(_, c)| c.sums.launches).sum();
    out.insert("launches".into(), launches.into());
    out.insert("graph_launches".into(), graph_launches.into());
    out.insert("to_host".into(), json!({"copies": copies, "bytes": bytes}));
    out.insert("kernels".into(), counts.values().map(|(kernel, c)| c.to_json(kernel)).collect());
    out.into()
}

fn sectors(at: &WarpLanes<u64>, m: u32, bytes: u32) -> u64 {
    let mut touched: Vec<u64> = lanes(m)
        .flat_map(|lane| at[lane] / SECTOR..=(at[lane].wrapping_add(u64::from(bytes) - 1)) / SECTOR)
        .collect();
    touched.sort_unstable();
    touched.dedup();
    touched.len() as u64
}

/// Passes of an access to shared memory: lanes go in groups that move 128 bytes at once, and different words
/// of a bank need a pass each.
fn passes(at: &WarpLanes<u64>, m: u32, bytes: u32) -> u64 {
    let at_once = group(bytes);
    (0..32)
        .step_by(at_once as usize)
        .map(|first| {
            let group = m & ((((1u64 << at_once) - 1) << first) as u32);
            let mut words: Vec<u64> = lanes(group)
                .flat_map(|lane| at[lane] / 4..=(at[lane].wrapping_add(u64::from(bytes) - 1)) / 4)
                .collect();
            words.sort_unstable();
            words.dedup();
            let mut load = [0u64; BANKS as usize];
            for word in words {
                load[(word % BANKS) as usize] += 1;
            }
            load.into_iter().max().unwrap_or(0)
        })
        .sum()
}

fn group(bytes: u32) -> u32 {
    (128 / bytes.max(4)).min(32)
}

fn least_passes(m: u32, bytes: u32) -> u64 {
    let at_once = group(bytes);
    let busy = |first: &u32| m & ((((1u64 << at_once) - 1) << first) as u32) != 0;
    (0..32).step_by(at_once as usize).filter(busy).count() as u64
}

/// The unit of a multiprocessor that executes an instruction.
fn pipe(op: &PtxOp) -> &'static str {
    match op {
        PtxOp::Fma { .. } | PtxOp::Float { .. } => "fma",
        PtxOp::FloatOne { f: FloatOne::Neg | FloatOne::Abs, .. } => "alu",
        PtxOp::FloatOne { .. } => "special",
        PtxOp::HalfFma { .. } | PtxOp::HalfFn { .. } | PtxOp::HalfOne { .. } => "half",
        PtxOp::Cvt { from, to, .. } if from.float() || to.float() => "convert",
        PtxOp::Cvt { from: PtxType::U8, .. } => "alu",
        PtxOp::CvtPack { .. } => "convert",
        PtxOp::Ld { .. }
        | PtxOp::St { .. }
        | PtxOp::Atom { .. }
        | PtxOp::CpAsync { .. }
        | PtxOp::Ldmatrix { .. } => "load_store",
        PtxOp::LdParam { .. } => "uniform",
        PtxOp::Shfl { .. } => "load_store",
        PtxOp::Mma(_) => "tensor",
        PtxOp::Bra { .. } | PtxOp::Ret | PtxOp::Bar { .. } | PtxOp::WarpSync { .. } | PtxOp::Fence { .. } => {
            "control"
        }
        PtxOp::WideD { .. }
        | PtxOp::WideW { .. }
        | PtxOp::MadW { .. }
        | PtxOp::MadD { .. }
        | PtxOp::Dp4a { .. } => "imad",
        _ => "alu",
    }
}
