//! An op made from its parts in text: name, symbol and attributes. The inverse of [`Op::name`] and
//! [`Op::attrs`].

use super::{AttentionOp, AttrValue, KeySpan, Op};
use crate::compute::RedOp;
use crate::dim::Dim;
use crate::kernel::{BinOp, UnOp};
use crate::module::{FuncId, ParamId, StateId};
use crate::types::DType;

/// The parameter or state that an op refers to by name instead of by attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SymbolRef {
    Param(ParamId),
    State(StateId),
}

/// The reasons why parts make no op.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    #[error("there is no op {0}")]
    UnknownOp(String),
    #[error("{op} names a {expected}")]
    Symbol { op: String, expected: &'static str },
    #[error("{0} does not name a parameter or state")]
    NoSymbol(String),
    #[error("{op} lacks the attribute {attr}")]
    Missing { op: String, attr: &'static str },
    #[error("{op} has no attribute {attr}")]
    Unknown { op: String, attr: String },
    #[error("{op}: attribute {attr} is {expected}")]
    Kind { op: String, attr: &'static str, expected: &'static str },
}

impl Op {
    /// The op with that name and those attributes, in any order. Constant sizes count as integers and floats,
    /// because text does not tell them apart.
    pub fn from_parts(
        name: &str,
        symbol: Option<SymbolRef>,
        attrs: &[(&str, AttrValue)],
    ) -> Result<Op, PartsError> {
        let parts = NamedAttrs { name, attrs };
        let op = match name {
            "param" => match symbol {
                Some(SymbolRef::Param(id)) => Op::Param(id),
                _ => return parts.symbol("parameter"),
            },
            "state.read" | "state.write" | "cache.append" => match symbol {
                Some(SymbolRef::State(id)) if name == "state.read" => Op::StateRead(id),
                Some(SymbolRef::State(id)) if name == "state.write" => Op::StateWrite(id),
                Some(SymbolRef::State(id)) => Op::CacheAppend(id),
                _ => return parts.symbol("state"),
            },
            _ if symbol.is_some() => return Err(PartsError::NoSymbol(name.into())),
            _ => parts.op()?,
        };
        let expected = op.attrs();
        match attrs.iter().find(|(name, _)| expected.iter().all(|(known, _)| known != name)) {
            Some((attr, _)) => Err(PartsError::Unknown { op: name.into(), attr: (*attr).into() }),
            None => Ok(op),
        }
    }
}

struct NamedAttrs<'a> {
    name: &'a str,
    attrs: &'a [(&'a str, AttrValue)],
}

