//! What a model family implements: its tensors and its graph. One file per family, one line in the registry.

use crate::checkpoint::Distribution;
use crate::error::StreamError;
use crate::pooling_head::PoolingHead;
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::ValueId;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::FuncId;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::types::{DType, TensorType};
use std::any::Any;
use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Arc;

/// Which positions get logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitScope {
    Last,
    All,
    /// Those whose rows the second input `i32[n]` begins with; how many is said when it is run.
    OutputRows,
}

/// One entry function to build: token ids `i32[n]`, and with [`LogitScope::OutputRows`] row numbers `i32[n]`, to logits
/// `f32[1 or n, vocab]`.
#[derive(Clone, Debug)]
pub struct EntrySpec<'a> {
    pub name: &'a str,
    /// Tokens in one call: `n`, or 1 for decoding.
    pub n: Dim,
    pub logits: LogitScope,
    /// Positions that caches have room for; of no meaning to recurrent models.
    pub context: usize,
    /// What is seen of a sequence of any length; [`Architecture::streaming_window`].
    pub streaming: Option<StreamingWindow>,
    /// Which sequences the tokens are of.
    pub batching: RowBatching,
    /// Whole texts in, with no caches and states; this makes a vector of each in place of logits.
    pub pooling_head: Option<&'a PoolingHead>,
    /// Rows go through the adapter of their sequence too.
    pub adapters: Option<AdapterSlots>,
    /// The tokens are the whole source text of an encoder-decoder model: what the decoder looks at is kept, and there are no
    /// logits ([`ModelDefinition::decoder_start_token_id`]).
    pub is_encoder_input: bool,
}

/// Room for adapters (LoRA) that are chosen when the model runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdapterSlots {
    /// Adapters that fit beside each other.
    pub slots: usize,
    /// The most rank that one may have; a multiple of [`AdapterSlots::RANK_STEP`].
    pub rank: usize,
}

impl AdapterSlots {
    /// Ranks are filled up to a multiple of this, which kernels take together.
    pub const RANK_STEP: usize = 16;

    /// Matrices of each kind: those of slot 0, which stay zero, are for sequences without an adapter.
    pub fn matrix_count(&self) -> usize {
        self.slots + 1
    }
}

impl EntrySpec<'_> {
    /// Types of the inputs.
    pub fn inputs(&self) -> Vec<TensorType> {
        let rows = TensorType::new(DType::I32, [&self.n]);
        match self.logits {
            LogitScope::Last | LogitScope::All => vec![rows],
            LogitScope::OutputRows => vec![rows.clone(), rows],
        }
    }

    /// Tokens that a sequence has seen before a call.
    pub fn past(&self) -> Dim {
        if self.pooling_head.is_some() || self.is_encoder_input {
            Dim::from(0)
        } else {
            Dim::sym(SizeSymbol::Past)
        }
    }

    /// Tokens of one sequence in a call.
    pub fn sequence_rows(&self) -> Dim {
        match self.batching {
            RowBatching::Single | RowBatching::Ragged => self.n.clone(),
            RowBatching::OneEach => Dim::from(1),
        }
    }

    /// The rows of `x: [n, ..]` whose logits are asked for; `inputs` are those of the function.
    pub fn output_rows(&self, b: &mut GraphBuilder, x: ValueId, inputs: &[ValueId]) -> ValueId {
        match (self.logits, inputs) {
            (LogitScope::Last, _) => b.slice(x, 0, self.n.sub(&Dim::from(1)), Dim::from(1)),
            (LogitScope::OutputRows, &[_, wanted, ..]) => b.output_rows(x, wanted),
            (LogitScope::All | LogitScope::OutputRows, _) => x,
        }
    }
}

/// What a model is given to see of a sequence that goes on for ever: a window over the newest tokens, and before it the
/// first ones, which attention needs as a place for the weight that no other token gets (Xiao et al., "Efficient Streaming
/// Language Models with Attention Sinks", 2023). Positions are places in what is seen, so no distance reaches `window`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamingWindow {
    /// Tokens that are seen together, the sinks among them.
    pub window: usize,
    /// First tokens that stay visible.
    pub sinks: usize,
}

