//! Statements of one kernel, and what is known while they are emitted.

use super::isa::CraneliftIsa;
use super::local::{self, RegisterPromotion};
use super::value::ClifValue;
use crate::error::CodegenError;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{
    AbiParam, AliasRegion, AliasRegionData, Block, BlockArg, Function, InstBuilder, MemFlagsData, Signature,
    StackSlot, StackSlotData, StackSlotKind, UserFuncName, Value, types,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext, Variable};
use mlcc_ir::instr::InstrSemantics;
use mlcc_ir::kernel::{BufId, ExprId, ForKind, Kernel, MemorySpace, Stmt, VarId};
use rustc_hash::FxHashMap;

/// The storage of the elements of a buffer.
#[derive(Clone)]
pub(super) enum ElementStorage {
    /// Memory at the address in this argument.
    Pointer(Value),
    Slot(StackSlot, AliasRegion),
    /// Registers: one variable per vector or element.
    Registers(RegisterPromotion, Vec<Variable>),
}

/// One kernel on its way to a Cranelift function. The tables are looked up, never iterated.
pub(super) struct ClifKernelEmitter<'k, 'f> {
    pub kernel: &'k Kernel,
    pub machine: &'k CraneliftIsa,
    pub fb: FunctionBuilder<'f>,
    pub storages: FxHashMap<BufId, ElementStorage>,
    pub vars: FxHashMap<VarId, ClifValue>,
    /// Values of the current statement; cleared at its end because loads see memory as it is then.
    pub cache: FxHashMap<ExprId, ClifValue>,
    globals: AliasRegion,
    /// First part, end and number of parts of the share.
    share: [Value; 3],
    n_regions: u32,
}

/// The signature of a kernel's function.
pub(super) fn kernel_signature(kernel: &Kernel) -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    let arguments = kernel.params.len() + kernel.dims.len() + 3;
    signature.params.resize(arguments, AbiParam::new(types::I64));
    signature
}

/// Builds the function of a kernel in which only primitive expressions are left.
pub(super) fn kernel_function(
    kernel: &Kernel,
    machine: &CraneliftIsa,
    context: &mut FunctionBuilderContext,
) -> Result<Function, CodegenError> {
    let mut func = Function::with_name_signature(UserFuncName::default(), kernel_signature(kernel));
    let mut fb = FunctionBuilder::new(&mut func, context);
    let entry = fb.create_block();
    fb.append_block_params_for_function_params(entry);
    fb.switch_to_block(entry);
    fb.seal_block(entry);
    let args = fb.block_params(entry).to_vec();
    let globals = AliasRegionData { user_id: 0, description: "global buffers".into() };
    let globals = fb.func.dfg.alias_regions.insert(globals);
    let n = args.len();
    let mut emit = ClifKernelEmitter {
        kernel,
        machine,
        fb,
        storages: FxHashMap::default(),
        vars: FxHashMap::default(),
        cache: FxHashMap::default(),
        globals,
        share: [args[n - 3], args[n - 2], args[n - 1]],
        n_regions: 1,
    };
    for (&buf, &arg) in kernel.params.iter().zip(&args) {
        emit.storages.insert(buf, ElementStorage::Pointer(arg));
    }
    for ((_, var), &arg) in kernel.dims.iter().zip(&args[kernel.params.len()..]) {
        emit.vars.insert(*var, ClifValue::scalar(arg));
    }
    emit.body()?;
    emit.fb.finalize(machine.isa.frontend_config());
    Ok(func)
}

impl ClifKernelEmitter<'_, '_> {
    /// An error about this kernel.
    pub fn unsupported<T>(&self, what: impl Into<String>) -> Result<T, CodegenError> {
        Err(CodegenError::Internal { kernel: self.kernel.name.clone(), what: what.into() })
    }

    /// Accesses never trap; alignment is not claimed, because a 128-bit chunk may start at any element.
    pub fn flags(&self, storage: &ElementStorage) -> MemFlagsData {
        let region = match storage {
            ElementStorage::Pointer(_) | ElementStorage::Registers(..) => self.globals,
            ElementStorage::Slot(_, region) => *region,
        };
        MemFlagsData::new().with_notrap().with_alias_region(Some(region))
    }

