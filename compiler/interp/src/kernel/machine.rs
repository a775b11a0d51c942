//! Runs a [`KernelProgram`] for one CPU worker or one GPU block: all threads of the block in lockstep,
//! statement by statement, with a mask of active threads (a CPU worker is a block of one thread).

use super::cell::{self, RegisterCell};
use super::copies::CopyGroups;
use super::error::{KernelFault, RunResult};
use super::memory::{AccessOrigin, BufferStorage};
use super::program::{CompiledNode, CompiledStmt, KernelProgram, RegisterInstr, RegisterOp, RegisterRange};
use mlcc_ir::kernel::ForKind;
use mlcc_ir::step::WorkShare;
use mlcc_ir::types::DType;

/// The part of the work that a run does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExecutionTask {
    /// The share of worker `number`.
    Worker {
        share: WorkShare,
        number: usize,
    },
    Block {
        index: [i64; 3],
        number: usize,
    },
}

pub(crate) struct KernelMachine<'p> {
    pub program: &'p KernelProgram,
    pub registers: Vec<RegisterCell>,
    pub memory: Vec<BufferStorage>,
    pub mask: Vec<bool>,
    pub task: ExecutionTask,
    /// Barriers passed.
    pub epoch: u32,
    /// Copies of each thread.
    pub copies: Vec<CopyGroups>,
}

