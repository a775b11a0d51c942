//! This machine, for the search: builds with random weights that are made on load, and times runs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use mlcc_codegen::folder::{TemporaryFolder, temporary};
use mlcc_driver::build::{BuildOptions, BuildReport, Hooks, Source, compile, write_program};
use mlcc_driver::tune::{Machine, Trial};
use mlcc_passes::Program;
use mlcc_passes::text::print_program;
use mlcc_runtime::{LoadOptions, Model, Session};
use mlcc_target::{Kind, Level, Target};
use xxhash_rust::xxh3::xxh3_128;

use super::origin::Origin;
use crate::commands::bench::{prompt, tokens};
use crate::commands::doctor::proc_value;
use crate::error::CliError;
use crate::interrupt;
use crate::ui::{self, Ui};

/// Runs are repeated until a timing takes about so long.
const TIMING: Duration = Duration::from_millis(60);
const MOST_REPEATS: usize = 256;
/// Tokens of a short prompt.
const FEW: usize = 16;
/// Positions before the tokens that are timed, where a model has a cache.
const DEPTH: u64 = 256;

pub struct Bench<'a> {
    source: Source,
    options: BuildOptions,
    target: Target,
    threads: usize,
    folder: TemporaryFolder,
    /// What [`Machine::code`] compiled last.
    program: Option<Program>,
    built: usize,
    /// How often a run is repeated in one timing, by kind.
    repeats: BTreeMap<Kind, usize>,
    /// When the search ends.
    pub end: Option<Instant>,
    begin: Instant,
    cancel: &'static AtomicBool,
    ui: &'a Ui,
    bar: &'a ProgressBar,
}

/// An artifact that runs.
pub struct Loaded {
    session: Session,
}

impl<'a> Bench<'a> {
    pub fn open(
        origin: Origin,
        level: &Level,
        threads: usize,
        ui: &'a Ui,
        bar: &'a ProgressBar,
    ) -> Result<Bench<'a>, CliError> {
        let options = BuildOptions { target: level.name.clone(), ..origin.options };
        let target = mlcc_target::resolve(&level.name)?;
        let source = Source::open(&options)?;
        let options = options.for_source(&source);
        let folder = temporary("mlcc-tune").map_err(CliError::io("create", std::env::temp_dir()))?;
        Ok(Bench {
            source,
            options,
            target,
            threads,
            folder,
            program: None,
            built: 0,
            repeats: Default::default(),
            end: None,
            begin: Instant::now(),
            cancel: interrupt::flag(),
            ui,
            bar,
        })
    }

    pub fn model(&self) -> &str {
        &self.source.model.name
    }

    pub fn quant(&self) -> &'static str {
        self.options.quant.name
    }

    /// The file that is written unless another name is given.
    pub fn output_path(&self, level: &str) -> PathBuf {
        format!("{}-{}-{level}.toml", self.model(), self.options.quant_name).into()
    }

    pub fn is_interrupted(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Name of a kind of work with the number of its tokens.
    pub fn test_name(&self, kind: Kind) -> String {
        match kind {
            // Steps of several sequences are predicted only.
            Kind::Decode | Kind::FewSequences | Kind::ManySequences => "tg".into(),
            Kind::Prompt => format!("pp{}", self.prompt()),
            Kind::FewRows => format!("pp{}", FEW.min(self.prompt())),
        }
    }

    /// Tokens of a prompt.
    fn prompt(&self) -> usize {
        let room = self.source.context_limit(&self.options).unwrap_or(u64::MAX);
        (self.source.chunk as usize).min(usize::try_from(room).unwrap_or(usize::MAX))
    }

    /// Two artifacts are loaded at a time.
    fn check_memory(&self, program: &Program) -> Result<(), CliError> {
        let Some(memory) = &program.memory else { return Ok(()) };
        let needed = 2 * (memory.weights_bytes + memory.arena_bytes());
        let free = proc_value("/proc/meminfo", "MemAvailable")
            .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok())
            .map(|kb| kb << 10);
        match free {
            Some(free) if needed > free => Err(CliError::Failed(format!(
                "two artifacts are held against each other, which takes {}, and {} are free: tune a smaller model in the \
                 same format",
                ui::bytes(needed),
                ui::bytes(free)
            ))),
            _ => Ok(()),
        }
    }

    /// Runs a kind of work so often; gives the tokens and the time that they took.
    fn run(&self, session: &mut Session, kind: Kind, repeats: usize) -> Result<(usize, Duration), CliError> {
        match kind {
            Kind::Decode | Kind::FewSequences | Kind::ManySequences => self.decode(session, repeats),
            Kind::Prompt => prompts(session, self.prompt(), repeats),
            Kind::FewRows => prompts(session, FEW.min(self.prompt()), repeats),
        }
    }

    fn decode(&self, session: &mut Session, repeats: usize) -> Result<(usize, Duration), CliError> {
        let vocab = session.model().vocab() as u64;
        let room = self.source.context_limit(&self.options).unwrap_or(u64::MAX);
        // With a token before those that are timed.
        let depth = if session.can_truncate() { DEPTH.min(room / 2) } else { 0 };
        let repeats = repeats.min(usize::try_from(room.saturating_sub(depth + 1)).unwrap_or(repeats)).max(1);
        if session.can_truncate() && session.past() >= depth && depth > 0 {
            session.truncate(depth)?;
        } else if session.can_truncate() || session.past() + repeats as u64 >= room {
            session.reset()?;
            if depth > 0 {
                let ids = prompt(depth as usize, session.model());
                session.prefill(&ids)?;
            }
        }
        let ids = tokens(repeats, vocab);
        session.decode(ids[0])?;
        let begin = Instant::now();
        for &id in &ids {
            session.decode(id)?;
        }
        Ok((repeats, begin.elapsed()))
    }
}

