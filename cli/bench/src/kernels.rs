//! `mlcc bench --kernels`: where the time of a prompt and of a token goes, kernel by kernel.
//!
//! The step itself tells after each launch and barrier (`mlcc_abi::Ctx::trace`), so the kernels run as they
//! always do, with all workers and with the caches as the kernels before have left them. A kernel's limit is
//! the longer of what its weights, states and cache rows take at the probed read bandwidth and what its
//! operations take at the probed peak.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use mlcc_driver::compile::keep::scheme_name;
use mlcc_driver::compile::profile::KernelInfo;
use mlcc_driver::format::bytes;
use mlcc_ir::dim::{Dim, SymValues};
use mlcc_ir::step::SequenceFilter;
use mlcc_ir::text::{Lexer, parse_dim};
use mlcc_runtime::{Model, StepTimes};
use serde::Serialize;
use serde_json::Value;

use crate::error::BenchError;
use crate::host::BenchHost;
use crate::options::BenchOptions;
use crate::probe::{self, ComputeType, KINDS, bandwidth_probe};
use crate::runner::BenchRunner;
use crate::test::{BenchTest, MixedStep};

/// The distribution of the time of one test. Times are milliseconds of one run.
#[derive(Debug, Serialize)]
pub struct KernelProfile {
    model: String,
    quant: String,
    level: String,
    threads: usize,
    test: String,
    repetitions: u32,
    tok_s: f64,
    ms: f64,
    /// Longest first.
    kernels: Vec<KernelTimeRow>,
    /// Items of the steps that are launches, each for all sequences, and those that are barriers.
    launches: u64,
    barriers: u64,
    /// Waiting for other workers, mean of the workers.
    waiting_ms: f64,
    /// Outside of the items of steps: calling the workers, arguments, the caller's own work.
    outside_ms: f64,
    read_bandwidth: f64,
    peak_f32: f64,
    peak_bf16: Option<f64>,
    peak_i8: Option<f64>,
    peak_i4: Option<f64>,
}

/// All launches of one kernel.
#[derive(Debug, Serialize)]
struct KernelTimeRow {
    kernel: String,
    calls: u64,
    /// Mean of the workers.
    ms: f64,
    /// Sum of what the slowest worker of each launch took.
    slowest_ms: f64,
    /// Time at the barriers right after it, mean of the workers.
    waiting_ms: f64,
    /// Share of the whole run.
    share: f64,
    /// Weights, states, rows of caches.
    memory_bytes: f64,
    /// Other tensors.
    value_bytes: f64,
    ops: f64,
    limit_ms: f64,
    share_of_limit: f64,
    /// `memory`, `f32`, `bf16`, `i8` or `i4` (arithmetic), or `neither` where both limits are far.
    bound_by: String,
}

/// A kernel that reaches less than this share of its limit is bound by something else.
const FAR: f64 = 0.25;

/// The limits of the machine, per second.
struct PeakRates {
    bandwidth: f64,
    /// Peaks by [`ComputeType::ALL`].
    peaks: [Option<f64>; KINDS],
}

impl PeakRates {
    /// Peak of an arithmetic, that of f32 where the machine has no instruction for it.
    fn peak(&self, arithmetic: &str) -> (&'static str, f64) {
        let kinds = || ComputeType::ALL.into_iter().zip(self.peaks);
        let found = |name| kinds().find_map(|(a, peak)| Some((a.name(), peak?)).filter(|_| a.name() == name));
        found(arithmetic).or_else(|| found("f32")).unwrap_or(("f32", f64::INFINITY))
    }
}

