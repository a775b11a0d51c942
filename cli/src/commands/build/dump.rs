//! `--print-after` and `--debug-dump`: the program as text after passes.

use std::path::{Path, PathBuf};

use mlcc_passes::LoweredProgram;
use mlcc_passes::text::print_program;

use crate::commands::print;
use crate::error::CliError;

pub struct ModuleDumps {
    print_after: Vec<String>,
    folder: Option<PathBuf>,
    count: usize,
    /// The first failure; passes go on regardless.
    error: Option<CliError>,
}

impl ModuleDumps {
    pub fn new(print_after: &[String], folder: Option<&Path>) -> Result<Self, CliError> {
        for name in print_after.iter().filter(|n| *n != "all") {
            mlcc_passes::pipeline::find_pass(name).map_err(|e| CliError::usage(e.to_string()))?;
        }
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).map_err(CliError::io("create", folder))?;
        }
        let folder = folder.map(Path::to_path_buf);
        Ok(ModuleDumps { print_after: print_after.to_vec(), folder, count: 0, error: None })
    }

    pub fn dump_after(&mut self, pass: &str, program: &LoweredProgram) {
        self.count += 1;
        let wanted = self.print_after.iter().any(|p| p == pass || p == "all");
        if self.error.is_some() || !wanted && self.folder.is_none() {
            return;
        }
        let text = print_program(program);
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
