//! The attention of Gemma 4.

use super::Gemma4Config;
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::layers::attention::{AttentionVariant, RotatedQueries, append_key_values};
use crate::layers::norm::{rms_norm, rms_norm_unweighted};
use crate::layers::{LinearLayer, RopeTables};
use crate::transformer::{ModelBuilder, ModelSizes};
use mlcc_ir::graph::ValueId;
use serde_json::{Map, Value};
use std::cell::Cell;

/// Heads of a kind of layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerHeads {
    pub size: usize,
    /// Key and value heads.
    pub kv: usize,
    /// There is no projection of values: they are the keys before norm and rotary embedding.
    pub keys_are_values: bool,
}

const LARGEST_HEAD: usize = 4096;

impl LayerHeads {
    /// Of layers without and with a window.
    pub fn read(
        fields: &ConfigFields,
        sizes: &ModelSizes,
        windows: &[Option<usize>],
    ) -> Result<[LayerHeads; 2], ConfigError> {
        let told = LayerHeads::read_layer_heads(fields, sizes, windows)?;
        let fields = told.as_ref().unwrap_or(fields);
        let keys_are_values = fields.flag_or("attention_k_eq_v", false)?;
        let size = fields.size_or("global_head_dim", 512)?;
        if size > LARGEST_HEAD {
            let expected = format!("at most {LARGEST_HEAD}");
            return Err(fields.invalid_value("global_head_dim", &expected, &Value::from(size)));
        }
        let kv = match keys_are_values {
            true => fields.size_or("num_global_key_value_heads", sizes.kv_heads)?,
            false => sizes.kv_heads,
        };
        if !sizes.heads.is_multiple_of(kv) {
            let expected = format!("a divisor of num_attention_heads, which is {}", sizes.heads);
            return Err(fields.invalid_value("num_global_key_value_heads", &expected, &Value::from(kv)));
        }
        let sliding = LayerHeads { size: sizes.head_size, kv: sizes.kv_heads, keys_are_values: false };
        Ok([LayerHeads { size, kv, keys_are_values }, sliding])
    }

    /// The fields with what newer releases of transformers write for single layers (`per_layer_config`) under the older names, which are
    /// of all layers without a window. What a layer does not tell is as in the others.
    fn read_layer_heads(
        fields: &ConfigFields,
        sizes: &ModelSizes,
        windows: &[Option<usize>],
    ) -> Result<Option<ConfigFields>, ConfigError> {
        const PER_LAYER: &str = "per_layer_config";
        let Some(mut layers) = fields.nested_object(PER_LAYER)? else { return Ok(None) };
        // The numbers of the layers are written with as many digits as the last one has.
        let plain = |number: String| number.parse().map_or(number, |layer: usize| layer.to_string());
        layers.raw = layers.raw.into_iter().map(|(number, own)| (plain(number), own)).collect();
        let wrong = |found: &str| {
            let expected =
                "head_dim and num_key_value_heads of layers without a window, equal in all of them";
            Err(fields.invalid_value(PER_LAYER, expected, &Value::from(found)))
        };
        let mut told: Option<[usize; 2]> = None;
        let full = windows.iter().enumerate().filter(|(_, window)| window.is_none());
        let numbers: Vec<String> = full.map(|(layer, _)| layer.to_string()).collect();
        if let Some(other) = layers.raw.keys().find(|layer| !numbers.contains(layer)) {
            return wrong(other);
        }
        for layer in &numbers {
            let own =
                layers.nested_object(layer)?.unwrap_or(ConfigFields { raw: Map::new(), ..fields.clone() });
            let known = ["head_dim", "num_key_value_heads"];
            if let Some(other) = own.raw.keys().find(|field| !known.contains(&field.as_str())) {
                return wrong(other);
            }
            let [size, kv] = known;
            let found = [own.size_or(size, sizes.head_size)?, own.size_or(kv, sizes.kv_heads)?];
            if told.replace(found).is_some_and(|told| told != found) {
                return wrong(layer);
            }
        }
        let mut fields = fields.clone();
        if let Some([size, kv]) = told {
            fields.raw.insert("global_head_dim".to_string(), size.into());
            fields.raw.insert("num_global_key_value_heads".to_string(), kv.into());
        }
        Ok(Some(fields))
    }
}

/// What the layers of a call share.
pub struct SharedTensors {
    /// Of layers without and with a window.
    pub ropes: [RopeTables; 2],
    /// What each layer adds of its own, `[n, layers, width]`.
    pub inputs: Option<ValueId>,
    /// All keys and values so far of the last layer without, and of the last with a window, of one sequence.
    pub rows: Cell<[Option<[ValueId; 2]>; 2]>,
}

impl Gemma4Config {
    pub(super) fn attention(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        shared: &SharedTensors,
    ) -> ValueId {
        let window = self.windows[layer];
        let kind = usize::from(window.is_some());
        let heads = self.heads[kind];
        let project = |net: &mut ModelBuilder, which: &str, x, out| {
            LinearLayer::new(&format!("{name}.{which}"), out).bias(self.bias).apply(net, x)
        };
        let mut inputs = vec![project(net, "q_proj", x, self.sizes.heads * heads.size)];
        if layer < self.first_shared {
            let k = project(net, "k_proj", x, heads.kv * heads.size);
            inputs.push(k);
            inputs.push(if heads.keys_are_values {
                k
            } else {
                project(net, "v_proj", x, heads.kv * heads.size)
            });
        }
        let rope = &shared.ropes[kind];
        let attention = AttentionVariant { scale: 1.0, window, ..AttentionVariant::causal(heads.size) };
        let rows = net.per_sequence(&inputs, |net, rows| {
            let q = net.split_heads(rows[0], self.sizes.heads);
            let q = rms_norm(net, q, &format!("{name}.q_norm"), self.eps);
            let far = rope.apply_for_sinks(net, q);
            let q = rope.apply(net, q);
            let q = RotatedQueries { windowed: q, for_sinks: far.unwrap_or(q) };
            let mut all = shared.rows.get();
            if let &[_, k, v] = rows {
                let (k, v) = (net.split_heads(k, heads.kv), net.split_heads(v, heads.kv));
                let k = rms_norm(net, k, &format!("{name}.k_norm"), self.eps);
                let k = rope.apply(net, k);
                let v = rms_norm_unweighted(net, v, self.eps);
                all[kind] = Some(append_key_values(net, layer, [k, v]));
                shared.rows.set(all);
            }
            let rows = all[kind].expect("a layer of the kind came before; the configuration was checked");
            vec![attention.attend(net, q, rows, None)]
        });
        project(net, "o_proj", rows[0], self.sizes.hidden)
    }
}
