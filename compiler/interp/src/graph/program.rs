//! A compute definition compiled to a flat register program: the slow but complete way to evaluate one.
//!
//! Index expressions and integer elements live in `i64` registers, floats in `f64` registers. A bool is an integer 0
//! or 1. `Select` becomes jumps, so that the branch not taken is not evaluated.

use super::scalar;
use mlcc_ir::compute::{RedOp, Scalar};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::types::DType;

/// What an expression evaluates to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Bool,
    Int,
    Float,
}

impl Kind {
    pub fn of(dtype: DType) -> Kind {
        match dtype {
            DType::Bool => Kind::Bool,
            _ if dtype.is_int() => Kind::Int,
            _ => Kind::Float,
        }
    }
    /// Operands of two kinds meet in the wider one; arithmetic on bools is integer arithmetic.
    fn join(a: Kind, b: Kind) -> Kind {
        if a == Kind::Float || b == Kind::Float { Kind::Float } else { Kind::Int }
    }
    fn unary(op: UnOp, a: Kind) -> Kind {
        match op {
            UnOp::Not => a,
            UnOp::Neg | UnOp::Abs => Kind::join(a, a),
            _ => Kind::Float,
        }
    }
    fn binary(op: BinOp, a: Kind, b: Kind) -> Kind {
        match op {
            _ if op.is_comparison() => Kind::Bool,
            BinOp::And | BinOp::Or | BinOp::Xor if a == b => a,
            _ => Kind::join(a, b),
        }
    }
}

/// Concrete shape of an input.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    pub dims: Vec<usize>,
    pub dtype: DType,
}

