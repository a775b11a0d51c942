//! One iteration of an engine: the rows that it schedules, and the use of their logits.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::generate::LanguageModel;
use crate::serving::model_runner::{ModelLimits, ModelRunner, OutputRows, SequenceInput, output_rows};
use crate::serving::prefill_pacer::{SMALLEST, chunk_len};
use crate::serving::recycle::recycle_list;
use crate::serving::request::RequestFailure;
use crate::serving::running_sequence::{RunningSequence, SamplingOutcome, SequencePhase};
use crate::serving::scheduler::{
    Scheduler, SequenceEnd, catch_model_failure, ends_with_single_row, model_failure, panic_failure,
};
use crate::serving::step_cost::StepLoad;
use crate::speculate::CHEAP_ROWS;
use mlcc_runtime::TokenCandidate;
use mlcc_text::Grammar;

/// The time for which the engine waits for masks before it looks for new requests.
const LOOK: Duration = Duration::from_millis(5);

/// The lists of a step; they are kept.
pub(super) struct IterationState<S: 'static> {
    pub rows: Vec<ScheduledRow>,
    inputs: Vec<SequenceInput<'static, S>>,
    sampling_tasks: Vec<Mutex<SamplingTask<'static, 'static>>>,
    /// For each input, the sequence that may sample from its top-k candidates.
    top_k_sequences: Vec<Option<u64>>,
    /// Grammars that have come back with their masks.
    pub grammars: Vec<(u64, Grammar)>,
    /// Time of the last step.
    step_time: Duration,
    /// Texts the prompts of which were known as a whole, with the logits behind them.
    pub cached_prompts: Vec<(u64, Vec<f32>)>,
    /// Texts that have ended in the step.
    pub ended: Vec<(u64, SequenceEnd)>,
    /// Tokens chosen since that was told last, those of drafts and the right ones of these.
    pub sampled_tokens: u64,
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    /// True if the last turn was that of an isolated sequence.
    last_was_isolated: bool,
}

impl<S> Default for IterationState<S> {
    fn default() -> Self {
        IterationState {
            rows: Vec::new(),
            inputs: Vec::new(),
            sampling_tasks: Vec::new(),
            top_k_sequences: Vec::new(),
            grammars: Vec::new(),
            step_time: Duration::ZERO,
            cached_prompts: Vec::new(),
            ended: Vec::new(),
            sampled_tokens: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
            last_was_isolated: false,
        }
    }
}

impl<S> IterationState<S> {
    /// The owner of the last turn, for [`IterationState::restore_isolated`].
    pub fn last_isolated(&self) -> bool {
        self.last_was_isolated
    }

    /// Forgets a plan that will not be run.
    pub fn restore_isolated(&mut self, before: bool) {
        self.last_was_isolated = before;
    }

    fn record_outcome(&mut self, id: u64, taken: SamplingOutcome) {
        self.sampled_tokens += taken.sampled as u64;
        self.drafted_tokens += taken.drafted as u64;
        self.accepted_tokens += taken.accepted as u64;
        match taken.end {
            Ok(None) => {}
            Ok(Some(reason)) => self.ended.push((id, Ok(reason))),
            Err(failure) => self.ended.push((id, Err(failure))),
        }
    }
}

/// The tokens that an iteration computes of a sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScheduledRow {
    pub id: u64,
    pub slot: usize,
    /// The number of tokens, and of those computed before.
    pub token_count: usize,
    computed: usize,
    outputs: OutputRows,
    decoding: bool,
    /// True if the first token of the text is sampled behind it.
    pub samples_first: bool,
}

/// A text that chooses tokens, which a worker does.
struct SamplingTask<'a, 't> {
    sequence: &'a mut RunningSequence<'t>,
    logits: &'a [f32],
    /// Tokens that were computed before the first row.
    past: usize,
    outcome: Option<SamplingOutcome>,
}

impl SamplingTask<'_, '_> {
    fn sample(&mut self, limits: &ModelLimits) {
        let SamplingTask { sequence: writer, logits, past, .. } = self;
        let chosen = catch_unwind(AssertUnwindSafe(|| writer.sample_rows(logits, *past, limits)));
        // Its sequence and sampler are unknown now, and it ends.
        self.outcome = Some(chosen.unwrap_or_else(|panic| SamplingOutcome {
            end: Err(panic_failure(panic.as_ref())),
            sampled: 0,
            drafted: 0,
            accepted: 0,
            computed: *past,
        }));
    }
}

