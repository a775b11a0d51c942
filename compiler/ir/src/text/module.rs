//! Whole modules as text: parameters, states, taps, functions, kernels and steps, each in declaration order.

use super::graph_parse::{ModuleScope, parse_function, parse_type};
use super::graph_print::{join, print_function};
use super::lexer::{LexToken, Lexer, ParseError, print_float, print_name, print_string};
use super::{parse_kernel, parse_step, print_kernel, print_step};
use crate::entity::EntityId;
use crate::module::{
    ColumnRange, FuncId, FunctionTaps, ModelParam, ModelState, Module, ParamRole, ParamSource, RowBlocks,
};
use crate::types::Packing;
use std::collections::HashMap;

pub fn print_module(module: &Module) -> String {
    let mut out = format!("module {} {{\n", print_name('@', &module.name));
    for param in module.params.values() {
        out.push_str(&format!("  {}\n", print_param(param)));
    }
    for ModelState { name, ty, init } in module.states.values() {
        out.push_str(&format!("  state {} : {ty} init {}\n", print_name('@', name), print_float(*init)));
    }
    for FunctionTaps { function, names } in &module.taps {
        let names = join(names.iter().map(|n| print_string(n)));
        out.push_str(&format!("  taps {} [{names}]\n", print_name('@', function)));
    }
    for f in module.functions.values() {
        indent(&mut out, &print_function(module, f));
    }
    for kernel in &module.kernels {
        indent(&mut out, &print_kernel(kernel));
    }
    for step in &module.steps {
        indent(&mut out, &print_step(step));
    }
    out.push_str("}\n");
    out
}

/// Functions, kernels and steps are set apart by an empty line.
fn indent(out: &mut String, text: &str) {
    if !out.ends_with("{\n") {
        out.push('\n');
    }
    for line in text.lines() {
        if !line.is_empty() {
            out.push_str("  ");
        }
        out.push_str(line);
        out.push('\n');
    }
}

fn print_param(param: &ModelParam) -> String {
    let packing = param.packing.map_or(String::new(), |p| format!(" packing {}", p.name()));
    let (name, role, source) = (print_name('@', &param.name), param.role.name(), print_source(&param.source));
    format!("param {name} : {} role {role}{packing} = {source}", param.ty)
}

fn print_source(source: &ParamSource) -> String {
    match source {
        ParamSource::Tensor(name) => format!("tensor({})", print_string(name)),
        ParamSource::Scale(factor, s) => format!("scale({}, {})", print_float(*factor), print_source(s)),
        ParamSource::NegExp(s) => format!("neg_exp({})", print_source(s)),
        ParamSource::Exp(s) => format!("exp({})", print_source(s)),
        ParamSource::Transpose(s) => format!("transpose({})", print_source(s)),
        ParamSource::Concat(parts) => format!("concat({})", join(parts.iter().map(print_source))),
        ParamSource::Offset(term, s) => format!("offset({}, {})", print_float(*term), print_source(s)),
        ParamSource::Rows(RowBlocks { start, len, stride, count, of }, s) => {
            format!("rows({start}, {len}, {stride}, {count}, {of}, {})", print_source(s))
        }
        ParamSource::Columns(order, s) => {
            format!("columns({}, {})", print_source(s), join(order.iter().map(usize::to_string)))
        }
        ParamSource::ColumnRange(ColumnRange { start, len, of }, s) => {
            format!("column_range({start}, {len}, {of}, {})", print_source(s))
        }
        ParamSource::Adapter => "adapter()".into(),
        ParamSource::UnitRows(s) => format!("unit_rows({})", print_source(s)),
        ParamSource::Ranks(parts) => format!("ranks({})", join(parts.iter().map(print_source))),
        ParamSource::Values(values) => {
            format!("values({})", join(values.iter().map(|&v| print_float(f64::from(v)))))
        }
    }
}

/// Reads a whole text, which holds one module.
pub fn parse_module(text: &str) -> Result<Module, ParseError> {
    let mut lexer = Lexer::new(text)?;
    let module = parse_module_part(&mut lexer)?;
    match lexer.at_end() {
        true => Ok(module),
        false => Err(lexer.error(format!("expected the end of the text, found {}", lexer.peek()))),
    }
}

