//! The driver behind the C functions: handles, streams, graphs, memory. Every handle is checked before it is used.

pub mod graphs;
pub mod host;
pub mod modules;
pub mod space;
pub mod status;
pub mod streams;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::count::{Counts, report};
use crate::exec::fault::{Fault, Kind};
use crate::options::Options;
use crate::ptx::kernel::Kernel;
use modules::Functions;
use space::Space;
pub use status::Status;
use streams::Streams;

/// What a call gives: a value, or a status with a text.
pub type Answer<T> = Result<T, Failure>;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    pub status: Status,
    pub what: String,
}

pub fn fail<T>(status: Status, what: impl Into<String>) -> Answer<T> {
    Err(Failure { status, what: what.into() })
}

pub struct Driver {
    pub options: Options,
    pub initialised: bool,
    /// How often the primary context is held.
    pub contexts: u32,
    pub functions: Functions,
    pub space: Space,
    pub streams: Streams,
    /// What broke the context: every call fails with it.
    broken: Option<Failure>,
    /// The last text of every status, for `cuGetErrorString`.
    pub texts: BTreeMap<i32, &'static std::ffi::CStr>,
    counts: BTreeMap<String, (Arc<Kernel>, Counts)>,
    launches: u64,
    graph_launches: u64,
    /// Copies to the host, and their bytes.
    to_host: [u64; 2],
}

impl Driver {
    pub fn new(options: Options) -> Self {
        Self {
            space: Space::new(&options),
            options,
            initialised: false,
            contexts: 0,
            functions: Functions::default(),
            streams: Streams::default(),
            broken: None,
            texts: BTreeMap::new(),
            counts: BTreeMap::new(),
            launches: 0,
            graph_launches: 0,
            to_host: [0; 2],
        }
    }

    /// Whether the driver was started, and no error of a kernel came before.
    pub fn usable(&self) -> Answer<()> {
        if !self.initialised {
            return fail(Status::NotInitialized, "cuInit has to be called first");
        }
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// The context can do nothing any more.
    pub fn breaks(&mut self, failure: Failure) -> Failure {
        self.broken.get_or_insert_with(|| failure.clone());
        failure
    }

    fn counted(&mut self, kernel: &Arc<Kernel>, counts: &Counts) {
        if self.options.counts.is_some() {
            let entry = self.counts.entry(kernel.name.clone());
            entry.or_insert_with(|| (Arc::clone(kernel), Counts::default())).1.add(counts);
        }
    }

    /// Another launch begins; its number for shadows of memory.
    fn next_launch(&mut self) -> Answer<u64> {
        self.launches += 1;
        if self.launches > self.options.lose_after {
            let failure = Failure {
                status: Status::EccUncorrectable,
                what: "the device is lost (SOFTCUDA_LOSE_AFTER)".into(),
            };
            return Err(self.breaks(failure));
        }
        let number = self.launches % (1 << crate::memory::LAUNCH_BITS);
        if number == 0 {
            self.space.forget_launches();
        }
        Ok(number)
    }

    pub fn hold(&mut self) {
        self.contexts += 1;
    }

    /// What launches have done, if that is counted.
    pub fn report(&self) -> serde_json::Value {
        report(&self.counts, self.graph_launches, self.to_host)
    }

    /// Gives the context up; with the last one what broke it is forgotten, and counts are written.
    pub fn release(&mut self) -> Answer<()> {
        if self.contexts == 0 {
            return fail(Status::InvalidContext, "the primary context is not held");
        }
        self.contexts -= 1;
        if self.contexts > 0 {
            return Ok(());
        }
        self.broken = None;
        let Some(path) = &self.options.counts else { return Ok(()) };
        let text = format!("{:#}\n", self.report());
        std::fs::write(path, text).or_else(|e| fail(Status::Unknown, format!("{}: {e}", path.display())))
    }
}

/// The status that a GPU would give for a mistake. What a GPU does not notice fails as a launch.
pub fn failure_of(fault: &Fault) -> Failure {
    let status = match fault.kind {
        Kind::OutOfBounds => Status::IllegalAddress,
        Kind::Misaligned => Status::MisalignedAddress,
        Kind::Trap => Status::IllegalInstruction,
        Kind::Endless => Status::LaunchTimeout,
        Kind::Uninitialised | Kind::Race | Kind::Divergent | Kind::Undefined => Status::LaunchFailed,
    };
    Failure { status, what: fault.to_string() }
}
