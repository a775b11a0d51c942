//! The model table as owned, checked data.
//!
//! Invariant: after [`ArtifactTable::read`] every parameter lies in the weights, every piece of state in the
//! state block, and the plan's numbers are usable (alignment a power of two, chunk and vocabulary at least 1)
//! and those of the metadata. Nothing relies on a hash: addresses lie in the table ([`TableReader`]), entry
//! points in the code, numbers in their bounds (`check`).

mod check;
mod reader;

use mlcc_abi::{self as abi, DimExpr, EntryPoint, LaunchArg, ModelTable, StepFn, Str};

pub use mlcc_abi::ModelPlan;

pub(crate) use reader::TableReader;

/// Most arguments of one kernel launch.
pub(crate) const MAX_LAUNCH_ARGS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    pub name: String,
    pub format: String,
    /// Empty = row-major.
    pub packing: String,
    pub dims: Vec<u64>,
    /// One of the matrices of slots for adapters; `offset` is that among these.
    pub in_adapter_slots: bool,
    pub offset: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct StateInfo {
    pub name: String,
    pub offset: u64,
    pub bytes: u64,
    /// `None` = zero.
    pub fill: Option<f32>,
    /// Type of the elements, for example `f16`.
    pub format: String,
    /// Rows of a KV cache; `None` = another state.
    pub cache: Option<CacheShape>,
    /// The number of rows dropped from the start of every cache, of a model that sees only a number of newest
    /// rows.
    pub dropped_beyond: Option<SlidingWindow>,
    /// True for the number of tokens that the sequence will have after the present prompt.
    pub is_length: bool,
    /// True for the slot of the sequence's adapter.
    pub is_slot: bool,
    /// True for the number of first rows of the caches that are of the source text.
    pub is_source: bool,
}

/// The rows of the caches that a model sees, if it can go on without the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// The newest ones, that of the current token included.
    pub newest: u64,
    /// The first ones.
    pub sinks: u64,
}

impl SlidingWindow {
    /// Rows that the next token sees beside its own.
    pub fn visible_rows(self) -> u64 {
        self.sinks + (self.newest - 1)
    }
}

/// The rows of a KV cache, one per position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Planned; `rows * row_bytes` are the state's bytes.
    pub rows: u64,
    pub row_bytes: u64,
}

impl StateInfo {
    /// The number of bytes in use once the caches have `rows` rows: of a recurrent state all of them.
    pub fn live_bytes(&self, rows: u64) -> u64 {
        self.cache.map_or(self.bytes, |c| c.rows.min(rows) * c.row_bytes)
    }
}

/// Bytes of all states of which the caches have `rows` rows.
pub(crate) fn live_bytes(states: &[StateInfo], rows: u64) -> u64 {
    states.iter().map(|s| s.live_bytes(rows)).sum()
}

/// Code for one CPU level.
#[derive(Clone, Debug)]
pub struct CpuVariant {
    pub name: String,
    /// Bits of [`mlcc_abi::feature`].
    pub features: u64,
    pub(crate) entries: CpuEntries,
}

/// The functions of a variant, by entry point.
#[derive(Clone, Debug, Default)]
pub(crate) struct CpuEntries([Option<CpuEntry>; EntryPoint::COUNT]);

/// The functions of an entry point.
#[derive(Clone, Copy, Debug)]
struct CpuEntry {
    function: StepFn,
    adapted: Option<StepFn>,
}

impl CpuEntries {
    /// The function of an entry point; in a call with adapters the adapted one, where the entry point has
    /// such.
    pub fn function(&self, entry: EntryPoint, adapted: bool) -> Option<StepFn> {
        let found = self.0[entry as usize].as_ref()?;
        if adapted && entry.has_adapted() { found.adapted } else { Some(found.function) }
    }

    /// True if an entry point has a function for calls with adapters.
    pub fn has_adapted(&self, entry: EntryPoint) -> bool {
        self.0[entry as usize].is_some_and(|found| found.adapted.is_some())
    }
}

/// Device code.
#[derive(Clone, Debug)]
pub struct GpuImage {
    /// `ptx` or `cubin`.
    pub kind: String,
    pub sm: u32,
    /// A value of [`mlcc_abi::device_scope`].
    pub scope: u32,
    /// The code, with a NUL byte at the end.
    pub bytes: Vec<u8>,
}

