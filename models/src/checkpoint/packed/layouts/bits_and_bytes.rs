//! bitsandbytes: 4 bits by a table of 16 values, with scales that may be quantized themselves; 8 bits by row.

use super::{
    CheckpointError, ColumnGroups, ComponentTensor, GlobalScale, GroupScales, MatrixAxis, PackedKind,
    PackedWeight, PackedWeightFinder, QuantizedValues, StoredType, TensorInfo, WeightDescription,
    byte_values, numbers, read_number,
};
use crate::checkpoint::packed::scales::NestedScales;
use serde_json::Value;

/// The upper half of a byte comes first.
const HALVES: &[u8] = &[1, 0];

/// What `quant_state` says.
struct QuantState {
    block: usize,
    shape: [usize; 2],
    nested_block: Option<usize>,
    offset: f32,
}

impl<'a> PackedWeightFinder<'a> {
    pub(super) fn bits_and_bytes(
        &mut self,
        info: &'a TensorInfo,
    ) -> Result<Option<WeightDescription>, CheckpointError> {
        let name = info.stored_name.as_str();
        match (name.strip_suffix(".weight"), info.dtype) {
            (Some(module), StoredType::I8) => {
                let codes = self.component(info)?;
                let scales = self.take_required(&codes, &format!("{module}.SCB"))?;
                self.eight_bits_by_row(codes, scales).map(Some)
            }
            (Some(_), StoredType::U8) => {
                let codes = self.component(info)?;
                self.four_bit_table(codes).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// `code * SCB[row] / 127`.
    fn eight_bits_by_row(
        &self,
        codes: ComponentTensor,
        scales: ComponentTensor,
    ) -> Result<WeightDescription, CheckpointError> {
        let &[rows, columns] = codes.shape.as_slice() else {
            return Err(
                codes.damaged_error(self.files, format!("has shape {:?}, expected a matrix", codes.shape))
            );
        };
        self.check_component(&scales, &[StoredType::F32], &[rows])?;
        let (name, shape) = (codes.name.clone(), codes.shape.clone());
        let packed = PackedWeight {
            codes: byte_values(codes, columns, numbers::decode_table(numbers::decode_signed)),
            zeros: None,
            scales: GroupScales { part: scales, rows: 1, steps: [0, 1, 0], nested: None },
            global: Some(GlobalScale { value: 127.0, divides: true }),
            groups: ColumnGroups::Runs(columns),
            rows,
            columns,
            transposed: false,
        };
        Ok(WeightDescription { kind: PackedKind::Int8, name, shape, packed })
    }

    /// A list of codes of all elements, row-major; `quant_map` has their values, `absmax` the scale of each block.
    fn four_bit_table(&mut self, codes: ComponentTensor) -> Result<WeightDescription, CheckpointError> {
        let name = codes.name.clone();
        let QuantState { block, shape, nested_block, offset } = self.read_quant_state(&codes)?;
        let elements = shape[0] * shape[1];
        let (blocks, half) = (elements.div_ceil(block), elements.div_ceil(2));
        if codes.elements() != half {
            let detail = format!("has shape {:?}, expected {half} bytes for a weight {shape:?}", codes.shape);
            return Err(codes.damaged_error(self.files, detail));
        }
        let map = self.take_required(&codes, &format!("{name}.quant_map"))?;
        let values = self.read_code_map(&map, 16)?;
        let scales = self.take_required(&codes, &format!("{name}.absmax"))?;
        self.check_component(&scales, &[StoredType::F32, StoredType::U8], &[blocks])?;
        let nested = match (scales.dtype, nested_block) {
            (StoredType::U8, Some(run)) => {
                let map = self.take_required(&codes, &format!("{name}.nested_quant_map"))?;
                let inner = self.take_required(&codes, &format!("{name}.nested_absmax"))?;
                self.check_component(&inner, &[StoredType::F32], &[blocks.div_ceil(run)])?;
                Some(NestedScales { values: self.read_code_map(&map, 256)?, scales: inner, run, offset })
            }
            (StoredType::U8, None) => {
                let detail = "is quantized, but `quant_state` has no `nested_blocksize`".into();
                return Err(scales.damaged_error(self.files, detail));
            }
            _ => None,
        };
        // Rows of whole blocks, or one row where blocks go from one to the next.
        let whole = shape[1].is_multiple_of(block) && block.is_multiple_of(2);
        let (rows, columns) = if whole { (shape[0], shape[1]) } else { (1, elements) };
        let (along, steps) = (MatrixAxis::Columns, [1, columns / 2]);
        let packed = PackedWeight {
            codes: QuantizedValues { part: codes, bits_log2: 2, places: HALVES, along, steps, values },
            zeros: None,
            scales: GroupScales { part: scales, rows: 1, steps: [0, columns / block, 1], nested },
            global: None,
            groups: ColumnGroups::Runs(block),
            rows,
            columns,
            transposed: false,
        };
        Ok(WeightDescription { kind: PackedKind::Nf4, name, shape: shape.to_vec(), packed })
    }

    /// The JSON text beside a weight.
    fn read_quant_state(&mut self, codes: &ComponentTensor) -> Result<QuantState, CheckpointError> {
        let names = ["nf4", "fp4"].map(|kind| format!("{}.quant_state.bitsandbytes__{kind}", codes.name));
        let mut found = None;
        for name in &names {
            found = self.take_optional(name)?.or(found);
        }
        let part = found.ok_or_else(|| self.missing_error(codes, &names[0]))?;
        let wrong = |detail: &str| {
            part.damaged_error(self.files, format!("is not a description of a quantized weight: {detail}"))
        };
        let described: Value =
            serde_json::from_slice(part.bytes(self.files)).map_err(|error| wrong(&error.to_string()))?;
        // Larger than any, and small enough that no product of them is out of range.
        let small = |value: &Value| {
            value.as_u64().filter(|size| (1..1 << 20).contains(size)).map(|size| size as usize)
        };
        let size = |field: &str| described.get(field).and_then(small);
        let shape = described.get("shape").and_then(Value::as_array);
        let shape: Option<Vec<usize>> = shape.and_then(|sizes| sizes.iter().map(small).collect());
        let shape = shape.and_then(|shape| <[usize; 2]>::try_from(shape).ok());
        let (Some(block), Some(shape)) = (size("blocksize"), shape) else {
            return Err(wrong("it needs `blocksize` and the `shape` of a matrix"));
        };
        let offset = described.get("nested_offset").and_then(Value::as_f64).unwrap_or(0.0) as f32;
        Ok(QuantState { block, shape, nested_block: size("nested_blocksize"), offset })
    }

    /// A table of values of codes.
    fn read_code_map(&self, map: &ComponentTensor, count: usize) -> Result<Vec<f32>, CheckpointError> {
        self.check_component(map, &[StoredType::F32], &[count])?;
        Ok((0..count).filter_map(|code| read_number(map, self.files, code)).collect())
    }
}
