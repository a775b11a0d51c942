//! Kernel IR: a tree of statements over hash-consed typed expressions with explicit lanes and masks.
//!
//! Invariants (held by the verifier):
//! * Buffers are flat; an index is an element offset of type `i64` (one lane, or as many lanes as the
//!   access). A contiguous vector access is an index of the form `ramp(base, 1, lanes)`; any other vector
//!   index gathers or scatters.
//! * Expressions are pure except that a `Load` sees memory as it is at the statement that evaluates it. A
//!   value needed across stores is pinned by `Let`.
//! * Variables are assigned once (by `For`, `Let`, or as a dimension of the kernel). Loop-carried values live
//!   in `Local` buffers.
//! * CPU kernels use `Serial`, `Unroll` and `Par`; a `Par` loop is never inside another loop of kind `Par`,
//!   and its iterations are independent: worker `w` of `W` runs iterations `[w*extent/W, (w+1)*extent/W)`.
//! * A CPU kernel without a `Par` loop runs on worker 0 alone; in one that has `Par` loops, stores outside of
//!   them are executed by every worker, which counts as a race.
//! * `Out` parameters start undefined and may be read once written. Division by zero, `MIN / -1` and shifts
//!   by the width or more are errors.
//! * GPU kernels are one nest of `Block` loops; inside, `Thread` loops (possibly several, with `Barrier`
//!   between them). `Local` buffers are private to a thread even when allocated outside a `Thread` loop;
//!   `Shared` buffers are one per block.

use crate::dim::{Dim, SizeSymbol};
use crate::entity::{EntityArena, EntityId, entity};
use crate::instr::InstrId;
use crate::types::DType;
use indexmap::IndexSet;
use rustc_hash::FxBuildHasher;
use std::fmt;

entity!(/// An expression of one kernel.
    ExprId, "e");
entity!(/// A variable of one kernel.
    VarId, "i");
entity!(/// A buffer of one kernel: parameter or allocation.
    BufId, "b");

/// Type of an expression: `lanes` elements of `dtype` (never `Packed`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExprType {
    pub dtype: DType,
    pub lanes: u32,
}

impl ExprType {
    pub const I64: ExprType = ExprType::scalar(DType::I64);
    pub const F32: ExprType = ExprType::scalar(DType::F32);
    pub const fn scalar(dtype: DType) -> ExprType {
        ExprType { dtype, lanes: 1 }
    }
    pub const fn vector(dtype: DType, lanes: u32) -> ExprType {
        ExprType { dtype, lanes }
    }
}

impl fmt::Display for ExprType {
    /// `f32`, `f32x16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lanes {
            1 => write!(f, "{}", self.dtype),
            n => write!(f, "{}x{n}", self.dtype),
        }
    }
}

/// A scalar literal; floats are kept as the bits of an f64 so that equal literals are equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Literal {
    Int(i64),
    Float(u64),
}

impl Literal {
    pub fn as_f64(self) -> f64 {
        match self {
            Literal::Int(i) => i as f64,
            Literal::Float(bits) => f64::from_bits(bits),
        }
    }
}

/// Elementwise operations of one operand. `Exp`, `Tanh`, `Sigmoid`, `Log`, ... are expanded into the others
/// by `mlcc_kernel_lang::math` before code generation; back ends see only [`UnOp::is_primitive`] ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum UnOp {
    Neg,
    Abs,
    /// Bitwise (integers) or logical (bool) complement.
    Not,
    Sqrt,
    Floor,
    /// Round half to even.
    Round,
    Exp,
    Log,
    Tanh,
    Sigmoid,
    Rsqrt,
    Recip,
    Erf,
    Sin,
    Cos,
}

impl UnOp {
    pub const ALL: [UnOp; 15] = [
        UnOp::Neg,
        UnOp::Abs,
        UnOp::Not,
        UnOp::Sqrt,
        UnOp::Floor,
        UnOp::Round,
        UnOp::Exp,
        UnOp::Log,
        UnOp::Tanh,
        UnOp::Sigmoid,
        UnOp::Rsqrt,
        UnOp::Recip,
        UnOp::Erf,
        UnOp::Sin,
        UnOp::Cos,
    ];
    pub fn name(self) -> &'static str {
        match self {
            UnOp::Neg => "neg",
            UnOp::Abs => "abs",
            UnOp::Not => "not",
            UnOp::Sqrt => "sqrt",
            UnOp::Floor => "floor",
            UnOp::Round => "round",
            UnOp::Exp => "exp",
            UnOp::Log => "log",
            UnOp::Tanh => "tanh",
            UnOp::Sigmoid => "sigmoid",
            UnOp::Rsqrt => "rsqrt",
            UnOp::Recip => "recip",
            UnOp::Erf => "erf",
            UnOp::Sin => "sin",
            UnOp::Cos => "cos",
        }
    }
    /// True for the operations that every back end spells itself.
    pub fn is_primitive(self) -> bool {
        matches!(self, UnOp::Neg | UnOp::Abs | UnOp::Not | UnOp::Sqrt | UnOp::Floor | UnOp::Round)
    }
}

