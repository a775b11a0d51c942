//! The scan on a GPU: a thread per channel, or for each part of the steps where steps can be joined.

use super::ChannelScan;
use super::associative::Associative;
use super::block::{Block, Each, Step};
use super::parts::{self, Parts};
use crate::scan::ring::{Ring, Sequence};
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{Team, Val};

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
        match Associative::of(self.body, self.carries, self.seqs) {
            Some(joining) => blocks(parts::WIDTH, &|first| {
                Parts::new(Block::new(self, first, parts::WIDTH), &joining).run();
            }),
            None => blocks(THREADS, &|first| in_turn(&Block::new(self, first, THREADS), asynchronous)),
        }
    }
}

/// The channels of a block through one step after the other.
fn in_turn<'k>(block: &Block<'_, 'k>, asynchronous: bool) {
    let (scan, team) = (block.scan, Team::new(block.scan.k, block.width));
    let sequence = |buf: BufId| Sequence {
        from: scan.k.flat(buf),
        of_step: scan.channels,
        first: block.first,
        elements: block.width,
        multiple: block.width,
    };
    let ring = Ring::new(scan.k, team, asynchronous, block.read().map(sequence).collect());
    team.run(|t| {
        block.load_constants(t);
        block.load_carries(block.carries, t);
    });
    ring.run(&scan.length, |t, steps| {
        let each: Each<'_, 'k> = &|body| {
            steps.each(|i, time, place| {
                body(Step { i, time, read: &|which| ring.at(which, place).at([t]) });
            });
        };
        block.carry(t, each, true);
        block.results(t, each);
    });
    team.run(|t| block.store_carries(t));
}
