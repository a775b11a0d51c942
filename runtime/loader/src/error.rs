//! Reasons why an image is not loaded. Texts go on after the name of the file.

#[cfg(feature = "map")]
use alloc::string::String;

use thiserror::Error;

/// The part of a file that no artifact has, or that contradicts the format.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ImageError {
    #[error("it is made for the unknown machine {0}")]
    Machine(u16),
    #[error("its segments are malformed: {0}")]
    Segments(&'static str),
    #[error("its segments are malformed: segment {index} {what}")]
    Segment { index: usize, what: &'static str },
    #[error("its segment of kind {kind:#x} is malformed")]
    OtherSegment { kind: u32 },
    #[error("its segment of kind {kind:#x} requests something that no artifact needs")]
    ForeignSegment { kind: u32 },
    #[error("its dynamic table is malformed: {0}")]
    DynamicTable(&'static str),
    #[error("its dynamic table asks the loader for something (tag {0:#x}) that no artifact needs")]
    DynamicTag(u64),
    #[error("its symbol table is malformed: {0}")]
    Symbols(&'static str),
    #[error("the loader's tables are in writable memory")]
    WritableTables,
    #[error("its relocation table is malformed: {0}")]
    RelocationTable(&'static str),
    #[error("its relocations are malformed: number {index} {what}")]
    Relocation { index: usize, what: &'static str },
}

/// The reason why a checked image could not be mapped.
#[cfg(feature = "map")]
#[derive(Debug, Error)]
pub enum MapError {
    #[error(
        "its segments are laid out for smaller pages than those of this system, which have {page} bytes: build it again"
    )]
    PageSize { page: usize },
    #[error("its image of {bytes} bytes does not fit into the address space")]
    TooLarge { bytes: u64 },
    #[error("the system does not provide {bytes} bytes of memory for its code: {source}")]
    Memory { bytes: usize, source: std::io::Error },
    #[error("{}", denied(source))]
    Protect { source: std::io::Error },
}

#[cfg(feature = "map")]
fn denied(source: &std::io::Error) -> String {
    alloc::format!(
        "the system does not let this process make memory executable ({source}): permit it (SELinux: `execmem`; systemd: \
         `MemoryDenyWriteExecute=no`; hardened macOS programs: the entitlement `allow-jit`)"
    )
}
