//! The keys of the tune tables that `mlcc tune` varies, and the values that it tries.

mod gpu;

use toml::{Table, Value};

use crate::tune::merge_tables;
use crate::{FeatureLevel, TuneTables};

/// Kinds of work, by what their speed depends on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum WorkloadKind {
    /// A token after others: products of one row, attention of one query.
    Decode,
    /// A prompt as long as one call takes.
    Prompt,
    /// A prompt of few tokens.
    FewRows,
    /// A step of few sequences, and of many: as many rows of products, and a query of attention for each.
    FewSequences,
    ManySequences,
}

impl WorkloadKind {
    /// The kinds of work that are timed on CPUs, and those that are predicted for GPUs.
    pub const OF_CPUS: [WorkloadKind; 3] =
        [WorkloadKind::Decode, WorkloadKind::Prompt, WorkloadKind::FewRows];
    pub const OF_GPUS: [WorkloadKind; 4] =
        [WorkloadKind::Decode, WorkloadKind::FewSequences, WorkloadKind::ManySequences, WorkloadKind::Prompt];

    pub fn name(self) -> &'static str {
        match self {
            WorkloadKind::Decode => "decode",
            WorkloadKind::Prompt => "prompt",
            WorkloadKind::FewRows => "short prompt",
            WorkloadKind::FewSequences => "few sequences",
            WorkloadKind::ManySequences => "many sequences",
        }
    }
}

/// A key, for example `stream.q8`.
#[derive(Debug)]
pub struct TuneField {
    pub key: &'static str,
    pub about: &'static str,
    /// The kinds of work whose speed depends on it.
    pub kinds: &'static [WorkloadKind],
    values: FieldCandidates,
}

/// The values that are tried.
#[derive(Debug)]
enum FieldCandidates {
    Words(&'static [&'static str]),
    Flag,
    Numbers(&'static [u32]),
    /// Forms and distances of prefetches.
    Streams,
    /// Rows and tiles of a register tile, those of the present one varied one at a time.
    Tile,
    /// Rows and tiles of tall tiles, where there are any.
    Tall,
    /// Keys of a block of attention, and what they may take.
    Block,
    /// Rows, columns and warps of a product on tensor cores, and its stages.
    Product,
    /// Warps, keys and shared memory of an attention there.
    Attention,
}

const DECODE: &[WorkloadKind] = &[WorkloadKind::Decode];
const ROWS: &[WorkloadKind] = &[WorkloadKind::Prompt, WorkloadKind::FewRows];
const PROMPT: &[WorkloadKind] = &[WorkloadKind::Prompt];
const FEW_ROWS: &[WorkloadKind] = &[WorkloadKind::FewRows];
const SEVERAL: &[WorkloadKind] =
    &[WorkloadKind::FewSequences, WorkloadKind::ManySequences, WorkloadKind::Prompt];

/// The keys of GPU levels. A tile is tried as a whole: its parts fit each other.
pub const GPU_FIELDS: &[TuneField] = &[
    field(
        "code_product",
        "tile of products of 4-bit and 8-bit weights with f16 activations; where a level has none, that of `product`",
        SEVERAL,
        FieldCandidates::Product,
    ),
    field(
        "product",
        "tile of other products of several rows on tensor cores",
        SEVERAL,
        FieldCandidates::Product,
    ),
    field(
        "attention",
        "blocks of attention on tensor cores",
        &WorkloadKind::OF_GPUS,
        FieldCandidates::Attention,
    ),
];

