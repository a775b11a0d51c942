//! Loads, stores and copies: addresses of all lanes, checked one by one.

use super::block::BlockContext;
use super::fault::{ExecResult, FaultKind, InstructionFault, trouble};
use super::registers::OperandSources;
use super::warp::{PendingCopy, Warp};
use super::{LANES, WarpLanes, lanes};
use crate::memory::{AccessFinding, AccessingBlock};
use crate::ptx::op::{AnyRegister, MemoryOrdering, PtxAddress, PtxOp, PtxType, StateSpace};

/// Addresses of an access. Those in shared memory may be in registers of 32 bits.
pub fn addresses(
    warp: &Warp,
    s: OperandSources<'_>,
    at: PtxAddress,
) -> Result<WarpLanes<u64>, Box<InstructionFault>> {
    let mut out = match at.base {
        AnyRegister::D(d) => *warp.r.d(s, d)?,
        other => warp.r.any(s, other)?,
    };
    if at.offset != 0 {
        for address in &mut out {
            *address = address.wrapping_add_signed(at.offset);
        }
    }
    Ok(out)
}

/// Vectors have to lie at multiples of their whole size.
pub fn aligned(at: u64, bytes: u32, lane: usize) -> ExecResult {
    // Sizes are powers of two.
    match at & (u64::from(bytes) - 1) {
        0 => Ok(()),
        _ => Err(trouble(
            FaultKind::Misaligned,
            Some(lane),
            format!("{bytes} bytes at {at:#x}, which is no multiple of {bytes}"),
        )),
    }
}

/// Extends the loaded value of a signed type to the register's size.
fn extend(value: u64, ty: PtxType) -> u64 {
    match ty {
        PtxType::S8 => value as i8 as i64 as u64,
        PtxType::S16 => value as i16 as i64 as u64,
        PtxType::S32 => value as i32 as i64 as u64,
        _ => value,
    }
}

pub fn outside(room: &BlockContext<'_>, at: u64, bytes: u32, lane: usize) -> Box<InstructionFault> {
    let what = format!("{bytes} bytes at {at:#x} of global memory: {}", room.launch.view.describe(at));
    trouble(FaultKind::OutOfBounds, Some(lane), what)
}

/// The error for the finding of an access, if it is one.
fn judge(
    warp: &Warp,
    room: &BlockContext<'_>,
    found: AccessFinding,
    at: u64,
    lane: usize,
    write: bool,
) -> ExecResult {
    let race = |what: String| Err(trouble(FaultKind::Race, Some(lane), what));
    let here = if write { "written" } else { "read" };
    match found {
        AccessFinding::Fine => Ok(()),
        AccessFinding::Unwritten => {
            let what = format!("{at:#x} of global memory is read before it has a value");
            Err(trouble(FaultKind::Uninitialised, Some(lane), what))
        }
        AccessFinding::Written => race(format!(
            "{at:#x} of global memory is {here} here, and another block of this launch writes it"
        )),
        AccessFinding::Read => race(format!(
            "{at:#x} of global memory is written here, and another block of this launch reads it"
        )),
        AccessFinding::Own => match room.own_writes.get(&(at & !3)) {
            Some(before) if !warp.moment(room, lane).after(*before) => race(format!(
                "{at:#x} of global memory is {here} here, thread {} wrote it and no barrier stands between",
                before.thread
            )),
            _ => Ok(()),
        },
    }
}

fn visitor(room: &BlockContext<'_>) -> AccessingBlock {
    AccessingBlock { launch: room.launch.number, block: room.number, synchronised: room.synchronised }
}

