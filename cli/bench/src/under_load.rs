//! Speed beside other programs that use the same cores, compared with a fair share of the machine.
//!
//! A fair share: with `W` workers, `N` busy programs and `C` logical CPUs that this process may use, each of
//! the `W + N` threads gets `min(1, C / (W + N))` of a CPU, so the workers together get
//! `W * min(1, C / (W + N))`, where they had `min(W, C)` alone. The speed alone times the quotient of these
//! is the fair speed.

use std::fmt::Write as _;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mlcc_driver::compile::keep::scheme_name;
use mlcc_runtime::Model;
use serde::Serialize;
use serde_json::Value;

use crate::error::BenchError;
use crate::host::{BenchHost, ChildProgram};
use crate::options::BenchOptions;
use crate::probe;
use crate::report::{median, min_and_max};
use crate::runner::BenchRunner;
use crate::test::BenchTest;

/// The time that is measured of each turn, after the time in which workers find how many of them suit now.
const MEASURED: Duration = Duration::from_millis(1000);
const SETTLED: Duration = Duration::from_millis(500);

/// One test beside some number of busy programs, or none.
#[derive(Debug, Serialize)]
pub struct UnderLoadRow {
    model: String,
    quant: String,
    test: String,
    threads: usize,
    busy: u16,
    /// Tokens per second: the median of the turns, the least and the most.
    tok_s: f64,
    tok_s_min: f64,
    tok_s_max: f64,
    turns: usize,
    /// Part of the speed alone that would be fair.
    fair_share: f64,
    /// Speed over the fair speed.
    of_fair_share: f64,
}

/// Measures every test alone and together with each number of busy programs, in turns.
pub fn measure_under_load(
    model: &Model,
    tests: &[BenchTest],
    options: &BenchOptions,
    program: &ChildProgram,
    host: &dyn BenchHost,
) -> Result<Vec<UnderLoadRow>, BenchError> {
    // From here on Ctrl-C ends the busy programs first.
    host.cancel_flag();
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut runner = BenchRunner::new(model, tests, host)?;
    let counts: Vec<u16> = std::iter::once(0).chain(options.busy.iter().copied()).collect();
    host.start_progress(tests.len() as u64 * u64::from(options.repetitions) * counts.len() as u64);
    probe::keep_busy(model.threads(), options.warm_up);
    let mut rows = Vec::new();
    for test in tests {
        let mut speeds = vec![Vec::new(); counts.len()];
        for _ in 0..options.repetitions {
            for (speeds, &count) in speeds.iter_mut().zip(&counts) {
                host.set_message(format!("{} beside {count}", test.name()));
                let _programs = BusyPrograms::start(program, count)?;
                runner.speed(*test, SETTLED)?;
                speeds.push(runner.speed(*test, MEASURED)?);
                host.advance_progress();
            }
        }
        let alone = median(speeds[0].clone());
        rows.extend(speeds.into_iter().zip(&counts).map(|(speeds, &busy)| {
            let fair_share = fair_share(model.threads(), usize::from(busy), cpus);
            let [tok_s_min, tok_s_max] = min_and_max(speeds.iter().copied());
            let (turns, tok_s) = (speeds.len(), median(speeds));
            UnderLoadRow {
                model: metadata["model"]["name"].as_str().unwrap_or("-").to_string(),
                quant: scheme_name(&metadata),
                test: test.name(),
                threads: model.threads(),
                busy,
                tok_s,
                tok_s_min,
                tok_s_max,
                turns,
                fair_share,
                of_fair_share: tok_s / (alone * fair_share),
            }
        }));
    }
    host.finish_progress();
    Ok(rows)
}

/// The fair share of the speed alone, beside `busy` programs that never sleep.
fn fair_share(workers: usize, busy: usize, cpus: usize) -> f64 {
    let each = (cpus as f64 / (workers + busy) as f64).min(1.0);
    workers as f64 * each / workers.min(cpus) as f64
}

impl BenchRunner<'_> {
    /// Tokens per second of a test that is repeated for at least so long.
    fn speed(&mut self, test: BenchTest, least: Duration) -> Result<f64, BenchError> {
        let (mut seconds, mut tokens) = (0.0, 0.0);
        while seconds < least.as_secs_f64() {
            self.prepare(test)?;
            let begin = Instant::now();
            self.run_test(test)?;
            seconds += begin.elapsed().as_secs_f64();
            tokens += test.tokens() as f64;
        }
        Ok(tokens / seconds)
    }
}

/// Programs that are busy until this is dropped. They end with this process too, however that ends: each has
/// the reading end of a pipe whose other end is here.
struct BusyPrograms(Vec<Child>);

impl BusyPrograms {
    fn start(program: &ChildProgram, count: u16) -> Result<BusyPrograms, BenchError> {
        let mut programs = BusyPrograms(Vec::new());
        for _ in 0..count {
            let mut command = Command::new(&program.path);
            command.args(&program.args).stdin(Stdio::piped()).stdout(Stdio::null());
            programs.0.push(command.spawn().map_err(BenchError::io("start", &program.path))?);
        }
        Ok(programs)
    }
}

impl Drop for BusyPrograms {
    fn drop(&mut self) {
        for program in &mut self.0 {
            // It may have ended by itself: Ctrl-C reaches all programs of a terminal.
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

/// The work of a busy program, until its standard input ends.
pub fn run_busy_loop() -> ! {
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        std::process::exit(0);
    });
    loop {
        std::hint::spin_loop();
    }
}

pub fn markdown(rows: &[UnderLoadRow]) -> String {
    let mut out = String::from(
        "| model | quant | threads | test | busy programs | tok/s | min - max | fair share | of it |\n\
         | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for r in rows {
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {:.2} | {:.2} - {:.2} | {:.0} % | {:.0} % |",
            r.model,
            r.quant,
            r.threads,
            r.test,
            r.busy,
            r.tok_s,
            r.tok_s_min,
            r.tok_s_max,
            100.0 * r.fair_share,
            100.0 * r.of_fair_share,
        );
    }
    out.push_str(
        "\nThe fair share is a share of the idle machine's speed: what workers get if every thread of the workers and \
         of the busy programs gets the same CPU time.\n",
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fair_shares() {
        let close = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-12, "{found}");
        close(fair_share(2, 0, 2), 1.0);
        close(fair_share(2, 1, 2), 2.0 / 3.0);
        close(fair_share(2, 2, 2), 0.5);
        close(fair_share(1, 1, 2), 1.0);
        close(fair_share(1, 3, 2), 0.5);
        close(fair_share(8, 2, 16), 1.0);
        // More workers than CPUs get more than their CPUs' worth of threads.
        close(fair_share(4, 0, 2), 1.0);
        close(fair_share(4, 4, 2), 0.5);
    }

    #[test]
    fn tables_show_parts_in_per_cent() {
        let row = UnderLoadRow {
            model: "m".into(),
            quant: "q4i8".into(),
            test: "tg8".into(),
            threads: 2,
            busy: 2,
            tok_s: 45.0,
            tok_s_min: 40.0,
            tok_s_max: 50.0,
            turns: 3,
            fair_share: 0.5,
            of_fair_share: 0.9,
        };
        let line = "| m | q4i8 | 2 | tg8 | 2 | 45.00 | 40.00 - 50.00 | 50 % | 90 % |";
        assert!(markdown(&[row]).contains(line));
    }
}
