//! Copies of a sequence: a second session, a snapshot in memory, a file.

use std::borrow::Cow;
use std::path::Path;

use super::Session;
use crate::{Error, Result, StateInfo, state_file};

/// A copy of a session's state in memory.
#[derive(Clone, Debug)]
pub struct SessionSnapshot {
    identity: u128,
    rows: u64,
    /// The live bytes of each state, in the order of the table.
    pieces: Vec<Vec<u8>>,
}

impl Session {
    /// A second session with the same past.
    pub fn fork(&self) -> Result<Self> {
        let memory = self.memory.fork(&self.model, self.rows)?;
        let (rows, dropped, window_row) = (self.rows, self.dropped, self.window_row);
        let (model, adapter) = (self.model.clone(), self.adapter.clone());
        Ok(Self { model, memory, rows, dropped, window_row, adapter, all_logits: None })
    }

    /// Writes position, recurrent states and the cache rows in use to a file (not the logits: feed a token
    /// after loading).
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<()> {
        state_file::save(path.as_ref(), self.identity(), self.rows, &self.live_states()?)
    }

    /// The content that [`Session::save_state`] would write, for another writer.
    pub fn state_file(&self) -> Result<Vec<u8>> {
        Ok(state_file::encode_file(self.identity(), self.rows, &self.live_states()?))
    }

    /// Differs where states are no numbers of this sequence: of another model, or computed with another
    /// adapter.
    fn identity(&self) -> u128 {
        self.model.state_identity() ^ self.adapter.as_ref().map_or(0, crate::LoadedAdapter::identity)
    }

    /// The live bytes of each state, in the order of the table.
    fn live_states(&self) -> Result<Vec<Cow<'_, [u8]>>> {
        self.model.table().states.iter().map(|s| self.memory.state(s, self.rows)).collect()
    }

    /// Replaces state and position by those of a file that `save_state` of the same model wrote. Another
    /// context size is no hindrance as long as the tokens fit. When the file is refused the session is as
    /// before.
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let table = self.model.table();
        let saved = state_file::load(path.as_ref(), self.identity(), table)?;
        let mut rest = saved.state();
        let piece = |s| {
            let (bytes, tail) = rest.split_at(StateInfo::live_bytes(s, saved.past) as usize);
            rest = tail;
            bytes
        };
        let pieces: Vec<&[u8]> = table.states.iter().map(piece).collect();
        self.set_state(saved.past, &pieces)
    }

    /// Position, recurrent states and the cache rows in use, to go back to later.
    pub fn snapshot(&self) -> Result<SessionSnapshot> {
        let pieces = self.live_states()?.into_iter().map(Cow::into_owned).collect();
        Ok(SessionSnapshot { identity: self.identity(), rows: self.rows, pieces })
    }

    /// Goes back, or ahead, to a snapshot of a session of the same model. Feed a token next.
    pub fn restore(&mut self, snapshot: &SessionSnapshot) -> Result<()> {
        let context = self.model.plan().context;
        let fits = context == 0 || snapshot.rows <= context;
        if snapshot.identity != self.identity() || !fits {
            return Err(Error::ForeignSnapshot);
        }
        let pieces: Vec<_> = snapshot.pieces.iter().map(Vec::as_slice).collect();
        self.set_state(snapshot.rows, &pieces)
    }

    /// Replaces all states, in the order of the table.
    fn set_state(&mut self, rows: u64, pieces: &[&[u8]]) -> Result<()> {
        let table = self.model.table();
        let states: Vec<(&StateInfo, &[u8])> = table.states.iter().zip(pieces.iter().copied()).collect();
        self.memory.set_state(&self.model, rows, &states)?;
        self.rows = rows;
        let counted = states.iter().find(|(state, _)| state.dropped_beyond.is_some());
        let counted =
            counted.and_then(|(_, bytes)| i32::from_le_bytes((*bytes).try_into().ok()?).try_into().ok());
        self.dropped = counted.unwrap_or(0);
        // What was dropped is not known, but that whole pages are the most.
        self.window_row = self.sink_rows();
        self.shrink();
        // Its adapter may be in another slot than when the state was taken.
        self.write_slot()
    }
}
