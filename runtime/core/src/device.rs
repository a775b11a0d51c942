//! Devices, which run the steps of a model, and their memory for one sequence: the one interface of models
//! and sessions to the worker pool of a CPU and to a GPU.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use mlcc_abi::{EntryPoint, Sequence};

use crate::buffer::AlignedBuffer;
use crate::cpu::CpuDevice;
use crate::table::StateInfo;
use crate::top_k::{AcceptTopK, TokenCandidate};
use crate::trace::StepTimes;
use crate::{CachePages, Error, Model, Result};

/// Runs the steps of one loaded model, for all its sessions.
pub(crate) trait Device: Send + Sync {
    /// Name of the chosen CPU variant, or of the GPU.
    fn name(&self) -> &str;

    /// All processes of a model that is split have come so far, and the first one may begin.
    fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// See [`Model::follow_leader`].
    fn follow_leader(self: Arc<Self>, _model: &Model) -> Result<()> {
        Ok(())
    }

    /// Memory for one sequence; the state is not initialised.
    fn session(self: Arc<Self>, model: &Model) -> Result<Box<dyn DeviceSession>>;

    /// The CPU, if it is one: batches are run by it.
    fn cpu(&self) -> Option<&CpuDevice> {
        None
    }

    /// True if there is code of this step for several sequences.
    fn has_batch(&self, step: EntryPoint) -> bool;

    /// The runner of steps of several sequences, if it is not the CPU.
    fn batch(self: Arc<Self>, _model: &Model) -> Result<Option<Box<dyn DeviceBatch>>> {
        Ok(None)
    }

    /// Takes what slots for adapters have become, where there are copies of them: all of them, and where
    /// bytes differ from before.
    fn write_adapters(&self, _bytes: &[u8], _changed: &[Range<usize>]) -> Result<()> {
        Ok(())
    }

    /// See [`Model::cache_pages`].
    fn cache_pages(&self) -> CachePages {
        CachePages::default()
    }

    /// Most workers of a step.
    fn threads(&self) -> usize {
        1
    }

    /// See [`Model::fix_workers`].
    fn fix_workers(&self, _workers: Option<usize>) {}

    /// See [`Model::copy_bandwidth`].
    fn copy_bandwidth(&self) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// Memory of one sequence. `rows` and `past` count rows of the caches; tokens were checked by the caller.
pub(crate) trait DeviceSession: Send {
    /// True if the artifact has this step.
    fn has_entry(&self, step: EntryPoint) -> bool;

    /// Runs a step that eats tokens.
    fn forward(&mut self, model: &Model, step: EntryPoint, tokens: &[i32], past: u64) -> Result<()>;

    /// [`DeviceSession::forward`] of tokens that others of the same prompt follow: a device may leave their
    /// logits out.
    fn feed_without_logits(&mut self, model: &Model, tokens: &[i32], past: u64) -> Result<()> {
        self.forward(model, EntryPoint::Prefill, tokens, past)
    }

    /// [`DeviceSession::forward`] of one token to decode. Where the device finds the likeliest tokens itself,
    /// `enough` gets them; if it says true, so does this, and the logits stay where they were made.
    fn decode_top_k(
        &mut self,
        model: &Model,
        token: i32,
        past: u64,
        _enough: &mut dyn FnMut(&[TokenCandidate]) -> bool,
    ) -> Result<bool> {
        self.forward(model, EntryPoint::Decode, &[token], past).map(|()| false)
    }

    /// `softmax(logits / temperature)` of the last logits.
    fn softmax(&mut self, model: &Model, temperature: f32) -> Result<&[f32]>;

    /// The state's initial values: by the entry point `step` where the device has it, else by the model's
    /// table.
    fn initialise(&mut self, model: &Model, step: EntryPoint) -> Result<()>;

    /// `vocab` logits of the last position.
    fn logits(&self) -> &[f32];

    /// Gives the buffer of [`DeviceSession::logits`] away, and uses `fresh`, of equal size, from now on.
    fn swap_logits(&mut self, fresh: AlignedBuffer) -> AlignedBuffer;

    /// Logits of the `n` positions of the last `prefill_logits` chunk.
    fn chunk_logits(&self, n: usize) -> &[f32];

    /// A state; of a cache the first `rows` rows, which have memory.
    fn state(&self, state: &StateInfo, rows: u64) -> Result<Cow<'_, [u8]>>;

