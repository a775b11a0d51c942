//! Errors of measurements.

use std::path::PathBuf;

use mlcc_driver::compile::BuildError;
use thiserror::Error;

/// The end of a measurement, a prediction or a search without a result.
#[derive(Debug, Error)]
pub enum BenchError {
    /// A flag or its value that does not fit the model or the machine.
    #[error("{0}")]
    Usage(String),
    #[error("interrupted")]
    Interrupted,
    #[error("{0}")]
    Failed(String),
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Build(BuildError),
    #[error(transparent)]
    Runtime(#[from] mlcc_runtime::Error),
    #[error(transparent)]
    Target(#[from] mlcc_target::TargetError),
}

impl From<BuildError> for BenchError {
    fn from(error: BuildError) -> Self {
        match error {
            BuildError::Interrupted => BenchError::Interrupted,
            other => BenchError::Build(other),
        }
    }
}

impl BenchError {
    pub fn usage(message: impl Into<String>) -> Self {
        BenchError::Usage(message.into())
    }

    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| BenchError::Io { action, path, source }
    }
}
