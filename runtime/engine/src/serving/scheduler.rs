//! The loop of an engine's thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::generate::FinishReason;
use crate::serving::engine::{EngineOptions, Extras, Warn};
use crate::serving::files::{PrefixFiles, Shelf};
use crate::serving::marks::Marks;
use crate::serving::masks::Masks;
use crate::serving::pace::Pace;
use crate::serving::prefixes::{Slot, Slots, Wanted};
use crate::serving::queue::{Ask, CacheUse, Job, Queue, SlotInfo};
use crate::serving::request::{Failure, TextRequest};
use crate::serving::round::Round;
use crate::serving::step::{CacheBlocks, Feed, Limits, Step, StepError, Want};
use crate::serving::writer::{Phase, Writer, end_unread};
use crate::speculate::Drafter;
use crate::tokenizer::Tokenizer;

/// Runs until the queue is closed and everything in it is done. A panic of the model ends the texts of its step; one elsewhere ends those
/// that run.
pub(super) fn run<M: Step + 'static>(
    model: M,
    tokenizer: &Tokenizer,
    queue: &Queue,
    options: EngineOptions,
    extras: Extras,
) {
    let Extras { drafter, files, warn } = extras;
    let _end = AtEnd(queue);
    let shelf = |files: PrefixFiles| {
        let (identity, limits) = (model.identity()?, model.limits());
        Some(Shelf::open(files, identity, limits, limits.truncates))
    };
    let files = files.and_then(shelf);
    let limits = model.limits();
    let mut scheduler = Scheduler {
        limits,
        model,
        tokenizer,
        queue,
        slots: Slots::new(options.sequences, options.kept, limits.truncates, files),
        writers: Vec::new(),
        parked: Vec::new(),
        has_left: false,
        round: Round::default(),
        masks: Masks::default(),
        pace: Pace::new(options.gap),
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

pub(super) fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    let message = panic.downcast_ref::<&str>().map(|s| s.to_string());
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    Failure::Panic(message.unwrap_or_else(|| "unknown panic".into()))
}

/// What the model does for some texts: its errors and panics are theirs.
pub(super) fn of_model<T, E: std::fmt::Display>(work: impl FnOnce() -> Result<T, E>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(model_failure),
        Err(panic) => Err(panicked(panic.as_ref())),
    }
}

/// However the thread ends, nobody waits for it.
struct AtEnd<'q>(&'q Queue);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.thread_ended();
    }
}

pub(super) struct Scheduler<'t, M: Step> {
    pub model: M,
    pub limits: Limits,
    pub tokenizer: &'t Tokenizer,
    pub queue: &'t Queue,
    pub slots: Slots<M>,
    /// In the order of their admission.
    pub writers: Vec<Writer<'t>>,
    /// Texts that were put back since there was no memory to go on with them, the newest first.
    pub parked: Vec<Writer<'t>>,
    /// Whether a text has ended since one was put back.
    pub has_left: bool,
    pub round: Round<M::Sequence>,
    pub masks: Masks,
    pub pace: Pace,
    pub drafter: Option<Box<dyn Drafter>>,
    /// Until it was told.
    pub warn: Option<Warn>,
}

/// How a text ends.
pub(super) type End = Result<FinishReason, Failure>;

pub(super) fn model_failure(error: impl std::fmt::Display) -> Failure {
    Failure::Model(error.to_string())
}

