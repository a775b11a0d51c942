//! One well-formed module, and one broken in each way that the verifier knows.

use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::{Function, FunctionKind, NodeId, ValueId};
use mlcc_ir::kernel::{BinOp, BufDecl, BufId, ForKind, Kernel, MemorySpace, ParamAccess, UnOp};
use mlcc_ir::module::{
    ColumnRange, FuncId, ModelParam, ModelState, Module, ParamId, ParamRole, ParamSource, RowBlocks, StateId,
};
use mlcc_ir::ops::Op;
use mlcc_ir::step::{
    BufferRef, LaunchGrid, LaunchItem, MemoryBase, RepeatMode, SequenceFilter, StepItem, StepProgram,
    WorkSchedule,
};
use mlcc_ir::types::{DType, Packing, QuantFormat, TensorType};
use mlcc_ir::verify::verify_module;

fn f32s(dims: &[i64]) -> TensorType {
    TensorType::new(DType::F32, dims.iter().copied())
}

const ENTRY: FuncId = FuncId(2);

/// Body and group functions, an entry that uses both, a parameter and a state.
fn module() -> Module {
    let mut m = Module::new("m");
    let s = m.states.push(ModelState { name: "s".into(), ty: f32s(&[2]), init: 0.0 });
    let source = ParamSource::Tensor("w".into());
    let w = m.params.push(ModelParam {
        name: "w".into(),
        ty: f32s(&[2]),
        role: ParamRole::Vector,
        source,
        packing: None,
    });
    let mut body = Function::new("body", FunctionKind::Body);
    let (c, x) = (body.add_input(f32s(&[2])), body.add_input(f32s(&[2])));
    body.outputs = body.append(&m, Op::Binary(BinOp::Add), &[c, x]).unwrap();
    body.outputs.push(x);
    let body = m.functions.push(body);
    let mut group = Function::new("group", FunctionKind::Group);
    let x = group.add_input(f32s(&[2]));
    let y = group.append(&m, Op::Unary(UnOp::Exp), &[x]).unwrap()[0];
    group.append(&m, Op::StateWrite(s), &[y]).unwrap();
    group.outputs = vec![y];
    let group = m.functions.push(group);
    let mut f = Function::new("entry", FunctionKind::Entry);
    let xs = f.add_input(TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(2)]));
    let old = f.append(&m, Op::StateRead(s), &[]).unwrap()[0];
    let scan = f.append(&m, Op::Scan { body, carries: 1, seqs: 1 }, &[old, xs]).unwrap();
    let w = f.append(&m, Op::Param(w), &[]).unwrap()[0];
    let sum = f.append(&m, Op::Binary(BinOp::Add), &[scan[0], w]).unwrap();
    f.outputs = f.append(&m, Op::Call(group), &sum).unwrap();
    f.outputs.push(scan[1]);
    m.functions.push(f);
    m
}

/// The verifier's complaint about a module changed by `change`.
fn complaint(change: impl FnOnce(&mut Module)) -> String {
    let mut m = module();
    change(&mut m);
    verify_module(&m).expect_err("the change must be noticed").to_string()
}

#[test]
fn a_well_formed_module_passes() {
    verify_module(&module()).unwrap();
}

#[test]
fn names_are_unique_and_not_empty() {
    let twice = complaint(|m| {
        let param = m.params[ParamId(0)].clone();
        m.params.push(param);
    });
    assert_eq!(twice, "parameter @w: is declared twice");
    let twice = complaint(|m| {
        m.functions.push(Function::new("body", FunctionKind::Group));
    });
    assert_eq!(twice, "function @body: is declared twice");
    let empty = complaint(|m| m.states[StateId(0)].name.clear());
    assert_eq!(empty, "state: has an empty name");
}

