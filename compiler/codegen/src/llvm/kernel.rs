//! Kernel IR to an LLVM function: statements, loops and buffers. Expressions are in [`super::expr`], loads
//! and stores in [`super::memory`].
//!
//! Invariants:
//! * The kernel has been prepared ([`crate::prepare`]): only primitive operations and available instructions
//!   are left.
//! * An expression is evaluated where its statement is; shared subexpressions of one statement once.
//! * Allocations of space `Local` and `Stack` are entry-block allocas, so that LLVM can promote them to
//!   registers.
//! * Without fast-math flags: results equal those of the interpreter, save for fused multiply-adds on targets
//!   without.
//! * CPU: a kernel without a `Par` loop is run by the worker with the first part of the share.

use super::emit::{EmitResult, LlvmBuilder, LlvmValue};
use crate::error::{CodegenError, EmitError};
use crate::launch::SharedMemory;
use crate::model::FixedArguments;
use crate::placement::{AddressOrigin, BufferPlacement};
use crate::prepare::LevelCapabilities;
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::basic_block::BasicBlock;
use inkwell::builder::Builder;
use inkwell::context::Context;
use inkwell::module::Module;
use inkwell::types::{BasicMetadataTypeEnum, BasicType, FunctionType, IntType};
use inkwell::values::{BasicValue, FunctionValue, InstructionOpcode as Op, PointerValue};
use inkwell::{AddressSpace, module::Linkage};
use inkwell::{GlobalVisibility, IntPredicate};
use mlcc_ir::entity::EntityId;
use mlcc_ir::instr::InstrSemantics;
use mlcc_ir::kernel::*;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// The machine that executes the function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecutionModel<'a> {
    /// A share ([`mlcc_ir::step::WorkShare`]) follows the dimensions: first part, end and number of parts as
    /// i64 arguments.
    Cpu,
    /// Buffers are followed by addresses of i64 words, which no launch writes
    /// ([`BufferPlacement::argument_words`]). `threads`: of the widest `Thread` loops.
    Gpu { threads: [u32; 3], placement: &'a BufferPlacement },
}

pub const GLOBAL_SPACE: u16 = 1;
pub const SHARED_SPACE: u16 = 3;
const DYNAMIC_SHARED: &str = "mlcc_shared";

/// The form in which a kernel is written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KernelForm {
    /// Arguments that become constants.
    pub fixed: FixedArguments,
    /// True to leave out the names of buffers and variables: kernels that differ only in them are equal then.
    pub nameless: bool,
}

/// Emits `kernel` (prepared) into `module` as a function called `name`.
pub fn emit_kernel<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    kernel: &Kernel,
    name: &str,
    caps: &LevelCapabilities,
    machine: ExecutionModel<'_>,
    form: &KernelForm,
) -> std::result::Result<FunctionValue<'c>, CodegenError> {
    let internal = |f: EmitError| CodegenError::Internal { kernel: kernel.name.clone(), what: f.0 };
    let mut emitter = KernelEmitter::declare(ctx, module, kernel, name, caps, machine).map_err(internal)?;
    emitter.nameless = form.nameless;
    emitter.run(&form.fixed).map_err(internal)?;
    Ok(emitter.function)
}

/// Declares a kernel of another module of the artifact.
pub fn declare_kernel<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    kernel: &Kernel,
    name: &str,
) -> FunctionValue<'c> {
    let ty = function_type(ctx, kernel, ExecutionModel::Cpu);
    let function = module.add_function(name, ty, Some(Linkage::External));
    function.as_global_value().set_visibility(GlobalVisibility::Hidden);
    function
}

fn function_type<'c>(ctx: &'c Context, kernel: &Kernel, machine: ExecutionModel<'_>) -> FunctionType<'c> {
    let space = match machine {
        ExecutionModel::Cpu => AddressSpace::default(),
        ExecutionModel::Gpu { .. } => AddressSpace::from(GLOBAL_SPACE),
    };
    let pointer: BasicMetadataTypeEnum<'c> = ctx.ptr_type(space).into();
    let (further, ty) = match machine {
        ExecutionModel::Cpu => (kernel.dims.len() + 3, ctx.i64_type().into()),
        ExecutionModel::Gpu { placement, .. } => (placement.argument_words(kernel.dims.len()).len(), pointer),
    };
    let mut params = vec![pointer; kernel.params.len()];
    params.resize(kernel.params.len() + further, ty);
    ctx.void_type().fn_type(&params, false)
}

