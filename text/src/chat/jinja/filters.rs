//! The engine's filters, tests and functions, each with what it may cost counted before it runs.

use super::limits;
use super::operators::{FilterArguments, as_text, contains, invalid};
use super::{json, operators, values};
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, functions, tests};
use std::fmt::Write as _;
use std::sync::LazyLock;

/// Longest name of an attribute, set of characters to trim, and the like: what a filter looks at for every
/// item.
const LONGEST_NAME: usize = 1000;
/// Width and precision of a format, and characters of a number.
const WIDEST: u64 = 1000;
/// Names that `namespace` is given at once.
const MOST_NAMES: usize = 1000;
/// A message of `raise_exception` is shown to a person.
pub const LONGEST_MESSAGE: usize = 4096;

type CostCheck = fn(&[Value]) -> Result<(), Error>;

pub fn add_to(environment: &mut Environment<'static>) {
    add_filters(environment);
    add_tests(environment);
    environment
        .add_function("range", |first, last, step| functions::range(first, last, step).map(values::lazy));
    environment.add_function("dict", guarded(Value::from_function(functions::dict), small));
    environment.add_function("namespace", namespace);
}

/// A function that counts before it runs, and whose result is measured.
fn guarded(native: Value, before: CostCheck) -> impl Fn(&mut State, FilterArguments) -> Result<Value, Error> {
    move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        limits::count_work(args.iter().map(values::size).fold(0, u64::saturating_add))?;
        before(&args)?;
        values::result(native.call(state, &args)?)
    }
}

fn add_filters(environment: &mut Environment<'static>) {
    let mut add = |name: &'static str, native: Value, before: CostCheck| {
        environment.add_filter(name, guarded(native, before));
    };
    // Results that are the argument, a part of it, or a number.
    add("length", Value::from_function(filters::length), small);
    add("count", Value::from_function(filters::length), small);
    add("default", Value::from_function(filters::default), small);
    add("d", Value::from_function(filters::default), small);
    add("abs", Value::from_function(filters::abs), small);
    add("attr", Value::from_function(filters::attr), small);
    add("first", Value::from_function(filters::first), small);
    add("last", Value::from_function(filters::last), small);
    add("bool", Value::from_function(filters::bool), small);
    add("round", Value::from_function(filters::round), small);
    add("int", Value::from_function(filters::int), small);
    add("float", Value::from_function(filters::float), small);
    // Texts about as long as the argument.
    add("escape", Value::from_function(filters::escape), escaped);
    add("e", Value::from_function(filters::escape), escaped);
    add("urlencode", Value::from_function(filters::urlencode), escaped);
    add("safe", Value::from_function(filters::safe), text);
    add("lower", Value::from_function(filters::lower), text);
    add("upper", Value::from_function(filters::upper), text);
    add("title", Value::from_function(filters::title), text);
    add("capitalize", Value::from_function(filters::capitalize), text);
    add("trim", Value::from_function(filters::trim), trimmed);
    add("reverse", Value::from_function(filters::reverse), reversed);
    // Texts that may be much longer.
    add("replace", Value::from_function(filters::replace), |args| match args {
        [text, from, to, ..] => replaced(&as_text(text)?, &as_text(from)?, &as_text(to)?),
        _ => Ok(()),
    });
    add("join", Value::from_function(filters::join), |args| {
        let separator = args.get(1).filter(|it| !it.is_kwargs()).cloned().or_else(|| named(args, "d"));
        args.first().map_or(Ok(()), |items| joined(items, separator.map_or(0, |it| values::printed(&it))))
    });
    add("indent", Value::from_function(filters::indent), indented);
    add("format", Value::from_function(filters::format), |args| match args {
        [format, rest @ ..] => formatted(&as_text(format)?, rest, '%').map(drop),
        [] => Ok(()),
    });
    add("split", Value::from_function(filters::split), |args| match args {
        [text, rest @ ..] => pieces(&as_text(text)?, rest.first().and_then(Value::as_str)),
        [] => Ok(()),
    });
    add("lines", Value::from_function(filters::lines), |args| match args {
        [text, ..] => pieces(&as_text(text)?, Some("\n")),
        [] => Ok(()),
    });
    // Lists of the argument's items.
    add("list", Value::from_function(filters::list), items);
    add("sort", Value::from_function(filters::sort), items);
    add("unique", Value::from_function(filters::unique), items);
    add("dictsort", Value::from_function(filters::dictsort), items);
    add("items", Value::from_function(filters::items), items);
    add("map", Value::from_function(filters::map), items);
    add("select", Value::from_function(filters::select), items);
    add("reject", Value::from_function(filters::reject), items);
    add("selectattr", Value::from_function(filters::selectattr), items);
    add("rejectattr", Value::from_function(filters::rejectattr), items);
    add("groupby", Value::from_function(filters::groupby), items);
    add("chain", Value::from_function(filters::chain), items);
    add("zip", Value::from_function(filters::zip), items);
    add("min", Value::from_function(filters::min), items);
    add("max", Value::from_function(filters::max), items);
    add("batch", Value::from_function(filters::batch), divided);
    add("slice", Value::from_function(filters::slice), divided);
    add("sum", Value::from_function(filters::sum), |args| {
        let start =
            args.get(1..).unwrap_or_default().iter().find(|it| it.as_object().is_some() && !it.is_kwargs());
        match start.cloned().or_else(|| named(args, "start")).or_else(|| args.get(2).cloned()) {
            Some(start) if !start.is_number() && !start.is_undefined() && !start.is_none() => {
                Err(invalid("sum adds numbers"))
            }
            _ => items(args),
        }
    });
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => as_text(value).map(|text| operators::counted(text.into_owned())),
    });
    environment.add_filter("pprint", |value: &Value| {
        let mut text = limits::BoundedText::value();
        let written = write!(text, "{value:#?}");
        text.finish(written).map(operators::counted)
    });
}

