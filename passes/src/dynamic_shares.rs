//! Large launches are shared out in pieces: a worker takes the pieces of its own share one by one, and when they are used up
//! those that are left of the others' shares. Without that, all wait for the slowest core.
//!
//! Shares stay the long runs of memory that they are without pieces. Who has a piece is not known before, so what such a
//! launch touches is in order only across barriers; where one would have to be added for that, shares stay static.

use crate::plan_barriers::{Touch, conflict, launches, phases, touches};
use crate::plan_memory::{EntryPlan, MemoryPlan};
use crate::{Context, PassError, Program};
use mlcc_ir::dim::{Dim, SymValues};
use mlcc_ir::kernel::Access;
use mlcc_ir::step::{Pieces, Repeat, Shares};
use mlcc_kernels::lower::cost::{Arithmetic, Cost};
use mlcc_kernels::lower::plan::{Entry, LoweredLaunch, Partition};

const PASS: &str = "dynamic_shares";

/// Least work of the smallest pieces ([`mlcc_ir::step::Pieces`]), which others are eight of: one of these is enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PieceWork {
    pub bytes: i64,
    /// Operations on bytes.
    pub dots: i64,
    /// Operations on f32.
    pub flops: i64,
}

impl Default for PieceWork {
    /// So much that to take most of the pieces (some 20 ns each) and to begin their runs of reading costs nothing.
    fn default() -> PieceWork {
        PieceWork { bytes: 16 << 10, dots: 2 << 20, flops: 256 << 10 }
    }
}

/// Launches of fewer pieces take less time than the waiting that pieces would save.
const LEAST_PIECES: i64 = 8;
/// More would not make the last piece any shorter, measured by the whole.
const MOST_PIECES: i64 = 2048;

pub fn run(program: &mut Program, ctx: &mut Context) -> Result<usize, PassError> {
    let plan = program.memory.as_ref().ok_or_else(|| PassError::internal(PASS, "memory is not planned"))?;
    let (mut changed, work) = (0, ctx.options.pieces);
    for level in &mut program.levels {
        let lowered = &mut level.lowered;
        if lowered.entries.len() != plan.entries.len() {
            return Err(PassError::internal(PASS, "levels differ in their entry points"));
        }
        for (entry, of_entry) in lowered.entries.iter_mut().zip(&plan.entries) {
            let n = if entry.batched { ctx.options.batch } else { ctx.options.chunk };
            let sizes = judged_at(n, plan.context);
            let marked =
                share_out(entry, of_entry, plan, |launch| pieces(launch, &lowered.costs, &sizes, work));
            ctx.note(format!("{} {}: {marked} launches in pieces", level.name, entry.name));
            changed += marked;
        }
    }
    Ok(changed)
}

/// Sizes at which launches are judged: `n` rows in the middle of the context, so that what grows with the sequence counts
/// as much as it does on average.
fn judged_at(n: i64, context: Option<u64>) -> SymValues {
    let context = context.map_or(0, |c| i64::try_from(c).unwrap_or(i64::MAX));
    SymValues { n, b: n, past: (context - n).max(0) / 2 }
}

/// Marks launches of one entry point; gives how many.
fn share_out(
    entry: &mut Entry,
    plan: &EntryPlan,
    memory: &MemoryPlan,
    pieces: impl Fn(&LoweredLaunch) -> Option<u32>,
) -> usize {
    let phases = phases(entry, plan, memory);
    let mut accesses: Vec<Vec<Touch>> =
        launches(entry, plan).map(|launch| touches(launch, plan, memory)).collect();
    let mut marked = 0;
    for i in 0..entry.launches.len() {
        let Some(pieces) = pieces(&entry.launches[i]) else { continue };
        let shares = Shares::Dynamic { pieces };
        let dynamic = touches(&LoweredLaunch { shares, ..entry.launches[i].clone() }, plan, memory);
        let first = phases.partition_point(|&p| p < phases[i]);
        let behind = phases.partition_point(|&p| p <= phases[i]);
        let mut others = (first..behind).filter(|&other| other != i).flat_map(|other| &accesses[other]);
        if others.any(|other| dynamic.iter().any(|new| conflict(other, new))) {
            continue;
        }
        entry.launches[i].shares = shares;
        accesses[i] = dynamic;
        marked += 1;
    }
    marked
}

/// How many pieces the work of a launch is worth; `None` if it stays whole.
fn pieces(launch: &LoweredLaunch, costs: &[Cost], sizes: &SymValues, work: PieceWork) -> Option<u32> {
    let written = || launch.args.iter().filter(|a| a.access != Access::In);
    let single = written().any(|a| a.partition.as_ref().is_some_and(Partition::is_single));
    if launch.repeat != Repeat::Once || launch.grid.is_some() || single {
        return None;
    }
    let cost = costs.get(launch.kernel)?;
    let bytes = cost.bytes.iter().fold(0i64, |sum, b| sum.saturating_add(b.eval(sizes)));
    let ops = match cost.arithmetic {
        Arithmetic::I8 | Arithmetic::I4 => work.dots,
        Arithmetic::BF16 => 2 * work.flops,
        Arithmetic::F32 => work.flops,
    };
    let one_matrix = cost.matrices == Dim::from(1);
    // Where parts are few, as the slices of a cache, small pieces are mostly empty; a piece of a product with chosen experts sorts
    // the choices first.
    let times = if cost.parts.is_some() || !one_matrix { Pieces::SMALLEST as i64 } else { 1 };
    // A piece has its part of every matrix: with few rows the runs of reading would be short.
    let by_bytes = if one_matrix { bytes / (times * work.bytes) } else { 0 };
    let worth = by_bytes.max(cost.ops.eval(sizes) / (times * ops)).min(MOST_PIECES);
    let slices = written().filter_map(|a| match a.partition {
        Some(Partition::Tiles(slices)) => Some(slices),
        Some(Partition::Rows(_)) | None => None,
    });
    let pieces = slices.chain(cost.parts).fold(worth, i64::min);
    u32::try_from(pieces).ok().filter(|_| pieces >= LEAST_PIECES)
}
