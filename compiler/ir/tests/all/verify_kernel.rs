//! Kernels that break each invariant, as text; and the few breakages that text cannot express.

use mlcc_ir::dim::SizeSymbol;
use mlcc_ir::kernel::*;
use mlcc_ir::text::{Lexer, parse_kernel};
use mlcc_ir::types::DType;
use mlcc_ir::verify::verify_kernel;

fn parse(text: &str) -> Kernel {
    parse_kernel(&mut Lexer::new(text).expect("tokens")).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Verifies `body` in a CPU kernel with one buffer of each access and the size n.
fn cpu(body: &str) -> Result<(), String> {
    let head =
        "kernel @k(%x: f32[64] in align 64, %y: f32[n] out align 64, %z: i32[64] inout align 64; n: %n)";
    verify_kernel(&parse(&format!("{head} {{ {body} }}"))).map_err(|e| e.to_string())
}

#[track_caller]
fn refused(body: &str, message: &str) {
    assert_eq!(cpu(body).expect_err("must be refused"), message, "{body}");
}

#[test]
fn a_good_kernel_passes() {
    let body = "par %i in %n {
        alloc %acc: f32[16] local
        unroll %u in 4 { store(%acc, ramp(mul(%u, 4), 1, 4), splat(0.0:f32, 4)) }
        let %m: boolx16 = lt(ramp(%i, 1, 16), splat(64, 16))
        let %v: f32x16 = load(%x, ramp(%i, 1, 16) if %m)
        store(%acc, ramp(0, 1, 16), fma(%v, splat(1.5:f32, 16), load(%acc, ramp(0, 1, 16))))
        if lt(%i, 3) { store(%y, %i, load(%acc, 2)) } else { store(%z, %i, cast(%i, i32) if lt(%i, 9)) }
    }";
    assert_eq!(cpu(body), Ok(()));
}

#[test]
fn values_have_one_type() {
    for (body, message) in [
        ("let %v: f32 = add(1.0:f32, 2)", "kernel k: the second operand of add has type i64, expected f32"),
        ("let %v: i32 = lt(1, 2)", "kernel k: the value of %v has type bool, expected i32"),
        ("let %v: i32 = sqrt(4:i32)", "kernel k: sqrt is not defined for i32"),
        ("let %v: bool = neg(1:bool)", "kernel k: neg is not defined for bool"),
        ("let %v: f32 = and(1.0:f32, 2.0:f32)", "kernel k: and is not defined for f32"),
        ("let %v: bool = shl(1:bool, 1:bool)", "kernel k: shl is not defined for bool"),
        ("let %v: bool = add(1:bool, 1:bool)", "kernel k: add is not defined for bool"),
        ("let %v: i32 = fma(1:i32, 1:i32, 1:i32)", "kernel k: fma is not defined for i32"),
        (
            "let %v: f32 = fma(1.0:f32, 1.0:f16, 1.0:f32)",
            "kernel k: an operand of fma has type f16, expected f32",
        ),
        ("let %v: i8 = 200:i8", "kernel k: the literal 200 is no value of type i8"),
        ("let %v: u8 = -1:u8", "kernel k: the literal -1 is no value of type u8"),
        ("let %v: bool = 2:bool", "kernel k: the literal 2 is no value of type bool"),
        ("let %v: f32 = 1:f32", "kernel k: the literal 1 is no value of type f32"),
        ("let %v: i32 = 1.5:i32", "kernel k: the literal 1.5 is no value of type i32"),
        ("let %v: f32x4 = 1.5:f32x4", "kernel k: the literal 1.5 has 4 lanes; use splat"),
        (
            "let %v: f32x4 = select(1:bool, splat(1.0:f32, 4), splat(1.0:f32, 4))",
            "kernel k: the condition of select has type bool, expected boolx4",
        ),
        (
            "let %v: f32 = select(1:bool, 1.0:f32, 1)",
            "kernel k: an operand of select has type i64, expected f32",
        ),
        ("let %v: f32x4 = ramp(1.0:f32, 1.0:f32, 4)", "kernel k: ramp is not defined for f32"),
        (
            "let %v: i64x4 = ramp(splat(0, 4), 1, 4)",
            "kernel k: the base of a ramp has type i64x4, expected i64",
        ),
        ("let %v: i64x4 = ramp(0, 1:i32, 4)", "kernel k: the stride of a ramp has type i32, expected i64"),
        (
            "let %v: i64x4 = splat(splat(0, 2), 4)",
            "kernel k: the operand of splat has type i64x2, expected i64",
        ),
        (
            "let %v: i64x0 = splat(0, 0)",
            "kernel k: a value of type i64x0: expected 1 to 4096 lanes of a plain element type",
        ),
        (
            "let %v: i64x5000 = splat(0, 5000)",
            "kernel k: a value of type i64x5000: expected 1 to 4096 lanes of a plain element type",
        ),
        (
            "let %v: q4g32 = cast(1, q4g32)",
            "kernel k: a value of type q4g32: expected 1 to 4096 lanes of a plain element type",
        ),
        ("let %v: i64x2 = shuffle(splat(0, 4), [0, 4])", "kernel k: shuffle picks lane 4 of 4"),
        (
            "let %v: i64x2 = shuffle(splat(0, 4), splat(0, 2), [0, 4])",
            "kernel k: the second operand of shuffle has type i64x2, expected i64x4",
        ),
        ("let %v: i32 = bitcast(1, i32)", "kernel k: bitcast of i64 to i32: sizes differ, or one is bool"),
        ("let %v: u8 = bitcast(1:bool, u8)", "kernel k: bitcast of bool to u8: sizes differ, or one is bool"),
        (
            "let %v: i32x4 = instr.sdot_128(splat(0:i32, 4), splat(0:i8, 16), splat(0:u8, 16))",
            "kernel k: arguments of sdot_128: (i32x4, i8x16, u8x16), expected (i32x4, i8x16, i8x16)",
        ),
        (
            "let %v: i32x4 = instr.sdot_128()",
            "kernel k: arguments of sdot_128: (), expected (i32x4, i8x16, i8x16)",
        ),
    ] {
        refused(body, message);
    }
}