/// Reads an element of global memory.
fn read(
    warp: &Warp,
    room: &mut BlockContext<'_>,
    at: u64,
    bytes: u32,
    lane: usize,
    nc: bool,
    order: MemoryOrdering,
) -> Result<u64, Box<InstructionFault>> {
    let who = visitor(room);
    let launch = room.launch;
    let Some(region) = launch.view.find(at, bytes.into(), &mut room.hint) else {
        return Err(outside(room, at, bytes, lane));
    };
    let offset = at - region.base;
    for word in (0..bytes).step_by(4) {
        let at_word = offset + u64::from(word);
        let found = match order {
            MemoryOrdering::Weak => region.chunk.note_read(at_word, bytes.min(4), who),
            MemoryOrdering::Strong | MemoryOrdering::Acquire => {
                region.chunk.note_atomic(at_word, bytes.min(4))
            }
        };
        if found != AccessFinding::Fine {
            if nc && found != AccessFinding::Unwritten {
                let what = format!("{at:#x} is read by ld.global.nc and this launch writes it");
                return Err(trouble(FaultKind::Race, Some(lane), what));
            }
            judge(warp, room, found, at + u64::from(word), lane, false)?;
        }
    }
    // An acquiring load sees what the writer of its value has done before; a relaxed one after a fence does.
    room.atomic |= order == MemoryOrdering::Strong;
    room.synchronised |= order == MemoryOrdering::Acquire;
    Ok(region.chunk.load(offset, bytes))
}

/// Writes an element of global memory.
fn write(
    warp: &Warp,
    room: &mut BlockContext<'_>,
    at: u64,
    bytes: u32,
    value: u64,
    lane: usize,
    order: MemoryOrdering,
) -> ExecResult {
    let who = visitor(room);
    let launch = room.launch;
    let Some(region) = launch.view.find(at, bytes.into(), &mut room.hint) else {
        return Err(outside(room, at, bytes, lane));
    };
    let offset = at - region.base;
    if order != MemoryOrdering::Weak {
        room.atomic = true;
        region.chunk.mark(offset, bytes.into());
    } else if launch.checks {
        let now = warp.moment(room, lane);
        for word in (0..bytes).step_by(4) {
            let found = region.chunk.note_write(offset + u64::from(word), bytes.min(4), who);
            judge(warp, room, found, at + u64::from(word), lane, true)?;
            if bytes >= 4 {
                room.own_writes.insert(at + u64::from(word), now);
            }
        }
    }
    region.chunk.store(offset, bytes, value);
    Ok(())
}

pub fn execute(
    warp: &mut Warp,
    room: &mut BlockContext<'_>,
    s: OperandSources<'_>,
    op: &PtxOp,
) -> ExecResult {
    match op {
        PtxOp::LdParam { ty, d, offset } => param(warp, room, s, *ty, d, *offset),
        PtxOp::Ld { space, nc, order, ty, d, at } => {
            let at = addresses(warp, s, *at)?;
            let (bytes, whole) = (ty.bytes(), ty.bytes() * d.len() as u32);
            room.counts.access(*space, false, &at, s.m, whole);
            for lane in lanes(s.m) {
                aligned(at[lane], whole, lane)?;
                for (i, d) in d.iter().enumerate() {
                    let at = at[lane] + u64::from(i as u32 * bytes);
                    let value = match space {
                        StateSpace::Shared => {
                            let now = warp.moment(room, lane);
                            room.shared.load(at, bytes, now, lane)?
                        }
                        StateSpace::Local => warp.local.load(at, bytes, lane)?,
                        StateSpace::Global | StateSpace::Param => {
                            read(warp, room, at, bytes, lane, *nc, *order)?
                        }
                    };
                    // 16-bit registers have no upper half: their readers cut it off.
                    warp.r.put_lane(*d, lane, extend(value, *ty));
                }
            }
            Ok(())
        }
        PtxOp::St { space, order, ty, a, at } => {
            let at = addresses(warp, s, *at)?;
            let (bytes, whole) = (ty.bytes(), ty.bytes() * a.len() as u32);
            room.counts.access(*space, true, &at, s.m, whole);
            for (i, a) in a.iter().enumerate() {
                let values = warp.r.any(s, *a)?;
                for lane in lanes(s.m) {
                    aligned(at[lane], whole, lane)?;
                    let at = at[lane] + u64::from(i as u32 * bytes);
                    match space {
                        StateSpace::Shared => {
                            let now = warp.moment(room, lane);
                            room.shared.store(at, bytes, values[lane], now, lane)?;
                        }
                        StateSpace::Local => warp.local.store(at, bytes, values[lane], lane)?,
                        StateSpace::Global | StateSpace::Param => {
                            write(warp, room, at, bytes, values[lane], lane, *order)?
                        }
                    }
                }
            }
            Ok(())
        }
        _ => Err(trouble(FaultKind::Undefined, None, "no load and no store")),
    }
}

