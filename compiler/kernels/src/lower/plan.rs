//! Lowered entry functions before memory is planned: launches on buffers that have no addresses yet, with
//! what the planners need to know about each access.

use mlcc_ir::dim::Dim;
use mlcc_ir::entity::{EntityArena, EntityId};
use mlcc_ir::kernel::ParamAccess;
use mlcc_ir::module::{ParamId, StateId};
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::step::{GatherShape, LaunchGrid, RepeatMode, WorkSchedule};
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

/// The contents of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BufferKind {
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
pub struct LoweredBuffer {
    pub memory: BufferKind,
    /// Size in bytes. For a value of each sequence it is that of all sequences.
    pub bytes: Dim,
    /// A value of each sequence that only launches for each sequence touch.
    pub apart: bool,
}

/// The partition of the iterations of a CPU kernel, and with them of the elements of an argument, among
/// workers. Two accesses with equal partitions touch an element from the same worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Partition {
    /// Slices of axis 0.
    Rows(Dim),
    /// The last axis in this many slices, all but the last of equal whole tiles of 16 columns.
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
    pub fn matches(&self, other: &Partition) -> bool {
        self == other || self.is_single() && other.is_single()
    }
}

/// The use of a buffer by a launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BufferArg {
    pub buffer: BufferId,
    pub access: ParamAccess,
    /// `None`: any worker may touch any element.
    pub partition: Option<Partition>,
    /// Outputs: the input arguments whose memory it may take over, because each element is read before the
    /// element at the same place is written, by the same worker.
    pub in_place: Vec<usize>,
    /// Bytes from row to row in launches for each sequence. 0 if all sequences share the buffer.
    pub row_bytes: u64,
    /// Bytes from sequence to sequence, beyond their rows.
    pub sequence_bytes: u64,
}

/// The work of a launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LaunchWork {
    /// Index into the kernels of the [`LoweredModule`](super::LoweredModule) program.
    Kernel(usize),
    /// Joins what all ranks have, by one worker: of its two arguments the first is this rank's part.
    AllGather(GatherShape),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoweredLaunch {
    pub work: LaunchWork,
    pub args: Vec<BufferArg>,
    pub dims: Vec<Dim>,
    pub grid: Option<LaunchGrid>,
    pub repeat: RepeatMode,
    pub schedule: WorkSchedule,
}

impl LoweredLaunch {
    pub fn kernel(&self) -> Option<usize> {
        match self.work {
            LaunchWork::Kernel(kernel) => Some(kernel),
            LaunchWork::AllGather(_) => None,
        }
    }

    /// An all-gather by the first worker, which need not be the one that has the only share of a kernel: its
    /// partition matches that of no kernel.
    pub fn all_gather(part: BufferId, all: BufferId, parts: GatherShape, wanted: bool) -> LoweredLaunch {
        let arg = |buffer, access| BufferArg {
            buffer,
            access,
            partition: None,
            in_place: Vec::new(),
            row_bytes: 0,
            sequence_bytes: 0,
        };
        LoweredLaunch {
            work: LaunchWork::AllGather(parts),
            args: vec![arg(part, ParamAccess::In), arg(all, ParamAccess::Out)],
            dims: Vec::new(),
            grid: None,
            repeat: if wanted { RepeatMode::Outputs } else { RepeatMode::Once },
            schedule: WorkSchedule::Static,
        }
    }
}

/// A lowered entry function.
#[derive(Clone, Debug)]
pub struct LoweredEntry {
    pub name: String,
    pub batching: RowBatching,
    pub buffers: EntityArena<BufferId, LoweredBuffer>,
    pub launches: Vec<LoweredLaunch>,
    /// States and the buffers that hold their new values.
    pub updates: Vec<(StateId, BufferId)>,
    /// Per update, the launch that copies it; used where a new value cannot be produced in place.
    pub copies: Vec<LoweredLaunch>,
}

impl fmt::Display for BufferKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BufferKind::Param(p) => write!(f, "param {p}"),
            BufferKind::State(s) => write!(f, "state {s}"),
            BufferKind::NewRows(s) => write!(f, "new rows of {s}"),
            BufferKind::PageTable => write!(f, "page table"),
            BufferKind::Input(i) => write!(f, "input {i}"),
            BufferKind::Output(i) => write!(f, "output {i}"),
            BufferKind::Temp => write!(f, "temp"),
        }
    }
}
