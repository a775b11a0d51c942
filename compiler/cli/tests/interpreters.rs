//! The reference cases through the graph interpreter (before any pass) and through the kernel interpreter (after all of
//! them, and with each optional pass switched off).

use mlcc::{model, weights};
use mlcc_interp::graph::{Interpreter, States, Tensor};
use mlcc_interp::kernel::Options as RunOptions;
use mlcc_interp::steps::{Memory, run_step};
use mlcc_ir::dim::SymValues;
use mlcc_ir::step::Base;
use mlcc_models::Checkpoint;
use mlcc_models::golden::Golden;
use mlcc_models::resolve::{ModelRequest, ResolvedModel, resolve};
use mlcc_passes::pipeline::Control;
use mlcc_passes::{Context, Options, PIPELINE, Program, run_pipeline};
use std::path::{Path, PathBuf};

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name)
}

fn load(name: &str) -> (ResolvedModel, Checkpoint, Golden) {
    let dir = case(name);
    let resolved = resolve(&ModelRequest::new(dir.to_str().unwrap())).unwrap();
    let checkpoint = resolved.open_weights().unwrap();
    let golden = Golden::read(&dir.join("golden.json")).unwrap();
    (resolved, checkpoint, golden)
}

fn assert_close(what: &str, expected: &[f32], found: &[f32], relative: f32) {
    let scale = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    let worst = expected.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert_eq!(expected.len(), found.len());
    assert!(worst <= relative * scale, "{what}: off by {worst} of {scale}");
}

#[test]
fn graph_interpreter_equals_references() {
    for name in ["rwkv4-hf", "rwkv4-hf-odd", "rwkv4-pth"] {
        let (resolved, checkpoint, golden) = load(name);
        let module = model::build_module(name, &resolved.config.architecture).unwrap();
        let interpreter = Interpreter::new(&module, |id| {
            let param = &module.params[id];
            let dims: Vec<usize> = param.ty.dims.iter().map(|d| d.as_const().unwrap() as usize).collect();
            Tensor::f32(&dims, &weights::read_param(&checkpoint, param).unwrap())
        });
        for prompt in &golden.prompts {
            let ids: Vec<i32> = prompt.input_ids.iter().map(|&i| i as i32).collect();
            let mut states = States::new(&module).unwrap();
            let n = ids.len() as i64;
            let out = interpreter
                .run_named("prefill", &[Tensor::ids(&ids)], &mut states, SymValues::tokens(n))
                .unwrap();
            assert_close(name, &prompt.logits_last, &out[0].to_f32(), 1e-5);
        }
    }
}

/// Logits after a prompt, all through one entry or token by token.
fn run_lowered(program: &Program, checkpoint: &Checkpoint, ids: &[i32], step_by_step: bool) -> Vec<f32> {
    let plan = program.memory.as_ref().unwrap();
    let mut memory = Memory::default();
    let mut blob = vec![0u8; plan.weights_bytes as usize];
    for (id, param) in program.module.params.iter() {
        let (offset, _) = plan.params[id.0 as usize];
        let mut at = offset as usize;
        weights::pack_param::<weights::WeightError>(checkpoint, param, Default::default(), |bytes| {
            blob[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
            Ok(())
        })
        .unwrap();
    }
    *memory.block(Base::Weights) = blob;
    *memory.block(Base::State) = vec![0; plan.state_bytes as usize];
    for (id, state) in program.module.states.iter() {
        let (offset, bytes) = plan.states[id.0 as usize];
        for i in 0..bytes as usize / 4 {
            let at = offset as usize + 4 * i;
            memory.block(Base::State)[at..at + 4].copy_from_slice(&(state.init as f32).to_le_bytes());
        }
    }
    *memory.block(Base::Arena) = vec![0; plan.arena_bytes() as usize];
    let level = &program.levels[0];
    let mut run = |entry: &str, ids: &[i32]| {
        let step = level.steps.iter().find(|s| s.name == entry).unwrap();
        *memory.block(Base::Tokens) = ids.iter().flat_map(|i| i.to_le_bytes()).collect();
        *memory.block(Base::Logits) = vec![0; 4 * 333.max(320)];
        let sizes = SymValues::tokens(ids.len() as i64);
        run_step(step, &level.lowered.kernels, &mut memory, &sizes, &RunOptions::workers(2)).unwrap();
        let bytes = memory.block(Base::Logits).clone();
        bytes.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect::<Vec<f32>>()
    };
    if step_by_step {
        ids.iter().fold(Vec::new(), |_, id| run("decode", &[*id]))
    } else {
        run("prefill", ids)
    }
}

fn compile(resolved: &ResolvedModel, target: &str, disabled: &[&str]) -> Program {
    let module = model::build_module("test", &resolved.config.architecture).unwrap();
    let mut program = Program::new(module);
    let target = mlcc_target::resolve(target).unwrap();
    let levels = target
        .levels
        .iter()
        .map(|l| (l.name.clone(), mlcc_kernels::params::KernelTarget::new(target.arch, l)))
        .collect();
    let mut ctx = Context::new(Options::new(levels, 64));
    let disabled = disabled.iter().map(|s| s.to_string()).collect();
    run_pipeline(&mut program, &mut ctx, Control { disabled, ..Control::default() }).unwrap();
    program
}

#[test]
fn kernel_interpreter_equals_references() {
    for name in ["rwkv4-hf", "rwkv4-hf-odd"] {
        let (resolved, checkpoint, golden) = load(name);
        let optional = PIPELINE.iter().filter(|p| p.optional).map(|p| vec![p.name]);
        for disabled in std::iter::once(vec![]).chain(optional) {
            for target in ["x86-64-v4", "x86-64-v3", "sm_80"] {
                let program = compile(&resolved, target, &disabled);
                for prompt in golden.prompts.iter().take(2) {
                    let ids: Vec<i32> = prompt.input_ids.iter().map(|&i| i as i32).collect();
                    for step_by_step in [false, true] {
                        let logits = run_lowered(&program, &checkpoint, &ids, step_by_step);
                        let what = format!("{name} {target} without {disabled:?}, steps {step_by_step}");
                        assert_close(&what, &prompt.logits_last, &logits[..prompt.logits_last.len()], 1e-4);
                    }
                }
            }
        }
    }
}
