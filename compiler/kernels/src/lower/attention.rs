//! Groups around an attention: the generator for the machine and the number of queries, in one kernel or two.

use super::LowerError;
use super::group::{ArgContract, GroupKernel, Merge, finished};
use crate::attention::{Problem, decode, gpu, merge, prefill, schedule};
use crate::generic::inline::Inliner;
use crate::params::KernelTarget;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, Node};
use mlcc_ir::kernel::{Access, BufId};
use mlcc_ir::types::DType;
use mlcc_target::Arch;

/// The schedule for a machine and a shape.
enum Schedule {
    Decode(schedule::Params),
    Prefill(prefill::Params),
    Gpu(gpu::Params),
}

impl Schedule {
    fn choose(a: &Problem, target: &KernelTarget) -> Schedule {
        match target.arch {
            Arch::Nvptx => Schedule::Gpu(gpu::Params::choose(a)),
            Arch::X86_64 | Arch::Aarch64 if a.n.as_const() == Some(1) => {
                Schedule::Decode(schedule::Params::choose(a, target))
            }
            Arch::X86_64 | Arch::Aarch64 => Schedule::Prefill(prefill::Params::choose(a, target)),
        }
    }
    fn slices(&self) -> i64 {
        match self {
            Schedule::Decode(p) => p.slices(),
            Schedule::Prefill(_) => 1,
            Schedule::Gpu(p) => p.slices,
        }
    }
    fn emit(&self, kb: &mut KernelBuilder, a: &Problem, out: BufId) {
        match *self {
            Schedule::Decode(p) => decode::emit(kb, a, p, out),
            Schedule::Prefill(p) => prefill::emit(kb, a, p, out),
            Schedule::Gpu(p) => gpu::emit(kb, a, p, out),
        }
    }
    fn emit_merge(&self, kb: &mut KernelBuilder, a: &Problem, partial: BufId, out: BufId) {
        match *self {
            Schedule::Decode(p) => merge::emit(kb, a, p, partial, out),
            Schedule::Gpu(p) => gpu::emit_merge(kb, a, p, partial, out),
            Schedule::Prefill(_) => {}
        }
    }
}

/// `kb` has the inputs of the group as parameters, bound in `inliner`.
pub(super) fn attention_group(
    mut kb: KernelBuilder,
    f: &Function,
    node: &Node,
    inliner: Inliner,
    target: &KernelTarget,
) -> Result<GroupKernel, LowerError> {
    let unfit = || LowerError::internal(format!("group {} is not an attention alone", f.name));
    if node.outputs != f.outputs {
        return Err(unfit());
    }
    let a = Problem::new(node, inliner).ok_or_else(unfit)?;
    // A GPU has an instruction for either.
    let a = if target.arch == Arch::Nvptx { a } else { a.in_powers_of_two() };
    let arg = |access| ArgContract { access, partition: None, in_place: vec![] };
    let inputs = f.inputs.iter().map(|_| arg(Access::In));
    let args: Vec<ArgContract> = inputs.chain([arg(Access::Out)]).collect();
    let schedule = Schedule::choose(&a, target);
    let elements = f.ty(f.outputs[0]).elements();
    if schedule.slices() == 1 {
        let out = kb.param("out0", DType::F32, elements, Access::Out, 64);
        schedule.emit(&mut kb, &a, out);
        return finished(kb, args, target);
    }
    let partial = Dim::from(schedule.slices() * a.heads() * schedule::Params::partial(&a));
    let between = kb.param("partial", DType::F32, partial.clone(), Access::Out, 64);
    schedule.emit(&mut kb, &a, between);

    let mut merge = KernelBuilder::new(format!("{}_merge", kb.kernel().name));
    let from = merge.param("partial", DType::F32, partial.clone(), Access::In, 64);
    let out = merge.param("out0", DType::F32, elements, Access::Out, 64);
    schedule.emit_merge(&mut merge, &a, from, out);
    let kernel = Box::new(finished(merge, vec![arg(Access::In), arg(Access::Out)], target)?);
    let first = finished(kb, args, target)?;
    Ok(GroupKernel { merge: Some(Merge { kernel, bytes: partial.scale(4) }), ..first })
}
