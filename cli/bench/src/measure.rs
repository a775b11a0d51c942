//! Speed, and its share of the machine's own limits.
//!
//! `ppN` computes N tokens as a prompt, `tgN` N tokens one by one, `tgN@b4` N of each of four sequences
//! together, `mxA+N` one step with the next tokens of A sequences and N of a prompt, `txAxN` makes the
//! vectors of A texts of N tokens. A token costs at least the bytes that are read for it (weights once per
//! call, for however many sequences; states of its own) and the multiplications of its matrices; the
//! machine's read bandwidth and arithmetic peak, probed in the same run with as many threads, turn these into
//! an upper limit of tokens per second.
//!
//! The processors of a virtual machine change places and share their memory with others, so that the limits
//! move. All threads are busy for some seconds first, the limits are probed before and after every
//! repetition, and each repetition is compared with its own. Repetitions for which a limit moved by more than
//! a tenth give no share of it.
//!
//! On a GPU the limit is what it reads and writes while it copies its own memory, measured once.

use mlcc_runtime::Model;
use serde_json::Value;

use crate::error::BenchError;
use crate::host::BenchHost;
use crate::options::BenchOptions;
use crate::probe::{self, BandwidthProbe, ComputeType, MachineProbe, bandwidth_probe};
use crate::report::{BenchRow, TestRepetition, bench_row};
use crate::runner::BenchRunner;
use crate::test::{BenchTest, operations_per_token};

pub use crate::report::markdown;

/// Measures every test, each repetition between two probes of the machine.
pub fn measure_tests(
    model: &Model,
    tests: &[BenchTest],
    options: &BenchOptions,
    host: &dyn BenchHost,
) -> Result<Vec<BenchRow>, BenchError> {
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let mut runner = BenchRunner::new(model, tests, host)?;
    host.start_progress(u64::from(options.repetitions + 1) * tests.len() as u64);
    host.set_message("warming up".into());
    // These probes are of CPUs: those of the host are no limit of a GPU.
    let on_cpu = !model.table().variants.is_empty();
    if on_cpu {
        probe::keep_busy(model.threads(), options.warm_up);
    }
    let reading = on_cpu.then(|| bandwidth_probe(model.threads())).transpose()?;
    // Copies of a GPU, whose clocks are its own, measured once.
    let gpu = match model.copy_bandwidth()? {
        Some(copies) => MachineProbe { read_bandwidth: copies, ..MachineProbe::UNKNOWN },
        None => MachineProbe::UNKNOWN,
    };
    let machine = || reading.as_ref().map_or(gpu, |reading| probe_machine(model, &metadata, reading));
    let mut rows = Vec::new();
    for test in tests {
        host.set_message(test.name());
        // Fills the caches.
        runner.prepare(*test)?;
        runner.run_timed(*test)?;
        host.advance_progress();
        let mut runs = Vec::new();
        for _ in 0..options.repetitions {
            runner.prepare(*test)?;
            let before = machine();
            let speed = runner.run_timed(*test)?;
            runs.push(TestRepetition { speed, steps: runner.steps.clone(), machine: [before, machine()] });
            host.advance_progress();
        }
        rows.push(bench_row(model, &metadata, *test, &runs));
    }
    host.finish_progress();
    runner.print_warnings();
    Ok(rows)
}

fn probe_machine(model: &Model, metadata: &Value, reading: &BandwidthProbe) -> MachineProbe {
    let threads = model.threads();
    let floats = || probe::measure_peak(ComputeType::F32, threads).unwrap_or(f64::INFINITY);
    let used = operations_per_token(metadata, "ops_per_token");
    let peaks = std::array::from_fn(|i| match used[i] > 0.0 {
        true => probe::measure_peak(ComputeType::ALL[i], threads).unwrap_or_else(floats),
        false => f64::INFINITY,
    });
    let ping_pong = (threads > 1).then(probe::measure_ping_pong);
    MachineProbe { read_bandwidth: reading.bandwidth(), peaks, ping_pong }
}
