//! Compute definitions: the meaning of an op as one scalar expression per output element. Shape-independent code
//! (interpreter, generic kernels, FLOP and byte counts, property tests) reads them instead of knowing ops.

use crate::dim::Dim;
use crate::kernel::{BinOp, UnOp};
use crate::types::DType;

/// How a reduction combines; the value of an empty reduction is the identity (`0` or `-inf`).
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

/// A scalar expression over the output's indices. Index positions hold integers, everything else the element's value;
/// a `Load` in an index position (gather) is the integer element. Arithmetic on values is exact up to the rounding of
/// the output's dtype: the interpreter computes in f64, kernels in f32.
#[derive(Clone, PartialEq, Debug)]
pub enum Scalar {
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
        index: Vec<Scalar>,
    },
    Unary(UnOp, Box<Scalar>),
    Binary(BinOp, Box<Scalar>, Box<Scalar>),
    Select(Box<Scalar>, Box<Scalar>, Box<Scalar>),
    Cast(DType, Box<Scalar>),
    /// Over `var in 0..extent`.
    Reduce {
        op: RedOp,
        var: u32,
        extent: Dim,
        body: Box<Scalar>,
    },
}

impl Scalar {
    pub fn load(arg: usize, index: Vec<Scalar>) -> Scalar {
        Scalar::Load { arg, index }
    }
    pub fn unary(op: UnOp, a: Scalar) -> Scalar {
        Scalar::Unary(op, Box::new(a))
    }
    pub fn binary(op: BinOp, a: Scalar, b: Scalar) -> Scalar {
        Scalar::Binary(op, Box::new(a), Box::new(b))
    }
    pub fn sum(a: Scalar, b: Scalar) -> Scalar {
        Scalar::binary(BinOp::Add, a, b)
    }
    pub fn product(a: Scalar, b: Scalar) -> Scalar {
        Scalar::binary(BinOp::Mul, a, b)
    }
    pub fn reduce(op: RedOp, var: u32, extent: Dim, body: Scalar) -> Scalar {
        Scalar::Reduce { op, var, extent, body: Box::new(body) }
    }
    /// True if any reduction is inside.
    pub fn has_reduction(&self) -> bool {
        match self {
            Scalar::Reduce { .. } => true,
            Scalar::Axis(_) | Scalar::Red(_) | Scalar::Int(_) | Scalar::Dim(_) | Scalar::Float(_) => false,
            Scalar::Load { index, .. } => index.iter().any(Scalar::has_reduction),
            Scalar::Unary(_, a) | Scalar::Cast(_, a) => a.has_reduction(),
            Scalar::Binary(_, a, b) => a.has_reduction() || b.has_reduction(),
            Scalar::Select(c, a, b) => c.has_reduction() || a.has_reduction() || b.has_reduction(),
        }
    }
}
