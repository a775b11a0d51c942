//! Several models in one server, which come and go while texts run.

use std::io::{BufRead, Read};
use std::sync::Mutex;

use mlcc_serve::{LoadError, ModelLibrary, ReadyModel, ShutdownOutcome};
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, named, options, served, until};
use crate::toy::{CHUNK, ToyModel};

/// Artifacts that are the toy, and one that is broken from the second time on.
struct ToyShelf {
    loads: Mutex<usize>,
}

impl ModelLibrary for ToyShelf {
    fn names(&self) -> Vec<String> {
        ["a", "c", "broken"].map(String::from).to_vec()
    }

    fn load(&self, name: &str, _: u64) -> Result<ReadyModel, LoadError> {
        *self.loads.lock().unwrap() += 1;
        match name {
            // Its context tells which one it is.
            "a" => Ok(ReadyModel::from_runner(ToyModel::new(false, Some(77)), served(None), 2)),
            "c" => Ok(ReadyModel::from_runner(ToyModel::new(false, Some(99)), served(None), 2)),
            "broken" => {
                Err(LoadError::Refused("/srv/secret/broken.so ends in the middle of its code".into()))
            }
            other => Err(LoadError::Unknown(other.into())),
        }
    }
}

fn server() -> TestServer {
    let models = vec![
        named("a", &ToyModel::new(false, None), 2, None),
        named("b", &ToyModel::new(false, Some(30 * CHUNK)), 2, None),
    ];
    TestServer::with(models, Box::new(ToyShelf { loads: Mutex::new(0) }), options())
}

fn completion(model: &str) -> Value {
    json!({"model": model, "prompt": "a", "max_tokens": 4, "seed": 3, "ignore_eos": true})
}

fn context(server: &TestServer, model: &str) -> Value {
    server.get(&format!("/props?model={model}")).json()["context"].clone()
}

fn statuses(server: &TestServer) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let list = server.get("/v1/models").json();
    list["data"].as_array().unwrap().iter().map(|m| (text(&m["id"]), text(&m["status"]["value"]))).collect()
}

