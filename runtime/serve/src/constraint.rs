//! Constraints on the text of an answer: the fields of the OpenAI API, of vLLM and of llama.cpp's server for
//! it.

use std::collections::BTreeMap;

use mlcc_text::GrammarSpec;
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::served_model::ServedModel;

/// A grammar, and the field that it comes from.
#[derive(Debug, PartialEq)]
pub struct OutputConstraint {
    pub spec: GrammarSpec,
    pub param: &'static str,
}

impl OutputConstraint {
    /// Takes the fields; `None` if the text is free.
    pub fn take(fields: &mut RequestFields) -> Result<Option<OutputConstraint>, ApiError> {
        let mut found = Vec::new();
        let mut add = |param: &'static str, spec: Option<GrammarSpec>| {
            found.extend(spec.map(|spec| OutputConstraint { spec, param }));
        };
        add("response_format", response_format(fields)?);
        add("structured_outputs", structured_outputs(fields)?);
        add(
            "guided_json",
            fields.take_field("guided_json", SCHEMA)?.map(|v| schema("guided_json", v)).transpose()?,
        );
        add(
            "json_schema",
            fields.take_field("json_schema", SCHEMA)?.map(|v| schema("json_schema", v)).transpose()?,
        );
        add("guided_regex", fields.take_field("guided_regex", "a string")?.map(GrammarSpec::Regex));
        add(
            "guided_choice",
            fields.take_field("guided_choice", "a list of strings")?.map(GrammarSpec::Choice),
        );
        add("guided_grammar", fields.take_field("guided_grammar", "a string")?.map(GrammarSpec::Lark));
        if fields.take_field::<Value>("grammar", "a string")?.is_some_and(|grammar| grammar != "") {
            let message = "`grammar` is GBNF in other servers, which this server does not support: send \
                `guided_grammar` with a grammar in Lark's syntax";
            return Err(ApiError::field("grammar", "unsupported", message));
        }
        let second = found.get(1).map(|second| second.param);
        match (found.pop(), second) {
            (Some(last), Some(second)) => {
                let message =
                    format!("`{}` and `{second}` ask for two grammars, a text has one", found[0].param);
                Err(ApiError::field(last.param, "invalid_value", message))
            }
            (found, _) => Ok(found),
        }
    }

    pub fn compile(&self, hosted: &ServedModel) -> Result<mlcc_text::Grammar, ApiError> {
        hosted.compile_grammar(&self.spec).map_err(|error| ApiError::grammar(self.param, &error))
    }
}

const SCHEMA: &str = "a JSON schema";

/// A schema may come as the text of one.
fn schema(param: &'static str, value: Value) -> Result<GrammarSpec, ApiError> {
    let Value::String(text) = value else { return Ok(GrammarSpec::JsonSchema(value)) };
    let wrong = |error| ApiError::field(param, "invalid_value", format!("`{param}` is not JSON: {error}"));
    serde_json::from_str(&text).map(GrammarSpec::JsonSchema).map_err(wrong)
}

fn response_format(fields: &mut RequestFields) -> Result<Option<GrammarSpec>, ApiError> {
    const NAME: &str = "response_format";
    let format: Option<BTreeMap<String, Value>> = fields.take_field(NAME, "an object")?;
    let Some(mut format) = format else { return Ok(None) };
    let wrong = |message: &str| Err(ApiError::field(NAME, "invalid_value", message));
    let kind = format.remove("type").unwrap_or(Value::Null);
    let given = match kind.as_str() {
        Some("text") => return Ok(None),
        // The form of llama.cpp's server.
        Some("json_object") => format.remove("schema"),
        Some("json_schema") => match format.remove("json_schema") {
            Some(Value::Object(mut inner)) => match inner.remove("schema") {
                Some(Value::Null) | None => return wrong("`response_format.json_schema.schema` is missing"),
                schema => schema,
            },
            _ => return wrong("`response_format.json_schema` is missing or no object"),
        },
        _ => return wrong("`response_format.type` is none of `text`, `json_object`, `json_schema`"),
    };
    match given {
        None | Some(Value::Null) => Ok(Some(GrammarSpec::JsonObject)),
        Some(value) => schema(NAME, value).map(Some),
    }
}

