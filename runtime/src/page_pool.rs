//! Pages of the caches of all sequences of a model, in one range of addresses that is reserved once.
//!
//! Pages get memory in the order of their numbers, a little ahead of need, and keep it for the next sequence: nobody reads a row
//! before it was written there. A page counts the sequences that have it. Who has one alone may write to it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{MmapOptions, MmapRaw};

use crate::{Error, Result, pages};

const WHAT: &str = "pages of the KV cache";
/// Huge pages of the system: memory comes in such steps, where it may.
const HUGE: u64 = 2 << 20;
/// Steps elsewhere, and the largest small pages of the machines that we run on.
const SMALL: u64 = 64 << 10;
/// Memory that stays when no sequence has any page.
const KEPT: u64 = 64 << 20;

/// Every page of a model.
pub(crate) struct PagePool {
    map: MmapRaw,
    /// Where page 0 begins in the map, at a multiple of [`HUGE`] in memory.
    begin: usize,
    page_bytes: usize,
    /// Most pages.
    most: usize,
    huge: bool,
    counts: Mutex<Counts>,
}

struct Counts {
    /// By page that was ever taken: sequences that have it.
    of: Vec<u32>,
    /// Pages that nobody has, the last one to be taken first.
    free: Vec<i32>,
    /// Bytes from page 0 on that have memory.
    given: u64,
}

impl PagePool {
    /// Addresses of `pages` pages, or of fewer where the system refuses so many, but at least `least`. `huge`: memory comes in huge
    /// pages.
    pub fn new(page_bytes: u64, pages: u64, least: u64, huge: bool) -> Result<Self> {
        let most_numbers = i32::MAX as u64;
        let (mut wanted, least) = (pages.clamp(1, most_numbers), least.clamp(1, most_numbers));
        let reserve = |pages: u64| {
            let bytes = pages.checked_mul(page_bytes)?.checked_add(HUGE)?;
            let len = usize::try_from(bytes).ok()?;
            MmapOptions::new().len(len).no_reserve_swap().map_anon().ok()
        };
        let map = loop {
            match reserve(wanted) {
                Some(map) => break MmapRaw::from(map),
                None if wanted > least => wanted = (wanted / 2).max(least),
                None => {
                    return Err(Error::OutOfMemory { what: WHAT, bytes: wanted.saturating_mul(page_bytes) });
                }
            }
        };
        let address = map.as_ptr() as u64;
        let begin = (address.next_multiple_of(HUGE) - address) as usize;
        let (page_bytes, most) = (page_bytes as usize, wanted as usize);
        let huge = huge && pages::prefer_huge(&map, begin..begin + page_bytes * most);
        let counts = Mutex::new(Counts { of: Vec::new(), free: Vec::new(), given: 0 });
        Ok(Self { map, begin, page_bytes, most, huge, counts })
    }

