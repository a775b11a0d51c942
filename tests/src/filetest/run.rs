//! The `run` and `param` lines of `interp` and `interp-kernel` tests.
//!
//! ```text
//! run @f n=2 past=1 workers=3: [1, 2.5], random 7, out
//! param @w [1, 2, 3]
//! ```

use mlcc_ir::dim::SymValues;
use mlcc_ir::text::{Lexer, ParseError};

/// One argument: elements in row-major order, random ones of a seed, or memory to be written.
#[derive(Clone, PartialEq, Debug)]
pub enum CallArgument {
    Values(Vec<f64>),
    Random(u64),
    Out,
}

/// One call.
#[derive(Clone, PartialEq, Debug)]
pub struct FileTestCall {
    pub name: String,
    pub syms: SymValues,
    pub workers: usize,
    pub arguments: Vec<CallArgument>,
}

pub fn parse_call(text: &str) -> Result<FileTestCall, String> {
    let parse = || -> Result<FileTestCall, ParseError> {
        let mut lexer = Lexer::new(text)?;
        let name = lexer.at_name("what to run")?;
        let mut call = FileTestCall { name, syms: SymValues::for_tokens(1), workers: 1, arguments: vec![] };
        while !lexer.at_end() && !lexer.accept(":") {
            let pos = lexer.position();
            let word = lexer.ident("n, b, past, workers or `:`")?;
            lexer.expect("=")?;
            let value = lexer.int("a number")?;
            match word.as_str() {
                "n" => call.syms.n = value,
                "b" => call.syms.b = value,
                "past" => call.syms.past = value,
                "workers" => call.workers = value.clamp(1, 64) as usize,
                _ => {
                    return Err(Lexer::error_at(pos, format!("`{word}` is none of n, b, past, workers")));
                }
            }
        }
        while !lexer.at_end() {
            call.arguments.push(parse_argument(&mut lexer)?);
            if !lexer.at_end() {
                lexer.expect(",")?;
            }
        }
        Ok(call)
    };
    parse().map_err(|e| format!("in `run {text}`: {e}"))
}

fn parse_argument(lexer: &mut Lexer) -> Result<CallArgument, ParseError> {
    if lexer.accept_keyword("out") {
        return Ok(CallArgument::Out);
    }
    if lexer.accept_keyword("random") {
        return Ok(CallArgument::Random(lexer.uint("a seed")?));
    }
    lexer.expect("[")?;
    Ok(CallArgument::Values(lexer.list("]", |lexer| lexer.float("a number"))?))
}

/// `@w [1, 2]` or `@w random 3`.
pub fn parse_param(text: &str) -> Result<(String, CallArgument), String> {
    let parse = || -> Result<(String, CallArgument), ParseError> {
        let mut lexer = Lexer::new(text)?;
        Ok((lexer.at_name("a parameter")?, parse_argument(&mut lexer)?))
    };
    parse().map_err(|e| format!("in `param {text}`: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls() {
        let call = parse_call("@f n=2 past=3: [1, -2.5], random 7, out").unwrap();
        assert_eq!(call.syms, SymValues { n: 2, b: 1, past: 3 });
        let arguments = [CallArgument::Values(vec![1.0, -2.5]), CallArgument::Random(7), CallArgument::Out];
        assert_eq!((call.name.as_str(), call.arguments.as_slice()), ("f", arguments.as_slice()));
        assert_eq!(parse_call("@f").unwrap().arguments, []);
        assert_eq!(
            parse_call("@f m=1:").unwrap_err(),
            "in `run @f m=1:`: 1:4: `m` is none of n, b, past, workers"
        );
        assert!(parse_call("@f: [1] [2]").unwrap_err().contains("expected `,`"));
    }
}
