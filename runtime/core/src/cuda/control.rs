//! Memory that changes from call to call: the control block, and after it the sequences of a batch, tokens
//! and the numbers of output rows, in one piece of the device's memory. Launches name its address, so they
//! are the same in every call, and one copy from pinned memory tells the device of a call.

use std::ptr::null_mut;
use std::sync::Arc;

use mlcc_abi::{BUFFER_ALIGN, Control, Sequence, status};

use super::device::{CudaContext, DeviceBuffer};
use super::driver::{DevicePtr, DriverHandle};
use crate::{Error, Result};

const WHAT: &str = "the tokens on the GPU";
/// The offset of the sequences.
const SEQUENCES_AT: usize = BUFFER_ALIGN;

const _: () = assert!(size_of::<Control>() <= SEQUENCES_AT);

pub(crate) struct ControlBlock {
    on_device: DeviceBuffer,
    /// Pinned memory of the same length.
    staged: *mut u8,
    /// The last copy may still read `staged`.
    in_flight: bool,
    tokens_at: usize,
    output_rows_at: usize,
    context: Arc<CudaContext>,
}

/// The inputs of a call, in addition to the control block.
#[derive(Clone, Copy, Default)]
pub(crate) struct CallInputs<'a> {
    pub sequences: &'a [Sequence],
    pub tokens: &'a [i32],
    pub output_rows: &'a [i32],
}

impl ControlBlock {
    /// A block for calls of at most `sequences` sequences, `tokens` tokens and `wanted` output rows.
    pub fn new(context: &Arc<CudaContext>, sequences: u64, tokens: u64, wanted: u64) -> Result<Self> {
        let all = sequences.saturating_mul(size_of::<Sequence>() as u64);
        let tokens_at = (all.saturating_add(SEQUENCES_AT as u64)).next_multiple_of(BUFFER_ALIGN as u64);
        let mut bytes = tokens.saturating_mul(4).saturating_add(tokens_at);
        let wanted_at = bytes.next_multiple_of(BUFFER_ALIGN as u64);
        if wanted > 0 {
            bytes = wanted.saturating_mul(4).saturating_add(wanted_at);
        }
        let (tokens_at, wanted_at) = (tokens_at as usize, wanted_at as usize);
        let on_device = DeviceBuffer::new(context, WHAT, bytes)?;
        let driver = context.make_current()?;
        let mut staged = null_mut();
        // SAFETY: a place for the result.
        let status = unsafe { (driver.functions.host_alloc)(&mut staged, on_device.len(), 0) };
        driver.check_memory("cuMemHostAlloc", status, WHAT, bytes)?;
        let (staged, context) = (staged.cast(), Arc::clone(context));
        Ok(Self { on_device, staged, in_flight: false, tokens_at, output_rows_at: wanted_at, context })
    }

    pub fn ptr(&self) -> DevicePtr {
        self.on_device.ptr()
    }

    pub fn tokens(&self) -> DevicePtr {
        self.on_device.ptr() + self.tokens_at as u64
    }

    pub fn sequences(&self) -> DevicePtr {
        self.on_device.ptr() + SEQUENCES_AT as u64
    }

    pub fn output_rows(&self) -> DevicePtr {
        self.on_device.ptr() + self.output_rows_at as u64
    }

    /// Tells the device of a call, before its launches on the same stream.
    pub fn write(&mut self, control: &Control, inputs: CallInputs<'_>, stream: DriverHandle) -> Result<()> {
        let CallInputs { sequences, tokens, output_rows: wanted } = inputs;
        let room = |begin: usize, bytes: usize, end: usize| begin + bytes <= end;
        let end = self.on_device.len();
        let fits = room(SEQUENCES_AT, size_of_val(sequences), self.tokens_at)
            && room(self.tokens_at, size_of_val(tokens), self.output_rows_at.min(end))
            && (wanted.is_empty() || room(self.output_rows_at, size_of_val(wanted), end));
        let bytes = match wanted {
            [] => self.tokens_at + size_of_val(tokens),
            _ => self.output_rows_at + size_of_val(wanted),
        };
        if !fits {
            return Err(Error::Step { entry: "launch list", status: status::BAD_LENGTH });
        }
        let driver = self.context.make_current()?;
        if self.in_flight {
            // A call failed before it waited for its results.
            // SAFETY: the stream is the session's.
            driver.check("cuStreamSynchronize", unsafe { (driver.functions.stream_wait)(stream) })?;
        }
        // SAFETY: `staged` has the length checked above and nothing reads it now; the copy reads it until the
        // stream is waited for, and `in_flight` keeps it unchanged until then. Both types are plain data.
        let status = unsafe {
            std::ptr::from_ref(control)
                .cast::<u8>()
                .copy_to_nonoverlapping(self.staged, size_of::<Control>());
            let put = |at: usize, from: *const u8, bytes: usize| {
                from.copy_to_nonoverlapping(self.staged.add(at), bytes);
            };
            put(SEQUENCES_AT, sequences.as_ptr().cast(), size_of_val(sequences));
            put(self.tokens_at, tokens.as_ptr().cast(), size_of_val(tokens));
            put(self.output_rows_at.min(end), wanted.as_ptr().cast(), size_of_val(wanted));
            (driver.functions.to_device)(self.on_device.ptr(), self.staged.cast(), bytes, stream)
        };
        self.in_flight = true;
        driver.check("cuMemcpyHtoDAsync", status)
    }

    /// The stream of the last copy has been waited for.
    pub fn mark_copied(&mut self) {
        self.in_flight = false;
    }
}

impl Drop for ControlBlock {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.make_current() {
            // SAFETY: allocated in `new`; sessions wait for their stream before they drop their buffers.
            unsafe { (driver.functions.host_free)(self.staged.cast()) };
        }
    }
}
