//! Sequences of a scan that is linear in its state, sixteen steps at a time, on tensor cores. Every product
//! of decays of the steps of a chunk is known without the state, and so is the correction by each step of the
//! steps before it (the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule over
//! Sequence Length", 2024). A first kernel computes that for all chunks at once ([`prepare`]); a second one
//! goes from chunk to chunk with the state in fragments of sums ([`walk`]):
//!
//! ```text
//! U = [S V] P      Y = [S V] Q      S' = S diag(D) + U B^T + V K^T
//! ```
//!
//! `S [values, keys]` is the state before the chunk, `V [values, steps]` the values of its steps,
//! `U [values, steps]` the corrections by each step of what it retrieves there. Without corrections there is
//! no `U`. All decays that are multiplied are from an earlier to a later step, so that nothing is divided by
//! one, however small it is. In products numbers are two bf16 each, which keep 17 bits; sums and states are
//! f32.

mod prepare;
mod walk;

use super::linear::{LinearRecurrence, StateFreeExpr};
use super::step::HeadRows;
use super::{MatrixScan, StateShape, arithmetic::BodyArithmetic};
use crate::halves::{HalfSplit, SplitFragment, split_floats};
use crate::params::KernelTarget;
use mlcc_ir::dim::Dim;
use mlcc_ir::fragment::M16N8K16;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::kernel::BufId;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Val, WARP};
use std::fmt;

/// Steps of a chunk, rows of a fragment, and columns of the state that a warp has.
const STEPS: i64 = 16;
const SIDE: i64 = 16;
/// Columns of a fragment of sums.
const COLUMNS: i64 = 8;
/// Numbers that a lane has of the second factor of a product, and elements that it reads at once of what is
/// prepared.
const NUMBERS: i64 = 4;
const TOGETHER: i64 = 8;
/// Columns that the lanes of a warp or less can share.
const LONGEST: i64 = 128;

/// f32 in a product.
const HALVES: HalfSplit = HalfSplit { dtype: DType::BF16, parts: 2, others: 2 };

/// A scan in chunks.
pub struct ChunkScan {
    linear: LinearRecurrence,
    pub shape: StateShape,
}

/// The layout of the prepared data of a chunk and a head, in units of eight elements.
#[derive(Clone, Copy)]
struct PreparedLayout {
    shape: StateShape,
    /// `P` and `B` are there, too.
    corrects: bool,
}

impl PreparedLayout {
    /// The number of fragments of 16 columns of the state.
    fn fragments(self) -> i64 {
        self.shape.columns / SIDE
    }

    /// Matrices whose columns are steps: `P` if there is one, `Q`; as many have columns that are keys: `B`,
    /// `K`.
    fn kinds(self) -> i64 {
        if self.corrects { 2 } else { 1 }
    }

    /// Units of a fragment of 16 x 16 as second factor: two of 16 x 8.
    const FRAGMENT: i64 = 2 * WARP;

