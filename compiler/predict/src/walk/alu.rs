//! Integer instructions: places in the device's memory and the number of turns of a loop come from these.
//!
//! NVIDIA documents their names ("CUDA Binary Utilities") and not their meaning. The meanings here are those
//! with which the results of `ptxas` compute what its PTX says; tests compare with places that kernels are
//! known to touch.

use super::lanes::{LANES, LaneWords, active_lanes};
use super::op::{ComparisonOp, PredicateJoin, ProductPart, SassOp};
use super::warp::{OperandGroups, WalkedWarp, next_register};
use crate::sass::{SassInstr, SassOperand, SassRegister};

/// The constants of a block, which its warps do not have.
pub trait ConstantReader {
    /// A word of a constant bank, if it is known.
    fn constant(&self, bank: u32, offset: i64) -> Option<u32>;
    /// A special register in each lane of a warp.
    fn special(&self, name: &str, warp: u32) -> LaneWords;
}

/// Executes an instruction in the lanes of a mask; `false` if it is none of these.
pub fn execute(w: &mut WalkedWarp, i: &SassInstr, op: SassOp, mask: u32, c: &dyn ConstantReader) -> bool {
    match op {
        SassOp::Compare { how, signed, join, extended } => {
            compare(w, i, (how, signed, join, extended), mask, c);
            return true;
        }
        SassOp::PredicateLogic => {
            predicate_logic(w, i, mask);
            return true;
        }
        SassOp::Vote { all } => {
            vote(w, i, all, mask);
            return true;
        }
        SassOp::UnpackPredicates => {
            unpack(w, i, mask, c);
            return true;
        }
        _ => {}
    }
    let parts = OperandGroups::group(&i.operands, true);
    let Some(result) = parts.result else { return false };
    let source = |n: usize| parts.sources.get(n).map_or(LaneWords::splat(0), |o| read_source(w, o, c));
    let second = || parts.sources.get(1).map_or(LaneWords::splat(0), |o| read_source(w, o, c));
    let value = match op {
        SassOp::Move | SassOp::ToUniform => source(0),
        SassOp::Add { extended } => {
            let (value, carries) = add(w, &parts, extended, c);
            write_carries(w, &parts, &carries, mask);
            value
        }
        SassOp::Multiply { part, signed, extended } => {
            return multiply(w, &parts, (part, signed, extended), mask, c);
        }
        SassOp::ShiftAdd { high, sign, extended } => {
            let (value, carries) = shift_add(w, &parts, (high, sign, extended), c);
            write_carries(w, &parts, &carries, mask);
            value
        }
        SassOp::Shift { right, high, signed, double, wrap } => {
            source(0).zip_map(source(1), source(2), |a, by, b| {
                shift(a, by, b, (right, high, signed, double, wrap))
            })
        }
        SassOp::Logic => {
            let table = parts.sources.get(3).map_or(0, immediate_value) as u32;
            let value = source(0).zip_map(source(1), source(2), |a, b, c| logic(a, b, c, table));
            if let Some(&(number, uniform)) = parts.out.first() {
                let bits = bits(&value, |v| v != 0);
                w.set_predicate(number, uniform, bits, mask);
            }
            value
        }
        SassOp::Select => {
            let chosen = last(w, &parts, 0, true);
            let (a, b) = (source(0), second());
            let v = std::array::from_fn(|l| if chosen >> l & 1 == 1 { a.v[l] } else { b.v[l] });
            LaneWords { v, known: a.known & chosen | b.known & !chosen }
        }
        SassOp::Permute => source(0).zip_map(source(1), source(2), permute),
        SassOp::Extend { signed } => source(0).zip_map(second(), second(), |a, width, _| match width {
            32.. => a,
            0 => 0,
            width if signed => ((a << (32 - width)) as i32 >> (32 - width)) as u32,
            width => a & ((1 << width) - 1),
        }),
        SassOp::Least { signed } => {
            let least = last(w, &parts, 0, true);
            let (a, b) = (source(0), second());
            let less = |l: usize| {
                if signed { (a.v[l] as i32) < b.v[l] as i32 } else { a.v[l] < b.v[l] }
            };
            let v = std::array::from_fn(|l| if less(l) == (least >> l & 1 == 1) { a.v[l] } else { b.v[l] });
            LaneWords { v, known: a.known & b.known }
        }
        SassOp::Absolute => source(0).map(|a| (a as i32).unsigned_abs()),
        SassOp::Ones => source(0).map(u32::count_ones),
        SassOp::Leading { signed, shift } => source(0).map(|a| {
            let a = if signed && (a as i32) < 0 { !a } else { a };
            match a {
                0 => u32::MAX,
                _ if shift => a.leading_zeros(),
                _ => 31 - a.leading_zeros(),
            }
        }),
        SassOp::Reverse => source(0).map(u32::reverse_bits),
        SassOp::Mask => source(0).zip_map(second(), second(), |at, width, _| {
            let ones = if width >= 32 { u32::MAX } else { (1 << width) - 1 };
            ones.checked_shl(at).unwrap_or(0)
        }),
        SassOp::Special => match i.operands.get(1) {
            Some(SassOperand::Special(name)) => c.special(name, w.number),
            _ => LaneWords::UNKNOWN,
        },
        SassOp::Zero => {
            let zero = matches!(i.operands.get(1), Some(SassOperand::Special(name)) if name == "SRZ");
            let value = if zero { LaneWords::splat(0) } else { LaneWords::UNKNOWN };
            w.set(next_register(result, 1), &value, mask);
            value
        }
        SassOp::PackPredicates => {
            let which = parts.sources.last().map_or(0, immediate_value) as u32;
            let of =
                |l: usize| (0..7).map(|p| (w.predicate(p, false, false) >> l & 1) << p).sum::<u32>() & which;
            LaneWords { v: std::array::from_fn(of), known: u32::MAX }
        }
        SassOp::ToFloat { double, signed } => {
            let low = source(0);
            let high = if double { upper(w, &parts) } else { LaneWords::splat(0) };
            low.zip_map(high, high, |low, high, _| match (double, signed) {
                (true, true) => ((u64::from(high) << 32 | u64::from(low)) as i64 as f32).to_bits(),
                (true, false) => ((u64::from(high) << 32 | u64::from(low)) as f32).to_bits(),
                (false, true) => (low as i32 as f32).to_bits(),
                (false, false) => (low as f32).to_bits(),
            })
        }
        SassOp::ToInteger { double, signed } => {
            let from = source(0);
            let whole = |v: u32| {
                let v = f32::from_bits(v);
                match (double, signed) {
                    (true, true) => v as i64 as u64,
                    (true, false) => v as u64,
                    (false, true) => u64::from(v as i32 as u32),
                    (false, false) => u64::from(v as u32),
                }
            };
            if double {
                w.set(next_register(result, 1), &from.map(|v| (whole(v) >> 32) as u32), mask);
            }
            from.map(|v| whole(v) as u32)
        }
        // The result is slightly too small, as that of an approximation may be: then a quotient is corrected
        // upwards.
        SassOp::Reciprocal => source(0).map(|v| (1.0 / f32::from_bits(v)).to_bits()),
        SassOp::Halves => {
            let half = |n: usize| match parts.sources.get(n) {
                Some(SassOperand::Other(text)) => text.parse().ok().map(half_bits),
                _ => None,
            };
            match (half(2), half(3)) {
                (Some(high), Some(low)) => LaneWords::splat(high << 16 | low),
                _ => LaneWords::UNKNOWN,
            }
        }
        _ => return false,
    };
    w.set(result, &value, mask);
    true
}