impl<'p> KernelMachine<'p> {
    pub fn new(
        program: &'p KernelProgram,
        memory: Vec<BufferStorage>,
        dims: &[i64],
    ) -> RunResult<KernelMachine<'p>> {
        let threads = program.threads.iter().product();
        let mut machine = KernelMachine {
            program,
            registers: vec![0; program.cells * threads],
            memory,
            mask: vec![true; threads],
            task: ExecutionTask::Worker { share: WorkShare::WHOLE, number: 0 },
            epoch: 0,
            copies: vec![CopyGroups::default(); threads],
        };
        for (reg, &value) in program.dims.iter().zip(dims) {
            machine.broadcast(*reg, value as RegisterCell);
        }
        machine.compute_all(&program.preamble)?;
        Ok(machine)
    }

    /// Runs the kernel for one worker or block.
    pub fn run(&mut self, task: ExecutionTask) -> RunResult {
        self.task = task;
        self.epoch = 0;
        self.mask.fill(true);
        self.memory.iter_mut().for_each(BufferStorage::begin_block);
        let program = self.program;
        self.run_stmts(&program.body)?;
        self.no_copies_left()
    }

    pub fn threads(&self) -> usize {
        self.mask.len()
    }

    pub fn access_origin(&self, thread: usize) -> AccessOrigin {
        let (ExecutionTask::Worker { number: block, .. } | ExecutionTask::Block { number: block, .. }) =
            self.task;
        AccessOrigin { block: block as u32, thread: thread as u32, epoch: self.epoch }
    }

    /// Cells of a register for all threads.
    pub fn cells(&self, reg: RegisterRange) -> &[RegisterCell] {
        let threads = self.threads();
        &self.registers[reg.at * threads..(reg.at + reg.lanes) * threads]
    }

    pub fn broadcast(&mut self, reg: Option<RegisterRange>, value: RegisterCell) {
        if let Some(reg) = reg {
            let threads = self.threads();
            self.registers[reg.at * threads..(reg.at + reg.lanes) * threads].fill(value);
        }
    }

    pub fn run_stmts(&mut self, stages: &'p [CompiledStmt]) -> RunResult {
        stages.iter().try_for_each(|stage| self.run_stmt(stage))
    }

    fn run_stmt(&mut self, stage: &'p CompiledStmt) -> RunResult {
        self.compute_all(&stage.before)?;
        match &stage.node {
            CompiledNode::For { extent, var, name, kind, body } => match kind {
                ForKind::Serial | ForKind::Unroll => self.run_serial(*extent, *var, name, body),
                ForKind::Par => self.run_parallel(*extent, *var, name, body),
                ForKind::Block(axis) => self.block_axis(*axis, *extent, *var, body),
                ForKind::Thread(axis) => self.thread_axis(*axis, *extent, *var, body),
            },
            CompiledNode::If { cond, then, otherwise } => self.run_branch(*cond, then, otherwise),
            CompiledNode::Let { var, value } => {
                if let Some(var) = var {
                    let threads = self.threads();
                    let from = value.at * threads..(value.at + value.lanes) * threads;
                    self.registers.copy_within(from, var.at * threads);
                }
                Ok(())
            }
            CompiledNode::Store { buf, index, value, mask } => self.store(*buf, *index, *value, *mask),
            CompiledNode::Alloc { buf } => {
                self.memory[*buf].poison(&self.mask);
                Ok(())
            }
            CompiledNode::Barrier => self.barrier(),
            CompiledNode::Hint { buf, index } => self.check_hint(*buf, *index),
            CompiledNode::Copy { instr, to, from, bytes } => self.begin_copies(instr, *to, *from, *bytes),
            CompiledNode::Commit => {
                self.commit_copies();
                Ok(())
            }
            CompiledNode::Wait { pending } => self.wait_for_copies(*pending),
            CompiledNode::Nothing => Ok(()),
        }
    }

    fn run_parallel(
        &mut self,
        extent: RegisterRange,
        var: Option<RegisterRange>,
        name: &str,
        body: &'p [CompiledStmt],
    ) -> RunResult {
        let extent = self.cells(extent)[0] as i64;
        let share = match self.task {
            ExecutionTask::Worker { share, .. } => share,
            ExecutionTask::Block { .. } => WorkShare::WHOLE,
        };
        for i in share.iterations(extent) {
            self.broadcast(var, i as RegisterCell);
            self.run_stmts(body).map_err(|e| e.inside(name, i))?;
        }
        Ok(())
    }

    fn store(
        &mut self,
        buf: usize,
        index: RegisterRange,
        value: RegisterRange,
        mask: Option<RegisterRange>,
    ) -> RunResult {
        let (mut who, threads) = (self.access_origin(0), self.threads());
        let KernelMachine { registers, memory, mask: active, .. } = self;
        let of = |reg: RegisterRange| &registers[reg.at * threads..(reg.at + reg.lanes) * threads];
        let (indices, values, lane_mask) = (of(index), of(value), mask.map(of));
        let storage = &mut memory[buf];
        for (thread, _) in active.iter().enumerate().filter(|(_, on)| **on) {
            who.thread = thread as u32;
            for lane in thread * index.lanes..(thread + 1) * index.lanes {
                if lane_mask.is_none_or(|m| m[lane] != 0) {
                    storage.store(indices[lane] as i64, values[lane], who)?;
                }
            }
        }
        Ok(())
    }

    fn check_hint(&mut self, buf: usize, index: RegisterRange) -> RunResult {
        let threads = self.threads();
        let indices = &self.registers[index.at * threads..(index.at + index.lanes) * threads];
        let storage = &self.memory[buf];
        for (thread, _) in self.mask.iter().enumerate().filter(|(_, on)| **on) {
            for &at in &indices[thread * index.lanes..(thread + 1) * index.lanes] {
                storage.check_bounds(at as i64, thread as u32)?;
            }
        }
        Ok(())
    }

    fn load(
        &mut self,
        buf: usize,
        index: RegisterRange,
        mask: Option<RegisterRange>,
        out: RegisterRange,
    ) -> RunResult {
        let (mut who, threads) = (self.access_origin(0), self.threads());
        let KernelMachine { registers, memory, mask: active, .. } = self;
        let (below, rest) = registers.split_at_mut(out.at * threads);
        let of = |reg: RegisterRange| &below[reg.at * threads..(reg.at + reg.lanes) * threads];
        let (indices, lane_mask) = (of(index), mask.map(of));
        let storage = &mut memory[buf];
        for (thread, _) in active.iter().enumerate().filter(|(_, on)| **on) {
            who.thread = thread as u32;
            for lane in thread * index.lanes..(thread + 1) * index.lanes {
                let on = lane_mask.is_none_or(|m| m[lane] != 0);
                rest[lane] = if on { storage.load(indices[lane] as i64, who)? } else { 0 };
            }
        }
        Ok(())
    }

    fn compute_all(&mut self, list: &[RegisterInstr]) -> RunResult {
        for inst in list {
            match &inst.op {
                RegisterOp::Load { buf, index, mask } => self.load(*buf, *index, *mask, inst.out)?,
                RegisterOp::ShuffleXor { instr, value, lane_mask } => {
                    self.shuffle_xor(instr, *value, *lane_mask, inst.out)?;
                }
                RegisterOp::Mma { instr, mma, operands } => {
                    self.multiply_accumulate(instr, mma, *operands, inst.out)?
                }
                RegisterOp::LoadMatrix { instr, at, matrices, transposed } => {
                    self.load_matrices(instr, *at, (*matrices as usize, *transposed), inst.out)?;
                }
                RegisterOp::IntChecked { op, a, b } => self.int_checked(*op, *a, *b, inst)?,
                pure => self.compute_pure(pure, inst),
            }
        }
        Ok(())
    }

    fn int_checked(
        &mut self,
        op: mlcc_ir::kernel::BinOp,
        a: RegisterRange,
        b: RegisterRange,
        inst: &RegisterInstr,
    ) -> RunResult {
        let first = inst.out.at * self.threads();
        for i in 0..inst.out.lanes * self.threads() {
            let (x, y) = (self.cells(a)[i] as i64, self.cells(b)[i] as i64);
            self.registers[first + i] = match cell::int2_checked(op, inst.dtype, x, y) {
                Ok(v) => cell::wrap_integer(inst.dtype, v),
                Err(why) if self.mask[i / inst.out.lanes] => {
                    return Err(KernelFault::Undefined { op: op.name(), a: x, b: y, why }.into());
                }
                Err(_) => 0,
            };
        }
        Ok(())
    }

    /// Operations that cannot fail are computed for all threads, active or not.
    fn compute_pure(&mut self, op: &RegisterOp, inst: &RegisterInstr) {
        let threads = self.mask.len();
        let (below, rest) = self.registers.split_at_mut(inst.out.at * threads);
        let out = &mut rest[..inst.out.lanes * threads];
        let (dtype, lanes) = (inst.dtype, inst.out.lanes);
        let of = |reg: &RegisterRange| &below[reg.at * threads..(reg.at + reg.lanes) * threads];
        match op {
            RegisterOp::Const(value) => out.fill(*value),
            RegisterOp::Int1 { f, a } => map(out, of(a), |x| cell::wrap_integer(dtype, f(x as i64))),
            RegisterOp::Int2 { f, a, b } => {
                zip(out, of(a), of(b), |x, y| cell::wrap_integer(dtype, f(x as i64, y as i64)))
            }
            RegisterOp::Float1 { f, a } => {
                map(out, of(a), |x| cell::of_float(dtype, f(cell::float(dtype, x))))
            }
            RegisterOp::Float2 { f, a, b } => match dtype {
                DType::F32 => {
                    zip(out, of(a), of(b), |x, y| cell::of_f32(f(cell::to_f32(x), cell::to_f32(y))))
                }
                _ => zip(out, of(a), of(b), |x, y| {
                    cell::of_float(dtype, f(cell::float(dtype, x), cell::float(dtype, y)))
                }),
            },
            RegisterOp::FloatCompare { f, of: from, a, b } => {
                zip(out, of(a), of(b), |x, y| {
                    RegisterCell::from(f(cell::float(*from, x), cell::float(*from, y)))
                });
            }
            RegisterOp::Fma { a, b, c } => {
                let value = |x| cell::float(dtype, x);
                for (((o, &a), &b), &c) in out.iter_mut().zip(of(a)).zip(of(b)).zip(of(c)) {
                    *o = cell::of_float(dtype, value(a).mul_add(value(b), value(c)));
                }
            }
            RegisterOp::Cast { from, a } => map(out, of(a), |x| cell::cast(*from, dtype, x)),
            RegisterOp::Bitcast { from, a } => bitcast(out, dtype, of(a), *from),
            RegisterOp::Select { cond, a, b } => {
                for (((o, &c), &a), &b) in out.iter_mut().zip(of(cond)).zip(of(a)).zip(of(b)) {
                    *o = if c != 0 { a } else { b };
                }
            }
            RegisterOp::Ramp { base, stride } => {
                for ((o, &base), &stride) in out.chunks_exact_mut(lanes).zip(of(base)).zip(of(stride)) {
                    let mut value = base as i64;
                    for o in o {
                        *o = cell::wrap_integer(dtype, value);
                        value = value.wrapping_add(stride as i64);
                    }
                }
            }
            RegisterOp::Splat(a) => {
                for (o, &value) in out.chunks_exact_mut(lanes).zip(of(a)) {
                    o.fill(value);
                }
            }
            RegisterOp::Shuffle { a, b, lanes: picks } => {
                for (thread, o) in out.chunks_exact_mut(lanes).enumerate() {
                    for (o, &pick) in o.iter_mut().zip(picks) {
                        let pick = pick as usize;
                        *o = match b {
                            Some(b) if pick >= a.lanes => of(b)[thread * b.lanes + pick - a.lanes],
                            _ => of(a)[thread * a.lanes + pick],
                        };
                    }
                }
            }
            RegisterOp::Load { .. }
            | RegisterOp::ShuffleXor { .. }
            | RegisterOp::Mma { .. }
            | RegisterOp::LoadMatrix { .. }
            | RegisterOp::IntChecked { .. } => {
                unreachable!("handled by compute")
            }
        }
    }

    pub fn barrier(&mut self) -> RunResult {
        let (active, threads) = (self.mask.iter().filter(|m| **m).count(), self.threads());
        if active != threads {
            return Err(KernelFault::NonUniformBarrier { active, threads }.into());
        }
        self.epoch += 1;
        Ok(())
    }
}

