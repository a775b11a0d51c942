//! Fields that all transformer configurations have, under the names that families use for them.

use super::fields::ConfigFields;
use crate::error::ConfigError;
use serde_json::Value;

/// Larger than in any published model. Limits keep a damaged file from asking for millions of tensors.
pub(crate) const MOST_LAYERS: usize = 1000;
pub(crate) const MOST_HEADS: usize = 4096;
pub(crate) const LARGEST_HEAD: usize = 4096;

pub(crate) const HIDDEN: [&str; 4] = ["hidden_size", "n_embd", "d_model", "n_embed"];
pub(crate) const LAYERS: [&str; 4] = ["num_hidden_layers", "n_layer", "num_layers", "n_layers"];
pub(crate) const HEADS: [&str; 3] = ["num_attention_heads", "n_head", "n_heads"];
pub(crate) const KV_HEADS: [&str; 2] = ["num_key_value_heads", "num_kv_heads"];
pub(crate) const HEAD_SIZE: [&str; 2] = ["head_dim", "kv_channels"];
pub(crate) const VOCAB: [&str; 2] = ["padded_vocab_size", "vocab_size"];
pub(crate) const CONTEXT: [&str; 6] = [
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
];

/// Sizes that every transformer has.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSizes {
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    /// Key and value heads; queries share them in groups.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_size: usize,
    /// Positions that the model was trained with.
    pub context: usize,
}

impl ModelSizes {
    /// Width of all query heads.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_size
    }
    /// Width of all key (or value) heads.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_size
    }
}

impl ModelSizes {
    /// `default_context` is for families whose configurations do not tell it.
    pub fn read(config: &ConfigFields, default_context: Option<usize>) -> Result<ModelSizes, ConfigError> {
        ModelSizes::read_sized(config, default_context, None)
    }

    /// With heads of an equal share of the rows, rounded down, where the configuration does not tell their size: for families whose
    /// heads together need not be as wide as the rows.
    pub fn read_equal_heads(
        config: &ConfigFields,
        default_context: Option<usize>,
    ) -> Result<ModelSizes, ConfigError> {
        let (hidden, heads) =
            (config.size(config.first_present(&HIDDEN))?, config.size(config.first_present(&HEADS))?);
        ModelSizes::read_sized(config, default_context, Some((hidden / heads).max(1)))
    }

    /// With heads of `default_size` where the configuration does not tell it; `None`: all heads together are as wide as the rows.
    pub fn read_sized(
        config: &ConfigFields,
        default_context: Option<usize>,
        default_size: Option<usize>,
    ) -> Result<ModelSizes, ConfigError> {
        let (hidden_field, heads_field) = (config.first_present(&HIDDEN), config.first_present(&HEADS));
        let (hidden, heads) = (config.size(hidden_field)?, config.size(heads_field)?);
        config.check_max(heads_field, heads, MOST_HEADS)?;
        let listed =
            ["layers_block_type", "layer_types"].iter().find_map(|list| config.get(list)?.as_array());
        let layers = match (config.get(config.first_present(&LAYERS)), listed) {
            (None, Some(list)) if !list.is_empty() => list.len(),
            _ => config.size(config.first_present(&LAYERS))?,
        };
        config.check_max(config.first_present(&LAYERS), layers, MOST_LAYERS)?;
        let kv_field = config.first_present(&KV_HEADS);
        let kv_heads = config.size_or(kv_field, heads)?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of {heads_field}, which is {heads}");
            return Err(config.invalid_value(kv_field, &expected, &Value::from(kv_heads)));
        }
        let size_field = config.first_present(&HEAD_SIZE);
        let told = config.get(size_field).is_some() || default_size.is_some();
        if !told && !hidden.is_multiple_of(heads) {
            let expected = format!("a multiple of {heads_field}, which is {heads}");
            return Err(config.invalid_value(hidden_field, &expected, &Value::from(hidden)));
        }
        let head_size = config.size_or(size_field, default_size.unwrap_or(hidden / heads))?;
        config.check_max(size_field, head_size, LARGEST_HEAD)?;
        let context_field = config.first_present(&CONTEXT);
        let context = match default_context {
            None => config.size(context_field)?,
            Some(default) => config.size_or(context_field, default)?,
        };
        let vocab = config.vocab_size()?;
        Ok(ModelSizes { vocab, hidden, layers, heads, kv_heads, head_size, context })
    }
}

