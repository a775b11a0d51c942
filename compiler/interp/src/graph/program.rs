//! A compute definition compiled to a flat register program: the slow but complete way to evaluate one.
//!
//! Index expressions and integer elements live in `i64` registers, floats in `f64` registers. A bool is an
//! integer 0 or 1. `Select` becomes jumps, so that the branch not taken is not evaluated.

use super::scalar;
use mlcc_ir::compute::{RedOp, ScalarExpr};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::types::DType;

/// The kind of an expression's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RegisterKind {
    Bool,
    Int,
    Float,
}

impl RegisterKind {
    pub fn of_dtype(dtype: DType) -> RegisterKind {
        match dtype {
            DType::Bool => RegisterKind::Bool,
            _ if dtype.is_int() => RegisterKind::Int,
            _ => RegisterKind::Float,
        }
    }
    /// Operands of two kinds meet in the wider one; arithmetic on bools is integer arithmetic.
    fn widest(a: RegisterKind, b: RegisterKind) -> RegisterKind {
        if a == RegisterKind::Float || b == RegisterKind::Float {
            RegisterKind::Float
        } else {
            RegisterKind::Int
        }
    }
    fn unary(op: UnOp, a: RegisterKind) -> RegisterKind {
        match op {
            UnOp::Not => a,
            UnOp::Neg | UnOp::Abs => RegisterKind::widest(a, a),
            _ => RegisterKind::Float,
        }
    }
    fn binary(op: BinOp, a: RegisterKind, b: RegisterKind) -> RegisterKind {
        match op {
            _ if op.is_comparison() => RegisterKind::Bool,
            BinOp::And | BinOp::Or | BinOp::Xor if a == b => a,
            _ => RegisterKind::widest(a, b),
        }
    }
}

/// Concrete shape of an input.
#[derive(Clone, Debug)]
pub(super) struct InputShape {
    pub dims: Vec<usize>,
    pub dtype: DType,
}

/// A register of the file that its kind says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct TypedRegister {
    pub kind: RegisterKind,
    pub at: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ScalarInstr {
    IntUnary { f: fn(i64) -> i64, dst: u32, a: u32 },
    IntBinary { op: BinOp, dst: u32, a: u32, b: u32 },
    FloatUnary { f: fn(f64) -> f64, dst: u32, a: u32 },
    FloatBinary { f: fn(f64, f64) -> f64, dst: u32, a: u32, b: u32 },
    FloatCompare { f: fn(&f64, &f64) -> bool, dst: u32, a: u32, b: u32 },
    ToFloat { dst: u32, a: u32 },
    ToInt { dtype: DType, dst: u32, a: u32 },
    Wrap { dtype: DType, dst: u32, a: u32 },
    Round { dtype: DType, dst: u32, a: u32 },
    MoveInt { dst: u32, a: u32 },
    MoveFloat { dst: u32, a: u32 },
    LoadInt { dst: u32, site: u32 },
    LoadFloat { dst: u32, site: u32 },
    Jump { to: u32 },
    JumpIfZero { a: u32, to: u32 },
    JumpUnlessLess { a: u32, b: u32, to: u32 },
}

/// A load: input and the registers that hold its indices.
#[derive(Clone, Debug)]
pub(super) struct LoadSite {
    pub arg: usize,
    pub index: Vec<u32>,
    pub dims: Vec<i64>,
}

#[derive(Clone, Debug)]
pub(super) struct ScalarProgram {
    pub code: Vec<ScalarInstr>,
    pub sites: Vec<LoadSite>,
    /// Registers before the first instruction: constants in place. The output indices come first.
    pub ints: Vec<i64>,
    pub floats: Vec<f64>,
    pub result: TypedRegister,
}

impl ScalarProgram {
    /// Compiles an expression for an output of `rank` axes; the message says what is malformed.
    pub fn compile(
        scalar: &ScalarExpr,
        rank: usize,
        args: &[InputShape],
        syms: &SymValues,
    ) -> Result<ScalarProgram, String> {
        let mut c = ScalarCompiler {
            args,
            syms,
            code: vec![],
            sites: vec![],
            ints: vec![0; rank],
            floats: vec![],
            rank,
            bound: vec![],
        };
        let result = c.emit(scalar)?;
        Ok(ScalarProgram { code: c.code, sites: c.sites, ints: c.ints, floats: c.floats, result })
    }
}

