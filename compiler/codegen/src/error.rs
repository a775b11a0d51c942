//! Errors of code generation.

use std::path::PathBuf;
use thiserror::Error;

#[derive(Error, Debug)]
pub enum CodegenError {
    /// The input is well-formed by its types, yet no code could be made of it: a bug in lowering or here.
    #[error("internal error: code generation of kernel `{kernel}` failed: {what}")]
    Internal { kernel: String, what: String },
    #[error("internal error: step `{step}`: {what}")]
    Step { step: String, what: String },
    #[error("LLVM refused {what}: {message}")]
    Llvm { what: String, message: String },
    #[error("Cranelift refused {what}: {message}")]
    Cranelift { what: String, message: String },
    #[error("this build of mlcc cannot generate code for {triple} ({cpu}): {message}")]
    Machine { triple: String, cpu: String, message: String },
    #[error("internal error: the object of a kernel is not as expected: {what}")]
    Object { what: String },
    #[error("{0}")]
    Link(#[from] crate::link::LinkError),
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("no CPU target for the host part of the artifact: this machine is {arch}")]
    NoHost { arch: String },
    #[error(transparent)]
    Ptxas(#[from] crate::ptxas::PtxasError),
    #[error(transparent)]
    Target(#[from] mlcc_target::TargetError),
    #[error("target level `{level}` needs the CPU feature `{feature}`, which the ABI has no name for")]
    Feature { level: String, feature: String },
}

/// A failure inside one function, before it is known which; becomes [`CodegenError::Internal`] or
/// [`CodegenError::Step`].
#[derive(Error, Debug)]
#[error("{0}")]
pub struct EmitError(pub String);

impl EmitError {
    pub fn new(what: impl Into<String>) -> EmitError {
        EmitError(what.into())
    }
}

#[cfg(feature = "llvm")]
impl From<inkwell::builder::BuilderError> for EmitError {
    fn from(e: inkwell::builder::BuilderError) -> EmitError {
        EmitError(e.to_string())
    }
}
