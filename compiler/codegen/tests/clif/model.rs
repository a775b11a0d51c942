//! A whole model object: table, entry points, steps with barriers, checks of the arguments.

use crate::harness::{foreign_machines, host_machines, link};
use mlcc_abi::{Ctx, ModelTable, StepFn, status};
use mlcc_codegen::clif::{ClifError, model_object};
use mlcc_codegen::table::{ParamDesc, PlanDesc, StateDesc, TableDesc};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, Sym};
use mlcc_ir::kernel::{Access, Kernel};
use mlcc_ir::step::{Base, BufferRef, Launch, Step, StepItem};
use mlcc_ir::types::DType;
use std::ffi::c_void;
use std::sync::Barrier;

const ROWS: usize = 24;

/// `scratch[i] = state[i] + table[tokens[n - 1]]`, and the state advances by 1.
fn advance() -> Kernel {
    let mut kb = KernelBuilder::new("advance");
    let n = kb.sym(Sym::N);
    let tokens = kb.param("tokens", DType::I32, Dim::sym(Sym::N), Access::In, 4);
    let table = kb.param("table", DType::F32, 8usize, Access::In, 64);
    let state = kb.param("state", DType::F32, ROWS, Access::InOut, 64);
    let scratch = kb.param("scratch", DType::F32, ROWS, Access::Out, 64);
    let rows = kb.int(ROWS as i64);
    kb.par("i", rows, |kb, i| {
        let last = kb.add_int(n, -1);
        let token = kb.load(tokens, last);
        let token = kb.cast(token, DType::I64);
        let (x, old) = (kb.load(table, token), kb.load(state, i));
        let sum = kb.add(x, old);
        kb.store(scratch, i, sum);
        let one = kb.float(1.0);
        let new = kb.add(old, one);
        kb.store(state, i, new);
    });
    kb.finish()
}

/// `logits[i] = scratch[ROWS - 1 - i]`: needs what other workers wrote.
fn reverse() -> Kernel {
    let mut kb = KernelBuilder::new("reverse");
    let scratch = kb.param("scratch", DType::F32, ROWS, Access::In, 64);
    let logits = kb.param("logits", DType::F32, ROWS, Access::Out, 64);
    let rows = kb.int(ROWS as i64);
    kb.par("i", rows, |kb, i| {
        let last = kb.int(ROWS as i64 - 1);
        let from = kb.sub(last, i);
        let value = kb.load(scratch, from);
        kb.store(logits, i, value);
    });
    kb.finish()
}

fn buffer(base: Base, offset: u64) -> BufferRef {
    BufferRef { base, offset, bytes: 4 * ROWS as u64 }
}

fn steps() -> Vec<Step> {
    let launch = |kernel: &str, buffers: Vec<BufferRef>, dims: Vec<Dim>| {
        StepItem::Launch(Launch { kernel: kernel.into(), buffers, dims, grid: None })
    };
    let items = vec![
        launch(
            "advance",
            vec![
                buffer(Base::Tokens, 0),
                buffer(Base::Weights, 64),
                buffer(Base::State, 0),
                buffer(Base::Arena, 64),
            ],
            vec![Dim::sym(Sym::N)],
        ),
        StepItem::Barrier,
        launch("reverse", vec![buffer(Base::Arena, 64), buffer(Base::Logits, 0)], vec![]),
    ];
    let step = |name: &str| Step { name: name.into(), items: items.clone(), arena_bytes: 256 };
    vec![step("prefill"), step("decode")]
}

fn table() -> TableDesc {
    TableDesc {
        target: "x86-64".into(),
        compiler: "test".into(),
        metadata: "{\"model\":\"toy\"}".into(),
        params: vec![ParamDesc {
            name: "table".into(),
            format: "f32".into(),
            dims: vec![8],
            offset: 64,
            ..Default::default()
        }],
        states: vec![
            StateDesc { name: "a".into(), offset: 0, bytes: 4 * 7, fill: Some(-2.0) },
            StateDesc { name: "b".into(), offset: 4 * 7, bytes: 4 * (ROWS as u64 - 7), fill: None },
        ],
        plan: PlanDesc {
            chunk: 4,
            context: 100,
            vocab: 8,
            state_bytes: 4 * ROWS as u64,
            ..Default::default()
        },
        ..Default::default()
    }
}

