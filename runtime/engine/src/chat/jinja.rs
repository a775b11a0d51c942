//! Jinja templates as `transformers` renders them (`apply_chat_template` of its `PreTrainedTokenizerBase`):
//! `trim_blocks`, `lstrip_blocks`, loop controls, Python's methods of `str` and `dict`, `raise_exception`, `strftime_now`,
//! `tojson` as `json.dumps(ensure_ascii=False)`, the block tag `generation`.

use super::strftime::strftime;
use super::{ChatError, Extra, Message, Value, local_time};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Instructions of the template engine; a long conversation of a large template takes a fiftieth of it.
const MOST_STEPS: u64 = 5_000_000;
/// More than any context holds.
const LONGEST_TEXT: usize = 64 << 20;
/// Longest template, and the stack of its parser, which takes a frame for every operator of a chain: about 400 bytes in optimized code
/// (8 MiB were full at 20 400 operators), which are one byte of text at least. Only what is used is ever memory.
const LONGEST_TEMPLATE: usize = 128 << 10;
const PARSER_STACK: usize = 512 << 20;
const DEFAULT: &str = "default";
/// The template that `transformers` takes when tools are given and a checkpoint has several.
const TOOL_USE: &str = "tool_use";

pub(super) struct JinjaTemplates {
    environment: Environment<'static>,
    names: Vec<String>,
    /// `bos_token` and the like.
    tokens: BTreeMap<String, String>,
}

impl std::fmt::Debug for JinjaTemplates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JinjaTemplates({:?})", self.names)
    }
}

impl JinjaTemplates {
    /// `templates` are name and text; at least one.
    pub fn compile(
        templates: &[(String, String)],
        tokens: BTreeMap<String, String>,
    ) -> Result<JinjaTemplates, ChatError> {
        let mut environment = environment()?;
        for (name, text) in templates {
            let wrong = |reason| ChatError::Syntax { template: name.clone(), reason };
            if text.len() > LONGEST_TEMPLATE {
                return Err(wrong(format!("it has {} bytes, {LONGEST_TEMPLATE} are permitted", text.len())));
            }
            let add = || environment.add_template_owned(name.clone(), without_generation_tags(text));
            let added = std::thread::scope(|scope| {
                let parser = std::thread::Builder::new().stack_size(PARSER_STACK).spawn_scoped(scope, add);
                parser.map(|thread| thread.join())
            });
            match added {
                Ok(Ok(parsed)) => parsed.map_err(|error| wrong(describe(&error)))?,
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(error) => return Err(wrong(format!("no thread for the parser: {error}"))),
            }
        }
        let names = templates.iter().map(|(name, _)| name.clone()).collect();
        Ok(JinjaTemplates { environment, names, tokens })
    }

    fn choose(&self, extra: &Extra) -> &str {
        let has = |name: &str| self.names.iter().any(|known| known == name);
        match self.names.as_slice() {
            _ if extra.tools.is_some() && has(TOOL_USE) => TOOL_USE,
            _ if has(DEFAULT) => DEFAULT,
            [first, ..] => first,
            [] => DEFAULT,
        }
    }

    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        extra: &Extra,
    ) -> Result<String, ChatError> {
        let name = self.choose(extra);
        let failed = |error: Error| render_error(name, &error);
        let template = self.environment.get_template(name).map_err(failed)?;
        let mut context: BTreeMap<String, Value> = BTreeMap::new();
        for (token, text) in &self.tokens {
            context.insert(token.clone(), Value::from(text.as_str()));
        }
        context.insert("messages".to_owned(), Value::from(Serde(messages)));
        context.insert("tools".to_owned(), extra.tools.clone().unwrap_or(Value::from(())));
        context.insert("documents".to_owned(), extra.documents.clone().unwrap_or(Value::from(())));
        context.insert("add_generation_prompt".to_owned(), Value::from(add_generation_prompt));
        let now = extra.now.unwrap_or_else(local_time::now);
        let strftime_now = move |format: String| strftime(&format, now);
        context.insert("strftime_now".to_owned(), Value::from_function(strftime_now));
        context.extend(extra.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        let mut output = Bounded { bytes: Vec::new(), full: false };
        let rendered = template.render_captured_to(Value::from(context), &mut output).map(drop);
        if output.full {
            return Err(ChatError::TooLong { template: name.to_owned(), bytes: LONGEST_TEXT });
        }
        rendered.map_err(failed)?;
        // The engine writes strings only, so this never replaces anything.
        Ok(String::from_utf8_lossy(&output.bytes).into_owned())
    }

    pub fn uses(&self, variable: &str) -> bool {
        self.names.iter().any(|name| {
            let template = self.environment.get_template(name);
            template.is_ok_and(|template| template.undeclared_variables(false).contains(variable))
        })
    }
}

/// A writer that stops at [`LONGEST_TEXT`].
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl std::io::Write for Bounded {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + piece.len() > LONGEST_TEXT {
            self.full = true;
            return Err(std::io::Error::other("too long"));
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn environment() -> Result<Environment<'static>, ChatError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(
        syntax.map_err(|e| ChatError::Syntax { template: "syntax".to_owned(), reason: e.to_string() })?,
    );
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(MOST_STEPS));
    environment.set_unknown_method_callback(unknown_method);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    Ok(environment)
}

/// What a template said with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn render_error(template: &str, error: &Error) -> ChatError {
    let template = template.to_owned();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return ChatError::Raised { message: message.clone() };
        }
        if inner.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return ChatError::TooManySteps { template, steps: MOST_STEPS };
        }
        cause = inner.source();
    }
    ChatError::Render { template, reason: describe(error) }
}

