//! Attention on a GPU.

use super::SLICES;
use crate::attention::problem::{AttentionProblem, CacheRows};
use crate::halves::HalfSplit;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;
use mlcc_kernel_lang::math::exp2_below_zero;
use mlcc_target::AttentionTile;

/// Rows of queries that a block takes at most without tensor cores.
const ROWS: i64 = 16;
/// Static shared memory of a block, on every GPU.
const SHARED_BYTES: i64 = 48 << 10;
/// Items of work that one query should give.
const ITEMS: i64 = 256;
/// Rows of a fragment of sums, and keys or columns of two side by side.
pub(in super::super) const SIDE: i64 = 16;
/// Longest rows whose sums fit the registers of a warp.
const LONGEST: i64 = 256;

/// Elements between rows beyond those of a row: 8 rows of 16 bytes, which `ldmatrix` reads at once, begin in
/// different banks.
pub(in super::super) const PAD: i64 = 8;

/// Attention on a GPU, see [`crate::attention::gpu`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuAttentionPlan {
    /// Positions and heads of a group that a block takes.
    pub positions: i64,
    pub heads: i64,
    /// Keys of a tile.
    pub keys: i64,
    /// Most slices of the cache; more than one only with one query.
    pub slices: i64,
    /// Every block has one position and a slice of the cache.
    pub single: bool,
    /// The layout of warps that share a tile on tensor cores.
    pub matrix: Option<WarpLayout>,
}

/// Warps of a block, and what the operands are in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WarpLayout {
    /// Along the rows, of which each has 16.
    pub rows: i64,
    /// Along the keys of a tile; their sums are joined in the end.
    pub keys: i64,
    pub key: HalfSplit,
    pub value: HalfSplit,
    /// Both are codes with a scale for each row.
    pub codes: bool,
}

/// Codes of 8 bits are a bf16 each; the scale of a row is multiplied with f32.
const CODES: HalfSplit = HalfSplit { dtype: DType::BF16, parts: 1, others: 3 };

/// The halves of keys or values: stored 16-bit numbers are one, f32 and computed numbers are three.
fn halves_of(rows: Option<CacheRows>) -> HalfSplit {
    match rows {
        Some(rows) => HalfSplit { dtype: rows.dtype, parts: 1, others: 2 },
        None => HalfSplit { dtype: DType::BF16, parts: 3, others: 3 },
    }
}

impl GpuAttentionPlan {
    pub(super) fn choose(a: &AttentionProblem, tile: Option<AttentionTile>) -> GpuAttentionPlan {
        let single = a.n.as_const() == Some(1);
        match tile.and_then(|tile| GpuAttentionPlan::on_tensor_cores(a, tile, single)) {
            Some(plan) => plan,
            None => GpuAttentionPlan::scalar(a, single),
        }
    }

    fn scalar(a: &AttentionProblem, single: bool) -> GpuAttentionPlan {
        let longest = a.size.max(a.value_size);
        let (mut rows, mut keys) = (ROWS, if longest > 128 { 16 } else { 32 });
        while shared_floats(a, rows, keys).iter().sum::<i64>() * 4 > SHARED_BYTES && (rows, keys) != (1, 1) {
            if keys >= rows { keys /= 2 } else { rows /= 2 }
        }
        GpuAttentionPlan::of(a, single, (rows, keys), None)
    }

    /// Rows are whole fragments; a block has as many warps and keys as the shared memory has room for, more
    /// than 32 keys last.
    fn on_tensor_cores(a: &AttentionProblem, tile: AttentionTile, single: bool) -> Option<GpuAttentionPlan> {
        let fits = |size: i64| size % SIDE == 0 && size <= LONGEST;
        if !fits(a.size) || !fits(a.value_size) {
            return None;
        }
        let codes = a.has_codes();
        let [key, value] = if codes { [CODES; 2] } else { a.halves().map(halves_of) };
        let (mut warps, mut keys) = (i64::from(tile.warps), i64::from(tile.keys));
        loop {
            let along_keys = if single { warps.min(keys / SIDE) } else { 1 };
            let plan =
                WarpLayout { rows: if single { 1 } else { warps }, keys: along_keys, key, value, codes };
            if plan.shared_bytes(a, keys) <= i64::from(tile.shared_bytes) {
                let rows = SIDE * plan.rows;
                return Some(GpuAttentionPlan::of(a, single, (rows, keys), Some(plan)));
            }
            match (keys, warps) {
                (33.., _) => keys /= 2,
                (_, 3..) if !single => warps = 2,
                (17.., _) => keys /= 2,
                _ => return None,
            }
        }
    }

    fn of(
        a: &AttentionProblem,
        single: bool,
        (rows, keys): (i64, i64),
        matrix: Option<WarpLayout>,
    ) -> GpuAttentionPlan {
        let heads = (1..=a.group.min(rows)).rev().find(|h| a.group % h == 0).unwrap_or(1);
        GpuAttentionPlan {
            positions: if single { 1 } else { rows / heads },
            heads,
            keys,
            slices: if single { (ITEMS / (a.kv * a.group / heads)).clamp(1, SLICES) } else { 1 },
            single,
            matrix,
        }
    }

    pub fn rows(&self) -> i64 {
        self.positions * self.heads
    }

    /// The first key of the tile that has key `key`. Tiles begin at multiples of their size, so that each
    /// lies in one page.
    pub(in super::super) fn tile_of<'k>(&self, key: Val<'k>) -> Val<'k> {
        key / self.keys * self.keys
    }

    /// The weight of a score that is `below` below the largest one.
    pub(in super::super) fn weight<'k>(&self, below: Val<'k>) -> Val<'k> {
        if self.in_powers_of_two() { exp2_below_zero(below) } else { below.exp() }
    }

    /// Weights are powers of two ([`AttentionProblem::in_powers_of_two`]).
    pub fn in_powers_of_two(&self) -> bool {
        self.matrix.is_some()
    }
}

impl WarpLayout {
    /// Bytes of queries with their scales, of tiles of keys and values with theirs, and of sums to join.
    fn shared_bytes(&self, a: &AttentionProblem, keys: i64) -> i64 {
        let rows = SIDE * self.rows;
        let queries = rows * ((a.size + PAD) * self.key.other_operand().bytes() + 4);
        let tiles = (a.size + PAD) * self.key.bytes() + (a.value_size + PAD) * self.value.bytes();
        let joined = if self.keys > 1 { self.keys * a.group.min(rows) * (a.value_size + 2) * 4 } else { 0 };
        let scales = if self.codes { 2 * 4 } else { 0 };
        queries + keys * (tiles + scales) + joined
    }
}

/// Sizes of the shared buffers of a GPU block without tensor cores: queries, a tile of keys or values,
/// scores, and three numbers per row.
pub(in super::super) fn shared_floats(a: &AttentionProblem, rows: i64, keys: i64) -> [i64; 6] {
    [rows * a.size, keys * (a.size.max(a.value_size) + 1), rows * keys, rows, rows, rows]
}
