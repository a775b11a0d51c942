//! The engine's handle, for other threads.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mlcc_text::Tokenizer;

use crate::serving::adapter::TextAdapter;
use crate::serving::disk_cache::DiskCacheOptions;
use crate::serving::model_runner::{ModelLimits, ModelRunner};
use crate::serving::queue::{EngineCommand, EngineStats, QueuedRequest, RequestQueue};
use crate::serving::request::{EngineRequest, EventSink, LaunchError, RequestFailure, SequenceEvent};
use crate::serving::scheduler;
use crate::speculate::MakeDrafter;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineOptions {
    /// Texts that run together.
    pub max_sequences: usize,
    /// Requests that may be queued.
    pub max_queue: usize,
    /// Longest time between two tokens of a text while prompts are read, in decode steps.
    pub max_token_gap: f64,
    /// States that are kept in addition to those of the sequences: of sequences whose slots others have
    /// taken, and, for a model that cannot roll back, copies behind prompts, where turns begin, and inside of
    /// long prompts. The pages of their caches are no more than those of full contexts of the sequences.
    pub prefix_cache_size: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions { max_sequences: 4, max_queue: 64, max_token_gap: 3.0, prefix_cache_size: 8 }
    }
}

/// Takes a line for the operator of the model.
pub type WarningSink = Box<dyn Fn(&str) + Send>;

/// Optional parts of an engine.
#[derive(Default)]
pub struct EngineExtras {
    pub drafter: Option<MakeDrafter>,
    /// States of earlier engines, and where its own are kept when it ends.
    pub disk_cache: Option<DiskCacheOptions>,
    /// Takes, once, a line about what makes steps slower than they could be
    /// ([`ModelRunner::performance_warning`]).
    pub warn: Option<WarningSink>,
}

/// See the [module](super). Dropping it ends all texts and waits for the thread.
pub struct Engine {
    queue: Arc<RequestQueue>,
    limits: ModelLimits,
    thread: Option<JoinHandle<()>>,
}

/// The owner's interest in a text: dropping it ends the text at the next step.
#[derive(Debug)]
pub struct CancelGuard {
    cancel: Arc<AtomicBool>,
}

impl CancelGuard {
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The events of a sequence, as a blocking iterator that ends after [`SequenceEvent::Finished`] or
/// [`SequenceEvent::Failed`]; without one of them if the engine has ended. Dropping it ends the sequence.
#[derive(Debug)]
pub struct RequestHandle {
    events: mpsc::Receiver<SequenceEvent>,
    ticket: CancelGuard,
}

impl RequestHandle {
    pub fn cancel(&self) {
        self.ticket.cancel();
    }
}

impl Iterator for RequestHandle {
    type Item = SequenceEvent;

    fn next(&mut self) -> Option<SequenceEvent> {
        self.events.recv().ok()
    }
}

impl Engine {
    /// Starts the thread that owns `step`.
    pub fn start<M: ModelRunner + 'static>(
        step: M,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
    ) -> std::io::Result<Engine> {
        Self::start_with(step, tokenizer, options, EngineExtras::default())
    }

