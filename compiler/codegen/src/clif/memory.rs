//! Loads and stores: contiguous runs, gathers and scatters, masks, and buffers kept in registers.

use super::emit::{ClifKernelEmitter, ElementStorage};
use super::local::RegisterPromotion;
use super::value::{ClifValue, LaneForm, scalar_type};
use crate::error::CodegenError;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{BlockArg, InstBuilder, MemFlagsData, Type, Value, types};
use cranelift_frontend::Variable;
use mlcc_ir::kernel::{BinOp, BufId, Expr, ExprId, ExprType};
use mlcc_ir::types::DType;

/// The start of an access: `address + offset` bytes.
#[derive(Clone, Copy)]
struct AccessAddress {
    address: Value,
    offset: i32,
}

/// The bytes an access touches.
enum AccessTarget {
    /// Consecutive elements.
    Run(AccessAddress),
    /// One address per lane.
    Lanes(Vec<AccessAddress>),
}

impl ClifKernelEmitter<'_, '_> {
    fn storage(&self, buf: BufId) -> Result<ElementStorage, CodegenError> {
        match self.storages.get(&buf) {
            Some(storage) => Ok(storage.clone()),
            None => self.unsupported(format!("buffer {} is used out of scope", self.kernel.bufs[buf].name)),
        }
    }

    fn element(&self, buf: BufId) -> Result<Type, CodegenError> {
        let decl = &self.kernel.bufs[buf];
        match scalar_type(decl.dtype) {
            Some(ty) => Ok(ty),
            None => self.unsupported(format!("buffer {} has elements of {}", decl.name, decl.dtype)),
        }
    }

    pub fn load(
        &mut self,
        buf: BufId,
        index: ExprId,
        mask: Option<ExprId>,
        ty: ExprType,
    ) -> Result<ClifValue, CodegenError> {
        let storage = self.storage(buf)?;
        let mask = mask.map(|m| self.expr(m)).transpose()?;
        if let ElementStorage::Registers(promotion, variables) = &storage {
            let lanes = self.register_lanes(buf, index, variables.len(), *promotion)?;
            return Ok(self.load_registers(*promotion, variables, &lanes, mask.as_ref(), ty));
        }
        let target = self.access_target(buf, &storage, index)?;
        Ok(match (target, mask) {
            (AccessTarget::Run(start), None) => self.load_run(&storage, start, ty),
            (AccessTarget::Run(start), Some(mask)) => self.load_masked_run(&storage, start, &mask, ty),
            (AccessTarget::Lanes(starts), None) => {
                let lanes = starts.iter().map(|&s| self.load_lane(&storage, s, 0, ty.dtype)).collect();
                self.assemble(self.form(ty), lanes)
            }
            (AccessTarget::Lanes(starts), Some(mask)) => {
                let mask = self.scalars(&mask, true);
                let lanes = starts.iter().zip(mask);
                let lanes = lanes.map(|(&s, m)| self.load_guarded(&storage, s, 0, m, ty.dtype)).collect();
                self.assemble(self.form(ty), lanes)
            }
        })
    }

    pub fn store(
        &mut self,
        buf: BufId,
        index: ExprId,
        value: ExprId,
        mask: Option<ExprId>,
    ) -> Result<(), CodegenError> {
        let storage = self.storage(buf)?;
        let ty = self.kernel.ty(value);
        let value = self.expr(value)?;
        let mask = mask.map(|m| self.expr(m)).transpose()?;
        if let ElementStorage::Registers(promotion, variables) = &storage {
            let lanes = self.register_lanes(buf, index, variables.len(), *promotion)?;
            self.store_registers(*promotion, variables, &lanes, &value, mask.as_ref(), ty);
            return Ok(());
        }
        let target = self.access_target(buf, &storage, index)?;
        let width = self.element(buf)?.bytes() as i32;
        match (target, mask) {
            (AccessTarget::Run(start), None) => self.store_run(&storage, start, &value, ty),
            (AccessTarget::Run(start), Some(mask)) => {
                self.store_masked_run(&storage, start, width, &value, &mask, ty)
            }
            (AccessTarget::Lanes(starts), mask) => {
                let mask = mask.map(|m| self.scalars(&m, true));
                let values = self.scalars(&value, ty.dtype == DType::Bool);
                for (lane, (start, value)) in starts.into_iter().zip(values).enumerate() {
                    match &mask {
                        Some(mask) => self.store_guarded(&storage, start, 0, mask[lane], value),
                        None => self.store_lane(&storage, start, 0, value),
                    }
                }
            }
        }
        Ok(())
    }

