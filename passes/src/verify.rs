//! Invariants of a program beyond those of its module: launches fit their kernels, places lie in their
//! memory, levels agree.

use crate::plan_memory::{
    ALIGN, EntryPlan, LevelPlan, MAX_WORKERS, MemoryPlan, most_rows, of_all_rows, tap_index,
};
use crate::{LevelCode, LoweredProgram};
use mlcc_ir::dim::SizeBounds;
use mlcc_ir::entity::EntityId;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::module::Module;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::step::{
    AllGather, BufferRef, LaunchItem, MemoryBase, PAGE_ROWS, SequenceFilter, StepItem, StepProgram,
};
use mlcc_ir::types::{Packing, TensorType};
use mlcc_ir::verify::{VerifyError, verify_kernel, verify_module, verify_step};
use mlcc_kernels::lower::operands::value_bytes;
use mlcc_kernels::lower::plan::{LaunchWork, LoweredEntry, LoweredLaunch};

/// Memory that a plan may leave unused between two things, so that a wrong figure asks for no absurd amount.
const MOST_GAP: u64 = 1 << 20;

type VerifyResult = Result<(), VerifyError>;

fn wrong(subject: impl Into<String>, message: impl Into<String>) -> VerifyResult {
    Err(VerifyError::new(subject, message))
}

/// Verifies the module, and all results of passes.
pub fn verify_program(program: &LoweredProgram) -> VerifyResult {
    verify_module(&program.module)?;
    if let Some(first) = program.levels.first() {
        program.levels.iter().try_for_each(|level| verify_level(level, first))?;
    }
    let Some(plan) = &program.memory else {
        return match program.levels.iter().find(|l| !l.steps.is_empty()) {
            Some(level) => wrong(format!("level @{}", level.name), "has steps, but memory is not planned"),
            None => Ok(()),
        };
    };
    let Some(first) = program.levels.first() else { return wrong("memory", "is planned for no level") };
    verify_weights(&program.module, plan)?;
    verify_states(&program.module, plan)?;
    if !plan.levels.iter().map(|l| &l.name).eq(program.levels.iter().map(|l| &l.name)) {
        return wrong("memory", "is planned for other levels than there are");
    }
    for (level, of_level) in program.levels.iter().zip(&plan.levels) {
        let entries = &level.lowered.entries;
        if entries.len() != of_level.entries.len() {
            return wrong(
                format!("memory, level @{}", level.name),
                "does not have as many entries as the level",
            );
        }
        for (entry, of_entry) in entries.iter().zip(&of_level.entries) {
            verify_entry_plan(entry, of_entry, plan, &of_level.name)?;
        }
        if taps(level, of_level) != taps(first, &plan.levels[0]) {
            return wrong(
                format!("memory, level @{}", level.name),
                format!("has outputs at other places of the arena than level @{}", first.name),
            );
        }
        verify_steps(level, of_level, plan)?;
    }
    Ok(())
}

/// The places where debuggers find outputs, whichever level runs: entry, number of the output, offset.
fn taps(level: &LevelCode, of_level: &LevelPlan) -> Vec<(String, u32, u64)> {
    let of_entry = |(entry, plan): (&LoweredEntry, &EntryPlan)| {
        let places = entry.buffers.ids().zip(plan.buffers.clone());
        let taps =
            places.filter_map(|(id, place)| Some((entry.name.clone(), tap_index(entry, id)?, place.offset)));
        taps.collect::<Vec<_>>()
    };
    let mut all: Vec<_> = level.lowered.entries.iter().zip(&of_level.entries).flat_map(of_entry).collect();
    all.sort();
    all
}

fn verify_level(level: &LevelCode, first: &LevelCode) -> VerifyResult {
    let subject = format!("level @{}", level.name);
    if !(64..=4096).contains(&level.target.vector_bits) {
        return wrong(subject, format!("vectors of {} bits", level.target.vector_bits));
    }
    if level.target.arch != first.target.arch {
        return wrong(subject, format!("is of another architecture than level @{}", first.name));
    }
    let lowered = &level.lowered;
    lowered.kernels.iter().try_for_each(verify_kernel)?;
    // Kernels, and so launches and buffers, are each level's own.
    let shape = |e: &LoweredEntry| (e.name.clone(), e.batching);
    if !lowered.entries.iter().map(shape).eq(first.lowered.entries.iter().map(shape)) {
        return wrong(subject, format!("has other entries than level @{}", first.name));
    }
    for entry in &lowered.entries {
        for launch in entry.launches.iter().chain(&entry.copies) {
            verify_launch(&lowered.kernels, launch).or_else(|(kernel, message)| {
                wrong(format!("{subject}, entry @{}, launch of @{kernel}", entry.name), message)
            })?;
        }
    }
    Ok(())
}

