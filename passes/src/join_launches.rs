//! Joins GPU launches that do not depend on each other to one, whose blocks are those of both: the products
//! of keys and values, the copy of a new state with the next norm. A launch has to wait until the one before
//! it is done, which takes longer than many of these kernels, and a single row leaves most of the GPU without
//! work.
//!
//! In the order of the step every launch goes to the first place behind all that it waits for where it may
//! join another.

use crate::plan_memory::state_is_free;
use crate::{LevelCode, LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::horizontal_fusion::{FusedGrid, GridMember, fuse_kernels, syncs_in_threads};
use mlcc_ir::kernel::{Kernel, MemorySpace, ParamAccess};
use mlcc_ir::module::StateId;
use mlcc_ir::step::LaunchGrid;
use mlcc_kernels::lower::cost::LaunchCost;
use mlcc_kernels::lower::kernel::KernelExplanation;
use mlcc_kernels::lower::plan::{
    BufferArg, BufferId, BufferKind, LaunchWork, LoweredBuffer, LoweredEntry, LoweredLaunch,
};
use mlcc_kernels::lower::{LoweredModule, only_launched};
use std::collections::BTreeMap;

const PASS: &str = "join_launches";
/// Most kernels in one.
const MOST_PARTS: usize = 8;
/// Most arguments of a kernel: all have to fit into 4 KiB, with what they need to find buffers that move.
const MOST_ARGS: usize = 96;
/// Most bytes of an argument of a launch that waits until others have read a state.
const SMALL_BYTES: i64 = 64 << 10;
/// A kernel with at most this many blocks may join one whose blocks take more of a multiprocessor: they run
/// all at once even so.
const FEW_BLOCKS: i64 = 64;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let mut fewer = 0;
    for level in &mut program.levels {
        let mut joined = JoinedKernels::default();
        for number in 0..level.lowered.entries.len() {
            if on_gpu(&level.lowered.entries[number]) {
                fewer += join_entry(level, number, &mut joined, ctx)?;
            }
        }
        for &kernel in joined.kernels.values() {
            let lowered = &level.lowered;
            let made = lowered.explanations.get(kernel).map_or(String::new(), |made| format!(": {made}"));
            ctx.note(format!("{}: @{}{made}", level.name, lowered.kernels[kernel].name));
        }
        only_launched(&mut level.lowered);
    }
    Ok(fewer)
}

/// Joins launches of one entry of a level; gives how many fewer there are.
fn join_entry(
    level: &mut LevelCode,
    number: usize,
    joined: &mut JoinedKernels,
    ctx: &mut PassContext,
) -> Result<usize, PassError> {
    let entry = &mut level.lowered.entries[number];
    new_states_last(entry);
    copies_as_launches(entry);
    let groups = group_launches(&level.lowered, &level.lowered.entries[number]);
    let launches = std::mem::take(&mut level.lowered.entries[number].launches);
    let before = launches.len();
    let members = groups.iter().map(|group| group.iter().map(|&i| launches[i].clone()).collect());
    let made: Option<Vec<LoweredLaunch>> =
        members.map(|group: Vec<LoweredLaunch>| joined.launch(&mut level.lowered, group)).collect();
    let made = made.ok_or_else(|| PassError::internal(PASS, "kernels that cannot be joined"))?;
    let entry = &mut level.lowered.entries[number];
    ctx.note(format!("{} {}: {before} launches as {}", level.name, entry.name, made.len()));
    entry.launches = made;
    Ok(before - groups.len())
}

fn on_gpu(entry: &LoweredEntry) -> bool {
    entry.launches.iter().any(|launch| launch.grid.is_some())
}

/// Moves launches that only make new states behind the last reader of the old ones, so that they may write to
/// their memory: first to the end, from where they join the first launch behind that reader that has room.
fn new_states_last(entry: &mut LoweredEntry) {
    let mut last = Vec::new();
    for number in (0..entry.launches.len()).rev() {
        if waits_for_old_states(entry, number) {
            last.push(entry.launches.remove(number));
        }
    }
    entry.launches.extend(last.into_iter().rev());
}

