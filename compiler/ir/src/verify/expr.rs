//! Typing rules of kernel expressions.

use super::kernel::CheckResult;
use crate::instr::InstrSemantics;
use crate::kernel::*;
use crate::types::DType;

/// Most lanes of a value; a bound on what a mistaken text can make the tools allocate.
const MAX_LANES: u32 = 4096;

/// Checks one expression against the types of its operands.
pub(super) fn check_expr(kernel: &Kernel, id: ExprId) -> CheckResult {
    let ty = kernel.ty(id);
    if ty.lanes == 0 || ty.lanes > MAX_LANES || ty.dtype.is_packed() {
        return Err(format!("a value of type {ty}: expected 1 to {MAX_LANES} lanes of a plain element type"));
    }
    let checker = ExprChecker { kernel, ty };
    checker.check(kernel.exprs.expr(id))
}

struct ExprChecker<'a> {
    kernel: &'a Kernel,
    ty: ExprType,
}

impl ExprChecker<'_> {
    fn check(&self, expr: &Expr) -> CheckResult {
        let ty = self.ty;
        let of = |e: &ExprId| self.kernel.ty(*e);
        match expr {
            Expr::Const(literal) => self.literal(*literal),
            Expr::Var(var) => match self.kernel.vars.get(*var) {
                Some(decl) => self.expect_type(decl.ty, ty, &format!("variable %{}", decl.name)),
                None => Err(format!("variable {var} is not declared")),
            },
            Expr::Load { buf, index, .. } => match self.kernel.bufs.get(*buf) {
                Some(decl) => self.expect_type(
                    ty,
                    ExprType::vector(decl.dtype, of(index).lanes),
                    &format!("a load of %{}", decl.name),
                ),
                None => Err(format!("buffer {buf} is not declared")),
            },
            Expr::Unary(op, a) => {
                self.expect_type(of(a), ty, &format!("the operand of {}", op.name()))?;
                self.expect_allowed(unary_allows(*op, ty.dtype), op.name(), ty.dtype)
            }
            Expr::Binary(op, a, b) => self.binary(*op, of(a), of(b)),
            Expr::Fma(a, b, c) => {
                for operand in [a, b, c] {
                    self.expect_type(of(operand), ty, "an operand of fma")?;
                }
                self.expect_allowed(ty.dtype.is_float(), "fma", ty.dtype)
            }
            Expr::Cast(a) => self.lanes(of(a), ty.lanes, "the operand of cast"),
            Expr::Bitcast(a) => self.bitcast(of(a)),
            Expr::Select(cond, a, b) => {
                self.expect_type(
                    of(cond),
                    ExprType::vector(DType::Bool, ty.lanes),
                    "the condition of select",
                )?;
                self.expect_type(of(a), ty, "an operand of select")?;
                self.expect_type(of(b), ty, "an operand of select")
            }
            Expr::Ramp { base, stride } => {
                self.expect_type(of(base), ExprType::scalar(ty.dtype), "the base of a ramp")?;
                self.expect_type(of(stride), ExprType::scalar(ty.dtype), "the stride of a ramp")?;
                self.expect_allowed(ty.dtype.is_int(), "ramp", ty.dtype)
            }
            Expr::Splat(a) => self.expect_type(of(a), ExprType::scalar(ty.dtype), "the operand of splat"),
            Expr::Shuffle { a, b, lanes } => self.shuffle(of(a), b.as_ref().map(of), lanes),
            Expr::Instr(instr, args) => {
                let def = instr.def();
                let types: Vec<ExprType> = args.iter().map(of).collect();
                if types != def.args {
                    let show = |types: &[ExprType]| {
                        types.iter().map(ExprType::to_string).collect::<Vec<_>>().join(", ")
                    };
                    let (found, expected) = (show(&types), show(def.args));
                    return Err(format!("arguments of {}: ({found}), expected ({expected})", def.name));
                }
                match (def.ret, def.meaning) {
                    (None, _) | (_, InstrSemantics::Hint) => Err(format!("{} has no result", def.name)),
                    (Some(ret), _) => self.expect_type(ty, ret, &format!("the result of {}", def.name)),
                }
            }
        }
    }

    fn expect_type(&self, found: ExprType, expected: ExprType, what: &str) -> CheckResult {
        if found == expected { Ok(()) } else { Err(format!("{what} has type {found}, expected {expected}")) }
    }

    fn lanes(&self, found: ExprType, lanes: u32, what: &str) -> CheckResult {
        if found.lanes == lanes {
            Ok(())
        } else {
            Err(format!("{what} has type {found}, expected {lanes} lanes"))
        }
    }

    fn expect_allowed(&self, ok: bool, op: &str, dtype: DType) -> CheckResult {
        if ok { Ok(()) } else { Err(format!("{op} is not defined for {dtype}")) }
    }

    fn literal(&self, literal: Literal) -> CheckResult {
        let ExprType { dtype, lanes } = self.ty;
        let fits = match literal {
            Literal::Float(_) => dtype.is_float(),
            Literal::Int(value) => int_range(dtype).is_some_and(|(low, high)| (low..=high).contains(&value)),
        };
        let shown = match literal {
            Literal::Float(bits) => format!("{:?}", f64::from_bits(bits)),
            Literal::Int(value) => value.to_string(),
        };
        match (fits, lanes) {
            (true, 1) => Ok(()),
            (true, _) => Err(format!("the literal {shown} has {lanes} lanes; use splat")),
            (false, _) => Err(format!("the literal {shown} is no value of type {dtype}")),
        }
    }

    fn binary(&self, op: BinOp, a: ExprType, b: ExprType) -> CheckResult {
        self.expect_type(b, a, &format!("the second operand of {}", op.name()))?;
        let result = if op.is_comparison() { ExprType::vector(DType::Bool, a.lanes) } else { a };
        self.expect_type(self.ty, result, &format!("the result of {}", op.name()))?;
        self.expect_allowed(binary_allows(op, a.dtype), op.name(), a.dtype)
    }

    fn bitcast(&self, from: ExprType) -> CheckResult {
        let bytes = |t: ExprType| t.dtype.bytes().map(|b| b * t.lanes as usize);
        if bytes(from) != bytes(self.ty) || from.dtype == DType::Bool || self.ty.dtype == DType::Bool {
            return Err(format!("bitcast of {from} to {}: sizes differ, or one is bool", self.ty));
        }
        Ok(())
    }

    fn shuffle(&self, a: ExprType, b: Option<ExprType>, lanes: &[u32]) -> CheckResult {
        if let Some(b) = b {
            self.expect_type(b, a, "the second operand of shuffle")?;
        }
        let available = a.lanes * if b.is_some() { 2 } else { 1 };
        if let Some(lane) = lanes.iter().find(|l| **l >= available) {
            return Err(format!("shuffle picks lane {lane} of {available}"));
        }
        self.expect_type(self.ty, ExprType::vector(a.dtype, lanes.len() as u32), "the result of shuffle")
    }
}

