//! The scan on a GPU by parts of the steps, of a body whose steps can be joined: every part makes carries of
//! nothing, all at the same time, those before it join them, and then it goes through its steps again from
//! the carries that it really begins with.

use super::associative::AssociativeBody;
use super::block::{ChannelBlock, ChannelStep, StepVisitor};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, ThreadTeam, Val};

/// Channels of a block: neighbouring threads have neighbouring channels.
pub(super) const WIDTH: i64 = 32;
/// Parts that the steps are divided into.
const PARTS: i64 = 16;
/// Steps that a thread reads and computes in one go.
const STEPS: i64 = 4;

/// The channels of a block, in parts of their steps.
pub(super) struct SequenceParts<'a, 'k> {
    block: ChannelBlock<'a, 'k>,
    joining: &'a AssociativeBody,
    /// The carries before all steps.
    first: BufferView<'k, 1>,
    /// The values that were read for some steps.
    stepped: BufferView<'k, 2>,
    /// `[rounds, parts, carries, channels]`, the first two as one: what the steps of parts make of nothing.
    made: BufferView<'k, 3>,
}

/// Some steps, by their first and their number.
#[derive(Clone, Copy)]
struct StepRange<'k> {
    first: Val<'k>,
    count: Val<'k>,
}

impl<'a, 'k> SequenceParts<'a, 'k> {
    pub fn new(block: ChannelBlock<'a, 'k>, joining: &'a AssociativeBody) -> SequenceParts<'a, 'k> {
        let (k, read, carries) =
            (block.scan.k, block.read_buffers().count() as i64, block.scan.carries as i64);
        let (stepped, made) =
            (k.registers("stepped", [STEPS, read]), k.shared("made", [2 * PARTS, carries, WIDTH]));
        SequenceParts { block, joining, first: k.registers("first", [carries]), stepped, made }
    }

    /// The channels through all steps.
    pub fn run(&self) {
        let (block, k) = (&self.block, self.block.scan.k);
        let team = ThreadTeam::new(k, WIDTH * PARTS);
        let length = k.dim(&block.scan.length).named("length");
        // Only the last part has further steps after those that are computed in one go.
        let of_part = (length.div_ceil(PARTS * STEPS).max(1) * STEPS).named("of_part");
        // Nothing comes after it, so its result is not needed.
        let last = ((length - 1).max(0) / of_part).named("last");
        let in_part = |body: &dyn Fn(Val<'k>, Val<'k>)| {
            team.run(|t| body((t % WIDTH).named("lane"), (t / WIDTH).named("part")));
        };
        let from = |part: Val<'k>| (part * of_part).named("from");
        in_part(&|lane, part| {
            block.load_constants(lane);
            block.load_carries(self.first, lane);
            k.when(part.lt(last), || {
                self.make(lane, StepRange { first: from(part), count: of_part });
                self.put(k.int(0), lane, part);
            });
        });
        k.barrier();
        // Then with those before, of twice as many parts each time.
        let distances = (0..).map(|round| 1 << round).take_while(|distance| *distance < PARTS);
        let needed = |distance: i64| k.int(distance).lt(last).select(k.int(1), k.int(0));
        let rounds = distances.map(needed).fold(k.int(0), |sum, one| sum + one).named("rounds");
        k.serial("round", rounds, |round| {
            let distance = (k.int(1) << round).named("distance");
            in_part(&|lane, part| {
                k.when(part.lt(last), || {
                    k.when(distance.le(part), || {
                        let before = self.made(round, lane, part - distance);
                        self.join(lane, &before, &self.carries(), of_part * distance);
                    });
                    self.put(round + 1, lane, part);
                });
            });
            k.barrier();
        });
        in_part(&|lane, part| {
            k.when(part.le(last), || {
                let first = |carry| self.first.at([carry]).named("first");
                let first: Vec<Val> = (0..block.scan.carries as i64).map(first).collect();
                self.set(&first);
                k.when(k.int(0).lt(part), || {
                    let made = self.made(rounds, lane, part - 1);
                    self.join(lane, &first, &made, of_part * part);
                });
                let first = from(part);
                self.go(lane, StepRange { first, count: (length - first).min(of_part) });
                k.when(part.equals(last), || block.store_carries(lane));
            });
        });
    }

