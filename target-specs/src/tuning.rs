//! Tuning files: what `mlcc tune` measured to be faster on one machine, or predicted to be so on a GPU, for
//! `mlcc build --tuning`.
//!
//! A file names a level and has keys of its tune tables ([`FeatureLevel::tune_tables`]), which take the place
//! of the same keys. The processor and the figures that come with it are for people, and for the check that a
//! file is used where it was measured.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::tune::merge_tables;
use crate::{CompileTarget, FIELDS, FeatureLevel, GPU_FIELDS, ProcessorModel, TuneTables};

/// The content of a tuning file.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LevelTuning {
    /// Name of the level that it changes.
    pub level: String,
    /// The processor that it was measured on; `None` in files that were not measured, or where the system did
    /// not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<ProcessorModel>,
    /// Keys of the `tune` tables of a level.
    #[serde(default)]
    pub tune: toml::Table,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredTuning>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PredictedTuning>,
}

/// Predictions of `mlcc tune --predict`: nothing of it was measured.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PredictedTuning {
    pub model: String,
    pub quant: String,
    /// Name of the GPU in `gpus.toml`.
    pub device: String,
    /// Versions of the assembler and the disassembler.
    pub ptxas: String,
    pub nvdisasm: String,
    #[serde(default)]
    pub tests: Vec<PredictedRow>,
    #[serde(default)]
    pub changes: Vec<ChangeRow>,
}

/// A test without and with the tuning.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PredictedRow {
    pub name: String,
    /// Tokens per second.
    pub without: f64,
    pub with: f64,
    pub gain: f64,
}

/// Measurements of `mlcc tune`.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredTuning {
    pub model: String,
    pub quant: String,
    pub threads: usize,
    /// Limits of the machine, the least and the most of all probes: 10^9 bytes read per second, and 10^9
    /// operations per second by arithmetic (a multiplication and an addition are two).
    pub read_gbytes_per_s: [f64; 2],
    #[serde(default)]
    pub gops: BTreeMap<String, [f64; 2]>,
    /// The tuning as a whole, compared with the level without it.
    #[serde(default)]
    pub tests: Vec<TestRow>,
    /// The changes in the order in which they were found.
    #[serde(default)]
    pub changes: Vec<ChangeRow>,
}

/// A test without and with the tuning, in turns.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TestRow {
    pub name: String,
    /// Tokens per second, medians.
    pub without: f64,
    pub with: f64,
    /// Median of the quotients of the turns.
    pub gain: f64,
    pub turns: usize,
}

/// A key that was changed.
#[derive(Clone, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeRow {
    pub key: String,
    pub from: String,
    pub to: String,
    /// Gains by kind of work: medians of quotients of speeds in turns, or quotients of predictions.
    pub gains: BTreeMap<String, f64>,
}

#[derive(Error, Debug, PartialEq, Eq)]
pub enum TuningError {
    #[error("tuning {file}: {message}")]
    Syntax { file: String, message: String },
    #[error("tuning {file}: unknown level `{level}`: {near}`mlcc targets` lists all")]
    UnknownLevel { file: String, level: String, near: String },
    #[error("tuning {file}: level `{level}` has nothing to tune: its kernels use no tensor cores")]
    Nothing { file: String, level: String },
    #[error("tuning {file}: `{key}` is for levels of {of}, and `{level}` is one of {found}")]
    Misplaced { file: String, level: String, key: &'static str, of: &'static str, found: &'static str },
    #[error("tuning {file}: the tune table: {message}")]
    Tune { file: String, message: String },
    #[error(
        "tuning {file} is for the level `{level}`, the build for {target}: name --target {level}, or use a tuning of that target"
    )]
    OtherLevel { file: String, level: String, target: String },
    #[error(
        "tuning {file} was measured on {measured}, this machine is {found}: tune here (mlcc tune), or name --target {level} to \
         build for the other machine"
    )]
    OtherCpu { file: String, level: String, measured: String, found: String },
}

