//! The API of llama.cpp's server: completions, gaps, and what it refuses.

use mlcc_engine::serving::{ModelLimits, ModelRunner, RunnerError, SequenceInput};
use mlcc_serve::{ModelSetup, NoLibrary, ReadyModel};
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, options, served};
use crate::toy::{ToyModel, ToySequence, VOCAB};
use crate::vocabularies::world;

fn server() -> TestServer {
    TestServer::start(&ToyModel::new(false, Some(2000)), 2, None, options())
}

fn with(base: &Value, more: Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Code, type and message of an error.
fn error(answer: &TestResponse) -> (u16, String, String) {
    let error = answer.json()["error"].clone();
    assert_eq!(error["code"], answer.status, "{error}");
    let text = |name: &str| error[name].as_str().unwrap().to_owned();
    (answer.status, text("type"), text("message"))
}

#[test]
fn completions_are_those_of_the_other_route() {
    let server = server();
    let sampling = json!({"prompt": "ab", "temperature": 0.7, "seed": 5, "top_k": 30});
    let wanted = server.ask("/v1/completions", &with(&sampling, json!({"max_tokens": 9})));
    let text = wanted["choices"][0]["text"].as_str().unwrap();
    let own = with(
        &sampling,
        json!({"n_predict": 9, "return_tokens": true, "n_probs": 2, "cache_prompt": true, "id_slot": -1}),
    );
    let answer = server.ask("/completion", &own);
    assert_eq!(
        (&answer["content"], &answer["stop"], &answer["stop_type"]),
        (&json!(text), &json!(true), &json!("limit"))
    );
    assert_eq!(
        (&answer["tokens_predicted"], &answer["tokens_evaluated"]),
        (&json!(9), &wanted["usage"]["prompt_tokens"])
    );
    assert_eq!(
        (&answer["model"], &answer["prompt"], &answer["truncated"]),
        (&json!("toy"), &json!("ab"), &json!(false))
    );
    assert_eq!(answer["generation_settings"]["seed"], 5);
    assert_eq!(answer["timings"]["predicted_n"], 9);
    let tokens = answer["tokens"].as_array().unwrap();
    let scored = answer["completion_probabilities"].as_array().unwrap();
    assert_eq!((tokens.len(), scored.len(), scored[0]["top_logprobs"].as_array().unwrap().len()), (9, 9, 2));
    assert_eq!(scored[8]["id"], tokens[8]);
    assert_eq!(server.ask("/detokenize", &json!({"tokens": tokens}))["content"], text);
    // Streamed; no event says [DONE].
    let streamed = server.post("/completion", &with(&own, json!({"stream": true})));
    let data = streamed.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let parts: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    let joined: String = parts.iter().map(|part| part["content"].as_str().unwrap()).collect();
    assert_eq!(joined, text);
    let last = parts.last().unwrap();
    assert_eq!(
        (&last["stop"], &last["tokens_predicted"], &parts[0]["stop"]),
        (&json!(true), &json!(9), &json!(false))
    );
    let ids: Vec<&Value> = parts.iter().flat_map(|part| part["tokens"].as_array().unwrap()).collect();
    assert_eq!(ids, tokens.iter().collect::<Vec<_>>());
    // Token ids, lists, and the string that ended a text.
    let list = server.ask(
        "/completion",
        &with(&own, json!({"prompt": ["ab", "a"], "n_probs": 0, "return_tokens": false})),
    );
    assert_eq!(
        (list.as_array().unwrap().len(), &list[0]["content"], &list[1]["index"]),
        (2, &json!(text), &json!(1))
    );
    let one = server.ask("/completion", &with(&own, json!({"prompt": [98]})));
    assert_eq!(one["content"], list[1]["content"]);
    let stop: String = text.chars().skip(3).take(2).collect();
    let stopped = server.ask("/completion", &with(&own, json!({"stop": ["never said", stop]})));
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!(stop)));
    // Without a length it goes on to the end of the context.
    let short = TestServer::start(&ToyModel::new(false, Some(40)), 1, None, options());
    let endless = short.ask("/completion", &json!({"prompt": "ab", "ignore_eos": true}));
    assert!(endless["tokens_predicted"].as_u64().unwrap() > 30, "{endless}");
}

