//! The part of the prompts that one step may read.
//!
//! A step has the next token of each sequence. Rows of prompts make those sequences wait longer, so there are
//! as many as fit into the gap: a step with them takes no more than a multiple of its time without them
//! ([`step_cost`](super::step_cost)).
//!
//! Where several prompts wait, "without" is a step of these sequences, too: soon they are all decoding, and
//! every token will wait for that then. The few that have started would otherwise hold up a burst of others,
//! since little fits into a step of one sequence, and small steps read prompts slowly.

use std::time::Duration;

use crate::serving::step_cost::{StepCostModel, StepLoad};

/// Rows of prompts before a step with some was measured.
const FIRST: usize = 16;
/// A single row would be read by other kernels than those of longer pieces.
pub(super) const SMALLEST: usize = 2;
/// After this many steps with rows of prompts, one without them measures its time again.
const REMEASURE: u32 = 64;
/// The same when there are other texts, by more than a quarter of them.
const REMEASURE_OTHERS: u32 = 4;
/// The largest growth of the number of rows over that of any step before.
const GROWTH: usize = 2;
/// Deviations of the predictions that are left free below the gap: one step in 44 is longer than it, if
/// errors are normal.
const MARGIN: f64 = 2.0;

#[derive(Debug)]
pub(super) struct PrefillPacer {
    /// Longest time between two tokens of a text, in decode steps.
    max_token_gap: f64,
    cost: StepCostModel,
    /// Steps since one without rows of prompts was measured.
    steps_since_decode_only: u32,
    /// Most rows of prompts beside next tokens so far: what lies far beyond them is not known well.
    max_rows_seen: usize,
}

impl PrefillPacer {
    pub(super) fn new(max_token_gap: f64) -> Self {
        PrefillPacer {
            max_token_gap,
            cost: StepCostModel::default(),
            steps_since_decode_only: REMEASURE,
            max_rows_seen: 0,
        }
    }

    /// Records the load and the time of a step. One without next tokens says nothing about their waiting.
    pub(super) fn record_step(&mut self, load: &StepLoad, time: Duration) {
        if load.decode_rows == 0 {
            return;
        }
        match load.prefill_rows {
            0 => self.steps_since_decode_only = 0,
            rows => {
                self.steps_since_decode_only = self.steps_since_decode_only.saturating_add(1);
                self.max_rows_seen = self.max_rows_seen.max(rows);
            }
        }
        self.cost.record_step(load, time.as_secs_f64());
    }

    /// The age at which a step without rows of prompts is due.
    fn remeasure_interval(&self, texts: usize) -> u32 {
        let before = self.cost.decode_sequences();
        if 4 * before.abs_diff(texts) > before { REMEASURE_OTHERS } else { REMEASURE }
    }

    /// The budget of prompts in a step with the next tokens of `texts` sequences, at most `most` rows.
    /// `waiting`: the number of prompts behind the one that is read first.
    pub(super) fn prefill_budget(&self, texts: usize, waiting: usize, most: usize) -> PrefillBudget<'_> {
        let (rows, seconds) = if texts == 0 {
            (most, f64::INFINITY)
        } else if self.steps_since_decode_only >= self.remeasure_interval(texts) {
            (0, 0.0)
        } else if self.max_rows_seen == 0 {
            (FIRST.min(most), f64::INFINITY)
        } else {
            let gap = self.max_token_gap / (1.0 + MARGIN * self.cost.relative_deviation());
            let step = self.cost.decode_time_of(texts + waiting);
            let seconds = gap.max(1.0) * step - self.cost.decode_time() - self.cost.prefill_overhead();
            (most.min(self.max_rows_seen.saturating_mul(GROWTH)), seconds)
        };
        PrefillBudget {
            cost: &self.cost,
            rows,
            seconds,
            smallest: if rows < SMALLEST { 0 } else { SMALLEST },
        }
    }
}

/// The rest of a step for rows of prompts.
#[derive(Debug)]
pub(super) struct PrefillBudget<'c> {
    cost: &'c StepCostModel,
    rows: usize,
    seconds: f64,
    /// Rows of the first prompt in any case, else it would never be read.
    smallest: usize,
}

impl PrefillBudget<'_> {
    /// Rows of a prompt of which `past` are read; fewer than [`SMALLEST`]: none.
    pub(super) fn chunk_rows(&self, past: usize) -> usize {
        let fit = self.cost.rows_within(self.seconds, past);
        fit.min(self.rows).max(self.smallest)
    }

    pub(super) fn spend(&mut self, rows: usize, past: usize) {
        self.seconds -= self.cost.prefill_time(rows, past);
        self.rows = self.rows.saturating_sub(rows);
        self.smallest = 0;
    }
}

