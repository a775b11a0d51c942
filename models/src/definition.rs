//! What a model family implements: its tensors and its graph. One file per family, one line in the registry.

use crate::checkpoint::Distribution;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::FuncId;
use std::any::Any;
use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Arc;

/// Which positions get logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logits {
    Last,
    All,
}

/// One entry function to build: token ids `i32[n]` to logits `f32[1 or n, vocab]`.
#[derive(Clone, Debug)]
pub struct EntrySpec<'a> {
    pub name: &'a str,
    /// Tokens in one call: `n`, or 1 for decoding.
    pub n: Dim,
    pub logits: Logits,
    /// Positions that caches have room for; of no meaning to recurrent models.
    pub context: usize,
}

/// A configured model.
pub trait Definition: Any + Debug + Send + Sync {
    /// Adds an entry function.
    fn build(&self, b: &mut GraphBuilder, entry: &EntrySpec) -> FuncId;

    /// Size of the vocabulary, which the tokenizer has to fit.
    fn vocab(&self) -> usize;

    /// Length the model was trained with.
    fn context_length(&self) -> usize;

    /// False for recurrent models: they keep a state of fixed size and may go beyond [`Definition::context_length`].
    fn has_cache(&self) -> bool;

    /// True for prefix language models: tokens see later ones of the prompt, which has to come in one call.
    fn needs_whole_prompts(&self) -> bool {
        false
    }

    /// How many newest tokens the model sees, the current one included, if older ones change nothing.
    fn window(&self) -> Option<usize> {
        None
    }

    /// Canonical name and shape of every tensor that the checkpoint has to have.
    fn tensors(&self) -> Vec<(String, Vec<usize>)>;

    /// The canonical name of a tensor of the checkpoint; an unknown name comes back as it is.
    fn canonical_name(&self, stored_name: &str) -> String {
        stored_name.to_string()
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

    /// Random values for a tensor that keep the model in a sane range.
    fn distribution(&self, name: &str, shape: &[usize]) -> Distribution;
}

/// A configured model of any family.
#[derive(Clone, Debug)]
pub struct Architecture(Arc<dyn Definition>);

impl Architecture {
    pub fn new(definition: impl Definition) -> Architecture {
        Architecture(Arc::new(definition))
    }

    /// The configuration, if it is of this family.
    pub fn family<T: Definition>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref()
    }

    /// Room in the caches where the user asks for none: what the model was trained with, at most 4096 positions; with a
    /// window somewhat more than that, so that old rows can be dropped now and then.
    pub fn default_context(&self) -> usize {
        let most = self.window().map_or(4096, |window| window.saturating_add(1024).max(4096));
        self.context_length().min(most)
    }
}

impl Deref for Architecture {
    type Target = dyn Definition;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}
