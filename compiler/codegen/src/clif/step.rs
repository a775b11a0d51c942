//! Functions of steps (see [`crate::step`]) in Cranelift's IR.

use super::isa::CraneliftIsa;
use crate::error::{CodegenError, EmitError};
use crate::model::EntryLimits;
use crate::step::{self, ClaimedWork, IntCompare, IntOp, StepCode};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, FuncRef, Function, InstBuilder, MemFlagsData, Signature, StackSlot,
    StackSlotData, StackSlotKind, UserFuncName, Value, types,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_module::FuncId;
use mlcc_abi::{Ctx, NO_CHUNK};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{GuidedChunks, LaunchItem, StepItem, StepProgram};
use std::collections::BTreeMap;
use std::mem::offset_of;

pub(super) fn step_signature() -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.extend([types::I64, types::I32, types::I32].map(AbiParam::new));
    signature.returns.push(AbiParam::new(types::I32));
    signature
}

/// A kernel as a step calls it.
pub(super) struct KernelCallee<'a> {
    pub kernel: &'a Kernel,
    pub id: FuncId,
}

/// Kernels by name.
pub(super) type CalleeTable<'a> = BTreeMap<&'a str, KernelCallee<'a>>;

/// The function of a step. `declare` makes a kernel callable from the function.
pub(super) fn step_function(
    step: &StepProgram,
    limits: EntryLimits,
    callees: &CalleeTable<'_>,
    machine: &CraneliftIsa,
    context: &mut FunctionBuilderContext,
    mut declare: impl FnMut(FuncId, &mut Function) -> FuncRef,
) -> Result<Function, CodegenError> {
    let mut func = Function::with_name_signature(UserFuncName::default(), step_signature());
    let mut refs = BTreeMap::new();
    for item in &step.items {
        if let StepItem::Launch(launch) = item {
            let callee = check_launch(launch, callees);
            let callee = callee.map_err(|what| CodegenError::Step { step: step.name.clone(), what })?;
            refs.entry(launch.kernel.as_str()).or_insert_with(|| declare(callee.id, &mut func));
        }
    }
    let mut fb = FunctionBuilder::new(&mut func, context);
    let block = fb.create_block();
    fb.append_block_params_for_function_params(block);
    fb.switch_to_block(block);
    let args = fb.block_params(block);
    let (ctx, worker, workers) = (args[0], args[1], args[2]);
    let wide = [worker, workers].map(|v| fb.ins().uextend(types::I64, v));
    let share = fb.create_sized_stack_slot(StackSlotData::new(StackSlotKind::ExplicitSlot, 16, 3));
    let mut function = ClifStepEmitter { fb, kernels: refs, ctx, worker, workers, wide, share };
    let emitted = step::emit(&mut function, step, limits);
    emitted.map_err(|f| CodegenError::Step { step: step.name.clone(), what: f.0 })?;
    // Loops jump back to blocks that were started before.
    function.fb.seal_all_blocks();
    function.fb.finalize(machine.isa.frontend_config());
    Ok(func)
}

fn check_launch<'a, 'k>(
    launch: &LaunchItem,
    callees: &'a CalleeTable<'k>,
) -> Result<&'a KernelCallee<'k>, String> {
    let name = &launch.kernel;
    let Some(callee) = callees.get(name.as_str()) else {
        return Err(format!("kernel {name} is launched but not among the kernels"));
    };
    let buffers = (callee.kernel.params.len(), launch.buffers.len());
    let dims = (callee.kernel.dims.len(), launch.dims.len());
    for (what, (expected, found)) in [("buffers", buffers), ("dims", dims)] {
        if expected != found {
            return Err(format!("kernel {name}: expected {expected} {what}, found {found}"));
        }
    }
    Ok(callee)
}

struct ClifStepEmitter<'a, 'f> {
    fb: FunctionBuilder<'f>,
    kernels: BTreeMap<&'a str, FuncRef>,
    ctx: Value,
    /// The worker and the number of workers as given (i32), and in 64 bits.
    worker: Value,
    workers: Value,
    wide: [Value; 2],
    /// The share that was taken last.
    share: StackSlot,
}

