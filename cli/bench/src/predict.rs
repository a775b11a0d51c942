//! `mlcc bench --predict`: how fast the GPU code of an artifact should be on a GPU that is not there. These
//! are predictions, and say so.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use mlcc_abi::repeat;
use mlcc_codegen::nvdisasm::{self, NVDISASM_VARIABLE, disassemble, find_nvdisasm};
use mlcc_codegen::ptxas::{PTXAS_VARIABLE, PtxAssembler, ResourceUsage, assemble, find_ptxas};
use mlcc_driver::compile::keep::scheme_name;
use mlcc_driver::format::bytes;
use mlcc_predict::{
    ArtifactPlan, DecodedKernel, KernelResources, LaunchBound, LaunchConfig, LaunchPrediction, PredictedCall,
    SequenceSizes, launch, predict, sass,
};
use mlcc_runtime::{Artifact, ArtifactTable, KernelLaunch, LaunchRepeat, read_table};
use mlcc_target::GpuModel;
use serde::Serialize;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

use crate::error::BenchError;
use crate::limits::SequenceLimits;
use crate::options::BenchOptions;
use crate::plan::{ArtifactCapacity, plan_tests};
use crate::test::BenchTest;

/// Tokens of the long prompt that is predicted beside the usual one.
const LONG_PROMPT: usize = 2048;

/// One test, predicted.
#[derive(Debug, Serialize)]
pub struct PredictionRow {
    /// Always true: nothing in this row was measured.
    prediction: bool,
    model: String,
    quant: String,
    gpu: String,
    test: String,
    tok_s: f64,
    /// Tokens per second that the GPU cannot exceed, by its copies or by its products of matrices.
    limit: f64,
    limit_kind: &'static str,
    fraction_of_limit: f64,
    /// Launches of a step, or of all calls of a prompt.
    launches: usize,
    /// The limit that takes most of the time.
    bound_by: String,
    /// Seconds by what binds.
    bounds: BTreeMap<String, f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kernels: Vec<PredictedKernelRow>,
}

/// All launches of a kernel with one shape in a test.
#[derive(Clone, Debug, Serialize)]
pub struct PredictedKernelRow {
    kernel: String,
    launches: usize,
    /// Seconds of all of them, with what lies between two kernels, and of one.
    seconds: f64,
    one: f64,
    bound_by: String,
    /// Seconds above what its bytes and products need at the best rates of the GPU.
    loss: f64,
    registers: u32,
    blocks: u64,
    blocks_of_sm: u32,
    /// Bytes from and to memory, of one launch.
    memory_bytes: f64,
    /// Bytes that a multiprocessor has asked memory for at a time.
    in_flight: f64,
    /// Accesses to local memory in the blocks that were followed: registers ran out.
    spills: u64,
    /// True if its code has products on tensor cores; true if it has loads or copies of 16 bytes.
    tensor_cores: bool,
    wide_loads: bool,
}

/// Predicts the tests of an artifact, a long prompt beside them.
pub fn predict_tests(
    path: &Path,
    options: &BenchOptions,
    gpu: &GpuModel,
) -> Result<Vec<PredictionRow>, BenchError> {
    let artifact = Artifact::open(path)?;
    let table = read_table(&artifact)?;
    let metadata: Value = serde_json::from_str(&table.metadata).unwrap_or(Value::Null);
    let limits = SequenceLimits::from_table(&table);
    let mut tests = plan_tests(options, ArtifactCapacity::Sequences(limits))?;
    if options.n_prompt.is_none() && limits.prompt.is_none_or(|most| LONG_PROMPT <= most) {
        tests.insert(1, BenchTest::Prompt(LONG_PROMPT));
    }
    let mut predictor =
        SpeedPredictor::new(path, table, gpu, &NvidiaTools::find()?, &PredictionCache::default())?;
    let mut rows = Vec::new();
    for test in tests {
        let parts = predictor.predict_test(test)?;
        rows.push(prediction_row(&metadata, gpu, test, &parts, options.kernels));
    }
    Ok(rows)
}

