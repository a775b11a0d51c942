//! Packed weights as floats.

use super::scales::read_integers;
use super::{ColumnGroups, ComponentTensor, FileBytes, MatrixAxis, PackedWeight, QuantizedValues};
use crate::error::CheckpointError;
use std::cell::RefCell;

/// A packed weight that was opened: what has to be known of all of it is checked.
#[derive(Debug)]
pub struct PackedReader<'a> {
    files: &'a [FileBytes],
    packed: &'a PackedWeight,
    /// The group of each column, where it is listed.
    listed: Option<Vec<u32>>,
    /// Zero point and scale of the groups of the row that is being read.
    row: RefCell<Vec<(f32, f32)>>,
}

impl Drop for PackedReader<'_> {
    fn drop(&mut self) {
        for part in self.packed.components() {
            self.files[part.file].release_pages(part.start, part.elements() * part.dtype.size());
        }
    }
}

impl QuantizedValues {
    /// Number (row, column), at most 255. What lies outside of the tensor is 0; shapes were compared before.
    fn code(&self, bytes: &[u8], row: usize, column: usize) -> u8 {
        let (packed, other) = match self.along {
            MatrixAxis::Rows => (row, column),
            MatrixAxis::Columns => (column, row),
        };
        let size = self.part.dtype.size();
        // log2 of the numbers in a word.
        let count = (8 * size).trailing_zeros() - self.bits_log2;
        let word = (packed >> count) * self.steps[0] + other * self.steps[1];
        let lane = packed & ((1 << count) - 1);
        let lane = self.places.get(lane).map_or(lane, |&place| usize::from(place));
        let bit = lane << self.bits_log2;
        let byte = bytes.get(word * size + bit / 8).copied().unwrap_or(0);
        byte >> (bit % 8) & (u8::MAX >> (8 - (1u32 << self.bits_log2)))
    }

    fn value(&self, bytes: &[u8], row: usize, column: usize) -> f32 {
        self.values[usize::from(self.code(bytes, row, column))]
    }

    /// Values of columns `from ..` of a row.
    fn fill(
        &self,
        files: &[FileBytes],
        row: usize,
        from: usize,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let bytes = self.part.bytes(files);
        for (column, value) in (from..).zip(out.iter_mut()) {
            *value = self.value(bytes, row, column);
        }
        match out.iter().position(|value| value.is_nan()) {
            None => Ok(()),
            Some(at) => {
                let (column, code) = (from + at, self.code(bytes, row, from + at));
                let detail = format!(
                    "holds {code:#04x} at [{row}, {column}], which encodes no number; the checkpoint is broken"
                );
                Err(self.part.damaged_error(files, detail))
            }
        }
    }
}

impl<'a> PackedReader<'a> {
    pub fn new(
        files: &'a [FileBytes],
        packed: &'a PackedWeight,
    ) -> Result<PackedReader<'a>, CheckpointError> {
        let listed = match &packed.groups {
            ColumnGroups::Runs(_) => None,
            ColumnGroups::Listed { part, count } => listed_groups(files, part, *count)?,
        };
        Ok(PackedReader { files, packed, listed, row: RefCell::default() })
    }

    /// Elements `start ..` in row-major order; the range lies inside of the weight.
    pub fn read(&self, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let PackedWeight { rows, columns, transposed, .. } = *self.packed;
        let width = if transposed { rows } else { columns };
        let (mut row, mut column, mut rest) =
            (start.checked_div(width).unwrap_or(0), start % width.max(1), out);
        while !rest.is_empty() {
            // Whole rows of one matrix at a time where the weight is transposed, since each row takes something of all.
            let count = match transposed && column == 0 {
                true => (rest.len() / width).clamp(1, columns - row % columns) * width,
                false => width - column,
            };
            let (here, after) = rest.split_at_mut(count.min(rest.len()));
            match transposed {
                true => self.read_transposed(row, column, here)?,
                false => self.read_row(row / rows, row % rows, column, here)?,
            }
            (row, column, rest) = (row + count.div_ceil(width), 0, after);
        }
        Ok(())
    }

    /// Elements from (row, column) of the transpose on, of one matrix: whole rows, or a piece of one.
    fn read_transposed(&self, row: usize, column: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let PackedWeight { rows, columns, .. } = *self.packed;
        let (matrix, first) = (row / columns, row % columns);
        let (width, count) = (rows.min(out.len()), out.len().div_ceil(rows));
        let mut values = vec![0.0; count];
        for at in 0..width {
            self.read_row(matrix, column + at, first, &mut values)?;
            for (row, &value) in values.iter().enumerate() {
                out[row * rows + at] = value;
            }
        }
        Ok(())
    }

    /// Columns `from ..` of a row of a matrix.
    fn read_row(
        &self,
        matrix: usize,
        row: usize,
        from: usize,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let packed = self.packed;
        packed.codes.fill(self.files, matrix * packed.rows + row, from, out)?;
        let mut groups = self.row.borrow_mut();
        match (&self.listed, &packed.groups) {
            (Some(listed), ColumnGroups::Listed { count, .. }) => {
                self.column_groups(&mut groups, matrix, row, 0..*count)?;
                for (value, &group) in out.iter_mut().zip(&listed[from..]) {
                    let (zero, scale) = groups[group as usize];
                    *value = (*value - zero) * scale;
                }
            }
            (_, groups_kind) => {
                let size = match groups_kind {
                    ColumnGroups::Runs(size) => *size,
                    // A list of which nothing was filled in.
                    ColumnGroups::Listed { count, .. } => packed.columns.div_ceil(*count),
                };
                let first = from / size;
                self.column_groups(&mut groups, matrix, row, first..(from + out.len()).div_ceil(size))?;
                let mut column = from;
                let mut rest = out;
                for &(zero, scale) in groups.iter() {
                    let count = (size - column % size).min(rest.len());
                    let (here, after) = rest.split_at_mut(count);
                    here.iter_mut().for_each(|value| *value = (*value - zero) * scale);
                    (column, rest) = (column + count, after);
                }
            }
        }
        Ok(())
    }

    /// Zero points and scales of groups of a row.
    fn column_groups(
        &self,
        found: &mut Vec<(f32, f32)>,
        matrix: usize,
        row: usize,
        groups: std::ops::Range<usize>,
    ) -> Result<(), CheckpointError> {
        let PackedWeight { zeros, scales, global, rows, .. } = self.packed;
        found.clear();
        for group in groups {
            let scale = scales.read_scale(self.files, scales.scale_index(matrix, row, group))?;
            let scale = global.map_or(scale, |global| global.apply(scale));
            let zero = zeros
                .as_ref()
                .map_or(0.0, |zeros| zeros.value(zeros.part.bytes(self.files), matrix * rows + row, group));
            found.push((zero, scale));
        }
        Ok(())
    }
}

/// The group of each column; `None` for a list that was never filled in (-1).
fn listed_groups(
    files: &[FileBytes],
    part: &ComponentTensor,
    count: usize,
) -> Result<Option<Vec<u32>>, CheckpointError> {
    let numbers = read_integers(part, files);
    if numbers.iter().all(|&number| number == -1) {
        return Ok(None);
    }
    let group = |(column, number): (usize, &i64)| {
        let group = usize::try_from(*number).ok().filter(|group| *group < count);
        group.map(|group| group as u32).ok_or_else(|| {
            part.damaged_error(
                files,
                format!(
                    "puts column {column} into group {number}, there are {count}; the checkpoint is broken"
                ),
            )
        })
    };
    numbers.iter().enumerate().map(group).collect::<Result<_, _>>().map(Some)
}
