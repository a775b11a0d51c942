//! The part of a chunk that is known without the state: a block for each chunk and head.
//!
//! With `W[s, t]` the product of the decays of the steps from `s` to before `t`, the sums
//! `A[i, t] = x_i W[i + 1, t] . y_t` over the columns are computed for every pair of steps, `x` being key or
//! direction, `y` probe or query. Then every column of the state, and every step as a further column, goes
//! through the steps: step `t` retrieves from the state and from the corrections of all steps before it.

use super::super::step::HeadRows;
use super::{
    ChunkScan, HALVES, NUMBERS, PreparedLayout, SIDE, STEPS, StateFreeExpr, StateFreeValues, TOGETHER, unit,
    units,
};
use crate::halves::split_floats;
use crate::scan::matrix::MatrixScan;
use crate::scan::matrix::arithmetic::BodyArithmetic;
use mlcc_ir::fragment::{Fragment, M16N8K16};
use mlcc_ir::kernel::{BinOp, BufId, ExprType};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::matrix::fragment_position;
use mlcc_kernel_lang::{BufferView, Recorder, ThreadTeam, Val, WARP, fold_each, fold_lanes, join_vectors};

/// Columns that a thread computes together, and sums that it reads at once.
const PIECE: i64 = 4;
/// Elements between steps in shared memory beyond their columns: rows of fragments begin in different banks.
const PAD: i64 = 8;

/// A chunk of a head.
struct PreparedChunk<'a, 'k> {
    k: &'k Recorder,
    chunks: &'a ChunkScan,
    scan: &'a MatrixScan<'a, 'k>,
    layout: PreparedLayout,
    head: Val<'k>,
    /// The first step, and the number of all.
    first: Val<'k>,
    length: Val<'k>,
    /// `[steps, columns]` of a vector each: `decay`; by kind keys or directions.
    decay: BufferView<'k, 2>,
    by_keys: BufferView<'k, 3>,
    /// For each kind, probes or queries, first as they are, then as the rows of `P` and `Q`. After the
    /// columns come their sums with the keys of all steps, which go the same way, then those with the
    /// directions.
    by_steps: BufferView<'k, 3>,
}

impl ChunkScan {
    /// Records the kernel that prepares all chunks; `scan` has no outputs.
    pub fn prepare<'k>(&self, scan: &MatrixScan<'_, 'k>, to: BufId) {
        let (k, layout) = (scan.k, self.layout());
        let (columns, kinds) = (self.shape.columns, layout.kinds());
        k.blocks("chunk", 0, &scan.length.ceil_div(STEPS), |chunk| {
            k.blocks("head", 1, self.shape.heads, |head| {
                let block = PreparedChunk {
                    k,
                    chunks: self,
                    scan,
                    layout,
                    head,
                    first: (chunk * STEPS).named("first"),
                    length: k.dim(&scan.length).named("length"),
                    decay: k.shared("decay", [STEPS, columns + PAD]),
                    by_keys: k.shared("by_keys", [kinds, STEPS, columns + PAD]),
                    by_steps: k.shared("by_steps", [kinds, STEPS, columns + kinds * STEPS + PAD]),
                };
                let to = units(scan, layout, to).row((chunk * self.shape.heads + head).named("at"));
                block.run(to);
            });
        });
    }
}

