//! 16-bit block floating point: numbers as integers times a unit of their block.

use crate::params::PairDot;
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Val;

/// The largest size of a 16-bit code whose high byte fits i8.
pub(super) const MOST_SIGNED: f64 = 32512.0;
/// Sizes below count as this one, so that no quotient overflows.
const LEAST: f64 = 1e-30;
/// `1.5 * 2^23`: the low bits of a sum with it are those of the other summand, rounded to an integer.
pub(super) const MAGIC: f64 = 12_582_912.0;

/// `x * inverse + magic` with the integer in the low bits.
pub(super) fn encode_magic<'k>(x: Val<'k>, inverse: Val<'k>, magic: Val<'k>) -> Val<'k> {
    x.fma(inverse, magic).bits(DType::I32).named("bits")
}

/// 16-bit codes of `x`: the bits of [`encode_magic`] with 128 added, and words whose two lowest bytes are the
/// signed ones of the code, the less significant one below the other.
pub(super) fn signed_codes<'k>(x: Val<'k>, inverse: Val<'k>) -> (Val<'k>, Val<'k>) {
    let bits = encode_magic(x, inverse, x.recorder().float(MAGIC + 128.0));
    (bits, (bits ^ 128).named("bytes"))
}

/// The sizes of numbers as integers in the same order; NaN is the largest.
pub(super) fn size_bits(x: Val) -> Val {
    x.bits(DType::I32) & 0x7fff_ffff
}

/// The unit of codes of up to `codes` for numbers of these [`size_bits`] at most, and its inverse.
pub(super) fn unit_of<'k>(bits: Val<'k>, codes: Val<'k>) -> (Val<'k>, Val<'k>) {
    let most = bits.bits(DType::F32).max(LEAST).named("most");
    ((most / codes).named("unit"), (codes / most).named("inverse"))
}

/// Words of two codes, of which only the low 16 bits count.
pub(super) fn pair_codes<'k>(low: Val<'k>, high: Val<'k>) -> Val<'k> {
    ((low & 0xffff) | (high << 16)).named("words")
}

/// `sum + dot`, lane by lane; `a` and `b` are words of two codes.
pub(super) fn add_pairs<'k>(dot: PairDot, sum: Val<'k>, a: Val<'k>, b: Val<'k>) -> Val<'k> {
    let pairs = ExprType::vector(DType::I16, 2 * sum.lanes());
    let (a, b) = (a.bits_as(pairs), b.bits_as(pairs));
    match dot {
        PairDot::Added(instr) => sum.instr(instr, &[a, b]),
        PairDot::Products(instr) => sum + a.instr(instr, &[b]),
    }
}
