//! Logits that stay as they are while the session goes on.

use std::fmt;
use std::ops::Deref;

use super::Session;
use crate::buffer::Buffer;
use crate::{Error, Result};

/// `vocab` logits that were taken out of a session.
pub struct Logits(Buffer);

impl Deref for Logits {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.as_floats()
    }
}

impl fmt::Debug for Logits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Logits({})", self.len())
    }
}

impl Session {
    /// Gives the logits of the last position away without a copy; the next step writes into `spare`, logits that nobody reads any
    /// more, or else into new memory. Until then [`Session::logits`] is undefined, and so is what depends on it
    /// ([`Session::softmax`], the logits of a fork). `spare` of a model with another vocabulary is [`Error::ForeignLogits`].
    pub fn take_logits(&mut self, spare: Option<Logits>) -> Result<Logits> {
        let vocab = self.model.vocab();
        let fresh = match spare {
            Some(Logits(buffer)) if buffer.len() == 4 * vocab => buffer,
            Some(other) => return Err(Error::ForeignLogits { found: other.len(), expected: vocab }),
            None => Buffer::floats("the logits", vocab as u64)?,
        };
        Ok(Logits(self.memory.swap_logits(fresh)))
    }
}
