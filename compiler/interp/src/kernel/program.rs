//! A kernel prepared for execution: every distinct expression has a fixed place in a register file, and every
//! statement carries the list of instructions that compute its operands.
//!
//! The register file holds `lanes` cells per thread for each expression, ordered by expression id. Operands
//! are interned before the expressions that use them, so they always lie below; execution relies on this and
//! `KernelProgram::new` checks it. Expressions that cannot fail and read no memory are computed where the
//! last of their variables gets its value (for constants and dimensions: before the kernel starts), the
//! others by each statement that uses them.

use super::cell;
use super::copies::CopyOperand;
use super::error::KernelFault;
use crate::simt::matrix::MmaRegisters;
use mlcc_ir::fragment::MmaLayout;
use mlcc_ir::instr::{InstrDef, InstrSemantics};
use mlcc_ir::kernel::*;
use mlcc_ir::rewrite::expand_instrs;
use mlcc_ir::types::DType;
use mlcc_ir::verify::verify_kernel;

/// Place of an expression in the register file: first cell for one thread, and lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegisterRange {
    pub at: usize,
    pub lanes: usize,
}

/// Computes one register from registers below it.
pub(crate) enum RegisterOp {
    Const(u64),
    Int1 {
        f: fn(i64) -> i64,
        a: RegisterRange,
    },
    Int2 {
        f: fn(i64, i64) -> i64,
        a: RegisterRange,
        b: RegisterRange,
    },
    /// Operations that are not defined for all operands.
    IntChecked {
        op: BinOp,
        a: RegisterRange,
        b: RegisterRange,
    },
    Float1 {
        f: fn(f32) -> f32,
        a: RegisterRange,
    },
    Float2 {
        f: fn(f32, f32) -> f32,
        a: RegisterRange,
        b: RegisterRange,
    },
    FloatCompare {
        f: fn(f32, f32) -> bool,
        of: DType,
        a: RegisterRange,
        b: RegisterRange,
    },
    Fma {
        a: RegisterRange,
        b: RegisterRange,
        c: RegisterRange,
    },
    Cast {
        from: DType,
        a: RegisterRange,
    },
    Bitcast {
        from: DType,
        a: RegisterRange,
    },
    Select {
        cond: RegisterRange,
        a: RegisterRange,
        b: RegisterRange,
    },
    Ramp {
        base: RegisterRange,
        stride: RegisterRange,
    },
    Splat(RegisterRange),
    Shuffle {
        a: RegisterRange,
        b: Option<RegisterRange>,
        lanes: Vec<u32>,
    },
    Load {
        buf: usize,
        index: RegisterRange,
        mask: Option<RegisterRange>,
    },
    ShuffleXor {
        instr: &'static str,
        value: RegisterRange,
        lane_mask: RegisterRange,
    },
    Mma {
        instr: &'static str,
        mma: &'static MmaLayout,
        operands: MmaRegisters,
    },
    LoadMatrix {
        instr: &'static str,
        at: CopyOperand,
        matrices: u32,
        transposed: bool,
    },
}

pub(crate) struct RegisterInstr {
    pub op: RegisterOp,
    pub out: RegisterRange,
    pub dtype: DType,
}

pub(crate) enum CompiledNode {
    For {
        extent: RegisterRange,
        var: Option<RegisterRange>,
        name: String,
        kind: ForKind,
        body: Vec<CompiledStmt>,
    },
    If {
        cond: RegisterRange,
        then: Vec<CompiledStmt>,
        otherwise: Vec<CompiledStmt>,
    },
    Let {
        var: Option<RegisterRange>,
        value: RegisterRange,
    },
    Store {
        buf: usize,
        index: RegisterRange,
        value: RegisterRange,
        mask: Option<RegisterRange>,
    },
    Alloc {
        buf: usize,
    },
    Barrier,
    /// The place must lie within the buffer; whether anything was written there does not matter.
    Hint {
        buf: usize,
        index: RegisterRange,
    },
    /// Copies to shared memory that the active threads begin.
    Copy {
        instr: &'static str,
        to: CopyOperand,
        from: CopyOperand,
        bytes: u32,
    },
    Commit,
    Wait {
        pending: u32,
    },
    /// Operands are evaluated (their loads are checked), nothing else happens.
    Nothing,
}

/// A statement with the instructions that must run first.
pub(crate) struct CompiledStmt {
    pub before: Vec<RegisterInstr>,
    pub node: CompiledNode,
}