fn add_tests(environment: &mut Environment<'static>) {
    environment.add_test("undefined", tests::is_undefined);
    environment.add_test("defined", tests::is_defined);
    environment.add_test("none", tests::is_none);
    environment.add_test("safe", tests::is_safe);
    environment.add_test("escaped", tests::is_safe);
    environment.add_test("boolean", tests::is_boolean);
    environment.add_test("odd", tests::is_odd);
    environment.add_test("even", tests::is_even);
    environment.add_test("divisibleby", tests::is_divisibleby);
    environment.add_test("number", tests::is_number);
    environment.add_test("integer", tests::is_integer);
    environment.add_test("int", tests::is_integer);
    environment.add_test("float", tests::is_float);
    environment.add_test("string", tests::is_string);
    environment.add_test("sequence", tests::is_sequence);
    environment.add_test("iterable", tests::is_iterable);
    environment.add_test("mapping", tests::is_mapping);
    environment.add_test("true", tests::is_true);
    environment.add_test("false", tests::is_false);
    environment.add_test("filter", tests::is_filter);
    environment.add_test("test", tests::is_test);
    environment.add_test("sameas", tests::is_sameas);
    environment.add_test("callable", |value: &Value| {
        value.as_object().is_some_and(|it| it.repr() == minijinja::value::ObjectRepr::Plain)
    });
    environment.add_test("in", |item: &Value, container: &Value| contains(item, container));
    let mut add = |names: &[&'static str], native: Value| {
        for name in names {
            environment.add_test(*name, guarded(native.clone(), small));
        }
    };
    add(&["startingwith"], Value::from_function(tests::is_startingwith));
    add(&["endingwith"], Value::from_function(tests::is_endingwith));
    add(&["lower"], Value::from_function(tests::is_lower));
    add(&["upper"], Value::from_function(tests::is_upper));
    add(&["eq", "equalto", "=="], Value::from_function(tests::is_eq));
    add(&["ne", "!="], Value::from_function(tests::is_ne));
    add(&["lt", "lessthan", "<"], Value::from_function(tests::is_lt));
    add(&["le", "<="], Value::from_function(tests::is_le));
    add(&["gt", "greaterthan", ">"], Value::from_function(tests::is_gt));
    add(&["ge", ">="], Value::from_function(tests::is_ge));
}

