//! Loads and stores: contiguous vectors, gathers and scatters, masks.
//!
//! Alignment is stated as that of one element; LLVM raises it where the alignment of the buffer and the form
//! of the index prove more.

use super::emit::{EmitResult, LlvmValue, vector_type};
use super::kernel::KernelEmitter;
use crate::error::EmitError;
use inkwell::IntPredicate;
use inkwell::types::BasicTypeEnum;
use inkwell::values::{InstructionOpcode as Op, PointerValue};
use mlcc_ir::instr::InstrSpelling;
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

/// The layout of the lanes of an access in memory.
enum LaneElements<'c> {
    /// Contiguous elements from this one on.
    Contiguous(LlvmValue<'c>),
    /// Element numbers, lane by lane.
    Scattered(Vec<LlvmValue<'c>>),
}

impl<'c> KernelEmitter<'_, 'c> {
    pub fn load_expr(
        &mut self,
        buf: BufId,
        index: ExprId,
        mask: Option<ExprId>,
    ) -> EmitResult<LlvmValue<'c>> {
        let lanes = self.kernel.ty(index).lanes;
        let dtype = self.kernel.bufs[buf].dtype;
        let mask = mask.map(|m| self.expr(m)).transpose()?;
        let elements = self.elements(index, lanes)?;
        let raw = match (elements, mask) {
            (LaneElements::Contiguous(at), None) => {
                let ty = super::emit::with_lanes(self.e.cell_type(dtype)?, lanes)?;
                let address = self.address(buf, at, true)?;
                self.e.load(ty, address, cell_bytes(dtype)?)?
            }
            (LaneElements::Contiguous(at), Some(mask)) => self.masked_load(buf, at, mask, lanes)?,
            (LaneElements::Scattered(at), None) => self.gather(buf, &at)?,
            (LaneElements::Scattered(at), Some(mask)) => self.masked_gather(buf, &at, mask)?,
        };
        self.to_register(raw, dtype)
    }

    pub(super) fn store_stmt(
        &mut self,
        buf: BufId,
        index: ExprId,
        value: ExprId,
        mask: Option<ExprId>,
    ) -> EmitResult<()> {
        let lanes = self.kernel.ty(index).lanes;
        let dtype = self.kernel.bufs[buf].dtype;
        let value = self.expr(value)?;
        let value = self.to_memory(value, dtype)?;
        let mask = mask.map(|m| self.expr(m)).transpose()?;
        match (self.elements(index, lanes)?, mask) {
            (LaneElements::Contiguous(at), None) => {
                let address = self.address(buf, at, true)?;
                self.e.store(value, address, cell_bytes(dtype)?)
            }
            (LaneElements::Contiguous(at), Some(mask)) => self.masked_store(buf, at, value, mask),
            (LaneElements::Scattered(at), None) => {
                for (lane, at) in at.into_iter().enumerate() {
                    let one = self.e.extract(value, lane as u32)?;
                    let address = self.address(buf, at, true)?;
                    self.e.store(one, address, cell_bytes(dtype)?)?;
                }
                Ok(())
            }
            (LaneElements::Scattered(at), Some(mask)) => self.masked_scatter(buf, &at, value, mask),
        }
    }

    /// Prefetches the cache line that a load would read, or reads it for nothing.
    pub(super) fn hint(&mut self, spelling: InstrSpelling, load: ExprId) -> EmitResult<()> {
        let Expr::Load { buf, index, .. } = *self.kernel.exprs.expr(load) else {
            return Err(EmitError::new("a hint about something that is not a load"));
        };
        let index = self.expr(index)?;
        let reads = matches!(spelling, InstrSpelling::Read);
        let address = self.address(buf, index, reads)?;
        if reads {
            return self.e.read_byte(address);
        }
        // For reading, into all levels, data.
        let number = |n: u64| self.e.ctx.i32_type().const_int(n, false).into();
        let args = [address.into(), number(0), number(3), number(1)];
        self.e.intrinsic("llvm.prefetch", &[address.get_type().into()], &args).map(|_| ())
    }

    pub(super) fn address(
        &self,
        buf: BufId,
        index: LlvmValue<'c>,
        inside: bool,
    ) -> EmitResult<PointerValue<'c>> {
        let cell = self.e.cell_type(self.kernel.bufs[buf].dtype)?;
        self.e.element(self.buf(buf)?, cell, index, inside)
    }

    // ---- elements

    fn elements(&mut self, index: ExprId, lanes: u32) -> EmitResult<LaneElements<'c>> {
        if lanes == 1 {
            return Ok(LaneElements::Contiguous(self.expr(index)?));
        }
        if let Some(base) = self.contiguous(index)? {
            return Ok(LaneElements::Contiguous(base));
        }
        let scattered: EmitResult<Vec<_>> = (0..lanes).map(|l| self.lane(index, l)).collect();
        Ok(LaneElements::Scattered(scattered?))
    }

    /// The first element, if the lanes of `index` count up by one: a ramp of stride 1, also plus or minus a
    /// splat.
    fn contiguous(&mut self, index: ExprId) -> EmitResult<Option<LlvmValue<'c>>> {
        let exprs = &self.kernel.exprs;
        match *exprs.expr(index) {
            Expr::Ramp { base, stride } if exprs.as_int(stride) == Some(1) => Ok(Some(self.expr(base)?)),
            Expr::Binary(op @ (BinOp::Add | BinOp::Sub), a, b) => {
                let splat = |e: ExprId| match *exprs.expr(e) {
                    Expr::Splat(x) => Some(x),
                    _ => None,
                };
                let (ramp, offset) = match (splat(a), splat(b)) {
                    (_, Some(x)) => (a, x),
                    (Some(x), _) if op == BinOp::Add => (b, x),
                    _ => return Ok(None),
                };
                let Some(base) = self.contiguous(ramp)? else { return Ok(None) };
                let offset = self.expr(offset)?;
                let op = if op == BinOp::Add { Op::Add } else { Op::Sub };
                Ok(Some(self.e.op(op, base, offset)?))
            }
            _ => Ok(None),
        }
    }

    /// One lane of an index; ramps and splats are computed as scalars.
    fn lane(&mut self, index: ExprId, lane: u32) -> EmitResult<LlvmValue<'c>> {
        match *self.kernel.exprs.expr(index) {
            Expr::Ramp { base, stride } => {
                let (base, stride) = (self.expr(base)?, self.expr(stride)?);
                let step = self.e.mul(stride, self.e.i64(i64::from(lane)))?;
                self.e.add(base, step)
            }
            Expr::Splat(x) => self.expr(x),
            _ => {
                let all = self.expr(index)?;
                self.e.extract(all, lane)
            }
        }
    }

    // ---- unmasked gather

    fn gather(&mut self, buf: BufId, at: &[LlvmValue<'c>]) -> EmitResult<LlvmValue<'c>> {
        let dtype = self.kernel.bufs[buf].dtype;
        let cell = self.e.cell_type(dtype)?;
        let mut all = vector_type(cell, at.len() as u32)?.get_poison();
        for (lane, &at) in at.iter().enumerate() {
            let address = self.address(buf, at, true)?;
            let one = self.e.load(cell, address, cell_bytes(dtype)?)?;
            all = self.e.insert(all, one, lane as u32)?;
        }
        Ok(all.into())
    }

    // ---- masks; one lane is handled as a vector of one

    fn masked_load(
        &mut self,
        buf: BufId,
        at: LlvmValue<'c>,
        mask: LlvmValue<'c>,
        lanes: u32,
    ) -> EmitResult<LlvmValue<'c>> {
        let dtype = self.kernel.bufs[buf].dtype;
        let ty = vector_type(self.e.cell_type(dtype)?, lanes)?;
        let address = self.address(buf, at, false)?;
        let mask: LlvmValue<'c> = self.e.as_vector(mask)?.into();
        let overload = [ty.into(), address.get_type().into()];
        let tail = [mask, ty.const_zero().into()];
        let loaded = self.masked_intrinsic("llvm.masked.load", &overload, &[address.into()], dtype, &tail)?;
        let loaded = loaded.ok_or_else(|| EmitError::new("masked load without result"))?;
        self.e.unwrap_one(loaded.into_vector_value())
    }

    fn masked_store(
        &mut self,
        buf: BufId,
        at: LlvmValue<'c>,
        value: LlvmValue<'c>,
        mask: LlvmValue<'c>,
    ) -> EmitResult<()> {
        let dtype = self.kernel.bufs[buf].dtype;
        let value = self.e.as_vector(value)?;
        let address = self.address(buf, at, false)?;
        let mask: LlvmValue<'c> = self.e.as_vector(mask)?.into();
        let overload = [value.get_type().into(), address.get_type().into()];
        let head = [value.into(), address.into()];
        self.masked_intrinsic("llvm.masked.store", &overload, &head, dtype, &[mask]).map(|_| ())
    }

    fn masked_gather(
        &mut self,
        buf: BufId,
        at: &[LlvmValue<'c>],
        mask: LlvmValue<'c>,
    ) -> EmitResult<LlvmValue<'c>> {
        let dtype = self.kernel.bufs[buf].dtype;
        let addresses = self.addresses(buf, at)?;
        let ty = vector_type(self.e.cell_type(dtype)?, at.len() as u32)?;
        let overload = [ty.into(), addresses.get_type()];
        let tail = [mask, ty.const_zero().into()];
        self.masked_intrinsic("llvm.masked.gather", &overload, &[addresses], dtype, &tail)?
            .ok_or_else(|| EmitError::new("masked gather without result"))
    }

    fn masked_scatter(
        &mut self,
        buf: BufId,
        at: &[LlvmValue<'c>],
        value: LlvmValue<'c>,
        mask: LlvmValue<'c>,
    ) -> EmitResult<()> {
        let dtype = self.kernel.bufs[buf].dtype;
        let addresses = self.addresses(buf, at)?;
        let overload = [value.get_type(), addresses.get_type()];
        self.masked_intrinsic("llvm.masked.scatter", &overload, &[value, addresses], dtype, &[mask])
            .map(|_| ())
    }

    fn addresses(&mut self, buf: BufId, at: &[LlvmValue<'c>]) -> EmitResult<LlvmValue<'c>> {
        let pointer: BasicTypeEnum<'c> = self.buf(buf)?.get_type().into();
        let mut all = vector_type(pointer, at.len() as u32)?.get_poison();
        for (lane, &at) in at.iter().enumerate() {
            let address = self.address(buf, at, false)?;
            all = self.e.insert(all, address.into(), lane as u32)?;
        }
        Ok(all.into())
    }

    /// Calls a masked memory intrinsic. Up to LLVM 21 the alignment is an argument between `head` and `tail`.
    fn masked_intrinsic(
        &self,
        name: &str,
        overload: &[BasicTypeEnum<'c>],
        head: &[LlvmValue<'c>],
        dtype: DType,
        tail: &[LlvmValue<'c>],
    ) -> EmitResult<Option<LlvmValue<'c>>> {
        let align = self.e.i32(cell_bytes(dtype)?);
        let middle: &[LlvmValue<'c>] = if cfg!(feature = "llvm22") { &[] } else { &[align] };
        let args: Vec<LlvmValue<'c>> = [head, middle, tail].concat();
        self.e.intrinsic(name, overload, &args)
    }

    // ---- bool is a byte in memory

    pub(super) fn to_register(&self, raw: LlvmValue<'c>, dtype: DType) -> EmitResult<LlvmValue<'c>> {
        match dtype {
            DType::Bool => self.e.icmp(IntPredicate::NE, raw, raw.get_type().const_zero()),
            _ => Ok(raw),
        }
    }

    pub(super) fn to_memory(&self, value: LlvmValue<'c>, dtype: DType) -> EmitResult<LlvmValue<'c>> {
        match (dtype, value) {
            (DType::Bool, LlvmValue::VectorValue(v)) => {
                let bytes = self.e.ctx.i8_type().vec_type(v.get_type().get_size());
                self.e.cast(Op::ZExt, value, bytes.into())
            }
            (DType::Bool, _) => self.e.cast(Op::ZExt, value, self.e.ctx.i8_type().into()),
            _ => Ok(value),
        }
    }
}

fn cell_bytes(dtype: DType) -> EmitResult<u32> {
    let bytes = dtype.bytes().ok_or_else(|| EmitError(format!("{dtype} has no elements in memory")))?;
    Ok(bytes as u32)
}
