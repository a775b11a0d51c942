//! Weights from the checkpoint to the payload: read, transformed, quantized and packed in pieces of a few
//! rows, so that memory stays near the size of one tensor.

use mlcc_interp::graph::Tensor;
use mlcc_ir::module::{ColumnRange, ModelParam, ParamSource, RowBlocks};
use mlcc_ir::types::Packing;
use mlcc_models::checkpoint::FiniteCheck;
use mlcc_models::{Checkpoint, CheckpointError, TensorData};
use mlcc_quant::{PackOptions, QuantError, WeightPacker, dequantize, half_steps, pack};
use std::cell::RefCell;

/// Values read at a time.
const PIECE: usize = 1 << 18;

/// The reasons why a parameter could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WeightWriteError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("tensor {tensor}: {source}")]
    Pack { tensor: String, source: QuantError },
    #[error("internal error: parameter {0} has no constant shape of at most two axes")]
    Shape(String),
    #[error(
        "parameter {0} has a part for each rank, and the rank is not named: take the model before the pass `shard`"
    )]
    Ranks(String),
}

/// Rows and columns of a parameter; a vector is one row.
pub fn matrix_shape(param: &ModelParam) -> Option<(usize, usize)> {
    let dims: Option<Vec<usize>> =
        param.ty.dims.iter().map(|d| d.as_const().and_then(|d| usize::try_from(d).ok())).collect();
    match dims?.as_slice() {
        [] => Some((1, 1)),
        [k] => Some((1, *k)),
        [n, k] => Some((*n, *k)),
        _ => None,
    }
}

/// A tensor of the checkpoint as a parameter has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedTensor {
    pub name: String,
    /// A group format holds the values that were read, to the last bit.
    pub exact: bool,
}