impl ClifStepEmitter<'_, '_> {
    fn iconst(&mut self, value: i64) -> Value {
        self.fb.ins().iconst(types::I64, value)
    }

    /// Calls a function of the caller: `(void *self, uint32_t ...)`, which gives nothing or an `uint32_t`.
    fn call_back(&mut self, function: Value, this: usize, numbers: &[Value], returns: bool) -> Option<Value> {
        let mut signature = Signature::new(CallConv::SystemV);
        signature.params.push(AbiParam::new(types::I64));
        signature.params.extend(numbers.iter().map(|_| AbiParam::new(types::I32)));
        signature.returns.extend(returns.then_some(AbiParam::new(types::I32)));
        let signature = self.fb.import_signature(signature);
        let this = self.field(this);
        let args = [&[this], numbers].concat();
        let call = self.fb.ins().call_indirect(signature, function, &args);
        self.fb.inst_results(call).first().copied()
    }

    /// An address in the context.
    fn field(&mut self, offset: usize) -> Value {
        self.fb.ins().load(types::I64, MemFlagsData::trusted(), self.ctx, offset as i32)
    }

    /// Returns whether there are pieces to take, the number of pieces of a share, and how many of them are
    /// equal.
    fn chunk_counts(&mut self, function: Value, pieces: Value) -> (Value, Value, Value) {
        let smallest = self.fb.ins().udiv(pieces, self.workers);
        let [by, one] = [GuidedChunks::SMALLEST, 1].map(|v| self.fb.ins().iconst(types::I32, v as i64));
        let equal = self.fb.ins().udiv(smallest, by);
        let equal = self.fb.ins().umax(equal, one);
        let each = self.fb.ins().iadd_imm_s(equal, GuidedChunks::FURTHER as i64);
        let mut dynamic = self.fb.ins().icmp_imm_s(IntCC::NotEqual, function, 0);
        for (count, least) in [(self.workers, 2), (smallest, GuidedChunks::LEAST as i64)] {
            let several = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, count, least);
            dynamic = self.fb.ins().band(dynamic, several);
        }
        (dynamic, each, equal)
    }

    /// [`GuidedChunks::equal_part`] of a number, with `each` pieces in a share, `equal` of them equal.
    fn chunk_part(&mut self, number: Value, each: Value, equal: Value) -> [Value; 2] {
        let [zero, smallest] = [0, GuidedChunks::FURTHER as i64].map(|v| self.fb.ins().iconst(types::I32, v));
        let owner = self.fb.ins().udiv(number, each);
        let piece = self.fb.ins().urem(number, each);
        let next = self.fb.ins().iadd_imm_s(piece, 1);
        let further = self.fb.ins().isub(next, equal);
        let whole = self.fb.ins().icmp(IntCC::SignedLessThan, further, zero);
        let halvings = self.fb.ins().iadd_imm_s(further, 1);
        let halvings = self.fb.ins().umin(halvings, smallest);
        let halvings = self.fb.ins().select(whole, zero, halvings);
        let each = self.fb.ins().ishl(equal, halvings);
        let last = self.fb.ins().icmp(IntCC::Equal, further, smallest);
        let last = self.fb.ins().uextend(types::I32, last);
        let cut = self.fb.ins().iadd_imm_s(each, -2);
        let cut = self.fb.ins().iadd(cut, last);
        let within = self.fb.ins().select(whole, piece, cut);
        let before = self.fb.ins().imul(owner, each);
        [self.fb.ins().iadd(before, within), self.fb.ins().imul(self.workers, each)]
    }

    /// Keeps a share and goes on in `next`.
    fn store_claim(&mut self, share: [Value; 2], what: ClaimedWork, next: Block) {
        for (at, value) in [0, 8].into_iter().zip(share) {
            self.fb.ins().stack_store(types::I64, value, self.share, at);
        }
        let what = self.fb.ins().iconst(types::I32, what as i64);
        self.fb.ins().jump(next, &[BlockArg::from(what)]);
    }
}

type EmitResult<T> = Result<T, EmitError>;

impl StepCode for ClifStepEmitter<'_, '_> {
    type Value = Value;
    type Block = Block;
    type Head = Block;

