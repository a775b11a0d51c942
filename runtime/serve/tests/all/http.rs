//! The little HTTP that the tests of the server need; those of `mlcc serve` use it too.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::Value;

/// Asks one server.
#[derive(Debug, Clone)]
pub struct TestClient {
    /// `127.0.0.1:PORT`.
    pub address: String,
}

impl TestClient {
    /// A request that is sent but not answered yet.
    pub fn open(&self, method: &str, path: &str, headers: &str, body: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        BufReader::new(stream)
    }

    pub fn get(&self, path: &str) -> TestResponse {
        TestResponse::read(self.open("GET", path, "", ""))
    }

    pub fn post(&self, path: &str, body: &Value) -> TestResponse {
        TestResponse::read(self.open("POST", path, "", &body.to_string()))
    }

    /// A request that must succeed.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
        answer.json()
    }

    /// The data of a stream, which must end with `[DONE]`.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
        answer.events()
    }
}

#[derive(Debug)]
pub struct TestResponse {
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    pub body: String,
}

impl TestResponse {
    pub fn read(mut stream: BufReader<TcpStream>) -> TestResponse {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(stream.read_line(&mut head).unwrap() > 0, "the connection ended after {head:?}");
        }
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = Vec::new();
        if head.contains("transfer-encoding: chunked") {
            while let Some(chunk) = chunk(&mut stream) {
                body.extend(chunk);
            }
        } else {
            stream.read_to_end(&mut body).unwrap();
        }
        TestResponse { status, head, body: String::from_utf8(body).unwrap() }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The value of a header, whose name is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// Status, code and param of an error, which has a message.
    pub fn error(&self) -> (u16, String, String) {
        let error = &self.json()["error"];
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string(), "{error}");
        let text = |name: &str| error[name].as_str().unwrap_or("-").to_owned();
        (self.status, text("code"), text("param"))
    }

    /// The data of a stream that ends with `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert!(self.head.contains("text/event-stream"), "{}", self.head);
        events(&self.body)
    }
}

/// The data of server-sent events, of which the last is `[DONE]`.
pub fn events(body: &str) -> Vec<Value> {
    let mut data: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{body}");
    data.into_iter().map(|text| serde_json::from_str(text).unwrap()).collect()
}

fn chunk(stream: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let size = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    let mut chunk = vec![0; size + 2];
    stream.read_exact(&mut chunk).unwrap();
    chunk.truncate(size);
    (size > 0).then_some(chunk)
}
