//! What a [`PoolingHead`] adds to the graph of a transformer.

use super::{ModelBuilder, OuterLayers};
use crate::layers::linear::LinearLayer;
use crate::pooling_head::{PoolingHead, PoolingMode, PoolingStep};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// Smallest length that a vector is divided by (`torch.nn.functional.normalize`).
const LEAST_LENGTH: f64 = 1e-12;

impl PoolingMode {
    /// Rows `x: [n, size]` of all texts to rows of which the last of each text is the pooled one.
    fn apply(self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        if self == PoolingMode::Last {
            return x;
        }
        net.per_sequence(&[x], |net, rows| {
            let x = rows[0];
            let rows = net.cache_rows();
            vec![match self {
                PoolingMode::First => {
                    let zero = net.op(Op::Constant { value: 0.0, dtype: DType::I32 }, &[]);
                    let first = net.min(rows, zero);
                    net.gather(x, first)
                }
                PoolingMode::Mean | PoolingMode::Last => {
                    let sum = net.reduce(RedOp::Sum, x, 0);
                    // Once for every row, as rows are what is put together again.
                    let (n, length) = (net.n(), net.sequence_length());
                    let counts = net.max(rows, length);
                    let counts = net.cast(counts, DType::F32);
                    let counts = net.reshape(counts, [n, Dim::from(1)]);
                    net.div(sum, counts)
                }
            }]
        })[0]
    }
}

impl PoolingHead {
    /// The vector of each text, `[texts, width]`, of what the layers make, `x: [n, hidden]`. `frame` is what stands around the
    /// layers of the model, which has `vocab` tokens.
    pub(crate) fn apply(
        &self,
        net: &mut ModelBuilder,
        x: ValueId,
        frame: &OuterLayers,
        vocab: usize,
    ) -> ValueId {
        let norm = |net: &mut ModelBuilder, x| frame.norm.0.apply(net, x, frame.norm.1);
        let mut x = match self.pooling {
            // The norm of one row is enough.
            PoolingMode::Last => {
                let last = net.output_rows(x);
                norm(net, last)
            }
            pooling => {
                let x = norm(net, x);
                let x = pooling.apply(net, x);
                net.output_rows(x)
            }
        };
        net.tap("pooled", x);
        for part in &self.steps {
            x = part.apply(net, x, frame, vocab);
        }
        x
    }
}

impl PoolingStep {
    fn apply(&self, net: &mut ModelBuilder, x: ValueId, frame: &OuterLayers, vocab: usize) -> ValueId {
        match self {
            PoolingStep::Answer { yes, no } => {
                let yes = frame.token_logit(net, x, vocab, *yes);
                no.map_or(yes, |no| {
                    let no = frame.token_logit(net, x, vocab, no);
                    net.sub(yes, no)
                })
            }
            PoolingStep::Linear { name, out, bias } => LinearLayer::new(name, *out).bias(*bias).apply(net, x),
            PoolingStep::Activation(activation) => activation.apply(net, x),
            PoolingStep::Tanh => net.tanh(x),
            PoolingStep::Norm { name, norm } => norm.apply(net, x, name),
            PoolingStep::Normalize => {
                let squares = net.square(x);
                let sum = net.reduce(RedOp::Sum, squares, 1);
                let length = net.unary(mlcc_ir::kernel::UnOp::Sqrt, sum);
                let least = net.constant(LEAST_LENGTH);
                let length = net.max(length, least);
                net.div(x, length)
            }
        }
    }
}
