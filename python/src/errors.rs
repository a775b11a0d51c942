//! Errors of the runtime, the engine and the server as the exceptions of `mlcc/_errors.py`.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mlcc_text::GrammarError;
use mlcc_engine::artifact_text::ArtifactTokenizerError;
use mlcc_engine::embedding::EmbeddingError;
use mlcc_engine::serving::{LaunchError, RequestFailure};
use mlcc_runtime::Error;
use mlcc_serve::ServeError;
use pyo3::exceptions::{PyFileNotFoundError, PyOSError, PyPermissionError};
use pyo3::prelude::*;

/// The classes themselves.
pub mod kinds {
    pyo3::import_exception!(mlcc._errors, AdapterError);
    pyo3::import_exception!(mlcc._errors, CacheFull);
    pyo3::import_exception!(mlcc._errors, CannotTruncate);
    pyo3::import_exception!(mlcc._errors, Closed);
    pyo3::import_exception!(mlcc._errors, ContextFull);
    pyo3::import_exception!(mlcc._errors, Error);
    pyo3::import_exception!(mlcc._errors, Forked);
    pyo3::import_exception!(mlcc._errors, GrammarError);
    pyo3::import_exception!(mlcc._errors, InternalError);
    pyo3::import_exception!(mlcc._errors, InvalidArtifact);
    pyo3::import_exception!(mlcc._errors, InvalidRequest);
    pyo3::import_exception!(mlcc._errors, OutOfMemory);
    pyo3::import_exception!(mlcc._errors, QueueFull);
    pyo3::import_exception!(mlcc._errors, StateFileError);
    pyo3::import_exception!(mlcc._errors, WrongMachine);
    pyo3::import_exception!(mlcc._errors, WrongVersion);
}

/// Runs `work`; a panic in it, which is an error of ours, becomes an exception of ours.
pub fn catch_panic<T>(work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(panicked(payload.as_ref())))
}

/// The same without the GIL, so that other threads of Python go on.
pub fn without_gil<T: Send>(py: Python<'_>, work: impl FnOnce() -> PyResult<T> + Send) -> PyResult<T> {
    py.detach(|| catch_panic(work))
}

fn panicked(payload: &(dyn Any + Send)) -> PyErr {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    let text = text.unwrap_or_else(|| "no message".into());
    kinds::InternalError::new_err(format!("internal error in mlcc: {text}"))
}

fn io_error(error: &io::Error, message: String) -> PyErr {
    match error.kind() {
        io::ErrorKind::NotFound => PyFileNotFoundError::new_err(message),
        io::ErrorKind::PermissionDenied => PyPermissionError::new_err(message),
        _ => PyOSError::new_err(message),
    }
}

pub fn runtime(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Io { source, .. } => io_error(&source, message),
        Error::Elf { .. }
        | Error::NotArtifact { .. }
        | Error::Corrupt { .. }
        | Error::SplitWeights { .. }
        | Error::Map { .. }
        | Error::MissingEntry { .. } => kinds::InvalidArtifact::new_err(message),
        Error::WrongMachine { .. }
        | Error::Features { .. }
        | Error::UnknownLevel { .. }
        | Error::NoVariantForLevel { .. }
        | Error::NoDevice { .. } => kinds::WrongMachine::new_err(message),
        Error::AbiVersion { .. } => kinds::WrongVersion::new_err(message),
        Error::OutOfMemory { .. } | Error::WeightsTooLarge { .. } => kinds::OutOfMemory::new_err(message),
        Error::ContextFull { .. } | Error::TextTooLong { .. } | Error::SourceTooLong { .. } => {
            kinds::ContextFull::new_err(message)
        }
        Error::NoPages { .. } => kinds::CacheFull::new_err(message),
        Error::TruncateBeyond { .. }
        | Error::TruncateRecurrent { .. }
        | Error::TruncateDropped { .. }
        | Error::TruncateSource { .. } => kinds::CannotTruncate::new_err(message),
        Error::StateFile { .. } | Error::NoStateFile { .. } => kinds::StateFileError::new_err(message),
        Error::NoSlots { .. }
        | Error::SlotsTaken { .. }
        | Error::AdapterTensor { .. }
        | Error::ForeignAdapter { .. } => kinds::AdapterError::new_err(message),
        Error::WorkerPanic { .. } => kinds::InternalError::new_err(message),
        Error::NoTokens
        | Error::EmptyText
        | Error::Token { .. }
        | Error::NoTexts { .. }
        | Error::TextsOnly { .. }
        | Error::Temperature(_)
        | Error::AdapterTooLate { .. }
        | Error::WholePrompt { .. }
        | Error::NoSource { .. } => kinds::InvalidRequest::new_err(message),
        Error::Text { source, .. } => match *source {
            Error::TextTooLong { .. } => kinds::ContextFull::new_err(message),
            Error::EmptyText | Error::Token { .. } => kinds::InvalidRequest::new_err(message),
            _ => kinds::Error::new_err(message),
        },
        _ => kinds::Error::new_err(message),
    }
}

pub fn carried(error: ArtifactTokenizerError) -> PyErr {
    kinds::InvalidArtifact::new_err(error.to_string())
}

pub fn serve(error: ServeError) -> PyErr {
    let message = error.to_string();
    match error {
        ServeError::TooLarge { .. } | ServeError::TextsTooLarge { .. } => {
            kinds::OutOfMemory::new_err(message)
        }
        ServeError::Model(error) => runtime(error),
        ServeError::System(error) => io_error(&error, message),
        _ => kinds::Error::new_err(message),
    }
}

pub fn texts(error: EmbeddingError) -> PyErr {
    match error {
        EmbeddingError::Runtime(error) => runtime(error),
        other => kinds::InvalidRequest::new_err(other.to_string()),
    }
}

pub fn launch(error: LaunchError) -> PyErr {
    let message = error.to_string();
    match error {
        LaunchError::PromptTooLong { .. } => kinds::ContextFull::new_err(message),
        LaunchError::QueueFull { .. } => kinds::QueueFull::new_err(message),
        LaunchError::Closed => kinds::Closed::new_err("the model is closed: it takes no more texts"),
        LaunchError::Grammar(error) => grammar(&error),
        LaunchError::NoAdapters => kinds::AdapterError::new_err(message),
        LaunchError::EmptyPrompt
        | LaunchError::PromptToken { .. }
        | LaunchError::Params(_)
        | LaunchError::Stop(_) => kinds::InvalidRequest::new_err(message),
    }
}

pub fn grammar(error: &GrammarError) -> PyErr {
    let message = error.to_string();
    match error {
        GrammarError::Busy { .. } => kinds::QueueFull::new_err(message),
        _ => kinds::GrammarError::new_err(message),
    }
}

/// The exception for a failure that ended a text before its time.
pub fn failure(failure: &RequestFailure) -> PyErr {
    let message = failure.to_string();
    match failure {
        RequestFailure::Grammar(_) => kinds::GrammarError::new_err(message),
        RequestFailure::Panic(_) => kinds::InternalError::new_err(message),
        RequestFailure::Model(_) => kinds::Error::new_err(message),
    }
}

/// Something of ours was used after `close()`.
pub fn closed(what: &str) -> PyErr {
    kinds::Closed::new_err(format!("the {what} is closed"))
}

/// An adapter that cannot be taken, or is not there.
pub fn adapter(message: impl Into<String>) -> PyErr {
    kinds::AdapterError::new_err(message.into())
}

pub fn invalid(message: impl Into<String>) -> PyErr {
    kinds::InvalidRequest::new_err(message.into())
}
