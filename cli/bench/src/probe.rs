//! The limits of this machine: bytes read per second, multiplications and additions per second.
//!
//! Each probe runs on as many threads as the model, several times; the best time counts, because all
//! disturbances only make it slower.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};

use crate::error::BenchError;
use crate::loops;

/// Arithmetic that bounds a test.
pub use mlcc_kernels::lower::cost::ComputeType;

/// Kinds of it.
pub const KINDS: usize = ComputeType::ALL.len();

/// The limits of the machine with some number of threads at one moment.
#[derive(Clone, Copy, Debug)]
pub struct MachineProbe {
    /// Bandwidth of reads; on a GPU that of copies, read and written.
    pub read_bandwidth: f64,
    /// Operations per second of each arithmetic that the model uses ([`ComputeType::ALL`]).
    pub peaks: [f64; KINDS],
    pub ping_pong: Option<f64>,
}

impl MachineProbe {
    /// One without limits that we could probe.
    pub const UNKNOWN: MachineProbe =
        MachineProbe { read_bandwidth: f64::INFINITY, peaks: [f64::INFINITY; KINDS], ping_pong: None };
}

/// Larger than the last-level caches of nearly all machines, on every thread.
const BUFFER: usize = 512 << 20;
/// Few, so that a probe takes a tenth of a second and fits between two repetitions of a test.
const READ_ROUNDS: usize = 3;
const PEAK_ROUNDS: usize = 3;
/// Long enough that starting the threads together does not show.
const PEAK_TIME: Duration = Duration::from_millis(20);

/// Memory that threads read together, each its part.
pub struct BandwidthProbe {
    memory: MmapMut,
    /// Bytes of a thread.
    slice: usize,
}

impl BandwidthProbe {
    pub fn new(threads: usize) -> std::io::Result<BandwidthProbe> {
        let slice = (BUFFER / threads).max(64 << 20) & !0xfff;
        let mut memory = MmapMut::map_anon(slice * threads)?;
        // A hint; without large pages the figure is a little lower.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(Advice::HugePage);
        std::thread::scope(|scope| {
            memory.chunks_exact_mut(slice).for_each(|s| drop(scope.spawn(|| s.fill(1))));
        });
        Ok(BandwidthProbe { memory, slice })
    }

    /// Bytes per second.
    pub fn bandwidth(&self) -> f64 {
        let mut slices: Vec<&[u8]> = self.memory.chunks_exact(self.slice).collect();
        let best = time_threads(&mut slices, READ_ROUNDS, |s| {
            black_box(loops::read_bytes(s));
        });
        self.memory.len() as f64 / best.as_secs_f64()
    }
}

pub fn bandwidth_probe(threads: usize) -> Result<BandwidthProbe, BenchError> {
    BandwidthProbe::new(threads).map_err(BenchError::io("allocate memory for", "the bandwidth probe"))
}

/// Operations per second (a multiplication and an addition are two) of `threads` threads, with the best
/// instruction of this machine for that arithmetic; `None` if there is no special one.
pub fn measure_peak(arithmetic: ComputeType, threads: usize) -> Option<f64> {
    let body = loops::peak_loop(arithmetic)?;
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
    let best = time_threads(&mut workers, PEAK_ROUNDS, |()| {
        black_box((body.run)(rounds));
    });
    Some(body.ops_per_round as f64 * rounds as f64 * threads as f64 / best.as_secs_f64())
}

/// Keeps `threads` threads busy for `seconds` seconds: some hosts give each its own core only after a while.
pub fn keep_busy(threads: usize, seconds: f64) {
    let Some(body) = loops::peak_loop(ComputeType::F32) else { return };
    let end = Instant::now() + Duration::from_secs_f64(seconds.min(3600.0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while Instant::now() < end {
                    black_box((body.run)(1 << 14));
                }
            });
        }
    });
}

/// Times that a cache line goes to and fro in one round of [`measure_ping_pong`].
const BOUNCES: u32 = 2000;

/// Nanoseconds in which a cache line goes to another thread and comes back; the best of some rounds.
pub fn measure_ping_pong() -> f64 {
    let ball = AtomicU32::new(0);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        ball.store(0, Ordering::SeqCst);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| bounce_line(&ball, 1));
            bounce_line(&ball, 0);
        });
        best = best.min(begin.elapsed().as_secs_f64() * 1e9 / f64::from(BOUNCES));
    }
    best
}

/// Waits for numbers of one parity and answers with the next. Where there is one core only, the other one is
/// let run.
fn bounce_line(ball: &AtomicU32, parity: u32) {
    for round in 0..BOUNCES {
        let mut spins = 0;
        while ball.load(Ordering::Acquire) != 2 * round + parity {
            spins += 1;
            match spins % 1024 {
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        ball.store(2 * round + parity + 1, Ordering::Release);
    }
}

/// Runs `work` on one thread per item, all at once, `rounds` times; the shortest time from the first begin to
/// the last end of a round.
fn time_threads<T: Send>(items: &mut [T], rounds: usize, work: impl Fn(&mut T) + Sync) -> Duration {
    let barrier = Barrier::new(items.len());
    // The workers take the times: a thread that only watches would be late where every core is busy.
    let worker = |item: &mut T| -> Vec<(Instant, Instant)> {
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
        let mut counts = vec![10; 3];
        let best = time_threads(&mut counts, 4, |c| *c += 1);
        assert_eq!(counts, [14, 14, 14]);
        assert!(best < Duration::MAX);
    }

    #[test]
    fn the_ball_comes_back() {
        assert!(measure_ping_pong() > 0.0);
        keep_busy(2, 0.001);
    }

    #[test]
    fn f32_has_a_peak_everywhere() {
        assert!(measure_peak(ComputeType::F32, 1).is_some_and(|ops| ops > 1e6));
    }
}
