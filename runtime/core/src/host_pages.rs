//! Pages of caches in the memory of the host.

use std::ops::Range;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use crate::page_pool::{PageCounts, PageMemory, PagePool};
use crate::processes::{RankLeader, RankMessageKind};
use crate::{Result, pages};

const WHAT: &str = "pages of the KV cache";
/// Huge pages of the system: memory comes in such steps, where it may.
const HUGE: u64 = 2 << 20;
/// Steps elsewhere, and the largest small pages of the machines that we run on.
const SMALL: u64 = 64 << 10;

/// Addresses that the system gives memory to as they are written.
pub(crate) struct HostPages {
    map: MmapRaw,
    /// The start of page 0 in the map, at a multiple of [`HUGE`] in memory.
    first_page: usize,
    /// The end of the last page, from there on.
    bytes: usize,
    huge: bool,
    parts: Option<HostPageParts>,
}

/// The parts of pages where each page has one of every rank, and each rank is a process: others use their
/// parts of the same pages in their own memory. So memory here comes as its part is written, in small pages,
/// and the parts of others never take any.
pub(crate) struct HostPageParts {
    /// Bytes of a page, and of a part.
    pub page: u64,
    pub part: u64,
    /// The leader, on rank 0, whose sequences they are.
    pub leader: Option<Arc<RankLeader>>,
}

impl HostPageParts {
    /// The other rank to which a place belongs, on rank 0.
    fn remote_rank(&self, at: u64) -> Option<(&RankLeader, usize)> {
        let rank = (at % self.page / self.part) as usize;
        Some((self.leader.as_deref()?, rank)).filter(|_| rank > 0)
    }
}

impl HostPages {
    /// A pool of pages, of fewer than requested where the system refuses as many. `huge`: memory comes in
    /// huge pages.
    pub fn pool(
        page_bytes: u64,
        counts: PageCounts,
        huge: bool,
        parts: Option<HostPageParts>,
    ) -> Result<PagePool<HostPages>> {
        let reserve = |bytes: u64| {
            let len = bytes.checked_add(HUGE).and_then(|bytes| usize::try_from(bytes).ok());
            Ok(len.and_then(|len| MmapOptions::new().len(len).no_reserve_swap().map_anon().ok()))
        };
        let (map, pages) = counts.reserve(page_bytes, WHAT, reserve)?;
        let map = MmapRaw::from(map);
        let address = map.as_ptr() as u64;
        let begin = (address.next_multiple_of(HUGE) - address) as usize;
        let bytes = page_bytes as usize * pages;
        let huge = huge && parts.is_none() && pages::prefer_huge(&map, begin..begin + bytes);
        if parts.is_some() {
            pages::refuse_huge(&map, begin..begin + bytes);
        }
        Ok(PagePool::new(HostPages { map, first_page: begin, bytes, huge, parts }, page_bytes, pages))
    }

    /// Page 0; the others follow. What lies there belongs to the sequences that have the pages.
    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.first_page)
    }

    fn remote_rank(&self, at: u64) -> Option<(&RankLeader, usize)> {
        self.parts.as_ref()?.remote_rank(at)
    }

    /// True if all of these bytes are there.
    pub fn contains_range(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.bytes as u64)
    }

    fn map_range(&self, bytes: Range<u64>) -> Range<usize> {
        self.first_page + bytes.start as usize..self.first_page + bytes.end as usize
    }

    /// The address of `len` bytes from `offset` on.
    fn page_address(&self, offset: u64, len: usize) -> *mut u8 {
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(len));
        assert!(end.is_some_and(|end| end <= self.bytes), "bytes of pages");
        self.base().wrapping_add(offset as usize)
    }
}

impl PageMemory for HostPages {
    fn granularity(&self) -> u64 {
        if self.huge { HUGE } else { SMALL }
    }

    fn commit(&self, bytes: Range<u64>) -> Result<()> {
        if self.parts.is_some() {
            return Ok(());
        }
        pages::populate(&self.map, self.map_range(bytes))
    }

    fn decommit(&self, bytes: Range<u64>) {
        if let Some(lead) = self.parts.as_ref().and_then(|parts| parts.leader.as_ref()) {
            lead.send_message(|message| {
                message
                    .start_message(RankMessageKind::DecommitPages)
                    .push_number(bytes.start)
                    .push_number(bytes.end)
            });
        }
        let range = self.map_range(bytes);
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the map is private and anonymous, so its dropped pages become zero pages; by contract none
        // of their pages is in use. An error only means that the memory stays.
        let _ = unsafe { self.map.unchecked_advise_range(advice, range.start, range.len()) };
    }

