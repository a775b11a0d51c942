//! Deals out pieces of work to the workers of one run (work stealing by shares): each worker has a share of
//! every launch, cut into equal pieces, and takes them in their order; once they are used up it takes the
//! next pieces of the shares of its neighbours. So a share is read from begin to end, mostly by one worker,
//! and no worker waits while there is work near by. Up to [`MOST_NEIGHBOURS`] workers are all neighbours.
//! More are divided into equal neighbourhoods, since every worker looks at every counter of its neighbourhood
//! at the end of every launch; and workers in the order of sockets have theirs on their socket.
//!
//! A counter per worker holds the number of the launch that it is for and how many pieces of the share are
//! taken. The first worker that takes a piece of a share in a launch moves its counter on to that launch, so
//! nothing has to be reset between launches. A worker goes on to the next launch only when all shares of its
//! neighbourhood are used up; so a counter that is ahead of a worker says that this share has nothing left
//! for it.
//!
//! Counters order only themselves: the results of the pieces are in order by the barrier after the launch.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::CachePadded;

/// Workers that help each other.
const MOST_NEIGHBOURS: usize = 32;

/// See the [module](self).
pub struct ChunkScheduler {
    /// Workers of this run: the first ones.
    workers: AtomicUsize,
    shares: Vec<CachePadded<WorkerChunks>>,
}

#[derive(Default)]
struct WorkerChunks {
    /// Number of a launch (upper half), and how many of its pieces are taken (lower half).
    taken: AtomicU64,
    /// The launch that the owner is at; no other worker reads it.
    launch: AtomicU32,
}

impl ChunkScheduler {
    pub(crate) fn new(workers: usize) -> Self {
        let shares = (0..workers).map(|_| CachePadded::default()).collect();
        Self { workers: AtomicUsize::new(workers), shares }
    }

    /// A piece for `worker` of the launch that it is at, of `each` pieces per share: `owner * each` and on.
    /// `None` once for each launch, when nothing is left.
    pub fn take_chunk(&self, worker: usize, each: u32) -> Option<u32> {
        let shares = &self.shares[..self.workers.load(Ordering::Relaxed).min(self.shares.len())];
        let own = &shares.get(worker)?.0;
        let launch = own.launch.load(Ordering::Relaxed);
        let near = neighbours(worker, shares.len());
        for owner in (worker..near.end).chain(near.start..worker) {
            if let Some(piece) = shares[owner].0.take_chunk(launch, each) {
                return Some(owner as u32 * each + piece);
            }
        }
        own.launch.store(launch.wrapping_add(1), Ordering::Relaxed);
        None
    }

    /// Forgets all launches; the next ones are shared by the first `workers`. No worker may be inside.
    pub(super) fn reset(&self, workers: usize) {
        self.workers.store(workers, Ordering::Relaxed);
        for CachePadded(share) in &self.shares {
            share.taken.store(0, Ordering::Relaxed);
            share.launch.store(0, Ordering::Relaxed);
        }
    }
}

/// The workers that share the work of `worker`, with itself.
fn neighbours(worker: usize, workers: usize) -> Range<usize> {
    if workers <= MOST_NEIGHBOURS {
        return 0..workers;
    }
    let parts = workers.div_ceil(MOST_NEIGHBOURS);
    let begin = |part: usize| (part * workers).div_ceil(parts);
    let part = worker * parts / workers;
    begin(part)..begin(part + 1)
}

