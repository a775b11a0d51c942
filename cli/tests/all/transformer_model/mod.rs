//! A small Llama-like model with random weights, and three ways to run it: the graph interpreter, the
//! interpreter of kernels on its planned steps, and the artifact.

use std::path::Path;

use mlcc_codegen::artifact::{ArtifactWriter, WeightDestination};
use mlcc_codegen::table::{CacheDesc, ModelPlan, StateDesc, TableDesc};
use mlcc_codegen::{CodegenInput, LevelInput};
use mlcc_driver::compile::Backend;
use mlcc_interp::equivalence::RandomWeights;
use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::{StepMemory, run_step};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::module::{Module, ParamRole, ParamSource};
use mlcc_ir::ops::{AttentionOp, Op};
use mlcc_ir::step::MemoryBase;
use mlcc_ir::types::{DType, Packing, TensorType};
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::{CacheType, LoweredProgram, PassContext, PassOptions, QuantScheme, run_pass, run_pipeline};
use mlcc_target::CompileTarget;

/// Most tokens in one call.
pub const CHUNK: i64 = 6;

/// Sizes and kinds of a model.
#[derive(Clone, Debug)]
pub struct TransformerConfig {
    pub heads: usize,
    pub kv_heads: usize,
    pub size: usize,
    pub hidden: usize,
    pub layers: usize,
    pub vocab: usize,
    pub context: usize,
    pub cache: DType,
    /// Experts and how many of them a token takes.
    pub experts: Option<(usize, usize)>,
    pub attention: AttentionOp,
}

impl TransformerConfig {
    pub fn tiny() -> TransformerConfig {
        TransformerConfig {
            heads: 4,
            kv_heads: 2,
            size: 16,
            hidden: 48,
            layers: 2,
            vocab: 40,
            context: 24,
            cache: DType::F32,
            experts: None,
            attention: AttentionOp::causal(0.25),
        }
    }
    pub fn module(&self) -> Module {
        let mut b = GraphBuilder::new("tiny");
        for (name, n) in [("prefill", Dim::sym(SizeSymbol::N)), ("decode", Dim::from(1))] {
            let tokens = TensorType::new(DType::I32, [&n]);
            b.function(name, FunctionKind::Entry, &[tokens], |b, inputs| vec![self.body(b, inputs[0], &n)]);
        }
        b.finish().unwrap()
    }

    fn body(&self, b: &mut GraphBuilder, tokens: ValueId, n: &Dim) -> ValueId {
        let table = weight(b, "embedding", self.vocab, self.hidden, ParamRole::Embedding);
        let mut x = b.gather(table, tokens);
        let positions = b.iota(Dim::sym(SizeSymbol::Past), n.clone());
        let angles = self.angles(b, positions, n);
        for layer in 0..self.layers {
            let name = format!("layers.{layer}");
            let h = norm(b, x, &format!("{name}.attention_norm"), self.hidden);
            let h = self.attention(b, &name, h, angles, n);
            x = b.add(x, h);
            let h = norm(b, x, &format!("{name}.mlp_norm"), self.hidden);
            let h = match self.experts {
                None => self.mlp(b, &name, h),
                Some((experts, k)) => self.mixture(b, &name, h, n, experts, k),
            };
            x = b.add(x, h);
        }
        x = b.slice(x, 0, n.sub(&Dim::from(1)), Dim::from(1));
        x = norm(b, x, "norm", self.hidden);
        linear(b, x, "head", self.vocab, self.hidden, ParamRole::Head)
    }

    /// Cosines and sines `[n, 1, size / 2]` of position * 10000^(-2 i / size).
    fn angles(&self, b: &mut GraphBuilder, positions: ValueId, n: &Dim) -> (ValueId, ValueId) {
        let half = self.size / 2;
        let index = b.iota(Dim::from(0), Dim::from(half));
        let index = b.cast(index, DType::F32);
        let exponent = b.scale(index, -(10000f64.ln()) / half as f64);
        let frequency = b.exp(exponent);
        let positions = b.cast(positions, DType::F32);
        let positions = b.reshape(positions, [n.clone(), Dim::from(1), Dim::from(1)]);
        let angle = b.mul(positions, frequency);
        (b.unary(UnOp::Cos, angle), b.unary(UnOp::Sin, angle))
    }

