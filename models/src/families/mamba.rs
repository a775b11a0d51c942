//! Mamba (Gu and Dao 2023; reference: `MambaForCausalLM` of transformers): no attention; each layer is one mixer after a norm.

use crate::config::ConfigFields;
use crate::config::sizes::{HIDDEN, LAYERS, VOCAB};
use crate::error::ConfigError;
use crate::layers::mamba::Mamba;
use crate::layers::norm::{Norm, rms_norm};
use crate::transformer::{Frame, Net, Sizes, Transformer, prefixed};
use mlcc_ir::graph::ValueId;

#[derive(Clone, Debug, PartialEq)]
pub struct MambaConfig {
    pub sizes: Sizes,
    pub eps: f64,
    pub mixer: Mamba,
    pub tied: bool,
}

/// Tokens that the published models were trained with at once; the state has no end.
const CONTEXT: usize = 2048;
const MOST_LAYERS: usize = 1000;

impl MambaConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<MambaConfig, ConfigError> {
        let mixer = Mamba::read(fields)?;
        let (layers_field, hidden) = (fields.first(&LAYERS), fields.size(fields.first(&HIDDEN))?);
        let sizes = Sizes {
            vocab: fields.size(fields.first(&VOCAB))?,
            hidden,
            layers: fields.within(layers_field, fields.size(layers_field)?, MOST_LAYERS)?,
            heads: 1,
            kv_heads: 1,
            head_size: hidden,
            context: CONTEXT,
        };
        let eps = fields.epsilon(&["layer_norm_epsilon"], 1e-5)?;
        Ok(MambaConfig { sizes, eps, mixer, tied: fields.flag_or("tie_word_embeddings", true)? })
    }
}

impl Transformer for MambaConfig {
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
        // The first published files call the table otherwise.
        let name = stored_name.replace("embedding.weight", "embeddings.weight");
        prefixed(&name, "backbone.", &["embeddings.", "layers.", "norm_f."])
    }
}
