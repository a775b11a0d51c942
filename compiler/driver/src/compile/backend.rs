//! The back ends that this mlcc was built with.

use std::path::{Path, PathBuf};

use mlcc_codegen::{CodegenInput, CompileJobs};

use super::{BuildError, EmitKind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Llvm,
    Cranelift,
}

impl Default for Backend {
    fn default() -> Self {
        if cfg!(feature = "llvm") { Backend::Llvm } else { Backend::Cranelift }
    }
}

impl Backend {
    pub fn name(self) -> &'static str {
        match self {
            Backend::Llvm => "llvm",
            Backend::Cranelift => "cranelift",
        }
    }

    pub fn is_built_in(self) -> bool {
        match self {
            Backend::Llvm => cfg!(feature = "llvm"),
            Backend::Cranelift => cfg!(feature = "cranelift"),
        }
    }

    #[allow(dead_code, reason = "unused where every back end is built in")]
    fn missing(self) -> BuildError {
        match self {
            Backend::Llvm => BuildError::NoBackend { name: "LLVM", other: "cranelift", feature: "llvm19" },
            Backend::Cranelift => {
                BuildError::NoBackend { name: "Cranelift", other: "llvm", feature: "cranelift" }
            }
        }
    }
}

/// A linked library; its file goes away with this value.
pub(super) use mlcc_codegen::LinkedLibrary;

/// Compiles and links.
pub(super) fn compile(
    backend: Backend,
    input: &CodegenInput<'_>,
    soname: &str,
    jobs: &CompileJobs,
) -> Result<LinkedLibrary, BuildError> {
    match backend {
        #[cfg(feature = "llvm")]
        Backend::Llvm => Ok(mlcc_codegen::compile_with_jobs(input, soname, jobs)?),
        #[cfg(not(feature = "llvm"))]
        Backend::Llvm => Err(backend.missing()),
        #[cfg(feature = "cranelift")]
        Backend::Cranelift if input.target.arch == mlcc_target::Arch::Nvptx => {
            Err(BuildError::Unsupported("--target cuda needs --backend llvm".into()))
        }
        #[cfg(feature = "cranelift")]
        Backend::Cranelift => Ok(mlcc_codegen::compile_with_cranelift_jobs(input, soname, jobs)?),
        #[cfg(not(feature = "cranelift"))]
        Backend::Cranelift => Err(backend.missing()),
    }
}

/// Writes the text of every level beside the artifact's name; returns the files.
#[cfg(not(feature = "llvm"))]
pub(super) fn emit(
    _: Backend,
    _: &CodegenInput<'_>,
    _: EmitKind,
    _: &Path,
) -> Result<Vec<PathBuf>, BuildError> {
    Err(Backend::Llvm.missing())
}

/// Writes the text of every level beside the artifact's name; returns the files.
#[cfg(feature = "llvm")]
pub(super) fn emit(
    backend: Backend,
    input: &CodegenInput<'_>,
    emit: EmitKind,
    output: &Path,
) -> Result<Vec<PathBuf>, BuildError> {
    use mlcc_codegen::llvm::EmitFormat;
    if backend != Backend::Llvm {
        return Err(BuildError::Unsupported("--emit needs --backend llvm".into()));
    }
    let gpu = input.target.arch == mlcc_target::Arch::Nvptx;
    let (what, extension) = match emit {
        EmitKind::Llvm => (EmitFormat::Ir, "ll"),
        EmitKind::Assembly if gpu => (EmitFormat::Assembly, "ptx"),
        EmitKind::Assembly => (EmitFormat::Assembly, "s"),
    };
    let mut files = Vec::new();
    for part in mlcc_codegen::emit(input, what)? {
        let extension = if part.name == "table" && extension == "ptx" { "s" } else { extension };
        let path = output.with_extension(format!("{}.{extension}", part.name));
        mlcc_files::write_file(&path, &part.bytes).map_err(|source| BuildError::Io {
            action: "write",
            path: path.clone(),
            source,
        })?;
        files.push(path);
    }
    Ok(files)
}
