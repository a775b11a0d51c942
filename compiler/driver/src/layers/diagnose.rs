//! The search for the ops that make a layer depart from its reference.
//!
//! Where a pass changes what the graph computes, the ops between the values that did not change and the one
//! that did are named. Where the graph stays right, the same groups of ops are compiled once more with the
//! result of every kernel of the layer kept, and the first kernel whose result differs from the graph's is
//! named. If the kernel interpreter finds the same wrong result, the kernel itself is wrong, otherwise its
//! code.

use std::path::Path;

use mlcc_ir::dim::Dim;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, FunctionKind, NodeId, ValueId};
use mlcc_ir::module::{FuncId, Module};
use mlcc_ir::ops::Op;
use mlcc_ir::text::{node_label, print_function, print_nodes};
use mlcc_passes::pipeline::run_one;
use mlcc_passes::{LoweredProgram, PassContext};
use mlcc_runtime::{LoadOptions, Model};
use serde::Serialize;

use super::given::run_given;
use super::run::{ArtifactLayers, GraphLayers, KernelLayers, ParamPacking};
use super::stages::{PassStages, TapSetup, WrongPass};
use super::{BoxedError, LayerComparison, TapCall, TapDeviation, TapOutput, compare, run_all};
use crate::compile::{self, BuildReport, taps};
use crate::interpret::StepModel;

/// Weights times tokens that the kernel interpreter works through in about a minute.
const INTERPRETABLE: u64 = 400_000_000;

/// The stage that has the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultStage {
    /// A pass over the graph.
    Graph,
    /// The loops of a kernel: lowering or a generator.
    Kernel,
    /// The code of a kernel whose loops are right.
    Code,
    /// A kernel; the interpreter was not asked.
    KernelOrCode,
    /// Every kernel is right while all results are kept: addresses or barriers.
    Memory,
}

/// The fault and its place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FaultDiagnosis {
    pub stage: FaultStage,
    /// The pass whose result departs.
    pub pass: Option<String>,
    pub kernel: Option<String>,
    /// The first tap that departs.
    pub layer: TapDeviation,
    /// The ops at fault, as text.
    pub ops: String,
}

