//! Mamba 2 (Dao and Gu 2024; reference: `Mamba2ForCausalLM` of transformers): no attention; each layer is one mixer after a norm.

use crate::config::ConfigFields;
use crate::config::sizes::{HIDDEN, LAYERS, VOCAB};
use crate::error::ConfigError;
use crate::layers::mamba2::Mamba2;
use crate::layers::norm::{Norm, rms_norm};
use crate::transformer::{Frame, Net, Sizes, Transformer, prefixed};
use mlcc_ir::graph::ValueId;
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Config {
    pub sizes: Sizes,
    pub eps: f64,
    pub mixer: Mamba2,
    pub tied: bool,
}

/// Tokens that the published models were trained with at once; the state has no end.
const CONTEXT: usize = 2048;
const MOST_LAYERS: usize = 1000;

impl Mamba2Config {
    pub fn from_fields(fields: &ConfigFields) -> Result<Mamba2Config, ConfigError> {
        let eps = fields.epsilon(&["layer_norm_epsilon"], 1e-5)?;
        let names =
            ["num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"];
        let mixer = Mamba2::read(fields, names, eps)?;
        let layers = fields.size(fields.first(&LAYERS))?;
        if layers > MOST_LAYERS {
            let expected = format!("at most {MOST_LAYERS}");
            return Err(fields.wrong(fields.first(&LAYERS), &expected, &Value::from(layers)));
        }
        let sizes = Sizes {
            vocab: fields.size(fields.first(&VOCAB))?,
            hidden: fields.size(fields.first(&HIDDEN))?,
            layers,
            heads: mixer.heads,
            kv_heads: mixer.heads,
            head_size: mixer.head_size,
            context: CONTEXT,
        };
        Ok(Mamba2Config { sizes, eps, mixer, tied: fields.flag_or("tie_word_embeddings", false)? })
    }
}

impl Transformer for Mamba2Config {
    type Shared = ();

    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn frame(&self) -> Frame {
        let norm = (Norm::Rms(self.eps), "backbone.norm_f");
        Frame::named("backbone.embeddings.weight", norm, "lm_head.weight", self.tied)
    }

    fn shared(&self, _: &mut Net) {}

    fn block(&self, net: &mut Net, layer: usize, x: ValueId, (): &()) -> ValueId {
        let name = format!("backbone.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.norm"), self.eps);
        let h = self.mixer.apply(net, layer, &format!("{name}.mixer"), h);
        net.residual(layer, "mixer", x, h)
    }

    fn has_cache(&self) -> bool {
        false
    }

    fn cannot_stream(&self) -> Option<&'static str> {
        Some("this model keeps a state of fixed size and no tokens; its text has no end anyway")
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        prefixed(stored_name, "backbone.", &["embeddings.", "layers.", "norm_f."])
    }
}
