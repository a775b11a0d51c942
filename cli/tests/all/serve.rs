//! `mlcc serve` over the loopback: answers are the texts of `mlcc run`, mistakes are named, nothing hangs.

use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::program::{fails_with, failure, json, mlcc, text};
use crate::server::{ServerProcess, TestResponse, artifact};
use serde_json::{Value, json};

const PROMPT: &str = "It was a dark and";

/// The output of `mlcc run`.
fn run(prompt: &str, tokens: usize, seed: u64) -> String {
    let mut run = mlcc();
    run.arg("run").arg(artifact()).args(["-p", prompt, "--no-echo", "--temp", "0.8", "-t", "1"]);
    let out = text(run.args(["-n", &tokens.to_string(), "--seed", &seed.to_string()]));
    // Behind the text comes the end of a line.
    out.strip_suffix('\n').unwrap().to_owned()
}

fn completion(prompt: &str, tokens: usize, seed: u64) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "seed": seed, "temperature": 0.8})
}

fn text_of(choice: &Value) -> String {
    choice["text"].as_str().unwrap().to_owned()
}

#[test]
fn texts_are_those_of_run_whatever_runs_beside_them() {
    let server = ServerProcess::start(&["--sequences", "3"]);
    assert_eq!((&server.ready["sequences"], &server.ready["model"]), (&json!(3), &json!("books")));
    let prompts = [PROMPT, "The old man said that", "She", "It was a dark and"];
    let found: Vec<String> = std::thread::scope(|scope| {
        let ask = |(seed, prompt): (usize, &'static str)| {
            let server = &server;
            let request = completion(prompt, 12 + 5 * seed, seed as u64);
            move || text_of(&server.ask("/v1/completions", &request)["choices"][0])
        };
        let threads: Vec<_> = prompts.into_iter().enumerate().map(|case| scope.spawn(ask(case))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (seed, (prompt, found)) in prompts.into_iter().zip(found).enumerate() {
        assert_eq!(found, run(prompt, 12 + 5 * seed, seed as u64), "{prompt}");
    }
    // Several texts of several prompts, streamed: each choice has the next seed.
    let mut request = completion(PROMPT, 10, 7);
    request["prompt"] = json!([PROMPT, "She"]);
    request["n"] = json!(2);
    request["stream"] = json!(true);
    request["stream_options"] = json!({"include_usage": true});
    let events = server.stream("/v1/completions", &request);
    let mut texts = vec![String::new(); 4];
    let mut ends = 0;
    for event in &events[..events.len() - 1] {
        let choice = &event["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        ends += usize::from(choice["finish_reason"] == "length");
    }
    let expected = [run(PROMPT, 10, 7), run(PROMPT, 10, 8), run("She", 10, 7), run("She", 10, 8)];
    assert_eq!((texts, ends), (expected.to_vec(), 4));
    let usage = &events[events.len() - 1]["usage"];
    assert_eq!(usage["completion_tokens"], 40, "{usage}");
}

#[test]
fn chats_stream_and_go_on_where_they_were() {
    let server = ServerProcess::start(&["--template", "chatml"]);
    let mut messages = vec![json!({"role": "user", "content": "Who goes there?"})];
    let request = json!({"model": "books", "messages": messages, "max_tokens": 12, "user": "u",
        "stream": true, "stream_options": {"include_usage": true}});
    let events = server.stream("/v1/chat/completions", &request);
    let (first, last) = (&events[0]["choices"][0], &events[events.len() - 2]["choices"][0]);
    assert_eq!((&first["delta"]["role"], &last["finish_reason"]), (&json!("assistant"), &json!("length")));
    assert!(events.iter().all(|e| e["object"] == "chat.completion.chunk" && e["model"] == "books"));
    let said = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    let said: String = events.iter().filter_map(said).collect();
    assert!(!said.is_empty());
    let usage = &events[events.len() - 1]["usage"];
    assert_eq!(
        (&usage["completion_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]),
        (&json!(12), &json!(0))
    );
    // The same without a stream, with parts, and as a prompt of `/v1/completions`.
    messages[0]["content"] = json!([{"type": "text", "text": "Who goes there?"}]);
    let whole = server.ask("/chat/completions", &json!({"messages": messages, "max_completion_tokens": 12}));
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"]["content"], said);
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(cached(&whole), prompt_tokens, "the state behind an equal prompt is there");
    let prompt = server.ask("/apply-template", &json!({"messages": messages}))["prompt"].clone();
    let same = server.ask("/v1/completions", &json!({"prompt": prompt, "max_tokens": 12}));
    assert_eq!(same["choices"][0]["text"], said);
    // The next turn reads only what is new.
    messages.push(json!({"role": "assistant", "content": said}));
    messages.push(json!({"role": "user", "content": "And then?"}));
    let next = server.ask("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 4}));
    assert!(cached(&next) >= prompt_tokens, "{}", next["usage"]);
    let fresh = json!({"messages": messages, "max_tokens": 4, "cache_prompt": false});
    let fresh = server.ask("/v1/chat/completions", &fresh);
    assert_eq!((cached(&fresh), &fresh["choices"]), (0, &next["choices"]));
}

#[test]
fn logprobs_echo_biases_and_stops() {
    let server = ServerProcess::start(&["--template", "plain"]);
    let ids = server.ask("/tokenize", &json!({"content": PROMPT}))["tokens"].clone();
    assert_eq!(server.ask("/v1/detokenize", &json!({"tokens": ids}))["content"], PROMPT);
    let count = ids.as_array().unwrap().len();
    let request = json!({"prompt": ids, "max_tokens": 3, "echo": true, "logprobs": 2, "temperature": 0});
    let choice = server.ask("/v1/completions", &request)["choices"][0].clone();
    let text = text_of(&choice);
    let logprobs = &choice["logprobs"];
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    assert_eq!(list("tokens").len(), count + 3);
    let joined: String = list("tokens").iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(joined, text);
    assert!(text.starts_with(PROMPT));
    assert_eq!((&list("token_logprobs")[0], &list("top_logprobs")[0]), (&Value::Null, &Value::Null));
    // Greedy tokens are the most probable ones.
    for index in count..count + 3 {
        let (token, top) = (&list("token_logprobs")[index], &list("top_logprobs")[index]);
        let best = top.as_object().unwrap().values().filter_map(Value::as_f64).fold(f64::MIN, f64::max);
        assert_eq!((top.as_object().unwrap().len(), token.as_f64().unwrap()), (2, best));
    }
    let chat = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "temperature": 0,
        "logprobs": true, "top_logprobs": 3});
    let content = server.ask("/v1/chat/completions", &chat)["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(content.as_array().unwrap().len(), 2, "{content}");
    assert_eq!(content[0]["token"], content[0]["top_logprobs"][0]["token"]);
    assert_eq!(content[0]["logprob"], list("token_logprobs")[count]);
    // A banned token is not written, a preferred one is.
    let first = server.ask("/tokenize", &json!({"content": content[0]["token"]}))["tokens"][0].to_string();
    let biased = |bias: f64| {
        let request = json!({"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 0, "logit_bias": {&first: bias}});
        let answer = server.ask("/v1/completions", &request);
        answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().clone()
    };
    assert!(!biased(-100.0).contains(&content[0]["token"]));
    assert_eq!(biased(100.0), vec![content[0]["token"].clone(); 3]);
    let greedy = json!({"prompt": PROMPT, "max_tokens": 20, "temperature": 0});
    let long = text_of(&server.ask("/v1/completions", &greedy)["choices"][0]);
    let middle: String = long.chars().skip(8).take(4).collect();
    let stopped =
        json!({"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stop": [middle, "never said"]});
    let stopped = server.ask("/v1/completions", &stopped)["choices"][0].clone();
    assert_eq!(
        (text_of(&stopped), &stopped["finish_reason"]),
        (long.split(&middle).next().unwrap().into(), &json!("stop"))
    );
}

#[test]
fn the_server_tells_of_itself() {
    let server = ServerProcess::start(&["--sequences", "2"]);
    server.ask("/v1/completions", &completion(PROMPT, 4, 1));
    let get = |path: &str| {
        let answer = server.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer
    };
    assert_eq!(get("/health").json()["status"], "ok");
    for path in ["/v1/models", "/models"] {
        assert_eq!(get(path).json()["data"][0]["id"], "books");
    }
    assert_eq!(get("/v1/models/books").json()["object"], "model");
    let props = get("/props").json();
    assert_eq!(
        (&props["total_slots"], &props["chat"], &props["context"]),
        (&json!(2), &json!(false), &Value::Null)
    );
    let slots = get("/slots").json();
    assert_eq!((slots.as_array().unwrap().len(), &slots[0]["is_processing"]), (2, &json!(false)));
    let metrics = get("/metrics").body;
    let value =
        |name: &str| metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    assert_eq!(value("mlcc_generated_tokens_total{model=\"books\"} "), Some(4.0), "{metrics}");
    assert_eq!(value("mlcc_texts_finished_total{model=\"books\"} "), Some(1.0));
    assert_eq!(value("mlcc_texts_running{model=\"books\"} "), Some(0.0));
    assert_eq!(value("mlcc_time_to_first_token_seconds_count{model=\"books\"} "), Some(1.0));
    assert_eq!(value("mlcc_requests_total{path=\"/v1/completions\",status=\"200\"} "), Some(1.0));
}

#[test]
fn mistakes_are_named() {
    let server = ServerProcess::start(&[
        "--template",
        "chatml",
        "--body-limit",
        "2000",
        "--sequences",
        "2",
        "--max-queue",
        "3",
    ]);
    let message = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let with = |name: &str, value: Value| {
        let mut body = json!({"prompt": "a"});
        body[name] = value;
        body
    };
    let chat_with = |name: &str, value: Value| {
        let mut body = message(json!("Hi"));
        body[name] = value;
        body
    };
    let (text, chat) = ("/v1/completions", "/v1/chat/completions");
    let cases: Vec<(&str, Value, u16, &str, &str)> = vec![
        (text, json!([1]), 400, "invalid_json", "-"),
        (text, json!({}), 400, "missing_field", "prompt"),
        (text, json!({"prompt": 5}), 400, "invalid_type", "prompt"),
        (text, json!({"prompt": []}), 400, "invalid_value", "prompt"),
        (text, json!({"prompt": ""}), 400, "empty_prompt", "prompt"),
        (text, json!({"prompt": [[1, 99999]]}), 400, "invalid_value", "prompt"),
        (text, with("temperature", json!("hot")), 400, "invalid_type", "temperature"),
        (text, with("temperature", json!(-1)), 400, "invalid_value", "temperature"),
        (text, with("max_tokens", json!(-1)), 400, "invalid_type", "max_tokens"),
        (text, with("n", json!(0)), 400, "invalid_value", "n"),
        (text, with("n", json!(100000)), 400, "invalid_value", "n"),
        (text, with("n", json!(6)), 400, "too_many_texts", "-"),
        (text, with("seed", json!(1.5)), 400, "invalid_type", "seed"),
        (text, with("logprobs", json!(21)), 400, "invalid_value", "logprobs"),
        (text, with("logit_bias", json!({"a": 1})), 400, "invalid_value", "logit_bias"),
        (text, with("logit_bias", json!({"1": 101})), 400, "invalid_value", "logit_bias"),
        (text, with("logit_bias", json!({"99999": 1})), 400, "invalid_value", "logit_bias"),
        (text, with("stop", json!([""])), 400, "invalid_value", "stop"),
        (text, with("stop", json!(vec!["x"; 17])), 400, "invalid_value", "stop"),
        (text, with("stream_options", json!({})), 400, "invalid_value", "stream_options"),
        (text, with("best_of", json!(3)), 400, "unsupported", "best_of"),
        (text, with("model", json!("gpt-4")), 404, "model_not_found", "model"),
        (text, with("tempreature", json!(1)), 400, "unknown_field", "tempreature"),
        (text, with("prompt", json!("x".repeat(2000))), 413, "body_too_large", "-"),
        (chat, json!({"messages": []}), 400, "invalid_value", "messages"),
        (chat, json!({"messages": [{"content": "no role"}]}), 400, "invalid_type", "messages[0]"),
        (chat, message(json!(5)), 400, "invalid_type", "messages[0]"),
        (
            chat,
            message(json!([{"type": "image_url", "image_url": {"url": "x"}}])),
            400,
            "unsupported_content",
            "messages",
        ),
        (chat, chat_with("tools", json!([{"type": "function"}])), 400, "invalid_value", "tools[0]"),
        (
            chat,
            chat_with("tools", json!([{"type": "function", "function": {"name": "f"}}])),
            400,
            "unsupported",
            "tools",
        ),
        (
            chat,
            chat_with("response_format", json!({"type": "yaml"})),
            400,
            "invalid_value",
            "response_format",
        ),
        (chat, chat_with("guided_json", json!({"uniqueItems": true})), 400, "invalid_grammar", "guided_json"),
        (chat, chat_with("top_logprobs", json!(2)), 400, "invalid_value", "top_logprobs"),
        ("/detokenize", json!({"tokens": [99999]}), 400, "invalid_value", "tokens"),
        ("/nowhere", json!({}), 404, "unknown_url", "-"),
        ("/health", json!({}), 405, "method_not_allowed", "-"),
    ];
    for (path, body, status, code, param) in cases {
        let found = server.post(path, &body).error();
        assert_eq!(found, (status, code.to_owned(), param.to_owned()), "{path} {body}");
    }
    let image = server.post(chat, &message(json!([{"type": "image_url"}])));
    assert!(image.body.contains("image_url"), "{}", image.body);
    for raw in ["{\"prompt\": \"a\"", "", "\u{0}", "{\"prompt\": \"\\ud800\"}"] {
        let answer = TestResponse::read(server.open("POST", text, "", raw));
        assert_eq!(answer.error().1, "invalid_json", "{raw}");
    }
    // Accepted though it means nothing here.
    server.ask(
        text,
        &json!({"prompt": "a", "max_tokens": 1, "user": "me", "metadata": {}, "temperature": null}),
    );
}

/// A request that goes on for long; the connection after the first piece of its text.
fn long_text(server: &ServerProcess) -> std::io::BufReader<TcpStream> {
    let body = json!({"prompt": PROMPT, "max_tokens": 1_000_000, "stream": true, "ignore_eos": true});
    let mut stream = server.open("POST", "/v1/completions", "", &body.to_string());
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the connection has ended");
    }
    stream
}

/// Asks until `done`; panics after a while.
fn until(mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(120), "it never came");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_full_queue_says_so_and_a_reader_who_goes_makes_room() {
    let server = ServerProcess::start(&["--sequences", "1", "--max-queue", "0"]);
    let running = long_text(&server);
    let refused = server.post("/v1/completions", &completion(PROMPT, 1, 1));
    assert_eq!(refused.error(), (429, "queue_full".into(), "-".into()));
    assert!(refused.head.contains("retry-after: "), "{}", refused.head);
    drop(running);
    until(|| server.post("/v1/completions", &completion(PROMPT, 1, 1)).status == 200);
    // Half a request takes no place, and neither does one whose sender goes before the answer.
    let mut half = TcpStream::connect(&server.address).unwrap();
    half.write_all(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{\"prompt\"",
    )
    .unwrap();
    drop(half);
    let body = json!({"prompt": PROMPT, "max_tokens": 1_000_000, "ignore_eos": true});
    drop(server.open("POST", "/v1/completions", "", &body.to_string()));
    until(|| server.post("/v1/completions", &completion(PROMPT, 1, 1)).status == 200);
}

#[test]
fn sigterm_lets_texts_end() {
    let mut server = ServerProcess::start(&["--drain-timeout", "600"]);
    let body = json!({"prompt": PROMPT, "max_tokens": 300, "stream": true, "ignore_eos": true});
    let mut stream = server.open("POST", "/v1/completions", "", &body.to_string());
    let mut text = String::new();
    while !text.contains("data: ") {
        assert!(stream.read_line(&mut text).unwrap() > 0);
    }
    server.signal("-TERM");
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn sigterm_ends_texts_when_there_is_no_more_time() {
    let mut server = ServerProcess::start(&["--drain-timeout", "0"]);
    let mut stream = long_text(&server);
    server.signal("-TERM");
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("shutting_down") && text.contains("[DONE]"), "{text}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_second_server_knows_what_the_first_has_read() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("states");
    let prompt =
        format!("{PROMPT} stormy night; the rain fell in torrents, and the wind swept up the streets. ")
            .repeat(2);
    let start = || ServerProcess::start(&["--cache-dir", cache.to_str().unwrap(), "--sequences", "2"]);
    let ask = |server: &ServerProcess| {
        let answer = server.ask("/v1/completions", &completion(&prompt, 12, 3));
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (text_of(&answer["choices"][0]), cached, answer["usage"]["prompt_tokens"].as_u64().unwrap())
    };
    let stop = |mut server: ServerProcess| {
        server.signal("-TERM");
        assert_eq!(server.wait().code(), Some(0));
    };
    let server = start();
    let (text, cached, tokens) = ask(&server);
    assert_eq!((&text, cached), (&run(&prompt, 12, 3), 0));
    stop(server);
    let server = start();
    assert_eq!(ask(&server), (text.clone(), tokens, tokens));
    stop(server);
    // Whatever is in the files, it is no more than a prompt that is read.
    let files = || -> BTreeMap<PathBuf, Vec<u8>> {
        let paths = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
        let named = |path: PathBuf| Some((path.clone(), std::fs::read(path).ok()?));
        paths.filter(|path| path.extension().is_some_and(|end| end != "partial")).filter_map(named).collect()
    };
    for (path, mut bytes) in files() {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    }
    let broken = files();
    let server = start();
    assert_eq!(ask(&server), (text.clone(), 0, tokens));
    // They are written anew once they are not in use, and stay when the server is killed.
    for _ in 0..600 {
        if files().iter().all(|(path, bytes)| broken.get(path) != Some(bytes)) {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    server.signal("-KILL");
    drop(server);
    assert_eq!(ask(&start()), (text, tokens, tokens));
}

#[test]
fn keys_are_asked_for() {
    let server = ServerProcess::start(&["--api-key", "s3cret"]);
    let get = |headers: &str| TestResponse::read(server.open("GET", "/v1/models", headers, ""));
    for wrong in
        ["", "Authorization: Bearer s3creT\r\n", "Authorization: s3cret\r\n", "Authorization: Bearer \r\n"]
    {
        assert_eq!(get(wrong).error(), (401, "invalid_api_key".into(), "-".into()), "{wrong}");
    }
    assert_eq!(get("Authorization: Bearer s3cret\r\n").status, 200);
    assert_eq!(server.get("/health").status, 200, "probes have no key");
}

#[test]
fn what_cannot_be_served_is_refused_at_the_start() {
    let serve = |args: &[&str]| {
        let mut serve = mlcc();
        serve.arg("serve").arg(artifact()).args(args);
        serve
    };
    let sum = [
        "MiB of weights + ",
        "MiB of scratch + 8 sequences of",
        "kept states of",
        " = ",
        // 256 MiB for requests and 64 for kept answers go first.
        "--memory less 320.0 MiB for requests and other models is 2.0 MiB",
    ];
    fails_with(&mut serve(&["--memory", "322MiB", "--sequences", "8", "--port", "0"]), &sum);
    let server = ServerProcess::start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    fails_with(&mut serve(&["--port", port]), &["cannot listen on 127.0.0.1", "--port"]);
    let message = failure(&mut serve(&["--template", "no-such-template", "--port", "0"]), 2);
    assert!(message.contains("no-such-template"), "{message}");
}

/// The sum of `inspect --resources` is the one that the server looks at: with one byte less it does not
/// start.
#[test]
fn inspect_tells_the_memory_that_a_server_asks_for() {
    let inspect = |args: &[&str]| {
        let mut inspect = mlcc();
        inspect.arg("inspect").arg(artifact()).arg("--resources").args(args);
        inspect
    };
    let report = |args: &[&str]| json(inspect(args).arg("--json"));
    let number = |report: &Value, name: &str| report[name].as_u64().unwrap();
    for more in [&["--sequences", "3"][..], &["--sequences", "40"]] {
        let found = report(more);
        let (need, limit) = (number(&found, "need_bytes"), number(&found, "limit_bytes"));
        assert!(
            0 < number(&found, "weights_bytes") && number(&found, "weights_bytes") < need && need < limit
        );
        let (enough, less) = (need.to_string(), (need - 1).to_string());
        ServerProcess::start(&[more, &["--memory", &enough]].concat());
        let mut serve = mlcc();
        serve.arg("serve").arg(artifact()).args(more).args(["--memory", &less, "--port", "0", "-t", "1"]);
        fails_with(&mut serve, &["--memory"]);
    }
    let (few, many) = (report(&["--sequences", "3"]), report(&[]));
    assert!(number(&many, "need_bytes") < number(&report(&["--cache-dir"]), "need_bytes"));
    assert_eq!(many["sequences"], 16);
    assert!(number(&few, "need_bytes") < number(&many, "need_bytes"));
    let mebibytes = number(&many, "limit_bytes").div_ceil(1 << 20);
    let amounts = json!({"cpu": "3", "memory": format!("{mebibytes}Mi")});
    let found = report(&["-t", "3"]);
    assert_eq!(found["resources"], json!({"requests": amounts, "limits": amounts}));
    let printed = text(&mut inspect(&["-t", "3"]));
    let (comment, block) = printed.split_once('\n').unwrap();
    assert!(comment.starts_with("# ") && comment.contains("16 sequences of"), "{comment}");
    let amounts = format!("    cpu: \"3\"\n    memory: \"{mebibytes}Mi\"\n");
    assert_eq!(block, format!("resources:\n  requests:\n{amounts}  limits:\n{amounts}"));
    failure(&mut inspect(&["--params"]), 2);
    let mut alone = mlcc();
    failure(alone.arg("inspect").arg(artifact()).args(["--sequences", "3"]), 2);
}

#[test]
fn what_flags_name_is_there_when_the_server_starts() {
    let folder = tempfile::tempdir().unwrap();
    let (missing, keys) = (folder.path().join("missing"), folder.path().join("keys"));
    let serve = |flag: &str, path: &std::path::Path| {
        let mut serve = mlcc();
        serve.arg("serve").arg(artifact()).args(["--port", "0", flag]).arg(path);
        serve
    };
    for flag in ["--models", "--lora-dir", "--api-key-file"] {
        fails_with(&mut serve(flag, &missing), &["missing"]);
    }
    std::fs::write(&keys, " \n\n").unwrap();
    serve("--api-key-file", &keys).assert().code(2);
    std::fs::write(&keys, "one\n two \n").unwrap();
    // It looks like an artifact, and is a folder that a request must not build.
    std::fs::create_dir_all(folder.path().join("models/x.so")).unwrap();
    std::fs::write(folder.path().join("models/x.so/config.json"), "{}").unwrap();
    let models = folder.path().join("models");
    let [keys, models] = [&keys, &models].map(|path| path.to_str().unwrap());
    let server =
        ServerProcess::start(&["--api-key-file", keys, "--models", models, "--allowed-host", "chat.example"]);
    assert_eq!(server.get("/v1/models").status, 401);
    let ask = |path: &str, key: &str, body: &str| {
        let method = if body.is_empty() { "GET" } else { "POST" };
        TestResponse::read(server.open(method, path, &format!("Authorization: Bearer {key}\r\n"), body))
    };
    assert_eq!((ask("/v1/models", "one", "").status, ask("/v1/models", "two", "").status), (200, 200));
    assert_eq!(ask("/v1/models", "three", "").status, 401);
    let unknown = ask("/models/load", "two", r#"{"model": "x"}"#);
    assert_eq!(unknown.error(), (404, "model_not_found".into(), "model".into()), "{}", unknown.body);
}
