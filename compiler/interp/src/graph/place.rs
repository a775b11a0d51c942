//! Concrete shapes, and where in a module an evaluation failed.

use mlcc_ir::dim::SymValues;
use mlcc_ir::types::TensorType;

/// Elements of the largest tensor that is evaluated (8 GiB of f64).
const MOST_ELEMENTS: usize = 1 << 30;

/// Sizes for given symbols; `None` if one of them is negative or the tensor would be too large.
pub fn concrete_dims(ty: &TensorType, syms: &SymValues) -> Option<Vec<usize>> {
    let dims = ty.dims.iter().map(|d| usize::try_from(d.eval(syms)).ok()).collect::<Option<Vec<_>>>()?;
    let elements = dims.iter().try_fold(1usize, |a, &d| a.checked_mul(d))?;
    (elements <= MOST_ELEMENTS).then_some(dims)
}

pub fn row_major_strides(dims: &[usize]) -> Vec<i64> {
    let mut strides = vec![1i64; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i] as i64;
    }
    strides
}
