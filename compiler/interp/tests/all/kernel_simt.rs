//! GPU kernels: lockstep threads, barriers, shared memory, shuffles, divergence, races.

use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, KernelFault, run_with};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::SymValues;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

const ORDERS: [ExecutionOrder; 3] =
    [ExecutionOrder::Forward, ExecutionOrder::Reverse, ExecutionOrder::Shuffled(3)];

/// A kernel of `blocks` x `threads` on `x: i32[64] inout`; `body` gets (x, block, and is called once per
/// block).
fn gpu(blocks: i64, body: impl FnOnce(&mut KernelBuilder, BufId, ExprId)) -> Kernel {
    let mut kb = KernelBuilder::new("gpu");
    let x = kb.param("x", DType::I32, 64, ParamAccess::InOut, 64);
    let extent = kb.int(blocks);
    kb.for_("block", extent, ForKind::Block(0), |kb, block| body(kb, x, block));
    kb.finish()
}

fn threads(kb: &mut KernelBuilder, count: i64, body: impl FnOnce(&mut KernelBuilder, ExprId)) {
    let extent = kb.int(count);
    kb.for_("t", extent, ForKind::Thread(0), body);
}

fn result(kernel: &Kernel, order: ExecutionOrder) -> Result<Vec<i64>, KernelFault> {
    let mut buffers = [KernelBuffer::from_i32(&(0..64).collect::<Vec<i32>>())];
    let options = ExecutionOptions { workers: 1, order };
    run_with(kernel, &mut buffers, &SymValues::for_tokens(1), &options).map_err(|e| e.fault)?;
    Ok(buffers[0].to_i64())
}

fn fault(kernel: &Kernel) -> KernelFault {
    let faults: Vec<KernelFault> =
        ORDERS.iter().map(|o| result(kernel, *o).expect_err("must fail")).collect();
    faults[0].clone()
}

/// Reverses each run of 32 elements through shared memory.
fn reverse(barrier: bool) -> Kernel {
    gpu(2, |kb, x, block| {
        let tile = kb.alloc("tile", DType::I32, 32, MemorySpace::Shared);
        let base = kb.mul_int(block, 32);
        threads(kb, 32, |kb, t| {
            let at = kb.add(base, t);
            let v = kb.load(x, at);
            kb.store(tile, t, v);
        });
        if barrier {
            kb.barrier();
        }
        threads(kb, 32, |kb, t| {
            let last = kb.int(31);
            let mirror = kb.sub(last, t);
            let v = kb.load(tile, mirror);
            let at = kb.add(base, t);
            kb.store(x, at, v);
        });
    })
}

#[test]
fn shared_memory_with_a_barrier_works_in_every_block_order() {
    let want: Vec<i64> = (0..32).rev().chain((32..64).rev()).collect();
    for order in ORDERS {
        assert_eq!(result(&reverse(true), order).unwrap(), want);
    }
}

#[test]
fn shared_memory_without_a_barrier_is_a_race() {
    let f = fault(&reverse(false));
    assert!(matches!(&f, KernelFault::Race { buffer, .. } if buffer == "tile"), "{f}");
}

#[test]
fn blocks_may_not_touch_what_others_write() {
    let kernel = gpu(2, |kb, x, block| {
        threads(kb, 1, |kb, _| {
            let v = kb.cast(block, DType::I32);
            let zero = kb.int(0);
            kb.store(x, zero, v);
        });
    });
    assert!(matches!(fault(&kernel), KernelFault::Race { .. }));
}

#[test]
fn a_barrier_in_divergent_code_is_refused() {
    let kernel = gpu(1, |kb, _, _| {
        threads(kb, 8, |kb, t| {
            let four = kb.int(4);
            let low = kb.lt(t, four);
            kb.if_(low, KernelBuilder::barrier);
        });
    });
    assert_eq!(fault(&kernel), KernelFault::NonUniformBarrier { active: 4, threads: 8 });
}

