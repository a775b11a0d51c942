//! Models that are split among ranks: kernels by interpretation, in lockstep and with workers apart, and
//! artifacts whose ranks are threads. Every rank computes what one rank does, and all of them the same bits.

use std::path::{Path, PathBuf};

use crate::cases::{artifact, assert_close, backends, find, golden, ids, load, program, scheme};
use crate::interpreters::memory_of_rank;
use crate::together::{self, F32};
use mlcc_driver::compile::{Backend, BuildOptions, BuildSource};
use mlcc_driver::stored::{PerturbedWeights, StoredGraph};
use mlcc_interp::kernel::ExecutionOptions as RunOptions;
use mlcc_interp::steps::{
    RankCall, RankMemory, StepRunError, WorkerSchedule, run_ranks, run_ranks_interleaved,
};
use mlcc_ir::dim::SymValues;
use mlcc_ir::step::{MemoryBase, StepItem, StepProgram};
use mlcc_ir::text::{parse_module, print_module};
use mlcc_passes::text::{parse_program, print_program};
use mlcc_passes::{LoweredProgram, TpMode};
use mlcc_runtime::{Error, LoadOptions, Model, WorkerThreads};
use serde_json::json;

/// Key heads that are fewer than ranks, experts, states that are matrices, heads with a shared write to the
/// state, convolutions, a low rank, queries that are normed over all heads; heads, rows and a vocabulary that
/// do not divide among ranks.
const CASES: [(&str, &str, usize); 10] = [
    ("llama3-gqa-tied", "q4i8", 2),
    ("qwen3-moe", "f32", 2),
    ("rwkv7-hf", "q4i8", 2),
    ("granite4-hybrid", "f32", 2),
    ("qwen3.5", "q4i8", 2),
    ("deepseek-v3", "f32", 2),
    ("olmo3", "f32", 2),
    ("llama3-gqa-tied", "q4i8", 3),
    ("qwen3-moe", "q4i8", 3),
    ("rwkv4-hf-odd", "q4i8", 2),
];

fn options(dir: &Path, quant: &str, backend: Backend, ranks: usize) -> BuildOptions {
    BuildOptions { ranks, ..together::options(dir, quant, backend) }
}

fn first_backend() -> Backend {
    backends().next().expect("a back end is built in")
}

/// Memory of each rank: its own weights, fresh states, scratch.
fn fresh(program: &LoweredProgram, source: &BuildSource) -> Vec<RankMemory> {
    let memory = |rank| RankMemory { memory: memory_of_rank(program, source, rank), sequences: Vec::new() };
    (0..program.module.rank_count()).map(memory).collect()
}

fn step<'p>(program: &'p LoweredProgram, name: &str) -> &'p StepProgram {
    program.levels[0].steps.iter().find(|s| s.name == name).unwrap()
}

/// Logits of every rank after a prompt and a token.
fn logits(
    program: &LoweredProgram,
    source: &BuildSource,
    ids: &[i32],
    run: impl Fn(&StepProgram, &mut [RankMemory], RankCall) -> Result<(), StepRunError>,
) -> Vec<Vec<u8>> {
    let mut ranks = fresh(program, source);
    let vocab = source.model.config.architecture.vocab();
    let (last, first) = ids.split_last().unwrap();
    let mut past = 0;
    for (entry, ids) in [("prefill", first), ("decode", &[*last][..])] {
        for rank in &mut ranks {
            *rank.memory.base_memory(MemoryBase::Tokens) =
                ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            *rank.memory.base_memory(MemoryBase::Logits) = vec![0; 4 * vocab];
        }
        let sizes = SymValues { past, ..SymValues::for_tokens(ids.len() as i64) };
        run(step(program, entry), &mut ranks, RankCall::One(sizes))
            .unwrap_or_else(|e| panic!("{entry}: {e}"));
        past += ids.len() as i64;
    }
    ranks.iter_mut().map(|rank| rank.memory.base_memory(MemoryBase::Logits).clone()).collect()
}

fn lowered(case: &str, quant: &str, ranks: usize) -> Option<(LoweredProgram, BuildSource)> {
    let mut options = options(&find(case)?, quant, Backend::default(), ranks);
    options.target = "x86-64-v3".into();
    Some(program(&options, None))
}

