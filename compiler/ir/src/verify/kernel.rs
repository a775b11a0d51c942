//! The kernel verifier: declarations, scopes and loop structure here, types of expressions in
//! [`super::expr`].
//!
//! Beyond the invariants at the head of [`crate::kernel`]: lanes and literals in range, masks of the right
//! shape, stores only to writable buffers, `Block` loops nested directly in each other around everything
//! else, each GPU axis at most once on a path, at most 1024 threads, `Shared` memory only in GPU kernels and
//! at most 227 KiB of it, indices of `Local` buffers made of constants and variables of unrolled loops. An
//! `Out` parameter may be read after it was written; its contents at the start are undefined (the interpreter
//! checks that).

use super::VerifyError;
use super::expr::check_expr;
use crate::instr::{ExecutionScope, InstrSemantics, MATRIX_ROW_BYTES};
use crate::kernel::*;
use crate::text::kernel_print::kind_name;
use crate::types::DType;

/// Most threads of a GPU block.
const MAX_THREADS: i64 = 1024;
/// The shared memory of a block on the largest GPUs; the generators know the limit of a target.
const MAX_SHARED_BYTES: i64 = 227 << 10;

/// Checks all invariants of one kernel.
pub fn verify_kernel(kernel: &Kernel) -> Result<(), VerifyError> {
    let mut v = KernelVerifier {
        kernel,
        gpu: kernel.is_gpu(),
        bound: vec![false; kernel.vars.len()],
        vars: vec![VariableRole::Hidden; kernel.vars.len()],
        bufs: vec![false; kernel.bufs.len()],
        allocated: vec![false; kernel.bufs.len()],
        checked: vec![false; kernel.exprs.len()],
        path: Vec::new(),
        threads: [1; 3],
        shared_bytes: 0,
    };
    v.run().map_err(|message| {
        let subject = format!("kernel {}{}", kernel.name, v.loops());
        VerifyError::new(subject, message)
    })
}

pub(super) type CheckResult = Result<(), String>;

/// The ways in which a variable in scope may be used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VariableRole {
    Hidden,
    Dimension,
    /// Becomes a constant when loops are unrolled.
    Unrolled,
    Other,
}

struct KernelVerifier<'a> {
    kernel: &'a Kernel,
    gpu: bool,
    /// Variables that some statement has assigned.
    bound: Vec<bool>,
    vars: Vec<VariableRole>,
    bufs: Vec<bool>,
    allocated: Vec<bool>,
    checked: Vec<bool>,
    /// Loops around the current statement.
    path: Vec<(VarId, ForKind)>,
    threads: [i64; 3],
    /// Bytes of all allocations: each has its own place for the whole kernel.
    shared_bytes: i64,
}

impl<'a> KernelVerifier<'a> {
    fn loops(&self) -> String {
        let kernel = self.kernel;
        let loops = self.path.iter().map(|(v, k)| format!(", {} %{}", kind_name(*k), kernel.vars[*v].name));
        loops.collect()
    }

    fn run(&mut self) -> CheckResult {
        self.declarations()?;
        if self.gpu {
            self.block_nest(&self.kernel.body)?;
        }
        self.body(&self.kernel.body)?;
        let threads: i64 = self.threads.iter().product();
        if threads > MAX_THREADS {
            return Err(format!("{threads} threads in a block; at most {MAX_THREADS}"));
        }
        Ok(())
    }

    fn declarations(&mut self) -> CheckResult {
        let k = self.kernel;
        for &id in &k.params {
            let Some(decl) = k.bufs.get(id) else { return Err(format!("parameter {id} is not declared")) };
            if std::mem::replace(&mut self.bufs[id.0 as usize], true) {
                return Err(format!("parameter %{} is listed twice", decl.name));
            }
            if decl.space != MemorySpace::Global {
                let space = decl.space.name();
                return Err(format!("parameter %{} is in {space} memory, expected global", decl.name));
            }
        }
        for decl in k.bufs.values() {
            if decl.dtype.is_packed() {
                return Err(format!(
                    "buffer %{} has the packed type {}; kernels see its bytes as u8",
                    decl.name, decl.dtype
                ));
            }
            if !decl.align.is_power_of_two() {
                return Err(format!("buffer %{}: alignment {} is not a power of two", decl.name, decl.align));
            }
        }
        for (i, (sym, var)) in k.dims.iter().enumerate() {
            let Some(decl) = k.vars.get(*var) else { return Err(format!("size {var} is not declared")) };
            if k.dims[..i].iter().any(|(s, _)| s == sym) {
                return Err(format!("the size {} is listed twice", sym.name()));
            }
            if decl.ty != ExprType::I64 {
                return Err(format!("size %{} has type {}, expected i64", decl.name, decl.ty));
            }
            self.bind(*var, VariableRole::Dimension)?;
        }
        Ok(())
    }

