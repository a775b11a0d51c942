//! Splits large launches into pieces: a worker takes the pieces of its own share one by one, and then those
//! that are left of the others' shares. Without pieces, all workers wait for the slowest core.
//!
//! Shares stay the long runs of memory that they are without pieces. It is not known in advance which worker
//! takes a piece, so accesses of such a launch are ordered only across barriers; where that would need
//! another barrier, shares stay static.

use crate::plan_barriers::{PendingAccess, launch_accesses, launch_phases, needs_barrier, ordered_launches};
use crate::plan_memory::{EntryPlan, MemoryPlan, most_rows};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::step::{GuidedChunks, RepeatMode, WorkSchedule};
use mlcc_kernels::lower::cost::{ComputeType, LaunchCost};
use mlcc_kernels::lower::plan::{LoweredEntry, LoweredLaunch, Partition};

const PASS: &str = "dynamic_shares";

/// Least work of the smallest pieces ([`mlcc_ir::step::GuidedChunks`]), which others are eight of: one of
/// these is enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkWork {
    pub bytes: i64,
    /// Operations on bytes.
    pub dots: i64,
    /// Operations on f32.
    pub flops: i64,
    /// Factor of the least work of a piece of decode attention, relative to other launches: it begins with a
    /// block of the cache that was not prefetched.
    pub times_of_cache: i64,
}

impl Default for ChunkWork {
    fn default() -> ChunkWork {
        mlcc_target::ChunkTuning::default().into()
    }
}

impl From<mlcc_target::ChunkTuning> for ChunkWork {
    fn from(shares: mlcc_target::ChunkTuning) -> ChunkWork {
        let mlcc_target::ChunkTuning { bytes, dots, flops, times_of_cache } = shares;
        let [bytes, dots, flops, times_of_cache] = [bytes, dots, flops, times_of_cache].map(i64::from);
        ChunkWork { bytes, dots, flops, times_of_cache }
    }
}

/// Launches of fewer pieces take less time than the waiting that pieces would save.
const LEAST_PIECES: i64 = 8;
/// More would not make the last piece any shorter, measured by the whole.
const MOST_PIECES: i64 = 2048;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let plan = program.memory.as_ref().ok_or_else(|| PassError::internal(PASS, "memory is not planned"))?;
    let mut changed = 0;
    for (number, level) in program.levels.iter_mut().enumerate() {
        let planned = plan.of_level(PASS, number)?;
        let of_level = || ChunkWork::from(level.target.tune.shares);
        let work = ctx.options.min_chunk_work.unwrap_or_else(of_level);
        let lowered = &mut level.lowered;
        for (entry, of_entry) in lowered.entries.iter_mut().zip(&planned.entries) {
            let n = most_rows(entry.batching, ctx.options.chunk, ctx.options.batch);
            let sizes = max_work_sizes(n, plan.context);
            let marked =
                share_out(entry, of_entry, plan, |launch| chunk_count(launch, &lowered.costs, &sizes, work));
            ctx.note(format!("{} {}: {marked} launches in pieces", level.name, entry.name));
            changed += marked;
        }
    }
    Ok(changed)
}

/// Sizes of the most work: `n` rows at the end of the context.
fn max_work_sizes(n: i64, context: Option<u64>) -> SymValues {
    let context = context.map_or(0, |c| i64::try_from(c).unwrap_or(i64::MAX));
    SymValues { n, b: n, past: (context - n).max(0) }
}

/// Marks launches of one entry point; gives how many.
fn share_out(
    entry: &mut LoweredEntry,
    plan: &EntryPlan,
    memory: &MemoryPlan,
    pieces: impl Fn(&LoweredLaunch) -> Option<Dim>,
) -> usize {
    let phases = launch_phases(entry, plan, memory);
    let mut accesses: Vec<Vec<PendingAccess>> =
        ordered_launches(entry, plan).map(|launch| launch_accesses(launch, plan, memory)).collect();
    let mut marked = 0;
    for i in 0..entry.launches.len() {
        let Some(pieces) = pieces(&entry.launches[i]) else { continue };
        let shares = WorkSchedule::Dynamic { chunks: pieces };
        let dynamic = LoweredLaunch { schedule: shares.clone(), ..entry.launches[i].clone() };
        let dynamic = launch_accesses(&dynamic, plan, memory);
        let first = phases.partition_point(|&p| p < phases[i]);
        let behind = phases.partition_point(|&p| p <= phases[i]);
        let mut others = (first..behind).filter(|&other| other != i).flat_map(|other| &accesses[other]);
        if others.any(|other| dynamic.iter().any(|new| needs_barrier(other, new))) {
            continue;
        }
        entry.launches[i].schedule = shares;
        accesses[i] = dynamic;
        marked += 1;
    }
    marked
}

/// The number of pieces that the work of a launch is worth with `sizes.n` rows, by the length of the
/// sequence; `None` if it always stays whole.
fn chunk_count(
    launch: &LoweredLaunch,
    costs: &[LaunchCost],
    sizes: &SymValues,
    work: ChunkWork,
) -> Option<Dim> {
    let written = || launch.args.iter().filter(|a| a.access != ParamAccess::In);
    let single = written().any(|a| a.partition.as_ref().is_some_and(Partition::is_single));
    let once = matches!(launch.repeat, RepeatMode::Once | RepeatMode::Outputs);
    if !once || launch.grid.is_some() || single {
        return None;
    }
    let cost = costs.get(launch.kernel()?)?;
    let n = Dim::from(sizes.n);
    let with_rows = |d: &Dim| d.substitute(SizeSymbol::N, &n).substitute(SizeSymbol::B, &n);
    let bytes = cost.bytes.iter().fold(Dim::from(0), |sum, b| sum.add(&with_rows(b)));
    let ops = match cost.arithmetic {
        ComputeType::I8 | ComputeType::I4 => work.dots,
        ComputeType::BF16 => 2 * work.flops,
        ComputeType::F32 => work.flops,
    };
    let one_matrix = cost.matrices == Dim::from(1);
    // Where parts are few, as the slices of a cache, small pieces are mostly empty; a piece of a product with
    // chosen experts sorts the choices first.
    let times = match (cost.parts, one_matrix) {
        (Some(_), _) => work.times_of_cache,
        (None, false) => GuidedChunks::SMALLEST as i64,
        (None, true) => 1,
    };
    // A piece has its part of every matrix: with few rows the runs of reading would be short.
    let by_bytes = if one_matrix { bytes.floor_div(times * work.bytes) } else { Dim::from(0) };
    let worth = by_bytes.maximum(&with_rows(&cost.ops).floor_div(times * ops));
    let slices = written().filter_map(|a| match a.partition {
        Some(Partition::Tiles(slices)) => Some(slices),
        Some(Partition::Rows(_)) | None => None,
    });
    let most = slices.chain(cost.parts).fold(MOST_PIECES, i64::min);
    let pieces = worth.minimum(&Dim::from(most));
    (pieces.eval(sizes) >= LEAST_PIECES).then_some(pieces)
}
