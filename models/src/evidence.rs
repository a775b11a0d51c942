//! What the tensors of a checkpoint tell of its configuration, and how they complete or contradict it.
//!
//! Published config.json files leave out what their class computes from the width or takes for granted: ranks, sizes of
//! heads, widths of feed-forward parts, biases, whether the head is the embedding. The tensors have it in their shapes, so
//! a family reads it there ([`FamilyVariant::infer`](crate::family::FamilyVariant)). A field that says something else than
//! the tensors is an error that names both.

use crate::checkpoint::Checkpoint;
use crate::config::ConfigFields;
use crate::config::sizes::{HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, VOCAB};
use crate::error::ConfigError;
use crate::layers::moe::FUSED_EXPERTS;
use crate::transformer::is_other_part;
use serde_json::Value;

/// What was told, or a contradiction.
pub(crate) type EvidenceResult = Result<(), ConfigError>;

/// A tensor of the checkpoint, with its shape as the model has it.
pub(crate) struct EvidenceTensor {
    name: String,
    stored_name: String,
    pub shape: Vec<usize>,
}

impl EvidenceTensor {
    pub fn describe(&self) -> String {
        format!("tensor `{}` {:?}", self.stored_name, self.shape)
    }
}

/// The tensors, and the fields as completed so far.
///
/// Names of tensors are those of [`ConfigEvidence::set_names`], else as stored, without what may stand before.
pub(crate) struct ConfigEvidence<'a> {
    pub fields: ConfigFields,
    checkpoint: &'a Checkpoint,
    canonical_name: fn(&str) -> String,
    is_stored_transposed: fn(&str) -> bool,
}

