//! Adapters in slots: sequences with one equal the merged model, others equal those without slots.

use std::path::{Path, PathBuf};

use mlcc_driver::compile::BuildOptions;
use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_ir::dim::SymValues;
use mlcc_models::golden::GoldenFile;
use mlcc_models::{AdapterRequest, AdapterSlots, TensorFactors, adapter_factors};
use mlcc_runtime::{Error, LoadedAdapter, LoraFactors, Model, OutputRows, Session, SessionInput};

use crate::cases::{artifact, assert_close, backends, feed, ids, load, options};
use crate::program::{case, fails_with, json, mlcc, text};
use crate::rank_processes::{self, LaunchedGroup};
use crate::rank_serving;
use crate::server::ServerProcess;
use crate::step::StepRandom;
use serde_json::json;

const SLOTS: AdapterSlots = AdapterSlots { slots: 2, rank: 16 };

pub fn of_lora(quant: &str) -> BuildOptions {
    let mut options = options("lora", quant);
    options.request.model = case("lora").join("base").display().to_string();
    options.batch = Some(4);
    options
}

pub fn with_slots(options: &BuildOptions) -> BuildOptions {
    BuildOptions { adapters: Some(SLOTS), ..options.clone() }
}

fn merged(options: &BuildOptions, adapter: &AdapterRequest) -> BuildOptions {
    let mut options = options.clone();
    options.request.adapters = vec![adapter.clone()];
    options
}

pub fn peft(scale: f64) -> AdapterRequest {
    AdapterRequest { directory: case("lora").join("adapter"), scale }
}

fn given(found: &[TensorFactors]) -> Vec<LoraFactors<'_>> {
    found.iter().map(|f| LoraFactors { tensor: &f.tensor, rank: f.rank, a: &f.a, b: &f.b }).collect()
}

pub fn loaded(model: &Model, request: &AdapterRequest) -> LoadedAdapter {
    let known: Vec<&str> = model.adapter_tensors().collect();
    let found = adapter_factors(request, |tensor| known.contains(&tensor)).unwrap();
    model.load_adapter(&request.name(), &given(&found)).unwrap()
}

pub fn session(model: &Model, adapter: Option<&LoadedAdapter>) -> Session {
    let mut session = model.session().unwrap();
    session.set_adapter(adapter).unwrap();
    session
}

/// A file of tensors whose values are small and differ.
fn adapter(folder: &Path, name: &str, tensors: &[(String, [usize; 2])], config: &str) -> AdapterRequest {
    let directory = folder.join(name);
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("adapter_config.json"), config).unwrap();
    let (mut header, mut data, mut random) = (Vec::new(), Vec::new(), StepRandom(7));
    for (name, [rows, columns]) in tensors {
        let begin = data.len();
        for _ in 0..rows * columns {
            data.extend((random.below(2001) as f32 / 10_000.0 - 0.1).to_le_bytes());
        }
        let offsets = format!("[{begin}, {}]", data.len());
        header.push(format!(
            r#""base_model.model.{name}": {{"dtype": "F32", "shape": [{rows}, {columns}], "data_offsets": {offsets}}}"#
        ));
    }
    let header = format!("{{{}}}", header.join(", "));
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(directory.join("adapter_model.safetensors"), file).unwrap();
    AdapterRequest { directory, scale: 1.0 }
}

