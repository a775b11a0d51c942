//! `--print-after` and `--debug-dump`: the program as text after passes.

use std::path::{Path, PathBuf};

use mlcc_ir::text::{print_kernel, print_module, print_step};
use mlcc_passes::Program;

use crate::commands::print;
use crate::error::CliError;

pub struct Dumps {
    print_after: Vec<String>,
    folder: Option<PathBuf>,
    count: usize,
    /// The first failure; passes go on regardless.
    error: Option<CliError>,
}

impl Dumps {
    pub fn new(print_after: &[String], folder: Option<&Path>) -> Result<Self, CliError> {
        for name in print_after.iter().filter(|n| *n != "all") {
            mlcc_passes::pipeline::find(name).map_err(|e| CliError::usage(e.to_string()))?;
        }
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).map_err(CliError::io("create", folder))?;
        }
        let folder = folder.map(Path::to_path_buf);
        Ok(Dumps { print_after: print_after.to_vec(), folder, count: 0, error: None })
    }

    pub fn after(&mut self, pass: &str, program: &Program) {
        self.count += 1;
        let wanted = self.print_after.iter().any(|p| p == pass || p == "all");
        if self.error.is_some() || !wanted && self.folder.is_none() {
            return;
        }
        let text = program_text(program);
        let mut result = Ok(());
        if wanted {
            result = print(&format!("// after {pass}\n{text}"));
        }
        if let Some(folder) = &self.folder {
            let path = folder.join(format!("{:02}-{pass}.mlc", self.count));
            result = result.and(std::fs::write(&path, &text).map_err(CliError::io("write", &path)));
        }
        self.error = result.err();
    }

    pub fn finish(self) -> Result<(), CliError> {
        match self.error {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }
}

/// The module, and below it what was lowered, level by level.
pub fn program_text(program: &Program) -> String {
    let mut text = print_module(&program.module);
    // Launches in lowered entries become steps with the last pass.
    for level in &program.levels {
        text.push_str(&format!("\n// level {}\n", level.name));
        for kernel in &level.lowered.kernels {
            text.push_str(&format!("\n{}", print_kernel(kernel)));
        }
        let names: Vec<String> = level.lowered.kernels.iter().map(|k| k.name.clone()).collect();
        if level.steps.is_empty() {
            for entry in &level.lowered.entries {
                text.push_str(&format!("\n{}", entry.describe(&program.module, &names)));
            }
        }
        for step in &level.steps {
            text.push_str(&format!("\n{}", print_step(step)));
        }
    }
    text
}
