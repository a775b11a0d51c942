//! Characters to tokens; parsers use the lexer.

use super::lexer::{LexToken, Lexer, ParseError, TextPosition};

const PUNCTUATION: [&str; 21] = [
    "->", "(", ")", "[", "]", "{", "}", "<", ">", ",", ";", ":", "=", "+", "-", "*", "/", "!", "?", "#", "|",
];

/// A character of an identifier.
pub(super) fn is_word_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The rest of a text and where it begins.
pub(super) struct TextScanner<'a> {
    rest: &'a str,
    pos: TextPosition,
}

impl<'a> TextScanner<'a> {
    pub fn new(text: &'a str) -> TextScanner<'a> {
        TextScanner { rest: text, pos: TextPosition { line: 1, column: 1 } }
    }
    fn bump(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        if c == '\n' {
            self.pos = TextPosition { line: self.pos.line + 1, column: 1 };
        } else {
            self.pos.column += 1;
        }
        Some(c)
    }
    fn first(&self) -> Option<char> {
        self.rest.chars().next()
    }
    fn second(&self) -> Option<char> {
        self.rest.chars().nth(1)
    }
    fn skip_space(&mut self) {
        while let Some(c) = self.first() {
            if self.rest.starts_with("//") {
                while self.first().is_some_and(|c| c != '\n') {
                    self.bump();
                }
            } else if c.is_whitespace() {
                self.bump();
            } else {
                return;
            }
        }
    }

    /// The next token and its position.
    pub fn token(&mut self) -> Result<(LexToken, TextPosition), ParseError> {
        self.skip_space();
        let pos = self.pos;
        let Some(c) = self.first() else { return Ok((LexToken::End, pos)) };
        let token = match c {
            '"' => LexToken::Str(self.string(pos)?),
            '%' | '@' | '$' => {
                self.bump();
                let name = self.name(pos)?;
                match c {
                    '%' => LexToken::Percent(name),
                    '@' => LexToken::At(name),
                    _ => LexToken::Dollar(name),
                }
            }
            c if c.is_ascii_digit() => self.number(pos)?,
            c if is_word_char(c) => LexToken::Ident(self.dotted()),
            _ => match PUNCTUATION.iter().find(|p| self.rest.starts_with(**p)) {
                Some(p) => {
                    p.chars().for_each(|_| {
                        self.bump();
                    });
                    LexToken::Punct(p)
                }
                None => return Err(Lexer::error_at(pos, format!("unexpected character {c:?}"))),
            },
        };
        Ok((token, pos))
    }

    /// Word characters, and dots between them.
    fn dotted(&mut self) -> String {
        let mut name = String::new();
        while let Some(c) = self.first() {
            if is_word_char(c) || (c == '.' && self.second().is_some_and(is_word_char)) {
                name.push(c);
                self.bump();
            } else {
                break;
            }
        }
        name
    }

    fn name(&mut self, pos: TextPosition) -> Result<String, ParseError> {
        match self.first() {
            Some('"') => self.string(pos),
            Some(c) if is_word_char(c) => Ok(self.dotted()),
            _ => Err(Lexer::error_at(pos, "a name must follow directly")),
        }
    }

    fn string(&mut self, pos: TextPosition) -> Result<String, ParseError> {
        self.bump();
        let mut text = String::new();
        loop {
            match self.bump() {
                Some('"') => return Ok(text),
                Some('\\') => match self.bump() {
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('r') => text.push('\r'),
                    Some(c @ ('"' | '\\')) => text.push(c),
                    _ => {
                        return Err(Lexer::error_at(
                            pos,
                            "unknown escape in string; known: \\n \\t \\r \\\" \\\\",
                        ));
                    }
                },
                Some(c) => text.push(c),
                None => return Err(Lexer::error_at(pos, "string is not closed")),
            }
        }
    }

    fn number(&mut self, pos: TextPosition) -> Result<LexToken, ParseError> {
        let mut text = String::new();
        let mut is_float = false;
        while let Some(c) = self.first() {
            let exponent = matches!(c, 'e' | 'E');
            let point = c == '.' && self.second().is_some_and(|d| d.is_ascii_digit());
            if !(c.is_ascii_digit() || exponent || point) {
                break;
            }
            is_float |= exponent || point;
            text.push(c);
            self.bump();
            if exponent && matches!(self.first(), Some('-' | '+')) {
                text.extend(self.bump());
            }
        }
        let token = match is_float {
            true => text.parse().ok().map(LexToken::Float),
            false => text.parse().ok().map(LexToken::Int),
        };
        let bad = self.first().is_some_and(is_word_char);
        token.filter(|_| !bad).ok_or_else(|| {
            Lexer::error_at(pos, format!("{text} is not a number, or does not fit in 64 bits"))
        })
    }
}
