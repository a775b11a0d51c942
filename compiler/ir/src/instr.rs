//! Target instructions that kernels use by name. A row of the table has its meaning in kernel IR and its
//! spelling. The interpreter runs the meaning, code generation emits the spelling where the target has the
//! features and else the expansion of the meaning; one generated test per row compares the two.

use crate::builder::KernelBuilder;
use crate::fragment::{M16N8K16, M16N8K32, MmaLayout};
use crate::kernel::{BinOp, ExprId, ExprType};
use crate::types::DType;

/// A row of [`INSTRS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InstrId(pub u32);

/// The threads that execute the instruction together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecutionScope {
    Thread,
    Warp,
}

/// The meaning of the instruction.
#[derive(Clone, Copy)]
pub enum InstrSemantics {
    /// An expression of its arguments.
    Expr(fn(&mut KernelBuilder, &[ExprId]) -> ExprId),
    /// GPU: the first argument of the thread whose lane in its warp of 32 is `lane ^ second argument`.
    ShuffleXor,
    /// No visible effect: a statement on a `Load`, of which only the address matters (prefetch, touch).
    Hint,
    /// GPU: `sums + a * b` of the fragments (sums, a, b) that all lanes of a warp hold. The order in which
    /// products are added is not defined.
    Mma(&'static MmaLayout),
    /// GPU: `matrices` times 8 rows of 16 bytes from shared memory, by [`crate::fragment::UNITS`]; the
    /// argument is the address of a `Load`. `transposed` exchanges rows and columns of units of 16 bits.
    LoadMatrix { matrices: u32, transposed: bool },
    /// GPU: a statement that copies this many bytes, aligned to as many, from global to shared memory. The
    /// arguments are addresses of `Load`s. The copy is done when the thread waits for it (`Stmt::Wait`):
    /// until then the target must not be touched and the source not be written.
    Copy { bytes: u32 },
}

/// Bytes of a row that `ldmatrix` reads, to which it is aligned.
pub const MATRIX_ROW_BYTES: u32 = 16;

/// The text of the instruction in a back end.
#[derive(Clone, Copy, Debug)]
pub enum InstrSpelling {
    /// An LLVM intrinsic; arguments are bitcast to the parameter types of its declaration. `args` gives the
    /// number of our argument for each intrinsic parameter.
    Llvm { intrinsic: &'static str, args: &'static [u8] },
    /// Inline PTX with LLVM constraint string. More than 32 bits are several operands; an address has 64.
    Ptx { asm: &'static str, constraints: &'static str },
    /// Inline assembly of the CPU back end with LLVM constraint string.
    Asm { asm: &'static str, constraints: &'static str },
    /// A load of a byte that nothing uses.
    Read,
}

pub struct InstrDef {
    pub name: &'static str,
    pub scope: ExecutionScope,
    pub args: &'static [ExprType],
    pub ret: Option<ExprType>,
    pub meaning: InstrSemantics,
    pub spelling: InstrSpelling,
    /// Architecture: `x86_64`, `aarch64` or `nvptx`.
    pub arch: &'static str,
    /// LLVM feature names that must all be present.
    pub features: &'static [&'static str],
}

impl InstrId {
    pub fn def(self) -> &'static InstrDef {
        &INSTRS[self.0 as usize]
    }
    pub fn by_name(name: &str) -> Option<InstrId> {
        INSTRS.iter().position(|d| d.name == name).map(|i| InstrId(i as u32))
    }
    pub fn all() -> impl Iterator<Item = InstrId> {
        (0..INSTRS.len() as u32).map(InstrId)
    }
}

const fn v(dtype: DType, lanes: u32) -> ExprType {
    ExprType::vector(dtype, lanes)
}
use DType::{BF16, F16, F32, I8, I16, I32, U8};

/// `acc[i] + sum over j in 0..step of widen(a[step*i + j]) * widen(b[step*i + j])` in i32, wrapping.
fn dot(kb: &mut KernelBuilder, acc: Option<ExprId>, a: ExprId, b: ExprId, step: u32, wide: DType) -> ExprId {
    let lanes = kb.ty(a).lanes / step;
    let mut sum = acc;
    for j in 0..step {
        let pick: Vec<u32> = (0..lanes).map(|i| i * step + j).collect();
        let x = kb.shuffle(a, None, pick.clone());
        let y = kb.shuffle(b, None, pick);
        let (x, y) = (kb.cast(x, wide), kb.cast(y, wide));
        let product = kb.mul(x, y);
        sum = Some(match sum {
            Some(s) => kb.add(s, product),
            None => product,
        });
    }
    sum.expect("step > 0")
}

