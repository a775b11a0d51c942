//! Adapters (LoRA) that sequences choose when a model runs: their factors lie in slots beside the weights,
//! which an artifact built with `--lora-slots` has code for. The content of a slot changes only while there
//! is no [`LoadedAdapter`] of it.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::buffer::AlignedBuffer;
use crate::table::{ArtifactTable, ParamInfo};
use crate::{Error, Model, Result};

/// Suffixes of the names of a tensor's factors.
const FACTORS: [&str; 2] = [".lora_A", ".lora_B"];

/// The two factors of one tensor of the model: what the adapter adds to it is `b a`.
#[derive(Clone, Copy, Debug)]
pub struct LoraFactors<'a> {
    /// Name of the tensor `[out, in]`, for example `model.layers.0.self_attn.q_proj.weight`.
    pub tensor: &'a str,
    pub rank: usize,
    /// `[rank, in]`, row by row.
    pub a: &'a [f32],
    /// `[out, rank]`, row by row, times the adapter's scale.
    pub b: &'a [f32],
}

/// An adapter in a slot of a model, for [`Session::set_adapter`](crate::Session::set_adapter). The slot is
/// free again when no copy of this is left, those of sessions among them.
#[derive(Clone, Debug)]
pub struct LoadedAdapter(Arc<AdapterSlot>);

#[derive(Debug)]
struct AdapterSlot {
    slots: Arc<AdapterSlotTable>,
    /// The number of the slot, from 1 on.
    number: usize,
    name: String,
    identity: u128,
}

impl LoadedAdapter {
    /// The name that it was loaded with.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The number of its slot, as sequences have it in their state.
    pub(crate) fn number(&self) -> i32 {
        self.0.number as i32
    }

    /// Differs between adapters with other numbers.
    pub(crate) fn identity(&self) -> u128 {
        self.0.identity
    }

    pub(crate) fn belongs_to(&self, model: &Model) -> bool {
        model.slots().is_some_and(|slots| Arc::ptr_eq(slots, &self.0.slots))
    }
}

impl Drop for AdapterSlot {
    fn drop(&mut self) {
        self.slots.claimed.lock().unwrap_or_else(PoisonError::into_inner)[self.number - 1] = false;
    }
}

/// The slots of a loaded model.
pub(crate) struct AdapterSlotTable {
    /// The matrices of all slots. Those of slot 0 stay zero.
    memory: AlignedBuffer,
    /// True for slots in use, from slot 1 on.
    claimed: Mutex<Vec<bool>>,
    /// One adapter is written at a time: what there is then goes to a GPU, or to other processes.
    writing: Mutex<()>,
}

impl std::fmt::Debug for AdapterSlotTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slots").field("bytes", &self.memory.len()).finish_non_exhaustive()
    }
}

impl AdapterSlotTable {
    /// The slots of a model, if it was built with some.
    pub fn from_table(table: &ArtifactTable) -> Result<Option<Arc<AdapterSlotTable>>> {
        let plan = &table.plan;
        if plan.adapter_slots == 0 {
            return Ok(None);
        }
        let align = plan.alignment.max(mlcc_abi::BUFFER_ALIGN as u64);
        let memory = AlignedBuffer::zeroed("the slots for adapters", plan.adapter_bytes, align)?;
        let taken = Mutex::new(vec![false; plan.adapter_slots as usize]);
        Ok(Some(Arc::new(AdapterSlotTable { memory, claimed: taken, writing: Mutex::new(()) })))
    }

    pub fn as_ptr(&self) -> *const u8 {
        self.memory.as_ptr()
    }