#[derive(Clone, Debug)]
pub struct KernelLaunch {
    pub kernel: String,
    pub grid: [DimExpr; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub args: Vec<LaunchArg>,
    pub repeat: LaunchRepeat,
    /// No kernel: see [`abi::repeat::ALL_GATHER`].
    pub is_all_gather: bool,
}

/// The repetitions of a launch; see [`abi::repeat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchRepeat {
    Once,
    Outputs,
    EachSequence,
}

impl LaunchRepeat {
    fn read(launch: &abi::Launch) -> TableResult<LaunchRepeat> {
        match launch.repeat {
            abi::repeat::ONCE | abi::repeat::ALL_GATHER => Ok(LaunchRepeat::Once),
            abi::repeat::OUTPUTS | abi::repeat::ALL_GATHER_OUTPUTS => Ok(LaunchRepeat::Outputs),
            abi::repeat::EACH_SEQUENCE => Ok(LaunchRepeat::EachSequence),
            other => malformed(format!("a launch is for something unknown ({other})")),
        }
    }
}

#[derive(Clone, Debug)]
pub struct LaunchList {
    pub name: String,
    pub launches: Vec<KernelLaunch>,
}

#[derive(Clone, Debug)]
pub struct ArtifactTable {
    /// `x86-64`, `aarch64` or `cuda`.
    pub target: String,
    pub compiler: String,
    pub metadata: String,
    /// Best first.
    pub variants: Vec<CpuVariant>,
    pub params: Vec<ParamInfo>,
    pub states: Vec<StateInfo>,
    pub images: Vec<GpuImage>,
    pub device_entries: Vec<LaunchList>,
    pub plan: ModelPlan,
    /// A prompt comes in one call of at most `chunk` tokens, at the start of a sequence.
    pub whole_prompts: bool,
}

/// The reasons why a table is not usable.
#[derive(Debug)]
pub(crate) enum TableError {
    Magic,
    Version { found: u32, compiler: String },
    Malformed(String),
}

type TableResult<T> = std::result::Result<T, TableError>;

fn malformed<T>(what: impl Into<String>) -> TableResult<T> {
    Err(TableError::Malformed(what.into()))
}

impl ArtifactTable {
    /// Copies and checks the table of a loaded artifact.
    ///
    /// # Safety
    /// The image's table is mapped, readable and not written, at `place.table`.
    pub(crate) unsafe fn read(place: &TableReader<'_>) -> TableResult<Self> {
        /// The fields of every version.
        #[repr(C)]
        struct TableHeader {
            magic: u64,
            version: u32,
            size: u32,
            flags: u64,
            target: Str,
            compiler: Str,
        }
        // SAFETY: by contract; any bits are values of these types.
        let begin = unsafe { place.array(place.table.cast::<TableHeader>(), 1, "first fields") }?;
        let begin = &begin[0];
        if begin.magic != abi::MAGIC {
            return Err(TableError::Magic);
        }
        if begin.version != abi::ABI_VERSION {
            // SAFETY: by contract.
            let compiler = unsafe { place.name(begin.compiler) }.unwrap_or_default();
            return Err(TableError::Version { found: begin.version, compiler });
        }
        // SAFETY: by contract; the same version has the same layout, in which any bits are values.
        let t = &unsafe { place.array(place.table, 1, "fields") }?[0];
        if t.struct_size as usize != size_of::<ModelTable>()
            || t.flags & !abi::table_flag::WHOLE_PROMPTS != 0
            || t.reserved.iter().any(|&word| word != 0)
        {
            return malformed("the table has another size or unknown flags");
        }
        // SAFETY: by contract.
        let mut read = unsafe {
            Self {
                target: place.name(t.target)?,
                compiler: place.name(t.compiler)?,
                metadata: place.long_text(t.metadata)?,
                variants: read_variants(place, t)?,
                params: read_params(place, t)?,
                states: read_states(place, t)?,
                images: read_images(place, t)?,
                device_entries: read_device_entries(place, t)?,
                plan: ModelPlan { ranks: t.plan.ranks.max(1), ..t.plan.clone() },
                whole_prompts: t.flags & abi::table_flag::WHOLE_PROMPTS != 0,
            }
        };
        if place.metadata.is_some_and(|beside| beside != read.metadata) {
            return malformed("its metadata are not those of its table");
        }
        read.check()?;
        read.add_ranks();
        Ok(read)
    }