#[test]
fn names_are_used_in_their_scope() {
    for (body, message) in [
        ("for %i in 4 { } store(%y, %i, 0.0:f32)", "kernel k: variable %i used outside of its scope"),
        (
            "if lt(%n, 4) { let %v: i64 = add(%n, 1) } store(%y, %v, 0.0:f32)",
            "kernel k: variable %v used outside of its scope",
        ),
        (
            "for %i in 4 { alloc %a: f32[4] stack } store(%a, 0, 0.0:f32)",
            "kernel k: buffer %a used outside of its scope",
        ),
        (
            "for %i in 4 { alloc %a: f32[4] stack store(%a, 0, 0.0:f32) } let %v: f32 = load(%a, 0)",
            "kernel k: buffer %a used outside of its scope",
        ),
    ] {
        refused(body, message);
    }
}

#[test]
fn memory_is_accessed_as_declared() {
    for (body, message) in [
        ("store(%x, 0, 0.0:f32)", "kernel k: store to %x, which is an input"),
        ("store(%y, 0, 1:i32)", "kernel k: the value stored to %y has type i32, expected f32"),
        (
            "store(%y, ramp(0, 1, 4), 1.0:f32)",
            "kernel k: the value stored to %y has type f32, expected f32x4",
        ),
        ("store(%y, 0:i32, 1.0:f32)", "kernel k: the index of %y has type i32, expected i64"),
        (
            "store(%y, ramp(0, 1, 4), splat(1.0:f32, 4) if lt(0, 1))",
            "kernel k: the mask of an access of %y has type bool, expected boolx4",
        ),
        ("store(%y, 0, 1.0:f32 if 1)", "kernel k: the mask of an access of %y has type i64, expected bool"),
        ("let %v: f32 = load(%x, 1:i32)", "kernel k: the index of %x has type i32, expected i64"),
        (
            "let %v: f32 = load(%x, 1 if 1:i8)",
            "kernel k: the mask of an access of %x has type i8, expected bool",
        ),
        ("alloc %a: f32[n] stack", "kernel k: allocation %a: length n is not a positive constant"),
        ("alloc %a: f32[0] stack", "kernel k: allocation %a: length 0 is not a positive constant"),
        ("alloc %a: f32[4] global", "kernel k: allocation %a in global memory"),
        ("alloc %a: f32[4] shared", "kernel k: shared memory %a in a CPU kernel"),
        ("alloc %a: f32[4] stack align 24", "kernel k: buffer %a: alignment 24 is not a power of two"),
        (
            "alloc %a: q8g32[4] stack",
            "kernel k: buffer %a has the packed type q8g32; kernels see its bytes as u8",
        ),
        (
            "alloc %a: f32[4] local for %i in 4 { store(%a, %i, 0.0:f32) }",
            "kernel k, for %i: the index of %a is no constant after unrolling, as local memory (registers) needs; use stack memory",
        ),
    ] {
        refused(body, message);
    }
}

