//! Matrix operations of the lanes of a warp: products of fragments, and rows from shared memory.

use super::WARP;
use crate::kernel::cell::{self, RegisterCell};
use crate::kernel::error::{KernelFault, RunResult};
use crate::kernel::machine::KernelMachine;
use crate::kernel::program::RegisterRange;
use mlcc_ir::fragment::{Fragment, MmaLayout, UNITS};
use mlcc_ir::instr::MATRIX_ROW_BYTES;
use mlcc_ir::types::DType;

/// Registers of `sums + a * b`.
#[derive(Clone, Copy)]
pub(crate) struct MmaRegisters {
    pub accumulator: RegisterRange,
    pub a: RegisterRange,
    pub b: RegisterRange,
    /// Type of `a` and `b`.
    pub dtype: DType,
}

impl KernelMachine<'_> {
    /// Warps that execute an instruction together: those with active threads, which must have all of them.
    fn active_warps(&self, instr: &'static str) -> RunResult<Vec<usize>> {
        let mut warps = Vec::new();
        for (warp, mask) in self.mask.chunks(WARP).enumerate() {
            match mask.iter().filter(|on| **on).count() {
                0 => {}
                WARP => warps.push(warp),
                active => return Err(KernelFault::PartOfAWarp { instr, warp, active }.into()),
            }
        }
        Ok(warps)
    }

    pub(crate) fn multiply_accumulate(
        &mut self,
        instr: &'static str,
        mma: &MmaLayout,
        of: MmaRegisters,
        out: RegisterRange,
    ) -> RunResult {
        let threads = self.threads();
        for warp in self.active_warps(instr)? {
            let a = self.read_matrix(warp, &mma.a, of.a);
            let b = self.read_matrix(warp, &mma.b, of.b);
            let value = |c: RegisterCell| {
                if of.dtype.is_float() { cell::float(of.dtype, c).into() } else { c as i64 as f64 }
            };
            let (columns, k) = (mma.b.columns as usize, mma.a.columns as usize);
            for lane in 0..WARP {
                let thread = warp * WARP + lane;
                for element in 0..mma.accumulator.elements_per_lane() {
                    let (row, column) = mma.accumulator.coordinates(lane as u32, element);
                    let (row, column) = (row as usize, column as usize);
                    // Exact for integers; hardware adds floats in an order of its own.
                    let product = |j| value(a[row * k + j]) * value(b[j * columns + column]);
                    let sum: f64 = (0..k).map(product).sum();
                    let slot = thread * out.lanes + element as usize;
                    let old = self.cells(of.accumulator)[thread * of.accumulator.lanes + element as usize];
                    self.registers[out.at * threads + slot] = match of.dtype.is_float() {
                        true => cell::of_f32((sum + f64::from(cell::to_f32(old))) as f32),
                        false => cell::wrap_integer(DType::I32, sum as i64 + old as i64),
                    };
                }
            }
        }
        Ok(())
    }

    /// The matrix that a warp holds, row-major.
    fn read_matrix(&self, warp: usize, f: &Fragment, reg: RegisterRange) -> Vec<RegisterCell> {
        let cells = self.cells(reg);
        let mut all = vec![0; (f.rows * f.columns) as usize];
        for lane in 0..WARP {
            for element in 0..f.elements_per_lane() {
                let (row, column) = f.coordinates(lane as u32, element);
                all[(row * f.columns + column) as usize] =
                    cells[(warp * WARP + lane) * reg.lanes + element as usize];
            }
        }
        all
    }

    pub(crate) fn load_matrices(
        &mut self,
        instr: &'static str,
        (buf, index): (usize, RegisterRange),
        (matrices, transposed): (usize, bool),
        out: RegisterRange,
    ) -> RunResult {
        let threads = self.threads();
        // Elements in a unit of 16 bits.
        let unit = 2 / self.memory[buf].dtype.bytes().unwrap_or(2);
        for warp in self.active_warps(instr)? {
            for matrix in 0..matrices {
                let mut units = Vec::new();
                for row in 0..UNITS.rows as usize {
                    let thread = warp * WARP + matrix * UNITS.rows as usize + row;
                    let (who, at) = (self.access_origin(thread), self.cells(index)[thread] as i64);
                    let len = self.memory[buf].check_alignment(instr, at, MATRIX_ROW_BYTES)?;
                    for i in 0..len {
                        units.push(self.memory[buf].load(at + i, who)?);
                    }
                }
                for lane in 0..WARP {
                    for element in 0..UNITS.elements_per_lane() {
                        let (row, column) = UNITS.coordinates(lane as u32, element);
                        let (row, column) = if transposed { (column, row) } else { (row, column) };
                        let from = (row * UNITS.columns + column) as usize * unit;
                        let slot = (matrix * UNITS.elements_per_lane() as usize + element as usize) * unit;
                        let to = out.at * threads + (warp * WARP + lane) * out.lanes + slot;
                        self.registers[to..to + unit].copy_from_slice(&units[from..from + unit]);
                    }
                }
            }
        }
        Ok(())
    }
}
