//! Ranks on GPUs: each is a process with a GPU of its own, and NCCL carries what they exchange from stream to
//! stream.
//!
//! Every process puts the same launches on its stream, as graphs or one by one alike: NCCL wants all of a
//! gather recorded, or none. So the others have the same sessions as rank 0, with graphs of their own
//! ([`super::follow`]).

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::device::{CudaContext, DeviceBuffer};
use super::driver::{self, DevicePtr, DriverHandle};
use super::nccl::{NcclCommunicator, NcclLibrary, UniqueId};
use crate::processes::{LOADING, ProcessGroup, RankLeader};
use crate::table::{ArtifactTable, ModelPlan};
use crate::{Error, LoadOptions, Result};

const STAGED: &str = "what ranks exchange on the GPU";

/// The processes that a model is split among, as one of them sees the others.
#[derive(Clone)]
pub(crate) struct LocalRank {
    pub processes: ProcessGroup,
    /// The number of ranks before this one on the same machine.
    pub local: usize,
}

impl LocalRank {
    /// The GPU of this rank, of `count`: each takes the next one of its machine, unless it was given one
    /// alone.
    pub fn choose_device(&self, options: &LoadOptions, count: u32) -> u32 {
        let first = options.device.unwrap_or(0);
        if count == 1 { first } else { first.saturating_add(self.local as u32) }
    }
}

pub(crate) struct GpuRanks {
    communicator: NcclCommunicator,
    pub processes: ProcessGroup,
    pub rank: usize,
    pub ranks: usize,
    /// The leader, on rank 0.
    pub leader: Option<Arc<RankLeader>>,
    /// Memory for parts of several rows, which come rank by rank.
    staged: Option<DeviceBuffer>,
    watchdog: RankWatchdog,
}

impl GpuRanks {
    /// All ranks come here together. The context is current.
    pub fn join(together: &LocalRank, context: &Arc<CudaContext>, table: &ArtifactTable) -> Result<GpuRanks> {
        let processes = &together.processes;
        let (rank, ranks) = (processes.rank(), processes.ranks());
        let nccl = NcclLibrary::open()?;
        let driver = context.make_current()?;
        let mut uuid = [0; 16];
        // SAFETY: room for the result.
        let status = unsafe { (driver.functions.device_uuid)(uuid.as_mut_ptr(), context.device()) };
        driver.check("cuDeviceGetUuid", status)?;
        let all = processes.all_gather(&uuid, LOADING);
        let all = all.as_chunks::<16>().0;
        let mut pairs = (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| (a, b)));
        if let Some((first, second)) = pairs.find(|&(a, b)| all.get(a) == all.get(b)) {
            return Err(Error::OneGpu { first: processes.name(first), second: processes.name(second) });
        }
        let own = if rank == 0 { nccl.unique_id()?.0 } else { [0; 128] };
        let id = processes.all_gather(&own, LOADING);
        let id = id.first_chunk::<128>().copied().unwrap_or(own);
        let watch = RankWatchdog::new(processes)?;
        let joining = watch.start_wait(LOADING);
        let group = nccl.join(UniqueId(id), rank, ranks)?;
        drop(joining);
        let bytes = staged_bytes(table);
        let staged = (bytes > 0).then(|| DeviceBuffer::new(context, STAGED, bytes)).transpose()?;
        let lead = (rank == 0).then(|| Arc::new(RankLeader::new(processes)));
        Ok(GpuRanks {
            communicator: group,
            processes: processes.clone(),
            rank,
            ranks,
            leader: lead,
            staged,
            watchdog: watch,
        })
    }

    /// While it lives this process waits for the others, and ends all if that takes too long.
    pub fn guard_wait(&self) -> WatchdogGuard<'_> {
        self.watchdog.start_wait(self.processes.limit())
    }

    /// Puts an exchange on the stream: `rows` rows of `row_bytes` bytes at `part` go to all, and those of all
    /// to `all`, row by row.
    pub fn all_gather(
        &self,
        context: &CudaContext,
        (part, all): (DevicePtr, DevicePtr),
        (rows, row_bytes): (u64, u64),
        stream: DriverHandle,
    ) -> Result<()> {
        let bytes = rows.saturating_mul(row_bytes);
        let staged = self.staged.as_ref().filter(|_| rows > 1);
        let to = staged.map_or(all, DeviceBuffer::ptr);
        // SAFETY: the table was checked: parts and what they become lie in their buffers, and the staged ones
        // have the bytes of the largest exchange. All ranks have the same launches.
        unsafe { self.communicator.all_gather(part, to, bytes, stream) }?;
        let Some(staged) = staged else { return Ok(()) };
        let driver = context.make_current()?;
        for rank in 0..self.ranks as u64 {
            let copy = driver::PitchedCopy::on_device(
                (staged.ptr() + rank * bytes, row_bytes),
                (all + rank * row_bytes, row_bytes * self.ranks as u64),
                (row_bytes, rows),
            );
            // SAFETY: a description of memory as above.
            driver.check("cuMemcpy2DAsync", unsafe { (driver.functions.copy_2d)(&copy, stream) })?;
        }
        Ok(())
    }
}