/// A kernel ready to run, any number of times.
pub struct KernelProgram {
    pub(crate) kernel: Kernel,
    pub(crate) preamble: Vec<RegisterInstr>,
    /// The registers of the dimension arguments, in order; `None` if the kernel does not read the dimension.
    pub(crate) dims: Vec<Option<RegisterRange>>,
    pub(crate) body: Vec<CompiledStmt>,
    /// Cells of the register file per thread.
    pub(crate) cells: usize,
    /// Launch shape: extents of the thread axes.
    pub(crate) threads: [usize; 3],
    /// Extents of the block axes.
    pub(crate) blocks: [Vec<RegisterRange>; 3],
    pub(crate) gpu: bool,
}

impl KernelProgram {
    /// Prepares a kernel. Fails on kernels that are not well formed.
    pub fn new(kernel: &Kernel) -> Result<KernelProgram, super::InterpError> {
        let error = |fault| super::InterpError { kernel: kernel.name.clone(), fault, at: Vec::new() };
        verify_kernel(kernel).map_err(|e| error(KernelFault::Malformed(e.to_string())))?;
        KernelCompiler::compile(expand_instrs(kernel, |_| false)).map_err(error)
    }
}

struct KernelCompiler {
    kernel: Kernel,
    regs: Vec<RegisterRange>,
    var_regs: Vec<Option<RegisterRange>>,
    /// Computed once before the kernel starts.
    early: Vec<bool>,
    /// Reads no memory and cannot fail.
    pure: Vec<bool>,
    /// Block in which a variable has its value, counted from the outside; `None` out of scope.
    scope: Vec<Option<usize>>,
    /// Pure expressions that have their value until the block ends, per open block.
    held: Vec<Vec<ExprId>>,
    /// The block that holds an expression.
    held_in: Vec<Option<usize>>,
    /// Instructions before the current statement of each open block.
    pending: Vec<Vec<RegisterInstr>>,
    /// Last statement for which an expression was emitted.
    emitted: Vec<u32>,
    statement: u32,
    threads: [usize; 3],
    blocks: [Vec<RegisterRange>; 3],
}

type CompileResult<T> = Result<T, KernelFault>;

fn malformed<T>(what: impl Into<String>) -> CompileResult<T> {
    Err(KernelFault::Malformed(what.into()))
}

impl KernelCompiler {
    fn compile(kernel: Kernel) -> CompileResult<KernelProgram> {
        let count = kernel.exprs.len();
        let mut c = KernelCompiler {
            regs: Vec::with_capacity(count),
            var_regs: vec![None; kernel.vars.len()],
            early: Vec::with_capacity(count),
            pure: Vec::with_capacity(count),
            scope: vec![None; kernel.vars.len()],
            held: Vec::new(),
            held_in: vec![None; count],
            pending: Vec::new(),
            emitted: vec![0; count],
            statement: 0,
            threads: [1; 3],
            blocks: Default::default(),
            kernel,
        };
        for (_, var) in &c.kernel.dims {
            c.scope[var.0 as usize] = Some(0);
        }
        let cells = c.lay_out()?;
        let mut preamble = Vec::new();
        for (i, id) in c.kernel.exprs.ids().enumerate().filter(|(i, _)| c.early[*i]) {
            if !matches!(c.kernel.exprs.expr(id), Expr::Var(_)) {
                preamble.push(c.compile_expr(i)?);
            }
        }
        let source = c.kernel.body.clone();
        let body = c.compile_block(None, &source)?;
        let dims = c.kernel.dims.iter().map(|(_, v)| c.var_regs[v.0 as usize]).collect();
        let gpu = c.kernel.is_gpu();
        let (threads, blocks) = (c.threads, c.blocks);
        Ok(KernelProgram { kernel: c.kernel, preamble, dims, body, cells, threads, blocks, gpu })
    }

    /// Gives every expression its register and decides which ones are computed early.
    fn lay_out(&mut self) -> CompileResult<usize> {
        let mut at = 0;
        for (i, id) in self.kernel.exprs.ids().enumerate() {
            let (expr, ty) = (self.kernel.exprs.expr(id), self.kernel.exprs.ty(id));
            let reg = RegisterRange { at, lanes: ty.lanes as usize };
            at += reg.lanes;
            let mut pure = match expr {
                Expr::Load { .. } | Expr::Instr(..) => false,
                Expr::Binary(BinOp::Div | BinOp::Rem, _, b) => {
                    self.kernel.exprs.as_int(*b).is_some_and(|c| c > 0)
                }
                Expr::Binary(BinOp::Shl | BinOp::Shr, _, b) => {
                    let bits = ty.dtype.bytes().unwrap_or(1) as i64 * 8;
                    self.kernel.exprs.as_int(*b).is_some_and(|c| (0..bits).contains(&c))
                }
                _ => true,
            };
            let mut early = match expr {
                Expr::Var(v) => self.scope[v.0 as usize].is_some(),
                _ => true,
            };
            let mut ordered = true;
            expr.for_each_child(|child| {
                ordered &= (child.0 as usize) < i;
                pure &= ordered && self.pure[child.0 as usize];
                early &= ordered && self.early[child.0 as usize];
            });
            if !ordered || ty.lanes == 0 || ty.dtype.is_packed() {
                return malformed(format!("expression {id} of type {ty}"));
            }
            if let Expr::Var(v) = expr {
                self.var_regs[v.0 as usize] = Some(reg);
            }
            self.regs.push(reg);
            self.pure.push(pure);
            self.early.push(pure && early);
        }
        Ok(at)
    }