#[test]
fn loops_stand_where_they_may() {
    for (body, message) in [
        ("for %i in 4:i32 { }", "kernel k: the extent of a loop has type i32, expected i64"),
        ("unroll %i in %n { }", "kernel k: the extent of an unroll loop must be a constant, not negative"),
        ("unroll %i in -1 { }", "kernel k: the extent of an unroll loop must be a constant, not negative"),
        (
            "par %i in 4 { for %j in 4 { par %k in 4 { } } }",
            "kernel k, par %i, for %j: a par loop inside of a par loop",
        ),
        ("if 1 { }", "kernel k: the condition of an if has type i64, expected bool"),
        ("if splat(1:bool, 2) { }", "kernel k: the condition of an if has type boolx2, expected bool"),
        ("barrier", "kernel k: barrier outside of a block loop"),
        ("wait 0", "kernel k: wait outside of a block loop"),
        ("commit", "kernel k: commit outside of a block loop"),
        (
            "block.x %b in 4 { alloc %a: f32[4] shared instr.cp_async_16_f32(load(%x, 0), load(%a, 0)) }",
            "kernel k, block.x %b: cp_async_16_f32 of %x in global memory, expected shared",
        ),
        (
            "block.x %b in 4 { alloc %a: f32[4] shared align 8 instr.cp_async_16_f32(load(%a, 0), load(%x, 0)) }",
            "kernel k, block.x %b: cp_async_16_f32 of %a, which is aligned to 8 bytes, expected 16",
        ),
        (
            "block.x %b in 4 { let %v: f16x8 = instr.ldmatrix_x4_f16(1.0:f16) }",
            "kernel k, block.x %b: ldmatrix_x4_f16 of something that is not a load, or a masked one",
        ),
        (
            "let %v: f32 = instr.shfl_xor_f32(1.0:f32, 1:i32)",
            "kernel k: the warp instruction shfl_xor_f32 in a CPU kernel",
        ),
        ("instr.shfl_xor_f32(1.0:f32, 1:i32)", "kernel k: shfl_xor_f32 has a result and is no statement"),
        ("instr.shfl_xor_f32(1.0:f32)", "kernel k: arguments of shfl_xor_f32 do not fit its signature"),
        // GPU structure.
        ("block.x %b in 4 { par %i in 4 { } }", "kernel k, block.x %b: a par loop in a GPU kernel"),
        ("thread.x %t in 4 { }", "kernel k: a thread loop outside of a block loop"),
        (
            "block.x %b in 4 { thread.x %t in %n { } }",
            "kernel k, block.x %b: the extent of a thread loop must be a constant in 1..=1024",
        ),
        (
            "block.x %b in 4 { thread.x %t in 2048 { } }",
            "kernel k, block.x %b: the extent of a thread loop must be a constant in 1..=1024",
        ),
        (
            "block.x %b in 4 { alloc %a: f32[58112] shared alloc %c: u8[1] shared }",
            "kernel k, block.x %b: allocation %c: 232449 bytes of shared memory with it; at most 232448",
        ),
        (
            "block.x %b in 4 { alloc %a: f32[1099511627776] shared }",
            "kernel k, block.x %b: allocation %a: 4398046511104 bytes of shared memory with it; at most 232448",
        ),
        (
            "block.x %b in 4 { thread.x %t in 1024 { } thread.y %u in 2 { } }",
            "kernel k: 2048 threads in a block; at most 1024",
        ),
        (
            "block.x %b in 4 { thread.x %t in 4 { thread.x %u in 4 { } } }",
            "kernel k, block.x %b, thread.x %t: a thread.x loop inside of a thread.x loop",
        ),
        (
            "block.x %b in 4 { block.x %c in 4 { } }",
            "kernel k, block.x %b: a block.x loop inside of a block.x loop",
        ),
        (
            "block.x %b in 4 { } block.y %c in 4 { }",
            "kernel k: block loops beside each other; a GPU kernel is one nest of them",
        ),
        (
            "block.x %b in 4 { } store(%y, 0, 0.0:f32)",
            "kernel k: a statement outside of the innermost block loop; only let and alloc may stand there",
        ),
        (
            "for %i in 4 { block.x %b in 4 { } }",
            "kernel k, for %i: a block loop inside of a loop of another kind",
        ),
        (
            "block.x %b in 4 { for %i in 4 { block.y %c in 4 { } } }",
            "kernel k, block.x %b, for %i: a block loop inside of a loop of another kind",
        ),
        (
            "block.x %b in 4 { block.y %c in %b { } }",
            "kernel k, block.x %b: the extent of a block loop may depend on constants and dimensions only",
        ),
        (
            "block.x %b in cast(load(%z, 0), i64) { }",
            "kernel k: the extent of a block loop may depend on constants and dimensions only",
        ),
        ("block.3 %b in 4 { }", "kernel k: GPU axis 3; there are 0, 1 and 2"),
        (
            "block.x %b in 4 { thread.x %t in 4 { alloc %a: f32[4] shared } }",
            "kernel k, block.x %b, thread.x %t: shared memory %a allocated inside of a thread loop",
        ),
    ] {
        refused(body, message);
    }
    let good = "block.y %b in div(add(%n, 15), 16) { let %v: i64 = add(%n, %b) block.x %c in 4 {
        alloc %a: f32[8] shared thread.x %t in 8 { store(%a, %t, 0.0:f32) } barrier for %i in %v {
            thread.x %u in 4 { let %w: f32 = instr.shfl_xor_f32(load(%a, %u), 1:i32) } barrier commit wait 0 } } }";
    assert_eq!(cpu(good), Ok(()));
}

