//! The toy model of `tests/toy` as kernels and steps, for CPU and for GPU.

use crate::toy::{VOCAB, WIDTH};
use mlcc_codegen::table::{ModelPlan, ParamDesc, StateDesc, TableDesc};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::kernel::{BinOp, ExprId, ForKind, Kernel, MemorySpace, ParamAccess};
use mlcc_ir::step::{
    BufferRef, LaunchGrid, LaunchItem, MemoryBase, RepeatMode, StepItem, StepProgram, WorkSchedule,
};
use mlcc_ir::types::DType;

pub const CHUNK: usize = 3;

/// The place where independent iterations run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IterationPlace {
    Workers,
    /// Blocks of this many threads; their product covers the extent.
    Threads(i64),
}

/// Runs `body` for `0..extent` in parallel.
fn parallel(
    kb: &mut KernelBuilder,
    place: IterationPlace,
    extent: ExprId,
    body: impl FnOnce(&mut KernelBuilder, ExprId),
) {
    match place {
        IterationPlace::Workers => kb.par("i", extent, body),
        IterationPlace::Threads(threads) => {
            let wide = kb.add_int(extent, threads - 1);
            let width = kb.int(threads);
            let blocks = kb.div(wide, width);
            kb.for_("block", blocks, ForKind::Block(0), |kb, block| {
                kb.for_("thread", width, ForKind::Thread(0), |kb, thread| {
                    let base = kb.mul(block, width);
                    let i = kb.add(base, thread);
                    let inside = kb.lt(i, extent);
                    kb.if_(inside, |kb| body(kb, i));
                });
            });
        }
    }
}

/// `h = h / 2 + E[token]` for every token; keeps each h.
fn feed(place: IterationPlace) -> Kernel {
    let (width, vocab) = (WIDTH as i64, VOCAB as i64);
    let mut kb = KernelBuilder::new("toy.feed");
    let n = Dim::sym(SizeSymbol::N);
    let h = kb.param("h", DType::F32, width, ParamAccess::InOut, 64);
    let e = kb.param("e", DType::F32, vocab * width, ParamAccess::In, 64);
    let tokens = kb.param("tokens", DType::I32, n.clone(), ParamAccess::In, 4);
    let trace = kb.param("trace", DType::F32, n.scale(width), ParamAccess::Out, 64);
    let n = kb.sym(SizeSymbol::N);
    let extent = kb.int(width);
    parallel(&mut kb, place, extent, |kb, c| {
        let carried = kb.alloc("carried", DType::F32, 1, MemorySpace::Local);
        let zero = kb.int(0);
        let start = kb.load(h, c);
        kb.store(carried, zero, start);
        kb.serial("t", n, |kb, t| {
            let token = kb.load(tokens, t);
            let token = kb.cast(token, DType::I64);
            let row = kb.mul_int(token, width);
            let at = kb.add(row, c);
            let x = kb.load(e, at);
            let old = kb.load(carried, zero);
            let half = kb.float(0.5);
            let kept = kb.mul(old, half);
            let new = kb.add(kept, x);
            let new = kb.let_("new", new);
            kb.store(carried, zero, new);
            let row = kb.mul_int(t, width);
            let at = kb.add(row, c);
            kb.store(trace, at, new);
        });
        let last = kb.load(carried, zero);
        kb.store(h, c, last);
    });
    kb.finish()
}

/// `logits[v] = past + t + sum h * E[v]`, at every position or at the last one.
fn logits(place: IterationPlace, all: bool) -> Kernel {
    let (width, vocab) = (WIDTH as i64, VOCAB as i64);
    let mut kb = KernelBuilder::new(if all { "toy.logits_all" } else { "toy.logits" });
    let n = Dim::sym(SizeSymbol::N);
    let rows = if all { n.clone() } else { Dim::from(1) };
    let trace = kb.param("trace", DType::F32, n.scale(width), ParamAccess::In, 64);
    let e = kb.param("e", DType::F32, vocab * width, ParamAccess::In, 64);
    let out = kb.param("logits", DType::F32, rows.scale(vocab), ParamAccess::Out, 4);
    let (n, past) = (kb.sym(SizeSymbol::N), kb.sym(SizeSymbol::Past));
    let extent = kb.dim(&rows.scale(vocab));
    parallel(&mut kb, place, extent, |kb, i| {
        let width_of_row = kb.int(vocab);
        let (v, row) = (kb.rem(i, width_of_row), kb.div(i, width_of_row));
        let t = if all { row } else { kb.add_int(n, -1) };
        let t = kb.let_("t", t);
        let position = kb.add(past, t);
        let mut sum = kb.cast(position, DType::F32);
        for k in 0..width {
            let (a, b) = (kb.mul_int(t, width), kb.mul_int(v, width));
            let (a, b) = (kb.add_int(a, k), kb.add_int(b, k));
            let (a, b) = (kb.load(trace, a), kb.load(e, b));
            let product = kb.mul(a, b);
            sum = kb.add(sum, product);
        }
        kb.store(out, i, sum);
    });
    kb.finish()
}

