//! `/openapi.json`: the routes with the fields of their requests, as OpenAPI 3.1 describes them.

use serde_json::{Map, Value, json};

use crate::api_route::{ApiRoute, RouteMethod};
use crate::known_fields::{self, KnownField};
use crate::{llama_cpp, ollama};

/// Names and JSON types of fields; `*` marks those that have to be there.
type FieldList = &'static [(&'static str, &'static str)];

const TEXTS: FieldList = &[
    ("model", "string"),
    ("max_tokens", "integer"),
    ("max_completion_tokens", "integer"),
    ("n_predict", "integer"),
    ("min_tokens", "integer"),
    ("n", "integer"),
    ("seed", "integer"),
    ("stop", "string|array"),
    ("stream", "boolean"),
    ("stream_options", "object"),
    ("temperature", "number"),
    ("top_k", "integer"),
    ("top_p", "number"),
    ("min_p", "number"),
    ("repeat_penalty", "number"),
    ("repetition_penalty", "number"),
    ("repeat_last_n", "integer"),
    ("presence_penalty", "number"),
    ("frequency_penalty", "number"),
    ("typical_p", "number"),
    ("typ_p", "number"),
    ("xtc_probability", "number"),
    ("xtc_threshold", "number"),
    ("dry_multiplier", "number"),
    ("dry_base", "number"),
    ("dry_allowed_length", "integer"),
    ("dry_penalty_last_n", "integer"),
    ("dry_sequence_breakers", "array"),
    ("mirostat", "integer"),
    ("mirostat_mode", "integer"),
    ("mirostat_tau", "number"),
    ("mirostat_eta", "number"),
    ("logit_bias", "object|array"),
    ("ignore_eos", "boolean"),
    ("stop_token_ids", "array"),
    ("skip_special_tokens", "boolean"),
    ("n_probs", "integer"),
    ("cache_prompt", "boolean"),
    ("priority", "integer"),
    ("response_format", "object"),
    ("structured_outputs", "object"),
    ("guided_json", "object|string"),
    ("guided_regex", "string"),
    ("guided_choice", "array"),
    ("guided_grammar", "string"),
    ("json_schema", "object|string"),
];
const PROMPT: FieldList = &[
    ("messages*", "array"),
    ("add_generation_prompt", "boolean"),
    ("chat_template_kwargs", "object"),
    ("tools", "array"),
    ("tool_choice", "string|object"),
    ("parallel_tool_calls", "boolean"),
    ("continue_final_message", "boolean"),
    ("documents", "array"),
    ("reasoning_effort", "string"),
    ("reasoning", "object"),
    ("enable_thinking", "boolean"),
    ("thinking", "object|boolean"),
    ("include_reasoning", "boolean"),
    ("reasoning_format", "string"),
];
const CHAT: FieldList = &[("logprobs", "boolean"), ("top_logprobs", "integer")];
const COMPLETION: FieldList = &[
    ("prompt*", "string|array"),
    ("echo", "boolean"),
    ("logprobs", "integer"),
    ("add_special_tokens", "boolean"),
];
const TOKENIZE: FieldList = &[
    ("content", "string"),
    ("prompt", "string"),
    ("add_special", "boolean"),
    ("with_pieces", "boolean"),
    ("messages", "array"),
    ("model", "string"),
];
const RESPONSES: FieldList = &[
    ("model", "string"),
    ("input*", "string|array"),
    ("instructions", "string"),
    ("previous_response_id", "string"),
    ("store", "boolean"),
    ("max_output_tokens", "integer"),
    ("metadata", "object"),
    ("text", "object"),
    ("tools", "array"),
    ("tool_choice", "string|object"),
    ("parallel_tool_calls", "boolean"),
    ("reasoning", "object"),
    ("stream", "boolean"),
    ("temperature", "number"),
    ("top_p", "number"),
    ("top_k", "integer"),
    ("min_p", "number"),
    ("seed", "integer"),
    ("stop", "string|array"),
    ("repeat_penalty", "number"),
    ("presence_penalty", "number"),
    ("frequency_penalty", "number"),
    ("logit_bias", "object"),
    ("ignore_eos", "boolean"),
    ("priority", "integer"),
    ("chat_template_kwargs", "object"),
    ("cache_prompt", "boolean"),
    ("repetition_penalty", "number"),
    ("repeat_last_n", "integer"),
    ("min_tokens", "integer"),
    ("stop_token_ids", "array"),
    ("skip_special_tokens", "boolean"),
    ("documents", "array"),
    ("enable_thinking", "boolean"),
    ("thinking", "object|boolean"),
];
const EMBEDDINGS: FieldList = &[
    ("input*", "string|array"),
    ("model", "string"),
    ("dimensions", "integer"),
    ("encoding_format", "string"),
    ("prompt_name", "string"),
];
const RERANK: FieldList = &[
    ("query*", "string"),
    ("documents*", "array"),
    ("model", "string"),
    ("top_n", "integer"),
    ("return_documents", "boolean"),
];
const LOAD: FieldList = &[("model*", "string"), ("artifact", "string")];
const UNLOAD: FieldList = &[("model*", "string")];
const LOAD_ADAPTER: FieldList =
    &[("lora_name*", "string"), ("lora_path*", "string"), ("load_inplace", "boolean"), ("model", "string")];
