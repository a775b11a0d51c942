//! Addresses of the device: allocations, reserved ranges, what is mapped where, and pinned memory of the
//! host.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{DriverResult, Status, fail};
use crate::memory::{MemoryChunk, MemoryRegion, MemoryView};
use crate::options::DeviceOptions;

/// The gap between allocations, so that an access beyond one hits no other.
const GAP: u64 = 4096;
const ALIGN: u64 = 512;
const FIRST: u64 = 0x7f00_0000_0000;

pub struct DeviceSpace {
    view: Arc<MemoryView>,
    /// By first address: bytes.
    reserved: BTreeMap<u64, u64>,
    /// Memory that was created to be mapped, by handle.
    created: BTreeMap<u64, Arc<MemoryChunk>>,
    pinned: BTreeMap<usize, Box<[u8]>>,
    next: u64,
    next_handle: u64,
    used: u64,
    total: u64,
    /// Parts of `used`: memory that was created to be mapped, and most of it.
    mapped: u64,
    most_mapped: u64,
    granule: u64,
    checks: bool,
}

impl DeviceSpace {
    pub fn new(options: &DeviceOptions) -> Self {
        Self {
            view: Arc::default(),
            reserved: BTreeMap::new(),
            created: BTreeMap::new(),
            pinned: BTreeMap::new(),
            next: FIRST,
            next_handle: 1,
            used: 0,
            total: options.memory,
            mapped: 0,
            most_mapped: options.mapped,
            granule: options.granule,
            checks: options.checks,
        }
    }

    /// The memory as it is now.
    pub fn view(&self) -> Arc<MemoryView> {
        Arc::clone(&self.view)
    }

    pub fn free_bytes(&self) -> u64 {
        self.total - self.used
    }

    fn take(&mut self, bytes: u64) -> DriverResult<Arc<MemoryChunk>> {
        if bytes > self.free_bytes() {
            let what = format!("{bytes} bytes, {} of {} are free", self.free_bytes(), self.total);
            return fail(Status::OutOfMemory, what);
        }
        self.used += bytes;
        Ok(Arc::new(MemoryChunk::new(bytes, self.checks)))
    }

    fn addresses(&mut self, bytes: u64, align: u64) -> u64 {
        let base = self.next.next_multiple_of(align);
        self.next = base + bytes + GAP;
        base
    }

    fn insert(&mut self, region: MemoryRegion) {
        let view = Arc::make_mut(&mut self.view);
        let index = view.regions.partition_point(|r| r.base < region.base);
        view.regions.insert(index, region);
    }

    fn position(&self, base: u64) -> Option<usize> {
        self.view.regions.binary_search_by_key(&base, |r| r.base).ok()
    }

    pub fn allocate(&mut self, bytes: u64) -> DriverResult<u64> {
        if bytes == 0 {
            return fail(Status::InvalidValue, "an allocation of no bytes");
        }
        let chunk = self.take(bytes)?;
        let base = self.addresses(bytes, ALIGN);
        self.insert(MemoryRegion { base, chunk, accessible: true });
        Ok(base)
    }

    pub fn free(&mut self, base: u64) -> DriverResult<()> {
        let reserved = self.reserved.range(..=base).next_back().is_some_and(|(at, n)| base - at < *n);
        let Some(index) = self.position(base).filter(|_| !reserved) else {
            return fail(Status::InvalidValue, format!("{base:#x} is no allocation"));
        };
        let region = Arc::make_mut(&mut self.view).regions.remove(index);
        self.used -= region.chunk.bytes;
        Ok(())
    }

    pub fn granule(&self) -> u64 {
        self.granule
    }

    fn whole_granules(&self, bytes: u64) -> DriverResult<()> {
        match bytes > 0 && bytes.is_multiple_of(self.granule) {
            true => Ok(()),
            false => fail(Status::InvalidValue, format!("{bytes} bytes are no multiple of {}", self.granule)),
        }
    }

    pub fn reserve(&mut self, bytes: u64) -> DriverResult<u64> {
        self.whole_granules(bytes)?;
        let base = self.addresses(bytes, self.granule);
        self.reserved.insert(base, bytes);
        Ok(base)
    }

    pub fn unreserve(&mut self, base: u64, bytes: u64) -> DriverResult<()> {
        if self.reserved.get(&base) != Some(&bytes) {
            return fail(Status::InvalidValue, format!("{bytes} bytes at {base:#x} are not reserved so"));
        }
        if self.view.regions.iter().any(|r| (base..base + bytes).contains(&r.base)) {
            return fail(Status::InvalidValue, format!("memory is mapped at {base:#x} still"));
        }
        self.reserved.remove(&base);
        Ok(())
    }

    pub fn create(&mut self, bytes: u64) -> DriverResult<u64> {
        self.whole_granules(bytes)?;
        if self.mapped + bytes > self.most_mapped {
            let what = format!("{bytes} bytes beside {} of {} to be mapped", self.mapped, self.most_mapped);
            return fail(Status::OutOfMemory, what);
        }
        let chunk = self.take(bytes)?;
        self.mapped += bytes;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.created.insert(handle, chunk);
        Ok(handle)
    }

