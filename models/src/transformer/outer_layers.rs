//! What stands around the layers of a transformer: the embedding table before them, the final norm and the head after them.

use crate::layers::linear::{LinearLayer, logit_head_or_tied};
use crate::layers::norm::Norm;
use crate::transformer::ModelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::RowBlocks;

/// Names of the tensors around the layers, and what is done with their values.
#[derive(Clone, Debug, PartialEq)]
pub struct OuterLayers {
    /// The table of token embeddings.
    pub embedding: &'static str,
    /// Factor of the embeddings.
    pub embedding_scale: Option<f64>,
    /// The norm after the last layer, and its name.
    pub norm: (Norm, &'static str),
    pub head: &'static str,
    /// The embedding table is the head.
    pub tied: bool,
    /// Factor of the logits.
    pub logit_scale: Option<f64>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f64>,
}

impl OuterLayers {
    pub fn with_names(
        embedding: &'static str,
        norm: (Norm, &'static str),
        head: &'static str,
        tied: bool,
    ) -> OuterLayers {
        OuterLayers { embedding, embedding_scale: None, norm, head, tied, logit_scale: None, logit_cap: None }
    }

    /// With the names of the Hugging Face classes whose inner model is called `model`.
    pub fn hugging_face(norm: Norm, tied: bool) -> OuterLayers {
        OuterLayers::with_names("model.embed_tokens.weight", (norm, "model.norm"), "lm_head.weight", tied)
    }

    /// Embeddings `[n, hidden]` of the tokens of a call.
    pub fn embed(&self, net: &mut ModelBuilder, vocab: usize, hidden: usize) -> ValueId {
        let x = net.embed(self.embedding, vocab, hidden);
        self.embedding_scale.map_or(x, |factor| net.scale(x, factor))
    }

    /// Logits `[rows, vocab]` of `x: [rows, hidden]`.
    pub fn logits(&self, net: &mut ModelBuilder, x: ValueId, vocab: usize) -> ValueId {
        let tied = self.tied.then_some(self.embedding);
        let logits = logit_head_or_tied(net, x, self.head, tied, vocab);
        self.scale_logits(net, logits)
    }

    /// The logit `[rows, 1]` of one token, by its row of the head, which is kept in f32.
    pub(crate) fn token_logit(
        &self,
        net: &mut ModelBuilder,
        x: ValueId,
        vocab: usize,
        token: usize,
    ) -> ValueId {
        let head = if self.tied { self.embedding } else { self.head };
        let head = LinearLayer::new(head.strip_suffix(".weight").unwrap_or(head), vocab).unquantized();
        let logit = head.with_part(&format!("token{token}"), RowBlocks::range(token, 1, vocab)).apply(net, x);
        self.scale_logits(net, logit)
    }

    fn scale_logits(&self, net: &mut ModelBuilder, mut logits: ValueId) -> ValueId {
        if let Some(factor) = self.logit_scale {
            logits = net.scale(logits, factor);
        }
        self.logit_cap.map_or(logits, |cap| net.softcap(logits, cap))
    }
}
