//! The time of a process until its first token, and its memory then.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use mlcc_driver::format::bytes;
use mlcc_runtime::Session;
use serde::{Deserialize, Serialize};

use crate::error::BenchError;
use crate::host::ChildProgram;
use crate::report::median;
use crate::test::test_prompt;

/// Tokens of the prompt.
const PROMPT: usize = 8;

/// The report of the process when it has its first token.
#[derive(Debug, Serialize, Deserialize)]
pub struct FirstTokenReport {
    token: usize,
    weights: u64,
    /// Bytes of memory at this moment, and at most so far; of Linux.
    resident: Option<u64>,
    peak: Option<u64>,
}

#[derive(Debug, Serialize)]
pub struct StartReport {
    /// Median of the repetitions, from before the process was started.
    milliseconds: f64,
    milliseconds_min: f64,
    weights: u64,
    resident: Option<u64>,
    peak: Option<u64>,
    /// Peak over weights.
    memory_ratio: Option<f64>,
}

/// The process that is measured, which has loaded the model: reads a prompt, takes the best token and tells.
pub fn report_first_token(session: &mut Session) -> Result<FirstTokenReport, BenchError> {
    let prompt = test_prompt(PROMPT, session.model());
    let logits = session.prefill(&prompt)?;
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(token, _)| token);
    let weights = session.model().table().params.iter().map(|p| p.bytes).sum();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let (resident, peak) = (status_bytes(&status, "VmRSS:"), status_bytes(&status, "VmHWM:"));
    Ok(FirstTokenReport { token: best, weights, resident, peak })
}

/// A size in the status of a Linux process, in bytes.
fn status_bytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Starts such processes in sequence.
pub fn measure_start(program: &ChildProgram, repetitions: u32) -> Result<StartReport, BenchError> {
    let path = &program.path;
    let mut times = Vec::new();
    let mut last = None;
    // The first one brings the artifact into the page cache.
    for round in 0..=repetitions {
        let mut command = Command::new(path);
        command.args(&program.args).stdout(Stdio::piped());
        let begin = Instant::now();
        let mut child = command.spawn().map_err(BenchError::io("start", path))?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line).map_err(BenchError::io("read from", path))?;
        }
        let seconds = begin.elapsed().as_secs_f64();
        child.wait().map_err(BenchError::io("wait for", path))?;
        let told: FirstTokenReport = serde_json::from_str(&line).map_err(|_| {
            BenchError::usage("the measured process ended before its first token; see its message above")
        })?;
        if round > 0 {
            times.push(1e3 * seconds);
        }
        last = Some(told);
    }
    let least = times.iter().copied().fold(f64::INFINITY, f64::min);
    let told = last.ok_or_else(|| BenchError::usage("nothing was measured"))?;
    Ok(StartReport {
        milliseconds: median(times),
        milliseconds_min: least,
        weights: told.weights,
        resident: told.resident,
        peak: told.peak,
        memory_ratio: told.peak.map(|p| p as f64 / told.weights.max(1) as f64),
    })
}

impl StartReport {
    pub fn markdown(&self) -> String {
        let size = |size: Option<u64>| size.map_or("-".to_string(), bytes);
        let ratio = self.memory_ratio.map_or("-".to_string(), |r| format!("{r:.2}"));
        format!(
            "| first token, ms | fastest, ms | weights | memory | at most | over weights |\n\
             | ---: | ---: | ---: | ---: | ---: | ---: |\n\
             | {:.1} | {:.1} | {} | {} | {} | {ratio} |\n",
            self.milliseconds,
            self.milliseconds_min,
            bytes(self.weights),
            size(self.resident),
            size(self.peak),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_a_status() {
        let status = "Name:\tmlcc\nVmHWM:\t  2048 kB\nVmRSS:\t   1 kB\nThreads:\t2\n";
        assert_eq!(
            (status_bytes(status, "VmHWM:"), status_bytes(status, "VmRSS:")),
            (Some(2 << 20), Some(1024))
        );
        assert_eq!((status_bytes(status, "VmSwap:"), status_bytes("VmRSS: x kB", "VmRSS:")), (None, None));
    }
}
