//! The command line: flags, dispatch, exit codes.

use std::ffi::OsString;
use std::io::Write;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::{LazyLock, Mutex};

use clap::{ArgAction, Parser, Subcommand};

use crate::commands::{
    bench, bisect, build, chat, completions, doctor, embed, eval, inspect, interp, list, models, opt, prune,
    pull, quants, rerank, rm, run, serve, targets, tune, verify,
};
use crate::error::CliError;
use crate::ui::Ui;

/// Ahead-of-time compiler for language models: a checkpoint becomes one shared library.
#[derive(Debug, Parser)]
#[command(name = "mlcc", version, long_version = LONG_VERSION.as_str(), max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: CliCommand,
    /// Print only errors and results
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Print more detail
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
}

#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Compile a model into one shared library
    Build(Box<build::BuildArgs>),
    /// Generate text with a model
    Run(Box<run::RunArgs>),
    /// Chat with a model: a compiled one, or one that is downloaded and compiled first
    Chat(Box<chat::ChatArgs>),
    /// Serve models over HTTP with the OpenAI API
    Serve(Box<serve::ServeArgs>),
    /// Print embedding vectors of texts
    Embed(embed::EmbedArgs),
    /// Order documents by how well they answer a query
    Rerank(rerank::RerankArgs),
    /// Show what is in a compiled model
    Inspect(inspect::InspectArgs),
    /// Replay reference results through a compiled model
    Verify(verify::VerifyArgs),
    /// Find the pass or kernel that makes a model wrong
    Bisect(bisect::BisectArgs),
    /// Measure how well a compiled model predicts a text
    Eval(eval::EvalArgs),
    /// Measure speed, as a share of what the machine can do
    Bench(bench::BenchArgs),
    /// Find plans that are faster on this machine, for `mlcc build --tuning`
    Tune(Box<tune::TuneArgs>),
    /// Interpret a module in text form, or replay a model's reference results
    Interp(interp::InterpArgs),
    /// Run passes over a module in text form
    Opt(opt::OptArgs),
    /// List the models that are here: checkpoints and the artifacts built of them
    List(list::ListArgs),
    /// Download a model, or what has changed of it
    Pull(pull::PullArgs),
    /// Remove a model from the caches
    Rm(rm::RmArgs),
    /// Remove artifacts that were not used for long
    Prune(prune::PruneArgs),
    /// List the machines that can be compiled for
    Targets(targets::TargetsArgs),
    /// List the models that can be compiled
    Models(models::ModelsArgs),
    /// List the weight formats
    Quants(quants::QuantsArgs),
    /// Check what this machine provides for mlcc, and report what is missing
    Doctor(doctor::DoctorArgs),
    /// Print a completion script for a shell
    Completions(completions::CompletionsArgs),
}

/// Runs the program: `args` as the system gave them, the program's name first.
pub fn main(args: Vec<OsString>) -> ExitCode {
    crate::signals::let_writes_fail();
    let panic = match catch_panic(|| parse_and_run(args)) {
        Ok(code) => return code,
        Err(panic) => panic,
    };
    let _ = writeln!(
        std::io::stderr(),
        "internal error: {panic}. This is a bug in mlcc; please report it with the command line and the output of \
         `mlcc doctor`."
    );
    ExitCode::from(1)
}