/// Reads a module that other things may follow; the lexer is at `module`.
pub fn parse_module_part(lexer: &mut Lexer) -> Result<Module, ParseError> {
    lexer.expect_keyword("module")?;
    let mut module = Module::new(lexer.at_name("the module's name")?);
    lexer.expect("{")?;
    let functions = function_names(lexer);
    while !lexer.accept("}") {
        item(lexer, &mut module, &functions)?;
    }
    Ok(module)
}

/// Ids of all functions of the text, so that they may be used before their definition.
fn function_names(lexer: &Lexer) -> HashMap<String, FuncId> {
    let mut names = HashMap::new();
    let mut at = 0;
    while *lexer.peek_at(at) != LexToken::End {
        if let (LexToken::Ident(word), LexToken::At(name)) = (lexer.peek_at(at), lexer.peek_at(at + 1))
            && word == "fn"
        {
            let id = FuncId::from_index(names.len());
            names.entry(name.clone()).or_insert(id);
        }
        at += 1;
    }
    names
}

fn item(
    lexer: &mut Lexer,
    module: &mut Module,
    functions: &HashMap<String, FuncId>,
) -> Result<(), ParseError> {
    let pos = lexer.position();
    let word = match lexer.peek() {
        LexToken::Ident(word) => word.as_str(),
        _ => "",
    };
    match word {
        "param" => {
            let param = parse_param(lexer)?;
            if module.param(&param.name).is_some() {
                return Err(Lexer::error_at(pos, format!("parameter @{} is declared twice", param.name)));
            }
            module.params.push(param);
        }
        "state" => {
            let state = parse_state(lexer)?;
            if module.state(&state.name).is_some() {
                return Err(Lexer::error_at(pos, format!("state @{} is declared twice", state.name)));
            }
            module.states.push(state);
        }
        "taps" => {
            let taps = parse_taps(lexer)?;
            if module.taps.iter().any(|t| t.function == taps.function) {
                let message = format!("taps of @{} are declared twice", taps.function);
                return Err(Lexer::error_at(pos, message));
            }
            module.taps.push(taps);
        }
        "fn" => {
            let function = parse_function(lexer, &ModuleScope { module, functions })?;
            if module.function(&function.name).is_some() {
                return Err(Lexer::error_at(pos, format!("function @{} is defined twice", function.name)));
            }
            module.functions.push(function);
        }
        "kernel" => module.kernels.push(parse_kernel(lexer)?),
        "step" => module.steps.push(parse_step(lexer)?),
        _ => {
            let message =
                format!("expected param, state, taps, fn, kernel, step or `}}`, found {}", lexer.peek());
            return Err(lexer.error(message));
        }
    }
    Ok(())
}

fn parse_param(lexer: &mut Lexer) -> Result<ModelParam, ParseError> {
    lexer.expect_keyword("param")?;
    let name = lexer.at_name("the parameter's name")?;
    lexer.expect(":")?;
    let ty = parse_type(lexer)?;
    lexer.expect_keyword("role")?;
    let role = one_of(lexer, &ParamRole::ALL, ParamRole::name)?;
    let packing = match lexer.accept_keyword("packing") {
        true => Some(one_of(lexer, &Packing::ALL, Packing::name)?),
        false => None,
    };
    lexer.expect("=")?;
    Ok(ModelParam { name, ty, role, source: parse_source(lexer)?, packing })
}

/// The thing of that name; the error lists all names.
pub fn one_of<T: Copy>(lexer: &mut Lexer, all: &[T], name: fn(T) -> &'static str) -> Result<T, ParseError> {
    let pos = lexer.position();
    let names = || join(all.iter().map(|&x| name(x)));
    let word = lexer.ident(&format!("one of {}", names()))?;
    let found = all.iter().copied().find(|&x| name(x) == word);
    found.ok_or_else(|| Lexer::error_at(pos, format!("expected one of {}, found `{word}`", names())))
}

