//! Shared parts of the ranks of a model that is split among several: names, and the ways in which they
//! exchange data.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use mlcc_abi::section;

use crate::Result;
use crate::buffer::AlignedBuffer;
use crate::pool::{Barrier, CachePadded};

/// Most ranks of a model.
pub(crate) const MOST_RANKS: usize = 16;

/// Name of the section with the weights of a rank.
pub fn weights_section(rank: usize) -> String {
    match rank {
        0 => section::WEIGHTS.into(),
        rank => format!("{}.{rank}", section::WEIGHTS),
    }
}

/// The rank whose weights are in the section of that name.
pub(crate) fn rank_of_section(name: &str) -> Option<usize> {
    match name.strip_prefix(section::WEIGHTS)? {
        "" => Some(0),
        number => number.strip_prefix('.')?.parse().ok().filter(|&rank| rank > 0),
    }
}

/// The part of a rank in an all-gather, and the place for the parts of all ([`mlcc_abi::AllGatherFn`]).
#[derive(Clone, Copy)]
pub(crate) struct AllGatherBuffers {
    pub from: *const u8,
    pub gathered: *mut u8,
    pub rows: usize,
    pub row_bytes: usize,
}

/// The way in which ranks exchange data. All reach the same all-gathers in the same order.
pub(crate) trait Communicator: Send + Sync {
    /// Joins the rows of all ranks.
    ///
    /// # Safety
    /// `part` has `rows * row_bytes` bytes that are not written meanwhile, and room for those of all ranks
    /// that has no other user. All ranks give parts of one size.
    unsafe fn all_gather_rows(&self, rank: usize, part: AllGatherBuffers);
}

/// Largest part that is put aside: of a token, most are smaller.
const ASIDE: usize = 64 << 10;

/// Ranks that are threads of one process: each copies from the memory of the others.
///
/// A small part is put aside first. So whoever gave it may go on, and ranks meet once: there is room for two,
/// and who puts the third one aside has met all who had yet to copy the first. A large part is copied from
/// where it is, and ranks meet again when all have it.
pub(crate) struct ThreadCommunicator {
    ranks: Vec<CachePadded<ThreadRankSlot>>,
    barrier: Barrier,
}

struct ThreadRankSlot {
    /// Its part in the present all-gather.
    sent: AtomicPtr<u8>,
    /// Room for two parts.
    aside: AlignedBuffer,
    /// The number of parts that it has put aside.
    count: AtomicUsize,
}

impl ThreadCommunicator {
    pub fn new(ranks: usize, spins: u32) -> Result<ThreadCommunicator> {
        let of_rank = |_| {
            let aside = AlignedBuffer::zeroed("what ranks exchange", 2 * ASIDE as u64, 128)?;
            Ok(CachePadded(ThreadRankSlot { sent: AtomicPtr::default(), aside, count: AtomicUsize::new(0) }))
        };
        Ok(ThreadCommunicator {
            ranks: (0..ranks).map(of_rank).collect::<Result<_>>()?,
            barrier: Barrier::new(ranks, spins),
        })
    }

    /// The half of its room that a rank uses now; for all ranks the same one.
    fn aside_half(&self, rank: usize) -> usize {
        let count = &self.ranks[rank].0.count;
        let turn = count.load(Ordering::Relaxed);
        count.store(turn.wrapping_add(1), Ordering::Relaxed);
        turn % 2 * ASIDE
    }

    /// Copies to where the rows of all ranks go.
    ///
    /// # Safety
    /// `part.all` as in [`Communicator::all_gather_rows`]; at `from` the rows of `rank`, which stay
    /// while this runs.
    unsafe fn scatter_rows(&self, rank: usize, from: *const u8, part: &AllGatherBuffers) {
        for row in 0..part.rows {
            // SAFETY: by contract; the rooms of the rows of a rank do not overlap.
            unsafe {
                let to = part.gathered.add((row * self.ranks.len() + rank) * part.row_bytes);
                std::ptr::copy_nonoverlapping(from.add(row * part.row_bytes), to, part.row_bytes);
            }
        }
    }
}

