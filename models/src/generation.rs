//! `generation_config.json`: what the model's authors recommend for sampling. Every field may be absent.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use std::path::Path;

/// Fields not in the file are `None`; flags and tool defaults are merged elsewhere.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    pub bos_token_id: Option<u32>,
    /// Generation stops at any of these.
    pub eos_token_ids: Vec<u32>,
    /// `false` asks for greedy decoding.
    pub do_sample: Option<bool>,
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub max_new_tokens: Option<usize>,
}

impl GenerationConfig {
    pub fn read(path: &Path) -> Result<GenerationConfig, ConfigError> {
        GenerationConfig::from_fields(&ConfigFields::read(path)?)
    }

    pub fn parse(origin: &str, json: &[u8]) -> Result<GenerationConfig, ConfigError> {
        GenerationConfig::from_fields(&ConfigFields::parse(origin, json)?)
    }

    fn from_fields(fields: &ConfigFields) -> Result<GenerationConfig, ConfigError> {
        let number = |field: &str, low: f64, high: f64| match fields.get(field) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(x) if (low..=high).contains(&x) => Ok(Some(x)),
                _ => Err(fields.wrong(field, &format!("a number from {low} to {high}"), value)),
            },
        };
        let count = |field: &str| match fields.get(field) {
            None => Ok(None),
            Some(_) => fields.count_or(field, 0).map(Some),
        };
        Ok(GenerationConfig {
            bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: fields.token_ids("eos_token_id")?,
            do_sample: match fields.get("do_sample") {
                None => None,
                Some(_) => Some(fields.flag_or("do_sample", false)?),
            },
            temperature: number("temperature", 0.0, 100.0)?,
            top_k: count("top_k")?,
            top_p: number("top_p", 0.0, 1.0)?,
            min_p: number("min_p", 0.0, 1.0)?,
            repetition_penalty: number("repetition_penalty", 0.0, 100.0)?,
            max_new_tokens: count("max_new_tokens")?,
        })
    }
}
