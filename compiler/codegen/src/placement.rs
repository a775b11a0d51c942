//! The places of buffers for the code of a GPU kernel.
//!
//! Arguments of a launch are the same in every call, but buffers move: new rows of a cache lie behind those
//! of earlier tokens, and in a launch for each sequence every block has the buffers of its sequence, whose
//! number is that of the block in z. The distances are known when code is made, so launches of a kernel that
//! differ in it have code of their own.

use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{LaunchItem, MemoryBase, SequenceFilter, StepItem, StepProgram};
use std::collections::BTreeSet;

/// The movement of the buffers of a launch.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BufferPlacement {
    /// The sequences that a launch for each sequence of a batch is for.
    pub sequences: Option<SequenceFilter>,
    /// Strides by parameter of the kernel.
    pub buffers: Vec<AddressStrides>,
}

/// The bytes that are added to the address of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct AddressStrides {
    pub from: AddressOrigin,
    /// Bytes for each row before those of the call; in pages, for each such row of the page that the new row
    /// is in.
    pub per_past: u64,
    /// Bytes for each page before that one, in pages.
    pub per_page: u64,
    /// Bytes for each row of other sequences before those of this one.
    pub per_row: u64,
    /// Bytes for each sequence before this one.
    pub per_sequence: u64,
}

/// The origin that the argument of a buffer counts from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum AddressOrigin {
    /// It is an address.
    #[default]
    Fixed,
    /// The begin of the sequence's state, or of its table of pages: in a launch for each sequence.
    State,
    PageTable,
}

/// An address of a word that an argument is, behind the buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgumentWord {
    /// The address of the size of that number.
    Size(usize),
    /// The address of the number of rows before those of the call.
    Past,
    /// The address of the first number of the table of pages.
    PageTable,
    /// The addresses of the number of sequences, and of the sequences ([`mlcc_abi::Sequence`]).
    SequenceCount,
    Sequences,
}

impl BufferPlacement {
    /// Nothing moves.
    pub fn unmoved(kernel: &Kernel) -> BufferPlacement {
        BufferPlacement { sequences: None, buffers: vec![AddressStrides::default(); kernel.params.len()] }
    }

    pub fn for_launch(launch: &LaunchItem) -> BufferPlacement {
        let sequences = launch.repeat.sequences();
        let moves = |buffer: &mlcc_ir::step::BufferRef| AddressStrides {
            from: match buffer.base {
                MemoryBase::State if sequences.is_some() => AddressOrigin::State,
                MemoryBase::PageTable if sequences.is_some() => AddressOrigin::PageTable,
                _ => AddressOrigin::Fixed,
            },
            per_past: buffer.per_past,
            per_page: if buffer.per_past > 0 { buffer.per_page } else { 0 },
            per_row: buffer.per_row,
            per_sequence: buffer.per_sequence,
        };
        BufferPlacement { sequences, buffers: launch.buffers.iter().map(moves).collect() }
    }

    /// The arguments after the buffers, for a kernel of `sizes` sizes.
    pub fn argument_words(&self, sizes: usize) -> Vec<ArgumentWord> {
        if self.sequences.is_some() {
            return vec![ArgumentWord::SequenceCount, ArgumentWord::Sequences];
        }
        let past = self.buffers.iter().any(|b| b.per_past > 0).then_some(ArgumentWord::Past);
        let table = self.buffers.iter().any(|b| b.per_page > 0).then_some(ArgumentWord::PageTable);
        (0..sizes).map(ArgumentWord::Size).chain(past).chain(table).collect()
    }
}

/// All placements of a kernel in the launches of steps, in an order that depends on nothing else; a kernel
/// without a launch has one.
pub fn placements(kernel: &Kernel, steps: &[StepProgram]) -> Vec<BufferPlacement> {
    let launches = steps.iter().flat_map(|step| &step.items).filter_map(StepItem::launch);
    let launches = launches.filter(|launch| launch.kernel == kernel.name);
    let all: BTreeSet<BufferPlacement> = launches.map(BufferPlacement::for_launch).collect();
    if all.is_empty() { vec![BufferPlacement::unmoved(kernel)] } else { all.into_iter().collect() }
}