impl Communicator for ThreadCommunicator {
    unsafe fn all_gather_rows(&self, rank: usize, part: AllGatherBuffers) {
        let bytes = part.rows * part.row_bytes;
        // The meetings order everything.
        if bytes <= ASIDE {
            let turn = self.aside_half(rank);
            let aside = |rank: usize| self.ranks[rank].0.aside.as_ptr().wrapping_add(turn);
            // SAFETY: this half has no reader now, since all have reached a later all-gather than the one
            // that used it last.
            unsafe { std::ptr::copy_nonoverlapping(part.from, aside(rank), bytes) };
            self.barrier.wait(rank);
            for other in 0..self.ranks.len() {
                // SAFETY: by contract of this call and of those of the others, which have met; no rank writes
                // to this half before all have met again.
                unsafe { self.scatter_rows(other, aside(other), &part) };
            }
        } else {
            self.ranks[rank].0.sent.store(part.from.cast_mut(), Ordering::Relaxed);
            self.barrier.wait(rank);
            for (other, CachePadded(sender)) in self.ranks.iter().enumerate() {
                // SAFETY: as above; all stay until the next meeting.
                unsafe { self.scatter_rows(other, sender.sent.load(Ordering::Relaxed), &part) };
            }
            // Until all have read it, no rank writes to its part again.
            self.barrier.wait(rank);
        }
    }
}

/// `ctx.all_gather_self` of a rank.
pub(crate) struct RankLink {
    pub communicator: Arc<dyn Communicator>,
    pub rank: usize,
}

/// `ctx.all_gather`.
///
/// # Safety
/// `link` is a [`RankLink`] that outlives the step, and the rest as in [`Communicator::all_gather_rows`].
pub(crate) unsafe extern "C" fn all_gather_callback(
    link: *mut c_void,
    _item: u32,
    from: *const u8,
    all: *mut u8,
    rows: u64,
    row_bytes: u64,
) {
    // SAFETY: by contract.
    let link = unsafe { &*link.cast::<RankLink>() };
    let part = AllGatherBuffers { from, gathered: all, rows: rows as usize, row_bytes: row_bytes as usize };
    // SAFETY: by contract.
    unsafe { link.communicator.all_gather_rows(link.rank, part) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sections_are_read_back() {
        for rank in [0, 1, 9, 15] {
            assert_eq!(rank_of_section(&weights_section(rank)), Some(rank));
        }
        for name in [".mlcc.weights.0", ".mlcc.weights1", ".mlcc.weights.", ".mlcc.weights.x", ".mlcc.chat"] {
            assert_eq!(rank_of_section(name), None, "{name}");
        }
    }

    /// Many exchanges by threads that are not equally fast: every rank gets the rows of all, in their order.
    #[test]
    fn every_rank_gets_the_rows_of_all() {
        const ROWS: usize = 3;
        // Parts that are put aside, and in every third round one that is not.
        let width = |round: usize| if round % 3 == 1 { ASIDE / ROWS + 1 } else { 2 };
        for ranks in [1, 2, 5] {
            let threads = ThreadCommunicator::new(ranks, 16).unwrap();
            let byte = |round: usize, rank: usize, row: usize| (round * 31 + rank * 7 + row) as u8;
            std::thread::scope(|scope| {
                for rank in 0..ranks {
                    let threads = &threads;
                    scope.spawn(move || {
                        let mut part = vec![0_u8; (ASIDE / ROWS + 1) * ROWS];
                        let mut all = vec![0_u8; part.len() * ranks];
                        for round in 0..200 {
                            let width = width(round);
                            for row in 0..ROWS {
                                part[width * row..width * (row + 1)].fill(byte(round, rank, row));
                            }
                            if (round + rank) % 3 == 0 {
                                std::thread::yield_now();
                            }
                            let (from, to) = (part.as_ptr(), all.as_mut_ptr());
                            let given = AllGatherBuffers { from, gathered: to, rows: ROWS, row_bytes: width };
                            // SAFETY: the buffers have these sizes and belong to this thread.
                            unsafe { threads.all_gather_rows(rank, given) };
                            part.fill(0);
                            let right =
                                all[..ROWS * ranks * width].chunks(width).enumerate().all(|(i, found)| {
                                    let wanted = byte(round, i % ranks, i / ranks);
                                    found.iter().all(|&byte| byte == wanted)
                                });
                            assert!(right, "round {round}, rank {rank}");
                        }
                    });
                }
            });
        }
    }
}
