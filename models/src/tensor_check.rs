//! Comparison of the tensors a checkpoint has with those a model needs.

use crate::checkpoint::Checkpoint;
use crate::error::TensorMismatch;
use std::collections::BTreeMap;

/// All missing, additional and mis-shaped tensors in one error. Dimensions of size 1 do not count: a vector is stored as
/// `[C]` or as `[1, 1, C]`, depending on who wrote the file. Additional tensors that are no floats are buffers (masks,
/// positions) and are let pass, and so are those that `is_ignored` names.
pub fn check_tensors(
    expected: &[(String, Vec<usize>)],
    checkpoint: &Checkpoint,
    is_ignored: impl Fn(&str) -> bool,
) -> Result<(), TensorMismatch> {
    let needed: BTreeMap<&str, &Vec<usize>> =
        expected.iter().map(|(name, shape)| (name.as_str(), shape)).collect();
    let mut mismatch = TensorMismatch {
        source_name: checkpoint.origin.clone(),
        missing: Vec::new(),
        extra: Vec::new(),
        misshaped: Vec::new(),
    };
    for (name, shape) in expected {
        match checkpoint.tensor_info(name) {
            None => mismatch.missing.push((name.clone(), shape.clone())),
            Some(info) if squeeze_shape(&info.shape) != squeeze_shape(shape) => {
                mismatch.misshaped.push((name.clone(), shape.clone(), info.shape.clone()));
            }
            Some(_) => {}
        }
    }
    for info in checkpoint.tensors() {
        if !needed.contains_key(info.name.as_str()) && info.dtype.is_weight() && !is_ignored(&info.name) {
            mismatch.extra.push((info.name.clone(), info.shape.clone()));
        }
    }
    let fits = mismatch.missing.is_empty() && mismatch.extra.is_empty() && mismatch.misshaped.is_empty();
    if fits { Ok(()) } else { Err(mismatch) }
}

/// A shape without its dimensions of size 1.
pub fn squeeze_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|&dim| dim != 1).collect()
}
