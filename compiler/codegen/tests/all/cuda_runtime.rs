//! The runtime's CUDA device against a fake driver (`toy/fake_cuda.c`): order of calls, arguments, graph,
//! life of every handle. It replaces a GPU in CI; `tests/gpu` runs the same code on a real one.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::toy::{self, reference};
use mlcc_codegen::artifact::WeightDestination;
use mlcc_runtime::{LoadOptions, Model};

const TOKENS: [i32; 8] = [3, 1, 4, 1, 0, 2, 2, 4];

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all/toy").join(name)
}

/// A toy artifact for CUDA and the fake driver.
fn build(folder: &Path, flags: &[&str]) -> (PathBuf, PathBuf) {
    build_from("toy_cuda.c", folder, flags)
}

fn build_from(file: &str, folder: &Path, flags: &[&str]) -> (PathBuf, PathBuf) {
    let (linked, driver, out) =
        (folder.join("linked.so"), folder.join("libfake.so.1"), folder.join("toy.so"));
    toy::cc(&source("fake_cuda.c"), &driver, flags);
    let mut all = vec!["-nostdlib", "-fvisibility=hidden", "-Wl,--build-id=none"];
    all.extend(flags);
    toy::cc(&source(file), &linked, &all);
    toy::pack(&linked, &out, WeightDestination::Inside);
    (out, driver)
}

/// Runs the test `name` of this file in a process of its own, because the driver is named by the environment.
fn in_child(name: &str, artifact: &Path, driver: &Path) {
    in_child_with(name, artifact, driver, &[]);
}

fn in_child_with(name: &str, artifact: &Path, driver: &Path, variables: &[(&str, &str)]) {
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("cuda_runtime::{name}"), "--nocapture"])
        .env("MLCC_TEST_TOY", artifact)
        .env("MLCC_CUDA_DRIVER", driver)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("child ran"), "{text}");
}

/// The artifact, in a child; `None` in the plain test run.
fn child() -> Option<PathBuf> {
    let path = std::env::var_os("MLCC_TEST_TOY").map(PathBuf::from)?;
    println!("child ran");
    Some(path)
}

struct LaunchCounters(libloading::Library);

impl LaunchCounters {
    fn open() -> Self {
        let driver = std::env::var("MLCC_CUDA_DRIVER").unwrap();
        // SAFETY: the fake driver has no initialisers.
        Self(unsafe { libloading::Library::new(driver) }.unwrap())
    }

    fn get(&self, name: &str) -> i32 {
        // SAFETY: the counters of the fake driver are ints, and this process has one thread that uses it.
        unsafe { **self.0.get::<*const i32>(name).unwrap() }
    }

    fn set(&self, name: &str, value: i32) {
        // SAFETY: as above; the fake driver reads them only within calls.
        unsafe { **self.0.get::<*mut i32>(name).unwrap() = value }
    }
}

fn without_position(rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    rows.into_iter().enumerate().map(|(i, row)| row.into_iter().map(|x| x - i as f32).collect()).collect()
}

fn run(expected: &[Vec<f32>]) {
    let Some(path) = child() else { return };
    let counters = LaunchCounters::open();
    {
        let model = Model::load(path, &LoadOptions::default()).unwrap();
        assert_eq!((model.executor(), model.threads()), ("Fake GPU", 1));
        let mut session = model.session().unwrap();
        let zeros = [0.0; toy::VOCAB];
        assert_eq!(session.logits(), zeros);
        assert_eq!(session.softmax(2.0).unwrap(), zeros);
        for (i, (token, row)) in TOKENS.iter().zip(expected).enumerate() {
            let copies = counters.get("fake_copies");
            assert_eq!(session.decode(*token).unwrap(), row);
            assert_eq!(counters.get("fake_copies"), copies + 1, "a token is one copy");
            // The first one loads the kernels, which a driver cannot do while it records.
            let graphs = (counters.get("fake_recordings"), counters.get("fake_graph_launches"));
            assert_eq!(graphs, (i.min(1) as i32, i as i32));
        }
        // The logits that `softmax` was given above come from the session's own memory; weights went through
        // pinned memory.
        assert_eq!(counters.get("fake_copies"), counters.get("fake_pinned_copies") + 1);
        assert_eq!(session.performance_warning(), None);
        session.reset().unwrap();
        assert_eq!(session.prefill(&TOKENS[..5]).unwrap(), expected[4]);
        let mut twin = session.fork().unwrap();
        let file = model.artifact().path().with_file_name("s.state");
        session.save_state(&file).unwrap();
        session.prefill(&[1, 1]).unwrap();
        session.load_state(&file).unwrap();
        assert_eq!(session.decode(TOKENS[5]).unwrap(), expected[5]);
        assert_eq!(twin.prefill_logits(&TOKENS[5..]).unwrap(), expected[5..].concat());
        assert_eq!(twin.logits(), expected[7]);
        let halves: Vec<f32> = expected[7].iter().map(|x| x / 2.0).collect();
        assert_eq!(twin.softmax(2.0).unwrap(), halves);
        assert_eq!(counters.get("fake_shared_bytes"), 50000);
        let live = counters.get("fake_live");
        assert!(model.copy_bandwidth().unwrap() > Some(1e6));
        assert_eq!(counters.get("fake_live"), live, "the buffers are given back");
    }
    assert_eq!(counters.get("fake_live"), 0, "a handle is still alive");
}

