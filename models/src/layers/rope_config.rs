//! Rotary embedding of a configuration: `rope_theta` and `rope_scaling`, or `rope_parameters` of newer files.

use super::rope::{Rope, RopeFrequencies, RopePairing, exact_frequencies};
use crate::config::ConfigFields;
use crate::error::ConfigError;
use serde_json::Value;
use std::f64::consts::PI;

/// Kinds of `rope_scaling` that are read, for messages.
const KINDS: &str = "default, linear, dynamic, llama3, yarn, longrope or proportional";

/// What a family takes for granted.
#[derive(Clone, Copy, Debug)]
pub struct RopeDefaults {
    pub theta: f64,
    /// Share of a head that is turned.
    pub share: f64,
    pub pairs: RopePairing,
}

impl RopeDefaults {
    /// The whole head, halves as pairs.
    pub const LLAMA: RopeDefaults = RopeDefaults { theta: 10000.0, share: 1.0, pairs: RopePairing::Half };
}

/// Rotary embedding, and the positions that scaling extends the model to.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    pub rope: Rope,
    pub context: usize,
}

impl RopeConfig {
    /// `context` is what the configuration says without regard to scaling.
    pub fn read(
        config: &ConfigFields,
        head_size: usize,
        context: usize,
        defaults: RopeDefaults,
    ) -> Result<RopeConfig, ConfigError> {
        let (parameters, scaling) =
            (config.nested_object("rope_parameters")?, config.nested_object("rope_scaling")?);
        if let Some(found) = parameters.as_ref().and_then(|kinds| kinds.get("full_attention")) {
            let expected =
                "one set of numbers for all layers: this family has no kinds of layers that differ in it";
            return Err(config.invalid_value("rope_parameters", expected, found));
        }
        let named = parameters.as_ref().filter(|p| p.get("rope_theta").is_some()).unwrap_or(config);
        let theta = named.float_or("rope_theta", named.float_or("rotary_emb_base", defaults.theta)?)?;
        if !(theta > 1.0 && theta.is_finite()) {
            return Err(named.invalid_value("rope_theta", "a number above 1", &Value::from(theta)));
        }
        let dims = rotary_dims(config, parameters.as_ref(), head_size, defaults.share)?;
        let reader = RopeConfigReader { config, head_size, dims, theta, context, pairs: defaults.pairs };
        match parameters.as_ref().or(scaling.as_ref()) {
            Some(fields) => reader.read_scaled(fields),
            None => Ok(reader.fixed(exact_frequencies(dims, theta), 1.0)),
        }
    }
}

impl RopeConfig {
    /// The same without scaling.
    pub fn read_unscaled(
        config: &ConfigFields,
        head_size: usize,
        context: usize,
        defaults: RopeDefaults,
    ) -> Result<RopeConfig, ConfigError> {
        let mut plain = config.clone();
        plain.raw.remove("rope_scaling");
        if let Some(Value::Object(parameters)) = plain.raw.get_mut("rope_parameters") {
            parameters.remove("rope_type");
        }
        RopeConfig::read(&plain, head_size, context, defaults)
    }

    /// The fields as layers of this kind see them, where `rope_parameters` has an object for each kind.
    pub fn fields_of_kind(config: &ConfigFields, kind: &str) -> Result<Option<ConfigFields>, ConfigError> {
        let field = "rope_parameters";
        let Some(parameters) =
            config.nested_object(field)?.filter(|kinds| kinds.get("full_attention").is_some())
        else {
            return Ok(None);
        };
        let of_kind =
            parameters.nested_object(kind)?.ok_or_else(|| parameters.missing_field(kind, "an object"))?;
        let mut fields = config.clone();
        fields.raw.insert(field.to_string(), Value::Object(of_kind.raw));
        Ok(Some(fields))
    }

    /// Of layers without and with a window, where `rope_parameters` has an object for each of both. What is read for one
    /// kind sees no other field.
    pub fn read_kinds(
        parameters: &ConfigFields,
        head_size: usize,
        context: usize,
        [full, sliding]: [RopeDefaults; 2],
    ) -> Result<[RopeConfig; 2], ConfigError> {
        let of = |kind, defaults| RopeConfig::read_kind(parameters, kind, head_size, context, defaults);
        Ok([of("full_attention", full)?, of("sliding_attention", sliding)?])
    }

