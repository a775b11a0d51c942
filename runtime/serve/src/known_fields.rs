//! Fields that clients of other servers send: one rule, and the names as data.
//!
//! A field that asks for nothing at its value is ignored. One that asks for something that is not here is an
//! error that names it and says what to do. A field that is here under another name is read with that one,
//! and not in these tables. Other names are unknown: a field that is spelled wrong is an error, unless it is
//! `null` or empty.

use serde_json::{Value, json};

use crate::error::ApiError;

/// Values of a field at which it asks for nothing; `null` is always one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NeutralValue {
    /// The field changes no text: it is a hint, names the client, or belongs to another field that is off.
    Any,
    /// An empty string, list or object.
    Empty,
    Bool(bool),
    Number(f64),
    /// A number that is not above this.
    AtMost(f64),
    Text(&'static str),
    /// One of these, or a list of some.
    Among(&'static [&'static str]),
    /// A list of some of these in their order.
    Ordered(&'static [&'static str]),
}
use NeutralValue::{Among, Any, AtMost, Bool, Empty, Number, Ordered, Text};

/// A field, at which values it is ignored, and what it asks for at others.
#[derive(Debug, Clone, Copy)]
pub struct KnownField {
    pub name: &'static str,
    neutral: NeutralValue,
    /// The text behind "asks for".
    wants: &'static str,
}

pub const fn field(name: &'static str, neutral: NeutralValue, wants: &'static str) -> KnownField {
    KnownField { name, neutral, wants }
}

pub const fn ignored(name: &'static str) -> KnownField {
    field(name, Any, "")
}

/// The samplers in their order here, and behind it again those that llama.cpp's server puts before the
/// temperature: its usual list, which many of its clients send, is a part of it as well.
const SAMPLERS: &[&str] = &[
    "penalties",
    "dry",
    "top_n_sigma",
    "temperature",
    "top_k",
    "typ_p",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
];

/// Fields of all requests for texts: of OpenAI, llama.cpp, vLLM, SGLang, OpenRouter.
pub const TEXTS: &[KnownField] = &[
    // The client, and how the request is billed, kept and counted.
    ignored("user"),
    ignored("metadata"),
    ignored("client_metadata"),
    ignored("store"),
    ignored("service_tier"),
    ignored("safety_identifier"),
    ignored("prompt_cache_key"),
    ignored("prompt_cache_retention"),
    ignored("request_id"),
    ignored("rid"),
    ignored("session_id"),
    ignored("usage"),
    ignored("verbosity"),
    ignored("prediction"),
    ignored("keep_alive"),
    ignored("ttl"),
    // Caches and slots.
    field(
        "id_slot",
        AtMost(-1.0),
        "a certain slot; the server picks the one that has cached most of the prompt",
    ),
    ignored("n_keep"),
    ignored("n_discard"),
    ignored("n_cache_reuse"),
    field("cache_salt", Empty, "caches apart from those of others; `cache_prompt: false` uses none"),
    field("kv_transfer_params", Empty, "caches of another server"),
    // Drafts change no text.
    ignored("speculative.n_max"),
    ignored("speculative.n_min"),
    ignored("speculative.p_min"),
    // Samplers, and what belongs to them.
    field("tfs_z", Number(1.0), "tail-free sampling; `min_p` and `top_p` leave out unlikely tokens"),
    field("top_a", Number(0.0), "top-a sampling; `min_p` is like it"),
    field("top_n_sigma", AtMost(0.0), "top-n-sigma sampling; `min_p` leaves out unlikely tokens"),
    field("dynatemp_range", Number(0.0), "a temperature that changes; `temperature` is a fixed one"),
    ignored("dynatemp_exponent"),
    field(
        "adaptive_target",
        AtMost(-1e-9),
        "adaptive sampling; `temperature` and `min_p` choose how free a text is",
    ),
    ignored("adaptive_decay"),
    field("min_keep", AtMost(1.0), "tokens that no sampler may leave out"),
    field(
        "no_repeat_ngram_size",
        Number(0.0),
        "no repeated n-grams; `repeat_penalty` is against repetitions",
    ),
    field("guidance_scale", Number(1.0), "guidance by a second prompt"),
    field(
        "samplers",
        Ordered(SAMPLERS),
        "other samplers or another order; docs/run.md has those that there are",
    ),
    field("logits_processors", Empty, "code that changes logits; `logit_bias` adds to them"),
    field("custom_logit_processor", Empty, "code that changes logits; `logit_bias` adds to them"),
    field("vllm_xargs", Empty, "arguments of plug-ins"),
    // Searches for the best text.
    field("use_beam_search", Bool(false), "beam search; `n` makes several texts"),
    field("num_beams", AtMost(1.0), "beam search; `n` makes several texts"),
    field("best_of", AtMost(1.0), "the best of several texts; `n` makes several"),
    ignored("length_penalty"),
    field("early_stopping", Bool(false), "an early end of a beam search"),
    // The form of a text, and its end.
    field("allowed_token_ids", Empty, "only certain tokens; `guided_regex` constrains the form of a text"),
    field("bad_words", Empty, "words that are never written; `logit_bias` of -100 bans a token"),
    field("bad_words_ids", Empty, "tokens that are never written; `logit_bias` of -100 bans a token"),
    field("structural_tag", Empty, "a grammar inside tags; `guided_grammar` constrains a text to a grammar"),
    field(
        "guided_whitespace_pattern",
        Empty,
        "a pattern of blanks; `guided_grammar` constrains a text to a grammar",
    ),
    ignored("guided_decoding_backend"),
    field(
        "include_stop_str_in_output",
        Bool(false),
        "the stop string at the end of the text, where the client can put it",
    ),
    field("n_indent", Number(0.0), "lines of a least indentation"),
    field("t_max_predict_ms", AtMost(0.0), "a limit of time; `max_tokens` limits a text"),
    field("t_max_prompt_ms", AtMost(0.0), "a limit of time; `max_tokens` limits a text"),
    // Fields of log probabilities.
    field("return_tokens", Bool(false), "the ids of tokens; /tokenize has those of a text"),
    field("return_token_ids", Bool(false), "the ids of tokens; /tokenize has those of a text"),
    field("return_tokens_as_token_ids", Bool(false), "the ids of tokens; /tokenize has those of a text"),
    field(
        "post_sampling_probs",
        Bool(false),
        "probabilities after the samplers; `logprobs` has those of the model",
    ),
    field(
        "prompt_logprobs",
        Empty,
        "probabilities of the prompt; /v1/completions has them with `echo` and `logprobs`",
    ),
    field("return_hidden_states", Bool(false), "hidden states"),
    field("response_fields", Empty, "only some fields of the answer"),
    field(
        "timings_per_token",
        Bool(false),
        "times with each token; `stream_options.include_usage` has those of the whole text",
    ),
    field("return_progress", Bool(false), "how far the prompt is read"),
    field("detokenize", Bool(true), "an answer without text"),
    ignored("spaces_between_special_tokens"),
    // Models and inputs.
    field("lora", Empty, "adapters by number; an adapter's name is a `model`"),
    field("lora_path", Empty, "an adapter; its name is a `model`"),
    field(
        "truncate_prompt_tokens",
        Empty,
        "truncation of the prompt; a prompt that is too long is an error that says by how much",
    ),
    field("prompt_embeds", Empty, "a prompt of vectors"),
    field("mm_processor_kwargs", Empty, "a processor of images or sounds"),
    field("media_io_kwargs", Empty, "images or sounds"),
    field("image_data", Empty, "images"),
    field("multimodal_data", Empty, "images or sounds"),
    field("transforms", Empty, "a conversation that is shortened"),
    field("plugins", Empty, "plug-ins of a provider"),
];

