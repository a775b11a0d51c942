//! Groups of one scan; of one over channels also with what is computed of its stacked values element by
//! element.

use super::error::LowerError;
use super::kernel::{ArgContract, GroupKernel, MergeKernel, TemplateResult, finish_kernel};
use super::operands::result_name;
use super::plan::Partition;
use crate::inline::Inliner;
use crate::machine::MachineKind;
use crate::params::KernelTarget;
use crate::scan::matrix::{ChunkScan, MatrixScanPlan, ROWS, StateShape};
use crate::scan::{self, ChannelScan, MatrixScan, ScanEpilogue};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BufId, ParamAccess};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Recorder;
use mlcc_target::Arch;

/// The scan of a group.
struct GroupScan<'a> {
    f: &'a Function,
    node: &'a GraphNode,
    body: &'a Function,
    carries: usize,
    seqs: usize,
    /// The inputs of the group that are its operands: a value may be several operands and is one input.
    positions: Vec<usize>,
    /// Steps.
    length: Dim,
}

impl<'a> GroupScan<'a> {
    fn of(module: &'a Module, f: &'a Function, node: &'a GraphNode) -> Result<GroupScan<'a>, LowerError> {
        let Op::Scan { body, carries, seqs } = node.op else {
            return Err(LowerError::internal("a scan group without scan"));
        };
        let positions: Option<Vec<usize>> =
            node.inputs.iter().map(|v| f.inputs.iter().position(|i| i == v)).collect();
        let (Some(positions), true) = (positions, f.outputs.starts_with(&node.outputs[..carries])) else {
            return Err(LowerError::internal(format!("group {} has not all operands of its scan", f.name)));
        };
        let length = f.ty(node.inputs[carries]).dims[0].clone();
        Ok(GroupScan { f, node, body: &module.functions[body], carries, seqs, positions, length })
    }

    /// The shape of states that are matrices.
    fn matrices(&self) -> Result<Option<StateShape>, LowerError> {
        let shape = scan::shape_of(self.body, self.carries);
        if shape.is_some() && self.node.outputs != self.f.outputs {
            return Err(LowerError::internal(format!("group {} has more than its scan", self.f.name)));
        }
        Ok(shape)
    }

    fn operands(&self, inputs: &[BufId]) -> Vec<BufId> {
        self.positions.iter().map(|&i| inputs[i]).collect()
    }

    /// The scan over matrices with these operands and results.
    fn of_matrices<'k>(
        &self,
        k: &'k Recorder,
        shape: StateShape,
        inputs: Vec<BufId>,
        outputs: Vec<BufId>,
    ) -> MatrixScan<'a, 'k> {
        let GroupScan { body, carries, seqs, ref length, .. } = *self;
        MatrixScan { k, body, carries, seqs, inputs, outputs, length: length.clone(), shape }
    }

    /// The inputs of the group that the carry is in the place of.
    fn in_place(&self, carry: usize) -> Vec<usize> {
        let at = self.positions[carry];
        let only = self.positions.iter().filter(|&&p| p == at).count() == 1;
        if only { vec![at] } else { vec![] }
    }

    fn is_stacked(&self, v: ValueId) -> bool {
        let stacked = self.node.outputs.get(self.carries);
        stacked.is_some_and(|&of| self.f.ty(of).dims == self.f.ty(v).dims)
    }

    /// The contracts of the arguments.
    fn args(&self, shares: ScanShares) -> Vec<ArgContract> {
        let of_input = |i: usize| {
            // A value that is several operands is read as the least orderly of them.
            let mut uses =
                self.positions.iter().zip(&shares.inputs).filter(|(p, _)| **p == i).map(|(_, share)| share);
            let beside = || shares.outputs.last().filter(|_| self.is_stacked(self.f.inputs[i]));
            let first = uses.next().or_else(beside).cloned().flatten();
            let partition = if uses.all(|share| *share == first) { first } else { None };
            ArgContract { access: ParamAccess::In, partition, in_place: vec![] }
        };
        let mut args: Vec<ArgContract> = (0..self.f.inputs.len()).map(of_input).collect();
        for (i, partition) in shares.outputs.into_iter().enumerate() {
            let in_place = if i < self.carries { self.in_place(i) } else { vec![] };
            args.push(ArgContract { access: ParamAccess::Out, partition, in_place });
        }
        args
    }
}

