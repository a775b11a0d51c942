//! Streams rows of f32 weights into a packing. Only what the packing forces is held back: up to 15 rows of a
//! tile, the scales of row-major group formats, and the whole (packed) tensor for column-major order.

use crate::group::{GroupSpec, ScaleSearch};
use crate::layout::{LayoutRegion, TILE, TensorLayout};
use crate::packed;
use crate::plain::{self, PlainType};
use crate::{FragmentSizes, QuantError};
use mlcc_ir::types::{DType, Packing};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PackOptions {
    pub scale_search: ScaleSearch,
}

/// Packs one `[N, K]` tensor. Rows arrive in order through [`WeightPacker::push_rows`]; bytes leave in order
/// through `out`.
pub struct WeightPacker {
    dtype: DType,
    packing: Packing,
    n: usize,
    k: usize,
    options: PackOptions,
    layout: TensorLayout,
    rows_seen: usize,
    /// Sizes of tiles that come in fragments.
    fragments: Option<FragmentSizes>,
    /// Rows of the tile that is not complete.
    tile: Vec<f32>,
    /// Number of its first row.
    tile_row: usize,
    /// Per row whether a group format holds its weights as they came.
    exact: Vec<bool>,
    /// Codes that are being made.
    codes: Vec<u8>,
    /// Row-major scales, or the whole column-major tensor: written by `finish`.
    deferred: Vec<u8>,
    /// Row-major zeros, written after it.
    zeros: Vec<u8>,
}

impl WeightPacker {
    pub fn new(
        dtype: DType,
        packing: Packing,
        n: usize,
        k: usize,
        options: PackOptions,
    ) -> Result<WeightPacker, QuantError> {
        let layout = TensorLayout::new(dtype, packing, n, k)?;
        let held = match (packing, &layout.region) {
            (Packing::ColMajor, LayoutRegion::Plain { .. }) => vec![0; layout.bytes()],
            (Packing::ColMajor, LayoutRegion::Group { spec, .. }) => {
                let padding = packed::padding_word(*spec);
                padding.into_iter().cycle().take(layout.bytes()).collect()
            }
            (Packing::RowMajor | Packing::Tile16 | Packing::Fragments, _) => Vec::new(),
        };
        Ok(WeightPacker {
            dtype,
            packing,
            n,
            k,
            options,
            layout,
            fragments: match packing {
                Packing::Fragments => Some(FragmentSizes::new(dtype, n, k)?),
                Packing::RowMajor | Packing::ColMajor | Packing::Tile16 => None,
            },
            rows_seen: 0,
            tile: Vec::new(),
            tile_row: 0,
            exact: vec![true; n],
            codes: Vec::new(),
            deferred: held,
            zeros: Vec::new(),
        })
    }

    /// Takes the next rows (`[rows, K]`, any number) and appends the bytes that are complete.
    pub fn push_rows(&mut self, rows: &[f32], out: &mut Vec<u8>) -> Result<(), QuantError> {
        if self.k == 0 || !rows.len().is_multiple_of(self.k) {
            return match rows.is_empty() {
                true => Ok(()),
                false => Err(QuantError::PartialRow { k: self.k, found: rows.len() }),
            };
        }
        let count = rows.len() / self.k;
        if self.rows_seen + count > self.n {
            return Err(QuantError::RowCount { expected: self.n, found: self.rows_seen + count });
        }
        self.check_finite(rows)?;
        match self.packing {
            Packing::RowMajor => self.push_row_major(rows, out),
            Packing::ColMajor => self.push_col_major(rows),
            Packing::Tile16 | Packing::Fragments => self.push_tiles(rows, out),
        }
        self.rows_seen += count;
        Ok(())
    }

