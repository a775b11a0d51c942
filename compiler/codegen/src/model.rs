//! The input of code generation and what every back end derives from it: symbol names, argument checks of
//! entry points, the step that initialises the state.

use crate::error::CodegenError;
use crate::prepare::abi_features;
use crate::ptxas::PtxAssembler;
use crate::table::{EntryDesc, StateDesc, TableDesc, VariantDesc};
use mlcc_abi::{ADAPTED, EntryForm, EntryPoint};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::kernel::{Kernel, ParamAccess};
use mlcc_ir::step::{BufferRef, LaunchItem, MemoryBase, RepeatMode, StepItem, StepProgram, WorkSchedule};
use mlcc_ir::types::DType;
use mlcc_target::{CompileTarget, FeatureLevel};
use std::collections::BTreeMap;

/// A lowered model.
pub struct CodegenInput<'a> {
    pub target: &'a CompileTarget,
    /// Levels in the order of `target.levels`: best first.
    pub levels: Vec<LevelInput<'a>>,
    /// The model's data in the table. Code generation fills in `variants` (CPU) or `images` and
    /// `device_entries` (GPU).
    pub table: TableDesc,
    /// Makes machine code for each level of a GPU target, beside the text.
    pub assembler: Option<&'a PtxAssembler>,
}

/// Kernels and steps for one level; the choice of kernels may differ from level to level.
#[derive(Clone, Copy)]
pub struct LevelInput<'a> {
    pub level: &'a FeatureLevel,
    pub kernels: &'a [Kernel],
    pub steps: &'a [StepProgram],
}

/// Arguments of a CPU kernel that are alike in every launch: its code may rely on them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FixedArguments {
    /// One for each dimension; those that are missing are not known.
    dims: Vec<Option<i64>>,
    /// One call computes everything.
    pub alone: bool,
}

impl FixedArguments {
    pub fn dim(&self, index: usize) -> Option<i64> {
        self.dims.get(index).copied().flatten()
    }

    fn of_launch(launch: &LaunchItem) -> FixedArguments {
        let alone = launch.repeat == RepeatMode::EachWorker || launch.repeat.has_whole_sequences();
        FixedArguments { dims: launch.dims.iter().map(Dim::as_const).collect(), alone }
    }

    fn intersect(&mut self, other: &FixedArguments) {
        for (mine, other) in self.dims.iter_mut().zip(&other.dims) {
            *mine = mine.filter(|_| *mine == *other);
        }
        self.alone &= other.alone;
    }
}

/// The arguments that all launches of each kernel have in common.
pub fn fixed_arguments<'a>(
    steps: impl IntoIterator<Item = &'a StepProgram>,
) -> BTreeMap<&'a str, FixedArguments> {
    let mut all: BTreeMap<&str, FixedArguments> = BTreeMap::new();
    for item in steps.into_iter().flat_map(|step| &step.items) {
        let StepItem::Launch(launch) = item else { continue };
        let one = FixedArguments::of_launch(launch);
        all.entry(&launch.kernel).and_modify(|fixed| fixed.intersect(&one)).or_insert(one);
    }
    all
}

/// Limits that entry points hold their arguments against before they touch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EntryLimits {
    /// Most tokens in one call; 0 = no limit.
    pub chunk: u64,
    /// Most tokens in the state; 0 = no limit.
    pub context: u64,
    /// 0 = token ids are not checked.
    pub vocab: u64,
    /// Most sequences in one call; 0 = no limit.
    pub batch: u64,
}

/// The checks of an entry point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgumentChecks {
    None,
    /// `1 <= n <= chunk`.
    Rows,
    /// The same, `past + n <= context`, and every token id.
    Tokens,
    /// `1 <= n <= batch`, `past + 1 <= context` of every sequence, and every token id.
    Sequences,
    /// The rows of every sequence and their number, `past + rows <= context`, every token id, and the rows
    /// that are wanted.
    Ragged,
}

impl ArgumentChecks {
    pub fn of_step(name: &str) -> ArgumentChecks {
        match EntryPoint::of_function(name).map(|(entry, _)| entry.kind()) {
            Some(EntryForm::LastLogits | EntryForm::AllLogits | EntryForm::Source) => ArgumentChecks::Tokens,
            Some(EntryForm::Batch) => ArgumentChecks::Sequences,
            Some(EntryForm::Ragged) => ArgumentChecks::Ragged,
            Some(EntryForm::Rows) => ArgumentChecks::Rows,
            Some(EntryForm::State) | None => ArgumentChecks::None,
        }
    }
}

impl EntryLimits {
    /// The most that `n` may be in a step.
    pub fn max_rows(&self, step: &str) -> u64 {
        let entry = EntryPoint::of_function(step).map(|(entry, _)| entry);
        match entry.map(|entry| (entry, entry.kind())) {
            Some((EntryPoint::Decode, _)) => 1,
            Some((_, EntryForm::Batch)) => self.batch,
            // So that all sequences may have one.
            Some((_, EntryForm::Ragged)) if self.chunk > 0 => self.chunk.max(self.batch),
            _ => self.chunk,
        }
    }