pub fn profile_tests(
    model: &Model,
    tests: &[BenchTest],
    options: &BenchOptions,
    host: &dyn BenchHost,
) -> Result<Vec<KernelProfile>, BenchError> {
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let level = LevelKernels::read(&metadata, model.executor())?;
    let threads = model.threads();
    host.detail(&"warming up");
    probe::keep_busy(threads, options.warm_up.max(0.0));
    let limits = PeakRates {
        bandwidth: bandwidth_probe(threads)?.bandwidth(),
        peaks: ComputeType::ALL.map(|a| probe::measure_peak(a, threads)),
    };
    let mut runner = BenchRunner::new(model, tests, host)?;
    let mut profiles = Vec::new();
    let [_, peak_bf16, peak_i8, peak_i4] = limits.peaks;
    for &test in tests {
        host.detail(&test.name());
        let run = profile_test(&mut runner, test, options.repetitions)?;
        let text = |path: &str| metadata.pointer(path).and_then(Value::as_str).unwrap_or("-").to_string();
        let (kernels, barriers, waiting_ms) = kernel_rows(&level, test, &run, model.plan().chunk, &limits);
        let inside: f64 = kernels.iter().map(|k| k.ms).sum::<f64>() + waiting_ms;
        profiles.push(KernelProfile {
            model: text("/model/name"),
            quant: scheme_name(&metadata),
            level: model.executor().to_string(),
            threads,
            test: test.name(),
            repetitions: options.repetitions,
            tok_s: 1e3 * test.tokens() as f64 / run.ms,
            ms: run.ms,
            kernels,
            launches: count_launches(&level, test, model.plan().chunk),
            barriers,
            waiting_ms,
            outside_ms: (run.ms - inside).max(0.0),
            read_bandwidth: limits.bandwidth,
            peak_f32: limits.peak("f32").1,
            peak_bf16,
            peak_i8,
            peak_i4,
        });
    }
    Ok(profiles)
}

/// Times of one test.
struct ProfiledRun {
    repetitions: f64,
    /// Milliseconds of one repetition, by the clock.
    ms: f64,
    times: Vec<StepTimes>,
}

fn profile_test(
    runner: &mut BenchRunner<'_>,
    test: BenchTest,
    repetitions: u32,
) -> Result<ProfiledRun, BenchError> {
    let (mut seconds, mut times) = (0.0, Vec::new());
    // The first round fills the caches.
    for round in 0..=repetitions {
        runner.prepare(test)?;
        runner.trace(round > 0);
        let begin = Instant::now();
        runner.run_test(test)?;
        if round > 0 {
            seconds += begin.elapsed().as_secs_f64();
            add_times(&mut times, runner.trace(false));
        }
    }
    Ok(ProfiledRun { repetitions: f64::from(repetitions), ms: 1e3 * seconds / f64::from(repetitions), times })
}

fn add_times(sum: &mut Vec<StepTimes>, more: Vec<StepTimes>) {
    for step in more {
        let Some(known) = sum.iter_mut().find(|s| s.entry == step.entry) else {
            sum.push(step);
            continue;
        };
        known.calls += step.calls;
        let items = known.nanoseconds.iter_mut().flatten().zip(step.nanoseconds.iter().flatten());
        items.for_each(|(sum, more)| *sum += more);
    }
}

/// The kernels of one level, and what the items of its steps are.
struct LevelKernels {
    kernels: Vec<KernelCost>,
    steps: BTreeMap<String, Vec<i64>>,
    /// Items of steps that run for each sequence, those of them for sequences of one row and of several, and
    /// items for the output rows.
    sequence_items: ItemIndices,
    one_row: ItemIndices,
    several_rows: ItemIndices,
    output_items: ItemIndices,
}

/// Numbers of items, by step.
type ItemIndices = BTreeMap<String, Vec<usize>>;

struct KernelCost {
    name: String,
    memory: Dim,
    values: Dim,
    ops: Dim,
    arithmetic: String,
}

