//! Requests changed at random, to every route: each is answered, none with a 5xx, and the server goes on.
//! `MLCC_FUZZ_RUNS` makes it longer; a failure prints the request.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};

use serde_json::{Value, json};

use crate::seeds::seeds;
use crate::server::{TestResponse, TestServer, options, until};
use crate::toy::ToyModel;

const TEMPLATE: &str = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '' }}<call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}";

/// SplitMix64, as a source of choices.
struct ChoiceSource(u64);

impl ChoiceSource {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % below.max(1) as u64) as usize
    }

    fn of<'t, T>(&mut self, list: &'t [T]) -> &'t T {
        &list[self.next(list.len())]
    }
}

fn runs(usual: usize) -> usize {
    std::env::var("MLCC_FUZZ_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

fn server() -> TestServer {
    TestServer::start(&ToyModel::new(false, Some(500)), 8, Some(TEMPLATE), options())
}

/// Values that a reader may not expect.
fn strange() -> Vec<Value> {
    let deep = (0..100).fold(json!([]), |inner, _| json!([inner]));
    let deep_object =
        (0..100).fold(json!({}), |inner, _| json!({"type": "object", "properties": {"a": inner}}));
    vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(129),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(u32::MAX),
        json!(1e308),
        json!(-1e-308),
        json!(0.5),
        json!(""),
        json!("a"),
        json!("\u{0}\u{7f}"),
        json!("é\u{1d11e}\u{202e}\u{fffd}"),
        json!("x".repeat(3000)),
        json!("-1"),
        json!("{\"a\": [1"),
        json!("(a*)*b|[^\\d]{3,9}$"),
        json!("start: \"a\" start | start"),
        json!([]),
        json!({}),
        json!([[], {}, null, "a", 1]),
        json!([[98, 99], "ab"]),
        json!(vec![98; 400]),
        json!(vec!["a"; 200]),
        json!({"": "", "type": 7, "role": [], "content": {}, "function": null}),
        json!({"$ref": "#"}),
        json!({"type": "array", "items": {"$ref": "#/items"}, "minItems": 4_000_000_000u32}),
        json!({"enum": []}),
        json!({"allOf": [{"type": "string"}, {"type": "number"}]}),
        deep,
        deep_object,
    ]
}

/// JSON pointers of all parts of a value.
fn parts(value: &Value, here: &str, found: &mut Vec<String>) {
    found.push(here.to_owned());
    match value {
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(n, item)| parts(item, &format!("{here}/{n}"), found))
        }
        Value::Object(map) => {
            let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
            map.iter().for_each(|(name, item)| parts(item, &format!("{here}/{}", escaped(name)), found));
        }
        _ => {}
    }
}

/// One part, by its pointer.
fn part(value: &Value, random: &mut ChoiceSource) -> String {
    let mut found = Vec::new();
    parts(value, "", &mut found);
    // The whole is seldom interesting.
    found[if found.len() > 1 { 1 + random.next(found.len() - 1) } else { 0 }].clone()
}

/// Changes the JSON: other values, other names, parts of other requests, parts more or less.
fn change(body: &mut Value, others: &[Value], strange: &[Value], random: &mut ChoiceSource) {
    let place = part(body, random);
    let (kind, other, index) = (random.next(8), random.of(others).clone(), random.next(1000));
    let Some(target) = body.pointer_mut(&place) else { return };
    match (kind, &mut *target) {
        (0..3, _) => *target = random.of(strange).clone(),
        (3, _) => *target = other.pointer(&part(&other, random)).cloned().unwrap_or_default(),
        (4, Value::Object(map)) if !map.is_empty() => {
            let name = map.keys().nth(index % map.len()).cloned().unwrap_or_default();
            let value = map.remove(&name).unwrap_or_default();
            if index % 2 == 0 {
                map.insert(format!("{name}{}", random.of(&["_", "\"", "s", "é"])), value);
            }
        }
        (4, Value::Array(items)) if !items.is_empty() => drop(items.remove(index % items.len())),
        (5, Value::Array(items)) => *items = items.iter().cycle().take(items.len() * 20).cloned().collect(),
        (5, Value::Object(map)) => {
            if let (Some(more), true) = (other.as_object(), index % 2 == 0) {
                map.extend(more.clone());
            }
        }
        (6, Value::Number(number)) => {
            let near = number.as_i64().unwrap_or(0).saturating_add(random.next(5) as i64 - 2);
            *target = near.into();
        }
        (6, Value::String(text)) => *text = text.repeat(1 + index % 30),
        _ => *target = json!([target.take()]),
    }
}

/// Changes the bytes: flips, others, pieces away, twice or elsewhere, the end away.
fn garble(bytes: &mut Vec<u8>, random: &mut ChoiceSource) {
    if bytes.is_empty() {
        return bytes.push(random.next(256) as u8);
    }
    let at = random.next(bytes.len());
    let end = (at + 1 + random.next(16)).min(bytes.len());
    match random.next(6) {
        0 => bytes[at] ^= 1 << random.next(8),
        1 => bytes[at] = *random.of(b"\0\xff\"{}[],:\\9e-. \r\n%\x80"),
        2 => drop(bytes.drain(at..end)),
        3 => {
            let piece = bytes[at..end].to_vec();
            let to = random.next(bytes.len());
            bytes.splice(to..to, piece);
        }
        4 => bytes[at..end].fill(random.next(256) as u8),
        _ => bytes.truncate(at),
    }
}

