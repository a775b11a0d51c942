//! What becomes of the fields of the configuration classes of transformers: which are read, which are refused unless they have the
//! value that is built, and which say nothing of what a model computes. The table is `published_fields.txt`.

use super::fields::ConfigFields;
use crate::error::ConfigError;
use serde_json::Value;

/// Lines of a model type (`*` for all), `read`, `only` or `none`, and fields; of `only` with their value.
pub const TABLE: &str = include_str!("published_fields.txt");

/// Refuses a field that would change the numbers, is not read, and has another value than the one that is built.
pub(crate) fn refuse_others(model_type: &str, fields: &ConfigFields) -> Result<(), ConfigError> {
    for (field, value) in only(model_type) {
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

/// The fields of a model type that have to have one value, and that value as JSON.
fn only(model_type: &str) -> impl Iterator<Item = (&'static str, &'static str)> + '_ {
    let lines = TABLE.lines().map(|line| line.split_whitespace());
    let own = lines.filter_map(move |mut words| match (words.next(), words.next()) {
        (Some(name), Some("only")) if name == model_type => Some(words),
        _ => None,
    });
    own.flatten().filter_map(|rule| rule.split_once('='))
}