/// Smallest and largest literal of a type; `None` for floats.
fn int_range(dtype: DType) -> Option<(i64, i64)> {
    Some(match dtype {
        DType::Bool => (0, 1),
        DType::I8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
        DType::U8 => (0, i64::from(u8::MAX)),
        DType::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        DType::U16 => (0, i64::from(u16::MAX)),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        DType::U32 => (0, i64::from(u32::MAX)),
        DType::I64 => (i64::MIN, i64::MAX),
        DType::F16 | DType::BF16 | DType::F32 | DType::Packed(_) => return None,
    })
}

fn unary_allows(op: UnOp, dtype: DType) -> bool {
    match op {
        UnOp::Neg | UnOp::Abs => dtype != DType::Bool,
        UnOp::Not => !dtype.is_float(),
        UnOp::Sqrt
        | UnOp::Floor
        | UnOp::Round
        | UnOp::Exp
        | UnOp::Log
        | UnOp::Tanh
        | UnOp::Sigmoid
        | UnOp::Rsqrt
        | UnOp::Recip
        | UnOp::Erf
        | UnOp::Sin
        | UnOp::Cos => dtype.is_float(),
    }
}

fn binary_allows(op: BinOp, dtype: DType) -> bool {
    match op {
        BinOp::Add | BinOp::Sub | BinOp::Mul | BinOp::Div | BinOp::Rem | BinOp::Min | BinOp::Max => {
            dtype != DType::Bool
        }
        BinOp::Lt | BinOp::Le => dtype != DType::Bool,
        BinOp::And | BinOp::Or | BinOp::Xor => !dtype.is_float(),
        BinOp::Shl | BinOp::Shr => dtype.is_int(),
        BinOp::Eq | BinOp::Ne => true,
    }
}
