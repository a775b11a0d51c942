//! A block: its warps take turns, in an order that can be chosen, until they meet at barriers.

use super::addresses::ByAddress;
use super::fault::{FaultKind, InstructionFault, LaunchFault, trouble};
use super::launch::{GridLaunch, WarpOrder};
use super::shared::{AccessMoment, BlockSharedMemory};
use super::warp::{Warp, WarpYield};
use crate::count::LaunchCounts;
use crate::memory::block_number;

/// Instructions of a turn.
const QUANTUM: u32 = 512;
/// Turns of a block after which it counts as endless.
const MOST_TURNS: u64 = 1 << 26;

/// State that the warps of a block share.
pub struct BlockContext<'l> {
    pub launch: &'l GridLaunch,
    pub id: [u32; 3],
    /// The number that shadows of memory know it by.
    pub number: u64,
    pub shared: BlockSharedMemory,
    /// Barriers that the block has passed.
    pub epoch: u32,
    /// It has changed something atomically, and then has set a fence.
    pub atomic: bool,
    pub synchronised: bool,
    /// Words of global memory that the block wrote, and when.
    pub own_writes: ByAddress<AccessMoment>,
    /// Bytes of copies that have not been waited for yet.
    pub in_flight: u64,
    /// The place where memory was found last.
    pub hint: usize,
    pub counts: LaunchCounts,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WarpState {
    Ready,
    Waiting { id: u32, threads: Option<u32> },
    Done,
}

pub struct BlockExecutor<'l> {
    pub room: BlockContext<'l>,
    warps: Vec<Warp>,
    states: Vec<WarpState>,
}

impl<'l> BlockExecutor<'l> {
    pub fn new(launch: &'l GridLaunch) -> Self {
        let room = BlockContext {
            launch,
            id: [0; 3],
            number: 0,
            shared: BlockSharedMemory::new(&launch.kernel, launch.shared_bytes),
            epoch: 0,
            atomic: false,
            synchronised: false,
            own_writes: ByAddress::default(),
            in_flight: 0,
            hint: 0,
            counts: LaunchCounts::new(launch.counting, &launch.kernel),
        };
        let threads: u32 = launch.block.iter().product();
        let warps: Vec<Warp> = (0..threads.div_ceil(32)).map(|number| Warp::new(&room, number)).collect();
        let states = vec![WarpState::Ready; warps.len()];
        Self { room, warps, states }
    }

    /// Executes block number `linear` of the grid.
    pub fn run(&mut self, linear: u64) -> Result<(), LaunchFault> {
        let [x, y, _] = self.room.launch.grid.map(u64::from);
        self.room.id = [linear % x, linear / x % y, linear / x / y].map(|i| i as u32);
        self.room.number = block_number(linear);
        self.room.shared.clear();
        (self.room.atomic, self.room.synchronised) = (false, false);
        self.room.own_writes.clear();
        self.room.in_flight = 0;
        self.room.epoch = 0;
        self.room.counts.block();
        self.warps.iter_mut().for_each(Warp::restart);
        self.states.fill(WarpState::Ready);
        let mut picker = WarpScheduler::new(self.room.launch.order, linear);
        for _ in 0..MOST_TURNS {
            if self.states.iter().all(|s| *s == WarpState::Done) {
                return Ok(());
            }
            let Some((index, quantum)) = picker.pick(&self.states) else {
                self.meet()?;
                continue;
            };
            let turn = self.warps[index].run(&mut self.room, quantum);
            let turn = turn.map_err(|t| self.fault(index, *t))?;
            self.states[index] = match turn {
                WarpYield::Over => WarpState::Ready,
                WarpYield::Barrier { id, threads } => WarpState::Waiting { id, threads },
                WarpYield::Done => WarpState::Done,
            };
            if turn != WarpYield::Over {
                self.release()?;
            }
        }
        Err(self.fault(0, *trouble(FaultKind::Endless, None, "the block does not end")))
    }