/// Factors of all tensors that slots are for.
fn of_all(folder: &Path, model: &Model, rank: usize) -> AdapterRequest {
    let tensors = model.adapter_tensors().flat_map(|tensor| {
        let dims = |end: &str| {
            let name = format!("{tensor}{end}");
            model.table().params.iter().find(|p| p.name == name).map(|p| p.dims.clone()).unwrap()
        };
        let input = dims(".lora_A")[1] as usize;
        let out = dims(".lora_B")[0] as usize / (SLOTS.slots + 1);
        let module = tensor.strip_suffix(".weight").unwrap();
        [(format!("{module}.lora_A.weight"), [rank, input]), (format!("{module}.lora_B.weight"), [out, rank])]
    });
    adapter(folder, "all", &tensors.collect::<Vec<_>>(), r#"{"peft_type": "LORA", "lora_alpha": 3, "r": 3}"#)
}

#[test]
fn a_sequence_with_the_adapter_gives_what_peft_gives() {
    let golden = GoldenFile::read(&case("lora").join("golden.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for backend in backends() {
        let options = BuildOptions { backend, ..with_slots(&of_lora("f32")) };
        let path = artifact(&options, folder.path(), &format!("{backend:?}.so")).0;
        let model = load(&path, None, 2);
        assert_eq!((model.adapter_slots(), model.adapter_rank()), (2, 16));
        let adapter = loaded(&model, &peft(1.0));
        let mut session = session(&model, Some(&adapter));
        for prompt in &golden.prompts {
            let ids = ids(prompt);
            for piece in [ids.len(), 1, 3] {
                let found = feed(&mut session, &ids, piece);
                assert_close("the adapter", &prompt.logits_last, &found, 1e-4);
            }
            let mut text = Vec::new();
            for _ in 0..prompt.binding_greedy(1e-4).len() {
                text.push(crate::cases::argmax(session.logits()));
                session.decode(text[text.len() - 1] as i32).unwrap();
            }
            assert_eq!(text, prompt.binding_greedy(1e-4));
            session.reset().unwrap();
            let all = session.prefill_logits(&ids).unwrap();
            assert_close("all rows", &prompt.logits_last, &all[all.len() - model.vocab()..], 1e-4);
        }
    }
}

/// The graph itself, with the factors in the matrices that a sequence takes at first.
#[test]
fn the_graph_with_factors_gives_what_peft_gives() {
    let options = with_slots(&of_lora("f32"));
    let source = mlcc_driver::compile::BuildSource::open(&options).unwrap();
    let architecture = &source.model.config.architecture;
    let module = mlcc_driver::model::build_module_with_slots("lora", architecture, 64, 1, SLOTS).unwrap();
    let found = adapter_factors(&peft(1.0), |_| true).unwrap();
    let tensor = |name: &str| {
        if let Some(end) = [".lora_A", ".lora_B"].into_iter().find(|end| name.ends_with(end)) {
            let of = found.iter().find(|f| Some(f.tensor.as_str()) == name.strip_suffix(end))?;
            let (rows, all) = (SLOTS.slots + 1, if end == ".lora_A" { &of.a } else { &of.b });
            let out = of.b.len() / of.rank;
            let columns = if end == ".lora_A" { of.a.len() / of.rank } else { SLOTS.rank };
            let rows = rows * if end == ".lora_A" { SLOTS.rank } else { out };
            let mut values = vec![0.0; rows * columns];
            let own = if end == ".lora_A" { columns } else { of.rank };
            for (to, from) in values.chunks_mut(columns).zip(all.chunks(own)) {
                to[..own].copy_from_slice(from);
            }
            return Some(Tensor::f32(&[rows, columns], &values));
        }
        let data = source.checkpoint.read(name).ok()?;
        Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
    };
    let interpreter = Interpreter::new(&module, |id| param_value(&module.params[id], &tensor).unwrap());
    let golden = GoldenFile::read(&case("lora").join("golden.json")).unwrap();
    let prompt = golden.prompts.iter().min_by_key(|prompt| prompt.input_ids.len()).unwrap();
    let (ids, mut states) = (ids(prompt), StateValues::new(&module).unwrap());
    let sizes = SymValues::for_tokens(ids.len() as i64);
    let out = interpreter.run_named("adapted_prefill", &[Tensor::ids(&ids)], &mut states, sizes).unwrap();
    assert_close("the graph", &prompt.logits_last, &out[0].to_f32(), 1e-4);
}

/// Several adapters in one step, and a sequence without one: each as alone, the last as without slots.
#[test]
fn sequences_of_a_batch_have_adapters_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let texts: [&[i32]; 3] = [&[5, 9, 200, 31, 7, 8], &[250, 3, 3, 17], &[60, 61, 62, 5, 9]];
    for quant in ["f32", "q8i8"] {
        let plain = BuildOptions { chunk: Some(16), ..of_lora(quant) };
        let path = |options: &BuildOptions, name: &str| artifact(options, folder.path(), name).0;
        let model = load(&path(&with_slots(&plain), &format!("{quant}.so")), None, 2);
        let without = load(&path(&plain, &format!("{quant}-plain.so")), None, 2);
        let adapters = [loaded(&model, &peft(1.0)), loaded(&model, &peft(-2.0))];
        let chosen = [Some(&adapters[0]), None, Some(&adapters[1])];
        let run = |model: &Model, chosen: [Option<&LoadedAdapter>; 3]| {
            let mut sessions = chosen.map(|adapter| session(model, adapter));
            let mut batch = model.batch(3).unwrap();
            let mut rows: Vec<SessionInput> = sessions
                .iter_mut()
                .zip(texts)
                .map(|(session, tokens)| SessionInput { session, tokens, outputs: OutputRows::All })
                .collect();
            let mut logits = batch.step(&mut rows).unwrap().to_vec();
            drop(rows);
            // One token of each, by the code for that.
            let [a, b, c] = &mut sessions;
            logits.extend(batch.decode(&mut [a, b, c], &[1, 2, 3]).unwrap());
            logits
        };
        let rows = |logits: &[f32], text: usize| {
            let (before, vocab) = (texts[..text].iter().map(|t| t.len()).sum::<usize>(), model.vocab());
            let all: usize = texts.iter().map(|t| t.len()).sum();
            let of_step = &logits[before * vocab..(before + texts[text].len()) * vocab];
            [of_step, &logits[(all + text) * vocab..][..vocab]].concat()
        };
        let together = run(&model, chosen);
        assert_eq!(
            rows(&together, 1),
            rows(&run(&without, [None; 3]), 1),
            "{quant}: the one without an adapter"
        );
        // Weights of 8 bits are quantized with the adapter in them, so those of a merged model are others.
        if quant != "f32" {
            continue;
        }
        for (text, request) in [(0, peft(1.0)), (2, peft(-2.0))] {
            let name = format!("{quant}-{text}.so");
            let alone = load(&path(&merged(&plain, &request), &name), None, 2);
            let expected = rows(&run(&alone, [None; 3]), text);
            assert_close(&name, &expected, &rows(&together, text), 1e-5);
        }
    }
}

/// Other families, with tensors of odd sizes; and a session that has none gives the bits of an artifact
/// without slots.
#[test]
fn products_of_other_families_take_adapters() {
    for name in ["qwen2", "lfm2"] {
        let folder = tempfile::tempdir().unwrap();
        let plain = options(name, "f32");
        let model = load(&artifact(&with_slots(&plain), folder.path(), "slots.so").0, None, 2);
        let request = of_all(folder.path(), &model, 3);
        let adapter = loaded(&model, &request);
        let alone = load(&artifact(&merged(&plain, &request), folder.path(), "merged.so").0, None, 2);
        let without = load(&artifact(&plain, folder.path(), "plain.so").0, None, 2);
        let tokens = [3, 40, 17, 5, 5, 21, 60];
        let expected = feed(&mut alone.session().unwrap(), &tokens, 4);
        assert_close(name, &expected, &feed(&mut session(&model, Some(&adapter)), &tokens, 4), 1e-5);
        let bits = feed(&mut without.session().unwrap(), &tokens, 4);
        assert_eq!(bits, feed(&mut session(&model, None), &tokens, 4), "{name} without an adapter");
        assert_ne!(expected, bits, "{name}: the adapter changes something");
    }
}

/// Ranks that are threads: alone, copied and in a batch what one rank gives.
#[test]
fn ranks_have_adapters() {
    let folder = tempfile::tempdir().unwrap();
    for quant in ["f32", "q4i8"] {
        let plain = BuildOptions { chunk: Some(16), ..with_slots(&of_lora(quant)) };
        let built = |ranks: usize| {
            let options = BuildOptions { ranks, ..plain.clone() };
            artifact(&options, folder.path(), &format!("{quant}-{ranks}.so")).0
        };
        let (one, two) = (load(&built(1), None, 2), load(&built(2), None, 4));
        assert_eq!(two.plan().ranks, 2);
        let texts = |model: &Model| {
            let adapters = [loaded(model, &peft(1.0)), loaded(model, &peft(-2.0))];
            let mut sessions =
                [Some(&adapters[0]), None, Some(&adapters[1])].map(|adapter| session(model, adapter));
            let mut logits = Vec::new();
            for session in &mut sessions {
                logits.extend(feed(session, &[5, 9, 200, 31, 7, 8, 60], 3));
                let mut fork = session.fork().unwrap();
                logits.extend(fork.decode(17).unwrap());
            }
            let mut batch = model.batch(3).unwrap();
            let [a, b, c] = &mut sessions;
            logits.extend(batch.decode(&mut [a, b, c], &[1, 2, 3]).unwrap());
            logits
        };
        let (one, two) = (texts(&one), texts(&two));
        // Sums of attention are in another order, and codes of activations may cross a rounding edge.
        assert_close(quant, &one, &two, if quant == "f32" { 1e-5 } else { 2e-2 });
    }
}

/// Rank 0 gives the other process what it reads: both write what threads of one process write.
#[test]
fn ranks_that_are_processes_have_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = rank_processes::plugin(folder.path(), 1) else { return };
    let options = BuildOptions { ranks: 2, ..with_slots(&of_lora("f32")) };
    let path = artifact(&options, folder.path(), "two.so").0;
    let tokenizer = bytes(folder.path());
    let [path, tokenizer] = [&path, &tokenizer].map(|path| path.to_str().unwrap());
    let run = ["run", path, "--tokenizer", tokenizer, "-p", "text", "-n", "12", "--greedy", "-q"];
    let adapter = |scale: f64| format!("{}={scale}", peft(scale).directory.display());
    let (plus, minus) = (adapter(1.0), adapter(-2.0));
    let mut texts = Vec::new();
    for flags in [&[][..], &["--lora", &plus], &["--lora", &minus]] {
        let threads = text(mlcc().args(run).args(flags).args(["-t", "2"]));
        let each = [&run[..], flags, &["-t", "1"]].concat();
        let (outputs, _) = LaunchedGroup::start_with(&plugin, &[&each, &each], None, &|_| Vec::new()).wait();
        for output in &outputs {
            assert!(output.status.success(), "{flags:?}: {}", rank_processes::stderr(output));
        }
        let processes = rank_processes::stdout(&outputs[0]);
        assert_eq!(processes, threads, "{flags:?}");
        texts.push(processes);
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
}

/// A client's request loads an adapter on both ranks of a server; sequences with and without it go together.
#[test]
fn processes_that_serve_load_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = rank_processes::plugin(folder.path(), 1) else { return };
    let options = BuildOptions { ranks: 2, ..with_slots(&of_lora("f32")) };
    let path = artifact(&options, folder.path(), "two.so").0;
    let (tokenizer, adapters) = (bytes(folder.path()), case("lora"));
    let [path, tokenizer, adapters] = [&path, &tokenizer, &adapters].map(|path| path.to_str().unwrap());
    let serve = ["serve", path, "--tokenizer", tokenizer, "--port", "0", "--json", "-t", "1"];
    let serve = [&serve[..], &["--alias", "base", "--lora-dir", adapters]].concat();
    let mut group = LaunchedGroup::start_with(&plugin, &[&serve, &serve], None, &|_| Vec::new());
    let client = rank_serving::ready(&mut group);
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "text", "max_tokens": 12, "temperature": 0});
        client.post("/v1/completions", &body).json()["choices"][0]["text"].clone()
    };
    let run = |lora: &[&str]| {
        let run = ["run", path, "--tokenizer", tokenizer, "-p", "text", "-n", "12", "--greedy", "--no-echo"];
        let out = text(mlcc().args(run).args(["-t", "2"]).args(lora));
        out.strip_suffix('\n').unwrap().to_owned()
    };
    let plain = run(&[]);
    assert_eq!(ask("base"), plain);
    let style = json!({"lora_name": "style", "lora_path": "adapter"});
    assert_eq!(client.post("/v1/load_lora_adapter", &style).status, 200);
    let adapted = run(&["--lora", peft(1.0).directory.to_str().unwrap()]);
    assert_ne!(adapted, plain);
    let together = std::thread::scope(|scope| {
        let threads = ["style", "base", "style"].map(|name| scope.spawn(|| ask(name)));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(together, [&adapted, &plain, &adapted].map(|text| json!(text)));
    rank_serving::signal(&group, "-TERM", &[1, 0]);
    for output in group.wait().0 {
        assert_eq!(output.status.code(), Some(0), "{}", rank_processes::stderr(&output));
    }
}

#[test]
fn copies_of_a_sequence_keep_its_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let model = load(&artifact(&with_slots(&of_lora("f32")), folder.path(), "a.so").0, None, 2);
    let (one, other) = (loaded(&model, &peft(1.0)), loaded(&model, &peft(3.0)));
    let mut first = session(&model, Some(&other));
    let expected = feed(&mut first, &[4, 5, 6, 7, 8], 5);
    let saved = folder.path().join("state");
    feed(&mut first, &[4, 5, 6], 3);
    first.save_state(&saved).unwrap();
    let snapshot = first.snapshot().unwrap();
    let mut twin = first.fork().unwrap();
    assert_close("a fork", &expected, twin.prefill(&[7, 8]).unwrap(), 1e-5);
    assert!(matches!(twin.set_adapter(None), Err(Error::AdapterTooLate { past: 5 })));
    // The same adapter in another slot: the number in the file is not that of a slot.
    drop((first, twin, other));
    let moved = {
        let taken = loaded(&model, &peft(5.0));
        drop(one);
        let moved = loaded(&model, &peft(3.0));
        drop(taken);
        moved
    };
    let mut second = session(&model, Some(&moved));
    second.load_state(&saved).unwrap();
    assert_close("a file", &expected, second.prefill(&[7, 8]).unwrap(), 1e-5);
    second.restore(&snapshot).unwrap();
    assert_close("a snapshot", &expected, second.prefill(&[7, 8]).unwrap(), 1e-5);
    let mut none = session(&model, None);
    assert!(matches!(none.load_state(&saved), Err(Error::StateFile { .. })));
    assert!(matches!(none.restore(&snapshot), Err(Error::ForeignSnapshot)));
}

