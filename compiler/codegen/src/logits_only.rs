//! The items of a step that a caller without need of logits leaves out.

use mlcc_abi::EntryPoint;
use mlcc_ir::step::{MemoryBase, StepItem, StepProgram};
use std::ops::Range;

/// The items of `prefill` that make only logits: those around the launches that write them which use neither
/// states nor pages. `None` for other entry points and for steps of several ranks, whose callers always need
/// logits.
pub(crate) fn logits_only_items(step: &StepProgram) -> Option<Range<usize>> {
    let ranks = step.items.iter().any(|item| matches!(item, StepItem::AllGather(_)));
    let entry = EntryPoint::of_function(&step.name).map(|(entry, _)| entry);
    if entry != Some(EntryPoint::Prefill) || ranks {
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

#[cfg(test)]
mod tests {
    use super::logits_only_items;
    use mlcc_ir::step::{BufferRef, LaunchItem, MemoryBase, RepeatMode, StepItem, StepProgram, WorkSchedule};

    fn launch(bases: &[MemoryBase]) -> StepItem {
        let buffers = bases.iter().map(|&base| BufferRef::fixed(base, 0, 64)).collect();
        let (repeat, schedule) = (RepeatMode::Once, WorkSchedule::Static);
        StepItem::Launch(LaunchItem {
            kernel: "k".into(),
            buffers,
            dims: vec![],
            grid: None,
            repeat,
            schedule,
        })
    }

    fn step(name: &str, items: Vec<StepItem>) -> StepProgram {
        StepProgram { name: name.into(), items, arena_bytes: 0 }
    }

    #[test]
    fn items_between_the_last_state_and_the_copies_are_for_logits() {
        let items = || {
            vec![
                launch(&[MemoryBase::State, MemoryBase::Arena]),
                StepItem::Barrier,
                launch(&[MemoryBase::Pages, MemoryBase::Arena]),
                StepItem::Barrier,
                launch(&[MemoryBase::Arena]),
                StepItem::Barrier,
                launch(&[MemoryBase::Arena, MemoryBase::Logits]),
                launch(&[MemoryBase::Arena, MemoryBase::State]),
            ]
        };
        assert_eq!(logits_only_items(&step("prefill", items())), Some(3..7));
        assert_eq!(logits_only_items(&step("adapted_prefill", items())), Some(3..7));
        for other in ["decode", "prefill_logits", "step"] {
            assert_eq!(logits_only_items(&step(other, items())), None);
        }
        let without_copies = items().into_iter().take(7).collect();
        assert_eq!(logits_only_items(&step("prefill", without_copies)), Some(3..7));
    }
}
