//! Tokens that come next most likely.

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenCandidate {
    pub token: i32,
    pub logit: f32,
}

/// Whether the likeliest tokens of a row, by its number, suffice, so that its logits need not be copied.
pub(crate) type AcceptTopK<'a> = &'a mut dyn FnMut(usize, &[TokenCandidate]) -> bool;