    fn bind(&mut self, var: VarId, binding: VariableRole) -> CheckResult {
        let Some(decl) = self.kernel.vars.get(var) else {
            return Err(format!("variable {var} is not declared"));
        };
        if std::mem::replace(&mut self.bound[var.0 as usize], true) {
            return Err(format!("variable %{} is assigned twice", decl.name));
        }
        self.vars[var.0 as usize] = binding;
        Ok(())
    }

    /// Outside of the innermost block loop there are only values and the next block loop.
    fn block_nest(&self, body: &[Stmt]) -> CheckResult {
        let is_block = |s: &&Stmt| matches!(s, Stmt::For { kind: ForKind::Block(_), .. });
        let Some(Stmt::For { body: inner, .. }) = body.iter().find(is_block) else { return Ok(()) };
        if body.iter().filter(is_block).count() > 1 {
            return Err("block loops beside each other; a GPU kernel is one nest of them".into());
        }
        let plain = |s: &&Stmt| !is_block(s) && !matches!(s, Stmt::Let { .. } | Stmt::Alloc { .. });
        if body.iter().any(|s| plain(&s)) {
            return Err(
                "a statement outside of the innermost block loop; only let and alloc may stand there".into(),
            );
        }
        self.block_nest(inner)
    }

    fn body(&mut self, body: &[Stmt]) -> CheckResult {
        let (mut vars, mut bufs) = (Vec::new(), Vec::new());
        for stmt in body {
            self.stmt(stmt)?;
            match stmt {
                Stmt::Let { var, .. } => vars.push(*var),
                Stmt::Alloc { buf } => bufs.push(*buf),
                _ => {}
            }
        }
        vars.iter().for_each(|v| self.vars[v.0 as usize] = VariableRole::Hidden);
        bufs.iter().for_each(|b| self.bufs[b.0 as usize] = false);
        Ok(())
    }

    fn stmt(&mut self, stmt: &Stmt) -> CheckResult {
        match stmt {
            Stmt::For { var, extent, kind, body } => self.for_(*var, *extent, *kind, body),
            Stmt::If { cond, then, otherwise } => {
                self.expr(*cond)?;
                self.expect(*cond, ExprType::scalar(DType::Bool), "the condition of an if")?;
                self.body(then)?;
                self.body(otherwise)
            }
            Stmt::Let { var, value } => {
                self.expr(*value)?;
                let binding = if self.constant_after_unrolling(*value) {
                    VariableRole::Unrolled
                } else {
                    VariableRole::Other
                };
                self.bind(*var, binding)?;
                let what = format!("the value of %{}", self.kernel.vars[*var].name);
                self.expect(*value, self.kernel.vars[*var].ty, &what)
            }
            Stmt::Store { buf, index, value, mask } => self.store(*buf, *index, *value, *mask),
            Stmt::Alloc { buf } => self.alloc(*buf),
            Stmt::Instr { instr, args } => {
                let def = instr.def();
                args.iter().try_for_each(|a| self.expr(*a))?;
                let types: Vec<ExprType> = args.iter().map(|a| self.kernel.ty(*a)).collect();
                if types != def.args {
                    return Err(format!("arguments of {} do not fit its signature", def.name));
                }
                if def.ret.is_some() || matches!(def.meaning, InstrSemantics::ShuffleXor) {
                    return Err(format!("{} has a result and is no statement", def.name));
                }
                if let InstrSemantics::Copy { bytes } = def.meaning {
                    self.check_address(args[0], MemorySpace::Shared, bytes, def.name)?;
                    self.check_address(args[1], MemorySpace::Global, bytes, def.name)?;
                    self.gpu_only(def.name)?;
                }
                self.warp_scope(def.scope, def.name)
            }
            Stmt::Barrier | Stmt::Commit | Stmt::Wait { .. } => {
                let word = match stmt {
                    Stmt::Barrier => "barrier",
                    Stmt::Commit => "commit",
                    _ => "wait",
                };
                if self.path.iter().any(|(_, k)| matches!(k, ForKind::Block(_))) {
                    Ok(())
                } else {
                    Err(format!("{word} outside of a block loop"))
                }
            }
        }
    }

    fn warp_scope(&self, scope: ExecutionScope, name: &str) -> CheckResult {
        match scope {
            ExecutionScope::Warp if !self.gpu => Err(format!("the warp instruction {name} in a CPU kernel")),
            ExecutionScope::Warp | ExecutionScope::Thread => Ok(()),
        }
    }

    fn gpu_only(&self, name: &str) -> CheckResult {
        if self.gpu { Ok(()) } else { Err(format!("{name} in a CPU kernel")) }
    }

