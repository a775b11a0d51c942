//! JSON schemas as clients write them, made into what the compiler of grammars reads.
//!
//! Annotations go. References become names under `$defs`, whatever they were written as: pointers with
//! escapes, anchors, ids. Keywords that no grammar has are written in those that it has where that says the
//! same; the others are an error that names the keyword and its place, or are left out where a schema is
//! [`SchemaStrictness::Lenient`].

use std::collections::BTreeMap;

use llguidance::derivre::RegexBuilder;
use serde_json::{Map, Value, json};

use super::patterns;

/// The strictness with which a text follows a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaStrictness {
    /// All of it; what cannot be enforced is an error.
    Strict,
    /// Everything that can be enforced; the rest is left free.
    Lenient,
}

/// Blanks between two tokens of JSON: none, a space, or a line break with an indentation. Without a bound
/// small models write blanks until their text is cut.
const BLANKS: &str = " |\\r?\\n[ \\t]{0,20}";
/// Numbers are at most so far from zero where their schema sets no bound, so that no digits come without end:
/// 18 digits, the most that llguidance counts.
const FARTHEST: i64 = 900_000_000_000_000_000;
/// The step of numbers that are not whole, if their schema has none: eight digits behind the point, the most
/// that llguidance computes with.
const FINEST: f64 = 1e-8;
/// Most values of a schema whose references are written out.
const MOST_VALUES: usize = 200_000;
/// Bytes of an `enum` that count as a value.
const BYTES_PER_VALUE: usize = 32;
/// Keywords that the compiler enforces as they are, and whose values hold no schemas.
const PLAIN: [&str; 15] = [
    "const",
    "enum",
    "type",
    "minItems",
    "maxItems",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
/// Keywords whose values are a schema, or a list of schemas.
const SCHEMAS: [&str; 7] =
    ["items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf"];
/// Formats that a grammar knows. Others never fail, as JSON Schema has it.
const FORMATS: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// Keywords that say something of a value, and that no grammar has.
const UNENFORCEABLE: [&str; 14] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];
/// Keywords that a schema applies to the same value, so that they may know properties that it does not.
const IN_PLACE: [&str; 10] = [
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "$dynamicRef",
    "patternProperties",
];

/// A schema for the compiler of grammars; blanks between tokens are bounded.
pub fn compilable(schema: &Value, strictness: SchemaStrictness) -> Result<Value, String> {
    compilable_part(schema, schema, strictness)
}

/// The same for a part of a schema, whose references are those of the whole.
pub fn compilable_part(root: &Value, part: &Value, strictness: SchemaStrictness) -> Result<Value, String> {
    let mut reader = SchemaReader::new(root, part, strictness);
    let mut schema = match reader.schema(part, root)? {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return Err("the schema is `false`, which no value is".into()),
        _ => return Err("a JSON schema is an object".into()),
    };
    let mut definitions = Map::new();
    while let Some((name, target, base)) = reader.waiting.pop() {
        reader.place = vec!["$defs".into(), name.clone()];
        let target = reader.schema(target, base)?;
        definitions.insert(name, target);
    }
    if !definitions.is_empty() {
        schema.insert("$defs".into(), definitions.into());
    }
    let mut options = part["x-guidance"].as_object().cloned().unwrap_or_default();
    let free = |options: &Map<String, Value>| {
        !options.contains_key("whitespace_pattern")
            && options.get("whitespace_flexible") != Some(&false.into())
    };
    if free(&options) {
        options.insert("whitespace_pattern".into(), BLANKS.into());
    }
    schema.insert("x-guidance".into(), options.into());
    Ok(schema.into())
}

/// The target of a reference in a schema.
pub fn referred<'s>(root: &'s Value, reference: &str) -> Option<&'s Value> {
    let mut reader = SchemaReader::new(root, root, SchemaStrictness::Lenient);
    reader.target(reference, root).map(|(target, _)| target)
}

