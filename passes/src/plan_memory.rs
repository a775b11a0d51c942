//! Gives every buffer an address. Weights and states have fixed places, which all levels of an artifact
//! share; temporaries of an entry of one level share one arena by lifetime (first fit over the launches,
//! worst case over `n <= chunk` and `past + n <= context`); an output takes over the memory of a dying input,
//! or of the state it replaces, where its kernel allows that. Values that every worker computes separately
//! come after the others, all of one worker together; outputs for debuggers come before them, at the same
//! places on every level.

use crate::plan_barriers::launch_phases;
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::{Dim, SizeBounds, SizeSymbol};
use mlcc_ir::entity::EntityId;
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::module::{Module, StateId};
use mlcc_ir::sequences::{RowBatching, depends_on};
use mlcc_ir::step::{BufferRef, MemoryBase, PAGE_ROWS, RepeatMode};
use mlcc_kernels::lower::operands::value_bytes;
use mlcc_kernels::lower::plan::{BufferId, BufferKind, LoweredEntry};
use mlcc_kernels::pages::PageLayout;
use petgraph::unionfind::UnionFind;

const PASS: &str = "plan_memory";
/// Every buffer starts at a multiple of this many bytes.
pub const ALIGN: u64 = 64;
/// Workers that have memory for values of their own. The pages of workers that do not exist are never
/// touched.
pub const MAX_WORKERS: u64 = 128;
/// The values of two workers lie at least this far from each other: a line, and the one that is fetched with
/// it.
const WORKER_GAP: u64 = 128;

/// Addresses of everything: what outlives a step is equal for all levels of the target, what a step needs
/// each level has its own way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Offset and bytes of each parameter in the weights payload, or among the slots for adapters, by
    /// `ParamId`.
    pub params: Vec<(u64, u64)>,
    pub weights_bytes: u64,
    /// Bytes of the slots for adapters.
    pub adapter_bytes: u64,
    /// Offset and bytes of each state in the state block, by `StateId`; of a cache in pages, those of its
    /// rows in a page.
    pub states: Vec<(u64, u64)>,
    pub state_bytes: u64,
    /// Bytes of a page with rows of all caches, on CPUs of those of all ranks; 0 where caches are dense parts
    /// of the state block.
    pub page_bytes: u64,
    /// Bytes per token of each state that is a cache, by `StateId`; 0 for recurrent states.
    pub row_bytes: Vec<u64>,
    /// Rows of the shortest cache: most tokens of a sequence. `None` without caches.
    pub context: Option<u64>,
    /// Most tokens in one call.
    pub chunk: i64,
    /// Most sequences in one call of a batched entry point.
    pub batch: i64,
    /// Plans by level of the target.
    pub levels: Vec<LevelPlan>,
}

/// Entry points of one level: its kernels may be others than those of another level, with other buffers
/// between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LevelPlan {
    /// The name of the level.
    pub name: String,
    pub entries: Vec<EntryPlan>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryPlan {
    pub name: String,
    /// Places by `BufferId`.
    pub buffers: Vec<BufferRef>,
    pub arena_bytes: u64,
    /// Updates that need a copy at the end of the step (indices into `LoweredEntry::copies`).
    pub copies: Vec<usize>,
}

impl MemoryPlan {
    /// Most workers that all entries have memory for; `None`: any number.
    pub fn max_workers(&self) -> Option<u64> {
        let mut buffers = self.entries().flat_map(|e| &e.buffers);
        buffers.any(|b| b.per_worker > 0).then_some(MAX_WORKERS)
    }

    /// True if a state is a cache whose rows are in pages.
    pub fn is_paged(&self, state: StateId) -> bool {
        self.page_bytes > 0 && self.row_bytes[state.index()] > 0
    }

    /// Bytes of everything that a sequence of `context` tokens has.
    pub fn sequence_bytes(&self) -> u64 {
        self.state_bytes + self.context.unwrap_or(0).div_ceil(PAGE_ROWS) * self.page_bytes
    }

