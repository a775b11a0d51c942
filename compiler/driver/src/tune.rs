//! The search of `mlcc tune`: from a level's tuning, one key after the other, each value compared with the
//! best so far.
//!
//! The comparison of two artifacts is the machine's: [`compare_interleaved`] times them, a prediction needs
//! no turns. A value is taken if it is faster in sum and nothing gets slower; the result as a whole is
//! compared with the start once more, because the best of many draws looks better than it is.

use std::collections::BTreeSet;

use mlcc_target::{FeatureLevel, TuneField, WorkloadKind, format_value};

/// The builder and judge of candidates: the machine, predictions for one, or one that a test makes up.
pub trait CandidateEvaluator {
    /// The artifact of a level, which is compared with others.
    type Artifact;
    type Error;
    /// The code for this level, as a number that is equal where the code is.
    fn compile_code(&mut self, level: &FeatureLevel) -> Result<u128, Self::Error>;
    /// Builds and loads the code of the last call of [`CandidateEvaluator::compile_code`].
    fn load(&mut self) -> Result<Self::Artifact, Self::Error>;
    /// Holds both against each other. `None` if the search is over before there is a result.
    fn compare(
        &mut self,
        old: &mut Self::Artifact,
        new: &mut Self::Artifact,
        kind: WorkloadKind,
        effort: ComparisonEffort,
    ) -> Result<Option<SpeedComparison>, Self::Error>;
    /// The reason why a value is left out whose code cannot be built or judged. An `Err` ends the search.
    fn refused(&self, error: Self::Error) -> Result<String, Self::Error> {
        Err(error)
    }
    /// True if the search has to end: its time is over, or its user ends it.
    fn is_over(&self) -> bool;
    /// Reports every value that was judged.
    fn report_trial(&mut self, trial: &TuneTrial);
    /// Reports every value that was left out.
    fn report_refusal(&mut self, _: &RefusedValue) {}
}

/// A timer of runs, whose speed drifts and has noise larger than most gains.
pub trait SpeedTimer {
    type Artifact;
    type Error;
    /// Tokens per second of one run.
    fn measure_speed(
        &mut self,
        artifact: &mut Self::Artifact,
        kind: WorkloadKind,
    ) -> Result<f64, Self::Error>;
    /// True if there is no time left for more turns.
    fn is_out_of_time(&self) -> bool;
}

/// The effort that a comparison may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ComparisonEffort {
    /// One of many: as much as it takes to tell.
    Search,
    /// The last one, which nothing depends on but what is reported and written.
    Last,
}

/// Two artifacts on one kind of work.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpeedComparison {
    pub kind: WorkloadKind,
    /// Medians, in tokens per second.
    pub without: f64,
    pub with: f64,
    /// Median of the quotients of speeds, that with the change above.
    pub gain: f64,
    /// Share of the turns with a quotient above 1.
    pub wins: f64,
    pub turns: usize,
}

impl SpeedComparison {
    /// The comparison of two speeds without noise.
    pub fn exact(kind: WorkloadKind, without: f64, with: f64) -> SpeedComparison {
        let gain = with / without;
        SpeedComparison { kind, without, with, gain, wins: if gain > 1.0 { 1.0 } else { 0.0 }, turns: 1 }
    }
}

/// A value that was tried.
#[derive(Clone, PartialEq, Debug)]
pub struct TuneTrial {
    pub key: &'static str,
    pub from: String,
    pub to: String,
    pub comparisons: Vec<SpeedComparison>,
    pub taken: bool,
}

/// A value whose code cannot be built or judged.
#[derive(Clone, PartialEq, Debug)]
pub struct RefusedValue {
    pub key: &'static str,
    pub to: String,
    pub why: String,
}

/// The result of a search.
pub struct TuneResult<A> {
    /// The level with the tuning that is the fastest.
    pub level: FeatureLevel,
    pub artifact: A,
    /// Number of its code.
    code: u128,
    /// Values that were judged, in order.
    pub trials: Vec<TuneTrial>,
    /// Values that were left out.
    pub refused: Vec<RefusedValue>,
    /// Values that give code that was judged already.
    pub equal: usize,
    /// True if the search came to its end before its time was over.
    pub complete: bool,
}

