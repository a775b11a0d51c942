//! What differs between machines with the same instructions: sizes and forms that kernels choose, as they were measured.
//! Levels have them in their `tune` table, where the measurements stand as comments.

use serde::{Deserialize, Serialize};

/// All tables of a CPU level. The default holds for levels without (GPUs, whose kernels ask for none of it).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Tune {
    pub division: Division,
    /// Whether requests ahead of their use do less than plain loads in the order of memory, which the core's own prefetchers
    /// follow: it drops requests when it has too many.
    pub drops_requests: bool,
    pub cache: Cache,
    pub stream: Streams,
    pub product: Products,
    pub tile: Tiles,
}

/// How activations (sigmoid, tanh) divide.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Division {
    /// By the divider, which works beside the units that multiply.
    Divider,
    /// By a polynomial.
    #[default]
    Polynomial,
}

/// Bytes that one core has for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    pub first: u32,
    pub second: u32,
}

/// How products of one row read their weights, by format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Streams {
    pub q4: Stream,
    pub q8: Stream,
    pub f32: Stream,
    pub f16: Stream,
    pub bf16: Stream,
}

/// Which lines of a stream are requested ahead of their use, and how many bytes ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(tag = "lines", rename_all = "lowercase", deny_unknown_fields)]
pub enum Stream {
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
pub struct Products {
    /// Most rows of integer products that pass by the weights together: their sums stay in the first-level cache. With more,
    /// weights are better unpacked once.
    pub few_rows: u32,
    /// The same where an instruction multiplies two rows by two: it wants unpacked weights.
    pub few_rows_by_mmla: u32,
    /// Groups that products of few rows request in advance.
    pub groups_ahead: u32,
    /// Rows per pass over the weights: their sums (with 48 weight rows 48 KiB) and codes stay in the second-level cache
    /// between the pieces of long rows.
    pub chunk_rows: u32,
    /// Bytes of plain weights that stay in the second-level cache while all rows pass by.
    pub small_bytes: u32,
    /// Rows that pass by small weights together: enough of them that converting the weights of a slice once pays.
    pub small_rows: u32,
    /// Rows of small weights that are too few to go round among workers.
    pub thin_rows: u32,
    /// Weights with fewer columns than `few_columns` share a slice from the first-level cache among so many register tiles.
    pub tiles_per_chunk: u32,
    pub few_columns: u32,
}

/// Tiles of products of several rows, by kind: sums and operands fit the registers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Tiles {
    /// Integer activations.
    pub codes: Tile,
    /// Packed weights and float activations.
    pub packed: Tile,
    /// Dots of bf16.
    pub bf16: Tile,
    /// Everything else.
    pub plain: Tile,
    /// Taller ones for integer products of 4-bit codes whose number of rows, at most `few_rows`, is a multiple of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tall: Option<TallTile>,
}

/// Rows of activations, in falling order, the last one 1, and tiles of 16 rows of weights that are worked on together.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Tile {
    pub rows: Vec<u32>,
    pub tiles: u32,
}

impl Default for Tile {
    fn default() -> Tile {
        Tile { rows: vec![4, 2, 1], tiles: 1 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TallTile {
    pub rows: u32,
    pub tiles: u32,
}

/// Most rows and tiles of a register tile, and most rows of the other kinds: what generators unroll grows with them.
const MOST_TILE_ROWS: u32 = 16;
const MOST_TILES: u32 = 8;
const MOST_ROWS: u32 = 1024;
/// Farthest prefetch, in bytes.
const FARTHEST: u32 = 64 << 10;

impl Tune {
    /// What is outside of its legal range on a machine with these features, if anything is.
    pub(crate) fn fault(&self, features: &[String]) -> Option<String> {
        self.tile.fault(features).or_else(|| self.product.fault()).or_else(|| {
            if self.cache.first > self.cache.second || self.product.small_bytes > self.cache.second {
                return Some(
                    "cache: the second level holds more than the first, and product.small_bytes".into(),
                );
            }
            self.stream.fault()
        })
    }
}

impl Tiles {
    fn fault(&self, features: &[String]) -> Option<String> {
        let Tiles { codes, packed, bf16, plain, tall } = self;
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
        // Codes of so many rows lie interleaved: four bytes of as many rows make a number, and products of two rows by two want four.
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

impl Products {
    fn fault(&self) -> Option<String> {
        let rows = [self.few_rows, self.few_rows_by_mmla, self.chunk_rows, self.small_rows, self.thin_rows];
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

impl Streams {
    fn fault(&self) -> Option<String> {
        let Streams { q4, q8, f32, f16, bf16 } = self;
        let far = |stream: &&Stream| match **stream {
            Stream::None => false,
            Stream::Every { distance } | Stream::One { distance } => !(1..=FARTHEST).contains(&distance),
        };
        let any = [q4, q8, f32, f16, bf16].iter().any(far);
        any.then(|| format!("stream: distances are 1 to {FARTHEST} bytes"))
    }
}

/// The tables of a level over those of the level that it extends: a key of a table takes the place of the same key.
pub(crate) fn over(base: &toml::Table, own: toml::Table) -> toml::Table {
    let mut out = base.clone();
    for (name, value) in own {
        match (out.get_mut(&name), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) => old.extend(new),
            (_, value) => drop(out.insert(name, value)),
        }
    }
    out
}
