//! Sequences decoded together against the same sequences decoded alone: graph, kernels by interpretation,
//! artifacts. They have different lengths, join and leave between steps, and drop rows where the model has a
//! window.

use std::path::Path;

use crate::cases::{FAMILIES, artifact, assert_close, backends, find, program, recurrent};
use crate::together::{BATCH, BatchComparison, F32, PairedSessions, options};
use mlcc_driver::compile::{Backend, BuildSource};
use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_ir::dim::SymValues;
use mlcc_ir::module::Module;
use mlcc_ir::text::{parse_module, print_module};
use mlcc_models::golden::GoldenFile;
use mlcc_runtime::{Error, LoadOptions, Model, Session};

/// Cases whose definition treats positions and attention as another one does.
const ALIKE: [&str; 9] = [
    "gemma",
    "stablelm-head-norms",
    "gpt2-hub-names",
    "glm4-hf",
    "baichuan2-13b-tiny",
    "moss",
    "gpt-bigcode",
    "internlm",
    "llama-yarn",
];

/// Every definition that treats positions or attention in a way of its own.
fn transformers() -> impl Iterator<Item = &'static str> {
    FAMILIES.into_iter().filter(|case| !ALIKE.contains(case))
}

/// Three prompts of different lengths, and as many tokens as each continues with.
fn prompts(dir: &Path) -> [Vec<i32>; 3] {
    let golden = GoldenFile::read(&dir.join("golden.json")).unwrap();
    let longest = golden.prompts.iter().map(|p| &p.input_ids).max_by_key(|ids| ids.len()).unwrap();
    let ids: Vec<i32> = longest.iter().map(|&id| id as i32).collect();
    [1, 4, 7].map(|n| ids.iter().copied().cycle().skip(n / 2).take(n).collect())
}

/// Token number `step` of the continuation of sequence `i`.
fn token(prompt: &[i32], step: usize) -> i32 {
    prompt[step % prompt.len()]
}

/// The graph function of a batch gives what `decode` gives for each sequence, bit for bit.
fn check_graph(what: &str, module: &Module, source: &BuildSource, prompts: &[Vec<i32>]) {
    let tensor = |name: &str| {
        let data = source.checkpoint.read(name).ok()?;
        Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
    };
    let interpreter = Interpreter::new(module, |id| param_value(&module.params[id], &tensor).unwrap());
    let (mut alone, mut pasts) = (Vec::new(), Vec::new());
    for ids in prompts {
        let mut states = StateValues::new(module).unwrap();
        let sizes = SymValues::for_tokens(ids.len() as i64);
        interpreter.run_named("prefill", &[Tensor::ids(ids)], &mut states, sizes).unwrap();
        alone.push(states);
        pasts.push(ids.len() as i64);
    }
    let mut together = alone.clone();
    let (function, _) = module.function("decode_batch").unwrap();
    for step in 0..2 {
        let tokens: Vec<i32> = prompts.iter().map(|p| token(p, step)).collect();
        let found = interpreter.run_batch(function, &[Tensor::ids(&tokens)], &mut together, &pasts).unwrap();
        for (i, states) in alone.iter_mut().enumerate() {
            let sizes = SymValues { past: pasts[i], ..SymValues::for_tokens(1) };
            let want =
                interpreter.run_named("decode", &[Tensor::ids(&tokens[i..=i])], states, sizes).unwrap();
            assert_eq!(want[0].data, found[0].row(i), "{what}: sequence {i} in step {step}");
            pasts[i] += 1;
        }
    }
}

#[test]
fn every_definition_decodes_a_batch() {
    for case in recurrent().chain(transformers()) {
        let Some(dir) = find(case) else { continue };
        let source = BuildSource::open(&options(&dir, "f32", Backend::default())).unwrap();
        let architecture = &source.model.config.architecture;
        let module = mlcc_driver::model::build_module(case, architecture, source.context, BATCH).unwrap();
        mlcc_ir::verify::verify_module(&module).unwrap();
        check_graph(case, &module, &source, &prompts(&dir));
    }
}

/// The batch means the same after the passes, and the module prints and parses.
#[test]
fn lowered_batches_print_and_parse() {
    for case in ["rwkv4-hf-odd", "llama3-gqa-tied"] {
        let Some(dir) = find(case) else { continue };
        let (program, _) = program(&options(&dir, "q4i8", Backend::default()), None);
        let text = print_module(&program.module);
        assert!(text.contains(" each"), "{case} has nothing to do for each sequence");
        assert_eq!(print_module(&parse_module(&text).unwrap()), text);
        mlcc_ir::verify::verify_module(&program.module).unwrap();
    }
}