    /// Bytes of a page, and of everything that a sequence has, on all ranks of `program`.
    pub fn on_all_ranks(&self, program: &LoweredProgram) -> (u64, u64) {
        let ranks = program.module.rank_count() as u64;
        let launches = program.levels.iter().flat_map(|l| &l.lowered.entries).flat_map(|e| &e.launches);
        let of_gpu = launches.into_iter().any(|launch| launch.grid.is_some());
        let parts = if of_gpu { ranks } else { 1 };
        let pages = self.sequence_bytes() - self.state_bytes;
        (parts * self.page_bytes, parts * pages + ranks * self.state_bytes)
    }

    /// Empty pages for one sequence and its table, both as bytes, for interpreters: the pages lie in another
    /// order than its rows.
    pub fn example_pages(&self) -> (Vec<u8>, Vec<u8>) {
        let count = if self.page_bytes > 0 { self.context.unwrap_or(0).div_ceil(PAGE_ROWS) } else { 0 };
        let table = (0..count as i32).rev().flat_map(i32::to_le_bytes).collect();
        (vec![0; (count * self.page_bytes) as usize], table)
    }

    /// The plan of the level with this number; `pass` asks.
    pub(crate) fn of_level(&self, pass: &'static str, number: usize) -> Result<&LevelPlan, PassError> {
        self.levels
            .get(number)
            .ok_or_else(|| PassError::internal(pass, "memory is not planned for all levels"))
    }

    /// Entries of all levels.
    fn entries(&self) -> impl Iterator<Item = &EntryPlan> {
        self.levels.iter().flat_map(|level| &level.entries)
    }

    /// Bytes of the arena that serves every entry, whichever level runs.
    pub fn arena_bytes(&self) -> u64 {
        self.entries().map(|e| e.arena_bytes).max().unwrap_or(0)
    }

    /// The names of the entry points, and the bytes of the arena that each of them takes at most.
    pub fn arena_sizes(&self) -> impl Iterator<Item = (&str, u64)> {
        let names =
            self.levels.first().map_or(&[][..], |level| &level.entries).iter().map(|e| e.name.as_str());
        names.map(|name| {
            let of_entry = self.entries().filter(|e| e.name == name);
            (name, of_entry.map(|e| e.arena_bytes).max().unwrap_or(0))
        })
    }
}

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let module = &program.module;
    if program.levels.is_empty() {
        return Err(PassError::internal(PASS, "nothing was lowered"));
    }
    let context = module.context_length();
    let bounds = SizeBounds { chunk: ctx.options.chunk, batch: ctx.options.batch, context };
    let sized = |bytes: Dim| max_bytes(&bytes, &bounds);
    let (mut end, mut adapters) = (0, 0);
    let mut params = Vec::new();
    for param in module.params.values() {
        let bytes = sized(value_bytes(&param.ty, param.packing)?)?;
        let end = if param.is_adapter() { &mut adapters } else { &mut end };
        params.push((reserve_bytes(end, bytes), bytes));
    }
    let (weights_bytes, adapter_bytes) = (end, adapters);
    end = 0;
    let in_pages = |e: &LoweredEntry| e.buffers.values().any(|b| b.memory == BufferKind::PageTable);
    let arch = ctx.options.levels.first().map_or(mlcc_target::Arch::X86_64, |(_, target)| target.arch);
    let layout = PageLayout::for_module(module, arch)
        .filter(|_| program.levels.iter().flat_map(|l| &l.lowered.entries).any(in_pages));
    let mut states = Vec::new();
    let mut row_bytes = vec![0; module.states.len()];
    for (id, state) in module.states.iter() {
        let bytes = sized(value_bytes(&state.ty, None)?)?;
        if module.is_cache(id) {
            row_bytes[id.index()] = bytes / cache_rows(module, id).max(1) as u64;
        }
        match layout.as_ref().and_then(|layout| layout.state_offset(id)) {
            Some(part) => states.push((part, PAGE_ROWS * row_bytes[id.index()])),
            None => states.push((reserve_bytes(&mut end, bytes), bytes)),
        }
    }
    let page_bytes = layout.map_or(0, |layout| layout.bytes);
    let state_bytes = round_up(end);
    let context = context.map(|c| c as u64);
    let levels = Vec::new();
    let (chunk, batch) = (ctx.options.chunk, ctx.options.batch);
    let mut plan = MemoryPlan {
        params,
        weights_bytes,
        adapter_bytes,
        states,
        state_bytes,
        page_bytes,
        row_bytes,
        context,
        chunk,
        batch,
        levels,
    };
    for level in &program.levels {
        let mut entries = Vec::new();
        for entry in &level.lowered.entries {
            let chunk = most_rows(entry.batching, chunk, batch);
            let planned = EntryPlanner::new(module, entry, &plan, &SizeBounds { chunk, ..bounds })?.run()?;
            ctx.note(format!("{} {}: arena {} bytes", level.name, planned.name, planned.arena_bytes));
            entries.push(planned);
        }
        plan.levels.push(LevelPlan { name: level.name.clone(), entries });
    }
    let count = plan.entries().map(|e| e.buffers.len()).sum();
    program.memory = Some(plan);
    Ok(count)
}