/// A register of the file that its kind says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Reg {
    pub kind: Kind,
    pub at: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Code {
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
pub(super) struct Site {
    pub arg: usize,
    pub index: Vec<u32>,
    pub dims: Vec<i64>,
}

#[derive(Clone, Debug)]
pub(super) struct Program {
    pub code: Vec<Code>,
    pub sites: Vec<Site>,
    /// Registers before the first instruction: constants in place. The output indices come first.
    pub ints: Vec<i64>,
    pub floats: Vec<f64>,
    pub result: Reg,
}

impl Program {
    /// For an output of `rank` axes; the message says what is malformed.
    pub fn compile(
        scalar: &Scalar,
        rank: usize,
        args: &[Operand],
        syms: &SymValues,
    ) -> Result<Program, String> {
        let mut c = Compiler {
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
        Ok(Program { code: c.code, sites: c.sites, ints: c.ints, floats: c.floats, result })
    }
}

struct Compiler<'a> {
    args: &'a [Operand],
    syms: &'a SymValues,
    code: Vec<Code>,
    sites: Vec<Site>,
    ints: Vec<i64>,
    floats: Vec<f64>,
    rank: usize,
    /// Reduction variables in scope with their register.
    bound: Vec<(u32, u32)>,
}

impl Compiler<'_> {
    fn int(&mut self, value: i64) -> u32 {
        self.ints.push(value);
        self.ints.len() as u32 - 1
    }
    fn float(&mut self, value: f64) -> u32 {
        self.floats.push(value);
        self.floats.len() as u32 - 1
    }
    fn reg(&mut self, kind: Kind) -> Reg {
        let at = if kind == Kind::Float { self.float(0.0) } else { self.int(0) };
        Reg { kind, at }
    }
    fn here(&self) -> u32 {
        self.code.len() as u32
    }

    /// The kind that `emit` will give.
    fn kind(&self, e: &Scalar) -> Result<Kind, String> {
        Ok(match e {
            Scalar::Axis(_) | Scalar::Red(_) | Scalar::Int(_) | Scalar::Dim(_) => Kind::Int,
            Scalar::Float(_) => Kind::Float,
            Scalar::Load { arg, .. } => Kind::of(self.operand(*arg)?.dtype),
            Scalar::Unary(op, a) => Kind::unary(*op, self.kind(a)?),
            Scalar::Binary(op, a, b) => Kind::binary(*op, self.kind(a)?, self.kind(b)?),
            Scalar::Select(_, a, b) if self.kind(a)? == self.kind(b)? => self.kind(a)?,
            Scalar::Select(_, a, b) => Kind::join(self.kind(a)?, self.kind(b)?),
            Scalar::Cast(dtype, _) => Kind::of(*dtype),
            Scalar::Reduce { body, .. } => Kind::join(self.kind(body)?, Kind::Int),
        })
    }
    fn operand(&self, arg: usize) -> Result<&Operand, String> {
        self.args.get(arg).ok_or_else(|| format!("the definition reads input {arg} of {}", self.args.len()))
    }

    fn emit(&mut self, e: &Scalar) -> Result<Reg, String> {
        match e {
            Scalar::Axis(axis) if *axis < self.rank => Ok(Reg { kind: Kind::Int, at: *axis as u32 }),
            Scalar::Axis(axis) => Err(format!("the definition uses axis {axis} of {}", self.rank)),
            Scalar::Red(var) => match self.bound.iter().rev().find(|(v, _)| v == var) {
                Some(&(_, at)) => Ok(Reg { kind: Kind::Int, at }),
                None => Err(format!("reduction variable {var} is not bound")),
            },
            Scalar::Int(value) => Ok(Reg { kind: Kind::Int, at: self.int(*value) }),
            Scalar::Dim(dim) => Ok(Reg { kind: Kind::Int, at: self.int(dim.eval(self.syms)) }),
            Scalar::Float(value) => Ok(Reg { kind: Kind::Float, at: self.float(*value) }),
            Scalar::Load { arg, index } => self.load(*arg, index),
            Scalar::Unary(op, a) => self.unary(*op, a),
            Scalar::Binary(op, a, b) => self.binary(*op, a, b),
            Scalar::Select(c, a, b) => self.select(e, c, a, b),
            Scalar::Cast(dtype, a) => self.cast(*dtype, a),
            Scalar::Reduce { op, var, extent, body } => {
                self.reduce(e, *op, *var, extent.eval(self.syms), body)
            }
        }
    }

    fn load(&mut self, arg: usize, index: &[Scalar]) -> Result<Reg, String> {
        let operand = self.operand(arg)?.clone();
        if operand.dims.len() != index.len() {
            return Err(format!("input {arg} has {} axes, not {}", operand.dims.len(), index.len()));
        }
        let index = index.iter().map(|i| self.emit_int(i)).collect::<Result<Vec<_>, _>>()?;
        let dims = operand.dims.iter().map(|&d| d as i64).collect();
        let site = self.sites.len() as u32;
        self.sites.push(Site { arg, index, dims });
        let dst = self.reg(Kind::of(operand.dtype));
        self.code.push(match dst.kind {
            Kind::Float => Code::LoadFloat { dst: dst.at, site },
            Kind::Bool | Kind::Int => Code::LoadInt { dst: dst.at, site },
        });
        Ok(dst)
    }
    fn emit_int(&mut self, e: &Scalar) -> Result<u32, String> {
        match self.emit(e)? {
            Reg { kind: Kind::Float, .. } => Err("a float in the place of an index or condition".into()),
            reg => Ok(reg.at),
        }
    }
    fn emit_as(&mut self, kind: Kind, e: &Scalar) -> Result<u32, String> {
        let reg = self.emit(e)?;
        if kind == Kind::Float && reg.kind != Kind::Float {
            let dst = self.float(0.0);
            self.code.push(Code::ToFloat { dst, a: reg.at });
            return Ok(dst);
        }
        Ok(reg.at)
    }

    fn unary(&mut self, op: UnOp, a: &Scalar) -> Result<Reg, String> {
        let kind = Kind::unary(op, self.kind(a)?);
        let a = self.emit_as(kind, a)?;
        let dst = self.reg(kind);
        if (kind, op) == (Kind::Bool, UnOp::Not) {
            let one = self.int(1);
            self.code.push(Code::IntBinary { op: BinOp::Xor, dst: dst.at, a, b: one });
            return Ok(dst);
        }
        let missing = || format!("{} of {kind:?} is not defined", op.name());
        self.code.push(match kind {
            Kind::Float => {
                Code::FloatUnary { f: scalar::float_unary(op).ok_or_else(missing)?, dst: dst.at, a }
            }
            Kind::Bool | Kind::Int => {
                Code::IntUnary { f: scalar::int_unary(op).ok_or_else(missing)?, dst: dst.at, a }
            }
        });
        Ok(dst)
    }

    fn binary(&mut self, op: BinOp, a: &Scalar, b: &Scalar) -> Result<Reg, String> {
        let (ka, kb) = (self.kind(a)?, self.kind(b)?);
        let (operands, result) = (Kind::join(ka, kb), Kind::binary(op, ka, kb));
        let (a, b) = (self.emit_as(operands, a)?, self.emit_as(operands, b)?);
        let dst = self.reg(result);
        let code = match operands {
            Kind::Bool | Kind::Int => Some(Code::IntBinary { op, dst: dst.at, a, b }),
            Kind::Float if op.is_comparison() => {
                scalar::float_compare(op).map(|f| Code::FloatCompare { f, dst: dst.at, a, b })
            }
            Kind::Float => scalar::float_binary(op).map(|f| Code::FloatBinary { f, dst: dst.at, a, b }),
        };
        self.code.push(code.ok_or_else(|| format!("{} of floats is not defined", op.name()))?);
        Ok(dst)
    }

    fn select(&mut self, e: &Scalar, c: &Scalar, a: &Scalar, b: &Scalar) -> Result<Reg, String> {
        let kind = self.kind(e)?;
        let dst = self.reg(kind);
        let c = self.emit_int(c)?;
        let to_else = self.here() as usize;
        self.code.push(Code::JumpIfZero { a: c, to: 0 });
        let a = self.emit_as(dst.kind, a)?;
        self.copy(dst, a);
        let to_end = self.here() as usize;
        self.code.push(Code::Jump { to: 0 });
        self.code[to_else] = Code::JumpIfZero { a: c, to: self.here() };
        let b = self.emit_as(dst.kind, b)?;
        self.copy(dst, b);
        self.code[to_end] = Code::Jump { to: self.here() };
        Ok(dst)
    }
    fn copy(&mut self, dst: Reg, a: u32) {
        self.code.push(match dst.kind {
            Kind::Float => Code::MoveFloat { dst: dst.at, a },
            Kind::Bool | Kind::Int => Code::MoveInt { dst: dst.at, a },
        });
    }

    fn cast(&mut self, dtype: DType, a: &Scalar) -> Result<Reg, String> {
        let a = self.emit(a)?;
        let dst = self.reg(Kind::of(dtype));
        match (a.kind, dst.kind) {
            (Kind::Float, Kind::Float) => self.code.push(Code::Round { dtype, dst: dst.at, a: a.at }),
            (Kind::Float, _) => self.code.push(Code::ToInt { dtype, dst: dst.at, a: a.at }),
            (_, Kind::Float) => {
                self.code.push(Code::ToFloat { dst: dst.at, a: a.at });
                self.code.push(Code::Round { dtype, dst: dst.at, a: dst.at });
            }
            (_, _) => self.code.push(Code::Wrap { dtype, dst: dst.at, a: a.at }),
        }
        Ok(dst)
    }

    fn reduce(&mut self, e: &Scalar, op: RedOp, var: u32, extent: i64, body: &Scalar) -> Result<Reg, String> {
        let (counter, extent, one, zero) = (self.int(0), self.int(extent), self.int(1), self.int(0));
        self.bound.push((var, counter));
        let kind = self.kind(e)?;
        let (acc, identity) = match (kind, op) {
            (Kind::Float, _) => (self.float(0.0), self.float(op.identity())),
            (_, RedOp::Sum) => (self.int(0), self.int(0)),
            (_, RedOp::Max) => (self.int(0), self.int(i64::MIN)),
        };
        let acc = Reg { kind, at: acc };
        self.copy(acc, identity);
        self.code.push(Code::MoveInt { dst: counter, a: zero });
        let top = self.here() as usize;
        self.code.push(Code::JumpUnlessLess { a: counter, b: extent, to: 0 });
        let value = self.emit_as(kind, body)?;
        let bin = op.bin();
        self.code.push(match scalar::float_binary(bin) {
            Some(f) if kind == Kind::Float => Code::FloatBinary { f, dst: acc.at, a: acc.at, b: value },
            _ => Code::IntBinary { op: bin, dst: acc.at, a: acc.at, b: value },
        });
        self.code.push(Code::IntBinary { op: BinOp::Add, dst: counter, a: counter, b: one });
        self.code.push(Code::Jump { to: top as u32 });
        self.code[top] = Code::JumpUnlessLess { a: counter, b: extent, to: self.here() };
        self.bound.pop();
        Ok(acc)
    }
}