extern "C" fn wait(this: *mut c_void, _worker: u32) {
    // SAFETY: the test passes a barrier that outlives the call.
    unsafe { &*this.cast::<Barrier>() }.wait();
}

#[repr(align(64))]
struct Aligned<const N: usize>([f32; N]);

/// Memory of one session; the context points into it.
struct Memory {
    weights: Aligned<64>,
    arena: Aligned<64>,
    state: Aligned<ROWS>,
    logits: Aligned<ROWS>,
}

struct Shared(Ctx);
// SAFETY: the workers touch disjoint parts between barriers, as the compiled code promises.
unsafe impl Sync for Shared {}

impl Shared {
    fn run(&self, step: StepFn, workers: u32) -> Vec<i32> {
        let barrier = Barrier::new(workers as usize);
        let mut ctx = self.0;
        ctx.barrier_self = (&raw const barrier).cast_mut().cast();
        let shared = &Shared(ctx);
        std::thread::scope(|scope| {
            let call = move |worker| {
                let ctx = (&raw const shared.0).cast_mut();
                // SAFETY: a complete context; all workers call.
                unsafe { step(ctx, worker, workers) }
            };
            let threads: Vec<_> = (0..workers).map(|w| scope.spawn(move || call(w))).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        })
    }
}

#[test]
fn model_runs_through_its_table() {
    for machine in host_machines() {
        let object = model_object(machine, "test-level", &[advance(), reverse()], &steps(), &table())
            .expect("compiles");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let library = link(&object, folder.path());
        // SAFETY: the symbol is the table.
        let table =
            unsafe { &**library.get::<*const ModelTable>(b"mlcc_model\0").expect("mlcc_model is exported") };
        assert_eq!((table.magic, table.n_variants, table.vocab), (mlcc_abi::MAGIC, 1, 8));
        // SAFETY: one variant.
        let variant = unsafe { &*table.variants };
        assert_eq!(variant.features, machine.used().features);
        let entries = variant.entries;
        let mut len = 0;
        let metadata = entries.get_metadata.expect("get_metadata");
        // SAFETY: the function returns a pointer to `len` bytes of the library.
        let text = unsafe {
            let at = metadata(&mut len);
            std::slice::from_raw_parts(at, len as usize)
        };
        assert_eq!(text, b"{\"model\":\"toy\"}");
        session(&entries);
    }
}

