//! One step of an engine: which rows it has, and what becomes of their logits.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::generate::LanguageModel;
use crate::grammar::Grammar;
use crate::serving::cost::StepLoad;
use crate::serving::pace::{SMALLEST, piece};
use crate::serving::recycle::recycle;
use crate::serving::request::RequestFailure;
use crate::serving::scheduler::{Scheduler, SequenceEnd, ends_alone, model_failure, of_model, panicked};
use crate::serving::step::{ModelLimits, ModelRunner, OutputRows, SequenceInput, wanted};
use crate::serving::writer::{RunningSequence, SamplingOutcome, SequencePhase};
use crate::speculate::CHEAP_ROWS;
use mlcc_runtime::TokenCandidate;

/// How long the engine waits for masks before it looks for new texts.
const LOOK: Duration = Duration::from_millis(5);

/// The lists of a step; they are kept.
pub(super) struct IterationState<S: 'static> {
    pub rows: Vec<ScheduledRow>,
    feeds: Vec<SequenceInput<'static, S>>,
    choices: Vec<Mutex<SamplingTask<'static, 'static>>>,
    /// Of each feed, the text that may choose among its likeliest tokens.
    asked: Vec<Option<u64>>,
    /// Grammars that have come back with their masks.
    pub grammars: Vec<(u64, Grammar)>,
    /// Time of the last step.
    took: Duration,
    /// Texts the prompts of which were known as a whole, with the logits behind them.
    pub known: Vec<(u64, Vec<f32>)>,
    /// Texts that have ended in the step.
    pub ended: Vec<(u64, SequenceEnd)>,
    /// Tokens chosen since that was told last, those of drafts and the right ones of these.
    pub written: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// Whose turn it was last, where some texts are fed alone.
    was_alone: bool,
}

impl<S> Default for IterationState<S> {
    fn default() -> Self {
        IterationState {
            rows: Vec::new(),
            feeds: Vec::new(),
            choices: Vec::new(),
            asked: Vec::new(),
            grammars: Vec::new(),
            took: Duration::ZERO,
            known: Vec::new(),
            ended: Vec::new(),
            written: 0,
            drafted: 0,
            accepted: 0,
            was_alone: false,
        }
    }
}

impl<S> IterationState<S> {
    /// Whose turn it was, for [`IterationState::take_turn_back`].
    pub fn turn(&self) -> bool {
        self.was_alone
    }

    /// Forgets a plan that will not be run.
    pub fn take_turn_back(&mut self, before: bool) {
        self.was_alone = before;
    }

    fn note(&mut self, id: u64, taken: SamplingOutcome) {
        self.written += taken.chosen as u64;
        self.drafted += taken.drafted as u64;
        self.accepted += taken.accepted as u64;
        match taken.end {
            Ok(None) => {}
            Ok(Some(reason)) => self.ended.push((id, Ok(reason))),
            Err(failure) => self.ended.push((id, Err(failure))),
        }
    }
}

/// What a step feeds of a text.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScheduledRow {
    pub id: u64,
    pub slot: usize,
    /// How many tokens, and how many were fed before.
    pub count: usize,
    fed: usize,
    want: OutputRows,
    writing: bool,
    /// Whether the first token of the text is chosen behind it.
    pub first: bool,
}

/// A text that chooses tokens, which a worker does.
struct SamplingTask<'a, 't> {
    writer: &'a mut RunningSequence<'t>,
    logits: &'a [f32],
    /// Tokens that were fed before the first row.
    past: usize,
    taken: Option<SamplingOutcome>,
}

impl SamplingTask<'_, '_> {
    fn choose(&mut self, limits: &ModelLimits) {
        let SamplingTask { writer, logits, past, .. } = self;
        let chosen = catch_unwind(AssertUnwindSafe(|| writer.take(logits, *past, limits)));
        // Its sequence and sampler are unknown now, and it ends.
        self.taken = Some(chosen.unwrap_or_else(|panic| SamplingOutcome {
            end: Err(panicked(panic.as_ref())),
            chosen: 0,
            drafted: 0,
            accepted: 0,
            fed: *past,
        }));
    }
}

