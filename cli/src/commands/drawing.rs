//! Drawings of modules as files: Graphviz text, or SVG that Graphviz makes of it.

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use mlcc_files::write_file;
use mlcc_ir::draw::dot;
use mlcc_ir::module::Module;

use crate::error::CliError;

/// Graphviz's program for layered drawings.
const GRAPHVIZ: &str = "dot";

/// Writes the drawing in the form that the file's name says: `.dot`, `.gv` or `.svg`.
pub(crate) fn write_drawing(module: &Module, path: &Path) -> Result<(), CliError> {
    let text = dot(module);
    let bytes = match path.extension().and_then(|e| e.to_str()) {
        Some("dot" | "gv") => text.into_bytes(),
        Some("svg") => svg(text)?,
        _ => {
            let what = format!("{}: a drawing is a .dot or .svg file by its name", path.display());
            return Err(CliError::usage(what));
        }
    };
    write_file(path, &bytes).map_err(CliError::io("write", path))
}

fn svg(text: String) -> Result<Vec<u8>, CliError> {
    let mut command = Command::new(GRAPHVIZ);
    command.arg("-Tsvg").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| match e.kind() {
        ErrorKind::NotFound => CliError::Failed(format!(
            "SVG needs Graphviz, whose program `{GRAPHVIZ}` was not found: install graphviz, or name a .dot file"
        )),
        _ => CliError::io("run", GRAPHVIZ)(e),
    })?;
    // It may write before it has read all.
    let stdin = child.stdin.take();
    let writer = std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(text.as_bytes())));
    let output = child.wait_with_output().map_err(CliError::io("run", GRAPHVIZ))?;
    let written = writer.join().ok().flatten().is_some_and(|written| written.is_ok());
    match output.status.success() && written {
        true => Ok(output.stdout),
        false => {
            let why = String::from_utf8_lossy(&output.stderr);
            Err(CliError::Failed(format!("{GRAPHVIZ} made no SVG: {}", why.trim())))
        }
    }
}
