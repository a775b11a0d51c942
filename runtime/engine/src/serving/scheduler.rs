//! The loop of an engine's thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::generate::FinishReason;
use crate::serving::engine::{EngineExtras, EngineOptions, WarningSink};
use crate::serving::files::{DiskCache, DiskCacheOptions};
use crate::serving::marks::CheckpointPositions;
use crate::serving::masks::MaskWorkers;
use crate::serving::pace::PrefillPacer;
use crate::serving::prefixes::{PrefixQuery, SequenceSlot, SlotTable};
use crate::serving::queue::{CacheUsage, EngineCommand, QueuedRequest, RequestQueue, SlotInfo};
use crate::serving::request::{EngineRequest, RequestFailure};
use crate::serving::round::IterationState;
use crate::serving::step::{CacheBlocks, ModelLimits, ModelRunner, OutputRows, RunnerError, SequenceInput};
use crate::serving::writer::{RunningSequence, SequencePhase, end_unread};
use crate::speculate::Drafter;
use crate::tokenizer::Tokenizer;

/// Runs until the queue is closed and everything in it is done. A panic of the model ends the texts of its step; one elsewhere ends those
/// that run.
pub(super) fn run<M: ModelRunner + 'static>(
    model: M,
    tokenizer: &Tokenizer,
    queue: &RequestQueue,
    options: EngineOptions,
    extras: EngineExtras,
) {
    let EngineExtras { drafter, files, warn } = extras;
    let _end = ThreadEndGuard(queue);
    let shelf = |files: DiskCacheOptions| {
        let (identity, limits) = (model.identity()?, model.limits());
        Some(DiskCache::open(files, identity, limits, limits.truncates))
    };
    let files = files.and_then(shelf);
    let limits = model.limits();
    let mut scheduler = Scheduler {
        limits,
        model,
        tokenizer,
        queue,
        slots: SlotTable::new(options.sequences, options.kept, limits.truncates, files),
        writers: Vec::new(),
        parked: Vec::new(),
        has_left: false,
        round: IterationState::default(),
        masks: MaskWorkers::default(),
        pace: PrefillPacer::new(options.gap),
        drafter: drafter.map(|make| make()),
        warn,
    };
    scheduler.publish();
    loop {
        match catch_unwind(AssertUnwindSafe(|| scheduler.turn())) {
            Ok(true) => {}
            Ok(false) => break,
            Err(panic) => scheduler.fail_all(&panicked(panic.as_ref())),
        }
    }
    // States that are not kept are read again.
    let Scheduler { slots, model, .. } = &mut scheduler;
    let _ = catch_unwind(AssertUnwindSafe(|| slots.save_all(model)));
}

pub(super) fn panicked(panic: &(dyn std::any::Any + Send)) -> RequestFailure {
    let message = panic.downcast_ref::<&str>().map(|s| s.to_string());
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    RequestFailure::Panic(message.unwrap_or_else(|| "unknown panic".into()))
}

/// What the model does for some texts: its errors and panics are theirs.
pub(super) fn of_model<T, E: std::fmt::Display>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, RequestFailure> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(model_failure),
        Err(panic) => Err(panicked(panic.as_ref())),
    }
}

/// However the thread ends, nobody waits for it.
struct ThreadEndGuard<'q>(&'q RequestQueue);

impl Drop for ThreadEndGuard<'_> {
    fn drop(&mut self) {
        self.0.thread_ended();
    }
}

pub(super) struct Scheduler<'t, M: ModelRunner> {
    pub model: M,
    pub limits: ModelLimits,
    pub tokenizer: &'t Tokenizer,
    pub queue: &'t RequestQueue,
    pub slots: SlotTable<M>,
    /// In the order of their admission.
    pub writers: Vec<RunningSequence<'t>>,
    /// Texts that were put back since there was no memory to go on with them, the newest first.
    pub parked: Vec<RunningSequence<'t>>,
    /// Whether a text has ended since one was put back.
    pub has_left: bool,
    pub round: IterationState<M::Sequence>,
    pub masks: MaskWorkers,
    pub pace: PrefillPacer,
    pub drafter: Option<Box<dyn Drafter>>,
    /// Until it was told.
    pub warn: Option<WarningSink>,
}

/// How a text ends.
pub(super) type SequenceEnd = Result<FinishReason, RequestFailure>;

