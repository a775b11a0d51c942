//! A process that follows rank 0: it has states and pages where that has them, and takes the same steps.

use std::collections::BTreeMap;

use mlcc_abi::{Ctx, EntryForm, EntryPoint, Sequence};

use super::CpuDevice;
use crate::buffer::AlignedBuffer;
use crate::device::missing_entry_error;
use crate::page_pool::PageMemory;
use crate::processes::{MessageReader, ProcessGroup, RankMessageKind};
use crate::{Error, Model, Result};

/// The state of a rank by the messages of rank 0.
struct CpuRankWorker<'a> {
    device: &'a CpuDevice,
    model: &'a Model,
    processes: &'a ProcessGroup,
    /// States that are no caches, by the number that rank 0 gives them.
    states: BTreeMap<u64, AlignedBuffer>,
    inputs: StepInputs,
    logits: AlignedBuffer,
}

/// The inputs of a step.
struct StepInputs {
    tokens: AlignedBuffer,
    output_rows: AlignedBuffer,
    /// Row numbers as they are read.
    numbers: Vec<i32>,
    /// Pages of all sequences, in order.
    pages: Vec<i32>,
    sequences: Vec<Sequence>,
}

impl CpuDevice {
    /// See [`Model::follow_leader`].
    pub(super) fn receive_steps(&self, model: &Model) -> Result<()> {
        let Some(process) = self.process.as_ref().filter(|process| process.leader.is_none()) else {
            return Ok(());
        };
        let processes = &process.processes;
        let mut follower = CpuRankWorker {
            device: self,
            model,
            processes,
            states: BTreeMap::new(),
            inputs: StepInputs::new(model)?,
            logits: AlignedBuffer::floats("the logits", model.plan().vocab.max(model.plan().text_width))?,
        };
        processes.receive_messages(|message| follower.handle_message(message));
        Ok(())
    }
}

