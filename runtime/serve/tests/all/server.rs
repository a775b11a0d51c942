//! A server in a thread, and the little HTTP that its tests need.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::{ChatTemplate, SamplingParams};
use mlcc_serve::{ServeError, ServeOptions, Served, Stopped, serve_step};
use serde_json::Value;

use crate::toy::Toy;
use crate::vocabularies::world;

pub fn options() -> ServeOptions {
    ServeOptions {
        host: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port: 0,
        sequences: None,
        max_queue: 16,
        memory: None,
        api_key: None,
        body_limit: 1 << 20,
        timeout: None,
        drain_timeout: Duration::from_secs(60),
    }
}

pub struct Server {
    /// `127.0.0.1:PORT`.
    pub address: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Stopped, ServeError>>>,
}

/// What is served; the token 0 ends a text.
pub fn served(template: Option<&str>) -> Served {
    let template = template.map(|text| ChatTemplate::from_jinja(text).unwrap());
    Served {
        drafter: None,
        executor: "toy".into(),
        tokenizer: world(&[b"ab"]),
        format: template.map(|template| ChatFormat::Template(Box::new(template))),
        sampling: SamplingParams::default(),
        eos: vec![0],
        name: "toy".into(),
    }
}

impl Server {
    /// The toy, with a chat template.
    pub fn start(toy: &Toy, sequences: usize, template: Option<&str>, options: ServeOptions) -> Server {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, address) = mpsc::channel();
        let (toy, served, stopping) = (toy.clone(), served(template), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let ready = |address: std::net::SocketAddr, _| sender.send(address.to_string()).unwrap();
            serve_step(toy, served, sequences, &options, &stopping, ready)
        });
        let address = address.recv().expect("the server is ready");
        Server { address, stop, thread: Some(thread) }
    }

    /// Ends it in order.
    pub fn stop(&mut self) -> Stopped {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap().unwrap()
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
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
        answer.json()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
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
        let mut body = Vec::new();
        if head.contains("transfer-encoding: chunked") {
            while let Some(chunk) = chunk(&mut stream) {
                body.extend(chunk);
            }
        } else {
            stream.read_to_end(&mut body).unwrap();
        }
        Answer { status, head, body: String::from_utf8(body).unwrap() }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
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
        let mut data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.into_iter().map(|text| serde_json::from_str(text).unwrap()).collect()
    }
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

/// Asks until `done`; panics after a while.
pub fn until(mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(120), "it never came");
        std::thread::sleep(Duration::from_millis(5));
    }
}
