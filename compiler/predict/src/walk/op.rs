//! Operations of instructions, as far as integers, addresses and branches depend on them, and the units that
//! execute them.

use crate::sass::{SassInstr, SassOperand, SassRegister};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SassOp {
    Move,
    /// `a + b + c`, with carries in if it is extended.
    Add {
        extended: bool,
    },
    /// `a * b + c`: its lower word, its upper one, or both.
    Multiply {
        part: ProductPart,
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
        how: ComparisonOp,
        signed: bool,
        join: PredicateJoin,
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
        kind: AccessKind,
    },
    Shared {
        bytes: u64,
        store: bool,
    },
    Matrices {
        count: u32,
    },
    Local,
    Shuffle(ShuffleMode),
    Branch,
    Exit,
    Call,
    Return,
    Barrier,
    CommitCopies,
    WaitCopies,
    Nothing,
    /// Results are floats: this many registers, or predicates.
    Float {
        registers: u8,
    },
    Decision,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProductPart {
    Low,
    High,
    Both,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ComparisonOp {
    Lt,
    Le,
    Gt,
    Ge,
    Eq,
    Ne,
}

/// The operation that joins a comparison with a predicate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PredicateJoin {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessKind {
    Load,
    Store,
    /// A copy to shared memory, beside the first level or through it.
    Copy {
        bypass: bool,
    },
    Atomic,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShuffleMode {
    Index,
    Up,
    Down,
    Xor,
}

/// Units of a multiprocessor. Each scheduler has a quarter of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecutionPipe {
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

impl ExecutionPipe {
    pub const ALL: [ExecutionPipe; 8] = [
        ExecutionPipe::Float,
        ExecutionPipe::Integer,
        ExecutionPipe::Half,
        ExecutionPipe::Special,
        ExecutionPipe::Convert,
        ExecutionPipe::Load,
        ExecutionPipe::Tensor,
        ExecutionPipe::None,
    ];

    pub fn name(self) -> &'static str {
        match self {
            ExecutionPipe::Float => "float",
            ExecutionPipe::Integer => "integer",
            ExecutionPipe::Half => "half",
            ExecutionPipe::Special => "special",
            ExecutionPipe::Convert => "convert",
            ExecutionPipe::Load => "load",
            ExecutionPipe::Tensor => "tensor",
            ExecutionPipe::None => "none",
        }
    }
}

/// An instruction that no rule here knows is none.
pub fn decode(instr: &SassInstr) -> Option<(SassOp, ExecutionPipe)> {
    let name = instr.name.as_str();
    let uniform = name.strip_prefix('U').filter(|rest| UNIFORM.contains(rest));
    let (op, pipe) = match uniform {
        Some(rest) => (integer(rest, instr)?, ExecutionPipe::None),
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

fn integer_pipe(name: &str) -> ExecutionPipe {
    match name {
        "POPC" | "FLO" | "BREV" => ExecutionPipe::Special,
        "I2F" | "F2I" | "I2FP" => ExecutionPipe::Convert,
        "MUFU" => ExecutionPipe::Special,
        "S2R" | "S2UR" | "CS2R" | "LDC" | "R2UR" | "VOTEU" => ExecutionPipe::None,
        _ => ExecutionPipe::Integer,
    }
}

fn integer(name: &str, i: &SassInstr) -> Option<SassOp> {
    let signed = !(i.has("U32") || i.has("U64"));
    let extended = i.has("X");
    let double = i.modifiers.iter().any(|m| m == "U64" || m == "S64");
    Some(match name {
        "MOV" => SassOp::Move,
        "IADD3" | "VIADD" | "IADD" => SassOp::Add { extended },
        "IMAD" => {
            let part = if i.has("WIDE") {
                ProductPart::Both
            } else if i.has("HI") {
                ProductPart::High
            } else {
                ProductPart::Low
            };
            SassOp::Multiply { part, signed, extended }
        }
        "LEA" => SassOp::ShiftAdd { high: i.has("HI"), sign: i.has("SX32"), extended },
        "SHF" => {
            let signed = i.has("S32") || i.has("S64");
            SassOp::Shift { right: i.has("R"), high: i.has("HI"), signed, double, wrap: i.has("W") }
        }
        "LOP3" => SassOp::Logic,
        "PLOP3" => SassOp::PredicateLogic,
        "ISETP" => SassOp::Compare { how: compare(i)?, signed, join: join(i), extended: i.has("EX") },
        "SEL" | "FSEL" => SassOp::Select,
        "PRMT" => SassOp::Permute,
        "SGXT" => SassOp::Extend { signed },
        "IMNMX" | "VIMNMX" => SassOp::Least { signed },
        "IABS" => SassOp::Absolute,
        "POPC" => SassOp::Ones,
        "FLO" => SassOp::Leading { signed, shift: i.has("SH") },
        "BREV" => SassOp::Reverse,
        "BMSK" => SassOp::Mask,
        "S2R" | "S2UR" => SassOp::Special,
        "CS2R" => SassOp::Zero,
        "R2UR" => SassOp::ToUniform,
        "VOTE" | "VOTEU" => SassOp::Vote { all: i.has("ALL") },
        "P2R" => SassOp::PackPredicates,
        "R2P" => SassOp::UnpackPredicates,
        "I2F" | "I2FP" if !i.has("F64") => SassOp::ToFloat { double, signed },
        "F2I" if !i.has("F64") => SassOp::ToInteger { double, signed },
        "MUFU" if i.has("RCP") => SassOp::Reciprocal,
        "LDC" => SassOp::Constant { bytes: bytes(i) },
        _ => return None,
    })
}

fn compare(i: &SassInstr) -> Option<ComparisonOp> {
    let known = [
        ("LT", ComparisonOp::Lt),
        ("LE", ComparisonOp::Le),
        ("GT", ComparisonOp::Gt),
        ("GE", ComparisonOp::Ge),
        ("EQ", ComparisonOp::Eq),
        ("NE", ComparisonOp::Ne),
    ];
    known.into_iter().find(|(name, _)| i.has(name)).map(|(_, how)| how)
}

fn join(i: &SassInstr) -> PredicateJoin {
    match () {
        () if i.has("OR") => PredicateJoin::Or,
        () if i.has("XOR") => PredicateJoin::Xor,
        () => PredicateJoin::And,
    }
}

fn bytes(i: &SassInstr) -> u64 {
    let of = |m: &String| match m.as_str() {
        "128" => Some(16),
        "64" => Some(8),
        "U8" | "S8" => Some(1),
        "U16" | "S16" => Some(2),
        _ => None,
    };
    i.modifiers.iter().find_map(of).unwrap_or(4)
}

fn memory(name: &str, i: &SassInstr) -> Option<(SassOp, ExecutionPipe)> {
    let bytes = bytes(i);
    let op = match name {
        "LDG" | "LD" => SassOp::Global { bytes, kind: AccessKind::Load },
        "STG" | "ST" => SassOp::Global { bytes, kind: AccessKind::Store },
        "LDGSTS" => SassOp::Global { bytes, kind: AccessKind::Copy { bypass: i.has("BYPASS") } },
        "ATOM" | "ATOMG" | "RED" | "REDG" => SassOp::Global { bytes, kind: AccessKind::Atomic },
        "LDS" => SassOp::Shared { bytes, store: false },
        "STS" | "ATOMS" => SassOp::Shared { bytes, store: true },
        "LDSM" => {
            let count = i.modifiers.last().and_then(|m| m.parse().ok()).filter(|n| [1, 2, 4].contains(n));
            SassOp::Matrices { count: count.unwrap_or(1) }
        }
        "LDL" | "STL" => SassOp::Local,
        "SHFL" => SassOp::Shuffle(match () {
            () if i.has("BFLY") => ShuffleMode::Xor,
            () if i.has("UP") => ShuffleMode::Up,
            () if i.has("DOWN") => ShuffleMode::Down,
            () => ShuffleMode::Index,
        }),
        _ => return None,
    };
    Some((op, ExecutionPipe::Load))
}

fn flow(name: &str) -> Option<(SassOp, ExecutionPipe)> {
    let op = match name {
        "BRA" => SassOp::Branch,
        "EXIT" => SassOp::Exit,
        "CALL" => SassOp::Call,
        "RET" => SassOp::Return,
        "BAR" => SassOp::Barrier,
        "LDGDEPBAR" => SassOp::CommitCopies,
        "DEPBAR" => SassOp::WaitCopies,
        "NOP" | "BSSY" | "BSYNC" | "BREAK" | "WARPSYNC" | "YIELD" | "MEMBAR" | "ERRBAR" | "CCTL" | "BMOV"
        | "NANOSLEEP" | "FENCE" | "UCGABAR_ARV" | "BPT" | "ENDCOLLECTIVE" => SassOp::Nothing,
        _ => return None,
    };
    Some((op, ExecutionPipe::None))
}

fn float(name: &str, i: &SassInstr) -> Option<(SassOp, ExecutionPipe)> {
    let one = SassOp::Float { registers: 1 };
    Some(match name {
        "FADD" | "FMUL" | "FFMA" | "FSWZADD" => (one, ExecutionPipe::Float),
        "FMNMX" | "FSET" | "HMNMX2" | "FRND" => (one, ExecutionPipe::Integer),
        "HFMA2" if is_constant(i) => (SassOp::Halves, ExecutionPipe::Half),
        "HADD2" | "HMUL2" | "HFMA2" | "HSET2" => (one, ExecutionPipe::Half),
        "F2FP" | "F2F" | "I2FP" | "I2F" | "F2I" => (SassOp::Float { registers: 2 }, ExecutionPipe::Convert),
        "MUFU" => (one, ExecutionPipe::Special),
        "IDP" | "IDP4A" | "REDUX" | "MATCH" | "LEPC" | "CREDUX" | "IDP2A" | "VABSDIFF" | "VABSDIFF4"
        | "MOVM" => (one, ExecutionPipe::Integer),
        "DADD" | "DMUL" | "DFMA" | "DMNMX" => (SassOp::Float { registers: 2 }, ExecutionPipe::Special),
        "HMMA" | "IMMA" | "QMMA" | "BMMA" => {
            let halves = name == "HMMA" && !i.has("F32");
            (SassOp::Float { registers: if halves { 2 } else { 4 } }, ExecutionPipe::Tensor)
        }
        "FSETP" | "HSETP2" | "DSETP" | "FCHK" => (SassOp::Decision, ExecutionPipe::Integer),
        _ => return None,
    })
}

fn is_constant(i: &SassInstr) -> bool {
    let zero = |n: usize| matches!(i.operands.get(n), Some(SassOperand::Register { reg, .. }) if reg.number == SassRegister::ZERO);
    zero(1) && zero(2) && i.operands.len() == 5
}

/// Operations of a product of fragments for a warp, as many as 16-bit ones would be in the same time.
pub fn tensor_operations(instr: &SassInstr) -> u64 {
    let shape = instr.modifiers.iter().find_map(|m| m.parse::<u64>().ok());
    let (m, n, k) = match shape {
        Some(16816) => (16, 8, 16),
        Some(1688) => (16, 8, 8),
        Some(884) => (8, 8, 4),
        Some(16832) => (16, 8, 32),
        Some(8816) => (8, 8, 16),
        _ => (16, 8, 16),
    };
    // Operations on 8 bits are twice as fast.
    let narrow = matches!(instr.name.as_str(), "IMMA" | "QMMA");
    2 * m * n * k / if narrow { 2 } else { 1 }
}
