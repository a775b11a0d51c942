//! This machine, for the search: times runs of artifacts with random weights that are made on load.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mlcc_driver::format::bytes;
use mlcc_driver::tune::{
    CandidateEvaluator, ComparisonEffort, SpeedComparison, SpeedTimer, TuneTrial, compare_interleaved,
};
use mlcc_runtime::{LoadOptions, Model, Session};
use mlcc_target::{FeatureLevel, WorkloadKind};

use super::builder::TrialBuilder;
use crate::error::BenchError;
use crate::host::BenchHost;
use crate::proc::proc_value;
use crate::test::{test_prompt, test_tokens};

/// Runs are repeated until a timing takes about so long.
const TIMING: Duration = Duration::from_millis(60);
const MOST_REPEATS: usize = 256;
/// Tokens of a short prompt.
const FEW: usize = 16;
/// Positions before the tokens that are timed, where a model has a cache.
const DEPTH: u64 = 256;

pub struct TimingBench<'a> {
    builder: TrialBuilder,
    threads: usize,
    /// The number of repetitions of a run in one timing, by kind.
    repeats: BTreeMap<WorkloadKind, usize>,
    /// The end of the search.
    pub end: Option<Instant>,
    started: Instant,
    host: &'a dyn BenchHost,
}

/// An artifact that runs.
pub struct LoadedArtifact {
    session: Session,
}

impl<'a> TimingBench<'a> {
    pub fn new(builder: TrialBuilder, threads: usize, host: &'a dyn BenchHost) -> TimingBench<'a> {
        TimingBench { builder, threads, repeats: BTreeMap::new(), end: None, started: Instant::now(), host }
    }

    pub fn builder(&self) -> &TrialBuilder {
        &self.builder
    }

    /// Name of a kind of work with the number of its tokens.
    pub fn test_name(&self, kind: WorkloadKind) -> String {
        match kind {
            // Steps of several sequences are predicted only.
            WorkloadKind::Decode | WorkloadKind::FewSequences | WorkloadKind::ManySequences => "tg".into(),
            WorkloadKind::Prompt => format!("pp{}", self.builder.prompt()),
            WorkloadKind::FewRows => format!("pp{}", FEW.min(self.builder.prompt())),
        }
    }

    /// Two artifacts are loaded at a time.
    fn check_memory(&self) -> Result<(), BenchError> {
        let Some(memory) = self.builder.program().and_then(|program| program.memory.as_ref()) else {
            return Ok(());
        };
        let needed = 2 * (memory.weights_bytes + memory.arena_bytes());
        let free = proc_value("/proc/meminfo", "MemAvailable")
            .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok())
            .map(|kb| kb << 10);
        match free {
            Some(free) if needed > free => Err(BenchError::Failed(format!(
                "comparing two artifacts takes {}, but {} are free: tune a smaller model in the \
                 same format",
                bytes(needed),
                bytes(free)
            ))),
            _ => Ok(()),
        }
    }

    /// Runs a kind of work so often; gives the tokens and the time that they took.
    fn run(
        &self,
        session: &mut Session,
        kind: WorkloadKind,
        repeats: usize,
    ) -> Result<(usize, Duration), BenchError> {
        match kind {
            WorkloadKind::Decode | WorkloadKind::FewSequences | WorkloadKind::ManySequences => {
                self.decode(session, repeats)
            }
            WorkloadKind::Prompt => prompts(session, self.builder.prompt(), repeats),
            WorkloadKind::FewRows => prompts(session, FEW.min(self.builder.prompt()), repeats),
        }
    }