impl<M: Step + 'static> Scheduler<'_, M> {
    /// One step with what comes before and after it. False when there is nothing to do any more.
    fn turn(&mut self) -> bool {
        for ask in self.queue.take_asks() {
            // Who has gone does not want to know.
            let _ = match ask {
                Ask::WarmUp(waiting) => waiting.send(warm_up(&mut self.model, &self.limits)).is_ok(),
                Ask::Forget(adapter, waiting) => {
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
        let of = |w: &Writer| if all { Some(FinishReason::Cancelled) } else { w.ended() };
        let texts = self.writers.iter().chain(&self.parked);
        let ended: Vec<_> = texts.filter_map(|w| Some((w.id, of(w)?))).collect();
        for (id, reason) in ended {
            self.end(id, Ok(reason));
        }
    }

    fn end_job(&self, job: Job) {
        self.queue.update(|stats| stats.cancelled += 1);
        self.queue.ended();
        end_unread(job);
    }

    fn admit(&mut self, job: Job) {
        if job.cancelled() || job.too_late() || self.queue.abandoned() {
            return self.end_job(job);
        }
        let reads = |id: u64| self.writers.iter().any(|w| w.id == id && w.phase == Phase::Reading);
        if let Some(twin) = job.twin.filter(|&twin| reads(twin))
            && let Some(slot) = self.slots.admit_twin(&self.model, job.id)
        {
            let cached = job.request.prompt.len();
            self.add_writer(job, slot, Phase::Waiting { twin }, cached, Marks::default());
            return;
        }
        let id = job.id;
        let most = self.most_cached(&job.request, job.request.prompt.len());
        let wanted = Wanted { adapter: job.request.adapter.as_ref(), prompt: &job.request.prompt, most };
        let start = self.slots.admit(&self.model, id, &wanted);
        let begun = start.as_ref().ok().and_then(Option::as_ref);
        let (slot, cached) = begun.map_or((0, 0), |start| (start.slot, start.cached));
        let marks = match begun.filter(|_| most > 0 && !self.limits.truncates) {
            Some(start) => Marks::new(start, &job.request, self.limits.chunk),
            None => Marks::default(),
        };
        self.add_writer(job, slot, Phase::Reading, cached, marks);
        match start {
            Ok(Some(start)) => {
                self.queue.update(|stats| stats.cached_tokens += start.cached as u64);
                self.round.known.extend(start.logits.map(|logits| (id, logits)));
            }
            Ok(None) => self.drop_writer(id, Err(Failure::Model("no slot is free".into()))),
            Err(error) if self.model.lacks_memory(&error) && self.is_another_active(id) => self.put_off(),
            Err(error) => self.drop_writer(id, Err(model_failure(error))),
        }
    }

    fn add_writer(&mut self, job: Job, slot: usize, phase: Phase, cached: usize, marks: Marks) {
        self.writers.push(Writer::new(job, slot, phase, cached, marks, self.tokenizer, &self.limits));
    }

    /// How much of so many tokens earlier states may stand for. What is left is read in pieces like those of the whole prompt.
    pub fn most_cached(&self, request: &TextRequest, tokens: usize) -> usize {
        if !request.reuse || request.prompt_logprobs.is_some() || self.limits.prompt.is_some() {
            return 0;
        }
        let rest = if ends_alone(tokens, self.limits.chunk) { 1 } else { 2 };
        tokens.saturating_sub(rest)
    }

    /// Ends a text and frees its slot. What it read may serve others, unless it failed.
    pub fn end(&mut self, id: u64, end: End) {
        if let Some(writer) = self.writers.iter().find(|w| w.id == id) {
            match end {
                Ok(_) => self.slots.free(writer.slot),
                Err(_) => self.slots.lose(writer.slot),
            }
        }
        self.drop_writer(id, end);
    }

    pub fn drop_writer(&mut self, id: u64, end: End) {
        let of_id = |w: &Writer| w.id == id;
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
        for writer in self.writers.iter_mut().filter(|w| w.phase == Phase::Waiting { twin: gone }) {
            match next {
                None => {
                    next = Some(writer.id);
                    writer.phase = Phase::Reading;
                    writer.cached = 0;
                }
                Some(twin) => writer.phase = Phase::Waiting { twin },
            }
        }
        let Some(id) = next else { return };
        let Some(writer) = self.writers.iter().find(|w| w.id == id) else { return };
        if let Err(error) = self.slots.clear(&self.model, writer.slot, writer.request.adapter.as_ref()) {
            self.end(id, Err(model_failure(error)));
        }
    }

    fn fail_all(&mut self, failure: &Failure) {
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
        let of = |slot: &Slot<M::Sequence>| SlotInfo { running: slot.running, tokens: slot.fed.len() };
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

impl<M: Step + 'static> Scheduler<'_, M> {
    fn cache_use(&self) -> Option<CacheUse> {
        let CacheBlocks { tokens, all, free, sequence } = self.model.cache_blocks()?;
        let slots = &self.slots.slots;
        let running = slots.iter().filter(|slot| slot.running.is_some());
        let used = running.map(|slot| slot.fed.len().div_ceil(tokens).min(sequence)).sum::<usize>();
        let blocks = all.min(sequence.saturating_mul(slots.len()));
        // Sequences share blocks.
        Some(CacheUse { block: tokens, blocks, used: used.min(all - free).min(blocks) })
    }
}

/// Tokens of a piece that makes weights and scratch memory come.
const WARM_UP: usize = 16;

/// Feeds a piece of a prompt and a next token to a sequence that nobody has.
fn warm_up<M: Step>(model: &mut M, limits: &Limits) -> Result<(), Failure> {
    let most = limits.chunk.min(limits.rows).min(limits.context.map_or(usize::MAX, |context| context - 1));
    let (mut tokens, want) = ([0; WARM_UP], Want::Last);
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
                model.step(&mut [Feed { sequence: &mut sequence, tokens, want }])?;
            }
        }
        model.deal(2, &|_| {});
        Ok::<_, StepError<M>>(())
    })
}

/// Whether the last piece of a prompt is a single row when it is read in pieces of `chunk`.
pub(super) fn ends_alone(prompt: usize, chunk: usize) -> bool {
    chunk != 0 && prompt % chunk == 1 || prompt == 1
}
