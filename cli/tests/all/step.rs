//! Steps of rows of several sequences against the same sequences alone: random pieces of prompts and single
//! tokens go together, with logits of none, the last or all of their rows. Graph, kernels by interpretation
//! with workers apart, artifacts, and the reference cases in random cuts.

use std::path::Path;

use crate::cases::{FAMILIES, artifact, assert_close, backends, find, golden, ids, load, program, recurrent};
use crate::interpreters::memory;
use crate::together::{BATCH, BatchComparison, F32, PairedSessions, options};
use mlcc_driver::compile::{Backend, BuildSource};
use mlcc_interp::graph::{Interpreter, SequenceRows, StateValues, Tensor, param_value};
use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::{BatchSequence, StepMemory, WorkerSchedule, run_batch, run_batch_interleaved};
use mlcc_ir::dim::SymValues;
use mlcc_ir::module::Module;
use mlcc_ir::step::MemoryBase;
use mlcc_ir::text::{parse_module, print_module};
use mlcc_passes::LoweredProgram;
use mlcc_runtime::{Error, LoadOptions, Model, OutputRows, Session, SessionInput};

/// Numbers that are the same on every machine (PCG, O'Neill 2014, without its permutation).
pub struct StepRandom(pub u64);

impl StepRandom {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }
}

/// Tokens of three sequences, of lengths that differ.
fn texts(dir: &Path) -> [Vec<i32>; 3] {
    let golden = mlcc_models::golden::GoldenFile::read(&dir.join("golden.json")).unwrap();
    let longest = golden.prompts.iter().map(ids).max_by_key(Vec::len).unwrap();
    [11, 14, 7].map(|n| longest.iter().copied().cycle().skip(n / 2).take(n).collect())
}

/// The input of a step: the number of a sequence, its tokens, and the outputs.
#[derive(Clone, Debug)]
struct FedSequence {
    sequence: usize,
    from: usize,
    to: usize,
    want: OutputRows,
}

/// Steps that compute all of the texts: each has a random choice of sequences, in any order, with some of
/// their tokens each. A prompt of a model that reads it as a whole is the first half of its text.
fn steps(texts: &[Vec<i32>], whole_prompts: bool, random: &mut StepRandom) -> Vec<Vec<FedSequence>> {
    let mut done = vec![0; texts.len()];
    let mut steps = Vec::new();
    while done.iter().zip(texts).any(|(&done, text)| done < text.len()) {
        let mut step: Vec<FedSequence> = Vec::new();
        let mut room = 16;
        let first = random.below(texts.len());
        for sequence in (0..texts.len()).map(|i| (first + i) % texts.len()) {
            let (from, left) = (done[sequence], texts[sequence].len() - done[sequence]);
            let piece = match (whole_prompts, from) {
                (true, 0) => left / 2,
                (true, _) => 1,
                (false, _) => [1, 1 + random.below(7)][random.below(2)],
            };
            let piece = piece.min(left);
            if piece == 0 || piece > room || random.below(4) == 0 {
                continue;
            }
            room -= piece;
            done[sequence] += piece;
            let want = [OutputRows::Nothing, OutputRows::Last, OutputRows::All][random.below(3)];
            step.push(FedSequence { sequence, from, to: from + piece, want });
        }
        if !step.is_empty() {
            steps.push(step);
        }
    }
    steps
}

/// Tokens and numbers of the output rows, as an entry point takes them: at least one row.
fn inputs(texts: &[Vec<i32>], step: &[FedSequence]) -> (Vec<i32>, Vec<i32>, usize) {
    let (mut tokens, mut wanted) = (Vec::new(), Vec::new());
    for fed in step {
        tokens.extend_from_slice(&texts[fed.sequence][fed.from..fed.to]);
        let end = tokens.len() as i32;
        wanted.extend(end - rows(fed) as i32..end);
    }
    let count = wanted.len().max(1);
    wanted.resize(tokens.len(), 0);
    (tokens, wanted, count)
}

