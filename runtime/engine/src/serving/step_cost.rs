//! The time that rows of prompts add to a step, predicted from their number and the number of keys that they
//! look at: a linear model that each step corrects (a Kalman filter whose state drifts).
//!
//! Times are counted in those of the first step, so that no constant here depends on the machine or the
//! model.

/// The load of a step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepLoad {
    /// Texts of which it has the next token.
    pub decode_rows: usize,
    /// Rows of prompts.
    pub prefill_rows: usize,
    /// Keys that these look at, each row its own.
    pub prefill_keys: usize,
}

impl StepLoad {
    /// Keys that `rows` rows behind `past` others look at.
    pub fn count_keys(rows: usize, past: usize) -> usize {
        rows * past + rows * rows / 2
    }
}

/// Any rows, each row, its keys.
const PARTS: usize = 3;
/// The amount of a part that counts about as much as a step.
const SCALE: [f64; PARTS] = [1.0, 32.0, 65536.0];
/// The parts before anything was measured, in steps without prompts, and their deviations.
const BELIEF: [f64; PARTS] = [0.1, 1.0, 0.1];
const DOUBT: [f64; PARTS] = [0.2, 2.0, 1.0];
/// The change of a machine from a step to the next, other processes included: all parts by the same share.
const DRIFT: f64 = 0.02;
/// The change of each part by itself, as a share of the first doubt.
const OWN_DRIFT: f64 = 0.003;
/// Weight of the newest measurement of a step without prompts.
const NEWEST: f64 = 0.2;
/// Deviation of a measurement, as a share of it.
const NOISE: f64 = 0.05;
/// A step that took that share longer or shorter than predicted is taken for one that just did: the process
/// was not run for a while.
const SURPRISE: f64 = 0.3;
/// Weight of the newest error in their spread.
const NEWEST_ERROR: f64 = 0.05;

#[derive(Debug)]
pub(super) struct StepCostModel {
    /// Seconds of a step without rows of prompts.
    decode_seconds: Option<f64>,
    /// The number of sequences in that step.
    decode_sequences: usize,
    /// The same by number of texts, when such a step was measured last; 0: never.
    by_sequences: Vec<f64>,
    /// Seconds that parts are counted in: the first such step.
    unit: f64,
    parts: [f64; PARTS],
    doubt: [[f64; PARTS]; PARTS],
    /// Mean square of the errors of predictions, each as a share of its step.
    variance: f64,
}

impl Default for StepCostModel {
    fn default() -> Self {
        let mut doubt = [[0.0; PARTS]; PARTS];
        for (part, row) in doubt.iter_mut().enumerate() {
            row[part] = DOUBT[part] * DOUBT[part];
        }
        StepCostModel {
            decode_seconds: None,
            decode_sequences: 0,
            by_sequences: Vec::new(),
            unit: 0.0,
            parts: BELIEF,
            doubt,
            variance: NOISE * NOISE,
        }
    }
}

fn feature_vector(rows: usize, keys: usize) -> [f64; PARTS] {
    let any = if rows > 0 { 1 } else { 0 };
    let counts = [any, rows, keys];
    std::array::from_fn(|part| counts[part] as f64 / SCALE[part])
}

