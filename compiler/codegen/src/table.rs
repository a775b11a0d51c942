//! The data symbol `mlcc_model` as bytes plus relocations, independent of the back end.
//!
//! [`TableDesc`] is plain data; [`TableDesc::lay_out`] lays the ABI table, its arrays and its strings out in
//! one block whose first bytes are the [`mlcc_abi::ModelTable`]. A back end defines one symbol of that
//! content, in writable data (the dynamic loader relocates it), aligned to [`TableImage::ALIGN`].
//!
//! Invariants: equal descriptions give equal bytes; a relocated slot is 8 bytes, 8-aligned, and zero in
//! `bytes`; relocations ascend.

use mlcc_abi as abi;

pub use mlcc_abi::{DimExpr, EntryForm, LaunchArg, ModelPlan};

/// Everything that the table says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableDesc {
    /// `x86-64`, `aarch64` or `cuda`.
    pub target: String,
    /// Compiler name and version.
    pub compiler: String,
    /// JSON.
    pub metadata: String,
    /// Best first.
    pub variants: Vec<VariantDesc>,
    pub params: Vec<ParamDesc>,
    pub states: Vec<StateDesc>,
    pub images: Vec<ImageDesc>,
    pub device_entries: Vec<DeviceEntryDesc>,
    pub plan: ModelPlan,
    /// A prompt comes in one call ([`mlcc_abi::table_flag::WHOLE_PROMPTS`]).
    pub whole_prompts: bool,
}

/// The code for one CPU level.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VariantDesc {
    pub name: String,
    /// Bits of [`mlcc_abi::feature`].
    pub features: u64,
    pub entries: Vec<EntryDesc>,
}

/// An entry point and the symbol names of its functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryDesc {
    pub name: String,
    pub kind: EntryForm,
    pub function: String,
    /// The function for calls with adapters.
    pub adapted: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParamDesc {
    pub name: String,
    pub format: String,
    /// Empty = row-major.
    pub packing: String,
    /// Logical dims, at most four.
    pub dims: Vec<u64>,
    /// It is one of the matrices of slots for adapters.
    pub of_slots: bool,
    pub offset: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateDesc {
    pub name: String,
    pub offset: u64,
    pub bytes: u64,
    /// `None` = zero bytes.
    pub fill: Option<f32>,
    /// Type of the elements.
    pub format: String,
    /// Rows of a KV cache; they need no initial value. `None` = another state.
    pub cache: Option<CacheDesc>,
    /// The number of rows dropped from the caches, of a model that sees only these.
    pub dropped_beyond: Option<WindowDesc>,
    /// The number of tokens that the sequence will have after the present prompt.
    pub is_length: bool,
    /// The slot of the sequence's adapter.
    pub is_slot: bool,
    /// The number of first rows of the caches that are of the source text.
    pub is_source: bool,
}

/// The rows of the caches that a model sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowDesc {
    /// The newest ones, that of the current token included.
    pub newest: u64,
    /// The first ones.
    pub sinks: u32,
}

/// The rows of a KV cache; together they are the state's `bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheDesc {
    pub rows: u64,
    pub row_bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageDesc {
    /// `ptx` or `cubin`.
    pub kind: String,
    pub sm: u32,
    /// A value of [`mlcc_abi::device_scope`].
    pub scope: u32,
    pub bytes: Vec<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceEntryDesc {
    /// The name of the [`mlcc_abi::EntryPoint`], with [`mlcc_abi::ADAPTED`] before it in the list for calls
    /// with adapters.
    pub name: String,
    pub launches: Vec<LaunchDesc>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchDesc {
    pub kernel: String,
    pub grid: [DimExpr; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub args: Vec<LaunchArg>,
    /// A value of [`mlcc_abi::repeat`].
    pub repeat: u32,
}

/// The target of a relocated slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RelocTarget {
    /// This many bytes into the data symbol itself.
    Own(u64),
    /// A function of the object.
    Function(String),
}

/// One pointer slot of the block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointerReloc {
    pub at: u64,
    pub target: RelocTarget,
}

/// The content of the data symbol.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableImage {
    pub bytes: Vec<u8>,
    pub relocs: Vec<PointerReloc>,
}

