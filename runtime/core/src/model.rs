//! A loaded model: artifact, code, worker pool. Sessions share it.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use mlcc_abi::{EntryPoint, section};

use crate::adapters::AdapterSlotTable;
use crate::cpu::CpuDevice;
use crate::device::Device;
use crate::features::{self, HOST_TARGET, LEVEL_VARIABLE, VariantMismatch};
use crate::huge_pages::{HugePageMigrator, HugePages};
use crate::library::{self, LoaderKind, MappedCode};
use crate::numa::{NumaPlacer, NumaPolicy, WeightPlacement};
use crate::pool::WorkerPool;
use crate::processes::{HandshakeMessage, ProcessGroup, RankAgreement};
use crate::ranks::weights_section;
use crate::table::{ArtifactTable, ModelPlan};
use crate::{Artifact, Error, Result, Session, WorkerThreads, physical_cores};

/// Options of loading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Workers; default: physical cores that this process may use.
    pub threads: Option<usize>,
    /// Each worker stays on a core of its own, the thread that calls a step while the step lasts. By default
    /// the system chooses.
    pub pin: bool,
    /// The NUMA nodes of the weights, once they are in huge pages.
    pub numa: NumaPolicy,
    /// Workers that exist already, for example those of another model ([`Model::workers`]); `threads` and
    /// `pin` are theirs then.
    pub workers: Option<WorkerThreads>,
    /// Name of a CPU level or variant; default: the variable `MLCC_CPU_LEVEL`, else the best one.
    pub cpu_level: Option<String>,
    /// Verify the hash of the weights too, which reads all of them.
    pub verify_hashes: bool,
    /// The time at which weights move into huge pages; on a CPU.
    pub huge_pages: HugePages,
    /// Number of the GPU, for artifacts that need one; default 0.
    pub device: Option<u32>,
    /// Most pages of 64 tokens that all sequences together may have; at least those of one full context.
    /// Default: as many as 64 full contexts have, or those of four full batches, if the system has the
    /// addresses; on a GPU no more than nine tenths of its free memory hold. They take memory once they are
    /// used.
    pub cache_pages: Option<u64>,
    /// The loader that maps the code; default: the variable `MLCC_LOADER`, else [`LoaderKind::Own`].
    pub loader: Option<LoaderKind>,
    /// Processes that were started together: each is one rank of the model, and `threads` are those of one.
    /// By default all ranks are groups of threads of this process.
    pub processes: Option<ProcessGroup>,
}

/// Pages of the caches of all sessions of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachePages {
    pub all: usize,
    pub free: usize,
    /// Free ones that have memory already.
    pub ready: usize,
}

/// A loaded model. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Model(Arc<ModelInner>);

struct ModelInner {
    device: Arc<dyn Device>,
    table: ArtifactTable,
    /// After the device and the table, whose entry points must not outlive it.
    _code: MappedCode,
    artifact: Artifact,
    /// The weights, if the artifact has none and the CPU reads them.
    generated_weights: Option<Mmap>,
    /// Slots for adapters.
    adapter_slots: Option<Arc<AdapterSlotTable>>,
    /// Ranks that take memory of this machine.
    ranks_here: u64,
    /// Weights that are not yet in huge pages.
    migrator: Option<HugePageMigrator>,
    /// The places of these, if they matter.
    numa_placer: Option<NumaPlacer>,
}

