//! mlcc-quant
