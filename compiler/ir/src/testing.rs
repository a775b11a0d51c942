//! Random kernels for property tests (feature `testing`): well-formed, and safe to run: every index is in
//! bounds, no cell is read before it is written, no operation is undefined, no two iterations of a `par` loop
//! or threads touch the same cell unordered. So any two executors may be compared on them.
//!
//! A kernel is determined by its seed. Left out because executors may differ there: bits of NaN, and the sign
//! of zero from `min` and `max` (nothing divides by a computed float, and floats are not bitcast).

mod exprs;

pub mod graph;

use crate::builder::KernelBuilder;
use crate::dim::{Dim, SizeSymbol, SymValues};
use crate::kernel::*;
use crate::types::DType;

/// The constructs that random kernels may contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelOptions {
    /// Blocks, threads, shared memory and barriers instead of a `par` loop.
    pub gpu: bool,
    /// Functions that are expanded before code generation.
    pub math: bool,
    /// Fused multiply-add, which rounds differently where the target has none.
    pub fma: bool,
    /// f16 and bf16 (loads, stores, casts and moves; no arithmetic).
    pub halfs: bool,
    /// Instructions of a single thread.
    pub instrs: bool,
}

impl KernelOptions {
    pub const ALL: KernelOptions =
        KernelOptions { gpu: false, math: true, fma: true, halfs: true, instrs: true };
    /// The constructs that every back end must compute to the bit.
    pub const EXACT: KernelOptions =
        KernelOptions { gpu: false, math: false, fma: false, halfs: true, instrs: false };
    pub const GPU: KernelOptions = KernelOptions { gpu: true, ..KernelOptions::ALL };
}

/// splitmix64.
#[derive(Clone)]
pub struct TestRng(pub u64);

impl TestRng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound.max(1) as u64) as usize
    }
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

/// The random kernel of a seed. Sizes may be any `n >= 1`.
pub fn random_kernel(seed: u64, options: &KernelOptions) -> Kernel {
    let kb = KernelBuilder::new(format!("random_{seed}"));
    let rng = TestRng(seed);
    let mut g = KernelGenerator {
        kb,
        rng,
        options: *options,
        inputs: Vec::new(),
        outputs: Vec::new(),
        vars: Vec::new(),
        loops: Vec::new(),
        locals: Vec::new(),
    };
    g.params();
    if options.gpu {
        g.gpu_body()
    } else {
        g.cpu_body()
    }
    g.kb.finish()
}

/// Contents for the parameters of a random kernel, in order: small finite values.
pub fn random_arguments(kernel: &Kernel, dims: &SymValues, seed: u64) -> Vec<Vec<u8>> {
    let mut rng = TestRng(seed ^ 0x5eed);
    kernel
        .params
        .iter()
        .map(|id| {
            let decl = &kernel.bufs[*id];
            let len = decl.len.eval(dims).max(0) as usize;
            (0..len).flat_map(|_| random_element(&mut rng, decl.dtype)).collect()
        })
        .collect()
}

fn random_element(rng: &mut TestRng, dtype: DType) -> Vec<u8> {
    let float = (rng.below(2001) as f32 - 1000.0) / 125.0;
    let bits = rng.bits();
    match dtype {
        DType::Bool => vec![(bits & 1) as u8],
        DType::F32 => float.to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(float).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(float).to_le_bytes().to_vec(),
        _ => bits.to_le_bytes()[..dtype.bytes().unwrap_or(1)].to_vec(),
    }
}

/// Elements of an output that one iteration owns.
const SLOT: i64 = 16;
/// Threads of a block in GPU kernels.
const THREADS: i64 = 32;
/// Inputs have at least this many elements.
const INPUT: i64 = 64;

const INTS: [DType; 7] = [DType::I8, DType::U8, DType::I16, DType::U16, DType::I32, DType::U32, DType::I64];

struct KernelGenerator {
    kb: KernelBuilder,
    rng: TestRng,
    options: KernelOptions,
    inputs: Vec<BufId>,
    outputs: Vec<BufId>,
    /// Variables in scope that expressions may use.
    vars: Vec<ExprId>,
    /// Non-negative i64 values in scope, from which indices are made.
    loops: Vec<ExprId>,
    /// Local buffers of 16 initialised elements.
    locals: Vec<BufId>,
}

impl KernelGenerator {
    fn dtype(&mut self) -> DType {
        match self.rng.below(10) {
            0..=3 => DType::F32,
            4 => self.rng.pick(&[DType::I32, DType::I64]),
            5 if self.options.halfs => self.rng.pick(&[DType::F16, DType::BF16]),
            6 => DType::Bool,
            _ => self.rng.pick(&INTS),
        }
    }

    fn lanes(&mut self) -> u32 {
        match self.options.gpu {
            true => self.rng.pick(&[1, 1, 1, 2, 4]),
            false => self.rng.pick(&[1, 1, 2, 3, 4, 8, 16]),
        }
    }

    fn ty(&mut self) -> ExprType {
        ExprType::vector(self.dtype(), self.lanes())
    }

