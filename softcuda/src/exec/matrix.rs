//! Tensor cores: `ldmatrix` and `mma.sync`. Which lane holds which element is that of the ISA's figures.

use super::block::BlockContext;
use super::convert::{bf16_value, f16_bits, f16_value};
use super::fault::{ExecResult, FaultKind, InstructionFault, trouble};
use super::loads::{addresses, aligned};
use super::registers::OperandSources;
use super::warp::Warp;
use super::{LANES, lanes};
use crate::ptx::op::{AnyRegister, MmaElement, MmaOp, PtxAddress, PtxOp, RoundingMode, WordRegister};

pub fn execute(
    warp: &mut Warp,
    room: &mut BlockContext<'_>,
    s: OperandSources<'_>,
    op: &PtxOp,
) -> ExecResult {
    match op {
        PtxOp::Ldmatrix { transposed, d, at } => ldmatrix(warp, room, s, *transposed, d, *at),
        PtxOp::Mma(mma) => multiply(warp, s, mma),
        _ => Err(trouble(FaultKind::Undefined, None, "no instruction of matrices")),
    }
}

/// Lanes `8 i` to `8 i + 7` give the addresses of the rows of matrix `i`, 8 elements of 16 bits each.
fn ldmatrix(
    warp: &mut Warp,
    room: &mut BlockContext<'_>,
    s: OperandSources<'_>,
    transposed: bool,
    d: &[WordRegister],
    at: PtxAddress,
) -> ExecResult {
    let at = addresses(warp, s, at)?;
    room.counts.rows(&at, d.len());
    for (i, d) in d.iter().enumerate() {
        let mut rows = [[0u32; 8]; 8];
        for (row, to) in rows.iter_mut().enumerate() {
            let lane = 8 * i + row;
            aligned(at[lane], 16, lane)?;
            for (column, element) in to.iter_mut().enumerate() {
                let now = warp.moment(room, lane);
                *element = room.shared.load(at[lane] + 2 * column as u64, 2, now, lane)? as u32;
            }
        }
        for lane in lanes(s.m) {
            let (row, column) = (lane / 4, lane % 4 * 2);
            let [low, high] = [column, column + 1]
                .map(|column| if transposed { rows[column][row] } else { rows[row][column] });
            warp.r.put_lane(AnyRegister::W(*d), lane, u64::from(low | high << 16));
        }
    }
    Ok(())
}

/// Row and column of element `i` of the fragment that a lane holds.
mod layout {
    /// a: 16 rows, `k` columns; `per` elements in a register.
    pub fn a(lane: usize, i: usize, per: usize) -> (usize, usize) {
        let (register, part) = (i / per, i % per);
        (lane / 4 + 8 * (register % 2), lane % 4 * per + part + 4 * per * (register / 2))
    }

    /// b: `k` rows, 8 columns.
    pub fn b(lane: usize, i: usize, per: usize) -> (usize, usize) {
        let (register, part) = (i / per, i % per);
        (lane % 4 * per + part + 4 * per * register, lane / 4)
    }

    /// c and d: 16 rows, 8 columns.
    pub fn sums(lane: usize, i: usize) -> (usize, usize) {
        (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2)
    }
}

fn element(of: MmaElement, word: u32, part: usize) -> f64 {
    match of {
        MmaElement::F16 => f16_value(word >> (16 * part) & 0xffff),
        MmaElement::BF16 => bf16_value(word >> (16 * part) & 0xffff),
        MmaElement::S8 => f64::from((word >> (8 * part)) as u8 as i8),
        MmaElement::U8 => f64::from((word >> (8 * part)) as u8),
    }
}

fn multiply(warp: &mut Warp, s: OperandSources<'_>, mma: &MmaOp) -> ExecResult {
    let read = |registers: &[WordRegister]| -> Result<Vec<[u32; LANES]>, Box<InstructionFault>> {
        registers.iter().map(|r| Ok(*warp.r.w(s, *r)?)).collect()
    };
    let (a_words, b_words, c_words) = (read(&mma.a)?, read(&mma.b)?, read(&mma.c)?);
    let bytes = matches!(mma.a_ty, MmaElement::S8 | MmaElement::U8);
    let per = if bytes { 4 } else { 2 };
    let k = mma.k as usize;
    let (mut a, mut b) = (vec![[0.0f64; 32]; 16], vec![[0.0f64; 8]; 32]);
    for lane in 0..LANES {
        for i in 0..per * mma.a.len() {
            let (row, column) = layout::a(lane, i, per);
            a[row][column] = element(mma.a_ty, a_words[i / per][lane], i % per);
        }
        for i in 0..per * mma.b.len() {
            let (row, column) = layout::b(lane, i, per);
            b[row][column] = element(mma.b_ty, b_words[i / per][lane], i % per);
        }
    }
    for lane in lanes(s.m) {
        let mut halves = [0u32; 2];
        for i in 0..4 {
            let (row, column) = layout::sums(lane, i);
            // Exact for bytes. The order of sums and their rounding within the unit are not defined for
            // floats.
            let sum: f64 = (0..k).map(|j| a[row][j] * b[j][column]).sum();
            let value = match (bytes, mma.half_sums) {
                (true, _) => {
                    let total = sum as i64 + i64::from(c_words[i][lane] as i32);
                    let limits = (i64::from(i32::MIN), i64::from(i32::MAX));
                    (if mma.satfinite { total.clamp(limits.0, limits.1) } else { total }) as u32
                }
                (false, false) => ((sum + f64::from(f32::from_bits(c_words[i][lane]))) as f32).to_bits(),
                (false, true) => {
                    let c = f16_value(c_words[i / 2][lane] >> (16 * (i % 2)) & 0xffff);
                    halves[i / 2] |= f16_bits(sum + c, RoundingMode::Nearest) << (16 * (i % 2));
                    continue;
                }
            };
            warp.r.put_lane(AnyRegister::W(mma.d[i]), lane, u64::from(value));
        }
        if mma.half_sums {
            for (d, value) in mma.d.iter().zip(halves) {
                warp.r.put_lane(AnyRegister::W(*d), lane, u64::from(value));
            }
        }
    }
    Ok(())
}
