//! Small kernels that every worker runs itself: which ones, and the savings.

use mlcc_ir::step::{BufferRef, LaunchItem, MemoryBase, RepeatMode, StepItem, StepProgram};
use mlcc_passes::LoweredProgram;
use mlcc_passes::plan_memory::MAX_WORKERS;

/// Two products with an elementwise op before each.
const MODULE: &str = "module @m {
  param @w : f32[64, 64] role linear = tensor(\"w\")

  fn @decode(%0: f32[1, 64]) -> (f32[1, 64]) entry {
    %1 = param @w : f32[64, 64]
    %2 = exp %0 : f32[1, 64]
    %3 = matmul %2, %1 {transpose_b = true} : f32[1, 64]
    %4 = exp %3 : f32[1, 64]
    %5 = matmul %4, %1 {transpose_b = true} : f32[1, 64]
    ret %5
  }

  fn @prefill(%0: f32[n, 64]) -> (f32[n, 64]) entry {
    %1 = param @w : f32[64, 64]
    %2 = exp %0 : f32[n, 64]
    %3 = matmul %2, %1 {transpose_b = true} : f32[n, 64]
    ret %3
  }
}
";

fn compiled(disabled: &[&str]) -> LoweredProgram {
    // Fusion would draw the elementwise ops into the products.
    crate::compiled(MODULE, "x86-64-v3", &[disabled, &["fuse"]].concat())
}

fn step<'a>(program: &'a LoweredProgram, name: &str) -> &'a StepProgram {
    program.module.steps.iter().find(|s| s.name == name).unwrap()
}

fn launches(step: &StepProgram) -> Vec<&LaunchItem> {
    step.items.iter().filter_map(StepItem::launch).collect()
}

fn barriers(step: &StepProgram) -> usize {
    step.items.iter().filter(|i| matches!(i, StepItem::Barrier)).count()
}

#[test]
fn single_rows_are_computed_by_every_worker() {
    let program = compiled(&[]);
    let decode = step(&program, "decode");
    let repeats: Vec<RepeatMode> = launches(decode).iter().map(|l| l.repeat.clone()).collect();
    assert_eq!(repeats, [RepeatMode::EachWorker, RepeatMode::Once, RepeatMode::EachWorker, RepeatMode::Once]);
    assert_eq!(barriers(decode), 1, "what a product made is read by all workers");
    let plain = compiled(&["replicate"]);
    let plain = step(&plain, "decode");
    assert!(launches(plain).iter().all(|l| l.repeat == RepeatMode::Once));
    assert_eq!(barriers(plain), 3);
    let prefill = step(&program, "prefill");
    assert!(launches(prefill).iter().all(|l| l.repeat == RepeatMode::Once), "rows are shared out");
}

#[test]
fn copies_lie_apart() {
    let program = compiled(&[]);
    let plan = program.memory.as_ref().unwrap();
    assert_eq!(plan.max_workers(), Some(MAX_WORKERS));
    assert_eq!(compiled(&["replicate"]).memory.unwrap().max_workers(), None);
    let decode = step(&program, "decode");
    let buffers: Vec<&BufferRef> = launches(decode).into_iter().flat_map(|l| &l.buffers).collect();
    let (copies, shared): (Vec<&BufferRef>, Vec<&BufferRef>) =
        buffers.into_iter().filter(|b| b.base == MemoryBase::Arena).partition(|b| b.per_worker > 0);
    assert!(!copies.is_empty() && !shared.is_empty());
    let first = copies.iter().map(|b| b.offset).min().unwrap();
    assert!(shared.iter().all(|b| b.offset + b.bytes <= first));
    for b in copies {
        assert!(b.offset + b.bytes <= first + b.per_worker, "within one worker's memory");
        assert!(b.offset + b.bytes + (MAX_WORKERS - 1) * b.per_worker <= decode.arena_bytes);
    }
}
