//! Tokens that are found in a text before the tokenizer proper works on the rest, and what else a file beside the
//! vocabulary says.

use serde::{Deserialize, Serialize};

use super::TokenId;
use super::prefix_index::PrefixIndex;
use super::tiktoken::Pattern;

/// One token that stands for itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Added {
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

/// What a tokenizer needs beside its vocabulary file; packed with it into the artifact.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Extras {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<Added>,
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
    pub pattern: Option<Pattern>,
    /// sentencepiece: the space before a text stands only before its first part, not after each control token
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
pub(super) enum Part<'t> {
    Text(&'t str),
    /// The number in the list given to [`Splitter::new`].
    Added(usize),
}

/// Cuts texts at added tokens, the longest one where several match.
#[derive(Debug)]
pub(super) struct Splitter {
    index: PrefixIndex,
}

impl Splitter {
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Splitter {
        let entries = texts.into_iter().zip(0u32..).map(|(text, number)| (text.as_bytes().to_vec(), number));
        Splitter { index: PrefixIndex::new(entries) }
    }

    pub fn split<'t>(&self, text: &'t str) -> Vec<Part<'t>> {
        let mut parts = Vec::new();
        let (mut begin, mut at) = (0, 0);
        while at < text.len() {
            match self.index.longest(&text.as_bytes()[at..]) {
                // Entries are UTF-8, so a match begins and ends between characters.
                Some((length, number)) => {
                    if begin < at {
                        parts.push(Part::Text(&text[begin..at]));
                    }
                    parts.push(Part::Added(number as usize));
                    at += length;
                    begin = at;
                }
                None => at += 1,
            }
        }
        if begin < text.len() {
            parts.push(Part::Text(&text[begin..]));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_token_wins() {
        let splitter = Splitter::new(["<s>", "<s>x", "é"]);
        let parts = splitter.split("a<s>xb<s>é<s");
        let expected = [
            Part::Text("a"),
            Part::Added(1),
            Part::Text("b"),
            Part::Added(0),
            Part::Added(2),
            Part::Text("<s"),
        ];
        assert_eq!(parts, expected);
        assert_eq!(splitter.split(""), []);
        assert_eq!(Splitter::new([]).split("ab"), [Part::Text("ab")]);
    }

    #[test]
    fn extras_print_only_what_is_set() {
        assert_eq!(serde_json::to_string(&Extras::default()).unwrap(), "{}");
        let extras = Extras { prefix: vec![1], first_part_only: true, ..Extras::default() };
        let text = serde_json::to_string(&extras).unwrap();
        assert_eq!(text, r#"{"prefix":[1],"first_part_only":true}"#);
        assert_eq!(serde_json::from_str::<Extras>(&text).unwrap(), extras);
        assert!(serde_json::from_str::<Extras>(r#"{"sufix":[1]}"#).is_err());
    }
}