/// The keys of CPU levels, those with the largest effect first.
pub const FIELDS: &[TuneField] = &[
    field("stream.q4", "prefetch of 4-bit weights by products of one row", DECODE, FieldCandidates::Streams),
    field("stream.q8", "the same of 8-bit weights", DECODE, FieldCandidates::Streams),
    field("stream.f16", "the same of f16 weights", DECODE, FieldCandidates::Streams),
    field("stream.bf16", "the same of bf16 weights", DECODE, FieldCandidates::Streams),
    field("stream.f32", "the same of f32 weights", DECODE, FieldCandidates::Streams),
    field("tile.codes", "register tile of products of integer activations", ROWS, FieldCandidates::Tile),
    field("tile.packed", "the same of packed weights and float activations", ROWS, FieldCandidates::Tile),
    field("tile.bf16", "the same of dots of bf16", ROWS, FieldCandidates::Tile),
    field("tile.plain", "the same of other products", ROWS, FieldCandidates::Tile),
    field(
        "tile.tall",
        "taller register tile of integer products of 4-bit weights",
        ROWS,
        FieldCandidates::Tall,
    ),
    field(
        "drops_requests",
        "plain loads in memory order instead of prefetches",
        DECODE,
        FieldCandidates::Flag,
    ),
    field(
        "division",
        "how sigmoid and tanh divide",
        &WorkloadKind::OF_CPUS,
        FieldCandidates::Words(&["divider", "polynomial"]),
    ),
    field(
        "product.few_rows",
        "maximum number of rows per pass over integer weights",
        FEW_ROWS,
        FieldCandidates::Numbers(&[4, 8, 16, 24, 48]),
    ),
    field(
        "product.few_rows_by_mmla",
        "the same where an instruction multiplies two rows by two",
        FEW_ROWS,
        FieldCandidates::Numbers(&[3, 7, 15, 31]),
    ),
    field(
        "product.groups_ahead",
        "groups that products of few rows prefetch",
        FEW_ROWS,
        FieldCandidates::Numbers(&[2, 4, 8, 16, 32]),
    ),
    field(
        "product.chunk_rows",
        "rows per pass over the weights",
        PROMPT,
        FieldCandidates::Numbers(&[32, 64, 128, 256, 512]),
    ),
    field(
        "product.small_bytes",
        "plain weights that stay in the second-level cache",
        PROMPT,
        FieldCandidates::Numbers(&[64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]),
    ),
    field(
        "product.small_rows",
        "rows per pass over small weights",
        PROMPT,
        FieldCandidates::Numbers(&[16, 32, 64, 128]),
    ),
    field(
        "product.thin_rows",
        "rows of small weights that are too few to go round among workers",
        PROMPT,
        FieldCandidates::Numbers(&[64, 128, 256]),
    ),
    field(
        "product.tiles_per_chunk",
        "register tiles that share a slice of narrow weights",
        PROMPT,
        FieldCandidates::Numbers(&[1, 2, 3, 6]),
    ),
    field("attention.block", "keys that one query works on together", DECODE, FieldCandidates::Block),
    field(
        "attention.repeats",
        "loads repeat parts of a key in all lanes for nothing",
        DECODE,
        FieldCandidates::Flag,
    ),
    field(
        "attention.in_order_heads",
        "maximum number of query heads per key head for reading blocks in order, with drops_requests",
        DECODE,
        FieldCandidates::Numbers(&[0, 1, 2, 4, 8]),
    ),
    field(
        "attention.many_rows",
        "rows of a tile of several queries",
        PROMPT,
        FieldCandidates::Numbers(&[48, 96, 192, 256, 384, 512]),
    ),
    field(
        "attention.few_rows",
        "the same with one key head or large heads",
        PROMPT,
        FieldCandidates::Numbers(&[24, 48, 96, 192]),
    ),
    field(
        "attention.set_rows",
        "rows that go together from scores to sums",
        PROMPT,
        FieldCandidates::Numbers(&[48, 96]),
    ),
    field(
        "product.panel_columns",
        "columns of a panel of integer products",
        PROMPT,
        FieldCandidates::Numbers(&[128, 256, 512, 1024]),
    ),
    field(
        "product.float_panel_columns",
        "columns of a panel of float products",
        PROMPT,
        FieldCandidates::Numbers(&[128, 256, 512, 1024]),
    ),
    field(
        "product.piece_columns",
        "columns that few rows visit before the next ones",
        FEW_ROWS,
        FieldCandidates::Numbers(&[128, 256, 512, 1024]),
    ),
    field(
        "quantize.piece_bytes",
        "computed values of a quantizer between its steps",
        ROWS,
        FieldCandidates::Numbers(&[4096, 8192, 16384, 32768]),
    ),
    field(
        "quantize.piece_groups",
        "maximum number of groups in such a piece",
        ROWS,
        FieldCandidates::Numbers(&[2, 4, 8, 16]),
    ),
    field(
        "quantize.vectors",
        "vectors of 16 lanes of activations that are computed together",
        &WorkloadKind::OF_CPUS,
        FieldCandidates::Numbers(&[1, 2, 4]),
    ),
    field(
        "scan.stack_bytes",
        "transposed states of a scan over matrices",
        PROMPT,
        FieldCandidates::Numbers(&[16 << 10, 32 << 10, 64 << 10, 128 << 10]),
    ),
    field(
        "scan.state_vectors",
        "registers for the states of rows that run together",
        DECODE,
        FieldCandidates::Numbers(&[4, 8, 16, 24]),
    ),
    field(
        "scan.steps_ahead",
        "steps that a scan prefetches ahead",
        PROMPT,
        FieldCandidates::Numbers(&[1, 2, 4, 8]),
    ),
    field(
        "shares.bytes",
        "bytes of the smallest piece that workers take from each other",
        &WorkloadKind::OF_CPUS,
        FieldCandidates::Numbers(&[4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10]),
    ),
    field(
        "shares.dots",
        "the same in operations on bytes",
        ROWS,
        FieldCandidates::Numbers(&[512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20]),
    ),
    field(
        "shares.flops",
        "the same in operations on f32",
        ROWS,
        FieldCandidates::Numbers(&[64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]),
    ),
    field(
        "shares.times_of_cache",
        "multiple of that for pieces of attention of one query",
        DECODE,
        FieldCandidates::Numbers(&[8, 16, 32, 64, 128]),
    ),
    field(
        "product.few_columns",
        "columns below which weights are narrow",
        PROMPT,
        FieldCandidates::Numbers(&[32, 64, 128]),
    ),
];