/// Fields of chats in addition to those of all texts.
pub const CHATS: &[KnownField] = &[
    field("modalities", Among(&["text"]), "answers other than text"),
    field("audio", Empty, "spoken answers"),
    // Even an empty object asks for it.
    field("web_search_options", Text(""), "a search of the web; give the model a function for it in `tools`"),
    field("functions", Empty, "functions in an old form; `tools` has them now"),
    field("function_call", Among(&["none", "auto"]), "a call in an old form; `tool_choice` asks for one now"),
    field("echo", Bool(false), "the last message in the answer, where the client can put it"),
    field("add_special_tokens", Bool(false), "special tokens in addition to those of the chat template"),
    field("chat_template", Empty, "another chat template; set it when the server starts: --template"),
    field("parse_tool_calls", Bool(true), "calls as text; without `tools` they are text"),
    field(
        "separate_reasoning",
        Bool(true),
        "reasoning inside of the text; `reasoning_format: \"none\"` leaves it there",
    ),
    field("stream_reasoning", Bool(true), "reasoning that comes at once"),
    field("thinking_forced_open", Bool(false), "reasoning that the template does not start"),
    field(
        "thinking_budget_tokens",
        AtMost(-1.0),
        "a limit of the reasoning; `reasoning_effort` chooses how long it is",
    ),
    field(
        "thinking_token_budget",
        AtMost(-1.0),
        "a limit of the reasoning; `reasoning_effort` chooses how long it is",
    ),
    field(
        "reasoning_budget",
        AtMost(-1.0),
        "a limit of the reasoning; `reasoning_effort` chooses how long it is",
    ),
    field("response_role", Text("assistant"), "another role of the answer"),
    ignored("tool_stream"),
];

/// Fields of completions in addition to those of all texts.
pub const COMPLETIONS: &[KnownField] = &[
    field(
        "suffix",
        Empty,
        "a text between two others; put both into `prompt` as the model was trained to read them",
    ),
    field("reasoning_effort", Any, ""),
];