/// The number of output rows.
fn rows(fed: &FedSequence) -> usize {
    match fed.want {
        OutputRows::Nothing => 0,
        OutputRows::Last => 1,
        OutputRows::All => fed.to - fed.from,
    }
}

/// The graph function gives what `prefill_logits` gives for each piece alone, bit for bit.
fn check_graph(what: &str, module: &Module, source: &BuildSource, texts: &[Vec<i32>], whole_prompts: bool) {
    let tensor = |name: &str| {
        let data = source.checkpoint.read(name).ok()?;
        Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
    };
    let interpreter = Interpreter::new(module, |id| param_value(&module.params[id], &tensor).unwrap());
    let mut alone = vec![StateValues::new(module).unwrap(); texts.len()];
    let mut together = alone.clone();
    let (function, _) = module.function("step").unwrap();
    for step in steps(texts, whole_prompts, &mut StepRandom(7)) {
        let (tokens, wanted, count) = inputs(texts, &step);
        let pieces = step.iter().map(|f| SequenceRows { past: f.from as i64, rows: (f.to - f.from) as i64 });
        let pieces: Vec<SequenceRows> = pieces.collect();
        let mut states: Vec<StateValues> = step.iter().map(|f| together[f.sequence].clone()).collect();
        let fed = [Tensor::ids(&tokens), Tensor::ids(&wanted)];
        let found = interpreter.run_sequences(function, &fed, &mut states, &pieces, count).unwrap();
        let mut row = 0;
        for (fed, state) in step.iter().zip(states) {
            let ids = &texts[fed.sequence][fed.from..fed.to];
            let sizes = SymValues { past: fed.from as i64, ..SymValues::for_tokens(ids.len() as i64) };
            let states = &mut alone[fed.sequence];
            let want = interpreter.run_named("prefill_logits", &[Tensor::ids(ids)], states, sizes).unwrap();
            for at in ids.len() - rows(fed)..ids.len() {
                assert_eq!(want[0].row(at), found[0].row(row), "{what}: row {at} of {fed:?}");
                row += 1;
            }
            together[fed.sequence] = state;
        }
    }
    for (a, b) in alone.iter().zip(&together) {
        for (id, state) in module.states.iter() {
            assert_eq!(a.get(id).unwrap().data, b.get(id).unwrap().data, "{what}: state {}", state.name);
        }
    }
}

#[test]
fn every_definition_takes_pieces() {
    for case in recurrent().chain(FAMILIES) {
        let Some(dir) = find(case) else { continue };
        let source = BuildSource::open(&options(&dir, "f32", Backend::default())).unwrap();
        let architecture = &source.model.config.architecture;
        let module = mlcc_driver::model::build_module(case, architecture, source.context, BATCH).unwrap();
        mlcc_ir::verify::verify_module(&module).unwrap();
        check_graph(case, &module, &source, &texts(&dir), architecture.needs_whole_prompts());
    }
}

/// The steps print and parse after the passes.
#[test]
fn lowered_steps_print_and_parse() {
    for case in ["rwkv4-hf-odd", "llama3-gqa-tied"] {
        let Some(dir) = find(case) else { continue };
        let (program, _) = program(&options(&dir, "q4i8", Backend::default()), None);
        let text = print_module(&program.module);
        assert!(text.contains(" wanted"), "{case} computes nothing for wanted rows");
        assert_eq!(print_module(&parse_module(&text).unwrap()), text);
        mlcc_passes::verify::verify_program(&program).unwrap();
    }
}

