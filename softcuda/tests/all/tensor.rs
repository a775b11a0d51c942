//! Tensor cores: products by fragments, straight from memory and by way of `ldmatrix`, and a wrong map of
//! lanes to elements.

use crate::machine::{KernelArg, TestLaunch, kernel};

/// Rows of 8 words of `a` (16 rows) and `b` (8 columns): 16 halves or 32 bytes each.
const ROW: usize = 8;

/// Fragments read as the ISA's figures say: `%r1` is the lane's group, `%r2` its number there. `second` is
/// where the rows of the second register of `a` begin, in bytes.
fn product(mma: &str, second: u32) -> String {
    let body = format!(
        "mov.u32 %r0, %tid.x;\nshr.u32 %r1, %r0, 2;\nand.b32 %r2, %r0, 3;\nmad.lo.s32 %r3, %r1, 8, %r2;\nmul.wide.u32 %rd3, %r3, 4;\n\
         add.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\nld.global.b32 %r10, [%rd4];\nld.global.b32 %r11, [%rd4+{second}];\n\
         ld.global.b32 %r12, [%rd4+16];\nld.global.b32 %r13, [%rd4+{}];\nld.global.b32 %r14, [%rd5];\nld.global.b32 %r15, [%rd5+16];\n\
         {mma}\n{STORE}",
        second + 16
    );
    kernel(3, &body)
}

const STORE: &str = "shl.b32 %r4, %r2, 1;\nmad.lo.s32 %r5, %r1, 8, %r4;\nmul.wide.u32 %rd6, %r5, 4;\nadd.s64 %rd7, %rd0, %rd6;\n\
                     st.global.v2.b32 [%rd7], {%r20, %r21};\nst.global.v2.b32 [%rd7+256], {%r22, %r23};\nret;";

const F16: &str = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000};";
const S8: &str = "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {1, 1, 1, 1};";

/// Small integers, which every format holds.
fn numbers(count: usize, seed: usize) -> Vec<i32> {
    (0..count).map(|i| ((i * 7 + seed) % 13) as i32 - 6).collect()
}

fn halves(of: &[i32]) -> Vec<u32> {
    let half = |x: i32| u32::from(half::f16::from_f32(x as f32).to_bits());
    of.chunks_exact(2).map(|pair| half(pair[0]) | half(pair[1]) << 16).collect()
}

fn bytes(of: &[i32]) -> Vec<u32> {
    of.chunks_exact(4).map(|x| u32::from_le_bytes([0, 1, 2, 3].map(|i| x[i] as u8))).collect()
}

fn expected(a: &[i32], b: &[i32], k: usize) -> Vec<i32> {
    let element =
        |row: usize, column: usize| (0..k).map(|j| a[row * k + j] * b[column * k + j]).sum::<i32>() + 1;
    (0..128).map(|i| element(i / 8, i % 8)).collect()
}

fn run(text: String, a: &[u32], b: &[u32]) -> Vec<u32> {
    assert_eq!((a.len(), b.len()), (16 * ROW, 8 * ROW));
    let args = [KernelArg::Empty(16 * 8 * 4), KernelArg::Words(a), KernelArg::Words(b)];
    TestLaunch::new(text, 32, &args).run().unwrap_or_else(|f| panic!("{}", f.what)).remove(0)
}

fn floats(words: &[u32]) -> Vec<i32> {
    words.iter().map(|w| f32::from_bits(*w) as i32).collect()
}

#[test]
fn products_of_halves() {
    let (a, b) = (numbers(256, 1), numbers(128, 5));
    let found = floats(&run(product(F16, 256), &halves(&a), &halves(&b)));
    assert_eq!(found, expected(&a, &b, 16));
    let bf16 = |of: &[i32]| -> Vec<u32> {
        let half = |x: i32| (x as f32).to_bits() >> 16;
        of.chunks_exact(2).map(|pair| half(pair[0]) | half(pair[1]) << 16).collect()
    };
    let found =
        floats(&run(product(&F16.replace("f32.f16.f16", "f32.bf16.bf16"), 256), &bf16(&a), &bf16(&b)));
    assert_eq!(found, expected(&a, &b, 16));
}

#[test]
fn products_of_bytes() {
    let (a, b) = (numbers(512, 1), numbers(256, 5).iter().map(|x| x + 6).collect::<Vec<_>>());
    let found = run(product(S8, 256), &bytes(&a), &bytes(&b));
    assert_eq!(found, expected(&a, &b, 32).iter().map(|x| *x as u32).collect::<Vec<_>>());
}

