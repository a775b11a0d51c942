//! Differences between machines with the same instructions: sizes and forms that kernels choose, as they were
//! measured. Levels have them in their `tune` table, with the measurements as comments.

use serde::{Deserialize, Serialize};

/// All tables of a CPU level. The default holds for levels without (GPUs, whose kernels do not ask for them).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TuneTables {
    pub division: DivisionMethod,
    /// True if prefetches do less than plain loads in the order of memory, which the core's own prefetchers
    /// follow: the core drops requests when it has too many.
    pub drops_requests: bool,
    pub cache: CacheSizes,
    pub stream: StreamTuning,
    pub product: MatmulTuning,
    pub tile: TileTuning,
    pub attention: AttentionTuning,
    pub quantize: QuantizeTuning,
    pub scan: ScanTuning,
    pub shares: ChunkTuning,
}

/// The way in which activations (sigmoid, tanh) divide.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DivisionMethod {
    /// The divider, which works in parallel with the units that multiply.
    Divider,
    /// A polynomial.
    #[default]
    Polynomial,
}

/// Bytes of one core alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CacheSizes {
    pub first: u32,
    pub second: u32,
}

/// The way in which products of one row read their weights, by format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StreamTuning {
    pub q4: StreamPrefetch,
    pub q8: StreamPrefetch,
    pub f32: StreamPrefetch,
    pub f16: StreamPrefetch,
    pub bf16: StreamPrefetch,
}

/// The lines of a stream that are requested ahead of their use, and how many bytes ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(tag = "lines", rename_all = "lowercase", deny_unknown_fields)]
pub enum StreamPrefetch {
    /// None: the core finds the stream by itself.
    #[default]
    None,
    /// Every line.
    Every { distance: u32 },
    /// One line of each group (or iteration): the core finds the others.
    One { distance: u32 },
}

/// Sizes of products of several rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulTuning {
    /// Most rows of integer products that pass by the weights together: their sums stay in the first-level
    /// cache. With more, weights are better unpacked once.
    pub few_rows: u32,
    /// The same where an instruction multiplies two rows by two: it needs unpacked weights.
    pub few_rows_by_mmla: u32,
    /// Groups that products of few rows request in advance.
    pub groups_ahead: u32,
    /// Rows per pass over the weights: their sums (with 48 weight rows 48 KiB) and codes stay in the
    /// second-level cache between the pieces of long rows.
    pub chunk_rows: u32,
    /// Bytes of plain weights that stay in the second-level cache while all rows pass by.
    pub small_bytes: u32,
    /// Rows that pass by small weights together: enough of them that converting the weights of a slice once
    /// pays.
    pub small_rows: u32,
    /// Rows of small weights that are too few to go round among workers.
    pub thin_rows: u32,
    /// Columns of a panel of integer products, which stays in the first-level cache, and of one of floats, in
    /// the second-level cache.
    pub panel_columns: u32,
    pub float_panel_columns: u32,
    /// Columns that few rows pass by before the next ones are touched.
    pub piece_columns: u32,
    /// Register tiles that share a slice from the first-level cache, for weights with fewer columns than
    /// `few_columns`.
    pub tiles_per_chunk: u32,
    pub few_columns: u32,
}

/// Tiles of products of several rows, by kind: sums and operands fit the registers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TileTuning {
    /// Integer activations.
    pub codes: RegisterTileSize,
    /// Packed weights and float activations.
    pub packed: RegisterTileSize,
    /// Dots of bf16.
    pub bf16: RegisterTileSize,
    /// Everything else.
    pub plain: RegisterTileSize,
    /// Taller ones for integer products of 4-bit codes whose number of rows, at most `few_rows`, is a
    /// multiple of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tall: Option<TallTile>,
}

/// Rows of activations, in falling order, the last one 1, and tiles of 16 rows of weights that are worked on
/// together.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RegisterTileSize {
    pub rows: Vec<u32>,
    pub tiles: u32,
}

