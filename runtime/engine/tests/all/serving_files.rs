//! States of texts in files: after the engine, and while it runs.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mlcc_engine::serving::{DiskCacheOptions, Engine, EngineExtras, EngineOptions, EngineRequest};

use crate::serving::{alone, read, request, tokenizer};
use crate::toy::ToyModel;

const HOUR: Duration = Duration::from_secs(3600);

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// An engine whose states outlive it.
fn with_files(toy: &ToyModel, folder: &Path) -> Engine {
    saving_after(HOUR, (2, 8), toy, folder)
}

/// An engine with some slots and additional states, which writes states that were not used for a while.
fn saving_after(rest: Duration, (sequences, kept): (usize, usize), toy: &ToyModel, folder: &Path) -> Engine {
    let warn = |what: &str| WARNINGS.lock().unwrap().push(what.to_owned());
    let files = DiskCacheOptions { folder: folder.to_path_buf(), max_bytes: 1 << 20, idle_time: rest, warn };
    let extras = EngineExtras { disk_cache: Some(files), ..EngineExtras::default() };
    let options = EngineOptions {
        max_sequences: sequences,
        max_queue: 16,
        prefix_cache_size: kept,
        ..EngineOptions::default()
    };
    Engine::start_with(toy.clone(), Arc::new(tokenizer()), options, extras).unwrap()
}

#[test]
fn states_outlive_the_engine_in_files() {
    for recurrent in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let toy = ToyModel::new(recurrent, None);
        let prompt = "abcdefghij".repeat(8);
        let first = request(&prompt, 3, 20);
        let ask = |engine: &Engine, text: &EngineRequest| {
            let (found, finished) = read(engine.launch(text.clone()).unwrap());
            assert_eq!(found, alone(&toy, text).0);
            finished.cached_tokens
        };
        let engine = with_files(&toy, folder.path());
        assert_eq!(ask(&engine, &first), 0);
        drop(engine);
        // The same prompt, one that goes on from it, and one that leaves it half way.
        let longer = request(&format!("{prompt}cab"), 4, 20);
        let other = request(&format!("{}gag", &prompt[..50]), 5, 20);
        let engine = with_files(&toy, folder.path());
        let before = toy.read.load(Ordering::Relaxed);
        let whole = ask(&engine, &first);
        assert!(whole >= prompt.len() - 2, "{whole} of {}", prompt.len());
        let read = toy.read.load(Ordering::Relaxed) - before;
        assert!(read < 40, "{read} tokens were read");
        drop(engine);
        let engine = with_files(&toy, folder.path());
        assert!(ask(&engine, &longer) >= prompt.len());
        drop(engine);
        let engine = with_files(&toy, folder.path());
        assert_eq!(ask(&engine, &other), if recurrent { 0 } else { 50 });
        let no_reuse = EngineRequest { use_prefix_cache: false, ..first.clone() };
        assert_eq!(ask(&engine, &no_reuse), 0);
        drop(engine);
        // Broken and missing files of states are reported, and the prompt is read.
        let states = || {
            let all = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
            all.filter(|path| path.extension().is_some_and(|end| end == "state")).collect::<Vec<_>>()
        };
        assert!(!states().is_empty());
        for state in states() {
            std::fs::write(state, b"short").unwrap();
        }
        let engine = with_files(&toy, folder.path());
        assert_eq!(ask(&engine, &first), 0);
        let of_folder = |what: &&String| what.contains(&*folder.path().to_string_lossy());
        let told = WARNINGS.lock().unwrap().iter().filter(of_folder).count();
        assert!(told > 0);
        drop(engine);
        let engine = with_files(&toy, folder.path());
        states().iter().for_each(|state| std::fs::remove_file(state).unwrap());
        assert_eq!(ask(&engine, &first), 0);
        drop(engine);
        assert_eq!(toy.used(), 0);
    }
}

/// Waits until the folder has this many states, which are found by their prefixes.
fn wait_for_states(folder: &Path, count: usize) {
    let is_prefix = |path: &Path| path.extension().is_some_and(|end| end == "prefix");
    for _ in 0..6000 {
        let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        if all.filter(|path| is_prefix(path)).count() == count {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("there are no {count} states in the folder");
}

/// The files that another process would find if this one were killed.
#[test]
fn states_that_rest_are_in_files_while_the_engine_runs() {
    for recurrent in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let toy = ToyModel::new(recurrent, None);
        let prompts = ["abcdefghij".repeat(8), "jihgfedcba".repeat(8)];
        let engine = saving_after(Duration::ZERO, (2, 8), &toy, folder.path());
        for (at, prompt) in prompts.iter().enumerate() {
            let (text, _) = read(engine.launch(request(prompt, 3, 20)).unwrap());
            assert_eq!(text, alone(&toy, &request(prompt, 3, 20)).0);
            // For a recurrent model the one behind the prompt too.
            wait_for_states(folder.path(), (at + 1) * if recurrent { 2 } else { 1 });
        }
        let next = with_files(&toy, folder.path());
        for prompt in &prompts {
            let (text, finished) = read(next.launch(request(prompt, 3, 20)).unwrap());
            assert_eq!(text, alone(&toy, &request(prompt, 3, 20)).0);
            assert!(finished.cached_tokens >= prompt.len() - 2, "{finished:?}");
        }
    }
}

#[test]
fn a_long_state_is_written_before_another_text_takes_its_slot() {
    let folder = tempfile::tempdir().unwrap();
    let toy = ToyModel::new(false, None);
    let engine = saving_after(HOUR, (1, 0), &toy, folder.path());
    let (long, short) = ("abcdefghij".repeat(60), "jihgfedcba".repeat(8));
    for prompt in [&long, &short] {
        read(engine.launch(request(prompt, 3, 4)).unwrap());
    }
    wait_for_states(folder.path(), 1);
    // The short one is lost here without a file, and the long one comes back.
    let (text, finished) = read(engine.launch(request(&long, 4, 20)).unwrap());
    assert_eq!(text, alone(&toy, &request(&long, 4, 20)).0);
    assert!(finished.cached_tokens >= long.len() - 2, "{finished:?}");
    assert_eq!(read(engine.launch(request(&short, 3, 4)).unwrap()).1.cached_tokens, 0);
}
