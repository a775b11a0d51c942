//! `adapter_config.json`: the factor of each module, and what is not merged.

use crate::config::ConfigFields;
use crate::error::{AdapterError, ConfigError, shorten_name};
use fancy_regex::Regex;
use serde_json::Value;
use std::path::Path;

pub(super) struct AdapterConfig {
    /// The base as the file names it.
    pub base: String,
    pub dora: bool,
    /// A tied head goes with the embedding table (`ensure_weight_tying`).
    pub keeps_ties: bool,
    /// The file, for messages.
    origin: String,
    alpha: f64,
    /// `alpha / sqrt(rank)` in place of `alpha / rank`.
    rank_stabilized: bool,
    /// Patterns of modules with an alpha of their own.
    alphas: Vec<(Regex, f64)>,
    rank: Option<usize>,
    /// Patterns of modules with a rank of their own.
    ranks: Vec<(Regex, usize)>,
}

/// Ranks above this are wider than any layer.
const MOST_RANK: usize = 1 << 20;

/// Fields that ask for a computation of another kind if they are set.
const REFUSED: [(&str, &str); 7] = [
    ("alora_invocation_tokens", "an activated LoRA, which starts at a token"),
    ("arrow_config", "a router of adapters (Arrow)"),
    ("layer_replication", "repeated layers (`layer_replication`)"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "block-diagonal LoRA"),
    (
        "target_parameters",
        "adapters of single parameters, as of experts stored as one tensor (`target_parameters`)",
    ),
    ("trainable_token_indices", "rows of embeddings (`trainable_token_indices`)"),
];

/// Ways to initialize an adapter that change the base too; the base of the model folder is not the one that it fits.
const OTHER_BASES: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl AdapterConfig {
    pub fn read(path: &Path) -> Result<AdapterConfig, AdapterError> {
        let fields = ConfigFields::read(path)?;
        let refused =
            |what: &str| AdapterError::Unsupported { file: fields.origin.clone(), what: what.to_string() };
        let kind = fields.string("peft_type")?;
        if kind != "LORA" {
            let plain: String = kind.chars().filter(|c| !c.is_control()).take(40).collect();
            return Err(refused(&format!("an adapter of the type `{plain}`")));
        }
        let is_set = |value: &Value| match value {
            Value::Bool(flag) => *flag,
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            _ => true,
        };
        if let Some((_, what)) = REFUSED.iter().find(|(field, _)| fields.get(field).is_some_and(is_set)) {
            return Err(refused(what));
        }
        if let Some(Value::String(init)) = fields.get("init_lora_weights")
            && let Some(name) = OTHER_BASES.iter().find(|name| init.to_lowercase().starts_with(*name))
        {
            return Err(refused(&format!(
                "an adapter that began with `{name}`, which changes the base; convert it with PEFT's \
                 `path_initial_model_for_weight_conversion`"
            )));
        }
        let alpha = fields.float_or("lora_alpha", 8.0)?;
        if !alpha.is_finite() {
            return Err(fields
                .invalid_value("lora_alpha", "a finite number", &fields.raw["lora_alpha"])
                .into());
        }
        Ok(AdapterConfig {
            base: fields.string("base_model_name_or_path").unwrap_or_else(|_| "no base".into()),
            dora: fields.flag_or("use_dora", false)?,
            keeps_ties: fields.flag_or("ensure_weight_tying", false)?,
            alpha,
            rank_stabilized: fields.flag_or("use_rslora", false)?,
            alphas: read_patterns(&fields, "alpha_pattern", "a number", |value| {
                value.as_f64().filter(|alpha| alpha.is_finite())
            })?,
            rank: match fields.get("r") {
                None => None,
                Some(found) => Some(parse_rank(found).ok_or_else(|| fields.invalid_value("r", RANK, found))?),
            },
            ranks: read_patterns(&fields, "rank_pattern", RANK, parse_rank)?,
            origin: fields.origin,
        })
    }

    /// What the product of the factors of a module is multiplied with; their rank has to be the one that the file states.
    pub fn module_scale(&self, module: &str, rank: usize) -> Result<f64, AdapterError> {
        let own = self.match_pattern(&self.ranks, "rank_pattern", module)?;
        let (field, stated) = match own {
            Some(own) => ("rank_pattern", Some(own)),
            None => ("r", self.rank),
        };
        if let Some(stated) = stated.filter(|stated| *stated != rank) {
            return Err(AdapterError::Rank {
                file: self.origin.clone(),
                field: field.to_string(),
                found: stated.to_string(),
                expected: format!("{rank}, as the factors of `{}` have", shorten_name(module)),
            });
        }
        let alpha = self.match_pattern(&self.alphas, "alpha_pattern", module)?.unwrap_or(self.alpha);
        let rank = rank as f64;
        Ok(alpha / if self.rank_stabilized { rank.sqrt() } else { rank })
    }

    /// The value of the first pattern that fits a module.
    fn match_pattern<T: Copy>(
        &self,
        patterns: &[(Regex, T)],
        field: &str,
        module: &str,
    ) -> Result<Option<T>, AdapterError> {
        for (pattern, value) in patterns {
            let matches = pattern.is_match(module).map_err(|error| AdapterError::Unsupported {
                file: self.origin.clone(),
                what: format!("the pattern `{}` in `{field}` ({error})", shorten_name(pattern.as_str())),
            })?;
            if matches {
                return Ok(Some(*value));
            }
        }
        Ok(None)
    }
}

const RANK: &str = "a rank from 1 to 1048576";

fn parse_rank(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok().filter(|rank| (1..=MOST_RANK).contains(rank))
}

/// Patterns are regular expressions for the end of a module's name, from a dot on; the first that matches counts.
fn read_patterns<T>(
    fields: &ConfigFields,
    field: &str,
    expected: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(Regex, T)>, AdapterError> {
    let Some(patterns) = fields.nested_object(field)? else { return Ok(Vec::new()) };
    let mut found = Vec::with_capacity(patterns.raw.len());
    for (pattern, value) in &patterns.raw {
        let wrong = |expected: &str, found: &Value| -> ConfigError {
            patterns.invalid_value(pattern, expected, found)
        };
        let read = read(value).ok_or_else(|| wrong(expected, value))?;
        let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"));
        let regex = regex.map_err(|_| wrong("under a name that is a regular expression", value))?;
        found.push((regex, read));
    }
    Ok(found)
}
