//! Sampling parameters of the user. Defaults are those of llama.cpp; the order of precedence is defaults,
//! `generation_config.json`, flags, fields of a request, each through [`SamplingParams::with`].

use thiserror::Error;

use super::ExtraSamplers;

#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off.
    pub repeat_penalty: f32,
    /// The number of last tokens that the three penalties look at; 0 is none, -1 is all.
    pub repeat_last_n: i32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// `None`: another text each time.
    pub seed: Option<u64>,
    pub extra: ExtraSamplers,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            extra: ExtraSamplers::default(),
        }
    }
}

/// Settings of one source (a file, the flags, a request); the rest stays.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingOverrides {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repeat_penalty: Option<f32>,
    pub repeat_last_n: Option<i32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub seed: Option<u64>,
    /// All of them.
    pub extra: Option<ExtraSamplers>,
}

#[derive(Debug, Clone, PartialEq, Error)]
#[error("{name} is {found}, expected {expected}")]
pub struct ParamError {
    pub name: &'static str,
    pub found: String,
    pub expected: &'static str,
}

impl SamplingParams {
    /// These parameters with the ones that `over` sets.
    #[must_use]
    pub fn with(self, over: &SamplingOverrides) -> Self {
        SamplingParams {
            temperature: over.temperature.unwrap_or(self.temperature),
            top_k: over.top_k.unwrap_or(self.top_k),
            top_p: over.top_p.unwrap_or(self.top_p),
            min_p: over.min_p.unwrap_or(self.min_p),
            repeat_penalty: over.repeat_penalty.unwrap_or(self.repeat_penalty),
            repeat_last_n: over.repeat_last_n.unwrap_or(self.repeat_last_n),
            presence_penalty: over.presence_penalty.unwrap_or(self.presence_penalty),
            frequency_penalty: over.frequency_penalty.unwrap_or(self.frequency_penalty),
            seed: over.seed.or(self.seed),
            extra: over.extra.clone().unwrap_or(self.extra),
        }
    }

    pub fn greedy() -> Self {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    pub fn check(&self) -> Result<(), ParamError> {
        let real = |name, value: f32, ok: bool, expected| {
            if ok { Ok(()) } else { Err(ParamError { name, found: value.to_string(), expected }) }
        };
        let t = self.temperature;
        real("temperature", t, t.is_finite() && t >= 0.0, "0 (greedy) or a positive number")?;
        let p = self.top_p;
        real("top_p", p, p > 0.0 && p <= 1.0, "more than 0 and at most 1 (1 is off)")?;
        let p = self.min_p;
        real("min_p", p, (0.0..=1.0).contains(&p), "0 (off) to 1")?;
        let r = self.repeat_penalty;
        real("repeat_penalty", r, r.is_finite() && r > 0.0, "a positive number (1 is off)")?;
        let p = self.presence_penalty;
        real("presence_penalty", p, p.is_finite(), "a finite number (0 is off)")?;
        let p = self.frequency_penalty;
        real("frequency_penalty", p, p.is_finite(), "a finite number (0 is off)")?;
        if self.repeat_last_n < -1 {
            let found = self.repeat_last_n.to_string();
            return Err(ParamError {
                name: "repeat_last_n",
                found,
                expected: "-1 (all), 0 (off) or a number of tokens",
            });
        }
        self.extra.check()
    }

    /// True if the penalties make no logit larger.
    pub(super) fn only_lower(&self) -> bool {
        let lower =
            self.repeat_penalty >= 1.0 && self.presence_penalty >= 0.0 && self.frequency_penalty >= 0.0;
        lower || !self.penalizes()
    }

    /// Do the penalties change any logit?
    pub(super) fn penalizes(&self) -> bool {
        self.repeat_last_n != 0
            && (self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_name_the_parameter() {
        let base = SamplingParams::default;
        assert_eq!(base().check(), Ok(()));
        assert_eq!(SamplingParams::greedy().check(), Ok(()));
        let cases = [
            (SamplingParams { temperature: -0.1, ..base() }, "temperature"),
            (SamplingParams { temperature: f32::NAN, ..base() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..base() }, "top_p"),
            (SamplingParams { top_p: 1.5, ..base() }, "top_p"),
            (SamplingParams { min_p: f32::NAN, ..base() }, "min_p"),
            (SamplingParams { repeat_penalty: 0.0, ..base() }, "repeat_penalty"),
            (SamplingParams { presence_penalty: f32::INFINITY, ..base() }, "presence_penalty"),
            (SamplingParams { frequency_penalty: f32::NAN, ..base() }, "frequency_penalty"),
            (SamplingParams { repeat_last_n: -2, ..base() }, "repeat_last_n"),
        ];
        for (params, name) in cases {
            assert_eq!(params.check().unwrap_err().name, name);
        }
    }
}
