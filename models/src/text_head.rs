//! What a model of texts makes of the last hidden states of a text: one vector, an embedding or scores. Pooling looks at all
//! rows of a text, the parts after it at one row for each.

use crate::layers::Activation;
use crate::layers::linear::Linear;
use crate::layers::norm::Norm;
use crate::transformer::{Frame, Net};
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
    /// The logit of the token `yes`, less that of `no` where there is one, in place of all logits: of models that answer with a
    /// token. As the module `LogitScore` of sentence-transformers.
    Answer {
        yes: usize,
        no: Option<usize>,
    },
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

    /// The head of the `ForSequenceClassification` classes of decoders: `score.weight: [labels, hidden]`.
    pub fn labels(labels: usize) -> TextHead {
        let score = Part::Linear { name: "score".into(), out: labels, bias: false };
        TextHead { pooling: Pooling::Last, parts: vec![score], purpose: Purpose::Scores }
    }

    /// A score from what comes after the text: [`Part::Answer`].
    pub fn answer(yes: usize, no: Option<usize>) -> TextHead {
        let parts = vec![Part::Answer { yes, no }];
        TextHead { pooling: Pooling::Last, parts, purpose: Purpose::Scores }
    }

    /// The tokens whose logits are looked at.
    pub fn answers(&self) -> impl Iterator<Item = usize> {
        self.parts
            .iter()
            .flat_map(|part| match part {
                Part::Answer { yes, no } => [Some(*yes), *no],
                _ => [None, None],
            })
            .flatten()
    }

    /// Floats of a text's vector, where a hidden state has `hidden`.
    pub fn width(&self, hidden: usize) -> usize {
        let width = |part: &Part| match part {
            Part::Linear { out, .. } => Some(*out),
            Part::Answer { .. } => Some(1),
            Part::Activation(_) | Part::Tanh | Part::Norm { .. } | Part::Normalize => None,
        };
        self.parts.iter().rev().find_map(width).unwrap_or(hidden)
    }

    /// The vector of each text, `[texts, width]`, of what the layers make, `x: [n, hidden]`. `frame` is what stands around the
    /// layers of the model, which has `vocab` tokens.
    pub(crate) fn apply(&self, net: &mut Net, x: ValueId, frame: &Frame, vocab: usize) -> ValueId {
        let norm = |net: &mut Net, x| frame.norm.0.apply(net, x, frame.norm.1);
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
            x = part.apply(net, x, frame, vocab);
        }
        x
    }
}

impl Part {
    fn apply(&self, net: &mut Net, x: ValueId, frame: &Frame, vocab: usize) -> ValueId {
        match self {
            Part::Answer { yes, no } => {
                let yes = frame.logit(net, x, vocab, *yes);
                no.map_or(yes, |no| {
                    let no = frame.logit(net, x, vocab, no);
                    net.sub(yes, no)
                })
            }
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
