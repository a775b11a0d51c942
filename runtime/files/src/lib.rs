//! Files as every part of mlcc reads and writes them: texts are read up to a limit ([`read`]), and what is written appears under its
//! name only when it is complete ([`replace_file`]). What is not complete yet is known by name ([`unfinished`]), so that a
//! program that has to end at once can remove it. [`json`] reads what Python writes beside plain JSON, and [`nearest`] finds the
//! names that a mistyped one may stand for.

pub mod json;
mod links;
pub mod nearest;
pub mod read;
mod replace;
pub mod unfinished;

pub use links::{DanglingLink, exists, is_file};
pub use nearest::did_you_mean;
pub use read::{FileKind, read, read_from, read_to_string};
pub use replace::{replace_file, replace_private_file, write_file};
