//! What becomes of the fields of the configuration classes of transformers: which are read, which are refused unless they have the
//! value that is built, and which say nothing of what a model computes.

use super::fields::ConfigFields;
use super::sizes::{CONTEXT, HEAD_SIZE, HEADS, KV_HEADS, VOCAB};
use crate::error::ConfigError;
use serde_json::Value;

/// Fields of a configuration class, separated by spaces. `models/tests/all/config_fields.rs` wants every field in one of these, or
/// in [`COMMON_FIELDS`], and tries other values of each.
#[derive(Clone, Copy, Debug)]
pub struct PublishedFields {
    /// The definition reads it: another value is another model, or is refused by name. With `=` and a value (as JSON): what a
    /// config.json means that leaves it out, which is the default of the class, where the code that families share has another.
    pub read: &'static str,
    /// It would change the numbers and is not read: any other value than this one (`=` and JSON), or null, is refused by name.
    pub only: &'static str,
    /// It says nothing of what the model computes: training, caches, ids of tokens, where numbers are held.
    pub none: &'static str,
}

impl PublishedFields {
    /// Of model types that transformers does not have.
    pub const UNKNOWN: PublishedFields = PublishedFields { read: "", only: "", none: "" };
}

/// Fields of all classes that say nothing of what a model computes.
pub const COMMON_FIELDS: &str = "attention_dropout attention_probs_dropout_prob attn_pdrop bos_token_id classifier_dropout \
        dropout dropout_rate emb_pdrop embd_pdrop embedding_dropout eos_token_id hidden_dropout \
        hidden_dropout_prob init_std initializer_factor initializer_range layerdrop \
        output_router_logits pad_token_id pretraining_tp resid_pdrop residual_dropout \
        router_aux_loss_coef router_jitter_noise use_cache";

/// The field that says that others come from a GGUF file, which leaves out other ones: it has the name of the architecture there.
pub(crate) const GGUF: &str = "gguf.architecture";
/// The way of pooling, as GGUF files say it, by its name.
pub(crate) const GGUF_POOLING: &str = "gguf.pooling";
/// The widths of dense layers after it.
pub(crate) const GGUF_DENSE: &str = "gguf.dense";

/// Names of one thing: a file that has one of them leaves none out.
const NAMES: [&[&str]; 7] = [
    &CONTEXT,
    &HEADS,
    &HEAD_SIZE,
    &KV_HEADS,
    &VOCAB,
    &["n_inner", "intermediate_size"],
    &["rope_parameters", "rope_scaling"],
];

/// The fields of a config.json with those that it leaves out and that its class has another default for than the code that families
/// share. What is null stays so, unless it is an object, which classes make of a null too.
pub(crate) fn with_defaults(published: &PublishedFields, fields: &ConfigFields) -> ConfigFields {
    let mut complete = fields.clone();
    if fields.get(GGUF).is_some() {
        return complete;
    }
    for (field, value) in listed_values(published.read) {
        let Ok(value) = serde_json::from_str::<Value>(value) else { continue };
        let is_said = fields.raw.contains_key(field) && !(value.is_object() && fields.raw[field].is_null());
        let mut names = NAMES.iter().filter(|names| names.contains(&field)).copied().flatten();
        if !is_said && !names.any(|name| fields.get(name).is_some()) {
            complete.raw.insert(field.to_string(), value);
        }
    }
    complete
}

/// Refuses a field that would change the numbers, is not read, and has another value than the one that is built.
pub(crate) fn reject_unbuilt_values(
    published: &PublishedFields,
    fields: &ConfigFields,
) -> Result<(), ConfigError> {
    for (field, value) in listed_values(published.only) {
        let (Some(found), Ok(built)) = (fields.get(field), serde_json::from_str::<Value>(value)) else {
            continue;
        };
        let equal = *found == built || found.as_f64().is_some_and(|number| built.as_f64() == Some(number));
        if !equal {
            return Err(ConfigError::NotSupportedYet {
                file: fields.origin.clone(),
                what: format!("a model with `{field}` = {found}"),
                supported: format!("`{field}` = {value}"),
            });
        }
    }
    Ok(())
}

/// The fields that have a value, and that value as JSON.
fn listed_values(list: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    list.split_whitespace().filter_map(|rule| rule.split_once('='))
}