    /// Most pages.
    pub fn most(&self) -> usize {
        self.most
    }

    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Page 0; the others follow. What lies there belongs to the sequences that have the pages.
    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.begin)
    }

    /// Pages that no sequence has.
    pub fn free(&self) -> usize {
        let counts = self.counts();
        counts.free.len() + (self.most - counts.of.len())
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
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
        self.give_memory(&mut counts, fresh.end)?;
        let left = counts.free.len() - used;
        let reused = counts.free.split_off(left);
        reused.iter().for_each(|&page| counts.of[page as usize] = 1);
        to.extend(reused.into_iter().rev());
        counts.of.resize(fresh.end, 1);
        to.extend(fresh.map(|page| page as i32));
        Ok(())
    }

    /// Sees to it that the first `pages` pages have memory.
    fn give_memory(&self, counts: &mut Counts, pages: usize) -> Result<()> {
        let end = (pages * self.page_bytes) as u64;
        if end <= counts.given {
            return Ok(());
        }
        let step = if self.huge { HUGE } else { SMALL };
        let end = end.next_multiple_of(step).min((self.page_bytes * self.most) as u64);
        pages::populate(&self.map, self.range(counts.given..end))?;
        counts.given = end;
        Ok(())
    }

    fn range(&self, bytes: Range<u64>) -> Range<usize> {
        self.begin + bytes.start as usize..self.begin + bytes.end as usize
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
    fn forget(&self, counts: &mut Counts) {
        let kept = KEPT as usize / self.page_bytes;
        counts.of.truncate(kept);
        counts.free.clear();
        counts.free.extend((0..counts.of.len() as i32).rev());
        let range = self.range(KEPT..counts.given);
        counts.given = KEPT;
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the map is private and anonymous, so its dropped pages become zero pages; nobody has a page of them, and
        // nobody gets one while the counts are locked. An error only means that the memory stays.
        let _ = unsafe { self.map.unchecked_advise_range(advice, range.start, range.len()) };
    }

    /// Where a part of a page begins.
    fn at(&self, page: i32, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.page_bytes && (page as usize) < self.most);
        self.base().wrapping_add(page as usize * self.page_bytes + offset)
    }

    /// Bytes of a page. Nobody may write to them meanwhile: pages of several sequences are not written to, and those of one are
    /// read by who may write to them.
    pub fn read(&self, page: i32, part: Range<usize>) -> &[u8] {
        assert!(part.start <= part.end && part.end <= self.page_bytes, "a part of a page");
        // SAFETY: inside of the map by the assertion and since pages are numbers below `most`; initialised, since the system gives
        // zeros; callers hold the page, see above.
        unsafe { std::slice::from_raw_parts(self.at(page, part.start), part.len()) }
    }

    /// Writes to a page that the caller has alone.
    pub fn write(&self, page: i32, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.page_bytes, "a part of a page");
        // SAFETY: inside of the map as above. `bytes` may be of another page, or of another part of this one, hence `copy`.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.at(page, offset), bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_shared_and_reused() {
        let pool = PagePool::new(4096, 8, 1, false).unwrap();
        let mut pages = Vec::new();
        pool.take(3, &mut pages).unwrap();
        assert_eq!((&pages[..], pool.free()), (&[0, 1, 2][..], 5));
        pool.write(1, 4000, &[7; 96]);
        pool.share(&[1]);
        assert!(pool.is_shared(1) && !pool.is_shared(0));
        pool.give_back(&pages);
        assert_eq!((pool.free(), pool.is_shared(1)), (7, false));
        assert_eq!(pool.read(1, 4000..4096), [7; 96]);
        let refused = pool.take(8, &mut pages);
        assert!(matches!(refused, Err(Error::NoPages { wanted: 8, free: 7, pages: 8 })), "{refused:?}");
        assert_eq!((pages.len(), pool.free()), (3, 7), "nothing has changed");
        pages.clear();
        pool.take(7, &mut pages).unwrap();
        pages.push(1);
        pages.sort_unstable();
        assert_eq!(pages, (0..8).collect::<Vec<_>>(), "each once");
        pool.give_back(&pages);
        assert_eq!(pool.free(), 8);
    }

    #[test]
    fn memory_goes_back_when_nobody_has_a_page() {
        let pool = PagePool::new(1 << 20, 200, 1, true).unwrap();
        let mut pages = Vec::new();
        pool.take(150, &mut pages).unwrap();
        pages.iter().for_each(|&page| pool.write(page, 5, &[9]));
        pool.give_back(&pages[1..]);
        assert_eq!(pool.read(149, 5..6), [9], "one sequence is left");
        pool.give_back(&pages[..1]);
        let counts = pool.counts();
        assert_eq!((counts.given, counts.of.len(), counts.free.len()), (64 << 20, 64, 64));
        drop(counts);
        assert_eq!(pool.read(0, 5..6), [9]);
        assert!(pool.read(149, 5..6) == [0] || cfg!(not(target_os = "linux")));
        assert_eq!(pool.free(), 200);
    }

    #[test]
    fn absurd_sizes_are_refused_or_cut() {
        assert!(matches!(PagePool::new(1 << 60, 1 << 20, 1 << 10, false), Err(Error::OutOfMemory { .. })));
        let cut = PagePool::new(1 << 30, 1 << 24, 1, false).unwrap();
        assert!((1..=1 << 24).contains(&cut.most()));
    }
}
