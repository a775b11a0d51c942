//! Traces of requests, by OpenTelemetry. Without the feature `otel` there are none, and these types do
//! nothing.

#[cfg(not(feature = "otel"))]
mod off;
#[cfg(feature = "otel")]
mod sender;
#[cfg(feature = "otel")]
mod settings;
#[cfg(feature = "otel")]
mod span;

#[cfg(not(feature = "otel"))]
pub(crate) use off::RequestSpan;
#[cfg(not(feature = "otel"))]
pub use off::TraceExporter;
#[cfg(feature = "otel")]
pub use settings::TraceExporter;
#[cfg(feature = "otel")]
pub(crate) use span::RequestSpan;
use thiserror::Error;

/// The reasons why the settings of traces cannot be followed.
#[derive(Debug, Error)]
pub enum TracesError {
    #[error("{name} is `{found}`, expected {expected}")]
    Setting { name: &'static str, found: String, expected: &'static str },
    #[error("cannot send traces: {0}. Check the variables that start with OTEL_EXPORTER_OTLP_")]
    Exporter(String),
}

/// Variables of which one asks for traces.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// A variable of the environment; an empty one is none.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