/// Logits of the cached toy after the last of `tokens`.
fn cached(tokens: &[i32]) -> Vec<f32> {
    windowed(tokens, tokens.len())
}

/// The same where only the `window` newest tokens count.
fn windowed(tokens: &[i32], window: usize) -> Vec<f32> {
    let e = toy::embedding();
    let row = |t: usize| &e[t * toy::WIDTH..(t + 1) * toy::WIDTH];
    let dot = |a: usize, b: usize| row(a).iter().zip(row(b)).map(|(a, b)| a * b).sum::<f32>();
    let logit = |v: usize| {
        let seen = tokens.iter().enumerate().skip(tokens.len().saturating_sub(window));
        seen.map(|(p, &t)| (1 + p % 3) as f32 * dot(t as usize, v)).sum()
    };
    (0..toy::VOCAB).map(logit).collect()
}

#[test]
fn child_with_caches() {
    let Some(path) = child() else { return };
    let counters = LaunchCounters::open();
    let whole = std::env::var_os("FAKE_NO_MAPPING").is_some();
    {
        let model = Model::load(path, &LoadOptions::default()).unwrap();
        let mut session = model.session().unwrap();
        assert_eq!(counters.get("fake_mapped"), 0, "no row, no memory");
        assert_eq!(session.prefill(&TOKENS).unwrap(), cached(&TOKENS));
        // Pages of 64 rows of 64 bytes, in granules of 64 KiB.
        let granules = |n: i32| if whole { 0 } else { n };
        let all = model.cache_pages().all;
        let used = || all - model.cache_pages().free;
        assert_eq!(counters.get("fake_mapped"), granules(1));
        let tokens: Vec<i32> = (0..1500).map(|i| i % 5).collect();
        session.truncate(4).unwrap();
        assert_eq!(session.prefill(&tokens[..3]).unwrap(), cached(&[3, 1, 4, 1, 0, 1, 2]));
        session.reset().unwrap();
        assert_eq!(session.prefill(&tokens).unwrap(), cached(&tokens));
        assert_eq!(counters.get("fake_mapped"), granules(2));
        let planned = 64 + 100_000_u64.div_ceil(64) * 4096;
        let memory = (session.memory().state, session.memory().planned_state);
        assert_eq!((memory, used()), ((64 + 24 * 4096, planned), 24));
        let mut twin = session.fork().unwrap();
        assert_eq!((twin.logits(), used()), (&cached(&tokens)[..], 24));
        let file = model.artifact().path().with_file_name("s.state");
        session.save_state(&file).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 64 + 1500 * 64);
        let longer = [&tokens[..], &[2]].concat();
        assert_eq!(twin.decode(2).unwrap(), cached(&longer));
        assert_eq!(used(), 25, "the last page is a copy");
        session.reset().unwrap();
        assert_eq!((used(), counters.get("fake_mapped")), (24, granules(2)), "the twin has the others");
        session.load_state(&file).unwrap();
        assert_eq!((used(), counters.get("fake_mapped")), (48, granules(3)));
        assert_eq!(session.decode(2).unwrap(), cached(&longer));
        // A GPU that is full after the first of two granules: what the session could get goes back.
        if !whole {
            let mut late = model.session().unwrap();
            let before = counters.get("fake_mapped");
            counters.set("fake_most_mapped", before + 1);
            let error = late.load_state(&file).unwrap_err().to_string();
            assert!(
                error.contains("out of memory") && error.contains("pages of the KV cache on the GPU"),
                "{error}"
            );
            assert_eq!(counters.get("fake_mapped"), before);
            counters.set("fake_most_mapped", i32::MAX);
            late.load_state(&file).unwrap();
            assert_eq!(late.decode(2).unwrap(), cached(&longer));
        }
    }
    assert_eq!((counters.get("fake_live"), counters.get("fake_mapped")), (0, 0));
}

#[test]
fn cache_rows_get_memory_as_they_are_written() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build_from("cached_cuda.c", folder.path(), &[]);
        in_child("child_with_caches", &artifact, &driver);
    }
}