fn structured_outputs(fields: &mut RequestFields) -> Result<Option<GrammarSpec>, ApiError> {
    const NAME: &str = "structured_outputs";
    let wanted: Option<BTreeMap<String, Value>> = fields.take_field(NAME, "an object")?;
    let wrong = |message: String| ApiError::field(NAME, "invalid_value", message);
    let mut found = None;
    for (name, value) in wanted.unwrap_or_default() {
        let text = || {
            value.as_str().map(str::to_owned).ok_or_else(|| wrong(format!("`{NAME}.{name}` is not a string")))
        };
        let spec = match name.as_str() {
            _ if value.is_null() => continue,
            "json" => schema(NAME, value)?,
            "json_object" if value == true => GrammarSpec::JsonObject,
            "json_object" => continue,
            "regex" => GrammarSpec::Regex(text()?),
            "grammar" => GrammarSpec::Lark(text()?),
            "choice" => match serde_json::from_value(value) {
                Ok(texts) => GrammarSpec::Choice(texts),
                Err(_) => return Err(wrong(format!("`{NAME}.choice` is not a list of strings"))),
            },
            other => {
                return Err(ApiError::field(
                    NAME,
                    "unsupported",
                    format!("`{NAME}.{other}` is not supported"),
                ));
            }
        };
        if found.replace(spec).is_some() {
            return Err(wrong(format!("`{NAME}` asks for more than one grammar, a text has one")));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn take(body: Value) -> Result<Option<GrammarSpec>, (String, &'static str)> {
        let mut fields = RequestFields::parse(body.to_string().as_bytes()).unwrap();
        let taken = OutputConstraint::take(&mut fields).map_err(|e| (e.param.unwrap(), e.code.unwrap()))?;
        fields.finish(&[]).unwrap();
        Ok(taken.map(|constraint| constraint.spec))
    }

    #[test]
    fn all_spellings() {
        let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
        let wanted = Ok(Some(GrammarSpec::JsonSchema(schema.clone())));
        let formats = [
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}}),
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"structured_outputs": {"json": schema, "regex": null, "json_object": false}}),
            json!({"structured_outputs": {"json": schema.to_string()}}),
            json!({"guided_json": schema}),
            json!({"guided_json": schema.to_string()}),
            json!({"json_schema": schema}),
        ];
        for body in formats {
            assert_eq!(take(body.clone()), wanted, "{body}");
        }
        assert_eq!(take(json!({"response_format": {"type": "text"}})), Ok(None));
        assert_eq!(
            take(json!({"response_format": {"type": "json_object"}})),
            Ok(Some(GrammarSpec::JsonObject))
        );
        assert_eq!(
            take(json!({"structured_outputs": {"json_object": true}})),
            Ok(Some(GrammarSpec::JsonObject))
        );
        for name in ["regex", "grammar", "choice"] {
            let value = if name == "choice" { json!(["a", "b"]) } else { json!("a") };
            let guided = take(json!({format!("guided_{name}"): value})).unwrap();
            assert_eq!(guided, take(json!({"structured_outputs": {name: value}})).unwrap());
            assert!(guided.is_some());
        }
        // The order of keys is the order in which they are written.
        let Ok(Some(GrammarSpec::JsonSchema(found))) = take(json!({"guided_json": schema})) else { panic!() };
        assert_eq!(found["properties"].as_object().unwrap().keys().collect::<Vec<_>>(), ["b", "a"]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            (json!({"response_format": {"type": "yaml"}}), "response_format", "invalid_value"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format", "invalid_value"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
                "response_format",
                "invalid_value",
            ),
            (json!({"response_format": "json"}), "response_format", "invalid_type"),
            (json!({"guided_json": "{"}), "guided_json", "invalid_value"),
            (json!({"guided_choice": [1]}), "guided_choice", "invalid_type"),
            (json!({"guided_regex": 1}), "guided_regex", "invalid_type"),
            (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice", "invalid_value"),
            (
                json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}),
                "structured_outputs",
                "invalid_value",
            ),
            (json!({"structured_outputs": {"choice": 5}}), "structured_outputs", "invalid_value"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs", "unsupported"),
            (json!({"grammar": "root ::= \"a\""}), "grammar", "unsupported"),
        ];
        for (body, param, code) in cases {
            assert_eq!(take(body.clone()).unwrap_err(), (param.to_owned(), code), "{body}");
        }
    }
}
