//! Lowered entry functions before memory is planned: launches on buffers that have no addresses yet, with what the
//! planners need to know about each access.

use mlcc_ir::dim::Dim;
use mlcc_ir::entity::{Arena, EntityId};
use mlcc_ir::kernel::Access;
use mlcc_ir::module::{ParamId, StateId};
use mlcc_ir::sequences::Batching;
use mlcc_ir::step::{Grid, Parts, Repeat, Shares};
use std::fmt;

/// A buffer of one lowered entry function.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BufferId(pub u32);

impl EntityId for BufferId {
    fn from_index(index: usize) -> Self {
        BufferId(index as u32)
    }
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a buffer is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Memory {
    Param(ParamId),
    /// The value from before the step, or all rows of a cache.
    State(StateId),
    /// The rows of this step in a cache, after those of earlier tokens.
    NewRows(StateId),
    /// The numbers of the pages that the rows of caches are in.
    PageTable,
    /// Input number `.0` of the entry function.
    Input(u32),
    /// Output number `.0` of the entry function.
    Output(u32),
    Temp,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Buffer {
    pub memory: Memory,
    /// Size in bytes. Of a value of each sequence: those of all sequences.
    pub bytes: Dim,
    /// A value of each sequence that only launches for each sequence touch.
    pub apart: bool,
}

/// How the iterations of a CPU kernel, and with them the elements of an argument, are shared out among workers. Two
/// accesses with equal partitions touch an element from the same worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Partition {
    /// Slices of axis 0.
    Rows(Dim),
    /// That many slices of the last axis, all but the last of equal whole tiles of 16 columns.
    Tiles(i64),
}

impl Partition {
    /// True if one worker does everything.
    pub fn is_single(&self) -> bool {
        match self {
            Partition::Rows(d) => d.as_const() == Some(1),
            Partition::Tiles(t) => *t == 1,
        }
    }
    pub fn agrees(&self, other: &Partition) -> bool {
        self == other || self.is_single() && other.is_single()
    }
}

/// How a launch uses a buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arg {
    pub buffer: BufferId,
    pub access: Access,
    /// `None`: any worker may touch any element.
    pub partition: Option<Partition>,
    /// Outputs: the input arguments whose memory it may take over, because each element is read before the
    /// element at the same place is written, by the same worker.
    pub in_place: Vec<usize>,
    /// In launches for each sequence: bytes from row to row. 0 if all sequences share the buffer.
    pub row_bytes: u64,
    /// And from sequence to sequence, beyond their rows.
    pub sequence_bytes: u64,
}

/// What a launch does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Work {
    /// Index into the kernels of the [`Lowered`](super::Lowered) program.
    Kernel(usize),
    /// Joins what all ranks have, by one worker: of its two arguments the first is this rank's part.
    Exchange(Parts),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoweredLaunch {
    pub work: Work,
    pub args: Vec<Arg>,
    pub dims: Vec<Dim>,
    pub grid: Option<Grid>,
    pub repeat: Repeat,
    pub shares: Shares,
}

impl LoweredLaunch {
    pub fn kernel(&self) -> Option<usize> {
        match self.work {
            Work::Kernel(kernel) => Some(kernel),
            Work::Exchange(_) => None,
        }
    }

    /// An exchange by the first worker, who need not be the one that has the only share of a kernel: nobody's shares are those of an
    /// exchange.
    pub fn exchange(part: BufferId, all: BufferId, parts: Parts, wanted: bool) -> LoweredLaunch {
        let arg = |buffer, access| Arg {
            buffer,
            access,
            partition: None,
            in_place: Vec::new(),
            row_bytes: 0,
            sequence_bytes: 0,
        };
        LoweredLaunch {
            work: Work::Exchange(parts),
            args: vec![arg(part, Access::In), arg(all, Access::Out)],
            dims: Vec::new(),
            grid: None,
            repeat: if wanted { Repeat::Wanted } else { Repeat::Once },
            shares: Shares::Static,
        }
    }
}

/// A lowered entry function.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    pub batching: Batching,
    pub buffers: Arena<BufferId, Buffer>,
    pub launches: Vec<LoweredLaunch>,
    /// States and the buffers that hold their new values.
    pub updates: Vec<(StateId, BufferId)>,
    /// Per update, the launch that copies it; used where a new value cannot be produced in place.
    pub copies: Vec<LoweredLaunch>,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Param(p) => write!(f, "param {p}"),
            Memory::State(s) => write!(f, "state {s}"),
            Memory::NewRows(s) => write!(f, "new rows of {s}"),
            Memory::PageTable => write!(f, "page table"),
            Memory::Input(i) => write!(f, "input {i}"),
            Memory::Output(i) => write!(f, "output {i}"),
            Memory::Temp => write!(f, "temp"),
        }
    }
}
