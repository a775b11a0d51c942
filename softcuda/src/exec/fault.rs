//! Faults of a program, and their places.

use std::fmt;

/// The kind of a fault; says which status the driver gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    OutOfBounds,
    Misaligned,
    /// A register, shared or global memory was read before it was written.
    Uninitialised,
    Race,
    /// Threads that have to execute an instruction together do not.
    Divergent,
    /// Something else that PTX leaves undefined.
    Undefined,
    Trap,
    Endless,
}

/// A mistake in one instruction.
#[derive(Debug)]
pub struct InstructionFault {
    pub kind: FaultKind,
    pub lane: Option<u32>,
    pub what: String,
}

pub type ExecResult = Result<(), Box<InstructionFault>>;

pub fn trouble(kind: FaultKind, lane: Option<usize>, what: impl Into<String>) -> Box<InstructionFault> {
    Box::new(InstructionFault { kind, lane: lane.map(|lane| lane as u32), what: what.into() })
}

/// A mistake with its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchFault {
    pub kernel: String,
    pub line: u32,
    /// The instruction.
    pub text: String,
    pub block: [u32; 3],
    pub warp: u32,
    pub lane: Option<u32>,
    pub thread: Option<[u32; 3]>,
    pub kind: FaultKind,
    pub what: String,
}

impl fmt::Display for LaunchFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |[x, y, z]: [u32; 3]| format!("({x}, {y}, {z})");
        write!(
            f,
            "kernel {}, PTX line {} `{}`, block {}",
            self.kernel,
            self.line,
            self.text,
            place(self.block)
        )?;
        match (self.thread, self.lane) {
            (Some(thread), Some(lane)) => {
                write!(f, ", thread {}, lane {lane} of warp {}", place(thread), self.warp)?
            }
            _ => write!(f, ", warp {}", self.warp)?,
        }
        write!(f, ": {}", self.what)
    }
}