    fn read(&self, from: u64, to: &mut [u8]) -> Result<()> {
        if let Some((lead, rank)) = self.remote_rank(from) {
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
        // SAFETY: inside of the map by the assertion in `at`; initialised, since the system gives zeros.
        // There is no writer meanwhile, as the page is the caller's.
        unsafe {
            std::ptr::copy_nonoverlapping(self.page_address(from, to.len()), to.as_mut_ptr(), to.len())
        };
        Ok(())
    }

    fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        if let Some((lead, rank)) = self.remote_rank(to) {
            lead.send_message(|message| {
                message
                    .start_message(RankMessageKind::WritePages)
                    .push_number(rank as u64)
                    .push_number(to)
                    .push_bytes(from)
            });
            return Ok(());
        }
        // SAFETY: as above; the caller has the page alone.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), self.page_address(to, from.len()), from.len())
        };
        Ok(())
    }

    fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<()> {
        if let Some((lead, rank)) = self.remote_rank(from) {
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
        let bytes = bytes as usize;
        // SAFETY: as above.
        unsafe { std::ptr::copy(self.page_address(from, bytes), self.page_address(to, bytes), bytes) };
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn pool(page_bytes: u64, wanted: u64, least: u64) -> Result<PagePool<HostPages>> {
        HostPages::pool(page_bytes, PageCounts { desired_pages: wanted, min_pages: least }, true, None)
    }

    fn read(pool: &PagePool<HostPages>, page: i32, part: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; part.len()];
        pool.read(page, part, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn pages_are_taken_shared_and_reused() {
        let pool = pool(4096, 8, 1).unwrap();
        let mut pages = Vec::new();
        let free = || pool.pages().free;
        pool.allocate(3, &mut pages).unwrap();
        assert_eq!((&pages[..], free()), (&[0, 1, 2][..], 5));
        pool.write(1, 4000, &[7; 96]).unwrap();
        pool.copy((1, 4000), (2, 8), 96).unwrap();
        pool.add_refs(&[1]);
        assert!(pool.is_shared(1) && !pool.is_shared(0));
        pool.release(&pages);
        assert_eq!((free(), pool.is_shared(1)), (7, false));
        assert_eq!(read(&pool, 1, 4000..4096), [7; 96]);
        assert_eq!(read(&pool, 2, 6..10), [0, 0, 7, 7]);
        let refused = pool.allocate(8, &mut pages);
        assert!(matches!(refused, Err(Error::NoPages { wanted: 8, free: 7, pages: 8 })), "{refused:?}");
        assert_eq!((pages.len(), free()), (3, 7), "nothing has changed");
        pages.clear();
        pool.allocate(7, &mut pages).unwrap();
        pages.push(1);
        pages.sort_unstable();
        assert_eq!(pages, (0..8).collect::<Vec<_>>(), "each once");
        pool.release(&pages);
        assert_eq!(free(), 8);
    }

    #[test]
    fn memory_goes_back_when_nobody_has_a_page() {
        let pool = pool(1 << 20, 200, 1).unwrap();
        let mut pages = Vec::new();
        pool.allocate(150, &mut pages).unwrap();
        pages.iter().for_each(|&page| pool.write(page, 5, &[9]).unwrap());
        pool.release(&pages[1..]);
        assert_eq!(read(&pool, 149, 5..6), [9], "one sequence is left");
        assert_eq!(pool.committed_bytes(), 150 << 20);
        pool.release(&pages[..1]);
        assert_eq!((pool.committed_bytes(), pool.pages().free), (64 << 20, 200));
        assert_eq!(read(&pool, 0, 5..6), [9]);
        assert!(read(&pool, 149, 5..6) == [0] || cfg!(not(target_os = "linux")));
        pages.clear();
        pool.allocate(65, &mut pages).unwrap();
        pages.sort_unstable();
        assert_eq!(pages, (0..65).collect::<Vec<_>>(), "those with memory first");
    }

    /// A step of four sequences at a time.
    #[test]
    fn memory_comes_ahead_of_pages_little_by_little() {
        let pool = pool(1 << 20, 20, 1).unwrap();
        let (mut pages, step) = (Vec::new(), pool.memory().granularity());
        pool.allocate(4, &mut pages).unwrap();
        assert_eq!((pool.committed_bytes(), pool.pages().ready), (4 << 20, 0));
        let mut before = pool.committed_bytes();
        for _ in 0..64 {
            pool.commit_ahead(4, 4);
            assert!(
                (before..=before + (128 << 10) + step).contains(&pool.committed_bytes()),
                "more than twice four rows have"
            );
            before = pool.committed_bytes();
        }
        assert_eq!((pool.committed_bytes(), pool.pages().ready), (8 << 20, 4), "a page for each and no more");
        pool.allocate(4, &mut pages).unwrap();
        assert_eq!((pool.committed_bytes(), pool.pages().ready), (8 << 20, 0), "they have their memory");
        // Pages that others have left are as good.
        pool.release(&pages[5..8]);
        (0..64).for_each(|_| pool.commit_ahead(4, 3));
        assert_eq!((pool.committed_bytes(), pool.pages().ready), (8 << 20, 3));
        (0..64).for_each(|_| pool.commit_ahead(4, 4));
        assert_eq!(pool.pages().ready, 3 + (step.max(1 << 20) >> 20) as usize);
        // None has more than there is.
        (0..640).for_each(|_| pool.commit_ahead(64, 100));
        assert_eq!((pool.committed_bytes(), pool.pages().ready), (20 << 20, 15));
        pool.commit_ahead(64, 100);
        pages.truncate(5);
        pool.release(&pages);
        assert_eq!(pool.pages(), crate::CachePages { all: 20, free: 20, ready: 20 });
    }

    #[test]
    fn absurd_sizes_are_refused_or_cut() {
        assert!(matches!(pool(1 << 60, 1 << 20, 1 << 10), Err(Error::OutOfMemory { .. })));
        let cut = pool(1 << 30, 1 << 24, 1).unwrap();
        assert!((1..=1 << 24).contains(&cut.pages().all));
    }
}