    pub fn iconst(&mut self, value: i64) -> Value {
        self.fb.ins().iconst(types::I64, value)
    }

    fn constant_index(&mut self, value: i64) -> ClifValue {
        let known = Some(value);
        ClifValue { known, ..ClifValue::scalar(self.iconst(value)) }
    }

    /// A kernel without a `par` loop is run by who has the first part.
    fn body(&mut self) -> Result<(), CodegenError> {
        if !has_par(&self.kernel.body) {
            let (work, leave) = (self.fb.create_block(), self.fb.create_block());
            self.fb.ins().brif(self.share[0], leave, &[], work, &[]);
            self.enter(leave);
            self.fb.ins().return_(&[]);
            self.enter(work);
        }
        let kernel = self.kernel;
        self.stmts(&kernel.body)?;
        self.fb.ins().return_(&[]);
        Ok(())
    }

    fn stmts(&mut self, body: &[Stmt]) -> Result<(), CodegenError> {
        for stmt in body {
            self.cache.clear();
            self.stmt(stmt)?;
        }
        self.cache.clear();
        Ok(())
    }

    fn stmt(&mut self, stmt: &Stmt) -> Result<(), CodegenError> {
        match stmt {
            Stmt::For { var, extent, kind, body } => self.for_loop(*var, *extent, *kind, body),
            Stmt::If { cond, then, otherwise } => self.branch(*cond, then, otherwise),
            Stmt::Let { var, value } => {
                let value = self.expr(*value)?;
                self.vars.insert(*var, value);
                Ok(())
            }
            Stmt::Store { buf, index, value, mask } => self.store(*buf, *index, *value, *mask),
            Stmt::Alloc { buf } => self.alloc(*buf),
            Stmt::Instr { instr, .. } => match instr.def().meaning {
                InstrSemantics::Hint => Ok(()),
                InstrSemantics::Expr(_)
                | InstrSemantics::ShuffleXor
                | InstrSemantics::Mma(_)
                | InstrSemantics::LoadMatrix { .. }
                | InstrSemantics::Copy { .. } => self
                    .unsupported(format!("{} cannot stand as a statement of a CPU kernel", instr.def().name)),
            },
            Stmt::Barrier | Stmt::Commit | Stmt::Wait { .. } => {
                self.unsupported("barriers and waits belong to GPU kernels")
            }
        }
    }

    fn alloc(&mut self, buf: BufId) -> Result<(), CodegenError> {
        let decl = &self.kernel.bufs[buf];
        match self.storages.get(&buf).cloned() {
            // The same statement again, in an unrolled loop.
            Some(ElementStorage::Registers(promotion, variables)) => {
                self.clear(promotion, &variables);
                return Ok(());
            }
            Some(_) => return Ok(()),
            None => {}
        }
        let len = decl.len.as_const().and_then(|l| usize::try_from(l).ok());
        let (Some(len), Some(bytes)) = (len, decl.dtype.bytes()) else {
            return self.unsupported(format!("buffer {} of {} {}", decl.name, decl.len, decl.dtype));
        };
        if decl.space == MemorySpace::Shared {
            return self.unsupported(format!("buffer {}: shared memory belongs to GPU kernels", decl.name));
        }
        if decl.space == MemorySpace::Local
            && let Some(promotion) = local::plan_promotion(self.kernel, buf, self.machine)
        {
            let n = len / promotion.lanes as usize;
            let variables: Vec<Variable> = (0..n).map(|_| self.fb.declare_var(promotion.part)).collect();
            self.clear(promotion, &variables);
            self.storages.insert(buf, ElementStorage::Registers(promotion, variables));
            return Ok(());
        }
        let Some(size) = u32::try_from(len * bytes).ok().filter(|s| *s <= i32::MAX as u32) else {
            return self.unsupported(format!("buffer {} of {len} elements does not fit a stack", decl.name));
        };
        let align = decl.align.max(bytes as u32).ilog2().min(4) as u8;
        let slot = StackSlotData::new(StackSlotKind::ExplicitSlot, size, align);
        let slot = self.fb.create_sized_stack_slot(slot);
        let region = self.new_region();
        self.storages.insert(buf, ElementStorage::Slot(slot, region));
        Ok(())
    }