/// Tokens that a cache holds.
fn cache_rows(module: &Module, state: StateId) -> i64 {
    module.states[state].ty.dims.first().and_then(Dim::as_const).unwrap_or(0)
}

/// Most rows in one call of an entry.
pub(crate) fn most_rows(batching: RowBatching, chunk: i64, batch: i64) -> i64 {
    match batching {
        RowBatching::Single => chunk,
        RowBatching::OneEach => batch,
        // So that all sequences may have one.
        RowBatching::Ragged => chunk.max(batch),
    }
}

/// The known bounds of sizes of all rows: several sequences together may have more rows than one can have.
pub(crate) fn of_all_rows(batching: RowBatching, size: &Dim, bounds: &SizeBounds) -> SizeBounds {
    let apart = batching.is_batched() && !depends_on(size, SizeSymbol::Past);
    SizeBounds { context: bounds.context.filter(|_| !apart), ..*bounds }
}

/// The most bytes that a buffer may need.
fn max_bytes(bytes: &Dim, bounds: &SizeBounds) -> Result<u64, PassError> {
    let most = bytes.value_range(bounds).and_then(|(_, most)| u64::try_from(most).ok());
    most.ok_or_else(|| PassError::Unsupported {
        what: format!("a buffer of {bytes} bytes"),
        hint: "its size has no limit: only models with a cache may have values as long as the past".into(),
    })
}

fn round_up(bytes: u64) -> u64 {
    bytes.div_ceil(ALIGN) * ALIGN
}

/// Buffers of several pages get a gap behind them, so that equal ones do not begin at equal places of their
/// pages: a load waits for a store before it whose address has the same low 12 bits (Intel optimization
/// manual, 4 KB aliasing), and kernels read and write equal elements of several tensors at once.
fn with_gap(bytes: u64) -> u64 {
    const PAGE: u64 = 4096;
    // More than a head of 128 f32 elements, and seven times less than a page.
    const GAP: u64 = 576;
    if bytes < PAGE { bytes } else { bytes + GAP }
}

fn reserve_bytes(end: &mut u64, bytes: u64) -> u64 {
    let offset = round_up(*end);
    *end = offset + bytes;
    offset
}

/// True if the kernel that makes the new value of a state may write it over the old one.
pub(crate) fn state_is_free(entry: &LoweredEntry, old: BufferId, value: BufferId) -> bool {
    let buffer = &entry.buffers[value];
    // Rows of all sequences lie together, their states do not.
    let apart = !entry.batching.is_batched() || buffer.apart;
    if buffer.memory != BufferKind::Temp || !apart {
        return false;
    }
    let launches = &entry.launches;
    let Some(producer) =
        launches.iter().position(|l| l.args.iter().any(|a| a.buffer == value && a.access != ParamAccess::In))
    else {
        return false;
    };
    let reads_later = launches[producer + 1..].iter().any(|l| l.args.iter().any(|a| a.buffer == old));
    let args = &launches[producer].args;
    let Some(output) = args.iter().find(|a| a.buffer == value && a.access != ParamAccess::In) else {
        return false;
    };
    let permitted = args.iter().enumerate().all(|(i, a)| a.buffer != old || output.in_place.contains(&i));
    !reads_later && permitted
}

/// Buffers that lie in the memory of another one.
struct SharedPlaces {
    sets: UnionFind<usize>,
    /// The buffer whose memory it is, by representative of a set.
    owners: Vec<BufferId>,
}

impl SharedPlaces {
    fn new(buffers: usize) -> SharedPlaces {
        let owners = (0..buffers).map(BufferId::from_index).collect();
        SharedPlaces { sets: UnionFind::new(buffers), owners }
    }

