//! Kernels that one worker would run alone are run by every worker for itself, so that no barrier has to stand between
//! them and their readers: the norm and quantization of a single row, tables of rotary angles, an embedding.
//!
//! The others would wait for such a kernel anyway, so to repeat it costs no time; what it reads comes into the cache of
//! each core, where the product after it would have fetched the results.

use crate::{Context, LevelCode, PassError, Program};
use mlcc_ir::kernel::Access;
use mlcc_ir::step::Repeat;
use mlcc_kernels::lower::plan::{Entry, LoweredLaunch, Memory, Partition};

/// Kernels that read and write more bytes stay with one worker: workers that read the same from memory hinder each other.
const MOST_BYTES: i64 = 256 << 10;

pub fn run(program: &mut Program, ctx: &mut Context) -> Result<usize, PassError> {
    let mut changed = 0;
    for level in &mut program.levels {
        for entry in 0..level.lowered.entries.len() {
            for launch in 0..level.lowered.entries[entry].launches.len() {
                if is_replicable(level, entry, launch) {
                    level.lowered.entries[entry].launches[launch].repeat = Repeat::EachWorker;
                    changed += 1;
                }
            }
        }
    }
    ctx.note(format!("{changed} launches by every worker for itself"));
    Ok(changed)
}

fn is_replicable(level: &LevelCode, entry: usize, launch: usize) -> bool {
    let entry = &level.lowered.entries[entry];
    let launch = &entry.launches[launch];
    let plain = !entry.batching.is_batched() && launch.grid.is_none() && launch.repeat == Repeat::Once;
    plain && writes_alone(entry, launch) && bytes(level, launch).is_some_and(|bytes| bytes <= MOST_BYTES)
}

/// One worker computes all results, and nothing outlives the step.
fn writes_alone(entry: &Entry, launch: &LoweredLaunch) -> bool {
    launch.args.iter().filter(|a| a.access != Access::In).all(|a| {
        let buffer = &entry.buffers[a.buffer];
        let single = a.partition.as_ref().is_some_and(Partition::is_single);
        single && a.access == Access::Out && buffer.memory == Memory::Temp && !buffer.apart
    })
}

/// What the kernel moves; `None` if that depends on the sizes of a call.
fn bytes(level: &LevelCode, launch: &LoweredLaunch) -> Option<i64> {
    let cost = level.lowered.costs.get(launch.kernel()?)?;
    cost.bytes.iter().map(|b| b.as_const()).sum()
}
