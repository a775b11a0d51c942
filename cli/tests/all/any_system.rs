//! Code for CPUs runs on any operating system: what the conventions of Windows, macOS and Android forbid is
//! in none.

use crate::program::{case, mlcc};

/// True for a line of assembly with one of the registers `x18` and `w18`, which belong to the system.
fn uses_platform_register(line: &str) -> bool {
    let words = line.split(|c: char| !c.is_ascii_alphanumeric());
    words.into_iter().any(|word| word == "x18" || word == "w18")
}

/// True for a line that reads or writes below the stack pointer of x86-64.
fn uses_red_zone(line: &str) -> bool {
    line.find("(%rsp").is_some_and(|at| {
        let before = &line[..at];
        let digits = before.trim_end_matches(|c: char| c.is_ascii_digit());
        digits.len() < before.len() && digits.ends_with('-')
    })
}

#[test]
fn code_leaves_alone_what_belongs_to_the_system() {
    if !mlcc_driver::compile::Backend::Llvm.is_built_in() {
        eprintln!("skipped: this mlcc has no LLVM");
        return;
    }
    assert!(uses_red_zone("\tmovq\t%rax, -24(%rsp)") && !uses_red_zone("\tmovq\t%rax, 24(%rsp)"));
    assert!(uses_platform_register("\tadd\tx0, x18, x1") && !uses_platform_register("\tfmov\ts18, #1.0"));
    let folder = tempfile::tempdir().unwrap();
    for target in ["armv8.2-dotprod", "x86-64-v3"] {
        let mut build = mlcc();
        build.current_dir(&folder).arg("build").arg("-m").arg(case("rwkv7-hf").canonicalize().unwrap());
        build.args(["--target", target, "--quant", "q4i8", "--emit", "asm", "-o", "m.so"]).assert().success();
        let code = std::fs::read_to_string(folder.path().join(format!("m.{target}.s"))).unwrap();
        assert!(code.lines().count() > 1000, "{target}");
        let wrong = if target.starts_with("armv8") { uses_platform_register } else { uses_red_zone };
        let found: Vec<&str> = code.lines().filter(|line| wrong(line)).take(5).collect();
        assert_eq!(found, [""; 0], "{target}");
    }
}
