//! Sequences of a scan on a GPU. Every step waits for the one before, so none may wait for memory as well:
//! what a block reads of some steps comes through shared memory, by asynchronous copies where the machine has
//! them, while it computes the steps before those.

use mlcc_ir::dim::Dim;
use mlcc_kernel_lang::{BufferView, Recorder, ThreadTeam, Val};

/// Steps that are copied together, and how many such parts shared memory holds: one is read, the other is on
/// its way.
const STEPS: i64 = 8;
const STAGES: i64 = 2;
/// Elements of f32 that are copied at once, where all places are multiples of that.
const TOGETHER: i64 = 4;

/// The part of each step of a sequence that a block reads.
pub(super) struct SequenceRead<'k> {
    /// `[steps, of_step]`.
    pub from: BufferView<'k, 1>,
    pub of_step: i64,
    /// The elements of a step that are read. Elements beyond a step's last are others of the step.
    pub first: Val<'k>,
    pub elements: i64,
    /// A divisor of `first`.
    pub multiple: i64,
}

impl SequenceRead<'_> {
    /// Elements of a copy.
    fn together(&self) -> i64 {
        let whole = [self.elements, self.of_step, self.multiple].iter().all(|n| n % TOGETHER == 0);
        if whole { TOGETHER } else { 1 }
    }
}

/// The place of a step in shared memory.
#[derive(Clone, Copy)]
pub(super) struct RingSlot<'k> {
    stage: Val<'k>,
    step: Val<'k>,
}

/// Steps that a thread computes in one go.
#[derive(Clone, Copy)]
pub(super) struct RingSteps<'k> {
    k: &'k Recorder,
    /// The first.
    time: Val<'k>,
    place: RingSlot<'k>,
    count: i64,
}

impl<'k> RingSteps<'k> {
    /// Most steps.
    pub const MOST: i64 = STEPS;

    /// `body(i, time, place)` for each of them, repeated in the code.
    pub fn each(self, body: impl FnOnce(Val<'k>, Val<'k>, RingSlot<'k>)) {
        let RingSteps { k, time, place: RingSlot { stage, step }, count } = self;
        match count {
            1 => body(k.int(0), time, self.place),
            _ => k.unrolled("i", count, |i| body(i, time + i, RingSlot { stage, step: step + i })),
        }
    }
}

/// Steps of all sequences in shared memory, and the threads that copy and read them.
pub(super) struct SequenceRing<'k> {
    k: &'k Recorder,
    team: ThreadTeam<'k>,
    asynchronous: bool,
    /// Sequences and their places in shared memory: `[stages, steps, elements]`.
    sequences: Vec<(SequenceRead<'k>, BufferView<'k, 3>)>,
}

impl<'k> SequenceRing<'k> {
    pub fn new(
        k: &'k Recorder,
        team: ThreadTeam<'k>,
        asynchronous: bool,
        sequences: Vec<SequenceRead<'k>>,
    ) -> SequenceRing<'k> {
        let place = |s: SequenceRead<'k>| {
            let to = k.shared("steps", [STAGES, STEPS, s.elements]);
            (s, to)
        };
        SequenceRing { k, team, asynchronous, sequences: sequences.into_iter().map(place).collect() }
    }

    /// Runs `body(thread, steps)` in all threads of the block: some steps in one go, the last ones singly.
    pub fn run(&self, length: &Dim, body: impl Fn(Val<'k>, RingSteps<'k>)) {
        let k = self.k;
        let length = k.dim(length).named("length");
        let parts = ((length + (STEPS - 1)) / STEPS).named("parts");
        self.fill(k.int(0), length);
        k.serial("part", parts, |part| {
            if self.asynchronous {
                k.wait_copies(0);
            }
            // All copies have landed, and the stage that is filled next is no longer read.
            k.barrier();
            let next = part + 1;
            k.when(next.lt(parts), || self.fill(next, length));
            let first = part * STEPS;
            self.team.run(|t| {
                let (left, stage) = (length - first, (part % STAGES).named("stage"));
                let some = |step: Val<'k>, count| {
                    body(t, RingSteps { k, time: first + step, place: RingSlot { stage, step }, count })
                };
                let one_by_one = || k.serial("step", left, |step| some(step, 1));
                k.when_else(left.lt(STEPS), one_by_one, || some(k.int(0), STEPS));
            });
        });
    }

    /// Begins to copy a part; steps beyond the last one repeat it.
    fn fill(&self, part: Val<'k>, length: Val<'k>) {
        let (k, last) = (self.k, length + -1);
        for (s, to) in &self.sequences {
            let together = s.together();
            let of_step = s.elements / together;
            self.team.each(STEPS * of_step, |i| {
                let (step, element) = (i / of_step, i % of_step * together);
                let from = (s.first + element).min(s.of_step - together);
                let from = (part * STEPS + step).min(last) * s.of_step + from;
                let to_at = (part % STAGES, step, element);
                match self.asynchronous {
                    true => to.start_copy(to_at, 4 * together as u32, s.from, [from]),
                    false => to.set(to_at, s.from.load([from], together as u32)),
                }
            });
        }
        if self.asynchronous {
            k.commit_copies();
        }
    }

    /// The elements of sequence `i` at a step, from that on which the block reads first.
    pub fn at(&self, i: usize, place: RingSlot<'k>) -> BufferView<'k, 1> {
        self.sequences[i].1.starting_at((place.stage, place.step, 0))
    }
}