#[test]
fn loops_and_branches_diverge_by_masks() {
    // x[t] = t even ? sum of 0..t : -1, with local memory private to each thread though allocated outside.
    let kernel = gpu(1, |kb, x, _| {
        let acc = kb.alloc("acc", DType::I32, 1, MemorySpace::Local);
        let zero = kb.int(0);
        threads(kb, 64, |kb, t| {
            let nothing = kb.int_of(0, DType::I32);
            kb.store(acc, zero, nothing);
            kb.serial("i", t, |kb, i| {
                let (a, i) = (kb.load(acc, zero), kb.cast(i, DType::I32));
                let sum = kb.add(a, i);
                kb.store(acc, zero, sum);
            });
            let two = kb.int(2);
            let odd = kb.rem(t, two);
            let even = kb.binary(BinOp::Eq, odd, zero);
            kb.if_else(
                even,
                |kb| {
                    let v = kb.load(acc, zero);
                    kb.store(x, t, v);
                },
                |kb| {
                    let minus = kb.int_of(-1, DType::I32);
                    kb.store(x, t, minus);
                },
            );
        });
    });
    let want: Vec<i64> = (0..64).map(|t| if t % 2 == 0 { t * (t - 1) / 2 } else { -1 }).collect();
    for order in ORDERS {
        assert_eq!(result(&kernel, order).unwrap(), want);
    }
}

#[test]
fn vector_accesses_of_threads_do_not_mix() {
    let kernel = gpu(1, |kb, x, _| {
        threads(kb, 16, |kb, t| {
            let base = kb.mul_int(t, 4);
            let v = kb.load_vec(x, base, 4);
            let swapped = kb.shuffle(v, None, vec![3, 2, 1, 0]);
            let ten = kb.int_of(10, DType::I32);
            let scaled = kb.mul(swapped, ten);
            kb.store_vec(x, base, scaled);
        });
    });
    let want: Vec<i64> = (0..64).map(|i| (i / 4 * 4 + 3 - i % 4) * 10).collect();
    assert_eq!(result(&kernel, ExecutionOrder::Forward).unwrap(), want);
}

#[test]
fn warp_shuffles_sum_and_need_active_lanes() {
    let shuffle = InstrId::by_name("shfl_xor_i32").unwrap();
    let sum = |count: i64| {
        gpu(1, |kb, x, _| {
            threads(kb, count, |kb, t| {
                let mut v = kb.load(x, t);
                v = kb.let_("v", v);
                for step in [16, 8, 4, 2, 1] {
                    let by = kb.int_of(step, DType::I32);
                    let other = kb.instr(shuffle, vec![v, by]);
                    v = kb.add(v, other);
                    v = kb.let_("v", v);
                }
                kb.store(x, t, v);
            });
        })
    };
    let want: Vec<i64> = (0..64).map(|t| if t < 32 { 496 } else { 496 + 32 * 32 }).collect();
    assert_eq!(result(&sum(64), ExecutionOrder::Forward).unwrap(), want);
    assert_eq!(
        fault(&sum(16)),
        KernelFault::InactiveLane { instr: "shfl_xor_i32", thread: 0, source_thread: 16 }
    );
}

#[test]
fn two_dimensional_blocks_number_threads_x_first() {
    let kernel = gpu(1, |kb, x, _| {
        let (eight, four) = (kb.int(8), kb.int(4));
        kb.for_("ty", four, ForKind::Thread(1), |kb, y| {
            kb.for_("tx", eight, ForKind::Thread(0), |kb, t| {
                let row = kb.mul_int(y, 8);
                let at = kb.add(row, t);
                let y = kb.cast(y, DType::I32);
                kb.store(x, at, y);
            });
        });
    });
    let want: Vec<i64> = (0..64).map(|i| if i < 32 { i / 8 } else { i }).collect();
    assert_eq!(result(&kernel, ExecutionOrder::Shuffled(1)).unwrap(), want);
}

#[test]
fn a_smaller_thread_loop_leaves_the_others_idle_but_an_absent_axis_repeats() {
    let kernel = gpu(1, |kb, x, _| {
        threads(kb, 8, |kb, t| {
            let v = kb.int_of(7, DType::I32);
            kb.store(x, t, v);
        });
        kb.barrier();
        threads(kb, 2, |kb, t| {
            let v = kb.int_of(9, DType::I32);
            kb.store(x, t, v);
        });
    });
    let got = result(&kernel, ExecutionOrder::Forward).unwrap();
    assert_eq!(&got[..9], [9, 9, 7, 7, 7, 7, 7, 7, 8]);
    let repeated = gpu(1, |kb, x, _| {
        let (two, zero) = (kb.int(2), kb.int(0));
        kb.for_("ty", two, ForKind::Thread(1), |_, _| {});
        threads(kb, 1, |kb, _| {
            let v = kb.int_of(1, DType::I32);
            kb.store(x, zero, v);
        });
    });
    assert!(matches!(fault(&repeated), KernelFault::Race { .. }));
}
