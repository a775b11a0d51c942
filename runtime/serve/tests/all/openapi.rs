//! `/openapi.json` says what the server does.

use serde_json::{Value, json};

use crate::server::{TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

/// Something of a type.
fn example(name: &str, kind: &str) -> Value {
    match (name, kind) {
        ("messages", _) => json!([{"role": "user", "content": "Hi"}]),
        ("tokens", _) => json!([98]),
        (_, "string") => json!("toy"),
        (_, "integer" | "number") => json!(1),
        (_, "boolean") => json!(false),
        (_, "array") => json!([]),
        (_, "object") => json!({}),
        other => panic!("{other:?}"),
    }
}

/// Every field that is described is known, and of the types that are described; what has to be there is
/// missed.
#[test]
fn the_description_is_true() {
    let server = TestServer::start(&ToyModel::new(false, Some(200)), 4, Some(TEMPLATE), options());
    let description = server.get("/openapi.json").json();
    let paths = description["paths"].as_object().unwrap();
    assert!(paths.len() >= 28, "{}", paths.len());
    let mut fields = 0;
    for (path, operations) in paths {
        let (method, operation) = operations.as_object().unwrap().iter().next().unwrap();
        if method == "get" {
            // None is kept.
            let known = if path.contains("{id}") { 404 } else { 200 };
            assert_eq!(server.get(&path.replace("{model}", "toy")).status, known, "{path}");
            assert_eq!(server.post(path, &json!({})).status, 405, "{path}");
            assert_eq!(operations.get("delete").is_some(), path.contains("{id}"), "{path}");
            continue;
        }
        assert_eq!(server.get(path).status, 405, "{path}");
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        let properties = schema["properties"].as_object().unwrap();
        let required: Vec<&str> =
            schema["required"].as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect();
        let kind = |name: &str| properties[name]["type"][0].as_str().unwrap();
        let mut base = json!({"max_tokens": 2});
        base.as_object_mut().unwrap().retain(|name, _| properties.contains_key(name));
        required.iter().for_each(|name| base[*name] = example(name, kind(name)));
        // Routes that change models get requests that change none.
        let changes = path.contains("/models/");
        // Anything at all is answered; a field that is not known would be named.
        for (name, property) in properties {
            fields += 1;
            for kind in property["type"].as_array().into_iter().flatten() {
                let mut body = base.clone();
                body[name] = if kind == "null" { Value::Null } else { example(name, kind.as_str().unwrap()) };
                if changes && body["model"].is_string() {
                    body["model"] = json!("none");
                }
                let answer = server.post(path, &body);
                // This server does not let clients load adapters.
                let fixed = path.ends_with("_lora_adapter");
                let refused = if changes {
                    404
                } else if fixed {
                    403
                } else {
                    400
                };
                assert!([200, 400, refused].contains(&answer.status), "{path} {body}: {}", answer.body);
                let message = answer.body.clone();
                let wrong = message.contains("no field")
                    || kind != "null"
                        && message.contains(&format!("`{name}` is "))
                        && message.contains("invalid_type");
                assert!(!wrong, "{path} {body}: {message}");
            }
        }
        for name in required {
            let mut body = base.clone();
            body.as_object_mut().unwrap().remove(name);
            let missed = server.post(path, &body);
            assert!(missed.status == 400 && missed.body.contains(name), "{path} {body}: {}", missed.body);
        }
    }
    assert!(fields > 150, "{fields}");
}
