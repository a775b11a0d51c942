//! The tensors that tell of a configuration, and how they complete or contradict it.

use super::EvidenceResult;
use crate::checkpoint::Checkpoint;
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::families::rwkv7::naming::is_stored_transposed;
use crate::transformer::is_other_part;
use serde_json::Value;

/// A tensor of the checkpoint, with its shape as the model has it.
pub(super) struct EvidenceTensor {
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
pub(super) struct ConfigEvidence<'a> {
    pub fields: ConfigFields,
    pub checkpoint: &'a Checkpoint,
    pub canonical: fn(&str) -> String,
}

impl ConfigEvidence<'_> {
    /// The tensor of this name, whatever stands before it; without axes of size 1 in front of a matrix. `None` also for one
    /// without elements.
    pub fn find_tensor(&self, name: &str) -> Option<EvidenceTensor> {
        let fits = |stored: &str| {
            let canonical = (self.canonical)(stored);
            canonical.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let mut infos = self.checkpoint.tensors().iter();
        let info = infos.find(|info| fits(&info.listed_name) && !is_other_part(&info.stored_name))?;
        let ones = info.shape.iter().take_while(|&&dim| dim == 1).count();
        let mut shape = info.shape[ones.min(info.shape.len().saturating_sub(2))..].to_vec();
        if is_stored_transposed(&info.stored_name) {
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
pub(super) fn tensors_equal(checkpoint: &Checkpoint, a: &str, b: &str) -> bool {
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
