//! Models that are split among ranks with sums over ranks: within a tolerance of one rank, and all ranks with
//! the same bits. The choice of `auto`, and the effect of faults in all-gathers.

use super::shard::{ShardedFamily, bits, cases, exchanges, llama, rwkv7};
use mlcc_interp::graph::{AllGatherFault, FaultInjector, GraphError, RankError, RankMessage, Tensor};
use mlcc_ir::module::{Module, ParamSource};
use mlcc_passes::{PIPELINE, PassError, PassOptions, QuantScheme, TpMode};
use mlcc_target::ExchangeCost;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) fn options(ranks: usize, quant: &str, mode: TpMode) -> PassOptions {
    let mut options = PassOptions::new(vec![], 16);
    (options.ranks, options.quant, options.tp_mode) = (ranks, QuantScheme::from_name(quant).unwrap().0, mode);
    options
}

fn reduced(model: &ShardedFamily, ranks: usize, quant: &str) -> Module {
    model.with_notes(options(ranks, quant, TpMode::Reduce), &[]).unwrap_or_else(|e| panic!("{e}")).0
}

/// The largest difference between results, over the largest of them.
fn difference(wanted: &[Vec<f32>], found: &[Vec<f32>]) -> f32 {
    let all = || wanted.iter().flatten().zip(found.iter().flatten());
    let largest = all().map(|(x, _)| x.abs()).fold(f32::MIN_POSITIVE, f32::max);
    assert_eq!(
        wanted.iter().map(Vec::len).collect::<Vec<_>>(),
        found.iter().map(Vec::len).collect::<Vec<_>>()
    );
    all().map(|(x, y)| (x - y).abs()).fold(0.0, f32::max) / largest
}

/// Tolerance of f32: sums in another order.
const F32: f32 = 2e-5;
/// Tolerance of codes: a value that differs by a rounding may get the next code.
const CODES: f32 = 2e-2;

/// All ranks have the same bits, close to those of one.
fn check(what: &str, model: &ShardedFamily, quant: &str, ranks: usize) -> Module {
    check_without(what, model, quant, ranks, &[])
}

/// The same without the passes `off`.
fn check_without(what: &str, model: &ShardedFamily, quant: &str, ranks: usize, off: &[&str]) -> Module {
    let one = model.compiled(1, quant, off).unwrap();
    let wanted = &model.results(&one, 1)[0];
    let split = model.with_notes(options(ranks, quant, TpMode::Reduce), off);
    let split = split.unwrap_or_else(|e| panic!("{what} in {quant}: {e}")).0;
    let found = model.results(&split, ranks);
    let same = found.iter().all(|of_rank| bits(of_rank) == bits(&found[0]));
    assert!(same, "{what} in {quant}: {ranks} ranks differ");
    let (most, is) = (if quant.ends_with("i8") { CODES } else { F32 }, difference(wanted, &found[0]));
    assert!(is <= most, "{what} in {quant} on {ranks} ranks: {is} of the largest");
    split
}

/// Sizes whose parts have whole groups of activations for up to four ranks.
pub(crate) fn wide(case: &str, fields: &Value) -> ShardedFamily {
    let mut all = json!({
        "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "head_dim": 64,
        "intermediate_size": 512, "num_hidden_layers": 2
    });
    for (name, value) in fields.as_object().unwrap() {
        all[name] = value.clone();
    }
    ShardedFamily::new(case, all)
}

#[test]
fn llama_has_two_sums_a_layer() {
    let model = wide("llama3-gqa-tied", &json!({}));
    for quant in ["f32", "q4i8"] {
        for ranks in [2, 4] {
            let split = check("llama", &model, quant, ranks);
            // Beside the layers: the embedding, and the logits.
            for function in ["prefill", "decode", "decode_batch", "step"] {
                assert_eq!(exchanges(&split, function), 2 * 2 + 2, "{function}");
            }
            let columns = split.params.values().filter(|p| p.name.ends_with(".columns")).count();
            assert_eq!(columns, 2 * 2, "products split by columns");
        }
    }
}

#[test]
fn rwkv_and_experts() {
    let split = check("rwkv7", &rwkv7(), "f32", 2);
    assert_eq!(exchanges(&split, "decode"), 2 * 2 + 2);
    let experts = json!({"moe_intermediate_size": 256, "mlp_only_layers": []});
    let experts = wide("qwen3-moe", &experts);
    for (quant, ranks) in [("f32", 2), ("q4i8", 2), ("f32", 4)] {
        let split = check("qwen3-moe", &experts, quant, ranks);
        // The results of the experts are one sum, whatever their number.
        assert_eq!(exchanges(&split, "decode"), 2 * 2 + 2, "{quant}");
    }
}