    // ---- addresses

    fn access_target(
        &mut self,
        buf: BufId,
        storage: &ElementStorage,
        index: ExprId,
    ) -> Result<AccessTarget, CodegenError> {
        let width = i64::from(self.element(buf)?.bytes());
        let mut addends = Vec::new();
        if self.run_addends(index, &mut addends) {
            let mut known = 0i64;
            let mut sum: Option<Value> = None;
            for addend in addends {
                self.split_index(addend, &mut known, &mut sum)?;
            }
            return Ok(AccessTarget::Run(self.access_address(
                storage,
                sum,
                known.wrapping_mul(width),
                width,
            )));
        }
        let lanes = self.expr(index)?.parts;
        Ok(AccessTarget::Lanes(
            lanes.into_iter().map(|lane| self.access_address(storage, Some(lane), 0, width)).collect(),
        ))
    }

    /// The terms whose sum is the start of `index`, if that is a run of consecutive elements.
    fn run_addends(&self, index: ExprId, out: &mut Vec<ExprId>) -> bool {
        let exprs = &self.kernel.exprs;
        if exprs.ty(index).lanes == 1 {
            out.push(index);
            return true;
        }
        match exprs.expr(index) {
            Expr::Ramp { base, stride } if exprs.as_int(*stride) == Some(1) => {
                out.push(*base);
                true
            }
            Expr::Binary(BinOp::Add, a, b) => match (exprs.expr(*a), exprs.expr(*b)) {
                (_, Expr::Splat(s)) if self.run_addends(*a, out) => {
                    out.push(*s);
                    true
                }
                (Expr::Splat(s), _) if self.run_addends(*b, out) => {
                    out.push(*s);
                    true
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// Adds a one-lane index to `known + sum`, constants to `known`.
    fn split_index(
        &mut self,
        index: ExprId,
        known: &mut i64,
        sum: &mut Option<Value>,
    ) -> Result<(), CodegenError> {
        let val = self.expr(index)?;
        if let Some(k) = val.known {
            *known = known.wrapping_add(k);
            return Ok(());
        }
        if let Expr::Binary(BinOp::Add, a, b) = *self.kernel.exprs.expr(index) {
            self.split_index(a, known, sum)?;
            return self.split_index(b, known, sum);
        }
        *sum = Some(match *sum {
            Some(s) => self.fb.ins().iadd(s, val.single()),
            None => val.single(),
        });
        Ok(())
    }

    fn access_address(
        &mut self,
        storage: &ElementStorage,
        index: Option<Value>,
        offset: i64,
        width: i64,
    ) -> AccessAddress {
        let base = match storage {
            ElementStorage::Slot(slot, _) => self.fb.ins().stack_addr(types::I64, *slot, 0),
            ElementStorage::Pointer(pointer) => *pointer,
            ElementStorage::Registers(..) => unreachable!("registers have no address"),
        };
        let mut address = match index {
            None => base,
            Some(index) => {
                let scaled = self.fb.ins().ishl_imm_s(index, i64::from(width.trailing_zeros()));
                self.fb.ins().iadd(base, scaled)
            }
        };
        // Room is left for the lanes of the access.
        let offset = match i32::try_from(offset) {
            Ok(small) if small.unsigned_abs() < 1 << 30 => small,
            _ => {
                address = self.fb.ins().iadd_imm_s(address, offset);
                0
            }
        };
        AccessAddress { address, offset }
    }

    // ---- single lanes

    fn load_lane(
        &mut self,
        storage: &ElementStorage,
        start: AccessAddress,
        offset: i32,
        dtype: DType,
    ) -> Value {
        let flags = self.flags(storage);
        let ty = scalar_type(dtype).unwrap_or(types::I8);
        let value = self.fb.ins().load(ty, flags, start.address, start.offset + offset);
        match dtype {
            DType::Bool => self.fb.ins().icmp_imm_s(IntCC::NotEqual, value, 0),
            _ => value,
        }
    }

    fn store_lane(&mut self, storage: &ElementStorage, start: AccessAddress, offset: i32, value: Value) {
        let flags = self.flags(storage);
        self.fb.ins().store(flags, value, start.address, start.offset + offset);
    }

    fn load_guarded(
        &mut self,
        storage: &ElementStorage,
        start: AccessAddress,
        offset: i32,
        mask: Value,
        dtype: DType,
    ) -> Value {
        let ty = scalar_type(dtype).unwrap_or(types::I8);
        let (read, join) = (self.fb.create_block(), self.fb.create_block());
        let result = self.fb.append_block_param(join, ty);
        let zero = self.zero(ty);
        self.fb.ins().brif(mask, read, &[], join, &[BlockArg::from(zero)]);
        self.enter(read);
        let value = self.load_lane(storage, start, offset, dtype);
        self.fb.ins().jump(join, &[BlockArg::from(value)]);
        self.enter(join);
        result
    }

    fn store_guarded(
        &mut self,
        storage: &ElementStorage,
        start: AccessAddress,
        offset: i32,
        mask: Value,
        value: Value,
    ) {
        let (write, join) = (self.fb.create_block(), self.fb.create_block());
        self.fb.ins().brif(mask, write, &[], join, &[]);
        self.enter(write);
        self.store_lane(storage, start, offset, value);
        self.fb.ins().jump(join, &[]);
        self.enter(join);
    }

    // ---- runs

    /// The form in which a run is read and written: bytes of `bool` count as a vector type here.
    fn run_form(&self, ty: ExprType) -> LaneForm {
        match ty.dtype {
            DType::Bool => self.form(ExprType::vector(DType::U8, ty.lanes)),
            _ => self.form(ty),
        }
    }

    fn load_run(&mut self, storage: &ElementStorage, start: AccessAddress, ty: ExprType) -> ClifValue {
        let flags = self.flags(storage);
        match self.run_form(ty) {
            LaneForm::Vectors(vector) => {
                let mut parts = Vec::new();
                for i in 0..(ty.lanes / vector.lane_count()) as i32 {
                    let part = self.load_vector(vector, flags, start.address, start.offset + 16 * i);
                    parts.push(if ty.dtype == DType::Bool {
                        let zero = self.zero(vector);
                        self.fb.ins().icmp(IntCC::NotEqual, part, zero)
                    } else {
                        part
                    });
                }
                ClifValue::new(LaneForm::Vectors(vector), parts)
            }
            LaneForm::Scalars => {
                let width = scalar_type(ty.dtype).map_or(1, Type::bytes) as i32;
                let lanes = 0..ty.lanes as i32;
                let parts = lanes.map(|i| self.load_lane(storage, start, width * i, ty.dtype)).collect();
                ClifValue::new(LaneForm::Scalars, parts)
            }
        }
    }

    fn load_vector(&mut self, ty: Type, flags: MemFlagsData, address: Value, offset: i32) -> Value {
        if ty != types::F32X4 || !self.machine.opaque_float_loads {
            return self.fb.ins().load(ty, flags, address, offset);
        }
        let bits = self.fb.ins().load(types::I32X4, flags, address, offset);
        self.as_type(bits, ty)
    }

    fn store_run(&mut self, storage: &ElementStorage, start: AccessAddress, value: &ClifValue, ty: ExprType) {
        let flags = self.flags(storage);
        let form = self.run_form(ty);
        let bytes = match (ty.dtype, form) {
            (DType::Bool, LaneForm::Vectors(vector)) => {
                let mask = self.mask_to(value, form);
                let one = self.vector_splat_const(vector, 1);
                let parts = mask.parts.iter().map(|&p| self.fb.ins().band(p, one)).collect();
                ClifValue::new(form, parts)
            }
            (DType::Bool, LaneForm::Scalars) => self.mask_to(value, form),
            _ => value.clone(),
        };
        let mut offset = start.offset;
        for part in bytes.parts {
            self.fb.ins().store(flags, part, start.address, offset);
            offset += self.fb.func.dfg.value_type(part).bytes() as i32;
        }
    }

    /// True if all lanes of the mask are set.
    fn all_lanes_set(&mut self, mask: &ClifValue) -> Value {
        let both = mask.parts[1..].iter().fold(mask.parts[0], |a, &b| self.fb.ins().band(a, b));
        match mask.form {
            LaneForm::Scalars => both,
            LaneForm::Vectors(_) => self.fb.ins().vall_true(both),
        }
    }

    /// Whole vectors if all lanes are on, else lane by lane.
    fn load_masked_run(
        &mut self,
        storage: &ElementStorage,
        start: AccessAddress,
        mask: &ClifValue,
        ty: ExprType,
    ) -> ClifValue {
        let form = self.run_form(ty);
        let width = scalar_type(ty.dtype).map_or(1, Type::bytes) as i32;
        let join = match form {
            LaneForm::Scalars => None,
            LaneForm::Vectors(vector) => {
                let (whole, pieces, join) =
                    (self.fb.create_block(), self.fb.create_block(), self.fb.create_block());
                let all = self.all_lanes_set(mask);
                self.fb.ins().brif(all, whole, &[], pieces, &[]);
                self.enter(whole);
                let parts: Vec<BlockArg> =
                    self.load_run(storage, start, ty).parts.into_iter().map(BlockArg::from).collect();
                self.fb.ins().jump(join, &parts);
                let results = parts.iter().map(|_| self.fb.append_block_param(join, vector)).collect();
                self.enter(pieces);
                Some((join, ClifValue::new(form, results)))
            }
        };
        let mut lanes = Vec::new();
        for (i, m) in self.scalars(mask, true).into_iter().enumerate() {
            lanes.push(self.load_guarded(storage, start, width * i as i32, m, ty.dtype));
        }
        let Some((join, result)) = join else { return ClifValue::new(LaneForm::Scalars, lanes) };
        let pieces = match ty.dtype {
            DType::Bool => self.mask_to(&ClifValue::new(LaneForm::Scalars, lanes), form),
            _ => self.assemble(form, lanes),
        };
        let parts: Vec<BlockArg> = pieces.parts.into_iter().map(BlockArg::from).collect();
        self.fb.ins().jump(join, &parts);
        self.enter(join);
        result
    }

    fn store_masked_run(
        &mut self,
        storage: &ElementStorage,
        start: AccessAddress,
        width: i32,
        value: &ClifValue,
        mask: &ClifValue,
        ty: ExprType,
    ) {
        let (whole, pieces, join) = (self.fb.create_block(), self.fb.create_block(), self.fb.create_block());
        let all = self.all_lanes_set(mask);
        self.fb.ins().brif(all, whole, &[], pieces, &[]);
        self.enter(whole);
        self.store_run(storage, start, value, ty);
        self.fb.ins().jump(join, &[]);
        self.enter(pieces);
        let mask = self.scalars(mask, true);
        let values = self.scalars(value, ty.dtype == DType::Bool);
        for (i, (mask, value)) in mask.into_iter().zip(values).enumerate() {
            self.store_guarded(storage, start, width * i as i32, mask, value);
        }
        self.fb.ins().jump(join, &[]);
        self.enter(join);
    }

    /// The bits of a value as another type, through memory: for shapes that no bitcast instruction covers.
    pub fn bitcast_through_memory(&mut self, value: &ClifValue, from: ExprType, to: ExprType) -> ClifValue {
        let bytes = from.dtype.bytes().unwrap_or(1) as u32 * from.lanes;
        let storage = self.scratch(bytes);
        let start = self.access_address(&storage, None, 0, 1);
        self.store_run(&storage, start, value, from);
        self.load_run(&storage, start, to)
    }

    // ---- registers

    /// The elements that an access to a buffer in registers touches.
    fn register_lanes(
        &mut self,
        buf: BufId,
        index: ExprId,
        variables: usize,
        promotion: RegisterPromotion,
    ) -> Result<Vec<usize>, CodegenError> {
        let (base, stride) = match *self.kernel.exprs.expr(index) {
            Expr::Ramp { base, stride } => (self.expr(base)?.known, self.expr(stride)?.known),
            _ => (self.expr(index)?.known, Some(0)),
        };
        let len = variables * promotion.lanes as usize;
        let lanes = i64::from(self.kernel.ty(index).lanes);
        let at = |lane: i64| {
            let at = base?.checked_add(stride?.checked_mul(lane)?)?;
            usize::try_from(at).ok().filter(|&at| at < len)
        };
        match (0..lanes).map(at).collect() {
            Some(lanes) => Ok(lanes),
            None => {
                let name = &self.kernel.bufs[buf].name;
                self.unsupported(format!("an index into local buffer {name} lies outside its {len} elements"))
            }
        }
    }

    fn load_registers(
        &mut self,
        promotion: RegisterPromotion,
        variables: &[Variable],
        lanes: &[usize],
        mask: Option<&ClifValue>,
        ty: ExprType,
    ) -> ClifValue {
        let value = if promotion.lanes == 1 {
            let lanes = lanes.iter().map(|&l| self.fb.use_var(variables[l])).collect();
            self.assemble(self.form(ty), lanes)
        } else {
            let starts = lanes.iter().step_by(promotion.lanes as usize);
            let parts = starts.map(|&l| self.fb.use_var(variables[l / promotion.lanes as usize])).collect();
            ClifValue::new(LaneForm::Vectors(promotion.part), parts)
        };
        match mask {
            None => value,
            Some(mask) => {
                let zero = self.zero_of(ty);
                self.select(mask, &value, &zero, ty)
            }
        }
    }

    fn store_registers(
        &mut self,
        promotion: RegisterPromotion,
        variables: &[Variable],
        lanes: &[usize],
        value: &ClifValue,
        mask: Option<&ClifValue>,
        ty: ExprType,
    ) {
        let value = match mask {
            None => value.clone(),
            Some(mask) => {
                let old = self.load_registers(promotion, variables, lanes, None, ty);
                self.select(mask, value, &old, ty)
            }
        };
        if promotion.lanes == 1 {
            let parts = self.scalars(&value, ty.dtype == DType::Bool);
            for (&lane, part) in lanes.iter().zip(parts) {
                self.fb.def_var(variables[lane], part);
            }
        } else {
            for (lane, part) in lanes.iter().step_by(promotion.lanes as usize).zip(value.parts) {
                self.fb.def_var(variables[lane / promotion.lanes as usize], part);
            }
        }
    }

    fn zero_of(&mut self, ty: ExprType) -> ClifValue {
        match self.form(ty) {
            LaneForm::Vectors(vector) => {
                let zero = self.zero(vector);
                ClifValue::new(
                    LaneForm::Vectors(vector),
                    vec![zero; (ty.lanes / vector.lane_count()) as usize],
                )
            }
            LaneForm::Scalars => {
                let zero = self.zero(scalar_type(ty.dtype).unwrap_or(types::I8));
                ClifValue::new(LaneForm::Scalars, vec![zero; ty.lanes as usize])
            }
        }
    }
}
