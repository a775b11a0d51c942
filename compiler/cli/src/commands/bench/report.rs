//! What `mlcc bench` says of a test: its speed beside what the machine could do.

use std::fmt::Write;

use mlcc_runtime::Model;
use serde::Serialize;
use serde_json::Value;

use super::{Machine, Test};
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
    ops_per_token: f64,
    /// Tokens per second that the machine cannot exceed.
    limit: f64,
    /// `read_bandwidth` or `compute_f32`, `compute_bf16`, `compute_i8`.
    limit_kind: String,
    /// Nothing where that limit moved by more than a tenth while this was measured.
    fraction_of_limit: Option<f64>,
    /// Bytes per second, before and after; operations per second likewise.
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

pub fn row(model: &Model, metadata: &Value, machine: [Machine; 2], test: Test, mut speeds: Vec<f64>) -> Row {
    speeds.sort_by(f64::total_cmp);
    let cost = test.cost(metadata, model.plan().chunk);
    let tok_s = median(&speeds);
    let (read_bandwidth, compute_peak) = (machine.map(|m| m.read_bandwidth), machine.map(|m| m.peak));
    // A probe can only be disturbed: the better one counts.
    let best = |values: [f64; 2]| values[0].max(values[1]);
    let by_memory = best(read_bandwidth) / cost.bytes.max(1.0);
    let by_compute = best(compute_peak) / cost.ops.max(1.0);
    let (limit, limit_kind, steady) = match by_memory <= by_compute {
        true => (by_memory, "read_bandwidth".to_string(), is_steady(read_bandwidth)),
        false => {
            let kind = format!("compute_{}", machine[0].arithmetic.name());
            (by_compute, kind, is_steady(compute_peak))
        }
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
        ops_per_token: cost.ops,
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
    fn medians() {
        assert_eq!(
            [median(&[]), median(&[2.0]), median(&[1.0, 4.0]), median(&[1.0, 2.0, 9.0])],
            [0.0, 2.0, 2.5, 2.0]
        );
    }
}
