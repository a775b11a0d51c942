//! The result of `mlcc tune`: as a tuning, and for people.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mlcc_driver::format::format_table;
use mlcc_driver::tune::{SpeedComparison, TuneResult, is_better};
use mlcc_target::{
    ChangeRow, FeatureLevel, LevelTuning, MeasuredTuning, PredictedRow, PredictedTuning, TestRow,
    WorkloadKind, detected_model,
};
use serde::Serialize;

use super::machine::TimingBench;
use super::predicted::PredictionBench;
use crate::error::BenchError;
use crate::probe::{self, ComputeType, bandwidth_probe};

/// The limits of the machine, the least and the most of all probes.
#[derive(Clone, Debug)]
pub struct ProbedLimits {
    /// 10^9 bytes per second.
    read: [f64; 2],
    /// 10^9 operations per second.
    gops: BTreeMap<String, [f64; 2]>,
}

impl ProbedLimits {
    pub fn probe(threads: usize) -> Result<ProbedLimits, BenchError> {
        let read = rounded(bandwidth_probe(threads)?.bandwidth() / 1e9);
        let peak = |a: ComputeType| {
            let peak = rounded(probe::measure_peak(a, threads)? / 1e9);
            Some((a.name().to_string(), [peak, peak]))
        };
        Ok(ProbedLimits { read: [read, read], gops: ComputeType::ALL.into_iter().filter_map(peak).collect() })
    }

    /// Both probes together.
    pub fn widen(&self, other: &ProbedLimits) -> ProbedLimits {
        let both = |a: [f64; 2], b: [f64; 2]| [a[0].min(b[0]), a[1].max(b[1])];
        let gops = self.gops.iter().map(|(kind, range)| {
            let other = other.gops.get(kind).copied().unwrap_or(*range);
            (kind.clone(), both(*range, other))
        });
        ProbedLimits { read: both(self.read, other.read), gops: gops.collect() }
    }
}

/// Rounds to four digits: the others are noise.
fn rounded(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 0.0;
    }
    let unit = 10f64.powf(value.log10().floor() - 3.0);
    ((value / unit).round() * unit * 1e6).round() / 1e6
}

/// A search that has ended.
pub struct SearchOutcome<'a, A> {
    pub level: &'a FeatureLevel,
    pub found: &'a TuneResult<A>,
    /// Against the start; empty if the user ended the search.
    pub confirmation: &'a [SpeedComparison],
    pub interrupted: bool,
}

impl<A> SearchOutcome<'_, A> {
    /// True if the result is better than the start: else the file changes nothing.
    pub fn is_confirmed(&self) -> bool {
        self.found.level != *self.level && (self.interrupted || is_better(self.confirmation))
    }

    fn changes(&self) -> Vec<ChangeRow> {
        let row = |trial: &mlcc_driver::tune::TuneTrial| ChangeRow {
            key: trial.key.into(),
            from: trial.from.clone(),
            to: trial.to.clone(),
            gains: trial.comparisons.iter().map(|c| (c.kind.name().to_string(), rounded(c.gain))).collect(),
        };
        let taken = self.found.trials.iter().filter(|trial| trial.taken && self.is_confirmed());
        taken.map(row).collect()
    }

    fn tune(&self) -> toml::Table {
        if self.is_confirmed() { self.level.changed_keys(&self.found.level) } else { toml::Table::new() }
    }

    /// The file's content.
    pub fn measured(&self, bench: &TimingBench<'_>, limits: &ProbedLimits, threads: usize) -> LevelTuning {
        let tests = self.confirmation.iter().map(|c| TestRow {
            name: bench.test_name(c.kind),
            without: rounded(c.without),
            with: rounded(c.with),
            gain: rounded(c.gain),
            turns: c.turns,
        });
        let measured = MeasuredTuning {
            model: bench.builder().model().into(),
            quant: bench.builder().quant().into(),
            threads,
            read_gbytes_per_s: limits.read,
            gops: limits.gops.clone(),
            tests: tests.collect(),
            changes: self.changes(),
        };
        LevelTuning {
            level: self.level.name.clone(),
            cpu: detected_model(),
            tune: self.tune(),
            measured: Some(measured),
            predicted: None,
        }
    }

    /// The tuning from predictions, made with these versions of the assembler and the disassembler.
    pub fn predicted(
        &self,
        predictions: &PredictionBench<'_>,
        [ptxas, nvdisasm]: [String; 2],
    ) -> LevelTuning {
        let tests = self.confirmation.iter().map(|c| PredictedRow {
            name: predictions.test_name(c.kind),
            without: rounded(c.without),
            with: rounded(c.with),
            gain: rounded(c.gain),
        });
        let predicted = PredictedTuning {
            model: predictions.builder().model().into(),
            quant: predictions.builder().quant().into(),
            device: predictions.gpu().name.clone(),
            ptxas,
            nvdisasm,
            tests: tests.collect(),
            changes: self.changes(),
        };
        LevelTuning {
            level: self.level.name.clone(),
            cpu: None,
            tune: self.tune(),
            measured: None,
            predicted: Some(predicted),
        }
    }
}

