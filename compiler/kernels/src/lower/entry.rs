//! Entry functions: every group becomes a launch, reshapes become views.

use super::attention;
use super::error::LowerError;
use super::group::{KernelTemplate, choose_template, reads_pages};
use super::kernel::{ArgContract, GroupKernel};
use super::kernel_cache::{AppendGroup, CachedMerge, KernelCache, PackedGroup};
use super::operands::value_bytes;
use super::plan::{
    BufferArg, BufferId, BufferKind, LaunchWork, LoweredBuffer, LoweredEntry, LoweredLaunch, Partition,
};
use super::strides::{SequenceBounds, SequenceStrides};
use crate::pages::row_elements;
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::entity::EntityArena;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::module::{FuncId, Module, ParamId, StateId};
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::{RowBatching, RowScope, row_batching, row_scopes, scope_of};
use mlcc_ir::step::{GatherShape, RepeatMode, SequenceFilter, WorkSchedule};
use mlcc_ir::types::{Packing, TensorType};

/// Alignment of every buffer in bytes, except of new rows in a cache.
const ALIGN: u32 = 64;

/// Lowers one entry function.
pub(super) struct EntryLowering<'a> {
    module: &'a Module,
    f: &'a Function,
    entry: LoweredEntry,
    /// Most rows of a call.
    max_rows: i64,
    locations: Vec<Option<ValueLocation>>,
    /// The rows that values of a batched function are about.
    scopes: Option<Vec<RowScope>>,
}

/// The place of a value.
#[derive(Clone, Copy)]
struct ValueLocation {
    buffer: BufferId,
    /// The parameter that it is.
    param: Option<ParamId>,
    /// Strides from a value of one sequence to those of the others.
    strides: SequenceStrides,
}

impl ValueLocation {
    fn of(buffer: BufferId) -> ValueLocation {
        ValueLocation { buffer, param: None, strides: SequenceStrides::default() }
    }
}

/// Alignment of what lies at multiples of `bytes` bytes.
fn align_of(bytes: u64) -> u32 {
    1 << (bytes | u64::from(ALIGN)).trailing_zeros()
}

impl<'a> EntryLowering<'a> {
    pub fn new(module: &'a Module, f: &'a Function, max_rows: i64) -> Self {
        let scopes = row_scopes(module, f);
        let entry = LoweredEntry {
            name: f.name.clone(),
            batching: row_batching(f),
            buffers: EntityArena::new(),
            launches: Vec::new(),
            updates: Vec::new(),
            copies: Vec::new(),
        };
        EntryLowering { module, f, entry, max_rows, locations: vec![None; f.values.len()], scopes }
    }

    pub fn run(mut self, kernels: &mut KernelCache) -> Result<LoweredEntry, LowerError> {
        for (i, &v) in self.f.inputs.iter().enumerate() {
            let bytes = value_bytes(self.f.ty(v), None)?;
            self.place(v, BufferKind::Input(i as u32), bytes, None);
        }
        for (_, node) in self.f.live_nodes() {
            match &node.op {
                Op::Param(p) => {
                    let param = &self.module.params[*p];
                    let bytes = value_bytes(&param.ty, param.packing)?;
                    self.place(node.outputs[0], BufferKind::Param(*p), bytes, Some(*p));
                }
                Op::StateRead(s) => {
                    let bytes = value_bytes(&self.module.states[*s].ty, None)?;
                    self.place(node.outputs[0], BufferKind::State(*s), bytes, None);
                }
                Op::StateWrite(s) => {
                    let value = self.at(node.inputs[0])?;
                    self.entry.updates.push((*s, value.buffer));
                    let ty = &self.module.states[*s].ty;
                    let kernel = kernels.copy_kernel(ty, [ALIGN; 2])?;
                    let state = ValueLocation::of(self.buffer(BufferKind::State(*s), value_bytes(ty, None)?));
                    let copy = self.launch(kernels, kernel, &[value], &[state], self.of_states())?;
                    self.entry.copies.push(copy);
                }
                Op::CacheAppend(s) => self.append(kernels, *s, node.inputs[0], node.outputs[0])?,
                Op::AllGather { ranks } => self.lower_all_gather(kernels, *ranks, node)?,
                Op::SequenceSplit { .. } => self.split(kernels, node.inputs[0], node.outputs[0])?,
                Op::SequenceJoin => self.join(kernels, node.inputs[0], node.outputs[0])?,
                // The first rows have the address of all.
                Op::Reshape { .. } | Op::OutputRows => {
                    let source = self.at(node.inputs[0])?;
                    self.locations[node.outputs[0].0 as usize] = Some(source);
                }
                Op::Call(callee) => {
                    let scope =
                        self.scopes.as_ref().map_or(RowScope::All, |s| scope_of(self.module, node, s));
                    self.call(kernels, *callee, node, scope)?;
                }
                other => {
                    return Err(LowerError::internal(format!("{} is in no group", other.name())));
                }
            }
        }
        self.outputs(kernels)?;
        Ok(self.entry)
    }

