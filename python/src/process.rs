//! The process that something belongs to: threads do not survive `fork`.

use std::mem::ManuallyDrop;
use std::ops::Deref;

use pyo3::prelude::*;

use crate::errors::kinds::Forked;

/// Something with threads behind it. In a child process that was forked after it was made it can neither be
/// used nor given back.
pub struct ProcessOwned<T> {
    value: ManuallyDrop<T>,
    process: u32,
}

impl<T> ProcessOwned<T> {
    pub fn new(value: T) -> ProcessOwned<T> {
        ProcessOwned { value: ManuallyDrop::new(value), process: std::process::id() }
    }

    pub fn check(&self) -> PyResult<&T> {
        if self.process == std::process::id() {
            return Ok(&self.value);
        }
        Err(Forked::new_err(
            "the model was loaded before this process was forked, and its threads stayed in the other one: load it after \
             the fork, or start processes with multiprocessing.set_start_method(\"spawn\")",
        ))
    }
}

impl<T> Deref for ProcessOwned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        // Elsewhere it would wait for threads that are not there.
        if self.process == std::process::id() {
            // SAFETY: the value is not used any more, and dropped here alone.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
