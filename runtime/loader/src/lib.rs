//! Loads the code of an artifact without the system's dynamic loader.
//!
//! An artifact is an ELF shared object that imports nothing: a few segments, relative relocations inside of
//! its model table, one exported symbol. [`CodeImage::check`] compares a file with exactly that and refuses
//! everything else with an error that names the header, the tag or the relocation. [`LoadedImage::map`]
//! copies the checked segments into fresh pages, relocates them and makes them read-only or executable. Only
//! three calls in `os` depend on the operating system, so the same file can be loaded everywhere.
//!
//! Source of the format: System V ABI, chapters 4 and 5; of the method: IREE's embedded ELF loader.
#![no_std]

extern crate alloc;
#[cfg(feature = "map")]
extern crate std;

mod dynamic;
mod error;
mod image;
#[cfg(feature = "map")]
mod mapping;
#[cfg(feature = "map")]
mod os;

pub use error::ImageError;
#[cfg(feature = "map")]
pub use error::MapError;
pub use image::{CodeFunction, CodeImage};
#[cfg(feature = "map")]
pub use mapping::LoadedImage;