pub(super) struct KernelEmitter<'a, 'c> {
    pub e: LlvmBuilder<'c, 'a>,
    pub kernel: &'a Kernel,
    pub caps: &'a LevelCapabilities,
    pub(super) function: FunctionValue<'c>,
    pub machine: ExecutionModel<'a>,
    /// Positioned in the entry block, where allocas go.
    entry: Builder<'c>,
    pub(super) vars: Vec<Option<LlvmValue<'c>>>,
    pub(super) bufs: Vec<Option<PointerValue<'c>>>,
    /// Values of the statement being emitted.
    pub memo: FxHashMap<ExprId, LlvmValue<'c>>,
    /// First part, end and number of parts.
    share: Option<[LlvmValue<'c>; 3]>,
    nameless: bool,
    /// The places of buffers in shared memory that is requested at launch.
    dynamic_shared: BTreeMap<BufId, u32>,
}

impl<'a, 'c> KernelEmitter<'a, 'c> {
    fn declare(
        ctx: &'c Context,
        module: &'a Module<'c>,
        kernel: &'a Kernel,
        name: &str,
        caps: &'a LevelCapabilities,
        machine: ExecutionModel<'a>,
    ) -> EmitResult<Self> {
        let e = LlvmBuilder::new(ctx, module);
        let function =
            module.add_function(name, function_type(ctx, kernel, machine), Some(Linkage::Internal));
        Ok(KernelEmitter {
            e,
            kernel,
            caps,
            function,
            machine,
            entry: ctx.create_builder(),
            vars: vec![None; kernel.vars.len()],
            bufs: vec![None; kernel.bufs.len()],
            memo: FxHashMap::default(),
            share: None,
            nameless: false,
            dynamic_shared: SharedMemory::for_kernel(kernel).offsets,
        })
    }

    fn run(&mut self, fixed: &FixedArguments) -> EmitResult<()> {
        let kernel = self.kernel;
        let entry = self.e.ctx.append_basic_block(self.function, "entry");
        let body = self.e.ctx.append_basic_block(self.function, "body");
        let exit = self.e.ctx.append_basic_block(self.function, "exit");
        self.entry.position_at_end(entry);
        self.e.b.position_at_end(body);
        self.bind_arguments(fixed, exit)?;
        self.attributes();
        if self.machine == ExecutionModel::Cpu && !has_par(&kernel.body) {
            let [first, ..] = self.share()?;
            let first = self.e.icmp(IntPredicate::EQ, first, self.e.i64(0))?.into_int_value();
            let work = self.e.ctx.append_basic_block(self.function, "work");
            self.e.b.build_conditional_branch(first, work, exit)?;
            self.e.b.position_at_end(work);
        }
        self.stmts(&kernel.body)?;
        self.e.b.build_unconditional_branch(exit)?;
        self.e.b.position_at_end(exit);
        self.e.b.build_return(None)?;
        self.entry.build_unconditional_branch(body)?;
        Ok(())
    }

    fn bind_arguments(&mut self, fixed: &FixedArguments, exit: BasicBlock<'c>) -> EmitResult<()> {
        let args = self.function.get_params();
        let mut next = args.iter();
        let mut take = || next.next().copied().ok_or_else(|| EmitError::new("too few arguments declared"));
        for (i, &buf) in self.kernel.params.iter().enumerate() {
            let decl = &self.kernel.bufs[buf];
            let pointer = take()?.into_pointer_value();
            pointer.set_name(self.name(&decl.name));
            if decl.align.is_power_of_two() {
                self.function.set_param_alignment(i as u32, decl.align);
            }
            self.bufs[buf.index()] = Some(pointer);
        }
        if let ExecutionModel::Gpu { placement, .. } = self.machine {
            return self.place_buffers(placement, &args[self.kernel.params.len()..], exit);
        }
        for (i, (sym, var)) in self.kernel.dims.iter().enumerate() {
            let argument = take()?;
            argument.set_name(sym.name());
            self.vars[var.index()] = Some(fixed.dim(i).map_or(argument, |known| self.e.i64(known)));
        }
        // Shares are cheap if these are known not to be negative; no work is larger.
        let number = |value| self.e.op(Op::And, value, self.e.i64((1 << 48) - 1));
        let given = [number(take()?)?, number(take()?)?, number(take()?)?];
        self.share = Some(if fixed.alone { [0, 1, 1].map(|part| self.e.i64(part)) } else { given });
        Ok(())
    }