/// The GPU of this name.
pub fn find_gpu(name: &str) -> Result<GpuModel, BenchError> {
    let gpus = mlcc_target::gpus().map_err(|e| BenchError::Target(e.into()))?;
    let known: Vec<&str> = gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    let unknown =
        || BenchError::usage(format!("--predict {name}: unknown GPU; known are {}", known.join(", ")));
    gpus.iter().find(|gpu| gpu.name == name).cloned().ok_or_else(unknown)
}

/// NVIDIA's programs, which predictions need.
pub struct NvidiaTools {
    ptxas: PathBuf,
    nvdisasm: PathBuf,
}

impl NvidiaTools {
    pub fn find() -> Result<NvidiaTools, BenchError> {
        let ptxas = find_ptxas()
            .ok_or_else(|| missing_tool("ptxas", PTXAS_VARIABLE, "nvidia-cuda-nvcc-cu12==12.9.86"))?;
        let nvdisasm = find_nvdisasm()
            .ok_or_else(|| missing_tool("nvdisasm", NVDISASM_VARIABLE, "nvidia-cuda-nvdisasm"))?;
        Ok(NvidiaTools { ptxas, nvdisasm })
    }

    /// Versions of the assembler and of the disassembler.
    pub fn versions(&self) -> Result<[String; 2], BenchError> {
        let ptxas = PtxAssembler::find().map_err(|e| BenchError::Failed(e.to_string()))?;
        let nvdisasm = nvdisasm::version(&self.nvdisasm).map_err(|e| BenchError::Failed(e.to_string()))?;
        Ok([ptxas.version, nvdisasm])
    }
}

/// A kernel's machine code with its hash, and what the assembler says of it.
struct KernelCode {
    kernel: DecodedKernel,
    hash: u128,
    resources: KernelResources,
}

/// The identity of a launch: equal ones take equal time. Weights at other places do not matter.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LaunchKey {
    code: u128,
    grid: [u32; 3],
    kinds: Vec<u32>,
    call: Vec<(u64, u64)>,
}

/// Predictions of launches that were made already. Artifacts of one model for one GPU may share them: most of
/// their kernels are the same.
pub type PredictionCache = Rc<RefCell<BTreeMap<LaunchKey, LaunchPrediction>>>;

pub struct SpeedPredictor {
    path: PathBuf,
    table: Rc<ArtifactTable>,
    gpu: GpuModel,
    code: BTreeMap<String, KernelCode>,
    cache: PredictionCache,
}

/// Equal launches of a test, with their number.
struct LaunchGroup {
    kernel: String,
    registers: u32,
    tensor_cores: bool,
    wide_loads: bool,
    count: usize,
    prediction: LaunchPrediction,
}

impl SpeedPredictor {
    pub fn new(
        path: &Path,
        table: ArtifactTable,
        gpu: &GpuModel,
        tools: &NvidiaTools,
        known: &PredictionCache,
    ) -> Result<Self, BenchError> {
        let failed = |what: String| BenchError::Failed(format!("{}: {what}", path.display()));
        let images = table.images.iter().filter(|image| image.kind == "ptx" && image.sm <= gpu.sm);
        let image = images.max_by_key(|image| image.sm).ok_or_else(|| {
            failed(format!(
                "it has no PTX for {} (sm_{}): --predict is for artifacts built with --target cuda",
                gpu.title, gpu.sm
            ))
        })?;
        let text = image.bytes.strip_suffix(&[0]).unwrap_or(&image.bytes);
        let assembled = assemble(&tools.ptxas, text, gpu.sm).map_err(|e| failed(e.to_string()))?;
        let listing = disassemble(&tools.nvdisasm, &assembled.cubin).map_err(|e| failed(e.to_string()))?;
        let functions = sass::parse(&listing).map_err(|e| failed(e.to_string()))?;
        let usage: BTreeMap<&str, &ResourceUsage> =
            assembled.usage.iter().map(|u| (u.kernel.as_str(), u)).collect();
        let mut code = BTreeMap::new();
        for function in &functions {
            let Some(usage) = usage.get(function.name.as_str()) else { continue };
            let kernel = DecodedKernel::new(function, gpu.sm).map_err(|e| failed(e.to_string()))?;
            let resources = KernelResources { registers: usage.registers, shared_bytes: usage.shared_bytes };
            let text = format!("{:?} {} {}", function.code, usage.registers, usage.shared_bytes);
            code.insert(
                function.name.clone(),
                KernelCode { kernel, hash: xxh3_128(text.as_bytes()), resources },
            );
        }
        let (path, gpu, known) = (path.to_path_buf(), gpu.clone(), Rc::clone(known));
        Ok(SpeedPredictor { path, table: Rc::new(table), gpu, code, cache: known })
    }

