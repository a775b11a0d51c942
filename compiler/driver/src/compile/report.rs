//! The report of a build, for people and as JSON.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlcc_codegen::ObjectCounts;
use mlcc_codegen::artifact::ArtifactSummary;
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::{ModelParam, ParamId, ParamRole, ParamSource};
use mlcc_ir::ops::Op;
use mlcc_kernels::lower::cost::{self, ComputeType};
use mlcc_passes::LoweredProgram;
use mlcc_passes::plan_memory::MemoryPlan;
use mlcc_target::CompileTarget;
use serde::Serialize;

use super::keep::{self, KeptWeights};
use super::table::{CacheRow, cache_row, constant_dims};
use super::{BuildEvent, BuildHooks, BuildOptions, BuildSource, QualityReport, payload};

#[derive(Clone, Debug, Default, Serialize)]
pub struct BuildReport {
    /// `None`: stopped before, as asked.
    pub artifact: Option<PathBuf>,
    pub weights_file: Option<PathBuf>,
    /// The seed from which the weights are made when the artifact is loaded; it has none.
    pub weights_on_load: Option<u64>,
    /// Files of `--emit`.
    pub emitted: Vec<PathBuf>,
    pub model: String,
    pub quant: String,
    pub target: String,
    pub levels: Vec<LevelRow>,
    /// The changes by `--tuning`, and where they were measured.
    pub tuning: Option<String>,
    pub parameters: u64,
    pub formats: Vec<FormatRow>,
    /// Conversions of the tensors of a checkpoint that is quantized; empty if no weights were written.
    pub conversions: Vec<super::keep::ConversionRow>,
    /// Sizes of the weights in the types that they came in; `None` if others were requested.
    pub kept: Option<KeptWeights>,
    pub memory: Option<MemoryRow>,
    pub passes: Vec<PassRow>,
    /// Pass and line of `--explain-passes`.
    pub notes: Vec<(String, String)>,
    /// Parts that are not in the artifact, and the reasons.
    pub warnings: Vec<String>,
    pub phases: Vec<PhaseRow>,
    pub file_bytes: u64,
    pub code_bytes: u64,
    /// Objects that code generation linked; `None` if it did not come so far.
    #[serde(serialize_with = "objects")]
    pub objects: Option<ObjectCounts>,
    /// Most tokens of a prompt, for models that read a prompt in one call.
    pub whole_prompts: Option<u32>,
    /// The tokenizer of the artifact, if it has one.
    pub tokenizer: Option<String>,
    /// The quality of the artifact on a text.
    pub quality: Option<QualityReport>,
    /// The reason why it was not measured, although a text is there.
    pub quality_skipped: Option<String>,
}

fn objects<S: serde::Serializer>(made: &Option<ObjectCounts>, to: S) -> Result<S::Ok, S::Error> {
    made.map(|made| BTreeMap::from([("linked", made.objects), ("from_cache", made.from_cache)])).serialize(to)
}

#[derive(Clone, Debug, Serialize)]
pub struct LevelRow {
    pub name: String,
    pub kernels: usize,
}