impl Model {
    /// Loads the artifact `path`. Everything is checked before its code runs.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let artifact = Artifact::open(path)?;
        if artifact.machine_name() != HOST_TARGET {
            let (path, found) = (artifact.path().to_path_buf(), artifact.machine_name());
            return Err(Error::WrongMachine { path, found, expected: HOST_TARGET });
        }
        let (code, table) = library::load_code(&artifact, options.loader)?;
        let agreed = match &options.processes {
            Some(processes) => Some(agree_with_ranks(&artifact, &table, processes)?),
            None => None,
        };
        let ranks = ranks_here(&table, options);
        check_weights(&artifact, &table, ranks.clone())?;
        if options.verify_hashes {
            artifact.verify(u64::MAX)?;
        } else {
            artifact.advise_weights(&ranks);
        }
        // Before the worker pool, whose threads spin.
        let threads = options.threads.unwrap_or_else(physical_cores).clamp(1, 1024);
        let made = artifact.weight_generator().map(|recipe| recipe.generate(threads)).transpose()?;
        let weights = made.as_deref().or(artifact.section(section::WEIGHTS)).unwrap_or(&[]);
        let device: Arc<dyn Device> = match table.target.as_str() {
            "cuda" => cuda_device(&artifact, &table, weights, agreed.as_ref(), options)?,
            target if target == HOST_TARGET => {
                Arc::new(cpu_device(&artifact, &table, agreed.as_ref(), options)?)
            }
            other => {
                let (path, found) = (artifact.path().to_path_buf(), other.to_string());
                return Err(Error::WrongMachine { path, found, expected: HOST_TARGET });
            }
        };
        let ((mover, homes), made) = match device.cpu() {
            Some(cpu) => (move_weights(&artifact, &table, cpu.pool(), options)?, made),
            // A GPU has its own copy.
            None => ((None, None), None),
        };
        device.ready()?;
        let slots = AdapterSlotTable::from_table(&table)?;
        let ranks_here = agreed.map_or(table.plan.ranks, |agreed| agreed.processes_on_machine as u64);
        let inner = ModelInner {
            device,
            table,
            _code: code,
            artifact,
            generated_weights: made,
            adapter_slots: slots,
            ranks_here,
            migrator: mover,
            numa_placer: homes,
        };
        Ok(Self(Arc::new(inner)))
    }

    /// Takes part in all steps of the first process, until that one no longer uses the model: for a process
    /// that was started together with others and is not the first. Nothing else may be done with the model.
    pub fn follow_leader(&self) -> Result<()> {
        Arc::clone(&self.0.device).follow_leader(self)
    }

    /// A session with a fresh state.
    pub fn session(&self) -> Result<Session> {
        Session::new(self)
    }

    pub fn artifact(&self) -> &Artifact {
        &self.0.artifact
    }

    pub fn table(&self) -> &ArtifactTable {
        &self.0.table
    }

    pub fn plan(&self) -> &ModelPlan {
        &self.0.table.plan
    }

    /// The number of its ranks on this machine: all of them, unless other machines have some
    /// ([`LoadOptions::processes`]).
    pub fn ranks_here(&self) -> u64 {
        self.0.ranks_here
    }

    pub fn vocab(&self) -> usize {
        self.plan().vocab as usize
    }

    /// The metadata JSON.
    pub fn metadata(&self) -> &str {
        &self.0.table.metadata
    }

    /// A payload section, for example [`section::TOKENIZER`].
    pub fn section(&self, name: &str) -> Option<&[u8]> {
        self.0.artifact.section(name)
    }

    /// Name of the chosen CPU variant, or of the device.
    pub fn executor(&self) -> &str {
        self.0.device.name()
    }

    /// Bytes per second that the GPU reads and writes while it copies its memory, measured now; `None` on
    /// CPUs.
    pub fn copy_bandwidth(&self) -> Result<Option<f64>> {
        self.0.device.copy_bandwidth()
    }

    /// Pages of 64 rows that the caches of all sessions together may have, and those that are free; none
    /// where caches are dense or the model has none.
    pub fn cache_pages(&self) -> CachePages {
        self.0.device.cache_pages()
    }

    /// Most workers of a step; 1 on a device.
    pub fn threads(&self) -> usize {
        self.0.device.threads()
    }

    /// The workers of its steps, for [`LoadOptions::workers`] of another model; `None` on a device.
    pub fn workers(&self) -> Option<WorkerThreads> {
        self.0.device.cpu().map(|cpu| cpu.workers().clone())
    }

    /// The present places of the weights; `None` if they are not placed ([`LoadOptions::numa`], workers on
    /// several nodes, weights in a file that may move into huge pages).
    pub fn placement(&self) -> Option<WeightPlacement> {
        let (mover, homes) = (self.migrator()?, self.numa_placer()?);
        let nodes: Vec<(usize, u64)> = homes.nodes().iter().copied().zip(mover.moved_bytes()).collect();
        let moved: u64 = nodes.iter().map(|(_, bytes)| bytes).sum();
        let all: usize = (0..self.plan().ranks as usize).map(|rank| self.rank_weights(rank).len()).sum();
        Some(WeightPlacement { nodes, in_file: all as u64 - moved, near_share: homes.near_share() })
    }

    /// Sets the number of workers from the next step on (at least 1, at most [`Model::threads`]), in all
    /// sessions; with `None`, as after loading, as many as are fastest with the other programs of this
    /// machine. Results do not depend on it.
    pub fn fix_workers(&self, workers: Option<usize>) {
        self.0.device.fix_workers(workers);
    }

    /// No other loaded model has it.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// True if both are one loaded model.
    pub(crate) fn is_same(&self, other: &Model) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.0.device
    }

    pub(crate) fn slots(&self) -> Option<&Arc<AdapterSlotTable>> {
        self.0.adapter_slots.as_ref()
    }

    pub(crate) fn migrator(&self) -> Option<&HugePageMigrator> {
        self.0.migrator.as_ref()
    }

    pub(crate) fn numa_placer(&self) -> Option<&NumaPlacer> {
        self.0.numa_placer.as_ref()
    }

    /// The weights of a rank.
    pub(crate) fn rank_weights(&self, rank: usize) -> &[u8] {
        if rank == 0 { self.weights() } else { self.artifact().rank_weights(rank).unwrap_or(&[]) }
    }

    pub(crate) fn weights(&self) -> &[u8] {
        self.0.generated_weights.as_deref().or(self.section(section::WEIGHTS)).unwrap_or(&[])
    }

    /// Differs between models whose states are not the same numbers after the same tokens: other weights,
    /// code (of another level too), ABI, or pages. Narrower than what [`Session::load_state`] asks for.
    pub fn prefix_identity(&self) -> u128 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(&self.state_identity().to_le_bytes());
        hash.update(&self.artifact().code_hash().to_le_bytes());
        hash.update(self.executor().as_bytes());
        let plan = self.plan();
        for v in [mlcc_abi::ABI_VERSION.into(), mlcc_abi::PAGE_ROWS, plan.page_bytes, plan.vocab] {
            hash.update(&u64::to_le_bytes(v));
        }
        hash.digest128()
    }

    /// The identity that a saved state must agree with: the weights, and the states but not the number of
    /// rows that they are planned for.
    pub(crate) fn state_identity(&self) -> u128 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for rank in 0..self.plan().ranks as usize {
            hash.update(&self.artifact().hash(&weights_section(rank)).unwrap_or(0).to_le_bytes());
        }
        for state in &self.table().states {
            let (kind, bytes, sinks) = match (state.cache, state.dropped_beyond) {
                (Some(cache), _) => (1, cache.row_bytes, 0),
                (None, Some(window)) => (2, window.newest, window.sinks),
                (None, None) if state.is_length => (3, state.bytes, 0),
                (None, None) if state.is_slot => (4, state.bytes, 0),
                (None, None) if state.is_source => (5, state.bytes, 0),
                (None, None) => (0, state.bytes, 0),
            };
            // Without sinks as artifacts were that knew of none.
            let sinks = Some(sinks).filter(|&s| s > 0);
            let sizes = [state.name.len() as u64, state.format.len() as u64, kind, bytes];
            for v in sizes.into_iter().chain(sinks) {
                hash.update(&v.to_le_bytes());
            }
            hash.update(state.name.as_bytes());
            hash.update(state.format.as_bytes());
        }
        hash.digest128()
    }
}

