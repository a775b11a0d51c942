//! Expressions: dispatch, constants, splats, ramps and bitcasts.

use super::emit::ClifKernelEmitter;
use super::instr::LaneOperation;
use super::local::fold;
use super::value::{ClifValue, LaneForm, scalar_type};
use crate::error::CodegenError;
use cranelift_codegen::ir::{InstBuilder, Type, Value, types};
use mlcc_ir::kernel::{BinOp, Expr, ExprId, ExprType, Literal};
use mlcc_ir::types::DType;

impl ClifKernelEmitter<'_, '_> {
    /// The value of an expression, computed once per statement.
    pub fn expr(&mut self, id: ExprId) -> Result<ClifValue, CodegenError> {
        if let Some(val) = self.cache.get(&id) {
            return Ok(val.clone());
        }
        let val = self.compute(id)?;
        self.cache.insert(id, val.clone());
        Ok(val)
    }

    fn compute(&mut self, id: ExprId) -> Result<ClifValue, CodegenError> {
        let kernel = self.kernel;
        let ty = kernel.ty(id);
        if ty.lanes == 0 || scalar_type(ty.dtype).is_none() {
            return self.unsupported(format!("an expression of type {ty}"));
        }
        match kernel.exprs.expr(id) {
            Expr::Const(literal) => self.literal(*literal, ty.dtype),
            Expr::Var(var) => match self.vars.get(var) {
                Some(val) => Ok(val.clone()),
                None => self.unsupported(format!("variable {} is used out of scope", kernel.vars[*var].name)),
            },
            Expr::Load { buf, index, mask } => self.load(*buf, *index, *mask, ty),
            Expr::Unary(op, a) => {
                let a = self.expr(*a)?;
                self.unary(*op, &a, ty)
            }
            Expr::Binary(op, a, b) => self.binary_expr(*op, *a, *b),
            Expr::Fma(a, b, c) => {
                let (a, b, c) = (self.expr(*a)?, self.expr(*b)?, self.expr(*c)?);
                self.fma(&a, &b, &c, ty)
            }
            Expr::Cast(a) => {
                let from = kernel.ty(*a);
                let a = self.expr(*a)?;
                self.cast(&a, from, ty)
            }
            Expr::Bitcast(a) => {
                let from = kernel.ty(*a);
                let a = self.expr(*a)?;
                Ok(self.bitcast(&a, from, ty))
            }
            Expr::Select(cond, a, b) => {
                let (cond, a, b) = (self.expr(*cond)?, self.expr(*a)?, self.expr(*b)?);
                Ok(self.select(&cond, &a, &b, ty))
            }
            Expr::Ramp { base, stride } => {
                let (base, stride) = (self.expr(*base)?, self.expr(*stride)?);
                Ok(self.ramp(base.single(), stride.single(), ty))
            }
            Expr::Splat(a) => match kernel.exprs.expr(*a) {
                Expr::Const(literal) => self.splat_literal(*literal, ty),
                _ => {
                    let a = self.expr(*a)?.single();
                    let form = self.form(ty);
                    Ok(self.broadcast(form, ty.lanes, a))
                }
            },
            Expr::Shuffle { a, b, lanes } => {
                let from = kernel.ty(*a);
                let a = self.expr(*a)?;
                let b = b.map(|b| self.expr(b)).transpose()?;
                Ok(self.shuffle(&a, b.as_ref(), from, lanes))
            }
            Expr::Instr(instr, args) => match LaneOperation::for_instr(*instr, self.machine) {
                Some(pattern) => {
                    let args: Vec<ClifValue> =
                        args.iter().map(|a| self.expr(*a)).collect::<Result<_, _>>()?;
                    let form = self.form(ty);
                    Ok(self.dot_product(pattern, instr.def(), &args, form))
                }
                None => self.unsupported(format!("{} has no expansion on a CPU", instr.def().name)),
            },
        }
    }

    /// The bits of a literal, zero-extended.
    fn literal_bits(&self, literal: Literal, dtype: DType) -> Option<u64> {
        let f = literal.as_f64();
        let int = match literal {
            Literal::Int(i) => i,
            Literal::Float(_) => f as i64,
        };
        let bytes = dtype.bytes()?;
        Some(match dtype {
            DType::F32 => u64::from((f as f32).to_bits()),
            DType::F16 => u64::from(half::f16::from_f64(f).to_bits()),
            DType::BF16 => u64::from(half::bf16::from_f64(f).to_bits()),
            DType::Bool => u64::from(int != 0),
            _ if bytes < 8 => int as u64 & ((1 << (8 * bytes)) - 1),
            _ => int as u64,
        })
    }

