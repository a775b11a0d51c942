//! The graph of a model after each pass, interpreted: which pass changes what the model computes.

use std::sync::atomic::AtomicBool;

use mlcc_ir::module::Module;
use mlcc_ir::text::print_module;
use mlcc_passes::pipeline::changes_numbers;
use mlcc_passes::{LoweredProgram, PassContext};
use mlcc_target::CompileTarget;
use serde::Serialize;

use super::given::run_given;
use super::run::{GraphLayers, ParamPacking};
use super::{
    BoxedError, LOGITS, LayerComparison, TapCall, TapOutput, cache_tolerance, compare, run_all,
    scheme_tolerance,
};
use crate::compile::{self, BuildEvent, BuildHooks, BuildOptions, BuildReport, BuildSource};

/// Largest error by which the graph may move in a pass that keeps its meaning: the order of f32 operations
/// may change.
const EQUAL: f64 = 1e-4;

/// A build with taps that can be looked into.
pub struct TapSetup<'a> {
    pub source: &'a BuildSource,
    pub target: &'a CompileTarget,
    /// Options with `debug_taps`.
    pub options: &'a BuildOptions,
    /// Ends the work early once it is set.
    pub cancel: &'a AtomicBool,
}

/// The module as one pass leaves it.
pub struct PassStage {
    /// `None`: before all passes.
    pub pass: Option<&'static str>,
    pub module: Module,
}

/// The graph before the passes and after each one that changed it, up to lowering.
pub struct PassStages {
    pub list: Vec<PassStage>,
    pub packs: ParamPacking,
    /// The stage that defines the result of the artifact: weights and activations are quantized in it, and
    /// every pass between it and the definition that has to keep the meaning was compared with it already.
    pub reference: usize,
}

impl TapSetup<'_> {
    /// Largest error that compiled code may show against the graph: that of the scheme, or of the caches.
    pub fn tolerance(&self) -> f64 {
        let cache = match self.source.model.config.architecture.has_cache() {
            true => cache_tolerance(self.options.cache_type()),
            false => 0.0,
        };
        scheme_tolerance(&self.options.quant).max(cache)
    }

    pub fn cancellable<T>(&self, run: impl FnOnce(&mut BuildHooks<'_>) -> T) -> T {
        run(&mut BuildHooks { event: &mut |_| {}, cancel: self.cancel })
    }

    /// Runs all passes and keeps the graph after each.
    pub fn compile(&self) -> Result<(LoweredProgram, PassContext, PassStages), BoxedError> {
        let mut list: Vec<PassStage> = Vec::new();
        let mut packs = ParamPacking::new();
        let mut last_text = String::new();
        let (name, architecture) = (&self.source.model.name, &self.source.model.config.architecture);
        let module = crate::model::build_module_with_taps(name, architecture, self.source.context, 1)?;
        list.push(PassStage { pass: None, module });
        let mut event = |event: BuildEvent<'_>| {
            let BuildEvent::Pass { pass, program } = event else { return };
            if !program.levels.is_empty() {
                return;
            }
            let text = print_module(&program.module);
            if text != last_text {
                list.push(PassStage { pass: Some(pass.name), module: program.module.clone() });
                packs.clone_from(&program.pack_options);
                last_text = text;
            }
        };
        let mut hooks = BuildHooks { event: &mut event, cancel: self.cancel };
        let mut report = BuildReport::default();
        let (program, context) =
            compile::compile(self.source, self.target, self.options, &mut report, &mut hooks)?;
        let changes = |s: &PassStage| s.pass.is_some_and(changes_numbers);
        // A pass that found nothing to quantize has left no stage.
        let reference = list.iter().rposition(changes).unwrap_or(0);
        Ok((program, context, PassStages { list, packs, reference }))
    }

    /// Taps of the graph at a stage.
    pub fn graph_taps(
        &self,
        stages: &PassStages,
        stage: usize,
        calls: &[TapCall],
    ) -> Result<Vec<Vec<TapOutput>>, BoxedError> {
        let module = &stages.list[stage].module;
        run_all(&mut GraphLayers::new(module, &self.source.checkpoint, &stages.packs)?, calls)
    }

    /// Taps of the graph that says what the artifact computes, each from what `found` has before it.
    pub fn reference_taps(
        &self,
        stages: &PassStages,
        calls: &[TapCall],
        found: &[Vec<TapOutput>],
    ) -> Result<Vec<Vec<TapOutput>>, BoxedError> {
        let module = &stages.list[stages.reference].module;
        run_given(module, &self.source.checkpoint, &stages.packs, calls, found)
    }
}

/// A pass that changes what the graph computes.
pub struct WrongPass {
    pub pass: &'static str,
    /// Number of its stage.
    pub stage: usize,
    pub comparison: LayerComparison,
}

/// The cost of a pass that changes numbers on purpose.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassCost {
    pub pass: &'static str,
    /// Largest distance of a logit from the graph before the pass, relative to the largest.
    pub error: f64,
}

/// The first pass after which taps are not what they were before it, and what the passes cost that change
/// numbers on purpose: no bound on that would tell a wrong one from a right one, as long as numbers stay
/// finite.
pub fn first_wrong_pass(
    setup: &TapSetup<'_>,
    stages: &PassStages,
    calls: &[TapCall],
) -> Result<(Option<WrongPass>, Vec<PassCost>), BoxedError> {
    let mut costs = Vec::new();
    let mut before = setup.graph_taps(stages, 0, calls)?;
    for stage in 1..stages.list.len() {
        let pass = stages.list[stage].pass.unwrap_or_default();
        let after = setup.graph_taps(stages, stage, calls)?;
        let permitted = match changes_numbers(pass) {
            true => f64::MAX,
            // After quantized activations a code may fall on the other side of its rounding edge.
            false if stage > stages.reference => EQUAL.max(setup.tolerance()),
            false => EQUAL,
        };
        let comparison = compare(calls, &after, &before, permitted)?;
        if changes_numbers(pass) {
            let logits = comparison.rows.iter().filter(|r| r.name == LOGITS);
            let error = logits.flat_map(|r| [r.prefill, r.decode]).flatten().fold(0.0, f64::max);
            costs.push(PassCost { pass, error });
            before = after;
        }
        if !comparison.ok() {
            return Ok((Some(WrongPass { pass, stage, comparison }), costs));
        }
    }
    Ok((None, costs))
}
