//! Weights on their way to the device: a piece is copied to pinned memory while the one before it goes up.
//! From pages of the file the driver would copy every piece to memory of its own first, and do nothing else
//! meanwhile.

use std::ptr::null_mut;
use std::sync::Arc;

use super::device::{CudaContext, DeviceBuffer};
use super::driver::{self, DevicePtr, DriverHandle};
use super::stream::CudaStream;
use crate::{Error, Result};

/// Bytes of a piece: long enough for the bus, and two of them are little beside any model.
const PIECE: usize = 4 << 20;
const WEIGHTS: &str = "the weights on the GPU";
const STAGED: &str = "the weights on their way to the GPU";

/// The weights in device memory; waits until all are there.
pub(super) fn upload(context: &Arc<CudaContext>, weights: &[u8]) -> Result<DeviceBuffer> {
    let buffer = DeviceBuffer::new(context, WEIGHTS, weights.len() as u64).map_err(|error| match error {
        Error::OutOfMemory { bytes, .. } => Error::WeightsTooLarge { bytes },
        other => other,
    })?;
    let stream = CudaStream::new(context)?;
    let bytes = PIECE.min(weights.len());
    let mut staged = [StagingBuffer::new(context, bytes), StagingBuffer::new(context, bytes)];
    let sent = match &mut staged {
        [Ok(first), Ok(second)] => send_chunks(&stream, buffer.ptr(), weights, [first, second]),
        // Without pinned memory, which a system may limit, the driver copies as well as it can.
        _ => weights
            .chunks(PIECE)
            .zip(0..)
            .try_for_each(|(piece, number)| stream.send(buffer.ptr() + number * PIECE as u64, piece)),
    };
    // Also after an error: all that is copied from and to goes away when this returns, and not before.
    stream.synchronize().and(sent)?;
    Ok(buffer)
}

/// Starts to send the pieces, by both buffers in turns.
fn send_chunks(
    stream: &CudaStream,
    to: DevicePtr,
    weights: &[u8],
    staged: [&mut StagingBuffer; 2],
) -> Result<()> {
    let [mut this, mut other] = staged;
    for (piece, number) in weights.chunks(PIECE).zip(0..) {
        this.send(stream, to + number * PIECE as u64, piece)?;
        std::mem::swap(&mut this, &mut other);
    }
    Ok(())
}

/// Pinned memory for a piece.
struct StagingBuffer {
    ptr: *mut u8,
    bytes: usize,
    /// Behind the last copy that reads it.
    sent: DriverHandle,
    context: Arc<CudaContext>,
}

impl StagingBuffer {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        let driver = context.make_current()?;
        let (mut ptr, mut sent) = (null_mut(), null_mut());
        // SAFETY: a place for the result.
        let status = unsafe { (driver.functions.event_create)(&mut sent, driver::EVENT_WITHOUT_TIME) };
        driver.check("cuEventCreate", status)?;
        // SAFETY: a place for the result.
        let status = unsafe { (driver.functions.host_alloc)(&mut ptr, bytes.max(1), 0) };
        // With no memory it is dropped with its event.
        let staged = Self { ptr: ptr.cast(), bytes, sent, context: Arc::clone(context) };
        driver.check_memory("cuMemHostAlloc", status, STAGED, bytes as u64)?;
        Ok(staged)
    }

    /// Sends a piece of at most its length, once the last one has been sent.
    fn send(&mut self, stream: &CudaStream, to: DevicePtr, piece: &[u8]) -> Result<()> {
        let driver = self.context.make_current()?;
        // SAFETY: an event that was not recorded yet is over at once.
        driver.check("cuEventSynchronize", unsafe { (driver.functions.event_wait)(self.sent) })?;
        let piece = &piece[..piece.len().min(self.bytes)];
        // SAFETY: the memory has that length and nothing reads it before the copy that is started here; the
        // event that is recorded behind the copy keeps it unchanged until then.
        let status = unsafe {
            self.ptr.copy_from_nonoverlapping(piece.as_ptr(), piece.len());
            (driver.functions.to_device)(to, self.ptr.cast(), piece.len(), stream.handle())
        };
        driver.check("cuMemcpyHtoDAsync", status)?;
        // SAFETY: both are alive.
        driver.check("cuEventRecord", unsafe { (driver.functions.event_record)(self.sent, stream.handle()) })
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        let Ok(driver) = self.context.make_current() else { return };
        // SAFETY: both were made in `new`; `upload` has waited for the stream, and the driver frees no memory
        // that it did not give.
        unsafe {
            (driver.functions.event_destroy)(self.sent);
            if !self.ptr.is_null() {
                (driver.functions.host_free)(self.ptr.cast());
            }
        }
    }
}