/// Elementwise operations of two operands of one type. Integers wrap. `Div`/`Rem` of integers truncate (a
/// zero divisor is a bug in the kernel); `Shr` is arithmetic for signed types. `Min`/`Max` of floats return
/// the other operand when one is NaN. Comparisons give `bool`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BinOp {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    Lt,
    Le,
    Eq,
    Ne,
}

impl BinOp {
    pub const ALL: [BinOp; 16] = [
        BinOp::Add,
        BinOp::Sub,
        BinOp::Mul,
        BinOp::Div,
        BinOp::Rem,
        BinOp::Min,
        BinOp::Max,
        BinOp::And,
        BinOp::Or,
        BinOp::Xor,
        BinOp::Shl,
        BinOp::Shr,
        BinOp::Lt,
        BinOp::Le,
        BinOp::Eq,
        BinOp::Ne,
    ];
    pub fn name(self) -> &'static str {
        match self {
            BinOp::Add => "add",
            BinOp::Sub => "sub",
            BinOp::Mul => "mul",
            BinOp::Div => "div",
            BinOp::Rem => "rem",
            BinOp::Min => "min",
            BinOp::Max => "max",
            BinOp::And => "and",
            BinOp::Or => "or",
            BinOp::Xor => "xor",
            BinOp::Shl => "shl",
            BinOp::Shr => "shr",
            BinOp::Lt => "lt",
            BinOp::Le => "le",
            BinOp::Eq => "eq",
            BinOp::Ne => "ne",
        }
    }
    pub fn is_comparison(self) -> bool {
        matches!(self, BinOp::Lt | BinOp::Le | BinOp::Eq | BinOp::Ne)
    }
}

/// A typed expression node; its type is in [`ExprArena`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Expr {
    /// One lane; vectors of constants are `Splat(Const)`.
    Const(Literal),
    Var(VarId),
    /// `lanes` of the type = lanes of the index. Lanes whose mask is false read nothing and give zero.
    Load {
        buf: BufId,
        index: ExprId,
        mask: Option<ExprId>,
    },
    Unary(UnOp, ExprId),
    Binary(BinOp, ExprId, ExprId),
    /// `a * b + c`, rounded once where the target has a fused multiply-add.
    Fma(ExprId, ExprId, ExprId),
    /// Value conversion. Float to int truncates and saturates; int to smaller int wraps; f32 to f16/bf16
    /// rounds to nearest even.
    Cast(ExprId),
    /// Same bits, another type of the same total size; lane 0 holds the lowest bytes.
    Bitcast(ExprId),
    /// `cond ? a : b` lane by lane.
    Select(ExprId, ExprId, ExprId),
    /// `base, base + stride, ...`: `lanes` values; base and stride are one-lane integers.
    Ramp {
        base: ExprId,
        stride: ExprId,
    },
    Splat(ExprId),
    /// Lanes picked from `a` (or from `a` followed by `b`); the type has `lanes.len()` lanes.
    Shuffle {
        a: ExprId,
        b: Option<ExprId>,
        lanes: Vec<u32>,
    },
    /// A target instruction without side effects (see [`crate::instr`]).
    Instr(InstrId, Vec<ExprId>),
}

/// The way in which the iterations of a loop are executed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ForKind {
    Serial,
    /// Serial, unrolled completely by code generation; constant extent.
    Unroll,
    /// CPU workers take contiguous slices.
    Par,
    /// GPU grid axis 0, 1 or 2; the extent is a constant or depends on kernel dimensions only.
    Block(u8),
    /// GPU thread axis 0, 1 or 2; constant extent.
    Thread(u8),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stmt {
    /// `for var in 0..extent`.
    For {
        var: VarId,
        extent: ExprId,
        kind: ForKind,
        body: Vec<Stmt>,
    },
    If {
        cond: ExprId,
        then: Vec<Stmt>,
        otherwise: Vec<Stmt>,
    },
    Let {
        var: VarId,
        value: ExprId,
    },
    /// Lanes whose mask is false are not written.
    Store {
        buf: BufId,
        index: ExprId,
        value: ExprId,
        mask: Option<ExprId>,
    },
    /// Brings a `Local`, `Stack` or `Shared` buffer into scope, contents undefined.
    Alloc {
        buf: BufId,
    },
    /// A target instruction with an effect and no result (prefetch, asynchronous copy).
    Instr {
        instr: InstrId,
        args: Vec<ExprId>,
    },
    /// All threads of a GPU block; must be reached by all of them.
    Barrier,
    /// The copies that this thread has started since the last commit (`cp.async`) become a group, which may
    /// be empty.
    Commit,
    /// Waits until at most the newest `pending` groups of copies of this thread are under way; with 0, until
    /// none of its copies is. Finished copies count as stores of this thread at this point.
    Wait {
        pending: u32,
    },
}

