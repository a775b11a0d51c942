//! What `/metrics` tells, in the text form of Prometheus.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mlcc_engine::serving::{Event, Stats};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Answered {
    pub path: String,
    pub status: u16,
}

/// A number that the engine counts, and where it stands.
type OfEngine = (Counter<u64, AtomicU64>, fn(&Stats) -> u64);
/// The same of one that goes up and down.
type Now = (Gauge<i64, AtomicI64>, fn(&Stats) -> usize);

pub struct Metrics {
    registry: Registry,
    answered: Family<Answered, Counter>,
    first: Histogram,
    gap: Histogram,
    /// Counted by the engines, added when they are asked for.
    of_engine: [OfEngine; 11],
    /// What engines have counted that are gone.
    past: Mutex<[u64; 11]>,
    now: [Now; 2],
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("mlcc");
        let answered = Family::<Answered, Counter>::default();
        registry.register("requests", "Answers by path and status", answered.clone());
        let first = Histogram::new(exponential_buckets(0.001, 2.0, 18));
        let help = "Time from the launch of a text to its first token";
        registry.register("time_to_first_token_seconds", help, first.clone());
        let gap = Histogram::new(exponential_buckets(0.000_25, 2.0, 16));
        registry.register("time_between_tokens_seconds", "Time between two tokens of a text", gap.clone());
        let mut counter = |name: &str, help: &str, of: fn(&Stats) -> u64| {
            let counter = Counter::<u64, AtomicU64>::default();
            registry.register(name, help, counter.clone());
            (counter, of)
        };
        let of_engine = [
            counter("prompt_tokens", "Tokens of prompts that were read", |s| s.prompt_tokens),
            counter("cached_tokens", "Tokens of prompts that were known", |s| s.cached_tokens),
            counter("generated_tokens", "Tokens that were chosen", |s| s.written_tokens),
            counter("drafted_tokens", "Tokens of drafts", |s| s.drafted_tokens),
            counter("accepted_tokens", "Tokens of drafts that were right", |s| s.accepted_tokens),
            counter("texts_finished", "Texts that came to their end", |s| s.finished),
            counter("texts_cancelled", "Texts that nobody wanted any more", |s| s.cancelled),
            counter("texts_failed", "Texts that an error ended", |s| s.failed),
            counter("engine_steps", "Steps of the engine", |s| s.steps),
            counter("texts_preempted", "Texts that gave way to older ones for want of memory", |s| {
                s.preempted
            }),
            counter("states_lost", "States behind prompts that could not be kept or restored", |s| {
                s.states_lost
            }),
        ];
        let mut gauge = |name: &str, help: &str, of: fn(&Stats) -> usize| {
            let gauge = Gauge::<i64, AtomicI64>::default();
            registry.register(name, help, gauge.clone());
            (gauge, of)
        };
        let now = [
            gauge("texts_running", "Texts in slots", |s| s.running),
            gauge("texts_waiting", "Texts in the queue", |s| s.waiting),
        ];
        Metrics { registry, answered, first, gap, of_engine, past: Mutex::default(), now }
    }

    pub fn count_answer(&self, path: &str, status: u16) {
        self.answered.get_or_create(&Answered { path: path.to_owned(), status }).inc();
    }

    /// For the events of one text, which is launched now.
    pub fn watch(&self) -> Watch {
        Watch { first: self.first.clone(), gap: self.gap.clone(), last: Instant::now(), came: false }
    }

    /// Adds what an engine has counted that ends.
    pub fn keep(&self, stats: &Stats) {
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        for (past, (_, of)) in past.iter_mut().zip(&self.of_engine) {
            *past += of(stats);
        }
    }

    /// `stats` are those of the engines that there are.
    pub fn text(&self, stats: &[Stats]) -> Result<String, std::fmt::Error> {
        let past = *self.past.lock().unwrap_or_else(PoisonError::into_inner);
        for ((counter, of), past) in self.of_engine.iter().zip(past) {
            counter.inner().store(past + stats.iter().map(of).sum::<u64>(), Ordering::Relaxed);
        }
        for (gauge, of) in &self.now {
            gauge.set(stats.iter().map(of).sum::<usize>() as i64);
        }
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Measures the times between the tokens of one text.
pub struct Watch {
    first: Histogram,
    gap: Histogram,
    last: Instant,
    came: bool,
}

impl Watch {
    pub fn see(&mut self, event: &Event) {
        let Event::Piece(piece) = event else { return };
        if piece.token.is_none() {
            return;
        }
        let now = Instant::now();
        let time = now.saturating_duration_since(self.last).as_secs_f64();
        if self.came {
            self.gap.observe(time)
        } else {
            self.first.observe(time)
        }
        (self.last, self.came) = (now, true);
    }
}