/// Names the kernel and what is wrong.
fn verify_launch(kernels: &[Kernel], launch: &LoweredLaunch) -> Result<(), (String, String)> {
    let number = match &launch.work {
        LaunchWork::Kernel(kernel) => *kernel,
        LaunchWork::AllGather(_) if launch.args.len() == 2 && launch.grid.is_none() => return Ok(()),
        LaunchWork::AllGather(_) => {
            return Err(("exchange".into(), "takes two buffers and has no launch shape".into()));
        }
    };
    let Some(kernel) = kernels.get(number) else {
        return Err((number.to_string(), "there is no such kernel".into()));
    };
    let bad = |message: String| Err((kernel.name.clone(), message));
    if (launch.args.len(), launch.dims.len()) != (kernel.params.len(), kernel.dims.len()) {
        let (buffers, sizes) = (kernel.params.len(), kernel.dims.len());
        let found = format!("{} and {}", launch.args.len(), launch.dims.len());
        return bad(format!("the kernel takes {buffers} buffers and {sizes} sizes, not {found}"));
    }
    for (i, (arg, &param)) in launch.args.iter().zip(&kernel.params).enumerate() {
        if kernel.bufs.get(param).is_none_or(|decl| decl.access != arg.access) {
            return bad(format!("argument {i} is used in another way than the kernel declares"));
        }
        if arg.in_place.iter().any(|&other| other >= launch.args.len()) {
            return bad(format!("argument {i} takes over the memory of a missing argument"));
        }
    }
    if launch.grid.is_some() != kernel.is_gpu() {
        return bad("a launch has a grid exactly when its kernel is for a GPU".into());
    }
    Ok(())
}

/// The bytes of a parameter or state in memory.
fn constant_bytes(ty: &TensorType, packing: Option<Packing>) -> Option<u64> {
    value_bytes(ty, packing).ok()?.as_const().and_then(|bytes| u64::try_from(bytes).ok())
}

fn verify_weights(module: &Module, plan: &MemoryPlan) -> VerifyResult {
    if plan.params.len() != module.params.len() {
        return wrong("memory", "does not have as many places as the module has parameters");
    }
    for (of_slots, limit) in [(false, plan.weights_bytes), (true, plan.adapter_bytes)] {
        let some = module.params.values().zip(&plan.params).filter(move |(p, _)| p.is_adapter() == of_slots);
        let some = some.map(|(p, &place)| ((&p.name, constant_bytes(&p.ty, p.packing)), place));
        let (wanted, places): (Vec<_>, Vec<_>) = some.unzip();
        verify_places("parameter", wanted, &places, limit)?;
    }
    Ok(())
}

fn verify_states(module: &Module, plan: &MemoryPlan) -> VerifyResult {
    let states = module.states.len();
    if plan.row_bytes.len() != states || plan.states.len() != states {
        return wrong("memory", "does not have as many rows or places as the module has states");
    }
    let of = |paged: bool| {
        let some =
            module.states.iter().zip(&plan.states).filter(move |((id, _), _)| plan.is_paged(*id) == paged);
        let some = some.map(|((id, s), &place)| {
            let bytes = if paged {
                Some(PAGE_ROWS * plan.row_bytes[id.index()])
            } else {
                constant_bytes(&s.ty, None)
            };
            ((&s.name, bytes), place)
        });
        some.unzip::<_, _, Vec<_>, Vec<_>>()
    };
    let (wanted, places) = of(false);
    verify_places("state", wanted, &places, plan.state_bytes)?;
    let (wanted, places) = of(true);
    verify_places("cache", wanted, &places, plan.page_bytes)
}