    /// New rows of a cache: the kernel that makes them writes them there, or they are copied: several of them
    /// may be in several pages.
    fn append(
        &mut self,
        kernels: &mut KernelCache,
        state: StateId,
        rows: ValueId,
        all: ValueId,
    ) -> Result<(), LowerError> {
        let ty = &self.module.states[state].ty;
        let row = TensorType { dtype: ty.dtype, dims: ty.dims[1..].to_vec() };
        let row_bytes = value_bytes(&row, None)?.as_const().unwrap_or(0);
        let memory = BufferKind::NewRows(state);
        let made = self.at(rows)?;
        if kernels.pages.is_some() {
            // Placing rows needs the table, whether a kernel does or not.
            self.table(kernels);
        }
        let from = &self.entry.buffers[made.buffer];
        // Kernels rely on the alignment of what they write.
        let one = self.f.ty(rows).dims.first().and_then(Dim::as_const) == Some(1);
        let scattered = kernels.pages.is_some() && !one;
        let direct = from.memory == BufferKind::Temp
            && !scattered
            && row_bytes % i64::from(ALIGN) == 0
            && (from.apart || !self.entry.batching.is_batched())
            && !self.is_update(made.buffer);
        if direct {
            self.entry.buffers[made.buffer].memory = memory;
        } else if scattered {
            let kernel = kernels.append_rows_kernel(self.f.ty(rows))?;
            let cache = ValueLocation::of(self.buffer(BufferKind::State(state), value_bytes(ty, None)?));
            let inputs = [made, self.table(kernels)];
            let launch = self.launch(kernels, kernel, &inputs, &[cache], self.of_states())?;
            self.entry.launches.push(launch);
        } else {
            let ty = self.f.ty(rows);
            let kernel = kernels.copy_kernel(ty, [ALIGN, align_of(row_bytes as u64)])?;
            let to = ValueLocation::of(self.buffer(memory, value_bytes(ty, None)?));
            let launch = self.launch(kernels, kernel, &[made], &[to], self.of_states())?;
            self.entry.launches.push(launch);
        }
        self.place(all, BufferKind::State(state), value_bytes(ty, None)?, None);
        Ok(())
    }

    /// The table of pages.
    fn table(&mut self, kernels: &KernelCache) -> ValueLocation {
        let pages = kernels.pages.as_ref().map_or(0, |layout| layout.pages);
        ValueLocation::of(self.buffer(BufferKind::PageTable, Dim::from(pages as i64 * 4)))
    }

    /// Elements of a row of the cache in pages that lies there, if one does.
    fn in_pages(&self, kernels: &KernelCache, location: &ValueLocation) -> Option<i64> {
        let BufferKind::State(state) = self.entry.buffers[location.buffer].memory else { return None };
        kernels.pages.as_ref().and_then(|layout| layout.state_offset(state))?;
        row_elements(&self.module.states[state].ty)
    }

    /// The place of a value outside of pages: its own, or that of a copy.
    fn dense(&mut self, kernels: &mut KernelCache, v: ValueId) -> Result<ValueLocation, LowerError> {
        let location = self.at(v)?;
        let Some(row) = self.in_pages(kernels, &location) else { return Ok(location) };
        let (ty, scope) = (self.f.ty(v), self.of_states());
        let kernel = kernels.gather_kernel(ty, row)?;
        let bytes = value_bytes(ty, None)?;
        let to = match scope {
            RowScope::Sequence => self.apart(&bytes)?,
            RowScope::All | RowScope::Outputs => ValueLocation::of(self.buffer(BufferKind::Temp, bytes)),
        };
        let inputs = [location, self.table(kernels)];
        let launch = self.launch(kernels, kernel, &inputs, &[to], scope)?;
        self.entry.launches.push(launch);
        Ok(to)
    }

