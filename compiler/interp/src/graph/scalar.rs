//! Scalar arithmetic of the graph interpreter: f64 for floats, i64 for integers, rounded to a type at the
//! end.

use half::{bf16, f16};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::types::DType;

/// Value of a float of that type nearest to `v`. A packed weight's elements are f32 values.
pub fn round_float(dtype: DType, v: f64) -> f64 {
    match dtype {
        DType::F16 => f16::from_f32(round_to_odd(v)).to_f64(),
        DType::BF16 => bf16::from_f32(round_to_odd(v)).to_f64(),
        _ => f64::from(v as f32),
    }
}

/// f64 to f32 by rounding to odd: inexact results get an odd last bit, so that a second rounding to a type
/// with at least two bits less is the same as rounding once (Boldo and Melquiond). `half` goes through f32 or
/// drops low bits.
fn round_to_odd(v: f64) -> f32 {
    let nearest = v as f32;
    let back = f64::from(nearest);
    if back == v || !v.is_finite() {
        return nearest;
    }
    let toward_zero = nearest.to_bits() - u32::from(back.abs() > v.abs());
    f32::from_bits(toward_zero | 1)
}

/// Float to integer or bool: truncated and saturated, NaN gives 0; to bool: not equal to zero.
pub fn float_to_int(dtype: DType, v: f64) -> i64 {
    match dtype {
        DType::Bool => i64::from(v != 0.0),
        DType::I8 => i64::from(v as i8),
        DType::U8 => i64::from(v as u8),
        DType::I16 => i64::from(v as i16),
        DType::U16 => i64::from(v as u16),
        DType::I32 => i64::from(v as i32),
        DType::U32 => i64::from(v as u32),
        DType::I64 | DType::F16 | DType::BF16 | DType::F32 | DType::Packed(_) => v as i64,
    }
}

/// Integer to a smaller one: the low bits; to bool: not equal to zero.
pub fn wrap_int(dtype: DType, v: i64) -> i64 {
    match dtype {
        DType::Bool => i64::from(v != 0),
        DType::I8 => i64::from(v as i8),
        DType::U8 => i64::from(v as u8),
        DType::I16 => i64::from(v as i16),
        DType::U16 => i64::from(v as u16),
        DType::I32 => i64::from(v as i32),
        DType::U32 => i64::from(v as u32),
        DType::I64 | DType::F16 | DType::BF16 | DType::F32 | DType::Packed(_) => v,
    }
}

/// `v` as an element of `dtype`.
pub fn from_float(dtype: DType, v: f64) -> f64 {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 | DType::Packed(_) => round_float(dtype, v),
        _ => float_to_int(dtype, v) as f64,
    }
}

/// `v` as an element of `dtype`.
pub fn from_int(dtype: DType, v: i64) -> f64 {
    match dtype {
        DType::F16 | DType::BF16 | DType::F32 | DType::Packed(_) => round_float(dtype, v as f64),
        _ => wrap_int(dtype, v) as f64,
    }
}

/// A function of one float; `None` for [`UnOp::Not`], which floats do not have.
pub fn float_unary(op: UnOp) -> Option<fn(f64) -> f64> {
    Some(match op {
        UnOp::Neg => |a| -a,
        UnOp::Abs => f64::abs,
        UnOp::Sqrt => f64::sqrt,
        UnOp::Floor => f64::floor,
        UnOp::Round => f64::round_ties_even,
        UnOp::Exp => libm::exp,
        UnOp::Log => libm::log,
        UnOp::Tanh => libm::tanh,
        UnOp::Sigmoid => |a| 1.0 / (1.0 + libm::exp(-a)),
        UnOp::Rsqrt => |a| 1.0 / a.sqrt(),
        UnOp::Recip => |a| 1.0 / a,
        UnOp::Erf => libm::erf,
        UnOp::Sin => libm::sin,
        UnOp::Cos => libm::cos,
        UnOp::Not => return None,
    })
}

