//! Models run by interpretation, without a code generator: the graph as the model definition builds it, or
//! the kernels and steps that the passes made of it for one target level.

use mlcc_abi::EntryPoint;
use mlcc_engine::LanguageModel;
use mlcc_engine::eval::WindowModel;
use mlcc_interp::graph::{GraphError, Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::ExecutionOptions;
use mlcc_interp::steps::{StepMemory, StepRunError, run_step};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::Module;
use mlcc_ir::step::MemoryBase;
use mlcc_models::{Architecture, Checkpoint};
use mlcc_passes::plan_memory::MemoryPlan;
use mlcc_passes::{LevelCode, LoweredProgram};
use mlcc_runtime::source_rows;
use mlcc_text::TokenId;

use crate::weights::{WeightWriteError, pack_param, read_param};

#[derive(Debug, thiserror::Error)]
pub enum InterpretError {
    #[error(transparent)]
    Weight(#[from] WeightWriteError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Step(#[from] StepRunError),
    #[error("the program has no step `{0}`; it is not completely lowered")]
    NoStep(String),
    #[error("the interpreter has no value for parameter {0}")]
    NoValue(String),
    #[error("the prompt is not an encoder input followed by the decoder start token")]
    NoSource,
}

/// The graph of a model with f32 weights, in the state after the tokens computed so far.
pub struct GraphModel<'m> {
    interpreter: Interpreter<'m>,
    states: StateValues,
    logits: Vec<f32>,
    past: usize,
    vocab: usize,
    whole_prompts: bool,
    decoder_start: Option<TokenId>,
}

impl<'m> GraphModel<'m> {
    /// Reads all weights. `module` is the graph of `architecture`.
    pub fn new(
        module: &'m Module,
        checkpoint: &Checkpoint,
        architecture: &Architecture,
    ) -> Result<Self, InterpretError> {
        let mut values = Vec::new();
        for param in module.params.values() {
            let dims: Option<Vec<usize>> =
                param.ty.dims.iter().map(|d| d.as_const().and_then(|d| usize::try_from(d).ok())).collect();
            let dims = dims.ok_or_else(|| InterpretError::NoValue(param.name.clone()))?;
            values.push(Tensor::f32(&dims, &read_param(checkpoint, param)?));
        }
        let interpreter = Interpreter::new(module, move |id| values[id.index()].clone());
        let states = StateValues::new(module)?;
        let (vocab, whole_prompts) = (architecture.vocab(), architecture.needs_whole_prompts());
        let decoder_start = architecture.decoder_start_token_id().map(|token| token as TokenId);
        Ok(GraphModel {
            interpreter,
            states,
            logits: Vec::new(),
            past: 0,
            vocab,
            whole_prompts,
            decoder_start,
        })
    }

    fn run(&mut self, entry: &str, tokens: &[TokenId]) -> Result<&[f32], InterpretError> {
        let syms = SymValues { past: self.past as i64, ..SymValues::for_tokens(tokens.len() as i64) };
        let out = self.interpreter.run_named(entry, &[Tensor::ids(tokens)], &mut self.states, syms)?;
        self.logits = out.first().map(Tensor::to_f32).unwrap_or_default();
        self.past += tokens.len();
        Ok(&self.logits)
    }

    /// Runs `entry` on what is behind the source text that a sequence of an encoder-decoder model begins
    /// with.
    fn run_after_encoder(&mut self, entry: &str, tokens: &[TokenId]) -> Result<&[f32], InterpretError> {
        let source = encoder_length(tokens, self.decoder_start.filter(|_| self.past == 0))?;
        if source > 0 {
            self.run(EntryPoint::Encode.name(), &tokens[..source])?;
        }
        self.run(entry, &tokens[source..])
    }
}

/// Tokens of the source text that a sequence begins with, where the decoder starts with `start`.
fn encoder_length(tokens: &[TokenId], start: Option<TokenId>) -> Result<usize, InterpretError> {
    start.map_or(Ok(0), |start| source_rows(tokens, start).ok_or(InterpretError::NoSource))
}

impl LanguageModel for GraphModel<'_> {
    type Error = InterpretError;

    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], InterpretError> {
        self.run_after_encoder("prefill", tokens)
    }

    fn decode(&mut self, token: TokenId) -> Result<&[f32], InterpretError> {
        self.run("decode", &[token])
    }

    fn reset(&mut self) -> Result<(), InterpretError> {
        self.states = StateValues::new(self.interpreter.module())?;
        self.past = 0;
        Ok(())
    }

    fn past(&self) -> usize {
        self.past
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn context(&self) -> Option<usize> {
        None
    }

    fn needs_whole_prompts(&self) -> bool {
        self.whole_prompts
    }
}

impl WindowModel for GraphModel<'_> {
    type Error = InterpretError;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], InterpretError> {
        self.reset()?;
        self.run_after_encoder("prefill_logits", tokens)
    }
}

/// The steps of a lowered program with packed weights, in the state after the tokens computed so far.
pub struct StepModel<'p> {
    program: &'p LoweredProgram,
    plan: &'p MemoryPlan,
    level: &'p LevelCode,
    memory: StepMemory,
    options: ExecutionOptions,
    chunk: usize,
    logits: Vec<f32>,
    past: usize,
    vocab: usize,
    whole_prompts: bool,
    decoder_start: Option<TokenId>,
}

