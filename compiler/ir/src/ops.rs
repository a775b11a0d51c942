//! The closed set of graph ops. Each family file gives, for its ops, the shape rule and the meaning: a
//! compute definition, or a decomposition into ops that have one.

mod attention;
mod contraction;
mod elementwise;
mod experts;
mod movement;
mod norm;
mod parts;
mod quant;
mod structure;

pub use attention::{AttentionOp, KeySpan};
pub use parts::{PartsError, SymbolRef};
pub use quant::{CODE_OFFSET, max_code};

use crate::compute::{RedOp, ScalarExpr};
use crate::dim::Dim;
use crate::graph::{Function, ValueId};
use crate::kernel::{BinOp, UnOp};
use crate::module::{FuncId, Module, ParamId, StateId};
use crate::types::{DType, TensorType};

/// Kind of operation with its attributes.
#[derive(Clone, PartialEq, Debug)]
pub enum Op {
    // structure
    /// A weight of the module. No inputs.
    Param(ParamId),
    /// Value of a state before this step. No inputs.
    StateRead(StateId),
    /// Value of a state after this step. One input, no outputs.
    StateWrite(StateId),
    /// Keeps rows of a sequence: writes `x: [n, ..]` after the `past` rows that the state `[context, ..]`
    /// holds and gives all rows so far, `[past + n, ..]`. Nothing else may read or write the state in that
    /// step.
    CacheAppend(StateId),
    /// The rows of one sequence: `[n, ..]`, a row per sequence, to `[1, ..]`; ragged, `[n, ..]` of all to
    /// `[n, ..]` of the sequence. Values that are computed from it are computed for every sequence, with its
    /// own states, its own `past` and, ragged, its own `n` (see [`crate::sequences`]).
    SequenceSplit {
        ragged: bool,
    },
    /// The rows of all sequences: a value `[1, ..]`, or ragged `[n, ..]`, of every sequence to `[n, ..]`.
    SequenceJoin,
    /// The first rows of `[n, ..]`, as many as there are output rows: their number is `n` from here on.
    OutputRows,
    /// The parts of all of `ranks` ranks, joined along the last axis in their order: `[.., k]` of each gives
    /// `[.., ranks * k]` on every rank. All ranks reach the same all-gathers in the same order. Only entry
    /// functions have any.
    AllGather {
        ranks: usize,
    },
    /// Inputs and outputs of the function invoked.
    Call(FuncId),
    /// A recurrence along axis 0. Inputs: `carries` initial values, then `seqs` sequences `[n, ...]`, then
    /// constants. The body takes carries, one slice of each sequence and the constants, and returns the new
    /// carries, then any number of values. Outputs: final carries, then those values stacked `[n, ...]`.
    Scan {
        body: FuncId,
        carries: usize,
        seqs: usize,
    },

    // elementwise
    /// A rank-0 constant.
    Constant {
        value: f64,
        dtype: DType,
    },
    Unary(UnOp),
    /// Arithmetic (`add`, `sub`, `mul`, `div`, `min`, `max`) with broadcasting as in NumPy.
    Binary(BinOp),
    /// `a >= b ? x : y` of inputs a, b, x, y, with broadcasting (x too where a or b is NaN).
    SelectGe,
    Cast(DType),
    /// `i32[len]`: `start, start + 1, ...` (token positions are `start = past, len = n`). No inputs.
    Iota {
        start: Dim,
        len: Dim,
    },

    // movement
    Reshape {
        dims: Vec<Dim>,
    },
    Permute {
        perm: Vec<usize>,
    },
    /// `len` indices from `start` along `axis`.
    Slice {
        axis: usize,
        start: Dim,
        len: Dim,
    },
    Concat {
        axis: usize,
    },
    /// Rows of `table: [rows, k]` picked by `ids: i32[n, ..]`, to `[n, .., k]`; an id out of range is
    /// undefined (hosts check ids).
    Gather,

    // contraction and reduction
    /// `a: [.., m, k]` times `b: [.., k, n]`, or `b: [.., n, k]` if `transpose_b`; leading axes broadcast.
    /// The result has the type of `a`, or f32 if that is bf16, which has too few digits for a sum.
    MatMul {
        transpose_b: bool,
    },
    /// Over one axis, which is kept with size 1.
    Reduce {
        op: RedOp,
        axis: usize,
    },

