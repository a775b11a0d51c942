//! The set-up of a machine, with stand-ins for the package managers.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::{fs, io};

/// Runs tools/setup in a home of its own where `cargo` is of this version; the calls of the stand-ins are in
/// `log`.
fn setup(home: &Path, cargo: &str) -> io::Result<Output> {
    let bin = home.join(".cargo/bin");
    fs::create_dir_all(&bin)?;
    let stand_in = |name: &str, body: &str| {
        let path = bin.join(name);
        fs::write(&path, format!("#!/bin/sh\necho {name} \"$@\" >> '{}/log'\n{body}\n", home.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
    };
    stand_in("cargo", &format!("echo 'cargo {cargo} (2026-01-01)'"))?;
    for name in ["rustup", "apt-get", "sudo"] {
        stand_in(name, "")?;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = format!("{}:/usr/bin:/bin", bin.display());
    Command::new(root.join("tools/setup")).arg("demo").env("HOME", home).env("PATH", path).output()
}

fn log(home: &Path) -> String {
    fs::read_to_string(home.join("log")).unwrap_or_default()
}

#[test]
fn an_old_toolchain_stays_the_default() {
    let home = tempfile::tempdir().unwrap();
    let out = setup(home.path(), "1.70.0").unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let (log, printed) = (log(home.path()), String::from_utf8(out.stdout).unwrap());
    assert!(log.contains("rustup toolchain install 1.95"), "{log}");
    assert!(!log.contains("rustup default"), "{log}");
    assert!(printed.lines().any(|l| l == "export RUSTUP_TOOLCHAIN=1.95"), "{printed}");
    assert!(printed.lines().all(|l| l.starts_with("export ")), "{printed}");
}

#[test]
fn a_new_toolchain_is_used_as_it_is() {
    let home = tempfile::tempdir().unwrap();
    let out = setup(home.path(), "1.95.2").unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(!log(home.path()).contains("rustup"), "{}", log(home.path()));
    assert!(!String::from_utf8_lossy(&out.stdout).contains("RUSTUP_TOOLCHAIN"));
}
