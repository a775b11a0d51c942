//! Random expressions of a requested type.

use super::{INPUT, INTS, KernelGenerator};
use crate::instr::{InstrId, InstrSemantics};
use crate::kernel::*;
use crate::types::DType;

impl KernelGenerator {
    pub(super) fn leaf(&mut self, ty: ExprType) -> ExprId {
        let fits: Vec<ExprId> =
            self.vars.iter().chain(&self.loops).copied().filter(|v| self.kb.ty(*v) == ty).collect();
        let scalar = ExprType::scalar(ty.dtype);
        match self.rng.below(4) {
            0 if !fits.is_empty() => self.rng.pick(&fits),
            1 | 2 => match self.load(ty) {
                Some(value) => value,
                None if self.rng.chance(4) => self.constant(ty),
                None => self.converted(ty),
            },
            3 if ty.lanes > 1 => {
                let value = self.leaf(scalar);
                self.kb.splat(value, ty.lanes)
            }
            _ => self.constant(ty),
        }
    }

    /// An input of another type, converted.
    fn converted(&mut self, ty: ExprType) -> ExprId {
        let buf = self.rng.pick(&self.inputs.clone());
        let from = self.kb.kernel().bufs[buf].dtype;
        match self.load(ExprType::vector(from, ty.lanes)) {
            Some(value) => self.kb.cast(value, ty.dtype),
            None => self.constant(ty),
        }
    }

    pub(super) fn constant(&mut self, ty: ExprType) -> ExprId {
        let scalar = match ty.dtype {
            DType::Bool => self.kb.int_of(self.rng.below(2) as i64, DType::Bool),
            d if d.is_float() => {
                let value = self.rng.pick(&[0.0, 1.0, -1.5, 0.1, 3.25, -0.007, 250.0, 1e-6]);
                self.kb.float_of(value, d)
            }
            d => {
                let value = self.rng.pick(&[0, 1, 2, 3, 7, 100, 127]);
                let negative = d.is_signed() && self.rng.chance(3);
                self.kb.int_of(if negative { -value } else { value }, d)
            }
        };
        self.kb.splat(scalar, ty.lanes)
    }

    pub(super) fn instr(&mut self) -> Option<ExprId> {
        let all: Vec<InstrId> =
            InstrId::all().filter(|i| matches!(i.def().meaning, InstrSemantics::Expr(_))).collect();
        let instr = self.rng.pick(&all);
        let args: Vec<ExprId> = instr.def().args.iter().map(|ty| self.expr(*ty, 1)).collect();
        Some(self.kb.instr(instr, args))
    }

    pub(super) fn expr(&mut self, ty: ExprType, depth: u32) -> ExprId {
        if depth == 0 || self.rng.chance(6) {
            return self.leaf(ty);
        }
        let depth = depth - 1;
        match self.rng.below(8) {
            0 => {
                let (cond, a, b) = (
                    self.expr(ExprType::vector(DType::Bool, ty.lanes), depth),
                    self.expr(ty, depth),
                    self.expr(ty, depth),
                );
                self.kb.select(cond, a, b)
            }
            1 => self.moved(ty, depth),
            2 | 3 => {
                let from = ExprType::vector(self.dtype(), ty.lanes);
                let a = self.expr(from, depth);
                self.kb.cast(a, ty.dtype)
            }
            _ if ty.dtype == DType::Bool => self.bool_expr(ty, depth),
            _ if ty.dtype == DType::F32 => self.float_expr(ty, depth),
            _ if ty.dtype.is_int() => self.int_expr(ty, depth),
            _ => {
                let a = self.expr(ExprType::vector(DType::F32, ty.lanes), depth);
                self.kb.cast(a, ty.dtype)
            }
        }
    }