/// The printed report.
#[derive(Debug, Serialize)]
pub struct TuneReport {
    file: PathBuf,
    /// True if anything is changed.
    faster: bool,
    /// The search came to its end within its time.
    complete: bool,
    interrupted: bool,
    /// Values that were judged, and those that gave code that was judged already.
    tried: usize,
    equal: usize,
    /// Values that could not be built or judged, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<SkippedValue>,
    seconds: f64,
    #[serde(flatten)]
    tuning: LevelTuning,
}

#[derive(Debug, Serialize)]
struct SkippedValue {
    key: &'static str,
    to: String,
    why: String,
}

impl TuneReport {
    pub fn new<A>(file: &Path, tuning: LevelTuning, of: &SearchOutcome<'_, A>, time: Duration) -> TuneReport {
        let left_out = of.found.refused.iter().map(|refusal| SkippedValue {
            key: refusal.key,
            to: refusal.to.clone(),
            why: refusal.why.clone(),
        });
        TuneReport {
            file: file.into(),
            faster: of.is_confirmed(),
            complete: of.found.complete,
            interrupted: of.interrupted,
            tried: of.found.trials.len(),
            equal: of.found.equal,
            left_out: left_out.collect(),
            seconds: time.as_secs_f64(),
            tuning,
        }
    }

    /// The user has ended the search.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    pub fn text(&self) -> String {
        let mut out = format!("{}\n\n", self.tuning);
        let (changes, kinds, judged): (&[ChangeRow], &[WorkloadKind], _) =
            match (&self.tuning.measured, &self.tuning.predicted) {
                (Some(measured), _) => (&measured.changes, &WorkloadKind::OF_CPUS, "timed"),
                (None, Some(predicted)) => {
                    (&predicted.changes, &WorkloadKind::OF_GPUS, "predicted, none measured")
                }
                (None, None) => (&[], &[], "judged"),
            };
        if !changes.is_empty() {
            let names = kinds.iter().map(|kind| kind.name());
            let mut rows =
                vec![["key", "from", "to"].into_iter().chain(names.clone()).map(String::from).collect()];
            for change in changes {
                let gain =
                    |kind: &str| change.gains.get(kind).map_or("-".into(), |gain| format!("{gain:.3}"));
                let texts = [&change.key, &change.from, &change.to].map(Clone::clone);
                rows.push(texts.into_iter().chain(names.clone().map(gain)).collect::<Vec<String>>());
            }
            out += &(format_table(&rows) + "\n");
        }
        let tests = self.tests();
        if tests.len() > 1 {
            out += &(format_table(&tests) + "\n");
        }
        let ended = match (self.interrupted, self.complete) {
            (true, _) => "interrupted",
            (false, true) => "no other value is faster",
            (false, false) => "the time was over",
        };
        let _ = writeln!(
            out,
            "{} values {judged}, {} of equal code left out, {:.0} s; {ended}",
            self.tried, self.equal, self.seconds
        );
        for SkippedValue { key, to, why } in &self.left_out {
            let _ = writeln!(out, "{key} {to} was left out: {why}");
        }
        if !self.faster {
            out += "nothing is faster than the level as it is; the file changes nothing\n";
        }
        let _ = writeln!(out, "{}", self.file.display());
        out
    }

    /// Rows of the table of tests, its head included.
    fn tests(&self) -> Vec<Vec<String>> {
        let speed = |speed: f64| format!("{speed:.1}");
        let row = |texts: &[&str]| texts.iter().map(|s| s.to_string()).collect::<Vec<String>>();
        if let Some(predicted) = &self.tuning.predicted {
            let rows = predicted.tests.iter().map(|test| {
                vec![test.name.clone(), speed(test.without), speed(test.with), format!("{:.3}", test.gain)]
            });
            let head = row(&["test", "predicted tok/s without", "with", "predicted gain"]);
            return [head].into_iter().chain(rows).collect();
        }
        let tests = self.tuning.measured.iter().flat_map(|measured| &measured.tests);
        let rows = tests.map(|test| {
            let (gain, turns) = (format!("{:.3}", test.gain), test.turns.to_string());
            vec![test.name.clone(), speed(test.without), speed(test.with), gain, turns]
        });
        [row(&["test", "tok/s without", "with", "gain", "turns"])].into_iter().chain(rows).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits() {
        assert_eq!([29.123_456, 1234.56, 0.001_234_56, 0.0].map(rounded), [29.12, 1235.0, 0.001_235, 0.0]);
        assert_eq!(rounded(f64::INFINITY), 0.0);
    }

    #[test]
    fn limits_span_all_probes() {
        let limits = |read: f64, i8: f64| ProbedLimits {
            read: [read, read],
            gops: BTreeMap::from([("i8".into(), [i8, i8])]),
        };
        let both = limits(20.0, 500.0).widen(&limits(25.0, 400.0));
        assert_eq!((both.read, both.gops["i8"]), ([20.0, 25.0], [400.0, 500.0]));
    }
}