    // norms, decomposed
    /// Over the last axis: `(x - mean) / sqrt(variance + eps) * weight + bias`.
    LayerNorm {
        eps: f64,
    },
    /// Over the last axis: `x / sqrt(mean(x^2) + eps) * weight`.
    RmsNorm {
        eps: f64,
    },
    /// Over the last axis.
    Softmax,
    /// Scaled dot-product attention of `n` queries over `t` cached keys; see [`AttentionOp`].
    Attention(AttentionOp),

    // mixtures of experts
    /// The `k` largest of each row of `f32[n, e]`, falling, the lower index first among equals: `f32[n, k]`,
    /// `i32[n, k]`.
    TopK {
        k: usize,
    },
    /// Row `i`, slot `s` of `x: f32[n, k, in]` (or `[n, 1, in]`: one row for all slots) times the matrix of
    /// expert `ids[i, s]` (`ids: i32[n, k]`) among `weight: [experts * out, in]`; gives `f32[n, k, out]`. `x`
    /// may be bf16.
    MatMulExperts {
        experts: usize,
    },
    /// The same for a packed weight and activations as codes (`quantize_rows` of `[n, k, in]` or
    /// `[n, 1, in]`): inputs codes, scales, sums, weight, `ids`. The sums are redundant, as in `matmul_i8`.
    MatMulExpertsI8 {
        experts: usize,
        group: usize,
    },

    // quantization
    /// A packed or half-precision weight as f32.
    Dequantize,
    /// `x: [.., k]` -> `f32[.., ceil(k/group)]`: max |x| over the group / the largest code (127 for 8 bits,
    /// 32512 for 16).
    GroupScale {
        group: usize,
        bits: usize,
    },
    /// `x: [.., k]`, scales -> `i8` or `i16` `[.., k rounded up to part]`: `round(x / scale + CODE_OFFSET)`,
    /// 0 where the scale is 0 and in the padding.
    GroupQuantize {
        group: usize,
        bits: usize,
        part: usize,
    },
    /// Codes `[.., k]` -> `i32[.., k/part]`: minus `zero` times the sum of the codes of each part.
    GroupSum {
        part: usize,
        zero: usize,
    },
    /// `x: [.., k]` -> its codes, scales and sums as by the three ops above: what products with packed
    /// weights read that have groups of `part` and the zero point `zero`. CPU kernels keep all three in an
    /// order of their own; of rank 2 it is that of plain products, of rank 3 that of products with chosen
    /// experts.
    QuantizeRows {
        group: usize,
        bits: usize,
        part: usize,
        zero: usize,
    },
    /// Activations quantized per group times a packed weight: inputs codes, scales, sums, weight `[n, k]`;
    /// gives `f32[m, n] = sum over k of code * scale * weight`. The sums are redundant: kernels repair the
    /// weights' zero point with them.
    MatMulI8 {
        group: usize,
    },
}

/// The reason why an op does not fit its inputs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {message}")]
pub struct OpError {
    pub op: &'static str,
    pub message: String,
}

/// Ops that share their shape rules, one file of this folder each.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum OpFamily<'a> {
    Structure,
    Elementwise,
    Movement,
    Contraction,
    Norm,
    Attention(&'a AttentionOp),
    Experts,
    Quant,
}

/// The definition of an op's result.
#[derive(Clone, PartialEq, Debug)]
pub enum OpSemantics {
    /// One expression per output; output shape and dtype as inferred.
    Compute(Vec<ScalarExpr>),
    /// Ops with a simpler meaning: see [`Op::decompose`].
    Decompose,
    /// Parameters, states, calls and scans: their meaning is given by the module.
    Structural,
}

/// An attribute as the text format shows it.
#[derive(Clone, PartialEq, Debug)]
pub enum AttrValue {
    Int(i64),
    Float(f64),
    Bool(bool),
    DType(DType),
    Ints(Vec<i64>),
    Dim(Dim),
    Dims(Vec<Dim>),
    Function(FuncId),
}

pub(crate) fn invalid_input<T>(op: &Op, message: impl Into<String>) -> Result<T, OpError> {
    Err(OpError { op: op.name(), message: message.into() })
}

