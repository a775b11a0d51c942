//! What `mlcc tune` found: as a tuning, and for people.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mlcc_driver::tune::{Comparison, Found, is_better};
use mlcc_target::{ChangeRow, Kind, Level, Measured, TestRow, Tuning, detected_model};
use serde::Serialize;

use super::machine::{Bench, Loaded};
use crate::commands::bench::probe::{self, Arithmetic};
use crate::error::CliError;
use crate::ui;

/// What the machine can do, the least and the most of all probes.
#[derive(Clone, Debug)]
pub struct Limits {
    /// 10^9 bytes per second.
    read: [f64; 2],
    /// 10^9 operations per second.
    gops: BTreeMap<String, [f64; 2]>,
}

impl Limits {
    pub fn probe(threads: usize) -> Result<Limits, CliError> {
        let reading = probe::Reading::new(threads);
        let reading = reading.map_err(CliError::io("allocate memory for", "the bandwidth probe"))?;
        let read = rounded(reading.bandwidth() / 1e9);
        let peak = |a: Arithmetic| {
            let peak = rounded(probe::peak(a, threads)? / 1e9);
            Some((a.name().to_string(), [peak, peak]))
        };
        Ok(Limits { read: [read, read], gops: Arithmetic::ALL.into_iter().filter_map(peak).collect() })
    }

    /// Both probes together.
    pub fn and(&self, other: &Limits) -> Limits {
        let both = |a: [f64; 2], b: [f64; 2]| [a[0].min(b[0]), a[1].max(b[1])];
        let gops = self.gops.iter().map(|(kind, range)| {
            let other = other.gops.get(kind).copied().unwrap_or(*range);
            (kind.clone(), both(*range, other))
        });
        Limits { read: both(self.read, other.read), gops: gops.collect() }
    }
}

/// To four digits: the others are noise.
fn rounded(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 0.0;
    }
    let unit = 10f64.powf(value.log10().floor() - 3.0);
    ((value / unit).round() * unit * 1e6).round() / 1e6
}

/// A search that has ended.
pub struct Outcome<'a> {
    pub level: &'a Level,
    pub found: &'a Found<Loaded>,
    /// Against the start; empty if the user ended the search.
    pub last: &'a [Comparison],
    pub limits: &'a Limits,
    pub interrupted: bool,
}

impl Outcome<'_> {
    /// The file's content, and whether what was found holds against the start: else it changes nothing.
    pub fn tuning(&self, bench: &Bench<'_>, threads: usize) -> (Tuning, bool) {
        let changed = self.found.level != *self.level;
        let held = changed && (self.interrupted || is_better(self.last));
        let tests = self.last.iter().map(|c| TestRow {
            name: bench.test_name(c.kind),
            without: rounded(c.without),
            with: rounded(c.with),
            gain: rounded(c.gain),
            turns: c.turns,
        });
        let changes = self.found.trials.iter().filter(|trial| trial.taken).map(|trial| ChangeRow {
            key: trial.key.into(),
            from: trial.from.clone(),
            to: trial.to.clone(),
            gains: trial.comparisons.iter().map(|c| (c.kind.name().to_string(), rounded(c.gain))).collect(),
        });
        let measured = Measured {
            model: bench.model().into(),
            quant: bench.quant().into(),
            threads,
            read_gbytes_per_s: self.limits.read,
            gops: self.limits.gops.clone(),
            tests: tests.collect(),
            changes: if held { changes.collect() } else { Vec::new() },
        };
        let tune = if held { self.level.changes(&self.found.level) } else { toml::Table::new() };
        let (level, cpu) = (self.level.name.clone(), detected_model());
        (Tuning { level, cpu, tune, measured: Some(measured), predicted: None }, held)
    }
}

/// What is printed.
#[derive(Debug, Serialize)]
pub struct Report {
    file: PathBuf,
    /// Whether anything is changed.
    faster: bool,
    /// The search came to its end within its time.
    complete: bool,
    interrupted: bool,
    /// Values that were timed, and those that gave code that was timed already.
    tried: usize,
    equal: usize,
    seconds: f64,
    #[serde(flatten)]
    tuning: Tuning,
}

impl Report {
    pub fn new(
        file: &Path,
        tuning: Tuning,
        faster: bool,
        found: &Found<Loaded>,
        interrupted: bool,
        time: Duration,
    ) -> Report {
        Report {
            file: file.into(),
            faster,
            complete: found.complete,
            interrupted,
            tried: found.trials.len(),
            equal: found.equal,
            seconds: time.as_secs_f64(),
            tuning,
        }
    }

    pub fn text(&self) -> String {
        let mut out = format!("{}\n\n", self.tuning);
        let measured = self.tuning.measured.iter();
        let changes: Vec<&ChangeRow> = measured.clone().flat_map(|m| &m.changes).collect();
        let kinds = Kind::OF_CPUS.map(Kind::name);
        if !changes.is_empty() {
            let mut rows = vec![["key", "from", "to"].into_iter().chain(kinds).map(String::from).collect()];
            for change in changes {
                let gain =
                    |kind: &str| change.gains.get(kind).map_or("-".into(), |gain| format!("{gain:.3}"));
                let texts = [&change.key, &change.from, &change.to].map(Clone::clone);
                rows.push(texts.into_iter().chain(kinds.map(gain)).collect::<Vec<String>>());
            }
            out += &(ui::table(&rows) + "\n");
        }
        let tests: Vec<&TestRow> = measured.flat_map(|m| &m.tests).collect();
        if !tests.is_empty() {
            let head = ["test", "tok/s without", "with", "gain", "turns"];
            let mut rows: Vec<Vec<String>> = vec![head.iter().map(|s| s.to_string()).collect()];
            rows.extend(tests.iter().map(|test| {
                let speed = |speed: f64| format!("{speed:.1}");
                let (gain, turns) = (format!("{:.3}", test.gain), test.turns.to_string());
                vec![test.name.clone(), speed(test.without), speed(test.with), gain, turns]
            }));
            out += &(ui::table(&rows) + "\n");
        }
        let ended = match (self.interrupted, self.complete) {
            (true, _) => "interrupted",
            (false, true) => "no other value is faster",
            (false, false) => "the time was over",
        };
        let _ = writeln!(
            out,
            "{} values timed, {} of equal code left out, {:.0} s; {ended}",
            self.tried, self.equal, self.seconds
        );
        if !self.faster {
            out += "nothing is faster than the level as it is; the file changes nothing\n";
        }
        let _ = writeln!(out, "{}", self.file.display());
        out
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
        let limits = |read: f64, i8: f64| Limits {
            read: [read, read],
            gops: BTreeMap::from([("i8".into(), [i8, i8])]),
        };
        let both = limits(20.0, 500.0).and(&limits(25.0, 400.0));
        assert_eq!((both.read, both.gops["i8"]), ([20.0, 25.0], [400.0, 500.0]));
    }
}
