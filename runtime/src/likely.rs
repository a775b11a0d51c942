//! Tokens that come next most likely.

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likely {
    pub token: i32,
    pub logit: f32,
}