/// A configured model.
pub trait ModelDefinition: Any + Debug + Send + Sync {
    /// Adds an entry function.
    fn build(&self, b: &mut GraphBuilder, entry: &EntrySpec) -> FuncId;

    /// Size of the vocabulary, which the tokenizer has to fit.
    fn vocab(&self) -> usize;

    /// Length the model was trained with.
    fn context_length(&self) -> usize;

    /// False for recurrent models: they keep a state of fixed size and may go beyond [`ModelDefinition::context_length`].
    fn has_cache(&self) -> bool;

    /// True for prefix language models: tokens see later ones of the prompt, which has to come in one call.
    fn needs_whole_prompts(&self) -> bool {
        false
    }

    /// The token that the decoder of an encoder-decoder model starts with. Such a model has an entry function of the source text too
    /// ([`EntrySpec::is_encoder_input`]), and its sequences are the tokens of the source, this one, and what follows.
    fn decoder_start_token_id(&self) -> Option<u32> {
        None
    }

    /// True for mixtures of experts: a prompt's rows are divided among many matrices, so that more rows at a time are worth
    /// their memory.
    fn has_experts(&self) -> bool {
        false
    }

    /// How many newest tokens the model sees, the current one included, if older ones change nothing.
    fn window(&self) -> Option<usize> {
        None
    }

