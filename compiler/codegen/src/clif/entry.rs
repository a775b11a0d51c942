//! Entry points: steps as direct calls with barriers between, state initialisation, metadata.

use super::ClifError;
use super::isa::Machine;
use crate::table::{PlanDesc, StateDesc};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{
    AbiParam, BlockArg, FuncRef, Function, GlobalValue, InstBuilder, MemFlagsData, SigRef, Signature, Type,
    UserFuncName, Value, types,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use mlcc_abi::{Ctx, status};
use mlcc_ir::dim::{Atom, Dim, Sym};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{Base, Launch, Step, StepItem};
use std::collections::BTreeMap;
use std::mem::offset_of;

/// `int32_t f(mlcc_ctx *, uint32_t worker, uint32_t workers)`.
pub(super) fn step_signature() -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.extend([types::I64, types::I32, types::I32].map(AbiParam::new));
    signature.returns.push(AbiParam::new(types::I32));
    signature
}

/// `const uint8_t *f(uint64_t *len)`.
pub(super) fn metadata_signature() -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.push(AbiParam::new(types::I64));
    signature.returns.push(AbiParam::new(types::I64));
    signature
}

/// A kernel as a step calls it.
pub(super) struct Callee<'a> {
    pub kernel: &'a Kernel,
    pub id: cranelift_module::FuncId,
}

struct Entry<'f> {
    fb: FunctionBuilder<'f>,
    ctx: Value,
    worker: Value,
    workers: Value,
}

fn start<'f>(func: &'f mut Function, context: &'f mut FunctionBuilderContext) -> Entry<'f> {
    let mut fb = FunctionBuilder::new(func, context);
    let block = fb.create_block();
    fb.append_block_params_for_function_params(block);
    fb.switch_to_block(block);
    fb.seal_block(block);
    let args = fb.block_params(block);
    let (ctx, worker, workers) = (args[0], args[1], args[2]);
    Entry { fb, ctx, worker, workers }
}

/// The function of a step. `declare` makes a kernel callable from the function.
pub(super) fn step_function(
    step: &Step,
    plan: &PlanDesc,
    callees: &BTreeMap<&str, Callee<'_>>,
    machine: Machine,
    context: &mut FunctionBuilderContext,
    mut declare: impl FnMut(cranelift_module::FuncId, &mut Function) -> FuncRef,
) -> Result<Function, ClifError> {
    let mut func = Function::with_name_signature(UserFuncName::default(), step_signature());
    let mut refs = BTreeMap::new();
    for item in &step.items {
        if let StepItem::Launch(launch) = item {
            let callee = check_launch(step, launch, callees)?;
            let name = launch.kernel.as_str();
            refs.entry(name).or_insert_with(|| declare(callee.id, &mut func));
        }
    }
    let mut entry = start(&mut func, context);
    entry.check_sizes(step, plan);
    entry.check_tokens(step, plan);
    let worker = entry.fb.ins().uextend(types::I64, entry.worker);
    let workers = entry.fb.ins().uextend(types::I64, entry.workers);
    let barrier = entry.barrier_signature();
    for item in &step.items {
        match item {
            StepItem::Barrier => entry.barrier(barrier),
            StepItem::Launch(launch) => {
                let mut args = Vec::with_capacity(launch.buffers.len() + launch.dims.len() + 2);
                for buffer in &launch.buffers {
                    let base = entry.base(buffer.base);
                    args.push(entry.fb.ins().iadd_imm_s(base, buffer.offset as i64));
                }
                for dim in &launch.dims {
                    args.push(entry.dim(dim));
                }
                args.extend([worker, workers]);
                entry.fb.ins().call(refs[launch.kernel.as_str()], &args);
            }
        }
    }
    entry.finish(machine)?;
    Ok(func)
}

fn check_launch<'a, 'k>(
    step: &Step,
    launch: &Launch,
    callees: &'a BTreeMap<&str, Callee<'k>>,
) -> Result<&'a Callee<'k>, ClifError> {
    let (step, kernel) = (step.name.clone(), launch.kernel.clone());
    let Some(callee) = callees.get(launch.kernel.as_str()) else {
        return Err(ClifError::UnknownKernel { step, kernel });
    };
    let buffers = (callee.kernel.params.len(), launch.buffers.len());
    let dims = (callee.kernel.dims.len(), launch.dims.len());
    for (what, (expected, found)) in [("buffers", buffers), ("dims", dims)] {
        if expected != found {
            return Err(ClifError::ArgumentCount { step, kernel, what, expected, found });
        }
    }
    Ok(callee)
}

/// Gives every state piece its initial value; workers share the work.
pub(super) fn init_function(
    states: &[StateDesc],
    machine: Machine,
    context: &mut FunctionBuilderContext,
) -> Result<Function, ClifError> {
    let mut func = Function::with_name_signature(UserFuncName::default(), step_signature());
    let mut entry = start(&mut func, context);
    let state = entry.base(Base::State);
    for piece in states {
        let address = entry.fb.ins().iadd_imm_s(state, piece.offset as i64);
        entry.fill(address, piece.bytes, piece.fill.unwrap_or(0.0).to_bits());
    }
    entry.finish(machine)?;
    Ok(func)
}

