//! Pages of the caches of all sequences of a model, in one range of addresses that is reserved once.
//!
//! Pages get memory in the order of their numbers, a little ahead of need, and keep it for the next sequence: nobody reads a row
//! before it was written there. A page counts the sequences that have it. Who has one alone may write to it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mlcc_abi::PAGE_ROWS;

use crate::table::ModelPlan;
use crate::{CachePages, Error, Result};

/// Full contexts that the pages of a model are enough for, if nothing else is asked for, and full batches likewise.
const FULL_CONTEXTS: u64 = 64;
const FULL_BATCHES: u64 = 4;
/// Memory that stays when no sequence has any page.
const KEPT: u64 = 64 << 20;

/// Reserved addresses, which get memory from the first one on.
pub(crate) trait PageMemory {
    /// Memory comes in steps of so many bytes, of which [`KEPT`] is a multiple.
    fn step(&self) -> u64;

    /// Gives memory to a range behind all that have some. If there is none, nothing has changed.
    fn give(&self, bytes: Range<u64>) -> Result<()>;

    /// The last range with memory may lose it: nobody has a page there.
    fn take_back(&self, bytes: Range<u64>);

    /// What follows are places within memory that was given.
    fn read(&self, from: u64, to: &mut [u8]) -> Result<()>;

    fn write(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Both may be parts of one page, but have no byte in common.
    fn copy(&self, from: u64, to: u64, bytes: u64) -> Result<()>;

    /// Until what was written and copied is there.
    fn settle(&self) -> Result<()>;
}

/// How many pages a model wants addresses for, and how many it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageCounts {
    pub wanted: u64,
    pub least: u64,
}

impl PageCounts {
    /// Of a model; `None` if it has no caches. `asked`: as [`crate::LoadOptions::cache_pages`].
    pub fn of(plan: &ModelPlan, asked: Option<u64>) -> Option<Self> {
        let one = plan.pages();
        let contexts = FULL_CONTEXTS.max(plan.batch.saturating_mul(FULL_BATCHES));
        let most = i32::MAX as u64;
        let wanted = asked.unwrap_or(one.saturating_mul(contexts)).max(one).min(most);
        (one > 0).then_some(Self { wanted, least: one.min(most) })
    }