/// The migrator of the weights, if they are to be moved, and its targets; with [`HugePages::On`] they have
/// been.
fn move_weights(
    artifact: &Artifact,
    table: &ArtifactTable,
    pool: &WorkerPool,
    options: &LoadOptions,
) -> Result<(Option<HugePageMigrator>, Option<NumaPlacer>)> {
    let here = ranks_here(table, options);
    let ranks = here.len();
    let Some((file, weights)) = artifact.weights_locations(here) else { return Ok((None, None)) };
    let Some(mut mover) = HugePageMigrator::new(file, &weights, options.huge_pages) else {
        return Ok((None, None));
    };
    let mut homes = NumaPlacer::new(options.numa, pool.affinities(), ranks, &table.params);
    if let Some(homes) = &mut homes {
        mover.assign_nodes(homes.nodes().len(), |rank, bytes| homes.choose_node(rank, bytes));
    }
    if options.huge_pages == HugePages::On {
        let node = |worker| homes.as_ref().map_or(0, |homes| homes.worker_node(worker));
        pool.run(&|worker| while mover.move_next_piece(node(worker)) {})?;
    }
    Ok((Some(mover), homes))
}

/// Ranks whose weights this process reads.
fn ranks_here(table: &ArtifactTable, options: &LoadOptions) -> Range<usize> {
    match &options.processes {
        Some(processes) => processes.rank()..processes.rank() + 1,
        None => 0..table.plan.ranks as usize,
    }
}

/// Tells the other processes what this one has loaded.
fn agree_with_ranks(
    artifact: &Artifact,
    table: &ArtifactTable,
    processes: &ProcessGroup,
) -> Result<RankAgreement> {
    let path = || artifact.path().to_path_buf();
    let (ranks, started) = (table.plan.ranks as usize, processes.ranks());
    if ranks != started {
        return Err(Error::RankCount { path: path(), ranks, processes: started });
    }
    if !processes.claim() {
        return Err(Error::RanksTaken { path: path() });
    }
    HandshakeMessage::new(artifact, &table.plan).exchange_handshakes(processes, artifact.path())
}

fn check_weights(artifact: &Artifact, table: &ArtifactTable, mut ranks: Range<usize>) -> Result<()> {
    ranks.try_for_each(|rank| check_rank_weights(artifact, table, rank))
}