#[test]
fn parameters_and_states_have_usable_types() {
    let symbolic = complaint(|m| m.params[ParamId(0)].ty = TensorType::new(DType::F32, [SizeSymbol::N]));
    assert_eq!(symbolic, "parameter @w: its type f32[n] does not have constant sizes");
    let packed =
        complaint(|m| m.params[ParamId(0)].ty = TensorType::new(DType::Packed(QuantFormat::Q4G32), [32]));
    assert_eq!(packed, "parameter @w: packed weights are matrices, not q4g32[32]");
    let tiles = complaint(|m| m.params[ParamId(0)].packing = Some(Packing::Tile16));
    assert_eq!(tiles, "parameter @w: packing tile16 is for matrices, not f32[2]");
    let source = complaint(|m| m.params[ParamId(0)].source = ParamSource::Concat(vec![]));
    assert_eq!(source, "parameter @w: its source joins no tensors");
    let rows = |blocks: RowBlocks| {
        complaint(|m| {
            let tensor = Box::new(ParamSource::Tensor("w".into()));
            m.params[ParamId(0)].source = ParamSource::Rows(blocks, tensor);
        })
    };
    let outside = "parameter @w: its source takes rows that do not lie in 5 rows one behind another";
    assert_eq!(rows(RowBlocks::range(4, 2, 5)), outside);
    assert_eq!(rows(RowBlocks { start: 0, len: 1, stride: usize::MAX, count: 3, of: 5 }), outside);
    assert_eq!(rows(RowBlocks { start: 0, len: 2, stride: 1, count: 2, of: 5 }), outside);
    let columns = complaint(|m| {
        let range = ColumnRange { start: 4, len: 2, of: 5 };
        m.params[ParamId(0)].source =
            ParamSource::ColumnRange(range, Box::new(ParamSource::Tensor("w".into())));
    });
    assert_eq!(columns, "parameter @w: its source takes 2 columns from 4 on, of 5");
    let state = complaint(|m| m.states[StateId(0)].ty = TensorType::new(DType::F32, [SizeSymbol::N]));
    assert_eq!(state, "state @s: its type f32[n] is not plain with constant sizes");
}

#[test]
fn calls_are_not_recursive() {
    let text = complaint(|m| {
        let group = &mut m.functions[FuncId(1)];
        let x = group.inputs[0];
        group.append_typed(Op::Call(FuncId(1)), &[x], vec![f32s(&[2])]);
    });
    assert_eq!(text, "function @group: calls itself");
    let text = complaint(|m| {
        let other = FuncId(m.functions.len() as u32);
        let mut second = Function::new("second", FunctionKind::Group);
        let x = second.add_input(f32s(&[2]));
        second.outputs = second.append_typed(Op::Call(FuncId(1)), &[x], vec![f32s(&[2])]);
        m.functions.push(second);
        let group = &mut m.functions[FuncId(1)];
        let x = group.inputs[0];
        group.append_typed(Op::Call(other), &[x], vec![f32s(&[2])]);
    });
    assert!(text.ends_with(": calls itself"), "{text}");
}

/// A text may hold any number of functions that call the next.
#[test]
fn long_chains_of_calls_are_verified() {
    let mut m = Module::new("m");
    let mut callee: Option<FuncId> = None;
    for i in 0..100_000 {
        let mut f = Function::new(format!("f{i}"), FunctionKind::Group);
        let x = f.add_input(f32s(&[2]));
        let op = callee.map_or(Op::Unary(UnOp::Exp), Op::Call);
        f.outputs = f.append_typed(op, &[x], vec![f32s(&[2])]);
        callee = Some(m.functions.push(f));
    }
    verify_module(&m).unwrap();
}