#[test]
fn the_model_is_chosen_by_its_name() {
    let server = server();
    let of =
        |names: [(&str, &str); 4]| names.map(|(name, status)| (name.to_owned(), status.to_owned())).to_vec();
    let listed = of([("a", "loaded"), ("b", "loaded"), ("c", "unloaded"), ("broken", "unloaded")]);
    assert_eq!(statuses(&server), listed);
    assert_eq!((context(&server, "a"), context(&server, "b")), (Value::Null, json!(30 * CHUNK)));
    for name in ["a", "b"] {
        assert_eq!(server.ask("/v1/completions", &completion(name))["model"], name);
        assert_eq!(server.get(&format!("/v1/models/{name}")).json()["id"], name);
    }
    // The first one, where none is named.
    assert_eq!(server.ask("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}))["model"], "a");
    for (name, code) in [("d", "model_not_found"), ("c", "model_not_loaded")] {
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/models/unload"] {
            let refused = server.post(path, &json!({"model": name}));
            assert_eq!(refused.error(), (404, code.into(), "model".into()), "{path}");
        }
        assert_eq!(server.get(&format!("/props?model={name}")).status, 404);
    }
    let metrics = server.get("/metrics").body;
    for line in [
        "mlcc_generated_tokens_total{model=\"a\"} 5\n",
        "mlcc_generated_tokens_total{model=\"b\"} 4\n",
        "mlcc_time_to_first_token_seconds_count{model=\"a\"} 2\n",
        "vllm:num_requests_waiting{model_name=\"a\"} 0\n",
        "vllm:num_requests_running{model_name=\"b\"} 0\n",
        "vllm:kv_cache_usage_perc{model_name=\"b\"} 0.0\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    assert_eq!(metrics.matches("# EOF\n").count(), 1, "{metrics}");
}

#[test]
fn models_come_and_go_without_losing_a_text() {
    let mut server = server();
    // More than can be over before the model is replaced.
    let long = json!({"model": "a", "prompt": "a", "max_tokens": 3000, "seed": 3, "ignore_eos": true, "stream": true});
    let mut text = server.open("POST", "/v1/completions", "", &long.to_string());
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(text.read_line(&mut line).unwrap() > 0);
    }
    let old = server.ask("/v1/completions", &completion("a"))["choices"].clone();
    assert_eq!(server.ask("/models/load", &json!({"model": "a"}))["status"]["value"], "loaded");
    assert_eq!(context(&server, "a"), 77);
    // The same toy, the same text.
    assert_eq!(server.ask("/v1/completions", &completion("a"))["choices"], old);
    let mut rest = String::new();
    text.read_to_string(&mut rest).unwrap();
    let pieces = rest.matches("\"index\":0").count();
    assert!(pieces > 2900 && rest.contains("\"finish_reason\":\"length\""), "{pieces}: {rest:.300}");
    assert!(rest.trim_end().ends_with("[DONE]\r\n\r\n0") || rest.contains("[DONE]"));
    // An alias for another artifact; what it was cannot be asked any more.
    server.ask("/models/load", &json!({"model": "b", "artifact": "c"}));
    assert_eq!(context(&server, "b"), 99);
    server.ask("/v1/models/load", &json!({"model": "c"}));
    server.ask("/models/unload", &json!({"model": "a"}));
    assert_eq!(server.post("/v1/completions", &completion("a")).error().1, "model_not_loaded");
    assert_eq!(server.ask("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}))["model"], "b");
    // Sums count unloaded models. These have no gauges.
    until(|| !server.get("/metrics").body.contains("mlcc_texts_running{model=\"a\"}"));
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("mlcc_generated_tokens_total{model=\"a\"} 3008\n"), "{metrics}");
    server.ask("/models/unload", &json!({"model": "b"}));
    server.ask("/models/unload", &json!({"model": "c"}));
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a"})).error().1, "model_not_loaded");
    assert_eq!(server.get("/health").status, 200);
    server.ask("/models/load", &json!({"model": "c"}));
    server.ask("/v1/completions", &completion("c"));
    assert_eq!(server.stop(), ShutdownOutcome::Drained);
}

#[test]
fn a_broken_artifact_changes_nothing() {
    let server = server();
    let refused = server.post("/models/load", &json!({"model": "a", "artifact": "broken"}));
    assert_eq!(refused.error(), (422, "invalid_artifact".into(), "model".into()));
    assert!(
        refused.body.contains("not loaded: broken.so ends in the middle of its code"),
        "{}",
        refused.body
    );
    assert_eq!(context(&server, "a"), Value::Null);
    server.ask("/v1/completions", &completion("a"));
    let unknown = server.post("/models/load", &json!({"model": "../../etc/passwd"}));
    assert_eq!(unknown.error(), (404, "model_not_found".into(), "model".into()));
    // A page of another site that a browser shows.
    let body = r#"{"model": "a"}"#;
    let foreign = server.open("POST", "/models/unload", "Sec-Fetch-Site: cross-site\r\n", body);
    assert_eq!(TestResponse::read(foreign).error().1, "other_site");
    for body in [json!({}), json!({"model": 1}), json!({"model": "a", "path": "/x.so"}), json!({"model": ""})]
    {
        let status = server.post("/models/load", &body).status;
        assert!([400, 404].contains(&status), "{body}: {status}");
    }
    assert_eq!(statuses(&server).len(), 4);
}

#[test]
fn clients_give_names_of_bounded_length_and_number() {
    let server = server();
    let load = |name: &str| server.post("/models/load", &json!({"model": name, "artifact": "a"}));
    for name in [&"x".repeat(257), "a\nb", ""] {
        assert_eq!(load(name).error(), (400, "invalid_value".into(), "model".into()));
    }
    let mut names: Vec<String> = (0..62).map(|number| format!("{number}-{}", "n".repeat(200))).collect();
    for name in &names {
        assert_eq!(load(name).status, 200);
    }
    assert_eq!(load("one more").error(), (409, "too_many_models".into(), "model".into()));
    // In the place of another there is room.
    assert_eq!(load(&names[0]).status, 200);
    let gone = names.pop().unwrap();
    server.ask("/models/unload", &json!({"model": gone}));
    until(|| load("one more").status == 200);
}