    /// The argument of an instruction that takes the address of a load: one element in this memory, aligned
    /// to `bytes` if the element's number is.
    fn check_address(&self, arg: ExprId, space: MemorySpace, bytes: u32, name: &str) -> CheckResult {
        let Expr::Load { buf, mask: None, .. } = *self.kernel.exprs.expr(arg) else {
            return Err(format!("{name} of something that is not a load, or a masked one"));
        };
        let decl = &self.kernel.bufs[buf];
        if decl.space != space {
            let (found, expected) = (decl.space.name(), space.name());
            return Err(format!("{name} of %{} in {found} memory, expected {expected}", decl.name));
        }
        match decl.align < bytes {
            true => {
                let align = decl.align;
                Err(format!("{name} of %{}, which is aligned to {align} bytes, expected {bytes}", decl.name))
            }
            false => Ok(()),
        }
    }

    fn expect(&self, e: ExprId, ty: ExprType, what: &str) -> CheckResult {
        let found = self.kernel.ty(e);
        if found == ty { Ok(()) } else { Err(format!("{what} has type {found}, expected {ty}")) }
    }

    fn for_(&mut self, var: VarId, extent: ExprId, kind: ForKind, body: &[Stmt]) -> CheckResult {
        let binding = if kind == ForKind::Unroll { VariableRole::Unrolled } else { VariableRole::Other };
        self.expr(extent)?;
        self.expect(extent, ExprType::I64, "the extent of a loop")?;
        self.loop_place(extent, kind)?;
        self.bind(var, binding)?;
        let decl = &self.kernel.vars[var];
        if decl.ty != ExprType::I64 {
            return Err(format!("loop variable %{} has type {}, expected i64", decl.name, decl.ty));
        }
        self.path.push((var, kind));
        self.body(body)?;
        self.path.pop();
        self.vars[var.0 as usize] = VariableRole::Hidden;
        Ok(())
    }

    fn loop_place(&mut self, extent: ExprId, kind: ForKind) -> CheckResult {
        let constant = self.kernel.exprs.as_int(extent);
        let within = |f: &dyn Fn(ForKind) -> bool| self.path.iter().any(|(_, k)| f(*k));
        match kind {
            ForKind::Serial => Ok(()),
            ForKind::Unroll if constant.is_none_or(|c| c < 0) => {
                Err("the extent of an unroll loop must be a constant, not negative".into())
            }
            ForKind::Unroll => Ok(()),
            ForKind::Par if self.gpu => Err("a par loop in a GPU kernel".into()),
            ForKind::Par if within(&|k| k == ForKind::Par) => Err("a par loop inside of a par loop".into()),
            ForKind::Par => Ok(()),
            ForKind::Block(axis) | ForKind::Thread(axis) if axis > 2 => {
                Err(format!("GPU axis {axis}; there are 0, 1 and 2"))
            }
            ForKind::Block(_) | ForKind::Thread(_) if within(&|k| k == kind) => {
                Err(format!("a {0} loop inside of a {0} loop", kind_name(kind)))
            }
            ForKind::Block(_) if within(&|k| !matches!(k, ForKind::Block(_))) => {
                Err("a block loop inside of a loop of another kind".into())
            }
            ForKind::Block(_) if !self.only_dimensions(extent) => {
                Err("the extent of a block loop may depend on constants and dimensions only".into())
            }
            ForKind::Block(_) => Ok(()),
            ForKind::Thread(_) if !within(&|k| matches!(k, ForKind::Block(_))) => {
                Err("a thread loop outside of a block loop".into())
            }
            ForKind::Thread(axis) => match constant {
                Some(c) if (1..=MAX_THREADS).contains(&c) => {
                    let most = &mut self.threads[axis as usize];
                    *most = c.max(*most);
                    Ok(())
                }
                _ => Err(format!("the extent of a thread loop must be a constant in 1..={MAX_THREADS}")),
            },
        }
    }

    fn alloc(&mut self, buf: BufId) -> CheckResult {
        let Some(decl) = self.kernel.bufs.get(buf) else {
            return Err(format!("buffer {buf} is not declared"));
        };
        let name = &decl.name;
        if self.kernel.params.contains(&buf) || std::mem::replace(&mut self.allocated[buf.0 as usize], true) {
            return Err(format!("buffer %{name} is allocated twice, or is a parameter"));
        }
        if decl.len.as_const().is_none_or(|len| len < 1) {
            return Err(format!("allocation %{name}: length {} is not a positive constant", decl.len));
        }
        if decl.access != ParamAccess::InOut {
            return Err(format!("allocation %{name} must be readable and writable"));
        }
        match decl.space {
            MemorySpace::Global => return Err(format!("allocation %{name} in global memory")),
            MemorySpace::Shared if !self.gpu => return Err(format!("shared memory %{name} in a CPU kernel")),
            MemorySpace::Shared if self.path.iter().any(|(_, k)| matches!(k, ForKind::Thread(_))) => {
                return Err(format!("shared memory %{name} allocated inside of a thread loop"));
            }
            MemorySpace::Shared => {
                let len = decl.len.as_const().unwrap_or(0);
                let bytes = len.saturating_mul(decl.dtype.bytes().unwrap_or(1) as i64);
                self.shared_bytes = self.shared_bytes.saturating_add(bytes);
                if self.shared_bytes > MAX_SHARED_BYTES {
                    return Err(format!(
                        "allocation %{name}: {} bytes of shared memory with it; at most {MAX_SHARED_BYTES}",
                        self.shared_bytes
                    ));
                }
            }
            MemorySpace::Local | MemorySpace::Stack => {}
        }
        self.bufs[buf.0 as usize] = true;
        Ok(())
    }

