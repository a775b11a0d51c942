//! The number of workers that suits now.
//!
//! Steps run by all workers until these sleep at barriers for a good part of the time: then other programs
//! have taken cores, and a worker without one keeps all others waiting. So a trial runs the next steps by
//! fewer workers and by as many as before, in turns, and the number with the shortest steps stays. Trials
//! that lead back to more workers come from time to time, more rarely as long as they change nothing.
//! Measurements decide, whatever the scheduler does; on a quiet machine no worker sleeps for long, and there
//! is no trial.

use std::ops::RangeInclusive;

/// Nanoseconds.
pub type NanoTime = u64;

const MILLISECOND: NanoTime = 1_000_000;
/// Steps are looked at together for so long: some slices of time that a system gives to a program.
const WINDOW: NanoTime = 8 * MILLISECOND;
/// ... and at least this many of them.
const LEAST_STEPS: u32 = 2;
/// The number of times that a trial comes to each number.
const ROUNDS: usize = 2;
/// Time from one trial of fewer or of more workers to the next: doubles from the first to the last while they
/// change nothing.
const PAUSES_FEWER: RangeInclusive<NanoTime> = 50 * MILLISECOND..=800 * MILLISECOND;
const PAUSES_MORE: RangeInclusive<NanoTime> = 50 * MILLISECOND..=400 * MILLISECOND;
/// The least length of such a pause as a multiple of the trial's.
const TRIALS_PER_PAUSE: NanoTime = 8;
/// Workers sleep together for this part (1 / n) of the time of steps before there is a trial. Those that a
/// quiet machine lets wait hardly ever sleep.
const SLEPT_PART: NanoTime = 4;
/// The excess of step times in a trial (in halves) with which a choice is out of it before its window is
/// over.
const HOPELESS_HALVES: NanoTime = 1;
/// A trial changes the number for steps that are shorter by this part (1 / n).
const GAIN_PART: NanoTime = 20;
/// Steps of other kinds than a trial compares do not count in it, until they have been alone for so long.
const OTHERS: NanoTime = 100 * MILLISECOND;
/// Numbers that a trial compares at most.
const MOST_CHOICES: usize = 4;

/// The kind of a step, which makes steps comparable: its model, its name, and the number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepKind {
    pub model: usize,
    pub step: &'static str,
    pub tokens: usize,
}

/// A step that is over.
#[derive(Clone, Copy, Debug)]
pub struct StepTiming {
    pub kind: StepKind,
    /// The time at which it ended, on a clock that only goes forward.
    pub end: NanoTime,
    pub time: NanoTime,
    /// The time that workers slept in it, all together.
    pub slept: NanoTime,
}

/// Chooses the number of workers of each step from the times of those before. Plain data: no clock of its
/// own.
#[derive(Debug)]
pub struct WorkerCountTuner {
    max_workers: usize,
    /// The number that suits.
    best_workers: usize,
    window: StepWindow,
    trial: Option<WorkerCountTrial>,
    fewer_backoff: TrialBackoff,
    more_backoff: TrialBackoff,
}

/// Between trials of one direction.
#[derive(Debug)]
struct TrialBackoff {
    range: RangeInclusive<NanoTime>,
    length: NanoTime,
    /// There is no trial before this time.
    until: NanoTime,
}

/// Steps by one number of workers.
#[derive(Clone, Copy, Debug, Default)]
struct StepWindow {
    steps: u32,
    time: NanoTime,
    slept: NanoTime,
}

/// A comparison under way.
#[derive(Debug)]
struct WorkerCountTrial {
    /// None before the first step.
    kind: Option<StepKind>,
    /// The number that suited before, then others.
    choices: [usize; MOST_CHOICES],
    count: usize,
    /// True for a trial of fewer workers than suited before, false for more.
    fewer: bool,
    /// The choice that runs, in the round that runs.
    choice: usize,
    round: usize,
    /// Sums by choice.
    sums: [StepWindow; MOST_CHOICES],
    hopeless: [bool; MOST_CHOICES],
    time: NanoTime,
    /// Time of steps of other kinds since the last one that counted.
    other_time: NanoTime,
}

