//! Decode steps allocate nothing once they have started, for one sequence or several together: counted on all
//! threads. One test, alone in its process, so that nothing else runs meanwhile.

// Shared with the program `all`.
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "all/cases/mod.rs"]
mod cases;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use cases::{artifact, backends, directory, scheme};
use mlcc_driver::compile::BuildOptions;
use mlcc_runtime::{LoadOptions, Model, Session};

struct AllocationCounter;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting is an atomic addition.
unsafe impl GlobalAlloc for AllocationCounter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: AllocationCounter = AllocationCounter;

/// Allocations of one round of `step` after two others.
fn allocations(mut step: impl FnMut()) -> usize {
    step();
    step();
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    step();
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

const SEQUENCES: usize = 3;

#[test]
fn decode_steps() {
    let backend = backends().next().expect("a back end is built in");
    for case in ["llama3-gqa-tied", "rwkv7-hf"] {
        let dir = directory(case);
        if !dir.join("golden.json").exists() {
            eprintln!("skipped: the reference case {case} is not there");
            continue;
        }
        let mut options = BuildOptions::new(dir.to_str().unwrap());
        options.quant = scheme("q4i8");
        options.quant_name = "q4i8".into();
        options.context = Some(64);
        options.batch = Some(SEQUENCES as u32);
        options.backend = backend;
        let folder = tempfile::tempdir().unwrap();
        let (path, _) = artifact(&options, folder.path(), "case.so");
        for threads in [1, 2] {
            let model = Model::load(&path, &LoadOptions { threads: Some(threads), ..LoadOptions::default() });
            let model = model.unwrap();
            let mut alone = model.session().unwrap();
            let single = allocations(|| {
                for token in 1..9 {
                    alone.decode(token).unwrap();
                }
            });
            assert_eq!(single, 0, "{case}: one sequence, {threads} threads");
            let mut batch = model.batch(SEQUENCES).unwrap();
            let mut sessions: Vec<Session> = (0..SEQUENCES).map(|_| model.session().unwrap()).collect();
            let mut members: Vec<&mut Session> = sessions.iter_mut().collect();
            let together = allocations(|| {
                for token in 1..9 {
                    batch.decode(&mut members, &[token; SEQUENCES]).unwrap();
                }
            });
            assert_eq!(together, 0, "{case}: {SEQUENCES} sequences, {threads} threads");
        }
    }
}
