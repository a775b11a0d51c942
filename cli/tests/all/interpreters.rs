//! The reference cases through the interpreters: operations on tensors before any pass, and kernels for CPUs
//! and for GPUs (in lockstep, with bounds, poison and races checked) after all passes and with each optional
//! one switched off. Interpreting kernels is slow, so they get short prompts, whose logits the graph
//! interpreter knows.

use crate::cases::{
    self, FAMILIES, assert_close, find, golden, ids, interpreted, options, other_namings, program, recurrent,
};
use mlcc_driver::compile::BuildSource;
use mlcc_driver::weights::{WeightWriteError, pack_param, param_of_rank};
use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::{StepMemory, run_step};
use mlcc_ir::dim::SymValues;
use mlcc_ir::step::{MemoryBase, StepItem};
use mlcc_passes::quantize_cache::CacheType;
use mlcc_passes::scheme::ActivationType;
use mlcc_passes::{LoweredProgram, PIPELINE};

#[test]
fn graph_interpreter_equals_references() {
    for case in recurrent().chain(other_namings()) {
        let source = BuildSource::open(&options(case, "f32")).unwrap();
        let module =
            mlcc_driver::model::build_module(case, &source.model.config.architecture, source.context, 1)
                .unwrap();
        let golden = golden(case);
        let prompts: Vec<Vec<i32>> = golden.prompts.iter().map(ids).collect();
        let found = interpreted(&module, &source, &prompts);
        for (prompt, found) in golden.prompts.iter().zip(&found) {
            assert_close(case, &prompt.logits_last, found, 1e-5);
        }
    }
}

/// The memory of a sequence: packed weights, fresh states, scratch.
pub fn memory(program: &LoweredProgram, source: &BuildSource) -> StepMemory {
    memory_of_rank(program, source, 0)
}

/// [`memory`] on a rank.
pub fn memory_of_rank(program: &LoweredProgram, source: &BuildSource, rank: usize) -> StepMemory {
    let plan = program.memory.as_ref().unwrap();
    let mut memory = StepMemory::default();
    let mut weights = vec![0u8; plan.weights_bytes as usize];
    for (param, &(offset, _)) in program.module.params.values().zip(&plan.params) {
        let mut at = offset as usize;
        let param = &param_of_rank(param, rank).unwrap();
        pack_param::<WeightWriteError>(
            &source.checkpoint,
            param,
            program.pack_options(&param.name),
            |bytes| {
                weights[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
                Ok(())
            },
        )
        .unwrap();
    }
    let mut states = vec![0; plan.state_bytes as usize];
    let states_of = program.module.states.iter().zip(&plan.states);
    for ((_, state), &(offset, bytes)) in states_of.filter(|((id, _), _)| !plan.is_paged(*id)) {
        for value in states[offset as usize..(offset + bytes) as usize].chunks_exact_mut(4) {
            value.copy_from_slice(&(state.init as f32).to_le_bytes());
        }
    }
    *memory.base_memory(MemoryBase::Weights) = weights;
    *memory.base_memory(MemoryBase::State) = states;
    let (pages, table) = plan.example_pages();
    *memory.base_memory(MemoryBase::Pages) = pages;
    *memory.base_memory(MemoryBase::PageTable) = table;
    *memory.base_memory(MemoryBase::Arena) = vec![0; plan.arena_bytes() as usize];
    memory
}

/// Logits after a prompt: its first tokens as one prefill, the last one through decode.
fn run_kernels(program: &LoweredProgram, mut memory: StepMemory, ids: &[i32], vocab: usize) -> Vec<f32> {
    let level = &program.levels[0];
    let (last, first) = ids.split_last().unwrap();
    for (entry, ids) in [("prefill", first), ("decode", &[*last][..])] {
        let step = level.steps.iter().find(|s| s.name == entry).unwrap();
        *memory.base_memory(MemoryBase::Tokens) = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        *memory.base_memory(MemoryBase::Logits) = vec![0; 4 * vocab];
        let sizes = SymValues::for_tokens(ids.len() as i64);
        run_step(step, &level.lowered.kernels, &mut memory, &sizes, &RunOptions::with_workers(2))
            .unwrap_or_else(|e| panic!("{entry}: {e}"));
    }
    memory.base_memory(MemoryBase::Logits).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Kernels of a case against the graph interpreter on the same stored weights.
fn check(case: &str, quant: &str, target: &str, disabled: Option<&str>, tolerance: f32) {
    let mut options = options(case, quant);
    options.target = target.into();
    options.disabled_passes = disabled.map(String::from).into_iter().collect();
    let prompt = ids(&golden(case).prompts[1])[..3].to_vec();
    let (graph, source) = program(&options, Some(cases::LAST_GRAPH_PASS));
    let expected = interpreted(&graph.module, &source, std::slice::from_ref(&prompt)).remove(0);
    let (program, source) = program(&options, None);
    let found = run_kernels(&program, memory(&program, &source), &prompt, expected.len());
    let what = format!("{case} in {quant} for {target} without {disabled:?}");
    assert_close(&what, &expected, &found, tolerance);
}

const TARGETS: [&str; 4] = ["x86-64-v2", "x86-64-v4-bf16", "armv8.6", "sm_80"];

#[test]
fn kernels_equal_the_graph() {
    for case in recurrent() {
        for target in TARGETS {
            check(case, "f32", target, None, 2e-5);
        }
    }
}

#[test]
fn kernels_equal_the_graph_without_any_one_pass() {
    for pass in PIPELINE.iter().filter(|p| p.optional) {
        for target in ["x86-64-v3", "sm_80"] {
            check("rwkv4-hf-odd", "f32", target, Some(pass.name), 2e-5);
        }
        check("rwkv6-hf", "f32", "sm_80", Some(pass.name), 2e-5);
        check("rwkv7-hf", "f32", "x86-64-v3", Some(pass.name), 2e-5);
    }
}

#[test]
fn kernels_of_packed_weights_equal_the_graph() {
    for quant in ["f16", "bf16bf16", "q8f16_1", "q4f16_2", "q4i8"] {
        let tolerance = match cases::scheme(quant).activation {
            // The same bounds as in matrix.rs: block floating point, and int8 codes at a rounding edge.
            ActivationType::F32 => 1e-3,
            ActivationType::BF16 => 1.6e-2,
            ActivationType::I8 => 2e-2,
        };
        for target in TARGETS {
            check("rwkv4-hf-odd", quant, target, None, tolerance);
            check("rwkv7-hf", quant, target, None, tolerance);
        }
    }
}

/// A graph of a token's launches, recorded once, then serves sequences of every length.
#[test]
fn grids_of_a_token_on_a_gpu_do_not_depend_on_the_past() {
    for case in recurrent().chain(FAMILIES).filter(|case| find(case).is_some()) {
        for (quant, cache) in [("f32", CacheType::F32), ("q4f16", CacheType::I8)] {
            let mut options = options(case, quant);
            options.target = "sm_80".into();
            options.kv_cache = Some(cache);
            let (program, _) = program(&options, None);
            let steps = &program.levels[0].steps;
            let decode = steps.iter().find(|s| s.name == "decode").unwrap();
            for item in &decode.items {
                let StepItem::Launch(launch) = item else { continue };
                let grid = launch.grid.as_ref().unwrap();
                let fixed = grid.blocks.iter().all(|blocks| blocks.as_const().is_some());
                assert!(fixed, "{case}: {} has blocks {:?}", launch.kernel, grid.blocks);
            }
        }
    }
}
