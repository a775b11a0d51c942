//! The state block of one sequence in host memory. Address space is reserved for the whole plan; the rows of caches get
//! physical memory in steps as the sequence grows, and lose it when the sequence gets shorter.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions};

use crate::pool::Pool;
use crate::table::{State, live_bytes};
use crate::{Error, Result, pages};

const WHAT: &str = "the state";
/// Rows that get memory together, so that `decode` meets no page fault but at every such step.
const STEP_ROWS: u64 = 128;
/// Unused rows that keep their memory when a sequence gets shorter.
const KEPT_ROWS: u64 = 256;

/// A block of this size becomes one page once rows take half of it.
const HUGE: u64 = 2 << 20;

/// Rows that get memory when the first `rows` are needed.
pub(crate) fn step_rows(rows: u64) -> u64 {
    rows.saturating_add(STEP_ROWS - 1) / STEP_ROWS * STEP_ROWS
}

/// Rows that keep memory when only the first `rows` are in use.
pub(crate) fn kept_rows(rows: u64) -> u64 {
    step_rows(rows).saturating_add(KEPT_ROWS)
}

pub(crate) struct StateBlock {
    map: MmapMut,
    len: usize,
    states: Vec<State>,
    /// Rows of every cache that have memory; those beyond were never touched or were given back.
    rows: u64,
    /// Blocks of the address space of `HUGE` bytes that are huge pages or were tried, and those that wait for it.
    joined: Vec<bool>,
    waiting: Vec<usize>,
}

