//! The report of `mlcc bench` on a test: its speed compared with the limits of the machine.

use std::fmt::Write;

use mlcc_driver::compile::keep::scheme_name;
use mlcc_driver::format::{bytes, placement};
use mlcc_runtime::{CpuTopology, Model};
use serde::Serialize;
use serde_json::Value;

use crate::probe::{ComputeType, MachineProbe};
use crate::test::{BenchTest, TokenCost};

/// One run of a test.
pub struct TestRepetition {
    /// Tokens per second.
    pub speed: f64,
    /// Seconds of each step, of tests that generate.
    pub steps: Vec<f64>,
    /// Probes before and after.
    pub machine: [MachineProbe; 2],
}

#[derive(Debug, Serialize)]
pub struct BenchRow {
    model: String,
    quant: String,
    test: String,
    threads: usize,
    level: String,
    /// The cores that this process may use, and where the weights are if they are placed; nothing on GPUs.
    cores: Option<String>,
    weights: Option<String>,
    /// Median of the repetitions.
    tok_s: f64,
    tok_s_min: f64,
    tok_s_max: f64,
    repetitions: u32,
    /// Milliseconds of a step, of tests that generate: the median of all, and that of the repetitions for the
    /// step that has the longest, with its number from 0.
    step_ms: Option<f64>,
    slowest_step_ms: Option<f64>,
    slowest_step: Option<usize>,
    bytes_per_token: f64,
    /// Operations of all kinds together.
    ops_per_token: f64,
    /// Tokens per second that the machine cannot exceed, the median over the repetitions.
    limit: f64,
    /// `read_bandwidth`, or `compute_` and the kinds of arithmetic, that with the most time first:
    /// `compute_i8`, `compute_i8+f32`. On GPUs `copy_bandwidth`; their arithmetic is not probed, so that
    /// limit is infinite (`null` in JSON).
    limit_kind: String,
    /// Repetitions for which that limit moved by no more than a tenth.
    steady_repetitions: u32,
    /// Median of their shares of the limits probed with them; nothing where they are less than half of all.
    fraction_of_limit: Option<f64>,
    /// Bytes per second, the least and the most of all probes, on GPUs read and written by copies; operations
    /// per second likewise, those of the test's kinds of arithmetic in turn, each at its peak.
    read_bandwidth: [f64; 2],
    compute_peak: [f64; 2],
    /// Nanoseconds in which a cache line goes to another thread and comes back, the least and the most.
    ping_pong: Option<[f64; 2]>,
}

/// [`BenchRow::limit_kind`] where nothing is known.
const NOT_PROBED: &str = "not probed";
/// Largest relative change of a limit for which a share of it is given.
const STEADY: f64 = 0.10;

/// True if a limit stayed the same.
fn is_steady([before, after]: [f64; 2]) -> bool {
    (after - before).abs() <= STEADY * before.max(after)
}

/// Operations per second where each kind takes its time at its own peak.
fn mixed_peak(cost: &TokenCost, machine: &MachineProbe) -> f64 {
    let seconds: f64 = cost.seconds(machine).iter().sum();
    if seconds > 0.0 { cost.ops.iter().sum::<f64>() / seconds } else { f64::INFINITY }
}

/// Kinds of arithmetic of a test, that with the most time first.
fn compute_kind(cost: &TokenCost, machine: &MachineProbe) -> String {
    let seconds = cost.seconds(machine);
    let mut kinds: Vec<usize> = (0..seconds.len()).filter(|&i| seconds[i] > 0.0).collect();
    kinds.sort_by(|&a, &b| seconds[b].total_cmp(&seconds[a]));
    let names: Vec<&str> = kinds.iter().map(|&i| ComputeType::ALL[i].name()).collect();
    format!("compute_{}", names.join("+"))
}

/// Median limit, median share of it, and how many repetitions were steady. `probed` are the limits before and
/// after each repetition, in tokens per second; a probe can only be disturbed, so the better one counts.
fn share_of_limit(runs: &[TestRepetition], probed: &[[f64; 2]]) -> (f64, Option<f64>, usize) {
    let best = |values: &[f64; 2]| values[0].max(values[1]);
    let steady = runs.iter().zip(probed).filter(|(_, limits)| is_steady(**limits));
    let shares: Vec<f64> = steady.map(|(run, limits)| run.speed / best(limits)).collect();
    let (count, enough) = (shares.len(), 2 * shares.len() >= runs.len());
    (median(probed.iter().map(best).collect()), enough.then(|| median(shares)), count)
}

