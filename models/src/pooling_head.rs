//! What a model of texts makes of the last hidden states of a text: one vector, an embedding or scores. Pooling looks at all
//! rows of a text, the parts after it at one row for each.

use crate::layers::ActivationFunction;
use crate::layers::linear::LinearLayer;
use crate::layers::norm::Norm;
use crate::transformer::{ModelBuilder, OuterLayers};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// How the rows of a text become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingMode {
    /// That of the first token.
    First,
    /// The mean of all.
    Mean,
    /// That of the last token.
    Last,
}

/// The names of the ways of pooling, as sentence-transformers spells them.
pub const POOLINGS: [(&str, PoolingMode); 3] =
    [("cls", PoolingMode::First), ("mean", PoolingMode::Mean), ("lasttoken", PoolingMode::Last)];

impl PoolingMode {
    pub fn from_name(name: &str) -> Option<PoolingMode> {
        POOLINGS.iter().find(|(known, _)| *known == name).map(|(_, pooling)| *pooling)
    }

    pub fn name(self) -> &'static str {
        POOLINGS.iter().find(|(_, pooling)| *pooling == self).map_or("", |(name, _)| name)
    }

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

/// A step from the pooled row to the result.
#[derive(Clone, Debug, PartialEq)]
pub enum PoolingStep {
    /// `{name}.weight: [out, in]`, with `{name}.bias` where `bias`.
    Linear {
        name: String,
        out: usize,
        bias: bool,
    },
    Activation(ActivationFunction),
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
pub enum PoolingOutput {
    /// Compared with those of other texts.
    Embedding,
    /// One number for each label of a classification; one in all, for a reranker.
    Scores,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PoolingHead {
    pub pooling: PoolingMode,
    pub steps: Vec<PoolingStep>,
    pub output: PoolingOutput,
}

/// Smallest length that a vector is divided by (`torch.nn.functional.normalize`).
const LEAST_LENGTH: f64 = 1e-12;

impl PoolingHead {
    /// The pooled row, of length 1.
    pub fn embedding(pooling: PoolingMode) -> PoolingHead {
        PoolingHead { pooling, steps: vec![PoolingStep::Normalize], output: PoolingOutput::Embedding }
    }

    /// The head of the `ForSequenceClassification` classes of decoders: `score.weight: [labels, hidden]`.
    pub fn classification(labels: usize) -> PoolingHead {
        let score = PoolingStep::Linear { name: "score".into(), out: labels, bias: false };
        PoolingHead { pooling: PoolingMode::Last, steps: vec![score], output: PoolingOutput::Scores }
    }

    /// A score from what comes after the text: [`PoolingStep::Answer`].
    pub fn token_score(yes: usize, no: Option<usize>) -> PoolingHead {
        let steps = vec![PoolingStep::Answer { yes, no }];
        PoolingHead { pooling: PoolingMode::Last, steps, output: PoolingOutput::Scores }
    }

    /// The tokens whose logits are looked at.
    pub fn answer_tokens(&self) -> impl Iterator<Item = usize> {
        self.steps
            .iter()
            .flat_map(|part| match part {
                PoolingStep::Answer { yes, no } => [Some(*yes), *no],
                _ => [None, None],
            })
            .flatten()
    }

    /// Floats of a text's vector, where a hidden state has `hidden`.
    pub fn output_size(&self, hidden: usize) -> usize {
        let width = |part: &PoolingStep| match part {
            PoolingStep::Linear { out, .. } => Some(*out),
            PoolingStep::Answer { .. } => Some(1),
            PoolingStep::Activation(_)
            | PoolingStep::Tanh
            | PoolingStep::Norm { .. }
            | PoolingStep::Normalize => None,
        };
        self.steps.iter().rev().find_map(width).unwrap_or(hidden)
    }

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
