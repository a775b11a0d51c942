//! What a storage format needs to hold the codes of a packed weight as they are.

use super::numbers::{E2M1, decode_e4m3, decode_table};
use super::scales::read_integers;
use super::{ColumnGroups, FileBytes, PackedWeight, QuantizedValues, StoredType};
use half::{bf16, f16};

/// What codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredCodes {
    Whole,
    /// Floats of 4 bits.
    E2M1,
    /// Floats of 8 bits with 4 of exponent.
    E4M3,
}

/// A weight of codes with a scale for each group of neighbours of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredGroups {
    pub codes: StoredCodes,
    /// The weight is read as the transpose, of which columns have the groups.
    pub transposed: bool,
    /// Of a code: 2, 4 or 8.
    pub bits: usize,
    /// Weights of a group; a multiple of 128 where that is a whole row, which may be cut in any way.
    pub columns: usize,
    /// Groups have zero points that are not in the middle of the codes.
    pub zeros: bool,
    /// An f16 holds every scale.
    pub f16: bool,
    /// A bf16 holds every scale.
    pub bf16: bool,
}

impl StoredGroups {
    /// What holds this weight and another one: both may be rows of one matrix. `None` if nothing does.
    pub fn combine(self, other: StoredGroups) -> Option<StoredGroups> {
        let alike = self.codes == other.codes && self.transposed == other.transposed;
        alike.then(|| StoredGroups {
            codes: self.codes,
            transposed: self.transposed,
            bits: self.bits.max(other.bits),
            columns: common_divisor(self.columns, other.columns),
            zeros: self.zeros || other.zeros,
            f16: self.f16 && other.f16,
            bf16: self.bf16 && other.bf16,
        })
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

impl PackedWeight {
    /// `None` for other codes, scales that are made of others, and groups that are no neighbours.
    /// `sorted`: with columns in the order of their groups.
    pub(in super::super) fn stored_groups(&self, files: &[FileBytes], sorted: bool) -> Option<StoredGroups> {
        let codes = stored_codes(&self.codes.values)?;
        if self.global.is_some() || self.scales.nested.is_some() {
            return None;
        }
        let columns = match &self.groups {
            ColumnGroups::Runs(columns) => *columns,
            ColumnGroups::Listed { part, count } => {
                let columns = self.columns.div_ceil((*count).max(1));
                let numbers = read_integers(part, files);
                let unset = numbers.iter().all(|&number| number == -1);
                let in_order = unset || is_in_order(&numbers, columns);
                (in_order || sorted && self.column_order(files).is_some()).then_some(columns)?
            }
        };
        let columns =
            if columns < self.columns || self.transposed { columns } else { columns.next_multiple_of(128) };
        let (f16, bf16) = self.scales_fit_types(files);
        let zeros = self.zeros.as_ref().is_some_and(|zeros| !zeros.zeros_are_midpoints(files, self.rows));
        Some(StoredGroups {
            codes,
            transposed: self.transposed,
            bits: 1 << self.codes.bits_log2,
            columns,
            zeros,
            f16,
            bf16,
        })
    }

    /// Columns by group, those of a group in their order. `None` if they lie so, or groups have not equally many.
    pub(in super::super) fn column_order(&self, files: &[FileBytes]) -> Option<Vec<usize>> {
        let ColumnGroups::Listed { part, count } = &self.groups else { return None };
        let columns = self.columns.div_ceil((*count).max(1));
        let numbers = read_integers(part, files);
        let mut order: Vec<usize> = (0..numbers.len()).collect();
        order.sort_by_key(|&column| numbers[column]);
        let sorted: Vec<i64> = order.iter().map(|&column| numbers[column]).collect();
        (is_in_order(&sorted, columns) && !is_in_order(&numbers, columns)).then_some(order)
    }

    /// Whether all scales are numbers of f16, and of bf16.
    fn scales_fit_types(&self, files: &[FileBytes]) -> (bool, bool) {
        let part = &self.scales.part;
        let bytes = part.bytes(files);
        match part.dtype {
            StoredType::F16 => {
                let fits = |raw: &[u8; 2]| fits_bf16(f16::from_le_bytes(*raw).to_f32());
                (true, bytes.as_chunks::<2>().0.iter().all(fits))
            }
            StoredType::BF16 => {
                let fits = |raw: &[u8; 2]| fits_f16(bf16::from_le_bytes(*raw).to_f32());
                (bytes.as_chunks::<2>().0.iter().all(fits), true)
            }
            StoredType::F32 => {
                let scales = || bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw));
                (scales().all(fits_f16), scales().all(fits_bf16))
            }
            // Powers of two, which may be larger or smaller than those of f16.
            StoredType::F8E8M0 => (false, true),
            _ => (false, false),
        }
    }
}

fn stored_codes(values: &[f32]) -> Option<StoredCodes> {
    // Unsigned numbers, or signed ones of two's complement.
    let whole = values.windows(2).all(|pair| pair[1] - pair[0] == 1.0 || pair[1] == -128.0);
    let same = |(a, b): (&f32, f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    match () {
        () if whole => Some(StoredCodes::Whole),
        () if values == E2M1 => Some(StoredCodes::E2M1),
        () if values.len() == 256 && values.iter().zip(decode_table(decode_e4m3)).all(same) => {
            Some(StoredCodes::E4M3)
        }
        () => None,
    }
}

/// Whether so many neighbours are a group each.
fn is_in_order(groups: &[i64], columns: usize) -> bool {
    (0..).zip(groups).all(|(column, &group)| group == (column / columns) as i64)
}

fn fits_f16(scale: f32) -> bool {
    f16::from_f32(scale).to_f32() == scale
}

fn fits_bf16(scale: f32) -> bool {
    bf16::from_f32(scale).to_f32() == scale
}

impl QuantizedValues {
    /// Whether every number, of so many rows, stands for the half of what its bits have room for: 8 of 4 bits, or 0 of signed
    /// numbers.
    fn zeros_are_midpoints(&self, files: &[FileBytes], rows: usize) -> bool {
        let bits = 1 << self.bits_log2;
        let signed = self.values.iter().any(|&value| value < 0.0);
        let middle = if signed { 0.0 } else { (1u32 << (bits - 1)) as f32 };
        let Some(code) = self.values.iter().position(|&value| value == middle) else { return false };
        // The last word of a column has numbers of no row where rows are no whole words: those may be any.
        let whole = rows.is_multiple_of(8 * self.part.dtype.size() / bits);
        let byte = (0..8 / bits).fold(0, |byte, at| byte | code << (at * bits)) as u8;
        whole && self.part.bytes(files).iter().all(|&stored| stored == byte)
    }
}