#[test]
fn kernels_of_ranks_give_what_one_gives() {
    for (case, quant) in
        [("llama3-gqa-tied", "q4i8"), ("llama3-gqa-tied", "f32"), ("rwkv7-hf", "q4i8"), ("rwkv4-hf", "f32")]
    {
        let Some((one, source)) = lowered(case, quant, 1) else { continue };
        let prompt = ids(&golden(case).prompts[1])[..3].to_vec();
        let in_order = |program: &LoweredProgram| {
            let kernels = &program.levels[0].lowered.kernels;
            logits(program, &source, &prompt, |step, ranks, call| {
                run_ranks(&vec![step; ranks.len()], kernels, ranks, call, &RunOptions::with_workers(2))
            })
        };
        let wanted = in_order(&one).remove(0);
        let Some((split, _)) = lowered(case, quant, 2) else { continue };
        let found = in_order(&split);
        assert!(found[0] == found[1], "{case} in {quant}: the ranks have different logits");
        same(&format!("kernels of {case} in {quant}"), case, &floats(&wanted), &floats(&found[0]));
        let kernels = &split.levels[0].lowered.kernels;
        for schedule in WorkerSchedule::all_variants(3).into_iter().step_by(3) {
            let apart = logits(&split, &source, &prompt, |step, ranks, call| {
                run_ranks_interleaved(step, kernels, ranks, call, &schedule)
            });
            assert!(apart == found, "{case} in {quant}: {schedule:?}");
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Checks that ranks have the results of one. Sums of attention are in another order where a rank has fewer
/// query heads of a key head, which its kernels take together; everything else has the same bits.
#[track_caller]
fn same(what: &str, case: &str, one: &[f32], ranks: &[f32]) {
    assert_close(what, one, ranks, if case.starts_with("rwkv") { 0.0 } else { F32 });
}

/// A barrier that is left out before or behind an all-gather is seen.
#[test]
fn exchanges_need_their_barriers() {
    let Some((split, source)) = lowered("llama3-gqa-tied", "f32", 2) else { return };
    let prompt = ids(&golden("llama3-gqa-tied").prompts[1])[..3].to_vec();
    let kernels = &split.levels[0].lowered.kernels;
    let schedule = WorkerSchedule::all_variants(2)[0];
    let run = |missing: Option<isize>| {
        logits(&split, &source, &prompt, |step, ranks, call| {
            let mut step = step.clone();
            let is_exchange = |item: &StepItem| matches!(item, StepItem::AllGather(_));
            let at = step.items.iter().rposition(is_exchange).unwrap();
            if let Some(beside) = missing.and_then(|by| at.checked_add_signed(by)) {
                assert_eq!(step.items[beside], StepItem::Barrier, "beside the last exchange");
                step.items.remove(beside);
            }
            run_ranks_interleaved(&step, kernels, ranks, call, &schedule)
        })
    };
    let right = run(None);
    assert!(right[0] == right[1]);
    assert!(run(Some(-1)) != right, "the first worker sends what the second one has not made");
}

#[test]
fn ranks_that_differ_are_named() {
    let Some((split, source)) = lowered("rwkv4-hf", "f32", 2) else { return };
    let kernels = &split.levels[0].lowered.kernels;
    let decode = step(&split, "decode");
    let run = |other: &StepProgram, count: usize| {
        let mut ranks = fresh(&split, &source);
        for rank in &mut ranks {
            *rank.memory.base_memory(MemoryBase::Tokens) = 1_i32.to_le_bytes().to_vec();
            *rank.memory.base_memory(MemoryBase::Logits) =
                vec![0; 4 * source.model.config.architecture.vocab()];
        }
        let call = RankCall::One(SymValues::for_tokens(1));
        let steps = [decode, other];
        run_ranks(&steps[..count], kernels, &mut ranks[..count], call, &RunOptions::with_workers(1))
    };
    run(decode, 2).unwrap();
    assert!(matches!(run(decode, 1), Err(StepRunError::Alone { ranks: 2 })));
    let mut short = decode.clone();
    let last = short.items.iter().rposition(|i| matches!(i, StepItem::AllGather(_))).unwrap();
    short.items.truncate(last);
    let error = run(&short, 2).unwrap_err().to_string();
    assert!(error.contains("which rank 1 missed"), "{error}");
    let mut smaller = decode.clone();
    if let StepItem::AllGather(exchange) = &mut smaller.items[last] {
        exchange.shape.row_bytes /= 2;
    }
    let error = run(&smaller, 2).unwrap_err().to_string();
    assert!(error.contains("rank 1 joins 1 rows of"), "{error}");
}

#[test]
fn programs_of_ranks_print_and_parse() {
    for case in ["llama3-gqa-tied", "rwkv7-hf"] {
        let Some((split, _)) = lowered(case, "q4i8", 2) else { continue };
        let text = print_program(&split);
        assert!(text.contains("exchange"), "{case} exchanges nothing");
        let parsed = parse_program(&text).unwrap_or_else(|e| panic!("{case}: {e}"));
        assert!(print_program(&parsed) == text, "{case}: the text changes");
        mlcc_passes::verify::verify_program(&parsed).unwrap();
        let module = print_module(&split.module);
        assert!(print_module(&parse_module(&module).unwrap()) == module, "{case}: the module changes");
    }
}

/// Sums over ranks: kernels with workers apart between barriers and artifacts give what one rank gives,
/// within the tolerance, and every rank and number of threads the same bits.
#[test]
fn sums_over_ranks_are_close_to_one() {
    let folder = tempfile::tempdir().unwrap();
    for case in ["llama3-gqa-tied", "qwen3-moe"] {
        let Some(dir) = find(case) else { continue };
        let of = |ranks| {
            let options = options(&dir, "f32", first_backend(), ranks);
            BuildOptions { tp_mode: TpMode::Reduce, target: "x86-64-v3".into(), ..options }
        };
        let prompt = ids(&golden(case).prompts[1])[..3].to_vec();
        let ((one, source), (split, _)) = (program(&of(1), None), program(&of(2), None));
        let apart = |program: &LoweredProgram, schedule: &WorkerSchedule| {
            let kernels = &program.levels[0].lowered.kernels;
            logits(program, &source, &prompt, |step, ranks, call| {
                run_ranks_interleaved(step, kernels, ranks, call, schedule)
            })
        };
        let schedules = WorkerSchedule::all_variants(2);
        let (first, last) = (schedules[0], schedules[schedules.len() - 1]);
        let found = apart(&split, &first);
        assert!(found[0] == found[1] && apart(&split, &last) == found, "{case}: ranks or schedules differ");
        assert_close(case, &floats(&apart(&one, &first)[0]), &floats(&found[0]), F32);

        let build = |ranks: usize| {
            let options = BuildOptions { target: "cpu".into(), ..of(ranks) };
            artifact(&options, folder.path(), &format!("{case}-sums-{ranks}.so")).0
        };
        let prompt: Vec<i32> = golden(case).prompts.iter().flat_map(ids).cycle().take(12).collect();
        let wanted = texts(&load(&build(1), None, 1), &prompt);
        // Three do not divide the heads, so only some products are sums.
        for ranks in [2, 3] {
            let split = build(ranks);
            let found = [ranks, 2 * ranks].map(|threads| texts(&load(&split, None, threads), &prompt));
            assert!(bits(&found[0]) == bits(&found[1]), "{case}: threads change bits of {ranks} ranks");
            for (number, (one, found)) in wanted.iter().zip(&found[0]).enumerate() {
                assert_close(&format!("{case}, {ranks} ranks, call {number}"), one, found, F32);
            }
        }
    }
}

/// Gathers of codes: kernels with workers apart between barriers, and artifacts, have the bits of gathers of
/// floats, which are those of one rank where each has all queries of its key heads.
#[test]
fn codes_of_ranks_give_what_floats_give() {
    let folder = tempfile::tempdir().unwrap();
    // Parts of whole groups for up to four ranks.
    let config = json!({"model_type": "llama", "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 320, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let of = |ranks: usize, tp_mode: TpMode| {
        let mut options = options(folder.path(), "q4i8", first_backend(), ranks);
        options.request.random_weights = Some(7);
        BuildOptions { tp_mode, ..options }
    };
    let prompt = [1, 130, 201, 17, 63, 62, 5, 250, 3, 9, 180, 100];

    let [floats, codes] = [TpMode::Gather, TpMode::Codes].map(|mode| {
        let (program, source) = program(&BuildOptions { target: "x86-64-v3".into(), ..of(2, mode) }, None);
        let exchanges = |item: &&StepItem| matches!(item, StepItem::AllGather(_));
        let count = step(&program, "prefill").items.iter().filter(exchanges).count();
        let kernels = &program.levels[0].lowered.kernels;
        let apart = |schedule: &WorkerSchedule| {
            logits(&program, &source, &prompt[..6], |step, ranks, call| {
                run_ranks_interleaved(step, kernels, ranks, call, schedule)
            })
        };
        let schedules = WorkerSchedule::all_variants(2);
        let (found, last) = (apart(&schedules[0]), apart(&schedules[schedules.len() - 1]));
        assert!(found == last && found[0] == found[1], "{mode:?}: ranks or schedules differ");
        (count, found)
    });
    // Two of each layer are of codes, with their magnitudes.
    assert_eq!(codes.0, floats.0 + 2 * 2);
    assert!(codes.1 == floats.1, "kernels on codes have other bits");

    let build = |ranks: usize, mode: TpMode| {
        artifact(&of(ranks, mode), folder.path(), &format!("{ranks}-{}.so", mode.name())).0
    };
    let wanted = texts(&load(&build(1, TpMode::Gather), None, 1), &prompt);
    for ranks in [2, 4] {
        let split = build(ranks, TpMode::Codes);
        for threads in [ranks, 2 * ranks + 1] {
            let found = texts(&load(&split, None, threads), &prompt);
            assert!(bits(&found) == bits(&wanted), "{ranks} ranks, {threads} threads");
        }
    }
}

fn built(case: &str, quant: &str, backend: Backend, ranks: usize, folder: &Path) -> Option<PathBuf> {
    let options = options(&find(case)?, quant, backend, ranks);
    Some(artifact(&options, folder, &format!("{case}-{ranks}.so")).0)
}

/// Logits after pieces of a prompt and tokens alone.
fn texts(model: &Model, prompt: &[i32]) -> Vec<Vec<f32>> {
    let mut session = model.session().unwrap();
    let mut results = vec![session.prefill(&prompt[..4]).unwrap().to_vec()];
    results.extend(prompt[4..8].iter().map(|&id| session.decode(id).unwrap().to_vec()));
    results.push(session.prefill_logits(&prompt[..3]).unwrap().to_vec());
    let mut fork = session.fork().unwrap();
    let snapshot = session.snapshot().unwrap();
    results.push(session.decode(prompt[1]).unwrap().to_vec());
    results.push(fork.decode(prompt[1]).unwrap().to_vec());
    session.restore(&snapshot).unwrap();
    results.push(session.decode(prompt[1]).unwrap().to_vec());
    results.push(session.softmax(0.7).unwrap().to_vec());
    results
}

fn bits(results: &[Vec<f32>]) -> Vec<u32> {
    results.iter().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn artifacts_of_ranks_give_what_one_gives() {
    let folder = tempfile::tempdir().unwrap();
    for (i, backend) in backends().enumerate() {
        for (case, quant, ranks) in
            CASES.into_iter().skip(if i == 0 { 0 } else { 2 }).take(if i == 0 { CASES.len() } else { 1 })
        {
            let Some(one) = built(case, quant, backend, 1, folder.path()) else { continue };
            let Some(split) = built(case, quant, backend, ranks, folder.path()) else { continue };
            let prompt: Vec<i32> = golden(case).prompts.iter().flat_map(ids).cycle().take(12).collect();
            let wanted = texts(&load(&one, None, 1), &prompt);
            // A worker for each rank, two, and more than they can share evenly: not a bit differs.
            let found = [1, 2 * ranks, 2 * ranks + 1].map(|threads| {
                let model = load(&split, None, threads);
                assert_eq!(model.threads(), (threads / ranks).max(1) * ranks);
                texts(&model, &prompt)
            });
            let what = format!("{case} in {quant} on {ranks} ranks by {}", backend.name());
            assert!(found.iter().all(|f| bits(f) == bits(&found[0])), "{what}: threads change bits");
            for (number, (one, ranks)) in wanted.iter().zip(&found[0]).enumerate() {
                same(&format!("{what}, call {number}"), case, one, ranks);
            }
        }
    }
}

#[test]
fn sequences_of_ranks_together_equal_single_ones() {
    let folder = tempfile::tempdir().unwrap();
    for case in ["llama3-gqa-tied", "rwkv7-hf"] {
        let (Some(dir), Some(split)) = (find(case), built(case, "f32", first_backend(), 2, folder.path()))
        else {
            continue;
        };
        for threads in [2, 4] {
            let name = format!("{case} on two ranks, {threads} threads");
            together::compare(&name, threads, F32, &dir, &load(&split, None, threads));
        }
    }
}

/// Each rank has its part of the weights in a section of its own, and the graph is interpreted with those.
#[test]
fn an_artifact_has_the_weights_of_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let case = "llama3-gqa-tied";
    let Some(one) = built(case, "f32", first_backend(), 1, folder.path()) else { return };
    let Some(split) = built(case, "f32", first_backend(), 2, folder.path()) else { return };
    let (one, split) = (load(&one, None, 1), load(&split, None, 2));
    let section = |model: &Model, rank| model.section(&mlcc_runtime::weights_section(rank)).map(<[u8]>::len);
    let whole = section(&one, 0).unwrap();
    let parts = [0, 1].map(|rank| section(&split, rank).unwrap());
    assert_eq!(section(&split, 2), None);
    assert!(parts[0] == parts[1] && parts[0] * 100 < whole * 60, "{parts:?} of {whole}");
    assert_eq!(split.plan().ranks, 2);
    let prompt = ids(&golden(case).prompts[1])[..5].to_vec();
    let of =
        |model: &Model| StoredGraph::open(model).unwrap().logits(&prompt, PerturbedWeights::Unmoved).unwrap();
    assert!(bits(&[of(&one)]) == bits(&[of(&split)]), "the graphs have other bits");
}

#[test]
fn states_of_ranks_are_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    for case in ["llama3-gqa-tied", "rwkv7-hf"] {
        let Some(split) = built(case, "q4i8", first_backend(), 2, folder.path()) else { continue };
        let model = load(&split, None, 2);
        let mut session = model.session().unwrap();
        session.prefill(&[1, 5, 9, 2, 7]).unwrap();
        let file = folder.path().join("state");
        session.save_state(&file).unwrap();
        let wanted = session.decode(3).unwrap().to_vec();
        let mut other = model.session().unwrap();
        other.load_state(&file).unwrap();
        assert!(bits(&[other.decode(3).unwrap().to_vec()]) == bits(&[wanted]), "{case}");
    }
}

#[test]
fn too_few_workers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Some(split) = built("rwkv4-hf", "f32", first_backend(), 2, folder.path()) else { return };
    let workers = WorkerThreads::new(&LoadOptions { threads: Some(1), ..LoadOptions::default() }).unwrap();
    let options = LoadOptions { workers: Some(workers), ..LoadOptions::default() };
    let error = Model::load(&split, &options).err().unwrap();
    assert!(matches!(error, Error::RankWorkers { ranks: 2, workers: 1, .. }), "{error}");
}

/// Something that is asked for beside ranks.
type ModelChange = dyn Fn(&mut BuildOptions);

/// Parts that do not go with ranks are refused by name, and those that do not divide with the numbers that
/// do.
#[test]
fn what_does_not_go_with_ranks_is_named() {
    let Some(dir) = find("llama3-gqa-tied") else { return };
    let refused = |change: &ModelChange| {
        let mut options = options(&dir, "f32", first_backend(), 2);
        change(&mut options);
        let mut hooks = mlcc_driver::compile::BuildHooks {
            event: &mut |_| {},
            cancel: &std::sync::atomic::AtomicBool::new(false),
        };
        mlcc_driver::compile::build(&options, &mut hooks).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let changes: [(&ModelChange, &str); 3] = [
        (&|o| o.split_weights = true, "--split-weights"),
        (&|o| o.debug_taps = true, "--debug-taps"),
        (&|o| o.disabled_passes = vec!["shard".into()], "--disable-pass shard"),
    ];
    for (change, named) in changes {
        let error = refused(change);
        assert!(error.starts_with(&format!("--tensor-parallel 2 does not go with {named}")), "{error}");
    }
    let error = refused(&|o| {
        (o.ranks, o.tp_mode) = (4, TpMode::Reduce);
        (o.quant, o.quant_name) = (scheme("q4i8"), "q4i8".into());
    });
    assert!(error.contains("columns in groups of 32"), "{error}");
    assert!(error.contains("cannot be divided among 4 ranks; up to 16, these numbers work: 3, 5"), "{error}");
}
