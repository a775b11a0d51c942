//! Tells the program which commit it is built from: that of the checkout, or `MLCC_COMMIT` where there is
//! none, so that equal sources make an equal program.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=MLCC_COMMIT");
    let given = std::env::var("MLCC_COMMIT").ok().filter(|commit| !commit.is_empty());
    // Programs for development are not built anew for each commit.
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| {
        if !is_release {
            return None;
        }
        // What the answer depends on: the commit that is checked out, and where the branch is.
        for name in ["HEAD", "logs/HEAD"] {
            let path = git(&["rev-parse", "--git-path", name])?;
            if Path::new(&path).exists() {
                println!("cargo::rerun-if-changed={path}");
            }
        }
        // A checkout of something else that this folder lies in is not meant.
        git(&["ls-files", "--error-unmatch", "Cargo.toml"])?;
        git(&["rev-parse", "--short=12", "HEAD"])
    });
    println!("cargo::rustc-env=SOURCE_COMMIT={}", commit.unwrap_or_default());
    println!("cargo::rerun-if-changed=build.rs");
}

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok().filter(|out| out.status.success())?;
    let text = String::from_utf8(out.stdout).ok()?.trim().to_string();
    (!text.is_empty()).then_some(text)
}