impl<'a> ConfigEvidence<'a> {
    pub fn new(fields: ConfigFields, checkpoint: &'a Checkpoint) -> ConfigEvidence<'a> {
        ConfigEvidence { fields, checkpoint, canonical_name: str::to_string, is_stored_transposed: |_| false }
    }

    /// For a family whose files have more than one set of names: the canonical ones, and which tensors are stored transposed.
    pub fn set_names(&mut self, canonical: fn(&str) -> String, is_stored_transposed: fn(&str) -> bool) {
        (self.canonical_name, self.is_stored_transposed) = (canonical, is_stored_transposed);
    }

    /// The tensor of this name, whatever stands before it; without axes of size 1 in front of a matrix. `None` also for one
    /// without elements.
    pub fn find_tensor(&self, name: &str) -> Option<EvidenceTensor> {
        let fits = |stored: &str| {
            let canonical = (self.canonical_name)(stored);
            canonical.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let mut infos = self.checkpoint.tensors().iter();
        let info = infos.find(|info| fits(&info.listed_name) && !is_other_part(&info.stored_name))?;
        let ones = info.shape.iter().take_while(|&&dim| dim == 1).count();
        let mut shape = info.shape[ones.min(info.shape.len().saturating_sub(2))..].to_vec();
        if (self.is_stored_transposed)(&info.stored_name) {
            shape.reverse();
        }
        let (name, stored_name) = (info.name.clone(), info.stored_name.clone());
        (!shape.is_empty() && !shape.contains(&0)).then_some(EvidenceTensor { name, stored_name, shape })
    }

    /// A size that is known by now.
    pub fn known_size(&self, fields: &[&'static str]) -> Option<usize> {
        let value = self.fields.get(self.fields.first_present(fields))?.as_u64().filter(|v| *v > 0)?;
        usize::try_from(value).ok()
    }

    /// The size of an axis, which holds `parts` equal parts.
    pub fn record_axis_size(
        &mut self,
        fields: &[&'static str],
        tensor: &str,
        axis: usize,
        parts: usize,
    ) -> EvidenceResult {
        let Some(found) = self.find_tensor(tensor) else { return Ok(()) };
        match found.shape.get(axis) {
            // What does not divide is reported when the tensors are compared with the configuration.
            Some(&size) if size.is_multiple_of(parts) => self.record_size(fields, size / parts, &found),
            _ => Ok(()),
        }
    }

    pub fn record_size(
        &mut self,
        fields: &[&'static str],
        size: usize,
        found: &EvidenceTensor,
    ) -> EvidenceResult {
        let field = self.fields.first_present(fields);
        match self.fields.get(field) {
            None => {
                self.fields.raw.insert(field.into(), size.into());
                Ok(())
            }
            // A value of another kind is reported by the reader.
            Some(said) if said.as_u64().is_none_or(|said| said == size as u64) => Ok(()),
            Some(said) => Err(self.contradiction_error(field, said, &found.describe(), size.to_string())),
        }
    }

    pub fn record_flag(&mut self, field: &str, told: bool, evidence: &str) -> EvidenceResult {
        match self.fields.get(field) {
            None => {
                self.fields.raw.insert(field.into(), told.into());
                Ok(())
            }
            Some(said) if said.as_bool().is_none_or(|said| said == told) => Ok(()),
            Some(said) => Err(self.contradiction_error(field, said, evidence, told.to_string())),
        }
    }

    /// Whether `module` has a bias.
    pub fn record_bias(&mut self, field: &str, module: &str) -> EvidenceResult {
        self.record_presence(field, &format!("{module}.weight"), &format!("{module}.bias"), true)
    }

    /// A flag that is `meaning` if `tensor` is there, in a checkpoint that has `beside` in the same place.
    pub fn record_presence(
        &mut self,
        field: &str,
        beside: &str,
        tensor: &str,
        meaning: bool,
    ) -> EvidenceResult {
        match (self.find_tensor(beside), self.find_tensor(tensor)) {
            (None, _) => Ok(()),
            (Some(_), Some(found)) => self.record_flag(field, meaning, &found.describe()),
            (Some(_), None) => {
                self.record_flag(field, !meaning, &format!("that there is no tensor `{tensor}`"))
            }
        }
    }

    /// Whether the head is the embedding. Where it usually is, a head that is stored too may be a copy.
    pub fn record_tied_embedding(&mut self, embedding: &str, head: &str, usually: bool) -> EvidenceResult {
        let field = "tie_word_embeddings";
        match (self.find_tensor(embedding), self.find_tensor(head)) {
            (None, _) => Ok(()),
            // Classifiers have no head for tokens.
            (Some(_), None) if self.fields.label_count()?.is_some() => Ok(()),
            (Some(_), None) => self.record_flag(field, true, &format!("that there is no tensor `{head}`")),
            // A head that the configuration ties is held against the table when the model is known.
            (Some(_), Some(_)) if self.fields.get(field).is_some() => Ok(()),
            (Some(table), Some(found)) => {
                let tied = usually && tensors_equal(self.checkpoint, &table.name, &found.name);
                self.record_flag(field, tied, &found.describe())
            }
        }
    }

    /// Whether the experts of a layer are stored together, as `{inside}.down_proj`, or one by one, with `part` in each. Files
    /// that are no checkpoints of PyTorch say it themselves.
    pub fn record_fused_experts(&mut self, inside: &str, part: &str) -> EvidenceResult {
        if self.fields.get(FUSED_EXPERTS).is_some() {
            return Ok(());
        }
        let together = self.find_tensor(&format!("{inside}.down_proj"));
        match together.is_some() || self.find_tensor(&format!("{inside}.0.{part}.weight")).is_some() {
            true => self.record_flag(FUSED_EXPERTS, together.is_some(), ""),
            false => Ok(()),
        }
    }

    /// Vocabulary and width.
    pub fn record_table(&mut self, name: &str) -> EvidenceResult {
        self.record_axis_size(&VOCAB, name, 0, 1)?;
        self.record_axis_size(&HIDDEN, name, 1, 1)
    }

    /// Vocabulary and width, and whether the table is the head too.
    pub fn record_embedding(&mut self, name: &str, head: &str, usually_tied: bool) -> EvidenceResult {
        self.record_table(name)?;
        self.record_tied_embedding(name, head, usually_tied)
    }

    /// What the Llama block has. `head_norm` is a vector of one head, where there is one.
    pub fn record_llama_block(&mut self, head_norm: Option<&str>) -> EvidenceResult {
        self.record_embedding("embed_tokens.weight", "lm_head.weight", false)?;
        self.record_heads("layers.0.self_attn", head_norm)?;
        self.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)
    }

    /// The same where the head usually is the embedding.
    pub fn record_tied_llama_block(&mut self) -> EvidenceResult {
        self.record_tied_embedding("embed_tokens.weight", "lm_head.weight", true)?;
        self.record_llama_block(None)
    }

    pub fn record_heads(&mut self, attention: &str, head_norm: Option<&str>) -> EvidenceResult {
        if let Some(norm) = head_norm {
            self.record_axis_size(&HEAD_SIZE, norm, 0, 1)?;
        }
        let query = &format!("{attention}.q_proj.weight");
        match (self.known_size(&HEADS), self.known_size(&HEAD_SIZE)) {
            (Some(heads), _) => self.record_axis_size(&HEAD_SIZE, query, 0, heads)?,
            (None, Some(size)) => self.record_axis_size(&HEADS, query, 0, size)?,
            (None, None) => {}
        }
        let Some(size) = self.known_size(&HEAD_SIZE) else { return Ok(()) };
        self.record_axis_size(&KV_HEADS, &format!("{attention}.k_proj.weight"), 0, size)
    }

    /// The same in the layers that have attention. `head_norm` is a vector of one head.
    pub fn record_hybrid_heads(&mut self, head_norm: &str) -> EvidenceResult {
        self.record_axis_size(&HEAD_SIZE, head_norm, 0, 1)?;
        let Some(size) = self.known_size(&HEAD_SIZE) else { return Ok(()) };
        self.record_axis_size(&KV_HEADS, "self_attn.k_proj.weight", 0, size)
    }

    /// The same where queries, keys and values are one matrix: the output's columns are those of all heads.
    pub fn record_fused_heads(
        &mut self,
        output: &str,
        fused: &str,
        kv_heads: &[&'static str],
    ) -> EvidenceResult {
        let Some(heads) = self.known_size(&HEADS) else { return Ok(()) };
        self.record_axis_size(&HEAD_SIZE, output, 1, heads)?;
        let (Some(size), Some(found)) = (self.known_size(&HEAD_SIZE), self.find_tensor(fused)) else {
            return Ok(());
        };
        let others = found.shape[0].checked_div(size).and_then(|all| all.checked_sub(heads));
        match others.filter(|n| n % 2 == 0 && *n > 0) {
            Some(both) => self.record_size(kv_heads, both / 2, &found),
            None => Ok(()),
        }
    }

    /// Whether all queries share one key head, from the rows of a fused matrix.
    pub fn record_multi_query(&mut self, fused: &str) -> EvidenceResult {
        let (Some(found), Some(hidden), Some(heads)) =
            (self.find_tensor(fused), self.known_size(&HIDDEN), self.known_size(&HEADS))
        else {
            return Ok(());
        };
        match found.shape[0] {
            _ if heads < 2 => Ok(()),
            rows if rows == hidden + 2 * (hidden / heads) => {
                self.record_flag("multi_query", true, &found.describe())
            }
            rows if rows == 3 * hidden => self.record_flag("multi_query", false, &found.describe()),
            _ => Ok(()),
        }
    }

    fn contradiction_error(&self, field: &str, said: &Value, evidence: &str, told: String) -> ConfigError {
        ConfigError::Contradiction {
            file: self.fields.origin.clone(),
            weights: self.checkpoint.origin.clone(),
            field: field.to_string(),
            what: format!("is {said}, but {evidence} means {told}"),
        }
    }
}

/// Whether two tensors have one shape and the same values.
pub(crate) fn tensors_equal(checkpoint: &Checkpoint, a: &str, b: &str) -> bool {
    const PIECE: usize = 1 << 16;
    let (Ok(a), Ok(b)) = (checkpoint.read(a), checkpoint.read(b)) else { return false };
    if a.info().shape != b.info().shape {
        return false;
    }
    let [mut left, mut right] = [vec![0.0; PIECE], vec![0.0; PIECE]];
    (0..a.elements()).step_by(PIECE).all(|start| {
        let len = PIECE.min(a.elements() - start);
        let read = a.read_f32_into(start, &mut left[..len]).and(b.read_f32_into(start, &mut right[..len]));
        read.is_ok() && left[..len] == right[..len]
    })
}