impl LevelKernels {
    fn read(metadata: &Value, name: &str) -> Result<LevelKernels, BenchError> {
        let missing = || {
            BenchError::usage(format!(
                "the artifact does not describe its kernels for {name}: profiles are of models for a CPU"
            ))
        };
        let level = metadata.get("profile").and_then(|p| p.get(name)).ok_or_else(missing)?;
        let parsed = |key: &str| level.get(key).cloned().ok_or_else(missing);
        let infos: Vec<KernelInfo> = serde_json::from_value(parsed("kernels")?).map_err(|_| missing())?;
        let kernels =
            infos.iter().map(|k| KernelCost::read(k).ok_or_else(missing)).collect::<Result<_, _>>()?;
        let steps = serde_json::from_value(parsed("steps")?).map_err(|_| missing())?;
        let items = |key: &str| serde_json::from_value(parsed(key)?).map_err(|_| missing());
        let [each, one_row, several_rows, wanted] =
            [items("each")?, items("one_row")?, items("several_rows")?, items("wanted")?];
        Ok(LevelKernels { kernels, steps, sequence_items: each, one_row, several_rows, output_items: wanted })
    }

    /// Sizes of the launches of an item in a call.
    fn item_launches(&self, call: &EntryCall, item: usize) -> Vec<SymValues> {
        let is = |items: &ItemIndices| items.get(call.entry).is_some_and(|items| items.contains(&item));
        let each = |of: SequenceFilter| call.sequences.iter().filter(|s| of.includes(s.n)).copied().collect();
        match () {
            () if is(&self.one_row) => each(SequenceFilter::OneRow),
            () if is(&self.several_rows) => each(SequenceFilter::SeveralRows),
            () if is(&self.sequence_items) => each(SequenceFilter::All),
            () if is(&self.output_items) => vec![SymValues { n: call.sequences.len() as i64, ..call.all }],
            () => vec![call.all],
        }
    }
}

impl KernelCost {
    fn read(info: &KernelInfo) -> Option<KernelCost> {
        let dim = |text: &str| parse_dim(&mut Lexer::new(text).ok()?).ok();
        Some(KernelCost {
            name: info.name.clone(),
            memory: dim(&info.memory)?,
            values: dim(&info.values)?,
            ops: dim(&info.ops)?,
            arithmetic: info.arithmetic.clone(),
        })
    }
}

/// A call of an entry point: its sizes, and those of each sequence.
struct EntryCall {
    entry: &'static str,
    all: SymValues,
    sequences: Vec<SymValues>,
}

impl EntryCall {
    fn new(entry: &'static str, sequences: Vec<SymValues>) -> EntryCall {
        let (n, b) = (sequences.iter().map(|s| s.n).sum(), sequences.len() as i64);
        // Work for all rows together does not depend on the tokens before them.
        let past = sequences.first().map_or(0, |s| s.past);
        EntryCall { entry, all: SymValues { n, b, past }, sequences }
    }
}

/// The calls that a test makes.
fn test_calls(test: BenchTest, chunk: u64) -> Vec<EntryCall> {
    let sequence = |n: usize, past: usize| SymValues { n: n as i64, b: 1, past: past as i64 };
    match test {
        BenchTest::Prompt(n) => {
            let chunk = chunk.max(1) as usize;
            let piece = |past: usize| {
                let n = chunk.min(n - past);
                EntryCall::new(if n == 1 { "decode" } else { "prefill" }, vec![sequence(n, past)])
            };
            (0..n).step_by(chunk).map(piece).collect()
        }
        BenchTest::Generate { tokens, depth, sequences } => {
            let entry = if sequences > 1 { "decode_batch" } else { "decode" };
            (0..tokens).map(|i| EntryCall::new(entry, vec![sequence(1, depth + i); sequences])).collect()
        }
        BenchTest::Mixed { mix: MixedStep { decode_tokens: next, prefill_tokens: piece }, depth } => {
            let mut sequences = vec![sequence(1, depth); next];
            sequences.push(sequence(piece, 0));
            let entry = if piece == 1 { "decode_batch" } else { "step" };
            vec![EntryCall::new(entry, sequences)]
        }
        BenchTest::Texts { counts: of, texts_per_call: together } => {
            let texts = vec![sequence(of.tokens, 0); of.texts];
            texts.chunks(together).map(|call| EntryCall::new("step", call.to_vec())).collect()
        }
    }
}

