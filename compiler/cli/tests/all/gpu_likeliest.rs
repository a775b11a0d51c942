//! Tokens that are chosen among the likeliest ones, which the GPU has found, are those that all logits lead to.

use std::path::PathBuf;

use mlcc_engine::sampler::{Sampler, SamplingParams};
use mlcc_runtime::{LoadOptions, Model};

use crate::program::{books, text};
use crate::software_gpu::{build, driver, in_child, on_gpu};

/// The rest of [`texts_are_those_of_all_logits`], in a process whose environment names the driver.
#[test]
fn child_with_lists() {
    let Some(artifact) = std::env::var_os("MLCC_TEST_LIKELIEST").map(PathBuf::from) else { return };
    println!("child ran");
    let model = Model::load(&artifact, &LoadOptions::default()).unwrap();
    let vocab = model.vocab();
    let params = SamplingParams { repeat_penalty: 1.2, seed: Some(7), ..SamplingParams::default() };
    let [mut among, mut of_all] = [0; 2].map(|_| Sampler::new(params.clone(), vocab).unwrap());
    let (mut a, mut b) = (model.session().unwrap(), model.session().unwrap());
    let prompt = [5, 9, 31];
    assert_eq!(a.prefill(&prompt).unwrap(), b.prefill(&prompt).unwrap());
    let mut token = 40;
    for step in 0..10 {
        let expected = b.decode(token).unwrap().to_vec();
        let mut chosen = None;
        // Now and then the list does not suffice.
        let mut enough = |list: &[mlcc_runtime::Likely]| {
            let mut sorted: Vec<usize> = (0..vocab).collect();
            sorted.sort_by(|&x, &y| expected[y].total_cmp(&expected[x]).then(x.cmp(&y)));
            let same = |(l, id): (&mlcc_runtime::Likely, &usize)| {
                l.token as usize == *id && l.logit == expected[*id]
            };
            assert!(list.len() == 64 && list.iter().zip(&sorted).all(same), "{list:?}");
            chosen = among.sample_among(list);
            assert!(chosen.is_some());
            step % 4 != 3
        };
        match a.decode_likeliest(token, &mut enough).unwrap() {
            None => assert_ne!(step % 4, 3),
            Some(logits) => assert_eq!(logits, expected),
        }
        token = of_all.sample(&expected).unwrap();
        assert_eq!(chosen, Some(token));
        among.accept(token);
        of_all.accept(token);
    }
    assert_eq!((a.past(), a.notice()), (b.past(), None));
    // Logits that somebody wants are there again, and so are their probabilities.
    assert_eq!(a.decode(token).unwrap(), b.decode(token).unwrap());
    assert_eq!(a.softmax(0.5).unwrap(), b.softmax(0.5).unwrap());
}

#[test]
fn texts_are_those_of_all_logits() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quant", "q4f16", "--target", "sm_80"];
    let artifact = build(&books(), folder.path(), "books.so", &flags);
    for order in ["turns", "backwards"] {
        let variables = [("MLCC_TEST_LIKELIEST", artifact.to_str().unwrap()), ("SOFTCUDA_ORDER", order)];
        in_child("gpu_likeliest::child_with_lists", &driver, &variables);
    }
    what_comes_to_the_host(&driver, &artifact);
}

/// Bytes per token that `mlcc run` copies: 64 logits and their numbers.
fn what_comes_to_the_host(driver: &std::path::Path, artifact: &std::path::Path) {
    let counts = tempfile::NamedTempFile::new().unwrap();
    let bytes = |more: &[&str], tokens: &str| {
        let mut run = on_gpu(driver, &[("COUNTS", counts.path().to_str().unwrap())]);
        run.arg("run")
            .arg(artifact)
            .args(["-p", "The sea was", "-q", "--seed", "3", "--temperature", "0.9", "-n", tokens])
            .args(more);
        let text = text(&mut run);
        let counts: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(counts.path()).unwrap()).unwrap();
        (text, counts["to_host"]["bytes"].as_u64().unwrap())
    };
    let (_, of_prompt) = bytes(&[], "1");
    let (_, of_seven) = bytes(&[], "7");
    assert_eq!(of_seven - of_prompt, 6 * 512);
    // All logits, where the list is not long enough.
    let (_, of_seven_long) = bytes(&["--top-k", "65"], "7");
    assert_eq!(of_seven_long - of_prompt, 6 * (512 + of_prompt));
    println!("a token: 512 bytes in place of {of_prompt}");
}
