//! `mlcc pull`: downloads without building.

use crate::commands::{checkpoint, print};
use crate::error::CliError;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc pull qwen3-0.6b\n\
    Asks for the newest commit of the revision, and downloads what is missing of it. Prints where it is.")]
pub struct PullArgs {
    /// hf:org/repo, optionally with @revision, a preset name (see `mlcc models`), or the address of a GGUF
    /// file or an artifact
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

pub fn run(args: &PullArgs, ui: &Ui) -> Result<(), CliError> {
    for name in &args.names {
        let path = checkpoint::pull(name, ui)?;
        print(&format!("{}\n", path.display()))?;
    }
    Ok(())
}
