//! A good request or several to every route that takes one, with most of its fields.

use serde_json::{Value, json};

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"enum": ["Ulm", "Jena"]}, "n": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["city"], "additionalProperties": false})
}

fn function() -> Value {
    json!({"name": "weather", "description": "d", "parameters": schema()})
}

/// A conversation in which a tool was called.
fn messages() -> Value {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Ulm\"}"}}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
        {"role": "user", "content": "And?"},
    ])
}

fn blocks() -> Value {
    json!([
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}, {"type": "text", "text": "And?"}]},
    ])
}

/// Paths and bodies. No text is long, but where a change makes it so.
pub fn seeds() -> Vec<(&'static str, Value)> {
    let hi = json!([{"role": "user", "content": "Hi"}]);
    let mut all = texts(&hi);
    all.extend(chats(&hi));
    all.extend([
        ("/v1/embeddings", json!({"model": "toy", "input": ["a", "b"], "dimensions": 4, "encoding_format": "float", "prompt_name": "query"})),
        ("/v1/load_lora_adapter", json!({"lora_name": "style", "lora_path": "style", "model": "toy", "load_inplace": true})),
        ("/v1/unload_lora_adapter", json!({"lora_name": "style", "lora_int_id": 1})),
        ("/v1/rerank", json!({"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": true})),
        ("/v1/tokenize", json!({"content": "ab \u{e9}", "add_special": true, "with_pieces": true, "model": "toy"})),
        ("/v1/detokenize", json!({"tokens": [98, 99, 196]})),
        ("/v1/apply-template", json!({"messages": messages(), "tools": [{"type": "function", "function": function()}], "add_generation_prompt": true, "chat_template_kwargs": {"x": 1}})),
        ("/v1/models/load", json!({"model": "none", "artifact": "none"})),
        ("/v1/models/unload", json!({"model": "none"})),
    ]);
    all.extend(other_apis(&hi));
    all
}

/// Requests of Ollama's API and of llama.cpp's.
fn other_apis(hi: &Value) -> Vec<(&'static str, Value)> {
    let called = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "images": []},
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]);
    let options = json!({"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "num_predict": 4, "stop": ["zz"],
        "repeat_penalty": 1.1, "num_ctx": 2048, "num_gpu": 0});
    vec![
        (
            "/api/chat",
            json!({"model": "toy:latest", "messages": called, "options": options, "keep_alive": "5m", "tools": [{"type": "function", "function": function()}]}),
        ),
        (
            "/api/chat",
            json!({"messages": hi, "stream": false, "format": schema(), "options": {"num_predict": 40}}),
        ),
        ("/api/chat", json!({"messages": []})),
        (
            "/api/generate",
            json!({"model": "toy", "prompt": "ab", "system": "Be brief.", "options": {"num_predict": 3}, "logprobs": true, "top_logprobs": 2}),
        ),
        (
            "/api/generate",
            json!({"prompt": "ab", "raw": true, "stream": false, "format": "json", "options": {"num_predict": 9}}),
        ),
        ("/api/embed", json!({"model": "toy", "input": ["a", "b"], "truncate": true, "dimensions": 4})),
        ("/api/embeddings", json!({"model": "toy", "prompt": "a", "options": {}})),
        ("/api/show", json!({"model": "toy", "verbose": true})),
        (
            "/completion",
            json!({"prompt": "ab", "n_predict": 3, "temperature": 0.5, "n_probs": 2, "return_tokens": true, "cache_prompt": true, "id_slot": -1}),
        ),
        ("/completion", json!({"prompt": ["a", "b"], "n_predict": 2, "samplers": ["top_k", "temperature"]})),
        (
            "/completion",
            json!({"prompt": [98], "n_predict": 3, "stream": true, "json_schema": {"type": "boolean"}}),
        ),
        (
            "/infill",
            json!({"input_prefix": "a", "input_suffix": "b", "input_extra": [], "prompt": "c", "n_predict": 3}),
        ),
        ("/embedding", json!({"content": "a"})),
    ]
}

fn texts(hi: &Value) -> Vec<(&'static str, Value)> {
    vec![
        (
            "/v1/completions",
            json!({"prompt": "ab", "max_tokens": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["zz", "y"], "n": 2, "echo": true, "logprobs": 2}),
        ),
        (
            "/v1/completions",
            json!({"prompt": [98, 99, 100], "max_tokens": 3, "stream": true, "stream_options": {"include_usage": true}, "logit_bias": {"98": -1.5}, "presence_penalty": 0.5, "frequency_penalty": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 9, "min_tokens": 1}),
        ),
        ("/v1/completions", json!({"prompt": ["a", "b"], "max_tokens": 4, "guided_choice": ["xy", "z"]})),
        (
            "/v1/completions",
            json!({"prompt": [[98], [99, 100]], "max_tokens": 4, "guided_regex": "[a-f]{2,3}", "priority": 2, "cache_prompt": false}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 4, "guided_grammar": "start: \"a\" /[b-d]+/"}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 30, "structured_outputs": {"json": schema()}, "user": "u"}),
        ),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 2, "ignore_eos": true, "best_of": 1})),
        (
            "/v1/chat/completions",
            json!({"model": "toy", "messages": messages(), "max_completion_tokens": 3, "logprobs": true, "top_logprobs": 2, "n": 2, "seed": 5}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": hi, "max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema(), "strict": true}}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": hi, "max_tokens": 4, "response_format": {"type": "json_object"}, "stream": true}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": hi, "max_tokens": 60, "seed": 3, "stream": true, "tools": [{"type": "function", "function": function()}], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages(), "max_tokens": 5, "tools": [{"type": "function", "function": function()}], "tool_choice": "auto", "parallel_tool_calls": false, "reasoning_effort": "low", "stop": "q"}),
        ),
    ]
}

fn chats(hi: &Value) -> Vec<(&'static str, Value)> {
    let tool = json!({"type": "function", "name": "weather", "parameters": schema(), "strict": true});
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]);
    let format = json!({"type": "json_schema", "name": "p", "schema": schema()});
    vec![
        (
            "/v1/responses",
            json!({"model": "toy", "input": "Hi", "instructions": "Be brief.", "max_output_tokens": 4, "temperature": 0, "metadata": {"a": "b"}, "store": false}),
        ),
        (
            "/v1/responses",
            json!({"input": items, "max_output_tokens": 4, "stream": true, "truncation": "disabled"}),
        ),
        (
            "/v1/responses",
            json!({"input": "Hi", "max_output_tokens": 60, "seed": 3, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false}),
        ),
        ("/v1/responses", json!({"input": hi, "max_output_tokens": 40, "text": {"format": format}})),
        (
            "/v1/messages",
            json!({"model": "toy", "max_tokens": 4, "system": [{"type": "text", "text": "Be brief."}], "messages": hi, "temperature": 0, "stop_sequences": ["zz"], "metadata": {"user_id": "u"}}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 4, "messages": blocks(), "stream": true, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 60, "messages": hi, "tools": [{"name": "weather", "description": "d", "input_schema": schema()}], "tool_choice": {"type": "any", "disable_parallel_tool_use": true}}),
        ),
        (
            "/v1/messages/count_tokens",
            json!({"model": "toy", "system": "Be brief.", "messages": blocks(), "tools": [{"name": "weather", "input_schema": schema()}]}),
        ),
    ]
}