impl WorkerChunks {
    /// The next piece of this share in a launch.
    fn take_chunk(&self, launch: u32, each: u32) -> Option<u32> {
        let mut seen = self.taken.load(Ordering::Relaxed);
        loop {
            // Launches are numbered in a circle.
            let behind = launch.wrapping_sub((seen >> 32) as u32) as i32;
            let piece = match behind {
                0 => seen as u32,
                1.. => 0,
                _ => return None,
            };
            if piece >= each {
                return None;
            }
            let next = (u64::from(launch) << 32) | u64::from(piece + 1);
            match self.taken.compare_exchange_weak(seen, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(piece),
                Err(now) => seen = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::WorkerPool;

    fn all(pieces: &ChunkScheduler, worker: usize, each: u32) -> Vec<u32> {
        std::iter::from_fn(|| pieces.take_chunk(worker, each)).collect()
    }

    #[test]
    fn own_pieces_come_first_and_others_later() {
        let pieces = ChunkScheduler::new(3);
        assert_eq!(pieces.take_chunk(1, 2), Some(2));
        assert_eq!(all(&pieces, 2, 2), [4, 5, 0, 1, 3]);
        // Worker 2 is at the next launch while the others have not seen the end of this one.
        assert_eq!(pieces.take_chunk(2, 1), Some(2));
        assert_eq!(pieces.take_chunk(2, 1), Some(0));
        assert_eq!(all(&pieces, 0, 2), [0u32; 0]);
        assert_eq!(pieces.take_chunk(1, 2), None);
        assert_eq!(all(&pieces, 1, 1), [1]);
        assert_eq!(all(&pieces, 0, 1), [0u32; 0]);
        assert_eq!(pieces.take_chunk(2, 1), None);
        assert_eq!(all(&pieces, 0, 2), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn neighbourhoods_are_equal_and_everyone_has_one() {
        for workers in [1usize, 2, 32, 33, 48, 64, 65, 100, 128, 1000] {
            let parts = workers.div_ceil(MOST_NEIGHBOURS);
            for worker in 0..workers {
                let near = neighbours(worker, workers);
                assert!(near.contains(&worker), "{worker} of {workers}: {near:?}");
                assert!((workers / parts..=MOST_NEIGHBOURS).contains(&near.len()), "{workers}: {near:?}");
                assert!(near.clone().all(|other| neighbours(other, workers) == near));
            }
        }
        let pieces = ChunkScheduler::new(64);
        let near: Vec<u32> = (40..64).chain(32..40).flat_map(|owner| [2 * owner, 2 * owner + 1]).collect();
        assert_eq!(all(&pieces, 40, 2), near, "none of the other socket");
    }

    #[test]
    fn numbers_of_launches_go_round() {
        let pieces = ChunkScheduler::new(2);
        for CachePadded(share) in &pieces.shares {
            share.taken.store(u64::from(u32::MAX) << 32, Ordering::Relaxed);
            share.launch.store(u32::MAX, Ordering::Relaxed);
        }
        for _ in 0..3 {
            assert_eq!(all(&pieces, 0, 2), [0, 1, 2, 3]);
            assert_eq!(all(&pieces, 1, 2), [0u32; 0]);
        }
    }

    /// Threads race over many launches: with and without a barrier between them every piece is computed once.
    #[test]
    fn every_piece_is_computed_once() {
        for (workers, barriers, launches) in [
            (2, true, 300),
            (2, false, 300),
            (5, true, 300),
            (5, false, 300),
            (70, true, 15),
            (70, false, 15),
        ] {
            let pool = WorkerPool::new(workers).unwrap();
            let each = |launch: usize| 1 + launch % 7;
            let counts: Vec<Vec<AtomicU32>> = (0..launches)
                .map(|launch| (0..workers * each(launch)).map(|_| AtomicU32::new(0)).collect())
                .collect();
            pool.run(&|worker| {
                for (launch, counts) in counts.iter().enumerate() {
                    while let Some(piece) = pool.chunks().take_chunk(worker, each(launch) as u32) {
                        counts[piece as usize].fetch_add(1, Ordering::Relaxed);
                    }
                    if barriers {
                        pool.barrier().wait(worker);
                    }
                }
            })
            .unwrap();
            assert!(counts.iter().flatten().all(|c| c.load(Ordering::Relaxed) == 1), "{workers} {barriers}");
        }
    }

    #[test]
    fn a_panic_leaves_whole_counters() {
        let pool = WorkerPool::new(2).unwrap();
        let failed = pool.run(&|worker| {
            pool.chunks().take_chunk(worker, 4);
            assert!(worker != 1, "broken off");
        });
        assert!(failed.is_err());
        let counts: Vec<AtomicU32> = (0..8).map(|_| AtomicU32::new(0)).collect();
        pool.run(&|worker| {
            while let Some(piece) = pool.chunks().take_chunk(worker, 4) {
                counts[piece as usize].fetch_add(1, Ordering::Relaxed);
            }
        })
        .unwrap();
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
    }
}