/// The load of these rows for the model.
fn load_of_rows(rows: &[ScheduledRow]) -> StepLoad {
    let mut load = StepLoad::default();
    for row in rows {
        if row.decoding {
            load.decode_rows += 1;
        } else {
            load.prefill_rows += row.token_count;
            load.prefill_keys += StepLoad::count_keys(row.token_count, row.computed);
        }
    }
    load
}

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    /// Plans a step, runs it and deals out its logits.
    pub fn schedule_and_run(&mut self) {
        self.schedule_within_memory();
        if self.iteration.rows.is_empty() {
            // Sequences wait only for masks.
            if !self.masks.is_idle() {
                self.masks.wait_for_mask(LOOK);
            }
            return;
        }
        let begin = Instant::now();
        let result = self.forward_rows();
        self.iteration.step_time = begin.elapsed();
        let load = load_of_rows(&self.iteration.rows);
        if self.iteration.rows.iter().all(|row| !row.decoding || row.token_count == 1) {
            self.pacer.record_step(&load, begin.elapsed());
        }
        self.queue.update_stats(|stats| stats.prompt_tokens += load.prefill_rows as u64);
        match result {
            Ok(()) => self.process_logits(),
            Err(failure) => self.handle_step_failure(&failure),
        }
        self.end_finished();
    }

    /// Drafts for running sequences, as far as rows are cheap. True if there are any.
    pub fn draft_tokens(&mut self) -> bool {
        let Some(drafter) = self.drafter.as_deref_mut().filter(|_| self.limits.rolls_back_drafts) else {
            return false;
        };
        let mut drafted = false;
        // Masks of drafts would be computed in the step.
        let writing = |w: &&mut RunningSequence| {
            w.phase == SequencePhase::Decode && w.isolated_until == 0 && !w.has_grammar
        };
        let mut rows = self.running.iter_mut().filter(writing).count();
        for writer in self.running.iter_mut().filter(writing) {
            let slot = &mut self.slots.slots[writer.slot];
            let most = writer.generation.max_drafts(slot.computed_tokens.len());
            let most = most.min(CHEAP_ROWS.saturating_sub(rows));
            let Some(sequence) = slot.sequence.as_mut().filter(|_| most > 0) else { continue };
            if matches!(self.model.reserve(sequence, 1 + most), Ok(true)) {
                writer.generation.append_drafts(writer.slot, drafter, most);
                rows += writer.generation.draft_count();
                drafted |= writer.generation.draft_count() > 0;
            }
        }
        drafted
    }

    /// The next token of every text, then pieces of prompts, the oldest first.
    pub fn schedule_rows(&mut self) {
        self.iteration.rows.clear();
        if self.schedule_isolated() {
            return;
        }
        for writer in
            self.running.iter().filter(|w| w.phase == SequencePhase::Decode && w.isolated_until == 0)
        {
            let fed = self.slots.slots[writer.slot].computed_tokens.len();
            let count = writer.generation.tokens().len() - fed;
            let want = if count == 1 { OutputRows::Last } else { OutputRows::All };
            let slot = writer.slot;
            self.iteration.rows.push(ScheduledRow {
                id: writer.id,
                slot,
                token_count: count,
                computed: fed,
                outputs: want,
                decoding: true,
                samples_first: false,
            });
        }
        let rows: usize = self.iteration.rows.iter().map(|row| row.token_count).sum();
        let most = self.limits.step_tokens.saturating_sub(rows).max(SMALLEST);
        let reading = |w: &&RunningSequence| w.phase == SequencePhase::Prefill && w.isolated_until == 0;
        let waiting = self.running.iter().filter(reading).count().saturating_sub(1);
        let mut room =
            self.pacer.prefill_budget(load_of_rows(&self.iteration.rows).decode_rows, waiting, most);
        for writer in self.running.iter().filter(reading) {
            let past = self.slots.slots[writer.slot].computed_tokens.len();
            let budget = room.chunk_rows(past);
            if budget < SMALLEST {
                break;
            }
            if let Some(row) = self.next_chunk(writer, budget) {
                room.spend(row.token_count, past);
                self.iteration.rows.push(row);
            }
        }
        // The order of their slots.
        self.iteration.rows.sort_unstable_by_key(|row| row.slot);
    }

    /// Schedules a sequence of a failed step by itself until it is beyond that, in turns with the others.
    /// True if there is one.
    fn schedule_isolated(&mut self) -> bool {
        let suspect = |w: &&RunningSequence| w.isolated_until > 0 && w.is_scheduled();
        let others = self.running.iter().any(|w| w.isolated_until == 0 && w.is_scheduled());
        let turn = !self.iteration.last_was_isolated || !others;
        let Some(writer) = self.running.iter().find(suspect).filter(|_| turn) else {
            self.iteration.last_was_isolated = false;
            return false;
        };
        self.iteration.last_was_isolated = true;
        let row = match writer.phase {
            SequencePhase::Decode => {
                let (slot, fed) = (writer.slot, self.slots.slots[writer.slot].computed_tokens.len());
                let (id, want) = (writer.id, OutputRows::Last);
                Some(ScheduledRow {
                    id,
                    slot,
                    token_count: 1,
                    computed: fed,
                    outputs: want,
                    decoding: true,
                    samples_first: false,
                })
            }
            _ => self.next_chunk(writer, self.limits.chunk),
        };
        self.iteration.rows.extend(row);
        true
    }

    /// About `budget` tokens of what a text has to read.
    fn next_chunk(&self, writer: &RunningSequence, budget: usize) -> Option<ScheduledRow> {
        let slot = &self.slots.slots[writer.slot];
        let (fed, to_read) = (slot.computed_tokens.len(), writer.prefill_len());
        let left = to_read - fed;
        let count = match slot.sequence.as_ref()?.prefill_chunk() {
            usize::MAX => left,
            chunk => {
                let budget = budget.min(self.limits.chunk);
                match writer.checkpoints.next_position(fed, to_read) {
                    Some(mark) => chunk_len(mark - fed, budget, false),
                    None => chunk_len(left, budget, ends_with_single_row(to_read, chunk)),
                }
            }
        };
        let first = count == left && writer.awaits_first_token();
        let want = match writer.prompt_logprobs_wanted() {
            Some(_) => OutputRows::All,
            None if first => OutputRows::Last,
            None => OutputRows::Nothing,
        };
        Some(ScheduledRow {
            id: writer.id,
            slot: writer.slot,
            token_count: count,
            computed: fed,
            outputs: want,
            decoding: false,
            samples_first: first,
        })
    }

    fn forward_rows(&mut self) -> Result<(), RequestFailure> {
        self.start_masks();
        let mut asked = std::mem::take(&mut self.iteration.top_k_sequences);
        asked.clear();
        let mut feeds: Vec<SequenceInput<'_, M::Sequence>> =
            recycle_list(std::mem::take(&mut self.iteration.inputs));
        let mut rows = self.iteration.rows.iter().peekable();
        for (index, slot) in self.slots.slots.iter_mut().enumerate() {
            let Some(row) = rows.next_if(|row| row.slot == index) else { continue };
            let writer = self.running.iter().find(|w| w.id == row.id);
            let (Some(writer), Some(sequence)) = (writer, &mut slot.sequence) else { continue };
            let tokens = &writer.generation.tokens()[row.computed..row.computed + row.token_count];
            // Once for the whole text, if its length is known.
            slot.computed_tokens.reserve(writer.generation.capacity() - row.computed);
            slot.computed_tokens.extend_from_slice(tokens);
            let among =
                row.decoding && row.token_count == 1 && writer.needs_no_logits() && !writer.has_grammar;
            asked.push(among.then_some(row.id));
            feeds.push(SequenceInput {
                sequence,
                tokens: &slot.computed_tokens[row.computed..],
                outputs: row.outputs,
            });
        }
        let (model, writers) = (&mut self.model, &mut self.running);
        let mut enough = |feed: usize, likeliest: &[TokenCandidate]| {
            let id = asked.get(feed).copied().flatten();
            let writer = id.and_then(|id| writers.iter_mut().find(|w| w.id == id));
            writer.is_some_and(|writer| writer.generation.sample_from_top_k(likeliest))
        };
        let result = catch_model_failure(|| model.step_top_k(&mut feeds, &mut enough));
        self.iteration.inputs = recycle_list(feeds);
        self.iteration.top_k_sequences = asked;
        result
    }

    fn process_logits(&mut self) {
        let rows = std::mem::take(&mut self.iteration.rows);
        let (vocab, mut at) = (self.limits.vocab, 0);
        for row in &rows {
            let from = at;
            at += output_rows(row.outputs, row.token_count) * vocab;
            if let Err(failure) = self.process_row(row, from..at) {
                self.iteration.ended.push((row.id, Err(failure)));
            }
        }
        self.iteration.rows = rows;
        self.sample_tokens(None);
    }

    /// Uses the logits of a row, except for sampling.
    fn process_row(&mut self, row: &ScheduledRow, range: Range<usize>) -> Result<(), RequestFailure> {
        let Some(writer) = self.running.iter_mut().find(|w| w.id == row.id) else { return Ok(()) };
        let Some(logits) = self.model.logits().get(range.clone()) else {
            return Err(RequestFailure::Model("it gave fewer logits than were wanted".into()));
        };
        let fed = row.computed + row.token_count;
        if fed >= writer.isolated_until {
            writer.isolated_until = 0;
        }
        if row.decoding {
            writer.sampling_rows = Some((range, row.computed + 1));
            return Ok(());
        }
        if let Some(top) = writer.prompt_logprobs_wanted() {
            writer.score_prompt_rows(logits.chunks_exact(self.limits.vocab), row.computed, top);
        }
        if fed < writer.prefill_len() {
            if let Some(inner) = writer.checkpoints.take_position(fed) {
                self.slots.cache_checkpoint(&self.model, row.slot, &[], inner);
            }
            return Ok(());
        }
        if !writer.awaits_first_token() {
            writer.phase = SequencePhase::Decode;
            return Ok(());
        }
        let last = logits.len() - self.limits.vocab;
        self.slots.cache_checkpoint(&self.model, row.slot, &logits[last..], false);
        self.finish_prefill(row.id, range.start + last..range.end);
        Ok(())
    }

    /// A text, and those that waited for it, choose their first tokens from these logits.
    fn finish_prefill(&mut self, id: u64, range: Range<usize>) {
        let Some(from) = self.running.iter().find(|w| w.id == id).map(|w| w.slot) else { return };
        let Scheduler { running: writers, slots, model, iteration: round, .. } = self;
        let mut without_memory = Vec::new();
        for writer in writers {
            let is_twin = writer.phase == SequencePhase::WaitingForPrefix { fork_of: id };
            if is_twin && let Err(error) = slots.fork_slot(model, from, writer.slot) {
                match model.is_out_of_memory(&error) {
                    true => without_memory.push(writer.id),
                    false => round.ended.push((writer.id, Err(model_failure(error)))),
                }
            } else if is_twin || writer.id == id {
                writer.finish_prefill();
                writer.sampling_rows = Some((range.clone(), slots.slots[writer.slot].computed_tokens.len()));
            }
        }
        self.preempt_all(&without_memory);
    }

    /// Samples for sequences whose prompts were cached as a whole; workers share them.
    pub fn sample_cached_prompts(&mut self) {
        let mut all: Vec<f32> = Vec::new();
        for (id, logits) in std::mem::take(&mut self.iteration.cached_prompts) {
            let begin = all.len();
            all.extend(logits);
            self.finish_prefill(id, begin..all.len());
        }
        if !all.is_empty() {
            self.sample_tokens(Some(&all));
            self.end_finished();
        }
    }

    /// Chooses the next tokens, texts dealt out to workers: each has a sampler of its own. Without `logits`
    /// they are the model's.
    pub fn sample_tokens(&mut self, logits: Option<&[f32]>) {
        // Others wait no longer than they would notice.
        self.collect_masks(self.iteration.step_time / 4);
        let Scheduler { model, limits, running: writers, slots, iteration: round, .. } = self;
        let logits = logits.unwrap_or_else(|| model.logits());
        let mut choices: Vec<Mutex<SamplingTask<'_, '_>>> =
            recycle_list(std::mem::take(&mut round.sampling_tasks));
        for writer in writers.iter_mut() {
            let Some((range, past)) = writer.sampling_rows.take() else { continue };
            let Some(logits) = logits.get(range) else { continue };
            if writer.mask_pending {
                writer.held_logits = Some((logits.to_vec(), past));
                writer.phase = SequencePhase::WaitingForMask;
            } else {
                choices.push(Mutex::new(SamplingTask { sequence: writer, logits, past, outcome: None }));
            }
        }
        model.parallel_for(choices.len(), &|index| {
            // No other thread has it.
            choices[index].lock().unwrap_or_else(PoisonError::into_inner).sample(limits);
        });
        for choice in &mut choices {
            let SamplingTask { sequence: writer, outcome: taken, .. } =
                choice.get_mut().unwrap_or_else(PoisonError::into_inner);
            let Some(taken) = taken.take() else {
                let failure = RequestFailure::Model("no token was chosen".into());
                round.ended.push((writer.id, Err(failure)));
                continue;
            };
            match slots.truncate_slot(writer.slot, taken.computed) {
                Ok(()) => round.record_outcome(writer.id, taken),
                Err(error) => round.ended.push((writer.id, Err(model_failure(error)))),
            }
        }
        round.sampling_tasks = recycle_list(choices);
    }

    /// Ends the sequences that have reached their end in this step.
    pub fn end_finished(&mut self) {
        let mut ended = std::mem::take(&mut self.iteration.ended);
        for (id, end) in ended.drain(..) {
            self.end_sequence(id, end);
        }
        self.iteration.ended = ended;
    }

    /// A text that was alone in a step that failed has failed. Several are read again, each by itself.
    fn handle_step_failure(&mut self, failure: &RequestFailure) {
        let rows = std::mem::take(&mut self.iteration.rows);
        for row in &rows {
            let Some(writer) = self.running.iter_mut().find(|w| w.id == row.id) else { continue };
            let again = if rows.len() == 1 {
                Err(failure.clone())
            } else {
                self.slots.replace_sequence(&self.model, row.slot).map_err(model_failure)
            };
            match again {
                Ok(()) => {
                    writer.restart_prefill();
                    writer.isolated_until = row.computed + row.token_count;
                }
                Err(failure) => self.iteration.ended.push((row.id, Err(failure))),
            }
        }
        self.iteration.rows = rows;
    }
}
