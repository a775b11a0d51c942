//! Machines as data: `specs/*.toml` (one file per architecture, in it the feature levels), `--target`
//! resolution and detection of this machine.
//!
//! Invariants: the levels of a [`CompileTarget`] are in order, best first; `features` is complete (what a
//! level extends is included) and uses the names that LLVM and Rust's detection macros use.

mod fields;
mod gpus;
mod host;
mod model;
mod schedules;
mod spec;
mod tune;
mod tuning;

pub use fields::{FIELDS, GPU_FIELDS, TuneField, WorkloadKind};
pub use gpus::{GpuModel, InstrLatency, PipeThroughput, TensorCoreRate, gpus};
pub use host::detected_features;
pub use model::{HostProcessors, ProcessorModel, detected_model};
pub use spec::{
    Arch, AttentionTile, DeviceScope, ExchangeCost, FeatureLevel, GpuDevice, GpuSpec, MatrixTile, SpecError,
    TargetSpec,
};
pub use tune::{
    AttentionTuning, CacheSizes, ChunkTuning, DivisionMethod, KeyBlockLimit, MatmulTuning, QuantizeTuning,
    RegisterTileSize, ScanTuning, StreamPrefetch, StreamTuning, TallTile, TileTuning, TuneTables,
};
pub use tuning::{
    ChangeRow, LevelTuning, MeasuredTuning, PredictedRow, PredictedTuning, TestRow, TuningError, format_value,
};

use thiserror::Error;

/// The target that `--target` names: one architecture, one or more levels of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileTarget {
    /// The name as given, `cpu` replaced by the level found.
    pub name: String,
    pub arch: Arch,
    pub triple: String,
    /// Best first; never empty.
    pub levels: Vec<FeatureLevel>,
}

#[derive(Error, Debug, PartialEq, Eq)]
pub enum TargetError {
    #[error("unknown target `{name}`: {near}`mlcc targets` lists all")]
    Unknown { name: String, near: String },
    #[error(
        "targets `{first}` and `{second}` belong to different architectures and cannot share one file: CPU levels and \
         GPUs, or levels of different CPUs, cannot be mixed in one artifact; build one for each"
    )]
    Mixed { first: String, second: String },
    #[error(
        "target `{name}` already stands for several levels: give it alone, or list the levels instead: {levels}"
    )]
    Group { name: String, levels: String },
    #[error("target `cpu` stands for only this machine: list the levels instead: {levels}")]
    HostInList { levels: String },
    #[error(
        "this machine ({arch}) is not supported as a CPU target; give a --target (`mlcc targets` lists all)"
    )]
    Host { arch: String },
    #[error(transparent)]
    Spec(#[from] SpecError),
}

const BUILT_IN: [(&str, &str); 3] = [
    ("x86-64.toml", include_str!("../specs/x86-64.toml")),
    ("aarch64.toml", include_str!("../specs/aarch64.toml")),
    ("cuda.toml", include_str!("../specs/cuda.toml")),
];

/// The specs that come with mlcc.
pub fn specs() -> Result<Vec<TargetSpec>, SpecError> {
    BUILT_IN.iter().map(|(file, text)| TargetSpec::parse(file, text)).collect()
}

/// Every name that [`resolve_target`] takes, in the order of the specs.
pub fn names() -> Result<Vec<String>, SpecError> {
    let specs = specs()?;
    let all = specs.iter().flat_map(|s| std::iter::once(&s.name).chain(s.all_levels().map(|l| &l.name)));
    Ok(all.cloned().collect())
}

/// The level of this name.
pub fn level(name: &str) -> Result<Option<FeatureLevel>, SpecError> {
    Ok(specs()?.iter().flat_map(|s| s.all_levels()).find(|l| l.name == name).cloned())
}

/// The cost of all-gathers between ranks on machines of an architecture; `None` where models are not split.
pub fn exchange_cost(arch: Arch) -> Result<Option<ExchangeCost>, SpecError> {
    Ok(specs()?.iter().find(|s| s.arch == arch).and_then(|s| s.exchange))
}

impl FeatureLevel {
    /// The level with these of its features alone and vectors of at most this many bits. It is tuned as the
    /// best level of instructions that needs no more than that, or as the weakest one.
    pub fn reduced(&self, features: Vec<String>, vector_bits: u32) -> Result<FeatureLevel, SpecError> {
        let vector_bits = self.vector_bits.min(vector_bits);
        let specs = specs()?;
        let own = specs.iter().find(|s| s.all_levels().any(|l| l.name == self.name));
        let levels = own.map_or(&[][..], |spec| &spec.levels);
        let fits = |l: &&FeatureLevel| {
            l.vector_bits <= vector_bits && l.features.iter().all(|f| features.contains(f))
        };
        let like = levels.iter().filter(fits).max_by_key(|l| l.features.len()).or(levels.first());
        let tune = like.map_or(self.tune.clone(), |like| like.tune.clone());
        Ok(FeatureLevel { features, vector_bits, tune, ..self.clone() })
    }
}

