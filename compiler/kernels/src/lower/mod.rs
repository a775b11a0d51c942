//! From graph functions to kernels: every group that fusion made becomes one kernel; reshapes become views.

pub mod attention;
pub mod contraction;
pub mod cost;
pub mod experts;
pub mod group;
pub mod plan;

use crate::params::KernelTarget;
use cost::Cost;
use group::{GroupKernel, lower_group, value_bytes};
use mlcc_ir::entity::Arena;
use mlcc_ir::graph::{Function, FunctionKind, ValueId};
use mlcc_ir::kernel::{Access, Kernel};
use mlcc_ir::module::{FuncId, Module, ParamId, StateId};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{Packing, TensorType};
use plan::{Arg, Buffer, BufferId, Entry, LoweredLaunch, Memory};

/// Why a function could not be lowered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LowerError {
    #[error("internal error in lowering: {0}; please report it with the output of --debug-dump")]
    Internal(String),
    #[error("cannot lower: {what}; {hint}")]
    Unsupported { what: String, hint: String },
    #[error(transparent)]
    Quant(#[from] mlcc_quant::QuantError),
}

impl LowerError {
    pub(crate) fn internal(what: impl Into<String>) -> LowerError {
        LowerError::Internal(what.into())
    }
}

/// All entry functions of a module for one machine.
#[derive(Clone)]
pub struct Lowered {
    pub kernels: Vec<Kernel>,
    /// By kernel.
    pub costs: Vec<Cost>,
    pub entries: Vec<Entry>,
}

/// Sets the packing of every parameter that has none yet: what the contraction that reads it wants, else row-major.
pub fn choose_packings(module: &mut Module, target: &KernelTarget) {
    let wanted = contraction::weight_packing(target);
    let mut tiled = vec![false; module.params.len()];
    for (_, f) in module.functions.iter().filter(|(_, f)| f.kind == FunctionKind::Entry) {
        for (_, node) in f.live() {
            let Op::Call(callee) = node.op else { continue };
            let callee = &module.functions[callee];
            for (_, inner) in callee.live() {
                let weight = match inner.op {
                    Op::MatMulExperts { .. } if experts::is_tiled(callee, inner) => inner.inputs[1],
                    _ if contraction::is_contraction(callee, &inner.op, &inner.inputs) => {
                        inner.inputs[inner.inputs.len() - 1]
                    }
                    _ => continue,
                };
                let position = callee.inputs.iter().position(|&i| i == weight);
                let argument = position.and_then(|i| f.def(node.inputs[i]));
                if let Some(Op::Param(p)) = argument.map(|n| &n.op) {
                    tiled[p.0 as usize] = true;
                }
            }
        }
    }
    for id in module.params.ids().collect::<Vec<_>>() {
        let param = &mut module.params[id];
        let chosen = if tiled[id.0 as usize] { wanted } else { Packing::RowMajor };
        param.packing.get_or_insert(chosen);
    }
}

/// Lowers all entry functions. Every node must be a parameter, a state access, a reshape, or a call of a group.
pub fn lower(module: &Module, target: &KernelTarget) -> Result<Lowered, LowerError> {
    let mut kernels = KernelCache {
        module,
        target,
        keys: Vec::new(),
        kernels: Vec::new(),
        costs: Vec::new(),
        merges: Vec::new(),
    };
    let mut entries = Vec::new();
    for (_, f) in module.functions.iter().filter(|(_, f)| f.kind == FunctionKind::Entry) {
        entries.push(EntryLowering::new(module, f).run(&mut kernels)?);
    }
    let costs = kernels.costs;
    let kernels = kernels.kernels.into_iter().map(|g| g.kernel).collect();
    Ok(Lowered { kernels, costs, entries })
}

/// Kernels made so far: a group function is lowered once per combination of parameter packings.
struct KernelCache<'a> {
    module: &'a Module,
    target: &'a KernelTarget,
    keys: Vec<(Key, usize)>,
    kernels: Vec<GroupKernel>,
    costs: Vec<Cost>,
    /// By kernel: the one that joins what it left, and the bytes between them.
    merges: Vec<Option<(usize, mlcc_ir::dim::Dim)>>,
}

#[derive(PartialEq)]
enum Key {
    Group(FuncId, Vec<Option<Packing>>),
    /// Type and alignment of the destination.
    Copy(TensorType, u32),
}

/// Alignment of every buffer in bytes, except of new rows in a cache.
const ALIGN: u32 = 64;