/// True if a launch makes only new values of states, which nothing else reads, before the old ones have been
/// read.
fn waits_for_old_states(entry: &LoweredEntry, number: usize) -> bool {
    let launch = &entry.launches[number];
    let mut old = Vec::new();
    for arg in &launch.args {
        let LoweredBuffer { memory, ref bytes, .. } = entry.buffers[arg.buffer];
        // The memory that it reads stays until then.
        let small = bytes.as_const().is_some_and(|bytes| bytes <= SMALL_BYTES);
        let updated = entry.updates.iter().find(|(_, value)| *value == arg.buffer).map(|(state, _)| *state);
        match (arg.access, memory) {
            (ParamAccess::Out, BufferKind::Temp) if small => match updated {
                Some(state) => old.push(BufferKind::State(state)),
                None => return false,
            },
            (ParamAccess::In, BufferKind::Temp) if small && updated.is_none() => {}
            (ParamAccess::In, BufferKind::Param(_)) => {}
            _ => return false,
        }
    }
    let made = |arg: &BufferArg| {
        launch.args.iter().any(|own| own.access == ParamAccess::Out && own.buffer == arg.buffer)
    };
    let is_old = |arg: &BufferArg| old.contains(&entry.buffers[arg.buffer].memory);
    let later = || entry.launches[number + 1..].iter().flat_map(|launch| &launch.args);
    later().any(is_old) && !later().any(made)
}

/// Copies of new states that cannot be made in place become launches, which may join others.
fn copies_as_launches(entry: &mut LoweredEntry) {
    let (updates, copies) = (std::mem::take(&mut entry.updates), std::mem::take(&mut entry.copies));
    let mut later = Vec::new();
    let mut seen = Vec::new();
    for ((state, value), copy) in updates.into_iter().zip(copies) {
        let old = entry.buffers.iter().find(|(_, b)| b.memory == BufferKind::State(state)).map(|(id, _)| id);
        let in_place = old.is_some_and(|old| !seen.contains(&value) && state_is_free(entry, old, value));
        // One state that becomes another's old value: `plan_memory` refuses it.
        let exchanged = matches!(entry.buffers[value].memory, BufferKind::State(_)) && old != Some(value);
        seen.push(value);
        if in_place || exchanged || copy.grid.is_none() {
            entry.updates.push((state, value));
            entry.copies.push(copy);
        } else {
            later.push(copy);
        }
    }
    entry.launches.extend(later);
}

/// The launches of an entry that are to be one, in the order in which they are to run.
fn group_launches(lowered: &LoweredModule, entry: &LoweredEntry) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut last: BTreeMap<OrderedMemory, AccessFrontier> = BTreeMap::new();
    for (number, launch) in entry.launches.iter().enumerate() {
        let places =
            || launch.args.iter().map(|arg| (OrderedMemory::for_buffer(entry, arg.buffer), arg.access));
        // Behind all writers of what it touches, and all readers of what it writes.
        let after = |(place, access): (OrderedMemory, ParamAccess)| {
            let touched = last.get(&place).copied().unwrap_or_default();
            if access.writes() { touched.write.max(touched.read) } else { touched.write }
        };
        let earliest = places().map(after).max().unwrap_or(0);
        let may_join = |group: &Vec<usize>| {
            let all = group.iter().chain([&number]).map(|&i| &entry.launches[i]);
            may_be_one(lowered, entry, &all.collect::<Vec<_>>())
        };
        let found = groups.iter().skip(earliest).position(may_join).map(|place| earliest + place);
        let place = found.unwrap_or(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.push(number),
            None => groups.push(vec![number]),
        }
        for (at, access) in places() {
            let touched = last.entry(at).or_default();
            if access.reads() {
                touched.read = touched.read.max(place + 1);
            }
            if access.writes() {
                touched.write = touched.write.max(place + 1);
            }
        }
    }
    groups
}

/// The memory that launches touch, as far as their order counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum OrderedMemory {
    Buffer(BufferId),
    /// A state: its old and its new value, or all rows of a cache and the new ones.
    State(StateId),
}

impl OrderedMemory {
    fn for_buffer(entry: &LoweredEntry, buffer: BufferId) -> OrderedMemory {
        match entry.buffers[buffer].memory {
            BufferKind::State(state) | BufferKind::NewRows(state) => OrderedMemory::State(state),
            _ => match entry.updates.iter().find(|(_, value)| *value == buffer) {
                Some((state, _)) => OrderedMemory::State(*state),
                None => OrderedMemory::Buffer(buffer),
            },
        }
    }
}

