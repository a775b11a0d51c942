//! How much of the prompts one step may read.
//!
//! A step decodes one token of each text first. What it reads of prompts afterwards makes those texts wait, so it gets the time
//! of a few decode steps, as they were measured lately, and no more.

use std::time::Duration;

/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;
/// Tokens of a piece before the first measurement.
const FIRST: usize = 16;
/// A single row would be read by other kernels than those of longer pieces.
pub(super) const SMALLEST: usize = 2;

#[derive(Debug)]
pub(super) struct Pace {
    /// Longest time between two tokens of a text, in decode steps.
    gap: f64,
    /// Seconds of a decode step.
    decode: Option<f64>,
    /// Seconds to read one token of a prompt.
    read: Option<f64>,
}

fn update(mean: &mut Option<f64>, newest: f64) {
    *mean = Some(mean.map_or(newest, |mean| mean + NEWEST * (newest - mean)));
}

impl Pace {
    pub(super) fn new(gap: f64) -> Self {
        Pace { gap, decode: None, read: None }
    }

    pub(super) fn decoded(&mut self, time: Duration) {
        update(&mut self.decode, time.as_secs_f64());
    }

    pub(super) fn read(&mut self, tokens: usize, time: Duration) {
        if tokens > 0 {
            update(&mut self.read, time.as_secs_f64() / tokens as f64);
        }
    }

    /// Tokens of prompts in this step, at most `chunk`; `others` wait meanwhile.
    pub(super) fn budget(&self, others: bool, chunk: usize) -> usize {
        if !others {
            return chunk;
        }
        let tokens = match (self.decode, self.read) {
            (Some(decode), Some(read)) if read > 0.0 => ((self.gap - 1.0).max(0.0) * decode / read) as usize,
            _ => FIRST,
        };
        tokens.min(chunk).max(SMALLEST)
    }
}

/// Tokens of the next piece of a prompt of which `left` are to be read: about `budget`, and at least one.
///
/// A single row is read by other kernels, whose last bits differ. So it is one only where `mlcc run` has one as well: at the
/// end (`lone_end`).
pub(super) fn piece(left: usize, budget: usize, lone_end: bool) -> usize {
    let body = left - usize::from(lone_end);
    let budget = budget.max(SMALLEST);
    match body {
        0 => 1,
        _ if body <= budget => body,
        _ if body - budget == 1 && budget > SMALLEST => budget - 1,
        _ if body - budget == 1 => body,
        _ => budget,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_gets_the_time_of_the_gap() {
        let mut pace = Pace::new(3.0);
        assert_eq!((pace.budget(false, 128), pace.budget(true, 128), pace.budget(true, 8)), (128, 16, 8));
        pace.decoded(Duration::from_millis(10));
        pace.read(100, Duration::from_millis(100));
        assert_eq!((pace.budget(true, 128), pace.budget(true, 8)), (20, 8));
        for _ in 0..100 {
            pace.decoded(Duration::from_millis(40));
        }
        assert_eq!(pace.budget(true, 128), 79);
        assert_eq!(Pace { gap: 1.0, ..pace }.budget(true, 128), SMALLEST);
    }

    #[test]
    fn pieces_end_where_the_prompt_does_and_none_is_a_single_row() {
        for len in 1..40 {
            for lone_end in [false, true] {
                for budget in 1..12 {
                    let mut sizes = Vec::new();
                    while sizes.iter().sum::<usize>() < len {
                        sizes.push(piece(len - sizes.iter().sum::<usize>(), budget, lone_end));
                    }
                    assert_eq!(sizes.iter().sum::<usize>(), len);
                    assert!(sizes.iter().all(|&n| n <= budget.max(3)), "{sizes:?}");
                    let (end, body) = sizes.split_last().unwrap();
                    let whole_body = body.iter().all(|&n| n > 1) || lone_end && len == 2;
                    assert!(whole_body, "{len} {budget} {lone_end}: {sizes:?}");
                    assert_eq!(*end == 1, lone_end || len == 1, "{len} {budget} {lone_end}: {sizes:?}");
                }
            }
        }
    }
}
