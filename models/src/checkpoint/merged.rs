//! Tensors that adapters change, as they are read: rows of the base, and on top what each adapter adds. Of an adapter the two
//! factors of one tensor are in memory, so a build that streams a checkpoint streams a merged one as well.

use super::{FiniteCheck, StoredType, TensorData, TensorInfo};
use crate::error::CheckpointError;

/// What an adapter does to a tensor. Tensors are those of the adapter's file.
#[derive(Clone, Debug, PartialEq)]
pub enum AdapterChange {
    /// The tensor takes the place of the base's.
    Replace(TensorInfo),
    Product(Box<LoraDelta>),
    /// `v + scale * term`.
    Sum {
        term: TensorInfo,
        scale: f32,
    },
}

/// `W + scale * b a`, of `a: [rank, columns]` and `b: [rows, rank]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraDelta {
    pub a: TensorInfo,
    pub b: TensorInfo,
    pub scale: f32,
    /// `a` and `b` are the transposes of that, in exchanged places: adapters of embeddings.
    pub transposed: bool,
    /// The length that each row gets afterwards (DoRA).
    pub magnitude: Option<TensorInfo>,
}

impl AdapterChange {
    /// The same with all files counted from `first` on.
    pub(super) fn offset_files(self, first: usize) -> AdapterChange {
        let moved = |info: TensorInfo| TensorInfo { storage: info.storage.offset_files(first), ..info };
        match self {
            AdapterChange::Replace(info) => AdapterChange::Replace(moved(info)),
            AdapterChange::Product(product) => {
                let LoraDelta { a, b, scale, transposed, magnitude } = *product;
                let magnitude = magnitude.map(moved);
                AdapterChange::Product(Box::new(LoraDelta {
                    a: moved(a),
                    b: moved(b),
                    scale,
                    transposed,
                    magnitude,
                }))
            }
            AdapterChange::Sum { term, scale } => AdapterChange::Sum { term: moved(term), scale },
        }
    }
}

/// A tensor of the base and its changes, in their order; none of them is [`AdapterChange::Replace`].
#[derive(Clone, Debug, PartialEq)]
pub struct MergedTensor {
    pub(super) base: TensorInfo,
    pub(super) changes: Vec<AdapterChange>,
}

/// The tensor that `info` becomes.
pub(super) fn apply_change(info: TensorInfo, change: AdapterChange) -> TensorInfo {
    let TensorInfo { name, stored_name, listed_name, dtype, shape, storage: place } = info;
    // Sums with a packed weight lie on no grid any more.
    let plain = |dtype: StoredType| if dtype.is_quantized() { StoredType::F16 } else { dtype };
    let (dtype, place) = match (change, place) {
        (AdapterChange::Replace(new), _) => {
            // Dimensions of size 1 are those of the base; rows may be more.
            let shape = if new.elements() == shape.iter().product::<usize>() { shape } else { new.shape };
            let (dtype, place) = (new.dtype, new.storage);
            return TensorInfo { name, stored_name, listed_name, dtype, shape, storage: place };
        }
        (change, super::TensorStorage::Merged(merged)) => {
            let MergedTensor { base, mut changes } = *merged;
            changes.push(change);
            (dtype, super::TensorStorage::Merged(Box::new(MergedTensor { base, changes })))
        }
        (change, place) => {
            let (stored_name, listed_name) = (stored_name.clone(), listed_name.clone());
            let (name, shape) = (name.clone(), shape.clone());
            let base = TensorInfo { name, stored_name, listed_name, dtype, shape, storage: place };
            let merged = MergedTensor { base, changes: vec![change] };
            (plain(dtype), super::TensorStorage::Merged(Box::new(merged)))
        }
    };
    TensorInfo { name, stored_name, listed_name, dtype, shape, storage: place }
}

/// A merged tensor that was opened.
#[derive(Debug)]
pub(super) struct MergedReader<'a> {
    base: Box<TensorData<'a>>,
    columns: usize,
    changes: Vec<LoadedChange>,
}

/// A change with its factors read.
#[derive(Debug)]
enum LoadedChange {
    /// `a: [rank, columns]`, `b: [rows, rank]`, scaled.
    Product {
        a: Vec<f32>,
        b: Vec<f32>,
        rank: usize,
        magnitude: Option<Vec<f32>>,
    },
    Sum(Vec<f32>),
}

