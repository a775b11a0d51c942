//! Machines as data: `specs/*.toml` (one file per architecture, in it the feature levels), `--target` resolution and
//! detection of this machine.
//!
//! Invariants: the levels of a [`Target`] stand best first; `features` is complete (what a level extends is included)
//! and uses the names that LLVM and Rust's detection macros use.

mod host;
mod spec;

pub use host::detected_features;
pub use spec::{Arch, DeviceScope, Gpu, Level, Spec, SpecError};

use thiserror::Error;

/// What `--target` asked for: one architecture, one or more levels of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target {
    /// As given, `cpu` replaced by the level found.
    pub name: String,
    pub arch: Arch,
    pub triple: String,
    /// Best first; never empty.
    pub levels: Vec<Level>,
}

#[derive(Error, Debug, PartialEq, Eq)]
pub enum TargetError {
    #[error("unknown target `{name}`; known are cpu, {known}")]
    Unknown { name: String, known: String },
    #[error(
        "targets `{first}` and `{second}` belong to different architectures and cannot share one file: CPU levels and \
         GPUs, or levels of different CPUs, cannot be mixed in one artifact; build one for each"
    )]
    Mixed { first: String, second: String },
    #[error(
        "target `{name}` stands for several levels already: name it alone, or in a list the levels: {levels}"
    )]
    Group { name: String, levels: String },
    #[error("target `cpu` stands for this machine alone: in a list name the levels: {levels}")]
    HostInList { levels: String },
    #[error(
        "this machine ({arch}) is not one that mlcc generates CPU code for; name a --target (known: {known})"
    )]
    Host { arch: String, known: String },
    #[error(transparent)]
    Spec(#[from] SpecError),
}

const BUILT_IN: [(&str, &str); 3] = [
    ("x86-64.toml", include_str!("../specs/x86-64.toml")),
    ("aarch64.toml", include_str!("../specs/aarch64.toml")),
    ("cuda.toml", include_str!("../specs/cuda.toml")),
];

/// The specs that come with mlcc.
pub fn specs() -> Result<Vec<Spec>, SpecError> {
    BUILT_IN.iter().map(|(file, text)| Spec::parse(file, text)).collect()
}

/// Every name that [`resolve`] takes, in the order of the specs.
pub fn names() -> Result<Vec<String>, SpecError> {
    let specs = specs()?;
    let all = specs.iter().flat_map(|s| std::iter::once(&s.name).chain(s.levels.iter().map(|l| &l.name)));
    Ok(all.cloned().collect())
}

/// `cpu`, the name of a spec (its default levels), of a level, or several level names with commas.
pub fn resolve(name: &str) -> Result<Target, TargetError> {
    let specs = specs()?;
    if name == "cpu" {
        return host_target(&specs);
    }
    if let Some(spec) = specs.iter().find(|s| s.name == name) {
        let levels = spec.default_levels().cloned().collect();
        return Ok(Target { name: name.into(), arch: spec.arch, triple: spec.triple.clone(), levels });
    }
    one_architecture(name, &specs)?;
    let mut found: Option<(&str, &Spec, Vec<usize>)> = None;
    for part in name.split(',').map(str::trim) {
        check_part(part, &specs)?;
        let hit = specs.iter().find_map(|s| Some((s, s.levels.iter().position(|l| l.name == part)?)));
        let (spec, level) =
            hit.ok_or_else(|| TargetError::Unknown { name: part.into(), known: known(&specs) })?;
        match &mut found {
            None => found = Some((part, spec, vec![level])),
            Some((_, s, levels)) if s.name == spec.name => levels.push(level),
            Some((first, ..)) => {
                return Err(TargetError::Mixed { first: (*first).into(), second: part.into() });
            }
        }
    }
    let (_, spec, mut picked) =
        found.ok_or_else(|| TargetError::Unknown { name: name.into(), known: known(&specs) })?;
    // Specs list the weaker level first.
    picked.sort_unstable();
    picked.dedup();
    let levels = picked.iter().rev().map(|&i| spec.levels[i].clone()).collect();
    Ok(Target { name: name.into(), arch: spec.arch, triple: spec.triple.clone(), levels })
}

