//! Attention of one query on a CPU. All query heads of a key head go together over its keys. The work is shared by key
//! heads and, where the cache is long, by slices of it; then each slice leaves unfinished sums, and a second kernel joins
//! them ("flash-decoding").

use super::{HIDDEN, Place, Problem, at_least_zero, ceil_div, lanes_of, most_slices, slices};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, BufId, ExprId, Space, Ty, UnOp};
use mlcc_ir::types::DType;

/// Items of work that the widest machines should find.
const ITEMS: i64 = 32;

/// Sizes of the schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    /// Lanes of a vector of scores, and keys of a block.
    pub lanes: u32,
    /// Most slices of the cache; one needs no second kernel.
    pub slices: i64,
}

impl Params {
    pub fn choose(a: &Problem, lanes: u32) -> Params {
        Params { lanes, slices: most_slices(a.kv, ITEMS) }
    }
    /// Floats of one head's unfinished sums: values, then maximum and sum of weights.
    pub fn partial(a: &Problem) -> i64 {
        (a.value_size + 2 + 15) / 16 * 16
    }
}

/// Buffers of one item on the stack.
#[derive(Clone, Copy)]
struct Item {
    q: BufId,
    /// Unpacked keys or values of a block.
    rows: BufId,
    weights: BufId,
    sums: BufId,
    max: BufId,
    total: BufId,
    head: ExprId,
    /// Keys of this item.
    start: ExprId,
    end: ExprId,
    p: ExprId,
    last: ExprId,
    prefix: Option<ExprId>,
}

/// Writes results to `out: f32[heads, value_size]`, or with several slices unfinished sums, `f32[slices, heads, partial]`.
pub fn emit(kb: &mut KernelBuilder, a: &Problem, params: Params, out: BufId) {
    let t = kb.dim(&a.t);
    let last = kb.add_int(t, -1);
    let prefix = a.prefix(kb);
    let first = a.first_key(kb, last);
    let (used, part) = slices(kb, first, t, params.slices, i64::from(params.lanes));
    let items = kb.mul_int(used, a.kv);
    kb.par("item", items, |kb, item| {
        let kv = kb.int(a.kv);
        let (slice, head) = (kb.div(item, kv), kb.rem(item, kv));
        let from = kb.mul(slice, part);
        let start = kb.add(first, from);
        let end = kb.add(start, part);
        let end = kb.min(end, t);
        let floats = |kb: &mut KernelBuilder, name: &str, len: i64| {
            kb.alloc(name, DType::F32, len as usize, Space::Stack)
        };
        let block = i64::from(params.lanes);
        let item = Item {
            q: floats(kb, "q", a.group * a.size),
            rows: floats(kb, "rows", block * a.size.max(a.value_size)),
            weights: floats(kb, "weights", a.group * block),
            sums: floats(kb, "sums", a.group * a.value_size),
            max: floats(kb, "max", a.group),
            total: floats(kb, "total", a.group),
            head: kb.let_("head", head),
            start: kb.let_("start", start),
            end: kb.let_("end", end),
            p: last,
            last,
            prefix,
        };
        item.clear(kb, a, params);
        if let Some(sinks) = a.sinks() {
            // With the first slice.
            let (zero, all) = (kb.int(0), a.sinks_behind(kb, last));
            let later = kb.lt(zero, slice);
            let count = kb.select(later, zero, all);
            let end = kb.let_("sinks", count);
            Item { start: zero, end, ..item }.run(kb, &sinks, params);
        }
        item.run(kb, a, params);
        item.store(kb, a, params, slice, out);
    });
}

impl Item {
    /// Adds the keys `start..end`.
    fn run(&self, kb: &mut KernelBuilder, a: &Problem, params: Params) {
        self.load_queries(kb, a, params);
        let block = i64::from(params.lanes);
        let keys = kb.sub(self.end, self.start);
        let keys = at_least_zero(kb, keys);
        let block = kb.int(block);
        let blocks = ceil_div(kb, keys, block);
        kb.serial("block", blocks, |kb, i| {
            let at = kb.mul(i, block);
            let j = kb.add(self.start, at);
            let j = kb.let_("j", j);
            self.scores(kb, a, params, j);
            self.mix(kb, a, params, j);
        });
    }

