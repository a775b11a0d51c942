//! Attention of several queries on a CPU, by tiles: some positions with all query heads of a key head against
//! blocks of keys. Both products of a tile are small matrix products with their sums in registers: keys times
//! transposed queries, lanes over rows; weights times values, lanes over columns.
//!
//! Keys and values are unpacked once per tile and block, so a tile has many rows, and queries are transposed
//! once per tile. Then a set of rows goes all the way from scores to sums (see [`super::row_set`]), so that
//! what it needs stays in the first-level cache: its queries and scores, a few keys, and some columns of the
//! values. Rows before a block are left out, and those on the diagonal take as many of its keys as they see.

use super::operand::pairs::PairOperands;
use super::operand::query_columns;
use super::plan::{PAIR, PrefillPlan, lanes_of};
use super::problem::AttentionProblem;
use super::query_tile::QueryTile;
use super::row_set::RowSet;
use super::slices::{KeySlices, WorkerSlices};
use crate::inline::CachePage;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::BufId;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val, transpose};

/// Writes results to `out: f32[n, heads, value_size]`.
pub fn emit(kb: &mut KernelBuilder, a: &AttentionProblem, plan: PrefillPlan, out: BufId) {
    Recorder::within(kb, |k| {
        let out = k.view(out, [1, a.heads(), a.value_size]);
        if plan.touch.iter().any(Option::is_some) {
            return one_query(k, a, plan, out);
        }
        let n = k.dim(&a.n);
        let tiles = n.div_ceil(plan.positions).named("tiles");
        // Equal tiles: none is so short that unpacking its keys counts.
        let positions = n.div_ceil(tiles).named("positions");
        k.par("item", tiles * a.kv, |item| {
            let first = item % tiles * positions;
            let count = (n - first).min(positions).named("count");
            let buffers = PrefillBuffers::new(k, a, plan, 1);
            buffers.tile((item / tiles).named("head"), k.int(0), (first.named("first"), count)).run(out);
        });
    });
}

/// The same arithmetic for a single query: a worker goes block by block through all its key heads, as in
/// [`super::decode`], because what one of them reads of a block lies between that of the others.
fn one_query(k: &Recorder, a: &AttentionProblem, plan: PrefillPlan, out: BufferView<3>) {
    let (t, buffers) = (k.dim(&a.t), PrefillBuffers::new(k, a, plan, a.kv));
    let (first_head, heads) =
        WorkerSlices::new(a, &KeySlices { slices: k.int(1), keys: t }).key_heads_of(k.int(0));
    let each = |body: &dyn Fn(PrefillTile)| {
        k.serial("key_head", heads, |i| {
            let head = (first_head + i).named("head");
            body(buffers.tile(head, head, (k.int(0), k.int(1))));
        });
    };
    each(&|one| {
        one.tile.clear();
        one.add_sinks();
        one.load_queries();
    });
    let whole = buffers.tile(first_head, k.int(0), (k.int(0), k.int(1)));
    whole.each_block(whole.keys(), |j, count| {
        whole.tile.touch_rows((j, count), heads);
        each(&|one| one.add_block(j, count));
    });
    each(&|one| one.tile.store(out));
}

/// Buffers of tiles on the stack: state of `heads` key heads each, and of one at a time.
struct PrefillBuffers<'k, 'a> {
    tile: QueryTile<'k, 'a>,
    pairs: Option<PairOperands<'k>>,
}

