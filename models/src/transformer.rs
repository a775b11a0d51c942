//! What the definitions of transformers share: the frame around the layers, an entry function under construction, and how
//! a definition becomes one.

mod adapters;
mod encoder_input;
mod outer_layers;

pub use adapters::{ADAPTER_SLOT, FACTOR_A, FACTOR_B};
pub use encoder_input::SOURCE_LENGTH;
pub use outer_layers::OuterLayers;

use crate::checkpoint::Distribution;
use adapters::AdapterSlotIds;

use crate::definition::{EntrySpec, LogitScope, ModelDefinition, StreamingWindow};
use crate::pooling_head::PoolingHead;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::{FuncId, ParamRole, ParamSource};
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::types::{DType, TensorType};
use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};

/// Sizes that every transformer has.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSizes {
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    /// Key and value heads; queries share them in groups.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_size: usize,
    /// Positions that the model was trained with.
    pub context: usize,
}

impl ModelSizes {
    /// Width of all query heads.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_size
    }
    /// Width of all key (or value) heads.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_size
    }
}

/// The state that counts rows dropped from the start of all caches (`i32[1]`), where [`Transformer::window`] allows that.
/// The program that runs the model changes it; the model only reads it.
pub const DROPPED_ROWS: &str = "cache.dropped_rows";

/// The state that says how long the sequence will be when the prompt has ended that is being fed in several calls
/// (`i32[1]`, 0 at first), of models whose rotary embedding depends on it. The program that runs the model writes it.
pub const SEQUENCE_LENGTH: &str = "sequence.length";

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
    if let Some(head) = net.entry.pooling_head {
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
        let rows = b.iota(entry.past(), entry.sequence_rows());
        // A window as long as the cache hides nothing, and so nothing may be dropped.
        let stream = entry.streaming.filter(|s| s.window < entry.context);
        let window = stream.map(|s| s.window).or(model.window());
        let dropped = window.filter(|&w| w < entry.context).map(|_| {
            let state = b.state(DROPPED_ROWS, TensorType::new(DType::I32, [1]), 0.0);
            b.read(state)
        });
        let mut net = ModelBuilder {
            b,
            entry,
            inputs: inputs.to_vec(),
            rows,
            positions: rows,
            dropped_rows: dropped,
            streaming: stream,
            tensors,
            adapters: None,
        };
        net.positions = net.position_of_row(rows);
        net.adapters = entry.adapters.map(|slots| AdapterSlotIds::for_rows(&mut net, slots));
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

/// An entry function under construction. Dereferences to the builder of its ops.
pub struct ModelBuilder<'a> {
    b: &'a mut GraphBuilder,
    entry: &'a EntrySpec<'a>,
    inputs: Vec<ValueId>,
    rows: ValueId,
    positions: ValueId,
    /// Rows that were dropped before, `i32[1]`, where rows may be dropped.
    dropped_rows: Option<ValueId>,
    streaming: Option<StreamingWindow>,
    /// Checkpoint tensors asked for so far.
    tensors: &'a mut Vec<(String, Vec<usize>)>,
    /// Which adapter each row goes through, where there are slots for them.
    adapters: Option<AdapterSlotIds>,
}

impl Deref for ModelBuilder<'_> {
    type Target = GraphBuilder;
    fn deref(&self) -> &GraphBuilder {
        self.b
    }
}

impl DerefMut for ModelBuilder<'_> {
    fn deref_mut(&mut self) -> &mut GraphBuilder {
        self.b
    }
}