    /// Rows of all ranks, of all sequences at once.
    fn lower_all_gather(
        &mut self,
        kernels: &mut KernelCache,
        ranks: usize,
        node: &GraphNode,
    ) -> Result<(), LowerError> {
        let scope = self.scopes.as_ref().map_or(RowScope::All, |s| scope_of(self.module, node, s));
        let unsupported = |hint: &str| LowerError::Unsupported {
            what: format!("an exchange of {ranks} ranks in @{}", self.f.name),
            hint: hint.into(),
        };
        if scope == RowScope::Sequence {
            let hint = "it is of the values of one sequence, and only those of all sequences are exchanged: build with `--max-batch 1`";
            return Err(unsupported(hint));
        }
        let (part, all) = (node.inputs[0], node.outputs[0]);
        let ty = self.f.ty(part);
        let Some((last, leading)) = ty.dims.split_last() else {
            return Err(LowerError::internal("an exchange of a number"));
        };
        let row = TensorType { dtype: ty.dtype, dims: vec![last.clone()] };
        let row_bytes = value_bytes(&row, None)?.as_const().and_then(|bytes| u64::try_from(bytes).ok());
        let row_bytes =
            row_bytes.ok_or_else(|| LowerError::internal(format!("rows of {ty} have no fixed size")))?;
        let rows = leading.iter().fold(Dim::from(1), |rows, dim| rows.product(dim));
        let from = self.dense(kernels, part)?.buffer;
        self.place(all, BufferKind::Temp, value_bytes(self.f.ty(all), None)?, None);
        let (to, parts) = (self.at(all)?.buffer, GatherShape { ranks, rows, row_bytes });
        self.entry.launches.push(LoweredLaunch::all_gather(from, to, parts, scope == RowScope::Outputs));
        Ok(())
    }

    /// True if a state gets this buffer as its new value.
    fn is_update(&self, buffer: BufferId) -> bool {
        self.entry.updates.iter().any(|(_, b)| *b == buffer)
    }

    /// Launches on states are for each sequence of a batch.
    fn of_states(&self) -> RowScope {
        if self.scopes.is_some() { RowScope::Sequence } else { RowScope::All }
    }

    /// The rows of each sequence: where they lie, if every row is aligned, else a copy.
    fn split(&mut self, kernels: &mut KernelCache, all: ValueId, own: ValueId) -> Result<(), LowerError> {
        let from = self.at(all)?;
        let bytes = self.row_bytes(own)?;
        let from = ValueLocation { strides: SequenceStrides { row: bytes, sequence: 0 }, ..from };
        self.locations[own.0 as usize] = Some(from);
        if bytes % u64::from(ALIGN) == 0 {
            return Ok(());
        }
        let kernel = kernels.copy_kernel(self.f.ty(own), [align_of(bytes), ALIGN])?;
        let to = self.place_apart(own)?;
        let launch = self.launch(kernels, kernel, &[from], &[to], RowScope::Sequence)?;
        self.entry.launches.push(launch);
        Ok(())
    }

    /// The rows of all sequences: in place, if they are adjacent in memory that has no other use, else a
    /// copy.
    fn join(&mut self, kernels: &mut KernelCache, own: ValueId, all: ValueId) -> Result<(), LowerError> {
        let from = self.at(own)?;
        let bytes = self.row_bytes(own)?;
        let together = SequenceStrides { row: bytes, sequence: 0 };
        let dense = self.entry.buffers[from.buffer].memory == BufferKind::Temp && from.strides == together;
        if dense && !self.is_update(from.buffer) {
            self.entry.buffers[from.buffer].apart = false;
            self.locations[all.0 as usize] = Some(ValueLocation::of(from.buffer));
            return Ok(());
        }
        let kernel = kernels.copy_kernel(self.f.ty(own), [ALIGN, align_of(bytes)])?;
        self.place(all, BufferKind::Temp, value_bytes(self.f.ty(all), None)?, None);
        let to = ValueLocation { strides: together, ..self.at(all)? };
        let launch = self.launch(kernels, kernel, &[from], &[to], RowScope::Sequence)?;
        self.entry.launches.push(launch);
        Ok(())
    }

    /// Bytes of a row of a value `[rows, ..]`.
    fn row_bytes(&self, v: ValueId) -> Result<u64, LowerError> {
        let ty = self.f.ty(v);
        let row = TensorType { dtype: ty.dtype, dims: ty.dims[1..].to_vec() };
        let bytes = value_bytes(&row, None)?.as_const().and_then(|bytes| u64::try_from(bytes).ok());
        bytes.ok_or_else(|| LowerError::internal(format!("rows of {ty} have no fixed size")))
    }