/// Runs the kernels of a case by the interpreter, which finds accesses out of bounds and races within a
/// launch, and by workers that are apart as far as barriers allow, which finds missing barriers: both give
/// the same bits.
fn check_kernels(what: &str, program: &LoweredProgram, source: &BuildSource, texts: &[Vec<i32>]) {
    let level = &program.levels[0];
    let kernels = &level.lowered.kernels;
    let step = level.steps.iter().find(|s| s.name == "step").unwrap();
    let mut memory = memory(program, source);
    let vocab = source.model.config.architecture.vocab();
    let fresh = memory.base_memory(MemoryBase::State).clone();
    let mut states = vec![fresh; texts.len()];
    // Fewer workers than sequences, and many more.
    let schedules: Vec<WorkerSchedule> = WorkerSchedule::all_variants(2)
        .into_iter()
        .zip(WorkerSchedule::all_variants(32))
        .flat_map(|(few, many)| [few, many])
        .collect();
    // The pages of the sequences by turns.
    let count = memory.base_memory(MemoryBase::PageTable).len() / 4;
    let pages = memory.base_memory(MemoryBase::Pages).len() * texts.len();
    memory.base_memory(MemoryBase::Pages).resize(pages, 0);
    let table = |sequence: usize| -> Vec<u8> {
        (0..count).flat_map(|i| ((i * texts.len() + sequence) as i32).to_le_bytes()).collect()
    };
    for (number, fed) in steps(texts, false, &mut StepRandom(3)).iter().take(4).enumerate() {
        let (tokens, wanted, count) = inputs(texts, fed);
        let bytes = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        *memory.base_memory(MemoryBase::Tokens) = bytes(&tokens);
        *memory.base_memory(MemoryBase::LogitIndices) = bytes(&wanted);
        *memory.base_memory(MemoryBase::Logits) = vec![0; 4 * vocab * count];
        let sequence = |f: &FedSequence| {
            let (state, past, rows) = (states[f.sequence].clone(), f.from as i64, (f.to - f.from) as i64);
            BatchSequence { state, page_table: table(f.sequence), past, rows }
        };
        let mut expected: Vec<BatchSequence> = fed.iter().map(sequence).collect();
        let mut apart: (StepMemory, Vec<BatchSequence>) = (memory.clone(), expected.clone());
        run_batch(step, kernels, &mut memory, &mut expected, count, &RunOptions::with_workers(3))
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        let schedule = &schedules[number % schedules.len()];
        run_batch_interleaved(step, kernels, &mut apart.0, &mut apart.1, count, schedule)
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        let logits = memory.base_memory(MemoryBase::Logits).clone();
        assert!(logits == *apart.0.base_memory(MemoryBase::Logits), "{what}: other logits by {schedule:?}");
        assert!(expected == apart.1, "{what}: other states by {schedule:?}");
        for (fed, sequence) in fed.iter().zip(expected) {
            states[fed.sequence] = sequence.state;
        }
    }
}

#[test]
fn workers_of_a_step_meet_at_its_barriers() {
    for (case, quant) in [
        ("rwkv4-hf-odd", "f32"),
        ("rwkv7-hf", "q4i8"),
        ("llama3-gqa-tied", "q4i8"),
        ("llama3-gqa-tied", "f32"),
        ("gemma2", "f32"),
    ] {
        let Some(dir) = find(case) else { continue };
        let mut options = options(&dir, quant, Backend::default());
        options.target = "x86-64-v3".into();
        let (program, source) = program(&options, None);
        check_kernels(&format!("{case} in {quant}"), &program, &source, &texts(&dir));
    }
}