/// One after another, aligned, as long as they are, and all of them in `total` bytes.
fn verify_places(
    what: &str,
    wanted: Vec<(&String, Option<u64>)>,
    places: &[(u64, u64)],
    total: u64,
) -> VerifyResult {
    if wanted.len() != places.len() {
        return wrong("memory", format!("does not have as many places as the module has {what}s"));
    }
    let mut end = 0u64;
    for ((name, bytes), &(at, planned)) in wanted.into_iter().zip(places) {
        let subject = || format!("memory, {what} @{name}");
        if bytes != Some(planned) {
            let bytes = bytes.map_or("no known number of".into(), |b| b.to_string());
            return wrong(subject(), format!("takes {bytes} bytes, not {planned}"));
        }
        if at % ALIGN != 0 || at < end || at - end > MOST_GAP {
            return wrong(
                subject(),
                format!(
                    "is at {at}, expected a multiple of {ALIGN} from {end} on, at most {MOST_GAP} further"
                ),
            );
        }
        end = at.saturating_add(planned);
    }
    match total >= end && total - end <= MOST_GAP {
        true => Ok(()),
        false => wrong("memory", format!("the {what}s end at {end}, but {total} bytes are planned")),
    }
}

fn verify_entry_plan(
    entry: &LoweredEntry,
    of_entry: &EntryPlan,
    plan: &MemoryPlan,
    level: &str,
) -> VerifyResult {
    let subject = || format!("memory, level @{level}, entry @{}", of_entry.name);
    if entry.name != of_entry.name || entry.buffers.len() != of_entry.buffers.len() {
        let found = format!("{} buffers", of_entry.buffers.len());
        return wrong(
            subject(),
            format!("expected entry @{} with {} buffers, found {found}", entry.name, entry.buffers.len()),
        );
    }
    if of_entry.copies.iter().any(|&copy| copy >= entry.copies.len()) {
        return wrong(subject(), "copies a missing update");
    }
    for (i, buffer) in of_entry.buffers.iter().enumerate() {
        verify_place(buffer, plan, of_entry.arena_bytes, entry.batching)
            .or_else(|message| wrong(format!("{}, buffer %{i}", subject()), message))?;
    }
    Ok(())
}

/// Every byte that a place may mean lies in its memory.
fn verify_place(
    place: &BufferRef,
    plan: &MemoryPlan,
    arena: u64,
    batching: RowBatching,
) -> Result<(), String> {
    let limit = match place.base {
        MemoryBase::Weights => plan.weights_bytes,
        MemoryBase::Adapters => plan.adapter_bytes,
        MemoryBase::State => plan.state_bytes,
        MemoryBase::Pages => plan.page_bytes,
        MemoryBase::PageTable => plan.context.unwrap_or(0).div_ceil(PAGE_ROWS) * 4,
        MemoryBase::Arena => arena,
        // The caller's, of the size of the call.
        MemoryBase::Tokens
        | MemoryBase::LogitIndices
        | MemoryBase::Logits
        | MemoryBase::Probs
        | MemoryBase::Temperature => u64::MAX,
    };
    let context = plan.context.unwrap_or(0);
    let reach = match place.per_past {
        // Its bytes are those of all sequences, each of which has its own state.
        _ if place.per_page > 0 => place.end().checked_sub(place.offset),
        0 if batching.is_batched() && place.base == MemoryBase::State => Some(0),
        0 => Some(place.bytes),
        per_past => per_past.checked_mul(context),
    };
    let copies = place.per_worker.checked_mul(MAX_WORKERS - 1);
    let end = reach.zip(copies).and_then(|(a, b)| place.offset.checked_add(a)?.checked_add(b));
    match end {
        Some(end) if end <= limit => Ok(()),
        _ => Err(format!("ends beyond the {limit} bytes of {}", place.base.name())),
    }
}

fn verify_steps(level: &LevelCode, of_level: &LevelPlan, plan: &MemoryPlan) -> VerifyResult {
    let subject = format!("level @{}", level.name);
    if level.steps.is_empty() {
        return Ok(());
    }
    if !level.steps.iter().map(|s| &s.name).eq(of_level.entries.iter().map(|e| &e.name)) {
        return wrong(subject, "has other steps than memory is planned for");
    }
    for ((step, entry), of_entry) in level.steps.iter().zip(&level.lowered.entries).zip(&of_level.entries) {
        verify_step(&level.lowered.kernels, step)?;
        if step.arena_bytes > of_entry.arena_bytes {
            return wrong(format!("{subject}, step @{}", step.name), "takes more arena than is planned");
        }
        verify_buffers(level, step, plan, entry.batching)?;
    }
    Ok(())
}