/// A source in each lane.
pub fn read_source(w: &WalkedWarp, operand: &SassOperand, c: &dyn ConstantReader) -> LaneWords {
    match operand {
        SassOperand::Register { reg, negated, inverted } => {
            let value = w.get(*reg);
            match (*negated, *inverted) {
                (true, _) => value.map(u32::wrapping_neg),
                (_, true) => value.map(|v| !v),
                _ => value,
            }
        }
        SassOperand::Immediate(value) => LaneWords::splat(*value as u32),
        SassOperand::Constant { bank, offset, index, negated } => {
            let word = |at: i64| {
                c.constant(*bank, *offset + at).map(|v| if *negated { v.wrapping_neg() } else { v })
            };
            match index {
                None => word(0).map_or(LaneWords::UNKNOWN, LaneWords::splat),
                Some(index) => {
                    let index = w.get(*index);
                    let mut value = LaneWords::UNKNOWN;
                    for l in active_lanes(index.known) {
                        if let Some(found) = word(i64::from(index.v[l] as i32)) {
                            value.v[l] = found;
                            value.known |= 1 << l;
                        }
                    }
                    value
                }
            }
        }
        _ => LaneWords::UNKNOWN,
    }
}

/// The f16 that a number is.
fn half_bits(value: f64) -> u32 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let size = value.abs();
    let exponent = if size > 0.0 { size.log2().floor() } else { f64::NEG_INFINITY };
    let bits = match () {
        () if exponent > 15.0 => 0x7c00,
        () if exponent < -14.0 => (size * 2f64.powi(24)).round() as u32,
        () => {
            ((exponent as i32 + 15) as u32) << 10 | ((size / exponent.exp2() - 1.0) * 1024.0).round() as u32
        }
    };
    sign | bits
}