/// Turns of a comparison, at least and at most.
const TURNS: (usize, usize) = (3, 9);
/// Turns of the last one, which nothing depends on but what is reported and written.
const LAST_TURNS: usize = 11;
/// After the least turns, a value that is slower or faster by this much needs no more.
const CLEAR: f64 = 0.05;
/// A gain below that is not worth a key, a loss above that not another key's gain.
const WORTH: f64 = 0.01;
/// Share of turns that have to agree.
const AGREEMENT: f64 = 2.0 / 3.0;

/// Varies the keys of `base` in turns, until no key is left whose change is faster, or the time is over.
pub fn search_tuning<M: CandidateEvaluator>(
    machine: &mut M,
    base: &FeatureLevel,
) -> Result<TuneResult<M::Artifact>, M::Error> {
    let code = machine.compile_code(base)?;
    let mut seen = BTreeSet::from([code]);
    let artifact = machine.load()?;
    let level = base.clone();
    let mut found = TuneResult {
        level,
        artifact,
        code,
        trials: Vec::new(),
        refused: Vec::new(),
        equal: 0,
        complete: true,
    };
    loop {
        let taken = |found: &TuneResult<M::Artifact>| found.trials.iter().filter(|trial| trial.taken).count();
        let before = taken(&found);
        for field in base.fields() {
            vary_field(machine, field, &mut found, &mut seen)?;
        }
        found.complete = !machine.is_over();
        if taken(&found) == before || !found.complete {
            return Ok(found);
        }
    }
}

/// Tries the values of one key; one that is better takes the place of the best at once.
fn vary_field<M: CandidateEvaluator>(
    machine: &mut M,
    field: &TuneField,
    found: &mut TuneResult<M::Artifact>,
    seen: &mut BTreeSet<u128>,
) -> Result<(), M::Error> {
    for (value, change) in field.candidates(&found.level) {
        if machine.is_over() {
            return Ok(());
        }
        // Another key may have been changed since the values were listed.
        let Ok(level) = found.level.with_changes(&change) else { continue };
        if level == found.level {
            continue;
        }
        let to = format_value(&value);
        let trial = match judge_candidate(machine, field, found, seen, &level) {
            Ok(CandidateOutcome::Equal) => {
                found.equal += 1;
                continue;
            }
            Ok(CandidateOutcome::NoCode) => {
                found.equal += 1;
                return Ok(());
            }
            Ok(CandidateOutcome::Trial(trial)) => *trial,
            // The build or the run was stopped.
            Err(_) if machine.is_over() => return Ok(()),
            Err(error) => {
                let refusal = RefusedValue { key: field.key, to, why: machine.refused(error)? };
                if !found.refused.contains(&refusal) {
                    machine.report_refusal(&refusal);
                    found.refused.push(refusal);
                }
                continue;
            }
        };
        let (made, comparisons) = trial;
        let taken = comparisons.len() == field.kinds.len() && is_better(&comparisons);
        let tables = found.level.tune_tables().unwrap_or_default();
        let from = field.value_in(&tables).map(format_value).unwrap_or_default();
        let trial = TuneTrial { key: field.key, from, to, comparisons, taken };
        machine.report_trial(&trial);
        found.trials.push(trial);
        if taken {
            (found.level, found.artifact, found.code) = (level, made.0, made.1);
        }
    }
    Ok(())
}

/// The outcome of a value.
enum CandidateOutcome<A> {
    /// Its code was judged already.
    Equal,
    /// The same, and no other value of the key gives another one.
    NoCode,
    /// Its artifact with the number of its code, against the best so far.
    Trial(Box<((A, u128), Vec<SpeedComparison>)>),
}

