//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject. Programs that have to be alone in their process are next to it.

mod circles;
mod comments;
mod family_goldens;
mod graph_goldens;
mod literals;
mod names;
mod pass_meaning;
mod setup;
mod streams;
mod structure;
