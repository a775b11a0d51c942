//! What the definitions of transformers share: the frame around the layers, an entry function under construction, and how
//! a definition becomes one.

mod outer_layers;
mod pooling;

pub use crate::config::sizes::ModelSizes;
pub use crate::model_builder::{
    ADAPTER_SLOT, DROPPED_ROWS, FACTOR_A, FACTOR_B, ModelBuilder, SEQUENCE_LENGTH, SOURCE_LENGTH,
};
pub use outer_layers::OuterLayers;

use crate::checkpoint::Distribution;
use crate::definition::{EntrySpec, LogitScope, ModelDefinition};
use crate::pooling_head::PoolingHead;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::FuncId;
use mlcc_ir::sequences::RowBatching;
use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Debug;

/// Why [`Transformer::streaming_obstacle`] where positions have embeddings of their own.
pub(crate) const LEARNED_POSITIONS: &str =
    "the positions of this model are learned one by one, and there is none after the last";

/// The widest of the layers' windows; `None` if a layer has none.
pub fn widest_window(windows: &[Option<usize>]) -> Option<usize> {
    windows.iter().copied().try_fold(0, |widest, window| Some(widest.max(window?))).filter(|&w| w > 0)
}

/// A decoder-only transformer: configuration and definition of a family. What is the same in all of them stands in
/// [`add_forward`]; a family says what its layers are.
pub trait Transformer: Any + Debug + Send + Sync {
    /// What all layers use and is computed once in a call: tables of the rotary embedding, mostly.
    type Shared;

    fn sizes(&self) -> &ModelSizes;

    /// What stands around the layers.
    fn outer_layers(&self) -> OuterLayers;

    fn prepare_shared(&self, net: &mut ModelBuilder) -> Self::Shared;

    /// Adds one layer: `x: [n, hidden]` to `[n, hidden]`.
    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, shared: &Self::Shared) -> ValueId;

    /// What goes into the first layer, `[n, hidden]`.
    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        self.outer_layers().embed(net, self.sizes().vocab, self.sizes().hidden)
    }

    /// Logits `[rows, vocab]` of what comes out of the final norm.
    fn logits(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        self.outer_layers().logits(net, x, self.sizes().vocab)
    }

    /// See [`ModelDefinition::has_cache`].
    fn has_cache(&self) -> bool {
        true
    }

    /// See [`ModelDefinition::needs_whole_prompts`].
    fn needs_whole_prompts(&self) -> bool {
        false
    }

    /// See [`ModelDefinition::decoder_start_token_id`].
    fn decoder_start_token_id(&self) -> Option<u32> {
        None
    }

    /// Reads the source text, the tokens of the call, of a model with [`Transformer::decoder_start_token_id`], and keeps what the decoder's
    /// layers look at.
    fn encode_input(&self, net: &mut ModelBuilder) {
        let _ = net;
    }

    /// See [`ModelDefinition::has_experts`].
    fn has_experts(&self) -> bool {
        false
    }

    /// How many newest keys every query sees, the widest layer's; `None` if a layer sees all.
    fn window(&self) -> Option<usize> {
        None
    }

    /// See [`ModelDefinition::streaming_obstacle`]. Positions have to be relative: rotary or ALiBi.
    fn streaming_obstacle(&self) -> Option<&'static str> {
        None
    }

    /// See [`ModelDefinition::default_pooling_head`].
    fn default_pooling_head(&self) -> Option<PoolingHead> {
        None
    }

    /// See [`ModelDefinition::supports_pooling`]. A layer may keep nothing but what [`keep`](crate::layers::attention::append_key_values) does.
    fn supports_pooling(&self) -> bool {
        self.default_pooling_head().is_some()
    }

    /// See [`ModelDefinition::token_types`].
    fn token_types(&self) -> usize {
        1
    }

    /// The canonical name of a tensor of the checkpoint; an unknown name comes back as it is.
    fn canonical_name(&self, stored_name: &str) -> String {
        hugging_face_name(stored_name)
    }

    /// See [`ModelDefinition::fallback_names`].
    fn fallback_names(&self, _missing: &str) -> &'static [&'static str] {
        &[]
    }

    /// True for tensors that checkpoints may hold and the model does not need, beside [`is_buffer`]: a head of its own where
    /// the embedding table is the head.
    fn is_ignored(&self, name: &str) -> bool {
        let frame = self.outer_layers();
        frame.tied && name == frame.head
    }
}

