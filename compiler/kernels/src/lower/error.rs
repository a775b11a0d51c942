//! Errors of lowering.

/// The reasons why a function could not be lowered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LowerError {
    #[error("internal error in lowering: {0}; please report it with the output of --debug-dump")]
    Internal(String),
    #[error("cannot lower: {what}; {hint}")]
    Unsupported { what: String, hint: String },
    #[error(transparent)]
    Quant(#[from] mlcc_quant::QuantError),
}

impl LowerError {
    pub fn internal(what: impl Into<String>) -> LowerError {
        LowerError::Internal(what.into())
    }
}
