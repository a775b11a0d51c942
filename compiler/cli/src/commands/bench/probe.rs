//! What this machine can do at best: bytes read per second, multiplications and additions per second.
//!
//! Each probe runs on as many threads as the model, several times; the best time counts, because everything that
//! disturbs only makes it slower.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};

use super::loops;

/// Arithmetic that bounds a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    F32,
    BF16,
    I8,
}

impl Arithmetic {
    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::F32 => "f32",
            Arithmetic::BF16 => "bf16",
            Arithmetic::I8 => "i8",
        }
    }
}

/// Larger than the last-level caches of nearly all machines, on every thread.
const BUFFER: usize = 512 << 20;
const READ_ROUNDS: usize = 6;
const PEAK_ROUNDS: usize = 6;
/// Long enough that starting the threads together does not show.
const PEAK_TIME: Duration = Duration::from_millis(40);

/// Bytes per second that `threads` threads read together from memory.
pub fn read_bandwidth(threads: usize) -> std::io::Result<f64> {
    let slice = (BUFFER / threads).max(64 << 20) & !0xfff;
    let mut memory = MmapMut::map_anon(slice * threads)?;
    // A hint; without large pages the figure is a little lower.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(Advice::HugePage);
    let mut slices: Vec<&mut [u8]> = memory.chunks_exact_mut(slice).collect();
    let best = together(
        &mut slices,
        READ_ROUNDS,
        |s| s.fill(1),
        |s| {
            black_box(loops::read(s));
        },
    );
    Ok((slice * threads) as f64 / best.as_secs_f64())
}

/// Operations per second (a multiplication and an addition are two) of `threads` threads, with the best instruction of
/// this machine for that arithmetic; `None` if there is no special one.
pub fn peak(arithmetic: Arithmetic, threads: usize) -> Option<f64> {
    let body = loops::peak(arithmetic)?;
    let mut rounds = 1 << 14;
    // How many rounds take the wished time, on one thread.
    loop {
        let begin = Instant::now();
        black_box((body.run)(rounds));
        if begin.elapsed() >= PEAK_TIME || rounds > 1 << 40 {
            break;
        }
        rounds *= 2;
    }
    let mut workers = vec![(); threads];
    let best = together(
        &mut workers,
        PEAK_ROUNDS,
        |()| (),
        |()| {
            black_box((body.run)(rounds));
        },
    );
    Some(body.ops_per_round as f64 * rounds as f64 * threads as f64 / best.as_secs_f64())
}

/// Runs `work` on one thread per item, all at once, `rounds` times; the shortest time from the first begin to the last
/// end of a round. `prepare` runs once before, on the thread that will do the work.
fn together<T: Send>(
    items: &mut [T],
    rounds: usize,
    prepare: impl Fn(&mut T) + Sync,
    work: impl Fn(&mut T) + Sync,
) -> Duration {
    let barrier = Barrier::new(items.len());
    // The workers take the times: a thread that only watches would be late where every core is busy.
    let worker = |item: &mut T| -> Vec<(Instant, Instant)> {
        prepare(item);
        let round = |_| {
            barrier.wait();
            let begin = Instant::now();
            work(item);
            (begin, Instant::now())
        };
        (0..rounds).map(round).collect()
    };
    let times: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let handles: Vec<_> = items.iter_mut().map(|item| scope.spawn(|| worker(item))).collect();
        handles.into_iter().filter_map(|h| h.join().ok()).collect()
    });
    let length = |round: usize| {
        let begin = times.iter().map(|t| t[round].0).min();
        let end = times.iter().map(|t| t[round].1).max();
        begin.zip(end).map_or(Duration::MAX, |(begin, end)| end - begin)
    };
    (0..rounds).map(length).min().unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_items_work_every_round() {
        let mut counts = vec![0; 3];
        let best = together(&mut counts, 4, |c| *c = 10, |c| *c += 1);
        assert_eq!(counts, [14, 14, 14]);
        assert!(best < Duration::MAX);
    }

    #[test]
    fn f32_has_a_peak_everywhere() {
        assert!(peak(Arithmetic::F32, 1).is_some_and(|ops| ops > 1e6));
    }
}
