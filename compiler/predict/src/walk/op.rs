//! What an instruction does, as far as integers, addresses and branches depend on it, and which units execute it.

use crate::sass::{Instr, Operand, Reg};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Move,
    /// `a + b + c`, with carries in if it is extended.
    Add {
        extended: bool,
    },
    /// `a * b + c`: its lower word, its upper one, or both.
    Multiply {
        part: Part,
        signed: bool,
        extended: bool,
    },
    /// `(a << k) + b`, or of the upper word of that shift.
    ShiftAdd {
        high: bool,
        sign: bool,
        extended: bool,
    },
    Shift {
        right: bool,
        high: bool,
        signed: bool,
        double: bool,
        wrap: bool,
    },
    Logic,
    PredicateLogic,
    Compare {
        how: Compare,
        signed: bool,
        join: Join,
        extended: bool,
    },
    Select,
    Permute,
    Extend {
        signed: bool,
    },
    Least {
        signed: bool,
    },
    Absolute,
    Ones,
    Leading {
        signed: bool,
        shift: bool,
    },
    Reverse,
    Mask,
    Special,
    Zero,
    ToUniform,
    Vote {
        all: bool,
    },
    PackPredicates,
    UnpackPredicates,
    ToFloat {
        double: bool,
        signed: bool,
    },
    ToInteger {
        double: bool,
        signed: bool,
    },
    Reciprocal,
    /// A constant, as two halves of 16 bits: `-0 * 0 + them`.
    Halves,
    Constant {
        bytes: u64,
    },
    Global {
        bytes: u64,
        kind: Access,
    },
    Shared {
        bytes: u64,
        store: bool,
    },
    Matrices {
        count: u32,
    },
    Local,
    Shuffle(Shuffle),
    Branch,
    Exit,
    Call,
    Return,
    Barrier,
    CommitCopies,
    WaitCopies,
    Nothing,
    /// Results are floats: so many registers, or predicates.
    Float {
        registers: u8,
    },
    Decision,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    Low,
    High,
    Both,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compare {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

/// How a comparison is joined with a predicate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Join {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Load,
    Store,
    /// To shared memory, beside the first level or through it.
    Copy {
        bypass: bool,
    },
    Atomic,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shuffle {
    Index,
    Up,
    Down,
    Xor,
}

/// Units of a multiprocessor. Each scheduler has a quarter of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pipe {
    Float,
    Integer,
    Half,
    Special,
    Convert,
    Load,
    Tensor,
    /// Branches, barriers and uniform instructions: only their turn of the scheduler counts.
    None,
}

impl Pipe {
    pub const ALL: [Pipe; 8] = [
        Pipe::Float,
        Pipe::Integer,
        Pipe::Half,
        Pipe::Special,
        Pipe::Convert,
        Pipe::Load,
        Pipe::Tensor,
        Pipe::None,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Pipe::Float => "float",
            Pipe::Integer => "integer",
            Pipe::Half => "half",
            Pipe::Special => "special",
            Pipe::Convert => "convert",
            Pipe::Load => "load",
            Pipe::Tensor => "tensor",
            Pipe::None => "none",
        }
    }
}

/// An instruction that no rule here knows is none.
pub fn decode(instr: &Instr) -> Option<(Op, Pipe)> {
    let name = instr.name.as_str();
    let uniform = name.strip_prefix('U').filter(|rest| UNIFORM.contains(rest));
    let (op, pipe) = match uniform {
        Some(rest) => (integer(rest, instr)?, Pipe::None),
        None => integer(name, instr)
            .map(|op| (op, integer_pipe(name)))
            .or_else(|| memory(name, instr))
            .or_else(|| flow(name))
            .or_else(|| float(name, instr))?,
    };
    Some((op, pipe))
}

/// Instructions of the uniform datapath, by the name that they have without `U`.
const UNIFORM: [&str; 22] = [
    "MOV", "IADD3", "IMAD", "LEA", "SHF", "LOP3", "PLOP3", "ISETP", "SEL", "PRMT", "SGXT", "IMNMX", "IABS",
    "POPC", "FLO", "BREV", "BMSK", "LDC", "CS2R", "USHF", "VIADD", "VIMNMX",
];