impl KernelCache<'_> {
    fn group(&mut self, id: FuncId, packings: Vec<Option<Packing>>) -> Result<usize, LowerError> {
        let key = Key::Group(id, packings.clone());
        let f = &self.module.functions[id];
        self.get(key, f, f.name.clone(), &packings)
    }

    /// A kernel that copies a tensor to a place of that alignment.
    fn copy(&mut self, ty: &TensorType, align: u32) -> Result<usize, LowerError> {
        let mut f = Function::new("copy", FunctionKind::Group);
        let input = f.add_input(ty.clone());
        let out = f.append(self.module, Op::Reshape { dims: ty.dims.clone() }, &[input]);
        f.outputs = out.map_err(|e| LowerError::internal(e.to_string()))?;
        let name = format!("copy_{}", ty.to_string().replace(|c: char| !c.is_alphanumeric(), "_"));
        let index = self.get(Key::Copy(ty.clone(), align), &f, name, &[None])?;
        let kernel = &mut self.kernels[index].kernel;
        let to = kernel.params[1];
        kernel.bufs[to].align = align;
        Ok(index)
    }

    fn get(
        &mut self,
        key: Key,
        f: &Function,
        name: String,
        packings: &[Option<Packing>],
    ) -> Result<usize, LowerError> {
        if let Some((_, kernel)) = self.keys.iter().find(|(k, _)| *k == key) {
            return Ok(*kernel);
        }
        let taken = |name: &str| self.kernels.iter().any(|k| k.kernel.name == name);
        let variants = (1..).map(|i| format!("{name}_v{i}"));
        let name = std::iter::once(name.clone()).chain(variants).find(|n| !taken(n)).unwrap_or(name);
        let mut made = lower_group(self.module, f, &name, packings, self.target)?;
        let merge = made.merge.take();
        self.kernels.push(made);
        self.costs.push(cost::of_group(self.module, f, packings)?);
        self.merges.push(None);
        let index = self.kernels.len() - 1;
        self.keys.push((key, index));
        if let Some(merge) = merge {
            self.costs.push(cost::of_merge(f, &merge.bytes)?);
            self.merges[index] = Some((self.kernels.len(), merge.bytes));
            self.kernels.push(*merge.kernel);
            self.merges.push(None);
        }
        Ok(index)
    }
}

/// Lowers one entry function.
struct EntryLowering<'a> {
    module: &'a Module,
    f: &'a Function,
    entry: Entry,
    /// Where each value lies, and the parameter it is.
    places: Vec<Option<(BufferId, Option<ParamId>)>>,
}

impl<'a> EntryLowering<'a> {
    fn new(module: &'a Module, f: &'a Function) -> Self {
        let entry = Entry {
            name: f.name.clone(),
            buffers: Arena::new(),
            launches: Vec::new(),
            updates: Vec::new(),
            copies: Vec::new(),
        };
        EntryLowering { module, f, entry, places: vec![None; f.values.len()] }
    }

