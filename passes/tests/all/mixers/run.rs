//! A layer as a program, and its pieces against the graph.

use super::{MixerLayer, VOCAB};
use crate::lowering::{floats, memory};
use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::{StepMemory, run_step};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::module::Module;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::step::MemoryBase;
use mlcc_ir::testing::TestRng;
use mlcc_ir::text::print_kernel;
use mlcc_ir::types::DType;
use mlcc_kernels::params::KernelTarget;
use mlcc_models::{EntrySpec, LogitScope, ModelDefinition};
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::{LoweredProgram, PassContext, PassOptions, run_pipeline};
use std::collections::BTreeMap;

/// More than a page of the caches.
const CONTEXT: usize = 128;
const TARGETS: [&str; 4] = ["x86-64-v3", "x86-64-v2", "armv8.0", "x86-64-v4"];

/// All machines and divisions of a text on one layer.
pub fn check(layer: MixerLayer, seed: u64) {
    let mut rng = TestRng(seed);
    let module = module(&layer);
    let values = values(&layer, &module, &mut rng);
    // Now and then past a page of the caches.
    let chunk = if seed % 4 == 3 { 33 } else { rng.pick(&[2, 3, 5, 8, 13]) };
    let texts = [chunk - 1, chunk, chunk + 1, 2 * chunk + 1];
    let cpu = TARGETS[seed as usize % TARGETS.len()];
    for (target, invariant) in [(cpu, false), (cpu, true), ("sm_80", false)] {
        let program = program(&module, target, invariant, chunk as i64);
        for length in texts {
            let tokens: Vec<i32> = (0..length).map(|_| rng.below(VOCAB) as i32).collect();
            let case = MixerCase { module: &module, values: &values, tokens: &tokens };
            let want = case.graph();
            let pieces = [in_chunks(length, chunk), vec![1; length], random_pieces(&mut rng, length, chunk)];
            let mut before: Option<MixerResults> = None;
            for (number, pieces) in pieces.iter().enumerate() {
                let what = format!("{layer:?}, seed {seed}, {target}, {pieces:?} in chunks of {chunk}");
                let found =
                    case.steps(&program, pieces, number == 1).unwrap_or_else(|e| panic!("{what}: {e}"));
                found.close(&what, &want);
                // How a text is divided changes no bits where nothing beside a row does.
                if let Some(before) = before.replace(found.clone()).filter(|_| invariant) {
                    assert!(before.rows == found.rows && before.states == found.states, "{what}");
                }
            }
        }
    }
}

fn in_chunks(length: usize, chunk: usize) -> Vec<usize> {
    let whole = std::iter::repeat_n(chunk, length / chunk);
    whole.chain((!length.is_multiple_of(chunk)).then_some(length % chunk)).collect()
}

fn random_pieces(rng: &mut TestRng, mut length: usize, chunk: usize) -> Vec<usize> {
    let mut pieces = Vec::new();
    while length > 0 {
        let piece = 1 + rng.below(chunk.min(length));
        pieces.push(piece);
        length -= piece;
    }
    pieces
}

/// Entry functions for any number of rows and for one.
fn module(layer: &MixerLayer) -> Module {
    let mut b = GraphBuilder::new("layer");
    for (name, n) in [("prefill_logits", Dim::sym(SizeSymbol::N)), ("decode", Dim::from(1))] {
        let spec = EntrySpec {
            name,
            n,
            logits: LogitScope::All,
            context: CONTEXT,
            streaming: None,
            batching: RowBatching::Single,
            pooling_head: None,
            adapters: None,
            is_encoder_input: false,
        };
        layer.build(&mut b, &spec);
    }
    b.finish().unwrap()
}

/// Random weights; in the last columns of the table decays.
fn values(layer: &MixerLayer, module: &Module, rng: &mut TestRng) -> BTreeMap<String, Tensor> {
    let mut tensors = BTreeMap::new();
    for (name, shape) in layer.tensor_shapes() {
        let scale = if name == "table" { 1.0 } else { 1.0 / (*shape.last().unwrap() as f32).sqrt() };
        let mut number = || (rng.below(2001) as f32 / 1000.0 - 1.0) * 1.7 * scale;
        let mut data: Vec<f32> = (0..shape.iter().product()).map(|_| number()).collect();
        match name.as_str() {
            // From states that stay for ever to states that vanish at once.
            "slopes" => data.iter_mut().for_each(|x| *x = -rng.pick(&[0.0, 1e-7, 1e-3, 1.0, 30.0, 1000.0])),
            "table" => {
                let (count, decays) = layer.decays();
                for row in data.chunks_mut(layer.width) {
                    row[layer.width - count..].iter_mut().for_each(|x| *x = rng.pick(decays));
                }
            }
            _ => {}
        }
        tensors.insert(name, Tensor::f32(&shape, &data));
    }
    let tensor = |name: &str| tensors.get(name).cloned();
    module.params.values().for_each(|param| drop(param_value(param, &tensor).unwrap()));
    tensors
}