/// A run of the block, for back ends that spell a symbol as a sequence of fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageRun<'a> {
    Bytes(&'a [u8]),
    Pointer(&'a RelocTarget),
}

impl TableImage {
    pub const ALIGN: u64 = 64;

    /// Bytes and pointers in order; the sizes (8 per pointer) add up to `bytes.len()`.
    pub fn runs(&self) -> Vec<ImageRun<'_>> {
        let mut out = Vec::with_capacity(2 * self.relocs.len() + 1);
        let mut from = 0;
        for reloc in &self.relocs {
            let at = reloc.at as usize;
            if at > from {
                out.push(ImageRun::Bytes(&self.bytes[from..at]));
            }
            out.push(ImageRun::Pointer(&reloc.target));
            from = at + 8;
        }
        if from < self.bytes.len() {
            out.push(ImageRun::Bytes(&self.bytes[from..]));
        }
        out
    }

    fn align(&mut self, to: usize) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
        self.bytes.len() as u64
    }

    fn u64(&mut self, v: u64) {
        self.bytes.extend_from_slice(&v.to_le_bytes());
    }

    fn u32(&mut self, v: u32) {
        self.bytes.extend_from_slice(&v.to_le_bytes());
    }

    fn pointer(&mut self, target: RelocTarget) {
        self.relocs.push(PointerReloc { at: self.bytes.len() as u64, target });
        self.u64(0);
    }

    /// A slot that `fill_slot` fills in later; null if it never does.
    fn reserve_slot(&mut self) -> u64 {
        self.u64(0);
        self.bytes.len() as u64 - 8
    }

    fn fill_slot(&mut self, slot: u64, to: u64) {
        self.relocs.push(PointerReloc { at: slot, target: RelocTarget::Own(to) });
    }
}

/// Strings and arrays whose place is known only after the fixed parts are laid out.
#[derive(Default)]
struct StringPool<'a>(Vec<(u64, &'a [u8])>);

impl<'a> StringPool<'a> {
    /// Writes a `Str` field.
    fn add_text(&mut self, image: &mut TableImage, s: &'a str) {
        self.0.push((image.reserve_slot(), s.as_bytes()));
        image.u64(s.len() as u64);
    }

    /// Appends every text, NUL-terminated for the debugger's sake (and PTX needs it).
    fn append_to(self, image: &mut TableImage) {
        for (slot, bytes) in self.0 {
            if bytes.len() > 64 {
                image.align(64);
            }
            let at = image.bytes.len() as u64;
            image.bytes.extend_from_slice(bytes);
            image.bytes.push(0);
            image.fill_slot(slot, at);
        }
        image.align(8);
    }
}

impl TableDesc {
    /// Lays the table out.
    pub fn lay_out(&self) -> TableImage {
        let mut image = TableImage::default();
        let mut strings = StringPool::default();
        let arrays = self.header(&mut image, &mut strings);
        debug_assert_eq!(image.bytes.len(), size_of::<abi::ModelTable>());
        let place = |image: &mut TableImage, index: usize, len: usize| {
            let at = image.align(8);
            if len > 0 {
                image.fill_slot(arrays[index], at);
            }
        };
        place(&mut image, 0, self.variants.len());
        self.write_variants(&mut image, &mut strings);
        place(&mut image, 1, self.params.len());
        self.params.iter().for_each(|p| p.write(&mut image, &mut strings));
        place(&mut image, 2, self.states.len());
        self.states.iter().for_each(|s| s.write(&mut image, &mut strings));
        place(&mut image, 3, self.images.len());
        self.images.iter().for_each(|i| i.write(&mut image, &mut strings));
        place(&mut image, 4, self.device_entries.len());
        self.write_device_entries(&mut image, &mut strings);
        strings.append_to(&mut image);
        image.relocs.sort_by_key(|r| r.at);
        image
    }

    /// Writes the fixed table; returns the slots of its five arrays.
    fn header<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) -> [u64; 5] {
        image.u64(abi::MAGIC);
        image.u32(abi::ABI_VERSION);
        image.u32(size_of::<abi::ModelTable>() as u32);
        image.u64(if self.whole_prompts { abi::table_flag::WHOLE_PROMPTS } else { 0 });
        strings.add_text(image, &self.target);
        strings.add_text(image, &self.compiler);
        strings.add_text(image, &self.metadata);
        let lens = [
            self.variants.len(),
            self.params.len(),
            self.states.len(),
            self.images.len(),
            self.device_entries.len(),
        ];
        let slots = lens.map(|len| {
            let slot = image.reserve_slot();
            image.u64(len as u64);
            slot
        });
        self.plan.named_fields().into_iter().for_each(|(_, value)| image.u64(value));
        [0; 3].into_iter().for_each(|reserved| image.u64(reserved));
        slots
    }

    fn write_variants<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) {
        let mut entry_slots = Vec::new();
        for variant in &self.variants {
            strings.add_text(image, &variant.name);
            image.u64(variant.features);
            entry_slots.push(image.reserve_slot());
            image.u64(variant.entries.len() as u64);
        }
        for (variant, slot) in self.variants.iter().zip(entry_slots) {
            let at = image.align(8);
            if !variant.entries.is_empty() {
                image.fill_slot(slot, at);
            }
            variant.entries.iter().for_each(|entry| entry.write(image, strings));
        }
    }

    fn write_device_entries<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) {
        let mut launch_slots = Vec::new();
        for entry in &self.device_entries {
            strings.add_text(image, &entry.name);
            launch_slots.push(image.reserve_slot());
            image.u64(entry.launches.len() as u64);
        }
        let mut arg_slots = Vec::new();
        for (entry, slot) in self.device_entries.iter().zip(launch_slots) {
            let at = image.align(8);
            if !entry.launches.is_empty() {
                image.fill_slot(slot, at);
            }
            for launch in &entry.launches {
                arg_slots.push((launch.write(image, strings), launch));
            }
        }
        for (slot, launch) in arg_slots {
            let at = image.align(8);
            if !launch.args.is_empty() {
                image.fill_slot(slot, at);
            }
            for a in &launch.args {
                image.u32(a.kind);
                image.u32(a.reserved);
                image.u64(a.offset);
            }
        }
    }
}

