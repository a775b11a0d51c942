//! The places of the outputs of layers in an artifact built with `--debug-taps`: in scratch memory that a
//! step writes once and leaves alone until it ends.

use std::collections::BTreeMap;

use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::entity::EntityId;
use mlcc_ir::types::DType;
use mlcc_kernels::lower::plan::BufferKind;
use mlcc_passes::LoweredProgram;
use mlcc_passes::plan_memory::MemoryPlan;
use serde::{Deserialize, Serialize};

/// One value `[rows, width]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapPlace {
    pub name: String,
    /// Bytes from the start of scratch memory.
    pub offset: u64,
    /// `None`: one per token of the call.
    pub rows: Option<u64>,
    pub width: u64,
    /// Name of the element type.
    pub dtype: String,
}

/// The taps of each entry point, in the order in which the model definition names them.
pub type TapPlaces = BTreeMap<String, Vec<TapPlace>>;

/// The taps of a planned program, which lie at the same places on all levels; empty where it was built
/// without.
pub fn tap_places(program: &LoweredProgram, memory: &MemoryPlan) -> TapPlaces {
    let entries = program.levels.first().map_or(&[][..], |l| &l.lowered.entries);
    let plans = memory.levels.first().map_or(&[][..], |l| &l.entries);
    let mut all = TapPlaces::new();
    for (entry, plan) in entries.iter().zip(plans) {
        let names = program.module.taps_of(&entry.name);
        let Some((_, f)) = program.module.function(&entry.name) else { continue };
        let place = |(i, name): (usize, &String)| {
            let output = BufferKind::Output(i as u32 + 1);
            let (id, _) = entry.buffers.iter().find(|(_, b)| b.memory == output)?;
            let ty = f.ty(*f.outputs.get(i + 1)?);
            let size = |axis: usize| Some(ty.dims.get(axis)?.as_const()? as u64);
            let (offset, dtype) = (plan.buffers[id.index()].offset, ty.dtype.name().to_string());
            Some(TapPlace { name: name.clone(), offset, rows: size(0), width: size(1)?, dtype })
        };
        let places: Vec<TapPlace> = names.iter().enumerate().filter_map(place).collect();
        if !places.is_empty() {
            all.insert(entry.name.clone(), places);
        }
    }
    all
}

impl TapPlace {
    /// The values after a call with `tokens` tokens; `None` if they do not lie in the memory.
    pub fn read(&self, scratch: &[u8], tokens: usize) -> Option<Vec<f32>> {
        let dtype = DType::parse(&self.dtype)?;
        let rows = self.rows.unwrap_or(tokens as u64);
        let bytes = rows.checked_mul(self.width)?.checked_mul(dtype.bytes()? as u64)?;
        let range =
            usize::try_from(self.offset).ok()?..usize::try_from(self.offset.checked_add(bytes)?).ok()?;
        Some(KernelBuffer::new(dtype, scratch.get(range)?.to_vec()).to_f32())
    }
}
