//! A lock whose callers get it in the order in which they came: sessions of several threads, perhaps of
//! several models, take turns step by step, however fast one of them comes back.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::CachePadded;
use super::event_count::{EventCount, EventWaiter};

/// Pauses before a caller sleeps: a step of another one takes longer.
const SPINS: u32 = 1 << 6;

/// See the [module](self).
pub struct TicketMutex<T> {
    /// Number of the caller that comes next.
    next_ticket: AtomicU32,
    /// Number of the caller whose turn it is.
    now_serving: CachePadded<EventCount>,
    slept: AtomicU64,
    /// Only locked by whose turn it is, so without waiting.
    value: Mutex<T>,
}

pub struct TicketGuard<'a, T> {
    mutex: &'a TicketMutex<T>,
    ticket: u32,
    value: MutexGuard<'a, T>,
}

impl<T> TicketMutex<T> {
    pub fn new(value: T) -> Self {
        let (next_ticket, now_serving, slept) = Default::default();
        Self { next_ticket, now_serving, slept, value: Mutex::new(value) }
    }

    /// Returns when all who came before have dropped theirs.
    pub fn lock(&self) -> TicketGuard<'_, T> {
        let number = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let mut waiter = EventWaiter { spins: SPINS, open: None, slept: &self.slept };
        waiter.wait(&self.now_serving.0, number);
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        TicketGuard { mutex: self, ticket: number, value }
    }

    /// The number of waiting callers while one has a turn.
    #[cfg(test)]
    pub fn waiting_count(&self) -> u32 {
        self.next_ticket.load(Ordering::SeqCst).wrapping_sub(self.now_serving.0.count()).saturating_sub(1)
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for TicketGuard<'_, T> {
    fn drop(&mut self) {
        // The next one may meet the mutex still locked for a moment: it is let go after this.
        self.mutex.now_serving.0.raise_and_wake(self.ticket.wrapping_add(1));
    }
}

impl<T> Deref for TicketGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for TicketGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All callers that wait again before the next turn go round.
    #[test]
    fn nobody_is_overtaken() {
        let turns = TicketMutex::new(Vec::new());
        let callers = 4;
        std::thread::scope(|scope| {
            for caller in 0..callers {
                let turns = &turns;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let mut order = turns.lock();
                        // All others have come by then, but for those who are done.
                        let turns_of = |c: usize| order.iter().filter(|&&o| o == c).count();
                        let others = (0..callers).filter(|&c| c != caller && turns_of(c) < 50).count();
                        while (turns.waiting_count() as usize) < others {
                            std::thread::yield_now();
                        }
                        order.push(caller);
                    }
                });
            }
        });
        let order = turns.value.into_inner().unwrap();
        let first = &order[..callers];
        for round in order.chunks(callers) {
            assert_eq!(round, first, "in the order in which they came");
        }
    }
}