    fn register_of(&self, id: ExprId) -> RegisterRange {
        self.regs[id.0 as usize]
    }

    /// Compiles a block; its first variable, if it is a loop's, has its value from the start.
    fn compile_block(&mut self, var: Option<VarId>, body: &[Stmt]) -> CompileResult<Vec<CompiledStmt>> {
        let depth = self.held.len();
        self.held.push(Vec::new());
        self.pending.push(Vec::new());
        let mut bound: Vec<VarId> = var.into_iter().collect();
        var.iter().for_each(|v| self.scope[v.0 as usize] = Some(depth));
        let mut stages = Vec::with_capacity(body.len());
        for stmt in body {
            let node = self.compile_stmt(stmt)?;
            let before = std::mem::take(&mut self.pending[depth]);
            stages.push(CompiledStmt { before, node });
            if let Stmt::Let { var, .. } = stmt {
                self.scope[var.0 as usize] = Some(depth);
                bound.push(*var);
            }
        }
        bound.iter().for_each(|v| self.scope[v.0 as usize] = None);
        self.pending.pop();
        for e in self.held.pop().unwrap_or_default() {
            self.held_in[e.0 as usize] = None;
        }
        Ok(stages)
    }

    fn compile_stmt(&mut self, stmt: &Stmt) -> CompileResult<CompiledNode> {
        self.statement += 1;
        Ok(match stmt {
            Stmt::For { var, extent, kind, body } => {
                self.emit(*extent)?;
                self.note_axis(*kind, *extent)?;
                let body = self.compile_block(Some(*var), body)?;
                let name = self.kernel.vars[*var].name.clone();
                let var = self.var_regs[var.0 as usize];
                CompiledNode::For { extent: self.register_of(*extent), var, name, kind: *kind, body }
            }
            Stmt::If { cond, then, otherwise } => {
                self.emit(*cond)?;
                let (then, otherwise) =
                    (self.compile_block(None, then)?, self.compile_block(None, otherwise)?);
                CompiledNode::If { cond: self.register_of(*cond), then, otherwise }
            }
            Stmt::Let { var, value } => {
                self.emit(*value)?;
                CompiledNode::Let { var: self.var_regs[var.0 as usize], value: self.register_of(*value) }
            }
            Stmt::Store { buf, index, value, mask } => {
                self.emit(*index)?;
                self.emit(*value)?;
                mask.iter().try_for_each(|m| self.emit(*m).map(drop))?;
                let (index, value, mask) =
                    (self.register_of(*index), self.register_of(*value), mask.map(|m| self.register_of(m)));
                CompiledNode::Store { buf: buf.0 as usize, index, value, mask }
            }
            Stmt::Alloc { buf } => CompiledNode::Alloc { buf: buf.0 as usize },
            Stmt::Barrier => CompiledNode::Barrier,
            Stmt::Commit => CompiledNode::Commit,
            Stmt::Wait { pending } => CompiledNode::Wait { pending: *pending },
            Stmt::Instr { instr, args } => self.instr_statement(instr.def(), args)?,
        })
    }

    fn instr_statement(&mut self, def: &'static InstrDef, args: &[ExprId]) -> CompileResult<CompiledNode> {
        match (def.meaning, args) {
            (InstrSemantics::Hint, [at]) => {
                let (buf, index) = self.emit_side(def, *at)?;
                Ok(CompiledNode::Hint { buf, index })
            }
            (InstrSemantics::Copy { bytes }, [to, from]) => {
                let (to, from) = (self.emit_side(def, *to)?, self.emit_side(def, *from)?);
                Ok(CompiledNode::Copy { instr: def.name, to, from, bytes })
            }
            (InstrSemantics::Expr(_), _) => {
                args.iter().try_for_each(|a| self.emit(*a).map(drop))?;
                Ok(CompiledNode::Nothing)
            }
            _ => malformed(format!("{} used as a statement", def.name)),
        }
    }

