//! Arguments of calls that are written in tags, one for each, and not as JSON: their form, and their
//! conversion to JSON as they come.
//!
//! Texts are in tags as they are, everything else as JSON. Only the schema of the function tells which of
//! both a value is.

use llguidance::derivre::RegexBuilder;
use serde_json::Value as Json;

use super::python;
pub(super) use super::value_kinds::ValueKind;
use crate::grammar::{SchemaStrictness, constrains};

/// The form of an argument: `open` NAME `middle` VALUE `close`, with `between` two of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagSyntax {
    pub open: String,
    pub middle: String,
    pub close: String,
    pub between: String,
}

impl TagSyntax {
    /// The end of a value: the close without the blanks before it.
    pub fn end(&self) -> &str {
        self.close.trim()
    }

    /// Blanks before a value and behind it, which are no part of it.
    pub fn blanks(&self) -> (&str, &str) {
        let (middle, close) = (&self.middle, &self.close);
        (&middle[middle.trim_end().len()..], &close[..close.len() - close.trim_start().len()])
    }
}

/// A value of an argument, as it comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagValue {
    kind: ValueKind,
    /// True if anything of it has come: blanks before it are dropped then.
    begun: bool,
}

impl TagValue {
    pub fn new(kind: ValueKind) -> TagValue {
        TagValue { kind, begun: false }
    }

    /// Takes the part of `held` that surely belongs to the value, and gives its JSON text; the last of it
    /// with `true`, when its end has come.
    pub fn take(&mut self, held: &mut String, tags: &TagSyntax) -> (String, bool) {
        let (before, behind) = tags.blanks();
        if !self.begun {
            if held.len() < before.len() && before.starts_with(held.as_str()) {
                return (String::new(), false);
            }
            self.begun = true;
            if held.starts_with(before) {
                held.drain(..before.len());
            }
            if self.kind == ValueKind::Text {
                let (text, ended) = self.take(held, tags);
                return (format!("\"{text}"), ended);
            }
        }
        let end = held.find(tags.end());
        match (end, self.kind) {
            (Some(at), kind) => {
                let value = &held[..at];
                let value = value.strip_suffix(behind).unwrap_or(value);
                let text = match kind {
                    ValueKind::Text => format!("{}\"", escaped(value)),
                    ValueKind::TextOrNull if value.trim() == "null" => "null".into(),
                    ValueKind::TextOrNull => Json::from(value).to_string(),
                    ValueKind::Json => as_json(value),
                };
                held.drain(..at + tags.end().len());
                (text, true)
            }
            (None, ValueKind::Text) => {
                let safe = held.len() - open_end(held, tags.end());
                // Blanks may belong to the end.
                let blanks = (0..=behind.len()).rev().filter(|&n| behind.is_char_boundary(n));
                let begins = blanks.map(|n| &behind[..n]).find(|begin| held[..safe].ends_with(begin));
                let safe = safe - begins.map_or(0, str::len);
                (escaped(&held.drain(..safe).collect::<String>()), false)
            }
            (None, _) => (String::new(), false),
        }
    }

    /// The answer has ended in it.
    pub fn cut(&self, held: &str, tags: &TagSyntax) -> String {
        match self.kind {
            ValueKind::Text if self.begun => escaped(held),
            ValueKind::Text => format!("\"{}", escaped(held.strip_prefix(tags.blanks().0).unwrap_or(held))),
            _ => String::new(),
        }
    }
}

/// The longest end of `text` that may become `marker`.
pub(super) fn open_end(text: &str, marker: &str) -> usize {
    let begins = |&at: &usize| marker.starts_with(&text[at..]);
    let at = text.char_indices().map(|(at, _)| at).filter(|at| text.len() - at < marker.len()).find(begins);
    at.map_or(0, |at| text.len() - at)
}

/// The text as it is in a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Json::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

