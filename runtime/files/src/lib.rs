//! Files as every part of mlcc reads and writes them: texts are read up to a limit ([`read`]), and written
//! files appear under their names only when they are complete ([`replace_file`]). Incomplete ones are known
//! by name ([`unfinished`]), so that a program that has to end at once can remove it. [`json`] reads Python's
//! extensions of JSON, and [`nearest`] finds the names that a mistyped one may mean.

pub mod json;
mod links;
pub mod nearest;
pub mod read;
mod replace;
pub mod unfinished;

pub use links::{DanglingLink, exists, is_file};
pub use nearest::{did_you_mean, did_you_mean_one_of};
pub use read::{FileKind, read, read_from, read_to_string};
pub use replace::{replace_file, replace_private_file, write_file};
