//! Ranks in lockstep: each is a thread with an interpreter and weights of its own, and at an all-gather
//! (`exchange`) each waits until every other rank has sent its part of it, or has ended without it.
//!
//! Nothing depends on which thread is faster: a rank sends to its own slot and reads all slots only when the
//! round is complete. So a fault is found at the same place every time.

use super::{GraphError, Interpreter, Tensor};
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::Module;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The message that a rank sends to all in one all-gather.
#[derive(Clone, PartialEq, Debug)]
pub struct RankMessage {
    pub from: usize,
    /// The number of all-gathers that the rank had behind it in this call.
    pub number: usize,
    pub part: Arc<Tensor>,
}

/// A change of a message on its way to a rank (its number is the first argument): for tests that inject
/// faults.
pub type FaultInjector<'a> = dyn Fn(usize, RankMessage) -> Option<RankMessage> + Sync + 'a;

/// The reasons why an all-gather failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllGatherFault {
    #[error("joins the parts of {ranks} ranks, but runs alone")]
    Alone { ranks: usize },
    #[error("joins the parts of {expected} ranks, {found} run")]
    Ranks { expected: usize, found: usize },
    #[error(
        "rank {rank} waits in exchange {number}, which rank {other} missed: it ended after {count} of them"
    )]
    Missed { rank: usize, number: usize, other: usize, count: usize },
    #[error("rank {rank} reads the part of rank {other} in exchange {number}, which it was not sent")]
    NotSent { rank: usize, number: usize, other: usize },
    #[error(
        "rank {rank} got a message of rank {from} and exchange {found} in place of that of rank {other} and exchange {number}"
    )]
    Misdirected { rank: usize, number: usize, other: usize, from: usize, found: usize },
    #[error("exchange {number}: rank {rank} has {expected}, rank {other} has {found}")]
    Size { rank: usize, number: usize, other: usize, expected: String, found: String },
}

/// An error with the rank that had it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("rank {rank}: {error}")]
pub struct RankError {
    pub rank: usize,
    #[source]
    pub error: Box<GraphError>,
}

/// The mailbox of all ranks. A round is over when every rank has taken what all have sent.
struct RankMailbox<'a> {
    table: Mutex<MailboxState>,
    changed: Condvar,
    tamper: Option<&'a FaultInjector<'a>>,
}

struct MailboxState {
    /// The message of each rank in the running round.
    sent: Vec<Option<RankMessage>>,
    /// True for ranks that have taken the messages of the running round.
    received: Vec<bool>,
    /// The number of all-gathers of each rank when it ended.
    ended: Vec<Option<usize>>,
}

impl RankMailbox<'_> {
    fn new<'a>(ranks: usize, tamper: Option<&'a FaultInjector<'a>>) -> RankMailbox<'a> {
        let table =
            MailboxState { sent: vec![None; ranks], received: vec![false; ranks], ended: vec![None; ranks] };
        RankMailbox { table: Mutex::new(table), changed: Condvar::new(), tamper }
    }

    /// A thread that panicked leaves the table in a valid state.
    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'g>(&self, table: MutexGuard<'g, MailboxState>) -> MutexGuard<'g, MailboxState> {
        self.changed.wait(table).unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_ended(&self, rank: usize, count: usize) {
        self.lock().ended[rank] = Some(count);
        self.changed.notify_all();
    }

    /// Sends a message and takes those of all, in the order of the ranks.
    fn all_gather(&self, message: RankMessage) -> Result<Vec<RankMessage>, AllGatherFault> {
        let (rank, number) = (message.from, message.number);
        let mut table = self.lock();
        // The round before is over when the last one has taken its messages, which clears the slots.
        while table.sent[rank].is_some() {
            table = self.wait(table);
        }
        table.sent[rank] = Some(message);
        self.changed.notify_all();
        while table.sent.iter().zip(&table.ended).any(|(sent, ended)| sent.is_none() && ended.is_none()) {
            table = self.wait(table);
        }
        let missing = table.sent.iter().zip(&table.ended).position(|(sent, _)| sent.is_none());
        if let Some(other) = missing {
            let count = table.ended[other].unwrap_or(0);
            return Err(AllGatherFault::Missed { rank, number, other, count });
        }
        let all: Vec<RankMessage> = table.sent.iter().flatten().cloned().collect();
        table.received[rank] = true;
        if table.received.iter().all(|&taken| taken) {
            table.received.fill(false);
            table.sent.fill(None);
            self.changed.notify_all();
        }
        drop(table);
        self.check_delivery(rank, number, all)
    }

    /// Checks that the messages which arrive at a rank come from the right ranks and all-gather.
    fn check_delivery(
        &self,
        rank: usize,
        number: usize,
        all: Vec<RankMessage>,
    ) -> Result<Vec<RankMessage>, AllGatherFault> {
        let arrive = |(other, message): (usize, RankMessage)| {
            let message = match self.tamper {
                Some(tamper) => tamper(rank, message),
                None => Some(message),
            };
            let message = message.ok_or(AllGatherFault::NotSent { rank, number, other })?;
            if (message.from, message.number) != (other, number) {
                let (from, found) = (message.from, message.number);
                return Err(AllGatherFault::Misdirected { rank, number, other, from, found });
            }
            Ok(message)
        };
        all.into_iter().enumerate().map(arrive).collect()
    }
}

