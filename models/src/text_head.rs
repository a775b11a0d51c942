//! What a model of texts makes of the last hidden states of a text: one vector, an embedding or scores. Pooling looks at all
//! rows of a text, the parts after it at one row for each.

use crate::layers::Activation;
use crate::layers::linear::Linear;
use crate::layers::norm::Norm;
use crate::transformer::Net;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// How the rows of a text become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// That of the first token.
    First,
    /// The mean of all.
    Mean,
    /// That of the last token.
    Last,
}

/// The names of the ways of pooling, as sentence-transformers spells them.
pub const POOLINGS: [(&str, Pooling); 3] =
    [("cls", Pooling::First), ("mean", Pooling::Mean), ("lasttoken", Pooling::Last)];

impl Pooling {
    pub fn find(name: &str) -> Option<Pooling> {
        POOLINGS.iter().find(|(known, _)| *known == name).map(|(_, pooling)| *pooling)
    }

    pub fn name(self) -> &'static str {
        POOLINGS.iter().find(|(_, pooling)| *pooling == self).map_or("", |(name, _)| name)
    }

    /// Rows `x: [n, size]` of all texts to rows of which the last of each text is the pooled one.
    fn apply(self, net: &mut Net, x: ValueId) -> ValueId {
        if self == Pooling::Last {
            return x;
        }
        net.per_sequence(&[x], |net, rows| {
            let x = rows[0];
            let rows = net.rows();
            vec![match self {
                Pooling::First => {
                    let zero = net.op(Op::Constant { value: 0.0, dtype: DType::I32 }, &[]);
                    let first = net.min(rows, zero);
                    net.gather(x, first)
                }
                Pooling::Mean | Pooling::Last => {
                    let sum = net.reduce(RedOp::Sum, x, 0);
                    // Once for every row, as rows are what is put together again.
                    let (n, length) = (net.n(), net.length());
                    let counts = net.max(rows, length);
                    let counts = net.cast(counts, DType::F32);
                    let counts = net.reshape(counts, [n, Dim::from(1)]);
                    net.div(sum, counts)
                }
            }]
        })[0]
    }
}

/// A step from the pooled row to the result.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// `{name}.weight: [out, in]`, with `{name}.bias` where `bias`.
    Linear {
        name: String,
        out: usize,
        bias: bool,
    },
    Activation(Activation),
    Tanh,
    /// With `{name}.weight`.
    Norm {
        name: String,
        norm: Norm,
    },
    /// Divided by its length.
    Normalize,
}

/// What the vector of a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Compared with those of other texts.
    Embedding,
    /// One number for each label of a classification; one in all, for a reranker.
    Scores,
}

#[derive(Clone, Debug, PartialEq)]
pub struct TextHead {
    pub pooling: Pooling,
    pub parts: Vec<Part>,
    pub purpose: Purpose,
}

/// Smallest length that a vector is divided by (`torch.nn.functional.normalize`).
const LEAST_LENGTH: f64 = 1e-12;

impl TextHead {
    /// The pooled row, of length 1.
    pub fn embedding(pooling: Pooling) -> TextHead {
        TextHead { pooling, parts: vec![Part::Normalize], purpose: Purpose::Embedding }
    }

    /// Floats of a text's vector, where a hidden state has `hidden`.
    pub fn width(&self, hidden: usize) -> usize {
        let linear = |part: &Part| match part {
            Part::Linear { out, .. } => Some(*out),
            _ => None,
        };
        self.parts.iter().rev().find_map(linear).unwrap_or(hidden)
    }

    /// The vector of each text, `[texts, width]`, of what the layers make, `x: [n, hidden]`. `norm` is the one after the
    /// last layer.
    pub(crate) fn apply(
        &self,
        net: &mut Net,
        x: ValueId,
        norm: impl FnOnce(&mut Net, ValueId) -> ValueId,
    ) -> ValueId {
        let mut x = match self.pooling {
            // The norm of one row is enough.
            Pooling::Last => {
                let last = net.wanted_rows(x);
                norm(net, last)
            }
            pooling => {
                let x = norm(net, x);
                let x = pooling.apply(net, x);
                net.wanted_rows(x)
            }
        };
        net.tap("pooled", x);
        for part in &self.parts {
            x = part.apply(net, x);
        }
        x
    }
}

impl Part {
    fn apply(&self, net: &mut Net, x: ValueId) -> ValueId {
        match self {
            Part::Linear { name, out, bias } => Linear::new(name, *out).bias(*bias).apply(net, x),
            Part::Activation(activation) => activation.apply(net, x),
            Part::Tanh => net.tanh(x),
            Part::Norm { name, norm } => norm.apply(net, x, name),
            Part::Normalize => {
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
