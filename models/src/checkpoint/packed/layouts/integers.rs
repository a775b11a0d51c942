//! Integers of 2, 4 and 8 bits in words of 32: AWQ, GPTQ, and the `pack-quantized` of compressed-tensors.

use super::{
    CheckpointError, ColumnGroups, ComponentTensor, GroupScales, MatrixAxis, PackedKind, PackedWeight,
    PackedWeightFinder, QuantMethod, QuantizedValues, StoredType, TensorInfo, WeightDescription, numbers,
};

/// Where AWQ has the eight columns of a word.
const AWQ_PLACES: &[u8] = &[0, 4, 1, 5, 2, 6, 3, 7];

/// Bits of a word.
const WORD: usize = 32;

const WORDS: &[StoredType] = &[StoredType::I32, StoredType::U32];
const LISTS: &[StoredType] = &[StoredType::I32, StoredType::I64];

impl<'a> PackedWeightFinder<'a> {
    /// `qweight`, `qzeros`, `scales`, and `g_idx` of GPTQ. The matrix `[inputs, outputs]` is stored: our columns are its
    /// rows.
    pub(super) fn integer_weight(
        &mut self,
        info: &'a TensorInfo,
        module: &str,
    ) -> Result<WeightDescription, CheckpointError> {
        let codes = self.component(info)?;
        let zeros = self.take_required(&codes, &format!("{module}.qzeros"))?;
        let scales = self.take_required(&codes, &format!("{module}.scales"))?;
        let list = self.take_optional(&format!("{module}.g_idx"))?;
        let (&[lines, words], &[groups, rows]) = (codes.shape.as_slice(), scales.shape.as_slice()) else {
            let (found, beside) = (&codes.shape, &scales.shape);
            let detail =
                format!("has shape {found:?} and `{}` {beside:?}, expected two matrices", scales.name);
            return Err(codes.damaged_error(self.files, detail));
        };
        let awq = self.quantization.method == QuantMethod::Awq;
        let Some(bits) = (if awq { Some(4) } else { self.infer_bits(&zeros, rows) }) else {
            let detail = format!(
                "has shape {:?}, which holds no codes of 2, 4 or 8 bits for {rows} rows",
                zeros.shape
            );
            return Err(zeros.damaged_error(self.files, detail));
        };
        let per_word = WORD / bits;
        let (columns, stored_words) = match awq {
            true => (lines, rows.div_ceil(per_word)),
            false => (lines * per_word, rows),
        };
        self.check_component(&codes, WORDS, &[lines, stored_words])?;
        self.check_component(&zeros, WORDS, &[groups, rows.div_ceil(per_word)])?;
        self.check_component(
            &scales,
            &[StoredType::F16, StoredType::BF16, StoredType::F32],
            &[groups, rows],
        )?;
        let size = self.group_size(&scales, groups, columns)?;
        let groups = match list.filter(|_| !awq) {
            None => ColumnGroups::Runs(size),
            Some(part) => {
                self.check_component(&part, LISTS, &[columns])?;
                ColumnGroups::Listed { part, count: groups }
            }
        };
        let (places, along, steps) = match awq {
            true => (AWQ_PLACES, MatrixAxis::Rows, [1, words]),
            false => (&[][..], MatrixAxis::Columns, [words, 1]),
        };
        let bits_log2 = bits.trailing_zeros();
        let values = numbers::unsigned_values(bits_log2, 0);
        let zeros = QuantizedValues {
            part: zeros,
            bits_log2,
            places,
            along: MatrixAxis::Rows,
            steps: [1, rows.div_ceil(per_word)],
            values: match self.quantization.method {
                // The largest one stands for 0: it became -1.
                QuantMethod::Gptq { stored_minus_one: true } => {
                    (0..values.len()).map(|stored| ((stored + 1) % values.len()) as f32).collect()
                }
                _ => values.clone(),
            },
        };
        let packed = PackedWeight {
            codes: QuantizedValues { part: codes, bits_log2, places, along, steps, values },
            zeros: Some(zeros),
            scales: GroupScales { part: scales, rows: 1, steps: [0, 1, rows], nested: None },
            global: None,
            groups,
            rows,
            columns,
            transposed: false,
        };
        let kind = if awq { PackedKind::Awq } else { PackedKind::Gptq };
        Ok(WeightDescription { kind, name: format!("{module}.weight"), shape: vec![rows, columns], packed })
    }

    /// Bits of a code, by the words that hold the zero points of so many rows: as stated if that fits.
    fn infer_bits(&self, zeros: &ComponentTensor, rows: usize) -> Option<usize> {
        let words = *zeros.shape.get(1)?;
        let stated = self.quantization.bits.filter(|bits| [2, 4, 8].contains(bits));
        stated.into_iter().chain([2, 4, 8]).find(|bits| rows.div_ceil(WORD / bits) == words)
    }

