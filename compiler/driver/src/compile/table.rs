//! The program as the model table describes it.

use mlcc_codegen::table::{CacheDesc, ModelPlan, ParamDesc, StateDesc, TableDesc, WindowDesc};
use mlcc_ir::entity::EntityId;
use mlcc_ir::types::{Packing, TensorType};
use mlcc_models::transformer::{ADAPTER_SLOT, DROPPED_ROWS, SEQUENCE_LENGTH, SOURCE_LENGTH};
use mlcc_passes::LoweredProgram;
use mlcc_passes::plan_memory::MemoryPlan;
use mlcc_target::{Arch, CompileTarget};
use serde::Serialize;

use super::{BuildOptions, BuildSource};

/// `mlcc` and its version, as tables and metadata name it.
pub const COMPILER: &str = concat!("mlcc ", env!("CARGO_PKG_VERSION"));

/// Name of a target family in the table.
pub fn target_family(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "x86-64",
        Arch::Aarch64 => "aarch64",
        Arch::Nvptx => "cuda",
    }
}

pub fn describe_model(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    program: &LoweredProgram,
    memory: &MemoryPlan,
    metadata: String,
) -> TableDesc {
    TableDesc {
        target: target_family(target.arch).into(),
        compiler: COMPILER.into(),
        metadata,
        params: param_descs(program, memory),
        states: state_descs(source, program, memory),
        plan: ModelPlan {
            weights_bytes: memory.weights_bytes,
            arena_bytes: memory.arena_bytes(),
            state_bytes: memory.state_bytes,
            alignment: mlcc_passes::plan_memory::ALIGN,
            chunk: u64::from(source.chunk),
            context: memory.context.or_else(|| source.context_limit(options)).unwrap_or(0),
            batch: u64::from(options.max_batch(target)),
            vocab: source.model.config.architecture.token_id_count() as u64,
            max_workers: memory.max_workers().unwrap_or(0),
            page_bytes: memory.on_all_ranks(program).0,
            text_width: source.model.config.architecture.embedding_size().unwrap_or(0) as u64,
            ranks: program.module.rank_count() as u64,
            adapter_slots: options.adapters.map_or(0, |slots| slots.slots as u64),
            adapter_rank: options.adapters.map_or(0, |slots| slots.rank as u64),
            adapter_bytes: memory.adapter_bytes,
            decoder_start: decoder_start(source),
        },
        whole_prompts: source.model.config.architecture.needs_whole_prompts(),
        ..TableDesc::default()
    }
}

fn param_descs(program: &LoweredProgram, memory: &MemoryPlan) -> Vec<ParamDesc> {
    let params = program.module.params.values().zip(&memory.params);
    params
        .map(|(param, &(offset, bytes))| ParamDesc {
            name: param.name.clone(),
            format: param.ty.dtype.name().into(),
            packing: match param.packing {
                None | Some(Packing::RowMajor) => String::new(),
                Some(packing) => packing.name().into(),
            },
            dims: constant_dims(&param.ty),
            of_slots: param.is_adapter(),
            offset,
            bytes,
        })
        .collect()
}

fn state_descs(source: &BuildSource, program: &LoweredProgram, memory: &MemoryPlan) -> Vec<StateDesc> {
    let architecture = &source.model.config.architecture;
    let sinks = architecture.sinks() as u32;
    let window = architecture.window().map(|newest| WindowDesc { newest: newest as u64, sinks });
    let states = program.module.states.iter().zip(&memory.states);
    states
        .map(|((id, state), &(offset, bytes))| {
            let cache = program.module.is_cache(id).then(|| {
                let rows = constant_dims(&state.ty).first().copied().unwrap_or(0);
                CacheDesc { rows, row_bytes: memory.row_bytes[id.index()] }
            });
            StateDesc {
                name: state.name.clone(),
                offset,
                bytes: cache.map_or(bytes, |cache| cache.rows * cache.row_bytes),
                fill: (state.init != 0.0).then_some(state.init as f32),
                format: state.ty.dtype.name().into(),
                cache,
                dropped_beyond: window.filter(|_| state.name == DROPPED_ROWS),
                is_length: state.name == SEQUENCE_LENGTH,
                is_slot: state.name == ADAPTER_SLOT,
                is_source: state.name == SOURCE_LENGTH,
            }
        })
        .collect()
}

/// The decoder start token in the form of the table.
pub fn decoder_start(source: &BuildSource) -> u64 {
    source.model.config.architecture.decoder_start_token_id().map_or(0, |token| u64::from(token) + 1)
}

/// Kind and cost of the caches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheRow {
    /// Positions planned.
    pub rows: u64,
    pub bytes_per_token: u64,
    /// Element types, each once.
    pub formats: Vec<String>,
}

/// The caches of all ranks; `None` for recurrent models.
pub fn cache_row(program: &LoweredProgram, memory: &MemoryPlan) -> Option<CacheRow> {
    let mut row = CacheRow { rows: u64::MAX, bytes_per_token: 0, formats: Vec::new() };
    for (id, state) in program.module.states.iter() {
        if !program.module.is_cache(id) {
            continue;
        }
        let rows = constant_dims(&state.ty).first().copied().unwrap_or(0);
        row.rows = row.rows.min(rows);
        row.bytes_per_token += program.module.rank_count() as u64 * memory.row_bytes[id.index()];
        let format = state.ty.dtype.name().to_string();
        if !row.formats.contains(&format) {
            row.formats.push(format);
        }
    }
    (!row.formats.is_empty()).then_some(row)
}

/// Sizes of a parameter, which are constant.
pub fn constant_dims(ty: &TensorType) -> Vec<u64> {
    ty.dims.iter().map(|d| d.as_const().and_then(|d| u64::try_from(d).ok()).unwrap_or(0)).collect()
}
