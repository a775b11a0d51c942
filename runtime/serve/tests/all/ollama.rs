//! Ollama's API: the texts of the other routes, as lines of JSON.

use mlcc_serve::ServeOptions;
use serde_json::{Value, json};

use crate::server::{TestResponse, TestServer, options};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";

fn server() -> TestServer {
    TestServer::start(&ToyModel::new(false, Some(2000)), 2, Some(TEMPLATE), options())
}

/// The lines of a stream; the last one alone is done.
fn lines(answer: &TestResponse) -> Vec<Value> {
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/x-ndjson")));
    let lines: Vec<Value> = answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let done: Vec<bool> = lines.iter().map(|line| line["done"].as_bool().unwrap()).collect();
    assert_eq!(done.iter().position(|done| *done), Some(lines.len() - 1), "{lines:?}");
    lines
}

/// Status and message of an error.
fn error(answer: &TestResponse) -> (u16, String) {
    let body = answer.json();
    assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    (answer.status, body["error"].as_str().unwrap().to_owned())
}

fn with(base: &Value, more: Value) -> Value {
    let mut body = base.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn stream_and_whole(server: &TestServer, path: &str, body: &Value) -> (Vec<Value>, Value) {
    let whole = server.ask(path, &with(body, json!({"stream": false})));
    (lines(&server.post(path, body)), whole)
}

/// Checks the fields of the last line about the whole answer.
fn check_end(line: &Value, tokens: u64, reason: &str) {
    assert_eq!((&line["done"], &line["done_reason"]), (&json!(true), &json!(reason)), "{line}");
    assert_eq!((&line["eval_count"], &line["model"]), (&json!(tokens), &json!("toy:latest")), "{line}");
    for name in
        ["total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_duration"]
    {
        assert!(line[name].as_u64().is_some_and(|value| value > 0), "{name}: {line}");
    }
    let created = line["created_at"].as_str().unwrap();
    assert!(created.len() == 30 && created.ends_with('Z') && &created[10..11] == "T", "{created}");
}

#[test]
fn answers_are_those_of_chats() {
    let server = server();
    let sampling = json!({"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7, "repeat_penalty": 1.1,
        "repeat_last_n": 32, "presence_penalty": 0.1, "frequency_penalty": 0.2, "stop": ["never said"]});
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let chat = with(&sampling, json!({"messages": messages, "max_tokens": 12}));
    let wanted = server.ask("/v1/chat/completions", &chat);
    let text = &wanted["choices"][0]["message"]["content"];
    let options = with(
        &sampling,
        json!({"num_predict": 12, "num_ctx": 512, "num_gpu": 99, "num_thread": 4.0, "use_mmap": true}),
    );
    let own = json!({"model": "toy:latest", "messages": messages, "options": options, "keep_alive": "5m"});
    let (parts, whole) = stream_and_whole(&server, "/api/chat", &own);
    assert_eq!(whole["message"], json!({"role": "assistant", "content": text}));
    check_end(&whole, 12, "length");
    assert_eq!(whole["prompt_eval_count"], wanted["usage"]["prompt_tokens"]);
    let streamed: String = parts.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!((&json!(streamed), parts.len() > 3), (text, true));
    check_end(parts.last().unwrap(), 12, "length");
    // A prompt is the only message of such a chat.
    let generate = json!({"model": "toy", "system": "Be brief.", "prompt": "Hi", "options": options});
    let (parts, whole) = stream_and_whole(&server, "/api/generate", &generate);
    assert_eq!((&whole["response"], &whole["message"]), (text, &Value::Null));
    check_end(&whole, 12, "length");
    let streamed: String = parts.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!(&json!(streamed), text);
    // Without limit, until the context is full; a stop string ends it.
    let stop: String = streamed.chars().skip(4).take(2).collect();
    let stopped = with(
        &generate,
        json!({"stream": false, "options": with(&options, json!({"stop": stop, "num_predict": -1}))}),
    );
    let stopped = server.ask("/api/generate", &stopped);
    assert_eq!(
        (stopped["done_reason"].as_str(), stopped["response"].as_str()),
        (Some("stop"), streamed.split(&stop).next())
    );
    // A larger context than there is: the answer says so.
    let larger = with(&own, json!({"options": with(&options, json!({"num_ctx": 4096}))}));
    let answer = server.post("/api/chat", &larger);
    assert!(
        answer.header("x-mlcc-warning").is_some_and(|told| told.contains("4096") && told.contains("2000"))
    );
}

#[test]
fn raw_prompts_are_completions() {
    let server = server();
    let sampling = json!({"temperature": 0.5, "seed": 3});
    let wanted = server
        .ask("/v1/completions", &with(&sampling, json!({"prompt": "ab", "max_tokens": 9, "logprobs": 1})));
    let own = json!({"prompt": "ab", "raw": true, "options": with(&sampling, json!({"num_predict": 9})), "logprobs": true, "top_logprobs": 1});
    let (parts, whole) = stream_and_whole(&server, "/api/generate", &own);
    assert_eq!(whole["response"], wanted["choices"][0]["text"]);
    let wanted = wanted["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone();
    let logprobs = |entries: &Value| -> Vec<Value> {
        entries.as_array().into_iter().flatten().map(|entry| entry["logprob"].clone()).collect()
    };
    assert_eq!(logprobs(&whole["logprobs"]), wanted);
    assert_eq!(whole["logprobs"][0]["top_logprobs"].as_array().unwrap().len(), 1);
    assert_eq!(parts.iter().flat_map(|line| logprobs(&line["logprobs"])).collect::<Vec<_>>(), wanted);
    // A model without a template continues texts.
    let plain = TestServer::start(&ToyModel::new(false, Some(2000)), 2, None, options());
    let plain =
        plain.ask("/api/generate", &json!({"prompt": "ab", "stream": false, "options": own["options"]}));
    assert_eq!(plain["response"], whole["response"]);
}

#[test]
fn forms_and_tools_are_held_to() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"v": {"enum": ["x", "y"]}}, "required": ["v"], "additionalProperties": false});
    let base = json!({"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 300, "temperature": 0}});
    for (format, is_right) in [
        (schema.clone(), (|value: &Value| value["v"] == "x" || value["v"] == "y") as fn(&Value) -> bool),
        (json!("json"), Value::is_object),
    ] {
        let (parts, whole) = stream_and_whole(&server, "/api/chat", &with(&base, json!({"format": format})));
        let text = whole["message"]["content"].as_str().unwrap();
        if whole["done_reason"] == "stop" {
            assert!(is_right(&serde_json::from_str(text).unwrap()), "{text}");
        } else {
            assert!(format == "json" && text.starts_with('{'), "{text}");
        }
        let streamed: String =
            parts.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
        assert_eq!(streamed, text);
    }
    let free = server.ask(
        "/api/chat",
        &with(&base, json!({"format": "", "stream": false, "options": {"num_predict": 3}})),
    );
    assert_eq!(free["eval_count"], 3);
    // Calls are whole, with their arguments as an object.
    let toy = ToyModel::new(false, Some(2000));
    let scripted = TestServer::start(&toy, 2, Some(TEMPLATE), options());
    let written = "Well<call>\n{\"name\": \"alpha\", \"arguments\": {\"v\": \"x\"}}\n</call>\n<call>\n{\"name\": \"alpha\", \"arguments\": {\"v\": \"y\"}}\n</call>";
    *toy.script.lock().unwrap() = written.bytes().map(|byte| i32::from(byte) + 1).collect();
    let tools = json!([{"function": {"name": "alpha", "parameters": schema}}]);
    let (parts, whole) = stream_and_whole(&scripted, "/api/chat", &with(&base, json!({"tools": tools})));
    let told = |calls: &Value| -> Vec<Value> {
        let function = |call: &Value| json!([call["function"]["name"], call["function"]["arguments"]]);
        calls.as_array().into_iter().flatten().map(function).collect()
    };
    let wanted = vec![json!(["alpha", {"v": "x"}]), json!(["alpha", {"v": "y"}])];
    assert_eq!(told(&whole["message"]["tool_calls"]), wanted, "{whole}");
    assert_eq!((&whole["message"]["content"], &whole["done_reason"]), (&json!("Well"), &json!("stop")));
    assert_eq!(
        parts.iter().flat_map(|line| told(&line["message"]["tool_calls"])).collect::<Vec<_>>(),
        wanted
    );
}

/// Calls and results have no ids here: results follow their calls, and templates see ids.
#[test]
fn results_belong_to_calls_by_their_order() {
    let template = "{% for m in messages %}[{{ m.role }} {{ m.tool_call_id }} {{ m.name }}] {{ m.content or '' }}{% for c in m.tool_calls or [] %}<call {{ c.id }}>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}";
    let server = TestServer::start(&ToyModel::new(false, Some(2000)), 2, Some(template), options());
    let call = |city: &str| json!({"function": {"name": "weather", "arguments": {"city": city}}});
    let own = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call("Ulm"), call("Jena")]},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "tool", "content": "sun"},
    ]);
    let mut chat = own.clone();
    chat[1]["content"] = Value::Null;
    for (index, id) in ["call00001", "call00002"].into_iter().enumerate() {
        (chat[1]["tool_calls"][index]["id"], chat[1]["tool_calls"][index]["type"]) =
            (json!(id), json!("function"));
        chat[2 + index]["tool_call_id"] = json!(id);
    }
    chat[2]["name"] = chat[2].as_object_mut().unwrap().remove("tool_name").unwrap();
    let wanted =
        server.ask("/v1/chat/completions", &json!({"messages": chat, "max_tokens": 9, "temperature": 0}));
    let options = json!({"num_predict": 9, "temperature": 0});
    let answer = server.ask("/api/chat", &json!({"messages": own, "stream": false, "options": options}));
    assert_eq!(answer["message"]["content"], wanted["choices"][0]["message"]["content"]);
    assert_eq!(answer["prompt_eval_count"], wanted["usage"]["prompt_tokens"]);
}

