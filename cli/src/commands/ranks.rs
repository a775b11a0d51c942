//! Commands whose ranks are processes: `mpirun -n 2 mlcc run model.so` starts each of them with the same
//! command line.

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use mlcc_runtime::{LoadOptions, Model, ProcessGroup};

use crate::error::CliError;

/// The processes that were started together with this one, once they were requested.
static TOGETHER: Mutex<Option<Option<ProcessGroup>>> = Mutex::new(None);

fn launched_processes() -> Result<Option<ProcessGroup>, CliError> {
    let mut known = TOGETHER.lock().unwrap_or_else(PoisonError::into_inner);
    match &*known {
        Some(known) => Ok(known.clone()),
        None => Ok(known.insert(ProcessGroup::from_launcher()?).clone()),
    }
}

/// Loads the model of a command. The first process goes on with it; the others take part in its steps from
/// here on, and end with it.
pub(crate) fn load(path: &Path, options: LoadOptions) -> Result<Model, CliError> {
    let processes = launched_processes()?;
    let rank = processes.as_ref().map_or(0, ProcessGroup::rank);
    let model = Model::load(path, &LoadOptions { processes, ..options })?;
    if rank == 0 {
        return Ok(model);
    }
    crate::signals::leave_to_first_rank();
    let ended = model.follow_leader();
    drop(model);
    if let Err(error) = &ended {
        let _ = writeln!(std::io::stderr(), "error: {error}");
    }
    // Whatever the command does with a model is the first one's.
    std::process::exit(i32::from(ended.is_err()))
}