    /// The memory goes with its last mapping.
    pub fn release(&mut self, handle: u64) -> DriverResult<()> {
        let Some(chunk) = self.created.remove(&handle) else {
            return fail(Status::InvalidValue, "no such memory");
        };
        if !self.view.regions.iter().any(|r| Arc::ptr_eq(&r.chunk, &chunk)) {
            self.used -= chunk.bytes;
            self.mapped -= chunk.bytes;
        }
        Ok(())
    }

    pub fn map(&mut self, base: u64, bytes: u64, handle: u64) -> DriverResult<()> {
        let Some(chunk) = self.created.get(&handle).map(Arc::clone) else {
            return fail(Status::InvalidValue, "no such memory");
        };
        if chunk.bytes != bytes {
            return fail(
                Status::InvalidValue,
                format!("{bytes} bytes of memory of {} are mapped", chunk.bytes),
            );
        }
        let range = self.reserved.range(..=base).next_back();
        if !range.is_some_and(|(at, n)| base + bytes <= at + n && (base - at).is_multiple_of(self.granule)) {
            return fail(Status::InvalidValue, format!("{base:#x} is not reserved"));
        }
        let overlaps = |r: &MemoryRegion| r.base < base + bytes && base < r.base + r.chunk.bytes;
        if self.view.regions.iter().any(overlaps) {
            return fail(Status::InvalidValue, format!("memory is mapped at {base:#x} already"));
        }
        self.insert(MemoryRegion { base, chunk, accessible: false });
        Ok(())
    }

    pub fn unmap(&mut self, base: u64, bytes: u64) -> DriverResult<()> {
        let fits = |index: &usize| self.view.regions[*index].chunk.bytes == bytes;
        let Some(index) = self.position(base).filter(fits) else {
            return fail(Status::InvalidValue, format!("{bytes} bytes at {base:#x} are not mapped so"));
        };
        let region = Arc::make_mut(&mut self.view).regions.remove(index);
        if !self.created.values().any(|chunk| Arc::ptr_eq(chunk, &region.chunk)) {
            self.used -= region.chunk.bytes;
            self.mapped -= region.chunk.bytes;
        }
        Ok(())
    }

    pub fn set_access(&mut self, base: u64, bytes: u64, accessible: bool) -> DriverResult<()> {
        let Some(index) = self.position(base).filter(|i| self.view.regions[*i].chunk.bytes == bytes) else {
            return fail(Status::InvalidValue, format!("{bytes} bytes at {base:#x} are not mapped so"));
        };
        Arc::make_mut(&mut self.view).regions[index].accessible = accessible;
        Ok(())
    }

    /// Numbers of launches begin anew.
    pub fn forget_launches(&self) {
        self.view.regions.iter().for_each(|r| r.chunk.forget_launches());
    }

    /// Pinned memory: where it begins.
    pub fn pin(&mut self, bytes: usize) -> *mut u8 {
        let mut memory = vec![0; bytes.max(1)].into_boxed_slice();
        let at = memory.as_mut_ptr();
        self.pinned.insert(at as usize, memory);
        at
    }

    pub fn unpin(&mut self, at: usize) -> DriverResult<()> {
        match self.pinned.remove(&at) {
            Some(_) => Ok(()),
            None => fail(Status::InvalidValue, "no pinned memory"),
        }
    }

    pub fn is_pinned(&self, at: usize, bytes: usize) -> bool {
        let before = self.pinned.range(..=at).next_back();
        before.is_some_and(|(begin, memory)| at - begin + bytes <= memory.len())
    }

    pub fn write(&self, at: u64, data: &[u8]) -> DriverResult<()> {
        let mut rest = data;
        for (region, offset, n) in self.pieces(at, data.len() as u64)? {
            let (now, later) = rest.split_at(n as usize);
            region.chunk.write(offset, now);
            rest = later;
        }
        Ok(())
    }

    pub fn read(&self, at: u64, to: &mut [u8]) -> DriverResult<()> {
        let mut done = 0;
        for (region, offset, n) in self.pieces(at, to.len() as u64)? {
            region.chunk.read(offset, &mut to[done..done + n as usize]);
            done += n as usize;
        }
        Ok(())
    }

    /// Copies between two ranges; what was never written stays so.
    pub fn copy(&self, to: u64, from: u64, bytes: u64) -> DriverResult<()> {
        if to < from + bytes && from < to + bytes {
            return fail(Status::InvalidValue, "the ranges of a copy overlap");
        }
        let mut done = 0;
        while done < bytes {
            let source = &self.pieces(from + done, bytes - done)?[0];
            let target = &self.pieces(to + done, bytes - done)?[0];
            let n = source.2.min(target.2);
            if (source.1 | target.1 | n).is_multiple_of(4) {
                target.0.chunk.copy_words(target.1, &source.0.chunk, source.1, n);
            } else {
                let mut data = vec![0; n as usize];
                source.0.chunk.read(source.1, &mut data);
                target.0.chunk.write(target.1, &data);
            }
            done += n;
        }
        Ok(())
    }

    fn pieces(&self, at: u64, bytes: u64) -> DriverResult<Vec<(&MemoryRegion, u64, u64)>> {
        match self.view.pieces(at, bytes) {
            Some(pieces) => Ok(pieces),
            None => {
                fail(Status::InvalidValue, format!("{bytes} bytes at {at:#x}: {}", self.view.describe(at)))
            }
        }
    }
}
