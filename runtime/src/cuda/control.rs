//! What changes from call to call: the control block and the tokens after it, in one piece of the device's memory. Launches
//! name its address, so they are the same in every call, and one copy from pinned memory tells the device of a call.

use std::ptr::null_mut;
use std::sync::Arc;

use mlcc_abi::{BUFFER_ALIGN, Control, status};

use super::device::{Context, DeviceBuffer};
use super::driver::{DevicePtr, Handle};
use crate::{Error, Result};

const WHAT: &str = "the tokens on the GPU";
/// Where the tokens begin.
const TOKENS_AT: usize = BUFFER_ALIGN;

const _: () = assert!(size_of::<Control>() <= TOKENS_AT);

pub(crate) struct ControlBlock {
    on_device: DeviceBuffer,
    /// Pinned memory of the same length.
    staged: *mut u8,
    /// The last copy may still read `staged`.
    in_flight: bool,
    context: Arc<Context>,
}

impl ControlBlock {
    /// For calls of at most `chunk` tokens.
    pub fn new(context: &Arc<Context>, chunk: u64) -> Result<Self> {
        let bytes = chunk.saturating_mul(4).saturating_add(TOKENS_AT as u64);
        let on_device = DeviceBuffer::new(context, WHAT, bytes)?;
        let driver = context.enter()?;
        let mut staged = null_mut();
        // SAFETY: a place for the result.
        let status = unsafe { (driver.f.host_alloc)(&mut staged, on_device.len(), 0) };
        driver.check_memory("cuMemHostAlloc", status, WHAT, bytes)?;
        let (staged, context) = (staged.cast(), Arc::clone(context));
        Ok(Self { on_device, staged, in_flight: false, context })
    }

    pub fn ptr(&self) -> DevicePtr {
        self.on_device.ptr()
    }

    pub fn tokens(&self) -> DevicePtr {
        self.on_device.ptr() + TOKENS_AT as u64
    }

    /// Tells the device of a call, before its launches on the same stream.
    pub fn write(&mut self, control: &Control, tokens: &[i32], stream: Handle) -> Result<()> {
        let bytes = TOKENS_AT + size_of_val(tokens);
        if bytes > self.on_device.len() {
            return Err(Error::Step { entry: "launch list", status: status::BAD_LENGTH });
        }
        let driver = self.context.enter()?;
        if self.in_flight {
            // A call failed before it waited for its results.
            // SAFETY: the stream is the session's.
            driver.check("cuStreamSynchronize", unsafe { (driver.f.stream_wait)(stream) })?;
        }
        // SAFETY: `staged` has the length checked above and nothing reads it now; the copy reads it until somebody waits for
        // the stream, and `in_flight` keeps it unchanged until then. Both types are plain data.
        let status = unsafe {
            std::ptr::from_ref(control)
                .cast::<u8>()
                .copy_to_nonoverlapping(self.staged, size_of::<Control>());
            let to = self.staged.add(TOKENS_AT);
            tokens.as_ptr().cast::<u8>().copy_to_nonoverlapping(to, size_of_val(tokens));
            (driver.f.to_device)(self.on_device.ptr(), self.staged.cast(), bytes, stream)
        };
        self.in_flight = true;
        driver.check("cuMemcpyHtoDAsync", status)
    }

    /// The stream of the last copy has been waited for.
    pub fn settled(&mut self) {
        self.in_flight = false;
    }
}

impl Drop for ControlBlock {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.enter() {
            // SAFETY: allocated in `new`; sessions wait for their stream before they drop their buffers.
            unsafe { (driver.f.host_free)(self.staged.cast()) };
        }
    }
}
