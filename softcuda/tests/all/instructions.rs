//! Results of single instructions, against the rules of the ISA.

use crate::machine::compute;

/// The result of `op` on words in `%r1`, `%r2`, `%r3` (`%f1` to `%f3` hold the same bits).
fn word(op: &str, input: &[u32]) -> u32 {
    let loads: String = (0..input.len())
        .map(|i| format!("ld.global.u32 %r{0}, [%rd1+{1}];\nmov.b32 %f{0}, %r{0};\n", i + 1, 4 * i))
        .collect();
    let result = if op.contains(" %f0") { "mov.b32 %r0, %f0;\n" } else { "" };
    compute(&format!("{loads}{op}\n{result}st.global.u32 [%rd0], %r0;"), input)
}

fn float(op: &str, input: &[f32]) -> f32 {
    let bits: Vec<u32> = input.iter().map(|x| x.to_bits()).collect();
    f32::from_bits(word(op, &bits))
}

#[test]
fn integers() {
    let max = u32::MAX;
    let cases: &[(&str, &[u32], u32)] = &[
        ("sub.s32 %r0, %r1, %r2;", &[3, 5], max - 1),
        ("mul.hi.u32 %r0, %r1, %r2;", &[max, max], max - 1),
        ("mul.hi.s32 %r0, %r1, %r2;", &[max, 5], max),
        ("mad.lo.s32 %r0, %r1, %r2, %r3;", &[3, 5, 7], 22),
        ("min.s32 %r0, %r1, %r2;", &[max, 5], max),
        ("min.u32 %r0, %r1, %r2;", &[max, 5], 5),
        ("div.s32 %r0, %r1, %r2;", &[-7i32 as u32, 2], -3i32 as u32),
        ("rem.s32 %r0, %r1, %r2;", &[-7i32 as u32, 2], -1i32 as u32),
        // Amounts beyond the size are clamped.
        ("shl.b32 %r0, %r1, %r2;", &[1, 32], 0),
        ("shr.u32 %r0, %r1, %r2;", &[max, 40], 0),
        ("shr.s32 %r0, %r1, %r2;", &[0x8000_0000, 40], max),
        ("bfe.u32 %r0, %r1, 4, 8;", &[0xabcd_ef12], 0xf1),
        ("bfe.s32 %r0, %r1, 4, 8;", &[0xabcd_ef12], 0xffff_fff1),
        ("bfe.u32 %r0, %r1, 28, 8;", &[0xabcd_ef12], 0xa),
        ("bfe.s32 %r0, %r1, 28, 8;", &[0xabcd_ef12], 0xffff_fffa),
        ("bfe.s32 %r0, %r1, 0, 0;", &[max], 0),
        ("bfi.b32 %r0, %r1, %r2, 8, 4;", &[0xff, 0], 0xf00),
        ("prmt.b32 %r0, %r1, %r2, 0x7531;", &[0x4433_2211, 0x8877_6655], 0x8866_4422),
        ("prmt.b32 %r0, %r1, %r2, 0xc004;", &[0x4433_2211, 0x8877_6685], 0xff11_1185),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0xea;", &[0b1100, 0b1010, 0b0001], 0b1001),
        ("lop3.b32 %r0, %r1, %r2, %r3, 0x96;", &[0b1100, 0b1010, 0b1111], 0b1001),
        ("shf.l.wrap.b32 %r0, %r1, %r2, 8;", &[0x1122_3344, 0x5566_7788], 0x6677_8811),
        ("shf.r.clamp.b32 %r0, %r1, %r2, 40;", &[1, 0x5566_7788], 0x5566_7788),
        ("dp4a.s32.s32 %r0, %r1, %r2, %r3;", &[0xff02_0304, 0x0101_0101, 10], 18),
        ("dp4a.u32.s32 %r0, %r1, %r2, %r3;", &[0xff00_0000, 0xff00_0000, 0], -255i32 as u32),
        ("popc.b32 %r0, %r1;", &[0xf0f0], 8),
        ("clz.b32 %r0, %r1;", &[0], 32),
        ("brev.b32 %r0, %r1;", &[1], 0x8000_0000),
        ("abs.s32 %r0, %r1;", &[-9i32 as u32], 9),
        ("not.b32 %r0, %r1;", &[0], max),
    ];
    for (op, input, expected) in cases {
        assert_eq!(word(op, input), *expected, "{op}");
    }
}