fn broken(change: impl FnOnce(&mut Kernel)) -> String {
    let mut kernel = parse(
        "kernel @k(%x: f32[64] inout align 64; n: %n) { for %i in %n { alloc %a: f32[4] stack let %v: f32 = load(%x, %i) } }",
    );
    verify_kernel(&kernel).expect("is good before");
    change(&mut kernel);
    verify_kernel(&kernel).expect_err("must be refused").to_string()
}

#[test]
fn what_text_cannot_say_is_refused_too() {
    assert_eq!(broken(|k| k.params.push(k.params[0])), "kernel k: parameter %x is listed twice");
    assert_eq!(broken(|k| k.params.push(BufId(9))), "kernel k: parameter b9 is not declared");
    assert_eq!(
        broken(|k| k.bufs[BufId(0)].space = MemorySpace::Stack),
        "kernel k: parameter %x is in stack memory, expected global"
    );
    assert_eq!(broken(|k| k.dims.push((SizeSymbol::N, VarId(0)))), "kernel k: the size n is listed twice");
    assert_eq!(broken(|k| k.dims.push((SizeSymbol::B, VarId(0)))), "kernel k: variable %n is assigned twice");
    assert_eq!(
        broken(|k| k.vars[VarId(0)].ty = ExprType::F32),
        "kernel k: size %n has type f32, expected i64"
    );
    assert_eq!(
        broken(|k| k.bufs[BufId(1)].access = ParamAccess::In),
        "kernel k, for %i: allocation %a must be readable and writable"
    );
    assert_eq!(
        broken(|k| {
            let again = k.body[0].clone();
            k.body.push(again);
        }),
        "kernel k: variable %i is assigned twice"
    );
    assert_eq!(
        broken(|k| k.body.push(Stmt::Alloc { buf: BufId(0) })),
        "kernel k: buffer %x is allocated twice, or is a parameter"
    );
    assert_eq!(
        broken(|k| k.body.push(Stmt::Alloc { buf: BufId(1) })),
        "kernel k: buffer %a is allocated twice, or is a parameter"
    );
    assert_eq!(
        broken(|k| k.body.push(Stmt::If { cond: ExprId(99), then: vec![], otherwise: vec![] })),
        "kernel k: expression e99 does not exist"
    );
    assert_eq!(
        broken(|k| {
            let cond = k.exprs.intern(Expr::Unary(UnOp::Not, ExprId(50)), ExprType::scalar(DType::Bool));
            k.body.push(Stmt::If { cond, then: vec![], otherwise: vec![] });
        }),
        "kernel k: expression e3 uses a later one"
    );
    assert_eq!(
        broken(|k| {
            let value = k.exprs.intern(Expr::Var(VarId(0)), ExprType::F32);
            k.body.push(Stmt::Let { var: VarId(2), value });
        }),
        "kernel k: variable %n has type i64, expected f32"
    );
}
