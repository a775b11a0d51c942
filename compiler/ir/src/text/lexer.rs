//! Splits IR text into tokens with their positions, and the small parsing helpers that all parsers share.
//!
//! Tokens: identifiers (letters, digits, `_`, and `.` between parts: `state.read`), sigil names (`%x`, `@f`,
//! `$1`; any text in quotes: `%"odd name"`), numbers without sign, strings, punctuation. `//` starts a
//! comment up to the line end.

use super::scanner::{TextScanner, is_word_char};
use std::fmt;

/// Line and column (in characters), from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TextPosition {
    pub line: u32,
    pub column: u32,
}

/// Text that is not what it should be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct ParseError {
    pub line: u32,
    pub column: u32,
    pub message: String,
}

#[derive(Clone, PartialEq, Debug)]
pub enum LexToken {
    Ident(String),
    /// `%name`
    Percent(String),
    /// `@name`
    At(String),
    /// `$name`
    Dollar(String),
    Int(u64),
    Float(f64),
    Str(String),
    /// `->` or one ASCII character.
    Punct(&'static str),
    End,
}

impl fmt::Display for LexToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LexToken::Ident(name) => write!(f, "`{name}`"),
            LexToken::Percent(name) => write!(f, "`%{name}`"),
            LexToken::At(name) => write!(f, "`@{name}`"),
            LexToken::Dollar(name) => write!(f, "`${name}`"),
            LexToken::Int(value) => write!(f, "{value}"),
            LexToken::Float(value) => write!(f, "{value:?}"),
            LexToken::Str(text) => write!(f, "{text:?}"),
            LexToken::Punct(p) => write!(f, "`{p}`"),
            LexToken::End => f.write_str("the end of the text"),
        }
    }
}

/// The tokens of a text, read from front to back with any lookahead.
pub struct Lexer {
    tokens: Vec<(LexToken, TextPosition)>,
    next: usize,
    depth: u32,
}

impl Lexer {
    /// Nesting that a text may have; more is refused rather than overflowing the stack.
    pub const MAX_DEPTH: u32 = 200;

    pub fn new(text: &str) -> Result<Lexer, ParseError> {
        let mut scanner = TextScanner::new(text);
        let mut tokens = Vec::new();
        loop {
            let (token, pos) = scanner.token()?;
            let end = token == LexToken::End;
            tokens.push((token, pos));
            if end {
                return Ok(Lexer { tokens, next: 0, depth: 0 });
            }
        }
    }
    pub fn peek(&self) -> &LexToken {
        self.peek_at(0)
    }
    /// The token `ahead` places after the next one.
    pub fn peek_at(&self, ahead: usize) -> &LexToken {
        let last = self.tokens.len() - 1;
        &self.tokens[(self.next + ahead).min(last)].0
    }
    /// Position of the next token.
    pub fn position(&self) -> TextPosition {
        self.tokens[self.next].1
    }
    /// Takes the next token; at the end it stays `End`.
    pub fn advance(&mut self) -> LexToken {
        let token = self.tokens[self.next].0.clone();
        self.next = (self.next + 1).min(self.tokens.len() - 1);
        token
    }
    pub fn at_end(&self) -> bool {
        *self.peek() == LexToken::End
    }
    /// An error at the next token.
    pub fn error(&self, message: impl Into<String>) -> ParseError {
        Lexer::error_at(self.position(), message)
    }
    pub fn error_at(pos: TextPosition, message: impl Into<String>) -> ParseError {
        ParseError { line: pos.line, column: pos.column, message: message.into() }
    }
    fn expected_error<T>(&self, what: impl fmt::Display) -> Result<T, ParseError> {
        Err(self.error(format!("expected {what}, found {}", self.peek())))
    }
    /// Enters one level of nesting; pair with [`Lexer::leave`].
    pub fn enter(&mut self) -> Result<(), ParseError> {
        if self.depth >= Lexer::MAX_DEPTH {
            return Err(self.error(format!("nested deeper than {} levels", Lexer::MAX_DEPTH)));
        }
        self.depth += 1;
        Ok(())
    }
    pub fn leave(&mut self) {
        self.depth -= 1;
    }

    // ---- tokens of an expected kind