fn parse_and_run(args: Vec<OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(normalize_flags(args)) {
        Ok(cli) => cli,
        Err(e) => {
            // Prints help and version to standard output, mistakes to standard error.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    let ui = Ui::new(cli.quiet, cli.verbose);
    match dispatch(cli.command, &ui) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !error.is_quiet() {
                let _ = writeln!(std::io::stderr(), "error: {error}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn dispatch(command: CliCommand, ui: &Ui) -> Result<(), CliError> {
    match command {
        CliCommand::Build(args) => build::run(&args, ui),
        CliCommand::Run(args) => run::run(&args, ui),
        CliCommand::Chat(args) => chat::run(&args, ui),
        CliCommand::Serve(args) => serve::run(&args, ui),
        CliCommand::Embed(args) => embed::run(&args, ui),
        CliCommand::Rerank(args) => rerank::run(&args, ui),
        CliCommand::Inspect(args) => inspect::run(&args, ui),
        CliCommand::Verify(args) => verify::run(&args, ui),
        CliCommand::Bisect(args) => bisect::run(&args, ui),
        CliCommand::Eval(args) => eval::run(&args, ui),
        CliCommand::Bench(args) => bench::run(&args, ui),
        CliCommand::Tune(args) => tune::run(&args, ui),
        CliCommand::Interp(args) => interp::run(&args, ui),
        CliCommand::Opt(args) => opt::run(&args, ui),
        CliCommand::List(args) => list::run(&args, ui),
        CliCommand::Pull(args) => pull::run(&args, ui),
        CliCommand::Rm(args) => rm::run(&args, ui),
        CliCommand::Prune(args) => prune::run(&args, ui),
        CliCommand::Targets(args) => targets::run(&args, ui),
        CliCommand::Models(args) => models::run(&args, ui),
        CliCommand::Quants(args) => quants::run(&args, ui),
        CliCommand::Doctor(args) => doctor::run(&args, ui),
        CliCommand::Completions(args) => completions::run(&args, ui),
    }
}

/// `--two_words` is taken for `--two-words`.
fn normalize_flags(args: Vec<OsString>) -> Vec<OsString> {
    let mut options = true;
    let spelled = |arg: OsString| {
        options &= arg != "--";
        let text = match arg.to_str() {
            Some(text) if options && text.starts_with("--") => text,
            _ => return arg,
        };
        match text.split_once('=') {
            Some((name, value)) => format!("{}={value}", name.replace('_', "-")).into(),
            None => text.replace('_', "-").into(),
        }
    };
    args.into_iter().map(spelled).collect()
}

/// Runs `f`; a panic becomes its message and place, without a backtrace.
fn catch_panic<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static FIRST: Mutex<Option<String>> = Mutex::new(None);
    panic::set_hook(Box::new(|info| {
        let message = info.payload_as_str().unwrap_or("unknown panic");
        let place = info.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        let mut first = FIRST.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        first.get_or_insert_with(|| format!("{message}{place}"));
    }));
    panic::catch_unwind(AssertUnwindSafe(f)).map_err(|_| {
        let mut first = FIRST.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        first.take().unwrap_or_else(|| "unknown panic".into())
    })
}

/// The commit that the program was built from; empty if it was not built in a checkout.
pub(crate) const COMMIT: &str = env!("SOURCE_COMMIT");

static LONG_VERSION: LazyLock<String> = LazyLock::new(long_version);

fn long_version() -> String {
    let backends: Vec<&str> = [mlcc_driver::compile::Backend::Llvm, mlcc_driver::compile::Backend::Cranelift]
        .into_iter()
        .filter(|b| b.is_built_in())
        .map(|b| b.name())
        .collect();
    let (version, abi) = (env!("CARGO_PKG_VERSION"), mlcc_abi::ABI_VERSION);
    let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
    let commit = match COMMIT {
        "" => String::new(),
        commit => format!("commit: {commit}\n"),
    };
    format!("{version}\n{commit}back ends: {}\nABI: {abi}\nhost: {arch}-{os}", backends.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn underscores_are_dashes_in_names_only() {
        let args = ["mlcc", "--two_words=a_b", "-p", "a_b", "--top_k", "3", "--", "--x_y"];
        let got = normalize_flags(args.iter().map(OsString::from).collect());
        assert_eq!(got, ["mlcc", "--two-words=a_b", "-p", "a_b", "--top-k", "3", "--", "--x_y"]);
    }

    #[test]
    fn panics_become_messages() {
        let message = catch_panic(|| panic!("number {}", 7)).unwrap_err();
        assert!(message.contains("number 7") && message.contains("cli.rs"), "{message}");
    }
}