/// The upper word of the first source.
fn upper(w: &WalkedWarp, parts: &OperandGroups<'_>) -> LaneWords {
    match parts.sources.first() {
        Some(SassOperand::Register { reg, .. }) => w.get(next_register(*reg, 1)),
        _ => LaneWords::splat(0),
    }
}

pub fn immediate_value(operand: &SassOperand) -> i64 {
    match operand {
        SassOperand::Immediate(value) => *value,
        _ => 0,
    }
}

/// A bit per lane whose value is known and is so.
fn bits(value: &LaneWords, is: impl Fn(u32) -> bool) -> u32 {
    active_lanes(value.known).filter(|&l| is(value.v[l])).map(|l| 1 << l).sum()
}

/// A predicate behind the sources, from the front.
fn last(w: &WalkedWarp, parts: &OperandGroups<'_>, at: usize, otherwise: bool) -> u32 {
    match parts.last.get(at) {
        Some(&(number, uniform, negated)) => w.predicate(number, uniform, negated),
        None => {
            if otherwise {
                u32::MAX
            } else {
                0
            }
        }
    }
}

/// A negated term of a sum is its inverse and one more, so that carries are right.
fn terms(
    w: &WalkedWarp,
    operand: Option<&SassOperand>,
    extended: bool,
    c: &dyn ConstantReader,
) -> (LaneWords, u64) {
    match operand {
        Some(SassOperand::Register { reg, negated: true, .. }) => {
            (w.get(*reg).map(|v| !v), u64::from(!extended))
        }
        Some(operand) => (read_source(w, operand, c), 0),
        None => (LaneWords::splat(0), 0),
    }
}

fn add(
    w: &WalkedWarp,
    parts: &OperandGroups<'_>,
    extended: bool,
    c: &dyn ConstantReader,
) -> (LaneWords, [u32; 2]) {
    let of = |n: usize| terms(w, parts.sources.get(n), extended, c);
    let ((a, more_a), (b, more_b), (d, more_d)) = (of(0), of(1), of(2));
    let carried = match extended {
        true => [last(w, parts, 0, false), last(w, parts, 1, false)],
        false => [0, 0],
    };
    let (mut out, mut carries) = (LaneWords { v: [0; LANES], known: a.known & b.known & d.known }, [0, 0]);
    for l in 0..LANES {
        let carry = u64::from(carried[0] >> l & 1) + u64::from(carried[1] >> l & 1);
        let sum =
            u64::from(a.v[l]) + u64::from(b.v[l]) + u64::from(d.v[l]) + more_a + more_b + more_d + carry;
        out.v[l] = sum as u32;
        carries[0] |= u32::from(sum >> 32 >= 1) << l;
        carries[1] |= u32::from(sum >> 32 >= 2) << l;
    }
    (out, carries)
}

fn write_carries(w: &mut WalkedWarp, parts: &OperandGroups<'_>, carries: &[u32; 2], mask: u32) {
    for (&(number, uniform), bits) in parts.out.iter().zip(carries) {
        w.set_predicate(number, uniform, *bits, mask);
    }
}

