//! A module: everything the compiler holds about one model, graph level and kernel level side by side.

use crate::dim::Dim;
use crate::entity::{EntityArena, entity};
use crate::graph::Function;
use crate::kernel::Kernel;
use crate::ops::Op;
use crate::step::StepProgram;
use crate::types::{Packing, TensorType};

entity!(/// A function of the module.
    FuncId, "f");
entity!(/// A weight of the module.
    ParamId, "p");
entity!(/// A recurrent state tensor of the module.
    StateId, "s");

/// The source of a parameter: checkpoint tensors and the transformations applied while loading them.
#[derive(Clone, PartialEq, Debug)]
pub enum ParamSource {
    /// A tensor of the checkpoint under its checkpoint name, read as f32. As a whole parameter its elements
    /// are taken in row-major order whatever its shape, so that `[1, 1, 64]` or `[4, 16]` may fill a vector
    /// of 64.
    Tensor(String),
    /// `x * factor`.
    Scale(f64, Box<ParamSource>),
    /// `-exp(x)` (RWKV decay).
    NegExp(Box<ParamSource>),
    /// `exp(x)`.
    Exp(Box<ParamSource>),
    /// Sources joined along axis 0.
    Concat(Vec<ParamSource>),
    /// Two-dimensional transpose.
    Transpose(Box<ParamSource>),
    /// `x + term` (norms that store their weight less one).
    Offset(f64, Box<ParamSource>),
    /// Some of the rows (parts of fused layers, parts of ranks).
    Rows(RowBlocks, Box<ParamSource>),
    /// Columns in another order: column `j` is column `order[j]` of the source (weights whose groups are no
    /// neighbours).
    Columns(Vec<usize>, Box<ParamSource>),
    /// Some of the columns (indices of the last axis; parts of ranks).
    ColumnRange(ColumnRange, Box<ParamSource>),
    /// Rows scaled to Euclidean length 1 (normalised heads).
    UnitRows(Box<ParamSource>),
    /// A table that the model definition computes (rotary frequencies, ALiBi slopes); one axis.
    Values(Vec<f32>),
    /// Matrices of the slots for adapters, concatenated, which the runtime fills: not from the checkpoint.
    /// Only a whole source.
    Adapter,
    /// One source for each rank of a model that is split. Only a whole source may be one, none inside of
    /// another.
    Ranks(Vec<ParamSource>),
}

/// Some rows (indices of axis 0; of all axes but the last where there are more than two) of a tensor of `of`
/// rows: `count` blocks of `len` rows, the first at `start`, each `stride` after the one before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowBlocks {
    pub start: usize,
    pub len: usize,
    pub stride: usize,
    pub count: usize,
    pub of: usize,
}

impl RowBlocks {
    /// `len` rows from `start` on.
    pub fn range(start: usize, len: usize, of: usize) -> RowBlocks {
        RowBlocks { start, len, stride: len, count: 1, of }
    }
    /// Rows that it picks; `None` where a block is empty or ends after the last row.
    pub fn row_count(&self) -> Option<usize> {
        let last = self.count.checked_sub(1)?.checked_mul(self.stride)?.checked_add(self.start)?;
        let fits = last.checked_add(self.len)? <= self.of && self.len > 0 && self.stride >= self.len;
        self.len.checked_mul(self.count).filter(|_| fits)
    }
    /// The source's row that is row number `row` of the result.
    pub fn source_row(&self, row: usize) -> usize {
        self.start + row / self.len * self.stride + row % self.len
    }
}

/// `len` columns from `start` on, of `of`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ColumnRange {
    pub start: usize,
    pub len: usize,
    pub of: usize,
}

impl ColumnRange {
    /// Their numbers; `None` where there are none, or one of them is behind the last column.
    pub fn columns(&self) -> Option<std::ops::Range<usize>> {
        let end = self.start.checked_add(self.len)?;
        (self.len > 0 && end <= self.of).then_some(self.start..end)
    }
}

impl ParamSource {
    /// Checkpoint tensors that it reads, in order.
    pub fn tensor_names(&self) -> Vec<&str> {
        match self {
            ParamSource::Tensor(name) => vec![name],
            ParamSource::Scale(_, s)
            | ParamSource::NegExp(s)
            | ParamSource::Exp(s)
            | ParamSource::Transpose(s)
            | ParamSource::Offset(_, s)
            | ParamSource::Rows(_, s)
            | ParamSource::Columns(_, s)
            | ParamSource::ColumnRange(_, s)
            | ParamSource::UnitRows(s) => s.tensor_names(),
            ParamSource::Concat(parts) | ParamSource::Ranks(parts) => {
                parts.iter().flat_map(|p| p.tensor_names()).collect()
            }
            ParamSource::Values(_) | ParamSource::Adapter => vec![],
        }
    }

    /// The source of the parameter on a rank; `None` if there is none for it.
    pub fn of_rank(&self, rank: usize) -> Option<&ParamSource> {
        match self {
            ParamSource::Ranks(parts) => parts.get(rank),
            same => Some(same),
        }
    }
}