impl EntryDesc {
    fn write<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) {
        strings.add_text(image, &self.name);
        image.u32(self.kind as u32);
        image.u32(0);
        image.pointer(RelocTarget::Function(self.function.clone()));
        match &self.adapted {
            Some(name) => image.pointer(RelocTarget::Function(name.clone())),
            None => image.u64(0),
        }
    }
}

impl ParamDesc {
    fn write<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) {
        debug_assert!(self.dims.len() <= 4, "parameter {} has more than four dims", self.name);
        strings.add_text(image, &self.name);
        strings.add_text(image, &self.format);
        strings.add_text(image, &self.packing);
        image.u32(self.dims.len() as u32);
        image.u32(u32::from(self.of_slots));
        (0..4).for_each(|i| image.u64(self.dims.get(i).copied().unwrap_or(0)));
        image.u64(self.offset);
        image.u64(self.bytes);
    }
}

impl StateDesc {
    fn write<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) {
        strings.add_text(image, &self.name);
        image.u64(self.offset);
        image.u64(self.bytes);
        image.u32(if self.fill.is_some() { abi::init::FILL_F32 } else { abi::init::ZERO });
        image.u32(self.fill.unwrap_or(0.0).to_bits());
        strings.add_text(image, &self.format);
        let (kind, rows) = match (self.cache, self.dropped_beyond) {
            (Some(cache), _) => (abi::state_kind::CACHE, cache.rows),
            (None, Some(window)) => (abi::state_kind::DROPPED_ROWS, window.newest),
            (None, None) if self.is_length => (abi::state_kind::SEQUENCE_LENGTH, 0),
            (None, None) if self.is_slot => (abi::state_kind::ADAPTER_SLOT, 0),
            (None, None) if self.is_source => (abi::state_kind::SOURCE_LENGTH, 0),
            (None, None) => (abi::state_kind::RECURRENT, 0),
        };
        image.u32(kind);
        image.u32(self.dropped_beyond.map_or(0, |window| window.sinks));
        image.u64(rows);
        image.u64(self.cache.map_or(0, |c| c.row_bytes));
    }
}

impl ImageDesc {
    fn write<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) {
        strings.add_text(image, &self.kind);
        image.u32(self.sm);
        image.u32(self.scope);
        strings.0.push((image.reserve_slot(), &self.bytes));
        image.u64(self.bytes.len() as u64);
    }
}

impl LaunchDesc {
    /// Returns the slot of the argument array.
    fn write<'a>(&'a self, image: &mut TableImage, strings: &mut StringPool<'a>) -> u64 {
        strings.add_text(image, &self.kernel);
        for g in &self.grid {
            [g.coef_n, g.coef_past, g.constant, g.div].into_iter().for_each(|v| image.u64(v as u64));
        }
        self.block.into_iter().for_each(|b| image.u32(b));
        image.u32(self.shared_bytes);
        let slot = image.reserve_slot();
        image.u64(self.args.len() as u64);
        image.u32(self.repeat);
        image.u32(0);
        slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> TableDesc {
        let launch = LaunchDesc {
            kernel: "add".into(),
            grid: [DimExpr { coef_n: 2, coef_past: 0, constant: 5, div: 4 }; 3],
            block: [32, 1, 1],
            shared_bytes: 16,
            args: vec![LaunchArg { kind: abi::arg::STATE, reserved: 0, offset: 64 }],
            repeat: abi::repeat::EACH_SEQUENCE,
        };
        TableDesc {
            target: "x86-64".into(),
            compiler: "mlcc".into(),
            metadata: "{\"a\":1}".into(),
            variants: vec![VariantDesc {
                name: "v".into(),
                features: 0,
                entries: vec![EntryDesc {
                    name: "decode".into(),
                    kind: EntryForm::LastLogits,
                    function: "f".into(),
                    adapted: None,
                }],
            }],
            params: vec![ParamDesc { name: "w".into(), dims: vec![3, 4], ..Default::default() }],
            states: vec![
                StateDesc { name: "p".into(), bytes: 8, fill: Some(-1e30), ..Default::default() },
                StateDesc {
                    name: "k".into(),
                    offset: 64,
                    bytes: 60,
                    format: "f16".into(),
                    cache: Some(CacheDesc { rows: 5, row_bytes: 12 }),
                    ..Default::default()
                },
            ],
            images: vec![ImageDesc { kind: "ptx".into(), sm: 80, scope: 1, bytes: b"// text".to_vec() }],
            device_entries: vec![DeviceEntryDesc { name: "decode".into(), launches: vec![launch] }],
            plan: ModelPlan { vocab: 7, ..Default::default() },
            whole_prompts: true,
        }
    }

