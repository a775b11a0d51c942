//! Operands of instructions.

use super::PredicateGuard;

/// A register; `ZERO` of each kind reads as 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SassRegister {
    pub number: u8,
    pub uniform: bool,
}

impl SassRegister {
    pub const ZERO: u8 = 255;
}

#[derive(Clone, PartialEq, Debug)]
pub enum SassOperand {
    /// `-R4`, `~R4`, `R4.64`.
    Register {
        reg: SassRegister,
        negated: bool,
        inverted: bool,
    },
    /// `!P0`; number 7 is true.
    Predicate {
        number: u8,
        uniform: bool,
        negated: bool,
    },
    Immediate(i64),
    /// A float, or another operand that no address or branch comes from.
    Other(String),
    /// `-c[0x0][0x210]`.
    Constant {
        bank: u32,
        offset: i64,
        index: Option<SassRegister>,
        negated: bool,
    },
    Memory(SassAddress),
    Special(String),
    /// A label, until the function has been read.
    Label(String),
}

/// `desc[UR4][R2.64+UR6+0x10]`, `[R2.X4+0x10]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SassAddress {
    pub base: Option<SassRegister>,
    /// The base is a pair of registers.
    pub wide: bool,
    /// The factor of the base.
    pub scale: u32,
    pub more: Option<SassRegister>,
    pub offset: i64,
}

/// Operands between commas that are in no brackets.
pub(super) fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(|part| part.trim().trim_end_matches('}').trim()).filter(|part| !part.is_empty())
}

pub(super) fn guard(text: &str) -> Option<PredicateGuard> {
    match parse(text)? {
        SassOperand::Predicate { number, uniform, negated } => {
            Some(PredicateGuard { register: number, uniform, negated })
        }
        _ => None,
    }
}

pub(super) fn parse(text: &str) -> Option<SassOperand> {
    // An operand that is taken absolute is a float.
    if text.contains('|') {
        return Some(SassOperand::Other(text.to_string()));
    }
    let (mut negated, mut inverted, mut rest) = (false, false, text);
    loop {
        rest = match rest.chars().next()? {
            '-' if !rest[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                negated = true;
                &rest[1..]
            }
            '~' => {
                inverted = true;
                &rest[1..]
            }
            '!' => {
                negated = true;
                &rest[1..]
            }
            _ => break,
        };
    }
    if let Some(label) = rest.strip_prefix("`(") {
        return Some(SassOperand::Label(label.strip_suffix(')')?.to_string()));
    }
    if rest.starts_with("desc[") || rest.starts_with('[') {
        return memory(rest).map(SassOperand::Memory);
    }
    if let Some(constant) = rest.strip_prefix("c[") {
        return constant_of(constant, negated);
    }
    if rest.starts_with("SR") {
        return Some(SassOperand::Special(rest.to_string()));
    }
    let (name, suffix) = rest.split_once('.').unwrap_or((rest, ""));
    if let Some((number, uniform)) = predicate(name) {
        return Some(SassOperand::Predicate { number, uniform, negated });
    }
    // A half of a register is a value that this program does not compute.
    if let Some(reg) = register(name) {
        return Some(match suffix {
            "" | "64" | "reuse" | "64.reuse" => SassOperand::Register { reg, negated, inverted },
            _ => SassOperand::Other(rest.to_string()),
        });
    }
    if let Some(value) = integer(rest) {
        return Some(SassOperand::Immediate(if negated { -value } else { value }));
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || "+-._".contains(c);
    rest.chars().all(is_word).then(|| SassOperand::Other(rest.to_string()))
}

fn predicate(name: &str) -> Option<(u8, bool)> {
    let (name, uniform) = match name.strip_prefix("UP") {
        Some(rest) => (rest, true),
        None => (name.strip_prefix('P')?, false),
    };
    match name {
        "T" => Some((7, uniform)),
        number => number.parse().ok().filter(|n| *n < 7).map(|n| (n, uniform)),
    }
}

fn register(name: &str) -> Option<SassRegister> {
    let (name, uniform) = match name.strip_prefix("UR") {
        Some(rest) => (rest, true),
        None => (name.strip_prefix('R')?, false),
    };
    let number = if name == "Z" { SassRegister::ZERO } else { name.parse().ok()? };
    Some(SassRegister { number, uniform })
}

fn integer(text: &str) -> Option<i64> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |rest| (-1, rest));
    let value = i64::from_str_radix(digits.strip_prefix("0x")?, 16).ok()?;
    Some(sign * value)
}

