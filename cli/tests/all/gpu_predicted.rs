//! Predicted times of kernels as a table that is kept: what a change makes slower, or faster, is seen where
//! it is made. `MLCC_BLESS=1` rewrites the table. It runs where the assembler and the disassembler are found,
//! in the versions that the table was made with.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mlcc_codegen::nvdisasm::{NVDISASM_VARIABLE, find_nvdisasm};
use mlcc_codegen::ptxas::{PTXAS_VARIABLE, find_ptxas};
use mlcc_driver::compile::Backend;
use serde_json::Value;

use crate::program::{mlcc, text};

const PTXAS: &str = "V12.9.86";
const NVDISASM: &str = "V13.5.37";
const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/predicted/h200.tsv");
const HEAD: &str = "model\ttest\tkernel\tblocks\tlaunches\tus\tbound\tregisters";
/// A time that grows or shrinks by more has changed.
const SHARE: f64 = 0.03;

/// A build, and the predictions that are made of it.
struct PredictedCase {
    preset: &'static str,
    quant: &'static str,
    build: &'static [&'static str],
    tests: &'static [&'static str],
    /// The product that is made of one row of a prompt.
    head: &'static str,
}

const CASES: [PredictedCase; 3] = [
    PredictedCase {
        preset: "qwen3-0.6b",
        quant: "q4f16_2",
        build: &["--max-batch", "8"],
        tests: &["-p", "512", "-n", "64", "-b", "1,8"],
        head: "k_matmul_151936",
    },
    PredictedCase {
        preset: "rwkv-430m",
        quant: "f16",
        build: &[],
        tests: &["-p", "512", "-n", "64"],
        head: "k_matmul_50277",
    },
    PredictedCase {
        preset: "rwkv7-0.1b",
        quant: "q4f16_2",
        build: &[],
        tests: &["-p", "512", "-n", "2"],
        head: "k_matmul_65536",
    },
];

fn tool(path: Option<PathBuf>, name: &str, variable: &str, version: &str) -> Option<PathBuf> {
    let Some(path) = path else {
        println!("skipped: {name} is not there ({variable})");
        return None;
    };
    let out = std::process::Command::new(&path).arg("--version").output();
    let said = out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default();
    if !said.contains(version) {
        println!("skipped: the table is of {name} {version}, {} is another one", path.display());
        return None;
    }
    Some(path)
}

/// The rows of one kernel with one number of blocks in one test.
type PredictedKey = (String, String, String, u64);

#[derive(Debug, Clone, PartialEq)]
struct PredictedKernel {
    launches: u64,
    us: f64,
    bound: String,
    registers: u64,
}

fn predicted(folder: &Path, tools: &[(&str, &Path); 2], rows: &mut BTreeMap<PredictedKey, PredictedKernel>) {
    for PredictedCase { preset, quant, build, tests, head } in CASES {
        let artifact = folder.join(format!("{preset}-{quant}.so"));
        let mut command = mlcc();
        command.args([
            "build",
            "-q",
            "-m",
            preset,
            "--random-weights",
            "0",
            "--weights-on-load",
            "--no-report",
        ]);
        command.args(["--target", "sm_90", "--quant", quant]).args(build).arg("-o").arg(&artifact);
        command.assert().success();
        let mut command = mlcc();
        command.args(["bench", "--predict", "h200"]).arg(&artifact).args(tests).args([
            "-o",
            "json",
            "--kernels",
        ]);
        let found: Vec<Value> = serde_json::from_str(&text(command.envs(tools.iter().copied()))).unwrap();
        for test in &found {
            for kernel in test["kernels"].as_array().unwrap() {
                add(&format!("{preset} {quant}"), test["test"].as_str().unwrap(), kernel, head, rows);
            }
        }
    }
}

fn add(
    model: &str,
    test: &str,
    kernel: &Value,
    head: &str,
    rows: &mut BTreeMap<PredictedKey, PredictedKernel>,
) {
    let name = kernel["kernel"].as_str().unwrap();
    let what = format!("{model} {test} {name}");
    let number = |key: &str| kernel[key].as_u64().unwrap();
    assert_eq!(number("spills"), 0, "{what} has too few registers");
    let attention = name.starts_with("k_attention") && !name.ends_with("_merge");
    let product = name.starts_with("k_matmul") || attention || name.ends_with("_walk");
    assert!(!product || kernel["wide_loads"] == true, "{what} has no loads or copies of 16 bytes");
    let of_rows = test.starts_with("pp") && !name.starts_with(head);
    assert!(
        !(product && of_rows) || kernel["tensor_cores"] == true,
        "{what} has no products on tensor cores"
    );
    let row = PredictedKernel {
        launches: number("launches"),
        us: 1e6 * kernel["one"].as_f64().unwrap(),
        bound: kernel["bound_by"].as_str().unwrap().into(),
        registers: number("registers"),
    };
    rows.insert((model.into(), test.into(), name.into(), number("blocks")), row);
}

