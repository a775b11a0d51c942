//! Configuration of RWKV-7 ("Goose") as `RWKV7Config` of flash-linear-attention writes it.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::families::rwkv4::config::{LAYER_NORM_EPSILON, read_layers, refuse_tied_head};
use crate::families::rwkv5::config::check_heads;

pub const CONTEXT_LENGTH: usize = 4096;
pub const HEAD_SIZE: usize = 64;

#[derive(Clone, Debug, PartialEq)]
pub struct Rwkv7Config {
    pub vocab: usize,
    /// Also the width of r, k, v: heads times head size.
    pub hidden: usize,
    /// Width and height of the state matrix of a head.
    pub head_size: usize,
    /// Width of the channel-mix key.
    pub intermediate: usize,
    pub layers: usize,
    /// Ranks of what is a function of the token through two thin matrices.
    pub decay_rank: usize,
    /// In-context learning rate.
    pub rate_rank: usize,
    /// How much of the first layer's value is taken.
    pub value_rank: usize,
    pub gate_rank: usize,
    pub norm_epsilon: f64,
    pub context_length: usize,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

impl Rwkv7Config {
    /// A published shape: everything but the sizes at its default.
    pub fn of_size(vocab: usize, hidden: usize, layers: usize) -> Rwkv7Config {
        let [decay_rank, rate_rank, value_rank, gate_rank] = default_ranks(hidden);
        Rwkv7Config {
            vocab,
            hidden,
            head_size: HEAD_SIZE,
            intermediate: 4 * hidden,
            layers,
            decay_rank,
            rate_rank,
            value_rank,
            gate_rank,
            norm_epsilon: LAYER_NORM_EPSILON,
            context_length: CONTEXT_LENGTH,
            bos_token_id: Some(0),
            eos_token_ids: vec![0],
        }
    }

    pub fn heads(&self) -> usize {
        self.hidden / self.head_size
    }

    /// Epsilon of the norm over each head's result: grows with the head as in the published code.
    pub fn group_norm_epsilon(&self) -> f64 {
        self.head_size as f64 * self.norm_epsilon
    }

    /// The same as the fields of a config.json, for models that have no such file.
    pub fn to_fields(&self) -> serde_json::Map<String, serde_json::Value> {
        crate::config::into_object(serde_json::json!({
            "model_type": "rwkv7",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "head_dim": self.head_size,
            "num_heads": self.heads(),
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "decay_low_rank_dim": self.decay_rank,
            "a_low_rank_dim": self.rate_rank,
            "v_low_rank_dim": self.value_rank,
            "gate_low_rank_dim": self.gate_rank,
            "norm_eps": self.norm_epsilon,
            "max_position_embeddings": self.context_length,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids,
        }))
    }

    pub fn from_fields(fields: &ConfigFields) -> Result<Rwkv7Config, ConfigError> {
        refuse_tied_head(fields)?;
        refuse_variants(fields)?;
        let hidden = fields.size("hidden_size")?;
        let head_size = head_size(fields, hidden)?;
        let [decay, rate, value, gate] = default_ranks(hidden);
        let ratio = fields.float_or("hidden_ratio", 4.0)?;
        if !(ratio > 0.0 && ratio <= 64.0) {
            return Err(fields.invalid_value(
                "hidden_ratio",
                "a number from 0 to 64",
                &fields.raw["hidden_ratio"],
            ));
        }
        let intermediate = ((hidden as f64 * ratio) as usize).next_multiple_of(32);
        Ok(Rwkv7Config {
            vocab: fields.size("vocab_size")?,
            hidden,
            head_size,
            intermediate: fields.size_or("intermediate_size", intermediate)?,
            layers: read_layers(fields)?,
            decay_rank: fields.size_or("decay_low_rank_dim", decay)?,
            rate_rank: fields.size_or("a_low_rank_dim", rate)?,
            value_rank: fields.size_or("v_low_rank_dim", value)?,
            gate_rank: fields.size_or("gate_low_rank_dim", gate)?,
            norm_epsilon: fields.fraction_or("norm_eps", LAYER_NORM_EPSILON)?,
            context_length: fields.size_or("max_position_embeddings", CONTEXT_LENGTH)?,
            bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: fields.token_ids("eos_token_id")?,
        })
    }
}

/// `head_dim`, or what `num_heads` says; both have to agree.
fn head_size(fields: &ConfigFields, hidden: usize) -> Result<usize, ConfigError> {
    let heads = fields.get("num_heads").map(|_| fields.size("num_heads")).transpose()?;
    let implied = heads.map_or(HEAD_SIZE, |heads| (hidden / heads).max(1));
    let size = fields.size_or("head_dim", implied)?;
    check_heads(fields, "head_dim", hidden, size)?;
    match heads {
        Some(heads) if heads != hidden / size => {
            let expected = format!("{} heads of head_dim {size} in hidden_size {hidden}", hidden / size);
            Err(fields.invalid_value("num_heads", &expected, &fields.raw["num_heads"]))
        }
        _ => Ok(size),
    }
}

/// Options of the class that no published RWKV-7 uses.
fn refuse_variants(fields: &ConfigFields) -> Result<(), ConfigError> {
    let refuse = |what: String, supported: &str| ConfigError::NotSupportedYet {
        file: fields.origin.clone(),
        what,
        supported: supported.to_string(),
    };
    if fields.get("attn").is_some() {
        return Err(refuse("RWKV-7 with attention layers (`attn`)".into(), "`attn` = null"));
    }
    if let Some(act) = fields.get("hidden_act")
        && act.as_str() != Some("sqrelu")
    {
        return Err(refuse(format!("RWKV-7 with hidden_act = {act}"), "\"sqrelu\""));
    }
    for field in ["norm_first", "norm_bias"] {
        if !fields.flag_or(field, true)? {
            return Err(refuse(format!("RWKV-7 with {field} = false"), "true"));
        }
    }
    let hidden = fields.size("hidden_size")?;
    let sizes = match fields.get("value_dim") {
        Some(serde_json::Value::Array(sizes)) => sizes.as_slice(),
        Some(size) => std::slice::from_ref(size),
        None => &[],
    };
    if sizes.iter().any(|size| size.as_u64() != Some(hidden as u64)) {
        return Err(refuse("RWKV-7 with value_dim other than hidden_size".into(), "equal sizes"));
    }
    Ok(())
}

/// Decay, rate, value, gate: `factor * width^power` rounded to 32, as the training code chooses them.
fn default_ranks(hidden: usize) -> [usize; 4] {
    let rank = |factor: f64, power: f64| {
        let steps = (factor * (hidden as f64).powf(power) / 32.0).round() as usize;
        (steps * 32).max(32)
    };
    [rank(1.8, 0.5), rank(1.8, 0.5), rank(1.3, 0.5), rank(0.6, 0.8)]
}