    /// Scaled queries.
    fn load_queries(&self, kb: &mut KernelBuilder, a: &Problem, params: Params) {
        let lanes = lanes_of(a.size, params.lanes);
        let (group, zero) = (kb.int(a.group), kb.int(0));
        kb.serial("g", group, |kb, g| {
            let base = kb.mul_int(self.head, a.group);
            let head = kb.add(base, g);
            columns(kb, a.size, lanes, |kb, c| {
                let value = a.query(kb, zero, head, c, lanes);
                let row = kb.mul_int(g, a.size);
                let at = kb.add(row, c);
                kb.store_vec(self.q, at, value);
            });
        });
    }

    /// No keys seen yet.
    fn clear(&self, kb: &mut KernelBuilder, a: &Problem, params: Params) {
        let wide = lanes_of(a.value_size, params.lanes);
        let group = kb.int(a.group);
        kb.serial("g", group, |kb, g| {
            columns(kb, a.value_size, wide, |kb, c| {
                let nothing = kb.constant(0.0, Ty::vector(DType::F32, wide));
                let row = kb.mul_int(g, a.value_size);
                let at = kb.add(row, c);
                kb.store_vec(self.sums, at, nothing);
            });
            let (hidden, nothing) = (kb.float(HIDDEN), kb.float(0.0));
            kb.store(self.max, g, hidden);
            kb.store(self.total, g, nothing);
        });
    }

    /// The row of key `j + i`; rows behind the last one stand in for none.
    fn row_of(&self, kb: &mut KernelBuilder, j: ExprId, i: ExprId) -> ExprId {
        let row = kb.add(j, i);
        let row = kb.min(row, self.last);
        kb.let_("row", row)
    }

    /// Unpacks the rows of a block.
    fn unpack(
        &self,
        kb: &mut KernelBuilder,
        params: Params,
        (size, j): (i64, ExprId),
        load: impl Fn(&mut KernelBuilder, ExprId, ExprId, u32) -> ExprId,
    ) {
        let lanes = lanes_of(size, params.lanes);
        let block = kb.int(i64::from(params.lanes));
        kb.serial("i", block, |kb, i| {
            let row = self.row_of(kb, j, i);
            columns(kb, size, lanes, |kb, c| {
                let value = load(kb, row, c, lanes);
                let base = kb.mul_int(i, size);
                let at = kb.add(base, c);
                kb.store_vec(self.rows, at, value);
            });
        });
    }

    /// Weights of the keys of a block for every head, with the running maxima and sums.
    fn scores(&self, kb: &mut KernelBuilder, a: &Problem, params: Params, j: ExprId) {
        self.unpack(kb, params, (a.size, j), |kb, row, c, lanes| a.key(kb, row, self.head, c, lanes));
        let group = kb.int(a.group);
        kb.serial("g", group, |kb, g| {
            let products = self.products(kb, a, params, g);
            let base = kb.mul_int(self.head, a.group);
            let head = kb.add(base, g);
            let slope = a.slope(kb, head);
            let place = Place { p: self.p, j, slope, prefix: self.prefix, end: Some(self.end) };
            let s = a.score(kb, products, &place);
            let s = kb.let_("s", s);
            let most = kb.reduce_lanes(BinOp::Max, s);
            let old = kb.load(self.max, g);
            let old = kb.let_("old", old);
            let max = kb.max(old, most);
            let max = kb.let_("max", max);
            let shifted = kb.sub(s, max);
            let weights = kb.unary(UnOp::Exp, shifted);
            let weights = kb.let_("weights", weights);
            let fallen = kb.sub(old, max);
            let factor = kb.unary(UnOp::Exp, fallen);
            let factor = kb.let_("factor", factor);
            let sum = kb.reduce_lanes(BinOp::Add, weights);
            let total = kb.load(self.total, g);
            let total = kb.fma(total, factor, sum);
            kb.store(self.total, g, total);
            kb.store(self.max, g, max);
            let at = kb.mul_int(g, i64::from(params.lanes));
            kb.store_vec(self.weights, at, weights);
            // Older sums count less by the same factor.
            let same = kb.float(1.0);
            let changed = kb.binary(BinOp::Ne, factor, same);
            kb.if_(changed, |kb| {
                let lanes = lanes_of(a.value_size, params.lanes);
                columns(kb, a.value_size, lanes, |kb, c| {
                    let row = kb.mul_int(g, a.value_size);
                    let at = kb.add(row, c);
                    let old = kb.load_vec(self.sums, at, lanes);
                    let new = kb.mul(old, factor);
                    kb.store_vec(self.sums, at, new);
                });
            });
        });
    }

