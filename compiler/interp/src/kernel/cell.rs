//! One lane of a value: 64 bits whose meaning is given by a separate element type, and scalar arithmetic on
//! it.
//!
//! Integers are held as the i64 of the same value (all types of the IR fit), floats as their own bits, bool
//! as 0 or 1. Integer arithmetic is therefore i64 arithmetic followed by [`wrap_integer`].

use half::{bf16, f16};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::types::DType;

pub type RegisterCell = u64;

pub fn of_f32(v: f32) -> RegisterCell {
    RegisterCell::from(v.to_bits())
}

pub fn to_f32(c: RegisterCell) -> f32 {
    f32::from_bits(c as u32)
}

/// Value of a cell of a float type; exact.
pub fn float(dtype: DType, c: RegisterCell) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(c as u16).to_f32(),
        DType::BF16 => bf16::from_bits(c as u16).to_f32(),
        _ => to_f32(c),
    }
}

/// Rounds to a float type, to nearest even.
pub fn of_float(dtype: DType, v: f32) -> RegisterCell {
    match dtype {
        DType::F16 => RegisterCell::from(f16::from_f32(v).to_bits()),
        DType::BF16 => RegisterCell::from(bf16::from_f32(v).to_bits()),
        _ => of_f32(v),
    }
}

/// Reduces an integer to the range of its type.
pub fn wrap_integer(dtype: DType, v: i64) -> RegisterCell {
    (match dtype {
        DType::Bool => v & 1,
        DType::I8 => i64::from(v as i8),
        DType::U8 => i64::from(v as u8),
        DType::I16 => i64::from(v as i16),
        DType::U16 => i64::from(v as u16),
        DType::I32 => i64::from(v as i32),
        DType::U32 => i64::from(v as u32),
        _ => v,
    }) as RegisterCell
}

/// Float to integer: truncated, saturated, NaN gives 0.
fn saturate(dtype: DType, v: f32) -> RegisterCell {
    (match dtype {
        DType::I8 => i64::from(v as i8),
        DType::U8 => i64::from(v as u8),
        DType::I16 => i64::from(v as i16),
        DType::U16 => i64::from(v as u16),
        DType::I32 => i64::from(v as i32),
        DType::U32 => i64::from(v as u32),
        _ => v as i64,
    }) as RegisterCell
}

/// The IR's value conversion. To bool: not equal to zero. Between the half types and from 64-bit integers:
/// through f32.
pub fn cast(from: DType, to: DType, c: RegisterCell) -> RegisterCell {
    match (from.is_float(), to) {
        (true, DType::Bool) => RegisterCell::from(float(from, c) != 0.0),
        (false, DType::Bool) => RegisterCell::from(c != 0),
        (true, to) if to.is_float() => of_float(to, float(from, c)),
        (true, to) => saturate(to, float(from, c)),
        (false, to) if to.is_float() => of_float(to, c as i64 as f32),
        (false, to) => wrap_integer(to, c as i64),
    }
}

/// Element `index` of little-endian bytes; the caller has checked the bounds.
pub fn read(dtype: DType, bytes: &[u8], index: usize) -> RegisterCell {
    let four = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let two = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    match dtype {
        DType::Bool => RegisterCell::from(bytes[index] != 0),
        DType::I8 => bytes[index] as i8 as i64 as RegisterCell,
        DType::U8 | DType::Packed(_) => RegisterCell::from(bytes[index]),
        DType::I16 => two(2 * index) as i16 as i64 as RegisterCell,
        DType::U16 | DType::F16 | DType::BF16 => RegisterCell::from(two(2 * index)),
        DType::I32 => four(4 * index) as i32 as i64 as RegisterCell,
        DType::U32 | DType::F32 => RegisterCell::from(four(4 * index)),
        DType::I64 => RegisterCell::from(four(8 * index)) | RegisterCell::from(four(8 * index + 4)) << 32,
    }
}

/// Stores element `index`; the caller has checked the bounds.
pub fn write(dtype: DType, bytes: &mut [u8], index: usize, value: RegisterCell) {
    let size = dtype.bytes().unwrap_or(1);
    bytes[index * size..(index + 1) * size].copy_from_slice(&value.to_le_bytes()[..size]);
}