    /// Predicted tokens per second of a test.
    pub fn speed(&mut self, test: BenchTest) -> Result<f64, BenchError> {
        let between = f64::from(self.gpu.launch_ns) * 1e-9;
        let parts = self.predict_test(test)?;
        let seconds: f64 = parts.iter().map(|p| p.count as f64 * (p.prediction.seconds + between)).sum();
        Ok(tokens_of_step(test) as f64 / seconds.max(f64::MIN_POSITIVE))
    }

    fn call(&self, sequences: Vec<SequenceSizes>, batch: bool) -> PredictedCall {
        let plan = &self.table.plan;
        let (vocab, weights_bytes, state_bytes) = (plan.vocab, plan.weights_bytes, plan.state_bytes);
        PredictedCall {
            plan: ArtifactPlan { vocab, weights_bytes, state_bytes, pages: plan.pages() },
            sequences,
            batch,
        }
    }

    /// The launches of one step of a test, or of all calls of its prompt.
    fn predict_test(&mut self, test: BenchTest) -> Result<Vec<LaunchGroup>, BenchError> {
        let one = |rows: usize, past: usize| SequenceSizes { rows: rows as u64, past: past as u64 };
        match test {
            BenchTest::Prompt(n) => {
                let chunk = self.table.plan.chunk.max(1) as usize;
                let mut parts = Vec::new();
                for past in (0..n).step_by(chunk) {
                    let call = self.call(vec![one(chunk.min(n - past), past)], false);
                    parts.extend(self.predict_entry("prefill", &call)?);
                }
                Ok(parts)
            }
            // In the middle of what is generated.
            BenchTest::Generate { tokens, depth, sequences: 1 } => {
                let call = self.call(vec![one(1, depth + tokens / 2)], false);
                self.predict_entry("decode", &call)
            }
            BenchTest::Generate { tokens, depth, sequences } => {
                let call = self.call(vec![one(1, depth + tokens / 2); sequences], true);
                self.predict_entry("decode_batch", &call)
            }
            BenchTest::Texts { .. } => Ok(Vec::new()),
            BenchTest::Mixed { mix, depth } => {
                let mut sequences = vec![one(1, depth); mix.decode_tokens];
                sequences.push(one(mix.prefill_tokens, 0));
                let call = self.call(sequences, true);
                self.predict_entry("step", &call)
            }
        }
    }

    fn predict_entry(&mut self, name: &str, call: &PredictedCall) -> Result<Vec<LaunchGroup>, BenchError> {
        let table = Rc::clone(&self.table);
        let most = table.plan.batch.max(1);
        let sequences = call.sequences.len();
        let entry = table.device_entries.iter().find(|e| e.name == name);
        let Some(entry) = entry.filter(|_| sequences as u64 <= most) else {
            let what = format!(
                "{}: steps of {sequences} sequences are not in it: build it with --max-batch {sequences}",
                self.path.display()
            );
            return Err(BenchError::Failed(what));
        };
        entry
            .launches
            .iter()
            .map(|launch| self.predict_launch(launch, call))
            .filter_map(Result::transpose)
            .collect()
    }