/// Whatever pass is left out, sums of two and of four ranks stay close to one rank.
#[test]
fn each_pass_off() {
    let (llama, rwkv7) = (wide("llama3-gqa-tied", &json!({})), rwkv7());
    let graph = PIPELINE.iter().take_while(|p| p.name != "lower");
    for pass in graph.filter(|p| p.optional && p.name != "shard") {
        let what = format!("without {}", pass.name);
        for ranks in [2, 4] {
            check_without(&format!("llama {what}"), &llama, "f32", ranks, &[pass.name]);
            check_without(&format!("rwkv7 {what}"), &rwkv7, "f32", ranks, &[pass.name]);
        }
        check_without(&format!("llama {what}"), &llama, "q4i8", 2, &[pass.name]);
    }
}

/// Columns of a rank are those of the whole, packed with the same codes.
#[test]
fn columns_of_ranks_are_those_of_the_whole() {
    let model = wide("llama3-gqa-tied", &json!({}));
    let split = model.with_notes(options(4, "q4i8", TpMode::Reduce), &["merge_projections"]).unwrap().0;
    let mut checked = 0;
    for param in split.params.values().filter(|p| p.name.ends_with(".columns")) {
        let ParamSource::Ranks(parts) = &param.source else { panic!("{} has no parts", param.name) };
        let Some(ParamSource::ColumnRange(range, source)) = parts.first() else { panic!("{}", param.name) };
        let mut whole = param.clone();
        whole.source = (**source).clone();
        whole.ty.dims[1] = range.of.into();
        let whole = model.value(&whole, 0);
        for (rank, part) in parts.iter().enumerate() {
            let ParamSource::ColumnRange(range, _) = part else { panic!("{}: parts differ", param.name) };
            let value = model.value(param, rank);
            for row in 0..value.dims[0] {
                let same = value.row(row) == &whole.row(row)[range.columns().unwrap()];
                assert!(same, "{}, rank {rank}, row {row}", param.name);
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 4 * 2 * 2);
}

/// Every family that is split at all: sums over ranks leave its results within the tolerance, with no more
/// all-gathers. Returns how many have fewer.
fn families(ranks: usize) -> usize {
    let mut fewer = 0;
    for case in cases() {
        let model = ShardedFamily::new(&case, json!({}));
        let Ok(gathered) = model.compiled(ranks, "f32", &[]) else { continue };
        let split = check(&case, &model, "f32", ranks);
        let [gathers, sums] = [&gathered, &split].map(|module| exchanges(module, "decode"));
        assert!(sums <= gathers, "{case}: {sums} exchanges in place of {gathers}");
        fewer += usize::from(sums < gathers);
    }
    fewer
}

#[test]
fn families_on_two_ranks() {
    let fewer = families(2);
    assert!(fewer > 40, "{fewer}");
}

/// Three ranks divide few of their sizes, so few of their products are sums.
#[test]
fn families_on_three_ranks() {
    let fewer = families(3);
    assert!(fewer > 3, "{fewer}");
}

fn refused(model: &ShardedFamily, ranks: usize, quant: &str, mode: TpMode) -> String {
    match model.with_notes(options(ranks, quant, mode), &[]) {
        Err(PassError::Shard(error)) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it is split among {ranks} ranks"),
    }
}

/// Six heads, of 96 columns that are three groups of activations.
fn three_groups() -> ShardedFamily {
    let fields = json!({"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96,
        "head_dim": 16, "intermediate_size": 192, "vocab_size": 624});
    ShardedFamily::new("llama3-gqa-tied", fields)
}

/// A rank with less than a group of activations has its own scale: its codes differ from those of one rank,
/// but are no further from the results of float activations with the same weights.
#[test]
fn parts_of_a_group_are_as_exact_as_the_whole() {
    let model = three_groups();
    let of = |module: &Module, ranks| model.results(module, ranks).remove(0);
    let exact = of(&model.compiled(1, "q4i8", &["quantize_activations"]).unwrap(), 1);
    let one = of(&model.compiled(1, "q4i8", &[]).unwrap(), 1);
    let three = of(&reduced(&model, 3, "q4i8"), 3);
    let [of_one, of_three] = [&one, &three].map(|found| difference(&exact, found));
    assert!(of_three <= 1.5 * of_one, "three ranks are {of_three} off, one is {of_one}");
}

/// Three ranks with two heads each, and whole groups of weights and of activations: everything that can be a
/// sum is one.
#[test]
fn three_ranks_have_two_sums_a_layer() {
    let fields = json!({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 768});
    let model = wide("llama3-gqa-tied", &fields);
    for quant in ["f32", "q4f16_1", "q8i8", "q4i8"] {
        let split = check("llama", &model, quant, 3);
        for function in ["prefill", "decode", "decode_batch", "step"] {
            assert_eq!(exchanges(&split, function), 2 * 2 + 2, "{function} in {quant}");
        }
    }
}

/// The numbers that an error lists are those that work, and what they give is right.
#[test]
fn numbers_that_an_error_lists_work() {
    let model = three_groups();
    for quant in ["q4f16_1", "q4i8"] {
        let error = refused(&model, 2, quant, TpMode::Reduce);
        let list = error.split_once("these numbers work: ").unwrap().1;
        let listed: Vec<usize> = list.split(", ").map(|number| number.parse().unwrap()).collect();
        let works = |ranks: &usize| model.with_notes(options(*ranks, quant, TpMode::Reduce), &[]).is_ok();
        assert_eq!((2..=16).filter(works).collect::<Vec<_>>(), listed, "{quant}");
        // A rank has a part of a group of activations, with another scale than the whole: its codes differ.
        for ranks in listed.into_iter().filter(|_| quant == "q4f16_1") {
            let split = check("llama", &model, quant, ranks);
            assert!(ranks != 3 || exchanges(&split, "decode") == 2 * 3 + 2);
        }
    }
}

#[test]
fn groups_stay_whole() {
    let model = three_groups();
    assert_eq!(
        refused(&model, 2, "q4i8", TpMode::Reduce),
        "96 columns in groups of 32 of model.layers.0.self_attn.o_proj.weight cannot be divided among 2 ranks; \
         up to 16, these numbers work: 3, 5, 7, 9, 10, 11, 13, 14, 15"
    );
    check("llama", &model, "f32", 2);
    let (_, notes) = model.with_notes(options(2, "q4i8", TpMode::Auto), &[]).unwrap();
    assert!(notes[0].starts_with("auto: gather, since for reduce 96 columns in groups of 32"), "{notes:?}");
}

#[test]
fn auto_takes_what_costs_less() {
    let model = wide("llama3-gqa-tied", &json!({}));
    let choice = |ranks, latency_ns, mbytes_per_s| {
        let mut options = options(ranks, "f32", TpMode::Auto);
        options.all_gather_cost = ExchangeCost { latency_ns, mbytes_per_s };
        let (module, notes) = model.with_notes(options, &[]).unwrap();
        (exchanges(&module, "decode"), notes)
    };
    let (exchanges, notes) = choice(2, 2000, 10_000);
    assert_eq!(exchanges, 2 * 2 + 2);
    // All-gathers of an embedding [128], and of the layers; logits of 320.
    let bytes = 4 * (128 + 320 + 4 * 128);
    let line = format!("reduce: decode of 1 token: 6 exchanges, {bytes} bytes, ");
    assert!(notes[1].starts_with(&line), "{notes:?}");
    assert!(
        notes[2] == "auto: reduce, with 2000 ns for an exchange and 10000 MB/s to each rank",
        "{notes:?}"
    );
    // Terms of all others are more than parts of theirs, and here no rank waits for the first byte.
    let (exchanges, notes) = choice(8, 0, 10);
    assert_eq!(exchanges, 4 * 2 + 2, "{notes:?}");
    assert_eq!(choice(8, 1_000_000, 10_000).0, 2 * 2 + 2);
}

/// The fault of a run with messages that become others.
pub(crate) fn tampered(
    model: &ShardedFamily,
    split: &Module,
    tamper: &FaultInjector<'_>,
) -> (usize, AllGatherFault) {
    match model.results_with(split, 2, Some(tamper)) {
        Err(RankError { rank, error }) => match *error {
            GraphError::Exchange { fault, .. } => (rank, *fault),
            other => panic!("rank {rank}: {other}"),
        },
        Ok(_) => panic!("nobody has seen the fault"),
    }
}

#[test]
fn faults_of_exchanges_are_found() {
    let model = llama();
    let split = reduced(&model, 2, "f32");
    let dropped = tampered(&model, &split, &|to, m| (to != 1 || m.from != 0 || m.number != 3).then_some(m));
    assert_eq!(dropped, (1, AllGatherFault::NotSent { rank: 1, number: 3, other: 0 }));
    let swapped = tampered(&model, &split, &|_, m| Some(RankMessage { from: 1 - m.from, ..m }));
    assert!(
        matches!(swapped.1, AllGatherFault::Misdirected { number: 0, other: 0, from: 1, .. }),
        "{swapped:?}"
    );
    let short = tampered(&model, &split, &|to, m| {
        let part = Arc::new(Tensor::f32(&[1, 1], &[0.0]));
        Some(if to == 1 && m.from == 0 && m.number == 1 { RankMessage { part, ..m } } else { m })
    });
    assert!(matches!(short, (1, AllGatherFault::Size { number: 1, other: 0, .. })), "{short:?}");
    // Another term is no fault of the all-gather, but the results tell.
    let wrong = |_: usize, m: RankMessage| {
        let data = m.part.data.iter().map(|x| x * 1.5).collect();
        let part = Arc::new(Tensor { data, ..(*m.part).clone() });
        Some(if m.number == 1 { RankMessage { part, ..m } } else { m })
    };
    let found = model.results_with(&split, 2, Some(&wrong)).unwrap();
    assert!(difference(&model.results(&split, 2)[0], &found[0]) > 1e-3);
}
