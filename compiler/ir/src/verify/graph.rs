//! Invariants of a module and of its graph functions (see [`crate::graph`]).

use super::ranks::{verify_exchange, verify_ranks};
use super::{VerifyError, verify_kernel};
use crate::dim::{Dim, SizeBounds};
use crate::entity::{EntityArena, EntityId};
use crate::graph::{Function, FunctionKind, GraphNode, NodeId, ValueDef, ValueId};
use crate::kernel::{Kernel, ParamAccess};
use crate::module::{FuncId, FunctionTaps, ModelParam, ModelState, Module, ParamSource, StateId};
use crate::ops::Op;
use crate::sequences;
use crate::step::{LaunchGrid, LaunchItem, MemoryBase, RepeatMode, StepItem, StepProgram, WorkSchedule};
use crate::text::graph_print::{ValueNames, node_label};
use crate::types::{Packing, TensorType};
use crate::visit;
use petgraph::algo::{has_path_connecting, toposort};
use std::collections::BTreeSet;

/// Everything that can be said of a module as a whole.
pub fn verify_module(module: &Module) -> Result<(), VerifyError> {
    unique("parameter", module.params.values().map(|p| &p.name))?;
    unique("state", module.states.values().map(|s| &s.name))?;
    unique("function", module.functions.values().map(|f| &f.name))?;
    unique("kernel", module.kernels.iter().map(|k| &k.name))?;
    unique("step", module.steps.iter().map(|s| &s.name))?;
    module.params.values().try_for_each(verify_param)?;
    module.states.values().try_for_each(verify_state)?;
    unique("taps of", module.taps.iter().map(|t| &t.function))?;
    module.taps.iter().try_for_each(|taps| verify_taps(module, taps))?;
    let callees_first = acyclic_calls(module)?;
    module.functions.values().try_for_each(|f| verify_function(module, f))?;
    verify_ranks(module)?;
    written_once(module, &callees_first)?;
    module.kernels.iter().try_for_each(verify_kernel)?;
    module.steps.iter().try_for_each(|step| verify_step(&module.kernels, step))
}

fn unique<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Result<(), VerifyError> {
    let mut seen = BTreeSet::new();
    for name in names {
        if name.is_empty() {
            return Err(VerifyError::new(what, "has an empty name"));
        }
        if !seen.insert(name) {
            return Err(VerifyError::new(format!("{what} @{name}"), "is declared twice"));
        }
    }
    Ok(())
}

fn constant_dims(ty: &TensorType) -> bool {
    ty.dims.iter().all(|d| d.as_const().is_some_and(|d| d >= 0))
}

fn verify_param(param: &ModelParam) -> Result<(), VerifyError> {
    let bad = |message: String| Err(VerifyError::new(format!("parameter @{}", param.name), message));
    if !constant_dims(&param.ty) {
        return bad(format!("its type {} does not have constant sizes", param.ty));
    }
    if param.ty.dtype.is_packed() && param.ty.rank() != 2 {
        return bad(format!("packed weights are matrices, not {}", param.ty));
    }
    if let Some(packing @ (Packing::ColMajor | Packing::Tile16 | Packing::Fragments)) = param.packing
        && param.ty.rank() != 2
    {
        return bad(format!("packing {} is for matrices, not {}", packing.name(), param.ty));
    }
    let parts = match &param.source {
        ParamSource::Ranks(parts) if parts.len() < 2 => {
            return bad(format!("{} ranks are none to split it among", parts.len()));
        }
        ParamSource::Ranks(parts) => parts.as_slice(),
        whole => std::slice::from_ref(whole),
    };
    match parts.iter().find_map(source_fault) {
        Some(fault) => bad(fault),
        None => Ok(()),
    }
}