#[test]
fn ids_exist_and_belong_to_their_place() {
    let node = complaint(|m| m.functions[ENTRY].body.push(NodeId(99)));
    assert_eq!(node, "function @entry: its body lists n99, which does not exist");
    let twice = complaint(|m| m.functions[ENTRY].body.push(NodeId(0)));
    assert_eq!(twice, "function @entry, %1 = state.read: node n0 stands twice in the body");
    let value = complaint(|m| m.functions[ENTRY].nodes[NodeId(3)].inputs[0] = ValueId(99));
    assert_eq!(value, "function @entry, %5 = add: uses %<undefined v99>, which does not exist");
    let input = complaint(|m| m.functions[ENTRY].inputs[0] = ValueId(1));
    assert_eq!(input, "function @entry: input 0 is %0, which is not defined as that input");
    let output = complaint(|m| m.functions[ENTRY].nodes[NodeId(3)].outputs[0] = ValueId(1));
    assert_eq!(output, "function @entry, %1 = add: output 0 is not defined by node n3");
    let param = complaint(|m| m.functions[ENTRY].nodes[NodeId(2)].op = Op::Param(ParamId(7)));
    assert_eq!(param, "function @entry, %4 = param: no parameter p7");
    let callee = complaint(|m| m.functions[ENTRY].nodes[NodeId(4)].op = Op::Call(FuncId(7)));
    assert_eq!(callee, "function @entry, %6 = call: no function f7");
}

#[test]
fn values_are_defined_before_they_are_used() {
    let order = complaint(|m| m.functions[ENTRY].body.swap(2, 3));
    assert_eq!(order, "function @entry, %4 = add: uses %5, which is not defined before it");
    let cycle = complaint(|m| m.functions[ENTRY].nodes[NodeId(3)].inputs[0] = ValueId(6));
    assert!(cycle.ends_with("uses %6, which depends on this node"), "{cycle}");
    let output = complaint(|m| {
        m.functions[ENTRY].body.pop();
    });
    assert_eq!(output, "function @entry: returns %<undefined v6>, which is not defined");
}

#[test]
fn types_are_those_of_the_op() {
    let inputs = complaint(|m| m.functions[ENTRY].values[ValueId(4)].ty = f32s(&[3]));
    assert_eq!(inputs, "function @entry, %4 = param: gives f32[2], its outputs are f32[3]");
    let count = complaint(|m| {
        m.functions[ENTRY].nodes[NodeId(2)].outputs.pop();
    });
    assert_eq!(count, "function @entry, param: gives f32[2], its outputs are none");
    let shapes = complaint(|m| m.functions[ENTRY].nodes[NodeId(3)].inputs[0] = ValueId(3));
    assert!(shapes.contains("%5 = add: gives f32[n, 2]"), "{shapes}");
}

#[test]
fn functions_are_used_according_to_their_kind() {
    let call = complaint(|m| m.functions[FuncId(1)].kind = FunctionKind::Entry);
    assert_eq!(call, "function @entry, %6 = call: calls a function that is not a group");
    let scan = complaint(|m| m.functions[FuncId(0)].kind = FunctionKind::Group);
    assert_eq!(scan, "function @entry, %2, %3 = scan: its body function is not of kind body");
    let state = complaint(|m| {
        m.functions[FuncId(0)].append_typed(Op::StateRead(StateId(0)), &[], vec![f32s(&[2])]);
    });
    let expected = "function @body, %3 = state.read: states are not for the body of a scan: carry the value";
    assert_eq!(state, expected);
}

#[test]
fn a_state_is_written_once_calls_included() {
    let text = complaint(|m| {
        let f = &mut m.functions[ENTRY];
        let v = f.outputs[0];
        f.append_typed(Op::StateWrite(StateId(0)), &[v], vec![]);
    });
    assert_eq!(text, "function @entry: writes state @s twice");
}