#[test]
fn thoughts_are_apart() {
    let toy = ToyModel::new(false, Some(2000));
    let template = "{% for m in messages %}[{{ m.role }}] {% if m.thinking is defined %}!{% endif %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}";
    let server = TestServer::start(&toy, 2, Some(template), options());
    *toy.script.lock().unwrap() = b"<think>Hm</think>Yes".iter().map(|byte| i32::from(*byte) + 1).collect();
    let body = json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "thinking": "b"},
        {"role": "user", "content": "And?"}], "think": true, "options": {"temperature": 0}});
    let (parts, whole) = stream_and_whole(&server, "/api/chat", &body);
    assert_eq!(whole["message"], json!({"role": "assistant", "content": "Yes", "thinking": "Hm"}));
    let joined =
        |name: &str| parts.iter().filter_map(|line| line["message"][name].as_str()).collect::<String>();
    assert_eq!((joined("thinking"), joined("content")), ("Hm".into(), "Yes".into()));
    let prompt = json!({"prompt": "Hi", "stream": false, "options": {"temperature": 0}});
    let answer = server.ask("/api/generate", &prompt);
    assert_eq!((&answer["thinking"], &answer["response"]), (&json!("Hm"), &json!("Yes")));
    let shown = server.ask("/api/show", &json!({"model": "toy"}));
    assert_eq!(shown["capabilities"], json!(["completion", "thinking"]));
}