/// The fault of a source, if it has one.
fn source_fault(source: &ParamSource) -> Option<String> {
    match source {
        ParamSource::Tensor(_) | ParamSource::Values(_) | ParamSource::Adapter => None,
        ParamSource::Scale(_, s)
        | ParamSource::NegExp(s)
        | ParamSource::Exp(s)
        | ParamSource::Transpose(s)
        | ParamSource::Offset(_, s)
        | ParamSource::UnitRows(s) => source_fault(s),
        ParamSource::Ranks(_) => Some("its source has parts of ranks inside of another source".into()),
        ParamSource::Concat(parts) if parts.is_empty() => Some("its source joins no tensors".into()),
        ParamSource::Concat(parts) => parts.iter().find_map(source_fault),
        ParamSource::Rows(blocks, _) if blocks.row_count().is_none() => {
            Some(format!("its source takes rows that do not lie in {} rows one behind another", blocks.of))
        }
        ParamSource::Rows(_, s) => source_fault(s),
        ParamSource::Columns(order, _) if !is_permutation(order) => {
            Some("its source takes columns in an order that has not each of them once".into())
        }
        ParamSource::ColumnRange(range, _) if range.columns().is_none() => {
            Some(format!("its source takes {} columns from {} on, of {}", range.len, range.start, range.of))
        }
        ParamSource::Columns(_, s) | ParamSource::ColumnRange(_, s) => source_fault(s),
    }
}

/// True if each number below the length is there once.
fn is_permutation(order: &[usize]) -> bool {
    let mut seen = vec![false; order.len()];
    order.iter().all(|&at| seen.get_mut(at).is_some_and(|seen| !std::mem::replace(seen, true)))
}

fn verify_state(state: &ModelState) -> Result<(), VerifyError> {
    if !constant_dims(&state.ty) || state.ty.dtype.is_packed() {
        let place = format!("state @{}", state.name);
        return Err(VerifyError::new(
            place,
            format!("its type {} is not plain with constant sizes", state.ty),
        ));
    }
    Ok(())
}

/// Every output of an entry function but the first has a name, if one has, and is a matrix.
fn verify_taps(module: &Module, taps: &FunctionTaps) -> Result<(), VerifyError> {
    let bad =
        |message: String| Err(VerifyError::new(format!("taps of function @{}", taps.function), message));
    let f = match module.function(&taps.function) {
        Some((_, f)) if f.kind == FunctionKind::Entry => f,
        _ => return bad("there is no entry function of this name".into()),
    };
    unique(&format!("tap of @{}:", taps.function), taps.names.iter())?;
    if f.outputs.len() != taps.names.len() + 1 {
        return bad(format!("{} names for outputs 1 to {}", taps.names.len(), f.outputs.len()));
    }
    for (name, v) in taps.names.iter().zip(&f.outputs[1..]) {
        if f.values.get(*v).is_none_or(|v| v.ty.rank() != 2) {
            return bad(format!("{name} is not a matrix"));
        }
    }
    Ok(())
}

/// Alignment in bytes of the memory that a [`MemoryBase`] means.
const BASE_ALIGN: u64 = 64;

/// Launches fit their kernels, and lie in the arena that the step asks for.
pub fn verify_step(kernels: &[Kernel], step: &StepProgram) -> Result<(), VerifyError> {
    step.items.iter().try_for_each(|item| match item {
        StepItem::AllGather(exchange) => verify_exchange(step, exchange),
        StepItem::Launch(_) | StepItem::Barrier => Ok(()),
    })?;
    for launch in step.items.iter().filter_map(StepItem::launch) {
        let bad = |message: String| {
            Err(VerifyError::new(format!("step @{}, launch of @{}", step.name, launch.kernel), message))
        };
        let Some(kernel) = kernels.iter().find(|k| k.name == launch.kernel) else {
            return bad("there is no such kernel".into());
        };
        let (buffers, dims) = (kernel.params.len(), kernel.dims.len());
        if (launch.buffers.len(), launch.dims.len()) != (buffers, dims) {
            let found = format!("{} buffers and {} sizes", launch.buffers.len(), launch.dims.len());
            return bad(format!("the kernel takes {buffers} buffers and {dims} sizes, not {found}"));
        }
        for (i, b) in launch.buffers.iter().enumerate() {
            let end = b.offset.checked_add(b.bytes);
            if b.base == MemoryBase::Arena && end.is_none_or(|end| end > step.arena_bytes) {
                return bad(format!("buffer {i} ends beyond the arena of {} bytes", step.arena_bytes));
            }
        }
        verify_places(kernel, launch).or_else(bad)?;
        verify_copies(kernel, launch).or_else(bad)?;
        verify_shares(launch).or_else(bad)?;
        if launch.grid.is_some() != kernel.is_gpu() {
            return bad("a launch has a grid exactly when its kernel is for a GPU".into());
        }
        verify_grid(launch).or_else(bad)?;
    }
    Ok(())
}

