//! A tensor as the model wants it, made from one that is stored in another order: rows picked and permuted, a constant
//! added, or transposed. Rows are read one by one; a block format is decoded row by row.

use super::super::bytes::FileBytes;
use super::super::stored_type::{StoredType, to_floats};
use super::RawTensor;
use super::blocks::dequantize;

#[derive(Clone, Debug, PartialEq)]
pub struct GgufView {
    pub file: usize,
    /// First byte of the stored tensor.
    pub start: usize,
    pub dtype: StoredType,
    /// Elements of a stored row.
    pub row: usize,
    /// Stored rows.
    pub rows: usize,
    /// The stored row of each row; `None`: in order.
    pub order: Option<Vec<u32>>,
    /// The stored column of each column; `None`: in order.
    pub columns: Option<Vec<u32>>,
    /// The first stored row, where `order` is `None`.
    pub first: usize,
    /// Every element is multiplied by it, a power of two.
    pub scale: f32,
    /// Added to every element.
    pub add: f32,
    /// Every element is `-exp(x)` of what the checkpoint has.
    pub log: bool,
    /// Columns of the stored tensor are rows here: of each matrix of that many rows.
    pub transpose: Option<usize>,
}

impl GgufView {
    pub fn of_tensor(raw: &RawTensor) -> GgufView {
        let row = match raw.shape.as_slice() {
            [_] | [] => 1,
            [.., row] => *row,
        };
        // A vector of a block format has its blocks along its one dimension.
        let row = if raw.dtype.is_block() { raw.shape.last().copied().unwrap_or(1) } else { row };
        let rows = raw.elements().checked_div(row).unwrap_or(0);
        GgufView {
            file: raw.file,
            start: raw.start,
            dtype: raw.dtype,
            row,
            rows,
            order: None,
            columns: None,
            first: 0,
            scale: 1.0,
            add: 0.0,
            log: false,
            transpose: None,
        }
    }

    fn row_bytes(&self) -> usize {
        self.dtype.checked_bytes(self.row, self.row).unwrap_or(0)
    }

    /// Bytes of the whole stored tensor.
    pub fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    fn stored_row<'a>(&self, file: &'a FileBytes, row: usize) -> &'a [u8] {
        let stored = match &self.order {
            Some(order) => order[row] as usize,
            None => self.first + row,
        };
        file.slice(self.start + stored * self.row_bytes(), self.row_bytes())
    }

    /// Blocks of row `row` as they are stored; `None` where the view changes values or is of no block format.
    pub fn row_blocks<'a>(&self, file: &'a FileBytes, row: usize) -> Option<&'a [u8]> {
        let unchanged = self.dtype.is_block()
            && self.add == 0.0
            && self.scale == 1.0
            && !self.log
            && self.columns.is_none()
            && self.transpose.is_none();
        unchanged.then(|| self.stored_row(file, row))
    }

    /// Elements `start ..` in row-major order. Not for transposed views.
    pub fn read(&self, file: &FileBytes, start: usize, out: &mut [f32]) {
        if self.row == 0 {
            return;
        }
        let mut scratch = Vec::new();
        let (mut row, mut column, mut done) = (start / self.row, start % self.row, 0);
        while done < out.len() {
            let count = (self.row - column).min(out.len() - done);
            let bytes = self.stored_row(file, row);
            let values = &mut out[done..done + count];
            match (self.dtype.is_block(), count == self.row) {
                _ if self.columns.is_some() => {
                    scratch.resize(self.row, 0.0);
                    match self.dtype.is_block() {
                        true => dequantize(self.dtype, bytes, &mut scratch),
                        false => to_floats(self.dtype, bytes, &mut scratch),
                    }
                    let order = self.columns.iter().flatten().skip(column);
                    values.iter_mut().zip(order).for_each(|(value, &from)| *value = scratch[from as usize]);
                }
                (true, true) => dequantize(self.dtype, bytes, values),
                (true, false) => {
                    scratch.resize(self.row, 0.0);
                    dequantize(self.dtype, bytes, &mut scratch);
                    values.copy_from_slice(&scratch[column..column + count]);
                }
                (false, _) => {
                    let size = self.dtype.size();
                    to_floats(self.dtype, &bytes[column * size..(column + count) * size], values);
                }
            }
            if self.scale != 1.0 {
                values.iter_mut().for_each(|value| *value *= self.scale);
            }
            if self.add != 0.0 {
                values.iter_mut().for_each(|value| *value += self.add);
            }
            if self.log {
                values.iter_mut().for_each(|value| *value = (-f64::from(*value)).ln() as f32);
            }
            done += count;
            (row, column) = (row + 1, 0);
        }
    }

    /// The whole of a transposed view: `[columns, rows]` of each stored matrix, row-major.
    pub fn read_transposed(&self, file: &FileBytes) -> Vec<f32> {
        let rows = self.transpose.unwrap_or(self.rows).max(1);
        let mut stored = vec![0.0; self.rows * self.row];
        GgufView { transpose: None, ..self.clone() }.read(file, 0, &mut stored);
        let mut values = vec![0.0; stored.len()];
        let matrices = stored.chunks_exact((rows * self.row).max(1));
        for (stored, values) in matrices.zip(values.chunks_exact_mut((rows * self.row).max(1))) {
            for (r, row) in stored.chunks_exact(self.row.max(1)).enumerate() {
                for (c, &value) in row.iter().enumerate() {
                    values[c * rows + r] = value;
                }
            }
        }
        values
    }
}
