//! The runtime on a toy artifact: results at any number of workers, chunks, states, and every refusal.

use std::process::Command;

use crate::toy::{self, VOCAB, reference};
use mlcc_codegen::artifact::WeightDestination;
use mlcc_runtime::{Error, LoadOptions, Model, NumaPolicy, Session, WorkerThreads};

fn options(threads: usize) -> LoadOptions {
    LoadOptions { threads: Some(threads), verify_hashes: true, ..LoadOptions::default() }
}

/// The toy of these flags, loaded.
fn load(flags: &[&str], threads: usize) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    let path = toy::artifact(folder.path(), flags);
    let model = Model::load(path, &options(threads)).unwrap();
    (folder, model)
}

const TOKENS: [i32; 8] = [3, 1, 4, 1, 0, 2, 2, 4];

fn check_session(session: &mut Session) {
    let expected = reference(&TOKENS);
    for (i, &token) in TOKENS.iter().enumerate() {
        assert_eq!(session.decode(token).unwrap(), expected[i], "position {i}");
    }
    assert_eq!(session.past(), TOKENS.len() as u64);
    session.reset().unwrap();
    assert_eq!(session.prefill(&TOKENS[..7]).unwrap(), expected[6], "prefill in chunks");
    assert_eq!(session.decode(TOKENS[7]).unwrap(), expected[7]);
    session.reset().unwrap();
    assert_eq!(session.prefill_logits(&TOKENS[..5]).unwrap(), expected[..5].concat());
    assert_eq!(session.logits(), expected[4], "the last row stays");
    assert_eq!(session.prefill_logits(&TOKENS[5..]).unwrap(), expected[5..].concat());
}

#[test]
fn every_number_of_workers_gives_the_same() {
    if !toy::can_compile() {
        return;
    }
    for threads in [1, 2, 3, 7, 40, 128] {
        let (_folder, model) = load(&[], threads);
        assert_eq!((model.threads(), model.vocab(), model.executor()), (threads, VOCAB, "best"));
        check_session(&mut model.session().unwrap());
    }
}

#[test]
fn the_number_of_workers_may_change_from_step_to_step() {
    if !toy::can_compile() {
        return;
    }
    let (_folder, model) = load(&[], 7);
    let (expected, mut session) = (reference(&TOKENS), model.session().unwrap());
    for round in 0..7 {
        session.reset().unwrap();
        for (i, &token) in TOKENS.iter().enumerate() {
            // Out of bounds means the next possible number, none that the pool chooses.
            let workers = (5 * i + 3 * round) % 10;
            model.fix_workers((i % 5 != 4).then_some(workers));
            assert_eq!(session.decode(token).unwrap(), expected[i], "token {i} by {workers} workers");
        }
    }
}

#[test]
fn missing_entry_points_are_replaced() {
    if !toy::can_compile() {
        return;
    }
    let (_folder, model) = load(&["-DTOY_MINIMAL"], 2);
    let mut session = model.session().unwrap();
    check_session(&mut session);
    assert!(matches!(
        session.softmax(1.0),
        Err(Error::MissingEntry { entry: "softmax_with_temperature", .. })
    ));
}

#[test]
fn forks_and_saved_states_continue() {
    if !toy::can_compile() {
        return;
    }
    let (folder, model) = load(&[], 2);
    let expected = reference(&TOKENS);
    let mut session = model.session().unwrap();
    session.prefill(&TOKENS[..4]).unwrap();
    let mut twin = session.fork().unwrap();
    assert_eq!(twin.logits(), expected[3]);
    let file = folder.path().join("toy.state");
    session.save_state(&file).unwrap();
    session.prefill(&[0, 0]).unwrap();
    assert_eq!(twin.decode(TOKENS[4]).unwrap(), expected[4]);
    session.load_state(&file).unwrap();
    assert_eq!((session.past(), session.decode(TOKENS[4]).unwrap()), (4, &expected[4][..]));
    assert_eq!(session.state("h").unwrap().unwrap().len(), 32);
    assert!(session.state("none").unwrap().is_none());

    // A state of another model is refused and changes nothing.
    let other = tempfile::tempdir().unwrap();
    let linked = toy::linked(other.path(), &[]);
    let path = other.path().join("other.so");
    let mut writer =
        mlcc_codegen::artifact::ArtifactWriter::create(&path, &linked, WeightDestination::Inside).unwrap();
    writer.write_section(mlcc_abi::section::WEIGHTS, &[0; VOCAB * toy::WIDTH * 4]).unwrap();
    writer.finish().unwrap();
    let foreign = Model::load(path, &options(1)).unwrap();
    let mut foreign = foreign.session().unwrap();
    foreign.decode(1).unwrap();
    assert!(foreign.load_state(&file).is_err_and(|e| e.to_string().contains("another model")));
    assert_eq!(foreign.past(), 1);
}