    fn literal(&mut self, literal: Literal, dtype: DType) -> Result<ClifValue, CodegenError> {
        let (Some(bits), Some(ty)) = (self.literal_bits(literal, dtype), scalar_type(dtype)) else {
            return self.unsupported(format!("a literal of {dtype}"));
        };
        let value = match ty {
            types::F32 => self.fb.ins().f32const(f32::from_bits(bits as u32)),
            _ => self.fb.ins().iconst(ty, bits as i64),
        };
        let known = (dtype == DType::I64).then_some(bits as i64);
        Ok(ClifValue { known, ..ClifValue::scalar(value) })
    }

    fn splat_literal(&mut self, literal: Literal, ty: ExprType) -> Result<ClifValue, CodegenError> {
        match (self.form(ty), self.literal_bits(literal, ty.dtype)) {
            (LaneForm::Vectors(vector), Some(bits)) => {
                let part = self.vector_splat_const(vector, bits as i64);
                let n = ty.lanes / vector.lane_count();
                Ok(ClifValue::new(LaneForm::Vectors(vector), vec![part; n as usize]))
            }
            (form, _) => {
                let scalar = self.literal(literal, ty.dtype)?.single();
                Ok(self.broadcast(form, ty.lanes, scalar))
            }
        }
    }

    fn binary_expr(&mut self, op: BinOp, a: ExprId, b: ExprId) -> Result<ClifValue, CodegenError> {
        let ty = self.kernel.ty(a);
        let left = self.expr(a)?;
        // Vector shifts take one amount for all lanes.
        if let (BinOp::Shl | BinOp::Shr, LaneForm::Vectors(_), &Expr::Splat(amount)) =
            (op, left.form, self.kernel.exprs.expr(b))
        {
            let amount = self.expr(amount)?.single();
            let parts = left.parts.iter().map(|&p| self.shift(op, p, amount, ty.dtype)).collect();
            return Ok(ClifValue::new(left.form, parts));
        }
        let right = self.expr(b)?;
        let mut val = self.binary(op, &left, &right, ty)?;
        if ty == ExprType::I64 {
            val.known = left.known.zip(right.known).and_then(|(a, b)| fold(op, a, b));
        }
        if let Some(known) = val.known {
            val.parts = vec![self.iconst(known)];
        }
        Ok(val)
    }

    fn ramp(&mut self, base: Value, stride: Value, ty: ExprType) -> ClifValue {
        let form = self.form(ty);
        match form {
            LaneForm::Vectors(vector @ (types::I32X4 | types::I16X8)) => {
                let (base, stride) = (self.fb.ins().splat(vector, base), self.fb.ins().splat(vector, stride));
                let per_part = vector.lane_count();
                let parts = (0..ty.lanes / per_part)
                    .map(|i| {
                        let steps = self.counting(vector, i * per_part);
                        let offsets = self.fb.ins().imul(stride, steps);
                        self.fb.ins().iadd(base, offsets)
                    })
                    .collect();
                ClifValue::new(form, parts)
            }
            _ => {
                let lane_type = self.fb.func.dfg.value_type(base);
                let mut lanes = Vec::with_capacity(ty.lanes as usize);
                for lane in 0..i64::from(ty.lanes) {
                    let steps = match lane_type {
                        types::I8 => lane & 0xff,
                        _ => lane,
                    };
                    let steps = self.fb.ins().iconst(lane_type, steps);
                    let offset = self.fb.ins().imul(stride, steps);
                    lanes.push(self.fb.ins().iadd(base, offset));
                }
                self.assemble(form, lanes)
            }
        }
    }

    /// `first, first + 1, ...`
    fn counting(&mut self, vector: Type, first: u32) -> Value {
        let width = vector.lane_type().bytes() as usize;
        let mut bytes = [0; 16];
        for (i, lane) in bytes.chunks_mut(width).enumerate() {
            lane.copy_from_slice(&(first + i as u32).to_le_bytes()[..width]);
        }
        self.vector_const(vector, bytes)
    }

    fn bitcast(&mut self, value: &ClifValue, from: ExprType, to: ExprType) -> ClifValue {
        let is_bool = from.dtype == DType::Bool || to.dtype == DType::Bool;
        match (value.form, self.form(to)) {
            (LaneForm::Vectors(_), LaneForm::Vectors(vector)) if !is_bool => {
                let parts = value.parts.iter().map(|&p| self.as_type(p, vector)).collect();
                ClifValue::new(LaneForm::Vectors(vector), parts)
            }
            (LaneForm::Scalars, LaneForm::Scalars) if !is_bool && from.lanes == to.lanes => {
                let ty = scalar_type(to.dtype).unwrap_or(types::I8);
                let parts = value.parts.iter().map(|&p| self.as_type(p, ty)).collect();
                ClifValue::new(LaneForm::Scalars, parts)
            }
            _ => self.bitcast_through_memory(value, from, to),
        }
    }
}
