//! Steps of several ranks in lockstep: each runs until its next all-gather, and when all have reached it,
//! every one gets the rows of all. Ranks have memory of their own and see only the gathered rows of others.

use super::interleaved::run_phases;
use super::{
    BatchSequence, LaunchRun, StepMemory, StepRunError, WorkerSchedule, is_for_one, launch_runs, run_launch,
    sizes_of_all, with_state,
};
use crate::kernel::ExecutionOptions;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{AllGather, BufferRef, GatherShape, LaunchItem, StepItem, StepProgram};

/// The data of a rank: its memory, and the data of each sequence of a batch.
#[derive(Clone, Default)]
pub struct RankMemory {
    pub memory: StepMemory,
    pub sequences: Vec<BatchSequence>,
}

/// Rows of one sequence with these sizes, or of the sequences of a batch with this many requested logits.
#[derive(Clone, Copy, Debug)]
pub enum RankCall {
    One(SymValues),
    Batch { wanted: usize },
}

impl RankCall {
    pub(super) fn launch_runs(self, launch: &LaunchItem, sequences: &[BatchSequence]) -> Vec<LaunchRun> {
        match self {
            RankCall::One(sizes) => vec![LaunchRun::for_all(sizes)],
            RankCall::Batch { wanted } => launch_runs(launch, sequences, wanted),
        }
    }

    /// Rows that are exchanged.
    fn gathered_rows(self, exchange: &AllGather, sequences: &[BatchSequence]) -> usize {
        let sizes = match self {
            RankCall::One(sizes) => sizes,
            RankCall::Batch { wanted } if exchange.output_rows => {
                SymValues { n: wanted as i64, ..sizes_of_all(sequences) }
            }
            RankCall::Batch { .. } => sizes_of_all(sequences),
        };
        exchange.shape.rows.eval(&sizes).max(0) as usize
    }
}

pub(super) struct RankRef<'a> {
    pub memory: &'a mut StepMemory,
    pub sequences: &'a mut [BatchSequence],
}

impl RankRef<'_> {
    /// The sequences have seen their rows.
    pub fn advance(&mut self) {
        self.sequences.iter_mut().for_each(|s| s.past += s.rows);
    }

    fn launch(
        &mut self,
        launch: &LaunchItem,
        kernels: &[Kernel],
        call: RankCall,
        options: &ExecutionOptions,
    ) -> Result<(), StepRunError> {
        if matches!(call, RankCall::One(_)) && !is_for_one(launch) {
            return Err(StepRunError::NoBatch(launch.kernel.clone()));
        }
        for turn in call.launch_runs(launch, self.sequences) {
            with_state(self.memory, self.sequences, &turn, |memory| {
                run_launch(launch, kernels, memory, &turn, options)
            })?;
        }
        Ok(())
    }
}

fn refs(ranks: &mut [RankMemory]) -> Vec<RankRef<'_>> {
    ranks.iter_mut().map(|r| RankRef { memory: &mut r.memory, sequences: &mut r.sequences }).collect()
}

/// Runs a step on all ranks. Usually all have the same one.
pub fn run_ranks(
    steps: &[&StepProgram],
    kernels: &[Kernel],
    ranks: &mut [RankMemory],
    call: RankCall,
    options: &ExecutionOptions,
) -> Result<(), StepRunError> {
    if steps.len() != ranks.len() {
        return Err(StepRunError::Ranks { expected: steps.len(), found: ranks.len() });
    }
    let mut ranks = refs(ranks);
    let mut items: Vec<_> = steps.iter().map(|step| step.items.iter()).collect();
    for number in 0.. {
        let mut reached = Vec::with_capacity(ranks.len());
        for (number, (rank, items)) in ranks.iter_mut().zip(&mut items).enumerate() {
            let next = run_until_gather(items, rank, kernels, call, options);
            reached.push(next.map_err(|error| StepRunError::Rank { rank: number, error: Box::new(error) })?);
        }
        match agreed_gather(&reached, number)? {
            Some(exchange) => all_gather(exchange, &mut ranks, call)?,
            None => break,
        }
    }
    ranks.iter_mut().for_each(RankRef::advance);
    Ok(())
}

