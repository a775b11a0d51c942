//! `mlcc completions`: a completion script for a shell.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::commands::print;
use crate::error::CliError;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example, for bash: mlcc completions bash > ~/.local/share/bash-completion/completions/mlcc"
)]
pub struct CompletionsArgs {
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(args: &CompletionsArgs, _: &Ui) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::cli::Cli::command(), "mlcc", &mut script);
    print(&String::from_utf8_lossy(&script))
}