#[test]
fn adapters_that_do_not_fit_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let model = load(&artifact(&with_slots(&of_lora("f32")), folder.path(), "a.so").0, None, 1);
    let q = "model.layers.0.self_attn.q_proj";
    let known: Vec<&str> = model.adapter_tensors().collect();
    let config = r#"{"peft_type": "LORA", "lora_alpha": 2, "r": 2}"#;
    let pair = |module: &str, out: usize, input: usize| {
        let name = |end: &str| format!("{module}.lora_{end}.weight");
        vec![(name("A"), [2, input]), (name("B"), [out, 2])]
    };
    let refused = |name: &str, tensors: &[(String, [usize; 2])], parts: &[&str]| {
        let request = adapter(folder.path(), name, tensors, config);
        let error = adapter_factors(&request, |tensor| known.contains(&tensor)).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused("head", &pair("lm_head", 288, 64), &["lm_head", "no slot", "--lora"]);
    let magnitude = (format!("{q}.lora_magnitude_vector"), [64, 1]);
    refused("dora", &[pair(q, 64, 64), vec![magnitude]].concat(), &["magnitude", "DoRA"]);
    let saved = ("model.norm.weight".to_string(), [1, 64]);
    refused("saved", &[pair(q, 64, 64), vec![saved]].concat(), &["model.norm.weight", "modules_to_save"]);

    let tensor = format!("{q}.weight");
    let fit = |rank: usize, input: usize| {
        let (a, b) = (vec![0.5; rank * input], vec![0.5; 64 * rank]);
        model.load_adapter("a", &[LoraFactors { tensor: &tensor, rank, a: &a, b: &b }])
    };
    let error = |result: Result<LoadedAdapter, Error>| result.unwrap_err().to_string();
    assert!(error(fit(17, 64)).contains("--lora-rank 17"));
    assert!(error(fit(2, 65)).contains("another base"));
    let kept = [fit(16, 64).unwrap(), fit(1, 64).unwrap()];
    assert!(error(fit(2, 64)).contains("all 2 slots"));
    drop(kept);
    let adapter = fit(2, 64).unwrap();
    let other = load(model.artifact().path(), None, 1);
    let foreign = other.session().unwrap().set_adapter(Some(&adapter));
    assert!(matches!(foreign, Err(Error::ForeignAdapter { .. })));
}