impl CpuRankWorker<'_> {
    fn handle_message(&mut self, message: &[u8]) -> Result<RankMessageKind> {
        let unclear = || Error::RankMessage;
        let (kind, mut reader) = MessageReader::new(message).ok_or_else(unclear)?;
        match kind {
            RankMessageKind::End => {}
            RankMessageKind::Heartbeat => self.processes.confirm_heartbeat(),
            RankMessageKind::Step => self.handle_step(reader)?,
            RankMessageKind::CreateState
            | RankMessageKind::FreeState
            | RankMessageKind::CopyState
            | RankMessageKind::WriteState
            | RankMessageKind::ReadState => {
                self.handle_state(kind, reader)?.ok_or_else(unclear)?;
            }
            RankMessageKind::WritePages
            | RankMessageKind::ReadPages
            | RankMessageKind::CopyPages
            | RankMessageKind::DecommitPages => {
                self.handle_pages(kind, reader)?.ok_or_else(unclear)?;
            }
            RankMessageKind::WriteSlots => {
                let written = reader
                    .read_number()
                    .and_then(|at| self.model.slots()?.write(at, reader.remaining_bytes()));
                written.ok_or_else(unclear)?;
            }
            // Of GPUs.
            RankMessageKind::CommitPages | RankMessageKind::PageTable => return Err(unclear()),
        }
        Ok(kind)
    }

    fn is_own(&self, rank: u64) -> bool {
        rank == self.processes.rank() as u64
    }

    /// `None` where the message makes no sense.
    fn handle_state(&mut self, kind: RankMessageKind, mut reader: MessageReader<'_>) -> Result<Option<()>> {
        let plan = self.model.plan();
        if kind == RankMessageKind::CreateState {
            let align = plan.alignment.max(mlcc_abi::BUFFER_ALIGN as u64);
            let fresh = AlignedBuffer::zeroed("the state", plan.state_bytes, align)?;
            return Ok(reader.read_number().map(|number| drop(self.states.insert(number, fresh))));
        }
        let work = || {
            match kind {
                RankMessageKind::FreeState => drop(self.states.remove(&reader.read_number()?)?),
                RankMessageKind::CopyState => {
                    let [from, to] = reader.read_numbers()?;
                    let mut copy = self.states.remove(&to)?;
                    copy.bytes_mut().copy_from_slice(self.states.get(&from)?.bytes());
                    self.states.insert(to, copy);
                }
                RankMessageKind::WriteState => {
                    let [rank, number, at] = reader.read_numbers()?;
                    let bytes = reader.remaining_bytes();
                    if rank == self.processes.rank() as u64 {
                        let state = self.states.get_mut(&number)?.bytes_mut();
                        state.get_mut(at as usize..)?.get_mut(..bytes.len())?.copy_from_slice(bytes);
                    }
                }
                _ => {
                    let [rank, number, at, len] = reader.read_numbers()?;
                    let len = Some(len).filter(|&len| len <= plan.state_bytes)? as usize;
                    let mut bytes = vec![0; len];
                    if rank == self.processes.rank() as u64 {
                        bytes.copy_from_slice(
                            self.states.get(&number)?.bytes().get(at as usize..)?.get(..len)?,
                        );
                    }
                    self.processes.send_requested_bytes(rank as usize, &mut bytes);
                }
            }
            Some(())
        };
        Ok(work())
    }

    fn handle_pages(&self, kind: RankMessageKind, mut reader: MessageReader<'_>) -> Result<Option<()>> {
        let Some(pages) = &self.device.pages else { return Ok(None) };
        let memory = pages.memory();
        let numbers = match kind {
            RankMessageKind::WritePages => reader.read_numbers().map(|[rank, to]| [rank, to, 0, 0]),
            RankMessageKind::ReadPages => reader.read_numbers().map(|[rank, from, len]| [rank, from, len, 0]),
            RankMessageKind::CopyPages => reader.read_numbers(),
            _ => reader.read_numbers().map(|[from, to]| [0, from, to, 0]),
        };
        let Some([rank, first, second, third]) = numbers else { return Ok(None) };
        match kind {
            RankMessageKind::WritePages => {
                let bytes = reader.remaining_bytes();
                if !memory.contains_range(first, bytes.len() as u64) {
                    return Ok(None);
                }
                if self.is_own(rank) {
                    memory.write(first, bytes)?;
                }
            }
            RankMessageKind::ReadPages if memory.contains_range(first, second) => {
                let mut bytes = vec![0; second as usize];
                if self.is_own(rank) {
                    memory.read(first, &mut bytes)?;
                }
                self.processes.send_requested_bytes(rank as usize, &mut bytes);
            }
            RankMessageKind::CopyPages
                if memory.contains_range(first, third) && memory.contains_range(second, third) =>
            {
                if self.is_own(rank) {
                    memory.copy(first, second, third)?;
                }
            }
            RankMessageKind::DecommitPages if first <= second && memory.contains_range(second, 0) => {
                memory.decommit(first..second)
            }
            _ => return Ok(None),
        }
        Ok(Some(()))
    }

    fn handle_step(&mut self, mut reader: MessageReader<'_>) -> Result<()> {
        let read = self.inputs.read_step(&mut reader, self.model, &self.states);
        let Some(StepHeader { step, past, batch, n, n_outputs, adapted }) = read else {
            return Err(Error::RankMessage);
        };
        let entry =
            self.device.entry_function(step, adapted).ok_or_else(|| missing_entry_error(self.model, step))?;
        let plan = self.model.plan();
        let rows = match step.kind() {
            EntryForm::AllLogits => n,
            EntryForm::Batch | EntryForm::Ragged => n_outputs.max(1),
            _ => 1,
        };
        let floats = rows as u64 * plan.vocab.max(plan.text_width);
        if self.logits.len() as u64 / 4 < floats {
            self.logits = AlignedBuffer::floats("the logits of a step", floats)?;
        }
        let one = self.inputs.sequences.first().filter(|_| !batch);
        let mut ctx = Ctx {
            state: one.map_or(std::ptr::null_mut(), |one| one.state),
            tokens: self.inputs.tokens.as_ptr().cast(),
            n: n as i64,
            past,
            logits: self.logits.as_mut_ptr().cast(),
            sequences: if batch { self.inputs.sequences.as_ptr() } else { std::ptr::null() },
            b: self.inputs.sequences.len() as i64,
            output_rows: if batch { self.inputs.output_rows.as_ptr().cast() } else { std::ptr::null() },
            n_outputs: n_outputs as i64,
            page_table: one.map_or(std::ptr::null(), |one| one.page_table),
            adapters: self.model.slots().map_or(std::ptr::null(), |slots| slots.as_ptr()),
            ..Ctx::EMPTY
        };
        // SAFETY: what rank 0 may give to this step by its contract: the same tokens, rows and pages, whose
        // numbers were looked at, and states of the same size.
        unsafe { self.device.run(self.model, step, entry, &mut ctx, None) }
    }
}

