//! Independent pieces of work on some threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Results of `work(i)` by `i`, where `order` holds each `i` once, in the order in which the work is started.
/// After an error no more is started; the first error by `i` is returned.
pub fn run<T: Send, E: Send>(
    threads: usize,
    order: &[usize],
    work: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let worker = || {
        let mut done = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let Some(&i) = order.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let result = work(i);
            if result.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            done.push((i, result));
        }
        done
    };
    let threads = threads.clamp(1, order.len().max(1));
    let mut all: Vec<_> = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
        let mut all = worker();
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        all
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_their_places_for_any_number_of_threads() {
        let order: Vec<usize> = (0..50).rev().collect();
        for threads in [0, 1, 3, 100] {
            let squares = run(threads, &order, |i| Ok::<_, ()>(i * i)).unwrap();
            assert_eq!(squares, (0..50).map(|i| i * i).collect::<Vec<_>>());
        }
        assert_eq!(run(4, &[], |_| Ok::<usize, ()>(0)), Ok(Vec::new()));
    }

    #[test]
    fn an_error_ends_the_work() {
        let order: Vec<usize> = (0..1000).collect();
        let begun = AtomicUsize::new(0);
        let result = run(1, &order, |i| {
            begun.fetch_add(1, Ordering::Relaxed);
            if i == 3 { Err(i) } else { Ok(i) }
        });
        assert_eq!((result, begun.into_inner()), (Err(3), 4));
    }
}
