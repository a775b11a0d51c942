//! Steps as functions of direct calls: `int32_t name(mlcc_ctx *, uint32_t worker, uint32_t workers)`.
//!
//! A step checks its arguments first (every worker alike, so that all of them leave before the first barrier), reads the
//! buffers' addresses from the context and calls the kernels in order. A barrier is a call through the context,
//! skipped when there is one worker. After each item the caller is told, if the context says whom (`mlcc_abi::Ctx::trace`).

use super::isa::Machine;
use crate::error::CodegenError;
use crate::model::{Checks, Limits};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{
    AbiParam, Block, BlockArg, FuncRef, Function, InstBuilder, MemFlagsData, SigRef, Signature, Type,
    UserFuncName, Value, types,
};
use cranelift_codegen::isa::CallConv;
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_module::FuncId;
use mlcc_abi::{Ctx, NO_PIECE, Sequence, status};
use mlcc_ir::dim::{Atom, Dim, Sym};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{Base, Launch, Pieces, Repeat, Shares, Step, StepItem};
use std::collections::BTreeMap;
use std::mem::offset_of;

pub(super) fn step_signature() -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.extend([types::I64, types::I32, types::I32].map(AbiParam::new));
    signature.returns.push(AbiParam::new(types::I32));
    signature
}

/// A kernel as a step calls it.
pub(super) struct Callee<'a> {
    pub kernel: &'a Kernel,
    pub id: FuncId,
}

/// Kernels by name.
pub(super) type Callees<'a> = BTreeMap<&'a str, Callee<'a>>;

struct Entry<'f> {
    fb: FunctionBuilder<'f>,
    ctx: Value,
    worker: Value,
    workers: Value,
    /// The sequence that a launch is for.
    row: Option<Row>,
}

#[derive(Clone, Copy)]
struct Row {
    index: Value,
    state: Value,
    past: Value,
}

/// The function of a step. `declare` makes a kernel callable from the function.
pub(super) fn step_function(
    step: &Step,
    limits: Limits,
    callees: &Callees<'_>,
    machine: &Machine,
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
    fb.seal_block(block);
    let args = fb.block_params(block);
    let (ctx, worker, workers) = (args[0], args[1], args[2]);
    let mut entry = Entry { fb, ctx, worker, workers, row: None };
    entry.check(step, limits);
    entry.items(step, &refs);
    entry.return_status(status::OK);
    entry.fb.finalize(machine.isa.frontend_config());
    Ok(func)
}