    fn context(&self) -> Value {
        self.ctx
    }
    fn share(&self) -> [Value; 2] {
        self.wide
    }

    fn int(&mut self, value: i64) -> Value {
        self.iconst(value)
    }
    fn op(&mut self, op: IntOp, a: Value, b: Value) -> EmitResult<Value> {
        let ins = self.fb.ins();
        Ok(match op {
            IntOp::Add => ins.iadd(a, b),
            IntOp::Sub => ins.isub(a, b),
            IntOp::Mul => ins.imul(a, b),
            IntOp::UnsignedDiv => ins.udiv(a, b),
            IntOp::SignedDiv => ins.sdiv(a, b),
            IntOp::SignedRem => ins.srem(a, b),
            IntOp::SignedMin => ins.smin(a, b),
            IntOp::SignedMax => ins.smax(a, b),
        })
    }
    fn compare(&mut self, compare: IntCompare, a: Value, b: Value) -> EmitResult<Value> {
        let condition = match compare {
            IntCompare::SignedLess => IntCC::SignedLessThan,
            IntCompare::SignedGreater => IntCC::SignedGreaterThan,
            IntCompare::UnsignedLess => IntCC::UnsignedLessThan,
            IntCompare::UnsignedGreater => IntCC::UnsignedGreaterThan,
            IntCompare::UnsignedAtLeast => IntCC::UnsignedGreaterThanOrEqual,
        };
        Ok(self.fb.ins().icmp(condition, a, b))
    }
    fn number(&mut self, condition: Value) -> EmitResult<Value> {
        Ok(self.fb.ins().uextend(types::I64, condition))
    }

    fn offset(&mut self, address: Value, bytes: u64) -> EmitResult<Value> {
        Ok(self.fb.ins().iadd_imm_s(address, bytes as i64))
    }
    fn advance(&mut self, address: Value, bytes: Value) -> EmitResult<Value> {
        Ok(self.fb.ins().iadd(address, bytes))
    }
    fn load_int(&mut self, address: Value, offset: usize) -> EmitResult<Value> {
        Ok(self.fb.ins().load(types::I64, MemFlagsData::trusted(), address, offset as i32))
    }
    fn load_address(&mut self, address: Value, offset: usize) -> EmitResult<Value> {
        self.load_int(address, offset)
    }
    fn load_entry(&mut self, table: Value, index: Value) -> EmitResult<Value> {
        let offset = self.fb.ins().ishl_imm_s(index, 2);
        let address = self.fb.ins().iadd(table, offset);
        let entry = self.fb.ins().load(types::I32, MemFlagsData::trusted(), address, 0);
        Ok(self.fb.ins().uextend(types::I64, entry))
    }

    fn block(&mut self, _name: &'static str) -> Block {
        self.fb.create_block()
    }
    fn enter(&mut self, block: Block) {
        self.fb.switch_to_block(block);
    }
    fn jump(&mut self, to: Block) -> EmitResult<()> {
        self.fb.ins().jump(to, &[]);
        Ok(())
    }
    fn branch(&mut self, condition: Value, then: Block, otherwise: Block) -> EmitResult<()> {
        self.fb.ins().brif(condition, then, &[], otherwise, &[]);
        Ok(())
    }
    fn begin_loop(&mut self, _name: &'static str, first: [Value; 2]) -> EmitResult<(Block, [Value; 2])> {
        let head = self.fb.create_block();
        let numbers = [(); 2].map(|()| self.fb.append_block_param(head, types::I64));
        self.repeat(head, first)?;
        self.enter(head);
        Ok((head, numbers))
    }
    fn repeat(&mut self, head: Block, next: [Value; 2]) -> EmitResult<()> {
        self.fb.ins().jump(head, &next.map(BlockArg::from));
        Ok(())
    }
    fn repeat_if(&mut self, condition: Value, head: Block, next: [Value; 2], done: Block) -> EmitResult<()> {
        self.fb.ins().brif(condition, head, &next.map(BlockArg::from), done, &[]);
        Ok(())
    }
    fn leave(&mut self, status: i32) -> EmitResult<()> {
        let status = self.fb.ins().iconst(types::I32, i64::from(status));
        self.fb.ins().return_(&[status]);
        Ok(())
    }

