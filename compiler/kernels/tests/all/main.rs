//! All integration tests of the crate in one program, since linking it is most of a build: one module per subject.

mod codes;
mod contraction;
mod contraction_case;
mod experts;
mod interleave;
mod row_scan;
