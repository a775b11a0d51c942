//! The connections of a measurement to the program.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::BenchError;

/// The receiver of progress and messages, with the flag that ends a measurement.
pub trait BenchHost {
    /// The flag that asks for the end. From the first call on an interrupt sets it; before, an interrupt ends
    /// the program.
    fn cancel_flag(&self) -> &'static AtomicBool;
    /// Work of `pieces` pieces begins now.
    fn start_progress(&self, pieces: u64);
    /// `done` of the pieces are done.
    fn set_progress(&self, done: u64);
    /// One more piece is done.
    fn advance_progress(&self);
    /// The piece that is being worked on.
    fn set_message(&self, text: String);
    fn finish_progress(&self);
    /// One line about the work.
    fn note(&self, text: &dyn Display);
    /// One line that only `--verbose` shows.
    fn detail(&self, text: &dyn Display);
    fn warn(&self, text: &dyn Display);
}

pub(crate) fn stop_if_interrupted(host: &dyn BenchHost) -> Result<(), BenchError> {
    match host.cancel_flag().load(Ordering::Relaxed) {
        true => Err(BenchError::Interrupted),
        false => Ok(()),
    }
}

/// A program to start, with its arguments: this one again, as the process that is measured or keeps the
/// machine busy.
pub struct ChildProgram {
    pub path: PathBuf,
    pub args: Vec<OsString>,
}
