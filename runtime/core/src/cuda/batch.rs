//! Steps of several sequences on a GPU: one launch for all sequences where a kernel looks at each.

use std::sync::Arc;

use mlcc_abi::EntryPoint;

use super::device::CudaDevice;
use crate::Result;
use crate::buffer::AlignedBuffer;
use crate::device::{BatchCall, DeviceBatch};
use crate::top_k::AcceptTopK;

pub(crate) struct CudaBatch {
    device: Arc<CudaDevice>,
}

impl CudaBatch {
    pub fn new(device: Arc<CudaDevice>) -> Self {
        Self { device }
    }
}

impl DeviceBatch for CudaBatch {
    fn run(
        &mut self,
        step: EntryPoint,
        call: &BatchCall<'_>,
        logits: &mut AlignedBuffer,
        enough: Option<AcceptTopK<'_>>,
    ) -> Result<()> {
        self.device.executor().run_batch(&self.device, step, call, logits, enough)
    }

    fn performance_warning(&self) -> Option<String> {
        self.device.executor().performance_warning().map(String::from)
    }
}