#[test]
fn models_are_listed_and_described() {
    let server = server();
    for path in ["/api/tags", "/api/ps"] {
        let list = server.get(path).json();
        let model = &list["models"][0];
        assert_eq!((&model["name"], &model["model"]), (&json!("toy:latest"), &json!("toy:latest")));
        assert!(model["digest"].as_str().unwrap().len() == 64 && model["details"]["families"].is_null());
        assert!(model["size"].is_u64(), "{model}");
    }
    assert_eq!(server.get("/api/ps").json()["models"][0]["context_length"], 2000);
    for body in [json!({"model": "toy"}), json!({"name": "toy:latest", "verbose": true})] {
        let shown = server.ask("/api/show", &body);
        assert_eq!(
            (&shown["template"], &shown["capabilities"]),
            (&json!(TEMPLATE), &json!(["completion", "tools", "thinking"]))
        );
        assert_eq!(shown["model_info"]["mlcc.context_length"], 2000, "{shown}");
    }
    assert!(server.get("/api/version").json()["version"].as_str().unwrap().starts_with("0."));
    // Clients load a model so.
    for (path, body) in
        [("/api/chat", json!({"messages": []})), ("/api/generate", json!({"model": "toy", "stream": false}))]
    {
        let answer = server.ask(path, &body);
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!("load")), "{answer}");
    }
    // Browsers get the page, other clients what they look for.
    let root = |accept: &str| TestResponse::read(server.open("GET", "/", accept, ""));
    assert_eq!(root("Accept: */*\r\n").body, "Ollama is running");
    assert!(root("Accept: text/html,application/xml;q=0.9,*/*;q=0.8\r\n").body.starts_with("<!"));
    assert_eq!(TestResponse::read(server.open("HEAD", "/", "Accept: application/json\r\n", "")).status, 200);
    // A tag is no other model for the other routes either.
    assert_eq!(
        server.ask("/v1/completions", &json!({"model": "toy:latest", "prompt": "a", "max_tokens": 1}))["model"],
        "toy"
    );
}

