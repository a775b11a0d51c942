//! The threads of a GPU block as a team.

use crate::{Recorder, Val};
use mlcc_ir::kernel::Ty;
use mlcc_ir::types::DType;

/// Threads of a warp.
pub const WARP: i64 = 32;

/// All threads of a block.
#[derive(Clone, Copy)]
pub struct Team<'k> {
    k: &'k Recorder,
    threads: i64,
}

impl<'k> Team<'k> {
    pub fn new(k: &'k Recorder, threads: i64) -> Team<'k> {
        Team { k, threads }
    }

    /// Items that a thread has at most, of `count` shared out.
    pub fn share(self, count: i64) -> i64 {
        (count + self.threads - 1) / self.threads
    }

    /// `body(thread)` in all threads.
    pub fn run(self, body: impl FnOnce(Val<'k>)) {
        self.k.threads("t", self.threads, body);
    }

    /// `body(i)` for `i` below `count`: neighbouring threads have neighbouring items.
    pub fn each(self, count: i64, body: impl FnOnce(Val<'k>)) {
        self.run(|t| {
            self.k.serial("round", self.share(count), |round| {
                self.guarded(round * self.threads + t, count, body);
            });
        });
    }

    /// `body(i, slot)` for the same items, unrolled: `slot` counts those of a thread and may index registers.
    pub fn each_slot(self, count: i64, body: impl FnOnce(Val<'k>, Val<'k>)) {
        self.run(|t| {
            self.k.unrolled("slot", self.share(count), |slot| {
                self.guarded(slot * self.threads + t, count, |i| body(i, slot));
            });
        });
    }

    /// `body(i)` where `i` is below `count`; nothing to ask where the threads come out even.
    pub fn guarded(self, i: Val<'k>, count: i64, body: impl FnOnce(Val<'k>)) {
        if count % self.threads == 0 {
            return body(i);
        }
        self.k.when(i.lt(count), || body(i));
    }
}

/// Sum over the lanes of a warp, in every lane.
pub fn warp_sum(value: Val) -> Val {
    let mut sum = value.named("sum");
    for distance in [16, 8, 4, 2, 1] {
        let distance = value.recorder().literal(distance.into(), Ty::scalar(DType::I32));
        sum = (sum + sum.instr("shfl_xor_f32", &[distance])).named("sum");
    }
    sum
}
