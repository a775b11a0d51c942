//! The pages of a model's caches: where each has its rows, and the kernel that appends some.

use crate::inline::{CachePage, PagedBuffer};
use crate::machine::MachineKind;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::Function;
use mlcc_ir::kernel::BufId;
use mlcc_ir::module::{Module, StateId};
use mlcc_ir::step::PAGE_ROWS;
use mlcc_ir::types::TensorType;
use mlcc_kernel_lang::{Recorder, ThreadTeam, Val};
use mlcc_target::Arch;

/// Every cache has a part of each page that begins at a multiple of this many bytes.
const ALIGN: u64 = 64;
/// Threads of a block that copies a row on a GPU.
const THREADS: i64 = 256;

/// The places of the rows of a model's caches in a page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageLayout {
    /// Start of each state's part. `None` for states that are no caches.
    parts: Vec<Option<u64>>,
    /// Bytes of a page. On CPUs it has the parts of the other ranks too, which may be threads of one process;
    /// on a GPU only its own.
    pub bytes: u64,
    /// Pages of a sequence.
    pub pages: u64,
}

impl PageLayout {
    /// The layout of all caches in their order; `None` for a model that has none, or one whose rows have no
    /// fixed size.
    pub fn for_module(module: &Module, arch: Arch) -> Option<PageLayout> {
        let context = u64::try_from(module.context_length()?).ok()?;
        let (mut parts, mut bytes) = (Vec::new(), 0_u64);
        for (id, state) in module.states.iter() {
            if !module.is_cache(id) {
                parts.push(None);
                continue;
            }
            let part = row_elements(&state.ty)? as u64 * state.ty.dtype.bytes()? as u64 * PAGE_ROWS;
            parts.push(Some(bytes));
            bytes += part.next_multiple_of(ALIGN);
        }
        // One rank after the other: so pages have one number, wherever the ranks are.
        let ranks = if arch == Arch::Nvptx { 1 } else { module.rank_count() as u64 };
        let bytes = bytes.checked_mul(ranks)?;
        Some(PageLayout { parts, bytes, pages: context.div_ceil(PAGE_ROWS) })
    }

    /// The start of a cache's rows in a page.
    pub fn state_offset(&self, state: StateId) -> Option<u64> {
        self.parts.get(state.index()).copied().flatten()
    }
}

/// Elements of a row of a cache.
pub(crate) fn row_elements(ty: &TensorType) -> Option<i64> {
    ty.dims.iter().skip(1).try_fold(1, |product, d| Some(product * d.as_const()?))
}

/// Copies `rows: [n, ..]` to the rows after `past` others of the cache.
pub(crate) fn emit_append(
    k: &Recorder,
    (n, past): (Val, Val),
    rows: BufId,
    (cache, paged): (BufId, PagedBuffer),
    machine: MachineKind,
) {
    let (from, to) = (k.view(rows, [1, paged.row]), k.view(cache, [1, paged.row]));
    let copy = |i| {
        let row = (past + i).named("to");
        let shift = paged.page_shift(CachePage::of_row(k, paged.table, row), to.dtype()).named("shift");
        let to = to.offset_by(shift);
        match machine {
            MachineKind::Cpu { lanes, .. } => {
                let lanes = crate::attention::plan::lanes_of(paged.row, lanes);
                k.vectors("c", paged.row, lanes, |c| to.set([row, c], from.load([i, c], lanes)));
            }
            MachineKind::Gpu { .. } => {
                ThreadTeam::new(k, THREADS).each(paged.row, |c| to.set([row, c], from.at([i, c])))
            }
        }
    };
    match machine {
        MachineKind::Cpu { .. } => k.par("row", n, copy),
        MachineKind::Gpu { .. } => k.blocks("row", 0, n, copy),
    }
}

/// A function that gives its input, for kernels that move it.
pub(crate) fn identity_function(module: &Module, name: &str, ty: &TensorType) -> Result<Function, String> {
    use mlcc_ir::graph::FunctionKind;
    use mlcc_ir::ops::Op;
    let mut f = Function::new(name, FunctionKind::Group);
    let input = f.add_input(ty.clone());
    let out = f.append(module, Op::Reshape { dims: ty.dims.clone() }, &[input]);
    f.outputs = out.map_err(|e| e.to_string())?;
    Ok(f)
}