fn prompts(session: &mut Session, n: usize, repeats: usize) -> Result<(usize, Duration), CliError> {
    let ids = prompt(n, session.model());
    let mut time = Duration::ZERO;
    for _ in 0..repeats {
        session.reset()?;
        let begin = Instant::now();
        session.prefill(&ids)?;
        time += begin.elapsed();
    }
    Ok((n * repeats, time))
}

impl Machine for Bench<'_> {
    type Artifact = Loaded;
    type Error = CliError;

    fn code(&mut self, level: &Level) -> Result<u128, CliError> {
        self.target.levels = vec![level.clone()];
        let mut hooks = Hooks { event: &mut |_| {}, cancel: self.cancel };
        let (program, _) =
            compile(&self.source, &self.target, &self.options, &mut BuildReport::default(), &mut hooks)?;
        if self.built == 0 {
            self.check_memory(&program)?;
        }
        let code = xxh3_128(print_program(&program).as_bytes());
        self.program = Some(program);
        self.bar.set_position(self.begin.elapsed().as_secs());
        Ok(code)
    }

    fn load(&mut self) -> Result<Loaded, CliError> {
        let Some(program) = self.program.take() else {
            return Err(CliError::Failed(
                "internal error: an artifact is loaded before it is compiled".into(),
            ));
        };
        self.built += 1;
        let path = self.folder.path().join(format!("{}.so", self.built));
        // An interrupt ends the search, not a build of a second.
        let mut hooks = Hooks { event: &mut |_| {}, cancel: &AtomicBool::new(false) };
        let mut report = BuildReport::default();
        write_program(&self.source, &self.target, &self.options, &program, &path, &mut report, &mut hooks)?;
        let options = LoadOptions { threads: Some(self.threads), ..LoadOptions::default() };
        let model = Model::load(&path, &options)?;
        // It is mapped; its name is of no more use.
        std::fs::remove_file(&path).map_err(CliError::io("remove", &path))?;
        model.fix_workers(Some(model.threads()));
        Ok(Loaded { session: model.session()? })
    }

    fn speed(&mut self, artifact: &mut Loaded, kind: Kind) -> Result<f64, CliError> {
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

    fn is_over(&self) -> bool {
        self.is_interrupted() || self.end.is_some_and(|end| Instant::now() >= end)
    }

    fn tried(&mut self, trial: &Trial) {
        let gains: Vec<String> =
            trial.comparisons.iter().map(|c| format!("{} x {:.3}", c.kind.name(), c.gain)).collect();
        let verdict = if trial.taken { ", taken" } else { "" };
        let text = format!("{} {}: {}{verdict}", trial.key, trial.to, gains.join(", "));
        self.bar.set_position(self.begin.elapsed().as_secs());
        self.bar.set_message(text.clone());
        self.ui.detail(text);
    }
}