/// Checks that the code of a level of an artifact does not depend on the other levels, even where these have
/// other launches and buffers. Returns how many launches each level has.
pub fn levels_stay_as_they_are(layer: &MixerLayer, levels: &[&str]) -> Vec<usize> {
    let module = module(layer);
    let together = planned(&module, &levels.join(","), false, 33, usize::MAX);
    let plan = together.memory.as_ref().unwrap();
    let mut launches = Vec::new();
    for (level, places) in together.levels.iter().zip(&plan.levels) {
        let alone = planned(&module, &level.name, false, 33, usize::MAX);
        let what = format!("{layer:?}, {} of {levels:?}", level.name);
        let text = |kernels: &[Kernel]| kernels.iter().map(print_kernel).collect::<String>();
        let (found, expected) = (&level.lowered.kernels, &alone.levels[0].lowered.kernels);
        assert!(text(found) == text(expected), "{what}: other kernels");
        assert!(level.steps == alone.levels[0].steps, "{what}: other steps");
        let memory = alone.memory.as_ref().unwrap();
        assert_eq!(*places, memory.levels[0], "{what}");
        assert!(plan.arena_bytes() >= memory.arena_bytes(), "{what}: no room");
        launches.push(level.steps.iter().map(|step| step.items.len()).sum());
    }
    launches
}

fn program(module: &Module, target: &str, invariant: bool, chunk: i64) -> LoweredProgram {
    planned(module, target, invariant, chunk, 1)
}

/// Compiles for the best `levels` of a target.
fn planned(module: &Module, target: &str, invariant: bool, chunk: i64, levels: usize) -> LoweredProgram {
    let target = mlcc_target::resolve_target(target).unwrap();
    let level = |l: &mlcc_target::FeatureLevel| {
        let kernels = KernelTarget { batch_invariant: invariant, ..KernelTarget::new(target.arch, l) };
        (l.name.clone(), kernels)
    };
    let options = PassOptions::new(target.levels.iter().take(levels).map(level).collect(), chunk);
    let mut program = LoweredProgram::new(module.clone());
    let control = PipelineControl { verify: true, ..PipelineControl::default() };
    run_pipeline(&mut program, &mut PassContext::new(options), control).unwrap();
    program
}

#[derive(Clone)]
struct MixerResults {
    rows: Vec<f64>,
    /// States that are no caches.
    states: Vec<(String, Vec<f64>)>,
}

impl MixerResults {
    fn close(&self, what: &str, want: &MixerResults) {
        let tolerance = Tolerance { absolute: 1e-6, relative: 2e-5 };
        let close = |place: &str, found: &[f64], want: &[f64]| {
            let compared = compare(found.iter().copied(), want.iter().copied(), tolerance);
            compared.unwrap_or_else(|e| panic!("{what}, {place}: {e}"));
        };
        close("rows", &self.rows, &want.rows);
        for ((name, found), (_, want)) in self.states.iter().zip(&want.states) {
            close(name, found, want);
        }
    }
}

struct MixerCase<'a> {
    module: &'a Module,
    values: &'a BTreeMap<String, Tensor>,
    tokens: &'a [i32],
}

impl MixerCase<'_> {
    fn params(&self, module: &Module) -> Vec<Tensor> {
        let tensor = |name: &str| self.values.get(name).cloned();
        module.params.values().map(|param| param_value(param, &tensor).unwrap()).collect()
    }

    /// The whole text at once.
    fn graph(&self) -> MixerResults {
        let values = self.params(self.module);
        let interpreter = Interpreter::new(self.module, |id| values[id.index()].clone());
        let mut states = StateValues::new(self.module).unwrap();
        let syms = SymValues::for_tokens(self.tokens.len() as i64);
        let ids = [Tensor::ids(self.tokens)];
        let out = interpreter.run_named("prefill_logits", &ids, &mut states, syms).unwrap();
        let kept = self.module.states.iter().filter(|(_, state)| state.ty.dims[0] != Dim::from(CONTEXT));
        let states = kept.map(|(id, state)| (state.name.clone(), states.get(id).unwrap().data.clone()));
        MixerResults { rows: out[0].data.clone(), states: states.collect() }
    }

    /// The kernels on the pieces in order; single rows by the entry point for them if `decodes`.
    fn steps(
        &self,
        program: &LoweredProgram,
        pieces: &[usize],
        decodes: bool,
    ) -> Result<MixerResults, String> {
        let plan = program.memory.as_ref().unwrap();
        let mut memory: StepMemory = memory(program, &self.params(&program.module));
        let (pages, table) = plan.example_pages();
        (*memory.base_memory(MemoryBase::Pages), *memory.base_memory(MemoryBase::PageTable)) = (pages, table);
        let (_, f) = self.module.function("decode").unwrap();
        let width = f.ty(f.outputs[0]).dims[1].as_const().unwrap() as usize;
        let mut rows = Vec::new();
        let mut past = 0;
        for &n in pieces {
            let entry = if decodes { "decode" } else { "prefill_logits" };
            let level = &program.levels[0];
            let step = level.steps.iter().find(|s| s.name == entry).unwrap();
            let ids = &self.tokens[past..past + n];
            *memory.base_memory(MemoryBase::Tokens) = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            *memory.base_memory(MemoryBase::Logits) = vec![0xff; 4 * n * width];
            let syms = SymValues { past: past as i64, ..SymValues::for_tokens(n as i64) };
            run_step(step, &level.lowered.kernels, &mut memory, &syms, &RunOptions::with_workers(3))
                .map_err(|e| e.to_string())?;
            rows.extend(floats(memory.base_memory(MemoryBase::Logits)));
            past += n;
        }
        let kept = program.module.states.iter().filter(|(id, _)| !plan.is_paged(*id));
        let mut states = Vec::new();
        for (id, state) in kept {
            let (offset, bytes) = plan.states[id.index()];
            assert_eq!(state.ty.dtype, DType::F32);
            let block = memory.base_memory(MemoryBase::State)[offset as usize..][..bytes as usize].to_vec();
            states.push((state.name.clone(), floats(&block)));
        }
        Ok(MixerResults { rows, states })
    }
}