    /// Lets the warps go on that wait at a barrier where enough threads have arrived.
    fn release(&mut self) -> Result<(), LaunchFault> {
        let all: u32 = self.room.launch.block.iter().product();
        for index in 0..self.states.len() {
            let WarpState::Waiting { id, threads } = self.states[index] else { continue };
            let wanted = threads.unwrap_or(all);
            let waits = |s: &WarpState| matches!(s, WarpState::Waiting { id: other, .. } if *other == id);
            let different = |s: &WarpState| waits(s) && *s != WarpState::Waiting { id, threads };
            if id > 15
                || wanted == 0
                || threads.is_some_and(|n| n % 32 != 0)
                || self.states.iter().any(different)
            {
                let what = format!("barrier {id} for {wanted} threads, others wait there for another number");
                return Err(self.fault(index, *trouble(FaultKind::Divergent, None, what)));
            }
            let here: Vec<usize> = (0..self.states.len()).filter(|i| waits(&self.states[*i])).collect();
            let arrived: u32 = here.iter().map(|i| self.warps[*i].present.count_ones()).sum();
            if arrived >= wanted {
                here.iter().for_each(|i| self.states[*i] = WarpState::Ready);
                self.room.epoch += 1;
                self.room.counts.barrier();
            }
        }
        Ok(())
    }

    /// The fault if no warp can go on.
    fn meet(&self) -> Result<(), LaunchFault> {
        let waiting = |s: &WarpState| matches!(s, WarpState::Waiting { .. });
        let index = self.states.iter().position(waiting).unwrap_or(0);
        let done = self.states.iter().filter(|s| **s == WarpState::Done).count();
        let what = format!(
            "the warp waits at a barrier for ever: {done} of {} warps have left the kernel, the others wait too",
            self.states.len()
        );
        Err(self.fault(index, *trouble(FaultKind::Divergent, None, what)))
    }

    fn fault(&self, index: usize, trouble: InstructionFault) -> LaunchFault {
        let (warp, kernel) = (&self.warps[index], &self.room.launch.kernel);
        // A warp at a barrier has its counter behind it already.
        let waiting = matches!(self.states[index], WarpState::Waiting { .. });
        let pc = (warp.pc as usize).saturating_sub(usize::from(waiting));
        let line = kernel.code.get(pc).map_or(0, |inst| inst.line);
        let thread = trouble.lane.map(|lane| warp.tid.map(|axis| axis[lane as usize & 31]));
        LaunchFault {
            kernel: kernel.name.clone(),
            line,
            text: kernel.source.line(line).split_whitespace().collect::<Vec<_>>().join(" "),
            block: self.room.id,
            warp: warp.number,
            lane: trouble.lane,
            thread,
            kind: trouble.kind,
            what: trouble.what,
        }
    }
}

/// The choice of the next warp.
struct WarpScheduler {
    order: WarpOrder,
    last: usize,
    random: u64,
}

impl WarpScheduler {
    fn new(order: WarpOrder, linear: u64) -> Self {
        let seed = if let WarpOrder::Random(seed) = order { seed } else { 0 };
        Self { order, last: usize::MAX, random: seed ^ linear.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    /// SplitMix64 (Steele, Lea, Flood 2014).
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn pick(&mut self, states: &[WarpState]) -> Option<(usize, u32)> {
        let n = states.len();
        let ready = |i: &usize| states[*i] == WarpState::Ready;
        match self.order {
            WarpOrder::Turns => {
                let first = self.last.wrapping_add(1) % n;
                self.last = (0..n).map(|i| (first + i) % n).find(ready)?;
                Some((self.last, QUANTUM))
            }
            WarpOrder::Backwards => {
                let first = if self.last == usize::MAX || self.last == 0 { n - 1 } else { self.last - 1 };
                self.last = (0..n).map(|i| (first + n - i) % n).find(ready)?;
                Some((self.last, QUANTUM))
            }
            WarpOrder::Random(_) => {
                let all: Vec<usize> = (0..n).filter(ready).collect();
                let index = *all.get((self.next() % all.len().max(1) as u64) as usize)?;
                Some((index, 1 + (self.next() % 64) as u32))
            }
        }
    }
}