impl<'k, 'a> PrefillBuffers<'k, 'a> {
    fn new(
        k: &'k Recorder,
        a: &'a AttentionProblem<'a>,
        plan: PrefillPlan,
        heads: i64,
    ) -> PrefillBuffers<'k, 'a> {
        let (n, t) = (k.dim(&a.n), k.dim(&a.t));
        let rows = plan.sets(a) * plan.set;
        let pairs = PairOperands::new(k, a, &plan, heads * rows);
        // Elements of operands are floats, or words of two codes.
        let (dtype, codes) = if pairs.is_some() { (DType::I32, PAIR) } else { (DType::F32, 1) };
        let by_row = |name: &str| k.stack(name, DType::F32, [heads * rows]);
        let query = pairs.map(|pairs| pairs.queries);
        let tile = QueryTile {
            rec: k,
            a,
            plan,
            q: k.stack("q", dtype, [heads * rows * a.size / codes / plan.set, plan.set]),
            query: query.unwrap_or_else(|| k.stack("query", DType::F32, [plan.set, a.size])),
            k: k.stack("k", dtype, [plan.keys, a.size / codes]),
            v: k.stack("v", dtype, [plan.keys / codes, a.value_size]),
            s: k.stack("s", DType::F32, [plan.keys, plan.set]),
            block_max: k.stack("best", DType::F32, [plan.set]),
            rescale: k.stack("factors", DType::F32, [plan.set]),
            accumulators: k.stack("sums", DType::F32, [heads * rows, a.value_size]),
            max: by_row("max"),
            row_sum: by_row("total"),
            positions: k.stack("positions", DType::I32, [heads * rows]),
            slopes: a.slopes.map(|_| by_row("slopes")),
            terms: a.terms.map(|_| {
                let distances = (rows + a.group - 1) / a.group + plan.keys - 1;
                k.stack("terms", DType::F32, [distances * a.group])
            }),
            head: k.int(0),
            first: k.int(0),
            count: k.int(0),
            past: (t - n).named("first_position"),
            last: t + -1,
            prefix: a.prefix(k),
            border: a.span_end(k),
            page: None,
        };
        PrefillBuffers { tile, pairs }
    }

    /// A tile of `count` positions from `first` on of a key head, whose state is number `place`.
    fn tile(&self, head: Val<'k>, place: Val<'k>, (first, count): (Val<'k>, Val<'k>)) -> PrefillTile<'k, 'a> {
        let (all, plan) = (self.tile, self.tile.plan);
        let rows = plan.sets(all.a) * plan.set;
        let before = place * rows;
        let own = |view: BufferView<'k, 1>| view.starting_at([before]);
        let size = if self.pairs.is_some() { all.a.size / PAIR } else { all.a.size };
        let tile = QueryTile {
            q: all.q.flat().starting_at([before * size]).rows(plan.set),
            accumulators: all
                .accumulators
                .flat()
                .starting_at([before * all.a.value_size])
                .rows(all.a.value_size),
            max: own(all.max),
            row_sum: own(all.row_sum),
            positions: own(all.positions),
            slopes: all.slopes.map(own),
            head,
            first,
            count,
            ..all
        };
        PrefillTile { tile, pairs: self.pairs.map(|pairs| pairs.of_rows_after(before)) }
    }
}

/// The work on a tile; with `pairs` in integers.
#[derive(Clone, Copy)]
struct PrefillTile<'k, 'a> {
    tile: QueryTile<'k, 'a>,
    pairs: Option<PairOperands<'k>>,
}