fn constant_of(text: &str, negated: bool) -> Option<SassOperand> {
    let (bank, rest) = text.split_once("][")?;
    let bank = u32::try_from(integer(bank)?).ok()?;
    let address = memory(&format!("[{}", rest))?;
    Some(SassOperand::Constant { bank, offset: address.offset, index: address.base, negated })
}

fn memory(text: &str) -> Option<SassAddress> {
    let inner = text.rsplit_once('[')?.1;
    let inner = inner.split(']').next()?;
    let mut address = SassAddress { scale: 1, ..SassAddress::default() };
    for part in inner.replace("+-", "-").replace('-', "+-").split('+').filter(|part| !part.is_empty()) {
        if let Some(value) = integer(part) {
            address.offset += value;
            continue;
        }
        let (name, suffix) = part.split_once('.').unwrap_or((part, ""));
        let reg = register(name)?;
        if address.base.is_some() {
            address.more = Some(reg);
            continue;
        }
        address.base = Some(reg);
        for suffix in suffix.split('.').filter(|s| !s.is_empty()) {
            match suffix {
                "64" => address.wide = true,
                "U32" | "reuse" => {}
                _ => address.scale = suffix.strip_prefix('X')?.parse().ok()?,
            }
        }
    }
    Some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn reg(number: u8) -> SassRegister {
        SassRegister { number, uniform: false }
    }

    #[test]
    fn registers_predicates_and_numbers() {
        let register = |number| SassOperand::Register { reg: reg(number), negated: false, inverted: false };
        assert_eq!(parse("R12.reuse"), Some(register(12)));
        assert_eq!(parse("RZ"), Some(register(SassRegister::ZERO)));
        assert_eq!(parse("-R3"), Some(SassOperand::Register { reg: reg(3), negated: true, inverted: false }));
        let uniform = SassRegister { number: 5, uniform: true };
        assert_eq!(
            parse("~UR5"),
            Some(SassOperand::Register { reg: uniform, negated: false, inverted: true })
        );
        assert_eq!(parse("!UPT"), Some(SassOperand::Predicate { number: 7, uniform: true, negated: true }));
        assert_eq!(parse("-0x10"), Some(SassOperand::Immediate(-16)));
        assert_eq!(parse("-8388615"), Some(SassOperand::Other("-8388615".into())));
        assert_eq!(parse("R14.H0_H0"), Some(SassOperand::Other("R14.H0_H0".into())));
        assert_eq!(parse("|R2|.reuse"), Some(SassOperand::Other("|R2|.reuse".into())));
        assert_eq!(parse("SR_TID.X"), Some(SassOperand::Special("SR_TID.X".into())));
        assert_eq!([parse("R12 R13"), parse("$"), parse("")], [None, None, None]);
    }

    #[test]
    fn addresses() {
        let parsed = |text| match parse(text) {
            Some(SassOperand::Memory(address)) => address,
            other => panic!("{other:?}"),
        };
        let uniform = |number| Some(SassRegister { number, uniform: true });
        let wide = SassAddress { base: Some(reg(44)), wide: true, scale: 1, more: None, offset: -256 };
        assert_eq!(parsed("desc[UR4][R44.64+-0x100]"), wide);
        let both = SassAddress { base: Some(reg(12)), wide: false, scale: 1, more: uniform(4), offset: 8 };
        assert_eq!(parsed("[R12+UR4+0x8]"), both);
        let scaled = SassAddress { base: Some(reg(2)), wide: false, scale: 16, more: None, offset: 0 };
        assert_eq!(parsed("[R2.X16]"), scaled);
        assert_eq!(
            parsed("[UR4+0x4]"),
            SassAddress { base: uniform(4), scale: 1, offset: 4, ..SassAddress::default() }
        );
        let constant = SassOperand::Constant { bank: 0, offset: 0x210, index: None, negated: true };
        assert_eq!(parse("-c[0x0][0x210]"), Some(constant));
    }
}
