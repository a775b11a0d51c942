//! The state block of one sequence in host memory. Address space is reserved for the whole plan; the rows of caches get
//! physical memory in steps as the sequence grows, and lose it when the sequence gets shorter.

use std::ops::Range;

use memmap2::{MmapMut, MmapOptions};

use crate::table::{State, live_bytes};
use crate::{Error, Result};

const WHAT: &str = "the state";
/// Rows that get memory together, so that `decode` meets no page fault but at every such step.
const STEP_ROWS: u64 = 128;
/// Unused rows that keep their memory when a sequence gets shorter.
const KEPT_ROWS: u64 = 256;

/// Pages of a block of this size are joined once rows take half of it.
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
    /// Blocks of the address space of `HUGE` bytes that were joined, and those that wait for it.
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

    /// Bytes that have memory: recurrent states, and rows up to the last step.
    pub fn allocated(&self) -> u64 {
        live_bytes(&self.states, self.rows)
    }

    /// Sees to it that the first `rows` rows of every cache have memory.
    pub fn grow(&mut self, rows: u64) -> Result<()> {
        if rows <= self.rows {
            return Ok(());
        }
        let rows = step_rows(rows);
        for state in self.states.iter().filter(|s| s.cache.is_some()) {
            let (from, to) = (state.live(self.rows).end, state.live(rows).end);
            self.populate(from..to)?;
        }
        self.rows = rows;
        self.find_blocks();
        Ok(())
    }

    /// Offset of the first block of huge pages.
    fn first_block(&self) -> u64 {
        let address = self.map.as_ptr() as u64;
        address.next_multiple_of(HUGE) - address
    }

    /// Lists blocks that rows of caches take at least half of.
    fn find_blocks(&mut self) {
        let first = self.first_block();
        let mut used = vec![0; self.joined.len()];
        for range in self.states.iter().filter(|s| s.cache.is_some()).map(|s| s.live(self.rows)) {
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
        let ripe = |&block: &usize| used[block] >= HUGE / 2 && !self.joined[block];
        self.waiting = (0..used.len()).filter(ripe).rev().collect();
    }

    /// Joins the pages of at most `most` blocks of well used rows into huge ones, which are read faster. What is in them
    /// stays.
    pub fn join_pages(&mut self, most: usize) {
        for _ in 0..most {
            let Some(block) = self.waiting.pop() else { return };
            self.joined[block] = true;
            let from = self.first_block() + block as u64 * HUGE;
            if from + HUGE > self.len as u64 {
                continue;
            }
            #[cfg(target_os = "linux")]
            {
                let at = self.map.as_mut_ptr().wrapping_add(from as usize);
                crate::huge_pages::linux::collapse(at, HUGE as usize);
            }
        }
    }

    /// Gives back the memory of rows beyond the first `rows` and a few kept ones.
    pub fn shrink(&mut self, rows: u64) {
        let kept = kept_rows(rows);
        if kept >= self.rows {
            return;
        }
        for state in self.states.iter().filter(|s| s.cache.is_some()) {
            self.discard(state.live(kept).end..state.live(self.rows).end);
        }
        self.rows = kept;
        // Discarding may have taken huge pages apart.
        self.joined.fill(false);
        self.waiting.clear();
    }

    #[cfg(target_os = "linux")]
    fn populate(&self, range: Range<u64>) -> Result<()> {
        const ENOMEM: i32 = 12;
        if range.is_empty() {
            return Ok(());
        }
        let bytes = range.end - range.start;
        let done =
            self.map.advise_range(memmap2::Advice::PopulateWrite, range.start as usize, bytes as usize);
        match done {
            Err(e) if e.raw_os_error() == Some(ENOMEM) => {
                Err(Error::OutOfMemory { what: "rows of the KV cache", bytes })
            }
            // Linux before 5.14 does not know the advice: pages then come as they are written.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn populate(&self, _: Range<u64>) -> Result<()> {
        Ok(())
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
        let mut block = two_caches();
        block.bytes_mut(0..256).fill(1);
        assert!(resident(&block) < 1 << 20, "{}", resident(&block));
        block.grow(1000).unwrap();
        assert_eq!(block.allocated(), 256 + 2 * 1024 * 4096);
        block.bytes_mut(256 + 999 * 4096..256 + 1000 * 4096).fill(7);
        assert!(resident(&block) < 64 << 20, "{}", resident(&block));
        block.grow(1001).unwrap();
        assert_eq!(block.allocated(), 256 + 2 * 1024 * 4096, "the step before had room");
        block.shrink(0);
        assert_eq!(block.allocated(), 256 + 2 * KEPT_ROWS * 4096);
        assert!(resident(&block) < 8 << 20, "{}", resident(&block));
        assert_eq!(block.bytes(0..256), [1; 256], "other states are untouched");
        block.grow(1000).unwrap();
        assert_eq!(block.bytes(256 + 999 * 4096..256 + 1000 * 4096), [0; 4096]);
    }

    #[test]
    fn joined_pages_hold_what_they_held() {
        let mut block = two_caches();
        block.grow(1000).unwrap();
        let rows = 256..256 + 1000 * 4096;
        for (i, b) in block.bytes_mut(rows.clone()).iter_mut().enumerate() {
            *b = (i / 5 % 251) as u8;
        }
        let ripe = block.waiting.len();
        assert!(ripe >= 2, "4 MiB of rows in each of two caches");
        block.join_pages(1);
        assert_eq!(block.waiting.len(), ripe - 1);
        block.join_pages(usize::MAX);
        assert!(block.bytes(rows).iter().enumerate().all(|(i, &b)| b == (i / 5 % 251) as u8));
        block.grow(1001).unwrap();
        assert!(block.waiting.is_empty(), "each block once");
    }

    #[test]
    fn shrinking_keeps_the_rows_in_use() {
        let mut block = two_caches();
        block.grow(2000).unwrap();
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
