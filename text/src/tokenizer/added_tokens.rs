//! Tokens that are found in a text before the tokenizer proper works on the rest, and what else a file beside
//! the vocabulary says.

use serde::{Deserialize, Serialize};

use super::TokenId;
use super::prefix_index::PrefixIndex;
use super::tiktoken::TiktokenPattern;

/// One token whose text is not cut.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedToken {
    pub text: String,
    /// Usually one; a sequence such as `[gMASK]sop` gives two.
    pub ids: Vec<TokenId>,
    /// A control token: no part of a text when decoded.
    pub special: bool,
    /// Looked for in texts. Off for names that are ordinary words (`sop` of ChatGLM).
    #[serde(default = "yes")]
    pub parsed: bool,
}

fn yes() -> bool {
    true
}

/// Data that a tokenizer needs besides its vocabulary file; packed with it into the artifact.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenizerExtras {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<AddedToken>,
    /// Put before a prompt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefix: Vec<TokenId>,
    /// Put after a prompt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suffix: Vec<TokenId>,
    /// Put between two texts that become one input.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub between: Vec<TokenId>,
    /// tiktoken: how a text is cut before pairs are joined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<TiktokenPattern>,
    /// sentencepiece: the space before a text is only before its first part, not after each control token
    /// (`"legacy": false` of transformers).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub first_part_only: bool,
    /// ChatGLM-6B: line breaks, tabs and runs of spaces are tokens of their own.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub glm_spaces: bool,
    /// Added to every id of the vocabulary file (ChatGLM-6B: ids of image tokens come first).
    #[serde(skip_serializing_if = "is_zero")]
    pub id_offset: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A piece of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TextSegment<'t> {
    Text(&'t str),
    /// The number in the list given to [`AddedTokenSplitter::new`].
    Added(usize),
}

/// Cuts texts at added tokens, the longest one where several match.
#[derive(Debug)]
pub(super) struct AddedTokenSplitter {
    index: PrefixIndex,
}

impl AddedTokenSplitter {
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> AddedTokenSplitter {
        let entries = texts.into_iter().zip(0u32..).map(|(text, number)| (text.as_bytes().to_vec(), number));
        AddedTokenSplitter { index: PrefixIndex::new(entries) }
    }

    pub fn split<'t>(&self, text: &'t str) -> Vec<TextSegment<'t>> {
        let mut parts = Vec::new();
        let (mut begin, mut at) = (0, 0);
        while at < text.len() {
            match self.index.longest(&text.as_bytes()[at..]) {
                // Entries are UTF-8, so a match begins and ends between characters.
                Some((length, number)) => {
                    if begin < at {
                        parts.push(TextSegment::Text(&text[begin..at]));
                    }
                    parts.push(TextSegment::Added(number as usize));
                    at += length;
                    begin = at;
                }
                None => at += 1,
            }
        }
        if begin < text.len() {
            parts.push(TextSegment::Text(&text[begin..]));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_token_wins() {
        let splitter = AddedTokenSplitter::new(["<s>", "<s>x", "é"]);
        let parts = splitter.split("a<s>xb<s>é<s");
        let expected = [
            TextSegment::Text("a"),
            TextSegment::Added(1),
            TextSegment::Text("b"),
            TextSegment::Added(0),
            TextSegment::Added(2),
            TextSegment::Text("<s"),
        ];
        assert_eq!(parts, expected);
        assert_eq!(splitter.split(""), []);
        assert_eq!(AddedTokenSplitter::new([]).split("ab"), [TextSegment::Text("ab")]);
    }

    #[test]
    fn extras_print_only_what_is_set() {
        assert_eq!(serde_json::to_string(&TokenizerExtras::default()).unwrap(), "{}");
        let extras = TokenizerExtras { prefix: vec![1], first_part_only: true, ..TokenizerExtras::default() };
        let text = serde_json::to_string(&extras).unwrap();
        assert_eq!(text, r#"{"prefix":[1],"first_part_only":true}"#);
        assert_eq!(serde_json::from_str::<TokenizerExtras>(&text).unwrap(), extras);
        assert!(serde_json::from_str::<TokenizerExtras>(r#"{"sufix":[1]}"#).is_err());
    }
}