impl Default for RegisterTileSize {
    fn default() -> RegisterTileSize {
        RegisterTileSize { rows: vec![4, 2, 1], tiles: 1 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TallTile {
    pub rows: u32,
    pub tiles: u32,
}

/// Most rows and tiles of a register tile, and most rows of the other kinds: what generators unroll grows
/// with them.
const MOST_TILE_ROWS: u32 = 16;
const MOST_TILES: u32 = 4;
const MOST_ROWS: u32 = 512;
/// Columns of panels, which are on the stack.
const PANEL: std::ops::RangeInclusive<u32> = 32..=1024;
/// Farthest prefetch, in bytes.
const FARTHEST: u32 = 64 << 10;

/// Sizes of attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionTuning {
    /// Keys that one query works on together.
    pub block: KeyBlockLimit,
    /// Most query heads of a key head that are too little work beside prefetches on a core that drops some:
    /// one query reads blocks in the order of memory then.
    pub in_order_heads: u32,
    /// True if a load repeats a part of a key in the other lanes of a vector without a unit that also
    /// multiplies.
    pub repeats: bool,
    /// Rows that a tile of several queries aims at: of many, so that unpacking keys costs little beside the
    /// products, and of few where there would be too few tiles for the workers, or queries and sums too large
    /// for the second-level cache.
    pub many_rows: u32,
    pub few_rows: u32,
    /// Rows of it that go together from scores to sums.
    pub set_rows: u32,
}

/// Most keys of a block, and most of what their rows take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(tag = "by", rename_all = "lowercase", deny_unknown_fields)]
pub enum KeyBlockLimit {
    /// Elements of rows of keys with all heads.
    Elements { most: u32, keys: u32 },
    /// Bytes of rows of keys and values.
    Bytes { most: u32, keys: u32 },
}

impl Default for KeyBlockLimit {
    fn default() -> KeyBlockLimit {
        KeyBlockLimit::Bytes { most: 0, keys: 16 }
    }
}

/// Sizes of quantizers of activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct QuantizeTuning {
    /// Most bytes of computed values between the steps, so that they stay in the first-level cache: the rows
    /// of a block take turns on pieces of their columns.
    pub piece_bytes: u32,
    /// Most groups of a piece.
    pub piece_groups: u32,
    /// Vectors of 16 lanes whose values are computed together where that takes many steps.
    pub vectors: u32,
}

/// Sizes of scans with matrices as states.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ScanTuning {
    /// Most bytes of transposed states.
    pub stack_bytes: u32,
    /// Vector registers that the states of the rows which run together may take.
    pub state_vectors: u32,
    /// The number of steps ahead that sequences are prefetched: their rows are far apart, which the hardware
    /// does not foresee.
    pub steps_ahead: u32,
}

/// Least work of the smallest pieces that workers take from each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkTuning {
    pub bytes: u32,
    /// Operations on bytes, and on f32.
    pub dots: u32,
    pub flops: u32,
    /// Factor for pieces that begin with a block of a cache that was not prefetched.
    pub times_of_cache: u32,
}

impl Default for ChunkTuning {
    /// Values for unknown levels: those of a text.
    fn default() -> ChunkTuning {
        ChunkTuning { bytes: 16 << 10, dots: 2 << 20, flops: 256 << 10, times_of_cache: 64 }
    }
}

impl TuneTables {
    /// The first value outside of its legal range on a machine with these features, if there is one.
    pub(crate) fn find_fault(&self, features: &[String]) -> Option<String> {
        self.tile
            .fault(features)
            .or_else(|| self.product.fault())
            .or_else(|| {
                if self.cache.first > self.cache.second || self.product.small_bytes > self.cache.second {
                    return Some(
                        "cache: the second level holds more than the first, and product.small_bytes".into(),
                    );
                }
                self.stream.fault()
            })
            .or_else(|| self.attention.fault())
            .or_else(|| self.other_fault())
    }
}

impl TileTuning {
    fn fault(&self, features: &[String]) -> Option<String> {
        let TileTuning { codes, packed, bf16, plain, tall } = self;
        for (name, tile) in [("codes", codes), ("packed", packed), ("bf16", bf16), ("plain", plain)] {
            let falls = tile.rows.windows(2).all(|pair| pair[0] > pair[1]);
            // Some instructions multiply two rows at once.
            let fits = |rows: &u32| *rows == 1 || (rows.is_multiple_of(2) && *rows <= MOST_TILE_ROWS);
            let rows = falls && tile.rows.last() == Some(&1) && tile.rows.iter().all(fits);
            if !rows || !(1..=MOST_TILES).contains(&tile.tiles) {
                return Some(format!(
                    "tile.{name}: rows are even, at most {MOST_TILE_ROWS}, and fall to 1; tiles are 1 to {MOST_TILES}"
                ));
            }
        }
        // The codes of this many rows are interleaved: four bytes of as many rows make a number, and products
        // of two rows by two need four.
        let least = codes.rows.first().copied().unwrap_or(1);
        let blocks: &[u32] = if features.iter().any(|f| f == "i8mm") { &[4] } else { &[2, 4] };
        if !blocks.contains(&least) {
            let blocks: Vec<String> = blocks.iter().map(u32::to_string).collect();
            return Some(format!("tile.codes: rows begin with {} here", blocks.join(" or ")));
        }
        let fits = |tall: &TallTile| {
            (1..=MOST_TILES).contains(&tall.tiles)
                && tall.rows > least
                && tall.rows <= MOST_TILE_ROWS
                && tall.rows.is_multiple_of(least)
        };
        (!tall.as_ref().is_none_or(fits)).then(|| {
            format!(
                "tile.tall: rows are a multiple of those of tile.codes, and at most {MOST_TILE_ROWS}; tiles are 1 to \
                 {MOST_TILES}"
            )
        })
    }
}