    /// Computes where a load that is not done would read.
    fn emit_side(&mut self, def: &InstrDef, load: ExprId) -> CompileResult<CopyOperand> {
        let Expr::Load { index, .. } = *self.kernel.exprs.expr(load) else {
            return malformed(format!("{} of something that is not a load", def.name));
        };
        self.emit(index)?;
        self.copy_operand(def, load)
    }

    fn copy_operand(&self, def: &InstrDef, load: ExprId) -> CompileResult<CopyOperand> {
        match *self.kernel.exprs.expr(load) {
            Expr::Load { buf, index, .. } => Ok((buf.0 as usize, self.register_of(index))),
            _ => malformed(format!("{} of something that is not a load", def.name)),
        }
    }

    fn note_axis(&mut self, kind: ForKind, extent: ExprId) -> CompileResult<()> {
        let axis = match kind {
            ForKind::Block(axis) | ForKind::Thread(axis) => axis as usize,
            _ => return Ok(()),
        };
        if axis > 2 {
            return malformed(format!("GPU axis {axis}"));
        }
        if matches!(kind, ForKind::Block(_)) {
            if !self.early[extent.0 as usize] {
                return malformed("the extent of a block loop depends on more than dimensions");
            }
            self.blocks[axis].push(self.register_of(extent));
            return Ok(());
        }
        match self.kernel.exprs.as_int(extent) {
            Some(n) if (1..=1024).contains(&n) => self.threads[axis] = self.threads[axis].max(n as usize),
            _ => return malformed("the extent of a thread loop is not a constant in 1..=1024"),
        }
        Ok(())
    }

    /// Emits the instructions for an expression, operands first. Returns the outermost block in which it
    /// could be computed.
    fn emit(&mut self, id: ExprId) -> CompileResult<usize> {
        let i = id.0 as usize;
        let here = self.held.len() - 1;
        if self.early[i] {
            return Ok(0);
        }
        if let Some(block) = self.held_in[i] {
            return Ok(block);
        }
        if self.emitted[i] == self.statement {
            return Ok(here);
        }
        let mut children = Vec::new();
        let expr = self.kernel.exprs.expr(id);
        if let Expr::Var(var) = expr {
            return match self.scope[var.0 as usize] {
                Some(block) => Ok(block),
                None => {
                    let name = &self.kernel.vars[*var].name;
                    malformed(format!("variable {name} used outside of its scope"))
                }
            };
        }
        match expr {
            Expr::Instr(instr, args) if matches!(instr.def().meaning, InstrSemantics::LoadMatrix { .. }) => {
                for &load in args {
                    self.kernel.exprs.expr(load).for_each_child(|c| children.push(c));
                }
            }
            _ => expr.for_each_child(|c| children.push(c)),
        }
        let mut block = 0;
        for child in children {
            block = block.max(self.emit(child)?);
        }
        let inst = self.compile_expr(i)?;
        if self.pure[i] {
            self.held_in[i] = Some(block);
            self.held[block].push(id);
        } else {
            block = here;
            self.emitted[i] = self.statement;
        }
        self.pending[block].push(inst);
        Ok(block)
    }