#[test]
fn a_wrong_map_of_lanes_shows() {
    let (a, b) = (numbers(256, 1), numbers(128, 5));
    // Registers 1 and 2 of `a` exchanged: rows and columns of its quarters.
    let wrong = product(F16, 256).replace("{%r10, %r11, %r12, %r13}", "{%r10, %r12, %r11, %r13}");
    assert_ne!(floats(&run(wrong, &halves(&a), &halves(&b))), expected(&a, &b, 16));
}

#[test]
fn rows_by_way_of_shared_memory() {
    let (a, b) = (numbers(256, 1), numbers(128, 5));
    // Each lane brings 16 bytes of `a`; then lane l gives the address of row l % 16, columns from 8 (l / 16)
    // on.
    let body = |at: &str| {
        format!(
            ".shared .align 16 .b8 xs[512];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 16;\nadd.s64 %rd9, %rd1, %rd8;\nmov.u64 %rd10, xs;\n\
             add.s64 %rd11, %rd10, %rd8;\ncp.async.cg.shared.global [%rd11], [%rd9], 16;\ncp.async.commit_group;\ncp.async.wait_group 0;\n\
             bar.sync 0;\nand.b32 %r6, %r0, 15;\nshr.u32 %r7, %r0, 4;\nshl.b32 %r6, %r6, 5;\nshl.b32 %r7, %r7, {at};\nadd.s32 %r6, %r6, %r7;\n\
             cvt.u32.u64 %r8, %rd10;\nadd.s32 %r8, %r8, %r6;\n\
             ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r8];\nshr.u32 %r1, %r0, 2;\nand.b32 %r2, %r0, 3;\n\
             mad.lo.s32 %r3, %r1, 8, %r2;\nmul.wide.u32 %rd3, %r3, 4;\nadd.s64 %rd5, %rd2, %rd3;\nld.global.b32 %r14, [%rd5];\n\
             ld.global.b32 %r15, [%rd5+16];\n{F16}\n{STORE}"
        )
    };
    let found = run(kernel(3, &body("4")), &halves(&a), &halves(&b));
    assert_eq!(floats(&found), expected(&a, &b, 16));
    // Rows have to lie at multiples of 16 bytes.
    let (a, b) = (halves(&a), halves(&b));
    let args = [KernelArg::Empty(512), KernelArg::Words(&a), KernelArg::Words(&b)];
    let failure = TestLaunch::new(kernel(3, &body("3")), 32, &args).failure();
    assert!(
        failure.what.contains("lane 16 of warp 0") && failure.what.contains("no multiple of 16"),
        "{}",
        failure.what
    );
}

#[test]
fn a_transposed_matrix() {
    let body = ".shared .align 16 .b8 xs[128];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd1, %rd8;\nmov.u64 %rd10, xs;\n\
                add.s64 %rd11, %rd10, %rd8;\nld.global.b32 %r1, [%rd9];\nst.shared.b32 [%rd11], %r1;\nbar.sync 0;\nand.b32 %r2, %r0, 7;\n\
                mul.wide.u32 %rd12, %r2, 16;\nadd.s64 %rd13, %rd10, %rd12;\nldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r3}, [%rd13];\n\
                add.s64 %rd14, %rd0, %rd8;\nst.global.b32 [%rd14], %r3;\nret;";
    let words: Vec<u32> = (0..32).map(|i| (2 * i) | ((2 * i + 1) << 16)).collect();
    let args = [KernelArg::Empty(128), KernelArg::Words(&words)];
    let found =
        TestLaunch::new(kernel(2, body), 32, &args).run().unwrap_or_else(|f| panic!("{}", f.what)).remove(0);
    let element = |row: u32, column: u32| row * 8 + column;
    let expected: Vec<u32> =
        (0..32).map(|l| element(l % 4 * 2, l / 4) | element(l % 4 * 2 + 1, l / 4) << 16).collect();
    assert_eq!(found, expected);
}

#[test]
fn all_lanes_have_to_come() {
    let text = product(&format!("setp.lt.u32 %p0, %r0, 31;\n@%p0 {F16}"), 256);
    let (a, b) = (halves(&numbers(256, 1)), halves(&numbers(128, 5)));
    let args = [KernelArg::Empty(512), KernelArg::Words(&a), KernelArg::Words(&b)];
    let failure = TestLaunch::new(text, 32, &args).failure();
    assert!(
        failure.what.contains("lane 31 of warp 0") && failure.what.contains("predicate"),
        "{}",
        failure.what
    );
}
