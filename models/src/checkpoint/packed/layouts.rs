//! Which tensors make a weight, by method: names, shapes, and the order of codes.

mod bits_and_bytes;
mod floats;
mod integers;

use super::scales::{is_scale_type, read_number};
use super::{
    ColumnGroups, ComponentTensor, FileBytes, GlobalScale, GroupScales, MatrixAxis, PackedKind, PackedWeight,
    QuantMethod, Quantization, QuantizedValues, StoredType, TensorInfo, component_of, numbers,
};
use crate::checkpoint::TensorStorage;
use crate::error::CheckpointError;
use std::collections::{BTreeMap, BTreeSet};

/// Ends of names of tensors that say how activations and caches are quantized, which they are not here.
const OF_ACTIVATIONS: [&str; 12] = [
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".weight_format",
];

/// The tensors with each packed weight in place of what it is made of.
pub(in super::super) fn collect_packed_weights(
    quantization: &Quantization,
    files: &[FileBytes],
    tensors: Vec<TensorInfo>,
) -> Result<Vec<TensorInfo>, CheckpointError> {
    let by_name = tensors.iter().map(|info| (info.stored_name.as_str(), info)).collect();
    let mut finder = PackedWeightFinder { quantization, files, by_name, used: BTreeSet::new() };
    let mut listed = Vec::with_capacity(tensors.len());
    for info in &tensors {
        match finder.find_weight(info)? {
            Some(weight) => listed.push(Some(weight)),
            None => listed.push(None),
        }
    }
    let used: BTreeSet<String> = finder.used.iter().map(|name| (*name).to_string()).collect();
    let of_activations = |name: &str| OF_ACTIVATIONS.iter().any(|end| name.ends_with(end));
    let kept = tensors.into_iter().zip(listed).filter_map(|(info, weight)| match weight {
        Some(weight) => Some(weight),
        None if used.contains(&info.stored_name) || of_activations(&info.stored_name) => None,
        None => Some(info),
    });
    Ok(kept.collect())
}

/// Looks for the tensors of each weight.
struct PackedWeightFinder<'a> {
    quantization: &'a Quantization,
    files: &'a [FileBytes],
    by_name: BTreeMap<&'a str, &'a TensorInfo>,
    /// Parts of weights that were found.
    used: BTreeSet<&'a str>,
}

/// A weight as its layout describes it.
struct WeightDescription {
    kind: PackedKind,
    name: String,
    shape: Vec<usize>,
    packed: PackedWeight,
}

impl<'a> PackedWeightFinder<'a> {
    /// The weight whose codes `info` is.
    fn find_weight(&mut self, info: &'a TensorInfo) -> Result<Option<TensorInfo>, CheckpointError> {
        let name = info.stored_name.as_str();
        let module = |end: &str| name.strip_suffix(end);
        let weight = match self.quantization.method {
            QuantMethod::Awq | QuantMethod::Gptq { .. } => match module(".qweight") {
                Some(module) => self.integer_weight(info, module)?,
                None => return Ok(None),
            },
            QuantMethod::Mxfp4 => match module("_blocks") {
                Some(base) => self.mxfp4_experts(info, base)?,
                None => return Ok(None),
            },
            QuantMethod::BitsAndBytes => match self.bits_and_bytes(info)? {
                Some(weight) => weight,
                None => return Ok(None),
            },
            QuantMethod::Fp8 | QuantMethod::CompressedTensors | QuantMethod::ModelOpt => {
                match (module(".weight_packed"), info.dtype) {
                    (Some(module), StoredType::I32) => self.packed_integers(info, module)?,
                    (Some(module), StoredType::U8) => self.packed_floats(info, module)?,
                    (_, StoredType::F8E4M3 | StoredType::F8E5M2 | StoredType::I8 | StoredType::U8) => {
                        match self.floats_or_bytes(info)? {
                            Some(weight) => weight,
                            None => return Ok(None),
                        }
                    }
                    _ => return Ok(None),
                }
            }
        };
        let WeightDescription { kind, name, shape, packed } = weight;
        Ok(Some(TensorInfo {
            name: name.clone(),
            stored_name: info.stored_name.clone(),
            listed_name: name,
            dtype: StoredType::Packed(kind),
            shape,
            storage: TensorStorage::Packed(Box::new(packed)),
        }))
    }

    /// The tensor `name`, which is used up, if it is there.
    fn take_optional(&mut self, name: &str) -> Result<Option<ComponentTensor>, CheckpointError> {
        let Some((&name, &info)) = self.by_name.get_key_value(name) else { return Ok(None) };
        self.used.insert(name);
        self.component(info).map(Some)
    }