const UNLOAD_ADAPTER: FieldList = &[("lora_name*", "string")];
const DETOKENIZE: FieldList = &[("tokens*", "array"), ("model", "string")];
const COUNT: FieldList = &[
    ("model", "string"),
    ("messages*", "array"),
    ("system", "string|array"),
    ("tools", "array"),
    ("tool_choice", "object"),
    ("thinking", "object"),
    ("temperature", "number"),
    ("top_p", "number"),
    ("top_k", "integer"),
    ("stop_sequences", "array"),
    ("stream", "boolean"),
    ("chat_template_kwargs", "object"),
    ("cache_prompt", "boolean"),
    ("min_p", "number"),
    ("seed", "integer"),
    ("stop_token_ids", "array"),
    ("output_config", "object"),
    ("output_format", "object"),
];

const NATIVE_VECTORS: FieldList =
    &[("content", "string|array"), ("input", "string|array"), ("model", "string")];
const INFILL: FieldList = &[
    ("input_prefix*", "string"),
    ("input_suffix*", "string"),
    ("prompt", "string"),
    ("return_tokens", "boolean"),
];
const NATIVE: FieldList =
    &[("prompt*", "string|array"), ("add_special_tokens", "boolean"), ("return_tokens", "boolean")];
const OLLAMA: FieldList = &[
    ("model", "string"),
    ("stream", "boolean"),
    ("format", "string|object"),
    ("options", "object"),
    ("think", "boolean|string"),
    ("keep_alive", "string|number"),
    ("logprobs", "boolean"),
    ("top_logprobs", "integer"),
];
const OLLAMA_CHAT: FieldList = &[("messages", "array"), ("tools", "array")];
const OLLAMA_PROMPT: FieldList =
    &[("prompt", "string"), ("suffix", "string"), ("system", "string"), ("raw", "boolean")];
const OLLAMA_INPUT: FieldList =
    &[("input*", "string|array"), ("dimensions", "integer"), ("model", "string"), ("options", "object")];
const OLLAMA_TEXT: FieldList = &[("prompt*", "string"), ("model", "string"), ("options", "object")];
const SHOW: FieldList =
    &[("model", "string"), ("name", "string"), ("verbose", "boolean"), ("options", "object")];

