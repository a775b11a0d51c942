//! The loop of an engine's thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use mlcc_text::Tokenizer;

use crate::generate::FinishReason;
use crate::serving::checkpoint_positions::CheckpointPositions;
use crate::serving::disk_cache::{DiskCache, DiskCacheOptions};
use crate::serving::engine::{EngineExtras, EngineOptions, WarningSink};
use crate::serving::iteration::IterationState;
use crate::serving::mask_workers::MaskWorkers;
use crate::serving::model_runner::{
    CacheBlocks, ModelLimits, ModelRunner, OutputRows, RunnerError, SequenceInput,
};
use crate::serving::prefill_pacer::PrefillPacer;
use crate::serving::queue::{CacheUsage, EngineCommand, QueuedRequest, RequestQueue, SlotInfo};
use crate::serving::request::{EngineRequest, RequestFailure};
use crate::serving::running_sequence::{RunningSequence, SequencePhase, end_unscheduled};
use crate::serving::slots::{PrefixQuery, SequenceSlot, SlotTable};
use crate::speculate::Drafter;

/// Runs until the queue is closed and everything in it is done. A panic of the model ends the texts of its
/// step; one elsewhere ends those that run.
pub(super) fn run_scheduler<M: ModelRunner + 'static>(
    model: M,
    tokenizer: &Tokenizer,
    queue: &RequestQueue,
    options: EngineOptions,
    extras: EngineExtras,
) {
    let EngineExtras { drafter, disk_cache: files, warn } = extras;
    let _end = ThreadEndGuard(queue);
    let shelf = |files: DiskCacheOptions| {
        let (identity, limits) = (model.identity()?, model.limits());
        Some(DiskCache::open_folder(files, identity, limits, limits.truncates))
    };
    let files = files.and_then(shelf);
    let limits = model.limits();
    let mut scheduler = Scheduler {
        limits,
        model,
        tokenizer,
        queue,
        slots: SlotTable::new(options.max_sequences, options.prefix_cache_size, limits.truncates, files),
        running: Vec::new(),
        preempted: Vec::new(),
        has_freed_memory: false,
        iteration: IterationState::default(),
        masks: MaskWorkers::default(),
        pacer: PrefillPacer::new(options.max_token_gap),
        drafter: drafter.map(|make| make()),
        warn,
    };
    scheduler.publish_stats();
    loop {
        match catch_unwind(AssertUnwindSafe(|| scheduler.iterate())) {
            Ok(true) => {}
            Ok(false) => break,
            Err(panic) => scheduler.fail_all(&panic_failure(panic.as_ref())),
        }
    }
    // States that are not kept are read again.
    let Scheduler { slots, model, .. } = &mut scheduler;
    let _ = catch_unwind(AssertUnwindSafe(|| slots.save_all(model)));
}

pub(super) fn panic_failure(panic: &(dyn std::any::Any + Send)) -> RequestFailure {
    let message = panic.downcast_ref::<&str>().map(|s| s.to_string());
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    RequestFailure::Panic(message.unwrap_or_else(|| "unknown panic".into()))
}

/// Runs work of the model for some sequences: its errors and panics become theirs.
pub(super) fn catch_model_failure<T, E: std::fmt::Display>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, RequestFailure> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(model_failure),
        Err(panic) => Err(panic_failure(panic.as_ref())),
    }
}

/// However the thread ends, no caller waits for it.
struct ThreadEndGuard<'q>(&'q RequestQueue);

impl Drop for ThreadEndGuard<'_> {
    fn drop(&mut self) {
        self.0.close_after_thread();
    }
}

pub(super) struct Scheduler<'t, M: ModelRunner> {
    pub model: M,
    pub limits: ModelLimits,
    pub tokenizer: &'t Tokenizer,
    pub queue: &'t RequestQueue,
    pub slots: SlotTable<M>,
    /// Running sequences in the order of their admission.
    pub running: Vec<RunningSequence<'t>>,
    /// Texts that were put back since there was no memory to go on with them, the newest first.
    pub preempted: Vec<RunningSequence<'t>>,
    /// True if a sequence has ended since one was preempted.
    pub has_freed_memory: bool,
    pub iteration: IterationState<M::Sequence>,
    pub masks: MaskWorkers,
    pub pacer: PrefillPacer,
    pub drafter: Option<Box<dyn Drafter>>,
    /// The receiver of the model's warning, until it was sent.
    pub warn: Option<WarningSink>,
}

