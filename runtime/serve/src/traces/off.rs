//! No traces.

use mlcc_engine::serving::{EngineRequest, SequenceEvent};

use axum::extract::Request;

use crate::error::{ApiError, ErrorCode};
use crate::traces::{ENDPOINTS, TracesError, variable};

/// The exporter of a build without the feature `otel`, which sends nothing.
#[derive(Debug, Clone, Default)]
pub struct TraceExporter(());

impl TraceExporter {
    /// Calls `warn` if traces are requested.
    pub fn from_environment(warn: Option<fn(&str)>) -> Result<TraceExporter, TracesError> {
        let wanted = ENDPOINTS.into_iter().find(|name| variable(name).is_some());
        if let (Some(name), Some(warn)) = (wanted, warn) {
            warn(&format!("{name} is set, but this program was built without traces (`--features otel`)"));
        }
        Ok(TraceExporter(()))
    }

    pub(crate) fn begin(&self, _: &Request, _: &str, _: &str) -> RequestSpan {
        RequestSpan
    }

    pub(crate) fn finish(&self) {}
}

#[derive(Clone, Default)]
pub(crate) struct RequestSpan;

impl RequestSpan {
    pub fn asks_for(&self, _: &str) {}

    pub fn launches(&self, _: &[EngineRequest], _: usize) {}

    pub fn text(&self, _: usize) -> TextSpan {
        TextSpan
    }

    pub fn embedded(&self, _: Option<u64>) {}

    pub fn failed(&self, _: &ApiError) {}

    pub fn answered(&self, _: u16, _: Option<ErrorCode>) {}
}

pub(crate) struct TextSpan;

impl TextSpan {
    pub fn see(&mut self, _: &SequenceEvent) {}
}
