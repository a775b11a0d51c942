//! Sends spans to a collector, on the thread of the SDK's batch processor.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};

/// Bytes of an answer that are read.
const LONGEST_ANSWER: u64 = 1 << 20;

#[derive(Debug)]
pub struct SpanSender {
    agent: ureq::Agent,
    warn: Option<fn(&str)>,
    /// The last one did not arrive, and that has been told.
    failing: AtomicBool,
}

impl SpanSender {
    pub fn new(timeout: Duration, warn: Option<fn(&str)>) -> SpanSender {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .max_redirects(0)
            .build();
        SpanSender { agent: config.new_agent(), warn, failing: AtomicBool::new(false) }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ureq::Error> {
        let (head, body) = request.into_parts();
        let answer = self.agent.run(Request::from_parts(head, &body[..]))?;
        let (head, mut body) = answer.into_parts();
        let body = body.with_config().limit(LONGEST_ANSWER).read_to_vec()?;
        Ok(Response::from_parts(head, body.into()))
    }

    /// Tells once that spans do not arrive, until some do.
    fn tell(&self, failure: Option<String>) {
        let was_failing = self.failing.swap(failure.is_some(), Ordering::Relaxed);
        if let (Some(why), Some(warn), false) = (failure, self.warn, was_failing) {
            warn(&format!("traces do not arrive at the collector: {why}. Requests are answered as always"));
        }
    }
}

#[async_trait]
impl HttpClient for SpanSender {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = self.send(request);
        self.tell(match &sent {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("it answers {}", answer.status())),
            Err(error) => Some(error.to_string()),
        });
        Ok(sent?)
    }
}
