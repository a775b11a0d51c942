//! The register tile of the product on a CPU: one slice of the weights against a few activation rows,
//! unrolled over both.

use super::slice::{CpuMatmul, ExpertMatrix, IntegerMatmul, PartialTile, RowVector, WeightSlice};
use crate::matmul::plan::CodeDot;
use crate::matmul::problem::{FinishedSums, MatmulEpilogue, MatmulWeight};
use crate::matmul::weight::float_panel::FloatPanel;
use crate::matmul::weight::panel::WeightPanel;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::{DType, QuantFormat};
use mlcc_kernel_lang::{BufferView, Val};
use mlcc_quant::TILE;
use mlcc_quant::tile::TileBlock;

/// A slice of the weights against `count` activation rows, with its sums in registers.
pub(in crate::matmul) struct Microtile<'k, 'a> {
    pub cpu: CpuMatmul<'k, 'a>,
    pub slice: WeightSlice<'k>,
    /// First row of the result, or the first place in the list of rows.
    pub row: Val<'k>,
    pub rows: u32,
    /// For each row, its row of x and of the result, where they are not in order.
    pub listed: Option<Vec<[Val<'k>; 2]>>,
    /// True if these rows are a whole block of interleaved codes (see `QuantizedActivations::block`).
    pub interleaved: bool,
    pub source: TileWeights<'k>,
    /// Partial sums per accumulator.
    pub chains: u32,
    /// `[chains][rows][parts]` vectors, f32.
    acc: BufferView<'k, 2>,
}

/// The source from which a register tile reads its weights.
#[derive(Clone, Copy)]
pub(in crate::matmul) enum TileWeights<'k> {
    /// Weights as they are stored.
    Memory,
    /// Unpacked codes.
    Panel(WeightPanel<'k>),
    /// Converted floats.
    Floats(FloatPanel<'k>),
}

/// The activation rows of a register tile.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct TileRows<'k> {
    pub first: Val<'k>,
    pub count: u32,
    /// True if they are a whole block of interleaved codes, provided that they are in order.
    pub interleaved: bool,
}

impl<'k, 'a> Microtile<'k, 'a> {
    /// A register tile with its accumulators set to zero.
    pub fn new(
        cpu: CpuMatmul<'k, 'a>,
        slice: WeightSlice<'k>,
        rows: TileRows<'k>,
        source: TileWeights<'k>,
    ) -> Microtile<'k, 'a> {
        let lanes = cpu.plan.lanes;
        let vectors = rows.count * slice.parts(lanes);
        let chains = (cpu.plan.in_flight / vectors).clamp(1, 4);
        // Only plain weights keep their partial sums across iterations; groups fold them into one
        // accumulator.
        let kept = if matches!(cpu.problem.weight, MatmulWeight::Packed(_)) { 1 } else { chains };
        let acc = cpu.k.registers("acc", [i64::from(kept * vectors), lanes.into()]);
        let TileRows { first: row, count, interleaved } = rows;
        let listed = cpu.expert.map(|chosen| chosen.rows(row, count));
        let interleaved = interleaved && listed.is_none();
        let tile = Microtile { cpu, slice, row, rows: count, listed, interleaved, source, chains, acc };
        let zero = tile.zeros(DType::F32);
        for chain in 0..kept {
            tile.store_acc(chain, &vec![zero; tile.accumulator_count()]);
        }
        tile
    }

    // ---- shape

