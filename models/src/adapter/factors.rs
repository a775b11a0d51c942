//! The factors of an adapter for slots of an artifact, which it is put into when that runs.

use super::{AdapterRequest, PeftAdapter};
use crate::checkpoint::{FiniteCheck, TensorInfo};
use crate::error::{AdapterError, ModelError};
use crate::transformer::{hugging_face_name, strip_text_prefix};

/// What an adapter adds to one tensor: the product of its factors.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorFactors {
    /// Name of the tensor `[out, in]`, as the model has it.
    pub tensor: String,
    pub rank: usize,
    /// `[rank, in]`, row by row.
    pub a: Vec<f32>,
    /// `[out, rank]`, row by row, times the scale of the adapter.
    pub b: Vec<f32>,
}

/// Reads the factors of an adapter, by the names of the tensors for which `has_slot` is true. What is no pair of factors, and what no slot is
/// for, is refused by name.
pub fn read_lora_factors(
    request: &AdapterRequest,
    has_slot: impl Fn(&str) -> bool,
) -> Result<Vec<TensorFactors>, ModelError> {
    let adapter = PeftAdapter::open(request)?;
    let mut found = Vec::new();
    for (path, module) in &adapter.lora_modules()? {
        let refused = |info: &TensorInfo, what: &str| {
            let what =
                format!("{what}, which does not fit into a slot; merge the adapter with `mlcc build --lora`");
            Err(ModelError::from(adapter.tensor_error(info, what)))
        };
        if let Some((_, info)) = module.replaced.first() {
            return refused(info, "replaces a tensor of the base (`modules_to_save`, `bias`)");
        }
        if let Some(info) = module.magnitude {
            return refused(info, "is the length of the rows of a weight (DoRA)");
        }
        if let Some(info) = module.bias {
            return refused(info, "is the bias of a factor (`lora_bias`)");
        }
        let pair = module.factor_pair().map_err(|(info, what)| adapter.tensor_error(info, what))?;
        let Some((a, b, of_embedding)) = pair else { continue };
        if of_embedding {
            return refused(a, "belongs to an embedding");
        }
        let (rank, _) = adapter.check_ranks(a, b)?;
        let names = [path.clone(), hugging_face_name(&strip_text_prefix(path)), hugging_face_name(path)];
        let names = names.map(|name| format!("{name}.weight"));
        let Some(tensor) = names.iter().find(|name| has_slot(name)) else {
            let what = "adapts a weight for which the artifact has no slot: it is for another base, or for a weight \
                that cannot be adapted at run time (heads, embeddings, experts, fused layers); merge it with `mlcc \
                build --lora`";
            return Err(adapter.wrong_base_error(a, what.into()).into());
        };
        let scale = (adapter.scale * adapter.config.module_scale(path, rank)?) as f32;
        let (a, mut b) = (adapter.read_values(a)?, adapter.read_values(b)?);
        b.iter_mut().for_each(|value| *value *= scale);
        found.push(TensorFactors { tensor: tensor.clone(), rank, a, b });
    }
    Ok(found)
}

impl PeftAdapter {
    /// All values of a tensor; NaN and infinities are errors.
    fn read_values(&self, info: &TensorInfo) -> Result<Vec<f32>, ModelError> {
        let mut values = vec![0.0; info.elements()];
        self.weights.read(&info.name)?.read_f32_into(0, &mut values)?;
        FiniteCheck::new(info).check(0, &values)?;
        Ok(values)
    }

    /// Rank and columns of the factors of a matrix.
    pub(super) fn check_ranks(
        &self,
        a: &TensorInfo,
        b: &TensorInfo,
    ) -> Result<(usize, [usize; 2]), AdapterError> {
        let (&[rank, columns], &[rows, other]) = (a.shape.as_slice(), b.shape.as_slice()) else {
            let what = format!(
                "has shape {:?} and its partner {:?}; only adapters of matrices are supported",
                a.shape, b.shape
            );
            return Err(self.tensor_error(a, what));
        };
        if rank != other || rank == 0 {
            let what = format!(
                "has shape {:?}, `{}` has {:?}: their ranks differ, or are none",
                a.shape, b.name, b.shape
            );
            return Err(self.tensor_error(a, what));
        }
        Ok((rank, [rows, columns]))
    }
}