    /// Appends what was held back; all N rows must have been pushed (none are expected where K is 0). Returns
    /// for each row whether the values read back from a group format are those that were pushed, to the last
    /// bit: weights that were quantized before. Plain formats are not looked at.
    pub fn finish(mut self, out: &mut Vec<u8>) -> Result<Vec<bool>, QuantError> {
        if self.rows_seen != self.n && self.k != 0 {
            return Err(QuantError::RowCount { expected: self.n, found: self.rows_seen });
        }
        if !self.tile.is_empty() {
            let rows = std::mem::take(&mut self.tile);
            self.write_tile(&rows, out);
        }
        out.append(&mut self.deferred);
        out.append(&mut self.zeros);
        Ok(self.exact)
    }

    /// Group formats cannot hold infinities and NaN; plain ones keep them, but a checkpoint with them is
    /// broken.
    fn check_finite(&self, rows: &[f32]) -> Result<(), QuantError> {
        match rows.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(at) => Err(QuantError::NotFinite {
                dtype: self.dtype,
                row: self.rows_seen + at / self.k,
                column: at % self.k,
                value: rows[at],
            }),
        }
    }

    fn push_row_major(&mut self, rows: &[f32], out: &mut Vec<u8>) {
        match &self.layout.region {
            LayoutRegion::Plain { plain, .. } => write_plain(*plain, rows, out),
            LayoutRegion::Group { spec, .. } => {
                let codes = sized(&mut self.codes, spec.group);
                for (i, row) in rows.chunks_exact(self.k).enumerate() {
                    let exact = &mut self.exact[self.rows_seen + i];
                    for weights in row.chunks(spec.group) {
                        let grid = spec.quantize(weights, self.options.scale_search, codes);
                        *exact = *exact && spec.is_exact(grid, codes, weights);
                        packed::row_bytes(spec.format, codes, out);
                        spec.number_type().write(grid.scale, &mut self.deferred);
                        if spec.format.numbers_per_group() > 1 {
                            spec.number_type().write(grid.zero, &mut self.zeros);
                        }
                    }
                }
            }
        }
    }

    fn push_col_major(&mut self, rows: &[f32]) {
        for (i, row) in rows.chunks_exact(self.k).enumerate() {
            let row_index = self.rows_seen + i;
            match &self.layout.region {
                LayoutRegion::Plain { plain, place } => {
                    let mut bytes = Vec::with_capacity(4);
                    for (col, &value) in row.iter().enumerate() {
                        bytes.clear();
                        plain.write(value, &mut bytes);
                        let at = place.evaluate(row_index, col) * plain.bytes();
                        self.deferred[at..at + bytes.len()].copy_from_slice(&bytes);
                    }
                }
                LayoutRegion::Group { spec, codes: places, shift, scales, zeros } => {
                    let codes = sized(&mut self.codes, spec.group);
                    let exact = &mut self.exact[row_index];
                    for (g, weights) in row.chunks(spec.group).enumerate() {
                        let grid = spec.quantize(weights, self.options.scale_search, codes);
                        *exact = *exact && spec.is_exact(grid, codes, weights);
                        for (c, &code) in codes.iter().enumerate() {
                            let col = g * spec.group + c;
                            let at = places.evaluate(row_index, col);
                            let shift = shift.as_ref().map_or(0, |s| s.evaluate(row_index, col));
                            put(&mut self.deferred[at..], *spec, code, shift);
                        }
                        let numbers = [(Some(scales), grid.scale), (zeros.as_ref(), grid.zero)];
                        for (place, number) in numbers {
                            let Some(place) = place else { continue };
                            let mut bytes = Vec::with_capacity(4);
                            spec.number_type().write(number, &mut bytes);
                            let at = place.evaluate(row_index, g * spec.group);
                            self.deferred[at..at + bytes.len()].copy_from_slice(&bytes);
                        }
                    }
                }
            }
        }
    }

    fn push_tiles(&mut self, mut rows: &[f32], out: &mut Vec<u8>) {
        let full = TILE * self.k;
        if !self.tile.is_empty() {
            let take = rows.len().min(full - self.tile.len());
            self.tile.extend_from_slice(&rows[..take]);
            rows = &rows[take..];
            if self.tile.len() == full {
                let mut tile = std::mem::take(&mut self.tile);
                self.write_tile(&tile, out);
                tile.clear();
                self.tile = tile;
            }
        }
        let whole = rows.chunks_exact(full);
        let rest = whole.remainder();
        for tile in whole {
            self.write_tile(tile, out);
        }
        self.tile.extend_from_slice(rest);
    }

    /// Writes one tile of up to 16 rows; missing rows are zero.
    fn write_tile(&mut self, rows: &[f32], out: &mut Vec<u8>) {
        let first = self.tile_row;
        self.tile_row += TILE;
        match (&self.layout.region, self.fragments) {
            (LayoutRegion::Plain { plain, .. }, None) => plain::tile_bytes(*plain, self.k, rows, out),
            (LayoutRegion::Plain { plain, .. }, Some(fragments)) => fragments.write_plain(*plain, rows, out),
            (LayoutRegion::Group { spec, .. }, Some(fragments)) => {
                let columns = fragments.columns();
                let codes = sized(&mut self.codes, TILE * columns);
                let mut grids = vec![spec.zero_grid(); TILE * columns / spec.group];
                for start in (0..self.k).step_by(columns) {
                    let groups = grids.iter_mut().zip(codes.chunks_exact_mut(spec.group)).enumerate();
                    for (i, (grid, codes)) in groups {
                        let (row, group) = (i * spec.group / columns, i * spec.group % columns);
                        let weights = &rows[row * self.k + start + group..][..spec.group];
                        *grid = spec.quantize(weights, self.options.scale_search, codes);
                        let exact = &mut self.exact[first + row];
                        *exact = *exact && spec.is_exact(*grid, codes, weights);
                    }
                    fragments.write_group(*spec, &grids, codes, out);
                }
            }
            (LayoutRegion::Group { spec, .. }, None) => {
                let codes = sized(&mut self.codes, TILE * spec.group);
                for start in (0..self.k).step_by(spec.group) {
                    let end = self.k.min(start + spec.group);
                    let mut grids = [spec.zero_grid(); TILE];
                    codes.fill(spec.padding_code());
                    let groups = grids.iter_mut().zip(codes.chunks_exact_mut(spec.group));
                    for (i, ((grid, codes), row)) in groups.zip(rows.chunks_exact(self.k)).enumerate() {
                        let weights = &row[start..end];
                        *grid = spec.quantize(weights, self.options.scale_search, codes);
                        let exact = &mut self.exact[first + i];
                        *exact = *exact && spec.is_exact(*grid, codes, weights);
                    }
                    packed::tile_bytes(*spec, &grids, codes, out);
                }
            }
        }
    }
}

