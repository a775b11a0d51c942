//! A launch: blocks in any order, several at a time.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use rayon::prelude::*;

use super::block::BlockExecutor;
use super::fault::LaunchFault;
use super::registers::ConstantBank;
use crate::count::LaunchCounts;
use crate::memory::MemoryView;
use crate::ptx::kernel::PtxKernel;

/// The order in which warps of a block take turns. Backwards and random orders begin with the last block,
/// too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WarpOrder {
    #[default]
    Turns,
    Backwards,
    Random(u64),
}

pub struct GridLaunch {
    pub kernel: Arc<PtxKernel>,
    pub constants: Arc<ConstantBank>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub params: Vec<u8>,
    pub view: Arc<MemoryView>,
    /// Different from that of other launches.
    pub number: u64,
    pub order: WarpOrder,
    pub checks: bool,
    pub counting: bool,
    /// Held where memory changes atomically.
    pub atomics: Mutex<()>,
}

impl GridLaunch {
    /// Executes all blocks; the fault of the first block that has one.
    pub fn run(&self) -> Result<LaunchCounts, LaunchFault> {
        let blocks: u64 = self.grid.iter().map(|n| u64::from(*n)).product();
        let stop = AtomicBool::new(false);
        let at_once = rayon::current_num_threads() as u64;
        // One for each core: a piece needs registers and shared memory of its own.
        let pieces = blocks.min(at_once).max(1);
        let run = |piece: u64| -> Result<LaunchCounts, Box<(u64, LaunchFault)>> {
            let mut block = BlockExecutor::new(self);
            for i in (piece * blocks / pieces)..((piece + 1) * blocks / pieces) {
                if stop.load(Relaxed) {
                    break;
                }
                let linear = if self.order == WarpOrder::Turns { i } else { blocks - 1 - i };
                block.run(linear).map_err(|fault| {
                    stop.store(true, Relaxed);
                    Box::new((linear, fault))
                })?;
            }
            Ok(block.room.counts)
        };
        let results: Vec<_> = (0..pieces).into_par_iter().map(run).collect();
        let mut counts = LaunchCounts::new(self.counting, &self.kernel);
        let mut first: Option<Box<(u64, LaunchFault)>> = None;
        for result in results {
            match result {
                Ok(of_blocks) => counts.add(&of_blocks),
                Err(found) if first.as_ref().is_none_or(|first| found.0 < first.0) => first = Some(found),
                Err(_) => {}
            }
        }
        counts.launch();
        match first {
            Some(found) => Err(found.1),
            None => Ok(counts),
        }
    }
}