#[test]
fn softmax_runs_in_the_model() {
    if !toy::can_compile() {
        return;
    }
    let (_folder, model) = load(&[], 2);
    let mut session = model.session().unwrap();
    let logits = session.decode(1).unwrap().to_vec();
    let sum: f32 = logits.iter().map(|x| x / 2.0).sum();
    let expected: Vec<f32> = logits.iter().map(|x| x / 2.0 / sum).collect();
    assert_eq!(session.softmax(2.0).unwrap(), expected);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(session.softmax(bad), Err(Error::Temperature(_))));
    }
}

#[test]
fn taken_logits_stay_while_the_session_goes_on() {
    if !toy::can_compile() {
        return;
    }
    let (_folder, model) = load(&[], 2);
    let mut expected = model.session().unwrap();
    let expected: Vec<Vec<f32>> = (0..4).map(|token| expected.decode(token).unwrap().to_vec()).collect();
    let mut session = model.session().unwrap();
    let mut taken = Vec::new();
    for token in 0..3 {
        session.decode(token).unwrap();
        taken.push(session.take_logits(None).unwrap());
    }
    assert!(taken.iter().zip(&expected).all(|(taken, expected)| **taken == *expected));
    // Memory without readers is written to again.
    let spare = taken.remove(0);
    let place = spare.as_ptr();
    session.decode(3).unwrap();
    let fourth = session.take_logits(Some(spare)).unwrap();
    assert_eq!(*fourth, *expected[3]);
    session.decode(0).unwrap();
    assert_eq!(session.logits().as_ptr(), place);
    assert!(taken.iter().zip(&expected[1..]).all(|(taken, expected)| **taken == *expected));
    assert_eq!(*fourth, *expected[3]);
}

#[test]
fn bad_tokens_are_refused_before_the_call() {
    if !toy::can_compile() {
        return;
    }
    let (_folder, model) = load(&["-DTOY_CONTEXT=6"], 2);
    let mut session = model.session().unwrap();
    assert!(matches!(session.prefill(&[]), Err(Error::NoTokens)));
    assert!(matches!(session.decode(-1), Err(Error::Token { token: -1, position: 0, vocab: 5 })));
    assert!(matches!(session.prefill(&[0, 1, 5]), Err(Error::Token { token: 5, position: 2, .. })));
    assert!(matches!(session.prefill(&[0; 7]), Err(Error::ContextFull { past: 0, n: 7, context: 6 })));
    session.prefill(&[0; 6]).unwrap();
    assert!(matches!(session.decode(0), Err(Error::ContextFull { past: 6, n: 1, context: 6 })));
    assert_eq!(session.past(), 6);
    session.reset().unwrap();
    assert_eq!(session.decode(2).unwrap(), reference(&[2])[0]);
}

#[test]
fn sessions_on_several_threads_share_the_pool() {
    if !toy::can_compile() {
        return;
    }
    let (_folder, model) = load(&[], 3);
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| (0..20).for_each(|_| check_session(&mut model.session().unwrap())));
        }
    });
}

/// Two models with one pool, each from threads of its own, and where the workers run: results are those of a
/// model alone.
#[test]
fn models_share_workers() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = toy::artifact(folder.path(), &[]);
    for (pin, numa) in [
        (false, NumaPolicy::Off),
        (true, NumaPolicy::Off),
        (false, NumaPolicy::Local),
        (true, NumaPolicy::Interleave),
    ] {
        let first = Model::load(&path, &LoadOptions { pin, numa, ..options(3) }).unwrap();
        let workers = first.workers().unwrap();
        let second = Model::load(&path, &LoadOptions { workers: first.workers(), ..options(9) }).unwrap();
        assert_eq!((second.threads(), second.workers()), (3, Some(workers)), "those that are there");
        std::thread::scope(|scope| {
            for model in [&first, &second, &second] {
                scope.spawn(|| (0..5).for_each(|_| check_session(&mut model.session().unwrap())));
            }
        });
        assert_eq!(first.placement(), None, "a toy stays where the file's pages are");
        drop(first);
        check_session(&mut second.session().unwrap());
    }
    assert_ne!(WorkerThreads::new(&options(2)).unwrap(), WorkerThreads::new(&options(2)).unwrap());
}