/// Packs one parameter, handing finished bytes to `write` as they come. Returns the tensors that it is made
/// of.
pub fn pack_param<E: From<WeightWriteError>>(
    checkpoint: &Checkpoint,
    param: &ModelParam,
    options: PackOptions,
    mut write: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<Vec<PackedTensor>, E> {
    let (n, k) = matrix_shape(param).ok_or_else(|| WeightWriteError::Shape(param.name.clone()))?;
    let named = |source| WeightWriteError::Pack { tensor: param.name.clone(), source };
    let packing = param.packing.unwrap_or(Packing::RowMajor);
    // Rows of a vector's source are its elements.
    let width = row_width(param, k);
    let reader =
        SourceReader::open(checkpoint, whole_source(param)?, width).map_err(WeightWriteError::from)?;
    let mut packer = WeightPacker::new(param.ty.dtype, packing, n, k, options).map_err(named)?;
    let mut bytes = Vec::new();
    let rows_at_once = (PIECE / k.max(1)).max(1);
    let mut values = vec![0.0; rows_at_once.min(n) * k];
    let mut row = 0;
    while row < n {
        let rows = rows_at_once.min(n - row);
        let piece = &mut values[..rows * k];
        reader.read(row * (k / width), piece).map_err(WeightWriteError::from)?;
        packer.push_rows(piece, &mut bytes).map_err(named)?;
        write(&bytes)?;
        bytes.clear();
        row += rows;
    }
    let exact = packer.finish(&mut bytes).map_err(named)?;
    write(&bytes)?;
    let mut tensors = Vec::new();
    packed_tensors(&param.source, &reader, &exact, &mut tensors);
    Ok(tensors)
}

/// The tensors that rows with these marks come from.
fn packed_tensors(
    source: &ParamSource,
    reader: &SourceReader<'_>,
    exact: &[bool],
    tensors: &mut Vec<PackedTensor>,
) {
    if let (ParamSource::Concat(sources), SourceReader::Concat(parts)) = (source, reader) {
        let mut row = 0;
        for (source, (rows, reader)) in sources.iter().zip(parts) {
            let end = (row + rows).min(exact.len());
            packed_tensors(source, reader, exact.get(row..end).unwrap_or(&[]), tensors);
            row = end;
        }
        return;
    }
    let exact = exact.iter().all(|&exact| exact);
    tensors
        .extend(source.tensor_names().first().map(|name| PackedTensor { name: (*name).to_string(), exact }));
}

/// All values of a parameter, transformed but not quantized.
pub fn read_param(checkpoint: &Checkpoint, param: &ModelParam) -> Result<Vec<f32>, WeightWriteError> {
    let (n, k) = matrix_shape(param).ok_or_else(|| WeightWriteError::Shape(param.name.clone()))?;
    let mut values = vec![0.0; n * k];
    SourceReader::open(checkpoint, whole_source(param)?, row_width(param, k))?.read(0, &mut values)?;
    Ok(values)
}

/// The values of a stored parameter: rounded to its type, quantized and back for packed ones.
pub fn stored_value(
    checkpoint: &Checkpoint,
    param: &ModelParam,
    options: PackOptions,
) -> Result<Tensor, WeightWriteError> {
    Ok(stored_param(checkpoint, param, options)?.0)
}

/// [`stored_value`], and the distance from each value of a packed parameter within which its weight was;
/// empty for a plain one.
pub fn stored_param(
    checkpoint: &Checkpoint,
    param: &ModelParam,
    options: PackOptions,
) -> Result<(Tensor, Vec<f32>), WeightWriteError> {
    let dims: Option<Vec<usize>> =
        param.ty.dims.iter().map(|d| d.as_const().and_then(|d| usize::try_from(d).ok())).collect();
    let dims = dims.ok_or_else(|| WeightWriteError::Shape(param.name.clone()))?;
    let values = read_param(checkpoint, param)?;
    let dtype = param.ty.dtype;
    if !dtype.is_packed() {
        let value = Tensor::new(dtype, &dims, values.into_iter().map(f64::from).collect());
        return Ok((value, Vec::new()));
    }
    let named = |source| WeightWriteError::Pack { tensor: param.name.clone(), source };
    let (n, k) = matrix_shape(param).ok_or_else(|| WeightWriteError::Shape(param.name.clone()))?;
    let bytes = pack(dtype, Packing::RowMajor, n, k, &values, options).map_err(named)?;
    let values = dequantize(dtype, Packing::RowMajor, n, k, &bytes).map_err(named)?;
    let steps = half_steps(dtype, Packing::RowMajor, n, k, &bytes).map_err(named)?;
    Ok((Tensor { dtype, dims, data: values.into_iter().map(f64::from).collect() }, steps))
}

/// The parameter as a rank has it.
pub fn param_of_rank(param: &ModelParam, rank: usize) -> Result<ModelParam, WeightWriteError> {
    let source = param.source.of_rank(rank).ok_or_else(|| WeightWriteError::Ranks(param.name.clone()))?;
    Ok(ModelParam { source: source.clone(), ..param.clone() })
}

/// The source of a parameter that is the same on all ranks.
fn whole_source(param: &ModelParam) -> Result<&ParamSource, WeightWriteError> {
    match &param.source {
        ParamSource::Ranks(_) => Err(WeightWriteError::Ranks(param.name.clone())),
        source => Ok(source),
    }
}

/// Elements of a row as sources count rows: a vector has as many rows as elements.
fn row_width(param: &ModelParam, k: usize) -> usize {
    if param.ty.rank() < 2 { 1 } else { k.max(1) }
}

/// An open [`ParamSource`] that gives rows of `k` values.
enum SourceReader<'a> {
    Tensor { data: TensorData<'a>, k: usize },
    Map { f: fn(f64, f32) -> f32, argument: f64, inner: Box<SourceReader<'a>> },
    Concat(Vec<(usize, SourceReader<'a>)>),
    Rows { blocks: RowBlocks, inner: Box<SourceReader<'a>>, k: usize },
    Columns { order: Vec<usize>, inner: Box<SourceReader<'a>> },
    ColumnRange { range: ColumnRange, inner: Box<SourceReader<'a>> },
    UnitRows { inner: Box<SourceReader<'a>>, k: usize },
    Whole { values: Vec<f32>, k: usize },
    Zeros,
    Transpose(TransposedReader<'a>),
}

/// The transpose of what `inner` gives: held from the first read to that of the last row, so that only one of
/// many matrices is in memory at a time.
struct TransposedReader<'a> {
    inner: Box<SourceReader<'a>>,
    rows: usize,
    k: usize,
    values: RefCell<Vec<f32>>,
}

impl TransposedReader<'_> {
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let TransposedReader { rows, k, .. } = *self;
        if out.is_empty() {
            return Ok(());
        }
        let mut values = self.values.borrow_mut();
        if values.is_empty() {
            values.resize(rows * k, 0.0);
            self.inner.read(0, &mut values)?;
        }
        for (r, line) in (row..).zip(out.chunks_mut(k)) {
            line.iter_mut().enumerate().for_each(|(c, x)| *x = values[c * rows + r]);
        }
        if row + out.len() / k == rows {
            *values = Vec::new();
        }
        Ok(())
    }
}

impl<'a> SourceReader<'a> {
    fn open(
        checkpoint: &'a Checkpoint,
        source: &ParamSource,
        k: usize,
    ) -> Result<SourceReader<'a>, CheckpointError> {
        Ok(match source {
            ParamSource::Tensor(name) => SourceReader::Tensor { data: checkpoint.read(name)?, k },
            ParamSource::Scale(factor, inner) => {
                let inner = Box::new(SourceReader::open(checkpoint, inner, k)?);
                SourceReader::Map { f: |factor, x| (f64::from(x) * factor) as f32, argument: *factor, inner }
            }
            ParamSource::NegExp(inner) => {
                let inner = Box::new(SourceReader::open(checkpoint, inner, k)?);
                SourceReader::Map { f: |_, x| (-f64::from(x).exp()) as f32, argument: 0.0, inner }
            }
            ParamSource::Exp(inner) => {
                let inner = Box::new(SourceReader::open(checkpoint, inner, k)?);
                SourceReader::Map { f: |_, x| f64::from(x).exp() as f32, argument: 0.0, inner }
            }
            ParamSource::Offset(term, inner) => {
                let inner = Box::new(SourceReader::open(checkpoint, inner, k)?);
                SourceReader::Map { f: |term, x| (f64::from(x) + term) as f32, argument: *term, inner }
            }
            ParamSource::Rows(blocks, inner) => SourceReader::Rows {
                blocks: *blocks,
                inner: Box::new(SourceReader::open(checkpoint, inner, k)?),
                k,
            },
            ParamSource::Columns(order, inner) => SourceReader::Columns {
                order: order.clone(),
                inner: Box::new(SourceReader::open(checkpoint, inner, k)?),
            },
            // Rows of the source are longer.
            ParamSource::ColumnRange(range, inner) => SourceReader::ColumnRange {
                range: *range,
                inner: Box::new(SourceReader::open(checkpoint, inner, range.of)?),
            },
            ParamSource::UnitRows(inner) => {
                SourceReader::UnitRows { inner: Box::new(SourceReader::open(checkpoint, inner, k)?), k }
            }
            ParamSource::Values(values) => SourceReader::Whole { values: values.clone(), k },
            // Empty until the runtime fills it.
            ParamSource::Adapter => SourceReader::Zeros,
            // Parts of ranks are in no other source, and `whole_source` has refused them.
            ParamSource::Concat(parts) | ParamSource::Ranks(parts) => {
                let open = |part| {
                    let reader = SourceReader::open(checkpoint, part, k)?;
                    Ok((reader.rows(k), reader))
                };
                SourceReader::Concat(parts.iter().map(open).collect::<Result<_, CheckpointError>>()?)
            }
            ParamSource::Transpose(inner) => {
                // The columns of the source are the rows here, so its row length is the number of our rows.
                let total = SourceReader::open(checkpoint, inner, 1)?.elements();
                let rows = total.checked_div(k).unwrap_or(0);
                let inner = Box::new(SourceReader::open(checkpoint, inner, rows.max(1))?);
                SourceReader::Transpose(TransposedReader { inner, rows, k, values: RefCell::default() })
            }
        })
    }

    /// Values of all rows, if opened for rows of one value.
    fn elements(&self) -> usize {
        match self {
            SourceReader::Tensor { data, .. } => data.elements(),
            SourceReader::Map { inner, .. }
            | SourceReader::UnitRows { inner, .. }
            | SourceReader::Columns { inner, .. } => inner.elements(),
            SourceReader::Concat(parts) => parts.iter().map(|(_, reader)| reader.elements()).sum(),
            SourceReader::Rows { blocks, inner, .. } => {
                let width = inner.elements().checked_div(blocks.of).unwrap_or(0);
                blocks.row_count().unwrap_or(0) * width
            }
            SourceReader::ColumnRange { range, inner } => inner.rows(range.of) * range.len,
            SourceReader::Whole { values, .. } => values.len(),
            SourceReader::Zeros => 0,
            SourceReader::Transpose(transposed) => transposed.rows * transposed.k,
        }
    }

    fn rows(&self, k: usize) -> usize {
        match self {
            SourceReader::Tensor { data, .. } => data.elements().checked_div(k).unwrap_or(0),
            SourceReader::Map { inner, .. } => inner.rows(k),
            SourceReader::Concat(parts) => parts.iter().map(|(rows, _)| rows).sum(),
            SourceReader::Rows { blocks, .. } => blocks.row_count().unwrap_or(0),
            SourceReader::UnitRows { inner, .. } | SourceReader::Columns { inner, .. } => inner.rows(k),
            SourceReader::ColumnRange { range, inner } => inner.rows(range.of),
            SourceReader::Whole { values, .. } => values.len().checked_div(k).unwrap_or(0),
            SourceReader::Zeros => 0,
            SourceReader::Transpose(TransposedReader { rows, k: own, .. }) => {
                (rows * own).checked_div(k).unwrap_or(0)
            }
        }
    }

    /// Fills `out` (whole rows) from row `row` on; NaN and infinities are errors that name the element.
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        match self {
            SourceReader::Tensor { data, k } => {
                data.read_f32_into(row * k, out)?;
                FiniteCheck::new(data.info()).check(row * k, out)
            }
            SourceReader::Map { f, argument, inner } => {
                inner.read(row, out)?;
                out.iter_mut().for_each(|x| *x = f(*argument, *x));
                Ok(())
            }
            SourceReader::Concat(parts) => SourceReader::read_parts(parts, row, out),
            SourceReader::Rows { blocks, inner, k } => {
                let (mut row, mut out) = (row, out);
                while !out.is_empty() {
                    // To the end of the block.
                    let rows = (blocks.len - row % blocks.len).min(out.len() / k);
                    let (here, rest) = out.split_at_mut(rows * k);
                    inner.read(blocks.source_row(row), here)?;
                    (row, out) = (row + rows, rest);
                }
                Ok(())
            }
            SourceReader::Columns { order, inner } => {
                inner.read(row, out)?;
                let mut line = vec![0.0; order.len()];
                for row in out.chunks_exact_mut(order.len().max(1)) {
                    line.copy_from_slice(row);
                    row.iter_mut().zip(order).for_each(|(x, &at)| *x = line[at]);
                }
                Ok(())
            }
            SourceReader::ColumnRange { range, inner } => {
                let mut lines = vec![0.0; out.len() / range.len.max(1) * range.of];
                inner.read(row, &mut lines)?;
                let lines = lines.chunks_exact(range.of.max(1));
                for (to, line) in out.chunks_exact_mut(range.len.max(1)).zip(lines) {
                    to.copy_from_slice(&line[range.columns().unwrap_or(0..0)]);
                }
                Ok(())
            }
            SourceReader::UnitRows { inner, k } => {
                inner.read(row, out)?;
                out.chunks_mut(*k).for_each(unit_length);
                Ok(())
            }
            SourceReader::Whole { values, k } => {
                out.copy_from_slice(&values[row * k..row * k + out.len()]);
                Ok(())
            }
            SourceReader::Zeros => {
                out.fill(0.0);
                Ok(())
            }
            SourceReader::Transpose(transposed) => transposed.read(row, out),
        }
    }

    fn read_parts(
        parts: &[(usize, SourceReader)],
        mut row: usize,
        mut out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let total: usize = parts.iter().map(|(rows, _)| rows).sum();
        let k = match (out.len(), total) {
            (0, _) | (_, 0) => return Ok(()),
            _ => parts.iter().find_map(|(_, r)| r.width()).unwrap_or(1),
        };
        for (rows, reader) in parts {
            if row >= *rows {
                row -= rows;
                continue;
            }
            let count = (rows - row).min(out.len() / k);
            let (here, rest) = out.split_at_mut(count * k);
            reader.read(row, here)?;
            out = rest;
            row = 0;
        }
        Ok(())
    }

    fn width(&self) -> Option<usize> {
        match self {
            SourceReader::Tensor { k, .. }
            | SourceReader::Whole { k, .. }
            | SourceReader::Rows { k, .. }
            | SourceReader::Transpose(TransposedReader { k, .. })
            | SourceReader::UnitRows { k, .. } => Some(*k),
            SourceReader::Map { inner, .. } => inner.width(),
            SourceReader::Columns { order, .. } => Some(order.len()),
            SourceReader::ColumnRange { range, .. } => Some(range.len),
            SourceReader::Zeros => None,
            SourceReader::Concat(parts) => parts.iter().find_map(|(_, r)| r.width()),
        }
    }
}

/// Scales a row to Euclidean length 1; one shorter than 1e-12 is divided by that (as
/// `torch.nn.functional.normalize`).
fn unit_length(row: &mut [f32]) {
    let length = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt().max(1e-12);
    row.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
}
