//! `generation_config.json`: what the makers of a checkpoint recommend for sampling, and its control ids.
//!
//! Its values override the tool's defaults and are overridden by flags. `do_sample: false` means greedy, as
//! in the library that defined the file.

use serde::Deserialize;
use thiserror::Error;

use mlcc_text::TokenId;
use mlcc_text::special_tokens::TokenIdList;

use crate::sampler::{SamplingOverrides, SamplingParams};

#[derive(Debug, Error)]
#[error("{file} is not as expected: {reason}. Correct the field, or remove the file to use the defaults.")]
pub struct GenerationConfigError {
    pub file: String,
    pub reason: String,
}

/// The fields that this engine understands; others are ignored.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct GenerationConfig {
    pub bos_token_id: Option<TokenId>,
    #[serde(default)]
    pub eos_token_id: TokenIdList,
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub max_new_tokens: Option<usize>,
}

impl GenerationConfig {
    /// `file` is the name that an error shows.
    pub fn from_json(file: &str, bytes: &[u8]) -> Result<Self, GenerationConfigError> {
        let wrong = |reason: String| GenerationConfigError { file: file.to_owned(), reason };
        let config: Self = serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()))?;
        let params = SamplingParams::default().with(&config.sampling());
        params.check().map_err(|e| wrong(e.to_string()))?;
        Ok(config)
    }

    /// The sampling settings of the file.
    pub fn sampling(&self) -> SamplingOverrides {
        let greedy = self.do_sample == Some(false);
        SamplingOverrides {
            temperature: if greedy { Some(0.0) } else { self.temperature },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repetition_penalty,
            // The library that defined the field counts every token so far.
            repeat_last_n: self.repetition_penalty.map(|_| -1),
            ..SamplingOverrides::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SamplingParams;

    #[test]
    fn order_is_defaults_file_flags() {
        let file = GenerationConfig::from_json(
            "generation_config.json",
            br#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5], "transformers_version": "4.45.0"}"#,
        )
        .unwrap();
        let flags = SamplingOverrides { top_p: Some(0.5), seed: Some(7), ..SamplingOverrides::default() };
        let params = SamplingParams::default().with(&file.sampling()).with(&flags);
        assert_eq!(params.temperature, 0.6);
        assert_eq!(params.top_p, 0.5);
        assert_eq!(params.top_k, 40);
        assert_eq!(params.seed, Some(7));
        assert_eq!(file.eos_token_id.as_slice(), [2, 5]);
    }

    #[test]
    fn not_sampling_is_greedy_until_a_flag_says_otherwise() {
        let file = GenerationConfig::from_json(
            "g",
            br#"{"do_sample": false, "temperature": 1.0, "eos_token_id": 0}"#,
        )
        .unwrap();
        let params = SamplingParams::default().with(&file.sampling());
        assert_eq!(params.temperature, 0.0);
        assert_eq!(file.eos_token_id.as_slice(), [0]);
        let flags = SamplingOverrides { temperature: Some(0.7), ..SamplingOverrides::default() };
        assert_eq!(params.with(&flags).temperature, 0.7);
    }

    #[test]
    fn a_penalty_of_the_file_counts_all_tokens() {
        let params = |text: &[u8]| {
            let file = GenerationConfig::from_json("g", text).unwrap();
            SamplingParams::default().with(&file.sampling())
        };
        assert_eq!(params(br#"{"repetition_penalty": 1.1}"#).repeat_last_n, -1);
        assert_eq!(params(b"{}").repeat_last_n, SamplingParams::default().repeat_last_n);
        let flags = SamplingOverrides { repeat_last_n: Some(8), ..SamplingOverrides::default() };
        assert_eq!(params(br#"{"repetition_penalty": 1.1}"#).with(&flags).repeat_last_n, 8);
    }

    #[test]
    fn errors_name_the_file() {
        let error = GenerationConfig::from_json("models/x/generation_config.json", br#"{"top_k": "many"}"#)
            .unwrap_err();
        let message = error.to_string();
        assert!(message.contains("models/x/generation_config.json") && message.contains("many"), "{message}");
        assert_eq!(GenerationConfig::from_json("g", b"{}").unwrap(), GenerationConfig::default());
        assert_eq!(
            GenerationConfig::from_json("g", br#"{"eos_token_id": null, "top_k": null}"#).unwrap().top_k,
            None
        );
    }
}