    fn run(mut self, kernels: &mut KernelCache) -> Result<Entry, LowerError> {
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
                    let (buffer, _) = self.at(node.inputs[0])?;
                    self.entry.updates.push((*s, buffer));
                    let kernel = kernels.copy(&self.module.states[*s].ty, ALIGN)?;
                    let state = self.buffer(Memory::State(*s), self.entry.buffers[buffer].bytes.clone());
                    let copy = self.launch(kernels, kernel, &[(buffer, None)], &[state])?;
                    self.entry.copies.push(copy);
                }
                Op::CacheAppend(s) => self.append(kernels, *s, node.inputs[0], node.outputs[0])?,
                Op::Reshape { .. } => {
                    let source = self.at(node.inputs[0])?;
                    self.places[node.outputs[0].0 as usize] = Some(source);
                }
                Op::Call(callee) => self.call(kernels, *callee, &node.inputs, &node.outputs)?,
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
        let (made, _) = self.at(rows)?;
        // Kernels rely on the alignment of what they write.
        let direct = self.entry.buffers[made].memory == Memory::Temp
            && row_bytes % i64::from(ALIGN) == 0
            && !self.entry.updates.iter().any(|(_, b)| *b == made);
        if direct {
            self.entry.buffers[made].memory = memory;
        } else {
            let align = row_bytes | i64::from(ALIGN);
            let kernel = kernels.copy(self.f.ty(rows), 1 << align.trailing_zeros())?;
            let to = self.buffer(memory, self.entry.buffers[made].bytes.clone());
            let launch = self.launch(kernels, kernel, &[(made, None)], &[to])?;
            self.entry.launches.push(launch);
        }
        self.place(all, Memory::State(state), value_bytes(ty, None)?, None);
        Ok(())
    }

    fn buffer(&mut self, memory: Memory, bytes: mlcc_ir::dim::Dim) -> BufferId {
        let existing = self.entry.buffers.iter().find(|(_, b)| memory != Memory::Temp && b.memory == memory);
        match existing.map(|(id, _)| id) {
            Some(id) => id,
            None => self.entry.buffers.push(Buffer { memory, bytes }),
        }
    }

    fn place(&mut self, v: ValueId, memory: Memory, bytes: mlcc_ir::dim::Dim, param: Option<ParamId>) {
        let buffer = self.buffer(memory, bytes);
        self.places[v.0 as usize] = Some((buffer, param));
    }

    fn at(&self, v: ValueId) -> Result<(BufferId, Option<ParamId>), LowerError> {
        let missing = || LowerError::internal(format!("value {v} of {} has no place", self.f.name));
        self.places[v.0 as usize].ok_or_else(missing)
    }

    fn call(
        &mut self,
        kernels: &mut KernelCache,
        callee: FuncId,
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) -> Result<(), LowerError> {
        let mut ins = Vec::new();
        let mut packings = Vec::new();
        for &v in inputs {
            let (buffer, param) = self.at(v)?;
            packings.push(param.map(|p| self.module.params[p].packing.unwrap_or(Packing::RowMajor)));
            ins.push((buffer, param));
        }
        let kernel = kernels.group(callee, packings)?;
        let mut outs = Vec::new();
        for &v in outputs {
            let bytes = value_bytes(self.f.ty(v), None)?;
            self.place(v, Memory::Temp, bytes, None);
            outs.push(self.at(v)?.0);
        }
        if let Some((merge, bytes)) = kernels.merges[kernel].clone() {
            let between = self.buffer(Memory::Temp, bytes);
            let launch = self.launch(kernels, kernel, &ins, &[between])?;
            self.entry.launches.push(launch);
            let launch = self.launch(kernels, merge, &[(between, None)], &outs)?;
            self.entry.launches.push(launch);
            return Ok(());
        }
        let launch = self.launch(kernels, kernel, &ins, &outs)?;
        self.entry.launches.push(launch);
        Ok(())
    }

    fn launch(
        &self,
        kernels: &KernelCache,
        kernel: usize,
        inputs: &[(BufferId, Option<ParamId>)],
        outputs: &[BufferId],
    ) -> Result<LoweredLaunch, LowerError> {
        let made = &kernels.kernels[kernel];
        let buffers: Vec<BufferId> = inputs.iter().map(|(b, _)| *b).chain(outputs.iter().copied()).collect();
        if buffers.len() != made.args.len() {
            return Err(LowerError::internal(format!("arguments of kernel {}", made.kernel.name)));
        }
        let args = buffers
            .iter()
            .zip(&made.args)
            .map(|(&buffer, contract)| Arg {
                buffer,
                access: contract.access,
                partition: contract.partition.clone(),
                in_place: contract.in_place.clone(),
            })
            .collect();
        let dims = made.kernel.dims.iter().map(|(s, _)| (*s).into()).collect();
        Ok(LoweredLaunch { kernel, args, dims, grid: made.grid.clone() })
    }

    /// Results go to the caller's memory: the buffer of a launch is renamed, anything else is copied.
    fn outputs(&mut self, kernels: &mut KernelCache) -> Result<(), LowerError> {
        for (i, &v) in self.f.outputs.iter().enumerate() {
            let (buffer, _) = self.at(v)?;
            let memory = Memory::Output(i as u32);
            let renamed = self.entry.buffers[buffer].memory == Memory::Temp
                && !self.entry.updates.iter().any(|(_, b)| *b == buffer);
            if renamed {
                self.entry.buffers[buffer].memory = memory;
                continue;
            }
            let kernel = kernels.copy(self.f.ty(v), ALIGN)?;
            let bytes = self.entry.buffers[buffer].bytes.clone();
            let out = self.entry.buffers.push(Buffer { memory, bytes });
            let launch = self.launch(kernels, kernel, &[(buffer, None)], &[out])?;
            self.entry.launches.push(launch);
        }
        Ok(())
    }
}

/// Accesses of a launch that write.
pub fn writes(launch: &LoweredLaunch) -> impl Iterator<Item = &Arg> {
    launch.args.iter().filter(|a| a.access != Access::In)
}
