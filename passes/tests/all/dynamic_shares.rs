//! Launches in pieces: which ones, that they cost no barrier, and that a wrong one would be found.

use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::{StepMemory, WorkerSchedule, run_interleaved, run_step};
use mlcc_ir::dim::SymValues;
use mlcc_ir::step::{LaunchItem, MemoryBase, StepItem, StepProgram, WorkSchedule};
use mlcc_ir::text::parse_module;
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::{ChunkWork, LoweredProgram, PassContext, PassOptions, run_pipeline};

/// Two ops over the same shares of rows, and a product over all of them.
const MODULE: &str = "module @m {
  param @w : f32[256, 16] role linear = tensor(\"w\")

  fn @prefill(%0: f32[n, 16]) -> (f32[n, 256]) entry {
    %1 = param @w : f32[256, 16]
    %2 = exp %0 : f32[n, 16]
    %3 = tanh %2 : f32[n, 16]
    %4 = matmul %3, %1 {transpose_b = true} : f32[n, 256]
    ret %4
  }
}
";

const ROWS: usize = 16;

/// Attention of one query over a cache of `CONTEXT` rows, 128 bytes each.
fn attention() -> String {
    format!(
        "module @m {{
  state @k : f32[{CONTEXT}, 2, 16] init 0.0
  state @v : f32[{CONTEXT}, 2, 16] init 0.0

  fn @decode(%0: f32[1, 4, 16]) -> (f32[1, 4, 16]) entry {{
    %1 = slice %0 {{axis = 1, start = 0, len = 2}} : f32[1, 2, 16]
    %2 = slice %0 {{axis = 1, start = 2, len = 2}} : f32[1, 2, 16]
    %3 = cache.append @k, %1 : f32[past + 1, 2, 16]
    %4 = cache.append @v, %2 : f32[past + 1, 2, 16]
    %5 = attention %0, %3, %4 {{scale = 0.5, softcap = 0.0, window = 0, sinks = 0, alibi = false, prefix = false}} : f32[1, 4, 16]
    ret %5
  }}
}}
"
    )
}

const CONTEXT: usize = 4096;

fn compiled(pieces: ChunkWork, disabled: &[&str]) -> LoweredProgram {
    of_text(MODULE, pieces, disabled)
}

fn of_text(text: &str, pieces: ChunkWork, disabled: &[&str]) -> LoweredProgram {
    let target = mlcc_target::resolve_target("x86-64-v3").unwrap();
    let level = |l: &mlcc_target::FeatureLevel| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut options = PassOptions::new(target.levels.iter().map(level).collect(), ROWS as i64);
    options.min_chunk_work = Some(pieces);
    let mut program = LoweredProgram::new(parse_module(text).unwrap());
    // Fusion would draw the elementwise ops together.
    let disabled = disabled.iter().chain(&["fuse"]).map(|s| s.to_string()).collect();
    run_pipeline(
        &mut program,
        &mut PassContext::new(options),
        PipelineControl { disabled, ..PipelineControl::default() },
    )
    .unwrap();
    program
}

fn small() -> ChunkWork {
    ChunkWork { bytes: 64, dots: 64, flops: 64, times_of_cache: 64 }
}

fn launches(step: &StepProgram) -> Vec<&LaunchItem> {
    step.items.iter().filter_map(StepItem::launch).collect()
}

fn barriers(step: &StepProgram) -> Vec<bool> {
    step.items.iter().map(|i| matches!(i, StepItem::Barrier)).collect()
}

#[test]
fn pieces_stand_between_barriers_that_are_there_anyway() {
    let program = compiled(small(), &[]);
    let step = &program.module.steps[0];
    let shares: Vec<WorkSchedule> = launches(step).iter().map(|l| l.schedule.clone()).collect();
    // The product has 16 slices of columns; the others agree on rows, with no barrier between them.
    assert_eq!(
        shares,
        [WorkSchedule::Static, WorkSchedule::Static, WorkSchedule::Dynamic { chunks: 16.into() }]
    );
    let plain = compiled(small(), &["dynamic_shares"]);
    assert_eq!(barriers(step), barriers(&plain.module.steps[0]));
    assert!(launches(&plain.module.steps[0]).iter().all(|l| l.schedule == WorkSchedule::Static));
}

#[test]
fn small_launches_stay_whole() {
    let program = compiled(ChunkWork::default(), &[]);
    assert!(launches(&program.module.steps[0]).iter().all(|l| l.schedule == WorkSchedule::Static));
}

