//! Lowering of graph functions to kernels: every group that fusion made becomes one kernel; reshapes become
//! views.

pub mod attention;
pub mod contraction;
pub mod cost;
mod entry;
mod error;
pub mod experts;
pub mod group;
pub mod kernel;
mod kernel_cache;
pub mod operands;
pub mod plan;
mod rows;
pub mod scan;
mod strides;

use crate::params::KernelTarget;
use cost::LaunchCost;
use entry::EntryLowering;
use kernel::KernelExplanation;
use kernel_cache::KernelCache;
use mlcc_ir::graph::FunctionKind;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::Packing;
use plan::{LaunchWork, LoweredEntry, LoweredLaunch};

pub use error::LowerError;

/// All entry functions of a module for one machine.
#[derive(Clone)]
pub struct LoweredModule {
    pub kernels: Vec<Kernel>,
    /// The cost of each kernel.
    pub costs: Vec<LaunchCost>,
    /// The explanation of each kernel, for `--explain-passes`; none where the kernels were read from text.
    pub explanations: Vec<KernelExplanation>,
    pub entries: Vec<LoweredEntry>,
}

/// Sets the packing of every parameter that has none yet: the one that its contraction needs, else row-major.
pub fn choose_packings(module: &mut Module, target: &KernelTarget) {
    // The packing that each reader needs; row-major where they do not agree.
    let mut wanted: Vec<Option<Packing>> = vec![None; module.params.len()];
    for (_, f) in module.functions.iter().filter(|(_, f)| f.kind == FunctionKind::Entry) {
        for (_, node) in f.live_nodes() {
            let Op::Call(callee) = node.op else { continue };
            let callee = &module.functions[callee];
            for (_, inner) in callee.live_nodes() {
                let (weight, packing) = match inner.op {
                    _ if experts::is_tiled(callee, inner) => {
                        (experts::expert_weight(inner), experts::weight_packing(target))
                    }
                    _ if contraction::is_contraction(callee, &inner.op, &inner.inputs) => {
                        let packing = contraction::weight_packing(callee, &inner.inputs, target);
                        (inner.inputs.last().copied(), packing)
                    }
                    _ => continue,
                };
                let position = callee.inputs.iter().position(|&i| Some(i) == weight);
                let argument = position.and_then(|i| f.defining_node(node.inputs[i]));
                if let Some(Op::Param(p)) = argument.map(|n| &n.op) {
                    let wanted = &mut wanted[p.0 as usize];
                    let agree = wanted.is_none_or(|other| other == packing);
                    *wanted = Some(if agree { packing } else { Packing::RowMajor });
                }
            }
        }
    }
    for id in module.params.ids().collect::<Vec<_>>() {
        let chosen = wanted[id.0 as usize].unwrap_or(Packing::RowMajor);
        module.params[id].packing.get_or_insert(chosen);
    }
}

/// Lowers all entry functions, which are called with at most `most_rows` rows. Every node must be a
/// parameter, a state access, a reshape, or a call of a group.
pub fn lower(module: &Module, target: &KernelTarget, most_rows: i64) -> Result<LoweredModule, LowerError> {
    let mut kernels = KernelCache::new(module, target);
    let mut entries = Vec::new();
    for (_, f) in module.functions.iter().filter(|(_, f)| f.kind == FunctionKind::Entry) {
        entries.push(EntryLowering::new(module, f, most_rows).run(&mut kernels)?);
    }
    let costs = kernels.costs;
    let (kernels, made) = kernels.kernels.into_iter().map(|g| (g.kernel, g.made)).unzip();
    let mut lowered = LoweredModule { kernels, costs, explanations: made, entries };
    only_launched(&mut lowered);
    Ok(lowered)
}

/// Removes kernels that no entry launches: those that became a part of another one.
pub fn only_launched(lowered: &mut LoweredModule) {
    let mut launches: Vec<&mut LoweredLaunch> =
        lowered.entries.iter_mut().flat_map(|e| e.launches.iter_mut().chain(&mut e.copies)).collect();
    let mut numbers = vec![None; lowered.kernels.len()];
    launches.iter().filter_map(|l| l.kernel()).for_each(|kernel| numbers[kernel] = Some(0));
    numbers.iter_mut().flatten().enumerate().for_each(|(new, number)| *number = new);
    for launch in &mut launches {
        if let LaunchWork::Kernel(kernel) = &mut launch.work {
            *kernel = numbers[*kernel].unwrap_or(*kernel);
        }
    }
    fn keep<T>(items: &mut Vec<T>, numbers: &[Option<usize>]) {
        let mut launched = numbers.iter().map(Option::is_some);
        items.retain(|_| launched.next().unwrap_or(false));
    }
    keep(&mut lowered.kernels, &numbers);
    keep(&mut lowered.costs, &numbers);
    keep(&mut lowered.explanations, &numbers);
}
