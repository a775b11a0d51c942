//! GPU launches that do not depend on each other: which become one, and in which order.

use crate::lowering::memory;
use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::graph::Tensor;
use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::run_step;
use mlcc_ir::dim::SymValues;
use mlcc_ir::step::{LaunchItem, MemoryBase, StepItem, StepProgram};
use mlcc_ir::testing::TestRng;
use mlcc_passes::LoweredProgram;

/// Two products of one row that a third one adds up, and a state that the products read: its new value can
/// only be copied.
const MODULE: &str = "module @m {
  param @a : f32[512, 256] role linear = tensor(\"a\")
  param @b : f32[512, 256] role linear = tensor(\"b\")
  param @c : f32[256, 512] role linear = tensor(\"c\")
  state @x : f32[256] init 0.0

  fn @decode(%0: f32[1, 256]) -> (f32[1, 256]) entry {
    %1 = param @a : f32[512, 256]
    %2 = param @b : f32[512, 256]
    %3 = param @c : f32[256, 512]
    %4 = state.read @x : f32[256]
    %5 = add %0, %4 : f32[1, 256]
    %6 = matmul %5, %1 {transpose_b = true} : f32[1, 512]
    %7 = mul %0, %4 : f32[1, 256]
    %8 = matmul %7, %2 {transpose_b = true} : f32[1, 512]
    %9 = mul %6, %8 : f32[1, 512]
    %10 = matmul %9, %3 {transpose_b = true} : f32[1, 256]
    %11 = reshape %0 {dims = [256]} : f32[256]
    state.write @x, %11
    ret %10
  }
}
";

fn compiled(disabled: &[&str]) -> LoweredProgram {
    // Fusion would draw the elementwise ops into the products.
    crate::compiled(MODULE, "sm_80", &[disabled, &["fuse"]].concat())
}

fn launches(program: &LoweredProgram) -> Vec<LaunchItem> {
    let step: &StepProgram = program.module.steps.iter().find(|s| s.name == "decode").unwrap();
    step.items.iter().filter_map(StepItem::launch).cloned().collect()
}

fn names(launches: &[LaunchItem]) -> Vec<&str> {
    launches.iter().map(|l| l.kernel.as_str()).collect()
}

#[test]
fn products_that_need_nothing_of_each_other_are_one_launch() {
    let program = compiled(&[]);
    let joined = launches(&program);
    assert_eq!(
        names(&joined),
        ["add_beside_mul", "matmul_512x256_x2", "mul_2_beside_cast", "matmul_256x512"]
    );
    let plain = launches(&compiled(&["join_launches"]));
    assert_eq!(plain.len(), 7, "{:?}", names(&plain));
    let blocks = |l: &LaunchItem| l.grid.as_ref().unwrap().blocks[0].as_const().unwrap();
    let one = plain.iter().find(|l| l.kernel.starts_with("matmul_512x256")).unwrap();
    assert_eq!(blocks(&joined[1]), 2 * blocks(one));
    let kept: Vec<&str> = program.module.kernels.iter().map(|k| k.name.as_str()).collect();
    assert!(!kept.contains(&"mul"), "{kept:?}: only what is launched");
}

/// The results of two tokens, and the state after them, as bits.
fn two_tokens(program: &LoweredProgram) -> Vec<Vec<u8>> {
    let mut rng = TestRng(5);
    let mut numbers =
        |count: usize| (0..count).map(|_| rng.below(2001) as f32 / 1000.0 - 1.0).collect::<Vec<f32>>();
    let shapes =
        program.module.params.values().map(|p| p.ty.dims.iter().map(|d| d.as_const().unwrap() as usize));
    let shapes: Vec<Vec<usize>> = shapes.map(Iterator::collect).collect();
    let values: Vec<Tensor> =
        shapes.iter().map(|shape| Tensor::f32(shape, &numbers(shape.iter().product()))).collect();
    let mut memory = memory(program, &values);
    let level = &program.levels[0];
    let step = level.steps.iter().find(|s| s.name == "decode").unwrap();
    let mut results = Vec::new();
    for past in 0..2 {
        *memory.base_memory(MemoryBase::Tokens) = numbers(256).iter().flat_map(|x| x.to_le_bytes()).collect();
        *memory.base_memory(MemoryBase::Logits) = vec![0xff; 4 * 256];
        let sizes = SymValues { past, ..SymValues::for_tokens(1) };
        run_step(step, &level.lowered.kernels, &mut memory, &sizes, &RunOptions::with_workers(1)).unwrap();
        results.push(memory.base_memory(MemoryBase::Logits).clone());
    }
    results.push(memory.base_memory(MemoryBase::State).clone());
    results
}

#[test]
fn results_have_the_same_bits() {
    let (joined, apart) = (two_tokens(&compiled(&[])), two_tokens(&compiled(&["join_launches"])));
    assert_ne!(joined[0], joined[1]);
    assert_eq!(joined, apart);
}

#[test]
fn a_state_is_copied_after_its_last_reader() {
    let joined = launches(&compiled(&[]));
    let touches = |l: &LaunchItem| l.buffers.iter().any(|b| b.base == MemoryBase::State);
    let of_state: Vec<usize> =
        joined.iter().enumerate().filter(|(_, l)| touches(l)).map(|(i, _)| i).collect();
    assert_eq!(of_state, [0, 2]);
}

/// A product of a norm that is mixed with that of the token before, which a state keeps, between another
/// product and another norm.
const SHIFTED: &str = "module @m {
  param @w : f32[256, 256] role linear = tensor(\"w\")
  param @scale : f32[256] role vector = tensor(\"scale\")
  state @x : f32[256] init 0.0

  fn @decode(%0: f32[1, 256]) -> (f32[1, 256]) entry {
    %1 = param @w : f32[256, 256]
    %2 = param @scale : f32[256]
    %3 = matmul %0, %1 {transpose_b = true} : f32[1, 256]
    %4 = rms_norm %3, %2 {eps = 1e-5} : f32[1, 256]
    %5 = state.read @x : f32[256]
    %6 = sub %5, %4 : f32[1, 256]
    %7 = mul %6, %2 : f32[1, 256]
    %8 = add %4, %7 : f32[1, 256]
    %9 = matmul %8, %1 {transpose_b = true} : f32[1, 256]
    %10 = reshape %4 {dims = [256]} : f32[256]
    state.write @x, %10
    %11 = rms_norm %9, %2 {eps = 1e-5} : f32[1, 256]
    ret %11
  }
}
";

#[test]
fn a_row_that_a_state_keeps_is_made_behind_the_product_that_reads_the_old_one() {
    let compiled = |disabled: &[&str]| crate::compiled(SHIFTED, "sm_80", disabled);
    let program = compiled(&[]);
    let joined = launches(&program);
    assert_eq!(names(&joined), ["matmul_256x256", "matmul_256x256_2", "norm_x2"]);
    let floats = |bytes: Vec<u8>| {
        let each = bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())));
        each.collect::<Vec<_>>()
    };
    let others = [["fuse"], ["join_launches"]].map(|disabled| two_tokens(&compiled(&disabled)));
    for other in others {
        for (found, want) in two_tokens(&program).into_iter().zip(other) {
            let tolerance = Tolerance { absolute: 1e-5, relative: 1e-5 };
            compare(floats(found), floats(want), tolerance).unwrap();
        }
    }
}
