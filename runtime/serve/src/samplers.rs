//! Fields for the samplers beside the usual cuts, by llama.cpp's names: typical, XTC, DRY and Mirostat 2.

use mlcc_engine::sampler::{DryParams, ExtraSamplers, MirostatParams};

use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::served_model::ServedModel;

/// Strings over which DRY sees no repetition.
const MOST_BREAKERS: usize = 32;
const LONGEST_BREAKER: usize = 64;

/// Takes the fields; `None` if there are none of them.
pub fn take(fields: &mut RequestFields, hosted: &ServedModel) -> Result<Option<ExtraSamplers>, ApiError> {
    let number = "a number";
    let usual = &hosted.sampling.extra;
    let mut extra = usual.clone();
    let typical = fields.take_field("typical_p", number)?;
    let typical = typical.or(fields.take_field("typ_p", number)?);
    extra.typical_p = typical.unwrap_or(extra.typical_p);
    extra.xtc_probability = fields.take_field("xtc_probability", number)?.unwrap_or(extra.xtc_probability);
    extra.xtc_threshold = fields.take_field("xtc_threshold", number)?.unwrap_or(extra.xtc_threshold);
    extra.mirostat = mirostat(fields, usual.mirostat)?;
    let dry = &mut extra.dry;
    dry.multiplier = fields.take_field("dry_multiplier", number)?.unwrap_or(dry.multiplier);
    dry.base = fields.take_field("dry_base", number)?.unwrap_or(dry.base);
    dry.allowed_length =
        fields.take_field("dry_allowed_length", "a whole number, 0 or more")?.unwrap_or(dry.allowed_length);
    dry.last_n = fields.take_field("dry_penalty_last_n", "a whole number, -1 or more")?.unwrap_or(dry.last_n);
    let breakers = breakers(fields)?;
    if dry.multiplier != 0.0 && (breakers.is_some() || usual.dry.multiplier == 0.0) {
        let usual = || DryParams::BREAKERS.map(str::to_owned).to_vec();
        dry.breakers = DryParams::breakers_of(&hosted.tokenizer, &breakers.unwrap_or_else(usual));
    }
    Ok((extra != *usual).then_some(extra))
}

fn breakers(fields: &mut RequestFields) -> Result<Option<Vec<String>>, ApiError> {
    const NAME: &str = "dry_sequence_breakers";
    let breakers: Option<Vec<String>> = fields.take_field(NAME, "a list of strings")?;
    let wrong = |message: String| Err(ApiError::field(NAME, "invalid_value", message));
    match &breakers {
        Some(list) if list.len() > MOST_BREAKERS => {
            wrong(format!("`{NAME}` has {} strings, at most {MOST_BREAKERS} are allowed", list.len()))
        }
        Some(list) if list.iter().any(|text| text.is_empty() || text.len() > LONGEST_BREAKER) => {
            wrong(format!("`{NAME}` has a string that is empty or longer than {LONGEST_BREAKER} bytes"))
        }
        _ => Ok(breakers),
    }
}

fn mirostat(
    fields: &mut RequestFields,
    usual: Option<MirostatParams>,
) -> Result<Option<MirostatParams>, ApiError> {
    let version: Option<u32> = fields.take_field("mirostat", "0 or 2")?;
    let other: Option<u32> = fields.take_field("mirostat_mode", "0 or 2")?;
    let (tau, eta) =
        (fields.take_field("mirostat_tau", "a number")?, fields.take_field("mirostat_eta", "a number")?);
    let params = match version.or(other) {
        None => usual,
        Some(0) => None,
        Some(2) => Some(usual.unwrap_or_default()),
        Some(version) => {
            let message =
                format!("`mirostat` is {version}, expected 2, or 0 (off): the first version is not here");
            return Err(ApiError::field("mirostat", "invalid_value", message));
        }
    };
    Ok(params.map(|params| MirostatParams { tau: tau.unwrap_or(params.tau), eta: eta.unwrap_or(params.eta) }))
}