    /// Memory for a value of each sequence, aligned.
    fn place_apart(&mut self, v: ValueId) -> Result<ValueLocation, LowerError> {
        let location = self.apart(&value_bytes(self.f.ty(v), None)?)?;
        self.locations[v.0 as usize] = Some(location);
        Ok(location)
    }

    fn apart(&mut self, bytes: &Dim) -> Result<ValueLocation, LowerError> {
        let limits = SequenceBounds { rows: self.max_rows, context: self.module.context_length() };
        let strides = SequenceStrides::for_batching(bytes, self.entry.batching, limits, u64::from(ALIGN));
        let strides = strides.ok_or_else(|| LowerError::Unsupported {
            what: format!("a value of {bytes} bytes for each sequence"),
            hint: "its size has no limit: only models with a cache may have values as long as the past"
                .into(),
        })?;
        let buffer = self.entry.buffers.push(LoweredBuffer {
            memory: BufferKind::Temp,
            bytes: strides.total_bytes(),
            apart: true,
        });
        Ok(ValueLocation { buffer, param: None, strides })
    }

    fn buffer(&mut self, memory: BufferKind, bytes: Dim) -> BufferId {
        let existing =
            self.entry.buffers.iter().find(|(_, b)| memory != BufferKind::Temp && b.memory == memory);
        match existing.map(|(id, _)| id) {
            Some(id) => id,
            None => self.entry.buffers.push(LoweredBuffer { memory, bytes, apart: false }),
        }
    }

    fn place(&mut self, v: ValueId, memory: BufferKind, bytes: Dim, param: Option<ParamId>) {
        let buffer = self.buffer(memory, bytes);
        self.locations[v.0 as usize] =
            Some(ValueLocation { buffer, param, strides: SequenceStrides::default() });
    }

    fn at(&self, v: ValueId) -> Result<ValueLocation, LowerError> {
        let missing = || LowerError::internal(format!("value {v} of {} has no location", self.f.name));
        self.locations[v.0 as usize].ok_or_else(missing)
    }

    /// Launches that only append rows to caches of this attention, in their order: it can do that itself, so
    /// that no barrier is needed between the rows and their readers.
    fn appends(
        &self,
        kernels: &KernelCache,
        callee: FuncId,
        ins: &[ValueLocation],
    ) -> Vec<(usize, AppendGroup)> {
        let f = &self.module.functions[callee];
        if self.scopes.is_some() || !attention::appends_rows(f, kernels.target) {
            return Vec::new();
        }
        let launches = 0..self.entry.launches.len();
        launches.filter_map(|at| Some((at, self.append_of(kernels, f, ins, at)?))).collect()
    }

    /// The rows that launch `at` appends, if only the attention `f` needs them.
    fn append_of(
        &self,
        kernels: &KernelCache,
        f: &Function,
        ins: &[ValueLocation],
        at: usize,
    ) -> Option<AppendGroup> {
        let launches = &self.entry.launches;
        let memory = |buffer: BufferId| self.entry.buffers[buffer].memory;
        let cache = |made: &BufferArg| match memory(made.buffer) {
            BufferKind::NewRows(state) => {
                ins.iter().position(|p| memory(p.buffer) == BufferKind::State(state))
            }
            _ => None,
        };
        let into: Vec<usize> = written_args(&launches[at]).map(cache).collect::<Option<_>>()?;
        let group = kernels.group_of(launches[at].kernel()?)?;
        let rows = &self.module.functions[group.f];
        let plain = matches!(choose_template(rows, &group.packings, kernels.target), KernelTemplate::Rows);
        let read_by = |arg: &BufferArg, made: &BufferArg, cache: usize| {
            arg.buffer == made.buffer || arg.buffer == ins[cache].buffer
        };
        let others = launches.iter().enumerate().filter(|(i, _)| *i != at).flat_map(|(_, l)| &l.args);
        let made = || written_args(&launches[at]).zip(&into);
        let needed = others.into_iter().any(|arg| made().any(|(made, &cache)| read_by(arg, made, cache)))
            || ins.iter().any(|p| made().any(|(made, _)| made.buffer == p.buffer));
        let fits = plain
            && group.rows.iter().all(Option::is_none)
            && !needed
            && !into.is_empty()
            && attention::appended_by(f, rows);
        fits.then(|| AppendGroup { group: group.clone(), into })
    }

