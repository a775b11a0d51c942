//! A warp: lanes with the same program counter go on together, lanes that took another branch wait in groups
//! of their own.
//!
//! The group with the lowest counter goes first, so lanes meet again behind loops and branches. An
//! instruction that lanes have to execute together makes a group wait until the others have reached it; if
//! they cannot, the program is divergent.

use super::block::BlockContext;
use super::fault::{ExecResult, FaultKind, InstructionFault, trouble};
use super::local::LocalMemory;
use super::registers::{OperandSources, RegisterFile};
use super::shared::AccessMoment;
use super::{LANES, WarpLanes, alu, atoms, convert, floats, halves, loads, matrix, together};
use crate::ptx::op::{PtxOp, SpecialRegister};

/// Lanes that are elsewhere than the current ones.
#[derive(Clone, Copy, Debug)]
struct DivergedLanes {
    pc: u32,
    mask: u32,
    /// It waits for other lanes at its instruction.
    waiting: bool,
}

/// A copy to shared memory that its thread has not waited for.
pub struct PendingCopy {
    pub lane: usize,
    /// The thread's group that it belongs to, once it is committed.
    pub group: Option<u32>,
    pub to: u64,
    pub from: u64,
    /// Bytes from memory; zeros follow.
    pub from_bytes: u32,
    pub bytes: u32,
}

pub struct Warp {
    pub number: u32,
    pub r: RegisterFile,
    /// Lanes that exist.
    pub present: u32,
    pub exited: u32,
    pub tid: [WarpLanes<u32>; 3],
    pub epoch: u16,
    pub local: LocalMemory,
    pub copies: Vec<PendingCopy>,
    pub committed: WarpLanes<u32>,
    pub pc: u32,
    pub mask: u32,
    others: Vec<DivergedLanes>,
    /// The place where the current lanes may meet others.
    meeting: u32,
}

/// The reason why a warp gives up its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WarpYield {
    Over,
    /// At barrier `id`, for `threads` threads.
    Barrier {
        id: u32,
        threads: Option<u32>,
    },
    Done,
}

/// The effect of an instruction on the flow of control.
enum InstructionFlow {
    Next,
    /// It has to be tried again, with other lanes.
    Wait,
    Barrier {
        id: u32,
        threads: Option<u32>,
    },
}

impl Warp {
    pub fn new(room: &BlockContext<'_>, number: u32) -> Self {
        let mut warp = Self {
            number,
            r: RegisterFile::new(&room.launch.kernel),
            present: 0,
            exited: 0,
            tid: [[0; LANES]; 3],
            epoch: 0,
            local: LocalMemory::new(room.launch.kernel.local_bytes),
            copies: vec![],
            committed: [0; LANES],
            pc: 0,
            mask: 0,
            others: vec![],
            meeting: u32::MAX,
        };
        let [x, y, z] = room.launch.block;
        for lane in 0..LANES {
            let thread = number * LANES as u32 + lane as u32;
            if thread < x * y * z {
                warp.present |= 1 << lane;
                warp.tid[0][lane] = thread % x;
                warp.tid[1][lane] = thread / x % y;
                warp.tid[2][lane] = thread / x / y;
            }
        }
        warp.restart();
        warp
    }

    /// Resets the warp for another block of the launch.
    pub fn restart(&mut self) {
        self.r.clear();
        self.exited = 0;
        self.epoch = 0;
        self.local.clear();
        self.copies.clear();
        self.committed = [0; LANES];
        self.pc = 0;
        self.mask = self.present;
        self.others.clear();
        self.meeting = u32::MAX;
    }

    pub fn moment(&self, room: &BlockContext<'_>, lane: usize) -> AccessMoment {
        let thread = (self.number * LANES as u32 + lane as u32) as u16;
        AccessMoment { thread, epoch: room.epoch, warp_epoch: self.epoch }
    }

    /// Lanes that have not left the kernel.
    pub fn live(&self) -> u32 {
        self.present & !self.exited
    }

    /// Executes up to `quantum` instructions.
    pub fn run(
        &mut self,
        room: &mut BlockContext<'_>,
        quantum: u32,
    ) -> Result<WarpYield, Box<InstructionFault>> {
        let launch = room.launch;
        let kernel = &*launch.kernel;
        for _ in 0..quantum {
            if self.pc >= self.meeting {
                self.regroup()?;
            }
            let inst = &kernel.code[self.pc as usize];
            let s = OperandSources { kernel, constants: &launch.constants, m: self.mask };
            let mut m = self.mask;
            if let Some((p, negated)) = inst.guard {
                m &= self.r.p(s, p)? ^ if negated { u32::MAX } else { 0 };
            }
            room.counts.instruction(self.pc, m);
            match &inst.op {
                PtxOp::Bra { to } => {
                    self.branch(*to, m)?;
                    continue;
                }
                PtxOp::Ret => {
                    if self.leave(m)? {
                        return Ok(WarpYield::Done);
                    }
                    continue;
                }
                _ if m == 0 => self.pc += 1,
                op => match self.execute(room, OperandSources { m, ..s }, op)? {
                    InstructionFlow::Next => self.pc += 1,
                    InstructionFlow::Wait => self.wait()?,
                    InstructionFlow::Barrier { id, threads } => {
                        self.pc += 1;
                        return Ok(WarpYield::Barrier { id, threads });
                    }
                },
            }
        }
        Ok(WarpYield::Over)
    }

