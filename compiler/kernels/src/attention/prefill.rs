//! Attention of several queries on a CPU, by tiles: some positions with all query heads of a key head against blocks of
//! keys. Both products of a tile are small matrix products with their sums in registers: queries times transposed keys,
//! lanes over keys; weights times values, lanes over columns.

use super::decode::columns;
use super::{HIDDEN, Place, Problem, at_least_zero, ceil_div, lanes_of};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty, UnOp};
use mlcc_ir::types::DType;

/// Sizes of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    pub lanes: u32,
    /// Positions of a tile.
    pub positions: i64,
    /// Keys of a block; a multiple of `lanes * vectors`.
    pub keys: i64,
    /// Rows and vectors whose sums are in registers together.
    pub rows: i64,
    pub vectors: i64,
}

impl Params {
    /// Tiles of at least 32 rows, because each block of keys is transposed once per tile.
    pub fn choose(a: &Problem, lanes: u32) -> Params {
        let (rows, vectors) = if lanes == 16 { (8, 2) } else { (4, 2) };
        let positions = (32 + a.group - 1) / a.group;
        Params { lanes, positions, keys: 32, rows, vectors }
    }
    /// Rows of a tile: positions times heads, rounded up to whole register blocks.
    fn tile_rows(&self, a: &Problem) -> i64 {
        (self.positions * a.group + self.rows - 1) / self.rows * self.rows
    }
}

/// A tile's buffers on the stack, and its place.
#[derive(Clone, Copy)]
struct Tile<'a> {
    a: &'a Problem<'a>,
    params: Params,
    /// `[rows, size]`.
    q: BufId,
    /// Keys of a block, transposed: `[size, keys]`.
    k: BufId,
    /// `[keys, value_size]`.
    v: BufId,
    /// Scores, then weights: `[rows, keys]`.
    s: BufId,
    /// `[rows, value_size]`.
    sums: BufId,
    max: BufId,
    total: BufId,
    factor: BufId,
    head: ExprId,
    /// First position of the tile among the queries, how many it has, position of the first query in the sequence.
    first: ExprId,
    count: ExprId,
    past: ExprId,
    /// The last key.
    last: ExprId,
    prefix: Option<ExprId>,
}

/// Writes results to `out: f32[n, heads, value_size]`.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, out: BufId) {
    let (n, t) = (kb.dim(&a.n), kb.dim(&a.t));
    let past = kb.sub(t, n);
    let past = kb.let_("first_position", past);
    let last = kb.add_int(t, -1);
    let prefix = a.prefix(kb);
    let positions = kb.int(params.positions);
    let tiles = ceil_div(kb, n, positions);
    let tiles = kb.let_("tiles", tiles);
    let items = kb.mul_int(tiles, a.kv);
    kb.par("item", items, |kb, item| {
        let (head, tile) = (kb.div(item, tiles), kb.rem(item, tiles));
        let first = kb.mul(tile, positions);
        let rest = kb.sub(n, first);
        let count = kb.min(rest, positions);
        let rows = params.tile_rows(a);
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let tile = Tile {
            a,
            params,
            q: floats(kb, "q", rows * a.size),
            k: floats(kb, "k", params.keys * a.size),
            v: floats(kb, "v", params.keys * a.value_size),
            s: floats(kb, "s", rows * params.keys),
            sums: floats(kb, "sums", rows * a.value_size),
            max: floats(kb, "max", rows),
            total: floats(kb, "total", rows),
            factor: floats(kb, "factor", rows),
            head: kb.let_("head", head),
            first: kb.let_("first", first),
            count: kb.let_("count", count),
            past,
            last,
            prefix,
        };
        tile.run(kb, out);
    });
}

