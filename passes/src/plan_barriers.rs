//! Makes the steps: launches with addresses, and a barrier wherever a worker would touch what another one has
//! written (or still reads) since the last barrier. Accesses whose partitions agree stay with one worker and
//! need none.

use crate::plan_memory::{EntryPlan, LevelPlan, MemoryPlan};
use crate::{LevelCode, LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::entity::EntityId;
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::sequences::{RowBatching, RowScope};
use mlcc_ir::step::{
    AllGather, BufferRef, LaunchItem, MemoryBase, RepeatMode, SequenceFilter, StepItem, StepProgram,
    WorkSchedule,
};
use mlcc_kernels::lower::plan::{BufferArg, LaunchWork, LoweredEntry, LoweredLaunch, Partition};

const PASS: &str = "plan_barriers";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let plan = program.memory.clone().ok_or_else(|| PassError::internal(PASS, "memory is not planned"))?;
    let mut barriers = 0;
    for (number, level) in program.levels.iter_mut().enumerate() {
        level.steps = build_steps(level, plan.of_level(PASS, number)?, &plan)?;
        for step in &level.steps {
            let count = step.items.iter().filter(|i| matches!(i, StepItem::Barrier)).count();
            ctx.note(format!("{} {}: {} items, {count} barriers", level.name, step.name, step.items.len()));
            barriers += count;
        }
    }
    if let Some(first) = program.levels.first() {
        program.module.kernels = first.lowered.kernels.clone();
        program.module.steps = first.steps.clone();
    }
    Ok(barriers)
}

fn build_steps(
    level: &LevelCode,
    planned: &LevelPlan,
    plan: &MemoryPlan,
) -> Result<Vec<StepProgram>, PassError> {
    let entries = &level.lowered.entries;
    if entries.len() != planned.entries.len() {
        let what = format!("memory is not planned for the entry points of level {}", level.name);
        return Err(PassError::internal(PASS, what));
    }
    entries
        .iter()
        .zip(&planned.entries)
        .map(|(entry, of_entry)| build_step(level, entry, of_entry, plan))
        .collect()
}

/// An access since the last barrier.
pub(crate) struct PendingAccess {
    buffer: BufferRef,
    /// The end of the bytes that it may reach: new rows of a cache lie anywhere in its state.
    end: u64,
    write: bool,
    partition: Option<Partition>,
    /// The rows that slices are of.
    scope: RowScope,
    /// The work by which slices of the rows of each sequence are shared.
    work: Option<Dim>,
    sequences: Option<SequenceFilter>,
}

fn build_step(
    level: &LevelCode,
    entry: &LoweredEntry,
    plan: &EntryPlan,
    memory: &MemoryPlan,
) -> Result<StepProgram, PassError> {
    if entry.buffers.len() != plan.buffers.len() {
        let what = format!("memory is not planned for the buffers of {} of level {}", entry.name, level.name);
        return Err(PassError::internal(PASS, what));
    }
    let mut items = Vec::new();
    let mut before = 0;
    for (launch, phase) in ordered_launches(entry, plan).zip(launch_phases(entry, plan, memory)) {
        if phase > before && !on_gpu(launch) {
            items.push(StepItem::Barrier);
        }
        before = phase;
        items.push(resolve_launch(level, entry, launch, plan)?);
    }
    Ok(StepProgram { name: entry.name.clone(), items, arena_bytes: plan.arena_bytes })
}

/// Launches in the order of the step: what the model computes, then copies of new states.
pub(crate) fn ordered_launches<'a>(
    entry: &'a LoweredEntry,
    plan: &'a EntryPlan,
) -> impl Iterator<Item = &'a LoweredLaunch> {
    entry.launches.iter().chain(plan.copies.iter().map(|&c| &entry.copies[c]))
}

/// Launches of one stream wait for each other.
fn on_gpu(launch: &LoweredLaunch) -> bool {
    launch.grid.is_some()
}

/// The number of barriers before each launch. On a GPU every launch is its own phase, without a barrier.
pub(crate) fn launch_phases(entry: &LoweredEntry, plan: &EntryPlan, memory: &MemoryPlan) -> Vec<usize> {
    let mut open: Vec<PendingAccess> = Vec::new();
    let mut phase = 0;
    let phase_of = |launch: &LoweredLaunch| {
        let accesses = launch_accesses(launch, plan, memory);
        let conflicts = || accesses.iter().any(|new| open.iter().any(|old| needs_barrier(old, new)));
        if on_gpu(launch) || conflicts() {
            phase += 1;
            open.clear();
        }
        open.extend(accesses);
        phase
    };
    ordered_launches(entry, plan).map(phase_of).collect()
}

/// The reads and writes of a launch.
pub(crate) fn launch_accesses(
    launch: &LoweredLaunch,
    plan: &EntryPlan,
    memory: &MemoryPlan,
) -> Vec<PendingAccess> {
    launch.args.iter().filter_map(|arg| arg_access(arg, launch, plan, memory)).collect()
}