/// The name of this machine's CPU.
const HOST: &str = "cpu";

/// `native` and `host` are what other compilers call `cpu`; other names stay.
pub fn canonical_name(name: &str) -> &str {
    if matches!(name, "native" | "host") { HOST } else { name }
}

/// `cpu`, the name of a spec (its default levels), of a level, or several level names with commas.
pub fn resolve_target(name: &str) -> Result<CompileTarget, TargetError> {
    let name = canonical_name(name);
    let specs = specs()?;
    if name == HOST {
        return host_target(&specs);
    }
    if let Some(spec) = specs.iter().find(|s| s.name == name) {
        let levels = spec.default_levels().cloned().collect();
        return Ok(CompileTarget { name: name.into(), arch: spec.arch, triple: spec.triple.clone(), levels });
    }
    one_architecture(name, &specs)?;
    let mut found: Option<(&str, &TargetSpec, Vec<usize>)> = None;
    for part in name.split(',').map(str::trim) {
        check_part(part, &specs)?;
        let hit = specs.iter().find_map(|s| Some((s, s.all_levels().position(|l| l.name == part)?)));
        let (spec, level) = hit.ok_or_else(|| unknown(part, &specs))?;
        match &mut found {
            None => found = Some((part, spec, vec![level])),
            Some((_, s, levels)) if s.name == spec.name => levels.push(level),
            Some((first, ..)) => {
                return Err(TargetError::Mixed { first: (*first).into(), second: part.into() });
            }
        }
    }
    let (_, spec, mut picked) = found.ok_or_else(|| unknown(name, &specs))?;
    picked.sort_unstable();
    picked.dedup();
    let all: Vec<&FeatureLevel> = spec.all_levels().collect();
    // Specs list the weaker level first; a machine has the features of its level, and comes before it.
    picked.sort_by_key(|&i| (all[i].features.len(), i));
    let levels = picked.iter().rev().map(|&i| all[i].clone()).collect();
    Ok(CompileTarget { name: name.into(), arch: spec.arch, triple: spec.triple.clone(), levels })
}

/// A list of levels may only have those of one architecture: told before anything else about it.
fn one_architecture(list: &str, specs: &[TargetSpec]) -> Result<(), TargetError> {
    let named = |part: &str| match part {
        "cpu" | "native" | "host" => Arch::of_host().and_then(|arch| specs.iter().find(|s| s.arch == arch)),
        _ => specs.iter().find(|s| s.name == part || s.all_levels().any(|l| l.name == part)),
    };
    let known: Vec<(&str, &TargetSpec)> =
        list.split(',').map(str::trim).filter_map(|part| Some((part, named(part)?))).collect();
    let Some((first, spec)) = known.first() else { return Ok(()) };
    match known.iter().find(|(_, other)| other.name != spec.name) {
        Some((second, _)) => Err(TargetError::Mixed { first: (*first).into(), second: (*second).into() }),
        None => Ok(()),
    }
}

/// Names of several levels, or of this machine, are no part of a list.
fn check_part(part: &str, specs: &[TargetSpec]) -> Result<(), TargetError> {
    let levels = |s: &TargetSpec| s.all_levels().map(|l| l.name.as_str()).collect::<Vec<_>>().join(", ");
    if canonical_name(part) == HOST {
        let host = specs.iter().filter(|s| Some(s.arch) == Arch::of_host()).map(levels).collect();
        return Err(TargetError::HostInList { levels: host });
    }
    match specs.iter().find(|s| s.name == part) {
        Some(spec) => Err(TargetError::Group { name: part.into(), levels: levels(spec) }),
        None => Ok(()),
    }
}

/// The level that is tuned for this processor, else the best one whose features it has.
fn host_target(specs: &[TargetSpec]) -> Result<CompileTarget, TargetError> {
    let unknown = || TargetError::Host { arch: std::env::consts::ARCH.into() };
    let arch = Arch::of_host().ok_or_else(unknown)?;
    let have = detected_features();
    let spec = specs.iter().find(|s| s.arch == arch).ok_or_else(unknown)?;
    let fits = |l: &&FeatureLevel| l.features.iter().all(|f| have.contains(&f.as_str()));
    let model = detected_model();
    let meant = |l: &&FeatureLevel| {
        l.host.as_ref().zip(model.as_ref()).is_some_and(|(host, model)| host.includes(model))
    };
    let best = spec.levels.iter().filter(fits).max_by_key(|l| l.features.len()).ok_or_else(unknown)?;
    // Some models exist with more features than others.
    let whole = |l: &&FeatureLevel| l.features.len() == best.features.len();
    let level = spec.machines.iter().filter(fits).filter(whole).find(meant).unwrap_or(best);
    Ok(CompileTarget {
        name: level.name.clone(),
        arch: spec.arch,
        triple: spec.triple.clone(),
        levels: vec![level.clone()],
    })
}