impl<'a> MergedReader<'a> {
    /// `open` opens a tensor by its description.
    pub fn new(
        merged: &'a MergedTensor,
        open: impl Fn(&'a TensorInfo) -> Result<TensorData<'a>, CheckpointError>,
    ) -> Result<MergedReader<'a>, CheckpointError> {
        let values = |info: &'a TensorInfo| -> Result<Vec<f32>, CheckpointError> {
            let values = open(info)?.to_f32()?;
            FiniteCheck::new(info).check(0, &values)?;
            Ok(values)
        };
        let scaled = |info, scale: f32| -> Result<Vec<f32>, CheckpointError> {
            let mut values = values(info)?;
            values.iter_mut().for_each(|x| *x *= scale);
            Ok(values)
        };
        let mut changes = Vec::with_capacity(merged.changes.len());
        for change in &merged.changes {
            changes.push(match change {
                AdapterChange::Replace(_) => continue,
                AdapterChange::Sum { term, scale } => LoadedChange::Sum(scaled(term, *scale)?),
                AdapterChange::Product(product) => {
                    let LoraDelta { a, b, scale, transposed, magnitude } = &**product;
                    let rank = a.shape.first().copied().unwrap_or(1);
                    let magnitude = magnitude.as_ref().map(values).transpose()?;
                    let (a, b) = match transposed {
                        false => (values(a)?, scaled(b, *scale)?),
                        true => (transpose(&values(b)?, rank), transpose_back(&scaled(a, *scale)?, rank)),
                    };
                    LoadedChange::Product { a, b, rank, magnitude }
                }
            });
        }
        let columns = merged.base.shape.last().copied().unwrap_or(1).max(1);
        Ok(MergedReader { base: Box::new(open(&merged.base)?), columns, changes })
    }

    /// Elements `start ..` in row-major order; the range lies inside of the tensor.
    pub fn read(&self, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let whole = self
            .changes
            .iter()
            .any(|change| matches!(change, LoadedChange::Product { magnitude: Some(_), .. }));
        if !whole {
            self.base.read_f32_into(start, out)?;
            self.apply_changes(start, out);
            return Ok(());
        }
        // The length of a row is that of all of it.
        let columns = self.columns;
        let (mut start, mut out) = (start, out);
        let mut line = vec![0.0; columns];
        while !out.is_empty() {
            let (row, from) = (start / columns, start % columns);
            self.base.read_f32_into(row * columns, &mut line)?;
            self.apply_changes(row * columns, &mut line);
            let (here, rest) = out.split_at_mut((columns - from).min(out.len()));
            here.copy_from_slice(&line[from..from + here.len()]);
            (start, out) = (start + here.len(), rest);
        }
        Ok(())
    }

    /// Changes elements `start ..`: whole rows, if a change needs them.
    fn apply_changes(&self, start: usize, out: &mut [f32]) {
        for change in &self.changes {
            match change {
                LoadedChange::Sum(term) => {
                    out.iter_mut().zip(&term[start..]).for_each(|(x, term)| *x += term)
                }
                LoadedChange::Product { a, b, rank, magnitude } => {
                    self.add_lora_delta((a, b, *rank), magnitude.as_deref(), start, out);
                }
            }
        }
    }

    fn add_lora_delta(
        &self,
        (a, b, rank): (&[f32], &[f32], usize),
        magnitude: Option<&[f32]>,
        start: usize,
        out: &mut [f32],
    ) {
        let columns = self.columns;
        let (mut start, mut out) = (start, out);
        while !out.is_empty() {
            let (row, from) = (start / columns, start % columns);
            let (here, rest) = out.split_at_mut((columns - from).min(out.len()));
            for (factor, line) in b[row * rank..][..rank].iter().zip(a.chunks_exact(columns)) {
                here.iter_mut().zip(&line[from..]).for_each(|(x, a)| *x += factor * a);
            }
            if let Some(magnitude) = magnitude {
                let length = here.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let factor = (f64::from(magnitude[row]) / length) as f32;
                here.iter_mut().for_each(|x| *x *= factor);
            }
            (start, out) = (start + here.len(), rest);
        }
    }
}

/// `[rows, rank]` to `[rank, rows]`.
fn transpose(values: &[f32], rank: usize) -> Vec<f32> {
    (0..rank).flat_map(|r| values.iter().skip(r).step_by(rank.max(1)).copied()).collect()
}

/// `[rank, rows]` to `[rows, rank]`.
fn transpose_back(values: &[f32], rank: usize) -> Vec<f32> {
    transpose(values, values.len().checked_div(rank).unwrap_or(0))
}
