//! Reads graph functions. Types are taken as written; the verifier checks that they are those that the ops
//! give.

use super::dim::parse_dim;
use super::lexer::{LexToken, Lexer, ParseError};
use crate::dim::Dim;
use crate::graph::{Function, FunctionKind, ValueId};
use crate::module::{FuncId, Module};
use crate::ops::{AttrValue, Op, SymbolRef};
use crate::types::{DType, TensorType};
use std::collections::HashMap;

/// The names that a function in text may refer to: parameters and states declared so far, functions anywhere
/// in the module.
pub struct ModuleScope<'a> {
    pub module: &'a Module,
    pub functions: &'a HashMap<String, FuncId>,
}

pub fn parse_dtype(lexer: &mut Lexer) -> Result<DType, ParseError> {
    let pos = lexer.position();
    let name = lexer.ident("an element type")?;
    DType::parse(&name).ok_or_else(|| Lexer::error_at(pos, format!("unknown element type `{name}`")))
}

/// Largest product of the sizes of one tensor (coefficients of symbols taken as sizes), so that arithmetic on
/// types cannot overflow.
const MOST_ELEMENTS: i128 = 1 << 48;
/// Operands of one node; definitions recurse over them.
const MOST_OPERANDS: usize = 1024;

/// `f32[n, 64]`.
pub fn parse_type(lexer: &mut Lexer) -> Result<TensorType, ParseError> {
    let dtype = parse_dtype(lexer)?;
    lexer.expect("[")?;
    Ok(TensorType { dtype, dims: parse_dims(lexer)? })
}

/// Sizes of a tensor up to `]`.
fn parse_dims(lexer: &mut Lexer) -> Result<Vec<Dim>, ParseError> {
    let pos = lexer.position();
    let dims = lexer.list("]", parse_dim)?;
    let size = |d: &Dim| {
        let coefficients = d.terms().iter().map(|(_, c)| i128::from(*c).abs());
        (i128::from(d.constant()).abs() + coefficients.sum::<i128>()).max(1)
    };
    let elements = dims.iter().map(size).try_fold(1i128, |a, d| Some(a * d).filter(|&p| p <= MOST_ELEMENTS));
    match elements {
        Some(_) => Ok(dims),
        None => Err(Lexer::error_at(pos, "a tensor of more than 2^48 elements")),
    }
}

/// One function, from `fn` to its closing brace.
pub fn parse_function(lexer: &mut Lexer, scope: &ModuleScope) -> Result<Function, ParseError> {
    lexer.expect_keyword("fn")?;
    let name = lexer.at_name("the function's name")?;
    let mut parser =
        FunctionParser { scope, f: Function::new(name, FunctionKind::Entry), values: HashMap::new() };
    lexer.expect("(")?;
    lexer.list(")", |lexer| parser.input(lexer))?;
    lexer.expect("->")?;
    lexer.expect("(")?;
    let results_at = lexer.position();
    let results = lexer.list(")", parse_type)?;
    parser.f.kind = parse_kind(lexer)?;
    lexer.expect("{")?;
    while !lexer.at_keyword("ret") {
        parser.node(lexer)?;
    }
    lexer.advance();
    if *lexer.peek() != LexToken::Punct("}") {
        parser.f.outputs = parser.operands(lexer)?;
    }
    let f = parser.f;
    if !f.outputs.iter().map(|&v| f.ty(v)).eq(&results) {
        let types: Vec<String> = f.outputs.iter().map(|&v| f.ty(v).to_string()).collect();
        let message =
            format!("function @{} returns ({}), not what is written here", f.name, types.join(", "));
        return Err(Lexer::error_at(results_at, message));
    }
    lexer.expect("}")?;
    Ok(f)
}

fn parse_kind(lexer: &mut Lexer) -> Result<FunctionKind, ParseError> {
    let pos = lexer.position();
    let name = lexer.ident("entry, body or group")?;
    let kind = FunctionKind::ALL.into_iter().find(|k| k.name() == name);
    kind.ok_or_else(|| Lexer::error_at(pos, format!("expected entry, body or group, found `{name}`")))
}

struct FunctionParser<'a> {
    scope: &'a ModuleScope<'a>,
    f: Function,
    values: HashMap<String, ValueId>,
}