    /// Products of one query with all keys of the block, one per lane.
    fn products(&self, kb: &mut KernelBuilder, a: &Problem, params: Params, g: ExprId) -> ExprId {
        let lanes = lanes_of(a.size, params.lanes);
        let query = kb.mul_int(g, a.size);
        let zero = kb.int(0);
        let sums: Vec<BufId> =
            (0..params.lanes).map(|_| kb.alloc("sum", DType::F32, lanes as usize, Space::Local)).collect();
        for &sum in &sums {
            let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
            kb.store_vec(sum, zero, nothing);
        }
        columns(kb, a.size, lanes, |kb, c| {
            let at = kb.add(query, c);
            let q = kb.load_vec(self.q, at, lanes);
            let q = kb.let_("q", q);
            for (i, &sum) in sums.iter().enumerate() {
                let at = kb.add_int(c, i as i64 * a.size);
                let k = kb.load_vec(self.rows, at, lanes);
                let old = kb.load_vec(sum, zero, lanes);
                let new = kb.fma(q, k, old);
                kb.store_vec(sum, zero, new);
            }
        });
        let vectors: Vec<ExprId> = sums.iter().map(|&sum| kb.load_vec(sum, zero, lanes)).collect();
        sum_rows(kb, vectors)
    }

    /// Adds the weighted values of a block to the sums.
    fn mix(&self, kb: &mut KernelBuilder, a: &Problem, params: Params, j: ExprId) {
        self.unpack(kb, params, (a.value_size, j), |kb, row, c, lanes| a.value(kb, row, self.head, c, lanes));
        let lanes = lanes_of(a.value_size, params.lanes);
        let vectors = a.value_size / i64::from(lanes);
        // Independent sums hide the latency of each.
        let together = [4, 2, 1].into_iter().find(|u| vectors % u == 0).unwrap_or(1);
        let group = kb.int(a.group);
        kb.serial("g", group, |kb, g| {
            let (row, weights) = (kb.mul_int(g, a.value_size), kb.mul_int(g, i64::from(params.lanes)));
            let steps = kb.int(vectors / together);
            kb.serial("c", steps, |kb, step| {
                let c = kb.mul_int(step, together * i64::from(lanes));
                let zero = kb.int(0);
                let places: Vec<(BufId, ExprId)> = (0..together)
                    .map(|u| {
                        let sum = kb.alloc("sum", DType::F32, lanes as usize, Space::Local);
                        let c = kb.add_int(c, u * i64::from(lanes));
                        let at = kb.add(row, c);
                        let old = kb.load_vec(self.sums, at, lanes);
                        kb.store_vec(sum, zero, old);
                        (sum, c)
                    })
                    .collect();
                for i in 0..i64::from(params.lanes) {
                    let at = kb.add_int(weights, i);
                    let weight = kb.load(self.weights, at);
                    let weight = kb.splat(weight, lanes);
                    for &(sum, c) in &places {
                        let at = kb.add_int(c, i * a.value_size);
                        let value = kb.load_vec(self.rows, at, lanes);
                        let old = kb.load_vec(sum, zero, lanes);
                        let new = kb.fma(weight, value, old);
                        kb.store_vec(sum, zero, new);
                    }
                }
                for &(sum, c) in &places {
                    let value = kb.load_vec(sum, zero, lanes);
                    let at = kb.add(row, c);
                    kb.store_vec(self.sums, at, value);
                }
            });
        });
    }