/// Runs like [`run_ranks`] with one step for all, with the workers of each rank in sequence between barriers.
pub fn run_ranks_interleaved(
    step: &StepProgram,
    kernels: &[Kernel],
    ranks: &mut [RankMemory],
    call: RankCall,
    schedule: &WorkerSchedule,
) -> Result<(), StepRunError> {
    run_phases(step, kernels, &mut refs(ranks), call, schedule)
}

/// Runs a rank until its next all-gather; `None`: it has ended.
fn run_until_gather<'s>(
    items: &mut impl Iterator<Item = &'s StepItem>,
    rank: &mut RankRef<'_>,
    kernels: &[Kernel],
    call: RankCall,
    options: &ExecutionOptions,
) -> Result<Option<&'s AllGather>, StepRunError> {
    for item in items {
        match item {
            StepItem::Barrier => {}
            StepItem::AllGather(exchange) => return Ok(Some(exchange)),
            StepItem::Launch(launch) => rank.launch(launch, kernels, call, options)?,
        }
    }
    Ok(None)
}

/// The all-gather that all ranks have reached, if none has ended.
fn agreed_gather<'s>(
    reached: &[Option<&'s AllGather>],
    number: usize,
) -> Result<Option<&'s AllGather>, StepRunError> {
    let Some((rank, first)) = reached.iter().enumerate().find_map(|(rank, e)| Some((rank, (*e)?))) else {
        return Ok(None);
    };
    for (other, exchange) in reached.iter().enumerate() {
        match exchange {
            None => return Err(StepRunError::Missed { rank, number, other, count: number }),
            Some(exchange) if exchange.shape == first.shape => {}
            Some(exchange) => {
                let (expected, found) = (describe(&first.shape), describe(&exchange.shape));
                return Err(StepRunError::Parts { rank, number, other, expected, found });
            }
        }
    }
    Ok(Some(first))
}

fn describe(parts: &GatherShape) -> String {
    let GatherShape { ranks, rows, row_bytes } = parts;
    format!("{rows} rows of {row_bytes} bytes of {ranks} ranks")
}

/// Every rank gets the rows of all.
pub(super) fn all_gather(
    exchange: &AllGather,
    ranks: &mut [RankRef<'_>],
    call: RankCall,
) -> Result<(), StepRunError> {
    let AllGather { part, all, shape: parts, .. } = exchange;
    if parts.ranks != ranks.len() {
        let found = ranks.len();
        return match found {
            1 => Err(StepRunError::Alone { ranks: parts.ranks }),
            _ => Err(StepRunError::Ranks { expected: parts.ranks, found }),
        };
    }
    let rows = ranks.first().map_or(0, |rank| call.gathered_rows(exchange, rank.sequences));
    let row = parts.row_bytes as usize;
    let of_rank = |rank: &mut RankRef<'_>| Ok(buffer_bytes(rank.memory, part, rows * row)?.to_vec());
    let sent: Vec<Vec<u8>> = ranks.iter_mut().map(of_rank).collect::<Result<_, StepRunError>>()?;
    let of_all = |i: usize| sent.iter().flat_map(move |part| &part[i * row..(i + 1) * row]);
    let joined: Vec<u8> = (0..rows).flat_map(of_all).copied().collect();
    ranks.iter_mut().try_for_each(|rank| {
        buffer_bytes(rank.memory, all, joined.len())?.copy_from_slice(&joined);
        Ok(())
    })
}

/// The first bytes of a buffer; of one with a copy for each worker those of the first.
fn buffer_bytes<'m>(
    memory: &'m mut StepMemory,
    place: &BufferRef,
    bytes: usize,
) -> Result<&'m mut [u8], StepRunError> {
    let block = memory.base_memory(place.base);
    let (start, size) = (place.offset as usize, block.len());
    let end = start.saturating_add(bytes);
    block.get_mut(start..end).ok_or(StepRunError::Range { base: place.base.name(), start, end, size })
}