    /// The first of fragment `kind` of `P` or `Q` from row `16 row` on; the last rows are those of `V`.
    fn step_fragment(self, kind: i64, row: Val<'_>) -> Val<'_> {
        (row * self.kinds() + kind) * PreparedLayout::FRAGMENT
    }

    /// The first of fragment `kind` of `B` or `K` from column `16 column` on.
    fn key_fragment(self, kind: i64, column: Val<'_>) -> Val<'_> {
        (column * self.kinds() + kind) * PreparedLayout::FRAGMENT
            + (self.fragments() + 1) * self.kinds() * PreparedLayout::FRAGMENT
    }

    /// The first of `D`.
    fn decay_unit(self) -> i64 {
        (2 * self.fragments() + 1) * self.kinds() * PreparedLayout::FRAGMENT
    }

    /// The units that all rows need.
    fn shared_units(self) -> i64 {
        self.decay_unit() + self.shape.columns * 2 / TOGETHER
    }

    /// Units of the values of 16 rows: a first factor in two parts.
    const VALUES: i64 = 2 * WARP;

    /// Units of a chunk of a head.
    fn units(self) -> i64 {
        self.shared_units() + self.shape.rows / SIDE * PreparedLayout::VALUES
    }

    /// `[chunks * heads, units, 8]` as elements, by which a sequence of `n` steps has at least as many as its
    /// chunks take.
    fn elements(self, length: &Dim) -> Dim {
        let of_step = (self.units() * TOGETHER * self.shape.heads + STEPS - 1) / STEPS;
        length.add(&Dim::from(STEPS - 1)).scale(of_step)
    }
}

impl ChunkScan {
    /// The chunks of a scan whose state is of that shape; `None` where it is not linear, the machine has no
    /// tensor cores, or the state is not made of whole fragments. A single step has no use for them.
    pub fn analyze(
        body: &Function,
        (carries, length): (usize, &Dim),
        shape: StateShape,
        target: &KernelTarget,
    ) -> Option<ChunkScan> {
        let fits = shape.rows % SIDE == 0
            && shape.columns.count_ones() == 1
            && (SIDE..=LONGEST).contains(&shape.columns)
            && carries == 1
            && length.as_const() != Some(1)
            && !target.batch_invariant
            && target.multiplies_bf16();
        let linear = if fits { LinearRecurrence::analyze(body)? } else { return None };
        Some(ChunkScan { linear, shape })
    }

    fn layout(&self) -> PreparedLayout {
        PreparedLayout { shape: self.shape, corrects: self.linear.correction.is_some() }
    }

    /// Elements of what is prepared, bf16.
    pub fn elements(&self, length: &Dim) -> Dim {
        self.layout().elements(length)
    }
}

impl fmt::Display for ChunkScan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StateShape { rows, columns, .. } = self.shape;
        write!(f, "{STEPS} steps of states of {rows} rows and {columns} columns as products, {HALVES}")
    }
}

/// The prepared data, as `[chunks * heads, units, 8]`.
fn units<'k>(scan: &MatrixScan<'_, 'k>, layout: PreparedLayout, buf: BufId) -> BufferView<'k, 3> {
    scan.k.view(buf, [1, layout.units(), TOGETHER])
}

/// Values of the body that do not depend on the state, at a step.
struct StateFreeValues<'a, 'k> {
    scan: &'a MatrixScan<'a, 'k>,
    arithmetic: BodyArithmetic<'a, 'k>,
    /// Head and row.
    at: HeadRows<'k>,
    /// The first of some columns.
    column: Val<'k>,
    lanes: u32,
    time: Val<'k>,
}

impl<'k> StateFreeValues<'_, 'k> {
    fn get(&self, known: &StateFreeExpr) -> Val<'k> {
        let value = match known {
            StateFreeExpr::One => self.scan.k.float(1.0),
            StateFreeExpr::Value(v) => self.value(*v),
            StateFreeExpr::Product(a, b) => {
                self.get(a).to_lanes(self.lanes) * self.get(b).to_lanes(self.lanes)
            }
            StateFreeExpr::Negative(known) => -self.get(known),
        };
        value.to_lanes(self.lanes)
    }

    fn value(&self, v: ValueId) -> Val<'k> {
        let body = self.scan.body;
        if let Some(i) = body.inputs.iter().position(|&input| input == v) {
            let (from, first) = self.scan.input(i, self.at, 0, self.time);
            return match self.scan.input_extent(i).columns {
                true => from.load([first + self.column], self.lanes).named("x"),
                false => from.at([first]).named("x").to_lanes(self.lanes),
            };
        }
        let node = body.defining_node(v).expect("a value is an input or computed");
        self.arithmetic.elementwise(node, self.lanes, &|v| self.value(v)).named("y")
    }
}

/// One of two fragments of 16 x 8 of a second factor that was prepared, from unit `first` on.
fn second_factor<'k>(
    prepared: BufferView<'k, 2>,
    first: Val<'k>,
    half: i64,
    lane: Val<'k>,
) -> SplitFragment<'k> {
    let unit = prepared.load((first + half * WARP + lane, 0), TOGETHER as u32).named("factor");
    let of = M16N8K16.b.elements_per_lane();
    SplitFragment { parts: [Some(unit.shuffle(0..of)), Some(unit.shuffle(of..2 * of)), None] }
}

/// Four numbers of a second factor as a unit.
fn unit<'k>(numbers: Val<'k>) -> Val<'k> {
    match split_floats(numbers, HALVES.dtype, HALVES.parts) {
        [Some(high), Some(low), _] => high.shuffle_with(low, 0..2 * NUMBERS as u32),
        _ => unreachable!("numbers have two parts"),
    }
}