    /// Values that are only moved between lanes.
    fn moved(&mut self, ty: ExprType, depth: u32) -> ExprId {
        match self.rng.below(3) {
            0 if ty.dtype.is_int() && ty.lanes > 1 => {
                let (base, stride) =
                    (self.expr(ExprType::scalar(ty.dtype), depth), self.constant(ExprType::scalar(ty.dtype)));
                self.kb.ramp(base, stride, ty.lanes)
            }
            1 if ty.dtype.is_int() => {
                let bytes = ty.dtype.bytes().unwrap_or(1) as u32 * ty.lanes;
                // Loads need as many elements as there are lanes.
                let fits = |d: &DType| {
                    let size = d.bytes().unwrap_or(1) as u32;
                    bytes.is_multiple_of(size) && i64::from(bytes / size) <= INPUT
                };
                let from: Vec<DType> = INTS.into_iter().filter(fits).collect();
                let from = self.rng.pick(&from);
                let lanes = bytes / from.bytes().unwrap_or(1) as u32;
                let a = self.expr(ExprType::vector(from, lanes), depth.min(1));
                self.kb.bitcast(a, ty)
            }
            _ => {
                let from = ExprType::vector(ty.dtype, self.lanes());
                let a = self.expr(from, depth);
                let b = if self.rng.chance(2) { Some(self.expr(from, depth)) } else { None };
                let available = from.lanes * if b.is_some() { 2 } else { 1 };
                let picks = (0..ty.lanes).map(|_| self.rng.below(available as usize) as u32).collect();
                self.kb.shuffle(a, b, picks)
            }
        }
    }

    fn bool_expr(&mut self, ty: ExprType, depth: u32) -> ExprId {
        if self.rng.chance(3) {
            let (a, b) = (self.expr(ty, depth), self.expr(ty, depth));
            let op = self.rng.pick(&[BinOp::And, BinOp::Or, BinOp::Xor, BinOp::Eq, BinOp::Ne]);
            return if self.rng.chance(4) { self.kb.unary(UnOp::Not, a) } else { self.kb.binary(op, a, b) };
        }
        let dtype = if self.rng.chance(2) { DType::F32 } else { self.rng.pick(&INTS) };
        let of = ExprType::vector(dtype, ty.lanes);
        let (a, b) = (self.expr(of, depth), self.expr(of, depth));
        let op = self.rng.pick(&[BinOp::Lt, BinOp::Le, BinOp::Eq, BinOp::Ne]);
        self.kb.binary(op, a, b)
    }

    fn int_expr(&mut self, ty: ExprType, depth: u32) -> ExprId {
        let a = self.expr(ty, depth);
        let bits = ty.dtype.bytes().unwrap_or(1) * 8;
        match self.rng.below(8) {
            0 => {
                let op = self.rng.pick(&[UnOp::Neg, UnOp::Abs, UnOp::Not]);
                self.kb.unary(op, a)
            }
            1 => {
                let by = self.kb.int_of(1 + self.rng.below(100) as i64, ty.dtype);
                let op = self.rng.pick(&[BinOp::Div, BinOp::Rem]);
                self.kb.binary(op, a, by)
            }
            2 => {
                let by = self.kb.int_of(self.rng.below(bits) as i64, ty.dtype);
                let op = self.rng.pick(&[BinOp::Shl, BinOp::Shr]);
                self.kb.binary(op, a, by)
            }
            _ => {
                let b = self.expr(ty, depth);
                let op = self.rng.pick(&[
                    BinOp::Add,
                    BinOp::Sub,
                    BinOp::Mul,
                    BinOp::Min,
                    BinOp::Max,
                    BinOp::And,
                    BinOp::Or,
                    BinOp::Xor,
                ]);
                self.kb.binary(op, a, b)
            }
        }
    }

    fn float_expr(&mut self, ty: ExprType, depth: u32) -> ExprId {
        let a = self.expr(ty, depth);
        match self.rng.below(8) {
            0 => {
                let op = self.rng.pick(&[UnOp::Neg, UnOp::Abs, UnOp::Sqrt, UnOp::Floor, UnOp::Round]);
                self.kb.unary(op, a)
            }
            1 if self.options.math => {
                let all: Vec<UnOp> = UnOp::ALL.into_iter().filter(|op| !op.is_primitive()).collect();
                let op = self.rng.pick(&all);
                self.kb.unary(op, a)
            }
            2 => {
                let by = self.rng.pick(&[3.0, -0.7, 16.0]);
                let by = self.kb.float(by);
                self.kb.div(a, by)
            }
            3 if self.options.fma => {
                let (b, c) = (self.expr(ty, depth), self.expr(ty, depth));
                self.kb.fma(a, b, c)
            }
            _ => {
                let b = self.expr(ty, depth);
                let op = self.rng.pick(&[BinOp::Add, BinOp::Sub, BinOp::Mul, BinOp::Min, BinOp::Max]);
                self.kb.binary(op, a, b)
            }
        }
    }
}
