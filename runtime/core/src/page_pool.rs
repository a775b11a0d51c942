//! Pages of the caches of all sequences of a model, in one range of addresses that is reserved once.
//!
//! Pages get memory in the order of their numbers, a little ahead of need, and keep it for the next sequence:
//! no row is read before it was written there. A page counts the sequences that have it. The only one may
//! write to it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mlcc_abi::PAGE_ROWS;

use crate::table::ModelPlan;
use crate::{CachePages, Error, Result};

/// Full contexts that the pages of a model are enough for, if nothing else is asked for, and full batches
/// likewise.
const FULL_CONTEXTS: u64 = 64;
const FULL_BATCHES: u64 = 4;
/// Memory that stays when no sequence has a page.
const KEPT: u64 = 64 << 20;

/// Reserved addresses, which get memory from the first one on.
pub(crate) trait PageMemory {
    /// The step in bytes in which memory comes, of which [`KEPT`] is a multiple.
    fn granularity(&self) -> u64;

    /// Gives memory to a range behind all that have some. If there is none, nothing has changed.
    fn commit(&self, bytes: Range<u64>) -> Result<()>;

    /// The last range with memory may lose it: no page there is in use.
    fn decommit(&self, bytes: Range<u64>);

    /// Reads from a place within memory that was given.
    fn read(&self, from: u64, to: &mut [u8]) -> Result<()>;

    fn write(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Both may be parts of one page, but have no byte in common.
    fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<()>;

    /// Until what was written and copied is there.
    fn synchronize(&self) -> Result<()>;
}

/// The number of pages that a model should have addresses for, and the number that it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageCounts {
    pub desired_pages: u64,
    pub min_pages: u64,
}

impl PageCounts {
    /// The counts of a model; `None` if it has no caches. `asked`: as [`crate::LoadOptions::cache_pages`].
    pub fn from_plan(plan: &ModelPlan, asked: Option<u64>) -> Option<Self> {
        let one = plan.pages();
        let contexts = FULL_CONTEXTS.max(plan.batch.saturating_mul(FULL_BATCHES));
        let most = i32::MAX as u64;
        let wanted = asked.unwrap_or(one.saturating_mul(contexts)).max(one).min(most);
        (one > 0).then_some(Self { desired_pages: wanted, min_pages: one.min(most) })
    }

    /// Addresses for as many pages as `reserve` has: it is given bytes, and has `None` where they are too
    /// many.
    pub fn reserve<T>(
        self,
        page_bytes: u64,
        what: &'static str,
        mut reserve: impl FnMut(u64) -> Result<Option<T>>,
    ) -> Result<(T, usize)> {
        let mut pages = self.desired_pages;
        loop {
            let bytes = pages.checked_mul(page_bytes);
            match bytes.map_or(Ok(None), &mut reserve)? {
                Some(made) => return Ok((made, pages as usize)),
                None if pages > self.min_pages => pages = (pages / 2).max(self.min_pages),
                None => return Err(Error::OutOfMemory { what, bytes: pages.saturating_mul(page_bytes) }),
            }
        }
    }
}

/// Every page of a model.
pub(crate) struct PagePool<M> {
    memory: M,
    page_bytes: usize,
    /// Most pages.
    max_pages: usize,
    counts: Mutex<PageRefCounts>,
}

struct PageRefCounts {
    /// The number of sequences that have a page, for each page that was ever taken.
    ref_counts: Vec<u32>,
    /// Free pages, the last one to be taken first.
    free: Vec<i32>,
    /// Bytes from page 0 on that have memory.
    committed: u64,
    /// Bytes that are to get it before they are needed, less than a step of the memory.
    commit_debt: u64,
}

impl<M: PageMemory> PagePool<M> {
    /// `memory` has addresses of `most` pages.
    pub fn new(memory: M, page_bytes: u64, max_pages: usize) -> Self {
        let counts = Mutex::new(PageRefCounts {
            ref_counts: Vec::new(),
            free: Vec::new(),
            committed: 0,
            commit_debt: 0,
        });
        Self { memory, page_bytes: page_bytes as usize, max_pages, counts }
    }

    pub fn memory(&self) -> &M {
        &self.memory
    }

    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// The number of all pages, and of those that no sequence has.
    pub fn pages(&self) -> CachePages {
        let counts = self.counts();
        let free = counts.free.len() + (self.max_pages - counts.ref_counts.len());
        CachePages { all: self.max_pages, free, ready: self.ready_pages(&counts) }
    }

    /// Bytes that have memory.
    #[cfg(test)]
    pub fn committed_bytes(&self) -> u64 {
        self.counts().committed
    }

