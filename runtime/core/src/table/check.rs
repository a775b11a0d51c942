//! The numbers of a table, held against each other and against the metadata.

use mlcc_abi::{self as abi, Control, DimExpr, EntryForm, EntryPoint, LaunchArg, PAGE_ROWS, arg};

use super::{
    ArtifactTable, CpuVariant, KernelLaunch, LaunchRepeat, MAX_LAUNCH_ARGS, ModelPlan, ParamInfo,
    SlidingWindow, StateInfo, TableResult, malformed,
};
use crate::adapters::belongs_to_slots;
use crate::json;
use crate::ranks::MOST_RANKS;

/// Most threads of a block on any GPU.
const MOST_BLOCK_THREADS: u64 = 1024;
/// Most adapters at a time.
const MOST_SLOTS: u64 = 1 << 16;
/// More dynamic shared memory than any GPU has.
const MOST_SHARED_BYTES: u32 = 1 << 20;

impl ArtifactTable {
    pub(super) fn check(&self) -> TableResult<()> {
        self.check_plan()?;
        self.check_metadata()?;
        let limit = |x: &ParamInfo| {
            if x.in_adapter_slots { self.plan.adapter_bytes } else { self.plan.weights_bytes }
        };
        if let Some(param) = self.params.iter().find(|x| !fits_within(x.offset, x.bytes, limit(x))) {
            return malformed(format!("parameter {} lies outside of the weights", param.name));
        }
        self.check_slots()?;
        self.check_encoder()?;
        self.check_states()?;
        for image in &self.images {
            if image.kind != "ptx" && image.kind != "cubin" {
                return malformed(format!("a device image is of the unknown kind `{}`", image.kind));
            }
        }
        for entry in &self.device_entries {
            entry.launches.iter().try_for_each(|launch| check_launch(launch, &entry.name, &self.plan))?;
        }
        Ok(())
    }

    fn check_plan(&self) -> TableResult<()> {
        let p = &self.plan;
        let most = i32::MAX as u64;
        let alignment_fits = p.alignment.is_power_of_two() && p.alignment <= abi::SECTION_ALIGN;
        let counted = [p.chunk, p.vocab].iter().all(|n| (1..=most).contains(n));
        // Logits of a chunk and of a batch are addressed in bytes, and so are vectors of texts.
        let logits = p
            .vocab
            .max(p.text_width)
            .checked_mul(p.chunk.max(p.batch))
            .and_then(|floats| floats.checked_mul(4));
        let addressed = logits.is_some_and(|bytes| bytes <= i64::MAX as u64);
        let pages_fit = p.page_bytes.is_multiple_of(mlcc_abi::BUFFER_ALIGN as u64) && p.page_bytes < 1 << 40;
        if !pages_fit
            || !alignment_fits
            || !counted
            || !addressed
            || p.ranks > MOST_RANKS as u64
            || !p.page_bytes.is_multiple_of(p.ranks * mlcc_abi::BUFFER_ALIGN as u64)
            || (p.ranks > 1 && !p.state_bytes.is_multiple_of(p.alignment))
            || (p.text_width > 0 && p.batch == 0)
            || p.batch > most
            || p.context > i64::MAX as u64 / 2
        {
            return malformed("the table's memory plan is not usable");
        }
        Ok(())
    }