fn namespace(values: Option<ValueOrKwargs>) -> Result<Value, Error> {
    let Some(values) = values else { return functions::namespace(None) };
    let values = values::part(&values.into_value())?;
    if values.len().unwrap_or(0) > MOST_NAMES {
        return Err(invalid(format!("a namespace of more than {MOST_NAMES} names")));
    }
    functions::namespace(Some(values.into()))
}

/// An argument by name.
fn named(args: &[Value], name: &str) -> Option<Value> {
    let last = args.last().filter(|last| last.is_kwargs())?;
    last.get_attr(name).ok().filter(|value| !value.is_undefined())
}

fn small(_: &[Value]) -> Result<(), Error> {
    Ok(())
}

fn printed(args: &[Value]) -> u64 {
    args.iter().map(values::printed).fold(0, u64::saturating_add)
}

pub fn text(args: &[Value]) -> Result<(), Error> {
    limits::count_memory(printed(args))
}

fn escaped(args: &[Value]) -> Result<(), Error> {
    limits::count_memory(printed(args).saturating_mul(6))
}

pub fn trimmed(args: &[Value]) -> Result<(), Error> {
    if args.get(1).is_some_and(|set| values::printed(set) > LONGEST_NAME as u64) {
        return Err(invalid(format!("more than {LONGEST_NAME} characters to trim")));
    }
    text(args)
}

fn reversed(args: &[Value]) -> Result<(), Error> {
    match args {
        [value] if value.as_object().is_some() => items(args),
        _ => text(args),
    }
}

fn items(args: &[Value]) -> Result<(), Error> {
    let long = |value: &Value| value.as_str().is_some_and(|text| text.len() > LONGEST_NAME);
    if args.iter().skip(1).any(long) || named(args, "attribute").is_some_and(|it| long(&it)) {
        return Err(invalid(format!("a name or argument of more than {LONGEST_NAME} bytes")));
    }
    let length = args.iter().map(|it| it.len().unwrap_or(0) as u64).fold(0, u64::saturating_add);
    limits::check_memory(length.saturating_mul(4 * values::ENTRY))
}

/// `batch` and `slice` make as many lists, or fill up to as many items, as their arguments say.
fn divided(args: &[Value]) -> Result<(), Error> {
    let count = args.get(1).and_then(Value::as_usize).unwrap_or(0);
    limits::count_memory((count as u64).saturating_mul(values::ENTRY))?;
    items(args)
}

pub fn replaced(text: &str, from: &str, to: &str) -> Result<(), Error> {
    let found = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    limits::count_memory((found as u64).saturating_mul(to.len() as u64).saturating_add(text.len() as u64))
}

pub fn joined(items: &Value, separator: u64) -> Result<(), Error> {
    let mut bytes = 0u64;
    for item in items.try_iter()?.checked() {
        bytes = bytes.saturating_add(values::printed(&item?)).saturating_add(separator);
    }
    limits::count_memory(bytes)
}

fn indented(args: &[Value]) -> Result<(), Error> {
    let Some(text) = args.first() else { return Ok(()) };
    let text = as_text(text)?;
    let width =
        args.get(1).and_then(Value::as_usize).or_else(|| named(args, "width")?.as_usize()).unwrap_or(4);
    let lines = text.matches('\n').count() as u64 + 1;
    limits::count_memory(lines.saturating_mul(width as u64).saturating_add(text.len() as u64))
}

pub fn pieces(text: &str, separator: Option<&str>) -> Result<(), Error> {
    let count = match separator {
        None => text.split_whitespace().count(),
        Some("") => 0,
        Some(separator) => text.matches(separator).count() + 1,
    };
    limits::count_memory(text.len() as u64)?;
    limits::check_memory((count as u64).saturating_mul(2 * values::ENTRY))
}