    /// Loads the block into aligned memory, as the dynamic loader would, and reads it back through the ABI
    /// structs.
    #[test]
    fn image_reads_back_through_the_abi() {
        let image = sample().lay_out();
        let mut memory: Vec<u64> =
            image.bytes.chunks(8).map(|c| c.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))).collect();
        let base = memory.as_ptr() as u64;
        for reloc in &image.relocs {
            let slot = &mut memory[reloc.at as usize / 8];
            assert_eq!((*slot, reloc.at % 8), (0, 0));
            *slot = match &reloc.target {
                RelocTarget::Own(at) => base + at,
                RelocTarget::Function(name) => {
                    assert_eq!(name, "f");
                    0xf00
                }
            };
        }
        // SAFETY: `memory` is the relocated table, 8-aligned, and outlives `table`.
        let table = unsafe { &*memory.as_ptr().cast::<abi::ModelTable>() };
        let text = |s: abi::Str| {
            // SAFETY: the image's strings lie inside `memory`.
            String::from_utf8(unsafe { std::slice::from_raw_parts(s.ptr, s.len as usize) }.to_vec()).unwrap()
        };
        assert_eq!((table.magic, table.abi_version), (abi::MAGIC, abi::ABI_VERSION));
        assert_eq!(table.flags, abi::table_flag::WHOLE_PROMPTS);
        assert_eq!((text(table.target), text(table.metadata)), ("x86-64".into(), "{\"a\":1}".into()));
        assert_eq!((table.plan.vocab, table.plan.alignment, table.n_variants), (7, 64, 1));
        // SAFETY: each array has one element, inside `memory`.
        let (variant, param, state, img, entry) =
            unsafe { (*table.variants, *table.params, *table.states, *table.images, *table.device_entries) };
        // SAFETY: one row, inside `memory`.
        let decode = unsafe { *variant.entries };
        assert_eq!((text(decode.name), decode.kind, variant.n_entries), ("decode".into(), 0, 1));
        assert_eq!(decode.function.map(|f| f as usize), Some(0xf00));
        assert!(decode.adapted.is_none());
        assert_eq!((text(param.name), param.ndim, param.dims), ("w".into(), 2, [3, 4, 0, 0]));
        assert_eq!((state.init, state.fill), (abi::init::FILL_F32, -1e30));
        assert_eq!((state.kind, state.rows, state.row_bytes), (abi::state_kind::RECURRENT, 0, 0));
        // SAFETY: the second of two states, inside `memory`.
        let cache = unsafe { *table.states.add(1) };
        assert_eq!((text(cache.name), text(cache.format)), ("k".into(), "f16".into()));
        assert_eq!((cache.kind, cache.rows, cache.row_bytes), (abi::state_kind::CACHE, 5, 12));
        assert_eq!((img.sm, img.scope), (80, abi::device_scope::EXACT));
        // SAFETY: `len` bytes and the NUL lie inside `memory`.
        assert_eq!(unsafe { std::slice::from_raw_parts(img.ptr, img.len as usize + 1) }, b"// text\0");
        // SAFETY: one launch with one argument, inside `memory`.
        let (launch, arg) = unsafe { (*entry.launches, *(*entry.launches).args) };
        assert_eq!(
            (text(launch.kernel), launch.grid[2].constant, launch.shared_bytes),
            ("add".into(), 5, 16)
        );
        assert_eq!(arg, LaunchArg { kind: abi::arg::STATE, reserved: 0, offset: 64 });
        assert_eq!((launch.repeat, launch.n_args), (abi::repeat::EACH_SEQUENCE, 1));
    }

    #[test]
    fn pieces_cover_the_block() {
        let image = sample().lay_out();
        let sum: usize =
            image.runs().iter().map(|p| if let ImageRun::Bytes(b) = p { b.len() } else { 8 }).sum();
        assert_eq!(sum, image.bytes.len());
        assert_eq!(sample().lay_out(), image);
    }
}