fn as_json(value: &str) -> String {
    let value = value.trim();
    match serde_json::from_str::<serde::de::IgnoredAny>(value) {
        Ok(_) => value.to_owned(),
        Err(_) => python::literal(value).unwrap_or_else(|| value.into()).to_string(),
    }
}

/// Keywords that a text is held to, or that are looked at elsewhere.
const OF_TEXTS: [&str; 10] =
    ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "pattern", "minLength", "maxLength"];
/// Characters that a schema may ask for or allow: a grammar counts them one by one.
const MOST_CHARACTERS: u64 = 2000;

/// The expressions of Lark that a text with this schema has to match, all of them.
pub(super) fn held_to(value: &Json, strictness: SchemaStrictness) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    let mut fields = value.as_object().into_iter().flatten();
    let other = fields.find(|(field, value)| !OF_TEXTS.contains(&field.as_str()) && constrains(field, value));
    let mut add = |found: Result<Option<String>, String>| match (found, strictness) {
        (Ok(expression), _) => {
            all.extend(expression);
            Ok(())
        }
        (Err(_), SchemaStrictness::Lenient) => Ok(()),
        (Err(why), SchemaStrictness::Strict) => Err(why),
    };
    if let Some((field, _)) = other {
        add(Err(format!("`{field}` cannot be enforced in a tag")))?;
    }
    add(pattern(value))?;
    add(lengths(value))?;
    Ok(all)
}

fn pattern(value: &Json) -> Result<Option<String>, String> {
    let Some(pattern) = value.get("pattern") else { return Ok(None) };
    let pattern = pattern.as_str().ok_or_else(|| format!("`pattern` is {pattern}, and no string"))?;
    let readable = crate::grammar::readable(pattern);
    let readable = readable.map_err(|why| format!("`pattern` cannot be enforced: {why}"))?;
    let whole = searched(&readable)?;
    match RegexBuilder::new().mk_regex(&whole) {
        Ok(_) => Ok(Some(whole)),
        Err(error) => Err(format!("`pattern` cannot be enforced: {error}")),
    }
}

fn lengths(value: &Json) -> Result<Option<String>, String> {
    let length = |field: &str| match value.get(field) {
        None => Ok(None),
        Some(length) => match length.as_u64().filter(|&length| length <= MOST_CHARACTERS) {
            Some(length) => Ok(Some(length)),
            None => Err(format!("`{field}` is {length}, expected 0 to {MOST_CHARACTERS}")),
        },
    };
    match (length("minLength")?, length("maxLength")?) {
        (None, None) => Ok(None),
        (least, None) => Ok(Some(format!("(?s:.{{{},}})", least.unwrap_or(0)))),
        (least, Some(most)) if least.unwrap_or(0) > most => {
            Err(format!("`minLength` is above `maxLength`, {most}"))
        }
        (least, Some(most)) => Ok(Some(format!("(?s:.{{{},{most}}})", least.unwrap_or(0)))),
    }
}

/// A pattern matches anywhere, but where it is anchored. In an alternative with others, an anchor counts as
/// one of all of them: that allows less. Anchors elsewhere, and everything else that is no regular language,
/// are errors of the grammar.
fn searched(pattern: &str) -> Result<String, String> {
    // Parentheses that do not belong together would get others in the whole.
    fancy_regex::Regex::new(pattern)
        .map_err(|error| format!("`pattern` is not a regular expression: {error}"))?;
    let (before, inner) = match pattern.strip_prefix('^') {
        Some(inner) => ("", inner),
        None => ("(?s:.*)", pattern),
    };
    let is_escaped = |text: &str| text.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1;
    let (inner, behind) = match inner.strip_suffix('$').filter(|inner| !is_escaped(inner)) {
        Some(inner) => (inner, ""),
        None => (inner, "(?s:.*)"),
    };
    Ok(format!("{before}({}){behind}", llguidance::regex_to_lark(inner, "dw")))
}