/// What these rows are to the model.
fn load(rows: &[ScheduledRow]) -> StepLoad {
    let mut load = StepLoad::default();
    for row in rows {
        if row.writing {
            load.texts += 1;
        } else {
            load.rows += row.count;
            load.row_keys += StepLoad::keys_of(row.count, row.fed);
        }
    }
    load
}

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    /// Plans a step, runs it and deals out its logits.
    pub fn step(&mut self) {
        self.plan_with_room();
        if self.round.rows.is_empty() {
            // Nothing but masks keeps texts from going on.
            if !self.masks.is_idle() {
                self.masks.wait(LOOK);
            }
            return;
        }
        let begin = Instant::now();
        let result = self.run_step();
        self.round.took = begin.elapsed();
        let load = load(&self.round.rows);
        if self.round.rows.iter().all(|row| !row.writing || row.count == 1) {
            self.pace.stepped(&load, begin.elapsed());
        }
        self.queue.update(|stats| stats.prompt_tokens += load.rows as u64);
        match result {
            Ok(()) => self.take_logits(),
            Err(failure) => self.step_failed(&failure),
        }
        self.end_all();
    }

    /// Drafts for texts that are being written, as far as rows are cheap. Whether there are any.
    pub fn draft(&mut self) -> bool {
        let Some(drafter) = self.drafter.as_deref_mut().filter(|_| self.limits.rewinds) else { return false };
        let mut drafted = false;
        // Masks of drafts would be computed in the step.
        let writing = |w: &&mut RunningSequence| {
            w.phase == SequencePhase::Writing && w.alone_until == 0 && !w.has_grammar
        };
        let mut rows = self.writers.iter_mut().filter(writing).count();
        for writer in self.writers.iter_mut().filter(writing) {
            let slot = &mut self.slots.slots[writer.slot];
            let most = writer.text.most_drafts(slot.fed.len());
            let most = most.min(CHEAP_ROWS.saturating_sub(rows));
            let Some(sequence) = slot.sequence.as_mut().filter(|_| most > 0) else { continue };
            if matches!(self.model.reserve(sequence, 1 + most), Ok(true)) {
                writer.text.draft(writer.slot, drafter, most);
                rows += writer.text.drafts();
                drafted |= writer.text.drafts() > 0;
            }
        }
        drafted
    }

    /// The next token of every text, then pieces of prompts, the oldest first.
    pub fn plan(&mut self) {
        self.round.rows.clear();
        if self.plan_alone() {
            return;
        }
        for writer in self.writers.iter().filter(|w| w.phase == SequencePhase::Writing && w.alone_until == 0)
        {
            let fed = self.slots.slots[writer.slot].fed.len();
            let count = writer.text.tokens().len() - fed;
            let want = if count == 1 { OutputRows::Last } else { OutputRows::All };
            let slot = writer.slot;
            self.round.rows.push(ScheduledRow {
                id: writer.id,
                slot,
                count,
                fed,
                want,
                writing: true,
                first: false,
            });
        }
        let rows: usize = self.round.rows.iter().map(|row| row.count).sum();
        let most = self.limits.rows.saturating_sub(rows).max(SMALLEST);
        let reading = |w: &&RunningSequence| w.phase == SequencePhase::Reading && w.alone_until == 0;
        let waiting = self.writers.iter().filter(reading).count().saturating_sub(1);
        let mut room = self.pace.room(load(&self.round.rows).texts, waiting, most);
        for writer in self.writers.iter().filter(reading) {
            let past = self.slots.slots[writer.slot].fed.len();
            let budget = room.rows(past);
            if budget < SMALLEST {
                break;
            }
            if let Some(row) = self.piece_of(writer, budget) {
                room.take(row.count, past);
                self.round.rows.push(row);
            }
        }
        // As their sequences lie.
        self.round.rows.sort_unstable_by_key(|row| row.slot);
    }

    /// A text of a step that failed is fed by itself until it is beyond that, in turns with the others. Whether there is one.
    fn plan_alone(&mut self) -> bool {
        let suspect = |w: &&RunningSequence| w.alone_until > 0 && w.is_fed();
        let others = self.writers.iter().any(|w| w.alone_until == 0 && w.is_fed());
        let turn = !self.round.was_alone || !others;
        let Some(writer) = self.writers.iter().find(suspect).filter(|_| turn) else {
            self.round.was_alone = false;
            return false;
        };
        self.round.was_alone = true;
        let row = match writer.phase {
            SequencePhase::Writing => {
                let (slot, fed) = (writer.slot, self.slots.slots[writer.slot].fed.len());
                let (id, want) = (writer.id, OutputRows::Last);
                Some(ScheduledRow { id, slot, count: 1, fed, want, writing: true, first: false })
            }
            _ => self.piece_of(writer, self.limits.chunk),
        };
        self.round.rows.extend(row);
        true
    }

    /// About `budget` tokens of what a text has to read.
    fn piece_of(&self, writer: &RunningSequence, budget: usize) -> Option<ScheduledRow> {
        let slot = &self.slots.slots[writer.slot];
        let (fed, to_read) = (slot.fed.len(), writer.to_read());
        let left = to_read - fed;
        let count = match slot.sequence.as_ref()?.chunk() {
            usize::MAX => left,
            chunk => {
                let budget = budget.min(self.limits.chunk);
                match writer.marks.next(fed, to_read) {
                    Some(mark) => piece(mark - fed, budget, false),
                    None => piece(left, budget, ends_alone(to_read, chunk)),
                }
            }
        };
        let first = count == left && writer.is_new();
        let want = match writer.scores() {
            Some(_) => OutputRows::All,
            None if first => OutputRows::Last,
            None => OutputRows::Nothing,
        };
        Some(ScheduledRow { id: writer.id, slot: writer.slot, count, fed, want, writing: false, first })
    }

    fn run_step(&mut self) -> Result<(), RequestFailure> {
        self.lend_grammars();
        let mut asked = std::mem::take(&mut self.round.asked);
        asked.clear();
        let mut feeds: Vec<SequenceInput<'_, M::Sequence>> = recycle(std::mem::take(&mut self.round.feeds));
        let mut rows = self.round.rows.iter().peekable();
        for (index, slot) in self.slots.slots.iter_mut().enumerate() {
            let Some(row) = rows.next_if(|row| row.slot == index) else { continue };
            let writer = self.writers.iter().find(|w| w.id == row.id);
            let (Some(writer), Some(sequence)) = (writer, &mut slot.sequence) else { continue };
            let tokens = &writer.text.tokens()[row.fed..row.fed + row.count];
            // Once for the whole text, if its length is known.
            slot.fed.reserve(writer.text.room() - row.fed);
            slot.fed.extend_from_slice(tokens);
            let among = row.writing && row.count == 1 && writer.needs_no_logits() && !writer.has_grammar;
            asked.push(among.then_some(row.id));
            feeds.push(SequenceInput { sequence, tokens: &slot.fed[row.fed..], want: row.want });
        }
        let (model, writers) = (&mut self.model, &mut self.writers);
        let mut enough = |feed: usize, likeliest: &[TokenCandidate]| {
            let id = asked.get(feed).copied().flatten();
            let writer = id.and_then(|id| writers.iter_mut().find(|w| w.id == id));
            writer.is_some_and(|writer| writer.text.choose_among(likeliest))
        };
        let result = of_model(|| model.step_likeliest(&mut feeds, &mut enough));
        self.round.feeds = recycle(feeds);
        self.round.asked = asked;
        result
    }

    fn take_logits(&mut self) {
        let rows = std::mem::take(&mut self.round.rows);
        let (vocab, mut at) = (self.limits.vocab, 0);
        for row in &rows {
            let from = at;
            at += wanted(row.want, row.count) * vocab;
            if let Err(failure) = self.take_row(row, from..at) {
                self.round.ended.push((row.id, Err(failure)));
            }
        }
        self.round.rows = rows;
        self.choose(None);
    }

    /// What a row has led to, but for the choice of tokens.
    fn take_row(&mut self, row: &ScheduledRow, range: Range<usize>) -> Result<(), RequestFailure> {
        let Some(writer) = self.writers.iter_mut().find(|w| w.id == row.id) else { return Ok(()) };
        let Some(logits) = self.model.logits().get(range.clone()) else {
            return Err(RequestFailure::Model("it gave fewer logits than were wanted".into()));
        };
        let fed = row.fed + row.count;
        if fed >= writer.alone_until {
            writer.alone_until = 0;
        }
        if row.writing {
            writer.chooses = Some((range, row.fed + 1));
            return Ok(());
        }
        if let Some(top) = writer.scores() {
            writer.score(logits.chunks_exact(self.limits.vocab), row.fed, top);
        }
        if fed < writer.to_read() {
            if let Some(inner) = writer.marks.pass(fed) {
                self.slots.keep(&self.model, row.slot, &[], inner);
            }
            return Ok(());
        }
        if !writer.is_new() {
            writer.phase = SequencePhase::Writing;
            return Ok(());
        }
        let last = logits.len() - self.limits.vocab;
        self.slots.keep(&self.model, row.slot, &logits[last..], false);
        self.prompt_is_read(row.id, range.start + last..range.end);
        Ok(())
    }

    /// A text, and those that waited for it, choose their first tokens from these logits.
    fn prompt_is_read(&mut self, id: u64, range: Range<usize>) {
        let Some(from) = self.writers.iter().find(|w| w.id == id).map(|w| w.slot) else { return };
        let Scheduler { writers, slots, model, round, .. } = self;
        let mut without_memory = Vec::new();
        for writer in writers {
            let is_twin = writer.phase == SequencePhase::Waiting { twin: id };
            if is_twin && let Err(error) = slots.copy(model, from, writer.slot) {
                match model.lacks_memory(&error) {
                    true => without_memory.push(writer.id),
                    false => round.ended.push((writer.id, Err(model_failure(error)))),
                }
            } else if is_twin || writer.id == id {
                writer.prompt_is_read();
                writer.chooses = Some((range.clone(), slots.slots[writer.slot].fed.len()));
            }
        }
        self.park_all(&without_memory);
    }

    /// The same of texts the prompts of which were known as a whole; they are dealt out together.
    pub fn choose_known(&mut self) {
        let mut all: Vec<f32> = Vec::new();
        for (id, logits) in std::mem::take(&mut self.round.known) {
            let begin = all.len();
            all.extend(logits);
            self.prompt_is_read(id, begin..all.len());
        }
        if !all.is_empty() {
            self.choose(Some(&all));
            self.end_all();
        }
    }

    /// Chooses the next tokens, texts dealt out to workers: each has a sampler of its own. Without `logits` they are the model's.
    pub fn choose(&mut self, logits: Option<&[f32]>) {
        // Others wait no longer than they would notice.
        self.take_grammars(self.round.took / 4);
        let Scheduler { model, limits, writers, slots, round, .. } = self;
        let logits = logits.unwrap_or_else(|| model.logits());
        let mut choices: Vec<Mutex<SamplingTask<'_, '_>>> = recycle(std::mem::take(&mut round.choices));
        for writer in writers.iter_mut() {
            let Some((range, past)) = writer.chooses.take() else { continue };
            let Some(logits) = logits.get(range) else { continue };
            if writer.masking {
                writer.held = Some((logits.to_vec(), past));
                writer.phase = SequencePhase::Masking;
            } else {
                choices.push(Mutex::new(SamplingTask { writer, logits, past, taken: None }));
            }
        }
        model.deal(choices.len(), &|index| {
            // Nobody else has it.
            choices[index].lock().unwrap_or_else(PoisonError::into_inner).choose(limits);
        });
        for choice in &mut choices {
            let SamplingTask { writer, taken, .. } = choice.get_mut().unwrap_or_else(PoisonError::into_inner);
            let Some(taken) = taken.take() else {
                let failure = RequestFailure::Model("no token was chosen".into());
                round.ended.push((writer.id, Err(failure)));
                continue;
            };
            match slots.truncate(writer.slot, taken.fed) {
                Ok(()) => round.note(writer.id, taken),
                Err(error) => round.ended.push((writer.id, Err(model_failure(error)))),
            }
        }
        round.choices = recycle(choices);
    }

    /// Ends the texts that have come to their end in this step.
    pub fn end_all(&mut self) {
        let mut ended = std::mem::take(&mut self.round.ended);
        for (id, end) in ended.drain(..) {
            self.end(id, end);
        }
        self.round.ended = ended;
    }

    /// A text that was alone in a step that failed has failed. Several are read again, each by itself.
    fn step_failed(&mut self, failure: &RequestFailure) {
        let rows = std::mem::take(&mut self.round.rows);
        for row in &rows {
            let Some(writer) = self.writers.iter_mut().find(|w| w.id == row.id) else { continue };
            let again = if rows.len() == 1 {
                Err(failure.clone())
            } else {
                self.slots.renew(&self.model, row.slot).map_err(model_failure)
            };
            match again {
                Ok(()) => {
                    writer.read_again();
                    writer.alone_until = row.fed + row.count;
                }
                Err(failure) => self.round.ended.push((row.id, Err(failure))),
            }
        }
        self.round.rows = rows;
    }
}
