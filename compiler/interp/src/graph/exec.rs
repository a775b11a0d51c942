//! Runs a [`Program`] for every element of an output.

use super::program::{Code, Kind, Program, Site};
use super::scalar::{self, float_to_int, from_float, from_int, round_float, wrap_int};
use mlcc_ir::types::DType;

/// What can go wrong with well-typed ops on bad data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("reads input {arg} at index {index} of axis {axis}, which has size {size}")]
    Index { arg: usize, axis: usize, index: i64, size: i64 },
    #[error("divides an integer by zero")]
    ZeroDivisor,
}

impl Program {
    /// Elements of an output of shape `dims`, row-major, rounded to `dtype`.
    pub fn run(&self, dims: &[usize], dtype: DType, args: &[&[f64]]) -> Result<Vec<f64>, Fault> {
        let total = dims.iter().product();
        let (mut ints, mut floats) = (self.ints.clone(), self.floats.clone());
        let mut out = Vec::with_capacity(total);
        for _ in 0..total {
            self.element(&mut ints, &mut floats, args)?;
            let at = self.result.at as usize;
            out.push(match self.result.kind {
                Kind::Float => from_float(dtype, floats[at]),
                Kind::Bool | Kind::Int => from_int(dtype, ints[at]),
            });
            for axis in (0..dims.len()).rev() {
                ints[axis] += 1;
                if (ints[axis] as usize) < dims[axis] {
                    break;
                }
                ints[axis] = 0;
            }
        }
        Ok(out)
    }

    fn element(&self, ints: &mut [i64], floats: &mut [f64], args: &[&[f64]]) -> Result<(), Fault> {
        let mut at = 0;
        while let Some(code) = self.code.get(at) {
            at += 1;
            match *code {
                Code::IntUnary { f, dst, a } => ints[dst as usize] = f(ints[a as usize]),
                Code::IntBinary { op, dst, a, b } => {
                    let value = scalar::int_binary(op, ints[a as usize], ints[b as usize]);
                    ints[dst as usize] = value.ok_or(Fault::ZeroDivisor)?;
                }
                Code::FloatUnary { f, dst, a } => floats[dst as usize] = f(floats[a as usize]),
                Code::FloatBinary { f, dst, a, b } => {
                    floats[dst as usize] = f(floats[a as usize], floats[b as usize]);
                }
                Code::FloatCompare { f, dst, a, b } => {
                    ints[dst as usize] = i64::from(f(&floats[a as usize], &floats[b as usize]));
                }
                Code::ToFloat { dst, a } => floats[dst as usize] = ints[a as usize] as f64,
                Code::ToInt { dtype, dst, a } => {
                    ints[dst as usize] = float_to_int(dtype, floats[a as usize]);
                }
                Code::Wrap { dtype, dst, a } => ints[dst as usize] = wrap_int(dtype, ints[a as usize]),
                Code::Round { dtype, dst, a } => {
                    floats[dst as usize] = round_float(dtype, floats[a as usize]);
                }
                Code::MoveInt { dst, a } => ints[dst as usize] = ints[a as usize],
                Code::MoveFloat { dst, a } => floats[dst as usize] = floats[a as usize],
                Code::LoadInt { dst, site } => {
                    let site = &self.sites[site as usize];
                    ints[dst as usize] = args[site.arg][site.offset(ints)?] as i64;
                }
                Code::LoadFloat { dst, site } => {
                    let site = &self.sites[site as usize];
                    floats[dst as usize] = args[site.arg][site.offset(ints)?];
                }
                Code::Jump { to } => at = to as usize,
                Code::JumpIfZero { a, to } => {
                    if ints[a as usize] == 0 {
                        at = to as usize;
                    }
                }
                Code::JumpUnlessLess { a, b, to } => {
                    if ints[a as usize] >= ints[b as usize] {
                        at = to as usize;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Site {
    fn offset(&self, ints: &[i64]) -> Result<usize, Fault> {
        let mut offset = 0;
        for (axis, (&reg, &size)) in self.index.iter().zip(&self.dims).enumerate() {
            let index = ints[reg as usize];
            if !(0..size).contains(&index) {
                return Err(Fault::Index { arg: self.arg, axis, index, size });
            }
            offset = offset * size + index;
        }
        Ok(offset as usize)
    }
}
