//! The code of an artifact in memory, by one of two loaders.
//!
//! The own loader ([`mlcc_loader`]) is used everywhere. The system's, chosen by [`LoaderKind::System`] or
//! `MLCC_LOADER=system`, is for debuggers and for comparison: both run the same bytes.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mlcc_abi::{MODEL_SYMBOL, ModelTable};
use mlcc_loader::{CodeImage, LoadedImage};

use crate::rebuild::rebuild_command;
use crate::table::{ArtifactTable, TableError, TableReader};
use crate::{Artifact, Error, Result, perf_map};

/// Names the loader: `own` or `system`.
const VARIABLE: &str = "MLCC_LOADER";

/// The loader that maps the code of an artifact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoaderKind {
    /// mlcc's own: the same on every operating system.
    #[default]
    Own,
    /// The system's dynamic loader, of which debuggers and profilers know.
    System,
}

impl LoaderKind {
    /// The loader that the environment asks for.
    fn from_environment() -> Result<Option<Self>> {
        match std::env::var_os(VARIABLE) {
            None => Ok(None),
            Some(name) if name.is_empty() => Ok(None),
            Some(name) if name == OsStr::new("own") => Ok(Some(Self::Own)),
            Some(name) if name == OsStr::new("system") => Ok(Some(Self::System)),
            Some(name) => Err(Error::Loader { found: name.to_string_lossy().into_owned() }),
        }
    }
}

/// Mapped code. It has to live as long as the entry points of its table are used.
pub(crate) enum MappedCode {
    Own { _image: LoadedImage },
    System { _library: Library },
}

/// Maps the code of an artifact and reads its table. `asked` goes before the environment.
pub(crate) fn load_code(
    artifact: &Artifact,
    asked: Option<LoaderKind>,
) -> Result<(MappedCode, ArtifactTable)> {
    let path = || artifact.path().to_path_buf();
    let elf = artifact.elf()?;
    let image = CodeImage::check(&elf).map_err(|e| Error::Corrupt { path: path(), what: e.to_string() })?;
    if image.model_table().is_empty() {
        let what = format!("it is a shared object without the symbol {MODEL_SYMBOL}");
        return Err(Error::NotArtifact { path: path(), what });
    }
    let kind = match asked {
        Some(kind) => kind,
        None => LoaderKind::from_environment()?.unwrap_or_default(),
    };
    let (code, table) = match kind {
        LoaderKind::Own => {
            let loaded =
                LoadedImage::map(&image).map_err(|e| Error::Map { path: path(), what: e.to_string() })?;
            perf_map::append_functions(&image, loaded.base());
            let table = loaded.base().wrapping_add(image.model_table().start as usize);
            (MappedCode::Own { _image: loaded }, table.cast::<ModelTable>())
        }
        LoaderKind::System => {
            let (library, table) = open_library(artifact)?;
            (MappedCode::System { _library: library }, table)
        }
    };
    let place = TableReader { image: &image, table, metadata: artifact.metadata() };
    // SAFETY: the symbol's bytes are mapped, which `CodeImage::check` has verified, and stay so as long as
    // the code.
    let table = unsafe { ArtifactTable::read(&place) }.map_err(|e| match e {
        TableError::Magic => {
            Error::NotArtifact { path: path(), what: "its model table has no magic number".into() }
        }
        TableError::Version { found, compiler } => Error::AbiVersion {
            path: path(),
            found,
            expected: mlcc_abi::ABI_VERSION,
            compiler: if compiler.is_empty() { "an unknown compiler".into() } else { compiler },
            rebuild: rebuild_command(artifact.path(), artifact.metadata()),
        },
        TableError::Malformed(what) => Error::Corrupt { path: path(), what },
    })?;
    Ok((code, table))
}

/// Lets the system's loader map a checked artifact.
///
/// The file is named to `dlopen` through its open descriptor, and every time in another spelling: the loader
/// remembers libraries by every name they were opened by, and would otherwise answer with an old one where a
/// model was built again under the same name, or where a descriptor's number came back while a library it
/// once named is still loaded.
fn open_library(artifact: &Artifact) -> Result<(Library, *const ModelTable)> {
    let path = || artifact.path().to_path_buf();
    let by_descriptor = unused_name(artifact.file().as_raw_fd());
    let name = if by_descriptor.exists() {
        by_descriptor
    } else {
        std::path::absolute(artifact.path()).unwrap_or_else(|_| path())
    };
    // SAFETY: the artifact's structure and code hash were verified, it has no initialisers, and its
    // relocations stay inside of the model table.
    let library = unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| {
        let what = e.to_string().replace(&*name.to_string_lossy(), "the file");
        Error::Map { path: path(), what }
    })?;
    // SAFETY: the symbol is data of this type; its first fields are checked before the rest is read.
    let table = unsafe { library.get::<*const ModelTable>(MODEL_SYMBOL) };
    let table = table.map_err(|_| {
        let what = format!("it is a shared object without the symbol {MODEL_SYMBOL}");
        Error::NotArtifact { path: path(), what }
    })?;
    let table = *table;
    Ok((library, table))
}

/// A path of an open descriptor that this process has not used before: `.` and empty components, which mean
/// nothing, spell a counter.
fn unused_name(descriptor: RawFd) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let bits =
        (0..u64::BITS - number.leading_zeros()).map(|bit| if number >> bit & 1 == 1 { "./" } else { "/" });
    PathBuf::from(format!("/proc/self/fd/{}{descriptor}", bits.collect::<String>()))
}

/// The model table of an artifact, for those who only look at it: no weights are made and no device is asked
/// for. What it says of CPU code is not in it, since that code is not there any more.
pub fn read_table(artifact: &Artifact) -> Result<ArtifactTable> {
    let (_code, mut table) = load_code(artifact, None)?;
    table.variants.clear();
    Ok(table)
}
