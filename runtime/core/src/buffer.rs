//! Zeroed memory with a chosen alignment; refusal is an error, not an abort.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::{Error, Result};

/// Alignment that the allocator gives to zeroed memory without writing the zeros itself.
const FRESH: usize = 16;

/// Owned bytes, allocated once.
pub struct AlignedBuffer {
    /// Inside of `block`, aligned as asked for.
    ptr: NonNull<u8>,
    len: usize,
    align: usize,
    block: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned by this value alone; `&AlignedBuffer` gives shared reads only.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// `bytes` zero bytes; `align` is a power of two. (Large pieces come from fresh pages that cost nothing
    /// until they are touched.)
    pub fn zeroed(what: &'static str, bytes: u64, align: u64) -> Result<Self> {
        let refuse = || Error::OutOfMemory { what, bytes };
        let len = usize::try_from(bytes).map_err(|_| refuse())?;
        let align = usize::try_from(align).map_err(|_| refuse())?;
        if !align.is_power_of_two() {
            return Err(refuse());
        }
        // With a larger alignment the allocator would clear the pages, that is, touch all of them.
        let more = align.saturating_sub(FRESH);
        let size = len.max(1).checked_add(more).ok_or_else(refuse)?;
        let layout = Layout::from_size_align(size, FRESH).map_err(|_| refuse())?;
        // SAFETY: the layout's size is not zero.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refuse)?;
        let offset = block.addr().get().next_multiple_of(align) - block.addr().get();
        // SAFETY: the block is aligned to FRESH, so the next multiple of `align` is at most `more` bytes
        // away.
        let ptr = unsafe { block.add(offset) };
        Ok(Self { ptr, len, align, block, layout })
    }

    /// `len` zero floats.
    pub fn floats(what: &'static str, len: u64) -> Result<Self> {
        let bytes = len.checked_mul(4).ok_or(Error::OutOfMemory { what, bytes: u64::MAX })?;
        Self::zeroed(what, bytes, mlcc_abi::BUFFER_ALIGN as u64)
    }

    /// `len` zero integers of 32 bits.
    pub fn integers(what: &'static str, len: u64) -> Result<Self> {
        Self::floats(what, len)
    }

    /// Copies `values` to the start of a buffer that has room for them. The buffer comes from
    /// [`AlignedBuffer::integers`].
    pub fn copy_from(&mut self, values: &[i32]) -> &[i32] {
        // SAFETY: aligned for i32, every bit pattern is an i32, bounds as in `bytes_mut`.
        let room: &mut [i32] =
            unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len / 4) };
        let held = &mut room[..values.len()];
        held.copy_from_slice(values);
        held
    }

    /// Copies like [`AlignedBuffer::copy_from`], with zeros behind the values: `len` integers in all.
    pub fn copy_padded(&mut self, len: usize, values: &[i32]) -> &[i32] {
        self.copy_from(values);
        // SAFETY: as in `copy_from`.
        let room: &mut [i32] =
            unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len / 4) };
        room[values.len()..len].fill(0);
        &room[..len]
    }

    /// The start of the buffer; a writer has to make sure that there is no other user of the bytes.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised (zeroed) bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// The content as floats. The buffer comes from [`AlignedBuffer::floats`] (any buffer is at least
    /// 4-aligned otherwise the result is empty).
    pub fn floats_mut(&mut self) -> &mut [f32] {
        if self.layout.align() < 4 {
            return &mut [];
        }
        // SAFETY: aligned for f32, every bit pattern is an f32 and every f32 four bytes, bounds as in
        // `bytes_mut`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len / 4) }
    }

    pub fn as_floats(&self) -> &[f32] {
        if self.align < 4 {
            return &[];
        }
        // SAFETY: aligned for f32, every bit pattern is an f32, bounds as in `bytes`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.len / 4) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.block.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_and_zero() {
        let mut b = AlignedBuffer::zeroed("test", 100, 4096).unwrap();
        assert_eq!(b.as_mut_ptr() as usize % 4096, 0);
        assert!(b.bytes().iter().all(|&x| x == 0));
        b.bytes_mut()[99] = 7;
        assert_eq!((b.len(), b.bytes()[99]), (100, 7));
        assert_eq!(AlignedBuffer::floats("test", 3).unwrap().as_floats(), [0.0; 3]);
        assert_eq!(AlignedBuffer::zeroed("test", 0, 64).unwrap().len(), 0);
    }

    /// Callers' tokens lie anywhere, those of an entry point do not.
    #[test]
    fn held_integers_are_aligned() {
        let mut b = AlignedBuffer::integers("test", 5).unwrap();
        let tokens = [7, 8, 9, 10, 11];
        for from in 0..tokens.len() {
            let held = b.copy_from(&tokens[from..]);
            assert_eq!((held, held.as_ptr() as usize % mlcc_abi::BUFFER_ALIGN), (&tokens[from..], 0));
        }
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(matches!(AlignedBuffer::zeroed("test", u64::MAX, 64), Err(Error::OutOfMemory { .. })));
        assert!(matches!(AlignedBuffer::floats("test", u64::MAX), Err(Error::OutOfMemory { .. })));
        assert!(matches!(AlignedBuffer::zeroed("test", 1 << 62, 64), Err(Error::OutOfMemory { .. })));
    }
}
