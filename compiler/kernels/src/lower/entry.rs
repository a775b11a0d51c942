//! Entry functions: every group becomes a launch, reshapes become views.

use super::attention;
use super::error::LowerError;
use super::group::{Template, template};
use super::kernel::ArgContract;
use super::kernel_cache::{Append, KernelCache, PackedGroup};
use super::operands::value_bytes;
use super::plan::{Arg, Buffer, BufferId, Entry, LoweredLaunch, Memory, Partition};
use mlcc_ir::dim::{Bounds, Dim, Sym};
use mlcc_ir::entity::Arena;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::Access;
use mlcc_ir::module::{FuncId, Module, ParamId, StateId};
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::{per_sequence, runs_for_each};
use mlcc_ir::step::{Repeat, Shares};
use mlcc_ir::types::{Packing, TensorType};

/// Alignment of every buffer in bytes, except of new rows in a cache.
const ALIGN: u32 = 64;

/// Lowers one entry function.
pub(super) struct EntryLowering<'a> {
    module: &'a Module,
    f: &'a Function,
    entry: Entry,
    locations: Vec<Option<Location>>,
    /// Of a batched function, which values are of one sequence.
    single: Option<Vec<bool>>,
    /// What sizes of one sequence may be.
    bounds: Bounds,
}

/// Where a value lies.
#[derive(Clone, Copy)]
struct Location {
    buffer: BufferId,
    /// The parameter that it is.
    param: Option<ParamId>,
    /// Of a value of one sequence: bytes to that of the next. 0 in states, of which each sequence has its own.
    row_bytes: u64,
}

impl Location {
    fn of(buffer: BufferId) -> Location {
        Location { buffer, param: None, row_bytes: 0 }
    }
}

/// Alignment of what lies at multiples of so many bytes.
fn align_of(bytes: u64) -> u32 {
    1 << (bytes | u64::from(ALIGN)).trailing_zeros()
}

impl<'a> EntryLowering<'a> {
    pub fn new(module: &'a Module, f: &'a Function) -> Self {
        let single = per_sequence(module, f);
        let entry = Entry {
            name: f.name.clone(),
            batched: single.is_some(),
            buffers: Arena::new(),
            launches: Vec::new(),
            updates: Vec::new(),
            copies: Vec::new(),
        };
        let bounds = Bounds { chunk: 1, context: module.context() };
        EntryLowering { module, f, entry, locations: vec![None; f.values.len()], single, bounds }
    }

    pub fn run(mut self, kernels: &mut KernelCache) -> Result<Entry, LowerError> {
        for (i, &v) in self.f.inputs.iter().enumerate() {
            let bytes = value_bytes(self.f.ty(v), None)?;
            self.place(v, Memory::Input(i as u32), bytes, None);
        }
        for (_, node) in self.f.live() {
            match &node.op {
                Op::Param(p) => {
                    let param = &self.module.params[*p];
                    let bytes = value_bytes(&param.ty, param.packing)?;
                    self.place(node.outputs[0], Memory::Param(*p), bytes, Some(*p));
                }
                Op::StateRead(s) => {
                    let bytes = value_bytes(&self.module.states[*s].ty, None)?;
                    self.place(node.outputs[0], Memory::State(*s), bytes, None);
                }
                Op::StateWrite(s) => {
                    let value = self.at(node.inputs[0])?;
                    self.entry.updates.push((*s, value.buffer));
                    let ty = &self.module.states[*s].ty;
                    let kernel = kernels.copy(ty, [ALIGN; 2])?;
                    let state = Location::of(self.buffer(Memory::State(*s), value_bytes(ty, None)?));
                    let copy = self.launch(kernels, kernel, &[value], &[state], self.single.is_some())?;
                    self.entry.copies.push(copy);
                }
                Op::CacheAppend(s) => self.append(kernels, *s, node.inputs[0], node.outputs[0])?,
                Op::SequenceSplit => self.split(kernels, node.inputs[0], node.outputs[0])?,
                Op::SequenceJoin => self.join(kernels, node.inputs[0], node.outputs[0])?,
                Op::Reshape { .. } => {
                    let source = self.at(node.inputs[0])?;
                    self.locations[node.outputs[0].0 as usize] = Some(source);
                }
                Op::Call(callee) => {
                    let each = self.single.as_ref().is_some_and(|s| runs_for_each(self.module, node, s));
                    self.call(kernels, *callee, node, each)?;
                }
                other => {
                    return Err(LowerError::internal(format!("{} is in no group", other.name())));
                }
            }
        }
        self.outputs(kernels)?;
        Ok(self.entry)
    }

