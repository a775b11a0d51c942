//! The artifact file: a linked shared object with payload sections appended to it.
//!
//! The compiler links a small ELF `.so` (code, device images, the table). [`ArtifactWriter`] copies it and
//! appends the payload (weights, tokenizer, ...) as real sections that are not SHF_ALLOC: the dynamic loader
//! does not map them, `strip` and `objcopy` keep them, the runtime finds them by name and maps them itself. A
//! last section, `.mlcc.hashes`, holds a hash of the code and of each payload section.
//!
//! Invariants
//! * Nothing appears under the final name before `finish` has written everything; an error or a drop leaves
//!   nothing.
//! * Payload streams through: memory use does not depend on its size.
//! * Equal input gives equal bytes.
//!
//! ```no_run
//! # use mlcc_codegen::artifact::*;
//! # fn main() -> Result<(), ArtifactError> {
//! let mut artifact =
//!     ArtifactWriter::create("model.so".as_ref(), "linked.so".as_ref(), WeightDestination::Inside)?;
//! artifact.begin_section(mlcc_abi::section::WEIGHTS)?;
//! artifact.write(&[1, 2, 3])?;
//! artifact.end_section()?;
//! artifact.finish()?;
//! # Ok(()) }
//! ```

mod error;
mod file;
mod split;
mod writer;

pub use error::ArtifactError;
pub use split::SplitTensor;
pub use writer::{ArtifactSummary, ArtifactWriter, WeightDestination};
