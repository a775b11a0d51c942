//! Machine code beside PTX: what is in an artifact, and what a driver gets that cannot take it.

use std::path::{Path, PathBuf};

use mlcc_codegen::ptxas::{PTXAS_VARIABLE, find_ptxas};

use crate::program::{books, fails_with, mlcc, text};
use crate::software_gpu::{build, driver, on_gpu};

const FLAGS: [&str; 6] = ["--quant", "q4f16", "--target", "sm_80,sm_90", "--max-batch", "1"];

fn with_machine_code(ptxas: &Path, path: &Path) -> PathBuf {
    let mut build = mlcc();
    build.env(PTXAS_VARIABLE, ptxas).args(["build", "-q", "--no-report", "--cubin", "-m"]).arg(books());
    build.args(FLAGS).arg("-o").arg(path).assert().success();
    path.into()
}

#[test]
fn machine_code_is_beside_the_text() {
    let Some(driver) = driver() else { return };
    let Some(ptxas) = find_ptxas() else {
        return println!("skipped: ptxas is not there ({PTXAS_VARIABLE})");
    };
    let folder = tempfile::tempdir().unwrap();
    let plain = build(&books(), folder.path(), "plain.so", &FLAGS);
    let [first, second] =
        ["first.so", "second.so"].map(|name| with_machine_code(&ptxas, &folder.path().join(name)));
    assert!(std::fs::read(&first).unwrap() == std::fs::read(second).unwrap(), "equal input, other bytes");

    let shown = text(mlcc().arg("inspect").arg(&first));
    let row = |name: &str| shown.lines().find(|l| l.starts_with(name)).unwrap_or_default().to_string();
    let images = row("images");
    let parts = [
        "ptx for sm_90 (CUDA 11.8)",
        "cubin for sm_90 (CUDA 1",
        "ptx for sm_80 (CUDA 11.4)",
        "cubin for sm_80",
    ];
    assert!(parts.iter().all(|part| images.contains(part)), "{shown}");
    assert!(row("assembler").contains("ptxas 1"), "{shown}");
    let shown = text(mlcc().arg("inspect").arg(&plain));
    assert!(shown.contains("ptx for sm_90 (CUDA 11.8)") && !shown.contains("cubin"), "{shown}");

    // This driver takes no machine code.
    let prompt = ["-p", "The sea was", "-n", "4", "--temperature", "0", "-q"];
    let run = |artifact, sm| text(on_gpu(&driver, &[("SM", sm)]).arg("run").arg(artifact).args(prompt));
    let expected = run(&plain, "90");
    assert_eq!(run(&first, "90"), expected);
    assert_eq!(run(&first, "86"), run(&plain, "86"));
}

#[test]
fn what_it_needs() {
    let build = |target: &str| {
        let mut build = mlcc();
        build.args(["build", "-q", "--no-report", "--quant", "f32", "--cubin", "--target", target, "-m"]);
        build.arg(books()).arg("-o").arg(tempfile::tempdir().unwrap().path().join("x.so"));
        build
    };
    if let Some(ptxas) = find_ptxas() {
        let parts = ["--cubin: machine code for GPUs needs --target cuda"];
        fails_with(build("cpu").env(PTXAS_VARIABLE, ptxas), &parts);
    }
    let mut without = build("sm_90");
    without.env(PTXAS_VARIABLE, "/no/such/ptxas");
    fails_with(&mut without, &["--cubin: cannot run /no/such/ptxas"]);
    let other = if cfg!(unix) { "/bin/true" } else { return };
    fails_with(build("sm_90").env(PTXAS_VARIABLE, other), &["--cubin: /bin/true does not print its version"]);
}