    /// Takes bytes that slots have in the process that this one follows; `None` beyond the end.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        let at = usize::try_from(at).ok()?;
        at.checked_add(bytes.len()).filter(|&end| end <= self.memory.len())?;
        // SAFETY: within the memory. The thread that hears this takes all steps as well, so none is under
        // way.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory.as_ptr().add(at), bytes.len()) };
        Some(())
    }

    /// A free slot.
    fn claim_slot(&self) -> Option<usize> {
        let mut taken = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let free = taken.iter().position(|taken| !taken)?;
        taken[free] = true;
        Some(free + 1)
    }

    /// Replaces element (`row`, `column`) of the matrix of a slot by `value(row, column)`, of all that it
    /// has.
    fn fill(&self, matrix: &SlotMatrix, slot: usize, value: impl Fn(usize, usize) -> f32) {
        for row in 0..matrix.rows {
            for column in 0..matrix.columns {
                let at = matrix.offset + 4 * matrix.element(slot * matrix.rows + row, column);
                let bytes = value(row, column).to_le_bytes();
                // SAFETY: the table was checked: all rows of all slots lie in the memory. The slot was taken
                // by the caller, so no other thread writes there, and no step reads there: no session has its
                // adapter yet.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory.as_ptr().add(at), 4) };
            }
        }
    }
}

/// The matrices that a parameter has for all slots.
struct SlotMatrix {
    /// Rows of one slot.
    rows: usize,
    columns: usize,
    offset: usize,
    tiled: bool,
}

/// Rows of a tile.
const TILE: usize = 16;

impl SlotMatrix {
    /// `None`: no such parameter is known.
    fn from_param(param: &ParamInfo, slots: u64) -> Option<SlotMatrix> {
        let &[all, columns] = param.dims.as_slice() else { return None };
        let tiled = match param.packing.as_str() {
            "" => false,
            "tile16" => true,
            _ => return None,
        };
        let matrices = slots.checked_add(1)?;
        let stored = if tiled { all.checked_next_multiple_of(TILE as u64)? } else { all };
        let bytes = stored.checked_mul(columns)?.checked_mul(4)?;
        let fits = param.format == "f32" && all.is_multiple_of(matrices) && param.bytes >= bytes;
        let (rows, columns) = ((all / matrices).try_into().ok()?, columns.try_into().ok()?);
        fits.then_some(SlotMatrix { rows, columns, offset: param.offset.try_into().ok()?, tiled })
    }

    /// The range of the elements of a slot; for tiles, with the elements that other slots have of the first
    /// and the last one.
    fn slot_range(&self, slot: usize) -> Range<usize> {
        let (first, end) = (slot * self.rows, (slot + 1) * self.rows);
        let (first, end) = match self.tiled {
            false => (first, end),
            true => (first / TILE * TILE, end.next_multiple_of(TILE)),
        };
        self.offset + 4 * first * self.columns..self.offset + 4 * end * self.columns
    }

    /// Number of the element among those in memory: row by row, or tiles of 16 rows, column by column.
    fn element(&self, row: usize, column: usize) -> usize {
        match self.tiled {
            false => row * self.columns + column,
            true => (row / TILE * self.columns + column) * TILE + row % TILE,
        }
    }
}

/// True if a parameter belongs to slots.
pub(crate) fn belongs_to_slots(param: &ParamInfo, slots: u64) -> bool {
    SlotMatrix::from_param(param, slots).is_some() && FACTORS.iter().any(|end| param.name.ends_with(end))
}

impl Model {
    /// Most adapters at a time; 0 where the artifact was built without `--lora-slots`.
    pub fn adapter_slots(&self) -> usize {
        self.plan().adapter_slots as usize
    }

    /// The most rank that an adapter may have.
    pub fn adapter_rank(&self) -> usize {
        self.plan().adapter_rank as usize
    }

    /// Names of the tensors that an adapter may have factors for.
    pub fn adapter_tensors(&self) -> impl Iterator<Item = &str> {
        let params = self.table().params.iter().filter(|param| param.in_adapter_slots);
        params.filter_map(|param| param.name.strip_suffix(FACTORS[0]))
    }