fn session(model: &Model, prompt: &[i32]) -> Session {
    let mut session = model.session().unwrap();
    session.prefill(prompt).unwrap();
    session
}

/// Steps with all three, with two (one has left), with another one that has joined; each against a session
/// that decodes alone.
pub fn feed(what: &BatchComparison, dir: &Path, model: &Model) -> PairedSessions {
    let prompts = prompts(dir);
    assert_eq!(model.max_batch(), u64::from(BATCH));
    let together: Vec<Session> = prompts.iter().map(|p| session(model, p)).collect();
    let alone = together.iter().map(|s| s.fork().unwrap()).collect();
    let mut twins = PairedSessions { together, alone };
    let PairedSessions { together, alone } = &mut twins;
    let mut batch = model.batch(BATCH as usize).unwrap();
    let members: [&[usize]; 6] = [&[0, 1, 2], &[2, 0], &[1], &[0, 1, 2], &[1, 2], &[2, 1, 0]];
    for (step, members) in members.into_iter().enumerate() {
        if step == 3 {
            // A sequence begins anew while the others go on.
            together[0].reset().unwrap();
            alone[0].reset().unwrap();
        }
        let tokens: Vec<i32> = members.iter().map(|&i| token(&prompts[i], step)).collect();
        let mut places: Vec<Option<&mut Session>> = together.iter_mut().map(Some).collect();
        let mut sessions: Vec<&mut Session> = members.iter().map(|&i| places[i].take().unwrap()).collect();
        let rows = batch.decode(&mut sessions, &tokens).unwrap().to_vec();
        for (row, (&i, &token)) in rows.chunks_exact(model.vocab()).zip(members.iter().zip(&tokens)) {
            let want = alone[i].decode(token).unwrap();
            what.close(&format!("sequence {i} in step {step}"), want, row);
            assert_eq!(together[i].logits(), row, "{}", what.name);
            assert_eq!(together[i].past(), alone[i].past(), "{}", what.name);
        }
    }
    twins
}

/// Sequences go on beyond their caches while others have just started.
#[test]
fn windows_move_for_each_sequence() {
    let Some(dir) = find("mistral-swa") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&dir, "f32", backends().next().expect("a back end is built in"));
    options.context = Some(24);
    options.chunk = Some(4);
    let (path, _) = artifact(&options, folder.path(), "case.so");
    windows(&dir, &Model::load(&path, &LoadOptions::default()).unwrap(), F32);
}

/// Batches of a model with a context of 24 that goes on beyond it.
pub fn windows(dir: &Path, model: &Model, tolerance: f32) {
    let window = model.session().unwrap().window().expect("this model has a window");
    assert!(window < 24, "the window of {window} hides nothing");
    let prompts = prompts(dir);
    let (mut a, mut b) = (session(model, &prompts[2]), session(model, &prompts[0]));
    let (mut alone_a, mut alone_b) = (a.fork().unwrap(), b.fork().unwrap());
    let mut batch = model.batch(2).unwrap();
    for step in 0..40 {
        let tokens = [token(&prompts[2], step), token(&prompts[1], step)];
        let rows = batch.decode(&mut [&mut a, &mut b], &tokens).unwrap();
        let (first, second) = rows.split_at(model.vocab());
        assert_close(&format!("step {step}"), alone_a.decode(tokens[0]).unwrap(), first, tolerance);
        assert_close(&format!("step {step}"), alone_b.decode(tokens[1]).unwrap(), second, tolerance);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(dir) = find("llama3-gqa-tied") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&dir, "f32", backends().last().expect("a back end is built in"));
    options.context = Some(8);
    let (path, _) = artifact(&options, folder.path(), "case.so");
    let model = Model::load(&path, &LoadOptions::default()).unwrap();
    let other = Model::load(&path, &LoadOptions::default()).unwrap();
    assert!(matches!(model.batch(0), Err(Error::BatchSize { n: 0, most: 3, .. })));
    assert!(matches!(model.batch(4), Err(Error::BatchSize { n: 4, most: 3, .. })));
    let mut batch = model.batch(2).unwrap();
    let (mut a, mut b, mut c) =
        (model.session().unwrap(), model.session().unwrap(), other.session().unwrap());
    assert!(matches!(batch.decode(&mut [], &[]), Err(Error::BatchTokens { sessions: 0, tokens: 0 })));
    assert!(matches!(
        batch.decode(&mut [&mut a], &[1, 2]),
        Err(Error::BatchTokens { sessions: 1, tokens: 2 })
    ));
    assert!(matches!(batch.decode(&mut [&mut a, &mut c], &[1, 2]), Err(Error::BatchModel { index: 1 })));
    let error = batch.decode(&mut [&mut a, &mut b], &[1, -1]).unwrap_err();
    assert!(error.to_string().starts_with("sequence 1 of the batch: token -1"), "{error}");
    b.prefill(&[1; 8]).unwrap();
    let error = batch.decode(&mut [&mut a, &mut b], &[1, 1]).unwrap_err();
    assert!(error.to_string().starts_with("sequence 1 of the batch: the context is full"), "{error}");
    assert_eq!((a.past(), b.past()), (0, 8), "nobody has moved");
    options.batch = Some(1);
    let (path, _) = artifact(&options, folder.path(), "alone.so");
    let model = Model::load(&path, &LoadOptions::default()).unwrap();
    assert_eq!(model.max_batch(), 1);
    assert!(matches!(model.batch(2), Err(Error::BatchSize { n: 2, most: 1, .. })));
    let mut session = model.session().unwrap();
    let rows = model.batch(1).unwrap().decode(&mut [&mut session], &[1]).unwrap().to_vec();
    assert_eq!(rows, session.logits());
}