    fn params(&mut self) {
        for i in 0..2 + self.rng.below(2) {
            let dtype = self.dtype();
            let factor = self.rng.below(3) as i64;
            let len = Dim::sym(SizeSymbol::N).scale(factor).add(&Dim::from(INPUT + self.rng.below(9) as i64));
            // Names may repeat: the printer makes them unique.
            let name = self.rng.pick(&["x", "w", "layer.0.weight"]);
            let align = if i == 0 { 64 } else { dtype.bytes().unwrap_or(1) as u32 };
            self.inputs.push(self.kb.param(name, dtype, len, ParamAccess::In, align));
        }
        for i in 0..1 + self.rng.below(2) {
            let access = if i == 0 { ParamAccess::Out } else { ParamAccess::InOut };
            let rows = if self.options.gpu { Dim::from(2 * THREADS) } else { Dim::sym(SizeSymbol::N) };
            let dtype = self.dtype();
            self.outputs.push(self.kb.param("y", dtype, rows.scale(SLOT), access, 64));
        }
    }

    fn cpu_body(&mut self) {
        let rows = self.kb.sym(SizeSymbol::N);
        let (row, var) = self.open(rows, ForKind::Par);
        self.row(row);
        self.close(var, rows, ForKind::Par);
    }

    /// Loads a tile into shared memory, then computes on values of other threads.
    fn gpu_body(&mut self) {
        let (blocks, threads) = (self.kb.int(2), self.kb.int(THREADS));
        let (block, block_var) = self.open(blocks, ForKind::Block(0));
        let tile = self.kb.alloc("tile", DType::F32, THREADS as usize, MemorySpace::Shared);
        let (t, t_var) = self.open(threads, ForKind::Thread(0));
        let value = self.expr(ExprType::F32, 2);
        self.kb.store(tile, t, value);
        self.close(t_var, threads, ForKind::Thread(0));
        self.kb.barrier();
        let (t, t_var) = self.open(threads, ForKind::Thread(0));
        let seven = self.kb.mul_int(t, 7);
        let other = self.kb.rem(seven, threads);
        let shared = self.kb.load(tile, other);
        let shared = self.kb.let_("shared", shared);
        self.vars.push(shared);
        let first = self.kb.mul_int(block, THREADS);
        let row = self.kb.add(first, t);
        self.row(row);
        self.vars.retain(|v| *v != shared);
        self.close(t_var, threads, ForKind::Thread(0));
        self.close(block_var, blocks, ForKind::Block(0));
    }

    fn open(&mut self, _extent: ExprId, _kind: ForKind) -> (ExprId, VarId) {
        let var = self.kb.new_var("i", ExprType::I64);
        let value = self.kb.var(var);
        self.kb.open_block();
        self.loops.push(value);
        (value, var)
    }

    fn close(&mut self, var: VarId, extent: ExprId, kind: ForKind) {
        self.loops.pop();
        let body = self.kb.close_block();
        self.kb.push(Stmt::For { var, extent, kind, body });
    }

    /// One iteration: some statements, then every output's slot is written.
    fn row(&mut self, row: ExprId) {
        let (vars, locals) = (self.vars.len(), self.locals.len());
        let statements = 1 + self.rng.below(5);
        for _ in 0..statements {
            self.stmt(2);
        }
        for out in self.outputs.clone() {
            let base = self.kb.mul_int(row, SLOT);
            let ty = ExprType::vector(self.kb.kernel().bufs[out].dtype, self.lanes());
            let value = self.expr(ty, 4);
            if self.rng.chance(3) {
                let index = self.kb.ramp1(base, ty.lanes);
                let mask = self.expr(ExprType::vector(DType::Bool, ty.lanes), 2);
                self.kb.store_masked(out, index, value, Some(mask));
            } else {
                self.kb.store_vec(out, base, value);
            }
        }
        self.vars.truncate(vars);
        self.locals.truncate(locals);
    }

    fn stmt(&mut self, depth: u32) {
        match self.rng.below(if depth == 0 { 4 } else { 8 }) {
            0 | 1 => {
                let value = if self.options.instrs && self.rng.chance(4) { self.instr() } else { None };
                let value = value.unwrap_or_else(|| {
                    let ty = self.ty();
                    self.expr(ty, 4)
                });
                let value = self.kb.let_("v", value);
                self.vars.push(value);
            }
            2 => self.local(),
            3 => self.update(),
            4 | 5 => {
                let cond = self.expr(ExprType::scalar(DType::Bool), 3);
                let then = self.block(depth - 1);
                let otherwise = if self.rng.chance(2) { self.block(depth - 1) } else { Vec::new() };
                self.kb.push(Stmt::If { cond, then, otherwise });
            }
            6 => {
                let extent = if self.rng.chance(3) { self.kb.sym(SizeSymbol::N) } else { self.small() };
                self.loop_(extent, ForKind::Serial, depth - 1);
            }
            _ => {
                let extent = self.small();
                self.loop_(extent, ForKind::Unroll, depth - 1);
            }
        }
    }

    fn small(&mut self) -> ExprId {
        let extent = self.rng.below(4) as i64;
        self.kb.int(extent)
    }

