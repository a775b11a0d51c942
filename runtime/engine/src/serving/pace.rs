//! How much of the prompts one step may read.
//!
//! A step has the next token of each text. Rows of prompts beside them make those texts wait longer, so there are as many as
//! take the time of a few decode steps, as measured lately, and no more.

use std::time::Duration;

/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;
/// Tokens beside others before the first measurement.
const FIRST: usize = 16;
/// A single row would be read by other kernels than those of longer pieces.
pub(super) const SMALLEST: usize = 2;
/// After so many steps with rows of prompts, one without tells anew what a decode step takes.
const REMEASURE: u32 = 64;

#[derive(Debug)]
pub(super) struct Pace {
    /// Longest time between two tokens of a text, in decode steps.
    gap: f64,
    /// Seconds of a step of next tokens alone.
    decode: Option<f64>,
    /// Seconds that a token of a prompt adds to such a step.
    read: Option<f64>,
    /// Steps since `decode` was measured.
    age: u32,
}

fn update(mean: &mut Option<f64>, newest: f64) {
    *mean = Some(mean.map_or(newest, |mean| mean + NEWEST * (newest - mean)));
}

impl Pace {
    pub(super) fn new(gap: f64) -> Self {
        Pace { gap, decode: None, read: None, age: REMEASURE }
    }

    /// A step had next tokens of some texts or of none, and so many tokens of prompts.
    pub(super) fn stepped(&mut self, decoded: bool, read: usize, time: Duration) {
        let time = time.as_secs_f64();
        match (decoded, read) {
            (false, _) => {}
            (true, 0) => {
                update(&mut self.decode, time);
                self.age = 0;
            }
            (true, _) => {
                self.age = self.age.saturating_add(1);
                let Some(decode) = self.decode else { return };
                update(&mut self.read, (time - decode).max(0.0) / read as f64);
            }
        }
    }

    /// Tokens of prompts in this step, at most `most`; `others` wait for their next token.
    pub(super) fn budget(&self, others: bool, most: usize) -> usize {
        if !others {
            return most;
        }
        if self.age >= REMEASURE {
            return 0;
        }
        let tokens = match (self.decode, self.read) {
            (Some(decode), Some(read)) if read > 0.0 => ((self.gap - 1.0).max(0.0) * decode / read) as usize,
            (Some(_), Some(_)) => most,
            _ => FIRST,
        };
        tokens.max(SMALLEST).min(most)
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
        assert_eq!((pace.budget(false, 128), pace.budget(true, 128)), (128, 0), "a decode step first");
        pace.stepped(true, 0, Duration::from_millis(10));
        assert_eq!((pace.budget(true, 128), pace.budget(true, 8)), (16, 8));
        pace.stepped(true, 16, Duration::from_millis(26));
        assert_eq!((pace.budget(true, 128), pace.budget(true, 8)), (20, 8));
        for _ in 0..100 {
            pace.stepped(true, 0, Duration::from_millis(40));
        }
        assert_eq!(pace.budget(true, 128), 79);
        pace.stepped(false, 128, Duration::from_millis(1));
        assert_eq!(pace.budget(true, 128), 79, "a step without others says nothing");
        assert_eq!(Pace { gap: 1.0, ..pace }.budget(true, 128), SMALLEST);
    }

    #[test]
    fn decode_steps_are_measured_again() {
        let mut pace = Pace::new(3.0);
        pace.stepped(true, 0, Duration::from_millis(10));
        for step in 0..3 * REMEASURE {
            let budget = pace.budget(true, 128);
            assert_eq!(budget == 0, step % (REMEASURE + 1) == REMEASURE, "{step}");
            pace.stepped(true, budget, Duration::from_millis(10 + budget as u64));
        }
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