#[test]
fn attention_has_more_pieces_the_longer_the_sequence() {
    let attention = attention();
    let compiled =
        |bytes| of_text(&attention, ChunkWork { bytes, ..ChunkWork::default() }, &[]).module.steps[0].clone();
    let shares = |step: &StepProgram| launches(step).iter().map(|l| l.schedule.clone()).collect::<Vec<_>>();
    // Pieces of 32 KiB; keys and values of a row take 256 bytes.
    let some = compiled(1 << 9);
    let pieces = shares(&some).into_iter().find_map(|s| match s {
        WorkSchedule::Dynamic { chunks: pieces } => Some(pieces),
        WorkSchedule::Static => None,
    });
    let pieces = pieces.unwrap();
    let at = |past| pieces.eval(&SymValues { n: 1, b: 1, past });
    // There are never more slices than 32.
    assert_eq!([0, 100, 1023, 2047, 4095, 9000].map(at), [0, 0, 8, 16, 32, 32], "{pieces}");
    // At most 4096 rows.
    let plain = compiled(1 << 12);
    assert!(shares(&plain).iter().all(|s| *s == WorkSchedule::Static));
    assert_eq!(barriers(&some), barriers(&plain));
}

#[test]
fn pieces_of_attention_are_as_good_as_shares() {
    let work = ChunkWork { bytes: 2, ..ChunkWork::default() };
    let program = of_text(&attention(), work, &[]);
    let step = &program.module.steps[0];
    assert!(launches(step).iter().any(|l| l.schedule != WorkSchedule::Static));
    // Fewer items than workers, fewer than pieces (every key head of a slice is one), slices with all heads.
    for past in [3, 700, 2100] {
        assert!(agree(&program, step, &SymValues { n: 1, b: 1, past }), "{past}");
    }
}

fn floats(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| ((i * 37 % 101) as f32 / 101.0).to_le_bytes()).collect()
}

fn memory(program: &LoweredProgram) -> StepMemory {
    let plan = program.memory.as_ref().unwrap();
    let mut memory = StepMemory::default();
    *memory.base_memory(MemoryBase::Weights) = floats(plan.weights_bytes as usize / 4);
    *memory.base_memory(MemoryBase::Tokens) = floats(ROWS * 16);
    *memory.base_memory(MemoryBase::State) = floats(plan.state_bytes as usize / 4);
    let (pages, table) = plan.example_pages();
    *memory.base_memory(MemoryBase::Pages) = floats(pages.len() / 4);
    *memory.base_memory(MemoryBase::PageTable) = table;
    *memory.base_memory(MemoryBase::Arena) = vec![0; plan.arena_bytes() as usize];
    *memory.base_memory(MemoryBase::Logits) = vec![0; 4 * ROWS * 256];
    memory
}

/// True if all schedules give the same results as the launches of the step in order.
fn agree(program: &LoweredProgram, step: &StepProgram, sizes: &SymValues) -> bool {
    let kernels = &program.module.kernels;
    let mut one = memory(program);
    run_step(step, kernels, &mut one, sizes, &RunOptions::with_workers(3)).unwrap();
    assert!(one.base_memory(MemoryBase::Logits).iter().any(|&b| b != 0));
    WorkerSchedule::all_variants(3).iter().all(|schedule| {
        let mut other = memory(program);
        run_interleaved(step, kernels, &mut other, sizes, schedule).unwrap();
        one.base_memory(MemoryBase::Logits) == other.base_memory(MemoryBase::Logits)
    })
}

#[test]
fn schedules_find_wrong_pieces_and_missing_barriers() {
    let program = compiled(small(), &[]);
    let step = &program.module.steps[0];
    let sizes = SymValues::for_tokens(ROWS as i64);
    assert!(agree(&program, step, &sizes));
    let mut wrong = step.clone();
    let first = wrong.items.iter_mut().find_map(|item| match item {
        StepItem::Launch(launch) => Some(launch),
        StepItem::AllGather(_) | StepItem::Barrier => None,
    });
    first.unwrap().schedule = WorkSchedule::Dynamic { chunks: 16.into() };
    assert!(!agree(&program, &wrong, &sizes), "the second op reads rows of the first one");
    let mut wrong = step.clone();
    wrong.items.retain(|item| !matches!(item, StepItem::Barrier));
    assert!(!agree(&program, &wrong, &sizes), "the product reads all rows");
}