impl WorkerCountTuner {
    pub fn new(max_workers: usize) -> Self {
        let (fewer_backoff, more_backoff) = (TrialBackoff::new(PAUSES_FEWER), TrialBackoff::new(PAUSES_MORE));
        Self {
            max_workers,
            best_workers: max_workers,
            window: StepWindow::default(),
            trial: None,
            fewer_backoff,
            more_backoff,
        }
    }

    /// The number that suits, but for trials.
    pub fn best_workers(&self) -> usize {
        self.best_workers
    }

    /// Workers for the next step.
    pub fn workers(&self) -> usize {
        self.trial.as_ref().map_or(self.best_workers, WorkerCountTrial::workers)
    }

    /// Learns from a step that [`WorkerCountTuner::workers`] ran.
    pub fn record_step(&mut self, taken: StepTiming) {
        if let Some(trial) = &mut self.trial {
            if let Some(best) = trial.record_step(taken, &mut self.window) {
                self.finish_trial(best, taken.end);
            }
            return;
        }
        self.window.add_step(taken);
        if self.window.is_full() {
            let window = std::mem::take(&mut self.window);
            self.consider_trial(&window, taken.end);
        }
    }

    /// Begins a trial where the last steps give cause for one.
    fn consider_trial(&mut self, window: &StepWindow, end: NanoTime) {
        let waits = self.best_workers > 1 && window.slept > window.time / SLEPT_PART;
        if waits && end >= self.fewer_backoff.until {
            self.trial = Some(WorkerCountTrial::new(self.best_workers, self.max_workers, true));
        } else if self.best_workers < self.max_workers && end >= self.more_backoff.until {
            self.trial = Some(WorkerCountTrial::new(self.best_workers, self.max_workers, false));
        } else if !waits && end > self.fewer_backoff.until + self.fewer_backoff.length {
            self.fewer_backoff.shorten();
        }
    }

    fn finish_trial(&mut self, best: usize, end: NanoTime) {
        let Some(trial) = self.trial.take() else { return };
        if best == self.best_workers {
            let pause = if trial.fewer { &mut self.fewer_backoff } else { &mut self.more_backoff };
            pause.lengthen();
            pause.until = end + pause.length.max(TRIALS_PER_PAUSE * trial.time);
        } else {
            self.best_workers = best;
            self.fewer_backoff.shorten();
            self.more_backoff.shorten();
            (self.fewer_backoff.until, self.more_backoff.until) = (end, end + self.more_backoff.length);
        }
    }
}

impl TrialBackoff {
    fn new(range: RangeInclusive<NanoTime>) -> Self {
        Self { length: *range.start(), range, until: 0 }
    }

    fn shorten(&mut self) {
        self.length = *self.range.start();
    }

    fn lengthen(&mut self) {
        self.length = (2 * self.length).min(*self.range.end());
    }
}

impl StepWindow {
    fn add_step(&mut self, taken: StepTiming) {
        self.steps += 1;
        self.time += taken.time;
        self.slept += taken.slept;
    }

    fn is_full(&self) -> bool {
        self.time >= WINDOW && self.steps >= LEAST_STEPS
    }

    /// Mean time of a step.
    fn mean_time(&self) -> NanoTime {
        self.time / NanoTime::from(self.steps.max(1))
    }
}

