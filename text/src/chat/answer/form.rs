//! The form of calls for the parser of answers: their begin, their end, and the parts that may be left out.

use super::marker::pieces;
use super::object::CallKeys;
use crate::chat::syntax::CallSyntax;

#[derive(Debug, Clone)]
pub(super) struct CallForm {
    /// Texts that may begin a call, the longest first; none where a call has no marker, so that it is all of
    /// the answer.
    pub markers: Vec<String>,
    /// `None`: the name follows the marker, and is not in an object.
    pub keys: Option<CallKeys>,
    /// The text behind the name, before the arguments.
    pub middle: String,
    /// Texts that may follow the arguments, in this order; each may be left out.
    pub closes: Vec<String>,
    /// The text between two calls, if that is no blank.
    pub between: String,
}

impl CallForm {
    pub fn from_syntax(syntax: &CallSyntax) -> CallForm {
        let CallSyntax { begin, open, middle, close, between, end, .. } = syntax;
        let lead = format!("{begin}{open}");
        let object = object_begin(&lead).zip(last_key(middle));
        let object = object.map(|((at, name), arguments)| (at, name, arguments));
        let (markers, keys) = match &object {
            Some((at, name, arguments)) => {
                // A call ends with the text that only follows the object.
                let marker = lead[..*at].trim().trim_end_matches('[').trim_end();
                let keys =
                    CallKeys { name: name.clone(), arguments: arguments.clone(), alone: marker.is_empty() };
                let own = open.rfind('{').map_or("", |at| open[..at].trim());
                (shortened(marker, own), Some(keys))
            }
            None => (shortened(lead.trim(), open.trim()), None),
        };
        let close = match object.is_some() {
            true => close.rfind('}').map_or("", |at| &close[at + 1..]),
            false => close.as_str(),
        };
        // Models close an object once more than they opened it.
        let brace = if object.is_some() && !markers.is_empty() { vec!["}".to_owned()] } else { Vec::new() };
        let closes = [brace, pieces(close), pieces(end.trim_start().trim_start_matches(']'))].concat();
        let between = between.as_deref().unwrap_or_default().trim().trim_matches(',').to_owned();
        CallForm { markers, keys, middle: middle.clone(), closes, between }
    }

    pub fn is_bare(&self) -> bool {
        self.markers.is_empty()
    }
}

/// A marker with its shortened forms: those without the text before all calls, and without the first tag of a
/// call.
fn shortened(marker: &str, open: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    if marker.is_empty() {
        return all;
    }
    all.push(marker.to_owned());
    // A further call of the same answer has no begin of all calls.
    let rest = [open].into_iter().chain(last_tag(open)).filter(|rest| !rest.is_empty() && *rest != marker);
    all.extend(rest.map(str::to_owned));
    all
}

/// `<function=` of `<tool_call>\n<function=`: some models leave the first tag out.
fn last_tag(open: &str) -> Option<&str> {
    let at = open.rfind('<').filter(|&at| at > 0)?;
    // A tag that says nothing more is not enough to tell a call.
    let named = open[at..].chars().filter(|c| c.is_alphanumeric()).count() > 2;
    (open[..at].trim_end().ends_with('>') && named && !open[at..].contains('>')).then(|| &open[at..])
}

/// The begin of the object of a call, whose first key is its name's: in `... {"name": "`.
fn object_begin(lead: &str) -> Option<(usize, String)> {
    let at = lead.rfind('{')?;
    let inside = lead[at + 1..].trim().strip_prefix('"')?;
    let (key, behind) = inside.split_once('"')?;
    let plain = behind.split_whitespace().collect::<String>() == ":\"";
    plain.then(|| (at, key.to_owned()))
}

/// The key of the arguments: in `", "arguments": `.
fn last_key(middle: &str) -> Option<String> {
    let inside = middle.trim().strip_suffix(':')?.trim_end().strip_suffix('"')?;
    let (_, key) = inside.rsplit_once('"')?;
    Some(key.to_owned())
}