const DISTANCES: [i64; 6] = [1024, 2048, 3072, 4096, 5120, 8192];
const TILE_ROWS: [i64; 6] = [2, 4, 6, 8, 12, 16];
const TILES: [i64; 4] = [1, 2, 3, 4];
const BLOCK_KEYS: [i64; 5] = [16, 32, 64, 128, 256];
/// Most rows times tiles: more fit no registers, and take long to build.
const MOST_SUMS: i64 = 32;

const fn field(
    key: &'static str,
    about: &'static str,
    kinds: &'static [WorkloadKind],
    values: FieldCandidates,
) -> TuneField {
    TuneField { key, about, kinds, values }
}

impl TuneField {
    /// Its value among tune tables.
    pub fn value_in<'a>(&self, tables: &'a Table) -> Option<&'a Value> {
        let mut parts = self.key.split('.');
        let first = tables.get(parts.next()?)?;
        parts.try_fold(first, |value, key| value.get(key))
    }

    /// The value that holds for it: packed weights without a tile of their own have that of the others.
    fn now<'a>(&self, tables: &'a Table) -> Option<&'a Value> {
        let other = || tables.get("product").filter(|_| self.key == "code_product");
        self.value_in(tables).or_else(other)
    }

    /// True if every other value gives other code, unless no code depends on the key: then one of them tells.
    pub fn all_differ(&self) -> bool {
        matches!(self.values, FieldCandidates::Words(_) | FieldCandidates::Flag | FieldCandidates::Streams)
    }

    /// Values other than the present one, that are legal beside all others; each with the tables that have
    /// it.
    pub fn candidates(&self, level: &FeatureLevel) -> Vec<(Value, Table)> {
        let tables = level.tune_tables().unwrap_or_default();
        let now = self.now(&tables);
        let values = self.values(now).into_iter().filter(|value| Some(value) != now);
        let whole = values.map(|value| {
            let change = self.to_tables(value.clone());
            (value, change)
        });
        whole.filter(|(_, change)| level.with_changes(change).is_ok()).collect()
    }

    /// Tune tables with this key alone.
    pub fn to_tables(&self, value: Value) -> Table {
        let wrap = |value: Value, key: &str| Value::Table(Table::from_iter([(key.to_string(), value)]));
        match self.key.rsplit('.').fold(value, wrap) {
            Value::Table(table) => table,
            _ => Table::new(),
        }
    }

    /// The values, for people.
    pub fn describe(&self) -> String {
        let list = |numbers: &[i64]| {
            let numbers: Vec<String> = numbers.iter().map(i64::to_string).collect();
            numbers.join(", ")
        };
        match &self.values {
            FieldCandidates::Words(words) => words.join(", "),
            FieldCandidates::Flag => "true, false".into(),
            FieldCandidates::Numbers(numbers) => {
                list(&numbers.iter().map(|&n| n.into()).collect::<Vec<i64>>())
            }
            FieldCandidates::Streams => {
                format!("none; every line or one of each group, {} bytes ahead", list(&DISTANCES))
            }
            FieldCandidates::Block => format!("keys {}; most half, as much, twice", list(&BLOCK_KEYS)),
            FieldCandidates::Product => gpu::describe_products(),
            FieldCandidates::Attention => gpu::describe_attentions(),
            FieldCandidates::Tile | FieldCandidates::Tall => {
                format!("rows {}; tiles {}", list(&TILE_ROWS), list(&TILES))
            }
        }
    }

    fn values(&self, now: Option<&Value>) -> Vec<Value> {
        match &self.values {
            FieldCandidates::Words(words) => words.iter().map(|&word| word.into()).collect(),
            FieldCandidates::Flag => vec![true.into(), false.into()],
            FieldCandidates::Numbers(numbers) => {
                numbers.iter().map(|&number| i64::from(number).into()).collect()
            }
            FieldCandidates::Streams => streams(),
            FieldCandidates::Tile => now.map(tiles).unwrap_or_default(),
            FieldCandidates::Tall => now.map(tall_tiles).unwrap_or_default(),
            FieldCandidates::Block => now.map(blocks).unwrap_or_default(),
            FieldCandidates::Product => now.map(gpu::products).unwrap_or_default(),
            FieldCandidates::Attention => now.map(gpu::attentions).unwrap_or_default(),
        }
    }
}