#[test]
fn sixteen_and_sixty_four_bits() {
    let short = |op: &str, a: u32, b: u32| {
        compute(
            &format!(
                "ld.global.u16 %rs1, [%rd1];\nld.global.u16 %rs2, [%rd1+4];\n{op}\ncvt.u32.u16 %r0, %rs0;\nst.global.u32 [%rd0], %r0;"
            ),
            &[a, b],
        )
    };
    assert_eq!(short("add.s16 %rs0, %rs1, %rs2;", 0xffff, 2), 1);
    assert_eq!(short("mul.lo.s16 %rs0, %rs1, -85;", 3, 0), 0xff01);
    assert_eq!(short("mul.hi.u16 %rs0, %rs1, %rs2;", 0xffff, 0xffff), 0xfffe);
    assert_eq!(short("shr.u16 %rs0, %rs1, 3;", 0x8000, 0), 0x1000);
    assert_eq!(short("setp.gt.s16 %p0, %rs1, %rs2;\nselp.b16 %rs0, 1, 0, %p0;", 0xffff, 3), 0);
    let long = |op: &str, words: [u32; 4]| {
        compute(
            &format!(
                "ld.global.v2.u64 {{%rd2, %rd3}}, [%rd1];\n{op}\nshr.u64 %rd5, %rd4, 16;\ncvt.u32.u64 %r0, %rd5;\nst.global.u32 [%rd0], %r0;"
            ),
            &words,
        )
    };
    assert_eq!(long("add.s64 %rd4, %rd2, %rd3;", [u32::MAX, 0, 1, 0]), 1 << 16);
    assert_eq!(long("mul.hi.u64 %rd4, %rd2, %rd3;", [0, 1 << 16, 0, 1 << 16]), 1 << 16);
    assert_eq!(long("shr.s64 %rd4, %rd2, 60;", [0, 0x8000_0000, 0, 0]), u32::MAX);
    assert_eq!(long("bfe.u64 %rd4, %rd2, 16, 32;", [0xaaaa_bbbb, 0xcccc_dddd, 0, 0]), 0xdddd);
    assert_eq!(long("mov.u64 %rd4, -65536;", [0; 4]), u32::MAX);
    let wide = "ld.global.u32 %r1, [%rd1];\nmul.wide.s32 %rd2, %r1, -3;\nshr.s64 %rd3, %rd2, 1;\ncvt.u32.u64 %r0, %rd3;\nst.global.u32 [%rd0], %r0;";
    assert_eq!(compute(wide, &[5]), -8i32 as u32);
}

#[test]
fn floats() {
    let tiny = f32::from_bits(3);
    assert_eq!(float("add.rn.f32 %f0, %f1, %f2;", &[1.0, 2.0]), 3.0);
    // Once rounded, not twice.
    let (a, b) = (1.0 + f32::EPSILON, 1.0 - f32::EPSILON);
    assert_eq!(float("fma.rn.f32 %f0, %f1, %f2, %f3;", &[a, b, -1.0]), -f32::EPSILON * f32::EPSILON);
    assert_eq!(float("add.rn.f32 %f0, %f1, %f2;", &[tiny, 0.0]), tiny);
    assert_eq!(float("add.rn.ftz.f32 %f0, %f1, %f2;", &[-tiny, -0.0]).to_bits(), 0x8000_0000);
    assert_eq!(float("mul.rn.ftz.f32 %f0, %f1, %f2;", &[1e-30, 1e-10]), 0.0);
    assert_eq!(float("add.rn.sat.f32 %f0, %f1, %f2;", &[0.7, 0.7]), 1.0);
    assert_eq!(float("min.f32 %f0, %f1, %f2;", &[f32::NAN, 2.0]), 2.0);
    assert_eq!(float("max.f32 %f0, %f1, %f2;", &[-0.0, 0.0]).to_bits(), 0);
    assert_eq!(float("min.f32 %f0, %f1, %f2;", &[0.0, -0.0]).to_bits(), 0x8000_0000);
    assert!(float("max.NaN.f32 %f0, %f1, %f2;", &[f32::NAN, 2.0]).is_nan());
    assert_eq!(word("add.f32 %f0, %f1, %f2;", &[0xffc0_0001, 0]), 0x7fff_ffff);
    assert_eq!(float("div.rn.f32 %f0, %f1, %f2;", &[1.0, 3.0]), 1.0 / 3.0);
    assert_eq!(float("rcp.rn.f32 %f0, %f1;", &[3.0]), 1.0 / 3.0);
    assert_eq!(float("sqrt.rn.f32 %f0, %f1;", &[2.0]), 2f32.sqrt());
    assert_eq!(float("copysign.f32 %f0, %f1, %f2;", &[-1.0, 3.0]), -3.0);
    assert_eq!(float("neg.f32 %f0, %f1;", &[3.0]), -3.0);
}

