//! The text of kernels: what it looks like, and what the parser says about wrong text.

use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::SizeSymbol;
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::*;
use mlcc_ir::text::{Lexer, ParseError, parse_kernel, print_kernel};
use mlcc_ir::types::DType;

fn parse(text: &str) -> Result<Kernel, ParseError> {
    parse_kernel(&mut Lexer::new(text)?)
}

const SAMPLE: &str = "kernel @\"scale rows\"(%x: f32[16*n] in align 64, %y: f32[16*n] out align 64; n: %n) {
  par %row in %n {
    alloc %acc: f32[16] local
    alloc %tmp: u8[64] stack align 16
    let %v: f32x16 = load(%x, ramp(mul(%row, 16), 1, 16))
    unroll %i in 2 {
      store(%acc, ramp(mul(%i, 8), 1, 8), splat(-0.5:f32, 8))
    }
    for %k in sub(%n, -1) {
      if lt(%k, 3) {
        store(%tmp, %k, cast(%k, u8))
      } else {
        store(%tmp, ramp(0, 1, 4), splat(7:u8, 4) if lt(ramp(0, 1, 4), splat(%k, 4)))
      }
    }
    store(%y, ramp(mul(%row, 16), 1, 16), fma(%v, splat(inf:f32, 16), load(%acc, ramp(0, 1, 16))))
    store(%y, %row, shuffle(%v, %v, [17]) if eq(bitcast(1.5:f16, u16), 3:u16))
  }
}
";

const GPU: &str = "kernel @gpu(%x: i32[64] inout align 64, %h: f16[64] in align 64) {
  block.x %b in 2 {
    alloc %tile: i32[32] shared
    alloc %rows: f16[64] shared
    thread.x %t in 32 {
      store(%tile, %t, load(%x, %t))
    }
    instr.cp_async_16_f16(load(%rows, 8), load(%h, 16))
    commit
    wait 1
    barrier
    wait 0
    thread.y %u in 1 {
      let %s: i32 = instr.shfl_xor_i32(load(%tile, %u), 16:i32)
      let %a: f16x8 = instr.ldmatrix_x4_f16(load(%rows, 0))
      let %c: f32x4 = instr.mma_m16n8k16_f16(splat(0.0:f32, 4), %a, instr.ldmatrix_x2_trans_f16(load(%rows, 0)))
    }
  }
}
";

#[test]
fn prints_as_read() {
    for text in [SAMPLE, GPU] {
        assert_eq!(print_kernel(&parse(text).unwrap()), text);
    }
}

#[test]
fn equal_names_are_told_apart() {
    let mut kb = KernelBuilder::new("k");
    let x = kb.param("x", DType::F32, 4, ParamAccess::In, 64);
    kb.param("x", DType::F32, 4, ParamAccess::In, 64);
    kb.param("x_1", DType::F32, 4, ParamAccess::Out, 64);
    let four = kb.int(4);
    kb.serial("x", four, |kb, i| {
        let v = kb.load(x, i);
        kb.let_("", v);
    });
    let text = "kernel @k(%x: f32[4] in align 64, %x_1: f32[4] in align 64, %x_1_1: f32[4] out align 64) {
  for %x_2 in 4 {
    let %unnamed: f32 = load(%x, %x_2)
  }
}
";
    let kernel = kb.finish();
    assert_eq!(print_kernel(&kernel), text);
    assert_eq!(print_kernel(&parse(text).unwrap()), text);
}

#[test]
fn shared_expressions_are_written_once() {
    // A polynomial in a polynomial in ...: as a tree it would have 3^20 nodes.
    let mut kb = KernelBuilder::new("k");
    let y = kb.param("y", DType::F32, SizeSymbol::N, ParamAccess::Out, 64);
    let (zero, half) = (kb.int(0), kb.float(0.5));
    let mut v = kb.load(y, zero);
    for _ in 0..20 {
        let square = kb.mul(v, v);
        let sum = kb.add(square, half);
        v = kb.fma(sum, v, sum);
    }
    kb.store(y, zero, v);
    let text = print_kernel(&kb.finish());
    assert!(text.len() < 4000, "{} bytes", text.len());
    assert_eq!(print_kernel(&parse(&text).unwrap()), text);
    assert!(text.contains("$1 = "), "{text}");
}

#[test]
fn long_chains_are_cut_and_read_back() {
    let mut kb = KernelBuilder::new("k");
    let y = kb.param("y", DType::I32, 1, ParamAccess::InOut, 64);
    let zero = kb.int(0);
    let mut v = kb.load(y, zero);
    for i in 0..3000 {
        let c = kb.int_of(i, DType::I32);
        v = kb.add(v, c);
    }
    kb.store(y, zero, v);
    let text = print_kernel(&kb.finish());
    assert_eq!(print_kernel(&parse(&text).unwrap()), text);
    assert!(text.lines().all(|l| l.len() < 1000));
}