    /// The same of one kind, where heads of the other have another size.
    pub fn read_kind(
        parameters: &ConfigFields,
        kind: &str,
        head_size: usize,
        context: usize,
        defaults: RopeDefaults,
    ) -> Result<RopeConfig, ConfigError> {
        let raw = match parameters.nested_object(kind)? {
            Some(one) => one.raw,
            None => return Err(parameters.missing_field(kind, "an object")),
        };
        let raw = [("rope_parameters".to_string(), Value::Object(raw))].into_iter().collect();
        let fields = ConfigFields { origin: parameters.origin.clone(), raw };
        RopeConfig::read(&fields, head_size, context, defaults)
    }
}

/// Elements of a head that are turned: an even number.
fn rotary_dims(
    config: &ConfigFields,
    parameters: Option<&ConfigFields>,
    head_size: usize,
    share: f64,
) -> Result<usize, ConfigError> {
    let field = "partial_rotary_factor";
    let source = parameters.filter(|p| p.get(field).is_some()).unwrap_or(config);
    let share = source.float_or(field, source.float_or("rotary_pct", share)?)?;
    let dims = (head_size as f64 * share) as usize;
    match share > 0.0 && share <= 1.0 && dims >= 2 && dims.is_multiple_of(2) {
        true => Ok(dims),
        false => {
            let expected = format!("a share of the head size {head_size} that is an even number of elements");
            Err(source.invalid_value(field, &expected, &Value::from(share)))
        }
    }
}

struct RopeConfigReader<'a> {
    config: &'a ConfigFields,
    head_size: usize,
    /// Elements of a head that are turned.
    dims: usize,
    theta: f64,
    context: usize,
    pairs: RopePairing,
}

