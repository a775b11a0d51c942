//! Models that are split among ranks, in the interpreter: every rank gives the bits of the whole model, in
//! prompts, steps and batches, with each pass switched off. The models are families as they are configured in
//! `tests/goldens`, with random weights.

use mlcc_interp::equivalence::random_tensor;
use mlcc_interp::graph::{
    FaultInjector, GraphError, Interpreter, RankError, RankedModel, SequenceRows, StateValues, Tensor,
    param_value, param_value_of_rank,
};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::{ModelParam, Module, ParamSource};
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::{RowBatching, RowScope, row_scopes};
use mlcc_ir::text::{parse_module, print_module};
use mlcc_ir::types::DType;
use mlcc_ir::verify::verify_module;
use mlcc_models::ModelConfig;
use mlcc_models::transformer::{ADAPTER_SLOT, FACTOR_A, FACTOR_B};
use mlcc_models::{AdapterSlots, Architecture, Checkpoint, EntrySpec, LogitScope};
use mlcc_passes::pipeline::PipelineControl;
use mlcc_passes::{LoweredProgram, PIPELINE, PassContext, PassError, PassOptions, QuantScheme, run_pipeline};
use serde_json::{Value, json};

/// A family with sizes that are chosen here.
pub(crate) struct ShardedFamily {
    pub module: Module,
    checkpoint: Checkpoint,
    vocab: i32,
    /// Adapter slots of sequences; the entry functions are those for them.
    slots: Option<AdapterSlots>,
}

/// The configuration of a reference case, with other values of some fields.
pub(crate) fn architecture(case: &str, fields: &Value) -> Architecture {
    let path = format!("{}/../tests/goldens/{case}/config.json", env!("CARGO_MANIFEST_DIR"));
    let mut json = std::fs::read(&path).unwrap();
    // Some have infinite numbers, which only the reader of configurations takes.
    if let Some(fields) = fields.as_object().filter(|fields| !fields.is_empty()) {
        let mut config: Value = serde_json::from_slice(&json).unwrap();
        fields.iter().for_each(|(name, value)| config[name] = value.clone());
        json = serde_json::to_vec(&config).unwrap();
    }
    ModelConfig::parse(case, &json).unwrap_or_else(|e| panic!("{e}")).architecture
}

impl ShardedFamily {
    pub fn new(case: &str, fields: Value) -> ShardedFamily {
        ShardedFamily::with_slots(case, fields, None)
    }

    pub fn with_slots(case: &str, fields: Value, slots: Option<AdapterSlots>) -> ShardedFamily {
        let architecture = architecture(case, &fields);
        let mut b = GraphBuilder::new(case);
        let n = Dim::sym(SizeSymbol::N);
        let entries = [
            ("prefill", n.clone(), LogitScope::Last, RowBatching::Single),
            ("decode", Dim::from(1), LogitScope::Last, RowBatching::Single),
            ("decode_batch", n.clone(), LogitScope::All, RowBatching::OneEach),
            ("step", n, LogitScope::OutputRows, RowBatching::Ragged),
        ];
        for (name, n, logits, batching) in entries {
            let spec = EntrySpec {
                name,
                n,
                logits,
                context: 24,
                streaming: None,
                batching,
                pooling_head: None,
                adapters: slots,
                is_encoder_input: false,
            };
            architecture.build(&mut b, &spec);
        }
        let tensors = architecture.tensor_shapes().into_iter().map(|(name, shape)| {
            let distribution = architecture.distribution(&name, &shape);
            (name, shape, distribution)
        });
        let checkpoint = Checkpoint::random(7, tensors.collect()).unwrap();
        ShardedFamily { module: b.finish().unwrap(), checkpoint, vocab: architecture.vocab() as i32, slots }
    }

    /// The module behind all graph passes but those in `off`.
    pub fn compiled(&self, ranks: usize, quant: &str, off: &[&str]) -> Result<Module, PassError> {
        let mut options = PassOptions::new(vec![], 16);
        (options.quant, options.ranks) = (QuantScheme::from_name(quant).unwrap().0, ranks);
        Ok(self.with_notes(options, off)?.0)
    }