fn parse_state(lexer: &mut Lexer) -> Result<ModelState, ParseError> {
    lexer.expect_keyword("state")?;
    let name = lexer.at_name("the state's name")?;
    lexer.expect(":")?;
    let ty = parse_type(lexer)?;
    lexer.expect_keyword("init")?;
    Ok(ModelState { name, ty, init: lexer.float("the state's first value")? })
}

fn parse_taps(lexer: &mut Lexer) -> Result<FunctionTaps, ParseError> {
    lexer.expect_keyword("taps")?;
    let function = lexer.at_name("the name of an entry function")?;
    lexer.expect("[")?;
    let names = lexer.list("]", |lexer| lexer.string("the name of an output"))?;
    Ok(FunctionTaps { function, names })
}

/// The kinds of a source.
const SOURCES: &str = "tensor, scale, neg_exp, exp, transpose, concat, offset, rows, columns, column_range, unit_rows, values, adapter or ranks";

/// A number and the comma behind it.
fn parse_size(lexer: &mut Lexer, expected: &str, fault: &str) -> Result<usize, ParseError> {
    let pos = lexer.position();
    let value = lexer.int(expected)?;
    lexer.expect(",")?;
    usize::try_from(value).map_err(|_| Lexer::error_at(pos, format!("{value} is {fault}")))
}

fn parse_source(lexer: &mut Lexer) -> Result<ParamSource, ParseError> {
    lexer.enter()?;
    let pos = lexer.position();
    let word = lexer.ident(SOURCES)?;
    lexer.expect("(")?;
    let source = match word.as_str() {
        "tensor" => ParamSource::Tensor(lexer.string("the checkpoint tensor's name")?),
        "scale" => {
            let factor = lexer.float("a factor")?;
            lexer.expect(",")?;
            ParamSource::Scale(factor, Box::new(parse_source(lexer)?))
        }
        "neg_exp" => ParamSource::NegExp(Box::new(parse_source(lexer)?)),
        "exp" => ParamSource::Exp(Box::new(parse_source(lexer)?)),
        "transpose" => ParamSource::Transpose(Box::new(parse_source(lexer)?)),
        "concat" | "ranks" => {
            let parts = lexer.list(")", parse_source)?;
            lexer.leave();
            return Ok(if word == "concat" { ParamSource::Concat(parts) } else { ParamSource::Ranks(parts) });
        }
        "offset" => {
            let term = lexer.float("a term")?;
            lexer.expect(",")?;
            ParamSource::Offset(term, Box::new(parse_source(lexer)?))
        }
        "rows" => {
            let mut size = || parse_size(lexer, "a number of rows", "no number of rows");
            let blocks =
                RowBlocks { start: size()?, len: size()?, stride: size()?, count: size()?, of: size()? };
            ParamSource::Rows(blocks, Box::new(parse_source(lexer)?))
        }
        "columns" => {
            let source = Box::new(parse_source(lexer)?);
            lexer.expect(",")?;
            let order = lexer.list(")", |lexer| {
                let pos = lexer.position();
                let value = lexer.int("the number of a column")?;
                usize::try_from(value).map_err(|_| Lexer::error_at(pos, format!("{value} is no column")))
            })?;
            lexer.leave();
            return Ok(ParamSource::Columns(order, source));
        }
        "column_range" => {
            let mut size = || parse_size(lexer, "a number of columns", "no number of columns");
            let range = ColumnRange { start: size()?, len: size()?, of: size()? };
            ParamSource::ColumnRange(range, Box::new(parse_source(lexer)?))
        }
        "adapter" => ParamSource::Adapter,
        "unit_rows" => ParamSource::UnitRows(Box::new(parse_source(lexer)?)),
        "values" => {
            let values = lexer.list(")", |lexer| lexer.float("a value"))?;
            lexer.leave();
            return Ok(ParamSource::Values(values.into_iter().map(|v| v as f32).collect()));
        }
        _ => {
            let message = format!("expected {SOURCES}, found `{word}`");
            return Err(Lexer::error_at(pos, message));
        }
    };
    lexer.expect(")")?;
    lexer.leave();
    Ok(source)
}
