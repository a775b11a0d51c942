//! The search of `mlcc tune`: from a level's tuning, one key after the other, each value held against the best so far.
//!
//! Two artifacts are timed in turns, and what counts is the median of the quotients of the turns: the speed of a machine drifts
//! and its noise is larger than most gains. A value is taken if it is faster in sum and nothing gets slower; what is found
//! as a whole is held against the start once more, because the best of many draws looks better than it is.

use std::collections::BTreeSet;

use mlcc_target::{Field, Kind, Level, show};

/// What builds and runs: the machine, or one that a test makes up.
pub trait Machine {
    /// A loaded artifact.
    type Artifact;
    type Error;
    /// The code for this level, as a number that is equal where the code is.
    fn code(&mut self, level: &Level) -> Result<u128, Self::Error>;
    /// Builds and loads the code of the last call of [`Machine::code`].
    fn load(&mut self) -> Result<Self::Artifact, Self::Error>;
    /// Tokens per second of one run.
    fn speed(&mut self, artifact: &mut Self::Artifact, kind: Kind) -> Result<f64, Self::Error>;
    /// Whether the search has to end: its time is over, or its user ends it.
    fn is_over(&self) -> bool;
    /// Is told of every value that was tried.
    fn tried(&mut self, trial: &Trial);
}

/// Two artifacts on one kind of work.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Comparison {
    pub kind: Kind,
    /// Medians, in tokens per second.
    pub without: f64,
    pub with: f64,
    /// Median of the quotients of speeds, that with the change above.
    pub gain: f64,
    /// Share of the turns with a quotient above 1.
    pub wins: f64,
    pub turns: usize,
}

/// A value that was tried.
#[derive(Clone, PartialEq, Debug)]
pub struct Trial {
    pub key: &'static str,
    pub from: String,
    pub to: String,
    pub comparisons: Vec<Comparison>,
    pub taken: bool,
}

/// What was found.
pub struct Found<A> {
    /// The level with the tuning that is the fastest.
    pub level: Level,
    pub artifact: A,
    /// Number of its code.
    code: u128,
    /// Values that were timed, in order.
    pub trials: Vec<Trial>,
    /// Values that give code that was timed already.
    pub equal: usize,
    /// Whether the search came to its end before its time was over.
    pub complete: bool,
}

/// Turns of a comparison, at least and at most.
const TURNS: (usize, usize) = (3, 9);
/// Turns of the last one, which nothing depends on but what is reported and written.
const LAST_TURNS: usize = 11;
/// After the least turns, what is so much slower or faster needs no more.
const CLEAR: f64 = 0.05;
/// A gain below that is not worth a key, a loss above that not another key's gain.
const WORTH: f64 = 0.01;
/// Share of turns that have to agree.
const AGREEMENT: f64 = 2.0 / 3.0;

/// Varies the keys of `base` in turns, until no key is left whose change is faster, or the time is over.
pub fn search<M: Machine>(machine: &mut M, base: &Level) -> Result<Found<M::Artifact>, M::Error> {
    let code = machine.code(base)?;
    let mut seen = BTreeSet::from([code]);
    let artifact = machine.load()?;
    let mut found =
        Found { level: base.clone(), artifact, code, trials: Vec::new(), equal: 0, complete: true };
    loop {
        let taken = |found: &Found<M::Artifact>| found.trials.iter().filter(|trial| trial.taken).count();
        let before = taken(&found);
        for field in base.fields() {
            vary(machine, field, &mut found, &mut seen)?;
        }
        found.complete = !machine.is_over();
        if taken(&found) == before || !found.complete {
            return Ok(found);
        }
    }
}