/// A rank's way to the others in one call.
pub(super) struct SimulatedLink<'h> {
    hub: &'h RankMailbox<'h>,
    rank: usize,
    count: std::cell::Cell<usize>,
}

impl SimulatedLink<'_> {
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The parts of all ranks in their order, each as large as the own one.
    pub fn all_gather(&self, ranks: usize, part: &Arc<Tensor>) -> Result<Vec<Arc<Tensor>>, AllGatherFault> {
        let (rank, number) = (self.rank, self.count.get());
        let found = self.hub.lock().sent.len();
        if found != ranks {
            return Err(AllGatherFault::Ranks { expected: ranks, found });
        }
        self.count.set(number + 1);
        let all = self.hub.all_gather(RankMessage { from: rank, number, part: part.clone() })?;
        let same = |message: RankMessage| {
            let other = message.from;
            let fits = message.part.dims == part.dims
                && message.part.dtype == part.dtype
                && message.part.data.len() == part.data.len();
            match fits {
                true => Ok(message.part),
                false => {
                    let (expected, found) = (part.describe(), message.part.describe());
                    Err(AllGatherFault::Size { rank, number, other, expected, found })
                }
            }
        };
        all.into_iter().map(same).collect()
    }
}

impl Drop for SimulatedLink<'_> {
    /// However a rank ends, the others learn of it.
    fn drop(&mut self) {
        self.hub.mark_ended(self.rank, self.count.get());
    }
}

/// Ranks of one model: a module and the values of its parameters for each.
pub struct RankedModel<'m> {
    ranks: Vec<(&'m Module, Vec<Tensor>)>,
    tamper: Option<&'m FaultInjector<'m>>,
}

impl<'m> RankedModel<'m> {
    /// Usually all have the same module. The values are listed by parameter.
    pub fn new(ranks: Vec<(&'m Module, Vec<Tensor>)>) -> RankedModel<'m> {
        RankedModel { ranks, tamper: None }
    }

    /// Passes every message through `tamper`.
    pub fn with_tamper(self, tamper: &'m FaultInjector<'m>) -> RankedModel<'m> {
        RankedModel { tamper: Some(tamper), ..self }
    }

    /// Does `step` on all ranks at the same time, each with its interpreter and its entry of `states`, which
    /// change only if all ranks succeed. Among several errors, one that others did not cause is returned,
    /// then that of the first rank.
    pub fn run<S: Clone + Send + Sync, T: Send>(
        &self,
        states: &mut [S],
        step: impl Fn(&Interpreter<'_>, &mut S) -> Result<T, GraphError> + Sync,
    ) -> Result<Vec<T>, RankError> {
        let found = states.len().min(self.ranks.len());
        if states.len() != self.ranks.len() {
            let fault = AllGatherFault::Ranks { expected: self.ranks.len(), found: states.len() }.into();
            let (function, node) = ("any".into(), "states".into());
            let error = Box::new(GraphError::Exchange { function, node, fault });
            return Err(RankError { rank: found, error });
        }
        let hub = RankMailbox::new(self.ranks.len(), self.tamper);
        let (hub, step) = (&hub, &step);
        let one = |rank: usize, mut state: S| {
            let (module, params) = &self.ranks[rank];
            let mut interpreter = Interpreter::new(module, |id| params[id.index()].clone());
            interpreter.link = Some(SimulatedLink { hub, rank, count: std::cell::Cell::new(0) });
            step(&interpreter, &mut state).map(|value| (value, state))
        };
        let results: Vec<Result<(T, S), GraphError>> = std::thread::scope(|scope| {
            let one = &one;
            let spawn = |(rank, state): (usize, &S)| {
                let state = state.clone();
                scope.spawn(move || one(rank, state))
            };
            let threads: Vec<_> = states.iter().enumerate().map(spawn).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().map(join).collect()
        });
        let mut done = Vec::with_capacity(results.len());
        let mut failed: Option<RankError> = None;
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Ok(both) => done.push(both),
                Err(error) if failed.as_ref().is_none_or(|f| is_caused(&f.error) && !is_caused(&error)) => {
                    failed = Some(RankError { rank, error: Box::new(error) });
                }
                Err(_) => {}
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let (values, new): (Vec<T>, Vec<S>) = done.into_iter().unzip();
        states.clone_from_slice(&new);
        Ok(values)
    }
}

/// True if an error tells of another rank that ended, which may have had an error of its own.
fn is_caused(error: &GraphError) -> bool {
    matches!(error, GraphError::Exchange { fault, .. } if matches!(**fault, AllGatherFault::Missed { .. }))
}