#[test]
fn instructions_of_all_signatures_round_trip() {
    for instr in InstrId::all() {
        let def = instr.def();
        let mut kb = KernelBuilder::new("k");
        let args: Vec<ExprId> = def.args.iter().map(|ty| kb.constant(1.0, *ty)).collect();
        match def.ret {
            Some(_) => {
                let value = kb.instr(instr, args);
                kb.let_("v", value);
            }
            None => kb.push(Stmt::Instr { instr, args }),
        }
        let text = print_kernel(&kb.finish());
        assert_eq!(print_kernel(&parse(&text).unwrap()), text);
    }
}

#[test]
fn wrong_text_is_refused_with_its_place() {
    let body = |stmt: &str| format!("kernel @k(%x: f32[4] in align 64) {{\n{stmt}\n}}");
    for (text, message) in [
        ("kernel k() {}".into(), "1:8: expected the name of the kernel (`@name`), found `k`"),
        ("kernel @k(%x: f33[4] in align 64) {}".into(), "1:15: unknown element type `f33`"),
        (
            "kernel @k(%x: f32[4] into align 64) {}".into(),
            "1:22: expected `in`, `out` or `inout`, found `into`",
        ),
        (
            "kernel @k(%x: f32[m] in align 64) {}".into(),
            "1:19: unknown size `m`: expected a number, n, b, past, floordiv, min, max or mul",
        ),
        ("kernel @k(; m: %m) {}".into(), "1:13: unknown size symbol `m`; known: n, b, past"),
        (
            "kernel @k(%x: f32[1] in align 4 %y: f32[1] in align 4) {}".into(),
            "1:33: expected `,`, `;` or `)` after a parameter",
        ),
        ("kernel @k(%x: f32[1] in align 4, %x: f32[1] in align 4) {}".into(), "1:34: %x is already defined"),
        ("kernel @k() {".into(), "1:14: expected a statement, found the end of the text"),
        (body("lett %v: f32 = 1"), "2:1: unknown statement `lett`"),
        (body("block.w %b in 4 {}"), "2:1: unknown statement `block.w`"),
        (body("let %v: f32y = 1"), "2:9: unknown type `f32y`: expected an element type, or `f32x16`"),
        (body("let %v: i64 = %w"), "2:15: %w is not defined"),
        (body("let %v: i64 = $1"), "2:15: $1 is not defined"),
        (body("$1 = 1 $1 = 2"), "2:8: $1 is already defined"),
        (body("let %v: i64 = %x"), "2:15: %x is a buffer; use load(%x, index)"),
        (body("let %v: i64 = 1 store(%v, 0, 0)"), "2:23: %v is a variable, not a buffer"),
        (body("let %v: i64 = foo(1)"), "2:15: unknown operation `foo`"),
        (body("let %v: i64 = add(1)"), "2:18: expected 2 operands, found 1"),
        (body("let %v: i64 = instr.foo(1)"), "2:15: unknown instruction `foo`"),
        (body("let %v: f32 = 1.5"), "3:1: expected `:`, found `}`"),
        (body("let %v: i64 = add(1; 2)"), "2:20: expected `)`, found `;`"),
        (body("alloc %a: f32[4] heap"), "2:18: expected `shared`, `local` or `stack`"),
        (body("for %i 4 {}"), "2:8: expected `in`, found 4"),
    ] {
        assert_eq!(parse(&text).map(|_| ()).unwrap_err().to_string(), message, "{text}");
    }
}

#[test]
fn no_text_makes_the_parser_panic() {
    let texts = [SAMPLE, GPU];
    for text in texts {
        for end in 0..text.len() - 2 {
            assert!(parse(&text[..end]).is_err(), "{}", &text[..end]);
        }
        // Every token replaced by every other one.
        let words =
            ["%x", "@k", "(", ")", "{", "}", "1", "-", "f32", "if", "$1", "1.5:f32", "ramp", "4096000000000"];
        for (at, _) in text.match_indices([' ', '(', ',']) {
            for word in words {
                let mut changed = text.to_string();
                changed.insert_str(at, word);
                if let Ok(kernel) = parse(&changed) {
                    let _ = mlcc_ir::verify::verify_kernel(&kernel);
                    let _ = print_kernel(&kernel);
                }
            }
        }
    }
    let deep = format!("kernel @k() {{ let %v: i64 = {}", "neg(".repeat(100_000));
    assert!(parse(&deep).map(|_| ()).unwrap_err().to_string().contains("nested deeper than 200 levels"));
    let blocks = format!("kernel @k() {{ {}", "if 1:bool {".repeat(100_000));
    assert!(parse(&blocks).map(|_| ()).unwrap_err().to_string().contains("nested deeper than 200 levels"));
}
