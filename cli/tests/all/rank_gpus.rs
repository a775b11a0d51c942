//! Ranks on GPUs, without any: processes that the plug-in of [`rank_processes`](crate::rank_processes) joins,
//! each with a CUDA driver in software, and a libnccl of these tests that really transfers their data.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::program::{books, case, json, text};
use crate::rank_processes::{LaunchedGroup, library, plugin, stderr, stdout};
use crate::software_gpu::{build, driver, on_gpu};

/// The libraries that two processes need to be ranks.
struct RankLibraries {
    folder: TempDir,
    driver: PathBuf,
    plugin: PathBuf,
    nccl: PathBuf,
}

impl RankLibraries {
    fn new() -> Option<RankLibraries> {
        let driver = driver()?;
        let folder = tempfile::tempdir().unwrap();
        let (plugin, nccl) = (plugin(folder.path(), 1)?, library(folder.path(), "nccl", 1)?);
        Some(RankLibraries { folder, driver, plugin, nccl })
    }

    fn build(&self, model: &Path, name: &str, flags: &[&str]) -> PathBuf {
        build(model, self.folder.path(), name, &[&["--target", "sm_90"], flags].concat())
    }

    /// Two processes with this command line and these variables.
    fn start(&self, arguments: &[&str], variables: &[(&str, &str)]) -> LaunchedGroup {
        let of_rank = |rank: usize| {
            let path = |path: &Path| path.to_str().unwrap().to_owned();
            let own = [
                ("MLCC_CUDA_DRIVER", path(&self.driver)),
                ("MLCC_NCCL", path(&self.nccl)),
                ("SOFTCUDA_UUID", rank.to_string()),
            ];
            let more = variables.iter().map(|(name, value)| (*name, (*value).to_owned()));
            own.into_iter().chain(more).map(|(name, value)| (name.to_owned(), value)).collect()
        };
        LaunchedGroup::start_with(&self.plugin, &[arguments; 2], None, &of_rank)
    }

    /// The output of the first one when both have ended well, and the traffic through NCCL.
    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> (String, [Vec<String>; 2]) {
        let (outputs, _, folder) = self.start(arguments, variables).wait_and_keep();
        for (rank, output) in outputs.iter().enumerate() {
            assert!(output.status.success(), "rank {rank}: {}{}", stdout(output), stderr(output));
        }
        assert_eq!(stdout(&outputs[1]), "", "the other rank only follows");
        let log = |rank: usize| {
            let path = folder.path().join(format!("nccl-{rank}.log"));
            std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
        };
        (stdout(&outputs[0]), [log(0), log(1)])
    }