fn unknown(name: &str, specs: &[TargetSpec]) -> TargetError {
    let of_spec = |s: &'_ TargetSpec| {
        let levels = s.all_levels().map(|l| l.name.clone());
        std::iter::once(s.name.clone()).chain(levels).collect::<Vec<_>>()
    };
    let known: Vec<String> = std::iter::once(HOST.to_owned()).chain(specs.iter().flat_map(of_spec)).collect();
    let near = mlcc_files::did_you_mean_one_of(name, known.iter().map(String::as_str));
    TargetError::Unknown { name: name.into(), near }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_resolves() {
        for name in names().unwrap() {
            let target = resolve_target(&name).unwrap();
            assert!(!target.levels.is_empty(), "{name}");
        }
    }

    #[test]
    fn exchanges_have_a_cost_where_models_are_split() {
        let cost = |arch| exchange_cost(arch).unwrap();
        assert_eq!(cost(Arch::Nvptx), None);
        for arch in [Arch::X86_64, Arch::Aarch64] {
            let cost = cost(arch).unwrap();
            assert!(cost.nanoseconds(2, 0) == 2.0 * f64::from(cost.latency_ns));
            assert!(cost.nanoseconds(0, 1_000_000) == 1e9 / f64::from(cost.mbytes_per_s), "{cost:?}");
        }
    }

    #[test]
    fn levels_come_best_first() {
        let t = resolve_target("x86-64-v2,x86-64-v4").unwrap();
        let order: Vec<&str> = t.levels.iter().map(|l| l.name.as_str()).collect();
        assert_eq!(order, ["x86-64-v4", "x86-64-v2"]);
        assert!(t.levels[0].has("sse4.1") && t.levels[0].has("avx512bw") && !t.levels[1].has("avx"));
        let t = resolve_target("x86-64-v4-bf16,x86-64-v3,znver4,sapphirerapids").unwrap();
        let order: Vec<&str> = t.levels.iter().map(|l| l.name.as_str()).collect();
        assert_eq!(order, ["sapphirerapids", "znver4", "x86-64-v4-bf16", "x86-64-v3"]);
        for target in ["x86-64", "aarch64"] {
            let sizes: Vec<usize> =
                resolve_target(target).unwrap().levels.iter().map(|l| l.features.len()).collect();
            assert!(sizes.windows(2).all(|w| w[0] > w[1]), "{target}: {sizes:?}");
        }
    }

    #[test]
    fn reduced_levels_are_tuned_as_what_is_left() {
        let level = |name: &str| level(name).unwrap().unwrap();
        let full = level("znver4");
        let narrow = full.reduced(level("x86-64-v3").features, 128).unwrap();
        assert_eq!((narrow.tune, narrow.vector_bits), (level("x86-64-v2").tune, 128));
        let same = full.reduced(full.features.clone(), 512).unwrap();
        assert_eq!(same.tune, level("x86-64-v4-bf16").tune);
        let plain = level("armv8.6").reduced(vec!["neon".into()], 128).unwrap();
        assert_eq!(plain.tune, level("armv8.0").tune);
    }

    #[test]
    fn wrong_names_say_what_is_known() {
        let text = resolve_target("x86-64-v9").unwrap_err().to_string();
        assert!(
            text.contains("`x86-64-v9`: did you mean `x86-64-v") && text.contains("`mlcc targets`"),
            "{text}"
        );
        // Also of a name that is near to none.
        let text = resolve_target("z80").unwrap_err().to_string();
        assert!(text.matches('`').count() == 10 && text.contains("did you mean"), "{text}");
        let mixed = resolve_target("x86-64-v2,sm_80").unwrap_err();
        assert_eq!(mixed, TargetError::Mixed { first: "x86-64-v2".into(), second: "sm_80".into() });
        for list in ["cuda,x86-64-v3", "x86-64-v3, cuda", "x86-64,sm_80,aarch64"] {
            let text = resolve_target(list).unwrap_err().to_string();
            assert!(text.contains("CPU levels and GPUs") && text.contains("cannot be mixed"), "{text}");
        }
        let text = resolve_target("cuda,sm_80").unwrap_err().to_string();
        assert!(text.contains("`cuda` already stands for several") && text.contains("sm_80"), "{text}");
        if Arch::of_host().is_some() {
            let text = resolve_target("cpu,cpu").unwrap_err().to_string();
            assert!(text.contains("`cpu` stands for only this machine"), "{text}");
        }
    }

    #[test]
    fn the_host_is_a_named_level() {
        if Arch::of_host().is_none() {
            return;
        }
        let t = resolve_target("cpu").unwrap();
        assert_eq!(resolve_target(&t.name).unwrap().levels, t.levels);
        for other in ["native", "host"] {
            assert_eq!(resolve_target(other).unwrap(), t, "{other}");
            assert!(resolve_target(&format!("{other},{}", t.name)).is_err());
        }
    }
}