/// The toy's substitute for softmax: shares of the logits divided by the temperature.
fn shares(place: IterationPlace) -> Kernel {
    let vocab = VOCAB as i64;
    let mut kb = KernelBuilder::new("toy.shares");
    let logits = kb.param("logits", DType::F32, vocab, ParamAccess::In, 4);
    let temperature = kb.param("temperature", DType::F32, 1, ParamAccess::In, 4);
    let probs = kb.param("probs", DType::F32, vocab, ParamAccess::Out, 4);
    let extent = kb.int(vocab);
    parallel(&mut kb, place, extent, |kb, v| {
        let zero = kb.int(0);
        let temperature = kb.load(temperature, zero);
        let mut sum = kb.float(0.0);
        for k in 0..vocab {
            let k = kb.int(k);
            let x = kb.load(logits, k);
            let x = kb.div(x, temperature);
            sum = kb.add(sum, x);
        }
        let x = kb.load(logits, v);
        let x = kb.div(x, temperature);
        let share = kb.binary(BinOp::Div, x, sum);
        kb.store(probs, v, share);
    });
    kb.finish()
}

pub fn kernels(place: IterationPlace) -> Vec<Kernel> {
    vec![feed(place), logits(place, false), logits(place, true), shares(place)]
}

fn launch(
    place: IterationPlace,
    kernel: &str,
    extent: Dim,
    buffers: &[(MemoryBase, usize)],
    dims: &[SizeSymbol],
) -> StepItem {
    let grid = match place {
        IterationPlace::Workers => None,
        IterationPlace::Threads(threads) => Some(LaunchGrid {
            blocks: [extent.ceil_div(threads), Dim::from(1), Dim::from(1)],
            threads: [threads as u32, 1, 1],
        }),
    };
    let buffers = buffers.iter().map(|&(base, bytes)| BufferRef::fixed(base, 0, bytes as u64)).collect();
    let dims = dims.iter().map(|&s| Dim::sym(s)).collect();
    // Pieces smaller than a column, so that some are empty, and more of them the longer the sequence.
    let pieces = Dim::sym(SizeSymbol::Past).scale(3).floor_div(2).add(&12.into()).minimum(&16.into());
    let shares = if grid.is_some() { WorkSchedule::Static } else { WorkSchedule::Dynamic { chunks: pieces } };
    StepItem::Launch(LaunchItem {
        kernel: kernel.into(),
        buffers,
        dims,
        grid,
        repeat: RepeatMode::Once,
        schedule: shares,
    })
}

pub fn steps(place: IterationPlace) -> Vec<StepProgram> {
    let (h, e) = ((MemoryBase::State, WIDTH * 4), (MemoryBase::Weights, VOCAB * WIDTH * 4));
    let (tokens, trace) = ((MemoryBase::Tokens, CHUNK * 4), (MemoryBase::Arena, CHUNK * WIDTH * 4));
    let one = (MemoryBase::Logits, VOCAB * 4);
    let arena_bytes = (CHUNK * WIDTH * 4) as u64;
    let step = |name: &str, head: &str, rows: Dim| {
        let items = vec![
            launch(place, "toy.feed", Dim::from(WIDTH), &[h, e, tokens, trace], &[SizeSymbol::N]),
            StepItem::Barrier,
            launch(
                place,
                head,
                rows.scale(VOCAB as i64),
                &[trace, e, one],
                &[SizeSymbol::N, SizeSymbol::Past],
            ),
        ];
        StepProgram { name: name.into(), items, arena_bytes }
    };
    let buffers = [one, (MemoryBase::Temperature, 4), (MemoryBase::Probs, VOCAB * 4)];
    let softmax = launch(place, "toy.shares", Dim::from(VOCAB), &buffers, &[]);
    vec![
        step("prefill", "toy.logits", Dim::from(1)),
        step("decode", "toy.logits", Dim::from(1)),
        step("prefill_logits", "toy.logits_all", Dim::sym(SizeSymbol::N)),
        StepProgram { name: "softmax_with_temperature".into(), items: vec![softmax], arena_bytes: 0 },
    ]
}

pub fn table(target: &str) -> TableDesc {
    TableDesc {
        target: target.into(),
        compiler: "toy 2".into(),
        metadata: "{\"model\":\"toy\"}".into(),
        params: vec![ParamDesc {
            name: "embedding".into(),
            format: "f32".into(),
            dims: vec![VOCAB as u64, WIDTH as u64],
            bytes: (VOCAB * WIDTH * 4) as u64,
            ..ParamDesc::default()
        }],
        states: vec![StateDesc {
            name: "h".into(),
            offset: 0,
            bytes: (WIDTH * 4) as u64,
            fill: Some(-1.0),
            ..Default::default()
        }],
        plan: ModelPlan {
            weights_bytes: (VOCAB * WIDTH * 4) as u64,
            arena_bytes: (CHUNK * WIDTH * 4) as u64,
            state_bytes: (WIDTH * 4) as u64,
            chunk: CHUNK as u64,
            batch: 1,
            vocab: VOCAB as u64,
            ..ModelPlan::default()
        },
        ..TableDesc::default()
    }
}