fn streams() -> Vec<Value> {
    let ahead = |lines: &'static str| {
        DISTANCES.map(|distance| {
            Value::Table(Table::from_iter([
                ("lines".into(), lines.into()),
                ("distance".into(), distance.into()),
            ]))
        })
    };
    let none = Value::Table(Table::from_iter([("lines".into(), "none".into())]));
    [none].into_iter().chain(ahead("every")).chain(ahead("one")).collect()
}

fn tile(rows: Value, tiles: i64) -> Value {
    Value::Table(Table::from_iter([("rows".into(), rows), ("tiles".into(), tiles.into())]))
}

/// Other rows with as many tiles, then other tiles of as many rows.
fn tiles(now: &Value) -> Vec<Value> {
    let rows = now.get("rows").and_then(Value::as_array).cloned().unwrap_or_default();
    let most = rows.first().and_then(Value::as_integer).unwrap_or(1);
    let count = now.get("tiles").and_then(Value::as_integer).unwrap_or(1);
    let with_first = |first: i64| {
        let less = rows.iter().filter(|r| r.as_integer().is_some_and(|r| r < first)).cloned();
        tile([first.into()].into_iter().chain(less).collect::<Vec<Value>>().into(), count)
    };
    let by_rows = TILE_ROWS.into_iter().filter(|first| first * count <= MOST_SUMS).map(with_first);
    let by_tiles = TILES
        .into_iter()
        .filter(|tiles| most * tiles <= MOST_SUMS)
        .map(|tiles| tile(rows.clone().into(), tiles));
    by_rows.chain(by_tiles).collect()
}

/// Other keys, then other limits of what they take.
fn blocks(now: &Value) -> Vec<Value> {
    let Some(table) = now.as_table() else { return Vec::new() };
    let most = table.get("most").and_then(Value::as_integer).unwrap_or(0);
    let with = |key: &str, value: i64| {
        let mut table = table.clone();
        table.insert(key.into(), value.into());
        Value::Table(table)
    };
    let keys = BLOCK_KEYS.map(|keys| with("keys", keys));
    keys.into_iter().chain([most / 2, 2 * most].map(|most| with("most", most))).collect()
}

fn tall_tiles(_now: &Value) -> Vec<Value> {
    let all = TILE_ROWS.into_iter().flat_map(|rows| TILES.map(|tiles| (rows, tiles)));
    all.filter(|(rows, tiles)| rows * tiles <= MOST_SUMS)
        .map(|(rows, tiles)| tile(rows.into(), tiles))
        .collect()
}

impl TuneTables {
    /// Keys of these tables that differ from this tuning: the effect of `changes` over `base`.
    pub fn changed_keys(&self, changed: &TuneTables) -> Table {
        differing(FIELDS, &self.to_table(), &changed.to_table())
    }
}

