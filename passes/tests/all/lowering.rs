//! Random modules through the whole pipeline: the steps, interpreted kernel by kernel, against the graph as
//! it was.

use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::equivalence::{RandomWeights, random_inputs};
use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::{ExecutionOptions as RunOptions, KernelBuffer};
use mlcc_interp::steps::{StepMemory, WorkerSchedule, run_interleaved, run_step};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::Module;
use mlcc_ir::step::MemoryBase;
use mlcc_ir::testing::graph::{GraphOptions, random_module};
use mlcc_ir::text::print_module;
use mlcc_ir::types::Packing;
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::{
    ChunkWork, LoweredProgram, PassContext, PassError, PassOptions, QuantScheme, run_pass, run_pipeline,
};

/// The module with one output: all outputs of an entry share a place in this test.
fn one_output(seed: u64) -> Module {
    let mut module = random_module(seed, &GraphOptions { nodes: 14, ..GraphOptions::SMOOTH });
    for id in module.functions.ids().collect::<Vec<_>>() {
        if module.functions[id].name == "main" {
            module.functions[id].outputs.truncate(1);
        }
    }
    module
}

fn context(target: &str, quant: &str) -> PassContext {
    let target = mlcc_target::resolve_target(target).unwrap();
    let level = |l: &mlcc_target::FeatureLevel| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut options = PassOptions::new(target.levels.iter().map(level).collect(), 4);
    options.quant = QuantScheme::from_name(quant).unwrap().0;
    options.min_chunk_work = Some(ChunkWork { bytes: 8, dots: 8, flops: 8, times_of_cache: 64 });
    PassContext::new(options)
}