impl<'k> PrefillTile<'k, '_> {
    fn run(self, out: BufferView<'k, 3>) {
        self.tile.clear();
        self.add_sinks();
        self.load_queries();
        self.each_block(self.keys(), |j, count| self.add_block(j, count));
        self.tile.store(out);
    }

    /// Adds the sinks that the window has left, if there are any.
    fn add_sinks(self) {
        let (tile, k) = (self.tile, self.tile.rec);
        let Some(sinks) = tile.a.over_sinks() else { return };
        let count = tile.a.sinks_left(tile.past + tile.first + tile.count + -1);
        let of_sinks = PrefillTile { tile: QueryTile { a: &sinks, ..tile }, ..self };
        of_sinks.load_queries();
        of_sinks.each_block((k.int(0), count), |j, count| of_sinks.add_block(j, count));
    }

    /// The keys that some of the queries see: the first, and the end of the range.
    fn keys(self) -> (Val<'k>, Val<'k>) {
        let tile = self.tile;
        let first = tile.past + tile.first;
        let end = tile.a.end_key(first + tile.count + -1);
        // Blocks lie at the same keys, whatever the first query of a tile sees.
        let start = tile.a.first_key(first) / tile.plan.keys * tile.plan.keys;
        (start, tile.prefix.map_or(end, |prefix| end.max(prefix)))
    }

    /// Runs `body(first, count)` for the blocks of the keys `start..end`.
    fn each_block(self, (start, end): (Val<'k>, Val<'k>), body: impl FnOnce(Val<'k>, Val<'k>)) {
        let (k, keys) = (self.tile.rec, self.tile.plan.keys);
        k.steps("block", (end - start).max(0).div_ceil(keys), keys, |offset| {
            let j = (start + offset).named("j");
            body(j, (end - j).min(keys).named("keys"));
        });
    }

    /// Adds the `count` keys of the block from `j` on, set by set.
    fn add_block(self, j: Val<'k>, count: Val<'k>) {
        let (tile, k) = (self.tile, self.tile.rec);
        let page = tile.a.page(j).map(CachePage::named);
        let block = PrefillTile { tile: QueryTile { page, ..tile }, ..self };
        block.load_keys(j, count);
        block.load_values(j, count);
        block.tile.load_terms(j);
        let first = (tile.first_row(j) / tile.plan.set).named("first_set");
        k.serial("set", tile.sets() - first, |set| {
            let set = (first + set).named("set");
            let rows = RowSet::new(&tile, self.pairs, set, set - first, (j, count));
            rows.store_scores();
            rows.raise_max();
            rows.softmax();
            rows.add_values();
        });
    }

    /// Scaled queries, transposed set by set.
    fn load_queries(self) {
        let (tile, k) = (self.tile, self.tile.rec);
        let (a, plan) = (tile.a, tile.plan);
        k.serial("set", tile.sets(), |number| {
            let first = (number * plan.set).named("first");
            k.serial("r", plan.set, |r| {
                let row = first + r;
                let (position, head) = (tile.query_of(row), tile.head_of(row));
                let query = |c: Val<'k>, lanes: u32| a.query([position, head, c], lanes);
                if let Some(pairs) = &self.pairs {
                    return pairs.encode_query(&tile, (row, r), query);
                }
                let lanes = lanes_of(a.size, plan.lanes);
                query_columns(k, a, lanes, |c| tile.query.set([r, c], query(c, lanes)));
            });
            // The elements in rows, words or floats.
            let size = if self.pairs.is_some() { a.size / PAIR } else { a.size };
            let lanes = lanes_of(size, plan.lanes);
            let to = tile.q.flat().starting_at([first * size]);
            k.steps("square", plan.set / i64::from(lanes), lanes.into(), |from| {
                k.vectors("c", size, lanes, |c| {
                    let row = |r: u32| tile.query.load([from + i64::from(r), c], lanes).named("q");
                    for (i, column) in (0..).zip(transpose((0..lanes).map(row).collect())) {
                        to.set([(c + i) * plan.set + from], column);
                    }
                });
            });
        });
    }

    /// Encodes at least `count` keys, in whole register tiles.
    fn load_keys(self, j: Val<'k>, count: Val<'k>) {
        let (tile, by) = (self.tile, self.tile.plan.scores.0);
        let count = count.div_ceil(by) * by;
        match &self.pairs {
            Some(pairs) => pairs.encode_keys(&tile, j, count),
            None => {
                unpack(&tile, tile.k, tile.a.size, (j, count), |at, lanes| tile.a.key(tile.page, at, lanes))
            }
        }
    }

    fn load_values(self, j: Val<'k>, count: Val<'k>) {
        let tile = self.tile;
        match &self.pairs {
            Some(pairs) => pairs.encode_values(&tile, j, count),
            None => unpack(&tile, tile.v, tile.a.value_size, (j, count), |at, lanes| {
                tile.a.value(tile.page, at, lanes)
            }),
        }
    }
}

/// `count` rows of `size` elements, from row `j` of the cache on.
fn unpack<'k>(
    tile: &QueryTile<'k, '_>,
    to: BufferView<'k, 2>,
    size: i64,
    (j, count): (Val<'k>, Val<'k>),
    value: impl Fn([Val<'k>; 3], u32) -> Val<'k>,
) {
    let (k, lanes) = (tile.rec, lanes_of(size, tile.plan.lanes));
    k.serial("i", count, |i| {
        let row = tile.key_row(j, i);
        k.vectors("c", size, lanes, |c| to.set([i, c], value([row, tile.head, c], lanes)));
    });
}
