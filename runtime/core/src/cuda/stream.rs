//! A stream of its own, and copies on it.

use std::ptr::null_mut;
use std::sync::Arc;

use super::device::CudaContext;
use super::driver::{self, CudaDriver, DevicePtr, DriverHandle};
use crate::Result;

pub(crate) struct CudaStream {
    handle: DriverHandle,
    context: Arc<CudaContext>,
}

// SAFETY: a stream may be used from any thread that makes its context current, as every operation does first,
// and the driver API is thread-safe.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let driver = context.make_current()?;
        let mut handle = null_mut();
        // SAFETY: a place for the result.
        let status = unsafe { (driver.functions.stream_create)(&mut handle, driver::STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", status)?;
        Ok(Self { handle, context: Arc::clone(context) })
    }

    pub fn handle(&self) -> DriverHandle {
        self.handle
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes the context current.
    pub fn make_current(&self) -> Result<&CudaDriver> {
        self.context.make_current()
    }

    /// Until nothing runs on it. An error is one of something that ran, or the context is lost.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.make_current()?;
        // SAFETY: the stream is alive.
        driver.check("cuStreamSynchronize", unsafe { (driver.functions.stream_wait)(self.handle) })
    }

    /// Copies to the device. Pageable memory is staged before the call returns, so `from` may go away.
    pub fn send(&self, to: DevicePtr, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let driver = self.make_current()?;
        // SAFETY: callers pass a device range of that size.
        let status =
            unsafe { (driver.functions.to_device)(to, from.as_ptr().cast(), from.len(), self.handle) };
        driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies from the device and waits.
    pub fn receive(&self, from: DevicePtr, to: &mut [u8]) -> Result<()> {
        let driver = self.make_current()?;
        if !to.is_empty() {
            // SAFETY: the device range has at least the length of `to`, which lives until the wait below is
            // over.
            let status =
                unsafe { (driver.functions.to_host)(to.as_mut_ptr().cast(), from, to.len(), self.handle) };
            driver.check("cuMemcpyDtoHAsync", status)?;
        }
        self.synchronize()
    }

    /// Copies on the device, between ranges that have no byte in common.
    pub fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let driver = self.make_current()?;
        // SAFETY: callers pass device ranges of that size.
        let status = unsafe { (driver.functions.on_device)(to, from, bytes as usize, self.handle) };
        driver.check("cuMemcpyDtoDAsync", status)
    }

    /// Fills four-byte words.
    pub fn fill(&self, at: DevicePtr, word: u32, words: usize) -> Result<()> {
        let driver = self.make_current()?;
        // SAFETY: callers pass a device range of that size.
        driver
            .check("cuMemsetD32Async", unsafe { (driver.functions.fill_words)(at, word, words, self.handle) })
    }

    /// Fills bytes with zeros.
    pub fn clear(&self, at: DevicePtr, bytes: usize) -> Result<()> {
        let driver = self.make_current()?;
        // SAFETY: callers pass a device range of that size.
        driver.check("cuMemsetD8Async", unsafe { (driver.functions.fill_bytes)(at, 0, bytes, self.handle) })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if let Ok(driver) = self.make_current() {
            // SAFETY: created in `new`; owners wait for it before.
            unsafe { (driver.functions.stream_destroy)(self.handle) };
        }
    }
}