    /// States of the other ranks behind those of rank 0: of the same memory of a session, and of the same
    /// pages. Caches are in the part of a page that is their rank's.
    fn add_ranks(&mut self) {
        let (own, plan) = (self.states.clone(), &self.plan);
        for rank in 1..plan.ranks {
            let of_rank = |state: &StateInfo| {
                let stride = match state.cache {
                    Some(_) => plan.page_bytes / plan.ranks,
                    None => plan.state_bytes,
                };
                let offset = state.offset.saturating_add(stride.saturating_mul(rank));
                StateInfo { name: format!("{}@{rank}", state.name), offset, ..state.clone() }
            };
            self.states.extend(own.iter().map(of_rank));
        }
    }

    /// Bytes that every token adds to the state; 0 for recurrent models.
    pub fn cache_bytes_per_token(&self) -> u64 {
        self.states.iter().filter_map(|s| s.cache).map(|c| c.row_bytes).sum()
    }

    /// A state that has no rows, so that the model cannot roll back in a sequence.
    pub fn recurrent_state(&self) -> Option<&StateInfo> {
        self.states.iter().find(|s| {
            s.cache.is_none() && s.dropped_beyond.is_none() && !s.is_length && !s.is_slot && !s.is_source
        })
    }

    /// The state for the length of the sequence after the present prompt, of a model that needs it.
    pub fn length_state(&self) -> Option<&StateInfo> {
        self.states.iter().find(|s| s.is_length)
    }

    /// The state that says how many first rows of the caches are of the source text, of an encoder-decoder
    /// model.
    pub fn source_state(&self) -> Option<&StateInfo> {
        self.states.iter().find(|s| s.is_source)
    }

    /// The state that says which slot the adapter of the sequence has, of a model with slots.
    pub fn slot_state(&self) -> Option<&StateInfo> {
        self.states.iter().find(|s| s.is_slot)
    }

    /// The rows that the model sees if it can go on without the others, and the state that counts those.
    pub fn sliding_window(&self) -> Option<(SlidingWindow, &StateInfo)> {
        self.states.iter().find_map(|s| Some((s.dropped_beyond?, s)))
    }

    pub fn find_param(&self, name: &str) -> Option<&ParamInfo> {
        self.params.iter().find(|p| p.name == name)
    }
}

/// # Safety
/// As [`ArtifactTable::read`]; also for the functions below.
unsafe fn read_variants(place: &TableReader<'_>, t: &ModelTable) -> TableResult<Vec<CpuVariant>> {
    // SAFETY: by contract.
    let list = unsafe { place.bounded_array(t.variants, t.n_variants, "variants") }?;
    // SAFETY: by contract.
    let one = |v: &abi::Variant| {
        // SAFETY: by contract.
        let name = unsafe { place.name(v.name) }?;
        let rows = unsafe { place.bounded_array(v.entries, v.n_entries, "entry points") }?;
        // SAFETY: by contract.
        let entries = unsafe { read_entries(place, &name, rows) }?;
        Ok(CpuVariant { name, features: v.features, entries })
    };
    list.iter().map(one).collect()
}

/// The entry points of a variant that this runtime knows. Those of all rows are functions of their names.
unsafe fn read_entries(
    place: &TableReader<'_>,
    variant: &str,
    rows: &[abi::VariantEntry],
) -> TableResult<CpuEntries> {
    let mut entries = CpuEntries::default();
    for row in rows {
        // SAFETY: by contract.
        let name = unsafe { place.name(row.name) }?;
        let Some(function) = row.function else {
            return malformed(format!("the entry point {name} of {variant} has no function"));
        };
        place.check_function(variant, &name, function)?;
        if let Some(adapted) = row.adapted {
            place.check_function(variant, &format!("{}{name}", abi::ADAPTED), adapted)?;
        }
        let Some(entry) = EntryPoint::from_name(&name) else { continue };
        let known = &mut entries.0[entry as usize];
        if row.kind != entry.kind() as u32 || row.reserved != 0 || known.is_some() {
            return malformed(format!("the entry point {name} of {variant} is not called as expected"));
        }
        *known = Some(CpuEntry { function, adapted: row.adapted });
    }
    Ok(entries)
}

