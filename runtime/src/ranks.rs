//! What ranks of a model that is split among several share: names, and how they exchange what they have.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use mlcc_abi::section;

use crate::pool::{Barrier, Padded};

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

/// What a rank gives to an exchange, and where it wants what all give ([`mlcc_abi::ExchangeFn`]).
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub from: *const u8,
    pub all: *mut u8,
    pub rows: usize,
    pub row_bytes: usize,
}

/// How ranks exchange what they have. All come to the same exchanges in the same order.
pub(crate) trait Communicator: Send + Sync {
    /// Joins the rows of all ranks.
    ///
    /// # Safety
    /// `part` has `rows * row_bytes` bytes that nobody writes meanwhile, and room for those of all ranks that nobody else uses. All ranks
    /// give parts of one size.
    unsafe fn exchange(&self, rank: usize, part: Part);
}

/// Ranks that are threads of one process: each copies from the memory of the others.
pub(crate) struct Threads {
    /// By rank: what it gives to the exchange that goes on.
    sent: Vec<Padded<AtomicPtr<u8>>>,
    meeting: Barrier,
}

impl Threads {
    pub fn new(ranks: usize, spins: u32) -> Threads {
        let sent = (0..ranks).map(|_| Padded(AtomicPtr::default())).collect();
        Threads { sent, meeting: Barrier::new(ranks, spins) }
    }
}

impl Communicator for Threads {
    unsafe fn exchange(&self, rank: usize, part: Part) {
        let Part { from, all, rows, row_bytes } = part;
        // The meetings order everything.
        self.sent[rank].0.store(from.cast_mut(), Ordering::Relaxed);
        self.meeting.wait(rank);
        for (other, Padded(sent)) in self.sent.iter().enumerate() {
            let from = sent.load(Ordering::Relaxed);
            for row in 0..rows {
                // SAFETY: by contract of this call and of those of the others, which have met, and stay until the next meeting; the rooms of
                // the rows of a rank do not overlap.
                unsafe {
                    let to = all.add((row * self.sent.len() + other) * row_bytes);
                    std::ptr::copy_nonoverlapping(from.add(row * row_bytes), to, row_bytes);
                }
            }
        }
        // Until all have read it, nobody writes to its part again.
        self.meeting.wait(rank);
    }
}

/// `ctx.exchange_self` of a rank.
pub(crate) struct Link {
    pub communicator: Arc<dyn Communicator>,
    pub rank: usize,
}

/// `ctx.exchange`.
///
/// # Safety
/// `link` is a [`Link`] that outlives the step, and the rest as in [`Communicator::exchange`].
pub(crate) unsafe extern "C" fn exchange(
    link: *mut c_void,
    _item: u32,
    from: *const u8,
    all: *mut u8,
    rows: u64,
    row_bytes: u64,
) {
    // SAFETY: by contract.
    let link = unsafe { &*link.cast::<Link>() };
    let part = Part { from, all, rows: rows as usize, row_bytes: row_bytes as usize };
    // SAFETY: by contract.
    unsafe { link.communicator.exchange(link.rank, part) };
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
        for ranks in [1, 2, 5] {
            let threads = Threads::new(ranks, 16);
            let byte = |round: usize, rank: usize, row: usize| (round * 31 + rank * 7 + row) as u8;
            std::thread::scope(|scope| {
                for rank in 0..ranks {
                    let threads = &threads;
                    scope.spawn(move || {
                        let mut part = [0_u8; 2 * ROWS];
                        let mut all = vec![0_u8; 2 * ROWS * ranks];
                        for round in 0..200 {
                            for row in 0..ROWS {
                                part[2 * row..2 * row + 2].fill(byte(round, rank, row));
                            }
                            if (round + rank) % 3 == 0 {
                                std::thread::yield_now();
                            }
                            let (from, to) = (part.as_ptr(), all.as_mut_ptr());
                            let given = Part { from, all: to, rows: ROWS, row_bytes: 2 };
                            // SAFETY: the buffers have these sizes and belong to this thread.
                            unsafe { threads.exchange(rank, given) };
                            let expected =
                                (0..ROWS).flat_map(|row| (0..ranks).map(move |other| (row, other)));
                            let expected = expected.flat_map(|(row, other)| [byte(round, other, row); 2]);
                            assert!(all.iter().copied().eq(expected), "round {round}, rank {rank}");
                        }
                    });
                }
            });
        }
    }
}