    fn store(&self, kb: &mut KernelBuilder, a: &Problem, params: Params, slice: ExprId, out: BufId) {
        let lanes = lanes_of(a.value_size, params.lanes);
        let group = kb.int(a.group);
        kb.serial("g", group, |kb, g| {
            let base = kb.mul_int(self.head, a.group);
            let head = kb.add(base, g);
            let total = kb.load(self.total, g);
            let (from, factor) = if params.slices == 1 {
                let one = kb.float(1.0);
                (kb.mul_int(head, a.value_size), Some(kb.div(one, total)))
            } else {
                let before = kb.mul_int(slice, a.heads());
                let row = kb.add(before, head);
                (kb.mul_int(row, Params::partial(a)), None)
            };
            let factor = factor.map(|f| kb.let_("factor", f));
            columns(kb, a.value_size, lanes, |kb, c| {
                let row = kb.mul_int(g, a.value_size);
                let at = kb.add(row, c);
                let value = kb.load_vec(self.sums, at, lanes);
                let value = factor.map_or(value, |f| kb.mul(value, f));
                let at = kb.add(from, c);
                kb.store_vec(out, at, value);
            });
            if params.slices > 1 {
                let max = kb.load(self.max, g);
                for (i, value) in [max, total].into_iter().enumerate() {
                    let at = kb.add_int(from, a.value_size + i as i64);
                    kb.store(out, at, value);
                }
            }
        });
    }
}

/// Joins the unfinished sums of all slices: `partial: f32[slices, heads, partial]` to `out: f32[heads, value_size]`.
pub fn emit_merge(kb: &mut KernelBuilder, a: &Problem, params: Params, partial: BufId, out: BufId) {
    let t = kb.dim(&a.t);
    let last = kb.add_int(t, -1);
    let first = a.first_key(kb, last);
    let (used, _) = slices(kb, first, t, params.slices, i64::from(params.lanes));
    let heads = kb.int(a.heads());
    kb.par("head", heads, |kb, head| {
        let weights = kb.alloc("weights", DType::F32, params.slices as usize, Space::Stack);
        let total = join(kb, a, partial, weights, used, head);
        let lanes = lanes_of(a.value_size, params.lanes);
        columns(kb, a.value_size, lanes, |kb, c| {
            let sum = weighted(kb, a, partial, weights, used, (head, c, lanes));
            let value = kb.div(sum, total);
            let row = kb.mul_int(head, a.value_size);
            let at = kb.add(row, c);
            kb.store_vec(out, at, value);
        });
    });
}

/// Start of a head's unfinished sums in a slice.
pub(super) fn partial_row(kb: &mut KernelBuilder, a: &Problem, slice: ExprId, row: ExprId) -> ExprId {
    let before = kb.mul_int(slice, a.heads());
    let row = kb.add(before, row);
    kb.mul_int(row, Params::partial(a))
}