    /// The compiled module for these options, and the notes of the passes.
    pub fn with_notes(&self, options: PassOptions, off: &[&str]) -> Result<(Module, Vec<String>), PassError> {
        let mut program = LoweredProgram::new(self.module.clone());
        let control = PipelineControl {
            disabled: off.iter().map(ToString::to_string).collect(),
            stop_after: Some("outline".into()),
            verify: true,
            ..PipelineControl::default()
        };
        let mut context = PassContext::new(options);
        run_pipeline(&mut program, &mut context, control)?;
        let notes = context.notes.into_iter().filter(|(pass, _)| *pass == "shard");
        Ok((program.module, notes.map(|(_, line)| line).collect()))
    }

    fn tensor(&self, name: &str) -> Option<Tensor> {
        if name.ends_with(FACTOR_A) || name.ends_with(FACTOR_B) {
            return Some(self.factors(name));
        }
        let data = self.checkpoint.read(name).ok()?;
        Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
    }

    /// The matrices of all slots, of which the first is zero.
    fn factors(&self, name: &str) -> Tensor {
        let (id, slots) = (self.module.param(name).unwrap(), self.slots.unwrap());
        let dims: Vec<usize> =
            self.module.params[id].ty.dims.iter().map(|d| d.as_const().unwrap() as usize).collect();
        let mut factors = random_tensor(DType::F32, &dims, name.len() as u64);
        let none = factors.data.len() / slots.matrix_count();
        factors.data.iter_mut().enumerate().for_each(|(i, x)| *x = if i < none { 0.0 } else { *x / 8.0 });
        factors
    }

    /// The value of a parameter on a rank.
    pub fn value(&self, param: &ModelParam, rank: usize) -> Tensor {
        let tensor = |name: &str| self.tensor(name);
        param_value_of_rank(param, rank, &tensor).unwrap_or_else(|e| panic!("{e}"))
    }

    fn values(&self, module: &Module, rank: usize) -> Vec<Tensor> {
        module.params.values().map(|param| self.value(param, rank)).collect()
    }

