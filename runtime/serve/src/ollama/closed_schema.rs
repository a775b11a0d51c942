//! Schemas of `format`: Ollama lets objects have only the keys that their schema names, unless it says
//! otherwise. Small models would go on with keys of their own.

use serde_json::{Map, Value};

/// Keywords whose values are no schemas.
const DATA: [&str; 4] = ["const", "default", "enum", "examples"];
/// Keywords beside which other schemas add keys.
const PARTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];
/// Keywords that say which other keys there may be.
const OTHERS: [&str; 3] = ["additionalProperties", "patternProperties", "unevaluatedProperties"];

/// Closes an object schema and those inside it.
pub fn close_objects(schema: &mut Map<String, Value>) {
    let has = |names: &[&str]| names.iter().any(|name| schema.contains_key(*name));
    if schema.get("properties").is_some_and(Value::is_object) && !has(&PARTS) && !has(&OTHERS) {
        schema.insert("additionalProperties".into(), false.into());
    }
    for (name, value) in schema.iter_mut() {
        match (name.as_str(), value) {
            // Each part of these holds for the same object.
            ("allOf", _) => {}
            (name, _) if DATA.contains(&name) => {}
            ("properties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().filter_map(Value::as_object_mut).for_each(close_objects);
            }
            (_, Value::Object(inner)) => close_objects(inner),
            (_, Value::Array(list)) => {
                list.iter_mut().filter_map(Value::as_object_mut).for_each(close_objects);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_are_closed_where_nothing_is_said() {
        let mut schema = json!({
            "type": "object",
            "properties": {
                "properties": {"type": "string", "default": {"properties": {}}},
                "open": {"properties": {"a": {}}, "additionalProperties": true},
                "list": {"items": {"properties": {"b": {}}}},
                "parts": {"allOf": [{"properties": {"c": {}}}], "properties": {"d": {}}},
            },
            "$defs": {"E": {"properties": {"e": {}}}},
        });
        let mut wanted = schema.clone();
        for place in ["", "/properties/list/items", "/$defs/E"] {
            wanted.pointer_mut(place).unwrap()["additionalProperties"] = json!(false);
        }
        close_objects(schema.as_object_mut().unwrap());
        assert_eq!(schema, wanted);
    }
}