fn dot4_i32(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    dot(kb, Some(a[0]), a[1], a[2], 4, I32)
}

fn madd_i16(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    dot(kb, None, a[0], a[1], 2, I32)
}

fn dot2_i32(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    dot(kb, Some(a[0]), a[1], a[2], 2, I32)
}

/// `acc[2i + j] + sum over c in 0..8 of a[8i + c] * b[8j + c]` in i32, for rows `i` of `a` and `j` of `b`.
fn squares_i32(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let mut sum = a[0];
    for c in 0..8 {
        let x = kb.shuffle(a[1], None, [0, 0, 8, 8].map(|row| row + c).into());
        let y = kb.shuffle(a[2], None, [0, 8, 0, 8].map(|row| row + c).into());
        let (x, y) = (kb.cast(x, I32), kb.cast(y, I32));
        let product = kb.mul(x, y);
        sum = kb.add(sum, product);
    }
    sum
}

/// Products of bytes as words.
fn long_product(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let (x, y) = (kb.cast(a[0], I16), kb.cast(a[1], I16));
    kb.mul(x, y)
}

/// Sums of neighbouring words.
fn long_pairs(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let [x, y] = [0, 1].map(|odd| {
        let words = kb.shuffle(a[0], None, (0..4).map(|i| 2 * i + odd).collect());
        kb.cast(words, I32)
    });
    kb.add(x, y)
}

/// Sums of neighbours, those of `a[0]` before those of `a[1]`.
fn pairs(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let [x, y] = [0, 1].map(|odd| kb.shuffle(a[0], Some(a[1]), (0..4).map(|i| 2 * i + odd).collect()));
    kb.add(x, y)
}

/// Products of neighbouring u8 x i8 pairs added with saturation to i16.
fn maddubs(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let wide = dot(kb, None, a[0], a[1], 2, I32);
    let low = kb.constant(-32768.0, ExprType::scalar(I32));
    let high = kb.constant(32767.0, ExprType::scalar(I32));
    let floor = kb.max(wide, low);
    let clamped = kb.min(floor, high);
    kb.cast(clamped, I16)
}

/// `a` where `b` is positive, 0 where it is zero, `-a` (wrapping) where it is negative.
fn sign(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let zero = kb.constant(0.0, kb.ty(a[0]));
    let negated = kb.sub(zero, a[0]);
    let (below, above) = (kb.lt(a[1], zero), kb.lt(zero, a[1]));
    let positive = kb.select(above, a[0], zero);
    kb.select(below, negated, positive)
}

/// Pairs of bf16 products accumulated in f32: odd elements first, then even ones, each step rounded (the
/// hardware flushes denormals and rounds to nearest even, so results agree to the last bits only).
fn dpbf16(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let lanes = kb.ty(a[0]).lanes;
    let mut sum = a[0];
    for j in [1, 0] {
        let pick: Vec<u32> = (0..lanes).map(|i| i * 2 + j).collect();
        let x = kb.shuffle(a[1], None, pick.clone());
        let y = kb.shuffle(a[2], None, pick);
        let (x, y) = (kb.cast(x, F32), kb.cast(y, F32));
        sum = kb.fma(x, y, sum);
    }
    sum
}

fn lookup16(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    // table[index & 15] lane by lane, as a chain of selects over the 16 entries.
    let fifteen = kb.constant(15.0, ExprType::scalar(I32));
    let index = kb.binary(BinOp::And, a[1], fifteen);
    let lanes = kb.ty(a[1]).lanes;
    let mut out = kb.shuffle(a[0], None, vec![0; lanes as usize]);
    for entry in 1..16 {
        let value = kb.shuffle(a[0], None, vec![entry; lanes as usize]);
        let number = kb.constant(f64::from(entry), ExprType::scalar(I32));
        let hit = kb.binary(BinOp::Eq, index, number);
        out = kb.select(hit, value, out);
    }
    out
}

