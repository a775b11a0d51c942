//! Metadata of kernels, so that a profile can name the items of a step and their least work.

use mlcc_ir::dim::Dim;
use mlcc_ir::step::{LaunchItem, MemoryBase, RepeatMode, SequenceFilter, StepItem, StepProgram};
use mlcc_kernels::lower::cost::LaunchCost;
use mlcc_passes::{LevelCode, LoweredProgram};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A kernel of one level; sizes are texts (`mlcc_ir::text::dim`) of `n` and `past`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    pub name: String,
    /// Bytes of weights, states and caches that one launch reads or writes.
    pub memory: String,
    /// Bytes of other tensors.
    pub values: String,
    pub ops: String,
    /// Name of a [`mlcc_kernels::lower::cost::ComputeType`].
    pub arithmetic: String,
}

/// The kernels of each level, and for each step the kernel of each item, or -1 for a barrier.
pub fn profile_json(program: &LoweredProgram) -> Value {
    let levels = program.levels.iter().map(|level| (level.name.clone(), of_level(level)));
    Value::Object(levels.collect())
}

fn of_level(level: &LevelCode) -> Value {
    let kernels: Vec<KernelInfo> = level
        .lowered
        .kernels
        .iter()
        .zip(&level.lowered.costs)
        .map(|(kernel, cost)| kernel_info(&kernel.name, cost, launch_of(&level.steps, &kernel.name)))
        .collect();
    let number = |item: &StepItem| match item {
        StepItem::Barrier | StepItem::AllGather(_) => -1,
        StepItem::Launch(l) => kernels.iter().position(|k| k.name == l.kernel).map_or(-1, |i| i as i64),
    };
    let steps = level.steps.iter().map(|step| {
        let items: Vec<i64> = step.items.iter().map(number).collect();
        (step.name.clone(), json!(items))
    });
    let steps: Map<String, Value> = steps.collect();
    // Items of a step that run for each sequence of a batch, those of them that are for sequences of one row
    // or of several, and items for the output rows.
    let each = items_where(&level.steps, |repeat| repeat.is_for_sequences());
    let of = |kind| items_where(&level.steps, move |repeat| repeat.sequences() == Some(kind));
    let wanted = items_where(&level.steps, |repeat| *repeat == RepeatMode::Outputs);
    json!({
        "kernels": kernels, "steps": steps, "each": each, "one_row": of(SequenceFilter::OneRow),
        "several_rows": of(SequenceFilter::SeveralRows), "wanted": wanted,
    })
}

/// The numbers of the items of each step that are launches of a kind.
fn items_where(steps: &[StepProgram], is: impl Fn(&RepeatMode) -> bool) -> Value {
    let of_step = |step: &StepProgram| {
        let fits = |item: &StepItem| matches!(item, StepItem::Launch(l) if is(&l.repeat));
        let items: Vec<usize> =
            step.items.iter().enumerate().filter(|(_, i)| fits(i)).map(|(i, _)| i).collect();
        (step.name.clone(), json!(items))
    };
    Value::Object(steps.iter().map(of_step).collect())
}

fn launch_of<'a>(steps: &'a [StepProgram], kernel: &str) -> Option<&'a LaunchItem> {
    steps.iter().flat_map(|s| &s.items).filter_map(StepItem::launch).find(|l| l.kernel == kernel)
}

/// Launches of one kernel have equal types, so one of them tells where the arguments of all lie.
fn kernel_info(name: &str, cost: &LaunchCost, launch: Option<&LaunchItem>) -> KernelInfo {
    let (mut memory, mut values) = (Dim::from(0), Dim::from(0));
    for (i, bytes) in cost.bytes.iter().enumerate() {
        let base = launch.and_then(|l| l.buffers.get(i)).map(|b| b.base);
        match base {
            Some(MemoryBase::Weights | MemoryBase::Adapters | MemoryBase::State | MemoryBase::Pages) => {
                memory = memory.add(bytes)
            }
            _ => values = values.add(bytes),
        }
    }
    KernelInfo {
        name: name.into(),
        memory: memory.to_string(),
        values: values.to_string(),
        ops: cost.ops.to_string(),
        arithmetic: cost.arithmetic.name().into(),
    }
}