impl ConfigFields {
    /// `found`, which `field` says, unless it is more than `most`.
    pub fn check_max(&self, field: &str, found: usize, most: usize) -> Result<usize, ConfigError> {
        match found <= most {
            true => Ok(found),
            false => Err(self.invalid_value(field, &format!("at most {most}"), &Value::from(found))),
        }
    }

    /// The first of these fields that is there; the first of all where none is.
    pub fn first_present(&self, fields: &[&'static str]) -> &'static str {
        fields.iter().find(|f| self.get(f).is_some()).unwrap_or(&fields[0])
    }

    /// Rows of the table of tokens.
    pub fn vocab_size(&self) -> Result<usize, ConfigError> {
        // A file without either misses the name that most have.
        self.size(VOCAB.iter().find(|field| self.get(field).is_some()).unwrap_or(&"vocab_size"))
    }

    /// The epsilon of a norm, under the first of these names that is there.
    pub fn epsilon(&self, fields: &[&'static str], default: f64) -> Result<f64, ConfigError> {
        let field = self.first_present(fields);
        let eps = self.float_or(field, default)?;
        match eps > 0.0 && eps < 1.0 {
            true => Ok(eps),
            false => Err(self.invalid_value(field, "a number between 0 and 1", &Value::from(eps))),
        }
    }

    /// Refuses a field that is there with another value than `only`: `what` says what that would be.
    pub fn require_flag(&self, field: &str, only: bool, what: &str) -> Result<(), ConfigError> {
        match self.flag_or(field, only)? == only {
            true => Ok(()),
            false => Err(ConfigError::NotSupportedYet {
                file: self.origin.clone(),
                what: format!("{what} (`{field}` = {})", !only),
                supported: format!("`{field}` = {only}"),
            }),
        }
    }

    /// Per layer: the number of its kind, as the list `field` names them.
    pub fn layer_kinds(
        &self,
        field: &'static str,
        layers: usize,
        kinds: &[&str],
    ) -> Result<Vec<usize>, ConfigError> {
        let Some(found) = self.get(field) else {
            return Err(self.missing_field(field, "a list of kinds of layers"));
        };
        let wrong =
            || self.invalid_value(field, &format!("a list of {layers} of {}", kinds.join(", ")), found);
        let names = found.as_array().filter(|names| names.len() == layers).ok_or_else(wrong)?;
        let position = |name: &str| kinds.iter().position(|kind| *kind == name);
        let number = |name: &Value| {
            let name = name.as_str()?;
            // Newer releases of transformers call state spaces so.
            position(name).or_else(|| match name {
                "linear_attention" => position("mamba"),
                "full_attention" => position("attention"),
                _ => None,
            })
        };
        names.iter().map(|name| number(name).ok_or_else(wrong)).collect()
    }

    /// Per layer: experts in place of the plain feed-forward part, by `mlp_layer_types`, else by `first_k_dense_replace` and
    /// `moe_layer_freq` of older files. `dense` first layers have none where the file says neither.
    pub fn sparse_layers(&self, layers: usize, dense: usize) -> Result<Vec<bool>, ConfigError> {
        if self.get("mlp_layer_types").is_some() {
            let kinds = self.layer_kinds("mlp_layer_types", layers, &["dense", "sparse"])?;
            return Ok(kinds.into_iter().map(|kind| kind == 1).collect());
        }
        let first = self.count_or("first_k_dense_replace", dense)?;
        let step = self.size_or("moe_layer_freq", 1)?;
        Ok((0..layers).map(|layer| layer >= first && layer.is_multiple_of(step)).collect())
    }

    /// Per layer: the width of its attention window, by `layer_types` where the file has it, else by `is_windowed`.
    pub fn layer_windows(
        &self,
        layers: usize,
        is_windowed: impl Fn(usize) -> bool,
    ) -> Result<Vec<Option<usize>>, ConfigError> {
        let width = match self.get("sliding_window") {
            None => None,
            Some(_) => Some(self.size("sliding_window")?),
        };
        let Some(types) = self.get("layer_types") else {
            return Ok((0..layers).map(|i| width.filter(|_| is_windowed(i))).collect());
        };
        let expected = format!("a list of {layers} of full_attention and sliding_attention");
        let wrong = || self.invalid_value("layer_types", &expected, types);
        let types = types.as_array().filter(|t| t.len() == layers).ok_or_else(wrong)?;
        let window = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => Ok(width),
            _ => Err(wrong()),
        };
        types.iter().map(window).collect()
    }
}