impl FeatureLevel {
    /// The keys of its tune tables.
    pub fn fields(&self) -> &'static [TuneField] {
        if self.gpu.is_some() { GPU_FIELDS } else { FIELDS }
    }

    /// The kinds of work that show whether a tuning of it is faster.
    pub fn kinds(&self) -> &'static [WorkloadKind] {
        if self.gpu.is_some() { &WorkloadKind::OF_GPUS } else { &WorkloadKind::OF_CPUS }
    }

    /// Keys of the tune tables of a level that is tuned from this one, as far as they differ.
    pub fn changed_keys(&self, changed: &FeatureLevel) -> Table {
        let [base, changed] = [self, changed].map(|level| level.tune_tables().unwrap_or_default());
        differing(self.fields(), &base, &changed)
    }
}

fn differing(fields: &[TuneField], base: &Table, changed: &Table) -> Table {
    let differing = fields.iter().filter_map(|field| {
        let value = field.value_in(changed).filter(|value| Some(*value) != field.value_in(base))?;
        Some(field.to_tables(value.clone()))
    });
    differing.fold(Table::new(), |all, one| merge_tables(&all, one))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels() -> Vec<FeatureLevel> {
        let names = crate::names().unwrap();
        let levels = names.iter().filter_map(|name| crate::level(name).unwrap());
        levels.filter(|level| level.tune.is_some()).collect()
    }

    fn tune(level: &FeatureLevel) -> &TuneTables {
        level.tune.as_ref().unwrap()
    }

    /// Tiles of products and attention keep all their parts.
    #[test]
    fn tiles_of_gpus_are_tried_as_a_whole() {
        for name in ["sm_80", "sm_90"] {
            let level = crate::level(name).unwrap().unwrap();
            assert_eq!(level.fields().len(), 3);
            for field in level.fields() {
                let candidates = field.candidates(&level);
                assert!(candidates.len() > 5, "{name}: {} {}", field.key, candidates.len());
                for (value, change) in candidates {
                    let changed = level.with_changes(&change).unwrap();
                    assert_eq!(
                        field.value_in(&changed.tune_tables().unwrap()),
                        Some(&value),
                        "{name}: {}",
                        field.key
                    );
                    assert_eq!(level.changed_keys(&changed), change, "{name}: {}", field.key);
                }
            }
        }
        assert_eq!(crate::level("sm_70").unwrap().unwrap().tune_tables(), None);
    }

    #[test]
    fn every_field_has_legal_candidates_at_every_level() {
        for level in levels() {
            let (name, tables) = (&level.name, tune(&level).to_table());
            for field in FIELDS {
                let Some(now) = field.value_in(&tables) else {
                    assert_eq!(field.key, "tile.tall", "{name}");
                    continue;
                };
                let candidates = field.candidates(&level);
                assert!(!candidates.is_empty(), "{name}: {}", field.key);
                for (value, change) in candidates {
                    assert_ne!(&value, now);
                    let changed = level.with_changes(&change).unwrap();
                    assert_eq!(
                        field.value_in(&tune(&changed).to_table()),
                        Some(&value),
                        "{name}: {}",
                        field.key
                    );
                    assert_eq!(tune(&level).changed_keys(tune(&changed)), change, "{name}: {}", field.key);
                }
            }
        }
    }

    /// No tuning changes sizes of caches: they are facts.
    #[test]
    fn fields_are_all_keys_but_facts() {
        let level = levels().into_iter().find(|level| tune(level).tile.tall.is_some()).unwrap();
        let mut keys: Vec<String> = Vec::new();
        for (name, value) in tune(&level).to_table() {
            match value {
                Value::Table(table) => keys.extend(table.keys().map(|key| format!("{name}.{key}"))),
                _ => keys.push(name),
            }
        }
        keys.retain(|key| !key.starts_with("cache."));
        let mut fields: Vec<&str> = FIELDS.iter().map(|field| field.key).collect();
        keys.sort_unstable();
        fields.sort_unstable();
        assert_eq!(keys, fields);
    }

    #[test]
    fn changes_of_several_keys_stand_together() {
        let level = levels().remove(0);
        let mut changed = level.clone();
        for field in FIELDS {
            let Some((_, change)) = field.candidates(&changed).pop() else { continue };
            changed = changed.with_changes(&change).unwrap();
        }
        let changes = tune(&level).changed_keys(tune(&changed));
        assert_eq!(level.with_changes(&changes), Ok(changed));
        assert_eq!(tune(&level).changed_keys(tune(&level)), Table::new());
    }
}