    /// The buffer in whose memory this one lies; the buffer itself if it has its own memory.
    fn alias_root(&self, id: BufferId) -> BufferId {
        self.owners[self.sets.find(id.index())]
    }

    /// Moves a buffer that has its own memory, and all that lie there, into the memory of another one.
    fn alias_into(&mut self, id: BufferId, into: BufferId) {
        let owner = self.alias_root(into);
        self.sets.union(id.index(), into.index());
        self.owners[self.sets.find(into.index())] = owner;
    }
}

struct EntryPlanner<'a> {
    module: &'a Module,
    entry: &'a LoweredEntry,
    plan: &'a MemoryPlan,
    /// Most bytes of each buffer.
    bytes: Vec<u64>,
    shared: SharedPlaces,
    /// Every worker has its own copy.
    copied: Vec<bool>,
}

impl<'a> EntryPlanner<'a> {
    fn new(
        module: &'a Module,
        entry: &'a LoweredEntry,
        plan: &'a MemoryPlan,
        bounds: &SizeBounds,
    ) -> Result<Self, PassError> {
        let n = entry.buffers.len();
        let most = |bytes: &Dim| max_bytes(bytes, &of_all_rows(entry.batching, bytes, bounds));
        let bytes = entry.buffers.values().map(|b| most(&b.bytes)).collect::<Result<_, _>>()?;
        let mut copied = vec![false; n];
        for launch in entry.launches.iter().filter(|l| l.repeat == RepeatMode::EachWorker) {
            for written in launch.args.iter().filter(|a| a.access != ParamAccess::In) {
                copied[written.buffer.index()] = true;
            }
        }
        Ok(EntryPlanner { module, entry, plan, bytes, shared: SharedPlaces::new(n), copied })
    }

    fn run(mut self) -> Result<EntryPlan, PassError> {
        let copies = self.place_updates()?;
        self.merge_in_place(&copies);
        // Where data crosses workers, whatever the addresses are.
        let apart = self.assign_addresses(&copies, None);
        let barriers = launch_phases(self.entry, &apart, self.plan);
        Ok(self.assign_addresses(&copies, Some(&barriers)))
    }

    /// Addresses. Temporaries share memory if their uses need no barrier for that alone: `phases` says how
    /// many there are anyway before each launch. Without it every temporary has its own memory.
    fn assign_addresses(&self, copies: &[usize], phases: Option<&[usize]>) -> EntryPlan {
        let (mut buffers, arena_bytes) = self.place_temps(copies, phases);
        for id in self.entry.buffers.ids() {
            let root = self.alias_root(id);
            if root != id {
                let bytes = buffers[id.index()].bytes;
                buffers[id.index()] = BufferRef { bytes, ..buffers[root.index()].clone() };
            }
        }
        EntryPlan { name: self.entry.name.clone(), buffers, arena_bytes, copies: copies.to_vec() }
    }

    fn alias_root(&self, id: BufferId) -> BufferId {
        self.shared.alias_root(id)
    }

    fn bytes(&self, id: BufferId) -> u64 {
        self.bytes[id.index()]
    }

    /// New state values that can be written where the state is: their kernel is the last to read the old
    /// value and permits it. Returns the updates that are left to copies.
    fn place_updates(&mut self) -> Result<Vec<usize>, PassError> {
        let mut copies = Vec::new();
        for (i, &(state, value)) in self.entry.updates.iter().enumerate() {
            let target = BufferKind::State(state);
            let old = self.entry.buffers.iter().find(|(_, b)| b.memory == target).map(|(id, _)| id);
            let Some(old) = old else { return Err(PassError::internal(PASS, "a state without a buffer")) };
            if matches!(self.entry.buffers[value].memory, BufferKind::State(_)) && value != old {
                return Err(PassError::internal(PASS, "one state becomes another's old value"));
            }
            match self.state_is_free(old, value) {
                true if self.alias_root(value) == value => self.shared.alias_into(value, old),
                _ => copies.push(i),
            }
        }
        Ok(copies)
    }

    fn state_is_free(&self, old: BufferId, value: BufferId) -> bool {
        !self.copied[value.index()] && state_is_free(self.entry, old, value)
    }

