//! The speed of the memory of the GPU: a limit of its own for readers of weights.

use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{CudaContext, DeviceBuffer};
use crate::Result;

/// Several times the caches of any GPU.
const BYTES: usize = 256 << 20;
/// Long enough that starting the copies does not show.
const TIME: Duration = Duration::from_millis(20);
const ROUNDS: usize = 3;

/// Bytes per second, read and written, while one buffer is copied to another on the GPU; the best of some
/// rounds.
pub(crate) fn copy_bandwidth(context: &Arc<CudaContext>) -> Result<f64> {
    let buffer = || DeviceBuffer::new(context, "the measurement of the GPU's memory", BYTES as u64);
    let (from, to) = (buffer()?, buffer()?);
    let time = |copies: usize| -> Result<Duration> {
        let driver = context.make_current()?;
        let default_stream = null_mut();
        let begin = Instant::now();
        for _ in 0..copies {
            // SAFETY: both buffers have these bytes and live until the stream has been waited for.
            let status = unsafe { (driver.functions.on_device)(to.ptr(), from.ptr(), BYTES, default_stream) };
            driver.check("cuMemcpyDtoDAsync", status)?;
        }
        // SAFETY: the default stream always exists.
        driver.check("cuStreamSynchronize", unsafe { (driver.functions.stream_wait)(default_stream) })?;
        Ok(begin.elapsed())
    };
    let mut copies = 1;
    while time(copies)? < TIME && copies < 1 << 16 {
        copies *= 2;
    }
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        best = best.min(time(copies)?);
    }
    Ok((2 * copies * BYTES) as f64 / best.as_secs_f64())
}
