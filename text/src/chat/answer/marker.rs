//! Markers in a text that comes in pieces.

use crate::chat::syntax::ID;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::chat) enum Match {
    /// The text begins with it; its bytes there.
    Full(usize),
    /// All there is could be the begin.
    Partial,
    No,
}

/// Compares the begin of `text` with `pattern`, blanks apart.
pub(in crate::chat) fn matches(pattern: &str, text: &str) -> Match {
    let mut wanted = pattern.chars().filter(|c| !c.is_whitespace()).peekable();
    let mut rest = text.char_indices().peekable();
    let mut end = 0;
    while let Some(&next) = wanted.peek() {
        let Some(&(at, found)) = rest.peek() else { return Match::Partial };
        if found.is_whitespace() {
            rest.next();
        } else if next == ID {
            let length = text[at..].find(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c)));
            match length {
                None => return Match::Partial,
                Some(0) => return Match::No,
                Some(length) => {
                    end = at + length;
                    rest = text.char_indices().peekable();
                    while rest.next_if(|&(i, _)| i < end).is_some() {}
                    wanted.next();
                }
            }
        } else if found == next {
            end = at + found.len_utf8();
            rest.next();
            wanted.next();
        } else {
            return Match::No;
        }
    }
    Match::Full(end)
}

/// The tags that a text consists of, without the blanks between them.
pub(super) fn pieces(text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let next = rest.char_indices().skip(1).find(|&(_, c)| c == '<' || c == '[').map(|(at, _)| at);
        let (piece, behind) = rest.split_at(next.unwrap_or(rest.len()));
        pieces.push(piece.trim().to_owned());
        rest = behind;
    }
    pieces
}