/// The end of a sequence.
pub(super) type SequenceEnd = Result<FinishReason, RequestFailure>;

pub(super) fn model_failure(error: impl std::fmt::Display) -> RequestFailure {
    RequestFailure::Model(error.to_string())
}

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    /// One step with what comes before and after it. False when there is nothing to do any more.
    fn iterate(&mut self) -> bool {
        for ask in self.queue.take_commands() {
            // A client that has left does not need it.
            let _ = match ask {
                EngineCommand::WarmUp(waiting) => {
                    waiting.send(warm_up_model(&mut self.model, &self.limits)).is_ok()
                }
                EngineCommand::ForgetAdapter(adapter, waiting) => {
                    self.slots.forget_adapter(&adapter);
                    drop(adapter);
                    waiting.send(()).is_ok()
                }
            };
        }
        self.end_cancelled();
        self.resume_preempted();
        self.slots.save_idle(&self.model, Instant::now());
        while self.preempted.is_empty() && self.slots.has_free() {
            if self.running.is_empty() {
                self.save_while_idle();
            }
            match self.queue.pop(self.running.is_empty()) {
                Some(job) => self.admit_request(job),
                None if self.running.is_empty() => return !self.queue.is_drained(),
                None => break,
            }
        }
        self.sample_cached_prompts();
        self.sample_masked();
        let begin = Instant::now();
        self.schedule_and_run();
        self.report_warning();
        self.publish_stats();
        self.queue.update_stats(|stats| {
            stats.steps += 1;
            stats.busy_time += begin.elapsed();
        });
        true
    }

    /// Writes states to files while no step is due, until one is, or none is left to write.
    fn save_while_idle(&mut self) {
        while let Some(at) = self.slots.save_idle(&self.model, Instant::now()) {
            if self.queue.wait_for_work(at) {
                break;
            }
        }
    }

    /// Reports the model's warning, once.
    fn report_warning(&mut self) {
        if self.warn.is_some()
            && let Some(notice) = self.model.performance_warning()
            && let Some(warn) = self.warn.take()
        {
            warn(&notice);
        }
    }

    /// Ends texts that were cancelled or are too late, those that wait among them.
    fn end_cancelled(&mut self) {
        for job in self.queue.take_ended() {
            self.end_queued(job);
        }
        let all = self.queue.is_abandoned();
        let of = |w: &RunningSequence| if all { Some(FinishReason::Cancelled) } else { w.end_reason() };
        let texts = self.running.iter().chain(&self.preempted);
        let ended: Vec<_> = texts.filter_map(|w| Some((w.id, of(w)?))).collect();
        for (id, reason) in ended {
            self.end_sequence(id, Ok(reason));
        }
    }

    fn end_queued(&self, job: QueuedRequest) {
        self.queue.update_stats(|stats| stats.cancelled += 1);
        self.queue.count_ended();
        end_unscheduled(job);
    }

    fn admit_request(&mut self, job: QueuedRequest) {
        if job.is_cancelled() || job.is_past_deadline() || self.queue.is_abandoned() {
            return self.end_queued(job);
        }
        let reads = |id: u64| self.running.iter().any(|w| w.id == id && w.phase == SequencePhase::Prefill);
        if let Some(twin) = job.fork_of.filter(|&twin| reads(twin))
            && let Some(slot) = self.slots.admit_fork(&self.model, job.id)
        {
            let cached = job.request.prompt.len();
            self.add_sequence(
                job,
                slot,
                SequencePhase::WaitingForPrefix { fork_of: twin },
                cached,
                CheckpointPositions::default(),
            );
            return;
        }
        let id = job.id;
        let most = self.max_cached_tokens(&job.request, job.request.prompt.len());
        let wanted = PrefixQuery {
            adapter: job.request.adapter.as_ref(),
            prompt: &job.request.prompt,
            max_tokens: most,
        };
        let start = self.slots.admit_request(&self.model, id, &wanted);
        let begun = start.as_ref().ok().and_then(Option::as_ref);
        let (slot, cached) = begun.map_or((0, 0), |start| (start.slot, start.cached));
        let marks = match begun.filter(|_| most > 0 && !self.limits.truncates) {
            Some(start) => CheckpointPositions::new(start, &job.request, self.limits.chunk),
            None => CheckpointPositions::default(),
        };
        self.add_sequence(job, slot, SequencePhase::Prefill, cached, marks);
        match start {
            Ok(Some(start)) => {
                self.queue.update_stats(|stats| stats.cached_tokens += start.cached as u64);
                self.iteration.cached_prompts.extend(start.logits.map(|logits| (id, logits)));
            }
            Ok(None) => self.remove_sequence(id, Err(RequestFailure::Model("no slot is free".into()))),
            Err(error) if self.model.is_out_of_memory(&error) && self.can_preempt_another(id) => {
                self.preempt_last_admitted()
            }
            Err(error) => self.remove_sequence(id, Err(model_failure(error))),
        }
    }

    fn add_sequence(
        &mut self,
        job: QueuedRequest,
        slot: usize,
        phase: SequencePhase,
        cached: usize,
        marks: CheckpointPositions,
    ) {
        self.running.push(RunningSequence::new(
            job,
            slot,
            phase,
            cached,
            marks,
            self.tokenizer,
            &self.limits,
        ));
    }

    /// The number of tokens, of `tokens` in all, whose states may come from the prefix cache. The rest is
    /// read in chunks like those of the whole prompt.
    pub fn max_cached_tokens(&self, request: &EngineRequest, tokens: usize) -> usize {
        if !request.use_prefix_cache || request.prompt_logprobs.is_some() || self.limits.prompt.is_some() {
            return 0;
        }
        let rest = if ends_with_single_row(tokens, self.limits.chunk) { 1 } else { 2 };
        tokens.saturating_sub(rest)
    }

    /// Ends a text and frees its slot. Its state may serve others, unless it failed.
    pub fn end_sequence(&mut self, id: u64, end: SequenceEnd) {
        if let Some(writer) = self.running.iter().find(|w| w.id == id) {
            match end {
                Ok(_) => self.slots.free_slot(writer.slot),
                Err(_) => self.slots.discard_slot(writer.slot),
            }
        }
        self.remove_sequence(id, end);
    }

    pub fn remove_sequence(&mut self, id: u64, end: SequenceEnd) {
        let of_id = |w: &RunningSequence| w.id == id;
        let writer = match self.running.iter().position(of_id) {
            Some(index) => self.running.remove(index),
            None => match self.preempted.iter().position(of_id) {
                Some(index) => self.preempted.remove(index),
                None => return,
            },
        };
        if writer.mask_pending {
            self.masks.cancel_mask(id);
        }
        self.has_freed_memory = true;
        self.promote_fork(id);
        self.publish_stats();
        self.queue.update_stats(|stats| match end {
            Ok(FinishReason::Cancelled) => stats.cancelled += 1,
            Ok(_) => stats.finished += 1,
            Err(_) => stats.failed += 1,
        });
        self.queue.count_ended();
        match end {
            Ok(reason) => {
                writer.finish(reason);
            }
            Err(failure) => writer.fail(failure),
        }
    }

    /// Makes the first fork of a sequence read the prompt from now on.
    fn promote_fork(&mut self, gone: u64) {
        let mut next = None;
        for writer in
            self.running.iter_mut().filter(|w| w.phase == SequencePhase::WaitingForPrefix { fork_of: gone })
        {
            match next {
                None => {
                    next = Some(writer.id);
                    writer.phase = SequencePhase::Prefill;
                    writer.cached = 0;
                }
                Some(twin) => writer.phase = SequencePhase::WaitingForPrefix { fork_of: twin },
            }
        }
        let Some(id) = next else { return };
        let Some(writer) = self.running.iter().find(|w| w.id == id) else { return };
        if let Err(error) = self.slots.clear_slot(&self.model, writer.slot, writer.request.adapter.as_ref()) {
            self.end_sequence(id, Err(model_failure(error)));
        }
    }

    fn fail_all(&mut self, failure: &RequestFailure) {
        for slot in 0..self.slots.slots.len() {
            self.slots.discard_slot(slot);
        }
        while let Some(id) = self.running.first().or(self.preempted.first()).map(|w| w.id) {
            self.remove_sequence(id, Err(failure.clone()));
        }
        self.queue.count_all_ended();
    }

    /// Publishes the running sequences before the end of one is reported.
    fn publish_stats(&mut self) {
        let of = |slot: &SequenceSlot<M::Sequence>| SlotInfo {
            running: slot.running,
            tokens: slot.computed_tokens.len(),
        };
        let cache = self.cache_usage();
        let round = &mut self.iteration;
        let [written, drafted, accepted] =
            [&mut round.sampled_tokens, &mut round.drafted_tokens, &mut round.accepted_tokens]
                .map(std::mem::take);
        self.queue.update_stats(|stats| {
            stats.written_tokens += written;
            stats.drafted_tokens += drafted;
            stats.accepted_tokens += accepted;
            stats.prefixes_lost = self.slots.prefixes_lost;
            if let Some(error) = self.slots.loss_reason.take() {
                stats.prefix_loss_reason = Some(error);
            }
            stats.running = self.running.len() + self.preempted.len();
            stats.cache = cache;
            stats.slots.clear();
            stats.slots.extend(self.slots.slots.iter().map(of));
        });
    }
}