    fn rope(&self, b: &mut GraphBuilder, x: ValueId, (cos, sin): (ValueId, ValueId)) -> ValueId {
        let half = Dim::from(self.size / 2);
        let low = b.slice(x, 2, Dim::from(0), half.clone());
        let high = b.slice(x, 2, half.clone(), half);
        let (a, c) = (b.mul(low, cos), b.mul(high, sin));
        let first = b.sub(a, c);
        let (a, c) = (b.mul(high, cos), b.mul(low, sin));
        let second = b.add(a, c);
        b.concat(&[first, second], 2)
    }

    fn attention(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: ValueId,
        angles: (ValueId, ValueId),
        n: &Dim,
    ) -> ValueId {
        let q_width = self.heads * self.size;
        let heads = |b: &mut GraphBuilder, which: &str, count: usize| {
            let rows =
                linear(b, x, &format!("{name}.{which}"), count * self.size, self.hidden, ParamRole::Linear);
            b.reshape(rows, [n.clone(), Dim::from(count), Dim::from(self.size)])
        };
        let (q, k, v) =
            (heads(b, "q", self.heads), heads(b, "k", self.kv_heads), heads(b, "v", self.kv_heads));
        let (q, k) = (self.rope(b, q, angles), self.rope(b, k, angles));
        let row = TensorType::new(self.cache, [self.context, self.kv_heads, self.size]);
        let cached = |b: &mut GraphBuilder, which: &str, rows: ValueId| {
            let state = b.state(&format!("{name}.{which}_cache"), row.clone(), 0.0);
            let rows = b.cast(rows, self.cache);
            b.append(state, rows)
        };
        let mut inputs = vec![q, cached(b, "k", k), cached(b, "v", v)];
        if self.attention.alibi {
            let index = b.iota(Dim::from(1), Dim::from(self.heads));
            let index = b.cast(index, DType::F32);
            let exponent = b.scale(index, -8.0 / self.heads as f64 * std::f64::consts::LN_2);
            inputs.push(b.exp(exponent));
        }
        if self.attention.prefix {
            inputs.push(b.op(Op::Iota { start: Dim::from(3), len: Dim::from(1) }, &[]));
        }
        let mixed = b.op(Op::Attention(self.attention.clone()), &inputs);
        let mixed = b.reshape(mixed, [n.clone(), Dim::from(q_width)]);
        linear(b, mixed, &format!("{name}.o"), self.hidden, q_width, ParamRole::Linear)
    }

    fn mlp(&self, b: &mut GraphBuilder, name: &str, x: ValueId) -> ValueId {
        let inner = 2 * self.hidden;
        let gate = linear(b, x, &format!("{name}.gate"), inner, self.hidden, ParamRole::Linear);
        let up = linear(b, x, &format!("{name}.up"), inner, self.hidden, ParamRole::Linear);
        let h = swiglu(b, gate, up);
        linear(b, h, &format!("{name}.down"), self.hidden, inner, ParamRole::Linear)
    }

    /// Softmax over the chosen scores, then the chosen experts' results by their weights.
    fn mixture(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: ValueId,
        n: &Dim,
        experts: usize,
        k: usize,
    ) -> ValueId {
        let inner = self.hidden / 2;
        let scores = linear(b, x, &format!("{name}.router"), experts, self.hidden, ParamRole::Linear);
        let (scores, ids) = b.top_k(scores, k);
        let shares = b.softmax(scores);
        let experts_of = |b: &mut GraphBuilder, which: &str, out: usize, width: usize, x: ValueId| {
            let name = format!("{name}.experts.{which}");
            let weight = weight(b, &name, experts * out, width, ParamRole::Linear);
            b.matmul_experts(x, weight, ids, experts)
        };
        let one = b.reshape(x, [n.clone(), Dim::from(1), Dim::from(self.hidden)]);
        let gate = experts_of(b, "gate", inner, self.hidden, one);
        let up = experts_of(b, "up", inner, self.hidden, one);
        let h = swiglu(b, gate, up);
        let out = experts_of(b, "down", self.hidden, inner, h);
        let shares = b.reshape(shares, [n.clone(), Dim::from(k), Dim::from(1)]);
        let weighted = b.mul(out, shares);
        let weighted = b.permute(weighted, &[0, 2, 1]);
        let sum = b.reduce(mlcc_ir::compute::RedOp::Sum, weighted, 2);
        b.reshape(sum, [n.clone(), Dim::from(self.hidden)])
    }
}

fn swiglu(b: &mut GraphBuilder, gate: ValueId, up: ValueId) -> ValueId {
    let s = b.sigmoid(gate);
    let s = b.mul(gate, s);
    b.mul(s, up)
}