#[test]
fn mistakes_are_named_in_that_apis_form() {
    let server = server();
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 2}});
    let prompt = json!({"prompt": "a"});
    for (path, base, more, status, part) in [
        ("/api/chat", &chat, json!({"model": "llama3"}), 404, "llama3"),
        ("/api/chat", &chat, json!({"options": {"temprature": 1}}), 400, "temprature"),
        ("/api/chat", &chat, json!({"options": {"temperature": "hot"}}), 400, "temperature"),
        ("/api/chat", &chat, json!({"options": {"num_predict": "many"}}), 400, "num_predict"),
        ("/api/chat", &chat, json!({"options": {"num_ctx": "all"}}), 400, "num_ctx"),
        ("/api/chat", &chat, json!({"options": {"tfs_z": 0.5}}), 400, "tfs_z"),
        ("/api/chat", &chat, json!({"format": "yaml"}), 400, "`format`"),
        ("/api/chat", &chat, json!({"format": {"uniqueItems": true, "type": "array"}}), 400, "`format`"),
        ("/api/chat", &chat, json!({"think": 3}), 400, "think"),
        ("/api/chat", &chat, json!({"think": "much"}), 400, "think"),
        (
            "/api/chat",
            &chat,
            json!({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}),
            400,
            "images",
        ),
        ("/api/chat", &chat, json!({"messages": [], "keep_alive": 0}), 400, "/models/unload"),
        ("/api/chat", &chat, json!({"massages": 1}), 400, "massages"),
        ("/api/generate", &prompt, json!({"suffix": "b"}), 400, "suffix"),
        ("/api/generate", &prompt, json!({"images": ["aGk="]}), 400, "images"),
        ("/api/generate", &prompt, json!({"template": "{{ .Prompt }}"}), 400, "template"),
        ("/api/generate", &prompt, json!({"context": [1, 2]}), 400, "context"),
        ("/api/generate", &prompt, json!({"raw": true, "system": "s"}), 400, "system"),
        ("/api/generate", &json!({}), json!({"keep_alive": "0s", "prompt": ""}), 400, "keep_alive"),
        ("/api/embed", &json!({"input": "a"}), json!({}), 400, "embedding model"),
        ("/api/show", &json!({}), json!({"model": "none"}), 404, "none"),
        ("/api/pull", &json!({"model": "llama3"}), json!({}), 400, "mlcc build"),
        ("/api/create", &json!({}), json!({}), 400, "mlcc build"),
        ("/api/nothing", &json!({}), json!({}), 404, "/api/nothing"),
        ("/api/tags", &json!({}), json!({}), 405, "POST"),
    ] {
        let body = with(base, more);
        let (found, message) = error(&server.post(path, &body));
        assert!(found == status && message.contains(part), "{path} {body}: {found} {message}");
    }
    assert_eq!(error(&TestResponse::read(server.open("DELETE", "/api/delete", "", "{}"))).0, 400);
    // A model that does not think.
    let plain = TestServer::start(
        &ToyModel::new(false, None),
        1,
        Some("{% for m in messages %}{{ m.content }}{% endfor %}"),
        options(),
    );
    assert!(
        error(&plain.post("/api/chat", &with(&chat, json!({"think": true}))))
            .1
            .contains("does not support thinking")
    );
    assert_eq!(plain.post("/api/chat", &with(&chat, json!({"think": false}))).status, 200);
    let form = "Content-Type: application/x-www-form-urlencoded\r\n";
    assert_eq!(error(&TestResponse::read(server.open("POST", "/api/chat", form, "{}"))).0, 415);
    let keyed = ServeOptions { api_keys: vec!["s3cret".into()], ..options() };
    let keyed = TestServer::start(&ToyModel::new(false, None), 1, Some(TEMPLATE), keyed);
    assert_eq!(error(&keyed.get("/api/tags")).0, 401);
    let bearer = keyed.open("GET", "/api/tags", "Authorization: Bearer s3cret\r\n", "");
    assert_eq!(TestResponse::read(bearer).status, 200);
    // A failure after the head is the last line.
    let failing =
        json!({"prompt": "a", "raw": true, "options": {"num_predict": 2000, "temperature": 2, "seed": 1}});
    let body = server.post("/api/generate", &failing).body;
    assert!(body.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{body:.300}");
}