#[test]
fn flags_of_slots_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let base = case("lora").join("base");
    let build = |model: &PathBuf, flags: &[&str]| {
        let mut command = mlcc();
        command.arg("build").arg("-m").arg(model).args(flags).arg("-o").arg(folder.path().join("a.so"));
        command
    };
    build(&base, &["--lora-rank", "4"]).assert().code(2);
    build(&base, &["--lora-slots", "0"]).assert().code(2);
    fails_with(
        &mut build(&base, &["--lora-slots", "2", "--target", "cuda", "--tensor-parallel", "2"]),
        &["--lora-slots", "processes"],
    );
    let sums = ["--lora-slots", "2", "--tensor-parallel", "2", "--tp-mode", "reduce"];
    fails_with(&mut build(&base, &sums), &["--tp-mode reduce", "use gather"]);
    fails_with(&mut build(&base, &["--lora-slots", "2", "--debug-taps"]), &["--debug-taps"]);
    fails_with(&mut build(&case("rwkv4-hf"), &["--lora-slots", "2"]), &["--lora-slots", "no product"]);
}

/// A tokenizer whose tokens are the bytes, in tiktoken's form.
fn bytes(folder: &Path) -> PathBuf {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |value: usize| DIGITS[value] as char;
    let line = |byte: usize| format!("{}{}== {byte}\n", digit(byte >> 2), digit((byte & 3) << 4));
    let path = folder.join("bytes.tiktoken");
    std::fs::write(&path, (0..256).map(line).collect::<String>()).unwrap();
    path
}