fn multiply(
    w: &mut WalkedWarp,
    parts: &OperandGroups<'_>,
    (part, signed, extended): (ProductPart, bool, bool),
    mask: u32,
    c: &dyn ConstantReader,
) -> bool {
    let Some(result) = parts.result else { return false };
    let source = |n: usize| parts.sources.get(n).map_or(LaneWords::splat(0), |o| read_source(w, o, c));
    let (a, b, low) = (source(0), source(1), source(2));
    // The third source of a wide product is a pair, of which the upper word is added to the upper word.
    let high = match (part, parts.sources.get(2)) {
        (ProductPart::Low, _) => LaneWords::splat(0),
        (_, Some(SassOperand::Register { reg, .. })) => w.get(next_register(*reg, 1)),
        _ => LaneWords::splat(0),
    };
    let negated = matches!(parts.sources.get(2), Some(SassOperand::Register { negated: true, .. }));
    let carried = if extended { last(w, parts, 0, false) } else { 0 };
    let (mut lower, mut upper, mut carries) = (LaneWords::UNKNOWN, LaneWords::UNKNOWN, 0);
    let known = a.known & b.known & low.known;
    (lower.known, upper.known) = (known, known & high.known);
    for l in 0..LANES {
        let product = match signed && part != ProductPart::Low {
            true => i64::from(a.v[l] as i32).wrapping_mul(i64::from(b.v[l] as i32)) as u64,
            false => u64::from(a.v[l]) * u64::from(b.v[l]),
        };
        let third = match part {
            ProductPart::Low => u64::from(low.v[l]),
            _ if negated => (u64::from(high.v[l]) << 32 | u64::from(low.v[l].wrapping_neg())).wrapping_neg(),
            _ => u64::from(high.v[l]) << 32 | u64::from(low.v[l]),
        };
        let (sum, over) = product.overflowing_add(third);
        let (sum, more) = sum.overflowing_add(u64::from(carried >> l & 1));
        carries |= u32::from(over || more) << l;
        (lower.v[l], upper.v[l]) = (sum as u32, (sum >> 32) as u32);
    }
    match part {
        ProductPart::Low => w.set(result, &lower, mask),
        ProductPart::High => w.set(result, &upper, mask),
        ProductPart::Both => {
            w.set(result, &lower, mask);
            w.set(next_register(result, 1), &upper, mask);
        }
    }
    write_carries(w, parts, &[carries, 0], mask);
    true
}

fn shift_add(
    w: &WalkedWarp,
    parts: &OperandGroups<'_>,
    (high, sign, extended): (bool, bool, bool),
    c: &dyn ConstantReader,
) -> (LaneWords, [u32; 2]) {
    let a = parts.sources.first().map_or(LaneWords::splat(0), |o| read_source(w, o, c));
    let (b, more) = terms(w, parts.sources.get(1), extended, c);
    let by = parts.sources.last().map_or(0, immediate_value) as u32;
    let above = match (high, sign) {
        (true, true) => a.map(|v| ((v as i32) >> 31) as u32),
        (true, false) => parts.sources.get(2).map_or(LaneWords::splat(0), |o| read_source(w, o, c)),
        _ => LaneWords::splat(0),
    };
    let carried = if extended { last(w, parts, 0, false) } else { 0 };
    let (mut out, mut carries) = (LaneWords { v: [0; LANES], known: a.known & b.known & above.known }, 0);
    for l in 0..LANES {
        let shifted = (u64::from(above.v[l]) << 32 | u64::from(a.v[l])).checked_shl(by).unwrap_or(0);
        let word = if high { shifted >> 32 } else { shifted & 0xffff_ffff };
        let sum = word + u64::from(b.v[l]) + more + u64::from(carried >> l & 1);
        out.v[l] = sum as u32;
        carries |= u32::from(sum >> 32 != 0) << l;
    }
    (out, [carries, 0])
}

/// The pair `{b, a}` is shifted; the result is one of its words.
fn shift(
    a: u32,
    by: u32,
    b: u32,
    (right, high, signed, double, wrap): (bool, bool, bool, bool, bool),
) -> u32 {
    let width = if double { 64 } else { 32 };
    let by = if wrap { by % width } else { by.min(width) };
    // A shift to the left of one word has it in the lower place.
    let pair = u64::from(b) << 32 | u64::from(a);
    let shifted = match (right, signed) {
        (true, true) => (pair as i64 >> by.min(63)) as u64,
        (true, false) => pair.checked_shr(by).unwrap_or(0),
        (false, _) => pair.checked_shl(by).unwrap_or(0),
    };
    if high { (shifted >> 32) as u32 } else { shifted as u32 }
}

fn logic(a: u32, b: u32, c: u32, table: u32) -> u32 {
    (0..8).filter(|row| table >> row & 1 == 1).fold(0, |out, row| {
        let pick = |v: u32, bit: u32| if row >> bit & 1 == 1 { v } else { !v };
        out | pick(a, 2) & pick(b, 1) & pick(c, 0)
    })
}

