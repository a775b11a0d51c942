//! Atomic operations on global and shared memory.

use super::block::BlockContext;
use super::fault::{ExecResult, FaultKind, trouble};
use super::loads::{addresses, aligned, outside};
use super::registers::OperandSources;
use super::warp::Warp;
use super::{LANES, lanes};
use crate::memory::AccessFinding;
use crate::ptx::op::{AtomFn, PtxOp, PtxType, StateSpace};

/// The new value.
fn apply(f: AtomFn, ty: PtxType, old: u64, b: u64, c: u64) -> u64 {
    let wide = ty.bytes() == 8;
    let cut = |x: u64| if wide { x } else { u64::from(x as u32) };
    let signed = |x: u64| if wide { x as i64 } else { i64::from(x as u32 as i32) };
    match f {
        AtomFn::Add if ty == PtxType::F32 => {
            let sum = f32::from_bits(old as u32) + f32::from_bits(b as u32);
            u64::from(sum.to_bits())
        }
        AtomFn::Add => cut(old.wrapping_add(b)),
        AtomFn::Min if ty.signed() => {
            if signed(b) < signed(old) {
                b
            } else {
                old
            }
        }
        AtomFn::Max if ty.signed() => {
            if signed(b) > signed(old) {
                b
            } else {
                old
            }
        }
        AtomFn::Min => old.min(b),
        AtomFn::Max => old.max(b),
        AtomFn::And => old & b,
        AtomFn::Or => old | b,
        AtomFn::Xor => old ^ b,
        AtomFn::Exch => b,
        AtomFn::Cas => {
            if old == b {
                c
            } else {
                old
            }
        }
        AtomFn::Inc => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        AtomFn::Dec => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
    }
}

pub fn execute(
    warp: &mut Warp,
    room: &mut BlockContext<'_>,
    s: OperandSources<'_>,
    op: &PtxOp,
) -> ExecResult {
    let PtxOp::Atom { space, f, ty, d, at, b, c } = op else {
        return Err(trouble(FaultKind::Undefined, None, "no atomic operation"));
    };
    let at = addresses(warp, s, *at)?;
    let b = warp.r.any(s, *b)?;
    let c = match c {
        Some(c) => warp.r.any(s, *c)?,
        None => [0; LANES],
    };
    let bytes = ty.bytes();
    room.counts.access(*space, true, &at, s.m, bytes);
    let launch = room.launch;
    for lane in lanes(s.m) {
        aligned(at[lane], bytes, lane)?;
        let change = |old| apply(*f, *ty, old, b[lane], c[lane]);
        let old = match space {
            StateSpace::Shared => room.shared.update(at[lane], bytes, lane, change)?,
            _ => {
                room.atomic = true;
                let Some(region) = launch.view.find(at[lane], bytes.into(), &mut room.hint) else {
                    return Err(outside(room, at[lane], bytes, lane));
                };
                let offset = at[lane] - region.base;
                if region.chunk.note_atomic(offset, bytes) == AccessFinding::Unwritten {
                    let what = format!("{:#x} of global memory is changed before it has a value", at[lane]);
                    return Err(trouble(FaultKind::Uninitialised, Some(lane), what));
                }
                let _order = launch.atomics.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                region.chunk.update(offset, bytes, change)
            }
        };
        if let Some(d) = d {
            warp.r.put_lane(*d, lane, old);
        }
    }
    Ok(())
}
