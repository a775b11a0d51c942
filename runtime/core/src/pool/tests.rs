use super::*;
use std::time::Duration;

#[test]
fn every_worker_runs_once() {
    for workers in [1, 2, 3, 8] {
        let pool = WorkerPool::new(workers).unwrap();
        let counts: Vec<AtomicUsize> = (0..workers).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..200 {
            pool.run(&|w| {
                counts[w].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        }
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 200));
    }
}

#[test]
fn parked_workers_wake() {
    let pool = WorkerPool::new(3).unwrap();
    let count = AtomicUsize::new(0);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(20));
        pool.run(&|_| {
            count.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
    }
    assert_eq!(count.into_inner(), 9);
}

#[test]
fn barriers_order_phases() {
    let workers = 6;
    let pool = WorkerPool::new(workers).unwrap();
    let phases = AtomicUsize::new(0);
    pool.run(&|w| {
        for phase in 0..100 {
            phases.fetch_add(1, Ordering::Relaxed);
            pool.barrier().wait(w);
            assert!(phases.load(Ordering::Relaxed) >= (phase + 1) * workers);
            pool.barrier().wait(w);
        }
    })
    .unwrap();
    assert_eq!(phases.into_inner(), 100 * workers);
}

/// Runs of ever other numbers of workers, with pieces and barriers, some of them after workers went to sleep.
#[test]
fn the_number_of_workers_changes_from_run_to_run() {
    changing_numbers(6, 600);
}

/// More than there are cores in most machines, with groups in one, two and three levels.
#[test]
fn many_workers_on_few_cores() {
    changing_numbers(32, 60);
    changing_numbers(128, 40);
}

fn changing_numbers(most: usize, rounds: usize) {
    let pool = WorkerPool::new(most).unwrap();
    let kind = StepKind { model: 0, step: "test", tokens: 1 };
    for round in 0..rounds {
        let wanted = 1 + round * 7 % most;
        pool.fix_workers(Some(wanted));
        if round % (rounds / 6) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let each = 1 + round as u32 % 4;
        let counts: Vec<AtomicUsize> = (0..wanted * each as usize).map(|_| AtomicUsize::new(0)).collect();
        let phases = AtomicUsize::new(0);
        pool.run_step(kind, usize::MAX, &|worker, workers| {
            assert_eq!(workers, wanted);
            for phase in 1..=3 {
                while let Some(piece) = pool.chunks().take_chunk(worker, each) {
                    counts[piece as usize].fetch_add(1, Ordering::Relaxed);
                }
                phases.fetch_add(1, Ordering::Relaxed);
                pool.barrier().wait(worker);
                assert!(phases.load(Ordering::Relaxed) >= phase * workers);
            }
        })
        .unwrap();
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 3), "{wanted} workers");
    }
    pool.fix_workers(None);
    pool.run_step(kind, usize::MAX, &|_, workers| assert_eq!(workers, most)).unwrap();
}

/// A worker that comes when the others sleep wakes them.
#[test]
fn late_workers_are_slept_for() {
    let pool = WorkerPool::new(4).unwrap();
    let nap = || std::thread::sleep(Duration::from_millis(1));
    for late in [0, 1, 3] {
        let before = pool.barrier().slept_time();
        pool.run(&|worker| {
            while worker == late && pool.barrier().slept_time() == before {
                nap();
            }
            pool.barrier().wait(worker);
        })
        .unwrap();
    }
    for late in [1, 3] {
        // At the end of a run there is no barrier.
        pool.run(&|worker| {
            while worker == late && pool.shared.finished[late].0.sleepers() == 0 {
                nap();
            }
        })
        .unwrap();
    }
}

