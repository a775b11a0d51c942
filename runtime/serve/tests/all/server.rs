//! A server in a thread.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::{LocalMachine, SamplingParams};
use mlcc_serve::{
    ModelLibrary, ModelSetup, NoLibrary, ReadyModel, ServeError, ServeOptions, ShutdownOutcome, serve,
};
use mlcc_text::ChatTemplate;

use crate::http::TestClient;
pub use crate::http::TestResponse;
use crate::toy::ToyModel;
use crate::vocabularies::world;

pub fn options() -> ServeOptions {
    ServeOptions {
        max_queue: 16,
        body_limit: 1 << 20,
        drain_timeout: Duration::from_secs(60),
        ..ServeOptions::default()
    }
}

pub struct TestServer {
    client: TestClient,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<ShutdownOutcome, ServeError>>>,
}

impl Deref for TestServer {
    type Target = TestClient;

    fn deref(&self) -> &TestClient {
        &self.client
    }
}

/// The model to serve; the token 0 ends a text.
pub fn served(template: Option<&str>) -> ModelSetup {
    let template = template.map(|text| ChatTemplate::from_jinja(text, &LocalMachine).unwrap());
    ModelSetup {
        drafter: None,
        draft: None,
        adapters: Vec::new(),
        reads_adapters: None,
        executor: "toy".into(),
        tokenizer: world(&[b"ab"]),
        format: template.map(|template| ChatFormat::Template(Box::new(template))),
        sampling: SamplingParams::default(),
        eos: vec![0],
    }
}

/// The toy, to be served under a name.
pub fn named(name: &str, toy: &ToyModel, sequences: usize, template: Option<&str>) -> (String, ReadyModel) {
    (name.to_owned(), ReadyModel::from_runner(toy.clone(), served(template), sequences))
}

impl TestServer {
    /// The toy, with a chat template.
    pub fn start(
        toy: &ToyModel,
        sequences: usize,
        template: Option<&str>,
        options: ServeOptions,
    ) -> TestServer {
        TestServer::with(vec![named("toy", toy, sequences, template)], Box::new(NoLibrary), options)
    }

    pub fn with(
        models: Vec<(String, ReadyModel)>,
        library: Box<dyn ModelLibrary>,
        options: ServeOptions,
    ) -> TestServer {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, address) = mpsc::channel();
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let ready =
                |address: SocketAddr, _: &[(String, usize)]| sender.send(address.to_string()).unwrap();
            serve(models, library, &options, &stopping, ready)
        });
        let address = address.recv().expect("the server is ready");
        TestServer { client: TestClient { address }, stop, thread: Some(thread) }
    }

    /// Ends it in order.
    pub fn stop(&mut self) -> ShutdownOutcome {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap().unwrap()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Asks until `done`; panics after a while.
pub fn until(mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(120), "it never came");
        std::thread::sleep(Duration::from_millis(5));
    }
}