    pub fn lanes(&self) -> u32 {
        self.cpu.plan.lanes
    }
    /// A vector of zeros.
    pub fn zeros(&self, dtype: DType) -> Val<'k> {
        self.cpu.k.literal(0.0, ExprType::vector(dtype, self.lanes()))
    }
    /// Vectors over all rows of the tiles.
    pub fn parts(&self) -> u32 {
        self.slice.parts(self.lanes())
    }
    pub fn part(&self, part: u32) -> RowVector<'k> {
        self.slice.part(self.lanes(), part)
    }
    /// Accumulators of a chain.
    pub fn accumulator_count(&self) -> usize {
        (self.rows * self.parts()) as usize
    }
    /// Number of an accumulator within a chain.
    pub fn accumulator_index(&self, row: u32, part: u32) -> usize {
        (row * self.parts() + part) as usize
    }
    /// Every accumulator of a chain, by row and part.
    pub fn each_accumulator(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let parts = self.parts();
        (0..self.rows).flat_map(move |row| (0..parts).map(move |part| (row, part)))
    }

    // ---- accumulators

    /// An accumulator of the first chain.
    pub fn acc(&self, row: u32, part: u32) -> Val<'k> {
        self.acc.load((self.accumulator_index(row, part) as i64, 0), self.lanes())
    }
    pub fn set_acc(&self, row: u32, part: u32, value: Val<'k>) {
        self.acc.set((self.accumulator_index(row, part) as i64, 0), value);
    }
    /// The accumulators of a chain as values.
    pub fn load_acc(&self, chain: u32) -> Vec<Val<'k>> {
        let first = i64::from(chain) * self.accumulator_count() as i64;
        let load = |i| self.acc.load((first + i, 0), self.lanes()).named("a");
        (0..self.accumulator_count() as i64).map(load).collect()
    }
    pub fn store_acc(&self, chain: u32, values: &[Val<'k>]) {
        let first = i64::from(chain) * self.accumulator_count() as i64;
        for (i, &value) in (first..).zip(values) {
            self.acc.set((i, 0), value);
        }
    }

    /// Stores the sums where those of register tile `number` wait.
    pub fn save_accumulators(&self, waiting: BufferView<'k, 1>, number: Val<'k>) {
        for (row, part) in self.each_accumulator() {
            waiting.rows(self.waiting()).set((number, self.waiting_at(row, part)), self.acc(row, part));
        }
    }
    pub fn restore_accumulators(&self, waiting: BufferView<'k, 1>, number: Val<'k>) {
        for (row, part) in self.each_accumulator() {
            let at = (number, self.waiting_at(row, part));
            self.set_acc(row, part, waiting.rows(self.waiting()).load(at, self.lanes()));
        }
    }
    /// Sums of a register tile, and the place of one vector of them.
    fn waiting(&self) -> i64 {
        self.accumulator_count() as i64 * i64::from(self.lanes())
    }
    fn waiting_at(&self, row: u32, part: u32) -> i64 {
        self.accumulator_index(row, part) as i64 * i64::from(self.lanes())
    }

    // ---- rows and weights

    /// The row of the result that row `row` of the tile is.
    fn result_row(&self, row: u32) -> Val<'k> {
        match &self.listed {
            Some(rows) => rows[row as usize][1],
            None => self.row + i64::from(row),
        }
    }

    /// The dot product of integer operands: a panel may have them in an order of its own.
    pub fn dot(&self, integers: IntegerMatmul) -> CodeDot {
        match self.source {
            TileWeights::Panel(panel) => panel.dot,
            TileWeights::Memory | TileWeights::Floats(_) => integers.dot,
        }
    }

    /// A block of weights of one part.
    pub fn block(&self, format: QuantFormat, g: Val<'k>, part: u32) -> TileBlock<'k> {
        self.cpu.packed(format).block(self.part(part).tile, g)
    }

    /// Word `word` of a block, for every part, pinned.
    pub fn words(&self, format: QuantFormat, g: Val<'k>, word: usize) -> Vec<Val<'k>> {
        let read = |part| {
            let row = self.part(part).row;
            self.block(format, g, part).word(word, row, self.lanes()).named("word")
        };
        (0..self.parts()).map(read).collect()
    }

    /// The scales of a block for one part, as they are stored.
    pub fn group_scales(&self, format: QuantFormat, g: Val<'k>, part: u32) -> Val<'k> {
        self.block(format, g, part).scales(self.part(part).row, self.lanes())
    }

    /// Prefetches `count` elements of w for a single row that reads from `at` on; the tensor has `len`
    /// elements.
    pub fn prefetch(&self, at: Val<'k>, count: usize, len: usize) {
        let (cpu, count) = (self.cpu, count as i64);
        let last = cpu.in_w(cpu.k.int(len as i64 - count));
        cpu.plan.stream.prefetch_ahead(cpu.view(cpu.problem.w), at, count, last);
    }

    /// The same for a block of packed weights.
    pub fn prefetch_block(&self, format: QuantFormat, g: Val<'k>) {
        let problem = self.cpu.problem;
        let block = self.block(format, g, 0);
        self.prefetch(block.words, block.sizes.blocks_bytes(1), problem.tiles() * problem.tile_len());
    }

    // ---- results

    /// Hands the sums to the epilogue, masked only where the last tile has fewer than 16 rows.
    pub fn finish(&self, epilogue: &mut MatmulEpilogue) {
        let k = self.cpu.k;
        let sums: Vec<_> = self
            .each_accumulator()
            .map(|(row, part)| (row, part, self.acc(row, part).named("sum")))
            .collect();
        self.by_edge(|masked| {
            k.interleaved(&sums, |&(row, part, sum)| {
                let sums = self.finished(row, part, sum, masked);
                epilogue(k, sums);
            });
        });
    }

    /// The sums of a row and part, for the epilogue.
    fn finished(&self, row: u32, part: u32, sum: Val<'k>, masked: bool) -> FinishedSums<'k> {
        let lanes = self.lanes();
        let col = self.slice.first * TILE as i64 + i64::from(part * lanes);
        let mask = masked.then(|| col.ramp(1, lanes).lt(self.cpu.problem.n as i64));
        FinishedSums { row: self.result_row(row), col, lanes, acc: sum, mask }
    }

    /// `body` once or twice: told whether columns may be missing.
    fn by_edge(&self, mut body: impl FnMut(bool)) {
        match self.slice.edge {
            PartialTile::Never => body(false),
            PartialTile::Always => body(true),
            PartialTile::Last => {
                let last = self.slice.first + (i64::from(self.slice.tiles) - 1);
                let whole = last.lt((self.cpu.problem.n / TILE) as i64);
                self.cpu.k.branch(whole, |whole| body(!whole));
            }
        }
    }
}

impl<'k> ExpertMatrix<'k> {
    /// Rows of x and of the result from place `first` on.
    fn rows(self, first: Val<'k>, count: u32) -> Vec<[Val<'k>; 2]> {
        let row = |r: u32| {
            let mut row = first + i64::from(r);
            if let Some(list) = self.list {
                row = list.at([row.min(self.last)]).cast(DType::I64);
            }
            let row = row.named("row");
            [(row / self.share).named("x_row"), row]
        };
        (0..count).map(row).collect()
    }
}