/// Stores the weight of each slice and gives the sum of all weights.
fn join(
    kb: &mut KernelBuilder,
    a: &Problem,
    partial: BufId,
    weights: BufId,
    used: ExprId,
    head: ExprId,
) -> ExprId {
    let zero = kb.int(0);
    let cell = |kb: &mut KernelBuilder, name: &str, value: f64| {
        let buf = kb.alloc(name, DType::F32, 1, Space::Local);
        let value = kb.float(value);
        kb.store(buf, zero, value);
        buf
    };
    let (max, total) = (cell(kb, "max", HIDDEN), cell(kb, "total", 0.0));
    kb.serial("slice", used, |kb, slice| {
        let row = partial_row(kb, a, slice, head);
        let at = kb.add_int(row, a.value_size);
        let (here, old) = (kb.load(partial, at), kb.load(max, zero));
        let new = kb.max(here, old);
        kb.store(max, zero, new);
    });
    let most = kb.load(max, zero);
    let most = kb.let_("most", most);
    kb.serial("slice", used, |kb, slice| {
        let row = partial_row(kb, a, slice, head);
        let at = kb.add_int(row, a.value_size);
        let here = kb.load(partial, at);
        let below = kb.sub(here, most);
        let weight = kb.unary(UnOp::Exp, below);
        let weight = kb.let_("weight", weight);
        kb.store(weights, slice, weight);
        let at = kb.add_int(row, a.value_size + 1);
        let (sum, old) = (kb.load(partial, at), kb.load(total, zero));
        let new = kb.fma(weight, sum, old);
        kb.store(total, zero, new);
    });
    let total = kb.load(total, zero);
    kb.let_("total", total)
}

/// The weighted sum over slices of `lanes` values from column `c` of a head.
fn weighted(
    kb: &mut KernelBuilder,
    a: &Problem,
    partial: BufId,
    weights: BufId,
    used: ExprId,
    (head, c, lanes): (ExprId, ExprId, u32),
) -> ExprId {
    let zero = kb.int(0);
    let sum = kb.alloc("sum", DType::F32, lanes as usize, Space::Local);
    let nothing = kb.constant(0.0, Ty::vector(DType::F32, lanes));
    kb.store_vec(sum, zero, nothing);
    kb.serial("slice", used, |kb, slice| {
        let row = partial_row(kb, a, slice, head);
        let at = kb.add(row, c);
        let value = kb.load_vec(partial, at, lanes);
        let weight = kb.load(weights, slice);
        let old = kb.load_vec(sum, zero, lanes);
        let new = kb.fma(weight, value, old);
        kb.store_vec(sum, zero, new);
    });
    let sum = kb.load_vec(sum, zero, lanes);
    kb.let_("sum", sum)
}

/// A serial loop over vectors of columns.
pub(super) fn columns(
    kb: &mut KernelBuilder,
    size: i64,
    lanes: u32,
    body: impl FnOnce(&mut KernelBuilder, ExprId),
) {
    let count = kb.int(size / i64::from(lanes));
    kb.serial("c", count, |kb, i| {
        let c = kb.mul_int(i, i64::from(lanes));
        body(kb, c);
    });
}

/// Sums of the lanes of each vector, one per lane of the result. As many vectors as a power of two; where they have
/// fewer lanes than there are vectors, the sums come one by one.
fn sum_rows(kb: &mut KernelBuilder, vectors: Vec<ExprId>) -> ExprId {
    let count = vectors.len() as u32;
    let lanes = kb.ty(vectors[0]).lanes;
    if lanes != count {
        let buf = kb.alloc("products", DType::F32, count as usize, Space::Stack);
        for (i, &v) in vectors.iter().enumerate() {
            let sum = kb.reduce_lanes(BinOp::Add, v);
            let at = kb.int(i as i64);
            kb.store(buf, at, sum);
        }
        let zero = kb.int(0);
        let all = kb.load_vec(buf, zero, count);
        return kb.let_("products", all);
    }
    // Each round joins pairs of vectors and halves the lanes that belong to one row.
    let (mut vectors, mut width) = (vectors, lanes);
    while vectors.len() > 1 {
        let half = width / 2;
        let pick = |upper: u32| -> Vec<u32> {
            let starts = (0..2 * lanes).step_by(width as usize).map(|start| start + upper * half);
            starts.flat_map(|start| start..start + half).collect()
        };
        vectors = vectors
            .chunks(2)
            .map(|pair| {
                let low = kb.shuffle(pair[0], Some(pair[1]), pick(0));
                let high = kb.shuffle(pair[0], Some(pair[1]), pick(1));
                let sum = kb.add(low, high);
                kb.let_("sums", sum)
            })
            .collect();
        width = half;
    }
    vectors[0]
}