    fn call(
        &mut self,
        kernels: &mut KernelCache,
        callee: FuncId,
        node: &GraphNode,
        scope: RowScope,
    ) -> Result<(), LowerError> {
        let mut ins = node.inputs.iter().map(|&v| self.at(v)).collect::<Result<Vec<ValueLocation>, _>>()?;
        let packing = |p: ParamId| self.module.params[p].packing.unwrap_or(Packing::RowMajor);
        let packings: Vec<_> = ins.iter().map(|location| location.param.map(packing)).collect();
        let f = &self.module.functions[callee];
        if !reads_pages(f, &choose_template(f, &packings, kernels.target)) {
            ins = node.inputs.iter().map(|&v| self.dense(kernels, v)).collect::<Result<_, _>>()?;
        }
        let rows: Vec<_> = ins.iter().map(|location| self.in_pages(kernels, location)).collect();
        let reads_table = rows.iter().any(Option::is_some);
        let group = PackedGroup { f: callee, packings, rows };
        let (before, rows): (Vec<usize>, Vec<AppendGroup>) =
            self.appends(kernels, callee, &ins).into_iter().unzip();
        let kernel = match rows.is_empty() {
            true => kernels.group_kernel(group.clone())?,
            false => kernels.append_kernel(group.clone(), &rows)?,
        };
        for &launch in &before {
            let read = self.entry.launches[launch].args.iter().filter(|a| a.access == ParamAccess::In);
            ins.extend(read.map(|a| ValueLocation::of(a.buffer)));
        }
        for &launch in before.iter().rev() {
            self.entry.launches.remove(launch);
        }
        if reads_table {
            ins.push(self.table(kernels));
        }
        let mut outs = Vec::new();
        for &v in &node.outputs {
            if scope == RowScope::Sequence {
                outs.push(self.place_apart(v)?);
                continue;
            }
            let bytes = value_bytes(self.f.ty(v), None)?;
            self.place(v, BufferKind::Temp, bytes, None);
            outs.push(self.at(v)?);
        }
        let single = match (self.entry.batching, scope) {
            (RowBatching::Ragged, RowScope::Sequence) => kernels.one_row(&group)?,
            _ => None,
        };
        let launched = match single {
            Some(single) => {
                vec![(single, Some(SequenceFilter::OneRow)), (kernel, Some(SequenceFilter::SeveralRows))]
            }
            None => vec![(kernel, None)],
        };
        self.launches(kernels, &launched, (&ins, &outs), scope)
    }

    /// Launches of a group: of one kernel, or of one for the sequences of one row and of another one for
    /// those of several. Kernels that finish unfinished results come last, so that the others need no barrier
    /// between them.
    fn launches(
        &mut self,
        kernels: &KernelCache,
        launched: &[(usize, Option<SequenceFilter>)],
        (ins, outs): (&[ValueLocation], &[ValueLocation]),
        scope: RowScope,
    ) -> Result<(), LowerError> {
        let mut last = Vec::new();
        for &(kernel, which) in launched {
            let Some(CachedMerge { kernel: merge, bytes, reads }) = kernels.merges[kernel].clone() else {
                self.push(kernels, (kernel, which), ins, outs, scope)?;
                continue;
            };
            let between = match scope {
                RowScope::Sequence => self.apart(&bytes)?,
                RowScope::All | RowScope::Outputs => ValueLocation::of(self.buffer(BufferKind::Temp, bytes)),
            };
            self.push(kernels, (kernel, which), ins, &[between], scope)?;
            let read = std::iter::once(between).chain(reads.iter().map(|&i| ins[i]));
            last.push(((merge, which), read.collect::<Vec<ValueLocation>>()));
        }
        last.into_iter().try_for_each(|(merge, read)| self.push(kernels, merge, &read, outs, scope))
    }

    fn push(
        &mut self,
        kernels: &KernelCache,
        (kernel, which): (usize, Option<SequenceFilter>),
        ins: &[ValueLocation],
        outs: &[ValueLocation],
        scope: RowScope,
    ) -> Result<(), LowerError> {
        let mut launch = self.launch(kernels, kernel, ins, outs, scope)?;
        if let (RepeatMode::EachSequence { of, .. }, Some(which)) = (&mut launch.repeat, which) {
            *of = which;
        }
        self.entry.launches.push(launch);
        Ok(())
    }