    /// The results of all calls, by rank.
    pub fn results(&self, module: &Module, ranks: usize) -> Vec<Vec<Vec<f32>>> {
        self.results_with(module, ranks, None).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The same, with messages that become others on their way.
    pub fn results_with(
        &self,
        module: &Module,
        ranks: usize,
        tamper: Option<&FaultInjector<'_>>,
    ) -> Result<Vec<Vec<Vec<f32>>>, RankError> {
        let mut all = RankedModel::new((0..ranks).map(|rank| (module, self.values(module, rank))).collect());
        if let Some(tamper) = tamper {
            all = all.with_tamper(tamper);
        }
        let mut states = vec![vec![StateValues::new(module).unwrap(); 2]; ranks];
        if let Some(slot) = module.state(ADAPTER_SLOT) {
            for (number, states) in states.iter_mut().flat_map(|states| states.iter_mut().enumerate()) {
                assert!(states.set(slot, Tensor::ids(&[2 - number as i32])));
            }
        }
        all.run(&mut states, |interpreter, states| calls(interpreter, states, self.vocab))
    }
}

/// A prompt in two pieces, a token of it alone, a token of each of two sequences, and pieces of both.
fn calls(
    interpreter: &Interpreter<'_>,
    states: &mut [StateValues],
    vocab: i32,
) -> Result<Vec<Vec<f32>>, GraphError> {
    let tokens = |ids: &[i32]| Tensor::ids(&ids.iter().map(|id| id % vocab).collect::<Vec<_>>());
    let id = |name: &str| interpreter.module().function(name).unwrap().0;
    let mut results = Vec::new();
    let mut past = 0;
    for ids in [vec![1, 130, 201, 17], vec![63, 62], vec![5]] {
        let syms = SymValues { past, ..SymValues::for_tokens(ids.len() as i64) };
        past += ids.len() as i64;
        let entry = if ids.len() == 1 { "decode" } else { "prefill" };
        results.push(interpreter.run(id(entry), &[tokens(&ids)], &mut states[0], syms)?);
    }
    let ids = [tokens(&[250, 3])];
    results.push(interpreter.run_batch(id("decode_batch"), &ids, states, &[past, 0])?);
    let pieces = [SequenceRows { past: past + 1, rows: 2 }, SequenceRows { past: 1, rows: 3 }];
    let inputs = [tokens(&[9, 180, 100, 11, 12]), Tensor::ids(&[1, 4, 0, 0, 0])];
    results.push(interpreter.run_sequences(id("step"), &inputs, states, &pieces, 2)?);
    Ok(results.into_iter().map(|outputs| outputs[0].to_f32()).collect())
}

pub(crate) fn bits(results: &[Vec<f32>]) -> Vec<Vec<u32>> {
    results.iter().map(|all| all.iter().map(|x| x.to_bits()).collect()).collect()
}

pub(crate) fn exchanges(module: &Module, function: &str) -> usize {
    let (_, f) = module.function(function).unwrap();
    f.live_nodes().filter(|(_, node)| matches!(node.op, Op::AllGather { .. })).count()
}

/// Kernels gather the rows of all sequences at once.
fn exchanges_are_of_all_sequences(what: &str, module: &Module) {
    for f in module.functions.values() {
        let Some(scopes) = row_scopes(module, f) else { continue };
        for (_, node) in f.live_nodes().filter(|(_, node)| matches!(node.op, Op::AllGather { .. })) {
            let scope = scopes[node.inputs[0].index()];
            assert_ne!(scope, RowScope::Sequence, "{what}: an exchange of @{} is of one sequence", f.name);
        }
    }
}

/// Every rank has the results of one rank, with all-gathers that kernels can do. Returns the module of the
/// last number of ranks.
pub(crate) fn check(
    what: &str,
    model: &ShardedFamily,
    quants: &[&str],
    ranks: &[usize],
    off: &[&str],
) -> Module {
    let split = check_bits(what, model, quants, ranks, off);
    exchanges_are_of_all_sequences(what, &split);
    split
}

pub(crate) fn check_bits(
    what: &str,
    model: &ShardedFamily,
    quants: &[&str],
    ranks: &[usize],
    off: &[&str],
) -> Module {
    let mut last = None;
    for quant in quants {
        let one = model.compiled(1, quant, off).unwrap();
        let wanted = bits(&model.results(&one, 1)[0]);
        let finite = |bits: &u32| f32::from_bits(*bits).is_finite();
        assert!(wanted.iter().flatten().all(finite), "{what} in {quant}: the whole model is out of range");
        for &ranks in ranks {
            let split = model.compiled(ranks, quant, off).unwrap_or_else(|e| panic!("{what}, {quant}: {e}"));
            assert_eq!(split.rank_count(), ranks, "{what} in {quant}");
            for (rank, results) in model.results(&split, ranks).iter().enumerate() {
                let same = bits(results) == wanted;
                assert!(same, "{what} in {quant}, rank {rank} of {ranks} differs, off: {off:?}");
            }
            last = Some(split);
        }
    }
    last.unwrap()
}

/// Bytes of parameters for each rank, over those of one.
pub(crate) fn share(model: &ShardedFamily, split: &Module) -> f64 {
    let elements = |module: &Module| {
        let count = |p: &ModelParam| p.ty.dims.iter().filter_map(Dim::as_const).product::<i64>();
        module.params.values().map(count).sum::<i64>() as f64
    };
    elements(split) / elements(&model.compiled(1, "f32", &[]).unwrap())
}

pub(crate) fn llama() -> ShardedFamily {
    let fields =
        json!({"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "head_dim": 16});
    ShardedFamily::new("llama3-gqa-tied", fields)
}

pub(crate) fn rwkv7() -> ShardedFamily {
    ShardedFamily::new("rwkv7-hf", json!({"head_dim": 32, "num_heads": 4}))
}

#[test]
fn llama_has_four_gathers_a_layer() {
    let model = llama();
    let split = check("llama", &model, &["f32", "q4i8"], &[2, 4], &[]);
    // Beside the layers: the embedding, and the logits.
    for function in ["prefill", "decode", "decode_batch", "step"] {
        assert_eq!(exchanges(&split, function), 4 * 3 + 2, "{function}");
    }
    assert!(share(&model, &split) < 0.27, "{}", share(&model, &split));
    let heads = |name: &str| split.states[split.state(name).unwrap()].ty.to_string();
    assert_eq!(heads(&split.states.values().next().unwrap().name), "f32[24, 1, 16]");
}

#[test]
fn key_heads_fewer_than_ranks_are_on_several() {
    let fields = |key_heads: usize| json!({"num_attention_heads": 8, "num_key_value_heads": key_heads});
    for key_heads in [1, 2] {
        let model = ShardedFamily::new("llama3-gqa-tied", fields(key_heads));
        let split = check("llama", &model, &["f32", "q4i8"], &[4], &[]);
        assert_eq!(exchanges(&split, "decode"), 4 * 3 + 2, "{key_heads} key heads");
    }
}

#[test]
fn qwen3() {
    let fields = json!({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4});
    let split = check("qwen3", &ShardedFamily::new("embed-qwen3", fields), &["f32", "q4i8"], &[2, 4], &[]);
    assert_eq!(exchanges(&split, "decode"), 4 * 3 + 2);
}

#[test]
fn rwkv4() {
    let split = check("rwkv4", &ShardedFamily::new("rwkv4-hf", json!({})), &["f32", "q4i8"], &[2, 4], &[]);
    assert_eq!(exchanges(&split, "decode"), 4 * 4 + 2);
}

#[test]
fn rwkv5() {
    let fields = json!({"head_size": 16, "num_attention_heads": 4});
    check("rwkv5", &ShardedFamily::new("rwkv5-hf", fields), &["f32", "q4i8"], &[2, 4], &[]);
}

#[test]
fn rwkv6() {
    let fields = json!({"head_size": 16, "num_attention_heads": 4});
    let split = check("rwkv6", &ShardedFamily::new("rwkv6-hf", fields), &["f32", "q4i8"], &[2, 4], &[]);
    // Beside the usual four: the wide halves of the low-rank products that mix each token with the one
    // before.
    assert_eq!(exchanges(&split, "decode"), 11 * 3 + 2);
}

#[test]
fn rwkv7_splits_its_states() {
    let model = rwkv7();
    let split = check("rwkv7", &model, &["f32", "q4i8"], &[2, 4], &[]);
    assert_eq!(exchanges(&split, "decode"), 4 * 2 + 2);
    let state = split.state("blocks.1.att.s").unwrap();
    assert_eq!(split.states[state].ty.to_string(), "f32[1, 32, 32]");
}

#[test]
fn experts() {
    let model =
        ShardedFamily::new("qwen3-moe", json!({"num_key_value_heads": 4, "moe_intermediate_size": 64}));
    check("qwen3-moe", &model, &["f32", "q4i8"], &[2, 4], &[]);
}

/// Switching a pass off leaves the bits of ranks those of one: what the pass does is then done on neither
/// side.
#[test]
fn each_pass_off() {
    let models = [("llama", llama()), ("rwkv7", rwkv7())];
    let graph = PIPELINE.iter().take_while(|p| p.name != "lower");
    for pass in graph.filter(|p| p.optional && p.name != "shard") {
        for (name, model) in &models {
            check(name, model, &["q4i8"], &[2], &[pass.name]);
        }
    }
}

#[test]
fn the_pass_switched_off_leaves_the_model_whole() {
    assert_eq!(llama().compiled(2, "f32", &["shard"]).unwrap().rank_count(), 1);
}

#[test]
fn text_and_parser_agree() {
    for model in [llama(), rwkv7()] {
        let split = model.compiled(2, "q4i8", &[]).unwrap();
        let text = print_module(&split);
        let parsed = parse_module(&text).unwrap_or_else(|e| panic!("{e}"));
        verify_module(&parsed).unwrap();
        assert!(print_module(&parsed) == text, "the text changes");
    }
}

/// Rows of a rank are rows of the whole, packed with the same bits.
#[test]
fn rows_of_ranks_are_those_of_the_whole() {
    let model = llama();
    let split = model.compiled(4, "q4i8", &["merge_projections"]).unwrap();
    let tensor = |name: &str| model.tensor(name);
    let mut checked = 0;
    for param in split.params.values() {
        let ParamSource::Ranks(parts) = &param.source else { continue };
        let Some(ParamSource::Rows(blocks, source)) = parts.first() else { continue };
        let mut whole = param.clone();
        whole.source = (**source).clone();
        whole.ty.dims[0] = Dim::from(blocks.of);
        let whole = param_value(&whole, &tensor).unwrap();
        for (rank, part) in parts.iter().enumerate() {
            let ParamSource::Rows(blocks, _) = part else { panic!("{}: parts differ", param.name) };
            let value = param_value_of_rank(param, rank, &tensor).unwrap();
            for row in 0..value.dims[0] {
                let same = value.row(row) == whole.row(blocks.source_row(row));
                assert!(same, "{}, rank {rank}, row {row}", param.name);
            }
            checked += 1;
        }
    }
    assert!(checked >= 4 * 7 * 3, "{checked} parts");
}

/// The reference cases of models that generate. Encoder-decoder models are not split yet, which the build
/// says before any pass runs.
pub(crate) fn cases() -> Vec<String> {
    let root = format!("{}/../tests/goldens", env!("CARGO_MANIFEST_DIR"));
    let mut cases: Vec<String> = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("config.json").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|case| {
            let architecture = architecture(case, &json!({}));
            architecture.pooling_head().is_none() && architecture.decoder_start_token_id().is_none()
        })
        .collect();
    cases.sort();
    cases
}

/// Every family of the reference cases on two ranks: the number of all-gathers of a token, or the reason why
/// it is refused.
#[test]
fn families() {
    let mut found = String::new();
    for case in cases() {
        let model = ShardedFamily::new(&case, json!({}));
        let outcome = match model.compiled(2, "f32", &[]) {
            Ok(_) => {
                let split = check_bits(&case, &model, &["f32"], &[2], &[]);
                format!("{} exchanges", exchanges(&split, "decode"))
            }
            Err(PassError::Shard(error)) => error.to_string(),
            Err(error) => panic!("{case}: {error}"),
        };
        let line = format!("{case}: {outcome}\n");
        // A new case is held to the bits of one rank, or refused; what it takes is written down below when it
        // is known.
        match FAMILIES.lines().any(|known| known.starts_with(&format!("{case}: "))) {
            true => found.push_str(&line),
            false => print!("not listed: {line}"),
        }
    }
    assert!(found == FAMILIES, "{found}");
}

const FAMILIES: &str = "\
bloom-alibi: 14 exchanges
chatglm-6b-tiny: 14 exchanges
chatglm2-6b-tiny: 14 exchanges
cohere2: 18 exchanges
deepseek-v2-lite: 21 exchanges
deepseek-v3: 28 exchanges
embed-qwen3: 14 exchanges
ernie4-5: 14 exchanges
exaone4: 18 exchanges
falcon-h1: 17 exchanges
falcon-mqa: 14 exchanges
gemma: 14 exchanges
gemma2: 18 exchanges
gemma3-text: 18 exchanges
gemma4-e: 46 exchanges
gemma4-moe: 24 exchanges
glm-hf: 14 exchanges
glm4-moe: 20 exchanges
glm4-moe-lite: 26 exchanges
gpt-bigcode: 10 exchanges
gpt-neox: 14 exchanges
gpt-oss: 22 exchanges
gpt-oss-mxfp4: 17 exchanges
gpt2: 14 exchanges
granite: 14 exchanges
granite4-hybrid: 22 exchanges
internlm: 10 exchanges
internlm2: 10 exchanges
kimi-linear: 34 exchanges
lfm2: 18 exchanges
lfm3: 30 exchanges
llama-dynamic: 10 exchanges
llama-linear: 10 exchanges
llama-yarn: 10 exchanges
llama3-gqa-tied: 14 exchanges
mamba: 17 exchanges
mamba2: 8 exchanges
minimax-m2: 26 exchanges
ministral3: 14 exchanges
mistral-swa: 14 exchanges
mistral4: 24 exchanges
moss: 10 exchanges
muse-glimmer: 18 exchanges
nemotron-h: 20 exchanges
olmo-hybrid: 20 exchanges
olmo3: 26 exchanges
phi3: 14 exchanges
phi3-longrope: 10 exchanges
quant-awq: 10 exchanges
quant-ct-int4: 10 exchanges
quant-fp8-block: 10 exchanges
quant-gptq: 10 exchanges
quant-gptq-desc-act: 10 exchanges
qwen: 10 exchanges
qwen2: 14 exchanges
qwen3-moe: 16 exchanges
qwen3-next: 26 exchanges
qwen3.5: 18 exchanges
qwen3.5-moe: 26 exchanges
rwkv4-hf: 18 exchanges
rwkv4-hf-odd: 14 exchanges
rwkv4-pth: 18 exchanges
rwkv5-hf: 14 exchanges
rwkv6-hf: 35 exchanges
rwkv7-hf: 10 exchanges
smollm3: 18 exchanges
stablelm-head-norms: 14 exchanges
starcoder2: 14 exchanges
";
