//! Launches in pieces: which ones, that they cost no barrier, and that a wrong one would be found.

use mlcc_interp::kernel::Options as RunOptions;
use mlcc_interp::steps::{Memory, Schedule, run_interleaved, run_step};
use mlcc_ir::dim::SymValues;
use mlcc_ir::step::{Base, Launch, Shares, Step, StepItem};
use mlcc_ir::text::parse_module;
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::Control;
use mlcc_passes::{Context, Options, PieceWork, Program, run_pipeline};

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

fn compiled(pieces: PieceWork, disabled: &[&str]) -> Program {
    let target = mlcc_target::resolve("x86-64-v3").unwrap();
    let level = |l: &mlcc_target::Level| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut options = Options::new(target.levels.iter().map(level).collect(), ROWS as i64);
    options.pieces = pieces;
    let mut program = Program::new(parse_module(MODULE).unwrap());
    // Fusion would draw the elementwise ops together.
    let disabled = disabled.iter().chain(&["fuse"]).map(|s| s.to_string()).collect();
    run_pipeline(&mut program, &mut Context::new(options), Control { disabled, ..Control::default() })
        .unwrap();
    program
}

fn small() -> PieceWork {
    PieceWork { bytes: 64, dots: 64, flops: 64 }
}

fn launches(step: &Step) -> Vec<&Launch> {
    let mut launches = Vec::new();
    for item in &step.items {
        match item {
            StepItem::Launch(launch) => launches.push(launch),
            StepItem::Barrier => {}
        }
    }
    launches
}

fn barriers(step: &Step) -> Vec<bool> {
    step.items.iter().map(|i| matches!(i, StepItem::Barrier)).collect()
}

#[test]
fn pieces_stand_between_barriers_that_are_there_anyway() {
    let program = compiled(small(), &[]);
    let step = &program.module.steps[0];
    let shares: Vec<Shares> = launches(step).iter().map(|l| l.shares).collect();
    // The product has 16 slices of columns; the others agree on rows, with no barrier between them.
    assert_eq!(shares, [Shares::Static, Shares::Static, Shares::Dynamic { pieces: 16 }]);
    let plain = compiled(small(), &["dynamic_shares"]);
    assert_eq!(barriers(step), barriers(&plain.module.steps[0]));
    assert!(launches(&plain.module.steps[0]).iter().all(|l| l.shares == Shares::Static));
}

#[test]
fn small_launches_stay_whole() {
    let program = compiled(PieceWork::default(), &[]);
    assert!(launches(&program.module.steps[0]).iter().all(|l| l.shares == Shares::Static));
}

fn memory(program: &Program) -> Memory {
    let plan = program.memory.as_ref().unwrap();
    let floats =
        |count: usize| (0..count).flat_map(|i| ((i * 37 % 101) as f32 / 101.0).to_le_bytes()).collect();
    let mut memory = Memory::default();
    *memory.block(Base::Weights) = floats(plan.weights_bytes as usize / 4);
    *memory.block(Base::Tokens) = floats(ROWS * 16);
    *memory.block(Base::Arena) = vec![0; plan.arena_bytes() as usize];
    *memory.block(Base::Logits) = vec![0; 4 * ROWS * 256];
    memory
}

/// Whether all schedules give what the step gives with its launches one after the other.
fn agree(program: &Program, step: &Step) -> bool {
    let sizes = SymValues::tokens(ROWS as i64);
    let kernels = &program.module.kernels;
    let mut one = memory(program);
    run_step(step, kernels, &mut one, &sizes, &RunOptions::workers(3)).unwrap();
    assert!(one.block(Base::Logits).iter().any(|&b| b != 0));
    Schedule::all(3).iter().all(|schedule| {
        let mut other = memory(program);
        run_interleaved(step, kernels, &mut other, &sizes, schedule).unwrap();
        one.block(Base::Logits) == other.block(Base::Logits)
    })
}

#[test]
fn schedules_find_wrong_pieces_and_missing_barriers() {
    let program = compiled(small(), &[]);
    let step = &program.module.steps[0];
    assert!(agree(&program, step));
    let mut wrong = step.clone();
    let first = wrong.items.iter_mut().find_map(|item| match item {
        StepItem::Launch(launch) => Some(launch),
        StepItem::Barrier => None,
    });
    first.unwrap().shares = Shares::Dynamic { pieces: 16 };
    assert!(!agree(&program, &wrong), "the second op reads rows of the first one");
    let mut wrong = step.clone();
    wrong.items.retain(|item| !matches!(item, StepItem::Barrier));
    assert!(!agree(&program, &wrong), "the product reads all rows");
}