    fn counts(&self) -> MutexGuard<'_, PageRefCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `n` free pages to `to`; all of them or none.
    pub fn allocate(&self, n: usize, to: &mut Vec<i32>) -> Result<()> {
        let mut counts = self.counts();
        let free = counts.free.len() + (self.max_pages - counts.ref_counts.len());
        if n > free {
            return Err(Error::NoPages { wanted: n, free, pages: self.max_pages });
        }
        let used = n.min(counts.free.len());
        let fresh = counts.ref_counts.len()..counts.ref_counts.len() + n - used;
        self.commit_up_to(&mut counts, (fresh.end * self.page_bytes) as u64)?;
        let left = counts.free.len() - used;
        let reused = counts.free.split_off(left);
        reused.iter().for_each(|&page| counts.ref_counts[page as usize] = 1);
        to.extend(reused.into_iter().rev());
        counts.ref_counts.resize(fresh.end, 1);
        to.extend(fresh.map(|page| page as i32));
        Ok(())
    }

    /// Gives memory to pages that will be taken next, twice as much as `rows` rows have, until there are
    /// `pages` of them. So every step pays for its own rows, and none for the pages that all its sequences
    /// begin at once. What cannot be had is left to whoever needs it.
    pub fn commit_ahead(&self, rows: u64, pages: usize) {
        let mut counts = self.counts();
        if self.ready_pages(&counts) >= pages {
            counts.commit_debt = 0;
            return;
        }
        counts.commit_debt += 2 * rows * self.page_bytes as u64 / PAGE_ROWS;
        let now = counts.commit_debt / self.memory.granularity() * self.memory.granularity();
        counts.commit_debt -= now;
        // Fewer than `pages` are free of those that were ever taken.
        let last =
            (counts.ref_counts.len() + pages - counts.free.len()).min(self.max_pages) * self.page_bytes;
        let end = (counts.committed + now).min(last as u64);
        let _ = self.commit_up_to(&mut counts, end);
    }

    /// Free pages with memory.
    fn ready_pages(&self, counts: &PageRefCounts) -> usize {
        let given = (counts.committed / self.page_bytes as u64) as usize;
        counts.free.len() + given.saturating_sub(counts.ref_counts.len())
    }

    /// Sees to it that the first `end` bytes have memory.
    fn commit_up_to(&self, counts: &mut PageRefCounts, end: u64) -> Result<()> {
        if end <= counts.committed {
            return Ok(());
        }
        let end =
            end.next_multiple_of(self.memory.granularity()).min((self.page_bytes * self.max_pages) as u64);
        self.memory.commit(counts.committed..end)?;
        counts.committed = end;
        Ok(())
    }

    /// One more sequence has each of these pages.
    pub fn add_refs(&self, pages: &[i32]) {
        let mut counts = self.counts();
        pages.iter().for_each(|&page| counts.ref_counts[page as usize] += 1);
    }

    /// True if several sequences have a page.
    pub fn is_shared(&self, page: i32) -> bool {
        self.counts().ref_counts[page as usize] > 1
    }

    /// A sequence has no longer these pages.
    pub fn release(&self, pages: &[i32]) {
        if pages.is_empty() {
            return;
        }
        let mut counts = self.counts();
        for &page in pages {
            let count = &mut counts.ref_counts[page as usize];
            *count -= 1;
            if *count == 0 {
                counts.free.push(page);
            }
        }
        if counts.free.len() == counts.ref_counts.len() && counts.committed > KEPT {
            self.release_memory(&mut counts);
        }
    }

    /// Gives memory back to the system, as no page is in use.
    fn release_memory(&self, counts: &mut PageRefCounts) {
        let kept = KEPT as usize / self.page_bytes;
        counts.ref_counts.truncate(kept);
        counts.free.clear();
        counts.free.extend((0..counts.ref_counts.len() as i32).rev());
        self.memory.decommit(KEPT..counts.committed);
        counts.committed = KEPT;
    }

    /// The start of a part of a page.
    fn part_offset(&self, page: i32, part: &Range<usize>) -> u64 {
        assert!(part.start <= part.end && part.end <= self.page_bytes, "a part of a page");
        assert!((page as usize) < self.max_pages, "a page");
        (page as usize * self.page_bytes + part.start) as u64
    }

    /// Bytes of a page. There must be no writer meanwhile: pages of several sequences are not written to, and
    /// pages of one are read by their writer.
    pub fn read(&self, page: i32, part: Range<usize>, to: &mut [u8]) -> Result<()> {
        assert_eq!(part.len(), to.len());
        self.memory.read(self.part_offset(page, &part), to)
    }

    /// Writes to a page that the caller has alone.
    pub fn write(&self, page: i32, offset: usize, bytes: &[u8]) -> Result<()> {
        self.memory.write(self.part_offset(page, &(offset..offset + bytes.len())), bytes)
    }

    /// Copies between pages, or parts of one that have no byte in common, the second of which the caller has
    /// alone.
    pub fn copy(&self, from: (i32, usize), to: (i32, usize), bytes: usize) -> Result<()> {
        let at = |(page, offset)| self.part_offset(page, &(offset..offset + bytes));
        self.memory.copy(at(from), at(to), bytes as u64)
    }
}
