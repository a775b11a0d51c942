//! Streams. Work is done when it is waited for, not before: a reader that does not wait finds the old data.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use super::host::HostRange;
use super::{DriverFailure, DriverResult, SoftDriver, Status, fail, failure_of};
use crate::exec::launch::GridLaunch;
use crate::exec::registers::ConstantBank;
use crate::ptx::kernel::PtxKernel;

/// `CUhostFn`. It may not call the driver.
pub type HostFunction = unsafe extern "C" fn(*mut std::ffi::c_void);

/// The work of a stream.
#[derive(Clone)]
pub enum StreamWork {
    /// Bytes that were read when the call was made, from pageable memory.
    Staged {
        to: u64,
        data: Arc<Vec<u8>>,
    },
    FromHost {
        to: u64,
        from: HostRange,
    },
    ToHost {
        to: HostRange,
        from: u64,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
    },
    /// Rows of `row` bytes; `to` and `from` are addresses and distances of rows.
    Rows {
        to: (u64, u64),
        from: (u64, u64),
        row: u64,
        rows: u64,
    },
    /// A function of the host, and its argument.
    Host {
        function: HostFunction,
        argument: usize,
    },
    Fill {
        to: u64,
        element: Vec<u8>,
        count: u64,
    },
    Kernel(QueuedLaunch),
    Event(u64),
}

/// A launch that waits for its turn.
#[derive(Clone)]
pub struct QueuedLaunch {
    pub kernel: Arc<PtxKernel>,
    pub constants: Arc<ConstantBank>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub params: Vec<u8>,
}

#[derive(Default)]
pub struct WorkStream {
    pub work: VecDeque<StreamWork>,
    pub recording: Option<StreamCapture>,
}

/// A stream that records.
#[derive(Default)]
pub struct StreamCapture {
    pub work: Vec<StreamWork>,
    /// The reason why it cannot become a graph.
    pub invalid: Option<String>,
}

pub struct StreamTable {
    /// Stream 0 is the default one.
    pub all: BTreeMap<u64, WorkStream>,
    pub graphs: BTreeMap<u64, Vec<StreamWork>>,
    pub executables: BTreeMap<u64, Vec<StreamWork>>,
    /// The time of each event, if it happened.
    pub events: BTreeMap<u64, Option<std::time::Instant>>,
    next: u64,
}

impl Default for StreamTable {
    fn default() -> Self {
        Self {
            all: BTreeMap::from([(0, WorkStream::default())]),
            graphs: BTreeMap::new(),
            executables: BTreeMap::new(),
            events: BTreeMap::new(),
            next: 0x5c02_0000_0000,
        }
    }
}

impl StreamTable {
    /// A handle that no other object has.
    pub fn new_handle(&mut self) -> u64 {
        self.next += 16;
        self.next
    }

    pub fn get(&mut self, stream: u64) -> DriverResult<&mut WorkStream> {
        match self.all.get_mut(&stream) {
            Some(stream) => Ok(stream),
            None => fail(Status::InvalidHandle, "no such stream"),
        }
    }

    /// True if some stream records, which forbids calls that wait.
    pub fn recording(&self) -> bool {
        self.all.values().any(|s| s.recording.is_some())
    }
}

impl SoftDriver {
    pub fn create_stream(&mut self) -> u64 {
        let handle = self.streams.new_handle();
        self.streams.all.insert(handle, WorkStream::default());
        handle
    }

    /// Destroys a stream; the work that it still has is done.
    pub fn destroy_stream(&mut self, stream: u64) -> DriverResult<()> {
        if stream == 0 {
            return fail(Status::InvalidHandle, "the default stream stays");
        }
        self.streams.get(stream)?;
        let done = self.drain(stream);
        self.streams.all.remove(&stream);
        done
    }

    /// Puts work behind the other work of a stream, or records it.
    pub fn enqueue(&mut self, stream: u64, work: StreamWork) -> DriverResult<()> {
        let stream = self.streams.get(stream)?;
        match &mut stream.recording {
            Some(recording) => recording.work.push(work),
            None => stream.work.push_back(work),
        }
        Ok(())
    }

    /// Waits for a stream.
    pub fn wait(&mut self, stream: u64) -> DriverResult<()> {
        if let Some(recording) = &mut self.streams.get(stream)?.recording {
            recording.invalid.get_or_insert_with(|| "the stream was waited for".into());
            return fail(Status::StreamCaptureUnsupported, "a stream that records cannot be waited for");
        }
        self.drain(stream)
    }

    /// Waits for all streams, as freeing memory does.
    pub fn wait_for_all(&mut self) -> DriverResult<()> {
        let all: Vec<u64> = self.streams.all.keys().copied().collect();
        all.into_iter().try_for_each(|stream| self.drain(stream))
    }

