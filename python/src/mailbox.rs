//! Messages of our threads to an event loop.
//!
//! They put a message into a list, and a byte into a pipe when the list was empty; the event loop waits for
//! the pipe as it waits for sockets. So no thread here takes the GIL, and however many texts get a token in a
//! step, the loop wakes up about once.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use mlcc_engine::serving::{CancelGuard, EventSink, SequenceEvent};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::errors::{failure, kinds};
use crate::pieces::{Finished, Piece};
use crate::process::ProcessOwned;
use crate::stream::lock;

/// Something about the text or request of a number.
pub enum MailboxItem {
    Event(SequenceEvent),
    /// Status and headers of an answer.
    Head(u16, Vec<(Vec<u8>, Vec<u8>)>),
    Body(Bytes),
    /// The end of an answer, or of a text whose engine has ended.
    End,
    Lost,
}

struct MailboxInner {
    items: Mutex<Vec<(u64, MailboxItem)>>,
    reader: PipeReader,
    writer: PipeWriter,
}

/// The mailbox of one event loop.
#[pyclass(frozen, module = "mlcc._mlcc")]
pub struct Mailbox {
    inner: ProcessOwned<Arc<MailboxInner>>,
}

/// A writer to a mailbox, under its number.
pub struct MailboxSender {
    inner: Arc<MailboxInner>,
    key: u64,
    over: bool,
}

impl MailboxSender {
    pub fn send(&mut self, item: MailboxItem) {
        self.over |= matches!(
            &item,
            MailboxItem::End | MailboxItem::Event(SequenceEvent::Finished(_) | SequenceEvent::Failed(_))
        );
        let mut items = lock(&self.inner.items);
        items.push((self.key, item));
        if items.len() == 1 {
            // There is one byte in the pipe at most, so this does not wait; the other end lives as long as
            // this one.
            let _ = (&self.inner.writer).write_all(&[0]);
        }
    }

    /// Sends the events of a text.
    pub fn into_sink(mut self) -> EventSink {
        Box::new(move |event| {
            self.send(MailboxItem::Event(event));
            ControlFlow::Continue(())
        })
    }
}

impl Drop for MailboxSender {
    fn drop(&mut self) {
        if !self.over {
            self.send(MailboxItem::Lost);
        }
    }
}

impl Mailbox {
    pub fn sender(&self, key: u64) -> PyResult<MailboxSender> {
        Ok(MailboxSender { inner: Arc::clone(self.inner.check()?), key, over: false })
    }
}

#[pymethods]
impl Mailbox {
    #[new]
    fn new() -> PyResult<Mailbox> {
        let (reader, writer) = std::io::pipe()?;
        let inner = Arc::new(MailboxInner { items: Mutex::new(Vec::new()), reader, writer });
        Ok(Mailbox { inner: ProcessOwned::new(inner) })
    }

    /// Readable while there are items.
    fn fileno(&self) -> i32 {
        self.inner.reader.as_raw_fd()
    }

    /// All items, each with the number of its text or request.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let inner = self.inner.check()?;
        let items = {
            let mut items = lock(&inner.items);
            if !items.is_empty() {
                // The byte of the first item.
                (&inner.reader).read_exact(&mut [0])?;
            }
            std::mem::take(&mut *items)
        };
        let list = PyList::empty(py);
        for (key, item) in items {
            list.append((key, to_python(py, item)?))?;
        }
        Ok(list)
    }
}

/// A piece, an end, an exception, the head of an answer, or bytes of it; `None` where an answer ends.
fn to_python(py: Python<'_>, item: MailboxItem) -> PyResult<Bound<'_, PyAny>> {
    Ok(match item {
        MailboxItem::Event(SequenceEvent::PromptLogprobs(_)) => py.NotImplemented().into_bound(py),
        MailboxItem::Event(SequenceEvent::Delta(piece)) => Bound::new(py, Piece::new(piece))?.into_any(),
        MailboxItem::Event(SequenceEvent::Finished(finished)) => {
            Bound::new(py, Finished::from(&finished))?.into_any()
        }
        MailboxItem::Event(SequenceEvent::Failed(why)) => {
            failure(&why).into_value(py).into_bound(py).into_any()
        }
        MailboxItem::Head(status, headers) => {
            let pair = |(name, value): &(Vec<u8>, Vec<u8>)| (PyBytes::new(py, name), PyBytes::new(py, value));
            let headers: Vec<_> = headers.iter().map(pair).collect();
            (status, headers).into_pyobject(py)?.into_any()
        }
        MailboxItem::Body(bytes) => PyBytes::new(py, &bytes).into_any(),
        MailboxItem::End => py.None().into_bound(py),
        MailboxItem::Lost => {
            let error = kinds::Closed::new_err("the model was closed while the text was written");
            error.into_value(py).into_bound(py).into_any()
        }
    })
}

/// A text whose events go to a mailbox.
#[pyclass(frozen, module = "mlcc._mlcc")]
pub struct Pending {
    ticket: CancelGuard,
}

impl Pending {
    pub fn new(ticket: CancelGuard) -> Pending {
        Pending { ticket }
    }
}

#[pymethods]
impl Pending {
    /// Ends the text at the next step.
    fn cancel(&self) {
        self.ticket.cancel();
    }
}
