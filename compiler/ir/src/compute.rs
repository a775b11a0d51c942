//! Compute definitions: the meaning of an op as one scalar expression per output element. Shape-independent
//! code (interpreter, generic kernels, FLOP and byte counts, property tests) reads them instead of knowing
//! ops.

use crate::dim::Dim;
use crate::kernel::{BinOp, UnOp};
use crate::types::DType;

/// The operation of a reduction; the value of an empty reduction is the identity (`0` or `-inf`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RedOp {
    Sum,
    Max,
}

impl RedOp {
    pub fn name(self) -> &'static str {
        match self {
            RedOp::Sum => "sum",
            RedOp::Max => "max",
        }
    }
    pub fn bin(self) -> BinOp {
        match self {
            RedOp::Sum => BinOp::Add,
            RedOp::Max => BinOp::Max,
        }
    }
    pub fn identity(self) -> f64 {
        match self {
            RedOp::Sum => 0.0,
            RedOp::Max => f64::NEG_INFINITY,
        }
    }
}

/// A scalar expression over the output's indices. Index positions hold integers, everything else the
/// element's value; a `Load` in an index position (gather) is the integer element. Arithmetic on values is
/// exact up to the rounding of the output's dtype: the interpreter computes in f64, kernels in f32.
#[derive(Clone, PartialEq, Debug)]
pub enum ScalarExpr {
    /// Index along output axis `.0`.
    Axis(usize),
    /// Index of the reduction that binds this variable.
    Red(u32),
    Int(i64),
    Dim(Dim),
    Float(f64),
    /// Element of input `arg`; packed inputs give the dequantized value.
    Load {
        arg: usize,
        index: Vec<ScalarExpr>,
    },
    Unary(UnOp, Box<ScalarExpr>),
    Binary(BinOp, Box<ScalarExpr>, Box<ScalarExpr>),
    Select(Box<ScalarExpr>, Box<ScalarExpr>, Box<ScalarExpr>),
    Cast(DType, Box<ScalarExpr>),
    /// Over `var in 0..extent`.
    Reduce {
        op: RedOp,
        var: u32,
        extent: Dim,
        body: Box<ScalarExpr>,
    },
}

impl ScalarExpr {
    pub fn load(arg: usize, index: Vec<ScalarExpr>) -> ScalarExpr {
        ScalarExpr::Load { arg, index }
    }
    pub fn unary(op: UnOp, a: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Unary(op, Box::new(a))
    }
    pub fn binary(op: BinOp, a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Binary(op, Box::new(a), Box::new(b))
    }
    pub fn sum(a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
        ScalarExpr::binary(BinOp::Add, a, b)
    }
    pub fn product(a: ScalarExpr, b: ScalarExpr) -> ScalarExpr {
        ScalarExpr::binary(BinOp::Mul, a, b)
    }
    pub fn reduce(op: RedOp, var: u32, extent: Dim, body: ScalarExpr) -> ScalarExpr {
        ScalarExpr::Reduce { op, var, extent, body: Box::new(body) }
    }
    /// True if any reduction is inside.
    pub fn has_reduction(&self) -> bool {
        match self {
            ScalarExpr::Reduce { .. } => true,
            ScalarExpr::Axis(_)
            | ScalarExpr::Red(_)
            | ScalarExpr::Int(_)
            | ScalarExpr::Dim(_)
            | ScalarExpr::Float(_) => false,
            ScalarExpr::Load { index, .. } => index.iter().any(ScalarExpr::has_reduction),
            ScalarExpr::Unary(_, a) | ScalarExpr::Cast(_, a) => a.has_reduction(),
            ScalarExpr::Binary(_, a, b) => a.has_reduction() || b.has_reduction(),
            ScalarExpr::Select(c, a, b) => c.has_reduction() || a.has_reduction() || b.has_reduction(),
        }
    }
}