    /// True, and taken, if the next token is this punctuation.
    pub fn accept(&mut self, punct: &str) -> bool {
        let found = matches!(self.peek(), LexToken::Punct(p) if *p == punct);
        if found {
            self.advance();
        }
        found
    }
    pub fn expect(&mut self, punct: &str) -> Result<(), ParseError> {
        if self.accept(punct) { Ok(()) } else { self.expected_error(format!("`{punct}`")) }
    }
    pub fn at_keyword(&self, word: &str) -> bool {
        matches!(self.peek(), LexToken::Ident(name) if name == word)
    }
    /// True, and taken, if the next token is this identifier.
    pub fn accept_keyword(&mut self, word: &str) -> bool {
        let found = self.at_keyword(word);
        if found {
            self.advance();
        }
        found
    }
    pub fn expect_keyword(&mut self, word: &str) -> Result<(), ParseError> {
        if self.accept_keyword(word) { Ok(()) } else { self.expected_error(format!("`{word}`")) }
    }
    pub fn ident(&mut self, what: &str) -> Result<String, ParseError> {
        match self.peek() {
            LexToken::Ident(name) => {
                let name = name.clone();
                self.advance();
                Ok(name)
            }
            _ => self.expected_error(what),
        }
    }
    /// `%name`.
    pub fn percent(&mut self, what: &str) -> Result<String, ParseError> {
        match self.peek() {
            LexToken::Percent(name) => {
                let name = name.clone();
                self.advance();
                Ok(name)
            }
            _ => self.expected_error(format!("{what} (`%name`)")),
        }
    }
    /// `@name`.
    pub fn at_name(&mut self, what: &str) -> Result<String, ParseError> {
        match self.peek() {
            LexToken::At(name) => {
                let name = name.clone();
                self.advance();
                Ok(name)
            }
            _ => self.expected_error(format!("{what} (`@name`)")),
        }
    }
    pub fn string(&mut self, what: &str) -> Result<String, ParseError> {
        match self.peek() {
            LexToken::Str(text) => {
                let text = text.clone();
                self.advance();
                Ok(text)
            }
            _ => self.expected_error(format!("{what} (a string)")),
        }
    }
    pub fn uint(&mut self, what: &str) -> Result<u64, ParseError> {
        match *self.peek() {
            LexToken::Int(value) => {
                self.advance();
                Ok(value)
            }
            _ => self.expected_error(what),
        }
    }
    pub fn u32(&mut self, what: &str) -> Result<u32, ParseError> {
        let pos = self.position();
        let value = self.uint(what)?;
        u32::try_from(value)
            .map_err(|_| Lexer::error_at(pos, format!("{what} {value} does not fit in 32 bits")))
    }
    /// An integer with an optional minus sign.
    pub fn int(&mut self, what: &str) -> Result<i64, ParseError> {
        let pos = self.position();
        let negative = self.accept("-");
        let value = i128::from(self.uint(what)?);
        let value = if negative { -value } else { value };
        i64::try_from(value)
            .map_err(|_| Lexer::error_at(pos, format!("{what} {value} does not fit in 64 bits")))
    }
    /// A float, or an integer as one, with an optional minus sign; `inf`, `nan`, `nan_<bits in hex>`.
    pub fn float(&mut self, what: &str) -> Result<f64, ParseError> {
        let negative = self.accept("-");
        let value = match self.peek() {
            LexToken::Float(value) => *value,
            LexToken::Int(value) => *value as f64,
            LexToken::Ident(name) => match float_by_name(name) {
                Some(value) => value,
                None => return self.expected_error(what),
            },
            _ => return self.expected_error(what),
        };
        self.advance();
        Ok(if negative { -value } else { value })
    }
    /// True if a float that is no integer comes next (after an optional sign).
    pub fn at_float(&self) -> bool {
        let signed = *self.peek() == LexToken::Punct("-");
        match self.peek_at(usize::from(signed)) {
            LexToken::Float(_) => true,
            LexToken::Ident(name) => float_by_name(name).is_some(),
            _ => false,
        }
    }
    /// Items separated by commas up to `close`, which is taken.
    pub fn list<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Lexer) -> Result<T, ParseError>,
    ) -> Result<Vec<T>, ParseError> {
        let mut items = Vec::new();
        if self.accept(close) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.accept(close) {
                return Ok(items);
            }
            if !self.accept(",") {
                return self.expected_error(format!("`,` or `{close}`"));
            }
        }
    }
}