fn written(rows: &BTreeMap<PredictedKey, PredictedKernel>) -> String {
    let line = |((model, test, kernel, blocks), row): (&PredictedKey, &PredictedKernel)| {
        let PredictedKernel { launches, us, bound, registers } = row;
        format!("{model}\t{test}\t{kernel}\t{blocks}\t{launches}\t{us:.3}\t{bound}\t{registers}\n")
    };
    format!("{HEAD}\n") + &rows.iter().map(line).collect::<String>()
}

fn read(text: &str) -> BTreeMap<PredictedKey, PredictedKernel> {
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some(HEAD));
    let row = |line: &str| {
        let [model, test, kernel, blocks, launches, us, bound, registers] =
            line.split('\t').collect::<Vec<_>>().try_into().unwrap_or_else(|_| panic!("{line}"));
        let key = (model.into(), test.into(), kernel.into(), blocks.parse().unwrap());
        let (launches, us, registers) =
            (launches.parse().unwrap(), us.parse().unwrap(), registers.parse().unwrap());
        (key, PredictedKernel { launches, us, bound: bound.into(), registers })
    };
    lines.map(row).collect()
}

/// The changes, a line each: first those that fail, and whether there are any.
fn compared(
    kept: &BTreeMap<PredictedKey, PredictedKernel>,
    found: &BTreeMap<PredictedKey, PredictedKernel>,
) -> Vec<String> {
    let mut out = Vec::new();
    let show =
        |(model, test, kernel, blocks): &PredictedKey| format!("{model} {test} {kernel} of {blocks} blocks");
    for (key, row) in found {
        let what = show(key);
        match kept.get(key) {
            None => out.push(format!("{what}: new, {:.3} us, {} launches", row.us, row.launches)),
            Some(old) if row.us > old.us * (1.0 + SHARE) => {
                out.push(format!("{what}: slower, {:.3} us in place of {:.3}", row.us, old.us));
            }
            Some(old) if row.us < old.us * (1.0 - SHARE) => {
                out.push(format!("{what}: faster, {:.3} us in place of {:.3}", row.us, old.us));
            }
            Some(old) if row.launches != old.launches => {
                out.push(format!("{what}: {} launches in place of {}", row.launches, old.launches));
            }
            Some(_) => {}
        }
    }
    out.extend(kept.keys().filter(|key| !found.contains_key(key)).map(|key| format!("{}: gone", show(key))));
    out
}

#[test]
fn kernels_are_predicted_as_before() {
    if !Backend::Llvm.is_built_in() {
        return println!("skipped: this mlcc has no LLVM");
    }
    let Some(ptxas) = tool(find_ptxas(), "ptxas", PTXAS_VARIABLE, PTXAS) else { return };
    let Some(nvdisasm) = tool(find_nvdisasm(), "nvdisasm", NVDISASM_VARIABLE, NVDISASM) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut rows = BTreeMap::new();
    let tools = [(PTXAS_VARIABLE, ptxas.as_path()), (NVDISASM_VARIABLE, nvdisasm.as_path())];
    predicted(folder.path(), &tools, &mut rows);
    if std::env::var_os("MLCC_BLESS").is_some() {
        std::fs::create_dir_all(Path::new(TABLE).parent().unwrap()).unwrap();
        std::fs::write(TABLE, written(&rows)).unwrap();
        return;
    }
    let changes = compared(&read(&std::fs::read_to_string(TABLE).unwrap()), &rows);
    assert!(
        changes.is_empty(),
        "predictions differ from {TABLE} (MLCC_BLESS=1 accepts them; say in the change why what is slower may be):\n{}",
        changes.join("\n")
    );
}

#[test]
fn changes_are_told() {
    let key = |kernel: &str| ("m".to_string(), "pp512".to_string(), kernel.to_string(), 3);
    let row = |us| PredictedKernel { launches: 2, us, bound: "memory".into(), registers: 40 };
    let kept: BTreeMap<PredictedKey, PredictedKernel> =
        [("a", 10.0), ("b", 10.0), ("c", 10.0), ("d", 10.0), ("e", 10.0)]
            .map(|(k, us)| (key(k), row(us)))
            .into();
    assert_eq!(read(&written(&kept)), kept);
    assert_eq!(compared(&kept, &kept), [""; 0]);
    let more = PredictedKernel { launches: 3, ..row(10.0) };
    let found: BTreeMap<PredictedKey, PredictedKernel> =
        [("a", row(10.2)), ("b", row(10.4)), ("c", row(9.6)), ("d", more), ("f", row(1.0))]
            .map(|(k, row)| (key(k), row))
            .into();
    let parts = [
        "b of 3 blocks: slower, 10.400",
        "c of 3 blocks: faster",
        "d of 3 blocks: 3 launches",
        "f of 3 blocks: new",
        "e of 3 blocks: gone",
    ];
    let told = compared(&kept, &found);
    assert_eq!(told.len(), parts.len(), "{told:?}");
    assert!(parts.iter().zip(&told).all(|(part, line)| line.contains(part)), "{told:?}");
}