/// A step without its inputs.
struct StepHeader {
    step: EntryPoint,
    past: i64,
    batch: bool,
    n: usize,
    n_outputs: usize,
    /// Some sequence has an adapter.
    adapted: bool,
}

impl StepInputs {
    fn new(model: &Model) -> Result<StepInputs> {
        let rows = model.plan().chunk.max(model.plan().batch).max(model.max_step_tokens() as u64).max(1);
        Ok(StepInputs {
            tokens: AlignedBuffer::integers("the tokens of a chunk", rows)?,
            output_rows: AlignedBuffer::integers("the wanted rows", rows)?,
            numbers: Vec::new(),
            pages: Vec::new(),
            sequences: Vec::new(),
        })
    }

    /// `None` where the message makes no sense for this model.
    fn read_step(
        &mut self,
        reader: &mut MessageReader<'_>,
        model: &Model,
        states: &BTreeMap<u64, AlignedBuffer>,
    ) -> Option<StepHeader> {
        let plan = model.plan();
        let (step, past) = (reader.read_step()?, reader.read_number()? as i64);
        let n = read_list(reader, &mut self.numbers, &mut self.tokens)?;
        read_list(reader, &mut self.numbers, &mut self.output_rows)?;
        let [n_outputs, batch, count] = reader.read_numbers()?;
        self.pages.clear();
        self.sequences.clear();
        let most = model.cache_pages().all;
        let slot =
            model.table().slot_state().map(|slot| slot.offset as usize..(slot.offset + slot.bytes) as usize);
        let mut adapted = false;
        for _ in 0..count {
            let [number, past, first, rows] = reader.read_numbers()?;
            let begin = self.pages.len();
            let pages = reader.read_list(&mut self.pages)?;
            // Sessions without a state have addresses that mean nothing.
            let state = match plan.state_bytes {
                0 => std::ptr::null_mut(),
                _ => states.get(&number).map_or(std::ptr::null_mut(), AlignedBuffer::as_ptr),
            };
            let chosen = slot.clone().and_then(|slot| states.get(&number)?.bytes().get(slot));
            adapted |= chosen.is_some_and(|slot| slot.iter().any(|&byte| byte != 0));
            let known = |page: &i32| usize::try_from(*page).is_ok_and(|page| page < most);
            if (plan.state_bytes > 0 && state.is_null()) || !self.pages[begin..].iter().all(known) {
                return None;
            }
            // Of the table only the place is known: it moves as it grows.
            let page_table = std::ptr::without_provenance(if pages == 0 { 0 } else { begin + 1 });
            let (past, first, rows) = (past as i64, first as i64, rows as i64);
            self.sequences.push(Sequence { state, page_table, past, first, rows });
        }
        for sequence in &mut self.sequences {
            if let Some(begin) = sequence.page_table.addr().checked_sub(1) {
                sequence.page_table = self.pages[begin..].as_ptr();
            }
        }
        Some(StepHeader { step, past, batch: batch > 0, n, n_outputs: n_outputs as usize, adapted })
    }
}

/// Reads a list into a buffer that may be too small for it.
fn read_list(
    reader: &mut MessageReader<'_>,
    numbers: &mut Vec<i32>,
    to: &mut AlignedBuffer,
) -> Option<usize> {
    numbers.clear();
    let count = reader.read_list(numbers)?;
    (count <= to.len() / 4).then(|| to.copy_from(numbers).len())
}