/// Values of about 1 / sqrt(columns).
fn weight(b: &mut GraphBuilder, name: &str, rows: usize, columns: usize, role: ParamRole) -> ValueId {
    let factor = if role == ParamRole::Embedding { 1.0 } else { (columns as f64).powf(-0.5) };
    let source = ParamSource::Scale(factor, Box::new(ParamSource::Tensor(name.into())));
    b.param_from(name, role, TensorType::new(DType::F32, [rows, columns]), source)
}

fn linear(
    b: &mut GraphBuilder,
    x: ValueId,
    name: &str,
    rows: usize,
    columns: usize,
    role: ParamRole,
) -> ValueId {
    let weight = weight(b, name, rows, columns, role);
    let transposed = b.permute(weight, &[1, 0]);
    b.matmul(x, transposed)
}

fn norm(b: &mut GraphBuilder, x: ValueId, name: &str, hidden: usize) -> ValueId {
    let weight = b.param(name, ParamRole::Vector, TensorType::new(DType::F32, [hidden]));
    b.rms_norm(x, weight, 1e-5)
}

/// The same in primitive ops, as model definitions write attention.
pub fn unfused(module: &Module) -> Module {
    let mut out = module.clone();
    for id in module.functions.ids() {
        let rebuilt = module.functions[id].rebuild(|f, _, op, inputs| match op {
            Op::Attention(_) => op.decompose(module, f, inputs).map(Some),
            _ => Ok(None),
        });
        out.functions[id] = rebuilt.unwrap();
    }
    out
}

/// The module as these passes leave it, for weights and caches of other types.
pub fn after(module: &Module, passes: &[&str], quant: &str, kv_cache: CacheType) -> Module {
    let mut options = PassOptions::new(vec![], CHUNK);
    options.quant = QuantScheme::from_name(quant).unwrap().0;
    options.kv_cache = kv_cache;
    let (mut program, mut ctx) = (LoweredProgram::new(module.clone()), PassContext::new(options));
    for pass in passes {
        run_pass(pass, &mut program, &mut ctx).unwrap();
    }
    program.module
}

/// Lowers for a target.
pub fn compiled(module: &Module, target: &CompileTarget, quant: &str, disabled: &[&str]) -> LoweredProgram {
    compiled_with(module, target, quant, CacheType::F32, disabled)
}

/// The same with a type of cache.
pub fn compiled_with(
    module: &Module,
    target: &CompileTarget,
    quant: &str,
    kv_cache: CacheType,
    disabled: &[&str],
) -> LoweredProgram {
    let level = |l: &mlcc_target::FeatureLevel| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut options = PassOptions::new(target.levels.iter().map(level).collect(), CHUNK);
    options.quant = QuantScheme::from_name(quant).unwrap().0;
    options.kv_cache = kv_cache;
    let mut program = LoweredProgram::new(module.clone());
    let control = PipelineControl {
        disabled: disabled.iter().map(|s| s.to_string()).collect(),
        ..PipelineControl::default()
    };
    run_pipeline(&mut program, &mut PassContext::new(options), control).unwrap_or_else(|e| panic!("{e}"));
    program
}

/// Logits of the last token after each piece, by the graph interpreter.
pub fn by_graph(module: &Module, weights: &RandomWeights, pieces: &[&[i32]]) -> Vec<Vec<f32>> {
    let values = weights.values(module).unwrap();
    let interpreter = Interpreter::new(module, |id| values[id.index()].clone());
    let mut states = StateValues::new(module).unwrap();
    let mut past = 0;
    let run = |ids: &&[i32]| {
        let sizes = SymValues { n: ids.len() as i64, b: 1, past };
        past += sizes.n;
        let out = interpreter.run_named("prefill", &[Tensor::ids(ids)], &mut states, sizes);
        out.unwrap_or_else(|e| panic!("{e}"))[0].to_f32()
    };
    pieces.iter().map(run).collect()
}

