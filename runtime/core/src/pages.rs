//! Advice to the system about pages of memory. Systems other than Linux get none, and nothing depends on it.

pub(crate) use system::{populate, prefer_huge, refuse_huge};

#[cfg(target_os = "linux")]
mod system {
    use memmap2::{Advice, Mmap, MmapMut, MmapRaw};
    use std::ops::Range;

    use crate::{Error, Result};

    /// A mapping that takes advice.
    pub trait AdvisableMapping {
        fn apply_advice(&self, advice: Advice, range: Range<usize>) -> std::io::Result<()>;
    }

    impl AdvisableMapping for Mmap {
        fn apply_advice(&self, advice: Advice, range: Range<usize>) -> std::io::Result<()> {
            self.advise_range(advice, range.start, range.len())
        }
    }

    impl AdvisableMapping for MmapMut {
        fn apply_advice(&self, advice: Advice, range: Range<usize>) -> std::io::Result<()> {
            self.advise_range(advice, range.start, range.len())
        }
    }

    impl AdvisableMapping for MmapRaw {
        fn apply_advice(&self, advice: Advice, range: Range<usize>) -> std::io::Result<()> {
            self.advise_range(advice, range.start, range.len())
        }
    }

    /// Asks for huge pages; false if the system knows of none.
    pub fn prefer_huge(map: &impl AdvisableMapping, range: Range<usize>) -> bool {
        map.apply_advice(Advice::HugePage, range).is_ok()
    }

    /// Asks for small pages, of memory that is used here and there.
    pub fn refuse_huge(map: &impl AdvisableMapping, range: Range<usize>) {
        let _ = map.apply_advice(Advice::NoHugePage, range);
    }

    /// Gives memory to pages of the caches before they are written.
    pub fn populate(map: &MmapRaw, range: Range<usize>) -> Result<()> {
        const ENOMEM: i32 = 12;
        let bytes = range.len() as u64;
        match map.apply_advice(Advice::PopulateWrite, range) {
            Err(e) if e.raw_os_error() == Some(ENOMEM) => {
                Err(Error::OutOfMemory { what: "pages of the KV cache", bytes })
            }
            // Linux before 5.14 does not know the advice: pages then come as they are written.
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use memmap2::MmapRaw;
    use std::ops::Range;

    use crate::Result;

    pub fn prefer_huge<M>(_: &M, _: Range<usize>) -> bool {
        false
    }

    pub fn refuse_huge<M>(_: &M, _: Range<usize>) {}

    pub fn populate(_: &MmapRaw, _: Range<usize>) -> Result<()> {
        Ok(())
    }
}