impl FaultDiagnosis {
    /// The text for people.
    pub fn text(&self) -> String {
        let layer = format!("{} in {}, error {:.1e}", self.layer.name, self.layer.entry, self.layer.error);
        let pass = self.pass.as_deref().unwrap_or("?");
        let kernel = self.kernel.as_deref().unwrap_or("?");
        let what = match self.stage {
            FaultStage::Graph => format!("pass {pass} changes what the graph computes"),
            FaultStage::Kernel => format!("kernel {kernel}: its loops do not compute its ops"),
            FaultStage::Code => format!("kernel {kernel}: its loops are right, the code made of them is not"),
            FaultStage::KernelOrCode => format!("kernel {kernel} does not compute its ops"),
            FaultStage::Memory => {
                "every kernel is right while its results are kept: suspect plan_memory and \
                              plan_barriers, and compare with --threads 1"
                    .into()
            }
        };
        let ops = if self.ops.is_empty() { String::new() } else { format!("ops:\n{}", indented(&self.ops)) };
        format!("{what}\nfirst seen in {layer}\n{ops}")
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// The ops that a wrong pass has put between values that were there before and the first tap that departs.
pub fn of_pass(
    setup: &TapSetup<'_>,
    stages: &PassStages,
    wrong: &WrongPass,
    calls: &[TapCall],
) -> Result<FaultDiagnosis, BoxedError> {
    let layer = wrong.comparison.first.clone().ok_or("no tap departs")?;
    let (before, after) = (&stages.list[wrong.stage - 1].module, &stages.list[wrong.stage].module);
    let calls = &calls[..=layer.call];
    let known = every_value(setup, &stages.packs, before, calls, layer.entry)?;
    let values = every_value(setup, &stages.packs, after, calls, layer.entry)?;
    let (_, f) = after.function(layer.entry).ok_or("the entry function is missing")?;
    let output = output_of(after, f, &layer.name).ok_or("the tap is gone")?;
    let is_known = |v: ValueId| {
        let value = values.iter().find(|(id, _)| *id == v).map(|(_, x)| x);
        value.is_some_and(|value| known.iter().any(|(_, k)| same(k, value)))
    };
    let nodes = slice(f, output, &is_known);
    Ok(FaultDiagnosis {
        stage: FaultStage::Graph,
        pass: Some(wrong.pass.into()),
        kernel: None,
        layer,
        ops: print_nodes(after, f, &nodes),
    })
}

/// The value of a tap, or of the logits.
fn output_of(module: &Module, f: &Function, tap: &str) -> Option<ValueId> {
    let names = module.taps_of(&f.name);
    let index = if tap == super::LOGITS { 0 } else { names.iter().position(|n| n == tap)? + 1 };
    f.outputs.get(index).copied()
}

/// Every float value of an entry function in the last of the calls.
fn every_value(
    setup: &TapSetup<'_>,
    packs: &ParamPacking,
    module: &Module,
    calls: &[TapCall],
    entry: &str,
) -> Result<Vec<(ValueId, Vec<f64>)>, BoxedError> {
    let mut all = module.clone();
    let (id, _) = module.function(entry).ok_or("the entry function is missing")?;
    let f = &mut all.functions[id];
    let outputs: Vec<ValueId> = f.live_nodes().flat_map(|(_, n)| n.outputs.clone()).collect();
    f.outputs.clone_from(&outputs);
    let mut graph = GraphLayers::new(&all, &setup.source.checkpoint, packs)?;
    let mut values = Vec::new();
    for call in calls {
        values = graph.outputs(call)?;
    }
    Ok(outputs.into_iter().zip(values).map(|(v, t)| (v, t.data)).collect())
}

fn same(a: &[f64], b: &[f64]) -> bool {
    const CLOSE: f64 = 1e-5;
    let scale = b.iter().fold(0f64, |m, x| m.max(x.abs()));
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= CLOSE * scale)
}

/// Nodes that `to` is computed from, back to values that `stop` accepts; in execution order.
fn slice(f: &Function, to: ValueId, stop: &dyn Fn(ValueId) -> bool) -> Vec<NodeId> {
    let mut wanted = vec![false; f.values.len()];
    wanted[to.index()] = true;
    let mut nodes: Vec<NodeId> = Vec::new();
    for (id, node) in f.live_nodes().rev() {
        if node.outputs.iter().any(|v| wanted[v.index()]) {
            nodes.push(id);
            for &v in node.inputs.iter().filter(|&&v| !stop(v)) {
                wanted[v.index()] = true;
            }
        }
    }
    nodes.reverse();
    // Parameters and states are leaves, not suspects.
    nodes.retain(|&n| !matches!(f.nodes[n].op, Op::Param(_) | Op::StateRead(_)));
    nodes
}

/// The first kernel of the layer whose result is not the graph's.
pub fn of_kernels(
    setup: &TapSetup<'_>,
    stages: &PassStages,
    layer: &TapDeviation,
    calls: &[TapCall],
    folder: &Path,
) -> Result<FaultDiagnosis, BoxedError> {
    let outlined = stages.list.last().ok_or("no passes have run")?;
    let mut module = outlined.module.clone();
    let entries: Vec<FuncId> =
        ["prefill", "decode"].iter().filter_map(|e| Some(module.function(e)?.0)).collect();
    for id in entries {
        keep_results(&mut module, id, &layer.name)?;
    }
    let calls = &calls[..=layer.call];
    let program = lower_module(setup, module.clone(), &stages.packs)?;
    let found = run_machine(setup, &program, calls, &folder.join("kept.so"))?;
    let (checkpoint, layers) = (&setup.source.checkpoint, without_kernels(&found));
    let expected = run_given(&module, checkpoint, &stages.packs, calls, &layers)?;
    let limit = setup.tolerance();
    let results = compare(calls, &only_kernels(&found), &only_kernels(&expected), limit)?;
    let Some(first) = &results.first else {
        let (layer, ops) = (layer.clone(), String::new());
        return Ok(FaultDiagnosis { stage: FaultStage::Memory, pass: None, kernel: None, layer, ops });
    };
    let (kernel, ops) = group_of(&program.module, &first.name);
    let interpreted = by_interpreter(setup, &program, calls, &expected, first, limit)?;
    let stage = match interpreted {
        None => FaultStage::KernelOrCode,
        Some(true) => FaultStage::Kernel,
        Some(false) => FaultStage::Code,
    };
    let pass = (stage == FaultStage::Kernel).then(|| "lower".to_string());
    Ok(FaultDiagnosis { stage, pass, kernel, layer: layer.clone(), ops })
}

/// Begin of the name of a tap that is a kernel's result.
const KERNEL: &str = "kernel ";

fn only_kernels(taps: &[Vec<TapOutput>]) -> Vec<Vec<TapOutput>> {
    filter_taps(taps, |tap| tap.name.starts_with(KERNEL))
}

fn without_kernels(taps: &[Vec<TapOutput>]) -> Vec<Vec<TapOutput>> {
    filter_taps(taps, |tap| !tap.name.starts_with(KERNEL))
}

fn filter_taps(taps: &[Vec<TapOutput>], wanted: impl Fn(&TapOutput) -> bool) -> Vec<Vec<TapOutput>> {
    taps.iter().map(|call| call.iter().filter(|tap| wanted(tap)).cloned().collect()).collect()
}

/// Makes every result of the groups after the earlier taps, which the tap is computed from, a tap as well.
fn keep_results(module: &mut Module, id: FuncId, tap: &str) -> Result<(), BoxedError> {
    let f = &module.functions[id];
    let names = module.taps_of(&f.name).to_vec();
    let output = output_of(module, f, tap).ok_or_else(|| format!("@{} has no tap {tap}", f.name))?;
    let earlier: Vec<ValueId> =
        names.iter().zip(&f.outputs[1..]).take_while(|(n, _)| *n != tap).map(|(_, v)| *v).collect();
    let nodes = slice(f, output, &|v| earlier.contains(&v));
    let mut f = f.clone();
    let mut kept = names;
    for node in nodes {
        let Op::Call(callee) = f.nodes[node].op else { continue };
        let label = node_label(&f, node);
        let callee = &module.functions[callee].name;
        for (i, v) in f.nodes[node].outputs.clone().into_iter().enumerate() {
            if let Some(matrix) = as_matrix(module, &mut f, v)? {
                f.outputs.push(matrix);
                kept.push(format!("{KERNEL}{callee} result {i} of {label}"));
            }
        }
    }
    let name = f.name.clone();
    module.functions[id] = f;
    module.taps.iter_mut().filter(|t| t.function == name).for_each(|t| t.names.clone_from(&kept));
    Ok(())
}

/// A view `[rows, width]` of a value; `None` for what is no matrix at all.
fn as_matrix(module: &Module, f: &mut Function, v: ValueId) -> Result<Option<ValueId>, BoxedError> {
    let dims = f.ty(v).dims.clone();
    let Some((width, rows)) = dims.split_last() else { return Ok(None) };
    let rows = rows.iter().try_fold(Dim::from(1), |a, d| a.mul(d));
    match rows {
        Some(rows) if width.as_const().is_some() => {
            let op = Op::Reshape { dims: vec![rows, width.clone()] };
            Ok(f.append(module, op, &[v])?.first().copied())
        }
        _ => Ok(None),
    }
}

/// The passes after the graph, for a module that they have not seen.
fn lower_module(
    setup: &TapSetup<'_>,
    module: Module,
    packs: &ParamPacking,
) -> Result<LoweredProgram, BoxedError> {
    let mut program = LoweredProgram::new(module);
    program.pack_options.clone_from(packs);
    let mut context = PassContext::new(compile::pass_options(setup.source, setup.target, setup.options));
    let kernel_level = setup.options.pipeline.iter().skip_while(|p| p.name != "lower");
    for pass in kernel_level.filter(|p| !setup.options.disabled_passes.iter().any(|d| d == p.name)) {
        run_one(pass, &mut program, &mut context)?;
    }
    Ok(program)
}

/// Compiles a program, loads it and runs the calls.
pub fn run_machine(
    setup: &TapSetup<'_>,
    program: &LoweredProgram,
    calls: &[TapCall],
    path: &Path,
) -> Result<Vec<Vec<TapOutput>>, BoxedError> {
    let memory = program.memory.as_ref().ok_or("memory is not planned")?;
    let places = taps::tap_places(program, memory);
    setup.cancellable(|hooks| {
        let mut report = BuildReport::default();
        compile::write_program(setup.source, setup.target, setup.options, program, path, &mut report, hooks)
    })?;
    let session = Model::load(path, &LoadOptions::default())?.session()?;
    run_all(&mut ArtifactLayers { session, places }, calls)
}

/// The group of a kernel's tap, as its name and text.
fn group_of(module: &Module, tap: &str) -> (Option<String>, String) {
    let name = tap.strip_prefix(KERNEL).and_then(|t| t.split(" result ").next());
    let found = name.and_then(|n| module.function(n)).filter(|(_, f)| f.kind == FunctionKind::Group);
    (name.map(String::from), found.map_or(String::new(), |(_, f)| print_function(module, f)))
}

/// True if interpreted kernels depart at the same result too; `None` if that would take too long.
fn by_interpreter(
    setup: &TapSetup<'_>,
    program: &LoweredProgram,
    calls: &[TapCall],
    expected: &[Vec<TapOutput>],
    first: &TapDeviation,
    limit: f64,
) -> Result<Option<bool>, BoxedError> {
    let tokens: usize = calls.iter().map(|c| c.tokens.len()).sum();
    let memory = program.memory.as_ref().ok_or("memory is not planned")?;
    if memory.weights_bytes.saturating_mul(tokens as u64) > INTERPRETABLE {
        return Ok(None);
    }
    let found = run_interpreter(setup, program, calls)?;
    let results: LayerComparison = compare(calls, &only_kernels(&found), &only_kernels(expected), limit)?;
    Ok(Some(results.first.is_some_and(|d| d.name == first.name && d.call == first.call)))
}

/// The calls through the kernel interpreter: what a GPU would do as well.
pub fn run_interpreter(
    setup: &TapSetup<'_>,
    program: &LoweredProgram,
    calls: &[TapCall],
) -> Result<Vec<Vec<TapOutput>>, BoxedError> {
    let memory = program.memory.as_ref().ok_or("memory is not planned")?;
    let (architecture, chunk) = (&setup.source.model.config.architecture, setup.source.chunk as usize);
    let model = StepModel::new(program, 0, &setup.source.checkpoint, architecture, chunk, 2)?;
    run_all(&mut KernelLayers { model, places: taps::tap_places(program, memory) }, calls)
}