    /// Starts an engine with drafts, if the model can roll them back ([`ModelLimits::rolls_back_drafts`]).
    pub fn start_drafting<M: ModelRunner + 'static>(
        step: M,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
        drafter: Option<MakeDrafter>,
    ) -> std::io::Result<Engine> {
        Self::start_with(step, tokenizer, options, EngineExtras { drafter, ..EngineExtras::default() })
    }

    /// The same with all there is.
    pub fn start_with<M: ModelRunner + 'static>(
        step: M,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
        extras: EngineExtras,
    ) -> std::io::Result<Engine> {
        let sequences = options.max_sequences.max(1);
        let queue = Arc::new(RequestQueue::new(sequences, options.max_queue));
        let limits = step.limits();
        let shared = Arc::clone(&queue);
        let options = EngineOptions { max_sequences: sequences, ..options };
        let thread = std::thread::Builder::new()
            .name("mlcc-engine".into())
            .spawn(move || scheduler::run_scheduler(step, &tokenizer, &shared, options, extras))?;
        Ok(Engine { queue, limits, thread: Some(thread) })
    }

    pub fn limits(&self) -> ModelLimits {
        self.limits
    }

    /// Queues a text.
    pub fn launch(&self, request: EngineRequest) -> Result<RequestHandle, LaunchError> {
        self.launch_all(vec![request])?.pop().ok_or(LaunchError::Closed)
    }

    /// Queues several texts, all or none. Equal prompts among them are read once.
    pub fn launch_all(&self, requests: Vec<EngineRequest>) -> Result<Vec<RequestHandle>, LaunchError> {
        let (mut with_sinks, mut receivers) = (Vec::new(), Vec::new());
        for request in requests {
            let (sender, events) = mpsc::channel();
            let sink: EventSink = Box::new(move |event| match sender.send(event) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            });
            with_sinks.push((request, sink));
            receivers.push(events);
        }
        let tickets = self.launch_with(with_sinks)?;
        Ok(receivers
            .into_iter()
            .zip(tickets)
            .map(|(events, ticket)| RequestHandle { events, ticket })
            .collect())
    }

    /// The same, each with the receiver of its events.
    pub fn launch_with(
        &self,
        requests: Vec<(EngineRequest, EventSink)>,
    ) -> Result<Vec<CancelGuard>, LaunchError> {
        let mut jobs: Vec<QueuedRequest> = Vec::with_capacity(requests.len());
        for (id, (request, sink)) in requests.into_iter().enumerate() {
            let (sampler, stops) = request.validate(&self.limits)?;
            // One that scores its prompt has to read it.
            let twin = jobs.iter().find(|job| {
                job.fork_of.is_none()
                    && request.prompt_logprobs.is_none()
                    && job.request.prompt == request.prompt
                    && job.request.adapter == request.adapter
            });
            jobs.push(QueuedRequest {
                id: id as u64,
                fork_of: twin.map(|job| job.id),
                request,
                sampler,
                stops,
                sink,
                cancel: Arc::default(),
                queued_at: Instant::now(),
            });
        }
        let tickets = jobs.iter().map(|job| CancelGuard { cancel: Arc::clone(&job.cancel) }).collect();
        self.queue.push(jobs)?;
        Ok(tickets)
    }

    /// Runs a small step without a request, between two others, and waits for it: the cost of a first step,
    /// as reading the weights from their file, memory that is touched for the first time and threads that
    /// have to be woken, is paid then. Nothing is counted or kept of it.
    ///
    /// Fails as the model does; without an error if the engine is closed.
    pub fn warm_up(&self) -> Result<(), RequestFailure> {
        let done = self.queue.send_command(EngineCommand::WarmUp);
        done.and_then(|done| done.recv().ok()).unwrap_or(Ok(()))
    }

    /// Drops the states of an adapter, and waits for that. Texts that run with it go on, and leave none when
    /// they end: then the engine has no copy of it any more.
    pub fn forget_adapter(&self, adapter: &TextAdapter) {
        adapter.mark_forgotten();
        let copy = adapter.clone();
        if let Some(done) = self.queue.send_command(|waiting| EngineCommand::ForgetAdapter(copy, waiting)) {
            // An engine that has ended has no states.
            let _ = done.recv();
        }
    }

    /// True if the thread is alive.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    pub fn stats(&self) -> EngineStats {
        self.queue.stats()
    }

    /// Takes no more requests; those that were taken go on.
    pub fn close(&self) {
        self.queue.close();
    }

    /// Waits until no text runs or waits; false if that takes longer.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        self.queue.wait_idle(timeout)
    }

    /// Ends all texts at the next step, and takes no more.
    pub fn abandon(&self) {
        self.queue.abandon_all();
        self.queue.close();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.abandon();
        if let Some(thread) = self.thread.take() {
            // Its panics were caught and told.
            let _ = thread.join();
        }
    }
}
