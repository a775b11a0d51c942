//! The numbers of `/metrics`, in the text form of Prometheus.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mlcc_engine::serving::{CacheUsage, EngineStats, SequenceEvent};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    pub path: String,
    pub status: u16,
}

/// The label of a model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfModel {
    model: String,
}

/// The label of an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfAdapter {
    model: String,
    adapter: String,
}

/// The same by the name of vLLM's label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfModelName {
    model_name: String,
}

/// The labels of `vllm:cache_config_info` about the memory of caches.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheConfig {
    model_name: String,
    block_size: u64,
    num_gpu_blocks: u64,
}

/// The number of counters of an engine.
const COUNTED: usize = 11;

/// Most unloaded models that still have numbers of their own.
const MOST_PAST: usize = 256;

/// The counts of engines that have ended, by the names of their models. Clients may give models as many names
/// as they like, so the oldest ones are forgotten.
#[derive(Debug, Clone, Default)]
struct RetiredCounts {
    counts: BTreeMap<String, [u64; COUNTED]>,
    /// The names in the order in which they came.
    order: VecDeque<String>,
}

/// A counter of the engines, and its source.
type OfEngine = (Family<OfModel, Counter<u64, AtomicU64>>, fn(&EngineStats) -> u64);
/// A gauge of the engines, and its source.
type EngineGauge = (Family<OfModel, Gauge<i64, AtomicI64>>, fn(&EngineStats) -> usize);
type RatioGauge = Gauge<f64, AtomicU64>;

pub struct ServerMetrics {
    registry: Registry,
    answered: Family<RequestLabels, Counter>,
    first_token: Family<OfModel, Histogram>,
    token_gap: Family<OfModel, Histogram>,
    /// Texts with adapters, the tokens of their prompts and those that were chosen. Engines count these with
    /// all others.
    adapter_counters: [Family<OfAdapter, Counter>; 3],
    /// Counted by the engines, added when they are asked for.
    engine_counters: [OfEngine; COUNTED],
    /// The counts of engines that have ended, by the names of their models.
    retired: Mutex<RetiredCounts>,
    engine_gauges: [EngineGauge; 2],
    picker: PickerMetrics,
}

/// Numbers that endpoint pickers of clusters read (llm-d; the model server protocol of the Gateway API's
/// inference extension), by the names that vLLM gave them.
struct PickerMetrics {
    registry: Registry,
    waiting: Family<OfModelName, Gauge>,
    running: Family<OfModelName, Gauge>,
    cache: Family<OfModelName, RatioGauge>,
    config: Family<CacheConfig, Gauge>,
}

impl PickerMetrics {
    fn new() -> Self {
        let mut registry = Registry::default();
        let (waiting, running) = (Family::default(), Family::default());
        let (cache, config) = (Family::default(), Family::default());
        registry.register("vllm:num_requests_waiting", "Sequences in the queue", Family::clone(&waiting));
        registry.register("vllm:num_requests_running", "Sequences in slots", Family::clone(&running));
        let help = "Share of the cache memory that running sequences use; share of the slots if a model has no caches";
        registry.register("vllm:kv_cache_usage_perc", help, Family::clone(&cache));
        let help = "Tokens per cache page, and number of pages";
        registry.register("vllm:cache_config_info", help, Family::clone(&config));
        PickerMetrics { registry, waiting, running, cache, config }
    }

    fn set(&self, name: &str, stats: &[&EngineStats]) {
        let label = OfModelName { model_name: name.to_owned() };
        let sum = |of: fn(&EngineStats) -> usize| stats.iter().map(|stats| of(stats)).sum::<usize>();
        self.waiting.get_or_create(&label).set(sum(|s| s.waiting) as i64);
        self.running.get_or_create(&label).set(sum(|s| s.running) as i64);
        let cache = |stats: &EngineStats| stats.cache.unwrap_or_default();
        // A model without caches is full when no slot is free.
        let used = |stats: &&EngineStats| match cache(stats) {
            CacheUsage { blocks: 0, .. } => ratio(stats.running, stats.slots.len()),
            cache => ratio(cache.used, cache.blocks),
        };
        // If several models have one name, and all but one have their last texts, the fullest one counts.
        self.cache.get_or_create(&label).set(stats.iter().map(used).fold(0.0, f64::max));
        if let Some(cache) = stats.last().map(|stats| cache(stats)).filter(|cache| cache.blocks > 0) {
            let config = CacheConfig {
                model_name: name.to_owned(),
                block_size: cache.block_tokens as u64,
                num_gpu_blocks: cache.blocks as u64,
            };
            self.config.get_or_create(&config).set(1);
        }
    }

    fn clear(&self) {
        self.waiting.clear();
        self.running.clear();
        self.cache.clear();
        self.config.clear();
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64).min(1.0) }
}