/// Buffers lie in their memory and are as long as the kernels think.
fn verify_buffers(
    level: &LevelCode,
    step: &StepProgram,
    plan: &MemoryPlan,
    batching: RowBatching,
) -> VerifyResult {
    let rows = most_rows(batching, plan.chunk, plan.batch);
    let context = plan.context.and_then(|c| i64::try_from(c).ok());
    for item in &step.items {
        if let StepItem::AllGather(exchange) = item {
            let bounds = SizeBounds { chunk: rows, batch: plan.batch, context };
            verify_all_gather(exchange, plan, step, batching, &bounds).or_else(|message| {
                wrong(format!("level @{}, step @{}, exchange", level.name, step.name), message)
            })?;
        }
        let StepItem::Launch(launch) = item else { continue };
        let Some(kernel) = level.lowered.kernels.iter().find(|k| k.name == launch.kernel) else { continue };
        let one = launch.repeat.sequences() == Some(SequenceFilter::OneRow)
            || batching == RowBatching::OneEach && launch.repeat.is_for_sequences();
        let bounds = SizeBounds { chunk: if one { 1 } else { rows }, batch: plan.batch, context };
        for (i, place) in launch.buffers.iter().enumerate() {
            let bounds = match launch.repeat.is_for_sequences() {
                true => bounds,
                false => of_all_rows(batching, &kernel.bufs[kernel.params[i]].len, &bounds),
            };
            let checked = verify_place(place, plan, step.arena_bytes, batching)
                .and_then(|()| long_enough(kernel, launch, i, &bounds));
            checked.or_else(|message| {
                let subject =
                    format!("level @{}, step @{}, launch of @{}", level.name, step.name, kernel.name);
                wrong(format!("{subject}, buffer {i}"), message)
            })?;
        }
    }
    Ok(())
}

/// Its rows lie in their memory, however many there are.
fn verify_all_gather(
    exchange: &AllGather,
    plan: &MemoryPlan,
    step: &StepProgram,
    batching: RowBatching,
    bounds: &SizeBounds,
) -> Result<(), String> {
    let AllGather { part, all, shape: parts, .. } = exchange;
    let bounds = of_all_rows(batching, &parts.rows, bounds);
    let rows = parts.rows.value_range(&bounds).and_then(|(_, most)| u64::try_from(most).ok());
    let rows = rows.ok_or_else(|| format!("{} rows have no limit", parts.rows))?;
    for (place, ranks) in [(part, 1), (all, parts.ranks as u64)] {
        verify_place(place, plan, step.arena_bytes, batching)?;
        let bytes = parts.row_bytes.saturating_mul(ranks).saturating_mul(rows);
        if bytes > place.bytes && place.base != MemoryBase::Logits {
            return Err(format!("has {} bytes for up to {rows} rows of {ranks} parts", place.bytes));
        }
    }
    Ok(())
}

fn long_enough(
    kernel: &Kernel,
    launch: &LaunchItem,
    buffer: usize,
    bounds: &SizeBounds,
) -> Result<(), String> {
    let place = &launch.buffers[buffer];
    let own = matches!(
        place.base,
        MemoryBase::Weights | MemoryBase::Adapters | MemoryBase::State | MemoryBase::Arena
    ) && place.per_past == 0;
    if !own || launch.repeat.has_whole_sequences() {
        return Ok(());
    }
    let decl = &kernel.bufs[kernel.params[buffer]];
    let most = decl.len.value_range(bounds).and_then(|(_, most)| u64::try_from(most).ok());
    let bytes = most.and_then(|most| most.checked_mul(decl.dtype.bytes()? as u64));
    match bytes {
        Some(bytes) if bytes <= place.bytes => Ok(()),
        Some(bytes) => Err(format!("has {} bytes, the kernel may touch {bytes}", place.bytes)),
        None => Err(format!("the kernel's {} elements have no limit", decl.len)),
    }
}