impl ModelBuilder<'_> {
    /// Tokens in this call; of one sequence, where only one is looked at ([`ModelBuilder::per_sequence`]).
    pub fn n(&self) -> Dim {
        if self.in_sequence() { self.entry.sequence_rows() } else { self.entry.n.clone() }
    }
    /// Positions that caches have room for.
    pub fn context(&self) -> usize {
        self.entry.context
    }
    /// Token ids `i32[n]`.
    pub fn tokens(&mut self) -> ValueId {
        let tokens = self.inputs[0];
        let ragged = self.entry.batching == RowBatching::Ragged;
        if self.in_sequence() { self.op(Op::SequenceSplit { ragged }, &[tokens]) } else { tokens }
    }
    /// Everything that looks at one sequence (caches, states, positions) is added by such a `body`: it gets the rows of one
    /// sequence for `rows: [n, ..]`, and what it gives is put together again.
    pub fn per_sequence(
        &mut self,
        rows: &[ValueId],
        body: impl FnOnce(&mut ModelBuilder, &[ValueId]) -> Vec<ValueId>,
    ) -> Vec<ValueId> {
        let rows = self.split_sequences(rows);
        let values = body(self, &rows);
        self.join_sequences(&values)
    }
    /// The same where the results are used in other bodies of this kind only: they stay apart.
    pub fn for_sequences<T>(&mut self, body: impl FnOnce(&mut ModelBuilder) -> T) -> T {
        self.split_sequences(&[]);
        let value = body(self);
        self.join_sequences(&[]);
        value
    }
    /// Rows of the caches that the tokens get, `i32[n]`: positions less the rows that were dropped before. Of one sequence.
    pub fn cache_rows(&self) -> ValueId {
        self.rows
    }
    /// Positions in the sequence of what stands at `rows` of the caches.
    pub fn position_of_row(&mut self, rows: ValueId) -> ValueId {
        match self.dropped_rows {
            Some(dropped) => self.add(rows, dropped),
            None => rows,
        }
    }
    /// What is seen of a sequence that is longer than the caches, if the model was given a window for that.
    pub fn streaming_window(&self) -> Option<StreamingWindow> {
        self.streaming
    }
    /// Places at which the queries `rows` count as standing for the sinks: beyond a full window they stay.
    pub fn sink_positions(&mut self, rows: ValueId) -> Option<ValueId> {
        let stream = self.streaming.filter(|s| s.sinks > 0)?;
        let last = Op::Constant { value: (stream.window - 1) as f64, dtype: DType::I32 };
        let last = self.op(last, &[]);
        Some(self.min(rows, last))
    }
    /// What a layer sees: its newest tokens, `None` for all, and the first ones. `own` is the window that it was trained
    /// with. A window that is narrower than that over the newest tokens stays as it was trained, without sinks.
    pub fn visible_window(&self, own: Option<usize>) -> (Option<usize>, usize) {
        let Some(StreamingWindow { window, sinks }) = self.streaming else {
            return (own.filter(|&w| w < self.context()), 0);
        };
        match own.filter(|&w| w <= window - sinks) {
            Some(own) => (Some(own), 0),
            None => (Some(window - sinks), sinks),
        }
    }
    /// Whether whole texts are read, of which nothing is kept.
    pub fn supports_pooling(&self) -> bool {
        self.entry.pooling_head.is_some()
    }
    /// Tokens of the sequence after this call, or after the prompt that this call is a part of, `i32[1]`. What is seen of
    /// a stream never gets longer than its window.
    pub fn sequence_length(&mut self) -> ValueId {
        let total = self.b.iota(self.entry.past().add(&self.n()), Dim::from(1));
        if self.supports_pooling() {
            return total;
        }
        if let Some(stream) = self.streaming {
            let most = self.op(Op::Constant { value: stream.window as f64, dtype: DType::I32 }, &[]);
            return self.min(total, most);
        }
        let total = self.position_of_row(total);
        let state = self.b.state(SEQUENCE_LENGTH, TensorType::new(DType::I32, [1]), 0.0);
        let announced = self.b.read(state);
        self.max(total, announced)
    }
    /// Positions of the tokens in the sequence, `i32[n]`. Of one sequence.
    pub fn positions(&self) -> ValueId {
        self.positions
    }

    /// A tensor of the checkpoint, by its canonical name.
    pub fn declare_tensor(&mut self, name: &str, shape: &[usize]) -> ParamSource {
        self.tensors.push((name.to_string(), shape.to_vec()));
        ParamSource::Tensor(name.to_string())
    }

    /// A tensor of the checkpoint as a parameter.
    pub fn weight_param(&mut self, name: &str, role: ParamRole, shape: &[usize]) -> ValueId {
        let source = self.declare_tensor(name, shape);
        self.param_from(name, role, TensorType::new(DType::F32, shape.iter().copied()), source)
    }

    /// A vector of the checkpoint, kept in f32.
    pub fn vector_param(&mut self, name: &str, size: usize) -> ValueId {
        self.weight_param(name, ParamRole::Vector, &[size])
    }

    /// A table of numbers that the definition computes. Equal names have to mean equal tables.
    pub fn table_param(&mut self, name: &str, values: Vec<f32>) -> ValueId {
        let ty = TensorType::new(DType::F32, [values.len()]);
        self.param_from(name, ParamRole::Vector, ty, ParamSource::Values(values))
    }

    /// Width of the last axis.
    pub fn width(&self, x: ValueId) -> usize {
        let last = self.ty(x).dims.last().and_then(Dim::as_const);
        last.and_then(|d| usize::try_from(d).ok()).unwrap_or(0)
    }

    /// Token embeddings `[n, hidden]` from the table `name: [vocab, hidden]`.
    pub fn embed(&mut self, name: &str, vocab: usize, hidden: usize) -> ValueId {
        let tokens = self.inputs[0];
        self.embed_ids(name, vocab, hidden, tokens)
    }

    /// Rows `[n, hidden]` of the table `name: [vocab, hidden]`, by `ids: i32[n]`.
    pub fn embed_ids(&mut self, name: &str, vocab: usize, hidden: usize, ids: ValueId) -> ValueId {
        let table = self.weight_param(name, ParamRole::Embedding, &[vocab, hidden]);
        self.gather(table, ids)
    }

    /// Token ids and token types `i32[n]` of a model with `types` types ([`ModelDefinition::token_types`]).
    pub fn split_token_types(&mut self, vocab: usize, types: usize) -> (ValueId, ValueId) {
        let tokens = self.inputs[0];
        let number = |net: &mut ModelBuilder, value: usize| {
            net.op(Op::Constant { value: value as f64, dtype: DType::I32 }, &[])
        };
        let (zero, one) = (number(self, 0), number(self, 1));
        let mut kind = zero;
        for next in 1..types {
            let first = number(self, next * vocab);
            let reached = self.select_ge(tokens, first, one, zero);
            kind = self.add(kind, reached);
        }
        let vocab = number(self, vocab);
        let before = self.mul(kind, vocab);
        (self.sub(tokens, before), kind)
    }

    /// All layers in order on the embeddings `x`; `layer(net, number, x)` adds one.
    pub fn add_layers(
        &mut self,
        count: usize,
        mut x: ValueId,
        mut layer: impl FnMut(&mut ModelBuilder, usize, ValueId) -> ValueId,
    ) -> ValueId {
        self.tap("embedding", x);
        for number in 0..count {
            x = layer(self, number, x);
            self.tap(format!("layer.{number}"), x);
        }
        x
    }

    /// The rows of `x: [n, hidden]` whose logits are wanted.
    pub fn output_rows(&mut self, x: ValueId) -> ValueId {
        // What follows is of fewer rows, and the head has no adapter.
        self.adapters = None;
        self.entry.output_rows(self.b, x, &self.inputs)
    }

    /// `x + h`, with `h` the output of a part of a layer (`attention` or `mlp`).
    pub fn add_residual(&mut self, layer: usize, part: &str, x: ValueId, h: ValueId) -> ValueId {
        self.tap(format!("layer.{layer}.{part}"), h);
        self.add(x, h)
    }

    /// `cap * tanh(x / cap)`.
    pub fn softcap(&mut self, x: ValueId, cap: f64) -> ValueId {
        let small = self.scale(x, 1.0 / cap);
        let bounded = self.tanh(small);
        self.scale(bounded, cap)
    }

    /// `[n, heads * size]` as `[n, heads, size]`.
    pub fn split_heads(&mut self, x: ValueId, heads: usize) -> ValueId {
        let (n, size) = (self.n(), self.width(x) / heads.max(1));
        self.reshape(x, [n, Dim::from(heads), Dim::from(size)])
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