#[test]
fn run_and_chat_choose_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let plain = of_lora("f32");
    let path = |options: &BuildOptions, name: &str| artifact(options, folder.path(), name).0;
    let (slots, adapter) = (path(&with_slots(&plain), "slots.so"), peft(1.0).directory);
    let (tokenizer, adapter) = (bytes(folder.path()), adapter.to_str().unwrap());
    let run = |artifact: &Path, flags: &[&str]| {
        let mut command = mlcc();
        command.arg("run").arg(artifact).arg("--tokenizer").arg(&tokenizer);
        command.args(["-p", "some text", "-n", "8", "--greedy"]).args(flags);
        command
    };
    let merged = path(&merged(&plain, &peft(1.0)), "merged.so");
    let of =
        |artifact: &Path, flags: &[&str]| run(artifact, flags).assert().success().get_output().stdout.clone();
    assert_eq!(of(&slots, &["--lora", adapter]), of(&merged, &[]));
    let without = path(&plain, "plain.so");
    assert_eq!(of(&slots, &[]), of(&without, &[]));
    fails_with(&mut run(&without, &["--lora", adapter]), &["plain.so", "--lora-slots"]);
    let mut chat = mlcc();
    chat.arg("chat").arg(&without).arg("--tokenizer").arg(&tokenizer).args(["--template", "plain"]);
    fails_with(chat.args(["--lora", adapter]), &["plain.so", "--lora-slots"]);
    assert!(text(mlcc().arg("inspect").arg(&slots)).contains("2 slots of rank 16"));
}

