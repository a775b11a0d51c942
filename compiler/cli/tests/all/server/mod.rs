//! A running `mlcc serve` and the little HTTP that its tests need.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::program::{books, mlcc, program};

/// The trained model in a scheme whose logits do not depend on what runs beside a text; built once per test program.
pub fn artifact() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let name = format!("serve-{}.so", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut build = mlcc();
        build
            .arg("build")
            .arg("-m")
            .arg(books())
            .args(["--quant", "q4i8", "--max-batch", "4", "-o"])
            .arg(&path);
        build.assert().success();
        path
    })
}

pub struct Server {
    child: Child,
    _stdout: BufReader<ChildStdout>,
    /// `127.0.0.1:PORT`.
    pub address: String,
    /// What the line of `--json` said.
    pub ready: Value,
}

impl Server {
    /// Serves [`artifact`] as `books`.
    pub fn start(args: &[&str]) -> Server {
        let mut command = program();
        command.arg("serve").arg(artifact()).args(["--port", "0", "--json", "--alias", "books", "-t", "1"]);
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
        assert_eq!(ready["event"], "ready");
        let url = ready["url"].as_str().unwrap();
        let address = url.strip_prefix("http://").unwrap().to_owned();
        Server { child, _stdout: stdout, address, ready }
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// A request that is sent but not answered yet.
    pub fn open(&self, method: &str, path: &str, headers: &str, body: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        BufReader::new(stream)
    }

    pub fn get(&self, path: &str) -> Answer {
        Answer::read(self.open("GET", path, "", ""))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::read(self.open("POST", path, "", &body.to_string()))
    }

    /// A request that must succeed.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    }

    /// The data of a stream, which must end with `[DONE]`.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(answer.head.contains("text/event-stream"), "{}", answer.head);
        events(&answer.body)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The data of server-sent events.
pub fn events(body: &str) -> Vec<Value> {
    let mut data: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{body}");
    data.into_iter().map(|text| serde_json::from_str(text).unwrap()).collect()
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn read(mut stream: BufReader<TcpStream>) -> Answer {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(stream.read_line(&mut head).unwrap() > 0, "the connection ended after {head:?}");
        }
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let chunked = head.contains("transfer-encoding: chunked");
        let body = if chunked { chunks(&mut stream) } else { rest(&mut stream) };
        Answer { status, head, body: String::from_utf8(body).unwrap() }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Code and param of an error, which has a message.
    pub fn error(&self) -> (u16, String, String) {
        let error = &self.json()["error"];
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"].is_string(), "{error}");
        let text = |name: &str| error[name].as_str().unwrap_or("-").to_owned();
        (self.status, text("code"), text("param"))
    }
}

fn rest(stream: &mut impl Read) -> Vec<u8> {
    let mut body = Vec::new();
    stream.read_to_end(&mut body).unwrap();
    body
}

fn chunks(stream: &mut impl BufRead) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let size = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|e| panic!("{e}: {line:?}"));
        let mut chunk = vec![0; size + 2];
        stream.read_exact(&mut chunk).unwrap();
        body.extend_from_slice(&chunk[..size]);
        if size == 0 {
            return body;
        }
    }
}
