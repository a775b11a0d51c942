//! The scan on a GPU: a thread per channel, or for each part of the steps where steps can be joined.

use super::ChannelScan;
use super::associative::AssociativeBody;
use super::block::{ChannelBlock, ChannelStep, StepVisitor};
use super::parts::{self, SequenceParts};
use crate::scan::ring::{SequenceRead, SequenceRing};
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{ThreadTeam, Val};

/// Threads of a block.
const THREADS: i64 = 64;

impl<'k> ChannelScan<'_, 'k> {
    /// GPU kernel body; a single step has nothing that could come ahead of it.
    pub(super) fn emit_gpu(&self, asynchronous: bool) {
        let k = self.k;
        let blocks = |width: i64, body: &dyn Fn(Val<'k>)| {
            k.blocks("block", 0, (self.channels + width - 1) / width, |block| {
                body((block * width).named("first"));
            });
        };
        if self.length.as_const() == Some(1) {
            return blocks(THREADS, &|first| {
                k.threads("t", THREADS, |t| {
                    let c = first + t;
                    k.when(c.lt(self.channels), || self.channel(c, 1));
                });
            });
        }
        match AssociativeBody::analyze(self.body, self.carries, self.seqs) {
            Some(joining) => blocks(parts::WIDTH, &|first| {
                SequenceParts::new(ChannelBlock::new(self, first, parts::WIDTH), &joining).run();
            }),
            None => blocks(THREADS, &|first| {
                run_sequentially(&ChannelBlock::new(self, first, THREADS), asynchronous)
            }),
        }
    }
}

/// The channels of a block through one step after the other.
fn run_sequentially<'k>(block: &ChannelBlock<'_, 'k>, asynchronous: bool) {
    let (scan, team) = (block.scan, ThreadTeam::new(block.scan.k, block.width));
    let sequence = |buf: BufId| SequenceRead {
        from: scan.k.flat(buf),
        of_step: scan.channels,
        first: block.first,
        elements: block.width,
        multiple: block.width,
    };
    let ring = SequenceRing::new(scan.k, team, asynchronous, block.read_buffers().map(sequence).collect());
    team.run(|t| {
        block.load_constants(t);
        block.load_carries(block.carries, t);
    });
    ring.run(&scan.length, |t, steps| {
        let each: StepVisitor<'_, 'k> = &|body| {
            steps.each(|i, time, place| {
                body(ChannelStep { i, time, read: &|which| ring.at(which, place).at([t]) });
            });
        };
        block.run_steps(t, each, true);
        block.store_results(t, each);
    });
    team.run(|t| block.store_carries(t));
}
