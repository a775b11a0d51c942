//! The dynamic loader's side of an artifact.
//!
//! The file is named to `dlopen` through its open descriptor, and every time in another spelling: the loader remembers
//! libraries by every name they were opened by, and would otherwise answer with an old one where a model was built
//! again under the same name, or where a descriptor's number came back while a library it once named is still loaded.

use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mlcc_abi::{MODEL_SYMBOL, ModelTable};

use crate::linked::Linked;
use crate::table::{Place, Table, TableError};
use crate::{Artifact, Error, Result};

/// A path of an open descriptor that this process has not used before: `.` and empty components, which mean nothing,
/// spell a counter.
fn unused_name(descriptor: RawFd) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let bits =
        (0..u64::BITS - number.leading_zeros()).map(|bit| if number >> bit & 1 == 1 { "./" } else { "/" });
    PathBuf::from(format!("/proc/self/fd/{}{descriptor}", bits.collect::<String>()))
}

/// Maps the code of an artifact. The library must stay loaded as long as the table's entry points are used.
pub(crate) fn load(artifact: &Artifact) -> Result<(Library, Table)> {
    let path = || artifact.path().to_path_buf();
    let linked = Linked::check(&artifact.elf()?).map_err(|what| Error::Corrupt { path: path(), what })?;
    let by_descriptor = unused_name(artifact.file().as_raw_fd());
    let name = if by_descriptor.exists() {
        by_descriptor
    } else {
        std::path::absolute(artifact.path()).unwrap_or_else(|_| path())
    };
    // SAFETY: the artifact's structure and code hash were verified, it has no initialisers, and its relocations stay
    // inside of the model table.
    let library = unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| {
        let what = e.to_string().replace(&*name.to_string_lossy(), "the file");
        Error::Dlopen { path: path(), what }
    })?;
    // SAFETY: the symbol is data of this type; its first fields are checked before the rest is read.
    let table = unsafe { library.get::<*const ModelTable>(MODEL_SYMBOL) };
    let table = table.map_err(|_| {
        let what = format!("it is a shared object without the symbol {MODEL_SYMBOL}");
        Error::NotArtifact { path: path(), what }
    })?;
    let place = Place { linked: &linked, table: *table, metadata: artifact.metadata() };
    // SAFETY: the symbol's bytes are mapped, which `Linked::check` has verified, and stay so as long as the library.
    let table = unsafe { Table::read(&place) }.map_err(|e| match e {
        TableError::Magic => {
            Error::NotArtifact { path: path(), what: "its model table has no magic number".into() }
        }
        TableError::Version { found, compiler } => Error::AbiVersion {
            path: path(),
            found,
            expected: mlcc_abi::ABI_VERSION,
            compiler: if compiler.is_empty() { "an unknown compiler".into() } else { compiler },
        },
        TableError::Malformed(what) => Error::Corrupt { path: path(), what },
    })?;
    Ok((library, table))
}

/// The model table of an artifact, for those who only look at it: no weights are made and no device is asked for. What it says of CPU code is
/// not in it, since that code is not there any more.
pub fn table_of(artifact: &Artifact) -> Result<Table> {
    let (_library, mut table) = load(artifact)?;
    table.variants.clear();
    Ok(table)
}