/// Tries the values of one key; one that is better takes the place of the best at once.
fn vary<M: Machine>(
    machine: &mut M,
    field: &Field,
    found: &mut Found<M::Artifact>,
    seen: &mut BTreeSet<u128>,
) -> Result<(), M::Error> {
    for (value, change) in field.candidates(&found.level) {
        if machine.is_over() {
            return Ok(());
        }
        // Another key may have been changed since the values were listed.
        let Ok(level) = found.level.tuned(&change) else { continue };
        if level == found.level {
            continue;
        }
        let code = machine.code(&level)?;
        if !seen.insert(code) {
            found.equal += 1;
            if field.all_differ() && code == found.code {
                return Ok(());
            }
            continue;
        }
        let mut artifact = machine.load()?;
        let mut comparisons = Vec::new();
        for &kind in field.kinds {
            let turns = |so_far: &[f64]| is_clear(so_far);
            comparisons.extend(compare(machine, &mut found.artifact, &mut artifact, kind, TURNS.1, turns)?);
        }
        let taken = comparisons.len() == field.kinds.len() && is_better(&comparisons);
        let tables = found.level.tables().unwrap_or_default();
        let from = field.get(&tables).map(show).unwrap_or_default();
        let trial = Trial { key: field.key, from, to: show(&value), comparisons, taken };
        machine.tried(&trial);
        found.trials.push(trial);
        if taken {
            (found.level, found.artifact, found.code) = (level, artifact, code);
        }
    }
    Ok(())
}

/// What was found against the start, on every kind of work. Empty if the user ends it.
pub fn confirm<M: Machine>(
    machine: &mut M,
    base: &Level,
    found: &mut M::Artifact,
) -> Result<Vec<Comparison>, M::Error> {
    machine.code(base)?;
    let mut start = machine.load()?;
    let mut comparisons = Vec::new();
    for kind in Kind::OF_CPUS {
        comparisons.extend(compare(machine, &mut start, found, kind, LAST_TURNS, |_| false)?);
    }
    Ok(comparisons)
}

