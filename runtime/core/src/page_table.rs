//! The pages of one sequence: row `i` of every cache is row `i % PAGE_ROWS` of page `i / PAGE_ROWS` of its
//! table.
//!
//! A page that several sequences have is not written to: who is to write gets a copy of its rows before. So
//! sequences that begin alike share all pages up to where they differ.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mlcc_abi::PAGE_ROWS;

use crate::Result;
use crate::page_pool::{PageMemory, PagePool};
use crate::table::{CacheShape, StateInfo};

pub(crate) struct PageTable<M: PageMemory> {
    pool: Arc<PagePool<M>>,
    /// Pages of its rows, and perhaps of rows to come in pages that are not shared.
    pages: Vec<i32>,
    /// Some page that rows may be written to may be another sequence's too.
    shared: AtomicBool,
}

/// The caches of a model.
pub(crate) fn caches(states: &[StateInfo]) -> impl Iterator<Item = (&StateInfo, CacheShape)> {
    states.iter().filter_map(|state| Some((state, state.cache?)))
}

impl<M: PageMemory> PageTable<M> {
    pub fn new(pool: &Arc<PagePool<M>>) -> Self {
        Self { pool: Arc::clone(pool), pages: Vec::new(), shared: AtomicBool::new(false) }
    }

    /// Their numbers.
    pub fn pages(&self) -> &[i32] {
        &self.pages
    }

    /// Bytes of all its pages, those that it shares included.
    pub fn bytes(&self) -> u64 {
        (self.pages.len() * self.pool.page_bytes()) as u64
    }

    /// The number of pages that are missing behind its last one for writing to rows `rows`, and the places of
    /// its pages that others have too.
    fn pages_to_write(&self, rows: &Range<u64>, used: u64) -> (usize, Vec<usize>) {
        let pages = (rows.start / PAGE_ROWS) as usize..rows.end.div_ceil(PAGE_ROWS) as usize;
        let missing = pages.end.saturating_sub(self.pages.len());
        // Rows before the last page are written to only to move them.
        let look = self.shared.load(Ordering::Relaxed) || rows.start / PAGE_ROWS < used / PAGE_ROWS;
        let old = pages.start.min(self.pages.len())..pages.end.min(self.pages.len());
        let shared = match look {
            true => old.filter(|&at| self.pool.is_shared(self.pages[at])).collect(),
            false => Vec::new(),
        };
        (missing, shared)
    }

    /// Pages that [`PageTable::make_writable`] would take.
    pub fn missing_pages(&self, rows: Range<u64>, used: u64) -> usize {
        let (missing, shared) = self.pages_to_write(&rows, used);
        missing + shared.len()
    }

    /// Makes ready for writing to rows `rows`, of which those before `used` are in use: afterwards they have
    /// pages that are not shared. If there are not enough, nothing has changed.
    pub fn make_writable(&mut self, states: &[StateInfo], rows: Range<u64>, used: u64) -> Result<()> {
        let (missing, shared) = self.pages_to_write(&rows, used);
        if missing == 0 && shared.is_empty() {
            // They are its own up to here.
            if rows.end >= used {
                *self.shared.get_mut() = false;
            }
            return Ok(());
        }
        let mut taken = Vec::with_capacity(shared.len() + missing);
        self.pages.reserve(missing);
        self.pool.allocate(shared.len() + missing, &mut taken)?;
        let copies = shared.iter().zip(&taken);
        let rows_of = |at: usize| used.saturating_sub(at as u64 * PAGE_ROWS);
        let mut copied = copies.map(|(&at, &page)| self.copy_page(states, self.pages[at], page, rows_of(at)));
        let settled = copied.find(Result::is_err).unwrap_or_else(|| match shared.is_empty() {
            true => Ok(()),
            false => self.pool.memory().synchronize(),
        });
        if let Err(error) = settled {
            self.pool.release(&taken);
            return Err(error);
        }
        let (copies, new) = taken.split_at(shared.len());
        for (&at, &page) in shared.iter().zip(copies) {
            let before = std::mem::replace(&mut self.pages[at], page);
            self.pool.release(&[before]);
        }
        self.pages.extend_from_slice(new);
        if rows.end >= used {
            *self.shared.get_mut() = false;
        }
        Ok(())
    }

    /// Copies the first `rows` rows of a page.
    fn copy_page(&self, states: &[StateInfo], from: i32, to: i32, rows: u64) -> Result<()> {
        caches(states).try_for_each(|(state, cache)| {
            let begin = state.offset as usize;
            let bytes = (rows.min(PAGE_ROWS) * cache.row_bytes) as usize;
            self.pool.copy((from, begin), (to, begin), bytes)
        })
    }

