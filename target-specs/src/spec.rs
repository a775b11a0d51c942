//! The TOML form of a spec.

use crate::model::HostProcessors;
use crate::tune::{TuneTables, merge_tables};
use serde::{Deserialize, Serialize};
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

/// The properties of GPU levels.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuSpec {
    /// Compute capability times ten, as in the PTX.
    pub sm: u32,
    /// PTX version times ten.
    pub ptx: u32,
    /// Shared memory of one block.
    pub shared_bytes: u32,
    /// The same with opting in, on every machine that runs code of the level; none where no kernel does.
    pub opt_in_shared_bytes: Option<u32>,
    pub max_threads: u32,
    pub device: GpuDevice,
    /// The tile of products of many rows on tensor cores; none without `mma.sync`.
    pub product: Option<MatrixTile>,
    /// The tile of packed weights with f16 activations, where that is another one.
    pub code_product: Option<MatrixTile>,
    /// The tile of attention on tensor cores.
    pub attention: Option<AttentionTile>,
}

/// The part of an attention that a block computes on tensor cores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionTile {
    /// Most warps of a block: each has 16 rows, or with few rows some of the keys.
    pub warps: u32,
    /// Most keys of a tile in shared memory.
    pub keys: u32,
    /// Most bytes of shared memory: what every machine gives that runs code of the level.
    pub shared_bytes: u32,
}

/// The part of a product that a block computes on tensor cores, and the way in which it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MatrixTile {
    /// Rows and columns of the result.
    pub rows: u32,
    pub columns: u32,
    /// Warps along rows and along columns.
    pub warps: [u32; 2],
    /// Slices of the operands in shared memory: one is multiplied, the others are on their way.
    pub stages: u32,
}

impl MatrixTile {
    pub fn threads(&self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }
    /// Rows and columns of a warp.
    pub fn warp_tile(&self) -> [i64; 2] {
        [self.rows / self.warps[0], self.columns / self.warps[1]].map(i64::from)
    }
    /// The same in fragments of 16 rows and of 8 columns.
    pub fn fragments(&self) -> [i64; 2] {
        let [rows, columns] = self.warp_tile();
        [rows / 16, columns / 8]
    }
    /// Sums that a lane holds.
    pub fn lane_accumulators(&self) -> i64 {
        self.fragments().iter().product::<i64>() * 4
    }
}

/// A device of a level that is common where models are served. Rates are those of its data sheet.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuDevice {
    pub name: String,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Resources of a multiprocessor: 32-bit registers, and bytes of shared memory for all its blocks.
    pub registers: u32,
    pub shared_bytes: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: u64,
    /// 10^9 bytes per second from memory.
    pub gbytes_per_s: u32,
    /// 10^9 operations per second: f32 outside of tensor cores, f16 products with f32 sums in them (dense).
    pub f32_gflops: u32,
    pub f16_gflops: u32,
}

/// The cost of an all-gather between ranks of a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExchangeCost {
    /// Time until the first byte has come: 10^-9 seconds.
    pub latency_ns: u32,
    /// 10^6 bytes per second that a rank gets.
    pub mbytes_per_s: u32,
}

impl ExchangeCost {
    /// 10^-9 seconds of `exchanges` all-gathers in which a rank gets `bytes` bytes.
    pub fn nanoseconds(self, exchanges: u64, bytes: u64) -> f64 {
        let per_byte = 1e3 / f64::from(self.mbytes_per_s.max(1));
        exchanges as f64 * f64::from(self.latency_ns) + bytes as f64 * per_byte
    }
}

/// One feature level.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FeatureLevel {
    pub name: String,
    pub llvm_cpu: String,
    /// All of them, those of the levels below included.
    pub features: Vec<String>,
    /// Widest vector that kernels should use.
    pub vector_bits: u32,
    pub gpu: Option<GpuSpec>,
    /// The processors that it is tuned for; `None` for a level of instructions.
    pub host: Option<HostProcessors>,
    /// Only of CPUs: the tuning of a GPU is in `gpu` (see [`FeatureLevel::tune_tables`]).
    pub tune: Option<TuneTables>,
}

/// The devices on which code of a GPU level runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceScope {
    /// Its compute capability and every later one.
    Later,
    /// Its compute capability and no other: architecture-specific features (`sm_90a`).
    Exact,
    /// Its compute capability and later ones of the same family: family-specific features (`sm_100f`).
    Family,
}

