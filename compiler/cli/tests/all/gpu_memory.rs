//! A GPU that has less memory than its pool of pages may have, since other programs have the rest, by the driver in software.

use std::path::{Path, PathBuf};

use mlcc_runtime::{Error, LoadOptions, Model, Rows, Session};

use crate::cases::assert_close;
use crate::program::case;
use crate::software_gpu::{build, driver, in_child};

const GRANULE: u64 = 4096;

fn load(folder: &Path, pages: u64) -> Model {
    let options = LoadOptions { cache_pages: Some(pages), ..LoadOptions::default() };
    Model::load(folder.join("gpu.so"), &options).unwrap()
}

/// Bytes of all pages of a model of which the device maps so many.
fn mapped(pages: u64) -> String {
    // llama3-gqa-tied in f32: three layers, 64 rows of keys and of values of one head of 16.
    let page: u64 = 3 * 2 * 64 * 16 * 4;
    (pages * page).next_multiple_of(GRANULE).to_string()
}

fn with(test: &str, flags: &[&str], pages: u64) {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = [&["--quant", "f32", "--target", "sm_90"], flags].concat();
    build(&case("llama3-gqa-tied"), folder.path(), "gpu.so", &flags);
    let variables = [
        ("MLCC_TEST_MEMORY", folder.path().to_str().unwrap()),
        ("SOFTCUDA_MAPPED", &mapped(pages)),
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
    let error = batch.step(&mut [Rows::of(last, &[3]), Rows::of(short, &[7, 8])]).unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { what: "pages of the KV cache on the GPU", .. }),
        "{error:?}"
    );
    assert_eq!((short.past(), last.past(), free()), (64, 0, 98), "who could have a page has given it back");
    assert!(matches!(short.prefill(&tokens), Err(Error::OutOfMemory { .. })));
    assert_eq!((short.past(), free()), (64, 98));
    full.reset().unwrap();
    batch.step(&mut [Rows::of(last, &[3]), Rows::of(short, &[7, 8])]).unwrap();
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
    with("child_with_refusals", &["--chunk", "32", "--ctx-size", "256", "--max-batch", "2"], 3);
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
    with("child_with_texts", &["--chunk", "64", "--ctx-size", "192", "--max-batch", "4"], 5);
}
