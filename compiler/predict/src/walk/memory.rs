//! Loads and stores of a block: which sectors they touch, what they bring, how long they take.

use mlcc_abi::{Control, arg};

use super::access::{SECTOR_BYTES, bank_cycles, count_lines, touched_sectors};
use super::alu;
use super::lanes::{LANES, LaneWords, active_lanes};
use super::op::{AccessKind, ShuffleMode};
use super::warp::{OperandGroups, WalkedWarp, next_register};
use super::{BlockWalker, kind_of};
use crate::launch::{DataResidency, memory_value};
use crate::sass::{SassAddress, SassInstr, SassOperand, SassRegister};

/// Shared memory of a block, as far as integers were stored there.
pub struct TrackedSharedMemory {
    bytes: Vec<u8>,
    known: Vec<bool>,
}

impl TrackedSharedMemory {
    pub fn new(bytes: usize) -> TrackedSharedMemory {
        TrackedSharedMemory { bytes: vec![0; bytes], known: vec![false; bytes] }
    }

    fn word(&self, at: u64, bytes: u64) -> Option<u32> {
        let range = at as usize..(at + bytes) as usize;
        let known = self.known.get(range.clone())?;
        let stored = self.bytes.get(range)?;
        let word = stored.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        known.iter().all(|k| *k).then_some(word)
    }

    fn store(&mut self, at: u64, bytes: u64, value: Option<u32>) {
        for i in 0..bytes {
            let place = (at + i) as usize;
            if let (Some(byte), Some(known)) = (self.bytes.get_mut(place), self.known.get_mut(place)) {
                *byte = value.and_then(|v| v.checked_shr(8 * i as u32)).unwrap_or(0) as u8;
                *known = value.is_some();
            }
        }
    }
}