impl MatmulTuning {
    fn fault(&self) -> Option<String> {
        let rows = [self.few_rows, self.few_rows_by_mmla, self.chunk_rows, self.small_rows, self.thin_rows];
        let panels = [self.panel_columns, self.float_panel_columns, self.piece_columns];
        // Whole groups of weights.
        if !panels.iter().all(|columns| PANEL.contains(columns) && columns.is_multiple_of(32)) {
            return Some("product: columns of panels and pieces are multiples of 32 up to 1024".into());
        }
        let few = [self.groups_ahead, self.tiles_per_chunk];
        if !rows.iter().all(|rows| (1..=MOST_ROWS).contains(rows)) {
            return Some(format!("product: numbers of rows are 1 to {MOST_ROWS}"));
        }
        // Codes of two or four rows lie interleaved, and a chunk begins with such a block.
        if !self.chunk_rows.is_multiple_of(4) {
            return Some("product.chunk_rows: a multiple of 4".into());
        }
        if !few.iter().all(|number| (1..=64).contains(number)) || self.few_columns > 4096 {
            return Some(
                "product: groups_ahead and tiles_per_chunk are 1 to 64, few_columns is at most 4096".into(),
            );
        }
        None
    }
}

impl AttentionTuning {
    fn fault(&self) -> Option<String> {
        let (KeyBlockLimit::Elements { most, keys } | KeyBlockLimit::Bytes { most, keys }) = self.block;
        if !keys.is_multiple_of(16) || !(16..=256).contains(&keys) || !(1024..=1 << 20).contains(&most) {
            return Some(
                "attention.block: keys are a multiple of 16 up to 256, and take 1024 to 1048576 elements or bytes".into(),
            );
        }
        // Whole register tiles of both products on every machine.
        let rows = [self.many_rows, self.few_rows].iter().all(|rows| (1..=MOST_ROWS).contains(rows));
        if !rows || !self.set_rows.is_multiple_of(48) || !(48..=192).contains(&self.set_rows) {
            return Some(format!("attention: rows are 1 to {MOST_ROWS}, those of a set 48, 96, 144 or 192"));
        }
        (self.in_order_heads > 64).then(|| "attention.in_order_heads: at most 64".into())
    }
}

impl TuneTables {
    fn other_fault(&self) -> Option<String> {
        let QuantizeTuning { piece_bytes, piece_groups, vectors } = self.quantize;
        if !(1024..=64 << 10).contains(&piece_bytes)
            || !(1..=64).contains(&piece_groups)
            || ![1, 2, 4].contains(&vectors)
        {
            return Some(
                "quantize: piece_bytes are 1024 to 65536, piece_groups 1 to 64, vectors 1, 2 or 4".into(),
            );
        }
        let ScanTuning { stack_bytes, state_vectors, steps_ahead } = self.scan;
        if stack_bytes > 256 << 10 || !(1..=64).contains(&state_vectors) || steps_ahead > 64 {
            return Some(
                "scan: stack_bytes are at most 262144, state_vectors 1 to 64, steps_ahead at most 64".into(),
            );
        }
        let ChunkTuning { bytes, dots, flops, times_of_cache } = self.shares;
        let fits = [bytes, dots, flops].iter().all(|work| (1..=1 << 30).contains(work));
        (!fits || !(1..=1024).contains(&times_of_cache))
            .then(|| "shares: work is 1 to 1073741824, times_of_cache 1 to 1024".into())
    }
}

impl StreamTuning {
    fn fault(&self) -> Option<String> {
        let StreamTuning { q4, q8, f32, f16, bf16 } = self;
        let far = |stream: &&StreamPrefetch| match **stream {
            StreamPrefetch::None => false,
            StreamPrefetch::Every { distance } | StreamPrefetch::One { distance } => {
                !(1..=FARTHEST).contains(&distance)
            }
        };
        let any = [q4, q8, f32, f16, bf16].iter().any(far);
        any.then(|| format!("stream: distances are 1 to {FARTHEST} bytes"))
    }
}

/// The tables of a level over those of the level that it extends: a key of a table takes the place of the
/// same key.
pub(crate) fn merge_tables(base: &toml::Table, own: toml::Table) -> toml::Table {
    let mut out = base.clone();
    for (name, value) in own {
        match (out.get_mut(&name), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) => old.extend(new),
            (_, value) => drop(out.insert(name, value)),
        }
    }
    out
}