/// The role of a parameter; quantization policies choose by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ParamRole {
    /// Token embedding table `[vocab, hidden]`.
    Embedding,
    /// Output head `[vocab, hidden]`.
    Head,
    /// A linear layer's weight `[out, in]`.
    Linear,
    /// One of the two thin factors of a low-rank product (LoRA), `[out, in]`: small, and sensitive to few
    /// bits.
    LowRank,
    /// Norm weights, biases, time constants: kept in f32.
    Vector,
}

impl ParamRole {
    pub const ALL: [ParamRole; 5] =
        [ParamRole::Embedding, ParamRole::Head, ParamRole::Linear, ParamRole::LowRank, ParamRole::Vector];
    pub fn name(self) -> &'static str {
        match self {
            ParamRole::Embedding => "embedding",
            ParamRole::Head => "head",
            ParamRole::Linear => "linear",
            ParamRole::LowRank => "low_rank",
            ParamRole::Vector => "vector",
        }
    }
}

/// A weight: constant during a run, found in the payload of the artifact.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelParam {
    /// Unique; the checkpoint's (canonical) name for a plain tensor.
    pub name: String,
    /// Storage type; constant dims.
    pub ty: TensorType,
    pub role: ParamRole,
    pub source: ParamSource,
    /// Set when the kernels that read it have been chosen.
    pub packing: Option<Packing>,
}

impl ModelParam {
    /// True if it belongs to the slots for adapters, and so lies in memory that the runtime fills, not in the
    /// payload.
    pub fn is_adapter(&self) -> bool {
        self.source == ParamSource::Adapter
    }
}

/// A tensor that lives from step to step.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelState {
    pub name: String,
    /// Constant dims.
    pub ty: TensorType,
    /// Every element at the start of a sequence.
    pub init: f64,
}

/// Values that an entry function returns after its first output, so that they can be looked at while
/// debugging.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FunctionTaps {
    /// Name of the entry function.
    pub function: String,
    /// Names of its outputs 1, 2, ...
    pub names: Vec<String>,
}

/// The whole compilation unit. Entry functions are found by name (`prefill`, `decode`, ...).
#[derive(Clone, Default)]
pub struct Module {
    pub name: String,
    pub params: EntityArena<ParamId, ModelParam>,
    pub states: EntityArena<StateId, ModelState>,
    pub functions: EntityArena<FuncId, Function>,
    /// Taps of functions, at most one entry per function; empty unless the module was built for debugging.
    pub taps: Vec<FunctionTaps>,
    pub kernels: Vec<Kernel>,
    pub steps: Vec<StepProgram>,
}

impl Module {
    /// True if a state is a KV cache: some function appends rows to it.
    pub fn is_cache(&self, state: StateId) -> bool {
        let appends = |f: &Function| f.body.iter().any(|&node| f.nodes[node].op == Op::CacheAppend(state));
        self.functions.values().any(appends)
    }

    /// Rows of the shortest cache: most tokens of a sequence. `None` without caches.
    pub fn context_length(&self) -> Option<i64> {
        let rows = |s: StateId| self.states[s].ty.dims.first().and_then(Dim::as_const).unwrap_or(0);
        self.states.ids().filter(|&s| self.is_cache(s)).map(rows).min()
    }

    /// The number of ranks that the module is made for; 1 if it is whole.
    pub fn rank_count(&self) -> usize {
        let of_param = |param: &ModelParam| match &param.source {
            ParamSource::Ranks(parts) => parts.len(),
            _ => 1,
        };
        let of_node = |op: &Op| if let Op::AllGather { ranks } = op { *ranks } else { 1 };
        let nodes = self.functions.values().flat_map(|f| f.live_nodes()).map(|(_, node)| of_node(&node.op));
        self.params.values().map(of_param).chain(nodes).max().unwrap_or(1)
    }

    pub fn new(name: impl Into<String>) -> Module {
        Module { name: name.into(), ..Module::default() }
    }
    pub fn function(&self, name: &str) -> Option<(FuncId, &Function)> {
        self.functions.iter().find(|(_, f)| f.name == name)
    }
    /// Names of the taps of an entry function, in the order of its outputs from number 1 on.
    pub fn taps_of(&self, function: &str) -> &[String] {
        self.taps.iter().find(|t| t.function == function).map_or(&[], |t| &t.names)
    }
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name == name)
    }
    pub fn step(&self, name: &str) -> Option<&StepProgram> {
        self.steps.iter().find(|s| s.name == name)
    }
    /// The parameter of that name, if declared.
    pub fn param(&self, name: &str) -> Option<ParamId> {
        self.params.iter().find(|(_, p)| p.name == name).map(|(id, _)| id)
    }
    pub fn state(&self, name: &str) -> Option<StateId> {
        self.states.iter().find(|(_, s)| s.name == name).map(|(id, _)| id)
    }
}
