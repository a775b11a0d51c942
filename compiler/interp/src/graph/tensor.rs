//! Tensors of the graph interpreter, and the recurrent state between steps.

use super::scalar::from_float;
use super::{GraphError, place::concrete_dims};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::{Module, StateId};
use mlcc_ir::types::DType;
use std::sync::Arc;

/// Row-major elements, each already rounded to `dtype`. A packed dtype holds dequantized values.
#[derive(Clone, PartialEq, Debug)]
pub struct Tensor {
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub data: Vec<f64>,
}

impl Tensor {
    /// Rounds every element to `dtype`. Panics if the number of elements is not the product of `dims`.
    pub fn new(dtype: DType, dims: &[usize], mut data: Vec<f64>) -> Tensor {
        assert_eq!(data.len(), dims.iter().product::<usize>(), "elements of {dtype}{dims:?}");
        for v in &mut data {
            *v = from_float(dtype, *v);
        }
        Tensor { dtype, dims: dims.to_vec(), data }
    }
    pub fn full(dtype: DType, dims: &[usize], value: f64) -> Tensor {
        Tensor::new(dtype, dims, vec![value; dims.iter().product()])
    }
    pub fn f32(dims: &[usize], data: &[f32]) -> Tensor {
        Tensor::new(DType::F32, dims, data.iter().map(|&v| f64::from(v)).collect())
    }
    /// `i32[ids.len()]`.
    pub fn ids(ids: &[i32]) -> Tensor {
        Tensor::new(DType::I32, &[ids.len()], ids.iter().map(|&v| f64::from(v)).collect())
    }
    pub fn to_f32(&self) -> Vec<f32> {
        self.data.iter().map(|&v| v as f32).collect()
    }
    /// Elements of index `i` along axis 0.
    pub fn row(&self, i: usize) -> &[f64] {
        let size = self.dims[1..].iter().product::<usize>();
        &self.data[i * size..(i + 1) * size]
    }
    /// `f32[2, 3]`.
    pub fn describe(&self) -> String {
        format!("{}{:?}", self.dtype, self.dims)
    }
}

/// Value of every state of a module between two steps.
#[derive(Clone, PartialEq, Debug)]
pub struct StateValues {
    values: Vec<Arc<Tensor>>,
}

impl StateValues {
    /// The start of a sequence.
    pub fn new(module: &Module) -> Result<StateValues, GraphError> {
        let none = SymValues { n: 0, b: 0, past: 0 };
        let mut values = Vec::with_capacity(module.states.len());
        for state in module.states.values() {
            let place = || format!("state @{}", state.name);
            let dims = concrete_dims(&state.ty, &none)
                .ok_or_else(|| GraphError::Size { place: place(), ty: state.ty.clone() })?;
            values.push(Arc::new(Tensor::full(state.ty.dtype, &dims, state.init)));
        }
        Ok(StateValues { values })
    }
    pub fn get(&self, id: StateId) -> Option<&Tensor> {
        self.values.get(id.index()).map(|t| &**t)
    }
    /// False if there is no such state. The tensor's shape is checked when a step reads it.
    pub fn set(&mut self, id: StateId, value: Tensor) -> bool {
        self.set_shared(id, Arc::new(value))
    }
    pub(super) fn shared(&self, id: StateId) -> Option<&Arc<Tensor>> {
        self.values.get(id.index())
    }
    pub(super) fn set_shared(&mut self, id: StateId, value: Arc<Tensor>) -> bool {
        match self.values.get_mut(id.index()) {
            Some(slot) => {
                *slot = value;
                true
            }
            None => false,
        }
    }
}