    /// Launch indices of first write and last use of each buffer, copies counting as after the end.
    fn lifetimes(&self, copies: &[usize]) -> Vec<(usize, usize)> {
        let mut life = vec![(usize::MAX, 0); self.entry.buffers.len()];
        for (i, launch) in self.entry.launches.iter().enumerate() {
            for arg in &launch.args {
                let (first, last) = &mut life[arg.buffer.index()];
                *first = (*first).min(i);
                *last = (*last).max(i);
            }
        }
        for &c in copies {
            let (_, value) = self.entry.updates[c];
            life[value.index()].1 = self.entry.launches.len();
        }
        life
    }

    /// Temporaries that die in a launch hand their memory to an output of it.
    fn merge_in_place(&mut self, copies: &[usize]) {
        let mut life = self.lifetimes(copies);
        for (i, launch) in self.entry.launches.iter().enumerate() {
            for output in launch.args.iter().filter(|a| a.access == ParamAccess::Out) {
                if !self.is_own_temp(output.buffer) {
                    continue;
                }
                let heir = output.in_place.iter().map(|&j| launch.args[j].buffer).find(|&input| {
                    let root = self.alias_root(input);
                    let other_use = launch
                        .args
                        .iter()
                        .enumerate()
                        .any(|(j, a)| self.alias_root(a.buffer) == root && !output.in_place.contains(&j));
                    self.is_own_temp(root)
                        && self.copied[root.index()] == self.copied[output.buffer.index()]
                        && life[root.index()].1 == i
                        && self.entry.buffers[root].bytes == self.entry.buffers[output.buffer].bytes
                        && !other_use
                });
                if let Some(input) = heir {
                    let root = self.alias_root(input);
                    self.shared.alias_into(output.buffer, root);
                    life[root.index()].1 = life[output.buffer.index()].1;
                }
            }
        }
    }

    fn is_own_temp(&self, id: BufferId) -> bool {
        self.entry.buffers[id].memory == BufferKind::Temp && self.alias_root(id) == id
    }

    /// The number of an output behind the first: it stays in the arena until the step has ended, for
    /// debuggers to read.
    fn tap_index(&self, id: BufferId) -> Option<u32> {
        tap_index(self.entry, id)
    }

    /// Bytes of the outputs before output `i`, in as many rows as a call has at most.
    fn before_output(&self, i: u32) -> u64 {
        let before = |memory| matches!(memory, BufferKind::Output(other) if other < i);
        let ids = self.entry.buffers.iter().filter(|(_, b)| before(b.memory)).map(|(id, _)| id);
        ids.map(|id| self.bytes(id)).sum()
    }

    /// First fit in order of first use; memory is free after its last use.
    fn place_temps(&self, copies: &[usize], phases: Option<&[usize]>) -> (Vec<BufferRef>, u64) {
        let mut life = self.lifetimes(copies);
        for id in self.entry.buffers.ids() {
            let root = self.alias_root(id).index();
            let (first, last) = life[id.index()];
            life[root] = (life[root].0.min(first), life[root].1.max(last));
        }
        let mut refs: Vec<BufferRef> = self.entry.buffers.ids().map(|id| self.base_ref(id)).collect();
        let placed_here = |&id: &BufferId| self.is_own_temp(id) || self.tap_index(id).is_some();
        let mut order: Vec<BufferId> = self.entry.buffers.ids().filter(placed_here).collect();
        // Taps come first, so that their places do not depend on what else a level has.
        for &id in order.iter().filter(|&&id| self.tap_index(id).is_some()) {
            life[id.index()] = (0, usize::MAX);
        }
        order.sort_by_key(|&id| (self.tap_index(id).unwrap_or(u32::MAX), life[id.index()].0, id.index()));
        let (copied, shared): (Vec<BufferId>, Vec<BufferId>) =
            order.into_iter().partition(|id| self.copied[id.index()]);
        // A worker goes on within a phase while others still read.
        let phase = |launch: usize| match phases {
            _ if launch == usize::MAX => launch,
            None => 0,
            Some(phases) if launch < self.entry.launches.len() => phases[launch],
            Some(phases) => phases.last().copied().unwrap_or(0),
        };
        let phased: Vec<_> = life.iter().map(|&(first, last)| (phase(first), phase(last))).collect();
        let end = self.first_fit(&shared, &phased, &mut refs);
        let own = self.first_fit(&copied, &life, &mut refs);
        if own == 0 {
            return (refs, end);
        }
        let begin = end.next_multiple_of(WORKER_GAP);
        let stride = own.next_multiple_of(WORKER_GAP) + WORKER_GAP;
        for id in copied {
            let place = &mut refs[id.index()];
            (place.offset, place.per_worker) = (begin + place.offset, stride);
        }
        (refs, begin + MAX_WORKERS * stride)
    }