/// A list of levels may only have those of one architecture: told before anything else about it.
fn one_architecture(list: &str, specs: &[Spec]) -> Result<(), TargetError> {
    let named = |part: &str| match part {
        "cpu" => Arch::of_host().and_then(|arch| specs.iter().find(|s| s.arch == arch)),
        _ => specs.iter().find(|s| s.name == part || s.levels.iter().any(|l| l.name == part)),
    };
    let known: Vec<(&str, &Spec)> =
        list.split(',').map(str::trim).filter_map(|part| Some((part, named(part)?))).collect();
    let Some((first, spec)) = known.first() else { return Ok(()) };
    match known.iter().find(|(_, other)| other.name != spec.name) {
        Some((second, _)) => Err(TargetError::Mixed { first: (*first).into(), second: (*second).into() }),
        None => Ok(()),
    }
}

/// Names that stand for several levels, or for this machine, are no part of a list.
fn check_part(part: &str, specs: &[Spec]) -> Result<(), TargetError> {
    let levels = |s: &Spec| s.levels.iter().map(|l| l.name.as_str()).collect::<Vec<_>>().join(", ");
    if part == "cpu" {
        let host = specs.iter().filter(|s| Some(s.arch) == Arch::of_host()).map(levels).collect();
        return Err(TargetError::HostInList { levels: host });
    }
    match specs.iter().find(|s| s.name == part) {
        Some(spec) => Err(TargetError::Group { name: part.into(), levels: levels(spec) }),
        None => Ok(()),
    }
}

/// The best level whose features this machine has.
fn host_target(specs: &[Spec]) -> Result<Target, TargetError> {
    let unknown = || TargetError::Host { arch: std::env::consts::ARCH.into(), known: known(specs) };
    let arch = Arch::of_host().ok_or_else(unknown)?;
    let have = detected_features();
    let spec = specs.iter().find(|s| s.arch == arch).ok_or_else(unknown)?;
    let fits = |l: &&Level| l.features.iter().all(|f| have.contains(&f.as_str()));
    let level = spec.levels.iter().filter(fits).max_by_key(|l| l.features.len()).ok_or_else(unknown)?;
    Ok(Target {
        name: level.name.clone(),
        arch: spec.arch,
        triple: spec.triple.clone(),
        levels: vec![level.clone()],
    })
}

fn known(specs: &[Spec]) -> String {
    let all: Vec<&str> = specs
        .iter()
        .flat_map(|s| std::iter::once(s.name.as_str()).chain(s.levels.iter().map(|l| l.name.as_str())))
        .collect();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_resolves() {
        for name in names().unwrap() {
            let target = resolve(&name).unwrap();
            assert!(!target.levels.is_empty(), "{name}");
        }
    }

    #[test]
    fn levels_come_best_first() {
        let t = resolve("x86-64-v2,x86-64-v4").unwrap();
        let order: Vec<&str> = t.levels.iter().map(|l| l.name.as_str()).collect();
        assert_eq!(order, ["x86-64-v4", "x86-64-v2"]);
        assert!(t.levels[0].has("sse4.1") && t.levels[0].has("avx512bw") && !t.levels[1].has("avx"));
        for target in ["x86-64", "aarch64"] {
            let sizes: Vec<usize> =
                resolve(target).unwrap().levels.iter().map(|l| l.features.len()).collect();
            assert!(sizes.windows(2).all(|w| w[0] > w[1]), "{target}: {sizes:?}");
        }
    }

    #[test]
    fn wrong_names_say_what_is_known() {
        let text = resolve("x86-64-v9").unwrap_err().to_string();
        assert!(text.contains("x86-64-v9") && text.contains("sm_80") && text.contains("cpu"), "{text}");
        let mixed = resolve("x86-64-v2,sm_80").unwrap_err();
        assert_eq!(mixed, TargetError::Mixed { first: "x86-64-v2".into(), second: "sm_80".into() });
        for list in ["cuda,x86-64-v3", "x86-64-v3, cuda", "x86-64,sm_80,aarch64"] {
            let text = resolve(list).unwrap_err().to_string();
            assert!(text.contains("CPU levels and GPUs") && text.contains("cannot be mixed"), "{text}");
        }
        let text = resolve("cuda,sm_80").unwrap_err().to_string();
        assert!(text.contains("`cuda` stands for several") && text.contains("sm_80"), "{text}");
        if Arch::of_host().is_some() {
            let text = resolve("cpu,cpu").unwrap_err().to_string();
            assert!(text.contains("`cpu` stands for this machine alone"), "{text}");
        }
    }

    #[test]
    fn the_host_is_a_named_level() {
        if Arch::of_host().is_none() {
            return;
        }
        let t = resolve("cpu").unwrap();
        assert_eq!(resolve(&t.name).unwrap().levels, t.levels);
    }
}