    /// A word that every thread of the grid reads alike, because nothing writes it meanwhile.
    pub(super) fn load_word(&self, address: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        self.fixed_in_memory(self.e.ctx.i64_type(), address, 8)
    }

    /// Loads an integer of another type in this way.
    pub(super) fn fixed_in_memory(
        &self,
        ty: IntType<'c>,
        address: LlvmValue<'c>,
        bytes: u32,
    ) -> EmitResult<LlvmValue<'c>> {
        let value = self.e.load(ty.into(), address.into_pointer_value(), bytes)?;
        if let Some(load) = value.as_instruction_value() {
            let kind = self.e.ctx.get_kind_id("invariant.load");
            load.set_metadata(self.e.ctx.metadata_node(&[]), kind)
                .map_err(|_| EmitError::new("a load has no metadata"))?;
        }
        Ok(value)
    }

    fn attributes(&self) {
        let f = self.function;
        let at = AttributeLoc::Function;
        for name in ["noinline", "norecurse"] {
            f.add_attribute(at, self.e.flag(name));
        }
        match self.machine {
            ExecutionModel::Cpu => self.e.mark_cpu_function(f),
            _ => self.e.mark_function(f),
        }
        if self.machine == ExecutionModel::Cpu && self.caps.vector_bits >= 512 {
            let bits = self.caps.vector_bits.to_string();
            f.add_attribute(at, self.e.ctx.create_string_attribute("prefer-vector-width", &bits));
        }
        let nocapture = Attribute::get_named_enum_kind_id("nocapture");
        if nocapture != 0 {
            for i in (0..self.kernel.params.len()).filter(|&i| !self.is_offset(i)).map(|i| i as u32) {
                f.add_attribute(AttributeLoc::Param(i), self.e.ctx.create_enum_attribute(nocapture, 0));
            }
        }
    }

    /// True if an argument is no address but an offset from one.
    fn is_offset(&self, param: usize) -> bool {
        match self.machine {
            ExecutionModel::Cpu => false,
            ExecutionModel::Gpu { placement, .. } => {
                placement.buffers.get(param).is_some_and(|b| b.from != AddressOrigin::Fixed)
            }
        }
    }

    fn share(&self) -> EmitResult<[LlvmValue<'c>; 3]> {
        self.share.ok_or_else(|| EmitError::new("CPU loop in a GPU kernel"))
    }

