//! What becomes of the fields of the configuration classes of transformers: which are read, which are refused unless they have the
//! value that is built, and which say nothing of what a model computes. The table is `published_fields.txt`.

use super::fields::ConfigFields;
use super::sizes::{CONTEXT, HEAD_SIZE, HEADS, KV_HEADS, VOCAB};
use crate::error::ConfigError;
use serde_json::Value;

/// Lines of a model type (`*` for all), `read`, `only` or `none`, and fields; of `only`, and some of `read`, with their value.
pub const TABLE: &str = include_str!("published_fields.txt");

/// The field that says that others come from a GGUF file, which leaves out other ones: it has the name of the architecture there.
pub(crate) const GGUF: &str = "gguf.architecture";
/// The way of pooling, as GGUF files say it, by its name.
pub(crate) const GGUF_POOLING: &str = "gguf.pooling";
/// The widths of dense layers after it.
pub(crate) const GGUF_DENSE: &str = "gguf.dense";

/// Names of one thing: a file that has one of them leaves none out.
const NAMES: [&[&str]; 7] = [
    &CONTEXT,
    &HEADS,
    &HEAD_SIZE,
    &KV_HEADS,
    &VOCAB,
    &["n_inner", "intermediate_size"],
    &["rope_parameters", "rope_scaling"],
];

/// The fields of a config.json with those that it leaves out and that its class has another default for than the code that families
/// share. What is null stays so, unless it is an object, which classes make of a null too.
pub(crate) fn with_defaults(model_type: &str, fields: &ConfigFields) -> ConfigFields {
    let mut complete = fields.clone();
    if fields.get(GGUF).is_some() {
        return complete;
    }
    for (field, value) in listed_fields(model_type, "read") {
        let Ok(value) = serde_json::from_str::<Value>(value) else { continue };
        let is_said = fields.raw.contains_key(field) && !(value.is_object() && fields.raw[field].is_null());
        let mut names = NAMES.iter().filter(|names| names.contains(&field)).copied().flatten();
        if !is_said && !names.any(|name| fields.get(name).is_some()) {
            complete.raw.insert(field.to_string(), value);
        }
    }
    complete
}

/// Refuses a field that would change the numbers, is not read, and has another value than the one that is built.
pub(crate) fn reject_unbuilt_values(model_type: &str, fields: &ConfigFields) -> Result<(), ConfigError> {
    for (field, value) in listed_fields(model_type, "only") {
        let (Some(found), Ok(built)) = (fields.get(field), serde_json::from_str::<Value>(value)) else {
            continue;
        };
        let equal = *found == built || found.as_f64().is_some_and(|number| built.as_f64() == Some(number));
        if !equal {
            return Err(ConfigError::NotSupportedYet {
                file: fields.origin.clone(),
                what: format!("a model with `{field}` = {found}"),
                supported: format!("`{field}` = {value}"),
            });
        }
    }
    Ok(())
}

/// The fields of a model type that have a value in rows of this kind, and that value as JSON.
fn listed_fields<'a>(
    model_type: &'a str,
    kind: &'a str,
) -> impl Iterator<Item = (&'static str, &'static str)> + 'a {
    let lines = TABLE.lines().map(|line| line.split_whitespace());
    let own = lines.filter_map(move |mut words| {
        let is_own = words.next() == Some(model_type) && words.next() == Some(kind);
        is_own.then_some(words)
    });
    own.flatten().filter_map(|rule| rule.split_once('='))
}
