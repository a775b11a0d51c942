//! A tile of prefill attention: some positions with all query heads of a key head, and its buffers on the
//! stack.

use super::plan::{PrefillPlan, lanes_of};
use super::problem::{AttentionProblem, KeySubset, MASKED};
use crate::inline::CachePage;
use mlcc_ir::ops::AttentionOp;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

#[derive(Clone, Copy)]
pub(super) struct QueryTile<'k, 'a> {
    pub rec: &'k Recorder,
    pub a: &'k AttentionProblem<'a>,
    pub plan: PrefillPlan,
    /// Queries, transposed by sets of rows: `[sets * size, rows]`. As words `[sets * size / 2, rows]`.
    pub q: BufferView<'k, 2>,
    /// The rows of a set before that, `[rows, size]`, or as words.
    pub query: BufferView<'k, 2>,
    /// Keys and values of a block: `[keys, size]`, `[keys, value_size]`. As words `[keys, size / 2]`,
    /// `[keys / 2, value_size]`.
    pub k: BufferView<'k, 2>,
    pub v: BufferView<'k, 2>,
    /// Scores, then weights, of a set of rows: `[keys, rows]`.
    pub s: BufferView<'k, 2>,
    /// Largest scores of a set of rows in a block, and what a change of maxima makes of older sums.
    pub block_max: BufferView<'k, 1>,
    pub rescale: BufferView<'k, 1>,
    /// `[rows, value_size]`.
    pub accumulators: BufferView<'k, 2>,
    /// For each row: running maxima and sums of weights, positions in the sequence (`i32`) and slopes.
    pub max: BufferView<'k, 1>,
    pub row_sum: BufferView<'k, 1>,
    pub positions: BufferView<'k, 1>,
    pub slopes: Option<BufferView<'k, 1>>,
    /// Terms of the scores of a block: those of key `i` from `(keys - 1 - i) * group` on, by row.
    pub terms: Option<BufferView<'k, 1>>,
    pub head: Val<'k>,
    /// First position of the tile among the queries, how many it has, position of the first query in the
    /// sequence.
    pub first: Val<'k>,
    pub count: Val<'k>,
    pub past: Val<'k>,
    /// The last key.
    pub last: Val<'k>,
    pub prefix: Option<Val<'k>>,
    /// See [`AttentionProblem::span_end`].
    pub border: Option<Val<'k>>,
    /// The page of the block of keys.
    pub page: Option<CachePage<'k>>,
}