    pub fn from_table(table: &TableDesc) -> EntryLimits {
        EntryLimits {
            chunk: table.plan.chunk,
            context: table.plan.context,
            vocab: table.plan.vocab,
            batch: table.plan.batch,
        }
    }
}

/// `decode` at level `x86-64-v3` is `mlcc_decode_x86_64_v3`.
pub fn entry_symbol(step: &str, level: &str) -> String {
    format!("mlcc_{step}_{}", symbol_part(level))
}

/// Name of a kernel's function at a level.
pub fn kernel_symbol(kernel: &str, level: &str) -> String {
    format!("{}.{}", symbol_part(kernel), symbol_part(level))
}

/// Name of a GPU kernel in the PTX text, with its buffers placed in the way of that number
/// ([`crate::placement`]).
pub fn gpu_kernel_symbol(kernel: &str, placement: usize) -> String {
    match placement {
        0 => format!("k_{}", symbol_part(kernel)),
        other => format!("k_{}${other}", symbol_part(kernel)),
    }
}

/// Name of the function that calls the kernel of that number in an executor.
pub fn caller_symbol(index: usize) -> String {
    format!("mlcc_call_{index}")
}

fn symbol_part(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

/// The step that initialises the state; `reset_kv_cache` is the same function.
pub const STATE_STEP: &str = EntryPoint::CreateKvCache.name();

/// The table's entry for a level.
pub fn level_variant(input: &LevelInput<'_>) -> Result<VariantDesc, CodegenError> {
    for step in input.steps {
        let entry = EntryPoint::of_function(&step.name).map(|(entry, _)| entry);
        if entry.is_none_or(|entry| entry.kind() == EntryForm::State) {
            let all: Vec<&str> = EntryPoint::all().map(EntryPoint::name).collect();
            let what = format!("is not one of the steps that lowering makes; {}", all.join(", "));
            return Err(CodegenError::Step { step: step.name.clone(), what });
        }
    }
    let level = &input.level.name;
    let symbol = |step: String| {
        let known = input.steps.iter().any(|s| s.name == step);
        known.then(|| entry_symbol(&step, level))
    };
    let row = |entry: EntryPoint| {
        let function = match entry.kind() {
            EntryForm::State => entry_symbol(STATE_STEP, level),
            _ => symbol(entry.name().into())?,
        };
        let adapted = entry.has_adapted().then(|| symbol(format!("{ADAPTED}{}", entry.name()))).flatten();
        Some(EntryDesc { name: entry.name().into(), kind: entry.kind(), function, adapted })
    };
    let entries = EntryPoint::all().filter_map(row).collect();
    Ok(VariantDesc { name: level.clone(), features: abi_features(input.level)?, entries })
}

/// Kernels and step that give every piece of the state its initial value. Pieces of equal size and value
/// share code. Rows of caches are not touched: they are read only after they were written.
pub fn state_step(states: &[StateDesc]) -> Result<(Vec<Kernel>, StepProgram), CodegenError> {
    let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
    let mut items = Vec::new();
    for state in states.iter().filter(|s| s.cache.is_none()) {
        let (dtype, cells) =
            if state.bytes % 4 == 0 { (DType::U32, state.bytes / 4) } else { (DType::U8, state.bytes) };
        let fill = state.fill.unwrap_or(0.0).to_bits();
        if fill != 0 && dtype == DType::U8 {
            let what = format!("state {} is filled with an f32 but has {} bytes", state.name, state.bytes);
            return Err(CodegenError::Step { step: STATE_STEP.into(), what });
        }
        let name = format!("fill_{cells}_{}_{fill:08x}", dtype.name());
        kernels.entry(name.clone()).or_insert_with(|| fill_kernel(&name, dtype, cells, fill));
        items.push(StepItem::Launch(LaunchItem {
            kernel: name,
            buffers: vec![BufferRef::fixed(MemoryBase::State, state.offset, state.bytes)],
            dims: Vec::new(),
            grid: None,
            repeat: RepeatMode::Once,
            schedule: WorkSchedule::Static,
        }));
    }
    let step = StepProgram { name: STATE_STEP.into(), items, arena_bytes: 0 };
    Ok((kernels.into_values().collect(), step))
}

fn fill_kernel(name: &str, dtype: DType, cells: u64, value: u32) -> Kernel {
    let mut kb = KernelBuilder::new(name);
    let cells = cells as i64;
    let out = kb.param("state", dtype, Dim::from(cells), ParamAccess::Out, dtype.bytes().unwrap_or(1) as u32);
    let extent = kb.int(cells);
    kb.par("i", extent, |kb, i| {
        let value = kb.int_of(i64::from(value), dtype);
        kb.store(out, i, value);
    });
    kb.finish()
}
