//! What the server says of itself.

use mlcc_engine::SamplingParams;
use serde_json::{Value, json};

use crate::app::App;

pub fn models(app: &App) -> Value {
    json!({"object": "list", "data": [model(app)]})
}

pub fn model(app: &App) -> Value {
    json!({"id": app.name, "object": "model", "created": app.started, "owned_by": "mlcc"})
}

pub fn props(app: &App) -> Value {
    let limits = app.engine.limits();
    json!({
        "model": app.name,
        "executor": app.executor,
        "build": env!("CARGO_PKG_VERSION"),
        "vocab": limits.vocab,
        "context": limits.context,
        "total_slots": app.sequences,
        "max_queue": app.max_queue,
        "chat": app.format.is_some(),
        "default_generation_settings": sampling(&app.sampling),
    })
}

fn sampling(params: &SamplingParams) -> Value {
    json!({
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repeat_penalty,
        "repeat_last_n": params.repeat_last_n,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
    })
}

/// The places for running texts: which text runs there, and how many tokens the state there has.
pub fn slots(app: &App) -> Value {
    let stats = app.engine.stats();
    let of = |(id, slot): (usize, &mlcc_engine::serving::SlotInfo)| json!({"id": id, "is_processing": slot.running.is_some(), "text": slot.running, "n_past": slot.tokens});
    stats.slots.iter().enumerate().map(of).collect()
}