/// Weights and tokens are never written and need no watch, and no worker sees another one's copies.
fn arg_access(
    arg: &BufferArg,
    launch: &LoweredLaunch,
    plan: &EntryPlan,
    memory: &MemoryPlan,
) -> Option<PendingAccess> {
    let place = plan.buffers[arg.buffer.index()].clone();
    let write = arg.access != ParamAccess::In;
    let constant = matches!(
        place.base,
        MemoryBase::Weights
            | MemoryBase::Adapters
            | MemoryBase::PageTable
            | MemoryBase::Tokens
            | MemoryBase::LogitIndices
            | MemoryBase::Temperature
    );
    let watched = !constant && place.per_worker == 0;
    let dense = place.per_past > 0 && place.per_page == 0;
    let state = memory.states.iter().filter(|_| dense).find(|(offset, _)| *offset == place.offset);
    let end = state.map_or(place.end(), |(offset, bytes)| offset + bytes);
    let scope = match &launch.repeat {
        RepeatMode::Once | RepeatMode::EachWorker => RowScope::All,
        RepeatMode::EachSequence { work, of: SequenceFilter::All } if is_of_all(work, arg) => RowScope::All,
        RepeatMode::EachSequence { .. } => RowScope::Sequence,
        RepeatMode::Outputs => RowScope::Outputs,
    };
    let work = launch.repeat.work_of_sequence().filter(|_| scope == RowScope::Sequence).cloned();
    // Any worker may have any piece.
    let known = launch.repeat != RepeatMode::EachWorker && launch.schedule == WorkSchedule::Static;
    let partition = arg.partition.clone().filter(|_| known);
    watched.then_some(PendingAccess {
        buffer: place,
        end,
        write,
        partition,
        scope,
        work,
        sequences: launch.repeat.sequences(),
    })
}

/// True if a worker's rows of one sequence are its rows of all sequences: whole sequences, or shares of the
/// line of all rows.
fn is_of_all(work: &Dim, arg: &BufferArg) -> bool {
    let of_rows = arg.partition == Some(Partition::Rows(Dim::sym(SizeSymbol::N)));
    work.as_const() == Some(1) || *work == Dim::sym(SizeSymbol::N) && of_rows
}

/// True if two accesses of different launches need a barrier between them.
pub(crate) fn needs_barrier(old: &PendingAccess, new: &PendingAccess) -> bool {
    let (a, b) = (&old.buffer, &new.buffer);
    let overlap = a.base == b.base && a.offset < new.end && b.offset < old.end;
    if !overlap || !(old.write || new.write) {
        return false;
    }
    if let (Some(x), Some(y)) = (old.sequences, new.sequences)
        && x.is_disjoint(y)
        && a == b
    {
        return false;
    }
    let same_worker = match (&old.partition, &new.partition) {
        // Slices of the rows of a sequence are none of the rows of all.
        (Some(_), Some(_)) if old.work != new.work => false,
        (Some(_), Some(_)) if old.work.is_some() && old.sequences != new.sequences => false,
        // Nor are those of the output rows.
        (Some(Partition::Rows(_)), Some(_)) | (Some(_), Some(Partition::Rows(_)))
            if old.scope != new.scope =>
        {
            false
        }
        (Some(x), Some(y)) => x.matches(y) && (a == b || x.is_single() && y.is_single()),
        _ => false,
    };
    !same_worker
}

fn resolve_launch(
    level: &LevelCode,
    entry: &LoweredEntry,
    launch: &LoweredLaunch,
    plan: &EntryPlan,
) -> Result<StepItem, PassError> {
    let mut buffers: Vec<BufferRef> = launch.args.iter().map(|a| buffer_ref(entry, a, plan)).collect();
    let kernel = match &launch.work {
        LaunchWork::Kernel(kernel) => level.lowered.kernels[*kernel].name.clone(),
        LaunchWork::AllGather(parts) => {
            let (Some(all), Some(part)) = (buffers.pop(), buffers.pop()) else {
                return Err(PassError::internal(PASS, "an exchange has two buffers"));
            };
            let (parts, wanted) = (parts.clone(), launch.repeat == RepeatMode::Outputs);
            return Ok(StepItem::AllGather(AllGather { part, all, shape: parts, output_rows: wanted }));
        }
    };
    Ok(StepItem::Launch(LaunchItem {
        kernel,
        buffers,
        dims: launch.dims.clone(),
        grid: launch.grid.clone(),
        repeat: launch.repeat.clone(),
        schedule: launch.schedule.clone(),
    }))
}

/// Values of each sequence lie one after another, except in their states. `bytes` stays that of all of them
/// where a sequence may have any number of rows.
fn buffer_ref(entry: &LoweredEntry, arg: &BufferArg, plan: &EntryPlan) -> BufferRef {
    let whole = plan.buffers[arg.buffer.index()].clone();
    let (per_row, per_sequence) = (arg.row_bytes, arg.sequence_bytes);
    let of_state = matches!(whole.base, MemoryBase::State | MemoryBase::Pages | MemoryBase::PageTable);
    if of_state || per_row == 0 && per_sequence == 0 {
        return whole;
    }
    let bytes = match entry.batching {
        RowBatching::OneEach => per_row.min(whole.bytes),
        RowBatching::Single | RowBatching::Ragged => whole.bytes,
    };
    BufferRef { bytes, per_row, per_sequence, ..whole }
}
