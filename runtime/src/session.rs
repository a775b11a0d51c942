//! One sequence: its state, its scratch memory, its position.

use std::path::Path;

use mlcc_abi::section;

use crate::buffer::Buffer;
use crate::cpu::CpuSession;
use crate::model::Backend;
use crate::{Error, Model, Result, state_file};

/// The steps that a session runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Prefill,
    Decode,
    PrefillLogits,
    Create,
    Reset,
    Softmax,
}

impl Step {
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::PrefillLogits => "prefill_logits",
            Self::Create => "create_kv_cache",
            Self::Reset => "reset_kv_cache",
            Self::Softmax => "softmax_with_temperature",
        }
    }
}

/// One sequence of a model. Everything that decoding needs is allocated when it is created.
pub struct Session {
    model: Model,
    memory: Memory,
    past: u64,
    /// Logits of all positions, for `prefill_logits`; grows with the longest window asked for.
    all_logits: Option<Buffer>,
}

enum Memory {
    Cpu(CpuSession),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::CudaSession),
}

impl Session {
    pub(crate) fn new(model: &Model) -> Result<Self> {
        let memory = match model.backend() {
            Backend::Cpu { .. } => Memory::Cpu(CpuSession::new(model)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => Memory::Cuda(crate::cuda::CudaSession::new(device, model.table())?),
        };
        let mut session = Self { model: model.clone(), memory, past: 0, all_logits: None };
        session.initialise(Step::Create)?;
        Ok(session)
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tokens that the state has seen.
    pub fn past(&self) -> u64 {
        self.past
    }

    /// Feeds `tokens` (any number, at least one) and returns the logits of the last position.
    pub fn prefill(&mut self, tokens: &[i32]) -> Result<&[f32]> {
        self.check(tokens)?;
        let chunk = self.model.plan().chunk as usize;
        let whole = self.has(Step::Prefill);
        for piece in tokens.chunks(if whole { chunk } else { 1 }) {
            let step = if piece.len() == 1 { Step::Decode } else { Step::Prefill };
            self.step(step, piece)?;
        }
        Ok(self.logits())
    }

    /// Feeds one token and returns the logits.
    pub fn decode(&mut self, token: i32) -> Result<&[f32]> {
        self.check(&[token])?;
        self.step(Step::Decode, &[token])?;
        Ok(self.logits())
    }

    /// Feeds `tokens` and returns the logits of every position, one row of `vocab` floats after the other.
    pub fn prefill_logits(&mut self, tokens: &[i32]) -> Result<&[f32]> {
        self.check(tokens)?;
        let vocab = self.model.vocab();
        let wanted = tokens.len() as u64 * vocab as u64;
        let mut all = match self.all_logits.take() {
            Some(buffer) if buffer.len() as u64 >= 4 * wanted => buffer,
            _ => Buffer::floats("logits of all positions", wanted)?,
        };
        let chunk = if self.has(Step::PrefillLogits) { self.model.plan().chunk as usize } else { 1 };
        let mut at = 0;
        for piece in tokens.chunks(chunk) {
            let rows = if chunk == 1 {
                self.step(Step::Decode, piece)?;
                self.logits()
            } else {
                self.step(Step::PrefillLogits, piece)?;
                self.chunk_logits(piece.len())
            };
            // SAFETY: any f32 may be read as its four bytes.
            let bytes = unsafe { std::slice::from_raw_parts(rows.as_ptr().cast::<u8>(), size_of_val(rows)) };
            all.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        }
        let all = self.all_logits.insert(all);
        Ok(&all.as_floats()[..wanted as usize])
    }

    /// Probabilities of the last logits: softmax(logits / temperature).
    pub fn softmax(&mut self, temperature: f32) -> Result<&[f32]> {
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(Error::Temperature(temperature));
        }
        match &mut self.memory {
            Memory::Cpu(cpu) => cpu.softmax(&self.model, temperature),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.softmax(temperature),
        }
    }

    /// Logits of the last position fed; zeros before the first.
    pub fn logits(&self) -> &[f32] {
        match &self.memory {
            Memory::Cpu(cpu) => cpu.logits(),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.logits(),
        }
    }

    /// Forgets everything fed so far.
    pub fn reset(&mut self) -> Result<()> {
        self.past = 0;
        self.initialise(Step::Reset)
    }

    /// A second session with the same past.
    pub fn fork(&self) -> Result<Self> {
        let mut twin = Self::new(&self.model)?;
        twin.past = self.past;
        match (&mut twin.memory, &self.memory) {
            (Memory::Cpu(to), Memory::Cpu(from)) => to.copy_from(from),
            #[cfg(feature = "cuda")]
            (Memory::Cuda(to), Memory::Cuda(from)) => to.copy_from(from)?,
            #[cfg(feature = "cuda")]
            (Memory::Cpu(_), Memory::Cuda(_)) | (Memory::Cuda(_), Memory::Cpu(_)) => {
                unreachable!("both sessions are of one model")
            }
        }
        Ok(twin)
    }

    /// Writes state and position to a file (not the logits: feed a token after loading).
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<()> {
        let bytes = match &self.memory {
            Memory::Cpu(cpu) => std::borrow::Cow::Borrowed(cpu.state()),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => std::borrow::Cow::Owned(cuda.state()?),
        };
        state_file::save(path.as_ref(), self.model.state_identity(), self.past, &bytes)
    }

    /// Replaces state and position by those of a file that `save_state` of the same model wrote. On an error the
    /// session is as before.
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let plan = self.model.plan();
        let (identity, bytes) = (self.model.state_identity(), plan.state_bytes);
        let saved = state_file::load(path.as_ref(), identity, bytes, plan.context)?;
        match &mut self.memory {
            Memory::Cpu(cpu) => cpu.state_mut().copy_from_slice(saved.state()),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.set_state(saved.state())?,
        }
        self.past = saved.past;
        Ok(())
    }