/// Texts of several adapters and of none, together, are those of `run`; adapters share no prefixes.
#[test]
fn serve_has_adapters_as_models() {
    let folder = tempfile::tempdir().unwrap();
    let slots = artifact(&with_slots(&of_lora("f32")), folder.path(), "slots.so").0;
    let (tokenizer, adapter) = (bytes(folder.path()), peft(1.0).directory);
    let (tokenizer, adapter) = (tokenizer.to_str().unwrap(), adapter.to_str().unwrap());
    let (style, strong) = (format!("style={adapter}"), format!("strong={adapter}=-3"));
    let flags = ["--tokenizer", tokenizer, "-t", "2", "--alias", "base", "--lora", &style, "--lora", &strong];
    let server = ServerProcess::of(&[&slots], &flags);
    let prompt = "some text that is long enough to be kept";
    let run = |lora: &[&str]| {
        let mut command = mlcc();
        command.arg("run").arg(&slots).args(["--tokenizer", tokenizer, "-p", prompt, "-n", "12", "--greedy"]);
        let out = text(command.arg("--no-echo").args(lora));
        out.strip_suffix('\n').unwrap().to_owned()
    };
    let (scaled, names) = (format!("{adapter}=-3"), ["base", "style", "strong"]);
    let expected = [run(&[]), run(&["--lora", adapter]), run(&["--lora", &scaled])];
    assert!(expected[0] != expected[1] && expected[1] != expected[2], "{expected:?}");
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0});
        server.ask("/v1/completions", &body)
    };
    for cached in [false, true] {
        let found = std::thread::scope(|scope| {
            let ask = &ask;
            let threads = names.map(|name| scope.spawn(move || ask(name)));
            threads.map(|thread| thread.join().unwrap())
        });
        for ((name, answer), expected) in names.iter().zip(&found).zip(&expected) {
            assert_eq!((&answer["model"], &answer["choices"][0]["text"]), (&json!(name), &json!(expected)));
            let known = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert_eq!(known > 0, cached, "{name}: {known}");
        }
    }
    let list = server.get("/v1/models").json();
    assert_eq!(list["data"][1]["parent"], "base");
}

