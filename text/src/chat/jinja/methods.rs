//! Methods of Python's types, within the limits of the rendering.

use super::operators::as_text;
use super::{filters, limits, values};
use minijinja::value::{Kwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Methods of Python's types; the common ones are `minijinja-contrib`'s.
pub fn unknown_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let size = args.iter().map(values::size).fold(values::size(value), u64::saturating_add);
    limits::count_work(size)?;
    if let Some(text) = value.as_str() {
        count(text, method, args)?;
    } else if value.as_object().is_some() {
        limits::check_memory((value.len().unwrap_or(0) as u64).saturating_mul(4 * values::ENTRY))?;
    }
    values::result(python_method(state, value, method, args)?)
}

/// Counts the result of a method of a text.
fn count(text: &str, method: &str, args: &[Value]) -> Result<(), Error> {
    match (method, args) {
        ("replace", [from, to, ..]) => filters::replaced(text, &as_text(from)?, &as_text(to)?),
        ("join", [items, ..]) => filters::joined(items, text.len() as u64),
        ("format", _) => filters::formatted(text, args, '{').map(drop),
        ("split" | "rsplit", _) => {
            let separator = args.first().and_then(|it| it.as_str().map(str::to_owned));
            let separator =
                separator.or_else(|| args.last()?.get_attr("sep").ok()?.as_str().map(str::to_owned));
            filters::pieces(text, separator.as_deref())
        }
        ("splitlines", _) => filters::pieces(text, Some("\n")),
        ("strip" | "lstrip" | "rstrip", [set, ..]) => {
            filters::trimmed(&[Value::from(""), set.clone()])?;
            limits::count_memory(text.len() as u64)
        }
        (
            "strip" | "lstrip" | "rstrip" | "lower" | "upper" | "title" | "capitalize" | "removeprefix"
            | "removesuffix" | "partition" | "rpartition",
            _,
        ) => limits::count_memory(text.len() as u64),
        _ => Ok(()),
    }
}

fn python_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let absent = || Error::new(ErrorKind::InvalidOperation, format!("{method}: it is missing"));
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
