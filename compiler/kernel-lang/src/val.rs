//! Values and their arithmetic.

use crate::Recorder;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, ExprId, ExprType, Stmt, UnOp};
use mlcc_ir::types::DType;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Rem, Shl, Shr, Sub};

/// A value of the kernel that is being recorded: one lane or several, of one type.
///
/// Both operands of an operation have one type; one lane meets several by being repeated, and a literal takes
/// the type of the other operand. Integers wrap and divide towards zero.
#[derive(Clone, Copy)]
pub struct Val<'k> {
    k: &'k Recorder,
    id: ExprId,
}

/// An operand next to a value: another one, or a literal that takes its type.
pub trait IntoOperand<'k>: Copy {
    #[doc(hidden)]
    fn typed_like(self, other: Val<'k>) -> Val<'k>;
    #[doc(hidden)]
    fn as_val(self) -> Option<Val<'k>> {
        None
    }
}

impl<'k> IntoOperand<'k> for Val<'k> {
    fn typed_like(self, _: Val<'k>) -> Val<'k> {
        self
    }
    fn as_val(self) -> Option<Val<'k>> {
        Some(self)
    }
}

impl<'k> IntoOperand<'k> for i64 {
    #[track_caller]
    fn typed_like(self, other: Val<'k>) -> Val<'k> {
        let dtype = other.ty().dtype;
        assert!(dtype.is_int(), "integer literal {self} beside {dtype}");
        Val::new(other.k, other.k.builder(|kb| kb.int_of(self, dtype)))
    }
}

impl<'k> IntoOperand<'k> for f64 {
    #[track_caller]
    fn typed_like(self, other: Val<'k>) -> Val<'k> {
        let dtype = other.ty().dtype;
        assert!(dtype.is_float(), "literal {self} beside {dtype}");
        Val::new(other.k, other.k.builder(|kb| kb.float_of(self, dtype)))
    }
}

impl<'k> Val<'k> {
    pub(crate) fn new(k: &'k Recorder, id: ExprId) -> Val<'k> {
        Val { k, id }
    }
    /// The expression of the builder below.
    pub fn id(self) -> ExprId {
        self.id
    }
    pub fn ty(self) -> ExprType {
        self.k.builder(|kb| kb.ty(self.id))
    }
    pub fn lanes(self) -> u32 {
        self.ty().lanes
    }
    pub fn recorder(self) -> &'k Recorder {
        self.k
    }
    /// A literal of the type of this value.
    #[track_caller]
    pub fn like(self, literal: impl IntoOperand<'k>) -> Val<'k> {
        literal.typed_like(self).to_lanes(self.lanes())
    }

    /// Computes the value here and keeps it in a variable of this name.
    pub fn named(self, name: &str) -> Val<'k> {
        self.k.val(self.k.builder(|kb| kb.let_(name, self.id)))
    }

    /// An operation that is data of the generator; those with a name have a method or an operator.
    #[track_caller]
    pub fn binary(self, op: BinOp, other: impl IntoOperand<'k>) -> Val<'k> {
        let other = other.typed_like(self);
        // No closure here: the panic of a type error names the caller.
        let id = self.k.recording().binary(op, self.id, other.id);
        self.k.val(id)
    }
    #[track_caller]
    pub fn unary(self, op: UnOp) -> Val<'k> {
        self.k.val(self.k.recording().unary(op, self.id))
    }

    // ---- comparisons and choice