/// Adapters come and go more often than there are slots, and each gives what `run` gives.
#[test]
fn clients_of_serve_load_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let slots = artifact(&with_slots(&of_lora("f32")), folder.path(), "slots.so").0;
    let (tokenizer, adapters) = (bytes(folder.path()), case("lora"));
    let (tokenizer, below) = (tokenizer.to_str().unwrap(), adapters.to_str().unwrap());
    let server = ServerProcess::of(
        &[&slots],
        &["--tokenizer", tokenizer, "-t", "2", "--alias", "base", "--lora-dir", below],
    );
    let prompt = "some text that is long enough to be kept";
    let mut command = mlcc();
    command.arg("run").arg(&slots).args(["--tokenizer", tokenizer, "-p", prompt, "-n", "12", "--greedy"]);
    let expected = text(command.arg("--no-echo").arg("--lora").arg(peft(1.0).directory));
    let change = |what: &str, name: &str| {
        let body = json!({"lora_name": name, "lora_path": "adapter"});
        let body = if what == "load" { body } else { json!({"lora_name": name}) };
        server.post(&format!("/v1/{what}_lora_adapter"), &body)
    };
    let ask = |name: &str| {
        let body = json!({"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0});
        server.ask("/v1/completions", &body)["choices"][0]["text"].clone()
    };
    assert_eq!(change("load", "first").status, 200);
    let bare = ask("base");
    for name in ["a", "b", "c"] {
        assert_eq!(change("load", name).status, 200);
        assert_eq!(ask(name), json!(expected.strip_suffix('\n').unwrap()), "{name}");
        let full = change("load", "more");
        assert_eq!((full.status, full.body.contains("all 2 slots")), (422, true), "{}", full.body);
        assert_eq!(change("unload", name).status, 200);
        // The request that asked for the text may still have it.
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    assert_eq!(ask("base"), bare);
    let mut nowhere = mlcc();
    nowhere.arg("serve").arg(&slots).args(["--tokenizer", tokenizer, "--lora-dir", tokenizer]);
    nowhere.assert().code(2);
}

#[test]
fn adapters_of_serve_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let plain = of_lora("f32");
    let path = |options: &BuildOptions, name: &str| artifact(options, folder.path(), name).0;
    let (slots, without) = (path(&with_slots(&plain), "slots.so"), path(&plain, "plain.so"));
    let (tokenizer, adapter) = (bytes(folder.path()), peft(1.0).directory);
    let adapter = adapter.to_str().unwrap();
    let serve = |artifact: &Path, names: &[&str]| {
        let mut command = mlcc();
        command.arg("serve").arg(artifact).arg("--tokenizer").arg(&tokenizer).args(["--port", "0"]);
        for name in names {
            command.args(["--lora", &format!("{name}={adapter}")]);
        }
        command
    };
    fails_with(&mut serve(&without, &["a"]), &["plain.so", "--lora-slots"]);
    fails_with(&mut serve(&slots, &["a", "b", "c"]), &["all 2 slots"]);
    serve(&slots, &["slots"]).assert().code(2);
    serve(&slots, &["a", "a"]).assert().code(2);
    serve(&slots, &[""]).assert().code(2);
    let mut nameless = serve(&slots, &[]);
    nameless.args(["--lora", adapter]).assert().code(2);
    let mut nothing = mlcc();
    nothing.arg("serve").arg("--models").arg(folder.path()).args(["--lora", &format!("a={adapter}")]);
    nothing.assert().code(2);
}

#[test]
fn eval_measures_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let plain = of_lora("f32");
    let path = |options: &BuildOptions, name: &str| artifact(options, folder.path(), name).0;
    let slots = path(&with_slots(&plain), "slots.so");
    let merged = path(&merged(&plain, &peft(1.0)), "merged.so");
    let (tokenizer, adapter) = (bytes(folder.path()), peft(1.0).directory);
    let file = folder.path().join("text");
    std::fs::write(&file, "The quick brown fox jumps over the lazy dog. ".repeat(4)).unwrap();
    let perplexity = |artifact: &Path, lora: Option<&Path>| {
        let mut command = mlcc();
        command.arg("eval").arg(artifact).arg("--tokenizer").arg(&tokenizer).arg("--text").arg(&file);
        if let Some(lora) = lora {
            command.arg("--lora").arg(lora);
        }
        json(command.args(["--context", "32", "--json"]))["perplexity"].as_f64().unwrap()
    };
    let (expected, found) = (perplexity(&merged, None), perplexity(&slots, Some(&adapter)));
    assert!((found / expected - 1.0).abs() < 1e-4, "{found} for {expected}");
    let base = perplexity(&slots, None);
    assert!((base / expected - 1.0).abs() > 1e-3, "the adapter changes something: {base}, {expected}");
    let without = path(&plain, "plain.so");
    let mut refused = mlcc();
    refused.arg("eval").arg(&without).arg("--tokenizer").arg(&tokenizer).arg("--text").arg(&file);
    refused.args(["--context", "32"]);
    fails_with(refused.arg("--lora").arg(&adapter), &["plain.so", "--lora-slots"]);
}
