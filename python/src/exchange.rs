//! HTTP requests to the server's routes, without a connection.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::BodyExt;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tower::ServiceExt;

use crate::errors::{invalid, kinds, without_gil};
use crate::mailbox::{MailboxItem, MailboxSender};
use crate::process::ProcessOwned;
use crate::stream::lock;

/// Pieces of an answer that may wait for a slow reader; then its texts wait in the server, which gives them
/// up at last.
const AHEAD: usize = 16;
/// The interval of checks for signals.
const LOOK: Duration = Duration::from_millis(20);

type HeaderList = Vec<(Vec<u8>, Vec<u8>)>;

/// A request as Python gives it. Its body is whole.
pub fn request(method: &str, target: &str, headers: &HeaderList, body: Vec<u8>) -> PyResult<Request<Body>> {
    let bad = |what: &str| invalid(format!("{what} of the request is no HTTP"));
    let mut request = Request::new(Body::from(body));
    *request.method_mut() = Method::from_bytes(method.as_bytes()).map_err(|_| bad("the method"))?;
    *request.uri_mut() = target.parse::<Uri>().map_err(|_| bad("the path"))?;
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name).map_err(|_| bad("a header's name"))?;
        let value = HeaderValue::from_bytes(value).map_err(|_| bad("a header"))?;
        request.headers_mut().append(name, value);
    }
    Ok(request)
}

/// The receiver of an answer.
trait AnswerSink: Send + 'static {
    fn send(&mut self, item: MailboxItem);
}

impl AnswerSink for MailboxSender {
    fn send(&mut self, item: MailboxItem) {
        MailboxSender::send(self, item);
    }
}

impl AnswerSink for mpsc::Sender<MailboxItem> {
    fn send(&mut self, item: MailboxItem) {
        // A reader that has closed the answer needs no more of it.
        let _ = mpsc::Sender::send(self, item);
    }
}

/// Answers a request: its head, its body piece by piece, its end.
async fn send_answer(
    router: Router,
    request: Request<Body>,
    mut outlet: impl AnswerSink,
    ahead: Arc<Semaphore>,
) {
    let Ok(response) = router.oneshot(request).await;
    let (head, mut body) = response.into_parts();
    let pair = |(name, value): (&HeaderName, &HeaderValue)| (name.as_str().into(), value.as_bytes().into());
    outlet.send(MailboxItem::Head(head.status.as_u16(), head.headers.iter().map(pair).collect()));
    while let Some(frame) = body.frame().await {
        // A body that breaks is one that was lost.
        let Ok(frame) = frame else { return };
        let Ok(data) = frame.into_data() else { continue };
        match ahead.acquire().await {
            Ok(permit) => permit.forget(),
            Err(_) => return,
        }
        outlet.send(MailboxItem::Body(data));
    }
    outlet.send(MailboxItem::End);
}

fn start(
    runtime: &Runtime,
    router: Router,
    request: Request<Body>,
    outlet: impl AnswerSink,
) -> (AbortHandle, Arc<Semaphore>) {
    let ahead = Arc::new(Semaphore::new(AHEAD));
    let task = runtime.spawn(send_answer(router, request, outlet, Arc::clone(&ahead)));
    (task.abort_handle(), ahead)
}

/// A request whose answer goes to a mailbox.
#[pyclass(frozen, module = "mlcc._mlcc")]
pub struct Exchange {
    task: AbortHandle,
    ahead: Arc<Semaphore>,
}

impl Exchange {
    pub fn start(
        runtime: &Runtime,
        router: Router,
        request: Request<Body>,
        sender: MailboxSender,
    ) -> Exchange {
        let (task, ahead) = start(runtime, router, request, sender);
        Exchange { task, ahead }
    }
}

#[pymethods]
impl Exchange {
    /// A piece of the answer's body is on its way: there may be one more.
    fn sent(&self) {
        self.ahead.add_permits(1);
    }

    /// The client has left: its texts end at the next step.
    fn cancel(&self) {
        self.task.abort();
    }
}

/// An answer to a thread of Python: the bytes of its body, piece by piece.
#[pyclass(frozen, module = "mlcc._mlcc")]
pub struct Answer {
    status: AtomicU16,
    items: ProcessOwned<Mutex<Option<mpsc::Receiver<MailboxItem>>>>,
    task: AbortHandle,
    ahead: Arc<Semaphore>,
}

impl Answer {
    /// Waits for the head.
    pub fn wait(
        py: Python<'_>,
        runtime: &Runtime,
        router: Router,
        request: Request<Body>,
    ) -> PyResult<Answer> {
        let (sender, items) = mpsc::channel();
        let (task, ahead) = start(runtime, router, request, sender);
        let (status, items) = (AtomicU16::new(0), ProcessOwned::new(Mutex::new(Some(items))));
        let answer = Answer { status, items, task, ahead };
        match answer.next(py)? {
            Some(MailboxItem::Head(status, _)) => answer.status.store(status, Ordering::Relaxed),
            _ => return Err(kinds::InternalError::new_err("the server gave no answer")),
        }
        Ok(answer)
    }

    fn next(&self, py: Python<'_>) -> PyResult<Option<MailboxItem>> {
        let items = self.items.check()?;
        loop {
            let found = without_gil(py, || Ok(lock(items).as_ref().map(|items| items.recv_timeout(LOOK))))?;
            match found {
                None => return Ok(None),
                Some(Ok(item)) => return Ok(Some(item)),
                Some(Err(RecvTimeoutError::Disconnected)) => {
                    self.close();
                    return Err(kinds::Closed::new_err("the model was closed while the answer was written"));
                }
                Some(Err(RecvTimeoutError::Timeout)) => {
                    if let Err(signal) = py.check_signals() {
                        self.close();
                        return Err(signal);
                    }
                }
            }
        }
    }
}

#[pymethods]
impl Answer {
    #[getter]
    fn status(&self) -> u16 {
        self.status.load(Ordering::Relaxed)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        match self.next(py)? {
            Some(MailboxItem::Body(bytes)) => {
                self.ahead.add_permits(1);
                Ok(Some(to_py_bytes(py, &bytes)))
            }
            _ => {
                self.close();
                Ok(None)
            }
        }
    }

    /// Ends its texts.
    fn close(&self) {
        self.task.abort();
        drop(lock(&self.items).take());
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if lock(&self.items).is_some() {
            self.task.abort();
        }
    }
}

fn to_py_bytes<'py>(py: Python<'py>, bytes: &Bytes) -> Bound<'py, PyBytes> {
    PyBytes::new(py, bytes)
}
