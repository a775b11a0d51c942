//! Predictions for a GPU that need not be there, for the search: builds artifacts and predicts what their
//! launches take. Nothing is measured.

use std::time::Instant;

use mlcc_driver::tune::{CandidateEvaluator, ComparisonEffort, RefusedValue, SpeedComparison, TuneTrial};
use mlcc_runtime::{Artifact, read_table};
use mlcc_target::{FeatureLevel, GpuModel, WorkloadKind};

use super::builder::TrialBuilder;
use super::machine::show_trial;
use crate::error::BenchError;
use crate::host::BenchHost;
use crate::predict::{NvidiaTools, PredictionCache, SpeedPredictor};
use crate::test::BenchTest;

/// Tokens that are generated, of which the one in the middle is predicted.
const GENERATED: usize = 128;
/// Sequences of a step.
const FEW: usize = 8;
/// Sequences of the largest step, which artifacts are built for.
pub const MANY: usize = 32;

pub struct PredictionBench<'a> {
    builder: TrialBuilder,
    gpu: GpuModel,
    tools: NvidiaTools,
    cache: PredictionCache,
    /// The end of the search.
    pub end: Option<Instant>,
    started: Instant,
    host: &'a dyn BenchHost,
}

/// The code of an artifact, and what was predicted of it so far.
pub struct PredictedArtifact {
    predictor: SpeedPredictor,
    speeds: Vec<(WorkloadKind, f64)>,
}

impl<'a> PredictionBench<'a> {
    pub fn new(
        builder: TrialBuilder,
        (gpu, tools): (GpuModel, NvidiaTools),
        host: &'a dyn BenchHost,
    ) -> PredictionBench<'a> {
        PredictionBench {
            builder,
            gpu,
            tools,
            cache: PredictionCache::default(),
            end: None,
            started: Instant::now(),
            host,
        }
    }

    pub fn builder(&self) -> &TrialBuilder {
        &self.builder
    }

    pub fn gpu(&self) -> &GpuModel {
        &self.gpu
    }

    fn test(&self, kind: WorkloadKind) -> BenchTest {
        let room = usize::try_from(self.builder.max_tokens()).unwrap_or(usize::MAX);
        let generate = |sequences| BenchTest::Generate { tokens: GENERATED.min(room), depth: 0, sequences };
        match kind {
            WorkloadKind::Decode => generate(1),
            WorkloadKind::FewSequences => generate(FEW),
            WorkloadKind::ManySequences => generate(MANY),
            WorkloadKind::Prompt | WorkloadKind::FewRows => BenchTest::Prompt(self.builder.prompt()),
        }
    }

    pub fn test_name(&self, kind: WorkloadKind) -> String {
        self.test(kind).name()
    }

    fn speed(&self, of: &mut PredictedArtifact, kind: WorkloadKind) -> Result<f64, BenchError> {
        if let Some((_, speed)) = of.speeds.iter().find(|(known, _)| *known == kind) {
            return Ok(*speed);
        }
        let speed = of.predictor.speed(self.test(kind))?;
        of.speeds.push((kind, speed));
        Ok(speed)
    }
}

impl CandidateEvaluator for PredictionBench<'_> {
    type Artifact = PredictedArtifact;
    type Error = BenchError;

    fn compile_code(&mut self, level: &FeatureLevel) -> Result<u128, BenchError> {
        let code = self.builder.compile(level)?;
        self.host.set_progress(self.started.elapsed().as_secs());
        Ok(code)
    }

    fn load(&mut self) -> Result<PredictedArtifact, BenchError> {
        let path = self.builder.write()?;
        let table = read_table(&Artifact::open(&path)?)?;
        std::fs::remove_file(&path).map_err(BenchError::io("remove", &path))?;
        let predictor = SpeedPredictor::new(&path, table, &self.gpu, &self.tools, &self.cache)?;
        Ok(PredictedArtifact { predictor, speeds: Vec::new() })
    }

    fn compare(
        &mut self,
        old: &mut PredictedArtifact,
        new: &mut PredictedArtifact,
        kind: WorkloadKind,
        _: ComparisonEffort,
    ) -> Result<Option<SpeedComparison>, BenchError> {
        if self.is_over() {
            return Ok(None);
        }
        let without = self.speed(old, kind)?;
        let with = self.speed(new, kind)?;
        self.host.set_progress(self.started.elapsed().as_secs());
        Ok(Some(SpeedComparison::exact(kind, without, with)))
    }

    fn refused(&self, error: BenchError) -> Result<String, BenchError> {
        match error {
            // A fault of this machine concerns every value.
            BenchError::Interrupted | BenchError::Io { .. } => Err(error),
            other => Ok(other.to_string()),
        }
    }

    fn is_over(&self) -> bool {
        self.builder.is_interrupted() || self.end.is_some_and(|end| Instant::now() >= end)
    }

    fn report_trial(&mut self, trial: &TuneTrial) {
        show_trial(self.host, trial);
    }

    fn report_refusal(&mut self, refusal: &RefusedValue) {
        self.host.note(&format_args!("{} {} is left out: {}", refusal.key, refusal.to, refusal.why));
    }
}