    fn decode(&self, session: &mut Session, repeats: usize) -> Result<(usize, Duration), BenchError> {
        let vocab = session.model().vocab() as u64;
        let room = self.builder.max_tokens();
        // With a token before those that are timed.
        let depth = if session.can_truncate() { DEPTH.min(room / 2) } else { 0 };
        let repeats = repeats.min(usize::try_from(room.saturating_sub(depth + 1)).unwrap_or(repeats)).max(1);
        if session.can_truncate() && session.past() >= depth && depth > 0 {
            session.truncate(depth)?;
        } else if session.can_truncate() || session.past() + repeats as u64 >= room {
            session.reset()?;
            if depth > 0 {
                let ids = test_prompt(depth as usize, session.model());
                session.prefill(&ids)?;
            }
        }
        let ids = test_tokens(repeats, vocab);
        session.decode(ids[0])?;
        let begin = Instant::now();
        for &id in &ids {
            session.decode(id)?;
        }
        Ok((repeats, begin.elapsed()))
    }
}

fn prompts(session: &mut Session, n: usize, repeats: usize) -> Result<(usize, Duration), BenchError> {
    let ids = test_prompt(n, session.model());
    let mut time = Duration::ZERO;
    for _ in 0..repeats {
        session.reset()?;
        let begin = Instant::now();
        session.prefill(&ids)?;
        time += begin.elapsed();
    }
    Ok((n * repeats, time))
}

impl CandidateEvaluator for TimingBench<'_> {
    type Artifact = LoadedArtifact;
    type Error = BenchError;

    fn compile_code(&mut self, level: &FeatureLevel) -> Result<u128, BenchError> {
        let code = self.builder.compile(level)?;
        if self.builder.is_first() {
            self.check_memory()?;
        }
        self.host.set_progress(self.started.elapsed().as_secs());
        Ok(code)
    }

    fn load(&mut self) -> Result<LoadedArtifact, BenchError> {
        let path = self.builder.write()?;
        let options = LoadOptions { threads: Some(self.threads), ..LoadOptions::default() };
        let model = Model::load(&path, &options)?;
        // It is mapped; its name is of no more use.
        std::fs::remove_file(&path).map_err(BenchError::io("remove", &path))?;
        model.fix_workers(Some(model.threads()));
        Ok(LoadedArtifact { session: model.session()? })
    }

    fn compare(
        &mut self,
        old: &mut LoadedArtifact,
        new: &mut LoadedArtifact,
        kind: WorkloadKind,
        effort: ComparisonEffort,
    ) -> Result<Option<SpeedComparison>, BenchError> {
        compare_interleaved(self, old, new, kind, effort)
    }

    fn is_over(&self) -> bool {
        self.is_out_of_time()
    }

    fn report_trial(&mut self, trial: &TuneTrial) {
        self.host.set_progress(self.started.elapsed().as_secs());
        show_trial(self.host, trial);
    }
}

/// Shows what became of a value.
pub fn show_trial(host: &dyn BenchHost, trial: &TuneTrial) {
    let gains: Vec<String> =
        trial.comparisons.iter().map(|c| format!("{} x {:.3}", c.kind.name(), c.gain)).collect();
    let verdict = if trial.taken { ", taken" } else { "" };
    let text = format!("{} {}: {}{verdict}", trial.key, trial.to, gains.join(", "));
    host.set_message(text.clone());
    host.detail(&text);
}

impl SpeedTimer for TimingBench<'_> {
    type Artifact = LoadedArtifact;
    type Error = BenchError;

    fn measure_speed(
        &mut self,
        artifact: &mut LoadedArtifact,
        kind: WorkloadKind,
    ) -> Result<f64, BenchError> {
        let session = &mut artifact.session;
        let known = self.repeats.get(&kind).copied();
        let repeats = match known {
            Some(repeats) => repeats,
            None => {
                self.run(session, kind, 1)?;
                let (_, once) = self.run(session, kind, 1)?;
                let wanted = TIMING.as_secs_f64() / once.as_secs_f64().max(1e-7);
                (wanted.ceil() as usize).clamp(1, MOST_REPEATS)
            }
        };
        self.repeats.insert(kind, repeats);
        let (tokens, time) = self.run(session, kind, repeats)?;
        Ok(tokens as f64 / time.as_secs_f64().max(1e-9))
    }

    fn is_out_of_time(&self) -> bool {
        self.builder.is_interrupted() || self.end.is_some_and(|end| Instant::now() >= end)
    }
}
