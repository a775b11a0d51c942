//! Loaded models with their engines: the base of `Model`, `AsyncEngine` and `asgi` of the package.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use mlcc_engine::embedding::{EmbedOptions, EmbeddingError, EmbeddingModel};
use mlcc_engine::serving::{CancelGuard, EngineRequest, EventSink};
use mlcc_text::{SpecialTokens, TokenId, Tokenizer};
use mlcc_serve::{ServeOptions, ServedModel, ShutdownOutcome};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tokio::runtime::Runtime;

use crate::adapters::{self, AdapterSpec};
use crate::errors::{self, closed, invalid, kinds, without_gil};
use crate::exchange::{self, Answer, Exchange};
use crate::floats::Floats;
use crate::inspect::inspect;
use crate::load::{LoadSettings, LoadedModels, load, seconds};
use crate::mailbox::{Mailbox, Pending};
use crate::options;
use crate::process::ProcessOwned;
use crate::session::Session;
use crate::stream::{self, Stream, lock};

struct CoreInner {
    loaded: LoadedModels,
    /// The runtime of requests in the form of HTTP; started by the first one.
    runtime: OnceLock<Runtime>,
}

impl CoreInner {
    fn runtime(&self) -> PyResult<&Runtime> {
        if let Some(runtime) = self.runtime.get() {
            return Ok(runtime);
        }
        let made = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("mlcc-http")
            .enable_time()
            .build()?;
        // Another thread may have been faster.
        Ok(self.runtime.get_or_init(|| made))
    }

    fn hosted(&self) -> PyResult<Arc<ServedModel>> {
        self.loaded.application.model().ok_or_else(|| {
            invalid("this model is an embedding model and generates no text: use embed or rerank")
        })
    }

    /// The model with an adapter, or without.
    fn adapted(&self, adapter: Option<&str>) -> PyResult<Arc<ServedModel>> {
        let hosted = self.hosted()?;
        let Some(name) = adapter else { return Ok(hosted) };
        let models = self.loaded.application.models();
        let of_model = |other: &&Arc<ServedModel>| other.base_model() == Some(hosted.name.as_str());
        let mut adapters = models.iter().filter(of_model);
        if let Some(found) = adapters.clone().find(|other| other.name == name) {
            return Ok(Arc::clone(found));
        }
        let first = adapters.next().map(|first| first.name.clone());
        let known = adapters.fold(first, |all, other| all.map(|all| format!("{all}, {}", other.name)));
        let known = known.unwrap_or_else(|| "none".into());
        Err(errors::adapter(format!("there is no adapter {name:?}: the model has {known}")))
    }
}

impl Drop for CoreInner {
    fn drop(&mut self) {
        self.loaded.application.drain(Duration::ZERO);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// One or several loaded models; requests that name none mean the first.
#[pyclass(frozen, module = "mlcc._mlcc")]
pub struct Core {
    inner: ProcessOwned<Mutex<Option<Arc<CoreInner>>>>,
}

impl Core {
    fn inner(&self) -> PyResult<Arc<CoreInner>> {
        lock(self.inner.check()?).clone().ok_or_else(|| closed("model"))
    }

    /// Launches a text whose events go to `sink`.
    fn launch(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        options: &Bound<'_, PyDict>,
        sink: impl FnOnce() -> PyResult<EventSink>,
    ) -> PyResult<CancelGuard> {
        let inner = self.inner()?;
        let hosted = inner.adapted(options::adapter(options)?.as_deref())?;
        let request: EngineRequest = options::request(py, &hosted, prompt, options)?;
        let requests = vec![(request, sink()?)];
        let tickets = inner.loaded.application.launch(&hosted, requests).map_err(errors::launch)?;
        tickets.into_iter().next().ok_or_else(|| closed("model"))
    }

    fn with_tokenizer<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Tokenizer) -> PyResult<T> + Send,
    ) -> PyResult<T> {
        let inner = self.inner()?;
        without_gil(py, || match inner.loaded.application.model() {
            Some(hosted) => work(&hosted.tokenizer),
            None => {
                let done = inner.loaded.application.with_texts(|model| work(model.tokenizer()));
                done.unwrap_or_else(|| Err(closed("model")))
            }
        })
    }

