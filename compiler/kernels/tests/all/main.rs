//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject.

mod channel_scan;
mod chunk_scan;
mod codes;
mod experts;
mod interleave;
mod machines;
mod product;
mod product_case;
mod row_scan;
mod single_row;