/// Checks that no axis of constant size is one that a GPU cannot launch. Axes that depend on sizes are
/// compared with the limits of the build when the launch list is made.
fn verify_grid(launch: &LaunchItem) -> Result<(), String> {
    let blocks = launch.grid.iter().flat_map(|grid| grid.blocks.iter().enumerate());
    let fault = |(axis, blocks): (usize, &Dim)| LaunchGrid::axis_fault(axis, blocks.as_const()?);
    blocks.into_iter().find_map(fault).map_or(Ok(()), |fault| Err(format!("the grid {fault}")))
}

/// Every buffer lies where its kernel relies on it to lie, whatever `past`, the sequence and the worker:
/// bases are aligned to [`BASE_ALIGN`], but for a temperature, which is a field of the call (a second input
/// of more elements is none).
fn verify_places(kernel: &Kernel, launch: &LaunchItem) -> Result<(), String> {
    for (i, (b, &param)) in launch.buffers.iter().zip(&kernel.params).enumerate() {
        let Some(decl) = kernel.bufs.get(param) else { continue };
        let field = b.base == MemoryBase::Temperature && b.bytes <= 4;
        let base = if field { 4 } else { BASE_ALIGN };
        let places = [
            (base, "base"),
            (b.offset, "offset"),
            (b.per_past, "step per past token"),
            (b.per_page, "step per page"),
            (b.per_row, "step per sequence"),
            (b.per_worker, "step per worker"),
        ];
        if let Some((bytes, what)) =
            places.iter().find(|(bytes, _)| !bytes.is_multiple_of(u64::from(decl.assumed_align())))
        {
            let (name, align) = (&decl.name, decl.assumed_align());
            let found = if *what == "base" {
                format!("its base is aligned to {bytes}")
            } else {
                format!("its {what} is {bytes}")
            };
            return Err(format!(
                "buffer {i}: the kernel relies on %{name} being aligned to {align} bytes, {found}"
            ));
        }
    }
    Ok(())
}

/// Work has a length, and pieces are of launches that all workers share.
fn verify_shares(launch: &LaunchItem) -> Result<(), String> {
    if let Some(work) = launch.repeat.work_of_sequence() {
        let bounds = SizeBounds { chunk: 1 << 16, batch: 1 << 16, context: Some(1 << 24) };
        if work.value_range(&bounds).is_none_or(|(least, _)| least < 1) {
            return Err(format!("a sequence may be {work} of work, expected at least 1"));
        }
    }
    match &launch.schedule {
        WorkSchedule::Static => Ok(()),
        WorkSchedule::Dynamic { chunks: pieces } if pieces.as_const().is_some_and(|p| p < 2) => {
            Err(format!("{pieces} pieces are none to share"))
        }
        WorkSchedule::Dynamic { .. } if launch.grid.is_some() => Err("a GPU has no workers".into()),
        WorkSchedule::Dynamic { .. } if !matches!(launch.repeat, RepeatMode::Once | RepeatMode::Outputs) => {
            Err("only a launch that runs once has pieces".into())
        }
        WorkSchedule::Dynamic { .. } => Ok(()),
    }
}

