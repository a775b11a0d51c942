//! The machine on which templates run. This crate starts no threads and makes no calls of the system.

use std::time::Duration;

/// The machine on which foreign templates run: stacks and clocks.
pub trait TemplateHost: Sync {
    /// Runs a task to its end on a separate stack of `bytes`. A panic of the task is an error.
    fn run_on_stack(&self, bytes: usize, task: &mut (dyn FnMut() + Send)) -> Result<(), StackError>;

    /// Time of the processor that the running task has taken; what else runs on the machine does not count.
    fn processor_time(&self) -> Duration;

    /// Seconds since 1970 as the time zone of the machine counts them, as Python's `datetime.now()` has it.
    fn local_time(&self) -> u64;
}

/// The reason why a task did not come to its end.
#[derive(Debug)]
pub enum StackError {
    /// The machine gives no such stack.
    NoStack(std::io::Error),
    Panicked,
}

/// A host for tests, which trust their templates: the stack of the caller.
#[cfg(test)]
pub(crate) struct CallerHost;

#[cfg(test)]
impl TemplateHost for CallerHost {
    fn run_on_stack(&self, _: usize, task: &mut (dyn FnMut() + Send)) -> Result<(), StackError> {
        task();
        Ok(())
    }

    fn processor_time(&self) -> Duration {
        Duration::ZERO
    }

    fn local_time(&self) -> u64 {
        0
    }
}