    /// The metadata have the plan too, in another form: one of the two is wrong where they differ. Buffers
    /// are allocated by the plan, and the code fills them whatever it says.
    fn check_metadata(&self) -> TableResult<()> {
        let p = &self.plan;
        // The context of the metadata is the one that was asked for.
        let numbers = p.named_fields().into_iter().filter(|(name, _)| *name != "context");
        for (name, here) in numbers {
            match json::find_value(&self.metadata, &["memory", name]) {
                Some(there) if there.parse() != Ok(here) => {
                    return malformed(format!("the table says {name} {here}, the metadata {there}"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Slots for adapters: code, matrices and the state that chooses one are there together.
    fn check_slots(&self) -> TableResult<()> {
        let slots = self.plan.adapter_slots;
        let entries = |v: &CpuVariant| {
            let adapted = |entry: EntryPoint| {
                let expected = slots > 0 && entry.has_adapted() && v.entries.function(entry, false).is_some();
                v.entries.has_adapted(entry) == expected
            };
            EntryPoint::all().all(adapted)
        };
        let choice = self.states.iter().filter(|s| s.is_slot);
        let matrices = self.params.iter().filter(|p| p.in_adapter_slots);
        let right = if slots == 0 {
            choice.count() == 0 && matrices.count() == 0 && self.plan.adapter_bytes == 0
        } else {
            slots <= MOST_SLOTS
                && choice.clone().count() == 1
                && choice.clone().all(|s| s.bytes == 4 && s.fill.is_none() && s.cache.is_none())
                && matrices.clone().all(|p| belongs_to_slots(p, slots))
        };
        match right && self.variants.iter().all(entries) {
            true => Ok(()),
            false => malformed("its slots for adapters are not usable"),
        }
    }

    /// An encoder: its code, the token behind the source text and the state with the length of that are there
    /// together.
    fn check_encoder(&self) -> TableResult<()> {
        let start = self.plan.decoder_start;
        let lengths = self.states.iter().filter(|s| s.is_source);
        let right = if start == 0 {
            lengths.count() == 0
        } else {
            start <= self.plan.vocab
                && self.plan.context > 0
                && lengths.clone().count() == 1
                && lengths.clone().all(|s| s.bytes == 4 && s.fill.is_none() && s.cache.is_none())
        };
        match right
            && self
                .variants
                .iter()
                .all(|v| v.entries.function(EntryPoint::Encode, false).is_some() == (start > 0))
        {
            true => Ok(()),
            false => malformed("its encoder is not usable"),
        }
    }

    fn check_states(&self) -> TableResult<()> {
        if self.plan.text_width > 0
            && (!self.states.is_empty() || self.plan.state_bytes > 0 || self.plan.page_bytes > 0)
        {
            return malformed("it is an embedding model, which keeps no state, but has states");
        }
        if self.plan.page_bytes == 0 && self.states.iter().any(|s| s.cache.is_some()) {
            return malformed("its caches are in no pages");
        }
        self.states.iter().try_for_each(|state| check_state(state, &self.plan))?;
        for in_pages in [false, true] {
            let there = |s: &&StateInfo| s.cache.is_some() == in_pages;
            let mut places: Vec<&StateInfo> = self.states.iter().filter(there).collect();
            places.sort_by_key(|s| s.offset);
            let end = |s: &StateInfo| s.offset + if in_pages { cache_page_bytes(s) } else { s.bytes };
            if let Some(pair) = places.windows(2).find(|pair| end(pair[0]) > pair[1].offset) {
                return malformed(format!("states {} and {} overlap", pair[0].name, pair[1].name));
            }
        }
        Ok(())
    }
}

fn fits_within(offset: u64, bytes: u64, of: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= of)
}

/// Bytes of a cache in every page; too many, if they have no number.
fn cache_page_bytes(state: &StateInfo) -> u64 {
    state.cache.and_then(|c| c.row_bytes.checked_mul(PAGE_ROWS)).unwrap_or(u64::MAX)
}

fn check_state(state: &StateInfo, p: &ModelPlan) -> TableResult<()> {
    let whole = state.fill.is_none() || (state.offset.is_multiple_of(4) && state.bytes.is_multiple_of(4));
    let (bytes, block, name) = match state.cache {
        None => (state.bytes, p.state_bytes, "the state block"),
        Some(_) => (cache_page_bytes(state), p.page_bytes, "the pages"),
    };
    if !fits_within(state.offset, bytes, block) || !whole {
        return malformed(format!("state {} lies outside of {name}", state.name));
    }
    let few = |w: SlidingWindow| w.newest > 0 && w.sinks.saturating_add(w.newest) < p.context;
    if let Some(window) = state.dropped_beyond
        && (state.bytes != 4 || state.fill.is_some() || !few(window))
    {
        return malformed(format!("state {} is not a number of dropped rows", state.name));
    }
    if state.is_length && (state.bytes != 4 || state.fill.is_some()) {
        return malformed(format!("state {} is not the length of a sequence", state.name));
    }
    let Some(cache) = state.cache else { return Ok(()) };
    let fits = cache.rows.checked_mul(cache.row_bytes) == Some(state.bytes) && cache.rows >= p.context;
    if !fits || p.context == 0 || state.fill.is_some() {
        return malformed(format!("the rows of cache {} do not fit the context", state.name));
    }
    Ok(())
}

fn check_launch(launch: &KernelLaunch, entry: &str, plan: &ModelPlan) -> TableResult<()> {
    let known = EntryPoint::of_function(entry).map(|(entry, _)| entry.kind());
    let of_batch = known.is_some_and(EntryForm::takes_sequences);
    let fits = launch.repeat == LaunchRepeat::Once || of_batch;
    let batched = |a: &LaunchArg| matches!(a.kind, arg::OUTPUT_ROWS | arg::SEQUENCES);
    if !fits || (!of_batch && launch.args.iter().any(batched)) {
        return malformed(format!("`{entry}` is of one sequence, kernel {} of several", launch.kernel));
    }
    if launch.is_all_gather {
        return check_all_gather(launch, entry, plan);
    }
    let threads = launch.block.iter().try_fold(1u64, |all, &n| all.checked_mul(u64::from(n)));
    if launch.grid.iter().any(|g| g.div < 1)
        || !threads.is_some_and(|n| (1..=MOST_BLOCK_THREADS).contains(&n))
        || launch.shared_bytes > MOST_SHARED_BYTES
        || launch.args.len() > MAX_LAUNCH_ARGS
    {
        return malformed(format!("kernel {} has an unusable launch shape", launch.kernel));
    }
    if let Some(argument) = launch.args.iter().find(|a| a.kind > arg::ADAPTERS) {
        let kind = argument.kind;
        return malformed(format!("kernel {} has an argument of unknown kind {kind}", launch.kernel));
    }
    match launch.args.iter().position(|a| !is_valid_argument(a, plan)) {
        Some(index) => malformed(format!("argument {index} of kernel {} is out of bounds", launch.kernel)),
        None => Ok(()),
    }
}

/// Both places of an exchange have the rows of the largest call.
fn check_all_gather(launch: &KernelLaunch, entry: &str, plan: &ModelPlan) -> TableResult<()> {
    let [x, y, z] = &launch.grid;
    let one = |g: &DimExpr| (g.coef_n, g.coef_past, g.constant, g.div) == (0, 0, 1, 1);
    let most = plan.chunk.max(plan.batch) as i64;
    let rows = x.coef_n.checked_mul(most).and_then(|rows| rows.checked_add(x.constant));
    let rows = rows
        .and_then(|rows| u64::try_from(rows).ok())
        .filter(|_| x.div == 1 && x.coef_past == 0 && x.coef_n >= 0 && x.constant >= 0 && one(y) && one(z));
    let fits = |a: &LaunchArg, ranks: u64| {
        let room = match a.kind {
            arg::ARENA => plan.arena_bytes,
            arg::LOGITS => plan.vocab.saturating_mul(4).saturating_mul(most as u64),
            _ => return false,
        };
        let bytes = rows.and_then(|rows| rows.checked_mul(ranks)?.checked_mul(launch.shared_bytes.into()));
        a.reserved == 0 && bytes.is_some_and(|bytes| fits_within(a.offset, bytes, room))
    };
    match &launch.args[..] {
        [part, all] if plan.ranks > 1 && fits(part, 1) && fits(all, plan.ranks) => Ok(()),
        _ => malformed(format!("an exchange of `{entry}` is out of bounds")),
    }
}

/// True if an argument is of a known kind, and its address within its base.
fn is_valid_argument(a: &LaunchArg, plan: &ModelPlan) -> bool {
    let rows = plan.chunk.max(plan.batch);
    let bytes = match a.kind {
        arg::WEIGHTS => plan.weights_bytes,
        arg::ADAPTERS if plan.adapter_bytes == 0 => return false,
        arg::ADAPTERS => plan.adapter_bytes,
        arg::ARENA => plan.arena_bytes,
        arg::STATE => plan.state_bytes,
        arg::TOKENS | arg::OUTPUT_ROWS => rows.saturating_mul(4),
        arg::SEQUENCES => plan.batch.saturating_mul(size_of::<mlcc_abi::Sequence>() as u64),
        arg::LOGITS => plan.vocab.saturating_mul(rows).saturating_mul(4),
        arg::PROBS => plan.vocab.max(2 * abi::TOP_K as u64).saturating_mul(rows).saturating_mul(4),
        arg::CONTROL => size_of::<Control>() as u64,
        arg::PAGES | arg::PAGE_TABLE if plan.page_bytes == 0 => return false,
        // On a GPU a page has the rows of one rank.
        arg::PAGES => plan.page_bytes / plan.ranks.max(1),
        arg::PAGE_TABLE => plan.pages().saturating_mul(4),
        _ => return false,
    };
    a.reserved == 0 && a.offset < bytes.max(1)
}