/// The memory of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MemorySpace {
    Global,
    /// GPU shared memory.
    Shared,
    /// Registers: every index must become a constant after unrolling.
    Local,
    /// CPU stack or GPU local memory.
    Stack,
}

impl MemorySpace {
    pub const ALL: [MemorySpace; 4] =
        [MemorySpace::Global, MemorySpace::Shared, MemorySpace::Local, MemorySpace::Stack];
    pub fn name(self) -> &'static str {
        match self {
            MemorySpace::Global => "global",
            MemorySpace::Shared => "shared",
            MemorySpace::Local => "local",
            MemorySpace::Stack => "stack",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ParamAccess {
    In,
    Out,
    InOut,
}

impl ParamAccess {
    pub fn reads(self) -> bool {
        matches!(self, ParamAccess::In | ParamAccess::InOut)
    }
    pub fn writes(self) -> bool {
        matches!(self, ParamAccess::Out | ParamAccess::InOut)
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BufDecl {
    pub name: String,
    pub dtype: DType,
    pub space: MemorySpace,
    /// Length in elements; constant for allocations.
    pub len: Dim,
    pub access: ParamAccess,
    /// Alignment in bytes that the base address is known to have, besides that of an element.
    pub align: u32,
}

impl BufDecl {
    /// Alignment in bytes that generated code relies on: that of an element for every access, and what LLVM
    /// proves from the declared one.
    pub fn assumed_align(&self) -> u32 {
        self.align.max(self.dtype.bytes().unwrap_or(1) as u32)
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VarDecl {
    pub name: String,
    pub ty: ExprType,
}

/// Expressions with their types, each distinct one stored once.
#[derive(Clone, Default)]
pub struct ExprArena {
    nodes: IndexSet<(Expr, ExprType), FxBuildHasher>,
}

impl ExprArena {
    pub fn intern(&mut self, expr: Expr, ty: ExprType) -> ExprId {
        let (index, _) = self.nodes.insert_full((expr, ty));
        ExprId::from_index(index)
    }
    pub fn len(&self) -> usize {
        self.nodes.len()
    }
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
    pub fn expr(&self, id: ExprId) -> &Expr {
        &self.nodes[id.index()].0
    }
    pub fn ty(&self, id: ExprId) -> ExprType {
        self.nodes[id.index()].1
    }
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = ExprId> + use<> {
        (0..self.nodes.len()).map(ExprId::from_index)
    }
    /// The value of an integer constant.
    pub fn as_int(&self, id: ExprId) -> Option<i64> {
        match self.expr(id) {
            Expr::Const(Literal::Int(i)) => Some(*i),
            _ => None,
        }
    }
}

/// One loop-level unit.
#[derive(Clone)]
pub struct Kernel {
    pub name: String,
    /// Buffer arguments in call order; all of space `Global`.
    pub params: Vec<BufId>,
    /// Size arguments (i64) in call order, after the buffers.
    pub dims: Vec<(SizeSymbol, VarId)>,
    pub bufs: EntityArena<BufId, BufDecl>,
    pub vars: EntityArena<VarId, VarDecl>,
    pub exprs: ExprArena,
    pub body: Vec<Stmt>,
}

impl Kernel {
    pub fn new(name: impl Into<String>) -> Kernel {
        Kernel {
            name: name.into(),
            params: Vec::new(),
            dims: Vec::new(),
            bufs: EntityArena::new(),
            vars: EntityArena::new(),
            exprs: ExprArena::default(),
            body: Vec::new(),
        }
    }
    pub fn ty(&self, e: ExprId) -> ExprType {
        self.exprs.ty(e)
    }
    /// True if the kernel has GPU loops.
    pub fn is_gpu(&self) -> bool {
        fn any(body: &[Stmt]) -> bool {
            body.iter().any(|s| match s {
                Stmt::For { kind: ForKind::Block(_) | ForKind::Thread(_), .. } => true,
                Stmt::For { body, .. } => any(body),
                Stmt::If { then, otherwise, .. } => any(then) || any(otherwise),
                _ => false,
            })
        }
        any(&self.body)
    }
}

impl EntityId for InstrId {
    fn from_index(index: usize) -> Self {
        InstrId(index as u32)
    }
    fn index(self) -> usize {
        self.0 as usize
    }
}