    /// Addresses for as many pages as `reserve` has: it is given bytes, and has `None` where they are too many.
    pub fn reserve<T>(
        self,
        page_bytes: u64,
        what: &'static str,
        mut reserve: impl FnMut(u64) -> Result<Option<T>>,
    ) -> Result<(T, usize)> {
        let mut pages = self.wanted;
        loop {
            let bytes = pages.checked_mul(page_bytes);
            match bytes.map_or(Ok(None), &mut reserve)? {
                Some(made) => return Ok((made, pages as usize)),
                None if pages > self.least => pages = (pages / 2).max(self.least),
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
    most: usize,
    counts: Mutex<PageRefCounts>,
}

struct PageRefCounts {
    /// By page that was ever taken: sequences that have it.
    of: Vec<u32>,
    /// Pages that nobody has, the last one to be taken first.
    free: Vec<i32>,
    /// Bytes from page 0 on that have memory.
    given: u64,
    /// Bytes that are to get it before they are needed, less than a step of the memory.
    owed: u64,
}

impl<M: PageMemory> PagePool<M> {
    /// `memory` has addresses of `most` pages.
    pub fn new(memory: M, page_bytes: u64, most: usize) -> Self {
        let counts = Mutex::new(PageRefCounts { of: Vec::new(), free: Vec::new(), given: 0, owed: 0 });
        Self { memory, page_bytes: page_bytes as usize, most, counts }
    }

    pub fn memory(&self) -> &M {
        &self.memory
    }

    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// How many there are, and how many of them no sequence has.
    pub fn pages(&self) -> CachePages {
        let counts = self.counts();
        let free = counts.free.len() + (self.most - counts.of.len());
        CachePages { all: self.most, free, ready: self.ready(&counts) }
    }

    /// Bytes that have memory.
    #[cfg(test)]
    pub fn given(&self) -> u64 {
        self.counts().given
    }

    fn counts(&self) -> MutexGuard<'_, PageRefCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `n` pages that nobody has to `to`; all of them or none.
    pub fn take(&self, n: usize, to: &mut Vec<i32>) -> Result<()> {
        let mut counts = self.counts();
        let free = counts.free.len() + (self.most - counts.of.len());
        if n > free {
            return Err(Error::NoPages { wanted: n, free, pages: self.most });
        }
        let used = n.min(counts.free.len());
        let fresh = counts.of.len()..counts.of.len() + n - used;
        self.give_memory(&mut counts, (fresh.end * self.page_bytes) as u64)?;
        let left = counts.free.len() - used;
        let reused = counts.free.split_off(left);
        reused.iter().for_each(|&page| counts.of[page as usize] = 1);
        to.extend(reused.into_iter().rev());
        counts.of.resize(fresh.end, 1);
        to.extend(fresh.map(|page| page as i32));
        Ok(())
    }

    /// Gives memory to pages that will be taken next, twice as much as `rows` rows have, until there are `pages` of them. So every step
    /// pays for its own rows, and none for the pages that all its sequences begin at once. What cannot be had is left to whoever
    /// needs it.
    pub fn give_ahead(&self, rows: u64, pages: usize) {
        let mut counts = self.counts();
        if self.ready(&counts) >= pages {
            counts.owed = 0;
            return;
        }
        counts.owed += 2 * rows * self.page_bytes as u64 / PAGE_ROWS;
        let now = counts.owed / self.memory.step() * self.memory.step();
        counts.owed -= now;
        // Fewer than `pages` are free of those that were ever taken.
        let last = (counts.of.len() + pages - counts.free.len()).min(self.most) * self.page_bytes;
        let end = (counts.given + now).min(last as u64);
        let _ = self.give_memory(&mut counts, end);
    }

    /// Pages with memory that nobody has.
    fn ready(&self, counts: &PageRefCounts) -> usize {
        let given = (counts.given / self.page_bytes as u64) as usize;
        counts.free.len() + given.saturating_sub(counts.of.len())
    }

    /// Sees to it that the first `end` bytes have memory.
    fn give_memory(&self, counts: &mut PageRefCounts, end: u64) -> Result<()> {
        if end <= counts.given {
            return Ok(());
        }
        let end = end.next_multiple_of(self.memory.step()).min((self.page_bytes * self.most) as u64);
        self.memory.give(counts.given..end)?;
        counts.given = end;
        Ok(())
    }

    /// One more sequence has each of these pages.
    pub fn share(&self, pages: &[i32]) {
        let mut counts = self.counts();
        pages.iter().for_each(|&page| counts.of[page as usize] += 1);
    }

    /// Whether several sequences have a page.
    pub fn is_shared(&self, page: i32) -> bool {
        self.counts().of[page as usize] > 1
    }

    /// A sequence has no longer these pages.
    pub fn give_back(&self, pages: &[i32]) {
        if pages.is_empty() {
            return;
        }
        let mut counts = self.counts();
        for &page in pages {
            let count = &mut counts.of[page as usize];
            *count -= 1;
            if *count == 0 {
                counts.free.push(page);
            }
        }
        if counts.free.len() == counts.of.len() && counts.given > KEPT {
            self.forget(&mut counts);
        }
    }

    /// Gives memory back to the system, as nobody has any page.
    fn forget(&self, counts: &mut PageRefCounts) {
        let kept = KEPT as usize / self.page_bytes;
        counts.of.truncate(kept);
        counts.free.clear();
        counts.free.extend((0..counts.of.len() as i32).rev());
        self.memory.take_back(KEPT..counts.given);
        counts.given = KEPT;
    }

    /// Where a part of a page begins.
    fn at(&self, page: i32, part: &Range<usize>) -> u64 {
        assert!(part.start <= part.end && part.end <= self.page_bytes, "a part of a page");
        assert!((page as usize) < self.most, "a page");
        (page as usize * self.page_bytes + part.start) as u64
    }

    /// Bytes of a page. Nobody may write to them meanwhile: pages of several sequences are not written to, and those of one are
    /// read by who may write to them.
    pub fn read(&self, page: i32, part: Range<usize>, to: &mut [u8]) -> Result<()> {
        assert_eq!(part.len(), to.len());
        self.memory.read(self.at(page, &part), to)
    }

    /// Writes to a page that the caller has alone.
    pub fn write(&self, page: i32, offset: usize, bytes: &[u8]) -> Result<()> {
        self.memory.write(self.at(page, &(offset..offset + bytes.len())), bytes)
    }

    /// Copies between pages, or parts of one that have no byte in common, the second of which the caller has alone.
    pub fn copy(&self, from: (i32, usize), to: (i32, usize), bytes: usize) -> Result<()> {
        let at = |(page, offset)| self.at(page, &(offset..offset + bytes));
        self.memory.copy(at(from), at(to), bytes as u64)
    }
}
