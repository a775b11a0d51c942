//! Attention of one query appends the rows of its step to the caches itself: it needs no barrier after them,
//! and the worker with the last key has its row.

use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::{StepMemory, WorkerSchedule, run_interleaved, run_step};
use mlcc_ir::dim::SymValues;
use mlcc_ir::step::{MemoryBase, StepItem, StepProgram};
use mlcc_ir::text::parse_module;
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::{ChunkWork, LoweredProgram, PassContext, PassOptions, run_pipeline};

const CONTEXT: usize = 2048;
const HEADS: usize = 5;
const SIZE: usize = 16;

/// Keys and values are parts of the input, as is the first query %1; `before` is the text before the
/// attention of `query`.
fn module(before: &str, query: &str, attributes: &str) -> String {
    format!(
        "module @m {{
  state @k : f32[{CONTEXT}, {HEADS}, {SIZE}] init 0.0
  state @v : f32[{CONTEXT}, {HEADS}, {SIZE}] init 0.0

  fn @decode(%0: f32[1, 15, {SIZE}]) -> (f32[1, {HEADS}, {SIZE}]) entry {{
    %1 = slice %0 {{axis = 1, start = 0, len = {HEADS}}} : f32[1, {HEADS}, {SIZE}]
    %2 = slice %0 {{axis = 1, start = 5, len = {HEADS}}} : f32[1, {HEADS}, {SIZE}]
    %3 = slice %0 {{axis = 1, start = 10, len = {HEADS}}} : f32[1, {HEADS}, {SIZE}]
    %4 = cache.append @k, %2 : f32[past + 1, {HEADS}, {SIZE}]
    %5 = cache.append @v, %3 : f32[past + 1, {HEADS}, {SIZE}]
{before}    %8 = attention {query}, %4, %5 {attributes} : f32[1, {HEADS}, {SIZE}]
    ret %8
  }}
}}
"
    )
}

fn attributes(window: usize) -> String {
    format!("{{scale = 0.5, softcap = 0.0, window = {window}, sinks = 0, alibi = false, prefix = false}}")
}

fn compiled(text: &str, pieces: ChunkWork) -> LoweredProgram {
    let target = mlcc_target::resolve_target("x86-64-v3").unwrap();
    let level = |l: &mlcc_target::FeatureLevel| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut options = PassOptions::new(target.levels.iter().map(level).collect(), 1);
    options.min_chunk_work = Some(pieces);
    let mut program = LoweredProgram::new(parse_module(text).unwrap());
    run_pipeline(&mut program, &mut PassContext::new(options), PipelineControl::default()).unwrap();
    program
}

fn barriers(step: &StepProgram) -> usize {
    step.items.iter().filter(|i| matches!(i, StepItem::Barrier)).count()
}

fn value(i: usize) -> f32 {
    (i * 37 % 101) as f32 / 101.0
}

fn floats(values: impl Iterator<Item = usize>) -> Vec<u8> {
    values.flat_map(|i| value(i).to_le_bytes()).collect()
}

fn memory(program: &LoweredProgram) -> StepMemory {
    let plan = program.memory.as_ref().unwrap();
    let mut memory = StepMemory::default();
    *memory.base_memory(MemoryBase::Tokens) = floats(0..3 * HEADS * SIZE);
    let (pages, table) = plan.example_pages();
    *memory.base_memory(MemoryBase::Pages) = floats(7..7 + pages.len() / 4);
    *memory.base_memory(MemoryBase::PageTable) = table;
    *memory.base_memory(MemoryBase::Arena) = vec![0; plan.arena_bytes() as usize];
    *memory.base_memory(MemoryBase::Logits) = vec![0; 4 * HEADS * SIZE];
    memory
}

/// Runs a step in every order of three workers and checks the results and the caches.
fn check(program: &LoweredProgram, past: usize) {
    let (step, kernels) = (&program.module.steps[0], &program.module.kernels);
    let sizes = SymValues { n: 1, b: 1, past: past as i64 };
    let mut one = memory(program);
    run_step(step, kernels, &mut one, &sizes, &RunOptions::with_workers(3)).unwrap();
    let mut expected = memory(program);
    let row = 4 * HEADS * SIZE;
    let plan = program.memory.as_ref().unwrap();
    let entry =
        |i: usize| *expected.clone().base_memory(MemoryBase::PageTable).as_chunks::<4>().0.get(i).unwrap();
    let page = i32::from_le_bytes(entry(past / 64)) as usize * plan.page_bytes as usize;
    for (state, &(offset, _)) in plan.states.iter().enumerate() {
        let first = (state + 1) * HEADS * SIZE;
        let at = page + offset as usize + past % 64 * row;
        expected.base_memory(MemoryBase::Pages)[at..at + row]
            .copy_from_slice(&floats(first..first + HEADS * SIZE));
    }
    assert!(
        one.base_memory(MemoryBase::Pages) == expected.base_memory(MemoryBase::Pages),
        "caches with {past} tokens before"
    );
    for schedule in WorkerSchedule::all_variants(3) {
        let mut other = memory(program);
        run_interleaved(step, kernels, &mut other, &sizes, &schedule).unwrap();
        for base in [MemoryBase::Logits, MemoryBase::Pages] {
            assert!(one.base_memory(base) == other.base_memory(base), "{past} tokens before, {schedule:?}");
        }
    }
}

#[test]
fn whoever_has_the_last_key_appends_it() {
    let pieces = ChunkWork { bytes: 1 << 7, ..ChunkWork::default() };
    for (window, work) in [(0, ChunkWork::default()), (0, pieces), (100, ChunkWork::default())] {
        let program = compiled(&module("", "%1", &attributes(window)), work);
        assert_eq!(barriers(&program.module.steps[0]), 1, "only before slices are joined");
        // One slice, few of them, whole and short ones, empty ones after the last.
        for past in [0, 1, 15, 16, 63, 64, 100, 127, 128, 200, 319, 512, 543, 2047] {
            check(&program, past);
        }
    }
}

#[test]
fn the_first_of_two_attentions_appends() {
    let attributes = attributes(0);
    let before = format!(
        "    %6 = attention %1, %4, %5 {attributes} : f32[1, {HEADS}, {SIZE}]\n    %7 = exp %6 : f32[1, {HEADS}, {SIZE}]\n"
    );
    // The first of two attentions appends; the second one waits for it.
    let text = module(&before, "%7", &attributes);
    let program = compiled(&text, ChunkWork::default());
    for past in [0, 63, 64, 200] {
        check(&program, past);
    }
}
