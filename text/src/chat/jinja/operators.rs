//! The operators, literals and slices of a template, with the limits of its rendering.

use super::limits::{self, BoundedText};
use super::rewrite::names;
use super::{filters, values};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value, context};
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};

/// A macro keeps the variables that it sees until the rendering ends.
const MACRO: u64 = 1 << 10;
/// Arguments of one call that come from a list or a mapping.
const MOST_SPLAT: usize = 1000;

pub fn add_to(environment: &mut Environment<'static>) {
    environment.set_formatter(write);
    environment.add_filter(names::ADD, add);
    environment.add_filter(names::MULTIPLY, multiply);
    environment.add_filter(names::REMAINDER, remainder);
    environment.add_filter(names::CONCAT, concat);
    environment.add_filter(names::IN, contains);
    environment.add_filter(names::SLICE, slice);
    environment.add_filter(names::LIST, |items: Rest<Value>| values::part(&Value::from(items.0)));
    environment
        .add_filter(names::TUPLE, |items: Rest<Value>| values::part(&Value::from(Tuple::from(items.0))));
    environment.add_filter(names::MAP, |items: Rest<Value>| {
        let pairs = items.0.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
        values::part(&Value::from_pairs(pairs))
    });
    environment.add_filter(names::STORE, |value: Value| values::part(&value));
    environment.add_filter(names::SPLAT, splat);
    environment
        .add_filter(names::LOOK, |value: Value| limits::count_work(values::size(&value)).map(|()| value));
    environment.add_filter(names::TURN, |value: Value| {
        limits::count_work(values::size(&value))?;
        values::result(value)
    });
    environment.add_filter(names::MACRO, |value: Value| limits::count_memory(MACRO).map(|()| value));
}

/// A text whose bytes [`limits::count_memory`] has counted.
pub fn counted(text: String) -> Value {
    let text: Arc<str> = text.into();
    limits::track_text(&text);
    Value::from(text)
}

pub fn invalid(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// The engine's own operator, of what costs little: numbers, and what is no operand at all.
fn of_the_engine(expression: &'static str, a: &Value, b: &Value) -> Result<Value, Error> {
    static ENGINE: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);
    let result = ENGINE.compile_expression(expression).and_then(|it| it.eval(context! { a, b }));
    // Without the place in the expression, so that the error gets the place in the template.
    result.map_err(|error| match error.detail() {
        Some(detail) => Error::new(error.kind(), detail.to_owned()),
        None => Error::from(error.kind()),
    })
}

fn integers(a: &Value, b: &Value) -> Option<(i64, i64)> {
    let both = a.is_integer() && b.is_integer();
    both.then(|| Some((a.as_i64()?, b.as_i64()?))).flatten()
}

fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn joined(a: &str, b: &str) -> Result<Value, Error> {
    limits::count_memory((a.len() + b.len()) as u64)?;
    Ok(counted([a, b].concat()))
}

fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return joined(a, b);
    }
    if is_sequence(a) && is_sequence(b) && a.is_tuple() == b.is_tuple() {
        return collect(
            a.try_iter()?.chain(b.try_iter()?),
            entries(a).saturating_add(entries(b)),
            a.is_tuple(),
        );
    }
    let sum = integers(a, b).and_then(|(a, b)| a.checked_add(b));
    sum.map_or_else(|| of_the_engine("a + b", a, b), |sum| Ok(Value::from(sum)))
}

fn entries(value: &Value) -> u64 {
    value.len().unwrap_or(0) as u64
}

/// A list or tuple of about `length` items.
fn collect(items: impl Iterator<Item = Value>, length: u64, tuple: bool) -> Result<Value, Error> {
    limits::check_memory(length.saturating_mul(values::ENTRY))?;
    let items: Vec<Value> = items.collect();
    values::part(&if tuple { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some((text, times)) = a.as_str().map(|text| (text, b)).or_else(|| b.as_str().map(|text| (text, a)))
        && let Some(times) = times.as_usize()
    {
        limits::count_memory((text.len() as u64).saturating_mul(times as u64))?;
        return Ok(counted(text.repeat(times)));
    }
    if let Some((list, times)) = [(a, b), (b, a)].into_iter().find(|(list, _)| is_sequence(list))
        && let Some(times) = times.as_usize()
    {
        let length = entries(list).saturating_mul(times as u64);
        limits::check_memory(length.saturating_mul(values::ENTRY))?;
        let items: Vec<Value> = list.try_iter()?.collect();
        let times = if items.is_empty() { 0 } else { times };
        return collect((0..times).flat_map(|_| items.iter().cloned()), length, list.is_tuple());
    }
    let product = integers(a, b).and_then(|(a, b)| a.checked_mul(b));
    product.map_or_else(|| of_the_engine("a * b", a, b), |product| Ok(Value::from(product)))
}

/// The remainder of numbers, or Python's `"%s" % (a, b)`.
fn remainder(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    if a.as_str().is_some() {
        let arguments = match b.kind() {
            _ if b.is_tuple() => b.try_iter()?.collect(),
            ValueKind::Map => {
                let names = b.try_iter()?.map(|key| Ok((key.to_string(), b.get_item(&key)?)));
                vec![names.collect::<Result<Kwargs, Error>>()?.into()]
            }
            _ => vec![b.clone()],
        };
        return filters::printf(state, a, &arguments);
    }
    match integers(a, b) {
        Some((a, b)) if b > 0 => Ok(Value::from(a.rem_euclid(b))),
        _ => of_the_engine("a % b", a, b),
    }
}

fn concat(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return joined(a, b);
    }
    let mut text = BoundedText::value();
    let written = write!(text, "{a}{b}");
    text.finish(written).map(counted)
}

pub fn contains(item: &Value, container: &Value) -> Result<Value, Error> {
    if let Some(text) = container.as_str() {
        limits::count_work(text.len() as u64)?;
        return Ok(Value::from(text.contains(&*as_text(item)?)));
    }
    limits::count_work(values::size(item).saturating_add(values::size(container)))?;
    if is_sequence(container) {
        return Ok(Value::from(container.try_iter()?.any(|each| each == *item)));
    }
    of_the_engine("a in b", item, container)
}

/// The value as the engine prints it.
pub fn as_text(value: &Value) -> Result<std::borrow::Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.into());
    }
    let mut text = BoundedText::value();
    let written = write!(text, "{value}");
    text.finish(written).map(Into::into)
}

