//! Samplers beside the usual cuts: DRY, typical, XTC and Mirostat 2. All are off unless they are asked for.
//!
//! They are defined as in llama.cpp (`src/llama-sampler.cpp`), with one difference: the temperature comes
//! first here, before all cuts. Sources: Meister et al., "Locally Typical Sampling" (2022); Basu et al.,
//! "Mirostat" (2020); DRY and XTC are pull requests 5677 and 6335 of text-generation-webui, by p-e-w.

use std::sync::Arc;

use mlcc_text::{TokenId, Tokenizer};

use super::ParamError;

/// Settings of these samplers. The default is off.
#[derive(Debug, Clone, PartialEq)]
pub struct ExtraSamplers {
    /// The tokens whose surprise is nearest to the expected one stay, up to this share. 1 is off.
    pub typical_p: f32,
    /// The probability with which the top tokens are left out. 0 is off.
    pub xtc_probability: f32,
    /// The threshold: only the last one of the tokens at least this probable stays. More than 0.5 is off.
    pub xtc_threshold: f32,
    pub dry: DryParams,
    /// Cuts and keeps the surprise of the text at the target, in place of all other cuts.
    pub mirostat: Option<MirostatParams>,
}

/// The penalty on tokens that would go on with a repetition.
#[derive(Debug, Clone, PartialEq)]
pub struct DryParams {
    /// 0 is off.
    pub multiplier: f32,
    /// Factor of the penalty for each further token of a repetition.
    pub base: f32,
    /// Repetitions shorter than this are not penalized.
    pub allowed_length: u32,
    /// The number of last tokens that are looked at; 0 is none, -1 is all.
    pub last_n: i32,
    /// Tokens over which no repetition goes, ascending ([`DryParams::breakers_of`]).
    pub breakers: Arc<[TokenId]>,
}

/// Mirostat 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MirostatParams {
    /// The target surprise, in bits.
    pub tau: f32,
    /// The rate at which the cut follows the observed surprise.
    pub eta: f32,
}

impl Default for ExtraSamplers {
    fn default() -> Self {
        let dry =
            DryParams { multiplier: 0.0, base: 1.75, allowed_length: 2, last_n: -1, breakers: Arc::new([]) };
        ExtraSamplers { typical_p: 1.0, xtc_probability: 0.0, xtc_threshold: 0.1, dry, mirostat: None }
    }
}

impl Default for MirostatParams {
    fn default() -> Self {
        MirostatParams { tau: 5.0, eta: 0.1 }
    }
}

impl DryParams {
    /// Strings over which no repetition goes, by default.
    pub const BREAKERS: [&'static str; 4] = ["\n", ":", "\"", "*"];

    /// The tokens that have one of these strings inside.
    pub fn breakers_of(tokenizer: &Tokenizer, strings: &[String]) -> Arc<[TokenId]> {
        let has = |bytes: &[u8], string: &String| {
            !string.is_empty() && bytes.windows(string.len()).any(|window| window == string.as_bytes())
        };
        let ids = 0..TokenId::try_from(tokenizer.vocab_size()).unwrap_or(TokenId::MAX);
        let breaks = |id: &TokenId| {
            tokenizer.bytes_of(*id).is_some_and(|bytes| strings.iter().any(|string| has(bytes, string)))
        };
        ids.filter(breaks).collect()
    }

    pub(super) fn is_on(&self) -> bool {
        self.multiplier != 0.0 && self.last_n != 0
    }
}

impl ExtraSamplers {
    /// True if the cuts are others than the usual ones.
    pub(super) fn cuts(&self) -> bool {
        self.typical_p < 1.0 || self.takes_likeliest() || self.mirostat.is_some()
    }

    /// True if XTC has an effect.
    pub(super) fn takes_likeliest(&self) -> bool {
        self.xtc_probability > 0.0 && self.xtc_threshold <= 0.5
    }

    /// True if any of them has an effect.
    pub(super) fn is_on(&self) -> bool {
        self.cuts() || self.dry.is_on()
    }

    pub(super) fn check(&self) -> Result<(), ParamError> {
        let real = |name, value: f32, ok: bool, expected| match ok {
            true => Ok(()),
            false => Err(ParamError { name, found: value.to_string(), expected }),
        };
        let p = self.typical_p;
        real("typical_p", p, p > 0.0 && p <= 1.0, "more than 0 and at most 1 (1 is off)")?;
        let p = self.xtc_probability;
        real("xtc_probability", p, (0.0..=1.0).contains(&p), "0 (off) to 1")?;
        let t = self.xtc_threshold;
        real("xtc_threshold", t, (0.0..=1.0).contains(&t), "0 to 1 (more than 0.5 is off)")?;
        let m = self.dry.multiplier;
        real("dry_multiplier", m, m.is_finite() && m >= 0.0, "0 (off) or a positive number")?;
        let b = self.dry.base;
        real("dry_base", b, b.is_finite() && b >= 1.0, "1 or a larger number")?;
        if self.dry.last_n < -1 {
            let expected = "-1 (all), 0 (off) or a number of tokens";
            return Err(ParamError {
                name: "dry_penalty_last_n",
                found: self.dry.last_n.to_string(),
                expected,
            });
        }
        let Some(MirostatParams { tau, eta }) = self.mirostat else { return Ok(()) };
        real("mirostat_tau", tau, tau.is_finite() && tau > 0.0, "a positive number")?;
        real("mirostat_eta", eta, eta.is_finite() && eta >= 0.0, "0 or a positive number")
    }
}