fn check_rank_weights(artifact: &Artifact, table: &ArtifactTable, rank: usize) -> Result<()> {
    let weights = artifact.rank_weights(rank).unwrap_or(&[]);
    let found = artifact.weight_generator().map_or(weights.len() as u64, |recipe| recipe.bytes);
    let corrupt = |what| Error::Corrupt { path: artifact.path().to_path_buf(), what };
    if found < table.plan.weights_bytes {
        return Err(corrupt(format!(
            "its weights{} have {found} bytes, its table says {}",
            if rank > 0 { format!(" of rank {rank}") } else { String::new() },
            table.plan.weights_bytes
        )));
    }
    // Aligned loads of the kernels would fault.
    let aligned = artifact.weight_generator().is_some()
        || weights.as_ptr().addr().is_multiple_of(mlcc_abi::BUFFER_ALIGN);
    if !aligned && table.plan.weights_bytes > 0 {
        return Err(corrupt(format!(
            "its weights do not start at a multiple of {} bytes",
            mlcc_abi::BUFFER_ALIGN
        )));
    }
    Ok(())
}

fn cpu_device(
    artifact: &Artifact,
    table: &ArtifactTable,
    agreed: Option<&RankAgreement>,
    options: &LoadOptions,
) -> Result<CpuDevice> {
    let from_env = std::env::var(LEVEL_VARIABLE).ok().filter(|l| !l.is_empty());
    let (level, origin) = match &options.cpu_level {
        Some(level) => (Some(level.clone()), "load option cpu_level"),
        None => (from_env, LEVEL_VARIABLE),
    };
    let list: Vec<(&str, u64)> = table.variants.iter().map(|v| (v.name.as_str(), v.features)).collect();
    // All ranks take the same code.
    let host = agreed.map_or_else(features::host, |agreed| agreed.features);
    let variant = features::choose_variant(&list, host, level.as_deref()).map_err(|misfit| {
        let path = artifact.path().to_path_buf();
        let variants = list.iter().map(|(name, _)| name.to_string()).collect();
        let level = level.unwrap_or_default();
        match misfit {
            VariantMismatch::Features(needs) => Error::Features {
                path,
                needs,
                has: features::names(host),
                suggest: if HOST_TARGET == "aarch64" { "armv8.0" } else { "x86-64-v2" },
            },
            VariantMismatch::UnknownLevel => {
                let known: Vec<&str> = mlcc_abi::feature::LEVELS.iter().map(|(name, _)| *name).collect();
                Error::UnknownLevel { path, level, origin, variants, known: known.join(", ") }
            }
            VariantMismatch::NothingBelow => Error::NoVariantForLevel { path, level, origin, variants },
        }
    })?;
    let entries = &table.variants[variant].entries;
    let needed = if table.plan.text_width == 0 { EntryPoint::Decode } else { EntryPoint::Step };
    if entries.function(needed, false).is_none() {
        return Err(Error::MissingEntry { path: artifact.path().to_path_buf(), entry: needed.name() });
    }
    let most = if table.plan.max_workers == 0 { usize::MAX } else { table.plan.max_workers as usize };
    let ranks = ranks_here(table, options).len();
    // Processes that may use the same cores share them.
    let threads = agreed.map(|agreed| (physical_cores() / agreed.processes_on_cpus).max(1));
    let options = &LoadOptions { threads: options.threads.or(threads), ..options.clone() };
    let workers =
        options.workers.clone().map_or_else(|| WorkerThreads::with_max(most, ranks, options), Ok)?;
    if workers.threads() < ranks {
        let (path, workers) = (artifact.path().to_path_buf(), workers.threads());
        return Err(Error::RankWorkers { path, ranks, workers });
    }
    CpuDevice::new(table, &table.variants[variant], workers, most, options)
}

#[cfg(feature = "cuda")]
fn cuda_device(
    artifact: &Artifact,
    table: &ArtifactTable,
    weights: &[u8],
    agreed: Option<&RankAgreement>,
    options: &LoadOptions,
) -> Result<Arc<dyn Device>> {
    let ranks = table.plan.ranks as usize;
    let together = options.processes.clone().zip(agreed).filter(|_| ranks > 1);
    let together =
        together.map(|(processes, agreed)| crate::cuda::LocalRank { processes, local: agreed.local_rank });
    let weights = match &together {
        None if ranks > 1 => return Err(Error::GpuAlone { path: artifact.path().to_path_buf(), ranks }),
        None => weights,
        Some(together) => artifact.rank_weights(together.processes.rank()).unwrap_or(&[]),
    };
    let device = crate::cuda::CudaDevice::open(artifact.path(), table, weights, together.as_ref(), options)?;
    Ok(Arc::new(device))
}

#[cfg(not(feature = "cuda"))]
fn cuda_device(
    artifact: &Artifact,
    _: &ArtifactTable,
    _: &[u8],
    _: Option<&RankAgreement>,
    _: &LoadOptions,
) -> Result<Arc<dyn Device>> {
    let what = "this program was built without the feature `cuda` of mlcc-runtime".into();
    Err(Error::NoDevice { path: artifact.path().to_path_buf(), what })
}