/// Checks that values which every worker computes for itself go into copies, and others do not: so all copies
/// are equal.
fn verify_copies(kernel: &Kernel, launch: &LaunchItem) -> Result<(), String> {
    let each = launch.repeat == RepeatMode::EachWorker;
    if each && launch.grid.is_some() {
        return Err("a GPU has no workers".into());
    }
    for (i, (b, &param)) in launch.buffers.iter().zip(&kernel.params).enumerate() {
        let written = kernel.bufs.get(param).is_some_and(|decl| decl.access != ParamAccess::In);
        if written && each != (b.per_worker > 0) {
            let (this, that) = if each { ("a", "no") } else { ("no", "a") };
            return Err(format!(
                "buffer {i} is written by {this} launch for each worker and has {that} copy for each"
            ));
        }
        if b.per_worker > 0
            && (b.base != MemoryBase::Arena || b.per_past > 0 || b.per_row > 0 || b.per_sequence > 0)
        {
            return Err(format!("buffer {i}: only values of a step without a batch have copies"));
        }
        if b.per_worker > 0 && b.bytes > b.per_worker {
            return Err(format!("the copies of buffer {i} overlap"));
        }
    }
    Ok(())
}

/// No function calls itself, directly or through others. Functions, each after those that it calls.
fn acyclic_calls(module: &Module) -> Result<Vec<FuncId>, VerifyError> {
    let calls = visit::call_graph(module);
    match toposort(&calls, None) {
        Ok(order) => Ok(order.into_iter().rev().map(|f| calls[f]).collect()),
        Err(cycle) => {
            let name = &module.functions[calls[cycle.node_id()]].name;
            Err(VerifyError::new(format!("function @{name}"), "calls itself"))
        }
    }
}

/// The invariants of one function; callees are only looked at for their signatures.
pub fn verify_function(module: &Module, f: &Function) -> Result<(), VerifyError> {
    let check = GraphVerifier { module, f };
    check.check_inputs()?;
    let mut defined = vec![false; f.values.len()];
    f.inputs.iter().for_each(|v| defined[v.index()] = true);
    let mut seen = vec![false; f.nodes.len()];
    for &id in &f.body {
        let Some(node) = f.nodes.get(id) else {
            return Err(check.error_at(format!("its body lists {id}, which does not exist")));
        };
        if std::mem::replace(&mut seen[id.index()], true) {
            return Err(check.error_at_node(id, format!("node {id} stands twice in the body")));
        }
        check.check_operands(id, node, &defined)?;
        check.check_results(id, node, &mut defined)?;
        check.check_types(id, node)?;
        check.check_roles(id, node)?;
    }
    if let Some(v) = f.outputs.iter().find(|v| !is_set(&defined, **v)) {
        return Err(check.error_at(format!("returns {}, which is not defined", check.name(*v))));
    }
    check.check_sequences()
}

fn is_set(defined: &[bool], v: ValueId) -> bool {
    defined.get(v.index()).copied().unwrap_or(false)
}

fn type_list<'a>(types: impl Iterator<Item = &'a TensorType>) -> String {
    let types: Vec<String> = types.map(ToString::to_string).collect();
    if types.is_empty() { "none".into() } else { types.join(", ") }
}

struct GraphVerifier<'a> {
    module: &'a Module,
    f: &'a Function,
}