impl BlockWalker<'_> {
    pub(super) fn constant(&mut self, w: &mut WalkedWarp, i: &SassInstr, bytes: u64, mask: u32) {
        let Some(result) = alu::result_register(i) else { return };
        let Some(operand) = i.operands.get(1) else { return };
        for word in 0..bytes.div_ceil(4) {
            let operand = match operand {
                SassOperand::Constant { bank, offset, index, negated } => {
                    let (bank, offset) = (*bank, offset + 4 * word as i64);
                    SassOperand::Constant { bank, offset, index: *index, negated: *negated }
                }
                other => other.clone(),
            };
            let value = alu::read_source(w, &operand, &self.place);
            w.set(next_register(result, word as u8), &value, mask);
        }
    }

    /// Addresses of the lanes, and those that know theirs.
    fn addresses(&self, w: &WalkedWarp, address: &SassAddress, global: bool) -> ([u64; LANES], u32) {
        let register = |reg: SassRegister, wide: bool| match wide {
            true => w.pair(reg),
            false => [w.get(reg), LaneWords::splat(0)],
        };
        let base = address.base.map(|reg| register(reg, global && (address.wide || reg.uniform)));
        let more = address.more.map(|reg| register(reg, global));
        let mut known = u32::MAX;
        let mut out = [0u64; LANES];
        for (part, scale) in [(base, address.scale), (more, 1)] {
            let Some([low, high]) = part else { continue };
            known &= low.known & high.known;
            for (l, to) in out.iter_mut().enumerate() {
                let value = u64::from(high.v[l]) << 32 | u64::from(low.v[l]);
                *to = to.wrapping_add(value.wrapping_mul(u64::from(scale)));
            }
        }
        out.iter_mut().for_each(|to| {
            *to = to.wrapping_add_signed(address.offset);
            if !global {
                *to &= 0xffff_ffff;
            }
        });
        (out, known)
    }

    /// An access to global memory; gives the clocks until its data are there.
    pub(super) fn global(
        &mut self,
        w: &mut WalkedWarp,
        i: &SassInstr,
        bytes: u64,
        kind: AccessKind,
        mask: u32,
    ) -> u64 {
        let memory = |o: &SassOperand| match o {
            SassOperand::Memory(address) => Some(*address),
            _ => None,
        };
        // The source of a copy to shared memory comes last.
        let Some(address) = i.operands.iter().rev().find_map(memory) else { return 0 };
        let (at, known) = self.addresses(w, &address, true);
        let load = kind == AccessKind::Load;
        if load {
            self.loaded(w, i, &at, (known & mask, mask), bytes);
        } else if let (AccessKind::Copy { .. }, Some(target)) = (kind, i.operands.iter().find_map(memory)) {
            let (to, known) = self.addresses(w, &target, false);
            active_lanes(known & mask).for_each(|l| self.shared.store(to[l], bytes, None));
            self.counts.bank_cycles += bank_cycles(&to, known & mask, bytes);
        } else if kind == AccessKind::Atomic {
            self.unknown(w, i, 1, mask);
        }
        let touched = touched_sectors(&at, known & mask, bytes);
        self.counts.bank_cycles += count_lines(&touched).max(1);
        let unknown = u64::from((mask & !known).count_ones()) * bytes;
        self.counts.unknown_sectors += unknown.div_ceil(SECTOR_BYTES);
        self.counts.l2_sectors += unknown.div_ceil(SECTOR_BYTES);
        let mut latency = if unknown > 0 { self.latency.memory } else { self.latency.l1 };
        for sector in touched {
            latency = latency.max(self.touch(sector, kind));
        }
        let done = u64::from(latency);
        if matches!(kind, AccessKind::Copy { .. }) {
            w.open_copies = w.open_copies.max(w.clock + done);
        }
        done
    }

    /// A sector that is read or written; gives the clocks until it is there.
    fn touch(&mut self, sector: u64, kind: AccessKind) -> u32 {
        let in_memory = kind_of(sector) == DataResidency::Memory;
        let store = matches!(kind, AccessKind::Store | AccessKind::Atomic);
        if store {
            self.counts.l2_sectors += 1;
            if in_memory {
                self.counts.written.insert(sector);
            }
            return self.latency.l2;
        }
        let through_first = kind != AccessKind::Copy { bypass: true };
        if through_first && !self.first_level.insert(sector) {
            return self.latency.l1;
        }
        self.counts.l2_sectors += 1;
        // Sectors that the block has read before are in the second level now.
        if in_memory && self.counts.read.insert(sector) { self.latency.memory } else { self.latency.l2 }
    }

    /// Words that are known before anything runs.
    fn loaded(
        &mut self,
        w: &mut WalkedWarp,
        i: &SassInstr,
        at: &[u64; LANES],
        (known, mask): (u32, u32),
        bytes: u64,
    ) {
        let Some(result) = alu::result_register(i) else { return };
        for word in 0..bytes.div_ceil(4) {
            let mut out = LaneWords::UNKNOWN;
            for l in active_lanes(known) {
                if let Some(found) = memory_value(at[l] + 4 * word, bytes.min(4), self.call) {
                    out.v[l] = found as u32;
                    out.known |= 1 << l;
                }
            }
            w.set(next_register(result, word as u8), &out, mask);
        }
        self.counts.reads_past |= active_lanes(known).any(|l| is_past(at[l]));
    }

    pub(super) fn shared(
        &mut self,
        w: &mut WalkedWarp,
        i: &SassInstr,
        bytes: u64,
        store: bool,
        mask: u32,
    ) -> u64 {
        let address = i.operands.iter().find_map(|o| match o {
            SassOperand::Memory(address) => Some(*address),
            _ => None,
        });
        let Some(address) = address else { return 0 };
        let (at, known) = self.addresses(w, &address, false);
        self.counts.bank_cycles += bank_cycles(&at, known & mask, bytes);
        let words = bytes.div_ceil(4);
        let width = bytes.min(4);
        if store {
            let data = i.operands.last().cloned();
            let atomic = i.name == "ATOMS";
            for word in 0..words {
                let value = match &data {
                    Some(SassOperand::Register { reg, .. }) if !atomic => {
                        w.get(next_register(*reg, word as u8))
                    }
                    _ => LaneWords::UNKNOWN,
                };
                for l in active_lanes(known & mask) {
                    let value = (value.known >> l & 1 == 1).then_some(value.v[l]);
                    self.shared.store(at[l] + 4 * word, width, value);
                }
            }
            if atomic {
                self.unknown(w, i, 1, mask);
            }
        } else if let Some(result) = alu::result_register(i) {
            for word in 0..words {
                let mut out = LaneWords::UNKNOWN;
                for l in active_lanes(known & mask) {
                    if let Some(found) = self.shared.word(at[l] + 4 * word, width) {
                        out.v[l] = found;
                        out.known |= 1 << l;
                    }
                }
                w.set(next_register(result, word as u8), &out, mask);
            }
        }
        u64::from(self.latency.shared)
    }

    /// `ldmatrix`: each matrix has rows of 16 bytes, whose places eight lanes give.
    pub(super) fn matrices(&mut self, w: &mut WalkedWarp, i: &SassInstr, count: u32, mask: u32) -> u64 {
        if let Some(SassOperand::Memory(address)) = i.operands.get(1) {
            let (at, known) = self.addresses(w, address, false);
            let rows = if count >= 4 { u32::MAX } else { (1 << (8 * count)) - 1 };
            self.counts.bank_cycles += bank_cycles(&at, known & mask & rows, 16);
        }
        self.unknown(w, i, count as u8, mask);
        u64::from(self.latency.shared)
    }

    pub(super) fn shuffle(&mut self, w: &mut WalkedWarp, i: &SassInstr, how: ShuffleMode, mask: u32) {
        let parts = OperandGroups::group(&i.operands, true);
        let Some(result) = parts.result else { return };
        let source = |n: usize| {
            parts.sources.get(n).map_or(LaneWords::UNKNOWN, |o| alu::read_source(w, o, &self.place))
        };
        let (value, by, clamp) = (source(0), source(1), source(2));
        let mut out = LaneWords::UNKNOWN;
        let mut inside = 0;
        for l in active_lanes(by.known & clamp.known & mask) {
            let (lane, by) = (l as u32, by.v[l]);
            let (segment, last) = (clamp.v[l] >> 8 & 31, clamp.v[l] & 31);
            let first = lane & segment;
            let from = match how {
                ShuffleMode::Xor => lane ^ by,
                ShuffleMode::Down => lane + by,
                ShuffleMode::Up => lane.wrapping_sub(by),
                ShuffleMode::Index => first | by & !segment & 31,
            };
            let end = first | last & !segment;
            let holds = match how {
                ShuffleMode::Up => from as i32 >= end as i32,
                _ => from <= end,
            };
            let from = if holds { from & 31 } else { lane };
            inside |= u32::from(holds) << l;
            out.v[l] = value.v[from as usize];
            out.known |= (value.known >> from & 1) << l;
        }
        w.set(result, &out, mask);
        if let Some(&(number, uniform)) = parts.out.first() {
            w.set_predicate(number, uniform, inside, mask);
        }
    }
}

/// True for the address of the number of tokens before, in the control block or in the table of sequences.
fn is_past(address: u64) -> bool {
    use std::mem::offset_of;
    let begin =
        |kind: u32| crate::launch::arg_address(&mlcc_abi::LaunchArg { kind, reserved: 0, offset: 0 }, 0);
    let control = begin(arg::CONTROL) + offset_of!(Control, past) as u64;
    address & !7 == control || address >= begin(arg::SEQUENCES) && address < begin(arg::SEQUENCES + 1)
}