pub(super) fn model_failure(error: impl std::fmt::Display) -> RequestFailure {
    RequestFailure::Model(error.to_string())
}

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    /// One step with what comes before and after it. False when there is nothing to do any more.
    fn turn(&mut self) -> bool {
        for ask in self.queue.take_asks() {
            // Who has gone does not want to know.
            let _ = match ask {
                EngineCommand::WarmUp(waiting) => {
                    waiting.send(warm_up(&mut self.model, &self.limits)).is_ok()
                }
                EngineCommand::Forget(adapter, waiting) => {
                    self.slots.forget(&adapter);
                    drop(adapter);
                    waiting.send(()).is_ok()
                }
            };
        }
        self.end_unwanted();
        self.resume();
        self.slots.save_resting(&self.model, Instant::now());
        while self.parked.is_empty() && self.slots.has_free() {
            if self.writers.is_empty() {
                self.save_until_there_is_work();
            }
            match self.queue.pop(self.writers.is_empty()) {
                Some(job) => self.admit(job),
                None if self.writers.is_empty() => return !self.queue.is_over(),
                None => break,
            }
        }
        self.choose_known();
        self.choose_masked();
        let begin = Instant::now();
        self.step();
        self.tell_notice();
        self.publish();
        self.queue.update(|stats| {
            stats.steps += 1;
            stats.busy += begin.elapsed();
        });
        true
    }

    /// Nobody waits for a step: states go into files, until somebody does, or none is left that has to.
    fn save_until_there_is_work(&mut self) {
        while let Some(at) = self.slots.save_resting(&self.model, Instant::now()) {
            if self.queue.wait_for_work(at) {
                break;
            }
        }
    }

    /// Tells what the model has to say, once.
    fn tell_notice(&mut self) {
        if self.warn.is_some()
            && let Some(notice) = self.model.notice()
            && let Some(warn) = self.warn.take()
        {
            warn(&notice);
        }
    }

    /// Ends texts that were cancelled or are too late, those that wait among them.
    fn end_unwanted(&mut self) {
        for job in self.queue.take_ended() {
            self.end_job(job);
        }
        let all = self.queue.abandoned();
        let of = |w: &RunningSequence| if all { Some(FinishReason::Cancelled) } else { w.ended() };
        let texts = self.writers.iter().chain(&self.parked);
        let ended: Vec<_> = texts.filter_map(|w| Some((w.id, of(w)?))).collect();
        for (id, reason) in ended {
            self.end(id, Ok(reason));
        }
    }

    fn end_job(&self, job: QueuedRequest) {
        self.queue.update(|stats| stats.cancelled += 1);
        self.queue.ended();
        end_unread(job);
    }

    fn admit(&mut self, job: QueuedRequest) {
        if job.cancelled() || job.too_late() || self.queue.abandoned() {
            return self.end_job(job);
        }
        let reads = |id: u64| self.writers.iter().any(|w| w.id == id && w.phase == SequencePhase::Reading);
        if let Some(twin) = job.twin.filter(|&twin| reads(twin))
            && let Some(slot) = self.slots.admit_twin(&self.model, job.id)
        {
            let cached = job.request.prompt.len();
            self.add_writer(
                job,
                slot,
                SequencePhase::Waiting { twin },
                cached,
                CheckpointPositions::default(),
            );
            return;
        }
        let id = job.id;
        let most = self.most_cached(&job.request, job.request.prompt.len());
        let wanted = PrefixQuery { adapter: job.request.adapter.as_ref(), prompt: &job.request.prompt, most };
        let start = self.slots.admit(&self.model, id, &wanted);
        let begun = start.as_ref().ok().and_then(Option::as_ref);
        let (slot, cached) = begun.map_or((0, 0), |start| (start.slot, start.cached));
        let marks = match begun.filter(|_| most > 0 && !self.limits.truncates) {
            Some(start) => CheckpointPositions::new(start, &job.request, self.limits.chunk),
            None => CheckpointPositions::default(),
        };
        self.add_writer(job, slot, SequencePhase::Reading, cached, marks);
        match start {
            Ok(Some(start)) => {
                self.queue.update(|stats| stats.cached_tokens += start.cached as u64);
                self.round.known.extend(start.logits.map(|logits| (id, logits)));
            }
            Ok(None) => self.drop_writer(id, Err(RequestFailure::Model("no slot is free".into()))),
            Err(error) if self.model.lacks_memory(&error) && self.is_another_active(id) => self.put_off(),
            Err(error) => self.drop_writer(id, Err(model_failure(error))),
        }
    }

    fn add_writer(
        &mut self,
        job: QueuedRequest,
        slot: usize,
        phase: SequencePhase,
        cached: usize,
        marks: CheckpointPositions,
    ) {
        self.writers.push(RunningSequence::new(
            job,
            slot,
            phase,
            cached,
            marks,
            self.tokenizer,
            &self.limits,
        ));
    }

    /// How much of so many tokens earlier states may stand for. What is left is read in pieces like those of the whole prompt.
    pub fn most_cached(&self, request: &EngineRequest, tokens: usize) -> usize {
        if !request.reuse || request.prompt_logprobs.is_some() || self.limits.prompt.is_some() {
            return 0;
        }
        let rest = if ends_alone(tokens, self.limits.chunk) { 1 } else { 2 };
        tokens.saturating_sub(rest)
    }

    /// Ends a text and frees its slot. What it read may serve others, unless it failed.
    pub fn end(&mut self, id: u64, end: SequenceEnd) {
        if let Some(writer) = self.writers.iter().find(|w| w.id == id) {
            match end {
                Ok(_) => self.slots.free(writer.slot),
                Err(_) => self.slots.lose(writer.slot),
            }
        }
        self.drop_writer(id, end);
    }

    pub fn drop_writer(&mut self, id: u64, end: SequenceEnd) {
        let of_id = |w: &RunningSequence| w.id == id;
        let writer = match self.writers.iter().position(of_id) {
            Some(index) => self.writers.remove(index),
            None => match self.parked.iter().position(of_id) {
                Some(index) => self.parked.remove(index),
                None => return,
            },
        };
        if writer.masking {
            self.masks.forget(id);
        }
        self.has_left = true;
        self.next_reader(id);
        self.publish();
        self.queue.update(|stats| match end {
            Ok(FinishReason::Cancelled) => stats.cancelled += 1,
            Ok(_) => stats.finished += 1,
            Err(_) => stats.failed += 1,
        });
        self.queue.ended();
        match end {
            Ok(reason) => {
                writer.finish(reason);
            }
            Err(failure) => writer.fail(failure),
        }
    }

    /// Of those that wait for a text's prompt, the first reads it from now on.
    fn next_reader(&mut self, gone: u64) {
        let mut next = None;
        for writer in self.writers.iter_mut().filter(|w| w.phase == SequencePhase::Waiting { twin: gone }) {
            match next {
                None => {
                    next = Some(writer.id);
                    writer.phase = SequencePhase::Reading;
                    writer.cached = 0;
                }
                Some(twin) => writer.phase = SequencePhase::Waiting { twin },
            }
        }
        let Some(id) = next else { return };
        let Some(writer) = self.writers.iter().find(|w| w.id == id) else { return };
        if let Err(error) = self.slots.clear(&self.model, writer.slot, writer.request.adapter.as_ref()) {
            self.end(id, Err(model_failure(error)));
        }
    }

    fn fail_all(&mut self, failure: &RequestFailure) {
        for slot in 0..self.slots.slots.len() {
            self.slots.lose(slot);
        }
        while let Some(id) = self.writers.first().or(self.parked.first()).map(|w| w.id) {
            self.drop_writer(id, Err(failure.clone()));
        }
        self.queue.all_ended();
    }

    /// Tells what runs, before anybody is told that a text has ended.
    fn publish(&mut self) {
        let of =
            |slot: &SequenceSlot<M::Sequence>| SlotInfo { running: slot.running, tokens: slot.fed.len() };
        let cache = self.cache_use();
        let round = &mut self.round;
        let [written, drafted, accepted] =
            [&mut round.written, &mut round.drafted, &mut round.accepted].map(std::mem::take);
        self.queue.update(|stats| {
            stats.written_tokens += written;
            stats.drafted_tokens += drafted;
            stats.accepted_tokens += accepted;
            stats.states_lost = self.slots.lost;
            if let Some(error) = self.slots.lost_because.take() {
                stats.state_lost_because = Some(error);
            }
            stats.running = self.writers.len() + self.parked.len();
            stats.cache = cache;
            stats.slots.clear();
            stats.slots.extend(self.slots.slots.iter().map(of));
        });
    }
}

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    fn cache_use(&self) -> Option<CacheUsage> {
        let CacheBlocks { tokens, all, free, sequence } = self.model.cache_blocks()?;
        let slots = &self.slots.slots;
        let running = slots.iter().filter(|slot| slot.running.is_some());
        let used = running.map(|slot| slot.fed.len().div_ceil(tokens).min(sequence)).sum::<usize>();
        let blocks = all.min(sequence.saturating_mul(slots.len()));
        // Sequences share blocks.
        Some(CacheUsage { block: tokens, blocks, used: used.min(all - free).min(blocks) })
    }
}