/// Whether the new artifact is to be preferred: faster in sum, in most turns, and at nothing slower.
pub fn is_better(comparisons: &[Comparison]) -> bool {
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

/// Times both in turns. `None` if the search is over before there are enough of them.
fn compare<M: Machine>(
    machine: &mut M,
    old: &mut M::Artifact,
    new: &mut M::Artifact,
    kind: Kind,
    most: usize,
    enough: impl Fn(&[f64]) -> bool,
) -> Result<Option<Comparison>, M::Error> {
    let (mut without, mut with, mut quotients) = (Vec::new(), Vec::new(), Vec::new());
    while quotients.len() < most && !enough(&quotients) {
        // Who comes first changes: the second of a turn may find a warmer or a slower machine.
        let (before, after) = if quotients.len() % 2 == 0 {
            let before = machine.speed(old, kind)?;
            (before, machine.speed(new, kind)?)
        } else {
            let after = machine.speed(new, kind)?;
            (machine.speed(old, kind)?, after)
        };
        without.push(before);
        with.push(after);
        quotients.push(after / before);
        if machine.is_over() && quotients.len() < most {
            break;
        }
    }
    let turns = quotients.len();
    if turns < TURNS.0 {
        return Ok(None);
    }
    let wins = quotients.iter().filter(|q| **q > 1.0).count() as f64 / turns as f64;
    let (without, with, gain) = (median(&without), median(&with), median(&quotients));
    Ok(Some(Comparison { kind, without, with, gain, wins, turns }))
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
mod tests {
    use super::*;
    use mlcc_target::{Division, Stream, Tune, level};
    use std::convert::Infallible;

    /// A machine whose speed is a formula, disturbed by a drift; its clock counts runs.
    struct Formula {
        speed: fn(&Tune, Kind) -> f64,
        /// What the code depends on.
        code: fn(&Tune) -> u128,
        last: Option<Tune>,
        runs: usize,
        most_runs: usize,
    }

    impl Machine for Formula {
        type Artifact = Tune;
        type Error = Infallible;
        fn code(&mut self, level: &Level) -> Result<u128, Infallible> {
            self.last = level.tune.clone();
            Ok(level.tune.as_ref().map_or(0, self.code))
        }
        fn load(&mut self) -> Result<Tune, Infallible> {
            Ok(self.last.clone().unwrap())
        }
        fn speed(&mut self, artifact: &mut Tune, kind: Kind) -> Result<f64, Infallible> {
            self.runs += 1;
            // The machine gets slower, by more than what is to be found, and every third run by a tenth.
            let drift = 1.0 - 0.0002 * self.runs as f64;
            let noise = if self.runs % 7 == 3 { 0.9 } else { 1.0 };
            Ok((self.speed)(artifact, kind) * drift * noise)
        }
        fn is_over(&self) -> bool {
            self.runs >= self.most_runs
        }
        fn tried(&mut self, _: &Trial) {}
    }

    fn base() -> Level {
        level("znver4").unwrap().unwrap()
    }

    fn tune(level: &Level) -> &Tune {
        level.tune.as_ref().unwrap()
    }

    fn formula(speed: fn(&Tune, Kind) -> f64) -> Formula {
        let code = |tune: &Tune| {
            let distance = match tune.stream.q8 {
                Stream::None => 0,
                Stream::Every { distance } => distance,
                Stream::One { distance } => distance + (1 << 20),
            };
            u128::from(distance) << 64
                | u128::from(tune.product.few_rows) << 8
                | u128::from(tune.division == Division::Divider)
        };
        Formula { speed, code, last: None, runs: 0, most_runs: usize::MAX }
    }

    /// Tokens are best 4096 bytes ahead, short prompts with 8 rows; dividing helps prompts and costs tokens.
    fn hill(tune: &Tune, kind: Kind) -> f64 {
        let speed = match (kind, tune.stream.q8) {
            (Kind::Decode, Stream::Every { distance }) => 110.0 - f64::from(distance.abs_diff(4096)) / 500.0,
            (Kind::FewRows, _) => 100.0 - f64::from(tune.product.few_rows.abs_diff(8)),
            _ => 100.0,
        };
        match (kind, tune.division) {
            (Kind::Prompt, Division::Polynomial) => speed * 1.2,
            (Kind::Decode, Division::Polynomial) => speed * 0.9,
            _ => speed,
        }
    }

    #[test]
    fn the_search_climbs_key_by_key() {
        let base = base();
        let mut machine = formula(hill);
        let found = search(&mut machine, &base).unwrap();
        assert!(found.complete);
        assert_eq!(tune(&found.level).stream.q8, Stream::Every { distance: 4096 });
        assert_eq!(tune(&found.level).product.few_rows, 8);
        // Better in sum, but worse at something.
        assert_eq!(tune(&found.level).division, tune(&base).division);
        let changes = tune(&base).changes(tune(&found.level));
        assert_eq!(changes.keys().collect::<Vec<_>>(), ["product", "stream"]);
        assert!(found.equal > 50, "keys that change no code are not timed: {}", found.equal);
        let trials: BTreeSet<&str> = found.trials.iter().map(|trial| trial.key).collect();
        assert_eq!(trials, BTreeSet::from(["division", "product.few_rows", "stream.q8"]));
        let mut artifact = found.artifact;
        let last = confirm(&mut machine, &base, &mut artifact).unwrap();
        assert_eq!(last.iter().map(|c| c.kind).collect::<Vec<_>>(), Kind::OF_CPUS);
        assert!(is_better(&last) && last[0].gain > 1.05 && (last[1].gain - 1.0).abs() < 0.02, "{last:?}");
    }

    #[test]
    fn noise_and_drift_change_nothing() {
        let found = search(&mut formula(|_, _| 100.0), &base()).unwrap();
        assert_eq!(found.level, base());
        assert!(found.trials.len() > 10 && found.trials.iter().all(|trial| !trial.taken));
    }

    #[test]
    fn what_was_found_so_far_stays_when_the_time_is_over() {
        for most_runs in [0, 5, 60, 120] {
            let mut machine = Formula { most_runs, ..formula(hill) };
            let found = search(&mut machine, &base()).unwrap();
            assert!(!found.complete);
            assert!(machine.runs <= most_runs + 1, "{} runs", machine.runs);
            let best = found.trials.iter().rfind(|trial| trial.taken);
            assert_eq!(best.is_some(), found.level != base(), "{most_runs}");
            assert_eq!(Some(found.artifact), found.level.tune);
        }
    }
}