/// Arithmetic on two floats; `None` for comparisons and for what floats do not have.
pub fn float_binary(op: BinOp) -> Option<fn(f64, f64) -> f64> {
    Some(match op {
        BinOp::Add => |a, b| a + b,
        BinOp::Sub => |a, b| a - b,
        BinOp::Mul => |a, b| a * b,
        BinOp::Div => |a, b| a / b,
        BinOp::Rem => |a, b| a % b,
        BinOp::Min => f64::min,
        BinOp::Max => f64::max,
        _ => return None,
    })
}

pub fn float_compare(op: BinOp) -> Option<fn(&f64, &f64) -> bool> {
    Some(match op {
        BinOp::Lt => |a, b| a < b,
        BinOp::Le => |a, b| a <= b,
        BinOp::Eq => |a, b| a == b,
        BinOp::Ne => |a, b| a != b,
        _ => return None,
    })
}

/// A function of one integer (`not` of a bool is handled by its caller).
pub fn int_unary(op: UnOp) -> Option<fn(i64) -> i64> {
    Some(match op {
        UnOp::Neg => i64::wrapping_neg,
        UnOp::Abs => i64::wrapping_abs,
        UnOp::Not => |a| !a,
        _ => return None,
    })
}

/// Arithmetic and comparison of integers; `None` only for a division by zero.
pub fn int_binary(op: BinOp, a: i64, b: i64) -> Option<i64> {
    Some(match op {
        BinOp::Add => a.wrapping_add(b),
        BinOp::Sub => a.wrapping_sub(b),
        BinOp::Mul => a.wrapping_mul(b),
        BinOp::Div | BinOp::Rem if b == 0 => return None,
        BinOp::Div => a.wrapping_div(b),
        BinOp::Rem => a.wrapping_rem(b),
        BinOp::Min => a.min(b),
        BinOp::Max => a.max(b),
        BinOp::And => a & b,
        BinOp::Or => a | b,
        BinOp::Xor => a ^ b,
        BinOp::Shl => a.wrapping_shl(b as u32),
        BinOp::Shr => a.wrapping_shr(b as u32),
        BinOp::Lt => i64::from(a < b),
        BinOp::Le => i64::from(a <= b),
        BinOp::Eq => i64::from(a == b),
        BinOp::Ne => i64::from(a != b),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_nearest_even() {
        assert_eq!(round_float(DType::F16, 2049.0), 2048.0);
        assert_eq!(round_float(DType::F16, 2051.0), 2052.0);
        assert_eq!(round_float(DType::F16, 70000.0), f64::INFINITY);
        assert_eq!(round_float(DType::BF16, 257.0), 256.0);
        assert_eq!(round_float(DType::BF16, 259.0), 260.0);
        // Just above a tie: rounding through f32 first would lose the last bit and go down.
        assert_eq!(round_float(DType::BF16, 257.0 + 1e-12), 258.0);
        assert_eq!(round_float(DType::BF16, -257.0 - 1e-12), -258.0);
        assert_eq!(round_float(DType::BF16, 259.0 - 1e-12), 258.0);
        assert_eq!(round_float(DType::F16, 1e300), f64::INFINITY);
        assert_eq!(round_float(DType::F16, -1e-300), 0.0);
        assert_eq!(round_float(DType::F16, f64::NEG_INFINITY), f64::NEG_INFINITY);
        assert!(round_float(DType::BF16, f64::NAN).is_nan());
        assert_eq!(round_float(DType::F32, 16777217.0), 16777216.0);
    }

    #[test]
    fn casts_saturate_floats_and_wrap_integers() {
        assert_eq!(from_float(DType::I8, -300.7), -128.0);
        assert_eq!(from_float(DType::I8, -3.7), -3.0);
        assert_eq!(from_float(DType::U8, f64::NAN), 0.0);
        assert_eq!(from_int(DType::I8, 300), 44.0);
        assert_eq!(from_float(DType::Bool, 0.5), 1.0);
    }

    #[test]
    fn max_ignores_nan() {
        let max = float_binary(BinOp::Max).unwrap();
        assert_eq!(max(f64::NAN, 1.0), 1.0);
        assert_eq!(int_binary(BinOp::Div, -7, 2), Some(-3));
        assert_eq!(int_binary(BinOp::Rem, 1, 0), None);
    }
}
