//! Pages of caches in the memory of a GPU. Where the driver can map memory piece by piece (CUDA 10.2 and
//! later, on devices that say so), addresses are reserved once and get memory as pages are taken; else all
//! pages have it at once.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::{CudaContext, DeviceBuffer};
use super::driver::{self, DevicePtr, VirtualMemory};
use super::ranks::PageParts;
use super::stream::CudaStream;
use crate::page_pool::{PageCounts, PageMemory, PagePool};
use crate::processes::{LOADING, ProcessGroup, RankMessageKind};
use crate::table::ModelPlan;
use crate::{Error, Result};

const WHAT: &str = "pages of the KV cache on the GPU";
/// Share of the memory that is free when the model has been loaded: the rest is for other memory of sessions.
const SHARE: (u64, u64) = (9, 10);

pub(crate) struct DevicePages {
    storage: PageStorage,
    /// Places are those of pages with the parts of all ranks; here lie those of one.
    parts: PageParts,
    /// The stream for copies.
    stream: CudaStream,
}

enum PageStorage {
    Whole(DeviceBuffer),
    Mapped(AddressReservation),
}

/// Reserved addresses, the first granules of which have memory.
struct AddressReservation {
    context: Arc<CudaContext>,
    base: DevicePtr,
    bytes: u64,
    granule: u64,
    /// Bytes with memory. Changed only while the counts of the pool are locked.
    mapped: AtomicU64,
}

impl DevicePages {
    /// A pool of the pages of a model; `None` if it has no caches. `asked`: as
    /// [`crate::LoadOptions::cache_pages`]; by default no more than there is free memory for.
    pub fn pool(
        context: &Arc<CudaContext>,
        plan: &ModelPlan,
        (parts, processes): (PageParts, Option<&ProcessGroup>),
        asked: Option<u64>,
    ) -> Result<Option<PagePool<DevicePages>>> {
        let page = parts.part;
        let Some(counts) = PageCounts::from_plan(plan, asked) else { return Ok(None) };
        let room = match asked {
            Some(_) => u64::MAX,
            None => context.free_memory()? / SHARE.1 * SHARE.0 / page,
        };
        // Ranks have equally many: as many as the one with the least memory.
        let room = processes.map_or(room, |processes| {
            let all = processes.all_gather(&room.to_le_bytes(), LOADING);
            all.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).min().unwrap_or(room)
        });
        let counts =
            PageCounts { desired_pages: counts.desired_pages.min(room).max(counts.min_pages), ..counts };
        let stream = CudaStream::new(context)?;
        let Some(granule) = AddressReservation::granule(context)? else {
            // A full context for each sequence of a batch, and one that is not in it.
            let contexts = plan.batch.max(1).saturating_add(1);
            let few = counts.min_pages.saturating_mul(contexts).min(counts.desired_pages);
            let counts = PageCounts { desired_pages: asked.map_or(few, |_| counts.desired_pages), ..counts };
            let allocate = |bytes| match DeviceBuffer::new(context, WHAT, bytes) {
                Err(Error::OutOfMemory { .. }) => Ok(None),
                made => made.map(Some),
            };
            let (buffer, pages) = counts.reserve(page, WHAT, allocate)?;
            let memory = PageStorage::Whole(buffer);
            return Ok(Some(PagePool::new(
                DevicePages { storage: memory, parts, stream },
                plan.page_bytes,
                pages,
            )));
        };
        let reserve = |bytes| AddressReservation::reserve(context, bytes, granule);
        let (mapped, pages) = counts.reserve(page, WHAT, reserve)?;
        let memory = PageStorage::Mapped(mapped);
        Ok(Some(PagePool::new(DevicePages { storage: memory, parts, stream }, plan.page_bytes, pages)))
    }

    /// Page 0; the others follow.
    pub fn base(&self) -> DevicePtr {
        match &self.storage {
            PageStorage::Whole(buffer) => buffer.ptr(),
            PageStorage::Mapped(mapped) => mapped.base,
        }
    }
}

impl DevicePages {
    /// Takes memory back, but for the first bytes.
    fn shrink_to(&self, bytes: u64) {
        // Where the context is lost, what was launched may run on: memory is left to the driver then, which
        // frees it with the context.
        if let PageStorage::Mapped(mapped) = &self.storage
            && self.stream.synchronize().is_ok()
        {
            mapped.shrink_to(bytes);
        }
    }

    /// Makes the others do the same, on rank 0.
    fn notify_ranks(&self, kind: RankMessageKind, bytes: Range<u64>) {
        if let Some(lead) = &self.parts.leader {
            lead.send_message(|message| {
                message.start_message(kind).push_number(bytes.start).push_number(bytes.end)
            });
        }
    }
}

impl PageMemory for DevicePages {
    fn granularity(&self) -> u64 {
        match &self.storage {
            PageStorage::Whole(_) => 1,
            PageStorage::Mapped(mapped) => mapped.granule * self.parts.ranks,
        }
    }

    fn commit(&self, bytes: Range<u64>) -> Result<()> {
        let PageStorage::Mapped(mapped) = &self.storage else { return Ok(()) };
        mapped.commit(bytes.end.div_ceil(self.parts.ranks))?;
        self.notify_ranks(RankMessageKind::CommitPages, bytes);
        Ok(())
    }

    fn decommit(&self, bytes: Range<u64>) {
        self.shrink_to(bytes.start.div_ceil(self.parts.ranks));
        self.notify_ranks(RankMessageKind::DecommitPages, bytes);
    }

    fn read(&self, from: u64, to: &mut [u8]) -> Result<()> {
        if let Some((lead, rank)) = self.parts.remote_rank(from) {
            let len = to.len() as u64;
            lead.request_bytes(rank, to, |message| {
                message
                    .start_message(RankMessageKind::ReadPages)
                    .push_number(rank as u64)
                    .push_number(from)
                    .push_number(len)
            });
            return Ok(());
        }
        self.stream.receive(self.base() + self.parts.local_offset(from), to)
    }

    fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        if let Some((lead, rank)) = self.parts.remote_rank(to) {
            lead.send_message(|message| {
                message
                    .start_message(RankMessageKind::WritePages)
                    .push_number(rank as u64)
                    .push_number(to)
                    .push_bytes(from)
            });
            return Ok(());
        }
        self.stream.send(self.base() + self.parts.local_offset(to), from)
    }

    fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<()> {
        if let Some((lead, rank)) = self.parts.remote_rank(from) {
            let rank = rank as u64;
            lead.send_message(|message| {
                message
                    .start_message(RankMessageKind::CopyPages)
                    .push_number(rank)
                    .push_number(from)
                    .push_number(to)
                    .push_number(bytes)
            });
            return Ok(());
        }
        let [from, to] = [from, to].map(|at| self.base() + self.parts.local_offset(at));
        self.stream.copy(to, from, bytes)
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl Drop for DevicePages {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

impl AddressReservation {
    /// Bytes that are mapped together; `None` where driver or device cannot map memory.
    fn granule(context: &CudaContext) -> Result<Option<u64>> {
        let driver = context.make_current()?;
        let Some(v) = driver.virtual_memory.as_ref().filter(|_| context.has_virtual_memory()) else {
            return Ok(None);
        };
        let mut granule = 0;
        let location = driver::DeviceMemory::for_device(context.device());
        // SAFETY: places for the results; the properties are those of plain device memory.
        let status = unsafe { (v.granularity)(&mut granule, &location, driver::GRANULARITY_RECOMMENDED) };
        driver.check("cuMemGetAllocationGranularity", status)?;
        Ok(Some(granule as u64).filter(|&granule| granule > 0))
    }

    /// `None` where there are not as many addresses.
    fn reserve(context: &Arc<CudaContext>, bytes: u64, granule: u64) -> Result<Option<Self>> {
        let driver = context.make_current()?;
        let bytes = bytes.div_ceil(granule).saturating_mul(granule);
        let (Some(v), Ok(size)) = (&driver.virtual_memory, usize::try_from(bytes)) else { return Ok(None) };
        let mut base = 0;
        // SAFETY: a place for the result; no wish for an address.
        let status = unsafe { (v.reserve)(&mut base, size, 0, 0, 0) };
        match driver.check_memory("cuMemAddressReserve", status, WHAT, bytes) {
            Ok(()) => {
                let (context, mapped) = (Arc::clone(context), AtomicU64::new(0));
                Ok(Some(Self { context, base, bytes, granule, mapped }))
            }
            Err(Error::OutOfMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn functions(&self) -> Result<&VirtualMemory> {
        // Present: without them nothing would have been reserved.
        let missing = || Error::Driver { call: "cuMemMap", what: "it is gone".into() };
        self.context.make_current()?.virtual_memory.as_ref().ok_or_else(missing)
    }

    /// Sees to it that the first `bytes` bytes have memory. What could be got before there was no more goes
    /// back.
    fn commit(&self, bytes: u64) -> Result<()> {
        let before = self.mapped.load(Ordering::Relaxed);
        for at in (before..bytes).step_by(self.granule as usize) {
            if let Err(error) = self.map(at, bytes) {
                self.shrink_to(before);
                return Err(error);
            }
            self.mapped.store(at + self.granule, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Maps a granule. `whole`: bytes of all then, for the message.
    fn map(&self, at: u64, whole: u64) -> Result<()> {
        let driver = self.context.make_current()?;
        let v = self.functions()?;
        let (at, size) = (self.base + at, self.granule as usize);
        let location = driver::DeviceMemory::for_device(self.context.device());
        let mut handle = 0;
        // SAFETY: a place for the result; the size is a granule.
        let status = unsafe { (v.create)(&mut handle, size, &location, 0) };
        driver.check_memory("cuMemCreate", status, WHAT, whole)?;
        // SAFETY: the addresses are reserved and not mapped. The mapping keeps the memory alive, so the
        // handle can go.
        let (mapped, _) = unsafe { ((v.map)(at, size, 0, handle, 0), (v.release)(handle)) };
        driver.check("cuMemMap", mapped)?;
        let access = driver::MemoryAccessDesc::read_write(self.context.device());
        // SAFETY: one description for the range mapped above.
        let status = unsafe { (v.set_access)(at, size, &access, 1) };
        driver.check("cuMemSetAccess", status).inspect_err(|_| {
            // SAFETY: mapped above and not in use.
            unsafe { (v.unmap)(at, size) };
        })
    }

    /// Takes memory back from the end on, as far as whole granules lie behind the first `bytes` bytes; these
    /// are not in use.
    fn shrink_to(&self, bytes: u64) {
        let Ok(unmap) = self.functions().map(|v| v.unmap) else { return };
        let (size, kept) = (self.granule, bytes.div_ceil(self.granule) * self.granule);
        let mut end = self.mapped.load(Ordering::Relaxed);
        // SAFETY: mapped by `map`; callers see to it that nothing runs on it.
        while end > kept && unsafe { unmap(self.base + end - size, size as usize) } == 0 {
            end -= size;
        }
        self.mapped.store(end, Ordering::Relaxed);
    }
}

impl Drop for AddressReservation {
    fn drop(&mut self) {
        // Else it is left to the driver.
        if self.mapped.load(Ordering::Relaxed) == 0
            && let Ok(v) = self.functions()
        {
            // SAFETY: reserved once with this size; nothing is mapped any more.
            unsafe { (v.unreserve)(self.base, self.bytes as usize) };
        }
    }
}
