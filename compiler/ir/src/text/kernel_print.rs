//! Prints a kernel.
//!
//! Expressions are a graph with sharing; written as a tree they could grow without bound. So an expression
//! that is used more than once and is not small, or that would nest too deeply, gets a text name: `$1 = ...`
//! before the first statement that needs it. Such a line is an abbreviation, not a statement: nothing is
//! evaluated there.

use super::lexer::{print_float, print_name};
use crate::kernel::*;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Shared expressions of this many nodes get a text name.
const SHARED_SIZE: u32 = 8;
/// Expressions are cut at these limits even where they are not shared.
const MAX_SIZE: u32 = 48;
const MAX_DEPTH: u32 = 12;

/// The text of a kernel; ends with a newline.
pub fn print_kernel(kernel: &Kernel) -> String {
    let mut printer = KernelPrinter {
        kernel,
        bufs: Vec::new(),
        vars: Vec::new(),
        named: named(kernel),
        numbers: vec![None; kernel.exprs.len()],
        count: 0,
        out: String::new(),
    };
    printer.choose_names();
    printer.kernel();
    printer.out
}

/// The expressions that get a text name.
fn named(kernel: &Kernel) -> Vec<bool> {
    let count = kernel.exprs.len();
    let mut uses = vec![0u32; count];
    let mut stack = Vec::new();
    for_each_operand(&kernel.body, &mut |e| {
        uses[e.0 as usize] += 1;
        stack.push(e);
    });
    let mut reached = vec![false; count];
    while let Some(id) = stack.pop() {
        if std::mem::replace(&mut reached[id.0 as usize], true) {
            continue;
        }
        kernel.exprs.expr(id).for_each_child(|c| {
            uses[c.0 as usize] += 1;
            stack.push(c);
        });
    }
    let (mut size, mut depth, mut named) = (vec![1u32; count], vec![1u32; count], vec![false; count]);
    for (i, id) in kernel.exprs.ids().enumerate() {
        let mut leaf = true;
        kernel.exprs.expr(id).for_each_child(|c| {
            let c = c.0 as usize;
            leaf = false;
            size[i] += if named[c] { 1 } else { size[c] };
            depth[i] = depth[i].max(if named[c] { 2 } else { depth[c] + 1 });
        });
        let shared = uses[i] > 1 && size[i] >= SHARED_SIZE;
        named[i] = !leaf && (shared || size[i] > MAX_SIZE || depth[i] > MAX_DEPTH);
    }
    named
}

/// Visits the expressions that statements use directly, in order.
pub(crate) fn for_each_operand(body: &[Stmt], f: &mut impl FnMut(ExprId)) {
    for stmt in body {
        match stmt {
            Stmt::For { extent, body, .. } => {
                f(*extent);
                for_each_operand(body, f);
            }
            Stmt::If { cond, then, otherwise } => {
                f(*cond);
                for_each_operand(then, f);
                for_each_operand(otherwise, f);
            }
            Stmt::Let { value, .. } => f(*value),
            Stmt::Store { index, value, mask, .. } => {
                f(*index);
                f(*value);
                mask.iter().for_each(|m| f(*m));
            }
            Stmt::Instr { args, .. } => args.iter().for_each(|a| f(*a)),
            Stmt::Alloc { .. } | Stmt::Barrier | Stmt::Commit | Stmt::Wait { .. } => {}
        }
    }
}

struct KernelPrinter<'a> {
    kernel: &'a Kernel,
    bufs: Vec<String>,
    vars: Vec<String>,
    named: Vec<bool>,
    /// Numbers of the text names given so far.
    numbers: Vec<Option<u32>>,
    count: u32,
    out: String,
}

