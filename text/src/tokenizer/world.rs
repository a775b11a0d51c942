//! The RWKV World tokenizer: greedy longest match over a byte trie.
//!
//! File format (`rwkv_vocab_v20230424.txt`): one token per line, `ID REPR LENGTH`, where REPR is Python's
//! `repr` of a `str` or `bytes` and LENGTH its number of bytes. Every single byte is a token, so every input
//! can be encoded; this is checked when the file is read. Id 0 is in no file: it is the end of a text,
//! without bytes. Source: `TRIE_TOKENIZER` of the `rwkv` package.

use super::table::{EntryKind, TokenTable};
use super::{TokenId, TokenizerError};

/// The end-of-text id that the World models are trained with.
pub const END_OF_TEXT: TokenId = 0;
/// Far above the published 65529; keeps a damaged file from asking for gigabytes.
const MAX_ID: usize = 1 << 20;

pub struct WorldTokenizer {
    table: TokenTable,
    trie: ByteTrie,
}

impl WorldTokenizer {
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let mut tokens = read_vocabulary(bytes)?;
        let ids = tokens.iter().map(|token| token.id as usize + 1).max().unwrap_or(0);
        let mut table = TokenTable::new(ids);
        table.set(END_OF_TEXT as usize, b"", EntryKind::Special);
        for token in &tokens {
            table.set(token.id as usize, &token.bytes, EntryKind::Text);
        }
        tokens.sort_by(|a, b| a.bytes.cmp(&b.bytes));
        for pair in tokens.windows(2) {
            if let [a, b] = pair
                && a.bytes == b.bytes
            {
                return Err(line_error(
                    b.line.max(a.line),
                    "each token once",
                    format!("{:?} again", b.text()),
                ));
            }
        }
        Ok(WorldTokenizer { table, trie: ByteTrie::build(&tokens)? })
    }

    pub fn encode(&self, text: &[u8]) -> Vec<TokenId> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        let mut rest = text;
        while !rest.is_empty() {
            let (id, len) = self.trie.longest_match(rest);
            ids.push(id);
            rest = &rest[len..];
        }
        ids
    }

    pub(super) fn table(&self) -> &TokenTable {
        &self.table
    }
}

/// Bytes to token ids. Children of a node are adjacent, sorted by byte.
struct ByteTrie {
    /// Per first byte: the node that it leads to.
    roots: Box<[u32; 256]>,
    nodes: Vec<TrieNode>,
    bytes: Vec<u8>,
    targets: Vec<u32>,
}

struct TrieNode {
    /// -1: no token ends here.
    token: TokenId,
    first: u32,
    count: u32,
}

impl ByteTrie {
    /// Builds the trie from tokens sorted by their bytes, without duplicates.
    fn build(tokens: &[WorldToken]) -> Result<Self, TokenizerError> {
        let mut trie =
            ByteTrie { roots: Box::new([0; 256]), nodes: Vec::new(), bytes: Vec::new(), targets: Vec::new() };
        // Breadth first, so that the children of one node are made one after another.
        // Invariant: all tokens of a range share their first `depth` bytes.
        let mut queue = std::collections::VecDeque::new();
        for byte in 0..=255u8 {
            let begin = tokens.partition_point(|t| t.bytes[0] < byte);
            let end = tokens.partition_point(|t| t.bytes[0] <= byte);
            if tokens[begin..end].first().is_none_or(|t| t.bytes.len() != 1) {
                return Err(TokenizerError::WorldByte { byte });
            }
            trie.roots[byte as usize] = trie.add_node();
            queue.push_back((trie.roots[byte as usize], begin..end, 1));
        }
        while let Some((node, range, depth)) = queue.pop_front() {
            let mut begin = range.start;
            // Sorted: a token that ends at this depth comes first.
            if tokens[begin].bytes.len() == depth {
                trie.nodes[node as usize].token = tokens[begin].id;
                begin += 1;
            }
            trie.nodes[node as usize].first = trie.bytes.len() as u32;
            while begin < range.end {
                let byte = tokens[begin].bytes[depth];
                let same = tokens[begin..range.end].partition_point(|t| t.bytes[depth] == byte);
                let child = trie.add_node();
                trie.bytes.push(byte);
                trie.targets.push(child);
                trie.nodes[node as usize].count += 1;
                queue.push_back((child, begin..begin + same, depth + 1));
                begin += same;
            }
        }
        Ok(trie)
    }

    fn add_node(&mut self) -> u32 {
        self.nodes.push(TrieNode { token: -1, first: 0, count: 0 });
        (self.nodes.len() - 1) as u32
    }

    /// The longest token that `text` (not empty) begins with; there always is one, of one byte at least.
    fn longest_match(&self, text: &[u8]) -> (TokenId, usize) {
        let mut node = &self.nodes[self.roots[text[0] as usize] as usize];
        let mut best = (node.token, 1);
        for (at, byte) in text.iter().enumerate().skip(1) {
            let children = node.first as usize..(node.first + node.count) as usize;
            let Ok(child) = self.bytes[children.clone()].binary_search(byte) else { break };
            node = &self.nodes[self.targets[children.start + child] as usize];
            if node.token >= 0 {
                best = (node.token, at + 1);
            }
        }
        best
    }
}

struct WorldToken {
    id: TokenId,
    bytes: Vec<u8>,
    line: usize,
}