/// The first groups that may come after the last one which reads a place, and after the last one which writes
/// to it.
#[derive(Clone, Copy, Default)]
struct AccessFrontier {
    read: usize,
    write: usize,
}

fn may_be_one(lowered: &LoweredModule, entry: &LoweredEntry, launches: &[&LoweredLaunch]) -> bool {
    let shapes =
        launches.iter().map(|launch| LaunchShape::for_launch(lowered, launch)).collect::<Option<Vec<_>>>();
    let Some(shapes) = shapes else { return false };
    let args: usize = shapes.iter().map(|shape| shape.kernel.params.len()).sum();
    let grids: Vec<&[Dim; 3]> = shapes.iter().map(|shape| &shape.grid.blocks).collect();
    let alike = |a: &LoweredLaunch, b: &LoweredLaunch| {
        a.repeat == b.repeat && a.schedule == b.schedule && reads_weights(entry, a) == reads_weights(entry, b)
    };
    launches.len() <= MOST_PARTS
        && args <= MOST_ARGS
        && launches.windows(2).all(|pair| alike(pair[0], pair[1]))
        && shared_sizes(lowered, launches).is_some()
        && FusedGrid::for_members(&grids).is_some()
        && shapes.iter().all(|shape| shapes.iter().all(|other| shape.tolerates_blocks(other)))
}

/// Products join only products: `ptxas` orders the loads of a loop less well where anything else is in the
/// kernel, and a loop over weights is where the time goes (joined with a copy, a product of 2560 x 10240 was
/// predicted to take 1.45 times as long).
fn reads_weights(entry: &LoweredEntry, launch: &LoweredLaunch) -> bool {
    const MATRIX_BYTES: i64 = 128 << 10;
    launch.args.iter().map(|arg| &entry.buffers[arg.buffer]).any(|buffer| {
        let matrix = buffer.bytes.as_const().is_some_and(|bytes| bytes >= MATRIX_BYTES);
        matrix && matches!(buffer.memory, BufferKind::Param(_))
    })
}

/// The resources of a GPU that a launch takes.
struct LaunchShape<'a> {
    kernel: &'a Kernel,
    grid: &'a LaunchGrid,
    shared_bytes: i64,
}

impl<'a> LaunchShape<'a> {
    fn for_launch(lowered: &'a LoweredModule, launch: &'a LoweredLaunch) -> Option<LaunchShape<'a>> {
        let kernel = &lowered.kernels[launch.kernel()?];
        let shared = kernel.bufs.values().filter(|buf| buf.space == MemorySpace::Shared);
        let bytes = shared.map(|buf| buf.len.as_const().unwrap_or(0) * buf.dtype.bytes().unwrap_or(1) as i64);
        Some(LaunchShape { kernel, grid: launch.grid.as_ref()?, shared_bytes: bytes.sum() })
    }

    /// True if blocks as large as those of the other kernel do no harm to this one.
    fn tolerates_blocks(&self, other: &LaunchShape) -> bool {
        let no_wider = (0..3).all(|axis| other.grid.threads[axis] <= self.grid.threads[axis]);
        let few = self.grid.blocks.iter().try_fold(1, |product, blocks| Some(product * blocks.as_const()?));
        let harmless = no_wider && other.shared_bytes <= self.shared_bytes;
        (no_wider || !syncs_in_threads(self.kernel)) && (harmless || few.is_some_and(|few| few <= FEW_BLOCKS))
    }
}

/// The sizes that kernels take together: of each symbol one. `None` if two take different ones by the same
/// name.
fn shared_sizes(lowered: &LoweredModule, group: &[&LoweredLaunch]) -> Option<Vec<(SizeSymbol, Dim)>> {
    let mut sizes: Vec<(SizeSymbol, Dim)> = Vec::new();
    for launch in group {
        let kernel = &lowered.kernels[launch.kernel()?];
        for (&(sym, _), dim) in kernel.dims.iter().zip(&launch.dims) {
            match sizes.iter().find(|(known, _)| *known == sym) {
                Some((_, known)) if known != dim => return None,
                Some(_) => {}
                None => sizes.push((sym, dim.clone())),
            }
        }
    }
    Some(sizes)
}

/// Kernels that were made of several, by their numbers.
#[derive(Default)]
struct JoinedKernels {
    kernels: BTreeMap<Vec<usize>, usize>,
}

