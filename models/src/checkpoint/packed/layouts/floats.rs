//! Floats of 8 and 4 bits, and integers of 8, under the weight's own name or packed.

use super::{
    CheckpointError, ColumnGroups, ComponentTensor, GroupScales, MatrixAxis, PackedKind, PackedWeight,
    PackedWeightFinder, QuantMethod, QuantizedValues, StoredType, TensorInfo, WeightDescription, byte_values,
    numbers,
};

/// Weights that share an exponent (OCP microscaling).
const MX_GROUP: usize = 32;

/// Codes of 4-bit floats, two to a byte, the lower half first.
fn fp4_values(part: ComponentTensor, columns: usize) -> QuantizedValues {
    let values = numbers::E2M1.to_vec();
    QuantizedValues {
        part,
        bits_log2: 2,
        places: &[],
        along: MatrixAxis::Columns,
        steps: [1, columns / 2],
        values,
    }
}

impl<'a> PackedWeightFinder<'a> {
    /// gpt-oss: `blocks [experts, rows, groups, 16]` and `scales [experts, rows, groups]`; the weight is
    /// `[experts, columns, rows]`.
    pub(super) fn mxfp4_experts(
        &mut self,
        info: &'a TensorInfo,
        base: &str,
    ) -> Result<WeightDescription, CheckpointError> {
        let codes = self.component(info)?;
        let scales = self.take_required(&codes, &format!("{base}_scales"))?;
        let &[experts, rows, groups, _] = codes.shape.as_slice() else {
            let detail =
                format!("has shape {:?}, expected [experts, rows, groups, {}]", codes.shape, MX_GROUP / 2);
            return Err(codes.damaged_error(self.files, detail));
        };
        self.check_component(&codes, &[StoredType::U8], &[experts, rows, groups, MX_GROUP / 2])?;
        self.check_component(&scales, &[StoredType::U8, StoredType::F8E8M0], &[experts, rows, groups])?;
        let columns = groups * MX_GROUP;
        let steps = [rows * groups, groups, 1];
        let packed = PackedWeight {
            codes: fp4_values(codes, columns),
            zeros: None,
            scales: GroupScales { part: as_exponents(scales), rows: 1, steps, nested: None },
            global: None,
            groups: ColumnGroups::Runs(MX_GROUP),
            rows,
            columns,
            transposed: true,
        };
        let shape = vec![experts, columns, rows];
        Ok(WeightDescription { kind: PackedKind::Mxfp4, name: base.to_string(), shape, packed })
    }

    /// `weight_packed` of 4-bit floats: NVFP4 with a global scale, MXFP4 with exponents.
    pub(super) fn packed_floats(
        &mut self,
        info: &'a TensorInfo,
        module: &str,
    ) -> Result<WeightDescription, CheckpointError> {
        let codes = self.component(info)?;
        let scales = self.take_required(&codes, &format!("{module}.weight_scale"))?;
        let global = match scales.dtype {
            StoredType::U8 | StoredType::F8E8M0 => None,
            _ => Some(self.take_required(&codes, &format!("{module}.weight_global_scale"))?),
        };
        self.fp4_weight(codes, scales, global.map(|part| (part, true)), format!("{module}.weight"))
    }

    /// A tensor under the weight's own name with `_scale_inv` or `_scale` beside it: FP8 and INT8, and NVFP4 of ModelOpt.
    pub(super) fn floats_or_bytes(
        &mut self,
        info: &'a TensorInfo,
    ) -> Result<Option<WeightDescription>, CheckpointError> {
        let name = info.stored_name.as_str();
        let float = matches!(info.dtype, StoredType::F8E4M3 | StoredType::F8E5M2);
        let is_part =
            ["_scale", "_scale_inv", "_zero_point", "_scale_2"].iter().any(|end| name.ends_with(end));
        if is_part || (!float && !name.ends_with("weight")) {
            return Ok(None);
        }
        let codes = self.component(info)?;
        let scales = match self.take_optional(&format!("{name}_scale_inv"))? {
            Some(scales) => scales,
            None => {
                let end = if self.quantization.method == QuantMethod::Fp8 { "_scale_inv" } else { "_scale" };
                match self.take_optional(&format!("{name}_scale"))? {
                    Some(scales) => scales,
                    None => return Err(self.missing_error(&codes, &format!("{name}{end}"))),
                }
            }
        };
        if info.dtype == StoredType::U8 {
            let global = self.take_required(&codes, &format!("{name}_scale_2"))?;
            return self.fp4_weight(codes, scales, Some((global, false)), name.to_string()).map(Some);
        }
        let zeros = if float { None } else { self.take_optional(&format!("{name}_zero_point"))? };
        self.fp8_weight(codes, scales, zeros).map(Some)
    }

