//! A template's syntax tree, with the operations that may cost much replaced by filters that count what they
//! do.
//!
//! Operators, literals and slices are instructions of the template engine, which it neither limits nor lets
//! be replaced; its compiler even computes constant ones (`"x" * 10**9`) while it compiles. Filters it does
//! not know the cost of, and calls. So `a ~ b` becomes what `a | concat(b)` would be. The names of these
//! filters are no identifiers: no template means them. The matches name every statement and expression, so a
//! new one of the engine does not compile until it has its place here.

use minijinja::Value;
use minijinja::machinery::{Span, ast};
use std::collections::BTreeSet;

use ast::{BinOpKind, CallArg, Expr, Spanned, Stmt};

/// Names of the filters that replace operations.
pub mod names {
    pub const ADD: &str = "+";
    pub const MULTIPLY: &str = "*";
    pub const REMAINDER: &str = "%";
    pub const CONCAT: &str = "~";
    pub const IN: &str = "in?";
    pub const LIST: &str = "[]";
    pub const TUPLE: &str = "()";
    pub const MAP: &str = "{}";
    pub const SLICE: &str = "[:]";
    pub const STORE: &str = ".=";
    pub const SPLAT: &str = "**";
    pub const LOOK: &str = "?";
    pub const TURN: &str = "@";
    pub const MACRO: &str = "()=";
}
use names::*;

/// Nested statements and expressions; the compiler's work grows with the square of it.
const MOST_NESTED: usize = 500;
/// The engine counts arguments in 16 bits.
const MOST_ITEMS: usize = 60_000;
/// Bytes of a constant that may be the name of a role or of a field.
const LONGEST_WORD: usize = 64;

/// The reason why a template is refused.
pub struct RewriteError {
    pub reason: String,
    pub line: u16,
}

type RewriteResult<T> = std::result::Result<T, RewriteError>;

pub struct TemplateRewriter<'a> {
    depth: usize,
    /// Variables that the template has set, by scope.
    scopes: Vec<BTreeSet<&'a str>>,
    /// Variables that it reads before it has set them.
    pub undeclared: BTreeSet<&'a str>,
    /// Names of attributes, and constant texts: all that it may compare with or look up.
    pub words: BTreeSet<String>,
}

impl<'a> TemplateRewriter<'a> {
    pub fn new() -> Self {
        let (scopes, undeclared, words) = (vec![BTreeSet::new()], BTreeSet::new(), BTreeSet::new());
        TemplateRewriter { depth: 0, scopes, undeclared, words }
    }

    pub fn template(&mut self, statement: &Stmt<'a>) -> RewriteResult<Stmt<'a>> {
        self.statement(statement)
    }

    fn nested<T>(
        &mut self,
        span: Span,
        what: impl FnOnce(&mut Self) -> RewriteResult<T>,
    ) -> RewriteResult<T> {
        if self.depth == MOST_NESTED {
            return Err(refused(span, format!("more than {MOST_NESTED} nested expressions or blocks")));
        }
        self.depth += 1;
        let result = what(self);
        self.depth -= 1;
        result
    }

    fn scoped<T>(&mut self, what: impl FnOnce(&mut Self) -> RewriteResult<T>) -> RewriteResult<T> {
        self.scopes.push(BTreeSet::new());
        let result = what(self);
        self.scopes.pop();
        result
    }

    fn declare(&mut self, name: &'a str) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name);
        }
    }

