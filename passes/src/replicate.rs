//! Makes every worker run kernels itself that one worker would run alone, so that no barrier is needed
//! between them and their readers: the norm and quantization of a single row, tables of rotary angles, an
//! embedding.
//!
//! The others would wait for such a kernel anyway, so repeating it costs no time; its inputs come into the
//! cache of each core, where the product after it would have fetched the results.

use crate::{LevelCode, LoweredProgram, PassContext, PassError};
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::step::RepeatMode;
use mlcc_kernels::lower::plan::{BufferKind, LoweredEntry, LoweredLaunch, Partition};

/// Kernels that read and write more bytes stay with one worker: workers that read the same from memory hinder
/// each other.
const MOST_BYTES: i64 = 256 << 10;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let mut changed = 0;
    for level in &mut program.levels {
        for entry in 0..level.lowered.entries.len() {
            for launch in 0..level.lowered.entries[entry].launches.len() {
                if is_replicable(level, entry, launch) {
                    level.lowered.entries[entry].launches[launch].repeat = RepeatMode::EachWorker;
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
    let plain = !entry.batching.is_batched() && launch.grid.is_none() && launch.repeat == RepeatMode::Once;
    plain && writes_alone(entry, launch) && bytes(level, launch).is_some_and(|bytes| bytes <= MOST_BYTES)
}

/// One worker computes all results, and nothing outlives the step.
fn writes_alone(entry: &LoweredEntry, launch: &LoweredLaunch) -> bool {
    launch.args.iter().filter(|a| a.access != ParamAccess::In).all(|a| {
        let buffer = &entry.buffers[a.buffer];
        let single = a.partition.as_ref().is_some_and(Partition::is_single);
        single && a.access == ParamAccess::Out && buffer.memory == BufferKind::Temp && !buffer.apart
    })
}

/// The bytes that the kernel moves; `None` if that depends on the sizes of a call.
fn bytes(level: &LevelCode, launch: &LoweredLaunch) -> Option<i64> {
    let cost = level.lowered.costs.get(launch.kernel()?)?;
    cost.bytes.iter().map(|b| b.as_const()).sum()
}
