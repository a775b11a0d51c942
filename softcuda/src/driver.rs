//! The driver behind the C functions: handles, streams, graphs, memory. Every handle is checked before it is
//! used.

pub mod graphs;
pub mod host;
pub mod modules;
pub mod space;
pub mod status;
pub mod streams;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::count::{LaunchCounts, report};
use crate::exec::fault::{FaultKind, LaunchFault};
use crate::options::DeviceOptions;
use crate::ptx::kernel::PtxKernel;
use modules::FunctionTable;
use space::DeviceSpace;
pub use status::Status;
use streams::StreamTable;

/// The result of a call: a value, or a status with a text.
pub type DriverResult<T> = Result<T, DriverFailure>;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriverFailure {
    pub status: Status,
    pub what: String,
}

pub fn fail<T>(status: Status, what: impl Into<String>) -> DriverResult<T> {
    Err(DriverFailure { status, what: what.into() })
}

pub struct SoftDriver {
    pub options: DeviceOptions,
    pub initialised: bool,
    /// The number of holders of the primary context.
    pub contexts: u32,
    pub functions: FunctionTable,
    pub space: DeviceSpace,
    pub streams: StreamTable,
    /// The failure that broke the context: every call fails with it.
    broken: Option<DriverFailure>,
    /// The last text of every status, for `cuGetErrorString`.
    pub texts: BTreeMap<i32, &'static std::ffi::CStr>,
    counts: BTreeMap<String, (Arc<PtxKernel>, LaunchCounts)>,
    launches: u64,
    graph_launches: u64,
    /// Copies to the host, and their bytes.
    to_host: [u64; 2],
}

impl SoftDriver {
    pub fn new(options: DeviceOptions) -> Self {
        Self {
            space: DeviceSpace::new(&options),
            options,
            initialised: false,
            contexts: 0,
            functions: FunctionTable::default(),
            streams: StreamTable::default(),
            broken: None,
            texts: BTreeMap::new(),
            counts: BTreeMap::new(),
            launches: 0,
            graph_launches: 0,
            to_host: [0; 2],
        }
    }

    /// Checks that the driver was started, and no error of a kernel came before.
    pub fn usable(&self) -> DriverResult<()> {
        if !self.initialised {
            return fail(Status::NotInitialized, "cuInit has to be called first");
        }
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// The context can do nothing any more.
    pub fn breaks(&mut self, failure: DriverFailure) -> DriverFailure {
        self.broken.get_or_insert_with(|| failure.clone());
        failure
    }

    fn counted(&mut self, kernel: &Arc<PtxKernel>, counts: &LaunchCounts) {
        if self.options.counts.is_some() {
            let entry = self.counts.entry(kernel.name.clone());
            entry.or_insert_with(|| (Arc::clone(kernel), LaunchCounts::default())).1.add(counts);
        }
    }

    /// Another launch begins; its number for shadows of memory.
    fn next_launch(&mut self) -> DriverResult<u64> {
        self.launches += 1;
        if self.launches > self.options.lose_after {
            let failure = DriverFailure {
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

    /// Counts of launches, if they are counted.
    pub fn report(&self) -> serde_json::Value {
        report(&self.counts, self.graph_launches, self.to_host)
    }

    /// Gives the context up; with the last one what broke it is forgotten, and counts are written.
    pub fn release(&mut self) -> DriverResult<()> {
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

/// The status that a GPU would give for a mistake. Mistakes that a GPU does not notice fail as a launch.
pub fn failure_of(fault: &LaunchFault) -> DriverFailure {
    let status = match fault.kind {
        FaultKind::OutOfBounds => Status::IllegalAddress,
        FaultKind::Misaligned => Status::MisalignedAddress,
        FaultKind::Trap => Status::IllegalInstruction,
        FaultKind::Endless => Status::LaunchTimeout,
        FaultKind::Uninitialised | FaultKind::Race | FaultKind::Divergent | FaultKind::Undefined => {
            Status::LaunchFailed
        }
    };
    DriverFailure { status, what: fault.to_string() }
}