    fn component(&self, info: &TensorInfo) -> Result<ComponentTensor, CheckpointError> {
        let part = component_of(info).filter(|part| part.elements() > 0);
        part.ok_or_else(|| CheckpointError::UnsupportedTensor {
            file: self.file_label(info),
            tensor: info.stored_name.clone(),
            detail: "is empty or not stored in one piece, which the parts of a quantized weight have to be; save the checkpoint as safetensors"
                .into(),
        })
    }

    /// The same for one without which `codes` cannot be read.
    fn take_required(
        &mut self,
        codes: &ComponentTensor,
        name: &str,
    ) -> Result<ComponentTensor, CheckpointError> {
        self.take_optional(name)?.ok_or_else(|| self.missing_error(codes, name))
    }

    fn missing_error(&self, codes: &ComponentTensor, name: &str) -> CheckpointError {
        codes.damaged_error(self.files, format!("is quantized, but its companion tensor `{name}` is missing"))
    }

    fn file_label(&self, info: &TensorInfo) -> String {
        match &info.storage {
            TensorStorage::Contiguous { file, .. } | TensorStorage::Strided { file, .. } => {
                self.files[*file].label.clone()
            }
            _ => String::new(),
        }
    }

    /// Checks type and shape of a part.
    fn check_component(
        &self,
        part: &ComponentTensor,
        types: &[StoredType],
        shape: &[usize],
    ) -> Result<(), CheckpointError> {
        if types.contains(&part.dtype) && part.shape == shape {
            return Ok(());
        }
        let types: Vec<_> = types.iter().map(|dtype| dtype.name()).collect();
        let (found, stored) = (&part.shape, part.dtype);
        Err(part.damaged_error(
            self.files,
            format!("has shape {found:?} of {stored}, expected {shape:?} of {}; the parts of this weight do not fit together", types.join(" or ")),
        ))
    }

    /// Scales of `matrices` matrices `[rows, columns]`, by the shape of their tensor: one for each block of a grid, which may
    /// have one row, one column, or both. Blocks are those that the configuration states where they
    /// fit, else equal parts of one row or of all.
    fn block_scales(
        &self,
        scales: ComponentTensor,
        matrices: usize,
        rows: usize,
        columns: usize,
    ) -> Result<(GroupScales, ColumnGroups), CheckpointError> {
        let grid = match scales.shape.as_slice() {
            [] | [1] => Some((1, [1, 1])),
            [count] if *count == rows && matrices == 1 => Some((1, [rows, 1])),
            [count] if *count == matrices => Some((matrices, [1, 1])),
            &[r, c] if matrices == 1 => Some((1, [r, c])),
            &[m, r] if m == matrices && r == rows => Some((m, [r, 1])),
            &[1, r, c] if matrices == 1 => Some((1, [r, c])),
            &[m, r, c] if m == matrices => Some((m, [r, c])),
            _ => None,
        };
        let stated = |grid: [usize; 2]| {
            let fits = |block: &&[usize; 2]| grid == [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
            self.quantization.blocks.iter().find(fits).copied()
        };
        let equal = |[r, c]: [usize; 2]| {
            let fits = c > 0 && (r == 1 || r == rows) && columns.is_multiple_of(c);
            fits.then(|| [rows / r, columns / c])
        };
        let found = grid.and_then(|(m, grid)| Some((m, grid, stated(grid).or_else(|| equal(grid))?)));
        let Some((count, [r, c], block)) =
            found.filter(|_| is_scale_type(scales.dtype) && rows > 0 && columns > 0)
        else {
            let (shape, stored) = (&scales.shape, scales.dtype);
            return Err(scales.damaged_error(
                self.files,
                format!("has shape {shape:?} of {stored}, which does not fit the scales of a weight [{rows}, {columns}]"),
            ));
        };
        let matrix = if count == 1 { 0 } else { r * c };
        let scales = GroupScales { part: scales, rows: block[0], steps: [matrix, c, 1], nested: None };
        Ok((scales, ColumnGroups::Runs(block[1])))
    }

    /// A factor of all scales: one number that is not 0.
    fn global_scale(&self, part: &ComponentTensor, divides: bool) -> Result<GlobalScale, CheckpointError> {
        let value = if part.elements() == 1 { read_number(part, self.files, 0) } else { None };
        match value.filter(|value| value.is_finite() && *value != 0.0) {
            Some(value) => Ok(GlobalScale { value, divides }),
            None => Err(part.damaged_error(
                self.files,
                format!(
                    "should be one number, finite and not 0; it has shape {:?} of {}",
                    part.shape, part.dtype
                ) + &value.map_or(String::new(), |value| format!(" and holds {value}")),
            )),
        }
    }
}

/// Numbers of bytes, one to a code, row-major.
fn byte_values(part: ComponentTensor, columns: usize, values: Vec<f32>) -> QuantizedValues {
    QuantizedValues {
        part,
        bits_log2: 3,
        places: &[],
        along: MatrixAxis::Columns,
        steps: [1, columns],
        values,
    }
}