/// The plan of a scan over matrices in chunks, if it has one.
pub(super) fn chunks_of(
    (module, f, node): (&Module, &Function, &GraphNode),
    target: &KernelTarget,
) -> Result<Option<ChunkScan>, LowerError> {
    let scanned = GroupScan::of(module, f, node)?;
    let shape = scanned.matrices()?;
    Ok(shape.and_then(|shape| {
        ChunkScan::analyze(scanned.body, (scanned.carries, &scanned.length), shape, target)
    }))
}

/// A scan over matrices in chunks: one kernel prepares them, another one goes through them. `kb` has the
/// inputs.
pub(super) fn in_chunks(
    mut kb: KernelBuilder,
    (module, f, node): (&Module, &Function, &GraphNode),
    chunks: &ChunkScan,
    inputs: &[BufId],
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let scanned = GroupScan::of(module, f, node)?;
    let arg = |access, in_place| ArgContract { access, partition: None, in_place };

    let mut walk = KernelBuilder::new(format!("{}_walk", kb.kernel().name));
    let elements = chunks.elements(&scanned.length);
    let from = walk.param("prepared", DType::BF16, elements.clone(), ParamAccess::In, 64);
    let state = scanned.positions[0];
    let mut param = |v: ValueId, name: &str, access| {
        let ty = f.ty(v);
        walk.param(name, ty.dtype, ty.elements(), access, 64)
    };
    let before = param(f.inputs[state], "before", ParamAccess::In);
    let outputs = f.outputs.iter().map(|&v| param(v, result_name(f, v), ParamAccess::Out)).collect();
    Recorder::within(&mut walk, |k| {
        chunks.walk(&scanned.of_matrices(k, chunks.shape, vec![before], outputs), from)
    });
    let in_place = if scanned.in_place(0).is_empty() { vec![] } else { vec![1] };
    let args = [
        arg(ParamAccess::In, vec![]),
        arg(ParamAccess::In, vec![]),
        arg(ParamAccess::Out, in_place),
        arg(ParamAccess::Out, vec![]),
    ];
    let emitted =
        TemplateResult { args: args.into(), generator: "scan::chunks", plan: "from chunk to chunk".into() };
    let kernel = Box::new(finish_kernel(walk, f, emitted, target)?);

    let to = kb.param("prepared", DType::BF16, elements.clone(), ParamAccess::Out, 64);
    let operands = scanned.operands(inputs);
    Recorder::within(&mut kb, |k| {
        chunks.prepare(&scanned.of_matrices(k, chunks.shape, operands, vec![]), to)
    });
    let args = f
        .inputs
        .iter()
        .map(|_| arg(ParamAccess::In, vec![]))
        .chain([arg(ParamAccess::Out, vec![])])
        .collect();
    let emitted = TemplateResult { args, generator: "scan::chunks", plan: chunks.to_string() };
    let first = finish_kernel(kb, f, emitted, target)?;
    let merge = MergeKernel { kernel, bytes: elements.scale(2), reads: vec![state] };
    Ok(GroupKernel { merge: Some(merge), ..first })
}

