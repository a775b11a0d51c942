//! A GPU that has less memory than its pool of pages may have, since other programs have the rest, by the
//! driver in software.

use std::path::{Path, PathBuf};

use mlcc_runtime::{Error, LoadOptions, Model, OutputRows, Session, SessionInput};

use crate::cases::assert_close;
use crate::program::case;
use crate::software_gpu::{build, driver, in_child};

const GRANULE: u64 = 4096;

fn load(folder: &Path, pages: u64) -> Model {
    let options = LoadOptions { cache_pages: Some(pages), ..LoadOptions::default() };
    Model::load(folder.join("gpu.so"), &options).unwrap()
}

/// Bytes of all pages of a model of which the device maps `pages`.
fn mapped(pages: u64) -> String {
    // llama3-gqa-tied in f32: three layers, 64 rows of keys and of values of one head of 16.
    let page: u64 = 3 * 2 * 64 * 16 * 4;
    (pages * page).next_multiple_of(GRANULE).to_string()
}

fn with(test: &str, flags: &[&str], limit: (&str, &str)) {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = [&["--quant", "f32", "--target", "sm_90"], flags].concat();
    build(&case("llama3-gqa-tied"), folder.path(), "gpu.so", &flags);
    let variables = [
        ("MLCC_TEST_MEMORY", folder.path().to_str().unwrap()),
        limit,
        ("SOFTCUDA_GRANULE", &GRANULE.to_string()),
    ];
    in_child(&format!("gpu_memory::{test}"), &driver, &variables);
}

/// The rest of [`refused_memory_changes_nothing`].
#[test]
fn child_with_refusals() {
    let Some(folder) = std::env::var_os("MLCC_TEST_MEMORY").map(PathBuf::from) else { return };
    println!("child ran");
    let model = load(&folder, 100);
    let free = || model.cache_pages().free;
    let tokens: Vec<i32> = (0..128).map(|i| 1 + i * 5 % 90).collect();
    let mut sessions: Vec<Session> = (0..3).map(|_| model.session().unwrap()).collect();
    let [full, short, last] = &mut sessions[..] else { unreachable!() };
    full.prefill(&tokens[..64]).unwrap();
    short.prefill(&tokens[..64]).unwrap();
    assert_eq!(free(), 98);
    // There is memory for a third page, and none for a fourth one.
    let mut batch = model.batch(2).unwrap();
    let error =
        batch.step(&mut [SessionInput::new(last, &[3]), SessionInput::new(short, &[7, 8])]).unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { what: "pages of the KV cache on the GPU", .. }),
        "{error:?}"
    );
    assert_eq!((short.past(), last.past(), free()), (64, 0, 98), "who could have a page has given it back");
    assert!(matches!(short.prefill(&tokens), Err(Error::OutOfMemory { .. })));
    assert_eq!((short.past(), free()), (64, 98));
    full.reset().unwrap();
    batch.step(&mut [SessionInput::new(last, &[3]), SessionInput::new(short, &[7, 8])]).unwrap();
    full.decode(3).unwrap_err();
    drop(sessions);
    let mut alone = model.session().unwrap();
    alone.prefill(&tokens[..64]).unwrap();
    let expected = alone.prefill(&[7, 8]).unwrap().to_vec();
    let mut again = alone.fork().unwrap();
    again.truncate(64).unwrap();
    assert_close("after refusals", &expected, again.prefill(&[7, 8]).unwrap(), 2e-5);
    drop((alone, again));
    assert_eq!(free(), 100);
}

#[test]
fn refused_memory_changes_nothing() {
    with(
        "child_with_refusals",
        &["--chunk", "32", "--ctx-size", "256", "--max-batch", "2"],
        ("SOFTCUDA_MAPPED", &mapped(3)),
    );
}

/// The rest of [`texts_give_way_on_a_full_gpu`].
#[test]
fn child_with_texts() {
    let Some(folder) = std::env::var_os("MLCC_TEST_MEMORY").map(PathBuf::from) else { return };
    println!("child ran");
    let model = load(&folder, 1000);
    crate::serving::give_way("a full GPU", &model, 20);
    assert_eq!((model.cache_pages().all, model.cache_pages().free), (1000, 1000));
}

/// The engine puts texts back as where a pool is used up, and each of them is that of a session alone.
#[test]
fn texts_give_way_on_a_full_gpu() {
    with(
        "child_with_texts",
        &["--chunk", "64", "--ctx-size", "192", "--max-batch", "4"],
        ("SOFTCUDA_MAPPED", &mapped(5)),
    );
}

/// The rest of [`logits_that_find_no_memory_change_nothing`].
#[test]
fn child_with_logits() {
    let Some(folder) = std::env::var_os("MLCC_TEST_MEMORY").map(PathBuf::from) else { return };
    println!("child ran");
    let model = load(&folder, 1000);
    let tokens: Vec<i32> = (0..64).map(|i| 1 + i * 5 % 90).collect();
    let mut sessions: Vec<Session> = (0..2).map(|_| model.session().unwrap()).collect();
    let [a, b] = &mut sessions[..] else { unreachable!() };
    let mut batch = model.batch(2).unwrap();
    batch.step(&mut [SessionInput::new(a, &tokens[..5]), SessionInput::new(b, &tokens[..9])]).unwrap();
    let mut alone = [a.fork().unwrap(), b.fork().unwrap()];
    let mut expected = alone[0].prefill(&tokens[5..35]).unwrap().to_vec();
    expected.extend_from_slice(alone[1].decode(7).unwrap());
    drop(alone);
    // Other sequences take the memory that there is, but for less than a granule.
    let mut others = Vec::new();
    let reserved = || model.session().and_then(|mut other| other.reserve(64).map(|()| other));
    let refused = loop {
        match reserved() {
            Ok(other) => others.push(other),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused:?}");
    let free = model.cache_pages().free;
    for _ in 0..2 {
        let all = SessionInput { session: a, tokens: &tokens[5..35], outputs: OutputRows::All };
        let error = batch.step(&mut [all, SessionInput::new(b, &[7])]).unwrap_err();
        let wanted = 31 * 4 * model.vocab() as u64;
        assert!(
            matches!(error, Error::OutOfMemory { what: "logits of several rows on the GPU", bytes } if bytes == wanted),
            "{error:?}"
        );
        assert!(error.to_string().contains(&wanted.to_string()) && batch.logits().is_empty());
        assert_eq!((a.past(), b.past(), model.cache_pages().free), (5, 9, free));
        // One sequence alone gets the same error.
        let alone = a.prefill_logits(&tokens[5..36]).map(drop);
        assert!(matches!(alone, Err(Error::OutOfMemory { bytes, .. }) if bytes == wanted), "{alone:?}");
        assert_eq!(a.past(), 5);
    }
    // Fewer rows fit.
    let found = batch.step(&mut [SessionInput::new(a, &tokens[5..35]), SessionInput::new(b, &[7])]).unwrap();
    assert_close("after refusals", &expected, found, 2e-5);
    drop((others, sessions));
    assert_eq!(model.cache_pages().free, 1000);
}

#[test]
fn logits_that_find_no_memory_change_nothing() {
    let flags = ["--chunk", "32", "--ctx-size", "64", "--max-batch", "2"];
    with("child_with_logits", &flags, ("SOFTCUDA_MEMORY", "2000000"));
}
