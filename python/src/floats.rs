//! Numbers that Python reads where they lie.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use mlcc_runtime::OwnedLogits;
use pyo3::exceptions::{PyBufferError, PyIndexError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

enum FloatStorage {
    Logits(OwnedLogits),
    Many(Vec<f32>),
}

/// Numbers of 32 bits that do not change: a read-only buffer of one or two dimensions, so `numpy.asarray(x)`
/// and `memoryview(x)` copy nothing. They stay as they are while the session goes on.
#[pyclass(frozen, module = "mlcc", sequence)]
pub struct Floats {
    held: Arc<FloatStorage>,
    rows: Option<usize>,
}

impl Floats {
    pub fn logits(logits: OwnedLogits) -> Floats {
        Floats { held: Arc::new(FloatStorage::Logits(logits)), rows: None }
    }

    pub fn many(values: Vec<f32>, rows: Option<usize>) -> Floats {
        Floats { held: Arc::new(FloatStorage::Many(values)), rows }
    }

    /// The same numbers once more.
    pub fn share(&self) -> Floats {
        Floats { held: Arc::clone(&self.held), rows: self.rows }
    }

    /// The logits, if they have no other owner.
    pub fn into_spare(self) -> Result<OwnedLogits, Floats> {
        match Arc::try_unwrap(self.held) {
            Ok(FloatStorage::Logits(logits)) => Ok(logits),
            Ok(other) => Err(Floats { held: Arc::new(other), rows: self.rows }),
            Err(held) => Err(Floats { held, rows: self.rows }),
        }
    }

    pub fn values(&self) -> &[f32] {
        match self.held.as_ref() {
            FloatStorage::Logits(logits) => logits,
            FloatStorage::Many(values) => values,
        }
    }

    fn width(&self) -> usize {
        self.rows.map_or(self.values().len(), |rows| self.values().len() / rows.max(1))
    }
}

/// Sizes and steps of a view, which live as long as it.
struct ViewLayout {
    shape: [ffi::Py_ssize_t; 2],
    strides: [ffi::Py_ssize_t; 2],
}

const FORMAT: &CStr = c"f";

#[pymethods]
impl Floats {
    /// (numbers,) or (rows, numbers).
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.rows {
            None => (self.width(),).into_pyobject(py).map(Bound::into_any),
            Some(rows) => (rows, self.width()).into_pyobject(py).map(Bound::into_any),
        }
    }

    /// The numbers as a list, or a list of rows.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        match self.rows {
            None => PyList::new(py, self.values()),
            Some(_) => {
                let rows: Vec<&[f32]> = self.values().chunks_exact(self.width().max(1)).collect();
                PyList::new(py, rows)
            }
        }
    }

    /// The index of the largest number, the first of equal ones: for logits the most probable token.
    fn argmax(&self) -> Option<usize> {
        let values = self.values();
        (0..values.len()).reduce(|best, at| if values[at] > values[best] { at } else { best })
    }

    fn __len__(&self) -> usize {
        self.rows.unwrap_or(self.values().len())
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyAny>> {
        let length = self.__len__();
        let at = if index < 0 { index.checked_add_unsigned(length) } else { Some(index) };
        let at = at.and_then(|at| usize::try_from(at).ok()).filter(|&at| at < length);
        let at = at.ok_or_else(|| PyIndexError::new_err(format!("index {index} of {length}")))?;
        if self.rows.is_none() {
            return Ok(self.values()[at].into_pyobject(py)?.into_any());
        }
        let width = self.width();
        Ok(PyList::new(py, &self.values()[at * width..(at + 1) * width])?.into_any())
    }

    fn __repr__(&self) -> String {
        match self.rows {
            None => format!("<mlcc.Floats ({},)>", self.width()),
            Some(rows) => format!("<mlcc.Floats ({rows}, {})>", self.width()),
        }
    }

    /// SAFETY: the interpreter gives a `view` to fill, and calls `__releasebuffer__` with it once.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("logits and vectors are read-only: copy them to change them"));
        }
        let this = slf.get();
        let values = this.values();
        let size = size_of::<f32>() as ffi::Py_ssize_t;
        let (rows, width) = (this.rows.unwrap_or(0) as ffi::Py_ssize_t, this.width() as ffi::Py_ssize_t);
        let layout = match this.rows {
            None => ViewLayout { shape: [width, 0], strides: [size, 0] },
            Some(_) => ViewLayout { shape: [rows, width], strides: [width * size, size] },
        };
        let layout = Box::into_raw(Box::new(layout));
        let with = |flag: c_int| flags & flag == flag;
        // SAFETY: `view` is there to be filled. The numbers live and stay as long as `obj`, the layout until
        // `__releasebuffer__`.
        unsafe {
            (*view).buf = values.as_ptr().cast_mut().cast::<c_void>();
            (*view).len = size_of_val(values) as ffi::Py_ssize_t;
            (*view).readonly = 1;
            (*view).itemsize = size;
            (*view).format =
                if with(ffi::PyBUF_FORMAT) { FORMAT.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).ndim = if this.rows.is_some() { 2 } else { 1 };
            (*view).shape = if with(ffi::PyBUF_ND) { (*layout).shape.as_mut_ptr() } else { ptr::null_mut() };
            (*view).strides =
                if with(ffi::PyBUF_STRIDES) { (*layout).strides.as_mut_ptr() } else { ptr::null_mut() };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = layout.cast();
            (*view).obj = slf.into_any().into_ptr();
        }
        Ok(())
    }

    /// SAFETY: `view` was filled by `__getbuffer__`.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `internal` is the box that was leaked there, and the layout is not read any more.
        drop(unsafe { Box::from_raw((*view).internal.cast::<ViewLayout>()) });
    }
}