    #[track_caller]
    pub fn lt(self, other: impl IntoOperand<'k>) -> Val<'k> {
        self.binary(BinOp::Lt, other)
    }
    #[track_caller]
    pub fn le(self, other: impl IntoOperand<'k>) -> Val<'k> {
        self.binary(BinOp::Le, other)
    }
    #[track_caller]
    pub fn equals(self, other: impl IntoOperand<'k>) -> Val<'k> {
        self.binary(BinOp::Eq, other)
    }
    #[track_caller]
    pub fn differs(self, other: impl IntoOperand<'k>) -> Val<'k> {
        self.binary(BinOp::Ne, other)
    }
    #[track_caller]
    pub fn min(self, other: impl IntoOperand<'k>) -> Val<'k> {
        self.binary(BinOp::Min, other)
    }
    #[track_caller]
    pub fn max(self, other: impl IntoOperand<'k>) -> Val<'k> {
        self.binary(BinOp::Max, other)
    }
    /// `self ? yes : no`, lane by lane; one of them may be a literal.
    #[track_caller]
    pub fn select(self, yes: impl IntoOperand<'k>, no: impl IntoOperand<'k>) -> Val<'k> {
        let Some(typed) = yes.as_val().or(no.as_val()) else { panic!("a choice between two literals") };
        let (yes, no) = (yes.typed_like(typed), no.typed_like(typed));
        self.k.val(self.k.recording().select(self.id, yes.id, no.id))
    }

    // ---- arithmetic

    /// `self * factor + addend`, rounded once where the target can.
    #[track_caller]
    pub fn fma(self, factor: impl IntoOperand<'k>, addend: impl IntoOperand<'k>) -> Val<'k> {
        let (factor, addend) = (factor.typed_like(self), addend.typed_like(self));
        self.k.val(self.k.recording().fma(self.id, factor.id, addend.id))
    }
    /// `self / divisor`, rounded up; both positive.
    #[track_caller]
    pub fn div_ceil(self, divisor: impl IntoOperand<'k>) -> Val<'k> {
        let divisor = divisor.typed_like(self);
        (self + (divisor + -1)) / divisor
    }
    #[track_caller]
    pub fn abs(self) -> Val<'k> {
        self.unary(UnOp::Abs)
    }
    #[track_caller]
    pub fn sqrt(self) -> Val<'k> {
        self.unary(UnOp::Sqrt)
    }
    #[track_caller]
    pub fn exp(self) -> Val<'k> {
        self.unary(UnOp::Exp)
    }
    #[track_caller]
    pub fn tanh(self) -> Val<'k> {
        self.unary(UnOp::Tanh)
    }

    // ---- types and lanes

    /// The value in another type.
    #[track_caller]
    pub fn cast(self, dtype: DType) -> Val<'k> {
        self.k.val(self.k.recording().cast(self.id, dtype))
    }
    /// The bits as another type of the same size; lane 0 has the lowest bytes.
    #[track_caller]
    pub fn bits_as(self, ty: ExprType) -> Val<'k> {
        self.k.val(self.k.recording().bitcast(self.id, ty))
    }
    /// The bits as lanes of another type, as many as they fill.
    #[track_caller]
    pub fn bits(self, dtype: DType) -> Val<'k> {
        let ty = self.ty();
        let (Some(from), Some(to)) = (ty.dtype.bytes(), dtype.bytes()) else { panic!("bits of {ty}") };
        self.bits_as(ExprType::vector(dtype, ty.lanes * from as u32 / to as u32))
    }
    /// The one lane, repeated.
    #[track_caller]
    pub fn splat(self, lanes: u32) -> Val<'k> {
        self.k.val(self.k.recording().splat(self.id, lanes))
    }
    /// One lane repeated, or a value that already has `lanes` lanes.
    #[track_caller]
    pub fn to_lanes(self, lanes: u32) -> Val<'k> {
        if self.lanes() < lanes { self.splat(lanes) } else { self }
    }
    /// `self, self + step, ...` in as many lanes.
    #[track_caller]
    pub fn ramp(self, step: i64, lanes: u32) -> Val<'k> {
        let step = step.typed_like(self);
        self.k.val(self.k.recording().ramp(self.id, step.id, lanes))
    }
    /// All lanes joined by `op`: the upper half onto the lower one until one is left.
    #[track_caller]
    pub fn reduce_lanes(self, op: BinOp) -> Val<'k> {
        self.k.val(self.k.recording().reduce_lanes(op, self.id))
    }
    /// The sum of all lanes, likewise.
    #[track_caller]
    pub fn sum_lanes(self) -> Val<'k> {
        self.reduce_lanes(BinOp::Add)
    }
    /// The numbered lanes.
    #[track_caller]
    pub fn shuffle(self, lanes: impl IntoIterator<Item = u32>) -> Val<'k> {
        self.k.val(self.k.recording().shuffle(self.id, None, lanes.into_iter().collect()))
    }
    /// The numbered lanes of this value followed by those of `other`.
    #[track_caller]
    pub fn shuffle_with(self, other: Val<'k>, lanes: impl IntoIterator<Item = u32>) -> Val<'k> {
        self.k.val(self.k.recording().shuffle(self.id, Some(other.id), lanes.into_iter().collect()))
    }
    /// A machine instruction, by its number or its name in the instruction table; `self` is its first
    /// argument.
    #[track_caller]
    pub fn instr(self, instr: impl IntoInstruction, others: &[Val<'k>]) -> Val<'k> {
        let args = [self].iter().chain(others).map(|v| v.id).collect();
        self.k.val(self.k.recording().instr(instr.number(), args))
    }
    /// An instruction without a result as a statement of its own: prefetches the element that this value
    /// loads.
    pub fn prefetch_load(self, instr: InstrId) {
        self.k.recording().push(Stmt::Instr { instr, args: vec![self.id] });
    }
}

/// A machine instruction.
pub trait IntoInstruction {
    #[doc(hidden)]
    fn number(self) -> InstrId;
}

impl IntoInstruction for InstrId {
    fn number(self) -> InstrId {
        self
    }
}

impl IntoInstruction for &str {
    #[track_caller]
    fn number(self) -> InstrId {
        let Some(instr) = InstrId::by_name(self) else { panic!("no instruction is called {self}") };
        instr
    }
}

impl From<Val<'_>> for ExprId {
    fn from(value: Val) -> ExprId {
        value.id
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident $op:ident)*) => { $(
        impl<'k, T: IntoOperand<'k>> $operator<T> for Val<'k> {
            type Output = Val<'k>;
            #[track_caller]
            fn $method(self, other: T) -> Val<'k> {
                self.binary(BinOp::$op, other)
            }
        }
        impl<'k> $operator<Val<'k>> for i64 {
            type Output = Val<'k>;
            #[track_caller]
            fn $method(self, other: Val<'k>) -> Val<'k> {
                self.typed_like(other).binary(BinOp::$op, other)
            }
        }
        impl<'k> $operator<Val<'k>> for f64 {
            type Output = Val<'k>;
            #[track_caller]
            fn $method(self, other: Val<'k>) -> Val<'k> {
                self.typed_like(other).binary(BinOp::$op, other)
            }
        }
    )* };
}

operators! {
    Add add Add
    Sub sub Sub
    Mul mul Mul
    Div div Div
    Rem rem Rem
    BitAnd bitand And
    BitOr bitor Or
    BitXor bitxor Xor
    Shl shl Shl
    Shr shr Shr
}

impl<'k> Neg for Val<'k> {
    type Output = Val<'k>;
    #[track_caller]
    fn neg(self) -> Val<'k> {
        self.unary(UnOp::Neg)
    }
}
