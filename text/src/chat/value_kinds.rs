//! The kind of one argument by the schema of a function: whether it may be a text, and which.

use serde_json::Value as Json;

use crate::grammar::referred;

/// References and alternatives inside of each other that are followed.
const DEEPEST: usize = 16;

/// The possible values of an argument, by its schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    Text,
    /// Or `null`.
    TextOrNull,
    /// JSON; what is none is taken for a text.
    Json,
}

impl ValueKind {
    /// The kind of the argument `name` of a function with these parameters. One that may be a text is one;
    /// one without a type is what it looks like.
    pub fn of_argument(schema: &Json, name: &str) -> ValueKind {
        property(schema, name).map_or(ValueKind::Json, |value| ValueKind::of_value(schema, value))
    }

    /// The kind of a value, whose references are those of `root`.
    pub fn of_value(root: &Json, value: &Json) -> ValueKind {
        match choices(root, value, 0) {
            // Which one is meant, only its look says.
            Some(choices) if !choices.iter().all(|choice| choice.is_string() || choice.is_null()) => {
                ValueKind::Json
            }
            _ => match types(root, value, 0) {
                Some(TypeSet { text: true, null: false, .. }) => ValueKind::Text,
                Some(TypeSet { text: true, null: true, .. }) => ValueKind::TextOrNull,
                _ => ValueKind::Json,
            },
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TypeSet {
    text: bool,
    null: bool,
    other: bool,
}

impl TypeSet {
    fn from_name(name: &str) -> TypeSet {
        TypeSet { text: name == "string", null: name == "null", other: !matches!(name, "string" | "null") }
    }

    fn of_json(value: &Json) -> TypeSet {
        TypeSet {
            text: value.is_string(),
            null: value.is_null(),
            other: !value.is_string() && !value.is_null(),
        }
    }

    fn or(self, other: TypeSet) -> TypeSet {
        TypeSet {
            text: self.text || other.text,
            null: self.null || other.null,
            other: self.other || other.other,
        }
    }

    fn and(self, other: TypeSet) -> TypeSet {
        TypeSet {
            text: self.text && other.text,
            null: self.null && other.null,
            other: self.other && other.other,
        }
    }
}

fn list<'s>(value: &'s Json, name: &str) -> impl Iterator<Item = &'s Json> {
    value[name].as_array().into_iter().flatten()
}

/// The types that a value may have; `None` if its schema has none.
fn types(root: &Json, value: &Json, depth: usize) -> Option<TypeSet> {
    if depth > DEEPEST {
        return None;
    }
    let union = |all: &mut dyn Iterator<Item = TypeSet>| all.reduce(TypeSet::or);
    let named = match &value["type"] {
        Json::String(name) => Some(TypeSet::from_name(name)),
        Json::Array(names) => union(&mut names.iter().filter_map(Json::as_str).map(TypeSet::from_name)),
        _ => None,
    };
    let chosen = union(&mut list(value, "enum").map(TypeSet::of_json));
    let fixed = value.get("const").map(TypeSet::of_json);
    let alternatives = ["anyOf", "oneOf"].map(|name| {
        let all: Vec<Option<TypeSet>> =
            list(value, name).map(|option| types(root, option, depth + 1)).collect();
        // An option without types allows what the others do not.
        all.into_iter().flatten().reduce(TypeSet::or)
    });
    let every = list(value, "allOf").filter_map(|part| types(root, part, depth + 1)).reduce(TypeSet::and);
    let target = value["$ref"].as_str().and_then(|reference| referred(root, reference));
    let target = target.and_then(|target| types(root, target, depth + 1));
    let [any, one] = alternatives;
    let found = [named, chosen, fixed, any, one, every, target].into_iter().flatten().reduce(TypeSet::and)?;
    // The OpenAPI form of values that may be `null`.
    Some(if value["nullable"] == true { TypeSet { null: true, ..found } } else { found })
}

/// The values that a schema lists, if it does.
pub(super) fn choices(root: &Json, value: &Json, depth: usize) -> Option<Vec<Json>> {
    if depth > DEEPEST {
        return None;
    }
    let null = (value["nullable"] == true).then_some(Json::Null);
    let mut found = if let Some(all) = value["enum"].as_array() {
        all.clone()
    } else if let Some(only) = value.get("const") {
        vec![only.clone()]
    } else if value["type"] == "null" {
        vec![Json::Null]
    } else if let Some(reference) = value["$ref"].as_str() {
        choices(root, referred(root, reference)?, depth + 1)?
    } else if let Some(options) = value["anyOf"].as_array().or(value["oneOf"].as_array()) {
        let all: Option<Vec<_>> = options.iter().map(|option| choices(root, option, depth + 1)).collect();
        all?.concat()
    } else {
        list(value, "allOf").find_map(|part| choices(root, part, depth + 1))?
    };
    found.extend(null.filter(|null| !found.contains(null)));
    Some(found)
}

/// The schemas that a text of this schema has to fulfil, all of them.
pub(super) fn of_texts<'s>(root: &'s Json, value: &'s Json, depth: usize) -> Vec<&'s Json> {
    let mut found = vec![value];
    if depth > DEEPEST {
        return found;
    }
    let mut add = |part: &'s Json| found.extend(of_texts(root, part, depth + 1));
    value["$ref"].as_str().and_then(|reference| referred(root, reference)).into_iter().for_each(&mut add);
    list(value, "allOf").for_each(&mut add);
    for name in ["anyOf", "oneOf"] {
        let may_be_text = |option: &&Json| types(root, option, 0).is_none_or(|types| types.text);
        let mut options = list(value, name).filter(may_be_text);
        // One of several: a text that is of another one is allowed as well.
        if let (Some(only), None) = (options.next(), options.next()) {
            add(only);
        }
    }
    found
}

/// The properties that a schema of an object lists, in their order, through references.
pub(super) fn properties<'s>(root: &'s Json, schema: &'s Json, depth: usize) -> Vec<(&'s str, &'s Json)> {
    let mut found: Vec<(&str, &Json)> = Vec::new();
    if depth > DEEPEST {
        return found;
    }
    let own = schema["properties"].as_object().into_iter().flatten();
    found.extend(own.map(|(name, value)| (name.as_str(), value)));
    let target = schema["$ref"].as_str().and_then(|reference| referred(root, reference));
    for part in target.into_iter().chain(list(schema, "allOf")) {
        for (name, value) in properties(root, part, depth + 1) {
            if !found.iter().any(|(known, _)| *known == name) {
                found.push((name, value));
            }
        }
    }
    found
}