    fn with_texts<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut EmbeddingModel) -> Result<T, EmbeddingError> + Send,
    ) -> PyResult<T> {
        let inner = self.inner()?;
        without_gil(py, || {
            let done = inner.loaded.application.with_texts(work);
            let missing =
                || invalid("this model generates text and is not an embedding model: build an embedding model");
            done.ok_or_else(missing)?.map_err(errors::texts)
        })
    }
}

/// A number of something of which there is at least one.
fn count(name: &str, found: Option<i64>, most: i64) -> PyResult<Option<usize>> {
    let wrong = |found: i64| invalid(format!("{name} is {found}, expected 1 to {most}"));
    let checked = found.map(|found| match (1..=most).contains(&found) {
        true => usize::try_from(found).map_err(|_| wrong(found)),
        false => Err(wrong(found)),
    });
    checked.transpose()
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (paths, *, adapters, threads, cpu_level, template, sequences, max_queue, memory, api_keys, body_limit, timeout, lora_dir))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords of Python")]
    fn new(
        py: Python<'_>,
        paths: Vec<(String, PathBuf)>,
        adapters: Vec<AdapterSpec>,
        threads: Option<i64>,
        cpu_level: Option<String>,
        template: Option<String>,
        sequences: Option<i64>,
        max_queue: i64,
        memory: Option<i64>,
        api_keys: Vec<String>,
        body_limit: i64,
        timeout: Option<f64>,
        lora_dir: Option<PathBuf>,
    ) -> PyResult<Core> {
        let bytes = |name, found| count(name, found, i64::MAX);
        let queue = usize::try_from(max_queue).ok().filter(|&queue| queue <= 65536);
        let queue = queue.ok_or_else(|| invalid(format!("max_queue is {max_queue}, expected 0 to 65536")))?;
        let serve = ServeOptions {
            sequences: count("sequences", sequences, 1024)?,
            max_queue: queue,
            memory: bytes("memory", memory)?.map(|bytes| bytes as u64),
            api_keys,
            lora_dir,
            body_limit: bytes("body_limit", Some(body_limit))?.unwrap_or(usize::MAX),
            timeout: timeout.map(|timeout| seconds("timeout", timeout)).transpose()?,
            ..ServeOptions::default()
        };
        let threads = count("threads", threads, 1024)?;
        let settings = LoadSettings { threads, cpu_level, template, adapters, serve };
        let loaded = without_gil(py, || load(&paths, &settings))?;
        let inner = Arc::new(CoreInner { loaded, runtime: OnceLock::new() });
        Ok(Core { inner: ProcessOwned::new(Mutex::new(Some(inner))) })
    }

    /// The pieces of a text.
    fn generate(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Stream> {
        let (sink, events) = stream::sink();
        Ok(Stream::new(events, self.launch(py, prompt, options, || Ok(sink))?))
    }

    /// The same, to a mailbox.
    fn post(
        &self,
        py: Python<'_>,
        mailbox: &Mailbox,
        key: u64,
        prompt: &Bound<'_, PyAny>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Pending> {
        let sink = || Ok(mailbox.sender(key)?.into_sink());
        Ok(Pending::new(self.launch(py, prompt, options, sink)?))
    }

    /// An HTTP request; waits for the head of its answer.
    fn request(
        &self,
        py: Python<'_>,
        method: &str,
        target: &str,
        headers: Vec<(Vec<u8>, Vec<u8>)>,
        body: Vec<u8>,
    ) -> PyResult<Answer> {
        let inner = self.inner()?;
        let request = exchange::request(method, target, &headers, body)?;
        Answer::wait(py, inner.runtime()?, inner.loaded.application.router(), request)
    }

    /// The same, to a mailbox.
    fn exchange(
        &self,
        mailbox: &Mailbox,
        key: u64,
        method: &str,
        target: &str,
        headers: Vec<(Vec<u8>, Vec<u8>)>,
        body: Vec<u8>,
    ) -> PyResult<Exchange> {
        let inner = self.inner()?;
        let request = exchange::request(method, target, &headers, body)?;
        let sender = mailbox.sender(key)?;
        Ok(Exchange::start(inner.runtime()?, inner.loaded.application.router(), request, sender))
    }

    /// `adapter`: the name of one of the model's.
    #[pyo3(signature = (adapter = None))]
    fn session(&self, py: Python<'_>, adapter: Option<String>) -> PyResult<Session> {
        let inner = self.inner()?;
        without_gil(py, || {
            let hosted = adapter.map(|name| inner.adapted(Some(&name))).transpose()?;
            let adapter = hosted.as_ref().and_then(|hosted| hosted.adapter.as_ref()?.handle());
            Session::new(&inner.loaded.model, adapter)
        })
    }

    /// Puts an adapter into a slot of the first model, under a name.
    fn load_adapter(&self, py: Python<'_>, name: String, folder: PathBuf, scale: f64) -> PyResult<()> {
        let inner = self.inner()?;
        without_gil(py, || {
            let adapter = adapters::read(&inner.loaded.model, &(name, folder, scale))?;
            inner.loaded.application.add_adapter(adapter).map_err(|error| errors::adapter(error.to_string()))
        })
    }

    /// Unloads an adapter. Texts and sessions that have it go on with it.
    fn unload_adapter(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let inner = self.inner()?;
        let gone = || inner.loaded.application.remove_adapter(name);
        without_gil(py, || gone().map_err(|error| errors::adapter(error.to_string())))
    }

    /// Names of the adapters, in the order in which they came.
    fn adapters(&self) -> PyResult<Vec<String>> {
        let models = self.inner()?.loaded.application.models();
        Ok(models
            .iter()
            .filter(|hosted| hosted.adapter.is_some())
            .map(|hosted| hosted.name.clone())
            .collect())
    }

    /// `special`: with the tokens that a prompt begins with.
    fn tokenize(&self, py: Python<'_>, text: &str, special: bool) -> PyResult<Vec<TokenId>> {
        self.with_tokenizer(py, |tokenizer| {
            let ids = if special { tokenizer.encode_prompt(text) } else { tokenizer.encode(text) };
            ids.map_err(|error| invalid(error.to_string()))
        })
    }

    /// `special`: with the names of control tokens.
    fn detokenize(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, special: bool) -> PyResult<String> {
        let ids: Vec<TokenId> = options::value(ids, "ids", "a sequence of token ids")?;
        self.with_tokenizer(py, |tokenizer| {
            if let Some(id) = ids.iter().find(|&&id| tokenizer.bytes_of(id).is_none()) {
                return Err(invalid(format!("the tokenizer has no token {id}")));
            }
            let special = if special { SpecialTokens::Keep } else { SpecialTokens::Skip };
            Ok(tokenizer.decode(&ids, special))
        })
    }

    /// A row of numbers for each text.
    fn embed(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        prompt: Option<String>,
        prompt_text: Option<String>,
        dim: Option<i64>,
    ) -> PyResult<Floats> {
        let dim = count("dim", dim, i64::MAX)?;
        let vectors = self.with_texts(py, |model| {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            model.embed(
                &texts,
                &EmbedOptions { prompt: prompt.as_deref(), prompt_text: prompt_text.as_deref(), dim },
            )
        })?;
        Ok(Floats::many(vectors.values, Some(texts.len())))
    }

    /// A number for each document.
    fn rerank(&self, py: Python<'_>, query: &str, documents: Vec<String>) -> PyResult<Floats> {
        let scores = self.with_texts(py, |model| {
            let documents: Vec<&str> = documents.iter().map(String::as_str).collect();
            model.rerank(query, &documents)
        })?;
        Ok(Floats::many(scores, None))
    }

    /// JSON.
    fn inspect(&self) -> PyResult<String> {
        Ok(inspect(&self.inner()?.loaded.model).to_string())
    }

    /// Takes no more texts and waits for those that run; true if none had to be ended after `timeout`
    /// seconds.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let (inner, timeout) = (self.inner()?, seconds("timeout", timeout)?);
        without_gil(py, || Ok(inner.loaded.application.drain(timeout) == ShutdownOutcome::Drained))
    }

    /// Texts that run or wait.
    fn running(&self) -> PyResult<usize> {
        let inner = self.inner()?;
        // Models of texts have no engine.
        let Some(hosted) = inner.loaded.application.model() else { return Ok(0) };
        if !hosted.engine.is_running() {
            return Err(kinds::Closed::new_err("the engine has ended"));
        }
        let stats = hosted.engine.stats();
        Ok(stats.running + stats.waiting)
    }

    /// True if `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        lock(&self.inner).is_none()
    }

    /// Ends all texts. Sessions stay, and the weights with them, until they are closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.check()?;
        without_gil(py, || {
            if let Some(inner) = lock(inner).take() {
                inner.loaded.application.drain(Duration::ZERO);
            }
            Ok(())
        })
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(kinds::Error::new_err("a loaded model cannot be pickled: load it where it is needed"))
    }
}
