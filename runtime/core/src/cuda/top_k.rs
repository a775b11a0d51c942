//! The likeliest tokens of some rows, as a device has found them.

use std::ptr::null_mut;
use std::sync::Arc;

use mlcc_abi::{EntryPoint, TOP_K, arg};

use super::device::{CudaContext, DeviceBuffer};
use super::driver::DevicePtr;
use super::stream::CudaStream;
use crate::Result;
use crate::table::ArtifactTable;
use crate::top_k::TokenCandidate;

const WHAT: &str = "the likeliest tokens on the GPU";
/// Bytes of a row, of logits and of numbers of tokens alike.
const ROW: usize = TOP_K * 4;

/// Results of [`EntryPoint::TopK`].
pub(crate) struct TopKTokens {
    /// Logits of `rows` rows, then their tokens.
    on_device: DeviceBuffer,
    rows: usize,
    /// Pinned memory for as many.
    staged: *mut u8,
    candidates: Vec<TokenCandidate>,
    context: Arc<CudaContext>,
}

impl TopKTokens {
    /// `None` if the artifact has no code that finds them.
    pub fn new(context: &Arc<CudaContext>, table: &ArtifactTable) -> Result<Option<Self>> {
        let Some(entry) = table.device_entries.iter().find(|entry| entry.name == EntryPoint::TopK.name())
        else {
            return Ok(None);
        };
        // Tokens begin behind the logits of all rows.
        let args = entry.launches.iter().flat_map(|launch| &launch.args);
        let tokens_at = args.filter(|a| a.kind == arg::PROBS).map(|a| a.offset).max().unwrap_or(0);
        let rows = tokens_at / ROW as u64;
        if rows == 0 || !tokens_at.is_multiple_of(ROW as u64) {
            return Ok(None);
        }
        let bytes = tokens_at.saturating_mul(2);
        let on_device = DeviceBuffer::new(context, WHAT, bytes)?;
        let driver = context.make_current()?;
        let mut staged = null_mut();
        // SAFETY: a place for the result.
        let status = unsafe { (driver.functions.host_alloc)(&mut staged, on_device.len(), 0) };
        driver.check_memory("cuMemHostAlloc", status, WHAT, bytes)?;
        let (rows, list) = (rows as usize, Vec::with_capacity(TOP_K));
        Ok(Some(Self {
            on_device,
            rows,
            staged: staged.cast(),
            candidates: list,
            context: Arc::clone(context),
        }))
    }

    pub fn ptr(&self) -> DevicePtr {
        self.on_device.ptr()
    }

    /// True if there is room for this many rows.
    pub fn has_room_for(&self, rows: usize) -> bool {
        rows <= self.rows
    }

    pub fn bytes(&self) -> usize {
        self.on_device.len()
    }

    /// Copies those of the first `rows` rows to the host, at most as many as there is room for, and waits.
    pub fn receive(&mut self, rows: usize, stream: &CudaStream) -> Result<()> {
        let rows = rows.min(self.rows);
        let driver = stream.make_current()?;
        for begin in [0, self.rows * ROW] {
            // SAFETY: both ranges have room for as many rows from there on, and the host's is not read before
            // the wait below.
            let status = unsafe {
                let to = self.staged.add(begin).cast();
                (driver.functions.to_host)(to, self.ptr() + begin as u64, rows * ROW, stream.handle())
            };
            driver.check("cuMemcpyDtoHAsync", status)?;
        }
        stream.synchronize()
    }

    /// The candidates of a row that was received.
    pub fn row_candidates(&mut self, row: usize) -> &[TokenCandidate] {
        let row = row.min(self.rows - 1) * TOP_K;
        // SAFETY: allocated for that many of each, aligned to pages, and written by the copy that was waited
        // for; any bits are values of these types.
        let (logits, tokens) = unsafe {
            let logits = self.staged.cast::<f32>();
            let tokens = logits.add(self.rows * TOP_K).cast::<i32>();
            (
                std::slice::from_raw_parts(logits.add(row), TOP_K),
                std::slice::from_raw_parts(tokens.add(row), TOP_K),
            )
        };
        self.candidates.clear();
        self.candidates
            .extend(logits.iter().zip(tokens).map(|(&logit, &token)| TokenCandidate { token, logit }));
        &self.candidates
    }
}

// SAFETY: the pinned memory is its own; see `CudaContext`.
unsafe impl Send for TopKTokens {}

impl Drop for TopKTokens {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.make_current() {
            // SAFETY: allocated in `new`; whoever has it waits for the stream before.
            unsafe { (driver.functions.host_free)(self.staged.cast()) };
        }
    }
}