/// The names that a schema of an object requires, through references.
pub(super) fn required<'s>(root: &'s Json, schema: &'s Json, depth: usize) -> Vec<&'s str> {
    let mut found: Vec<&str> = list(schema, "required").filter_map(Json::as_str).collect();
    if depth <= DEEPEST {
        let target = schema["$ref"].as_str().and_then(|reference| referred(root, reference));
        for part in target.into_iter().chain(list(schema, "allOf")) {
            found.extend(required(root, part, depth + 1));
        }
    }
    found
}

/// The schema of a property, in whatever part of an object's schema it is.
fn property<'s>(root: &'s Json, name: &str) -> Option<&'s Json> {
    fn find<'s>(root: &'s Json, schema: &'s Json, name: &str, depth: usize) -> Option<&'s Json> {
        if depth > DEEPEST {
            return None;
        }
        let own = schema.get("properties").and_then(|all| all.get(name));
        let target = schema["$ref"].as_str().and_then(|reference| referred(root, reference));
        let parts = ["allOf", "anyOf", "oneOf"].into_iter().flat_map(|key| list(schema, key));
        own.or_else(|| target.into_iter().chain(parts).find_map(|part| find(root, part, name, depth + 1)))
    }
    let additional = root.get("additionalProperties").filter(|schema| schema.is_object());
    find(root, root, name, 0).or(additional)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_may_be_a_text_is_one() {
        let root = |value: Json| {
            json!({"properties": {"x": value}, "$defs": {
                "text": {"type": "string"}, "choice": {"enum": ["a", "b"]}, "number": {"type": "integer"},
                "a/b c": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "self": {"$ref": "#/$defs/self"}}})
        };
        let nothing = json!({"type": "null"});
        let text = json!({"type": "string"});
        let cases = [
            (json!({"type": "string"}), ValueKind::Text),
            (json!({"type": ["null", "string"]}), ValueKind::TextOrNull),
            (json!({"type": "string", "nullable": true}), ValueKind::TextOrNull),
            (json!({"anyOf": [text, nothing]}), ValueKind::TextOrNull),
            (json!({"oneOf": [{"$ref": "#/$defs/text"}, nothing], "default": null}), ValueKind::TextOrNull),
            (json!({"anyOf": [text, {"type": "integer"}]}), ValueKind::Text),
            (json!({"anyOf": [{"type": "integer"}, nothing]}), ValueKind::Json),
            (json!({"allOf": [{"$ref": "#/$defs/text"}], "description": "d"}), ValueKind::Text),
            (json!({"allOf": [{"$ref": "#/$defs/number"}]}), ValueKind::Json),
            (json!({"$ref": "#/$defs/choice"}), ValueKind::Text),
            (json!({"$ref": "#/$defs/a~1b%20c"}), ValueKind::TextOrNull),
            (json!({"$ref": "#/$defs/self"}), ValueKind::Json),
            (json!({"$ref": "#/$defs/missing"}), ValueKind::Json),
            (json!({"const": "a"}), ValueKind::Text),
            (json!({"enum": ["a", null]}), ValueKind::TextOrNull),
            (json!({"enum": ["a", 1]}), ValueKind::Json),
            (json!({"type": "string", "enum": ["1"]}), ValueKind::Text),
            (json!({"type": "object"}), ValueKind::Json),
            (json!({}), ValueKind::Json),
            (json!(true), ValueKind::Json),
        ];
        for (value, kind) in cases {
            assert_eq!(ValueKind::of_argument(&root(value.clone()), "x"), kind, "{value}");
        }
        let whole =
            json!({"$ref": "#/$defs/args", "$defs": {"args": {"properties": {"x": {"type": "string"}}}}});
        assert_eq!(ValueKind::of_argument(&whole, "x"), ValueKind::Text);
        let others = json!({"type": "object", "additionalProperties": {"type": "string"}});
        assert_eq!(ValueKind::of_argument(&others, "any"), ValueKind::Text);
    }
}
