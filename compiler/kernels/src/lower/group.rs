//! One group function to one kernel: which template fits, and what its arguments promise.

use super::LowerError;
use super::attention::attention_group;
use super::contraction::{self, Contraction};
use super::experts;
use super::plan::Partition;
use crate::attention::{self, decode::NewRows};
use crate::inline::{Binding, Inliner};
use crate::machine::Machine;
use crate::params::KernelTarget;
use crate::product::{GROUP, code_block};
use crate::quantize::RowCodes;
use crate::rows::Rows;
use crate::scan::matrix::{Plan, ROWS};
use crate::scan::{self, ChannelScan, MatrixScan};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::{Access, BufId, Expr, ExprId, ForKind, Kernel, Stmt};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::step::Grid;
use mlcc_ir::types::{DType, Packing, TensorType};
use mlcc_kernel_lang::math::expand_math;
use mlcc_kernel_lang::{Recorder, interleave_steps};
use mlcc_quant::Layout;
use mlcc_target::Arch;
use std::collections::HashMap;

/// A kernel with the contract of its arguments: inputs of the group first, then its outputs.
#[derive(Clone)]
pub struct GroupKernel {
    pub kernel: Kernel,
    pub args: Vec<ArgContract>,
    pub grid: Option<Grid>,
    pub merge: Option<Merge>,
    /// For people: types, generator and plan, as far as the generator tells them.
    pub plan: Option<String>,
}

/// A second kernel that joins what the first one left unfinished: the first one's arguments end in the unfinished
/// results instead of the group's outputs; the second one takes those, then the group's outputs.
#[derive(Clone)]
pub struct Merge {
    pub kernel: Box<GroupKernel>,
    /// Size of the unfinished results in bytes.
    pub bytes: Dim,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArgContract {
    pub access: Access,
    pub partition: Option<Partition>,
    /// See [`super::plan::Arg::in_place`].
    pub in_place: Vec<usize>,
}

/// The template that a group takes.
pub enum Template<'a> {
    Scan(&'a Node),
    Attention(&'a Node),
    Experts(&'a Node),
    Contraction(Contraction),
    Rows,
}

/// Chooses the template; `packings` as in [`lower_group`].
pub fn template<'a>(f: &'a Function, packings: &[Option<Packing>], target: &KernelTarget) -> Template<'a> {
    if let Some((_, node)) = f.live().find(|(_, n)| matches!(n.op, Op::Scan { .. })) {
        return Template::Scan(node);
    }
    if let Some(node) = attention::find(f) {
        return Template::Attention(node);
    }
    if let Some(node) = experts::find(f, packings, target) {
        return Template::Experts(node);
    }
    match contraction::find(f, packings, target) {
        Some(contraction) => Template::Contraction(contraction),
        None => Template::Rows,
    }
}

/// Element type of the buffer that holds a value of type `ty` (`u8` for packed parameters).
pub fn buffer_dtype(ty: &TensorType) -> DType {
    if ty.dtype.is_packed() { DType::U8 } else { ty.dtype }
}

/// Bytes of a value in memory.
pub fn value_bytes(ty: &TensorType, packing: Option<Packing>) -> Result<Dim, LowerError> {
    match (packing, ty.dtype.bytes()) {
        // Plain elements one after the other need no layout, whatever the number of axes.
        (None | Some(Packing::RowMajor), Some(bytes)) => Ok(ty.elements().scale(bytes as i64)),
        (packing, _) => {
            let layout = layout(ty, packing.unwrap_or(Packing::RowMajor))?;
            Ok(Dim::from(layout.bytes()))
        }
    }
}

/// Layout of a parameter; vectors count as one row.
pub fn layout(ty: &TensorType, packing: Packing) -> Result<Layout, LowerError> {
    let sizes: Option<Vec<usize>> =
        ty.dims.iter().map(|d| d.as_const().and_then(|d| usize::try_from(d).ok())).collect();
    let (n, k) = match sizes.as_deref() {
        Some([]) => (1, 1),
        Some([k]) => (1, *k),
        Some([n, k]) => (*n, *k),
        _ => return Err(LowerError::internal(format!("a parameter of type {ty}"))),
    };
    Ok(Layout::new(ty.dtype, packing, n, k)?)
}

/// Lowers a group function. `packings[i]` is the packing of input `i` if it is a parameter.
pub fn lower_group(
    module: &Module,
    f: &Function,
    name: &str,
    packings: &[Option<Packing>],
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    lower_appending(module, f, name, packings, &[], target)
}

/// Rows that a group makes, as [`lower_appending`] takes it.
pub struct Appended<'a> {
    pub f: &'a Function,
    pub packings: &'a [Option<Packing>],
    /// For each of its results, the input of the attention that is the cache.
    pub into: &'a [usize],
}

