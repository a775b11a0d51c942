//! Candidates for the next token.

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenCandidate {
    pub token: i32,
    pub logit: f32,
}

/// Decides if the top-k candidates of a row, by its number, suffice, so that its logits need not be copied.
pub(crate) type AcceptTopK<'a> = &'a mut dyn FnMut(usize, &[TokenCandidate]) -> bool;