    /// Computes the result of steps that start from nothing.
    fn make(&self, lane: Val<'k>, steps: StepRange<'k>) {
        let (block, k) = (&self.block, self.block.scan.k);
        for carry in 0..block.scan.carries {
            block.carries.set([carry as i64], k.float(self.joining.identity(carry)));
        }
        self.groups(lane, steps, block.scan.seqs, |time| {
            block.run_steps(lane, &|body| self.each(time, body), false);
        });
    }

    fn set(&self, carries: &[Val<'k>]) {
        carries.iter().zip(0..).for_each(|(&value, carry)| self.block.carries.set([carry], value));
    }

    fn carries(&self) -> Vec<Val<'k>> {
        let carry = |i: usize| self.block.carries.at([i as i64]).named("carry");
        (0..self.block.scan.carries).map(carry).collect()
    }

    /// The place of the carries of a part in a round, for the others.
    fn place(&self, round: Val<'k>, part: Val<'k>) -> BufferView<'k, 2> {
        self.made.row(part + round % 2 * PARTS)
    }

    fn put(&self, round: Val<'k>, lane: Val<'k>, part: Val<'k>) {
        let to = self.place(round, part);
        self.carries().into_iter().zip(0..).for_each(|(value, carry)| to.set((carry, lane), value));
    }

    fn made(&self, round: Val<'k>, lane: Val<'k>, part: Val<'k>) -> Vec<Val<'k>> {
        let from = self.place(round, part);
        (0..self.block.scan.carries as i64).map(|carry| from.at((carry, lane)).named("made")).collect()
    }

    /// Has carries go on through steps that make others of nothing.
    fn join(&self, lane: Val<'k>, before: &[Val<'k>], made: &[Val<'k>], steps: Val<'k>) {
        let (block, joining) = (&self.block, self.joining);
        let (scan, c) = (block.scan, block.channel(lane));
        let fade = joining.step_decay(scan, block.constants(), c) * steps.cast(DType::F32);
        let after = joining.combine_carries(scan, (before, made), fade.named("fade"), c);
        self.set(&after);
    }

    /// Carries and results of a part's steps.
    fn go(&self, lane: Val<'k>, steps: StepRange<'k>) {
        let (block, k, read) = (&self.block, self.block.scan.k, self.block.read_buffers().count());
        let some = |each: StepVisitor<'_, 'k>| {
            block.run_steps(lane, each, true);
            block.store_results(lane, each);
        };
        self.groups(lane, steps, read, |time| some(&|body| self.each(time, body)));
        let rest = (steps.count % STEPS).named("rest");
        k.when(k.int(0).lt(rest), || {
            let (time, last) = ((steps.first + (steps.count - rest)).named("time"), (rest - 1).named("last"));
            self.read(lane, read, |i| time + i.min(last));
            k.unrolled("i", STEPS - 1, |i| {
                k.when(i.lt(rest), || some(&|body| self.step(i, time, body)));
            });
        });
    }

    /// `body(time)` for as many steps at a time as are computed in one go, of each of which `read` values are
    /// there.
    fn groups(&self, lane: Val<'k>, steps: StepRange<'k>, read: usize, body: impl Fn(Val<'k>)) {
        self.block.scan.k.serial("group", steps.count / STEPS, |group| {
            let time = (steps.first + group * STEPS).named("time");
            self.read(lane, read, |i| time + i);
            body(time);
        });
    }

    /// Reads some values of as many steps as are computed in one go.
    fn read(&self, lane: Val<'k>, read: usize, time: impl Fn(Val<'k>) -> Val<'k>) {
        let (scan, k, c) = (self.block.scan, self.block.scan.k, self.block.channel(lane));
        k.unrolled("i", STEPS, |i| {
            for (buf, which) in self.block.read_buffers().take(read).zip(0..) {
                self.stepped.set([i, k.int(which)], scan.rows(buf).at([time(i), c]));
            }
        });
    }

    fn each(&self, time: Val<'k>, body: &dyn Fn(ChannelStep<'_, 'k>)) {
        self.block.scan.k.unrolled("i", STEPS, |i| self.step(i, time, body));
    }

    fn step(&self, i: Val<'k>, time: Val<'k>, body: &dyn Fn(ChannelStep<'_, 'k>)) {
        let k = self.block.scan.k;
        let read = |which: usize| self.stepped.at([i, k.int(which as i64)]);
        body(ChannelStep { i, time: time + i, read: &read });
    }
}
