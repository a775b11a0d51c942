//! One tensor being read: as bytes, or as f32 in pieces of any size.

use super::bytes::FileBytes;
use super::gguf::view::GgufView;
use super::merged::MergedReader;
use super::packed::PackedReader;
use super::stored_type::to_floats;
use super::{RandomTensor, StoredType, TensorInfo};
use crate::error::CheckpointError;
use std::borrow::Cow;

/// A tensor opened by [`super::Checkpoint::read`]: row-major, little-endian.
#[derive(Debug)]
pub struct TensorData<'a> {
    info: &'a TensorInfo,
    content: TensorContent<'a>,
}

#[derive(Debug)]
pub(super) enum TensorContent<'a> {
    /// From a file; owned when the elements had to be gathered.
    Mapped {
        file: &'a FileBytes,
        start: usize,
        bytes: Cow<'a, [u8]>,
    },
    /// Rows that are read through a view.
    Viewed {
        file: &'a FileBytes,
        view: &'a GgufView,
    },
    /// Codes with scales.
    Packed(PackedReader<'a>),
    /// A tensor with adapters.
    Merged(MergedReader<'a>),
    /// Made when the tensor was opened.
    Values(Vec<f32>),
    Random(&'a RandomTensor),
}

impl Drop for TensorData<'_> {
    fn drop(&mut self) {
        match &self.content {
            TensorContent::Mapped { file, start, bytes } => file.release_pages(*start, bytes.len()),
            TensorContent::Viewed { file, view } => file.release_pages(view.start, view.bytes()),
            TensorContent::Packed(_)
            | TensorContent::Merged(_)
            | TensorContent::Values(_)
            | TensorContent::Random(_) => {}
        }
    }
}

impl<'a> TensorData<'a> {
    pub(super) fn new(info: &'a TensorInfo, content: TensorContent<'a>) -> TensorData<'a> {
        TensorData { info, content }
    }

    pub fn info(&self) -> &'a TensorInfo {
        self.info
    }
    pub fn dtype(&self) -> StoredType {
        self.info.dtype
    }
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }
    pub fn elements(&self) -> usize {
        self.info.elements()
    }

    /// The elements as they are stored; `None` for weights that are random, in blocks, or changed while they are read.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.content {
            TensorContent::Mapped { bytes, .. } => Some(bytes),
            TensorContent::Viewed { .. }
            | TensorContent::Packed(_)
            | TensorContent::Merged(_)
            | TensorContent::Values(_)
            | TensorContent::Random(_) => None,
        }
    }

    /// The blocks of row `row` (along the last axis) as a block format stores them; `None` where there are none.
    pub fn row_blocks(&self, row: usize) -> Option<&[u8]> {
        let width = self.info.shape.last().copied().unwrap_or(1);
        self.elements().checked_div(width).filter(|&rows| row < rows)?;
        match &self.content {
            TensorContent::Viewed { file, view } => view.row_blocks(file, row),
            TensorContent::Mapped { .. }
            | TensorContent::Packed(_)
            | TensorContent::Merged(_)
            | TensorContent::Values(_)
            | TensorContent::Random(_) => None,
        }
    }

    /// Elements `start .. start + out.len()` in row-major order.
    pub fn read_f32_into(&self, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let elements = self.elements();
        let end = start.saturating_add(out.len());
        if end > elements {
            let tensor = self.info.name.clone();
            return Err(CheckpointError::OutOfRange { tensor, start, end, elements });
        }
        self.require_float()?;
        match &self.content {
            TensorContent::Random(random) => random.fill(start, out),
            TensorContent::Values(values) => out.copy_from_slice(&values[start..end]),
            TensorContent::Viewed { file, view } => view.read(file, start, out),
            TensorContent::Packed(reader) => reader.read(start, out)?,
            TensorContent::Merged(reader) => reader.read(start, out)?,
            TensorContent::Mapped { bytes, .. } => {
                let size = self.info.dtype.size();
                to_floats(self.info.dtype, &bytes[start * size..end * size], out);
            }
        }
        Ok(())
    }

    /// The whole tensor.
    pub fn to_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        self.require_float()?;
        let mut values = vec![0.0; self.elements()];
        self.read_f32_into(0, &mut values)?;
        Ok(values)
    }

    fn require_float(&self) -> Result<(), CheckpointError> {
        match self.info.dtype.is_weight() {
            true => Ok(()),
            false => {
                let stored = self.info.dtype.name();
                Err(CheckpointError::NotFloat { tensor: self.info.name.clone(), stored })
            }
        }
    }
}

/// Row-major copy of a strided tensor. The reader has checked that the last element lies inside the file.
pub(super) fn gather_strided(
    file: &FileBytes,
    start: usize,
    shape: &[usize],
    strides: &[usize],
    size: usize,
) -> Vec<u8> {
    let elements: usize = shape.iter().product();
    let mut bytes = Vec::with_capacity(elements * size);
    let mut index = vec![0usize; shape.len()];
    for _ in 0..elements {
        let offset: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        bytes.extend_from_slice(file.slice(start + offset * size, size));
        for (i, &dim) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < dim {
                break;
            }
            *i = 0;
        }
    }
    bytes
}