/// Items that are launches, of all calls of a test.
fn count_launches(level: &LevelKernels, test: BenchTest, chunk: u64) -> u64 {
    let of_call = |call: &EntryCall| {
        level.steps.get(call.entry).map_or(0, |items| items.iter().filter(|&&kernel| kernel >= 0).count())
    };
    test_calls(test, chunk).iter().map(of_call).sum::<usize>() as u64
}

/// Rows of the kernels, the number of barriers and the time spent at them.
fn kernel_rows(
    level: &LevelKernels,
    test: BenchTest,
    run: &ProfiledRun,
    chunk: u64,
    limits: &PeakRates,
) -> (Vec<KernelTimeRow>, u64, f64) {
    let per_run = 1e-6 / run.repetitions;
    let calls = test_calls(test, chunk);
    let (mut rows, mut barriers, mut waiting): (BTreeMap<usize, KernelTimeRow>, u64, f64) =
        (BTreeMap::new(), 0, 0.0);
    for step in &run.times {
        let Some(items) = level.steps.get(step.entry) else { continue };
        let calls: Vec<&EntryCall> = calls.iter().filter(|c| c.entry == step.entry).collect();
        let mut before = None;
        for (item, &kernel) in items.iter().enumerate() {
            let times = step.nanoseconds.iter().map(|w| w.get(item).copied().unwrap_or(0) as f64 * per_run);
            let mean = times.clone().sum::<f64>() / step.nanoseconds.len().max(1) as f64;
            let Some(cost) = usize::try_from(kernel).ok().and_then(|k| level.kernels.get(k)) else {
                barriers += calls.len() as u64;
                waiting += mean;
                if let Some(row) = before.and_then(|kernel| rows.get_mut(&kernel)) {
                    row.waiting_ms += mean;
                }
                continue;
            };
            let sizes: Vec<SymValues> =
                calls.iter().flat_map(|call| level.item_launches(call, item)).collect();
            before = Some(kernel as usize);
            let row = rows.entry(kernel as usize).or_insert_with(|| KernelTimeRow::new(&cost.name));
            row.calls += sizes.len() as u64;
            row.ms += mean;
            row.slowest_ms += times.fold(0.0, f64::max);
            row.add_work(cost, &sizes);
        }
    }
    let finish = |(kernel, mut row): (usize, KernelTimeRow)| {
        row.compute_shares(&level.kernels[kernel].arithmetic, run.ms, limits);
        row
    };
    let mut rows: Vec<KernelTimeRow> = rows.into_iter().map(finish).collect();
    rows.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    (rows, barriers, waiting)
}

impl KernelTimeRow {
    fn new(kernel: &str) -> KernelTimeRow {
        KernelTimeRow {
            kernel: kernel.into(),
            calls: 0,
            ms: 0.0,
            slowest_ms: 0.0,
            waiting_ms: 0.0,
            share: 0.0,
            memory_bytes: 0.0,
            value_bytes: 0.0,
            ops: 0.0,
            limit_ms: 0.0,
            share_of_limit: 0.0,
            bound_by: String::new(),
        }
    }

    fn add_work(&mut self, cost: &KernelCost, sizes: &[SymValues]) {
        let sum = |dim: &Dim| sizes.iter().map(|s| dim.eval(s) as f64).sum::<f64>();
        self.memory_bytes += sum(&cost.memory);
        self.value_bytes += sum(&cost.values);
        self.ops += sum(&cost.ops);
    }

    fn compute_shares(&mut self, arithmetic: &str, total_ms: f64, limits: &PeakRates) {
        let (arithmetic, peak) = limits.peak(arithmetic);
        let by_memory = 1e3 * self.memory_bytes / limits.bandwidth;
        let by_compute = 1e3 * self.ops / peak;
        self.limit_ms = by_memory.max(by_compute);
        self.share = self.ms / total_ms;
        self.share_of_limit = if self.ms > 0.0 { self.limit_ms / self.ms } else { 0.0 };
        let bound = if by_memory >= by_compute { "memory" } else { arithmetic };
        self.bound_by = if self.share_of_limit < FAR { "neither" } else { bound }.into();
    }
}