/// Lowers a group function; if it is an attention, the results of the groups `rows` are appended to its caches first. The inputs
/// of these groups are arguments behind the inputs of `f`.
pub fn lower_appending(
    module: &Module,
    f: &Function,
    name: &str,
    packings: &[Option<Packing>],
    rows: &[Appended],
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let mut kb = KernelBuilder::new(name);
    let written = |i: usize| rows.iter().any(|group| group.into.contains(&i));
    let chosen = template(f, packings, target);
    let (inputs, inliner) = bound(&mut kb, f, packings, target, written, |i| role(f, &chosen, i))?;
    if let Template::Attention(node) = chosen {
        let mut appended = Vec::new();
        for group in rows {
            let (_, inliner) = bound(&mut kb, group.f, group.packings, target, |_| false, |_| None)?;
            let caches = group.into.iter().map(|&i| inputs[i]);
            appended.push(NewRows { inliner, stores: group.f.outputs.iter().copied().zip(caches).collect() });
        }
        return attention_group(kb, f, node, inliner, &appended, target);
    }
    let mut outputs = Vec::new();
    for (i, &v) in f.outputs.iter().enumerate() {
        let ty = f.ty(v);
        outputs.push(kb.param(&format!("out{i}"), ty.dtype, ty.elements(), Access::Out, 64));
    }
    let product = matches!(chosen, Template::Contraction(_)) && target.arch != Arch::Nvptx;
    let (args, plan) = match chosen {
        Template::Attention(_) => return Err(LowerError::internal("an attention is lowered above")),
        Template::Experts(node) => experts::emit(&mut kb, f, node, inliner, &inputs, &outputs, target)?,
        Template::Scan(node) => (scan_group(&mut kb, module, f, node, &inputs, &outputs, target)?, None),
        Template::Contraction(c) => contraction::emit(&mut kb, f, &c, inliner, &inputs, &outputs, target)?,
        Template::Rows => (rows_group(&mut kb, f, inliner, &outputs, target)?, None),
    };
    let mut lowered = finished(kb, args, target)?;
    if product {
        lowered.kernel = interleave_steps(lowered.kernel);
    }
    Ok(GroupKernel { plan, ..lowered })
}

/// What input `i` of a group is to its kernel, where the generator has a name for it.
fn role(f: &Function, template: &Template, i: usize) -> Option<&'static str> {
    match template {
        Template::Contraction(contraction) => contraction.role(i),
        Template::Experts(node) => experts::role(f, node, i),
        Template::Scan(_) | Template::Attention(_) | Template::Rows => None,
    }
}

/// Parameters of a kernel for the inputs of a group, and what binds them. Those that are `written` too are both.
fn bound<'a>(
    kb: &mut KernelBuilder,
    f: &'a Function,
    packings: &[Option<Packing>],
    target: &KernelTarget,
    written: impl Fn(usize) -> bool,
    role: impl Fn(usize) -> Option<&'static str>,
) -> Result<(Vec<BufId>, Inliner<'a, 'static>), LowerError> {
    let (mut inputs, mut bindings) = (Vec::new(), HashMap::new());
    for (i, &v) in f.inputs.iter().enumerate() {
        let ty = f.ty(v);
        let dtype = buffer_dtype(ty);
        let bytes = value_bytes(ty, packings[i])?;
        let len = if ty.dtype.is_packed() || packings[i].is_some() {
            bytes.floor_div(dtype.bytes().unwrap_or(1) as i64)
        } else {
            ty.elements()
        };
        let access = if written(i) { Access::InOut } else { Access::In };
        // A single element may lie anywhere: the temperature is a field of the call.
        let align = if len.as_const() == Some(1) { dtype.bytes().unwrap_or(1) as u32 } else { 64 };
        let name = role(i).map_or_else(|| format!("in{}", kb.kernel().params.len()), String::from);
        let buf = kb.param(&name, dtype, len, access, align);
        let plain = matches!(packings[i], None | Some(Packing::RowMajor)) && !ty.dtype.is_packed();
        let layout = if plain { None } else { Some(layout(ty, packings[i].unwrap_or(Packing::RowMajor))?) };
        bindings.insert(v, Binding::Buffer { buf, layout });
        inputs.push(buf);
    }
    let lanes = if target.arch == Arch::Nvptx { 1 } else { target.f32_lanes() };
    let inliner = Inliner { reduce_lanes: lanes, ..Inliner::new(f, bindings) };
    Ok((inputs, inliner))
}

