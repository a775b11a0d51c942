//! The kernel for a scan whose body is elementwise over channels: every channel runs through time on its own, carries
//! in registers. CPU: blocks of channels are shared out among workers. GPU: a thread per channel.

use super::inline::{Binding, Index, Inliner};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::Function;
use mlcc_ir::kernel::{BufId, ExprId, ForKind, Space};
use std::collections::HashMap;

/// Channels that one worker takes at a time: a tile of the contraction kernels, so that both are sliced alike.
pub const CHANNELS: i64 = 16;
/// Threads of a GPU block.
const THREADS: i64 = 64;

/// The scan and the buffers of its inputs (carries, sequences, constants) and outputs (carries, stacked values), all f32.
pub struct Scan<'a> {
    pub body: &'a Function,
    pub carries: usize,
    pub seqs: usize,
    pub inputs: Vec<BufId>,
    pub outputs: Vec<BufId>,
    /// Steps.
    pub length: Dim,
    pub channels: usize,
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

impl Scan<'_> {
    /// CPU kernel body with vectors of `lanes`.
    pub fn emit_cpu(&self, kb: &mut KernelBuilder, lanes: u32) {
        let channels = self.channels as i64;
        let blocks = kb.int((channels + CHANNELS - 1) / CHANNELS);
        let width = i64::from(lanes);
        kb.par("block", blocks, |kb, block| {
            let first = kb.mul_int(block, CHANNELS);
            for part in 0..CHANNELS / width {
                let c = kb.add_int(first, part * width);
                if channels % CHANNELS == 0 {
                    self.channel(kb, c, lanes);
                    continue;
                }
                let end = kb.int(channels);
                let last = kb.add_int(c, width - 1);
                let full = kb.lt(last, end);
                kb.if_else(
                    full,
                    |kb| self.channel(kb, c, lanes),
                    |kb| {
                        let rest = kb.sub(end, c);
                        let zero = kb.int(0);
                        let rest = kb.max(rest, zero);
                        kb.serial("i", rest, |kb, i| {
                            let c = kb.add(c, i);
                            self.channel(kb, c, 1);
                        });
                    },
                );
            }
        });
    }

    /// GPU kernel body.
    pub fn emit_gpu(&self, kb: &mut KernelBuilder) {
        let channels = self.channels as i64;
        let blocks = kb.int((channels + THREADS - 1) / THREADS);
        let threads = kb.int(THREADS);
        kb.for_("block", blocks, ForKind::Block(0), |kb, block| {
            kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
                let first = kb.mul_int(block, THREADS);
                let c = kb.add(first, t);
                let end = kb.int(channels);
                let inside = kb.lt(c, end);
                kb.if_(inside, |kb| self.channel(kb, c, 1));
            });
        });
    }

    /// `lanes` channels from `c` through all steps.
    fn channel(&self, kb: &mut KernelBuilder, c: ExprId, lanes: u32) {
        let zero = kb.int(0);
        let carries: Vec<BufId> = (0..self.carries)
            .map(|i| {
                let dtype = kb.kernel().bufs[self.inputs[i]].dtype;
                let carry = kb.alloc("carry", dtype, lanes as usize, Space::Local);
                let value = kb.load_vec(self.inputs[i], c, lanes);
                kb.store_vec(carry, zero, value);
                carry
            })
            .collect();
        let constants: Vec<ExprId> = self.inputs[self.carries + self.seqs..]
            .iter()
            .map(|&buf| {
                let value = kb.load_vec(buf, c, lanes);
                kb.let_("constant", value)
            })
            .collect();
        let steps = kb.dim(&self.length);
        kb.serial("step", steps, |kb, step| {
            let row = kb.mul_int(step, self.channels as i64);
            let at = kb.add(row, c);
            let mut bindings = HashMap::new();
            for (i, &input) in self.body.inputs.iter().enumerate() {
                let value = if i < self.carries {
                    kb.load_vec(carries[i], zero, lanes)
                } else if i < self.carries + self.seqs {
                    kb.load_vec(self.inputs[i], at, lanes)
                } else {
                    constants[i - self.carries - self.seqs]
                };
                bindings.insert(input, Binding::Value(kb.let_("in", value)));
            }
            let inliner =
                Inliner { f: self.body, bindings, lanes, mask: None, aligned: false, reduce_lanes: 1 };
            let index = [if lanes > 1 { Index::lanes(c) } else { Index::scalar(c) }];
            let values: Vec<ExprId> = self
                .body
                .outputs
                .iter()
                .map(|&v| {
                    let value = inliner.value(kb, v, &index);
                    let value = if kb.ty(value).lanes < lanes { kb.splat(value, lanes) } else { value };
                    kb.let_("out", value)
                })
                .collect();
            for (i, &value) in values.iter().enumerate() {
                match carries.get(i) {
                    Some(&carry) => kb.store_vec(carry, zero, value),
                    None => kb.store_vec(self.outputs[i], at, value),
                }
            }
        });
        for (i, &carry) in carries.iter().enumerate() {
            let value = kb.load_vec(carry, zero, lanes);
            kb.store_vec(self.outputs[i], c, value);
        }
    }
}
