//! Configurations of transformers: what is read, and what is refused with the field and what is supported.

use mlcc_models::definition::ModelDefinition;
use mlcc_models::families::gemma4::Gemma4Config;
use mlcc_models::families::nemotron_h::NemotronHConfig;
use mlcc_models::layers::rope::{RopeFrequencies, frequencies};
use mlcc_models::standard_decoder::StandardDecoder;
use mlcc_models::{Checkpoint, ModelConfig, tensor_check};
use serde_json::{Map, Value, json};

fn llama() -> Map<String, Value> {
    let fields = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 256,
    });
    fields.as_object().unwrap().clone()
}

fn with(changes: Value) -> Map<String, Value> {
    let mut fields = llama();
    fields.extend(changes.as_object().unwrap().clone());
    fields
}

fn parse(fields: Map<String, Value>) -> Result<ModelConfig, String> {
    let json = Value::Object(fields).to_string();
    ModelConfig::parse("dir/config.json", json.as_bytes()).map_err(|e| e.to_string())
}

fn read(changes: Value) -> StandardDecoder {
    parse(with(changes)).unwrap().architecture.downcast_family::<StandardDecoder>().unwrap().clone()
}

#[track_caller]
fn refused(changes: Value, parts: &[&str]) {
    let error = parse(with(changes)).expect_err("refused");
    for part in parts.iter().chain(&["dir/config.json"]) {
        assert!(error.contains(part), "expected `{part}` in: {error}");
    }
}