/// The kernel with its launch shape.
pub(super) fn finished(
    kb: KernelBuilder,
    args: Vec<ArgContract>,
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let kernel = expand_math(&kb.finish(), target.quotient());
    let grid = if target.arch == Arch::Nvptx { Some(grid(&kernel)?) } else { None };
    Ok(GroupKernel { kernel, args, grid, merge: None, plan: None })
}

fn rows_group(
    kb: &mut KernelBuilder,
    f: &Function,
    inliner: Inliner<'_, 'static>,
    outputs: &[BufId],
    target: &KernelTarget,
) -> Result<Vec<ArgContract>, LowerError> {
    let leading = |v: &ValueId| {
        let dims = &f.ty(*v).dims;
        dims[..dims.len().saturating_sub(1)].to_vec()
    };
    let rows = f.outputs.first().map(leading).unwrap_or_default();
    if f.outputs.iter().any(|v| leading(v) != rows) {
        return Err(LowerError::internal(format!("group {} stores rows of different shapes", f.name)));
    }
    let codes = row_codes(f, outputs)?;
    let stored = |v: &ValueId| f.def(*v).is_none_or(|n| !matches!(n.op, Op::QuantizeRows { .. }));
    let pairs = f.outputs.iter().copied().zip(outputs.iter().copied());
    let stores: Vec<(ValueId, BufId)> = pairs.filter(|(v, _)| stored(v)).collect();
    let machine = Machine::of(target);
    Recorder::within(kb, |k| {
        let (inliner, leading, outputs, codes) = (&inliner, rows.as_slice(), stores.as_slice(), &codes);
        Rows { k, inliner, leading, outputs, codes, block: code_block(target), machine }.emit();
    });

    let first = rows.first().cloned().unwrap_or(Dim::from(1));
    let single = first.as_const() == Some(1);
    let moves = f.live().any(|(_, n)| !is_row_local(f, n));
    // Ops on groups of columns read columns whose places an output may have taken already.
    let columnwise = f.live().all(|(_, n)| n.op.is_elementwise() || matches!(n.op, Op::Reduce { .. }));
    let partition = |v: ValueId, output: bool| {
        let same_rows = codes.is_empty() && f.ty(v).rank() > 1 && f.ty(v).dims.first() == Some(&first);
        (single || same_rows && (output || !moves)).then(|| Partition::Rows(first.clone()))
    };
    let mut args: Vec<ArgContract> = f
        .inputs
        .iter()
        .map(|&v| ArgContract { access: Access::In, partition: partition(v, false), in_place: vec![] })
        .collect();
    for &v in &f.outputs {
        // A row that is reduced is read again after the first store of a later loop would have overwritten it.
        let one_loop = f.outputs.iter().all(|&o| f.ty(o).dims.last() == f.ty(v).dims.last())
            && f.outputs.iter().all(|&o| is_reduction(f, o) == is_reduction(f, v));
        let same = |&i: &usize| {
            let input = f.ty(f.inputs[i]);
            one_loop && !moves && columnwise && input.dims == f.ty(v).dims && input.dtype == f.ty(v).dtype
        };
        let in_place = (0..f.inputs.len()).filter(same).collect();
        args.push(ArgContract { access: Access::Out, partition: partition(v, true), in_place });
    }
    Ok(args)
}

