//! Vectors of texts: embeddings, or scores of a classification. Whole texts are read, several in one call,
//! and then forgotten: there are no caches and no states.

use std::path::Path;

use mlcc_abi::{EntryPoint, Sequence};

use crate::buffer::AlignedBuffer;
use crate::device::{BatchCall, missing_entry_error};
use crate::trace::{StepTimes, StepTrace};
use crate::{Error, Model, Result};

/// Makes vectors of texts. Texts of any lengths go together, without padding, and no vector depends on the
/// others.
///
/// ```no_run
/// # use mlcc_runtime::{LoadOptions, Model};
/// # fn main() -> Result<(), mlcc_runtime::Error> {
/// let model = Model::load("bge-m3.so", &LoadOptions::default())?;
/// let mut embedder = model.text_embedder()?;
/// // Token ids of two texts, with the special tokens that the model wants; 2 vectors.
/// let embeddings = embedder.embed(&[&[0, 35378, 2], &[0, 8999, 38, 2]])?;
/// assert_eq!(embeddings.len(), 2 * model.text_width());
/// # Ok(()) }
/// ```
pub struct TextEmbedder {
    model: Model,
    /// Room for the tokens of a call.
    tokens: AlignedBuffer,
    /// Room for as many row numbers.
    output_rows: AlignedBuffer,
    /// The vectors of a call.
    call_vectors: AlignedBuffer,
    /// Vectors of all texts of the last [`TextEmbedder::embed`].
    vectors: Vec<f32>,
    sequences: Vec<Sequence>,
    token_ids: Vec<i32>,
    last_rows: Vec<i32>,
    trace: Option<Box<StepTrace>>,
}

// SAFETY: the pointers in `sequences` are null: texts have neither states nor pages.
unsafe impl Send for TextEmbedder {}

impl Model {
    /// Floats of the vector of a text; 0 if the model makes logits.
    pub fn text_width(&self) -> usize {
        self.plan().text_width as usize
    }

    /// Most tokens of a text.
    pub fn max_text_tokens(&self) -> usize {
        let plan = self.plan();
        let most = self.max_step_tokens();
        if plan.context == 0 { most } else { most.min(plan.context as usize) }
    }

    /// Memory to make vectors of texts.
    pub fn text_embedder(&self) -> Result<TextEmbedder> {
        let plan = self.plan();
        if plan.text_width == 0 {
            return Err(Error::NoTexts { path: self.path().to_path_buf() });
        }
        let rows = self.max_step_tokens() as u64;
        Ok(TextEmbedder {
            model: self.clone(),
            tokens: AlignedBuffer::integers("the tokens of texts", rows)?,
            output_rows: AlignedBuffer::integers("the wanted rows of texts", rows)?,
            call_vectors: AlignedBuffer::floats(
                "the vectors of texts",
                plan.text_width.saturating_mul(plan.batch),
            )?,
            vectors: Vec::new(),
            sequences: Vec::new(),
            token_ids: Vec::new(),
            last_rows: Vec::new(),
            trace: None,
        })
    }

    fn path(&self) -> &Path {
        self.artifact().path()
    }
}

impl TextEmbedder {
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The vectors of `texts`, in order, [`Model::text_width`] floats each. Every text has at least one token
    /// and at most [`Model::max_text_tokens`]. In a model with several types of tokens (BERT) token `t` of
    /// type `k` is `t + k * vocabulary`. If one is refused, nothing was computed.
    pub fn embed(&mut self, texts: &[&[i32]]) -> Result<&[f32]> {
        self.vectors.clear();
        for (index, text) in texts.iter().enumerate() {
            self.check_text(text).map_err(|source| Error::Text { index, source: Box::new(source) })?;
        }
        let (most, batch) = (self.model.max_step_tokens(), self.model.plan().batch.max(1) as usize);
        let mut rest = texts;
        while !rest.is_empty() {
            let mut rows = 0;
            let fits = |text: &&&[i32]| {
                rows += text.len();
                rows <= most
            };
            let count = rest.iter().take(batch).take_while(fits).count();
            let (now, later) = rest.split_at(count);
            self.run_call(now)?;
            rest = later;
        }
        Ok(&self.vectors)
    }

    /// Takes the time of each item of the steps from now on, or no longer. Gives what was taken so far, as
    /// [`crate::Session::trace`].
    pub fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let taken = self.trace.take().map_or(Vec::new(), |trace| trace.into_times());
        self.trace = on.then(|| Box::new(StepTrace::new(self.model.threads())));
        taken
    }

    fn check_text(&self, text: &[i32]) -> Result<()> {
        let (vocab, most) = (self.model.plan().vocab, self.model.max_text_tokens());
        if text.is_empty() {
            return Err(Error::EmptyText);
        }
        if text.len() > most {
            return Err(Error::TextTooLong { n: text.len(), most });
        }
        let known = |token: i32| u64::try_from(token).is_ok_and(|token| token < vocab);
        match text.iter().position(|&token| !known(token)) {
            None => Ok(()),
            Some(position) => Err(Error::Token { token: text[position], position, vocab }),
        }
    }

    /// Texts that fit into one call.
    fn run_call(&mut self, texts: &[&[i32]]) -> Result<()> {
        self.sequences.clear();
        self.token_ids.clear();
        self.last_rows.clear();
        for text in texts {
            let (state, page_table) = (std::ptr::null_mut(), std::ptr::null());
            let (first, rows) = (self.token_ids.len() as i64, text.len() as i64);
            self.sequences.push(Sequence { state, page_table, past: 0, first, rows });
            self.token_ids.extend_from_slice(text);
            self.last_rows.push(self.token_ids.len() as i32 - 1);
        }
        let step = EntryPoint::Step;
        let cpu = self.model.device().cpu().ok_or_else(|| missing_entry_error(&self.model, step))?;
        let (sequences, tokens) = (&self.sequences[..], self.tokens.copy_from(&self.token_ids));
        // One row of each text; behind that any.
        let wanted = self.output_rows.copy_padded(self.token_ids.len(), &self.last_rows);
        let call =
            BatchCall { sequences, tokens, output_rows: wanted, n_outputs: texts.len(), adapted: false };
        // SAFETY: the code has no states and no pages (checked in the table), tokens and lengths are in
        // range, there are as many rows and texts as the plan permits, and there is room for a vector of
        // each.
        unsafe {
            cpu.run_batch(&self.model, step, &call, &mut self.call_vectors, self.trace.as_deref_mut())?
        };
        let width = self.model.text_width();
        self.vectors.extend_from_slice(&self.call_vectors.as_floats()[..texts.len() * width]);
        Ok(())
    }
}