#[test]
fn child_with_failures() {
    let Some(path) = child() else { return };
    let counters = LaunchCounters::open();
    let model = Model::load(path, &LoadOptions::default()).unwrap();
    // 18 pages of 4 MiB, in granules of 64 KiB; without any sequence 64 MiB are kept.
    let tokens: Vec<i32> = (0..1100).map(|i| i % 5).collect();
    let mapped = || (counters.get("fake_mapped"), counters.get("fake_wrong_unmaps"));
    {
        let mut session = model.session().unwrap();
        session.prefill(&tokens).unwrap();
        assert_eq!(mapped(), (18 * 64, 0));
        // The token is on its way to the device when the launch fails: pages may go to others only when it is
        // there.
        counters.set("fake_good_launches", 0);
        session.decode(1).unwrap_err();
        assert_eq!(counters.get("fake_running"), 0);
        session.reset().unwrap();
        assert_eq!(mapped(), (1024, 0));
        counters.set("fake_good_launches", i32::MAX);
        assert_eq!(session.prefill(&TOKENS).unwrap(), cached(&TOKENS));
    }
    assert_eq!(mapped(), (1024, 0));
    let mut session = model.session().unwrap();
    session.prefill(&tokens).unwrap();
    counters.set("fake_lost", 1);
    session.decode(1).unwrap_err();
    session.reset().unwrap_err();
    drop(session);
    drop(model);
    assert_eq!(mapped(), (18 * 64, 0), "what may be running keeps its memory");
}

#[test]
fn memory_is_given_back_only_when_nothing_runs_on_it() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let flags = ["-DTOY_ROW_BYTES=65536", "-DTOY_CONTEXT=1200"];
        let (artifact, driver) = build_from("cached_cuda.c", folder.path(), &flags);
        in_child("child_with_failures", &artifact, &driver);
    }
}

#[test]
fn child_with_window() {
    let Some(path) = child() else { return };
    {
        let model = Model::load(path, &LoadOptions::default()).unwrap();
        let mut session = model.session().unwrap();
        let tokens: Vec<i32> = (0..50).map(|i| (i * i + i / 7) % 5).collect();
        for (i, &token) in tokens.iter().enumerate() {
            assert_eq!(session.decode(token).unwrap(), windowed(&tokens[..=i], 6), "position {i}");
        }
        assert_eq!(LaunchCounters::open().get("fake_graph_launches"), 49);
        session.reset().unwrap();
        assert_eq!(session.prefill(&tokens[..30]).unwrap(), windowed(&tokens[..30], 6));
        let file = model.artifact().path().with_file_name("w.state");
        session.save_state(&file).unwrap();
        session.reset().unwrap();
        session.load_state(&file).unwrap();
        assert_eq!(
            (session.past(), session.prefill(&tokens[30..]).unwrap()),
            (30, &windowed(&tokens, 6)[..])
        );
    }
    assert_eq!(LaunchCounters::open().get("fake_live"), 0);
}

#[test]
fn windows_go_on_beyond_the_context() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let flags = ["-DTOY_CONTEXT=9", "-DTOY_WINDOW=6"];
        let (artifact, driver) = build_from("cached_cuda.c", folder.path(), &flags);
        in_child("child_with_window", &artifact, &driver);
    }
}

#[test]
fn devices_without_mapping_get_all_memory_at_once() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build_from("cached_cuda.c", folder.path(), &[]);
        in_child_with("child_with_caches", &artifact, &driver, &[("FAKE_NO_MAPPING", "1")]);
    }
}

#[test]
fn child_with_graph() {
    run(&without_position(reference(&TOKENS)));
}

#[test]
fn child_with_past_in_the_graph() {
    run(&reference(&TOKENS));
}

#[test]
fn child_with_growing_grids() {
    let Some(path) = child() else { return };
    let counters = LaunchCounters::open();
    {
        let model = Model::load(path, &LoadOptions::default()).unwrap();
        let tokens: Vec<i32> = (0..1100).map(|i| (i * i + i / 7) % 5).collect();
        let mut session = model.session().unwrap();
        for (i, &token) in tokens.iter().enumerate() {
            let logits = session.decode(token).unwrap();
            assert!(!i.is_multiple_of(50) || logits == cached(&tokens[..=i]), "position {i}");
        }
        // Up to 256, 512, 1024 and 2048 rows.
        assert_eq!((counters.get("fake_recordings"), counters.get("fake_graph_launches")), (4, 1099));
        session.truncate(400).unwrap();
        session.decode(tokens[400]).unwrap();
        assert_eq!((counters.get("fake_recordings"), counters.get("fake_graph_launches")), (4, 1100));
        // Other sessions have graphs of their own, but their kernels are loaded.
        let mut twin = session.fork().unwrap();
        assert_eq!(twin.decode(3).unwrap(), cached(&[&tokens[..401], &[3]].concat()));
        assert_eq!((counters.get("fake_recordings"), counters.get("fake_graph_launches")), (5, 1101));
    }
    assert_eq!((counters.get("fake_live"), counters.get("fake_mapped")), (0, 0));
}