impl GraphVerifier<'_> {
    fn error_at(&self, message: impl Into<String>) -> VerifyError {
        VerifyError::new(format!("function @{}", self.f.name), message)
    }
    /// Names the node as the printed form shows it.
    fn error_at_node(&self, id: NodeId, message: impl Into<String>) -> VerifyError {
        let place = format!("function @{}, {}", self.f.name, node_label(self.f, id));
        VerifyError::new(place, message)
    }
    fn name(&self, v: ValueId) -> String {
        ValueNames::new(self.f).name(v)
    }

    fn check_inputs(&self) -> Result<(), VerifyError> {
        for (i, &v) in self.f.inputs.iter().enumerate() {
            match self.f.values.get(v).map(|value| value.def) {
                Some(ValueDef::Input(at)) if at as usize == i => {}
                _ => {
                    return Err(self.error_at(format!(
                        "input {i} is {}, which is not defined as that input",
                        self.name(v)
                    )));
                }
            }
        }
        Ok(())
    }

    /// Values of one sequence and rows of all are kept apart.
    fn check_sequences(&self) -> Result<(), VerifyError> {
        if sequences::row_batching(self.f).is_batched() && self.f.kind != FunctionKind::Entry {
            return Err(self.error_at("only an entry function may split or join sequences"));
        }
        if let Some((id, message)) = sequences::find_mixed_rows(self.module, self.f) {
            return Err(self.error_at_node(id, message));
        }
        match sequences::unjoined_output(self.module, self.f) {
            Some(i) => Err(self.error_at(format!("output {i} is of one sequence: join them"))),
            None => Ok(()),
        }
    }

    fn check_operands(&self, id: NodeId, node: &GraphNode, defined: &[bool]) -> Result<(), VerifyError> {
        let Some(&v) = node.inputs.iter().find(|v| !is_set(defined, **v)) else { return Ok(()) };
        let why = match self.f.values.get(v).map(|value| value.def) {
            None => "does not exist",
            Some(ValueDef::Node(def, _)) if has_path_connecting(self.f, id, def, None) => {
                "depends on this node"
            }
            Some(_) => "is not defined before it",
        };
        Err(self.error_at_node(id, format!("uses {}, which {why}", self.name(v))))
    }

    fn check_results(&self, id: NodeId, node: &GraphNode, defined: &mut [bool]) -> Result<(), VerifyError> {
        for (i, &v) in node.outputs.iter().enumerate() {
            match self.f.values.get(v).map(|value| value.def) {
                Some(ValueDef::Node(n, at)) if n == id && at as usize == i => defined[v.index()] = true,
                _ => return Err(self.error_at_node(id, format!("output {i} is not defined by node {id}"))),
            }
        }
        Ok(())
    }

    fn check_types(&self, id: NodeId, node: &GraphNode) -> Result<(), VerifyError> {
        let inputs: Vec<&TensorType> = node.inputs.iter().map(|&v| self.f.ty(v)).collect();
        let inferred = node.op.infer(self.module, &inputs).map_err(|e| self.error_at_node(id, e.message))?;
        if !inferred.iter().eq(node.outputs.iter().map(|&v| self.f.ty(v))) {
            let found = type_list(node.outputs.iter().map(|&v| self.f.ty(v)));
            let expected = type_list(inferred.iter());
            return Err(self.error_at_node(id, format!("gives {expected}, its outputs are {found}")));
        }
        Ok(())
    }

    /// Checks that a function of this kind may contain the node, and that calls are of the right kind.
    fn check_roles(&self, id: NodeId, node: &GraphNode) -> Result<(), VerifyError> {
        let callee_kind = |id: FuncId| self.module.functions.get(id).map(|f| f.kind);
        match node.op {
            Op::Call(callee) if callee_kind(callee) != Some(FunctionKind::Group) => {
                Err(self.error_at_node(id, "calls a function that is not a group"))
            }
            Op::Scan { body, .. } if callee_kind(body) != Some(FunctionKind::Body) => {
                Err(self.error_at_node(id, "its body function is not of kind body"))
            }
            Op::StateRead(_) | Op::StateWrite(_) | Op::CacheAppend(_)
                if self.f.kind == FunctionKind::Body =>
            {
                Err(self.error_at_node(id, "states are not for the body of a scan: carry the value"))
            }
            _ => Ok(()),
        }
    }
}

/// No function writes a state twice, itself or through those that it calls, which come before it in the
/// order.
fn written_once(module: &Module, callees_first: &[FuncId]) -> Result<(), VerifyError> {
    let mut written = vec![BTreeSet::new(); module.functions.len()];
    for &id in callees_first {
        let f = &module.functions[id];
        let mut all = BTreeSet::new();
        for (_, node) in f.live_nodes() {
            let here = match node.op {
                Op::StateWrite(state) | Op::CacheAppend(state) => BTreeSet::from([state]),
                Op::Call(callee) | Op::Scan { body: callee, .. } => written[callee.index()].clone(),
                _ => BTreeSet::new(),
            };
            for state in here {
                if !all.insert(state) {
                    let name = name_of(&module.states, state);
                    let message = format!("writes state @{name} twice");
                    return Err(VerifyError::new(format!("function @{}", f.name), message));
                }
            }
        }
        written[id.index()] = all;
    }
    Ok(())
}

fn name_of(states: &EntityArena<StateId, ModelState>, id: StateId) -> &str {
    states.get(id).map_or("?", |s| &s.name)
}
