//! A text on its way to a thread of Python.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mlcc_engine::FinishReason;
use mlcc_engine::serving::{CancelGuard, EventSink, SequenceEvent};
use pyo3::prelude::*;

use crate::errors::{failure, kinds, without_gil};
use crate::pieces::{Finished, Piece};
use crate::process::ProcessOwned;

/// The interval of checks for signals while a text has no new tokens.
const LOOK: Duration = Duration::from_millis(20);

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Data behind our locks is valid at any time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pieces of a text. It ends when it is closed, dropped, or its iteration is left by an exception.
#[pyclass(frozen, module = "mlcc")]
pub struct Stream {
    running: ProcessOwned<Mutex<Option<RunningText>>>,
    finished: Mutex<Option<Py<Finished>>>,
}

struct RunningText {
    events: Receiver<SequenceEvent>,
    /// Dropping it ends the text.
    _ticket: CancelGuard,
}

/// The receiver of the events of a text.
pub fn sink() -> (EventSink, Receiver<SequenceEvent>) {
    let (sender, events): (Sender<SequenceEvent>, _) = channel();
    let sink: EventSink = Box::new(move |event| match sender.send(event) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    });
    (sink, events)
}

impl Stream {
    pub fn new(events: Receiver<SequenceEvent>, ticket: CancelGuard) -> Stream {
        let running = RunningText { events, _ticket: ticket };
        Stream { running: ProcessOwned::new(Mutex::new(Some(running))), finished: Mutex::new(None) }
    }

    /// The next event; `None` when the text has ended.
    fn event(&self, py: Python<'_>) -> PyResult<Option<SequenceEvent>> {
        let running = self.running.check()?;
        loop {
            let found = without_gil(py, || {
                let running = lock(running);
                Ok(running.as_ref().map(|running| running.events.recv_timeout(LOOK)))
            })?;
            match found {
                None => return Ok(None),
                Some(Ok(event)) => return Ok(Some(event)),
                Some(Err(RecvTimeoutError::Disconnected)) => {
                    self.close(py)?;
                    return Err(kinds::Closed::new_err("the model was closed while the text was written"));
                }
                Some(Err(RecvTimeoutError::Timeout)) => {
                    if let Err(signal) = py.check_signals() {
                        self.close(py)?;
                        return Err(signal);
                    }
                }
            }
        }
    }
}

#[pymethods]
impl Stream {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Piece>> {
        loop {
            match self.event(py)? {
                None => return Ok(None),
                Some(SequenceEvent::PromptLogprobs(_)) => {}
                Some(SequenceEvent::Delta(piece)) => return Ok(Some(Piece::new(piece))),
                Some(SequenceEvent::Failed(why)) => {
                    self.close(py)?;
                    return Err(failure(&why));
                }
                Some(SequenceEvent::Finished(finished)) => {
                    // Only the engine's end cancels a text that still has a reader.
                    let lost = finished.reason == FinishReason::Cancelled && lock(&self.running).is_some();
                    *lock(&self.finished) = Some(Py::new(py, Finished::from(&finished))?);
                    self.close(py)?;
                    if lost {
                        return Err(kinds::Closed::new_err(
                            "the model was closed while the text was written",
                        ));
                    }
                    return Ok(None);
                }
            }
        }
    }

    /// Ends the text at the next step. Earlier text is not read any more.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running.check()?;
        without_gil(py, || {
            drop(lock(running).take());
            Ok(())
        })
    }

    /// The outcome of the text, once it has ended by itself.
    #[getter]
    fn finished(&self, py: Python<'_>) -> Option<Py<Finished>> {
        lock(&self.finished).as_ref().map(|finished| finished.clone_ref(py))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}