/// The same memory for every group.
fn sized(codes: &mut Vec<u8>, len: usize) -> &mut [u8] {
    codes.resize(len, 0);
    codes
}

/// Puts a code into its byte, or the bytes of its word.
fn put(bytes: &mut [u8], spec: GroupSpec, code: u8, shift: usize) {
    let (mask, code) = (spec.format.max_code() << shift, usize::from(code) << shift);
    let bits = shift + spec.format.bits;
    for (byte, at) in bytes.iter_mut().zip((0..bits).step_by(8)) {
        *byte = *byte & !(mask >> at) as u8 | (code >> at) as u8;
    }
}

fn write_plain(plain: PlainType, values: &[f32], out: &mut Vec<u8>) {
    out.reserve(values.len() * plain.bytes());
    values.iter().for_each(|&v| plain.write(v, out));
}

/// Packs a whole tensor given row by row.
pub fn pack(
    dtype: DType,
    packing: Packing,
    n: usize,
    k: usize,
    rows: &[f32],
    options: PackOptions,
) -> Result<Vec<u8>, QuantError> {
    let mut out = Vec::with_capacity(crate::packed_bytes(dtype, packing, n, k)?);
    let mut packer = WeightPacker::new(dtype, packing, n, k, options)?;
    packer.push_rows(rows, &mut out)?;
    let _ = packer.finish(&mut out)?;
    Ok(out)
}