/// Random steps of an artifact, each piece against the same piece of a session alone.
pub fn feed(what: &BatchComparison, dir: &Path, model: &Model) -> PairedSessions {
    let texts = &texts(dir);
    let mut twins = PairedSessions::new(model, texts.len());
    let PairedSessions { together, alone } = &mut twins;
    let mut batch = model.batch(BATCH as usize).unwrap();
    let vocab = model.vocab();
    let whole_prompts = model.table().whole_prompts;
    for (number, step) in steps(texts, whole_prompts, &mut StepRandom(what.threads as u64)).iter().enumerate()
    {
        let mut places: Vec<Option<&mut Session>> = together.iter_mut().map(Some).collect();
        let rows_of = |f: &FedSequence| {
            let tokens = &texts[f.sequence][f.from..f.to];
            SessionInput { session: places[f.sequence].take().unwrap(), tokens, outputs: f.want }
        };
        let mut pieces: Vec<SessionInput> = step.iter().map(rows_of).collect();
        let found =
            batch.step(&mut pieces).unwrap_or_else(|e| panic!("{}, step {number}: {e}", what.name)).to_vec();
        assert_eq!(found.len(), step.iter().map(rows).sum::<usize>() * vocab, "{}, step {number}", what.name);
        let mut found = found.chunks_exact(vocab);
        for fed in step {
            let tokens = &texts[fed.sequence][fed.from..fed.to];
            let twin = &mut alone[fed.sequence];
            // A row alone takes the attention of one query, as a next token does.
            let want = match tokens {
                &[token] => twin.decode(token).unwrap().to_vec(),
                several => twin.prefill_logits(several).unwrap().to_vec(),
            };
            for (at, want) in want.chunks_exact(vocab).enumerate().skip(tokens.len() - rows(fed)) {
                what.close(&format!("step {number}, row {at} of {fed:?}"), want, found.next().unwrap());
            }
            let session = &together[fed.sequence];
            assert_eq!(session.past(), twin.past(), "{}, step {number}", what.name);
            if fed.want != OutputRows::Nothing {
                what.close(&format!("step {number}"), twin.logits(), session.logits());
            }
        }
    }
    twins
}

/// All prompts of a reference case read together, in random cuts, give the logits of the reference.
#[test]
fn reference_cases_in_random_cuts() {
    let backend = backends().last().expect("a back end is built in");
    for case in ["rwkv4-hf-odd", "rwkv6-hf", "llama3-gqa-tied", "gemma2", "qwen3"] {
        let Some(dir) = find(case) else { continue };
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(&dir, "f32", backend);
        let golden = golden(case);
        let texts: Vec<Vec<i32>> = golden.prompts.iter().map(ids).take(BATCH as usize).collect();
        options.context = texts.iter().map(|t| t.len() as u64).max();
        let (path, _) = artifact(&options, folder.path(), "case.so");
        let model = load(&path, None, 2);
        for seed in 0..3 {
            let mut sessions: Vec<Session> = texts.iter().map(|_| model.session().unwrap()).collect();
            let mut batch = model.batch(texts.len()).unwrap();
            for step in steps(&texts, false, &mut StepRandom(seed)) {
                let mut places: Vec<Option<&mut Session>> = sessions.iter_mut().map(Some).collect();
                let mut pieces: Vec<SessionInput> = Vec::new();
                for f in &step {
                    let session = places[f.sequence].take().unwrap();
                    pieces.push(SessionInput::new(session, &texts[f.sequence][f.from..f.to]));
                }
                batch.step(&mut pieces).unwrap();
            }
            for (session, prompt) in sessions.iter().zip(&golden.prompts) {
                assert_close(&format!("{case}, seed {seed}"), &prompt.logits_last, session.logits(), 2e-5);
            }
        }
    }
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
    windows(&dir, &load(&path, None, 2), F32);
}

/// Steps of a model with a context of 24, in calls of at most 4 tokens, that goes on beyond it.
pub fn windows(dir: &Path, model: &Model, tolerance: f32) {
    let [text, ..] = texts(dir);
    let text: Vec<i32> = text.iter().copied().cycle().take(80).collect();
    let mut sessions = [model.session().unwrap(), model.session().unwrap()];
    let mut alone = [model.session().unwrap(), model.session().unwrap()];
    let mut batch = model.batch(2).unwrap();
    let mut done = [0, 0];
    for number in 0..20 {
        // Pieces of one sequence beside single tokens of the other, in turns.
        let pieces = if number % 2 == 0 { [3, 1] } else { [1, 3] };
        let fed = [0, 1].map(|i| &text[done[i]..done[i] + pieces[i]]);
        let [a, b] = &mut sessions;
        batch.step(&mut [SessionInput::new(a, fed[0]), SessionInput::new(b, fed[1])]).unwrap();
        for i in [0, 1] {
            let want = alone[i].prefill(fed[i]).unwrap();
            assert_close(&format!("sequence {i} in step {number}"), want, sessions[i].logits(), tolerance);
            done[i] += pieces[i];
        }
    }
    assert!(done.iter().all(|&done| done > 24), "the caches were never full");
}