    /// Why a sequence cannot go on beyond the context with a window and sinks, if it cannot.
    fn streaming_obstacle(&self) -> Option<&'static str> {
        None
    }

    /// Canonical name and shape of every tensor that the checkpoint has to have.
    fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)>;

    /// The canonical name of a tensor of the checkpoint; an unknown name comes back as it is.
    fn canonical_name(&self, stored_name: &str) -> String {
        stored_name.to_string()
    }

    /// Canonical names of tensors that are the same one, best first, for a checkpoint that lacks this one.
    fn fallback_names(&self, missing: &str) -> &'static [&'static str] {
        let _ = missing;
        &[]
    }

    /// True if the matrix of this name in the checkpoint is the transpose of what its canonical name stands for.
    fn is_stored_transposed(&self, stored_name: &str) -> bool {
        let _ = stored_name;
        false
    }

    /// True for tensors (by canonical name) that checkpoints may hold and that the model does not need.
    fn is_ignored(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// What is made of a text, by models that are made for texts: encoders.
    fn default_pooling_head(&self) -> Option<PoolingHead> {
        None
    }

    /// Whether the definition can be built with [`EntrySpec::pooling_head`].
    fn supports_pooling(&self) -> bool {
        false
    }

    /// How many types a token of a text may have (BERT: of the first or of the second text of a pair). One of type `t` is fed as its
    /// id plus `t` times [`ModelDefinition::vocab`].
    fn token_types(&self) -> usize {
        1
    }

    /// As [`ModelDefinition::tensor_shapes`], of a model that makes vectors of texts.
    fn tensor_shapes_with_head(&self, head: &PoolingHead) -> Vec<(String, Vec<usize>)> {
        let _ = head;
        self.tensor_shapes()
    }

    /// True for the tensor that makes logits of hidden states and nothing else.
    fn is_logit_head(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// Width of the hidden states; 0 where [`ModelDefinition::supports_pooling`] is false.
    fn hidden(&self) -> usize {
        0
    }

    /// Canonical names of the embedding table that is the head as well, and of the head that there would be otherwise.
    fn tied_embedding(&self) -> Option<(&'static str, &'static str)> {
        None
    }

    /// Random values for a tensor that keep the model in a sane range.
    fn distribution(&self, name: &str, shape: &[usize]) -> Distribution;
}

/// A configured model of any family.
#[derive(Clone, Debug)]
pub struct Architecture {
    definition: Arc<dyn ModelDefinition>,
    streaming: Option<StreamingWindow>,
    pooling_head: Option<PoolingHead>,
}

impl Architecture {
    /// Encoders make vectors of texts.
    pub fn new(definition: impl ModelDefinition) -> Architecture {
        let pooling_head = definition.default_pooling_head();
        Architecture { definition: Arc::new(definition), streaming: None, pooling_head }
    }

    /// The model makes vectors of texts in this way. `None`: that of its own, or logits.
    pub fn with_pooling_head(self, head: Option<PoolingHead>) -> Architecture {
        let texts = head.or_else(|| self.definition.default_pooling_head());
        Architecture { pooling_head: texts, ..self }
    }

    /// What is made of texts; `None` for models that make logits.
    pub fn pooling_head(&self) -> Option<&PoolingHead> {
        self.pooling_head.as_ref()
    }

    /// Floats of the vector of a text; `None` for models that make logits.
    pub fn embedding_size(&self) -> Option<usize> {
        Some(self.pooling_head.as_ref()?.output_size(self.definition.hidden()))
    }

    /// How many numbers a token may be fed as: the tokens, once for each type that they may have.
    pub fn token_id_count(&self) -> usize {
        self.definition.vocab() * self.definition.token_types()
    }

    /// Canonical name and shape of every tensor that the checkpoint has to have.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        match &self.pooling_head {
            Some(head) => self.definition.tensor_shapes_with_head(head),
            None => self.definition.tensor_shapes(),
        }
    }

    /// See [`ModelDefinition::fallback_names`].
    pub fn fallback_names(&self, missing: &str) -> &'static [&'static str] {
        self.definition.fallback_names(missing)
    }

    /// True for tensors (by canonical name) that checkpoints may hold and that the model does not need.
    pub fn is_ignored(&self, name: &str) -> bool {
        self.definition.is_ignored(name)
            || (self.pooling_head.is_some() && self.definition.is_logit_head(name))
    }

    /// The configuration, if it is of this family.
    pub fn downcast_family<T: ModelDefinition>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.definition;
        any.downcast_ref()
    }

    /// The model with a window of `window` tokens (of what it was trained with where `None`), of which the first `sinks`
    /// are those that the sequence begins with.
    pub fn with_streaming_window(
        self,
        window: Option<usize>,
        sinks: usize,
    ) -> Result<Architecture, StreamError> {
        if window.is_none() && sinks == 0 {
            return Ok(self);
        }
        if self.pooling_head.is_some() {
            return Err(StreamError::Unsuitable {
                why: "the model reads whole texts, and keeps nothing of them",
            });
        }
        if !self.has_cache() {
            return Err(StreamError::Unsuitable {
                why: "a recurrent model keeps no tokens that could be dropped",
            });
        }
        if let Some(why) = self.definition.streaming_obstacle() {
            return Err(StreamError::Unsuitable { why });
        }
        let trained = self.context_length();
        if let Some(window) = window.filter(|&w| w > trained) {
            return Err(StreamError::TooLong { window, trained });
        }
        let own = self.definition.window();
        let window = match (window, own) {
            (Some(window), Some(own)) => window.min(own),
            (Some(window), None) => window,
            (None, Some(own)) => own,
            (None, None) => return Err(StreamError::NoWindow { sinks }),
        };
        if sinks >= window {
            return Err(StreamError::NothingLeft { sinks, window });
        }
        Ok(Architecture { streaming: Some(StreamingWindow { window, sinks }), ..self })
    }

    /// What [`Architecture::with_streaming_window`] gave the model to see.
    pub fn streaming_window(&self) -> Option<StreamingWindow> {
        self.streaming
    }

    /// How many newest tokens the model sees, the current one included, if between them and [`Architecture::sinks`]
    /// nothing counts.
    pub fn window(&self) -> Option<usize> {
        self.streaming.map(|s| s.window - s.sinks).or_else(|| self.definition.window())
    }

    /// How many first tokens the model sees for ever.
    pub fn sinks(&self) -> usize {
        self.streaming.map_or(0, |s| s.sinks)
    }

    /// Room in the caches where the user asks for none: what the model was trained with, at most 4096 positions; with a
    /// window somewhat more than that, so that old rows can be dropped now and then.
    pub fn default_context(&self) -> usize {
        let room = |window: usize| window.saturating_add(1024);
        match self.streaming {
            Some(stream) => room(stream.window),
            None => self.context_length().min(self.window().map_or(4096, |w| room(w).max(4096))),
        }
    }
}

impl Deref for Architecture {
    type Target = dyn ModelDefinition;
    fn deref(&self) -> &Self::Target {
        &*self.definition
    }
}