#[test]
fn panics_are_contained() {
    // Workers that lead others in a barrier, and those that do not.
    for (workers, bad) in [(3, 0), (3, 1), (20, 0), (20, 8), (20, 11)] {
        let pool = WorkerPool::new(workers).unwrap();
        let result = pool.run(&|w| {
            assert!(w != bad, "worker {w} is bad");
            pool.barrier().wait(w);
        });
        assert!(
            matches!(&result, Err(Error::WorkerPanic { message }) if message.contains("is bad")),
            "{result:?}"
        );
        let count = AtomicUsize::new(0);
        pool.run(&|w| {
            pool.barrier().wait(w);
            count.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(count.into_inner(), workers, "the pool works again");
    }
    let one = WorkerPool::new(1).unwrap();
    assert!(matches!(one.run(&|_| panic!("alone")), Err(Error::WorkerPanic { .. })));
}

#[test]
fn callers_take_turns() {
    let pool = WorkerPool::new(2).unwrap();
    let busy = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                for _ in 0..100 {
                    pool.run(&|w| {
                        assert!(busy.fetch_add(1, Ordering::SeqCst) < 2);
                        pool.barrier().wait(w);
                        busy.fetch_sub(1, Ordering::SeqCst);
                    })
                    .unwrap();
                }
            });
        }
    });
}

/// One model's steps are long, those of the other short: once both have steps to run, they take turns.
#[test]
fn models_that_share_a_pool_progress_alike() {
    const STEPS: usize = 100;
    let pool = WorkerPool::new(2).unwrap();
    let order = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for model in 0..2 {
            let (pool, order) = (&pool, &order);
            s.spawn(move || {
                for _ in 0..STEPS {
                    let kind = StepKind { model, step: "test", tokens: 1 };
                    pool.run_step(kind, usize::MAX, &|worker, _| {
                        if worker != 0 {
                            return std::thread::sleep(Duration::from_micros(200 * model as u64));
                        }
                        let other_is_done =
                            || order.lock().unwrap().iter().filter(|&&m| m != model).count() == STEPS;
                        while pool.run_state.waiting_count() == 0 && !other_is_done() {
                            std::thread::yield_now();
                        }
                        order.lock().unwrap().push(model);
                    })
                    .unwrap();
                }
            });
        }
    });
    let order = order.into_inner().unwrap();
    assert!(order.chunks(2).all(|pair| pair == &order[..2]), "{order:?}");
}

/// A model whose memory is planned for fewer workers than the pool has.
#[test]
fn steps_have_at_most_the_workers_that_they_may_have() {
    let pool = WorkerPool::new(4).unwrap();
    let kind = StepKind { model: 0, step: "test", tokens: 1 };
    for most in [1, 3, 4, 9] {
        let ran = AtomicUsize::new(0);
        let count = |worker: usize, workers: usize| {
            assert!(worker < workers && workers == most.min(4));
            ran.fetch_add(1, Ordering::Relaxed);
        };
        pool.run_step(kind, most, &count).unwrap();
        pool.run_suited_first(most, &count).unwrap();
        pool.run_first(most, &count).unwrap();
        assert_eq!(ran.into_inner(), 3 * most.min(4));
    }
}

/// Workers are where they were put, the caller while it runs only.
#[cfg(target_os = "linux")]
#[test]
fn pinned_workers_stay_in_their_places() {
    let before = CpuSet::of_this_thread();
    let cpus: Vec<usize> = (0..8192).filter(|&cpu| before.contains(cpu)).collect();
    let place = |worker: usize| WorkerAffinity {
        cpus: [cpus[worker % cpus.len()]].into_iter().collect(),
        node: worker,
    };
    let places: Vec<WorkerAffinity> = (0..3).map(place).collect();
    let pool = WorkerPool::pinned(places.clone()).unwrap();
    for _ in 0..3 {
        pool.run(&|worker| assert_eq!(CpuSet::of_this_thread(), places[worker].cpus)).unwrap();
        assert_eq!(CpuSet::of_this_thread(), before);
    }
    pool.run_first(1, &|_, _| assert_eq!(CpuSet::of_this_thread(), places[0].cpus)).unwrap();
    let nowhere = WorkerAffinity { cpus: CpuSet::default(), node: 0 };
    let refused = WorkerPool::pinned([places[0].clone(), nowhere].to_vec());
    assert!(matches!(refused.err(), Some(Error::Pinning { index: 1, .. })));
    assert_eq!(CpuSet::of_this_thread(), before);
}
