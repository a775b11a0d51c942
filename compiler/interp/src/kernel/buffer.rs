//! Buffers handed to kernels: raw little-endian bytes with an element type, and conversions for tests and
//! callers.

use super::cell::{self, RegisterCell};
use mlcc_ir::types::DType;

/// A flat array as a kernel sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelBuffer {
    pub dtype: DType,
    pub bytes: Vec<u8>,
    /// The start of the buffer: bytes after a place with the largest alignment that a kernel may ask for.
    pub address: u64,
}

impl KernelBuffer {
    /// Bytes as they are.
    pub fn new(dtype: DType, bytes: Vec<u8>) -> KernelBuffer {
        KernelBuffer { dtype, bytes, address: 0 }
    }
    /// The same at another place.
    pub fn at_address(self, address: u64) -> KernelBuffer {
        KernelBuffer { address, ..self }
    }
    /// `len` elements of value zero; a packed type has no elements and gives an empty buffer.
    pub fn zeros(dtype: DType, len: usize) -> KernelBuffer {
        KernelBuffer::new(dtype, vec![0; len * dtype.bytes().unwrap_or(0)])
    }
    pub fn from_f32(values: &[f32]) -> KernelBuffer {
        KernelBuffer::from_floats(DType::F32, values)
    }
    pub fn from_i32(values: &[i32]) -> KernelBuffer {
        KernelBuffer::new(DType::I32, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
    pub fn from_i64(values: &[i64]) -> KernelBuffer {
        KernelBuffer::new(DType::I64, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
    pub fn from_i8(values: &[i8]) -> KernelBuffer {
        KernelBuffer::new(DType::I8, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
    pub fn from_u8(values: &[u8]) -> KernelBuffer {
        KernelBuffer::new(DType::U8, values.to_vec())
    }
    /// Values converted to `dtype` as the kernel IR's cast does (floats rounded to nearest even, integers
    /// saturated).
    pub fn from_floats(dtype: DType, values: &[f32]) -> KernelBuffer {
        let mut buffer = KernelBuffer::zeros(dtype, values.len());
        for (i, &v) in values.iter().enumerate() {
            buffer.store_cell(i, cell::cast(DType::F32, dtype, cell::of_f32(v)));
        }
        buffer
    }
    /// Integers wrapped to `dtype`, or converted if it is a float type.
    pub fn from_ints(dtype: DType, values: &[i64]) -> KernelBuffer {
        let mut buffer = KernelBuffer::zeros(dtype, values.len());
        for (i, &v) in values.iter().enumerate() {
            buffer.store_cell(i, cell::cast(DType::I64, dtype, v as RegisterCell));
        }
        buffer
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.dtype.bytes().map_or(0, |b| self.bytes.len() / b)
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All elements as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        (0..self.len()).map(|i| cell::to_f32(cell::cast(self.dtype, DType::F32, self.get(i)))).collect()
    }
    /// All elements as i64 (floats truncated).
    pub fn to_i64(&self) -> Vec<i64> {
        (0..self.len()).map(|i| cell::cast(self.dtype, DType::I64, self.get(i)) as i64).collect()
    }
    pub(crate) fn get(&self, index: usize) -> RegisterCell {
        cell::read(self.dtype, &self.bytes, index)
    }
    pub(crate) fn store_cell(&mut self, index: usize, value: RegisterCell) {
        cell::write(self.dtype, &mut self.bytes, index, value);
    }
}