impl NamedAttrs<'_> {
    fn op(&self) -> Result<Op, PartsError> {
        Ok(match self.name {
            "sequence.split" => Op::SequenceSplit { ragged: self.is_set("ragged")? },
            "sequence.join" => Op::SequenceJoin,
            "rows.wanted" => Op::OutputRows,
            "exchange" => Op::AllGather { ranks: self.positive("ranks")? },
            "call" => Op::Call(self.function("function")?),
            "scan" => Op::Scan {
                body: self.function("body")?,
                carries: self.count("carries")?,
                seqs: self.count("seqs")?,
            },
            "constant" => Op::Constant { value: self.float("value")?, dtype: self.dtype("dtype")? },
            "select_ge" => Op::SelectGe,
            "cast" => Op::Cast(self.dtype("dtype")?),
            "iota" => Op::Iota { start: self.dim("start")?, len: self.dim("len")? },
            "reshape" => Op::Reshape { dims: self.dims("dims")? },
            "permute" => Op::Permute { perm: self.counts("perm")? },
            "slice" => {
                Op::Slice { axis: self.count("axis")?, start: self.dim("start")?, len: self.dim("len")? }
            }
            "concat" => Op::Concat { axis: self.count("axis")? },
            "gather" => Op::Gather,
            "matmul" => Op::MatMul { transpose_b: self.bool("transpose_b")? },
            "reduce_sum" => Op::Reduce { op: RedOp::Sum, axis: self.count("axis")? },
            "reduce_max" => Op::Reduce { op: RedOp::Max, axis: self.count("axis")? },
            "layer_norm" => Op::LayerNorm { eps: self.float("eps")? },
            "rms_norm" => Op::RmsNorm { eps: self.float("eps")? },
            "softmax" => Op::Softmax,
            "attention" => Op::Attention(AttentionOp {
                scale: self.float("scale")?,
                softcap: self.float("softcap")?,
                window: self.count("window")?,
                ahead: self.count_or_zero("ahead")?,
                sinks: self.count("sinks")?,
                alibi: self.bool("alibi")?,
                prefix: self.bool("prefix")?,
                span: self.span()?,
                terms: self.count_or_none("terms")?,
                null_logits: self.is_set("null_logits")?,
                codes: self.is_set("codes")?,
            }),
            "top_k" => Op::TopK { k: self.positive("k")? },
            "matmul_experts" => Op::MatMulExperts { experts: self.positive("experts")? },
            "matmul_experts_i8" => {
                Op::MatMulExpertsI8 { experts: self.positive("experts")?, group: self.positive("group")? }
            }
            "dequantize" => Op::Dequantize,
            "group_scale" => Op::GroupScale { group: self.positive("group")?, bits: self.bits()? },
            "group_quantize" => Op::GroupQuantize {
                group: self.positive("group")?,
                bits: self.bits()?,
                part: self.positive("part")?,
            },
            "group_sum" => Op::GroupSum { part: self.positive("part")?, zero: self.count("zero")? },
            "quantize_rows" => Op::QuantizeRows {
                group: self.positive("group")?,
                bits: self.bits()?,
                part: self.positive("part")?,
                zero: self.count("zero")?,
            },
            "matmul_i8" => Op::MatMulI8 { group: self.positive("group")? },
            name => {
                let unary = UnOp::ALL.into_iter().find(|op| op.name() == name).map(Op::Unary);
                let binary = || BinOp::ALL.into_iter().find(|op| op.name() == name).map(Op::Binary);
                unary.or_else(binary).ok_or_else(|| PartsError::UnknownOp(name.into()))?
            }
        })
    }

    fn symbol<T>(&self, expected: &'static str) -> Result<T, PartsError> {
        Err(PartsError::Symbol { op: self.name.into(), expected })
    }
    fn find<T>(
        &self,
        attr: &'static str,
        expected: &'static str,
        convert: impl FnOnce(&AttrValue) -> Option<T>,
    ) -> Result<T, PartsError> {
        let op = || self.name.to_string();
        let Some((_, value)) = self.attrs.iter().find(|(name, _)| *name == attr) else {
            return Err(PartsError::Missing { op: op(), attr });
        };
        convert(value).ok_or_else(|| PartsError::Kind { op: op(), attr, expected })
    }

    fn count(&self, attr: &'static str) -> Result<usize, PartsError> {
        self.find(attr, "a count", |a| usize::try_from(int(a)?).ok())
    }
    fn positive(&self, attr: &'static str) -> Result<usize, PartsError> {
        self.find(attr, "a positive count", |a| usize::try_from(int(a)?).ok().filter(|&c| c > 0))
    }
    fn bits(&self) -> Result<usize, PartsError> {
        self.find("bits", "8 or 16", |a| usize::try_from(int(a)?).ok().filter(|b| [8, 16].contains(b)))
    }
    fn counts(&self, attr: &'static str) -> Result<Vec<usize>, PartsError> {
        self.find(attr, "a list of counts", |a| match a {
            AttrValue::Ints(v) => v.iter().map(|&i| usize::try_from(i).ok()).collect(),
            AttrValue::Dims(v) => v.iter().map(|d| usize::try_from(d.as_const()?).ok()).collect(),
            _ => None,
        })
    }
    fn float(&self, attr: &'static str) -> Result<f64, PartsError> {
        self.find(attr, "a number", |a| match a {
            AttrValue::Float(v) => Some(*v),
            other => int(other).map(|v| v as f64),
        })
    }
    fn bool(&self, attr: &'static str) -> Result<bool, PartsError> {
        self.find(attr, "true or false", |a| match a {
            AttrValue::Bool(v) => Some(*v),
            _ => None,
        })
    }
    /// A number that text leaves out where it is 0.
    fn count_or_zero(&self, attr: &'static str) -> Result<usize, PartsError> {
        match self.count(attr) {
            Err(PartsError::Missing { .. }) => Ok(0),
            given => given,
        }
    }
    fn count_or_none(&self, attr: &'static str) -> Result<Option<usize>, PartsError> {
        match self.count(attr) {
            Err(PartsError::Missing { .. }) => Ok(None),
            given => given.map(Some),
        }
    }
    fn span(&self) -> Result<KeySpan, PartsError> {
        match (self.is_set("first_keys")?, self.is_set("rest_keys")?) {
            (true, true) => self.find("rest_keys", "false beside `first_keys`", |_| None),
            (true, false) => Ok(KeySpan::First),
            (false, true) => Ok(KeySpan::Rest),
            (false, false) => Ok(KeySpan::All),
        }
    }
    /// A flag that text leaves out where it is false.
    fn is_set(&self, attr: &'static str) -> Result<bool, PartsError> {
        match self.bool(attr) {
            Err(PartsError::Missing { .. }) => Ok(false),
            set => set,
        }
    }
    fn dtype(&self, attr: &'static str) -> Result<DType, PartsError> {
        self.find(attr, "an element type", |a| match a {
            AttrValue::DType(v) => Some(*v),
            _ => None,
        })
    }
    fn dim(&self, attr: &'static str) -> Result<Dim, PartsError> {
        self.find(attr, "a size", |a| match a {
            AttrValue::Dim(v) => Some(v.clone()),
            AttrValue::Int(v) => Some(Dim::from(*v)),
            _ => None,
        })
    }
    fn dims(&self, attr: &'static str) -> Result<Vec<Dim>, PartsError> {
        self.find(attr, "a list of sizes", |a| match a {
            AttrValue::Dims(v) => Some(v.clone()),
            AttrValue::Ints(v) => Some(v.iter().map(|&i| Dim::from(i)).collect()),
            _ => None,
        })
    }
    fn function(&self, attr: &'static str) -> Result<FuncId, PartsError> {
        self.find(attr, "a function", |a| match a {
            AttrValue::Function(v) => Some(*v),
            _ => None,
        })
    }
}

fn int(attr: &AttrValue) -> Option<i64> {
    match attr {
        AttrValue::Int(v) => Some(*v),
        AttrValue::Dim(d) => d.as_const(),
        _ => None,
    }
}
