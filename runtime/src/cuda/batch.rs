//! Steps of several sequences on a GPU: one launch for all sequences where a kernel looks at each.

use std::sync::Arc;

use super::device::Gpu;
use crate::Result;
use crate::buffer::Buffer;
use crate::device::{BatchCall, DeviceBatch};
use crate::likely::Enough;
use crate::session::Step;

pub(crate) struct CudaBatch {
    device: Arc<Gpu>,
}

impl CudaBatch {
    pub fn new(device: Arc<Gpu>) -> Self {
        Self { device }
    }
}

impl DeviceBatch for CudaBatch {
    fn run(
        &mut self,
        step: Step,
        call: &BatchCall<'_>,
        logits: &mut Buffer,
        enough: Option<Enough<'_>>,
    ) -> Result<()> {
        self.device.executor().run_batch(&self.device, step, call, logits, enough)
    }

    fn notice(&self) -> Option<String> {
        self.device.executor().notice().map(String::from)
    }
}