impl FeatureLevel {
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
pub struct TargetSpec {
    pub name: String,
    pub arch: Arch,
    pub triple: String,
    /// Levels of instructions, weaker ones first.
    pub levels: Vec<FeatureLevel>,
    /// Levels that are tuned for processors, in the order of the levels that they extend.
    pub machines: Vec<FeatureLevel>,
    /// The cost for ranks on such machines; `None` where models are not split.
    pub exchange: Option<ExchangeCost>,
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
    #[error("target spec {file}: the gpu table of level `{level}`: {fault}")]
    Schedules { file: String, level: String, fault: String },
    #[error("target spec {file}: the tune table of level `{level}`: {message}")]
    Tune { file: String, level: String, message: String },
    #[error(
        "target spec {file}: level `{level}` is for processors: it extends a level of instructions and has its features"
    )]
    Machine { file: String, level: String },
    #[error("target spec {file}: no default levels")]
    NoDefault { file: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetSpecFile {
    name: String,
    arch: Arch,
    triple: String,
    default: Vec<String>,
    exchange: Option<ExchangeCost>,
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
    gpu: Option<GpuSpec>,
    host: Option<HostProcessors>,
    #[serde(default)]
    tune: toml::Table,
}

/// A level, and what those that extend it take over.
struct ParsedLevel {
    level: FeatureLevel,
    tune: toml::Table,
}

impl TargetSpec {
    /// Reads a spec; `file` is for messages.
    pub fn parse(file: &str, text: &str) -> Result<TargetSpec, SpecError> {
        let raw: TargetSpecFile = toml::from_str(text)
            .map_err(|e| SpecError::Syntax { file: file.into(), message: e.to_string() })?;
        let mut read: Vec<ParsedLevel> = Vec::with_capacity(raw.level.len());
        for entry in raw.level {
            let level = read_level(file, raw.arch, &read, entry)?;
            read.push(level);
        }
        let all = read.into_iter().map(|read| read.level);
        let (machines, levels): (Vec<FeatureLevel>, Vec<FeatureLevel>) =
            all.partition(|level| level.host.is_some());
        let place = |name: &String| {
            let missing = || SpecError::Level { file: file.into(), level: name.clone() };
            levels.iter().position(|l| l.name == *name).ok_or_else(missing)
        };
        let default = raw.default.iter().map(place).collect::<Result<Vec<usize>, SpecError>>()?;
        if default.is_empty() {
            return Err(SpecError::NoDefault { file: file.into() });
        }
        let TargetSpecFile { name, arch, triple, exchange, .. } = raw;
        Ok(TargetSpec { name, arch, triple, levels, machines, exchange, default })
    }

    /// Levels of instructions, then those for processors.
    pub fn all_levels(&self) -> impl Iterator<Item = &FeatureLevel> {
        self.levels.iter().chain(&self.machines)
    }

    /// The levels that the file's own name means as a target, best first.
    pub fn default_levels(&self) -> impl Iterator<Item = &FeatureLevel> {
        self.default.iter().map(|&i| &self.levels[i])
    }
}

fn read_level(
    file: &str,
    arch: Arch,
    before: &[ParsedLevel],
    entry: LevelEntry,
) -> Result<ParsedLevel, SpecError> {
    let (file, level) = (file.to_string(), entry.name.clone());
    if before.iter().any(|b| b.level.name == level) {
        return Err(SpecError::Twice { file, level });
    }
    if entry.gpu.is_some() != (arch == Arch::Nvptx) {
        return Err(SpecError::Gpu { file, level });
    }
    let base = match &entry.extends {
        None => None,
        Some(name) => match before.iter().find(|b| b.level.name == *name) {
            None => return Err(SpecError::Level { file, level: name.clone() }),
            found => found,
        },
    };
    let plain_base = base.is_some_and(|b| b.level.host.is_none());
    if entry.host.is_some() && !(plain_base && entry.features.is_empty()) {
        return Err(SpecError::Machine { file, level });
    }
    let mut features = base.map_or(Vec::new(), |b| b.level.features.clone());
    features.extend(entry.features);
    let tables = merge_tables(base.map_or(&toml::Table::new(), |b| &b.tune), entry.tune);
    let wrong = |message: String| SpecError::Tune { file: file.clone(), level: level.clone(), message };
    if let Some(fault) = entry.gpu.as_ref().and_then(|gpu| gpu.schedules().find_fault(gpu)) {
        return Err(SpecError::Schedules { file, level, fault });
    }
    let tune = match arch {
        Arch::Nvptx if tables.is_empty() => None,
        Arch::Nvptx => return Err(wrong("is for CPUs".into())),
        Arch::X86_64 | Arch::Aarch64 => {
            let tune: TuneTables =
                tables.clone().try_into().map_err(|e: toml::de::Error| wrong(e.to_string()))?;
            if let Some(fault) = tune.find_fault(&features) {
                return Err(wrong(fault));
            }
            Some(tune)
        }
    };
    let LevelEntry { name, llvm_cpu, vector_bits, gpu, host, .. } = entry;
    let level = FeatureLevel { name, llvm_cpu, features, vector_bits, gpu, host, tune };
    Ok(ParsedLevel { level, tune: tables })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "name = 'a'\narch = 'x86_64'\ntriple = 't'\n";

    const DEVICE: &str = "device = { name = 'd', sms = 1, registers = 1, shared_bytes = 1, l2_bytes = 1, gbytes_per_s = 1, \
                          f32_gflops = 1, f16_gflops = 1 }";

    fn error(rest: &str) -> String {
        TargetSpec::parse("a.toml", &format!("{HEAD}{rest}")).unwrap_err().to_string()
    }

    #[test]
    fn suffixes_of_gpu_levels_name_their_devices() {
        let text = "name = 'g'\narch = 'nvptx'\ntriple = 't'\ndefault = ['x']\n";
        let scope = |cpu: &str| {
            let gpu = format!("gpu = {{ sm = 90, ptx = 80, shared_bytes = 1, max_threads = 1, {DEVICE} }}");
            let level = format!("[[level]]\nname = 'x'\nllvm_cpu = '{cpu}'\nvector_bits = 128\n{gpu}\n");
            TargetSpec::parse("g", &format!("{text}{level}")).unwrap().levels[0].device_scope()
        };
        let scopes = ["sm_90", "sm_90a", "sm_100f", "sm_120"].map(scope);
        use DeviceScope::{Exact, Family, Later};
        assert_eq!(scopes, [Later, Exact, Family, Later]);
    }

    #[test]
    fn mistakes_are_named() {
        let tune = toml::Value::from(tables());
        let level = format!("[[level]]\nname = 'l'\nllvm_cpu = 'c'\nvector_bits = 128\ntune = {tune}\n");
        assert!(error("default = []\n[[level]]\nname = 3").contains("a.toml"));
        assert!(error(&format!("default = ['m']\n{level}")).contains("`m`"));
        assert!(error(&format!("default = ['l']\n{level}{level}")).contains("twice"));
        assert!(error(&format!("default = ['l']\n{level}extends = 'z'")).contains("`z`"));
        assert!(error(&format!("default = ['l']\n{level}speed = 3")).contains("speed"));
        assert!(error(&format!("default = []\n{level}")).contains("no default"));
        let gpu = format!("gpu = {{ sm = 80, ptx = 70, shared_bytes = 1, max_threads = 1, {DEVICE} }}");
        assert!(error(&format!("default = ['l']\n{level}{gpu}")).contains("gpu"));
    }

    /// The tables of a level of the x86-64 spec.
    fn tables() -> toml::Table {
        let text: toml::Table = toml::from_str(include_str!("../specs/x86-64.toml")).unwrap();
        let level = text["level"].as_array().unwrap()[0].as_table().unwrap();
        level["tune"].as_table().unwrap().clone()
    }

    fn of(tune: toml::Table, more: &str) -> Result<TargetSpec, SpecError> {
        let mut level = toml::Table::new();
        for (key, value) in [("name", "l"), ("llvm_cpu", "c")] {
            level.insert(key.into(), value.into());
        }
        level.insert("vector_bits".into(), 128.into());
        level.insert("tune".into(), tune.into());
        let mut file: toml::Table = toml::from_str(&format!("{HEAD}default = ['l']\n")).unwrap();
        file.insert("level".into(), vec![toml::Value::from(level)].into());
        TargetSpec::parse("a.toml", &format!("{}\n{more}", toml::to_string(&file).unwrap()))
    }

    #[test]
    fn tune_tables_are_complete_and_have_no_other_keys() {
        assert!(of(tables(), "").unwrap().levels[0].tune.is_some());
        for section in ["division", "drops_requests", "cache", "stream", "product", "tile"] {
            let mut less = tables();
            less.remove(section);
            let text = of(less, "").unwrap_err().to_string();
            assert!(text.contains("`l`") && text.contains(section), "{text}");
        }
        let changed = |section: &str, key: &str, value: toml::Value| {
            let mut tables = tables();
            tables[section].as_table_mut().unwrap().insert(key.into(), value);
            of(tables, "").unwrap_err().to_string()
        };
        for section in ["cache", "stream", "product", "tile"] {
            let text = changed(section, "speed", 3.into());
            assert!(text.contains("unknown field `speed`"), "{text}");
        }
        let stream = |text: &str| toml::from_str::<toml::Table>(text).unwrap()["s"].clone();
        for wrong in
            ["s = { lines = 'some' }", "s = { lines = 'every' }", "s = { lines = 'one', distance = 0 }"]
        {
            let text = changed("stream", "q4", stream(wrong));
            assert!(text.contains("tune table of level `l`"), "{text}");
        }
        assert!(
            changed("tile", "codes", stream("s = { rows = [2, 4, 1], tiles = 1 }")).contains("tile.codes")
        );
        assert!(changed("product", "small_bytes", (1 << 30).into()).contains("cache"));
    }

    #[test]
    fn machines_change_single_keys_of_their_level() {
        let machine = "[[level]]\nname = 'm'\nextends = 'l'\nllvm_cpu = 'c'\nvector_bits = 128\n\
                       host = { vendor = 'V', family = 1, models = [[2, 3]] }\n\
                       tune = { drops_requests = true, product = { few_rows = 5 } }\n";
        let spec = of(tables(), machine).unwrap();
        let (level, machine) = (spec.levels[0].tune.clone().unwrap(), spec.machines[0].tune.clone().unwrap());
        let mut expected = level.clone();
        (expected.drops_requests, expected.product.few_rows) = (true, 5);
        assert!(machine == expected && machine != level);
        let more = "[[level]]\nname = 'm'\nextends = 'l'\nllvm_cpu = 'c'\nvector_bits = 128\nfeatures = ['avx']\n\
                    host = { vendor = 'V', models = [] }\n";
        assert!(of(tables(), more).unwrap_err().to_string().contains("has its features"));
    }
}