/// Integer operation of two operands that cannot fail; the result is to be wrapped. `None` for the ones that
/// can.
pub fn int_binary_op(op: BinOp) -> Option<fn(i64, i64) -> i64> {
    Some(match op {
        BinOp::Add => i64::wrapping_add,
        BinOp::Sub => i64::wrapping_sub,
        BinOp::Mul => i64::wrapping_mul,
        BinOp::Min => |a, b| a.min(b),
        BinOp::Max => |a, b| a.max(b),
        BinOp::And => |a, b| a & b,
        BinOp::Or => |a, b| a | b,
        BinOp::Xor => |a, b| a ^ b,
        BinOp::Lt => |a, b| i64::from(a < b),
        BinOp::Le => |a, b| i64::from(a <= b),
        BinOp::Eq => |a, b| i64::from(a == b),
        BinOp::Ne => |a, b| i64::from(a != b),
        BinOp::Div | BinOp::Rem | BinOp::Shl | BinOp::Shr => return None,
    })
}

/// The reasons why an integer operation has no result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UndefinedResult {
    DivisionByZero,
    DivisionOverflow,
    Shift,
}

/// The integer operations whose result is not defined for all operands.
pub fn int2_checked(op: BinOp, dtype: DType, a: i64, b: i64) -> Result<i64, UndefinedResult> {
    let bits = dtype.bytes().unwrap_or(8) as i64 * 8;
    match op {
        BinOp::Div | BinOp::Rem if b == 0 => Err(UndefinedResult::DivisionByZero),
        BinOp::Div | BinOp::Rem if b == -1 && a == i64::MIN >> (64 - bits) => {
            Err(UndefinedResult::DivisionOverflow)
        }
        BinOp::Div => Ok(a / b),
        BinOp::Rem => Ok(a % b),
        BinOp::Shl | BinOp::Shr if !(0..bits).contains(&b) => Err(UndefinedResult::Shift),
        BinOp::Shl => Ok(a << b),
        BinOp::Shr => Ok(a >> b),
        other => Ok(int_binary_op(other).map_or(0, |f| f(a, b))),
    }
}

/// Float arithmetic, in f32. `None` for operations that floats do not have, and for comparisons.
pub fn float_binary_op(op: BinOp) -> Option<fn(f32, f32) -> f32> {
    Some(match op {
        BinOp::Add => |a, b| a + b,
        BinOp::Sub => |a, b| a - b,
        BinOp::Mul => |a, b| a * b,
        BinOp::Div => |a, b| a / b,
        BinOp::Rem => |a, b| a % b,
        BinOp::Min => f32::min,
        BinOp::Max => f32::max,
        _ => return None,
    })
}

pub fn float_compare(op: BinOp) -> Option<fn(f32, f32) -> bool> {
    Some(match op {
        BinOp::Lt => |a, b| a < b,
        BinOp::Le => |a, b| a <= b,
        BinOp::Eq => |a, b| a == b,
        BinOp::Ne => |a, b| a != b,
        _ => return None,
    })
}

pub fn int_unary_op(op: UnOp) -> Option<fn(i64) -> i64> {
    Some(match op {
        UnOp::Neg => i64::wrapping_neg,
        UnOp::Abs => i64::wrapping_abs,
        UnOp::Not => |a| !a,
        _ => return None,
    })
}

/// Float functions; transcendental ones are computed in f64 by portable code and rounded once more to f32.
pub fn float_unary_op(op: UnOp) -> Option<fn(f32) -> f32> {
    Some(match op {
        UnOp::Neg => |a| -a,
        UnOp::Abs => f32::abs,
        UnOp::Sqrt => f32::sqrt,
        UnOp::Floor => f32::floor,
        UnOp::Round => f32::round_ties_even,
        UnOp::Exp => |a| libm::exp(f64::from(a)) as f32,
        UnOp::Log => |a| libm::log(f64::from(a)) as f32,
        UnOp::Tanh => |a| libm::tanh(f64::from(a)) as f32,
        UnOp::Sigmoid => |a| (1.0 / (1.0 + libm::exp(-f64::from(a)))) as f32,
        UnOp::Rsqrt => |a| (1.0 / f64::from(a).sqrt()) as f32,
        UnOp::Recip => |a| 1.0 / a,
        UnOp::Erf => |a| libm::erf(f64::from(a)) as f32,
        UnOp::Sin => |a| libm::sin(f64::from(a)) as f32,
        UnOp::Cos => |a| libm::cos(f64::from(a)) as f32,
        UnOp::Not => return None,
    })
}

/// A literal: rounded once, from f64.
pub fn of_float_f64(dtype: DType, v: f64) -> RegisterCell {
    match dtype {
        DType::F16 => RegisterCell::from(f16::from_f64(v).to_bits()),
        DType::BF16 => RegisterCell::from(bf16::from_f64(v).to_bits()),
        _ => of_f32(v as f32),
    }
}