fn map(out: &mut [RegisterCell], a: &[RegisterCell], f: impl Fn(RegisterCell) -> RegisterCell) {
    for (o, &a) in out.iter_mut().zip(a) {
        *o = f(a);
    }
}

fn zip(
    out: &mut [RegisterCell],
    a: &[RegisterCell],
    b: &[RegisterCell],
    f: impl Fn(RegisterCell, RegisterCell) -> RegisterCell,
) {
    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *o = f(a, b);
    }
}

/// Threads follow each other and each has the same number of bytes on both sides, so the whole register is
/// one string of bytes.
fn bitcast(out: &mut [RegisterCell], to: DType, a: &[RegisterCell], from: DType) {
    let (small, large) = (from.bytes().unwrap_or(1), to.bytes().unwrap_or(1));
    let bytes: Vec<u8> = a.iter().flat_map(|c| c.to_le_bytes().into_iter().take(small)).collect();
    debug_assert_eq!(bytes.len(), out.len() * large);
    for (i, o) in out.iter_mut().enumerate() {
        *o = cell::read(to, &bytes, i);
    }
}

impl super::error::LocatedFault {
    /// Adds the loop around the failure.
    pub(crate) fn inside(mut self: Box<Self>, name: &str, value: i64) -> Box<Self> {
        self.at.push((name.into(), value));
        self
    }
}