#[test]
fn approximate_functions_are_within_their_errors_and_not_exact() {
    let mut off = 0;
    for i in 1..200u32 {
        let x = 0.037 * i as f32;
        let mut near = |op: &str, exact: f64, bound: f64| {
            let found = float(&format!("{op} %f0, %f1;"), &[x]);
            let error = (f64::from(found) - exact).abs();
            assert!(error <= bound, "{op} {x}: {found}, {exact}, {error:e}");
            off += u32::from(found != exact as f32);
        };
        let wide = f64::from(x);
        let ulp = |y: f64| f64::from(f32::EPSILON) * y.abs();
        near("ex2.approx.f32", wide.exp2(), 2.0 * ulp(wide.exp2()));
        near("rcp.approx.f32", 1.0 / wide, ulp(1.0 / wide));
        near("rsqrt.approx.f32", 1.0 / wide.sqrt(), 1.08 * ulp(1.0 / wide.sqrt()));
        near("sqrt.approx.f32", wide.sqrt(), ulp(wide.sqrt()));
        near("tanh.approx.f32", wide.tanh(), wide.tanh() / 2048.0);
        near("lg2.approx.f32", wide.log2(), 2f64.powi(-22) * wide.log2().abs().max(1.0));
        if wide < std::f64::consts::TAU {
            near("sin.approx.f32", wide.sin(), 2f64.powi(-20));
            near("cos.approx.f32", wide.cos(), 2f64.powi(-20));
        }
    }
    assert!(off > 200, "only {off} results differ from the exact ones");
    assert_eq!(float("ex2.approx.f32 %f0, %f1;", &[f32::NEG_INFINITY]), 0.0);
    assert_eq!(float("rcp.approx.f32 %f0, %f1;", &[0.0]), f32::INFINITY);
    assert_eq!(float("div.approx.f32 %f0, %f1, %f2;", &[3.0, 2e38]), 0.0);
}

#[test]
fn comparisons_of_nan() {
    let holds = |cmp: &str, x: f32, y: f32| {
        word(&format!("setp.{cmp}.f32 %p0, %f1, %f2;\nselp.b32 %r0, 1, 0, %p0;"), &[x.to_bits(), y.to_bits()])
            == 1
    };
    let nan = f32::NAN;
    for (cmp, unordered) in [
        ("eq", false),
        ("ne", false),
        ("lt", false),
        ("ltu", true),
        ("neu", true),
        ("equ", true),
        ("num", false),
        ("nan", true),
    ] {
        assert_eq!(holds(cmp, nan, 1.0), unordered, "{cmp}");
    }
    assert!(
        holds("lt", 1.0, 2.0) && !holds("ge", 1.0, 2.0) && holds("geu", 2.0, 2.0) && holds("num", 1.0, 1.0)
    );
    let two = "setp.lt.s32 %p1, %r1, 0;\nsetp.gt.and.u32 %p0|%p2, %r1, %r2, !%p1;\nselp.b32 %r3, 2, 0, %p2;\nselp.b32 %r4, 1, 0, %p0;\nadd.s32 %r0, %r3, %r4;";
    assert_eq!(word(two, &[5, 3]), 1);
    assert_eq!(word(two, &[2, 3]), 2);
    assert_eq!(word(two, &[u32::MAX, 3]), 0);
    // Constants that LLVM writes for predicates.
    let constant = |op: &str| {
        let text = format!("setp.lt.s32 %p1, %r1, %r2;\n{op};\nselp.b32 %r0, 1, 0, %p0;");
        [word(&text, &[2, 3]), word(&text, &[3, 2])]
    };
    assert_eq!(constant("xor.pred %p0, %p1, -1"), [0, 1]);
    assert_eq!(constant("xor.pred %p0, %p1, 0"), [1, 0]);
    assert_eq!(constant("and.pred %p0, %p1, -1"), [1, 0]);
    assert_eq!(constant("and.pred %p0, %p1, 0"), [0, 0]);
    assert_eq!(constant("or.pred %p0, %p1, 1"), [1, 1]);
}

