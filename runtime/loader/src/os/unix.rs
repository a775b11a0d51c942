//! POSIX: `mmap`, `mprotect`, `munmap`.

use core::ops::Range;
use core::ptr::NonNull;
use std::io;

use super::PageProtection;

/// Fresh zeroed pages of this process, writable at first.
#[derive(Debug)]
pub(crate) struct PageRegion {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the pages belong to the value alone; shared access only reads.
unsafe impl Send for PageRegion {}
// SAFETY: as above.
unsafe impl Sync for PageRegion {}

impl PageRegion {
    pub fn page_bytes() -> usize {
        // SAFETY: a query without arguments of memory.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
    }

    /// Reserves `bytes`, which are not 0.
    pub fn reserve(bytes: usize) -> io::Result<Self> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
        // SAFETY: a new mapping at an address that the system chooses touches no memory of anybody.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start =
            NonNull::new(start.cast()).ok_or_else(|| io::Error::other("the system mapped address 0"))?;
        Ok(Self { start, bytes })
    }

    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// The pages, while all of them are writable: before the first [`PageRegion::protect`].
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the value owns the pages, which are mapped and initialised with zeros.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// The pages for reading.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the value owns the pages, which are mapped, initialised and always readable.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// Takes the right to write from some pages; `place` is whole pages of the region.
    pub fn protect(&mut self, place: Range<usize>, protection: PageProtection) -> io::Result<()> {
        let access = match protection {
            PageProtection::Read => libc::PROT_READ,
            PageProtection::ReadExecute => libc::PROT_READ | libc::PROT_EXEC,
        };
        let inside = place.start <= place.end && place.end <= self.bytes;
        if !inside {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: inside of the region, which the value owns.
        let status =
            unsafe { libc::mprotect(self.start.as_ptr().add(place.start).cast(), place.len(), access) };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for PageRegion {
    fn drop(&mut self) {
        // SAFETY: the value's own mapping. Callers of its code keep it alive.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
