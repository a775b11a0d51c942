//! Which weights share a scale, and where it is.

use super::numbers::{decode_e4m3, decode_e5m2, decode_e8m0};
use super::{ComponentTensor, FileBytes, StoredType};
use crate::error::CheckpointError;
use half::{bf16, f16};

/// The groups that the columns of a row are in.
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) enum ColumnGroups {
    /// So many neighbours are a group.
    Runs(usize),
    /// The group of each column is stored (`g_idx`); numbers are less than `count`.
    Listed { part: ComponentTensor, count: usize },
}

impl ColumnGroups {
    pub fn index_tensor(&self) -> Option<&ComponentTensor> {
        match self {
            ColumnGroups::Runs(_) => None,
            ColumnGroups::Listed { part, .. } => Some(part),
        }
    }
}

/// A factor of all scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct GlobalScale {
    pub value: f32,
    pub divides: bool,
}

impl GlobalScale {
    pub fn apply(self, scale: f32) -> f32 {
        if self.divides { scale / self.value } else { scale * self.value }
    }
}

/// The scale of row `r` of matrix `m` in group `g` is number `m * steps[0] + r / rows * steps[1] + g * steps[2]`.
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) struct GroupScales {
    pub part: ComponentTensor,
    /// Rows that share a scale.
    pub rows: usize,
    pub steps: [usize; 3],
    pub nested: Option<NestedScales>,
}

/// Scales that are codes themselves: `values[code] * scales[number / run] + offset` (bitsandbytes).
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) struct NestedScales {
    pub values: Vec<f32>,
    pub scales: ComponentTensor,
    pub run: usize,
    pub offset: f32,
}

impl GroupScales {
    pub fn components(&self) -> impl Iterator<Item = &ComponentTensor> {
        std::iter::once(&self.part).chain(self.nested.iter().map(|nested| &nested.scales))
    }

    pub fn scale_index(&self, matrix: usize, row: usize, group: usize) -> usize {
        matrix * self.steps[0] + row / self.rows * self.steps[1] + group * self.steps[2]
    }

    /// Scale number `index`, which is finite.
    pub fn read_scale(&self, files: &[FileBytes], index: usize) -> Result<f32, CheckpointError> {
        let scale = read_number(&self.part, files, index);
        let scale = match (&self.nested, scale) {
            (Some(nested), Some(code)) => {
                let value = nested.values.get(code as usize).copied();
                let scale = read_number(&nested.scales, files, index / nested.run);
                value.zip(scale).map(|(value, scale)| value * scale + nested.offset)
            }
            (_, scale) => scale,
        };
        match scale {
            Some(scale) if scale.is_finite() => Ok(scale),
            Some(scale) => {
                let what = match self.part.dtype {
                    StoredType::U8 | StoredType::F8E8M0 if self.nested.is_none() => {
                        "is 255, an exponent that encodes no number".to_string()
                    }
                    _ => format!("is {scale}"),
                };
                Err(self.part.damaged_error(files, format!("scale {index} {what}; the checkpoint is broken")))
            }
            None => Err(self.part.damaged_error(
                files,
                format!("has {} scales, none with number {index}", self.part.elements()),
            )),
        }
    }
}

/// Element `index` of a part that is a list of numbers; `None` outside of it, or of another type.
pub fn read_number(part: &ComponentTensor, files: &[FileBytes], index: usize) -> Option<f32> {
    let size = part.dtype.size();
    let bytes = part.bytes(files).get(index.checked_mul(size)?..)?.get(..size)?;
    Some(match (part.dtype, bytes) {
        (StoredType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (StoredType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (StoredType::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (StoredType::F8E4M3, &[code]) => decode_e4m3(code),
        (StoredType::F8E5M2, &[code]) => decode_e5m2(code),
        (StoredType::F8E8M0, &[code]) => decode_e8m0(code),
        (StoredType::U8, &[code]) => f32::from(code),
        _ => return None,
    })
}

/// The whole numbers of a part of 32 or 64 bits; none of another type.
pub fn read_integers(part: &ComponentTensor, files: &[FileBytes]) -> Vec<i64> {
    let bytes = part.bytes(files);
    match part.dtype {
        StoredType::I64 => bytes.as_chunks::<8>().0.iter().map(|raw| i64::from_le_bytes(*raw)).collect(),
        StoredType::I32 => {
            bytes.as_chunks::<4>().0.iter().map(|raw| i64::from(i32::from_le_bytes(*raw))).collect()
        }
        _ => Vec::new(),
    }
}

/// True for types that scales may have.
pub fn is_scale_type(dtype: StoredType) -> bool {
    use StoredType::{BF16, F8E4M3, F8E5M2, F8E8M0, F16, F32, U8};
    matches!(dtype, F32 | F16 | BF16 | F8E4M3 | F8E5M2 | F8E8M0 | U8)
}
