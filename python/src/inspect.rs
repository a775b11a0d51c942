//! Information about a loaded model.

use mlcc_runtime::Model;
use serde_json::{Value, json};

/// The output of `mlcc inspect --json`, with additions of the loaded model.
pub fn inspect(model: &Model) -> Value {
    let artifact = model.artifact();
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let sections: Vec<Value> =
        artifact.sections().iter().map(|s| json!({"name": s.name, "bytes": s.bytes})).collect();
    let plan = model.plan();
    let some = |number: u64| (number > 0).then_some(number);
    json!({
        "path": artifact.path(),
        "machine": artifact.machine_name(),
        "weights_file": artifact.weights_file(),
        "sections": sections,
        "metadata": metadata,
        "executor": model.executor(),
        "threads": model.threads(),
        "vocab": some(plan.vocab),
        "context": some(plan.context),
        "chunk": plan.chunk,
        "max_batch": model.max_batch(),
        "text_width": some(plan.text_width),
        "bytes": {
            "weights": plan.weights_bytes,
            "scratch": plan.arena_bytes,
            "sequence": plan.sequence_bytes(),
            "token": model.table().cache_bytes_per_token(),
        },
    })
}