fn judge_candidate<M: CandidateEvaluator>(
    machine: &mut M,
    field: &TuneField,
    found: &mut TuneResult<M::Artifact>,
    seen: &mut BTreeSet<u128>,
    level: &FeatureLevel,
) -> Result<CandidateOutcome<M::Artifact>, M::Error> {
    let code = machine.compile_code(level)?;
    if !seen.insert(code) {
        return Ok(if field.all_differ() && code == found.code {
            CandidateOutcome::NoCode
        } else {
            CandidateOutcome::Equal
        });
    }
    let mut artifact = machine.load()?;
    let mut comparisons = Vec::new();
    for &kind in field.kinds {
        comparisons.extend(machine.compare(
            &mut found.artifact,
            &mut artifact,
            kind,
            ComparisonEffort::Search,
        )?);
    }
    Ok(CandidateOutcome::Trial(Box::new(((artifact, code), comparisons))))
}

/// Compares the result with the start, on every kind of work. Empty if the user ends it.
pub fn confirm_tuning<M: CandidateEvaluator>(
    machine: &mut M,
    base: &FeatureLevel,
    found: &mut M::Artifact,
) -> Result<Vec<SpeedComparison>, M::Error> {
    machine.compile_code(base)?;
    let mut start = machine.load()?;
    let mut comparisons = Vec::new();
    for &kind in base.kinds() {
        comparisons.extend(machine.compare(&mut start, found, kind, ComparisonEffort::Last)?);
    }
    Ok(comparisons)
}

/// True if the new artifact is to be preferred: faster in sum, in most turns, and at nothing slower.
pub fn is_better(comparisons: &[SpeedComparison]) -> bool {
    let sum: f64 = comparisons.iter().map(|c| c.gain.ln()).sum();
    let best = comparisons.iter().max_by(|a, b| a.gain.total_cmp(&b.gain));
    sum >= WORTH.ln_1p()
        && comparisons.iter().all(|c| c.gain >= 1.0 - WORTH)
        && best.is_some_and(|best| best.wins >= AGREEMENT)
}

fn is_clear(quotients: &[f64]) -> bool {
    let gain = median(quotients);
    quotients.len() >= TURNS.0 && (gain - 1.0).abs() > CLEAR && {
        let same = quotients.iter().filter(|q| (**q > 1.0) == (gain > 1.0)).count();
        same == quotients.len()
    }
}

/// Times both in turns; what counts is the median of the quotients. `None` if the search is over before there
/// are enough of them.
pub fn compare_interleaved<T: SpeedTimer>(
    machine: &mut T,
    old: &mut T::Artifact,
    new: &mut T::Artifact,
    kind: WorkloadKind,
    effort: ComparisonEffort,
) -> Result<Option<SpeedComparison>, T::Error> {
    let most = if effort == ComparisonEffort::Last { LAST_TURNS } else { TURNS.1 };
    let enough = |so_far: &[f64]| effort == ComparisonEffort::Search && is_clear(so_far);
    let (mut without, mut with, mut quotients) = (Vec::new(), Vec::new(), Vec::new());
    while quotients.len() < most && !enough(&quotients) {
        // The order changes: the second of a turn may find a warmer or a slower machine.
        let (before, after) = if quotients.len() % 2 == 0 {
            let before = machine.measure_speed(old, kind)?;
            (before, machine.measure_speed(new, kind)?)
        } else {
            let after = machine.measure_speed(new, kind)?;
            (machine.measure_speed(old, kind)?, after)
        };
        without.push(before);
        with.push(after);
        quotients.push(after / before);
        if machine.is_out_of_time() && quotients.len() < most {
            break;
        }
    }
    let turns = quotients.len();
    if turns < TURNS.0 {
        return Ok(None);
    }
    let wins = quotients.iter().filter(|q| **q > 1.0).count() as f64 / turns as f64;
    let (without, with, gain) = (median(&without), median(&with), median(&quotients));
    Ok(Some(SpeedComparison { kind, without, with, gain, wins, turns }))
}

/// 0 of nothing.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

#[cfg(test)]
mod tests;
