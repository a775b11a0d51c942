//! Values of parameters, made from checkpoint tensors as their sources say: f32 arithmetic, then storage in
//! the parameter's type (group formats through quantization and back).

use super::Tensor;
use mlcc_ir::module::{ModelParam, ParamSource};
use mlcc_ir::types::{DType, Packing};
use mlcc_quant::{PackOptions, QuantError, dequantize, pack};

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WeightLoadError {
    #[error("parameter @{param} needs the tensor {tensor}, which is not there")]
    Missing { param: String, tensor: String },
    #[error("parameter @{param}: {message}")]
    Shape { param: String, message: String },
    #[error("parameter @{param}: {source}")]
    Quant { param: String, source: QuantError },
}

/// The value that a parameter has on a rank, as [`param_value`].
pub fn param_value_of_rank(
    param: &ModelParam,
    rank: usize,
    tensor: &dyn Fn(&str) -> Option<Tensor>,
) -> Result<Tensor, WeightLoadError> {
    let message = format!("its source has no part for rank {rank}");
    let shape = WeightLoadError::Shape { param: param.name.clone(), message };
    let source = param.source.of_rank(rank).ok_or(shape)?.clone();
    param_value(&ModelParam { source, ..param.clone() }, tensor)
}

/// The value of a parameter as the interpreter takes it; `tensor` gives checkpoint tensors by name.
pub fn param_value(
    param: &ModelParam,
    tensor: &dyn Fn(&str) -> Option<Tensor>,
) -> Result<Tensor, WeightLoadError> {
    let value = evaluate(param, &param.source, tensor)?;
    let shape = |message| WeightLoadError::Shape { param: param.name.clone(), message };
    let dims: Option<Vec<usize>> =
        param.ty.dims.iter().map(|d| usize::try_from(d.as_const()?).ok()).collect();
    let dims = dims.ok_or_else(|| shape(format!("{} does not have constant sizes", param.ty)))?;
    if value.data.len() != dims.iter().product() {
        return Err(shape(format!("expected {}, its source gives {}", param.ty, value.describe())));
    }
    let DType::Packed(_) = param.ty.dtype else {
        return Ok(Tensor::new(param.ty.dtype, &dims, value.data));
    };
    let &[rows, columns] = dims.as_slice() else {
        return Err(shape(format!("packed weights are matrices, not {}", param.ty)));
    };
    let quant = |source| WeightLoadError::Quant { param: param.name.clone(), source };
    let (dtype, packing) = (param.ty.dtype, Packing::RowMajor);
    let bytes =
        pack(dtype, packing, rows, columns, &value.to_f32(), PackOptions::default()).map_err(quant)?;
    let values = dequantize(dtype, packing, rows, columns, &bytes).map_err(quant)?;
    let data = values.into_iter().map(f64::from).collect();
    Ok(Tensor { dtype, dims, data })
}

/// Rows shorter than this are divided by it (as `torch.nn.functional.normalize` does).
const SHORTEST: f64 = 1e-12;