impl FunctionParser<'_> {
    fn input(&mut self, lexer: &mut Lexer) -> Result<(), ParseError> {
        let pos = lexer.position();
        let name = lexer.percent("an input")?;
        lexer.expect(":")?;
        let value = self.f.add_input(parse_type(lexer)?);
        self.define(name, value).map_err(|message| Lexer::error_at(pos, message))
    }
    fn define(&mut self, name: String, value: ValueId) -> Result<(), String> {
        if self.values.contains_key(&name) {
            return Err(format!("%{name} is defined twice"));
        }
        self.values.insert(name, value);
        Ok(())
    }
    fn operand(&self, lexer: &mut Lexer) -> Result<ValueId, ParseError> {
        let pos = lexer.position();
        let name = lexer.percent("a value")?;
        let value = self.values.get(&name).copied();
        value.ok_or_else(|| Lexer::error_at(pos, format!("%{name} is not defined before this use")))
    }
    /// `%a, %b, ...`, at least one.
    fn operands(&self, lexer: &mut Lexer) -> Result<Vec<ValueId>, ParseError> {
        let mut values = vec![self.operand(lexer)?];
        while lexer.accept(",") {
            if values.len() == MOST_OPERANDS {
                return Err(lexer.error(format!("more than {MOST_OPERANDS} operands")));
            }
            values.push(self.operand(lexer)?);
        }
        Ok(values)
    }

    /// `%1, %2 = op @symbol, %0 {attr = value} : type, type`.
    fn node(&mut self, lexer: &mut Lexer) -> Result<(), ParseError> {
        let pos = lexer.position();
        let mut names = Vec::new();
        while matches!(lexer.peek(), LexToken::Percent(_)) {
            names.push(lexer.percent("a result")?);
            if !lexer.accept(",") {
                break;
            }
        }
        if !names.is_empty() {
            lexer.expect("=")?;
        }
        let op_at = lexer.position();
        let op_name = lexer.ident("an op or `ret`")?;
        let symbol = self.symbol(lexer, &op_name)?;
        let more = symbol.is_none() || lexer.accept(",");
        let inputs = match (more, lexer.peek()) {
            (true, LexToken::Percent(_)) => self.operands(lexer)?,
            _ => Vec::new(),
        };
        let attrs = if lexer.accept("{") { lexer.list("}", |lexer| self.attr(lexer))? } else { Vec::new() };
        let borrowed: Vec<(&str, AttrValue)> =
            attrs.iter().map(|(name, a)| (name.as_str(), a.clone())).collect();
        let op =
            Op::from_parts(&op_name, symbol, &borrowed).map_err(|e| Lexer::error_at(op_at, e.to_string()))?;
        let mut types = Vec::new();
        if !names.is_empty() {
            lexer.expect(":")?;
            types.push(parse_type(lexer)?);
            while lexer.accept(",") {
                types.push(parse_type(lexer)?);
            }
        }
        if types.len() != names.len() {
            return Err(Lexer::error_at(pos, format!("{} results but {} types", names.len(), types.len())));
        }
        let outputs = self.f.append_typed(op, &inputs, types);
        for (name, value) in names.into_iter().zip(outputs) {
            self.define(name, value).map_err(|message| Lexer::error_at(pos, message))?;
        }
        Ok(())
    }

    fn symbol(&self, lexer: &mut Lexer, op: &str) -> Result<Option<SymbolRef>, ParseError> {
        let LexToken::At(name) = lexer.peek() else { return Ok(None) };
        let module = self.scope.module;
        let (symbol, what) = match op {
            "param" => (module.param(name).map(SymbolRef::Param), "parameter"),
            _ => (module.state(name).map(SymbolRef::State), "state"),
        };
        let symbol = symbol.ok_or_else(|| lexer.error(format!("{what} @{name} is not declared above")))?;
        lexer.advance();
        Ok(Some(symbol))
    }

    fn attr(&self, lexer: &mut Lexer) -> Result<(String, AttrValue), ParseError> {
        let name = lexer.ident("an attribute")?;
        lexer.expect("=")?;
        let attr = match lexer.peek() {
            LexToken::At(name) => match self.scope.functions.get(name) {
                Some(&id) => {
                    lexer.advance();
                    AttrValue::Function(id)
                }
                None => return Err(lexer.error(format!("the module has no function @{name}"))),
            },
            LexToken::Punct("[") => {
                lexer.advance();
                AttrValue::Dims(parse_dims(lexer)?)
            }
            _ if lexer.at_float() => AttrValue::Float(lexer.float("a number")?),
            LexToken::Ident(word) if matches!(word.as_str(), "true" | "false") => {
                let value = word == "true";
                lexer.advance();
                AttrValue::Bool(value)
            }
            LexToken::Ident(word) if DType::parse(word).is_some() => AttrValue::DType(parse_dtype(lexer)?),
            _ => AttrValue::Dim(parse_dim(lexer)?),
        };
        Ok((name, attr))
    }
}