/// Blocks of memory as the runtime lays them out.
pub(crate) fn memory(program: &LoweredProgram, values: &[Tensor]) -> StepMemory {
    let plan = program.memory.as_ref().unwrap();
    let mut memory = StepMemory::default();
    let mut weights = vec![0; plan.weights_bytes as usize];
    for ((id, param), value) in program.module.params.iter().zip(values) {
        let (n, k) = match value.dims[..] {
            [] => (1, 1),
            [k] => (1, k),
            [n, k] => (n, k),
            _ => panic!("{}", param.ty),
        };
        let packing = param.packing.unwrap_or(Packing::RowMajor);
        let options = program.pack_options(&param.name);
        let bytes = mlcc_quant::pack(param.ty.dtype, packing, n, k, &value.to_f32(), options).unwrap();
        let (offset, size) = plan.params[id.index()];
        assert_eq!(bytes.len() as u64, size, "{}", param.name);
        weights[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    *memory.base_memory(MemoryBase::Weights) = weights;
    let mut states = vec![0; plan.state_bytes as usize];
    for (id, state) in program.module.states.iter().filter(|(id, _)| !plan.is_paged(*id)) {
        let (offset, bytes) = plan.states[id.index()];
        for chunk in states[offset as usize..][..bytes as usize].chunks_exact_mut(4) {
            chunk.copy_from_slice(&(state.init as f32).to_le_bytes());
        }
    }
    *memory.base_memory(MemoryBase::State) = states;
    *memory.base_memory(MemoryBase::Arena) = vec![0xff; plan.arena_bytes() as usize];
    memory
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(4).map(|c| f64::from(f32::from_le_bytes(c.try_into().unwrap()))).collect()
}

/// Two of the schedules for 3 workers, others for other seeds; none for a GPU.
fn schedules(target: &str, seed: u64) -> Vec<WorkerSchedule> {
    let mut all = if target.starts_with("sm_") { Vec::new() } else { WorkerSchedule::all_variants(3) };
    let first = seed as usize % all.len().max(1);
    all.rotate_left(first);
    all.into_iter().step_by(5).collect()
}

/// Two steps of each in both worlds.
fn check(seed: u64, target: &str, quant: &str, disabled: &[&str]) {
    let module = one_output(seed);
    let weights = RandomWeights::new(&module, seed);
    let mut program = LoweredProgram::new(module.clone());
    let control = PipelineControl {
        disabled: disabled.iter().map(|s| s.to_string()).collect(),
        ..PipelineControl::default()
    };
    let what = format!("seed {seed}, {target}, {quant}, without {disabled:?}");
    match run_pipeline(&mut program, &mut context(target, quant), control) {
        Err(PassError::Unsupported { .. }) => return,
        Err(error) => panic!("{what}: {error}\n{}", print_module(&module)),
        Ok(()) => {}
    }
    // The reference works on the stored weights too.
    let mut stored = LoweredProgram::new(module.clone());
    run_pass("quantize", &mut stored, &mut context(target, quant)).unwrap();
    let reference = stored.module;
    let values = weights.values(&reference).unwrap();
    let interpreter = Interpreter::new(&reference, |id| values[id.index()].clone());
    let mut states = StateValues::new(&reference).unwrap();
    let mut memory = memory(&program, &weights.values(&program.module).unwrap());
    let plan = program.memory.clone().unwrap();
    let (_, f) = reference.function("main").unwrap();
    for (step, n) in [3, 1].into_iter().enumerate() {
        let syms = SymValues::for_tokens(n);
        let inputs = random_inputs(f, &syms, seed + step as u64);
        let want = interpreter.run_named("main", &inputs, &mut states, syms).unwrap();
        *memory.base_memory(MemoryBase::Tokens) =
            inputs[0].data.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect();
        *memory.base_memory(MemoryBase::Temperature) =
            KernelBuffer::from_floats(inputs[1].dtype, &inputs[1].to_f32()).bytes;
        *memory.base_memory(MemoryBase::Logits) = vec![0; 4 * want[0].data.len()];
        let level = &program.levels[0];
        let planned = level.steps.iter().find(|s| s.name == "main").unwrap();
        let options = RunOptions::with_workers(2);
        let before = memory.clone();
        if let Err(error) = run_step(planned, &level.lowered.kernels, &mut memory, &syms, &options) {
            panic!(
                "{what}, step {step}: {error}\n{}\n{}",
                print_module(&module),
                print_module(&program.module)
            );
        }
        for schedule in schedules(target, seed) {
            let mut other = before.clone();
            let done = run_interleaved(planned, &level.lowered.kernels, &mut other, &syms, &schedule);
            done.unwrap_or_else(|e| panic!("{what}, step {step}, {schedule:?}: {e}"));
            for base in [MemoryBase::Logits, MemoryBase::State] {
                let same = memory.base_memory(base) == other.base_memory(base);
                assert!(same, "{what}, step {step}, {schedule:?}: {}", print_module(&program.module));
            }
        }
        let close = |place: String, got: &[f64], want: &[f64]| {
            // Random values cancel: rounding in f32 may show in the fourth digit.
            let tolerance = Tolerance { absolute: 1e-4, relative: 1e-3 };
            if let Err(error) = compare(got.iter().copied(), want.iter().copied(), tolerance) {
                let (before, after) = (print_module(&module), print_module(&program.module));
                panic!("{what}, step {step}, {place}: {error}\n{before}\n{after}");
            }
        };
        close("output".into(), &floats(memory.base_memory(MemoryBase::Logits)), &want[0].data);
        for (id, state) in reference.states.iter() {
            let (offset, bytes) = plan.states[id.index()];
            let block = memory.base_memory(MemoryBase::State)[offset as usize..][..bytes as usize].to_vec();
            close(format!("state {}", state.name), &floats(&block), &states.get(id).unwrap().data);
        }
    }
}

#[test]
fn steps_equal_the_graph() {
    for seed in 0..40 {
        for target in ["x86-64-v3", "sm_80"] {
            check(seed, target, "f32", &[]);
        }
        check(seed, "x86-64-v4", "f32", &["fuse"]);
        check(seed, "x86-64-v3", "q4f16_2", &[]);
        check(seed, "x86-64-v3", "q8f16_1", &["fuse_dequantize"]);
    }
}