fn permute(a: u32, selector: u32, c: u32) -> u32 {
    let pair = u64::from(c) << 32 | u64::from(a);
    (0..4).fold(0, |out, at| {
        let nibble = selector >> (4 * at) & 15;
        let byte = (pair >> (8 * (nibble & 7))) as u8;
        let byte = if nibble & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        out | u32::from(byte) << (8 * at)
    })
}

fn compare(
    w: &mut WalkedWarp,
    i: &SassInstr,
    (how, signed, join, extended): (ComparisonOp, bool, PredicateJoin, bool),
    mask: u32,
    c: &dyn ConstantReader,
) {
    let parts = OperandGroups::group(&i.operands, false);
    let source = |n: usize| parts.sources.get(n).map_or(LaneWords::splat(0), |o| read_source(w, o, c));
    let (a, b) = (source(0), source(1));
    let joined = last(w, &parts, 0, true);
    let below = if extended { last(w, &parts, 1, false) } else { 0 };
    let known = a.known & b.known;
    let mut found = 0u32;
    for l in active_lanes(known) {
        let order = match signed {
            true => (a.v[l] as i32).cmp(&(b.v[l] as i32)),
            false => a.v[l].cmp(&b.v[l]),
        };
        // For equal upper words the lower ones decide.
        let lower = below >> l & 1 == 1;
        let holds = match how {
            ComparisonOp::Ne => order.is_ne() || extended && lower,
            ComparisonOp::Eq => order.is_eq() && (!extended || lower),
            ComparisonOp::Lt | ComparisonOp::Gt | ComparisonOp::Le | ComparisonOp::Ge
                if extended && order.is_eq() =>
            {
                lower
            }
            ComparisonOp::Lt => order.is_lt(),
            ComparisonOp::Le => order.is_le(),
            ComparisonOp::Gt => order.is_gt(),
            ComparisonOp::Ge => order.is_ge(),
        };
        found |= u32::from(holds) << l;
    }
    let joining = |bits: u32| match join {
        PredicateJoin::And => bits & joined,
        PredicateJoin::Or => bits | joined,
        PredicateJoin::Xor => bits ^ joined,
    };
    let results = [joining(found), joining(!found)];
    for (&(number, uniform), bits) in parts.out.iter().zip(results) {
        w.set_predicate(number, uniform, bits, mask);
    }
}

fn predicate_logic(w: &mut WalkedWarp, i: &SassInstr, mask: u32) {
    let of = |n: usize| match i.operands.get(n) {
        Some(SassOperand::Predicate { number, uniform, negated }) => w.predicate(*number, *uniform, *negated),
        _ => u32::MAX,
    };
    let [a, b, c] = [of(2), of(3), of(4)];
    let tables = [5, 6].map(|n| i.operands.get(n).map_or(0, immediate_value) as u32);
    let results = tables.map(|table| logic(a, b, c, table));
    for (n, bits) in results.into_iter().enumerate() {
        if let Some(SassOperand::Predicate { number, uniform, .. }) = i.operands.get(n) {
            w.set_predicate(*number, *uniform, bits, mask);
        }
    }
}

fn vote(w: &mut WalkedWarp, i: &SassInstr, all: bool, mask: u32) {
    let asked = i.operands.iter().rev().find_map(|o| match o {
        SassOperand::Predicate { number, uniform, negated } => Some(w.predicate(*number, *uniform, *negated)),
        _ => None,
    });
    let bits = asked.unwrap_or(u32::MAX) & mask;
    let holds = if all { bits == mask } else { bits != 0 };
    for operand in &i.operands[..i.operands.len().saturating_sub(1)] {
        match operand {
            SassOperand::Register { reg, .. } => w.set(*reg, &LaneWords::splat(bits), mask),
            SassOperand::Predicate { number, uniform, .. } => {
                w.set_predicate(*number, *uniform, if holds { u32::MAX } else { 0 }, mask);
            }
            _ => {}
        }
    }
}

fn unpack(w: &mut WalkedWarp, i: &SassInstr, mask: u32, c: &dyn ConstantReader) {
    let from = i.operands.get(1).map_or(LaneWords::UNKNOWN, |o| read_source(w, o, c));
    let which = i.operands.get(2).map_or(0, immediate_value) as u32;
    for number in (0..7u8).filter(|p| which >> p & 1 == 1) {
        w.set_predicate(number, false, bits(&from, |v| v >> number & 1 == 1), mask);
    }
}

/// The register that an instruction writes, if it writes one.
pub fn result_register(i: &SassInstr) -> Option<SassRegister> {
    OperandGroups::group(&i.operands, true).result
}