impl ServerMetrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("mlcc");
        let answered = Family::<RequestLabels, Counter>::default();
        registry.register("requests", "Responses by path and status", answered.clone());
        let first_token: Family<OfModel, Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.001, 2.0, 18)));
        let help = "Time from the start of a sequence to its first token";
        registry.register("time_to_first_token_seconds", help, first_token.clone());
        let token_gap: Family<OfModel, Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.000_25, 2.0, 16)));
        registry.register(
            "time_between_tokens_seconds",
            "Time between two tokens of a sequence",
            token_gap.clone(),
        );
        let adapted = [
            ("adapter_texts", "Finished sequences with an adapter"),
            ("adapter_prompt_tokens", "Tokens of their prompts"),
            ("adapter_generated_tokens", "Tokens that were generated for them"),
        ];
        let adapter_counters = adapted.map(|(name, help)| {
            let counter = Family::<OfAdapter, Counter>::default();
            registry.register(name, help, counter.clone());
            counter
        });
        let mut counter = |name: &str, help: &str, of: fn(&EngineStats) -> u64| {
            let counter = Family::default();
            registry.register(name, help, Family::clone(&counter));
            (counter, of)
        };
        let engine_counters = [
            counter("prompt_tokens", "Prompt tokens that were computed", |s| s.prompt_tokens),
            counter("cached_tokens", "Prompt tokens that were cached", |s| s.cached_tokens),
            counter("generated_tokens", "Tokens that were generated", |s| s.written_tokens),
            counter("drafted_tokens", "Tokens of drafts", |s| s.drafted_tokens),
            counter("accepted_tokens", "Draft tokens that were accepted", |s| s.accepted_tokens),
            counter("texts_finished", "Sequences that finished", |s| s.finished),
            counter("texts_cancelled", "Sequences that clients cancelled", |s| s.cancelled),
            counter("texts_failed", "Sequences that an error ended", |s| s.failed),
            counter("engine_steps", "Steps of the engine", |s| s.steps),
            counter("texts_preempted", "Sequences that were preempted for lack of memory", |s| s.preempted),
            counter("states_lost", "Prompt states that could not be stored or restored", |s| s.prefixes_lost),
        ];
        let mut gauge = |name: &str, help: &str, of: fn(&EngineStats) -> usize| {
            let gauge = Family::default();
            registry.register(name, help, Family::clone(&gauge));
            (gauge, of)
        };
        let engine_gauges = [
            gauge("texts_running", "Sequences in slots", |s| s.running),
            gauge("texts_waiting", "Sequences in the queue", |s| s.waiting),
        ];
        let (retired, picker) = (Mutex::default(), PickerMetrics::new());
        ServerMetrics {
            registry,
            answered,
            first_token,
            token_gap,
            adapter_counters,
            engine_counters,
            retired,
            engine_gauges,
            picker,
        }
    }

    pub fn count_answer(&self, path: &str, status: u16) {
        self.answered.get_or_create(&RequestLabels { path: path.to_owned(), status }).inc();
    }

    /// The observer for one sequence of a model, which is launched now; for an adapter with the model that it
    /// belongs to.
    pub fn observe_latency(&self, model: &str, parent: Option<&str>) -> LatencyObserver {
        let label = OfModel { model: model.to_owned() };
        let (first, gap) =
            (self.first_token.get_or_create(&label).clone(), self.token_gap.get_or_create(&label).clone());
        let adapted = parent.map(|parent| {
            let label = OfAdapter { model: parent.to_owned(), adapter: model.to_owned() };
            [0, 1, 2].map(|index: usize| self.adapter_counters[index].get_or_create(&label).clone())
        });
        LatencyObserver {
            first_token: first,
            token_gap: gap,
            adapted,
            last_token_at: Instant::now(),
            has_token: false,
        }
    }

    /// Takes the numbers of an adapter away that clients cannot ask for any more. Clients may give adapters
    /// as many names as they like.
    pub fn forget_adapter(&self, model: &str, adapter: &str) {
        let times = OfModel { model: adapter.to_owned() };
        for family in [&self.first_token, &self.token_gap] {
            family.remove(&times);
        }
        let counted = OfAdapter { model: model.to_owned(), adapter: adapter.to_owned() };
        for family in &self.adapter_counters {
            family.remove(&counted);
        }
    }

    /// Adds what the engine of a model has counted that ends.
    pub fn add_retired(&self, model: &str, stats: &EngineStats) {
        let mut past = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        if !past.counts.contains_key(model) {
            past.order.push_back(model.to_owned());
        }
        let counts = past.counts.entry(model.to_owned()).or_default();
        for (count, (_, of)) in counts.iter_mut().zip(&self.engine_counters) {
            *count += of(stats);
        }
        if past.order.len() > MOST_PAST
            && let Some(first) = past.order.pop_front()
        {
            past.counts.remove(&first);
            let label = OfModel { model: first };
            for (counter, _) in &self.engine_counters {
                counter.remove(&label);
            }
            for family in [&self.first_token, &self.token_gap] {
                family.remove(&label);
            }
        }
    }

    /// `stats` are those of the engines that there are, with the names of their models, in the order in which
    /// these came.
    pub fn render(&self, stats: &[(String, EngineStats)]) -> Result<String, std::fmt::Error> {
        let past = self.retired.lock().unwrap_or_else(PoisonError::into_inner).counts.clone();
        let mut alive: BTreeMap<&str, Vec<&EngineStats>> = BTreeMap::new();
        for (name, stats) in stats {
            alive.entry(name).or_default().push(stats);
        }
        let names: BTreeSet<&str> = past.keys().map(String::as_str).chain(alive.keys().copied()).collect();
        for name in names {
            let label = OfModel { model: name.to_owned() };
            let (past, alive) = (past.get(name), alive.get(name).map_or(&[][..], Vec::as_slice));
            for (index, (counter, of)) in self.engine_counters.iter().enumerate() {
                let sum = alive.iter().map(|stats| of(stats)).sum::<u64>();
                let value = past.map_or(0, |past| past[index]) + sum;
                counter.get_or_create(&label).inner().store(value, Ordering::Relaxed);
            }
        }
        // A model that was unloaded has no gauges, unlike counters.
        self.engine_gauges.iter().for_each(|(gauge, _)| gauge.clear());
        self.picker.clear();
        for (name, stats) in &alive {
            let label = OfModel { model: (*name).to_owned() };
            for (gauge, of) in &self.engine_gauges {
                let sum = stats.iter().map(|stats| of(stats)).sum::<usize>();
                gauge.get_or_create(&label).set(sum as i64);
            }
            self.picker.set(name, stats);
        }
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &self.picker.registry)?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// Measures the times between the tokens of one text.
pub struct LatencyObserver {
    first_token: Histogram,
    token_gap: Histogram,
    adapted: Option<[Counter; 3]>,
    last_token_at: Instant,
    has_token: bool,
}