    /// Nothing for a launch that has no blocks in this call.
    fn predict_launch(
        &mut self,
        launch: &KernelLaunch,
        call: &PredictedCall,
    ) -> Result<Option<LaunchGroup>, BenchError> {
        let failed = |what: String| BenchError::Failed(format!("{}: {what}", self.path.display()));
        if launch.is_all_gather {
            return Err(failed("it is split among GPUs, whose communication is not predicted".into()));
        }
        let of = match launch.repeat {
            LaunchRepeat::Once => repeat::ONCE,
            LaunchRepeat::Outputs => repeat::OUTPUTS,
            LaunchRepeat::EachSequence => repeat::EACH_SEQUENCE,
        };
        let grid = launch::evaluate_grid(&launch.grid, of, call);
        if grid.contains(&0) {
            return Ok(None);
        }
        let code = self.code.get(&launch.kernel);
        let KernelCode { kernel, hash, resources } =
            code.ok_or_else(|| failed(format!("no code of {}", launch.kernel)))?;
        let mut key = LaunchKey {
            code: *hash,
            grid,
            kinds: launch.args.iter().map(|a| a.kind).collect(),
            call: call.sequences.iter().map(|s| (s.rows, 0)).collect(),
        };
        let with_past = |key: &LaunchKey| LaunchKey {
            call: call.sequences.iter().map(|s| (s.rows, s.past)).collect(),
            ..key.clone()
        };
        let mut done = self.cache.borrow_mut();
        let known = done.get(&key).filter(|p| !p.reads_past).or_else(|| done.get(&with_past(&key)));
        let prediction = match known {
            Some(known) => known.clone(),
            None => {
                let (block, shared_bytes, args) = (launch.block, launch.shared_bytes, launch.args.as_slice());
                let shape = LaunchConfig { grid, block, shared_bytes, args, repeat: of };
                let made = predict(kernel, *resources, &shape, call, &self.gpu)
                    .map_err(|e| failed(e.to_string()))?;
                if made.reads_past {
                    key = with_past(&key);
                }
                done.insert(key, made.clone());
                made
            }
        };
        Ok(Some(LaunchGroup {
            kernel: launch.kernel.clone(),
            registers: resources.registers,
            tensor_cores: ["HMMA", "IMMA"].iter().any(|name| kernel.uses(name, "")),
            wide_loads: ["LDG", "LDGSTS"].iter().any(|name| kernel.uses(name, "128")),
            count: 1,
            prediction,
        }))
    }
}

/// Tokens of what is predicted: a step, or a whole prompt.
fn tokens_of_step(test: BenchTest) -> usize {
    match test {
        BenchTest::Generate { sequences, .. } => sequences,
        other => other.tokens(),
    }
}

fn missing_tool(tool: &str, variable: &str, package: &str) -> BenchError {
    BenchError::Failed(format!(
        "--predict needs {tool}, which is neither in PATH nor named in {variable}; it comes with the CUDA toolkit, or as a Python package: \
         python3 -m pip install --no-deps --target DIR {package}, then {variable}=DIR/nvidia/.../bin/{tool}"
    ))
}

fn prediction_row(
    metadata: &Value,
    gpu: &GpuModel,
    test: BenchTest,
    parts: &[LaunchGroup],
    kernels: bool,
) -> PredictionRow {
    let between = f64::from(gpu.launch_ns) * 1e-9;
    let launches: usize = parts.iter().map(|p| p.count).sum();
    let mut bounds: BTreeMap<LaunchBound, f64> = BTreeMap::new();
    for part in parts {
        *bounds.entry(part.prediction.bound).or_default() += part.count as f64 * part.prediction.seconds;
        *bounds.entry(LaunchBound::Launch).or_default() += part.count as f64 * between;
    }
    let seconds: f64 = bounds.values().sum();
    let tokens = tokens_of_step(test) as f64;
    // Weights are read once at best, also where a prompt goes in several calls.
    let cost = test.cost(metadata, test.tokens() as u64);
    let by_copies = f64::from(gpu.copy_gbytes_per_s) * 1e9 / cost.bytes.max(1.0);
    let by_products = f64::from(gpu.dense_tflops) * 1e12 / cost.ops.iter().sum::<f64>().max(1.0);
    let tok_s = tokens / seconds.max(f64::MIN_POSITIVE);
    let limit = by_copies.min(by_products);
    let most = bounds.iter().max_by(|a, b| a.1.total_cmp(b.1)).map(|(bound, _)| bound.to_string());
    PredictionRow {
        prediction: true,
        model: metadata.pointer("/model/name").and_then(Value::as_str).unwrap_or("-").to_string(),
        quant: scheme_name(metadata),
        gpu: gpu.name.clone(),
        test: test.name(),
        tok_s,
        limit,
        limit_kind: if by_copies <= by_products { "copy_bandwidth" } else { "dense_products" },
        fraction_of_limit: tok_s / limit,
        launches,
        bound_by: most.unwrap_or_default(),
        bounds: bounds.into_iter().map(|(bound, seconds)| (bound.to_string(), seconds)).collect(),
        kernels: if kernels { kernel_rows(parts, gpu) } else { Vec::new() },
    }
}