impl Tile<'_> {
    fn run(&self, kb: &mut KernelBuilder, out: BufId) {
        self.clear(kb);
        let first = kb.add(self.past, self.first);
        let end = kb.add(first, self.count);
        if let Some(sinks) = self.a.sinks() {
            let last = kb.add_int(end, -1);
            let (zero, count) = (kb.int(0), self.a.sinks_behind(kb, last));
            Tile { a: &sinks, ..*self }.keys(kb, zero, count);
        }
        let start = self.a.first_key(kb, first);
        let end = self.prefix.map_or(end, |prefix| kb.max(end, prefix));
        self.keys(kb, start, end);
        self.store(kb, out);
    }

    /// Adds the keys `start..end`.
    fn keys(&self, kb: &mut KernelBuilder, start: ExprId, end: ExprId) {
        self.load_queries(kb);
        let keys = kb.sub(end, start);
        let keys = at_least_zero(kb, keys);
        let block = kb.int(self.params.keys);
        let blocks = ceil_div(kb, keys, block);
        kb.serial("block", blocks, |kb, i| {
            let at = kb.mul(i, block);
            let j = kb.add(start, at);
            let j = kb.let_("j", j);
            self.transpose_keys(kb, j);
            self.products(kb, j);
            self.softmax(kb);
            self.unpack_values(kb, j);
            self.mix(kb);
        });
    }

    /// Runs `body(row, position among the queries, query head)` for every row that stands for one.
    fn each_row(
        &self,
        kb: &mut KernelBuilder,
        body: impl FnOnce(&mut KernelBuilder, ExprId, ExprId, ExprId),
    ) {
        let group = kb.int(self.a.group);
        kb.serial("i", self.count, |kb, i| {
            kb.serial("g", group, |kb, g| {
                let row = kb.mul(i, group);
                let row = kb.add(row, g);
                let position = kb.add(self.first, i);
                let head = kb.mul(self.head, group);
                let head = kb.add(head, g);
                body(kb, row, position, head);
            });
        });
    }

    /// Rows in use, in whole register blocks.
    fn row_blocks(&self, kb: &mut KernelBuilder) -> ExprId {
        let rows = kb.mul_int(self.count, self.a.group);
        let block = kb.int(self.params.rows);
        ceil_div(kb, rows, block)
    }

    /// No keys seen yet; queries that stand for nothing are zero.
    fn clear(&self, kb: &mut KernelBuilder) {
        let (size, wide) = (self.a.size, self.a.value_size);
        let (lanes, value_lanes) = (lanes_of(size, self.params.lanes), lanes_of(wide, self.params.lanes));
        let blocks = self.row_blocks(kb);
        let rows = kb.mul_int(blocks, self.params.rows);
        kb.serial("row", rows, |kb, row| {
            let clear = |kb: &mut KernelBuilder, buf: BufId, size: i64, lanes: u32| {
                columns(kb, size, lanes, |kb, c| {
                    let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
                    let at = kb.mul_int(row, size);
                    let at = kb.add(at, c);
                    kb.store_vec(buf, at, nothing);
                });
            };
            clear(kb, self.q, size, lanes);
            clear(kb, self.sums, wide, value_lanes);
            let (hidden, nothing) = (kb.float(HIDDEN), kb.float(0.0));
            kb.store(self.max, row, hidden);
            kb.store(self.total, row, nothing);
        });
    }

    /// Scaled queries.
    fn load_queries(&self, kb: &mut KernelBuilder) {
        let lanes = lanes_of(self.a.size, self.params.lanes);
        self.each_row(kb, |kb, row, position, head| {
            columns(kb, self.a.size, lanes, |kb, c| {
                let value = self.a.query(kb, position, head, c, lanes);
                let at = kb.mul_int(row, self.a.size);
                let at = kb.add(at, c);
                kb.store_vec(self.q, at, value);
            });
        });
    }

    /// The row of key `j + i`; rows behind the last one stand in for none.
    fn row_of(&self, kb: &mut KernelBuilder, j: ExprId, i: ExprId) -> ExprId {
        let row = kb.add(j, i);
        let row = kb.min(row, self.last);
        kb.let_("row", row)
    }

    fn transpose_keys(&self, kb: &mut KernelBuilder, j: ExprId) {
        let (size, keys) = (self.a.size, self.params.keys);
        let lanes = lanes_of(size, self.params.lanes);
        let squares = kb.int(keys / i64::from(lanes));
        kb.serial("square", squares, |kb, square| {
            let from = kb.mul_int(square, i64::from(lanes));
            let rows: Vec<ExprId> = (0..i64::from(lanes))
                .map(|i| {
                    let i = kb.add_int(from, i);
                    self.row_of(kb, j, i)
                })
                .collect();
            columns(kb, size, lanes, |kb, c| {
                let vectors = rows
                    .iter()
                    .map(|&row| {
                        let value = self.a.key(kb, row, self.head, c, lanes);
                        kb.let_("k", value)
                    })
                    .collect();
                for (i, column) in transpose(kb, vectors).into_iter().enumerate() {
                    let at = kb.add_int(c, i as i64);
                    let at = kb.mul_int(at, keys);
                    let at = kb.add(at, from);
                    kb.store_vec(self.k, at, column);
                }
            });
        });
    }

    fn unpack_values(&self, kb: &mut KernelBuilder, j: ExprId) {
        let size = self.a.value_size;
        let lanes = lanes_of(size, self.params.lanes);
        let keys = kb.int(self.params.keys);
        kb.serial("i", keys, |kb, i| {
            let row = self.row_of(kb, j, i);
            columns(kb, size, lanes, |kb, c| {
                let value = self.a.value(kb, row, self.head, c, lanes);
                let at = kb.mul_int(i, size);
                let at = kb.add(at, c);
                kb.store_vec(self.v, at, value);
            });
        });
    }

    /// Scores of a block.
    fn products(&self, kb: &mut KernelBuilder, j: ExprId) {
        let (keys, size, lanes) = (self.params.keys, self.a.size, self.params.lanes);
        let blocks = self.row_blocks(kb);
        let vectors = self.params.vectors.min(keys / i64::from(lanes));
        let width = vectors * i64::from(lanes);
        kb.serial("rows", blocks, |kb, block| {
            let row = kb.mul_int(block, self.params.rows);
            let row = kb.let_("row", row);
            let groups = kb.int(keys / width);
            kb.serial("keys", groups, |kb, group| {
                let from = kb.mul_int(group, width);
                let from = kb.let_("from", from);
                let extent = kb.int(size);
                let tile = Product {
                    a: (self.q, row, size),
                    b: (self.k, from, keys),
                    lanes,
                    rows: self.params.rows,
                    vectors,
                };
                let sums = tile.emit(kb, extent, None);
                for (r, sums) in sums.into_iter().enumerate() {
                    let row = kb.add_int(row, r as i64);
                    let (p, slope) = self.query_of(kb, row);
                    for (v, s) in sums.into_iter().enumerate() {
                        let offset = kb.add_int(from, v as i64 * i64::from(lanes));
                        let key = kb.add(j, offset);
                        let place = Place { p, j: key, slope, prefix: self.prefix, end: None };
                        let s = self.a.score(kb, s, &place);
                        let at = kb.mul_int(row, keys);
                        let at = kb.add(at, offset);
                        kb.store_vec(self.s, at, s);
                    }
                }
            });
        });
    }

    /// Position in the sequence and slope of a row's query; rows that stand for nothing have those of the last query.
    fn query_of(&self, kb: &mut KernelBuilder, row: ExprId) -> (ExprId, Option<ExprId>) {
        let group = kb.int(self.a.group);
        let most = kb.add_int(self.count, -1);
        let i = kb.div(row, group);
        let i = kb.min(i, most);
        let p = kb.add(self.past, self.first);
        let p = kb.add(p, i);
        let p = kb.let_("p", p);
        let (g, head) = (kb.rem(row, group), kb.mul(self.head, group));
        let head = kb.add(head, g);
        (p, self.a.slope(kb, head))
    }

    /// Scores to weights, with the running maxima and sums.
    fn softmax(&self, kb: &mut KernelBuilder) {
        let lanes = self.params.lanes;
        let blocks = self.row_blocks(kb);
        let rows = kb.mul_int(blocks, self.params.rows);
        let vectors = self.params.keys / i64::from(lanes);
        kb.serial("row", rows, |kb, row| {
            let base = kb.mul_int(row, self.params.keys);
            let at = |kb: &mut KernelBuilder, v: i64| kb.add_int(base, v * i64::from(lanes));
            let all: Vec<ExprId> = (0..vectors)
                .map(|v| {
                    let at = at(kb, v);
                    let s = kb.load_vec(self.s, at, lanes);
                    kb.let_("s", s)
                })
                .collect();
            let most = all.iter().copied().reduce(|x, y| kb.max(x, y)).expect("a block has keys");
            let most = kb.reduce_lanes(BinOp::Max, most);
            let old = kb.load(self.max, row);
            let old = kb.let_("old", old);
            let max = kb.max(old, most);
            let max = kb.let_("max", max);
            let weights: Vec<ExprId> = all
                .iter()
                .map(|&s| {
                    let below = kb.sub(s, max);
                    let weight = kb.unary(UnOp::Exp, below);
                    kb.let_("weight", weight)
                })
                .collect();
            for (v, &weight) in weights.iter().enumerate() {
                let at = at(kb, v as i64);
                kb.store_vec(self.s, at, weight);
            }
            let sum = weights.into_iter().reduce(|x, y| kb.add(x, y)).expect("a block has keys");
            let sum = kb.reduce_lanes(BinOp::Add, sum);
            let fallen = kb.sub(old, max);
            let factor = kb.unary(UnOp::Exp, fallen);
            let factor = kb.let_("factor", factor);
            let total = kb.load(self.total, row);
            let total = kb.fma(total, factor, sum);
            kb.store(self.total, row, total);
            kb.store(self.max, row, max);
            kb.store(self.factor, row, factor);
        });
    }

    /// Adds the weighted values of a block to the sums.
    fn mix(&self, kb: &mut KernelBuilder) {
        let (size, keys) = (self.a.value_size, self.params.keys);
        let lanes = lanes_of(size, self.params.lanes);
        let vectors =
            if size % (self.params.vectors * i64::from(lanes)) == 0 { self.params.vectors } else { 1 };
        let width = vectors * i64::from(lanes);
        let blocks = self.row_blocks(kb);
        kb.serial("rows", blocks, |kb, block| {
            let row = kb.mul_int(block, self.params.rows);
            let row = kb.let_("row", row);
            let groups = kb.int(size / width);
            kb.serial("columns", groups, |kb, group| {
                let from = kb.mul_int(group, width);
                let from = kb.let_("from", from);
                let extent = kb.int(keys);
                let tile = Product {
                    a: (self.s, row, keys),
                    b: (self.v, from, size),
                    lanes,
                    rows: self.params.rows,
                    vectors,
                };
                let sums = tile.emit(kb, extent, Some((self.sums, self.factor)));
                for (r, sums) in sums.into_iter().enumerate() {
                    for (v, sum) in sums.into_iter().enumerate() {
                        let at = tile.place(kb, (r as i64, v as i64), size);
                        kb.store_vec(self.sums, at, sum);
                    }
                }
            });
        });
    }

    fn store(&self, kb: &mut KernelBuilder, out: BufId) {
        let size = self.a.value_size;
        let lanes = lanes_of(size, self.params.lanes);
        self.each_row(kb, |kb, row, position, head| {
            let (one, total) = (kb.float(1.0), kb.load(self.total, row));
            let factor = kb.div(one, total);
            let factor = kb.let_("factor", factor);
            let to = kb.mul_int(position, self.a.heads());
            let to = kb.add(to, head);
            let to = kb.mul_int(to, size);
            columns(kb, size, lanes, |kb, c| {
                let at = kb.mul_int(row, size);
                let at = kb.add(at, c);
                let value = kb.load_vec(self.sums, at, lanes);
                let value = kb.mul(value, factor);
                let at = kb.add(to, c);
                kb.store_vec(out, at, value);
            });
        });
    }
}