impl LevelTuning {
    /// Reads a file; `file` is for messages. The keys and values of the tune table are checked with those of
    /// its level.
    pub fn parse(file: &str, text: &str) -> Result<LevelTuning, TuningError> {
        let syntax = |e: toml::de::Error| TuningError::Syntax {
            file: file.into(),
            message: e.to_string().trim_end().into(),
        };
        let tuning: LevelTuning = toml::from_str(text).map_err(syntax)?;
        let (file, level) = (file.to_string(), tuning.level.clone());
        let Some(found) = crate::level(&level).ok().flatten() else {
            let known = crate::names().unwrap_or_default();
            let known: Vec<String> = known.into_iter().filter(|n| has_tune(n)).collect();
            let near = mlcc_files::did_you_mean(&level, known.iter().map(String::as_str));
            return Err(TuningError::UnknownLevel { file, level, near });
        };
        if found.tune_tables().is_none() {
            return Err(TuningError::Nothing { file, level });
        }
        let misplaced = |key, of, found| TuningError::Misplaced {
            file: file.clone(),
            level: level.clone(),
            key,
            of,
            found,
        };
        match (found.gpu.is_some(), &tuning) {
            (true, LevelTuning { cpu: Some(_), .. }) => return Err(misplaced("cpu", "CPUs", "GPUs")),
            (true, LevelTuning { measured: Some(_), .. }) => {
                return Err(misplaced("measured", "CPUs", "GPUs"));
            }
            (false, LevelTuning { predicted: Some(_), .. }) => {
                return Err(misplaced("predicted", "GPUs", "CPUs"));
            }
            _ => {}
        }
        found.with_changes(&tuning.tune).map_err(|message| TuningError::Tune { file, message })?;
        Ok(tuning)
    }

    /// The text of the file, after a comment of these lines.
    pub fn to_text(&self, comment: &str) -> String {
        let comment: String = comment.lines().map(|line| format!("# {line}\n")).collect();
        // Tables of strings, numbers and tables can always be written.
        format!("{comment}{}", toml::to_string(self).unwrap_or_default())
    }

    /// Changes the level of a target. A target that means this machine (`asked` is `cpu`) takes only what was
    /// measured on a processor like the one `here`, as far as both are known.
    pub fn apply(
        &self,
        file: &str,
        asked: &str,
        here: Option<&ProcessorModel>,
        target: &mut CompileTarget,
    ) -> Result<(), TuningError> {
        let (file, level) = (file.to_string(), self.level.clone());
        if let (Some(measured), Some(found), "cpu") = (&self.cpu, here, asked)
            && measured != found
        {
            let (measured, found) = (measured.to_string(), found.to_string());
            return Err(TuningError::OtherCpu { file, level, measured, found });
        }
        let Some(changed) = target.levels.iter_mut().find(|l| l.name == self.level) else {
            let names: Vec<&str> = target.levels.iter().map(|l| l.name.as_str()).collect();
            return Err(TuningError::OtherLevel { file, level, target: names.join(", ") });
        };
        *changed = changed.with_changes(&self.tune).map_err(|message| TuningError::Tune { file, message })?;
        Ok(())
    }
}

impl fmt::Display for LevelTuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys of CPUs are parts of tables, which GPUs have as a whole.
        let gpu = crate::level(&self.level).ok().flatten().is_some_and(|level| level.gpu.is_some());
        let fields = if gpu { GPU_FIELDS } else { FIELDS }.iter();
        let changed = fields
            .filter_map(|field| Some(format!("{} {}", field.key, format_value(field.value_in(&self.tune)?))));
        let changed: Vec<String> = changed.collect();
        match changed.is_empty() {
            true => write!(f, "{} as it is", self.level)?,
            false => write!(f, "{} with {}", self.level, changed.join(", "))?,
        }
        if let Some(cpu) = &self.cpu {
            write!(f, "; measured on {cpu}")?;
        }
        if let Some(PredictedTuning { model, quant, device, tests, .. }) = &self.predicted {
            write!(f, "; predicted for {device}, not measured: {model} {quant}")?;
            tests.iter().try_for_each(|test| write!(f, ", {} x {:.3}", test.name, test.gain))?;
        }
        let Some(measured) = &self.measured else { return Ok(()) };
        let MeasuredTuning { model, quant, threads, read_gbytes_per_s: [least, most], gops, tests, .. } =
            measured;
        write!(f, "; {model} {quant}, {threads} threads")?;
        tests.iter().try_for_each(|test| write!(f, ", {} x {:.3}", test.name, test.gain))?;
        write!(f, "; reads {least:.1} to {most:.1} GB/s")?;
        gops.iter().try_for_each(|(kind, [least, most])| write!(f, ", {kind} {least:.0} to {most:.0} Gop/s"))
    }
}