    fn name<'n>(&self, name: &'n str) -> &'n str {
        if self.nameless { "" } else { name }
    }

    pub fn var(&self, var: VarId) -> EmitResult<LlvmValue<'c>> {
        let unset = || EmitError(format!("variable {} used outside its scope", self.kernel.vars[var].name));
        self.vars[var.index()].ok_or_else(unset)
    }

    pub fn buf(&self, buf: BufId) -> EmitResult<PointerValue<'c>> {
        let unset = || EmitError(format!("buffer {} used outside its scope", self.kernel.bufs[buf].name));
        self.bufs[buf.index()].ok_or_else(unset)
    }

    // ---- statements

    fn stmts(&mut self, body: &[Stmt]) -> EmitResult<()> {
        body.iter().try_for_each(|s| self.stmt(s))
    }

    fn stmt(&mut self, stmt: &Stmt) -> EmitResult<()> {
        self.memo.clear();
        match stmt {
            Stmt::For { var, extent, kind, body } => self.for_(*var, *extent, *kind, body),
            Stmt::If { cond, then, otherwise } => {
                let cond = self.expr(*cond)?;
                self.if_(cond, then, otherwise)
            }
            Stmt::Let { var, value } => {
                let value = self.expr(*value)?;
                self.vars[var.index()] = Some(value);
                Ok(())
            }
            Stmt::Store { buf, index, value, mask } => self.store_stmt(*buf, *index, *value, *mask),
            Stmt::Alloc { buf } => self.alloc(*buf),
            Stmt::Instr { instr, args } if matches!(instr.def().meaning, InstrSemantics::Hint) => {
                args.iter().try_for_each(|&arg| self.hint(instr.def().spelling, arg))
            }
            Stmt::Instr { instr, args } => self.instr(*instr, args).map(|_| ()),
            Stmt::Barrier => self.barrier(),
            Stmt::Commit => self.commit(),
            Stmt::Wait { pending } => self.wait(*pending),
        }
    }

    fn if_(&mut self, cond: LlvmValue<'c>, then: &[Stmt], otherwise: &[Stmt]) -> EmitResult<()> {
        let yes = self.e.ctx.append_basic_block(self.function, "then");
        let no = self.e.ctx.append_basic_block(self.function, "else");
        let end = self.e.ctx.append_basic_block(self.function, "end");
        self.e.b.build_conditional_branch(cond.into_int_value(), yes, no)?;
        for (block, body) in [(yes, then), (no, otherwise)] {
            self.e.b.position_at_end(block);
            self.stmts(body)?;
            self.e.b.build_unconditional_branch(end)?;
        }
        self.e.b.position_at_end(end);
        Ok(())
    }

    fn for_(&mut self, var: VarId, extent: ExprId, kind: ForKind, body: &[Stmt]) -> EmitResult<()> {
        let constant = || {
            let name = &self.kernel.vars[var].name;
            self.kernel
                .exprs
                .as_int(extent)
                .ok_or_else(|| EmitError(format!("extent of {name} is not constant")))
        };
        match kind {
            ForKind::Unroll => {
                for i in 0..constant()? {
                    self.vars[var.index()] = Some(self.e.i64(i));
                    self.stmts(body)?;
                }
                Ok(())
            }
            ForKind::Serial => {
                let extent = self.expr(extent)?;
                self.counted_loop(var, self.e.i64(0), extent, body)
            }
            ForKind::Par => {
                let extent = self.expr(extent)?;
                let [first, end, of] = self.share()?;
                let from = self.part_start(first, of, extent)?;
                let to = self.part_start(end, of, extent)?;
                self.counted_loop(var, from, to, body)
            }
            ForKind::Block(axis) => {
                let id = self.gpu_index("ctaid", axis)?;
                self.vars[var.index()] = Some(id);
                // A grid may have more blocks than a size of this call needs; all threads of one agree on it.
                if self.kernel.exprs.as_int(extent).is_some() {
                    return self.stmts(body);
                }
                let extent = self.expr(extent)?;
                let inside = self.e.icmp(IntPredicate::SLT, id, extent)?;
                self.if_(inside, body, &[])
            }
            ForKind::Thread(axis) => {
                let extent = constant()?;
                let id = self.gpu_index("tid", axis)?;
                self.vars[var.index()] = Some(id);
                self.thread_body(id, extent, axis, body)
            }
        }
    }

    /// The start of a part: `part * extent / parts`.
    fn part_start(
        &self,
        part: LlvmValue<'c>,
        parts: LlvmValue<'c>,
        extent: LlvmValue<'c>,
    ) -> EmitResult<LlvmValue<'c>> {
        let product = self.e.mul(part, extent)?;
        self.e.op(Op::UDiv, product, parts)
    }

    /// `for var in from..to`.
    fn counted_loop(
        &mut self,
        var: VarId,
        from: LlvmValue<'c>,
        to: LlvmValue<'c>,
        body: &[Stmt],
    ) -> EmitResult<()> {
        let ctx = self.e.ctx;
        let before = self.e.b.get_insert_block().ok_or_else(|| EmitError::new("no block"))?;
        let header = ctx.append_basic_block(self.function, "loop");
        let inner = ctx.append_basic_block(self.function, "do");
        let end = ctx.append_basic_block(self.function, "done");
        self.e.b.build_unconditional_branch(header)?;
        self.e.b.position_at_end(header);
        let i = self.e.b.build_phi(ctx.i64_type(), self.name(&self.kernel.vars[var].name))?;
        let more = self.e.icmp(IntPredicate::SLT, i.as_basic_value(), to)?;
        self.e.b.build_conditional_branch(more.into_int_value(), inner, end)?;
        self.e.b.position_at_end(inner);
        self.vars[var.index()] = Some(i.as_basic_value());
        self.stmts(body)?;
        let next = self.e.b.build_int_nsw_add(
            i.as_basic_value().into_int_value(),
            self.e.i64(1).into_int_value(),
            "",
        )?;
        let last = self.e.b.get_insert_block().ok_or_else(|| EmitError::new("no block"))?;
        self.e.b.build_unconditional_branch(header)?;
        i.add_incoming(&[(&from as &dyn BasicValue<'c>, before), (&next as &dyn BasicValue<'c>, last)]);
        self.e.b.position_at_end(end);
        Ok(())
    }

    // ---- buffers

    fn alloc(&mut self, buf: BufId) -> EmitResult<()> {
        let decl = &self.kernel.bufs[buf];
        let len = decl.len.as_const().and_then(|n| u32::try_from(n).ok());
        let len = len.ok_or_else(|| EmitError(format!("length of {} is not a constant", decl.name)))?;
        let ty = self.e.cell_type(decl.dtype)?.array_type(len);
        let align = decl.align.max(1).next_power_of_two();
        let pointer = match decl.space {
            MemorySpace::Local | MemorySpace::Stack => {
                // Unrolled and repeated allocations share one slot: contents begin undefined each time.
                if let Some(known) = self.bufs[buf.index()] {
                    known
                } else {
                    let slot = self.entry.build_alloca(ty, self.name(&decl.name))?;
                    if let Some(inst) = slot.as_instruction() {
                        inst.set_alignment(align).map_err(|e| EmitError(e.to_string()))?;
                    }
                    slot
                }
            }
            MemorySpace::Shared => self.shared_array(buf, ty, align)?,
            MemorySpace::Global => {
                return Err(EmitError(format!("allocation of global buffer {}", decl.name)));
            }
        };
        self.bufs[buf.index()] = Some(pointer);
        Ok(())
    }

    fn shared_array(
        &self,
        buf: BufId,
        ty: inkwell::types::ArrayType<'c>,
        align: u32,
    ) -> EmitResult<PointerValue<'c>> {
        let name = &self.kernel.bufs[buf].name;
        if self.machine == ExecutionModel::Cpu {
            return Err(EmitError(format!("shared buffer {name} in a CPU kernel")));
        }
        let space = Some(AddressSpace::from(SHARED_SPACE));
        if let Some(&at) = self.dynamic_shared.get(&buf) {
            // One array for all kernels of a module; each launch says how long it is.
            let all = self.e.module.get_global(DYNAMIC_SHARED).unwrap_or_else(|| {
                let all = self.e.module.add_global(self.e.ctx.i8_type().array_type(0), space, DYNAMIC_SHARED);
                all.set_alignment(SharedMemory::ALIGN);
                all
            });
            return self.e.offset(all.as_pointer_value(), at.into());
        }
        let function = self.function.get_name().to_string_lossy();
        let global_name = format!("{function}_{name}_{}", self.e.module.get_globals().count());
        let global = self.e.module.add_global(ty, space, &global_name);
        global.set_linkage(Linkage::Internal);
        global.set_alignment(align);
        global.set_initializer(&ty.get_undef());
        Ok(global.as_pointer_value())
    }

    // ---- GPU

    pub(super) fn gpu_index(&self, register: &str, axis: u8) -> EmitResult<LlvmValue<'c>> {
        if self.machine == ExecutionModel::Cpu {
            return Err(EmitError::new("GPU loop in a CPU kernel"));
        }
        let axis =
            ["x", "y", "z"].get(usize::from(axis)).ok_or_else(|| EmitError(format!("GPU axis {axis}")))?;
        let id = self.e.intrinsic_value(&format!("llvm.nvvm.read.ptx.sreg.{register}.{axis}"), &[], &[])?;
        self.e.cast(Op::ZExt, id, self.e.ctx.i64_type().into())
    }

    /// Threads beyond the extent skip the body.
    fn thread_body(&mut self, id: LlvmValue<'c>, extent: i64, axis: u8, body: &[Stmt]) -> EmitResult<()> {
        let ExecutionModel::Gpu { threads, .. } = self.machine else {
            return Err(EmitError::new("GPU loop in a CPU kernel"));
        };
        if i64::from(threads[usize::from(axis)]) == extent {
            return self.stmts(body);
        }
        if has_barrier(body) {
            return Err(EmitError::new("barrier inside a thread loop that is narrower than the block"));
        }
        let inside = self.e.icmp(IntPredicate::SLT, id, self.e.i64(extent))?;
        self.if_(inside, body, &[])
    }
}

fn any_stmt(body: &[Stmt], test: &impl Fn(&Stmt) -> bool) -> bool {
    body.iter().any(|s| {
        test(s)
            || match s {
                Stmt::For { body, .. } => any_stmt(body, test),
                Stmt::If { then, otherwise, .. } => any_stmt(then, test) || any_stmt(otherwise, test),
                _ => false,
            }
    })
}

fn has_par(body: &[Stmt]) -> bool {
    any_stmt(body, &|s| matches!(s, Stmt::For { kind: ForKind::Par, .. }))
}

fn has_barrier(body: &[Stmt]) -> bool {
    any_stmt(body, &|s| matches!(s, Stmt::Barrier))
}
