//! Memory of the host that a stream reads or writes later.

/// A range of the host's memory.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    at: usize,
    bytes: usize,
}

impl HostRange {
    /// # Safety
    /// The range has to stay readable and writable until the stream's work is done or the range is pinned
    /// memory of this driver, and it must not be touched elsewhere while the stream is waited for.
    pub unsafe fn new(at: usize, bytes: usize) -> Self {
        Self { at, bytes }
    }

    pub fn begin(&self) -> usize {
        self.at
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn read(&self) -> Vec<u8> {
        // SAFETY: promised in `new`.
        unsafe { std::slice::from_raw_parts(self.at as *const u8, self.bytes) }.to_vec()
    }

    /// `data` has the length of the range.
    pub fn write(&self, data: &[u8]) {
        assert_eq!(data.len(), self.bytes);
        // SAFETY: promised in `new`.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.at as *mut u8, self.bytes) };
    }
}