/// Logits of the wanted positions (see [`ModelBuilder::output_rows`]), or vectors of texts.
fn add_forward(model: &impl Transformer, net: &mut ModelBuilder) -> ValueId {
    let shared = model.prepare_shared(net);
    let x = model.embed(net);
    let x = net.add_layers(model.sizes().layers, x, |net, layer, x| model.add_layer(net, layer, x, &shared));
    let frame = model.outer_layers();
    if let Some(head) = net.pooling_head() {
        return head.apply(net, x, &frame, model.sizes().vocab);
    }
    let (norm, name) = frame.norm;
    let x = net.output_rows(x);
    let x = norm.apply(net, x, name);
    net.tap("final_norm", x);
    model.logits(net, x)
}

impl<T: Transformer> ModelDefinition for T {
    fn build(&self, b: &mut GraphBuilder, entry: &EntrySpec) -> FuncId {
        build_entry(self, b, entry, &mut Vec::new())
    }
    fn vocab(&self) -> usize {
        self.sizes().vocab
    }
    fn context_length(&self) -> usize {
        self.sizes().context
    }
    fn has_cache(&self) -> bool {
        Transformer::has_cache(self)
    }
    fn needs_whole_prompts(&self) -> bool {
        Transformer::needs_whole_prompts(self)
    }
    fn decoder_start_token_id(&self) -> Option<u32> {
        Transformer::decoder_start_token_id(self)
    }
    fn has_experts(&self) -> bool {
        Transformer::has_experts(self)
    }

    fn tied_embedding(&self) -> Option<(&'static str, &'static str)> {
        let frame = self.outer_layers();
        frame.tied.then_some((frame.embedding, frame.head))
    }

    fn window(&self) -> Option<usize> {
        Transformer::window(self)
    }
    fn streaming_obstacle(&self) -> Option<&'static str> {
        Transformer::streaming_obstacle(self)
    }
    fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        tensor_shapes(self, None)
    }
    fn tensor_shapes_with_head(&self, head: &PoolingHead) -> Vec<(String, Vec<usize>)> {
        tensor_shapes(self, Some(head))
    }
    fn default_pooling_head(&self) -> Option<PoolingHead> {
        Transformer::default_pooling_head(self)
    }
    fn supports_pooling(&self) -> bool {
        Transformer::supports_pooling(self)
    }
    fn token_types(&self) -> usize {
        Transformer::token_types(self)
    }
    fn is_logit_head(&self, name: &str) -> bool {
        self.outer_layers().head == name
    }
    fn hidden(&self) -> usize {
        self.sizes().hidden
    }
    fn canonical_name(&self, stored_name: &str) -> String {
        Transformer::canonical_name(self, &strip_text_prefix(stored_name))
    }
    fn fallback_names(&self, missing: &str) -> &'static [&'static str] {
        Transformer::fallback_names(self, missing)
    }
    fn is_ignored(&self, name: &str) -> bool {
        is_buffer(name) || is_other_part(name) || Transformer::is_ignored(self, name)
    }
    fn distribution(&self, name: &str, shape: &[usize]) -> Distribution {
        distribution(name, shape)
    }
}

