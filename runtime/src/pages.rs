//! Advice to the system about pages of memory. Systems other than Linux are told nothing, and nothing depends on it.

pub(crate) use system::{collapse, populate, prefer_huge};

#[cfg(target_os = "linux")]
mod system {
    use memmap2::{Advice, Mmap, MmapMut};
    use std::ops::Range;

    use crate::{Error, Result};

    /// A mapping that takes advice.
    pub trait Map {
        fn tell(&self, advice: Advice, range: Range<usize>) -> std::io::Result<()>;
    }

    impl Map for Mmap {
        fn tell(&self, advice: Advice, range: Range<usize>) -> std::io::Result<()> {
            self.advise_range(advice, range.start, range.len())
        }
    }

    impl Map for MmapMut {
        fn tell(&self, advice: Advice, range: Range<usize>) -> std::io::Result<()> {
            self.advise_range(advice, range.start, range.len())
        }
    }

    /// Asks for huge pages; false if the system knows of none.
    pub fn prefer_huge(map: &impl Map, range: Range<usize>) -> bool {
        map.tell(Advice::HugePage, range).is_ok()
    }

    /// Gives memory to pages of the caches before they are written.
    pub fn populate(map: &MmapMut, range: Range<usize>) -> Result<()> {
        const ENOMEM: i32 = 12;
        let bytes = range.len() as u64;
        match map.tell(Advice::PopulateWrite, range) {
            Err(e) if e.raw_os_error() == Some(ENOMEM) => {
                Err(Error::OutOfMemory { what: "rows of the KV cache", bytes })
            }
            // Linux before 5.14 does not know the advice: pages then come as they are written.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Joins the pages of one block into a huge one; what is in them stays.
    pub fn collapse(map: &MmapMut, range: Range<usize>) {
        crate::huge_pages::linux::collapse(map.as_ptr().wrapping_add(range.start), range.len());
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use memmap2::MmapMut;
    use std::ops::Range;

    use crate::Result;

    pub fn prefer_huge<M>(_: &M, _: Range<usize>) -> bool {
        false
    }

    pub fn populate(_: &MmapMut, _: Range<usize>) -> Result<()> {
        Ok(())
    }

    pub fn collapse(_: &MmapMut, _: Range<usize>) {}
}
