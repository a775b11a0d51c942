//! The scan with lanes over rows, for CPUs and several steps: the state of a block of rows is copied to the stack
//! transposed, so that sums over the columns need no sum over lanes, and every number along the columns is broadcast once
//! for several vectors of rows.
//!
//! A step takes one pass over the columns for each level of reductions: values that need no reduction, then those that need
//! the results of the first pass, and so on; the last pass writes the new state. The first pass of the next step is made
//! together with it, so that each state is loaded and stored once per step and level.

mod copy;

use super::arithmetic::Arithmetic;
use super::step::Tile;
use super::{RowScan, Shape};
use copy::Direction;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::graph::{Node, ValueId};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprId, Space, Stmt, Ty};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Most bytes of state on the stack.
const MOST_BYTES: i64 = 64 << 10;
/// Elements of a cache line.
const LINE: i64 = 16;
/// How many steps ahead sequences are asked for: their rows are far apart, which the hardware does not foresee.
const AHEAD: i64 = 2;

pub(super) struct Transposed<'a> {
    scan: &'a RowScan<'a>,
    arithmetic: Arithmetic<'a>,
    /// Reductions over the columns that come before a value, by value.
    depth: Vec<usize>,
    /// The pass that writes the states.
    last: usize,
    lanes: u32,
    /// Vectors of rows that run together.
    vectors: usize,
    prefetch: Option<InstrId>,
}

/// Vectors of rows, or one number for all rows.
type Pieces = Vec<ExprId>;
type Values = HashMap<ValueId, Pieces>;

/// Rows that run together, and their states.
struct Block {
    tile: Tile,
    states: Vec<BufId>,
}

/// A step and its values that have no columns.
struct Token {
    time: ExprId,
    values: Values,
}

/// What a pass has summed up of each reduction.
type Sums<'a> = Vec<(&'a Node, BufId)>;

