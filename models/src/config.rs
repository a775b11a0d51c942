//! Fields of `config.json`, read one by one; [`ModelConfig`](crate::ModelConfig) is what a family makes of them.
//!
//! Sizes have to be in the file or in the shapes of the tensors; everything else may be absent, and then has the default of the
//! class in transformers. A field of a wrong type or out of range is an error that names file and field.

pub mod fields;
pub mod published;
pub mod sizes;

pub use fields::ConfigFields;

/// The fields of a JSON object.
pub(crate) fn into_object(value: serde_json::Value) -> serde_json::Map<String, serde_json::Value> {
    match value {
        serde_json::Value::Object(fields) => fields,
        _ => serde_json::Map::new(),
    }
}