/// Entry `index & 15` of the table's 16 bytes at the index's place, 0 if the index has bits of `outside`.
fn lookup_bytes(kb: &mut KernelBuilder, a: &[ExprId], outside: u8) -> ExprId {
    let kept = kb.constant(f64::from(outside | 15), ExprType::scalar(U8));
    let index = kb.binary(BinOp::And, a[1], kept);
    let lanes = kb.ty(a[1]).lanes;
    let mut out = kb.constant(0.0, kb.ty(a[0]));
    for entry in 0..16 {
        let value = kb.shuffle(a[0], None, (0..lanes).map(|lane| lane / 16 * 16 + entry).collect());
        let number = kb.constant(f64::from(entry), ExprType::scalar(U8));
        let hit = kb.binary(BinOp::Eq, index, number);
        out = kb.select(hit, value, out);
    }
    out
}

fn pshufb(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    lookup_bytes(kb, a, 0x80)
}

fn tbl(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    lookup_bytes(kb, a, 0xf0)
}

/// Defines one row.
macro_rules! instr {
    ($name:literal, $arch:literal, $features:expr, ($($arg:expr),*) -> $ret:expr, $meaning:expr, $spelling:expr) => {
        InstrDef {
            name: $name,
            scope: ExecutionScope::Thread,
            args: &[$($arg),*],
            ret: Some($ret),
            meaning: $meaning,
            spelling: $spelling,
            arch: $arch,
            features: $features,
        }
    };
}

const fn llvm(intrinsic: &'static str, args: &'static [u8]) -> InstrSpelling {
    InstrSpelling::Llvm { intrinsic, args }
}

/// Asks for the cache line of a loaded element ahead of its use.
const fn prefetch(name: &'static str, element: &'static [ExprType]) -> InstrDef {
    InstrDef {
        name,
        scope: ExecutionScope::Thread,
        args: element,
        ret: None,
        meaning: InstrSemantics::Hint,
        spelling: llvm("llvm.prefetch", &[0]),
        arch: "x86_64",
        features: &["sse"],
    }
}

/// Reads from the cache line of a loaded element only to have it in the cache. A request may be dropped (a
/// Zen 4 core does so where it has too many) and teaches the core less about the stream that it belongs to.
const fn touch(name: &'static str, element: &'static [ExprType]) -> InstrDef {
    InstrDef { spelling: InstrSpelling::Read, ..prefetch(name, element) }
}

/// A product of fragments.
macro_rules! mma {
    ($name:literal, $of:expr, ($sums:expr, $a:expr, $b:expr), $types:literal, $sum:literal) => {
        InstrDef {
            scope: ExecutionScope::Warp,
            ..instr!(
                $name,
                "nvptx",
                &["mma.sync"],
                ($sums, $a, $b) -> $sums,
                InstrSemantics::Mma(&$of),
                InstrSpelling::Ptx {
                    asm: concat!(
                        "mma.sync.aligned.",
                        $types,
                        " {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
                    ),
                    constraints: concat!(
                        "=", $sum, ",=", $sum, ",=", $sum, ",=", $sum, ",",
                        $sum, ",", $sum, ",", $sum, ",", $sum, ",r,r,r,r,r,r"
                    ),
                }
            )
        }
    };
}

/// Rows of 16 bytes from shared memory.
macro_rules! ldmatrix {
    ($name:literal, $element:expr, $ret:expr, $matrices:literal, $transposed:literal, $asm:literal, $outputs:literal) => {
        InstrDef {
            scope: ExecutionScope::Warp,
            ..instr!(
                $name,
                "nvptx",
                &["mma.sync"],
                (ExprType::scalar($element)) -> $ret,
                InstrSemantics::LoadMatrix { matrices: $matrices, transposed: $transposed },
                InstrSpelling::Ptx { asm: $asm, constraints: concat!($outputs, ",l,~{memory}") }
            )
        }
    };
}

/// A copy to shared memory that its thread does not wait for.
const fn copy(name: &'static str, args: &'static [ExprType], bytes: u32) -> InstrDef {
    let asm = match bytes {
        16 => "cp.async.cg.shared.global [$0], [$1], 16;",
        8 => "cp.async.ca.shared.global [$0], [$1], 8;",
        _ => "cp.async.ca.shared.global [$0], [$1], 4;",
    };
    InstrDef {
        args,
        meaning: InstrSemantics::Copy { bytes },
        spelling: InstrSpelling::Ptx { asm, constraints: "l,l,~{memory}" },
        arch: "nvptx",
        features: &["cp.async"],
        ..prefetch(name, &[])
    }
}