    fn store(&mut self, buf: BufId, index: ExprId, value: ExprId, mask: Option<ExprId>) -> CheckResult {
        for operand in [Some(index), Some(value), mask].into_iter().flatten() {
            self.expr(operand)?;
        }
        let decl = self.access(buf, index, mask)?;
        if !decl.access.writes() {
            return Err(format!("store to %{}, which is an input", decl.name));
        }
        let ty = ExprType::vector(decl.dtype, self.kernel.ty(index).lanes);
        self.expect(value, ty, &format!("the value stored to %{}", decl.name))
    }

    /// Checks what loads and stores have in common.
    fn access(&self, buf: BufId, index: ExprId, mask: Option<ExprId>) -> Result<&'a BufDecl, String> {
        let Some(decl) = self.kernel.bufs.get(buf) else {
            return Err(format!("buffer {buf} is not declared"));
        };
        if !self.bufs[buf.0 as usize] {
            return Err(format!("buffer %{} used outside of its scope", decl.name));
        }
        let lanes = self.kernel.ty(index).lanes;
        self.expect(index, ExprType::vector(DType::I64, lanes), &format!("the index of %{}", decl.name))?;
        if let Some(mask) = mask {
            self.expect(
                mask,
                ExprType::vector(DType::Bool, lanes),
                &format!("the mask of an access of %{}", decl.name),
            )?;
        }
        if decl.space == MemorySpace::Local && !self.constant_after_unrolling(index) {
            return Err(format!(
                "the index of %{} is no constant after unrolling, as local memory (registers) needs; use stack memory",
                decl.name
            ));
        }
        Ok(decl)
    }

    /// Checks an expression where a statement uses it: scopes each time, types once.
    fn expr(&mut self, root: ExprId) -> CheckResult {
        let mut seen = std::collections::BTreeSet::new();
        let mut stack = vec![root];
        while let Some(id) = stack.pop() {
            if id.0 as usize >= self.kernel.exprs.len() {
                return Err(format!("expression {id} does not exist"));
            }
            if !seen.insert(id) {
                continue;
            }
            let expr = self.kernel.exprs.expr(id);
            let mut ordered = true;
            expr.for_each_child(|c| {
                ordered &= c < id;
                stack.push(c);
            });
            if !ordered {
                return Err(format!("expression {id} uses a later one"));
            }
            if !std::mem::replace(&mut self.checked[id.0 as usize], true) {
                check_expr(self.kernel, id)?;
            }
            match expr {
                Expr::Var(var) if self.vars[var.0 as usize] == VariableRole::Hidden => {
                    let name = &self.kernel.vars[*var].name;
                    return Err(format!("variable %{name} used outside of its scope"));
                }
                Expr::Load { buf, index, mask } => {
                    self.access(*buf, *index, *mask)?;
                }
                Expr::Instr(instr, args) => {
                    let def = instr.def();
                    self.warp_scope(def.scope, def.name)?;
                    if let InstrSemantics::LoadMatrix { .. } = def.meaning {
                        self.check_address(args[0], MemorySpace::Shared, MATRIX_ROW_BYTES, def.name)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn all_leaves(&self, root: ExprId, ok: impl Fn(VariableRole) -> bool) -> bool {
        let mut seen = std::collections::BTreeSet::new();
        let mut stack = vec![root];
        while let Some(id) = stack.pop() {
            match self.kernel.exprs.expr(id) {
                Expr::Load { .. } | Expr::Instr(..) => return false,
                Expr::Var(var) if !ok(self.vars[var.0 as usize]) => return false,
                expr if seen.insert(id) => expr.for_each_child(|c| stack.push(c)),
                _ => {}
            }
        }
        true
    }

    fn constant_after_unrolling(&self, e: ExprId) -> bool {
        self.all_leaves(e, |b| b == VariableRole::Unrolled)
    }

    fn only_dimensions(&self, e: ExprId) -> bool {
        self.all_leaves(e, |b| b == VariableRole::Dimension)
    }
}
