//! The fields of a request's body, each taken once; what is left over is unknown.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::known_fields::{self, KnownField};

/// Longest value that an error repeats.
const SHOWN: usize = 60;

pub struct RequestFields(Map<String, Value>);

impl From<Map<String, Value>> for RequestFields {
    fn from(map: Map<String, Value>) -> RequestFields {
        RequestFields(map)
    }
}

impl RequestFields {
    pub fn parse(body: &[u8]) -> Result<RequestFields, ApiError> {
        let wrong = |what: String| ApiError::request("invalid_json", what);
        match crate::unique_keys::parse(body) {
            Ok(Value::Object(map)) => Ok(RequestFields(map)),
            Ok(other) => Err(wrong(format!("the body is {}, expected a JSON object", excerpt(&other)))),
            Err(error) => Err(wrong(format!("the body is not a JSON object: {error}"))),
        }
    }

    /// True if a field is there that is not `null`.
    pub fn has_value(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// A field; `null` counts as none. `expected` is the text of an error.
    pub fn take_field<T: DeserializeOwned>(
        &mut self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let text = excerpt(&value);
                let parsed = serde_json::from_value(value).map(Some);
                parsed.map_err(|_| {
                    ApiError::field(name, "invalid_type", format!("`{name}` is {text}, expected {expected}"))
                })
            }
        }
    }

    /// A field that has to be there.
    pub fn take_required<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<T, ApiError> {
        self.take_field(name, expected)?.ok_or_else(|| {
            ApiError::field(name, "missing_field", format!("`{name}` is missing, expected {expected}"))
        })
    }

    /// Takes a field away whose value asks for nothing in this request.
    pub fn drop_neutral(&mut self, name: &str, neutral: impl FnOnce(&Value) -> bool) {
        if self.0.get(name).is_some_and(neutral) {
            self.0.remove(name);
        }
    }

    /// Takes the fields of a table away, which have to ask for nothing.
    pub fn drop_known(&mut self, known: &[KnownField]) -> Result<(), ApiError> {
        for field in known {
            if let Some(value) = self.0.remove(field.name) {
                known_fields::check(field.name, &value, &[known])?;
            }
        }
        Ok(())
    }

    /// Adds a field, if there is none of its name.
    pub fn add_if_missing(&mut self, name: &str, value: Value) {
        if !self.has_value(name) {
            self.0.insert(name.to_owned(), value);
        }
    }

    /// Checks that the remaining fields ask for nothing. `known` are fields of which that can be said.
    pub fn finish(self, known: &[&[KnownField]]) -> Result<(), ApiError> {
        self.0.iter().try_for_each(|(name, value)| known_fields::check(name, value, known))
    }
}

/// The begin of a value's text. A long value is not written as a whole.
pub fn excerpt(value: &Value) -> String {
    let mut head = BoundedWriter(Vec::new());
    // It ends with an error where there is no more room.
    let _ = serde_json::to_writer(&mut head, value);
    let text = String::from_utf8_lossy(&head.0);
    match text.char_indices().nth(SHOWN) {
        None => text.into_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// A writer that takes no more than an error repeats.
struct BoundedWriter(Vec<u8>);

impl std::io::Write for BoundedWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let room = (4 * SHOWN + 4).saturating_sub(self.0.len());
        self.0.extend_from_slice(&bytes[..bytes.len().min(room)]);
        // Taking nothing of something is an error to the writer.
        Ok(bytes.len().min(room))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One value or a list of them.
#[derive(serde::Deserialize)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub fn into_vec(self) -> Vec<T> {
        match self {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_fields_are_named() {
        let fields = |text: &str| RequestFields::parse(text.as_bytes());
        let code = |error: ApiError| (error.param.unwrap_or_default(), error.code.unwrap_or_default());
        assert_eq!(code(fields("{\"a\": 1").err().unwrap()), (String::new(), "invalid_json"));
        assert_eq!(code(fields("[1]").err().unwrap()), (String::new(), "invalid_json"));
        assert_eq!(code(fields("\u{fffd}").err().unwrap()), (String::new(), "invalid_json"));
        let twice = fields(r#"{"a": 1, "a": 2}"#).err().unwrap();
        assert!(twice.message.contains("the key \"a\" occurs twice"), "{}", twice.message);
        assert_eq!(code(twice), (String::new(), "invalid_json"));
        let mut some = fields(r#"{"t": "hot", "n": null, "x": 1, "user": "u"}"#).unwrap();
        let error = some.take_field::<f32>("t", "a number").unwrap_err();
        assert_eq!(error.message, "`t` is \"hot\", expected a number");
        assert_eq!(code(error), ("t".into(), "invalid_type"));
        assert_eq!(some.take_field::<u32>("n", "a number").unwrap(), None);
        assert_eq!(
            code(some.take_required::<u32>("n", "a number").unwrap_err()),
            ("n".into(), "missing_field")
        );
        assert_eq!(code(some.finish(&[known_fields::TEXTS]).unwrap_err()), ("x".into(), "unknown_field"));
        let old = fields(r#"{"functions": [{}]}"#).unwrap();
        let error = old.finish(&[known_fields::TEXTS, known_fields::CHATS]).unwrap_err();
        assert_eq!(code(error), ("functions".into(), "unsupported"));
        let long = fields(&format!("\"{}\"", "é".repeat(200))).err().unwrap();
        assert!(long.message.len() < 250, "{}", long.message);
    }
}