pub(super) fn emit(
    kb: &mut KernelBuilder,
    (module, f, node): (&Module, &Function, &GraphNode),
    inliner: Inliner<'_, 'static>,
    (inputs, outputs): (&[BufId], &[BufId]),
    target: &KernelTarget,
) -> Result<TemplateResult, LowerError> {
    let scanned = GroupScan::of(module, f, node)?;
    let body = scanned.body;
    let machine = MachineKind::for_target(target);
    if let Some(shape) = scanned.matrices()? {
        let (operands, outputs) = (scanned.operands(inputs), outputs.to_vec());
        return Ok(Recorder::within(kb, |k| {
            let scan = scanned.of_matrices(k, shape, operands, outputs);
            let plan = MatrixScanPlan::choose(&scan, machine);
            scan.emit(plan, target.prefetch_instr(DType::F32));
            let args = scanned.args(row_shares(&scan, plan.block_rows()));
            TemplateResult { args, generator: "scan::matrix", plan: plan.to_string() }
        }));
    }
    if !scan::is_channelwise(body) {
        return Err(LowerError::Unsupported {
            what: format!("scan body {}", body.name),
            hint: SCAN_BODIES.into(),
        });
    }
    let tiles = of_channels(kb, &scanned, inliner, (inputs, outputs), target);
    let shares = ScanShares {
        inputs: vec![Some(tiles.clone()); node.inputs.len()],
        outputs: vec![Some(tiles); f.outputs.len()],
    };
    let plan = format!("blocks of {} channels, {machine}", scan::CHANNELS);
    Ok(TemplateResult { args: scanned.args(shares), generator: "scan::channels", plan })
}

/// The shares of workers in the scan over channels that this records.
fn of_channels(
    kb: &mut KernelBuilder,
    scanned: &GroupScan,
    inliner: Inliner<'_, 'static>,
    (inputs, outputs): (&[BufId], &[BufId]),
    target: &KernelTarget,
) -> Partition {
    let GroupScan { f, node, body, carries, seqs, ref positions, ref length } = *scanned;
    let channels = body.ty(body.inputs[0]).dims[0].as_const().unwrap_or(0);
    Recorder::within(kb, |k| {
        let (new_states, results) = outputs.split_at(carries);
        let of_step = |i: &usize| !positions.contains(i) && scanned.is_stacked(f.inputs[*i]);
        // A single step has no next steps to prefetch.
        let ahead = (0..inputs.len()).filter(|_| target.arch == Arch::Nvptx && length.as_const() != Some(1));
        let f32_rows = ahead.filter(of_step).filter(|&i| f.ty(f.inputs[i]).dtype == DType::F32);
        let epilogue = ScanEpilogue {
            inliner,
            stacked: &node.outputs[carries..],
            rows: f32_rows.map(|i| (f.inputs[i], inputs[i])).collect(),
            results: f.outputs[carries..].iter().copied().zip(results.iter().copied()).collect(),
        };
        let (inputs, outputs) = (scanned.operands(inputs), new_states.to_vec());
        let length = length.clone();
        let scan = ChannelScan { k, body, carries, seqs, inputs, outputs, epilogue, length, channels };
        scan.emit(MachineKind::for_target(target));
        Partition::Tiles(scan.blocks())
    })
}

/// The scan bodies that have a kernel.
pub const SCAN_BODIES: &str = "a body has a kernel if it is elementwise on f32 over one channel axis, or over the rows of a matrix \
    with reductions over its last axis";

/// The partition of the elements of a scan's operands and results among workers.
struct ScanShares {
    inputs: Vec<Option<Partition>>,
    outputs: Vec<Option<Partition>>,
}

/// Vectors along the rows are sliced as the results of contractions are, in blocks of whole tiles; vectors
/// along the columns are read by all rows of their head.
fn row_shares(scan: &MatrixScan, block_rows: i64) -> ScanShares {
    let rows = scan.shape.heads * scan.shape.rows;
    let tiles = (block_rows % ROWS == 0).then_some(Partition::Tiles(rows / block_rows));
    let stacked = |v: &ValueId| {
        let extent = scan.extent(*v);
        let sliced = extent.is_per_row(scan.shape) && (!extent.columns || scan.shape.columns == 1);
        if sliced { tiles.clone() } else { None }
    };
    ScanShares {
        inputs: scan.body.inputs.iter().map(stacked).collect(),
        outputs: scan.body.outputs.iter().map(stacked).collect(),
    }
}
