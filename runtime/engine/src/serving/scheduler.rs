//! The loop of an engine's thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::generate::{FinishReason, LanguageModel};
use crate::sampler::logprobs;
use crate::serving::engine::EngineOptions;
use crate::serving::pace::{Pace, piece};
use crate::serving::prefixes::{Slot, Slots};
use crate::serving::queue::{Job, Queue, SlotInfo};
use crate::serving::request::Failure;
use crate::serving::step::{Feed, Limits, Step};
use crate::serving::writer::{Phase, Writer, end_unread};
use crate::tokenizer::{TokenId, Tokenizer};

/// Runs until the queue is closed and everything in it is done. A panic of the model ends the texts of its step; one elsewhere ends those
/// that run.
pub(super) fn run<M: Step>(model: M, tokenizer: &Tokenizer, queue: &Queue, options: EngineOptions) {
    let _end = AtEnd(queue);
    let mut scheduler = Scheduler {
        limits: model.limits(),
        model,
        tokenizer,
        queue,
        slots: Slots::new(options.sequences, options.kept),
        writers: Vec::new(),
        pace: Pace::new(options.gap),
    };
    scheduler.publish();
    loop {
        match catch_unwind(AssertUnwindSafe(|| scheduler.turn())) {
            Ok(true) => {}
            Ok(false) => return,
            Err(panic) => scheduler.fail_all(&panicked(panic.as_ref())),
        }
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    let message = panic.downcast_ref::<&str>().map(|s| s.to_string());
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    Failure::Panic(message.unwrap_or_else(|| "unknown panic".into()))
}

/// What the model does for some texts: its errors and panics are theirs.
fn of_model<T, E: std::fmt::Display>(work: impl FnOnce() -> Result<T, E>) -> Result<T, Failure> {
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

struct Scheduler<'t, M: Step> {
    model: M,
    limits: Limits,
    tokenizer: &'t Tokenizer,
    queue: &'t Queue,
    slots: Slots<M>,
    /// In the order of their launch.
    writers: Vec<Writer<'t>>,
    pace: Pace,
}

/// How a text ends.
type End = Result<FinishReason, Failure>;

fn model_failure(error: impl std::fmt::Display) -> Failure {
    Failure::Model(error.to_string())
}

impl<M: Step> Scheduler<'_, M> {
    /// One step with what comes before and after it. False when there is nothing to do any more.
    fn turn(&mut self) -> bool {
        self.end_unwanted();
        while self.slots.has_free() {
            match self.queue.pop(self.writers.is_empty()) {
                Some(job) => self.admit(job),
                None if self.writers.is_empty() => return false,
                None => break,
            }
        }
        let begin = Instant::now();
        self.decode();
        self.read_prompts();
        self.publish();
        self.queue.update(|stats| {
            stats.steps += 1;
            stats.busy += begin.elapsed();
        });
        true
    }

    /// Ends texts that were cancelled or are too late, those that wait among them.
    fn end_unwanted(&mut self) {
        for job in self.queue.take_ended() {
            self.end_job(job);
        }
        let all = self.queue.abandoned();
        let of = |w: &Writer| if all { Some(FinishReason::Cancelled) } else { w.ended() };
        let ended: Vec<_> = self.writers.iter().filter_map(|w| Some((w.id, of(w)?))).collect();
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
            && let Some(slot) = self.slots.admit_twin(job.id)
        {
            let cached = job.request.prompt.len();
            self.writers.push(Writer::new(job, slot, Phase::Waiting { twin }, cached, self.tokenizer));
            return;
        }
        let id = job.id;
        let start = self.slots.admit(&self.model, id, &job.request.prompt, self.most_cached(&job));
        let (slot, cached) =
            start.as_ref().ok().and_then(Option::as_ref).map_or((0, 0), |s| (s.slot, s.cached));
        self.writers.push(Writer::new(job, slot, Phase::Reading, cached, self.tokenizer));
        match start {
            Ok(Some(start)) => {
                self.queue.update(|stats| stats.cached_tokens += start.cached as u64);
                if let Some(logits) = start.logits {
                    self.begin_writing(id, &logits);
                }
            }
            Ok(None) => self.drop_writer(id, Err(Failure::Model("no slot is free".into()))),
            Err(error) => self.drop_writer(id, Err(model_failure(error))),
        }
    }

    /// How much of a prompt earlier states may stand for. What is left is read in pieces like those of the whole prompt.
    fn most_cached(&self, job: &Job) -> usize {
        let request = &job.request;
        if !request.reuse || request.prompt_logprobs.is_some() || self.limits.prompt.is_some() {
            return 0;
        }
        let rest = if ends_alone(request.prompt.len(), self.limits.chunk) { 1 } else { 2 };
        request.prompt.len().saturating_sub(rest)
    }

    /// One token of every text that is being written.
    fn decode(&mut self) {
        let mut next: Vec<Option<TokenId>> = vec![None; self.slots.slots.len()];
        for writer in &self.writers {
            if let Phase::Writing(token) = writer.phase {
                next[writer.slot] = Some(token);
            }
        }
        let mut feeds = Vec::with_capacity(next.len());
        for (slot, token) in self.slots.slots.iter_mut().zip(&next) {
            if let (Some(sequence), Some(token)) = (&mut slot.sequence, token) {
                slot.fed.push(*token);
                feeds.push(Feed { sequence, tokens: std::slice::from_ref(token) });
            }
        }
        if feeds.is_empty() {
            return;
        }
        let begin = Instant::now();
        let result = beside(&mut self.writers, || of_model(|| self.model.step(&mut feeds)));
        self.pace.decoded(begin.elapsed());
        let writing = |w: &&Writer| matches!(w.phase, Phase::Writing(_));
        let ids: Vec<u64> = self.writers.iter().filter(writing).map(|w| w.id).collect();
        match result {
            Ok(()) => ids.into_iter().for_each(|id| self.write(id, None)),
            Err(failure) => ids.into_iter().for_each(|id| self.end(id, Err(failure.clone()))),
        }
    }

    /// Chooses the next token of a text, from these logits or those of its sequence.
    fn write(&mut self, id: u64, logits: Option<&[f32]>) {
        let Some(writer) = self.writers.iter_mut().find(|w| w.id == id) else { return };
        let slot = &self.slots.slots[writer.slot];
        let Some(sequence) = &slot.sequence else { return };
        let logits = logits.unwrap_or_else(|| self.model.logits(sequence));
        let end = writer.write(logits, slot.fed.len(), &self.limits);
        if end.is_ok() && writer.request.max_tokens != Some(0) {
            self.queue.update(|stats| stats.written_tokens += 1);
        }
        match end {
            Ok(None) => {}
            Ok(Some(reason)) => self.end(id, Ok(reason)),
            Err(failure) => self.end(id, Err(failure)),
        }
    }

    /// Pieces of prompts, the oldest first, as far as this step has time for them.
    fn read_prompts(&mut self) {
        let others = self.writers.iter().any(|w| matches!(w.phase, Phase::Writing(_)));
        let budget = self.pace.budget(others, self.limits.chunk);
        let reading = |w: &&Writer| w.phase == Phase::Reading;
        let ids: Vec<u64> = self.writers.iter().filter(reading).map(|w| w.id).collect();
        let mut read = 0;
        for id in ids {
            if read < budget {
                read += self.read_piece(id, budget - read);
            }
        }
    }

    /// Reads about `budget` tokens of a prompt; how many there were.
    fn read_piece(&mut self, id: u64, budget: usize) -> usize {
        let Some(writer) = self.writers.iter().find(|w| w.id == id) else { return 0 };
        let slot = &self.slots.slots[writer.slot];
        let Some(sequence) = &slot.sequence else { return 0 };
        let (from, len) = (slot.fed.len(), writer.request.prompt.len());
        let tokens = match sequence.chunk() {
            usize::MAX => len - from,
            chunk => piece(len - from, budget, ends_alone(len, chunk)),
        };
        let begin = Instant::now();
        let result = self.feed_piece(id, from, tokens);
        self.pace.read(tokens, begin.elapsed());
        self.queue.update(|stats| stats.prompt_tokens += tokens as u64);
        match result {
            Ok(()) if from + tokens == len => self.prompt_is_read(id),
            Ok(()) => {}
            Err(failure) => self.end(id, Err(failure)),
        }
        tokens
    }

    fn feed_piece(&mut self, id: u64, from: usize, count: usize) -> Result<(), Failure> {
        let Some(writer) = self.writers.iter_mut().find(|w| w.id == id) else { return Ok(()) };
        let slot = &mut self.slots.slots[writer.slot];
        let Some(sequence) = &mut slot.sequence else { return Ok(()) };
        let prompt = &writer.request.prompt;
        let tokens = &prompt[from..from + count];
        slot.fed.extend_from_slice(tokens);
        let Some(top) = writer.request.prompt_logprobs else {
            return of_model(|| self.model.step(&mut [Feed { sequence, tokens }]));
        };
        if from == 0 {
            writer.prompt_logprobs.push(None);
        }
        let rows = of_model(|| self.model.score(sequence, tokens))?.chunks_exact(self.limits.vocab);
        // Behind the last token comes what is written.
        let scored = rows.zip(&prompt[from + 1..]).map(|(row, &token)| logprobs(row, token, top));
        writer.prompt_logprobs.extend(scored);
        Ok(())
    }

    fn prompt_is_read(&mut self, id: u64) {
        let Some(writer) = self.writers.iter().find(|w| w.id == id) else { return };
        let slot = writer.slot;
        let Some(sequence) = &self.slots.slots[slot].sequence else { return };
        let logits = self.model.logits(sequence).to_vec();
        // Without it the next prompt is read again, and nothing else.
        let _ = self.slots.keep(slot, &logits);
        self.begin_writing(id, &logits);
    }

    /// The first token of a text behind its prompt, and of those that waited for it.
    fn begin_writing(&mut self, id: u64, logits: &[f32]) {
        let Some(from) = self.writers.iter().find(|w| w.id == id).map(|w| w.slot) else { return };
        let mut ready = vec![id];
        let twins = self.writers.iter().filter(|w| w.phase == Phase::Waiting { twin: id });
        for (twin, to) in twins.map(|w| (w.id, w.slot)).collect::<Vec<_>>() {
            match self.slots.copy(&self.model, from, to) {
                Ok(()) => ready.push(twin),
                Err(error) => self.end(twin, Err(model_failure(error))),
            }
        }
        for id in ready {
            if let Some(writer) = self.writers.iter_mut().find(|w| w.id == id) {
                writer.prompt_is_read();
            }
            self.write(id, Some(logits));
        }
    }

    /// Ends a text and frees its slot. What it read may serve others, unless it failed.
    fn end(&mut self, id: u64, end: End) {
        let Some(writer) = self.writers.iter().find(|w| w.id == id) else { return };
        match end {
            Ok(_) => self.slots.free(writer.slot),
            Err(_) => self.slots.lose(writer.slot),
        }
        self.drop_writer(id, end);
    }

    fn drop_writer(&mut self, id: u64, end: End) {
        let Some(index) = self.writers.iter().position(|w| w.id == id) else { return };
        let writer = self.writers.remove(index);
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
        let Some(slot) = self.writers.iter().find(|w| w.id == id).map(|w| w.slot) else { return };
        if let Err(error) = self.slots.clear(&self.model, slot) {
            self.end(id, Err(model_failure(error)));
        }
    }

    fn fail_all(&mut self, failure: &Failure) {
        for slot in 0..self.slots.slots.len() {
            self.slots.lose(slot);
        }
        while let Some(id) = self.writers.first().map(|w| w.id) {
            self.drop_writer(id, Err(failure.clone()));
        }
        self.queue.all_ended();
    }

    /// Tells what runs, before anybody is told that a text has ended.
    fn publish(&self) {
        let of = |slot: &Slot<M::Sequence>| SlotInfo { running: slot.running, tokens: slot.fed.len() };
        self.queue.update(|stats| {
            stats.running = self.writers.len();
            stats.slots.clear();
            stats.slots.extend(self.slots.slots.iter().map(of));
        });
    }
}

/// Runs `step` while another thread computes what grammars allow next.
fn beside<T>(writers: &mut [Writer], step: impl FnOnce() -> T) -> T {
    let constrained = |w: &&mut Writer| w.request.grammar.is_some() && matches!(w.phase, Phase::Writing(_));
    let mut constrained: Vec<&mut Writer> = writers.iter_mut().filter(constrained).collect();
    if constrained.is_empty() {
        return step();
    }
    std::thread::scope(|scope| {
        let prepare = move || constrained.iter_mut().for_each(|writer| writer.prepare());
        // Without the thread each grammar is prepared where its token is chosen.
        let _ = std::thread::Builder::new().name("mlcc-masks".into()).spawn_scoped(scope, prepare);
        step()
    })
}

/// Whether the last piece of a prompt is a single row when it is read in pieces of `chunk`.
fn ends_alone(prompt: usize, chunk: usize) -> bool {
    chunk != 0 && prompt % chunk == 1 || prompt == 1
}