/// Fields of the Responses API in addition to those of all texts.
pub const RESPONSES: &[KnownField] = &[
    field(
        "include",
        Among(&[
            "reasoning.encrypted_content",
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "message.input_image.image_url",
        ]),
        "more of the answer than there is; /v1/chat/completions has `logprobs`",
    ),
    field("top_logprobs", Number(0.0), "probabilities; /v1/chat/completions has `logprobs`"),
    ignored("stream_options"),
    ignored("max_tool_calls"),
    ignored("context_management"),
    field(
        "truncation",
        Text("disabled"),
        "truncation of the conversation; one that is too long is an error that says by how much",
    ),
    field("background", Bool(false), "an answer that is fetched later; `stream` has it as it comes"),
    field("conversation", Empty, "a stored conversation; `previous_response_id` continues from an answer"),
    field("prompt", Empty, "a prompt that a provider keeps; send it as `instructions`"),
];

/// Fields of Anthropic's API in addition to those of all texts.
pub const MESSAGES: &[KnownField] = &[
    ignored("context_management"),
    ignored("cache_control"),
    ignored("inference_geo"),
    ignored("speed"),
    ignored("betas"),
    ignored("anthropic_beta"),
    ignored("anthropic_version"),
    ignored("user_profile_id"),
    field("container", Empty, "a container at a provider; give the model functions in `tools`"),
    field(
        "mcp_servers",
        Empty,
        "tool servers that a provider calls; give the model their functions in `tools`",
    ),
];

/// Fields of requests for vectors and scores.
pub const VECTORS: &[KnownField] = &[ignored("user")];

/// Fields of requests that take an adapter away.
pub const ADAPTERS: &[KnownField] = &[ignored("lora_int_id")];

impl KnownField {
    /// True if the field can be left out.
    fn is_neutral(&self, value: &Value) -> bool {
        let number = value.as_f64();
        match self.neutral {
            _ if value.is_null() => true,
            Any => true,
            Empty => is_empty(value),
            Bool(neutral) => *value == neutral,
            Number(neutral) => number == Some(neutral),
            AtMost(most) => number.is_some_and(|number| number <= most),
            Text(neutral) => value == neutral,
            Among(known) => {
                let is_known = |value: &Value| value.as_str().is_some_and(|text| known.contains(&text));
                value.as_array().map_or_else(|| is_known(value), |values| values.iter().all(is_known))
            }
            Ordered(known) => value.as_array().is_some_and(|values| {
                let mut rest = known.iter();
                values.iter().all(|value| rest.any(|name| value == name))
            }),
        }
    }

    /// The description for the API.
    pub fn description(&self) -> Value {
        match self.neutral {
            Any => json!({"description": "Ignored."}),
            _ => {
                json!({"description": format!("Ignored if it asks for nothing; otherwise an error, because it asks for \
                    {}.", self.wants)})
            }
        }
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The fault of a field that was not read.
pub fn check(name: &str, value: &Value, known: &[&[KnownField]]) -> Result<(), ApiError> {
    let Some(field) = known.iter().copied().flatten().find(|field| field.name == name) else {
        return match is_empty(value) {
            true => Ok(()),
            false => {
                let message = format!("there is no field `{name}` in this request");
                Err(ApiError::field(name, "unknown_field", message))
            }
        };
    };
    if field.is_neutral(value) {
        return Ok(());
    }
    let message = format!(
        "`{name}` is {}, which asks for what this server does not have: {}. Leave it out.",
        crate::fields::excerpt(value),
        field.wants
    );
    Err(ApiError::field(name, "unsupported", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_there_once_and_say_what_they_want() {
        for table in [CHATS, COMPLETIONS, RESPONSES, MESSAGES] {
            let all: Vec<&KnownField> = TEXTS.iter().chain(table).collect();
            for (at, field) in all.iter().enumerate() {
                assert!(all[..at].iter().all(|other| other.name != field.name), "{}", field.name);
                assert_eq!(field.wants.is_empty(), field.neutral == Any, "{}", field.name);
            }
        }
    }

    #[test]
    fn neutral_values_ask_for_nothing() {
        let known = |name: &str, value: Value| check(name, &value, &[TEXTS, CHATS]);
        for (name, neutral, asks) in [
            ("tfs_z", json!(1), json!(0.9)),
            ("dynatemp_range", json!(0.0), json!(0.8)),
            ("id_slot", json!(-1), json!(3)),
            ("top_n_sigma", json!(-1.0), json!(2.0)),
            ("use_beam_search", json!(false), json!(true)),
            ("logits_processors", json!([]), json!(["x"])),
            ("detokenize", json!(true), json!(false)),
            ("modalities", json!(["text"]), json!(["text", "audio"])),
            ("samplers", json!(["top_k", "temperature"]), json!(["min_p", "top_k"])),
            ("web_search_options", Value::Null, json!({})),
            ("function_call", json!("auto"), json!({"name": "f"})),
            ("spelled_wrong", json!([]), json!(false)),
        ] {
            assert_eq!(known(name, neutral.clone()), Ok(()), "{name} {neutral}");
            let error = known(name, asks).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
            assert!(error.message.contains(&format!("`{name}`")), "{error:?}");
            assert_eq!(known(name, Value::Null), Ok(()), "{name}");
        }
        assert_eq!(known("metadata", json!({"a": 1})), Ok(()));
    }
}