/// A block of a matrix product with its sums in registers: rows of `a` (buffer, first row, length of a row) times
/// columns of `b` (buffer, first column, length of a row).
struct Product {
    a: (BufId, ExprId, i64),
    b: (BufId, ExprId, i64),
    lanes: u32,
    rows: i64,
    vectors: i64,
}

impl Product {
    /// Place of a vector of the block in a matrix with rows of `width`.
    fn place(&self, kb: &mut KernelBuilder, (r, v): (i64, i64), width: i64) -> ExprId {
        let row = kb.add_int(self.a.1, r);
        let at = kb.mul_int(row, width);
        let column = kb.add_int(self.b.1, v * i64::from(self.lanes));
        kb.add(at, column)
    }

    /// The sums by row and vector, over `0..extent`; on top of those in `start` times the factors of the rows.
    fn emit(
        &self,
        kb: &mut KernelBuilder,
        extent: ExprId,
        start: Option<(BufId, BufId)>,
    ) -> Vec<Vec<ExprId>> {
        let (lanes, zero) = (self.lanes, kb.int(0));
        let mut sums: Vec<Vec<BufId>> = Vec::new();
        for r in 0..self.rows {
            let mut of_row = Vec::new();
            for v in 0..self.vectors {
                let sum = kb.alloc("sum", DType::F32, lanes as usize, Space::Local);
                let value = match start {
                    None => kb.constant(0.0, Ty::vector(DType::F32, lanes)),
                    Some((old, factor)) => {
                        let row = kb.add_int(self.a.1, r);
                        let factor = kb.load(factor, row);
                        let at = self.place(kb, (r, v), self.b.2);
                        let old = kb.load_vec(old, at, lanes);
                        kb.mul(old, factor)
                    }
                };
                kb.store_vec(sum, zero, value);
                of_row.push(sum);
            }
            sums.push(of_row);
        }
        kb.serial("k", extent, |kb, k| {
            let base = kb.mul_int(k, self.b.2);
            let base = kb.add(base, self.b.1);
            let b: Vec<ExprId> = (0..self.vectors)
                .map(|v| {
                    let at = kb.add_int(base, v * i64::from(lanes));
                    let value = kb.load_vec(self.b.0, at, lanes);
                    kb.let_("b", value)
                })
                .collect();
            for (r, of_row) in sums.iter().enumerate() {
                let row = kb.add_int(self.a.1, r as i64);
                let at = kb.mul_int(row, self.a.2);
                let at = kb.add(at, k);
                let value = kb.load(self.a.0, at);
                let value = kb.splat(value, lanes);
                for (&sum, &b) in of_row.iter().zip(&b) {
                    let old = kb.load_vec(sum, zero, lanes);
                    let new = kb.fma(value, b, old);
                    kb.store_vec(sum, zero, new);
                }
            }
        });
        let load = |kb: &mut KernelBuilder, &sum: &BufId| {
            let value = kb.load_vec(sum, zero, lanes);
            kb.let_("product", value)
        };
        sums.iter().map(|row| row.iter().map(|sum| load(kb, sum)).collect()).collect()
    }
}

/// Rows of a square to its columns, by exchanging ever smaller quarters (Eklundh 1972).
fn transpose(kb: &mut KernelBuilder, mut rows: Vec<ExprId>) -> Vec<ExprId> {
    let lanes = rows.len() as u32;
    let mut half = lanes / 2;
    while half > 0 {
        for i in (0..lanes).filter(|i| i & half == 0) {
            let (a, b) = (rows[i as usize], rows[(i + half) as usize]);
            // Lane l of the results, in terms of a followed by b.
            let low = (0..lanes).map(|l| if l & half == 0 { l } else { lanes + l - half }).collect();
            let high = (0..lanes).map(|l| if l & half == 0 { l + half } else { lanes + l }).collect();
            let (low, high) = (kb.shuffle(a, Some(b), low), kb.shuffle(a, Some(b), high));
            rows[i as usize] = kb.let_("t", low);
            rows[(i + half) as usize] = kb.let_("t", high);
        }
        half /= 2;
    }
    rows
}
