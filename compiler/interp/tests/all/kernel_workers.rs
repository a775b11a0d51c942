//! CPU kernels run by several workers: slices, order, races.

use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, KernelFault, run_with};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

fn all_orders(workers: usize) -> [ExecutionOptions; 3] {
    [ExecutionOrder::Forward, ExecutionOrder::Reverse, ExecutionOrder::Shuffled(7)]
        .map(|order| ExecutionOptions { workers, order })
}

/// `y[i] = sum over k of w[i, k] * x[k]`.
fn matvec(rows: usize, cols: usize) -> Kernel {
    let mut kb = KernelBuilder::new("matvec");
    let x = kb.param("x", DType::F32, cols, ParamAccess::In, 64);
    let w = kb.param("w", DType::F32, rows * cols, ParamAccess::In, 64);
    let y = kb.param("y", DType::F32, rows, ParamAccess::Out, 64);
    let (rows, zero) = (kb.int(rows as i64), kb.int(0));
    kb.par("i", rows, |kb, i| {
        let acc = kb.alloc("acc", DType::F32, 1, MemorySpace::Local);
        let nothing = kb.float(0.0);
        kb.store(acc, zero, nothing);
        let extent = kb.int(cols as i64);
        kb.serial("k", extent, |kb, k| {
            let row = kb.mul_int(i, cols as i64);
            let at = kb.add(row, k);
            let (a, b, c) = (kb.load(w, at), kb.load(x, k), kb.load(acc, zero));
            let sum = kb.fma(a, b, c);
            kb.store(acc, zero, sum);
        });
        let sum = kb.load(acc, zero);
        kb.store(y, i, sum);
    });
    kb.finish()
}

#[test]
fn every_number_of_workers_in_every_order_gives_the_same() {
    let (rows, cols) = (13, 9);
    let kernel = matvec(rows, cols);
    let x: Vec<f32> = (0..cols).map(|i| i as f32 - 4.0).collect();
    let w: Vec<f32> = (0..rows * cols).map(|i| (i % 7) as f32 - 3.0).collect();
    let want: Vec<f32> = (0..rows).map(|i| (0..cols).map(|k| w[i * cols + k] * x[k]).sum()).collect();
    for workers in [1, 2, 3, 13, 20] {
        for options in all_orders(workers) {
            let mut buffers = [
                KernelBuffer::from_f32(&x),
                KernelBuffer::from_f32(&w),
                KernelBuffer::from_f32(&vec![f32::NAN; rows]),
            ];
            run_with(&kernel, &mut buffers, &SymValues::for_tokens(1), &options).unwrap();
            assert_eq!(buffers[2].to_f32(), want, "{options:?}");
        }
    }
}

fn race(build: impl FnOnce(&mut KernelBuilder, BufId)) -> Kernel {
    let mut kb = KernelBuilder::new("race");
    let x = kb.param("x", DType::I32, 8, ParamAccess::InOut, 64);
    build(&mut kb, x);
    kb.finish()
}

fn outcome(kernel: &Kernel, options: &ExecutionOptions) -> Result<(), KernelFault> {
    let mut buffers = [KernelBuffer::from_i32(&[0; 8])];
    run_with(kernel, &mut buffers, &SymValues::for_tokens(1), options).map_err(|e| e.fault)
}

#[test]
fn touching_what_another_worker_writes_is_a_race_in_every_order() {
    let neighbour = race(|kb, x| {
        let seven = kb.int(7);
        kb.par("i", seven, |kb, i| {
            let next = kb.add_int(i, 1);
            let v = kb.load(x, next);
            kb.store(x, i, v);
        });
    });
    let two_loops = race(|kb, x| {
        let eight = kb.int(8);
        let one = kb.int_of(1, DType::I32);
        kb.par("i", eight, |kb, i| kb.store(x, i, one));
        kb.par("i", eight, |kb, i| {
            let seven = kb.int(7);
            let mirror = kb.sub(seven, i);
            let v = kb.load(x, mirror);
            kb.let_("v", v);
        });
    });
    let outside = race(|kb, x| {
        let (zero, one) = (kb.int(0), kb.int_of(1, DType::I32));
        kb.store(x, zero, one);
    });
    for kernel in [neighbour, two_loops, outside] {
        assert_eq!(outcome(&kernel, &ExecutionOptions::with_workers(1)), Ok(()), "one worker cannot race");
        for options in all_orders(2) {
            let fault = outcome(&kernel, &options).expect_err("race");
            assert!(matches!(fault, KernelFault::Race { .. }), "{fault}");
        }
    }
}

#[test]
fn disjoint_slices_and_common_reads_are_no_race() {
    let kernel = race(|kb, x| {
        let (four, seven) = (kb.int(4), kb.int(7));
        kb.par("i", four, |kb, i| {
            let common = kb.load(x, seven);
            let twice = kb.mul_int(i, 1);
            let own = kb.load(x, twice);
            let sum = kb.add(common, own);
            kb.store(x, i, sum);
        });
    });
    for options in all_orders(3) {
        assert_eq!(outcome(&kernel, &options), Ok(()));
    }
}

/// Prints how long a 64x64 matvec takes (`--nocapture`); no test of speed.
#[test]
fn prints_the_time_of_a_small_matvec() {
    let kernel = matvec(64, 64);
    let mut buffers = [
        KernelBuffer::from_f32(&[1.0; 64]),
        KernelBuffer::from_f32(&[0.5; 4096]),
        KernelBuffer::zeros(DType::F32, 64),
    ];
    let mut best = std::time::Duration::MAX;
    for _ in 0..10 {
        let start = std::time::Instant::now();
        run_with(&kernel, &mut buffers, &SymValues::for_tokens(1), &ExecutionOptions::default()).unwrap();
        best = best.min(start.elapsed());
    }
    println!("64x64 matvec: {best:?}");
    assert_eq!(buffers[2].to_f32(), [32.0; 64]);
}