/// Parameters stored alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FormatRow {
    pub format: String,
    pub tensors: usize,
    pub parameters: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct MemoryRow {
    /// The bytes are those of all of them together.
    pub ranks: u64,
    pub weights_bytes: u64,
    pub state_bytes: u64,
    /// The part of the state that grows with the sequence; `None` for recurrent models.
    pub cache: Option<CacheRow>,
    pub arena_bytes: u64,
    pub entries: Vec<EntryRow>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EntryRow {
    pub name: String,
    pub arena_bytes: u64,
    pub launches: usize,
    pub barriers: usize,
    /// All-gathers with other ranks.
    pub exchanges: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct PassRow {
    pub name: String,
    pub changes: usize,
    pub seconds: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct PhaseRow {
    pub name: &'static str,
    pub seconds: f64,
}

impl PassRow {
    pub fn new(name: &str, changes: usize, time: Duration) -> Self {
        PassRow { name: name.into(), changes, seconds: time.as_secs_f64() }
    }
}

/// A phase that runs.
pub(super) struct PhaseClock {
    name: &'static str,
    start: Instant,
}

impl BuildReport {
    pub(super) fn start_phase(&mut self, name: &'static str, hooks: &mut BuildHooks<'_>) -> PhaseClock {
        (hooks.event)(BuildEvent::Phase(name));
        PhaseClock { name, start: Instant::now() }
    }

    pub(super) fn end_phase(&mut self, clock: PhaseClock) {
        let seconds = clock.start.elapsed().as_secs_f64();
        self.phases.push(PhaseRow { name: clock.name, seconds });
    }

    pub(super) fn record_model(
        &mut self,
        source: &BuildSource,
        target: &CompileTarget,
        options: &BuildOptions,
        program: &LoweredProgram,
    ) {
        self.model = source.model.name.clone();
        self.quant = keep::format_label(options.keep_quant, options.quant.name);
        self.target = target.name.clone();
        self.tuning = options.tuning.as_ref().map(|file| format!("{}: {}", file.path.display(), file.tuning));
        self.whole_prompts = source.model.config.architecture.needs_whole_prompts().then_some(source.chunk);
        let level =
            |l: &mlcc_passes::LevelCode| LevelRow { name: l.name.clone(), kernels: l.lowered.kernels.len() };
        self.levels = program.levels.iter().map(level).collect();
        self.parameters = parameter_count(program);
        self.formats = formats(program, program.memory.as_ref());
        self.kept = if options.keep_quant { keep::kept_weights(source, program) } else { None };
        self.memory = program.memory.as_ref().map(|m| memory_row(program, m));
        self.tokenizer = source
            .tokenizer
            .as_ref()
            .map(|t| format!("{}, {} tokens", t.file.kind.tag(), t.tokenizer.vocab_size()));
    }

    pub(super) fn record_artifact(
        &mut self,
        output: &Path,
        options: &BuildOptions,
        summary: ArtifactSummary,
    ) {
        self.artifact = Some(output.to_path_buf());
        self.weights_file = options.split_weights.then(|| payload::split_path(output));
        self.weights_on_load = options.request.random_weights.filter(|_| options.weights_on_load);
        self.file_bytes = summary.file_bytes;
        self.code_bytes = summary.code_bytes;
    }
}

fn memory_row(program: &LoweredProgram, memory: &MemoryPlan) -> MemoryRow {
    use mlcc_ir::step::StepItem;
    let steps = program.levels.first().map_or(&[][..], |l| &l.steps);
    let entries = memory.arena_sizes().map(|(name, arena_bytes)| {
        let items = steps.iter().find(|s| s.name == name).map_or(&[][..], |s| &s.items);
        let count = |is: fn(&StepItem) -> bool| items.iter().filter(|item| is(item)).count();
        EntryRow {
            name: name.to_string(),
            arena_bytes,
            launches: count(|item| matches!(item, StepItem::Launch(_))),
            barriers: count(|item| matches!(item, StepItem::Barrier)),
            exchanges: count(|item| matches!(item, StepItem::AllGather(_))),
        }
    });
    let ranks = program.module.rank_count() as u64;
    MemoryRow {
        ranks,
        weights_bytes: ranks * memory.weights_bytes,
        state_bytes: memory.on_all_ranks(program).1,
        cache: cache_row(program, memory),
        arena_bytes: ranks * memory.arena_bytes(),
        entries: entries.collect(),
    }
}

pub(super) fn element_count(param: &ModelParam) -> u64 {
    constant_dims(&param.ty).iter().product()
}

/// Number of weights. Weights that several ranks have count once.
pub fn parameter_count(program: &LoweredProgram) -> u64 {
    let weights = program.module.params.values().filter(|param| !param.is_adapter());
    weights.map(|param| distinct_parts(param) * element_count(param)).sum()
}

/// The number of different parts of a parameter on the ranks.
fn distinct_parts(param: &ModelParam) -> u64 {
    let ParamSource::Ranks(sources) = &param.source else { return 1 };
    sources.iter().enumerate().filter(|(i, source)| !sources[..*i].contains(source)).count() as u64
}

/// Parameters by format, in the order of first use.
pub fn formats(program: &LoweredProgram, memory: Option<&MemoryPlan>) -> Vec<FormatRow> {
    let mut rows: Vec<FormatRow> = Vec::new();
    for (id, param) in program.module.params.iter().filter(|(_, param)| !param.is_adapter()) {
        let format = param.ty.dtype.name();
        let bytes = memory.map_or(0, |m| distinct_parts(param) * m.params[id.index()].1);
        let at = match rows.iter().position(|r| r.format == format) {
            Some(at) => at,
            None => {
                rows.push(FormatRow { format: format.into(), tensors: 0, parameters: 0, bytes: 0 });
                rows.len() - 1
            }
        };
        rows[at].tensors += 1;
        rows[at].parameters += distinct_parts(param) * element_count(param);
        rows[at].bytes += bytes;
    }
    rows
}

/// The cost of one token in `decode`, on all ranks together, whatever the kernels do: the least that a
/// machine has to read and to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeTraffic {
    /// Every weight once (of an embedding that is not the head as well, one row; of experts those that are
    /// chosen), recurrent states read and written, one row of the caches written. The part of the caches that
    /// a token reads depends on its position: `mlcc bench` adds it.
    pub bytes: u64,
    /// Bytes among them that belong to the sequence alone.
    pub state_bytes: u64,
    /// A multiplication and an addition per weight of a matrix.
    pub ops: OperationCounts,
    /// Operations among them of the output head, which a prompt needs only once.
    pub head_ops: OperationCounts,
    /// Bytes of the experts that one token does not choose: a prompt needs them as well.
    pub other_experts: u64,
}

/// Operations by what they are done in; dot products of the two planes of 16-bit activations count both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OperationCounts {
    pub f32: u64,
    pub bf16: u64,
    pub i8: u64,
    pub i4: u64,
}

impl OperationCounts {
    fn add(&mut self, product: MatrixProduct, multiplications: u64) {
        let kind = match product.arithmetic {
            ComputeType::F32 => &mut self.f32,
            ComputeType::BF16 => &mut self.bf16,
            ComputeType::I8 => &mut self.i8,
            ComputeType::I4 => &mut self.i4,
        };
        *kind += 2 * product.planes * multiplications;
    }
}

impl DecodeTraffic {
    pub fn for_program(program: &LoweredProgram, memory: &MemoryPlan) -> DecodeTraffic {
        let (cache, ranks) = (cache_row(program, memory), program.module.rank_count() as u64);
        let states = program.module.states.iter().zip(&memory.states);
        let recurrent =
            states.filter(|((id, _), _)| !program.module.is_cache(*id)).map(|(_, (_, bytes))| bytes);
        let state = 2 * ranks * recurrent.sum::<u64>() + cache.map_or(0, |c| c.bytes_per_token);
        let mut traffic = DecodeTraffic { bytes: state, state_bytes: state, ..DecodeTraffic::default() };
        let (tied, products) = (tied_head(program), matrix_products(program));
        for (id, param) in program.module.params.iter().filter(|(_, param)| !param.is_adapter()) {
            let bytes = ranks * memory.params[id.index()].1;
            let role = match param.role {
                ParamRole::Embedding if tied == Some(id) => ParamRole::Head,
                role => role,
            };
            match role {
                ParamRole::Embedding => {
                    let rows = constant_dims(&param.ty).first().copied().unwrap_or(1).max(1);
                    traffic.bytes += bytes / rows;
                }
                ParamRole::Head | ParamRole::Linear | ParamRole::LowRank => {
                    let product = products.get(&id).copied().unwrap_or_default();
                    let read = bytes / product.experts * product.chosen;
                    traffic.bytes += read;
                    traffic.other_experts += bytes - read;
                    let used = ranks * element_count(param) / product.experts * product.chosen;
                    traffic.ops.add(product, used);
                    if role == ParamRole::Head {
                        traffic.head_ops.add(product, used);
                    }
                }
                ParamRole::Vector => traffic.bytes += bytes,
            }
        }
        traffic
    }
}

/// The work of a token with a parameter that is a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MatrixProduct {
    arithmetic: ComputeType,
    planes: u64,
    /// The number of matrices in it, and how many of them a token chooses.
    experts: u64,
    chosen: u64,
}

