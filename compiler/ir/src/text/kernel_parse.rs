//! Parses a kernel. Types of expressions follow from their operands as in the builder; whether the operands
//! fit is the verifier's business, so that kernels which are wrong in other ways than their text can be read
//! and refused there.
//!
//! ```text
//! kernel @axpy(%x: f32[n] in align 64, %y: f32[n] inout align 64; n: %n) {
//!   par %i in %n {
//!     let %v: f32 = load(%x, %i)
//!     store(%y, %i, fma(%v, 1.5:f32, load(%y, %i)))
//!   }
//! }
//! ```

use super::dim::parse_dim;
use super::lexer::{Lexer, ParseError, TextPosition};
use crate::dim::{Dim, SizeSymbol};
use crate::instr::InstrId;
use crate::kernel::*;
use crate::types::DType;
use std::collections::BTreeMap;

type ParseResult<T> = Result<T, ParseError>;

/// Parses one kernel; the lexer is at `kernel`.
pub fn parse_kernel(lexer: &mut Lexer) -> ParseResult<Kernel> {
    lexer.expect_keyword("kernel")?;
    let name = lexer.at_name("the name of the kernel")?;
    let mut parser = KernelParser {
        lexer,
        kernel: Kernel::new(name),
        names: BTreeMap::new(),
        abbreviations: BTreeMap::new(),
    };
    parser.header()?;
    parser.kernel.body = parser.block()?;
    Ok(parser.kernel)
}

#[derive(Clone, Copy)]
enum KernelEntity {
    Buf(BufId),
    Var(VarId),
}

struct KernelParser<'a> {
    lexer: &'a mut Lexer,
    kernel: Kernel,
    /// All names defined so far; scopes are checked by the verifier.
    names: BTreeMap<String, KernelEntity>,
    /// `$1 = ...`
    abbreviations: BTreeMap<String, ExprId>,
}