    /// Another sequence with the first `rows` rows: it shares their pages.
    pub fn fork(&self, rows: u64) -> Self {
        let pages = self.pages[..rows.div_ceil(PAGE_ROWS) as usize].to_vec();
        self.pool.add_refs(&pages);
        self.shared.store(true, Ordering::Relaxed);
        Self { pool: Arc::clone(&self.pool), pages, shared: AtomicBool::new(true) }
    }

    /// Gives back the pages of rows after the first `rows`.
    pub fn truncate(&mut self, rows: u64) {
        let kept = (rows.div_ceil(PAGE_ROWS) as usize).min(self.pages.len());
        if kept < self.pages.len() {
            self.pool.release(&self.pages[kept..]);
            self.pages.truncate(kept);
        }
        // The last page has room again.
        self.shared = AtomicBool::new(kept > 0);
    }

    /// Gives back whole pages; rows after them move to the front.
    pub fn drop_pages(&mut self, pages: Range<u64>) {
        let dropped: Vec<i32> = self.pages.drain(pages.start as usize..pages.end as usize).collect();
        self.pool.release(&dropped);
    }

    /// Moves rows of every cache to the places `moved`, from `count` rows after them, and ends behind them.
    pub fn drop_rows(&mut self, states: &[StateInfo], count: u64, moved: Range<u64>) -> Result<()> {
        self.make_writable(states, moved.clone(), moved.end + count)?;
        self.move_rows(states, count, moved.clone())?;
        self.pool.memory().synchronize()?;
        self.truncate(moved.end);
        Ok(())
    }

    /// Moves rows of every cache to the places `moved`, from `count` rows after them; both have pages that
    /// are not shared.
    fn move_rows(&self, states: &[StateInfo], count: u64, moved: Range<u64>) -> Result<()> {
        let mut row = moved.start;
        while row < moved.end {
            // Rows that are together in a page, before and after, and not on both sides at once.
            let left = |row: u64| PAGE_ROWS - row % PAGE_ROWS;
            let rows = left(row).min(left(row + count)).min(count).min(moved.end - row);
            for (state, cache) in caches(states) {
                let (from, to) =
                    (self.row_location(state, cache, row + count), self.row_location(state, cache, row));
                self.pool.copy(from, to, (rows * cache.row_bytes) as usize)?;
            }
            row += rows;
        }
        Ok(())
    }

    /// The page of a row of a cache, and where it begins there.
    fn row_location(&self, state: &StateInfo, cache: CacheShape, row: u64) -> (i32, usize) {
        let begin = (state.offset + row % PAGE_ROWS * cache.row_bytes) as usize;
        (self.pages[(row / PAGE_ROWS) as usize], begin)
    }

    /// The pages of the first `rows` rows of a cache, and where these lie in each.
    fn page_ranges(
        &self,
        state: &StateInfo,
        cache: CacheShape,
        rows: u64,
    ) -> impl Iterator<Item = (i32, Range<usize>)> {
        let begin = state.offset as usize;
        self.pages.iter().zip((0..rows).step_by(PAGE_ROWS as usize)).map(move |(&page, first)| {
            (page, begin..begin + ((rows - first).min(PAGE_ROWS) * cache.row_bytes) as usize)
        })
    }

    /// The first `rows` rows of a cache.
    pub fn read_cache(&self, state: &StateInfo, cache: CacheShape, rows: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (rows * cache.row_bytes) as usize];
        let mut left = &mut bytes[..];
        for (page, part) in self.page_ranges(state, cache, rows) {
            let (now, later) = left.split_at_mut(part.len());
            self.pool.read(page, part, now)?;
            left = later;
        }
        Ok(bytes)
    }

    /// Replaces the first rows of a cache, which have pages that are not shared.
    pub fn write_cache(&self, state: &StateInfo, cache: CacheShape, bytes: &[u8]) -> Result<()> {
        let rows = (bytes.len() as u64).checked_div(cache.row_bytes).unwrap_or(0);
        let mut left = bytes;
        for (page, part) in self.page_ranges(state, cache, rows) {
            let (now, later) = left.split_at(part.len());
            self.pool.write(page, part.start, now)?;
            left = later;
        }
        self.pool.memory().synchronize()
    }
}

impl<M: PageMemory> Drop for PageTable<M> {
    fn drop(&mut self) {
        self.pool.release(&self.pages);
    }
}
