//! The items of a step that a caller without need of logits leaves out.

use crate::model::{PREFILL, without_adapters};
use mlcc_ir::step::{MemoryBase, StepItem, StepProgram};
use std::ops::Range;

/// The items of `prefill` that make nothing but logits: those around the launches that write them which use neither states nor pages.
/// `None` for other entry points and for steps of several ranks, whose callers always want logits.
pub(crate) fn logits_only_items(step: &StepProgram) -> Option<Range<usize>> {
    let ranks = step.items.iter().any(|item| matches!(item, StepItem::AllGather(_)));
    if without_adapters(&step.name) != PREFILL || ranks {
        return None;
    }
    let uses = |item: &StepItem, bases: &[MemoryBase]| match item {
        StepItem::Launch(launch) => launch.buffers.iter().any(|buffer| bases.contains(&buffer.base)),
        StepItem::AllGather(_) | StepItem::Barrier => false,
    };
    let writes_logits = |item: &StepItem| uses(item, &[MemoryBase::Logits]);
    let has_state = |item: &StepItem| uses(item, &[MemoryBase::State, MemoryBase::Pages]);
    let (first, last) =
        (step.items.iter().position(writes_logits)?, step.items.iter().rposition(writes_logits)?);
    let start = step.items[..first].iter().rposition(has_state).map_or(0, |before| before + 1);
    let end = step.items[last..].iter().position(has_state).map_or(step.items.len(), |after| last + after);
    Some(start..end)
}