impl Default for MatrixProduct {
    fn default() -> MatrixProduct {
        MatrixProduct { arithmetic: ComputeType::F32, planes: 1, experts: 1, chosen: 1 }
    }
}

/// Parameters that products read as their matrix.
fn matrix_products(program: &LoweredProgram) -> BTreeMap<ParamId, MatrixProduct> {
    let module = &program.module;
    let mut products = BTreeMap::new();
    for f in module.functions.values() {
        for (_, call) in f.live_nodes() {
            let Op::Call(callee) = call.op else { continue };
            let group = &module.functions[callee];
            for (_, node) in group.live_nodes() {
                let Some(product) = cost::weight_matmul(group, node) else { continue };
                let at = group.inputs.iter().position(|&i| i == product.weight);
                let param = at.and_then(|i| f.defining_node(call.inputs[i])).map(|def| &def.op);
                let (experts, chosen) = match node.op {
                    Op::MatMulExperts { experts } | Op::MatMulExpertsI8 { experts, .. } => {
                        (experts, group.ty(node.outputs[0]).dims[1].as_const().unwrap_or(1))
                    }
                    _ => (1, 1),
                };
                if let Some(&Op::Param(param)) = param {
                    let (experts, chosen) = ((experts as u64).max(1), chosen as u64);
                    let (arithmetic, planes) = (product.arithmetic, product.planes as u64);
                    products.insert(param, MatrixProduct { arithmetic, planes, experts, chosen });
                }
            }
        }
    }
    products
}

/// The embedding that is the head as well, where a model has no head of its own: of several (tokens,
/// positions) the one with the most rows.
fn tied_head(program: &LoweredProgram) -> Option<ParamId> {
    let params = &program.module.params;
    if params.values().any(|p| p.role == ParamRole::Head) {
        return None;
    }
    let embeddings = params.iter().filter(|(_, p)| p.role == ParamRole::Embedding);
    embeddings.max_by_key(|(_, p)| constant_dims(&p.ty).first().copied()).map(|(id, _)| id)
}
