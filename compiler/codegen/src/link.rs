//! Linking objects into a shared library with a linker of the system.
//!
//! The objects refer to nothing outside themselves, so neither a C runtime nor libraries take part, and
//! `-z defs` turns a slipped-in reference into an error. Equal objects give equal bytes: no build id, fixed
//! soname, no paths.

use mlcc_target::Arch;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use thiserror::Error;

/// Overrides the search for a linker.
pub const LINKER_VARIABLE: &str = "MLCC_LINKER";

#[derive(Error, Debug)]
pub enum LinkError {
    #[error(
        "no linker for {arch} found (looked for {tried} in PATH); install one, for example with `apt install {package}`, \
         or name one in {LINKER_VARIABLE}"
    )]
    Missing { arch: Arch, tried: String, package: &'static str },
    #[error("cannot run the linker {}: {source}", .linker.display())]
    Run { linker: PathBuf, source: std::io::Error },
    #[error("the linker {} failed ({status}):\n{output}", .linker.display())]
    Failed { linker: PathBuf, status: String, output: String },
}

/// The form in which a linker takes its options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinkerFlavor {
    /// A compiler driver: linker options after `-Wl,`.
    Driver,
    /// A linker itself.
    Plain,
}

/// A linker that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Linker {
    pub program: PathBuf,
    style: LinkerFlavor,
}

/// Programs to try, best first, and the package that brings one.
fn linker_candidates(arch: Arch) -> (&'static [&'static str], &'static str) {
    let native = Arch::of_host() == Some(arch);
    match arch {
        _ if native => (&["cc", "ld.lld", "ld"], "gcc"),
        Arch::Aarch64 => (&["ld.lld", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-ld"], "lld"),
        Arch::X86_64 => (&["ld.lld", "x86_64-linux-gnu-gcc", "x86_64-linux-gnu-ld"], "lld"),
        Arch::Nvptx => (&["cc", "ld.lld", "ld"], "gcc"),
    }
}

/// The linker for objects of `arch`: `MLCC_LINKER`, or the first of the usual ones in `PATH`.
pub fn find_linker(arch: Arch) -> Result<Linker, LinkError> {
    if let Some(program) = std::env::var_os(LINKER_VARIABLE).filter(|v| !v.is_empty()) {
        let program = PathBuf::from(program);
        return Ok(Linker { style: style_of(&program), program });
    }
    let (names, package) = linker_candidates(arch);
    let path = std::env::var_os("PATH").unwrap_or_default();
    for name in names {
        if let Some(program) = std::env::split_paths(&path).map(|d| d.join(name)).find(|p| p.is_file()) {
            return Ok(Linker { style: style_of(&program), program });
        }
    }
    Err(LinkError::Missing { arch, tried: names.join(", "), package })
}

/// Linkers are called `ld`, `ld.lld`, `ld-19`, `aarch64-linux-gnu-ld`, `mold`, `wild`; all else is a compiler
/// driver.
fn style_of(program: &Path) -> LinkerFlavor {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let plain = name.rsplit('-').any(|part| {
        let part = part.split('.').next().unwrap_or(part);
        matches!(part, "ld" | "lld" | "mold" | "wild")
    });
    if plain { LinkerFlavor::Plain } else { LinkerFlavor::Driver }
}

impl Linker {
    /// Links `objects` into the shared library `output`.
    pub fn link(&self, objects: &[PathBuf], soname: &str, output: &Path) -> Result<(), LinkError> {
        let mut args: Vec<OsString> = vec!["-shared".into()];
        if self.style == LinkerFlavor::Driver {
            args.push("-nostdlib".into());
        }
        let soname = format!("-soname={soname}");
        let options = [
            "--build-id=none",
            "--no-undefined",
            "--hash-style=gnu",
            "--as-needed",
            "-Bsymbolic",
            "-znoexecstack",
            &soname,
        ];
        for option in options {
            match self.style {
                LinkerFlavor::Driver => args.push(format!("-Wl,{option}").into()),
                LinkerFlavor::Plain => args.push(option.into()),
            }
        }
        args.push("-o".into());
        args.push(output.into());
        args.extend(objects.iter().map(OsString::from));
        let run = Command::new(&self.program).args(&args).env("LC_ALL", "C").output();
        let done = run.map_err(|source| LinkError::Run { linker: self.program.clone(), source })?;
        if done.status.success() {
            return Ok(());
        }
        let output = [done.stdout, done.stderr].concat();
        Err(LinkError::Failed {
            linker: self.program.clone(),
            status: done.status.to_string(),
            output: String::from_utf8_lossy(&output).trim().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linkers_are_told_from_drivers() {
        for plain in ["/usr/bin/ld", "ld.lld", "ld.lld-19", "aarch64-linux-gnu-ld", "ld.gold", "/opt/mold"] {
            assert_eq!(style_of(Path::new(plain)), LinkerFlavor::Plain, "{plain}");
        }
        for driver in ["/usr/bin/cc", "gcc-12", "clang", "aarch64-linux-gnu-gcc"] {
            assert_eq!(style_of(Path::new(driver)), LinkerFlavor::Driver, "{driver}");
        }
    }

    #[test]
    fn a_linker_that_is_not_there_is_named() {
        let linker = Linker { program: "/nonexistent/ld".into(), style: LinkerFlavor::Plain };
        let error = linker.link(&[], "x.so", Path::new("x.so")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/ld"), "{error}");
    }
}