    fn branch(&mut self, to: u32, taken: u32) -> ExecResult {
        let (next, stay) = (self.pc + 1, self.mask & !taken);
        if taken == 0 {
            self.pc = next;
            return Ok(());
        }
        if stay == 0 {
            let back = to <= self.pc;
            self.pc = to;
            return if back && !self.others.is_empty() { self.regroup() } else { Ok(()) };
        }
        self.others.push(DivergedLanes { pc: to, mask: taken, waiting: false });
        self.pc = next;
        self.mask = stay;
        self.regroup()
    }

    /// The lanes end; whether the warp has.
    fn leave(&mut self, leaving: u32) -> Result<bool, Box<InstructionFault>> {
        if let Some(copy) = self.copies.iter().find(|c| leaving >> c.lane & 1 != 0) {
            let what = "the thread ends and has not waited for its copies to shared memory";
            return Err(trouble(FaultKind::Undefined, Some(copy.lane), what));
        }
        self.exited |= leaving;
        self.mask &= !leaving;
        if self.mask != 0 {
            self.pc += 1;
            return Ok(false);
        }
        if self.others.is_empty() {
            return Ok(true);
        }
        self.next_group()?;
        Ok(false)
    }

    /// Goes on with the group that has the lowest counter, the current lanes among them.
    fn regroup(&mut self) -> ExecResult {
        self.others.push(DivergedLanes { pc: self.pc, mask: self.mask, waiting: false });
        self.next_group()
    }

    /// The current lanes wait at their instruction for others.
    fn wait(&mut self) -> ExecResult {
        self.others.push(DivergedLanes { pc: self.pc, mask: self.mask, waiting: true });
        self.next_group()
    }

    fn next_group(&mut self) -> ExecResult {
        let Some(first) = self.others.iter().filter(|g| !g.waiting).map(|g| g.pc).min() else {
            let places: Vec<String> = self.others.iter().map(|g| format!("{:#010x}", g.mask)).collect();
            self.mask = self.others[0].mask;
            self.pc = self.others[0].pc;
            let what = format!(
                "lanes wait here for others of their warp that do not come: groups of lanes {} wait at different instructions",
                places.join(", ")
            );
            return Err(trouble(FaultKind::Divergent, Some(self.mask.trailing_zeros() as usize), what));
        };
        self.pc = first;
        self.mask = 0;
        self.others.retain(|g| {
            let meets = g.pc == first;
            if meets {
                self.mask |= g.mask;
            }
            !meets
        });
        self.meeting = self.others.iter().map(|g| g.pc).filter(|pc| *pc > first).min().unwrap_or(u32::MAX);
        Ok(())
    }

    /// True if all lanes of `needed` that have not left are here; `false` where they have to be waited for.
    fn gathered(&self, s: OperandSources<'_>, needed: u32) -> bool {
        needed & self.live() & !s.m == 0
    }

    /// The same for instructions that all lanes of the warp have to execute together.
    fn whole(&self, s: OperandSources<'_>) -> Result<bool, Box<InstructionFault>> {
        if self.exited != 0 {
            let lane = self.exited.trailing_zeros() as usize;
            let what = "other lanes have come to an instruction of the whole warp that this one has left";
            return Err(trouble(FaultKind::Divergent, Some(lane), what));
        }
        let missing_here = self.mask & !s.m;
        if missing_here != 0 {
            let what = "its predicate keeps this lane from an instruction of the whole warp";
            return Err(trouble(FaultKind::Divergent, Some(missing_here.trailing_zeros() as usize), what));
        }
        Ok(self.gathered(s, self.present))
    }

    /// The value of a mask of lanes, which all lanes give alike and which names the lanes that are here.
    fn lane_mask(
        &self,
        s: OperandSources<'_>,
        mask: crate::ptx::op::WordRegister,
    ) -> Result<u32, Box<InstructionFault>> {
        let masks = self.r.w(s, mask)?;
        let first = masks[s.m.trailing_zeros() as usize];
        for lane in super::lanes(s.m) {
            if masks[lane] != first || first >> lane & 1 == 0 {
                let what = format!("the mask of lanes {:#010x} does not fit this lane", masks[lane]);
                return Err(trouble(FaultKind::Divergent, Some(lane), what));
            }
        }
        Ok(first)
    }