impl Op {
    /// Name in the text format. Unary and binary ops have the name of their scalar operation.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Param(_) => "param",
            Op::StateRead(_) => "state.read",
            Op::StateWrite(_) => "state.write",
            Op::CacheAppend(_) => "cache.append",
            Op::SequenceSplit { .. } => "sequence.split",
            Op::SequenceJoin => "sequence.join",
            Op::OutputRows => "rows.wanted",
            Op::AllGather { .. } => "exchange",
            Op::Call(_) => "call",
            Op::Scan { .. } => "scan",
            Op::Constant { .. } => "constant",
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::SelectGe => "select_ge",
            Op::Cast(_) => "cast",
            Op::Iota { .. } => "iota",
            Op::Reshape { .. } => "reshape",
            Op::Permute { .. } => "permute",
            Op::Slice { .. } => "slice",
            Op::Concat { .. } => "concat",
            Op::Gather => "gather",
            Op::MatMul { .. } => "matmul",
            Op::Reduce { op: RedOp::Sum, .. } => "reduce_sum",
            Op::Reduce { op: RedOp::Max, .. } => "reduce_max",
            Op::LayerNorm { .. } => "layer_norm",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Softmax => "softmax",
            Op::Attention(_) => "attention",
            Op::TopK { .. } => "top_k",
            Op::MatMulExperts { .. } => "matmul_experts",
            Op::MatMulExpertsI8 { .. } => "matmul_experts_i8",
            Op::Dequantize => "dequantize",
            Op::GroupScale { .. } => "group_scale",
            Op::GroupQuantize { .. } => "group_quantize",
            Op::GroupSum { .. } => "group_sum",
            Op::QuantizeRows { .. } => "quantize_rows",
            Op::MatMulI8 { .. } => "matmul_i8",
        }
    }

    /// Types of the outputs, or what is wrong with the inputs.
    pub fn infer(&self, module: &Module, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
        match self.family() {
            OpFamily::Structure => structure::infer(self, module, inputs),
            OpFamily::Elementwise => elementwise::infer(self, inputs),
            OpFamily::Movement => movement::infer(self, inputs),
            OpFamily::Contraction => contraction::infer(self, inputs),
            OpFamily::Norm => norm::infer(self, inputs),
            OpFamily::Attention(a) => attention::infer(self, a, inputs),
            OpFamily::Experts => experts::infer(self, inputs),
            OpFamily::Quant => quant::infer(self, inputs),
        }
    }

    /// The meaning for inputs of these (valid) types.
    pub fn semantics(&self, inputs: &[&TensorType]) -> OpSemantics {
        match self.family() {
            OpFamily::Structure => OpSemantics::Structural,
            OpFamily::Elementwise => OpSemantics::Compute(vec![elementwise::compute(self, inputs)]),
            OpFamily::Movement => OpSemantics::Compute(vec![movement::compute(self, inputs)]),
            OpFamily::Contraction => OpSemantics::Compute(vec![contraction::compute(self, inputs)]),
            OpFamily::Norm | OpFamily::Attention(_) => OpSemantics::Decompose,
            OpFamily::Experts => OpSemantics::Compute(experts::compute(self, inputs)),
            OpFamily::Quant if matches!(self, Op::QuantizeRows { .. }) => OpSemantics::Decompose,
            OpFamily::Quant => OpSemantics::Compute(vec![quant::compute(self, inputs)]),
        }
    }

    /// The ops that share shape rules: those of one file of this folder.
    pub fn family(&self) -> OpFamily<'_> {
        match self {
            Op::Param(_)
            | Op::StateRead(_)
            | Op::StateWrite(_)
            | Op::CacheAppend(_)
            | Op::SequenceSplit { .. }
            | Op::SequenceJoin
            | Op::OutputRows
            | Op::AllGather { .. }
            | Op::Call(_)
            | Op::Scan { .. } => OpFamily::Structure,
            Op::Constant { .. } | Op::Unary(_) | Op::Binary(_) | Op::SelectGe | Op::Cast(_) => {
                OpFamily::Elementwise
            }
            Op::Iota { .. }
            | Op::Reshape { .. }
            | Op::Permute { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Gather => OpFamily::Movement,
            Op::MatMul { .. } | Op::Reduce { .. } => OpFamily::Contraction,
            Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax => OpFamily::Norm,
            Op::Attention(a) => OpFamily::Attention(a),
            Op::TopK { .. } | Op::MatMulExperts { .. } | Op::MatMulExpertsI8 { .. } => OpFamily::Experts,
            Op::Dequantize
            | Op::GroupScale { .. }
            | Op::GroupQuantize { .. }
            | Op::GroupSum { .. }
            | Op::QuantizeRows { .. }
            | Op::MatMulI8 { .. } => OpFamily::Quant,
        }
    }

    /// Appends ops with the same meaning to `f` and returns the value that replaces the output; only for
    /// [`OpSemantics::Decompose`].
    pub fn decompose(
        &self,
        module: &Module,
        f: &mut Function,
        inputs: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        match self {
            Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax => {
                norm::decompose(self, module, f, inputs)
            }
            Op::Attention(a) => attention::decompose(a, module, f, inputs),
            Op::QuantizeRows { .. } => quant::decompose(self, module, f, inputs),
            _ => invalid_input(self, "has no decomposition"),
        }
    }

    /// True if each output element depends on input elements at the same (broadcast) indices only.
    pub fn is_elementwise(&self) -> bool {
        matches!(self, Op::Constant { .. } | Op::Unary(_) | Op::Binary(_) | Op::SelectGe | Op::Cast(_))
    }

    /// True if the node must stay although no output is used.
    pub fn has_effect(&self) -> bool {
        matches!(self, Op::StateWrite(_) | Op::CacheAppend(_))
    }

    /// Attributes in print order; `param`, `state.*` show their symbol instead.
    pub fn attrs(&self) -> Vec<(&'static str, AttrValue)> {
        let int = |v: &usize| AttrValue::Int(*v as i64);
        match self {
            Op::Param(_)
            | Op::StateRead(_)
            | Op::StateWrite(_)
            | Op::CacheAppend(_)
            | Op::SequenceSplit { ragged: false }
            | Op::SequenceJoin
            | Op::OutputRows
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::SelectGe
            | Op::Gather
            | Op::Softmax
            | Op::Dequantize => vec![],
            Op::SequenceSplit { ragged } => vec![("ragged", AttrValue::Bool(*ragged))],
            Op::AllGather { ranks } => vec![("ranks", int(ranks))],
            Op::Call(f) => vec![("function", AttrValue::Function(*f))],
            Op::Scan { body, carries, seqs } => {
                vec![("body", AttrValue::Function(*body)), ("carries", int(carries)), ("seqs", int(seqs))]
            }
            Op::Constant { value, dtype } => {
                vec![("value", AttrValue::Float(*value)), ("dtype", AttrValue::DType(*dtype))]
            }
            Op::Cast(dtype) => vec![("dtype", AttrValue::DType(*dtype))],
            Op::Iota { start, len } => {
                vec![("start", AttrValue::Dim(start.clone())), ("len", AttrValue::Dim(len.clone()))]
            }
            Op::Attention(a) => a.attrs(),
            Op::TopK { k } => vec![("k", int(k))],
            Op::MatMulExperts { experts } => vec![("experts", int(experts))],
            Op::MatMulExpertsI8 { experts, group } => vec![("experts", int(experts)), ("group", int(group))],
            Op::Reshape { dims } => vec![("dims", AttrValue::Dims(dims.clone()))],
            Op::Permute { perm } => vec![("perm", AttrValue::Ints(perm.iter().map(|&p| p as i64).collect()))],
            Op::Slice { axis, start, len } => {
                vec![
                    ("axis", int(axis)),
                    ("start", AttrValue::Dim(start.clone())),
                    ("len", AttrValue::Dim(len.clone())),
                ]
            }
            Op::Concat { axis } | Op::Reduce { axis, .. } => vec![("axis", int(axis))],
            Op::MatMul { transpose_b } => vec![("transpose_b", AttrValue::Bool(*transpose_b))],
            Op::LayerNorm { eps } | Op::RmsNorm { eps } => vec![("eps", AttrValue::Float(*eps))],
            Op::GroupScale { group, bits } => vec![("group", int(group)), ("bits", int(bits))],
            Op::GroupQuantize { group, bits, part } => {
                vec![("group", int(group)), ("bits", int(bits)), ("part", int(part))]
            }
            Op::GroupSum { part, zero } => vec![("part", int(part)), ("zero", int(zero))],
            Op::QuantizeRows { group, bits, part, zero } => {
                vec![("group", int(group)), ("bits", int(bits)), ("part", int(part)), ("zero", int(zero))]
            }
            Op::MatMulI8 { group } => vec![("group", int(group))],
        }
    }
}