/// Tokens of a piece that makes weights and scratch memory come.
const WARM_UP: usize = 16;

/// Feeds a piece of a prompt and a next token to a sequence that nobody has.
fn warm_up<M: ModelRunner>(model: &mut M, limits: &ModelLimits) -> Result<(), RequestFailure> {
    let most = limits.chunk.min(limits.rows).min(limits.context.map_or(usize::MAX, |context| context - 1));
    let (mut tokens, want) = ([0; WARM_UP], OutputRows::Last);
    let mut first = most.clamp(1, WARM_UP);
    if let Some(start) = limits.decoder_start {
        // A source text and what has to be behind it.
        tokens = [i32::from(start == 0); WARM_UP];
        first = first.max(2);
        tokens[first - 1] = start;
    }
    of_model(|| {
        let mut sequence = model.sequence()?;
        for tokens in [&tokens[..first], &tokens[..1]] {
            // Who has all the memory is warm.
            if model.reserve(&mut sequence, tokens.len())? {
                model.step(&mut [SequenceInput { sequence: &mut sequence, tokens, want }])?;
            }
        }
        model.deal(2, &|_| {});
        Ok::<_, RunnerError<M>>(())
    })
}

/// Whether the last piece of a prompt is a single row when it is read in pieces of `chunk`.
pub(super) fn ends_alone(prompt: usize, chunk: usize) -> bool {
    chunk != 0 && prompt % chunk == 1 || prompt == 1
}
