//! Adapters, which clients call as models of their own.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use mlcc_engine::serving::TextAdapter;
use mlcc_serve::{LoadError, ModelLibrary, ModelSetup, NoLibrary, ReadyModel, ServeOptions};
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, named, options, served, until};
use crate::toy::ToyModel;

/// The toy with two adapters.
fn base() -> ReadyModel {
    let adapters = vec![TextAdapter::new("style", 11_u64), TextAdapter::new("task", 22_u64)];
    let served =
        ModelSetup { adapters, ..served(Some("{% for m in messages %}{{ m.content }}{% endfor %}")) };
    ReadyModel::from_runner(ToyModel::new(false, Some(4000)), served, 2)
}

fn server() -> TestServer {
    TestServer::with(vec![("base".to_owned(), base())], Box::new(NoLibrary), options())
}

fn ask(server: &TestServer, model: &str) -> Value {
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
        // Nothing of another one is cached.
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
    // An engine gets one entry, with its sums.
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
struct AdapterShelf;

impl ModelLibrary for AdapterShelf {
    fn names(&self) -> Vec<String> {
        ["base", "plain"].map(String::from).to_vec()
    }

    fn load(&self, name: &str, _: u64) -> Result<ReadyModel, LoadError> {
        match name {
            "base" => Ok(base()),
            "plain" => Ok(ReadyModel::from_runner(ToyModel::new(false, Some(99)), served(None), 2)),
            other => Err(LoadError::Unknown(other.into())),
        }
    }
}

#[test]
fn adapters_come_and_go_with_their_model() {
    let models = vec![("base".to_owned(), base()), named("plain", &ToyModel::new(false, Some(99)), 2, None)];
    let server = TestServer::with(models, Box::new(AdapterShelf), options());
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
    assert!(!server.get("/metrics").body.contains("style"));
}

/// Two slots. An adapter has its slot as long as its number is held.
#[derive(Clone, Default)]
struct CountedSlots(Arc<Mutex<Vec<Weak<u64>>>>);

impl CountedSlots {
    fn taken(&self) -> usize {
        self.0.lock().unwrap().iter().filter(|number| number.strong_count() > 0).count()
    }

    fn adapter(&self, name: &str, number: u64) -> TextAdapter {
        let number = Arc::new(number);
        self.0.lock().unwrap().push(Arc::downgrade(&number));
        TextAdapter::new(name, number)
    }
}

/// The toy with adapters, of which clients may load more: their folders have a number in a file.
fn reading(slots: &CountedSlots, adapters: Vec<TextAdapter>) -> ReadyModel {
    let slots = slots.clone();
    let read = move |name: &str, folder: &Path| {
        if slots.taken() == 2 {
            return Err("all 2 slots for adapters are in use".to_owned());
        }
        let text = std::fs::read_to_string(folder.join("number")).map_err(|error| error.to_string())?;
        let number: u64 = text.parse().map_err(|_| "it is no number".to_owned())?;
        Ok(slots.adapter(name, number))
    };
    let served = ModelSetup { adapters, reads_adapters: Some(Box::new(read)), ..served(None) };
    ReadyModel::from_runner(ToyModel::new(true, Some(4000)), served, 2)
}

/// A folder of adapters, and one next to it.
fn folders() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("adapters");
    for (name, number) in [("style", "11"), ("task", "22"), ("broken", "x")] {
        std::fs::create_dir_all(below.join(name)).unwrap();
        std::fs::write(below.join(name).join("number"), number).unwrap();
    }
    std::fs::create_dir(folder.path().join("outside")).unwrap();
    std::os::unix::fs::symlink("../outside", below.join("link")).unwrap();
    (folder, below)
}

fn change(server: &TestServer, what: &str, body: Value) -> TestResponse {
    server.post(&format!("/v1/{what}_lora_adapter"), &body)
}

