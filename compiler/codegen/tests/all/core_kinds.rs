//! Dynamic shares on processors with two kinds of cores: workers of the real dealer of pieces on a made-up
//! clock.

use mlcc_ir::step::GuidedChunks;
use mlcc_runtime::pool::WorkerPool;

/// The time at which all work of a launch is done, in units of the time of one share on a core of speed 1.
/// The first free worker takes the next piece, as threads would.
fn makespan(pool: &WorkerPool, speeds: &[f64], pieces: GuidedChunks) -> f64 {
    let workers = speeds.len();
    let mut free = vec![0.0f64; workers];
    let mut busy: Vec<usize> = (0..workers).collect();
    let (mut end, mut done) = (0.0f64, 0.0);
    while !busy.is_empty() {
        let next = (0..busy.len()).min_by(|&a, &b| free[busy[a]].total_cmp(&free[busy[b]])).unwrap();
        let worker = busy[next];
        let Some(number) = pool.chunks().take_chunk(worker, pieces.chunk_count() as u32) else {
            busy.remove(next);
            continue;
        };
        let work = workers as f64 / pieces.chunk_part(number as usize, workers).1 as f64;
        free[worker] += work / speeds[worker];
        end = end.max(free[worker]);
        done += work;
    }
    assert!((done - workers as f64).abs() < 1e-9, "all work is done once");
    end
}

/// The time with static shares, and with dynamic ones of multiples of the smallest piece, as multiples of the
/// least possible.
fn over_the_least(speeds: &[f64], smallest: &[usize]) -> (f64, Vec<f64>) {
    let pool = WorkerPool::new(speeds.len()).unwrap();
    let least = speeds.len() as f64 / speeds.iter().sum::<f64>();
    let slowest = speeds.iter().copied().fold(f64::INFINITY, f64::min);
    let dynamic = smallest.iter().map(|&n| makespan(&pool, speeds, GuidedChunks::new(n).unwrap()) / least);
    (1.0 / slowest / least, dynamic.collect())
}

/// A limit other than bandwidth: slower cores take fewer pieces, and the end comes soon after the least
/// possible.
#[test]
fn slower_cores_take_fewer_pieces() {
    // Shares of a half, one, two, four and sixteen pieces of 128 KiB.
    let sizes = [4, 8, 16, 32, 128];
    let kinds = |fast: usize, slow: usize, speed: f64| [vec![1.0; fast], vec![speed; slow]].concat();
    for (speeds, fixed_over, dynamic_below) in [
        (kinds(4, 4, 0.5), 1.49, 1.13),
        (kinds(8, 8, 0.5), 1.49, 1.13),
        (kinds(6, 8, 0.6), 1.28, 1.07),
        (kinds(8, 16, 0.5), 1.33, 1.09),
        (kinds(2, 6, 0.3), 1.58, 1.20),
        // One core that another program has half of.
        (kinds(7, 1, 0.5), 1.87, 1.18),
    ] {
        let (fixed, dynamic) = over_the_least(&speeds, &sizes);
        assert!(fixed > fixed_over, "{speeds:?}: {fixed:.3} with static shares");
        assert!(dynamic.iter().all(|&over| over < dynamic_below), "{speeds:?}: {dynamic:.3?}");
        assert!(dynamic[4] < 1.07, "{speeds:?}: {dynamic:.3?} with many pieces");
    }
    let (fixed, dynamic) = over_the_least(&[1.0; 8], &sizes);
    assert!((fixed - 1.0).abs() < 1e-9 && dynamic.iter().all(|over| (over - 1.0).abs() < 1e-9));
}
