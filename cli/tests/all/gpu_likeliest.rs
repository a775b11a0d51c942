//! Tokens that are sampled from the top-k candidates, which the GPU has found, are those that all logits lead
//! to.

use std::path::PathBuf;

use mlcc_engine::sampler::{Sampler, SamplingParams};
use mlcc_runtime::{LoadOptions, Model, Session, SessionInput, TokenCandidate};

use crate::program::{books, case, text};
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
        let mut enough = |list: &[TokenCandidate]| {
            let mut sorted: Vec<usize> = (0..vocab).collect();
            sorted.sort_by(|&x, &y| expected[y].total_cmp(&expected[x]).then(x.cmp(&y)));
            let same =
                |(l, id): (&TokenCandidate, &usize)| l.token as usize == *id && l.logit == expected[*id];
            assert!(list.len() == 64 && list.iter().zip(&sorted).all(same), "{list:?}");
            chosen = among.sample_from_top_k(list);
            assert!(chosen.is_some());
            step % 4 != 3
        };
        match a.decode_top_k(token, &mut enough).unwrap() {
            None => assert_ne!(step % 4, 3),
            Some(logits) => assert_eq!(logits, expected),
        }
        token = of_all.sample(&expected).unwrap();
        assert_eq!(chosen, Some(token));
        among.accept(token);
        of_all.accept(token);
    }
    assert_eq!((a.past(), a.performance_warning()), (b.past(), None));
    // Requested logits are there again, and so are their probabilities.
    assert_eq!(a.decode(token).unwrap(), b.decode(token).unwrap());
    assert_eq!(a.softmax(0.5).unwrap(), b.softmax(0.5).unwrap());
}

/// A token of each session.
fn rows<'a>(sessions: &'a mut [Session], tokens: &'a [i32]) -> Vec<SessionInput<'a>> {
    sessions
        .iter_mut()
        .zip(tokens.chunks(1))
        .map(|(session, token)| SessionInput::new(session, token))
        .collect()
}

/// The rest of [`batches_are_those_of_all_logits`].
#[test]
fn child_with_batches() {
    let Some(artifact) = std::env::var_os("MLCC_TEST_LIKELIEST_BATCH").map(PathBuf::from) else { return };
    println!("child ran");
    let model = Model::load(&artifact, &LoadOptions::default()).unwrap();
    let vocab = model.vocab();
    let mut sessions: [_; 6] = std::array::from_fn(|i| {
        let mut session = model.session().unwrap();
        session.prefill(&[3 + (i % 3) as i32, 8, 21]).unwrap();
        session
    });
    let (all, listed) = sessions.split_at_mut(3);
    let (mut of_all, mut of_lists) = (model.batch(3).unwrap(), model.batch(3).unwrap());
    let mut tokens = [4, 30, 30];
    for step in 0..5 {
        let expected = of_all.step(&mut rows(all, &tokens)).unwrap();
        let mut asked = vec![];
        let mut enough = |row: usize, list: &[TokenCandidate]| {
            let expected = &expected[row * vocab..][..vocab];
            assert!(list.len() == 64 && list.iter().all(|l| expected[l.token as usize] == l.logit));
            assert!(list.is_sorted_by(|a, b| a.logit > b.logit || a.logit == b.logit && a.token < b.token));
            asked.push(row);
            // The second row is copied, too.
            row != 1
        };
        let found = of_lists.step_top_k(&mut rows(listed, &tokens), &mut enough).unwrap();
        assert_eq!(found[vocab..][..vocab], expected[vocab..][..vocab], "step {step}");
        assert_eq!(asked, [0, 1, 2]);
        let best = |row: &[f32]| (0..vocab).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i32;
        tokens = std::array::from_fn(|i| best(&expected[i * vocab..][..vocab]));
    }
    assert_eq!(of_lists.performance_warning(), None);
    assert_eq!(listed[1].logits(), all[1].logits());
    for (a, b) in all.iter_mut().zip(listed) {
        assert_eq!(a.decode(5).unwrap(), b.decode(5).unwrap());
    }
}

#[test]
fn batches_are_those_of_all_logits() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--quant", "q4f16", "--target", "sm_80", "--max-batch", "4", "--ctx-size", "64"];
    let artifact = build(&case("llama3-gqa-tied"), folder.path(), "tiny.so", &flags);
    for order in ["turns", "random:4"] {
        let variables =
            [("MLCC_TEST_LIKELIEST_BATCH", artifact.to_str().unwrap()), ("SOFTCUDA_ORDER", order)];
        in_child("gpu_likeliest::child_with_batches", &driver, &variables);
    }
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
