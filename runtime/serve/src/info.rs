//! Information of the server about a model.

use mlcc_engine::SamplingParams;
use serde_json::{Value, json};

use crate::served_model::ServedModel;

pub fn props(hosted: &ServedModel) -> Value {
    let limits = hosted.engine.limits();
    let mut settings = sampling(&hosted.sampling);
    settings["n_ctx"] = json!(limits.context);
    json!({
        "model": hosted.name,
        // The names of llama.cpp's server.
        "model_alias": hosted.name,
        "build_info": concat!("mlcc ", env!("CARGO_PKG_VERSION")),
        "chat_template": hosted.format.as_ref().and_then(|format| format.jinja_text()),
        "modalities": {"vision": false, "audio": false},
        "executor": hosted.executor,
        "build": env!("CARGO_PKG_VERSION"),
        "vocab": limits.vocab,
        "context": limits.context,
        "total_slots": hosted.sequences,
        "max_queue": hosted.server.options.max_queue,
        "chat": hosted.format.is_some(),
        "default_generation_settings": settings,
    })
}

pub fn sampling(params: &SamplingParams) -> Value {
    json!({
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repeat_penalty,
        "repeat_last_n": params.repeat_last_n,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "typical_p": params.extra.typical_p,
        "xtc_probability": params.extra.xtc_probability,
        "xtc_threshold": params.extra.xtc_threshold,
        "dry_multiplier": params.extra.dry.multiplier,
        "mirostat": if params.extra.mirostat.is_some() { 2 } else { 0 },
        "seed": params.seed,
    })
}

/// The places for running texts: which text runs there, and how many tokens the state there has.
pub fn slots(hosted: &ServedModel) -> Value {
    let stats = hosted.engine.stats();
    let context = hosted.engine.limits().context;
    let of = |(id, slot): (usize, &mlcc_engine::serving::SlotInfo)| json!({"id": id, "is_processing": slot.running.is_some(), "text": slot.running, "n_past": slot.tokens, "n_ctx": context});
    stats.slots.iter().enumerate().map(of).collect()
}
