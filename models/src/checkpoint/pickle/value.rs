//! What a pickle can hold, and the two values that matter: storages and tensors.

use super::{Pickle, PickleGlobal};
use crate::checkpoint::StoredType;

/// A value; containers are indices into the arenas of [`Pickle`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum PickleValue {
    #[default]
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(u32),
    Tuple(u32),
    List(u32),
    Dict(u32),
    Global(PickleGlobal),
    Storage(u32),
    Tensor(u32),
}

impl PickleValue {
    /// For messages.
    pub fn kind(self) -> &'static str {
        match self {
            PickleValue::None => "None",
            PickleValue::Bool(_) => "a bool",
            PickleValue::Int(_) => "an integer",
            PickleValue::Float(_) => "a float",
            PickleValue::Str(_) => "a string",
            PickleValue::Tuple(_) => "a tuple",
            PickleValue::List(_) => "a list",
            PickleValue::Dict(_) => "a dict",
            PickleValue::Global(_) => "a class or function",
            PickleValue::Storage(_) => "a storage",
            PickleValue::Tensor(_) => "a tensor",
        }
    }
}

/// `('storage', torch.FloatStorage, key, device, elements)`: the archive's entry `data/<key>`.
#[derive(Clone, Debug, PartialEq)]
pub struct StorageRef {
    pub dtype: StoredType,
    pub key: String,
    pub elements: usize,
}

/// A view of a storage, checked to lie inside the number of elements that the storage declares.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRef {
    pub storage: u32,
    /// In elements.
    pub offset: usize,
    pub shape: Vec<usize>,
    /// In elements.
    pub strides: Vec<usize>,
}

impl TensorRef {
    /// True if the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut step = 1;
        for (&dim, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if dim != 1 && stride != step {
                return false;
            }
            step *= dim;
        }
        true
    }
}

/// More than any tensor has.
const MOST_DIMS: usize = 16;
/// torch counts them: "0", "1", ...
const LONGEST_KEY: usize = 64;

pub(super) fn storage_of(pickle: &Pickle, id: PickleValue) -> Result<StorageRef, String> {
    let Some(&[tag, class, key, _device, elements]) = pickle.tuple(id) else {
        return Err(format!("has a persistent id that is {}, not a storage", id.kind()));
    };
    if pickle.string(tag) != Some("storage") {
        return Err("has a persistent id that is not tagged `storage`".to_string());
    }
    let PickleValue::Global(PickleGlobal::Storage(dtype)) = class else {
        return Err(format!("has a storage whose type is {}", class.kind()));
    };
    let Some(key) = pickle.string(key).filter(|key| key.len() <= LONGEST_KEY) else {
        return Err(format!("has a storage whose key is not a short string but {}", key.kind()));
    };
    let elements = size(elements).ok_or("has a storage without a size")?;
    if elements.checked_mul(dtype.size()).is_none() {
        return Err(format!("has a storage of {elements} elements"));
    }
    Ok(StorageRef { dtype, key: key.to_string(), elements })
}

/// Arguments of `_rebuild_tensor_v2`: storage, offset, shape, strides, and three or four that do not matter here.
pub(super) fn tensor_of(pickle: &Pickle, arguments: &[PickleValue]) -> Result<TensorRef, String> {
    let &[PickleValue::Storage(storage), offset, shape, strides, ..] = arguments else {
        return Err("rebuilds a tensor without storage, offset, shape and strides".to_string());
    };
    let offset = size(offset).ok_or("rebuilds a tensor without an offset")?;
    let shape = sizes(pickle, shape).ok_or("rebuilds a tensor without a shape")?;
    let strides = sizes(pickle, strides).ok_or("rebuilds a tensor without strides")?;
    if shape.len() != strides.len() {
        return Err(format!(
            "rebuilds a tensor of {} dimensions with {} strides",
            shape.len(),
            strides.len()
        ));
    }
    let stored = pickle.storage(storage).elements;
    let tensor = TensorRef { storage, offset, shape, strides };
    match end_of(&tensor) {
        Some(end) if end <= stored => Ok(tensor),
        _ => Err(format!(
            "rebuilds a tensor of shape {:?}, strides {:?}, offset {offset} from a storage of {stored} elements",
            tensor.shape, tensor.strides
        )),
    }
}

/// One past the last element in the storage. `None` if it is beyond all memory, or if the tensor has more elements than
/// the part of the storage it covers: an expanded view could be made arbitrarily large from nothing.
fn end_of(tensor: &TensorRef) -> Option<usize> {
    let elements = tensor.shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))?;
    if elements == 0 {
        return Some(tensor.offset);
    }
    let mut last = 0usize;
    for (&dim, &stride) in tensor.shape.iter().zip(&tensor.strides) {
        last = last.checked_add((dim - 1).checked_mul(stride)?)?;
    }
    if elements > last.checked_add(1)? {
        return None;
    }
    tensor.offset.checked_add(last)?.checked_add(1)
}

fn size(value: PickleValue) -> Option<usize> {
    match value {
        PickleValue::Int(number) => usize::try_from(number).ok(),
        _ => None,
    }
}

fn sizes(pickle: &Pickle, value: PickleValue) -> Option<Vec<usize>> {
    let items = pickle.tuple(value).filter(|items| items.len() <= MOST_DIMS)?;
    items.iter().map(|&item| size(item)).collect()
}
