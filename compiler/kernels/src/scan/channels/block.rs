//! The channels that a block of a GPU takes: what it keeps in registers, and steps that it computes in one
//! go. The results of these come after all their carries: their divisions have branches, behind which `ptxas`
//! moves nothing.

use super::ChannelScan;
use crate::scan::ring::RingSteps;
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{BufferView, Val};
use std::ops::Range;

/// Channels of a block of threads. Threads beyond the last channel compute that one once more and store
/// nothing.
pub(super) struct ChannelBlock<'a, 'k> {
    pub scan: &'a ChannelScan<'a, 'k>,
    pub first: Val<'k>,
    pub width: i64,
    pub carries: BufferView<'k, 1>,
    constants: BufferView<'k, 1>,
    /// The carries before each of the steps that are computed in one go.
    before: BufferView<'k, 2>,
}

/// A step of some that are computed in one go: its number, its time, and the values of sequences and rows of
/// the epilogue then.
pub(super) struct ChannelStep<'r, 'k> {
    pub i: Val<'k>,
    pub time: Val<'k>,
    pub read: &'r dyn Fn(usize) -> Val<'k>,
}

/// Does something for each of some steps.
pub(super) type StepVisitor<'r, 'k> = &'r dyn Fn(&dyn Fn(ChannelStep<'_, 'k>));

impl<'a, 'k> ChannelBlock<'a, 'k> {
    pub fn new(scan: &'a ChannelScan<'a, 'k>, first: Val<'k>, width: i64) -> ChannelBlock<'a, 'k> {
        let (k, carries) = (scan.k, scan.carries as i64);
        ChannelBlock {
            scan,
            first,
            width,
            carries: k.registers("carry", [carries]),
            constants: k.registers("constant", [(scan.constants().len() as i64).max(1)]),
            before: k.registers("before", [RingSteps::MOST, carries]),
        }
    }

    /// The buffers that each step reads.
    pub fn read_buffers(&self) -> impl Iterator<Item = BufId> {
        self.scan.seqs().iter().copied().chain(self.scan.epilogue.rows.iter().map(|(_, buf)| *buf))
    }

    pub fn channel(&self, t: Val<'k>) -> Val<'k> {
        (self.first + t).min(self.scan.channels - 1).named("c")
    }

    pub fn load_constants(&self, t: Val<'k>) {
        self.load(t, self.constants, self.scan.constants());
    }

    pub fn load_carries(&self, to: BufferView<'k, 1>, t: Val<'k>) {
        self.load(t, to, &self.scan.inputs[..self.scan.carries]);
    }

    fn load(&self, t: Val<'k>, to: BufferView<'k, 1>, bufs: &[BufId]) {
        let c = self.channel(t);
        bufs.iter().zip(0..).for_each(|(&buf, i)| to.set([i], self.scan.k.flat(buf).at([c])));
    }

    pub fn store_carries(&self, t: Val<'k>) {
        let to = |buf: BufId| self.scan.k.flat(buf).starting_at([self.first + t]);
        let store = |(&buf, carry)| self.store(t, to(buf), self.carries.at([carry]));
        self.scan.outputs.iter().zip(0..).for_each(store);
    }

    fn store(&self, t: Val<'k>, to: BufferView<'k, 1>, value: Val<'k>) {
        let (k, channels) = (self.scan.k, self.scan.channels);
        match channels % self.width {
            0 => to.set([0], value),
            _ => k.when((self.first + t).lt(channels), || to.set([0], value)),
        }
    }

    pub fn constants(&self) -> impl Iterator<Item = Val<'k>> {
        (0..self.scan.constants().len() as i64).map(|constant| self.constants.at([constant]))
    }

    fn outputs(
        &self,
        t: Val<'k>,
        carried: impl Iterator<Item = Val<'k>>,
        step: &ChannelStep<'_, 'k>,
        outputs: Range<usize>,
    ) -> Vec<Val<'k>> {
        let stepped = (0..self.scan.seqs).map(step.read);
        self.scan.step(carried.chain(stepped).chain(self.constants()), (self.channel(t), 1), outputs)
    }

    /// The carries through some steps; those before each are kept if results are to follow.
    pub fn run_steps(&self, t: Val<'k>, each: StepVisitor<'_, 'k>, keep: bool) {
        let carries = 0..self.scan.carries as i64;
        each(&|step| {
            let carried: Vec<_> =
                carries.clone().map(|carry| self.carries.at([carry]).named("carried")).collect();
            if keep {
                carried
                    .iter()
                    .zip(0..)
                    .for_each(|(&value, carry)| self.before.set([step.i, self.scan.k.int(carry)], value));
            }
            let next = self.outputs(t, carried.into_iter(), &step, 0..self.scan.carries);
            next.into_iter().zip(0..).for_each(|(value, carry)| self.carries.set([carry], value));
        });
    }

    /// The results of these steps.
    pub fn store_results(&self, t: Val<'k>, each: StepVisitor<'_, 'k>) {
        let (scan, k, c) = (self.scan, self.scan.k, self.channel(t));
        each(&|step| {
            let carried = (0..scan.carries as i64).map(|carry| self.before.at([step.i, k.int(carry)]));
            let stacked = self.outputs(t, carried, &step, scan.carries..scan.body.outputs.len());
            let rows = (0..scan.epilogue.rows.len()).map(|row| (step.read)(scan.seqs + row));
            let stored = scan.results(stacked, rows, (step.time, c, 1));
            let to = |buf: BufId| scan.rows(buf).starting_at([step.time, self.first + t]);
            let store = |(&(_, buf), value)| self.store(t, to(buf), value);
            scan.epilogue.results.iter().zip(stored).for_each(store);
        });
    }
}
