//! The search for the pass that makes a model wrong.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use mlcc_passes::LoweredProgram;
use mlcc_target::{Arch, CompileTarget};
use serde::Serialize;

use super::diagnose::{self, FaultDiagnosis};
use super::stages::{PassCost, PassStages, TapSetup, first_wrong_pass};
use super::{BoxedError, LayerComparison, TapCall, compare};
use crate::compile::{BuildOptions, BuildSource};

/// One build compared with the meaning of its graph.
#[derive(Clone, Debug, Serialize)]
pub struct BuildCheck {
    /// Taps of the build against the graph; absent if the graph itself goes wrong in a pass.
    pub layers: Option<LayerComparison>,
    /// The fault; `None` if there is none.
    pub diagnosis: Option<FaultDiagnosis>,
    /// The cost of the passes that change numbers on purpose, which is no fault.
    pub costs: Vec<PassCost>,
}

impl BuildCheck {
    pub fn ok(&self) -> bool {
        self.diagnosis.is_none() && self.layers.as_ref().is_some_and(LayerComparison::ok)
    }

    fn error(&self) -> f64 {
        let layers = self.layers.as_ref().map_or(0.0, |l| l.first.as_ref().map_or(l.worst, |f| f.error));
        self.diagnosis.as_ref().map_or(layers, |d| d.layer.error)
    }
}

/// A build without one pass.
#[derive(Clone, Debug, Serialize)]
pub struct PassTrial {
    pub without: String,
    pub ok: bool,
    /// Error of the first tap that departs, or the worst one.
    pub error: f64,
}

/// The findings of the search.
#[derive(Clone, Debug, Serialize)]
pub struct BisectVerdict {
    pub whole: BuildCheck,
    pub trials: Vec<PassTrial>,
    /// Passes without which the build is right.
    pub guilty: Vec<String>,
}

/// True if code for the target runs here.
pub fn runs_here(target: &CompileTarget) -> bool {
    let have = mlcc_target::detected_features();
    let fits = |l: &mlcc_target::FeatureLevel| l.features.iter().all(|f| have.contains(&f.as_str()));
    Arch::of_host() == Some(target.arch) && target.levels.iter().any(fits)
}

/// Builds with taps, runs the calls and compares: the graph after every pass, then compiled code with the
/// graph. Code that this machine cannot run is interpreted.
pub fn check_build(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    calls: &[TapCall],
    folder: &Path,
    explain: bool,
    cancel: &AtomicBool,
) -> Result<BuildCheck, BoxedError> {
    let setup = TapSetup { source, target, options, cancel };
    let (program, _, stages) = setup.compile()?;
    let (wrong, costs) = first_wrong_pass(&setup, &stages, calls)?;
    if let Some(wrong) = wrong {
        let diagnosis = diagnose::of_pass(&setup, &stages, &wrong, calls)?;
        return Ok(BuildCheck { layers: None, diagnosis: Some(diagnosis), costs });
    }
    let layers = against_reference(&setup, &program, &stages, calls, folder)?;
    let diagnosis = match &layers.first {
        Some(first) if explain && runs_here(target) => {
            Some(diagnose::of_kernels(&setup, &stages, first, calls, folder)?)
        }
        _ => None,
    };
    Ok(BuildCheck { layers: Some(layers), diagnosis, costs })
}

/// The build against the graph that says what it computes, without a look at the passes that led there.
pub fn check_kernels(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    calls: &[TapCall],
    folder: &Path,
    cancel: &AtomicBool,
) -> Result<LayerComparison, BoxedError> {
    let setup = TapSetup { source, target, options, cancel };
    let (program, _, stages) = setup.compile()?;
    against_reference(&setup, &program, &stages, calls, folder)
}

fn against_reference(
    setup: &TapSetup<'_>,
    program: &LoweredProgram,
    stages: &PassStages,
    calls: &[TapCall],
    folder: &Path,
) -> Result<LayerComparison, BoxedError> {
    let found = match runs_here(setup.target) {
        true => diagnose::run_machine(setup, program, calls, &folder.join("whole.so"))?,
        false => diagnose::run_interpreter(setup, program, calls)?,
    };
    let expected = setup.reference_taps(stages, calls, &found)?;
    compare(calls, &found, &expected, setup.tolerance())
}

/// Checks the build, and if it is wrong, the build without each optional pass. `progress` gets every trial.
pub fn bisect_passes(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    calls: &[TapCall],
    folder: &Path,
    cancel: &AtomicBool,
    mut progress: impl FnMut(&PassTrial),
) -> Result<BisectVerdict, BoxedError> {
    let options = BuildOptions { debug_taps: true, ..options.clone() };
    let whole = check_build(source, target, &options, calls, folder, true, cancel)?;
    let mut verdict = BisectVerdict { whole, trials: Vec::new(), guilty: Vec::new() };
    if verdict.whole.ok() {
        return Ok(verdict);
    }
    let optional = options.pipeline.iter().filter(|p| p.optional);
    let off = options.passes_off();
    for pass in optional.filter(|p| !off.iter().any(|d| d == p.name)) {
        if cancel.load(Ordering::Relaxed) {
            return Err("interrupted".into());
        }
        let mut options = options.clone();
        options.disabled_passes.push(pass.name.into());
        let check = check_build(source, target, &options, calls, folder, false, cancel)?;
        let trial = PassTrial { without: pass.name.into(), ok: check.ok(), error: check.error() };
        progress(&trial);
        if trial.ok {
            verdict.guilty.push(trial.without.clone());
        }
        verdict.trials.push(trial);
    }
    Ok(verdict)
}

impl BisectVerdict {
    /// One sentence that names who is guilty.
    pub fn sentence(&self) -> String {
        if self.whole.ok() {
            return "every layer is within the tolerance: nothing to look for".into();
        }
        let by_stage = self.whole.diagnosis.as_ref().and_then(|d| d.pass.clone());
        match (by_stage, self.guilty.as_slice()) {
            (Some(pass), _) => format!("guilty: pass {pass}"),
            (None, []) => "no optional pass is guilty: the error stays whichever is switched off".into(),
            (None, passes) => format!("guilty: pass {}", passes.join(" or ")),
        }
    }
}