impl JoinedKernels {
    /// Joins a group to one launch. `None` if its kernels cannot be joined.
    fn launch(&mut self, lowered: &mut LoweredModule, group: Vec<LoweredLaunch>) -> Option<LoweredLaunch> {
        if let [one] = &group[..] {
            return Some(one.clone());
        }
        let members: Vec<&LoweredLaunch> = group.iter().collect();
        let sizes = shared_sizes(lowered, &members)?;
        let numbers: Vec<usize> = members.iter().map(|launch| launch.kernel()).collect::<Option<_>>()?;
        let grids: Vec<&LaunchGrid> =
            members.iter().map(|launch| launch.grid.as_ref()).collect::<Option<_>>()?;
        let blocks: Vec<&[Dim; 3]> = grids.iter().map(|grid| &grid.blocks).collect();
        let layout = FusedGrid::for_members(&blocks)?;
        let threads = [0, 1, 2].map(|axis| grids.iter().map(|grid| grid.threads[axis]).max().unwrap_or(1));
        let grid = LaunchGrid { blocks: layout.blocks.clone(), threads };
        let kernel = match self.kernels.get(&numbers) {
            Some(known) => *known,
            None => {
                let kernel = add_joined_kernel(lowered, &numbers, &blocks, &layout)?;
                self.kernels.insert(numbers, kernel);
                kernel
            }
        };
        let order = &lowered.kernels[kernel].dims;
        let dims = order
            .iter()
            .map(|(sym, _)| sizes.iter().find(|(known, _)| known == sym).map(|(_, dim)| dim.clone()));
        Some(LoweredLaunch {
            work: LaunchWork::Kernel(kernel),
            args: joined_args(&group),
            dims: dims.collect::<Option<_>>()?,
            grid: Some(grid),
            repeat: group[0].repeat.clone(),
            schedule: group[0].schedule.clone(),
        })
    }
}

fn joined_args(group: &[LoweredLaunch]) -> Vec<BufferArg> {
    let mut args: Vec<BufferArg> = Vec::new();
    for launch in group {
        let before = args.len();
        args.extend(launch.args.iter().cloned().map(|mut arg| {
            arg.in_place.iter_mut().for_each(|other| *other += before);
            arg
        }));
    }
    args
}

/// Adds the kernel of several.
fn add_joined_kernel(
    lowered: &mut LoweredModule,
    numbers: &[usize],
    blocks: &[&[Dim; 3]],
    layout: &FusedGrid,
) -> Option<usize> {
    let kernels = numbers.iter().map(|&number| &lowered.kernels[number]);
    let parts: Vec<GridMember> =
        kernels.zip(blocks).map(|(kernel, blocks)| GridMember { kernel, blocks }).collect();
    let kernel = fuse_kernels(&name(lowered, numbers), &parts, layout)?;
    if lowered.costs.len() == lowered.kernels.len() {
        let costs: Vec<&LaunchCost> = numbers.iter().map(|&number| &lowered.costs[number]).collect();
        lowered.costs.push(LaunchCost::combine(&costs));
    }
    if lowered.explanations.len() == lowered.kernels.len() {
        let made: Vec<&KernelExplanation> =
            numbers.iter().map(|&number| &lowered.explanations[number]).collect();
        lowered.explanations.push(KernelExplanation::combine(&made));
    }
    lowered.kernels.push(kernel);
    Some(lowered.kernels.len() - 1)
}

/// `keys_x2_beside_gate`: which kernels there are, and how many of each that follow one another; the first
/// ones of many.
fn name(lowered: &LoweredModule, numbers: &[usize]) -> String {
    const NAMED: usize = 2;
    let runs: Vec<&[usize]> = numbers.chunk_by(|a, b| a == b).collect();
    let named = runs.iter().take(NAMED).map(|run| {
        let name = &lowered.kernels[run[0]].name;
        if run.len() == 1 { name.clone() } else { format!("{name}_x{}", run.len()) }
    });
    let mut base = named.collect::<Vec<_>>().join("_beside_");
    let more: usize = runs.iter().skip(NAMED).map(|run| run.len()).sum();
    if more > 0 {
        base.push_str(&format!("_and_{more}_more"));
    }
    let taken = |name: &str| lowered.kernels.iter().any(|kernel| kernel.name == name);
    let numbered = (2..).map(|number| format!("{base}_{number}"));
    std::iter::once(base.clone()).chain(numbered).find(|name| !taken(name)).unwrap_or(base)
}