fn evaluate(
    param: &ModelParam,
    source: &ParamSource,
    tensor: &dyn Fn(&str) -> Option<Tensor>,
) -> Result<Tensor, WeightLoadError> {
    let map = |t: Tensor, f: &dyn Fn(f32) -> f32| {
        let data: Vec<f32> = t.to_f32().into_iter().map(f).collect();
        Tensor::f32(&t.dims, &data)
    };
    let shape = |message| WeightLoadError::Shape { param: param.name.clone(), message };
    match source {
        ParamSource::Tensor(name) => tensor(name)
            .ok_or_else(|| WeightLoadError::Missing { param: param.name.clone(), tensor: name.clone() }),
        ParamSource::Scale(factor, s) => {
            Ok(map(evaluate(param, s, tensor)?, &|v| (f64::from(v) * factor) as f32))
        }
        ParamSource::NegExp(s) => Ok(map(evaluate(param, s, tensor)?, &|v| -libm::exp(f64::from(v)) as f32)),
        ParamSource::Exp(s) => Ok(map(evaluate(param, s, tensor)?, &|v| libm::exp(f64::from(v)) as f32)),
        ParamSource::Offset(term, s) => {
            Ok(map(evaluate(param, s, tensor)?, &|v| (f64::from(v) + term) as f32))
        }
        ParamSource::Values(values) => Ok(Tensor::f32(&[values.len()], values)),
        // Slots that have not been filled are empty.
        ParamSource::Adapter => Ok(tensor(&param.name).unwrap_or_else(|| {
            let dims: Vec<usize> =
                param.ty.dims.iter().filter_map(|d| usize::try_from(d.as_const()?).ok()).collect();
            Tensor::f32(&dims, &vec![0.0; dims.iter().product()])
        })),
        ParamSource::Rows(blocks, s) => {
            let mut t = evaluate(param, s, tensor)?;
            if let [leading @ .., last] = t.dims.as_slice()
                && leading.len() > 1
            {
                t.dims = vec![leading.iter().product(), *last];
            }
            // A tensor that fills a vector is one, whatever its own shape, and so are parts of it.
            if param.ty.rank() == 1 {
                t.dims = vec![t.data.len()];
            }
            let (Some(rows), Some(&of)) = (blocks.row_count().filter(|_| !t.dims.is_empty()), t.dims.first())
            else {
                return Err(shape(format!("takes rows of {}", t.describe())));
            };
            if of != blocks.of {
                return Err(shape(format!(
                    "takes rows of {}, which should have {}",
                    t.describe(),
                    blocks.of
                )));
            }
            let width: usize = t.dims[1..].iter().product();
            let row = |r: usize| t.data[blocks.source_row(r) * width..][..width].iter().copied();
            let dims = std::iter::once(rows).chain(t.dims[1..].iter().copied()).collect();
            Ok(Tensor { dtype: t.dtype, dims, data: (0..rows).flat_map(row).collect() })
        }
        ParamSource::Ranks(parts) => {
            Err(shape(format!("it has a part for each of {} ranks: name the rank", parts.len())))
        }
        ParamSource::Columns(order, s) => {
            let mut t = evaluate(param, s, tensor)?;
            if t.dims.last() != Some(&order.len()) {
                return Err(shape(format!("takes {} columns of {}", order.len(), t.describe())));
            }
            let rows = t.data.chunks(order.len().max(1));
            t.data = rows.flat_map(|row| order.iter().map(|&at| row[at])).collect();
            Ok(t)
        }
        ParamSource::ColumnRange(range, s) => {
            let mut t = evaluate(param, s, tensor)?;
            let (Some(columns), Some(last)) = (range.columns(), t.dims.last_mut()) else {
                return Err(shape(format!("takes columns of {}", t.describe())));
            };
            if *last != range.of {
                return Err(shape(format!("takes columns of {last}, of which there should be {}", range.of)));
            }
            *last = range.len;
            t.data = t.data.chunks(range.of).flat_map(|row| row[columns.clone()].iter().copied()).collect();
            Ok(t)
        }
        ParamSource::UnitRows(s) => {
            let mut t = evaluate(param, s, tensor)?;
            let width = t.dims.last().copied().unwrap_or(1).max(1);
            for row in t.data.chunks_mut(width) {
                let length = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(SHORTEST);
                row.iter_mut().for_each(|x| *x = f64::from((*x / length) as f32));
            }
            Ok(t)
        }
        ParamSource::Transpose(s) => {
            let t = evaluate(param, s, tensor)?;
            // Axes of size 1 are none where there are more than two (a depthwise convolution has one).
            let long = |dims: &[usize]| dims.iter().copied().filter(|&dim| dim != 1).collect::<Vec<_>>();
            let dims = if t.dims.len() > 2 { long(&t.dims) } else { t.dims.clone() };
            let &[rows, columns] = dims.as_slice() else {
                return Err(shape(format!("transposes {}, which is no matrix", t.describe())));
            };
            let data = (0..rows * columns).map(|i| t.data[i % rows * columns + i / rows]).collect();
            Ok(Tensor { dtype: t.dtype, dims: vec![columns, rows], data })
        }
        ParamSource::Concat(parts) => {
            let mut parts = parts.iter().map(|s| evaluate(param, s, tensor));
            let mut joined = parts.next().ok_or_else(|| shape("joins no tensors".into()))??;
            for part in parts {
                let part = part?;
                if joined.dims.is_empty() || part.dims.len() != joined.dims.len() {
                    let found = part.describe();
                    return Err(shape(format!("cannot join {found} to {}", joined.describe())));
                }
                if part.dims[1..] != joined.dims[1..] {
                    let found = part.describe();
                    return Err(shape(format!("cannot join {found} to {}", joined.describe())));
                }
                joined.dims[0] += part.dims[0];
                joined.data.extend(part.data);
            }
            Ok(joined)
        }
    }
}