impl WorkerCountTrial {
    /// Compares `now` with fewer workers if some of them wait, and with more.
    fn new(now: usize, most: usize, waits: bool) -> Self {
        let fewer = [now - 1, now / 2, 1];
        let more = [now + 1, 2 * now, most];
        let others = if waits { fewer } else { more };
        let (mut choices, mut count) = ([now; MOST_CHOICES], 1);
        for other in others {
            if (1..=most).contains(&other) && !choices[..count].contains(&other) {
                choices[count] = other;
                count += 1;
            }
        }
        Self {
            kind: None,
            choices,
            count,
            fewer: waits,
            choice: 0,
            round: 0,
            sums: Default::default(),
            hopeless: [false; MOST_CHOICES],
            time: 0,
            other_time: 0,
        }
    }

    fn workers(&self) -> usize {
        self.choices[self.choice]
    }

    /// Counts a step, also in `window`; gives the best number once all had their windows.
    fn record_step(&mut self, taken: StepTiming, window: &mut StepWindow) -> Option<usize> {
        self.other_time = if self.kind == Some(taken.kind) { 0 } else { self.other_time + taken.time };
        if self.kind.is_none() || self.other_time > OTHERS {
            (self.kind, self.choice, self.round, self.other_time) = (Some(taken.kind), 0, 0, 0);
            (self.sums, self.hopeless, *window) = Default::default();
        } else if self.other_time > 0 {
            return None;
        }
        self.time += taken.time;
        window.add_step(taken);
        let before = self.sums[0].mean_time();
        self.hopeless[self.choice] = self.choice > 0
            && window.time >= WINDOW / 2
            && window.mean_time() > before + before * HOPELESS_HALVES / 2;
        if !window.is_full() && !self.hopeless[self.choice] {
            return None;
        }
        let full = std::mem::take(window);
        let sum = &mut self.sums[self.choice];
        (sum.steps, sum.time) = (sum.steps + full.steps, sum.time + full.time);
        self.next_choice().then(|| self.best_choice())
    }

    /// Goes on to the next choice; true if there is none.
    fn next_choice(&mut self) -> bool {
        let hopeful = |&choice: &usize| !self.hopeless[choice];
        let next = (self.choice + 1..self.count).find(hopeful);
        self.round += usize::from(next.is_none());
        self.choice = next.unwrap_or(0);
        self.round == ROUNDS || !(1..self.count).any(|choice| hopeful(&choice))
    }