    /// Replaces states; of caches the first `rows` rows, which get memory before. If there is none, nothing
    /// has changed.
    fn set_state(&mut self, model: &Model, rows: u64, states: &[(&StateInfo, &[u8])]) -> Result<()>;

    /// Writes a state of four bytes.
    fn write_word(&mut self, state: &StateInfo, value: i32) -> Result<()>;

    /// Rows of a page, if caches are in pages.
    fn page_rows(&self) -> Option<u64> {
        None
    }

    /// Gives back the pages `pages` of every cache; later ones move to their places. `counter` as in
    /// [`DeviceSession::drop_rows`].
    fn drop_pages(&mut self, _pages: Range<u64>, counter: &StateInfo, dropped: i32) -> Result<()> {
        self.write_word(counter, dropped)
    }

    /// Moves rows of every cache to the places `moved`, from `count` rows after them; `counter` gets the
    /// number of rows that were dropped so far.
    fn drop_rows(
        &mut self,
        model: &Model,
        count: u64,
        moved: Range<u64>,
        counter: &StateInfo,
        dropped: i32,
    ) -> Result<()>;

    /// The scratch memory as the last step has left it, on a CPU that of any session of the model.
    fn arena(&self) -> Result<Cow<'_, [u8]>>;

    /// `n` rows of every cache after `past` will be needed. If there is no memory for them, nothing has
    /// changed.
    fn reserve(&mut self, _model: &Model, _past: u64, _n: u64) -> Result<()> {
        Ok(())
    }

    /// Pages that [`DeviceSession::reserve`] would take of the pool.
    fn missing_pages(&self, _past: u64, _n: u64) -> usize {
        0
    }

    /// Gives back what more than `rows` rows take.
    fn shrink(&mut self, rows: u64);

    /// Bytes of state that have memory, and those of scratch and results.
    fn allocated(&self) -> (u64, u64);

    /// A second sequence with the first `rows` rows, the rest of the state and the logits of this one.
    fn fork(&self, model: &Model, rows: u64) -> Result<Box<dyn DeviceSession>>;

    /// Gives memory to `tokens` rows after `past`, as a sequence of a batch.
    fn join_batch(&mut self, model: &Model, _past: u64, _tokens: u64) -> Result<BatchMember<'_>> {
        Err(missing_entry_error(model, EntryPoint::DecodeBatch))
    }

    /// Takes over the logits of its last row in a batch.
    fn leave_batch(&mut self, model: &Model, _logits: Option<&[f32]>) -> Result<()> {
        Err(missing_entry_error(model, EntryPoint::DecodeBatch))
    }

    /// Takes times from now on, or no longer; gives what was taken so far.
    fn trace(&mut self, _on: bool) -> Vec<StepTimes> {
        Vec::new()
    }

    /// See [`crate::Session::performance_warning`].
    fn performance_warning(&self) -> Option<&str> {
        None
    }
}

/// Runs steps of several sequences on a device.
pub(crate) trait DeviceBatch: Send {
    /// Runs a step for checked tokens, and returns the logits of the output rows, of which there is at least
    /// one. The sequences' memory is alive and has no other user. Rows for which `enough` has returned true,
    /// if the device asks, get none.
    fn run(
        &mut self,
        step: EntryPoint,
        call: &BatchCall<'_>,
        logits: &mut AlignedBuffer,
        enough: Option<AcceptTopK<'_>>,
    ) -> Result<()>;

    /// See [`crate::SessionBatch::performance_warning`].
    fn performance_warning(&self) -> Option<String>;
}

/// The inputs of a step of several sequences.
pub(crate) struct BatchCall<'a> {
    pub sequences: &'a [Sequence],
    pub tokens: &'a [i32],
    /// As many row numbers as tokens, those of the output rows first.
    pub output_rows: &'a [i32],
    pub n_outputs: usize,
    /// Some sequence has an adapter.
    pub adapted: bool,
}

/// The parts of a session that a batch needs. The pointers are good while the session is borrowed.
pub(crate) struct BatchMember<'a> {
    pub sequence: Sequence,
    pub session: PhantomData<&'a mut ()>,
}

/// The artifact has no such step for this device.
pub(crate) fn missing_entry_error(model: &Model, step: EntryPoint) -> Error {
    Error::MissingEntry { path: model.artifact().path().to_path_buf(), entry: step.name() }
}
