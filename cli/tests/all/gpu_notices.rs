//! Notices about what makes a GPU slower than it could be: on standard error, by the commands that find out,
//! once, by the driver in software.

use std::path::Path;
use std::process::Stdio;

use assert_cmd::Command;
use serde_json::json;

use crate::program::{books, case};
use crate::server::ServerProcess;
use crate::software_gpu::{build, driver, on_gpu};

/// Every recording of launches is refused.
const REFUSED: (&str, &str) = ("REFUSE_CAPTURES", "1000000");
const ALONE: &str = "warning: tokens are decoded kernel by kernel";
const TOGETHER: &str = "warning: tokens of several sequences are decoded kernel by kernel";

fn errors(command: &mut Command) -> String {
    String::from_utf8(command.assert().success().get_output().stderr.clone()).unwrap()
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn run_and_bench_tell() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quant", "q4f16", "--target", "cuda", "--max-batch", "2", "--ctx-size", "64"];
    let tiny = build(&case("llama3-gqa-tied"), folder.path(), "tiny.so", &flags);
    let bench = |switches: &[(&str, &str)], sequences: &str| {
        let mut bench = on_gpu(&driver, switches);
        let flags = ["-p", "0", "-n", "12", "-r", "1", "--warm-up", "0", "-b", sequences];
        errors(bench.arg("bench").arg(&tiny).args(flags))
    };
    assert_eq!(count(&bench(&[], "1,2"), "kernel by kernel"), 0);
    let alone = bench(&[REFUSED], "1");
    assert_eq!((count(&alone, ALONE), count(&alone, "kernel by kernel")), (1, 1), "{alone}");
    let together = bench(&[REFUSED], "2");
    assert_eq!((count(&together, TOGETHER), count(&together, "kernel by kernel")), (1, 1), "{together}");
    let both = bench(&[REFUSED], "1,2");
    assert_eq!((count(&both, ALONE), count(&both, TOGETHER)), (1, 1), "{both}");

    let text = build(&books(), folder.path(), "text.so", &["--quant", "q4f16", "--target", "cuda"]);
    let mut run = on_gpu(&driver, &[REFUSED]);
    let run = errors(run.arg("run").arg(&text).args(["-p", "The sea was", "-n", "6", "--temperature", "0"]));
    assert_eq!(count(&run, ALONE), 1, "{run}");
    serve_tells(&driver, &text, folder.path());
}

/// A text alone is decoded as a session is.
fn serve_tells(driver: &Path, artifact: &Path, folder: &Path) {
    let log = folder.join("log");
    let errors = Stdio::from(std::fs::File::create(&log).unwrap());
    let (switch, value) = REFUSED;
    let switch = format!("SOFTCUDA_{switch}");
    let variables = [("MLCC_CUDA_DRIVER", driver.to_str().unwrap()), (switch.as_str(), value)];
    let server = ServerProcess::with(&[artifact], &["--alias", "sea"], &variables, errors);
    for _ in 0..2 {
        let request = json!({"prompt": "The sea was", "max_tokens": 8, "temperature": 0});
        server.ask("/v1/completions", &request);
    }
    drop(server);
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(count(&log, "warning: sea: tokens are decoded kernel by kernel"), 1, "{log}");
}
