//! Flags of the samplers beside the usual cuts, by llama.cpp's names.

use mlcc_engine::sampler::{DryParams, ExtraSamplers, MirostatParams};
use mlcc_text::Tokenizer;

/// What is not given stays off.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SamplerArgs {
    /// Keep the tokens whose surprise is nearest to the expected one, up to this total probability; 1
    /// disables
    #[arg(long, visible_alias = "typical", value_name = "P")]
    typical_p: Option<f32>,
    /// Probability that the most likely tokens are removed (XTC); 0 disables
    #[arg(long, value_name = "P")]
    xtc_probability: Option<f32>,
    /// XTC removes all tokens at least this likely except the least likely of them [default: 0.1]
    #[arg(long, value_name = "P")]
    xtc_threshold: Option<f32>,
    /// Penalty for continuing a repetition (DRY); 0 disables
    #[arg(long, value_name = "X")]
    dry_multiplier: Option<f32>,
    /// Factor by which DRY's penalty grows with each token of the repetition [default: 1.75]
    #[arg(long, value_name = "X")]
    dry_base: Option<f32>,
    /// Repetitions shorter than this are not penalized [default: 2]
    #[arg(long, value_name = "N")]
    dry_allowed_length: Option<u32>,
    /// Number of last tokens that DRY looks at; -1 = all [default: -1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    dry_penalty_last_n: Option<i32>,
    /// String that ends a repetition for DRY (repeatable) [default: line break, `:`, `"`, `*`]
    #[arg(long, value_name = "TEXT")]
    dry_sequence_breaker: Vec<String>,
    /// 2 = Mirostat 2 instead of the other truncation samplers, 0 = off
    #[arg(long, value_name = "VERSION", value_parser = ["0", "2"])]
    mirostat: Option<String>,
    /// Target surprise of Mirostat, in bits [default: 5]
    #[arg(long, visible_alias = "mirostat-ent", value_name = "BITS")]
    mirostat_tau: Option<f32>,
    /// Learning rate of Mirostat [default: 0.1]
    #[arg(long, visible_alias = "mirostat-lr", value_name = "X")]
    mirostat_eta: Option<f32>,
}

impl SamplerArgs {
    /// `None` if no flag is given.
    pub(crate) fn samplers(&self, tokenizer: &Tokenizer) -> Option<ExtraSamplers> {
        let usual = ExtraSamplers::default();
        let mut dry = DryParams {
            multiplier: self.dry_multiplier.unwrap_or(usual.dry.multiplier),
            base: self.dry_base.unwrap_or(usual.dry.base),
            allowed_length: self.dry_allowed_length.unwrap_or(usual.dry.allowed_length),
            last_n: self.dry_penalty_last_n.unwrap_or(usual.dry.last_n),
            breakers: usual.dry.breakers.clone(),
        };
        if dry.multiplier != 0.0 {
            let strings = match self.dry_sequence_breaker.is_empty() {
                true => DryParams::BREAKERS.map(str::to_owned).to_vec(),
                false => self.dry_sequence_breaker.clone(),
            };
            dry.breakers = DryParams::breakers_of(tokenizer, &strings);
        }
        let mirostat = self.mirostat.as_deref().filter(|version| *version == "2").map(|_| {
            let usual = MirostatParams::default();
            MirostatParams {
                tau: self.mirostat_tau.unwrap_or(usual.tau),
                eta: self.mirostat_eta.unwrap_or(usual.eta),
            }
        });
        let asked = ExtraSamplers {
            typical_p: self.typical_p.unwrap_or(usual.typical_p),
            xtc_probability: self.xtc_probability.unwrap_or(usual.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(usual.xtc_threshold),
            dry,
            mirostat,
        };
        (asked != usual).then_some(asked)
    }
}