    /// Builds a launch. In launches for each sequence workers have runs of equal work; a kernel that one
    /// worker would run alone for a sequence is run for some of the sequences by each.
    fn launch(
        &self,
        kernels: &KernelCache,
        kernel: usize,
        inputs: &[ValueLocation],
        outputs: &[ValueLocation],
        scope: RowScope,
    ) -> Result<LoweredLaunch, LowerError> {
        let made = &kernels.kernels[kernel];
        if inputs.len() + outputs.len() != made.args.len() {
            return Err(LowerError::internal(format!("arguments of kernel {}", made.kernel.name)));
        }
        let one = self.entry.batching == RowBatching::OneEach && scope == RowScope::Sequence;
        if one && made.kernel.dims.iter().any(|(sym, _)| *sym == SizeSymbol::N) {
            let what = format!("kernel {} is for rows of all sequences", made.kernel.name);
            return Err(LowerError::internal(what));
        }
        let alone = |contract: &ArgContract| {
            contract.access == ParamAccess::In
                || contract.partition.as_ref().is_some_and(Partition::is_single)
        };
        let each = |work| RepeatMode::EachSequence { work, of: SequenceFilter::All };
        let repeat = match scope {
            RowScope::All => RepeatMode::Once,
            RowScope::Outputs => RepeatMode::Outputs,
            RowScope::Sequence if made.args.iter().all(alone) => each(Dim::from(1)),
            RowScope::Sequence => each(self.work(made, kernels.keys[kernel].as_ref())),
        };
        // A worker with a sequence has its only row, if it has no more.
        let dealt = if self.entry.batching == RowBatching::Ragged { SizeSymbol::B } else { SizeSymbol::N };
        let args = inputs
            .iter()
            .chain(outputs)
            .zip(&made.args)
            .map(|(location, contract)| BufferArg {
                buffer: location.buffer,
                access: contract.access,
                partition: match repeat.has_whole_sequences() {
                    true => Some(Partition::Rows(Dim::sym(dealt))),
                    false => contract.partition.clone(),
                },
                in_place: contract.in_place.clone(),
                row_bytes: location.strides.row,
                sequence_bytes: location.strides.sequence,
            })
            .collect();
        let dims = made.kernel.dims.iter().map(|(s, _)| (*s).into()).collect();
        let (work, grid) = (LaunchWork::Kernel(kernel), made.grid.clone());
        Ok(LoweredLaunch { work, args, dims, grid, repeat, schedule: WorkSchedule::Static })
    }

    /// The work of a sequence: `keys` are those that each row looks at. Not by rows it comes in many units,
    /// so that it can be divided; a row's first keys take longer than the others.
    fn work(&self, made: &GroupKernel, keys: Option<&Dim>) -> Dim {
        const UNITS: i64 = 64;
        let rows = match self.entry.batching {
            RowBatching::OneEach => Dim::from(1),
            RowBatching::Single | RowBatching::Ragged => Dim::sym(SizeSymbol::N),
        };
        let of_rows = Some(Partition::Rows(rows.clone()));
        let mut written = made.args.iter().filter(|a| a.access != ParamAccess::In);
        match keys {
            Some(keys) => rows.product(&keys.add(&Dim::from(UNITS))),
            None if written.all(|a| a.partition == of_rows) => rows,
            None => rows.scale(UNITS),
        }
    }

    /// Results go to the caller's memory: the buffer of a launch is renamed, anything else is copied.
    fn outputs(&mut self, kernels: &mut KernelCache) -> Result<(), LowerError> {
        for (i, &v) in self.f.outputs.iter().enumerate() {
            let ValueLocation { buffer, .. } = self.dense(kernels, v)?;
            let memory = BufferKind::Output(i as u32);
            let renamed = self.entry.buffers[buffer].memory == BufferKind::Temp && !self.is_update(buffer);
            if renamed {
                self.entry.buffers[buffer].memory = memory;
                continue;
            }
            let kernel = kernels.copy_kernel(self.f.ty(v), [ALIGN; 2])?;
            let scope = self.scopes.as_ref().map_or(RowScope::All, |scopes| scopes[v.0 as usize]);
            let bytes = self.entry.buffers[buffer].bytes.clone();
            let out = self.entry.buffers.push(LoweredBuffer { memory, bytes, apart: false });
            let launch =
                self.launch(kernels, kernel, &[ValueLocation::of(buffer)], &[ValueLocation::of(out)], scope)?;
            self.entry.launches.push(launch);
        }
        Ok(())
    }
}

/// Accesses of a launch that write.
pub fn written_args(launch: &LoweredLaunch) -> impl Iterator<Item = &BufferArg> {
    launch.args.iter().filter(|a| a.access != ParamAccess::In)
}
