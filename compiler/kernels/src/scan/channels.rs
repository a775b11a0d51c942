//! The kernel for a scan whose body is elementwise over channels: every channel runs through time on its own,
//! carries in registers. CPU: blocks of channels are shared out among workers. GPU: a thread per channel, or
//! several in parts of the steps.

mod associative;
mod block;
mod gpu;
mod parts;

use crate::inline::{Binding, Inliner, LaneIndex};
use crate::machine::MachineKind;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::kernel::BufId;
use mlcc_kernel_lang::{BufferView, Recorder, RegisterVar, Val};
use std::collections::HashMap;
use std::ops::Range;

/// Channels that one worker takes at a time: a tile of the contraction kernels, so that both are sliced
/// alike.
pub const CHANNELS: i64 = 16;

/// The scan and the buffers of its inputs (carries, sequences, constants) and new carries, all f32.
pub struct ChannelScan<'a, 'k> {
    pub k: &'k Recorder,
    pub body: &'a Function,
    pub carries: usize,
    pub seqs: usize,
    pub inputs: Vec<BufId>,
    pub outputs: Vec<BufId>,
    pub epilogue: ScanEpilogue<'a, 'k>,
    /// Steps.
    pub length: Dim,
    pub channels: i64,
}

/// The elementwise work on the stacked values, and its results.
pub struct ScanEpilogue<'a, 'k> {
    /// The inliner of the group, with its inputs bound.
    pub inliner: Inliner<'a, 'k>,
    /// The stacked values of the scan there.
    pub stacked: &'a [ValueId],
    /// Inputs of the group in f32 with a row for each step that it reads, too.
    pub rows: Vec<(ValueId, BufId)>,
    /// `[steps, channels]` in memory; stacked values among them.
    pub results: Vec<(ValueId, BufId)>,
}

/// True if every value of the body has the shape of the channels, or is a constant.
pub fn is_channelwise(body: &Function) -> bool {
    let Some(&first) = body.inputs.first() else { return false };
    let shape = &body.ty(first).dims;
    let same = |v: &mlcc_ir::graph::ValueId| body.ty(*v).dims == *shape && body.ty(*v).dtype.is_float();
    shape.len() == 1
        && body.inputs.iter().all(same)
        && body.outputs.iter().all(same)
        && body.live_nodes().all(|(_, n)| n.op.is_elementwise())
}

impl<'k> ChannelScan<'_, 'k> {
    /// Blocks of channels that workers share out.
    pub fn blocks(&self) -> i64 {
        (self.channels + CHANNELS - 1) / CHANNELS
    }

    /// Records the kernel body.
    pub fn emit(&self, machine: MachineKind) {
        match machine {
            MachineKind::Cpu { lanes, .. } => self.emit_cpu(lanes),
            MachineKind::Gpu { asynchronous } => self.emit_gpu(asynchronous),
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

    fn seqs(&self) -> &[BufId] {
        &self.inputs[self.carries..self.carries + self.seqs]
    }

    fn constants(&self) -> &[BufId] {
        &self.inputs[self.carries + self.seqs..]
    }

    /// `[steps, channels]` of sequences and stacked values.
    fn rows(&self, buf: BufId) -> BufferView<'k, 2> {
        self.k.view(buf, [1, self.channels])
    }

    /// Some results of the body in a step for `lanes` channels from `c`, of the values of all inputs there.
    fn step(
        &self,
        inputs: impl Iterator<Item = Val<'k>>,
        (c, lanes): (Val<'k>, u32),
        outputs: Range<usize>,
    ) -> Vec<Val<'k>> {
        let bind = |(&v, value): (_, Val<'k>)| (v, Binding::Value(value.named("in")));
        let bindings: HashMap<_, _> = self.body.inputs.iter().zip(inputs).map(bind).collect();
        let inliner = Inliner { lanes, ..Inliner::new(self.body, bindings) };
        let result = |&v| inliner.value(self.k, v, &[LaneIndex::from(c, lanes)]).to_lanes(lanes).named("out");
        self.body.outputs[outputs].iter().map(result).collect()
    }

    /// The results of a step, from its stacked values and from rows of the epilogue whose values are known.
    fn results(
        &self,
        stacked: Vec<Val<'k>>,
        rows: impl Iterator<Item = Val<'k>>,
        (time, c, lanes): (Val<'k>, Val<'k>, u32),
    ) -> Vec<Val<'k>> {
        let ScanEpilogue { inliner, stacked: names, rows: read, results } = &self.epilogue;
        let mut inliner = Inliner { lanes, ..inliner.clone() };
        let known = names.iter().copied().zip(stacked).chain(read.iter().map(|(v, _)| *v).zip(rows));
        inliner.bindings.extend(known.map(|(v, value)| (v, Binding::Value(value))));
        let index = [LaneIndex::scalar(time), LaneIndex::from(c, lanes)];
        let value = |&(v, _): &(ValueId, BufId)| {
            let value = inliner.value(self.k, v, &index).to_lanes(lanes);
            value.cast(inliner.f.ty(v).dtype).named("out")
        };
        results.iter().map(value).collect()
    }

    /// `lanes` channels from `c` through all steps.
    fn channel(&self, c: Val<'k>, lanes: u32) {
        let k = self.k;
        let load = |buf: &BufId| k.flat(*buf).load([c], lanes);
        let carries: Vec<RegisterVar> =
            self.inputs[..self.carries].iter().map(|buf| k.reg("carry", load(buf))).collect();
        let constants: Vec<Val> = self.constants().iter().map(|buf| load(buf).named("constant")).collect();
        k.serial("step", &self.length, |step| {
            let carried = carries.iter().map(|carry| carry.get());
            let stepped = self.seqs().iter().map(|&buf| self.rows(buf).load([step, c], lanes));
            let inputs = carried.chain(stepped).chain(constants.iter().copied());
            let mut next = self.step(inputs, (c, lanes), 0..self.body.outputs.len());
            let results = self.results(next.split_off(self.carries), std::iter::empty(), (step, c, lanes));
            carries.iter().zip(next).for_each(|(carry, value)| carry.set(value));
            let store = |(&(_, buf), value)| self.rows(buf).set([step, c], value);
            self.epilogue.results.iter().zip(results).for_each(store);
        });
        for (carry, &out) in carries.iter().zip(&self.outputs) {
            k.flat(out).set([c], carry.get());
        }
    }
}