/// The rows that a group quantizes, with the buffers of the results.
fn row_codes(f: &Function, outputs: &[BufId]) -> Result<Vec<RowCodes>, LowerError> {
    let mut all = Vec::new();
    for (_, node) in f.live() {
        let Op::QuantizeRows { group, bits, part, zero } = node.op else { continue };
        let buffer = |v: &ValueId| f.outputs.iter().position(|o| o == v).map(|at| outputs[at]);
        let buffers: Option<Vec<BufId>> = node.outputs.iter().map(buffer).collect();
        let k = f.ty(node.inputs[0]).dims.last().and_then(Dim::as_const);
        let (Some([codes, scales, starts]), Some(k), GROUP) = (buffers.as_deref(), k, part) else {
            return Err(LowerError::internal(format!(
                "group {} quantizes rows that nobody reads whole",
                f.name
            )));
        };
        let (codes, scales, starts) = (*codes, *scales, *starts);
        all.push(RowCodes {
            x: node.inputs[0],
            codes,
            scales,
            starts,
            group,
            bits,
            part,
            zero,
            k: k as usize,
        });
    }
    Ok(all)
}

/// True if a row of the results depends on no other row of the operands.
pub fn is_row_local(f: &Function, n: &Node) -> bool {
    match n.op {
        Op::Reduce { axis, .. } => axis + 1 == f.ty(n.inputs[0]).rank(),
        Op::GroupScale { .. } | Op::GroupQuantize { .. } | Op::GroupSum { .. } | Op::QuantizeRows { .. } => {
            true
        }
        _ => n.op.is_elementwise(),
    }
}

fn is_reduction(f: &Function, v: ValueId) -> bool {
    f.def(v).is_some_and(|n| matches!(n.op, Op::Reduce { .. }))
}

fn scan_group(
    kb: &mut KernelBuilder,
    module: &Module,
    f: &Function,
    node: &Node,
    inputs: &[BufId],
    outputs: &[BufId],
    target: &KernelTarget,
) -> Result<Vec<ArgContract>, LowerError> {
    let Op::Scan { body, carries, seqs } = node.op else {
        return Err(LowerError::internal("a scan group without scan"));
    };
    let body = &module.functions[body];
    // A value may be several operands of the scan and is one input of the group.
    let positions: Option<Vec<usize>> =
        node.inputs.iter().map(|v| f.inputs.iter().position(|i| i == v)).collect();
    let (1, Some(positions), true) = (f.body.len(), positions, node.outputs == f.outputs) else {
        return Err(LowerError::internal(format!("group {} has more than its scan", f.name)));
    };
    let length = f.ty(node.inputs[carries]).dims[0].clone();
    let (inputs, outputs) = (positions.iter().map(|&i| inputs[i]).collect(), outputs.to_vec());
    let shares = if let Some(shape) = scan::shape_of(body, carries) {
        Recorder::within(kb, |k| {
            let scan = MatrixScan { k, body, carries, seqs, inputs, outputs, length, shape };
            let plan = Plan::choose(&scan, Machine::of(target));
            scan.emit(plan, target.prefetch(DType::F32));
            row_shares(&scan, plan.block_rows())
        })
    } else if scan::is_channelwise(body) {
        let channels = body.ty(body.inputs[0]).dims[0].as_const().unwrap_or(0);
        let tiles = Recorder::within(kb, |k| {
            let scan = ChannelScan { k, body, carries, seqs, inputs, outputs, length, channels };
            scan.emit(Machine::of(target));
            Partition::Tiles(scan.blocks())
        });
        ScanShares {
            inputs: vec![Some(tiles.clone()); node.inputs.len()],
            outputs: vec![Some(tiles); node.outputs.len()],
        }
    } else {
        return Err(LowerError::Unsupported {
            what: format!("scan body {}", body.name),
            hint: SCAN_BODIES.into(),
        });
    };
    let mut args: Vec<ArgContract> = (0..f.inputs.len())
        .map(|i| {
            // A value that is several operands is read as the least orderly of them.
            let mut uses =
                positions.iter().zip(&shares.inputs).filter(|(p, _)| **p == i).map(|(_, share)| share);
            let first = uses.next().cloned().flatten();
            let partition = if uses.all(|share| *share == first) { first } else { None };
            ArgContract { access: Access::In, partition, in_place: vec![] }
        })
        .collect();
    for (i, partition) in shares.outputs.into_iter().enumerate() {
        let only_carry = i < carries && positions.iter().filter(|&&p| p == positions[i]).count() == 1;
        let in_place = if only_carry { vec![positions[i]] } else { vec![] };
        args.push(ArgContract { access: Access::Out, partition, in_place });
    }
    Ok(args)
}