/// Tokens of the next piece of a prompt of which `left` are to be read: about `budget`, and at least one.
///
/// A single row is read by other kernels, whose last bits differ. So it is one only where `mlcc run` has one
/// as well: at the end (`lone_end`).
pub(super) fn chunk_len(left: usize, budget: usize, lone_end: bool) -> usize {
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

    /// A model of which a step of some texts takes 2 ms and 0.5 ms for each, and one with rows of prompts 1
    /// ms more and `row` ms for each, twice as much behind 5000 others.
    fn milliseconds(load: &StepLoad, row: f64) -> f64 {
        let begin = if load.prefill_rows > 0 { 1.0 } else { 0.0 };
        2.0 + 0.5 * load.decode_rows as f64
            + begin
            + row * (load.prefill_rows as f64 + 2e-4 * load.prefill_keys as f64)
    }

    /// Reads a prompt beside texts; gives the longest step in steps without a prompt, and the mean of those
    /// with one, after the first few.
    fn read(
        pace: &mut PrefillPacer,
        texts: usize,
        prompt: usize,
        row: f64,
        mut noise: impl FnMut() -> f64,
    ) -> (f64, f64) {
        let (mut past, mut longest, mut sum, mut count) = (0, 0.0_f64, 0.0, 0);
        let next = StepLoad { decode_rows: texts, ..StepLoad::default() };
        let alone = milliseconds(&next, row);
        while past < prompt {
            let room = pace.prefill_budget(next.decode_rows, 0, 512);
            let rows = room.chunk_rows(past).min(prompt - past);
            let load =
                StepLoad { prefill_rows: rows, prefill_keys: StepLoad::count_keys(rows, past), ..next };
            let took = milliseconds(&load, row);
            pace.record_step(&load, Duration::from_secs_f64(took * noise() / 1e3));
            past += rows;
            longest = longest.max(took / alone);
            if rows > 0 && past < prompt && past > 200 {
                (sum, count) = (sum + took / alone, count + 1);
            }
        }
        (longest, sum / f64::from(count))
    }

    #[test]
    fn reading_gets_the_time_of_the_gap() {
        for (texts, row) in [(1, 0.02), (8, 0.2), (8, 0.02), (16, 0.5), (3, 0.1)] {
            let mut pace = PrefillPacer::new(3.0);
            read(&mut pace, texts, 4000, row, || 1.0);
            let (longest, mean) = read(&mut pace, texts, 4000, row, || 1.0);
            assert!(longest < 3.1, "{texts} {row}: {longest}");
            assert!(mean > 2.8 || row < 0.05, "{texts} {row}: {mean}");
        }
    }

    #[test]
    fn other_texts_and_a_slower_machine_are_followed() {
        let mut pace = PrefillPacer::new(3.0);
        read(&mut pace, 8, 4000, 0.2, || 1.0);
        read(&mut pace, 2, 4000, 0.2, || 1.0);
        let (longest, mean) = read(&mut pace, 5, 4000, 0.2, || 1.0);
        assert!(longest < 3.2 && mean > 2.7, "{longest} {mean}");
        read(&mut pace, 5, 4000, 0.4, || 2.0);
        let (longest, mean) = read(&mut pace, 5, 4000, 0.4, || 2.0);
        assert!(longest < 3.2 && mean > 2.7, "{longest} {mean}");
    }

    #[test]
    fn one_long_step_changes_little() {
        let mut pace = PrefillPacer::new(3.0);
        read(&mut pace, 8, 4000, 0.2, || 1.0);
        let mut step = 0;
        let (longest, mean) = read(&mut pace, 8, 4000, 0.2, || {
            step += 1;
            if step % 20 == 0 { 10.0 } else { 1.0 }
        });
        assert!(longest < 3.8 && mean > 2.3, "{longest} {mean}");
    }

    #[test]
    fn the_first_steps_and_the_limits() {
        let mut pace = PrefillPacer::new(3.0);
        let next = StepLoad { decode_rows: 4, ..StepLoad::default() };
        assert_eq!(pace.prefill_budget(0, 0, 128).chunk_rows(0), 128, "nobody waits");
        assert_eq!(pace.prefill_budget(next.decode_rows, 0, 128).chunk_rows(0), 0, "a decode step first");
        pace.record_step(&next, Duration::from_millis(10));
        assert_eq!(
            (
                pace.prefill_budget(next.decode_rows, 0, 128).chunk_rows(0),
                pace.prefill_budget(next.decode_rows, 0, 8).chunk_rows(0)
            ),
            (FIRST, 8)
        );
        pace.record_step(&StepLoad { prefill_rows: 128, ..StepLoad::default() }, Duration::from_millis(1));
        assert_eq!(
            pace.prefill_budget(next.decode_rows, 0, 128).chunk_rows(0),
            FIRST,
            "a step without others says nothing"
        );
        pace.record_step(&StepLoad { prefill_rows: 16, ..next }, Duration::from_millis(11));
        assert_eq!(
            pace.prefill_budget(next.decode_rows, 0, 128).chunk_rows(0),
            32,
            "no more than twice as many as ever before"
        );
        let tight = PrefillPacer { max_token_gap: 1.0, ..pace };
        let mut room = tight.prefill_budget(next.decode_rows, 0, 128);
        assert_eq!(room.chunk_rows(0), SMALLEST);
        room.spend(SMALLEST, 0);
        assert_eq!(room.chunk_rows(0), 0, "the first prompt alone");
    }

    /// A burst: beside one text there is as much room as beside all that will be written soon, as far as that
    /// was measured.
    #[test]
    fn prompts_that_wait_are_texts_of_the_step_that_counts() {
        let mut pace = PrefillPacer::new(3.0);
        for texts in [1, 16] {
            read(&mut pace, texts, 4000, 0.2, || 1.0);
        }
        for _ in 0..30 {
            pace.record_step(
                &StepLoad { decode_rows: 1, ..StepLoad::default() },
                Duration::from_secs_f64(2.5e-3),
            );
        }
        let (alone, burst) =
            (pace.prefill_budget(1, 0, 512).chunk_rows(0), pace.prefill_budget(1, 15, 512).chunk_rows(0));
        // 5 ms, less 1 to begin, are 20 rows; 27.5 ms, less 1, are 130.
        assert!((16..=24).contains(&alone), "{alone}");
        assert!((104..=156).contains(&burst), "{burst}");
        assert_eq!(pace.prefill_budget(1, 40, 512).chunk_rows(0), burst, "more was never measured");
    }

    /// Most steps are within the gap, though none takes the predicted time.
    #[test]
    fn there_is_room_for_errors() {
        let (mut pace, mut seed) = (PrefillPacer::new(3.0), 1_u32);
        let mut noise = || {
            let mut next = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f64::from(seed) / f64::from(u32::MAX) - 0.5
            };
            1.0 + 0.12 * (next() + next() + next())
        };
        read(&mut pace, 8, 4000, 0.2, &mut noise);
        let next = StepLoad { decode_rows: 8, ..StepLoad::default() };
        let alone = milliseconds(&next, 0.2);
        let (mut past, mut steps, mut long) = (0, 0, 0);
        while past < 8000 {
            let rows = pace.prefill_budget(8, 0, 512).chunk_rows(past);
            let load =
                StepLoad { prefill_rows: rows, prefill_keys: StepLoad::count_keys(rows, past), ..next };
            let took = milliseconds(&load, 0.2) * noise();
            pace.record_step(&load, Duration::from_secs_f64(took / 1e3));
            past += rows;
            steps += 1;
            long += usize::from(took > 3.0 * alone);
        }
        assert!(long * 20 < steps, "{long} of {steps}");
    }

    #[test]
    fn decode_steps_are_measured_again() {
        let mut pace = PrefillPacer::new(3.0);
        let next = StepLoad { decode_rows: 2, ..StepLoad::default() };
        pace.record_step(&next, Duration::from_millis(10));
        for step in 0..3 * REMEASURE {
            let rows = pace.prefill_budget(next.decode_rows, 0, 128).chunk_rows(0);
            assert_eq!(rows == 0, step % (REMEASURE + 1) == REMEASURE, "{step}");
            pace.record_step(
                &StepLoad { prefill_rows: rows, ..next },
                Duration::from_millis(10 + rows as u64),
            );
        }
    }

    #[test]
    fn pieces_end_where_the_prompt_does_and_none_is_a_single_row() {
        for len in 1..40 {
            for lone_end in [false, true] {
                for budget in 1..12 {
                    let mut sizes = Vec::new();
                    while sizes.iter().sum::<usize>() < len {
                        sizes.push(chunk_len(len - sizes.iter().sum::<usize>(), budget, lone_end));
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