#[test]
fn steps_fit_their_kernels() {
    let shared = |kernel: &str, buffers: Vec<BufferRef>, shares| {
        let launch = LaunchItem {
            kernel: kernel.into(),
            buffers,
            dims: vec![],
            grid: None,
            repeat: RepeatMode::Once,
            schedule: shares,
        };
        StepProgram {
            name: "decode".into(),
            items: vec![StepItem::Barrier, StepItem::Launch(launch)],
            arena_bytes: 64,
        }
    };
    let launch = |kernel: &str, buffers| shared(kernel, buffers, WorkSchedule::Static);
    let mut kernel = Kernel::new("k");
    let decl = |name: &str| BufDecl {
        name: name.into(),
        dtype: DType::F32,
        space: MemorySpace::Global,
        len: Dim::from(4),
        access: ParamAccess::In,
        align: 4,
    };
    kernel.params = vec![kernel.bufs.push(decl("x"))];
    let with = |step: StepProgram| {
        let kernel = kernel.clone();
        move |m: &mut Module| {
            m.kernels.push(kernel);
            m.steps.push(step);
        }
    };
    let buffer = |offset| BufferRef::fixed(MemoryBase::Arena, offset, 16);
    let mut fine = module();
    with(launch("k", vec![buffer(48)]))(&mut fine);
    verify_module(&fine).unwrap();
    let text = complaint(with(launch("j", vec![])));
    assert_eq!(text, "step @decode, launch of @j: there is no such kernel");
    let text = complaint(with(launch("k", vec![])));
    assert!(text.ends_with("takes 1 buffers and 0 sizes, not 0 buffers and 0 sizes"), "{text}");
    let text = complaint(with(launch("k", vec![buffer(49)])));
    assert!(text.ends_with("buffer 0 ends beyond the arena of 64 bytes"), "{text}");
    let text = complaint(with(launch("k", vec![buffer(46)])));
    let expected = "buffer 0: the kernel relies on %x being aligned to 4 bytes, its offset is 46";
    assert!(text.ends_with(expected), "{text}");
    let rows = BufferRef { per_past: 6, ..BufferRef::fixed(MemoryBase::State, 64, 16) };
    let text = complaint(with(launch("k", vec![rows])));
    assert!(text.ends_with("aligned to 4 bytes, its step per past token is 6"), "{text}");
    let mut fine = module();
    with(launch("k", vec![BufferRef::fixed(MemoryBase::Temperature, 0, 4)]))(&mut fine);
    verify_module(&fine).unwrap();
    let mut wide = kernel.clone();
    wide.bufs[BufId(0)].align = 64;
    let text = complaint(|m| {
        m.kernels.push(wide);
        m.steps.push(launch("k", vec![BufferRef::fixed(MemoryBase::Temperature, 0, 4)]));
    });
    assert!(text.ends_with("aligned to 64 bytes, its base is aligned to 4"), "{text}");
    let mut fine = module();
    with(shared("k", vec![buffer(48)], WorkSchedule::Dynamic { chunks: 2.into() }))(&mut fine);
    verify_module(&fine).unwrap();
    let text = complaint(with(shared("k", vec![buffer(48)], WorkSchedule::Dynamic { chunks: 1.into() })));
    assert!(text.ends_with("1 pieces are none to share"), "{text}");
}

#[test]
fn grids_are_none_that_a_gpu_cannot_launch() {
    let mut kb = KernelBuilder::new("k");
    let one = kb.int(1);
    kb.for_("i", one, ForKind::Block(0), |_, _| ());
    let kernel = kb.finish();
    let with = |blocks: [i64; 3]| {
        let grid = Some(LaunchGrid { blocks: blocks.map(Dim::from), threads: [1; 3] });
        let (repeat, shares) = (RepeatMode::Once, WorkSchedule::Static);
        let launch =
            LaunchItem { kernel: "k".into(), buffers: vec![], dims: vec![], grid, repeat, schedule: shares };
        let items = vec![StepItem::Launch(launch)];
        let mut m = module();
        m.kernels.push(kernel.clone());
        m.steps.push(StepProgram { name: "decode".into(), items, arena_bytes: 0 });
        verify_module(&m).map_err(|e| e.to_string())
    };
    assert_eq!(with([70_000, 65_535, 65_535]), Ok(()));
    let text = with([1, 65_536, 1]).unwrap_err();
    assert!(text.ends_with("the grid has up to 65536 blocks in y, where a GPU has at most 65535"), "{text}");
    assert!(with([1, 1, 65_536]).unwrap_err().contains("blocks in z"));
    assert!(with([1 << 31, 1, 1]).unwrap_err().contains("blocks in x"));
}