fn check_launch<'a, 'k>(launch: &Launch, callees: &'a Callees<'k>) -> Result<&'a Callee<'k>, String> {
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

fn plain() -> MemFlagsData {
    MemFlagsData::trusted()
}

impl Entry<'_> {
    fn items(&mut self, step: &Step, refs: &BTreeMap<&str, FuncRef>) {
        let worker = self.fb.ins().uextend(types::I64, self.worker);
        let workers = self.fb.ins().uextend(types::I64, self.workers);
        let barrier = self.callback_signature(1);
        let trace = self.callback_signature(2);
        for (number, item) in step.items.iter().enumerate() {
            match item {
                StepItem::Barrier => self.barrier(barrier),
                StepItem::Launch(launch) => {
                    self.repeated(launch, refs[launch.kernel.as_str()], [worker, workers])
                }
            }
            self.trace(trace, number as i64);
        }
    }

    /// A launch, or a loop of launches for each sequence.
    fn repeated(&mut self, launch: &Launch, kernel: FuncRef, [worker, workers]: [Value; 2]) {
        let n = self.field(types::I64, offset_of!(Ctx, n));
        match launch.repeat {
            Repeat::Once => match &launch.shares {
                Shares::Static => self.launch(launch, kernel, [worker, workers]),
                Shares::Dynamic { pieces } => self.pieces(launch, kernel, [worker, workers], pieces),
            },
            Repeat::EachWorker => {
                let alone = [0, 1].map(|v| self.fb.ins().iconst(types::I64, v));
                self.launch(launch, kernel, alone);
            }
            Repeat::EachSequence => {
                let zero = self.fb.ins().iconst(types::I64, 0);
                self.for_rows(zero, n, |e| e.launch(launch, kernel, [worker, workers]));
            }
            Repeat::EachSequenceAlone => {
                let product = self.fb.ins().imul(worker, n);
                let from = self.fb.ins().udiv(product, workers);
                let product = self.fb.ins().iadd(product, n);
                let to = self.fb.ins().udiv(product, workers);
                self.for_rows(from, to, |e| {
                    let alone = [0, 1].map(|v| e.fb.ins().iconst(types::I64, v));
                    e.launch(launch, kernel, alone);
                });
            }
        }
    }

    /// A launch in pieces, as the caller deals them out; the worker's share, if it does not.
    fn pieces(&mut self, launch: &Launch, kernel: FuncRef, share: [Value; 2], pieces: &Dim) {
        let [take, inside, run, done] = [(); 4].map(|()| self.fb.create_block());
        let function = self.field(types::I64, offset_of!(Ctx, take));
        let this = self.field(types::I64, offset_of!(Ctx, take_self));
        let pieces = self.dim(pieces);
        let pieces = self.fb.ins().ireduce(types::I32, pieces);
        let smallest = self.fb.ins().udiv(pieces, self.workers);
        let [by, one] = [Pieces::SMALLEST, 1].map(|v| self.fb.ins().iconst(types::I32, v as i64));
        let equal = self.fb.ins().udiv(smallest, by);
        let equal = self.fb.ins().umax(equal, one);
        let each = self.fb.ins().iadd_imm_s(equal, Pieces::FURTHER as i64);
        let mut dynamic = self.fb.ins().icmp_imm_s(IntCC::NotEqual, function, 0);
        for (count, least) in [(self.workers, 2), (smallest, Pieces::LEAST as i64)] {
            let several = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, count, least);
            dynamic = self.fb.ins().band(dynamic, several);
        }
        let numbers = [(); 2].map(|()| self.fb.append_block_param(run, types::I64));
        self.fb.ins().brif(dynamic, take, &[], run, &share.map(BlockArg::from));

        self.fb.switch_to_block(take);
        let signature = self.take_signature();
        let taken = self.fb.ins().call_indirect(signature, function, &[this, self.worker, each]);
        let piece = self.fb.inst_results(taken)[0];
        let none = self.fb.ins().icmp_imm_s(IntCC::Equal, piece, i64::from(NO_PIECE as i32));
        self.fb.ins().brif(none, done, &[], inside, &[]);
        self.enter(inside);
        let part = self.part(piece, each, equal).map(|v| self.fb.ins().uextend(types::I64, v));
        self.fb.ins().jump(run, &part.map(BlockArg::from));

        self.enter(run);
        self.launch(launch, kernel, numbers);
        self.fb.ins().brif(dynamic, take, &[], done, &[]);
        self.fb.seal_block(take);
        self.enter(done);
    }

    /// [`Pieces::part`] of a number, with `each` pieces in a share, `equal` of them equal.
    fn part(&mut self, number: Value, each: Value, equal: Value) -> [Value; 2] {
        let [zero, smallest] = [0, Pieces::FURTHER as i64].map(|v| self.fb.ins().iconst(types::I32, v));
        let owner = self.fb.ins().udiv(number, each);
        let piece = self.fb.ins().urem(number, each);
        let next = self.fb.ins().iadd_imm_s(piece, 1);
        let behind = self.fb.ins().isub(next, equal);
        let whole = self.fb.ins().icmp(IntCC::SignedLessThan, behind, zero);
        let halvings = self.fb.ins().iadd_imm_s(behind, 1);
        let halvings = self.fb.ins().umin(halvings, smallest);
        let halvings = self.fb.ins().select(whole, zero, halvings);
        let each = self.fb.ins().ishl(equal, halvings);
        let last = self.fb.ins().icmp(IntCC::Equal, behind, smallest);
        let last = self.fb.ins().uextend(types::I32, last);
        let further = self.fb.ins().iadd_imm_s(each, -2);
        let further = self.fb.ins().iadd(further, last);
        let within = self.fb.ins().select(whole, piece, further);
        let before = self.fb.ins().imul(owner, each);
        [self.fb.ins().iadd(before, within), self.fb.ins().imul(self.workers, each)]
    }

    /// `body` for each sequence from number `from` until `to`.
    fn for_rows(&mut self, from: Value, to: Value, body: impl FnOnce(&mut Self)) {
        let (header, inside, done) = (self.fb.create_block(), self.fb.create_block(), self.fb.create_block());
        let index = self.fb.append_block_param(header, types::I64);
        self.fb.ins().jump(header, &[BlockArg::from(from)]);
        self.fb.switch_to_block(header);
        let more = self.fb.ins().icmp(IntCC::UnsignedLessThan, index, to);
        self.fb.ins().brif(more, inside, &[], done, &[]);
        self.enter(inside);
        let all = self.field(types::I64, offset_of!(Ctx, sequences));
        let at = self.fb.ins().imul_imm_s(index, size_of::<Sequence>() as i64);
        let at = self.fb.ins().iadd(all, at);
        let state = self.fb.ins().load(types::I64, plain(), at, offset_of!(Sequence, state) as i32);
        let past = self.fb.ins().load(types::I64, plain(), at, offset_of!(Sequence, past) as i32);
        self.row = Some(Row { index, state, past });
        body(self);
        self.row = None;
        let next = self.fb.ins().iadd_imm_s(index, 1);
        self.fb.ins().jump(header, &[BlockArg::from(next)]);
        self.fb.seal_block(header);
        self.enter(done);
    }

    fn launch(&mut self, launch: &Launch, kernel: FuncRef, workers: [Value; 2]) {
        let mut args = Vec::with_capacity(launch.buffers.len() + launch.dims.len() + 2);
        for buffer in &launch.buffers {
            let base = self.base(buffer.base);
            let mut address = self.fb.ins().iadd_imm_s(base, buffer.offset as i64);
            if buffer.per_past > 0 {
                let past = self.sym(Sym::Past);
                let rows = self.fb.ins().imul_imm_s(past, buffer.per_past as i64);
                address = self.fb.ins().iadd(address, rows);
            }
            if let Some(row) = self.row.filter(|_| buffer.per_row > 0) {
                let rows = self.fb.ins().imul_imm_s(row.index, buffer.per_row as i64);
                address = self.fb.ins().iadd(address, rows);
            }
            if buffer.per_worker > 0 {
                let worker = self.fb.ins().uextend(types::I64, self.worker);
                let copies = self.fb.ins().imul_imm_s(worker, buffer.per_worker as i64);
                address = self.fb.ins().iadd(address, copies);
            }
            args.push(address);
        }
        for dim in &launch.dims {
            args.push(self.dim(dim));
        }
        args.extend(workers);
        self.fb.ins().call(kernel, &args);
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
            Base::State => match self.row {
                Some(row) => return row.state,
                None => offset_of!(Ctx, state),
            },
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
            Sym::Past => match self.row {
                Some(row) => row.past,
                None => self.field(types::I64, offset_of!(Ctx, past)),
            },
            // Nothing is sized by it: rows of a batch are `n`.
            Sym::B => self.field(types::I64, offset_of!(Ctx, n)),
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
                Atom::Product(factors) => {
                    let one = self.fb.ins().iconst(types::I64, 1);
                    factors.iter().fold(one, |product, factor| {
                        let factor = self.dim(factor);
                        self.fb.ins().imul(product, factor)
                    })
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

    fn enter(&mut self, block: Block) {
        self.fb.switch_to_block(block);
        self.fb.seal_block(block);
    }

    fn check(&mut self, step: &Step, limits: Limits) {
        let checks = Checks::of_step(&step.name);
        if checks == Checks::None {
            return;
        }
        let n = self.sym(Sym::N);
        let most = match limits.most(&step.name) {
            0 => i64::MAX,
            most => most as i64,
        };
        let less = self.fb.ins().iadd_imm_s(n, -1);
        let bad = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, less, most);
        self.fail_if(bad, status::BAD_LENGTH);
        if checks == Checks::Rows {
            return;
        }
        // Unsigned, so that a negative `past`, which would reach before the state, is refused as well.
        let context = match limits.context {
            0 => i64::MAX,
            some => some as i64,
        };
        if checks == Checks::Sequences {
            let zero = self.fb.ins().iconst(types::I64, 0);
            self.for_rows(zero, n, |e| {
                let past = e.sym(Sym::Past);
                let full = e.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, past, context);
                e.fail_if(full, status::CONTEXT_FULL);
            });
        } else {
            let past = self.sym(Sym::Past);
            let full = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, past, context);
            self.fail_if(full, status::CONTEXT_FULL);
            let total = self.fb.ins().iadd(past, n);
            let full = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThan, total, context);
            self.fail_if(full, status::CONTEXT_FULL);
        }
        if limits.vocab > 0 {
            self.check_tokens(n, limits.vocab);
        }
    }

    /// Token ids index the embedding table.
    fn check_tokens(&mut self, n: Value, vocab: u64) {
        let tokens = self.base(Base::Tokens);
        let (header, inside, good) = (self.fb.create_block(), self.fb.create_block(), self.fb.create_block());
        let i = self.fb.append_block_param(header, types::I64);
        let zero = self.fb.ins().iconst(types::I64, 0);
        self.fb.ins().jump(header, &[BlockArg::from(zero)]);
        self.fb.switch_to_block(header);
        let more = self.fb.ins().icmp(IntCC::SignedLessThan, i, n);
        self.fb.ins().brif(more, inside, &[], good, &[]);
        self.enter(inside);
        let offset = self.fb.ins().ishl_imm_s(i, 2);
        let address = self.fb.ins().iadd(tokens, offset);
        let token = self.fb.ins().load(types::I32, plain(), address, 0);
        let token = self.fb.ins().uextend(types::I64, token);
        let bad = self.fb.ins().icmp_imm_s(IntCC::UnsignedGreaterThanOrEqual, token, vocab as i64);
        self.fail_if(bad, status::BAD_TOKEN);
        let next = self.fb.ins().iadd_imm_s(i, 1);
        self.fb.ins().jump(header, &[BlockArg::from(next)]);
        self.fb.seal_block(header);
        self.enter(good);
    }

    /// `void (void *self, uint32_t ...)` with so many numbers.
    fn callback_signature(&mut self, numbers: usize) -> SigRef {
        let mut signature = Signature::new(CallConv::SystemV);
        signature.params.push(AbiParam::new(types::I64));
        signature.params.extend((0..numbers).map(|_| AbiParam::new(types::I32)));
        self.fb.import_signature(signature)
    }

    /// `uint32_t (void *self, uint32_t worker, uint32_t pieces)`.
    fn take_signature(&mut self) -> SigRef {
        let mut signature = Signature::new(CallConv::SystemV);
        signature.params.extend([types::I64, types::I32, types::I32].map(AbiParam::new));
        signature.returns.push(AbiParam::new(types::I32));
        self.fb.import_signature(signature)
    }

    /// Tells that the item of that number is over, if somebody wants to know.
    fn trace(&mut self, signature: SigRef, item: i64) {
        let (tell, go_on) = (self.fb.create_block(), self.fb.create_block());
        self.fb.set_cold_block(tell);
        let function = self.field(types::I64, offset_of!(Ctx, trace));
        self.fb.ins().brif(function, tell, &[], go_on, &[]);
        self.enter(tell);
        let this = self.field(types::I64, offset_of!(Ctx, trace_self));
        let item = self.fb.ins().iconst(types::I32, item);
        self.fb.ins().call_indirect(signature, function, &[this, self.worker, item]);
        self.fb.ins().jump(go_on, &[]);
        self.enter(go_on);
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
}