fn session(entries: &mlcc_abi::Entries) {
    let mut memory = Memory {
        weights: Aligned(std::array::from_fn(|i| i as f32)),
        arena: Aligned([0.0; 64]),
        state: Aligned([9.0; ROWS]),
        logits: Aligned([0.0; ROWS]),
    };
    let tokens = [1, 2, 3, 5, 9, -1];
    let mut shared = Shared(Ctx {
        weights: memory.weights.0.as_ptr().cast(),
        arena: memory.arena.0.as_mut_ptr().cast(),
        state: memory.state.0.as_mut_ptr().cast(),
        tokens: tokens.as_ptr(),
        n: 1,
        past: 0,
        logits: memory.logits.0.as_mut_ptr(),
        probs: std::ptr::null_mut(),
        barrier: Some(wait),
        barrier_self: std::ptr::null_mut(),
        temperature: 1.0,
        batch: 1,
        reserved: [0; 5],
    });
    let (prefill, decode) = (entries.prefill.expect("prefill"), entries.decode.expect("decode"));
    for workers in [1, 3] {
        assert_eq!(shared.run(entries.create_kv_cache.expect("create"), workers), vec![0; workers as usize]);
        let initial: Vec<f32> = (0..ROWS).map(|i| if i < 7 { -2.0 } else { 0.0 }).collect();
        assert_eq!(memory.state.0.to_vec(), initial);
        shared.0.n = 4;
        assert_eq!(shared.run(prefill, workers), vec![0; workers as usize]);
        // The table starts 64 bytes into the weights; token 5 is the last.
        let wanted: Vec<f32> = initial.iter().rev().map(|s| s + 21.0).collect();
        assert_eq!(memory.logits.0.to_vec(), wanted);
        shared.0.n = 1;
        assert_eq!(shared.run(decode, workers), vec![0; workers as usize]);
        let wanted: Vec<f32> = initial.iter().rev().map(|s| s + 1.0 + 17.0).collect();
        assert_eq!(memory.logits.0.to_vec(), wanted);
        assert!(entries.softmax_with_temperature.is_none());

        let expect = |shared: &Shared, step: StepFn, status: i32| {
            assert_eq!(shared.run(step, workers), vec![status; workers as usize]);
        };
        shared.0.n = 2;
        expect(&shared, decode, status::BAD_LENGTH);
        shared.0.n = 5;
        expect(&shared, prefill, status::BAD_LENGTH);
        shared.0.n = 0;
        expect(&shared, prefill, status::BAD_LENGTH);
        shared.0.n = 4;
        shared.0.past = 97;
        expect(&shared, prefill, status::CONTEXT_FULL);
        shared.0.past = 0;
        shared.0.n = 1;
        for bad in [4, 5] {
            shared.0.tokens = &raw const tokens[bad];
            expect(&shared, prefill, status::BAD_TOKEN);
        }
        shared.0.tokens = tokens.as_ptr();
    }
}

#[test]
fn equal_input_gives_equal_bytes() {
    for machine in host_machines().into_iter().chain(foreign_machines()) {
        let build =
            || model_object(machine, "v", &[advance(), reverse()], &steps(), &table()).expect("compiles");
        assert!(build() == build(), "{machine:?}: two compilations differ");
    }
}

#[test]
fn bad_modules_are_refused_by_name() {
    let machine = host_machines()[0];
    let build = |kernels: &[Kernel], steps: &[Step]| model_object(machine, "v", kernels, steps, &table());
    let error = build(&[advance()], &steps()).expect_err("a kernel is missing");
    assert!(matches!(&error, ClifError::UnknownKernel { kernel, .. } if kernel == "reverse"), "{error}");
    let mut wrong = steps();
    if let StepItem::Launch(launch) = &mut wrong[0].items[0] {
        launch.dims.clear();
    }
    let error = build(&[advance(), reverse()], &wrong).expect_err("a size is missing");
    assert_eq!(error.to_string(), "step prefill, kernel advance: expected 1 dims, found 0");
    let mut odd = steps();
    odd[1].name = "predict".into();
    let error = build(&[advance(), reverse()], &odd).expect_err("no such entry point");
    assert!(error.to_string().starts_with("`predict` is not an entry point"), "{error}");

    let mut kb = KernelBuilder::new("gpu");
    let ten = kb.int(10);
    kb.for_("b", ten, mlcc_ir::kernel::ForKind::Block(0), |_, _| {});
    let error = build(&[kb.finish()], &[]).expect_err("a GPU kernel");
    assert_eq!(error.to_string(), "kernel gpu: block and thread loops belong to GPU kernels");

    let mut kb = KernelBuilder::new("tail");
    let out = kb.param("out", DType::F32, 1usize, Access::InOut, 4);
    let zero = kb.int(0);
    let x = kb.load(out, zero);
    let x = kb.unary(mlcc_ir::kernel::UnOp::Exp, x);
    kb.store(out, zero, x);
    let error = build(&[kb.finish()], &[]).expect_err("exp is not primitive");
    assert_eq!(error.to_string(), "kernel tail: exp of f32 is not primitive and must be expanded first");
}
