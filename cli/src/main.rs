//! The `mlcc` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    mlcc::cli::main(std::env::args_os().collect())
}