/// Returns the address of `text` and stores its length.
pub(super) fn metadata_function(
    len: usize,
    machine: Machine,
    context: &mut FunctionBuilderContext,
    text: impl FnOnce(&mut Function) -> GlobalValue,
) -> Result<Function, ClifError> {
    let mut func = Function::with_name_signature(UserFuncName::default(), metadata_signature());
    let text = text(&mut func);
    let mut fb = FunctionBuilder::new(&mut func, context);
    let block = fb.create_block();
    fb.append_block_params_for_function_params(block);
    fb.switch_to_block(block);
    fb.seal_block(block);
    let out = fb.block_params(block)[0];
    let len = fb.ins().iconst(types::I64, len as i64);
    fb.ins().store(plain(), len, out, 0);
    let address = fb.ins().symbol_value(types::I64, text);
    fb.ins().return_(&[address]);
    fb.finalize(machine.isa()?.frontend_config());
    Ok(func)
}

fn plain() -> MemFlagsData {
    MemFlagsData::trusted()
}

impl Entry<'_> {
    fn finish(mut self, machine: Machine) -> Result<(), ClifError> {
        self.return_status(status::OK);
        self.fb.finalize(machine.isa()?.frontend_config());
        Ok(())
    }

    fn return_status(&mut self, status: i32) {
        let status = self.fb.ins().iconst(types::I32, i64::from(status));
        self.fb.ins().return_(&[status]);
    }

    fn field(&mut self, ty: Type, offset: usize) -> Value {
        self.fb.ins().load(ty, plain(), self.ctx, offset as i32)
    }

    fn base(&mut self, base: Base) -> Value {
        let offset = match base {
            Base::Weights => offset_of!(Ctx, weights),
            Base::State => offset_of!(Ctx, state),
            Base::Arena => offset_of!(Ctx, arena),
            Base::Tokens => offset_of!(Ctx, tokens),
            Base::Logits => offset_of!(Ctx, logits),
            Base::Probs => offset_of!(Ctx, probs),
            Base::Temperature => {
                return self.fb.ins().iadd_imm_s(self.ctx, offset_of!(Ctx, temperature) as i64);
            }
        };
        self.field(types::I64, offset)
    }

    fn sym(&mut self, sym: Sym) -> Value {
        match sym {
            Sym::N => self.field(types::I64, offset_of!(Ctx, n)),
            Sym::Past => self.field(types::I64, offset_of!(Ctx, past)),
            Sym::B => {
                let batch = self.field(types::I32, offset_of!(Ctx, batch));
                self.fb.ins().uextend(types::I64, batch)
            }
        }
    }

    fn dim(&mut self, dim: &Dim) -> Value {
        let mut sum = self.fb.ins().iconst(types::I64, dim.constant());
        for (atom, coefficient) in dim.terms() {
            let value = match atom {
                Atom::Sym(sym) => self.sym(*sym),
                Atom::FloorDiv(dim, by) => {
                    let dividend = self.dim(dim);
                    self.floor_div(dividend, *by)
                }
                Atom::Min(a, b) => {
                    let (a, b) = (self.dim(a), self.dim(b));
                    self.fb.ins().smin(a, b)
                }
                Atom::Max(a, b) => {
                    let (a, b) = (self.dim(a), self.dim(b));
                    self.fb.ins().smax(a, b)
                }
            };
            let term = self.fb.ins().imul_imm_s(value, *coefficient);
            sum = self.fb.ins().iadd(sum, term);
        }
        sum
    }

    /// Rounds down; `by` is positive.
    fn floor_div(&mut self, value: Value, by: i64) -> Value {
        let divisor = self.fb.ins().iconst(types::I64, by);
        let quotient = self.fb.ins().sdiv(value, divisor);
        let remainder = self.fb.ins().srem(value, divisor);
        let negative = self.fb.ins().icmp_imm_s(IntCC::SignedLessThan, remainder, 0);
        let below = self.fb.ins().iadd_imm_s(quotient, -1);
        self.fb.ins().select(negative, below, quotient)
    }

    /// Returns `status` if the condition holds.
    fn fail_if(&mut self, condition: Value, status: i32) {
        let (fail, go_on) = (self.fb.create_block(), self.fb.create_block());
        self.fb.set_cold_block(fail);
        self.fb.ins().brif(condition, fail, &[], go_on, &[]);
        self.enter(fail);
        self.return_status(status);
        self.enter(go_on);
    }

    fn enter(&mut self, block: cranelift_codegen::ir::Block) {
        self.fb.switch_to_block(block);
        self.fb.seal_block(block);
    }

    /// Sizes beyond the memory plan would run over the arena. All workers see the same ones and return alike.
    fn check_sizes(&mut self, step: &Step, plan: &PlanDesc) {
        let n = self.sym(Sym::N);
        let most = match step.name.as_str() {
            "decode" => 1,
            _ if plan.chunk == 0 => i64::MAX,
            _ => plan.chunk as i64,
        };
        let less = self.fb.ins().iadd_imm_s(n, -1);
        let bad = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, less, most);
        self.fail_if(bad, status::BAD_LENGTH);
        if plan.context > 0 {
            let past = self.sym(Sym::Past);
            let total = self.fb.ins().iadd(past, n);
            let full = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThan, total, plan.context as i64);
            self.fail_if(full, status::CONTEXT_FULL);
        }
    }

    /// Token ids index the embedding table.
    fn check_tokens(&mut self, step: &Step, plan: &PlanDesc) {
        let reads = |item: &StepItem| match item {
            StepItem::Launch(launch) => launch.buffers.iter().any(|b| b.base == Base::Tokens),
            StepItem::Barrier => false,
        };
        if plan.vocab == 0 || !step.items.iter().any(reads) {
            return;
        }
        let (tokens, n) = (self.base(Base::Tokens), self.sym(Sym::N));
        let zero = self.fb.ins().iconst(types::I64, 0);
        let i = self.loop_start(zero, n);
        let offset = self.fb.ins().ishl_imm_s(i.value, 2);
        let address = self.fb.ins().iadd(tokens, offset);
        let token = self.fb.ins().load(types::I32, plain(), address, 0);
        let token = self.fb.ins().uextend(types::I64, token);
        let bad = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, token, plan.vocab as i64);
        self.fail_if(bad, status::BAD_TOKEN);
        self.loop_end(i);
    }

    fn barrier_signature(&mut self) -> SigRef {
        let mut signature = Signature::new(CallConv::SystemV);
        signature.params.extend([types::I64, types::I32].map(AbiParam::new));
        self.fb.import_signature(signature)
    }

    fn barrier(&mut self, signature: SigRef) {
        let (wait, go_on) = (self.fb.create_block(), self.fb.create_block());
        let shared = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThan, self.workers, 1);
        self.fb.ins().brif(shared, wait, &[], go_on, &[]);
        self.enter(wait);
        let function = self.field(types::I64, offset_of!(Ctx, barrier));
        let this = self.field(types::I64, offset_of!(Ctx, barrier_self));
        self.fb.ins().call_indirect(signature, function, &[this, self.worker]);
        self.fb.ins().jump(go_on, &[]);
        self.enter(go_on);
    }

    /// Fills `bytes` at `address` with a 32-bit pattern, 16 bytes at a time in slices; worker 0 does the rest.
    fn fill(&mut self, address: Value, bytes: u64, pattern: u32) {
        let worker = self.fb.ins().uextend(types::I64, self.worker);
        let workers = self.fb.ins().uextend(types::I64, self.workers);
        let words = self.fb.ins().iconst(types::I64, (u64::from(pattern) << 32 | u64::from(pattern)) as i64);
        let from = self.fb.ins().imul_imm_s(worker, (bytes / 16) as i64);
        let from = self.fb.ins().udiv(from, workers);
        let to = self.fb.ins().iadd_imm_s(worker, 1);
        let to = self.fb.ins().imul_imm_s(to, (bytes / 16) as i64);
        let to = self.fb.ins().udiv(to, workers);
        let flags = MemFlagsData::new().with_notrap();
        let i = self.loop_start(from, to);
        let offset = self.fb.ins().ishl_imm_s(i.value, 4);
        let at = self.fb.ins().iadd(address, offset);
        self.fb.ins().store(flags, words, at, 0);
        self.fb.ins().store(flags, words, at, 8);
        self.loop_end(i);
        if bytes.is_multiple_of(16) {
            return;
        }
        let (rest, done) = (self.fb.create_block(), self.fb.create_block());
        self.fb.ins().brif(self.worker, done, &[], rest, &[]);
        self.enter(rest);
        for at in bytes / 16 * 16..bytes {
            let byte = self.fb.ins().iconst(types::I8, i64::from(pattern >> (8 * (at % 4)) & 0xff));
            let at = self.fb.ins().iadd_imm_s(address, at as i64);
            self.fb.ins().store(flags, byte, at, 0);
        }
        self.fb.ins().jump(done, &[]);
        self.enter(done);
    }

    fn loop_start(&mut self, from: Value, to: Value) -> Loop {
        let (header, inside, exit) = (self.fb.create_block(), self.fb.create_block(), self.fb.create_block());
        let value = self.fb.append_block_param(header, types::I64);
        self.fb.ins().jump(header, &[BlockArg::from(from)]);
        self.fb.switch_to_block(header);
        let more = self.fb.ins().icmp(IntCC::SignedLessThan, value, to);
        self.fb.ins().brif(more, inside, &[], exit, &[]);
        self.enter(inside);
        Loop { header, exit, value }
    }

    fn loop_end(&mut self, i: Loop) {
        let next = self.fb.ins().iadd_imm_s(i.value, 1);
        self.fb.ins().jump(i.header, &[BlockArg::from(next)]);
        self.fb.seal_block(i.header);
        self.enter(i.exit);
    }
}

/// An open counting loop.
struct Loop {
    header: cranelift_codegen::ir::Block,
    exit: cranelift_codegen::ir::Block,
    value: Value,
}
