//! The TOML form of a spec.

use serde::Deserialize;
use std::fmt;
use thiserror::Error;

/// Instruction set family; the name is the one that the instruction table uses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arch {
    #[serde(rename = "x86_64")]
    X86_64,
    Aarch64,
    Nvptx,
}

impl Arch {
    pub fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
            Arch::Nvptx => "nvptx",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What only GPU levels have.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Compute capability times ten, as it stands in the PTX.
    pub sm: u32,
    /// PTX version times ten.
    pub ptx: u32,
    /// Shared memory of one block.
    pub shared_bytes: u32,
    pub max_threads: u32,
}

/// One feature level.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Level {
    pub name: String,
    pub llvm_cpu: String,
    /// All of them, those of the levels below included.
    pub features: Vec<String>,
    /// Widest vector that kernels should use.
    pub vector_bits: u32,
    pub gpu: Option<Gpu>,
}

/// Which devices code of a GPU level runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceScope {
    /// Its compute capability and every later one.
    Later,
    /// Its compute capability and no other: architecture-specific features (`sm_90a`).
    Exact,
    /// Its compute capability and later ones of the same family: family-specific features (`sm_100f`).
    Family,
}

impl Level {
    /// The devices that code of a GPU level runs on, by the suffix of the name that the assembler has for it.
    pub fn device_scope(&self) -> DeviceScope {
        match self.llvm_cpu.chars().last() {
            Some('a') => DeviceScope::Exact,
            Some('f') => DeviceScope::Family,
            _ => DeviceScope::Later,
        }
    }
    pub fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|f| f == feature)
    }
    pub fn has_all(&self, features: &[&str]) -> bool {
        features.iter().all(|f| self.has(f))
    }
}

/// One file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spec {
    pub name: String,
    pub arch: Arch,
    pub triple: String,
    /// Weaker ones first.
    pub levels: Vec<Level>,
    default: Vec<usize>,
}

#[derive(Error, Debug, PartialEq, Eq)]
pub enum SpecError {
    #[error("target spec {file}: {message}")]
    Syntax { file: String, message: String },
    #[error("target spec {file}: level `{level}` is named but not defined before it is used")]
    Level { file: String, level: String },
    #[error("target spec {file}: level `{level}` is defined twice")]
    Twice { file: String, level: String },
    #[error("target spec {file}: level `{level}` needs a `gpu` table on nvptx, and none elsewhere")]
    Gpu { file: String, level: String },
    #[error("target spec {file}: no default levels")]
    NoDefault { file: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    arch: Arch,
    triple: String,
    default: Vec<String>,
    level: Vec<LevelEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LevelEntry {
    name: String,
    extends: Option<String>,
    llvm_cpu: String,
    #[serde(default)]
    features: Vec<String>,
    vector_bits: u32,
    gpu: Option<Gpu>,
}

impl Spec {
    /// Reads a spec; `file` is for messages.
    pub fn parse(file: &str, text: &str) -> Result<Spec, SpecError> {
        let raw: File = toml::from_str(text)
            .map_err(|e| SpecError::Syntax { file: file.into(), message: e.to_string() })?;
        let mut levels: Vec<Level> = Vec::with_capacity(raw.level.len());
        for entry in raw.level {
            let error = |level: &str| SpecError::Level { file: file.into(), level: level.into() };
            if levels.iter().any(|l| l.name == entry.name) {
                return Err(SpecError::Twice { file: file.into(), level: entry.name });
            }
            if entry.gpu.is_some() != (raw.arch == Arch::Nvptx) {
                return Err(SpecError::Gpu { file: file.into(), level: entry.name });
            }
            let mut features = match &entry.extends {
                None => Vec::new(),
                Some(base) => {
                    let base = levels.iter().find(|l| l.name == *base).ok_or_else(|| error(base))?;
                    base.features.clone()
                }
            };
            features.extend(entry.features);
            let LevelEntry { name, llvm_cpu, vector_bits, gpu, .. } = entry;
            levels.push(Level { name, llvm_cpu, features, vector_bits, gpu });
        }
        let place = |name: &String| {
            let missing = || SpecError::Level { file: file.into(), level: name.clone() };
            levels.iter().position(|l| l.name == *name).ok_or_else(missing)
        };
        let default = raw.default.iter().map(place).collect::<Result<Vec<usize>, SpecError>>()?;
        if default.is_empty() {
            return Err(SpecError::NoDefault { file: file.into() });
        }
        Ok(Spec { name: raw.name, arch: raw.arch, triple: raw.triple, levels, default })
    }

    /// What the file's own name stands for as a target, best first.
    pub fn default_levels(&self) -> impl Iterator<Item = &Level> {
        self.default.iter().map(|&i| &self.levels[i])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "name = 'a'\narch = 'x86_64'\ntriple = 't'\n";

    fn error(rest: &str) -> String {
        Spec::parse("a.toml", &format!("{HEAD}{rest}")).unwrap_err().to_string()
    }

    #[test]
    fn suffixes_of_gpu_levels_name_their_devices() {
        let text = "name = 'g'\narch = 'nvptx'\ntriple = 't'\ndefault = ['x']\n";
        let scope = |cpu: &str| {
            let gpu = "gpu = { sm = 90, ptx = 80, shared_bytes = 1, max_threads = 1 }";
            let level = format!("[[level]]\nname = 'x'\nllvm_cpu = '{cpu}'\nvector_bits = 128\n{gpu}\n");
            Spec::parse("g", &format!("{text}{level}")).unwrap().levels[0].device_scope()
        };
        let scopes = ["sm_90", "sm_90a", "sm_100f", "sm_120"].map(scope);
        use DeviceScope::{Exact, Family, Later};
        assert_eq!(scopes, [Later, Exact, Family, Later]);
    }

    #[test]
    fn mistakes_are_named() {
        let level = "[[level]]\nname = 'l'\nllvm_cpu = 'c'\nvector_bits = 128\n";
        assert!(error("default = []\n[[level]]\nname = 3").contains("a.toml"));
        assert!(error(&format!("default = ['m']\n{level}")).contains("`m`"));
        assert!(error(&format!("default = ['l']\n{level}{level}")).contains("twice"));
        assert!(error(&format!("default = ['l']\n{level}extends = 'z'")).contains("`z`"));
        assert!(error(&format!("default = ['l']\n{level}speed = 3")).contains("speed"));
        assert!(error(&format!("default = []\n{level}")).contains("no default"));
        let gpu = "gpu = { sm = 80, ptx = 70, shared_bytes = 1, max_threads = 1 }";
        assert!(error(&format!("default = ['l']\n{level}{gpu}")).contains("gpu"));
    }
}
