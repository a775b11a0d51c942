//! One file per command: its flags (`Args`) and what it does (`run`).

pub mod bench;
pub mod build;
pub mod completions;
pub mod eval;
pub mod inspect;
pub mod models;
pub mod quants;
pub mod run;
pub mod targets;
pub mod verify;

use std::io::Write;

use serde::Serialize;

use crate::error::CliError;

/// Writes a value as JSON to standard output.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(value).map_err(std::io::Error::from)?;
    text.push('\n');
    print(&text)
}

/// Writes text to standard output.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// `--threads`, or the physical cores.
pub(crate) fn load(
    path: &std::path::Path,
    threads: Option<usize>,
    verify_hashes: bool,
) -> Result<mlcc_runtime::Model, CliError> {
    let options = mlcc_runtime::LoadOptions { threads, verify_hashes, ..Default::default() };
    Ok(mlcc_runtime::Model::load(path, &options)?)
}
