//! `mlcc opt`: a module in text form through passes, printed again.

use std::path::{Path, PathBuf};

use mlcc_files::write_file;
use mlcc_kernels::params::KernelTarget;
use mlcc_passes::pipeline::{PipelineControl, find_pass, passes_done};
use mlcc_passes::scheme::QuantScheme;
use mlcc_passes::text::{parse_program, print_program};
use mlcc_passes::verify::verify_program;
use mlcc_passes::{LoweredProgram, PIPELINE, PassContext, PassOptions, run_pass, run_pipeline};

use crate::commands::{drawing, print, read_text};
use crate::error::CliError;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Without --passes the module is read, verified and printed. Example: mlcc opt model.mlc --passes \
    decompose,fuse"
)]
pub struct OptArgs {
    /// A module in text form; `-` is standard input
    #[arg(required_unless_present = "list")]
    file: Option<PathBuf>,
    /// Passes to run, in this order; `all` runs the whole pipeline, or the rest of it
    #[arg(long, value_name = "PASS", value_delimiter = ',')]
    passes: Vec<String>,
    /// Passes that `all` leaves out
    #[arg(long, value_name = "PASS", value_delimiter = ',')]
    disable_pass: Vec<String>,
    /// The last pass of `all`
    #[arg(long, value_name = "PASS")]
    stop_after: Option<String>,
    /// Machine to lower for
    #[arg(long, default_value = "cpu", value_parser = super::parse_target)]
    target: String,
    /// Weight format for the passes that quantize
    #[arg(long, visible_alias = "quantization", default_value = "f32")]
    quant: String,
    /// Maximum number of tokens in one prefill call
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Print what each pass matched, why near matches did not, and how each kernel is made
    #[arg(long)]
    explain_passes: bool,
    /// Draw the module as well, as .dot or .svg (needs Graphviz)
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    /// Write to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// List the passes in the order of the pipeline
    #[arg(long)]
    list: bool,
}

pub fn run(args: &OptArgs, ui: &Ui) -> Result<(), CliError> {
    let file = match &args.file {
        Some(file) if !args.list => file,
        _ => return print(&pass_table()),
    };
    let mut program = read_program(file)?;
    let mut context = PassContext::new(options(args)?);
    let failed = |e: mlcc_passes::PassError| CliError::Failed(format!("{}: {e}", file.display()));
    if args.passes.iter().any(|p| p == "all") {
        let control = PipelineControl {
            disabled: args.disable_pass.clone(),
            stop_after: args.stop_after.clone(),
            verify: true,
            resume: true,
            ..PipelineControl::default()
        };
        run_pipeline(&mut program, &mut context, control).map_err(failed)?;
    } else {
        for name in &args.passes {
            find_pass(name).map_err(|e| CliError::usage(e.to_string()))?;
            let at = PIPELINE.iter().position(|p| p.name == *name).unwrap_or(0);
            if !program.levels.is_empty() && at < passes_done(PIPELINE, &program) {
                return Err(CliError::usage(format!(
                    "--passes: {} was lowered; {name} has its place before that",
                    file.display()
                )));
            }
        }
        for name in &args.passes {
            let changes = run_pass(name, &mut program, &mut context).map_err(failed)?;
            ui.detail(format_args!("{name}: {changes} changes"));
            verify(file, &program)?;
        }
    }
    if args.explain_passes {
        context.notes.iter().for_each(|(pass, line)| ui.note(format_args!("{pass}: {line}")));
    }
    if let Some(path) = &args.dot {
        drawing::write_drawing(&program.module, path)?;
    }
    let text = print_program(&program);
    match &args.output {
        None => print(&text),
        Some(path) => write_file(path, text.as_bytes()).map_err(CliError::io("write", path)),
    }
}

fn options(args: &OptArgs) -> Result<PassOptions, CliError> {
    let target = mlcc_target::resolve_target(&args.target)?;
    let level = |l: &mlcc_target::FeatureLevel| (l.name.clone(), KernelTarget::new(target.arch, l));
    let mut options = PassOptions::new(target.levels.iter().map(level).collect(), i64::from(args.chunk));
    options.quant = QuantScheme::from_name(&args.quant).map_err(|e| CliError::usage(e.to_string()))?.0;
    Ok(options)
}

/// Reads and verifies a program: a module, or one with what passes have made of it.
pub(crate) fn read_program(path: &Path) -> Result<LoweredProgram, CliError> {
    let text = read_text(path, mlcc_files::FileKind::Module)?;
    let program = parse_program(&text).map_err(|e| CliError::Failed(format!("{}:{e}", path.display())))?;
    verify(path, &program)?;
    Ok(program)
}

fn verify(path: &Path, program: &LoweredProgram) -> Result<(), CliError> {
    verify_program(program)
        .map_err(|e| CliError::Failed(format!("{}: the module is not well-formed: {e}", path.display())))
}

/// The passes in their order.
fn pass_table() -> String {
    let row = |p: &mlcc_passes::Pass| {
        let kind = if p.optional { "optional" } else { "needed" };
        vec![p.name.to_string(), kind.into(), p.about.into()]
    };
    let head = ["pass", "", "what it does"].map(String::from).to_vec();
    crate::ui::format_table(&std::iter::once(head).chain(PIPELINE.iter().map(row)).collect::<Vec<_>>())
}