struct ScalarCompiler<'a> {
    args: &'a [InputShape],
    syms: &'a SymValues,
    code: Vec<ScalarInstr>,
    sites: Vec<LoadSite>,
    ints: Vec<i64>,
    floats: Vec<f64>,
    rank: usize,
    /// Reduction variables in scope with their register.
    bound: Vec<(u32, u32)>,
}

impl ScalarCompiler<'_> {
    fn int(&mut self, value: i64) -> u32 {
        self.ints.push(value);
        self.ints.len() as u32 - 1
    }
    fn float(&mut self, value: f64) -> u32 {
        self.floats.push(value);
        self.floats.len() as u32 - 1
    }
    fn reg(&mut self, kind: RegisterKind) -> TypedRegister {
        let at = if kind == RegisterKind::Float { self.float(0.0) } else { self.int(0) };
        TypedRegister { kind, at }
    }
    fn code_position(&self) -> u32 {
        self.code.len() as u32
    }

    /// The kind that `emit` will give.
    fn kind(&self, e: &ScalarExpr) -> Result<RegisterKind, String> {
        Ok(match e {
            ScalarExpr::Axis(_) | ScalarExpr::Red(_) | ScalarExpr::Int(_) | ScalarExpr::Dim(_) => {
                RegisterKind::Int
            }
            ScalarExpr::Float(_) => RegisterKind::Float,
            ScalarExpr::Load { arg, .. } => RegisterKind::of_dtype(self.operand(*arg)?.dtype),
            ScalarExpr::Unary(op, a) => RegisterKind::unary(*op, self.kind(a)?),
            ScalarExpr::Binary(op, a, b) => RegisterKind::binary(*op, self.kind(a)?, self.kind(b)?),
            ScalarExpr::Select(_, a, b) if self.kind(a)? == self.kind(b)? => self.kind(a)?,
            ScalarExpr::Select(_, a, b) => RegisterKind::widest(self.kind(a)?, self.kind(b)?),
            ScalarExpr::Cast(dtype, _) => RegisterKind::of_dtype(*dtype),
            ScalarExpr::Reduce { body, .. } => RegisterKind::widest(self.kind(body)?, RegisterKind::Int),
        })
    }
    fn operand(&self, arg: usize) -> Result<&InputShape, String> {
        self.args.get(arg).ok_or_else(|| format!("the definition reads input {arg} of {}", self.args.len()))
    }

    fn emit(&mut self, e: &ScalarExpr) -> Result<TypedRegister, String> {
        match e {
            ScalarExpr::Axis(axis) if *axis < self.rank => {
                Ok(TypedRegister { kind: RegisterKind::Int, at: *axis as u32 })
            }
            ScalarExpr::Axis(axis) => Err(format!("the definition uses axis {axis} of {}", self.rank)),
            ScalarExpr::Red(var) => match self.bound.iter().rev().find(|(v, _)| v == var) {
                Some(&(_, at)) => Ok(TypedRegister { kind: RegisterKind::Int, at }),
                None => Err(format!("reduction variable {var} is not bound")),
            },
            ScalarExpr::Int(value) => Ok(TypedRegister { kind: RegisterKind::Int, at: self.int(*value) }),
            ScalarExpr::Dim(dim) => {
                Ok(TypedRegister { kind: RegisterKind::Int, at: self.int(dim.eval(self.syms)) })
            }
            ScalarExpr::Float(value) => {
                Ok(TypedRegister { kind: RegisterKind::Float, at: self.float(*value) })
            }
            ScalarExpr::Load { arg, index } => self.load(*arg, index),
            ScalarExpr::Unary(op, a) => self.unary(*op, a),
            ScalarExpr::Binary(op, a, b) => self.binary(*op, a, b),
            ScalarExpr::Select(c, a, b) => self.select(e, c, a, b),
            ScalarExpr::Cast(dtype, a) => self.cast(*dtype, a),
            ScalarExpr::Reduce { op, var, extent, body } => {
                self.reduce(e, *op, *var, extent.eval(self.syms), body)
            }
        }
    }

    fn load(&mut self, arg: usize, index: &[ScalarExpr]) -> Result<TypedRegister, String> {
        let operand = self.operand(arg)?.clone();
        if operand.dims.len() != index.len() {
            return Err(format!("input {arg} has {} axes, not {}", operand.dims.len(), index.len()));
        }
        let index = index.iter().map(|i| self.emit_int(i)).collect::<Result<Vec<_>, _>>()?;
        let dims = operand.dims.iter().map(|&d| d as i64).collect();
        let site = self.sites.len() as u32;
        self.sites.push(LoadSite { arg, index, dims });
        let dst = self.reg(RegisterKind::of_dtype(operand.dtype));
        self.code.push(match dst.kind {
            RegisterKind::Float => ScalarInstr::LoadFloat { dst: dst.at, site },
            RegisterKind::Bool | RegisterKind::Int => ScalarInstr::LoadInt { dst: dst.at, site },
        });
        Ok(dst)
    }
    fn emit_int(&mut self, e: &ScalarExpr) -> Result<u32, String> {
        match self.emit(e)? {
            TypedRegister { kind: RegisterKind::Float, .. } => {
                Err("a float in the place of an index or condition".into())
            }
            reg => Ok(reg.at),
        }
    }
    fn emit_as(&mut self, kind: RegisterKind, e: &ScalarExpr) -> Result<u32, String> {
        let reg = self.emit(e)?;
        if kind == RegisterKind::Float && reg.kind != RegisterKind::Float {
            let dst = self.float(0.0);
            self.code.push(ScalarInstr::ToFloat { dst, a: reg.at });
            return Ok(dst);
        }
        Ok(reg.at)
    }

    fn unary(&mut self, op: UnOp, a: &ScalarExpr) -> Result<TypedRegister, String> {
        let kind = RegisterKind::unary(op, self.kind(a)?);
        let a = self.emit_as(kind, a)?;
        let dst = self.reg(kind);
        if (kind, op) == (RegisterKind::Bool, UnOp::Not) {
            let one = self.int(1);
            self.code.push(ScalarInstr::IntBinary { op: BinOp::Xor, dst: dst.at, a, b: one });
            return Ok(dst);
        }
        let missing = || format!("{} of {kind:?} is not defined", op.name());
        self.code.push(match kind {
            RegisterKind::Float => {
                ScalarInstr::FloatUnary { f: scalar::float_unary(op).ok_or_else(missing)?, dst: dst.at, a }
            }
            RegisterKind::Bool | RegisterKind::Int => {
                ScalarInstr::IntUnary { f: scalar::int_unary(op).ok_or_else(missing)?, dst: dst.at, a }
            }
        });
        Ok(dst)
    }

    fn binary(&mut self, op: BinOp, a: &ScalarExpr, b: &ScalarExpr) -> Result<TypedRegister, String> {
        let (ka, kb) = (self.kind(a)?, self.kind(b)?);
        let (operands, result) = (RegisterKind::widest(ka, kb), RegisterKind::binary(op, ka, kb));
        let (a, b) = (self.emit_as(operands, a)?, self.emit_as(operands, b)?);
        let dst = self.reg(result);
        let code = match operands {
            RegisterKind::Bool | RegisterKind::Int => Some(ScalarInstr::IntBinary { op, dst: dst.at, a, b }),
            RegisterKind::Float if op.is_comparison() => {
                scalar::float_compare(op).map(|f| ScalarInstr::FloatCompare { f, dst: dst.at, a, b })
            }
            RegisterKind::Float => {
                scalar::float_binary(op).map(|f| ScalarInstr::FloatBinary { f, dst: dst.at, a, b })
            }
        };
        self.code.push(code.ok_or_else(|| format!("{} of floats is not defined", op.name()))?);
        Ok(dst)
    }

    fn select(
        &mut self,
        e: &ScalarExpr,
        c: &ScalarExpr,
        a: &ScalarExpr,
        b: &ScalarExpr,
    ) -> Result<TypedRegister, String> {
        let kind = self.kind(e)?;
        let dst = self.reg(kind);
        let c = self.emit_int(c)?;
        let to_else = self.code_position() as usize;
        self.code.push(ScalarInstr::JumpIfZero { a: c, to: 0 });
        let a = self.emit_as(dst.kind, a)?;
        self.copy(dst, a);
        let to_end = self.code_position() as usize;
        self.code.push(ScalarInstr::Jump { to: 0 });
        self.code[to_else] = ScalarInstr::JumpIfZero { a: c, to: self.code_position() };
        let b = self.emit_as(dst.kind, b)?;
        self.copy(dst, b);
        self.code[to_end] = ScalarInstr::Jump { to: self.code_position() };
        Ok(dst)
    }
    fn copy(&mut self, dst: TypedRegister, a: u32) {
        self.code.push(match dst.kind {
            RegisterKind::Float => ScalarInstr::MoveFloat { dst: dst.at, a },
            RegisterKind::Bool | RegisterKind::Int => ScalarInstr::MoveInt { dst: dst.at, a },
        });
    }

    fn cast(&mut self, dtype: DType, a: &ScalarExpr) -> Result<TypedRegister, String> {
        let a = self.emit(a)?;
        let dst = self.reg(RegisterKind::of_dtype(dtype));
        match (a.kind, dst.kind) {
            (RegisterKind::Float, RegisterKind::Float) => {
                self.code.push(ScalarInstr::Round { dtype, dst: dst.at, a: a.at })
            }
            (RegisterKind::Float, _) => self.code.push(ScalarInstr::ToInt { dtype, dst: dst.at, a: a.at }),
            (_, RegisterKind::Float) => {
                self.code.push(ScalarInstr::ToFloat { dst: dst.at, a: a.at });
                self.code.push(ScalarInstr::Round { dtype, dst: dst.at, a: dst.at });
            }
            (_, _) => self.code.push(ScalarInstr::Wrap { dtype, dst: dst.at, a: a.at }),
        }
        Ok(dst)
    }

    fn reduce(
        &mut self,
        e: &ScalarExpr,
        op: RedOp,
        var: u32,
        extent: i64,
        body: &ScalarExpr,
    ) -> Result<TypedRegister, String> {
        let (counter, extent, one, zero) = (self.int(0), self.int(extent), self.int(1), self.int(0));
        self.bound.push((var, counter));
        let kind = self.kind(e)?;
        let (acc, identity) = match (kind, op) {
            (RegisterKind::Float, _) => (self.float(0.0), self.float(op.identity())),
            (_, RedOp::Sum) => (self.int(0), self.int(0)),
            (_, RedOp::Max) => (self.int(0), self.int(i64::MIN)),
        };
        let acc = TypedRegister { kind, at: acc };
        self.copy(acc, identity);
        self.code.push(ScalarInstr::MoveInt { dst: counter, a: zero });
        let top = self.code_position() as usize;
        self.code.push(ScalarInstr::JumpUnlessLess { a: counter, b: extent, to: 0 });
        let value = self.emit_as(kind, body)?;
        let bin = op.bin();
        self.code.push(match scalar::float_binary(bin) {
            Some(f) if kind == RegisterKind::Float => {
                ScalarInstr::FloatBinary { f, dst: acc.at, a: acc.at, b: value }
            }
            _ => ScalarInstr::IntBinary { op: bin, dst: acc.at, a: acc.at, b: value },
        });
        self.code.push(ScalarInstr::IntBinary { op: BinOp::Add, dst: counter, a: counter, b: one });
        self.code.push(ScalarInstr::Jump { to: top as u32 });
        self.code[top] = ScalarInstr::JumpUnlessLess { a: counter, b: extent, to: self.code_position() };
        self.bound.pop();
        Ok(acc)
    }
}