fn float_by_name(name: &str) -> Option<f64> {
    match name {
        "inf" => Some(f64::INFINITY),
        "nan" => Some(f64::NAN),
        _ => {
            let bits = u64::from_str_radix(name.strip_prefix("nan_")?, 16).ok()?;
            Some(f64::from_bits(bits)).filter(|v| v.is_nan())
        }
    }
}

/// A float as the lexer reads it back: shortest digits, `inf`, `nan`.
pub fn print_float(value: f64) -> String {
    if !value.is_nan() {
        return format!("{value:?}");
    }
    if value.to_bits() == f64::NAN.to_bits() { "nan".into() } else { format!("nan_{:x}", value.to_bits()) }
}

/// A name after its sigil, quoted if it is not an identifier.
pub fn print_name(sigil: char, name: &str) -> String {
    let plain = !name.is_empty()
        && name.split('.').all(|part| !part.is_empty() && part.chars().all(is_word_char))
        && !name.contains("..");
    if plain { format!("{sigil}{name}") } else { format!("{sigil}{}", print_string(name)) }
}

/// A string in quotes with the lexer's escapes.
pub fn print_string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<LexToken> {
        let lexer = Lexer::new(text).unwrap();
        lexer.tokens.into_iter().map(|(t, _)| t).collect()
    }

    #[test]
    fn every_kind_of_token() {
        use LexToken::*;
        assert_eq!(
            tokens("state.read %x.1 @f $2 %\"a b\" 12 1.5 2e-3 \"s\\n\" -> -1 // note\n)"),
            [
                Ident("state.read".into()),
                Percent("x.1".into()),
                At("f".into()),
                Dollar("2".into()),
                Percent("a b".into()),
                Int(12),
                Float(1.5),
                Float(0.002),
                Str("s\n".into()),
                Punct("->"),
                Punct("-"),
                Int(1),
                Punct(")"),
                End
            ]
        );
    }

    #[test]
    fn errors_have_positions() {
        let message = |text: &str| Lexer::new(text).err().expect("must fail").to_string();
        assert_eq!(message("a\n  ~"), "2:3: unexpected character '~'");
        assert_eq!(message("\"abc"), "1:1: string is not closed");
        assert_eq!(message("x 12ab"), "1:3: 12 is not a number, or does not fit in 64 bits");
        assert_eq!(
            message("99999999999999999999"),
            "1:1: 99999999999999999999 is not a number, or does not fit in 64 bits"
        );
        assert_eq!(message("% x"), "1:1: a name must follow directly");
        let mut lexer = Lexer::new("kernel foo").unwrap();
        lexer.advance();
        assert_eq!(lexer.expect("(").unwrap_err().to_string(), "1:8: expected `(`, found `foo`");
    }

    #[test]
    fn numbers_read_back_exactly() {
        for value in [0.0, -0.0, 1.0, 0.1, 1e-320, f64::MAX, 1e21, f64::INFINITY, f64::NEG_INFINITY, f64::NAN]
        {
            let text = print_float(value);
            let mut lexer = Lexer::new(&text).unwrap();
            assert!(lexer.at_float(), "{text}");
            assert_eq!(lexer.float("a number").unwrap().to_bits(), value.to_bits(), "{text}");
        }
        let odd = f64::from_bits(f64::NAN.to_bits() | 5);
        let mut lexer = Lexer::new(&print_float(odd)).unwrap();
        assert_eq!(lexer.float("a number").unwrap().to_bits(), odd.to_bits());
        let mut lexer = Lexer::new("-9223372036854775808 9223372036854775808").unwrap();
        assert_eq!(lexer.int("n").unwrap(), i64::MIN);
        assert!(lexer.int("n").is_err());
    }

    #[test]
    fn odd_names_are_quoted() {
        for name in ["x", "a.b.0", "", "a b", "..", ".a", "q\"\\", "x.", "é", "1"] {
            let text = print_name('%', name);
            assert_eq!(tokens(&text), [LexToken::Percent(name.into()), LexToken::End], "{text}");
        }
    }
}