    fn fp8_weight(
        &mut self,
        codes: ComponentTensor,
        scales: ComponentTensor,
        zeros: Option<ComponentTensor>,
    ) -> Result<WeightDescription, CheckpointError> {
        let (name, shape) = (codes.name.clone(), codes.shape.clone());
        let (matrices, rows, columns) = self.matrices(&codes)?;
        let (scales, groups) = self.block_scales(as_exponents(scales), matrices, rows, columns)?;
        let zeros = match zeros {
            None => None,
            Some(zeros) => {
                let lines = (rows * matrices).div_ceil(scales.rows);
                let expected =
                    if zeros.elements() == 1 { zeros.shape.clone() } else { vec![lines, scales.steps[1]] };
                self.check_component(&zeros, &[StoredType::I8], &expected)?;
                // One for all, or for each scale of rows of their own.
                let step = if zeros.elements() == 1 { 0 } else { scales.steps[1] };
                Some(QuantizedValues {
                    steps: [usize::from(step > 0), step],
                    ..byte_values(zeros, step, numbers::decode_table(numbers::decode_signed))
                })
            }
        };
        let (values, kind) = match codes.dtype {
            StoredType::F8E4M3 => (numbers::decode_table(numbers::decode_e4m3), PackedKind::Fp8),
            StoredType::F8E5M2 => (numbers::decode_table(numbers::decode_e5m2), PackedKind::Fp8),
            _ => (numbers::decode_table(numbers::decode_signed), PackedKind::Int8),
        };
        let codes = byte_values(codes, columns, values);
        let packed =
            PackedWeight { codes, zeros, scales, global: None, groups, rows, columns, transposed: false };
        Ok(WeightDescription { kind, name, shape, packed })
    }

    /// `global` is a factor of all scales, and whether it divides them.
    fn fp4_weight(
        &mut self,
        codes: ComponentTensor,
        scales: ComponentTensor,
        global: Option<(ComponentTensor, bool)>,
        name: String,
    ) -> Result<WeightDescription, CheckpointError> {
        let kind = if global.is_some() { PackedKind::Nvfp4 } else { PackedKind::Mxfp4 };
        let (matrices, rows, half) = self.matrices(&codes)?;
        let columns = 2 * half;
        let global = global.map(|(part, divides)| self.global_scale(&part, divides)).transpose()?;
        let mut shape = codes.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = columns;
        }
        let (scales, groups) = self.block_scales(as_exponents(scales), matrices, rows, columns)?;
        let codes = fp4_values(codes, columns);
        let packed =
            PackedWeight { codes, zeros: None, scales, global, groups, rows, columns, transposed: false };
        Ok(WeightDescription { kind, name, shape, packed })
    }

    /// Matrices, rows and columns of a part of two axes, or of three.
    fn matrices(&self, part: &ComponentTensor) -> Result<(usize, usize, usize), CheckpointError> {
        match part.shape.as_slice() {
            &[rows, columns] => Ok((1, rows, columns)),
            &[matrices, rows, columns] => Ok((matrices, rows, columns)),
            shape => {
                let detail = format!("is quantized and has shape {shape:?}, expected a matrix");
                Err(part.damaged_error(self.files, detail))
            }
        }
    }
}

/// Scales of 8 unsigned bits are exponents.
fn as_exponents(part: ComponentTensor) -> ComponentTensor {
    match part.dtype {
        StoredType::U8 => ComponentTensor { dtype: StoredType::F8E8M0, ..part },
        _ => part,
    }
}
