//! The neighbours of workers when there are many: a tree with groups of [`FAN`].
//!
//! Workers are grouped by their numbers, the first of each group leads it, leaders are grouped in the same
//! way. A group never leaves its socket where workers are in the order of sockets and a socket has a multiple
//! of [`FAN`] of them.

/// Workers of a group. As many lines as a core has loads under way at once; up to here a flat barrier is
/// best.
pub const FAN: usize = 8;

/// The workers that `worker` leads, of `workers` below one root, worker 0.
pub fn children(worker: usize, workers: usize) -> impl Iterator<Item = usize> {
    levels(worker, workers).flat_map(move |stride| group(worker, stride, workers).skip(1))
}

/// The distance of members in each group that `worker` leads, from the smallest.
pub fn levels(worker: usize, below: usize) -> impl Iterator<Item = usize> {
    let strides = std::iter::successors(Some(1), |stride| Some(stride * FAN));
    strides.take_while(move |&stride| stride < below && leader(worker, stride) == worker)
}

/// The leader of the group of `worker` whose members are `stride` apart.
pub fn leader(worker: usize, stride: usize) -> usize {
    // A power of two.
    worker & !(stride * FAN - 1)
}

/// The members of the group that `leader` leads, with itself.
pub fn group(leader: usize, stride: usize, workers: usize) -> impl Iterator<Item = usize> {
    (leader..workers.min(leader + stride * FAN)).step_by(stride)
}

/// The distance of those who have no leader: at most [`FAN`] workers.
pub fn top(workers: usize) -> usize {
    let mut stride = 1;
    while workers.div_ceil(stride) > FAN {
        stride *= FAN;
    }
    stride
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_has_one_leader() {
        for workers in [1, 2, 8, 9, 16, 17, 63, 64, 65, 100, 128, 513, 1024] {
            let mut led = vec![0; workers];
            for worker in 0..workers {
                for child in children(worker, workers) {
                    assert!(child > worker, "{child} below {worker} of {workers}");
                    led[child] += 1;
                }
            }
            assert_eq!(led[0], 0);
            assert!(led[1..].iter().all(|&leaders| leaders == 1), "{workers}: {led:?}");
        }
    }

    #[test]
    fn few_workers_are_one_group() {
        assert_eq!([1, 8, 9, 64, 65, 1024].map(top), [1, 1, 8, 8, 64, 512]);
        assert_eq!(children(0, 8).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(children(8, 20).collect::<Vec<_>>(), [9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(children(0, 20).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8, 16]);
        assert_eq!(children(9, 20).count(), 0);
    }
}