    /// Puts an adapter into a free slot. Tensors that it has no factors for stay as they are. When it is
    /// refused nothing has changed.
    pub fn load_adapter(&self, name: &str, factors: &[LoraFactors<'_>]) -> Result<LoadedAdapter> {
        let Some(slots) = self.slots() else {
            return Err(Error::NoSlots { path: self.artifact().path().to_path_buf() });
        };
        let places =
            factors.iter().map(|factors| self.locate_factors(name, factors)).collect::<Result<Vec<_>>>()?;
        let number = slots.claim_slot().ok_or(Error::SlotsTaken { slots: self.adapter_slots() })?;
        let (slots, name) = (Arc::clone(slots), name.to_string());
        // From here on it is given back whatever happens.
        let mut slot = AdapterSlot { slots, number, name, identity: 0 };
        let slots = Arc::clone(&slot.slots);
        let _writing = slots.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = Vec::new();
        // What was in the slot before had other tensors, maybe.
        for param in self.table().params.iter().filter(|param| param.in_adapter_slots) {
            if let Some(matrix) = SlotMatrix::from_param(param, self.plan().adapter_slots) {
                slot.slots.fill(&matrix, number, |_, _| 0.0);
                changed.push(matrix.slot_range(number));
            }
        }
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for (factors, [a, b]) in factors.iter().zip(&places) {
            let rank = factors.rank;
            let of = |values: &[f32], at: usize| values.get(at).copied().unwrap_or(0.0);
            slot.slots.fill(a, number, |row, column| {
                if row < rank { of(factors.a, row * a.columns + column) } else { 0.0 }
            });
            slot.slots.fill(
                b,
                number,
                |row, column| {
                    if column < rank { of(factors.b, row * rank + column) } else { 0.0 }
                },
            );
            hash.update(factors.tensor.as_bytes());
            factors.a.iter().chain(factors.b).for_each(|value| hash.update(&value.to_le_bytes()));
        }
        self.device().write_adapters(slots.memory.bytes(), &changed)?;
        slot.identity = hash.digest128();
        Ok(LoadedAdapter(Arc::new(slot)))
    }

    /// The places of the factors of a tensor.
    fn locate_factors(&self, adapter: &str, factors: &LoraFactors<'_>) -> Result<[SlotMatrix; 2]> {
        let wrong = |what: String| Error::AdapterTensor {
            adapter: adapter.to_string(),
            tensor: factors.tensor.to_string(),
            what,
        };
        let slots = self.plan().adapter_slots;
        let find = |end: &str| {
            let name = format!("{}{end}", factors.tensor);
            self.table()
                .find_param(&name)
                .filter(|param| param.in_adapter_slots)
                .and_then(|p| SlotMatrix::from_param(p, slots))
        };
        let (Some(a), Some(b)) = (find(FACTORS[0]), find(FACTORS[1])) else {
            let known = self.adapter_tensors().next().unwrap_or("none");
            return Err(wrong(format!(
                "the artifact has no slot for it (it has slots for {} tensors, the first is {known}): merge the adapter with \
                 `mlcc build --lora`",
                self.adapter_tensors().count()
            )));
        };
        let rank = factors.rank;
        if rank == 0 || rank > a.rows {
            return Err(wrong(format!(
                "its rank is {rank}, the slots have room for 1 to {}: build with --lora-rank {rank}",
                a.rows
            )));
        }
        let (expected_a, expected_b) = (rank * a.columns, b.rows * rank);
        if (factors.a.len(), factors.b.len()) != (expected_a, expected_b) {
            return Err(wrong(format!(
                "its factors have {} and {} numbers, a weight of [{}, {}] takes {expected_a} and {expected_b} of rank {rank}: it was \
                 made for another base",
                factors.a.len(),
                factors.b.len(),
                b.rows,
                a.columns
            )));
        }
        if !factors.a.iter().chain(factors.b).all(|value| value.is_finite()) {
            return Err(wrong("it has numbers that are not finite".into()));
        }
        Ok([a, b])
    }
}