    fn call(&mut self, kernel: &str, args: &[Value]) -> EmitResult<()> {
        let function = self.kernels.get(kernel);
        let function = *function.ok_or_else(|| EmitError::new("is launched but not among the kernels"))?;
        self.fb.ins().call(function, args);
        Ok(())
    }
    fn wait(&mut self) -> EmitResult<()> {
        let [wait, go_on] = [(); 2].map(|()| self.fb.create_block());
        let several = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThan, self.workers, 1);
        self.branch(several, wait, go_on)?;
        self.enter(wait);
        let function = self.field(offset_of!(Ctx, barrier));
        self.call_back(function, offset_of!(Ctx, barrier_self), &[self.worker], false);
        self.jump(go_on)?;
        self.enter(go_on);
        Ok(())
    }
    fn all_gather(&mut self, item: u32, [part, all, rows, bytes]: [Value; 4]) -> EmitResult<()> {
        let mut signature = Signature::new(CallConv::SystemV);
        let types = [types::I64, types::I32, types::I64, types::I64, types::I64, types::I64];
        signature.params.extend(types.map(AbiParam::new));
        let signature = self.fb.import_signature(signature);
        let function = self.field(offset_of!(Ctx, all_gather));
        let this = self.field(offset_of!(Ctx, all_gather_self));
        let item = self.fb.ins().iconst(types::I32, i64::from(item));
        self.fb.ins().call_indirect(signature, function, &[this, item, part, all, rows, bytes]);
        Ok(())
    }
    fn report_done(&mut self, item: u32) -> EmitResult<()> {
        let [tell, go_on] = [(); 2].map(|()| self.fb.create_block());
        self.fb.set_cold_block(tell);
        let function = self.field(offset_of!(Ctx, trace));
        self.branch(function, tell, go_on)?;
        self.enter(tell);
        let item = self.fb.ins().iconst(types::I32, i64::from(item));
        self.call_back(function, offset_of!(Ctx, trace_self), &[self.worker, item], false);
        self.jump(go_on)?;
        self.enter(go_on);
        Ok(())
    }
    fn narrow(&mut self, value: Value) -> EmitResult<Value> {
        Ok(self.fb.ins().ireduce(types::I32, value))
    }
    fn claim_chunk(&mut self, pieces: Value) -> EmitResult<Value> {
        let [take, piece, whole, done] = [(); 4].map(|()| self.fb.create_block());
        let taken = self.fb.append_block_param(done, types::I32);
        let function = self.field(offset_of!(Ctx, next_chunk));
        let (dynamic, each, equal) = self.chunk_counts(function, pieces);
        self.branch(dynamic, take, whole)?;

        self.enter(whole);
        self.store_claim(self.wide, ClaimedWork::Share, done);

        self.enter(take);
        let number = self.call_back(function, offset_of!(Ctx, next_chunk_self), &[self.worker, each], true);
        let number = number.ok_or_else(|| EmitError::new("no number of a piece"))?;
        let none = self.fb.ins().icmp_imm_s(IntCC::Equal, number, i64::from(NO_CHUNK as i32));
        let nothing = self.fb.ins().iconst(types::I32, ClaimedWork::None as i64);
        self.fb.ins().brif(none, done, &[BlockArg::from(nothing)], piece, &[]);

        self.enter(piece);
        let part = self.chunk_part(number, each, equal).map(|v| self.fb.ins().uextend(types::I64, v));
        self.store_claim(part, ClaimedWork::Chunk, done);
        self.enter(done);
        Ok(taken)
    }
    fn is_claimed(&mut self, taken: Value, what: ClaimedWork) -> EmitResult<Value> {
        Ok(self.fb.ins().icmp_imm_s(IntCC::Equal, taken, what as i64))
    }
    fn claimed_share(&mut self) -> EmitResult<[Value; 2]> {
        Ok([0, 8].map(|at| self.fb.ins().stack_load(types::I64, types::I64, self.share, at)))
    }
}
