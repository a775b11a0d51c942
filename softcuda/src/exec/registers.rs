//! Registers of a warp: 32 lanes side by side, and which lanes have a value.

use super::fault::{FaultKind, InstructionFault, trouble};
use super::{LANES, WarpLanes};
use crate::ptx::kernel::PtxKernel;
use crate::ptx::op::{AnyRegister, CONSTANT, DoubleRegister, PredRegister, WordRegister};
use crate::ptx::scope::RegisterClass;

pub struct RegisterFile {
    w: Vec<WarpLanes<u32>>,
    d: Vec<WarpLanes<u64>>,
    p: Vec<u32>,
    w_set: Vec<u32>,
    d_set: Vec<u32>,
    p_set: Vec<u32>,
}

/// Constants of a kernel, for all lanes.
pub struct ConstantBank {
    w: Vec<WarpLanes<u32>>,
    d: Vec<WarpLanes<u64>>,
}

impl ConstantBank {
    pub fn of(kernel: &PtxKernel) -> Self {
        let w = kernel.word_constants.iter().map(|&value| [value; LANES]).collect();
        let d = kernel.double_constants.iter().map(|&value| [value; LANES]).collect();
        Self { w, d }
    }
}

/// The parts of its kernel that an instruction sees.
#[derive(Clone, Copy)]
pub struct OperandSources<'k> {
    pub kernel: &'k PtxKernel,
    pub constants: &'k ConstantBank,
    /// Lanes that execute the instruction.
    pub m: u32,
}

type RegisterRead<'r, T> = Result<&'r T, Box<InstructionFault>>;

#[cold]
fn unset(s: OperandSources<'_>, class: RegisterClass, number: u32, set: u32) -> Box<InstructionFault> {
    let lane = (s.m & !set).trailing_zeros() as usize;
    let name = s.kernel.register(class, number);
    trouble(FaultKind::Uninitialised, Some(lane), format!("{name} is read before it has a value"))
}

impl RegisterFile {
    pub fn new(kernel: &PtxKernel) -> Self {
        let (w, d, p) = (kernel.words as usize, kernel.doubles as usize, kernel.preds as usize);
        Self {
            w: vec![[0; LANES]; w],
            d: vec![[0; LANES]; d],
            p: vec![0; p],
            w_set: vec![0; w],
            d_set: vec![0; d],
            p_set: vec![0; p],
        }
    }

    /// Forgets all values.
    pub fn clear(&mut self) {
        self.w_set.fill(0);
        self.d_set.fill(0);
        self.p_set.fill(0);
    }

    #[inline]
    pub fn w<'r>(&'r self, s: OperandSources<'r>, r: WordRegister) -> RegisterRead<'r, WarpLanes<u32>> {
        if r.0 & CONSTANT != 0 {
            return Ok(&s.constants.w[(r.0 & !CONSTANT) as usize]);
        }
        let set = self.w_set[r.0 as usize];
        if s.m & !set != 0 {
            return Err(unset(s, RegisterClass::Word, r.0, set));
        }
        Ok(&self.w[r.0 as usize])
    }

    #[inline]
    pub fn d<'r>(&'r self, s: OperandSources<'r>, r: DoubleRegister) -> RegisterRead<'r, WarpLanes<u64>> {
        if r.0 & CONSTANT != 0 {
            return Ok(&s.constants.d[(r.0 & !CONSTANT) as usize]);
        }
        let set = self.d_set[r.0 as usize];
        if s.m & !set != 0 {
            return Err(unset(s, RegisterClass::Double, r.0, set));
        }
        Ok(&self.d[r.0 as usize])
    }

    #[inline]
    pub fn p(&self, s: OperandSources<'_>, r: PredRegister) -> Result<u32, Box<InstructionFault>> {
        let set = self.p_set[r.0 as usize];
        if s.m & !set != 0 {
            return Err(unset(s, RegisterClass::Pred, r.0, set));
        }
        Ok(self.p[r.0 as usize])
    }

    /// A register of any size, widened without sign.
    pub fn any(
        &self,
        s: OperandSources<'_>,
        r: AnyRegister,
    ) -> Result<WarpLanes<u64>, Box<InstructionFault>> {
        match r {
            AnyRegister::W(w) => Ok(self.w(s, w)?.map(u64::from)),
            AnyRegister::D(d) => Ok(*self.d(s, d)?),
            AnyRegister::P(p) => {
                let bits = self.p(s, p)?;
                Ok(std::array::from_fn(|lane| u64::from(bits >> lane & 1)))
            }
        }
    }

    #[inline]
    pub fn put_w(&mut self, r: WordRegister, values: &WarpLanes<u32>, m: u32) {
        let to = &mut self.w[r.0 as usize];
        self.w_set[r.0 as usize] |= m;
        if m == u32::MAX {
            *to = *values;
            return;
        }
        for (lane, (to, value)) in to.iter_mut().zip(values).enumerate() {
            if m >> lane & 1 != 0 {
                *to = *value;
            }
        }
    }

    #[inline]
    pub fn put_d(&mut self, r: DoubleRegister, values: &WarpLanes<u64>, m: u32) {
        let to = &mut self.d[r.0 as usize];
        self.d_set[r.0 as usize] |= m;
        if m == u32::MAX {
            *to = *values;
            return;
        }
        for (lane, (to, value)) in to.iter_mut().zip(values).enumerate() {
            if m >> lane & 1 != 0 {
                *to = *value;
            }
        }
    }

    #[inline]
    pub fn put_p(&mut self, r: PredRegister, bits: u32, m: u32) {
        let to = &mut self.p[r.0 as usize];
        *to = *to & !m | bits & m;
        self.p_set[r.0 as usize] |= m;
    }

    /// One lane of a register; `value` is cut to its size.
    #[inline]
    pub fn put_lane(&mut self, r: AnyRegister, lane: usize, value: u64) {
        match r {
            AnyRegister::W(w) => {
                self.w[w.0 as usize][lane] = value as u32;
                self.w_set[w.0 as usize] |= 1 << lane;
            }
            AnyRegister::D(d) => {
                self.d[d.0 as usize][lane] = value;
                self.d_set[d.0 as usize] |= 1 << lane;
            }
            AnyRegister::P(p) => self.put_p(p, ((value & 1) as u32) << lane, 1 << lane),
        }
    }
}
