//! Registers of a warp: 32 lanes side by side, and which lanes have a value.

use super::fault::{Kind, Trouble, trouble};
use super::{LANES, Lanes};
use crate::ptx::kernel::Kernel;
use crate::ptx::op::{Any, CONSTANT, D, P, W};
use crate::ptx::scope::Class;

pub struct Registers {
    w: Vec<Lanes<u32>>,
    d: Vec<Lanes<u64>>,
    p: Vec<u32>,
    w_set: Vec<u32>,
    d_set: Vec<u32>,
    p_set: Vec<u32>,
}

/// Constants of a kernel, for all lanes.
pub struct Constants {
    w: Vec<Lanes<u32>>,
    d: Vec<Lanes<u64>>,
}

impl Constants {
    pub fn of(kernel: &Kernel) -> Self {
        let w = kernel.word_constants.iter().map(|&value| [value; LANES]).collect();
        let d = kernel.double_constants.iter().map(|&value| [value; LANES]).collect();
        Self { w, d }
    }
}

/// What an instruction sees of its kernel.
#[derive(Clone, Copy)]
pub struct Sources<'k> {
    pub kernel: &'k Kernel,
    pub constants: &'k Constants,
    /// Lanes that execute the instruction.
    pub m: u32,
}

type Read<'r, T> = Result<&'r T, Box<Trouble>>;

#[cold]
fn unset(s: Sources<'_>, class: Class, number: u32, set: u32) -> Box<Trouble> {
    let lane = (s.m & !set).trailing_zeros() as usize;
    let name = s.kernel.register(class, number);
    trouble(Kind::Uninitialised, Some(lane), format!("{name} is read before it has a value"))
}

impl Registers {
    pub fn new(kernel: &Kernel) -> Self {
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
    pub fn w<'r>(&'r self, s: Sources<'r>, r: W) -> Read<'r, Lanes<u32>> {
        if r.0 & CONSTANT != 0 {
            return Ok(&s.constants.w[(r.0 & !CONSTANT) as usize]);
        }
        let set = self.w_set[r.0 as usize];
        if s.m & !set != 0 {
            return Err(unset(s, Class::Word, r.0, set));
        }
        Ok(&self.w[r.0 as usize])
    }

    #[inline]
    pub fn d<'r>(&'r self, s: Sources<'r>, r: D) -> Read<'r, Lanes<u64>> {
        if r.0 & CONSTANT != 0 {
            return Ok(&s.constants.d[(r.0 & !CONSTANT) as usize]);
        }
        let set = self.d_set[r.0 as usize];
        if s.m & !set != 0 {
            return Err(unset(s, Class::Double, r.0, set));
        }
        Ok(&self.d[r.0 as usize])
    }

    #[inline]
    pub fn p(&self, s: Sources<'_>, r: P) -> Result<u32, Box<Trouble>> {
        let set = self.p_set[r.0 as usize];
        if s.m & !set != 0 {
            return Err(unset(s, Class::Pred, r.0, set));
        }
        Ok(self.p[r.0 as usize])
    }

    /// A register of any size, widened without sign.
    pub fn any(&self, s: Sources<'_>, r: Any) -> Result<Lanes<u64>, Box<Trouble>> {
        match r {
            Any::W(w) => Ok(self.w(s, w)?.map(u64::from)),
            Any::D(d) => Ok(*self.d(s, d)?),
            Any::P(p) => {
                let bits = self.p(s, p)?;
                Ok(std::array::from_fn(|lane| u64::from(bits >> lane & 1)))
            }
        }
    }

    #[inline]
    pub fn put_w(&mut self, r: W, values: &Lanes<u32>, m: u32) {
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
    pub fn put_d(&mut self, r: D, values: &Lanes<u64>, m: u32) {
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
    pub fn put_p(&mut self, r: P, bits: u32, m: u32) {
        let to = &mut self.p[r.0 as usize];
        *to = *to & !m | bits & m;
        self.p_set[r.0 as usize] |= m;
    }

    /// One lane of a register; `value` is cut to its size.
    #[inline]
    pub fn put_lane(&mut self, r: Any, lane: usize, value: u64) {
        match r {
            Any::W(w) => {
                self.w[w.0 as usize][lane] = value as u32;
                self.w_set[w.0 as usize] |= 1 << lane;
            }
            Any::D(d) => {
                self.d[d.0 as usize][lane] = value;
                self.d_set[d.0 as usize] |= 1 << lane;
            }
            Any::P(p) => self.put_p(p, ((value & 1) as u32) << lane, 1 << lane),
        }
    }
}
