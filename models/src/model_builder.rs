//! An entry function of a model under construction: positions, caches and rows of sequences, parameters by the names of the
//! checkpoint.

mod adapters;
mod encoder_input;

pub use adapters::{ADAPTER_SLOT, FACTOR_A, FACTOR_B};
pub use encoder_input::SOURCE_LENGTH;

use crate::definition::{EntrySpec, StreamingWindow};
use crate::pooling_head::PoolingHead;
use adapters::AdapterSlotIds;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::types::{DType, TensorType};
use std::ops::{Deref, DerefMut};

/// The state that counts rows dropped from the start of all caches (`i32[1]`), where the window of a model allows that. The
/// program that runs the model changes it; the model only reads it.
pub const DROPPED_ROWS: &str = "cache.dropped_rows";

/// The state that says how long the sequence will be when the prompt has ended that is being fed in several calls
/// (`i32[1]`, 0 at first), of models whose rotary embedding depends on it. The program that runs the model writes it.
pub const SEQUENCE_LENGTH: &str = "sequence.length";

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

impl<'a> ModelBuilder<'a> {
    /// An entry function with these inputs, of a model whose layers see at most `window` tokens. Tensors that it asks for are added
    /// to `tensors`.
    pub(crate) fn new(
        b: &'a mut GraphBuilder,
        entry: &'a EntrySpec<'a>,
        inputs: &[ValueId],
        window: Option<usize>,
        tensors: &'a mut Vec<(String, Vec<usize>)>,
    ) -> ModelBuilder<'a> {
        let rows = b.iota(entry.past(), entry.sequence_rows());
        // A window as long as the cache hides nothing, and so nothing may be dropped.
        let stream = entry.streaming.filter(|s| s.window < entry.context);
        let window = stream.map(|s| s.window).or(window);
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
        net
    }

    /// What is made of texts, where whole texts are read.
    pub(crate) fn pooling_head(&self) -> Option<&'a PoolingHead> {
        self.entry.pooling_head
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
