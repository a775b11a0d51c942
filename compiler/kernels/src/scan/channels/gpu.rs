//! The scan on a GPU: a thread per channel. Of several steps results come after the carries of all that are computed in one go: their
//! divisions have branches, behind which `ptxas` moves nothing.

use super::ChannelScan;
use crate::scan::ring::{Place, Ring, Sequence, Steps};
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{Team, Val, View};
use std::ops::Range;

/// Threads of a block.
const THREADS: i64 = 64;

impl<'k> ChannelScan<'_, 'k> {
    /// GPU kernel body; a single step has nothing that could come ahead of it.
    pub(super) fn emit_gpu(&self, asynchronous: bool) {
        let (k, single) = (self.k, self.length.as_const() == Some(1));
        k.blocks("block", 0, (self.channels + THREADS - 1) / THREADS, |block| {
            let first = (block * THREADS).named("first");
            match single {
                true => k.threads("t", THREADS, |t| {
                    let c = first + t;
                    k.when(c.lt(self.channels), || self.channel(c, 1));
                }),
                false => Block::new(self, first).run(asynchronous),
            }
        });
    }
}

/// Channels of a block of threads. Threads beyond the last channel compute that one once more and store nothing.
struct Block<'a, 'k> {
    scan: &'a ChannelScan<'a, 'k>,
    first: Val<'k>,
    carries: View<'k, 1>,
    constants: View<'k, 1>,
    /// The carries before each of the steps that are computed in one go.
    before: View<'k, 2>,
}

impl<'a, 'k> Block<'a, 'k> {
    fn new(scan: &'a ChannelScan<'a, 'k>, first: Val<'k>) -> Block<'a, 'k> {
        let (k, carries) = (scan.k, scan.carries as i64);
        Block {
            scan,
            first,
            carries: k.registers("carry", [carries]),
            constants: k.registers("constant", [(scan.constants().len() as i64).max(1)]),
            before: k.registers("before", [Steps::MOST, carries]),
        }
    }

    /// The channels through all steps.
    fn run(&self, asynchronous: bool) {
        let (scan, team) = (self.scan, Team::new(self.scan.k, THREADS));
        let read = scan.seqs().iter().copied().chain(scan.epilogue.rows.iter().map(|(_, buf)| *buf));
        let ring = Ring::new(scan.k, team, asynchronous, read.map(|buf| self.sequence(buf)).collect());
        team.run(|t| {
            let c = self.channel(t);
            for (to, bufs) in
                [(self.carries, &scan.inputs[..scan.carries]), (self.constants, scan.constants())]
            {
                bufs.iter().zip(0..).for_each(|(&buf, i)| to.set([i], scan.k.flat(buf).at([c])));
            }
        });
        ring.run(&scan.length, |t, steps| self.steps(&ring, t, steps));
        team.run(|t| {
            let to = |buf: BufId| scan.k.flat(buf).tail([self.first + t]);
            let store = |(&buf, carry)| self.store(t, to(buf), self.carries.at([carry]));
            scan.outputs.iter().zip(0..).for_each(store);
        });
    }

    fn sequence(&self, buf: BufId) -> Sequence<'k> {
        let (from, of_step) = (self.scan.k.flat(buf), self.scan.channels);
        Sequence { from, of_step, first: self.first, elements: THREADS, multiple: THREADS }
    }

    fn channel(&self, t: Val<'k>) -> Val<'k> {
        (self.first + t).min(self.scan.channels - 1).named("c")
    }

    fn store(&self, t: Val<'k>, to: View<'k, 1>, value: Val<'k>) {
        let (k, channels) = (self.scan.k, self.scan.channels);
        match channels % THREADS {
            0 => to.set([0], value),
            _ => k.when((self.first + t).lt(channels), || to.set([0], value)),
        }
    }

    fn steps(&self, ring: &Ring<'k>, t: Val<'k>, steps: Steps<'k>) {
        let (scan, k, c) = (self.scan, self.scan.k, self.channel(t));
        let carries = 0..scan.carries as i64;
        let results = |i: Val<'k>, place: Place<'k>, outputs: Range<usize>| {
            let carried = carries.clone().map(|carry| self.before.at([i, k.int(carry)]));
            let stepped = (0..scan.seqs).map(|seq| ring.at(seq, place).at([t]));
            let constants = (0..scan.constants().len() as i64).map(|constant| self.constants.at([constant]));
            scan.step(carried.chain(stepped).chain(constants), (c, 1), outputs)
        };
        steps.each(|i, _, place| {
            carries.clone().for_each(|carry| self.before.set([i, k.int(carry)], self.carries.at([carry])));
            let next = results(i, place, 0..scan.carries);
            next.into_iter().zip(0..).for_each(|(value, carry)| self.carries.set([carry], value));
        });
        steps.each(|i, time, place| {
            let stacked = results(i, place, scan.carries..scan.body.outputs.len());
            let rows = (0..scan.epilogue.rows.len()).map(|row| ring.at(scan.seqs + row, place).at([t]));
            let stored = scan.results(stacked, rows, (time, c, 1));
            let to = |buf: BufId| scan.rows(buf).tail([time, self.first + t]);
            let store = |(&(_, buf), value)| self.store(t, to(buf), value);
            scan.epilogue.results.iter().zip(stored).for_each(store);
        });
    }
}
