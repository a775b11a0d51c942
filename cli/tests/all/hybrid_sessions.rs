//! Sessions of models that keep a state of fixed size, with caches or without, and of those whose caches have
//! a form of their own: kept, loaded, forked and put back in the middle of a text, they go on with the same
//! bits.

use crate::cases::{artifact, load, options};
use mlcc_runtime::{Model, Session};

/// Windows by layer, latent rows, caches that several layers read, experts, a logit in the softmax's sum;
/// kept formats.
const CACHED: [&str; 6] =
    ["gemma4-e", "gpt-oss-mxfp4", "deepseek-v2-lite", "mistral4", "muse-glimmer", "exaone4"];

const HYBRIDS: [&str; 11] = [
    "lfm2",
    "lfm3",
    "qwen3-next",
    "qwen3.5",
    "granite4-hybrid",
    "nemotron-h",
    "falcon-h1",
    "kimi-linear",
    "olmo-hybrid",
    "mamba",
    "mamba2",
];

fn built(case: &str, folder: &std::path::Path) -> Model {
    let path = artifact(&options(case, "f32"), folder, &format!("{case}.so")).0;
    load(&path, None, 2)
}

/// Some tokens at once, then two one by one.
fn go_on(session: &mut Session, ids: &[i32]) -> Vec<f32> {
    let (first, last) = ids.split_at(ids.len() - 2);
    session.prefill(first).unwrap();
    last.iter().for_each(|&id| {
        session.decode(id).unwrap();
    });
    session.logits().to_vec()
}

#[test]
fn states_are_kept_in_the_middle_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    for case in HYBRIDS.into_iter().chain(CACHED) {
        let model = built(case, folder.path());
        let vocab = model.vocab() as i32;
        let ids: Vec<i32> = (0..22).map(|i| (i * i * 7 + i / 3 + 1) % vocab).collect();
        // The middle of a block of rows, of a chunk and of a convolution.
        let (before, after) = ids.split_at(13);
        let mut session = model.session().unwrap();
        session.prefill(before).unwrap();
        let file = folder.path().join("state");
        session.save_state(&file).unwrap();
        let snapshot = session.snapshot().unwrap();
        let mut others = [session.fork().unwrap(), model.session().unwrap(), model.session().unwrap()];
        others[1].load_state(&file).unwrap();
        others[2].restore(&snapshot).unwrap();
        assert!(others[0].logits() == session.logits(), "{case}: a fork has the logits of its origin");
        let expected = go_on(&mut session, after);
        for (other, what) in others.iter_mut().zip(["forked", "loaded", "restored"]) {
            assert_eq!(other.past(), before.len() as u64, "{case}: {what}");
            assert!(go_on(other, after) == expected, "{case}: {what}");
        }
        // A fork's tokens change nothing in the session, and a session goes back to its snapshot.
        let mut fork = session.fork().unwrap();
        go_on(&mut fork, &ids[..5]);
        assert!(session.logits() == expected, "{case}: a fork changed its origin");
        session.restore(&snapshot).unwrap();
        assert!(go_on(&mut session, after) == expected, "{case}: put back");
        assert!(go_on(&mut session, after) != expected, "{case}: the state is not looked at");
        // Other tokens before give other logits, so that the state of the file was what counted.
        let mut fresh = model.session().unwrap();
        fresh.prefill(&ids[1..13]).unwrap();
        assert!(go_on(&mut fresh, after) != expected, "{case}: what came before is not looked at");
        let hybrid = HYBRIDS.contains(&case);
        assert!(session.can_truncate_to(5) != hybrid && session.truncate(5).is_err() == hybrid, "{case}");
        session.truncate(0).unwrap();
        session.prefill(before).unwrap();
        assert!(go_on(&mut session, after) == expected, "{case}: begun anew");
    }
}

#[test]
fn states_of_other_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["lfm2", "mamba2"].map(|case| built(case, folder.path()));
    let mut session = one.session().unwrap();
    session.prefill(&[1, 2, 3]).unwrap();
    let file = folder.path().join("state");
    session.save_state(&file).unwrap();
    let mut other = two.session().unwrap();
    other.prefill(&[4]).unwrap();
    let before = other.logits().to_vec();
    assert!(other.load_state(&file).is_err() && other.restore(&session.snapshot().unwrap()).is_err());
    assert!(other.past() == 1 && other.logits() == before);
    // A file that ends early is refused too, and leaves the session as it was.
    let bytes = std::fs::read(&file).unwrap();
    for end in [0, 16, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&file, &bytes[..end]).unwrap();
        assert!(session.load_state(&file).is_err(), "{end} of {} bytes", bytes.len());
        assert_eq!(session.past(), 3);
    }
}