    /// Contents are undefined from here on; saying so by a constant keeps the old ones from living on in
    /// registers.
    fn clear(&mut self, promotion: RegisterPromotion, variables: &[Variable]) {
        let zero = self.zero(promotion.part);
        for &variable in variables {
            self.fb.def_var(variable, zero);
        }
    }

    /// A stack slot that the code of one expression passes through.
    pub fn scratch(&mut self, bytes: u32) -> ElementStorage {
        let slot = self.fb.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, bytes, 4));
        ElementStorage::Slot(slot, self.new_region())
    }

    fn new_region(&mut self) -> AliasRegion {
        let data = AliasRegionData { user_id: self.n_regions, description: "stack buffer".into() };
        self.n_regions += 1;
        self.fb.func.dfg.alias_regions.insert(data)
    }

    fn for_loop(
        &mut self,
        var: VarId,
        extent: ExprId,
        kind: ForKind,
        body: &[Stmt],
    ) -> Result<(), CodegenError> {
        let extent = self.expr(extent)?;
        match (kind, extent.known) {
            (ForKind::Unroll, Some(n)) => {
                for i in 0..n {
                    let value = self.constant_index(i);
                    self.vars.insert(var, value);
                    self.stmts(body)?;
                }
                Ok(())
            }
            (ForKind::Unroll, None) => self.unsupported("an unrolled loop has no constant extent"),
            (ForKind::Serial, _) => {
                let zero = self.iconst(0);
                self.counted_loop(var, zero, extent.single(), body)
            }
            (ForKind::Par, _) => {
                let zero = self.iconst(0);
                let extent = self.fb.ins().smax(extent.single(), zero);
                let [first, end, _] = self.share;
                let [from, to] = [first, end].map(|part| self.slice_bound(part, extent));
                self.counted_loop(var, from, to, body)
            }
            (ForKind::Block(_) | ForKind::Thread(_), _) => {
                self.unsupported("block and thread loops belong to GPU kernels")
            }
        }
    }

    /// The start of a part: `part * extent / parts`.
    fn slice_bound(&mut self, part: Value, extent: Value) -> Value {
        let product = self.fb.ins().imul(part, extent);
        self.fb.ins().udiv(product, self.share[2])
    }

    /// `for var in from..to`.
    fn counted_loop(
        &mut self,
        var: VarId,
        from: Value,
        to: Value,
        body: &[Stmt],
    ) -> Result<(), CodegenError> {
        let header = self.fb.create_block();
        let inside = self.fb.create_block();
        let exit = self.fb.create_block();
        let i = self.fb.append_block_param(header, types::I64);
        self.fb.ins().jump(header, &[BlockArg::from(from)]);
        self.fb.switch_to_block(header);
        let more = self.fb.ins().icmp(IntCC::SignedLessThan, i, to);
        self.fb.ins().brif(more, inside, &[], exit, &[]);
        self.enter(inside);
        self.vars.insert(var, ClifValue::scalar(i));
        self.stmts(body)?;
        let next = self.fb.ins().iadd_imm_s(i, 1);
        self.fb.ins().jump(header, &[BlockArg::from(next)]);
        self.fb.seal_block(header);
        self.enter(exit);
        Ok(())
    }

    fn branch(&mut self, cond: ExprId, then: &[Stmt], otherwise: &[Stmt]) -> Result<(), CodegenError> {
        let cond = self.expr(cond)?.single();
        let (yes, no, join) = (self.fb.create_block(), self.fb.create_block(), self.fb.create_block());
        self.fb.ins().brif(cond, yes, &[], no, &[]);
        for (block, body) in [(yes, then), (no, otherwise)] {
            self.enter(block);
            self.stmts(body)?;
            self.fb.ins().jump(join, &[]);
        }
        self.enter(join);
        Ok(())
    }

    /// Goes on in a block to which all jumps have been written.
    pub fn enter(&mut self, block: Block) {
        self.fb.switch_to_block(block);
        self.fb.seal_block(block);
    }
}

fn has_par(body: &[Stmt]) -> bool {
    body.iter().any(|stmt| match stmt {
        Stmt::For { kind: ForKind::Par, .. } => true,
        Stmt::For { body, .. } => has_par(body),
        Stmt::If { then, otherwise, .. } => has_par(then) || has_par(otherwise),
        _ => false,
    })
}
