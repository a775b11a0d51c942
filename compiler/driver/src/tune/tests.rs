//! The search on machines that are made up.

use super::*;
use mlcc_target::{DivisionMethod, MatrixTile, StreamPrefetch, TuneTables, level};
use std::convert::Infallible;

/// A machine whose speed is a formula, disturbed by a drift; its clock counts runs.
struct SpeedFormula {
    speed: fn(&TuneTables, WorkloadKind) -> f64,
    /// The number of the code of a tuning.
    code: fn(&TuneTables) -> u128,
    last: Option<TuneTables>,
    runs: usize,
    most_runs: usize,
}

impl CandidateEvaluator for SpeedFormula {
    type Artifact = TuneTables;
    type Error = Infallible;
    fn compile_code(&mut self, level: &FeatureLevel) -> Result<u128, Infallible> {
        self.last = level.tune.clone();
        Ok(level.tune.as_ref().map_or(0, self.code))
    }
    fn load(&mut self) -> Result<TuneTables, Infallible> {
        Ok(self.last.clone().unwrap())
    }
    fn compare(
        &mut self,
        old: &mut TuneTables,
        new: &mut TuneTables,
        kind: WorkloadKind,
        effort: ComparisonEffort,
    ) -> Result<Option<SpeedComparison>, Infallible> {
        compare_interleaved(self, old, new, kind, effort)
    }
    fn is_over(&self) -> bool {
        self.is_out_of_time()
    }
    fn report_trial(&mut self, _: &TuneTrial) {}
}

impl SpeedTimer for SpeedFormula {
    type Artifact = TuneTables;
    type Error = Infallible;
    fn measure_speed(&mut self, artifact: &mut TuneTables, kind: WorkloadKind) -> Result<f64, Infallible> {
        self.runs += 1;
        // The machine gets slower, by more than what is to be found, and every third run by a tenth.
        let drift = 1.0 - 0.0002 * self.runs as f64;
        let noise = if self.runs % 7 == 3 { 0.9 } else { 1.0 };
        Ok((self.speed)(artifact, kind) * drift * noise)
    }
    fn is_out_of_time(&self) -> bool {
        self.runs >= self.most_runs
    }
}

fn base() -> FeatureLevel {
    level("znver4").unwrap().unwrap()
}

fn tune(level: &FeatureLevel) -> &TuneTables {
    level.tune.as_ref().unwrap()
}

fn formula(speed: fn(&TuneTables, WorkloadKind) -> f64) -> SpeedFormula {
    let code = |tune: &TuneTables| {
        let distance = match tune.stream.q8 {
            StreamPrefetch::None => 0,
            StreamPrefetch::Every { distance } => distance,
            StreamPrefetch::One { distance } => distance + (1 << 20),
        };
        u128::from(distance) << 64
            | u128::from(tune.product.few_rows) << 8
            | u128::from(tune.division == DivisionMethod::Divider)
    };
    SpeedFormula { speed, code, last: None, runs: 0, most_runs: usize::MAX }
}

/// Tokens are best 4096 bytes ahead, short prompts with 8 rows; dividing helps prompts and costs tokens.
fn hill(tune: &TuneTables, kind: WorkloadKind) -> f64 {
    let speed = match (kind, tune.stream.q8) {
        (WorkloadKind::Decode, StreamPrefetch::Every { distance }) => {
            110.0 - f64::from(distance.abs_diff(4096)) / 500.0
        }
        (WorkloadKind::FewRows, _) => 100.0 - f64::from(tune.product.few_rows.abs_diff(8)),
        _ => 100.0,
    };
    match (kind, tune.division) {
        (WorkloadKind::Prompt, DivisionMethod::Polynomial) => speed * 1.2,
        (WorkloadKind::Decode, DivisionMethod::Polynomial) => speed * 0.9,
        _ => speed,
    }
}

#[test]
fn the_search_climbs_key_by_key() {
    let base = base();
    let mut machine = formula(hill);
    let found = search_tuning(&mut machine, &base).unwrap();
    assert!(found.complete);
    assert_eq!(tune(&found.level).stream.q8, StreamPrefetch::Every { distance: 4096 });
    assert_eq!(tune(&found.level).product.few_rows, 8);
    // Better in sum, but worse at something.
    assert_eq!(tune(&found.level).division, tune(&base).division);
    let changes = tune(&base).changed_keys(tune(&found.level));
    assert_eq!(changes.keys().collect::<Vec<_>>(), ["product", "stream"]);
    assert!(found.equal > 50, "keys that change no code are not timed: {}", found.equal);
    let trials: BTreeSet<&str> = found.trials.iter().map(|trial| trial.key).collect();
    assert_eq!(trials, BTreeSet::from(["division", "product.few_rows", "stream.q8"]));
    let mut artifact = found.artifact;
    let last = confirm_tuning(&mut machine, &base, &mut artifact).unwrap();
    assert_eq!(last.iter().map(|c| c.kind).collect::<Vec<_>>(), WorkloadKind::OF_CPUS);
    assert!(is_better(&last) && last[0].gain > 1.05 && (last[1].gain - 1.0).abs() < 0.02, "{last:?}");
}

#[test]
fn noise_and_drift_change_nothing() {
    let found = search_tuning(&mut formula(|_, _| 100.0), &base()).unwrap();
    assert_eq!(found.level, base());
    assert!(found.trials.len() > 10 && found.trials.iter().all(|trial| !trial.taken));
}

