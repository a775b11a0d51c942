//! States of a sequence that are no caches, of all ranks.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::buffer::AlignedBuffer;
use crate::processes::{RankLeader, RankMessageKind};
use crate::table::{ModelPlan, StateInfo};

/// One rank behind the other. Where ranks are processes, those of rank 0, which leads the others: they have
/// theirs by the address of these, which no other sequence has meanwhile.
pub(super) struct RankStates {
    own: AlignedBuffer,
    /// Bytes of those of one rank.
    rank_bytes: usize,
    ranks: usize,
    leader: Option<Arc<RankLeader>>,
}

impl RankStates {
    pub fn new(plan: &ModelPlan, lead: Option<Arc<RankLeader>>) -> Result<RankStates> {
        let align = plan.alignment.max(mlcc_abi::BUFFER_ALIGN as u64);
        let here = if lead.is_some() { 1 } else { plan.ranks };
        let own = AlignedBuffer::zeroed("the state", plan.state_bytes.saturating_mul(here), align)?;
        let lead = lead.filter(|_| plan.state_bytes > 0);
        let states = RankStates {
            own,
            rank_bytes: plan.state_bytes as usize,
            ranks: plan.ranks as usize,
            leader: lead,
        };
        if let Some(lead) = &states.leader {
            lead.send_message(|message| {
                message.start_message(RankMessageKind::CreateState).push_number(states.state_id())
            });
        }
        Ok(states)
    }

    fn state_id(&self) -> u64 {
        self.own.as_ptr().addr() as u64
    }

    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.own.as_mut_ptr()
    }

    /// Bytes of all ranks.
    pub fn len(&self) -> usize {
        self.rank_bytes * self.ranks
    }

    /// The rank of a state on another process, with its leader, and the place of the state there.
    fn remote_location(&self, state: &StateInfo) -> Option<(&RankLeader, usize, u64)> {
        let (lead, each) = (self.leader.as_deref()?, self.rank_bytes as u64);
        let rank = (state.offset / each) as usize;
        (rank > 0).then_some((lead, rank, state.offset % each))
    }

    pub fn read(&self, state: &StateInfo) -> Cow<'_, [u8]> {
        let Some((lead, rank, at)) = self.remote_location(state) else {
            return self.own.bytes()[state_range(state)].into();
        };
        let mut bytes = vec![0; state.bytes as usize];
        lead.request_bytes(rank, &mut bytes, |message| {
            let message = message.start_message(RankMessageKind::ReadState).push_number(rank as u64);
            message.push_number(self.state_id()).push_number(at).push_number(state.bytes)
        });
        bytes.into()
    }

    pub fn write(&mut self, state: &StateInfo, bytes: &[u8]) {
        let number = self.state_id();
        match self.remote_location(state) {
            None => self.own.bytes_mut()[state_range(state)].copy_from_slice(bytes),
            Some((lead, rank, at)) => lead.send_message(|message| {
                let message = message.start_message(RankMessageKind::WriteState).push_number(rank as u64);
                message.push_number(number).push_number(at).push_bytes(bytes)
            }),
        }
    }

    /// Writes to a state of rank 0, and to that of all others.
    pub fn write_word(&mut self, state: &StateInfo, value: i32) {
        for rank in 0..self.ranks {
            let offset = state.offset + (rank * self.rank_bytes) as u64;
            self.write(&StateInfo { offset, ..state.clone() }, &value.to_le_bytes());
        }
    }

    pub fn copy_from(&mut self, other: &RankStates) {
        self.own.bytes_mut().copy_from_slice(other.own.bytes());
        if let Some(lead) = &self.leader {
            lead.send_message(|message| {
                message
                    .start_message(RankMessageKind::CopyState)
                    .push_number(other.state_id())
                    .push_number(self.state_id())
            });
        }
    }
}

impl Drop for RankStates {
    fn drop(&mut self) {
        if let Some(lead) = &self.leader {
            lead.send_message(|message| {
                message.start_message(RankMessageKind::FreeState).push_number(self.state_id())
            });
        }
    }
}

/// The range of a state that is no cache.
fn state_range(state: &StateInfo) -> Range<usize> {
    state.offset as usize..(state.offset + state.bytes) as usize
}