/// One worker is the thread of the caller, so threads do not wait for each other.
#[test]
fn sessions_of_several_threads_know_nothing_of_each_other() {
    let backend = backends().next().expect("a back end is built in");
    let Some(dir) = find("llama3-gqa-tied") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = artifact(&options(&dir, "q4i8", backend), folder.path(), "case.so");
    for threads in [1, 2] {
        let model =
            Model::load(&path, &LoadOptions { threads: Some(threads), ..Default::default() }).unwrap();
        let logits = |prompt: &[i32]| {
            let mut session = model.session().unwrap();
            let mut found = session.prefill(prompt).unwrap().to_vec();
            (0..20)
                .for_each(|step| found.extend_from_slice(session.decode(token(prompt, step % 8)).unwrap()));
            found.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let prompts = prompts(&dir);
        let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| logits(prompt)).collect();
        for _ in 0..5 {
            let found: Vec<Vec<u32>> = std::thread::scope(|scope| {
                let threads: Vec<_> = prompts.iter().map(|prompt| scope.spawn(|| logits(prompt))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(found == expected, "{threads} workers");
        }
    }
}

/// Steps by ever other numbers of workers give what one worker gives, bit for bit: prompts, single tokens and
/// batches.
#[test]
fn the_number_of_workers_may_change_from_step_to_step() {
    let backend = backends().next().expect("a back end is built in");
    for case in ["rwkv4-hf-odd", "llama3-gqa-tied", "qwen3-moe"] {
        let Some(dir) = find(case) else { continue };
        let folder = tempfile::tempdir().unwrap();
        let (path, _) = artifact(&options(&dir, "q4i8", backend), folder.path(), "case.so");
        let model = Model::load(&path, &LoadOptions { threads: Some(4), ..Default::default() }).unwrap();
        let prompts = prompts(&dir);
        let logits = |workers: &dyn Fn(usize) -> Option<usize>| {
            let mut steps = 0;
            let mut next = || {
                model.fix_workers(workers(steps));
                steps += 1;
            };
            let mut found = Vec::new();
            let mut sessions: Vec<Session> = Vec::new();
            for prompt in &prompts {
                next();
                let mut session = model.session().unwrap();
                next();
                found.extend_from_slice(session.prefill(prompt).unwrap());
                for step in 0..6 {
                    next();
                    found.extend_from_slice(session.decode(token(prompt, step)).unwrap());
                }
                sessions.push(session);
            }
            let mut batch = model.batch(sessions.len()).unwrap();
            for step in 6..12 {
                let tokens: Vec<i32> = prompts.iter().map(|p| token(p, step)).collect();
                next();
                let mut members: Vec<&mut Session> = sessions.iter_mut().collect();
                found.extend_from_slice(batch.decode(&mut members, &tokens).unwrap());
            }
            found.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let expected = logits(&|_| Some(1));
        for shift in 0..4 {
            assert!(logits(&|step| Some(1 + (3 * step + shift) % 4)) == expected, "{case}, from {shift}");
        }
        assert!(logits(&|step| (step % 3 != 0).then_some(1 + step % 4)) == expected, "{case}, some chosen");
    }
}