/// Kind, detail and line.
fn describe(error: &Error) -> String {
    let mut text = error.kind().to_string();
    if let Some(detail) = error.detail() {
        let _ = write!(text, ": {detail}");
    }
    if let Some(line) = error.line() {
        let _ = write!(text, " (line {line})");
    }
    text
}

/// Methods of Python's types; the common ones are `minijinja-contrib`'s.
fn unknown_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let absent = || Error::new(ErrorKind::InvalidOperation, format!("{method}: it is not there"));
    let list = |parts: &[&str]| parts.iter().map(|part| Value::from(*part)).collect::<Value>();
    if let Some(text) = value.as_str() {
        let part = || args.first().and_then(Value::as_str).filter(|_| args.len() == 1);
        match (method, part()) {
            ("removeprefix", Some(part)) => return Ok(Value::from(text.strip_prefix(part).unwrap_or(text))),
            ("removesuffix", Some(part)) => return Ok(Value::from(text.strip_suffix(part).unwrap_or(text))),
            ("partition", Some(part)) => {
                let found = text.split_once(part);
                return Ok(
                    found.map_or(list(&[text, "", ""]), |(before, after)| list(&[before, part, after]))
                );
            }
            ("rpartition", Some(part)) => {
                let found = text.rsplit_once(part);
                return Ok(
                    found.map_or(list(&["", "", text]), |(before, after)| list(&[before, part, after]))
                );
            }
            ("index", Some(part)) => {
                let at = text.find(part).ok_or_else(absent)?;
                return Ok(Value::from(text[..at].chars().count()));
            }
            ("rsplit", _) => return rsplit(text, args),
            _ => {}
        }
    } else if let ("index", [wanted]) = (method, args) {
        return value.try_iter()?.position(|item| item == *wanted).map(Value::from).ok_or_else(absent);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// `text.rsplit(sep=None, maxsplit=-1)`.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.map_or_else(|| named.get("sep"), |separator| Ok(Some(separator)))?;
    let most = most.map_or_else(|| named.get("maxsplit"), |most| Ok(Some(most)))?;
    named.assert_all_used()?;
    // Negative: no limit.
    let most = most.and_then(|most| usize::try_from(most).ok());
    let mut parts: Vec<&str> = match (separator, most) {
        (Some(""), _) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "rsplit: the separator is empty"));
        }
        (Some(separator), None) => text.rsplit(separator).collect(),
        (Some(separator), Some(most)) => text.rsplitn(most.saturating_add(1), separator).collect(),
        (None, None) => text.split_whitespace().rev().collect(),
        (None, Some(_)) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "rsplit: maxsplit needs a separator"));
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// `json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)`.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, format!("cannot be written as JSON: {error}"))
    };
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = PythonJson { item, key, indent, depth: 0, empty: true, ascii: ascii.unwrap_or(false) };
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, style);
    match sort_keys {
        // The standard JSON value keeps its keys sorted.
        Some(true) => {
            let sorted = serde_json::to_value(value).map_err(failed)?;
            serde::Serialize::serialize(&sorted, &mut serializer).map_err(failed)?;
        }
        _ => serde::Serialize::serialize(value, &mut serializer).map_err(failed)?,
    }
    Ok(Value::from(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Python's separators and indentation.
struct PythonJson {
    item: String,
    key: String,
    indent: Option<usize>,
    depth: usize,
    /// Nothing has been written into the innermost container yet.
    empty: bool,
    ascii: bool,
}

impl PythonJson {
    fn new_line<W: ?Sized + std::io::Write>(&self, writer: &mut W) -> std::io::Result<()> {
        match self.indent {
            Some(indent) => write!(writer, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }

    fn begin<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, bracket: &str) -> std::io::Result<()> {
        self.depth += 1;
        self.empty = true;
        writer.write_all(bracket.as_bytes())
    }

    fn end<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, bracket: &str) -> std::io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.new_line(writer)?;
        }
        self.empty = false;
        writer.write_all(bracket.as_bytes())
    }

    fn begin_item<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.empty = false;
        self.new_line(writer)
    }
}

impl serde_json::ser::Formatter for PythonJson {
    fn begin_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.begin(writer, "[")
    }
    fn end_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.end(writer, "]")
    }
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(w, first)
    }
    fn begin_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.begin(writer, "{")
    }
    fn end_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.end(writer, "}")
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(w, first)
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> std::io::Result<()> {
        for c in fragment.chars() {
            let mut units = [0u16; 2];
            match c {
                // Python escapes DEL only where it escapes all but ASCII, and then not at all: it is ASCII.
                c if c.is_ascii() || !self.ascii => write!(writer, "{c}")?,
                c => {
                    for unit in c.encode_utf16(&mut units) {
                        write!(writer, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// `{% generation %}` ... `{% endgeneration %}` marks the assistant's text for training. It renders what is inside, as an
/// `if true` does, with the same rules for white space.
fn without_generation_tags(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        result.push_str(before);
        let inner = tag[2..].trim_start_matches(['-', '+']).trim_start();
        let replacement = [("generation", "if true"), ("endgeneration", "endif")]
            .into_iter()
            .find_map(|(name, instead)| inner.strip_prefix(name).map(|after| (instead, after)))
            .filter(|(_, after)| after.trim_start().trim_start_matches(['-', '+']).starts_with("%}"));
        match replacement {
            Some((instead, after)) => {
                let sign = tag[2..].chars().next().filter(|c| matches!(c, '-' | '+'));
                result.push_str("{%");
                result.extend(sign);
                result.push(' ');
                result.push_str(instead);
                result.push(' ');
                rest = after.trim_start();
            }
            None => {
                result.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_blocks_with_the_same_signs() {
        let text = "a{%- generation -%}b{% endgeneration+%}c{% generationx %}{%";
        assert_eq!(without_generation_tags(text), "a{%- if true -%}b{% endif +%}c{% generationx %}{%");
    }
}