/// Launches of a kernel that are alike, those with the largest loss first.
fn kernel_rows(parts: &[LaunchGroup], gpu: &GpuModel) -> Vec<PredictedKernelRow> {
    let between = f64::from(gpu.launch_ns) * 1e-9;
    let mut rows: BTreeMap<(&str, u64), PredictedKernelRow> = BTreeMap::new();
    for part in parts {
        let p = &part.prediction;
        let row = rows.entry((&part.kernel, p.work.blocks)).or_insert_with(|| PredictedKernelRow {
            kernel: part.kernel.clone(),
            launches: 0,
            seconds: 0.0,
            one: 0.0,
            bound_by: p.bound.to_string(),
            loss: 0.0,
            registers: part.registers,
            blocks: p.work.blocks,
            blocks_of_sm: p.work.resident,
            memory_bytes: p.work.memory_bytes,
            in_flight: p.in_flight,
            spills: p.spills,
            tensor_cores: part.tensor_cores,
            wide_loads: part.wide_loads,
        });
        row.launches += part.count;
        row.seconds += part.count as f64 * (p.seconds + between);
        row.loss += part.count as f64 * (p.seconds + between - p.roofline_seconds(gpu));
        row.one = row.seconds / row.launches as f64;
    }
    let mut rows: Vec<PredictedKernelRow> = rows.into_values().collect();
    rows.sort_by(|a, b| b.loss.total_cmp(&a.loss));
    rows
}

pub fn markdown(rows: &[PredictionRow], gpu: &GpuModel) -> String {
    let mut out = format!("Predictions for {}, from machine code; nothing here was measured.\n\n", gpu.title);
    out.push_str("| model | quant | test | predicted tok/s | limit tok/s | limited by | of limit | launches | bound by |\n");
    out.push_str("| --- | --- | --- | ---: | ---: | --- | ---: | ---: | --- |\n");
    for r in rows {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.1} | {:.1} | {} | {:.0} % | {} | {} |",
            r.model,
            r.quant,
            r.test,
            r.tok_s,
            r.limit,
            r.limit_kind,
            100.0 * r.fraction_of_limit,
            r.launches,
            r.bound_by
        );
    }
    for r in rows.iter().filter(|r| !r.kernels.is_empty()) {
        let all: f64 = r.kernels.iter().map(|k| k.seconds).sum();
        let _ = write!(
            out,
            "\n{}, predicted, largest loss first:\n\n\
             | kernel | launches | us each | share | loss us | bound by | blocks | per SM | registers | from memory | in flight per SM |\n\
             | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n",
            r.test
        );
        for k in &r.kernels {
            let _ = writeln!(
                out,
                "| {} | {} | {:.2} | {:.1} % | {:.1} | {} | {} | {} | {} | {} | {} |",
                k.kernel,
                k.launches,
                1e6 * k.one,
                100.0 * k.seconds / all,
                1e6 * k.loss,
                k.bound_by,
                k.blocks,
                k.blocks_of_sm,
                k.registers,
                bytes(k.memory_bytes as u64),
                bytes(k.in_flight as u64),
            );
        }
    }
    out
}
