//! Panels of integer weights.

use crate::matmul::dot::{QUADS, WeightQuad};
use crate::matmul::plan::CodeDot;
use mlcc_ir::kernel::MemorySpace;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};
use mlcc_quant::TILE;

/// Dot operands and f32 scales of a piece of a slice, in the order in which register tiles read them, on the
/// worker's stack.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct WeightPanel<'k> {
    pub dot: CodeDot,
    /// First group of the piece.
    first: Val<'k>,
    /// `[groups][quads][parts]` vectors.
    codes: BufferView<'k, 3>,
    /// The codes without their signs, where the product needs those too.
    absolutes: Option<BufferView<'k, 3>>,
    /// `[groups][parts]` vectors, or pairs of them; if `offsets`, then as many of the offsets that groups
    /// subtract.
    scales: BufferView<'k, 3>,
    /// True if groups subtract different offsets.
    offsets: bool,
    lanes: u32,
    parts: i64,
}

impl<'k> WeightPanel<'k> {
    /// A panel for at most `groups` groups of `tiles` tiles, of which the slice at hand has `parts` vectors;
    /// with `offsets` if groups have them.
    pub fn new(
        k: &'k Recorder,
        (dot, offsets): (CodeDot, bool),
        (groups, tiles): (usize, u32),
        (parts, lanes): (u32, u32),
    ) -> WeightPanel<'k> {
        let rows = (groups * tiles as usize * TILE) as i64;
        let (parts, width) = (i64::from(parts), i64::from(lanes));
        let of_codes = |name, dtype| {
            let buf = k.alloc(name, dtype, [rows * 4 * QUADS as i64], MemorySpace::Stack).buf();
            k.view(buf, [1, QUADS as i64 * parts, 4 * width])
        };
        let codes = of_codes("panel", dot.codes_type());
        let absolutes = matches!(dot, CodeDot::SignedPairs { .. }).then(|| of_codes("magnitudes", DType::U8));
        let sums = dot.accumulators_per_vector() as i64;
        let numbers = if offsets { 2 } else { 1 };
        let scales = k.alloc("panel_scales", DType::F32, [numbers * rows * sums], MemorySpace::Stack).buf();
        let scales = k.view(scales, [1, numbers * parts, sums * width]);
        WeightPanel { dot, first: k.int(0), codes, absolutes, scales, offsets, lanes, parts }
    }

    /// The same panel for a piece from group `first` on.
    pub fn depth_block(self, first: Val<'k>) -> WeightPanel<'k> {
        WeightPanel { first, ..self }
    }

    /// Group `u` of the piece, counted from the start of the row.
    pub fn group(&self, u: Val<'k>) -> Val<'k> {
        self.first + u
    }

    /// Number of the vector of a quad and part in a group.
    fn vector(&self, quad: usize, part: u32) -> i64 {
        quad as i64 * self.parts + i64::from(part)
    }

    /// The operand of one quad and part of group `g`, pinned.
    pub fn operand(&self, g: Val<'k>, quad: usize, part: u32) -> WeightQuad<'k> {
        let at = (g - self.first, self.vector(quad, part), 0);
        let load = |view: BufferView<'k, 3>| view.load(at, 4 * self.lanes).named("q");
        let codes = load(self.codes);
        WeightQuad { codes, absolutes: self.absolutes.map_or(codes, load) }
    }

    /// The weight scales of a part, f32, of each of its vectors of sums.
    pub fn scales(&self, g: Val<'k>, part: u32) -> Vec<Val<'k>> {
        self.numbers(g, i64::from(part))
    }

    /// The offsets of a part, f32, for each of its vectors of sums.
    pub fn offsets(&self, g: Val<'k>, part: u32) -> Option<Vec<Val<'k>>> {
        self.offsets.then(|| self.numbers(g, self.parts + i64::from(part)))
    }

    fn numbers(&self, g: Val<'k>, part: i64) -> Vec<Val<'k>> {
        let load = |i: usize| {
            let at = (g - self.first, part, i as i64 * i64::from(self.lanes));
            self.scales.load(at, self.lanes)
        };
        (0..self.dot.accumulators_per_vector()).map(load).collect()
    }

    /// Stores the operand of a quad and part of group `u` of the piece.
    pub fn set_operand(&self, u: Val<'k>, quad: usize, part: u32, operand: WeightQuad<'k>) {
        let at = (u, self.vector(quad, part), 0);
        self.codes.set(at, operand.codes);
        if let Some(magnitudes) = self.absolutes {
            magnitudes.set(at, operand.absolutes);
        }
    }

    /// Stores the scales of one vector of sums, of those of a part of group `u` of the piece.
    pub fn set_scales(&self, u: Val<'k>, part: u32, vector: usize, scales: Val<'k>) {
        self.scales.set((u, i64::from(part), vector as i64 * i64::from(self.lanes)), scales);
    }

    /// Stores the offsets of one vector of sums, of those of a part of group `u` of the piece.
    pub fn set_offsets(&self, u: Val<'k>, part: u32, vector: usize, offsets: Val<'k>) {
        let at = (u, self.parts + i64::from(part), vector as i64 * i64::from(self.lanes));
        self.scales.set(at, offsets);
    }
}