#[test]
fn only_launches_of_every_worker_write_copies() {
    let mut kernel = Kernel::new("k");
    let decl = |name: &str, access| BufDecl {
        name: name.into(),
        dtype: DType::F32,
        space: MemorySpace::Global,
        len: Dim::from(4),
        access,
        align: 4,
    };
    for (name, access) in [("x", ParamAccess::In), ("y", ParamAccess::Out)] {
        let buf = kernel.bufs.push(decl(name, access));
        kernel.params.push(buf);
    }
    let one = BufferRef::fixed(MemoryBase::Arena, 0, 16);
    let copies = BufferRef { per_worker: 32, ..BufferRef::fixed(MemoryBase::Arena, 64, 16) };
    let with_shares = |repeat, shares, buffers: [&BufferRef; 2]| {
        let (dims, grid) = (vec![], None);
        let buffers = buffers.map(Clone::clone).to_vec();
        let launch = LaunchItem { kernel: "k".into(), buffers, dims, grid, repeat, schedule: shares };
        let items = vec![StepItem::Launch(launch)];
        let step = StepProgram { name: "decode".into(), items, arena_bytes: 256 };
        let kernel = kernel.clone();
        move |m: &mut Module| {
            m.kernels.push(kernel);
            m.steps.push(step);
        }
    };
    let with = |repeat, buffers| with_shares(repeat, WorkSchedule::Static, buffers);
    for (repeat, buffers) in [
        (RepeatMode::EachWorker, [&one, &copies]),
        (RepeatMode::EachWorker, [&copies, &copies]),
        (RepeatMode::Once, [&copies, &one]),
    ] {
        let mut fine = module();
        with(repeat, buffers)(&mut fine);
        verify_module(&fine).unwrap();
    }
    let text = complaint(with_shares(
        RepeatMode::EachWorker,
        WorkSchedule::Dynamic { chunks: 4.into() },
        [&one, &copies],
    ));
    assert!(text.ends_with("only a launch that runs once has pieces"), "{text}");
    for (work, least) in
        [(Dim::sym(SizeSymbol::Past), false), (Dim::from(0), false), (Dim::sym(SizeSymbol::N), true)]
    {
        let mut m = module();
        with(RepeatMode::EachSequence { work: work.clone(), of: SequenceFilter::All }, [&one, &one])(&mut m);
        let wrong = format!("a sequence may be {work} of work, expected at least 1");
        let found = verify_module(&m).map_err(|e| e.to_string());
        assert!(if least { found.is_ok() } else { found.is_err_and(|e| e.ends_with(&wrong)) }, "{work}");
    }
    let text = complaint(with(RepeatMode::EachWorker, [&one, &one]));
    assert!(
        text.ends_with("buffer 1 is written by a launch for each worker and has no copy for each"),
        "{text}"
    );
    let text = complaint(with(RepeatMode::Once, [&one, &copies]));
    assert!(
        text.ends_with("buffer 1 is written by no launch for each worker and has a copy for each"),
        "{text}"
    );
    let near = BufferRef { per_worker: 8, ..copies.clone() };
    let text = complaint(with(RepeatMode::EachWorker, [&one, &near]));
    assert!(text.ends_with("the copies of buffer 1 overlap"), "{text}");
    let state = BufferRef { base: MemoryBase::State, ..copies.clone() };
    let text = complaint(with(RepeatMode::EachWorker, [&one, &state]));
    assert!(text.ends_with("buffer 1: only values of a step without a batch have copies"), "{text}");
}