/// Seconds of the median step, and of the one that is slowest in most repetitions, with its number. A step
/// that is slow once may be due to the machine; one that is slow each time is ours.
fn step_statistics(runs: &[TestRepetition]) -> Option<(f64, f64, usize)> {
    let all = median(runs.iter().flat_map(|run| run.steps.iter().copied()).collect());
    let count = runs.iter().map(|run| run.steps.len()).min()?;
    let one = |number: usize| median(runs.iter().map(|run| run.steps[number]).collect());
    let (slowest, number) = (0..count).map(|i| (one(i), i)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    Some((all, slowest, number))
}

/// The least and the most.
pub fn min_and_max(values: impl Iterator<Item = f64>) -> [f64; 2] {
    values.fold([f64::INFINITY, 0.0], |[least, most], v| [least.min(v), most.max(v)])
}

/// The row of at least one repetition.
pub fn bench_row(model: &Model, metadata: &Value, test: BenchTest, runs: &[TestRepetition]) -> BenchRow {
    let cost = test.cost(metadata, model.plan().chunk);
    let ops: f64 = cost.ops.iter().sum();
    let limits = |of: &dyn Fn(&MachineProbe) -> f64| -> Vec<[f64; 2]> {
        runs.iter().map(|run| [of(&run.machine[0]), of(&run.machine[1])]).collect()
    };
    let by_memory = share_of_limit(runs, &limits(&|m| m.read_bandwidth / cost.bytes.max(1.0)));
    let by_compute = share_of_limit(runs, &limits(&|m| mixed_peak(&cost, m) / ops.max(1.0)));
    let ((limit, fraction_of_limit, steady), limit_kind) = match by_memory.0 <= by_compute.0 {
        true if by_memory.0.is_infinite() => (by_memory, NOT_PROBED.to_string()),
        true if model.table().variants.is_empty() => (by_memory, "copy_bandwidth".to_string()),
        true => (by_memory, "read_bandwidth".to_string()),
        false => (by_compute, compute_kind(&cost, &runs[0].machine[0])),
    };
    let speeds = min_and_max(runs.iter().map(|run| run.speed));
    let steps = step_statistics(runs);
    let machines = || runs.iter().flat_map(|run| run.machine);
    let pings: Option<Vec<f64>> = machines().map(|m| m.ping_pong).collect();
    let text = |path: &str| metadata.pointer(path).and_then(Value::as_str).unwrap_or("-").to_string();
    BenchRow {
        model: text("/model/name"),
        quant: scheme_name(metadata),
        test: test.name(),
        threads: model.threads(),
        level: model.executor().to_string(),
        cores: (!model.table().variants.is_empty()).then(|| CpuTopology::detect_host().to_string()),
        weights: placement(model),
        tok_s: median(runs.iter().map(|run| run.speed).collect()),
        tok_s_min: speeds[0],
        tok_s_max: speeds[1],
        repetitions: runs.len() as u32,
        step_ms: steps.map(|s| 1e3 * s.0),
        slowest_step_ms: steps.map(|s| 1e3 * s.1),
        slowest_step: steps.map(|s| s.2),
        bytes_per_token: cost.bytes,
        ops_per_token: ops,
        limit,
        limit_kind,
        steady_repetitions: steady as u32,
        fraction_of_limit,
        read_bandwidth: min_and_max(machines().map(|m| m.read_bandwidth)),
        compute_peak: min_and_max(machines().map(|m| mixed_peak(&cost, &m))),
        ping_pong: pings.map(|p| min_and_max(p.into_iter())),
    }
}

/// 0 of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

pub fn markdown(rows: &[BenchRow]) -> String {
    let mut out = String::from(
        "| model | quant | level | threads | test | tok/s | min - max | slowest step | per token | limit tok/s | limited by | of limit | read GB/s | Gop/s | ping-pong ns |\n\
         | --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |\n",
    );
    for r in rows {
        let share = match r.fraction_of_limit {
            Some(share) => format!("{:.0} %", 100.0 * share),
            None if r.limit.is_infinite() => "-".to_string(),
            None => "limit moved".to_string(),
        };
        let pair = |[least, most]: [f64; 2], unit: f64| match least.is_infinite() {
            true => "-".to_string(),
            false => format!("{:.1} - {:.1}", least / unit, most / unit),
        };
        let slowest = match (r.slowest_step_ms, r.step_ms) {
            (Some(slowest), Some(median)) if median > 0.0 => format!("{:.2} x", slowest / median),
            _ => "-".to_string(),
        };
        let limit = if r.limit.is_infinite() { "-".to_string() } else { format!("{:.2}", r.limit) };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {:.2} | {:.2} - {:.2} | {slowest} | {} | {limit} | {} | {share} | {} | {} | {} |",
            r.model,
            r.quant,
            r.level,
            r.threads,
            r.test,
            r.tok_s,
            r.tok_s_min,
            r.tok_s_max,
            bytes(r.bytes_per_token as u64),
            r.limit_kind,
            pair(r.read_bandwidth, 1e9),
            pair(r.compute_peak, 1e9),
            r.ping_pong.map_or("-".to_string(), |p| pair(p, 1.0)),
        );
    }
    let mut machines: Vec<(&str, &str)> = Vec::new();
    for r in rows {
        let weights = [("Weights", r.weights.as_deref())];
        for (what, text) in [("Cores", r.cores.as_deref())].into_iter().chain(weights) {
            machines.extend(text.map(|text| (what, text)).filter(|line| !machines.contains(line)));
        }
    }
    for (what, text) in machines {
        let _ = write!(out, "\n{what}: {text}.");
    }
    out.push_str(
        "\nLimits of the machine, probed before and after every repetition: the minimum and the maximum. The share is \
         the median of the repetitions, each of the limit probed with it. The slowest step is that whose median over \
         the repetitions is the longest, over the median of all steps. On a GPU, \"read\" is what copies read and \
         write, measured once.\n",
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_probed_is_no_limit() {
        let run = |speed| TestRepetition { speed, steps: vec![], machine: [MachineProbe::UNKNOWN; 2] };
        let (limit, share, steady) = share_of_limit(&[run(1.0), run(2.0)], &[[f64::INFINITY; 2]; 2]);
        assert_eq!((limit, share, steady), (f64::INFINITY, None, 0));
    }

    #[test]
    fn limits_that_move_are_not_steady() {
        assert!(is_steady([100.0, 91.0]) && is_steady([91.0, 100.0]) && is_steady([0.0, 0.0]));
        assert!(!is_steady([100.0, 89.0]) && !is_steady([89.0, 100.0]));
    }

    #[test]
    fn every_repetition_is_held_against_its_own_limit() {
        let machine = MachineProbe { read_bandwidth: 1.0, peaks: [1.0; 4], ping_pong: None };
        let runs =
            [45.0, 90.0, 80.0].map(|speed| TestRepetition { speed, steps: vec![], machine: [machine; 2] });
        let share = |probed| share_of_limit(&runs, probed);
        assert_eq!(
            share(&[[50.0, 48.0], [100.0, 95.0], [50.0, 100.0]]),
            (100.0, Some(0.9), 2),
            "the last moved"
        );
        assert_eq!(share(&[[50.0, 48.0], [50.0, 95.0], [50.0, 100.0]]), (95.0, None, 1), "most moved");
    }

    #[test]
    fn steps_that_are_slow_each_time() {
        let run = |steps: &[f64]| TestRepetition {
            speed: 1.0,
            steps: steps.to_vec(),
            machine: [MachineProbe::UNKNOWN; 2],
        };
        let runs = [run(&[9.0, 1.0, 1.0, 2.0]), run(&[1.0, 1.0, 1.0, 3.0]), run(&[1.0, 1.0, 8.0, 2.0])];
        assert_eq!(step_statistics(&runs), Some((1.0, 2.0, 3)), "9 and 8 are of single repetitions");
        assert_eq!(step_statistics(&[run(&[])]), None);
    }

    #[test]
    fn kinds_of_arithmetic_take_their_time_one_after_the_other() {
        let machine = MachineProbe {
            read_bandwidth: 1.0,
            peaks: [100.0, f64::INFINITY, 400.0, 800.0],
            ping_pong: None,
        };
        let mixed = TokenCost { bytes: 1.0, ops: [100.0, 0.0, 800.0, 0.0] };
        assert_eq!(mixed_peak(&mixed, &machine), 300.0, "1 s of floats and 2 s of dots");
        assert_eq!(compute_kind(&mixed, &machine), "compute_i8+f32");
        let dots = TokenCost { bytes: 1.0, ops: [0.0, 0.0, 800.0, 0.0] };
        assert_eq!(
            (mixed_peak(&dots, &machine), compute_kind(&dots, &machine).as_str()),
            (400.0, "compute_i8")
        );
        let four = TokenCost { bytes: 1.0, ops: [0.0, 0.0, 400.0, 1600.0] };
        assert_eq!(mixed_peak(&four, &machine), 2000.0 / 3.0, "1 s of 8-bit and 2 s of 4-bit weights");
        assert_eq!(compute_kind(&four, &machine), "compute_i4+i8");
    }

    #[test]
    fn medians() {
        assert_eq!(
            [vec![], vec![2.0], vec![4.0, 1.0], vec![9.0, 1.0, 2.0]].map(median),
            [0.0, 2.0, 2.5, 2.0]
        );
    }
}