impl KernelParser<'_> {
    fn define(&mut self, pos: TextPosition, name: &str, what: KernelEntity) -> ParseResult<()> {
        match self.names.insert(name.into(), what) {
            None => Ok(()),
            Some(_) => Err(Lexer::error_at(pos, format!("%{name} is already defined"))),
        }
    }

    fn new_var(&mut self, what: &str) -> ParseResult<(TextPosition, String)> {
        let pos = self.lexer.position();
        Ok((pos, self.lexer.percent(what)?))
    }

    fn declare_var(&mut self, pos: TextPosition, name: String, ty: ExprType) -> ParseResult<VarId> {
        let var = self.kernel.vars.push(VarDecl { name: name.clone(), ty });
        self.define(pos, &name, KernelEntity::Var(var))?;
        Ok(var)
    }

    fn header(&mut self) -> ParseResult<()> {
        self.lexer.expect("(")?;
        while !self.lexer.accept(")") {
            if self.lexer.accept(";") {
                return self.dims();
            }
            self.param()?;
            if !self.lexer.accept(",") && !matches!(self.lexer.peek(), super::LexToken::Punct(";" | ")")) {
                return Err(self.lexer.error("expected `,`, `;` or `)` after a parameter"));
            }
        }
        Ok(())
    }

    fn dims(&mut self) -> ParseResult<()> {
        let dims = self.lexer.list(")", |lexer| {
            let pos = lexer.position();
            let word = lexer.ident("a size symbol (n, b or past)")?;
            let Some(sym) = SizeSymbol::ALL.into_iter().find(|s| s.name() == word) else {
                return Err(Lexer::error_at(pos, format!("unknown size symbol `{word}`; known: n, b, past")));
            };
            lexer.expect(":")?;
            let pos = lexer.position();
            Ok((sym, pos, lexer.percent("a variable")?))
        })?;
        for (sym, pos, name) in dims {
            let var = self.declare_var(pos, name, ExprType::I64)?;
            self.kernel.dims.push((sym, var));
        }
        Ok(())
    }

    /// `%x: f32[256]`
    fn buf_head(&mut self, what: &str) -> ParseResult<(TextPosition, String, DType, Dim)> {
        let pos = self.lexer.position();
        let name = self.lexer.percent(what)?;
        self.lexer.expect(":")?;
        let dtype = self.dtype()?;
        self.lexer.expect("[")?;
        let len = parse_dim(self.lexer)?;
        self.lexer.expect("]")?;
        Ok((pos, name, dtype, len))
    }

    fn space(&mut self) -> Option<MemorySpace> {
        let space = MemorySpace::ALL.into_iter().find(|s| self.lexer.at_keyword(s.name()));
        if space.is_some() {
            self.lexer.advance();
        }
        space
    }

    fn param(&mut self) -> ParseResult<()> {
        let (pos, name, dtype, len) = self.buf_head("a buffer")?;
        let space = self.space().unwrap_or(MemorySpace::Global);
        let at = self.lexer.position();
        let access = match self.lexer.ident("`in`, `out` or `inout`")?.as_str() {
            "in" => ParamAccess::In,
            "out" => ParamAccess::Out,
            "inout" => ParamAccess::InOut,
            other => {
                return Err(Lexer::error_at(at, format!("expected `in`, `out` or `inout`, found `{other}`")));
            }
        };
        self.lexer.expect_keyword("align")?;
        let align = self.lexer.u32("an alignment")?;
        let buf = self.kernel.bufs.push(BufDecl { name: name.clone(), dtype, space, len, access, align });
        self.kernel.params.push(buf);
        self.define(pos, &name, KernelEntity::Buf(buf))
    }

    fn block(&mut self) -> ParseResult<Vec<Stmt>> {
        self.lexer.expect("{")?;
        self.lexer.enter()?;
        let mut body = Vec::new();
        while !self.lexer.accept("}") {
            self.stmt(&mut body)?;
        }
        self.lexer.leave();
        Ok(body)
    }

    fn stmt(&mut self, body: &mut Vec<Stmt>) -> ParseResult<()> {
        let pos = self.lexer.position();
        if let super::LexToken::Dollar(name) = self.lexer.peek() {
            let name = name.clone();
            return self.abbreviation(pos, name);
        }
        let word = self.lexer.ident("a statement")?;
        let stmt = match word.as_str() {
            "let" => self.let_()?,
            "store" => self.store()?,
            "alloc" => self.alloc()?,
            "if" => {
                let cond = self.expr()?;
                let then = self.block()?;
                let otherwise = if self.lexer.accept_keyword("else") { self.block()? } else { Vec::new() };
                Stmt::If { cond, then, otherwise }
            }
            "barrier" => Stmt::Barrier,
            "commit" => Stmt::Commit,
            "wait" => Stmt::Wait { pending: self.lexer.u32("how many groups of copies may be under way")? },
            word => match (word.strip_prefix("instr."), loop_kind(word)) {
                (Some(name), _) => {
                    let instr = instr(pos, name)?;
                    self.lexer.expect("(")?;
                    Stmt::Instr { instr, args: self.expr_list()? }
                }
                (None, Some(kind)) => self.for_(kind)?,
                (None, None) => return Err(Lexer::error_at(pos, format!("unknown statement `{word}`"))),
            },
        };
        body.push(stmt);
        Ok(())
    }

    fn abbreviation(&mut self, pos: TextPosition, name: String) -> ParseResult<()> {
        self.lexer.advance();
        self.lexer.expect("=")?;
        let value = self.expr()?;
        match self.abbreviations.insert(name.clone(), value) {
            None => Ok(()),
            Some(_) => Err(Lexer::error_at(pos, format!("${name} is already defined"))),
        }
    }

    fn for_(&mut self, kind: ForKind) -> ParseResult<Stmt> {
        let (pos, name) = self.new_var("the loop variable")?;
        self.lexer.expect_keyword("in")?;
        let extent = self.expr()?;
        let var = self.declare_var(pos, name, ExprType::I64)?;
        Ok(Stmt::For { var, extent, kind, body: self.block()? })
    }

    fn let_(&mut self) -> ParseResult<Stmt> {
        let (pos, name) = self.new_var("a variable")?;
        self.lexer.expect(":")?;
        let ty = self.ty()?;
        self.lexer.expect("=")?;
        let value = self.expr()?;
        Ok(Stmt::Let { var: self.declare_var(pos, name, ty)?, value })
    }

    fn store(&mut self) -> ParseResult<Stmt> {
        self.lexer.expect("(")?;
        let buf = self.buf()?;
        self.lexer.expect(",")?;
        let index = self.expr()?;
        self.lexer.expect(",")?;
        let value = self.expr()?;
        let mask = self.mask()?;
        self.lexer.expect(")")?;
        Ok(Stmt::Store { buf, index, value, mask })
    }

    fn alloc(&mut self) -> ParseResult<Stmt> {
        let (pos, name, dtype, len) = self.buf_head("the buffer to allocate")?;
        let Some(space) = self.space() else {
            return Err(self.lexer.error("expected `shared`, `local` or `stack`"));
        };
        let align = if self.lexer.accept_keyword("align") { self.lexer.u32("an alignment")? } else { 64 };
        let decl = BufDecl { name: name.clone(), dtype, space, len, access: ParamAccess::InOut, align };
        let buf = self.kernel.bufs.push(decl);
        self.define(pos, &name, KernelEntity::Buf(buf))?;
        Ok(Stmt::Alloc { buf })
    }

    // ---- types

    fn dtype(&mut self) -> ParseResult<DType> {
        let pos = self.lexer.position();
        let name = self.lexer.ident("an element type")?;
        DType::parse(&name).ok_or_else(|| Lexer::error_at(pos, format!("unknown element type `{name}`")))
    }

    fn ty(&mut self) -> ParseResult<ExprType> {
        let pos = self.lexer.position();
        let name = self.lexer.ident("a type")?;
        parse_ty(&name).ok_or_else(|| {
            Lexer::error_at(pos, format!("unknown type `{name}`: expected an element type, or `f32x16`"))
        })
    }

    // ---- expressions

    fn buf(&mut self) -> ParseResult<BufId> {
        let (pos, name) = self.new_var("a buffer")?;
        match self.names.get(&name) {
            Some(KernelEntity::Buf(buf)) => Ok(*buf),
            Some(KernelEntity::Var(_)) => {
                Err(Lexer::error_at(pos, format!("%{name} is a variable, not a buffer")))
            }
            None => Err(Lexer::error_at(pos, format!("%{name} is not defined"))),
        }
    }

    fn mask(&mut self) -> ParseResult<Option<ExprId>> {
        if self.lexer.accept_keyword("if") { self.expr().map(Some) } else { Ok(None) }
    }

    fn expr_list(&mut self) -> ParseResult<Vec<ExprId>> {
        let mut items = Vec::new();
        while !self.lexer.accept(")") {
            items.push(self.expr()?);
            if !self.lexer.accept(",") {
                self.lexer.expect(")")?;
                break;
            }
        }
        Ok(items)
    }

    fn operands<const N: usize>(&mut self) -> ParseResult<[ExprId; N]> {
        let pos = self.lexer.position();
        self.lexer.expect("(")?;
        let items = self.expr_list()?;
        let found = items.len();
        items.try_into().map_err(|_| Lexer::error_at(pos, format!("expected {N} operands, found {found}")))
    }

    fn expr(&mut self) -> ParseResult<ExprId> {
        self.lexer.enter()?;
        let pos = self.lexer.position();
        let id = match self.lexer.peek().clone() {
            super::LexToken::Percent(name) => {
                self.lexer.advance();
                match self.names.get(&name) {
                    Some(KernelEntity::Var(var)) => {
                        let ty = self.kernel.vars[*var].ty;
                        self.intern(Expr::Var(*var), ty)
                    }
                    Some(KernelEntity::Buf(_)) => {
                        return Err(Lexer::error_at(
                            pos,
                            format!("%{name} is a buffer; use load(%{name}, index)"),
                        ));
                    }
                    None => return Err(Lexer::error_at(pos, format!("%{name} is not defined"))),
                }
            }
            super::LexToken::Dollar(name) => {
                self.lexer.advance();
                match self.abbreviations.get(&name) {
                    Some(id) => *id,
                    None => return Err(Lexer::error_at(pos, format!("${name} is not defined"))),
                }
            }
            super::LexToken::Ident(name) if !self.lexer.at_float() => {
                self.lexer.advance();
                self.call(pos, &name)?
            }
            _ => self.literal()?,
        };
        self.lexer.leave();
        Ok(id)
    }

    fn intern(&mut self, expr: Expr, ty: ExprType) -> ExprId {
        self.kernel.exprs.intern(expr, ty)
    }

    fn ty_of(&self, e: ExprId) -> ExprType {
        self.kernel.exprs.ty(e)
    }

    /// `16`, `1.5:f32`, `-3:i8`.
    fn literal(&mut self) -> ParseResult<ExprId> {
        if self.lexer.at_float() {
            let value = self.lexer.float("an expression")?;
            self.lexer.expect(":")?;
            let ty = self.ty()?;
            return Ok(self.intern(Expr::Const(Literal::Float(value.to_bits())), ty));
        }
        let value = self.lexer.int("an expression")?;
        let ty = if self.lexer.accept(":") { self.ty()? } else { ExprType::I64 };
        Ok(self.intern(Expr::Const(Literal::Int(value)), ty))
    }

    fn call(&mut self, pos: TextPosition, name: &str) -> ParseResult<ExprId> {
        if let Some(op) = UnOp::ALL.into_iter().find(|op| op.name() == name) {
            let [a] = self.operands()?;
            let ty = self.ty_of(a);
            return Ok(self.intern(Expr::Unary(op, a), ty));
        }
        if let Some(op) = BinOp::ALL.into_iter().find(|op| op.name() == name) {
            let [a, b] = self.operands()?;
            let ty = self.ty_of(a);
            let ty = if op.is_comparison() { ExprType::vector(DType::Bool, ty.lanes) } else { ty };
            return Ok(self.intern(Expr::Binary(op, a, b), ty));
        }
        if let Some(name) = name.strip_prefix("instr.") {
            let instr = instr(pos, name)?;
            self.lexer.expect("(")?;
            let args = self.expr_list()?;
            let Some(ty) = instr.def().ret else {
                return Err(Lexer::error_at(pos, format!("{name} has no result")));
            };
            return Ok(self.intern(Expr::Instr(instr, args), ty));
        }
        match name {
            "fma" => {
                let [a, b, c] = self.operands()?;
                let ty = self.ty_of(c);
                Ok(self.intern(Expr::Fma(a, b, c), ty))
            }
            "select" => {
                let [cond, a, b] = self.operands()?;
                let ty = self.ty_of(a);
                Ok(self.intern(Expr::Select(cond, a, b), ty))
            }
            "load" => self.load(),
            "cast" | "bitcast" | "ramp" | "splat" | "shuffle" => self.typed_call(name),
            _ => Err(Lexer::error_at(pos, format!("unknown operation `{name}`"))),
        }
    }

    fn load(&mut self) -> ParseResult<ExprId> {
        self.lexer.expect("(")?;
        let buf = self.buf()?;
        self.lexer.expect(",")?;
        let index = self.expr()?;
        let mask = self.mask()?;
        self.lexer.expect(")")?;
        let ty = ExprType::vector(self.kernel.bufs[buf].dtype, self.ty_of(index).lanes);
        Ok(self.intern(Expr::Load { buf, index, mask }, ty))
    }

    /// Operations with something else than expressions among their arguments.
    fn typed_call(&mut self, name: &str) -> ParseResult<ExprId> {
        self.lexer.expect("(")?;
        let a = self.expr()?;
        let from = self.ty_of(a);
        self.lexer.expect(",")?;
        let (expr, ty) = match name {
            "cast" => (Expr::Cast(a), ExprType::vector(self.dtype()?, from.lanes)),
            "bitcast" => (Expr::Bitcast(a), self.ty()?),
            "splat" => (Expr::Splat(a), ExprType::vector(from.dtype, self.lexer.u32("the number of lanes")?)),
            "ramp" => {
                let stride = self.expr()?;
                self.lexer.expect(",")?;
                let lanes = self.lexer.u32("the number of lanes")?;
                (Expr::Ramp { base: a, stride }, ExprType::vector(from.dtype, lanes))
            }
            _ => {
                let b =
                    if *self.lexer.peek() == super::LexToken::Punct("[") { None } else { Some(self.expr()?) };
                if b.is_some() {
                    self.lexer.expect(",")?;
                }
                self.lexer.expect("[")?;
                let lanes = self.lexer.list("]", |lexer| lexer.u32("a lane number"))?;
                let ty = ExprType::vector(from.dtype, lanes.len() as u32);
                (Expr::Shuffle { a, b, lanes }, ty)
            }
        };
        self.lexer.expect(")")?;
        Ok(self.intern(expr, ty))
    }
}

/// `f32`, `f32x16`.
fn parse_ty(name: &str) -> Option<ExprType> {
    if let Some(dtype) = DType::parse(name) {
        return Some(ExprType::scalar(dtype));
    }
    let (dtype, lanes) = name.rsplit_once('x')?;
    Some(ExprType::vector(DType::parse(dtype)?, lanes.parse().ok()?))
}

fn instr(pos: TextPosition, name: &str) -> ParseResult<InstrId> {
    InstrId::by_name(name).ok_or_else(|| Lexer::error_at(pos, format!("unknown instruction `{name}`")))
}

fn loop_kind(word: &str) -> Option<ForKind> {
    let axis = |name: &str| match name {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        number => number.parse().ok(),
    };
    match word {
        "for" => Some(ForKind::Serial),
        "unroll" => Some(ForKind::Unroll),
        "par" => Some(ForKind::Par),
        _ => match word.split_once('.')? {
            ("block", a) => axis(a).map(ForKind::Block),
            ("thread", a) => axis(a).map(ForKind::Thread),
            _ => None,
        },
    }
}