/// A value that a reference may name, with the schema that relative references in it begin at.
type SchemaResource<'s> = (&'s Value, &'s Value);

struct SchemaReader<'s> {
    root: &'s Value,
    /// The part that is read; a reference to it is `#`.
    part: &'s Value,
    strictness: SchemaStrictness,
    /// The parts with an `$id` or an `$anchor`, by that; found at the first use.
    resources: Option<BTreeMap<&'s str, SchemaResource<'s>>>,
    /// Names of what is referred to, by its address.
    names: BTreeMap<*const Value, String>,
    /// Targets of references that are not yet read.
    waiting: Vec<(String, &'s Value, &'s Value)>,
    /// Keys down to what is read.
    place: Vec<String>,
    values: usize,
}

impl<'s> SchemaReader<'s> {
    fn new(root: &'s Value, part: &'s Value, strictness: SchemaStrictness) -> SchemaReader<'s> {
        SchemaReader {
            root,
            part,
            strictness,
            resources: None,
            names: BTreeMap::new(),
            waiting: Vec::new(),
            place: Vec::new(),
            values: 0,
        }
    }

    fn place(&self) -> String {
        let escaped = |key: &String| format!("/{}", key.replace('~', "~0").replace('/', "~1"));
        format!("#{}", self.place.iter().map(escaped).collect::<String>())
    }

    /// The error of a keyword; none where it may be left out.
    fn refuse(&self, keyword: &str, why: &str) -> Result<(), String> {
        match self.strictness {
            SchemaStrictness::Lenient => Ok(()),
            SchemaStrictness::Strict => Err(format!("`{keyword}` at `{}` {why}", self.place())),
        }
    }

    fn at<T>(&mut self, key: &str, read: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        self.place.push(key.to_owned());
        let found = read(self);
        self.place.pop();
        found
    }

    fn schema(&mut self, schema: &'s Value, base: &'s Value) -> Result<Value, String> {
        self.values += 1;
        if self.values > MOST_VALUES {
            return Err(format!(
                "the schema has more than {MOST_VALUES} parts, including those of its references"
            ));
        }
        let Value::Object(fields) = schema else { return Ok(schema.clone()) };
        let own = fields.get("$id").and_then(Value::as_str).is_some_and(|id| !id.starts_with('#'));
        let base = if own { schema } else { base };
        let mut read = Map::new();
        for (key, value) in fields {
            self.keyword(key, value, fields, base, &mut read)?;
        }
        bound_numbers(&mut read);
        // It may take the place of what is said of additional properties.
        if let Some(value) = fields.get("propertyNames") {
            self.names_of_properties(value, fields, base, &mut read)?;
        }
        Ok(read.into())
    }

    fn keyword(
        &mut self,
        key: &str,
        value: &'s Value,
        fields: &'s Map<String, Value>,
        base: &'s Value,
        read: &mut Map<String, Value>,
    ) -> Result<(), String> {
        let mut put = |key: &str, value: Value| drop(read.insert(key.to_owned(), value));
        match key {
            _ if PLAIN.contains(&key) => {
                self.values += value.to_string().len() / BYTES_PER_VALUE;
                put(key, value.clone());
            }
            "format" if value.as_str().is_some_and(|format| !FORMATS.contains(&format)) => {}
            "format" => put(key, value.clone()),
            "pattern" => match value.as_str().map(readable) {
                None => put(key, value.clone()),
                Some(Ok(pattern)) => put(key, pattern.into()),
                Some(Err(why)) => self.refuse(key, &format!("cannot be enforced: {why}"))?,
            },
            "$ref" => put(key, self.reference(value, base)?.into()),
            // Where several of them hold, the text still fits one of them.
            "oneOf" if self.strictness == SchemaStrictness::Lenient && !fields.contains_key("anyOf") => {
                put("anyOf", self.at(key, |reader| reader.schemas(value, base))?);
            }
            _ if SCHEMAS.contains(&key) => put(key, self.at(key, |reader| reader.schemas(value, base))?),
            "properties" => put(key, self.at(key, |reader| reader.properties(value, base))?),
            "patternProperties" => put(key, self.at(key, |reader| reader.by_pattern(value, base))?),
            "uniqueItems" => {
                let few = fields.get("maxItems").and_then(Value::as_u64).is_some_and(|most| most < 2);
                if *value != Value::Bool(false) && !few {
                    self.refuse(key, "cannot be enforced by a grammar")?;
                }
            }
            "unevaluatedProperties" | "unevaluatedItems" if is_alone(fields, key) => {
                let same = if key == "unevaluatedItems" { "items" } else { "additionalProperties" };
                put(same, self.at(key, |reader| reader.schemas(value, base))?);
            }
            _ if UNENFORCEABLE.contains(&key) && !says_nothing(key, value, fields) => {
                self.refuse(key, "cannot be enforced by a grammar")?;
            }
            // Annotations, definitions, names of properties, and what is no keyword.
            _ => {}
        }
        Ok(())
    }

    fn schemas(&mut self, value: &'s Value, base: &'s Value) -> Result<Value, String> {
        let Value::Array(all) = value else { return self.schema(value, base) };
        let read = |(at, schema): (usize, &'s Value)| self.at(&at.to_string(), |r| r.schema(schema, base));
        all.iter().enumerate().map(read).collect()
    }

    fn properties(&mut self, value: &'s Value, base: &'s Value) -> Result<Value, String> {
        let Value::Object(all) = value else { return Ok(value.clone()) };
        let mut read = Map::new();
        for (key, schema) in all {
            read.insert(key.clone(), self.at(key, |reader| reader.schema(schema, base))?);
        }
        Ok(read.into())
    }

    fn by_pattern(&mut self, value: &'s Value, base: &'s Value) -> Result<Value, String> {
        let Value::Object(all) = value else { return Ok(value.clone()) };
        let mut read = Map::new();
        for (pattern, schema) in all {
            match readable(pattern) {
                Ok(known) => {
                    read.insert(known, self.at(pattern, |reader| reader.schema(schema, base))?);
                }
                Err(why) => self.refuse(pattern, &format!("is a pattern that cannot be enforced: {why}"))?,
            }
        }
        Ok(read.into())
    }

    /// Names of properties: those of a list become properties, those of a pattern become properties of that
    /// pattern.
    fn names_of_properties(
        &mut self,
        value: &'s Value,
        fields: &'s Map<String, Value>,
        base: &'s Value,
        read: &mut Map<String, Value>,
    ) -> Result<(), String> {
        let target = match value.get("$ref") {
            Some(reference) => self.referred(reference, base)?.0,
            None => value,
        };
        let says = |(key, value): (&String, &Value)| {
            let all = key == "type" && value == "string" || key == "minLength" && *value == json!(0);
            let known = PLAIN.contains(&key.as_str()) || SCHEMAS.contains(&key.as_str()) || key == "pattern";
            let format = key == "format" && value.as_str().is_some_and(|format| FORMATS.contains(&format));
            (known && !all || format || UNENFORCEABLE.contains(&key.as_str())).then(|| key.clone())
        };
        let kept: Vec<String> = target.as_object().into_iter().flatten().filter_map(says).collect();
        if kept.is_empty() && *target != Value::Bool(false) {
            return Ok(());
        }
        let plain = !["properties", "patternProperties"].iter().any(|key| fields.contains_key(*key));
        let rest = fields.get("additionalProperties").unwrap_or(&Value::Bool(true));
        let rest = self.at("additionalProperties", |reader| reader.schema(rest, base))?;
        let one = match (plain, &kept[..]) {
            (true, [one]) => one.as_str(),
            _ => "",
        };
        let named = match one {
            "enum" => target["enum"].as_array().cloned(),
            "const" => Some(vec![target["const"].clone()]),
            _ => None,
        };
        if let Some(named) = named {
            let named = named.iter().filter_map(Value::as_str);
            let properties: Map<String, Value> = named.map(|name| (name.to_owned(), rest.clone())).collect();
            read.insert("properties".into(), properties.into());
        } else if let Some(Ok(pattern)) =
            target["pattern"].as_str().filter(|_| one == "pattern").map(readable)
        {
            read.insert("patternProperties".into(), json!({pattern: rest}));
        } else {
            return self
                .refuse("propertyNames", "can only be enforced if it is only an `enum` or a `pattern`");
        }
        read.insert("additionalProperties".into(), false.into());
        Ok(())
    }

    /// The reference as the compiler reads it.
    fn reference(&mut self, reference: &'s Value, base: &'s Value) -> Result<String, String> {
        let (target, base) = self.referred(reference, base)?;
        if std::ptr::eq(target, self.part) {
            return Ok("#".into());
        }
        if let Some(name) = self.names.get(&std::ptr::from_ref(target)) {
            return Ok(format!("#/$defs/{name}"));
        }
        let name = format!("ref_{}", self.names.len());
        self.names.insert(target, name.clone());
        self.waiting.push((name.clone(), target, base));
        Ok(format!("#/$defs/{name}"))
    }

    fn referred(&mut self, reference: &Value, base: &'s Value) -> Result<SchemaResource<'s>, String> {
        let Some(text) = reference.as_str() else {
            return Err(format!("`$ref` at `{}` is not a string", self.place()));
        };
        self.target(text, base).ok_or_else(|| {
            let place = self.place();
            format!("`$ref` at `{place}` is `{text:.200}`, and the schema has nothing there")
        })
    }

    fn target(&mut self, reference: &str, base: &'s Value) -> Option<SchemaResource<'s>> {
        let (id, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let (document, base) = if id.is_empty() { (base, base) } else { self.resource(id)? };
        let fragment = percent_decoded(fragment)?;
        match fragment.as_str() {
            "" => Some((document, base)),
            pointer if pointer.starts_with('/') => {
                let inside = |document: &'s Value| document.pointer(pointer).map(|found| (found, document));
                inside(document).or_else(|| inside(self.root))
            }
            _ => self.resource(&format!("#{fragment}")),
        }
    }

    /// The part with an id, or with an anchor, which begins with `#`.
    fn resource(&mut self, id: &str) -> Option<SchemaResource<'s>> {
        let root = self.root;
        let known = self.resources.get_or_insert_with(|| {
            let mut known = BTreeMap::new();
            collect(root, root, &mut known);
            known
        });
        let anchor = id.strip_prefix('#');
        let same = |(key, _): &(&&'s str, &SchemaResource<'s>)| match anchor {
            Some(anchor) => key.strip_prefix('#').unwrap_or(key) == anchor,
            None => key.trim_end_matches('#') == id || key.ends_with(&format!("/{id}")),
        };
        known.iter().find(same).map(|(_, found)| *found)
    }
}

/// Bounds the digits of numbers whose schema does not.
fn bound_numbers(schema: &mut Map<String, Value>) {
    let kinds = match schema.get("type") {
        Some(Value::String(kind)) => vec![kind.as_str()],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => return,
    };
    let (whole, broken) = (kinds.contains(&"integer"), kinds.contains(&"number"));
    if !whole && !broken || schema.contains_key("enum") || schema.contains_key("const") {
        return;
    }
    const LEAST: [&str; 2] = ["minimum", "exclusiveMinimum"];
    const MOST: [&str; 2] = ["maximum", "exclusiveMaximum"];
    let bound = |schema: &Map<String, Value>, names: [&str; 2]| {
        names.into_iter().filter_map(|name| schema.get(name)?.as_f64()).next()
    };
    let (least, most) = (bound(schema, LEAST), bound(schema, MOST));
    let tiny = |bound: Option<f64>| bound.is_some_and(|bound| bound != 0.0 && bound.abs() < 1e3 * FINEST);
    if least.is_none_or(|least| least < FARTHEST as f64) && most.is_none() {
        schema.insert("maximum".into(), FARTHEST.into());
    }
    if most.is_none_or(|most| most > -(FARTHEST as f64)) && least.is_none() {
        schema.insert("minimum".into(), (-FARTHEST).into());
    }
    if broken && !schema.contains_key("multipleOf") && !tiny(least) && !tiny(most) {
        schema.insert("multipleOf".into(), FINEST.into());
    }
}

/// Everything with an `$id` or an `$anchor`.
fn collect<'s>(value: &'s Value, base: &'s Value, into: &mut BTreeMap<&'s str, SchemaResource<'s>>) {
    match value {
        Value::Object(fields) => {
            let text = |key: &str| fields.get(key).and_then(Value::as_str);
            let own = text("$id").is_some_and(|id| !id.starts_with('#'));
            let base = if own { value } else { base };
            for name in ["$id", "$anchor", "$dynamicAnchor"].into_iter().filter_map(text) {
                into.entry(name).or_insert((value, base));
            }
            fields.values().for_each(|value| collect(value, base, into));
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, base, into)),
        _ => {}
    }
}

