//! The metadata JSON of an artifact. Only facts that equal input makes equal: no paths, no times.

use mlcc_codegen::ptxas::driver_of_ptx;
use mlcc_models::{AdapterRequest, PoolingHead, PoolingOutput, PromptPrefixes};
use mlcc_passes::LoweredProgram;
use mlcc_passes::plan_memory::MemoryPlan;
use mlcc_target::{Arch, CompileTarget, FeatureLevel};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::table::{COMPILER, cache_row, decoder_start};
use super::{BuildOptions, BuildSource, profile, report, taps};

/// Version of the layout of the metadata.
const LAYOUT: u32 = 1;

pub fn metadata_json(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    program: &LoweredProgram,
    memory: &MemoryPlan,
) -> String {
    let traffic = report::DecodeTraffic::for_program(program, memory);
    let formats = report::formats(program, Some(memory));
    let config = &source.model.config;
    let mut value = json!({
        "layout": LAYOUT,
        "compiler": COMPILER,
        "backend": options.backend.name(),
        "model": {
            "name": source.model.name,
            "type": config.model_type,
            "parameters": report::parameter_count(program),
            "context_length": config.architecture.context_length(),
            "config": config.raw,
        },
        "quantization": { "scheme": options.quant.name, "keep": options.keep_quant, "formats": formats },
        "target": {
            "name": options.target,
            "triple": target.triple,
            "levels": target.levels.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(),
        },
        "memory": memory_json(source, target, options, program, memory),
        "decode": {
            "bytes_per_token": traffic.bytes,
            "state_bytes": traffic.state_bytes,
            "ops_per_token": traffic.ops,
            "head_ops": traffic.head_ops,
            "other_expert_bytes": traffic.other_experts,
        },
        "generation_config": source.generation_config.as_deref().and_then(parse),
        "tokenizer": source.tokenizer.as_ref().map(|t| json!({
            "kind": t.file.kind.tag(),
            "tokens": t.tokenizer.vocab_size(),
            "bos_token_id": t.special.bos,
            "eos_token_ids": t.special.eos,
            "special_tokens": t.names,
            "xxh3_128": hash(&t.file.bytes),
        })),
        "chat": source.chat.as_ref().map(|chat| json!({ "xxh3_128": hash(&chat.to_section()) })),
        "source": {
            "format": format!("{:?}", source.checkpoint.format).to_lowercase(),
            "tensors": source.checkpoint.tensors().len(),
            "config_xxh3_128": hash(Value::Object(config.raw.clone()).to_string().as_bytes()),
        },
    });
    if let Some(repository) = &source.model.repository {
        value["source"]["repository"] = json!(repository.name);
        value["source"]["commit"] = json!(repository.commit);
    }
    let adapters = &source.model.adapters;
    if !adapters.is_empty() {
        let adapter = |a: &AdapterRequest| json!({ "name": a.name(), "scale": a.scale });
        value["source"]["adapters"] = adapters.iter().map(adapter).collect();
    }
    if let Some(tuning) = &options.tuning {
        value["tuning"] = tuning.json();
    }
    if let Some(head) = config.architecture.pooling_head() {
        value["texts"] = texts(head, &source.model.prompts, config.architecture.token_types());
    }
    if options.batch_invariant {
        value["batch_invariant"] = json!(true);
    }
    if target.arch == Arch::Nvptx {
        value["target"]["images"] = images(target, options);
        if let Some(assembler) = &options.assembler {
            value["target"]["ptxas"] = json!(assembler.version);
        }
    } else {
        value["profile"] = profile::profile_json(program);
    }
    let taps = taps::tap_places(program, memory);
    if !taps.is_empty() {
        value["taps"] = json!(taps);
        // The fields that `mlcc verify --layers` needs to build the same graph again.
        value["passes_off"] = json!(options.passes_off());
        value["kv_cache"] = json!(options.cache_type().name());
        if let Some(stream) = source.model.config.architecture.streaming_window() {
            value["stream"] = json!({ "window": stream.window, "sinks": stream.sinks });
        }
        value["quant_policy"] = json!(options.policy.to_toml());
    }
    value.to_string()
}

/// The GPU images: which they are, and the CUDA version that their driver needs at least.
fn images(target: &CompileTarget, options: &BuildOptions) -> Value {
    let of_level = |level: &FeatureLevel| {
        let text = level.gpu.as_ref().and_then(|gpu| driver_of_ptx(gpu.ptx));
        let image = |kind: &str, cuda: Option<&str>| json!({ "kind": kind, "for": level.name, "cuda": cuda });
        let code = options.assembler.as_ref().map(|a| image("cubin", Some(&a.required_cuda_version())));
        [Some(image("ptx", text)), code].into_iter().flatten().collect::<Vec<_>>()
    };
    target.levels.iter().flat_map(of_level).collect()
}

fn memory_json(
    source: &BuildSource,
    target: &CompileTarget,
    options: &BuildOptions,
    program: &LoweredProgram,
    memory: &MemoryPlan,
) -> Value {
    let entries = memory.arena_sizes().map(|(name, bytes)| (name.to_string(), Value::from(bytes)));
    let (page_bytes, sequence_bytes) = memory.on_all_ranks(program);
    json!({
        "chunk": source.chunk,
        "batch": options.max_batch(target),
        "context": source.context_limit(options),
        "weights_bytes": memory.weights_bytes,
        "state_bytes": memory.state_bytes,
        "page_bytes": page_bytes,
        "sequence_bytes": sequence_bytes,
        "cache": cache_row(program, memory),
        "vocab": source.model.config.architecture.token_id_count(),
        "text_width": source.model.config.architecture.embedding_size().unwrap_or(0),
        "ranks": program.module.rank_count(),
        "adapter_slots": options.adapters.map_or(0, |slots| slots.slots),
        "adapter_rank": options.adapters.map_or(0, |slots| slots.rank),
        "adapter_bytes": memory.adapter_bytes,
        "decoder_start": decoder_start(source),
        "max_workers": memory.max_workers().unwrap_or(0),
        "window": source.model.config.architecture.window(),
        "sinks": source.model.config.architecture.sinks(),
        "arena_bytes": memory.arena_bytes(),
        "arena_bytes_by_entry": entries.collect::<serde_json::Map<_, _>>(),
    })
}

/// The purpose of a model of texts, and the prefixes and separators of its texts.
fn texts(head: &PoolingHead, prompts: &PromptPrefixes, token_types: usize) -> Value {
    let named = prompts.named.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str())));
    json!({
        "purpose": match head.output {
            PoolingOutput::Embedding => "embedding",
            PoolingOutput::Scores => "scores",
        },
        "pooling": head.pooling.name(),
        "prompts": named.collect::<serde_json::Map<_, _>>(),
        "default_prompt": prompts.default,
        "opens_answer": prompts.opens_answer,
        "token_types": token_types,
    })
}

fn parse(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(bytes).ok()
}

fn hash(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}