fn param(
    warp: &mut Warp,
    room: &BlockContext<'_>,
    s: OperandSources<'_>,
    ty: PtxType,
    d: &[AnyRegister],
    offset: u32,
) -> ExecResult {
    let (bytes, params) = (ty.bytes() as usize, &room.launch.params);
    for (i, d) in d.iter().enumerate() {
        let begin = offset as usize + i * bytes;
        let Some(from) = params.get(begin..begin + bytes) else {
            return Err(trouble(
                FaultKind::OutOfBounds,
                None,
                format!("parameters have {} bytes", params.len()),
            ));
        };
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(from);
        let value = extend(u64::from_le_bytes(value), ty);
        match *d {
            AnyRegister::W(w) => warp.r.put_w(w, &[value as u32; LANES], s.m),
            AnyRegister::D(d) => warp.r.put_d(d, &[value; LANES], s.m),
            AnyRegister::P(_) => {
                return Err(trouble(FaultKind::Undefined, None, "a predicate is no parameter"));
            }
        }
    }
    Ok(())
}

/// `cp.async` and its groups. Data goes at the latest moment that the ISA permits: when the thread waits for
/// it.
pub fn copies(warp: &mut Warp, room: &mut BlockContext<'_>, s: OperandSources<'_>, op: &PtxOp) -> ExecResult {
    match op {
        PtxOp::CpAsync { bytes, to, from, from_bytes } => {
            let (to, from) = (addresses(warp, s, *to)?, addresses(warp, s, *from)?);
            let sizes = match from_bytes {
                Some(size) => *warp.r.w(s, *size)?,
                None => [*bytes; LANES],
            };
            room.counts.copy(&from, s.m, *bytes);
            for lane in lanes(s.m) {
                aligned(to[lane], *bytes, lane)?;
                aligned(from[lane], *bytes, lane)?;
                if sizes[lane] > *bytes {
                    let what = format!("{} bytes of {bytes} come from memory", sizes[lane]);
                    return Err(trouble(FaultKind::Undefined, Some(lane), what));
                }
                let now = warp.moment(room, lane);
                room.shared.begin_copy(to[lane], *bytes, now, lane)?;
                let (to, from, from_bytes, bytes) = (to[lane], from[lane], sizes[lane], *bytes);
                room.in_flight += u64::from(bytes);
                room.counts.in_flight(room.in_flight);
                warp.copies.push(PendingCopy { lane, group: None, to, from, from_bytes, bytes });
            }
            Ok(())
        }
        PtxOp::CpCommit => {
            for copy in warp.copies.iter_mut().filter(|c| s.m >> c.lane & 1 != 0 && c.group.is_none()) {
                copy.group = Some(warp.committed[copy.lane]);
            }
            for lane in lanes(s.m) {
                warp.committed[lane] += 1;
            }
            Ok(())
        }
        PtxOp::CpWait { groups } => {
            let waits_for = |warp: &Warp, c: &PendingCopy| match (groups, c.group) {
                _ if s.m >> c.lane & 1 == 0 => false,
                (None, _) => true,
                (Some(_), None) => false,
                (Some(pending), Some(group)) => group + pending < warp.committed[c.lane],
            };
            let all = std::mem::take(&mut warp.copies);
            let (over, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|c| waits_for(warp, c));
            warp.copies = rest;
            over.iter().try_for_each(|copy| finish(warp, room, copy))
        }
        _ => Err(trouble(FaultKind::Undefined, None, "no copy")),
    }
}

fn finish(warp: &Warp, room: &mut BlockContext<'_>, copy: &PendingCopy) -> ExecResult {
    room.in_flight -= u64::from(copy.bytes);
    let mut data = vec![0; copy.bytes as usize];
    for i in 0..copy.from_bytes {
        let at = copy.from + u64::from(i);
        data[i as usize] = read(warp, room, at, 1, copy.lane, false, MemoryOrdering::Weak)? as u8;
    }
    let now = warp.moment(room, copy.lane);
    room.shared.end_copy(copy.to, &data, now);
    Ok(())
}