#[test]
fn what_was_found_so_far_stays_when_the_time_is_over() {
    for most_runs in [0, 5, 60, 120] {
        let mut machine = SpeedFormula { most_runs, ..formula(hill) };
        let found = search_tuning(&mut machine, &base()).unwrap();
        assert!(!found.complete);
        assert!(machine.runs <= most_runs + 1, "{} runs", machine.runs);
        let best = found.trials.iter().rfind(|trial| trial.taken);
        assert_eq!(best.is_some(), found.level != base(), "{most_runs}");
        assert_eq!(Some(found.artifact), found.level.tune);
    }
}

/// Predictions by a formula, of code that some tiles have none of.
struct PredictedSpeed {
    speed: fn(MatrixTile, WorkloadKind) -> f64,
    last: Option<MatrixTile>,
    judged: usize,
    most: usize,
}

fn tile(level: &FeatureLevel) -> MatrixTile {
    level.gpu.as_ref().unwrap().code_product.unwrap()
}

impl CandidateEvaluator for PredictedSpeed {
    type Artifact = MatrixTile;
    type Error = String;
    fn compile_code(&mut self, level: &FeatureLevel) -> Result<u128, String> {
        let MatrixTile { rows, columns, warps: [down, across], stages } = tile(level);
        self.last = Some(tile(level));
        let numbers = [rows, columns, down, across, stages];
        Ok(numbers.into_iter().fold(0, |all, number| all << 16 | u128::from(number)))
    }
    fn load(&mut self) -> Result<MatrixTile, String> {
        let tile = self.last.unwrap();
        if tile.stages == 5 { Err("ptxas refuses it".into()) } else { Ok(tile) }
    }
    fn compare(
        &mut self,
        old: &mut MatrixTile,
        new: &mut MatrixTile,
        kind: WorkloadKind,
        _: ComparisonEffort,
    ) -> Result<Option<SpeedComparison>, String> {
        self.judged += 1;
        Ok(Some(SpeedComparison::exact(kind, (self.speed)(*old, kind), (self.speed)(*new, kind))))
    }
    fn refused(&self, error: String) -> Result<String, String> {
        Ok(error)
    }
    fn is_over(&self) -> bool {
        self.judged >= self.most
    }
    fn report_trial(&mut self, _: &TuneTrial) {}
}

fn predicted(speed: fn(MatrixTile, WorkloadKind) -> f64) -> TuneResult<MatrixTile> {
    let base = level("sm_90").unwrap().unwrap();
    search_tuning(&mut PredictedSpeed { speed, last: None, judged: 0, most: usize::MAX }, &base).unwrap()
}

/// Large tiles are faster in prompts by more than a hundredth, in steps by less.
fn large(tile: MatrixTile, kind: WorkloadKind) -> f64 {
    let results = f64::from(tile.rows * tile.columns);
    if kind == WorkloadKind::Prompt { results.sqrt() } else { 100.0 + results / 1e6 }
}

#[test]
fn predictions_choose_a_tile_of_a_gpu() {
    let found = predicted(large);
    let base = level("sm_90").unwrap().unwrap();
    let MatrixTile { rows, columns, .. } = tile(&found.level);
    assert_eq!((rows, columns), (64, 256), "larger ones have no shared memory for four stages");
    assert!(found.complete && found.artifact == tile(&found.level));
    let changes = base.changed_keys(&found.level);
    assert_eq!(changes.keys().collect::<Vec<_>>(), ["code_product"]);
    assert!(found.equal > 10, "no code depends on other keys: {}", found.equal);
    assert!(found.trials.iter().all(|trial| trial.comparisons.iter().all(|c| c.turns == 1)));
    // A value that cannot be built is named, and nothing else suffers.
    let refused = &found.refused[0];
    assert_eq!((refused.key, refused.why.as_str()), ("code_product", "ptxas refuses it"));
    assert!(refused.to.contains("stages 5"), "{}", refused.to);
    // Without noise the same is found again.
    let again = predicted(large);
    assert_eq!((again.level, again.trials, again.refused), (found.level, found.trials, found.refused));
    let last = confirm_tuning(
        &mut PredictedSpeed { speed: large, last: None, judged: 0, most: usize::MAX },
        &base,
        &mut { found.artifact },
    );
    assert_eq!(last.unwrap().iter().map(|c| c.kind).collect::<Vec<_>>(), WorkloadKind::OF_GPUS);
}

#[test]
fn predicted_gains_below_a_hundredth_are_not_taken() {
    let base = level("sm_90").unwrap().unwrap();
    let slightly = |tile: MatrixTile, _| 100.0 + 0.3 * f64::from(tile.columns > 64);
    let gains: Vec<f64> =
        predicted(slightly).trials.iter().flat_map(|trial| &trial.comparisons).map(|c| c.gain).collect();
    assert!(gains.iter().any(|gain| *gain > 1.002), "{gains:?}");
    assert_eq!(predicted(slightly).level, base);
    // Faster in sum, but slower at something.
    let mixed = |tile: MatrixTile, kind| match kind {
        WorkloadKind::Prompt => f64::from(tile.columns),
        _ => 100.0 - f64::from(tile.columns) / 20.0,
    };
    assert_eq!(predicted(mixed).level, base);
}

#[test]
fn errors_of_the_first_build_end_the_search_and_its_end_is_no_error() {
    let mut base = level("sm_90").unwrap().unwrap();
    let mut machine = PredictedSpeed { speed: large, last: None, judged: 0, most: 4 };
    let found = search_tuning(&mut machine, &base).unwrap();
    assert!(!found.complete && found.trials.len() == 2);
    base.gpu.as_mut().unwrap().code_product.as_mut().unwrap().stages = 5;
    assert_eq!(search_tuning(&mut machine, &base).err(), Some("ptxas refuses it".into()));
}