impl<'k> PreparedChunk<'_, 'k> {
    fn run(&self, to: BufferView<'k, 2>) {
        let (k, columns) = (self.k, self.chunks.shape.columns);
        // Lanes that share a pair of steps.
        let lanes = columns / PIECE;
        let team = ThreadTeam::new(k, STEPS * lanes);
        team.run(|t| self.fill((t / lanes).named("step"), (t % lanes).named("lane")));
        k.barrier();
        team.run(|t| self.sum_pairs(t, lanes));
        k.barrier();
        let others = (columns + STEPS + WARP - 1) / WARP * WARP;
        team.run(|t| {
            k.when(t.lt(columns + STEPS), || self.solve_forward(t));
            k.when(k.int(others - 1).lt(t) & t.lt(others + columns), || self.decay_backward(t - others, to));
        });
        k.barrier();
        self.store(team, to);
    }

    /// The kind of keys and queries; that of directions and probes is before it, if there is one.
    fn last(&self) -> i64 {
        self.layout.kinds() - 1
    }

    fn at(&self, step: Val<'k>, row: Val<'k>, (column, lanes): (Val<'k>, u32)) -> StateFreeValues<'_, 'k> {
        let at = HeadRows { head: self.head, row, rows: 1 };
        // Steps beyond the last one repeat it.
        let time = (self.first + step).min(self.length + -1).named("time");
        StateFreeValues {
            scan: self.scan,
            arithmetic: BodyArithmetic::new(self.k, self.scan.body),
            at,
            column,
            lanes,
            time,
        }
    }

    /// The vectors of a step, and what it reads of itself. A step beyond the last one changes nothing.
    fn fill(&self, step: Val<'k>, lane: Val<'k>) {
        let (k, linear) = (self.k, &self.chunks.linear);
        let column = (lane * PIECE).named("column");
        let at = self.at(step, k.int(0), (column, PIECE as u32));
        let live = (self.first + step).lt(self.length).select(k.float(1.0), k.float(0.0)).named("live");
        let wide = |value: Val<'k>| value.splat(PIECE as u32);
        let decay = at.get(&linear.decay).fma(wide(live), wide(1.0 - live));
        self.decay.set([step, column], decay);
        let last = self.last();
        self.by_keys.set((last, step, column), at.get(&linear.key) * wide(live));
        self.by_steps.set((last, step, column), at.get(&linear.query));
        let lanes = self.chunks.shape.columns / PIECE;
        let dot = |known: &Option<StateFreeExpr>| match known {
            Some(known) => fold_lanes(at.get(known).sum_lanes(), BinOp::Add, lanes),
            None => k.float(0.0),
        };
        let own = (dot(&linear.own_readout) * live).named("own");
        let first = lane.equals(0);
        k.when(first, || self.set_sum((last, last), [step, step], own));
        let Some(correction) = &linear.correction else { return };
        self.by_keys.set((0, step, column), at.get(&correction.direction) * wide(live));
        self.by_steps.set((0, step, column), at.get(&correction.probe));
        let read = (dot(&correction.readout) * live).named("read");
        k.when(first, || {
            self.set_sum((0, last), [step, step], read);
            [0, last].into_iter().for_each(|of| self.set_sum((of, 0), [step, step], k.float(0.0)));
        });
    }

    /// The sums of all pairs of an earlier step, which some lanes have, and every later one.
    fn sum_pairs(&self, t: Val<'k>, lanes: i64) {
        let (k, kinds, wide) = (self.k, self.layout.kinds(), PIECE as u32);
        let (earlier, lane) = ((t / lanes).named("earlier"), (t % lanes).named("lane"));
        let column = (lane * PIECE).named("column");
        for before in (0..STEPS).step_by(lanes as usize).map(|first| lane + first) {
            let zero = |pair| self.set_sum(pair, [earlier, before], k.float(0.0));
            k.when(before.lt(earlier), || self.all_kinds().for_each(zero));
        }
        let vectors = k.registers("vector", [kinds, PIECE]);
        for kind in 0..kinds {
            vectors.set((kind, 0), self.by_keys.load((kind, earlier, column), wide));
        }
        // Lanes that have a sum in the end, and whose.
        let of_sum = lanes / (kinds * kinds);
        let (pair, has) = (lane / of_sum, (lane % of_sum).equals(0));
        let (kind, sums) =
            ((pair % kinds).named("kind"), self.sum_column(pair / kinds, earlier).named("sums"));
        // All lanes of a warp go through the same steps: their first one has the earliest.
        let from = (t / WARP * WARP / lanes + 1).named("from");
        k.serial("i", k.int(STEPS) - from, |i| {
            let later = (from + i).named("later");
            let counts = earlier.lt(later).named("counts");
            let of = |kind| self.by_steps.load((kind, later, column), wide).named("of");
            let of: Vec<Val> = (0..kinds).map(of).collect();
            let product = |(earlier, kind): (i64, i64)| {
                (vectors.load((earlier, 0), wide) * of[kind as usize]).sum_lanes()
            };
            let sum = fold_each(self.all_kinds().map(product).collect(), BinOp::Add, lane, lanes);
            k.when(has & counts, || self.by_steps.set([kind, later, sums], sum));
            let decay = self.decay.load([later, column], wide).named("decay");
            k.when(counts, || {
                for kind in 0..kinds {
                    vectors.set((kind, 0), vectors.load((kind, 0), wide) * decay);
                }
            });
        });
    }

    /// Pairs of an earlier step's key or direction, and a later one's probe or query.
    fn all_kinds(&self) -> impl Iterator<Item = (i64, i64)> + use<> {
        let kinds = self.layout.kinds();
        (0..kinds).flat_map(move |earlier| (0..kinds).map(move |kind| (earlier, kind)))
    }

    fn set_sum(&self, (of_earlier, kind): (i64, i64), [earlier, later]: [Val<'k>; 2], sum: Val<'k>) {
        self.by_steps.set([self.k.int(kind), later, self.sum_column(self.k.int(of_earlier), earlier)], sum);
    }

    /// The column of the sums with a step's key or direction.
    fn sum_column(&self, kind: Val<'k>, earlier: Val<'k>) -> Val<'k> {
        earlier + self.chunks.shape.columns + (self.k.int(self.last()) - kind) * STEPS
    }

    /// Computes the factor of a column of the state, or of the value of a step, in the retrieved value and
    /// the readout of each step.
    fn solve_forward(&self, column: Val<'k>) {
        let (k, last, columns) = (self.k, self.last(), self.chunks.shape.columns);
        let (of_state, in_state) = (column.lt(columns).named("of_state"), column.min(columns - 1));
        let mut decayed = k.float(1.0);
        let mut found: Vec<Val> = Vec::new();
        for step in 0..STEPS {
            let own = |kind: i64| self.by_steps.at((kind, step, column)) * decayed;
            if self.layout.corrects {
                let finds = self.add_retrieved(own(0), (0, step), &found);
                self.by_steps.set((0, step, column), finds);
                found.push(finds);
            }
            self.by_steps.set((last, step, column), self.add_retrieved(own(last), (last, step), &found));
            let decay = of_state.select(self.decay.at([k.int(step), in_state]), k.float(1.0));
            decayed = (decayed * decay).named("decayed");
        }
    }

    /// Adds what steps find, by the sums of their directions with the probe or query of a step.
    fn add_retrieved(&self, own: Val<'k>, (kind, step): (i64, i64), found: &[Val<'k>]) -> Val<'k> {
        let first = self.chunks.shape.columns + STEPS;
        let mut sum = own.named("sum");
        for (some, piece) in found.chunks(PIECE as usize).zip(0..) {
            let sums = self.by_steps.load((kind, step, first + piece * PIECE), PIECE as u32).named("sums");
            for (&found, i) in some.iter().zip(0..) {
                sum = found.fma(sums.shuffle([i]), sum).named("sum");
            }
        }
        sum
    }

    /// Computes what remains at the end of each step's addition to a column, and of the state.
    fn decay_backward(&self, column: Val<'k>, to: BufferView<'k, 2>) {
        let mut decayed = self.k.float(1.0);
        for step in (0..STEPS).rev() {
            for kind in 0..self.layout.kinds() {
                let left = self.by_keys.at((kind, step, column)) * decayed;
                self.by_keys.set((kind, step, column), left);
            }
            decayed = (decayed * self.decay.at((step, column))).named("decayed");
        }
        let in_unit = TOGETHER / 2;
        let at = (self.layout.decay_unit() + column / in_unit, column % in_unit * 2);
        to.set(at, decayed.bits_as(ExprType::vector(DType::BF16, 2)));
    }

    /// Everything in fragments.
    fn store(&self, team: ThreadTeam<'k>, to: BufferView<'k, 2>) {
        let (layout, kinds) = (self.layout, self.layout.kinds());
        // Fragment, half, lane.
        let parts = |i: Val<'k>| {
            let (fragment, half, lane) =
                (i / PreparedLayout::FRAGMENT, i / WARP % 2, (i % WARP).named("lane"));
            let [row, column] = fragment_position(&M16N8K16.b, lane, 0);
            ((fragment / kinds).named("fragment"), (fragment % kinds).named("kind"), row, half * 8 + column)
        };
        team.each((layout.fragments() + 1) * kinds * PreparedLayout::FRAGMENT, |i| {
            let (fragment, kind, row, step) = parts(i);
            let pair = |further: u32| {
                let row = fragment * SIDE + row + i64::from(further);
                self.by_steps.load((kind, step, row), 2).named("pair")
            };
            let [first, second] = apart(&M16N8K16.b).map(pair);
            to.set((i, 0), unit(first.shuffle_with(second, 0..NUMBERS as u32)));
        });
        let first = layout.key_fragment(0, self.k.int(0));
        team.each(layout.fragments() * kinds * PreparedLayout::FRAGMENT, |i| {
            let (fragment, kind, step, column) = parts(i);
            let number = |further: u32| {
                self.by_keys.at((kind, step + i64::from(further), fragment * SIDE + column)).named("number")
            };
            let [first_step, further] = apart(&M16N8K16.b);
            let numbers = [first_step, first_step + 1, further, further + 1].map(number);
            to.set((first + i, 0), unit(join_vectors(&numbers)));
        });
        team.each(self.chunks.shape.rows / SIDE * WARP, |i| {
            let (rows, lane) = ((i / WARP).named("rows"), (i % WARP).named("lane"));
            let number = |element: u32| {
                let [row, step] = fragment_position(&M16N8K16.a, lane, element);
                let at = self.at(step, rows * SIDE + row, (self.k.int(0), 1));
                at.get(&self.chunks.linear.value).named("number")
            };
            let all: Vec<Val> = (0..M16N8K16.a.elements_per_lane()).map(number).collect();
            for (half, part) in
                split_floats(join_vectors(&all), HALVES.dtype, HALVES.parts).into_iter().flatten().zip(0..)
            {
                to.set(
                    (rows * PreparedLayout::VALUES + (layout.shared_units() + part * WARP) + lane, 0),
                    half,
                );
            }
        });
    }
}

/// Rows from the first that a lane has to the first of each of its two pairs of a second factor.
fn apart(of: &Fragment) -> [u32; 2] {
    [0, of.coordinates(0, 2).0]
}