fn names(server: &TestServer) -> Vec<String> {
    let list = server.get("/v1/models").json();
    list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn clients_load_and_unload_adapters() {
    let (slots, (_folder, below)) = (CountedSlots::default(), folders());
    let fixed = vec![slots.adapter("fixed", 33)];
    let models = vec![
        ("base".to_owned(), reading(&slots, fixed)),
        named("plain", &ToyModel::new(false, Some(99)), 2, None),
    ];
    let server =
        TestServer::with(models, Box::new(NoLibrary), ServeOptions { lora_dir: Some(below), ..options() });
    let bare = ask(&server, "base")["choices"].clone();
    let done = change(&server, "load", json!({"lora_name": "style", "lora_path": "style"}));
    assert_eq!((done.status, &*done.body), (200, "Success: LoRA adapter 'style' added successfully."));
    // Behind those of its model.
    assert_eq!(names(&server), ["base", "fixed", "style", "plain"]);
    assert_eq!(server.get("/v1/models/style").json()["parent"], "base");
    let text = ask(&server, "style")["choices"].clone();
    assert_ne!(text, bare);
    // All slots are taken, until one is given back: states that are kept hold none.
    let task = json!({"lora_name": "task", "lora_path": "task", "model": "base"});
    let full = change(&server, "load", task.clone());
    assert_eq!((full.status, full.body.contains("all 2 slots")), (422, true), "{}", full.body);
    ask(&server, "fixed");
    let told = |name: &str| server.get("/metrics").body.matches(&format!("=\"{name}\"")).count();
    assert!(told("fixed") > 3 && told("style") > 3);
    let gone = change(&server, "unload", json!({"lora_name": "fixed", "lora_int_id": 3}));
    // Names that cannot be requested any more have no numbers.
    assert!(told("fixed") == 0 && told("style") > 3);
    assert_eq!((gone.status, &*gone.body), (200, "Success: LoRA adapter 'fixed' removed successfully."));
    assert_eq!(server.post("/v1/completions", &json!({"model": "fixed", "prompt": "a"})).status, 404);
    assert_eq!(change(&server, "load", task).status, 200);
    assert_eq!(names(&server), ["base", "style", "task", "plain"]);
    assert!(![&text, &bare].contains(&&ask(&server, "task")["choices"]));
    change(&server, "unload", json!({"lora_name": "style"}));
    until(|| slots.taken() == 1);
    // The same name, the same text, and nothing that is known of the old one.
    assert_eq!(change(&server, "load", json!({"lora_name": "style", "lora_path": "style"})).status, 200);
    let again = ask(&server, "style");
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(again["choices"], text);
    assert_eq!(ask(&server, "base")["choices"], bare);
}

#[test]
fn an_adapter_takes_the_place_of_one_of_its_name() {
    let (slots, (_folder, below)) = (CountedSlots::default(), folders());
    let models = vec![("base".to_owned(), reading(&slots, Vec::new()))];
    let options = ServeOptions { lora_dir: Some(below.clone()), ..options() };
    let server = TestServer::with(models, Box::new(NoLibrary), options);
    let whole = below.join("style").display().to_string();
    assert_eq!(change(&server, "load", json!({"lora_name": "one", "lora_path": whole})).status, 200);
    let text = ask(&server, "one")["choices"].clone();
    let taken = change(&server, "load", json!({"lora_name": "one", "lora_path": "task"}));
    assert_eq!(taken.error(), (400, "already_loaded".into(), "lora_name".into()));
    let place = |path: &str| json!({"lora_name": "one", "lora_path": path, "load_inplace": true});
    assert_eq!(change(&server, "load", place("broken")).error().1, "invalid_adapter");
    assert_eq!(ask(&server, "one")["choices"], text, "the old one stays");
    assert_eq!(change(&server, "load", place("task")).status, 200);
    assert_ne!(ask(&server, "one")["choices"], text);
    assert_eq!(names(&server), ["base", "one"]);
    until(|| slots.taken() == 1);
}

/// Texts go on with an adapter that is taken away, and its slot is free behind them.
#[test]
fn a_text_keeps_an_adapter_that_goes() {
    let (slots, (_folder, below)) = (CountedSlots::default(), folders());
    let models = vec![("base".to_owned(), reading(&slots, Vec::new()))];
    let server =
        TestServer::with(models, Box::new(NoLibrary), ServeOptions { lora_dir: Some(below), ..options() });
    let load = json!({"lora_name": "style", "lora_path": "style"});
    change(&server, "load", load.clone());
    let mut body = json!({"model": "style", "prompt": "ab".repeat(40), "max_tokens": 2000, "seed": 3, "ignore_eos": true});
    let expected = server.ask("/v1/completions", &body)["choices"][0]["text"].clone();
    body["stream"] = true.into();
    let mut text = server.open("POST", "/v1/completions", "", &body.to_string());
    // The head of the answer comes when the text has started.
    assert!(!text.fill_buf().unwrap().is_empty());
    assert_eq!(change(&server, "unload", json!({"lora_name": "style"})).status, 200);
    assert_eq!(names(&server), ["base"]);
    let pieces = TestResponse::read(text).events();
    let written = pieces.iter().filter_map(|piece| piece["choices"][0]["text"].as_str());
    assert_eq!(written.collect::<String>(), expected.as_str().unwrap());
    until(|| slots.taken() == 0);
}

#[test]
fn adapters_that_clients_may_not_load() {
    let (slots, (folder, below)) = (CountedSlots::default(), folders());
    let models = || vec![("base".to_owned(), reading(&slots, vec![TextAdapter::new("own", 1_u64)]))];
    let closed = TestServer::with(models(), Box::new(NoLibrary), options());
    let load = |name: &str, path: &str| json!({"lora_name": name, "lora_path": path});
    for (what, body) in [("load", load("style", "style")), ("unload", json!({"lora_name": "own"}))] {
        let refused = change(&closed, what, body);
        assert_eq!((refused.error().0, refused.error().1.as_str()), (403, "adapters_are_fixed"));
        assert!(refused.body.contains("--lora-dir"));
    }
    let options = ServeOptions { lora_dir: Some(below), ..options() };
    let server = TestServer::with(models(), Box::new(NoLibrary), options);
    let outside = folder.path().join("outside").display().to_string();
    let mut told = Vec::new();
    for path in
        ["../outside", &outside, "nowhere", ".", "", "style/number", "link", "style/../../outside", "/etc"]
    {
        let refused = change(&server, "load", load("a", path));
        assert_eq!(refused.error(), (400, "invalid_value".into(), "lora_path".into()), "{path}");
        told.push(refused.body);
    }
    told.dedup();
    assert_eq!(told.len(), 1, "answers do not tell what there is");
    for name in ["", "a/b"] {
        assert_eq!(change(&server, "load", load(name, "style")).error().1, "invalid_value");
    }
    for name in ["base", "own"] {
        assert_eq!(change(&server, "load", load(name, "style")).error().1, "already_loaded");
    }
    // A model is no adapter.
    let replaced = json!({"lora_name": "base", "lora_path": "style", "load_inplace": true});
    assert_eq!(change(&server, "load", replaced).error().1, "already_loaded");
    let broken = change(&server, "load", load("broken", "broken"));
    assert_eq!(broken.error(), (422, "invalid_adapter".into(), "lora_path".into()));
    assert!(broken.body.contains("no number"));
    let of_adapter = json!({"lora_name": "a", "lora_path": "style", "model": "own"});
    assert_eq!(change(&server, "load", of_adapter).error().1, "adapter");
    for name in ["base", "nobody"] {
        let unknown = change(&server, "unload", json!({"lora_name": name}));
        assert_eq!(unknown.error(), (404, "adapter_not_found".into(), "lora_name".into()));
    }
    assert_eq!(change(&server, "load", json!({"lora_name": "a"})).error().1, "missing_field");
    assert_eq!(
        change(&server, "load", json!({"lora_name": "a", "lora_path": "style", "x": 1})).error().1,
        "unknown_field"
    );
    assert_eq!(names(&server), ["base", "own"]);
}