/// True if a keyword restricts the values, and does not only annotate.
pub fn constrains(key: &str, value: &Value) -> bool {
    let known = [&PLAIN[..], &SCHEMAS, &UNENFORCEABLE].iter().any(|keys| keys.contains(&key));
    let format = key == "format" && value.as_str().is_none_or(|format| FORMATS.contains(&format));
    let more = ["pattern", "$ref", "properties", "patternProperties", "propertyNames", "uniqueItems"];
    known || format || more.contains(&key)
}

/// A pattern that the compiler reads and that matches the same texts.
pub fn readable(pattern: &str) -> Result<String, String> {
    let pattern = patterns::without_look_ahead(pattern).unwrap_or_else(|| pattern.to_owned());
    let lark = llguidance::regex_to_lark(&pattern, "dw");
    match RegexBuilder::new().mk_regex_for_serach(&lark) {
        Ok(_) => Ok(pattern),
        Err(error) => Err(super::reason(error)),
    }
}

/// True if no keyword next to it may know properties or items, so that what is not evaluated is what is
/// additional.
fn is_alone(fields: &Map<String, Value>, key: &str) -> bool {
    let own = if key == "unevaluatedItems" { ["items", "contains"] } else { ["additionalProperties", "not"] };
    let others = IN_PLACE.iter().filter(|other| **other != "patternProperties");
    !others.chain(&own).any(|other| fields.contains_key(*other))
}

/// True if a keyword that is not enforced allows everything here.
fn says_nothing(key: &str, value: &Value, fields: &Map<String, Value>) -> bool {
    let empty = || value.as_object().is_some_and(Map::is_empty);
    match key {
        "not" => *value == Value::Bool(false),
        "if" => !fields.contains_key("then") && !fields.contains_key("else"),
        "then" | "else" => !fields.contains_key("if") || *value == Value::Bool(true) || empty(),
        "minContains" | "maxContains" => !fields.contains_key("contains"),
        "contains" => fields.get("minContains") == Some(&json!(0)) && !fields.contains_key("maxContains"),
        "dependentRequired" | "dependentSchemas" | "dependencies" => empty(),
        "unevaluatedItems" | "unevaluatedProperties" => *value == Value::Bool(true) || empty(),
        _ => false,
    }
}

/// A fragment of a URI as text; `None` if its escapes are no UTF-8.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        let escape = behind.get(..2).filter(|_| first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        match escape.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &behind[2..];
            }
            None => {
                bytes.push(first);
                rest = behind;
            }
        }
    }
    String::from_utf8(bytes).ok()
}
