//! Faults of a kernel or of its call that are found while it runs.

use super::cell::UndefinedResult;
use super::memory::AccessOrigin;
use std::fmt;

/// A kernel did something that is not allowed; carries the loop variables of the place where it happened.
#[derive(Debug, thiserror::Error)]
#[error("kernel {kernel}: {fault}{}", LoopVars(at))]
pub struct InterpError {
    pub kernel: String,
    pub fault: KernelFault,
    /// Loop variables around the failing statement, innermost first.
    pub at: Vec<(String, i64)>,
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KernelFault {
    #[error("argument {name}: expected {expected}, found {found}")]
    Argument { name: String, expected: String, found: String },
    #[error("buffer {buffer} begins at byte {address}: the kernel relies on a multiple of {align}")]
    Misplaced { buffer: String, address: u64, align: u32 },
    #[error("{action} of {buffer}[{index}] is out of bounds: the buffer has {len} elements")]
    OutOfBounds { action: MemoryAction, buffer: String, index: i64, len: usize },
    #[error("read of {buffer}[{index}], which was never written")]
    Poison { buffer: String, index: usize },
    #[error(
        "race on {buffer}[{index}]: {action} by {second} after {earlier} by {first} without a barrier that orders them"
    )]
    Race {
        buffer: String,
        index: usize,
        action: MemoryAction,
        second: AccessOrigin,
        earlier: MemoryAction,
        first: AccessOrigin,
    },
    #[error(
        "barrier reached by {active} of {threads} threads: all threads of a block must reach it together"
    )]
    NonUniformBarrier { active: usize, threads: usize },
    #[error(
        "{instr} in thread {thread} reads the value of thread {source_thread}, which is not active there"
    )]
    InactiveLane { instr: &'static str, thread: usize, source_thread: usize },
    #[error("{instr} in thread {thread}: lane mask {mask} is not in 0..32")]
    LaneMask { instr: &'static str, thread: usize, mask: i64 },
    #[error("{instr} by warp {warp}, of which {active} lanes are active: all 32 execute it together")]
    PartOfAWarp { instr: &'static str, warp: usize, active: usize },
    #[error("{instr} of {buffer}[{index}]: the place is no multiple of {align} bytes")]
    Misaligned { instr: &'static str, buffer: String, index: i64, align: u32 },
    #[error("{action} of {buffer}[{index}] by {who}: a copy that nobody has waited for {does} it")]
    UnderWay { action: MemoryAction, buffer: String, index: usize, who: AccessOrigin, does: &'static str },
    #[error("thread {thread} ends and has not waited for its copy to {buffer}[{index}]")]
    NotWaitedFor { thread: usize, buffer: String, index: usize },
    #[error("{op} of {a} and {b} is not defined: {}", undefined(*.why))]
    Undefined { op: &'static str, a: i64, b: i64, why: UndefinedResult },
    #[error("the kernel is not well formed: {0}")]
    Malformed(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryAction {
    Read,
    Write,
}

impl fmt::Display for MemoryAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryAction::Read => "read",
            MemoryAction::Write => "write",
        })
    }
}

fn undefined(why: UndefinedResult) -> &'static str {
    match why {
        UndefinedResult::DivisionByZero => "division by zero",
        UndefinedResult::DivisionOverflow => "the quotient does not fit",
        UndefinedResult::Shift => "the shift is not smaller than the width",
    }
}

struct LoopVars<'a>(&'a [(String, i64)]);

impl fmt::Display for LoopVars<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.0.iter().rev().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { " (at " } else { ", " })?;
        }
        if self.0.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

/// Result inside the interpreter; boxed because the error is large and rare.
pub(crate) type RunResult<T = ()> = Result<T, Box<LocatedFault>>;

/// A fault on its way out of the loops around it.
#[derive(Debug)]
pub(crate) struct LocatedFault {
    pub fault: KernelFault,
    pub at: Vec<(String, i64)>,
}

impl From<KernelFault> for Box<LocatedFault> {
    fn from(fault: KernelFault) -> Self {
        Box::new(LocatedFault { fault, at: Vec::new() })
    }
}