    fn drain(&mut self, stream: u64) -> DriverResult<()> {
        loop {
            self.usable()?;
            let Some(work) = self.streams.get(stream)?.work.pop_front() else { return Ok(()) };
            if let Err(failure) = self.perform(&work) {
                return Err(self.breaks(failure));
            }
        }
    }

    fn perform(&mut self, work: &StreamWork) -> DriverResult<()> {
        match work {
            StreamWork::Staged { to, data } => self.space.write(*to, data),
            StreamWork::FromHost { to, from } => self.space.write(*to, &from.read()),
            StreamWork::ToHost { to, from } => {
                let mut data = vec![0; to.len()];
                self.space.read(*from, &mut data)?;
                to.write(&data);
                let [copies, bytes] = &mut self.to_host;
                (*copies, *bytes) = (*copies + 1, *bytes + data.len() as u64);
                Ok(())
            }
            StreamWork::Copy { to, from, bytes } => self.space.copy(*to, *from, *bytes),
            StreamWork::Rows { to: (to, to_pitch), from: (from, from_pitch), row, rows } => {
                (0..*rows).try_for_each(|i| self.space.copy(to + i * to_pitch, from + i * from_pitch, *row))
            }
            StreamWork::Host { function, argument } => {
                // SAFETY: promised in `cuLaunchHostFunc`.
                unsafe { function(*argument as *mut std::ffi::c_void) };
                Ok(())
            }
            StreamWork::Fill { to, element, count } => {
                // In pieces of a size that does not show.
                let piece = element.repeat(((1 << 16) / element.len()).min(*count as usize));
                let bytes = count * element.len() as u64;
                let mut done = 0;
                while done < bytes {
                    let n = (piece.len() as u64).min(bytes - done);
                    self.space.write(to + done, &piece[..n as usize])?;
                    done += n;
                }
                Ok(())
            }
            StreamWork::Kernel(call) => self.execute(call),
            StreamWork::Event(event) => {
                if let Some(happened) = self.streams.events.get_mut(event) {
                    *happened = Some(std::time::Instant::now());
                }
                Ok(())
            }
        }
    }

    fn execute(&mut self, call: &QueuedLaunch) -> DriverResult<()> {
        let number = self.next_launch()?;
        let launch = GridLaunch {
            kernel: Arc::clone(&call.kernel),
            constants: Arc::clone(&call.constants),
            grid: call.grid,
            block: call.block,
            shared_bytes: call.shared_bytes,
            params: call.params.clone(),
            view: self.space.view(),
            number,
            order: self.options.order,
            checks: self.options.checks,
            counting: self.options.counts.is_some(),
            atomics: Mutex::new(()),
        };
        match launch.run() {
            Ok(counts) => {
                self.counted(&call.kernel, &counts);
                Ok(())
            }
            Err(fault) => Err(failure_of(&fault)),
        }
    }

    /// A launch, checked as a driver checks it.
    pub fn launch(&mut self, function: u64, stream: u64, call: QueuedLaunch) -> DriverResult<()> {
        let function = self.functions.get(function)?;
        let (name, most_shared) = (&function.kernel.name, function.most_shared);
        let refuse = |what: String| {
            Err(DriverFailure { status: Status::InvalidValue, what: format!("kernel {name}: {what}") })
        };
        let threads: u64 = call.block.iter().map(|n| u64::from(*n)).product();
        let permitted = function.kernel.max_threads.map_or(1024, |t| t.iter().product::<u32>().min(1024));
        if threads == 0 || threads > u64::from(permitted) || call.block[2] > 64 {
            return refuse(format!("a block of {:?} threads, it may have {permitted}", call.block));
        }
        if call.grid.contains(&0)
            || call.grid[0] > i32::MAX as u32
            || call.grid[1] > 65535
            || call.grid[2] > 65535
        {
            return refuse(format!("a grid of {:?} blocks", call.grid));
        }
        let own: u32 = function.kernel.shared.iter().map(|a| a.bytes).sum();
        if own + call.shared_bytes > most_shared.max(48 << 10) {
            return refuse(format!(
                "{} bytes of shared memory, it may have {most_shared}",
                own + call.shared_bytes
            ));
        }
        let first = !std::mem::replace(&mut function.loaded, true);
        let name = function.kernel.name.clone();
        if let (true, Some(recording)) = (first, &mut self.streams.get(stream)?.recording) {
            let what =
                format!("kernel {name} was never launched, and cannot be loaded while the stream records");
            recording.invalid.get_or_insert_with(|| what.clone());
            return fail(Status::StreamCaptureUnsupported, what);
        }
        self.enqueue(stream, StreamWork::Kernel(call))
    }
}