    fn execute(
        &mut self,
        room: &mut BlockContext<'_>,
        s: OperandSources<'_>,
        op: &PtxOp,
    ) -> Result<InstructionFlow, Box<InstructionFault>> {
        match op {
            PtxOp::Float { .. } | PtxOp::FloatOne { .. } | PtxOp::Fma { .. } | PtxOp::SetpF { .. } => {
                floats::execute(&mut self.r, s, op)?;
            }
            PtxOp::HalfFn { .. } | PtxOp::HalfOne { .. } | PtxOp::HalfFma { .. } | PtxOp::SetpH { .. } => {
                halves::execute(&mut self.r, s, op)?;
            }
            PtxOp::Cvt { .. } | PtxOp::CvtPack { .. } => convert::execute(&mut self.r, s, op)?,
            PtxOp::Ld { .. } | PtxOp::St { .. } | PtxOp::LdParam { .. } => loads::execute(self, room, s, op)?,
            PtxOp::CpAsync { .. } | PtxOp::CpCommit | PtxOp::CpWait { .. } => {
                loads::copies(self, room, s, op)?
            }
            PtxOp::Atom { .. } => atoms::execute(self, room, s, op)?,
            PtxOp::Special { d, what } => {
                let values = self.special(room, *what);
                self.r.put_w(*d, &values, s.m);
            }
            PtxOp::Activemask { d } => self.r.put_w(*d, &[s.m; LANES], s.m),
            PtxOp::Shfl { mask, .. } | PtxOp::Vote { mask, .. } | PtxOp::Redux { mask, .. } => {
                let needed = self.lane_mask(s, *mask)?;
                if !self.gathered(s, needed) {
                    return Ok(InstructionFlow::Wait);
                }
                together::execute(&mut self.r, s, op)?;
            }
            PtxOp::WarpSync { mask } => {
                let needed = self.lane_mask(s, *mask)?;
                if !self.gathered(s, needed) {
                    return Ok(InstructionFlow::Wait);
                }
                self.epoch = self.epoch.wrapping_add(1);
            }
            PtxOp::Ldmatrix { .. } | PtxOp::Mma(_) => {
                if !self.whole(s)? {
                    return Ok(InstructionFlow::Wait);
                }
                matrix::execute(self, room, s, op)?;
            }
            PtxOp::Bar { id, threads } => {
                if !self.whole(s)? {
                    return Ok(InstructionFlow::Wait);
                }
                let first = s.m.trailing_zeros() as usize;
                let id = self.r.w(s, *id)?[first];
                let threads = match threads {
                    Some(threads) => Some(self.r.w(s, *threads)?[first]),
                    None => None,
                };
                return Ok(InstructionFlow::Barrier { id, threads });
            }
            PtxOp::Fence { block } => {
                room.synchronised |= !block && room.atomic;
            }
            PtxOp::Trap => return Err(trouble(FaultKind::Trap, None, "the kernel gives up")),
            PtxOp::Nothing | PtxOp::Bra { .. } | PtxOp::Ret => {}
            _ => alu::execute(&mut self.r, s, op)?,
        }
        Ok(InstructionFlow::Next)
    }

    fn special(&self, room: &BlockContext<'_>, what: SpecialRegister) -> WarpLanes<u32> {
        let by_lane = |f: fn(u32) -> u32| std::array::from_fn(|lane| f(lane as u32));
        match what {
            SpecialRegister::Tid(axis) => self.tid[axis],
            SpecialRegister::Ntid(axis) => [room.launch.block[axis]; LANES],
            SpecialRegister::Ctaid(axis) => [room.id[axis]; LANES],
            SpecialRegister::Nctaid(axis) => [room.launch.grid[axis]; LANES],
            SpecialRegister::Lane => by_lane(|lane| lane),
            SpecialRegister::WarpId => [self.number; LANES],
            SpecialRegister::LaneMaskEq => by_lane(|lane| 1 << lane),
            SpecialRegister::LaneMaskLt => by_lane(|lane| (1 << lane) - 1),
            SpecialRegister::LaneMaskLe => by_lane(|lane| (2u32 << lane).wrapping_sub(1)),
            SpecialRegister::LaneMaskGe => by_lane(|lane| !((1 << lane) - 1)),
            SpecialRegister::LaneMaskGt => by_lane(|lane| !(2u32 << lane).wrapping_sub(1)),
        }
    }
}