#[test]
fn what_does_not_fit_changes_no_sequence() {
    let Some(dir) = find("llama3-gqa-tied") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&dir, "f32", backends().last().expect("a back end is built in"));
    options.context = Some(14);
    options.chunk = Some(8);
    let (path, _) = artifact(&options, folder.path(), "case.so");
    let model = Model::load(&path, &LoadOptions::default()).unwrap();
    let other = Model::load(&path, &LoadOptions::default()).unwrap();
    assert_eq!(model.max_step_tokens(), 8);
    let mut batch = model.batch(2).unwrap();
    let (mut a, mut b, mut c) =
        (model.session().unwrap(), model.session().unwrap(), other.session().unwrap());
    let mut d = model.session().unwrap();
    a.prefill(&[1, 2, 3]).unwrap();
    let before = a.fork().unwrap();
    let state = |s: &Session| (s.past(), s.logits().to_vec());
    let mut refused = |rows: &mut [SessionInput]| batch.step(rows).unwrap_err();
    assert!(matches!(refused(&mut []), Error::BatchTokens { sessions: 0, tokens: 0 }));
    let too_many = refused(&mut [SessionInput::new(&mut a, &[1; 5]), SessionInput::new(&mut b, &[2; 4])]);
    assert!(matches!(too_many, Error::StepTokens { n: 9, most: 8 }), "{too_many}");
    let three = refused(&mut [
        SessionInput::new(&mut a, &[1]),
        SessionInput::new(&mut b, &[2]),
        SessionInput::new(&mut d, &[2]),
    ]);
    assert!(matches!(three, Error::BatchSize { n: 3, most: 2, .. }), "{three}");
    let foreign = refused(&mut [SessionInput::new(&mut a, &[1]), SessionInput::new(&mut c, &[2])]);
    assert!(matches!(foreign, Error::BatchModel { index: 1 }), "{foreign}");
    let text = |e: Error| e.to_string();
    let empty = text(refused(&mut [SessionInput::new(&mut a, &[1]), SessionInput::new(&mut b, &[])]));
    assert!(empty.starts_with("sequence 1 of the batch: "), "{empty}");
    let token = text(refused(&mut [SessionInput::new(&mut a, &[1, 2]), SessionInput::new(&mut b, &[1, -1])]));
    assert!(token.starts_with("sequence 1 of the batch: token -1 at position 1"), "{token}");
    b.prefill(&[1; 12]).unwrap();
    let full = text(refused(&mut [SessionInput::new(&mut a, &[1, 2]), SessionInput::new(&mut b, &[1; 3])]));
    assert!(full.starts_with("sequence 1 of the batch: the context is full"), "{full}");
    assert_eq!(state(&a), state(&before), "nobody has moved");
    assert_eq!((b.past(), c.past(), d.past()), (12, 0, 0));
    // The same step without what was wrong with it.
    let mut twin = before.fork().unwrap();
    let want = twin.prefill(&[1, 2]).unwrap().to_vec();
    let rows =
        batch.step(&mut [SessionInput::new(&mut a, &[1, 2]), SessionInput::new(&mut b, &[1; 2])]).unwrap();
    assert_close("after refusals", &want, &rows[..model.vocab()], F32);
    // Without code for several sequences a step is of one.
    options.batch = Some(1);
    let (path, _) = artifact(&options, folder.path(), "alone.so");
    let model = Model::load(&path, &LoadOptions::default()).unwrap();
    let mut session = model.session().unwrap();
    let mut batch = model.batch(1).unwrap();
    let rows = SessionInput { session: &mut session, tokens: &[1, 2, 3], outputs: OutputRows::All };
    assert_eq!(batch.step(&mut [rows]).unwrap().len(), 3 * model.vocab());
    assert_close("alone", before.logits(), session.logits(), F32);
}
