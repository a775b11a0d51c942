//! Worker threads, which models may share.

use std::fmt;
use std::sync::Arc;

use crate::pool::Pool;
use crate::topology::{Topology, Within};
use crate::{LoadOptions, Numa, Result, physical_cores};

/// More workers than that no machine has cores for.
const MOST: usize = 1024;

/// Worker threads. Cloning is cheap and gives the same ones. Models that were loaded with the same ones
/// ([`LoadOptions::workers`]) take turns step by step, in the order in which the steps were asked for, whatever thread they come
/// from; without that each model has its own, which want the same cores.
#[derive(Clone)]
pub struct Workers(pub(crate) Arc<Pool>);

impl Workers {
    /// As `options` say: how many, and where they run.
    pub fn new(options: &LoadOptions) -> Result<Workers> {
        Self::at_most(MOST, options)
    }

    /// As [`Workers::new`], but so many at most.
    pub(crate) fn at_most(most: usize, options: &LoadOptions) -> Result<Workers> {
        let wanted = options.threads.unwrap_or_else(physical_cores).clamp(1, most.clamp(1, MOST));
        let topology = || Topology::of_host();
        let pool = match (options.pin, options.numa) {
            (false, Numa::Off) => Pool::new(wanted)?,
            (true, _) => Pool::pinned(topology().places(wanted, Within::Core))?,
            (false, Numa::Local | Numa::Interleave) => Pool::pinned(topology().places(wanted, Within::Node))?,
        };
        Ok(Workers(Arc::new(pool)))
    }

    /// How many.
    pub fn threads(&self) -> usize {
        self.0.workers()
    }
}

/// Whether they are the same ones.
impl PartialEq for Workers {
    fn eq(&self, other: &Workers) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Workers {}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({})", self.threads())
    }
}