    /// New rows of a cache: the kernel that makes them writes them there, or they are copied. All rows so far are a
    /// prefix of the state's memory.
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
        let memory = Memory::NewRows(state);
        let made = self.at(rows)?;
        let from = &self.entry.buffers[made.buffer];
        // Kernels rely on the alignment of what they write.
        let direct = from.memory == Memory::Temp
            && row_bytes % i64::from(ALIGN) == 0
            && (from.apart || !self.entry.batched)
            && !self.is_update(made.buffer);
        if direct {
            self.entry.buffers[made.buffer].memory = memory;
        } else {
            let ty = self.f.ty(rows);
            let kernel = kernels.copy(ty, [ALIGN, align_of(row_bytes as u64)])?;
            let to = Location::of(self.buffer(memory, value_bytes(ty, None)?));
            let launch = self.launch(kernels, kernel, &[made], &[to], self.single.is_some())?;
            self.entry.launches.push(launch);
        }
        self.place(all, Memory::State(state), value_bytes(ty, None)?, None);
        Ok(())
    }

    /// Whether a state gets this buffer as its new value.
    fn is_update(&self, buffer: BufferId) -> bool {
        self.entry.updates.iter().any(|(_, b)| *b == buffer)
    }

    /// The row of each sequence: where it lies, if every row is aligned, else a copy.
    fn split(&mut self, kernels: &mut KernelCache, rows: ValueId, row: ValueId) -> Result<(), LowerError> {
        let from = self.at(rows)?;
        let bytes = self.row_bytes(row)?;
        let from = Location { row_bytes: bytes, ..from };
        self.locations[row.0 as usize] = Some(from);
        if bytes % u64::from(ALIGN) == 0 {
            return Ok(());
        }
        let kernel = kernels.copy(self.f.ty(row), [align_of(bytes), ALIGN])?;
        let to = self.place_apart(row)?;
        let launch = self.launch(kernels, kernel, &[from], &[to], true)?;
        self.entry.launches.push(launch);
        Ok(())
    }

    /// The rows of all sequences: where they lie, if they are one after another in memory that is of no other use, else a
    /// copy.
    fn join(&mut self, kernels: &mut KernelCache, row: ValueId, rows: ValueId) -> Result<(), LowerError> {
        let from = self.at(row)?;
        let bytes = self.row_bytes(row)?;
        let dense = self.entry.buffers[from.buffer].memory == Memory::Temp && from.row_bytes == bytes;
        if dense && !self.is_update(from.buffer) {
            self.entry.buffers[from.buffer].apart = false;
            self.locations[rows.0 as usize] = Some(Location::of(from.buffer));
            return Ok(());
        }
        let kernel = kernels.copy(self.f.ty(row), [ALIGN, align_of(bytes)])?;
        self.place(rows, Memory::Temp, value_bytes(self.f.ty(rows), None)?, None);
        let to = Location { row_bytes: bytes, ..self.at(rows)? };
        let launch = self.launch(kernels, kernel, &[from], &[to], true)?;
        self.entry.launches.push(launch);
        Ok(())
    }

    /// Most bytes of a value of one sequence.
    fn row_bytes(&self, v: ValueId) -> Result<u64, LowerError> {
        self.most(&value_bytes(self.f.ty(v), None)?)
    }

    fn most(&self, bytes: &Dim) -> Result<u64, LowerError> {
        let most = bytes.range(&self.bounds).and_then(|(_, most)| u64::try_from(most).ok());
        most.ok_or_else(|| LowerError::Unsupported {
            what: format!("a value of {bytes} bytes for each sequence"),
            hint: "its size has no limit: only models with a cache may have values as long as the past"
                .into(),
        })
    }

    /// Memory for a value of each sequence, aligned.
    fn place_apart(&mut self, v: ValueId) -> Result<Location, LowerError> {
        let location = self.apart(self.row_bytes(v)?);
        self.locations[v.0 as usize] = Some(location);
        Ok(location)
    }

    fn apart(&mut self, bytes: u64) -> Location {
        let row_bytes = bytes.max(1).next_multiple_of(u64::from(ALIGN));
        let all = Dim::sym(Sym::N).scale(row_bytes as i64);
        let buffer = self.entry.buffers.push(Buffer { memory: Memory::Temp, bytes: all, apart: true });
        Location { buffer, param: None, row_bytes }
    }

    fn buffer(&mut self, memory: Memory, bytes: Dim) -> BufferId {
        let existing = self.entry.buffers.iter().find(|(_, b)| memory != Memory::Temp && b.memory == memory);
        match existing.map(|(id, _)| id) {
            Some(id) => id,
            None => self.entry.buffers.push(Buffer { memory, bytes, apart: false }),
        }
    }

    fn place(&mut self, v: ValueId, memory: Memory, bytes: Dim, param: Option<ParamId>) {
        let buffer = self.buffer(memory, bytes);
        self.locations[v.0 as usize] = Some(Location { buffer, param, row_bytes: 0 });
    }

    fn at(&self, v: ValueId) -> Result<Location, LowerError> {
        let missing = || LowerError::internal(format!("value {v} of {} has no location", self.f.name));
        self.locations[v.0 as usize].ok_or_else(missing)
    }

    /// Launches that do nothing but append rows to caches of this attention, in their order: it can do that itself, so that no
    /// barrier has to stand between the rows and those who read them.
    fn appends(&self, kernels: &KernelCache, callee: FuncId, ins: &[Location]) -> Vec<(usize, Append)> {
        let f = &self.module.functions[callee];
        if self.single.is_some() || !attention::appends_rows(f, kernels.target) {
            return Vec::new();
        }
        let launches = 0..self.entry.launches.len();
        launches.filter_map(|at| Some((at, self.append_of(kernels, f, ins, at)?))).collect()
    }

    /// What launch `at` appends, if only the attention `f` needs that.
    fn append_of(&self, kernels: &KernelCache, f: &Function, ins: &[Location], at: usize) -> Option<Append> {
        let launches = &self.entry.launches;
        let memory = |buffer: BufferId| self.entry.buffers[buffer].memory;
        let cache = |made: &Arg| match memory(made.buffer) {
            Memory::NewRows(state) => ins.iter().position(|p| memory(p.buffer) == Memory::State(state)),
            _ => None,
        };
        let into: Vec<usize> = writes(&launches[at]).map(cache).collect::<Option<_>>()?;
        let group = kernels.group_of(launches[at].kernel)?;
        let rows = &self.module.functions[group.f];
        let plain = matches!(template(rows, &group.packings, kernels.target), Template::Rows);
        let read_by = |arg: &Arg, made: &Arg, cache: usize| {
            arg.buffer == made.buffer || arg.buffer == ins[cache].buffer
        };
        let others = launches.iter().enumerate().filter(|(i, _)| *i != at).flat_map(|(_, l)| &l.args);
        let made = || writes(&launches[at]).zip(&into);
        let needed = others.into_iter().any(|arg| made().any(|(made, &cache)| read_by(arg, made, cache)))
            || ins.iter().any(|p| made().any(|(made, _)| made.buffer == p.buffer));
        let fits = plain && !needed && !into.is_empty() && attention::appended_by(f, rows);
        fits.then(|| Append { group: group.clone(), into })
    }

    fn call(
        &mut self,
        kernels: &mut KernelCache,
        callee: FuncId,
        node: &Node,
        each: bool,
    ) -> Result<(), LowerError> {
        let ins = node.inputs.iter().map(|&v| self.at(v)).collect::<Result<Vec<Location>, _>>()?;
        let packing = |p: ParamId| self.module.params[p].packing.unwrap_or(Packing::RowMajor);
        let packings = ins.iter().map(|location| location.param.map(packing)).collect();
        let group = PackedGroup { f: callee, packings };
        let (before, rows): (Vec<usize>, Vec<Append>) =
            self.appends(kernels, callee, &ins).into_iter().unzip();
        let kernel = match rows.is_empty() {
            true => kernels.group(group)?,
            false => kernels.appending(group, &rows)?,
        };
        let mut ins = ins;
        for &launch in &before {
            let read = self.entry.launches[launch].args.iter().filter(|a| a.access == Access::In);
            ins.extend(read.map(|a| Location::of(a.buffer)));
        }
        for &launch in before.iter().rev() {
            self.entry.launches.remove(launch);
        }
        let mut outs = Vec::new();
        for &v in &node.outputs {
            if each {
                outs.push(self.place_apart(v)?);
                continue;
            }
            let bytes = value_bytes(self.f.ty(v), None)?;
            self.place(v, Memory::Temp, bytes, None);
            outs.push(self.at(v)?);
        }
        if let Some((merge, bytes)) = kernels.merges[kernel].clone() {
            let between = match each {
                true => self.apart(self.most(&bytes)?),
                false => Location::of(self.buffer(Memory::Temp, bytes)),
            };
            let launch = self.launch(kernels, kernel, &ins, &[between], each)?;
            self.entry.launches.push(launch);
            let launch = self.launch(kernels, merge, &[between], &outs, each)?;
            self.entry.launches.push(launch);
            return Ok(());
        }
        let launch = self.launch(kernels, kernel, &ins, &outs, each)?;
        self.entry.launches.push(launch);
        Ok(())
    }

    /// `each`: for each sequence. What one worker would do alone it then does for some of the sequences.
    fn launch(
        &self,
        kernels: &KernelCache,
        kernel: usize,
        inputs: &[Location],
        outputs: &[Location],
        each: bool,
    ) -> Result<LoweredLaunch, LowerError> {
        let made = &kernels.kernels[kernel];
        if inputs.len() + outputs.len() != made.args.len() {
            return Err(LowerError::internal(format!("arguments of kernel {}", made.kernel.name)));
        }
        if each && made.kernel.dims.iter().any(|(sym, _)| *sym == Sym::N) {
            let what = format!("kernel {} is for rows of all sequences", made.kernel.name);
            return Err(LowerError::internal(what));
        }
        let alone = |contract: &ArgContract| {
            contract.access == Access::In || contract.partition.as_ref().is_some_and(Partition::is_single)
        };
        let repeat = match each {
            false => Repeat::Once,
            true if made.args.iter().all(alone) => Repeat::EachSequenceAlone,
            true => Repeat::EachSequence,
        };
        let args = inputs
            .iter()
            .chain(outputs)
            .zip(&made.args)
            .map(|(location, contract)| Arg {
                buffer: location.buffer,
                access: contract.access,
                partition: match repeat {
                    Repeat::EachSequenceAlone => Some(Partition::Rows(Dim::sym(Sym::N))),
                    Repeat::Once | Repeat::EachSequence | Repeat::EachWorker => contract.partition.clone(),
                },
                in_place: contract.in_place.clone(),
                row_bytes: location.row_bytes,
            })
            .collect();
        let dims = made.kernel.dims.iter().map(|(s, _)| (*s).into()).collect();
        Ok(LoweredLaunch { kernel, args, dims, grid: made.grid.clone(), repeat, shares: Shares::Static })
    }

    /// Results go to the caller's memory: the buffer of a launch is renamed, anything else is copied.
    fn outputs(&mut self, kernels: &mut KernelCache) -> Result<(), LowerError> {
        for (i, &v) in self.f.outputs.iter().enumerate() {
            let Location { buffer, .. } = self.at(v)?;
            let memory = Memory::Output(i as u32);
            let renamed = self.entry.buffers[buffer].memory == Memory::Temp && !self.is_update(buffer);
            if renamed {
                self.entry.buffers[buffer].memory = memory;
                continue;
            }
            let kernel = kernels.copy(self.f.ty(v), [ALIGN; 2])?;
            let bytes = self.entry.buffers[buffer].bytes.clone();
            let out = self.entry.buffers.push(Buffer { memory, bytes, apart: false });
            let launch =
                self.launch(kernels, kernel, &[Location::of(buffer)], &[Location::of(out)], false)?;
            self.entry.launches.push(launch);
        }
        Ok(())
    }
}

/// Accesses of a launch that write.
pub fn writes(launch: &LoweredLaunch) -> impl Iterator<Item = &Arg> {
    launch.args.iter().filter(|a| a.access != Access::In)
}