    fn compile_expr(&self, index: usize) -> CompileResult<RegisterInstr> {
        let id = ExprId(index as u32);
        let ty = self.kernel.exprs.ty(id);
        let r = |e: &ExprId| self.register_of(*e);
        let of = |e: &ExprId| self.kernel.exprs.ty(*e).dtype;
        let op = match self.kernel.exprs.expr(id) {
            Expr::Const(literal) => RegisterOp::Const(self.literal(*literal, ty)),
            Expr::Var(_) => return malformed("a variable is not computed"),
            Expr::Load { buf, index, mask } => {
                RegisterOp::Load { buf: buf.0 as usize, index: r(index), mask: mask.as_ref().map(r) }
            }
            Expr::Unary(op, a) => self.unary(*op, of(a), r(a))?,
            Expr::Binary(op, a, b) => self.binary(*op, of(a), r(a), r(b))?,
            Expr::Fma(a, b, c) => RegisterOp::Fma { a: r(a), b: r(b), c: r(c) },
            Expr::Cast(a) => RegisterOp::Cast { from: of(a), a: r(a) },
            Expr::Bitcast(a) => RegisterOp::Bitcast { from: of(a), a: r(a) },
            Expr::Select(cond, a, b) => RegisterOp::Select { cond: r(cond), a: r(a), b: r(b) },
            Expr::Ramp { base, stride } => RegisterOp::Ramp { base: r(base), stride: r(stride) },
            Expr::Splat(a) => RegisterOp::Splat(r(a)),
            Expr::Shuffle { a, b, lanes } => {
                RegisterOp::Shuffle { a: r(a), b: b.as_ref().map(r), lanes: lanes.clone() }
            }
            Expr::Instr(instr, args) => match (instr.def().meaning, args.as_slice()) {
                (InstrSemantics::ShuffleXor, [value, lane_mask]) => RegisterOp::ShuffleXor {
                    instr: instr.def().name,
                    value: r(value),
                    lane_mask: r(lane_mask),
                },
                (InstrSemantics::Mma(mma), [sums, a, b]) => {
                    let operands = MmaRegisters { accumulator: r(sums), a: r(a), b: r(b), dtype: of(a) };
                    RegisterOp::Mma { instr: instr.def().name, mma, operands }
                }
                (InstrSemantics::LoadMatrix { matrices, transposed }, [load]) => {
                    let at = self.copy_operand(instr.def(), *load)?;
                    RegisterOp::LoadMatrix { instr: instr.def().name, at, matrices, transposed }
                }
                _ => return malformed(format!("{} used as an expression", instr.def().name)),
            },
        };
        self.check_operands(id, ty)?;
        Ok(RegisterInstr { op, out: self.register_of(id), dtype: ty.dtype })
    }

    fn literal(&self, literal: Literal, ty: ExprType) -> u64 {
        match (literal, ty.dtype.is_float()) {
            (literal, true) => cell::of_float_f64(ty.dtype, literal.as_f64()),
            (Literal::Int(i), false) => cell::wrap_integer(ty.dtype, i),
            (Literal::Float(_), false) => cell::wrap_integer(ty.dtype, literal.as_f64() as i64),
        }
    }

    fn unary(&self, op: UnOp, dtype: DType, a: RegisterRange) -> CompileResult<RegisterOp> {
        let found = if dtype.is_float() {
            cell::float_unary_op(op).map(|f| RegisterOp::Float1 { f, a })
        } else {
            cell::int_unary_op(op).map(|f| RegisterOp::Int1 { f, a })
        };
        found.ok_or_else(|| KernelFault::Malformed(format!("{} of {dtype}", op.name())))
    }

    fn binary(
        &self,
        op: BinOp,
        dtype: DType,
        a: RegisterRange,
        b: RegisterRange,
    ) -> CompileResult<RegisterOp> {
        let found = match (dtype.is_float(), op.is_comparison()) {
            (true, true) => cell::float_compare(op).map(|f| RegisterOp::FloatCompare { f, of: dtype, a, b }),
            (true, false) => cell::float_binary_op(op).map(|f| RegisterOp::Float2 { f, a, b }),
            (false, _) => Some(match cell::int_binary_op(op) {
                Some(f) => RegisterOp::Int2 { f, a, b },
                None => RegisterOp::IntChecked { op, a, b },
            }),
        };
        found.ok_or_else(|| KernelFault::Malformed(format!("{} of {dtype}", op.name())))
    }

    /// Lanes of operands must fit, because execution indexes registers by them.
    fn check_operands(&self, id: ExprId, ty: ExprType) -> CompileResult<()> {
        let expr = self.kernel.exprs.expr(id);
        let lanes = |e: &ExprId| self.kernel.exprs.ty(*e).lanes;
        let mut same = true;
        let ok = match expr {
            Expr::Const(_) => ty.lanes == 1,
            Expr::Splat(a) => lanes(a) == 1,
            Expr::Ramp { base, stride } => lanes(base) == 1 && lanes(stride) == 1,
            Expr::Shuffle { a, b, lanes: picks } => {
                let available = lanes(a) + b.as_ref().map_or(0, lanes);
                picks.len() == ty.lanes as usize && picks.iter().all(|&p| p < available)
            }
            Expr::Bitcast(a) => {
                let bytes = |t: ExprType| t.dtype.bytes().unwrap_or(0) * t.lanes as usize;
                bytes(self.kernel.exprs.ty(*a)) == bytes(ty)
            }
            // The verifier holds them against their signature.
            Expr::Instr(instr, _) if !matches!(instr.def().meaning, InstrSemantics::ShuffleXor) => true,
            _ => {
                expr.for_each_child(|c| same &= lanes(&c) == ty.lanes);
                same
            }
        };
        if ok { Ok(()) } else { malformed(format!("operands of {id}: {expr:?} of type {ty}")) }
    }
}
