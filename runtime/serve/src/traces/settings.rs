//! Settings of traces from the environment, and the pipeline that sends them.
//!
//! The variables are those of the OpenTelemetry specification; most are read by its SDK.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};

use crate::traces::sender::SpanSender;
use crate::traces::{ENDPOINTS, TracesError, variable};

/// Time for the last spans when the server ends.
const LAST_SPANS: Duration = Duration::from_secs(5);
/// Time in which a collector has to answer, by default.
const USUAL_TIMEOUT: Duration = Duration::from_secs(10);
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

/// The exporter of traces. The default sends nothing.
#[derive(Debug, Clone, Default)]
pub struct TraceExporter(pub(super) Option<TracePipeline>);

#[derive(Debug, Clone)]
pub(super) struct TracePipeline {
    provider: SdkTracerProvider,
    pub tracer: SdkTracer,
}

impl TraceExporter {
    /// The exporter by the variables of OpenTelemetry: traces are sent if an endpoint is set, and not
    /// switched off. `warn` gets a line when they do not arrive.
    pub fn from_environment(warn: Option<fn(&str)>) -> Result<TraceExporter, TracesError> {
        let off = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let exporter = one_of("OTEL_TRACES_EXPORTER", &["otlp", "none"], "otlp or none")?;
        let wanted = ENDPOINTS.into_iter().any(|name| variable(name).is_some());
        if off || !wanted || exporter.as_deref() == Some("none") {
            return Ok(TraceExporter::default());
        }
        for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
            let expected = "http/protobuf (usually port 4318 of a collector)";
            if one_of(name, &["http/protobuf"], expected)?.is_some() {
                break;
            }
        }
        let expected = "always_on, always_off or traceidratio, or one of these after parentbased_";
        one_of("OTEL_TRACES_SAMPLER", &SAMPLERS, expected)?;
        check_ratio()?;
        TraceExporter::sending(None, warn)
    }

    /// Sends to the collector at `endpoint` (`http://HOST:4318/v1/traces`), whatever the environment says of
    /// it.
    pub fn to(endpoint: &str, warn: Option<fn(&str)>) -> Result<TraceExporter, TracesError> {
        TraceExporter::sending(Some(endpoint), warn)
    }

    fn sending(endpoint: Option<&str>, warn: Option<fn(&str)>) -> Result<TraceExporter, TracesError> {
        let exporter =
            SpanExporter::builder().with_http().with_http_client(SpanSender::new(timeout()?, warn));
        let exporter = match endpoint {
            Some(endpoint) => exporter.with_endpoint(endpoint),
            None => exporter,
        };
        let exporter = exporter.build().map_err(|error| TracesError::Exporter(error.to_string()))?;
        let provider = SdkTracerProvider::builder().with_resource(resource()).with_batch_exporter(exporter);
        Ok(TraceExporter::new(provider.build()))
    }

    /// Sends to a provider of the caller's.
    pub fn new(provider: SdkTracerProvider) -> TraceExporter {
        let tracer = provider.tracer("mlcc-serve");
        TraceExporter(Some(TracePipeline { provider, tracer }))
    }

    /// Sends what has not been sent yet; nothing is after that.
    pub(crate) fn finish(&self) {
        if let Some(tracing) = &self.0 {
            // The client has reported collectors that cannot be reached.
            let _ = tracing.provider.shutdown_with_timeout(LAST_SPANS);
        }
    }
}

/// Whom the spans are of: what the environment says, with a name in any case.
fn resource() -> Resource {
    let found = Resource::builder().build();
    let name = found.get(&"service.name".into()).map(|name| name.to_string());
    let named = name.is_some_and(|name| !name.starts_with("unknown_service"));
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    // Later ones win, so those of the environment come last.
    let own = Resource::builder_empty().with_attribute(version);
    let own = own.with_attributes(found.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())));
    if named { own.build() } else { own.with_service_name("mlcc").build() }
}

/// A variable that may only have some values.
fn one_of(
    name: &'static str,
    values: &[&str],
    expected: &'static str,
) -> Result<Option<String>, TracesError> {
    let found = variable(name);
    match found {
        Some(found) if !values.contains(&found.as_str()) => {
            Err(TracesError::Setting { name, found, expected })
        }
        found => Ok(found),
    }
}

fn check_ratio() -> Result<(), TracesError> {
    let name = "OTEL_TRACES_SAMPLER_ARG";
    let Some(found) = variable(name) else { return Ok(()) };
    match found.parse::<f64>() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(()),
        _ => Err(TracesError::Setting {
            name,
            found,
            expected: "the share of requests that is traced, 0 to 1",
        }),
    }
}

fn timeout() -> Result<Duration, TracesError> {
    for name in ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"] {
        let Some(found) = variable(name) else { continue };
        let expected = "milliseconds, 1 or more";
        return match found.parse() {
            Ok(ms) if ms > 0 => Ok(Duration::from_millis(ms)),
            _ => Err(TracesError::Setting { name, found, expected }),
        };
    }
    Ok(USUAL_TIMEOUT)
}