fn splat(value: Value) -> Result<Value, Error> {
    let value = values::part(&value)?;
    if value.len().unwrap_or(0) > MOST_SPLAT {
        return Err(invalid(format!("a call with more than {MOST_SPLAT} arguments")));
    }
    Ok(value)
}

/// `value[start:stop:step]` with Python's ends.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let integer = |value: &Value| -> Result<Option<i128>, Error> {
        if value.is_none() { Ok(None) } else { Ok(Some(i64::try_from(value.clone())?.into())) }
    };
    let (start, stop) = (integer(start)?, integer(stop)?);
    let step = integer(step)?.unwrap_or(1);
    if step == 0 {
        return Err(invalid("cannot slice by step size of 0"));
    }
    if value.is_undefined() || value.is_none() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    limits::count_work(values::size(value))?;
    if let Some(text) = value.as_str() {
        let places = places(text.chars().count(), start, stop, step);
        limits::count_memory(text.len() as u64)?;
        return Ok(counted(pick(text.chars(), &places, step)));
    }
    if !is_sequence(value) {
        return Err(invalid(format!("value of type {} cannot be sliced", value.kind())));
    }
    let places = places(value.len().unwrap_or(0), start, stop, step);
    limits::check_memory(entries(value).saturating_mul(values::ENTRY))?;
    let items: Vec<Value> = pick(value.try_iter()?, &places, step);
    let length = items.len() as u64;
    collect(items.into_iter(), length, value.is_tuple())
}

/// First place, and number of places.
fn places(length: usize, start: Option<i128>, stop: Option<i128>, step: i128) -> (usize, usize) {
    let length = length as i128;
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let end = |end: Option<i128>, absent: i128| match end {
        None => absent,
        Some(end) if end < 0 => (end + length).max(low),
        Some(end) => end.min(high),
    };
    let (start, stop) =
        if step > 0 { (end(start, low), end(stop, high)) } else { (end(start, high), end(stop, low)) };
    let distance = if step > 0 { stop - start } else { start - stop };
    let count = (distance + step.abs() - 1) / step.abs();
    (usize::try_from(start).unwrap_or(0), usize::try_from(count).unwrap_or(0))
}

fn pick<T: Clone, C: FromIterator<T>>(
    items: impl Iterator<Item = T>,
    places: &(usize, usize),
    step: i128,
) -> C {
    let &(first, count) = places;
    if step == 1 {
        return items.skip(first).take(count).collect();
    }
    let items: Vec<T> = items.collect();
    let place = |number: usize| usize::try_from(first as i128 + number as i128 * step).ok();
    (0..count).filter_map(|number| items.get(place(number)?).cloned()).collect()
}

/// Writes a printed value, to the prompt or into a `set` block.
fn write(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let plain = matches!(state.auto_escape(), AutoEscape::None);
    let failed = |_| invalid("cannot write");
    match (value.as_str(), value.as_object()) {
        (Some(text), _) if plain => {
            limits::count_text(text.len() as u64)?;
            out.write_str(text).map_err(failed)
        }
        (None, Some(_)) if plain => {
            let mut text = BoundedText::output();
            let written = write!(text, "{value}");
            out.write_str(&text.finish(written)?).map_err(failed)
        }
        (Some(_), _) | (_, Some(_)) => {
            limits::count_text(values::printed(value).saturating_mul(6))?;
            minijinja::escape_formatter(out, state, value)
        }
        (None, None) => {
            limits::count_text(1)?;
            minijinja::escape_formatter(out, state, value)
        }
    }
}

/// The arguments of a filter or test.
pub type FilterArguments = Rest<ValueOrKwargs>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_pythons() {
        // Computed with Python: [5:0:-1], [1:2:-1], [-3:], [::-2], [:2], [10:], [-99:99], [0:5:3].
        let of = |start: Option<i128>, stop: Option<i128>, step: i128| -> String {
            pick("abcdef".chars(), &places(6, start, stop, step), step)
        };
        assert_eq!(of(Some(5), Some(0), -1), "fedcb");
        assert_eq!(of(Some(1), Some(2), -1), "");
        assert_eq!(of(Some(-3), None, 1), "def");
        assert_eq!(of(None, None, -2), "fdb");
        assert_eq!(of(None, Some(2), 1), "ab");
        assert_eq!(of(Some(10), None, 1), "");
        assert_eq!(of(Some(-99), Some(99), 1), "abcdef");
        assert_eq!(of(Some(0), Some(5), 3), "ad");
        assert_eq!(of(None, None, i64::MIN.into()), "f");
    }
}