impl<'a> Transposed<'a> {
    /// `None` if the scan has no such form: states have rows and columns, sequences and results one of them; whole vectors of
    /// rows. A single step has nothing to gain.
    pub fn new(scan: &'a RowScan<'a>, lanes: u32, prefetch: Option<InstrId>) -> Option<Transposed<'a>> {
        let Shape { rows, columns, .. } = scan.shape;
        let most = if lanes == 16 { 4 } else { 2 };
        let fits = |v: &i64| {
            let block = v * i64::from(lanes);
            rows % block == 0 && 4 * block * columns * scan.carries as i64 <= MOST_BYTES
        };
        let vectors = [4, 2, 1].into_iter().filter(|&v| v <= most).find(fits)? as usize;
        let (carries, others) = scan.body.inputs.split_at(scan.carries);
        let matrix = |v: &ValueId| {
            let extent = scan.extent(*v);
            extent.rows && extent.columns
        };
        let plain = carries.iter().all(matrix)
            && !others.iter().any(matrix)
            && !scan.body.outputs[scan.carries..].iter().any(|v| scan.extent(*v).columns);
        if !plain || columns < 2 || lanes < 2 || scan.length.as_const() == Some(1) {
            return None;
        }
        let arithmetic = Arithmetic::new(scan.body);
        let mut all = Transposed { scan, arithmetic, depth: vec![], last: 0, lanes, vectors, prefetch };
        all.count_reductions();
        Some(all)
    }

    /// Of a block.
    pub fn block_rows(&self) -> i64 {
        self.vectors as i64 * i64::from(self.lanes)
    }

    fn count_reductions(&mut self) {
        let body = self.scan.body;
        self.depth = vec![0; body.values.len()];
        for (_, node) in body.live() {
            let before = node.inputs.iter().map(|v| self.depth[v.0 as usize]).max().unwrap_or(0);
            let own = usize::from(self.sums_columns(node));
            self.depth[node.outputs[0].0 as usize] = before + own;
        }
        let new = body.outputs[..self.scan.carries].iter().map(|v| self.depth_of(*v));
        let sums = body.live().map(|(_, n)| n).filter(|n| self.sums_columns(n));
        self.last = new.chain(sums.map(|n| self.depth_of(n.outputs[0]) - 1)).max().unwrap_or(0);
    }

    fn depth_of(&self, v: ValueId) -> usize {
        self.depth[v.0 as usize]
    }

    fn has_columns(&self, v: ValueId) -> bool {
        self.scan.extent(v).columns
    }

    /// True for a reduction over more than one element.
    fn sums_columns(&self, node: &Node) -> bool {
        matches!(node.op, Op::Reduce { .. }) && self.has_columns(node.inputs[0])
    }

    /// Number of pieces and lanes of each.
    fn pieces(&self, v: ValueId) -> (usize, u32) {
        if self.scan.extent(v).rows { (self.vectors, self.lanes) } else { (1, 1) }
    }

    /// Kernel body.
    pub fn emit(&self, kb: &mut KernelBuilder) {
        let Shape { heads, rows, .. } = self.scan.shape;
        let per_head = rows / self.block_rows();
        let blocks = kb.int(heads * per_head);
        kb.par("block", blocks, |kb, block| {
            let by = kb.int(per_head);
            let (head, part) = (kb.div(block, by), kb.rem(block, by));
            let row = kb.mul_int(part, self.block_rows());
            let row = kb.let_("row", row);
            let tile = Tile { head, row, rows: 1 };
            let len = (self.scan.shape.columns * self.block_rows()) as usize;
            let states =
                (0..self.scan.carries).map(|_| kb.alloc("state", DType::F32, len, Space::Stack)).collect();
            let block = Block { tile, states };
            self.copy_states(kb, &block, Direction::In);
            self.steps(kb, &block);
            self.copy_states(kb, &block, Direction::Out);
        });
    }

    fn steps(&self, kb: &mut KernelBuilder, block: &Block) {
        let (zero, steps) = (kb.int(0), kb.dim(&self.scan.length));
        let final_step = kb.add_int(steps, -1);
        let mut constants = Values::new();
        self.load_rows(kb, block, zero, self.constants(), &mut constants);
        // The first pass of a step: made before the first one, then by the last pass of the step before.
        let early = self.last > 0;
        let [first, next] = [(); 2].map(|()| if early { self.alloc_sums(kb, 0) } else { Sums::new() });
        if early {
            let token = self.token(kb, block, zero, &constants);
            self.clear(kb, &first);
            self.pass(kb, block, (&token, &first), 0, None);
        }
        kb.serial("step", steps, |kb, time| {
            let mut token = self.token(kb, block, time, &constants);
            if early {
                self.add_results(kb, &first, &mut token.values);
                self.add_rows(kb, 1, &mut token.values);
            }
            for number in usize::from(early)..=self.last {
                let sums = self.alloc_sums(kb, number);
                self.clear(kb, &sums);
                let following = (early && number == self.last).then(|| {
                    self.clear(kb, &next);
                    let time = kb.add_int(time, 1);
                    let time = kb.min(time, final_step);
                    let time = kb.let_("next", time);
                    self.token(kb, block, time, &constants)
                });
                let following = following.as_ref().map(|token| (token, &next));
                self.pass(kb, block, (&token, &sums), number, following);
                self.add_results(kb, &sums, &mut token.values);
                self.add_rows(kb, number + 1, &mut token.values);
            }
            self.store_results(kb, block, &token);
            for ((node, from), (_, to)) in next.iter().zip(&first) {
                self.each_piece(kb, node.inputs[0], |kb, at, lanes| {
                    let value = kb.load_vec(*from, at, lanes);
                    kb.store_vec(*to, at, value);
                });
            }
        });
    }

    fn constants(&self) -> Range<usize> {
        self.scan.carries + self.scan.seqs..self.scan.body.inputs.len()
    }

    fn sequences(&self) -> Range<usize> {
        self.scan.carries..self.scan.carries + self.scan.seqs
    }

    /// What a step knows before its first pass.
    fn token(&self, kb: &mut KernelBuilder, block: &Block, time: ExprId, constants: &Values) -> Token {
        let mut values = constants.clone();
        self.load_rows(kb, block, time, self.sequences(), &mut values);
        self.add_rows(kb, 0, &mut values);
        Token { time, values }
    }

    /// Adds the inputs that have no columns.
    fn load_rows(
        &self,
        kb: &mut KernelBuilder,
        block: &Block,
        time: ExprId,
        inputs: Range<usize>,
        values: &mut Values,
    ) {
        for i in inputs {
            let v = self.scan.body.inputs[i];
            if self.has_columns(v) {
                continue;
            }
            let base = self.scan.base(kb, i, block.tile, 0, time);
            let mut pieces = Pieces::new();
            self.each_piece(kb, v, |kb, at, lanes| {
                let at = kb.add(base, at);
                let value = kb.load_vec(self.scan.inputs[i], at, lanes);
                pieces.push(kb.let_("x", value));
            });
            values.insert(v, pieces);
        }
    }

    /// Adds what has no columns and becomes known after so many passes.
    fn add_rows(&self, kb: &mut KernelBuilder, passes: usize, values: &mut Values) {
        for (_, node) in self.scan.body.live() {
            let out = node.outputs[0];
            if self.depth_of(out) != passes || self.has_columns(out) || self.sums_columns(node) {
                continue;
            }
            if !self.arithmetic.is_fused(out) {
                let pieces = self.compute(kb, node, values);
                values.insert(out, pieces);
            }
        }
    }

    /// A node from what is known; a reduction of one element is that element.
    fn compute(&self, kb: &mut KernelBuilder, node: &Node, values: &Values) -> Pieces {
        let (count, lanes) = self.pieces(node.outputs[0]);
        let piece = |kb: &mut KernelBuilder, p: usize| {
            let at = |v: ValueId| values[&v][if values[&v].len() > 1 { p } else { 0 }];
            let value = match node.op {
                Op::Reduce { op, .. } => self.arithmetic.reduce(kb, (op, node.inputs[0]), lanes, None, &at),
                _ => self.arithmetic.elementwise(kb, node, lanes, &at),
            };
            kb.let_("y", value)
        };
        (0..count).map(|p| piece(kb, p)).collect()
    }

    /// Runs `body(first element, lanes)` for the pieces of a value, over rows or for a single number.
    fn each_piece(
        &self,
        kb: &mut KernelBuilder,
        v: ValueId,
        mut body: impl FnMut(&mut KernelBuilder, ExprId, u32),
    ) {
        let (count, lanes) = self.pieces(v);
        for p in 0..count {
            let at = kb.int(p as i64 * i64::from(lanes));
            body(kb, at, lanes);
        }
    }

    /// Room for what pass `number` sums up.
    fn alloc_sums(&self, kb: &mut KernelBuilder, number: usize) -> Sums<'a> {
        let nodes = self.scan.body.live().map(|(_, node)| node);
        let found = nodes.filter(|n| self.sums_columns(n) && self.depth_of(n.inputs[0]) == number);
        let mut alloc = |node: &'a Node| {
            let (count, lanes) = self.pieces(node.inputs[0]);
            (node, kb.alloc("sum", DType::F32, count * lanes as usize, Space::Local))
        };
        found.map(&mut alloc).collect()
    }

    fn clear(&self, kb: &mut KernelBuilder, sums: &Sums) {
        for (node, sum) in sums {
            let Op::Reduce { op, .. } = node.op else { continue };
            self.each_piece(kb, node.inputs[0], |kb, at, lanes| {
                let nothing = kb.constant(op.identity(), Ty::vector(DType::F32, lanes));
                kb.store_vec(*sum, at, nothing);
            });
        }
    }

    fn add_results(&self, kb: &mut KernelBuilder, sums: &Sums, values: &mut Values) {
        for (node, sum) in sums {
            let mut pieces = Pieces::new();
            self.each_piece(kb, node.inputs[0], |kb, at, lanes| {
                let value = kb.load_vec(*sum, at, lanes);
                pieces.push(kb.let_("sum", value));
            });
            values.insert(node.outputs[0], pieces);
        }
    }

    /// A pass over the columns for the reductions in `sums`; the last one writes the states and goes on with the first pass
    /// of the following step.
    fn pass(
        &self,
        kb: &mut KernelBuilder,
        block: &Block,
        (token, sums): (&Token, &Sums),
        number: usize,
        following: Option<(&Token, &Sums)>,
    ) {
        let body = self.scan.body;
        let (carries, writes) = (&body.inputs[..self.scan.carries], number == self.last);
        let new = &body.outputs[..if writes { self.scan.carries } else { 0 }];
        let bases = self.bases(kb, block, token);
        let following = following.map(|(token, sums)| (token, sums, self.bases(kb, block, token)));
        self.each_column(kb, block, token.time, writes, |kb, c| {
            let mut values = token.values.clone();
            for (v, &state) in carries.iter().zip(&block.states) {
                values.insert(*v, self.state_pieces(kb, state, c));
            }
            let wanted = sums.iter().map(|(n, _)| n.inputs[0]).chain(new.iter().copied());
            self.add_columns(kb, (&bases, c), &wanted.collect::<Vec<_>>(), &mut values);
            for (v, &state) in new.iter().zip(&block.states) {
                for (p, &value) in values[v].iter().enumerate() {
                    let at = self.state_at(kb, c, p);
                    kb.store_vec(state, at, value);
                }
            }
            self.add_to(kb, sums, &values);
            let Some((token, sums, bases)) = &following else { return };
            let mut after = token.values.clone();
            after.extend(carries.iter().zip(new).map(|(carry, new)| (*carry, values[new].clone())));
            let wanted: Vec<ValueId> = sums.iter().map(|(n, _)| n.inputs[0]).collect();
            self.add_columns(kb, (bases, c), &wanted, &mut after);
            self.add_to(kb, sums, &after);
        });
    }

    /// First elements of the inputs that have columns, by input.
    fn bases(
        &self,
        kb: &mut KernelBuilder,
        block: &Block,
        token: &Token,
    ) -> HashMap<ValueId, (BufId, ExprId)> {
        let inputs = self.scan.body.inputs.iter().enumerate().skip(self.scan.carries);
        let with_columns = inputs.filter(|(_, v)| self.has_columns(**v));
        let base = |(i, v): (usize, &ValueId)| {
            let base = self.scan.base(kb, i, block.tile, 0, token.time);
            (*v, (self.scan.inputs[i], kb.let_("base", base)))
        };
        with_columns.map(base).collect()
    }

    /// Adds the wanted values of column `c`, and what they need.
    fn add_columns(
        &self,
        kb: &mut KernelBuilder,
        (bases, c): (&HashMap<ValueId, (BufId, ExprId)>, ExprId),
        wanted: &[ValueId],
        values: &mut Values,
    ) {
        let body = self.scan.body;
        let mut needed = HashSet::new();
        let mut open = wanted.to_vec();
        while let Some(v) = open.pop() {
            // A fused product without columns is not among the values; its factors are.
            if values.contains_key(&v) || !needed.insert(v) {
                continue;
            }
            open.extend(body.def(v).into_iter().flat_map(|node| &node.inputs));
        }
        for v in body.inputs.iter().filter(|v| needed.contains(v)) {
            let (buf, base) = bases[v];
            let at = kb.add(base, c);
            let value = kb.load(buf, at);
            values.insert(*v, vec![kb.let_("x", value)]);
        }
        for (_, node) in body.live() {
            let out = node.outputs[0];
            if needed.contains(&out) && !self.arithmetic.is_fused(out) {
                let pieces = self.compute(kb, node, values);
                values.insert(out, pieces);
            }
        }
    }

    fn add_to(&self, kb: &mut KernelBuilder, sums: &Sums, values: &Values) {
        for (node, sum) in sums {
            let Op::Reduce { op, .. } = node.op else { continue };
            let mut p = 0;
            self.each_piece(kb, node.inputs[0], |kb, place, lanes| {
                let at = |v: ValueId| values[&v][if values[&v].len() > 1 { p } else { 0 }];
                let old = kb.load_vec(*sum, place, lanes);
                let new = self.arithmetic.reduce(kb, (op, node.inputs[0]), lanes, Some(old), &at);
                kb.store_vec(*sum, place, new);
                p += 1;
            });
        }
    }

    /// First element of piece `p` of column `c` of a state.
    fn state_at(&self, kb: &mut KernelBuilder, c: ExprId, p: usize) -> ExprId {
        let column = kb.mul_int(c, self.block_rows());
        kb.add_int(column, p as i64 * i64::from(self.lanes))
    }

    fn state_pieces(&self, kb: &mut KernelBuilder, state: BufId, c: ExprId) -> Pieces {
        let piece = |p| {
            let at = self.state_at(kb, c, p);
            let value = kb.load_vec(state, at, self.lanes);
            kb.let_("s", value)
        };
        (0..self.vectors).map(piece).collect()
    }

    /// Runs `body` for every column, by cache lines of the sequences, which the last pass asks for some steps ahead.
    fn each_column(
        &self,
        kb: &mut KernelBuilder,
        block: &Block,
        time: ExprId,
        asks: bool,
        body: impl Fn(&mut KernelBuilder, ExprId),
    ) {
        let columns = self.scan.shape.columns;
        let lines = kb.int(columns / LINE);
        kb.serial("line", lines, |kb, line| {
            let first = kb.mul_int(line, LINE);
            let first = kb.let_("first", first);
            if asks {
                self.ask(kb, block, time, first);
            }
            let count = kb.int(LINE);
            kb.serial("c", count, |kb, i| {
                let c = kb.add(first, i);
                body(kb, c);
            });
        });
        if columns % LINE != 0 {
            let rest = kb.int(columns % LINE);
            kb.serial("c", rest, |kb, i| {
                let c = kb.add_int(i, columns / LINE * LINE);
                body(kb, c);
            });
        }
    }

    /// Asks for the line of each sequence that begins at column (or row of the block) `first`, of a later step.
    fn ask(&self, kb: &mut KernelBuilder, block: &Block, time: ExprId, first: ExprId) {
        let Some(prefetch) = self.prefetch else { return };
        let final_step = kb.dim(&self.scan.length);
        let final_step = kb.add_int(final_step, -1);
        let time = kb.add_int(time, AHEAD);
        let time = kb.min(time, final_step);
        let time = kb.let_("ahead", time);
        let last_row = kb.int(self.block_rows() - 1);
        for i in self.sequences() {
            let extent = self.scan.extent(self.scan.body.inputs[i]);
            let at = match (extent.columns, extent.rows) {
                (true, _) => first,
                (false, true) => kb.min(first, last_row),
                (false, false) => continue,
            };
            let base = self.scan.base(kb, i, block.tile, 0, time);
            let at = kb.add(base, at);
            let element = kb.load(self.scan.inputs[i], at);
            kb.push(Stmt::Instr { instr: prefetch, args: vec![element] });
        }
    }

    /// Stores what a step gives beside its states.
    fn store_results(&self, kb: &mut KernelBuilder, block: &Block, token: &Token) {
        for (i, v) in self.scan.body.outputs.iter().enumerate().skip(self.scan.carries) {
            let extent = self.scan.extent(*v);
            let base = self.scan.offset(kb, extent, block.tile, 0);
            let base = self.scan.at_step(kb, extent, base, token.time);
            for (p, &value) in token.values[v].iter().enumerate() {
                let at = kb.add_int(base, p as i64 * i64::from(self.lanes));
                kb.store_vec(self.scan.outputs[i], at, value);
            }
        }
    }
}