impl<M: ModelRunner + 'static> Scheduler<'_, M> {
    fn cache_usage(&self) -> Option<CacheUsage> {
        let CacheBlocks { tokens_per_block: tokens, total: all, free, per_sequence: sequence } =
            self.model.cache_blocks()?;
        let slots = &self.slots.slots;
        let running = slots.iter().filter(|slot| slot.running.is_some());
        let used =
            running.map(|slot| slot.computed_tokens.len().div_ceil(tokens).min(sequence)).sum::<usize>();
        let blocks = all.min(sequence.saturating_mul(slots.len()));
        // Sequences share blocks.
        Some(CacheUsage { block_tokens: tokens, blocks, used: used.min(all - free).min(blocks) })
    }
}

/// Tokens of a piece that makes weights and scratch memory come.
const WARM_UP: usize = 16;

/// Computes a chunk of a prompt and a next token of a sequence without a request.
fn warm_up_model<M: ModelRunner>(model: &mut M, limits: &ModelLimits) -> Result<(), RequestFailure> {
    let most =
        limits.chunk.min(limits.step_tokens).min(limits.context.map_or(usize::MAX, |context| context - 1));
    let (mut tokens, want) = ([0; WARM_UP], OutputRows::Last);
    let mut first = most.clamp(1, WARM_UP);
    if let Some(start) = limits.decoder_start {
        // A source text and what has to be behind it.
        tokens = [i32::from(start == 0); WARM_UP];
        first = first.max(2);
        tokens[first - 1] = start;
    }
    catch_model_failure(|| {
        let mut sequence = model.new_sequence()?;
        for tokens in [&tokens[..first], &tokens[..1]] {
            // A model whose memory is all in use is warm.
            if model.reserve(&mut sequence, tokens.len())? {
                model.step(&mut [SequenceInput { sequence: &mut sequence, tokens, outputs: want }])?;
            }
        }
        model.parallel_for(2, &|_| {});
        Ok::<_, RunnerError<M>>(())
    })
}

/// True if the last chunk of a prompt is a single row when it is read in chunks of `chunk`.
pub(super) fn ends_with_single_row(prompt: usize, chunk: usize) -> bool {
    chunk != 0 && prompt % chunk == 1 || prompt == 1
}