/// The weights payload.
fn packed(program: &LoweredProgram, weights: &RandomWeights) -> Vec<u8> {
    let plan = program.memory.as_ref().unwrap();
    let mut blob = vec![0; plan.weights_bytes as usize];
    for ((id, param), value) in program.module.params.iter().zip(weights.values(&program.module).unwrap()) {
        let (n, k) = match value.dims[..] {
            [] => (1, 1),
            [k] => (1, k),
            [n, k] => (n, k),
            _ => panic!("{}", param.ty),
        };
        let packing = param.packing.unwrap_or(Packing::RowMajor);
        let options = program.pack_options(&param.name);
        let bytes = mlcc_quant::pack(param.ty.dtype, packing, n, k, &value.to_f32(), options).unwrap();
        blob[plan.params[id.index()].0 as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    blob
}

/// Results like those of [`by_graph`], by the interpreter of kernels (one level), with 2 workers on a CPU.
pub fn by_steps(
    program: &LoweredProgram,
    weights: &RandomWeights,
    pieces: &[&[i32]],
    vocab: usize,
) -> Vec<Vec<f32>> {
    let plan = program.memory.as_ref().unwrap();
    let mut memory = StepMemory::default();
    *memory.base_memory(MemoryBase::Weights) = packed(program, weights);
    *memory.base_memory(MemoryBase::Arena) = vec![0xff; plan.arena_bytes() as usize];
    *memory.base_memory(MemoryBase::State) = vec![0xff; plan.state_bytes as usize];
    let (pages, table) = plan.example_pages();
    *memory.base_memory(MemoryBase::Pages) = vec![0xff; pages.len()];
    *memory.base_memory(MemoryBase::PageTable) = table;
    let level = &program.levels[0];
    let mut past = 0;
    let run = |ids: &&[i32]| {
        let name = if ids.len() == 1 { "decode" } else { "prefill" };
        let step = level.steps.iter().find(|s| s.name == name).unwrap();
        *memory.base_memory(MemoryBase::Tokens) = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        *memory.base_memory(MemoryBase::Logits) = vec![0; 4 * vocab];
        let sizes = SymValues { n: ids.len() as i64, b: 1, past };
        past += sizes.n;
        let kernels = &level.lowered.kernels;
        let done = run_step(step, kernels, &mut memory, &sizes, &RunOptions::with_workers(2));
        done.unwrap_or_else(|e| panic!("{e}"));
        let cells = memory.base_memory(MemoryBase::Logits).chunks_exact(4);
        cells.map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
    };
    pieces.iter().map(run).collect()
}

/// Writes the artifact.
pub fn artifact(
    program: &LoweredProgram,
    target: &CompileTarget,
    backend: Backend,
    weights: &RandomWeights,
    vocab: usize,
    path: &Path,
) {
    let plan = program.memory.as_ref().unwrap();
    let describe = |(id, s): (mlcc_ir::module::StateId, &mlcc_ir::module::ModelState)| {
        let (offset, _) = plan.states[id.index()];
        let rows = s.ty.dims[0].as_const().unwrap() as u64;
        let row_bytes = plan.row_bytes[id.index()];
        StateDesc {
            name: s.name.clone(),
            offset,
            bytes: rows * row_bytes,
            format: s.ty.dtype.name().into(),
            cache: Some(CacheDesc { rows, row_bytes }),
            ..StateDesc::default()
        }
    };
    let table = TableDesc {
        target: "x86-64".into(),
        metadata: "{}".into(),
        states: program.module.states.iter().map(describe).collect(),
        plan: ModelPlan {
            weights_bytes: plan.weights_bytes,
            arena_bytes: plan.arena_bytes(),
            state_bytes: plan.state_bytes,
            alignment: mlcc_passes::plan_memory::ALIGN,
            chunk: CHUNK as u64,
            context: plan.context.unwrap(),
            batch: 1,
            vocab: vocab as u64,
            max_workers: plan.max_workers().unwrap_or(0),
            page_bytes: plan.page_bytes,
            text_width: 0,
            ranks: 1,
            ..ModelPlan::default()
        },
        ..TableDesc::default()
    };
    let levels = target.levels.iter().zip(&program.levels);
    let levels =
        levels.map(|(level, code)| LevelInput { level, kernels: &code.lowered.kernels, steps: &code.steps });
    let input = CodegenInput { target, levels: levels.collect(), table, assembler: None };
    let library = match backend {
        #[cfg(feature = "llvm")]
        Backend::Llvm => mlcc_codegen::compile(&input, "tiny.so"),
        #[cfg(feature = "cranelift")]
        Backend::Cranelift => mlcc_codegen::compile_with_cranelift(&input, "tiny.so"),
        #[allow(unreachable_patterns, reason = "depends on the back ends that are built in")]
        _ => panic!("no back end {}", backend.name()),
    };
    let library = library.unwrap_or_else(|e| panic!("{e}"));
    let mut writer = ArtifactWriter::create(path, library.path(), WeightDestination::Inside).unwrap();
    writer.write_section(mlcc_abi::section::METADATA, b"{}").unwrap();
    writer.begin_section(mlcc_abi::section::WEIGHTS).unwrap();
    writer.write(&packed(program, weights)).unwrap();
    writer.end_section().unwrap();
    writer.finish().unwrap();
}
