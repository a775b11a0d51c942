//! The threads of a GPU block as a team.

use crate::{Recorder, Val};
use mlcc_ir::kernel::{BinOp, ExprType};
use mlcc_ir::types::DType;

/// Threads of a warp.
pub const WARP: i64 = 32;

/// All threads of a block.
#[derive(Clone, Copy)]
pub struct ThreadTeam<'k> {
    k: &'k Recorder,
    threads: i64,
}

impl<'k> ThreadTeam<'k> {
    pub fn new(k: &'k Recorder, threads: i64) -> ThreadTeam<'k> {
        ThreadTeam { k, threads }
    }

    /// Items that a thread has at most, of `count` shared out.
    pub fn items_per_thread(self, count: i64) -> i64 {
        (count + self.threads - 1) / self.threads
    }

    /// `body(thread)` in all threads.
    pub fn run(self, body: impl FnOnce(Val<'k>)) {
        self.k.threads("t", self.threads, body);
    }

    /// `body(i)` for `i` below `count`: neighbouring threads have neighbouring items.
    pub fn each(self, count: i64, body: impl FnOnce(Val<'k>)) {
        self.run(|t| {
            self.k.serial("round", self.items_per_thread(count), |round| {
                self.when_below(round * self.threads + t, count, body);
            });
        });
    }

    /// `body(i, slot)` for the same items, unrolled: `slot` counts those of a thread and may index registers.
    pub fn each_slot(self, count: i64, body: impl FnOnce(Val<'k>, Val<'k>)) {
        self.run(|t| {
            self.k.unrolled("slot", self.items_per_thread(count), |slot| {
                self.when_below(slot * self.threads + t, count, |i| body(i, slot));
            });
        });
    }

    /// `body(i)` where `i` is below `count`; nothing to ask where the threads come out even.
    pub fn when_below(self, i: Val<'k>, count: i64, body: impl FnOnce(Val<'k>)) {
        if count % self.threads == 0 {
            return body(i);
        }
        self.k.when(i.lt(count), || body(i));
    }
}

/// Sum over the lanes of a warp, in every lane.
pub fn warp_sum(value: Val) -> Val {
    fold_lanes(value, BinOp::Add, WARP)
}

/// Values of `lanes` neighbouring lanes of a warp, a power of two, joined by `op`, in each of them; f32 or
/// i32.
pub fn fold_lanes(value: Val, op: BinOp, lanes: i64) -> Val {
    let shuffle = shuffle(value);
    let mut sum = value.named("sum");
    let mut distance = lanes / 2;
    while distance > 0 {
        let by = value.recorder().literal(distance as f64, ExprType::scalar(DType::I32));
        sum = sum.binary(op, sum.instr(shuffle, &[by])).named("sum");
        distance /= 2;
    }
    sum
}

/// Each of `values`, a power of two of them and at most as many as lanes, joined by `op` over `lanes`
/// neighbouring lanes of a warp: lane `lane` of them has that of value `lane / (lanes / values)`.
pub fn fold_each<'k>(mut values: Vec<Val<'k>>, op: BinOp, lane: Val<'k>, lanes: i64) -> Val<'k> {
    let mut distance = lanes / 2;
    while values.len() > 1 {
        // Lanes beyond go on with the upper half of the values, the others with the lower one.
        let (lower, upper) = values.split_at(values.len() / 2);
        let beyond = (lane / distance % 2).equals(1).named("beyond");
        let by = lane.recorder().literal(distance as f64, ExprType::scalar(DType::I32));
        let join = |(&lower, &upper): (&Val<'k>, &Val<'k>)| {
            let (kept, given) = (beyond.select(upper, lower), beyond.select(lower, upper).named("given"));
            kept.binary(op, given.instr(shuffle(given), &[by])).named("sum")
        };
        values = lower.iter().zip(upper).map(join).collect();
        distance /= 2;
    }
    fold_lanes(values[0], op, 2 * distance)
}

fn shuffle(value: Val) -> &'static str {
    if value.ty().dtype == DType::F32 { "shfl_xor_f32" } else { "shfl_xor_i32" }
}