#[test]
fn mistakes_and_missing_parts_are_named() {
    let server = server();
    for (path, body, status, part) in [
        ("/completion", json!({}), 400, "prompt"),
        ("/completion", json!({"prompt": "a", "temperature": "hot"}), 400, "temperature"),
        ("/completion", json!({"prompt": "a", "n_cmpl": 3}), 400, "n_cmpl"),
        ("/completion", json!({"prompt": "a", "model": "none"}), 404, "none"),
        ("/completion", json!({"prompt": ["a", "b"], "stream": true}), 400, "stream"),
        ("/completion", json!({"prompt": "a", "grammar": "root ::= \"a\""}), 400, "grammar"),
        ("/infill", json!({"input_suffix": "b"}), 400, "input_prefix"),
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b"}), 400, "input_suffix"),
        ("/embedding", json!({"content": "a"}), 400, "embedding model"),
        ("/embedding", json!({}), 400, "content"),
    ] {
        let (found, kind, message) = error(&server.post(path, &body));
        assert!(found == status && message.contains(part), "{path} {body}: {found} {message}");
        assert_eq!(kind, if status == 404 { "not_found_error" } else { "invalid_request_error" });
    }
    let multipart = "Content-Type: multipart/form-data; boundary=x\r\n";
    for (path, headers, part) in [
        ("/slots/0?action=save", "", "--cache-dir"),
        ("/v1/audio/speech", "", "sound"),
        ("/v1/audio/transcriptions", multipart, "sound"),
    ] {
        let refused = TestResponse::read(server.open("POST", path, headers, "{}"));
        assert_eq!(refused.error().1, "unsupported", "{path}");
        assert!(refused.body.contains(part), "{}", refused.body);
    }
    let foreign = server.open("POST", "/v1/audio/speech", "Origin: http://evil.example\r\n", "{}");
    assert_eq!(TestResponse::read(foreign).error().1, "other_site");
    let props = server.get("/props").json();
    assert_eq!(
        (&props["model_alias"], &props["default_generation_settings"]["n_ctx"]),
        (&json!("toy"), &json!(2000))
    );
    assert_eq!(server.get("/slots").json()[0]["n_ctx"], 2000);
}

/// Names of the tokens around a gap, which come behind those of the toy.
const GAP: [&str; 4] = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"];

/// The toy with more tokens, which it never writes.
struct WideToy {
    toy: ToyModel,
    logits: Vec<f32>,
}

impl ModelRunner for WideToy {
    type Sequence = ToySequence;

    fn limits(&self) -> ModelLimits {
        ModelLimits { vocab: VOCAB + GAP.len(), ..self.toy.limits() }
    }

    fn new_sequence(&self) -> Result<Self::Sequence, RunnerError<Self>> {
        self.toy.new_sequence()
    }

    fn fork(&self, sequence: &Self::Sequence) -> Result<Self::Sequence, RunnerError<Self>> {
        self.toy.fork(sequence)
    }

    fn step(&mut self, feeds: &mut [SequenceInput<'_, Self::Sequence>]) -> Result<(), RunnerError<Self>> {
        self.toy.step(feeds)?;
        let rows = self.toy.logits().chunks_exact(VOCAB);
        self.logits = rows.flat_map(|row| [row, &[f32::NEG_INFINITY; GAP.len()]].concat()).collect();
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }
}

/// The text between two others, by three routes.
#[test]
fn gaps_are_written_by_models_that_have_tokens_for_them() {
    let words: Vec<&[u8]> = [&b"ab"[..]].into_iter().chain(GAP.map(str::as_bytes)).collect();
    let setup = ModelSetup { tokenizer: world(&words), ..served(None) };
    let toy = WideToy { toy: ToyModel::new(false, Some(2000)), logits: Vec::new() };
    let ready = ReadyModel::from_runner(toy, setup, 2);
    let server = TestServer::with(vec![("coder".to_owned(), ready)], Box::new(NoLibrary), options());
    let id = |text: &str| server.ask("/tokenize", &json!({"content": text}))["tokens"][0].clone();
    let ids = json!([id(GAP[0]), id("x"), id(GAP[1]), id("y"), id(GAP[2])]);
    let sampling = json!({"temperature": 0.9, "seed": 4, "n_predict": 9});
    let wanted = server.ask("/completion", &with(&sampling, json!({"prompt": ids})))["content"].clone();
    let gap = with(&sampling, json!({"input_prefix": "x", "input_suffix": "y", "input_extra": []}));
    assert_eq!(server.ask("/infill", &gap)["content"], wanted);
    let options = json!({"temperature": 0.9, "seed": 4, "num_predict": 9});
    let own = json!({"model": "coder", "prompt": "x", "suffix": "y", "stream": false, "options": options});
    assert_eq!(server.ask("/api/generate", &own)["response"], wanted);
    assert_eq!(server.ask("/api/show", &json!({}))["capabilities"], json!(["completion", "insert"]));
    // The text between the two has begun.
    let begun = json!([ids[0], ids[1], ids[2], ids[3], ids[4], id("z")]);
    let wanted = server.ask("/completion", &with(&sampling, json!({"prompt": begun})))["content"].clone();
    assert_eq!(server.ask("/infill", &with(&gap, json!({"prompt": "z"})))["content"], wanted);
    let extra = with(&gap, json!({"input_extra": [{"filename": "a", "text": "b"}]}));
    assert!(error(&server.post("/infill", &extra)).2.contains("input_extra"));
}