/// The fields of a format that begin with `open` (`%` or `{`): how many there are, and that none is too wide.
/// Returns the places of `r` in `%r`.
pub fn formatted(format: &str, args: &[Value], open: char) -> Result<Vec<usize>, Error> {
    let wide = || invalid(format!("a format wider than {WIDEST}"));
    let (mut fields, mut given, mut places) = (0u64, false, Vec::new());
    let mut chars = format.char_indices().peekable();
    while let Some((_, c)) = chars.next() {
        if c != open {
            continue;
        }
        // `%%` and `{{` are the characters themselves.
        if chars.next_if(|(_, c)| *c == open).is_some() {
            continue;
        }
        fields += 1;
        let (mut digits, mut name) = (0u64, false);
        for (at, c) in chars.by_ref() {
            match c {
                '(' => name = true,
                ')' => name = false,
                _ if name => {}
                '0'..='9' => digits = digits * 10 + u64::from(c as u32 - '0' as u32),
                '*' | '{' => given = true,
                '}' if open == '{' => break,
                'r' if open == '%' => {
                    places.push(at);
                    break;
                }
                _ if open == '%' && c.is_ascii_alphabetic() => break,
                _ => digits = 0,
            }
            if digits > WIDEST {
                return Err(wide());
            }
        }
    }
    let too_wide = |it: &Value| it.as_i64().is_some_and(|width| width.unsigned_abs() > WIDEST);
    if given && args.iter().any(too_wide) {
        return Err(wide());
    }
    let largest = args.iter().map(values::printed).max().unwrap_or(0);
    let each = largest.saturating_add(WIDEST);
    limits::count_memory(fields.saturating_mul(each).saturating_add(format.len() as u64))?;
    Ok(places)
}

/// Python's `format % args`.
pub fn printf(state: &mut State, format: &Value, args: &[Value]) -> Result<Value, Error> {
    static FORMAT: LazyLock<Value> = LazyLock::new(|| Value::from_function(filters::format));
    let text = as_text(format)?;
    let places = formatted(&text, args, '%')?;
    let mut call = Vec::with_capacity(args.len() + 1);
    if places.is_empty() {
        call.push(format.clone());
        call.extend_from_slice(args);
        return FORMAT.call(state, &call);
    }
    // The engine knows no `%r`: such an argument is given as the text that Python writes.
    let mut text = text.into_owned();
    for place in &places {
        text.replace_range(place..=place, "s");
    }
    call.push(Value::from(text.as_str()));
    for (number, value) in args.iter().enumerate() {
        call.push(if places.contains(&field_end(&text, number)) {
            representation(value)?
        } else {
            value.clone()
        });
    }
    FORMAT.call(state, &call)
}

/// The end of the field of argument `number`.
fn field_end(format: &str, number: usize) -> usize {
    let mut chars = format.char_indices();
    let mut fields = 0;
    while let Some((_, c)) = chars.next() {
        if c != '%' {
            continue;
        }
        let end = chars.find(|(_, c)| c.is_ascii_alphabetic() || *c == '%');
        match end {
            Some((_, '%')) => {}
            Some((at, _)) if fields == number => return at,
            _ => fields += 1,
        }
    }
    usize::MAX
}

/// Python's `repr` of a text or a number.
fn representation(value: &Value) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return Ok(Value::from(as_text(value)?.into_owned())) };
    limits::count_memory(values::printed(value).saturating_mul(6))?;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut result = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => result.push_str("\\\\"),
            '\n' => result.push_str("\\n"),
            '\r' => result.push_str("\\r"),
            '\t' => result.push_str("\\t"),
            c if c == quote => result.extend(['\\', c]),
            c if c.is_ascii_control() => {
                let _ = write!(result, "\\x{:02x}", u32::from(c));
            }
            c => result.push(c),
        }
    }
    result.push(quote);
    Ok(Value::from(result))
}