#[test]
fn child_with_refused_graphs() {
    let Some(path) = child() else { return };
    let counters = LaunchCounters::open();
    {
        let model = Model::load(path, &LoadOptions::default()).unwrap();
        let mut session = model.session().unwrap();
        let mut tokens = Vec::new();
        let mut decode = |session: &mut mlcc_runtime::Session, count: i32| {
            for _ in 0..count {
                tokens.push(tokens.len() as i32 * 3 % 5);
                assert_eq!(session.decode(*tokens.last().unwrap()).unwrap(), cached(&tokens));
            }
            (counters.get("fake_recordings"), counters.get("fake_graph_launches"))
        };
        // Two refusals are no reason to give up.
        counters.set("fake_refusals", 2);
        assert_eq!(decode(&mut session, 1 + 2), (0, 0));
        assert_eq!(decode(&mut session, 4), (1, 4));
        assert_eq!((session.performance_warning(), counters.get("fake_refusals")), (None, 0));
        // A session that is refused for ever says so, decodes on, and leaves the driver alone.
        let mut other = session.fork().unwrap();
        counters.set("fake_refusals", 100);
        assert_eq!(decode(&mut other, 2), (1, 4));
        assert_eq!(other.performance_warning(), None);
        assert_eq!(decode(&mut other, 5), (1, 4));
        assert_eq!(counters.get("fake_refusals"), 97);
        let notice = other.performance_warning().unwrap();
        assert!(notice.contains("refused 3 times to record them as a CUDA graph"), "{notice}");
        assert!(notice.contains("cuStreamEndCapture: CUDA_ERROR_FAKE"), "{notice}");
        assert_eq!(session.performance_warning(), None);
    }
    assert_eq!((counters.get("fake_live"), counters.get("fake_mapped")), (0, 0));
}

#[test]
fn child_refused() {
    let Some(path) = child() else { return };
    let expected = std::env::var("MLCC_CUDA_DRIVER").unwrap();
    let error = Model::load(&path, &LoadOptions::default()).err().unwrap().to_string();
    if expected.ends_with("none/libcuda.so.1") {
        assert!(error.contains("libcuda.so.1 cannot be loaded"), "{error}");
        assert!(error.contains("--target cpu"), "{error}");
    } else {
        assert!(error.contains("sm_86") && error.contains("ptx for sm_90"), "{error}");
        let second = LoadOptions { device: Some(1), ..LoadOptions::default() };
        let error = Model::load(&path, &second).err().unwrap().to_string();
        assert!(error.contains("there are 1 NVIDIA GPUs and number 1"), "{error}");
    }
}

#[test]
fn child_with_unknown_argument() {
    let Some(path) = child() else { return };
    let error = Model::load(&path, &LoadOptions::default()).err().unwrap().to_string();
    assert!(error.contains("kernel toy_softmax has an argument of unknown kind 12"), "{error}");
}

#[test]
fn arguments_of_unknown_kinds_are_refused_when_a_model_is_loaded() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build(folder.path(), &["-DTOY_PROBS=12"]);
        in_child("child_with_unknown_argument", &artifact, &driver);
    }
}

#[test]
fn decode_runs_as_a_graph() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build(folder.path(), &[]);
        in_child("child_with_graph", &artifact, &driver);
    }
}

#[test]
fn decode_that_depends_on_past_runs_as_the_same_graph() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build(folder.path(), &["-DTOY_PAST"]);
        in_child("child_with_past_in_the_graph", &artifact, &driver);
    }
}

#[test]
fn grids_that_grow_have_a_graph_for_each_power_of_two() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build_from("cached_cuda.c", folder.path(), &["-DTOY_GROWING"]);
        in_child("child_with_growing_grids", &artifact, &driver);
    }
}

#[test]
fn a_driver_that_refuses_graphs_is_asked_again_and_then_reported() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build_from("cached_cuda.c", folder.path(), &[]);
        in_child("child_with_refused_graphs", &artifact, &driver);
    }
}

#[test]
fn missing_driver_and_unfit_gpu_are_named() {
    if toy::can_compile() {
        let folder = tempfile::tempdir().unwrap();
        let (artifact, driver) = build(folder.path(), &["-DTOY_SM=90"]);
        in_child("child_refused", &artifact, &folder.path().join("none/libcuda.so.1"));
        in_child("child_refused", &artifact, &driver);
    }
}