fn integer_pipe(name: &str) -> Pipe {
    match name {
        "POPC" | "FLO" | "BREV" => Pipe::Special,
        "I2F" | "F2I" | "I2FP" => Pipe::Convert,
        "MUFU" => Pipe::Special,
        "S2R" | "S2UR" | "CS2R" | "LDC" | "R2UR" | "VOTEU" => Pipe::None,
        _ => Pipe::Integer,
    }
}

fn integer(name: &str, i: &Instr) -> Option<Op> {
    let signed = !(i.has("U32") || i.has("U64"));
    let extended = i.has("X");
    let double = i.modifiers.iter().any(|m| m == "U64" || m == "S64");
    Some(match name {
        "MOV" => Op::Move,
        "IADD3" | "VIADD" | "IADD" => Op::Add { extended },
        "IMAD" => {
            let part = if i.has("WIDE") {
                Part::Both
            } else if i.has("HI") {
                Part::High
            } else {
                Part::Low
            };
            Op::Multiply { part, signed, extended }
        }
        "LEA" => Op::ShiftAdd { high: i.has("HI"), sign: i.has("SX32"), extended },
        "SHF" => {
            let signed = i.has("S32") || i.has("S64");
            Op::Shift { right: i.has("R"), high: i.has("HI"), signed, double, wrap: i.has("W") }
        }
        "LOP3" => Op::Logic,
        "PLOP3" => Op::PredicateLogic,
        "ISETP" => Op::Compare { how: compare(i)?, signed, join: join(i), extended: i.has("EX") },
        "SEL" | "FSEL" => Op::Select,
        "PRMT" => Op::Permute,
        "SGXT" => Op::Extend { signed },
        "IMNMX" | "VIMNMX" => Op::Least { signed },
        "IABS" => Op::Absolute,
        "POPC" => Op::Ones,
        "FLO" => Op::Leading { signed, shift: i.has("SH") },
        "BREV" => Op::Reverse,
        "BMSK" => Op::Mask,
        "S2R" | "S2UR" => Op::Special,
        "CS2R" => Op::Zero,
        "R2UR" => Op::ToUniform,
        "VOTE" | "VOTEU" => Op::Vote { all: i.has("ALL") },
        "P2R" => Op::PackPredicates,
        "R2P" => Op::UnpackPredicates,
        "I2F" | "I2FP" if !i.has("F64") => Op::ToFloat { double, signed },
        "F2I" if !i.has("F64") => Op::ToInteger { double, signed },
        "MUFU" if i.has("RCP") => Op::Reciprocal,
        "LDC" => Op::Constant { bytes: bytes(i) },
        _ => return None,
    })
}

fn compare(i: &Instr) -> Option<Compare> {
    let known = [
        ("LT", Compare::Lt),
        ("LE", Compare::Le),
        ("GT", Compare::Gt),
        ("GE", Compare::Ge),
        ("EQ", Compare::Eq),
        ("NE", Compare::Ne),
    ];
    known.into_iter().find(|(name, _)| i.has(name)).map(|(_, how)| how)
}

fn join(i: &Instr) -> Join {
    match () {
        () if i.has("OR") => Join::Or,
        () if i.has("XOR") => Join::Xor,
        () => Join::And,
    }
}

fn bytes(i: &Instr) -> u64 {
    let of = |m: &String| match m.as_str() {
        "128" => Some(16),
        "64" => Some(8),
        "U8" | "S8" => Some(1),
        "U16" | "S16" => Some(2),
        _ => None,
    };
    i.modifiers.iter().find_map(of).unwrap_or(4)
}

