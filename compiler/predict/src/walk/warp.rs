//! Registers of a warp, and operands in them.

use super::lanes::{ALL, LANES, LaneWords};
use crate::sass::{PredicateGuard, SassOperand, SassRegister};

const REGISTERS: usize = 256;
/// The predicate that is always true.
const TRUE: u8 = 7;

/// One warp: where each lane goes on, what its registers hold, and when its results are there.
pub struct WalkedWarp {
    pub number: u32,
    /// The next instruction of each lane.
    pub next: [usize; LANES],
    pub alive: u32,
    registers: Vec<LaneWords>,
    uniform: Vec<LaneWords>,
    /// A bit per lane. Unknown ones count as false.
    predicates: [u32; 8],
    uniform_predicates: [u32; 8],
    /// Clocks since the block began, of this warp alone.
    pub clock: u64,
    pub scoreboards: [u64; 6],
    /// The times at which the copies of each group land, and those that have no group yet.
    pub groups: Vec<u64>,
    pub open_copies: u64,
}

impl WalkedWarp {
    pub fn new(number: u32, alive: u32) -> WalkedWarp {
        WalkedWarp {
            number,
            next: [0; LANES],
            alive,
            // No program depends on a register that was never set, only on single bits of it that are set
            // later.
            registers: vec![LaneWords::splat(0); REGISTERS],
            uniform: vec![LaneWords::UNKNOWN; REGISTERS],
            predicates: [0; 8],
            uniform_predicates: [0; 8],
            clock: 0,
            scoreboards: [0; 6],
            groups: Vec::new(),
            open_copies: 0,
        }
    }

    pub fn get(&self, reg: SassRegister) -> LaneWords {
        match (reg.number, reg.uniform) {
            (SassRegister::ZERO, _) => LaneWords::splat(0),
            (number, false) => self.registers[usize::from(number)],
            (number, true) => self.uniform[usize::from(number)],
        }
    }

    /// The register and the next one, as 64 bits.
    pub fn pair(&self, reg: SassRegister) -> [LaneWords; 2] {
        [self.get(reg), self.get(next_register(reg, 1))]
    }

    pub fn set(&mut self, reg: SassRegister, value: &LaneWords, mask: u32) {
        match (reg.number, reg.uniform) {
            (SassRegister::ZERO, _) => {}
            (number, false) => self.registers[usize::from(number)].set(value, mask),
            // All lanes see it.
            (number, true) => {
                let lane = mask.trailing_zeros().min(31) as usize;
                let known = value.known >> lane & 1 == 1;
                let to = &mut self.uniform[usize::from(number)];
                *to = if known { LaneWords::splat(value.v[lane]) } else { LaneWords::UNKNOWN };
            }
        }
    }

    pub fn predicate(&self, number: u8, uniform: bool, negated: bool) -> u32 {
        let bits = match (number, uniform) {
            (TRUE, _) => ALL,
            (number, false) => self.predicates[usize::from(number)],
            (number, true) => self.uniform_predicates[usize::from(number)],
        };
        if negated { !bits } else { bits }
    }

    pub fn set_predicate(&mut self, number: u8, uniform: bool, bits: u32, mask: u32) {
        if number == TRUE {
            return;
        }
        if uniform {
            let lane = mask.trailing_zeros().min(31);
            self.uniform_predicates[usize::from(number)] = if bits >> lane & 1 == 1 { ALL } else { 0 };
        } else {
            let to = &mut self.predicates[usize::from(number)];
            *to = *to & !mask | bits & mask;
        }
    }

    pub fn guard_mask(&self, guard: Option<PredicateGuard>) -> u32 {
        guard.map_or(ALL, |g| self.predicate(g.register, g.uniform, g.negated))
    }
}

/// A register further on.
pub fn next_register(reg: SassRegister, by: u8) -> SassRegister {
    match reg.number {
        SassRegister::ZERO => reg,
        number => SassRegister { number: number.saturating_add(by), ..reg },
    }
}

/// Operands by their purpose: results and carries out come before the sources, carries in behind them.
pub struct OperandGroups<'a> {
    pub result: Option<SassRegister>,
    /// Predicates before the first source.
    pub out: Vec<(u8, bool)>,
    pub sources: &'a [SassOperand],
    /// Predicates behind the last source.
    pub last: Vec<(u8, bool, bool)>,
}

impl<'a> OperandGroups<'a> {
    /// `register`: whether the instruction has a register for its result.
    pub fn group(operands: &'a [SassOperand], register: bool) -> OperandGroups<'a> {
        let is_predicate = |o: &SassOperand| matches!(o, SassOperand::Predicate { .. });
        let mut parts = OperandGroups { result: None, out: vec![], sources: &[], last: vec![] };
        let mut at = 0;
        while let Some(operand) = operands.get(at) {
            match operand {
                SassOperand::Predicate { number, uniform, .. } => parts.out.push((*number, *uniform)),
                SassOperand::Register { reg, .. } if register && parts.result.is_none() => {
                    parts.result = Some(*reg)
                }
                _ => break,
            }
            at += 1;
        }
        let end = operands.iter().rposition(|o| !is_predicate(o)).map_or(at, |last| (last + 1).max(at));
        parts.sources = &operands[at..end];
        for operand in &operands[end..] {
            if let SassOperand::Predicate { number, uniform, negated } = operand {
                parts.last.push((*number, *uniform, *negated));
            }
        }
        parts
    }
}