impl<'p> StepModel<'p> {
    /// Packs all weights into memory. `chunk` is the one that the program was planned for; `workers` share
    /// each kernel (a GPU has its own parallelism).
    pub fn new(
        program: &'p LoweredProgram,
        level: usize,
        checkpoint: &Checkpoint,
        architecture: &Architecture,
        chunk: usize,
        workers: usize,
    ) -> Result<Self, InterpretError> {
        let missing = || InterpretError::NoStep("prefill".into());
        let plan = program.memory.as_ref().ok_or_else(missing)?;
        let level = program.levels.get(level).ok_or_else(missing)?;
        let mut memory = StepMemory::default();
        *memory.base_memory(MemoryBase::Weights) = weights_payload(program, plan, checkpoint)?;
        *memory.base_memory(MemoryBase::Adapters) = vec![0; plan.adapter_bytes as usize];
        *memory.base_memory(MemoryBase::Arena) = vec![0; plan.arena_bytes() as usize];
        let options = ExecutionOptions::with_workers(workers);
        let (vocab, whole_prompts) = (architecture.vocab(), architecture.needs_whole_prompts());
        let logits = Vec::new();
        let decoder_start = architecture.decoder_start_token_id().map(|token| token as TokenId);
        let mut model = StepModel {
            program,
            plan,
            level,
            memory,
            options,
            chunk,
            logits,
            past: 0,
            vocab,
            whole_prompts,
            decoder_start,
        };
        model.initialize_state();
        Ok(model)
    }

    fn initialize_state(&mut self) {
        let mut block = vec![0; self.plan.state_bytes as usize];
        for (id, state) in self.program.module.states.iter().filter(|(id, _)| !self.plan.is_paged(*id)) {
            let (offset, bytes) = self.plan.states[id.index()];
            let fill = (state.init as f32).to_le_bytes();
            for cell in block[offset as usize..(offset + bytes) as usize].chunks_exact_mut(4) {
                cell.copy_from_slice(&fill);
            }
        }
        *self.memory.base_memory(MemoryBase::State) = block;
        let (pages, table) = self.plan.example_pages();
        *self.memory.base_memory(MemoryBase::Pages) = pages;
        *self.memory.base_memory(MemoryBase::PageTable) = table;
        self.past = 0;
    }

    /// One call; appends `rows` rows of logits.
    fn run(&mut self, entry: &str, tokens: &[TokenId], rows: usize) -> Result<(), InterpretError> {
        let step = self.level.steps.iter().find(|s| s.name == entry);
        let step = step.ok_or_else(|| InterpretError::NoStep(entry.into()))?;
        *self.memory.base_memory(MemoryBase::Tokens) = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        *self.memory.base_memory(MemoryBase::Logits) = vec![0; 4 * rows * self.vocab];
        let sizes = SymValues { past: self.past as i64, ..SymValues::for_tokens(tokens.len() as i64) };
        run_step(step, &self.level.lowered.kernels, &mut self.memory, &sizes, &self.options)?;
        let (cells, _) = self.memory.base_memory(MemoryBase::Logits).as_chunks::<4>();
        self.logits.extend(cells.iter().map(|&c| f32::from_le_bytes(c)));
        self.past += tokens.len();
        Ok(())
    }

    /// Reads the source text that a sequence of an encoder-decoder model begins with; gives what is behind
    /// it.
    fn read_source<'t>(&mut self, tokens: &'t [TokenId]) -> Result<&'t [TokenId], InterpretError> {
        let source = encoder_length(tokens, self.decoder_start.filter(|_| self.past == 0))?;
        if source > 0 {
            self.run(EntryPoint::Encode.name(), &tokens[..source], 0)?;
        }
        Ok(&tokens[source..])
    }
}

impl StepModel<'_> {
    /// Runs one entry point on the next tokens, at most a chunk; returns the logits of the last one.
    pub fn run_entry(&mut self, entry: &str, tokens: &[TokenId]) -> Result<&[f32], InterpretError> {
        self.logits.clear();
        self.run(entry, tokens, 1)?;
        Ok(&self.logits)
    }

    /// Scratch memory as the last call has left it.
    pub fn scratch(&mut self) -> &[u8] {
        self.memory.base_memory(MemoryBase::Arena)
    }
}

/// The weights payload.
fn weights_payload(
    program: &LoweredProgram,
    plan: &MemoryPlan,
    checkpoint: &Checkpoint,
) -> Result<Vec<u8>, InterpretError> {
    let mut blob = vec![0; plan.weights_bytes as usize];
    for (id, param) in program.module.params.iter().filter(|(_, param)| !param.is_adapter()) {
        let (offset, _) = plan.params[id.index()];
        let mut at = offset as usize;
        let options = program.pack_options(&param.name);
        pack_param::<InterpretError>(checkpoint, param, options, |bytes| {
            blob[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
            Ok(())
        })?;
    }
    Ok(blob)
}

impl LanguageModel for StepModel<'_> {
    type Error = InterpretError;

    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], InterpretError> {
        let tokens = self.read_source(tokens)?;
        for piece in tokens.chunks(self.chunk) {
            self.logits.clear();
            self.run("prefill", piece, 1)?;
        }
        Ok(&self.logits)
    }

    fn decode(&mut self, token: TokenId) -> Result<&[f32], InterpretError> {
        self.logits.clear();
        self.run("decode", &[token], 1)?;
        Ok(&self.logits)
    }

    fn reset(&mut self) -> Result<(), InterpretError> {
        self.initialize_state();
        Ok(())
    }

    fn past(&self) -> usize {
        self.past
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn context(&self) -> Option<usize> {
        None
    }

    fn needs_whole_prompts(&self) -> bool {
        self.whole_prompts
    }

    fn prefill_chunk(&self) -> usize {
        self.chunk
    }
}

impl WindowModel for StepModel<'_> {
    type Error = InterpretError;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], InterpretError> {
        self.initialize_state();
        self.logits.clear();
        let tokens = self.read_source(tokens)?;
        for piece in tokens.chunks(self.chunk) {
            self.run("prefill_logits", piece, piece.len())?;
        }
        Ok(&self.logits)
    }
}