#[test]
fn conversions() {
    let int = |op: &str, x: f32| word(&format!("{op} %r0, %f1;"), &[x.to_bits()]) as i32;
    assert_eq!(
        [int("cvt.rni.s32.f32", 2.5), int("cvt.rni.s32.f32", 3.5), int("cvt.rzi.s32.f32", -2.9)],
        [2, 4, -2]
    );
    assert_eq!(
        [int("cvt.rmi.s32.f32", -2.1), int("cvt.rpi.s32.f32", -2.9), int("cvt.rni.s32.f32", 1e20)],
        [-3, -2, i32::MAX]
    );
    assert_eq!([int("cvt.rzi.s32.f32", f32::NAN), int("cvt.rzi.u32.f32", -5.0)], [0, 0]);
    // An integer beyond 24 bits is rounded once, in the direction asked for.
    let big = 0x0100_0001u32;
    let from = |op: &str| f32::from_bits(word(&format!("{op} %f0, %r1;"), &[big]));
    assert_eq!(
        [from("cvt.rn.f32.u32"), from("cvt.rp.f32.u32"), from("cvt.rz.f32.u32")],
        [16777216.0, 16777218.0, 16777216.0]
    );
    let half = |op: &str, x: f32| {
        let body = format!(
            "ld.global.f32 %f1, [%rd1];\n{op} %rs0, %f1;\ncvt.u32.u16 %r0, %rs0;\nst.global.u32 [%rd0], %r0;"
        );
        compute(&body, &[x.to_bits()])
    };
    assert_eq!(
        [half("cvt.rn.f16.f32", 1.0), half("cvt.rn.f16.f32", 65519.0), half("cvt.rn.f16.f32", 65520.0)],
        [0x3c00, 0x7bff, 0x7c00]
    );
    assert_eq!(
        [half("cvt.rz.f16.f32", 1e6), half("cvt.rm.f16.f32", -1e6), half("cvt.rp.f16.f32", 1e-9)],
        [0x7bff, 0xfc00, 1]
    );
    assert_eq!(
        [half("cvt.rn.bf16.f32", 1.0 + 1.0 / 256.0), half("cvt.rn.bf16.f32", 1.0 + 3.0 / 256.0)],
        [0x3f80, 0x3f82]
    );
    let pack = "cvt.rn.f16x2.f32 %r0, %f1, %f2;";
    assert_eq!(word(pack, &[2f32.to_bits(), 1f32.to_bits()]), 0x4000_3c00);
    let bytes = "ld.global.s8 %rs1, [%rd1];\ncvt.rn.f32.s16 %f0, %rs1;\nmov.b32 %r0, %f0;\nst.global.u32 [%rd0], %r0;";
    assert_eq!(f32::from_bits(compute(bytes, &[0x80])), -128.0);
    assert_eq!(word("cvt.sat.u8.s32 %r0, %r1;", &[-4i32 as u32]), 0);
    assert_eq!(word("cvt.s32.s8 %r0, %r1;", &[0x1ff]), u32::MAX);
}

#[test]
fn halves() {
    // 2048 + 1 is a tie in f16; with a product below it the sum is above it.
    let fma = "fma.rn.f16x2 %r0, %r1, %r2, %r3;";
    assert_eq!(word(fma, &[0x3c00_3c00, 0x3c00_3c01, 0x6800_6800]), 0x6800_6801);
    assert_eq!(word("add.rn.bf16x2 %r0, %r1, %r2;", &[0x3f80_3f80, 0x3f80_4000]), 0x4000_4040);
    assert_eq!(word("neg.f16x2 %r0, %r1;", &[0x3c00_bc00]), 0xbc00_3c00);
    assert_eq!(word("max.f16x2 %r0, %r1, %r2;", &[0x3c00_7e00, 0x4000_3c00]), 0x4000_3c00);
    assert_eq!(word("fma.rn.relu.bf16x2 %r0, %r1, %r2, %r3;", &[0x3f80_3f80, 0xbf80_3f80, 0]), 0x0000_3f80);
}

#[test]
fn atomics() {
    let change = |op: &str, words: &[u32]| {
        let text = crate::machine::kernel(1, &format!("{op}\nst.global.u32 [%rd0+4], %r0;\nret;"));
        let args = [crate::machine::KernelArg::Words(words)];
        let out = crate::machine::TestLaunch::new(text, 1, &args).run().unwrap();
        (out[0][0], out[0][1])
    };
    assert_eq!(change("atom.global.add.u32 %r0, [%rd0], 3;", &[4, 0]), (7, 4));
    assert_eq!(change("atom.global.cas.b32 %r0, [%rd0], 4, 9;", &[4, 0]), (9, 4));
    assert_eq!(change("atom.global.cas.b32 %r0, [%rd0], 5, 9;", &[4, 0]), (4, 4));
    assert_eq!(change("atom.global.inc.u32 %r0, [%rd0], 4;", &[4, 0]), (0, 4));
    assert_eq!(change("atom.acq_rel.gpu.global.min.s32 %r0, [%rd0], -1;", &[4, 0]), (u32::MAX, 4));
    assert_eq!(
        change("atom.global.add.f32 %r0, [%rd0], 0f3F800000;", &[0x3f80_0000, 0]),
        (0x4000_0000, 0x3f80_0000)
    );
}
