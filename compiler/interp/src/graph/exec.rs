//! Runs a [`ScalarProgram`] for every element of an output.

use super::program::{LoadSite, RegisterKind, ScalarInstr, ScalarProgram};
use super::scalar::{self, float_to_int, from_float, from_int, round_float, wrap_int};
use mlcc_ir::types::DType;

/// Faults of well-typed ops on bad data.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvaluationFault {
    #[error("reads input {arg} at index {index} of axis {axis}, which has size {size}")]
    Index { arg: usize, axis: usize, index: i64, size: i64 },
    #[error("divides an integer by zero")]
    ZeroDivisor,
}

impl ScalarProgram {
    /// Elements of an output of shape `dims`, row-major, rounded to `dtype`.
    pub fn run(&self, dims: &[usize], dtype: DType, args: &[&[f64]]) -> Result<Vec<f64>, EvaluationFault> {
        let total = dims.iter().product();
        let (mut ints, mut floats) = (self.ints.clone(), self.floats.clone());
        let mut out = Vec::with_capacity(total);
        for _ in 0..total {
            self.eval_element(&mut ints, &mut floats, args)?;
            let at = self.result.at as usize;
            out.push(match self.result.kind {
                RegisterKind::Float => from_float(dtype, floats[at]),
                RegisterKind::Bool | RegisterKind::Int => from_int(dtype, ints[at]),
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

    fn eval_element(
        &self,
        ints: &mut [i64],
        floats: &mut [f64],
        args: &[&[f64]],
    ) -> Result<(), EvaluationFault> {
        let mut at = 0;
        while let Some(code) = self.code.get(at) {
            at += 1;
            match *code {
                ScalarInstr::IntUnary { f, dst, a } => ints[dst as usize] = f(ints[a as usize]),
                ScalarInstr::IntBinary { op, dst, a, b } => {
                    let value = scalar::int_binary(op, ints[a as usize], ints[b as usize]);
                    ints[dst as usize] = value.ok_or(EvaluationFault::ZeroDivisor)?;
                }
                ScalarInstr::FloatUnary { f, dst, a } => floats[dst as usize] = f(floats[a as usize]),
                ScalarInstr::FloatBinary { f, dst, a, b } => {
                    floats[dst as usize] = f(floats[a as usize], floats[b as usize]);
                }
                ScalarInstr::FloatCompare { f, dst, a, b } => {
                    ints[dst as usize] = i64::from(f(&floats[a as usize], &floats[b as usize]));
                }
                ScalarInstr::ToFloat { dst, a } => floats[dst as usize] = ints[a as usize] as f64,
                ScalarInstr::ToInt { dtype, dst, a } => {
                    ints[dst as usize] = float_to_int(dtype, floats[a as usize]);
                }
                ScalarInstr::Wrap { dtype, dst, a } => ints[dst as usize] = wrap_int(dtype, ints[a as usize]),
                ScalarInstr::Round { dtype, dst, a } => {
                    floats[dst as usize] = round_float(dtype, floats[a as usize]);
                }
                ScalarInstr::MoveInt { dst, a } => ints[dst as usize] = ints[a as usize],
                ScalarInstr::MoveFloat { dst, a } => floats[dst as usize] = floats[a as usize],
                ScalarInstr::LoadInt { dst, site } => {
                    let site = &self.sites[site as usize];
                    ints[dst as usize] = args[site.arg][site.element_offset(ints)?] as i64;
                }
                ScalarInstr::LoadFloat { dst, site } => {
                    let site = &self.sites[site as usize];
                    floats[dst as usize] = args[site.arg][site.element_offset(ints)?];
                }
                ScalarInstr::Jump { to } => at = to as usize,
                ScalarInstr::JumpIfZero { a, to } => {
                    if ints[a as usize] == 0 {
                        at = to as usize;
                    }
                }
                ScalarInstr::JumpUnlessLess { a, b, to } => {
                    if ints[a as usize] >= ints[b as usize] {
                        at = to as usize;
                    }
                }
            }
        }
        Ok(())
    }
}

impl LoadSite {
    fn element_offset(&self, ints: &[i64]) -> Result<usize, EvaluationFault> {
        let mut offset = 0;
        for (axis, (&reg, &size)) in self.index.iter().zip(&self.dims).enumerate() {
            let index = ints[reg as usize];
            if !(0..size).contains(&index) {
                return Err(EvaluationFault::Index { arg: self.arg, axis, index, size });
            }
            offset = offset * size + index;
        }
        Ok(offset as usize)
    }
}