impl StateBlock {
    /// `bytes` zero bytes (aligned to pages) that hold `states`; nothing but address space is taken.
    pub fn new(bytes: u64, states: &[State]) -> Result<Self> {
        let refuse = || Error::OutOfMemory { what: WHAT, bytes };
        let len = usize::try_from(bytes).map_err(|_| refuse())?;
        let map = MmapOptions::new().len(len.max(1)).no_reserve_swap().map_anon().map_err(|_| refuse())?;
        let joined = vec![false; len / HUGE as usize];
        Ok(Self { map, len, states: states.to_vec(), rows: 0, joined, waiting: Vec::new() })
    }

    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        &self.map[range.start as usize..range.end as usize]
    }

    pub fn bytes_mut(&mut self, range: Range<u64>) -> &mut [u8] {
        &mut self.map[range.start as usize..range.end as usize]
    }

    /// Bytes that have memory: recurrent states, and rows up to the last step. What huge pages have beyond them, at most one
    /// page for each start and end of a run of rows, does not count.
    pub fn allocated(&self) -> u64 {
        live_bytes(&self.states, self.rows)
    }

    /// Sees to it that the first `rows` rows of every cache have memory; in huge pages, if `huge`, where rows take at least
    /// half of one and none of it had memory before (the others are left to `join_pages`). The workers of `pool` share the
    /// caches, because the system clears every page before it gives it away.
    pub fn grow(&mut self, rows: u64, pool: &Pool, huge: bool) -> Result<()> {
        if rows <= self.rows {
            return Ok(());
        }
        let rows = step_rows(rows);
        let (before, used) = (self.used(self.rows), self.used(rows));
        for block in 0..used.len() {
            if huge && before[block] == 0 && used[block] >= HUGE / 2 && !self.joined[block] {
                self.joined[block] = self.advise_huge(block);
            }
        }
        let (next, refused) = (AtomicUsize::new(0), Mutex::new(None));
        pool.help(&|_, _| {
            while let Some(state) = self.states.get(next.fetch_add(1, Ordering::Relaxed)) {
                let fresh = state.live(self.rows).end..state.live(rows).end;
                if state.cache.is_some()
                    && let Err(error) = self.populate(fresh)
                {
                    *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
            }
        })?;
        if let Some(error) = refused.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        self.rows = rows;
        let ripe = |&block: &usize| used[block] >= HUGE / 2 && !self.joined[block];
        self.waiting = (0..used.len()).filter(ripe).rev().collect();
        Ok(())
    }

    /// Offset of a block of huge pages.
    fn block(&self, block: usize) -> u64 {
        let address = self.map.as_ptr() as u64;
        address.next_multiple_of(HUGE) - address + block as u64 * HUGE
    }

    /// Bytes of every block that the first `rows` rows of caches take.
    fn used(&self, rows: u64) -> Vec<u64> {
        let first = self.block(0);
        let mut used = vec![0; self.joined.len()];
        for range in self.states.iter().filter(|s| s.cache.is_some()).map(|s| s.live(rows)) {
            let (mut at, end) = (range.start.max(first), range.end);
            while at < end {
                let block = (at - first) / HUGE;
                let stop = end.min(first + (block + 1) * HUGE);
                if let Some(used) = used.get_mut(block as usize) {
                    *used += stop - at;
                }
                at = stop;
            }
        }
        used
    }

    /// Asks for one huge page for a block; false if the system knows of none.
    fn advise_huge(&self, block: usize) -> bool {
        self.whole(block).is_some_and(|range| pages::prefer_huge(&self.map, range))
    }

    /// Where a block lies, if all of it does.
    fn whole(&self, block: usize) -> Option<Range<usize>> {
        let from = self.block(block);
        (from + HUGE <= self.len as u64).then(|| from as usize..(from + HUGE) as usize)
    }

    /// Joins the pages of at most `most` blocks of well used rows into huge ones, which are read faster; the workers of
    /// `pool` share them. What is in them stays.
    pub fn join_pages(&mut self, most: usize, pool: &Pool) -> Result<()> {
        let kept = self.waiting.len().saturating_sub(most);
        let blocks = &self.waiting[kept..];
        if blocks.is_empty() {
            return Ok(());
        }
        let next = AtomicUsize::new(0);
        pool.help(&|_, _| {
            while let Some(&block) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Some(range) = self.whole(block) {
                    pages::collapse(&self.map, range);
                }
            }
        })?;
        blocks.iter().for_each(|&block| self.joined[block] = true);
        self.waiting.truncate(kept);
        Ok(())
    }

    /// Gives back the memory of rows beyond the first `rows` and a few kept ones. A huge page stays while any of its rows
    /// does: the next prompt would have to clear and join its pages again.
    pub fn shrink(&mut self, rows: u64) {
        let kept = kept_rows(rows);
        if kept >= self.rows {
            return;
        }
        let first = self.block(0);
        let (stay, all) = (self.used(kept), self.used(u64::MAX));
        for state in self.states.iter().filter(|s| s.cache.is_some()) {
            let (mut at, end) = (state.live(kept).end, state.live(self.rows).end);
            while at < end {
                // What lies before the first block counts as one of its own.
                let block = at.checked_sub(first).map(|from| (from / HUGE) as usize);
                let stop = end.min(block.map_or(first, |block| self.block(block + 1)));
                // Huge pages stay, or go as a whole below.
                let whole = |block: usize| self.is_joined(block) && (stay[block] > 0 || all[block] == HUGE);
                if !block.is_some_and(whole) {
                    self.discard(at..stop);
                }
                at = stop;
            }
        }
        for block in 0..stay.len() {
            if stay[block] == 0 && self.joined[block] {
                self.joined[block] = false;
                if all[block] == HUGE {
                    self.discard(self.block(block)..self.block(block + 1));
                }
            }
        }
        self.rows = kept;
        self.waiting.clear();
    }

    fn is_joined(&self, block: usize) -> bool {
        self.joined.get(block).is_some_and(|&joined| joined)
    }

    fn populate(&self, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        pages::populate(&self.map, range.start as usize..range.end as usize)
    }

    /// Gives whole pages inside of `range` back to the system; they read as zero afterwards.
    fn discard(&self, range: Range<u64>) {
        const PAGE: u64 = 64 << 10; // The largest page size of the machines that we run on.
        let (from, to) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
        if from >= to || to > self.len as u64 {
            return;
        }
        let (advice, bytes) = (memmap2::UncheckedAdvice::DontNeed, (to - from) as usize);
        // SAFETY: the map is private and anonymous, so its dropped pages become zero pages; no reference into it is
        // alive (`&mut self` of the only caller), and rows beyond the sequence hold nothing. An error only means that
        // the memory stays.
        let _ = unsafe { self.map.unchecked_advise_range(advice, from as usize, bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Cache;

    fn state(name: &str, offset: u64, bytes: u64, row_bytes: u64) -> State {
        let cache = (row_bytes > 0).then(|| Cache { rows: bytes / row_bytes, row_bytes });
        State {
            name: name.into(),
            offset,
            bytes,
            fill: None,
            format: "f32".into(),
            cache,
            dropped_beyond: None,
            is_length: false,
        }
    }

    /// Resident bytes of the block, as the kernel counts them.
    #[cfg(target_os = "linux")]
    fn resident(block: &StateBlock) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = block.map.as_ptr() as u64;
        let mut inside = false;
        let mut sum = 0;
        for line in maps.lines() {
            if let Some((from, rest)) = line.split_once('-')
                && let (Ok(from), Some((to, _))) = (u64::from_str_radix(from, 16), rest.split_once(' '))
            {
                let to = u64::from_str_radix(to, 16).unwrap_or(0);
                inside = from < begin + block.len as u64 && to > begin;
            } else if let Some(kb) = line.strip_prefix("Rss:")
                && inside
            {
                sum += kb.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
            }
        }
        sum
    }

    /// One test at a time: the system counts memory of neighbouring mappings as one.
    fn alone() -> std::sync::MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    const ROWS: u64 = 1 << 17;

    fn two_caches() -> StateBlock {
        let bytes = ROWS * 4096;
        let states =
            [state("h", 0, 256, 0), state("k", 256, bytes, 4096), state("v", 256 + bytes, bytes, 4096)];
        StateBlock::new(256 + 2 * bytes, &states).unwrap()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_gigabyte_costs_what_is_used() {
        let _alone = alone();
        let (mut block, pool) = (two_caches(), Pool::new(2).unwrap());
        block.bytes_mut(0..256).fill(1);
        assert!(resident(&block) < 1 << 20, "{}", resident(&block));
        block.grow(1000, &pool, false).unwrap();
        assert_eq!(block.allocated(), 256 + 2 * 1024 * 4096);
        block.bytes_mut(256 + 999 * 4096..256 + 1000 * 4096).fill(7);
        assert!(resident(&block) < 64 << 20, "{}", resident(&block));
        block.grow(1001, &pool, false).unwrap();
        assert_eq!(block.allocated(), 256 + 2 * 1024 * 4096, "the step before had room");
        block.shrink(0);
        assert_eq!(block.allocated(), 256 + 2 * KEPT_ROWS * 4096);
        assert!(resident(&block) < 8 << 20, "{}", resident(&block));
        assert_eq!(block.bytes(0..256), [1; 256], "other states are untouched");
        block.grow(1000, &pool, false).unwrap();
        assert_eq!(block.bytes(256 + 999 * 4096..256 + 1000 * 4096), [0; 4096]);
    }

    #[test]
    fn joined_pages_hold_what_they_held() {
        let _alone = alone();
        let (mut block, pool) = (two_caches(), Pool::new(2).unwrap());
        block.grow(1000, &pool, false).unwrap();
        let rows = 256..256 + 1000 * 4096;
        for (i, b) in block.bytes_mut(rows.clone()).iter_mut().enumerate() {
            *b = (i / 5 % 251) as u8;
        }
        let ripe = block.waiting.len();
        assert!(ripe >= 2, "4 MiB of rows in each of two caches");
        block.join_pages(1, &pool).unwrap();
        assert_eq!(block.waiting.len(), ripe - 1);
        block.join_pages(usize::MAX, &pool).unwrap();
        assert!(block.bytes(rows).iter().enumerate().all(|(i, &b)| b == (i / 5 % 251) as u8));
        block.grow(1001, &pool, false).unwrap();
        assert!(block.waiting.is_empty(), "each block once");
    }

    #[test]
    fn huge_pages_from_the_start_hold_rows_and_none_twice() {
        let _alone = alone();
        let (mut block, pool) = (two_caches(), Pool::new(2).unwrap());
        block.grow(200, &pool, true).unwrap();
        assert!(block.waiting.is_empty(), "256 rows take a megabyte: half of a block, or two quarters");
        let rows = 256..256 + 1000 * 4096;
        block.bytes_mut(256..256 + 200 * 4096).fill(3);
        block.grow(1000, &pool, true).unwrap();
        assert!(block.bytes(256..256 + 200 * 4096).iter().all(|&b| b == 3));
        assert!(block.bytes(256 + 200 * 4096..rows.end).iter().all(|&b| b == 0));
        let joined = block.joined.iter().filter(|&&j| j).count();
        assert!(joined >= 2 || cfg!(not(target_os = "linux")), "{joined}");
        block.bytes_mut(rows.clone()).fill(5);
        block.join_pages(usize::MAX, &pool).unwrap();
        assert!(block.bytes(rows).iter().all(|&b| b == 5));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn huge_pages_go_when_none_of_their_rows_is_kept() {
        let _alone = alone();
        let (mut block, pool) = (two_caches(), Pool::new(2).unwrap());
        block.bytes_mut(0..256).fill(1);
        for _ in 0..3 {
            block.grow(4000, &pool, true).unwrap();
            block.bytes_mut(256..256 + 4000 * 4096).fill(9);
            let joined = block.joined.iter().filter(|&&j| j).count();
            assert!(joined >= 12, "{joined} of 16 blocks: 16 MiB of rows in each of two caches");
            block.shrink(0);
            assert!(resident(&block) <= 12 << 20, "{} of 32 MiB are left", resident(&block));
            assert_eq!(block.bytes(0..256), [1; 256]);
            assert!(block.bytes(256..256 + KEPT_ROWS * 4096).iter().all(|&b| b == 9));
        }
    }

    #[test]
    fn shrinking_keeps_the_rows_in_use() {
        let _alone = alone();
        let (mut block, pool) = (two_caches(), Pool::new(2).unwrap());
        block.grow(2000, &pool, false).unwrap();
        let rows = 256..256 + 1000 * 4096;
        block.bytes_mut(rows.clone()).fill(9);
        block.shrink(1000);
        assert!(block.bytes(rows).iter().all(|&b| b == 9));
        block.shrink(5000);
        assert_eq!(block.allocated(), 256 + 2 * 1280 * 4096);
    }

    #[test]
    fn absurd_sizes_are_refused_and_none_is_fine() {
        assert!(matches!(StateBlock::new(u64::MAX, &[]), Err(Error::OutOfMemory { .. })));
        assert!(matches!(StateBlock::new(1 << 60, &[]), Err(Error::OutOfMemory { .. })));
        assert_eq!(StateBlock::new(0, &[]).unwrap().allocated(), 0);
    }
}