impl WorldToken {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

fn line_error(line: usize, expected: &'static str, found: impl Into<String>) -> TokenizerError {
    TokenizerError::WorldLine { line, expected, found: found.into() }
}

fn read_vocabulary(bytes: &[u8]) -> Result<Vec<WorldToken>, TokenizerError> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = bytes[..e.valid_up_to()].iter().filter(|&&b| b == b'\n').count() + 1;
        line_error(line, "UTF-8 text", "other bytes")
    })?;
    let mut tokens: Vec<WorldToken> = Vec::new();
    let mut used: Vec<bool> = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let token = read_line(index + 1, line)?;
        let id = token.id as usize;
        if used.len() <= id {
            used.resize(id + 1, false);
        }
        if std::mem::replace(&mut used[id], true) {
            return Err(line_error(index + 1, "each id once", format!("id {id} again")));
        }
        tokens.push(token);
    }
    if tokens.is_empty() { Err(TokenizerError::Empty) } else { Ok(tokens) }
}

fn read_line(number: usize, line: &str) -> Result<WorldToken, TokenizerError> {
    let shape = || line_error(number, "`ID REPR LENGTH`", clipped(line));
    let (id, rest) = line.split_once(' ').ok_or_else(shape)?;
    let (repr, length) = rest.rsplit_once(' ').ok_or_else(shape)?;
    let id: usize = id.parse().map_err(|_| shape())?;
    let length: usize = length.parse().map_err(|_| shape())?;
    if id == END_OF_TEXT as usize || id > MAX_ID {
        return Err(line_error(number, "an id from 1 to 1048576", id.to_string()));
    }
    let bytes = python_literal(repr).map_err(|expected| line_error(number, expected, clipped(repr)))?;
    if bytes.len() != length || bytes.is_empty() {
        return Err(line_error(
            number,
            "as many bytes as the line's length says",
            format!("{length} for {}", clipped(repr)),
        ));
    }
    Ok(WorldToken { id: id as TokenId, bytes, line: number })
}

fn clipped(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

/// The bytes of a Python `str` or `bytes` literal as `repr` writes it. On error, what was expected.
fn python_literal(repr: &str) -> Result<Vec<u8>, &'static str> {
    const QUOTED: &str = "a quoted Python str or bytes";
    const ESCAPE: &str = r#"an escape out of \\ \' \" \n \r \t \xHH, and in a str \uHHHH \UHHHHHHHH"#;
    let (is_bytes, quoted) = match repr.strip_prefix('b') {
        Some(rest) => (true, rest),
        None => (false, repr),
    };
    let mut chars = quoted.chars();
    let quote = chars.next().filter(|c| matches!(c, '\'' | '"')).ok_or(QUOTED)?;
    let mut bytes = Vec::with_capacity(quoted.len());
    let mut push = |c: char| -> Result<(), &'static str> {
        if is_bytes {
            bytes.push(u8::try_from(u32::from(c)).map_err(|_| "only ASCII and \\xHH in a Python bytes")?);
        } else {
            bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
        Ok(())
    };
    loop {
        let c = match chars.next().ok_or(QUOTED)? {
            c if c == quote => break,
            '\\' => match chars.next().ok_or(ESCAPE)? {
                c @ ('\\' | '\'' | '"') => c,
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'x' => hex_char(&mut chars, 2).ok_or(ESCAPE)?,
                'u' if !is_bytes => hex_char(&mut chars, 4).ok_or(ESCAPE)?,
                'U' if !is_bytes => hex_char(&mut chars, 8).ok_or(ESCAPE)?,
                _ => return Err(ESCAPE),
            },
            c if is_bytes && !c.is_ascii() => return Err("only ASCII and \\xHH in a Python bytes"),
            c => c,
        };
        push(c)?;
    }
    if chars.next().is_some() { Err(QUOTED) } else { Ok(bytes) }
}

/// Number of bytes of a Python literal; `None` if it is none.
pub(super) fn literal_length(repr: &str) -> Option<usize> {
    python_literal(repr).ok().map(|bytes| bytes.len())
}

fn hex_char(chars: &mut std::str::Chars<'_>, digits: usize) -> Option<char> {
    let mut code = 0u32;
    for _ in 0..digits {
        code = code.checked_mul(16)? + chars.next()?.to_digit(16)?;
    }
    char::from_u32(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals() {
        assert_eq!(python_literal(r"'\x00'").unwrap(), [0]);
        assert_eq!(python_literal(r"'\x80'").unwrap(), "\u{80}".as_bytes());
        assert_eq!(python_literal(r"b'\x80'").unwrap(), [0x80]);
        assert_eq!(python_literal(r#"' "'"#).unwrap(), b" \"");
        assert_eq!(python_literal(r#""don't""#).unwrap(), b"don't");
        assert_eq!(python_literal(r#"'\'\\"\n\r\t'"#).unwrap(), b"'\\\"\n\r\t");
        assert_eq!(python_literal(r"'é\u3000\U0001f600'").unwrap(), "é\u{3000}😀".as_bytes());
    }

    #[test]
    fn broken_literals() {
        for bad in [
            "",
            "'",
            "b",
            "x'a'",
            "'a",
            "'a'b",
            r"'\q'",
            r"'\x1'",
            r"'\xg0'",
            "b'é'",
            r"b'\u0041'",
            r"'\ud800'",
            r"'\",
        ] {
            assert!(python_literal(bad).is_err(), "{bad}");
        }
    }
}