    /// Offsets of the buffers, given in order of first use, in memory of their own; returns its size.
    fn first_fit(&self, order: &[BufferId], life: &[(usize, usize)], refs: &mut [BufferRef]) -> u64 {
        let mut placed: Vec<(u64, u64, usize)> = Vec::new();
        let mut end = 0;
        for id in order {
            let (first, last) = life[id.index()];
            let bytes = with_gap(round_up(self.bytes(*id).max(1)));
            placed.retain(|&(_, _, until)| until >= first);
            placed.sort_unstable();
            let mut offset = 0;
            for &(start, stop, _) in &placed {
                if start >= offset + bytes {
                    break;
                }
                offset = offset.max(stop);
            }
            placed.push((offset, offset + bytes, last));
            end = end.max(offset + bytes);
            refs[id.index()].offset = offset;
        }
        end
    }

    /// Base and size of a buffer; offset 0 for temporaries.
    fn base_ref(&self, id: BufferId) -> BufferRef {
        let bytes = self.bytes(id);
        let of_logits = reads_logits(&self.entry.name);
        if let BufferKind::State(s) | BufferKind::NewRows(s) = self.entry.buffers[id].memory {
            let (offset, of_page) = self.plan.states[s.index()];
            let new = matches!(self.entry.buffers[id].memory, BufferKind::NewRows(_));
            let per_past = if new { self.plan.row_bytes[s.index()] } else { 0 };
            if !self.plan.is_paged(s) {
                return BufferRef { per_past, ..BufferRef::fixed(MemoryBase::State, offset, bytes) };
            }
            let (bytes, per_page) = (if new { bytes } else { of_page }, self.plan.page_bytes);
            return BufferRef { per_past, per_page, ..BufferRef::fixed(MemoryBase::Pages, offset, bytes) };
        }
        let (base, offset) = match self.entry.buffers[id].memory {
            BufferKind::Param(p) => {
                let base = if self.module.params[p].is_adapter() {
                    MemoryBase::Adapters
                } else {
                    MemoryBase::Weights
                };
                (base, self.plan.params[p.index()].0)
            }
            BufferKind::State(s) | BufferKind::NewRows(s) => {
                (MemoryBase::State, self.plan.states[s.index()].0)
            }
            BufferKind::PageTable => (MemoryBase::PageTable, 0),
            BufferKind::Temp => (MemoryBase::Arena, 0),
            BufferKind::Input(0) if of_logits => (MemoryBase::Logits, 0),
            BufferKind::Input(0) => (MemoryBase::Tokens, 0),
            BufferKind::Input(_) if self.entry.batching == RowBatching::Ragged => {
                (MemoryBase::LogitIndices, 0)
            }
            BufferKind::Input(_) => (MemoryBase::Temperature, 0),
            BufferKind::Output(i) if of_logits => (MemoryBase::Probs, self.before_output(i)),
            BufferKind::Output(0) => (MemoryBase::Logits, 0),
            BufferKind::Output(_) => (MemoryBase::Arena, 0),
        };
        BufferRef::fixed(base, offset, bytes)
    }
}

/// The entry that turns logits into probabilities: inputs logits and temperature, output probabilities.
pub const SOFTMAX: &str = "softmax_with_temperature";
/// The entry that finds the largest logits of each row: input logits, outputs these and their numbers.
pub const TOP_K_STEP: &str = "top_k";

/// The number of an output behind the first, which has a place in the arena that nothing else uses.
pub(crate) fn tap_index(entry: &LoweredEntry, id: BufferId) -> Option<u32> {
    match entry.buffers[id].memory {
        BufferKind::Output(number) if number > 0 && !reads_logits(&entry.name) => Some(number),
        _ => None,
    }
}

/// True if the first input of an entry is logits.
fn reads_logits(entry: &str) -> bool {
    matches!(entry, SOFTMAX | TOP_K_STEP)
}
