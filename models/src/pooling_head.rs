//! What a model of texts makes of the last hidden states of a text: one vector, an embedding or scores. Pooling looks at all
//! rows of a text, the parts after it at one row for each.

use crate::layer_kinds::{ActivationFunction, Norm};

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
}