    fn statements(&mut self, list: &[Stmt<'a>]) -> RewriteResult<Vec<Stmt<'a>>> {
        let mut result = Vec::with_capacity(list.len());
        for statement in list {
            match statement {
                Stmt::Macro(it) => result.push(emit(call(MACRO, text(""), vec![], it.span()), it.span())),
                Stmt::CallBlock(it) => result.push(emit(call(MACRO, text(""), vec![], it.span()), it.span())),
                _ => {}
            }
            result.push(self.statement(statement)?);
        }
        Ok(result)
    }

    /// The body of what is run many times.
    fn repeated(&mut self, list: &[Stmt<'a>], span: Span) -> RewriteResult<Vec<Stmt<'a>>> {
        let mut result = vec![emit(call(LOOK, text(""), vec![], span), span)];
        result.append(&mut self.statements(list)?);
        Ok(result)
    }

    fn statement(&mut self, statement: &Stmt<'a>) -> RewriteResult<Stmt<'a>> {
        let span = span_of(statement);
        self.nested(span, |this| this.statement_inside(statement, span))
    }

    fn statement_inside(&mut self, statement: &Stmt<'a>, span: Span) -> RewriteResult<Stmt<'a>> {
        let alone = |what: &str| {
            Err(refused(span, format!("`{what}` needs other templates, which a chat template cannot use")))
        };
        Ok(match statement {
            Stmt::Template(it) => {
                Stmt::Template(Spanned::new(ast::Template { children: self.statements(&it.children)? }, span))
            }
            Stmt::EmitExpr(it) => {
                Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: self.expression(&it.expr)? }, span))
            }
            // Through the formatter, which counts what is written.
            Stmt::EmitRaw(it) => emit(constant(Value::from_safe_string(it.raw.to_owned()), span), span),
            Stmt::ForLoop(it) => Stmt::ForLoop(Spanned::new(self.for_loop(it)?, span)),
            Stmt::IfCond(it) => Stmt::IfCond(Spanned::new(
                ast::IfCond {
                    expr: self.expression(&it.expr)?,
                    true_body: self.statements(&it.true_body)?,
                    false_body: self.statements(&it.false_body)?,
                },
                span,
            )),
            Stmt::WithBlock(it) => {
                Stmt::WithBlock(Spanned::new(self.scoped(|this| this.with_block(it))?, span))
            }
            Stmt::Set(it) => {
                let expr = self.assigned(&it.target, &it.expr)?;
                Stmt::Set(Spanned::new(ast::Set { target: self.target(&it.target)?, expr }, span))
            }
            Stmt::SetBlock(it) => {
                let filter = it.filter.as_ref().map(|filter| self.expression(filter)).transpose()?;
                let body = self.statements(&it.body)?;
                Stmt::SetBlock(Spanned::new(
                    ast::SetBlock { target: self.target(&it.target)?, filter, body },
                    span,
                ))
            }
            Stmt::AutoEscape(it) => {
                let enabled = self.expression(&it.enabled)?;
                let body = self.statements(&it.body)?;
                Stmt::AutoEscape(Spanned::new(ast::AutoEscape { enabled, body }, span))
            }
            Stmt::FilterBlock(it) => {
                let filter = self.expression(&it.filter)?;
                let body = self.statements(&it.body)?;
                Stmt::FilterBlock(Spanned::new(ast::FilterBlock { filter, body }, span))
            }
            Stmt::Block(it) => {
                let body = self.scoped(|this| this.repeated(&it.body, span))?;
                Stmt::Block(Spanned::new(ast::Block { name: it.name, required: it.required, body }, span))
            }
            Stmt::Import(_) | Stmt::FromImport(_) => return alone("import"),
            Stmt::Extends(_) => return alone("extends"),
            Stmt::Include(_) => return alone("include"),
            Stmt::Macro(it) => {
                self.declare(it.name);
                Stmt::Macro(Spanned::new(self.macro_declaration(it)?, span))
            }
            Stmt::CallBlock(it) => {
                let call = Spanned::new(self.call(&it.call)?, it.call.span());
                let macro_decl = Spanned::new(self.macro_declaration(&it.macro_decl)?, it.macro_decl.span());
                Stmt::CallBlock(Spanned::new(ast::CallBlock { call, macro_decl }, span))
            }
            Stmt::Continue(_) => Stmt::Continue(Spanned::new(ast::Continue, span)),
            Stmt::Break(_) => Stmt::Break(Spanned::new(ast::Break, span)),
            Stmt::Do(it) => {
                let call = Spanned::new(self.call(&it.call)?, it.call.span());
                Stmt::Do(Spanned::new(ast::Do { call }, span))
            }
        })
    }

    fn for_loop(&mut self, it: &Spanned<ast::ForLoop<'a>>) -> RewriteResult<ast::ForLoop<'a>> {
        let span = it.span();
        let iter = call(TURN, self.expression(&it.iter)?, vec![], span);
        let (target, filter_expr, body) = self.scoped(|this| {
            let target = this.target(&it.target)?;
            let filter = it.filter_expr.as_ref().map(|filter| this.expression(filter)).transpose()?;
            this.declare("loop");
            let body = this.repeated(&it.body, span)?;
            Ok((target, filter.map(|filter| call(LOOK, filter, vec![], span)), body))
        })?;
        let else_body = self.statements(&it.else_body)?;
        Ok(ast::ForLoop { target, iter, filter_expr, recursive: it.recursive, body, else_body })
    }

    fn with_block(&mut self, it: &ast::WithBlock<'a>) -> RewriteResult<ast::WithBlock<'a>> {
        let mut assignments = Vec::with_capacity(it.assignments.len());
        for (target, expression) in &it.assignments {
            let expression = self.assigned(target, expression)?;
            assignments.push((self.target(target)?, expression));
        }
        Ok(ast::WithBlock { assignments, body: self.statements(&it.body)? })
    }

    fn macro_declaration(&mut self, it: &Spanned<ast::Macro<'a>>) -> RewriteResult<ast::Macro<'a>> {
        self.scoped(|this| {
            let args = it.args.iter().map(|argument| this.target(argument)).collect::<RewriteResult<_>>()?;
            let defaults =
                it.defaults.iter().map(|default| this.expression(default)).collect::<RewriteResult<_>>()?;
            this.declare("caller");
            Ok(ast::Macro { name: it.name, args, defaults, body: this.repeated(&it.body, it.span())? })
        })
    }

    /// The expression to assign: to a variable anything, to an attribute only what may be part of a value.
    fn assigned(&mut self, target: &Expr<'a>, expression: &Expr<'a>) -> RewriteResult<Expr<'a>> {
        let span = expression.span();
        let expression = self.expression(expression)?;
        Ok(match target {
            Expr::Var(_) => expression,
            _ => call(STORE, expression, vec![], span),
        })
    }

    fn target(&mut self, target: &Expr<'a>) -> RewriteResult<Expr<'a>> {
        let span = target.span();
        self.nested(span, |this| {
            Ok(match target {
                Expr::Var(it) => {
                    this.declare(it.id);
                    Expr::Var(Spanned::new(ast::Var { id: it.id }, span))
                }
                Expr::List(it) => {
                    let items =
                        it.items.iter().map(|item| this.target(item)).collect::<RewriteResult<_>>()?;
                    Expr::List(Spanned::new(ast::List { items }, span))
                }
                Expr::Tuple(it) => {
                    let items =
                        it.items.iter().map(|item| this.target(item)).collect::<RewriteResult<_>>()?;
                    Expr::Tuple(Spanned::new(ast::Tuple { items }, span))
                }
                other => this.expression(other)?,
            })
        })
    }

    fn expression(&mut self, expression: &Expr<'a>) -> RewriteResult<Expr<'a>> {
        let span = expression.span();
        self.nested(span, |this| this.expression_inside(expression, span))
    }

    fn expressions(&mut self, list: &[Expr<'a>]) -> RewriteResult<Vec<Expr<'a>>> {
        list.iter().map(|item| self.expression(item)).collect()
    }

    fn expression_inside(&mut self, expression: &Expr<'a>, span: Span) -> RewriteResult<Expr<'a>> {
        Ok(match expression {
            Expr::Var(it) => {
                if !self.scopes.iter().any(|scope| scope.contains(it.id)) {
                    self.undeclared.insert(it.id);
                }
                Expr::Var(Spanned::new(ast::Var { id: it.id }, span))
            }
            Expr::Const(it) => {
                self.words
                    .extend(it.value.as_str().filter(|text| text.len() <= LONGEST_WORD).map(str::to_owned));
                constant(it.value.clone(), span)
            }
            Expr::Slice(it) => {
                let mut ends = Vec::with_capacity(3);
                for end in [&it.start, &it.stop, &it.step] {
                    let none = constant(Value::from(()), span);
                    ends.push(end.as_ref().map_or(Ok(none), |end| self.expression(end))?);
                }
                call(SLICE, self.expression(&it.expr)?, ends, span)
            }
            Expr::UnaryOp(it) => {
                let not = matches!(it.op, ast::UnaryOpKind::Not);
                let op = if not { ast::UnaryOpKind::Not } else { ast::UnaryOpKind::Neg };
                Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr: self.expression(&it.expr)? }, span))
            }
            Expr::BinOp(it) => {
                let (left, right) = (self.expression(&it.left)?, self.expression(&it.right)?);
                operator(it.op, left, right, span)
            }
            Expr::Compare(it) => self.compare(it)?,
            Expr::IfExpr(it) => Expr::IfExpr(Spanned::new(
                ast::IfExpr {
                    test_expr: self.expression(&it.test_expr)?,
                    true_expr: self.expression(&it.true_expr)?,
                    false_expr: it.false_expr.as_ref().map(|other| self.expression(other)).transpose()?,
                },
                span,
            )),
            Expr::Filter(it) => {
                let expr = it.expr.as_ref().map(|value| self.expression(value)).transpose()?;
                let args = self.arguments(&it.args)?;
                Expr::Filter(Spanned::new(ast::Filter { name: it.name, expr, args }, span))
            }
            Expr::Test(it) => {
                let expr = self.expression(&it.expr)?;
                let args = self.arguments(&it.args)?;
                Expr::Test(Spanned::new(ast::Test { name: it.name, expr, args }, span))
            }
            Expr::GetAttr(it) => {
                self.words.insert(it.name.to_owned());
                let expr = self.expression(&it.expr)?;
                Expr::GetAttr(Spanned::new(ast::GetAttr { expr, name: it.name }, span))
            }
            Expr::GetItem(it) => {
                let subscript_expr = looked_at(self.expression(&it.subscript_expr)?);
                Expr::GetItem(Spanned::new(
                    ast::GetItem { expr: self.expression(&it.expr)?, subscript_expr },
                    span,
                ))
            }
            Expr::Call(it) => Expr::Call(Spanned::new(self.call(it)?, span)),
            Expr::List(it) => self.container(LIST, self.sized(&it.items, span)?, span, |items| {
                Expr::List(Spanned::new(ast::List { items }, span))
            })?,
            Expr::Tuple(it) => self.container(TUPLE, self.sized(&it.items, span)?, span, |items| {
                Expr::Tuple(Spanned::new(ast::Tuple { items }, span))
            })?,
            Expr::Map(it) => {
                let mut items = Vec::with_capacity(2 * it.keys.len());
                self.sized(&it.keys, span)?;
                for (key, value) in it.keys.iter().zip(&it.values) {
                    items.push(self.expression(key)?);
                    items.push(self.expression(value)?);
                }
                first_and_rest(MAP, items, span).unwrap_or_else(|| {
                    Expr::Map(Spanned::new(ast::Map { keys: vec![], values: vec![] }, span))
                })
            }
        })
    }

    fn sized<'b>(&self, items: &'b [Expr<'a>], span: Span) -> RewriteResult<&'b [Expr<'a>]> {
        if items.len() > MOST_ITEMS / 2 {
            return Err(refused(span, format!("more than {} items in one literal", MOST_ITEMS / 2)));
        }
        Ok(items)
    }

    fn container(
        &mut self,
        name: &'static str,
        items: &[Expr<'a>],
        span: Span,
        constant: impl FnOnce(Vec<Expr<'a>>) -> Expr<'a>,
    ) -> RewriteResult<Expr<'a>> {
        let all_constant = items.iter().all(|item| matches!(item, Expr::Const(_)));
        let items = self.expressions(items)?;
        if all_constant {
            return Ok(constant(items));
        }
        Ok(first_and_rest(name, items, span).unwrap_or_else(|| constant_none(span)))
    }

    fn compare(&mut self, it: &Spanned<ast::Compare<'a>>) -> RewriteResult<Expr<'a>> {
        let expr = self.expression(&it.expr)?;
        let mut ops = Vec::with_capacity(it.ops.len());
        for op in &it.ops {
            ops.push(ast::CompareOp { op: op.op, expr: looked_at(self.expression(&op.expr)?) });
        }
        let text_only =
            |op: &ast::CompareOp<'a>| matches!(op.op, ast::CompareOpKind::In | ast::CompareOpKind::NotIn);
        match ops.as_slice() {
            [only] if text_only(only) => {
                let negated = matches!(only.op, ast::CompareOpKind::NotIn);
                let Some(only) = ops.pop() else { return Ok(expr) };
                let found = call(IN, expr, vec![only.expr], it.span());
                let not = |expr| {
                    let op = ast::UnaryOpKind::Not;
                    Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr }, it.span()))
                };
                Ok(if negated { not(found) } else { found })
            }
            several if several.iter().any(text_only) => {
                Err(refused(it.span(), "`in` inside a chain of comparisons".to_owned()))
            }
            _ => Ok(Expr::Compare(Spanned::new(ast::Compare { expr, ops }, it.span()))),
        }
    }

    fn call(&mut self, it: &Spanned<ast::Call<'a>>) -> RewriteResult<ast::Call<'a>> {
        let expr = self.expression(&it.expr)?;
        let mut args = self.arguments(&it.args)?;
        // `loop.changed(x)` keeps what it is given in the loop: nothing that holds the loop.
        if matches!(&it.expr, Expr::GetAttr(method) if method.name == "changed") && !args.is_empty() {
            let mut items = Vec::with_capacity(args.len());
            for argument in args {
                match argument {
                    CallArg::Pos(item) => items.push(item),
                    _ => return Err(refused(it.span(), "`changed` takes plain arguments".to_owned())),
                }
            }
            args = first_and_rest(LIST, items, it.span()).into_iter().map(CallArg::Pos).collect();
        }
        Ok(ast::Call { expr, args })
    }

    fn arguments(&mut self, list: &[CallArg<'a>]) -> RewriteResult<Vec<CallArg<'a>>> {
        list.iter()
            .map(|argument| {
                Ok(match argument {
                    CallArg::Pos(it) => CallArg::Pos(self.expression(it)?),
                    CallArg::Kwarg(name, it) => CallArg::Kwarg(name, self.expression(it)?),
                    CallArg::PosSplat(it) => {
                        CallArg::PosSplat(call(SPLAT, self.expression(it)?, vec![], it.span()))
                    }
                    CallArg::KwargSplat(it) => {
                        CallArg::KwargSplat(call(SPLAT, self.expression(it)?, vec![], it.span()))
                    }
                })
            })
            .collect()
    }
}

fn operator<'a>(op: BinOpKind, left: Expr<'a>, right: Expr<'a>, span: Span) -> Expr<'a> {
    let name = match op {
        BinOpKind::Add => ADD,
        BinOpKind::Mul => MULTIPLY,
        BinOpKind::Rem => REMAINDER,
        BinOpKind::Concat => CONCAT,
        BinOpKind::In => IN,
        // The operation on numbers, or on truth values.
        BinOpKind::Sub
        | BinOpKind::Div
        | BinOpKind::FloorDiv
        | BinOpKind::Pow
        | BinOpKind::ScAnd
        | BinOpKind::ScOr => {
            return Expr::BinOp(Spanned::new(ast::BinOp { op, left, right }, span));
        }
        BinOpKind::Eq | BinOpKind::Ne | BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte => {
            return Expr::BinOp(Spanned::new(ast::BinOp { op, left, right: looked_at(right) }, span));
        }
    };
    call(name, left, vec![right], span)
}

/// Counts the work of looking at a value, unless it is a constant: then it costs little.
fn looked_at(value: Expr<'_>) -> Expr<'_> {
    let span = value.span();
    if matches!(value, Expr::Const(_)) { value } else { call(LOOK, value, vec![], span) }
}

fn call<'a>(name: &'static str, value: Expr<'a>, arguments: Vec<Expr<'a>>, span: Span) -> Expr<'a> {
    let args = arguments.into_iter().map(CallArg::Pos).collect();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(value), args }, span))
}

fn first_and_rest<'a>(name: &'static str, items: Vec<Expr<'a>>, span: Span) -> Option<Expr<'a>> {
    let mut items = items.into_iter();
    items.next().map(|first| call(name, first, items.collect(), span))
}

fn constant<'a>(value: Value, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

fn constant_none<'a>(span: Span) -> Expr<'a> {
    constant(Value::from(()), span)
}

fn text<'a>(text: &str) -> Expr<'a> {
    constant(Value::from_safe_string(text.to_owned()), Span::default())
}

fn emit<'a>(expr: Expr<'a>, span: Span) -> Stmt<'a> {
    Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr }, span))
}

fn refused(span: Span, reason: String) -> RewriteError {
    RewriteError { reason, line: span.start_line }
}

fn span_of(statement: &Stmt<'_>) -> Span {
    match statement {
        Stmt::Template(it) => it.span(),
        Stmt::EmitExpr(it) => it.span(),
        Stmt::EmitRaw(it) => it.span(),
        Stmt::ForLoop(it) => it.span(),
        Stmt::IfCond(it) => it.span(),
        Stmt::WithBlock(it) => it.span(),
        Stmt::Set(it) => it.span(),
        Stmt::SetBlock(it) => it.span(),
        Stmt::AutoEscape(it) => it.span(),
        Stmt::FilterBlock(it) => it.span(),
        Stmt::Block(it) => it.span(),
        Stmt::Import(it) => it.span(),
        Stmt::FromImport(it) => it.span(),
        Stmt::Extends(it) => it.span(),
        Stmt::Include(it) => it.span(),
        Stmt::Macro(it) => it.span(),
        Stmt::CallBlock(it) => it.span(),
        Stmt::Continue(it) => it.span(),
        Stmt::Break(it) => it.span(),
        Stmt::Do(it) => it.span(),
    }
}