impl RopeConfigReader<'_> {
    fn fixed(&self, exact: Vec<f64>, scale: f64) -> RopeConfig {
        let table = exact.into_iter().map(|f| f as f32).collect();
        self.with(RopeFrequencies::Fixed(table), scale, self.context)
    }

    fn with(&self, frequencies: RopeFrequencies, scale: f64, context: usize) -> RopeConfig {
        RopeConfig { rope: Rope { frequencies, pairing: self.pairs, scale: scale as f32 }, context }
    }

    fn read_scaled(&self, fields: &ConfigFields) -> Result<RopeConfig, ConfigError> {
        let field = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
        let kind = if fields.get(field).is_some() { fields.string(field)? } else { "default".into() };
        let plain = exact_frequencies(self.dims, self.theta);
        match kind.as_str() {
            "default" | "none" => Ok(self.fixed(plain, 1.0)),
            "linear" => {
                let factor = read_factor(fields)?;
                Ok(self.fixed(plain.into_iter().map(|f| f / factor).collect(), 1.0))
            }
            "dynamic" => self.dynamic(fields, plain),
            "llama3" => self.llama3(fields, plain),
            "yarn" => self.yarn(fields, plain),
            "proportional" => self.proportional(fields),
            "longrope" | "su" => self.longrope(fields, plain),
            _ => Err(fields.invalid_value(field, KINDS, &Value::from(kind))),
        }
    }

    /// Pairs span the whole head, and those after the share that is turned stand still (Gemma 4).
    fn proportional(&self, fields: &ConfigFields) -> Result<RopeConfig, ConfigError> {
        let factor = if fields.get("factor").is_some() { read_factor(fields)? } else { 1.0 };
        let still = |i: usize| 2 * i >= self.dims;
        let whole = exact_frequencies(self.head_size, self.theta).into_iter().enumerate();
        let table = whole.map(|(i, f)| if still(i) { 0.0 } else { f / factor });
        Ok(self.fixed(table.collect(), 1.0))
    }

    fn dynamic(&self, fields: &ConfigFields, plain: Vec<f64>) -> Result<RopeConfig, ConfigError> {
        let factor = read_factor(fields)?;
        let original = fields.size_or("original_max_position_embeddings", self.context)?;
        if self.dims < 4 {
            return Err(fields.invalid_value(
                "factor",
                "another scaling: a head of 2 has one frequency",
                &Value::from(factor),
            ));
        }
        let table = plain.into_iter().map(|f| f as f32).collect();
        let context = (original as f64 * factor) as usize;
        Ok(self.with(RopeFrequencies::Dynamic { table, original, factor }, 1.0, context.max(self.context)))
    }

    /// Frequencies below the original context stay, far longer waves are stretched, those between blended (Llama 3.1).
    fn llama3(&self, fields: &ConfigFields, plain: Vec<f64>) -> Result<RopeConfig, ConfigError> {
        let factor = read_factor(fields)?;
        let (low, high) =
            (fields.float_or("low_freq_factor", 1.0)?, fields.float_or("high_freq_factor", 4.0)?);
        if !(low > 0.0 && high > low) {
            let expected = format!("a number above low_freq_factor, which is {low}");
            return Err(fields.invalid_value("high_freq_factor", &expected, &Value::from(high)));
        }
        let original = fields.size("original_max_position_embeddings")? as f64;
        let stretch = |f: f64| {
            let waves = original * f / (2.0 * PI);
            let smooth = ((waves - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 - smooth) * f / factor + smooth * f
        };
        Ok(self.fixed(plain.into_iter().map(stretch).collect(), 1.0))
    }

    /// YaRN (Peng et al. 2023): interpolation blended over the frequencies, and an attention factor.
    fn yarn(&self, fields: &ConfigFields, plain: Vec<f64>) -> Result<RopeConfig, ConfigError> {
        let factor = read_factor(fields)?;
        let original = fields.size_or("original_max_position_embeddings", self.context)?;
        let (fast, slow) = (fields.float_or("beta_fast", 32.0)?, fields.float_or("beta_slow", 1.0)?);
        let dims = self.dims as f64;
        let place = |turns: f64| dims * (original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (place(fast), place(slow));
        if fields.flag_or("truncate", true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dims - 1.0));
        if low == high {
            high += 0.001;
        }
        let blend = |(i, f): (usize, f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / factor * ramp + f * (1.0 - ramp)
        };
        let table = plain.into_iter().enumerate().map(blend).collect();
        let scale = match fields.get("attention_factor") {
            Some(_) => fields.float_or("attention_factor", 1.0)?,
            None => yarn_attention_factor(fields, factor)?,
        };
        let context = self.context.max((original as f64 * factor) as usize);
        Ok(RopeConfig { context, ..self.fixed(table, scale) })
    }

    fn longrope(&self, fields: &ConfigFields, plain: Vec<f64>) -> Result<RopeConfig, ConfigError> {
        let key = "original_max_position_embeddings";
        let original = fields.size_or(key, self.config.size_or(key, self.context)?)?;
        let table = |name: &str| -> Result<Vec<f32>, ConfigError> {
            let factors = fields.numbers(name)?;
            if factors.len() != plain.len() || factors.iter().any(|f| f.is_nan() || *f <= 0.0) {
                let expected = format!("{} positive numbers, one for each pair of a head", plain.len());
                return Err(fields.invalid_value(name, &expected, &fields.raw[name]));
            }
            Ok(plain.iter().zip(&factors).map(|(f, by)| (f / by) as f32).collect())
        };
        let (short, long) = (table("short_factor")?, table("long_factor")?);
        let factor = fields.float_or("factor", self.context as f64 / original as f64)?;
        let scale = match fields.get("attention_factor") {
            Some(_) => fields.float_or("attention_factor", 1.0)?,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        };
        Ok(self.with(RopeFrequencies::Long { short, long, original }, scale, self.context))
    }
}

/// Scaling factor: at least 1.
fn read_factor(fields: &ConfigFields) -> Result<f64, ConfigError> {
    match fields.get("factor").map(|v| (v.as_f64(), v)) {
        Some((Some(factor), _)) if factor >= 1.0 && factor.is_finite() => Ok(factor),
        Some((_, found)) => Err(fields.invalid_value("factor", "a number of at least 1", found)),
        None => Err(fields.missing_field("factor", "a number of at least 1")),
    }
}

fn yarn_attention_factor(fields: &ConfigFields, factor: f64) -> Result<f64, ConfigError> {
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let (one, all) = (fields.float_or("mscale", 0.0)?, fields.float_or("mscale_all_dim", 0.0)?);
    Ok(if one != 0.0 && all != 0.0 { scale(one) / scale(all) } else { scale(1.0) })
}