/// What the definition asks for when it is built.
fn tensor_shapes(model: &impl Transformer, texts: Option<&PoolingHead>) -> Vec<(String, Vec<usize>)> {
    let mut tensors = Vec::new();
    let entry = EntrySpec {
        name: "tensors",
        n: Dim::from(1),
        logits: LogitScope::Last,
        context: 1,
        streaming: None,
        batching: RowBatching::Single,
        pooling_head: texts,
        adapters: None,
        is_encoder_input: false,
    };
    build_entry(model, &mut GraphBuilder::new("tensors"), &entry, &mut tensors);
    if Transformer::decoder_start_token_id(model).is_some() {
        let entry = EntrySpec { is_encoder_input: true, ..entry };
        build_entry(model, &mut GraphBuilder::new("tensors"), &entry, &mut tensors);
    }
    let mut seen = BTreeSet::new();
    tensors.retain(|(name, _)| seen.insert(name.clone()));
    tensors
}

fn build_entry(
    model: &impl Transformer,
    b: &mut GraphBuilder,
    entry: &EntrySpec,
    tensors: &mut Vec<(String, Vec<usize>)>,
) -> FuncId {
    b.set_batching(entry.batching);
    b.function(entry.name, FunctionKind::Entry, &entry.inputs(), |b, inputs| {
        let mut net = ModelBuilder::new(b, entry, inputs, model.window(), tensors);
        if entry.is_encoder_input {
            model.encode_input(&mut net);
            return Vec::new();
        }
        vec![add_forward(model, &mut net)]
    })
}

/// Tensors of published checkpoints that are no weights: rotary frequencies and causal masks.
pub fn is_buffer(name: &str) -> bool {
    const BUFFERS: [&str; 7] = [
        ".rotary_emb.inv_freq",
        ".rotary_pos_emb.inv_freq",
        ".attn.masked_bias",
        ".attn.bias",
        ".attention.masked_bias",
        ".attention.bias",
        ".rotary_emb.cos_cached",
    ];
    BUFFERS.iter().any(|end| name.ends_with(end)) || name.ends_with(".rotary_emb.sin_cached")
}

/// The name in the text model of a tensor of a larger model.
pub(crate) fn strip_text_prefix(name: &str) -> Cow<'_, str> {
    if let Some(inner) = name.strip_prefix("model.language_model.") {
        return Cow::Owned(format!("model.{inner}"));
    }
    Cow::Borrowed(name.strip_prefix("language_model.").unwrap_or(name))
}

/// Tensors of the parts around a text model: towers for images and sounds, draft heads.
pub fn is_other_part(name: &str) -> bool {
    const PARTS: [&str; 11] = [
        "visual.",
        "vision_tower.",
        "vision_model.",
        "vision_adapter.",
        "vision_projection.",
        "multi_modal_projector.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "mtp.",
        "patch_merger.",
    ];
    let name = name.strip_prefix("model.").unwrap_or(name);
    PARTS.iter().any(|part| name.starts_with(part))
}

/// Random values that keep a random transformer in the range of a trained one: norms near 1, small biases, matrices with
/// deviation 1/sqrt(inputs).
fn distribution(name: &str, shape: &[usize]) -> Distribution {
    if name.ends_with("bias") {
        return Distribution::Normal { mean: 0.0, deviation: 0.02 };
    }
    match shape {
        [_, inputs, ..] => Distribution::Normal { mean: 0.0, deviation: 1.0 / (*inputs as f32).sqrt() },
        _ => Distribution::Normal { mean: 1.0, deviation: 0.02 },
    }
}

/// Canonical names of the Hugging Face classes whose inner model is called `model`.
pub fn hugging_face_name(name: &str) -> String {
    with_prefix(name, "model.", &["embed_tokens.", "layers.", "norm."])
}

/// The name with `prefix`, if it begins with one of `roots`: checkpoints saved from the inner model leave the prefix out.
pub fn with_prefix(name: &str, prefix: &str, roots: &[&str]) -> String {
    match roots.iter().any(|root| name.starts_with(root)) {
        true => format!("{prefix}{name}"),
        false => name.to_string(),
    }
}
