//! Every family's case and every preset, and every target that `mlcc targets` lists, in all its levels: from
//! the configuration to steps with addresses. An error here means that the build is impossible. Code is not
//! generated, which would take hours; presets have their first layers, in which all kinds of layers are.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use mlcc_driver::compile::{BuildError, BuildEvent, BuildHooks, BuildOptions, build};
use mlcc_kernels::params::KernelTarget;
use mlcc_models::presets;
use mlcc_passes::scheme::QuantScheme;
use mlcc_passes::verify::verify_program;
use mlcc_target::{Arch, CompileTarget};
use serde_json::{Map, Value};

/// Layers of a preset: attention is at the sixth place in some, and a half of these shares keys with the
/// others.
const LAYERS: usize = 10;
/// Formats of weights, of which models take turns.
const FORMATS: [&str; 5] = ["q4f16_2", "q8i8", "f32", "f16", "q4i8"];

struct TargetCase {
    name: String,
    options: BuildOptions,
    /// Models of texts are built for CPUs.
    texts: bool,
}

impl TargetCase {
    fn of(name: &str, directory: &Path, format: &str) -> TargetCase {
        let mut options = BuildOptions::new(directory.to_str().unwrap());
        options.quant = QuantScheme::from_name(format).unwrap().0;
        options.quant_name = format.into();
        options.stop_after = Some("plan_barriers".into());
        // With the entry points for several sequences, also on GPUs.
        options.batch = Some(4);
        TargetCase { name: format!("{name} in {format}"), options, texts: false }
    }

    /// The reason why it cannot be built for a target.
    fn error(&self, target: &CompileTarget) -> Option<String> {
        let options = BuildOptions { target: target.name.clone(), ..self.options.clone() };
        let mut wrong = None;
        let mut event = |event: BuildEvent<'_>| match event {
            BuildEvent::Pass { pass, program } if pass.name == "plan_barriers" => {
                wrong = verify_program(program).err().map(|e| e.to_string());
            }
            _ => {}
        };
        let built = build(&options, &mut BuildHooks { event: &mut event, cancel: &AtomicBool::new(false) });
        match (built, self.texts && target.arch == Arch::Nvptx) {
            (Err(BuildError::Unsupported(what)), true) if what.contains("built for CPUs only") => None,
            (Ok(_), true) => Some("models of texts are built for GPUs now: this test has to know".into()),
            (Ok(_), false) => wrong,
            (Err(e), _) => Some(e.to_string()),
        }
    }
}

/// The configuration with its first layers alone.
fn shorten(raw: &mut Map<String, Value>) {
    let number = |raw: &Map<String, Value>, name: &str| raw.get(name).and_then(Value::as_u64);
    let names = ["num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers"];
    let layers = names.iter().find_map(|name| number(raw, name)).unwrap() as usize;
    let kept = layers.min(LAYERS);
    for name in names {
        if number(raw, name).is_some() {
            raw.insert(name.into(), kept.into());
        }
    }
    // Gemma 4: of the last layers, which have no keys of their own, a half here.
    if number(raw, "num_kv_shared_layers").is_some_and(|shared| shared > 0) {
        raw.insert("num_kv_shared_layers".into(), (kept / 2).into());
    }
    let within = |number: &Value, most: usize| number.as_u64().is_some_and(|n| n < most as u64);
    for (name, value) in raw {
        match value {
            Value::Array(list) if list.len() == layers => list.truncate(kept),
            Value::Array(list) if name == "full_attn_idxs" => list.retain(|at| within(at, kept)),
            Value::String(letters) if letters.len() == layers => letters.truncate(kept),
            Value::Object(fields) if name == "linear_attn_config" => {
                let lists = fields.values_mut().filter_map(Value::as_array_mut);
                lists.for_each(|list| list.retain(|number| within(number, kept + 1)));
            }
            _ => {}
        }
    }
}

fn of_presets(folder: &Path) -> Vec<TargetCase> {
    let case = |(number, preset): (usize, &presets::Preset)| {
        let config = preset.model_config();
        let mut raw = config.raw;
        shorten(&mut raw);
        let directory = folder.join(preset.name);
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("config.json"), serde_json::to_vec(&raw).unwrap()).unwrap();
        let mut case = TargetCase::of(preset.name, &directory, FORMATS[number % FORMATS.len()]);
        case.options.request.random_weights = Some(0);
        if let Some(head) = config.architecture.pooling_head() {
            case.options.request.pooling = Some(head.pooling);
            case.texts = true;
        }
        case
    };
    presets::all_presets().enumerate().map(case).collect()
}

fn of_families() -> Vec<TargetCase> {
    let goldens = crate::cases::workspace().join("tests/goldens");
    let folders = std::fs::read_dir(goldens).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = folders.filter(|f| f.join("config.json").is_file()).collect();
    folders.sort();
    let case = |(number, directory): (usize, &PathBuf)| {
        let name = directory.file_name().unwrap().to_str().unwrap();
        let texts = ["embed-", "rerank-"].iter().any(|begin| name.starts_with(begin));
        TargetCase { texts, ..TargetCase::of(name, directory, FORMATS[number % FORMATS.len()]) }
    };
    folders.iter().enumerate().map(case).collect()
}

/// Targets with several levels, and those with one that differ in what generators know of them.
fn targets() -> (Vec<CompileTarget>, Vec<CompileTarget>) {
    let all = mlcc_target::names().unwrap();
    let all = all.iter().map(|name| mlcc_target::resolve_target(name).unwrap());
    let (mixed, single): (Vec<CompileTarget>, Vec<CompileTarget>) =
        all.partition(|target| target.levels.len() > 1);
    let mut seen: Vec<KernelTarget> = Vec::new();
    let mut is_new = |target: &CompileTarget| {
        let known = KernelTarget::new(target.arch, &target.levels[0]);
        let new = !seen.contains(&known);
        if new {
            seen.push(known);
        }
        new
    };
    (mixed, single.into_iter().filter(|target| is_new(target)).collect())
}

/// All pairs on all cores.
fn errors(pairs: &[(&TargetCase, &CompileTarget)]) -> Vec<String> {
    let (next, errors) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((case, target)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(error) = case.error(target) {
                let error = format!("{}, {}: {error}", case.name, target.name);
                println!("{error}");
                errors.lock().unwrap().push(error);
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    let mut errors = errors.into_inner().unwrap();
    errors.sort();
    errors
}

/// The number of cases that share the targets that take turns.
const TURNS: usize = 8;

#[test]
fn every_model_is_planned_for_every_target() {
    let folder = tempfile::tempdir().unwrap();
    let (families, presets) = (of_families(), of_presets(folder.path()));
    let (mixed, single) = targets();
    let mut pairs = Vec::new();
    for (number, case) in families.iter().chain(&presets).enumerate() {
        // All in every pair would take minutes more. Presets add only sizes to the cases of families, by
        // which GPU kernels are chosen; a level alone has the same code as with others but for packings.
        let whole = |target: &CompileTarget| number < families.len() || target.arch == Arch::Nvptx;
        let turn = |at: usize| at % TURNS == number % TURNS;
        let of_mixed = mixed.iter().enumerate().filter(|(at, target)| whole(target) || turn(*at));
        let of_single = single.iter().enumerate().filter(|(at, _)| turn(*at));
        pairs.extend(of_mixed.chain(of_single).map(|(_, target)| (case, target)));
    }
    let errors = errors(&pairs);
    assert!(errors.is_empty(), "{} of {}:\n{}", errors.len(), pairs.len(), errors.join("\n"));
}
