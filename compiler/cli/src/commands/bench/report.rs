//! What `mlcc bench` says of a test: its speed beside what the machine could do.

use std::fmt::Write;

use mlcc_runtime::Model;
use serde::Serialize;
use serde_json::Value;

use super::probe::Arithmetic;
use super::{Cost, Machine, Test};
use crate::ui;

#[derive(Debug, Serialize)]
pub struct Row {
    model: String,
    quant: String,
    test: String,
    threads: usize,
    level: String,
    /// Median of the repetitions.
    tok_s: f64,
    tok_s_min: f64,
    tok_s_max: f64,
    repetitions: u32,
    bytes_per_token: f64,
    /// Of all kinds together.
    ops_per_token: f64,
    /// Tokens per second that the machine cannot exceed.
    limit: f64,
    /// `read_bandwidth`, or `compute_` and the kinds of arithmetic, that with the most time first: `compute_i8`, `compute_i8+f32`.
    limit_kind: String,
    /// Nothing where that limit moved by more than a tenth while this was measured.
    fraction_of_limit: Option<f64>,
    /// Bytes per second, before and after; operations per second likewise, those of the test's kinds of arithmetic one after
    /// the other, each at its peak.
    read_bandwidth: [f64; 2],
    compute_peak: [f64; 2],
    /// Nanoseconds in which a cache line goes to another thread and comes back, before and after.
    ping_pong: Option<[f64; 2]>,
}

/// Largest relative change of a limit for which a share of it is given.
const STEADY: f64 = 0.10;

/// Whether a limit stayed what it was.
fn is_steady([before, after]: [f64; 2]) -> bool {
    (after - before).abs() <= STEADY * before.max(after)
}

/// Operations per second where each kind takes its time at its own peak.
fn mixed_peak(cost: &Cost, machine: &Machine) -> f64 {
    let seconds: f64 = cost.seconds(machine).iter().sum();
    if seconds > 0.0 { cost.ops.iter().sum::<f64>() / seconds } else { f64::INFINITY }
}

/// Kinds of arithmetic of a test, that with the most time first.
fn compute_kind(cost: &Cost, machine: &Machine) -> String {
    let seconds = cost.seconds(machine);
    let mut kinds: Vec<usize> = (0..seconds.len()).filter(|&i| seconds[i] > 0.0).collect();
    kinds.sort_by(|&a, &b| seconds[b].total_cmp(&seconds[a]));
    let names: Vec<&str> = kinds.iter().map(|&i| Arithmetic::ALL[i].name()).collect();
    format!("compute_{}", names.join("+"))
}

pub fn row(model: &Model, metadata: &Value, machine: [Machine; 2], test: Test, mut speeds: Vec<f64>) -> Row {
    speeds.sort_by(f64::total_cmp);
    let cost = test.cost(metadata, model.plan().chunk);
    let tok_s = median(&speeds);
    let ops: f64 = cost.ops.iter().sum();
    let read_bandwidth = machine.map(|m| m.read_bandwidth);
    let compute_peak = machine.map(|m| mixed_peak(&cost, &m));
    // A probe can only be disturbed: the better one counts.
    let best = |values: [f64; 2]| values[0].max(values[1]);
    let by_memory = best(read_bandwidth) / cost.bytes.max(1.0);
    let by_compute = best(compute_peak) / ops.max(1.0);
    let (limit, limit_kind, steady) = match by_memory <= by_compute {
        true => (by_memory, "read_bandwidth".to_string(), is_steady(read_bandwidth)),
        false => (by_compute, compute_kind(&cost, &machine[0]), is_steady(compute_peak)),
    };
    let text = |path: &str| metadata.pointer(path).and_then(Value::as_str).unwrap_or("-").to_string();
    let ping_pong = machine[0].ping_pong.zip(machine[1].ping_pong).map(|(before, after)| [before, after]);
    Row {
        model: text("/model/name"),
        quant: text("/quantization/scheme"),
        test: test.name(),
        threads: model.threads(),
        level: model.executor().to_string(),
        tok_s,
        tok_s_min: speeds.first().copied().unwrap_or(0.0),
        tok_s_max: speeds.last().copied().unwrap_or(0.0),
        repetitions: speeds.len() as u32,
        bytes_per_token: cost.bytes,
        ops_per_token: ops,
        limit,
        limit_kind,
        fraction_of_limit: steady.then(|| tok_s / limit),
        read_bandwidth,
        compute_peak,
        ping_pong,
    }
}

/// Of a sorted list.
pub fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

pub fn markdown(rows: &[Row]) -> String {
    let mut out = String::from(
        "| model | quant | level | threads | test | tok/s | min - max | per token | limit tok/s | limited by | of limit | read GB/s | Gop/s | ping-pong ns |\n\
         | --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |\n",
    );
    for r in rows {
        let share = match r.fraction_of_limit {
            Some(share) => format!("{:.0} %", 100.0 * share),
            None => "limit moved".to_string(),
        };
        let pair =
            |[before, after]: [f64; 2], unit: f64| format!("{:.1}, {:.1}", before / unit, after / unit);
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {:.2} | {:.2} - {:.2} | {} | {:.2} | {} | {share} | {} | {} | {} |",
            r.model,
            r.quant,
            r.level,
            r.threads,
            r.test,
            r.tok_s,
            r.tok_s_min,
            r.tok_s_max,
            ui::bytes(r.bytes_per_token as u64),
            r.limit,
            r.limit_kind,
            pair(r.read_bandwidth, 1e9),
            pair(r.compute_peak, 1e9),
            r.ping_pong.map_or("-".to_string(), |p| pair(p, 1.0)),
        );
    }
    out.push_str("\nLimits of the machine: before, after.\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_move_are_not_steady() {
        assert!(is_steady([100.0, 91.0]) && is_steady([91.0, 100.0]) && is_steady([0.0, 0.0]));
        assert!(!is_steady([100.0, 89.0]) && !is_steady([89.0, 100.0]));
    }

    #[test]
    fn kinds_of_arithmetic_take_their_time_one_after_the_other() {
        let machine = Machine { read_bandwidth: 1.0, peaks: [100.0, f64::INFINITY, 400.0], ping_pong: None };
        let mixed = Cost { bytes: 1.0, ops: [100.0, 0.0, 800.0] };
        assert_eq!(mixed_peak(&mixed, &machine), 300.0, "1 s of floats and 2 s of dots");
        assert_eq!(compute_kind(&mixed, &machine), "compute_i8+f32");
        let dots = Cost { bytes: 1.0, ops: [0.0, 0.0, 800.0] };
        assert_eq!(
            (mixed_peak(&dots, &machine), compute_kind(&dots, &machine).as_str()),
            (400.0, "compute_i8")
        );
    }

    #[test]
    fn medians() {
        assert_eq!(
            [median(&[]), median(&[2.0]), median(&[1.0, 4.0]), median(&[1.0, 2.0, 9.0])],
            [0.0, 2.0, 2.5, 2.0]
        );
    }
}
