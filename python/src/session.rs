//! A sequence in Python's hands.

use std::path::PathBuf;
use std::sync::Mutex;

use mlcc_text::TokenId;
use mlcc_runtime::{LoadedAdapter, Model, OwnedLogits};
use pyo3::prelude::*;

use crate::errors::{closed, invalid, runtime, without_gil};
use crate::floats::Floats;
use crate::options::value;
use crate::process::ProcessOwned;
use crate::stream::lock;

/// Logits that were given out and may come back, beside the last ones.
const OLD: usize = 2;

struct SessionState {
    session: mlcc_runtime::Session,
    /// Logits of the last position, if tokens were computed.
    last: Option<Floats>,
    /// Memory that is written to again once it has no other owner.
    recycled: Vec<Floats>,
}

impl SessionState {
    fn new(session: mlcc_runtime::Session, last: Option<Floats>) -> SessionState {
        SessionState { session, last, recycled: Vec::new() }
    }

    /// The logits of the step that has just been done.
    fn logits(&mut self) -> PyResult<Floats> {
        let spare = self.spare();
        let logits = Floats::logits(self.session.take_logits(spare).map_err(runtime)?);
        if let Some(last) = self.last.replace(logits.share()) {
            self.recycled.push(last);
            if self.recycled.len() > OLD {
                self.recycled.remove(0);
            }
        }
        Ok(logits)
    }

    fn spare(&mut self) -> Option<OwnedLogits> {
        let mut spare = None;
        for floats in std::mem::take(&mut self.recycled) {
            match (spare.is_none(), floats) {
                (true, floats) => match floats.into_spare() {
                    Ok(logits) => spare = Some(logits),
                    Err(shared) => self.recycled.push(shared),
                },
                (false, floats) => self.recycled.push(floats),
            }
        }
        spare
    }
}

/// A sequence: tokens go in, logits come out. Calls of several threads wait for each other.
#[pyclass(frozen, module = "mlcc")]
pub struct Session {
    state: ProcessOwned<Mutex<Option<SessionState>>>,
}

impl Session {
    pub fn new(model: &Model, adapter: Option<&LoadedAdapter>) -> PyResult<Session> {
        let mut session = model.session().map_err(runtime)?;
        session.set_adapter(adapter).map_err(runtime)?;
        Ok(Self::from_state(SessionState::new(session, None)))
    }

    fn from_state(state: SessionState) -> Session {
        Session { state: ProcessOwned::new(Mutex::new(Some(state))) }
    }

    /// Works on the state without the GIL.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut SessionState) -> PyResult<T> + Send,
    ) -> PyResult<T> {
        let state = self.state.check()?;
        without_gil(py, || work(lock(state).as_mut().ok_or_else(|| closed("session"))?))
    }
}

#[pymethods]
impl Session {
    /// Computes tokens, at least one; the logits after the last one, or with `all` a row after each.
    #[pyo3(signature = (tokens, *, all = false))]
    fn prefill(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, all: bool) -> PyResult<Floats> {
        let tokens: Vec<TokenId> = value(tokens, "tokens", "a sequence of token ids")?;
        self.with(py, |state| {
            if !all {
                state.session.prefill(&tokens).map_err(runtime)?;
                return state.logits();
            }
            let values = state.session.prefill_logits(&tokens).map_err(runtime)?.to_vec();
            state.logits()?;
            Ok(Floats::many(values, Some(tokens.len())))
        })
    }

    /// Computes one token; the logits after it.
    fn decode(&self, py: Python<'_>, token: &Bound<'_, PyAny>) -> PyResult<Floats> {
        let token: TokenId = value(token, "token", "a token id")?;
        self.with(py, |state| {
            state.session.decode(token).map_err(runtime)?;
            state.logits()
        })
    }

    /// The logits of the last position; None before the first token, and after going back.
    #[getter]
    fn logits(&self, py: Python<'_>) -> PyResult<Option<Floats>> {
        self.with(py, |state| Ok(state.last.as_ref().map(Floats::share)))
    }

    /// Tokens that were computed.
    #[getter]
    fn past(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |state| Ok(state.session.past()))
    }

    /// The name of the adapter that it goes through, or None.
    #[getter]
    fn adapter(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |state| Ok(state.session.adapter().map(|adapter| adapter.name().to_owned())))
    }

    /// Goes back to the first `past` tokens.
    fn truncate(&self, py: Python<'_>, past: &Bound<'_, PyAny>) -> PyResult<()> {
        let past: u64 = value(past, "past", "a number of tokens")?;
        self.with(py, |state| {
            let seen = state.session.past();
            state.session.truncate(past).map_err(runtime)?;
            if past != seen {
                state.last = None;
            }
            Ok(())
        })
    }

    /// Forgets everything.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |state| {
            state.last = None;
            state.session.reset().map_err(runtime)
        })
    }

    /// A second session with the same past; pages of caches are shared until one of the two writes to them.
    fn fork(&self, py: Python<'_>) -> PyResult<Session> {
        self.with(py, |state| {
            let twin = state.session.fork().map_err(runtime)?;
            Ok(Session::from_state(SessionState::new(twin, state.last.as_ref().map(Floats::share))))
        })
    }

    /// Writes the state to a file (not the logits: compute a token after loading).
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |state| state.session.save_state(&path).map_err(runtime))
    }

    /// Replaces the state by that of a file of `save`, of the same model.
    fn load(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |state| {
            state.session.load_state(&path).map_err(runtime)?;
            state.last = None;
            Ok(())
        })
    }

    /// Bytes: `planned_state`, `state`, `scratch`, `token` (what one more token adds).
    fn memory(&self, py: Python<'_>) -> PyResult<std::collections::BTreeMap<&'static str, u64>> {
        self.with(py, |state| {
            let memory = state.session.memory();
            Ok([
                ("planned_state", memory.planned_state),
                ("state", memory.state),
                ("scratch", memory.scratch),
                ("token", memory.bytes_per_token),
            ]
            .into())
        })
    }

    /// Gives its memory back; logits that were taken stay.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.check()?;
        without_gil(py, || {
            drop(lock(state).take());
            Ok(())
        })
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid("a session cannot be pickled: save it to a file"))
    }
}