/// Bytes of the largest exchange of several rows, on all ranks.
fn staged_bytes(table: &ArtifactTable) -> u64 {
    let plan = &table.plan;
    let launches = table.device_entries.iter().flat_map(|entry| &entry.launches);
    let bytes = launches.filter(|launch| launch.is_all_gather).map(|launch| {
        let rows = super::launches::all_gather_rows(launch, plan.chunk.max(plan.batch));
        if rows > 1 { rows.saturating_mul(launch.shared_bytes.into()).saturating_mul(plan.ranks) } else { 0 }
    });
    bytes.max().unwrap_or(0)
}

/// The division of pages among ranks.
#[derive(Clone)]
pub(crate) struct PageParts {
    /// Bytes of a page with the parts of all, and of a part.
    pub page: u64,
    pub part: u64,
    pub ranks: u64,
    /// The leader, on rank 0, whose sequences they are.
    pub leader: Option<Arc<RankLeader>>,
}

impl PageParts {
    pub fn from_plan(plan: &ModelPlan, ranks: Option<&GpuRanks>) -> PageParts {
        let count = plan.ranks.max(1);
        PageParts {
            page: plan.page_bytes,
            part: plan.page_bytes / count,
            ranks: count,
            leader: ranks.and_then(|ranks| ranks.leader.clone()),
        }
    }

    /// The place in pages with the part of one rank, for a place in pages with the parts of all.
    pub fn local_offset(&self, at: u64) -> u64 {
        at / self.page * self.part + at % self.page % self.part
    }

    /// The other rank to which a place belongs, on rank 0.
    pub fn remote_rank(&self, at: u64) -> Option<(&RankLeader, usize)> {
        let rank = (at % self.page / self.part) as usize;
        Some((self.leader.as_deref()?, rank)).filter(|_| rank > 0)
    }
}

/// Ends all ranks where one waits for too long: NCCL waits for a lost one forever.
struct RankWatchdog(Arc<(Mutex<WatchdogState>, Condvar)>);

#[derive(Default)]
struct WatchdogState {
    /// Since when, and until when at most.
    waiting_since: Option<(Instant, Duration)>,
    ended: bool,
}

pub(crate) struct WatchdogGuard<'a>(&'a RankWatchdog);

impl RankWatchdog {
    fn new(processes: &ProcessGroup) -> Result<RankWatchdog> {
        let watched = Arc::new((Mutex::default(), Condvar::new()));
        let (there, processes) = (Arc::clone(&watched), processes.clone());
        std::thread::Builder::new()
            .name("mlcc-nccl".into())
            .spawn(move || run_watchdog(&there, &processes))
            .map_err(|source| Error::Thread { index: 0, source })?;
        Ok(RankWatchdog(watched))
    }

    fn start_wait(&self, limit: Duration) -> WatchdogGuard<'_> {
        self.update_state(|watched| watched.waiting_since = Some((Instant::now(), limit)));
        WatchdogGuard(self)
    }

    fn update_state(&self, change: impl FnOnce(&mut WatchdogState)) {
        change(&mut self.0.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn run_watchdog(there: &(Mutex<WatchdogState>, Condvar), processes: &ProcessGroup) {
    const LOOK: Duration = Duration::from_millis(200);
    let mut watched = there.0.lock().unwrap_or_else(PoisonError::into_inner);
    while !watched.ended {
        if let Some((_, limit)) = watched.waiting_since.filter(|(since, limit)| since.elapsed() > *limit) {
            let (name, seconds) = (processes.name(processes.rank()), limit.as_secs());
            let what = format!(
                "{name} has waited for {seconds} s for the GPUs of the others (MLCC_RANK_TIMEOUT): one of them is lost"
            );
            processes.abort_all(&what);
        }
        let waited = there.1.wait_timeout(watched, LOOK);
        watched = waited.map_or_else(|e| e.into_inner().0, |(watched, _)| watched);
    }
}

impl Drop for WatchdogGuard<'_> {
    fn drop(&mut self) {
        self.0.update_state(|watched| watched.waiting_since = None);
    }
}

impl Drop for RankWatchdog {
    fn drop(&mut self) {
        self.update_state(|watched| watched.ended = true);
        self.0.1.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_a_rank_lie_without_those_of_others() {
        let parts = PageParts { page: 300, part: 100, ranks: 3, leader: None };
        // Page 2, the part of rank 1, byte 7 of it.
        assert_eq!(parts.local_offset(2 * 300 + 100 + 7), 207);
        assert_eq!(parts.local_offset(99), 99);
        assert!(parts.remote_rank(600 + 100).is_none(), "only rank 0 tells others");
    }
}
