//! Adapters, which clients call as models of their own.

use mlcc_engine::serving::TextAdapter;
use mlcc_serve::{Library, LoadError, NoLibrary, Ready, Served};
use serde_json::{Value, json};

use crate::server::{Server, named, options, served, until};
use crate::toy::Toy;

/// The toy with two adapters.
fn base() -> Ready {
    let adapters = vec![TextAdapter::new("style", 11_u64), TextAdapter::new("task", 22_u64)];
    let served = Served { adapters, ..served(Some("{% for m in messages %}{{ m.content }}{% endfor %}")) };
    Ready::step(Toy::new(false, Some(4000)), served, 2)
}

fn server() -> Server {
    Server::with(vec![("base".to_owned(), base())], Box::new(NoLibrary), options())
}

fn ask(server: &Server, model: &str) -> Value {
    let prompt = "ab".repeat(40);
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 8, "seed": 3, "ignore_eos": true});
    server.ask("/v1/completions", &body)
}

#[test]
fn an_adapter_is_a_model_by_its_name() {
    let server = server();
    let texts = ["base", "style", "task"].map(|model| {
        let answer = ask(&server, model);
        assert_eq!(answer["model"], model);
        // Nothing of another one is known.
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{model}");
        let again = ask(&server, model);
        assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 30, "{again}");
        assert_eq!(again["choices"], answer["choices"]);
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    });
    assert!(texts[0] != texts[1] && texts[0] != texts[2] && texts[1] != texts[2], "{texts:?}");
    let chat = json!({"model": "task", "messages": [{"role": "user", "content": "ab".repeat(40)}], "max_tokens": 8, "seed": 3, "ignore_eos": true});
    let answer = server.ask("/v1/chat/completions", &chat);
    assert_eq!(
        (&answer["model"], answer["choices"][0]["message"]["content"].as_str()),
        (&json!("task"), Some(&*texts[2]))
    );
    // Without a name it is the model itself.
    let bare = json!({"prompt": "ab".repeat(40), "max_tokens": 8, "seed": 3, "ignore_eos": true});
    assert_eq!(server.ask("/v1/completions", &bare)["choices"][0]["text"], texts[0]);
    let unknown = server.post("/v1/completions", &json!({"model": "other", "prompt": "a"}));
    assert_eq!(unknown.error(), (404, "model_not_found".into(), "model".into()));
    assert!(unknown.body.contains("`base`, `style`, `task`"), "{}", unknown.body);
}

#[test]
fn the_list_of_models_tells_whose_adapters_they_are() {
    let server = server();
    let list = server.get("/v1/models").json();
    let entries: Vec<_> =
        list["data"].as_array().unwrap().iter().map(|m| (m["id"].clone(), m["parent"].clone())).collect();
    let of = |name: &str, parent: Value| (json!(name), parent);
    assert_eq!(entries, [of("base", Value::Null), of("style", json!("base")), of("task", json!("base"))]);
    assert_eq!(server.get("/v1/models/style").json()["parent"], "base");
    assert_eq!(server.get("/props?model=style").json()["model"], "style");
    ask(&server, "style");
    ask(&server, "base");
    // An engine is told of once, with its sums.
    let metrics = server.get("/metrics").body;
    for line in [
        "mlcc_generated_tokens_total{model=\"base\"} 16\n",
        "mlcc_adapter_texts_total{model=\"base\",adapter=\"style\"} 1\n",
        "mlcc_adapter_prompt_tokens_total{model=\"base\",adapter=\"style\"} 40\n",
        "mlcc_adapter_generated_tokens_total{model=\"base\",adapter=\"style\"} 8\n",
        "mlcc_time_to_first_token_seconds_count{model=\"style\"} 1\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    assert!(!metrics.contains("mlcc_generated_tokens_total{model=\"style\"}"), "{metrics}");
}

/// The model with its adapters, and one without.
struct Shelf;

impl Library for Shelf {
    fn names(&self) -> Vec<String> {
        ["base", "plain"].map(String::from).to_vec()
    }

    fn load(&self, name: &str, _: u64) -> Result<Ready, LoadError> {
        match name {
            "base" => Ok(base()),
            "plain" => Ok(Ready::step(Toy::new(false, Some(99)), served(None), 2)),
            other => Err(LoadError::Unknown(other.into())),
        }
    }
}

#[test]
fn adapters_come_and_go_with_their_model() {
    let models = vec![("base".to_owned(), base()), named("plain", &Toy::new(false, Some(99)), 2, None)];
    let server = Server::with(models, Box::new(Shelf), options());
    let names = || -> Vec<String> {
        let list = server.get("/v1/models").json();
        let loaded = list["data"].as_array().unwrap().iter().filter(|m| m["status"]["value"] == "loaded");
        loaded.map(|m| m["id"].as_str().unwrap().to_owned()).collect()
    };
    let text = ask(&server, "style")["choices"].clone();
    for path in ["/models/load", "/models/unload"] {
        let refused = server.post(path, &json!({"model": "style"}));
        assert_eq!(refused.error(), (400, "adapter".into(), "model".into()), "{path}");
    }
    // A name that an adapter would have is taken.
    let taken = server.post("/models/load", &json!({"model": "other", "artifact": "base"}));
    assert_eq!((taken.status, taken.body.contains("`style`")), (422, true), "{}", taken.body);
    server.ask("/models/load", &json!({"model": "base"}));
    assert_eq!(names(), ["base", "style", "task", "plain"]);
    assert_eq!(ask(&server, "style")["choices"], text);
    server.ask("/models/unload", &json!({"model": "base"}));
    assert_eq!(names(), ["plain"]);
    assert_eq!(server.post("/v1/completions", &json!({"model": "style", "prompt": "a"})).status, 404);
    until(|| !server.get("/metrics").body.contains("mlcc_texts_running{model=\"base\"}"));
}
