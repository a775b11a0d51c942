//! A lowered kernel: what its arguments promise, how it is launched, and how it was made.

use super::error::LowerError;
use super::plan::Partition;
use crate::params::KernelTarget;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::kernel::{BinOp, Expr, ExprId, ForKind, Kernel, ParamAccess, Stmt};
use mlcc_ir::step::LaunchGrid;
use mlcc_kernel_lang::math::expand_math;
use mlcc_target::Arch;
use std::fmt;

/// A kernel with the contract of its arguments: inputs of the group first, then its outputs.
#[derive(Clone)]
pub struct GroupKernel {
    pub kernel: Kernel,
    pub args: Vec<ArgContract>,
    pub grid: Option<LaunchGrid>,
    pub merge: Option<MergeKernel>,
    pub made: KernelExplanation,
}

/// The ops and the plan of a kernel, for `--explain-passes`.
#[derive(Clone, Debug)]
pub struct KernelExplanation {
    /// Ops of the group and the shapes of their results.
    pub ops: String,
    pub generator: &'static str,
    /// The choices of the generator and their reasons.
    pub plan: String,
}

impl KernelExplanation {
    /// The explanation of kernels in one launch.
    pub fn combine(parts: &[&KernelExplanation]) -> KernelExplanation {
        let all = parts.iter().map(|made| made.to_string()).collect::<Vec<_>>().join(" | ");
        KernelExplanation {
            ops: all,
            generator: "side by side",
            plan: format!("{} kernels, each with blocks of its own", parts.len()),
        }
    }
}

impl fmt::Display for KernelExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelExplanation { ops, generator, plan } = self;
        write!(f, "{ops}: {generator}: {plan}")
    }
}

/// A second kernel that finishes what the first one left unfinished: the first one's arguments end in the
/// unfinished results instead of the group's outputs; the second one takes those, some of the group's inputs,
/// then its outputs.
#[derive(Clone)]
pub struct MergeKernel {
    pub kernel: Box<GroupKernel>,
    /// Size of the unfinished results in bytes.
    pub bytes: Dim,
    /// The inputs of the group that it reads.
    pub reads: Vec<usize>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArgContract {
    pub access: ParamAccess,
    pub partition: Option<Partition>,
    /// See [`super::plan::BufferArg::in_place`].
    pub in_place: Vec<usize>,
}

/// The output of a template besides the statements of the kernel.
pub(super) struct TemplateResult {
    pub args: Vec<ArgContract>,
    pub generator: &'static str,
    pub plan: String,
}

/// The kernel of group `f` with its launch shape.
pub(super) fn finish_kernel(
    kb: KernelBuilder,
    f: &Function,
    TemplateResult { args, generator, plan }: TemplateResult,
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let kernel = expand_math(&kb.finish(), target.quotient_method());
    let grid = if target.arch == Arch::Nvptx { Some(grid(&kernel)?) } else { None };
    let made = KernelExplanation { ops: summary(f), generator, plan };
    Ok(GroupKernel { kernel, args, grid, merge: None, made })
}

/// Ops of a group in order, each once, with the types of its inputs and outputs.
fn summary(f: &Function) -> String {
    let mut ops: Vec<&str> = Vec::new();
    for (_, node) in f.live_nodes() {
        if !ops.contains(&node.op.name()) {
            ops.push(node.op.name());
        }
    }
    let types =
        |values: &[ValueId]| values.iter().map(|&v| f.ty(v).to_string()).collect::<Vec<_>>().join(", ");
    format!("{} ({}) -> ({})", ops.join(" "), types(&f.inputs), types(&f.outputs))
}

/// Launch shape of a GPU kernel: the extents of its block and thread loops.
fn grid(kernel: &Kernel) -> Result<LaunchGrid, LowerError> {
    let mut grid = LaunchGrid { blocks: [Dim::from(1), Dim::from(1), Dim::from(1)], threads: [1; 3] };
    fill_grid(kernel, &kernel.body, &mut grid)?;
    Ok(grid)
}

fn fill_grid(kernel: &Kernel, body: &[Stmt], grid: &mut LaunchGrid) -> Result<(), LowerError> {
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