    /// A piece of the state by its name, for inspection.
    pub fn state(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(piece) = self.model.table().states.iter().find(|s| s.name == name) else { return Ok(None) };
        let range = piece.offset as usize..(piece.offset + piece.bytes) as usize;
        Ok(Some(match &self.memory {
            Memory::Cpu(cpu) => cpu.state()[range].to_vec(),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.state()?[range].to_vec(),
        }))
    }

    fn check(&self, tokens: &[i32]) -> Result<()> {
        let plan = self.model.plan();
        if tokens.is_empty() {
            return Err(Error::NoTokens);
        }
        let bad = tokens.iter().position(|&t| t < 0 || t as u64 >= plan.vocab);
        if let Some(position) = bad {
            return Err(Error::Token { token: tokens[position], position, vocab: plan.vocab });
        }
        let n = tokens.len() as u64;
        if plan.context != 0 && self.past + n > plan.context {
            return Err(Error::ContextFull { past: self.past, n, context: plan.context });
        }
        Ok(())
    }

    fn has(&self, step: Step) -> bool {
        match &self.memory {
            Memory::Cpu(_) => CpuSession::entry(&self.model, step).is_some(),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.has(step),
        }
    }

    fn step(&mut self, step: Step, tokens: &[i32]) -> Result<()> {
        match &mut self.memory {
            Memory::Cpu(cpu) => cpu.feed(&self.model, step, tokens, self.past)?,
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.feed(step, tokens, self.past)?,
        }
        self.past += tokens.len() as u64;
        Ok(())
    }

    fn chunk_logits(&self, n: usize) -> &[f32] {
        match &self.memory {
            Memory::Cpu(cpu) => cpu.chunk_logits(n),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.chunk_logits(n),
        }
    }

    /// The state's initial values, by the model's own entry point where it has one, else by its table.
    fn initialise(&mut self, step: Step) -> Result<()> {
        match &mut self.memory {
            Memory::Cpu(cpu) => cpu.initialise(&self.model, step),
            #[cfg(feature = "cuda")]
            Memory::Cuda(cuda) => cuda.initialise(self.model.table()),
        }
    }
}

impl Model {
    /// The model's tokenizer as the compiler packed it.
    pub fn tokenizer(&self) -> Option<&[u8]> {
        self.section(section::TOKENIZER)
    }
}