fn dot_product(a: &[f64; PARTS], b: &[f64; PARTS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// An error that is no larger than a surprise.
fn clamp_error(error: f64, expected: f64) -> f64 {
    let most = SURPRISE * expected;
    error.clamp(-most, most)
}

impl StepCostModel {
    /// Seconds of a step with next tokens alone.
    pub fn decode_time(&self) -> f64 {
        self.decode_seconds.unwrap_or(0.0)
    }

    /// Seconds of a step with the next tokens of more texts than
    /// [`decode_sequences`](Self::decode_sequences), as far as steps were measured; a text more costs no more
    /// than each of those that the newest one had.
    pub fn decode_time_of(&self, texts: usize) -> f64 {
        let alone = self.decode_time();
        let more = self
            .by_sequences
            .iter()
            .take(texts + 1)
            .skip(self.decode_sequences)
            .copied()
            .fold(alone, f64::max);
        more.min(alone * texts as f64 / self.decode_sequences.max(1) as f64).max(alone)
    }

    /// The number of sequences in that step.
    pub fn decode_sequences(&self) -> usize {
        self.decode_sequences
    }

    /// The relative error of the predictions of steps with rows of prompts (deviation).
    pub fn relative_deviation(&self) -> f64 {
        self.variance.sqrt()
    }

    /// Seconds that rows of prompts take before the first one.
    pub fn prefill_overhead(&self) -> f64 {
        self.unit * self.parts[0]
    }

    /// Seconds of the rows themselves, of a prompt of which `past` are read.
    pub fn prefill_time(&self, rows: usize, past: usize) -> f64 {
        let counts = feature_vector(rows, StepLoad::count_keys(rows, past));
        self.unit * (self.parts[1] * counts[1] + self.parts[2] * counts[2])
    }

    /// The number of rows behind `past` others that fit into `seconds` seconds.
    pub fn rows_within(&self, seconds: f64, past: usize) -> usize {
        if seconds == f64::INFINITY {
            return usize::MAX;
        }
        // Half a row squared and a row, each with its price: the positive root.
        let square = self.unit * self.parts[2] / SCALE[2] / 2.0;
        let each = self.unit * (self.parts[1] / SCALE[1] + self.parts[2] / SCALE[2] * past as f64);
        let root = (each * each + 4.0 * square * seconds.max(0.0)).sqrt();
        // The form that holds where nothing is square. No price at all: as many as one likes.
        (2.0 * seconds.max(0.0) / (each + root).max(f64::MIN_POSITIVE)) as usize
    }

    /// A step took so long.
    pub fn record_step(&mut self, load: &StepLoad, seconds: f64) {
        if seconds.is_nan() || seconds <= 0.0 {
            return;
        }
        if load.prefill_rows == 0 {
            let same = self.decode_seconds.filter(|_| self.decode_sequences == load.decode_rows);
            let alone = same.map_or(seconds, |mean| mean + NEWEST * clamp_error(seconds - mean, mean));
            self.decode_seconds = Some(alone);
            self.decode_sequences = load.decode_rows;
            if self.by_sequences.len() <= load.decode_rows {
                self.by_sequences.resize(load.decode_rows + 1, 0.0);
            }
            self.by_sequences[load.decode_rows] = alone;
            if self.unit == 0.0 {
                self.unit = seconds;
            }
        } else if self.decode_seconds.is_some() {
            self.record_prefill(
                &feature_vector(load.prefill_rows, load.prefill_keys),
                (seconds - self.decode_time()) / self.unit,
            );
        }
    }

    fn record_prefill(&mut self, counts: &[f64; PARTS], took: f64) {
        let expected = dot_product(counts, &self.parts);
        let whole = expected + self.decode_time() / self.unit;
        let error = clamp_error(took - expected, whole);
        let share = error / whole;
        if share.is_finite() {
            self.variance += NEWEST_ERROR * (share * share - self.variance);
        }
        for (part, row) in self.doubt.iter_mut().enumerate() {
            // No more than at the beginning: what a long time says nothing about is not less known than then.
            let most = DOUBT[part] * DOUBT[part];
            row[part] = (row[part] + OWN_DRIFT * OWN_DRIFT * most).min(most.max(row[part]));
            for (other, doubt) in row.iter_mut().enumerate() {
                *doubt += DRIFT * DRIFT * self.parts[part] * self.parts[other];
            }
        }
        let spread: [f64; PARTS] = std::array::from_fn(|part| dot_product(&self.doubt[part], counts));
        let noise = NOISE * whole;
        let all = dot_product(&spread, counts) + noise * noise;
        if all.is_nan() || all <= 0.0 {
            return;
        }
        for part in 0..PARTS {
            // Nothing takes less than no time.
            self.parts[part] = (self.parts[part] + spread[part] / all * error).max(0.0);
            for other in 0..PARTS {
                self.doubt[part][other] -= spread[part] * spread[other] / all;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_cost_is_learned() {
        let mut cost = StepCostModel::default();
        let took = |rows: usize, keys: usize| 3e-3 + 3e-3 * rows as f64 + 1e-6 * keys as f64;
        for step in 0..400_usize {
            let rows = step * 13 % 64;
            let row_keys = StepLoad::count_keys(rows, step * 97 % 2000);
            let alone = 0.04;
            let seconds = if rows == 0 { alone } else { alone + took(rows, row_keys) };
            cost.record_step(
                &StepLoad { decode_rows: 8, prefill_rows: rows, prefill_keys: row_keys },
                seconds,
            );
        }
        assert!((cost.decode_time() - 0.04).abs() < 1e-9);
        for (rows, past) in [(10, 100), (60, 1900), (30, 0), (3, 1500)] {
            let (found, right) = (
                cost.prefill_overhead() + cost.prefill_time(rows, past),
                took(rows, StepLoad::count_keys(rows, past)),
            );
            assert!((found - right).abs() < 0.05 * (0.04 + right), "{rows} {past}: {found} for {right}");
        }
    }

    #[test]
    fn as_many_rows_fit_as_their_sum_says() {
        let mut cost = StepCostModel::default();
        cost.record_step(&StepLoad { decode_rows: 4, ..StepLoad::default() }, 0.01);
        for past in [0, 100, 5000] {
            for seconds in [1e-3, 0.02, 0.5] {
                let rows = cost.rows_within(seconds, past);
                assert!(cost.prefill_time(rows, past) <= seconds * 1.01, "{past} {seconds}: {rows}");
                assert!(cost.prefill_time(rows + 1, past) >= seconds * 0.99, "{past} {seconds}: {rows}");
            }
        }
        assert_eq!(
            (cost.rows_within(0.0, 5), cost.rows_within(-1.0, 5), cost.rows_within(f64::INFINITY, 5)),
            (0, 0, usize::MAX)
        );
    }

    #[test]
    fn what_is_measured_never_breaks_it() {
        let mut cost = StepCostModel::default();
        for step in 0..3000_usize {
            let load = StepLoad {
                decode_rows: step % 3,
                prefill_rows: step % 2 * 512,
                prefill_keys: (step % 5) << 22,
            };
            cost.record_step(&load, [0.0, 1e-9, 1e3, 1e-3][step % 4]);
            let found = cost.decode_time() + cost.prefill_overhead() + cost.prefill_time(100, 1000);
            assert!(found.is_finite() && found >= 0.0, "{step}: {found}");
        }
    }
}
