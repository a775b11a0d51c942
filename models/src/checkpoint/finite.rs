//! NaN and infinity among the weights: found while they are streamed, reported with tensor and position.

use super::TensorInfo;
use crate::error::CheckpointError;

/// Looks at one tensor piece by piece.
#[derive(Debug)]
pub struct FiniteCheck<'a> {
    info: &'a TensorInfo,
}

impl<'a> FiniteCheck<'a> {
    pub fn new(info: &'a TensorInfo) -> FiniteCheck<'a> {
        FiniteCheck { info }
    }

    /// `values` are the elements from number `start` on.
    pub fn check(&self, start: usize, values: &[f32]) -> Result<(), CheckpointError> {
        match first_not_finite(values) {
            None => Ok(()),
            Some(at) => Err(CheckpointError::NotFinite {
                tensor: self.info.name.clone(),
                index: index_of(start + at, &self.info.shape),
                element: start + at,
                value: values[at],
                stored: self.info.dtype.name(),
            }),
        }
    }
}

/// Position of the first NaN or infinity.
pub fn first_not_finite(values: &[f32]) -> Option<usize> {
    // The largest exponent of a piece: no branch per element, so that this runs at the speed of memory.
    const EXPONENT: u32 = f32::INFINITY.to_bits();
    let largest = |piece: &[f32]| piece.iter().fold(0, |most, x| most.max(x.to_bits() & EXPONENT));
    let mut start = 0;
    for piece in values.chunks(1024) {
        if largest(piece) == EXPONENT {
            return piece.iter().position(|x| !x.is_finite()).map(|at| start + at);
        }
        start += piece.len();
    }
    None
}

/// Element number to coordinates.
fn index_of(mut element: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &dim) in index.iter_mut().zip(shape).rev() {
        let dim = dim.max(1);
        *i = element % dim;
        element /= dim;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_bad_value_in_any_piece() {
        let mut values = vec![1.0f32; 3000];
        assert_eq!(first_not_finite(&values), None);
        values[2999] = f32::NEG_INFINITY;
        assert_eq!(first_not_finite(&values), Some(2999));
        values[1024] = f32::NAN;
        assert_eq!(first_not_finite(&values), Some(1024));
        values[0] = f32::MAX;
        assert_eq!(first_not_finite(&values), Some(1024));
    }

    #[test]
    fn element_numbers_become_coordinates() {
        assert_eq!(index_of(7, &[2, 5]), [1, 2]);
        assert_eq!(index_of(7, &[2, 1, 5]), [1, 0, 2]);
        assert_eq!(index_of(0, &[]), Vec::<usize>::new());
    }
}