unsafe fn read_params(place: &TableReader<'_>, t: &ModelTable) -> TableResult<Vec<ParamInfo>> {
    // SAFETY: by contract.
    let list = unsafe { place.array(t.params, t.n_params, "parameters") }?;
    let one = |p: &abi::Param| {
        if p.ndim > 4 {
            return malformed("a parameter has more than four dims");
        }
        // SAFETY: by contract.
        let (name, format, packing) =
            unsafe { (place.name(p.name)?, place.name(p.format)?, place.name(p.packing)?) };
        let dims = p.dims[..p.ndim as usize].to_vec();
        let of_slots = match p.of_slots {
            0 => false,
            1 => true,
            other => return malformed(format!("parameter {name} lies in the unknown memory {other}")),
        };
        Ok(ParamInfo {
            name,
            format,
            packing,
            dims,
            in_adapter_slots: of_slots,
            offset: p.offset,
            bytes: p.bytes,
        })
    };
    list.iter().map(one).collect()
}

unsafe fn read_states(place: &TableReader<'_>, t: &ModelTable) -> TableResult<Vec<StateInfo>> {
    // SAFETY: by contract.
    let list = unsafe { place.array(t.states, t.n_states, "states") }?;
    let one = |s: &abi::State| {
        let fill = match s.init {
            abi::init::ZERO => None,
            abi::init::FILL_F32 => Some(s.fill),
            other => return malformed(format!("a state has the unknown initial value kind {other}")),
        };
        let (cache, dropped_beyond) = match s.kind {
            abi::state_kind::RECURRENT => (None, None),
            abi::state_kind::CACHE => (Some(CacheShape { rows: s.rows, row_bytes: s.row_bytes }), None),
            abi::state_kind::DROPPED_ROWS => {
                (None, Some(SlidingWindow { newest: s.rows, sinks: u64::from(s.sinks) }))
            }
            abi::state_kind::SEQUENCE_LENGTH
            | abi::state_kind::ADAPTER_SLOT
            | abi::state_kind::SOURCE_LENGTH => (None, None),
            other => return malformed(format!("a state is of the unknown kind {other}")),
        };
        // SAFETY: by contract.
        let (name, format) = unsafe { (place.name(s.name)?, place.name(s.format)?) };
        let is_length = s.kind == abi::state_kind::SEQUENCE_LENGTH;
        let is_slot = s.kind == abi::state_kind::ADAPTER_SLOT;
        let is_source = s.kind == abi::state_kind::SOURCE_LENGTH;
        let (offset, bytes) = (s.offset, s.bytes);
        Ok(StateInfo {
            name,
            offset,
            bytes,
            fill,
            format,
            cache,
            dropped_beyond,
            is_length,
            is_slot,
            is_source,
        })
    };
    list.iter().map(one).collect()
}

unsafe fn read_images(place: &TableReader<'_>, t: &ModelTable) -> TableResult<Vec<GpuImage>> {
    // SAFETY: by contract.
    let list = unsafe { place.bounded_array(t.images, t.n_images, "device images") }?;
    let one = |i: &abi::DeviceImage| {
        // SAFETY: by contract.
        let mut code = unsafe { place.array(i.ptr, i.len, "device images") }?.to_vec();
        code.push(0);
        // SAFETY: by contract.
        Ok(GpuImage { kind: unsafe { place.name(i.kind) }?, sm: i.sm, scope: i.scope, bytes: code })
    };
    list.iter().map(one).collect()
}

unsafe fn read_device_entries(place: &TableReader<'_>, t: &ModelTable) -> TableResult<Vec<LaunchList>> {
    // SAFETY: by contract.
    let list = unsafe { place.bounded_array(t.device_entries, t.n_device_entries, "device entries") }?;
    let launch = |l: &abi::Launch| {
        // SAFETY: by contract.
        let (kernel, args) = unsafe {
            (place.name(l.kernel)?, place.bounded_array(l.args, l.n_args, "launch arguments")?.to_vec())
        };
        let (grid, block, shared_bytes) = (l.grid, l.block, l.shared_bytes);
        let exchange = matches!(l.repeat, abi::repeat::ALL_GATHER | abi::repeat::ALL_GATHER_OUTPUTS);
        Ok(KernelLaunch {
            kernel,
            grid,
            block,
            shared_bytes,
            args,
            repeat: LaunchRepeat::read(l)?,
            is_all_gather: exchange,
        })
    };
    let one = |e: &abi::DeviceEntry| {
        // SAFETY: by contract.
        let (name, launches) =
            unsafe { (place.name(e.name)?, place.array(e.launches, e.n_launches, "launches")?) };
        Ok(LaunchList { name, launches: launches.iter().map(launch).collect::<TableResult<_>>()? })
    };
    list.iter().map(one).collect()
}
