//! The kernel for a scan whose body is elementwise over channels: every channel runs through time on its own, carries
//! in registers. CPU: blocks of channels are shared out among workers. GPU: a thread per channel.

use crate::inline::{Binding, Index, Inliner};
use crate::machine::Machine;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::Function;
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{Recorder, Reg, Val, View};
use std::collections::HashMap;

/// Channels that one worker takes at a time: a tile of the contraction kernels, so that both are sliced alike.
pub const CHANNELS: i64 = 16;
/// Threads of a GPU block.
const THREADS: i64 = 64;

/// The scan and the buffers of its inputs (carries, sequences, constants) and outputs (carries, stacked values), all f32.
pub struct ChannelScan<'a, 'k> {
    pub k: &'k Recorder,
    pub body: &'a Function,
    pub carries: usize,
    pub seqs: usize,
    pub inputs: Vec<BufId>,
    pub outputs: Vec<BufId>,
    /// Steps.
    pub length: Dim,
    pub channels: i64,
}

/// True if every value of the body has the shape of the channels, or is a constant.
pub fn is_channelwise(body: &Function) -> bool {
    let Some(&first) = body.inputs.first() else { return false };
    let shape = &body.ty(first).dims;
    let same = |v: &mlcc_ir::graph::ValueId| body.ty(*v).dims == *shape && body.ty(*v).dtype.is_float();
    shape.len() == 1
        && body.inputs.iter().all(same)
        && body.outputs.iter().all(same)
        && body.live().all(|(_, n)| n.op.is_elementwise())
}

impl<'k> ChannelScan<'_, 'k> {
    /// Blocks of channels that workers share out.
    pub fn blocks(&self) -> i64 {
        (self.channels + CHANNELS - 1) / CHANNELS
    }

    /// Records the kernel body.
    pub fn emit(&self, machine: Machine) {
        match machine {
            Machine::Cpu { lanes, .. } => self.emit_cpu(lanes),
            Machine::Gpu => self.emit_gpu(),
        }
    }

    fn emit_cpu(&self, lanes: u32) {
        let (k, width) = (self.k, i64::from(lanes));
        k.par("block", self.blocks(), |block| {
            for part in 0..CHANNELS / width {
                let c = block * CHANNELS + part * width;
                if self.channels % CHANNELS == 0 {
                    self.channel(c, lanes);
                    continue;
                }
                let full = (c + (width - 1)).lt(self.channels);
                let one_by_one = || {
                    let rest = (self.channels - c).max(0);
                    k.serial("i", rest, |i| self.channel(c + i, 1));
                };
                k.when_else(full, || self.channel(c, lanes), one_by_one);
            }
        });
    }

    fn emit_gpu(&self) {
        let k = self.k;
        k.blocks("block", 0, (self.channels + THREADS - 1) / THREADS, |block| {
            k.threads("t", THREADS, |t| {
                let c = block * THREADS + t;
                k.when(c.lt(self.channels), || self.channel(c, 1));
            });
        });
    }

    /// `lanes` channels from `c` through all steps.
    fn channel(&self, c: Val<'k>, lanes: u32) {
        let k = self.k;
        // `[steps, channels]` of sequences and stacked values.
        let rows = |buf: BufId| -> View<'k, 2> { k.view(buf, [1, self.channels]) };
        let load = |buf: &BufId| k.flat(*buf).load([c], lanes);
        let (carried, rest) = self.inputs.split_at(self.carries);
        let (seqs, constants) = rest.split_at(self.seqs);
        let carries: Vec<Reg> = carried.iter().map(|buf| k.reg("carry", load(buf))).collect();
        let constants: Vec<Val> = constants.iter().map(|buf| load(buf).named("constant")).collect();
        k.serial("step", &self.length, |step| {
            let carried = carries.iter().map(|carry| carry.get());
            let stepped = seqs.iter().map(|&buf| rows(buf).load([step, c], lanes));
            let inputs = carried.chain(stepped).chain(constants.iter().copied());
            let bind = |(&v, value): (_, Val<'k>)| (v, Binding::Value(value.named("in")));
            let bindings: HashMap<_, _> = self.body.inputs.iter().zip(inputs).map(bind).collect();
            let inliner = Inliner { lanes, ..Inliner::new(self.body, bindings) };
            let result = |&v| inliner.value(k, v, &[Index::from(c, lanes)]).to_lanes(lanes).named("out");
            let results: Vec<Val> = self.body.outputs.iter().map(result).collect();
            for (i, &result) in results.iter().enumerate() {
                match carries.get(i) {
                    Some(carry) => carry.set(result),
                    None => rows(self.outputs[i]).set([step, c], result),
                }
            }
        });
        for (carry, &out) in carries.iter().zip(&self.outputs) {
            k.flat(out).set([c], carry.get());
        }
    }
}