impl KernelPrinter<'_> {
    /// Buffers and variables share one name space; a name that is taken gets a number.
    fn choose_names(&mut self) {
        let mut taken = BTreeSet::new();
        let bufs = self.kernel.bufs.values().map(|b| b.name.as_str());
        self.bufs = bufs.map(|name| unique(name, &mut taken)).collect();
        let vars = self.kernel.vars.values().map(|v| v.name.as_str());
        self.vars = vars.map(|name| unique(name, &mut taken)).collect();
    }

    fn buf(&self, id: BufId) -> &str {
        self.bufs.get(id.0 as usize).map_or("%undeclared", String::as_str)
    }

    fn var(&self, id: VarId) -> &str {
        self.vars.get(id.0 as usize).map_or("%undeclared", String::as_str)
    }

    fn kernel(&mut self) {
        let k = self.kernel;
        let params: Vec<String> = k.params.iter().map(|id| self.param(*id)).collect();
        let mut head = format!("kernel {}({}", print_name('@', &k.name), params.join(", "));
        let dims: Vec<String> =
            k.dims.iter().map(|(sym, var)| format!("{}: {}", sym.name(), self.var(*var))).collect();
        if !dims.is_empty() {
            let _ = write!(head, "; {}", dims.join(", "));
        }
        let _ = writeln!(self.out, "{head}) {{");
        self.stmts(&k.body, 1);
        self.out.push_str("}\n");
    }

    fn param(&self, id: BufId) -> String {
        let b = &self.kernel.bufs[id];
        let space =
            if b.space == MemorySpace::Global { String::new() } else { format!(" {}", b.space.name()) };
        let access = match b.access {
            ParamAccess::In => "in",
            ParamAccess::Out => "out",
            ParamAccess::InOut => "inout",
        };
        format!("{}: {}[{}]{space} {access} align {}", self.buf(id), b.dtype, b.len, b.align)
    }

    fn line(&mut self, indent: usize, text: &str) {
        let _ = writeln!(self.out, "{:width$}{text}", "", width = 2 * indent);
    }

    fn stmts(&mut self, body: &[Stmt], indent: usize) {
        for stmt in body {
            self.stmt(stmt, indent);
        }
    }

    fn stmt(&mut self, stmt: &Stmt, indent: usize) {
        match stmt {
            Stmt::For { var, extent, kind, body } => {
                let extent = self.use_expr(*extent, indent);
                let head = format!("{} {} in {extent} {{", kind_name(*kind), self.var(*var));
                self.line(indent, &head);
                self.stmts(body, indent + 1);
                self.line(indent, "}");
            }
            Stmt::If { cond, then, otherwise } => {
                let cond = self.use_expr(*cond, indent);
                self.line(indent, &format!("if {cond} {{"));
                self.stmts(then, indent + 1);
                if !otherwise.is_empty() {
                    self.line(indent, "} else {");
                    self.stmts(otherwise, indent + 1);
                }
                self.line(indent, "}");
            }
            Stmt::Let { var, value } => {
                let value = self.use_expr(*value, indent);
                let text = format!("let {}: {} = {value}", self.var(*var), self.kernel.vars[*var].ty);
                self.line(indent, &text);
            }
            Stmt::Store { buf, index, value, mask } => {
                let (index, value) = (self.use_expr(*index, indent), self.use_expr(*value, indent));
                let mask = mask.map(|m| format!(" if {}", self.use_expr(m, indent))).unwrap_or_default();
                let text = format!("store({}, {index}, {value}{mask})", self.buf(*buf));
                self.line(indent, &text);
            }
            Stmt::Alloc { buf } => {
                let b = &self.kernel.bufs[*buf];
                let mut text = format!("alloc {}: {}[{}] {}", self.buf(*buf), b.dtype, b.len, b.space.name());
                if b.align != 64 {
                    let _ = write!(text, " align {}", b.align);
                }
                self.line(indent, &text);
            }
            Stmt::Instr { instr, args } => {
                let args: Vec<String> = args.iter().map(|a| self.use_expr(*a, indent)).collect();
                self.line(indent, &format!("instr.{}({})", instr.def().name, args.join(", ")));
            }
            Stmt::Barrier => self.line(indent, "barrier"),
            Stmt::Commit => self.line(indent, "commit"),
            Stmt::Wait { pending } => self.line(indent, &format!("wait {pending}")),
        }
    }

    /// The text of an expression, after the lines that introduce the text names it needs.
    fn use_expr(&mut self, id: ExprId, indent: usize) -> String {
        let mut needed = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut stack = vec![id];
        while let Some(e) = stack.pop() {
            if self.numbers[e.0 as usize].is_some() || !seen.insert(e) {
                continue;
            }
            if self.named[e.0 as usize] {
                needed.insert(e);
            }
            self.kernel.exprs.expr(e).for_each_child(|c| stack.push(c));
        }
        // Operands have smaller ids than their users.
        for e in needed {
            self.count += 1;
            let text = format!("${} = {}", self.count, self.node(e));
            self.numbers[e.0 as usize] = Some(self.count);
            self.line(indent, &text);
        }
        self.expr(id)
    }

    fn expr(&self, id: ExprId) -> String {
        match self.numbers[id.0 as usize] {
            Some(number) => format!("${number}"),
            None => self.node(id),
        }
    }

    fn node(&self, id: ExprId) -> String {
        let ty = self.kernel.exprs.ty(id);
        let e = |id: &ExprId| self.expr(*id);
        match self.kernel.exprs.expr(id) {
            Expr::Const(literal) => {
                let value = match literal {
                    Literal::Int(i) => i.to_string(),
                    Literal::Float(bits) => print_float(f64::from_bits(*bits)),
                };
                if ty == ExprType::I64 && matches!(literal, Literal::Int(_)) {
                    value
                } else {
                    format!("{value}:{ty}")
                }
            }
            Expr::Var(var) => self.var(*var).into(),
            Expr::Load { buf, index, mask: None } => format!("load({}, {})", self.buf(*buf), e(index)),
            Expr::Load { buf, index, mask: Some(mask) } => {
                format!("load({}, {} if {})", self.buf(*buf), e(index), e(mask))
            }
            Expr::Unary(op, a) => format!("{}({})", op.name(), e(a)),
            Expr::Binary(op, a, b) => format!("{}({}, {})", op.name(), e(a), e(b)),
            Expr::Fma(a, b, c) => format!("fma({}, {}, {})", e(a), e(b), e(c)),
            Expr::Cast(a) => format!("cast({}, {})", e(a), ty.dtype),
            Expr::Bitcast(a) => format!("bitcast({}, {ty})", e(a)),
            Expr::Select(c, a, b) => format!("select({}, {}, {})", e(c), e(a), e(b)),
            Expr::Ramp { base, stride } => format!("ramp({}, {}, {})", e(base), e(stride), ty.lanes),
            Expr::Splat(a) => format!("splat({}, {})", e(a), ty.lanes),
            Expr::Shuffle { a, b, lanes } => {
                let lanes: Vec<String> = lanes.iter().map(u32::to_string).collect();
                let b = b.as_ref().map(|b| format!(", {}", e(b))).unwrap_or_default();
                format!("shuffle({}{b}, [{}])", e(a), lanes.join(", "))
            }
            Expr::Instr(instr, args) => {
                let args: Vec<String> = args.iter().map(e).collect();
                format!("instr.{}({})", instr.def().name, args.join(", "))
            }
        }
    }
}

fn unique(name: &str, taken: &mut BTreeSet<String>) -> String {
    let mut candidate = if name.is_empty() { "unnamed".to_string() } else { name.to_string() };
    let base = candidate.clone();
    let mut number = 0;
    while !taken.insert(candidate.clone()) {
        number += 1;
        candidate = format!("{base}_{number}");
    }
    print_name('%', &candidate)
}

/// The keyword of a loop.
pub(crate) fn kind_name(kind: ForKind) -> String {
    let axis = |a: u8| ["x", "y", "z"].get(a as usize).map_or_else(|| a.to_string(), |s| s.to_string());
    match kind {
        ForKind::Serial => "for".into(),
        ForKind::Unroll => "unroll".into(),
        ForKind::Par => "par".into(),
        ForKind::Block(a) => format!("block.{}", axis(a)),
        ForKind::Thread(a) => format!("thread.{}", axis(a)),
    }
}