/// A value of a field for people, for example `every, 2048`.
pub fn format_value(value: &toml::Value) -> String {
    match value {
        toml::Value::String(word) => word.clone(),
        toml::Value::Array(values) => values.iter().map(format_value).collect::<Vec<_>>().join("/"),
        toml::Value::Table(table) if table.contains_key("by") => {
            let get = |key| table.get(key).map(format_value).unwrap_or_default();
            format!("{} keys, at most {} {}", get("keys"), get("most"), get("by"))
        }
        toml::Value::Table(table) => match (table.get("lines"), table.get("distance")) {
            (Some(lines), Some(distance)) => format!("{} {distance} ahead", format_value(lines)),
            (Some(lines), None) => format_value(lines),
            _ => table
                .iter()
                .map(|(key, value)| format!("{key} {}", format_value(value)))
                .collect::<Vec<_>>()
                .join(" "),
        },
        other => other.to_string(),
    }
}

fn has_tune(name: &str) -> bool {
    crate::level(name).ok().flatten().is_some_and(|level| level.tune_tables().is_some())
}

impl TuneTables {
    /// All keys, as a spec has them.
    pub fn to_table(&self) -> toml::Table {
        toml::Table::try_from(self).unwrap_or_default()
    }
}

impl FeatureLevel {
    /// The level with these keys in place of the same ones of its tune tables; unknown keys and values
    /// outside of their legal range are errors.
    pub fn with_changes(&self, changes: &toml::Table) -> Result<FeatureLevel, String> {
        if let Some(gpu) = &self.gpu {
            return self.with_schedules(gpu, changes.clone());
        }
        let base = self.tune.as_ref().ok_or("the level has none")?;
        let tables = merge_tables(&base.to_table(), changes.clone());
        let read: Result<TuneTables, toml::de::Error> = tables.clone().try_into();
        let tune = read.map_err(|e| e.to_string().trim_end().to_string())?;
        let taken = tune.to_table();
        if let Some(field) = FIELDS.iter().find(|field| field.value_in(&taken) != field.value_in(&tables)) {
            return Err(format!("{}: a key there has no use together with the others", field.key));
        }
        match tune.find_fault(&self.features) {
            Some(fault) => Err(fault),
            None => Ok(FeatureLevel { tune: Some(tune), ..self.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "level = 'znver4'\ncpu = { vendor = 'AuthenticAMD', family = 25, model = 17 }\n\
                        [tune]\ndrops_requests = false\nproduct = { few_rows = 8 }\n\
                        [tune.stream]\nq8 = { lines = 'every', distance = 2048 }\n";

    fn cpu(model: u32) -> ProcessorModel {
        ProcessorModel { vendor: "AuthenticAMD".into(), family: Some(25), model }
    }

    fn error(text: &str) -> String {
        LevelTuning::parse("t.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn a_tuning_changes_its_keys_and_nothing_else() {
        let tuning = LevelTuning::parse("t.toml", FILE).unwrap();
        let mut target = crate::resolve_target("znver4,x86-64-v3").unwrap();
        let before = target.clone();
        tuning.apply("t.toml", "znver4", None, &mut target).unwrap();
        let mut expected = before.levels[0].tune.clone().unwrap();
        expected.drops_requests = false;
        expected.product.few_rows = 8;
        expected.stream.q8 = crate::StreamPrefetch::Every { distance: 2048 };
        assert_eq!(target.levels[0].tune, Some(expected));
        assert_eq!(target.levels[1], before.levels[1]);
    }

    #[test]
    fn a_tuning_of_a_gpu_says_that_it_is_predicted() {
        let text = "level = 'sm_90'\n[tune.product]\nrows = 128\n[predicted]\nmodel = 'm'\nquant = 'f16'\n\
                    device = 'h200'\nptxas = '12.9.86'\nnvdisasm = '13.5.37'\n\
                    tests = [{ name = 'pp512', without = 100.0, with = 110.0, gain = 1.1 }]\n";
        let tuning = LevelTuning::parse("t.toml", text).unwrap();
        let mut target = crate::resolve_target("cuda").unwrap();
        let before = target.clone();
        tuning.apply("t.toml", "cuda", None, &mut target).unwrap();
        let tile = |target: &CompileTarget| target.levels[0].gpu.as_ref().unwrap().product.unwrap();
        assert_eq!(tile(&target), crate::MatrixTile { rows: 128, ..tile(&before) });
        assert_eq!(target.levels[1..], before.levels[1..]);
        let shown = tuning.to_string();
        let expected = "sm_90 with product rows 128; predicted for h200, not measured: m f16, pp512 x 1.100";
        assert_eq!(shown, expected);
        assert_eq!(LevelTuning::parse("t.toml", &tuning.to_text("c")).unwrap(), tuning);
        let other = LevelTuning { level: "znver4".into(), tune: toml::Table::new(), ..tuning.clone() };
        assert!(error(&other.to_text("")).contains("`predicted` is for levels of GPUs"));
        let mut target = crate::resolve_target("sm_80").unwrap();
        let text = tuning.apply("t.toml", "sm_80", None, &mut target).unwrap_err().to_string();
        assert!(text.contains("`sm_90`") && text.contains("--target sm_90"), "{text}");
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut tuning = LevelTuning::parse("t.toml", FILE).unwrap();
        tuning.measured = Some(MeasuredTuning {
            model: "m".into(),
            quant: "q8i8".into(),
            threads: 2,
            read_gbytes_per_s: [28.5, 29.0],
            gops: BTreeMap::from([("i8".into(), [500.0, 510.5])]),
            tests: vec![TestRow { name: "tg32".into(), without: 100.0, with: 110.0, gain: 1.1, turns: 7 }],
            changes: vec![ChangeRow {
                key: "stream.q8".into(),
                from: "none".into(),
                to: "every".into(),
                gains: BTreeMap::from([("tg32".into(), 1.1)]),
            }],
        });
        let text = tuning.to_text("one\ntwo");
        assert!(text.starts_with("# one\n# two\n"), "{text}");
        assert_eq!(LevelTuning::parse("t.toml", &text).unwrap(), tuning);
        for name in crate::names().unwrap() {
            let Some(level) = crate::level(&name).unwrap() else { continue };
            let Some(tune) = &level.tune else { continue };
            assert_eq!(level.with_changes(&tune.to_table()), Ok(level.clone()), "{name}");
        }
    }

    #[test]
    fn mistakes_are_named_with_what_is_known() {
        let text = error("level = 'znver9'");
        assert!(text.contains("t.toml") && text.contains("`znver9`: did you mean `znver"), "{text}");
        // Levels that are not tuned are not offered.
        assert!(error("level = 'sm_81'").contains("did you mean `sm_80`"));
        let text = error("level = 'sm_71'");
        assert!(text.contains("`sm_71`") && !text.contains("`sm_70`"), "{text}");
        assert!(error("level = 'sm_70'").contains("tensor cores"));
        let text = error("level = 'sm_90'\ntune.product.rows = 72");
        assert!(
            text.contains("t.toml") && text.contains("product: 72 rows") && text.contains("of 32"),
            "{text}"
        );
        let text = error("level = 'sm_90'\ntune.product.few_rows = 8");
        assert!(text.contains("unknown field `few_rows`") && text.contains("`stages`"), "{text}");
        let text = error("level = 'sm_90'\ncpu = { vendor = 'V', model = 1 }");
        assert!(text.contains("`cpu` is for levels of CPUs") && text.contains("`sm_90`"), "{text}");
        assert!(error("tune = {}").contains("level"));
        assert!(error("level = 3").contains("t.toml"));
        let text = error("level = 'znver4'\nspeed = 1");
        assert!(text.contains("`speed`") && text.contains("`measured`"), "{text}");
        let text = error("level = 'znver4'\n[tune.stream]\nq5 = { lines = 'none' }");
        assert!(text.contains("unknown field `q5`") && text.contains("`bf16`"), "{text}");
        for (wrong, part) in [
            ("stream = { q8 = { lines = 'every', distance = 0 } }", "1 to 65536"),
            ("stream = { q8 = { lines = 'none', distance = 64 } }", "stream.q8"),
            ("tile = { codes = { rows = [6, 1], tiles = 1 } }", "2 or 4"),
            ("tile = { tall = { rows = 10, tiles = 1 } }", "multiple"),
            ("tile = { codes = { rows = [3, 1], tiles = 1 } }", "tile.codes"),
            ("tile = { codes = { rows = [18, 1], tiles = 1 } }", "at most 16"),
            ("tile = { plain = { rows = [4, 1], tiles = 9 } }", "tile.plain"),
            ("tile = { tall = { rows = 4, tiles = 1 } }", "tile.tall"),
            ("product = { chunk_rows = 0 }", "1 to 512"),
            ("product = { chunk_rows = 10 }", "multiple of 4"),
            ("product = { small_bytes = 1073741824 }", "product.small_bytes"),
            ("product = { few_rows = -1 }", "-1"),
            ("product = { groups_ahead = 65 }", "groups_ahead"),
            ("attention = { block = { by = 'bytes', most = 65536, keys = 20 } }", "multiple of 16"),
            ("attention = { block = { by = 'lines', most = 65536, keys = 16 } }", "`elements`"),
            ("attention = { set_rows = 50 }", "48, 96"),
            ("quantize = { vectors = 3 }", "1, 2 or 4"),
            ("scan = { state_vectors = 0 }", "state_vectors"),
            ("shares = { bytes = 0 }", "shares"),
            ("product = { panel_columns = 100 }", "multiples of 32"),
            ("division = 'none'", "`divider`"),
            ("speed = 3", "`drops_requests`"),
            ("product = 3", "product"),
        ] {
            let text = error(&format!("level = 'znver4'\ntune.{wrong}"));
            assert!(text.contains(part) && text.contains("t.toml"), "{wrong}: {text}");
        }
    }

    #[test]
    fn a_tuning_is_for_its_level_and_its_processor() {
        let tuning = LevelTuning::parse("t.toml", FILE).unwrap();
        let mut v3 = crate::resolve_target("x86-64-v3").unwrap();
        let text = tuning.apply("t.toml", "x86-64-v3", None, &mut v3).unwrap_err().to_string();
        assert!(text.contains("`znver4`") && text.contains("x86-64-v3"), "{text}");
        let mut target = crate::resolve_target("znver4").unwrap();
        let other = tuning.apply("t.toml", "cpu", Some(&cpu(97)), &mut target).unwrap_err().to_string();
        assert!(
            other.contains("model 17") && other.contains("model 97") && other.contains("--target znver4"),
            "{other}"
        );
        let before = target.clone();
        // The machine that builds does not matter if the level is named.
        for (asked, here) in [("znver4", Some(cpu(97))), ("cpu", Some(cpu(17))), ("cpu", None)] {
            let mut target = before.clone();
            tuning.apply("t.toml", asked, here.as_ref(), &mut target).unwrap();
            assert_ne!(target, before);
        }
    }
}
