//! Groups of one scan; of one over channels also with what is computed of its stacked values element by element.

use super::error::LowerError;
use super::kernel::{ArgContract, Emitted};
use super::plan::Partition;
use crate::inline::Inliner;
use crate::machine::Machine;
use crate::params::KernelTarget;
use crate::scan::matrix::{Plan, ROWS};
use crate::scan::{self, ChannelScan, Epilogue, MatrixScan};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::{Access, BufId};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Recorder;
use mlcc_target::Arch;

pub(super) fn emit(
    kb: &mut KernelBuilder,
    module: &Module,
    f: &Function,
    node: &Node,
    inliner: Inliner<'_, 'static>,
    (inputs, outputs): (&[BufId], &[BufId]),
    target: &KernelTarget,
) -> Result<Emitted, LowerError> {
    let Op::Scan { body, carries, seqs } = node.op else {
        return Err(LowerError::internal("a scan group without scan"));
    };
    let body = &module.functions[body];
    // A value may be several operands of the scan and is one input of the group.
    let positions: Option<Vec<usize>> =
        node.inputs.iter().map(|v| f.inputs.iter().position(|i| i == v)).collect();
    let (states, stacked) = node.outputs.split_at(carries);
    let (Some(positions), true) = (positions, f.outputs.starts_with(states)) else {
        return Err(LowerError::internal(format!("group {} has not all operands of its scan", f.name)));
    };
    let length = f.ty(node.inputs[carries]).dims[0].clone();
    let operands: Vec<BufId> = positions.iter().map(|&i| inputs[i]).collect();
    let machine = Machine::of(target);
    let (shares, generator, plan) = if let Some(shape) = scan::shape_of(body, carries) {
        if node.outputs != f.outputs {
            return Err(LowerError::internal(format!("group {} has more than its scan", f.name)));
        }
        Recorder::within(kb, |k| {
            let (inputs, outputs) = (operands, outputs.to_vec());
            let scan = MatrixScan { k, body, carries, seqs, inputs, outputs, length, shape };
            let plan = Plan::choose(&scan, machine);
            scan.emit(plan, target.prefetch(DType::F32));
            (row_shares(&scan, plan.block_rows()), "scan::matrix", plan.to_string())
        })
    } else if scan::is_channelwise(body) {
        let channels = body.ty(body.inputs[0]).dims[0].as_const().unwrap_or(0);
        let tiles = Recorder::within(kb, |k| {
            let (new_states, results) = outputs.split_at(carries);
            let of_step = |i: &usize| !positions.contains(i) && is_stacked(f, f.inputs[*i], stacked);
            // Of a single step nothing comes ahead.
            let ahead =
                (0..inputs.len()).filter(|_| target.arch == Arch::Nvptx && length.as_const() != Some(1));
            let f32_rows = ahead.filter(of_step).filter(|&i| f.ty(f.inputs[i]).dtype == DType::F32);
            let epilogue = Epilogue {
                inliner,
                stacked,
                rows: f32_rows.map(|i| (f.inputs[i], inputs[i])).collect(),
                results: f.outputs[carries..].iter().copied().zip(results.iter().copied()).collect(),
            };
            let (inputs, outputs) = (operands, new_states.to_vec());
            let scan = ChannelScan { k, body, carries, seqs, inputs, outputs, epilogue, length, channels };
            scan.emit(machine);
            Partition::Tiles(scan.blocks())
        });
        let shares = ScanShares {
            inputs: vec![Some(tiles.clone()); node.inputs.len()],
            outputs: vec![Some(tiles); f.outputs.len()],
        };
        (shares, "scan::channels", format!("blocks of {} channels, {machine}", scan::CHANNELS))
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
            let beside = || shares.outputs.last().filter(|_| is_stacked(f, f.inputs[i], stacked));
            let first = uses.next().or_else(beside).cloned().flatten();
            let partition = if uses.all(|share| *share == first) { first } else { None };
            ArgContract { access: Access::In, partition, in_place: vec![] }
        })
        .collect();
    for (i, partition) in shares.outputs.into_iter().enumerate() {
        let only_carry = i < carries && positions.iter().filter(|&&p| p == positions[i]).count() == 1;
        let in_place = if only_carry { vec![positions[i]] } else { vec![] };
        args.push(ArgContract { access: Access::Out, partition, in_place });
    }
    Ok(Emitted { args, generator, plan })
}

/// True for a value with an element beside each of the stacked values.
fn is_stacked(f: &Function, v: ValueId, stacked: &[ValueId]) -> bool {
    stacked.first().is_some_and(|&of| f.ty(of).dims == f.ty(v).dims)
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
        let sliced = extent.is_per_row(scan.shape) && (!extent.columns || scan.shape.columns == 1);
        if sliced { tiles.clone() } else { None }
    };
    ScanShares {
        inputs: scan.body.inputs.iter().map(stacked).collect(),
        outputs: scan.body.outputs.iter().map(stacked).collect(),
    }
}