impl<'k> QueryTile<'k, '_> {
    /// The first row that sees key `j` or a later one.
    pub fn first_row(&self, j: Val<'k>) -> Val<'k> {
        let zero = self.rec.int(0);
        if self.a.keys == KeySubset::Sinks || self.a.op.ahead == AttentionOp::ALL {
            return zero;
        }
        let before = match self.a.op.ahead {
            0 => j - (self.past + self.first),
            ahead => j - (self.past + self.first + ahead as i64),
        };
        let row = before.max(0) * self.a.group;
        self.prefix.map_or(row, |prefix| j.lt(prefix).select(zero, row))
    }

    /// Sets of rows in use.
    pub fn sets(&self) -> Val<'k> {
        (self.count * self.a.group).div_ceil(self.plan.set).named("sets")
    }

    /// Runs `body(row, position among the queries, query head)` for every row that has a query.
    fn each_row(&self, body: impl FnOnce(Val<'k>, Val<'k>, Val<'k>)) {
        let group = self.a.group;
        self.rec.serial("i", self.count, |i| {
            self.rec.serial("g", group, |g| body(i * group + g, self.first + i, self.head * group + g));
        });
    }

    /// No keys seen yet but that without a value. Rows after the last one in use have the queries and
    /// positions of the last position.
    pub fn clear(&self) {
        let (k, size) = (self.rec, self.a.value_size);
        k.serial("row", self.sets() * self.plan.set, |row| {
            self.accumulators.row(row).fill(size, k.zeros(DType::F32, lanes_of(size, self.plan.lanes)));
            let p = self.position(row).cast(DType::I32);
            self.positions.set([row], p);
            self.row_sum.set([row], k.float(0.0));
            self.max.set([row], k.float(MASKED));
            if let Some(logit) = self.a.null_logit(self.head_of(row)) {
                self.max.set([row], logit);
                self.row_sum.set([row], k.float(1.0));
            }
            let slope = |slopes: BufferView<'k, 1>| Some((slopes, self.a.slope(self.head_of(row))?));
            if let Some((slopes, slope)) = self.slopes.and_then(slope) {
                slopes.set([row], slope);
            }
        });
    }

    /// Terms of the rows' scores against the keys of the block from `j` on: there are as many as there are
    /// distances.
    pub fn load_terms(&self, j: Val<'k>) {
        let (Some(terms), k, group) = (self.terms, self.rec, self.a.group) else { return };
        let distances = (self.sets() * self.plan.set).div_ceil(group) + (self.plan.keys - 1);
        let farthest = (j + (self.plan.keys - 1) - self.past - self.first).named("distance");
        k.serial("distance", distances, |i| {
            let column = self.a.column_of_terms(farthest - i);
            k.serial("g", group, |g| {
                if let Some(term) = self.a.term(column, self.head * group + g) {
                    terms.set([i * group + g], term);
                }
            });
        });
    }

    /// The row of key `j + i`; keys after the last one repeat its row.
    pub fn key_row(&self, j: Val<'k>, i: Val<'k>) -> Val<'k> {
        (j + i).min(self.last).named("row")
    }

    /// Prefetches some rows of the keys and values of the block after that from row `j` on: turn `turn` of
    /// those that share them.
    pub fn prefetch(&self, j: Val<'k>, turn: Val<'k>) {
        let first = turn * self.plan.rows_ahead + self.plan.keys;
        for i in 0..self.plan.rows_ahead {
            let row = self.key_row(j, first + i);
            let page = self.a.page(row);
            for ahead in self.plan.prefetch.into_iter().flatten() {
                let rows = ahead.rows;
                let cache = rows.in_page(self.rec.view(rows.buf, [1, self.a.kv, rows.size]), page);
                for column in (0..rows.size).step_by(ahead.line_elements() as usize) {
                    cache.prefetch(ahead.instr, [row, self.head, self.rec.int(column)]);
                }
            }
        }
    }

    /// Reads a byte of each line of `heads` key heads of the block from row `j` on, in the order of memory.
    pub fn touch_rows(&self, (j, count): (Val<'k>, Val<'k>), heads: Val<'k>) {
        let page = self.a.page(j).map(CachePage::named);
        for touch in self.plan.touch.into_iter().flatten() {
            let (rows, line) = (touch.rows, touch.line_elements());
            let cache = rows.in_page(self.rec.view(rows.buf, [1, self.a.kv, rows.size]), page);
            let last = (heads * rows.size + -1).named("last_element");
            self.rec.serial("key", count, |i| {
                let row = self.key_row(j, i);
                self.rec.steps("line", (heads * rows.size).div_ceil(line), line, |at| {
                    cache.prefetch(touch.instr, [row, self.head, at.min(last)]);
                });
            });
        }
    }

    /// Position of a row's query among the queries.
    pub fn query_of(&self, row: Val<'k>) -> Val<'k> {
        (self.first + (row / self.a.group).min(self.count + -1)).named("position")
    }

    /// Position of a row's query in the sequence.
    pub fn position(&self, row: Val<'k>) -> Val<'k> {
        (self.past + self.query_of(row)).named("p")
    }

    /// Query head of a row.
    pub fn head_of(&self, row: Val<'k>) -> Val<'k> {
        self.head * self.a.group + row % self.a.group
    }

    /// Stores the sums over the sums of weights in `out: [n, heads, value_size]`.
    pub fn store(&self, out: BufferView<'k, 3>) {
        let (k, size) = (self.rec, self.a.value_size);
        let lanes = lanes_of(size, self.plan.lanes);
        self.each_row(|row, position, head| {
            let factor = (k.float(1.0) / self.row_sum.at([row])).named("factor");
            k.vectors("c", size, lanes, |c| {
                out.set([position, head, c], self.accumulators.load([row, c], lanes) * factor);
            });
        });
    }
}