#[test]
fn variants_are_chosen_by_features_and_level() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = toy::artifact(folder.path(), &["-DTOY_FEATURES=(1ULL<<62)"]);
    let level = |l: &str| Model::load(&path, &LoadOptions { cpu_level: Some(l.into()), ..options(1) });
    assert_eq!(Model::load(&path, &options(1)).unwrap().executor(), "baseline");
    assert_eq!(level("baseline").unwrap().executor(), "baseline");
    assert_eq!(level("x86-64-v2").unwrap().executor(), "baseline");
    assert!(matches!(level("best"), Err(Error::Features { .. })));
    let unknown = level("turbo").err().unwrap().to_string();
    assert!(unknown.contains("best, baseline") && unknown.contains("x86-64-v3"), "{unknown}");

    let folder = tempfile::tempdir().unwrap();
    let only = toy::artifact(folder.path(), &["-DTOY_FEATURES=(1ULL<<24)", "-DTOY_ONLY_BEST"]);
    let refused = Model::load(&only, &options(1)).err().unwrap().to_string();
    assert!(refused.contains("best needs amx-int8"), "{refused}");
    let level = Model::load(&only, &LoadOptions { cpu_level: Some("x86-64-v2".into()), ..options(1) });
    assert!(matches!(level, Err(Error::NoVariantForLevel { .. })));
}

/// The part of `the_variable_forces_a_level` that runs in a process with the variable; no test by itself.
#[test]
fn child_that_prints_the_variant() {
    if let Ok(path) = std::env::var("MLCC_TEST_TOY") {
        match Model::load(path, &options(1)) {
            Ok(model) => println!("variant={}", model.executor()),
            Err(e) => println!("error={e}"),
        }
    }
}

#[test]
fn the_variable_forces_a_level() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = toy::artifact(folder.path(), &[]);
    let run = |level: &str| {
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "runtime::child_that_prints_the_variant", "--nocapture"])
            .env("MLCC_TEST_TOY", &path)
            .env("MLCC_CPU_LEVEL", level)
            .output()
            .unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    assert!(run("").contains("variant=best"));
    assert!(run("baseline").contains("variant=baseline"));
    assert!(run("nonsense").contains("MLCC_CPU_LEVEL"));
}

#[test]
fn a_rebuilt_artifact_of_the_same_name_is_new() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = toy::artifact(folder.path(), &[]);
    let old = Model::load(&path, &options(1)).unwrap();
    toy::artifact(folder.path(), &["-DTOY_BIAS=100"]);
    let new = Model::load(&path, &options(1)).unwrap();
    let expected = reference(&[1])[0].clone();
    assert_eq!(old.session().unwrap().decode(1).unwrap(), expected);
    let biased: Vec<f32> = expected.iter().map(|x| x + 100.0).collect();
    assert_eq!(new.session().unwrap().decode(1).unwrap(), biased);
}

/// The loader knows a library by all names it was opened by, and descriptors' numbers come back.
#[test]
fn a_model_loaded_twice_does_not_answer_for_another() {
    if !toy::can_compile() {
        return;
    }
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let one = toy::artifact(folders[0].path(), &[]);
    let other = toy::artifact(folders[1].path(), &["-DTOY_BIAS=100"]);
    let kept = Model::load(&one, &options(1)).unwrap();
    drop(Model::load(&one, &options(1)).unwrap());
    let second = Model::load(&other, &options(1)).unwrap();
    let expected = reference(&[1])[0].clone();
    assert_eq!(kept.session().unwrap().decode(1).unwrap(), expected);
    let biased: Vec<f32> = expected.iter().map(|x| x + 100.0).collect();
    assert_eq!(second.session().unwrap().decode(1).unwrap(), biased);
}

/// The loader knows a library by its descriptor's number, which is free for others once a model is dropped.
#[test]
fn models_loaded_and_dropped_side_by_side_stay_apart() {
    if !toy::can_compile() {
        return;
    }
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let paths = [
        toy::artifact(folders[0].path(), &["-DTOY_FEATURES=0", "-DTOY_ONLY_BEST"]),
        toy::artifact(folders[1].path(), &["-DTOY_FEATURES=0"]),
    ];
    let variants = |path: &std::path::Path| Model::load(path, &options(1)).unwrap().table().variants.len();
    let expected = [variants(&paths[0]), variants(&paths[1])];
    assert_ne!(expected[0], expected[1], "the two artifacts can be told apart");
    std::thread::scope(|scope| {
        for (path, expected) in paths.iter().zip(expected) {
            scope.spawn(move || {
                for round in 0..300 {
                    assert_eq!(variants(path), expected, "round {round}");
                }
            });
        }
    });
}
