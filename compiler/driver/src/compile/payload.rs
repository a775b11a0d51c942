//! Writes the artifact: the linked library and the payload after it, weights streamed.

use std::path::{Path, PathBuf};

use mlcc_abi::section;
use mlcc_codegen::artifact::{ArtifactWriter, SplitTensor, WeightDestination};
use mlcc_ir::entity::EntityId;
use mlcc_ir::types::DType;
use mlcc_models::resolve::WeightSource as Origin;
use mlcc_passes::LoweredProgram;
use mlcc_passes::plan_memory::MemoryPlan;

use super::backend::LinkedLibrary;
use super::{BuildError, BuildEvent, BuildHooks, BuildOptions, BuildSource, graph};
use crate::weights::{PackedTensor, pack_param, param_of_rank};

/// A tensor of the checkpoint as it is stored.
pub(super) struct StoredTensor {
    pub tensor: PackedTensor,
    pub format: DType,
}

/// Everything but the end: more sections may follow. Also what became of the tensors.
#[allow(clippy::too_many_arguments, reason = "each is a different part of the file")]
pub(super) fn write(
    output: &Path,
    library: &LinkedLibrary,
    source: &BuildSource,
    options: &BuildOptions,
    program: &LoweredProgram,
    memory: &MemoryPlan,
    metadata: &str,
    hooks: &mut BuildHooks<'_>,
) -> Result<(ArtifactWriter, Vec<StoredTensor>), BuildError> {
    let weights = match options.split_weights {
        false => WeightDestination::Inside,
        true => WeightDestination::Split {
            path: split_path(output),
            tensors: split_tensors(program, memory),
            bytes: memory.weights_bytes,
        },
    };
    let mut writer = ArtifactWriter::create(output, library.path(), weights)?;
    writer.write_section(section::METADATA, metadata.as_bytes())?;
    if let Some(tokenizer) = &source.tokenizer {
        writer.write_section(section::TOKENIZER, &tokenizer.file.to_section())?;
    }
    if let Some(chat) = &source.chat {
        writer.write_section(section::CHAT, &chat.to_section())?;
    }
    if options.weights_on_load {
        let Origin::Random { seed } = source.model.weights else {
            let what =
                "--weights-on-load needs --random-weights: weights of a checkpoint cannot be made again";
            return Err(BuildError::Unsupported(what.into()));
        };
        let recipe = super::recipe::build_recipe(source, seed, program, memory, hooks)?;
        writer.write_section(section::RECIPE, recipe.to_string().as_bytes())?;
        writer.add_generated_section(section::WEIGHTS, recipe.bytes, recipe.hash());
        return Ok((writer, Vec::new()));
    }
    if let Some(bytes) = graph::to_section(&program.module) {
        writer.write_section(section::GRAPH, &bytes)?;
    }
    let mut stored = Vec::new();
    for rank in 0..program.module.rank_count() {
        writer.begin_section(&mlcc_runtime::weights_section(rank))?;
        let of_rank = write_weights(&mut writer, source, program, memory, rank, hooks)?;
        writer.end_section()?;
        // All ranks store a tensor alike.
        if rank == 0 {
            stored = of_rank;
        }
    }
    Ok((writer, stored))
}

/// The path of the weights of an artifact that has them in a separate file.
pub(super) fn split_path(output: &Path) -> PathBuf {
    output.with_extension("safetensors")
}

/// Parameters in the order of the payload.
fn split_tensors(program: &LoweredProgram, memory: &MemoryPlan) -> Vec<SplitTensor> {
    let params = program.module.params.values().zip(&memory.params).filter(|(p, _)| !p.is_adapter());
    params.map(|(p, &(offset, _))| SplitTensor { name: p.name.clone(), offset }).collect()
}

fn write_weights(
    writer: &mut ArtifactWriter,
    source: &BuildSource,
    program: &LoweredProgram,
    memory: &MemoryPlan,
    rank: usize,
    hooks: &mut BuildHooks<'_>,
) -> Result<Vec<StoredTensor>, BuildError> {
    let mut stored = Vec::new();
    let bytes_of_rank = memory.weights_bytes;
    let total = bytes_of_rank * program.module.rank_count() as u64;
    let before = bytes_of_rank * rank as u64;
    let mut done = 0;
    for (id, param) in program.module.params.iter().filter(|(_, param)| !param.is_adapter()) {
        let (offset, bytes) = memory.params[id.index()];
        pad_to(writer, &mut done, offset)?;
        (hooks.event)(BuildEvent::Weights { done: before + done, total, name: &param.name });
        let options = program.pack_options.get(&param.name).copied().unwrap_or_default();
        let tensors =
            pack_param::<BuildError>(&source.checkpoint, &param_of_rank(param, rank)?, options, |piece| {
                hooks.check_cancelled()?;
                writer.write(piece)?;
                done += piece.len() as u64;
                (hooks.event)(BuildEvent::Weights { done: before + done, total, name: &param.name });
                Ok(())
            })?;
        let format = param.ty.dtype;
        stored.extend(tensors.into_iter().map(|tensor| StoredTensor { tensor, format }));
        if done != offset + bytes {
            let what =
                format!("parameter {} has {bytes} bytes in the plan, {} packed", param.name, done - offset);
            return Err(mlcc_passes::PassError::internal("plan_memory", what).into());
        }
    }
    pad_to(writer, &mut done, bytes_of_rank)?;
    Ok(stored)
}

fn pad_to(writer: &mut ArtifactWriter, done: &mut u64, to: u64) -> Result<(), BuildError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    while *done < to {
        let piece = (to - *done).min(ZEROS.len() as u64);
        writer.write(&ZEROS[..piece as usize])?;
        *done += piece;
    }
    Ok(())
}