fn table(config: &StandardDecoder) -> Vec<f32> {
    match &config.block.attention.rope.frequencies {
        RopeFrequencies::Fixed(table) => table.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn contradictions_and_unknown_names_are_refused() {
    refused(json!({ "hidden_act": "mish" }), &["`hidden_act`", "silu", "gelu_pytorch_tanh", "relu2", "mish"]);
    refused(
        json!({ "rope_scaling": { "type": "wave", "factor": 2.0 } }),
        &["rope_scaling", "`type`", "llama3", "yarn"],
    );
    refused(json!({ "rope_scaling": { "type": "linear" } }), &["`factor` is missing"]);
    refused(json!({ "rope_scaling": { "type": "linear", "factor": 0.5 } }), &["`factor`", "at least 1"]);
    refused(json!({ "rope_scaling": 7 }), &["`rope_scaling` should be an object"]);
    refused(json!({ "rope_theta": 0.0 }), &["`rope_theta`", "above 1"]);
    let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64 });
    refused(json!({ "rope_scaling": llama3 }), &["`high_freq_factor`"]);
    refused(
        json!({ "num_key_value_heads": 3 }),
        &["`num_key_value_heads`", "a divisor of num_attention_heads, which is 4"],
    );
    refused(json!({ "hidden_size": 66 }), &["`hidden_size`", "a multiple of num_attention_heads"]);
    refused(json!({ "num_hidden_layers": 100000 }), &["`num_hidden_layers`", "at most 1000"]);
    refused(json!({ "num_attention_heads": 268435456 }), &["`num_attention_heads`", "at most"]);
    refused(json!({ "head_dim": 1048576 }), &["`head_dim`", "at most"]);
    refused(json!({ "rms_norm_eps": 0 }), &["`rms_norm_eps`", "between 0 and 1"]);
    refused(json!({ "partial_rotary_factor": 0.35 }), &["`partial_rotary_factor`", "even number"]);
    refused(json!({ "vision_config": {} }), &["image or audio", "`vision_config`"]);
    refused(
        json!({ "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8 }),
        &["`num_experts_per_tok`", "at most num_experts, which is 4"],
    );
    refused(
        json!({ "model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] }),
        &["`layer_types`", "a list of 2"],
    );
    refused(json!({ "model_type": "gemma2", "final_logit_softcapping": -1 }), &["`final_logit_softcapping`"]);
    refused(json!({ "model_type": "gptj", "rotary_dim": 7 }), &["`rotary_dim`", "even"]);
    refused(
        json!({ "model_type": "mpt", "attn_config": { "alibi": false } }),
        &["attn_config", "`alibi` = false"],
    );
    refused(
        json!({ "model_type": "phi3", "rope_scaling": { "type": "longrope", "short_factor": [1.0], "long_factor": [1.0] } }),
        &["`short_factor`", "8 positive numbers"],
    );
}

#[test]
fn the_class_decides_where_the_model_type_is_unknown() {
    let config =
        parse(with(json!({ "model_type": "my-llama", "architectures": ["LlamaForCausalLM"] }))).unwrap();
    assert!(config.architecture.downcast_family::<StandardDecoder>().is_some());
    refused(
        json!({ "model_type": "my-llama" }),
        &["`my-llama` is unknown", "did you mean `llama`?", "`mlcc models`"],
    );
}

/// The text model of a larger one is read by its own type, and the tensors of the other parts are none of its own.
#[test]
fn a_text_model_inside_is_read() {
    for (outside, inside) in [("mistral3", "ministral3"), ("llava", "llama"), ("gemma3", "gemma3_text")] {
        let rope = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
        let text = with(json!({ "model_type": inside, "rope_parameters": rope }));
        let text = if inside == "gemma3_text" { with(json!({ "model_type": inside })) } else { text };
        let plain = parse(text.clone()).unwrap();
        let fields = json!({ "model_type": outside, "text_config": text, "vision_config": {} });
        let nested = parse(fields.as_object().unwrap().clone()).unwrap();
        assert_eq!(format!("{:?}", plain.architecture), format!("{:?}", nested.architecture), "{outside}");
        let name = "model.layers.0.mlp.up_proj.weight";
        for stored in [
            "model.language_model.layers.0.mlp.up_proj.weight",
            "language_model.model.layers.0.mlp.up_proj.weight",
        ] {
            assert_eq!(nested.architecture.canonical_name(stored), name);
        }
        assert!(nested.architecture.is_ignored("model.visual.blocks.0.attn.qkv.weight"));
        assert!(nested.architecture.is_ignored("vision_tower.blocks.0.attn.qkv.weight"));
        assert!(!nested.architecture.is_ignored(name));
    }
    refused(json!({ "text_config": {}, "vision_config": {} }), &["image or audio", "`vision_config`"]);
    let unknown =
        json!({ "model_type": "seer", "text_config": { "model_type": "seer_text" }, "vision_config": {} });
    let error = parse(unknown.as_object().unwrap().clone()).unwrap_err();
    assert!(error.contains("text_config: model_type `seer_text` is unknown"), "{error}");
}

#[test]
fn hybrids_that_contradict_themselves_are_refused() {
    let lfm2 = |changes: Value| {
        let mut fields = json!({ "model_type": "lfm2", "full_attn_idxs": [1] }).as_object().unwrap().clone();
        fields.extend(changes.as_object().unwrap().clone());
        Value::Object(fields)
    };
    refused(lfm2(json!({ "conv_L_cache": 1 })), &["`conv_L_cache`", "from 2 to 64"]);
    refused(
        lfm2(json!({ "layer_types": ["conv", "mamba"] })),
        &["`layer_types`", "2 of conv, full_attention"],
    );
    refused(lfm2(json!({ "block_ffn_dim_multiplier": -1 })), &["`block_ffn_dim_multiplier`"]);
    let qwen =
        json!({ "model_type": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 4 });
    refused(qwen, &["`linear_num_value_heads`", "a multiple of linear_num_key_heads, which is 3"]);
    let mamba = |changes: Value| {
        let mut fields = json!({ "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16,
            "conv_kernel": 4 });
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fields
    };
    parse(with(mamba(json!({})))).unwrap();
    refused(mamba(json!({ "n_groups": 3 })), &["`n_groups`", "a divisor of num_heads, which is 8"]);
    refused(mamba(json!({ "time_step_limit": [2.0, 1.0] })), &["`time_step_limit`", "the smaller first"]);
    refused(mamba(json!({ "conv_kernel": 1000 })), &["`conv_kernel`", "from 2 to 64"]);
    refused(
        json!({ "model_type": "smollm3", "no_rope_layers": [1, 2] }),
        &["`no_rope_layers`", "a list of 2 of 0 and 1"],
    );
    let nemotron =
        mamba(json!({ "model_type": "nemotron_h", "mamba_num_heads": 8, "hybrid_override_pattern": "M" }));
    refused(nemotron, &["`hybrid_override_pattern`", "2 letters of M, *, - and E"]);
    let all_shared = json!({ "model_type": "gemma4_text", "num_kv_shared_layers": 2,
        "layer_types": ["full_attention", "full_attention"] });
    refused(all_shared, &["`num_kv_shared_layers`", "one of its kind before it"]);
    let glm = json!({ "model_type": "glm4_moe", "n_group": 4, "topk_group": 2, "n_routed_experts": 4, "num_experts_per_tok": 2 });
    refused(glm, &["`n_group`", "a number of groups of at least 2 among 4 experts"]);
}

#[test]
fn parts_of_later_families_that_contradict_are_refused() {
    let exaone = json!({ "model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LXG" });
    refused(exaone, &["`sliding_window_pattern`", "letters L (window) and G (none)"]);
    let mamba = |changes: Value| {
        let mut fields = json!({ "model_type": "mamba", "state_size": 8 });
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fields
    };
    parse(with(mamba(json!({ "time_step_rank": "auto" })))).unwrap();
    refused(mamba(json!({ "conv_kernel": 1 })), &["`conv_kernel`", "from 2 to 64"]);
    refused(mamba(json!({ "time_step_rank": "none" })), &["`time_step_rank`"]);
    refused(mamba(json!({ "state_size": 1 << 20 })), &["`state_size`", "at most"]);
    let olmo = json!({ "model_type": "olmo_hybrid", "linear_num_key_heads": 3 });
    refused(olmo, &["`linear_num_value_heads`", "a multiple of linear_num_key_heads, which is 3"]);
    let mistral = |changes: Value| {
        let mut fields = json!({ "model_type": "mistral4", "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "kv_lora_rank": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8 });
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fields
    };
    parse(with(mistral(json!({})))).unwrap();
    let growth = json!({ "rope_parameters": { "rope_theta": 1e4, "llama_4_scaling_beta": -1 } });
    refused(mistral(growth), &["`llama_4_scaling_beta`", "from 0 to 1000"]);
    for (version, method, known) in [
        ("deepseek_v2", "noaux_tc", "greedy or group_limited_greedy"),
        ("deepseek_v3", "greedy", "noaux_tc"),
        ("deepseek_v2", "random", "greedy or group_limited_greedy"),
    ] {
        let fields = json!({ "model_type": version, "topk_method": method });
        refused(mistral(fields), &["`topk_method`", known, method]);
    }
    let groups = json!({ "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2 });
    refused(mistral(groups), &["`n_group`", "of at least 1 among 4 experts"]);
}

/// As newer releases of transformers write them: kinds of layers by other names, and infinity as an object.
#[test]
fn newer_spellings() {
    let mamba = |changes: Value| {
        let mut fields = json!({ "model_type": "nemotron_h", "num_hidden_layers": null, "mamba_num_heads": 8, "mamba_head_dim": 4,
            "n_groups": 2, "ssm_state_size": 4, "conv_kernel": 4, "head_dim": 8 });
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fields
    };
    let limit = json!([0.0, { "__float__": "Infinity" }]);
    let newer = mamba(
        json!({ "layers_block_type": ["linear_attention", "full_attention", "mlp"], "time_step_limit": limit }),
    );
    let older = mamba(
        json!({ "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "time_step_limit": [0.0, f64::MAX] }),
    );
    let family = |fields| {
        parse(with(fields)).unwrap().architecture.downcast_family::<NemotronHConfig>().cloned().unwrap()
    };
    assert_eq!(family(newer), family(older));
    refused(
        mamba(json!({ "layers_block_type": ["sliding_attention"] })),
        &["`layers_block_type`", "a list of 1 of mamba, attention"],
    );
    refused(
        mamba(json!({ "layers_block_type": ["mamba"], "time_step_limit": [0.0, { "__float__": "NaN" }] })),
        &["`time_step_limit`"],
    );
}

/// Which layers of EXAONE 4 have a window: by number, by letters, or none.
#[test]
fn patterns_of_windows() {
    let windows = |changes: Value| {
        let mut fields = json!({ "model_type": "exaone4", "num_hidden_layers": 4 });
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let config = parse(with(fields)).unwrap();
        let config: &StandardDecoder = config.architecture.downcast_family().unwrap();
        let attention = &config.block.attention;
        let hybrid = attention.windows.iter().any(Option::is_some);
        let rotated = attention.windows.iter().map(|window| window.is_some() || !hybrid);
        assert_eq!(attention.use_rope, rotated.collect::<Vec<_>>());
        attention.windows.iter().map(Option::is_some).collect::<Vec<_>>()
    };
    let (local, full) = (true, false);
    assert_eq!(windows(json!({ "sliding_window": 8 })), [local, local, local, full]);
    let letters = json!({ "sliding_window": 8, "sliding_window_pattern": "LGG" });
    assert_eq!(windows(letters), [local, full, full, local]);
    assert_eq!(windows(json!({ "sliding_window": null, "sliding_window_pattern": 0 })), [full; 4]);
}

#[test]
fn both_styles_of_configuration_say_the_same() {
    let old = read(
        json!({ "rope_theta": 5e5, "rope_scaling": { "type": "linear", "factor": 4.0 }, "torch_dtype": "float16" }),
    );
    let new = read(
        json!({ "rope_parameters": { "rope_theta": 5e5, "rope_type": "linear", "factor": 4.0 }, "dtype": "float16" }),
    );
    assert_eq!(old, new);
    assert_ne!(table(&old), table(&read(json!({}))));
}

/// Numbers of `transformers.modeling_rope_utils`, computed by hand from its formulas.
#[test]
fn rotary_scaling() {
    let plain = frequencies(16, 10000.0);
    assert_eq!(plain[0], 1.0);
    assert!((plain[4] - 0.01).abs() < 1e-9, "{}", plain[4]);
    let linear = table(&read(json!({ "rope_scaling": { "rope_type": "linear", "factor": 8.0 } })));
    assert_eq!(linear[0], 0.125);
    // Original context 64: wavelengths below 16 stay (0: 6.3), above 64 are stretched (from 3 on: 199).
    let llama3 =
        table(&read(json!({ "rope_scaling": { "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64 } })));
    assert_eq!((llama3[0], llama3[4]), (plain[0], (0.01f64 / 8.0) as f32));
    let wave = std::f64::consts::TAU / f64::from(plain[1]);
    let smooth = (64.0 / wave - 1.0) / 3.0;
    let blended = (1.0 - smooth) * f64::from(plain[1]) / 8.0 + smooth * f64::from(plain[1]);
    assert!((f64::from(llama3[1]) - blended).abs() < 1e-8);
    // YaRN: the fastest stays, the slowest is divided by the factor; the context grows; attention factor 0.1 ln 4 + 1.
    let yarn = read(
        json!({ "rope_scaling": { "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256 } }),
    );
    let frequencies = table(&yarn);
    assert_eq!((frequencies[0], frequencies[7]), (plain[0], plain[7] / 4.0));
    assert_eq!((yarn.sizes.context, yarn.block.attention.rope.scale), (1024, (0.1 * 4f64.ln() + 1.0) as f32));
    let dynamic = read(json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }));
    assert_eq!(dynamic.sizes.context, 512);
    assert!(matches!(
        dynamic.block.attention.rope.frequencies,
        RopeFrequencies::Dynamic { original: 256, .. }
    ));
}

#[test]
fn longrope_has_two_tables() {
    let factors = |by: f64| (0..8).map(|i| 1.0 + by * f64::from(i)).collect::<Vec<_>>();
    let fields = with(
        json!({ "model_type": "phi3", "max_position_embeddings": 1024, "original_max_position_embeddings": 256,
        "rope_scaling": { "type": "longrope", "short_factor": factors(0.0), "long_factor": factors(1.0) } }),
    );
    let config = parse(fields).unwrap();
    let rope = &config.architecture.downcast_family::<StandardDecoder>().unwrap().block.attention.rope;
    let RopeFrequencies::Long { short, long, original } = &rope.frequencies else { panic!("{rope:?}") };
    assert_eq!(
        (short[3], long[3], *original),
        (frequencies(16, 10000.0)[3], frequencies(16, 10000.0)[3] / 4.0, 256)
    );
    assert_eq!(rope.scale, (1.0 + 4f64.ln() / 256f64.ln()).sqrt() as f32);
}

#[test]
fn windows_are_by_layer() {
    let mistral = read(json!({ "model_type": "mistral", "sliding_window": 8 }));
    assert_eq!(mistral.block.attention.windows, [Some(8), Some(8)]);
    let off = read(json!({ "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": false }));
    assert_eq!(off.block.attention.windows, [None, None]);
    let upper = json!({ "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1 });
    assert_eq!(read(upper).block.attention.windows, [None, Some(8)]);
}

/// A configuration of another size than the tensors is refused with both.
#[test]
fn tensors_of_another_model_are_refused() {
    let stored = parse(llama()).unwrap().architecture;
    let tensors = stored.tensor_shapes().into_iter().map(|(name, shape)| {
        let values = stored.distribution(&name, &shape);
        (name, shape, values)
    });
    let checkpoint = Checkpoint::random(0, tensors.collect()).unwrap();
    let other =
        read(json!({ "num_key_value_heads": 4, "attention_bias": true, "tie_word_embeddings": true }));
    let ignored = |name: &str| ModelDefinition::is_ignored(&other, name);
    let error = tensor_check::check_tensors(&other.tensor_shapes(), &checkpoint, ignored).unwrap_err();
    assert_eq!(error.misshaped.len(), 4);
    assert_eq!(
        error.misshaped[0],
        ("model.layers.0.self_attn.k_proj.weight".to_string(), vec![64, 64], vec![32, 64])
    );
    assert_eq!(error.missing.len(), 8);
    // The head of a checkpoint whose configuration ties it is let pass.
    assert_eq!(error.extra, []);
}

/// Heads of Gemma 4's layers without a window, by layer in newer files.
#[test]
fn heads_of_single_layers() {
    let gemma = |changes: Value| {
        let mut fields = json!({ "model_type": "gemma4_text", "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 8,
            "attention_k_eq_v": true, "rope_parameters": {
                "full_attention": { "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25 },
                "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 } }, "layer_types": ["sliding_attention", "full_attention", "full_attention"] });
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fields
    };
    let read = |changes| {
        parse(with(gemma(changes))).unwrap().architecture.downcast_family::<Gemma4Config>().cloned()
    };
    let layer = json!({ "head_dim": 32, "num_key_value_heads": 1 });
    let newer = read(json!({ "per_layer_config": { "1": layer, "2": layer } }));
    assert_eq!(newer, read(json!({ "global_head_dim": 32, "num_global_key_value_heads": 1 })));
    // What no layer tells is as in the layers with a window.
    let same = json!({ "global_head_dim": 16, "num_global_key_value_heads": 2 });
    assert_eq!(read(json!({ "per_layer_config": {} })), read(same));
    for layers in [
        json!({ "0": layer, "1": layer, "2": layer }),
        json!({ "1": layer }),
        json!({ "1": { "intermediate_size": 8 }, "2": layer }),
        json!({ "x": layer }),
    ] {
        refused(
            gemma(json!({ "per_layer_config": layers })),
            &["`per_layer_config`", "equal in all of them"],
        );
    }
    refused(gemma(json!({ "per_layer_config": { "1": 7 } })), &["should be an object"]);
}

/// Rotary embedding by kind of layer, as newer files of OLMo 3 have it; other families have one for all.
#[test]
fn rotary_embedding_by_kind_of_layer() {
    let yarn = json!({ "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16 });
    let mut full = yarn.clone();
    full.as_object_mut().unwrap().insert("rope_theta".into(), json!(5e5));
    let kinds =
        json!({ "full_attention": full, "sliding_attention": { "rope_type": "default", "rope_theta": 5e5 } });
    let read = |changes: Value| {
        let mut fields = with(json!({ "model_type": "olmo3", "sliding_window": 8 }));
        fields.extend(changes.as_object().unwrap().clone());
        parse(fields).unwrap().architecture.downcast_family::<StandardDecoder>().cloned()
    };
    let older = read(json!({ "rope_theta": 5e5, "rope_scaling": yarn }));
    assert_eq!(read(json!({ "rope_parameters": kinds })), older);
    refused(json!({ "rope_parameters": kinds }), &["`rope_parameters`", "one set of numbers for all layers"]);
    let half = json!({ "full_attention": { "rope_theta": 5e5 } });
    refused(
        json!({ "model_type": "olmo3", "sliding_window": 8, "rope_parameters": half }),
        &["`sliding_attention` is missing"],
    );
}