    /// Columns that share a scale: as stated, if that many groups are there, else equal parts.
    fn group_size(
        &self,
        scales: &ComponentTensor,
        groups: usize,
        columns: usize,
    ) -> Result<usize, CheckpointError> {
        let stated = self.quantization.blocks.iter().map(|block| block[1]);
        let mut fitting = stated.filter(|&size| groups > 0 && columns.div_ceil(size) == groups);
        let equal = || columns.checked_div(groups).filter(|&size| size > 0 && size * groups == columns);
        fitting.next().or_else(equal).ok_or_else(|| {
            let detail = format!(
                "has scales of {groups} groups, which do not fit the {columns} columns of the weight"
            );
            scales.damaged_error(self.files, detail)
        })
    }

    /// `weight_packed`, `weight_scale`, `weight_shape`, `weight_zero_point` and `weight_g_idx`.
    pub(super) fn packed_integers(
        &mut self,
        info: &'a TensorInfo,
        module: &str,
    ) -> Result<WeightDescription, CheckpointError> {
        let codes = self.component(info)?;
        let scales = self.take_required(&codes, &format!("{module}.weight_scale"))?;
        let stated = self.take_required(&codes, &format!("{module}.weight_shape"))?;
        let zeros = self.take_optional(&format!("{module}.weight_zero_point"))?;
        let list = self.take_optional(&format!("{module}.weight_g_idx"))?;
        let (matrices, rows, columns) = self.stated_shape(&stated)?;
        let (lines, words) = match *codes.shape.as_slice() {
            [lines, words] => (lines, words),
            [count, lines, words] => (count * lines, words),
            _ => (0, 0),
        };
        let bits = [2, 4, 8].into_iter().find(|bits| columns.div_ceil(WORD / bits) == words);
        let Some(bits) = bits.filter(|_| lines == matrices * rows) else {
            let (found, name) = (&codes.shape, &stated.name);
            let detail = format!(
                "has shape {found:?}, which holds no codes of 2, 4 or 8 bits for a weight of the shape in `{name}`, \
                 [{rows}, {columns}]"
            );
            return Err(codes.damaged_error(self.files, detail));
        };
        if zeros.is_none() && self.quantization.zero_points == Some(true) {
            return Err(self.missing_error(&codes, &format!("{module}.weight_zero_point")));
        }
        let bits_log2 = bits.trailing_zeros();
        let values = numbers::unsigned_values(bits_log2, 1 << (bits - 1));
        let (scales, mut groups) = self.block_scales(scales, matrices, rows, columns)?;
        let zeros = match zeros {
            None => None,
            Some(part) => Some(self.packed_zeros(part, &scales, (matrices, rows), (bits_log2, &values))?),
        };
        if let Some(part) = list {
            self.check_component(&part, LISTS, &[columns])?;
            groups = ColumnGroups::Listed { part, count: scales.steps[1] };
        }
        let along = MatrixAxis::Columns;
        let packed = PackedWeight {
            codes: QuantizedValues { part: codes, bits_log2, places: &[], along, steps: [1, words], values },
            zeros,
            scales,
            global: None,
            groups,
            rows,
            columns,
            transposed: false,
        };
        let kind = if bits == 8 { PackedKind::Int8 } else { PackedKind::Int4 };
        let shape = if matrices == 1 { vec![rows, columns] } else { vec![matrices, rows, columns] };
        Ok(WeightDescription { kind, name: format!("{module}.weight"), shape, packed })
    }

    /// Zero points of each scale, packed along the rows; or one to a byte.
    fn packed_zeros(
        &self,
        part: ComponentTensor,
        scales: &GroupScales,
        (matrices, rows): (usize, usize),
        (bits_log2, values): (u32, &[f32]),
    ) -> Result<QuantizedValues, CheckpointError> {
        let groups = scales.steps[1];
        if matrices != 1 || scales.rows != 1 {
            let detail = "zero points are read only of matrices that have scales for each row".into();
            return Err(part.damaged_error(self.files, detail));
        }
        if part.dtype == StoredType::I8 {
            self.check_component(&part, &[StoredType::I8], &[rows, groups])?;
            return Ok(super::byte_values(part, groups, numbers::decode_table(numbers::decode_signed)));
        }
        let per_word = WORD >> bits_log2;
        self.check_component(&part, WORDS, &[rows.div_ceil(per_word), groups])?;
        let (along, values) = (MatrixAxis::Rows, values.to_vec());
        Ok(QuantizedValues { part, bits_log2, places: &[], along, steps: [groups, 1], values })
    }

    /// The numbers in `weight_shape`.
    fn stated_shape(&self, part: &ComponentTensor) -> Result<(usize, usize, usize), CheckpointError> {
        let numbers = super::super::scales::read_integers(part, self.files);
        // Larger than any, and small enough that no product of them is out of range.
        let size = |number: &i64| usize::try_from(*number).ok().filter(|size| (1..1 << 20).contains(size));
        let sizes: Option<Vec<usize>> = numbers.iter().map(size).collect();
        match sizes.as_deref() {
            Some(&[rows, columns]) => Ok((1, rows, columns)),
            Some(&[matrices, rows, columns]) => Ok((matrices, rows, columns)),
            _ => Err(part.damaged_error(
                self.files,
                format!("should hold the shape of a weight, it holds {numbers:?}"),
            )),
        }
    }
}