/// The fields of a route's request.
fn fields(path: &str) -> Vec<(&'static str, &'static str)> {
    match path {
        "/chat/completions" => [PROMPT, TEXTS, CHAT].concat(),
        "/completions" => [COMPLETION, TEXTS].concat(),
        "/messages" => [&[("max_tokens*", "integer")], COUNT].concat(),
        "/messages/count_tokens" => COUNT.to_vec(),
        "/embeddings" => EMBEDDINGS.to_vec(),
        "/rerank" => RERANK.to_vec(),
        "/tokenize" => TOKENIZE.to_vec(),
        "/responses" => RESPONSES.to_vec(),
        "/models/load" => LOAD.to_vec(),
        "/models/unload" => UNLOAD.to_vec(),
        "/load_lora_adapter" => LOAD_ADAPTER.to_vec(),
        "/unload_lora_adapter" => UNLOAD_ADAPTER.to_vec(),
        "/detokenize" => DETOKENIZE.to_vec(),
        "/apply-template" => [PROMPT, TEXTS, CHAT].concat(),
        "/completion" => [NATIVE, TEXTS].concat(),
        "/infill" => [INFILL, TEXTS].concat(),
        "/embedding" => NATIVE_VECTORS.to_vec(),
        "/api/chat" => [OLLAMA, OLLAMA_CHAT].concat(),
        "/api/generate" => [OLLAMA, OLLAMA_PROMPT].concat(),
        "/api/embed" => OLLAMA_INPUT.to_vec(),
        "/api/embeddings" => OLLAMA_TEXT.to_vec(),
        "/api/show" => SHOW.to_vec(),
        _ => Vec::new(),
    }
}

/// Fields that are ignored where they ask for nothing.
fn known(path: &str) -> &'static [&'static [KnownField]] {
    use known_fields::{ADAPTERS, CHATS, COMPLETIONS, MESSAGES, RESPONSES, TEXTS, VECTORS};
    match path {
        "/chat/completions" | "/apply-template" => &[TEXTS, CHATS],
        "/completions" => &[TEXTS, COMPLETIONS],
        "/responses" => &[TEXTS, RESPONSES],
        "/messages" | "/messages/count_tokens" => &[TEXTS, MESSAGES],
        "/embeddings" | "/rerank" => &[VECTORS],
        "/unload_lora_adapter" => &[ADAPTERS],
        "/completion" | "/infill" => &[TEXTS, COMPLETIONS, llama_cpp::FIELDS],
        "/embedding" => &[llama_cpp::VECTOR_FIELDS],
        "/api/chat" | "/api/generate" | "/api/embed" | "/api/embeddings" => &[TEXTS, ollama::FIELDS],
        "/api/show" => &[ollama::FIELDS],
        _ => &[],
    }
}

fn body(path: &str) -> Value {
    let fields = fields(path);
    // Null counts as no field.
    let types = |kinds: &str| kinds.split('|').chain(["null"]).map(Value::from).collect::<Value>();
    let required: Vec<&str> = fields.iter().filter_map(|(name, _)| name.strip_suffix('*')).collect();
    let mut properties: Map<String, Value> = fields
        .iter()
        .map(|(name, kinds)| (name.trim_end_matches('*').to_owned(), json!({"type": types(kinds)})))
        .collect();
    let known = known(path).iter().copied().flatten();
    for field in known {
        properties.entry(field.name).or_insert_with(|| field.description());
    }
    json!({"type": "object", "properties": properties, "required": required})
}

pub fn description(routes: &[ApiRoute]) -> Value {
    let answer = |what: &str| json!({"description": what});
    let mut paths = Map::new();
    for route in routes {
        let mut operation = json!({
            "summary": route.summary,
            "responses": {"200": answer("The answer"), "default": answer("An error, with a message that says what is wrong")},
        });
        if route.verb == RouteMethod::Post {
            let content = json!({"application/json": {"schema": body(route.path)}});
            operation["requestBody"] = json!({"required": true, "content": content});
        }
        if let Some((_, name)) = route.path.split_once('{') {
            let name = name.trim_end_matches('}');
            let in_path = json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
            operation["parameters"] = json!([in_path]);
        }
        let method = match route.verb {
            RouteMethod::Get => "get",
            RouteMethod::Post => "post",
            RouteMethod::Delete => "delete",
        };
        for path in route.paths() {
            paths.entry(path).or_insert_with(|| json!({}))[method] = operation.clone();
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "mlcc serve", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
    })
}
