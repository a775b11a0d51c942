//! The source text that a sequence of an encoder-decoder model begins with.

use super::{EntryPoint, Session};
use crate::{Error, Result};

/// The number of first tokens that are a source text, which ends at the token `start` that the decoder starts
/// with. `None` where there is none, or nothing before it.
pub fn source_rows(tokens: &[i32], start: i32) -> Option<usize> {
    tokens.iter().position(|&token| token == start).filter(|&rows| rows > 0)
}

impl Session {
    /// The number of `tokens` that are the source text: those of the first call.
    fn source_token_count(&self, tokens: &[i32]) -> Result<usize> {
        match self.model.plan().decoder_start() {
            Some(start) if self.past() == 0 => source_rows(tokens, start).ok_or(Error::NoSource { start }),
            _ => Ok(0),
        }
    }

    pub(super) fn check_source(&self, tokens: &[i32]) -> Result<()> {
        let (n, chunk) = (self.source_token_count(tokens)? as u64, self.model.plan().chunk);
        if n > chunk { Err(Error::SourceTooLong { n, chunk }) } else { Ok(()) }
    }

    /// Reads the source text if `tokens`, which were checked, begin with it; gives those behind it.
    pub(crate) fn read_source<'t>(&mut self, tokens: &'t [i32]) -> Result<&'t [i32]> {
        let (source, rest) = tokens.split_at(self.source_token_count(tokens)?);
        if !source.is_empty() {
            self.run_entry(EntryPoint::Encode, source)?;
        }
        Ok(rest)
    }

    /// Runs [`Session::read_source`], then `feed` with the tokens behind it. When that fails nothing has been
    /// computed: a source that is not followed by its first call would be taken for another one's.
    pub(super) fn forward_after_source(
        &mut self,
        tokens: &[i32],
        feed: impl FnOnce(&mut Self, &[i32]) -> Result<()>,
    ) -> Result<()> {
        let rest = self.read_source(tokens)?;
        let result = feed(self, rest);
        if result.is_err() && rest.len() < tokens.len() {
            // The caller gets the first error.
            let _ = self.reset();
        }
        result
    }

    /// Rows of the source text, of a sequence that has one.
    pub(super) fn source_length(&self) -> Result<Option<u64>> {
        let Some(state) = self.model.table().source_state() else { return Ok(None) };
        let bytes = self.memory.state(state, self.rows)?;
        let length = <[u8; 4]>::try_from(&*bytes).map_or(0, i32::from_le_bytes);
        Ok(Some(u64::try_from(length).unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_ends_before_the_first_start() {
        assert_eq!(source_rows(&[5, 6, 0, 7, 0], 0), Some(2));
        assert_eq!(source_rows(&[5, 6], 0), None);
        assert_eq!(source_rows(&[0, 6], 0), None, "nothing before it");
        assert_eq!(source_rows(&[], 0), None);
    }
}
