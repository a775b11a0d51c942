//! Shuffles, votes and reductions of a warp.

use super::alu::int32;
use super::fault::{ExecResult, FaultKind, trouble};
use super::lanes;
use super::registers::{OperandSources, RegisterFile};
use crate::ptx::op::{AnyRegister, PtxOp, PtxType, ShflMode, VoteMode};

/// The lane that a lane takes its value from, and whether it is in range.
fn source(mode: ShflMode, lane: i32, b: i32, c: i32) -> (i32, bool) {
    let (b, clamp, mask) = (b & 31, c & 31, c >> 8 & 31);
    let highest = (lane & mask) | (clamp & !mask);
    let lowest = lane & mask;
    let (from, in_range) = match mode {
        ShflMode::Up => (lane - b, lane - b >= highest),
        ShflMode::Down => (lane + b, lane + b <= highest),
        ShflMode::Bfly => (lane ^ b, (lane ^ b) <= highest),
        ShflMode::Idx => {
            let from = lowest | (b & !mask);
            (from, from <= highest)
        }
    };
    (if in_range { from } else { lane }, in_range)
}

pub fn execute(r: &mut RegisterFile, s: OperandSources<'_>, op: &PtxOp) -> ExecResult {
    match *op {
        PtxOp::Shfl { mode, d, p, a, b, c, .. } => {
            let (a, b, c) = (r.w(s, a)?, r.w(s, b)?, r.w(s, c)?);
            let (mut out, mut in_range) = ([0; 32], 0u32);
            for lane in lanes(s.m) {
                let (from, inside) = source(mode, lane as i32, b[lane] as i32, c[lane] as i32);
                if s.m >> from & 1 == 0 {
                    let what = format!("it takes the value of lane {from}, which does not take part");
                    return Err(trouble(FaultKind::Divergent, Some(lane), what));
                }
                out[lane] = a[from as usize];
                in_range |= u32::from(inside) << lane;
            }
            r.put_w(d, &out, s.m);
            if let Some(p) = p {
                r.put_p(p, in_range, s.m);
            }
        }
        PtxOp::Vote { mode, d, a, negated, .. } => {
            let bits = (r.p(s, a)? ^ if negated { u32::MAX } else { 0 }) & s.m;
            let holds = match mode {
                VoteMode::All => bits == s.m,
                VoteMode::Any => bits != 0,
                VoteMode::Uni => bits == s.m || bits == 0,
                VoteMode::Ballot => false,
            };
            match d {
                AnyRegister::W(d) => r.put_w(d, &[bits; 32], s.m),
                AnyRegister::P(d) => r.put_p(d, if holds { u32::MAX } else { 0 }, s.m),
                AnyRegister::D(_) => return Err(trouble(FaultKind::Undefined, None, "a vote of 64 bits")),
            }
        }
        PtxOp::Redux { f, ty, d, a, .. } => {
            let a = r.w(s, a)?;
            let result = lanes(s.m).map(|lane| a[lane]).reduce(|x, y| int32(f, ty == PtxType::S32, x, y));
            r.put_w(d, &[result.unwrap_or(0); 32], s.m);
        }
        _ => return Err(trouble(FaultKind::Undefined, None, "no instruction of a warp")),
    }
    Ok(())
}