fn memory(name: &str, i: &Instr) -> Option<(Op, Pipe)> {
    let bytes = bytes(i);
    let op = match name {
        "LDG" | "LD" => Op::Global { bytes, kind: Access::Load },
        "STG" | "ST" => Op::Global { bytes, kind: Access::Store },
        "LDGSTS" => Op::Global { bytes, kind: Access::Copy { bypass: i.has("BYPASS") } },
        "ATOM" | "ATOMG" | "RED" | "REDG" => Op::Global { bytes, kind: Access::Atomic },
        "LDS" => Op::Shared { bytes, store: false },
        "STS" | "ATOMS" => Op::Shared { bytes, store: true },
        "LDSM" => {
            let count = i.modifiers.last().and_then(|m| m.parse().ok()).filter(|n| [1, 2, 4].contains(n));
            Op::Matrices { count: count.unwrap_or(1) }
        }
        "LDL" | "STL" => Op::Local,
        "SHFL" => Op::Shuffle(match () {
            () if i.has("BFLY") => Shuffle::Xor,
            () if i.has("UP") => Shuffle::Up,
            () if i.has("DOWN") => Shuffle::Down,
            () => Shuffle::Index,
        }),
        _ => return None,
    };
    Some((op, Pipe::Load))
}

fn flow(name: &str) -> Option<(Op, Pipe)> {
    let op = match name {
        "BRA" => Op::Branch,
        "EXIT" => Op::Exit,
        "CALL" => Op::Call,
        "RET" => Op::Return,
        "BAR" => Op::Barrier,
        "LDGDEPBAR" => Op::CommitCopies,
        "DEPBAR" => Op::WaitCopies,
        "NOP" | "BSSY" | "BSYNC" | "BREAK" | "WARPSYNC" | "YIELD" | "MEMBAR" | "ERRBAR" | "CCTL" | "BMOV"
        | "NANOSLEEP" | "FENCE" | "UCGABAR_ARV" | "BPT" | "ENDCOLLECTIVE" => Op::Nothing,
        _ => return None,
    };
    Some((op, Pipe::None))
}

fn float(name: &str, i: &Instr) -> Option<(Op, Pipe)> {
    let one = Op::Float { registers: 1 };
    Some(match name {
        "FADD" | "FMUL" | "FFMA" | "FSWZADD" => (one, Pipe::Float),
        "FMNMX" | "FSET" | "HMNMX2" | "FRND" => (one, Pipe::Integer),
        "HFMA2" if is_constant(i) => (Op::Halves, Pipe::Half),
        "HADD2" | "HMUL2" | "HFMA2" | "HSET2" => (one, Pipe::Half),
        "F2FP" | "F2F" | "I2FP" | "I2F" | "F2I" => (Op::Float { registers: 2 }, Pipe::Convert),
        "MUFU" => (one, Pipe::Special),
        "IDP" | "IDP4A" | "REDUX" | "MATCH" | "LEPC" | "CREDUX" | "IDP2A" | "VABSDIFF" | "VABSDIFF4"
        | "MOVM" => (one, Pipe::Integer),
        "DADD" | "DMUL" | "DFMA" | "DMNMX" => (Op::Float { registers: 2 }, Pipe::Special),
        "HMMA" | "IMMA" | "QMMA" | "BMMA" => {
            let halves = name == "HMMA" && !i.has("F32");
            (Op::Float { registers: if halves { 2 } else { 4 } }, Pipe::Tensor)
        }
        "FSETP" | "HSETP2" | "DSETP" | "FCHK" => (Op::Decision, Pipe::Integer),
        _ => return None,
    })
}

fn is_constant(i: &Instr) -> bool {
    let zero = |n: usize| matches!(i.operands.get(n), Some(Operand::Register { reg, .. }) if reg.number == Reg::ZERO);
    zero(1) && zero(2) && i.operands.len() == 5
}

/// Operations of a product of fragments for a warp, as many as 16-bit ones would be in the same time.
pub fn tensor_operations(instr: &Instr) -> u64 {
    let shape = instr.modifiers.iter().find_map(|m| m.parse::<u64>().ok());
    let (m, n, k) = match shape {
        Some(16816) => (16, 8, 16),
        Some(1688) => (16, 8, 8),
        Some(884) => (8, 8, 4),
        Some(16832) => (16, 8, 32),
        Some(8816) => (8, 8, 16),
        _ => (16, 8, 16),
    };
    // Those of 8 bits are twice as fast.
    let narrow = matches!(instr.name.as_str(), "IMMA" | "QMMA");
    2 * m * n * k / if narrow { 2 } else { 1 }
}
