//! The program as the model table describes it.

use mlcc_codegen::table::{CacheDesc, ParamDesc, PlanDesc, StateDesc, TableDesc};
use mlcc_ir::types::{Packing, TensorType};
use mlcc_passes::Program;
use mlcc_passes::plan_memory::MemoryPlan;
use mlcc_target::{Arch, Target};

use super::{BuildOptions, Source};

/// `mlcc` and its version, as tables and metadata name it.
pub const COMPILER: &str = concat!("mlcc ", env!("CARGO_PKG_VERSION"));

/// Name of a target family in the table.
pub fn family(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "x86-64",
        Arch::Aarch64 => "aarch64",
        Arch::Nvptx => "cuda",
    }
}

pub fn describe(
    source: &Source,
    target: &Target,
    options: &BuildOptions,
    program: &Program,
    memory: &MemoryPlan,
    metadata: String,
) -> TableDesc {
    TableDesc {
        target: family(target.arch).into(),
        compiler: COMPILER.into(),
        metadata,
        params: params(program, memory),
        states: states(program, memory),
        plan: PlanDesc {
            weights_bytes: memory.weights_bytes,
            arena_bytes: memory.arena_bytes(),
            state_bytes: memory.state_bytes,
            alignment: mlcc_passes::plan_memory::ALIGN,
            chunk: u64::from(options.chunk),
            context: memory.context.or_else(|| source.context_limit(options)).unwrap_or(0),
            batch: 1,
            vocab: source.model.config.architecture.vocab() as u64,
            max_workers: 0,
        },
        ..TableDesc::default()
    }
}

fn params(program: &Program, memory: &MemoryPlan) -> Vec<ParamDesc> {
    let params = program.module.params.values().zip(&memory.params);
    params
        .map(|(param, &(offset, bytes))| ParamDesc {
            name: param.name.clone(),
            format: param.ty.dtype.name().into(),
            packing: match param.packing {
                None | Some(Packing::RowMajor) => String::new(),
                Some(packing) => packing.name().into(),
            },
            dims: dims(&param.ty),
            offset,
            bytes,
        })
        .collect()
}

fn states(program: &Program, memory: &MemoryPlan) -> Vec<StateDesc> {
    let states = program.module.states.iter().zip(&memory.states);
    states
        .map(|((id, state), &(offset, bytes))| StateDesc {
            name: state.name.clone(),
            offset,
            bytes,
            fill: (state.init != 0.0).then_some(state.init as f32),
            format: state.ty.dtype.name().into(),
            cache: program.module.is_cache(id).then(|| {
                let rows = dims(&state.ty).first().copied().unwrap_or(0);
                CacheDesc { rows, row_bytes: bytes.checked_div(rows).unwrap_or(0) }
            }),
        })
        .collect()
}

/// Sizes of a parameter, which are constant.
pub fn dims(ty: &TensorType) -> Vec<u64> {
    ty.dims.iter().map(|d| d.as_const().and_then(|d| u64::try_from(d).ok()).unwrap_or(0)).collect()
}
