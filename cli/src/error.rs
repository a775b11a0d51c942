//! Errors that end a command, and their exit codes.

use std::path::PathBuf;

use mlcc_bench::error::BenchError;
use mlcc_engine::generation_config::GenerationConfigError as EngineConfigError;
use thiserror::Error;

use mlcc_driver::compile::BuildError;

/// Exit codes: 0 success, 1 error, 2 wrong usage, 130 interrupted.
#[derive(Debug, Error)]
pub enum CliError {
    /// A flag or its value; clap reports its own mistakes with the same code.
    #[error("{0}")]
    Usage(String),
    /// Said already; only the exit code is left to give.
    #[error("failed")]
    Reported,
    #[error("interrupted")]
    Interrupted,
    #[error("{0}")]
    Failed(String),
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// Standard output is closed or full.
    #[error("cannot write the result: {0}")]
    Output(#[from] std::io::Error),
    #[error(transparent)]
    Build(BuildError),
    #[error(transparent)]
    Runtime(#[from] mlcc_runtime::Error),
    #[error(transparent)]
    Tokenizer(#[from] mlcc_text::tokenizer::TokenizerError),
    #[error(transparent)]
    Carried(#[from] mlcc_engine::artifact_text::ArtifactTokenizerError),
    #[error(transparent)]
    Generate(#[from] mlcc_engine::GenerateError),
    /// An error in the value of `--json-schema` or `--grammar`.
    #[error("{path}: {source}")]
    Grammar { path: PathBuf, source: mlcc_text::GrammarError },
    #[error(transparent)]
    Vectors(#[from] mlcc_engine::embedding::EmbeddingError),
    #[error(transparent)]
    Chat(#[from] mlcc_text::ChatError),
    #[error(transparent)]
    ConversationFile(#[from] mlcc_engine::conversation::FileError),
    #[error(transparent)]
    Serve(#[from] mlcc_serve::ServeError),
    #[error(transparent)]
    Traces(#[from] mlcc_serve::TracesError),
    #[error(transparent)]
    Eval(#[from] mlcc_engine::eval::EvalError),
    #[error(transparent)]
    EngineConfig(#[from] EngineConfigError),
    #[error(transparent)]
    Text(#[from] mlcc_text::InvalidUtf8),
    #[error(transparent)]
    Model(#[from] mlcc_models::ModelError),
    #[error(transparent)]
    Config(#[from] mlcc_models::ConfigError),
    #[error(transparent)]
    Target(#[from] mlcc_target::TargetError),
}

impl From<BuildError> for CliError {
    fn from(error: BuildError) -> Self {
        match error {
            BuildError::Interrupted => CliError::Interrupted,
            other => CliError::Build(other),
        }
    }
}

impl From<BenchError> for CliError {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Usage(what) => CliError::Usage(what),
            BenchError::Interrupted => CliError::Interrupted,
            BenchError::Failed(what) => CliError::Failed(what),
            BenchError::Io { action, path, source } => CliError::Io { action, path, source },
            BenchError::Build(error) => CliError::Build(error),
            BenchError::Runtime(error) => CliError::Runtime(error),
            BenchError::Target(error) => CliError::Target(error),
        }
    }
}

impl CliError {
    pub fn usage(message: impl Into<String>) -> Self {
        CliError::Usage(message.into())
    }

    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| CliError::Io { action, path, source }
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::Usage(_) => 2,
            CliError::Interrupted => 130,
            CliError::Output(e) if e.kind() == std::io::ErrorKind::BrokenPipe => 0,
            _ => 1,
        }
    }

    /// The reader of our output has left, or the message was given: nothing to say.
    pub fn is_quiet(&self) -> bool {
        match self {
            CliError::Reported => true,
            CliError::Output(e) => e.kind() == std::io::ErrorKind::BrokenPipe,
            _ => false,
        }
    }
}
