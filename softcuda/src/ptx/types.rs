//! Registers, types and the words that instructions are made of.

/// A register of up to 32 bits, or a constant (see `FunctionScope::constant_w`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WordRegister(pub u32);
/// A register of 64 bits, or a constant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DoubleRegister(pub u32);
/// A predicate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PredRegister(pub u32);

/// Marks constants among register numbers.
pub const CONSTANT: u32 = 1 << 31;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnyRegister {
    W(WordRegister),
    D(DoubleRegister),
    P(PredRegister),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PtxType {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    F32,
    F64,
}

impl PtxType {
    pub fn of(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::BF16,
            "bf16x2" => Self::BF16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    pub fn bytes(self) -> u32 {
        match self {
            Self::Pred | Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 2,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::BF16x2 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
            Self::B128 => 16,
        }
    }

    pub fn signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub fn float(self) -> bool {
        matches!(self, Self::F16 | Self::F16x2 | Self::BF16 | Self::BF16x2 | Self::F32 | Self::F64)
    }

    /// `.u` and `.s`, not the untyped `.b`.
    pub fn integer(self) -> bool {
        self.signed() || matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::U64)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StateSpace {
    Global,
    Shared,
    Local,
    Param,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpecialRegister {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    WarpId,
    LaneMaskLt,
    LaneMaskLe,
    LaneMaskEq,
    LaneMaskGe,
    LaneMaskGt,
}

/// Integers of two operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntFn {
    Add,
    Sub,
    MulLo,
    MulHi,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntOne {
    Neg,
    Abs,
    Not,
    Popc,
    Clz,
    Brev,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloatFn {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    /// NaN where an operand is one.
    MinNan,
    MaxNan,
    /// Within 2 ulp, and 0 for large divisors (`div.approx`).
    DivApprox,
    /// Within 2 ulp (`div.full`).
    DivFull,
    CopySign,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloatOne {
    Neg,
    Abs,
    Sqrt,
    Rcp,
    SqrtApprox,
    RcpApprox,
    RsqrtApprox,
    Ex2Approx,
    Lg2Approx,
    SinApprox,
    CosApprox,
    TanhApprox,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PtxComparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogicOp {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RoundingMode {
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomFn {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShflMode {
    Up,
    Down,
    Bfly,
    Idx,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VoteMode {
    All,
    Any,
    Uni,
    Ballot,
}

/// The order of an access among those of other threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryOrdering {
    /// `.weak`: races are mistakes.
    Weak,
    /// `.relaxed`, `.volatile`, `.release`.
    Strong,
    Acquire,
}

/// `base + offset`; the base may be a constant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PtxAddress {
    pub base: AnyRegister,
    pub offset: i64,
}

/// Half-precision formats, one or two in a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HalfFormat {
    pub bf16: bool,
    pub two: bool,
}