    /// Both end with an error.
    fn fails(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Vec<Output> {
        let (outputs, _) = self.start(arguments, variables).wait();
        for output in &outputs {
            assert_eq!(output.status.code(), Some(1), "{}", stderr(output));
        }
        outputs
    }
}

/// The comparison with a reference case, to the last bit. The bar of a format is left out: weights are moved
/// at random in the order in which they are stored, which differs between one GPU and two.
fn outcome(text: &str) -> Value {
    let mut outcome: Value = serde_json::from_str(text).unwrap();
    outcome
        .as_object_mut()
        .unwrap()
        .retain(|name, _| !["artifact", "model", "path", "format_error"].contains(&name.as_str()));
    outcome
}

fn count(log: &[String], begin: &str) -> usize {
    log.iter().filter(|line| line.starts_with(begin)).count()
}

/// Grouped heads, recurrent states, caches in pages: two GPUs have the bits of one.
#[test]
fn two_gpus_have_the_bits_of_one() {
    let Some(with) = RankLibraries::new() else { return };
    for (name, quant) in [("llama3-gqa-tied", "f32"), ("rwkv4-hf", "q8f16_1")] {
        let golden = case(name).join("golden.json");
        let flags = ["--quant", quant, "--chunk", "16"];
        let verify = |artifact: &Path| {
            let golden = golden.to_str().unwrap().to_owned();
            [
                "verify".into(),
                artifact.to_str().unwrap().to_owned(),
                "--json".into(),
                "--golden".into(),
                golden,
            ]
        };
        let one = with.build(&case(name), "one.so", &flags);
        let expected = text(on_gpu(&with.driver, &[]).args(verify(&one)));
        let two = with.build(&case(name), "two.so", &[&flags[..], &["--tensor-parallel", "2"]].concat());
        let arguments = verify(&two);
        let (found, logs) = with.run(&arguments.each_ref().map(String::as_str), &[]);
        assert_eq!(outcome(&found), outcome(&expected), "{name} {quant}");
        for (rank, log) in logs.iter().enumerate() {
            assert_eq!(log[0], format!("init {rank} of 2"));
            assert_eq!(log.last().unwrap(), "destroy");
            assert_eq!(count(log, "fault"), 0, "{log:?}");
            assert!(count(log, "gather") > 0 && count(log, "gather") <= count(log, "ran"), "{log:?}");
        }
        // The same gathers in the same order, recorded where the other one's are.
        let gathers =
            |log: &[String]| log.iter().filter(|l| l.starts_with("gather")).cloned().collect::<Vec<_>>();
        assert_eq!(gathers(&logs[0]), gathers(&logs[1]));
    }
}

/// A token is one graph, all-gathers included, which runs again and again.
#[test]
fn a_token_of_two_gpus_is_one_graph() {
    let Some(with) = RankLibraries::new() else { return };
    let flags = ["--quant", "q4f16"];
    let one = with.build(&books(), "one.so", &flags);
    let two = with.build(&books(), "two.so", &[&flags[..], &["--tensor-parallel", "2"]].concat());
    let prompt = ["-p", "The sea was", "-n", "12", "--greedy", "-q"];
    let expected = text(on_gpu(&with.driver, &[]).arg("run").arg(&one).args(prompt));
    let arguments = [&["run", two.to_str().unwrap()][..], &prompt].concat();
    let (found, [log, _]) = with.run(&arguments, &[]);
    assert_eq!(found, expected);
    let recorded = log.iter().filter(|line| line.ends_with(" recorded")).count();
    // The prompt and the first token one by one, ten more from one recording.
    assert!(recorded > 0 && count(&log, "ran") >= count(&log, "gather") + 8 * recorded, "{log:?}");
}

/// Several sequences in a step, whose graphs are recorded by all.
#[test]
fn sequences_of_two_gpus_are_decoded_together() {
    let Some(with) = RankLibraries::new() else { return };
    let flags = ["--quant", "f32", "--chunk", "16", "--max-batch", "3", "--tensor-parallel", "2"];
    let two = with.build(&case("llama3-gqa-tied"), "two.so", &flags);
    let arguments =
        ["bench", two.to_str().unwrap(), "-p", "20", "-n", "3", "-b", "1,3", "-r", "1", "-o", "json"];
    let (found, [log, other]) = with.run(&arguments, &[]);
    assert!(serde_json::from_str::<Value>(&found).is_ok(), "{found}");
    assert_eq!((count(&log, "fault"), count(&log, "ran")), (0, count(&other, "ran")));
}

#[test]
fn what_ranks_on_gpus_lack_is_named() {
    let Some(with) = RankLibraries::new() else { return };
    let two = with.build(&case("rwkv4-hf"), "two.so", &["--quant", "f32", "--tensor-parallel", "2"]);
    let told = |outputs: &[Output], parts: &[&str]| {
        let all: Vec<String> = outputs.iter().map(stderr).collect();
        assert!(all.iter().any(|text| parts.iter().all(|part| text.contains(part))), "{parts:?}: {all:?}");
    };
    let golden = case("rwkv4-hf").join("golden.json");
    let arguments = ["verify", two.to_str().unwrap(), "--golden", golden.to_str().unwrap()];
    let fails = |variables: &[(&str, &str)]| with.fails(&arguments, variables);
    let nothing = fails(&[("MLCC_NCCL", "/nowhere/libnccl.so.2")]);
    told(&nothing, &["/nowhere/libnccl.so.2 cannot be loaded", "Install it", "MLCC_NCCL"]);
    let other = with.driver.to_str().unwrap();
    told(&fails(&[("MLCC_NCCL", other)]), &["lacks ncclGetVersion"]);
    told(&fails(&[("TEST_NCCL_VERSION", "2804")]), &["is version 2.8.4", "2.9.6 or later"]);
    told(
        &fails(&[("SOFTCUDA_UUID", "3")]),
        &["rank 0 (process ", " and rank 1 (process ", "use the same GPU"],
    );
    told(
        &fails(&[("TEST_NCCL_FAULT", "refuse:1:0"), ("MLCC_RANK_TIMEOUT", "4")]),
        &["ncclAllGather", "unhandled system error"],
    );
    // Alone there is no other rank to exchange with.
    let mut alone = on_gpu(&with.driver, &[]);
    let out = alone.arg("run").arg(&two).args(["-p", "x", "-n", "1"]).output().unwrap();
    assert!(
        stderr(&out).contains("only this process was started. Start 2 (mpirun -n 2)"),
        "{}",
        stderr(&out)
    );
}

/// NCCL waits for a lost process forever; the others do not.
#[test]
fn a_gpu_that_is_lost_ends_all() {
    let Some(with) = RankLibraries::new() else { return };
    let two = with.build(&case("rwkv4-hf"), "two.so", &["--quant", "f32", "--tensor-parallel", "2"]);
    let golden = case("rwkv4-hf").join("golden.json");
    let arguments = ["verify", two.to_str().unwrap(), "--golden", golden.to_str().unwrap()];
    for at in ["hang:1:0", "hang:1:60"] {
        let begin = Instant::now();
        let group = with.start(&arguments, &[("TEST_NCCL_FAULT", at), ("MLCC_RANK_TIMEOUT", "2")]);
        let (outputs, _) = group.wait();
        let told: Vec<String> = outputs.iter().map(stderr).collect();
        assert_eq!(outputs[0].status.code(), Some(1), "{at}: {told:?}");
        assert!(told.iter().any(|text| text.contains("All ranks end")), "{at}: {told:?}");
        assert!(begin.elapsed() < Duration::from_secs(40), "{at}");
    }
    // The reference case finds data in the wrong order.
    let (outputs, _) = with.start(&arguments, &[("TEST_NCCL_FAULT", "swap:1:3")]).wait();
    assert!(!outputs[0].status.success(), "{}", stdout(&outputs[0]));
}

#[test]
fn ranks_on_gpus_are_in_the_report() {
    let Some(with) = RankLibraries::new() else { return };
    let flags = ["--quant", "f32", "--tensor-parallel", "2"];
    let two = with.build(&case("llama3-gqa-tied"), "two.so", &flags);
    let one = with.build(&case("llama3-gqa-tied"), "one.so", &flags[..2]);
    let metadata = |artifact: &Path| json(crate::program::mlcc().arg("inspect").arg(artifact).arg("--json"));
    let [one, two] = [metadata(&one), metadata(&two)];
    let of = |found: &Value, name: &str| {
        found.pointer(&format!("/metadata/memory/{name}")).and_then(Value::as_u64)
    };
    assert_eq!(of(&two, "ranks"), Some(2), "{two}");
    // The one key head is on both.
    assert_eq!(of(&two, "page_bytes"), of(&one, "page_bytes").map(|bytes| 2 * bytes));
    let (half, whole) = (of(&two, "weights_bytes").unwrap(), of(&one, "weights_bytes").unwrap());
    assert!(half * 100 < whole * 56, "{half} of {whole}");
}
