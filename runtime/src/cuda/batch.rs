//! Steps of several sequences on a GPU: a stream, scratch memory and logits of their own, and one launch for all sequences where a
//! kernel looks at each.

use std::sync::Arc;

use mlcc_abi::Control;

use super::control::{ControlBlock, Inputs};
use super::device::{Bases, BatchSizes, DeviceBuffer, Gpu, Span};
use super::session::entry;
use super::stream::Stream;
use crate::Result;
use crate::buffer::Buffer;
use crate::device::{BatchCall, DeviceBatch};
use crate::session::Step;
use crate::table::{Plan, Table};

pub(crate) struct CudaBatch {
    stream: Stream,
    control: ControlBlock,
    arena: DeviceBuffer,
    /// Of as many rows as a step has asked for yet.
    logits: DeviceBuffer,
    plan: Plan,
    device: Arc<Gpu>,
}

// SAFETY: pinned memory belongs to this batch alone; the driver API is thread-safe and every operation makes the context current first.
unsafe impl Send for CudaBatch {}

const LOGITS: &str = "the logits of a batch on the GPU";

impl CudaBatch {
    pub fn new(device: Arc<Gpu>, table: &Table) -> Result<Self> {
        let plan = table.plan.clone();
        let context = device.context();
        let rows = plan.chunk.max(plan.batch);
        let control = ControlBlock::new(context, plan.batch, rows, rows)?;
        let arena = DeviceBuffer::new(context, "the arena of a batch on the GPU", plan.arena_bytes)?;
        let logits =
            DeviceBuffer::new(context, LOGITS, plan.vocab.saturating_mul(plan.batch).saturating_mul(4))?;
        Ok(Self { stream: Stream::new(context)?, control, arena, logits, plan, device })
    }

    fn start(&mut self, step: Step, call: &BatchCall<'_>) -> Result<()> {
        let device = Arc::clone(&self.device);
        let kernels = entry(&device, step)?;
        let (n, b) = (call.tokens.len() as i64, call.sequences.len() as i64);
        let wanted = call.n_wanted as i64;
        let of_step = step == Step::Rows;
        let n_wanted = if of_step { wanted } else { 0 };
        let control = Control { n, b, n_wanted, temperature: 1.0, ..Control::default() };
        let wanted_rows = if of_step { call.wanted } else { &[] };
        let inputs = Inputs { sequences: call.sequences, tokens: call.tokens, wanted: wanted_rows };
        self.control.write(&control, inputs, self.stream.handle())?;
        let past = || call.sequences.iter().map(|s| s.past);
        let bases = Bases {
            arena: self.arena.ptr(),
            tokens: self.control.tokens(),
            logits: self.logits.ptr(),
            control: self.control.ptr(),
            wanted: self.control.wanted(),
            sequences: self.control.sequences(),
            n,
            past: Span { first: past().min().unwrap_or(0), last: past().max().unwrap_or(0) },
            batch: BatchSizes {
                sequences: b,
                most_rows: call.sequences.iter().map(|s| s.rows).max().unwrap_or(0),
                wanted,
            },
            ..Bases::default()
        };
        device.launch(kernels, &bases, self.stream.handle())
    }
}

impl DeviceBatch for CudaBatch {
    fn run(&mut self, step: Step, call: &BatchCall<'_>, logits: &mut Buffer) -> Result<()> {
        let floats = call.n_wanted * self.plan.vocab as usize;
        if self.logits.len() < floats * 4 {
            self.logits = DeviceBuffer::new(self.device.context(), LOGITS, floats as u64 * 4)?;
        }
        let started = self.start(step, call);
        // What was launched works on the states of the sequences, also where a later launch was refused.
        let bytes = &mut logits.bytes_mut()[..floats * 4];
        let done = match started {
            Ok(()) => self.stream.receive(self.logits.ptr(), bytes),
            Err(error) => self.stream.wait().and(Err(error)),
        };
        if done.is_ok() {
            self.control.settled();
        }
        done
    }
}

impl Drop for CudaBatch {
    fn drop(&mut self) {
        let _ = self.stream.wait();
    }
}
