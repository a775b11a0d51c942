//! Words, numbers and signs of a PTX text.

use super::PtxError;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum PtxToken<'a> {
    /// Directives (`.reg`), opcodes with their modifiers, names, registers.
    Word(&'a str),
    Int(u64),
    /// The bits of `0f...`.
    Float(u32),
    /// The bits of `0d...`.
    Double(u64),
    Text(&'a str),
    Sign(u8),
    End,
}

pub struct PtxTokens<'a> {
    text: &'a str,
    at: usize,
    pub line: u32,
    next: PtxToken<'a>,
    /// The line of `next`.
    next_line: u32,
}

fn in_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

impl<'a> PtxTokens<'a> {
    pub fn new(text: &'a str) -> Result<Self, PtxError> {
        let mut tokens = Self { text, at: 0, line: 1, next: PtxToken::End, next_line: 1 };
        tokens.take()?;
        Ok(tokens)
    }

    pub fn peek(&self) -> PtxToken<'a> {
        self.next
    }

    /// The line of the next token.
    pub fn next_line(&self) -> u32 {
        self.next_line
    }

    pub fn error(&self, what: impl Into<String>) -> PtxError {
        PtxError { line: self.next_line, what: what.into() }
    }

    pub fn take(&mut self) -> Result<PtxToken<'a>, PtxError> {
        self.skip_blanks()?;
        let taken = self.next;
        self.next_line = self.line;
        self.next = self.read()?;
        Ok(taken)
    }

    pub fn skip(&mut self, sign: u8) -> Result<bool, PtxError> {
        let found = self.next == PtxToken::Sign(sign);
        if found {
            self.take()?;
        }
        Ok(found)
    }

    pub fn expect(&mut self, sign: u8) -> Result<(), PtxError> {
        match self.skip(sign)? {
            true => Ok(()),
            false => Err(self.error(format!("expected `{}`, found {:?}", char::from(sign), self.next))),
        }
    }

    pub fn word(&mut self) -> Result<&'a str, PtxError> {
        match self.take()? {
            PtxToken::Word(word) => Ok(word),
            other => Err(self.error(format!("expected a word, found {other:?}"))),
        }
    }

    pub fn int(&mut self) -> Result<u64, PtxError> {
        match self.take()? {
            PtxToken::Int(value) => Ok(value),
            other => Err(self.error(format!("expected a number, found {other:?}"))),
        }
    }

    fn byte(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    fn skip_blanks(&mut self) -> Result<(), PtxError> {
        loop {
            match (self.byte(0), self.byte(1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (b' ' | b'\t' | b'\r', _) => self.at += 1,
                (b'/', b'/') => {
                    while !matches!(self.byte(0), b'\n' | 0) {
                        self.at += 1;
                    }
                }
                (b'/', b'*') => {
                    let rest = &self.text[self.at..];
                    let Some(length) = rest.find("*/") else {
                        return Err(PtxError { line: self.line, what: "a comment without end".into() });
                    };
                    self.line += rest[..length].matches('\n').count() as u32;
                    self.at += length + 2;
                }
                _ => return Ok(()),
            }
        }
    }

    fn read(&mut self) -> Result<PtxToken<'a>, PtxError> {
        let begin = self.at;
        let c = self.byte(0);
        if c == 0 {
            return Ok(PtxToken::End);
        }
        if c.is_ascii_digit() {
            return self.number();
        }
        if c == b'"' {
            let rest = &self.text[begin + 1..];
            let Some(length) = rest.find('"') else {
                return Err(PtxError { line: self.line, what: "a text without end".into() });
            };
            self.at += length + 2;
            return Ok(PtxToken::Text(&rest[..length]));
        }
        if !in_word(c) {
            if !c.is_ascii() {
                return Err(PtxError { line: self.line, what: "a character beyond ASCII".into() });
            }
            self.at += 1;
            return Ok(PtxToken::Sign(c));
        }
        loop {
            if in_word(self.byte(0)) {
                self.at += 1;
            } else if self.byte(0) == b':' && self.byte(1) == b':' && in_word(self.byte(2)) {
                self.at += 2;
            } else {
                return Ok(PtxToken::Word(&self.text[begin..self.at]));
            }
        }
    }

    fn number(&mut self) -> Result<PtxToken<'a>, PtxError> {
        let begin = self.at;
        while self.byte(0).is_ascii_alphanumeric() || self.byte(0) == b'.' {
            self.at += 1;
        }
        let word = &self.text[begin..self.at];
        let wrong = || PtxError { line: self.line, what: format!("`{word}` is no number") };
        let hex = |digits: &str| u64::from_str_radix(digits, 16).map_err(|_| wrong());
        match (word.get(..2), word.len()) {
            (Some("0f" | "0F"), 10) => Ok(PtxToken::Float(hex(&word[2..])? as u32)),
            (Some("0d" | "0D"), 18) => Ok(PtxToken::Double(hex(&word[2..])?)),
            (Some("0x" | "0X"), _) => Ok(PtxToken::Int(hex(word[2..].trim_end_matches('U'))?)),
            _ => {
                // A leading 0 would be octal, which no compiler writes for anything but 0.
                let digits = word.trim_end_matches('U');
                if digits.bytes().all(|c| c.is_ascii_digit() || c == b'.') && digits.contains('.') {
                    // A version.
                    return Ok(PtxToken::Word(word));
                }
                if digits.len() > 1 && digits.starts_with('0') {
                    return Err(wrong());
                }
                Ok(PtxToken::Int(digits.parse().map_err(|_| wrong())?))
            }
        }
    }
}