/// Sums of f16, rounded once: sums of two are exact in f32, or so close that the nearest f16 is the same.
fn sum_f16(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let (x, y) = (kb.cast(a[0], F32), kb.cast(a[1], F32));
    let sum = kb.add(x, y);
    kb.cast(sum, F16)
}

fn fused_halves(kb: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    let dtype = kb.ty(a[0]).dtype;
    let [x, y, z] = [0, 1, 2].map(|i| kb.cast(a[i], F32));
    let sum = kb.fma(x, y, z);
    kb.cast(sum, dtype)
}

fn same(_: &mut KernelBuilder, a: &[ExprId]) -> ExprId {
    a[0]
}

/// No instruction at all: the value is computed here, in a register, and loads stay on their side. Else a
/// scheduler that follows the longest chain delays most of an unrolled loop, with its operands in memory.
const fn here(name: &'static str, args: &'static [ExprType], ret: ExprType) -> InstrDef {
    InstrDef {
        args,
        ret: Some(ret),
        meaning: InstrSemantics::Expr(same),
        spelling: InstrSpelling::Asm { asm: "", constraints: "=x,0,~{memory}" },
        features: &["avx2"],
        ..prefetch(name, &[])
    }
}

/// All instructions; order is only their numbering.
pub const INSTRS: &[InstrDef] = &[
    // x86: int8 dot products, `acc + dot4(u8, i8)`.
    instr!("vpdpbusd_512", "x86_64", &["avx512vnni", "avx512f"], (v(I32, 16), v(U8, 64), v(I8, 64)) -> v(I32, 16),
        InstrSemantics::Expr(dot4_i32), llvm("llvm.x86.avx512.vpdpbusd.512", &[0, 1, 2])),
    instr!("vpdpbusd_256", "x86_64", &["avx512vnni", "avx512vl"], (v(I32, 8), v(U8, 32), v(I8, 32)) -> v(I32, 8),
        InstrSemantics::Expr(dot4_i32), llvm("llvm.x86.avx512.vpdpbusd.256", &[0, 1, 2])),
    // The same in the encoding of cores without AVX-512; LLVM has one intrinsic for both.
    instr!("vpdpbusd_avx_256", "x86_64", &["avxvnni"], (v(I32, 8), v(U8, 32), v(I8, 32)) -> v(I32, 8),
        InstrSemantics::Expr(dot4_i32), llvm("llvm.x86.avx512.vpdpbusd.256", &[0, 1, 2])),
    // x86: dot products of pairs of 16 bits, `acc + dot2(i16, i16)`.
    instr!("vpdpwssd_512", "x86_64", &["avx512vnni", "avx512f"], (v(I32, 16), v(I16, 32), v(I16, 32)) -> v(I32, 16),
        InstrSemantics::Expr(dot2_i32), llvm("llvm.x86.avx512.vpdpwssd.512", &[0, 1, 2])),
    instr!("vpdpwssd_256", "x86_64", &["avx512vnni", "avx512vl"], (v(I32, 8), v(I16, 16), v(I16, 16)) -> v(I32, 8),
        InstrSemantics::Expr(dot2_i32), llvm("llvm.x86.avx512.vpdpwssd.256", &[0, 1, 2])),
    instr!("vpdpwssd_avx_256", "x86_64", &["avxvnni"], (v(I32, 8), v(I16, 16), v(I16, 16)) -> v(I32, 8),
        InstrSemantics::Expr(dot2_i32), llvm("llvm.x86.avx512.vpdpwssd.256", &[0, 1, 2])),
    instr!("vpmaddubsw_512", "x86_64", &["avx512bw"], (v(U8, 64), v(I8, 64)) -> v(I16, 32),
        InstrSemantics::Expr(maddubs), llvm("llvm.x86.avx512.pmaddubs.w.512", &[0, 1])),
    instr!("vpmaddubsw_256", "x86_64", &["avx2"], (v(U8, 32), v(I8, 32)) -> v(I16, 16),
        InstrSemantics::Expr(maddubs), llvm("llvm.x86.avx2.pmadd.ub.sw", &[0, 1])),
    instr!("pmaddubsw_128", "x86_64", &["ssse3"], (v(U8, 16), v(I8, 16)) -> v(I16, 8),
        InstrSemantics::Expr(maddubs), llvm("llvm.x86.ssse3.pmadd.ub.sw.128", &[0, 1])),
    // x86: signs of one operand put on the other; there is none of 512 bits.
    instr!("vpsignb_256", "x86_64", &["avx2"], (v(I8, 32), v(I8, 32)) -> v(I8, 32),
        InstrSemantics::Expr(sign), llvm("llvm.x86.avx2.psign.b", &[0, 1])),
    instr!("psignb_128", "x86_64", &["ssse3"], (v(I8, 16), v(I8, 16)) -> v(I8, 16),
        InstrSemantics::Expr(sign), llvm("llvm.x86.ssse3.psign.b.128", &[0, 1])),
    instr!("vpmaddwd_512", "x86_64", &["avx512bw"], (v(I16, 32), v(I16, 32)) -> v(I32, 16),
        InstrSemantics::Expr(madd_i16), llvm("llvm.x86.avx512.pmaddw.d.512", &[0, 1])),
    instr!("vpmaddwd_256", "x86_64", &["avx2"], (v(I16, 16), v(I16, 16)) -> v(I32, 8),
        InstrSemantics::Expr(madd_i16), llvm("llvm.x86.avx2.pmadd.wd", &[0, 1])),
    instr!("pmaddwd_128", "x86_64", &["sse2"], (v(I16, 8), v(I16, 8)) -> v(I32, 4),
        InstrSemantics::Expr(madd_i16), llvm("llvm.x86.sse2.pmadd.wd", &[0, 1])),
    // x86: bf16 dot product.
    instr!("vdpbf16ps_512", "x86_64", &["avx512bf16", "avx512f"], (v(F32, 16), v(BF16, 32), v(BF16, 32)) -> v(F32, 16),
        InstrSemantics::Expr(dpbf16), llvm("llvm.x86.avx512bf16.dpbf16ps.512", &[0, 1, 2])),
    instr!("vdpbf16ps_256", "x86_64", &["avx512bf16", "avx512vl"], (v(F32, 8), v(BF16, 16), v(BF16, 16)) -> v(F32, 8),
        InstrSemantics::Expr(dpbf16), llvm("llvm.x86.avx512bf16.dpbf16ps.256", &[0, 1, 2])),
    // x86: 16-entry f32 table lookup by the low 4 bits of each index.
    instr!("vpermps_512", "x86_64", &["avx512f"], (v(F32, 16), v(I32, 16)) -> v(F32, 16),
        InstrSemantics::Expr(lookup16), llvm("llvm.x86.avx512.permvar.sf.512", &[0, 1])),
    // x86: 16-entry table lookup of bytes, in each 16 bytes on their own.
    instr!("vpshufb_512", "x86_64", &["avx512bw"], (v(U8, 64), v(U8, 64)) -> v(U8, 64),
        InstrSemantics::Expr(pshufb), llvm("llvm.x86.avx512.pshuf.b.512", &[0, 1])),
    instr!("vpshufb_256", "x86_64", &["avx2"], (v(U8, 32), v(U8, 32)) -> v(U8, 32),
        InstrSemantics::Expr(pshufb), llvm("llvm.x86.avx2.pshuf.b", &[0, 1])),
    instr!("pshufb_128", "x86_64", &["ssse3"], (v(U8, 16), v(U8, 16)) -> v(U8, 16),
        InstrSemantics::Expr(pshufb), llvm("llvm.x86.ssse3.pshuf.b.128", &[0, 1])),
    // AArch64: the same.
    instr!("tbl1_128", "aarch64", &["neon"], (v(U8, 16), v(U8, 16)) -> v(U8, 16),
        InstrSemantics::Expr(tbl), llvm("llvm.aarch64.neon.tbl1.v16i8", &[0, 1])),
    // AArch64: int8 dot products.
    instr!("sdot_128", "aarch64", &["dotprod"], (v(I32, 4), v(I8, 16), v(I8, 16)) -> v(I32, 4),
        InstrSemantics::Expr(dot4_i32), llvm("llvm.aarch64.neon.sdot.v4i32.v16i8", &[0, 1, 2])),
    instr!("udot_128", "aarch64", &["dotprod"], (v(I32, 4), v(U8, 16), v(U8, 16)) -> v(I32, 4),
        InstrSemantics::Expr(dot4_i32), llvm("llvm.aarch64.neon.udot.v4i32.v16i8", &[0, 1, 2])),
    instr!("usdot_128", "aarch64", &["i8mm"], (v(I32, 4), v(U8, 16), v(I8, 16)) -> v(I32, 4),
        InstrSemantics::Expr(dot4_i32), llvm("llvm.aarch64.neon.usdot.v4i32.v16i8", &[0, 1, 2])),
    // AArch64 without a dot product: products of bytes as words, and their sums.
    instr!("smull_128", "aarch64", &["neon"], (v(I8, 8), v(I8, 8)) -> v(I16, 8),
        InstrSemantics::Expr(long_product), llvm("llvm.aarch64.neon.smull.v8i16", &[0, 1])),
    instr!("saddlp_128", "aarch64", &["neon"], (v(I16, 8)) -> v(I32, 4),
        InstrSemantics::Expr(long_pairs), llvm("llvm.aarch64.neon.saddlp.v4i32.v8i16", &[0])),
    instr!("addp_128", "aarch64", &["neon"], (v(I32, 4), v(I32, 4)) -> v(I32, 4),
        InstrSemantics::Expr(pairs), llvm("llvm.aarch64.neon.addp.v4i32", &[0, 1])),
    // AArch64: two rows of 8 codes times two others, every one with every other.
    instr!("smmla_128", "aarch64", &["i8mm"], (v(I32, 4), v(I8, 16), v(I8, 16)) -> v(I32, 4),
        InstrSemantics::Expr(squares_i32), llvm("llvm.aarch64.neon.smmla.v4i32.v16i8", &[0, 1, 2])),
    // AArch64: bf16 dot product, with products and sums rounded to odd: equal to the last bits only.
    instr!("bfdot_128", "aarch64", &["bf16"], (v(F32, 4), v(BF16, 8), v(BF16, 8)) -> v(F32, 4),
        InstrSemantics::Expr(dpbf16), llvm("llvm.aarch64.neon.bfdot.v4f32.v8bf16", &[0, 1, 2])),
    // NVIDIA.
    InstrDef {
        name: "shfl_xor_f32",
        scope: ExecutionScope::Warp,
        args: &[ExprType::F32, ExprType::scalar(I32)],
        ret: Some(ExprType::F32),
        meaning: InstrSemantics::ShuffleXor,
        spelling: InstrSpelling::Ptx {
            asm: "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;",
            constraints: "=f,f,r",
        },
        arch: "nvptx",
        features: &[],
    },
    InstrDef {
        name: "shfl_xor_i32",
        scope: ExecutionScope::Warp,
        args: &[ExprType::scalar(I32), ExprType::scalar(I32)],
        ret: Some(ExprType::scalar(I32)),
        meaning: InstrSemantics::ShuffleXor,
        spelling: InstrSpelling::Ptx {
            asm: "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;",
            constraints: "=r,r,r",
        },
        arch: "nvptx",
        features: &[],
    },
    // acc + dot4(i8, i8); arguments as 4-lane vectors, one 32-bit register each.
    instr!("dp4a_s32", "nvptx", &[], (v(I32, 1), v(I8, 4), v(I8, 4)) -> v(I32, 1),
        InstrSemantics::Expr(dot4_i32), InstrSpelling::Ptx { asm: "dp4a.s32.s32 $0, $2, $3, $1;", constraints: "=r,r,r,r" }),
    // Two f16 in a register.
    instr!("add_f16x2", "nvptx", &["mma.sync"], (v(F16, 2), v(F16, 2)) -> v(F16, 2),
        InstrSemantics::Expr(sum_f16), InstrSpelling::Ptx { asm: "add.rn.f16x2 $0, $1, $2;", constraints: "=r,r,r" }),
    instr!("fma_f16x2", "nvptx", &["mma.sync"], (v(F16, 2), v(F16, 2), v(F16, 2)) -> v(F16, 2),
        InstrSemantics::Expr(fused_halves), InstrSpelling::Ptx { asm: "fma.rn.f16x2 $0, $1, $2, $3;", constraints: "=r,r,r,r" }),
    // Two bf16 in a register; their sum alone is an instruction from sm_90 on.
    instr!("fma_bf16x2", "nvptx", &["mma.sync"], (v(BF16, 2), v(BF16, 2), v(BF16, 2)) -> v(BF16, 2),
        InstrSemantics::Expr(fused_halves), InstrSpelling::Ptx { asm: "fma.rn.bf16x2 $0, $1, $2, $3;", constraints: "=r,r,r,r" }),
    // Tensor cores, from sm_80 on.
    mma!(
        "mma_m16n8k16_f16",
        M16N8K16,
        (v(F32, 4), v(F16, 8), v(F16, 4)),
        "m16n8k16.row.col.f32.f16.f16.f32",
        "f"
    ),
    mma!(
        "mma_m16n8k16_bf16",
        M16N8K16,
        (v(F32, 4), v(BF16, 8), v(BF16, 4)),
        "m16n8k16.row.col.f32.bf16.bf16.f32",
        "f"
    ),
    mma!(
        "mma_m16n8k32_i8",
        M16N8K32,
        (v(I32, 4), v(I8, 16), v(I8, 8)),
        "m16n8k32.row.col.s32.s8.s8.s32",
        "r"
    ),
    ldmatrix!(
        "ldmatrix_x4_f16",
        F16,
        v(F16, 8),
        4,
        false,
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x4_bf16",
        BF16,
        v(BF16, 8),
        4,
        false,
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x4_i8",
        I8,
        v(I8, 16),
        4,
        false,
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x2_f16",
        F16,
        v(F16, 4),
        2,
        false,
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];",
        "=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x2_bf16",
        BF16,
        v(BF16, 4),
        2,
        false,
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];",
        "=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x2_i8",
        I8,
        v(I8, 8),
        2,
        false,
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];",
        "=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x4_trans_f16",
        F16,
        v(F16, 8),
        4,
        true,
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x4_trans_bf16",
        BF16,
        v(BF16, 8),
        4,
        true,
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x2_trans_f16",
        F16,
        v(F16, 4),
        2,
        true,
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0, $1}, [$2];",
        "=r,=r"
    ),
    ldmatrix!(
        "ldmatrix_x2_trans_bf16",
        BF16,
        v(BF16, 4),
        2,
        true,
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0, $1}, [$2];",
        "=r,=r"
    ),
    copy("cp_async_16_f32", &[ExprType::F32, ExprType::F32], 16),
    copy("cp_async_4_f32", &[ExprType::F32, ExprType::F32], 4),
    copy("cp_async_16_f16", &[ExprType::scalar(F16), ExprType::scalar(F16)], 16),
    copy("cp_async_16_bf16", &[ExprType::scalar(BF16), ExprType::scalar(BF16)], 16),
    copy("cp_async_16_u8", &[ExprType::scalar(U8), ExprType::scalar(U8)], 16),
    copy("cp_async_16_i8", &[ExprType::scalar(I8), ExprType::scalar(I8)], 16),
    copy("cp_async_8_u8", &[ExprType::scalar(U8), ExprType::scalar(U8)], 8),
    copy("cp_async_4_u8", &[ExprType::scalar(U8), ExprType::scalar(U8)], 4),
    // x86: prefetch into all cache levels, per element type of the buffer.
    prefetch("prefetch_u8", &[ExprType::scalar(U8)]),
    prefetch("prefetch_i8", &[ExprType::scalar(DType::I8)]),
    prefetch("prefetch_f16", &[ExprType::scalar(DType::F16)]),
    prefetch("prefetch_bf16", &[ExprType::scalar(BF16)]),
    prefetch("prefetch_f32", &[ExprType::F32]),
    touch("touch_i8", &[ExprType::scalar(DType::I8)]),
    touch("touch_f16", &[ExprType::scalar(DType::F16)]),
    touch("touch_bf16", &[ExprType::scalar(BF16)]),
    touch("touch_f32", &[ExprType::F32]),
    // x86: a value at its place in the code.
    here("here_i16_256", &[v(I16, 16)], v(I16, 16)),
    here("here_i32_256", &[v(I32, 8)], v(I32, 8)),
];