    fn best_choice(&self) -> usize {
        let before = self.sums[0].mean_time();
        let others = (1..self.count).filter(|&choice| !self.hopeless[choice]);
        match others.min_by_key(|&choice| self.sums[choice].mean_time()) {
            Some(choice) if self.sums[choice].mean_time() < before - before / GAIN_PART => {
                self.choices[choice]
            }
            _ => self.choices[0],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECODE: StepKind = StepKind { model: 0, step: "decode", tokens: 1 };

    /// A machine on which steps take and sleep so long, in microseconds, by the number of workers.
    struct SimulatedMachine {
        crew: WorkerCountTuner,
        clock: NanoTime,
    }

    impl SimulatedMachine {
        fn new(most: usize) -> Self {
            Self { crew: WorkerCountTuner::new(most), clock: 0 }
        }

        /// Runs steps for some milliseconds; returns how many steps each number ran.
        fn run(
            &mut self,
            milliseconds: NanoTime,
            kind: StepKind,
            step: impl Fn(usize) -> (NanoTime, NanoTime),
        ) -> Vec<u32> {
            let (end, mut ran) =
                (self.clock + milliseconds * MILLISECOND, vec![0; self.crew.max_workers + 1]);
            while self.clock < end {
                let workers = self.crew.workers();
                let (time, slept) = step(workers);
                self.clock += 1000 * time;
                ran[workers] += 1;
                self.crew.record_step(StepTiming {
                    kind,
                    end: self.clock,
                    time: 1000 * time,
                    slept: 1000 * slept,
                });
            }
            ran
        }
    }

    fn quiet(workers: usize) -> (NanoTime, NanoTime) {
        (50 + 800 / workers as NanoTime, 0)
    }

    #[test]
    fn a_quiet_machine_has_no_trial() {
        let mut machine = SimulatedMachine::new(4);
        let ran = machine.run(5000, DECODE, quiet);
        assert_eq!(ran[..4], [0; 4]);
        // Short sleeps now and then are none of other programs' doing.
        let ran = machine.run(5000, DECODE, |_| (250, 60));
        assert_eq!(ran[..4], [0; 4]);
    }

    #[test]
    fn one_of_two_workers_leaves_and_comes_back() {
        let mut machine = SimulatedMachine::new(2);
        machine.run(1000, DECODE, quiet);
        let crowded = |workers| if workers == 2 { (2000, 1500) } else { (850, 0) };
        machine.run(100, DECODE, crowded);
        assert_eq!(machine.crew.best_workers(), 1);
        // Trials become rare.
        machine.run(3000, DECODE, crowded);
        let ran = machine.run(8000, DECODE, crowded);
        assert!(ran[2] > 0, "{ran:?}");
        let part = f64::from(ran[2] * 2000) / 8e6;
        assert!(part < 0.02, "{part}");
        machine.run(1800, DECODE, quiet);
        assert_eq!(machine.crew.best_workers(), 2);
        let ran = machine.run(5000, DECODE, quiet);
        assert_eq!(ran[1], 0);
    }

    #[test]
    fn waiting_workers_stay_where_fewer_are_slower() {
        let mut machine = SimulatedMachine::new(2);
        let crowded = |workers| if workers == 2 { (1000, 700) } else { (1100, 0) };
        machine.run(4000, DECODE, crowded);
        let ran = machine.run(8000, DECODE, crowded);
        assert_eq!(machine.crew.best_workers(), 2);
        assert!(30 * ran[1] < ran[2], "{ran:?}");
    }

    #[test]
    fn a_trial_takes_what_is_clearly_better_only() {
        let mut machine = SimulatedMachine::new(2);
        machine.run(1000, DECODE, |workers| if workers == 2 { (1000, 700) } else { (970, 0) });
        assert_eq!(machine.crew.best_workers(), 2);
    }

    /// Two of eight cores are taken: six workers are best, and are found from eight and from one.
    #[test]
    fn the_best_of_many_numbers_is_found_in_steps() {
        let crowded = |workers: usize| match workers {
            7.. => (2000, 2000 * workers as NanoTime / 2),
            _ => quiet(workers),
        };
        let mut machine = SimulatedMachine::new(8);
        machine.run(6000, DECODE, crowded);
        assert_eq!(machine.crew.best_workers(), 6);
        let alone = |workers| if workers > 1 { (5000, 4000) } else { quiet(1) };
        machine.run(6000, DECODE, alone);
        assert_eq!(machine.crew.best_workers(), 1);
        machine.run(6000, DECODE, crowded);
        assert_eq!(machine.crew.best_workers(), 6);
        machine.run(6000, DECODE, quiet);
        assert_eq!(machine.crew.best_workers(), 8);
    }

    /// Long steps by the number that does better must not look worse than short ones.
    #[test]
    fn only_steps_of_one_kind_are_compared() {
        let crowded = |workers| if workers == 2 { (2000, 1500) } else { (850, 0) };
        let long = |workers| (20 * crowded(workers).0, 20 * crowded(workers).1);
        let prompt = |tokens| StepKind { model: 0, step: "prefill", tokens };
        let mut machine = SimulatedMachine::new(2);
        for tokens in 1..40 {
            machine.run(200, prompt(tokens), long);
        }
        assert_eq!(machine.crew.best_workers(), 2, "nothing could be compared");
        machine.run(200, DECODE, crowded);
        assert_eq!(machine.crew.best_workers(), 1);
        // Steps between others are compared among themselves.
        let mut machine = SimulatedMachine::new(2);
        for tokens in 1..40 {
            machine.run(5, DECODE, crowded);
            machine.run(40, prompt(tokens), long);
        }
        assert_eq!(machine.crew.best_workers(), 1);
    }
}
