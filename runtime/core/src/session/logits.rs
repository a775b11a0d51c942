//! Logits that stay as they are while the session goes on.

use std::fmt;
use std::ops::Deref;

use super::Session;
use crate::buffer::AlignedBuffer;
use crate::{Error, Result};

/// `vocab` logits that were taken out of a session.
pub struct OwnedLogits(AlignedBuffer);

impl Deref for OwnedLogits {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.as_floats()
    }
}

impl fmt::Debug for OwnedLogits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Logits({})", self.len())
    }
}

impl Session {
    /// Gives the logits of the last position away without a copy; the next step writes into `spare`, logits
    /// without a reader, or else into new memory. Until then [`Session::logits`] is undefined, and so is
    /// everything that depends on it ([`Session::softmax`], the logits of a fork). `spare` of a model with
    /// another vocabulary is [`Error::ForeignLogits`].
    pub fn take_logits(&mut self, spare: Option<OwnedLogits>) -> Result<OwnedLogits> {
        let vocab = self.model.vocab();
        let fresh = match spare {
            Some(OwnedLogits(buffer)) if buffer.len() == 4 * vocab => buffer,
            Some(other) => return Err(Error::ForeignLogits { found: other.len(), expected: vocab }),
            None => AlignedBuffer::floats("the logits", vocab as u64)?,
        };
        Ok(OwnedLogits(self.memory.swap_logits(fresh)))
    }
}