/// Which scan bodies have a kernel.
pub const SCAN_BODIES: &str = "a body has a kernel if it is elementwise on f32 over one channel axis, or over the rows of a matrix \
    with reductions over its last axis";

/// How the elements of a scan's operands and results are shared among workers.
struct ScanShares {
    inputs: Vec<Option<Partition>>,
    outputs: Vec<Option<Partition>>,
}

/// Vectors along the rows are sliced as the results of contractions are, in blocks of whole tiles; vectors along the
/// columns are read by all rows of their head.
fn row_shares(scan: &MatrixScan, block_rows: i64) -> ScanShares {
    let rows = scan.shape.heads * scan.shape.rows;
    let tiles = (block_rows % ROWS == 0).then_some(Partition::Tiles(rows / block_rows));
    let stacked = |v: &ValueId| {
        let extent = scan.extent(*v);
        let sliced = extent.heads && extent.rows && (!extent.columns || scan.shape.columns == 1);
        if sliced { tiles.clone() } else { None }
    };
    ScanShares {
        inputs: scan.body.inputs.iter().map(stacked).collect(),
        outputs: scan.body.outputs.iter().map(stacked).collect(),
    }
}

/// Launch shape of a GPU kernel: the extents of its block and thread loops.
fn grid(kernel: &Kernel) -> Result<Grid, LowerError> {
    let mut grid = Grid { blocks: [Dim::from(1), Dim::from(1), Dim::from(1)], threads: [1; 3] };
    fill_grid(kernel, &kernel.body, &mut grid)?;
    Ok(grid)
}

fn fill_grid(kernel: &Kernel, body: &[Stmt], grid: &mut Grid) -> Result<(), LowerError> {
    for stmt in body {
        match stmt {
            Stmt::For { extent, kind, body, .. } => {
                match kind {
                    ForKind::Block(axis) => grid.blocks[usize::from(*axis)] = extent_dim(kernel, *extent)?,
                    ForKind::Thread(axis) => {
                        let threads = kernel.exprs.as_int(*extent).and_then(|t| u32::try_from(t).ok());
                        let threads =
                            threads.ok_or_else(|| LowerError::internal("a thread loop of unknown extent"))?;
                        let slot = &mut grid.threads[usize::from(*axis)];
                        *slot = (*slot).max(threads);
                    }
                    ForKind::Serial | ForKind::Unroll | ForKind::Par => {}
                }
                fill_grid(kernel, body, grid)?;
            }
            Stmt::If { then, otherwise, .. } => {
                fill_grid(kernel, then, grid)?;
                fill_grid(kernel, otherwise, grid)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The size that an extent expression computes.
fn extent_dim(kernel: &Kernel, e: ExprId) -> Result<Dim, LowerError> {
    use mlcc_ir::kernel::BinOp;
    let unknown = || LowerError::internal(format!("launch extent of kernel {}", kernel.name));
    match kernel.exprs.expr(e) {
        Expr::Const(c) => Ok(Dim::from(c.as_f64() as i64)),
        Expr::Var(v) => {
            let found = kernel.dims.iter().find(|(_, d)| d == v).ok_or_else(unknown)?;
            Ok(Dim::sym(found.0))
        }
        Expr::Binary(op, a, b) => {
            let (a, b) = (extent_dim(kernel, *a)?, extent_dim(kernel, *b)?);
            match op {
                BinOp::Add => Ok(a.add(&b)),
                BinOp::Sub => Ok(a.sub(&b)),
                BinOp::Mul => a.mul(&b).ok_or_else(unknown),
                BinOp::Div => Ok(a.floor_div(b.as_const().filter(|&d| d > 0).ok_or_else(unknown)?)),
                _ => Err(unknown()),
            }
        }
        _ => Err(unknown()),
    }
}