impl LatencyObserver {
    pub fn record_event(&mut self, event: &SequenceEvent) {
        if let (SequenceEvent::Finished(finished), Some([texts, prompt, written])) = (event, &self.adapted) {
            texts.inc();
            prompt.inc_by(finished.prompt_tokens as u64);
            written.inc_by(finished.completion_tokens as u64);
        }
        let SequenceEvent::Delta(piece) = event else { return };
        if piece.token.is_none() {
            return;
        }
        let now = Instant::now();
        let time = now.saturating_duration_since(self.last_token_at).as_secs_f64();
        if self.has_token {
            self.token_gap.observe(time)
        } else {
            self.first_token.observe(time)
        }
        (self.last_token_at, self.has_token) = (now, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_models_that_are_gone_are_bounded() {
        let metrics = ServerMetrics::new();
        let stats = EngineStats { steps: 1, ..EngineStats::default() };
        for number in 0..MOST_PAST + 10 {
            let name = format!("model-{number}-");
            drop(metrics.observe_latency(&name, None));
            metrics.add_retired(&name, &stats);
            metrics.add_retired(&name, &stats);
            metrics.render(&[]).unwrap();
        }
        let text = metrics.render(&[]).unwrap();
        for (number, told) in [(0, false), (9, false), (10, true), (MOST_PAST, true)] {
            assert_eq!(text.contains(&format!("model-{number}-")), told, "{number}");
        }
        assert!(text.contains("mlcc_engine_steps_total{model=\"model-10-\"} 2\n"), "{text:.3000}");
    }

    /// The four gauges that endpoint pickers look for, by name, label and value.
    #[test]
    fn endpoint_pickers_find_their_gauges() {
        let cache = Some(CacheUsage { block_tokens: 64, blocks: 512, used: 128 });
        let stats = EngineStats { waiting: 3, running: 2, cache, ..EngineStats::default() };
        let text = ServerMetrics::new().render(&[("books".into(), stats)]).unwrap();
        for line in [
            "vllm:num_requests_waiting{model_name=\"books\"} 3\n",
            "vllm:num_requests_running{model_name=\"books\"} 2\n",
            "vllm:kv_cache_usage_perc{model_name=\"books\"} 0.25\n",
            "vllm:cache_config_info{model_name=\"books\",block_size=\"64\",num_gpu_blocks=\"512\"} 1\n",
            // The name in deploy/k8s/base/autoscaler.yaml.
            "mlcc_texts_waiting{model=\"books\"} 3\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }
}
