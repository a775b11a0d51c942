//! Predictions for a GPU that need not be there, for the search: builds artifacts and predicts what their launches take. Nothing is measured.

use std::time::Instant;

use indicatif::ProgressBar;
use mlcc_driver::tune::{Comparison, Effort, Machine, Refusal, Trial};
use mlcc_runtime::{Artifact, table_of};
use mlcc_target::{GpuModel, Kind, Level};

use super::builder::Builder;
use super::machine::tell;
use crate::commands::bench::predict::{Known, Predictor, Tools};
use crate::commands::bench::test::Test;
use crate::error::CliError;
use crate::ui::Ui;

/// Tokens that are generated, of which the one in the middle is predicted.
const GENERATED: usize = 128;
/// Sequences of a step.
const FEW: usize = 8;
/// Those of the largest one, which artifacts are built for.
pub const MANY: usize = 32;

pub struct Predictions<'a> {
    builder: Builder,
    gpu: GpuModel,
    tools: Tools,
    known: Known,
    /// When the search ends.
    pub end: Option<Instant>,
    begin: Instant,
    ui: &'a Ui,
    bar: &'a ProgressBar,
}

/// The code of an artifact, and what was predicted of it so far.
pub struct Judged {
    predictor: Predictor,
    speeds: Vec<(Kind, f64)>,
}

impl<'a> Predictions<'a> {
    pub fn new(
        builder: Builder,
        (gpu, tools): (GpuModel, Tools),
        ui: &'a Ui,
        bar: &'a ProgressBar,
    ) -> Predictions<'a> {
        Predictions {
            builder,
            gpu,
            tools,
            known: Known::default(),
            end: None,
            begin: Instant::now(),
            ui,
            bar,
        }
    }

    pub fn builder(&self) -> &Builder {
        &self.builder
    }

    pub fn gpu(&self) -> &GpuModel {
        &self.gpu
    }

    fn test(&self, kind: Kind) -> Test {
        let room = usize::try_from(self.builder.room()).unwrap_or(usize::MAX);
        let generate = |sequences| Test::Generate { tokens: GENERATED.min(room), depth: 0, sequences };
        match kind {
            Kind::Decode => generate(1),
            Kind::FewSequences => generate(FEW),
            Kind::ManySequences => generate(MANY),
            Kind::Prompt | Kind::FewRows => Test::Prompt(self.builder.prompt()),
        }
    }

    pub fn test_name(&self, kind: Kind) -> String {
        self.test(kind).name()
    }

    fn speed(&self, of: &mut Judged, kind: Kind) -> Result<f64, CliError> {
        if let Some((_, speed)) = of.speeds.iter().find(|(known, _)| *known == kind) {
            return Ok(*speed);
        }
        let speed = of.predictor.speed(self.test(kind))?;
        of.speeds.push((kind, speed));
        Ok(speed)
    }
}

impl Machine for Predictions<'_> {
    type Artifact = Judged;
    type Error = CliError;

    fn code(&mut self, level: &Level) -> Result<u128, CliError> {
        let code = self.builder.compile(level)?;
        self.bar.set_position(self.begin.elapsed().as_secs());
        Ok(code)
    }

    fn load(&mut self) -> Result<Judged, CliError> {
        let path = self.builder.write()?;
        let table = table_of(&Artifact::open(&path)?)?;
        std::fs::remove_file(&path).map_err(CliError::io("remove", &path))?;
        let predictor = Predictor::new(&path, table, &self.gpu, &self.tools, &self.known)?;
        Ok(Judged { predictor, speeds: Vec::new() })
    }

    fn compare(
        &mut self,
        old: &mut Judged,
        new: &mut Judged,
        kind: Kind,
        _: Effort,
    ) -> Result<Option<Comparison>, CliError> {
        if self.is_over() {
            return Ok(None);
        }
        let without = self.speed(old, kind)?;
        let with = self.speed(new, kind)?;
        self.bar.set_position(self.begin.elapsed().as_secs());
        Ok(Some(Comparison::exact(kind, without, with)))
    }

    fn refused(&self, error: CliError) -> Result<String, CliError> {
        match error {
            // What is wrong with this machine is wrong for every value.
            CliError::Interrupted | CliError::Io { .. } => Err(error),
            other => Ok(other.to_string()),
        }
    }

    fn is_over(&self) -> bool {
        self.builder.is_interrupted() || self.end.is_some_and(|end| Instant::now() >= end)
    }

    fn tried(&mut self, trial: &Trial) {
        tell(self.ui, self.bar, trial);
    }

    fn left_out(&mut self, refusal: &Refusal) {
        self.ui.note(format!("{} {} is left out: {}", refusal.key, refusal.to, refusal.why));
    }
}