pub fn markdown(profiles: &[KernelProfile]) -> String {
    let mut out = String::new();
    for p in profiles {
        let _ = write!(out, "{}", p.markdown());
    }
    out
}

fn format_giga(peak: Option<f64>) -> String {
    peak.map_or("-".to_string(), |p| format!("{:.0}", p / 1e9))
}

impl KernelProfile {
    fn markdown(&self) -> String {
        let mut out = format!(
            "{} {}, {}, {} threads, {}: {:.2} tok/s, {:.3} ms, {} launches, {} barriers; read {:.1} GB/s, f32 {:.0}, bf16 {}, i8 {}, i4 {} Gop/s\n\n",
            self.model,
            self.quant,
            self.level,
            self.threads,
            self.test,
            self.tok_s,
            self.ms,
            self.launches,
            self.barriers,
            self.read_bandwidth / 1e9,
            self.peak_f32 / 1e9,
            format_giga(self.peak_bf16),
            format_giga(self.peak_i8),
            format_giga(self.peak_i4),
        );
        out.push_str(
            "| kernel | calls | ms | slowest ms | then waiting | of time | us/call | weights, caches | values | Gop | GB/s | Gop/s | of limit | bound by |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n",
        );
        for k in &self.kernels {
            let per_second = |x: f64| if k.ms > 0.0 { 1e-6 * x / k.ms } else { 0.0 };
            let _ = writeln!(
                out,
                "| {} | {} | {:.3} | {:.3} | {:.3} | {:.1} % | {:.2} | {} | {} | {:.2} | {:.1} | {:.1} | {:.0} % | {} |",
                k.kernel,
                k.calls,
                k.ms,
                k.slowest_ms,
                k.waiting_ms,
                100.0 * k.share,
                1e3 * k.ms / k.calls.max(1) as f64,
                bytes(k.memory_bytes as u64),
                bytes(k.value_bytes as u64),
                k.ops / 1e9,
                per_second(k.memory_bytes),
                per_second(k.ops),
                100.0 * k.share_of_limit,
                k.bound_by,
            );
        }
        let line = |name: &str, calls: u64, ms: f64| {
            let us = 1e3 * ms / calls.max(1) as f64;
            format!(
                "| {name} | {calls} | {ms:.3} | | | {:.1} % | {us:.2} | | | | | | | |\n",
                100.0 * ms / self.ms
            )
        };
        out += &line("(barriers)", self.barriers, self.waiting_ms);
        out += &line("(outside of kernels)", 1, self.outside_ms);
        out.push('\n');
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level() -> LevelKernels {
        let metadata = serde_json::json!({ "profile": { "v3": {
            "kernels": [
                { "name": "product", "memory": "4000", "values": "8*n", "ops": "2000*n", "arithmetic": "i8" },
                { "name": "attention", "memory": "16*n + 16*past", "values": "0", "ops": "mul(n, past)", "arithmetic": "f32" },
            ],
            "steps": { "prefill": [0, -1, 1], "decode": [0, -1, 1, 0], "decode_batch": [0, -1, 1], "step": [0, 1, 1, -1, 0] },
            "each": { "decode_batch": [2], "step": [1, 2] }, "one_row": { "step": [1] }, "several_rows": { "step": [2] },
            "wanted": { "step": [4] },
        }}});
        assert!(LevelKernels::read(&metadata, "v4").is_err());
        LevelKernels::read(&metadata, "v3").unwrap()
    }

    #[test]
    fn work_is_summed_over_calls() {
        let times = vec![StepTimes {
            entry: "decode",
            calls: 4,
            nanoseconds: vec![
                vec![2_000_000, 500_000, 1_000_000, 0],
                vec![1_000_000, 1_500_000, 1_000_000, 0],
            ],
        }];
        let run = ProfiledRun { repetitions: 2.0, ms: 4.0, times };
        let limits = PeakRates { bandwidth: 1e9, peaks: [Some(1e9), None, Some(2e9), None] };
        let test = BenchTest::Generate { tokens: 2, depth: 10, sequences: 1 };
        let (rows, barriers, waiting) = kernel_rows(&level(), test, &run, 64, &limits);
        assert_eq!((barriers, waiting), (2, 0.5));
        let product = &rows[0];
        assert_eq!((product.kernel.as_str(), product.calls, product.ms), ("product", 4, 0.75));
        assert_eq!((product.waiting_ms, rows[1].waiting_ms), (0.5, 0.0));
        assert_eq!((product.slowest_ms, product.memory_bytes, product.ops), (1.0, 16000.0, 8000.0));
        assert_eq!(rows[1].memory_bytes, 16.0 * (11.0 + 12.0));
        assert_eq!(rows[1].ops, 10.0 + 11.0);
        assert_eq!((product.limit_ms, product.bound_by.as_str()), (0.016, "neither"));
    }

    #[test]
    fn kernels_of_a_batch_run_once_or_for_each_sequence() {
        let times = vec![StepTimes {
            entry: "decode_batch",
            calls: 1,
            nanoseconds: vec![vec![3_000_000, 0, 1_000_000]],
        }];
        let run = ProfiledRun { repetitions: 1.0, ms: 4.0, times };
        let limits = PeakRates { bandwidth: 1e9, peaks: [Some(1e9), None, Some(2e9), None] };
        let test = BenchTest::Generate { tokens: 1, depth: 10, sequences: 3 };
        let (rows, ..) = kernel_rows(&level(), test, &run, 64, &limits);
        let work: Vec<_> = rows.iter().map(|r| (r.calls, r.memory_bytes, r.ops)).collect();
        assert_eq!(work, [(1, 4000.0, 6000.0), (3, 3.0 * 16.0 * 11.0, 3.0 * 10.0)]);
    }

    #[test]
    fn mixed_steps_have_launches_for_sequences_of_each_kind() {
        let times = vec![StepTimes {
            entry: "step",
            calls: 1,
            nanoseconds: vec![vec![1_000_000, 0, 0, 0, 1_000_000]],
        }];
        let run = ProfiledRun { repetitions: 1.0, ms: 4.0, times };
        let limits = PeakRates { bandwidth: 1e9, peaks: [Some(1e9), None, Some(2e9), None] };
        let test = BenchTest::Mixed { mix: MixedStep { decode_tokens: 3, prefill_tokens: 20 }, depth: 10 };
        let (rows, barriers, _) = kernel_rows(&level(), test, &run, 64, &limits);
        let work: Vec<_> = rows.iter().map(|r| (r.calls, r.memory_bytes, r.ops)).collect();
        // Products of 23 rows and of the 4 output rows; attention of three single rows and of the piece.
        assert_eq!(work, [(2, 8000.0, 2000.0 * 27.0), (4, 16.0 * (3.0 * 11.0 + 20.0), 30.0)]);
        assert_eq!((count_launches(&level(), test, 64), barriers), (4, 1));
    }

    #[test]
    fn launches_do_not_grow_with_the_sequences() {
        let of =
            |sequences| count_launches(&level(), BenchTest::Generate { tokens: 2, depth: 0, sequences }, 64);
        assert_eq!([1, 2, 64].map(of), [6, 4, 4]);
    }

    #[test]
    fn prompts_are_cut_into_chunks() {
        let found: Vec<_> =
            test_calls(BenchTest::Prompt(129), 64).iter().map(|c| (c.entry, c.all.n, c.all.past)).collect();
        assert_eq!(found, [("prefill", 64, 0), ("prefill", 64, 64), ("decode", 1, 128)]);
    }
}