/// The answer is one, and no failure of the server but where the toy was told to fail.
fn check(answer: &TestResponse, request: &str) {
    let told = answer.body.contains("told to panic") || answer.body.contains("is refused");
    assert!(answer.status < 500 || told, "{} {:.500}\nto {request:.2000}", answer.status, answer.body);
    assert!(!answer.body.contains("internal_error") || told, "{:.500}\nto {request:.2000}", answer.body);
    if answer.status >= 400 {
        let error = &answer.json()["error"];
        // Ollama's API has the message alone.
        let message = if error.is_string() { error } else { &error["message"] };
        assert!(message.as_str().is_some_and(|text| !text.is_empty()), "{error:.500}\nto {request:.2000}");
    }
}

fn post(server: &TestServer, path: &str, body: &[u8]) -> TestResponse {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    // A refused request may be answered before it was read.
    let _ = stream.write_all(&[head.as_bytes(), body].concat());
    TestResponse::read(BufReader::new(stream))
}

/// After all of these nothing runs, and a text is the same as before.
fn goes_on(server: &TestServer, before: &Value) {
    until(|| {
        let slots = server.get("/slots").json();
        slots.as_array().unwrap().iter().all(|slot| slot["is_processing"] == false)
    });
    assert_eq!(&text(server), before);
    assert_eq!(server.get("/health").status, 200);
}

fn text(server: &TestServer) -> Value {
    let answer = server
        .ask("/v1/completions", &json!({"prompt": "ab", "max_tokens": 20, "seed": 3, "ignore_eos": true}));
    answer["choices"][0].clone()
}

#[test]
fn changed_bodies_are_answered() {
    let (server, strange) = (server(), strange());
    let before = text(&server);
    let all = seeds();
    let mut tried = BTreeMap::<&str, usize>::new();
    for (path, seed) in &all {
        let answer = server.post(path, seed);
        // The toy makes no vectors, has no tokens around a gap, has no library, and does not let clients load
        // adapters.
        let right: &[u16] =
            if ["embed", "rerank", "/models/", "infill"].iter().any(|part| path.contains(part)) {
                &[400, 404]
            } else if path.ends_with("_lora_adapter") {
                &[403]
            } else {
                &[200]
            };
        assert!(right.contains(&answer.status), "{path} {seed}: {}", answer.body);
    }
    let bodies: Vec<Value> = all.iter().map(|(_, seed)| seed.clone()).collect();
    for case in 0..runs(2500) {
        let mut random = ChoiceSource(case as u64);
        let (path, seed) = random.of(&all);
        let mut body = seed.clone();
        for _ in 0..random.next(4) {
            // Only of those that go where they do: a request that takes the toy away would leave nothing to
            // try.
            let others = if path.contains("/models/") { std::slice::from_ref(seed) } else { &bodies };
            change(&mut body, others, &strange, &mut random);
        }
        let mut bytes = body.to_string().into_bytes();
        if random.next(3) == 0 {
            (0..=random.next(3)).for_each(|_| garble(&mut bytes, &mut random));
        }
        let answer = post(&server, path, &bytes);
        check(&answer, &format!("case {case}, {path}: {}", String::from_utf8_lossy(&bytes)));
        *tried.entry(path).or_default() += 1;
    }
    let description = server.get("/openapi.json").json();
    for (path, operations) in description["paths"].as_object().unwrap() {
        let takes = operations.get("post").is_some()
            && !description["paths"].get(format!("/v1{path}")).is_some_and(Value::is_object);
        assert!(!takes || tried.contains_key(path.as_str()), "{path} has no seed");
    }
    goes_on(&server, &before);
}

#[test]
fn changed_heads_end_nothing() {
    let server = server();
    let before = text(&server);
    let paths = [
        "/v1/models/toy",
        "/v1/models/%ff",
        "/responses/resp_1",
        "/props?model=toy",
        "/slots?model=%20",
        "/metrics",
        "/",
        "/openapi.json",
    ];
    let body = r#"{"prompt": "a", "max_tokens": 2}"#;
    for case in 0..runs(1000) {
        let mut random = ChoiceSource(1 << 40 | case as u64);
        let mut request = match random.next(3) {
            0 => format!("GET {} HTTP/1.1\r\nHost: localhost\r\nx-request-id: abc\r\nConnection: close\r\n\r\n", random.of(&paths)),
            1 => format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer k\r\nContent-Length: {}\r\n\r\n{body}", body.len()),
            _ => format!("POST /completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len()),
        }
        .into_bytes();
        (0..=random.next(6)).for_each(|_| garble(&mut request, &mut random));
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let _ = stream.write_all(&request);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let line = String::from_utf8_lossy(&answer[..answer.len().min(12)]).into_owned();
        assert!(
            !line.starts_with("HTTP/1.1 5"),
            "case {case}: {line}, to {}",
            String::from_utf8_lossy(&request)
        );
    }
    goes_on(&server, &before);
}