    fn loop_(&mut self, extent: ExprId, kind: ForKind, depth: u32) {
        let (_, var) = self.open(extent, kind);
        let body = self.block(depth);
        body.into_iter().for_each(|s| self.kb.push(s));
        self.close(var, extent, kind);
    }

    fn block(&mut self, depth: u32) -> Vec<Stmt> {
        let (vars, locals) = (self.vars.len(), self.locals.len());
        self.kb.open_block();
        for _ in 0..1 + self.rng.below(3) {
            self.stmt(depth);
        }
        self.vars.truncate(vars);
        self.locals.truncate(locals);
        self.kb.close_block()
    }

    /// A new local or stack buffer with defined contents.
    fn local(&mut self) {
        let dtype = self.dtype();
        let space = self.rng.pick(&[MemorySpace::Local, MemorySpace::Stack]);
        let buf = self.kb.alloc("acc", dtype, SLOT as usize, space);
        let lanes = self.rng.pick(&[1u32, 4, 16]);
        for at in (0..SLOT).step_by(lanes as usize) {
            let value = self.expr(ExprType::vector(dtype, lanes), 1);
            let at = self.kb.int(at);
            self.kb.store_vec(buf, at, value);
        }
        self.locals.push(buf);
    }

    /// Index of `lanes` elements in a buffer of 16: constant for registers.
    fn local_index(&mut self, buf: BufId, lanes: u32) -> ExprId {
        let free = SLOT - i64::from(lanes) + 1;
        if self.kb.kernel().bufs[buf].space == MemorySpace::Stack && self.rng.chance(2) {
            let at = self.position();
            let free = self.kb.int(free);
            return self.kb.rem(at, free);
        }
        let at = self.rng.below(free as usize) as i64;
        self.kb.int(at)
    }

    /// Stores an expression in elements of a local buffer.
    fn update(&mut self) {
        if self.locals.is_empty() {
            return self.local();
        }
        let buf = self.rng.pick(&self.locals.clone());
        let ty = ExprType::vector(self.kb.kernel().bufs[buf].dtype, self.lanes());
        let at = self.local_index(buf, ty.lanes);
        let value = self.expr(ty, 3);
        self.kb.store_vec(buf, at, value);
    }

    /// A non-negative i64.
    fn position(&mut self) -> ExprId {
        let start = self.rng.below(20) as i64;
        let mut sum = self.kb.int(start);
        for _ in 0..self.rng.below(3) {
            if let Some(&v) = self.loops.get(self.rng.below(self.loops.len())) {
                let scaled = self.kb.mul_int(v, self.rng.below(5) as i64);
                sum = self.kb.add(sum, scaled);
            }
        }
        sum
    }

    fn load(&mut self, ty: ExprType) -> Option<ExprId> {
        let fits = |g: &Self, b: &BufId| g.kb.kernel().bufs[*b].dtype == ty.dtype;
        let locals: Vec<BufId> = self.locals.iter().copied().filter(|b| fits(self, b)).collect();
        if !locals.is_empty() && i64::from(ty.lanes) <= SLOT && self.rng.chance(2) {
            let buf = self.rng.pick(&locals);
            let at = self.local_index(buf, ty.lanes);
            return Some(self.kb.load_vec(buf, at, ty.lanes));
        }
        let inputs: Vec<BufId> = self.inputs.iter().copied().filter(|b| fits(self, b)).collect();
        if inputs.is_empty() {
            return None;
        }
        let buf = self.rng.pick(&inputs);
        let len = self.kb.kernel().bufs[buf].len.clone();
        let len = self.kb.dim(&len);
        let at = self.position();
        Some(match self.rng.below(4) {
            // Out of bounds lanes are masked.
            0 => {
                let index = self.kb.ramp1(at, ty.lanes);
                let mask = self.kb.lt(index, len);
                self.kb.load_masked(buf, index, Some(mask))
            }
            // A gather.
            1 => {
                let stride = self.kb.int(self.rng.below(5) as i64);
                let index = self.kb.ramp(at, stride, ty.lanes);
                let index = self.kb.rem(index, len);
                self.kb.load(buf, index)
            }
            _ => {
                let free = self.kb.add_int(len, 1 - i64::from(ty.lanes));
                let base = self.kb.rem(at, free);
                self.kb.load_vec(buf, base, ty.lanes)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{Lexer, parse_kernel, print_kernel};
    use crate::verify::verify_kernel;

    fn reparse(text: &str) -> Kernel {
        let mut lexer = Lexer::new(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let kernel = parse_kernel(&mut lexer).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert!(lexer.at_end());
        kernel
    }

    #[test]
    fn random_kernels_verify_and_round_trip() {
        for options in [KernelOptions::ALL, KernelOptions::EXACT, KernelOptions::GPU] {
            for seed in 0..100 {
                let kernel = random_kernel(seed, &options);
                let text = print_kernel(&kernel);
                verify_kernel(&kernel).unwrap_or_else(|e| panic!("{e}\n{text}"));
                let again = reparse(&text);
                assert_eq!(print_kernel(&again), text);
                verify_kernel(&again).unwrap_or_else(|e| panic!("{e}\n{text}"));
            }
        }
    }
}
